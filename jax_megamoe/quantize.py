"""E4M3, E2M1 and UE8M0: quantise, dequantise, pack, unpack. Jitted, and exact by construction.

Everything here works on integer bit patterns, because floating-point units that flush denormals
and casts that round scales to nearest would both change results without an error. The same rules in
C++ are in ``cc/protocol/numerics.h``; a test compares the two bit for bit.

The scale of a block of 32 elements along the last axis is the smallest power of two that keeps
every element within range (rule "ceil"). With ``A = max |x|`` over the finite elements of the
block, E its biased FP32 exponent and M its 23 mantissa bits, the stored UE8M0 byte is

* E4M3: ``clamp(E - 8 + (M > 0x600000), 1, 254)``, because 448 = 1.75 * 2^8,
* E2M1: ``clamp(E - 2 + (M > 0x400000), 1, 254)``, because 6 = 1.5 * 2^2,

and an element is ``round_to_nearest_even(x * 2^(127 - byte))``. An all-zero block has A = 0, hence
byte 1 and zero codes: no special case. Values stay FP32 numbers: with the largest scale that occurs
the largest codes are 240 and 3, since the next ones stand for 2^128.

E4M3 also comes with one scale for 128 elements or for all of the last axis. The rule is the same,
with A taken over all of them, and the byte is still stored once per 32 elements.

Non-finite elements never change their neighbours. In E4M3 a NaN or an infinity becomes the code NaN
(sign kept). E2M1 has no NaN, so the whole block gets the scale byte 255, which is UE8M0's NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe.config import GRANULARITIES, SF_GROUP
from jax_megamoe.errors import Array, check, check_array, describe, is_array

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "E4M3_NAN",
    "SF_MAX",
    "SF_MIN",
    "UE8M0_NAN",
    "as_bytes",
    "check_group_scales",
    "dequantize_e2m1",
    "dequantize_e4m3",
    "pack_e2m1",
    "quantize_e2m1",
    "quantize_e4m3",
    "sf_e2m1",
    "sf_e4m3",
    "unpack_e2m1",
    "widen_e2m1",
    "widen_e4m3",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_NAN = 0x7F
UE8M0_NAN = 0xFF
SF_MIN, SF_MAX = 1, 254
#: The largest scale byte of finite FP32 numbers, and the largest code that is one with that scale:
#: 240 * 2^120 and 3 * 2^126. The next code stands for 2^128.
_E4M3_TOP, _E2M1_TOP = (247, 0x77), (253, 0x5)

_U32 = jnp.uint32
_ABS = 0x7FFFFFFF
_EXP = 0x7F800000


def _f32_bits(x: jax.Array) -> jax.Array:
    """Bits of x widened to FP32, exactly, for BF16, FP16 and FP32, denormals included."""
    if x.dtype == jnp.float32:
        return lax.bitcast_convert_type(x, _U32)
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(_U32) << 16
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(_U32)
    sign, exponent, mantissa = (bits & 0x8000) << 16, (bits >> 10) & 0x1F, bits & 0x3FF
    # A denormal m * 2^-24 has its leading one at bit 31 - clz(m).
    lead = 31 - lax.clz(jnp.maximum(mantissa, 1))
    denormal = ((103 + lead) << 23) | ((mantissa << (23 - lead)) & 0x7FFFFF)
    normal = ((exponent + 112) << 23) | (mantissa << 13)
    magnitude = jnp.where(exponent == 0, jnp.where(mantissa == 0, 0, denormal), normal)
    return sign | jnp.where(exponent == 31, _EXP | (mantissa << 13), magnitude)


_FLOATS = ("bfloat16", "float16", "float32")
_SF = ("uint8", "float8_e8m0fnu")


def _check_values(x: object) -> None:
    """Checks what is to be quantised: [..., K], or [K]."""
    shape: tuple[object, ...] = ("...", "K") if getattr(x, "ndim", 2) != 1 else ("K",)
    check_array(x, "x", shape, _FLOATS, "the last axis is the one that is contracted")
    check(
        x.shape[-1] % SF_GROUP == 0,  # type: ignore[attr-defined]
        "x",
        got=describe(x),
        want=f"a last axis that is a multiple of {SF_GROUP}",
        remedy=f"scales cover {SF_GROUP} elements along K; pad K with zeros",
    )


def _check_codes(codes: object, sf: object, dtypes: tuple[str, ...]) -> None:
    """Checks codes [..., K] and their scales [..., K/32]."""
    shape: tuple[object, ...] = ("...", "K") if getattr(codes, "ndim", 2) != 1 else ("K",)
    check_array(codes, "codes", shape, dtypes, "the last axis is the one that is contracted")
    *leading, columns = codes.shape  # type: ignore[attr-defined]
    check(
        columns % SF_GROUP == 0,
        "codes",
        got=describe(codes),
        want=f"a last axis that is a multiple of {SF_GROUP}",
        remedy=f"a scale covers {SF_GROUP} codes",
    )
    remedy = f"one scale for each {SF_GROUP} codes along the last axis"
    cast = "scales are powers of two: pass float8_e8m0fnu, or uint8 with its bytes"
    check_array(sf, "sf", (*leading, columns // SF_GROUP), _SF, remedy, cast=cast)


def _check_group(group: object) -> None:
    check(
        type(group) in (int, str) and group in GRANULARITIES,
        "group",
        got=repr(group),
        want=f"one of {GRANULARITIES}",
        remedy="it is the number of elements that share one scale",
    )


def _f32(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(_U32), jnp.float32)


def _grouped(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // SF_GROUP, SF_GROUP)


def _block_amax(bits: jax.Array) -> jax.Array:
    """FP32 bits of the largest finite magnitude over the last axis."""
    magnitude = bits & _ABS
    return jnp.max(jnp.where(magnitude < _EXP, magnitude, 0), axis=-1)


def _over_groups(per_block, group, reduce):
    """Reduces [..., K/32] over the blocks of each group, and repeats the result for each block."""
    _check_group(group)
    blocks = per_block.shape[-1]
    size = blocks if group == "row" else group // SF_GROUP
    if size <= 1 or blocks == 0:
        return per_block
    # The last group may be shorter: its last block again changes neither its maximum nor minimum.
    padding = [(0, 0)] * (per_block.ndim - 1) + [(0, -blocks % size)]
    groups = jnp.pad(per_block, padding, mode="edge")
    groups = groups.reshape(*per_block.shape[:-1], -(-blocks // size), size)
    return jnp.repeat(reduce(groups, axis=-1), size, axis=-1)[..., :blocks]


def check_group_scales(sf: Array, group: int | str, operand: str) -> None:
    """Checks that the scales of quantised activations are equal within each group.

    Args:
      sf: [..., K/32] uint8 or float8_e8m0fnu. A tracer passes: its values cannot be looked at
        (kernels on GPUs look, and fail the call).
      group: 32, 128 or "row", see `quantize_e4m3`.
      operand: name for the message.

    Raises:
      MegaMoEError: two scales of a group differ.
    """
    if group == SF_GROUP or isinstance(sf, jax.core.Tracer) or sf.size == 0:
        return
    check(
        bool(_group_scales_equal(jnp.asarray(sf), group)),
        operand,
        got=f"scale bytes that differ within a group of {group}",
        want=f"equal bytes, as activation_granularity={group!r} says",
        remedy=f"quantise with jax_megamoe.quantize.quantize_e4m3(x, {group!r})",
    )


@functools.partial(jax.jit, static_argnames="group")
def _group_scales_equal(sf, group):
    sf = as_bytes(sf)
    return jnp.all(_over_groups(sf, group, jnp.max) == _over_groups(sf, group, jnp.min))


def sf_e4m3(amax_bits: jax.Array) -> jax.Array:
    """UE8M0 byte (uint8) of an E4M3 block from the FP32 bits (uint32) of its amax."""
    return _sf(amax_bits, 8, 0x600000)


def sf_e2m1(amax_bits: jax.Array) -> jax.Array:
    """UE8M0 byte (uint8) of an E2M1 block from the FP32 bits (uint32) of its amax."""
    return _sf(amax_bits, 2, 0x400000)


def _sf(amax_bits, emax, mantissa_limit):
    exponent = (amax_bits >> 23).astype(jnp.int32)
    byte = exponent - emax + ((amax_bits & 0x7FFFFF) > mantissa_limit).astype(jnp.int32)
    return jnp.clip(byte, SF_MIN, SF_MAX).astype(jnp.uint8)


def _round_scaled(bits, sf, *, mantissa_bits, min_exponent, max_code):
    """Codes without sign: round-to-nearest-even of |x| * 2^(127 - sf), saturated at max_code.

    min_exponent is the exponent of the smallest normal number. All in uint32/int32 arithmetic: the
    significand is shifted right to the unit in the last place and rounded once.
    """
    magnitude = bits & _ABS
    raw_exponent = (magnitude >> 23).astype(jnp.int32)
    significand = (magnitude & 0x7FFFFF) | jnp.where(raw_exponent > 0, 0x800000, 0).astype(_U32)
    # |x| * 2^(127 - sf) = significand * 2^(exponent - 23)
    exponent = jnp.maximum(raw_exponent, 1) - 127 + (127 - sf.astype(jnp.int32))
    # FP32 denormals are normalised so that the exponent below is the true one.
    lead = 31 - lax.clz(jnp.maximum(significand, 1)).astype(jnp.int32)
    significand = significand << (23 - lead).astype(_U32)
    exponent = exponent - (23 - lead)
    quantum = jnp.maximum(exponent, min_exponent) - mantissa_bits
    shift = jnp.clip(quantum - (exponent - 23), 0, 31).astype(_U32)
    kept = significand >> shift
    remainder = significand & ((_U32(1) << shift) - 1)
    half = (_U32(1) << shift) >> 1
    round_up = (remainder > half) | ((remainder == half) & ((kept & 1) == 1))
    kept = kept + round_up.astype(_U32)
    # kept counts quanta; a carry into the next binade is absorbed by the encoding's arithmetic.
    binade = jnp.maximum(exponent - min_exponent, 0).astype(_U32)
    code = kept + (binade << mantissa_bits)
    return jnp.where(magnitude == 0, 0, jnp.minimum(code, max_code))


def quantize_e4m3(x: Array, group: int | str = SF_GROUP) -> tuple[jax.Array, jax.Array]:
    """Quantises along the last axis to E4M3 with one UE8M0 scale per `group` elements.

    Args:
      x: [..., K] bfloat16, float16 or float32, K a multiple of 32.
      group: 32, 128 (the last group may be shorter) or "row": all of the last axis.

    Returns:
      codes: [..., K] uint8, E4M3 bit patterns; bitcasting them to float8_e4m3fn is free.
      sf: [..., K/32] uint8, UE8M0 bytes in [1, 254]; equal within a group.

    Raises:
      MegaMoEError: another dtype, K not a multiple of 32, or another group.
    """
    _check_values(x)
    _check_group(group)
    return _quantize_e4m3(x, group=group)


@functools.partial(jax.jit, static_argnames="group")
def _quantize_e4m3(x, group):
    bits = _f32_bits(_grouped(x))
    sf = sf_e4m3(_over_groups(_block_amax(bits), group, jnp.max))
    largest = jnp.where(sf[..., None] == _E4M3_TOP[0], _E4M3_TOP[1], 0x7E).astype(_U32)
    code = _round_scaled(bits, sf[..., None], mantissa_bits=3, min_exponent=-6, max_code=largest)
    code = jnp.where((bits & _ABS) >= _EXP, E4M3_NAN, code) | ((bits >> 24) & 0x80)
    return code.astype(jnp.uint8).reshape(x.shape), sf


def dequantize_e4m3(codes: Array, sf: Array, dtype=jnp.float32) -> jax.Array:
    """Values of E4M3 codes: ``e4m3(code) * 2^(sf - 127)``.

    Args:
      codes: [..., K] uint8 or float8_e4m3fn.
      sf: [..., K/32] uint8 or float8_e8m0fnu.
      dtype: float32 (exact while the product is in FP32's normal range; XLA flushes what is below,
        and what is above is an infinity) or another float dtype.

    Returns:
      [..., K] of `dtype`.
    """
    _check_codes(codes, sf, ("uint8", "float8_e4m3fn"))
    return _dequantize_e4m3(codes, sf, dtype=dtype)


def widen_e4m3(codes: Array, sf: Array, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Values of E4M3 codes in units of their rows: ``values * units[..., None]``, all finite.

    448 * 2^127 is a value of codes and scales and no FP32 number. A row with scales from 2^120 on
    is in units of 256, all others in units of one: there the values are `dequantize_e4m3`'s.

    Args:
      codes, sf, dtype: as in `dequantize_e4m3`, uint8.

    Returns:
      values [..., K] of `dtype`, units [...] float32.
    """
    units = _units(sf, _E4M3_TOP[0], 256.0)
    return _dequantize_e4m3(codes, sf, dtype=dtype, units=units), units


def widen_e2m1(codes: Array, sf: Array, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """`widen_e4m3` for E2M1: rows with scales from 2^126 on are in units of 4."""
    units = _units(sf, _E2M1_TOP[0], 4.0)
    return _dequantize_e2m1(codes, sf, dtype=dtype, units=units), units


def _units(sf, limit, unit):
    return jnp.where(jnp.any(sf >= limit, axis=-1), jnp.float32(unit), jnp.float32(1))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize_e4m3(codes, sf, dtype, units=None):
    codes, sf = as_bytes(codes), as_bytes(sf)
    exponent, mantissa = (codes.astype(_U32) >> 3) & 15, codes.astype(_U32) & 7
    normal = _f32(((exponent + 120) << 23) | (mantissa << 20))
    value = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where((codes & 0x7F) == E4M3_NAN, jnp.nan, value)
    value = jnp.where(codes & 0x80, -value, value)
    return _scale(value, sf, units).astype(dtype)


def quantize_e2m1(x: Array) -> tuple[jax.Array, jax.Array]:
    """Quantises along the last axis to E2M1 with one UE8M0 scale per 32 elements.

    Args:
      x: [..., K] bfloat16, float16 or float32, K a multiple of 32.

    Returns:
      codes: [..., K] uint8 in [0, 16), one code a byte; `pack_e2m1` makes it two a byte.
      sf: [..., K/32] uint8; 255 marks a block that held a NaN or an infinity.

    Raises:
      MegaMoEError: another dtype, or K not a multiple of 32.
    """
    _check_values(x)
    return _quantize_e2m1(x)


@jax.jit
def _quantize_e2m1(x):
    bits = _f32_bits(_grouped(x))
    sf = sf_e2m1(_block_amax(bits))
    largest = jnp.where(sf[..., None] == _E2M1_TOP[0], _E2M1_TOP[1], 0x7).astype(_U32)
    code = _round_scaled(bits, sf[..., None], mantissa_bits=1, min_exponent=0, max_code=largest)
    finite = (bits & _ABS) < _EXP
    code = jnp.where(finite, code, 0) | ((bits >> 28) & 0x8)
    sf = jnp.where(jnp.all(finite, axis=-1), sf, jnp.uint8(UE8M0_NAN))
    return code.astype(jnp.uint8).reshape(x.shape), sf


def dequantize_e2m1(codes: Array, sf: Array, dtype=jnp.float32) -> jax.Array:
    """Values of E2M1 codes: ``e2m1(code) * 2^(sf - 127)``.

    Args:
      codes: [..., K] uint8 in [0, 16), one code a byte (see `unpack_e2m1`); or float4_e2m1fn.
      sf: [..., K/32] uint8 or float8_e8m0fnu.
      dtype: as in `dequantize_e4m3`.

    Returns:
      [..., K] of `dtype`.
    """
    _check_codes(codes, sf, ("uint8", "float4_e2m1fn"))
    return _dequantize_e2m1(codes, sf, dtype=dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize_e2m1(codes, sf, dtype, units=None):
    if codes.dtype == jnp.float4_e2m1fn:
        codes = unpack_e2m1(pack_e2m1(codes))
    exponent, mantissa = (codes.astype(_U32) >> 1) & 3, codes.astype(_U32) & 1
    normal = _f32(((exponent + 126) << 23) | (mantissa << 22))
    value = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 0.5, normal)
    value = jnp.where(codes & 0x8, -value, value)
    return _scale(value, as_bytes(sf), units).astype(dtype)


def _scale(value, sf, units=None):
    if units is not None:  # first of all: codes are far from both ends of FP32's range
        value = value * (1 / units)[..., None]
    # 2^(sf - 127) in two exact factors: for sf = 0 one factor would be an FP32 denormal.
    sf = jnp.repeat(sf.astype(_U32), SF_GROUP, axis=-1)
    high = _f32(jnp.clip(sf, 64, 254) << 23)
    low = _f32((127 + sf - jnp.clip(sf, 64, 254)) << 23)
    return jnp.where(sf == UE8M0_NAN, jnp.nan, value * low * high)


def pack_e2m1(codes: Array) -> jax.Array:
    """[..., K] codes -> [..., K/2] uint8; element 2j is the low nibble of byte j.

    Codes are float4_e2m1fn, or integers in [0, 16).
    """
    if not is_array(codes):
        check_array(codes, "codes", ("...", "K"), ("uint8", "float4_e2m1fn"), "")
    return _pack_e2m1(codes)


@jax.jit
def _pack_e2m1(codes):
    check(
        codes.shape[-1] % 2 == 0,
        "last axis of the codes to pack",
        got=list(codes.shape),
        want="an even length",
        remedy="two E2M1 codes share a byte",
    )
    if codes.dtype == jnp.float4_e2m1fn:  # XLA's bitcast puts the first one low, too
        pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint8)
    codes = codes.astype(jnp.uint8)
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Array) -> jax.Array:
    """[..., K/2] uint8 -> [..., K] codes in [0, 16); the inverse of `pack_e2m1`."""
    shape: tuple[object, ...] = ("...", "K/2") if getattr(packed, "ndim", 2) != 1 else ("K/2",)
    check_array(packed, "packed", shape, ("uint8", "int8"), "two codes share a byte")
    return _unpack_e2m1(packed)


@jax.jit
def _unpack_e2m1(packed):
    packed = as_bytes(packed)
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def as_bytes(x: Array) -> jax.Array:
    """Bit patterns as uint8. A value cast of E8M0 to uint8 would turn 2^-7 into 0."""
    return jnp.asarray(x) if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)
