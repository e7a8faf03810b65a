"""Loads the native module and registers its handlers with XLA."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

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
CPU_TARGET = "jax_megamoe.mega_moe.v1"
_CALL_SITE_TYPE = "jax_megamoe.call_site.v1"

_lock = threading.Lock()


@functools.cache
def _register_cpu() -> None:
    # XLA wants a handler's types before the handler. JAX keeps that order only for registrations
    # made after the back end has started, so this runs when a layer is created, not at import.
    jax.devices("cpu")
    call_site: Any = native.call_site_type()
    jax.ffi.register_ffi_type(_CALL_SITE_TYPE, call_site, platform="cpu")
    jax.ffi.register_ffi_target(CPU_TARGET, native.cpu_handlers(), platform="cpu")


def register_cpu() -> None:
    """Registers the CPU back end's handlers once per process."""
    with _lock:
        _register_cpu()


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What to pass as ``disabled_checks`` to `jax.export.export` for programs that call the layer.

    JAX exports custom calls only when told that their contract is stable. The target's name carries
    a version, so a program exported under another contract is refused instead of run.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(CPU_TARGET)]


def devices_backend(platform: str) -> str:
    """Name of the back end for devices of a JAX platform, or a clear refusal."""
    if platform == "cpu":
        return "cpu"
    raise MegaMoEError(
        f"jax_megamoe: mesh devices: got platform {platform!r}; expected 'cpu', the only back end "
        "in this version (kernels for NVIDIA GPUs are not part of it). Build the mesh from "
        "jax.devices('cpu'), or use jax_megamoe.unfused on these devices."
    )
