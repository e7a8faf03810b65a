"""jax_megamoe: an expert-parallel mixture-of-experts layer for JAX, FP8 x FP4, in one call."""

from jax_megamoe.virtual_devices import reserve_threads_at_import as _reserve_threads

_reserve_threads()  # before anything starts JAX's CPU back end

from jax_megamoe import quantize, reference, unfused  # noqa: E402
from jax_megamoe._ffi import export_checks  # noqa: E402
from jax_megamoe.config import Activation, MegaMoEConfig, swiglu  # noqa: E402
from jax_megamoe.errors import MegaMoEError  # noqa: E402
from jax_megamoe.layer import MegaMoE, MoEStats  # noqa: E402
from jax_megamoe.symmetric import SymmetricBuffer, buffer_bytes, buffer_regions  # noqa: E402
from jax_megamoe.virtual_devices import use_virtual_cpu_devices  # noqa: E402
from jax_megamoe.weights import (  # noqa: E402
    ExpertWeights,
    dequantize_weights,
    quantize_weights,
    to_layout,
)

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ExpertWeights",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEError",
    "MoEStats",
    "SymmetricBuffer",
    "buffer_bytes",
    "buffer_regions",
    "dequantize_weights",
    "export_checks",
    "quantize",
    "quantize_weights",
    "reference",
    "swiglu",
    "to_layout",
    "unfused",
    "use_virtual_cpu_devices",
]
