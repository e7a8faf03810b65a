"""Where the layer gets its mesh from: an argument, the context, a shard_map around it, no devices.

The bits of a call, and of its gradient, do not depend on it.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe import routers
from moe_case import Case, mesh_of

CONFIG = jmm.MegaMoEConfig(
    num_experts=8,
    top_k=2,
    hidden=128,
    intermediate=128,
    max_tokens_per_rank=8,
    activation=jmm.swiglu(limit=4.0),
    timeout_s=60.0,
)
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@pytest.fixture(scope="module")
def case():
    case = Case(np.random.default_rng(11), CONFIG, 8, 8, "masked")
    case.add_biases(np.random.default_rng(12))
    return case


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert np.linalg.norm(np.asarray(b, np.float32)) > 0


def gradients(call, case, weights):
    """With respect to x, routing weights and biases, of a loss that is not linear in y."""

    def loss(x, p, b13, b2):
        placed = dataclasses.replace(weights, b13=b13, b2=b2)
        return jnp.sum(call(x, case.topk_idx, p, placed).astype(jnp.float32) ** 2)

    operands = (case.x, case.topk_weights, weights.b13, weights.b2)
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*operands)


def test_inside_a_shard_map_over_another_axis(case):
    """A data-parallel wrapper: x is one data shard's, and global over the rest of the mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "ep"), (AxisType.Auto,) * 2)
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        weights = layer.shard(case.weights)

        def wrapped(*operands):
            return jax.shard_map(
                lambda *a: layer(*a),
                mesh=mesh,
                in_specs=(P("data"),) * 3 + (P(),),
                out_specs=P("data"),
                axis_names={"data"},
            )(*operands)

        same(jax.jit(wrapped)(*case.operands, weights), layer(*case.operands, weights))
        same(gradients(wrapped, case, weights)[:2], gradients(layer, case, weights)[:2])
        # Sums over "data" stand in another order.
        for a, b in zip(
            gradients(wrapped, case, weights)[2:], gradients(layer, case, weights)[2:], strict=True
        ):
            assert jmm.reference.relative_error(a, np.asarray(b, np.float64)) <= 2.0**-8

        stats = jax.shard_map(
            lambda *a: layer(*a, return_stats=True)[1].tokens_per_expert[None],
            mesh=mesh,
            in_specs=(P("data"),) * 3 + (P(),),
            out_specs=P("data"),
            axis_names={"data"},
        )
        counts = np.asarray(jax.jit(stats)(*case.operands, weights))
        halves = np.asarray(case.topk_idx).reshape(2, -1)
        want = [np.bincount(half[half >= 0], minlength=CONFIG.num_experts) for half in halves]
        np.testing.assert_array_equal(counts, want)


def test_a_wrapper_does_not_run_the_layer_twice(case):
    """What is computed again for the gradient inside a shard_map are casts only."""
    mesh = jax.make_mesh((2, 4), ("data", "ep"), (AxisType.Auto,) * 2)
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        weights = layer.shard(case.weights)
        step = jax.shard_map(
            lambda *a: layer(*a),
            mesh=mesh,
            in_specs=(P("data"),) * 3 + (P(),),
            out_specs=P("data"),
            axis_names={"data"},
        )
        grad = jax.jit(
            jax.grad(lambda x: jnp.sum(step(x, *case.operands[1:], weights).astype(float) ** 2))
        )
        assert grad.lower(case.x).as_text().count("@jax_megamoe.mega_moe") == 1


def test_refusals_inside_a_shard_map(case):
    mesh = jax.make_mesh((2, 4), ("data", "ep"), (AxisType.Auto,) * 2)
    other = jax.make_mesh((4, 2), ("data", "ep"), (AxisType.Auto,) * 2)
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        weights = layer.shard(case.weights)

        def inside(mesh, axes):
            spec = P(tuple(axes))
            step = jax.shard_map(
                lambda *a: layer(*a), mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes
            )
            jax.eval_shape(step, *case.operands, weights)

        with pytest.raises(jmm.MegaMoEError, match=r"manual over 'ep'.*layer\.local"):
            inside(mesh, {"ep"})
        with pytest.raises(jmm.MegaMoEError, match=r"surrounding shard_map: got .*'ep': 2"):
            inside(other, {"data"})


@AXIS_TYPES
def test_the_mesh_of_the_context(case, axis_type):
    mesh = jax.make_mesh((8,), ("ep",), (axis_type,))
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        want = layer(*case.operands, layer.shard(case.weights))
    with jax.set_mesh(mesh), jmm.MegaMoE(CONFIG, axis="ep") as layer:
        assert layer.mesh == mesh
        weights = layer.shard(case.weights)
        same(layer(*case.operands, weights), want)
        same(jax.jit(layer)(*case.operands, weights), want)
        with jmm.MegaMoE(CONFIG, mesh) as explicit:
            assert explicit._site == layer._site
    with pytest.raises(jmm.MegaMoEError, match=r"mesh: got None, and no mesh is set.*set_mesh"):
        jmm.MegaMoE(CONFIG, axis="ep")


# ---- without devices ----


def described(tree, mesh):
    sharding = NamedSharding(mesh, P("ep"))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


@AXIS_TYPES
@pytest.mark.parametrize("backend", ["cpu", "sm_90a"])
def test_lowering_without_devices(case, axis_type, backend):
    mesh = AbstractMesh((8,), ("ep",), (axis_type,))
    platform = "cpu" if backend == "cpu" else "cuda"
    layer = jmm.MegaMoE(CONFIG, mesh, backend=backend)
    weights = described(jax.eval_shape(layer.shard, case.weights), mesh)
    operands = described(case.operands, mesh)
    assert weights.layout == ("cpu" if backend == "cpu" else "sm90_bf16")

    def loss(x, *rest):
        return jnp.sum(layer(x, *rest).astype(jnp.float32) ** 2)

    for function in (layer, jax.grad(loss)):
        traced = jax.jit(function).trace(*operands, weights)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert layer._site.buffer_key in text
    exported = jax.export.export(
        jax.jit(layer), platforms=(platform,), disabled_checks=jmm.export_checks()
    )(*operands, weights)
    assert exported.nr_devices == 8
    if backend == "cpu":
        devices = jax.make_mesh((8,), ("ep",), (axis_type,))
        with jmm.MegaMoE(CONFIG, devices) as real:
            assert real._site == layer._site
            placed = jax.device_put(case.operands, NamedSharding(devices, P("ep")))
            own = real.shard(case.weights)
            same(exported.call(*placed, own), real(*placed, own))


@pytest.mark.parametrize(
    ("kind", "platform", "backend"),
    [
        ("cpu", "cpu", "cpu"),
        ("NVIDIA H200", "cuda", "sm_90a"),
        ("NVIDIA GH200 480GB", "cuda", "sm_90a"),
    ],
)
def test_an_abstract_mesh_may_say_what_its_devices_are(kind, platform, backend):
    device = jax.sharding.AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((8,), ("ep",), abstract_device=device)
    assert jmm.MegaMoE(CONFIG, mesh).backend == backend
    with jax.sharding.use_abstract_mesh(mesh):
        assert jmm.MegaMoE(CONFIG).mesh == mesh


def test_a_layer_without_devices_does_not_run(case):
    mesh = AbstractMesh((8,), ("ep",))
    with pytest.raises(jmm.MegaMoEError, match=r"backend: got None for .* unknown devices.*Pass b"):
        jmm.MegaMoE(CONFIG, mesh)
    with pytest.raises(jmm.MegaMoEError, match=r"backend: got 'sm_100a'.*'cpu', 'sm_90a'"):
        jmm.MegaMoE(CONFIG, mesh, backend="sm_100a")
    with pytest.raises(jmm.MegaMoEError, match=r"backend: got 'sm_90a'; expected 'cpu'"):
        jmm.MegaMoE(CONFIG, mesh_of(8), backend="sm_90a")
    with pytest.raises(jmm.MegaMoEError, match=r"axis: got 'experts'"):
        jmm.MegaMoE(CONFIG, mesh, axis="experts", backend="cpu")
    with jmm.MegaMoE(CONFIG, mesh, backend="cpu") as layer:
        for use in (
            lambda: layer(*case.operands, case.weights),
            lambda: layer.shard(case.weights),
            lambda: layer.buffer,
        ):
            with pytest.raises(jmm.MegaMoEError, match=r"AbstractMesh.*mesh of devices to run"):
                use()


# ---- closed layers ----


def test_a_closed_layer_is_refused_when_it_is_traced(case):
    """Also while another layer keeps the buffer of its shape open."""
    mesh = mesh_of(8)
    layer = jmm.MegaMoE(CONFIG, mesh)
    weights = layer.shard(case.weights)
    local = jax.shard_map(layer.local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with jmm.MegaMoE(CONFIG, mesh) as other:
        assert other.buffer is layer.buffer
        layer.close()
        for use in (
            lambda: layer(*case.operands, weights),
            lambda: jax.jit(layer)(*case.operands, weights),
            lambda: jax.grad(lambda x: layer(x, *case.operands[1:], weights).sum())(case.x),
            lambda: local(*case.operands, weights),
            lambda: layer.shard(case.weights),
        ):
            with pytest.raises(jmm.MegaMoEError, match="layer: got one that has been closed"):
                use()
        assert np.isfinite(np.asarray(other(*case.operands, weights), np.float32)).all()
    gc.collect()


# ---- routers on Explicit meshes ----

ROUTERS = {
    "kimi_k2": (routers.kimi_k2(top_k=2), True),
    "groups": (routers.deepseek_v3(top_k=2, n_group=4, topk_group=2), True),
    "gpt_oss": (routers.gpt_oss(top_k=2), True),
    "qwen3": (routers.qwen3_moe(top_k=2), False),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(
    "x_spec", [P(), P("data"), P("ep"), P(("data", "ep")), P("data", "ep")], ids=str
)
@pytest.mark.parametrize("w_spec", [P("ep"), P("ep", "data"), P(None, "ep")], ids=str)
def test_a_router_with_its_gate_spread(rng, name, x_spec, w_spec):
    """As with Auto axes, where the compiler moves what it needs."""
    router, biased = ROUTERS[name]
    x, w = (rng.integers(-8, 9, (16, 32)).astype(np.float32) / 8 for _ in range(2))
    bias = rng.standard_normal(16).astype(np.float32) if biased else None
    results = []
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "ep"), (axis_type,) * 2)
        with jax.set_mesh(mesh):
            operands = [
                jax.device_put(a, NamedSharding(mesh, spec))
                for a, spec in ((x, x_spec), (w, w_spec), (bias, P("ep")))
                if a is not None
            ]
            b = operands[2] if biased else None

            def weighted(x, w, b=b):
                idx, p = router(x, w, b)
                return (p * (1 + idx)).sum(), (idx, p)

            gradient = jax.jit(jax.grad(weighted, (0, 1), has_aux=True))
            (dx, dw), (idx, p) = gradient(*operands[:2])
            results.append([np.asarray(a) for a in (idx, p, dx, dw)])
    (idx, *floats), (want_idx, *want) = results[1], results[0]
    np.testing.assert_array_equal(idx, want_idx)  # logits are exact, whatever the order of sums
    for a, b in zip(floats, want, strict=True):
        # Sums of up to 32 terms in two orders: 2^-19 of the terms, which cancel in part. A device's
        # share that is missing or counts twice is an eighth.
        assert jmm.reference.relative_error(a, b.astype(np.float64)) <= 2.0**-12


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("x_spec", [P(), P("data"), P(("data", "ep"))], ids=str)
def test_hash_layers_and_loads_on_explicit_meshes(rng, x_spec, jit):
    """The table is looked up where the token is; loads of all shards come out summed."""
    router = routers.deepseek_v4(top_k=2, routed_scaling_factor=1.5)
    x, w = (rng.integers(-8, 9, (16, 32)).astype(np.float32) / 8 for _ in range(2))
    table = rng.integers(-1, 16, (9, 2)).astype(np.int32)
    ids = rng.integers(0, 9, 16).astype(np.int32)
    mesh = jax.make_mesh((2, 4), ("data", "ep"), (AxisType.Explicit,) * 2)

    def route(x, w, table, ids):
        idx, p = router(x, w, tid2eid=table, token_ids=ids)
        return idx, p, routers.expert_load(idx, 16)

    want_idx, want_p, _ = route(x, w, table, ids)
    specs = x_spec, P("ep"), P(), x_spec
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((x, w, table, ids), specs, strict=True)
        ]
        idx, p, load = (jax.jit(route) if jit else route)(*placed)
        bias = jax.device_put(np.zeros(16, np.float32), NamedSharding(mesh, P("ep")))
        step = routers.update_bias(bias, load)
    np.testing.assert_array_equal(np.asarray(idx), table[ids])
    np.testing.assert_array_equal(np.asarray(idx), np.asarray(want_idx))
    np.testing.assert_array_equal(np.asarray(p == 0), np.asarray(want_p == 0))
    counts = np.bincount(table[ids][table[ids] >= 0], minlength=16)
    np.testing.assert_array_equal(np.asarray(load), counts)
    assert (np.sign(np.asarray(step)) == np.sign(counts.mean() - counts)).all()
