"""Quantisers against an independent numpy implementation, exhaustively where that is possible.

The oracle below shares nothing with the library: values and midpoints are float64, in which every
FP32 number, every power of two that can be a scale and every midpoint of two codes is exact, so
each comparison in it is a comparison of real numbers.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import generators
from jax_megamoe import quantize
from jax_megamoe.errors import MegaMoEError

# The oracle --------------------------------------------------------------------------------------


def decode(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """A small float's value from the definition: bias 2^(e-1) - 1, denormals, no special codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = divmod(code % 2 ** (exponent_bits + mantissa_bits), 2**mantissa_bits)
    fraction = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
    value = fraction * Fraction(2) ** (max(exponent, 1) - bias)
    return -value if code >> (exponent_bits + mantissa_bits) else value


@dataclasses.dataclass(frozen=True)
class Format:
    """One element format: its codes' values and how the library spells its functions."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    nan_code: int | None

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def magnitudes(self) -> np.ndarray:
        """float64 values of the finite codes without sign: index = code."""
        count = self.sign_bit if self.nan_code is None else self.nan_code
        codes = range(count)
        return np.array([float(decode(c, self.exponent_bits, self.mantissa_bits)) for c in codes])

    def quantize(self, x):
        return QUANTIZE[self.name](x)

    def dequantize(self, codes, sf, dtype=jnp.float32):
        return DEQUANTIZE[self.name](codes, sf, dtype)

    def sf(self, amax_bits):
        return {"e4m3": quantize.sf_e4m3, "e2m1": quantize.sf_e2m1}[self.name](amax_bits)


QUANTIZE = {"e4m3": jax.jit(quantize.quantize_e4m3), "e2m1": jax.jit(quantize.quantize_e2m1)}
DEQUANTIZE = {
    "e4m3": jax.jit(quantize.dequantize_e4m3, static_argnums=2),
    "e2m1": jax.jit(quantize.dequantize_e2m1, static_argnums=2),
}
E4M3 = Format("e4m3", 4, 3, 448.0, 0x7F)
E2M1 = Format("e2m1", 2, 1, 6.0, None)
both = pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda f: f.name)


def oracle_sf(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """The smallest byte in [1, 254] with amax / 2^(byte - 127) <= largest, by search."""
    reach = fmt.largest * 2.0 ** (np.arange(1, 255) - 127.0)  # what byte 1, 2, ... can hold
    return (1 + np.searchsorted(reach, amax, side="left")).astype(np.uint8)


def oracle_round(scaled: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes without sign nearest to |scaled|; a tie goes to the code whose last bit is 0."""
    values = fmt.magnitudes
    midpoints = (values[:-1] + values[1:]) / 2
    magnitude = np.abs(scaled)
    below = np.searchsorted(midpoints, magnitude, side="left")  # midpoints strictly below
    tie = np.append(midpoints, np.inf)[below] == magnitude
    return below + (tie & (below % 2 == 1))


def oracle(x: np.ndarray, fmt: Format, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """(codes, sf) of x [..., 32 * n] as the module's docstring defines them."""
    sign = np.signbit(x.astype(np.float32)).reshape(*x.shape[:-1], -1, 32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        blocks = x.astype(np.float64).reshape(sign.shape)
    finite = np.isfinite(blocks)
    clean = np.where(finite, blocks, 0.0)
    amax = np.abs(clean).max(-1)
    for first in range(0, amax.shape[-1], group // 32):
        members = amax[..., first : first + group // 32]
        members[...] = members.max(-1, keepdims=True)
    sf = oracle_sf(amax, fmt)
    scale = 2.0 ** (sf[..., None].astype(np.float64) - 127.0)
    code = oracle_round(clean / scale, fmt)
    # Values stay FP32 numbers: the last code below 2^128.
    code = np.minimum(code, np.searchsorted(fmt.magnitudes, 2.0**128 / scale, side="left") - 1)
    if fmt.nan_code is not None:
        code = np.where(finite, code, fmt.nan_code)
    else:
        sf = np.where(finite.all(-1), sf, 255).astype(np.uint8)
    code = code + np.where(sign, fmt.sign_bit, 0)
    return code.astype(np.uint8).reshape(x.shape), sf


def oracle_dequantize(codes: np.ndarray, sf: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 values, exact."""
    magnitude = codes % fmt.sign_bit
    values = np.append(fmt.magnitudes, np.nan)[magnitude]
    values = np.where(codes & fmt.sign_bit, -values, values)
    scale = np.where(sf == 255, np.nan, 2.0 ** (sf.astype(np.float64) - 127))
    return values * np.repeat(scale, 32, axis=-1)


def bits_of(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def assert_quantizes_like_oracle(x: np.ndarray, fmt: Format) -> None:
    codes, sf = fmt.quantize(x)
    want_codes, want_sf = oracle(x, fmt)
    np.testing.assert_array_equal(sf, want_sf)
    np.testing.assert_array_equal(codes, want_codes)


# The oracle itself -------------------------------------------------------------------------------


def test_oracle_agrees_with_ml_dtypes():
    codes = np.arange(127, dtype=np.uint8)
    np.testing.assert_array_equal(
        E4M3.magnitudes, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    np.testing.assert_array_equal(E2M1.magnitudes, [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rng = np.random.default_rng(0)
    scaled = rng.uniform(0, 448, 1 << 16).astype(np.float32)
    want = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(oracle_round(scaled.astype(np.float64), E4M3), want)


# Scales ------------------------------------------------------------------------------------------


# 0 holds the denormals; at 8 and 9 (E4M3), 2 and 3 (E2M1) the clamp to byte 1 ends; 254 is the top.
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 8, 9, 127, 254])
@both
def test_scale_rule_over_all_mantissas(fmt, exponent):
    bits = generators.mantissa_sweep(exponent)
    got = np.asarray(fmt.sf(jnp.asarray(bits)))
    np.testing.assert_array_equal(got, oracle_sf(bits.view(np.float32).astype(np.float64), fmt))


@both
def test_scale_rule_at_edges_of_every_exponent(fmt):
    bits = generators.edge_bits()
    amax = bits.view(np.float32)
    want = oracle_sf(amax.astype(np.float64), fmt)
    np.testing.assert_array_equal(fmt.sf(jnp.asarray(bits)), want)
    # The definition once more, in exact rationals and without a search.
    for value, byte in list(zip(amax, want.tolist(), strict=True))[:: 7 if fmt is E4M3 else 11]:
        largest, exact = Fraction(fmt.largest), Fraction(float(value))
        assert exact <= largest * Fraction(2) ** (byte - 127)
        assert byte == 1 or exact > largest * Fraction(2) ** (byte - 128)


@pytest.mark.parametrize(
    "fmt, amax, byte",
    [
        (E4M3, 448.0, 127),
        (E4M3, np.nextafter(np.float32(448), np.float32(449)), 128),
        (E4M3, 1.0, 119),
        (E4M3, 0.0, 1),
        (E4M3, np.finfo(np.float32).max, 247),
        (E2M1, 6.0, 127),
        (E2M1, np.nextafter(np.float32(6), np.float32(7)), 128),
        (E2M1, 1.0, 125),
        (E2M1, 0.0, 1),
        (E2M1, np.finfo(np.float32).max, 253),
    ],
)
def test_scale_examples(fmt, amax, byte):
    assert int(fmt.sf(jnp.asarray(bits_of(amax)))) == byte


# Codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "largest"), [(E4M3, 240 * 2.0**120), (E2M1, 3 * 2.0**126)])
def test_values_stay_numbers_of_fp32(fmt, largest):
    """The next code would stand for 2^128; the error keeps its bound."""
    last = np.finfo(np.float32).max
    x = np.zeros((5, 32), np.float32)
    x[:, 3] = last, -last, 3.0e38, np.nextafter(np.float32(2.0**127), 0), 1.9375 * 2.0**127
    values = np.asarray(fmt.dequantize(*fmt.quantize(x)), np.float64)
    assert np.isfinite(values).all()
    assert (values[:2, 3] == [largest, -largest]).all()
    bound = 2.0**-4 if fmt is E4M3 else 0.25
    assert (np.abs(values - x) <= bound * np.abs(x)).all()
    assert_quantizes_like_oracle(x, fmt)


@pytest.mark.parametrize(("fmt", "unit", "limit"), [(E4M3, 256, 247), (E2M1, 4, 253)])
def test_widening_in_units(rng, fmt, unit, limit):
    """Finite wherever codes and scales are; rows without such scales keep their bits."""
    widen = quantize.widen_e4m3 if fmt is E4M3 else quantize.widen_e2m1
    codes = rng.integers(0, fmt.sign_bit * 2, (200, 64), dtype=np.uint8)
    codes[fmt.magnitudes.size <= codes % fmt.sign_bit] = 0
    sf = rng.integers(limit - 4, 255, (200, 2), dtype=np.uint8)
    sf[::3, 0] = rng.integers(20, 60, sf[::3, 0].shape)
    values, units = (np.asarray(a) for a in widen(codes, sf))
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(units, np.where((sf >= limit).any(-1), unit, 1))
    assert set(units) == {1, unit}
    exact = oracle_dequantize(codes, sf, fmt)
    np.testing.assert_array_equal(values.astype(np.float64) * units[:, None], exact)
    bf16 = np.asarray(widen(codes, sf, jnp.bfloat16)[0], np.float64)
    np.testing.assert_array_equal(bf16 * units[:, None], exact)


@both
def test_every_code_and_scale_dequantises(fmt):
    codes = np.repeat(np.arange(2 * fmt.sign_bit, dtype=np.uint8), 32)
    sf = np.arange(256, dtype=np.uint8)
    codes = np.broadcast_to(codes, (256, codes.size)).copy()
    sf = np.repeat(sf[:, None], codes.shape[1] // 32, axis=1)
    want = oracle_dequantize(codes, sf, fmt)
    with np.errstate(over="ignore"):
        want32 = want.astype(np.float32)  # exact, or infinity where FP32 ends
    in_range = np.isfinite(want32)
    assert np.array_equal(want32[in_range].astype(np.float64), want[in_range])
    got = np.asarray(fmt.dequantize(codes, sf))
    nan = np.isnan(want32)
    np.testing.assert_array_equal(np.isnan(got), nan)
    # XLA's multiply may flush a product below FP32's normal numbers, but to a zero of its sign.
    denormal = (np.abs(want32) < np.finfo(np.float32).smallest_normal) & (want32 != 0)
    flushed = denormal & (got == 0)
    np.testing.assert_array_equal(bits_of(got)[flushed], bits_of(np.copysign(0, want32))[flushed])
    exact = ~nan & ~flushed
    np.testing.assert_array_equal(bits_of(got)[exact], bits_of(want32)[exact])


@both
def test_code_to_value_to_code_at_every_scale(fmt):
    codes = np.arange(2 * fmt.sign_bit, dtype=np.uint8)
    if fmt.nan_code is not None:
        codes = codes[codes % fmt.sign_bit != fmt.nan_code]
    # Above these bytes the largest code's value is beyond FP32, so no FP32 block gets them.
    last = {"e4m3": 246, "e2m1": 252}[fmt.name]
    top = fmt.magnitudes.size - 1
    blocks = generators.pinned_blocks(codes, top)
    for byte in range(1, last + 1):
        sf = np.full((blocks.shape[0], 1), byte, np.uint8)
        x = oracle_dequantize(blocks, sf, fmt).astype(np.float32)
        got_codes, got_sf = fmt.quantize(x)
        np.testing.assert_array_equal(got_sf, sf)
        np.testing.assert_array_equal(got_codes, blocks)


@both
def test_ties_go_to_even(fmt):
    values = fmt.magnitudes
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    even = np.arange(values.size - 1) + np.arange(values.size - 1) % 2
    lower = np.arange(values.size - 1)
    for x, want in (
        (ties, even),
        (np.nextafter(ties, np.float32(0)), lower),
        (np.nextafter(ties, np.float32(1e9)), lower + 1),
    ):
        for sign, bit in ((1, 0), (-1, fmt.sign_bit)):
            blocks = generators.pinned_blocks(sign * x, fmt.largest)
            codes, sf = fmt.quantize(blocks)
            assert (np.asarray(sf) == 127).all()
            np.testing.assert_array_equal(
                np.asarray(codes)[:, 1:].ravel()[: x.size], want.astype(np.uint8) | bit
            )


@pytest.mark.parametrize(
    "fmt, value, rounded",
    [
        (E2M1, 0.25, 0.0),
        (E2M1, 0.75, 1.0),
        (E2M1, 1.25, 1.0),
        (E2M1, 1.75, 2.0),
        (E2M1, 2.5, 2.0),
        (E2M1, 3.5, 4.0),
        (E2M1, 5.0, 4.0),
        (E4M3, 2.0**-10, 0.0),
        (E4M3, 3 * 2.0**-10, 2.0**-8),
        (E4M3, 15 * 2.0**-10, 2.0**-6),  # the largest denormal's tie is the smallest normal
        (E4M3, 17.0, 16.0),
        (E4M3, 19.0, 20.0),
        (E4M3, 400.0, 384.0),
        (E4M3, 432.0, 448.0),
    ],
)
def test_tie_examples(fmt, value, rounded):
    x = generators.pinned_blocks(np.array([value, -value], np.float32), fmt.largest)
    got = np.asarray(fmt.dequantize(*fmt.quantize(x)))
    assert got[0, 1:3].tolist() == [rounded, -rounded]


# Inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [generators.all_bf16(), generators.all_fp16()], ids=["bf16", "fp16"]
)
@both
def test_sixteen_bit_patterns_agree_with_fp32(fmt, values):
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    shuffled = np.random.default_rng(1).permutation(values.size)
    for blocks in (
        lambda v: v.reshape(-1, 32),  # consecutive patterns: one binade a block
        lambda v: v[shuffled].reshape(-1, 32),  # far apart: most elements underflow
        generators.one_per_block,  # each pattern sets its own scale
    ):
        codes, sf = fmt.quantize(blocks(values))
        codes32, sf32 = fmt.quantize(blocks(wide))
        np.testing.assert_array_equal(sf, sf32)
        np.testing.assert_array_equal(codes, codes32)
        assert_quantizes_like_oracle(blocks(wide), fmt)


@both
def test_fp32_edges_agree_with_oracle(fmt):
    x = generators.edge_bits().view(np.float32)
    x = np.concatenate([x, -x])
    assert_quantizes_like_oracle(generators.one_per_block(x), fmt)
    usable = x.size // 32 * 32
    assert_quantizes_like_oracle(x[:usable].reshape(-1, 32), fmt)
    shuffled = np.random.default_rng(2).permutation(x)[:usable]
    assert_quantizes_like_oracle(shuffled.reshape(-1, 32), fmt)


@both
def test_all_zero_block_has_byte_1_and_zero_codes(fmt):
    codes, sf = fmt.quantize(np.zeros((2, 64), np.float32))
    assert (np.asarray(sf) == 1).all() and (np.asarray(codes) == 0).all()


@both
def test_negative_zero_keeps_its_sign(fmt):
    codes, sf = fmt.quantize(np.full((1, 32), -0.0, np.float32))
    assert (np.asarray(sf) == 1).all() and (np.asarray(codes) == fmt.sign_bit).all()
    value = np.asarray(fmt.dequantize(codes, sf))
    assert (value == 0).all() and np.signbit(value).all()


BAD = [np.nan, -np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD, ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f4", "f2", "bf"]
)
def test_e4m3_non_finite_changes_no_neighbour(bad, dtype):
    x = np.random.default_rng(3).standard_normal((4, 96)).astype(dtype)
    clean = x.copy()
    x[2, 40], clean[2, 40] = bad, 0
    (codes, sf), (want_codes, want_sf) = E4M3.quantize(x), E4M3.quantize(clean)
    np.testing.assert_array_equal(sf, want_sf)
    want_codes = np.array(want_codes)
    want_codes[2, 40] = 0x7F | (0x80 if np.signbit(bad) else 0)
    np.testing.assert_array_equal(codes, want_codes)
    value = np.asarray(E4M3.dequantize(codes, sf))
    assert np.argwhere(np.isnan(value)).tolist() == [[2, 40]]


@pytest.mark.parametrize("bad", BAD, ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f4", "f2", "bf"]
)
def test_e2m1_non_finite_marks_its_block(bad, dtype):
    x = np.random.default_rng(4).standard_normal((4, 96)).astype(dtype)
    clean = x.copy()
    x[2, 40], clean[2, 40] = bad, 0
    (codes, sf), (want_codes, want_sf) = E2M1.quantize(x), E2M1.quantize(clean)
    want_sf = np.array(want_sf)
    want_sf[2, 1] = 255
    np.testing.assert_array_equal(sf, want_sf)
    elsewhere = np.ones(x.shape, bool)
    elsewhere[2, 32:64] = False
    np.testing.assert_array_equal(np.asarray(codes)[elsewhere], np.asarray(want_codes)[elsewhere])
    value = np.asarray(E2M1.dequantize(codes, sf))
    np.testing.assert_array_equal(np.isnan(value), ~elsewhere)


@both
def test_block_of_non_finite_only(fmt):
    x = np.full((1, 32), np.inf, np.float32)
    codes, sf = fmt.quantize(x)
    assert np.isnan(np.asarray(fmt.dequantize(codes, sf))).all()
    assert int(sf[0, 0]) == (1 if fmt is E4M3 else 255)


def half_quantum(x: np.ndarray, sf: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 bound on |x - dq(q(x))|: half a unit in the last place of the element's binade."""
    scale = np.repeat(2.0 ** (sf.astype(np.float64) - 127), 32, axis=-1)
    smallest_normal = float(fmt.magnitudes[1 << fmt.mantissa_bits])
    scaled = np.maximum(np.abs(x.astype(np.float64)) / scale, smallest_normal)
    binade = 2.0 ** np.floor(np.log2(scaled))  # exact: log2 of a float64 a ulp below 2^n is < n
    return binade * 2.0**-fmt.mantissa_bits / 2 * scale


@pytest.mark.parametrize("size", [1e-20, 1e-36, 1e-38, 3e-40])
@both
def test_tiny_rows_keep_relative_error(fmt, size):
    x = (np.random.default_rng(5).uniform(0.3, 1, (8, 128)) * size).astype(np.float32)
    codes, sf = map(np.asarray, fmt.quantize(x))
    error = np.abs(oracle_dequantize(codes, sf, fmt) - x.astype(np.float64))
    assert (error <= half_quantum(x, sf, fmt)).all()
    # Elements that are normal in the format (all are, unless byte 1 is the clamp): relative error.
    smallest_normal = float(fmt.magnitudes[1 << fmt.mantissa_bits])
    normal = np.abs(x.astype(np.float64)) >= smallest_normal * np.repeat(
        2.0 ** (sf.astype(np.float64) - 127), 32, axis=-1
    )
    assert normal.any() or (size <= 1e-38 and fmt is E2M1)
    assert (error[normal] / x[normal] <= 2.0 ** -(fmt.mantissa_bits + 1)).all()


finite32 = st.integers(0, 2**32 - 1).map(lambda b: b if b & 0x7F800000 != 0x7F800000 else b ^ 2**30)


@given(st.lists(finite32, min_size=32, max_size=32), st.sampled_from([E4M3, E2M1]))
@example([0] * 31 + [0x7F600001], E2M1)  # nearest to 2^128, which is no FP32 number
@example([0] * 31 + [0x7F7FFFFF], E4M3)
@settings(max_examples=300, deadline=None)
def test_error_is_at_most_half_a_quantum(bits, fmt):
    x = np.array([bits], np.uint32).view(np.float32)
    codes, sf = map(np.asarray, fmt.quantize(x))
    want_codes, want_sf = oracle(x, fmt)
    assert codes.tolist() == want_codes.tolist() and sf.tolist() == want_sf.tolist()
    values, half = oracle_dequantize(codes, sf, fmt), half_quantum(x, sf, fmt)
    error = np.abs(values - x.astype(np.float64))
    # Where the next value is no FP32 number, values stop before it.
    stopped = (np.abs(values) + 2 * half >= 2.0**128) & (np.abs(values) <= np.abs(x))
    assert ((error <= half) | stopped).all()


@given(st.integers(0, 2**32 - 1), st.integers(-140, 100), st.sampled_from([E4M3, E2M1]))
@settings(max_examples=200, deadline=None)
def test_dequantised_values_quantise_to_themselves(seed, exponent, fmt):
    x = np.ldexp(np.random.default_rng(seed).standard_normal((1, 32)), exponent).astype(np.float32)
    codes, sf = map(np.asarray, fmt.quantize(x))
    value = oracle_dequantize(codes, sf, fmt)
    again = value.astype(np.float32)
    if np.array_equal(again.astype(np.float64), value):  # else the value is below FP32's denormals
        codes2, sf2 = map(np.asarray, fmt.quantize(again))
        value2 = oracle_dequantize(codes2, sf2, fmt)
        np.testing.assert_array_equal(value2, value)


# Shapes, dtypes, jit -----------------------------------------------------------------------------


@both
def test_jit_equals_eager(fmt):
    eager = getattr(quantize, f"quantize_{fmt.name}")
    eager_dequantize = getattr(quantize, f"dequantize_{fmt.name}")
    x = np.random.default_rng(6).standard_normal((3, 2, 64)).astype(np.float32)
    x[0, 0, :3] = np.nan, np.inf, -0.0
    x[1] *= np.float32(1e-39)
    for array in (x, x.astype(np.float16), x.astype(ml_dtypes.bfloat16)):
        codes, sf = eager(jnp.asarray(array))
        jit_codes, jit_sf = fmt.quantize(array)
        assert codes.shape == array.shape and sf.shape == (*array.shape[:-1], 2)
        assert codes.dtype == sf.dtype == jnp.uint8
        np.testing.assert_array_equal(codes, jit_codes)
        np.testing.assert_array_equal(sf, jit_sf)
        np.testing.assert_array_equal(
            bits_of(eager_dequantize(codes, sf)), bits_of(fmt.dequantize(codes, sf))
        )


@both
def test_one_axis_and_no_rows(fmt):
    codes, sf = fmt.quantize(np.ones(64, np.float32))
    assert codes.shape == (64,) and sf.shape == (2,)
    codes, sf = fmt.quantize(np.ones((0, 64), np.float32))
    assert codes.shape == (0, 64) and sf.shape == (0, 2)
    assert fmt.dequantize(codes, sf).shape == (0, 64)


def test_float8_arrays_are_read_by_their_bits():
    x = np.random.default_rng(7).standard_normal((2, 64)).astype(np.float32)
    for fmt in (E4M3, E2M1):
        codes, sf = fmt.quantize(x)
        typed_sf = jax.lax.bitcast_convert_type(sf, jnp.float8_e8m0fnu)
        typed = codes
        if fmt is E4M3:
            typed = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        np.testing.assert_array_equal(fmt.dequantize(typed, typed_sf), fmt.dequantize(codes, sf))


@both
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantise_to_sixteen_bits_rounds_the_fp32_value(fmt, dtype):
    codes, sf = fmt.quantize(np.random.default_rng(8).standard_normal((2, 64)).astype(np.float32))
    got = fmt.dequantize(codes, sf, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, fmt.dequantize(codes, sf).astype(dtype))


def test_pack_and_unpack_are_inverse():
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = np.asarray(quantize.unpack_e2m1(jnp.asarray(packed)))
    assert codes.shape == (4, 128) and codes.max() == 15
    assert codes[0, :4].tolist() == [0, 0, 1, 0]  # bytes 0x00, 0x01: the low nibble comes first
    np.testing.assert_array_equal(codes[..., 0::2], packed & 15)
    np.testing.assert_array_equal(codes[..., 1::2], packed >> 4)
    np.testing.assert_array_equal(quantize.pack_e2m1(jnp.asarray(codes)), packed)
    np.testing.assert_array_equal(jax.jit(quantize.pack_e2m1)(codes), packed)
    nothing = quantize.unpack_e2m1(jnp.zeros((0, 64), jnp.uint8))
    assert nothing.shape == (0, 128) and quantize.pack_e2m1(nothing).shape == (0, 64)


# Groups of more than 32 --------------------------------------------------------------------------


def test_groups_agree_with_the_oracle():
    rng = np.random.default_rng(16)
    for width in (32, 96, 128, 160, 512):
        x = rng.standard_normal((40, width), np.float32)
        x = np.ldexp(x, rng.integers(-40, 40, (40, width // 32)).repeat(32, axis=1))
        x[rng.random(x.shape) < 0.01] = np.nan
        x[3], x[4, : width // 2] = 0, 0
        for group in (32, 128, "row"):
            want = oracle(x, E4M3, width if group == "row" else group)
            for function in (
                quantize.quantize_e4m3,
                jax.jit(lambda x, g=group: quantize.quantize_e4m3(x, g)),
            ):
                got = function(x, group) if function is quantize.quantize_e4m3 else function(x)
                np.testing.assert_array_equal(got[1], want[1])
                np.testing.assert_array_equal(got[0], want[0])
            quantize.check_group_scales(got[1], group, "sf")


@pytest.mark.parametrize("group", [32, 128, "row"])
def test_groups_of_no_rows(group):
    codes, sf = quantize.quantize_e4m3(jnp.zeros((0, 160), jnp.bfloat16), group)
    assert codes.shape == (0, 160) and sf.shape == (0, 5)


def test_scales_that_differ_within_a_group_are_refused():
    sf = np.full((3, 6), 120, np.uint8)
    sf[1, :4] = 121  # groups of 128: blocks 0-3 and 4-5
    check = quantize.check_group_scales
    check(sf, 32, "sf")
    check(sf, 128, "sf")
    refused(lambda: check(sf, "row", "sf"), "sf: got scale bytes that differ within a group of row")
    sf[2, 5] = 119
    refused(lambda: check(sf, 128, "sf"), "group of 128", "quantize_e4m3(x, 128)")
    typed = jax.lax.bitcast_convert_type(jnp.asarray(sf), jnp.float8_e8m0fnu)
    refused(lambda: check(typed, 128, "sf"), "group of 128")
    jax.jit(lambda sf: check(sf, 128, "sf"))(sf)  # values of a tracer are not known


# Errors ------------------------------------------------------------------------------------------


def refused(call, *parts: str) -> None:
    with pytest.raises(MegaMoEError) as error:
        call()
    for part in ("jax_megamoe: ", *parts):
        assert part.lower() in str(error.value).lower(), f"{part!r} is not in {error.value}"


@pytest.mark.parametrize("function", [quantize.quantize_e4m3, quantize.quantize_e2m1])
def test_messages_of_the_quantisers(function):
    refused(
        lambda: function(jnp.zeros((2, 32), jnp.int32)),
        "x: got int32",
        "expected bfloat16 or float16 or float32",
        "where this one comes from",
    )
    for shape in ((2, 48), (31,)):
        refused(
            lambda shape=shape: function(jnp.zeros(shape)),
            f"x: got float32{list(shape)}",
            "expected a last axis that is a multiple of 32",
            "pad K with zeros",
        )
    refused(lambda: function(jnp.zeros(())), "x: got float32[]", "[..., K]", "last axis")
    refused(lambda: jax.jit(function)(jnp.zeros((2, 33))), "got float32[2, 33]")


def test_message_of_the_group():
    for group in (0, 64, "rows", True):
        refused(
            lambda group=group: quantize.quantize_e4m3(jnp.zeros((2, 32)), group),
            f"group: got {group!r}",
            "one of (32, 128, 'row')",
        )


def test_message_of_pack():
    refused(
        lambda: quantize.pack_e2m1(jnp.zeros((2, 3), jnp.uint8)),
        "last axis of the codes to pack: got [2, 3]",
        "expected an even length",
        "two E2M1 codes share a byte",
    )


def test_codes_in_jaxs_own_dtype():
    """float4_e2m1fn packs and widens like the bytes, on numpy's side and on XLA's."""
    codes = np.random.default_rng().integers(0, 16, (3, 64), dtype=np.uint8)
    four = codes.view(ml_dtypes.float4_e2m1fn)
    sf = np.full((3, 2), 127, np.uint8)
    for array in (four, jnp.asarray(four)):
        np.testing.assert_array_equal(quantize.pack_e2m1(array), quantize.pack_e2m1(codes))
        values = np.asarray(quantize.dequantize_e2m1(array, sf))
        np.testing.assert_array_equal(values, np.asarray(quantize.dequantize_e2m1(codes, sf)))
        np.testing.assert_array_equal(values, four.astype(np.float32))
        assert (np.signbit(values) == (codes >= 8)).all()
