"""Makes the table and the plot of README.md from benchmarks/results/hopper_1x_h200.json.

    python benchmarks/figures.py            # writes docs/images/hopper_1x_h200.svg and the tables
    python benchmarks/figures.py --check    # ends with 1 if that would change a file

The results are what `benchmarks/hopper.py` writes, with the command, the date and the kernel's
version added by hand. The plot is written as text, without a plotting library, so that it is the
same everywhere and a test can compare it; it has a background of its own and follows the reader's
light or dark scheme. The tables are between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EPILOG = """examples:
  python benchmarks/figures.py            # writes what has changed
  python benchmarks/figures.py --check    # says what would change
"""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hopper_1x_h200.json"
PLOT = ROOT / "docs" / "images" / "hopper_1x_h200.svg"


class Curves:
    """Times in microseconds over tokens, `least` or more, of one layer on one GPU."""

    def __init__(self, content: dict[str, Any], least: int = 1):
        (run,) = (r for r in content["runs"] if (r["model"], r["ranks"]) == ("flash", 1))
        rows = [row for row in run["results"] if row["routing"] == "uniform"]
        rows = [row for row in rows if row["tokens_per_rank"] >= least]
        self.tokens = sorted({row["tokens_per_rank"] for row in rows})
        by = {(row["granularity"], row["tokens_per_rank"]): row for row in rows}
        self.row = {t: by["row", t] for t in self.tokens}
        self.per_32 = {t: by[32, t] for t in self.tokens}
        self.per_128 = {t: by[128, t] for t in self.tokens}
        self.plain = {t: self.row[t]["unfused_us"] for t in self.tokens}
        #: Whether jitted calls of the fused layer were timed as well, which older results lack.
        self.has_calls = all("call_us" in self.row[t] for t in self.tokens)

    def ratio(self, rows: dict[int, dict[str, Any]], tokens: int) -> float:
        return self.plain[tokens] / rows[tokens]["fused_us"]


def microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 200 else f"{value:.1f}"


def readme_table(curves: Curves) -> str:
    lines = [
        "| tokens on the GPU | plain JAX, BF16 weights | fused, FP4 weights, scale per row | "
        "plain / fused | fused, scale per 32 (default) | plain / fused |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for t in curves.tokens:
        lines.append(
            f"| {t} | {curves.plain[t]:.0f} us | {microseconds(curves.row[t]['fused_us'])} us "
            f"| {curves.ratio(curves.row, t):.1f} "
            f"| {microseconds(curves.per_32[t]['fused_us'])} us "
            f"| {curves.ratio(curves.per_32, t):.1f} |"
        )
    return "\n".join(lines)


def performance_table(curves: Curves) -> str:
    names = ["tokens", "scales", "us", "floor us", "of floor", "TFLOP/s", "HBM GB/s"]
    names += ["plain JAX us", "plain / fused"]
    if curves.has_calls:
        names += ["jitted call us", "plain / call"]
    rules = ["---:", "---"] + ["---:"] * (len(names) - 2)
    lines = [" | ".join(["", *cells, ""]).strip() for cells in (names, rules)]
    for name, rows in (("row", curves.row), ("128", curves.per_128), ("32", curves.per_32)):
        for t in curves.tokens:
            row = rows[t]
            cells = [f"{t}", name, microseconds(row["fused_us"]), microseconds(row["floor_us"])]
            cells += [f"{row['of_floor']:.0%}", f"{row['tflops']:.0f}", f"{row['hbm_gb_s']:.0f}"]
            cells += [f"{curves.plain[t]:.0f}", f"{curves.ratio(rows, t):.2f}"]
            if curves.has_calls:
                cells += [microseconds(row["call_us"]), f"{curves.plain[t] / row['call_us']:.2f}"]
            lines.append(" | ".join(["", *cells, ""]).strip())
    return "\n".join(lines)


# The plot ----------------------------------------------------------------------------------------

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 78, 376  # of the area that has axes; RIGHT is a margin
STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de }
    text { fill: #1f2328; font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
    .title { font-size: 15px; font-weight: 600 }
    .small { font-size: 12px; fill: #59636e }
    .grid { stroke: #d0d7de; stroke-width: 1 }
    .curve { fill: none; stroke-width: 2.5 }
    .plain { stroke: #8250df } .dot.plain, text.plain { fill: #8250df; stroke: none }
    .per32 { stroke: #0969da } .dot.per32, text.per32 { fill: #0969da; stroke: none }
    .row { stroke: #1a7f37 } .dot.row, text.row { fill: #1a7f37; stroke: none }
    .floor { stroke: #59636e; stroke-dasharray: 2 4; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d }
      text { fill: #f0f6fc }
      .small { fill: #9198a1 }
      .grid { stroke: #3d444d }
      .plain { stroke: #ab7df8 } .dot.plain, text.plain { fill: #ab7df8 }
      .per32 { stroke: #4493f8 } .dot.per32, text.per32 { fill: #4493f8 }
      .row { stroke: #3fb950 } .dot.row, text.row { fill: #3fb950 }
      .floor { stroke: #9198a1 }
    }"""


def plot(curves: Curves, content: dict[str, Any]) -> str:
    """An SVG: both layers and the floor over tokens, both axes logarithmic, ratios on top."""
    low, high = 50.0, 7000.0
    first, last = curves.tokens[0], curves.tokens[-1]

    def x(tokens: float) -> float:
        share = math.log(tokens / first) / math.log(last / first)
        return LEFT + 24 + share * (WIDTH - RIGHT - LEFT - 24)

    def y(us: float) -> float:
        return BOTTOM - math.log(us / low) / math.log(high / low) * (BOTTOM - TOP)

    gpu = content["hardware"]["gpus"][0]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"  <title>One MoE layer on one {gpu}: plain JAX and jax_megamoe</title>",
        f"  <style>{STYLE}\n  </style>",
        f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
    ]

    def text(px: float, py: float, content: str, kind: str = "", anchor: str = "middle") -> None:
        kind = f' class="{kind}"' if kind else ""
        lines.append(
            f'  <text{kind} x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{content}</text>'
        )

    text(20, 28, f"One MoE layer on one {gpu}: microseconds a call", "title", "start")
    text(WIDTH - 22, 56, "plain / per row", "row", "end")
    for t in curves.tokens:
        text(x(t), 56, f"{curves.ratio(curves.row, t):.1f}x", "row")
    for us in (50, 100, 200, 500, 1000, 2000, 5000):
        lines.append(f'  <path class="grid" d="M{LEFT} {y(us):.1f}H{WIDTH - RIGHT + 12}"/>')
        text(LEFT - 8, y(us) + 4, f"{us}", "small", "end")
    for t in curves.tokens:
        text(x(t), BOTTOM + 20, f"{t}", "small")
    text(
        (LEFT + WIDTH - RIGHT) / 2,
        BOTTOM + 44,
        "tokens on the GPU; DeepSeek-V4-Flash, top-6 of 32 experts",
        "small",
    )

    series = (
        ("plain", "plain JAX, BF16", curves.plain),
        ("per32", "fused FP4, per 32", {t: r["fused_us"] for t, r in curves.per_32.items()}),
        ("row", "fused FP4, per row", {t: r["fused_us"] for t, r in curves.row.items()}),
        ("floor", "floor", {t: r["floor_us"] for t, r in curves.row.items()}),
    )
    at = {}
    for kind, _, times in series:
        points = " ".join(f"{x(t):.1f},{y(us):.1f}" for t, us in times.items())
        lines.append(f'  <polyline class="curve {kind}" points="{points}"/>')
        if kind != "floor":
            for t, us in times.items():
                lines.append(
                    f'  <circle class="dot {kind}" cx="{x(t):.1f}" cy="{y(us):.1f}" r="4"/>'
                )
        at[kind] = y(times[last])
    # Labels at the right end of the curves, far enough apart to be read.
    place = -math.inf
    for kind, name, _ in sorted(series, key=lambda s: at[s[0]]):
        place = max(at[kind] + 4, place + 17)
        text(x(last) + 14, place, name, kind if kind != "floor" else "small", "start")
    return "\n".join([*lines, "</svg>"]) + "\n"


# Files -------------------------------------------------------------------------------------------


def replaced(text: str, name: str, table: str) -> str:
    """`text` with the text between the markers of `name` replaced by `table`."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    found, count = pattern.subn(lambda _: f"{begin}{table}\n{end}", text)
    if count != 1:
        raise SystemExit(f"markers of {name!r}: found {count} times, expected once")
    return found


def files() -> dict[Path, str]:
    """What every generated file should contain."""
    content = json.loads(RESULTS.read_text())
    # With a single token the plain layer's host time is little but launches, which the fused
    # layer's time leaves out: no ratio to lead with.
    shown, curves = Curves(content, least=8), Curves(content)
    readme, performance = ROOT / "README.md", ROOT / "docs" / "performance.md"
    return {
        PLOT: plot(shown, content),
        readme: replaced(readme.read_text(), "hopper", readme_table(shown)),
        performance: replaced(performance.read_text(), "hopper", performance_table(curves)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 on drift")
    arguments = parser.parse_args(argv)
    changed = {p: t for p, t in files().items() if not p.exists() or p.read_text() != t}
    for path, text in changed.items():
        print(f"{'differs' if arguments.check else 'wrote'}: {path.relative_to(ROOT)}")
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if changed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
