"""Where NVRTC is: the library that compiles the GPU kernels at run time."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path


@functools.cache
def nvrtc_path() -> str:
    """The newest libnvrtc of the installed ``nvidia-cuda-nvrtc`` packages, or an empty string.

    The native module tries it after ``JAX_MEGAMOE_NVRTC`` and after a library that the process has
    loaded already, and before those of the system.
    """
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return ""
    folders = spec.submodule_search_locations if spec is not None else None
    found = [
        library
        for folder in folders or ()
        # nvidia/cu13/lib for CUDA 13, nvidia/cuda_nvrtc/lib for CUDA 12
        for library in Path(folder).glob("*/lib/libnvrtc.so.*")
        if library.suffix[1:].isdigit()
    ]
    return str(max(found, key=lambda library: int(library.suffix[1:]))) if found else ""
