"""Fenced blocks of README.md and docs/, and what their pages say about running them.

A comment right before a fence says what the reader does not need to see:

    <!-- gpu; on CPU with: 4096 -> 256; "gpu" -> "cpu" -->     needs a GPU, or these replacements
    <!-- with: "/models/ -> "models/ -->                       replacements wherever it runs
    <!-- not run: why -->
    <!-- test-setup
    x = ...                                                    code that runs before the block
    -->

`python tests/support/doc_blocks.py PAGE...` runs the Python blocks of pages on 8 virtual CPU
devices, each page in a namespace of its own and in an empty folder, and prints what failed as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "sh", "text")


@dataclasses.dataclass(frozen=True)
class Block:
    """Attributes: what stands in the fence, where, and what the comment before it says."""

    page: str  # relative to the root
    line: int  # of the fence, from 1
    language: str
    text: str
    setup: str = ""
    replacements: tuple[tuple[str, str], ...] = ()
    gpu: bool = False
    not_run: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def code(self, on_gpu: bool = False) -> str:
        """The block as it is run. A replacement that finds nothing is an error of the page."""
        text = self.text
        for old, new in () if on_gpu and self.gpu else self.replacements:
            assert old in text, f"{self.name}: nothing to replace like {old!r}"
            text = text.replace(old, new)
        return text


def pages() -> list[str]:
    """Every page, relative to the root."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in ("docs", "examples", "benchmarks", "tests"):
        paths += sorted((ROOT / folder).rglob("*.md"))
    return [str(path.relative_to(ROOT)) for path in paths]


def _comment(lines: list[str], fence: int) -> str:
    """The text of the comments that end on the line before `fence`, an index."""
    parts: list[str] = []
    end = fence - 1
    while end >= 0 and lines[end].rstrip().endswith("-->"):
        start = end
        while not lines[start].startswith("<!--"):
            start -= 1
            assert start >= 0, f"line {end + 1}: a comment without a beginning"
        text = "\n".join(lines[start : end + 1])
        parts.insert(0, text.removeprefix("<!--").rstrip().removesuffix("-->"))
        end = start - 1
    return "\n\0".join(parts)


def _annotations(comment: str) -> dict:
    found: dict = {}
    for part in filter(None, (text.strip() for text in comment.split("\0"))):
        if part.startswith("test-setup"):
            found["setup"] = part.removeprefix("test-setup").strip() + "\n"
        elif part.startswith("not run:"):
            found["not_run"] = part.removeprefix("not run:").strip()
        elif match := re.fullmatch(r"(gpu; on CPU )?with: (.*)", part, re.DOTALL):
            found["gpu"] = match[1] is not None
            pairs = (pair.split(" -> ") for pair in match[2].split("; "))
            found["replacements"] = tuple((old.strip(), new.strip()) for old, new in pairs)
    return found


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    lines = (ROOT / page).read_text().split("\n")
    found, i = [], 0
    while i < len(lines):
        if lines[i].startswith("```"):
            end = lines.index("```", i + 1)
            text = "\n".join(lines[i + 1 : end]) + "\n"
            annotations = _annotations(_comment(lines, i))
            found.append(Block(page, i + 1, lines[i][3:], text, **annotations))
            i = end
        i += 1
    return found


def commands(text: str) -> list[str]:
    """The commands of a shell block: continued lines joined, comments and `&&` taken apart."""
    joined = text.replace("\\\n", " ")
    parts = []
    for line in joined.split("\n"):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        parts += [part.strip(" ()") for part in line.split("&&") if part.strip()]
    return parts


# Running pages -----------------------------------------------------------------------------------


def small_model(make, path: str, **options) -> None:
    """Writes a small checkpoint with the names of a published one: `make` of checkpoint_files."""
    import numpy as np

    import checkpoint_files

    checkpoint_files.write(make(np.random.default_rng(), calm=True, **options), Path(path))


def run_page(page: str) -> str:
    """Runs the Python blocks of a page, one after the other; returns the traceback, or ""."""
    import checkpoint_files

    namespace: dict = {"small_model": small_model, "files": checkpoint_files}
    for block in blocks(page):
        if block.language != "python" or block.not_run:
            continue
        try:
            # Line numbers of the page in tracebacks.
            code = block.code()
            exec(compile(block.setup, f"{block.name} test-setup", "exec"), namespace)
            exec(compile("\n" * block.line + code, page, "exec"), namespace)
        except Exception:
            return f"{block.name}\n{traceback.format_exc()}"
    return ""


def main() -> None:
    import jax_megamoe as jmm

    jmm.use_virtual_cpu_devices(8)
    results = {}
    for page in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                results[page] = run_page(page)
            finally:
                os.chdir(before)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
