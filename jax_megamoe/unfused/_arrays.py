"""Selections of rows, and the types of what shard_map maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["count_at_most", "in_fp32", "take_rows", "varying_like"]


def _varying_axes(x):
    return jax.typeof(x).manual_axis_type.varying


def varying_like(x, *others):
    """x, marked as varying over every mesh axis that one of `others` varies over.

    Under ``check_vma=True`` both branches of a cond must agree in type, and a constant varies over
    nothing. Under ``check_vma=False`` no value has axes and nothing happens.
    """
    axes = frozenset().union(*map(_varying_axes, others)) - _varying_axes(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def count_at_most(ends, positions):
    """[n] int32: how many of `ends` are at most each position; ends ascend.

    That is jnp.searchsorted(..., side="right"), which fails on an assertion where a shard_map is
    manual over some axes of a mesh only.
    """
    return jnp.sum(ends[None, :] <= positions[:, None], axis=1, dtype=jnp.int32)


def take_rows(rows, index, is_row):
    """``rows[index]`` where `is_row`, zero elsewhere; a select, since 0 * NaN would be NaN."""
    mask = is_row.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mask, rows[index], 0)


def in_fp32(array):
    """BF16 as FP32, so that the sum which this becomes in reverse mode is taken in FP32."""
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
