"""`jax_megamoe.devtools.timeline` under its old name, for programs that import it from here."""

from jax_megamoe.devtools.timeline import (
    LANES,
    Timeline,
    chrome_trace,
    num_dropped,
    summary,
    summary_table,
)

__all__ = ["LANES", "Timeline", "chrome_trace", "num_dropped", "summary", "summary_table"]
