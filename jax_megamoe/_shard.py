"""Weights of all experts, converted to a back end's layout and placed on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import weights as weights_lib
from jax_megamoe._call import Site, reshard_explicit
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.padding import pad_weights
from jax_megamoe.weights import ExpertWeights

__all__ = ["is_traced", "shard_weights"]


def is_traced(tree: Any) -> bool:
    """Whether any leaf of the tree is a tracer."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def shard_weights(weights: ExpertWeights, site: Site, mesh: Mesh | AbstractMesh) -> ExpertWeights:
    """`MegaMoE.shard` of checked weights, which are tracers if the mesh has no devices."""
    operands = site.config, site.layout, mesh, site.axis
    num_layers = weights.num_layers
    if is_traced(weights):
        spec = P(site.axis) if num_layers is None else P(None, site.axis)
        if isinstance(mesh, Mesh):
            weights = jax.device_put(weights, NamedSharding(mesh, spec))
        else:
            (weights,) = reshard_explicit(mesh, (weights,), (spec,))
        return _converter(*operands, num_layers is not None)(weights)
    assert isinstance(mesh, Mesh)
    if num_layers is None:
        return _converter(*operands, False)(_place(weights, site, mesh))
    return _shard_stack(weights, num_layers, site, mesh)


def _place(weights: ExpertWeights, site: Site, mesh: Mesh, where: str = "") -> ExpertWeights:
    """One layer's canonical weights on the devices: each then permutes its own experts only."""
    weights = jax.device_put(weights, NamedSharding(mesh, P(site.axis)))
    weights_lib.check_finite_scales(weights, where)
    # The conversion is jitted, and cannot look at values.
    weights_lib.check_foldable(weights, site.layout, where)
    return weights


def _shard_stack(weights: ExpertWeights, num_layers: int, site: Site, mesh: Mesh) -> ExpertWeights:
    """`shard_weights` of a stack, layer by layer: there is no second stack on the devices."""
    operands = site.config, site.layout, mesh, site.axis
    placed = NamedSharding(mesh, P(site.axis))
    one = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=placed), weights
    )
    shapes = jax.eval_shape(_converter(*operands, False), one)
    stack = _empty_stack(shapes, num_layers, NamedSharding(mesh, P(None, site.axis)))
    for layer_idx in range(num_layers):
        one = jax.tree.map(lambda a, i=layer_idx: a[i], weights)
        one = _place(one, site, mesh, f", layer {layer_idx}")
        stack = _stack_converter(*operands)(stack, one, np.int32(layer_idx))
        jax.block_until_ready(stack)  # The next layer takes memory only then.
    return stack


@functools.lru_cache(maxsize=128)  # bounded: it keeps compiled programs alive
def _converter(
    config: MegaMoEConfig, layout: str, mesh: Mesh | AbstractMesh, axis: str, stacked: bool
) -> Callable[[ExpertWeights], ExpertWeights]:
    """The jitted conversion of placed canonical weights to a back end's layout."""

    def convert(weights):
        return _convert(weights, config, layout)

    def convert_stack(weights):
        return lax.map(convert, weights)

    spec, body = (P(None, axis), convert_stack) if stacked else (P(axis), convert)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


@functools.lru_cache(maxsize=128)  # bounded: it keeps compiled programs alive
def _stack_converter(config: MegaMoEConfig, layout: str, mesh: Mesh, axis: str):
    """The jitted conversion of one layer into its place of a stack, which is donated."""

    def convert(stack, weights, layer_idx):
        one = _convert(weights, config, layout)
        return jax.tree.map(
            lambda all_layers, a: lax.dynamic_update_index_in_dim(all_layers, a, layer_idx, 0),
            stack,
            one,
        )

    specs = (P(None, axis), P(axis), P())
    mapped = jax.shard_map(convert, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.jit(mapped, donate_argnums=0)


def _convert(weights: ExpertWeights, config: MegaMoEConfig, layout: str) -> ExpertWeights:
    return weights_lib.to_layout(pad_weights(weights, config), layout)


def _empty_stack(shapes: ExpertWeights, num_layers: int, sharding: NamedSharding) -> ExpertWeights:
    def zeros(shape):
        return jnp.zeros((num_layers, *shape.shape), shape.dtype, device=sharding)

    return jax.tree.map(zeros, shapes)
