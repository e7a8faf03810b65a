"""Every example runs and holds what it asserts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Examples that take minutes as they are.
ARGUMENTS = {"char_moe": ["--quick"]}
#: Examples that need more than the package and what its tests need.
REQUIRES = {
    "export_and_reload": "flatbuffers",
    "flax_nnx": "flax",
    "orbax_resharding": "orbax.checkpoint",
}
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) == 9


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    if path.stem in REQUIRES:
        reason = "needs pip install 'jax-megamoe[examples]'"
        pytest.importorskip(REQUIRES[path.stem], reason=reason)
    command = [sys.executable, path, *ARGUMENTS.get(path.stem, [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_readme_lists_the_example(path):
    assert f"`{path.name}`" in path.with_name("README.md").read_text()
