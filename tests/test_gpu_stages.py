"""The GPU kernel's workspace after a call, stage by stage, against the reference.

Each test of a stage also runs on a simulation of the kernel, and fails on a damaged one.
"""

import numpy as np
import pytest

import jax_megamoe as jmm
from gpu_case import (
    BACKENDS,
    SimulatedRanks,
    Workspace,
    load,
    num_tiles,
    on_cpu,
    pools,
    routed,
    with_bias_column,
    with_granularity,
)
from jax_megamoe import quantize, reference
from jax_megamoe._ffi import native
from jax_megamoe.config import GRANULARITIES
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.devtools.gpu_measure import compile_ahead
from jax_megamoe.symmetric import granularity_number
from moe_case import GpuCase as Case

CONFIG = with_granularity(32, activation=jmm.swiglu(limit=3.0))
RANKS_AND_TOKENS = [(1, 37), (4, 37)]
# All tiles, with experts of many and of few rows: see test_every_tile.
TILE_RANKS, TILE_TOKENS = 2, 128
#: Rows of each expert whose elements are bounded one by one; all rows count for the error rule.
BOUNDED_ROWS = 6


@pytest.fixture(scope="module", autouse=True)
def _reference_on_cpu():
    with on_cpu():
        yield


# Expected values ---------------------------------------------------------------------------------


def accumulation_error(products, per_instruction, fraction_bits):
    """[...] bound of |tensor core's sum - exact sum| over the last axis of `products`.

    One instruction adds `per_instruction` products to its accumulator: all addends are shifted to
    the exponent of the largest and keep `fraction_bits` bits behind its leading one; what lies
    below is cut off. An addend that needs no more bits is exact. Any other one, the accumulator
    included, loses less than one unit, and the result, which may have carried into the next
    exponent, is cut off once more. The exponent is not known better than to a factor of 2, because
    hardware takes it from the factors, so the unit is taken from the next power of two, and from a
    sum that may itself be off by 2^-6. Where scales change along K, the accumulator is multiplied
    by powers of two in between, which changes none of this: products here have their scales.

    E4M3 on Hopper: 32 products and 13 bits, as measured by others. BF16: 16 products and at least
    the 23 bits of an FP32 number.
    """
    steps = products.reshape(*products.shape[:-1], -1, per_instruction)
    sums = steps.sum(axis=-1)
    after = np.cumsum(sums, axis=-1)
    before = after - sums
    largest = np.maximum(np.abs(steps).max(axis=-1), np.abs(before)) * (1 + 2.0**-6)
    unit = np.exp2(np.ceil(np.log2(np.maximum(largest, 2.0**-200))) - fraction_bits)
    in_units = steps / unit[..., None]
    cut = np.count_nonzero(in_units != np.round(in_units), axis=-1) + (before != 0)
    end = np.exp2(np.ceil(np.log2(np.maximum(np.abs(after), 2.0**-200))) - fraction_bits)
    return (cut * unit + end).sum(axis=-1)


def sf_of(amax):
    """Smallest byte in [1, 254] with amax <= 448 * 2^(byte - 127)."""
    byte = np.ceil(np.log2(np.maximum(amax, 1e-300) / 448)).astype(int) + 127
    return np.clip(byte, 1, 254)


def e4m3_round(values):
    """Nearest E4M3 value, ties to even, by the definition of the format."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-300))), -6)
    quantum = np.exp2(exponent - 3)
    return np.clip(np.round(values / quantum) * quantum, -448, 448)


class Expected:
    """What the stages of one case have to give, whatever the tile."""

    def __init__(self, case):
        self.case, config = case, case.config
        self.codes, self.sf = (
            np.asarray(a) for a in quantize.quantize_e4m3(case.by_rank(case.x), config.x_group)
        )
        x = np.asarray(quantize.dequantize_e4m3(self.codes, self.sf), np.float64)
        dense = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(case.weights)]
        biases = jmm.expert_biases(case.weights)
        self.has_biases = biases is not None
        if biases is not None:
            dense = [with_bias_column(*pair) for pair in zip(dense, biases, strict=True)]
            x = with_bias_column(x, 1)
        self.w_down = dense[2]
        idx, keep = np.asarray(case.by_rank(case.topk_idx)), routed(case)
        self.weight = np.asarray(case.by_rank(case.topk_weights))
        shape = (*idx.shape, config.intermediate)
        self.value, self.plain = np.zeros(shape), np.zeros(shape)
        #: (rank, token, k) -> (low, high) of SwiGLU's output before rounding, [I] each.
        self.bounds = {}
        for expert in range(config.num_experts):
            slots = np.argwhere(keep & (idx == expert))
            if not len(slots):
                continue
            rank, token, k = slots.T
            rows, weight = x[rank, token], self.weight[rank, token, k].astype(np.float64)
            gate, up = rows @ dense[0][expert].T, rows @ dense[1][expert].T
            self.value[rank, token, k] = self._activate(gate, up, weight)[0]
            gate32, up32 = (
                np.float32(rows) @ np.float32(w[expert]).T for w in (dense[0], dense[1])
            )
            plain = self._activate(gate32, up32, weight.astype(np.float32))[0]
            plain = quantize.quantize_e4m3(np.float32(plain), config.act_group)
            self.plain[rank, token, k] = np.asarray(quantize.dequantize_e4m3(*plain), np.float64)
            some = np.unique(np.linspace(0, len(slots) - 1, BOUNDED_ROWS).astype(int))
            low, high = self._bound(rows[some], dense[0][expert], dense[1][expert], weight[some])
            for i, ends in zip(some, zip(low, high, strict=True), strict=True):
                self.bounds[tuple(slots[i])] = ends

    def _activate(self, gate, up, weight):
        limit = self.case.config.activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        silu = gate / (1 + np.exp(-gate))
        return silu * up * weight[:, None], silu, gate, up

    def _bound(self, rows, w_gate, w_up, weight):
        """Interval of SwiGLU's FP32 output, given the error of the sums.

        |d silu| <= 1.1 |d gate|. exp(-gate) is 2^(-gate log2 e): the argument is rounded twice,
        which changes the power by |gate| 2^-23; ex2.approx and rcp.approx are off by 2 units in the
        last place, 2^-22, each; one addition and three products are rounded. Results near or below
        the smallest normal number are left to an absolute term.
        """
        bf16 = self.case.config.activation_granularity == 32
        per_instruction, bits = (16, 23) if bf16 else (32, 13)
        d_gate, d_up = (
            np.stack([accumulation_error(row * matrix, per_instruction, bits) for row in rows])
            for matrix in (w_gate, w_up)
        )
        value, silu, gate, up = self._activate(rows @ w_gate.T, rows @ w_up.T, weight)
        error = 1.1 * d_gate * (np.abs(up) + d_up) + np.abs(silu) * d_up
        error *= np.abs(weight)[:, None]
        relative = self._relative(gate)
        error += relative * (np.abs(value) + error) + 2.0**-120
        return value - error, value + error

    def _relative(self, gate):
        return np.abs(gate) * 2.0**-23 + 2 * 2.0**-22 + 4 * 2.0**-24


_cases = {}


def expected(granularity, num_ranks, tokens, kind):
    key = granularity, num_ranks, tokens, kind
    if key not in _cases:
        config = with_granularity(granularity, CONFIG)
        _cases[key] = Expected(Case(np.random.default_rng(11), config, num_ranks, tokens, kind))
    return _cases[key]


# The checks --------------------------------------------------------------------------------------


def check_input(want, ranks):
    tokens = want.codes.shape[1]
    for rank in range(ranks.num_ranks):
        np.testing.assert_array_equal(ranks.read(rank, "x")[:tokens], want.codes[rank])
        np.testing.assert_array_equal(ranks.read(rank, "x_sf")[:tokens], want.sf[rank])


def rows_of(want, ranks, rank, block_m):
    """(Workspace, Pool, slots [N]) of a rank; checks which slot stands where."""
    space, pool = Workspace(ranks, rank, block_m), pools(want.case, block_m)[rank]
    sources = space.sources()[pool.position]
    np.testing.assert_array_equal(sources[:, 0], pool.source)
    for (expert, source), slots in pool.slots.items():
        here = (pool.expert == expert) & (pool.source == source)
        np.testing.assert_array_equal(np.sort(sources[here, 1]), slots)
    assert pool.position.max(initial=0) < space.ring_rows  # one lap: everything is still there
    return space, pool, sources[:, 1].astype(int)


def check_dispatch(want, ranks, block_m):
    config, seen = want.case.config, 0
    for rank in range(ranks.num_ranks):
        space, pool, slots = rows_of(want, ranks, rank, block_m)
        token = slots // config.top_k
        codes, sf = want.codes[pool.source, token], want.sf[pool.source, token]
        rows = space.l1_bytes()
        if config.activation_granularity == 32:
            values = np.asarray(quantize.dequantize_e4m3(codes, sf))
            bits = native.float_to_bf16(values.reshape(-1)).reshape(values.shape)
            np.testing.assert_array_equal(native.bf16_to_float(bits.reshape(-1)), values.ravel())
            np.testing.assert_array_equal(rows[pool.position].view(np.uint16), bits)
        else:
            np.testing.assert_array_equal(rows[pool.position], codes)
            per = 4 if config.activation_granularity == 128 else sf.shape[1]
            scales = np.ldexp(np.float32(1), sf[:, ::per].astype(int) - 127)
            np.testing.assert_array_equal(space.l1_scales()[pool.position], scales)
        np.testing.assert_array_equal(
            space.l1_topk_weights()[pool.position],
            want.weight.reshape(ranks.num_ranks, -1)[pool.source, slots],
        )
        padding = np.setdiff1d(np.arange(space.ring_rows), pool.position)
        assert (rows[padding] == 0xFF).all()  # the poison
        seen += len(slots)
    assert seen == routed(want.case).sum() > 0


def check_swiglu(want, ranks, block_m):
    """Every code and scale is one that a value within the error bound would have; see `_bound`."""
    config, bounded = want.case.config, 0
    error = plain_error = 0.0
    for rank in range(ranks.num_ranks):
        space, pool, slots = rows_of(want, ranks, rank, block_m)
        values, scales = space.l2_values(), space.l2_scales()
        place = pool.source, slots // config.top_k, slots % config.top_k
        error += np.square(values[pool.position] - want.value[place]).sum()
        plain_error += np.square(want.plain[place] - want.value[place]).sum()
        for row, slot in zip(pool.position, zip(*place, strict=True), strict=True):
            if slot not in want.bounds:
                continue
            given = None if scales is None else scales[row]
            check_row(values[row], given, *want.bounds[slot], config.act_group)
            bounded += 1
    assert bounded == len(want.bounds) > 0
    assert 0 < np.sqrt(error) <= 2 * np.sqrt(plain_error)


def check_row(values, scales, low, high, group):
    """`scales`: one for each group, or None where they are not stored: then any possible one."""
    smallest = np.where(low * high <= 0, 0, np.minimum(np.abs(low), np.abs(high)))
    first = sf_of(smallest.reshape(-1, group).max(axis=1))
    last = sf_of(np.maximum(np.abs(low), np.abs(high)).reshape(-1, group).max(axis=1))
    for g, (least, most) in enumerate(zip(first, last, strict=True)):
        part = slice(g * group, (g + 1) * group)
        candidates = np.exp2(np.arange(least, most + 1) - 127.0)
        if scales is not None:
            assert scales[g] in candidates, (g, scales[g], candidates)
            candidates = [float(scales[g])]
        assert any(
            (e4m3_round(low[part] / scale) * scale <= values[part]).all()
            and (values[part] <= e4m3_round(high[part] / scale) * scale).all()
            for scale in candidates
        ), (g, values[part], low[part], high[part], candidates)


def check_linear2(want, ranks, block_m):
    """Rows in `combine`, from the kernel's own SwiGLU codes, against float64 and plain FP32."""
    config = want.case.config
    local = config.num_experts // ranks.num_ranks
    pushed = [ranks.read(rank, "combine") for rank in range(ranks.num_ranks)]
    error = plain_error = 0.0
    for rank in range(ranks.num_ranks):
        space, pool, slots = rows_of(want, ranks, rank, block_m)
        acts = space.l2_values()[pool.position]
        if want.has_biases:
            place = pool.source, slots // config.top_k, slots % config.top_k
            acts = with_bias_column(acts, want.weight[place])
        got = np.stack(
            [
                pushed[r][s % config.top_k, s // config.top_k]
                for r, s in zip(pool.source, slots, strict=True)
            ]
        )
        got = native.bf16_to_float(got.reshape(-1)).reshape(got.shape).astype(np.float64)
        for e in np.unique(pool.expert):
            here, matrix = pool.expert == e, want.w_down[rank * local + e]
            exact = acts[here] @ matrix.T
            plain = np.float32(acts[here]) @ np.float32(matrix).T
            plain = native.bf16_to_float(native.float_to_bf16(plain.reshape(-1)))
            error += np.square(got[here] - exact).sum()
            plain_error += np.square(plain.reshape(exact.shape) - exact).sum()
    assert 0 < np.sqrt(error) <= 2 * np.sqrt(plain_error)


def check_combine(want, ranks):
    """Bit for bit, given the kernel's own rows; then the rule for the whole layer."""
    keep, tokens = routed(want.case), want.codes.shape[1]
    for rank in range(ranks.num_ranks):
        rows = ranks.read(rank, "combine")[:, :tokens]
        rows = native.bf16_to_float(rows.reshape(-1)).reshape(rows.shape)
        total = np.zeros(rows.shape[1:], np.float32)
        for k in range(want.case.config.top_k):
            total[keep[rank, :, k]] += rows[k][keep[rank, :, k]]
        bits = native.float_to_bf16(total.reshape(-1))
        np.testing.assert_array_equal(ranks.outputs(rank).y.reshape(-1), bits)
    y = np.concatenate([ranks.outputs(rank).y for rank in range(ranks.num_ranks)])
    want.case.check(native.bf16_to_float(y.reshape(-1)).reshape(y.shape))


def check_counters(ranks):
    for rank in range(ranks.num_ranks):
        for region in ("l1_arrival", "l1_empty", "l2_arrival", "l2_empty", "next_item"):
            assert not ranks.read(rank, region).any()
        assert ranks.read(rank, "call_epoch")[0] == 1
        assert (ranks.read(rank, "expert_recv_count") >> 32 == 1).all()
        # A rank's word for itself included; without peers there is nobody to be told.
        assert ranks.num_ranks == 1 or (ranks.read(rank, "rank_barrier") > 0).all()


def check_stages(want, ranks, tile):
    block_m = native.gpu_tiles(granularity_number(ranks.config))[tile]["block_m"]
    check_input(want, ranks)
    check_dispatch(want, ranks, block_m)
    check_swiglu(want, ranks, block_m)
    check_linear2(want, ranks, block_m)
    check_combine(want, ranks)


def run(backend, want, tile=-1, damage=None):
    ranks = load(backend(want.case.config, [0] * want.case.num_ranks), want.case)
    ranks.poison()
    tile = ranks.select_tile() if tile < 0 else tile
    if damage:
        ranks.damage = damage
    ranks.launch(tile)
    return ranks, tile


# Tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_ranks", "tokens"), RANKS_AND_TOKENS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_stage(backend, granularity, num_ranks, tokens):
    want = expected(granularity, num_ranks, tokens, "masked")
    ranks, tile = run(backend, want)
    check_stages(want, ranks, tile)
    if backend is not SimulatedRanks:
        check_counters(ranks)


@pytest.fixture(scope="module")
def compiled_tiles():
    compile_ahead(
        [
            (with_granularity(granularity, CONFIG), TILE_RANKS, tile)
            for granularity in GRANULARITIES
            for tile in range(num_tiles(with_granularity(granularity, CONFIG)))
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_stage_of_every_tile(compiled_tiles, granularity):
    """Popular experts fill blocks of any tile, others leave most of theirs empty."""
    want = expected(granularity, TILE_RANKS, TILE_TOKENS, "zipf")
    for tile in range(num_tiles(want.case.config)):
        ranks, _ = run(GpuRanks, want, tile)
        check_stages(want, ranks, tile)
        check_counters(ranks)


def test_a_wide_tile_of_the_simulation():
    """What `test_every_stage_of_every_tile` does, with two blocks an expert and passes of 128."""
    want = expected("row", TILE_RANKS, TILE_TOKENS, "zipf")
    for tile in (0, 4):
        check_stages(want, run(SimulatedRanks, want, tile)[0], tile)


# The checks can fail -----------------------------------------------------------------------------


def other_code(codes):
    codes = codes.copy()
    codes[3, 5] ^= 1
    return codes


def scaled(factor, row=5):
    def change(array):
        array = array.copy()
        array[row % len(array)] *= np.float32(factor)
        return array

    return change


def without_a_group(array):
    """As if the last 32 of the contracted axis were left out: a smaller sum in one channel."""
    array = array.copy()
    array[:, 7] = 0
    return array


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("stage", "change", "check"),
    [
        ("dispatch", other_code, check_dispatch),
        ("swiglu", scaled(2), check_swiglu),
        ("swiglu", scaled(-1), check_swiglu),
        ("swiglu", without_a_group, check_swiglu),
        ("linear2", scaled(1.02, row=0), check_linear2),
    ],
)
def test_a_damaged_stage_is_noticed(granularity, stage, change, check):
    want = expected(granularity, 1, 37, "masked")
    ranks, tile = run(SimulatedRanks, want, damage={stage: change})
    block_m = native.gpu_tiles(granularity_number(ranks.config))[tile]["block_m"]
    with pytest.raises(AssertionError):
        check(want, ranks, block_m)


def test_rows_at_the_wrong_place_are_noticed():
    want = expected(128, 4, 37, "masked")
    ranks, tile = run(SimulatedRanks, want)
    narrower = native.gpu_tiles(128)[tile]["block_m"] // 2
    with pytest.raises(AssertionError):
        check_dispatch(want, ranks, narrower)


def test_the_bound_of_a_sum_holds_for_a_tensor_core_in_numpy(rng):
    """`accumulation_error` against sums that are cut off as it says; they come close to it."""
    products = rng.standard_normal((200, 512)) * np.exp2(rng.integers(-8, 3, (200, 512)))
    products = np.ldexp(np.round(np.ldexp(np.frexp(products)[0], 6)), np.frexp(products)[1] - 6)

    def tensor_core(row):
        total = 0.0
        for part in row.reshape(-1, 32):
            addends = np.append(part, total)
            unit = np.exp2(np.floor(np.log2(np.abs(addends).max())) - 13)
            total = np.trunc(addends / unit).sum() * unit
            unit = np.exp2(np.floor(np.log2(abs(total))) - 13) if total else 1.0
            total = np.trunc(total / unit) * unit
        return total

    error = np.abs([tensor_core(row) - row.sum() for row in products])
    bound = accumulation_error(products, 32, 13)
    assert (error <= bound).all() and (error > bound / 20).any()
    assert (accumulation_error(products, 16, 23) < bound / 100).all()


def test_reference_dispatch_and_pools_agree():
    case = expected("row", 4, 37, "masked").case
    codes, sf = quantize.quantize_e4m3(case.by_rank(case.x), "row")
    idx, weights = (case.by_rank(a) for a in case.operands[1:])
    dispatched = reference.dispatch(codes, sf, idx, weights, case.config, block_m=32)
    for rank, pool in enumerate(pools(case, 32)):
        valid = np.flatnonzero(np.asarray(dispatched.source_rank[rank]) >= 0)
        np.testing.assert_array_equal(pool.position, valid)
        np.testing.assert_array_equal(pool.source, dispatched.source_rank[rank][valid])
