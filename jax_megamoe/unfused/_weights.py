"""FP4 weights as BF16 ones, in values or in units of their rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_megamoe import quantize
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import check_array
from jax_megamoe.padding import crop_weights
from jax_megamoe.weights import (
    ExpertWeights,
    check_biases,
    check_weights,
    dequantize_stacked,
    to_layout,
)

__all__ = ["WideWeights", "check_either_weights", "wide_weights", "widen_weights"]


class WideWeights(NamedTuple):
    """BF16 expert weights: w13 [E, 2I, H], gate rows first, and w2 [E, H, I].

    FP32 biases b13 [E, 2I] and b2 [E, H], or None for both. FP32 units of the rows of w13 and w2,
    unit13 [E, 2I] and unit2 [E, H], which their sums are multiplied by, or None for ones.
    """

    w13: jax.Array
    w2: jax.Array
    b13: jax.Array | None = None
    b2: jax.Array | None = None
    unit13: jax.Array | None = None
    unit2: jax.Array | None = None


def widen_weights(weights: ExpertWeights) -> WideWeights:
    """FP4 weights of any layout as BF16 ones, for `local` and `mega_moe`.

    4 * 2^126 and 6 * 2^127, which no finite weights of this library have, become infinite.
    """
    weights = to_layout(weights, "canonical")
    return WideWeights(*dequantize_stacked(weights, jnp.bfloat16), weights.b13, weights.b2)


def check_either_weights(weights, config: MegaMoEConfig, num_experts: int, where: str = "") -> None:
    if not isinstance(weights, WideWeights):
        check_weights(weights, config, num_experts, where)
        return
    hidden, intermediate = config.hidden, config.intermediate
    remedy = "build them with jax_megamoe.unfused.widen_weights"
    shape = (num_experts, 2 * intermediate, hidden)
    check_array(weights.w13, "weights.w13", shape, ("bfloat16",), remedy, where=where)
    shape = (num_experts, hidden, intermediate)
    check_array(weights.w2, "weights.w2", shape, ("bfloat16",), remedy, where=where)
    shapes = (num_experts, 2 * intermediate), (num_experts, hidden)
    check_biases(weights.b13, weights.b2, *shapes, where)
    remedy = "leave out what widen_weights leaves out"
    for name, unit, rows in zip(("unit13", "unit2"), weights[4:], shapes, strict=True):
        if unit is not None:
            check_array(unit, f"weights.{name}", rows, ("float32",), remedy, where=where)


def wide_weights(
    weights: ExpertWeights | WideWeights, config, num_experts: int, where: str
) -> WideWeights:
    check_either_weights(weights, config, num_experts, where)
    if isinstance(weights, WideWeights):
        return weights
    return _in_units(crop_weights(weights, config))


def _in_units(weights: ExpertWeights) -> WideWeights:
    """`widen_weights`, with all weights finite: in units of their rows."""
    w = to_layout(weights, "canonical")
    w13, unit13 = quantize.widen_e2m1(quantize.unpack_e2m1(w.w13), w.w13_sf, jnp.bfloat16)
    w2, unit2 = quantize.widen_e2m1(quantize.unpack_e2m1(w.w2), w.w2_sf, jnp.bfloat16)
    return WideWeights(w13, w2, w.b13, w.b2, unit13, unit2)
