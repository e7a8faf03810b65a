"""Symmetric buffers: one allocation per device, laid out alike on every rank of an EP group."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_megamoe import _backends
from jax_megamoe._ffi import activation_number, activation_params, granularity_number, native
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.errors import MegaMoEError, check, check_positive_int, describe, refuse
from jax_megamoe.failures import shut_down

__all__ = [
    "Region",
    "SymmetricBuffer",
    "activation_number",
    "activation_params",
    "buffer_bytes",
    "buffer_regions",
    "granularity_number",
    "moe_shape",
    "plan_buffer",
    "region_array",
]


@dataclasses.dataclass(frozen=True)
class Region:
    """One region of a symmetric buffer. `offset` and `num_bytes` are bytes per rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    writer: str
    reader: str


def moe_shape(config: MegaMoEConfig, num_ranks: int, backend: str = "cpu") -> native.MoeShape:
    """The native shape of `config` on `num_ranks` ranks; source of every derived size."""
    check(
        isinstance(config, MegaMoEConfig),
        "config",
        got=describe(config),
        want="a jax_megamoe.MegaMoEConfig",
        remedy="build it with MegaMoEConfig(num_experts=..., top_k=..., ...)",
    )
    if isinstance(num_ranks, np.integer):
        num_ranks = int(num_ranks)
    check_positive_int(num_ranks, "num_ranks", "the buffer's size")
    check(
        backend in _backends.names(),
        "backend",
        got=repr(backend),
        want=f"one of {_backends.names()}",
        remedy="layer.backend has the name of a layer's",
    )
    config.local_experts(num_ranks)
    sizes = {
        "num_ranks": num_ranks,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "hidden": config.padded_hidden,
        "intermediate": config.padded_intermediate,
        "max_tokens": config.max_tokens_per_rank,
        "ring_tokens": config.ring_tokens or 0,
    }
    try:
        return _backends.get(backend).shape(config, sizes)
    except (ValueError, TypeError) as error:
        # Everything but the padded number of rows was checked before.
        raise MegaMoEError(
            f"jax_megamoe: config: got {config} on {num_ranks} ranks; expected ranks * "
            "max_tokens_per_rank * top_k rows, each expert padded to a block, below 2^31. Lower "
            "max_tokens_per_rank."
        ) from error


def buffer_regions(config: MegaMoEConfig, num_ranks: int, backend: str = "cpu") -> list[Region]:
    """The regions of one rank's buffer, in order, without allocating anything."""
    rows = native.workspace_regions(moe_shape(config, num_ranks, backend))
    return [Region(**{**row, "shape": _trim(row["shape"])}) for row in rows]


def buffer_bytes(config: MegaMoEConfig, num_ranks: int, backend: str = "cpu") -> int:
    """Bytes of one rank's symmetric buffer on a back end, "cpu" or "sm_90a"."""
    return moe_shape(config, num_ranks, backend).num_bytes


def region_array(shape: native.MoeShape, region: str, read: Callable[[], bytes]) -> np.ndarray:
    """The bytes that `read` returns as an array of the region's shape; see SymmetricBuffer.read."""
    rows = {row["name"]: row for row in native.workspace_regions(shape)}
    check(
        region in rows,
        "region",
        got=repr(region),
        want=f"one of {sorted(rows)}",
        remedy="`python -m jax_megamoe info` prints the table",
    )
    dtypes = {"u64": "u8", "u32": "u4", "2xu32": "u4", "i32": "i4", "f32": "f4", "bf16": "u2"}
    row = rows[region]
    array = np.frombuffer(read(), np.dtype("<" + dtypes.get(row["dtype"], "u1")))
    return array.reshape(_trim(row["shape"]) + ((2,) if row["dtype"] == "2xu32" else ()))


def _trim(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class SymmetricBuffer:
    """The buffers of all ranks of a mesh for one configuration. Get it with `acquire`.

    One buffer serves every layer with the same shape on the same (mesh, axis): `acquire` returns
    the existing one and counts its users, `release` frees the memory when the last user is gone. On
    CPU a buffer is ordinary process memory, one region table per virtual device. On GPUs every rank
    has its part in the memory of its GPU, and the others read and write it through NVLink or PCIe.

    Attributes:
      key: stable name of (shape, mesh, axis). Programs carry it instead of an address.
      num_ranks: size of the expert-parallel axis.
      num_groups: expert-parallel groups, one for each place on the mesh's other axes.
      num_bytes: bytes per rank.
    """

    # It is reentrant: the collector may close a layer while this thread opens another one.
    _lock = threading.RLock()
    _open: dict[str, SymmetricBuffer] = {}  # noqa: RUF012

    def __init__(
        self, key: str, shape: native.MoeShape, groups: list[list[int]], backend: str, config
    ):
        self.key = key
        self.backend = backend
        self.num_ranks = shape.num_ranks
        self.num_groups = len(groups)
        self.num_bytes = shape.num_bytes
        self._users = 0
        self._shape = shape
        record = _backends.get(backend)
        self.workers_per_rank = record.workers_per_rank(self.num_ranks * self.num_groups)
        try:
            record.create_buffer(key, shape, config, groups, self.workers_per_rank)
        except MemoryError as error:
            reason = f" ({error})" if str(error) else ""
            raise MemoryError(
                f"jax_megamoe: symmetric buffer {key}: {self.num_bytes} bytes on each of "
                f"{self.num_ranks * self.num_groups} ranks cannot be allocated{reason}. Lower "
                "max_tokens_per_rank or ring_tokens."
            ) from error
        except RuntimeError as error:
            # The native module says what is wrong with the GPUs, their links or their driver.
            raise MegaMoEError(str(error)) from error

    @classmethod
    def acquire(cls, config: MegaMoEConfig, mesh: Mesh, axis: str) -> SymmetricBuffer:
        """Returns the buffer of (config's shape, mesh, axis), created if this is its first user.

        Raises:
          MegaMoEError: `axis` is not an axis of `mesh`, the mesh spans several processes or has
            devices without a back end or of two back ends, num_experts is not a multiple of the
            axis size, or GPUs have no direct link to each other.
          MemoryError: not enough memory.
        """
        groups, backend = _device_groups(mesh, axis)
        shape = moe_shape(config, len(groups[0]), backend)
        record = _backends.get(backend)
        key = _buffer_key(shape, groups, record.key_parts(config))
        record.prepare_devices(mesh.devices.size)
        with cls._lock:
            buffer = cls._open.get(key)
            if buffer is None:
                buffer = cls._open[key] = cls(key, shape, groups, backend, config)
            buffer._users += 1
            return buffer

    def release(self) -> None:
        """Gives up one `acquire`. The last one waits for a running call and frees the memory."""
        with SymmetricBuffer._lock:
            if self._users == 0:
                return
            self._users -= 1
            if self._users > 0:
                return
            del SymmetricBuffer._open[self.key]
            native.release_buffer(self.key)

    @property
    def is_open(self) -> bool:
        return self._users > 0

    def prepare(self, config: MegaMoEConfig, tile: int, bias: bool) -> None:
        """Compiles and loads the kernel of one tile, unless it is there. For GPUs."""
        _backends.get(self.backend).load_kernel(self.key, config, tile, bias)

    def read(self, region: str, rank: int, group: int = 0) -> np.ndarray:
        """A copy of one region, for tests and for looking; waits until no call runs.

        Returns:
          An array of the region's shape. FP8 codes and scales come as uint8, BF16 as uint16;
          token_src_metadata as uint32 pairs (source rank, token * top_k + slot).
        """
        for name, value, size in (
            ("rank", rank, self.num_ranks),
            ("group", group, self.num_groups),
        ):
            check(
                isinstance(value, (int, np.integer)) and 0 <= value < size,
                name,
                got=repr(value),
                want=f"an int from 0 to {size - 1}",
                remedy="a group is a place on the mesh's other axes, and has one buffer per rank",
            )
        return region_array(
            self._shape, region, lambda: native.read_region(self.key, group, rank, region)
        )

    def poison(self) -> None:
        """Overwrites all data regions with 0xFF bytes; no result may depend on what they held."""
        native.poison_buffer(self.key)

    def lose_next_signal(self, region: str, rank: int, group: int = 0) -> None:
        """Deliberate fault: the next signal from `rank` to a counter of `region` is not sent.

        On GPUs: in the next launch of the rank's kernel; a CUDA graph does not notice.
        """
        native.arm_fault(self.key, group, region, rank)


@atexit.register
def _release_all() -> None:
    shut_down()  # Otherwise a kernel that waits for a rank would hold up the exit.
    for key in native.buffer_keys():
        native.release_buffer(key)


def _check_axis(mesh: Mesh | AbstractMesh, axis: str) -> None:
    check(
        axis in mesh.axis_names,
        "axis",
        got=repr(axis),
        want=f"one of the mesh axes {mesh.axis_names}",
        remedy="name the axis that experts are spread over",
    )


def _device_groups(mesh: Mesh, axis: str) -> tuple[list[list[int]], str]:
    """(groups, backend); groups[g][r]: ordinal of the device that is rank r of group g."""
    check(
        isinstance(mesh, Mesh),
        "mesh",
        got=describe(mesh),
        want="a jax.sharding.Mesh of devices, or an AbstractMesh",
        remedy="build it with jax.make_mesh, or leave it out under jax.set_mesh",
    )
    _check_axis(mesh, axis)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    backend = _backends.mesh_backend(mesh)
    processes = {device.process_index for device in devices.flat}
    check(
        len(processes) == 1,
        "mesh",
        got=f"devices of {len(processes)} processes",
        want="devices of one process",
        remedy="ranks share memory within a process; use virtual CPU devices, or one process for "
        "all GPUs of the host",
    )
    groups = devices.reshape(-1, devices.shape[-1])
    return [[device.local_hardware_id for device in group] for group in groups], backend


def plan_buffer(
    config: MegaMoEConfig, mesh: AbstractMesh, axis: str, backend: str | None
) -> tuple[str, str]:
    """(back end, key) of the buffer that a layer on such devices would own; none is created.

    The devices are taken to be 0, 1, ... of the process in the mesh's order.

    Raises:
      MegaMoEError: the back end is not known, or a shape or axis that does not fit.
    """
    _check_axis(mesh, axis)
    device: Any = mesh.abstract_device
    kind = None if device is None else device.device_kind
    if backend is None:
        backend = _backends.abstract_backend(device)
    if backend is None or backend not in _backends.names():
        of = "unknown devices" if device is None else kind
        refuse(
            "backend",
            got=f"{backend!r} for an AbstractMesh of {of}",
            want=f"one of {_backends.names()}",
            remedy="pass backend=, or give the AbstractMesh the abstract_device of the mesh that "
            "the program is for",
        )
    ordinals = np.moveaxis(
        np.arange(mesh.size).reshape(mesh.axis_sizes), mesh.axis_names.index(axis), -1
    )
    groups = ordinals.reshape(-1, ordinals.shape[-1]).tolist()
    shape = moe_shape(config, len(groups[0]), backend)
    return backend, _buffer_key(shape, groups, _backends.get(backend).key_parts(config))


def _buffer_key(shape: native.MoeShape, groups: list[list[int]], kind: list[Any]) -> str:
    """A stable name; `kind` is from `Backend.key_parts`."""
    fields = ("num_ranks", "num_experts", "top_k", "hidden", "intermediate", "max_tokens")
    sizes = {name: getattr(shape, name) for name in (*fields, "block_m", "ring_blocks")}
    identity = json.dumps([sizes, groups, *kind], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return (
        f"moe-{f'{kind[0]}-' if kind else ''}r{shape.num_ranks}-e{shape.num_experts}"
        f"-k{shape.top_k}-h{shape.hidden}-i{shape.intermediate}-t{shape.max_tokens}-{digest}"
    )
