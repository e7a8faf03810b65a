"""``info``: versions, devices, back ends, and the symmetric buffer of a configuration."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from jax_megamoe.cli import shared

PRESETS = {
    "flash": {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6},
    "pro": {"hidden": 7168, "intermediate": 3072, "experts": 384, "top_k": 6},
}
_ABSENT = "not part of this version"
BACKENDS = {"cpu": "available", "sm_90a": _ABSENT, "sm_100a": _ABSENT}


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "info",
        "show versions, back ends and buffer sizes",
        "The table lists every region of one rank's\nsymmetric buffer. Nothing of it is allocated.",
        "info --preset pro --ranks 16 --tokens 4096\n"
        "      buffers of a DeepSeek-V4-Pro layer on 16 ranks, 4096 tokens per rank and call",
    )
    option = parser.add_argument
    option(
        "--preset",
        choices=tuple(PRESETS),
        default="flash",
        help="a DeepSeek-V4 shape (default flash); the options below replace parts of it",
    )
    option("--experts", type=int, metavar="E", help="experts of all ranks")
    option("--top-k", type=int, metavar="K", help="experts per token")
    option("--hidden", type=int, metavar="H", help="width of a token")
    option("--intermediate", type=int, metavar="I", help="width of an expert")
    option("--tokens", type=int, default=8192, metavar="T", help="per rank and call (default 8192)")
    option("--ranks", type=int, default=8, metavar="R", help="expert-parallel ranks (default 8)")
    option("--ring-tokens", type=int, metavar="N", help="rows of the ring (default: chosen)")
    option("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    return parser


def _config(args):
    from jax_megamoe.config import MegaMoEConfig, swiglu

    given = {name: getattr(args, name) for name in PRESETS[args.preset]}
    shape = PRESETS[args.preset] | {name: v for name, v in given.items() if v is not None}
    return MegaMoEConfig(
        num_experts=shape["experts"],
        top_k=shape["top_k"],
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        max_tokens_per_rank=args.tokens,
        activation=swiglu(shared.SWIGLU_LIMIT),
        ring_tokens=args.ring_tokens,
    )


def run(args: Any) -> int:
    # Listing the devices must not claim most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jax_megamoe.symmetric import buffer_bytes, buffer_regions

    shared.check_output(args.json, "--json")
    config = _config(args)
    regions, total = buffer_regions(config, args.ranks), buffer_bytes(config, args.ranks)
    versions = shared.hardware()
    devices = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]

    rows = [(name.replace("_", "-"), text) for name, text in versions.items()]
    rows += [("devices", f"{len(devices)}, the first is {devices[0]}")]
    rows += [(f"back end {name}", state) for name, state in BACKENDS.items()]
    print(shared.format_table(rows, left=2))

    print(
        f"\nsymmetric buffer of one rank: {config.num_experts} experts, top-{config.top_k}, hidden "
        f"{config.hidden}, intermediate {config.intermediate}, {args.ranks} ranks, at most "
        f"{args.tokens} tokens per rank\n"
    )
    cells = [
        (
            region.name,
            region.dtype,
            "x".join(map(str, region.shape)),
            region.writer,
            region.reader,
            str(region.offset),
            str(region.num_bytes),
            shared.readable_bytes(region.num_bytes),
        )
        for region in regions
    ]
    cells.append(("total", "", "", "", "", "", str(total), shared.readable_bytes(total)))
    header = ("region", "dtype", "shape", "writer", "reader", "offset", "bytes", "size")
    print(shared.format_table(cells, header, left=5))
    if args.json is not None:
        content = {
            "schema": 1,
            "versions": versions,
            "devices": devices,
            "backends": BACKENDS,
            "config": dataclasses.asdict(config),
            "ranks": args.ranks,
            "regions": [dataclasses.asdict(region) for region in regions],
            "total_bytes": total,
        }
        shared.write_json(args.json, content)
    return 0
