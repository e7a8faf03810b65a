"""Back ends, one record each: everything in which they differ, and their registry.

The rest of the package asks a record and never compares names, so a back end is added by writing
one and passing it to `register`. `tests/test_backends.py` does so with a third one, and looks
through the package for comparisons.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_megamoe._ffi import (
    TARGET,
    activation_number,
    granularity_number,
    native,
)
from jax_megamoe._headers import include_dir
from jax_megamoe._nvrtc import nvrtc_path
from jax_megamoe.config import SF_GROUP, MegaMoEConfig
from jax_megamoe.errors import check, refuse
from jax_megamoe.failures import listen
from jax_megamoe.virtual_devices import warn_if_short_of_threads

__all__ = [
    "CPU",
    "SM_90A",
    "UNSUPPORTED",
    "Backend",
    "CpuBackend",
    "GpuBackend",
    "abstract_backend",
    "all_backends",
    "device_backend",
    "get",
    "mesh_backend",
    "names",
    "register",
]

#: Architectures that users may ask for by name, and that no record is for.
UNSUPPORTED = ("sm_100a",)


@dataclasses.dataclass(frozen=True)
class Backend(abc.ABC):
    """One back end.

    Attributes:
      name: what users call it, and what `MegaMoE.backend` is.
      platforms: the platforms of its devices, as JAX names them; the first is the one to ask for.
      ffi_platform: the platform that XLA registers handlers for.
      handlers: makes the handlers. Back ends of one platform share them.
      device_kinds: parts of the names of its devices; an AbstractMesh's back end is found by them.
      layouts: activation granularity -> name of the weights' layout, one of `weights.LAYOUTS`.
      capability: the compute capability that its devices must have; None if there is no such thing.
    """

    name: str
    platforms: tuple[str, ...]
    ffi_platform: str
    handlers: Callable[[], dict[str, Any]]
    device_kinds: tuple[str, ...]
    layouts: Mapping[int | str, str] = dataclasses.field(hash=False)
    capability: str | None = None

    def layout(self, config: MegaMoEConfig) -> str:
        """Name of the weights' layout."""
        return self.layouts[config.activation_granularity]

    # Buffers

    @abc.abstractmethod
    def shape(self, config: MegaMoEConfig, sizes: dict[str, int]) -> native.MoeShape:
        """The native shape; `sizes` are the arguments of `native.MoeShape.make`."""

    @abc.abstractmethod
    def key_parts(self, config: MegaMoEConfig) -> list[Any]:
        """What a buffer's key names beside its shape and devices, the back end's name first.

        Programs carry keys: what this returns must not change.
        """

    @abc.abstractmethod
    def prepare_devices(self, num_devices: int) -> None:
        """Called before a mesh of that many devices gets a buffer."""

    @abc.abstractmethod
    def workers_per_rank(self, num_ranks: int) -> int:
        """Threads of the host that compute for one of all `num_ranks` ranks."""

    @abc.abstractmethod
    def create_buffer(
        self,
        key: str,
        shape: native.MoeShape,
        config: MegaMoEConfig,
        groups: list[list[int]],
        workers: int,
    ) -> None:
        """Creates the buffers of all ranks in the native module's registry.

        Raises:
          MemoryError: not enough memory.
          RuntimeError: what the native module finds wrong with the devices.
        """

    # Calls

    @abc.abstractmethod
    def call_attributes(
        self, config: MegaMoEConfig, shape: native.MoeShape, rows: int, bias: bool
    ) -> dict[str, Any]:
        """Attributes of the custom call that only this back end's handlers take."""

    # Kernels that are compiled at run time. A back end without any has no tiles.

    @abc.abstractmethod
    def tiles(self, config: MegaMoEConfig) -> list[dict[str, Any]]:
        """All tiles of the config's granularity, each with at least "block_m"."""

    @abc.abstractmethod
    def select_tile(self, config: MegaMoEConfig, shape: native.MoeShape, rows: int) -> int:
        """Number of the tile of a call with that many tokens per rank."""

    @abc.abstractmethod
    def kernel_options(
        self,
        config: MegaMoEConfig,
        shape: native.MoeShape,
        tile: int,
        bias: bool,
        activation: str = "",
    ) -> list[str]:
        """The compiler's options for one kernel; `activation` replaces the kind of the config's."""

    @abc.abstractmethod
    def load_kernel(self, key: str, config: MegaMoEConfig, tile: int, bias: bool) -> None:
        """Compiles and loads the kernel of one tile for a buffer, unless it is there."""

    # What users read

    @abc.abstractmethod
    def availability(self, num_devices: int) -> str:
        """What `info` says of a process that has `num_devices` devices of this back end."""

    @property
    @abc.abstractmethod
    def nothing_to_compile(self) -> str:
        """Why `compile` has nothing to do; empty if it has."""

    def used_tiles(
        self, config: MegaMoEConfig, shape: native.MoeShape, rows: Iterable[int]
    ) -> list[int]:
        """Numbers of the tiles that calls with these numbers of tokens per rank use."""
        if self.nothing_to_compile:
            return []
        return sorted({self.select_tile(config, shape, one) for one in rows})

    def compile_to_cache(
        self, config: MegaMoEConfig, shape: native.MoeShape, tile: int, bias: bool
    ) -> None:
        """Compiles the kernel of one tile to where buffers of this shape find it."""
        options = self.kernel_options(config, shape, tile, bias)
        native.compile_kernel(str(include_dir()), options, nvrtc_path())


@dataclasses.dataclass(frozen=True)
class CpuBackend(Backend):
    """Threads of this process on (virtual) CPU devices; nothing is compiled at run time."""

    def shape(self, config, sizes):
        return native.MoeShape.make(**sizes)

    def key_parts(self, config):
        return []  # all granularities share a buffer

    def prepare_devices(self, num_devices):
        warn_if_short_of_threads(num_devices)

    def workers_per_rank(self, num_ranks):
        """Math threads of one rank; JAX_MEGAMOE_CPU_WORKERS overrides the share of the cores."""
        setting = os.environ.get("JAX_MEGAMOE_CPU_WORKERS", "")
        check(
            setting == "" or (setting.isdigit() and int(setting) > 0),
            "environment variable JAX_MEGAMOE_CPU_WORKERS",
            got=repr(setting),
            want="a positive integer or nothing",
            remedy="it sets the number of math threads per rank; unset it to share the cores",
        )
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:  # not on every operating system
            cores = os.cpu_count() or 1
        return int(setting) if setting else max(1, cores // num_ranks)

    def create_buffer(self, key, shape, config, groups, workers):
        self._check_isa()
        native.create_buffer(key, shape, groups, workers)

    def _check_isa(self) -> None:
        setting = os.environ.get("JAX_MEGAMOE_CPU_ISA", "")
        supported = native.cpu_isas()
        check(
            setting in ("", *supported),
            "environment variable JAX_MEGAMOE_CPU_ISA",
            got=repr(setting),
            want=f"one of {supported}, which this processor has, or nothing",
            remedy="unset it to use the last of them",
        )

    def call_attributes(self, config, shape, rows, bias):
        return {}

    def tiles(self, config):
        return []

    def select_tile(self, config, shape, rows):
        raise self._no_kernels()

    def kernel_options(self, config, shape, tile, bias, activation=""):
        raise self._no_kernels()

    def load_kernel(self, key, config, tile, bias):
        raise self._no_kernels()

    def _no_kernels(self) -> AssertionError:
        return AssertionError(f"back end {self.name} compiles no kernels")

    def availability(self, num_devices):
        return "available"

    @property
    def nothing_to_compile(self):
        return (
            "nothing to compile. The native module holds loops for several instruction sets and "
            "picks among them when it runs."
        )


@dataclasses.dataclass(frozen=True)
class GpuBackend(Backend):
    """Kernels of one GPU architecture, compiled at run time.

    The native module's functions `gpu_*` hold the kernels of one architecture, sm_90a. The record
    of a second one says how its own are reached by overriding the methods that call them.
    """

    def shape(self, config, sizes):
        return native.gpu_shape(granularity=granularity_number(config), **sizes)

    def key_parts(self, config):
        return [self.name, granularity_number(config)]  # a buffer also belongs to kernels

    def prepare_devices(self, num_devices):
        listen()

    def workers_per_rank(self, num_ranks):
        return 0

    def create_buffer(self, key, shape, config, groups, workers):
        granularity = granularity_number(config)
        headers = str(include_dir())
        native.create_gpu_buffer(key, shape, granularity, groups, headers, nvrtc_path())

    def call_attributes(self, config, shape, rows, bias):
        # Part of the program, so that compiling the program compiles the kernel.
        return {"tile": np.int32(self.select_tile(config, shape, rows)), "bias": bias}

    def tiles(self, config):
        return native.gpu_tiles(granularity_number(config))

    def select_tile(self, config, shape, rows):
        return native.gpu_select_tile(shape, granularity_number(config), rows)

    def kernel_options(self, config, shape, tile, bias, activation=""):
        kind = native.ACTIVATIONS.index(activation or config.activation.kind)
        granularity = granularity_number(config)
        return native.gpu_kernel_options(shape, granularity, tile, activation=kind, bias=bias)

    def load_kernel(self, key, config, tile, bias):
        native.prepare_gpu_kernel(key, tile, activation_number(config.activation), bias)

    def availability(self, num_devices):
        return f"available on {num_devices} of the devices" if num_devices else "no GPU for it here"

    @property
    def nothing_to_compile(self):
        return ""


_REGISTRY: dict[str, Backend] = {}
#: XLA's platform -> what made the handlers registered for it.
_HANDLERS: dict[str, Callable[[], dict[str, Any]]] = {}


def register(backend: Backend) -> Backend:
    """Makes a back end known to the package, and its handlers to XLA; returns it."""
    assert backend.name not in _REGISTRY, backend.name
    makes = _HANDLERS.setdefault(backend.ffi_platform, backend.handlers)
    assert makes is backend.handlers, f"two kinds of handlers for {backend.ffi_platform}"
    _REGISTRY[backend.name] = backend
    jax.ffi.register_ffi_target(TARGET, makes(), platform=backend.ffi_platform)
    return backend


# At import, so that a program from `jax.export` or a cache finds the handlers before any layer
# exists. JAX keeps them until its back ends start; CUDA's may never.
CPU = register(
    CpuBackend(
        name="cpu",
        platforms=("cpu",),
        ffi_platform="cpu",
        handlers=native.cpu_ffi_handlers,
        device_kinds=("cpu",),
        layouts={SF_GROUP: "cpu", 128: "cpu", "row": "cpu"},
    )
)
SM_90A = register(
    GpuBackend(
        name="sm_90a",
        platforms=("gpu", "cuda"),
        ffi_platform="CUDA",
        handlers=native.gpu_ffi_handlers,
        device_kinds=("H100", "H200", "GH200"),
        layouts={SF_GROUP: "sm90_bf16", 128: "sm90_fp8", "row": "sm90_fp8"},
        capability="9.0",
    )
)


def names() -> tuple[str, ...]:
    """Names of all back ends."""
    return tuple(_REGISTRY)


def all_backends() -> tuple[Backend, ...]:
    """All back ends."""
    return tuple(_REGISTRY.values())


def get(name: str) -> Backend:
    """The back end of that name, which has been checked."""
    return _REGISTRY[name]


def _platforms(join: str) -> str:
    """Calls of jax.devices that give devices of any back end."""
    return join.join(f"jax.devices({one!r})" for one in _platform_names())


def _platform_names() -> Sequence[str]:
    return list(dict.fromkeys(backend.platforms[0] for backend in all_backends()))


def mesh_backend(mesh: Mesh) -> str:
    """Name of the back end for all devices of a mesh, or a clear refusal."""
    found = {device_backend(device) for device in mesh.devices.flat}
    check(
        len(found) == 1,
        "mesh devices",
        got=f"back ends {sorted(found)}",
        want="devices of one kind",
        remedy=f"build the mesh from {_platforms(' or from ')}",
    )
    return found.pop()


def device_backend(device: jax.Device) -> str:
    """Name of the back end for a device, or a clear refusal."""
    near = [backend for backend in all_backends() if device.platform in backend.platforms]
    if not near:
        refuse(
            "mesh devices",
            got=f"platform {device.platform!r}",
            want=" or ".join(map(repr, _platform_names())),
            remedy=f"build the mesh from {_platforms(' or ')}, or use jax_megamoe.unfused on these "
            "devices",
        )
    capability = str(getattr(device, "compute_capability", "unknown"))
    for backend in near:
        if backend.capability in (None, capability):
            return backend.name
    known = " or ".join(f"{one.capability} ({', '.join(one.device_kinds)})" for one in near)
    architecture = "sm_" + capability.replace(".", "")
    refuse(
        "mesh devices",
        got=f"{device.device_kind} ({architecture})",
        want=f"an NVIDIA GPU with compute capability {known}",
        remedy="use jax_megamoe.unfused, which runs on any device",
    )


def abstract_backend(device: Any) -> str | None:
    """Name of the back end for an AbstractMesh's `abstract_device`; None if there is none."""
    if device is None:
        return None
    platform, kind = getattr(device, "platform", None), str(device.device_kind)
    for backend in all_backends():
        if backend.capability is None and platform in backend.platforms:
            return backend.name
        if any(part in kind for part in backend.device_kinds):
            return backend.name
    return None
