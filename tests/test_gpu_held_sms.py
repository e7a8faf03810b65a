"""Calls whose GPU has another kernel on some SMs until the call has ended.

A collective that waits for another GPU holds SMs like that; if a call needed them, both would wait
for ever. The harness lets go only once all ranks' kernels have ended, so a call that ends is proof.
"""

import numpy as np
import pytest

from gpu_case import all_y, check, load, with_granularity
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools.gpu_harness import GpuRanks
from moe_case import GpuCase as Case

# Few slots are routed by one block, many by all: top-3 of 2000 tokens is many.
FEW, MANY = 37, 2000


def prepare(rng, granularity, devices, tokens, **changes):
    config = with_granularity(granularity, max_tokens_per_rank=tokens, **changes)
    case = Case(rng, config, len(devices), tokens, "zipf")
    return case, load(GpuRanks(config, devices), case)


def all_but(left, ranks, gpu=0):
    """All SMs of a GPU but `left`."""
    on_gpu = [rank for rank, device in enumerate(ranks.devices) if device == gpu]
    return gpu, sum(ranks.num_ctas(rank) for rank in on_gpu) - left


def with_sms_held(case, ranks, hold):
    """Calls with SMs held, without, and with again: all right, and all the same bits."""
    ranks.launch()
    first = all_y(ranks)
    for held in (hold, None, hold):
        ranks.poison()
        ranks.launch(repeats=3, hold=held)
        np.testing.assert_array_equal(all_y(ranks), first)
    check(case, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [1, 90])
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_rank(rng, granularity, tokens, left):
    case, ranks = prepare(rng, granularity, [0], tokens)
    with_sms_held(case, ranks, all_but(left, ranks))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_ranks_that_share_a_gpu(rng, tokens):
    """The rank that comes last gets the SMs that are left."""
    case, ranks = prepare(rng, "row", [0, 0], tokens)
    with_sms_held(case, ranks, all_but(ranks.num_ctas(0) + 5, ranks))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("left", [1, 100])
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_of_two_gpus(rng, granularity, tokens, left):
    case, ranks = prepare(rng, granularity, [0, 1], tokens)
    with_sms_held(case, ranks, all_but(left, ranks, gpu=1))


@pytest.mark.gpu
def test_no_rows_and_no_slots(rng):
    case, ranks = prepare(rng, 128, [0], FEW)
    for count in (0, 5):
        own = [np.asarray(a[:count]) for a in case.operands]
        own[1] = np.full_like(own[1], -1)
        ranks.set_inputs(0, *own)
        ranks.poison()
        ranks.launch(repeats=2, hold=all_but(30, ranks))
        assert (all_y(ranks) == 0).all() and len(all_y(ranks)) == count


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_a_refused_call_has_no_numbers_in_the_absent_blocks_rows(rng, tokens):
    case, ranks = prepare(rng, 128, [0], tokens, checked=True)
    case.topk_idx = case.topk_idx.at[tokens - 1, 2].set(99)
    load(ranks, case)
    ranks.launch(hold=all_but(1, ranks), expect_failure=True)
    assert f"got expert id 99 at token {tokens - 1}, slot 2" in ranks.failure(0)
    assert np.isnan(all_y(ranks)).all()
    case.topk_idx = case.topk_idx.at[tokens - 1, 2].set(-1)
    load(ranks, case)
    with_sms_held(case, ranks, all_but(50, ranks))


@pytest.mark.gpu
def test_a_rank_without_any_sm_is_reported(rng):
    case, ranks = prepare(rng, 128, [0, 0], FEW)
    ranks.launch(hold=all_but(1, ranks), timeout_s=0.5, expect_failure=True)
    failures = [text for text in map(ranks.failure, range(2)) if text is not None]
    assert failures and all("timed out after 0.5 s" in text for text in failures)
    ranks.launch(repeats=2)
    check(case, ranks)


@pytest.mark.gpu
def test_what_cannot_be_held_is_refused(rng):
    _, ranks = prepare(rng, 128, [0], FEW)
    for hold in ((1, 5), all_but(-1, ranks)):
        with pytest.raises(ValueError, match=r"hold: got .* SMs of GPU"):
            ranks.launch(hold=hold)
