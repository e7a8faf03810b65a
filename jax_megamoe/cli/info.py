"""``info``: versions, devices, back ends, and the symmetric buffer of a configuration."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_megamoe import _backends
from jax_megamoe.cli import shared
from jax_megamoe.errors import MegaMoEError

__all__ = ["GRANULARITIES", "PRESETS", "add_parser", "add_shape_options", "config_of", "run"]

if TYPE_CHECKING:
    from jax_megamoe.config import MegaMoEConfig

PRESETS = {
    "flash": {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6},
    "pro": {"hidden": 7168, "intermediate": 3072, "experts": 384, "top_k": 6},
}
GRANULARITIES: tuple[int | str, ...] = (32, 128, "row")
#: Ranks of the presets in the table of sizes.
_PRESET_RANKS = 8


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "info",
        "show versions, back ends and buffer sizes",
        "The tables list GPUs, what a\nlayer's buffer takes on each back end, and every region of "
        "one rank's buffer on one of\nthem. Nothing of it is allocated.",
        "info --preset pro --ranks 16 --tokens 4096\n"
        "      buffers of a DeepSeek-V4-Pro layer on 16 ranks, 4096 tokens per rank and call",
    )
    option = parser.add_argument
    add_shape_options(parser)
    option(
        "--granularity",
        choices=tuple(map(str, GRANULARITIES)),
        default="32",
        help="elements of an activation row that share a scale (default 32)",
    )
    option(
        "--backend",
        choices=_backends.names(),
        help="whose buffer (default: that of the first device)",
    )
    option("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    return parser


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """A preset, options that replace parts of it, and the numbers of ranks and tokens."""
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


def config_of(args: Any, granularity: int | str = 32) -> MegaMoEConfig:
    """The configuration that the options of `add_shape_options` describe."""
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
        activation_granularity=granularity,
        ring_tokens=args.ring_tokens,
    )


def _gpus(devices) -> list[dict[str, Any]]:
    return [
        {
            "id": device.id,
            "name": device.device_kind,
            "compute_capability": str(getattr(device, "compute_capability", "unknown")),
        }
        for device in devices
        if device.platform == "gpu"
    ]


def _backend_of(device) -> str:
    """The back end that a layer on this device has; "" if it is refused."""
    try:
        return _backends.device_backend(device)
    except MegaMoEError:
        return ""


def _states(devices) -> dict[str, str]:
    """Name of a back end -> whether it can be used here."""
    found = collections.Counter(map(_backend_of, devices))
    states = {one.name: one.availability(found[one.name]) for one in _backends.all_backends()}
    return states | dict.fromkeys(_backends.UNSUPPORTED, "not part of this version")


def _buffer_sizes(config, args) -> list[dict[str, Any]]:
    """Bytes of one rank's buffer: the shape that was asked for and the presets, everywhere."""
    from jax_megamoe.symmetric import buffer_bytes

    own = argparse.Namespace(tokens=args.tokens, ring_tokens=args.ring_tokens)
    for name in ("experts", "top_k", "hidden", "intermediate"):
        setattr(own, name, None)
    configs, ranks = {"given": config}, {"given": args.ranks}
    for name in PRESETS:
        own.preset = name
        configs[name], ranks[name] = config_of(own), _PRESET_RANKS
    sizes = []
    for name, shape in configs.items():
        for backend in _backends.names():
            for granularity in GRANULARITIES:
                same = dataclasses.replace(shape, activation_granularity=granularity)
                num_bytes = buffer_bytes(same, ranks[name], backend)
                sizes.append(
                    {
                        "shape": name,
                        "ranks": ranks[name],
                        "backend": backend,
                        "granularity": granularity,
                        "bytes": num_bytes,
                    }
                )
    return sizes


def _print_sizes(sizes: Sequence[dict[str, Any]]) -> None:
    header = ("shape", "ranks", "back end", *(f"granularity {g}" for g in GRANULARITIES))
    rows: dict[tuple[object, ...], list[str]] = {}
    for size in sizes:
        cells = rows.setdefault((size["shape"], size["ranks"], size["backend"]), [])
        cells.append(shared.readable_bytes(size["bytes"]))
    print(shared.format_table([(*key, *cells) for key, cells in rows.items()], header, left=3))


def run(args: Any) -> int:
    # Listing the devices must not claim most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jax_megamoe.symmetric import buffer_bytes, buffer_regions

    shared.check_output(args.json, "--json")
    config = config_of(args, "row" if args.granularity == "row" else int(args.granularity))
    devices = jax.devices()
    gpus = _gpus(devices)
    backends = _states(devices)
    chosen = args.backend or _backend_of(devices[0]) or _backends.CPU.name
    regions = buffer_regions(config, args.ranks, chosen)
    total = buffer_bytes(config, args.ranks, chosen)
    sizes = _buffer_sizes(config, args)
    versions = shared.hardware()
    names = [f"{device.platform}:{device.id} {device.device_kind}" for device in devices]

    lines = [(name.replace("_", "-"), text) for name, text in versions.items()]
    lines += [("devices", f"{len(names)}, the first is {names[0]}")]
    lines += [
        (f"GPU {gpu['id']}", f"{gpu['name']}, compute {gpu['compute_capability']}") for gpu in gpus
    ]
    lines += [(f"back end {name}", state) for name, state in backends.items()]
    print(shared.format_table(lines, left=2))

    print(f"\nsymmetric buffer of one rank, at most {args.tokens} tokens per rank\n")
    _print_sizes(sizes)

    print(
        f"\nits regions on {chosen}: {config.num_experts} experts, top-{config.top_k}, hidden "
        f"{config.hidden}, intermediate {config.intermediate}, {args.ranks} ranks, at most "
        f"{args.tokens} tokens per rank, granularity {config.activation_granularity}\n"
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
            "schema": 2,
            "versions": versions,
            "devices": names,
            "gpus": gpus,
            "backends": backends,
            "config": dataclasses.asdict(config),
            "ranks": args.ranks,
            "buffer_bytes": sizes,
            "backend": chosen,
            "regions": [dataclasses.asdict(region) for region in regions],
            "total_bytes": total,
        }
        shared.write_json(args.json, content)
    return 0
