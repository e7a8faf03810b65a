"""``compile``: prepares kernels for an architecture ahead of time."""

from __future__ import annotations

import sys
from typing import Any

from jax_megamoe.cli import shared

ARCHITECTURES = ("cpu", "sm_90a", "sm_100a")


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "compile",
        "compile kernels ahead of time",
        "This version's only back end is cpu, which has\nnothing to compile; GPU architectures are "
        "refused with exit code 2.",
        "compile --arch cpu\n      says that nothing is left to compile",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True, help="what to compile for")
    return parser


def run(args: Any) -> int:
    if args.arch == "cpu":
        print(
            "cpu: nothing to compile. The native module holds AVX-512, AVX2 and portable loops and "
            "picks among them when it runs."
        )
        return 0
    print(
        f"jax_megamoe: --arch: got {args.arch}; this version contains no kernels for it. Its back "
        "end is cpu; jax_megamoe.unfused is plain JAX and runs on GPUs too.",
        file=sys.stderr,
    )
    return 2
