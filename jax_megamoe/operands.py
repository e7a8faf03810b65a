"""Operands of the layer: what is taken, in the user's shapes, by the fused and the unfused one."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_megamoe.config import SF_GROUP, MegaMoEConfig
from jax_megamoe.errors import (
    Array,
    as_array,
    check,
    check_array,
    describe,
    is_array,
    refuse,
    spell_shape,
)

__all__ = [
    "PER_RANK",
    "Operand",
    "StandsForArray",
    "Tokens",
    "as_operand",
    "axis_size",
    "check_config",
    "check_first_axis",
    "check_rows",
    "check_slots",
    "check_tokens",
    "flatten_leading",
]


class StandsForArray(Protocol):
    """An object with an array behind it, such as a parameter of Flax."""

    def __jax_array__(self) -> jax.Array: ...


#: What the layer takes for an array.
Operand = Array | StandsForArray
#: BF16 tokens, or a pair (E4M3 codes [..., H], UE8M0 scales [..., H/32]).
Tokens = Operand | tuple[Operand, Operand]

#: What messages add to shapes that a rank sees inside shard_map.
PER_RANK = " on each rank"


def axis_size(axis: str | tuple[str, ...], function: str) -> int:
    """Number of ranks of the axis, in a function that is called inside shard_map."""
    try:
        return lax.axis_size(axis)
    except NameError as error:
        raise NameError(
            f"jax_megamoe: {function}: axis {axis!r} is not bound; expected a call inside "
            "jax.shard_map over the layer's mesh. Outside, call the layer itself."
        ) from error


def flatten_leading(array: jax.Array) -> jax.Array:
    """[..., C] -> [N, C]. The number of rows is spelled out, as an empty array has no -1."""
    return array.reshape(int(np.prod(array.shape[:-1])), array.shape[-1])


def as_operand(operand: Any) -> Any:
    """An operand, or each of a pair, as an array; see `errors.as_array`."""
    return tuple(map(as_array, operand)) if isinstance(operand, tuple) else as_array(operand)


def check_config(config: object) -> None:
    """Checks that this is a configuration: its fields were checked when it was made."""
    check(
        isinstance(config, MegaMoEConfig),
        "config",
        got=describe(config),
        want="a jax_megamoe.MegaMoEConfig",
        remedy="build it with MegaMoEConfig(num_experts=..., top_k=..., ...)",
    )


def check_tokens(x: Any, config: MegaMoEConfig, where: str = "") -> tuple[int, ...]:
    """Checks x, [..., H] bfloat16 or a pair (codes, sf), and returns its leading shape."""
    check_config(config)
    hidden = config.hidden
    remedy = f"a token has hidden = {hidden} channels, along the last axis"
    if isinstance(x, tuple):
        check(
            len(x) == 2,
            "x",
            got=describe(x),
            want="a bfloat16 array or the pair (codes, sf)",
            remedy="jax_megamoe.quantize.quantize_e4m3 returns such a pair",
        )
        codes, sf = x
        cast: str | None = "quantise with jax_megamoe.quantize.quantize_e4m3"
        dtypes = ("float8_e4m3fn", "uint8")
        check_array(codes, "x codes", ("...", hidden), dtypes, remedy, cast=cast, where=where)
        leading = codes.shape[:-1]
        remedy = f"one scale for each {SF_GROUP} codes of a token"
        shape, dtypes = (*leading, hidden // SF_GROUP), ("uint8", "float8_e8m0fnu")
        check_array(sf, "x sf", shape, dtypes, remedy, cast=cast, where=where)
        return leading
    if isinstance(x, list) and len(x) == 2 and all(map(is_array, x)):
        refuse(
            "x",
            got=f"list of {describe(x[0])} and {describe(x[1])}",
            want=f"bfloat16 [..., {hidden}], or a pair (codes, sf)",
            remedy="the pair is a tuple",
        )
    dtype = getattr(x, "dtype", None)
    cast = None
    if str(dtype) in ("float8_e4m3fn", "uint8"):
        cast = "these codes need their scales: pass the pair (codes, sf)"
    elif dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        cast = "cast with x.astype(jnp.bfloat16), or pass a quantised (codes, sf) pair"
    check_array(x, "x", ("...", hidden), ("bfloat16",), remedy, cast=cast, where=where)
    return x.shape[:-1]


def check_rows(rows: int, config: MegaMoEConfig) -> None:
    """Checks the number of tokens of a rank."""
    check(
        rows <= config.max_tokens_per_rank,
        "x",
        got=f"{rows} rows on a rank",
        want=f"at most max_tokens_per_rank = {config.max_tokens_per_rank}",
        remedy="raise max_tokens_per_rank or split the batch",
    )


def check_slots(
    topk_idx: Any, topk_weights: Any, leading: tuple[int, ...], config: MegaMoEConfig, where=""
) -> None:
    """Checks topk_idx and topk_weights for tokens of this leading shape."""
    shape = (*leading, config.top_k)
    order = "topk_idx comes before topk_weights, although jax.lax.top_k returns values first"
    remedy = (
        f"x has {spell_shape(leading)} tokens, config.top_k is {config.top_k}; fill unused slots "
        "with -1"
    )
    ints = ("int32", "int64")
    dtype = getattr(topk_idx, "dtype", None)
    is_int = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    cast = "cast it with .astype(jnp.int32)" if is_int else order
    check_array(topk_idx, "topk_idx", shape, ints, remedy, cast=cast, where=where)
    remedy = (
        f"x has {spell_shape(leading)} tokens, config.top_k is {config.top_k}; one weight per slot"
    )
    floats = ("float32", "bfloat16", "float16")
    dtype = getattr(topk_weights, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    cast = "cast it with .astype(jnp.float32)" if is_float else order
    check_array(topk_weights, "topk_weights", shape, floats, remedy, cast=cast, where=where)


def check_first_axis(x: Any, leading: tuple[int, ...], shards: int, config: MegaMoEConfig) -> None:
    """Checks that x, of all ranks together, can be cut along its first axis."""
    check(
        leading[0] % shards == 0,
        "x",
        got=describe(x[0] if isinstance(x, tuple) else x),
        want=f"a first axis that is a multiple of {shards} token shards",
        remedy="pad it, and leave the padding out with num_tokens or ids of -1"
        + (
            f"; or reshape x to [N, {config.hidden}], topk_idx and topk_weights likewise, where "
            "N has to be a multiple"
            if len(leading) > 1
            else ""
        ),
    )
