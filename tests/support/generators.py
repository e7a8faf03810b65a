"""Inputs that several tests share: exhaustive bit patterns, routings, weights, tokens.

Everything is numpy. Random inputs take a `numpy.random.Generator`, so a failing case is its seed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

SF_GROUP = 32

# Exhaustive bit patterns -------------------------------------------------------------------------


def all_bf16() -> np.ndarray:
    """[65536] bfloat16: every bit pattern in order, NaNs, infinities and denormals included."""
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def all_fp16() -> np.ndarray:
    """[65536] float16: every bit pattern in order."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def mantissa_sweep(exponent: int) -> np.ndarray:
    """[2^23] uint32: the FP32 bits of every magnitude with this biased exponent, ascending."""
    return np.uint32(exponent << 23) | np.arange(1 << 23, dtype=np.uint32)


def edge_bits() -> np.ndarray:
    """FP32 bits (uint32) around every decision a quantiser makes, for all 255 finite exponents.

    The mantissas are both ends, both scale thresholds (0x400000, 0x600000) and their neighbours,
    and halfway patterns of a 3-bit and of a 1-bit mantissa.
    """
    around = [m + d for m in (0x200000, 0x400000, 0x600000, 0x080000, 0x780000) for d in (-1, 0, 1)]
    mantissas = np.array([0, 1, 2, *around, 0x7FFFFE, 0x7FFFFF], np.uint32)
    exponents = np.arange(255, dtype=np.uint32) << np.uint32(23)
    return (exponents[:, None] | mantissas).ravel()


def pinned_blocks(values: np.ndarray, amax: float) -> np.ndarray:
    """[ceil(N/31), 32]: blocks that start with `amax`, which fixes the scale; zeros at the end."""
    values = np.asarray(values).ravel()
    num_blocks = -(-values.size // (SF_GROUP - 1))
    body = np.zeros(num_blocks * (SF_GROUP - 1), values.dtype)
    body[: values.size] = values
    first = np.full((num_blocks, 1), amax, values.dtype)
    return np.concatenate([first, body.reshape(num_blocks, -1)], axis=1)


def one_per_block(values: np.ndarray) -> np.ndarray:
    """[N, 32]: each value alone among zeros, so that it decides its block's scale itself."""
    blocks = np.zeros((values.size, SF_GROUP), values.dtype)
    blocks[:, 0] = values.ravel()
    return blocks


# Layer inputs ------------------------------------------------------------------------------------

ROUTINGS = (
    "uniform",
    "zipf",
    "one_expert",
    "one_rank",
    "masked",
    "duplicates",
    "out_of_range",
    "empty_rank0",
)


def routing(
    rng: np.random.Generator,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    kind: str,
    num_ranks: int = 2,
) -> tuple[np.ndarray, np.ndarray]:
    """Expert choices and their weights.

    Args:
      kind: one of `ROUTINGS`.
        uniform: distinct experts, all equally likely.
        zipf: distinct experts, the i-th most popular with a weight of 1/i.
        one_expert: slot 0 of every token is the same expert; the other slots are -1.
        one_rank: distinct experts of one rank; slots beyond its E/R experts are -1.
        masked: uniform, then two slots in five and the whole of every fifth token are -1.
        duplicates: with replacement, and slot 1 repeats slot 0 in every token.
        out_of_range: uniform, then a quarter of the slots (at least one) outside [-1, E).
        empty_rank0: distinct experts of ranks 1, 2, ...; with one rank every slot is -1.
      num_ranks: what "one_rank" and "empty_rank0" take for R; experts are split evenly in order.

    Returns:
      topk_idx: [num_tokens, top_k] int32.
      topk_weights: [num_tokens, top_k] float32 in (0, 1]. A slot of -1 has a weight as well: the
        layer must not look at it.
    """
    shape = (num_tokens, top_k)
    local = num_experts // num_ranks
    popularity = np.ones(num_experts)
    if kind == "zipf":
        popularity = 1.0 / (1 + rng.permutation(num_experts))
    elif kind == "one_rank":
        owner = int(rng.integers(num_ranks))
        popularity[: owner * local] = popularity[(owner + 1) * local :] = 0
    elif kind == "empty_rank0":
        popularity[:local] = 0
    # Sorting log(popularity) + Gumbel noise draws without replacement; -inf is never worth a slot.
    with np.errstate(divide="ignore"):
        keys = np.log(popularity) + rng.gumbel(size=(num_tokens, num_experts))
    order = np.argsort(-keys, axis=1, kind="stable")[:, :top_k]
    idx = np.full(shape, -1, np.int32)
    idx[:, : order.shape[1]] = np.where(np.take_along_axis(keys, order, 1) == -np.inf, -1, order)

    if kind == "one_expert":
        idx[:] = -1
        idx[:, 0] = rng.integers(num_experts)
    elif kind == "masked":
        idx[rng.random(shape) < 0.4] = -1
        idx[4::5] = -1
    elif kind == "duplicates":
        idx = rng.integers(num_experts, size=shape, dtype=np.int32)
        idx[:, 1:2] = idx[:, :1]
    elif kind == "out_of_range":
        wild = np.array([num_experts, num_experts + 1, -2, 2**31 - 1, -(2**31)], np.int64)
        wrong = rng.random(shape) < 0.25
        wrong[:1, :1] = True
        idx[wrong] = rng.choice(wild, int(wrong.sum())).astype(np.int32)
    elif kind not in ROUTINGS:
        raise ValueError(f"kind: got {kind!r}; expected one of {ROUTINGS}")
    weights = rng.random(shape, np.float32)
    return idx, (1 - weights).astype(np.float32)


def dense_weights(
    rng: np.random.Generator, num_experts: int, intermediate: int, hidden: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(w_gate [E, I, H], w_up [E, I, H], w_down [E, H, I]) float32; outputs stay of order one.

    Every block of 32 has a power of two of its own, so that a scale used for another block shows.
    """

    def matrix(rows, columns):
        shape = (num_experts, rows, columns)
        w = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(columns))
        spread = rng.integers(-2, 3, (num_experts, rows, columns // SF_GROUP))
        return np.ldexp(w, np.repeat(spread, SF_GROUP, axis=-1)).astype(np.float32)

    return (
        matrix(intermediate, hidden),
        matrix(intermediate, hidden),
        matrix(hidden, intermediate),
    )


def tokens(rng: np.random.Generator, num_tokens: int, hidden: int) -> np.ndarray:
    """[num_tokens, hidden] bfloat16, of order one; every block of 32 has another power of two."""
    x = rng.standard_normal((num_tokens, hidden), np.float32)
    spread = rng.integers(-2, 3, (num_tokens, hidden // SF_GROUP))
    return np.ldexp(x, np.repeat(spread, SF_GROUP, axis=-1)).astype(ml_dtypes.bfloat16)
