"""The unfused layer against the reference, on 1 to 8 devices, and its gradients in float64.

Products are judged by the rule that the error against the float64 layer may be at most twice that
of the reference, plus one rounding to BF16. Twice, because both make the same roundings of the same
size, only not always in the same direction; one rounding more, because an FP32 sum in another order
can carry an element over a rounding boundary even where the reference happens to be exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import generators
from jax_megamoe import padding, quantize, reference, unfused, weights
from jax_megamoe.config import MegaMoEConfig, swiglu
from jax_megamoe.errors import MegaMoEError
from moe_case import Case

# TOKENS over all ranks: a token meets the same experts however tokens are split over ranks, so one
# (compiled) reference serves every number of ranks.
TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 104, 8, 3, 256, 128
REFERENCE_RANKS, BLOCK_M = 4, 8
CONFIG = MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, INTER, TOKENS, activation=swiglu(limit=1.0))
BF16_UNIT = 2.0**-8  # largest relative error of one rounding to BF16

STAGE_INPUT = jax.jit(reference.stage_input)


@functools.cache
def expert_weights():
    rng = np.random.default_rng(21)
    dense = generators.dense_weights(rng, EXPERTS, INTER, HIDDEN)
    quantized = jax.jit(weights.quantize_weights)(*dense)
    dense = jax.jit(weights.dequantize_weights)(quantized)
    return quantized, [np.asarray(w).astype(np.float64) for w in dense]


def inputs(kind="uniform", seed=0, num_ranks=2):
    """x [TOKENS, H] bfloat16, topk_idx [TOKENS, K], topk_weights [TOKENS, K]."""
    rng = np.random.default_rng(seed)
    x = generators.tokens(rng, TOKENS, HIDDEN)
    return x, *generators.routing(rng, TOKENS, TOP_K, EXPERTS, kind, num_ranks)


def make_mesh(*shape, axes=("ep",), axis_type=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, devices=devices, axis_types=(axis_type,) * len(shape))


@functools.cache
def layer(num_ranks, **options):
    """Jitted unfused layer on global arrays."""
    mesh = make_mesh(num_ranks)
    return jax.jit(
        lambda x, idx, topk, w, num_tokens=None: unfused.mega_moe(
            x, idx, topk, w, CONFIG, mesh, "ep", num_tokens, **options
        )
    )


def compare(y, x, idx, topk):
    """Applies the rule of this module's docstring."""
    quantized, dense = expert_weights()
    split = (REFERENCE_RANKS, TOKENS // REFERENCE_RANKS, -1)
    x, idx, topk = (a.reshape(split) for a in (x, idx, topk))
    want = reference.mega_moe(x, idx, topk, quantized, CONFIG, block_m=BLOCK_M)
    truth = reference.staged_float64(*STAGE_INPUT(x), idx, topk, *dense, CONFIG)
    got = np.asarray(y).reshape(truth.shape)
    assert got.dtype == want.dtype
    if truth.any():
        allowed = 2 * reference.relative_error(want, truth) + BF16_UNIT
        assert reference.relative_error(got, truth) <= allowed
    unrouted = ~((idx >= 0) & (idx < EXPERTS)).any(-1)
    assert not got[unrouted].astype(np.float32).any()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_matches_the_reference_for_every_routing(num_ranks):
    quantized, _ = expert_weights()
    for kind in generators.ROUTINGS:
        x, idx, topk = inputs(kind, 1, num_ranks)
        y = layer(num_ranks)(x, idx, topk, quantized)
        compare(y, x, idx, topk)


@pytest.mark.parametrize("granularity", [32, 128, "row"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(HIDDEN, INTER), (96, 160)])
def test_granularities_and_widths(granularity, hidden, intermediate):
    """Also from weights of a back end's layout, which are padded."""
    config = MegaMoEConfig(
        EXPERTS, TOP_K, hidden, intermediate, 26, activation_granularity=granularity
    )
    case = Case(np.random.default_rng(20), config, 4, 26, "masked")
    case.add_outliers()
    mesh = make_mesh(4)
    padded = weights.to_layout(padding.pad_weights(case.weights, config), "cpu")
    truth, plain = case.truth(), case.reference()
    allowed = 2 * reference.relative_error(plain, truth) + BF16_UNIT
    for differentiable in (False, True):
        run = jax.jit(
            lambda *operands, d=differentiable: unfused.mega_moe(
                *operands, config, mesh, "ep", differentiable=d
            )
        )
        y = run(*case.operands, case.weights)
        assert reference.relative_error(y, truth) <= allowed
        np.testing.assert_array_equal(
            np.asarray(run(*case.operands, padded), np.float32), np.asarray(y, np.float32)
        )
    if granularity != 32:
        pair = quantize.quantize_e4m3(case.x)
        with pytest.raises(MegaMoEError, match=r"x\[1\]: got scale bytes that differ"):
            unfused.mega_moe(pair, *case.operands[1:], case.weights, config, mesh, "ep")


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all` from its documentation, by gathering everything: CPU has none."""
    every = functools.partial(lax.all_gather, axis_name=axis_name)
    rank, operands = lax.axis_index(axis_name), every(operand)
    starts, sizes, targets = every(input_offsets), every(send_sizes), every(output_offsets)
    row = jnp.arange(output.shape[0])
    for sender in range(lax.axis_size(axis_name)):
        start, size, target = starts[sender, rank], sizes[sender, rank], targets[sender, rank]
        mine = (row >= target) & (row < target + size)
        source = jnp.clip(row - target + start, 0, operand.shape[0] - 1)
        mask = mine.reshape(-1, *[1] * (output.ndim - 1))
        output = jnp.where(mask, operands[sender][source], output)
    return output


@pytest.mark.parametrize(
    ("transport", "gemm"),
    [("all_gather", "blocked"), ("all_to_all", "ragged_dot"), ("ragged_all_to_all", "blocked")],
)
def test_transports_and_gemms(transport, gemm, monkeypatch):
    if transport == "ragged_all_to_all":
        # On CPU the collective is emulated, so that the layer's offsets and sizes are tested.
        monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
        monkeypatch.setattr(unfused._layer, "choose", lambda *_: (transport, gemm))
    quantized, _ = expert_weights()
    for kind in generators.ROUTINGS:
        x, idx, topk = inputs(kind, 2, num_ranks=4)
        y = layer(4, transport=transport, gemm=gemm)(x, idx, topk, quantized)
        compare(y, x, idx, topk)


def test_num_tokens_quantised_input_layout_and_float_types():
    quantized, _ = expert_weights()
    x, idx, topk = inputs(seed=3)
    used = np.array([17, 0], np.int32)
    per_rank = TOKENS // 2
    hidden_rows = np.arange(TOKENS) % per_rank >= np.repeat(used, per_rank)
    bad_x, bad_idx, bad_topk = x.copy(), idx.copy(), topk.astype(jnp.bfloat16)
    bad_x[hidden_rows], bad_idx[hidden_rows], bad_topk[hidden_rows] = np.nan, 2**31 - 1, np.nan
    codes, sf = STAGE_INPUT(bad_x)
    pair = (lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), sf)
    cpu_layout = jax.jit(weights.to_layout, static_argnums=1)(quantized, "cpu")
    y = layer(2)(pair, bad_idx, bad_topk, cpu_layout, used)
    idx[hidden_rows] = -1
    compare(y, x, idx, topk.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("gemm", ["blocked", "ragged_dot"])
def test_a_non_finite_token_stays_alone(gemm):
    quantized, _ = expert_weights()
    x, idx, topk = inputs("duplicates", 4)
    run = layer(4) if gemm == "blocked" else layer(4, transport="all_to_all", gemm=gemm)
    clean = np.asarray(run(x, idx, topk, quantized)).astype(np.float32)
    for poison in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[20, 100], bad[33] = poison, 0
        got = np.asarray(run(bad, idx, topk, quantized)).astype(np.float32)
        assert np.isnan(got[20]).all() and not got[33].any()
        others = np.delete(np.arange(len(x)), [20, 33])
        np.testing.assert_array_equal(got[others], clean[others])


def test_int64_ids_do_not_wrap_around():
    quantized, _ = expert_weights()
    x, idx, topk = inputs(seed=5)
    wide = idx.astype(np.int64)
    wide[3, 1] += 2**32  # an id that int32 would turn back into a valid one
    idx[3, 1] = -1
    with jax.enable_x64(True):
        y = layer(2)(x, wide, topk, quantized)
    np.testing.assert_array_equal(
        np.asarray(y).astype(np.float32),
        np.asarray(layer(2)(x, idx, topk, quantized)).astype(np.float32),
    )


def test_no_tokens_at_all():
    quantized, _ = expert_weights()
    x, idx, topk = (a[:0] for a in inputs())
    for differentiable in (False, True):
        y = layer(2, differentiable=differentiable)(x, idx, topk, quantized)
        assert y.shape == (0, HIDDEN) and y.dtype == jnp.bfloat16


def test_mesh_with_explicit_axes():
    quantized, _ = expert_weights()
    x, idx, topk = inputs(seed=6)
    mesh = make_mesh(2, axis_type=AxisType.Explicit)
    run = jax.jit(lambda *a: unfused.mega_moe(*a, CONFIG, mesh, "ep"))
    compare(run(x, idx, topk, quantized), x, idx, topk)


# Gradients ---------------------------------------------------------------------------------------


def float64_gradients(x, idx, topk, cotangent):
    """Gradients of ``sum(y * cotangent)`` in x and topk_weights; exact, no quantisation but x's."""
    _, (w_gate, w_up, w_down) = expert_weights()
    limit = CONFIG.activation.limit
    dx, dtopk = np.zeros(x.shape), np.zeros(topk.shape)
    for t, k in np.ndindex(idx.shape):
        e = idx[t, k]
        if not 0 <= e < EXPERTS:
            continue
        gate, up = w_gate[e] @ x[t], w_up[e] @ x[t]
        gate_open, up_open = gate < limit, np.abs(up) < limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        sigmoid = 1 / (1 + np.exp(-gate))
        d_act = w_down[e].T @ cotangent[t]
        dtopk[t, k] = np.sum(d_act * gate * sigmoid * up)
        d_act = d_act * topk[t, k]
        d_gate = d_act * up * (sigmoid + gate * sigmoid * (1 - sigmoid)) * gate_open
        d_up = d_act * gate * sigmoid * up_open
        dx[t] += w_gate[e].T @ d_gate + w_up[e].T @ d_up
    return dx, dtopk


def quantised_values(x):
    values = jax.jit(lambda v: quantize.dequantize_e4m3(*quantize.quantize_e4m3(v)))(x)
    return np.asarray(values).astype(np.float64)


def check_gradients(gradients, x, idx, topk, cotangent):
    """Within the roundings of the backward pass.

    It rounds to BF16 the gradients of rows, of linear 2's input, of linear 1's input and of x: four
    roundings of tensors that depend on each other linearly, each off by at most one unit in norm.
    Errors of single elements are independent of the matrices, so a matrix magnifies them no more
    than it magnifies the gradient, up to a factor that 2 covers for these random ones.
    """
    want = float64_gradients(quantised_values(x), idx, topk.astype(np.float64), cotangent)
    assert gradients[0].dtype == jnp.bfloat16 and gradients[1].dtype == jnp.float32
    for got, exact in zip(gradients, want, strict=True):
        got = np.asarray(got).astype(np.float64)
        assert reference.relative_error(got, exact) <= 2 * 4 * BF16_UNIT
        assert not got[exact == 0].any()


@functools.cache
def value_and_gradients(run):
    """Jitted (x, idx, topk, cotangent) -> y, (dx, dtopk) of ``sum(y * cotangent)``."""

    def loss(x, topk, idx, cotangent, w):
        y = run(x, idx, topk, w)
        return jnp.sum(y.astype(jnp.float32) * cotangent), y

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    def evaluate(x, idx, topk, cotangent):
        gradients, y = grad(x, topk, idx, cotangent.astype(np.float32), expert_weights()[0])
        return y, gradients

    return evaluate


def random_cotangent(shape, seed):
    cotangent = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(jnp.asarray(cotangent, jnp.bfloat16)).astype(np.float64)


def test_float64_gradients_are_those_of_the_dense_layer():
    x, idx, topk = inputs("duplicates", 7)
    x, topk = quantised_values(x), topk.astype(np.float64)
    cotangent = random_cotangent(x.shape, 8)
    dx, dtopk = float64_gradients(x, idx, topk, cotangent)
    rng = np.random.default_rng(9)
    step = 1e-6

    def loss(x, topk):
        y = reference.dense_float64(x[None], idx[None], topk[None], *expert_weights()[1], CONFIG)
        return np.sum(y * cotangent)

    for _ in range(3):
        vx, vt = rng.standard_normal(x.shape), rng.standard_normal(topk.shape)
        ahead = loss(x + step * vx, topk + step * vt)
        behind = loss(x - step * vx, topk - step * vt)
        slope = (ahead - behind) / (2 * step)
        # Clamps that the step crosses bend the loss: their share is of the order of the step.
        np.testing.assert_allclose(np.sum(dx * vx) + np.sum(dtopk * vt), slope, rtol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_gradients(num_ranks):
    kind = "duplicates" if num_ranks == 1 else "masked"
    x, idx, topk = inputs(kind, 10)
    cotangent = random_cotangent(x.shape, 11)
    run = layer(num_ranks, differentiable=True)
    y, gradients = value_and_gradients(run)(x, idx, topk, cotangent)
    plain = layer(num_ranks)(x, idx, topk, expert_weights()[0])
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16), np.asarray(plain).view(np.uint16))
    check_gradients(gradients, x, idx, topk, cotangent)


def test_gradients_do_not_depend_on_check_vma():
    x, idx, topk = inputs("out_of_range", 12)
    cotangent = random_cotangent(x.shape, 13)
    checked, unchecked = (
        value_and_gradients(run)(x, idx, topk, cotangent)[1]
        for run in (
            layer(4, differentiable=True),
            layer(4, differentiable=True, check_vma=False),
        )
    )
    check_gradients(checked, x, idx, topk, cotangent)
    jax.tree.map(np.testing.assert_array_equal, checked, unchecked)


def test_gradients_through_all_gather():
    x, idx, topk = inputs(seed=18)
    cotangent = random_cotangent(x.shape, 19)
    run = layer(2, differentiable=True, transport="all_gather")
    _, gradients = value_and_gradients(run)(x, idx, topk, cotangent)
    check_gradients(gradients, x, idx, topk, cotangent)


def test_gradient_of_a_routing_weight_is_its_experts_row():
    # SwiGLU is quantised after the weight, so doubling one weight doubles its row exactly: the
    # difference quotient is the row itself, with no step size to choose.
    quantized, _ = expert_weights()
    x, idx, topk = inputs(seed=14)
    topk[:, 1:] = 0  # rows of slots 1 and 2 vanish, so that no other row is rounded together
    run = layer(4, differentiable=True)
    doubled = topk.copy()
    doubled[:, 0] *= 2
    once, twice = (
        np.asarray(layer(4)(x, idx, t, quantized)).astype(np.float64) for t in (topk, doubled)
    )
    np.testing.assert_array_equal(twice, 2 * once)
    cotangent = random_cotangent(x.shape, 15)
    _, (_, dtopk) = value_and_gradients(run)(x, idx, topk, cotangent)
    slope = np.sum((twice - once) * cotangent, axis=1) / topk[:, 0]
    # The row carries the E4M3 rounding of SwiGLU, which the straight-through gradient leaves out:
    # at most 2^-4 an element, and the same roundings to BF16 as in check_gradients.
    error = reference.relative_error(np.asarray(dtopk)[:, 0], slope)
    assert error <= 2**-4 + 8 * BF16_UNIT


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_and_expert_axes(check_vma):
    mesh = make_mesh(2, 2, axes=("data", "ep"))
    rows = P(("data", "ep"))
    x, idx, topk = inputs(seed=16)
    cotangent = random_cotangent(x.shape, 17)

    def run(x, idx, topk, w):
        body = functools.partial(unfused.local, config=CONFIG, axis="ep", differentiable=True)
        specs = (rows, rows, rows, P("ep"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=check_vma)
        return mapped(x, idx, topk, w)

    y, gradients = value_and_gradients(run)(x, idx, topk, cotangent)
    compare(y, x, idx, topk)
    check_gradients(gradients, x, idx, topk, cotangent)


# Choices and refusals ----------------------------------------------------------------------------


def on_mesh(function, *arguments):
    mapped = jax.shard_map(
        lambda: function(*arguments) and jnp.zeros(1), mesh=make_mesh(1), in_specs=(), out_specs=P()
    )
    jax.eval_shape(mapped)


NARROW = MegaMoEConfig(EXPERTS, TOP_K, HIDDEN, 96, TOKENS)


def test_mosaic_is_not_chosen_for_parts_of_tiles(monkeypatch):
    monkeypatch.setattr(unfused._choice, "_target", lambda: ("cuda", None))
    monkeypatch.setattr(unfused._choice, "_is_hopper", lambda _: True)
    monkeypatch.setattr(unfused._choice, "_has_mosaic", lambda: True)
    assert unfused.choose("auto", "auto", config=CONFIG)[1] == "mosaic"
    assert unfused.choose("auto", "auto", config=NARROW)[1] == "ragged_dot"


def test_choices_on_cpu():
    chosen = []
    on_mesh(lambda: chosen.append(unfused.choose("auto", "auto")) or True)
    on_mesh(lambda: chosen.append(unfused.choose("all_gather", "ragged_dot", True)) or True)
    assert chosen == [("all_to_all", "blocked"), ("all_gather", "ragged_dot")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ragged_all_to_all", "auto"), "XLA:CPU does not implement ragged_all_to_all"),
        (("auto", "mosaic"), "compute capability 9.0"),
        (("auto", "mosaic", False, NARROW), r"'mosaic' with hidden, intermediate = \(256, 96\)"),
        (("nccl", "auto"), "transport: got 'nccl'"),
        (("auto", "cublas"), "gemm: got 'cublas'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(MegaMoEError, match=message):
        on_mesh(unfused.choose, *arguments)


def test_errors_name_the_operand():
    quantized, _ = expert_weights()
    x, idx, topk = inputs()
    for message, arguments in (
        ("x: got float32", (x.astype(np.float32), idx, topk)),
        ("topk_idx: got int32", (x, idx[:, :2], topk)),
        ("topk_weights: got int32", (x, idx, idx)),
    ):
        for differentiable in (False, True):
            with pytest.raises(MegaMoEError, match=message):
                layer(2, differentiable=differentiable)(*arguments, quantized)
    with pytest.raises(MegaMoEError, match=r"weights\.w13"):
        half = jax.tree.map(lambda a: a[:4], quantized)
        layer(2)(x, idx, topk, half)


@pytest.mark.parametrize("check_vma", [True, False])
def test_mosaic_lowers_for_cuda(check_vma, monkeypatch):
    # No GPU needed: JAX lowers its Hopper kernel on any host. Its module imports absl.
    pytest.importorskip("absl")
    quantized, _ = expert_weights()
    monkeypatch.setattr(unfused._layer, "choose", lambda *_: ("all_to_all", "mosaic"))
    run = layer(2, gemm="mosaic", check_vma=check_vma)
    lowered = run.trace(*inputs(), quantized).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


def test_wide_weights_give_the_same_bits_and_are_checked():
    quantized, _ = expert_weights()
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    step = jax.jit(lambda x, i, p, w: unfused.mega_moe(x, i, p, w, CONFIG, mesh, "ep"))
    wide = jax.jit(unfused.widen_weights)(quantized)
    got, want = (np.asarray(step(*inputs(), w), np.float32) for w in (wide, quantized))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(MegaMoEError, match=r"weights\.w2: got .*widen_weights"):
        step(*inputs(), wide._replace(w2=wide.w13))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_no_tokens(check_vma):
    weights_, _ = expert_weights()
    mesh = jax.make_mesh((4,), ("ep",), (AxisType.Auto,))
    x, idx, topk = jnp.zeros((0, HIDDEN), jnp.bfloat16), *(jnp.zeros((0, TOP_K), t) for t in "if")

    def loss(x, topk):
        y = unfused.mega_moe(
            x, idx, topk, weights_, CONFIG, mesh, "ep", differentiable=True, check_vma=check_vma
        )
        return y.astype(jnp.float32).sum() + topk.sum()

    dx, dp = jax.jit(jax.grad(loss, (0, 1)))(x, topk)
    assert (dx.shape, dx.dtype, dp.shape) == (x.shape, x.dtype, topk.shape)
