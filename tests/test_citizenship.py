"""What Python programs expect of an object: exit, equality, copies, pickle, names."""

import copy
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_megamoe as jmm
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


def test_nothing_is_printed_at_exit_with_layers_open():
    done = subprocess.run([sys.executable, "-c", OPEN_AT_EXIT], capture_output=True, text=True)
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


def test_shard_is_compiled_once_per_shape(monkeypatch):
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
