"""Weight quantisation, layouts and their inverses, and the pytree that carries them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import generators
from jax_megamoe import quantize, weights
from jax_megamoe._ffi import native
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import MegaMoEError
from jax_megamoe.weights import ExpertWeights

FIELDS = ("w13", "w13_sf", "w2", "w2_sf")
EXPERTS, INTER, HIDDEN = 3, 128, 256
PERMUTATIONS = ("canonical", "cpu")
GPU_LAYOUTS = ("sm90_fp8", "sm90_bf16")
TO_LAYOUT = jax.jit(weights.to_layout, static_argnums=1)


def random_bytes(rng, num_experts=EXPERTS, intermediate=INTER, hidden=HIDDEN) -> ExpertWeights:
    """Canonical weights of arbitrary bytes: layouts have to move NaN scales as well."""

    def draw(*shape):
        return jnp.asarray(rng.integers(0, 256, (num_experts, *shape), dtype=np.uint8))

    return ExpertWeights(
        draw(2 * intermediate, hidden // 2),
        draw(2 * intermediate, hidden // 32),
        draw(hidden, intermediate // 2),
        draw(hidden, intermediate // 32),
    )


def foldable_bytes(
    rng, num_experts=EXPERTS, intermediate=INTER, hidden=HIDDEN, spread=14, most=223
):
    """Canonical weights that every layout holds: scales of a row at most `spread` binades apart and
    at most `most`, groups of zeros of both signs with scale byte 1, rows of zeros."""

    def draw(rows, columns):
        codes = rng.integers(0, 256, (num_experts, rows, columns // 32, 16), dtype=np.uint8)
        zeros = rng.random(codes.shape[:-1]) < 0.2
        zeros |= (rng.random((num_experts, rows)) < 0.1)[..., None]
        codes[zeros] &= 0x88
        top = rng.integers(spread, most + 1, (num_experts, rows, 1))
        sf = top - rng.integers(0, spread + 1, zeros.shape)
        sf[zeros | ~((codes & 0x77) != 0).any(axis=-1)] = 1
        packed = codes.reshape(num_experts, rows, columns // 2)
        return jnp.asarray(packed), jnp.asarray(sf.astype(np.uint8))

    return ExpertWeights(*draw(2 * intermediate, hidden), *draw(hidden, intermediate))


def bytes_for(layout, rng) -> ExpertWeights:
    return random_bytes(rng) if layout in PERMUTATIONS else foldable_bytes(rng)


def dense():
    return generators.dense_weights(np.random.default_rng(0), EXPERTS, INTER, HIDDEN)


def config(**changes) -> MegaMoEConfig:
    fields = {"num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "intermediate": INTER}
    return MegaMoEConfig(**{**fields, "max_tokens_per_rank": 8, **changes})


def assert_same(a: ExpertWeights, b: ExpertWeights) -> None:
    assert a.layout == b.layout
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


# Quantisation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f4", "f2", "bf"]
)
def test_quantize_weights_places_gate_then_up(dtype):
    gate, up, down = (w.astype(dtype) for w in dense())
    got = weights.quantize_weights(gate, up, down)
    assert got.layout == "canonical" and got.num_experts == EXPERTS
    assert [getattr(got, n).shape for n in FIELDS] == [
        (EXPERTS, 2 * INTER, HIDDEN // 2),
        (EXPERTS, 2 * INTER, HIDDEN // 32),
        (EXPERTS, HIDDEN, INTER // 2),
        (EXPERTS, HIDDEN, INTER // 32),
    ]
    assert all(getattr(got, n).dtype == jnp.uint8 for n in FIELDS)
    weights.check_weights(got, config(), EXPERTS)
    for packed, sf, want in (
        (got.w13[:, :INTER], got.w13_sf[:, :INTER], gate),
        (got.w13[:, INTER:], got.w13_sf[:, INTER:], up),
        (got.w2, got.w2_sf, down),
    ):
        want_codes, want_sf = quantize.quantize_e2m1(jnp.asarray(want))
        np.testing.assert_array_equal(sf, want_sf)
        np.testing.assert_array_equal(packed & 15, want_codes[..., 0::2])
        np.testing.assert_array_equal(packed >> 4, want_codes[..., 1::2])
    # A block's largest element lands in (3, 6]; above 4 half a step is 1, below it is at most 1/2.
    for value, original in zip(weights.dequantize_weights(got), (gate, up, down), strict=True):
        original = original.astype(np.float32)
        amax = np.abs(original.reshape(*original.shape[:-1], -1, 32)).max(-1).repeat(32, axis=-1)
        assert (np.abs(value - original) <= amax / 4).all()


def test_dequantize_weights_gives_gate_up_down_of_any_dtype():
    w = weights.quantize_weights(*dense())
    assert [v.shape for v in weights.dequantize_weights(w)] == [
        (EXPERTS, INTER, HIDDEN),
        (EXPERTS, INTER, HIDDEN),
        (EXPERTS, HIDDEN, INTER),
    ]
    again = weights.quantize_weights(*weights.dequantize_weights(w))
    for value, value2 in zip(
        weights.dequantize_weights(w), weights.dequantize_weights(again), strict=True
    ):
        np.testing.assert_array_equal(value, value2)
    assert all(v.dtype == jnp.bfloat16 for v in weights.dequantize_weights(w, jnp.bfloat16))


# Layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_every_layout_has_an_exact_inverse(layout, jit):
    convert = TO_LAYOUT if jit else weights.to_layout
    w = bytes_for(layout, np.random.default_rng(1))
    moved = convert(w, layout)
    assert moved.layout == layout
    weights.check_weights(moved, config(), EXPERTS)
    assert_same(convert(moved, "canonical"), w)
    for other in PERMUTATIONS if layout in PERMUTATIONS else weights.LAYOUTS:
        assert_same(convert(convert(moved, other), layout), moved)


@pytest.mark.parametrize("layout", PERMUTATIONS)
def test_every_byte_value_survives(layout):
    w = random_bytes(np.random.default_rng(2), num_experts=4)
    assert all(np.unique(getattr(w, name)).size == 256 for name in FIELDS)
    moved = weights.to_layout(w, layout)
    for name in FIELDS:  # the same bytes, each as often as before
        counts = [np.bincount(np.ravel(getattr(x, name)), minlength=256) for x in (w, moved)]
        np.testing.assert_array_equal(*counts)
    assert_same(weights.to_layout(moved, "canonical"), w)


@given(st.sampled_from([1, 3]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=4, deadline=None)
def test_layouts_are_inverse_for_any_shape(num_experts, intermediate, hidden, seed):
    rng = np.random.default_rng(seed)
    for layout in weights.LAYOUTS:
        draw = random_bytes if layout in PERMUTATIONS else foldable_bytes
        w = draw(rng, num_experts, 128 * intermediate, 128 * hidden)
        assert_same(TO_LAYOUT(TO_LAYOUT(w, layout), "canonical"), w)


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_quantised_weights_survive_bit_for_bit(layout):
    arrays = list(dense())
    arrays[0][1, 5] = 0  # a row of zeros
    arrays[2][2, 7, 32:64] = -0.0  # and a group
    w = weights.quantize_weights(*arrays)
    assert_same(weights.to_layout(weights.to_layout(w, layout), "canonical"), w)


def test_interleave_order():
    intermediate = 32
    gate = [f"gate {i}" for i in range(intermediate)]
    up = [f"up {i}" for i in range(intermediate)]
    number = {name: n for n, name in enumerate(gate + up)}
    order = (
        *("gate 0", "gate 1", "gate 2", "gate 3", "gate 4", "gate 5", "gate 6", "gate 7"),
        *("up 0", "up 1", "up 2", "up 3", "up 4", "up 5", "up 6", "up 7"),
        *("gate 8", "gate 9", "gate 10", "gate 11", "gate 12", "gate 13", "gate 14", "gate 15"),
        *("up 8", "up 9", "up 10", "up 11", "up 12", "up 13", "up 14", "up 15"),
    )
    rows = jnp.arange(2 * intermediate).reshape(1, -1, 1) + jnp.zeros((2, 1, 3), jnp.int32)
    mixed = weights.interleave_gate_up(rows)
    assert mixed[1, :32, 2].tolist() == [number[name] for name in order]
    # The same as a formula: row 16 p + j holds gate row 8 p + j, row 16 p + 8 + j its up row.
    for i in range(intermediate):
        pair, j = divmod(i, 8)
        assert int(mixed[0, 16 * pair + j, 0]) == number[f"gate {i}"]
        assert int(mixed[0, 16 * pair + 8 + j, 0]) == number[f"up {i}"]
    np.testing.assert_array_equal(weights.deinterleave_gate_up(mixed), rows)


def test_cpu_panel_positions():
    w = random_bytes(np.random.default_rng(3))
    cpu = weights.to_layout(w, "cpu")
    assert cpu.w13.shape == (EXPERTS, 2 * INTER // 16, HIDDEN // 2, 16)
    assert cpu.w13_sf.shape == (EXPERTS, 2 * INTER // 16, HIDDEN // 32, 16)
    assert cpu.w2.shape == (EXPERTS, HIDDEN // 16, INTER // 2, 16)
    assert cpu.w2_sf.shape == (EXPERTS, HIDDEN // 16, INTER // 32, 16)
    canonical = {name: np.asarray(getattr(w, name)) for name in FIELDS}
    panels = {name: np.asarray(getattr(cpu, name)) for name in FIELDS}
    for name in ("w13", "w13_sf"):
        for panel in range(2 * INTER // 16):
            for lane in range(16):
                # Lanes 0..7: gate rows of channels 8 p .. 8 p + 7; lanes 8..15: their up rows.
                row = 8 * panel + lane if lane < 8 else INTER + 8 * panel + lane - 8
                np.testing.assert_array_equal(
                    panels[name][:, panel, :, lane], canonical[name][:, row, :]
                )
    for name in ("w2", "w2_sf"):
        for panel in range(HIDDEN // 16):
            for lane in range(16):
                np.testing.assert_array_equal(
                    panels[name][:, panel, :, lane], canonical[name][:, 16 * panel + lane, :]
                )
    # One element by hand: k = 70 of up row 19 is the low nibble of byte 35, in panel 2, lane 11.
    assert panels["w13"][1, 2, 35, 11] & 15 == canonical["w13"][1, INTER + 19, 35] & 15
    assert panels["w13_sf"][1, 2, 70 // 32, 11] == canonical["w13_sf"][1, INTER + 19, 2]


# GPU layouts -------------------------------------------------------------------------------------


def all_rows(rows):
    """Canonical row that stands in each row of linear 1: 8 gate, 8 up, 8 gate, ..."""
    pair, j = np.divmod(np.arange(rows), 16)
    return np.where(j < 8, 8 * pair + j, rows // 2 + 8 * pair + j - 8)


def places(layout, chunks, rows, columns):
    """What the kernel reads for every weight of a matrix, by the addresses it uses.

    Returns [rows, columns] each: the word, the code's number in it, the group's exponent code.
    """
    r, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    block, within = r % 128 // 64, r % 64
    warp, half, g = within // 16, within % 16 // 8, within % 8
    group, i = k % 128 // 32, k % 32
    if layout == "sm90_fp8":
        q, code = i % 16 // 4, 4 * (i // 16) + i % 4
    else:
        q, code = i % 8 // 2, 2 * (i // 8) + i % 2
    thread, word = 32 * warp + 4 * g + q, 2 * (group % 2) + half
    offset = 4096 * block + 2048 * (group // 2) + 16 * thread + 4 * word
    chunk = chunks[r // 128, k // 128]
    at = [np.take_along_axis(chunk, (offset + b)[..., None], 2)[..., 0] for b in range(4)]
    words = sum(byte.astype(np.uint32) << np.uint32(8 * b) for b, byte in enumerate(at))
    if layout == "sm90_fp8":
        offset = 8192 + 128 * block + 4 * (8 * warp + g) + 2 * half + group // 2
        exponents = np.take_along_axis(chunk, offset[..., None], 2)[..., 0] >> (4 * (group % 2))
        return words, code, exponents & 15
    offset = 8192 + 256 * block + 4 * (2 * (8 * warp + g) + half) + group
    return words, code, np.take_along_axis(chunk, offset[..., None], 2)[..., 0]


def byte_permute(low, high, selectors):
    """PRMT with 3-bit selectors: byte t of the result is the selectors' nibble t of (high, low)."""
    table = (np.uint64(high) << np.uint64(32)) | np.uint64(low)
    result = np.zeros_like(selectors)
    for t in range(4):
        chosen = (selectors >> np.uint32(4 * t)) & np.uint32(7)
        byte = (table >> (np.uint64(8) * chosen.astype(np.uint64))) & np.uint64(255)
        result |= byte.astype(np.uint32) << np.uint32(8 * t)
    return result


def rotate_left(word, count):
    return (word << np.uint32(count)) | (word >> np.uint32(32 - count))


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def widened_fp8(words, codes, exponents):
    """E4M3 values, as the kernel makes them: two table lookups and the signs a word."""
    values = np.full(words.shape, np.nan)
    signs = np.uint32(0x80808080)
    for exponent in range(16):
        factor = 0.0 if exponent == 15 else 2.0 ** (6 - exponent)
        table = (factor * E2M1_VALUES).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(table.astype(np.float64), factor * E2M1_VALUES)  # exact
        low, high = table.view("<u4")
        first = byte_permute(low, high, words & np.uint32(0x7777)) | (words & signs)
        second = byte_permute(low, high, (words >> np.uint32(16)) & np.uint32(0x7777))
        second |= (words << np.uint32(4)) & signs
        both = np.stack([first, second], axis=-1)
        e4m3 = both.view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        mine = np.take_along_axis(e4m3, codes[..., None], -1)[..., 0]
        values = np.where(exponents == exponent, mine, values)
    return values


def widened_bf16(words, codes, exponents):
    """BF16 values, as the kernel makes them: rotate, mask, multiply by a power of two."""
    mask, upper = np.uint32(0x81C081C0), np.uint32(0x01000100)
    pairs = [rotate_left(words, count) & mask for count in (2, 6, 12)]
    pairs.append(((words & upper) | (rotate_left(words, 8) & ~upper)) & mask)
    bf16 = np.stack(pairs, axis=-1).view(np.uint16).view(ml_dtypes.bfloat16)
    scale = (exponents.astype(np.uint16) << 7).view(ml_dtypes.bfloat16)
    return (np.take_along_axis(bf16, codes[..., None], -1)[..., 0] * scale).astype(np.float64)


def kernel_values(layout, chunks, base, columns):
    """[rows, columns] float64: every weight as the kernel sees it."""
    words, codes, exponents = places(layout, chunks, base.size, columns)
    codes = np.broadcast_to(codes, words.shape)
    base = base.astype(np.float64)[:, None] - 127
    if layout == "sm90_fp8":
        return widened_fp8(words, codes, exponents) * 2.0 ** (base - 6)
    return widened_bf16(words, codes, exponents) * 2.0**base


def canonical_values(packed, sf):
    packed = np.asarray(packed)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    scales = 2.0 ** (np.repeat(np.asarray(sf).astype(np.float64), 32, axis=-1) - 127)
    return np.where(codes & 8, -1, 1) * E2M1_VALUES[codes & 7] * scales


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_chunks_are_the_kernels(layout):
    granularities = (32,) if layout == "sm90_bf16" else (0, 128)
    for granularity in granularities:
        assert native.gpu_weight_chunk_bytes(granularity) == weights.gpu_chunk_bytes(layout)
    assert native.GPU_WEIGHT_CHUNK_ROWS == weights.GPU_CHUNK


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_words_use_every_bit_once(layout):
    assert sorted(np.ravel(weights.word_bits(layout))) == list(range(32))


@pytest.mark.parametrize(
    ("layout", "spread"), [("sm90_fp8", 14), ("sm90_bf16", 14), ("sm90_bf16", 132)]
)
def test_kernel_sees_the_canonical_values(layout, spread):
    intermediate, hidden = 256, 384
    most = weights.BASES[layout][1]
    w = foldable_bytes(np.random.default_rng(20), 2, intermediate, hidden, spread, most)
    moved = weights.to_layout(w, layout)
    chunk = 8192 + (256 if layout == "sm90_fp8" else 512)
    assert weights.gpu_chunk_bytes(layout) == chunk
    assert moved.w13.shape == (2, 4, 3, chunk) and moved.w13_sf.shape == (2, 512)
    assert moved.w2.shape == (2, 3, 2, chunk) and moved.w2_sf.shape == (2, 384)
    order = all_rows(2 * intermediate)
    want13, want2 = canonical_values(w.w13, w.w13_sf), canonical_values(w.w2, w.w2_sf)
    arrays = {name: np.asarray(getattr(moved, name)) for name in FIELDS}
    for expert in range(2):
        got = kernel_values(layout, arrays["w13"][expert], arrays["w13_sf"][expert], hidden)
        np.testing.assert_array_equal(got, want13[expert, order])
        got = kernel_values(layout, arrays["w2"][expert], arrays["w2_sf"][expert], intermediate)
        np.testing.assert_array_equal(got, want2[expert])


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_bases_are_the_largest_scale_that_counts(layout):
    w = foldable_bytes(np.random.default_rng(21))
    packed, sf = np.array(w.w2), np.array(w.w2_sf)
    packed[0, 3] = 0x80  # zeros of both signs: a row without a scale
    sf[0, 3] = 77
    packed[0, 4, 16:32] = 0x08  # a group of zeros, whose large scale does not count
    packed[0, 4, :16] = 0x21
    sf[0, 4, :] = (100, 200, 99, 98)
    packed[0, 4, 32:] = 0x77
    moved = weights.to_layout(dataclasses.replace(w, w2=packed, w2_sf=sf), layout)
    assert moved.w2_sf[0, 3] == 1
    # Sums of BF16 activations are in units of it: not smaller than one.
    assert moved.w2_sf[0, 4] == (100 if layout == "sm90_fp8" else 127)
    back = weights.to_layout(moved, "canonical")
    np.testing.assert_array_equal(back.w2, packed)
    assert back.w2_sf[0, 3].tolist() == [1, 1, 1, 1]  # the quantiser's scale for zeros
    assert back.w2_sf[0, 4].tolist() == [100, 1, 99, 98]


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_any_bytes_keep_their_values_or_become_nan(layout):
    """Nothing comes back with another finite value, whatever the bytes."""
    w = random_bytes(np.random.default_rng(22), 2, 128, 256)
    codes = np.array(w.w2)
    codes[:, ::3, :48] &= 0x88
    w = dataclasses.replace(w, w2=jnp.asarray(codes))
    back = TO_LAYOUT(TO_LAYOUT(w, layout), "canonical")
    for packed, sf, same, new in (
        (w.w13, w.w13_sf, back.w13, back.w13_sf),
        (w.w2, w.w2_sf, back.w2, back.w2_sf),
    ):
        np.testing.assert_array_equal(same, packed)
        sf, new = np.asarray(sf).astype(int), np.asarray(new).astype(int)
        groups = np.asarray(packed).reshape(*sf.shape, 16)
        nonzero = ((groups & 0x77) != 0).any(axis=-1)
        spread = np.where(nonzero, sf, 0).max(-1) - np.where(nonzero, sf, 256).min(-1)
        limit = {"sm90_fp8": 14, "sm90_bf16": 132}[layout]
        largest = np.where(nonzero, sf, 0).max(-1)
        nan = (sf == 255).any(-1) | (spread > limit) | (largest > weights.BASES[layout][1])
        assert nan.any()  # rows of both kinds; linear 1's of the FP8 layout are all too wide
        want = np.where(nonzero, sf, 1)
        want[nan] = 255
        np.testing.assert_array_equal(new, want)
    assert not (np.asarray(back.w2_sf) == 255).all()


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_the_limit_is_where_widened_weights_stop_being_exact(layout):
    """What the kernel multiplies with: 2^(6 - d) times a weight in E4M3, 2^-d times it in BF16."""
    offset, dtype = {"sm90_fp8": (6, "float8_e4m3fn"), "sm90_bf16": (0, "bfloat16")}[layout]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    limit = weights.MAX_SPREAD[layout]
    for below, exact in ((0, True), (limit, True), (limit + 1, False)):
        widened = values * 2.0 ** (offset - below)
        assert (widened == widened.astype(dtype).astype(np.float64)).all() == exact


@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_what_cannot_be_folded_is_refused_or_nan(layout):
    limit = {"sm90_fp8": 14, "sm90_bf16": 132}[layout]
    assert weights.MAX_SPREAD[layout] == limit
    clean = foldable_bytes(np.random.default_rng(23), spread=0)

    def with_scales(name, row, scales):
        sf, packed = np.array(getattr(clean, f"{name}_sf")), np.array(getattr(clean, name))
        sf[1, row, : len(scales)] = scales
        packed[1, row, : 16 * len(scales)] = 0x11
        packed[1, row, 16 * len(scales) :] = 0
        changed = {name: jnp.asarray(packed), f"{name}_sf": jnp.asarray(sf)}
        return dataclasses.replace(clean, **changed)

    widest = with_scales("w2", 9, (limit + 1, 1))
    weights.check_foldable(widest, layout)
    back = weights.to_layout(weights.to_layout(widest, layout), "canonical")
    assert back.w2_sf[1, 9, :2].tolist() == [limit + 1, 1]

    too_large = []
    if layout == "sm90_fp8":
        weights.check_foldable(with_scales("w2", 9, (223, 220)), layout)
        text = "a scale of 2^97 (1 of "
        too_large = [("w2", 9, (224, 223), "weights.w2, expert 1, row 9", text)]
    too_wide = f"2^{limit + 1} apart (1 of "
    remedy = "activation_granularity=32" if layout == "sm90_fp8" else "source of these weights"
    for name, row, scales, operand, got in (
        ("w2", 9, (limit + 2, 1), "weights.w2, expert 1, row 9", too_wide),
        ("w13", 9, (limit + 2, 1), "weights.w13, expert 1, gate row 9", too_wide),
        ("w13", INTER + 9, (1, limit + 2), "weights.w13, expert 1, up row 9", too_wide),
        ("w2", 9, (255,), "weights.w2, expert 1, row 9", "scale byte 255, a NaN"),
        *too_large,
    ):
        w = with_scales(name, row, scales)
        want_remedy = "source of these weights" if 255 in scales else remedy
        for call in (
            lambda w=w: weights.to_layout(w, layout),
            lambda w=w: weights.check_foldable(w, layout),
            lambda w=w: weights.check_foldable(weights.to_layout(w, "cpu"), layout),
        ):
            refused(call, operand, got, want_remedy)
        weights.check_foldable(w, "cpu")
        traced = TO_LAYOUT(w, layout)
        values = weights.dequantize_stacked(traced)[name == "w2"]
        nan_rows = np.isnan(values).all(axis=-1)
        assert np.argwhere(nan_rows).tolist() == [[1, row]]
        assert np.isnan(values).sum() == values.shape[-1]
        interleaved = np.flatnonzero(all_rows(2 * INTER) == row)[0] if name == "w13" else row
        assert getattr(traced, f"{name}_sf")[1, interleaved] == 255


def test_bases_keep_sums_finite():
    """By the largest and smallest numbers that a kernel adds up, before scales are applied."""
    widest = 2**20  # MAX_SIZE, elements of a sum
    smallest, largest = weights.BASES["sm90_fp8"]
    codes = 448 * (6 * 2**6)  # of an activation, of a weight in the largest scale of its row
    assert codes * widest * 2.0 ** (largest - 127 - 6) < 2.0**128 and smallest == 1
    # BF16: a weight in units of its row's base is at most the weight itself, or at most 6.
    assert weights.BASES["sm90_bf16"] == (127, 254)


def test_layouts_of_sharded_weights():
    """Every device converts its own experts, and the check looks at all of them."""
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices("cpu")[:4])
    spec = jax.sharding.PartitionSpec("ep")
    w = foldable_bytes(np.random.default_rng(24), num_experts=8)
    placed = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))
    for layout in GPU_LAYOUTS:
        weights.check_foldable(placed, layout)

        def convert(part, layout=layout):
            return weights.to_layout(part, layout)

        moved = jax.shard_map(convert, mesh=mesh, in_specs=spec, out_specs=spec)(placed)
        assert moved.w13.sharding.spec == spec
        assert_same(moved, weights.to_layout(w, layout))
    bad = np.array(w.w2_sf)
    bad[6, 2, 1] = 255
    bad = jax.device_put(bad, placed.w2_sf.sharding)
    refused(
        lambda: weights.check_foldable(dataclasses.replace(placed, w2_sf=bad), "sm90_fp8"),
        "weights.w2, expert 6, row 2",
    )


def test_check_weights_wants_padded_widths_of_a_back_end():
    narrow = config(hidden=HIDDEN - 32, intermediate=INTER - 64)
    w = foldable_bytes(np.random.default_rng(26))
    for layout in weights.LAYOUTS:
        weights.check_weights(weights.to_layout(w, layout), narrow, EXPERTS)
    own = ExpertWeights(
        w.w13[:, : 2 * (INTER - 64), : HIDDEN // 2 - 16],
        w.w13_sf[:, : 2 * (INTER - 64), : HIDDEN // 32 - 1],
        w.w2[:, : HIDDEN - 32, : INTER // 2 - 32],
        w.w2_sf[:, : HIDDEN - 32, : INTER // 32 - 2],
    )
    weights.check_weights(own, narrow, EXPERTS)
    refused(lambda: weights.check_weights(own, config(), EXPERTS), "weights.w13 (canonical")


def test_conversion_takes_an_expert_at_a_time():
    w = random_bytes(np.random.default_rng(25), 16, 256, 512)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(w))
    for layout in GPU_LAYOUTS:
        memory = TO_LAYOUT.lower(w, layout).compile().memory_analysis()
        assert memory.temp_size_in_bytes < size, layout


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_dequantised_values_do_not_depend_on_the_layout(layout):
    w = weights.quantize_weights(*dense())
    moved = weights.to_layout(w, layout)
    for value, want in zip(
        weights.dequantize_weights(moved), weights.dequantize_weights(w), strict=True
    ):
        np.testing.assert_array_equal(value, want)


def test_same_layout_is_no_copy():
    w = random_bytes(np.random.default_rng(4))
    assert weights.to_layout(w, "canonical") is w


# The pytree --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_pytree_keeps_the_layout(layout):
    w = weights.to_layout(bytes_for(layout, np.random.default_rng(5)), layout)
    leaves, treedef = jax.tree.flatten(w)
    assert len(leaves) == 4
    assert_same(jax.tree.unflatten(treedef, leaves), w)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    assert paths == [".w13", ".w13_sf", ".w2", ".w2_sf"]


def test_layouts_are_different_trees():
    w = random_bytes(np.random.default_rng(6))
    cpu = weights.to_layout(w, "cpu")
    assert jax.tree.structure(w) != jax.tree.structure(cpu)
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, w, cpu)


@pytest.mark.parametrize("layout", PERMUTATIONS)
def test_tree_map_under_jit_and_donation(layout):
    w = weights.to_layout(random_bytes(np.random.default_rng(7)), layout)
    want = jax.tree.map(lambda a: np.asarray(a) ^ 0xFF, w)

    def invert(tree):
        return jax.tree.map(lambda a: a ^ jnp.uint8(0xFF), tree)

    assert_same(jax.jit(invert)(w), want)
    donated = jax.jit(invert, donate_argnums=0)(w)
    assert_same(donated, want)
    assert_same(
        jax.jit(lambda t: weights.to_layout(t, "canonical"))(donated),
        weights.to_layout(want, "canonical"),
    )


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_bytes(np.random.default_rng(8)).layout = "cpu"


# Errors ------------------------------------------------------------------------------------------


def refused(call, *parts: str) -> None:
    with pytest.raises(MegaMoEError) as error:
        call()
    for part in ("jax_megamoe: ", *parts):
        assert part.lower() in str(error.value).lower(), f"{part!r} is not in {error.value}"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_non_finite_weights_are_refused(which, bad):
    arrays = list(dense())
    arrays[which][1, 5, 77] = bad
    refused(
        lambda: weights.quantize_weights(*arrays),
        ("w_gate or w_up", "w_gate or w_up", "w_down")[which] + ": got a NaN or an infinity",
        "expected finite weights",
        "look at the source of these weights",
    )


def test_non_finite_weights_under_jit_are_nan_not_an_error():
    gate, up, down = dense()
    gate[1, 5, 77] = np.nan
    w = jax.jit(weights.quantize_weights)(gate, up, down)
    got_gate, got_up, got_down = weights.dequantize_weights(w)
    assert np.argwhere(np.isnan(got_gate))[:, 2].tolist() == list(range(64, 96))
    assert not np.isnan(got_up).any() and not np.isnan(got_down).any()


def test_messages_of_quantize_weights():
    gate, up, down = dense()
    transposed = "weights are [experts, out, in]; transpose [in, out] matrices first"
    cases = [
        ((gate[0], up, down), "w_gate: got float32[128, 256]", "[E, I, H]"),
        ((gate, up[:, :64], down), "w_up: got float32[3, 64, 256]", "[3, 128, 256]"),
        ((gate, up, gate), "w_down: got float32[3, 128, 256]", "[3, 256, 128]"),
        ((gate, up, down[:2]), "w_down: got float32[2, 256, 128]", "[3, 256, 128]"),
    ]
    for arrays, got, want in cases:
        refused(lambda a=arrays: weights.quantize_weights(*a), got, want, transposed)
    floats = "float32 or bfloat16 or float16"
    for array, got, remedy in (
        ([1.0], "list of 1", "jnp.asarray"),
        (gate.astype(np.float64), "float64[3, 128, 256]", "astype(jnp.float32)"),
        (gate.astype(np.int8), "int8[3, 128, 256]", "ExpertWeights.from_arrays"),
        (gate.astype(ml_dtypes.float4_e2m1fn), "float4_e2m1fn", "ExpertWeights.from_arrays"),
        (gate.astype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn", "multiply by the scales"),
    ):
        refused(lambda a=array: weights.quantize_weights(a, up, down), f"w_gate: got {got}", remedy)
        refused(lambda a=array: weights.quantize_weights(gate, a, down), f"w_up: got {got}", floats)
        refused(lambda a=array: weights.quantize_weights(gate, up, a), f"w_down: got {got}", remedy)
    narrow = [w[..., :48] for w in (gate, up)]
    refused(
        lambda: weights.quantize_weights(*narrow, np.zeros((EXPERTS, 48, INTER), np.float32)),
        "w_gate and w_up: got 48 numbers in a row",
        "a multiple of 32",
    )


def test_widths_that_a_layout_cannot_take():
    narrow = random_bytes(np.random.default_rng(9), intermediate=96, hidden=160)
    assert weights.to_layout(narrow, "cpu").layout == "cpu"
    for layout in GPU_LAYOUTS:
        refused(
            lambda layout=layout: weights.to_layout(narrow, layout),
            f"weights for layout {layout!r}: got hidden = 160",
            "expected a multiple of 128",
            "layer.shard(weights) pads",
        )


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_arrays_that_do_not_belong_together(layout):
    w = weights.to_layout(bytes_for(layout, np.random.default_rng(9)), layout)
    for name in ("w13_sf", "w2", "w2_sf"):
        array = getattr(w, name)
        wrong = dataclasses.replace(w, **{name: array[:, :-1]})
        for call in (weights.dequantize_weights, lambda w: weights.to_layout(w, "cpu")):
            if layout != "cpu" or call is weights.dequantize_weights:
                refused(
                    lambda call=call, wrong=wrong: call(wrong),
                    f"weights.{name} ({layout} layout): got uint8{[*wrong.w13.shape[:1]]}"[:-1],
                    f"expected uint8 {list(array.shape)}",
                    "one set of weights",
                )
    for value, got in ((None, "None"), ((1, 2), "tuple of 2"), (w.w13, f"uint8{[*w.w13.shape]}")):
        for call in (
            weights.dequantize_weights,
            weights.expert_biases,
            lambda w: weights.to_layout(w, "cpu"),
        ):
            refused(
                lambda call=call, value=value: call(value),
                f"weights: got {got}",
                "expected jax_megamoe.ExpertWeights",
                "quantize_weights",
            )


def in_jax_dtypes(w, packed, on_host):
    """Operands of `ExpertWeights.from_arrays` that make the canonical weights w."""
    operands = []
    for codes, sf in (
        (w.w13[:, :INTER], w.w13_sf[:, :INTER]),
        (w.w13[:, INTER:], w.w13_sf[:, INTER:]),
        (w.w2, w.w2_sf),
    ):
        codes, sf = np.asarray(codes), np.asarray(sf)
        if not packed:
            low_first = np.stack([codes & 15, codes >> 4], axis=-1)
            codes = low_first.reshape(*codes.shape[:2], -1).view(ml_dtypes.float4_e2m1fn)
            sf = sf.view(ml_dtypes.float8_e8m0fnu)
        operands += [codes, sf]
    return operands if on_host else list(map(jnp.asarray, operands))


@pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "jax"])
@pytest.mark.parametrize("packed", [False, True], ids=["float4", "bytes"])
def test_from_arrays(packed, on_host):
    rng = np.random.default_rng()
    w = random_bytes(rng)
    w = dataclasses.replace(w, w13_sf=w.w13_sf // 2, w2_sf=w.w2_sf // 2)  # all but NaN
    operands = in_jax_dtypes(w, packed, on_host)
    got = ExpertWeights.from_arrays(*operands)
    jitted = jax.jit(ExpertWeights.from_arrays)(*operands)
    biases = [rng.standard_normal((EXPERTS, n), np.float32) for n in (INTER, INTER, HIDDEN)]
    names = ("b_gate", "b_up", "b_down")
    biased = ExpertWeights.from_arrays(*operands, **dict(zip(names, biases, strict=True)))
    for name in FIELDS:
        array = getattr(got, name)
        assert isinstance(array, np.ndarray) == on_host and array.dtype == np.uint8
        for other in (array, getattr(jitted, name), getattr(biased, name)):
            np.testing.assert_array_equal(other, getattr(w, name))
    for bias, want in zip(weights.expert_biases(biased), biases, strict=True):
        np.testing.assert_array_equal(bias, want)


def test_messages_of_from_arrays():
    good = in_jax_dtypes(random_bytes(np.random.default_rng(1)), False, True)
    good[1::2] = [np.ones_like(sf) for sf in good[1::2]]
    names = ("w_gate", "w_gate_sf", "w_up", "w_up_sf", "w_down", "w_down_sf")
    nan = good[3].copy()
    nan.view(np.uint8)[1, 2, 3] = 255
    four = "float4_e2m1fn"
    for name, value, *parts in (
        ("w_gate", good[0].astype(np.float32), "float32[3, 128, 256]", "quantize_weights"),
        ("w_gate", None, "None", "expected float4_e2m1fn or uint8 [E, I, H]", "left out"),
        ("w_gate", good[0][0], f"{four}[128, 256]", "[E, I, H]", "[experts, out, in]"),
        ("w_gate", good[0][..., :48], "48 numbers in a row", "multiple of 32"),
        ("w_up", good[2].swapaxes(1, 2), f"{four}[3, 256, 128]", "[3, 128, 256]", "transpose"),
        ("w_up", good[2].view(np.uint8), "uint8[3, 128, 256]", "[3, 128, 128]"),
        ("w_down", good[4].view(np.int8), "int8[3, 256, 128]", "uint8", ".view(jnp.uint8)"),
        ("w_gate_sf", good[1].astype(np.float32), "float32[3, 128, 8]", "powers of two"),
        ("w_up_sf", good[3][..., :1], "float8_e8m0fnu[3, 128, 1]", "[3, 128, 8]", "each 32 codes"),
        ("w_up_sf", nan, "1 scales that are NaN (byte 255)", "finite", "source"),
    ):
        operands = dict(zip(names, good, strict=True)) | {name: value}
        if value is not None and value.shape[-1:] == (48,):
            operands |= {"w_up": value, "w_down": good[4][:, :48]}
        refused(
            lambda o=operands: ExpertWeights.from_arrays(**o), f"{name}: got {parts[0]}", *parts
        )
    refused(
        lambda: ExpertWeights.from_arrays(*good, b_up=np.zeros((3, 128), np.float32)),
        "b_gate, b_up and b_down: got only b_up",
        "all three or none",
    )


def test_messages_of_to_layout():
    w = random_bytes(np.random.default_rng(9))
    for call in (
        lambda: weights.to_layout(w, "tpu"),
        lambda: weights.to_layout(dataclasses.replace(w, layout="tpu"), "canonical"),
    ):
        refused(
            call,
            "layout: got 'tpu'",
            f"expected one of {weights.LAYOUTS}",
            "layer.shard(weights) picks the right one",
        )


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_messages_of_check_weights(layout):
    w = weights.to_layout(bytes_for(layout, np.random.default_rng(10)), layout)
    weights.check_weights(w, config(), EXPERTS)
    refused(
        lambda: weights.check_weights({"w13": w.w13}, config(), EXPERTS),
        "weights: got dict",
        "expected jax_megamoe.ExpertWeights",
        "jax_megamoe.quantize_weights",
    )
    remedy = "compare them with the weights"
    for name in FIELDS:
        array = getattr(w, name)
        label = f"weights.{name} ({layout} layout): got "
        spelled = list(array.shape)
        short = dataclasses.replace(w, **{name: array[:, :-1]})
        refused(
            lambda short=short: weights.check_weights(short, config(), EXPERTS),
            f"{label}uint8{[EXPERTS, spelled[1] - 1, *spelled[2:]]}",
            f"expected uint8 {spelled}",
            remedy,
        )
        signed = dataclasses.replace(w, **{name: array.astype(jnp.int8)})
        refused(
            lambda signed=signed: weights.check_weights(signed, config(), EXPERTS),
            f"{label}int8{spelled}",
            f"expected uint8 {spelled}",
            "ExpertWeights.from_arrays",
        )
    refused(
        lambda: weights.check_weights(w, config(), EXPERTS + 1),
        f"expected uint8 [{EXPERTS + 1}, ",
        remedy,
    )
    refused(
        lambda: weights.check_weights(w, config(hidden=2 * HIDDEN), EXPERTS),
        "weights.w13 (",
        remedy,
    )
    refused(
        lambda: weights.check_weights(w, config(intermediate=2 * INTER), EXPERTS),
        "weights.w13 (",
        remedy,
    )
