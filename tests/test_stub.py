"""The generated stub of the native module is the one in the tree."""

import pathlib
import subprocess
import sys

import pytest

import jax_megamoe


def test_native_stub_has_not_drifted(tmp_path):
    pytest.importorskip("nanobind", reason="nanobind generates the stub: pip install '.[dev]'")
    generated = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "jax_megamoe._native"]
    subprocess.run([*command, "-o", str(generated)], check=True)
    stub = pathlib.Path(jax_megamoe.__file__).with_name("_native.pyi")
    assert generated.read_text() == stub.read_text(), (
        "regenerate it: python -m nanobind.stubgen -m jax_megamoe._native "
        "-o jax_megamoe/_native.pyi"
    )
