"""The custom call of a layer: its specialisation of a mesh, its operands, its gradient.

`layer` and `blocks` build on this module, from the outside in: `global_call` is the jitted
shard_map over the mesh, `local_call` one rank's part, `_differentiable_call` the function with a
gradient, and `_ffi_call` the call of the back end's handlers. All of them depend on a layer only
through its `Site`, so that equal layers share programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import _backends, quantize, unfused
from jax_megamoe import weights as weights_lib
from jax_megamoe._ffi import (
    TARGET,
    activation_number,
    activation_params,
    granularity_number,
    native,
)
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import check, describe, is_array, narrow_ids
from jax_megamoe.operands import (
    PER_RANK,
    as_operand,
    axis_size,
    check_rows,
    check_slots,
    check_tokens,
    flatten_leading,
)
from jax_megamoe.padding import pad_tokens
from jax_megamoe.symmetric import moe_shape
from jax_megamoe.weights import ExpertWeights

__all__ = [
    "MoEStats",
    "Site",
    "check_layout",
    "global_call",
    "local_call",
    "over_mesh",
    "reshard_explicit",
]


@functools.partial(
    jax.export.register_namedtuple_serialization, serialized_name="jax_megamoe.MoEStats"
)
class MoEStats(NamedTuple):
    """What happened in one call, all int32. R is the number of token shards.

    Attributes:
      tokens_per_expert: [E] (in `.local`: [E/R]) rows each expert received; a token that names an
        expert in two slots counts twice.
      out_of_range: [R] slots whose expert id was outside [-1, E); they were dropped.
      received_rows: [R] rows each rank received for its experts.
      pool_blocks: [R] blocks of rows those fill.
      ring_laps: [R] how often the ring of dispatched rows was filled.
    """

    tokens_per_expert: jax.Array
    out_of_range: jax.Array
    received_rows: jax.Array
    pool_blocks: jax.Array
    ring_laps: jax.Array


class Site(NamedTuple):
    """What a call needs to know about its layer; static and hashable."""

    config: MegaMoEConfig
    backend: str
    axis: str
    num_ranks: int
    buffer_key: str

    @property
    def layout(self) -> str:
        """Name of the weights' layout."""
        return _backends.get(self.backend).layout(self.config)


def reshard_explicit(
    mesh: Mesh | AbstractMesh, operands: tuple[Any, ...], specs: tuple[P, ...]
) -> tuple:
    """The operands, moved to `specs` if the mesh has Explicit axes.

    Those make shard_map insist on operands that are sharded as in_specs says.
    """
    if all(kind != jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
        return operands
    return tuple(
        jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(operands, specs, strict=True)
    )


def over_mesh(
    local: Callable[..., Any],
    in_specs: tuple[P, ...],
    axis: str,
    mesh: Mesh | AbstractMesh,
    token_axes: tuple[str, ...],
    return_stats: bool,
) -> Callable[..., Any]:
    """The jitted shard_map of `local`, which returns (y, `MoEStats`) of one rank.

    jit matters to callers that do not use it: without it shard_map would compile and dispatch every
    operation of the gradient on its own.
    """

    def body(*operands):
        y, stats = local(*operands)
        if not return_stats:
            return y
        others = tuple(name for name in token_axes if name != axis)
        return y, stats._replace(tokens_per_expert=lax.psum(stats.tokens_per_expert, others))

    tokens, experts = P(token_axes), P(axis)
    stats_specs: Any = MoEStats._make([experts, tokens, tokens, tokens, tokens])
    manual = set(mesh.manual_axes) if isinstance(mesh, AbstractMesh) else set()
    if manual:
        # Differentiated shard_maps cannot be nested when they save anything but their operands
        # (JAX types saved values by all axes of the mesh, the outer one's too). So this saves
        # nothing else. Only casts are computed again, the custom call is not.
        body = jax.checkpoint(body, prevent_cse=False)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            axis_names=set(mesh.axis_names) - manual,
            in_specs=in_specs,
            out_specs=(tokens, stats_specs) if return_stats else tokens,
        )
    )


@functools.lru_cache(maxsize=128)  # bounded: it keeps compiled programs alive
def global_call(
    site: Site, mesh: Mesh | AbstractMesh, token_axes: tuple[str, ...], return_stats: bool
):
    def body(x, topk_idx, topk_weights, weights, num_tokens):
        return local_call(
            site, x, topk_idx, topk_weights, weights, num_tokens=num_tokens, return_stats=True
        )

    tokens, experts = P(token_axes), P(site.axis)
    in_specs = (tokens, tokens, tokens, experts, tokens)
    return over_mesh(body, in_specs, site.axis, mesh, token_axes, return_stats)


@jax.named_scope("jax_megamoe")
def local_call(
    site: Site, x, topk_idx, topk_weights, weights, *, num_tokens, return_stats: bool
) -> Any:
    """`MegaMoE.local`."""
    x, topk_idx, topk_weights, num_tokens = _check_local(
        site, x, topk_idx, topk_weights, weights, num_tokens
    )
    leading = topk_idx.shape[:-1]
    x, topk_idx, topk_weights = jax.tree.map(flatten_leading, (x, topk_idx, topk_weights))
    if isinstance(x, tuple):
        x = (quantize.as_bytes(x[0]), quantize.as_bytes(x[1]))
    operands = (x, topk_idx, topk_weights.astype(jnp.float32), num_tokens, weights)
    varying = _varying_axes(operands)
    check(
        site.num_ranks == 1 or not varying or site.axis in _varying_axes(x),
        "x",
        got=f"the same tokens on every rank of axis {site.axis!r}",
        want="every rank's own tokens",
        remedy=f"shard x over {site.axis!r} in in_specs; replicated tokens would be computed once "
        "per rank",
    )
    operands = _vary(operands, varying | {site.axis})
    y, received, status = _differentiable_call(site)(*operands)
    y = y.reshape(*leading, y.shape[-1])
    if not return_stats:
        return y
    return y, MoEStats(received, *(status[word : word + 1] for word in range(status.shape[0])))


def _check_local(site: Site, x, topk_idx, topk_weights, weights, num_tokens):
    config = site.config
    ranks = axis_size(site.axis, "MegaMoE.local")
    check(
        ranks == site.num_ranks,
        f"size of axis {site.axis!r}",
        got=ranks,
        want=f"{site.num_ranks}, as in the layer's mesh",
        remedy="use the layer's mesh in shard_map, or create a layer for this mesh",
    )
    x, topk_idx, topk_weights, num_tokens = map(as_operand, (x, topk_idx, topk_weights, num_tokens))
    leading = check_tokens(x, config, PER_RANK)
    check_rows(int(np.prod(leading)), config)
    check_slots(topk_idx, topk_weights, leading, config, PER_RANK)
    weights_lib.check_weights(weights, config, config.local_experts(ranks), PER_RANK)
    check_layout(weights, site.layout)
    topk_idx = narrow_ids(topk_idx)
    if isinstance(num_tokens, int) and not isinstance(num_tokens, bool):
        num_tokens = np.clip(num_tokens, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
        num_tokens = np.int32(num_tokens)
    if num_tokens is not None:
        check(
            is_array(num_tokens) and num_tokens.size == 1 and num_tokens.dtype == jnp.int32,
            "num_tokens",
            got=describe(num_tokens),
            want="an int32 scalar on each rank",
            remedy="pass this rank's number of tokens, the one that falls to it of those given to "
            "the layer itself",
        )
        num_tokens = jnp.asarray(num_tokens).reshape(1)
    return x, topk_idx, topk_weights, num_tokens


def check_layout(weights: ExpertWeights, layout: str, owner: str = "layer") -> None:
    """Checks that weights are in the layout of a back end; `owner` has the method `shard`."""
    check(
        weights.layout == layout,
        "weights.layout",
        got=repr(weights.layout),
        want=f"{layout!r}, the layout of this back end",
        remedy=f"call {owner}.shard(weights) once, outside the step",
    )


def _varying_axes(tree: Any) -> set[str]:
    axes: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        axes |= set(jax.typeof(leaf).manual_axis_type.varying)
    return axes


def _vary(tree: Any, axes: set[str]) -> Any:
    """Types every array as varying over `axes`.

    ffi_call drops the varying-over-axis type of its operands. Without the cast, out_specs go
    unchecked and gradients come out multiplied by the number of devices. Operands are cast as well,
    outside the custom_vjp, so that cotangents have the operands' type.
    """

    def cast(leaf):
        missing = tuple(sorted(axes - set(jax.typeof(leaf).manual_axis_type.varying)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def _ffi_call(site: Site, x, topk_idx, topk_weights, num_tokens, weights: ExpertWeights):
    """The custom call of one rank -> (y, received, status)."""
    # Operands without elements say "BF16 x", "all rows" and "no biases". They are cut out of x:
    # constants would be hoisted when a scan is differentiated, into a shard_map that uses none of
    # its inputs, and the compiler of jaxlib 0.11.2 crashes on that.
    x = pad_tokens(x, site.config)
    codes, sf = x if isinstance(x, tuple) else (x, x[:0, :0].astype(jnp.uint8))
    if num_tokens is None:
        num_tokens = codes[:0, 0].astype(jnp.int32)
    config = site.config
    local_experts = config.local_experts(site.num_ranks)
    results = (
        jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((local_experts,), jnp.int32),
        jax.ShapeDtypeStruct((native.NUM_STATUS_WORDS,), jnp.int32),
    )
    # Shapes are the same on every rank, and XLA drops calls without elements.
    if codes.shape[0] == 0:
        y, *stats = (jnp.zeros(r.shape, r.dtype) for r in results)
        return y[:, : config.hidden], *stats
    bias = weights.b13 is not None
    shape = moe_shape(config, site.num_ranks, site.backend)
    attributes: dict[str, Any] = {
        "key": site.buffer_key,
        "activation": np.int32(activation_number(config.activation)),
        "activation_params": activation_params(config.activation),
        "granularity": np.int32(granularity_number(config)),
        "timeout_s": np.float64(config.timeout_s),
        "checked": config.checked,
    }
    biases = (weights.b13, weights.b2)
    attributes |= _backends.get(site.backend).call_attributes(config, shape, codes.shape[0], bias)
    if not bias:
        biases = (codes[:0, 0].astype(jnp.float32),) * 2

    @jax.custom_batching.custom_vmap
    def call(*operands):
        return jax.ffi.ffi_call(TARGET, results)(*operands, **attributes)

    @call.def_vmap
    def refuse(*_):
        raise NotImplementedError(
            "jax_megamoe: jax.vmap over MegaMoE: got a batched operand; expected one call for "
            "all of them. Pass the batch as a leading axis of x, topk_idx and topk_weights, with "
            "max_tokens_per_rank large enough for all tokens."
        )

    ep_rank = lax.axis_index(site.axis).reshape(1)
    arrays = (weights.w13, weights.w13_sf, weights.w2, weights.w2_sf, *biases)
    y, *stats = call(codes, sf, topk_idx, topk_weights, num_tokens, ep_rank, *arrays)
    return y[:, : config.hidden], *stats


@functools.lru_cache(maxsize=128)
def _differentiable_call(site: Site):
    """`_ffi_call` with a gradient for x, topk_weights and biases, through the unfused layer.

    Operands: (x, topk_idx, topk_weights, num_tokens or None, weights), all varying over the same
    mesh axes.
    """

    @jax.custom_vjp
    def call(*operands):
        return _vary(_ffi_call(site, *operands), _varying_axes(operands))

    def forward(*operands):
        return call(*operands), operands

    def backward(operands, cotangents):
        x, topk_idx, topk_weights, num_tokens, weights = operands
        if topk_idx.shape[0] == 0:  # It is 0 on every rank, and all gradients are 0.
            dx = None if isinstance(x, tuple) else jnp.zeros_like(x)
            b13, b2 = jax.tree.map(jnp.zeros_like, (weights.b13, weights.b2))
            d_weights = _bias_gradient(weights, b13, b2)
            zeros = (dx, None, jnp.zeros_like(topk_weights), None, d_weights)
            return _vary(zeros, _varying_axes(operands))

        def unfused_layer(x, topk_weights, b13, b2):
            return unfused.local(
                x,
                topk_idx,
                topk_weights,
                dataclasses.replace(weights, b13=b13, b2=b2),
                site.config,
                axis=site.axis,
                num_tokens=num_tokens,
                differentiable=True,
            )

        floats = (topk_weights, weights.b13, weights.b2)
        if isinstance(x, tuple):  # Integer codes have no gradient.
            dx, (_, vjp) = None, jax.vjp(functools.partial(unfused_layer, x), *floats)
            d_topk_weights, b13, b2 = vjp(cotangents[0])
        else:
            _, vjp = jax.vjp(unfused_layer, x, *floats)
            dx, d_topk_weights, b13, b2 = vjp(cotangents[0])
        return dx, None, d_topk_weights, None, _bias_gradient(weights, b13, b2)

    call.defvjp(forward, backward)
    return call


def _bias_gradient(weights: ExpertWeights, b13, b2) -> ExpertWeights | None:
    """The cotangent of weights. FP4 codes have no gradient; None means zeros to JAX."""
    if b13 is None:
        return None
    return ExpertWeights(None, None, None, None, weights.layout, b13, b2)  # type: ignore[arg-type]
