"""jax_megamoe: an expert-parallel mixture-of-experts layer for JAX, FP8 x FP4, in one call."""

import pkgutil

# In a checkout the working directory comes before the installed package, and only the latter has
# the native module: look there as well, so that `python -m jax_megamoe` works from a checkout too.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_megamoe.virtual_devices import reserve_threads_at_import as _reserve_threads

_reserve_threads()  # before anything starts JAX's CPU back end

from jax_megamoe import blocks, checkpoints, quantize, reference, routers, unfused
from jax_megamoe._ffi import __version__, export_checks
from jax_megamoe.config import Activation, MegaMoEConfig, gpt_oss_swiglu, situ, swiglu
from jax_megamoe.errors import MegaMoEError
from jax_megamoe.failures import MegaMoERuntimeError, check_failures, on_failure
from jax_megamoe.layer import MegaMoE, MoEStats
from jax_megamoe.symmetric import SymmetricBuffer, buffer_bytes, buffer_regions
from jax_megamoe.virtual_devices import use_virtual_cpu_devices
from jax_megamoe.weights import (
    ExpertWeights,
    dequantize_weights,
    expert_biases,
    quantize_weights,
    to_layout,
)

__all__ = [
    "Activation",
    "ExpertWeights",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEError",
    "MegaMoERuntimeError",
    "MoEStats",
    "SymmetricBuffer",
    "__version__",
    "blocks",
    "buffer_bytes",
    "buffer_regions",
    "check_failures",
    "checkpoints",
    "dequantize_weights",
    "expert_biases",
    "export_checks",
    "gpt_oss_swiglu",
    "on_failure",
    "quantize",
    "quantize_weights",
    "reference",
    "routers",
    "situ",
    "swiglu",
    "to_layout",
    "unfused",
    "use_virtual_cpu_devices",
]
