"""Where the sources of the GPU kernels are: C++ headers that NVRTC compiles at run time."""

from __future__ import annotations

from pathlib import Path

from jax_megamoe._ffi import native
from jax_megamoe.errors import MegaMoEError

#: The folders below `include_dir` that kernels include files from.
FOLDERS = ("gpu/common", "gpu/interface", "gpu/sm90", "protocol")


def include_dir() -> Path:
    """The directory that holds gpu/ and protocol/.

    It is the one that belongs to the native module, because host and device share structures: next
    to an installed module, or cc/ of the checkout that a module was built in.

    Raises:
      MegaMoEError: there is none, as after an incomplete installation.
    """
    package = Path(str(native.__file__)).parent
    candidates = (package / "cc", package.parent / "cc")
    for candidate in candidates:
        if all(any((candidate / folder).glob("*.h")) for folder in FOLDERS):
            return candidate
    raise MegaMoEError(
        f"jax_megamoe: kernel headers: got none in {' or '.join(map(str, candidates))}; expected "
        f"folders {', '.join(FOLDERS)} with the headers that belong to the package. Install "
        "jax_megamoe again, with `pip install --force-reinstall`."
    )
