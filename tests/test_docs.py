"""README.md and docs/: every block runs, links lead somewhere, numbers are those of the results."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import doc_blocks
from doc_blocks import ROOT

PAGES = doc_blocks.pages()
BLOCKS = [block for page in PAGES for block in doc_blocks.blocks(page)]
README = [block for block in BLOCKS if block.page == "README.md" and block.language == "python"]
OTHER_PAGES = sorted({b.page for b in BLOCKS if b.language == "python"} - {"README.md"})
SHELL = [block for block in BLOCKS if block.language == "sh"]

#: Blocks that are not run, by their page and reason. Think twice before adding one.
NOT_RUN: set[tuple[str, str]] = set()
#: What commands of the pages start with, other than Python's and pip's. .ci/run runs all of them.
TOOLS = {".", "bash", "cmake", "cd", "ctest", "setarch", "ruff", "mypy", "clang-format"}


def read(page: str) -> str:
    return (ROOT / page).read_text()


def by_name(blocks):
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.name)


def environment(**more: str) -> dict[str, str]:
    """For a subprocess that has the checkout's Python files and this Python's packages."""
    folders = [str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))} | more


def run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


# Python ------------------------------------------------------------------------------------------


def test_there_are_blocks():
    assert len(README) == 2 and len(OTHER_PAGES) >= 8 and len(SHELL) >= 8


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    for block in doc_blocks.blocks(page):
        assert block.language in doc_blocks.LANGUAGES, f"{block.name}: ```{block.language}"
    # Commands in indented blocks would escape these tests.
    loose = re.findall(r"^    (?:python3?|pip|bash|\./|cmake) .*", read(page), re.MULTILINE)
    assert not loose, f"{page}: put these into a ```sh block: {loose}"


def test_blocks_that_are_not_run_are_few_and_have_a_reason():
    assert {(block.page, block.not_run) for block in BLOCKS if block.not_run} == NOT_RUN


@by_name(README)
def test_readme_block_prints_its_result(block, tmp_path):
    """Alone in an empty folder, as somebody would who copies it."""
    (tmp_path / "block.py").write_text(block.code())
    env = environment(JAX_PLATFORMS="cpu")
    if block.gpu:
        env["JAX_NUM_CPU_DEVICES"] = "8"
    output = run([sys.executable, "block.py"], tmp_path, env)
    assert "bfloat16" in output
    if "distance" in block.text:
        assert float(output.split()[-1]) < 2**-9  # one rounding of y to BF16


@pytest.mark.gpu
@by_name([block for block in README if block.gpu])
def test_readme_block_on_gpus(block, tmp_path):
    (tmp_path / "block.py").write_text(block.code(on_gpu=True))
    env = environment()
    env.pop("JAX_PLATFORMS", None)
    output = run([sys.executable, "block.py"], tmp_path, env)
    assert "bfloat16" in output and "us a call" in output


@functools.cache
def page_results() -> dict[str, str]:
    """Tracebacks of all pages but the README, from one process: JAX starts once for them."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "doc_blocks.py"), *OTHER_PAGES]
    output = run(command, ROOT / "tests", environment(JAX_PLATFORMS="cpu"))
    return json.loads(output.rstrip().split("\n")[-1])


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_python_blocks_of_a_page_run(page):
    pytest.importorskip("safetensors", reason="needs pip install 'jax-megamoe[checkpoints]'")
    assert page_results()[page] == ""


# Shell -------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised in place of running a program whose options were understood."""


def parse_only(monkeypatch, program: list[str], module: bool) -> None:
    """Starts a program up to the end of its `parse_args`, in this process."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        original(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", program)
    try:
        if module:
            runpy.run_module(program[0], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / program[0]), run_name="__main__")
    except Parsed:
        return
    except SystemExit as end:
        if end.code == 0 and {"--help", "--version"} & set(program):
            return
        raise AssertionError(f"{shlex.join(program)}: not understood, exit {end.code}") from end
    raise AssertionError(f"{program[0]} ran to its end without parsing options")


def requirements(extra: str | None = None) -> set[str]:
    import tomllib

    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    if extra is not None:
        assert extra in extras, f"pyproject.toml has no extra {extra!r}, only {sorted(extras)}"
    lists = [project["dependencies"], *extras.values()]
    return {re.match(r"[\w.-]+", text)[0].lower() for part in lists for text in part}


def check_pip(words: list[str]) -> None:
    assert words[0] == "install", words
    for word in words[1:]:
        if word.startswith("-"):
            continue
        name, _, extras = word.partition("[")
        for extra in filter(None, extras.rstrip("]").split(",")):
            requirements(extra.strip())
        known = {".", "jax-megamoe"} | requirements()
        assert name in known, f"pip install {word}: neither this package nor one that it names"


def check_pytest(words: list[str]) -> None:
    import tomllib

    options = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]
    marks = {text.partition(":")[0] for text in options["markers"]}
    for i, word in enumerate(words):
        if word == "-m":
            assert set(re.findall(r"\w+", words[i + 1])) - {"or", "and", "not"} <= marks
        elif "/" in word:
            assert (ROOT / word.partition("::")[0]).exists(), word


def check_command(monkeypatch, command: str) -> None:
    words = shlex.split(command)
    while "=" in words[0]:  # environment variables
        words = words[1:]
    program, rest = words[0], words[1:]
    if program in ("python", "python3"):
        if rest[0] != "-m":
            path = ROOT / rest[0]
            assert path.is_file(), command
            if len(rest) > 1 or "parse_args" not in path.read_text():
                assert len(rest) == 1 or "argparse" in path.read_text(), command
            if "argparse" in path.read_text():
                parse_only(monkeypatch, rest, module=False)
        elif rest[1] == "jax_megamoe":
            parse_only(monkeypatch, rest[1:], module=True)
        elif rest[1] == "pytest":
            check_pytest(rest[2:])
        else:
            assert rest[1] in ("venv", "pip"), command
    elif program == "pip":
        check_pip(rest)
    elif program == "pytest":
        check_pytest(rest)
    elif "/" in program or program == "bash":
        script = program if "/" in program else rest[0]
        assert (ROOT / script).is_file(), command
    elif importlib.util.find_spec("jax_megamoe") and program == "jax-megamoe":
        parse_only(monkeypatch, ["jax_megamoe", *rest], module=True)
    else:
        assert program in TOOLS, f"{command}: what is {program}?"


@by_name([block for block in SHELL if not block.not_run])
def test_commands_are_understood(block, monkeypatch):
    for command in doc_blocks.commands(block.text):
        with monkeypatch.context() as patch:
            check_command(patch, command)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_running_text_are_understood(page, monkeypatch):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for command in re.findall(r"`((?:python3? -m |pip )[^`]+)`", text):
        command = " ".join(command.split())
        if "..." in command:
            continue  # stands for any command
        command = command.replace("FILE", "file").replace("ARCH", "sm_90a")
        if re.fullmatch(r"python3? -m jax_megamoe \w+", command):
            command += " --help"  # the name of a command, without what it needs
        with monkeypatch.context() as patch:
            check_command(patch, command)


def test_info_runs(tmp_path):
    """What the README tells people to try first when something looks wrong."""
    output = run([sys.executable, "-m", "jax_megamoe", "info"], tmp_path, environment())
    assert "jax" in output


@pytest.mark.parametrize("name", ["install-and-demo", "tests"])
def test_ci_finds_its_commands_in_the_readme(name):
    """.ci/run takes the block after the marker and evaluates it."""
    (block,) = re.findall(rf"^<!-- {name} -->\n```sh\n(.*?)\n```$", read("README.md"), re.M | re.S)
    assert block.count("\n") == 0 and "pip install" in block
    assert f"readme_command {name}" in read(".ci/run")


# Checks that the checks above can fail -----------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "python -m jax_megamoe bench --tokenz 8",
        "python -m jax_megamoe dance",
        "python benchmarks/hopper.py --out x --granularity 64",
        "python examples/no_such_example.py",
        "pip install '.[cuda99]'",
        "pip install left-pad",
        "python -m pytest -m tpu",
        "curl example.com",
    ],
)
def test_wrong_commands_are_refused(command, monkeypatch, capsys):
    with pytest.raises(AssertionError):
        check_command(monkeypatch, command)


def test_a_replacement_has_to_find_something():
    block = doc_blocks.Block("page", 1, "python", "x = 4096\n", replacements=(("2048", "1"),))
    with pytest.raises(AssertionError, match="nothing to replace"):
        block.code()


# Links and numbers -------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(
        r"```.*?```|<!--.*?-->|^    [^\n]*$", "", read(page), flags=re.DOTALL | re.MULTILINE
    )
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}"


def test_docs_readme_lists_every_page():
    index = read("docs/README.md")
    for path in (ROOT / "docs").rglob("*.md"):
        name = str(path.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"]({name})" in index, name


@functools.cache
def figures():
    path = ROOT / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("benchmarks_figures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_plot_are_those_of_the_results():
    for path, text in figures().files().items():
        assert path.read_text() == text, f"run python benchmarks/figures.py: {path.name} differs"


def test_readme_ratios_are_those_of_the_results():
    """The sentences around the table."""
    content = json.loads(figures().RESULTS.read_text())
    curves = figures().Curves(content)
    text = " ".join(read("README.md").split())
    for tokens in (8, 512, 8192):
        assert f"{curves.ratio(curves.row, tokens):.1f}" in text.partition("<!-- begin hopper")[0]
    for tokens in (8, 8192):
        for times in (curves.plain[tokens], curves.row[tokens]["fused_us"]):
            assert f"{times:.0f} us" in text.partition("<!-- begin hopper")[0]
    slower = curves.per_32[8192]["fused_us"] / curves.row[8192]["fused_us"]
    assert f"takes {slower:.1f} times as long" in text.replace("# ", "")


def test_jitted_calls_get_columns_where_they_were_timed():
    content = json.loads(figures().RESULTS.read_text())
    for row in content["runs"][0]["results"]:
        row["call_us"] = 2 * row["fused_us"]
    lines = figures().performance_table(figures().Curves(content)).split("\n")
    assert lines[0].endswith("| jitted call us | plain / call |")
    assert {line.count("|") for line in lines} == {12}
    assert lines[2].split(" | ")[-1] == "7.30 |" and lines[2].startswith("| 1 | row | 48.1 |")


# The map of the tests ----------------------------------------------------------------------------


def test_the_map_of_the_tests_has_every_test():
    listed = re.findall(r"`((?:cc/tests/)?\w+\.(?:py|cc))`", read("tests/README.md"))
    there = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    there += [f"cc/tests/{path.name}" for path in (ROOT / "cc/tests").glob("*_test.cc")]
    assert sorted(listed) == sorted(there)


# A call, function by function --------------------------------------------------------------------

FRAMES = re.findall(r"^\| `([\w:.]+)` \| `([\w./]+)` \|", read("docs/a-call.md"), re.MULTILINE)


def defines(source: str, function: str) -> bool:
    """Whether a line declares or defines it; a call or a comment does not."""
    name = re.escape(function.rpartition(".")[2])
    python = rf"^ *def {name}\("
    # A type stands before the name on its line, or the name ends a declaration of a kernel.
    cpp = rf"^(?!return\b)[a-zA-Z][\w:<>,&* ]* {name}\(|^    {name}\(const "
    return re.search(f"{python}|{cpp}", source, re.MULTILINE) is not None


def test_frames_of_a_call_are_found():
    rows = [line for line in read("docs/a-call.md").splitlines() if line.startswith("| `")]
    assert len(FRAMES) == len(rows) > 20
    assert not defines("  x = linear1(y)\n// linear1(y)\n", "linear1")


@pytest.mark.parametrize("function, file", FRAMES)
def test_functions_of_a_call_are_where_the_page_says(function, file):
    assert defines(read(file), function)
    for path in re.findall(r"`((?:cc|jax_megamoe)/[\w./]+)`", read("docs/a-call.md")):
        assert (ROOT / path).is_file(), path
