"""The module that Bazel built imports, and it is that module, not an installed one."""

import os
import sys

from jax_megamoe import _native

# Resolved through the runfiles, an installed copy would lie elsewhere.
root = os.environ.get("TEST_SRCDIR", "")
if not os.path.abspath(_native.__file__).startswith(os.path.abspath(root)):
    sys.exit(f"imported {_native.__file__}; expected a file below {root}")
public = [name for name in dir(_native) if not name.startswith("__")]
print(_native.__file__, public)
if not public:
    sys.exit(f"{_native.__file__}: got an empty module")
