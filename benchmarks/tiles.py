"""Times every tile of the GPU kernel at several batches: evidence for cc/gpu/sm90/tuning.h.

A tile is a kernel of its own. For each number of tokens all of them compute the same operands; the
table marks the one that a call would use and the fastest one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_megamoe._ffi import native
from jax_megamoe.cli import shared
from jax_megamoe.devtools import gpu_measure
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.symmetric import granularity_number

EPILOG = """examples:
  python benchmarks/tiles.py                                  # Flash, all granularities
  python benchmarks/tiles.py --preset pro --granularity row --tokens 64 128 256 --json tiles.json
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--preset", choices=tuple(gpu_measure.MODELS), default="flash")
    option("--granularity", nargs="+", choices=("32", "128", "row"), default=["32", "128", "row"])
    option("--tokens", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 8192], help="per rank")
    option("--devices", type=int, default=1, help="ranks, one on each GPU (default 1)")
    option("--repeats", type=int, default=15, help="timed calls of each (default 15)")
    option("--json", type=Path, help="also write everything to this file")
    option("--seed", type=int, default=0)
    return parser.parse_args(argv)


def measure(
    model: gpu_measure.Model,
    granularity: int | str,
    num_devices: int,
    tokens: Sequence[int],
    repeats: int,
    seed: int = 0,
    make_ranks: Callable[..., Any] = GpuRanks,
) -> list[dict[str, Any]]:
    """Results of `gpu_measure.Fused.measure` for every number of tokens and every tile."""
    config = gpu_measure.make_config(model, num_devices, max(tokens), granularity)
    rng = np.random.default_rng(seed)
    fused = gpu_measure.Fused(config, range(num_devices), rng, make_ranks)
    results = []
    for count in tokens:
        operands = gpu_measure.random_operands(config, num_devices, count, rng)
        for tile in range(num_tiles(config)):
            results.append(fused.measure(operands, tile=tile, repeats=repeats))
    return results


def num_tiles(config: Any) -> int:
    return len(native.gpu_tiles(granularity_number(config)))


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each number of tokens, a column for each tile: us, * chosen, < fastest."""
    tiles = sorted({row["tile"] for row in results})
    lines = []
    for granularity, tokens in dict.fromkeys(
        (row["granularity"], row["tokens_per_rank"]) for row in results
    ):
        own = {
            row["tile"]: row
            for row in results
            if (row["granularity"], row["tokens_per_rank"]) == (granularity, tokens)
        }
        fastest = min(own, key=lambda tile: own[tile]["fused_us"])
        cells = [
            f"{own[tile]['fused_us']:.1f}{'*' * own[tile]['selected']}{'<' * (tile == fastest)}"
            if tile in own
            else "-"
            for tile in tiles
        ]
        chosen = [tile for tile in own if own[tile]["selected"]]
        loss = own[chosen[0]]["fused_us"] / own[fastest]["fused_us"] - 1
        lines.append((granularity, tokens, *cells, f"{loss:.1%}"))
    header = ("granularity", "tokens/rank", *(f"tile {tile}" for tile in tiles), "chosen loses")
    return shared.format_table(lines, header)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    gpus = gpu_measure.num_gpus()
    if arguments.devices > gpus:
        raise SystemExit(f"--devices {arguments.devices}: this process sees {gpus} GPUs")
    model = gpu_measure.MODELS[arguments.preset]
    granularities = [g if g == "row" else int(g) for g in arguments.granularity]
    progress = shared.Progress()
    kernels = []
    for granularity in granularities:
        config = gpu_measure.make_config(
            model, arguments.devices, max(arguments.tokens), granularity
        )
        kernels += [(config, arguments.devices, tile) for tile in range(num_tiles(config))]
    progress(f"compile {len(kernels)} kernels")
    gpu_measure.compile_ahead(kernels)
    results = []
    for granularity in granularities:
        progress(f"granularity {granularity}")
        results += measure(
            model,
            granularity,
            arguments.devices,
            arguments.tokens,
            arguments.repeats,
            arguments.seed,
        )
    print(
        f"{arguments.preset}, {arguments.devices} rank(s), us; *: chosen by select_tile, <: fastest"
    )
    print(table(results))
    if arguments.json is not None:
        hardware = shared.hardware() | {"gpus": gpu_measure.gpu_names()}
        content = {"schema": 1, "benchmark": "tiles", "hardware": hardware, "results": results}
        shared.write_json(arguments.json, content | {"model": arguments.preset})
    bad = [row for row in results if not row["finite"]]
    for row in bad:
        print(f"FAIL: tile {row['tile']}, {row['tokens_per_rank']} tokens: not finite")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
