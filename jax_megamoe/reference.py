"""The oracle: the layer's five stages in plain jax.numpy, one leading axis for the ranks.

``dispatch -> linear1 -> swiglu -> linear2 -> combine``. Each stage is the contract that a back
end's stage of the same name keeps: the order of dispatched rows, the codes and the scales bit for
bit, matrix products up to the order of an FP32 sum. Nothing here communicates or depends on a mesh,
so every rank's buffers can be compared at once. It is written to be read, not to be fast.

`dense_float64` is the ground truth (no quantisation beyond what its arguments already carry);
`staged_float64` has the contract's FP8 roundings but float64 products, so that the distance to it
is the error of the matrix products and of the BF16 roundings alone.

Names: R ranks, E experts, K = top_k, T tokens per rank, H hidden, I intermediate, P rows of a pool.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_megamoe import quantize
from jax_megamoe.config import SF_GROUP, Activation, MegaMoEConfig
from jax_megamoe.errors import Array, check, check_array, describe, narrow_ids
from jax_megamoe.padding import crop_weights
from jax_megamoe.weights import ExpertWeights, check_weights, to_layout

__all__ = [
    "Biases",
    "Dispatched",
    "activate",
    "activate_float64",
    "combine",
    "dense_float64",
    "dispatch",
    "linear1",
    "linear2",
    "mega_moe",
    "relative_error",
    "stage_input",
    "staged_float64",
    "swiglu",
    "worst_case_pool_rows",
]

#: (b_gate [E, I], b_up [E, I], b_down [E, H]), any float dtype.
Biases = tuple[Any, Any, Any]

#: Scale byte of rows that hold no token: the one of an all-zero block.
_ZERO_SF = quantize.SF_MIN


class Dispatched(NamedTuple):
    """What every rank owns after dispatch: its pool, and where each of its rows came from.

    Attributes (R ranks, P pool rows per rank, a multiple of block_m):
      acts: [R, P, H] uint8, E4M3 codes; zero in padding rows.
      acts_sf: [R, P, H/32] uint8, UE8M0 bytes; 1 in padding rows.
      topk_weights: [R, P] float32, the routing weight of each row; 0 in padding rows.
      source_rank: [R, P] int32, rank that sent the row; -1 in padding rows.
      source_slot: [R, P] int32, ``token * K + k`` on that rank; -1 in padding rows.
      block_expert: [R, P/block_m] int32, local expert of each block of rows; -1 if unused.
      recv_count: [R, R, E/R] int32, rows by (owner, source rank, local expert).
      out_of_range: [R] int32, slots of each source rank with an expert id outside [-1, E).
    """

    acts: jax.Array
    acts_sf: jax.Array
    topk_weights: jax.Array
    source_rank: jax.Array
    source_slot: jax.Array
    block_expert: jax.Array
    recv_count: jax.Array
    out_of_range: jax.Array


def worst_case_pool_rows(
    config: MegaMoEConfig, num_ranks: int, num_tokens: int, block_m: int
) -> int:
    """Rows no routing can exceed: every slot of every rank on one owner, every expert padded.

    Counts ``R * T * K`` slots, not ``R * T * min(K, E/R)``: a token may name one expert twice.
    """
    local_experts = config.local_experts(num_ranks)
    rows = num_ranks * num_tokens * config.top_k + local_experts * (block_m - 1)
    return rows // block_m * block_m


def stage_input(
    x: Array | tuple[Array, Array], group: int | str = SF_GROUP
) -> tuple[jax.Array, jax.Array]:
    """Quantises tokens, or passes on a pair that is quantised already.

    Args:
      x: [..., H] bfloat16, or ``(codes, sf)``: [..., H] uint8 or float8_e4m3fn and [..., H/32]
        uint8 or float8_e8m0fnu. The scales of a pair have to be equal within each group, which is
        checked where their values are known: not under tracing.
      group: elements that share one scale: 32, 128 or "row" (`MegaMoEConfig.x_group`).

    Returns:
      codes [..., H] uint8 and sf [..., H/32] uint8.

    Raises:
      MegaMoEError: another dtype, shapes of a pair that do not belong together, or scales of a pair
        that differ within a group.
    """
    if isinstance(x, tuple):
        check(
            len(x) == 2,
            "x",
            got=f"a tuple of {len(x)}",
            want="a bfloat16 array or the pair (codes, sf)",
            remedy="quantize_e4m3 returns such a pair",
        )
        codes, sf = x
        remedy = "pass what quantize_e4m3 returns: one scale byte per 32 codes"
        leading = tuple(getattr(codes, "shape", (0,)))[:-1]
        hidden = getattr(codes, "shape", (0,))[-1]
        check_array(codes, "x[0]", (*leading, hidden), ("uint8", "float8_e4m3fn"), remedy)
        sf_shape = (*leading, hidden // SF_GROUP)
        check_array(sf, "x[1]", sf_shape, ("uint8", "float8_e8m0fnu"), remedy)
        quantize.check_group_scales(sf, group, "x[1]")
        return quantize.as_bytes(codes), quantize.as_bytes(sf)
    check(
        getattr(x, "dtype", None) == jnp.bfloat16,
        "x",
        got=describe(x),
        want="bfloat16, or the pair (codes, sf)",
        remedy="cast activations to bfloat16",
    )
    if x.size == 0:  # Blocks cannot be counted in an empty array.
        blocks = (*x.shape[:-1], x.shape[-1] // SF_GROUP)
        return jnp.zeros(x.shape, jnp.uint8), jnp.zeros(blocks, jnp.uint8)
    return quantize.quantize_e4m3(x, group)


def _routed_experts(topk_idx, config, num_tokens):
    """Expert of each slot [R, T*K], with E for slots that go nowhere, and out_of_range [R]."""
    num_ranks, tokens, top_k = topk_idx.shape
    in_use = jnp.ones((num_ranks, tokens, 1), bool)
    if num_tokens is not None:
        in_use = jnp.arange(tokens)[None, :, None] < num_tokens[:, None, None]
    routed = in_use & (topk_idx >= 0) & (topk_idx < config.num_experts)
    out_of_range = jnp.sum(in_use & ~routed & (topk_idx != -1), axis=(1, 2), dtype=jnp.int32)
    # Masked before the cast: int64 ids must not wrap around into the valid range.
    expert = jnp.where(routed, topk_idx, config.num_experts).astype(jnp.int32)
    return expert.reshape(num_ranks, tokens * top_k), out_of_range


def dispatch(
    codes: jax.Array,
    sf: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    config: MegaMoEConfig,
    *,
    num_tokens: jax.Array | None = None,
    block_m: int = 64,
    max_pool_rows: int | None = None,
) -> Dispatched:
    """Sends every routed (token, k) slot to the rank that owns its expert, in a fixed order.

    Expert e lives on rank ``e // (E/R)``. In an owner's pool experts follow each other, each from a
    multiple of block_m on. An expert's rows take one slot of every source rank in turn (ranks
    ascending, ranks that have run out are skipped), and a source rank's slots go by ascending
    ``token * K + k``. That is the order in which min-peeling over the ranks' counts visits them.

    Args:
      codes: [R, T, H] uint8, E4M3 codes.
      sf: [R, T, H/32] uint8, UE8M0 bytes.
      topk_idx: [R, T, K] int32 or int64. An id outside [0, E) is a slot that is not routed; -1 says
        so on purpose, any other is also counted in `Dispatched.out_of_range`. An expert named twice
        by one token is two slots.
      topk_weights: [R, T, K] float32 or another float dtype, converted to float32.
      config: shapes.
      num_tokens: [R] int32 or None: rows of a rank at or beyond it are ignored entirely.
      block_m: rows of one block; experts are padded to blocks.
      max_pool_rows: P, a multiple of block_m, or None for the worst case: `worst_case_pool_rows`.
        A smaller pool saves memory; the caller answers for it being large enough, because rows
        beyond it would be lost.

    Returns:
      `Dispatched`.

    Raises:
      MegaMoEError: shapes or dtypes that do not agree.
    """
    remedy = "x has an axis of ranks here, [R, T, H]; stage_input(x) makes codes and sf of it"
    check_array(codes, "codes", ("R", "T", config.hidden), ("uint8",), remedy)
    num_ranks, tokens, hidden = codes.shape
    top_k, local_experts = config.top_k, config.local_experts(num_ranks)
    sf_shape = (num_ranks, tokens, hidden // SF_GROUP)
    check_array(sf, "sf", sf_shape, ("uint8",), "use stage_input(x)")
    slots_shape = (num_ranks, tokens, top_k)
    remedy = "the reference takes a leading axis of ranks: [R, T, K]"
    check_array(topk_idx, "topk_idx", slots_shape, ("int32", "int64"), remedy)
    floats = ("float32", "bfloat16", "float16")
    check_array(topk_weights, "topk_weights", slots_shape, floats, remedy)
    pool = _pool_rows(config, num_ranks, tokens, block_m, max_pool_rows)

    num_slots = tokens * top_k
    expert, out_of_range = _routed_experts(topk_idx, config, num_tokens)
    rank = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32), expert.shape)

    # [R, E]: slots by (source rank, expert). The column E of unrouted slots is cut off.
    count = jnp.zeros((num_ranks, config.num_experts + 1), jnp.int32).at[rank, expert].add(1)
    # level: how many earlier slots of the same rank name the same expert.
    order = jnp.argsort(expert, axis=1, stable=True).astype(jnp.int32)
    first = jnp.cumsum(count, axis=1) - count
    sorted_expert = jnp.take_along_axis(expert, order, axis=1)
    sorted_level = slot - jnp.take_along_axis(first, sorted_expert, axis=1)
    level = jnp.zeros_like(slot).at[rank, order].set(sorted_level)
    count = count[:, :-1]

    # Taking turns, the slot at `level` of rank r comes after min(count, level) slots of every
    # rank, and after the lower ranks that still have a slot at this level.
    counts_of_slot = jnp.take(count, expert, axis=1, mode="clip")  # [R other, R, T*K]
    lower = (rank < rank.T)[:, :, None]
    turn = jnp.sum(jnp.minimum(counts_of_slot, level[None]), axis=0, dtype=jnp.int32)
    turn += jnp.sum((counts_of_slot > level[None]) & lower, axis=0, dtype=jnp.int32)

    rows_of_expert = jnp.sum(count, axis=0, dtype=jnp.int32).reshape(num_ranks, local_experts)
    padded = (rows_of_expert + block_m - 1) // block_m * block_m
    end = jnp.cumsum(padded, axis=1)
    start = (end - padded).reshape(-1)
    position = jnp.take(start, expert, mode="clip") + turn
    owner = expert // local_experts
    keep = (expert < config.num_experts) & (position < pool)
    target = jnp.where(keep, owner * pool + position, num_ranks * pool)

    empty = jnp.full(num_ranks * pool, -1, jnp.int32)
    source_rank = empty.at[target].set(jnp.broadcast_to(rank, target.shape), mode="drop")
    source_slot = empty.at[target].set(slot, mode="drop")
    is_row = source_rank >= 0
    token = (source_rank, source_slot // top_k)  # -1 reads a row that `is_row` discards.
    weights = topk_weights.astype(jnp.float32).reshape(num_ranks, num_slots)
    if num_slots == 0:  # There is nothing to gather from.
        acts = jnp.zeros((num_ranks * pool, hidden), jnp.uint8)
        acts_sf = jnp.full((num_ranks * pool, hidden // SF_GROUP), _ZERO_SF, jnp.uint8)
        row_weights = jnp.zeros(num_ranks * pool, jnp.float32)
    else:
        acts = jnp.where(is_row[:, None], codes[token], jnp.uint8(0))
        acts_sf = jnp.where(is_row[:, None], sf[token], jnp.uint8(_ZERO_SF))
        row_weights = jnp.where(is_row, weights[source_rank, source_slot], 0.0)

    block_start = jnp.arange(pool // block_m, dtype=jnp.int32) * block_m
    block_expert = jax.vmap(lambda e: jnp.searchsorted(e, block_start, side="right"))(end)
    block_expert = jnp.where(block_expert < local_experts, block_expert, -1).astype(jnp.int32)
    return Dispatched(
        acts=acts.reshape(num_ranks, pool, hidden),
        acts_sf=acts_sf.reshape(num_ranks, pool, hidden // SF_GROUP),
        topk_weights=row_weights.reshape(num_ranks, pool),
        source_rank=source_rank.reshape(num_ranks, pool),
        source_slot=source_slot.reshape(num_ranks, pool),
        block_expert=block_expert,
        recv_count=jnp.swapaxes(count.reshape(num_ranks, num_ranks, local_experts), 0, 1),
        out_of_range=out_of_range,
    )


def _pool_rows(config, num_ranks, tokens, block_m, requested):
    if requested is None:
        return worst_case_pool_rows(config, num_ranks, tokens, block_m)
    check(
        requested % block_m == 0,
        "max_pool_rows",
        got=requested,
        want=f"a multiple of block_m = {block_m}",
        remedy="round it up",
    )
    return requested


def _by_blocks(acts, dispatched, codes, codes_sf, rows_out, bias=None, weights=None):
    """Rows times the FP4 matrix of their block's expert: FP32 [R, P, rows_out].

    One block at a time, and one expert's matrix widened at a time, so that memory stays small. Each
    row then gets weight * bias of its expert.

    Args:
      acts: codes [R, P, C] and sf [R, P, C/32] of the rows.
      dispatched: for its block_expert.
      codes: [E, rows_out, C/2] packed E2M1, codes_sf: [E, rows_out, C/32].
      bias: [E, rows_out] float32 or None, weights: [R, P] float32 or None for ones.
    """
    num_ranks, num_blocks = dispatched.block_expert.shape
    local_experts = codes.shape[0] // num_ranks
    row_codes, row_sf = acts
    block_m = row_codes.shape[1] // max(num_blocks, 1)

    def block(operands):
        block_codes, block_sf, block_weights, expert = operands

        def product():
            matrix = quantize.unpack_e2m1(codes[expert])
            matrix, column_units = quantize.widen_e2m1(matrix, codes_sf[expert])
            rows, row_units = quantize.widen_e4m3(block_codes, block_sf)
            sums = jnp.dot(
                rows,
                matrix.T,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            sums = sums * (row_units[:, None] * column_units[None, :])
            return sums if bias is None else sums + block_weights * bias[expert]

        return lax.cond(expert >= 0, product, lambda: jnp.zeros((block_m, rows_out), jnp.float32))

    first_expert = jnp.arange(num_ranks, dtype=jnp.int32)[:, None] * local_experts
    expert = jnp.where(dispatched.block_expert >= 0, dispatched.block_expert + first_expert, -1)
    blocks = num_ranks * num_blocks
    weights = jnp.ones(row_codes.shape[:2], jnp.float32) if weights is None else weights
    columns = (row_codes, row_sf, weights[..., None])
    split = [a.reshape(blocks, block_m, a.shape[-1]) for a in columns]
    out = lax.map(block, (*split, expert.reshape(blocks)))
    return out.reshape(num_ranks, num_blocks * block_m, rows_out)


def linear1(dispatched: Dispatched, weights: ExpertWeights) -> jax.Array:
    """Gate and up projections of every pool row, accumulated in FP32, and their biases, if any.

    Args:
      dispatched: what `dispatch` returned.
      weights: all E experts, any layout.

    Returns:
      [R, P, 2I] float32: I gate channels, then I up channels. Rows of unused blocks are zero.
    """
    weights = to_layout(weights, "canonical")
    acts = dispatched.acts, dispatched.acts_sf
    matrix = weights.w13, weights.w13_sf, weights.w13.shape[1]
    return _by_blocks(acts, dispatched, *matrix, bias=weights.b13)


# Derivatives of their own: those of the formulas are infinity / infinity where exp overflows.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _silu(gate, alpha):
    return gate / (1 + jnp.exp(-alpha * gate))


@_silu.defjvp
def _silu_jvp(alpha, primals, tangents):
    (gate,) = primals
    sigmoid = jax.nn.sigmoid(alpha * gate)
    slope = sigmoid + gate * (alpha * sigmoid * (1 - sigmoid))
    return _silu(gate, alpha), tangents[0] * slope


@jax.custom_jvp
def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


@_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    sigmoid = _sigmoid(*primals)
    return sigmoid, tangents[0] * sigmoid * (1 - sigmoid)


def activate(gate_up: jax.Array, topk_weights: jax.Array, activation: Activation) -> jax.Array:
    """The activation times the routing weight in FP32; the weight comes last.

    Args:
      gate_up: [..., 2I] float32, gate channels first.
      topk_weights: [...] float32, the routing weight of each row.
      activation: see `config.Activation`.

    Returns:
      [..., I] float32. A NaN in gate or up stays a NaN.
    """
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    weight = topk_weights.astype(jnp.float32)[..., None]
    if activation.kind == "situ":
        beta, linear_beta = np.float32(activation.beta), np.float32(activation.linear_beta)
        bounded = beta * jnp.tanh(gate / beta) * _sigmoid(gate)
        return bounded * (linear_beta * jnp.tanh(up / linear_beta)) * weight
    if activation.limit is not None:
        limit = jnp.float32(activation.limit)
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
    if activation.kind == "gpt_oss_swiglu":
        return _silu(gate, activation.alpha) * (up + 1) * weight
    return _silu(gate, 1.0) * up * weight


def swiglu(
    gate_up: jax.Array, topk_weights: jax.Array, activation: Activation, group: int = SF_GROUP
) -> tuple[jax.Array, jax.Array]:
    """`activate`, then E4M3 codes with one UE8M0 scale per `group` channels.

    Args:
      gate_up: [..., 2I] float32, gate channels first.
      topk_weights: [...] float32.
      activation: see `config.Activation`.
      group: 32 or 128 (`MegaMoEConfig.act_group`).

    Returns:
      codes [..., I] uint8 and sf [..., I/32] uint8.
    """
    return quantize.quantize_e4m3(activate(gate_up, topk_weights, activation), group)


def linear2(
    codes: jax.Array, sf: jax.Array, dispatched: Dispatched, weights: ExpertWeights
) -> jax.Array:
    """Down projection of every pool row: FP32 accumulation, rounded once to BF16.

    A bias is added before the rounding, times the row's routing weight: the product has that weight
    already (see `activate`).

    Args:
      codes, sf: [R, P, I] and [R, P, I/32] uint8, what `swiglu` returned.
      dispatched: what `dispatch` returned.
      weights: all E experts, any layout.

    Returns:
      [R, P, H] bfloat16. Rows of unused blocks are zero.
    """
    weights = to_layout(weights, "canonical")
    matrix = weights.w2, weights.w2_sf, weights.w2.shape[1]
    bias = {"bias": weights.b2, "weights": dispatched.topk_weights}
    rows = _by_blocks((codes, sf), dispatched, *matrix, **bias)
    return rows.astype(jnp.bfloat16)


def combine(
    rows: jax.Array, dispatched: Dispatched, num_tokens: int, config: MegaMoEConfig
) -> jax.Array:
    """Sums each token's rows in FP32 in slot order k = 0..K-1 and rounds once to BF16.

    The routing weights are in the rows already (see `activate`).

    Args:
      rows: [R, P, H] bfloat16, what `linear2` returned.
      dispatched: what `dispatch` returned.
      num_tokens: T, static: rows of the output per rank.
      config: shapes.

    Returns:
      [R, T, H] bfloat16; exact zeros for a token without a routed slot.
    """
    num_ranks, pool, hidden = rows.shape
    if num_tokens == 0 or pool == 0:
        return jnp.zeros((num_ranks, num_tokens, hidden), jnp.bfloat16)
    num_slots = num_tokens * config.top_k
    # Where each slot's row is: the inverse of (source_rank, source_slot), -1 for slots without one.
    target = dispatched.source_rank * num_slots + dispatched.source_slot
    target = jnp.where(dispatched.source_rank >= 0, target, num_ranks * num_slots).reshape(-1)
    pool_row = jnp.arange(num_ranks * pool, dtype=jnp.int32)
    where = jnp.full(num_ranks * num_slots, -1, jnp.int32).at[target].set(pool_row, mode="drop")
    where = where.reshape(num_ranks, num_tokens, config.top_k)
    rows = rows.reshape(num_ranks * pool, hidden)
    total = jnp.zeros((num_ranks, num_tokens, hidden), jnp.float32)
    for k in range(config.top_k):
        row = rows[where[..., k]].astype(jnp.float32)
        total += jnp.where(where[..., k, None] >= 0, row, 0.0)
    return total.astype(jnp.bfloat16)


def mega_moe(
    x: Array | tuple[Array, Array],
    topk_idx: Array,
    topk_weights: Array,
    weights: ExpertWeights,
    config: MegaMoEConfig,
    num_tokens: Array | None = None,
    *,
    block_m: int = 64,
    max_pool_rows: int | None = None,
    bf16_sums: bool = False,
) -> jax.Array:
    """The whole layer: `dispatch`, `linear1`, `swiglu`, `linear2`, `combine`.

    Args:
      x: [R, T, H] bfloat16, or a quantised pair (see `stage_input`).
      topk_idx: [R, T, K] int32 or int64; see `dispatch`.
      topk_weights: [R, T, K] float.
      weights: all E experts, any layout, padded or not.
      config: shapes and activation.
      num_tokens: [R] int32 or None; see `dispatch`.
      block_m, max_pool_rows: see `dispatch`. They do not change the result.
      bf16_sums: rounds linear 1's sums to BF16, as separate kernels do that pass them on in BF16.
        This is the plain computation that results of FP8 tensor cores are judged by
        (docs/numerics.md).

    Returns:
      [R, T, H] bfloat16.

    Raises:
      MegaMoEError: shapes or dtypes that do not agree.
    """
    operands = x, narrow_ids(topk_idx), topk_weights, weights, config, narrow_ids(num_tokens)
    return _mega_moe(*operands, block_m, max_pool_rows, bf16_sums)


@functools.partial(jax.jit, static_argnames=("config", "block_m", "max_pool_rows", "bf16_sums"))
def _mega_moe(
    x, topk_idx, topk_weights, weights, config, num_tokens, block_m, max_pool_rows, bf16_sums
):
    check_weights(weights, config, config.num_experts)
    weights = crop_weights(weights, config)
    codes, sf = stage_input(x, config.x_group)
    dispatched = dispatch(
        codes,
        sf,
        topk_idx,
        topk_weights,
        config,
        num_tokens=num_tokens,
        block_m=block_m,
        max_pool_rows=max_pool_rows,
    )
    gate_up = linear1(dispatched, weights)
    if bf16_sums:
        gate_up = jax.lax.reduce_precision(gate_up, exponent_bits=8, mantissa_bits=7)
    acts, acts_sf = swiglu(gate_up, dispatched.topk_weights, config.activation, config.act_group)
    rows = linear2(acts, acts_sf, dispatched, weights)
    return combine(rows, dispatched, codes.shape[1], config)


def activate_float64(gate: np.ndarray, up: np.ndarray, activation: Activation) -> np.ndarray:
    """The activation in NumPy float64, without the routing weight; gate and up of one shape."""
    with np.errstate(over="ignore", invalid="ignore"):
        if activation.kind == "situ":
            beta, linear_beta = activation.beta, activation.linear_beta
            bounded = beta * np.tanh(gate / beta) / (1 + np.exp(-gate))
            return bounded * linear_beta * np.tanh(up / linear_beta)
        if activation.limit is not None:
            limit = activation.limit
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        if activation.kind == "gpt_oss_swiglu":
            return gate / (1 + np.exp(-np.float64(activation.alpha) * gate)) * (up + 1)
        return gate / (1 + np.exp(-gate)) * up


def dense_float64(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    config: MegaMoEConfig,
    num_tokens: np.ndarray | None = None,
    *,
    biases: Biases | None = None,
) -> np.ndarray:
    """The layer in NumPy float64 without quantisation.

    ``y = sum_k weight * (W_down act(W_gate x + b_gate, W_up x + b_up) + b_down)``

    Args:
      x: [R, T, H], any float dtype.
      topk_idx: [R, T, K] integers; ids outside [0, E) are skipped.
      topk_weights: [R, T, K], any float dtype.
      w_gate, w_up: [E, I, H], w_down: [E, H, I], any float dtype: dense weights, or what
        `weights.dequantize_weights` returns to leave the weights' quantisation out of the error.
      config: shapes and activation.
      num_tokens: [R] integers or None: rows at or beyond it are zero.
      biases: (b_gate [E, I], b_up [E, I], b_down [E, H]), what `weights.expert_biases` returns; or
        None.

    Returns:
      [R, T, H] float64.
    """
    return _float64(
        np.asarray(x).astype(np.float64),
        topk_idx,
        topk_weights,
        (w_gate, w_up, w_down),
        biases,
        config,
        num_tokens,
        lambda acts: acts,
    )


# Jitted: eagerly, each of the quantiser's many operations would be compiled by itself.
_dequantize = jax.jit(quantize.dequantize_e4m3)


@functools.partial(jax.jit, static_argnames="group")
def _round_to_e4m3(values, group):
    return quantize.dequantize_e4m3(*quantize.quantize_e4m3(values, group))


def staged_float64(
    codes: jax.Array,
    sf: jax.Array,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    config: MegaMoEConfig,
    num_tokens: np.ndarray | None = None,
    *,
    biases: Biases | None = None,
) -> np.ndarray:
    """`dense_float64` on quantised input, with the contract's FP8 rounding of SwiGLU's output.

    SwiGLU times the routing weight is rounded to float32 and quantised as in `swiglu`; everything
    else is float64, including the rows and their sum, which the layer rounds to BF16.

    Args:
      codes, sf: [R, T, H] and [R, T, H/32] uint8, what `stage_input` returned.
      topk_idx, topk_weights, config, num_tokens, biases: as in `dense_float64`.
      w_gate, w_up, w_down: what `weights.dequantize_weights` returns.

    Returns:
      [R, T, H] float64.
    """

    def round_to_e4m3(acts):
        acts = _round_to_e4m3(acts.astype(np.float32), config.act_group)
        return np.asarray(acts).astype(np.float64)

    return _float64(
        np.asarray(_dequantize(codes, sf)).astype(np.float64),
        topk_idx,
        topk_weights,
        (w_gate, w_up, w_down),
        biases,
        config,
        num_tokens,
        round_to_e4m3,
    )


def _float64(x, topk_idx, topk_weights, weights, biases, config, num_tokens, round_acts):
    idx = np.asarray(topk_idx)
    routed = (idx >= 0) & (idx < config.num_experts)
    if num_tokens is not None:
        routed &= np.arange(idx.shape[1])[None, :, None] < np.asarray(num_tokens)[:, None, None]
    topk_weights = np.asarray(topk_weights).astype(np.float64)
    w_gate, w_up, w_down = (np.asarray(w) for w in weights)
    if biases is None:
        biases = [np.zeros(w.shape[:2]) for w in (w_gate, w_up, w_down)]
    b_gate, b_up, b_down = (np.asarray(b).astype(np.float64) for b in biases)
    chosen = np.unique(idx[routed]).astype(int)
    slots = {expert: np.nonzero(routed & (idx == expert)) for expert in chosen}
    acts = np.zeros((*idx.shape, config.intermediate), np.float64)
    for expert, (rank, token, k) in slots.items():
        gate = x[rank, token] @ w_gate[expert].astype(np.float64).T + b_gate[expert]
        up = x[rank, token] @ w_up[expert].astype(np.float64).T + b_up[expert]
        values = activate_float64(gate, up, config.activation)
        acts[rank, token, k] = values * topk_weights[rank, token, k][:, None]
    acts = round_acts(acts)
    y = np.zeros(x.shape, np.float64)
    for expert, (rank, token, k) in slots.items():
        # add.at and not +=: a token that names the expert twice has two rows here.
        rows = acts[rank, token, k] @ w_down[expert].astype(np.float64).T
        rows += topk_weights[rank, token, k][:, None] * b_down[expert]
        np.add.at(y, (rank, token), rows)
    return y


def relative_error(y: jax.Array | np.ndarray, truth: np.ndarray) -> float:
    """``||y - truth|| / ||truth||`` in the Frobenius norm and float64.

    Args:
      y, truth: arrays of one shape, any float dtype.

    Returns:
      The ratio; 0 if both are zero, infinity if only `truth` is.
    """
    truth = np.asarray(truth).astype(np.float64)
    difference = np.linalg.norm(np.asarray(y).astype(np.float64) - truth)
    scale = np.linalg.norm(truth)
    return float(difference / scale) if scale else (0.0 if difference == 0 else float("inf"))
