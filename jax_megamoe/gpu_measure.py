"""`jax_megamoe.devtools.gpu_measure` under its old name, for programs that import it from here."""

from jax_megamoe.devtools.gpu_measure import *  # noqa: F403
from jax_megamoe.devtools.gpu_measure import __all__ as __all__
