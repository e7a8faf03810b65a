"""Tools for those who work on kernels: ranks without JAX, measurements, the timeline of a call.

The layer needs none of them; tests, the commands and the programs in benchmarks/ do.
"""

from jax_megamoe.devtools import gpu_harness, gpu_measure, timeline

__all__ = ["gpu_harness", "gpu_measure", "timeline"]
