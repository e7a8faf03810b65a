"""Tokens [B, S, H] give the bits of the same tokens [N, H]: layer, gradients, blocks, routers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe import blocks, routers
from moe_case import Case, mesh_of

RANKS, LEADING = 4, (8, 2, 3)  # 12 tokens on each rank
CONFIG = jmm.MegaMoEConfig(
    num_experts=8, top_k=2, hidden=96, intermediate=64, max_tokens_per_rank=12, timeout_s=60.0
)


@pytest.fixture(scope="module")
def case():
    case = Case(np.random.default_rng(), CONFIG, RANKS, 12)
    case.add_biases(np.random.default_rng(0))
    return case


@pytest.fixture(scope="module")
def layer():
    with jmm.MegaMoE(CONFIG, mesh_of(RANKS)) as layer:
        yield layer


def shaped(tree, leading=LEADING):
    return jax.tree.map(lambda a: jnp.asarray(a).reshape(*leading, a.shape[-1]), tree)


def assert_equal(got, want):
    want = np.asarray(want)
    np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


@pytest.mark.parametrize("leading", [LEADING, (4, 12), (48, 1)])
@pytest.mark.parametrize("quantised", [False, True], ids=["bfloat16", "pair"])
def test_layer(layer, case, leading, quantised):
    weights = layer.shard(case.weights)
    x, idx, p = case.operands
    if quantised:
        x = jmm.quantize.quantize_e4m3(x)
    num_tokens = jnp.asarray([12, 0, 7, 1], jnp.int32)
    for options in ({}, {"num_tokens": num_tokens, "return_stats": True}):
        want = jax.jit(lambda *a, o=options: layer(*a, **o))(x, idx, p, weights)
        got = jax.jit(lambda *a, o=options: layer(*a, **o))(*shaped((x, idx, p), leading), weights)
        y, stats = got if options else (got, ())
        assert y.shape == (*leading, CONFIG.hidden)
        jax.tree.map(assert_equal, y, want[0] if options else want)
        jax.tree.map(assert_equal, stats, want[1] if options else ())
    assert np.asarray(y, np.float32).any()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_kinds_of_mesh_axes(case, kind):
    mesh = jax.make_mesh(
        (RANKS,), ("ep",), (getattr(jax.sharding.AxisType, kind),), devices=jax.devices("cpu")[:4]
    )
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        weights = layer.shard(case.weights)
        want = layer(*case.operands, weights)
        got = layer(*shaped(case.operands), weights)
        assert got.sharding.spec[0] in ("ep", ("ep",))
        assert_equal(got, want)


def test_gradients(layer, case):
    weights = layer.shard(case.weights)
    factor = jnp.asarray(np.random.default_rng(1).standard_normal(case.x.shape), jnp.float32)

    def loss(x, p, b2, idx, factor):
        y = layer(x, idx, p, dataclasses.replace(weights, b2=b2))
        return jnp.sum(y.astype(jnp.float32) * factor)

    x, idx, p = case.operands
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    want = step(x, p, weights.b2, idx, factor)
    (x, idx, p), factor = shaped(case.operands), shaped(factor)
    got = step(x, p, weights.b2, idx, factor)
    assert got[0].shape == x.shape and got[1].shape == p.shape
    jax.tree.map(assert_equal, got, want)
    assert all(np.asarray(g, np.float32).any() for g in want)


@pytest.mark.parametrize("fused", [True, False], ids=["MegaMoE", "unfused"])
def test_local(layer, case, fused):
    weights = layer.shard(case.weights)

    def local(x, idx, p, weights, count):
        if fused:
            return layer.local(x, idx, p, weights, num_tokens=count)
        return jmm.unfused.local(x, idx, p, weights, CONFIG, axis="ep", num_tokens=count)

    step = jax.shard_map(local, mesh=layer.mesh, in_specs=P("ep"), out_specs=P("ep"))
    count = jnp.asarray([5, 12, 0, 3], jnp.int32)
    want = jax.jit(step)(*case.operands, weights, count)
    got = jax.jit(step)(*shaped(case.operands), weights, count)
    assert got.shape == (*LEADING, CONFIG.hidden)
    assert_equal(got, want)


def test_the_unfused_layer_on_global_arrays(case):
    mesh = mesh_of(RANKS)
    step = jax.jit(lambda x, i, p: jmm.unfused.mega_moe(x, i, p, case.weights, CONFIG, mesh, "ep"))
    got = step(*shaped(case.operands))
    assert got.shape == (*LEADING, CONFIG.hidden)
    assert_equal(got, step(*case.operands))


def test_no_tokens_at_all(layer, case):
    weights = layer.shard(case.weights)
    for leading in ((0, 3), (4, 0)):
        x, idx, p = (a[:0].reshape(*leading, a.shape[1]) for a in case.operands)
        assert layer(x, idx, p, weights).shape == (*leading, CONFIG.hidden)


def test_block_and_gradients(case):
    rng = np.random.default_rng(3)
    dense = {"gate": (64, 96), "up": (64, 96), "down": (96, 64)}
    shared = {name: jnp.asarray(rng.normal(0, 0.1, s), jnp.bfloat16) for name, s in dense.items()}
    router = {"weight": jnp.asarray(rng.normal(0, 0.1, (8, 96)), jnp.float32), "bias": jnp.zeros(8)}
    mask = jnp.asarray(rng.random(48) < 0.8)
    made = routers.deepseek_v3(top_k=2, n_group=1, topk_group=1)
    with blocks.MoEBlock(CONFIG, made, mesh_of(RANKS)) as block:
        weights = block.shard(blocks.BlockWeights(case.weights, router, shared))

        def loss(x, w_gate, mask):
            changed = weights._replace(router=weights.router | {"weight": w_gate})
            y = block(x, changed, mask=mask)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, want), want_grads = step(case.x, router["weight"], mask)
        (_, got), grads = step(shaped(case.x), router["weight"], mask.reshape(LEADING))
    assert got.shape == (*LEADING, 96) and grads[0].shape == got.shape
    assert_equal(got, want)
    jax.tree.map(assert_equal, grads, want_grads)
    assert all(np.asarray(g, np.float32).any() for g in want_grads)


@pytest.mark.parametrize("hashed", [False, True], ids=["scores", "table"])
def test_router(case, hashed):
    rng = np.random.default_rng(4)
    w_gate = jnp.asarray(rng.normal(0, 0.1, (8, 96)), jnp.float32)
    mask = jnp.asarray(rng.random(48) < 0.8)
    if hashed:
        router = routers.deepseek_v4(routed_scaling_factor=1.5, top_k=2)
        table = jnp.asarray(rng.integers(0, 8, (16, 2)), jnp.int32)
        ids = jnp.asarray(rng.integers(0, 16, 48), jnp.int32)
        options = {"tid2eid": table, "token_ids": ids}
    else:
        router = routers.deepseek_v3(top_k=2, n_group=2, topk_group=1)
        options = {"bias": jnp.asarray(rng.normal(0, 0.01, 8), jnp.float32)}
    want = router(case.x, w_gate, mask=mask, **options)
    if hashed:
        options["token_ids"] = ids.reshape(LEADING)
    got = router(shaped(case.x), w_gate, mask=mask.reshape(LEADING), **options)
    assert got[0].shape == got[1].shape == (*LEADING, 2)
    assert_equal(got[0], want[0])
    # One product of matrices of another shape may sum in another order.
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(np.asarray(got[1]).reshape(48, 2), want[1], rtol=96 * eps)
    load = routers.expert_load(got[0], 8)
    assert_equal(load, routers.expert_load(want[0], 8))
    assert int(load.sum()) == 2 * int(mask.sum())
