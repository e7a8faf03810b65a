"""`jax_megamoe.devtools.timeline` under its old name, for programs that import it from here."""

from jax_megamoe.devtools.timeline import *  # noqa: F403
from jax_megamoe.devtools.timeline import __all__ as __all__
