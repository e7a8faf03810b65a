"""Widths that are not whole tiles: zeros up to the next multiple of 128, and back.

Back ends compute with `MegaMoEConfig.padded_hidden` and `padded_intermediate`. Zero codes add
nothing to a sum and never decide a scale, so padding changes no bit of a result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_megamoe import quantize
from jax_megamoe.config import SF_GROUP, MegaMoEConfig
from jax_megamoe.weights import ExpertWeights, to_layout

__all__ = ["crop_weights", "pad_tokens", "pad_weights"]


def pad_weights(weights: ExpertWeights, config: MegaMoEConfig) -> ExpertWeights:
    """Canonical weights of the padded widths: zero codes, with the scale byte of a block of zeros.

    Biases of rows that are added are zeros, too.

    Args:
      weights: E experts, canonical layout, of the config's widths or padded already; or of a back
        end's layout, which is always padded.
      config: widths.

    Returns:
      `ExpertWeights` with H, I replaced by config.padded_hidden, config.padded_intermediate.
    """
    if weights.layout != "canonical":
        return weights
    columns = config.padded_hidden - 2 * weights.w13.shape[2]
    rows = config.padded_intermediate - weights.w13.shape[1] // 2
    if rows == 0 and columns == 0:
        return weights

    def pad(array, rows, columns, value):
        return jnp.pad(array, ((0, 0), (0, rows), (0, columns)), constant_values=value)

    def pad13(array, columns, value):  # Gate rows and up rows end at different places.
        gate, up = jnp.split(array, 2, axis=1)
        return jnp.concatenate([pad(half, rows, columns, value) for half in (gate, up)], axis=1)

    biases = {}
    if weights.b13 is not None and weights.b2 is not None:
        biases["b13"] = pad13(weights.b13[..., None], 0, 0)[..., 0]
        biases["b2"] = pad(weights.b2[..., None], columns, 0, 0)[..., 0]
    return ExpertWeights(
        w13=pad13(weights.w13, columns // 2, 0),
        w13_sf=pad13(weights.w13_sf, columns // SF_GROUP, quantize.SF_MIN),
        w2=pad(weights.w2, columns, rows // 2, 0),
        w2_sf=pad(weights.w2_sf, columns, rows // SF_GROUP, quantize.SF_MIN),
        **biases,
    )


def crop_weights(weights: ExpertWeights, config: MegaMoEConfig) -> ExpertWeights:
    """Canonical weights of the config's own widths, from any layout, padded or not."""
    weights = to_layout(weights, "canonical")
    hidden, intermediate = config.hidden, config.intermediate

    def crop13(array, columns):
        gate, up = jnp.split(array, 2, axis=1)
        halves = [half[:, :intermediate, :columns] for half in (gate, up)]
        return jnp.concatenate(halves, axis=1)

    if weights.w13.shape[1:] == (2 * intermediate, hidden // 2):
        return weights
    biases = {}
    if weights.b13 is not None and weights.b2 is not None:
        biases["b13"] = crop13(weights.b13[..., None], 1)[..., 0]
        biases["b2"] = weights.b2[:, :hidden]
    return ExpertWeights(
        w13=crop13(weights.w13, hidden // 2),
        w13_sf=crop13(weights.w13_sf, hidden // SF_GROUP),
        w2=weights.w2[:, :hidden, : intermediate // 2],
        w2_sf=weights.w2_sf[:, :hidden, : intermediate // SF_GROUP],
        **biases,
    )


def pad_tokens(
    x: jax.Array | tuple[jax.Array, jax.Array], config: MegaMoEConfig
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x [T, H] bfloat16, or a pair of codes [T, H] and sf [T, H/32] uint8, with H padded."""
    columns = config.padded_hidden - config.hidden
    if columns == 0:
        return x
    if not isinstance(x, tuple):
        return jnp.pad(x, ((0, 0), (0, columns)))
    codes, sf = x
    # A row's last scale again, since scales are equal within a group; of zeros, any scale is right.
    sf = jnp.pad(sf, ((0, 0), (0, columns // SF_GROUP)), mode="edge")
    return jnp.pad(codes, ((0, 0), (0, columns))), sf
