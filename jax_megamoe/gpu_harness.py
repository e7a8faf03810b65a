"""`jax_megamoe.devtools.gpu_harness` under its old name, for programs that import it from here."""

from jax_megamoe.devtools.gpu_harness import *  # noqa: F403
from jax_megamoe.devtools.gpu_harness import __all__ as __all__
