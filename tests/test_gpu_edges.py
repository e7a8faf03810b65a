"""The GPU kernel at the edges of its contract, without JAX: values, shapes, rings, faults.

What does not need a GPU's behaviour in time also runs on the simulation, which keeps these tests
honest about what they expect.
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as jmm
from generators import routing
from gpu_case import (
    BACKENDS,
    CONFIG,
    SimulatedRanks,
    all_y,
    check,
    load,
    load_inputs,
    num_tiles,
    on_cpu,
    with_granularity,
)
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.devtools.gpu_measure import compile_ahead
from moe_case import GpuCase as Case

# Two ranks, as tests/test_gpu_harness.py has them for every tile.
RANKS = 2
MANY_EXPERTS = jmm.MegaMoEConfig(896, 16, 256, 128, 96, timeout_s=10.0)
# An odd number of blocks of 128 both ways: the last tile of both products is half empty.
ODD_WIDTHS = jmm.MegaMoEConfig(2, 2, 2944, 2944, 64, jmm.swiglu(limit=10.0), timeout_s=10.0)
# More slots than one CTA lists, see kSlotsOfOneCta in cc/gpu/common/prologue.h.
MANY_SLOTS = with_granularity(128, max_tokens_per_rank=1400)
TINY_RING = with_granularity(128, ring_tokens=1)


# Two numbers of rows: the reference is compiled for each.
TOKENS, MAX_TOKENS = 40, 128
# The simulation is slow where there is much to do: there it has one granularity.
HEAVY = [
    pytest.param(SimulatedRanks, "row", id="simulated-row"),
    *(
        pytest.param(GpuRanks, granularity, id=f"gpu-{granularity}", marks=pytest.mark.gpu)
        for granularity in GRANULARITIES
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _reference_on_cpu():
    with on_cpu():
        yield


@pytest.fixture(scope="module")
def compiled():
    """All kernels of this file, compiled side by side."""
    compile_ahead(
        [
            (with_granularity(granularity, config), ranks, tile)
            for granularity in GRANULARITIES
            for config, ranks, tiles in (
                (MANY_EXPERTS, 1, (0,)),
                (ODD_WIDTHS, 1, (3, 4)),
                (MANY_SLOTS, RANKS, (4,)),
                (TINY_RING, RANKS, (0, 3, 4)),
            )
            for tile in tiles
        ]
    )


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param is GpuRanks:
        request.getfixturevalue("compiled")
    return request.param


def make(backend, case, **options):
    ranks = load(backend(case.config, [0] * case.num_ranks), case, **options)
    ranks.poison()
    return ranks


def status_of(ranks):
    return np.stack([ranks.outputs(rank).status for rank in range(ranks.num_ranks)])


# Rows and slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[1, 0], [0, 0], [7, 128], [33, 1]])
@pytest.mark.parametrize(("backend", "granularity"), HEAVY, indirect=["backend"])
def test_ranks_with_their_own_number_of_rows(backend, rng, granularity, counts):
    """Odd numbers, one row, none at all: each rank is called with as many rows as it has."""
    config = with_granularity(granularity)
    case = Case(rng, config, RANKS, MAX_TOKENS)
    ranks = make(backend, case)
    for rank, count in enumerate(counts):
        own = [np.asarray(case.by_rank(a)[rank][:count]) for a in case.operands]
        ranks.set_inputs(rank, *own)
    ranks.poison()
    ranks.launch(3)
    for rank, count in enumerate(counts):
        assert ranks.outputs(rank).y.shape == (count, config.hidden)
    assert status_of(ranks)[:, 1].sum() == sum(counts) * config.top_k
    y = np.zeros((RANKS, MAX_TOKENS, config.hidden))
    rows = all_y(ranks)
    y[0, : counts[0]], y[1, : counts[1]] = rows[: counts[0]], rows[counts[0] :]
    case.check(y.reshape(case.x.shape), num_tokens=np.array(counts))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_past_num_tokens_do_not_matter(backend, rng, granularity):
    case, counts = Case(rng, with_granularity(granularity), RANKS, TOKENS), np.array([0, 23])
    x = np.array(case.by_rank(case.x))
    idx = np.array(case.by_rank(case.topk_idx))
    for rank, count in enumerate(counts):
        x[rank, count:], idx[rank, count:] = np.nan, 10**6
    case.topk_idx = jnp.asarray(idx.reshape(-1, CONFIG.top_k))
    ranks = make(backend, case, num_tokens=counts, x=x)
    ranks.launch(2, repeats=2)
    assert (status_of(ranks)[:, 0] == 0).all()
    check(case, ranks, counts)
    assert (all_y(ranks).reshape(RANKS, TOKENS, -1)[0] == 0).all()


def test_every_slot_to_one_expert(backend, rng):
    """All slots of all tokens, not only one of each: 768 rows for one expert."""
    case = Case(rng, with_granularity("row"), RANKS, MAX_TOKENS)
    case.topk_idx = jnp.full_like(case.topk_idx, 13)
    ranks = make(backend, case)
    for tile in (0, 5):
        ranks.poison()
        ranks.launch(tile)
        check(case, ranks)
        assert ranks.outputs(1).received[5] == 768 and ranks.outputs(0).received.sum() == 0


def test_int64_expert_ids(backend, rng):
    case = Case(rng, with_granularity(128), RANKS, TOKENS, "masked")
    ranks = make(backend, case)
    idx = np.array(case.topk_idx)
    idx[3, 0] = -1
    case.topk_idx = jnp.asarray(idx)
    wide = idx.astype(np.int64)
    wide[3, 0] = 2**40 + 1  # would be expert 1 if only 32 bits were looked at
    assert idx[4, 1] == -1
    wide[4, 1] = -(2**40) - 1  # would be -1, not routed on purpose
    for rank in range(RANKS):
        x, _, weights = (np.asarray(case.by_rank(a)[rank]) for a in case.operands)
        ranks.set_inputs(rank, x, wide.reshape(RANKS, TOKENS, -1)[rank], weights)
    ranks.launch(2)
    check(case, ranks)
    assert status_of(ranks)[:, 0].sum() == 2


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantised_pairs_give_the_same_bits(backend, rng, granularity):
    case = Case(rng, with_granularity(granularity), RANKS, TOKENS)
    ranks = make(backend, case)
    ranks.launch(2)
    want = all_y(ranks)
    pair = jmm.quantize.quantize_e4m3(case.by_rank(case.x), case.config.x_group)
    load_inputs(ranks, case, x=tuple(np.asarray(a) for a in pair))
    ranks.poison()
    ranks.launch(2)
    np.testing.assert_array_equal(all_y(ranks), want)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_tokens_that_are_not_finite_stay_alone(backend, rng, granularity):
    case = Case(rng, with_granularity(granularity), RANKS, TOKENS, "zipf")
    ranks = make(backend, case)
    ranks.launch(2)
    clean = all_y(ranks)
    x = np.array(case.by_rank(case.x))
    bad = {(0, 4): np.nan, (0, 5): np.inf, (1, TOKENS - 1): -np.inf}
    for (rank, token), value in bad.items():
        x[rank, token, 17] = value
    load_inputs(ranks, case, x=x)
    ranks.poison()
    ranks.launch(2)
    y, rows = all_y(ranks), [rank * TOKENS + token for rank, token in bad]
    assert np.isnan(y[rows]).all()
    others = np.setdiff1d(np.arange(RANKS * TOKENS), rows)
    np.testing.assert_array_equal(y[others], clean[others])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zero_and_tiny_rows(backend, rng, granularity):
    """Scales follow a row down to 1e-9. The square of 1e-20 is below FP32's normal numbers."""
    case = Case(rng, with_granularity(granularity), RANKS, TOKENS)
    x = np.array(case.x, np.float32)
    x[0] = 0
    x[1] *= 1e-20 / np.abs(x[1]).max()
    x[TOKENS] *= 1e-9 / np.abs(x[TOKENS]).max()
    case.x = jnp.asarray(x, jnp.bfloat16)
    ranks = make(backend, case)
    ranks.launch(2)
    y, truth = all_y(ranks), case.truth()
    assert (y[0] == 0).all()
    assert np.isfinite(y).all() and np.abs(y[1]).max() < 2.0**-120
    assert 0 < np.linalg.norm(truth[TOKENS]) < 2.0**-50
    case.check_error(y, truth, [TOKENS], fp8_sums=case.fp8_sums)


# Shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tokens"), [("uniform", 96), ("duplicates", 51)])
@pytest.mark.parametrize(("backend", "granularity"), HEAVY, indirect=["backend"])
def test_many_experts_and_slots(backend, rng, granularity, kind, tokens):
    """1536 slots of a rank, or 816: they are listed by all CTAs, or by one."""
    case = Case(rng, with_granularity(granularity, MANY_EXPERTS), 1, tokens, kind)
    ranks = make(backend, case)
    ranks.launch(0)
    check(case, ranks)
    received = ranks.outputs(0).received
    np.testing.assert_array_equal(received, np.bincount(np.ravel(case.topk_idx), minlength=896))


@pytest.mark.parametrize("kind", ["out_of_range", "zipf"])
@pytest.mark.parametrize(("backend", "granularity"), HEAVY, indirect=["backend"])
def test_many_slots_of_several_ranks(backend, rng, granularity, kind):
    """More slots than one CTA lists: all do; then 4197 slots of one rank and none of the other."""
    case = Case(rng, with_granularity(granularity, MANY_SLOTS), RANKS, 1399, kind)
    ranks = make(backend, case)
    ranks.launch(4, repeats=2)
    check(case, ranks)
    idx = np.asarray(case.by_rank(case.topk_idx))
    wrong = ((idx < -1) | (idx >= CONFIG.num_experts)).sum(axis=(1, 2))
    np.testing.assert_array_equal(status_of(ranks)[:, 0], wrong)
    assert (kind == "out_of_range") == bool(wrong.sum())
    counts = np.array([1399, 0])
    load_inputs(ranks, case, counts)
    ranks.poison()
    ranks.launch(4)
    check(case, ranks, counts)


@pytest.mark.parametrize(("backend", "granularity"), HEAVY, indirect=["backend"])
def test_blocks_that_a_narrower_product_covers(backend, rng, granularity):
    """The widest tiles compute fewer columns where a block's rows allow it: both sides of each."""
    config = with_granularity(granularity)
    sizes = {4: [96, 97, 112, 113, 128, 1], 5: [128, 129, 192, 193, 16]}
    for tile in [tile for tile in sizes if tile < num_tiles(config)]:
        rows = sizes[tile]
        slots = np.full(RANKS * 128 * config.top_k, -1, np.int32)
        experts = np.arange(len(rows)) * 3 % config.num_experts
        slots[: sum(rows)] = np.repeat(experts, rows)
        case = Case(rng, config, RANKS, MAX_TOKENS)
        case.topk_idx = jnp.asarray(rng.permutation(slots).reshape(-1, config.top_k))
        ranks = make(backend, case)
        ranks.launch(tile)
        received = np.concatenate([ranks.outputs(rank).received for rank in range(RANKS)])
        np.testing.assert_array_equal(received[experts], rows)
        check(case, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_widths_of_an_odd_number_of_blocks(compiled, rng, granularity):
    case = Case(rng, with_granularity(granularity, ODD_WIDTHS), 1, 61)
    ranks = make(GpuRanks, case)
    for tile in (3, 4):
        ranks.poison()
        ranks.launch(tile)
        check(case, ranks)


# Rings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [0, 4])
@pytest.mark.parametrize(("backend", "granularity"), HEAVY, indirect=["backend"])
def test_many_laps_of_a_tiny_ring_change_nothing(backend, rng, granularity, tile):
    case = Case(rng, with_granularity(granularity), RANKS, MAX_TOKENS, "zipf")
    large = make(backend, case)
    large.launch(tile)
    want = all_y(large)
    check(case, large)
    case.config = with_granularity(granularity, TINY_RING)
    ranks = make(backend, case)
    for _ in range(2):
        ranks.poison()
        ranks.launch(tile, repeats=3)
        np.testing.assert_array_equal(all_y(ranks), want)
    laps = status_of(ranks)[:, 3]
    assert laps.min() >= (2 if tile == 0 else 4) and (status_of(large)[:, 3] == 1).all()


# Determinism -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_same_bits_in_every_call(rng, granularity):
    """Poisoned workspaces, cold and warm caches, ranks that start in turn, fewer CTAs, bursts."""
    case = Case(rng, with_granularity(granularity), RANKS, MAX_TOKENS, "zipf")
    ranks = make(GpuRanks, case)
    ranks.launch(3)
    want = all_y(ranks)
    for round_ in range(10):
        ranks.poison()
        ranks.launch(3, repeats=1 + round_ % 3, flush_l2=round_ % 2 == 0, gate=round_ % 4 != 0)
        np.testing.assert_array_equal(all_y(ranks), want)
    ranks.launch_burst(200, 3)
    np.testing.assert_array_equal(all_y(ranks), want)
    few = load(GpuRanks(case.config, [0] * RANKS, ctas_per_rank=7), case)
    few.poison()
    few.launch(3)
    np.testing.assert_array_equal(all_y(few), want)


@pytest.mark.gpu
def test_other_calls_in_between_leave_no_trace(rng):
    """Routings of different loads take turns; each gives its bits again."""
    case = Case(rng, with_granularity(128), RANKS, MAX_TOKENS)
    ranks, want = make(GpuRanks, case), {}
    for turn in range(24):
        kind = ("uniform", "one_expert", "masked", "empty_rank0")[turn % 4]
        own = np.random.default_rng(turn % 4)
        idx, weights = routing(own, RANKS * 128, CONFIG.top_k, CONFIG.num_experts, kind, RANKS)
        case.topk_idx, case.topk_weights = jnp.asarray(idx), jnp.asarray(weights)
        load_inputs(ranks, case)
        ranks.launch(3)
        y = all_y(ranks)
        if kind not in want:
            check(case, ranks)
        np.testing.assert_array_equal(y, want.setdefault(kind, y))


# Faults ------------------------------------------------------------------------------------------

# Region whose signal rank 1 loses -> (role that waits for it, who writes it). A rank reports its
# first wait that times out.
SIGNALS = {
    "rank_barrier": ("dispatch|combine", "each peer its word, here rank 1"),
    "grid_barrier": ("dispatch|combine", "owner's workers"),
    "expert_recv_count": ("weight loader", r"peers' dispatch, here rank 1 for local expert \d+"),
    "l1_arrival": ("activation loader", "dispatch"),
    "l1_empty": ("dispatch", "swiglu"),
    "l2_arrival": ("activation loader", "swiglu"),
    "l2_empty": ("activation loader", "linear2"),
}
TIMEOUT_S = 0.4
WAIT = (
    r"timed out after 0.4 s: rank \d, SM \d+, role (?P<role>[a-z ]+) waited for (?P<region>\w+)"
    r"\[\d+\] \(written by: (?P<writer>.+)\): wanted (call )?(?P<wanted>\d+), seen (call )?"
    r"(?P<seen>\d+)"
)


@pytest.fixture(scope="module", params=[1, 0], ids=["one CTA a rank", "all SMs"])
def two_laps(compiled, request):
    """Ranks whose ring makes exactly two laps, so that somebody waits for each of its counters.

    With one CTA a rank, no role waits before its turn: the first wait to time out is the one for
    the lost signal. With more, idle CTAs wait for what can only come after it.
    """
    case = Case(np.random.default_rng(4), TINY_RING, RANKS, MAX_TOKENS)
    slots = np.arange(RANKS * 128)[:, None] + 5 * np.arange(CONFIG.top_k)
    case.topk_idx = jnp.asarray(slots % CONFIG.num_experts, jnp.int32)  # 48 rows for each expert
    ranks = load(GpuRanks(case.config, [0] * RANKS, ctas_per_rank=request.param), case)
    ranks.launch(3)
    assert (status_of(ranks)[:, 3] == 2).all()
    check(case, ranks)
    return ranks, all_y(ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("region", SIGNALS)
def test_a_lost_signal_is_named_and_survived(two_laps, region):
    ranks, want = two_laps
    role, writer = SIGNALS[region]
    ranks.launch(3, fault=(1, region), timeout_s=TIMEOUT_S, expect_failure=True)
    texts = [text for text in map(ranks.failure, range(RANKS)) if text]
    if region == "rank_barrier" and not texts:
        # The word only grows, and the rank's later signal in the same call stood in for this one.
        np.testing.assert_array_equal(all_y(ranks), want)
        return
    found = [match for text in texts if (match := re.search(WAIT, text))]
    assert found and len(found) == len(texts), texts
    for match in found:
        assert int(match["seen"]) < int(match["wanted"]), texts
        assert match["region"] in SIGNALS
    assert all("raise MegaMoEConfig.timeout_s" in text for text in texts)
    assert np.isnan(all_y(ranks)).any()
    named = [match for match in found if match["region"] == region]
    # Where the grid barrier is missing, several warps start to wait together: any may be first.
    if ranks.num_ctas(1) == 1 and region != "grid_barrier":
        assert named, texts
    for match in named:
        assert re.fullmatch(role, match["role"]) and re.fullmatch(writer, match["writer"])
    ranks.poison()
    ranks.launch(3, repeats=2)
    np.testing.assert_array_equal(all_y(ranks), want)


@pytest.mark.gpu
@pytest.mark.parametrize("skipped", range(RANKS))
def test_a_rank_that_never_enters_is_named_and_the_next_call_works(two_laps, skipped):
    ranks, want = two_laps
    ranks.launch(3, skip_rank=skipped, timeout_s=TIMEOUT_S, expect_failure=True)
    text = ranks.failure(1 - skipped)
    assert re.search(rf"waited for (expert_recv_count|rank_barrier).*here rank {skipped}", text)
    assert ranks.failure(skipped) is None
    ranks.launch(3)
    np.testing.assert_array_equal(all_y(ranks), want)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [128, "row"])
def test_scales_that_differ_within_a_group_are_refused(rng, granularity):
    """FP8 tensor cores take one scale for all of a group: a pair with two would be wrong."""
    case = Case(rng, with_granularity(granularity), RANKS, TOKENS)
    ranks = make(GpuRanks, case)
    codes, sf = jmm.quantize.quantize_e4m3(case.by_rank(case.x), case.config.x_group)
    bad = sf.at[1, 7, 6].add(1)
    load_inputs(ranks, case, x=(codes, bad))
    with pytest.raises(jmm.MegaMoERuntimeError, match=r"at place 6 of token 7 on rank 1; expected"):
        ranks.launch(1)
    load_inputs(ranks, case, x=(codes, sf))
    ranks.launch(1)
    check(case, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
def test_checked_ids_are_refused_by_name(rng, wide):
    case = Case(rng, with_granularity(128, checked=True), RANKS, 16)
    ranks = make(GpuRanks, case)
    bad = 2**40 + 1 if wide else -2
    idx = np.array(case.by_rank(case.topk_idx), np.int64 if wide else np.int32)
    idx[0, 5, 2] = idx[0, 9, 0] = bad
    x, _, weights = (np.asarray(case.by_rank(a)[0]) for a in case.operands)
    ranks.set_inputs(0, x, idx[0], weights)
    with pytest.raises(jmm.MegaMoERuntimeError) as caught:
        ranks.launch(1)
    assert f"got expert id {bad} at token 5, slot 2 of rank 0 (2 such slots)" in str(caught.value)
    load_inputs(ranks, case)
    ranks.launch(1)
    check(case, ranks)


def test_the_faults_cover_every_counter_of_the_workspace():
    """A counter that is waited for is in SIGNALS; the others nobody waits for."""
    regions = {region.name for region in jmm.buffer_regions(CONFIG, RANKS, "sm_90a")}
    no_wait = {"call_epoch", "next_item", "expert_send_count"}
    counters = {name for name in regions if name.endswith(("_barrier", "_count", "_empty"))}
    counters |= {name for name in regions if name.endswith(("_arrival", "_epoch", "_item"))}
    assert counters - no_wait == set(SIGNALS)
    assert num_tiles(CONFIG) > 3
