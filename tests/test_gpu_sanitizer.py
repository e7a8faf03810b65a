"""compute-sanitizer finds nothing in small calls: bounds, and races in shared memory."""

import os
import shutil
import subprocess
import sys

import pytest

from jax_megamoe.config import GRANULARITIES

CALL = """
import os, sys
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import numpy as np
from gpu_case import check, load, with_granularity
from jax_megamoe.devtools.gpu_harness import GpuRanks
from moe_case import GpuCase

granularity, tile, racecheck = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "racecheck"
granularity = granularity if granularity == "row" else int(granularity)
sizes = dict(num_experts=4, top_k=2, hidden=256, intermediate=128)
config = with_granularity(granularity, **sizes, timeout_s=800.0)
case = GpuCase(np.random.default_rng(1), config, 1, 40)
# Few blocks, so that each one goes several times around its ring of stages.
ranks = load(GpuRanks(config, [0], ctas_per_rank=3, racecheck=racecheck), case)
ranks.poison()
ranks.launch(tile, repeats=2)
check(case, ranks)
print("the call is right")
"""

# racecheck takes one to four minutes, depending on what else uses the GPU.
LIMIT_S = 900


def sanitize(tool, granularity, tile):
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    paths = os.pathsep.join(sys.path)
    arguments = (str(granularity), str(tile), tool)
    result = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CALL, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    text = result.stdout + result.stderr
    assert "the call is right" in text, text[-4000:]
    assert result.returncode == 0, text[:8000]
    return text


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_memcheck(granularity, tile):
    assert "ERROR SUMMARY: 0 errors" in sanitize("memcheck", granularity, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_racecheck(granularity, tile):
    """Kernels of the check's own build, whose copies and arrivals it follows: see `GpuRanks`."""
    assert "RACECHECK SUMMARY: 0 hazards displayed" in sanitize("racecheck", granularity, tile)
