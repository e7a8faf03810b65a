"""``compile``: compiles the GPU kernels ahead of time, and says what each of them needs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import re
import sys
import time
from typing import Any

from jax_megamoe import _backends
from jax_megamoe.cli import cubin, info, shared
from jax_megamoe.config import ACTIVATIONS
from jax_megamoe.errors import check

__all__ = ["ACCEPTED_LOCAL_BYTES", "GRANULARITIES", "add_parser", "run"]

GRANULARITIES = tuple(map(str, info.GRANULARITIES))
#: Local memory per thread that is accepted. The compiler keeps two dozen values there that it uses
#: before a call's first item, at the start or end of items, and to look up rows that are pulled;
#: more would be accumulators or fragments, which the main loop would load and store.
ACCEPTED_LOCAL_BYTES = 96

# These are warnings of the assembler when it gives up the overlap that the kernel was written for.
# Each reason has a wording and a number of its own; the expressions match what they share.
_SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized")
_IGNORED = re.compile(r"setmaxnreg.*ignored|ignor.*setmaxnreg")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "compile",
        "compile kernels ahead of time",
        "For sm_90a this needs NVRTC but\nno GPU. Kernels are kept in $JAX_MEGAMOE_CACHE_DIR "
        "(default ~/.cache/jax_megamoe), where a\nlayer of the same shape finds them. The exit "
        "code is 1 if a kernel does not compile, loses\nits overlap of tensor core instructions, "
        "or needs local memory beyond the accepted bytes.\ncpu has nothing to compile; sm_100a is "
        "refused with exit code 2.",
        "compile --arch sm_90a --preset flash --granularity 128 --jobs 2\n"
        "      all tiles of a DeepSeek-V4-Flash layer with FP8 tensor cores, two at a time\n"
        "  python -m jax_megamoe compile --arch sm_90a --activation gpt_oss_swiglu --bias\n"
        "      kernels of the same shape with the activation of gpt-oss",
    )
    option = parser.add_argument
    names = (*_backends.names(), *_backends.UNSUPPORTED)
    option("--arch", choices=names, required=True, help="what to compile for")
    option(
        "--granularity",
        choices=(*GRANULARITIES, "all"),
        default="all",
        help="elements of an activation row that share a scale (default all of them)",
    )
    option("--tile", default="all", metavar="N", help="number of a tile, or all (default)")
    option(
        "--activation",
        choices=(*ACTIVATIONS, "all"),
        default="swiglu",
        help="what the kernels are compiled for (default swiglu)",
    )
    option("--bias", action="store_true", help="kernels for experts with biases")
    info.add_shape_options(parser)
    option("--jobs", type=int, default=1, metavar="N", help="kernels at a time (default 1)")
    option(
        "--max-spill",
        type=int,
        metavar="BYTES",
        help=f"local memory per thread that is accepted (default {ACCEPTED_LOCAL_BYTES})",
    )
    return parser


@dataclasses.dataclass(frozen=True)
class _Job:
    """One kernel to compile. `options` go to the compiler."""

    granularity: str
    activation: str  # with "+bias" if experts have biases
    tile: int
    block_m: int
    options: tuple[str, ...]
    include_dir: str
    nvrtc_path: str

    @property
    def name(self) -> str:
        plain = f"granularity {self.granularity}, tile {self.tile}"
        return plain if self.activation == "swiglu" else f"{plain}, {self.activation}"


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What became of a job. `error` is empty if it compiled."""

    job: _Job
    seconds: float
    error: str = ""
    log: str = ""
    cache: str = ""
    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0


def run(args: Any) -> int:
    if args.arch not in _backends.names():
        known = " or ".join(reversed(_backends.names()))
        print(
            f"jax_megamoe: --arch: got {args.arch}; expected {known}, this version contains "
            "no kernels for it. jax_megamoe.unfused is plain JAX and runs on such GPUs too.",
            file=sys.stderr,
        )
        return 2
    backend = _backends.get(args.arch)
    if backend.nothing_to_compile:
        print(f"{backend.name}: {backend.nothing_to_compile}")
        return 0
    for name in ("jobs", "max_spill"):
        value = getattr(args, name)
        check(
            value is None or value >= (name == "jobs"),
            f"--{name.replace('_', '-')}",
            got=value,
            want="1 or more" if name == "jobs" else "0 or more",
            remedy="leave it out for the default",
        )
    jobs = _jobs(args, backend)
    progress = shared.Progress()
    progress(f"kernels to compile: {len(jobs)}, {args.jobs} at a time")
    outcomes = []
    for outcome in _outcomes(jobs, args.jobs):
        progress(
            f"{outcome.job.name}: {outcome.seconds:.1f} s{', FAILED' if outcome.error else ''}"
        )
        outcomes.append(outcome)
    print(_table(outcomes))
    faults = [line for outcome in outcomes for line in _faults(outcome, args.max_spill)]
    print("\n".join(faults) or "all compiled; no spills beyond what is accepted, no warnings")
    return 1 if faults else 0


def _jobs(args, backend: _backends.Backend) -> list[_Job]:
    from jax_megamoe._headers import include_dir
    from jax_megamoe._nvrtc import nvrtc_path
    from jax_megamoe.symmetric import moe_shape

    wanted = GRANULARITIES if args.granularity == "all" else (args.granularity,)
    include, nvrtc = str(include_dir()), nvrtc_path()
    activations = tuple(ACTIVATIONS) if args.activation == "all" else (args.activation,)
    jobs, most = [], 0
    for name, activation in itertools.product(wanted, activations):
        config = info.config_of(args, name if name == "row" else int(name))
        shape = moe_shape(config, args.ranks, backend.name)
        tiles = backend.tiles(config)
        most = max(most, len(tiles))
        for tile, row in enumerate(tiles):
            if args.tile in ("all", str(tile)):
                options = backend.kernel_options(config, shape, tile, args.bias, activation)
                label = f"{activation}+bias" if args.bias else activation
                kernel = (tile, row["block_m"], tuple(options))
                jobs.append(_Job(name, label, *kernel, include, nvrtc))
    check(
        bool(jobs),
        "--tile",
        got=args.tile,
        want=f"all, or a number from 0 to {most - 1}",
        remedy="tiles are numbered from the narrowest on",
    )
    return jobs


def _outcomes(jobs, num_processes):
    """The outcomes in the order of the jobs, each as soon as it and those before it are there."""
    if num_processes == 1 or len(jobs) == 1:
        yield from map(_compile, jobs)
        return
    # Processes, not threads: the native module compiles one kernel at a time.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(num_processes, len(jobs)), mp_context=spawn
    ) as pool:
        yield from pool.map(_compile, jobs)


def _compile(job: _Job) -> _Outcome:
    from jax_megamoe._ffi import native

    start = time.perf_counter()
    try:
        code, log, cache = native.compile_kernel(job.include_dir, list(job.options), job.nvrtc_path)
    except RuntimeError as error:
        return _Outcome(job, time.perf_counter() - start, error=str(error))
    seconds = time.perf_counter() - start
    needs = cubin.read_needs(code, ("jmm_smem_bytes",))
    return _Outcome(
        job,
        seconds,
        log=log,
        cache=cache,
        registers=needs.registers,
        shared_bytes=needs.words["jmm_smem_bytes"],
        local_bytes=needs.local_bytes,
    )


def _spills(log: str) -> tuple[int, int] | None:
    """Bytes of spill (stores, loads) of all functions, from the log; None if it has none."""
    found = [tuple(map(int, pair)) for pair in _SPILLS.findall(log)]
    return (sum(s for s, _ in found), sum(load for _, load in found)) if found else None


def _table(outcomes) -> str:
    needs_header = ("registers", "shared", "local", "spill stores", "spill loads")
    header = ("granularity", "activation", "tile", "tokens", *needs_header, "seconds", "cache")
    rows = []
    for outcome in outcomes:
        job = outcome.job
        needs: tuple[object, ...] = ("-",) * len(needs_header)
        if not outcome.error:
            spills = _spills(outcome.log) or ("-", "-")
            needs = (outcome.registers, outcome.shared_bytes, outcome.local_bytes, *spills)
        cache = outcome.cache or "-"
        rows.append(
            (
                job.granularity,
                job.activation,
                job.tile,
                job.block_m,
                *needs,
                f"{outcome.seconds:.1f}",
                cache,
            )
        )
    return shared.format_table(rows, header, left=2)


def _faults(outcome, max_spill) -> list[str]:
    """A line for everything about an outcome that makes the command fail."""
    job = outcome.job
    name = job.name
    if outcome.error:
        return [f"FAIL: {name} does not compile: {outcome.error.strip()}"]
    faults = [
        f"FAIL: {name}: {line.partition(':')[2].strip()}"
        for line in outcome.log.splitlines()
        if _SERIALISED.search(line) or _IGNORED.search(line)
    ]
    accepted = ACCEPTED_LOCAL_BYTES if max_spill is None else max_spill
    if outcome.local_bytes > accepted:
        faults.append(
            f"FAIL: {name}: {outcome.local_bytes} bytes of local memory per thread, accepted "
            f"{accepted}"
        )
    return faults
