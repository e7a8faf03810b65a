"""What a source distribution and a wheel have in them, and what their metadata says."""

import re
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git: nothing to compare with")
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_sdist_leaves_nothing_out():
    """scikit-build-core takes all files but those that pyproject.toml or .gitignore excludes."""
    assert set(PYPROJECT["tool"]["scikit-build"]) >= {"wheel", "build-dir"}
    assert "sdist" not in PYPROJECT["tool"]["scikit-build"]
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_an_sdist_has_what_git_has(tmp_path, monkeypatch):
    reason = "needs pip install scikit-build-core, which pip otherwise installs for a build only"
    build = pytest.importorskip("scikit_build_core.build", reason=reason)
    tracked = git("ls-files")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    # A file that was deleted and not committed yet is tracked, too.
    assert sorted(name for name in tracked if name not in names and (ROOT / name).exists()) == []


def test_tests_and_pages_find_the_folders_they_read():
    """Those that an sdist once was without."""
    for folder in ("docs", "benchmarks/results", "examples", ".ci"):
        assert any((ROOT / folder).iterdir())


def test_wheels_are_typed_and_carry_the_kernels():
    assert PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"] == ["jax_megamoe"]
    assert (ROOT / "jax_megamoe" / "py.typed").is_file()
    assert re.search(r"install\(.*cc/gpu", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)


def test_classifiers_name_the_versions_that_are_supported():
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    versions = [
        f"Programming Language :: Python :: 3.{minor}" for minor in range(int(low), int(high))
    ]
    named = [c for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.", c)]
    assert named == versions
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_extras_have_what_they_promise():
    extras = {
        name: {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
        for name, requirements in PROJECT["optional-dependencies"].items()
    }
    assert extras["export"] == {"flatbuffers"}
    assert extras["export"] | extras["checkpoints"] <= extras["examples"] & extras["test"]
