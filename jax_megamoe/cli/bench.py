"""``bench``: the fused layer and the unfused one, side by side in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from jax_megamoe.cli import shared
from jax_megamoe.errors import check

#: Two layers further apart than this do not compute the same thing, and their times mean nothing.
_MAX_DIFFERENCE = 1e-2


def _tokens(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 8,32,128") from None


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "bench",
        "measure the fused layer against the unfused one",
        "Both run in turn on the same operands;\n"
        "times are medians. The unfused layer has its weights in BF16, widened once before.",
        "bench --devices 4 --tokens 8,64 --repeats 5 --json bench.json\n"
        "      8 and 64 tokens on each of 4 ranks, 5 timed calls each",
    )
    shared.add_layer_options(parser)
    option = parser.add_argument
    option(
        "--tokens",
        type=_tokens,
        default=[8, 32, 128],
        metavar="T,...",
        help="tokens per rank, one measurement each (default 8,32,128)",
    )
    option("--repeats", type=int, default=3, metavar="N", help="timed calls of each (default 3)")
    option("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    option("--plot", type=Path, metavar="FILE", help="also draw the times to FILE (a PNG)")
    return parser


def run(args: Any) -> int:
    _check_options(args)
    from jax_megamoe.config import MegaMoEConfig, swiglu

    config = MegaMoEConfig(
        num_experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        intermediate=args.intermediate,
        max_tokens_per_rank=max(args.tokens),
        activation=swiglu(shared.SWIGLU_LIMIT),
    )
    config.local_experts(args.devices)
    hardware = shared.hardware()
    results, backend = measure(config, args.devices, args.tokens, args.repeats, args.seed)

    print(
        f"{hardware['cpu']}, {hardware['cores']} cores, jax {hardware['jax']}; "
        f"back end {backend}, {args.devices} virtual CPU devices\n"
        f"hidden {args.hidden}, intermediate {args.intermediate}, {args.experts} experts, "
        f"top-{args.top_k}; medians of {args.repeats}\n"
    )
    header = (
        *("tokens/rank", "fused ms", "unfused ms", "unfused/fused"),
        *("fused TFLOP/s", "unfused TFLOP/s"),
    )
    cells = [
        (
            row["tokens_per_rank"],
            f"{row['fused_ms']:.2f}",
            f"{row['unfused_ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['fused_tflops']:.4f}",
            f"{row['unfused_tflops']:.4f}",
        )
        for row in results
    ]
    print(shared.format_table(cells, header, left=0))
    if args.json is not None:
        content = {
            "schema": 1,
            "benchmark": "layer",
            "hardware": hardware,
            "backend": backend,
            "devices": args.devices,
            "config": dataclasses.asdict(config),
            "repeats": args.repeats,
            "seed": args.seed,
            "results": results,
        }
        shared.write_json(args.json, content)
    if args.plot is not None:
        _plot(args.plot, results, f"{args.devices} virtual devices, {hardware['cores']} cores")
    apart = [row for row in results if not row["relative_difference"] <= _MAX_DIFFERENCE]
    for row in apart:
        print(
            f"FAIL: {row['tokens_per_rank']} tokens per rank: fused and unfused results differ by "
            f"{row['relative_difference']:.2e}, more than {_MAX_DIFFERENCE:g}"
        )
    return 1 if apart else 0


def _check_options(args):
    remedy = "use positive numbers"
    at_least_1 = "at least 1"
    check(min(args.tokens) > 0, "--tokens", got=args.tokens, want=at_least_1, remedy=remedy)
    check(args.repeats > 0, "--repeats", got=args.repeats, want=at_least_1, remedy=remedy)
    shared.check_output(args.json, "--json")
    shared.check_output(args.plot, "--plot")
    check(
        args.plot is None or importlib.util.find_spec("matplotlib") is not None,
        "--plot",
        got="no package matplotlib",
        want="matplotlib installed",
        remedy="install it: pip install jax-megamoe[plot]",
    )


def measure(
    config: Any, num_devices: int, tokens_per_rank: list[int], repeats: int, seed: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Times both layers at every number of tokens. Call it before JAX is used.

    Args:
      config: a MegaMoEConfig; its max_tokens_per_rank is at least the largest of `tokens_per_rank`.
      num_devices: virtual CPU devices.
      tokens_per_rank: one result for each.
      repeats: timed calls of each layer, in turn, after one untimed call.
      seed: of weights, tokens and router.

    Returns:
      One dict per number of tokens, with times in milliseconds, and the back end's name. TFLOP/s
      count the products of routed rows, 2 * rows * 3 * hidden * intermediate, and nothing else.
    """
    import jax

    from jax_megamoe import unfused
    from jax_megamoe.layer import MegaMoE

    progress = shared.Progress()
    rng = shared.generator(seed)
    mesh = shared.cpu_mesh(num_devices)
    by_rank = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))

    def unfused_layer(x, topk_idx, topk_weights, weights):
        return unfused.mega_moe(x, topk_idx, topk_weights, weights, config, mesh, "ep")

    progress("make random weights and quantise them to FP4")
    weights = shared.random_weights(config, rng)
    results = []
    with MegaMoE(config, mesh) as layer:
        placed: dict[str, Any] = {
            "fused": layer.shard(weights),
            "unfused": jax.jit(unfused.widen_weights)(jax.device_put(weights, by_rank)),
        }
        for tokens in tokens_per_rank:
            operands = shared.random_tokens(config, num_devices * tokens, rng)
            operands = jax.device_put(operands, by_rank)
            calls, outputs = {}, {}
            times: dict[str, list[float]] = {"fused": [], "unfused": []}
            for name, function in (("fused", layer), ("unfused", unfused_layer)):
                progress(f"{tokens} tokens per rank: compile the {name} layer and warm up")
                calls[name] = jax.jit(function).lower(*operands, placed[name]).compile()
                _, y = shared.timed_ms(calls[name], *operands, placed[name])
                outputs[name] = np.asarray(y).astype(np.float64)
            progress(f"{tokens} tokens per rank: measure")
            for _ in range(repeats):
                for name, call in calls.items():
                    times[name].append(shared.timed_ms(call, *operands, placed[name])[0])
            results.append(_result(config, num_devices, tokens, outputs, times))
        progress("done")
        return results, layer.backend


def _result(config, num_devices, tokens, outputs, times):
    rows = num_devices * tokens * config.top_k
    flops = 2 * rows * 3 * config.hidden * config.intermediate
    fused_ms, unfused_ms = (statistics.median(times[name]) for name in ("fused", "unfused"))
    difference = np.linalg.norm(outputs["fused"] - outputs["unfused"])
    return {
        "tokens_per_rank": tokens,
        "routed_rows": rows,
        "fused_ms": fused_ms,
        "unfused_ms": unfused_ms,
        "ratio": unfused_ms / fused_ms,
        "fused_tflops": flops / fused_ms / 1e9,
        "unfused_tflops": flops / unfused_ms / 1e9,
        "relative_difference": float(difference / np.linalg.norm(outputs["unfused"])),
        "fused_ms_all": times["fused"],
        "unfused_ms_all": times["unfused"],
    }


def _plot(path, results, title):
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    tokens = [row["tokens_per_rank"] for row in results]
    for name, style, above in (("fused", "o-", -14), ("unfused", "s--", 8)):
        times = [row[f"{name}_ms"] for row in results]
        axes.plot(tokens, times, style, label=name)
        for point in zip(tokens, times, strict=True):
            # Fewer than ten times as much leaves a logarithmic axis with a single labelled tick.
            text = f"{point[1]:.0f}" if point[1] >= 100 else f"{point[1]:.3g}"
            axes.annotate(text, point, (0, above), textcoords="offset points", ha="center")
    axes.set(xlabel="tokens per rank", ylabel="ms per call", title=title)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_minor_formatter("")
    axes.margins(x=0.08, y=0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
