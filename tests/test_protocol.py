"""The protocol's pure functions (cc/protocol), through their bindings: no JAX program runs here."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators import all_bf16, all_fp16, edge_bits, mantissa_sweep
from jax_megamoe import config, quantize
from jax_megamoe._ffi import native

protocol = native  # the bindings of cc/protocol


def make_shape(**changes):
    sizes = dict(num_ranks=2, num_experts=8, top_k=2, hidden=256, intermediate=128, max_tokens=100)
    return native.MoeShape.make(**{**sizes, **changes})


# ---- workspace ----

shapes = st.builds(
    lambda ranks, local, k, h, i, tokens, ring: dict(
        num_ranks=ranks,
        num_experts=ranks * local,
        top_k=min(k, ranks * local),
        hidden=128 * h,
        intermediate=128 * i,
        max_tokens=tokens,
        ring_tokens=ring,
    ),
    st.integers(1, 72),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 8192),
    st.integers(0, 100000),
)


@given(shapes)
def test_regions_are_disjoint_aligned_and_within_the_total(sizes):
    shape = native.MoeShape.make(**sizes)
    end = 0
    for region in native.workspace_regions(shape):
        assert region["offset"] % 256 == 0
        assert region["offset"] >= end
        assert region["num_bytes"] > 0
        end = region["offset"] + region["num_bytes"]
    assert end <= shape.num_bytes < end + 256
    assert 1 <= shape.ring_blocks <= shape.max_pool_blocks


def test_region_sizes_follow_from_their_shape():
    width = {"u64": 8, "u32": 4, "2xu32": 8, "i32": 4, "f32": 4, "bf16": 2, "e4m3": 1, "ue8m0": 1}
    for region in native.workspace_regions(make_shape()):
        assert region["num_bytes"] == np.prod(region["shape"]) * width[region["dtype"]]


@pytest.mark.parametrize(
    ("sizes", "mebibytes"),
    [
        (dict(num_experts=256, hidden=4096, intermediate=2048), 700),  # DeepSeek-V4-Flash
        (dict(num_experts=384, hidden=7168, intermediate=3072), 1.1 * 1024),  # DeepSeek-V4-Pro
    ],
)
def test_model_shapes_fit_their_memory_budget(sizes, mebibytes):
    shape = native.MoeShape.make(num_ranks=8, top_k=6, max_tokens=8192, **sizes)
    assert shape.num_bytes <= mebibytes * 2**20


def test_invalid_shapes_are_refused():
    for change in (dict(hidden=100), dict(num_experts=7)):
        with pytest.raises(ValueError, match="MoeShape"):
            make_shape(**change)


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        (config.MAX_TOP_K, lambda n: dict(top_k=n, num_experts=64)),
        (config.MAX_RANKS, lambda n: dict(num_ranks=n, num_experts=n)),
        (config.BLOCK_N, lambda n: dict(hidden=2 * config.BLOCK_N - n % config.BLOCK_N)),
    ],
)
def test_limits_are_those_of_the_configuration(limit, size):
    """config.py and shape.h each state them: the largest is accepted, the next one refused."""
    make_shape(**size(limit))
    with pytest.raises(ValueError, match="MoeShape"):
        make_shape(**size(limit + 1))


# ---- dispatch order ----


def peel_naively(counts):
    """One row of every rank that has rows left, round after round."""
    return [(r, i) for i in range(max(counts, default=0)) for r, c in enumerate(counts) if c > i]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=72))
def test_source_rows_rotate_over_ranks(counts):
    assert protocol.source_rows(counts) == peel_naively(counts)


def test_source_rows_of_one_busy_rank():
    assert protocol.source_rows([0, 0, 3]) == [(2, 0), (2, 1), (2, 2)]


# ---- scheduler ----

Block = collections.namedtuple("Block", "phase expert m_block n_block pool_block valid_m")


def walk(shape, rows, num_workers):
    return [
        [Block(*b) for b in protocol.visit_blocks(shape, rows, worker, num_workers)]
        for worker in range(num_workers)
    ]


schedules = st.tuples(
    st.lists(st.integers(0, 300), min_size=4, max_size=4),
    st.integers(1, 9),
    st.integers(1, 20),
)


@given(schedules)
def test_every_block_is_visited_once(schedule):
    rows, num_workers, ring_blocks = schedule
    shape = make_shape(max_tokens=400, ring_tokens=64 * ring_blocks)
    seen = [block for blocks in walk(shape, rows, num_workers) for block in blocks]
    wanted = set()
    pool_block = 0
    for expert, count in enumerate(rows):
        for m_block in range(-(-count // 64)):
            valid_m = min(64, count - 64 * m_block)
            for phase, n_blocks in ((0, 2 * 128 // 128), (1, 256 // 128)):
                for n in range(n_blocks):
                    wanted.add(Block(phase, expert, m_block, n, pool_block, valid_m))
            pool_block += 1
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


@given(schedules)
def test_schedule_never_waits_for_itself(schedule):
    """Runs the walk with the ring's counters and stalls nowhere, whoever goes first.

    Workers advance in a fixed unfair order, as far as their counters allow. Dispatch delivers rows
    block by block when the slot's previous lap has been read.
    """
    rows, num_workers, ring_blocks = schedule
    shape = make_shape(max_tokens=400, ring_tokens=64 * ring_blocks)
    ring_blocks = shape.ring_blocks
    counters = collections.defaultdict(lambda: [0] * ring_blocks)
    workers = walk(shape, rows, num_workers)
    total = sum(-(-count // 64) for count in rows)
    position = [0] * num_workers
    delivered = 0
    progress = True
    while progress:
        progress = False
        while delivered < total:
            slot, _, _, l1_empty, _, _ = protocol.ring_targets(shape, delivered)
            if counters["l1_empty"][slot] < l1_empty:
                break
            counters["l1_arrival"][slot] += 64
            delivered += 1
            progress = True
        for worker, blocks in enumerate(workers):
            while position[worker] < len(blocks):
                block = blocks[position[worker]]
                slot, _, l1_arrival, _, l2_arrival, l2_empty = protocol.ring_targets(
                    shape, block.pool_block
                )
                if block.phase == 0:
                    if counters["l1_arrival"][slot] < l1_arrival:
                        break
                    if counters["l2_empty"][slot] < l2_empty:
                        break
                    assert counters["l1_arrival"][slot] == l1_arrival  # not overwritten yet
                    counters["l1_empty"][slot] += 1
                    counters["l2_arrival"][slot] += 1
                else:
                    if counters["l2_arrival"][slot] < l2_arrival:
                        break
                    assert counters["l2_arrival"][slot] == l2_arrival
                    counters["l2_empty"][slot] += 1
                position[worker] += 1
                progress = True
    assert delivered == total
    assert position == [len(blocks) for blocks in workers]


def test_arrivals_of_a_block_always_add_up_to_block_m():
    shape = make_shape()
    for valid in range(1, 65):
        assert sum(protocol.l1_arrival_increment(shape, m, valid) for m in range(valid)) == 64


def test_workers_share_the_blocks_evenly():
    shape = make_shape(max_tokens=4000)
    lengths = [len(blocks) for blocks in walk(shape, [500, 0, 77, 1300], 7)]
    assert max(lengths) - min(lengths) <= 1


# ---- numerics: C++ and JAX agree bit for bit ----


def jax_quantised(fn, values):
    codes, sf = jax.jit(fn)(jnp.asarray(values, jnp.float32))
    return np.asarray(codes), np.asarray(sf)


def check_same(native_fn, jax_fn, values):
    codes, sf = native_fn(np.ascontiguousarray(values, np.float32).reshape(-1))
    want_codes, want_sf = jax_quantised(jax_fn, values)
    np.testing.assert_array_equal(sf, want_sf.reshape(-1))
    np.testing.assert_array_equal(codes, want_codes.reshape(-1))


FORMATS = [
    pytest.param(protocol.quantize_e4m3, quantize.quantize_e4m3, id="e4m3"),
    pytest.param(protocol.quantize_e2m1, quantize.quantize_e2m1, id="e2m1"),
]


@pytest.mark.parametrize("exponent", [0, 1, 2, 8, 9, 127, 253, 254])
def test_native_agrees_on_every_mantissa_of_the_scale_rule(exponent):
    bits = mantissa_sweep(exponent)
    for native_fn, jax_fn in (
        (protocol.sf_e4m3, quantize.sf_e4m3),
        (protocol.sf_e2m1, quantize.sf_e2m1),
    ):
        np.testing.assert_array_equal(native_fn(bits), np.asarray(jax.jit(jax_fn)(bits)))


@pytest.mark.parametrize(("native_fn", "jax_fn"), FORMATS)
def test_native_agrees_on_every_mantissa_of_an_element(native_fn, jax_fn):
    # 2^23 elements under a scale pinned by one element per block, one binade below the pin.
    values = mantissa_sweep(126).view(np.float32)
    values = np.concatenate([values, np.zeros(-len(values) % 31, np.float32)]).reshape(-1, 31)
    pinned = np.concatenate([np.full((len(values), 1), 1.75, np.float32), values], axis=1)
    check_same(native_fn, jax_fn, pinned)


@pytest.mark.parametrize(("native_fn", "jax_fn"), FORMATS)
def test_native_agrees_on_edges(native_fn, jax_fn):
    bits = edge_bits()
    alone = np.zeros((len(bits), 32), np.uint32)
    alone[:, 0] = bits
    check_same(native_fn, jax_fn, alone.view(np.float32))
    negative = alone.copy()
    negative[:, 0] |= 0x80000000
    check_same(native_fn, jax_fn, negative.view(np.float32))


@pytest.mark.parametrize(("native_fn", "jax_fn"), FORMATS)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_native_agrees_on_random_bit_patterns(native_fn, jax_fn, seed):
    bits = np.random.default_rng(seed).integers(0, 2**32, (64, 32), np.uint32)
    check_same(native_fn, jax_fn, bits.view(np.float32))


@pytest.mark.parametrize("source", [all_bf16, all_fp16])
def test_native_agrees_on_every_narrow_value(source):
    """All 65536 values: widened in C++ and quantised, against JAX on the narrow array."""
    narrow = source()
    widen = protocol.bf16_to_float if source is all_bf16 else protocol.fp16_to_float
    wide = widen(narrow.view(np.uint16))
    codes, sf = protocol.quantize_e4m3(wide)
    want_codes, want_sf = jax.jit(quantize.quantize_e4m3)(jnp.asarray(narrow.reshape(-1, 32)))
    np.testing.assert_array_equal(codes, np.asarray(want_codes).reshape(-1))
    np.testing.assert_array_equal(sf, np.asarray(want_sf).reshape(-1))


def test_native_agrees_on_every_code():
    codes = np.arange(256, dtype=np.uint8)
    ones = np.full(256 // 32, 127, np.uint8)
    want = np.asarray(quantize.dequantize_e4m3(jnp.asarray(codes), jnp.asarray(ones)))
    np.testing.assert_array_equal(protocol.e4m3_to_float(codes), want)
    nibbles = np.arange(32, dtype=np.uint8) % 16
    want = np.asarray(quantize.dequantize_e2m1(jnp.asarray(nibbles), jnp.asarray(ones[:1])))
    np.testing.assert_array_equal(protocol.e2m1_doubled(nibbles) * np.float32(0.5), want)


def test_ue8m0_bytes_are_powers_of_two_and_255_is_nan():
    got = protocol.ue8m0_to_float(np.arange(256, dtype=np.uint8))
    want = np.ldexp(1.0, np.arange(255) - 127)
    np.testing.assert_array_equal(got[:255].astype(np.float64), want)
    assert np.isnan(got[255])


def test_float_to_bf16_rounds_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([np.inf, -np.inf, np.nan, 0.0])])
    got = protocol.float_to_bf16(values)
    want = values.astype(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(got[nan].view(ml_dtypes.bfloat16).astype(np.float32)).all()
