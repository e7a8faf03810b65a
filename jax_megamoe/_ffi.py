"""Loads the native module and registers its handlers with XLA."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jax_megamoe.errors import MegaMoEError

try:
    from jax_megamoe import _native as native
except ImportError as error:  # an editable tree without a build, or a wheel for another Python
    raise ImportError(
        "jax_megamoe: the native module is missing or does not fit this Python "
        f"({error}). Install the package with `pip install .`; a C++20 compiler is all it needs."
    ) from error

__version__ = native.VERSION

#: With the contract's version: a cached program must not meet handlers of another contract.
TARGET = "jax_megamoe.mega_moe.v3"

# At import, so that a program from `jax.export` or a cache finds the handlers before any layer
# exists. JAX keeps them until its back ends start; CUDA's may never.
jax.ffi.register_ffi_target(TARGET, native.cpu_ffi_handlers(), platform="cpu")
jax.ffi.register_ffi_target(TARGET, native.gpu_ffi_handlers(), platform="CUDA")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as ``disabled_checks`` to `jax.export.export` for programs that call the layer.

    JAX exports custom calls only when told that their contract is stable. The target's name carries
    a version, so a program exported under another contract is refused instead of run. To serialise
    what it exports, JAX needs flatbuffers: ``pip install 'jax-megamoe[export]'``.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def mesh_backend(mesh: Mesh) -> str:
    """Name of the back end for all devices of a mesh, or a clear refusal."""
    names = {device_backend(device) for device in mesh.devices.flat}
    if len(names) > 1:
        raise MegaMoEError(
            f"jax_megamoe: mesh devices: got back ends {sorted(names)}; expected devices of one "
            "kind. Build the mesh from jax.devices('cpu') or from jax.devices('gpu')."
        )
    return names.pop()


def device_backend(device: jax.Device) -> str:
    """Name of the back end for a device, or a clear refusal."""
    if device.platform == "cpu":
        return "cpu"
    if device.platform not in ("gpu", "cuda"):
        raise MegaMoEError(
            f"jax_megamoe: mesh devices: got platform {device.platform!r}; expected 'cpu' or "
            "'gpu'. Build the mesh from jax.devices('cpu') or jax.devices('gpu'), or use "
            "jax_megamoe.unfused on these devices."
        )
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        architecture = "sm_" + capability.replace(".", "")
        raise MegaMoEError(
            f"jax_megamoe: mesh devices: got {device.device_kind} ({architecture}); expected an "
            "NVIDIA GPU with compute capability 9.0 (H100, H200, GH200). Use jax_megamoe.unfused, "
            "which runs on any device."
        )
    return "sm_90a"
