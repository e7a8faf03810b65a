"""MoE weights of published models, from local directories of safetensors files.

MXFP4 experts load bit for bit. Other formats have no exact FP4 form: they are refused, unless
`requantize=True` asks for rounding. Names, formats and what is exact: docs/checkpoints.md.

Files are mapped into memory, and only what is asked for is touched: a host that holds experts
a to b of a layer reads those. With an index file, shards that are not needed need not be there.
"""

from jax_megamoe.checkpoints.checkpoint import Checkpoint, Progress, RelativeError, open
from jax_megamoe.checkpoints.families import FAMILIES

__all__ = ["FAMILIES", "Checkpoint", "Progress", "RelativeError", "open"]
