"""Weights of several layers in one tree, for `jax.lax.scan`: conversion, memory, use, messages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_weights import foldable_bytes

import jax_megamoe as jmm
from block_case import BlockCase
from jax_megamoe import _shard
from moe_case import Case, mesh_of

LAYERS, RANKS = 3, 4
CONFIG = jmm.MegaMoEConfig(8, 2, 256, 128, 16)


def stacked(trees, stack=np.stack):
    return jax.tree.map(lambda *arrays: stack(arrays), *trees)


def layer_weights(rng, config, biases=False):
    shape = config.num_experts, config.intermediate, config.hidden
    weights = foldable_bytes(rng, *shape)
    if biases:
        b13, b2 = (rng.standard_normal((shape[0], n), np.float32) for n in (2 * shape[1], shape[2]))
        weights = dataclasses.replace(weights, b13=b13, b2=b2)
    return jax.tree.map(np.asarray, weights)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def for_layout(layer, layout):
    """Makes `layer.shard` on CPU devices do what it does on GPUs, where the layout is theirs."""
    if layout != "cpu":
        layer._site = layer._site._replace(backend="sm_90a")
    assert layer._site.layout == layout


@pytest.mark.parametrize("where", ["host", "device", "jit"])
@pytest.mark.parametrize(
    ("layout", "granularity", "hidden", "biases"),
    [
        ("cpu", 32, 256, False),
        ("cpu", 32, 160, True),
        ("sm90_fp8", "row", 256, False),
        ("sm90_fp8", 128, 160, True),
        ("sm90_bf16", 32, 256, True),
    ],
)
def test_a_stack_is_the_stack_of_its_layers(layout, granularity, hidden, biases, where):
    rng = np.random.default_rng()
    config = dataclasses.replace(CONFIG, hidden=hidden, activation_granularity=granularity)
    layers = [layer_weights(rng, config, biases) for _ in range(LAYERS)]
    stack = stacked(layers)
    if where != "host":
        stack = jax.tree.map(jnp.asarray, stack)
    with jmm.MegaMoE(config, mesh_of(RANKS)) as layer:
        for_layout(layer, layout)
        got = (jax.jit(layer.shard) if where == "jit" else layer.shard)(stack)
        wanted = [layer.shard(weights) for weights in layers]
    assert got.layout == layout and got.num_layers == LAYERS and got.num_experts == 8
    assert wanted[0].num_layers is None and wanted[0].num_experts == 8
    assert_same(got, stacked(wanted))
    for array in jax.tree.leaves(got):
        assert array.sharding.is_equivalent_to(NamedSharding(layer.mesh, P(None, "ep")), array.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_of_the_mesh_have_copies(kind):
    rng = np.random.default_rng()
    mesh = jax.make_mesh((2, 4), ("data", "ep"), (kind,) * 2)
    layers = [layer_weights(rng, CONFIG) for _ in range(2)]
    on_devices = jax.device_put(stacked(layers), NamedSharding(mesh, P(None, "ep")))
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        wanted = stacked([layer.shard(weights) for weights in layers])
        assert_same(layer.shard(stacked(layers)), wanted)
        assert_same(layer.shard(on_devices), wanted)
        assert_same(jax.jit(layer.shard)(on_devices), wanted)


def test_a_stack_without_devices_has_a_shape():
    mesh = AbstractMesh((4,), ("ep",))
    stack = stacked([layer_weights(np.random.default_rng(), CONFIG) for _ in range(2)])
    layer = jmm.MegaMoE(CONFIG, mesh, backend="sm_90a")
    shapes = jax.eval_shape(layer.shard, stack)
    assert shapes.layout == "sm90_bf16" and shapes.w13.shape[:3] == (2, 8, 2)
    with pytest.raises(jmm.MegaMoEError, match="AbstractMesh"):
        layer.shard(stack)


@pytest.mark.parametrize("layout", ["cpu", "sm90_fp8", "sm90_bf16"])
def test_no_second_stack_on_the_devices(layout):
    """What programs take beside their operands, as XLA says, does not grow with the layers."""
    granularity = "row" if layout == "sm90_fp8" else 32
    config = dataclasses.replace(CONFIG, activation_granularity=granularity)
    one, mesh = layer_weights(np.random.default_rng(), config), mesh_of(2)
    weights = jax.device_put(one, NamedSharding(mesh, P("ep")))
    whole = _shard._converter(config, layout, mesh, "ep", True)
    by_layer = _shard._stack_converter(config, layout, mesh, "ep")
    temporary = {}
    for many in (8, 32):
        converted = whole(stacked([one] * many))
        layer_bytes = sum(a.nbytes for a in jax.tree.leaves(converted)) // 2 // many  # per device
        in_place = by_layer.lower(converted, weights, np.int32(0)).compile().memory_analysis()
        assert in_place.alias_size_in_bytes == many * layer_bytes
        at_once = whole.lower(stacked([one] * many)).compile().memory_analysis()
        temporary[many] = in_place.temp_size_in_bytes, at_once.temp_size_in_bytes
        by_layer(converted, weights, np.int32(0))
        assert all(array.is_deleted() for array in jax.tree.leaves(converted))
    for few, more in zip(*temporary.values(), strict=True):
        assert more - few < layer_bytes


# Use ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_scan_over_a_stack_is_the_loop_over_its_layers(kind):
    rng = np.random.default_rng()
    mesh = jax.make_mesh((RANKS,), ("ep",), (kind,))
    case = Case(rng, CONFIG, RANKS, 16)
    x, topk_idx, topk_weights = jax.device_put(case.operands, NamedSharding(mesh, P("ep")))
    layers = [case.weights, *(quantized(rng, CONFIG) for _ in range(LAYERS - 1))]
    with jmm.MegaMoE(CONFIG, mesh) as layer, jax.set_mesh(mesh):
        stack = layer.shard(stacked(layers))

        def step(x, weights):
            return x + layer(x, topk_idx, topk_weights, weights), None

        def scanned(x):
            return jax.lax.scan(step, x, stack)[0]

        def looped(x, layers):
            for weights in layers:
                x, _ = step(x, weights)
            return x

        alone = [layer.shard(weights) for weights in layers]
        want = jax.jit(looped)(x, alone)
        got = jax.jit(scanned)(x)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        assert (np.asarray(got) != np.asarray(jax.jit(looped)(x, alone[::-1]))).any()
        grad = jax.jit(jax.grad(lambda x: scanned(x).astype(jnp.float32).sum()))(x)
    assert np.isfinite(np.asarray(grad, np.float32)).all() and np.asarray(grad != 1).any()


def quantized(rng, config):
    shapes = [(config.num_experts, config.intermediate, config.hidden)] * 2
    shapes.append((config.num_experts, config.hidden, config.intermediate))
    dense = [rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5 for shape in shapes]
    return jmm.quantize_weights(*dense)


@pytest.mark.parametrize("name", ["V4", "Kimi-K3", "gpt-oss"])
def test_a_block_takes_a_stack(name, tmp_path):
    """Router, shared expert, latent and biases of several layers, with a gradient for them."""
    case = BlockCase(np.random.default_rng(), name, 1, tmp_path)
    one = jmm.blocks.load(case.checkpoint, 1)
    other = one._replace(
        router={**one.router, "weight": -one.router["weight"]},
        experts=jax.tree.map(lambda a: a[::-1], one.experts),
    )
    mesh = mesh_of(2)
    with jmm.blocks.MoEBlock.of(case.checkpoint, mesh, max_tokens_per_rank=32) as block:
        stack = block.shard(stacked([one, other]))
        alone = [block.shard(weights) for weights in (one, other)]
        assert_same(stack, stacked(alone))
        x = jnp.asarray(case.x)

        def loss(trained, weights):
            weights = weights._replace(shared=trained)
            y = block(x, weights, token_ids=case.token_ids)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        def step(total, weights):
            (value, y), grad = jax.value_and_grad(loss, has_aux=True)(weights.shared, weights)
            return total + value, (y, grad)

        _, (y, grads) = jax.jit(lambda s: jax.lax.scan(step, jnp.float32(0), s))(stack)
        for i, weights in enumerate(alone):
            want = jax.jit(block)(x, weights, token_ids=case.token_ids)
            np.testing.assert_array_equal(np.asarray(y[i]), np.asarray(want))
    assert all(np.asarray(g, np.float32).any() for g in jax.tree.leaves(grads))


# Messages ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer():
    with jmm.MegaMoE(CONFIG, mesh_of(2)) as layer:
        yield layer


@pytest.fixture(scope="module")
def stack():
    return stacked([layer_weights(np.random.default_rng(), CONFIG, True) for _ in range(LAYERS)])


@pytest.mark.parametrize("field", ["w13_sf", "w2", "w2_sf", "b13", "b2"])
@pytest.mark.parametrize("cut", [slice(0, 2), 0], ids=["2 layers", "1 layer"])
def test_axes_that_disagree_are_named(layer, stack, field, cut):
    array = getattr(stack, field)[cut]
    got = rf"got {array.dtype}\[{', '.join(map(str, array.shape))}\]"
    want = ", ".join(map(str, (LAYERS, *getattr(stack, field).shape[1:])))
    with pytest.raises(
        jmm.MegaMoEError, match=rf"weights\.{field}.*{got}; expected \w+ \[{want}\]"
    ):
        layer.shard(dataclasses.replace(stack, **{field: array}))


def test_a_stack_is_no_layer(layer, stack):
    message = r"weights: got a stack of 3 layers, with w13 uint8.*one layer\. jax\.lax\.scan"
    x, idx = jnp.zeros((8, CONFIG.hidden), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)
    sharded = layer.shard(stack)
    for call in (
        lambda: layer(x, idx, jnp.ones((8, 2)), sharded),
        lambda: jmm.to_layout(stack, "cpu"),
        lambda: jmm.dequantize_weights(sharded),
        lambda: jmm.expert_biases(stack),
    ):
        with pytest.raises(jmm.MegaMoEError, match=message):
            call()
    with pytest.raises(jmm.MegaMoEError, match=r"weights\.w13 .*got uint8\[1, 3, "):
        layer.shard(jax.tree.map(lambda a: a[None], stack))


def test_what_a_layout_cannot_hold_is_named_with_its_layer(stack):
    sf = stack.w13_sf.copy()
    sf[2, 5, 7, 0] = 255
    bad = dataclasses.replace(stack, w13_sf=sf)
    config = dataclasses.replace(CONFIG, activation_granularity="row")
    for layout in ("cpu", "sm90_fp8"):
        with jmm.MegaMoE(config, mesh_of(2)) as layer:
            for_layout(layer, layout)
            with pytest.raises(jmm.MegaMoEError, match=r"w13, layer 2, expert 5, gate row 7.*NaN"):
                layer.shard(bad)


def test_messages_of_a_block(tmp_path):
    case = BlockCase(np.random.default_rng(), "V4", 0, tmp_path)
    one = jmm.blocks.load(case.checkpoint, 0)
    two = stacked([one, one])
    with jmm.blocks.MoEBlock.of(case.checkpoint, mesh_of(2), max_tokens_per_rank=32) as block:
        with pytest.raises(jmm.MegaMoEError, match=r"weights: got a stack of 2 layers.*lax\.scan"):
            block(jnp.asarray(case.x), block.shard(two), token_ids=case.token_ids)
        for part in ("router", "shared"):
            for name, array in getattr(two, part).items():
                bad = two._replace(**{part: {**getattr(two, part), name: array[:1]}})
                message = rf"weights\.{part}\['{name}'\].*\[1, .*expected.*\[2, .*[Ii]n a stack"
                with pytest.raises(jmm.MegaMoEError, match=message):
                    block.shard(bad)
