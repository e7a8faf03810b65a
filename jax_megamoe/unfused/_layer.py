"""The layer: its stages in order, on one rank and over a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import quantize, reference
from jax_megamoe.config import SF_GROUP, Activation, MegaMoEConfig
from jax_megamoe.errors import Array, check, check_array, describe, is_array, narrow_ids
from jax_megamoe.operands import (
    PER_RANK,
    Operand,
    Tokens,
    as_operand,
    axis_size,
    check_config,
    check_first_axis,
    check_slots,
    check_tokens,
    flatten_leading,
)
from jax_megamoe.unfused._arrays import varying_like
from jax_megamoe.unfused._choice import choose
from jax_megamoe.unfused._products import choose_block_rows, grouped_product, of_rows
from jax_megamoe.unfused._transport import Pool, combine, dispatch
from jax_megamoe.unfused._weights import (
    WideWeights,
    check_either_weights,
    wide_weights,
)
from jax_megamoe.weights import ExpertWeights

__all__ = ["linear1", "linear2", "local", "mega_moe", "swiglu"]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_to_e4m3(x, group):
    """BF16 values of x after quantisation; the derivative is that of the identity."""
    return quantize.dequantize_e4m3(*quantize.quantize_e4m3(x, group), jnp.bfloat16)


@_round_to_e4m3.defjvp
def _round_to_e4m3_jvp(group, primals, tangents):
    # Straight-through: the true derivative of a rounding is zero almost everywhere.
    return _round_to_e4m3(*primals, group), tangents[0].astype(jnp.bfloat16)


def _values(rows):
    """(BF16 values, units or None) of dispatched rows, which are codes unless x has a gradient."""
    return quantize.widen_e4m3(*rows, jnp.bfloat16) if isinstance(rows, tuple) else (rows, None)


@jax.named_scope("linear1")
def linear1(
    pool: Pool,
    w13: jax.Array,
    b13: jax.Array | None = None,
    unit13: jax.Array | None = None,
    *,
    gemm: str,
    block_rows: int,
) -> jax.Array:
    """Gate and up projections.

    Args:
      pool: what `dispatch` returned.
      w13: [E/R, 2I, H] bfloat16, gate rows first.
      b13: [E/R, 2I] float32 or None.
      unit13: [E/R, 2I] float32 or None, see `WideWeights`.
      gemm, block_rows: see `grouped_product`.

    Returns:
      [P, 2I] float32, gate channels first.
    """
    rows, units = _values(pool.rows)
    sums = grouped_product(rows, w13, pool, gemm=gemm, block_rows=block_rows)
    if unit13 is not None:
        sums *= of_rows(unit13, pool)
    if units is not None:
        sums *= units[:, None]
    return sums if b13 is None else sums + of_rows(b13, pool)


@jax.named_scope("swiglu")
def swiglu(
    gate_up: jax.Array, topk_weights: jax.Array, activation: Activation, group: int = SF_GROUP
) -> jax.Array:
    """SwiGLU times routing weight in FP32, rounded to E4M3 with one scale per `group` channels.

    Args:
      gate_up: [P, 2I] float32.
      topk_weights: [P] float32.
      activation: see `config.Activation`.
      group: 32 or 128 (`MegaMoEConfig.act_group`).

    Returns:
      [P, I] bfloat16, the values of the codes.
    """
    return _round_to_e4m3(reference.activate(gate_up, topk_weights, activation), group)


@jax.named_scope("linear2")
def linear2(
    acts: jax.Array,
    pool: Pool,
    w2: jax.Array,
    b2: jax.Array | None = None,
    unit2: jax.Array | None = None,
    *,
    gemm: str,
    block_rows: int,
) -> jax.Array:
    """Down projection, with routing weight times bias added before the rounding to BF16.

    Args:
      acts: [P, I] bfloat16, what `swiglu` returned.
      pool: what `dispatch` returned.
      w2: [E/R, H, I] bfloat16.
      b2: [E/R, H] float32 or None.
      unit2: [E/R, H] float32 or None, see `WideWeights`.
      gemm, block_rows: see `grouped_product`.

    Returns:
      [P, H] bfloat16.
    """
    rows = grouped_product(acts, w2, pool, gemm=gemm, block_rows=block_rows)
    if unit2 is not None:
        rows *= of_rows(unit2, pool)
    if b2 is not None:
        rows += pool.topk_weights[:, None] * of_rows(b2, pool)
    return rows.astype(jnp.bfloat16)


def local(
    x: jax.Array | tuple[jax.Array, jax.Array],
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    weights: ExpertWeights | WideWeights,
    config: MegaMoEConfig,
    *,
    axis: str | tuple[str, ...],
    num_tokens: int | jax.Array | None = None,
    transport: str = "auto",
    gemm: str = "auto",
    differentiable: bool = False,
) -> jax.Array:
    """The layer on one device, to be called inside `jax.shard_map` over the expert-parallel axis.

    Every rank has to call it with the same T, config, transport and gemm.

    Args:
      x: [..., H] bfloat16, T tokens in row-major order; or a pair (codes [..., H] uint8 or
        float8_e4m3fn, sf [..., H/32] uint8 or float8_e8m0fnu).
      topk_idx: [..., K] int32 or int64. A slot with an id outside [0, E), such as -1, is dropped.
      topk_weights: [..., K] float32, bfloat16 or float16; converted to float32.
      weights: this rank's E/R experts: `WideWeights`, or FP4 weights in any layout.
      config: shapes and activation.
      axis: mesh axis, or axes, of expert parallelism; of size R.
      num_tokens: scalar (or [1]) integer or None: tokens at or beyond it are ignored, their rows of
        the result are zero.
      transport: "auto" or one of `TRANSPORTS`.
      gemm: "auto" or one of `GEMMS`.
      differentiable: if True, reverse-mode derivatives with respect to x (bfloat16), topk_weights
        and biases exist, with every quantisation treated as the identity. Values do not change,
        but tokens travel as BF16, twice the bytes.

    Returns:
      [..., H] bfloat16, shaped like x.

    Raises:
      MegaMoEError: shapes or dtypes that do not agree, or a transport or gemm that cannot run here.
    """
    check_config(config)
    num_ranks = axis_size(axis, "unfused.local")
    wide = wide_weights(weights, config, config.local_experts(num_ranks), PER_RANK)
    transport, gemm = choose(transport, gemm, differentiable, config)
    x, topk_idx, topk_weights = map(as_operand, (x, topk_idx, topk_weights))
    leading = check_tokens(x, config, PER_RANK)
    check_slots(topk_idx, topk_weights, leading, config, PER_RANK)
    if num_tokens is not None:
        given: Any = num_tokens
        integer = isinstance(given, int) and not isinstance(given, bool)
        integer = integer or (
            is_array(given) and given.size == 1 and jnp.issubdtype(given.dtype, jnp.integer)
        )
        check(
            integer,
            "num_tokens",
            got=describe(num_tokens),
            want="an integer scalar on each rank",
            remedy="pass this rank's number of tokens",
        )
        num_tokens = jnp.asarray(narrow_ids(num_tokens)).reshape(())
    topk_idx = narrow_ids(topk_idx)
    x, topk_idx, topk_weights = jax.tree.map(flatten_leading, (x, topk_idx, topk_weights))
    straight_through = differentiable and not isinstance(x, tuple)
    if not straight_through:
        rows = reference.stage_input(x, config.x_group)
    tokens = topk_idx.shape[0]
    if tokens == 0:  # T is the same on every rank, so no rank waits for another
        operands = jax.tree.leaves((x, topk_weights, wide))
        return varying_like(jnp.zeros((*leading, config.hidden), jnp.bfloat16), *operands)
    if straight_through:
        rows = _round_to_e4m3(x, config.x_group)

    tile = choose_block_rows(gemm, tokens, config, num_ranks)
    topk_weights = topk_weights.astype(jnp.float32)
    pool = dispatch(
        rows,
        topk_idx,
        topk_weights,
        config,
        axis=axis,
        transport=transport,
        num_tokens=num_tokens,
        block_rows=tile if gemm == "blocked" else 1,
    )
    gate_up = linear1(pool, wide.w13, wide.b13, wide.unit13, gemm=gemm, block_rows=tile)
    acts = swiglu(gate_up, pool.topk_weights, config.activation, config.act_group)
    returned = linear2(acts, pool, wide.w2, wide.b2, wide.unit2, gemm=gemm, block_rows=tile)
    y = combine(returned, pool, config, axis=axis, transport=transport)
    return y.reshape(*leading, config.hidden)


def mega_moe(
    x: Tokens,
    topk_idx: Operand,
    topk_weights: Operand,
    weights: ExpertWeights | WideWeights,
    config: MegaMoEConfig,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    num_tokens: Array | None = None,
    *,
    transport: str = "auto",
    gemm: str = "auto",
    differentiable: bool = False,
    check_vma: bool = True,
) -> jax.Array:
    """`local` wrapped in `jax.shard_map`, for global arrays sharded over `axis`.

    Mesh axes other than `axis` hold copies. To shard tokens over them too, call `local` in a
    `jax.shard_map` of your own.

    Args:
      x: [..., H] bfloat16, or a pair (see `local`); its first axis is a multiple of R.
      topk_idx: [..., K] int32 or int64.
      topk_weights: [..., K] float32, bfloat16 or float16.
      weights: all E experts: `WideWeights`, or FP4 weights in any layout.
      config: shapes and activation.
      mesh: the device mesh.
      axis: its axis, or axes, of expert parallelism.
      num_tokens: [R] int32 or None.
      transport, gemm, differentiable: see `local`.
      check_vma: passed to `jax.shard_map`.

    Returns:
      [..., H] bfloat16, shaped like x, its first axis sharded over `axis`.

    Raises:
      MegaMoEError: see `local`.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    check(
        isinstance(mesh, Mesh) and set(axes) <= set(mesh.axis_names),
        "mesh and axis",
        got=f"{describe(mesh)} and {axis!r}",
        want="a jax.sharding.Mesh and an axis, or axes, of it",
        remedy="build the mesh with jax.make_mesh",
    )
    tokens, topk_idx, topk_weights = map(as_operand, (x, topk_idx, topk_weights))
    ranks = math.prod(mesh.shape[name] for name in axes)
    leading = check_tokens(tokens, config)
    check_first_axis(tokens, leading, ranks, config)
    check_slots(topk_idx, topk_weights, leading, config)
    if num_tokens is not None:
        dtypes = ("int32", "int64")
        check_array(num_tokens, "num_tokens", (ranks,), dtypes, "one number for each rank")
    check_either_weights(weights, config, config.num_experts)
    if isinstance(tokens, tuple):  # within shard_map values cannot be looked at
        quantize.check_group_scales(tokens[1], config.x_group, "x[1]")
    topk_idx, num_tokens = narrow_ids(topk_idx), narrow_ids(num_tokens)
    operands = (tokens, topk_idx, topk_weights, weights, num_tokens)
    if AxisType.Explicit in mesh.axis_types:
        # Explicit axes make shard_map insist on operands that are sharded as in_specs says.
        operands = jax.reshard(operands, NamedSharding(mesh, PartitionSpec(axis)))
    choose(transport, gemm, differentiable, config)  # refuses what the cache could not look up
    options = dict(transport=transport, gemm=gemm, differentiable=differentiable)
    return _global_call(config, mesh, axis, check_vma, **options)(*operands)


@functools.lru_cache(maxsize=128)  # bounded: it keeps compiled programs alive
def _global_call(config, mesh, axis, check_vma, **options):
    """Compiled once, also for calls outside of jit, where JAX would compile each operation."""

    def body(x, topk_idx, topk_weights, weights, num_tokens):
        operands = (x, topk_idx, topk_weights, weights, config)
        return local(*operands, axis=axis, num_tokens=num_tokens, **options)

    spec = PartitionSpec(axis)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )
