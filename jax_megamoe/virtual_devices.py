"""Virtual CPU devices: how many, and enough host threads to run them without stalling."""

from __future__ import annotations

import os
import re
import warnings

import jax
import jaxlib
import numpy as np

from jax_megamoe.errors import check, describe

__all__ = ["reserve_threads_at_import", "use_virtual_cpu_devices", "warn_if_short_of_threads"]

# jaxlib before 0.12 admits 32 programs per CPU device in flight and lets further dispatches block
# threads of the pool that has to run the first 32. With twice as many threads as devices the
# blocked dispatches leave one thread per device free, and un-awaited steps no longer hang.
_NEEDS_THREADS = tuple(int(p) for p in jaxlib.__version__.split(".")[:2]) < (0, 12)
_MAX_IN_FLIGHT = 32


def _threads_for(num_devices: int) -> int:
    return 2 * num_devices + 1


def _thread_setting() -> int:
    try:
        return max(int(os.environ.get(name, "0")) for name in ("PJRT_NPROC", "NPROC"))
    except ValueError:
        return 0


def _reserve_threads(num_devices: int) -> None:
    if _NEEDS_THREADS and max(_thread_setting(), os.cpu_count() or 1) < _threads_for(num_devices):
        os.environ["PJRT_NPROC"] = str(_threads_for(num_devices))


def use_virtual_cpu_devices(num_devices: int) -> None:
    """Makes JAX's CPU back end show `num_devices` devices. Call it before JAX is first used.

    It sets ``jax_num_cpu_devices`` and, for jaxlib before 0.12, the environment variable
    PJRT_NPROC, without which a program over several CPU devices hangs once more than 32 calls of it
    have been dispatched without waiting for a result (a plain ``lax.psum`` does so too).

    Raises:
      MegaMoEError: not a positive number.
      RuntimeError: JAX's back ends are already running, with another number of devices.
    """
    if isinstance(num_devices, np.integer):
        num_devices = int(num_devices)
    check(
        isinstance(num_devices, int) and not isinstance(num_devices, bool) and num_devices > 0,
        "num_devices",
        got=describe(num_devices),
        want="a positive int",
        remedy="8 is a good number for trying things out",
    )
    _reserve_threads(num_devices)
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        running = len(jax.devices("cpu"))
        if running != num_devices:
            raise RuntimeError(
                f"jax_megamoe: use_virtual_cpu_devices: got {num_devices} after JAX has started "
                f"with {running} CPU device(s); expected the call before JAX is first used. Move "
                "it to the top of the program, before anything that makes an array or asks for "
                "devices; a notebook has to be restarted."
            ) from error


def reserve_threads_at_import() -> None:
    """The same reservation for devices requested through the environment; XLA reads it later."""
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    requested = flag.group(1) if flag else os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if requested.isdigit():
        _reserve_threads(int(requested))


def warn_if_short_of_threads(num_devices: int) -> None:
    """Warns once a layer is built on devices that un-awaited steps would hang."""
    threads = max(_thread_setting(), os.cpu_count() or 1)
    if _NEEDS_THREADS and num_devices > 1 and threads < _threads_for(num_devices):
        warnings.warn(
            f"jax_megamoe: jaxlib {jaxlib.__version__} runs {num_devices} virtual CPU devices on "
            f"{threads} host threads and hangs when more than {_MAX_IN_FLIGHT} steps are "
            "dispatched without waiting. Call "
            f"jax_megamoe.use_virtual_cpu_devices({num_devices}) before JAX starts, set "
            f"PJRT_NPROC={_threads_for(num_devices)}, or use jaxlib 0.12 or newer.",
            stacklevel=4,
        )
