"""The GPU kernels without JAX: several ranks on one GPU, or on several, against the reference."""

import ctypes
import re

import numpy as np
import pytest

import jax_megamoe as jmm
from generators import ROUTINGS
from gpu_case import CONFIG, all_y, check, load, with_granularity
from jax_megamoe._ffi import native
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.symmetric import granularity_number, moe_shape
from moe_case import GpuCase as Case


def prepare(case, devices, num_tokens=None, **options):
    """Ranks with the operands of a case on their GPUs."""
    return load(GpuRanks(case.config, devices, **options), case, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_ranks_that_share_a_gpu(rng, granularity, num_ranks, kind):
    case = Case(rng, with_granularity(granularity), num_ranks, 37, kind)
    ranks = prepare(case, [0] * num_ranks)
    ranks.launch(repeats=3)
    check(case, ranks)
    idx = np.asarray(case.topk_idx)
    valid = idx[(idx >= 0) & (idx < CONFIG.num_experts)]
    received = np.concatenate([ranks.outputs(rank).received for rank in range(num_ranks)])
    np.testing.assert_array_equal(received, np.bincount(valid, minlength=CONFIG.num_experts))
    wrong = ((idx < -1) | (idx >= CONFIG.num_experts)).reshape(num_ranks, -1).sum(axis=1)
    status = np.stack([ranks.outputs(rank).status for rank in range(num_ranks)])
    np.testing.assert_array_equal(status[:, 0], wrong)
    np.testing.assert_array_equal(status[:, 1], received.reshape(num_ranks, -1).sum(axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_tile_and_the_same_bits_again(rng, granularity):
    case = Case(rng, with_granularity(granularity), 2, 128, "uniform")
    ranks = prepare(case, [0, 0])
    for tile in range(len(native.gpu_tiles(granularity_number(case.config)))):
        ranks.poison()
        ranks.launch(tile, repeats=2)
        check(case, ranks)
        first = all_y(ranks)
        ranks.poison()
        ranks.launch(tile, flush_l2=True, gate=False)
        np.testing.assert_array_equal(all_y(ranks), first)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_two_gpus_with_two_ranks_each(rng, granularity):
    case = Case(rng, with_granularity(granularity), 4, 100, "zipf")
    ranks = prepare(case, [0, 1, 0, 1], num_tokens=[100, 0, 3, 64])
    ranks.launch(repeats=5)
    check(case, ranks, num_tokens=np.array([100, 0, 3, 64]))
    assert ranks.launch_burst(200) > 0
    check(case, ranks, num_tokens=np.array([100, 0, 3, 64]))


@pytest.mark.gpu
def test_a_small_ring_and_few_blocks_per_rank(rng):
    case = Case(rng, with_granularity(128, ring_tokens=256), 2, 128, "uniform")
    ranks = prepare(case, [0, 0], ctas_per_rank=5)
    assert ranks.num_ctas(1) == 5
    ranks.launch(repeats=2)
    check(case, ranks)


@pytest.mark.gpu
def test_a_rank_that_never_arrives_is_reported_and_the_next_call_works(rng):
    case = Case(rng, with_granularity(128, num_experts=15), 3, 37)
    ranks = prepare(case, [0, 0, 0])
    times = ranks.launch(skip_rank=1, timeout_s=0.5, expect_failure=True)
    assert np.isnan(times[0, 1]) and times[0, 0] > 4e5
    for rank in (0, 2):
        assert re.search(
            rf"timed out after 0.5 s: rank {rank}, SM \d+, role .* waited for .*rank 1",
            ranks.failure(rank),
        )
        assert np.isnan(all_y(ranks).reshape(3, -1)[rank]).all()
    assert ranks.failure(1) is None
    with pytest.raises(jmm.MegaMoERuntimeError, match="rank 1"):
        ranks.launch(skip_rank=1, timeout_s=0.5)
    ranks.launch(repeats=3)
    check(case, ranks)


@pytest.mark.gpu
def test_checked_ids_and_num_tokens_are_refused_with_their_value(rng):
    case = Case(rng, with_granularity(128, checked=True), 2, 16, "uniform")
    case.topk_idx = case.topk_idx.at[17, 2].set(99)
    ranks = prepare(case, [0, 0])
    ranks.launch(expect_failure=True)
    assert "got expert id 99 at token 1, slot 2 of rank 1 (1 such slots)" in ranks.failure(1)
    case.topk_idx = case.topk_idx.at[17, 2].set(-1)
    ranks = prepare(case, [0, 0], num_tokens=[16, 17])
    ranks.launch(expect_failure=True)
    assert "num_tokens: got 17 on rank 1; expected 0..16" in ranks.failure(1)


@pytest.mark.gpu
def test_regions_and_timeline(rng):
    case = Case(rng, with_granularity(128), 2, 64)
    ranks = prepare(case, [0, 0], trace=True)
    ranks.launch(repeats=2)
    assert ranks.read(0, "call_epoch")[0] == 2
    x = ranks.read(1, "x")
    assert x.shape == (128, 512) and x.dtype == np.uint8
    timeline = ranks.trace(0)
    assert len(timeline) == ranks.num_ctas(0)
    events = np.concatenate([lane for block in timeline for lane in block])
    assert len(events) > 0 and (events["end"] >= events["begin"]).all()
    assert (events["name"] < len(native.GPU_TRACE_NAMES)).all()
    check(case, ranks)


@pytest.mark.gpu
def test_too_many_blocks_are_refused():
    with pytest.raises(ValueError, match="ranks wait for each other"):
        GpuRanks(CONFIG, [0, 0], ctas_per_rank=100)
    with pytest.raises(RuntimeError, match=r"got ordinal 1000; expected 0\.\."):
        GpuRanks(CONFIG, [1000])


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_without_a_driver_the_error_says_so():
    with pytest.raises(
        RuntimeError, match=r"CUDA driver: got .*(Install|Update|Look at)"
    ) as caught:
        GpuRanks(CONFIG, [0])
    assert "jax_megamoe.unfused do not need a GPU" in str(caught.value)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gpu_buffers_are_sized_without_a_gpu(granularity):
    config = with_granularity(granularity)
    shape = moe_shape(config, 4, "sm_90a")
    regions = {r.name: r for r in jmm.buffer_regions(config, 4, "sm_90a")}
    assert jmm.buffer_bytes(config, 4, "sm_90a") == shape.num_bytes
    assert regions["l1_acts"].shape == (shape.ring_blocks * shape.block_m, config.hidden)
    assert regions["l1_acts"].dtype == ("bf16" if granularity == 32 else "e4m3")
    assert shape.num_bytes > jmm.buffer_bytes(config, 4) / 2
