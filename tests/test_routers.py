"""Routers against float64 written token by token, ties, groups, hash layers, masks, gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe import routers
from jax_megamoe.errors import MegaMoEError
from router_oracle import assert_routes, deepseek_scores, route64

TOKENS, EXPERTS, HIDDEN, VOCAB = 37, 32, 64, 50
EPS = float(np.finfo(np.float32).eps)


def routers_of(family):
    """(router, keywords of route64) of a family, small, in variants."""
    if family == "deepseek_v3":
        for n_group, topk_group, scale in ((8, 4, 2.5), (4, 1, 2.5), (1, 1, 1.0)):
            yield (
                routers.deepseek_v3(
                    n_group=n_group, topk_group=topk_group, routed_scaling_factor=scale
                ),
                {"top_k": 8, "scale": scale, "groups": (n_group, topk_group)},
            )
        yield (
            routers.deepseek_v3(norm_topk_prob=False),
            {"top_k": 8, "scale": 2.5, "groups": (8, 4), "norm": False},
        )
    elif family == "kimi_k2":
        yield routers.kimi_k2(), {"top_k": 8, "scale": 2.827}
    elif family == "kimi_k3":
        yield routers.kimi_k3(), {"top_k": 16}
    elif family == "deepseek_v4":
        yield routers.deepseek_v4(routed_scaling_factor=1.5), {"top_k": 6, "scale": 1.5}
        yield routers.deepseek_v4(routed_scaling_factor=2.5, top_k=3), {"top_k": 3, "scale": 2.5}
    elif family == "gpt_oss":
        yield routers.gpt_oss(), {"top_k": 4}
    else:
        yield routers.qwen3_moe(), {"top_k": 8}
        yield routers.qwen3_moe(norm_topk_prob=False), {"top_k": 8, "norm": False}


FAMILIES = ("deepseek_v3", "kimi_k2", "kimi_k3", "deepseek_v4", "gpt_oss", "qwen3_moe")
CASES = [
    pytest.param(family, router, keywords, id=f"{family}-{number}")
    for family in FAMILIES
    for number, (router, keywords) in enumerate(routers_of(family))
]


def grid_logits(rng, shape=(TOKENS, EXPERTS)):
    """Logits that differ by at least 2^-5 within a token: no rounding decides who is chosen."""
    rows = [rng.permutation(4 * shape[1])[: shape[1]] for _ in range(shape[0])]
    return (np.stack(rows) / 32.0 - shape[1] / 16.0).astype(np.float32)


def small_bias(rng, num_experts=EXPERTS):
    return rng.normal(0, 0.2, num_experts).astype(np.float32)


def takes_bias(family):
    return family != "qwen3_moe"


def separated(family, rng):
    """Logits and bias whose biased scores differ by more than FP32 can get wrong."""
    while True:
        z, bias = grid_logits(rng), small_bias(rng)
        if family in ("gpt_oss", "qwen3_moe"):
            c = z + (bias if takes_bias(family) else 0.0)
        else:
            c = deepseek_scores(z.astype(np.float64), family) + bias
        if np.diff(np.sort(c, axis=1), axis=1).min() > 8 * EPS:
            return z, bias


# Formulas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "router", "keywords"), CASES)
def test_from_logits(family, router, keywords):
    route = jax.jit(router.from_logits)
    for seed in range(8):
        z, bias = separated(family, np.random.default_rng(seed))
        operands = (z, bias) if takes_bias(family) else (z,)
        bias64 = bias.astype(np.float64)
        want = [route64(family, row, bias64, **keywords) for row in z.astype(np.float64)]
        # A softmax of 32 terms, or a score, a sum of top_k, a quotient and a product.
        assert_routes(route(*operands), want, terms=EXPERTS + 8)
    assert_routes(router.from_logits(*operands), want, terms=EXPERTS + 8)


@pytest.mark.parametrize(("family", "router", "keywords"), CASES)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16",) * 2],
)
def test_from_hidden_states(family, router, keywords, x_dtype, w_dtype):
    """Logits of 16-bit inputs are those of the widened inputs: nothing is rounded to 16 bits."""
    rng = np.random.default_rng(5)
    x = rng.integers(-8, 9, (TOKENS, HIDDEN)).astype(x_dtype)
    w_gate = (rng.integers(-8, 9, (EXPERTS, HIDDEN)) / 2.0**9).astype(w_dtype)
    bias = small_bias(rng)
    z64 = x.astype(np.float64) @ w_gate.astype(np.float64).T  # exact, in FP32 as well
    narrow = z64.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert np.any(narrow != z64), "the case cannot tell FP32 logits from BF16 logits"
    np.testing.assert_array_equal(np.asarray(routers.gate_logits(x, w_gate), np.float64), z64)
    operands = (x, w_gate, bias) if takes_bias(family) else (x, w_gate)
    got = jax.jit(router)(*operands)
    want = router.from_logits(z64.astype(np.float32), *operands[2:])
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=4 * EPS)


def test_low_precision_logits_and_bias_are_widened():
    rng = np.random.default_rng(0)
    z = grid_logits(rng).astype(ml_dtypes.bfloat16)
    bias = small_bias(rng).astype(ml_dtypes.bfloat16)
    router = routers.deepseek_v3()
    got = router.from_logits(z, bias)
    want = router.from_logits(z.astype(np.float32), bias.astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_defaults_are_those_of_the_models():
    assert routers.deepseek_v3() == routers.Router(8, "sigmoid", "selection", 8, 4, True, 2.5)
    assert routers.kimi_k2() == routers.Router(8, "sigmoid", "selection", 1, 1, True, 2.827)
    assert routers.kimi_k3() == routers.Router(16, "sigmoid", "selection", 1, 1, True, 1.0)
    v4 = routers.deepseek_v4(routed_scaling_factor=1.5)
    assert v4 == routers.Router(6, "sqrtsoftplus", "selection", 1, 1, True, 1.5)
    assert routers.gpt_oss() == routers.Router(4, "logits", "logits", 1, 1, True, 1.0)
    assert routers.qwen3_moe() == routers.Router(8, "softmax", None, 1, 1, True, 1.0)
    assert hash(routers.kimi_k2()) == hash(routers.kimi_k2())


def test_one_compilation_for_equal_routers():
    traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def route(router, z, bias):
        nonlocal traces
        traces += 1
        return router.from_logits(z, bias)

    z, bias = jnp.zeros((4, EXPERTS)), jnp.zeros(EXPERTS)
    route(routers.kimi_k2(), z, bias)
    route(routers.kimi_k2(), z, bias)
    assert traces == 1


# Ties, groups, bias ------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "router", "keywords"), CASES)
def test_equal_scores_go_to_the_lowest_index(family, router, keywords):
    """Constant logits: groups and experts tie everywhere. Two levels: ties within each."""
    top_k = router.top_k
    bias = (np.zeros(EXPERTS, np.float32),) if takes_bias(family) else ()
    idx, weights = jax.jit(router.from_logits)(np.full((3, EXPERTS), 0.5, np.float32), *bias)
    np.testing.assert_array_equal(idx, np.tile(np.arange(top_k), (3, 1)))
    assert np.all(np.asarray(weights) == np.asarray(weights)[0, 0])
    z = np.full((1, EXPERTS), 0.5, np.float32)
    z[0, 5::7] = 1.0
    idx, _ = jax.jit(router.from_logits)(z, *bias)
    want, _ = route64(family, z[0].astype(np.float64), np.zeros(EXPERTS), **keywords)
    np.testing.assert_array_equal(idx[0], want)


def test_zeros_of_both_signs_tie():
    z = np.array([[-0.0, 0.0, -1.0, 0.0, -0.0]], np.float32)
    idx, weights = jax.jit(routers.gpt_oss().from_logits)(z, np.full(5, -0.0, np.float32))
    np.testing.assert_array_equal(idx, [[0, 1, 3, 4]])
    np.testing.assert_array_equal(weights, [[0.25] * 4])


def test_groups_exclude_the_best_expert():
    """The best expert stands alone in its group; two good ones elsewhere beat it as a group."""
    z = np.full((1, 8), -4.0, np.float32)
    z[0, 1], z[0, 4], z[0, 5] = 3.0, 1.0, 0.5
    zero = np.zeros(8, np.float32)
    grouped = routers.deepseek_v3(top_k=2, n_group=4, topk_group=1)
    np.testing.assert_array_equal(grouped.from_logits(z, zero)[0], [[4, 5]])
    flat = routers.deepseek_v3(top_k=2, n_group=1, topk_group=1)
    np.testing.assert_array_equal(flat.from_logits(z, zero)[0], [[1, 4]])


def test_negative_scores_within_the_kept_groups():
    """Biased scores may be negative: masking other groups with 0 would choose among them."""
    z = np.zeros((1, 8), np.float32)
    bias = np.linspace(-2.0, -3.0, 8, dtype=np.float32)
    router = routers.deepseek_v3(top_k=3, n_group=2, topk_group=1)
    np.testing.assert_array_equal(router.from_logits(z, bias)[0], [[0, 1, 2]])
    np.testing.assert_array_equal(router.from_logits(z, bias[::-1])[0], [[7, 6, 5]])


@pytest.mark.parametrize(
    "router",
    [routers.kimi_k2(top_k=2), routers.deepseek_v4(routed_scaling_factor=1.5, top_k=2)],
    ids=["sigmoid", "sqrtsoftplus"],
)
def test_bias_selects_but_does_not_weigh(router):
    z = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    plain_idx, plain = router.from_logits(z, np.zeros(4, np.float32))
    np.testing.assert_array_equal(plain_idx, [[0, 1]])
    # A bias that changes nobody's rank changes nothing, to the bit.
    same_idx, same = router.from_logits(z, np.full(4, 8.0, np.float32))
    np.testing.assert_array_equal(same_idx, plain_idx)
    np.testing.assert_array_equal(same, plain)
    # One that does: the weights are those of the chosen experts' own scores.
    idx, weights = router.from_logits(z, np.array([0.0, 0.0, 0.0, 9.0], np.float32))
    np.testing.assert_array_equal(idx, [[3, 0]])
    family = "deepseek_v4" if router.scores == "sqrtsoftplus" else "kimi_k2"
    s = deepseek_scores(z[0, [3, 0]].astype(np.float64), family)
    want = router.routed_scaling_factor * s / s.sum()
    np.testing.assert_allclose(np.asarray(weights)[0], want, rtol=8 * EPS)


def test_gpt_oss_bias_is_part_of_the_logits():
    z, bias = grid_logits(np.random.default_rng(2)), small_bias(np.random.default_rng(3))
    router = routers.gpt_oss()
    jax.tree.map(
        np.testing.assert_array_equal,
        router.from_logits(z, bias),
        router.from_logits(z + bias),
    )


# Extreme values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_extreme_logits_have_finite_weights_and_gradients(family):
    router, _ = next(iter(routers_of(family)))
    bias = (jnp.zeros(EXPERTS),) if takes_bias(family) else ()
    mix = np.random.default_rng(2).normal(size=(TOKENS, router.top_k)).astype(np.float32)

    @jax.jit
    def weights_and_gradient(z):
        weights, pullback = jax.vjp(lambda z: router.from_logits(z, *bias)[1], z)
        return weights, *pullback(mix)

    for level in (-300.0, -100.0, -60.0, -20.0, 0.0, 20.0, 100.0, 300.0):
        z = grid_logits(np.random.default_rng(1)) + np.float32(level)
        weights, gradient = weights_and_gradient(z)
        assert np.all(np.isfinite(weights)) and np.all(np.asarray(weights) >= 0), level
        assert np.all(np.isfinite(gradient)), level


def test_sqrt_softplus_and_its_slope_over_the_whole_range():
    """Both against float64, on either side of where the formula changes."""
    z = np.concatenate([np.linspace(-160, 120, 2001), np.linspace(-20.01, -19.99, 201)])
    z = z.astype(np.float32)
    want = np.sqrt(np.logaddexp(0.0, z.astype(np.float64)))
    slope = 1 / (1 + np.exp(-z.astype(np.float64))) / (2 * want)
    scores = functools.partial(routers._scores, "sqrtsoftplus")
    got = np.asarray(scores(jnp.asarray(z)), np.float64)
    got_slope = np.asarray(jax.vmap(jax.grad(scores))(jnp.asarray(z)), np.float64)
    # exp(z / 2) is as exact as its argument: |z| / 2 units of FP32.
    tolerance = (8 + np.abs(z)) * EPS
    assert np.all(np.abs(got - want) <= tolerance * want)
    assert np.all(np.abs(got_slope - slope) <= tolerance * slope)


# Hash layers -------------------------------------------------------------------------------------


def hash_case(seed=0, top_k=6):
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(VOCAB)])
    return grid_logits(rng), table, rng.integers(0, VOCAB, TOKENS)


V4 = routers.deepseek_v4(routed_scaling_factor=1.5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_hash_layer(dtype):
    z, table, ids = hash_case()
    want = [
        route64("deepseek_v4", row, None, 6, scale=1.5, fixed=table[t])
        for row, t in zip(z.astype(np.float64), ids, strict=True)
    ]
    operands = {"tid2eid": table.astype(dtype), "token_ids": ids.astype(dtype)}
    assert_routes(V4.from_logits(z, **operands), want, terms=16)
    assert_routes(jax.jit(V4.from_logits)(z, **operands), want, terms=16)
    x = np.random.default_rng(3).normal(size=(TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    w_gate = np.random.default_rng(4).normal(size=(EXPERTS, HIDDEN)).astype(ml_dtypes.bfloat16)
    idx, weights = jax.jit(V4)(x, w_gate, **operands)
    np.testing.assert_array_equal(idx, table[ids])
    by_logits = V4.from_logits(routers.gate_logits(x, w_gate), **operands)[1]
    np.testing.assert_allclose(weights, by_logits, rtol=8 * EPS)


def test_hash_layer_counts_a_repeated_expert_twice():
    z = np.array([[1.0, 2.0, 3.0]], np.float32)
    router = routers.deepseek_v4(routed_scaling_factor=1.0, top_k=3)
    idx, weights = router.from_logits(
        z, tid2eid=np.array([[2, 0, 2]]), token_ids=np.zeros(1, np.int32)
    )
    np.testing.assert_array_equal(idx, [[2, 0, 2]])
    s = deepseek_scores(z[0].astype(np.float64), "deepseek_v4")[[2, 0, 2]]
    np.testing.assert_allclose(np.asarray(weights)[0], s / s.sum(), rtol=8 * EPS)


def test_hash_layer_slots_that_name_nobody():
    """-1 is not routed, numbers outside [0, E) stay visible to the layer; both weigh nothing."""
    z = np.zeros((3, 4), np.float32)
    router = routers.deepseek_v4(routed_scaling_factor=1.0, top_k=2)
    table = np.array([[-1, 3], [4, 1], [-1, -1]])
    idx, weights = router.from_logits(z, tid2eid=table, token_ids=np.arange(3))
    np.testing.assert_array_equal(idx, table)
    np.testing.assert_array_equal(weights, [[0, 1], [0, 1], [0, 0]])


@pytest.mark.parametrize("token", [-1, -VOCAB, VOCAB, 2**31 - 1])
def test_token_ids_outside_the_table_are_not_taken_for_others(token):
    z, table, ids = hash_case()
    ids[3] = token
    idx, weights = jax.jit(V4.from_logits)(z, tid2eid=table, token_ids=ids)
    np.testing.assert_array_equal(idx[3], [EXPERTS] * 6)
    np.testing.assert_array_equal(weights[3], 0)
    np.testing.assert_array_equal(np.delete(idx, 3, 0), table[np.delete(ids, 3)])


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "hash"])
def test_mask(family):
    """Padding is -1 with weight 0; the other tokens, and all gradients, do not notice it."""
    rng = np.random.default_rng(0)
    mask = rng.random(TOKENS) < 0.7
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    w_gate = rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN)).astype(np.float32)
    if family == "hash":
        _, table, ids = hash_case()
        router, operands = V4, {"tid2eid": table, "token_ids": np.where(mask, ids, -1)}
    else:
        router, _ = next(iter(routers_of(family)))
        operands = {"bias": small_bias(rng)} if takes_bias(family) else {}
    dirty = x.copy()
    dirty[~mask] = np.nan
    dirty[np.flatnonzero(~mask)[0]] = np.inf
    idx, weights = jax.jit(router)(dirty, w_gate, mask=mask, **operands)
    assert np.all(np.asarray(idx)[~mask] == -1) and np.all(np.asarray(weights)[~mask] == 0)
    want_idx, want = jax.jit(router)(x, w_gate, **operands)
    np.testing.assert_array_equal(np.asarray(idx)[mask], np.asarray(want_idx)[mask])
    np.testing.assert_array_equal(np.asarray(weights)[mask], np.asarray(want)[mask])

    mix = rng.normal(size=weights.shape).astype(np.float32)

    def loss(x, w_gate, mix, **masked):
        return jnp.sum(mix * router(x, w_gate, **masked, **operands)[1])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    grads = gradient(dirty, w_gate, mix, mask=mask)
    clean = gradient(x, w_gate, np.where(mask[:, None], mix, 0))
    for got, expected in zip(grads, clean, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_mask_of_logits():
    z, bias = grid_logits(np.random.default_rng(0)), np.zeros(EXPERTS, np.float32)
    mask = np.arange(TOKENS) < 20
    z[20:] = np.nan
    router = routers.kimi_k2()
    idx, weights = router.from_logits(z, bias, mask=jnp.asarray(mask))
    assert np.all(np.asarray(idx)[20:] == -1) and np.all(np.asarray(weights)[20:] == 0)
    gradient = jax.grad(lambda z: jnp.sum(router.from_logits(z, bias, mask=mask)[1] ** 2))(z)
    assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[20:] == 0)


# Gradients ---------------------------------------------------------------------------------------


def dense_weights_of(family, router, keywords, z, bias, idx):
    """Routing weights as a dense [T, E] matrix: chosen experts as a constant 0/1 mask."""
    chosen = jnp.zeros(z.shape).at[jnp.arange(z.shape[0])[:, None], idx].add(1.0)
    scale, norm = keywords.get("scale", 1.0), keywords.get("norm", True)
    if family == "gpt_oss":
        e = jnp.exp(z + bias) * chosen
        return e / e.sum(axis=1, keepdims=True)
    if family == "qwen3_moe":
        s = jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True)
    elif family == "deepseek_v4":
        s = jnp.sqrt(jnp.log(1 + jnp.exp(z)))
    else:
        s = 1 / (1 + jnp.exp(-z))
    w = s * chosen
    return scale * (w / w.sum(axis=1, keepdims=True) if norm else w)


@pytest.mark.parametrize(("family", "router", "keywords"), CASES)
def test_gradients_are_those_of_a_dense_formulation(family, router, keywords):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32)
    w_gate = jnp.asarray(rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN)), jnp.float32)
    bias = jnp.asarray(small_bias(rng))
    outputs = jnp.asarray(rng.normal(size=(TOKENS, EXPERTS)), jnp.float32)  # of the experts
    extra = (bias,) if takes_bias(family) else ()
    idx = router(x, w_gate, *extra)[0]

    def routed(x, w_gate, bias):
        idx, weights = router(x, w_gate, *((bias,) if takes_bias(family) else ()))
        return jnp.sum(jnp.take_along_axis(outputs, idx, axis=1) * weights)

    def dense(x, w_gate, bias):
        z = jnp.dot(x, w_gate.T, precision="highest")
        return jnp.sum(outputs * dense_weights_of(family, router, keywords, z, bias, idx))

    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(routed, argnums=(0, 1, 2)))(x, w_gate, bias)
        want = jax.jit(jax.grad(dense, argnums=(0, 1, 2)))(x, w_gate, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * EPS * max(1.0, np.abs(b).max()))
    assert np.abs(want[0]).max() > 1e-3 and np.abs(want[1]).max() > 1e-3
    assert np.any(got[2]) == (family == "gpt_oss")  # a selection bias has no gradient


def test_gradients_in_bfloat16():
    """The product's backward pass takes FP32 cotangents; only the results are rounded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.bfloat16)
    w_gate = jnp.asarray(rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN)), jnp.bfloat16)
    bias, router = jnp.asarray(small_bias(rng)), routers.deepseek_v3()
    mix = jnp.asarray(rng.normal(size=(TOKENS, 8)), jnp.float32)

    def loss(x, w_gate):
        return jnp.sum(mix * router(x, w_gate, bias)[1])

    got = jax.grad(loss, argnums=(0, 1))(x, w_gate)
    want = jax.grad(loss, argnums=(0, 1))(x.astype(jnp.float32), w_gate.astype(jnp.float32))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        b = np.asarray(b)
        near = 2.0**-8 * np.abs(b) + 16 * EPS * np.abs(b).max()
        assert np.all(np.abs(np.asarray(a, np.float32) - b) <= near)


# Meshes, the layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("hashed", [False, True], ids=["scores", "table"])
def test_tokens_sharded_over_a_mesh(kind, hashed):
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("ep",), (axis_type,), devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, HIDDEN)).astype(np.float32)
    w_gate = rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN)).astype(np.float32)
    _, table, ids = hash_case()
    mask = rng.random(32) < 0.8

    def route(x, w_gate, table, ids, bias, mask):
        how = {"tid2eid": table, "token_ids": ids} if hashed else {"bias": bias}
        return V4(x, w_gate, mask=mask, **how)

    operands = (x, w_gate, table, ids[:32], small_bias(rng), mask)
    specs = (P("ep"), P(), P(), P("ep"), P(), P("ep"))
    want = jax.jit(route)(*operands)
    placed = [
        jax.device_put(jnp.asarray(a), NamedSharding(mesh, s))
        for a, s in zip(operands, specs, strict=True)
    ]
    results = [jax.jit(route)(*placed)]
    local = jax.shard_map(route, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P("ep")))
    results.append(jax.jit(local)(*placed))
    for idx, weights in results:
        np.testing.assert_array_equal(idx, want[0])
        np.testing.assert_allclose(weights, want[1], rtol=16 * EPS)


def test_a_layer_takes_what_a_router_returns():
    config = jmm.MegaMoEConfig(
        num_experts=8, top_k=2, hidden=128, intermediate=128, max_tokens_per_rank=8
    )
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices("cpu")[:4])
    rng = np.random.default_rng(0)
    dense = [jnp.asarray(rng.normal(0, 0.1, (8, 128, 128)), jnp.float32) for _ in range(3)]
    weights = jmm.quantize_weights(*dense)
    x = jnp.asarray(rng.normal(size=(32, 128)), jnp.bfloat16)
    w_gate = jnp.asarray(rng.normal(0, 0.1, (8, 128)), jnp.bfloat16)
    mask = np.arange(32) < 29
    router = routers.deepseek_v3(top_k=2, n_group=4, topk_group=2)
    with jmm.MegaMoE(config, mesh, axis="ep") as layer:
        sharded = layer.shard(weights)

        @jax.jit
        def block(x):
            idx, w = router(x, w_gate, jnp.zeros(8), mask=mask)
            return *layer(x, idx, w, sharded, return_stats=True), idx

        y, stats, idx = block(x)
        np.testing.assert_array_equal(stats.tokens_per_expert, routers.expert_load(idx, 8))
        assert int(stats.tokens_per_expert.sum()) == 29 * 2
        assert not np.any(np.asarray(stats.out_of_range))
        y = np.asarray(y, np.float32)
        assert np.all(y[29:] == 0) and np.all(np.any(y[:29] != 0, axis=1))


# Load --------------------------------------------------------------------------------------------


def test_expert_load():
    idx = np.array([[0, 3], [3, -1], [7, 3], [-2, 2]], np.int32)
    load = jax.jit(routers.expert_load, static_argnums=1)(idx, 5)
    assert load.dtype == jnp.int32
    np.testing.assert_array_equal(load, [1, 0, 1, 3, 0])


def test_update_bias_balances():
    got = routers.update_bias(np.zeros(4, np.float32), np.array([0, 2, 6, 0], np.int32), rate=0.5)
    np.testing.assert_array_equal(got, [0.5, 0.0, -0.5, 0.5])
    rng = np.random.default_rng(0)
    z = rng.normal(size=(512, 16)).astype(np.float32) + np.linspace(-2, 2, 16, dtype=np.float32)
    router = routers.kimi_k2(top_k=2)

    @jax.jit
    def step(bias):
        load = routers.expert_load(router.from_logits(z, bias)[0], 16)
        return routers.update_bias(bias, load, rate=0.01), load

    bias = jnp.zeros(16)
    loads = []
    for _ in range(200):
        bias, load = step(bias)
        loads.append(int(load.max()))
    mean = 512 * 2 / 16
    assert loads[0] > 2.5 * mean and loads[-1] < 1.3 * mean


# Mistakes ----------------------------------------------------------------------------------------


def zeros(dtype, *shape):
    return jnp.zeros(shape, dtype)


V3 = routers.deepseek_v3()
X, W, B = zeros("bfloat16", 5, 16), zeros("float32", 32, 16), zeros("float32", 32)
TABLE, IDS = zeros("int32", 9, 6), zeros("int32", 5)
MISTAKES = {
    "x rank": (lambda: V3(zeros("bfloat16", 16), W, B), "x", "[16]", "[..., H]"),
    "x None": (lambda: V3(None, W, B), "x", "None", "[..., H]", "left out"),
    "w_gate None": (lambda: V3(X, None, B), "w_gate", "None", "[E, 16]", "left out"),
    "x dtype": (lambda: V3(zeros("int32", 5, 16), W, B), "x", "int32[5, 16]", "bfloat16"),
    "x list": (lambda: V3([1.0], W, B), "x", "list of 1", "[..., H]", "jnp.asarray"),
    "w_gate transposed": (lambda: V3(X, W.T, B), "w_gate", "[16, 32]", "[E, 16]"),
    "no bias": (lambda: V3(X, W), "bias", "None", "[32]", "e_score_correction_bias"),
    "bias shape": (lambda: V3(X, W, B[:31]), "bias", "float32[31]", "[32]"),
    "bias dtype": (lambda: V3(X, W, B.astype("int32")), "bias", "int32[32]", "float32"),
    "a bias for qwen": (lambda: routers.qwen3_moe()(X, W, B), "bias", "an array", "None"),
    "no bias for gpt-oss": (lambda: routers.gpt_oss()(X, W), "bias", "None", "from_logits"),
    "logits rank": (lambda: V3.from_logits(zeros("float32", 32), B), "logits", "[32]", "[..., E]"),
    "few experts": (
        lambda: V4.from_logits(zeros("float32", 5, 4), zeros("float32", 4)),
        "top_k",
        "6",
        "4 experts",
    ),
    "mask dtype": (lambda: V3(X, W, B, mask=zeros("int32", 5)), "mask", "int32[5]", "bool"),
    "mask shape": (lambda: V3(X, W, B, mask=zeros("bool", 5, 1)), "mask", "bool[5, 1]", "[5]"),
    "mask of logits": (
        lambda: V3.from_logits(zeros("float32", 5, 32), B, mask=zeros("bool", 4)),
        "mask",
        "bool[4]",
        "[5]",
    ),
    "uneven groups": (
        lambda: routers.deepseek_v3(n_group=5)(X, W, B),
        "n_group",
        "5 groups of 32 experts",
        "one size",
    ),
    "groups of one": (
        lambda: routers.deepseek_v3(n_group=32, topk_group=16)(X, W, B),
        "n_group",
        "32 groups of 32",
        "at least 2",
    ),
    "groups too small": (
        lambda: routers.deepseek_v3(n_group=8, topk_group=1)(X, W, B),
        "topk_group",
        "1 groups of 4",
        "top_k = 8",
    ),
    "table without ids": (lambda: V4(X, W, tid2eid=TABLE), "tid2eid and token_ids", "one of"),
    "ids without table": (lambda: V4(X, W, token_ids=IDS), "tid2eid and token_ids", "one of"),
    "table and bias": (
        lambda: V4(X, W, B, tid2eid=TABLE, token_ids=IDS),
        "bias",
        "besides tid2eid",
        "None",
    ),
    "table for gpt-oss": (
        lambda: routers.gpt_oss().from_logits(
            zeros("float32", 5, 32), tid2eid=TABLE, token_ids=IDS
        ),
        "tid2eid",
        "'logits'",
        "deepseek_v4",
    ),
    "table width": (
        lambda: V4(X, W, tid2eid=TABLE[:, :4], token_ids=IDS),
        "tid2eid",
        "[9, 4]",
        "[vocab, 6]",
    ),
    "table dtype": (
        lambda: V4(X, W, tid2eid=TABLE.astype("float32"), token_ids=IDS),
        "tid2eid",
        "float32[9, 6]",
        "int32 or int64",
    ),
    "ids shape": (
        lambda: V4(X, W, tid2eid=TABLE, token_ids=IDS[:4]),
        "token_ids",
        "int32[4]",
        "[5]",
    ),
    "top_k": (lambda: routers.gpt_oss(top_k=0), "top_k", "0", "positive int"),
    "top_k bool": (lambda: routers.gpt_oss(top_k=True), "top_k", "True", "positive int"),
    "n_group": (lambda: routers.deepseek_v3(n_group=8.0), "n_group", "8.0", "positive int"),
    "topk_group": (
        lambda: routers.deepseek_v3(n_group=2, topk_group=3),
        "topk_group",
        "3",
        "n_group = 2",
    ),
    "scores": (lambda: routers.Router(2, "relu"), "scores", "'relu'", "sqrtsoftplus"),
    "bias role": (lambda: routers.Router(2, "sigmoid", "x"), "bias_role", "'x'", "selection"),
    "groups of logits": (lambda: routers.Router(2, "logits", None, 4, 2), "n_group", "4", "1"),
    "unnormalised": (
        lambda: routers.Router(2, "logits", norm_topk_prob=False),
        "norm_topk_prob",
        "False",
        "True",
    ),
    "scale": (
        lambda: routers.kimi_k2(routed_scaling_factor=float("nan")),
        "routed_scaling_factor",
        "nan",
        "finite",
    ),
    "load of floats": (
        lambda: routers.expert_load(zeros("float32", 5, 2), 8),
        "topk_idx",
        "float32[5, 2]",
        "int32",
    ),
    "bias to update": (
        lambda: routers.update_bias(zeros("bfloat16", 4), zeros("int32", 4)),
        "bias",
        "bfloat16[4]",
        "float32",
    ),
    "load shape": (
        lambda: routers.update_bias(zeros("float32", 4), zeros("int32", 5)),
        "load",
        "int32[5]",
        "[4]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    call, operand, *texts = MISTAKES[name]
    with pytest.raises(MegaMoEError) as error:
        call()
    message = str(error.value)
    assert message.startswith(f"jax_megamoe: {operand}: got ")
    for text in texts:
        assert text in message
