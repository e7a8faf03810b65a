"""Whole MoE blocks of published models: router, experts and shared expert, from x to y.

    checkpoint = jax_megamoe.checkpoints.open("/models/DeepSeek-V4-Flash")
    block = jax_megamoe.blocks.MoEBlock.of(checkpoint, mesh, axis="ep", max_tokens_per_rank=4096)
    weights = block.shard(jax_megamoe.blocks.load(checkpoint, layer=3))
    y = jax.jit(block)(x, weights, token_ids=token_ids)

One block serves all layers of a model: their weights are an operand. docs/blocks.md has the
formulas, and for each family what is exact and what is rounded.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import _call, reference
from jax_megamoe.checkpoints import Checkpoint, Progress
from jax_megamoe.checkpoints.families import FAMILY_OF_NAME
from jax_megamoe.config import Activation, MegaMoEConfig
from jax_megamoe.errors import (
    as_array,
    check,
    check_array,
    describe,
    is_array,
    narrow_ids,
    refuse,
    to_float,
)
from jax_megamoe.layer import MegaMoE, MoEStats
from jax_megamoe.operands import PER_RANK, Operand, check_rows, flatten_leading
from jax_megamoe.routers import Router, linear
from jax_megamoe.weights import LAYOUTS, ExpertWeights, check_weights

__all__ = ["BlockWeights", "MoEBlock", "load", "shared_expert"]

_FLOATS = ("bfloat16", "float16", "float32")
#: Name of a router's tensor in files -> its name here.
_ROUTER_PARTS = {"weight": "weight", "bias": "bias", "e_score_correction_bias": "bias"}
_RELOAD = "build it with jax_megamoe.blocks.load"


@functools.partial(
    jax.export.register_namedtuple_serialization, serialized_name="jax_megamoe.BlockWeights"
)
class BlockWeights(NamedTuple):
    """What one MoE block of a model has learned: a pytree.

    Attributes (E experts, H width of x, S width of the shared expert):
      experts: FP4, sharded over the expert-parallel axis after `MoEBlock.shard`, with biases in
        gpt-oss. They work on H channels, or on the L of the latent.
      router: "weight" [E, H] bfloat16, float16 or float32, and what the model has of "bias" [E] and
        "tid2eid" [vocabulary, K] int32 (hash layers of DeepSeek-V4).
      shared: the shared expert, "gate" [S, H], "up" [S, H], "down" [H, S] of a dtype that "weight"
        may have, and "token_gate" [1, H] if the model has it. None or {} for a model without.
      latent: "down" [L, H] and "up" [H, L] around Kimi-K3's experts, and "norm" [L]. None or {} for
        the others.

    A stack of layers, for `jax.lax.scan`, has an axis of layers in front in every array.
    """

    experts: ExpertWeights
    router: dict[str, jax.Array]
    shared: dict[str, jax.Array] | None = None
    latent: dict[str, jax.Array] | None = None


def load(
    checkpoint: Checkpoint,
    layer: int,
    *,
    experts: Sequence[int] | None = None,
    requantize: bool = False,
    progress: bool | Progress = False,
) -> BlockWeights:
    """Reads one layer's block into host memory, for `MoEBlock.shard`.

    Args:
      checkpoint: from `checkpoints.open`.
      layer: one of checkpoint.layers.
      experts, requantize, progress: see `Checkpoint.experts`.

    Returns:
      `BlockWeights` of numpy arrays, experts in canonical layout.

    Raises:
      MegaMoEError: see `Checkpoint.experts`, `router`, `shared_expert` and `latent`; a router that
        has a table and a bias, or a table where config.json has none, or one that names experts
        which do not exist.
    """
    _check_checkpoint(checkpoint)
    tensors = checkpoint.router(layer)
    table = tensors.pop("tid2eid", None)
    router = {_ROUTER_PARTS[name]: array for name, array in tensors.items()}
    num_hash_layers = checkpoint.model_config.get("num_hash_layers", layer + (table is not None))
    check(
        (table is not None) == (layer < num_hash_layers),
        f"router of layer {layer} in {checkpoint.path}",
        got=f"{sorted(tensors)}" + ("" if table is None else " and tid2eid"),
        want=f"tid2eid in the first {num_hash_layers} layers, as config.json says, and only there",
        remedy="config.json and the weights are of different models or revisions",
    )
    if table is not None:
        where = f"tid2eid of layer {layer} in {checkpoint.path}"
        num_experts = router["weight"].shape[0]
        check(
            "bias" not in router,
            where,
            got="a bias as well",
            want="a table or a bias: either experts are looked up, or they are chosen",
            remedy="look at this layer's tensors; docs/routers.md says what the two are for",
        )
        check(
            bool(np.all((table >= -1) & (table < num_experts))),
            where,
            got=f"numbers from {table.min()} to {table.max()}",
            want=f"experts 0 to {num_experts - 1}, or -1",
            remedy="config.json and the weights are of different models or revisions",
        )
        router["tid2eid"] = table.astype(np.int32)
    return BlockWeights(
        checkpoint.experts(layer, experts, requantize=requantize, progress=progress),
        router,  # type: ignore[arg-type]  # host arrays
        checkpoint.shared_expert(layer),  # type: ignore[arg-type]
        checkpoint.latent(layer),  # type: ignore[arg-type]
    )


def shared_expert(x: jax.Array, shared: dict[str, jax.Array], activation: Activation) -> jax.Array:
    """The dense expert that every token passes: ``down act(gate x, up x)``, in plain JAX.

        y = down act(gate x, up x), times sigmoid(token_gate x) if there is a token_gate

    Args:
      x: [..., H] bfloat16.
      shared: see `BlockWeights`.
      activation: act, what the model has between the two products.

    Returns:
      [..., H] float32. Products are those of `routers.linear`; between them the activation is FP32,
      and its result is rounded to bfloat16.

    Source: DeepSeek-V3, inference/model.py, class MoE; token_gate is that of transformers,
    models/qwen2_moe, class Qwen2MoeSparseMoeBlock.
    """
    check(
        isinstance(activation, Activation),
        "activation",
        got=describe(activation),
        want="a jax_megamoe.Activation",
        remedy="use jax_megamoe.swiglu, gpt_oss_swiglu or situ",
    )
    _check_dict("shared", shared, allow_none=False)
    _check_names("shared", set(shared), {"gate", "up", "down"}, {"token_gate"})
    width = tuple(getattr(shared["gate"], "shape", ("H",)))[-1]
    remedy = "x is as wide as the rows of gate and up"
    check_array(x, "x", ("...", width), ("bfloat16",), remedy)
    leading, x = x.shape[:-1], flatten_leading(x)
    gate_up = jnp.concatenate([linear(x, shared["gate"]), linear(x, shared["up"])], axis=1)
    acts = reference.activate(gate_up, jnp.ones(x.shape[:1], jnp.float32), activation)
    y = linear(acts.astype(jnp.bfloat16), shared["down"])
    if "token_gate" in shared:
        y = y * jax.nn.sigmoid(linear(x, shared["token_gate"]))
    return y.reshape(*leading, y.shape[-1])


class MoEBlock:
    """A model's MoE block: router, `MegaMoE` and shared expert.

        y = sum_k w_k expert[idx_k](x) + shared(x),    idx, w = router(x)

    or, with a latent,

        y = up norm(sum_k w_k expert[idx_k](down x)) + shared(x)
        norm(z) = z / sqrt(mean(z^2) + norm_eps) * weight

    The sum over k is that of `MegaMoE`, rounded to bfloat16; down x and norm(..) are rounded to
    bfloat16 too; the shared expert is added in FP32, and y is rounded to bfloat16. All but the
    experts works on each device's own tokens, with weights that every device has: there is no
    communication beside that of the layer.

    Args:
      config: shapes and limits of the layer; its hidden is the latent's width if there is one.
      router: makes topk_idx and topk_weights; its top_k has to be that of the config.
      mesh, axis, token_axes, backend: see `MegaMoE`.
      shared_activation: the shared expert's activation; None takes config.activation.
      norm_eps: of the latent's norm.

    Attributes:
      layer: the `MegaMoE`, for `check_failures`. Its buffers are given up by `close`, at the end
        of a ``with`` block, or by garbage collection.

    Blocks of equal layers, routers, activations and norm_eps are equal; `copy.copy` and
    `copy.deepcopy` make another user of the same buffers, and pickle is refused: as with `MegaMoE`.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        router: Router,
        mesh: Mesh | AbstractMesh | None = None,
        axis: str = "ep",
        *,
        token_axes: tuple[str, ...] | None = None,
        backend: str | None = None,
        shared_activation: Activation | None = None,
        norm_eps: float = 1e-6,
    ):
        check(
            isinstance(config, MegaMoEConfig),
            "config",
            got=describe(config),
            want="a jax_megamoe.MegaMoEConfig",
            remedy="MoEBlock.of makes it from a checkpoint",
        )
        check(
            isinstance(router, Router),
            "router",
            got=describe(router),
            want="a jax_megamoe.routers.Router",
            remedy="the functions of jax_megamoe.routers make the routers of known models",
        )
        check(
            router.top_k == config.top_k,
            "router.top_k",
            got=router.top_k,
            want=f"{config.top_k}, as in the config",
            remedy="both are the model's number of experts per token",
        )
        check(
            shared_activation is None or isinstance(shared_activation, Activation),
            "shared_activation",
            got=describe(shared_activation),
            want="a jax_megamoe.Activation, or None for that of the config",
            remedy="use jax_megamoe.swiglu, gpt_oss_swiglu or situ",
        )
        eps = to_float(norm_eps)
        if eps is None or not 1e-30 <= eps <= 1e30:
            refuse(
                "norm_eps",
                got=repr(norm_eps),
                want="a number from 1e-30 to 1e30: it is an FP32 number",
                remedy="pass the model's rms_norm_eps",
            )
        self.config, self.router = config, router
        self.shared_activation = shared_activation or config.activation
        self.layer = MegaMoE(config, mesh, axis, token_axes=token_axes, backend=backend)
        self._site = _Site(self.layer._site, router, self.shared_activation, eps)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        mesh: Mesh | AbstractMesh | None = None,
        axis: str = "ep",
        *,
        max_tokens_per_rank: int,
        token_axes: tuple[str, ...] | None = None,
        backend: str | None = None,
        shared_activation: Activation | None = None,
        **config: Any,
    ) -> MoEBlock:
        """The block of a checkpoint's model, for all of its layers; their weights are not read.

        Args:
          checkpoint: from `checkpoints.open`.
          mesh, axis, token_axes, backend: see `MegaMoE`.
          max_tokens_per_rank: see `MegaMoEConfig`.
          shared_activation: see `MoEBlock`. DeepSeek-V4-Flash's first release did not clamp in the
            shared expert: for that one pass ``swiglu()``.
          config: further fields of `MegaMoEConfig`, such as activation_granularity.

        Raises:
          MegaMoEError: an activation that `MegaMoE` does not compute, config.json of another model,
            or one without an entry that is needed.
        """
        _check_checkpoint(checkpoint)
        fields = {
            **checkpoint.config(checkpoint.layers[0]),
            "max_tokens_per_rank": max_tokens_per_rank,
            **config,
        }
        options = FAMILY_OF_NAME[checkpoint.family].block_options(checkpoint.model_config)
        return cls(
            MegaMoEConfig(**fields),
            checkpoint.make_router(),
            mesh,
            axis,
            token_axes=token_axes,
            backend=backend,
            shared_activation=shared_activation,
            **options,
        )

    def __repr__(self) -> str:
        return f"MoEBlock({self.router}, {self.layer})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MoEBlock):
            return False
        return self._site == other._site and self.layer == other.layer

    def __hash__(self) -> int:
        return hash((self._site, self.layer))

    def __copy__(self) -> MoEBlock:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)  # Everything but the layer is immutable.
        twin.layer = copy.copy(self.layer)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEBlock:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(
            "pickle of a block",
            got="a MoEBlock, whose layer owns buffers of this process's devices",
            want="something that another process can have",
            remedy="pickle block.config and block.router, and create MoEBlock over the mesh of the "
            "process that loads them; weights are arrays, which can be saved",
        )

    def warm_up(self, tokens: int | Sequence[int] | None = None, *, bias: bool = False) -> int:
        """Compiles and loads the GPU kernels of calls to come, see `MegaMoE.warm_up`."""
        return self.layer.warm_up(tokens, bias=bias)

    def close(self) -> None:
        """Gives up the layer's buffers, see `MegaMoE.close`."""
        self.layer.close()

    def __enter__(self) -> MoEBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shard(self, weights: BlockWeights) -> BlockWeights:
        """Places a block's weights: E/R experts on each rank, router and shared expert on all.

        Args:
          weights: of one layer; or a stack, every array with an axis of L layers in front, for
            `jax.lax.scan`. Its layers have the same parts: those of DeepSeek-V4 with a table of
            experts make a stack of their own.

        Raises:
          MegaMoEError: shapes or dtypes that do not fit the config; see `MegaMoE.shard` too.
        """
        _check_weights(weights, self.config, stack=True)
        experts = self.layer.shard(weights.experts)
        if not isinstance(self.layer.mesh, Mesh):
            return BlockWeights(experts, *weights[1:])
        replicated = NamedSharding(self.layer.mesh, P())
        return BlockWeights(experts, *jax.device_put(weights[1:], replicated))

    @overload
    def __call__(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: Literal[False] = ...,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: Literal[True],
    ) -> tuple[jax.Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: bool,
    ) -> jax.Array | tuple[jax.Array, MoEStats]: ...

    def __call__(
        self,
        x: Any,
        weights: BlockWeights,
        *,
        token_ids: Any = None,
        mask: Any = None,
        return_stats: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEStats]:
        """Runs the block on global arrays; their first axis is sharded over `token_axes`.

        Args:
          x: [..., H] bfloat16, usually [N, H] or [B, S, H]; the first axis is a multiple of R', the
            product of `token_axes`' sizes, and a shard has at most config.max_tokens_per_rank
            tokens.
          weights: from `shard`.
          token_ids: [...] int32 or int64; hash layers of DeepSeek-V4 need them, others ignore them.
          mask: [...] bool, False for padding: such rows of y are 0, whatever x holds there.
          return_stats: also return `MoEStats`.

        Returns:
          y [..., H] bfloat16, shaped and sharded like x; or (y, MoEStats). Gradients exist with
          respect to x and to the floating-point arrays in weights.

        Raises:
          MegaMoEError: at trace time, for operands that are no arrays, for shapes, dtypes or
            layouts that do not fit, or a hash layer without token_ids.
          Others at run time, see `MegaMoE.__call__`.
        """
        layer = self.layer
        layer.check_open()
        mesh, token_axes = layer.scope()
        shards = int(np.prod([mesh.shape[name] for name in token_axes]))
        x, token_ids, mask = map(as_array, (x, token_ids, mask))
        _check_weights(weights, self.config)
        _check_x(x, weights)
        check(
            x.shape[0] % shards == 0,
            "x",
            got=describe(x),
            want=f"a first axis that is a multiple of {shards} token shards",
            remedy="add rows, and a mask that is False for them",
        )
        _check_others(x.shape[:-1], token_ids, mask)
        check_weights(weights.experts, self.config, self.config.num_experts)
        _call.check_layout(weights.experts, self._site.layer.layout, "block")
        check_rows(int(np.prod(x.shape[:-1])) // shards, self.config)
        tokens = P(token_axes)
        specs = _specs(layer.axis, token_axes)
        operands = _call.reshard_explicit(
            mesh,
            (
                x,
                *weights,
                *(a if a is None else jnp.asarray(narrow_ids(a)) for a in (token_ids, mask)),
            ),
            (tokens, *specs[1], tokens, tokens),
        )
        x, *parts, token_ids, mask = operands
        call = _global_call(self._site, mesh, token_axes, bool(return_stats))
        return call(x, BlockWeights(*parts), token_ids, mask)

    @overload
    def local(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: Literal[False] = ...,
    ) -> jax.Array: ...

    @overload
    def local(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: Literal[True],
    ) -> tuple[jax.Array, MoEStats]: ...

    @overload
    def local(
        self,
        x: Operand,
        weights: BlockWeights,
        *,
        token_ids: Operand | None = ...,
        mask: Operand | None = ...,
        return_stats: bool,
    ) -> jax.Array | tuple[jax.Array, MoEStats]: ...

    def local(
        self,
        x: Any,
        weights: BlockWeights,
        *,
        token_ids: Any = None,
        mask: Any = None,
        return_stats: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEStats]:
        """One rank's part, for use inside `jax.shard_map` over the block's mesh.

        Args, Returns, Raises: as `__call__` for this rank's tokens only, weights.experts with E/R
        experts, router and shared expert whole; see `MegaMoE.local` too.
        """
        self.layer.check_open()
        y, stats = _local_call(self._site, x, weights, token_ids, mask)
        return (y, stats) if return_stats else y


class _Site(NamedTuple):
    """What a call needs to know about its block; static and hashable."""

    layer: _call.Site
    router: Router
    shared_activation: Activation
    norm_eps: float


def _specs(axis: str, token_axes: tuple[str, ...]) -> tuple[Any, ...]:
    """PartitionSpecs of (x, weights, token_ids, mask)."""
    tokens = P(token_axes)
    weights: Any = BlockWeights(P(axis), P(), P(), P())  # type: ignore[arg-type]
    return tokens, weights, tokens, tokens


@functools.lru_cache(maxsize=128)  # bounded: it keeps compiled programs alive
def _global_call(
    site: _Site, mesh: Mesh | AbstractMesh, token_axes: tuple[str, ...], return_stats: bool
):
    axis = site.layer.axis
    local = functools.partial(_local_call, site)
    specs = _specs(axis, token_axes)
    return _call.over_mesh(local, specs, axis, mesh, token_axes, return_stats)


def _local_call(site: _Site, x, weights: BlockWeights, token_ids, mask):
    """One rank's (y, `MoEStats`)."""
    x, token_ids, mask = map(as_array, (x, token_ids, mask))
    _check_weights(weights, site.layer.config)
    _check_x(x, weights, PER_RANK)
    _check_others(x.shape[:-1], token_ids, mask, PER_RANK)
    leading, x = x.shape[:-1], flatten_leading(x)
    token_ids, mask = (a if a is None else a.reshape(x.shape[0]) for a in (token_ids, mask))
    router, shared, latent = weights.router, weights.shared, weights.latent or {}
    table = router.get("tid2eid")
    check(
        table is None or token_ids is not None,
        "token_ids",
        got="None",
        want=f"int32 or int64 {list(leading)}: the experts of this layer are looked up by token",
        remedy="pass the ids of the tokens, in the order of the rows of x",
    )
    topk_idx, topk_weights = site.router(
        x,
        router["weight"],
        router.get("bias"),
        tid2eid=table,
        token_ids=None if table is None else token_ids,
        mask=mask,
    )
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)  # The shared expert maps zeros to zeros.
    rows = linear(x, latent["down"]).astype(jnp.bfloat16) if latent else x
    y, stats = _call.local_call(
        site.layer,
        rows,
        topk_idx,
        topk_weights,
        weights.experts,
        num_tokens=None,
        return_stats=True,
    )
    if "norm" in latent:
        z = y.astype(jnp.float32)
        z = z * jax.lax.rsqrt(jnp.mean(z * z, axis=1, keepdims=True) + site.norm_eps)
        y = (z * latent["norm"].astype(jnp.float32)).astype(jnp.bfloat16)
    if latent:
        y = linear(y, latent["up"])
    if shared:
        y = y.astype(jnp.float32) + shared_expert(x, shared, site.shared_activation)
    return y.astype(jnp.bfloat16).reshape(*leading, y.shape[-1]), stats


def _check_checkpoint(checkpoint: object) -> None:
    check(
        isinstance(checkpoint, Checkpoint),
        "checkpoint",
        got=describe(checkpoint),
        want="a jax_megamoe.checkpoints.Checkpoint",
        remedy="open a directory with jax_megamoe.checkpoints.open(path)",
    )


def _check_x(x, weights: BlockWeights, where: str = "") -> None:
    width = _width(weights)
    remedy = f"the block's weights are those of a model with {width} channels, along x's last axis"
    check_array(x, "x", ("...", width), ("bfloat16",), remedy, where=where)


def _check_others(leading: tuple[int, ...], token_ids, mask, where: str = "") -> None:
    """Checks what else a call has for each token."""
    if token_ids is not None:
        remedy = "one id for each token of x"
        check_array(token_ids, "token_ids", leading, ("int32", "int64"), remedy, where=where)
    if mask is not None:
        remedy = "one for each token of x: True for tokens, False for padding"
        check_array(mask, "mask", leading, ("bool",), remedy, cast=remedy, where=where)


def _check_dict(operand: str, value: object, *, allow_none: bool) -> None:
    check(
        isinstance(value, dict) or (value is None and allow_none),
        operand,
        got=describe(value),
        want="a dict of arrays, see jax_megamoe.blocks.BlockWeights",
        remedy=_RELOAD,
    )


def _check_weights(weights: BlockWeights, config: MegaMoEConfig, *, stack: bool = False) -> None:
    """Checks everything but the experts, which the layer checks; or a stack of layers of that."""
    check(
        isinstance(weights, BlockWeights),
        "weights",
        got=describe(weights),
        want="a jax_megamoe.blocks.BlockWeights",
        remedy=_RELOAD,
    )
    check(
        isinstance(weights.experts, ExpertWeights),
        "weights.experts",
        got=describe(weights.experts),
        want="jax_megamoe.ExpertWeights",
        remedy=_RELOAD,
    )
    layers = _layers(weights.experts)
    check(
        stack or not layers,
        "weights",
        got=f"a stack of {layers[0] if layers else 0} layers",
        want="the weights of one layer",
        remedy="jax.lax.scan over the stack hands on one layer at a time; jax.tree.map(lambda a: "
        "a[i], weights) is layer i",
    )
    for name in ("router", "shared", "latent"):
        value = getattr(weights, name)
        _check_dict(f"weights.{name}", value, allow_none=name != "router")

    def check_part(part: str, name: str, *shape: object) -> None:
        array, shape = getattr(weights, part)[name], (*layers, *shape)
        remedy = _RELOAD
        if layers:
            remedy += f"; in a stack each array has the axis of {layers[0]} layers in front"
        check_array(array, f"weights.{part}[{name!r}]", shape, _FLOATS, remedy)

    router, shared, latent = weights.router, weights.shared, weights.latent or {}
    num_experts, hidden = config.num_experts, config.hidden
    if latent:
        _check_names("weights.latent", set(latent), {"down", "up"}, {"norm"})
        check_part("latent", "down", hidden, "H")
        hidden = _width(weights)
        check_part("latent", "up", hidden, config.hidden)
    if "norm" in latent:
        check_part("latent", "norm", config.hidden)
    _check_names("weights.router", set(router), {"weight"}, {"bias", "tid2eid"})
    check_part("router", "weight", num_experts, hidden)
    if shared:
        _check_names("weights.shared", set(shared), {"gate", "up", "down"}, {"token_gate"})
        width = tuple(getattr(shared["gate"], "shape", ()))[-2:-1] or ("S",)
        shapes = {
            "gate": ("S", hidden),
            "up": (*width, hidden),
            "down": (hidden, *width),
            "token_gate": (1, hidden),
        }
        for name in shared:
            check_part("shared", name, *shapes[name])
    if layers:  # The router checks one layer when it is called.
        remedy = f"in a stack each array has the axis of {layers[0]} layers in front"
        if "bias" in router:
            bias_shape = (*layers, num_experts)
            check_array(router["bias"], "weights.router['bias']", bias_shape, _FLOATS, remedy)
        if "tid2eid" in router:
            shape, ints = (*layers, "vocabulary", config.top_k), ("int32", "int64")
            check_array(router["tid2eid"], "weights.router['tid2eid']", shape, ints, remedy)


def _layers(experts: ExpertWeights) -> tuple[int, ...]:
    """(L,) for a stack of L layers, () for one layer, whatever else may be wrong."""
    is_stack = (
        is_array(experts.w13) and experts.layout in LAYOUTS and experts.num_layers is not None
    )
    return experts.w13.shape[:1] if is_stack else ()


def _width(weights: BlockWeights) -> int:
    """Channels of x."""
    return (weights.latent or {}).get("down", weights.router["weight"]).shape[-1]


def _check_names(operand: str, names: set[str], needed: set[str], allowed: set[str]) -> None:
    check(
        needed <= names <= needed | allowed,
        operand,
        got=sorted(names),
        want=f"{sorted(needed)}, and perhaps {sorted(allowed)}",
        remedy=_RELOAD,
    )
