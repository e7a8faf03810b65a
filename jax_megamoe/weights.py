"""Expert weights: one canonical layout, one layout per back end, an exact inverse for each.

Canonical is what checkpoints hold: K (the contracted axis) is contiguous and packed two E2M1 codes
a byte, linear 1's rows are all gate rows, then all up rows. ``to_layout(w, "canonical")`` undoes a
back end's layout.

* "cpu" is a permutation of the same bytes.
* "sm90_fp8" and "sm90_bf16" permute the codes, and split the scales of a row into the row's largest
  one, the base, and how many binades each group lies below it. This is exact too, with one
  exception: a group of zeros has no scale there, and comes back with scale byte 1, as
  `quantize.quantize_e2m1` writes it. What has no place in such a layout is refused by
  `check_foldable`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import quantize
from jax_megamoe.config import SF_GROUP, MegaMoEConfig
from jax_megamoe.errors import Array, check, check_array, describe, is_array, refuse

__all__ = [
    "BASES",
    "CPU_PANEL",
    "GPU_CHUNK",
    "INTERLEAVE",
    "LAYOUTS",
    "MAX_SPREAD",
    "ExpertWeights",
    "check_biases",
    "check_finite_scales",
    "check_foldable",
    "check_weights",
    "deinterleave_gate_up",
    "dequantize_stacked",
    "dequantize_weights",
    "expert_biases",
    "gpu_chunk_bytes",
    "interleave_gate_up",
    "quantize_weights",
    "to_layout",
    "word_bits",
]

#: Gate and up rows alternate in groups of this many, so that one tile holds both halves of a pair.
INTERLEAVE = 8
#: Rows of one CPU panel: 8 gate and 8 up rows of linear 1, 16 rows of linear 2.
CPU_PANEL = 16

#: Rows and K of one chunk of the GPU layouts: contiguous, and fetched as one copy.
GPU_CHUNK = 128
#: GPU layout -> bits of a group's exponent code.
_EXPONENT_BITS = {"sm90_fp8": 4, "sm90_bf16": 8}
#: GPU layout -> most binades that a group's scale can lie below the largest scale of its row.
#: sm90_fp8: 2^(6 - d) times an E2M1 value is an E4M3 value for d up to 14; the code 15 says zeros.
#: sm90_bf16: 2^-d times an E2M1 value is a BF16 value, denormal perhaps, for d up to 132: 0.5 and
#: 1.5 are whole multiples of 2^-1, and BF16 ends at 2^-133. The code 0 says zeros.
MAX_SPREAD = {"sm90_fp8": 14, "sm90_bf16": 132}
#: GPU layout -> smallest and largest base of a row. Sums are taken in units of it, and only then is
#: it applied. sm90_bf16: sums have the activations' own size, so units below one would make sums of
#: large ones infinite. sm90_fp8: sums are those of codes, below 2^38 for any width; times
#: 2^(223 - 127 - 6) they are finite, and the token's scale follows after that.
BASES = {"sm90_fp8": (1, 223), "sm90_bf16": (127, 254)}

_BYTES = ("uint8",)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w13", "w13_sf", "w2", "w2_sf", "b13", "b2"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """FP4 weights of E experts: a pytree of arrays, sharded over experts (axis 0).

    Attributes (canonical layout, E experts, H hidden, I intermediate):
      w13: [E, 2I, H/2] uint8, packed E2M1; rows 0..I-1 are gate rows, I..2I-1 up rows.
      w13_sf: [E, 2I, H/32] uint8, UE8M0 bytes.
      w2: [E, H, I/2] uint8, packed E2M1.
      w2_sf: [E, H, I/32] uint8, UE8M0 bytes.
      layout: "canonical" or the name of a back end's layout, one of `LAYOUTS`. Static: part of the
        treedef.
      b13: [E, 2I] float32, biases of linear 1, ordered like w13's rows; or None, like b2.
      b2: [E, H] float32, biases of linear 2. A slot adds its routing weight times its expert's.

    An expert has both biases or neither. They are FP32 because they are added to FP32 sums: BF16
    ones of a checkpoint convert exactly, and a row of 4 bytes is nothing beside one of weights.

    In the GPU layouts w13 is [E, 2I/128, H/128, C] and w2 [E, H/128, I/128, C] with C =
    `gpu_chunk_bytes`, w13_sf is [E, 2I] and w2_sf [E, H].

    A stack of L layers has an axis [L] in front of all that, for `jax.lax.scan`: see
    `MegaMoE.shard`. Only that takes a stack; everything else takes one layer.
    """

    w13: jax.Array
    w13_sf: jax.Array
    w2: jax.Array
    w2_sf: jax.Array
    layout: str = "canonical"
    b13: jax.Array | None = None
    b2: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        return self.w13.shape[-_num_axes(self.layout)]

    @property
    def num_layers(self) -> int | None:
        """L of a stack [L, E, ...]; None for the weights of one layer, [E, ...]."""
        is_stack = len(self.w13.shape) == _num_axes(self.layout) + 1
        return self.w13.shape[0] if is_stack else None

    @classmethod
    def from_arrays(
        cls,
        w_gate: Array,
        w_gate_sf: Array,
        w_up: Array,
        w_up_sf: Array,
        w_down: Array,
        w_down_sf: Array,
        *,
        b_gate: Array | None = None,
        b_up: Array | None = None,
        b_down: Array | None = None,
    ) -> ExpertWeights:
        """Weights from MXFP4 codes and scales in JAX's own dtypes, bit for bit.

        Args:
          w_gate, w_up: [E, I, H] float4_e2m1fn, or [E, I, H/2] uint8 with two codes a byte, the
            first in the low half. Row i produces intermediate channel i.
          w_gate_sf, w_up_sf: [E, I, H/32] float8_e8m0fnu, or uint8 with their bytes.
          w_down: [E, H, I] or [E, H, I/2], in the same way.
          w_down_sf: [E, H, I/32], in the same way.
          b_gate, b_up, b_down: biases [E, I], [E, I], [E, H] float32, bfloat16 or float16,
            converted to float32. All or none.

        Returns:
          `ExpertWeights` in canonical layout; numpy arrays, in host memory, if all operands are
          numpy arrays, otherwise jax arrays.

        Raises:
          MegaMoEError: shapes that do not agree, an unsupported dtype, widths that are no multiples
            of 32, some biases but not all, or (outside jit) a scale that is NaN or a bias that is
            not finite.
        """
        remedy = "weights are [experts, out, in]; transpose [in, out] matrices first"
        num_experts, intermediate, hidden = _check_codes(w_gate, "w_gate", ("E", "I", "H"), remedy)
        shape = (num_experts, intermediate, hidden)
        _check_codes(w_up, "w_up", shape, remedy)
        _check_codes(w_down, "w_down", (num_experts, hidden, intermediate), remedy)
        for name, width in (("w_gate", hidden), ("w_down", intermediate)):
            check(
                width % SF_GROUP == 0,
                name,
                got=f"{width} numbers in a row",
                want=f"a multiple of {SF_GROUP}",
                remedy=f"one scale covers {SF_GROUP} of them; pad rows with codes and scales of 0",
            )
        sf = {"w_gate_sf": w_gate_sf, "w_up_sf": w_up_sf, "w_down_sf": w_down_sf}
        cast = (
            "scales are powers of two here: .astype(jnp.float8_e8m0fnu) keeps others only if they "
            "are that, and weights with other scales go through jax_megamoe.quantize_weights"
        )
        for name, array in sf.items():
            rows, columns = (
                (hidden, intermediate) if name == "w_down_sf" else (intermediate, hidden)
            )
            shape = (num_experts, rows, columns // SF_GROUP)
            remedy = f"one scale for each {SF_GROUP} codes of a row"
            check_array(array, name, shape, ("float8_e8m0fnu", "uint8"), remedy, cast=cast)
            if not isinstance(array, jax.core.Tracer):
                bad = np.asarray(_bytes_of(array)) == quantize.UE8M0_NAN
                check(
                    not bad.any(),
                    name,
                    got=f"{np.count_nonzero(bad)} scales that are NaN (byte {quantize.UE8M0_NAN})",
                    want="finite scales",
                    remedy="look at the source of these weights",
                )
        codes = (w_gate, w_up, w_down)
        biases = _checked_biases(num_experts, intermediate, hidden, b_gate, b_up, b_down)
        given = (*codes, *sf.values(), *(biases or ()))
        np_or_jnp: Any = np if all(isinstance(array, np.ndarray) for array in given) else jnp
        gate, up, down = (_packed(array) for array in codes)
        gate_sf, up_sf, down_sf = (_bytes_of(array) for array in sf.values())
        weights = cls(
            w13=np_or_jnp.concatenate([gate, up], axis=1),
            w13_sf=np_or_jnp.concatenate([gate_sf, up_sf], axis=1),
            w2=np_or_jnp.asarray(down),
            w2_sf=np_or_jnp.asarray(down_sf),
        )
        return weights if biases is None else _with_biases(weights, biases, np_or_jnp)


# Programs exported with jax.export carry the tree of their arguments.
jax.export.register_pytree_node_serialization(
    ExpertWeights,
    serialized_name="jax_megamoe.ExpertWeights",
    serialize_auxdata=lambda aux: aux[0].encode(),
    deserialize_auxdata=lambda text: (text.decode(),),
)


def quantize_weights(
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    b_gate: Array | None = None,
    b_up: Array | None = None,
    b_down: Array | None = None,
) -> ExpertWeights:
    """Quantises dense expert weights to E2M1 with UE8M0 scales per 32 along K.

    Args:
      w_gate, w_up: [E, I, H] float32, bfloat16 or float16; row i produces intermediate channel i.
      w_down: [E, H, I], same dtypes.
      b_gate, b_up, b_down: biases [E, I], [E, I], [E, H], same dtypes, converted to float32. All or
        none.

    Returns:
      `ExpertWeights` in canonical layout. See `quantize.quantize_e2m1` for the rounding.

    Raises:
      MegaMoEError: shapes that do not agree, an unsupported dtype, some biases but not all, or
        (outside jit) a weight or bias that is not finite.
    """
    remedy = "weights are [experts, out, in]; transpose [in, out] matrices first"
    for name, array in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        check_array(array, name, ("E", *_AXES[name]), _FLOATS, remedy, cast=_dense_remedy(array))
    num_experts, intermediate, hidden = w_gate.shape
    check_array(w_up, "w_up", (num_experts, intermediate, hidden), _FLOATS, remedy)
    check_array(w_down, "w_down", (num_experts, hidden, intermediate), _FLOATS, remedy)
    for name, width in (("w_gate and w_up", hidden), ("w_down", intermediate)):
        check(
            width % SF_GROUP == 0,
            name,
            got=f"{width} numbers in a row",
            want=f"a multiple of {SF_GROUP}",
            remedy=f"one scale covers {SF_GROUP} of them; pad weights with zeros to "
            f"{-(-width // SF_GROUP) * SF_GROUP}",
        )
    w13, w13_sf = quantize.quantize_e2m1(jnp.concatenate([w_gate, w_up], axis=1))
    w2, w2_sf = quantize.quantize_e2m1(w_down)
    for name, sf in (("w_gate or w_up", w13_sf), ("w_down", w2_sf)):
        if not isinstance(sf, jax.core.Tracer):
            check(
                not np.any(np.asarray(sf) == quantize.UE8M0_NAN),
                name,
                got="a NaN or an infinity",
                want="finite weights",
                remedy="E2M1 has neither; look at the source of these weights",
            )
    weights = ExpertWeights(quantize.pack_e2m1(w13), w13_sf, quantize.pack_e2m1(w2), w2_sf)
    biases = _checked_biases(num_experts, intermediate, hidden, b_gate, b_up, b_down)
    return weights if biases is None else _with_biases(weights, biases, jnp)


_FLOATS = ("float32", "bfloat16", "float16")
#: Axes of a matrix after that of the experts.
_AXES = {"w_gate": ("I", "H"), "w_up": ("I", "H"), "w_down": ("H", "I")}


def _dense_remedy(array: object) -> str:
    """What to do with weights that are not dense floating-point ones."""
    dtype = str(getattr(array, "dtype", ""))
    if dtype in ("float4_e2m1fn", "uint8", "int8"):
        return "codes with their scales make weights in jax_megamoe.ExpertWeights.from_arrays"
    if dtype.startswith("float8"):
        return "multiply by the scales in float32 first; FP8 without its scales is no weight"
    return "cast it with .astype(jnp.float32), if it holds the weights' values"


def _check_codes(
    array: Any, operand: str, shape: tuple[object, ...], remedy: str
) -> tuple[int, int, int]:
    """Checks E2M1 codes, packed or not, and returns their shape as if they were not packed."""
    packed = is_array(array) and str(array.dtype) == "uint8"
    dtypes = ("float4_e2m1fn", "uint8")
    if packed and len(array.shape) == 3:
        last = shape[-1]
        half = last // 2 if isinstance(last, int) else f"{last}/2"
        # The width in numbers has to be even to have a half at all; one of 32 is checked later.
        check_array(array, operand, (*shape[:-1], half), dtypes, remedy)
        return (*array.shape[:2], 2 * array.shape[2])
    cast = "dense weights go through jax_megamoe.quantize_weights"
    if is_array(array) and str(array.dtype) == "int8":
        cast = "reinterpret the bytes with .view(jnp.uint8)"
    check_array(array, operand, shape, dtypes, remedy, cast=cast)
    return array.shape


def _bytes_of(array: Any) -> Any:
    """The bit patterns as uint8; what is in host memory stays there."""
    return array.view(np.uint8) if isinstance(array, np.ndarray) else quantize.as_bytes(array)


def _packed(array: Any) -> Any:
    """[..., K] float4_e2m1fn -> [..., K/2] uint8; packed codes as they are."""
    if str(array.dtype) == "uint8":
        return array
    if isinstance(array, np.ndarray):  # ml_dtypes has a byte for each
        codes = array.view(np.uint8)
        return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)
    return quantize.pack_e2m1(array)


def _checked_biases(num_experts, intermediate, hidden, b_gate, b_up, b_down):
    """(b_gate, b_up, b_down) if they are given, after looking at them."""
    biases = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    if not given:
        return None
    check(
        len(given) == 3,
        "b_gate, b_up and b_down",
        got=f"only {' and '.join(given)}",
        want="all three or none",
        remedy="pass zeros for what the model does not have",
    )
    for name, bias in given.items():
        width = hidden if name == "b_down" else intermediate
        check_array(bias, name, (num_experts, width), _FLOATS, "biases are [experts, out]")
        if not isinstance(bias, jax.core.Tracer):
            check(
                bool(np.isfinite(np.asarray(bias, np.float32)).all()),
                name,
                got="a NaN or an infinity",
                want="finite biases",
                remedy="look at the source of these weights",
            )
    return tuple(given.values())


def _with_biases(weights: ExpertWeights, biases: Any, np_or_jnp: Any) -> ExpertWeights:
    gate, up, down = (np_or_jnp.asarray(bias, np.float32) for bias in biases)
    return dataclasses.replace(weights, b13=np_or_jnp.concatenate([gate, up], axis=1), b2=down)


def dequantize_weights(
    weights: ExpertWeights, dtype=jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(w_gate [E, I, H], w_up [E, I, H], w_down [E, H, I]) of `dtype`, from any layout."""
    w13, w2 = dequantize_stacked(weights, dtype)
    intermediate = w13.shape[1] // 2
    return w13[:, :intermediate], w13[:, intermediate:], w2


def dequantize_stacked(weights: ExpertWeights, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """(w13 [E, 2I, H] with gate rows first, w2 [E, H, I]) of `dtype`, from any layout."""
    weights = to_layout(weights, "canonical")
    try:
        is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    check(
        is_float,
        "dtype",
        got=repr(dtype),
        want="a floating-point dtype",
        remedy="jnp.float32 holds every weight exactly, jnp.bfloat16 all but extreme scales",
    )
    w13 = quantize.dequantize_e2m1(quantize.unpack_e2m1(weights.w13), weights.w13_sf, dtype)
    w2 = quantize.dequantize_e2m1(quantize.unpack_e2m1(weights.w2), weights.w2_sf, dtype)
    return w13, w2


def expert_biases(weights: ExpertWeights) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """(b_gate [E, I], b_up [E, I], b_down [E, H]) float32, from any layout; None if there are none.

    The counterpart of `dequantize_weights`, whose matrices they belong to.
    """
    _check_single(weights)
    if weights.b13 is None or weights.b2 is None:
        return None
    b13 = weights.b13 if weights.layout == "canonical" else deinterleave_gate_up(weights.b13)
    b_gate, b_up = jnp.split(b13, 2, axis=1)
    return b_gate, b_up, weights.b2


def _ordered_biases(w: ExpertWeights, order) -> dict[str, jax.Array | None]:
    """Fields b13 and b2 with linear 1's reordered, as its rows are; linear 2's rows never are."""
    return {"b13": None if w.b13 is None else order(w.b13), "b2": w.b2}


def interleave_gate_up(rows: jax.Array) -> jax.Array:
    """[E, 2I, ...] with gate rows first -> 8 gate rows, 8 up rows, 8 gate rows, ..."""
    num_experts, two_i, *rest = rows.shape
    halves = rows.reshape(num_experts, 2, two_i // (2 * INTERLEAVE), INTERLEAVE, *rest)
    return jnp.swapaxes(halves, 1, 2).reshape(rows.shape)


def deinterleave_gate_up(rows: jax.Array) -> jax.Array:
    """The inverse of `interleave_gate_up`."""
    num_experts, two_i, *rest = rows.shape
    pairs = rows.reshape(num_experts, two_i // (2 * INTERLEAVE), 2, INTERLEAVE, *rest)
    return jnp.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _to_panels(rows):  # [E, N, C] -> [E, N/16, C, 16]: one column of 16 rows is one SIMD load
    num_experts, num_rows, columns = rows.shape
    return jnp.swapaxes(rows.reshape(num_experts, num_rows // CPU_PANEL, CPU_PANEL, columns), 2, 3)


def _from_panels(panels):
    num_experts, num_panels, columns, _ = panels.shape
    return jnp.swapaxes(panels, 2, 3).reshape(num_experts, num_panels * CPU_PANEL, columns)


def _canonical_to_cpu(w: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=_to_panels(interleave_gate_up(w.w13)),
        w13_sf=_to_panels(interleave_gate_up(w.w13_sf)),
        w2=_to_panels(w.w2),
        w2_sf=_to_panels(w.w2_sf),
        layout="cpu",
        **_ordered_biases(w, interleave_gate_up),
    )


def _cpu_to_canonical(w: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=deinterleave_gate_up(_from_panels(w.w13)),
        w13_sf=deinterleave_gate_up(_from_panels(w.w13_sf)),
        w2=_from_panels(w.w2),
        w2_sf=_from_panels(w.w2_sf),
        layout="canonical",
        **_ordered_biases(w, deinterleave_gate_up),
    )


# GPU layouts -------------------------------------------------------------------------------------
#
# Weights are wgmma's A operand, from registers. One 32-bit word holds the 8 codes that a thread
# widens into the registers of one row and one group of 32, in the bits where widening them costs
# the fewest instructions. A chunk is 128 rows x 128 of K: the codes of its two 64-row blocks, 4096
# bytes each, then their exponent codes.
#
# Rows split into (chunk, block 2, warp 4, half 2, g 8), K into (chunk, pair of groups 2, group of
# the pair 2, then the 32 of a group as below). Within a block a word stands at
# [pair of groups][warp][g][q][group of the pair][half]; thread 32 * warp + 4 * g + q has it.


def gpu_chunk_bytes(layout: str) -> int:
    """Bytes of one chunk of a GPU layout: FP4 codes, then one exponent code for each group."""
    codes = GPU_CHUNK * GPU_CHUNK // 2
    return codes + GPU_CHUNK * (GPU_CHUNK // SF_GROUP) * _EXPONENT_BITS[layout] // 8


# How the 32 of a group split, slowest first: q is the thread, the other two number the codes of a
# word.
_GROUP_AXES = {
    "sm90_fp8": {"k half": 2, "q": 4, "t": 4},  # code 4 * half + t: k = 16 * half + 4 * q + t
    "sm90_bf16": {"p": 4, "q": 4, "k half": 2},  # code 2 * p + half: k = 8 * p + 2 * q + half
}


def word_bits(layout: str) -> list[list[int]]:
    """[8][4]: the bit of a 32-bit word that holds bit b of code c; b = 3 is the sign.

    sm90_fp8: the magnitude of code t = 0..3 is nibble t, that of code 4 + t nibble 4 + t: they are
    the selectors of two byte permutes, which look E4M3 bytes up. Signs fill the bits between, where
    a mask of 0x80808080, after a shift by 4 for the second four, finds them.

    sm90_bf16: rotated left by 2, 6, 12 for the pairs p = 0..2 and masked by 0x81C081C0, the word is
    two BF16 numbers 2^-126 times the values: sign at bit 15, exponent at 8 and 7, mantissa at 6.
    Pair 3 takes what is left: a rotation by 8, but the upper exponent bits are in place.
    """
    if layout == "sm90_fp8":
        return [
            [4 * code, 4 * code + 1, 4 * code + 2, 8 * (code % 4) + (7 if code < 4 else 3)]
            for code in range(8)
        ]
    bits = []
    for code in range(8):
        pair, half = divmod(code, 2)
        targets = [16 * half + bit for bit in (6, 7, 8, 15)]
        rotation = (2, 6, 12, 8)[pair]
        in_place = pair == 3
        bits.append(
            [
                target if in_place and b == 2 else (target - rotation) % 32
                for b, target in enumerate(targets)
            ]
        )
    return bits


def _fold_scales(packed, sf, layout):
    """One expert's [N, K/2] codes, [N, K/32] scales -> bases [N], exponent codes [N, K/32].

    A row that cannot be folded gets base 255, so that its results are NaN and not wrong.
    """
    nonzero = _nonzero_groups(packed)
    smallest, largest = BASES[layout]
    base = jnp.max(jnp.where(nonzero, sf, 0), axis=-1, keepdims=True)
    too_large = base > largest
    base = jnp.maximum(base, jnp.uint8(smallest))
    base = jnp.where(jnp.any(nonzero, axis=-1, keepdims=True), base, jnp.uint8(1))
    below = jnp.where(nonzero, base - sf, 0)
    bad = jnp.any((sf == quantize.UE8M0_NAN) | (below > MAX_SPREAD[layout]), axis=-1, keepdims=True)
    bad |= too_large
    if layout == "sm90_fp8":
        exponents = jnp.where(nonzero, below, jnp.uint8(15))
        exponents = jnp.where(bad, jnp.uint8(0), exponents)
    else:
        exponents = jnp.where(nonzero, 253 - below, jnp.uint8(0))
        exponents = jnp.where(bad, jnp.uint8(253), exponents)
    return jnp.where(bad, jnp.uint8(quantize.UE8M0_NAN), base)[:, 0], exponents


def _unfold_scales(base, exponents, layout):
    """The inverse of `_fold_scales`."""
    if layout == "sm90_fp8":
        zeros, below = exponents == 15, exponents
    else:
        zeros, below = exponents == 0, 253 - exponents
    base = base[:, None]
    sf = jnp.where(zeros, jnp.uint8(1), base - below)
    return jnp.where(base == quantize.UE8M0_NAN, base, sf)


def _nonzero_groups(packed):  # [..., K/2] -> bool [..., K/32]; -0 is a zero
    groups = packed.reshape(*packed.shape[:-1], -1, SF_GROUP // 2)
    return jnp.any((groups & 0x77) != 0, axis=-1)


# Axes of a matrix, split as above, with their sizes, and their order in memory.
_CODE_ORDER = ("rows", "columns", "block", "pair", "warp", "g", "q", "group", "half")
_EXPONENT_ORDER = ("rows", "columns", "block", "warp", "g", "half", "j")


def _row_axes(rows):
    return {"rows": rows, "block": 2, "warp": 4, "half": 2, "g": 8}


def _code_axes(layout, rows, columns):
    """(axes of a matrix of codes, the order of a chunk: the codes of a word come last)."""
    inner = _GROUP_AXES[layout]
    axes = _row_axes(rows) | {"columns": columns, "pair": 2, "group": 2} | inner
    return axes, (*_CODE_ORDER, *(name for name in inner if name != "q"))


def _exponent_axes(rows, columns):
    """The same of a matrix with one exponent code per group."""
    return _row_axes(rows) | {"columns": columns, "j": GPU_CHUNK // SF_GROUP}, _EXPONENT_ORDER


def _permute(array, axes, order):
    """Splits a matrix into `axes`, name -> size, and puts them into `order`."""
    return array.reshape(tuple(axes.values())).transpose([list(axes).index(n) for n in order])


def _permute_back(array, axes, order):
    """The inverse of `_permute`, up to the shape."""
    return array.reshape([axes[name] for name in order]).transpose([order.index(n) for n in axes])


def _pack_matrix(packed, sf, layout):
    """One expert's [N, K/2] codes, [N, K/32] scales -> (chunks [N/128, K/128, C], bases [N])."""
    rows, columns = packed.shape[0] // GPU_CHUNK, 2 * packed.shape[1] // GPU_CHUNK

    codes = _permute(quantize.unpack_e2m1(packed), *_code_axes(layout, rows, columns))
    codes = codes.reshape(rows, columns, -1, 8)
    words = jnp.zeros(codes.shape[:-1], jnp.uint32)
    for code, positions in enumerate(word_bits(layout)):
        for bit, position in enumerate(positions):
            value = (codes[..., code] >> bit) & 1
            words |= value.astype(jnp.uint32) << position
    code_bytes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(rows, columns, -1)

    base, exponents = _fold_scales(packed, sf, layout)
    exponents = _permute(exponents, *_exponent_axes(rows, columns)).reshape(rows, columns, -1)
    if layout == "sm90_fp8":
        exponents = quantize.pack_e2m1(exponents)  # two codes of 4 bits a byte, the first one low
    return jnp.concatenate([code_bytes, exponents], axis=-1), base


def _unpack_matrix(chunks, base, layout):
    """The inverse of `_pack_matrix`."""
    rows, columns, _ = chunks.shape
    code_bytes, exponents = jnp.split(chunks, [GPU_CHUNK * GPU_CHUNK // 2], axis=-1)

    words = jax.lax.bitcast_convert_type(code_bytes.reshape(rows, columns, -1, 4), jnp.uint32)
    codes = []
    for positions in word_bits(layout):
        bits = [((words >> position) & 1) << bit for bit, position in enumerate(positions)]
        codes.append(functools.reduce(jnp.bitwise_or, bits).astype(jnp.uint8))
    ordered = _permute_back(jnp.stack(codes, axis=-1), *_code_axes(layout, rows, columns))
    packed = quantize.pack_e2m1(ordered.reshape(rows * GPU_CHUNK, columns * GPU_CHUNK))

    if layout == "sm90_fp8":
        exponents = quantize.unpack_e2m1(exponents)
    exponents = _permute_back(exponents, *_exponent_axes(rows, columns))
    return packed, _unfold_scales(base, exponents.reshape(rows * GPU_CHUNK, -1), layout)


def _canonical_to_gpu(layout: str, w: ExpertWeights) -> ExpertWeights:
    def convert(expert):  # one at a time: a code takes a word on its way
        w13, w13_sf, w2, w2_sf = expert
        w13, w13_sf = interleave_gate_up(w13[None])[0], interleave_gate_up(w13_sf[None])[0]
        return *_pack_matrix(w13, w13_sf, layout), *_pack_matrix(w2, w2_sf, layout)

    w13, w13_sf, w2, w2_sf = jax.lax.map(convert, (w.w13, w.w13_sf, w.w2, w.w2_sf))
    biases = _ordered_biases(w, interleave_gate_up)
    return ExpertWeights(w13, w13_sf, w2, w2_sf, layout, **biases)


def _gpu_to_canonical(layout: str, w: ExpertWeights) -> ExpertWeights:
    def convert(expert):
        w13, w13_sf, w2, w2_sf = expert
        w13, w13_sf = (
            deinterleave_gate_up(rows[None])[0] for rows in _unpack_matrix(w13, w13_sf, layout)
        )
        return w13, w13_sf, *_unpack_matrix(w2, w2_sf, layout)

    w13, w13_sf, w2, w2_sf = jax.lax.map(convert, (w.w13, w.w13_sf, w.w2, w.w2_sf))
    biases = _ordered_biases(w, deinterleave_gate_up)
    return ExpertWeights(w13, w13_sf, w2, w2_sf, "canonical", **biases)


def _gpu_layout(layout: str):
    return functools.partial(_canonical_to_gpu, layout), functools.partial(
        _gpu_to_canonical, layout
    )


# layout -> (from canonical, to canonical). A back end adds one row here and its shapes below.
_LAYOUTS = {
    "canonical": (lambda w: w, lambda w: w),
    "cpu": (_canonical_to_cpu, _cpu_to_canonical),
    "sm90_fp8": _gpu_layout("sm90_fp8"),
    "sm90_bf16": _gpu_layout("sm90_bf16"),
}
LAYOUTS = tuple(_LAYOUTS)


def to_layout(weights: ExpertWeights, layout: str) -> ExpertWeights:
    """`weights` in another layout; exact, jit-able, any layout to any.

    "sm90_fp8" and "sm90_bf16" have no place for the scale of a group of zeros: coming back, its
    byte is 1.

    Raises:
      MegaMoEError: an unknown layout, arrays that do not belong together, widths that are not whole
        chunks of a GPU layout, or weights that `check_foldable` refuses. Under tracing their values
        cannot be looked at: the rows in question come out as NaN.
    """
    check(
        isinstance(layout, str) and layout in _LAYOUTS,
        "layout",
        got=repr(layout),
        want=f"one of {LAYOUTS}",
        remedy="layouts belong to back ends; layer.shard(weights) picks the right one",
    )
    widths = _check_consistent(weights)
    for name, width in zip(("hidden", "intermediate"), widths, strict=True):
        check(
            layout not in MAX_SPREAD or width % GPU_CHUNK == 0,
            f"weights for layout {layout!r}",
            got=f"{name} = {width}",
            want=f"a multiple of {GPU_CHUNK}",
            remedy="layer.shard(weights) pads them with zeros before it converts them",
        )
    if weights.layout == layout:
        return weights
    check_foldable(weights, layout)
    return _convert(weights, layout)


@functools.partial(jax.jit, static_argnames="layout")
def _convert(weights: ExpertWeights, layout: str) -> ExpertWeights:
    return _LAYOUTS[layout][0](_LAYOUTS[weights.layout][1](weights))


def check_foldable(weights: ExpertWeights, layout: str, where: str = "") -> None:
    """Checks that the scales of `weights` can be written in `layout`, which only some limit.

    A GPU layout keeps one scale per row and, for each group of 32, how many binades below it the
    group is: at most `MAX_SPREAD`. The row's is at most the larger one of `BASES`. Groups of zeros
    do not count. Tracers are not looked at.

    Args:
      weights: concrete arrays of any layout, sharded or not.
      layout: where they are to go.
      where: for the message, what stands before the expert, such as ", layer 3".

    Raises:
      MegaMoEError: a NaN scale (byte 255), a row whose scales are too far apart, or one whose scale
        is too large; it names tensor, expert, row and what was found.
    """
    if layout not in MAX_SPREAD or any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(weights)
    ):
        return
    _check_spreads(weights, layout, MAX_SPREAD[layout], where)
    most = BASES[layout][1]
    if most == quantize.SF_MAX:
        return
    largest_scales = map(np.asarray, _scales_of_rows(weights)[0])
    for name, largest in zip(("w13", "w2"), largest_scales, strict=True):
        if (largest <= most).all():
            continue
        expert, row = map(int, np.unravel_index(np.argmax(largest), largest.shape))
        refuse(
            _name_row(name + where, expert, row, largest.shape[1]),
            got=f"a scale of 2^{int(largest[expert, row]) - 127} "
            f"({np.count_nonzero(largest > most)} of {largest.size} rows are too large)",
            want=f"at most 2^{most - 127} for layout {layout!r}",
            remedy="use activation_granularity=32, whose layout has no such limit",
        )


def check_finite_scales(weights: ExpertWeights, where: str = "") -> None:
    """Checks that no scale is a NaN, byte 255, which every layout but the GPU's could carry.

    Tracers are not looked at: under jit the rows in question come out as NaN.

    Args:
      weights: concrete arrays of any layout, sharded or not.
      where: see `check_foldable`.

    Raises:
      MegaMoEError: it names tensor, expert and row.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(weights)):
        return
    if bool(_has_nan_scales(weights.w13_sf, weights.w2_sf)):
        _check_spreads(weights, weights.layout, quantize.UE8M0_NAN - 1, where)


@jax.jit
def _has_nan_scales(*scales: jax.Array) -> jax.Array:
    return functools.reduce(jnp.logical_or, [jnp.any(sf == quantize.UE8M0_NAN) for sf in scales])


def _check_spreads(weights: ExpertWeights, layout: str, limit: int, where: str) -> None:
    _, spreads = _scales_of_rows(weights)
    remedy = "look at the source of these weights"
    if layout == "sm90_fp8":
        remedy = "use activation_granularity=32, whose layout has no such limit"
    for name, spread in zip(("w13", "w2"), map(np.asarray, spreads), strict=True):
        if (spread <= limit).all():
            continue
        expert, row = map(int, np.unravel_index(np.argmax(spread), spread.shape))
        operand = _name_row(name + where, expert, row, spread.shape[1])
        check(
            spread[expert, row] != quantize.UE8M0_NAN,
            operand,
            got=f"scale byte {quantize.UE8M0_NAN}, a NaN",
            want="finite scales",
            remedy="look at the source of these weights",
        )
        refuse(
            operand,
            got=f"groups of 32 whose scales are up to a factor of 2^{spread[expert, row]} apart "
            f"({np.count_nonzero(spread > limit)} of {spread.size} rows are too wide)",
            want=f"at most 2^{limit} within a row for layout {layout!r}",
            remedy=remedy,
        )


def _name_row(name: str, expert: int, row: int, num_rows: int) -> str:
    half = num_rows // 2
    is_w13 = name.startswith("w13")
    kind = "row" if not is_w13 else "gate row" if row < half else "up row"
    return f"weights.{name}, expert {expert}, {kind} {row % half if is_w13 else row}"


@jax.jit
def _scales_of_rows(weights: ExpertWeights) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """(largest scale byte, binades between scales), each (w13 [E, 2I], w2 [E, H]) uint8.

    Groups of zeros do not count. The latter is 255 where a scale is NaN.
    """

    def scales(packed, sf):
        nonzero = _nonzero_groups(packed)
        largest = jnp.max(jnp.where(nonzero, sf, 0), axis=-1)
        smallest = jnp.min(jnp.where(nonzero, sf, 255), axis=-1)
        difference = jnp.where(jnp.any(nonzero, axis=-1), largest - smallest, 0)
        nan = jnp.any(sf == quantize.UE8M0_NAN, axis=-1)
        return largest, jnp.where(nan, jnp.uint8(quantize.UE8M0_NAN), difference)

    w = _LAYOUTS[weights.layout][1](weights)
    (largest13, spread13), (largest2, spread2) = scales(w.w13, w.w13_sf), scales(w.w2, w.w2_sf)
    return (largest13, largest2), (spread13, spread2)


def check_weights(
    weights: ExpertWeights,
    config: MegaMoEConfig,
    num_experts: int,
    where: str = "",
    *,
    stack: bool = False,
) -> None:
    """Checks type, layout, shapes and dtypes of `num_experts` experts against `config`.

    Canonical weights have the config's widths, or the padded ones; other layouts the padded ones.
    `stack` says that a stack of layers will do, too.
    """
    layers: tuple[int, ...] = ()
    if stack:
        _check_type(weights)
        layers = () if (num := _num_layers(weights)) is None else (num,)
    else:
        _check_single(weights)
    h, i = config.hidden, config.intermediate
    padded = (config.padded_hidden, config.padded_intermediate // 2)
    if weights.layout != "canonical" or getattr(weights.w2, "shape", ())[-2:] == padded:
        h, i = config.padded_hidden, config.padded_intermediate
    remedy = (
        f"config has num_experts = {config.num_experts}, hidden = {config.hidden} and intermediate "
        f"= {config.intermediate}: compare them with the weights"
    )
    if where:
        remedy += "; a rank holds num_experts / ranks experts, so shard them over the axis"
    if layers:
        remedy += f"; this is a stack, since w13 has an axis of {layers[0]} layers in front"
    cast = (
        "build weights with jax_megamoe.quantize_weights, ExpertWeights.from_arrays or "
        "jax_megamoe.checkpoints"
    )
    for name, shape in _shapes(weights.layout, num_experts, h, i).items():
        operand = f"weights.{name} ({weights.layout} layout)"
        shape = (*layers, *shape)
        check_array(getattr(weights, name), operand, shape, _BYTES, remedy, cast=cast, where=where)
    b13_shape, b2_shape = (*layers, num_experts, 2 * i), (*layers, num_experts, h)
    check_biases(weights.b13, weights.b2, b13_shape, b2_shape, where)


def _check_type(weights: object) -> None:
    remedy = "build them with jax_megamoe.quantize_weights and place them with layer.shard"
    fields = getattr(weights, "_fields", ())
    if "experts" in fields:
        remedy = "BlockWeights belong to the blocks.MoEBlock; the layer takes their experts"
    elif fields[:2] == ("w13", "w2"):
        remedy = "WideWeights belong to jax_megamoe.unfused; the layer takes FP4 weights"
    check(
        isinstance(weights, ExpertWeights),
        "weights",
        got=describe(weights),
        want="jax_megamoe.ExpertWeights",
        remedy=remedy,
    )
    known = isinstance(weights.layout, str) and weights.layout in LAYOUTS  # type: ignore[attr-defined]
    check(
        known,
        "weights.layout",
        got=repr(weights.layout),  # type: ignore[attr-defined]
        want=f"one of {LAYOUTS}",
        remedy="b13 and b2 are keywords of ExpertWeights; layouts belong to back ends, and "
        "layer.shard(weights) picks the right one",
    )


def _check_single(weights: object) -> None:
    """`_check_type`, and that these are no stack of layers."""
    _check_type(weights)
    num_layers = _num_layers(weights)
    check(
        num_layers is None,
        "weights",
        got=f"a stack of {num_layers} layers, with w13 {describe(getattr(weights, 'w13', None))}",
        want="the weights of one layer",
        remedy="jax.lax.scan over the stack hands on one layer at a time; jax.tree.map(lambda a: "
        "a[i], weights) is layer i",
    )


def _num_layers(weights: Any) -> int | None:
    """`ExpertWeights.num_layers`, before it is known that these are arrays."""
    return weights.num_layers if is_array(weights.w13) else None


def _num_axes(layout: str) -> int:
    """Axes of w13 in a layout."""
    return len(_shapes(layout, 0, 0, 0)["w13"])


def _shapes(layout: str, num_experts: int, h: int, i: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a layout for hidden h and intermediate i."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in {
        "w13": (2 * i, h // 2),
        "w13_sf": (2 * i, h // SF_GROUP),
        "w2": (h, i // 2),
        "w2_sf": (h, i // SF_GROUP),
    }.items():
        shapes[name] = (num_experts, rows, columns)
        if layout == "cpu":
            shapes[name] = (num_experts, rows // CPU_PANEL, columns, CPU_PANEL)
        elif layout in MAX_SPREAD:
            chunks = (rows // GPU_CHUNK, 2 * columns // GPU_CHUNK, gpu_chunk_bytes(layout))
            shapes[name] = (num_experts, *((rows,) if name.endswith("_sf") else chunks))
    return shapes


def _check_consistent(weights: ExpertWeights) -> tuple[int, int]:
    """Checks type, dtypes and that shapes agree with each other; returns (H, I)."""
    _check_single(weights)
    layout = weights.layout
    remedy = "these are the arrays of one set of weights; build them in one call"
    axes = {
        "canonical": ("E", "2I", "H/2"),
        "cpu": ("E", f"2I/{CPU_PANEL}", "H/2", CPU_PANEL),
    }
    free = axes.get(layout) or ("E", f"2I/{GPU_CHUNK}", f"H/{GPU_CHUNK}", gpu_chunk_bytes(layout))
    check_array(weights.w13, f"weights.w13 ({layout} layout)", free, _BYTES, remedy)
    num_experts, rows, columns = weights.w13.shape[:3]
    row, column = {"canonical": (1, 2), "cpu": (CPU_PANEL, 2)}.get(layout, (GPU_CHUNK, GPU_CHUNK))
    h, i = columns * column, rows * row // 2
    check(
        h % SF_GROUP == 0 and i % SF_GROUP == 0 and rows * row == 2 * i,
        f"weights.w13 ({layout} layout)",
        got=describe(weights.w13),
        want=f"hidden and intermediate that are multiples of {SF_GROUP}",
        remedy=f"scales cover {SF_GROUP} elements along K",
    )
    for name, shape in _shapes(layout, num_experts, h, i).items():
        check_array(
            getattr(weights, name), f"weights.{name} ({layout} layout)", shape, _BYTES, remedy
        )
    check_biases(weights.b13, weights.b2, (num_experts, 2 * i), (num_experts, h))
    return h, i


def check_biases(
    b13, b2, b13_shape: tuple[int, ...], b2_shape: tuple[int, ...], where: str = ""
) -> None:
    """Checks that there are both biases, FP32 and of these shapes, or neither."""
    check(
        (b13 is None) == (b2 is None),
        "weights.b13 and weights.b2",
        got=f"only {'b2' if b13 is None else 'b13'}",
        want="both or neither",
        remedy="pass zeros for the linear that has no bias",
    )
    if b13 is not None:
        remedy = "biases belong to the rows of w13 and w2; see jax_megamoe.ExpertWeights"
        check_array(b13, "weights.b13", b13_shape, ("float32",), remedy, where=where)
        check_array(b2, "weights.b2", b2_shape, ("float32",), remedy, where=where)
