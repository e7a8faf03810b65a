"""Calls the GPU kernel thousands of times with changing routings, and compares every bit.

A pool of random calls is computed once with each tile, and each result is judged against the
reference by the error rule of docs/numerics.md. Then calls of the pool follow each other in random
order, with data regions overwritten by 0xFF in between, and every y has to have the bits that it
had before. A call differs from the one before in rows, loads and tile, so that whatever a call
leaves behind would show.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the reference; GPUs are for the kernel

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_megamoe as jmm
from jax_megamoe import reference
from jax_megamoe._ffi import native
from jax_megamoe.cli import shared
from jax_megamoe.devtools import gpu_measure
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.symmetric import granularity_number

EPILOG = """examples:
  python benchmarks/soak.py                                        # 10,000 calls on one GPU
  python benchmarks/soak.py --gpus 2 --ranks 2 --granularity 32 --calls 100000
"""
KINDS = ("uniform", "zipf", "masked", "few rows", "one expert", "none")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--calls", type=int, default=10_000)
    option("--pool", type=int, default=50, help="different calls (default 50)")
    option("--gpus", type=int, default=1)
    option("--ranks", type=int, default=2, help="rank r is on GPU r mod gpus (default 2)")
    option("--granularity", choices=("32", "128", "row"), default="row")
    option("--tokens", type=int, default=128, help="per rank, at most (default 128)")
    option("--hidden", type=int, default=512)
    option("--intermediate", type=int, default=256)
    option("--experts", type=int, default=16)
    option("--top-k", type=int, default=3)
    option("--ring-tokens", type=int, default=512, help="few, for many laps (default 512)")
    option("--burst", type=int, default=1, help="calls in a row of one kind (default 1)")
    option("--seed", type=int, default=0)
    return parser.parse_args(argv)


class Call(NamedTuple):
    """Operands of all ranks, [R, T, ...], and how many rows each rank passes."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    rows: np.ndarray


def random_call(config: Any, num_ranks: int, rng: np.random.Generator, kind: str) -> Call:
    """A call of one of `KINDS`. All ranks get the largest number of rows; some use fewer."""
    tokens = config.max_tokens_per_rank
    routing = kind if kind in gpu_measure.ROUTINGS else "uniform"
    x, idx, weights = gpu_measure.random_operands(config, num_ranks, tokens, rng, routing)
    rows = np.full(num_ranks, tokens)
    if kind == "masked":
        idx[rng.random(idx.shape) < 0.5] = -1
    elif kind == "few rows":
        rows = rng.integers(0, min(9, tokens + 1), num_ranks)
    elif kind == "one expert":
        idx[:] = rng.integers(config.num_experts)
    return Call(x, idx, weights, rows)


def load(ranks: Any, call: Call) -> None:
    for rank, count in enumerate(call.rows):
        own = (a[rank, :count] for a in (call.x, call.topk_idx, call.topk_weights))
        ranks.set_inputs(rank, *own)


def result(ranks: Any) -> list[np.ndarray]:
    return [ranks.outputs(rank).y for rank in range(ranks.num_ranks)]


def digest(y: Sequence[np.ndarray]) -> bytes:
    return hashlib.sha256(b"".join(part.tobytes() for part in y)).digest()


class Oracle:
    """The error rule of docs/numerics.md: at most twice the plain computation's error."""

    def __init__(self, config: Any, weights: Any):
        self._config, self._weights = config, weights
        self._dense = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(weights)]

    def bounds(self, call: Call) -> tuple[np.ndarray, float]:
        """(float64 result, largest error allowed)."""
        x, idx, weights = (jnp.asarray(a) for a in call[:3])
        counts = jnp.asarray(call.rows, jnp.int32)
        fp8_sums = self._config.activation_granularity != 32
        plain = reference.mega_moe(
            x, idx, weights, self._weights, self._config, counts, bf16_sums=fp8_sums
        )
        codes, sf = reference.stage_input(x, self._config.x_group)
        truth = reference.staged_float64(
            codes, sf, call.topk_idx, call.topk_weights, *self._dense, self._config, call.rows
        )
        return truth, float(2 * np.linalg.norm(np.asarray(plain, np.float64) - truth))

    @staticmethod
    def accepts(y: Sequence[np.ndarray], truth: np.ndarray, allowed: float) -> bool:
        error = 0.0
        for rank, part in enumerate(y):
            values = part.view(ml_dtypes.bfloat16).astype(np.float64)
            error += float(np.square(values - truth[rank, : len(values)]).sum())
        return error**0.5 <= allowed  # False for a NaN


def soak(
    config: Any,
    devices: Sequence[int],
    calls: int,
    pool: int,
    seed: int,
    burst: int = 1,
    make_ranks: Callable[..., Any] = GpuRanks,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs it. Returns calls, wrong (results refused by the reference), changed (results with other
    bits than before), failures (texts of calls that failed) and seconds."""
    rng, num_ranks = np.random.default_rng(seed), len(devices)
    shapes = {"gate": (config.intermediate, config.hidden)}
    shapes |= {"up": shapes["gate"], "down": (config.hidden, config.intermediate)}
    dense = [
        jnp.asarray(rng.standard_normal((config.num_experts, *shape), np.float32) / shape[1] ** 0.5)
        for shape in shapes.values()
    ]
    weights = jmm.quantize_weights(*dense)
    ranks = make_ranks(config, devices)
    layout = "sm90_bf16" if config.activation_granularity == 32 else "sm90_fp8"
    ranks.set_all_weights(jmm.to_layout(weights, layout))
    oracle = Oracle(config, weights)
    tiles = range(len(native.gpu_tiles(granularity_number(config))))
    made = [random_call(config, num_ranks, rng, KINDS[i % len(KINDS)]) for i in range(pool)]
    counts = {"calls": 0, "wrong": 0, "changed": 0}
    failures: list[str] = []

    def run(call: Call, tile: int) -> list[np.ndarray] | None:
        load(ranks, call)
        ranks.poison()
        counts["calls"] += 1
        try:
            ranks.launch(tile, repeats=burst)
        except jmm.MegaMoERuntimeError as error:
            failures.append(str(error))
            return None
        return result(ranks)

    start = time.monotonic()
    progress(f"{pool} calls with {len(tiles)} tiles against the reference")
    want: dict[tuple[int, int], bytes] = {}
    for number, call in enumerate(made):
        truth, allowed = oracle.bounds(call)
        for tile in tiles:
            y = run(call, tile)
            if y is None or not oracle.accepts(y, truth, allowed):
                counts["wrong"] += y is not None
                progress(f"call {number} ({KINDS[number % len(KINDS)]}), tile {tile}: wrong")
                continue
            want[number, tile] = digest(y)
    progress(f"{calls} calls")
    known = sorted(want)
    for done in range(calls if known else 0):
        number, tile = known[rng.integers(len(known))]
        y = run(made[number], tile)
        if y is not None and digest(y) != want[number, tile]:
            counts["changed"] += 1
            progress(f"call {number}, tile {tile}: other bits than before")
        if (done + 1) % max(calls // 10, 1) == 0:
            progress(f"{done + 1} calls, {counts['changed']} changed, {len(failures)} failed")
    return {**counts, "failures": failures, "seconds": time.monotonic() - start}


def main(argv: Sequence[str] | None = None, make_ranks: Callable[..., Any] = GpuRanks) -> int:
    arguments = parse_arguments(argv)
    granularity = arguments.granularity
    config = jmm.MegaMoEConfig(
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        max_tokens_per_rank=arguments.tokens,
        activation=jmm.swiglu(10.0),
        activation_granularity=granularity if granularity == "row" else int(granularity),
        ring_tokens=arguments.ring_tokens,
        timeout_s=5.0,
    )
    devices = [rank % arguments.gpus for rank in range(arguments.ranks)]
    found = soak(
        config,
        devices,
        arguments.calls,
        arguments.pool,
        arguments.seed,
        arguments.burst,
        make_ranks,
        shared.Progress(),
    )
    for text in found["failures"][:10]:
        print(text, file=sys.stderr)
    errors = found["wrong"] + found["changed"] + len(found["failures"])
    print(
        f"{found['calls']} calls, {errors} errors ({found['wrong']} wrong, {found['changed']} "
        f"changed, {len(found['failures'])} failed), {found['seconds']:.1f} s"
    )
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
