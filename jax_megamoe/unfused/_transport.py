"""Dispatch and combine: tokens to the ranks of their experts, and rows back, three ways."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.unfused._arrays import count_at_most, in_fp32, take_rows, varying_like

__all__ = ["MOSAIC_ROWS", "TRANSPORTS", "Pool", "combine", "dispatch"]


TRANSPORTS = ("all_to_all", "all_gather", "ragged_all_to_all")


# Rows of the Mosaic kernel's largest tile. Pools are whole tiles, so that no tile sticks out.
MOSAIC_ROWS = 128


class Pool(NamedTuple):
    """The rows one rank received, grouped by local expert, and the way back.

    Attributes (P pool rows, N = R * T * K slots of all ranks):
      rows: what was dispatched, [P, ...] each: a pair (codes, sf), or BF16 values.
      topk_weights: [P] float32, 0 in padding rows.
      is_row: [P] bool, False in padding rows.
      group_sizes: [E/R] int32, rows of each local expert, padding of its last block included.
      position: [N] int32, pool row of each received entry; P if the entry is not ours.
      way_back: [T * K] int32 and, for the ragged transport, [R, R] int32. Where the rows of this
        rank's own slots come back: see `combine`.
    """

    rows: Any
    topk_weights: jax.Array
    is_row: jax.Array
    group_sizes: jax.Array
    position: jax.Array
    way_back: tuple[jax.Array, ...]


def _pool(received, row_of_entry, expert, topk_weights, local_experts, block_rows):
    """Groups N received entries by local expert; experts start at multiples of block_rows (2^n).

    Args:
      received: rows as they arrived, [M, ...] each.
      row_of_entry: [N] int32 into `received`.
      expert: [N] int32 local expert; E/R for an entry that is not ours.
      topk_weights: [N] float32.
    """
    entries = expert.shape[0]
    multiple = max(block_rows, MOSAIC_ROWS)
    size = -(-(entries + local_experts * (block_rows - 1)) // multiple) * multiple
    count = jnp.zeros(local_experts + 1, jnp.int32).at[expert].add(1)
    padded = -(-count // block_rows) * block_rows
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sorted_expert = expert[order]
    shift = (jnp.cumsum(padded) - padded) - (jnp.cumsum(count) - count)
    sorted_position = jnp.arange(entries, dtype=jnp.int32) + shift[sorted_expert]
    sorted_position = jnp.where(sorted_expert < local_experts, sorted_position, size)
    position = jnp.zeros(entries, jnp.int32).at[order].set(sorted_position)
    entry = jnp.full(size, entries, jnp.int32).at[sorted_position].set(order, mode="drop")
    is_row = entry < entries
    entry = jnp.minimum(entry, entries - 1)
    index = row_of_entry[entry]

    def take(array):  # several entries may read one row, hence in_fp32
        return take_rows(in_fp32(array), index, is_row).astype(array.dtype)

    return Pool(
        rows=jax.tree.map(take, received),
        topk_weights=jnp.where(is_row, topk_weights[entry], 0),
        is_row=is_row,
        group_sizes=padded[:local_experts],
        position=position,
        way_back=(),
    )


@jax.named_scope("dispatch")
def dispatch(
    rows: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    config: MegaMoEConfig,
    *,
    axis: str | tuple[str, ...],
    transport: str = "all_to_all",
    num_tokens: jax.Array | None = None,
    block_rows: int = 1,
) -> Pool:
    """Exchanges tokens over the expert-parallel axis and groups them by local expert.

    Args:
      rows: a pair (codes [T, H] uint8, sf [T, H/32] uint8), or values [T, H] bfloat16.
      topk_idx: [T, K] int32 or int64; a slot with an id outside [0, E) goes nowhere.
      topk_weights: [T, K] float32.
      config: shapes.
      axis: mesh axis, or axes, of expert parallelism.
      transport: one of `TRANSPORTS`.
      num_tokens: scalar int32 or None: tokens at or beyond it go nowhere.
      block_rows: experts start at multiples of it in the pool.

    Returns:
      `Pool`. Its number of rows is the worst case: R * T * K and the padding.
    """
    num_ranks, rank = lax.axis_size(axis), lax.axis_index(axis)
    tokens, top_k = topk_idx.shape
    slots, local_experts = tokens * top_k, config.local_experts(num_ranks)
    routed = (topk_idx >= 0) & (topk_idx < config.num_experts)
    if num_tokens is not None:
        routed &= jnp.arange(tokens)[:, None] < num_tokens
    # Masked before the cast: int64 ids must not wrap around into the valid range.
    expert = jnp.where(routed, topk_idx, config.num_experts).astype(jnp.int32).reshape(slots)
    weights = topk_weights.reshape(slots)
    pool = functools.partial(_pool, local_experts=local_experts, block_rows=block_rows)

    if transport == "ragged_all_to_all":
        # Slots sorted by expert are sorted by owner too, since owners hold ranges of experts.
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        count = jnp.zeros(config.num_experts + 1, jnp.int32).at[expert].add(1)[:-1]
        counts = lax.all_gather(count, axis).reshape(num_ranks, num_ranks, local_experts)
        sizes = jnp.sum(counts, axis=2, dtype=jnp.int32)  # [source, owner]

        def exchange(array):
            return _ragged_all_to_all(array, num_ranks * slots, sizes, axis)

        received = jax.tree.map(lambda a: exchange(a[order // top_k]), rows)
        # What arrived lies by (source, local expert): the counts say what each entry is.
        end = jnp.cumsum(counts[:, rank].reshape(-1))
        entry = jnp.arange(num_ranks * slots, dtype=jnp.int32)
        run = count_at_most(end, entry)
        local = jnp.where(run < end.shape[0], run % local_experts, local_experts)
        arrival = jnp.zeros(slots, jnp.int32).at[order].set(jnp.arange(slots, dtype=jnp.int32))
        arrival = jnp.where(expert < config.num_experts, arrival, slots)
        result = pool(received, entry, local, exchange(weights[order]))
        return result._replace(way_back=(arrival, sizes))

    owner = expert // local_experts  # R for a slot that goes nowhere
    if transport == "all_to_all":
        goes = jnp.any(owner.reshape(1, tokens, top_k) == jnp.arange(num_ranks)[:, None, None], 2)

        def send(array):
            copies = jnp.where(goes[..., None], in_fp32(array)[None], 0).astype(array.dtype)
            return lax.all_to_all(copies, axis, 0, 0)

    else:
        send = functools.partial(lax.all_gather, axis_name=axis)
    received = jax.tree.map(lambda a: send(a).reshape(-1, *a.shape[1:]), rows)
    local = lax.all_gather(expert, axis).reshape(-1) - rank * local_experts
    local = jnp.where((local >= 0) & (local < local_experts), local, local_experts)
    entry = jnp.arange(num_ranks * slots, dtype=jnp.int32)
    result = pool(received, entry // top_k, local, lax.all_gather(weights, axis).reshape(-1))
    return result._replace(way_back=(owner,))


def _ragged_all_to_all(rows, num_rows, sizes, axis, *, back=False):
    """Sends the chunks of `rows` [.., C] to their ranks; they arrive ordered by sender.

    sizes [source, owner] holds the rows that go from source to owner; ``back`` reverses them.
    """
    rank = lax.axis_index(axis)
    if back:
        sizes = sizes.T
    before = jnp.cumsum(sizes, axis=1) - sizes  # [sender, receiver]: offset at the sender
    after = jnp.cumsum(sizes, axis=0) - sizes  # [sender, receiver]: offset at the receiver
    output = varying_like(jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype), rows, sizes)
    return lax.ragged_all_to_all(
        rows, output, before[rank], sizes[rank], after[rank], sizes[:, rank], axis_name=axis
    )


@jax.named_scope("combine")
def combine(
    rows: jax.Array,
    pool: Pool,
    config: MegaMoEConfig,
    *,
    axis: str | tuple[str, ...],
    transport: str = "all_to_all",
) -> jax.Array:
    """Returns rows to the ranks they came from and sums them in slot order.

    Args:
      rows: [P, H] bfloat16, what `linear2` returned.
      pool, config, axis, transport: as in `dispatch`.

    Returns:
      [T, H] bfloat16; exact zeros for a token without a routed slot.
    """
    num_ranks, hidden = lax.axis_size(axis), rows.shape[1]
    is_entry = pool.position < rows.shape[0]
    entry_rows = take_rows(rows, jnp.minimum(pool.position, rows.shape[0] - 1), is_entry)
    if transport == "ragged_all_to_all":
        arrival, sizes = pool.way_back
        slots = arrival.shape[0]
        returned = _ragged_all_to_all(entry_rows, slots, sizes, axis, back=True)
        is_slot = arrival < slots
        slot_rows = take_rows(returned, jnp.minimum(arrival, slots - 1), is_slot)
    else:
        (owner,) = pool.way_back
        slots = owner.shape[0]
        # The other ranks sent zeros for a slot they do not own: pick the owner's row, add nothing.
        returned = lax.all_to_all(entry_rows.reshape(num_ranks, slots, hidden), axis, 0, 0)
        is_slot = owner < num_ranks
        source = jnp.minimum(owner, num_ranks - 1) * slots + jnp.arange(slots, dtype=jnp.int32)
        slot_rows = take_rows(returned.reshape(num_ranks * slots, hidden), source, is_slot)
    slot_rows = slot_rows.reshape(slots // config.top_k, config.top_k, hidden)
    total = jnp.zeros((slots // config.top_k, hidden), jnp.float32)
    for k in range(config.top_k):  # unrolled: the order of the additions is part of the contract
        total += slot_rows[:, k].astype(jnp.float32)
    return total.astype(jnp.bfloat16)
