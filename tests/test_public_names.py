"""What the package offers: `__all__` of its modules, and the names that pages promise."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_megamoe as jmm

ROOT = Path(__file__).parents[1]
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(jmm.__path__, "jax_megamoe.")
    if not any(part.startswith("_") for part in name.split(".")[1:])
]
REFERENCE = ROOT / "docs" / "reference.md"


def public(name: str) -> list[str]:
    return importlib.import_module(name).__all__


@pytest.mark.parametrize("name", ["jax_megamoe", *MODULES])
def test_every_public_module_says_what_is_public(name):
    module = importlib.import_module(name)
    assert module.__all__ == list(dict.fromkeys(module.__all__)), "a name twice"
    assert [one for one in module.__all__ if not hasattr(module, one)] == []
    assert all(isinstance(one, str) for one in module.__all__)
    assert [one for one in module.__all__ if one.startswith("_")] in ([], ["__version__"])


@pytest.mark.parametrize("name", MODULES)
def test_classes_and_functions_are_public_where_they_are_made(name):
    module = importlib.import_module(name)
    own = [
        one
        for one, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
        and not one.startswith("_")
    ]
    assert sorted(set(own) - set(module.__all__)) == []


@pytest.mark.parametrize("name", ["gpu_harness", "gpu_measure", "timeline"])
def test_old_names_of_tools_are_the_tools(name):
    old = importlib.import_module(f"jax_megamoe.{name}")
    new = importlib.import_module(f"jax_megamoe.devtools.{name}")
    assert sorted(old.__all__) == sorted(new.__all__)
    assert all(getattr(old, one) is getattr(new, one) for one in new.__all__)


def test_the_layer_needs_no_tools():
    """`import jax_megamoe` loads neither the tools nor the commands."""
    text = (
        "import sys, jax_megamoe; print(*(name for name in sys.modules if 'jax_megamoe.' in name))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = done.stdout.split()
    assert "jax_megamoe.layer" in loaded
    assert [
        name for name in loaded if name.startswith(("jax_megamoe.dev", "jax_megamoe.cli"))
    ] == []


#: Functions that give back what they were given, or an entry of a JSON file.
ANYTHING = {"as_array", "as_operand", "entry", "narrow_ids"}


@pytest.mark.parametrize("name", [name for name in MODULES if ".cli" not in name])
def test_public_functions_say_what_they_return(name):
    module = importlib.import_module(name)
    functions = [one for one in module.__all__ if inspect.isfunction(getattr(module, one))]
    results = {one: getattr(module, one).__annotations__.get("return") for one in functions}
    assert {one for one, kind in results.items() if kind in (None, "Any")} <= ANYTHING


def test_star_imports_what_is_public():
    text = "from jax_megamoe import *; print(*sorted(name for name in dir() if name[0] != '_'))"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == sorted(set(jmm.__all__) - {"__version__"})


def documented() -> dict[str, list[str]]:
    """Module -> names, of the table of docs/reference.md."""
    section = REFERENCE.read_text().partition("## Names\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(jax_megamoe[\w.]*)` \|(.*)\|$", section, re.MULTILINE)
    found: dict[str, list[str]] = {}
    for module, text in rows:
        found.setdefault(module, []).extend(re.findall(r"`(\w+)[^`]*`", text))
    return found


def test_what_the_reference_names_is_public():
    if not REFERENCE.exists():
        pytest.skip("no docs/ beside the tests")
    table = documented()
    assert len(table) >= 8 and len(table["jax_megamoe"]) >= 20
    for module, names in table.items():
        assert sorted(set(names) - set(public(module))) == [], module


def test_pages_mention_every_name_of_the_package():
    if not REFERENCE.exists():
        pytest.skip("no docs/ beside the tests")
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    words = set(re.findall(r"\w+", pages))
    assert sorted(set(jmm.__all__) - words - {"__version__"}) == []
