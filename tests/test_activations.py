"""Every activation and biases, on the CPU back end, in the reference and in the unfused layer.

The formulas stand here once more, written for this file alone, so that a mistake in
`reference.activate_float64` cannot hide.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from jax_megamoe import reference, unfused
from jax_megamoe._ffi import native
from jax_megamoe.config import ACTIVATIONS, GRANULARITIES
from jax_megamoe.symmetric import activation_number, activation_params
from moe_case import Case, mesh_of

KINDS = {
    "swiglu": jmm.swiglu(limit=3.0),
    "gpt_oss_swiglu": jmm.gpt_oss_swiglu(limit=3.0),
    "situ": jmm.situ(beta=1.5, linear_beta=4.0),  # sums of order one come close to the bounds
}
RANKS, TOKENS = 4, 37
CONFIG = jmm.MegaMoEConfig(
    num_experts=8, top_k=3, hidden=256, intermediate=128, max_tokens_per_rank=48, timeout_s=60.0
)
FP32_UNIT = 2.0**-24


def config_of(kind, granularity=32):
    return dataclasses.replace(CONFIG, activation=KINDS[kind], activation_granularity=granularity)


def formula(gate, up, activation):
    """In float64, from the publishers' formulas; exp is never asked for more than it can hold."""
    gate, up = np.float64(gate), np.float64(up)

    def sigmoid(z):
        return 0.5 * (1 + np.tanh(z / 2)) if z > 0 else np.exp(z) / (1 + np.exp(z))

    if activation.kind == "situ":
        beta, linear_beta = activation.beta, activation.linear_beta
        return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)
    if activation.limit is not None:
        gate = activation.limit if gate > activation.limit else gate
        up = np.sign(up) * activation.limit if abs(up) > activation.limit else up
    if activation.kind == "gpt_oss_swiglu":
        return gate * sigmoid(activation.alpha * gate) * (up + 1)
    return gate * sigmoid(gate) * up


def edge_values(activation):
    """gate and up, all pairs: both sides of every decision, tiny, large, and what overflows exp."""
    limit = np.float32(activation.limit or 2.0)
    near = [np.nextafter(limit, np.float32(0)), limit, np.nextafter(limit, np.float32(9e9))]
    some = [0.0, 1e-30, 1e-6, 0.3, 0.499, 0.5, 0.501, 1.0, *near, 30.0, 80.0, 88.8, 1e4, 3e38]
    values = np.float32([*some, *(-np.float32(some))])
    gate, up = np.meshgrid(values, values)
    return gate.ravel(), up.ravel()


def native_activate(gate, up, weight, activation):
    number, params = activation_number(activation), activation_params(activation).tolist()
    return native.activate(gate, up, weight, number, params)


def reference_activate(gate, up, weight, activation):
    rows = np.stack([gate, up], axis=1)
    return np.asarray(reference.activate(rows, weight, activation))[:, 0]


@pytest.mark.parametrize("compute", [native_activate, reference_activate])
@pytest.mark.parametrize("activation", [*KINDS.values(), jmm.swiglu()], ids=str)
def test_values_at_every_edge(compute, activation):
    """A few FP32 roundings of the formula, wherever that is a normal number.

    exp's argument is rounded, which moves it by |argument| 2^-24; results of exp and tanh are good
    to 8 units (XLA's approximations), and at most 8 other operations round once each.
    """
    gate, up = edge_values(activation)
    weight = np.full(gate.shape, 0.75, np.float32)
    got = compute(gate, up, weight, activation)
    want = np.array([formula(g, u, activation) for g, u in zip(gate, up, strict=True)]) * 0.75
    slope = np.minimum(np.abs(gate), 104) * (activation.alpha or 1)  # exp(-104) is zero in FP32
    # Where exp overflows, the gate's side, below 2^-120, is flushed to zero.
    flushed = 2.0**-120 * (1 + np.abs(up.astype(np.float64)))
    bound = (24 + slope) * FP32_UNIT * np.abs(want) + flushed
    # Beyond what FP32 holds an infinity is right; and 0.75 times a number is exact before that.
    fits = np.abs(want) < 3e38
    assert fits.mean() > 0.8
    assert (np.abs(got - want) <= bound)[fits].all()
    assert np.isinf(got[np.abs(want) > 3.5e38]).all()


@pytest.mark.parametrize("compute", [native_activate, reference_activate])
@pytest.mark.parametrize("activation", KINDS.values(), ids=str)
def test_nan_and_infinity(compute, activation):
    """A NaN stays one; infinities give what the formula's limit is, or a NaN of 0 * infinity."""
    inf, nan = np.inf, np.nan
    gate = np.float32([nan, 1, nan, inf, 1, 1, inf, -inf])
    up = np.float32([1, nan, nan, 1, inf, -inf, inf, 1])
    got = compute(gate, up, np.ones(8, np.float32), activation)
    assert np.isnan(got[:3]).all()
    with np.errstate(invalid="ignore"):
        top = activation.limit or 1e6
        want = [formula(*pair, activation) for pair in [(top, 1), (1, top), (1, -top), (top, top)]]
    np.testing.assert_allclose(got[3:7], want, rtol=1e-6)
    if activation.kind == "situ":  # bounded: -beta times a sigmoid of zero
        assert got[7] == 0
    else:  # -infinity times a sigmoid of zero
        assert np.isnan(got[7])


@pytest.mark.parametrize("activation", KINDS.values(), ids=str)
def test_zero_rows_stay_zero(activation):
    """Padding and all-zero tokens: a gate of zero gives zero, whatever is added to up."""
    zeros = np.zeros(4, np.float32)
    for compute in (native_activate, reference_activate):
        assert (compute(zeros, np.float32([0, 1, -1, 9]), zeros + 1, activation) == 0).all()


@pytest.mark.parametrize("activation", KINDS.values(), ids=str)
def test_gradient_at_both_ends(activation):
    """Against central differences of the float64 formula; never a NaN where exp overflows."""
    rng = np.random.default_rng(4)
    gate = np.float64([-3e38, -200, -89, -5, -0.5, 0.1, 1, 2.5, 30, 200, *rng.normal(size=20)])
    up = np.float64([*np.linspace(-2.5, 2.5, 10), *rng.normal(size=20)])

    def total(gate, up):
        rows = jnp.stack([gate, up], axis=1)
        return jnp.sum(reference.activate(rows, jnp.ones(len(gate)), activation))

    got = np.stack(jax.grad(total, (0, 1))(jnp.float32(gate), jnp.float32(up)))
    assert np.isfinite(got).all()
    step = 1e-6
    some = np.abs(gate) < 100  # where gate + step is another number
    for g, u, slopes in zip(gate[some], up[some], got.T[some], strict=True):
        want = [
            (formula(g + step, u, activation) - formula(g - step, u, activation)) / (2 * step),
            (formula(g, u + step, activation) - formula(g, u - step, activation)) / (2 * step),
        ]
        # Differences: step^2 times a third derivative of order ten, and 2^-53 of values up to 30.
        np.testing.assert_allclose(slopes, want, rtol=2.0**-19, atol=1e-8)


def test_float64_reference_is_the_formula():
    rng = np.random.default_rng(5)
    gate, up = 4 * rng.standard_normal((2, 300))
    for activation in (*KINDS.values(), jmm.swiglu()):
        got = reference.activate_float64(gate, up, activation)
        want = [formula(g, u, activation) for g, u in zip(gate, up, strict=True)]
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_names_and_numbers_agree_with_the_native_module():
    assert native.ACTIVATIONS == tuple(ACTIVATIONS) == tuple(KINDS)
    with pytest.raises(ValueError, match=r"activation: got 3; expected one of 0 \(swiglu\), 1"):
        native.activate(*np.ones((3, 1), np.float32), 3, [1.0] * 4)


# The layer ---------------------------------------------------------------------------------------


def case_of(kind, biased, granularity=32, tokens=TOKENS, routing="masked", seed=8):
    rng = np.random.default_rng(seed)
    case = Case(rng, config_of(kind, granularity), RANKS, tokens, routing)
    if biased:
        case.add_biases(rng)
    return case


@pytest.fixture(scope="module")
def results():
    """(kind, biased, granularity) -> (case, y of the CPU back end, truth, reference)."""
    made = {}
    mesh = mesh_of(RANKS)
    for kind, biased, granularity in itertools.product(KINDS, (False, True), GRANULARITIES):
        case = case_of(kind, biased, granularity)
        with jmm.MegaMoE(case.config, mesh) as layer:
            layer.buffer.poison()
            y = np.asarray(jax.jit(layer)(*case.operands, layer.shard(case.weights)))
        made[kind, biased, granularity] = case, y, case.truth(), case.reference()
    return made


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_meets_the_error_rule(results, kind, biased, granularity):
    _, y, truth, plain = results[kind, biased, granularity]
    limit = 2 * np.linalg.norm(plain - truth)
    assert np.linalg.norm(np.float64(y) - truth) <= limit
    assert (np.float64(y)[~truth.any(axis=1)] == 0).all()
    others = [(other, biased) for other in set(KINDS) - {kind}] + [(kind, not biased)]
    for other in others:  # and no other computation would do
        assert np.linalg.norm(np.float64(results[*other, granularity][1]) - truth) > 4 * limit


@pytest.mark.parametrize("granularity", [32, 128])  # those of SwiGLU's output
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unfused_agrees(results, kind, biased, granularity):
    """One unit of BF16 more than the error rule, as docs/numerics.md says of the unfused layer."""
    case, _, truth, plain = results[kind, biased, granularity]
    limit = 2 * np.linalg.norm(plain - truth) + 2.0**-8 * np.linalg.norm(truth)
    wide = unfused.widen_weights(case.weights)
    for gemm, weights in (("blocked", case.weights), ("ragged_dot", wide)):
        layer = functools.partial(
            unfused.mega_moe, config=case.config, mesh=mesh_of(RANKS), axis="ep", gemm=gemm
        )
        y = np.asarray(jax.jit(layer)(*case.operands, weights), np.float64)
        assert np.linalg.norm(y - truth) <= limit


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_unfused_transports_with_biases(results, transport):
    case, _, truth, plain = results["gpt_oss_swiglu", True, 32]
    layer = functools.partial(
        unfused.mega_moe, config=case.config, mesh=mesh_of(RANKS), axis="ep", transport=transport
    )
    y = np.asarray(jax.jit(layer)(*case.operands, case.weights), np.float64)
    limit = 2 * np.linalg.norm(plain - truth) + 2.0**-8 * np.linalg.norm(truth)
    assert np.linalg.norm(y - truth) <= limit


def expert_formula(case, x, expert, p):
    """One slot in float64, token by token: p * (W2 act(W1 x + b1) + b2), without E4M3 of act."""
    w_gate, w_up, w_down = (
        np.asarray(w[expert], np.float64) for w in jmm.dequantize_weights(case.weights)
    )
    intermediate = case.config.intermediate
    b13, b2 = (np.asarray(b[expert], np.float64) for b in (case.weights.b13, case.weights.b2))
    gate, up = w_gate @ x + b13[:intermediate], w_up @ x + b13[intermediate:]
    acts = [formula(g, u, case.config.activation) for g, u in zip(gate, up, strict=True)]
    return p * (w_down @ np.array(acts) + b2)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_reference_weights_biases_token_by_token(kind):
    case = case_of(kind, True, tokens=3)
    x, idx, p = (np.asarray(case.by_rank(a)) for a in case.operands)
    dense = jmm.dequantize_weights(case.weights)
    biases = jmm.expert_biases(case.weights)
    got = reference.dense_float64(x, idx, p, *dense, case.config, biases=biases)
    want = np.zeros(x.shape)
    for rank, token, k in np.argwhere(idx >= 0):
        row = np.float64(x[rank, token])
        want[rank, token] += expert_formula(
            case, row, idx[rank, token, k], np.float64(p[rank, token, k])
        )
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    # The staged one differs by E4M3's roundings of x and of the activation, 2^-4 each at most.
    staged = case.truth().reshape(want.shape)
    assert 0 < np.linalg.norm(staged - want) <= 2.0**-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("kind", "biased"), [("swiglu", True), ("gpt_oss_swiglu", True), ("situ", False)]
)
def test_layer_gradient_is_that_of_the_unfused_layer(kind, biased):
    """Of x, of the routing weights and of biases. FP4 weights have none."""
    case = case_of(kind, biased, tokens=8, routing="uniform", seed=9)
    mesh = mesh_of(RANKS)

    def loss(call, weights):
        def run(x, p, biases):
            own = dataclasses.replace(weights, b13=biases[0], b2=biases[1])
            return jnp.sum(jnp.square(call(x, case.topk_idx, p, own).astype(jnp.float32)))

        return jax.jit(jax.grad(run, (0, 1, 2)))

    plain = functools.partial(
        unfused.mega_moe, config=case.config, mesh=mesh, axis="ep", differentiable=True
    )
    with jmm.MegaMoE(case.config, mesh) as layer:
        weights = layer.shard(case.weights)
        biases = (weights.b13, weights.b2)
        got = loss(layer, weights)(case.x, case.topk_weights, biases)
        want = loss(plain, weights)(case.x, case.topk_weights, biases)
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) == (4 if biased else 2)
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(a, np.float64) for a in (g, w))
        assert np.linalg.norm(w) > 0
        # The cotangent is 2 y: y of the two differs by roundings of codes, 2^-8 in norm each.
        assert np.linalg.norm(g - w) <= 2.0**-6 * np.linalg.norm(w)


def test_gradient_of_biases_is_the_slope_of_the_float64_layer():
    """Straight-through: the slope of a layer without roundings, E4M3's 2^-4 aside."""
    case = case_of("gpt_oss_swiglu", True, tokens=8, routing="uniform", seed=13)
    rng = np.random.default_rng(14)
    x, idx, p = (np.asarray(case.by_rank(a), np.float64) for a in case.operands)
    dense = jmm.dequantize_weights(case.weights)
    cotangent = rng.standard_normal(case.x.shape)

    def loss64(biases):
        y = reference.dense_float64(x, idx, p, *dense, case.config, biases=biases)
        return np.sum(y.reshape(cotangent.shape) * cotangent)

    with jmm.MegaMoE(case.config, mesh_of(RANKS)) as layer:

        def loss(b13, b2):
            weights = layer.shard(dataclasses.replace(case.weights, b13=b13, b2=b2))
            return jnp.sum(layer(*case.operands, weights).astype(jnp.float32) * cotangent)

        got = jax.jit(jax.grad(loss, (0, 1)))(case.weights.b13, case.weights.b2)
    directions = [rng.standard_normal(g.shape) for g in got]
    b_gate, b_up, b_down = (np.asarray(b, np.float64) for b in jmm.expert_biases(case.weights))
    step = 1e-5
    for i in range(2):
        d13 = directions[0] if i == 0 else np.zeros_like(directions[0])
        d_down = directions[1] if i == 1 else np.zeros_like(directions[1])
        d_gate, d_up = np.split(step * d13, 2, axis=1)
        ends = [
            loss64((b_gate + s * d_gate, b_up + s * d_up, b_down + s * step * d_down))
            for s in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        size = np.linalg.norm(got[i]) * np.linalg.norm(directions[i])
        assert abs(np.sum(got[i] * directions[i]) - slope) <= 2.0**-4 * size
        assert abs(slope) > 2.0**-6 * size / np.sqrt(directions[i].size)


def test_layers_of_different_activations_share_a_buffer():
    case = case_of("swiglu", True)
    mesh = mesh_of(RANKS)
    plain = dataclasses.replace(case.weights, b13=None, b2=None)
    layers = {kind: jmm.MegaMoE(config_of(kind), mesh) for kind in KINDS}
    try:
        assert len({layer.buffer.key for layer in layers.values()}) == 1
        sharded = [layers["situ"].shard(weights) for weights in (case.weights, plain)]

        @jax.jit
        def all_of_them(*operands):
            return {
                (kind, biased): layer(*operands, weights)
                for kind, layer in layers.items()
                for biased, weights in zip((True, False), sharded, strict=True)
            }

        biased_weights = case.weights
        for (kind, biased), y in all_of_them(*case.operands).items():
            case.config = config_of(kind)
            case.weights = biased_weights if biased else plain
            case.check(y)
    finally:
        for layer in layers.values():
            layer.close()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_token_stays_alone(kind, biased):
    case = case_of(kind, biased, tokens=9, routing="uniform")
    with jmm.MegaMoE(case.config, mesh_of(RANKS)) as layer:
        weights, step = layer.shard(case.weights), jax.jit(layer)
        clean = np.asarray(step(*case.operands, weights), np.float32)
        x = np.array(case.x, np.float32)
        x[5, 7], x[6] = np.inf, 0
        x = jnp.asarray(x, jnp.bfloat16)
        dirty = np.asarray(step(x, *case.operands[1:], weights), np.float32)
    assert np.isnan(dirty[5]).all()
    assert (dirty[6] == 0).all() != biased  # of a zero token the biases are left
    others = np.setdiff1d(np.arange(len(dirty)), [5, 6])
    np.testing.assert_array_equal(dirty[others], clean[others])
    case.x = case.x.at[6].set(0)
    dirty[5] = clean[5]
    case.check(dirty)


def test_zero_weights_leave_the_weighted_bias_alone():
    """With W2 = 0 and exact numbers y is sum_k p_k b2 to the bit: no activation, no rounding."""
    case = case_of("situ", True)
    weights = case.weights
    b2 = jnp.asarray(np.random.default_rng(3).integers(-8, 9, weights.b2.shape), jnp.float32)
    case.weights = dataclasses.replace(weights, w2=jnp.zeros_like(weights.w2), b2=b2)
    case.topk_weights = jnp.round(case.topk_weights * 4) / 4
    with jmm.MegaMoE(case.config, mesh_of(RANKS)) as layer:
        y = jax.jit(layer)(*case.operands, layer.shard(case.weights))
    idx, p = np.asarray(case.topk_idx), np.asarray(case.topk_weights)
    want = np.where((idx >= 0)[..., None], p[..., None] * np.asarray(b2)[idx], 0).sum(axis=1)
    assert want.any()
    np.testing.assert_array_equal(np.asarray(y, np.float32), want)
    plain = functools.partial(unfused.mega_moe, config=case.config, mesh=mesh_of(RANKS), axis="ep")
    unfused_y = jax.jit(plain)(*case.operands, case.weights)
    np.testing.assert_array_equal(np.asarray(unfused_y, np.float32), want)


@pytest.mark.parametrize("ring_tokens", [1, 64])
def test_a_small_ring_keeps_the_weights_of_biases_apart(ring_tokens):
    """A later lap takes the ring slot while linear 2 still needs the weights of the earlier one."""
    case = case_of("gpt_oss_swiglu", True, tokens=48, routing="zipf")
    ys = []
    for ring in (None, ring_tokens):
        config = dataclasses.replace(case.config, ring_tokens=ring)
        with jmm.MegaMoE(config, mesh_of(RANKS)) as layer:
            layer.buffer.poison()
            step = jax.jit(lambda *a, layer=layer: layer(*a, return_stats=True))
            y, stats = step(*case.operands, layer.shard(case.weights))
            ys.append(np.asarray(y))
    assert np.asarray(stats.ring_laps).max() > 1
    case.check(ys[0])
    np.testing.assert_array_equal(ys[0], ys[1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_widths_that_are_not_whole_tiles(granularity):
    """gpt-oss has 2880: padded channels have neither weight nor bias."""
    config = dataclasses.replace(config_of("gpt_oss_swiglu", granularity), hidden=160)
    config = dataclasses.replace(config, intermediate=96)
    rng = np.random.default_rng(15)
    case = Case(rng, config, RANKS, TOKENS, "zipf")
    case.add_biases(rng)
    with jmm.MegaMoE(config, mesh_of(RANKS)) as layer:
        layer.buffer.poison()
        weights = layer.shard(case.weights)
        assert weights.b13.shape == (8, 256) and weights.b2.shape == (8, 256)
        case.check(jax.jit(layer)(*case.operands, weights))
        back = jmm.to_layout(weights, "canonical")
        y = reference.mega_moe(*(case.by_rank(a) for a in case.operands), back, config)
        np.testing.assert_array_equal(np.asarray(y, np.float64).ravel(), case.reference().ravel())
    unused = np.asarray(back.b13).reshape(8, 2, 128)[:, :, 96:]
    assert (unused == 0).all() and (np.asarray(back.b2)[:, 160:] == 0).all()


# Weights -----------------------------------------------------------------------------------------


def dense_biases(rng, experts=4, intermediate=128, hidden=256):
    return [rng.standard_normal((experts, n)) for n in (intermediate, intermediate, hidden)]


@pytest.fixture(scope="module")
def biased_weights():
    case = case_of("swiglu", True)
    return case.weights


def test_quantize_weights_takes_biases(rng):
    w = [rng.standard_normal((4, *s), np.float32) for s in [(128, 256), (128, 256), (256, 128)]]
    b = [np.asarray(bias, jnp.bfloat16) for bias in dense_biases(rng)]
    names = ("b_gate", "b_up", "b_down")
    weights = jmm.quantize_weights(*w, **dict(zip(names, b, strict=True)))
    assert weights.b13.dtype == weights.b2.dtype == jnp.float32
    for got, want in zip(jmm.expert_biases(weights), b, strict=True):
        np.testing.assert_array_equal(got, np.float32(want))
    plain = jmm.quantize_weights(*w)
    assert plain.b13 is None and plain.b2 is None and jmm.expert_biases(plain) is None
    assert len(jax.tree.leaves(plain)) == 4 and len(jax.tree.leaves(weights)) == 6
    jitted = jax.jit(jmm.quantize_weights)(*w, **dict(zip(names, b, strict=True)))
    np.testing.assert_array_equal(jitted.b13, weights.b13)

    with pytest.raises(jmm.MegaMoEError, match=r"got only b_gate and b_down; expected all three"):
        jmm.quantize_weights(*w, b_gate=b[0], b_down=b[2])
    with pytest.raises(jmm.MegaMoEError, match=r"b_up: got .*; expected .*\[4, 128\]"):
        jmm.quantize_weights(*w, b_gate=b[0], b_up=b[2], b_down=b[2])
    with pytest.raises(jmm.MegaMoEError, match="b_down: got a NaN or an infinity"):
        jmm.quantize_weights(*w, b_gate=b[0], b_up=b[1], b_down=np.full_like(b[2], np.nan))


@pytest.mark.parametrize("layout", jmm.weights.LAYOUTS)
def test_layouts_carry_biases_there_and_back(biased_weights, layout):
    moved = jmm.to_layout(biased_weights, layout)
    for got, want in zip(jmm.expert_biases(moved), jmm.expert_biases(biased_weights), strict=True):
        np.testing.assert_array_equal(got, want)
    back = jmm.to_layout(moved, "canonical")
    np.testing.assert_array_equal(back.b13, biased_weights.b13)
    if layout != "canonical":  # in the order of w13's rows: 8 gate, 8 up
        first = np.asarray(biased_weights.b13)[:, :8]
        second = np.asarray(biased_weights.b13)[:, 128:136]
        np.testing.assert_array_equal(moved.b13[:, :16], np.concatenate([first, second], axis=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b2": None}, r"weights.b13 and weights.b2: got only b13; expected both or neither"),
        ({"b13": None}, r"weights.b13 and weights.b2: got only b2; expected both or neither"),
        ({"b13": jnp.zeros((8, 128))}, r"weights.b13: got float32\[[28], 128\]; .*\[[28], 256\]"),
        ({"b2": jnp.zeros((8, 256), jnp.bfloat16)}, r"weights.b2: got bfloat16\[[28], 256\]"),
    ],
)
def test_biases_that_do_not_fit_are_refused(biased_weights, change, message):
    weights = dataclasses.replace(biased_weights, **change)
    case = case_of("swiglu", False)
    x, idx, p = (case.by_rank(a) for a in case.operands)
    wide = unfused.widen_weights(biased_weights)._replace(**change)
    with jmm.MegaMoE(CONFIG, mesh_of(RANKS)) as layer:
        for call in (
            lambda: layer.shard(weights),
            lambda: reference.mega_moe(x, idx, p, weights, CONFIG),
            lambda: unfused.mega_moe(*case.operands, wide, CONFIG, mesh_of(RANKS), "ep"),
        ):
            with pytest.raises(jmm.MegaMoEError, match=message):
                call()


def test_biases_are_part_of_an_exported_program(biased_weights):
    case = case_of("swiglu", True)
    with jmm.MegaMoE(case.config, mesh_of(RANKS)) as layer:
        weights = layer.shard(case.weights)
        step = jax.jit(layer)
        exported = jax.export.export(step, disabled_checks=jmm.export_checks())(
            *case.operands, weights
        )
        again = jax.export.deserialize(exported.serialize())
        y = again.call(*case.operands, weights)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(step(*case.operands, weights)))
