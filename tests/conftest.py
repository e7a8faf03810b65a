"""Eight virtual CPU devices for every test, and small shared fixtures."""

import os

# Workers of one run share the GPUs: none may take most of the memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Tests run in parallel by workers; threads of NumPy in each would spin, waiting for cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the suite's time is XLA compiling programs that run once: let it optimise less.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {level}".strip()

import jax
import numpy as np
import pytest
from hypothesis import settings

import jax_megamoe as jmm
from jax_megamoe._nvrtc import nvrtc_path

jmm.use_virtual_cpu_devices(8)

# Compilation makes the first example slow; time is not what these tests are about.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def _num_gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


def pytest_collection_modifyitems(items):
    gpus = _num_gpus()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
            if gpus < needed:
                reason = f"needs {needed} NVIDIA GPU(s), found {gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


@pytest.fixture
def on_failure():
    """`jax_megamoe.on_failure`, whose choice ends with the test."""
    before = jmm.on_failure("log")
    yield jmm.on_failure
    jmm.on_failure(before)


@pytest.fixture
def nvrtc() -> str:
    """Path of NVRTC, which compiles kernels without a GPU."""
    if not nvrtc_path():
        pytest.skip("NVRTC is not installed: pip install '.[dev]'")
    return nvrtc_path()
