"""The layer under JAX on GPUs: the error rule, transformations, failures and lifetimes."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from gpu_case import CONFIG, on_cpu, with_granularity
from jax_megamoe._backends import device_backend, mesh_backend
from jax_megamoe.config import GRANULARITIES
from moe_case import GpuCase as Case


def gpu_mesh(num_ranks):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_ranks,), ("ep",), auto, devices=jax.devices("gpu")[:num_ranks])


def placed(case, layer):
    place = jax.sharding.NamedSharding(layer.mesh, jax.P("ep"))
    return jax.device_put(case.operands, place), layer.shard(jax.device_put(case.weights, place))


def check(case, y):
    with on_cpu():
        case.check(np.asarray(y, np.float64))


def on_ranks(count):
    """GPU counts for parametrize, each with its mark."""
    marks = {1: pytest.mark.gpu, 2: pytest.mark.multi_gpu}
    return [pytest.param(n, marks=marks[n]) for n in range(1, count + 1)]


@pytest.mark.parametrize("num_ranks", on_ranks(2))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_layer_meets_the_error_rule(rng, granularity, num_ranks):
    case = Case(rng, with_granularity(granularity), num_ranks, 100)
    with jmm.MegaMoE(case.config, gpu_mesh(num_ranks)) as layer:
        assert layer.backend == "sm_90a"
        operands, weights = placed(case, layer)
        layer.buffer.poison()
        y, stats = jax.jit(lambda *a: layer(*a, return_stats=True))(*operands, weights)
        check(case, y)
        idx = np.asarray(case.topk_idx)
        np.testing.assert_array_equal(
            stats.tokens_per_expert, np.bincount(idx[idx >= 0], minlength=CONFIG.num_experts)
        )
        np.testing.assert_array_equal(layer(*operands, weights), y)  # without jit


@pytest.mark.parametrize("num_ranks", on_ranks(2))
def test_scan_collectives_and_cuda_graphs(rng, num_ranks):
    case = Case(rng, with_granularity(128), num_ranks, 64)
    with jmm.MegaMoE(case.config, gpu_mesh(num_ranks)) as layer:
        operands, weights = placed(case, layer)
        x, topk_idx, topk_weights = operands

        def block(x, _):
            y = layer(x, topk_idx, topk_weights, weights)
            # Enough small operations for a graph, and one sum over all ranks.
            scale = jnp.sqrt(jnp.mean(jnp.square(y.astype(jnp.float32)))) + 1e-3
            return (y / scale).astype(jnp.bfloat16), scale

        step = jax.jit(lambda x: jax.lax.scan(block, x, length=4))
        first = jax.block_until_ready(step(x))
        for _ in range(20):
            again = step(x)
        np.testing.assert_array_equal(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])

        @jax.jit
        def unrolled(x):
            scales = []
            for _ in range(4):
                x, scale = block(x, None)
                scales.append(scale)
            return x, jnp.stack(scales)

        for _ in range(20):
            last = unrolled(x)
        np.testing.assert_allclose(last[1], first[1], rtol=1e-2)


@pytest.mark.parametrize(
    "num_ranks, region",
    [
        pytest.param(1, "grid_barrier", marks=pytest.mark.gpu),
        pytest.param(2, "expert_recv_count", marks=pytest.mark.multi_gpu),
    ],
)
def test_a_lost_signal_raises_in_the_main_thread_if_that_was_chosen(
    rng, caplog, on_failure, num_ranks, region
):
    config = with_granularity(128, timeout_s=1.0)
    case = Case(rng, config, num_ranks, 64)
    on_failure("raise")
    with jmm.MegaMoE(config, gpu_mesh(num_ranks)) as layer:
        operands, weights = placed(case, layer)
        step = jax.jit(layer)
        check(case, step(*operands, weights))
        for _ in range(2):
            layer.buffer.lose_next_signal(region, num_ranks - 1)
            with pytest.raises(jmm.MegaMoERuntimeError) as caught:
                jax.block_until_ready(step(*operands, weights))
                time.sleep(60)  # there is no next call
            wait = rf"timed out after 1 s: rank \d, SM \d+, role .* waited for {region}\[\d+\]"
            assert re.search(wait, str(caught.value))
            assert caplog.messages[-1] == str(caught.value)
            layer.check_failures()  # raised once
            check(case, step(*operands, weights))  # the next call works


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["log", "function", "broken function"])
def test_a_lost_signal_interrupts_nothing_by_default(rng, caplog, on_failure, choice):
    told = []

    def listener(error):
        told.append(str(error))
        if choice == "broken function":
            raise ValueError("broken")

    if choice != "log":
        on_failure(listener)
    config = with_granularity(128, timeout_s=1.0)
    case = Case(rng, config, 1, 64)
    with jmm.MegaMoE(config, gpu_mesh(1)) as layer:
        operands, weights = placed(case, layer)
        step = jax.jit(layer)
        for count in (1, 2):
            layer.buffer.lose_next_signal("grid_barrier", 0)
            y = jax.block_until_ready(step(*operands, weights))
            for _ in range(1200):
                if len(told or caplog.records) == count:
                    break
                time.sleep(0.05)  # in which nothing is raised here
            assert np.isnan(np.asarray(y, np.float32)).all()
            with pytest.raises(jmm.MegaMoERuntimeError, match="waited for grid_barrier") as caught:
                layer.check_failures()
            assert (told or caplog.messages)[count - 1] == str(caught.value)
            layer.check_failures()  # raised once
            check(case, step(*operands, weights))
    assert len(told) == (0 if choice == "log" else 2)
    assert len(caplog.records) == (0 if choice == "function" else 2)


@pytest.mark.gpu
def test_warm_up_loads_what_calls_need(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_CACHE_DIR", str(tmp_path))
    config = with_granularity(128, max_tokens_per_rank=72)  # a shape of its own
    case = Case(rng, config, 1, 64)
    with jmm.MegaMoE(config, gpu_mesh(1)) as layer:
        assert layer.warm_up(64) == layer.warm_up([64, 64]) == 1
        assert len(list(tmp_path.iterdir())) == 1
        for file in tmp_path.iterdir():
            file.unlink()
        operands, weights = placed(case, layer)
        check(case, jax.jit(layer)(*operands, weights))
        assert not list(tmp_path.iterdir())  # nothing was compiled


@pytest.mark.gpu
def test_refused_values_are_reported(rng):
    config = with_granularity(128, checked=True)
    case = Case(rng, config, 1, 16)
    case.topk_idx = case.topk_idx.at[3, 1].set(4711)
    with jmm.MegaMoE(config, gpu_mesh(1)) as layer:
        operands, weights = placed(case, layer)
        with pytest.raises(jmm.MegaMoERuntimeError, match="got expert id 4711 at token 3, slot 1"):
            jax.block_until_ready(jax.jit(layer)(*operands, weights))
            for _ in range(200):
                time.sleep(0.05)
                layer.check_failures()


@pytest.mark.gpu
def test_closed_and_reopened(rng):
    case = Case(rng, with_granularity(128), 1, 64)
    layer = jmm.MegaMoE(case.config, gpu_mesh(1))
    operands, weights = placed(case, layer)
    step = jax.jit(layer)
    check(case, step(*operands, weights))
    layer.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no symmetric buffer with key"):
        jax.block_until_ready(step(*operands, weights))
    with jmm.MegaMoE(case.config, gpu_mesh(1)):
        check(case, step(*operands, weights))


@pytest.mark.gpu
def test_gradients_of_tokens_and_routing_weights(rng):
    case = Case(rng, with_granularity(128), 1, 32)
    with jmm.MegaMoE(case.config, gpu_mesh(1)) as layer:
        (x, topk_idx, topk_weights), weights = placed(case, layer)

        def loss(x, topk_weights):
            return jnp.sum(layer(x, topk_idx, topk_weights, weights).astype(jnp.float32) ** 2)

        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, topk_weights)
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)
        assert np.abs(np.asarray(grads[1])).max() > 0


# Without a GPU: what is refused ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    compute_capability: str = ""
    device_kind: str = "NVIDIA Test"


def test_backends_of_devices():
    assert device_backend(FakeDevice("cpu")) == "cpu"
    assert device_backend(FakeDevice("gpu", "9.0")) == "sm_90a"
    with pytest.raises(jmm.MegaMoEError, match=r"NVIDIA Test \(sm_80\).*9\.0.*unfused"):
        device_backend(FakeDevice("gpu", "8.0"))
    with pytest.raises(jmm.MegaMoEError, match=r"sm_100.*9\.0"):
        device_backend(FakeDevice("gpu", "10.0"))
    with pytest.raises(jmm.MegaMoEError, match=r"platform 'tpu'; expected 'cpu' or 'gpu'.*unfused"):
        device_backend(FakeDevice("tpu"))


def test_a_mesh_of_two_kinds_of_devices_is_refused():
    class Mesh:
        devices = np.array([FakeDevice("cpu"), FakeDevice("gpu", "9.0")])

    with pytest.raises(jmm.MegaMoEError, match=r"got back ends \['cpu', 'sm_90a'\]"):
        mesh_backend(Mesh())


def test_checking_for_failures_without_a_gpu_does_nothing():
    jmm.check_failures()
