"""`jax_megamoe.devtools.gpu_harness` under its old name, for programs that import it from here."""

from jax_megamoe.devtools.gpu_harness import (
    TRACE_DTYPE,
    GpuRanks,
    Outputs,
)

__all__ = ["TRACE_DTYPE", "GpuRanks", "Outputs"]
