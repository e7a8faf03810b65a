"""The layer as plain JAX writes it today: five stages, each one or more XLA operations.

Two uses: the baseline that the fused layer is measured against, and the path gradients take. The
stages and their roundings are those of `reference`: quantise x to E4M3, exchange tokens, grouped
product, SwiGLU times routing weight to E4M3, grouped product to BF16, exchange back, FP32 sum in
slot order. What differs is where buffers are padded and who communicates how:

* transport ``"all_to_all"``: `lax.all_to_all` of buffers padded to the worst case, in which every
  token goes to every rank. Works on every platform and never drops a row.
* transport ``"all_gather"``: the same with `lax.all_gather` on the way out. As many bytes, since in
  the worst case a rank gets the whole of x, but no send buffer to fill.
* transport ``"ragged_all_to_all"``: exact sizes. GPU only, XLA:CPU does not implement it.

* gemm ``"blocked"``: every expert's rows padded to blocks, a loop over blocks, unused blocks
  skipped. Work grows with the rows received; portable; differentiable.
* gemm ``"ragged_dot"``: `lax.ragged_dot`. Differentiable. XLA may lower it to a dense product with
  every expert.
* gemm ``"mosaic"``: the Hopper kernel that ships with JAX in ``pallas.ops.gpu``. It returns the
  dtype of its operands, so gate and up take one more rounding to BF16 than the contract has. It
  walks the padding of the receive buffer, not only the rows.

Products take BF16 operands. `widen_weights` makes BF16 weights once, which is what the baseline is
measured with: four times the memory of FP4, but nothing is widened inside the step. FP4 weights are
accepted as well and widened in every call (gradients do that). E4M3 activations and E2M1 weights
are exact in BF16: four significant bits at most, except where the scale drives a value below 2^-126
(it may be flushed to zero) or, in `WideWeights` made by `widen_weights`, above BF16's range (it
becomes an infinity), which no finite weight quantised by this library does. FP4 weights, and x that
is passed quantised, are widened in units that keep all of them finite.

Names: R ranks, E experts, K = top_k, T tokens per rank, H hidden, I intermediate, P rows of a pool.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import quantize, reference
from jax_megamoe.config import BLOCK_N, SF_GROUP, Activation, MegaMoEConfig
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
from jax_megamoe.padding import crop_weights
from jax_megamoe.weights import (
    ExpertWeights,
    check_biases,
    check_weights,
    dequantize_stacked,
    to_layout,
)

__all__ = [
    "GEMMS",
    "TRANSPORTS",
    "Pool",
    "WideWeights",
    "choose",
    "combine",
    "dispatch",
    "grouped_product",
    "linear1",
    "linear2",
    "local",
    "mega_moe",
    "swiglu",
    "widen_weights",
]

TRANSPORTS = ("all_to_all", "all_gather", "ragged_all_to_all")
GEMMS = ("blocked", "ragged_dot", "mosaic")

# Rows of the Mosaic kernel's largest tile. Pools are whole tiles, so that no tile sticks out.
_MOSAIC_ROWS = 128

_FLOATS = ("float32", "bfloat16", "float16")


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


def _check_weights(weights, config: MegaMoEConfig, num_experts: int, where: str = "") -> None:
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


def _wide_weights(
    weights: ExpertWeights | WideWeights, config, num_experts: int, where: str
) -> WideWeights:
    _check_weights(weights, config, num_experts, where)
    if isinstance(weights, WideWeights):
        return weights
    return _in_units(crop_weights(weights, config))


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


def _varying_axes(x):
    return jax.typeof(x).manual_axis_type.varying


def _varying_like(x, *others):
    """x, marked as varying over every mesh axis that one of `others` varies over.

    Under ``check_vma=True`` both branches of a cond must agree in type, and a constant varies over
    nothing. Under ``check_vma=False`` no value has axes and nothing happens.
    """
    axes = frozenset().union(*map(_varying_axes, others)) - _varying_axes(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _target():
    """(platform, device kind or None) of the mesh this is traced for, without touching arrays."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend(), None
    return getattr(device, "platform", None) or jax.default_backend(), device.device_kind


def _is_hopper(device_kind):
    for device in jax.local_devices():
        if device_kind in (None, device.device_kind):
            return getattr(device, "compute_capability", None) == "9.0"
    return False


def _has_mosaic():
    # JAX's module imports JAX's own test helpers, which import absl, which JAX does not require.
    return importlib.util.find_spec("absl") is not None


def choose(
    transport: str, gemm: str, differentiable: bool = False, config: MegaMoEConfig | None = None
) -> tuple[str, str]:
    """Resolves ``"auto"`` for the mesh being traced, and refuses what cannot run there.

    Args:
      transport: "auto" or one of `TRANSPORTS`.
      gemm: "auto" or one of `GEMMS`.
      differentiable: whether reverse-mode differentiation has to work.
      config: shapes, or None for such as every gemm takes.

    Returns:
      (transport, gemm), both named.

    Raises:
      MegaMoEError: an unknown name, the ragged transport on CPU, the Mosaic kernel on anything but
        Hopper or with widths that are not whole tiles, or either of them in a differentiable layer.
    """
    widths = () if config is None else (config.hidden, config.intermediate)
    whole_tiles = all(width % BLOCK_N == 0 for width in widths)
    for operand, name, names in (("transport", transport, TRANSPORTS), ("gemm", gemm, GEMMS)):
        check(
            name == "auto" or name in names,
            operand,
            got=repr(name),
            want=f"'auto' or one of {names}",
            remedy="'auto' picks what was measured to be fastest",
        )
    platform, device_kind = _target()
    if transport == "auto":
        # Measured on 2 x H200 (NVLink), jax 0.11.2, DeepSeek-V4-Flash with 32 experts per GPU:
        # all_to_all 662 us and ragged_all_to_all 807 us at 8 tokens, 17 ms and 161 ms at 8192.
        transport = "all_to_all"
    if gemm == "auto":
        if platform == "cpu" or differentiable:
            gemm = "blocked"
        else:
            mosaic = _is_hopper(device_kind) and _has_mosaic() and whole_tiles
            gemm = "mosaic" if mosaic else "ragged_dot"
    check(
        transport != "ragged_all_to_all" or platform != "cpu",
        "transport",
        got="'ragged_all_to_all' on CPU",
        want="'all_to_all' or 'all_gather'",
        remedy="XLA:CPU does not implement ragged_all_to_all",
    )
    check(
        gemm != "mosaic" or whole_tiles,
        "gemm",
        got=f"'mosaic' with hidden, intermediate = {widths}",
        want="'blocked' or 'ragged_dot'",
        remedy=f"the kernel computes whole tiles of {BLOCK_N}; 'auto' picks another one",
    )
    check(
        gemm != "mosaic" or _is_hopper(device_kind),
        "gemm",
        got=f"'mosaic' on {device_kind or platform}",
        want="'blocked' or 'ragged_dot'",
        remedy="the kernel is written for compute capability 9.0",
    )
    check(
        gemm != "mosaic" or _has_mosaic(),
        "gemm",
        got="'mosaic' without the package absl-py",
        want="absl-py installed",
        remedy="install absl-py: JAX's module with this kernel imports it",
    )
    check(
        not differentiable or (transport != "ragged_all_to_all" and gemm != "mosaic"),
        "transport and gemm of a differentiable layer",
        got=(transport, gemm),
        want="transport 'all_to_all' or 'all_gather', gemm 'blocked' or 'ragged_dot'",
        remedy="leave both at 'auto'",
    )
    return transport, gemm


def _in_units(weights: ExpertWeights) -> WideWeights:
    """`widen_weights`, with all weights finite: in units of their rows."""
    w = to_layout(weights, "canonical")
    w13, unit13 = quantize.widen_e2m1(quantize.unpack_e2m1(w.w13), w.w13_sf, jnp.bfloat16)
    w2, unit2 = quantize.widen_e2m1(quantize.unpack_e2m1(w.w2), w.w2_sf, jnp.bfloat16)
    return WideWeights(w13, w2, w.b13, w.b2, unit13, unit2)


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


def _wide(array):
    """BF16 as FP32, so that the sum which this becomes in reverse mode is taken in FP32."""
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _count_at_most(ends, positions):
    """[n] int32: how many of `ends` are at most each position; ends ascend.

    That is jnp.searchsorted(..., side="right"), which fails on an assertion where a shard_map is
    manual over some axes of a mesh only.
    """
    return jnp.sum(ends[None, :] <= positions[:, None], axis=1, dtype=jnp.int32)


def _take(rows, index, is_row):
    """``rows[index]`` where `is_row`, zero elsewhere; a select, since 0 * NaN would be NaN."""
    mask = is_row.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mask, rows[index], 0)


def _pool(received, row_of_entry, expert, topk_weights, local_experts, block_rows):
    """Groups N received entries by local expert; experts start at multiples of block_rows (2^n).

    Args:
      received: rows as they arrived, [M, ...] each.
      row_of_entry: [N] int32 into `received`.
      expert: [N] int32 local expert; E/R for an entry that is not ours.
      topk_weights: [N] float32.
    """
    entries = expert.shape[0]
    multiple = max(block_rows, _MOSAIC_ROWS)
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

    def take(array):  # several entries may read one row, hence _wide
        return _take(_wide(array), index, is_row).astype(array.dtype)

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
        run = _count_at_most(end, entry)
        local = jnp.where(run < end.shape[0], run % local_experts, local_experts)
        arrival = jnp.zeros(slots, jnp.int32).at[order].set(jnp.arange(slots, dtype=jnp.int32))
        arrival = jnp.where(expert < config.num_experts, arrival, slots)
        result = pool(received, entry, local, exchange(weights[order]))
        return result._replace(way_back=(arrival, sizes))

    owner = expert // local_experts  # R for a slot that goes nowhere
    if transport == "all_to_all":
        goes = jnp.any(owner.reshape(1, tokens, top_k) == jnp.arange(num_ranks)[:, None, None], 2)

        def send(array):
            copies = jnp.where(goes[..., None], _wide(array)[None], 0).astype(array.dtype)
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
    output = _varying_like(jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype), rows, sizes)
    return lax.ragged_all_to_all(
        rows, output, before[rank], sizes[rank], after[rank], sizes[:, rank], axis_name=axis
    )


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
    return _varying_like(out, rows, matrices).astype(jnp.float32)


def _blocked(rows, matrices, group_sizes, block_rows):
    num_blocks = rows.shape[0] // block_rows
    end = jnp.cumsum(group_sizes)
    first_row = jnp.arange(num_blocks, dtype=jnp.int32) * block_rows
    expert = _count_at_most(end, first_row)

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
            return _varying_like(zeros, lhs, matrices, expert_)

        return lax.cond(expert_ < matrices.shape[0], product, nothing, block_rows_)

    blocks = rows.reshape(num_blocks, block_rows, rows.shape[1])
    # Typed here, since lax.cond's branches are traced before the operands' types are reconciled.
    blocks = _varying_like(blocks, matrices, expert)
    out = lax.map(block, (blocks, expert))
    return out.reshape(rows.shape[0], matrices.shape[1])


def _of_rows(numbers: jax.Array, pool: Pool) -> jax.Array:
    """[E/R, N] numbers of experts -> [P, N], each row its expert's; zeros in rows of no expert."""
    row = jnp.arange(pool.is_row.shape[0], dtype=jnp.int32)
    end = jnp.cumsum(pool.group_sizes)
    expert = _count_at_most(end, row)
    return _take(numbers, jnp.minimum(expert, numbers.shape[0] - 1), pool.is_row)


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
        sums *= _of_rows(unit13, pool)
    if units is not None:
        sums *= units[:, None]
    return sums if b13 is None else sums + _of_rows(b13, pool)


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
        rows *= _of_rows(unit2, pool)
    if b2 is not None:
        rows += pool.topk_weights[:, None] * _of_rows(b2, pool)
    return rows.astype(jnp.bfloat16)


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
    entry_rows = _take(rows, jnp.minimum(pool.position, rows.shape[0] - 1), is_entry)
    if transport == "ragged_all_to_all":
        arrival, sizes = pool.way_back
        slots = arrival.shape[0]
        returned = _ragged_all_to_all(entry_rows, slots, sizes, axis, back=True)
        is_slot = arrival < slots
        slot_rows = _take(returned, jnp.minimum(arrival, slots - 1), is_slot)
    else:
        (owner,) = pool.way_back
        slots = owner.shape[0]
        # The other ranks sent zeros for a slot they do not own: pick the owner's row, add nothing.
        returned = lax.all_to_all(entry_rows.reshape(num_ranks, slots, hidden), axis, 0, 0)
        is_slot = owner < num_ranks
        source = jnp.minimum(owner, num_ranks - 1) * slots + jnp.arange(slots, dtype=jnp.int32)
        slot_rows = _take(returned.reshape(num_ranks * slots, hidden), source, is_slot)
    slot_rows = slot_rows.reshape(slots // config.top_k, config.top_k, hidden)
    total = jnp.zeros((slots // config.top_k, hidden), jnp.float32)
    for k in range(config.top_k):  # unrolled: the order of the additions is part of the contract
        total += slot_rows[:, k].astype(jnp.float32)
    return total.astype(jnp.bfloat16)


def _block_rows(gemm, tokens, config, num_ranks):
    """Rows of a block: about what an expert gets when tokens spread evenly, a power of two."""
    even = max(1, tokens * config.top_k * num_ranks // config.num_experts)
    power = 1 << (even - 1).bit_length()
    if gemm == "blocked":
        return min(max(power, 8), 128)
    return 64 if power <= 64 else _MOSAIC_ROWS


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
    wide = _wide_weights(weights, config, config.local_experts(num_ranks), PER_RANK)
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
        return _varying_like(jnp.zeros((*leading, config.hidden), jnp.bfloat16), *operands)
    if straight_through:
        rows = _round_to_e4m3(x, config.x_group)

    tile = _block_rows(gemm, tokens, config, num_ranks)
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
    _check_weights(weights, config, config.num_experts)
    if isinstance(tokens, tuple):  # within shard_map values cannot be looked at
        quantize.check_group_scales(tokens[1], config.x_group, "x[1]")
    topk_idx, num_tokens = narrow_ids(topk_idx), narrow_ids(num_tokens)
    operands = (tokens, topk_idx, topk_weights, weights, num_tokens)
    if AxisType.Explicit in mesh.axis_types:
        # Explicit axes make shard_map insist on operands that are sharded as in_specs says.
        operands = jax.reshard(operands, NamedSharding(mesh, PartitionSpec(axis)))
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
