"""What the commands have in common: options, progress, tables, random layers, JSON.

JAX is imported inside the functions that need it, so that declaring options costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_megamoe.errors import check

__all__ = [
    "SWIGLU_LIMIT",
    "Progress",
    "add_command",
    "add_layer_options",
    "check_output",
    "cpu_mesh",
    "format_table",
    "generator",
    "hardware",
    "random_tokens",
    "random_weights",
    "readable_bytes",
    "timed_ms",
    "write_json",
]

if TYPE_CHECKING:
    import jax

    from jax_megamoe.config import MegaMoEConfig
    from jax_megamoe.weights import ExpertWeights

#: Clamp of DeepSeek-V4's SwiGLU.
SWIGLU_LIMIT = 10.0


def add_command(commands: Any, name: str, summary: str, details: str, example: str) -> Any:
    """A subparser whose help ends with a worked example."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}",
        epilog=f"example:\n  python -m jax_megamoe {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Shape of a layer on virtual CPU devices: a quarter of DeepSeek-V4-Flash's each way."""
    option = parser.add_argument
    option("--devices", type=int, default=8, metavar="R", help="virtual CPU devices (default 8)")
    option("--hidden", type=int, default=1024, metavar="H", help="token width (default 1024)")
    option("--intermediate", type=int, default=512, metavar="I", help="expert width (default 512)")
    option("--experts", type=int, default=64, metavar="E", help="experts of all ranks (default 64)")
    option("--top-k", type=int, default=6, metavar="K", help="experts per token (default 6)")
    option("--seed", type=int, default=0, help="of weights, tokens and router (default 0)")


class Progress:
    """Lines on stderr that say what is going on and how many seconds have passed.

    As a context manager it repeats the line of a step that takes long, every few seconds.

    Args:
      silence_s: seconds after which a line is repeated.
    """

    def __init__(self, silence_s: float = 4.0) -> None:
        self._silence_s = silence_s
        self._start = self._last = time.perf_counter()
        self._step = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __call__(self, step: str) -> None:
        self._step = step
        self._print(step)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _print(self, text: str) -> None:
        self._last = time.perf_counter()
        print(f"[{self._last - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        while not self._stop.wait(self._silence_s - (time.perf_counter() - self._last)):
            if time.perf_counter() - self._last >= self._silence_s:
                self._print(f"still at it: {self._step or 'starting'}")


def format_table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), left=1) -> str:
    """Columns aligned by spaces: the first `left` ones to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    if header:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def readable_bytes(num_bytes: int) -> str:
    """``"570.49 MiB"``: MiB from 0.1 MiB on, smaller numbers in KiB or bytes."""
    if num_bytes >= 2**20 / 10:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**10:.2f} KiB" if num_bytes >= 2**10 else f"{num_bytes} bytes"


def hardware() -> dict[str, Any]:
    """What a measurement has to be read with: processor, usable cores, versions."""
    import jax
    import jaxlib

    import jax_megamoe

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:  # not on every operating system
        models = []
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_megamoe": jax_megamoe.__version__,
    }


def generator(seed: int) -> np.random.Generator:
    check(seed >= 0, "--seed", got=seed, want="0 or more", remedy="it starts NumPy's generator")
    return np.random.default_rng(seed)


def check_output(path: Path | None, option: str) -> None:
    """Refuses a file that cannot be written before minutes are spent on what goes into it."""
    if path is not None:
        check(
            path.resolve().parent.is_dir() and not path.is_dir(),
            option,
            got=path,
            want="a file name in a directory that exists",
            remedy="create the directory first",
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def cpu_mesh(num_devices: int) -> jax.sharding.Mesh:
    """A mesh of that many virtual CPU devices, with one axis "ep". Call it before JAX is used."""
    import jax

    from jax_megamoe.virtual_devices import use_virtual_cpu_devices

    # Virtual devices are the CPU's, also where JAX has an accelerator.
    jax.config.update("jax_platforms", "cpu")
    use_virtual_cpu_devices(num_devices)
    return jax.make_mesh((num_devices,), ("ep",), devices=jax.devices()[:num_devices])


def random_weights(config: MegaMoEConfig, rng: np.random.Generator) -> ExpertWeights:
    """Gaussian weights of all experts, quantised to FP4, in canonical layout."""
    import jax
    import jax.numpy as jnp

    from jax_megamoe.weights import quantize_weights

    num_experts, hidden, intermediate = config.num_experts, config.hidden, config.intermediate
    quantize = jax.jit(quantize_weights)

    def some_experts(count):
        def draw(rows, columns, scale):
            values = rng.standard_normal((count, rows, columns), np.float32)
            return values * np.float32(scale / columns**0.5)

        # Gates and ups of unit Gaussian tokens get standard deviation 4: SwiGLU's clamp has work.
        w_gate, w_up = draw(intermediate, hidden, 4.0), draw(intermediate, hidden, 4.0)
        return quantize(w_gate, w_up, draw(hidden, intermediate, 1.0))

    # A few experts at a time: in FP32 all of them can be far larger than their FP4 codes.
    chunk = next(count for count in (8, 4, 2, 1) if num_experts % count == 0)
    chunks = [some_experts(chunk) for _ in range(0, num_experts, chunk)]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *chunks)


def random_tokens(
    config: MegaMoEConfig, num_tokens: int, rng: np.random.Generator
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [N, H] bfloat16, topk_idx and topk_weights [N, K] of a softmax router on random logits."""
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(rng.standard_normal((num_tokens, config.hidden), np.float32), jnp.bfloat16)
    # Experts differ in popularity, as real ones do.
    popularity = 0.5 * rng.standard_normal(config.num_experts, np.float32)
    logits = rng.standard_normal((num_tokens, config.num_experts), np.float32) + popularity

    def router(logits):
        topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(logits), config.top_k)
        return topk_idx, topk_weights / jnp.sum(topk_weights, axis=1, keepdims=True)

    return (x, *jax.jit(router)(logits))


def timed_ms(call, *operands: Any) -> tuple[float, Any]:
    """(milliseconds until the result is there, result)."""
    import jax

    start = time.perf_counter()
    result = jax.block_until_ready(call(*operands))
    return 1e3 * (time.perf_counter() - start), result
