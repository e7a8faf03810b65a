"""The layer: `MegaMoE`, callable under jit on global arrays, and `.local` inside a shard_map."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_megamoe import _backends, quantize
from jax_megamoe import weights as weights_lib
from jax_megamoe._call import (
    MoEStats,
    Site,
    check_layout,
    global_call,
    local_call,
    reshard_explicit,
)
from jax_megamoe._shard import is_traced, shard_weights
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import (
    MegaMoEError,
    check,
    check_array,
    check_bool,
    describe,
    narrow_ids,
    refuse,
    to_int,
)
from jax_megamoe.failures import check_failures
from jax_megamoe.operands import (
    Operand,
    Tokens,
    as_operand,
    check_first_axis,
    check_rows,
    check_slots,
    check_tokens,
)
from jax_megamoe.symmetric import SymmetricBuffer, moe_shape, plan_buffer
from jax_megamoe.weights import ExpertWeights

__all__ = ["MegaMoE", "MoEStats"]


class MegaMoE:
    """An expert-parallel MoE layer: dispatch, linear 1, SwiGLU, linear 2 and combine in one call.

    For token t of a rank, with expert e_k and routing weight p_k of slot k,

        y[t] = sum_k W2[e_k] Q( p_k * act(W1[e_k] Q(x[t]), W3[e_k] Q(x[t])) )

    where act is config.activation, by default ``silu(gate) * up``, and Q rounds to E4M3 with a
    UE8M0 scale per config.activation_granularity elements. Products accumulate in FP32, each slot's
    row is rounded to BF16, rows are summed in FP32 in slot order, and y is rounded to BF16. Weights
    may have biases: those of W1 and W3 are added before act, p_k times that of W2 to its product.

    Args:
      config: shapes and limits.
      mesh: a mesh of devices of one back end, all in this process: (virtual) CPU devices, or GPUs
        with compute capability 9.0 that can access each other's memory. None takes the mesh that
        `jax.set_mesh` has set. An AbstractMesh means devices 0, 1, ... in its order: such a
        layer owns no buffers and can be traced, lowered and exported, but not run.
      axis: the mesh axis that experts are spread over.
      token_axes: mesh axes that tokens are sharded over when the layer is called on global arrays;
        default all of them, in the mesh's order. They have to include `axis`.
      backend: "cpu" or "sm_90a", for an AbstractMesh that does not say what its devices are. A mesh
        of devices knows.

    The layer owns symmetric buffers, shared with other layers of the same shape on the same mesh
    and axis. `close` (or leaving a ``with`` block) gives them up; so does garbage collection.

    Open layers of equal config, mesh, axis and token axes are equal and hash alike: as a static
    argument of `jax.jit` they share a program. A closed layer equals itself alone. `copy.copy` and
    `copy.deepcopy` make another user of the same buffers; pickle is refused.

    Example:
      >>> mesh = jax.make_mesh((8,), ("ep",))
      >>> layer = jax_megamoe.MegaMoE(config, mesh, axis="ep")
      >>> weights = layer.shard(jax_megamoe.quantize_weights(w_gate, w_up, w_down))
      >>> y = jax.jit(layer)(x, topk_idx, topk_weights, weights)
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        mesh: Mesh | AbstractMesh | None = None,
        axis: str = "ep",
        *,
        token_axes: tuple[str, ...] | None = None,
        backend: str | None = None,
    ):
        check(
            isinstance(config, MegaMoEConfig),
            "config",
            got=describe(config),
            want="a jax_megamoe.MegaMoEConfig",
            remedy="build it with MegaMoEConfig(num_experts=..., top_k=..., ...)",
        )
        if mesh is None:
            mesh = _mesh_of_context()
        if isinstance(mesh, AbstractMesh):
            self.backend, key = plan_buffer(config, mesh, axis, backend)
            self._buffer = None
        else:
            self._buffer = SymmetricBuffer.acquire(config, mesh, axis)
            # This also releases the buffer if a check below fails, and when the collector finds
            # the layer. It does not wait: a computation may be in flight then. At exit,
            # `symmetric` releases all buffers in the order that the native module needs.
            self._release = weakref.finalize(self, self._buffer.release)
            self._release.atexit = False
            self.backend, key = self._buffer.backend, self._buffer.key
        self._closed = False
        self.config, self.mesh, self.axis = config, mesh, axis
        if token_axes is None:
            token_axes = mesh.axis_names
        # A name alone is one axis. The check below refuses what is not a sequence of names.
        named = tuple(token_axes) if isinstance(token_axes, (tuple, list)) else (token_axes,)
        self.token_axes: tuple[str, ...] = named  # type: ignore[assignment]
        check(
            axis in self.token_axes and set(self.token_axes) <= set(mesh.axis_names),
            "token_axes",
            got=self.token_axes,
            want=f"axes of the mesh {mesh.axis_names}, {axis!r} among them",
            remedy="tokens must be sharded over the expert-parallel axis: if every rank held the "
            "same tokens, each would be computed once per rank",
        )
        self.num_ranks = mesh.shape[axis]
        check(
            backend in (None, self.backend),
            "backend",
            got=repr(backend),
            want=f"{self.backend!r}, that of the mesh's devices, or None",
            remedy="it is for an AbstractMesh, whose devices are not known",
        )
        self._site = Site(config, self.backend, axis, self.num_ranks, key)

    def __repr__(self) -> str:
        return f"MegaMoE({self.config}, ranks={self.num_ranks}, backend={self.backend!r})"

    @property
    def buffer(self) -> SymmetricBuffer:
        """The symmetric buffers; a layer over an AbstractMesh has none."""
        if self._buffer is None:
            self._refuse_to_run("layer.buffer")
        return self._buffer

    def _refuse_to_run(self, what: str) -> NoReturn:
        refuse(
            what,
            got="a layer over an AbstractMesh, which owns no buffers",
            want="a layer over devices",
            remedy="this one is for jax.export and jax.jit(layer).trace(...) of ShapeDtypeStructs; "
            "create MegaMoE over a mesh of devices to run",
        )

    def check_open(self) -> None:
        """Raises `MegaMoEError` if the layer has been closed. Every call asks when it is traced."""
        check(
            not self._closed,
            "layer",
            got="one that has been closed",
            want="an open one",
            remedy="create MegaMoE again, with the same config, mesh and axis, and keep it open "
            "while programs use it",
        )

    def check_failures(self) -> None:
        """Raises `MegaMoERuntimeError` if a call on GPUs failed and nothing has raised that yet.

        See `jax_megamoe.check_failures`; it looks at the calls of all layers of the process.
        """
        check_failures()

    def warm_up(self, tokens: int | Sequence[int] | None = None, *, bias: bool = False) -> int:
        """Compiles and loads the GPU kernels of calls to come, before the first of them.

        Without it a kernel is compiled when JAX compiles a program that calls the layer, which
        takes seconds; compiled kernels stay on disk, see docs/jax.md. A layer over an AbstractMesh
        puts them there and loads nothing. Loading waits for running kernels.

        Args:
          tokens: numbers of tokens per rank, rows of a shard of x, of these calls. None: all from
            0 to config.max_tokens_per_rank.
          bias: True if the weights have biases.

        Returns:
          How many kernels these calls use, all of them ready now. 0 on CPU, where nothing is
          compiled.

        Raises:
          MegaMoEError: numbers out of range, a closed layer, or a kernel that cannot be compiled.
        """
        self.check_open()
        bias = check_bool(bias, "bias")
        limit = self.config.max_tokens_per_rank
        if tokens is None:
            wanted: Sequence[int] = range(limit + 1)
        else:
            several = isinstance(tokens, Sequence) or getattr(tokens, "ndim", 0) == 1
            given: Any = tokens if several else [tokens]
            numbers = [to_int(number) for number in given]
            wanted = [number for number in numbers if number is not None and 0 <= number <= limit]
            check(
                len(wanted) == len(numbers),
                "tokens",
                got=describe(tokens),
                want=f"ints from 0 to max_tokens_per_rank, {limit}",
                remedy="they count the tokens of one rank: rows of x over the number of token "
                "shards",
            )
        record = _backends.get(self.backend)
        shape = moe_shape(self.config, self.num_ranks, self.backend)
        tiles = record.used_tiles(self.config, shape, wanted)
        try:
            for tile in tiles:
                if self._buffer is not None:
                    self._buffer.prepare(self.config, tile, bias)
                else:
                    record.compile_to_cache(self.config, shape, tile, bias)
        except RuntimeError as error:
            raise MegaMoEError(str(error)) from error
        return len(tiles)

    def close(self) -> None:
        """Gives up the symmetric buffers. Programs that call the layer fail from then on.

        Waits first for what has been dispatched to the mesh's devices and is still referenced.
        """
        if not self._closed and isinstance(self.mesh, Mesh):
            devices = set(self.mesh.devices.flat)
            for array in jax.live_arrays():
                if not array.is_deleted() and devices & array.devices():
                    # Whoever uses the array gets its error.
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        array.block_until_ready()
        self._closed = True
        if self._buffer is not None:
            self._release()  # The finalizer runs once, however often it is called.

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> tuple[Any, ...]:
        return self.config, self.mesh, self.axis, self.token_axes, self.backend

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MegaMoE) or self is other:
            return self is other
        return self._identity() == other._identity() and not (self._closed or other._closed)

    def __hash__(self) -> int:
        return hash(self._identity())

    def __copy__(self) -> MegaMoE:
        self.check_open()
        config, mesh, axis, token_axes, backend = self._identity()
        return MegaMoE(config, mesh, axis, token_axes=token_axes, backend=backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoE:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(
            "pickle of a layer",
            got="a MegaMoE, which owns buffers of this process's devices",
            want="something that another process can have",
            remedy="pickle layer.config, layer.axis and layer.token_axes, and create MegaMoE over "
            "the mesh of the process that loads them",
        )

    def shard(self, weights: ExpertWeights) -> ExpertWeights:
        """Transforms all E experts to the back end's layout and places E/R on each rank.

        Widths that are not multiples of 128 are padded with zeros, and stay so in whatever
        `to_layout` makes of the result.

        Args:
          weights: of one layer, arrays [E, ...]; or of a stack of L layers, [L, E, ...].

        Returns:
          What the layer takes, arrays [E, ...] sharded over the layer's axis; or the stack of
          these, [L, E, ...], which `jax.lax.scan` cuts into what the layer takes. Layers of a stack
          are converted one after the other: beside the stack that is returned, devices hold one
          layer as it was given and what its conversion takes, and what `weights` itself keeps
          there, which for NumPy's arrays is nothing.

        Raises:
          MegaMoEError: shapes or dtypes that do not fit the config, or a closed layer; or, outside
            of jit, a scale byte of 255, which is NaN, or scales that the GPU layout of this
            granularity cannot hold, see `weights.check_foldable`.
        """
        self.check_open()
        weights_lib.check_weights(weights, self.config, self.config.num_experts, stack=True)
        if not isinstance(self.mesh, Mesh) and not is_traced(weights):
            self._refuse_to_run("layer.shard")
        return shard_weights(weights, self._site, self.mesh)

    @overload
    def __call__(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: Operand | None = ...,
        return_stats: Literal[False] = ...,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: Operand | None = ...,
        return_stats: Literal[True],
    ) -> tuple[jax.Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: Operand | None = ...,
        return_stats: bool,
    ) -> jax.Array | tuple[jax.Array, MoEStats]: ...

    def __call__(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: Operand | None = None,
        return_stats: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEStats]:
        """Runs the layer on global arrays; their first axis is sharded over `token_axes`.

        Args:
          x: [..., H] bfloat16, usually [N, H] or [B, S, H]; or a pair (codes [..., H] float8_e4m3fn
            or uint8, sf [..., H/32] uint8 or float8_e8m0fnu) that is already quantised, with equal
            scales within each group of config.activation_granularity (checked outside of jit, where
            values are known, and by kernels on GPUs). The first axis is a multiple of R', the
            product of `token_axes`' sizes, and a shard has at most config.max_tokens_per_rank
            tokens.
          topk_idx: [..., K] int32 or int64 expert ids; -1 leaves a slot out.
          topk_weights: [..., K] float32, bfloat16 or float16 routing weights.
          weights: from `shard`.
          num_tokens: [R'] int32, leading tokens of each shard that are any; default all. A shard's
            tokens count in row-major order of its leading axes. Others are ignored, whatever they
            hold, and come out as zero. Padding in other places, say at the end of each
            sequence, is left out with ids of -1.
          return_stats: also return `MoEStats`.

        Returns:
          y [..., H] bfloat16, shaped and sharded like x; or (y, MoEStats).

        Raises:
          MegaMoEError: at trace time, for operands that are no arrays, shapes, dtypes or layouts
            that do not fit, or a layer that has been closed.
          jax.errors.JaxRuntimeError: at run time, when a wait timed out, num_tokens is out of
            range, the buffers were closed, or (unless checked=False) an expert id is out of range.
          MegaMoERuntimeError: the same on GPUs, where only the closed buffers are known in time;
            see `check_failures`.
        """
        x, topk_idx, topk_weights, num_tokens = map(
            as_operand, (x, topk_idx, topk_weights, num_tokens)
        )
        self.check_open()
        if self._buffer is None and not is_traced((x, topk_idx, topk_weights, weights)):
            self._refuse_to_run("call of the layer")
        self._check(x, topk_idx, topk_weights, weights, num_tokens)
        topk_idx = narrow_ids(topk_idx)
        mesh, token_axes = self.scope()
        tokens, experts = P(token_axes), P(self.axis)
        operands = reshard_explicit(
            mesh,
            (x, topk_idx, topk_weights, weights, num_tokens),
            (tokens, tokens, tokens, experts, tokens),
        )
        return global_call(self._site, mesh, token_axes, bool(return_stats))(*operands)

    def scope(self) -> tuple[Mesh | AbstractMesh, tuple[str, ...]]:
        """(mesh, token axes) of a call on global arrays made here.

        Inside a `jax.shard_map` that is manual over other axes than the layer's, say "data", arrays
        are global over the rest only: the mesh is the context's, and those axes shard no tokens.

        Raises:
          MegaMoEError: the surrounding mesh is not the layer's, or its expert axis is manual.
        """
        context = jax.sharding.get_abstract_mesh()
        manual = set() if context.empty else set(context.manual_axes)
        if not manual:
            return self.mesh, self.token_axes
        check(
            dict(context.shape) == dict(self.mesh.shape),
            "mesh of the surrounding shard_map",
            got=dict(context.shape),
            want=f"{dict(self.mesh.shape)}, the layer's mesh",
            remedy="use one mesh for both",
        )
        check(
            self.axis not in manual,
            "call on global arrays",
            got=f"a shard_map that is manual over {self.axis!r}, where arrays are one rank's",
            want="a place where that axis is not manual",
            remedy="call layer.local there",
        )
        return context, tuple(name for name in self.token_axes if name not in manual)

    def _check(self, x: Any, topk_idx, topk_weights, weights, num_tokens) -> None:
        """Checks the operands of `__call__` as the user sees them: all shards together."""
        mesh, token_axes = self.scope()
        shards = int(np.prod([mesh.shape[name] for name in token_axes]))
        leading = check_tokens(x, self.config)
        check_first_axis(x, leading, shards, self.config)
        check_rows(int(np.prod(leading)) // shards, self.config)
        if isinstance(x, tuple):
            quantize.check_group_scales(x[1], self.config.x_group, "x sf")
        check_slots(topk_idx, topk_weights, leading, self.config)
        if num_tokens is not None:
            remedy = f"one number for each of the {shards} token shards, see MegaMoE.__call__"
            check_array(num_tokens, "num_tokens", (shards,), ("int32",), remedy)
        weights_lib.check_weights(weights, self.config, self.config.num_experts)
        check_layout(weights, self._site.layout)

    @overload
    def local(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: int | Operand | None = ...,
        return_stats: Literal[False] = ...,
    ) -> jax.Array: ...

    @overload
    def local(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: int | Operand | None = ...,
        return_stats: Literal[True],
    ) -> tuple[jax.Array, MoEStats]: ...

    @overload
    def local(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: int | Operand | None = ...,
        return_stats: bool,
    ) -> jax.Array | tuple[jax.Array, MoEStats]: ...

    def local(
        self,
        x: Tokens,
        topk_idx: Operand,
        topk_weights: Operand,
        weights: ExpertWeights,
        *,
        num_tokens: int | Operand | None = None,
        return_stats: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEStats]:
        """One rank's part, for use inside `jax.shard_map` over the layer's mesh.

        Every rank of the axis has to make the call, with tokens or without. Further mesh axes may
        be in use: each place on them is an expert-parallel group of its own.

        Args, Returns, Raises: as `__call__`, with this rank's tokens only: x [..., H] with at most
        config.max_tokens_per_rank of them, weights of E/R experts, num_tokens an int or an int32
        scalar (or [1]), MoEStats of this rank ([E/R] and [1]).
        """
        self.check_open()
        return local_call(
            self._site,
            x,
            topk_idx,
            topk_weights,
            weights,
            num_tokens=num_tokens,
            return_stats=return_stats,
        )


def _mesh_of_context() -> Mesh | AbstractMesh:
    """The mesh that `jax.set_mesh` or `jax.sharding.use_abstract_mesh` has set."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    check(
        not mesh.empty,
        "mesh",
        got="None, and no mesh is set",
        want="a jax.sharding.Mesh, as an argument or set by jax.set_mesh",
        remedy="write `with jax.set_mesh(mesh):` around this, or pass the mesh",
    )
    with contextlib.suppress(ValueError):  # Tracing gives no access to devices.
        concrete = jax.sharding.get_mesh()
        if not concrete.empty:
            mesh = concrete
    return mesh
