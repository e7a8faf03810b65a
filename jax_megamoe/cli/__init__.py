"""The command line: ``python -m jax_megamoe {demo,info,bench,timeline,compile}``.

Each command is a module with `add_parser`, which declares its options, and `run`, which returns the
exit code: 0 for success, 1 for a check that failed, 2 for a request that cannot be served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_megamoe._ffi import __version__
from jax_megamoe.cli import bench, compile, demo, info, timeline
from jax_megamoe.errors import MegaMoEError

__all__ = ["build_parser", "main"]

_EPILOG = """\
example:
  python -m jax_megamoe demo --devices 4 --tokens 64
      run the layer on 4 virtual CPU devices with 64 tokens each and check it

`python -m jax_megamoe <command> --help` explains a command.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_megamoe",
        description="Try, inspect and measure the expert-parallel mixture-of-experts layer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jax_megamoe {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for command in (demo, info, bench, timeline, compile):
        command.add_parser(commands).set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. What a user can put right prints one line."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (MegaMoEError, MemoryError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
