"""Every activation, on the CPU back end, in the reference and in the unfused layer.

The formulas stand here once more, written for this file alone, so that a mistake in
`reference.activate_float64` cannot hide.
"""

import dataclasses
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


@pytest.fixture(scope="module")
def results():
    """(kind, granularity) -> (case, y of the CPU back end)."""
    made = {}
    mesh = mesh_of(RANKS)
    for kind, granularity in itertools.product(KINDS, GRANULARITIES):
        config = config_of(kind, granularity)
        case = Case(np.random.default_rng(8), config, RANKS, TOKENS, "masked")
        with jmm.MegaMoE(config, mesh) as layer:
            layer.buffer.poison()
            y = np.asarray(jax.jit(layer)(*case.operands, layer.shard(case.weights)))
        made[kind, granularity] = case, y
    return made


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_layer_meets_the_error_rule(results, kind, granularity):
    case, y = results[kind, granularity]
    case.check(y)
    for other in set(KINDS) - {kind}:  # and no other activation would do
        with pytest.raises(AssertionError):
            case.check(results[other, granularity][1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_unfused_agrees(results, kind, granularity):
    """One unit of BF16 more than the error rule, as docs/numerics.md says of the unfused layer."""
    case, _ = results[kind, granularity]
    truth, plain = case.truth(), case.reference()
    for gemm in ("blocked", "ragged_dot"):
        y = jax.jit(
            lambda *operands, gemm=gemm: unfused.mega_moe(
                *operands, case.config, mesh_of(RANKS), "ep", gemm=gemm
            )
        )(*case.operands, case.weights)
        error = np.linalg.norm(np.asarray(y, np.float64) - truth)
        limit = 2 * np.linalg.norm(plain - truth) + 2.0**-8 * np.linalg.norm(truth)
        assert error <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_layer_gradient_is_that_of_the_unfused_layer(kind):
    config = config_of(kind)
    case = Case(np.random.default_rng(9), config, RANKS, 8, "uniform")
    mesh = mesh_of(RANKS)

    def loss(call):
        return lambda x, p: jnp.sum(jnp.square(call(x, case.topk_idx, p).astype(jnp.float32)))

    def plain(x, idx, p):
        return unfused.mega_moe(x, idx, p, case.weights, config, mesh, "ep", differentiable=True)

    with jmm.MegaMoE(config, mesh) as layer:
        weights = layer.shard(case.weights)
        fused = lambda x, idx, p: layer(x, idx, p, weights)  # noqa: E731
        got = jax.jit(jax.grad(loss(fused), (0, 1)))(case.x, case.topk_weights)
    want = jax.jit(jax.grad(loss(plain), (0, 1)))(case.x, case.topk_weights)
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(a, np.float64) for a in (g, w))
        assert np.linalg.norm(w) > 0
        # The cotangent is 2 y: y of the two differs by roundings of codes, 2^-8 in norm each.
        assert np.linalg.norm(g - w) <= 2.0**-6 * np.linalg.norm(w)


def test_layers_of_different_activations_share_a_buffer():
    case = Case(np.random.default_rng(10), config_of("swiglu"), RANKS, TOKENS)
    mesh = mesh_of(RANKS)
    layers = {kind: jmm.MegaMoE(config_of(kind), mesh) for kind in KINDS}
    try:
        assert len({layer.buffer.key for layer in layers.values()}) == 1

        @jax.jit
        def all_of_them(*operands):
            return [layer(*operands) for layer in layers.values()]

        weights = layers["situ"].shard(case.weights)
        ys = all_of_them(*case.operands, weights)
        for kind, y in zip(KINDS, ys, strict=True):
            case.config = config_of(kind)
            case.check(y)
    finally:
        for layer in layers.values():
            layer.close()


def test_a_bad_token_stays_alone():
    for kind in KINDS:
        config = config_of(kind)
        case = Case(np.random.default_rng(12), config, RANKS, 9)
        with jmm.MegaMoE(config, mesh_of(RANKS)) as layer:
            weights, step = layer.shard(case.weights), jax.jit(layer)
            clean = np.asarray(step(*case.operands, weights), np.float32)
            x = np.array(case.x, np.float32)
            x[5, 7], x[6] = np.inf, 0
            x = jnp.asarray(x, jnp.bfloat16)
            dirty = np.asarray(step(x, *case.operands[1:], weights), np.float32)
        assert np.isnan(dirty[5]).all() and (dirty[6] == 0).all()
        others = np.setdiff1d(np.arange(len(dirty)), [5, 6])
        np.testing.assert_array_equal(dirty[others], clean[others])
