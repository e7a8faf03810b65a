"""``timeline``: one traced call on GPUs, as a file for Perfetto and as a table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_megamoe.cli import info, shared
from jax_megamoe.errors import check

__all__ = ["ROUTINGS", "add_parser", "num_tiles", "record", "run"]

ROUTINGS = ("uniform", "zipf", "none")


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "timeline",
        "record what each role of the GPU kernel does when",
        "One call with a cold\nL2 is recorded, after warm ones. Recording takes time of its own: "
        "see `bench` for times.",
        "timeline --out trace.json --preset flash --tokens 128 --granularity row\n"
        "      open trace.json at ui.perfetto.dev; the table on the screen is its summary",
    )
    option = parser.add_argument
    option("--out", type=Path, required=True, metavar="FILE", help="the trace, for Perfetto")
    option(
        "--preset",
        choices=tuple(info.PRESETS),
        default="flash",
        help="a DeepSeek-V4 shape with its experts over 8 GPUs (default flash); the options below "
        "replace parts of it",
    )
    option("--hidden", type=int, metavar="H", help="token width")
    option("--intermediate", type=int, metavar="I", help="expert width")
    option("--local-experts", type=int, metavar="E", help="experts of each rank")
    option("--top-k", type=int, metavar="K", help="experts per token")
    option("--granularity", choices=("32", "128", "row"), default="32", help="default 32")
    option("--tokens", type=int, default=128, metavar="T", help="per rank (default 128)")
    option("--ranks", type=int, default=1, metavar="R", help="default 1")
    option(
        "--devices",
        type=int,
        metavar="G",
        help="GPUs; rank r is on GPU r mod G, and ranks on one GPU share its SMs (default: as many "
        "as there are, at most R)",
    )
    option("--routing", choices=ROUTINGS, default="uniform", help="default uniform")
    option("--tile", type=int, default=-1, metavar="N", help="default: the one for this shape")
    option("--seed", type=int, default=0, help="of weights, tokens and routing (default 0)")
    return parser


def run(args: Any) -> int:
    from jax_megamoe.devtools import gpu_measure, timeline

    shared.check_output(args.out, "--out")
    for name in ("tokens", "ranks"):
        value, remedy = getattr(args, name), "use a positive number"
        check(value > 0, f"--{name}", got=value, want="at least 1", remedy=remedy)
    given = ("hidden", "intermediate", "local_experts", "top_k")
    changes = {name: getattr(args, name) for name in given if getattr(args, name) is not None}
    model = gpu_measure.MODELS[args.preset]._replace(**changes)
    granularity = "row" if args.granularity == "row" else int(args.granularity)
    config = gpu_measure.make_config(model, args.ranks, args.tokens, granularity)
    config.local_experts(args.ranks)
    rng = shared.generator(args.seed)
    gpus = gpu_measure.num_gpus()
    wanted = args.devices if args.devices is not None else min(args.ranks, max(gpus, 1))
    check(
        1 <= wanted <= gpus,
        "--devices",
        got=wanted,
        want=f"1 to {gpus}, the GPUs of this process" if gpus else "a machine with an NVIDIA GPU",
        remedy="look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    )
    check(
        -1 <= args.tile < num_tiles(granularity),
        "--tile",
        got=args.tile,
        want=f"0 to {num_tiles(granularity) - 1} for granularity {granularity}",
        remedy="tiles are numbered from the narrowest on",
    )
    devices = [rank % wanted for rank in range(args.ranks)]
    progress = shared.Progress()
    progress("random weights; compile the kernel with its trace")
    row, timelines = record(config, devices, args.tokens, rng, args.routing, args.tile)
    args.out.write_text(json.dumps(timeline.chrome_trace(timelines, devices)) + "\n")
    progress(f"wrote {args.out}")
    print(
        f"{dataclasses.asdict(config)}\n{args.ranks} ranks on {wanted} GPUs, {args.tokens} tokens "
        f"per rank, {args.routing} routing, tile {row['tile']}: {row['fused_us']:.1f} us\n"
    )
    print(timeline.summary_table(timeline.summary(timelines, devices)))
    dropped = timeline.num_dropped(timelines)
    if dropped:
        print(f"\n{dropped} lanes had more intervals than their buffer holds; the rest is missing")
    return 0


def num_tiles(granularity: int | str) -> int:
    from jax_megamoe._ffi import native

    return len(native.gpu_tiles(0 if granularity == "row" else int(granularity)))


def record(
    config: Any,
    devices: list[int],
    num_tokens: int,
    rng: Any,
    routing: str = "uniform",
    tile: int = -1,
    **options: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """(result of `gpu_measure.Fused.measure`, timeline of each rank) of one call."""
    from jax_megamoe.devtools import gpu_measure

    fused = gpu_measure.Fused(config, devices, rng, trace=True, **options)
    operands = gpu_measure.random_operands(config, len(devices), num_tokens, rng, routing)
    fused.measure(operands, tile=tile, repeats=1)
    # One launch is one call, and a launch empties the buffer of intervals before it starts.
    row = fused.measure(operands, tile=tile, repeats=1)
    return row, [fused.ranks.trace(rank) for rank in range(len(devices))]
