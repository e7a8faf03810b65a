"""Products of grouped rows with the matrices of their experts, three ways."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe.unfused._arrays import count_at_most, take_rows, varying_like
from jax_megamoe.unfused._transport import MOSAIC_ROWS, Pool

__all__ = ["GEMMS", "choose_block_rows", "grouped_product", "of_rows"]


GEMMS = ("blocked", "ragged_dot", "mosaic")


def grouped_product(
    rows: jax.Array, matrices: jax.Array, pool: Pool, *, gemm: str, block_rows: int
) -> jax.Array:
    """Each row times the transposed matrix of its expert, accumulated in FP32.

    Args:
      rows: [P, C] bfloat16, grouped by expert as `pool` says.
      matrices: [E/R, N, C] bfloat16.
      pool: what `dispatch` returned.
      gemm: one of `GEMMS`.
      block_rows: what `dispatch` was called with; for "mosaic", rows of the kernel's tile.

    Returns:
      [P, N] float32; zero in rows of no expert. "mosaic" rounds to BF16 on the way.
    """
    if gemm == "blocked":
        return _blocked(rows, matrices, pool.group_sizes, block_rows)
    if gemm == "ragged_dot":
        transposed = jnp.swapaxes(matrices, 1, 2)
        return lax.ragged_dot(
            rows, transposed, pool.group_sizes, preferred_element_type=jnp.float32
        )
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    tiles_n = matrices.shape[1] // 128
    out = ragged_dot_mgpu.ragged_dot(
        rows,
        matrices,
        group_sizes=pool.group_sizes,
        block_m=block_rows,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=next(n for n in (8, 4, 2, 1) if tiles_n % n == 0),
        transpose_rhs=True,
    )
    # The kernel leaves rows of no expert unwritten; they must not be read as they are.
    out = jnp.where(pool.is_row[:, None], out, 0)
    return varying_like(out, rows, matrices).astype(jnp.float32)


def _blocked(rows, matrices, group_sizes, block_rows):
    num_blocks = rows.shape[0] // block_rows
    end = jnp.cumsum(group_sizes)
    first_row = jnp.arange(num_blocks, dtype=jnp.int32) * block_rows
    expert = count_at_most(end, first_row)

    # Rematerialised: reverse mode would otherwise keep one expert's matrix for every block.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(operands):
        block_rows_, expert_ = operands

        def product(lhs):
            rhs = lax.dynamic_index_in_dim(matrices, expert_, keepdims=False)
            contract_last = (((1,), (1,)), ((), ()))
            return lax.dot_general(lhs, rhs, contract_last, preferred_element_type=jnp.float32)

        def nothing(lhs):
            zeros = jnp.zeros((lhs.shape[0], matrices.shape[1]), jnp.float32)
            return varying_like(zeros, lhs, matrices, expert_)

        return lax.cond(expert_ < matrices.shape[0], product, nothing, block_rows_)

    blocks = rows.reshape(num_blocks, block_rows, rows.shape[1])
    # Typed here, since lax.cond's branches are traced before the operands' types are reconciled.
    blocks = varying_like(blocks, matrices, expert)
    out = lax.map(block, (blocks, expert))
    return out.reshape(rows.shape[0], matrices.shape[1])


def of_rows(numbers: jax.Array, pool: Pool) -> jax.Array:
    """[E/R, N] numbers of experts -> [P, N], each row its expert's; zeros in rows of no expert."""
    row = jnp.arange(pool.is_row.shape[0], dtype=jnp.int32)
    end = jnp.cumsum(pool.group_sizes)
    expert = count_at_most(end, row)
    return take_rows(numbers, jnp.minimum(expert, numbers.shape[0] - 1), pool.is_row)


def choose_block_rows(gemm, tokens, config, num_ranks):
    """Rows of a block: about what an expert gets when tokens spread evenly, a power of two."""
    even = max(1, tokens * config.top_k * num_ranks // config.num_experts)
    power = 1 << (even - 1).bit_length()
    if gemm == "blocked":
        return min(max(power, 8), 128)
    return 64 if power <= 64 else MOSAIC_ROWS
