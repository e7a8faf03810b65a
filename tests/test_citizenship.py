"""What Python programs expect of an object: exit, equality, copies, pickle, names."""

import copy
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_megamoe as jmm
from jax_megamoe import _shard
from jax_megamoe import weights as weights_lib
from moe_case import Case, mesh_of

CONFIG = jmm.MegaMoEConfig(8, 2, 128, 128, 16)
OPEN_AT_EXIT = """
import jax, jax_megamoe as jmm
jmm.use_virtual_cpu_devices(2)
mesh = jax.make_mesh((2,), ("ep",))
layer = jmm.MegaMoE(jmm.MegaMoEConfig(8, 2, 128, 128, 8), mesh)
other = jmm.MegaMoE(jmm.MegaMoEConfig(8, 2, 256, 128, 8), mesh)
cycle = [other]
cycle.append(cycle)
f = jax.jit(layer)
"""
#: A reference that is never given up, as those of registries in C++ are.
IMMORTAL = """
import ctypes
ctypes.pythonapi.Py_IncRef(ctypes.py_object(layer))
"""


@pytest.mark.parametrize("more", ["", IMMORTAL], ids=["open", "immortal"])
def test_nothing_is_printed_at_exit_with_layers_open(more):
    command = [sys.executable, "-c", OPEN_AT_EXIT + more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_collector_gives_buffers_up():
    layer = jmm.MegaMoE(CONFIG, mesh_of(4))
    buffer = layer.buffer
    assert buffer.is_open
    del layer
    assert not buffer.is_open


def test_what_the_constructor_refuses_owns_nothing():
    with jmm.MegaMoE(CONFIG, mesh_of(2)) as layer:
        buffer = layer.buffer
        with pytest.raises(jmm.MegaMoEError, match="token_axes"):
            jmm.MegaMoE(CONFIG, mesh_of(2), token_axes=("data",))
    assert not buffer.is_open


def test_equal_layers_share_a_program():
    traces = []

    def step(layer, x, idx, weights, sharded):
        traces.append(layer)
        return layer(x, idx, weights, sharded)

    case = Case(np.random.default_rng(5), CONFIG, 4, 16)
    jitted = jax.jit(step, static_argnums=0)
    with jmm.MegaMoE(CONFIG, mesh_of(4)) as a, jmm.MegaMoE(CONFIG, mesh_of(4)) as b:
        assert a == b and hash(a) == hash(b) and a != jmm.MegaMoE(CONFIG, mesh_of(2))
        sharded = a.shard(case.weights)
        first = jitted(a, *case.operands, sharded)
        second = jitted(b, *case.operands, sharded)
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
        assert len(traces) == 1
    assert a == a and a != b  # closed


def test_copies_are_users_of_the_same_buffer():
    case = Case(np.random.default_rng(6), CONFIG, 4, 16)
    with jmm.MegaMoE(CONFIG, mesh_of(4)) as layer:
        module = {"layer": layer, "more": [1]}
        twin = copy.deepcopy(module)["layer"]
        assert twin is not layer and twin == layer and twin.buffer is layer.buffer
        sharded = layer.shard(case.weights)
        want = np.asarray(layer(*case.operands, sharded))
    np.testing.assert_array_equal(np.asarray(twin(*case.operands, sharded)), want)
    twin.close()
    with pytest.raises(jmm.MegaMoEError, match="closed"):
        copy.copy(twin)


def test_pickle_says_what_to_do():
    with (
        jmm.MegaMoE(CONFIG, mesh_of(2)) as layer,
        pytest.raises(jmm.MegaMoEError, match=r"layer\.config.*create MegaMoE over"),
    ):
        pickle.dumps({"layer": layer})


def block_of(mesh, hidden=128):
    config = jmm.MegaMoEConfig(8, 2, hidden, 128, 16)
    return jmm.blocks.MoEBlock(config, jmm.routers.qwen3_moe(top_k=2), mesh)


def block_weights(rng):
    case = Case(rng, CONFIG, 4, 16)
    router = rng.standard_normal((8, 128), np.float32)
    return case.x, jmm.blocks.BlockWeights(case.weights, {"weight": router})


def test_blocks_are_equal_and_copied_as_their_layers_are():
    x, weights = block_weights(np.random.default_rng(9))
    mesh = mesh_of(4)
    with block_of(mesh) as block, block_of(mesh) as same:
        assert block == same and hash(block) == hash(same)
        others = jmm.routers.qwen3_moe(top_k=2, norm_topk_prob=False), block_of(mesh, 256)
        assert block != jmm.blocks.MoEBlock(CONFIG, others[0], mesh) and block != others[1]
        assert block != block.layer
        twin, shallow = copy.deepcopy(block), copy.copy(block)
        assert twin == block == shallow and twin.layer is not block.layer is not shallow.layer
        placed = block.shard(weights)
        want = np.asarray(block(x, placed))
    for copied in (twin, shallow):
        np.testing.assert_array_equal(np.asarray(copied(x, placed)), want)
        copied.close()
    assert not block.layer.buffer.is_open
    with pytest.raises(jmm.MegaMoEError, match="closed"):
        copy.copy(block)
    with pytest.raises(jmm.MegaMoEError, match=r"block\.config and block\.router.*create MoEBlock"):
        pickle.dumps([twin])


def test_modules_of_flax_that_hold_a_layer(monkeypatch):
    """A layer and a block are static attributes of a module, the arrays are its state."""
    nnx = pytest.importorskip("flax.nnx", reason="needs pip install 'jax-megamoe[examples]'")
    traces = []

    class MoE(nnx.Module):
        def __init__(self, block, layer, weights):
            self.block, self.layer = block, layer
            self.gate = nnx.Param(weights.router["weight"])
            leaves, self.tree = jax.tree.flatten(weights.experts)
            self.experts = nnx.List([nnx.Variable(leaf) for leaf in leaves])

        def __call__(self, x):
            traces.append(x.shape)
            experts = jax.tree.unflatten(self.tree, [leaf[...] for leaf in self.experts])
            weights = jmm.blocks.BlockWeights(experts, {"weight": self.gate[...]})
            topk_idx, topk_weights = self.block.router(x, self.gate)
            y = self.layer(x, topk_idx, topk_weights, experts)
            return self.block(x, weights), y

    MoE.__qualname__ = "MoE"  # as one of a module has, which pickle looks up
    monkeypatch.setattr(sys.modules[__name__], "MoE", MoE, raising=False)
    x, weights = block_weights(np.random.default_rng(10))
    mesh = mesh_of(4)
    with block_of(mesh) as block, jmm.MegaMoE(CONFIG, mesh) as layer:
        model = MoE(block, layer, block.shard(weights))
        call = nnx.jit(lambda model, x: model(x))
        want = [np.asarray(y) for y in call(model, x)]
        np.testing.assert_array_equal(*want)  # a block without more parts is router and layer
        twin = copy.deepcopy(model)
        assert twin.gate is not model.gate and twin.layer is not layer and twin.block is not block
        for other in (twin, nnx.clone(model), nnx.merge(*nnx.split(model))):
            for y in call(other, x):
                np.testing.assert_array_equal(np.asarray(y), want[0])
        assert len(traces) == 1  # static attributes of all of them are equal
        with pytest.raises(jmm.MegaMoEError, match=r"pickle of a (block|layer): .*create M"):
            pickle.dumps(model)
        twin.gate[...] = -twin.gate[...]  # the copy has arrays of its own
        y, same = call(twin, x)
        assert (np.asarray(y) != want[0]).any()
        np.testing.assert_array_equal(np.asarray(y), np.asarray(same))
        np.testing.assert_array_equal(np.asarray(call(model, x)[0]), want[0])


def test_shard_is_compiled_once_per_shape(monkeypatch):
    _shard._converter.cache_clear()  # another test may have had this shape
    calls = []
    convert = weights_lib.to_layout
    monkeypatch.setattr(weights_lib, "to_layout", lambda *a: calls.append(a[1]) or convert(*a))
    config = jmm.MegaMoEConfig(8, 2, 256, 128, 16)
    case = Case(np.random.default_rng(7), config, 4, 4)
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        first = layer.shard(case.weights)
        traced = len(calls)
        second = layer.shard(case.weights)
    assert traced == 1 and len(calls) == traced
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_profiles_show_the_layer_and_its_stages():
    case = Case(np.random.default_rng(8), CONFIG, 4, 16)
    mesh = mesh_of(4)
    with jmm.MegaMoE(CONFIG, mesh) as layer:
        step = jax.jit(layer).lower(*case.operands, layer.shard(case.weights))
        assert "jax_megamoe/" in step.compile().as_text()
    step = jax.jit(lambda *a: jmm.unfused.mega_moe(*a, CONFIG, mesh, "ep"))
    text = step.lower(*case.operands, case.weights).compile().as_text()
    for stage in ("dispatch", "linear1", "swiglu", "linear2", "combine"):
        assert f"/{stage}/" in text


def test_the_command_line_says_its_version():
    command = [sys.executable, "-m", "jax_megamoe", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"jax_megamoe {jmm.__version__}\n"
