"""Times DeepSeek-V4's layers on Hopper GPUs: every model, number of ranks, granularity, batch.

Each row is a result of `python -m jax_megamoe bench` (see benchmarks/README.md); this program runs
all of them, writes one JSON file after each layer, so that an interrupted run is not lost, and a
table in Markdown at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EPILOG = """examples:
  python benchmarks/hopper.py --out results            # results.json and results.md, an hour
  python benchmarks/hopper.py --out results --quick    # fewer batches, minutes
  python benchmarks/hopper.py --out pro --preset pro --ranks 2 --tokens 512 2048 --granularity row
"""
ALL_TOKENS = [2**i for i in range(14)]  # 1 to 8192
QUICK_TOKENS = [8, 128, 2048]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--out", type=Path, required=True, help="name of the files, without .json and .md")
    option("--preset", nargs="+", choices=("flash", "pro"), default=["flash", "pro"])
    option("--ranks", type=int, nargs="+", help="default: 1, and 2 if there are two GPUs")
    option("--tokens", type=int, nargs="+", help="per rank (default: 1, 2, 4, ... 8192)")
    option("--granularity", nargs="+", choices=("32", "128", "row"), default=["32", "128", "row"])
    option("--quick", action="store_true", help=f"tokens {QUICK_TOKENS}, 7 timed calls of each")
    option("--repeats", type=int, help="timed calls of each (default 15)")
    option("--no-unfused", action="store_true", help="leave the unfused layer out")
    option("--seed", type=int, default=0)
    return parser.parse_args(argv)


def markdown(runs: Sequence[dict[str, Any]], hardware: dict[str, Any]) -> str:
    """All results as a document."""
    from jax_megamoe.devtools.gpu_measure import FLOOR_FORMULA

    lines = [
        f"GPUs: {', '.join(hardware['gpus'])}; jax {hardware['jax']}, jax_megamoe "
        f"{hardware['jax_megamoe']}.",
        "",
        "us: median over calls of the slowest rank's kernel, cold L2. call us: a jitted call of "
        "the fused layer, host wall time, warm caches. unfused: best variant, timed like that, "
        "measured at the first granularity.",
        f"Floor: {FLOOR_FORMULA}.",
    ]
    names = ("granularity", "routing", "tokens/rank", "rows", "tile", "us", "floor us", "of floor")
    names += ("TFLOP/s", "HBM GB/s", "link GB/s", "call us", "unfused us", "unfused / fused")
    names += ("unfused / call",)
    for run in runs:
        lines += ["", f"## {run['model']}, {run['ranks']} rank(s)", ""]
        lines += ["| " + " | ".join(names) + " |", "| --- | --- " + "| ---: " * 13 + "|"]
        for row in run["results"]:
            has = "unfused_us" in row
            cells = (
                *(row["granularity"], row["routing"], row["tokens_per_rank"], row["rows"]),
                *(row["tile"], f"{row['fused_us']:.1f}", f"{row['floor_us']:.1f}"),
                *(f"{row['of_floor']:.0%}", f"{row['tflops']:.0f}", f"{row['hbm_gb_s']:.0f}"),
                f"{row['link_gb_s']:.0f}" if run["ranks"] > 1 else "-",
                f"{row['call_us']:.0f}" if "call_us" in row else "-",
                f"{row['unfused_us']:.0f}" if has else "-",
                f"{row['ratio']:.2f}" if has else "-",
                f"{row['call_ratio']:.2f}" if "call_ratio" in row else "-",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jax_megamoe._backends import SM_90A
    from jax_megamoe.cli import bench, shared
    from jax_megamoe.devtools import gpu_measure
    from jax_megamoe.symmetric import moe_shape

    gpus = gpu_measure.num_gpus()
    all_ranks = arguments.ranks or ([1, 2] if gpus >= 2 else [1])
    if max(all_ranks) > gpus:
        raise SystemExit(f"--ranks {max(all_ranks)}: this process sees {gpus} GPUs")
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else ALL_TOKENS)
    repeats = arguments.repeats or (7 if arguments.quick else 15)
    granularities = [g if g == "row" else int(g) for g in arguments.granularity]
    progress = shared.Progress()

    layers = []
    for model in arguments.preset:
        for ranks in all_ranks:
            configs = [
                gpu_measure.make_config(gpu_measure.MODELS[model], ranks, max(tokens), granularity)
                for granularity in granularities
            ]
            layers.append((model, ranks, configs))
    kernels = set()
    for _, ranks, configs in layers:
        for config in configs:
            shape = moe_shape(config, ranks, SM_90A.name)
            tiles = SM_90A.used_tiles(config, shape, tokens)
            kernels |= {(config, ranks, tile) for tile in tiles}
    progress(f"compile {len(kernels)} kernels")
    gpu_measure.compile_ahead(sorted(kernels, key=str))

    hardware = shared.hardware() | {"gpus": gpu_measure.gpu_names()}
    runs: list[dict[str, Any]] = []
    for model, ranks, configs in layers:
        progress(f"{model}, {ranks} rank(s)")
        results = bench.measure_gpu(
            configs, ranks, tokens, repeats, arguments.seed, not arguments.no_unfused
        )
        runs.append({"model": model, "ranks": ranks, "results": results})
        content = {
            "schema": 1,
            "benchmark": "hopper",
            "hardware": hardware,
            "floor": gpu_measure.FLOOR_FORMULA,
            "repeats": repeats,
            "seed": arguments.seed,
            "runs": runs,
        }
        shared.write_json(arguments.out.with_suffix(".json"), content)
        print(f"{model}, {ranks} rank(s)\n{bench.gpu_table(results)}\n", flush=True)
    arguments.out.with_suffix(".md").write_text(markdown(runs, hardware))
    faults = [fault for run in runs for fault in bench.gpu_faults(run["results"])]
    print("\n".join(faults) or "all results finite, and close to the unfused layer's")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
