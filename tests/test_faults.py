"""Lost signals, missing ranks, closed buffers: every wait ends, and says who waited for what."""

import dataclasses
import gc
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_megamoe as jmm
from jax_megamoe._ffi import native
from moe_case import Case, mesh_of

CONFIG = jmm.MegaMoEConfig(
    num_experts=8,
    top_k=2,
    hidden=128,
    intermediate=128,
    max_tokens_per_rank=96,
    ring_tokens=64,  # one block: every counter of the ring is waited for
    timeout_s=1.5,  # far above what a healthy wait takes, even on a busy machine
)
SIGNALS = {  # region whose signal is lost -> role that reports it
    "rank_barrier": "dispatch",
    "grid_barrier": "",
    "expert_recv_count": "",
    "l1_arrival": "linear1",
    "l1_empty": "dispatch",
    "l2_arrival": "linear2",
    "l2_empty": "linear1",
}


@pytest.fixture(scope="module")
def setup():
    case = Case(np.random.default_rng(4), CONFIG, 4, 96)
    with jmm.MegaMoE(CONFIG, mesh_of(4)) as layer:
        weights = layer.shard(case.weights)
        step = jax.jit(layer)
        yield layer, step, (*case.operands, weights), np.asarray(step(*case.operands, weights))


@pytest.mark.parametrize("region", SIGNALS)
def test_a_lost_signal_is_reported_and_survived(setup, region):
    layer, step, operands, want = setup
    layer.buffer.lose_next_signal(region, rank=2)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        step(*operands).block_until_ready()
    text = str(caught.value)
    first = text.split("Also waiting:")[0]
    assert "DEADLINE_EXCEEDED" in first and "timed out after 1.5 s" in first
    assert f"waited for {region}[" in first, text
    assert f"role {SIGNALS[region]}" in first
    for word in ("rank ", "worker ", "wanted ", "seen ", "raise MegaMoEConfig.timeout_s"):
        assert word in first, text
    if region in ("rank_barrier", "expert_recv_count"):  # a word per source rank
        assert "here rank 2" in first
    np.testing.assert_array_equal(np.asarray(step(*operands)), want)


def test_a_rank_that_never_enters_is_named(setup):
    """Three of four ranks arrive: the call itself, before any stage, has to time out."""
    layer, _, operands, _ = setup

    def body(x, idx, p, w):
        return jax.lax.cond(
            jax.lax.axis_index("ep") == 3,
            lambda: x,
            lambda: layer.local(x, idx, p, w),
        )

    step = jax.jit(
        jax.shard_map(
            body, mesh=layer.mesh, in_specs=(P("ep"),) * 4, out_specs=P("ep"), check_vma=False
        )
    )
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"timed out after 1.5 s: stage arrival: .*wanted 4, seen 3; missing rank 3",
    ):
        step(*operands).block_until_ready()


def test_a_late_rank_is_waited_for():
    case = Case(np.random.default_rng(4), CONFIG, 2, 16)
    config = dataclasses.replace(CONFIG, timeout_s=60.0)
    with jmm.MegaMoE(config, mesh_of(2)) as layer:

        def late(x):
            def sleep(v):
                time.sleep(1.0)
                return v

            return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        def body(x, idx, p, w):
            x = jax.lax.cond(jax.lax.axis_index("ep") == 1, late, lambda v: v, x)
            return layer.local(x, idx, p, w)

        step = jax.jit(
            jax.shard_map(
                body, mesh=layer.mesh, in_specs=(P("ep"),) * 4, out_specs=P("ep"), check_vma=False
            )
        )
        case.check(step(*case.operands, layer.shard(case.weights)))


# ---- symmetric buffers ----


def test_layers_of_one_shape_share_a_buffer():
    mesh = mesh_of(4)
    config = dataclasses.replace(CONFIG, max_tokens_per_rank=11)
    first = jmm.MegaMoE(config, mesh)
    other = dataclasses.replace(config, activation=jmm.swiglu(7.0), checked=True, timeout_s=9.0)
    second = jmm.MegaMoE(other, mesh)
    assert first.buffer is second.buffer
    key = first.buffer.key
    first.close()
    first.close()  # closing twice gives up one use, not two
    assert second.buffer.is_open and key in native.buffer_keys()
    second.close()
    assert not second.buffer.is_open and key not in native.buffer_keys()


def test_buffers_of_several_meshes_and_configs_live_side_by_side(rng):
    meshes = [mesh_of(2), mesh_of(4), jax.sharding.Mesh(np.array(jax.devices("cpu")[4:8]), ("ep",))]
    configs = [dataclasses.replace(CONFIG, top_k=k, timeout_s=30.0) for k in (1, 2)]
    layers = [jmm.MegaMoE(config, mesh) for mesh in meshes for config in configs]
    assert len({layer.buffer.key for layer in layers}) == len(layers)
    for layer in layers:
        case = Case(rng, layer.config, layer.num_ranks, 9)
        case.check(jax.jit(layer)(*case.operands, layer.shard(case.weights)))
    for layer in layers:
        layer.close()


def test_buffers_do_not_pile_up():
    before = native.buffer_keys()
    for tokens in range(1, 25):
        layer = jmm.MegaMoE(dataclasses.replace(CONFIG, max_tokens_per_rank=tokens), mesh_of(4))
        del layer
    gc.collect()
    assert native.buffer_keys() == before


def test_closing_waits_for_dispatched_calls():
    case = Case(np.random.default_rng(4), CONFIG, 4, 96)
    config = dataclasses.replace(CONFIG, max_tokens_per_rank=101, timeout_s=30.0)
    for _ in range(10):
        with jmm.MegaMoE(config, mesh_of(4)) as layer:
            weights = layer.shard(case.weights)
            outs = [jax.jit(layer)(*case.operands, weights) for _ in range(5)]
        for y in outs:
            assert np.isfinite(np.asarray(y, np.float32)).all()


def test_closing_during_calls_never_hangs():
    """Calls in flight finish or fail with a clear error; nothing crashes or waits forever."""
    case = Case(np.random.default_rng(4), CONFIG, 4, 96)
    config = dataclasses.replace(CONFIG, max_tokens_per_rank=97, timeout_s=30.0)
    for delay in (0.0, 0.002, 0.02):
        layer = jmm.MegaMoE(config, mesh_of(4))
        weights = layer.shard(case.weights)
        step = jax.jit(layer)
        want = np.asarray(step(*case.operands, weights))
        closer = threading.Timer(delay, layer.close)
        closer.start()
        try:
            for _ in range(50):
                np.testing.assert_array_equal(np.asarray(step(*case.operands, weights)), want)
        except jax.errors.JaxRuntimeError as error:
            assert "symmetric buffer" in str(error)
        closer.join()


def test_a_closed_layer_says_how_to_open_one(setup):
    _, _, operands, _ = setup
    layer = jmm.MegaMoE(dataclasses.replace(CONFIG, max_tokens_per_rank=98), mesh_of(4))
    step = jax.jit(layer)
    step(*operands).block_until_ready()
    layer.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no symmetric buffer.*MegaMoE\("):
        step(*operands).block_until_ready()


def test_reading_an_unknown_region(setup):
    layer, *_ = setup
    with pytest.raises(jmm.MegaMoEError, match="region: got 'l3_acts'"):
        layer.buffer.read("l3_acts", 0)


def test_ranks_and_groups_are_checked(setup):
    layer, *_ = setup
    with pytest.raises(jmm.MegaMoEError, match="rank: got 4; expected an int from 0 to 3"):
        layer.buffer.read("x", rank=4)
    with pytest.raises(ValueError, match="no such group or rank"):
        layer.buffer.lose_next_signal("l1_arrival", rank=0, group=1)


def test_workers_setting_is_checked(monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_CPU_WORKERS", "0")
    with pytest.raises(jmm.MegaMoEError, match="JAX_MEGAMOE_CPU_WORKERS: got '0'"):
        jmm.MegaMoE(dataclasses.replace(CONFIG, max_tokens_per_rank=99), mesh_of(2))


def test_instruction_set_setting_is_checked(monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_CPU_ISA", "mmx")
    with pytest.raises(jmm.MegaMoEError, match="JAX_MEGAMOE_CPU_ISA: got 'mmx'; expected one of"):
        jmm.MegaMoE(dataclasses.replace(CONFIG, max_tokens_per_rank=98), mesh_of(2))


def test_several_workers_per_rank_give_the_same_bits(setup, monkeypatch):
    _, _, operands, want = setup
    monkeypatch.setenv("JAX_MEGAMOE_CPU_WORKERS", "3")
    config = dataclasses.replace(CONFIG, max_tokens_per_rank=100, timeout_s=60.0)
    with jmm.MegaMoE(config, mesh_of(4)) as layer:
        assert layer.buffer.workers_per_rank == 3
        for _ in range(5):
            np.testing.assert_array_equal(np.asarray(jax.jit(layer)(*operands)), want)
