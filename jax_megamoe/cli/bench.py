"""``bench``: the fused layer and the unfused one, side by side in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_megamoe._backends import SM_90A
from jax_megamoe.cli import info, shared
from jax_megamoe.errors import check

__all__ = [
    "add_parser",
    "gpu_faults",
    "gpu_table",
    "labels_above",
    "measure",
    "measure_gpu",
    "plot_gpu",
    "run",
]

#: Layers that differ by more than this do not compute the same: their times mean nothing.
_MAX_DIFFERENCE = 1e-2
#: The same on GPUs: half of E4M3's 2^-4. Tensor cores keep fewer bits of FP8 sums, and the unfused
#: layer's kernel rounds gate and up to BF16, so that many of SwiGLU's codes are the next one.
_MAX_GPU_DIFFERENCE = 2.0**-5


def _tokens(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 8,32,128") from None


def _granularities(text: str) -> list[int | str]:
    parts = [
        part if part == "row" else int(part) if part.isdigit() else 0 for part in text.split(",")
    ]
    if not set(parts) <= set(info.GRANULARITIES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of 32, 128 and row")
    return parts


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "bench",
        "measure the fused layer against the unfused one",
        "Both run on the same\noperands; times are medians. The unfused layer has its weights in "
        "BF16, widened once before.\nOn GPUs the fused layer's time is that of its kernel on the "
        "slowest rank, with a cold L2, and that\nof a jitted call, host wall time like the unfused "
        "layer's.",
        "bench --devices 4 --tokens 8,64 --repeats 5 --json bench.json\n"
        "      8 and 64 tokens on each of 4 ranks, 5 timed calls each\n"
        "  python -m jax_megamoe bench --backend gpu --preset flash --granularity 32,128,row\n"
        "      DeepSeek-V4-Flash's layer with 32 experts on one GPU",
    )
    option = parser.add_argument
    option(
        "--backend",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto (default): GPUs if there are any, else virtual CPU devices",
    )
    option("--devices", type=int, metavar="R", help="ranks (default 8 on CPU, 1 on GPUs)")
    option(
        "--preset",
        choices=tuple(info.PRESETS),
        help="a DeepSeek-V4 shape with its experts over 8 GPUs; the options below replace parts of "
        "it (default: flash on GPUs, a quarter of it each way with 64 experts on CPU)",
    )
    option("--hidden", type=int, metavar="H", help="token width")
    option("--intermediate", type=int, metavar="I", help="expert width")
    option("--experts", type=int, metavar="E", help="experts of all ranks")
    option("--top-k", type=int, metavar="K", help="experts per token")
    option(
        "--granularity",
        type=_granularities,
        default=[32],
        metavar="G,...",
        help="of activation scales: 32, 128, row; several on GPUs (default 32)",
    )
    option("--seed", type=int, default=0, help="of weights, tokens and router (default 0)")
    option(
        "--tokens",
        type=_tokens,
        default=[8, 32, 128],
        metavar="T,...",
        help="tokens per rank, one measurement each (default 8,32,128)",
    )
    option("--repeats", type=int, metavar="N", help="timed calls (default 3 on CPU, 15 on GPUs)")
    option("--no-unfused", action="store_true", help="on GPUs: leave the unfused layer out")
    option("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    option("--plot", type=Path, metavar="FILE", help="also draw the times to FILE (a PNG)")
    return parser


def _models() -> dict[str, Any]:
    from jax_megamoe.devtools import gpu_measure

    return gpu_measure.MODELS


def run(args: Any) -> int:
    _check_options(args)
    backend = args.backend
    if backend == "auto":
        from jax_megamoe.devtools.gpu_measure import num_gpus

        backend = "gpu" if num_gpus() > 0 else "cpu"
    return _run_gpu(args) if backend == "gpu" else _run_cpu(args)


def _shape(args: Any, default: dict[str, int]) -> dict[str, int]:
    """hidden, intermediate, experts and top_k: of the model or the default, then as given."""
    shape = dict(default)
    if args.preset is not None:
        model = _models()[args.preset]
        shape |= {"hidden": model.hidden, "intermediate": model.intermediate}
        shape |= {"experts": model.local_experts * args.devices, "top_k": model.top_k}
    given = {name: getattr(args, name) for name in shape}
    return shape | {name: value for name, value in given.items() if value is not None}


def _run_cpu(args: Any) -> int:
    from jax_megamoe._ffi import native
    from jax_megamoe.config import MegaMoEConfig, swiglu

    args.devices = 8 if args.devices is None else args.devices
    args.repeats = args.repeats or 3
    shape = _shape(args, {"hidden": 1024, "intermediate": 512, "experts": 64, "top_k": 6})
    check(
        len(args.granularity) == 1,
        "--granularity",
        got=args.granularity,
        want="one value on CPU",
        remedy="the CPU back end computes all of them alike",
    )
    config = MegaMoEConfig(
        num_experts=shape["experts"],
        top_k=shape["top_k"],
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
        max_tokens_per_rank=max(args.tokens),
        activation=swiglu(shared.SWIGLU_LIMIT),
        activation_granularity=args.granularity[0],
    )
    config.local_experts(args.devices)
    hardware = shared.hardware()
    results, backend = measure(config, args.devices, args.tokens, args.repeats, args.seed)

    print(
        f"{hardware['cpu']}, {hardware['cores']} cores, jax {hardware['jax']}; "
        f"back end {backend}, instruction set {native.cpu_isa()}, {args.devices} virtual CPU "
        f"devices\n"
        f"{_shape_text(config)}; medians of {args.repeats}\n"
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
        content = _content(args, hardware, backend, config, results)
        shared.write_json(args.json, content | {"cpu_isa": native.cpu_isa()})
    if args.plot is not None:
        curves = {name: [row[f"{name}_ms"] for row in results] for name in ("fused", "unfused")}
        tokens = [row["tokens_per_rank"] for row in results]
        title = f"{args.devices} virtual devices, {hardware['cores']} cores"
        _plot(args.plot, tokens, curves, "ms per call", title)
    apart = [row for row in results if not row["relative_difference"] <= _MAX_DIFFERENCE]
    for row in apart:
        print(
            f"FAIL: {row['tokens_per_rank']} tokens per rank: fused and unfused results differ by "
            f"{row['relative_difference']:.2e}, more than {_MAX_DIFFERENCE:g}"
        )
    return 1 if apart else 0


def _shape_text(config: Any) -> str:
    return (
        f"hidden {config.hidden}, intermediate {config.intermediate}, {config.num_experts} "
        f"experts, top-{config.top_k}"
    )


def _content(args, hardware, backend, config, results) -> dict[str, Any]:
    return {
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


# GPUs --------------------------------------------------------------------------------------------


def _run_gpu(args: Any) -> int:
    # The harness allocates memory beside JAX's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jax_megamoe.devtools import gpu_measure

    args.devices = 1 if args.devices is None else args.devices
    args.repeats = args.repeats or 15
    args.preset = args.preset or "flash"
    gpus = gpu_measure.num_gpus()
    check(
        args.devices <= gpus,
        "--devices",
        got=args.devices,
        want=f"at most {gpus}, the GPUs of this process",
        remedy="look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend cpu",
    )
    shape = _shape(args, {"hidden": 0, "intermediate": 0, "experts": 0, "top_k": 0})
    check(
        shape["experts"] % args.devices == 0,
        "--experts",
        got=f"{shape['experts']} on {args.devices} ranks",
        want="a multiple of --devices",
        remedy="each rank owns as many experts as the others",
    )
    model = gpu_measure.Model(
        shape["hidden"], shape["intermediate"], shape["experts"] // args.devices, shape["top_k"]
    )
    configs = [
        gpu_measure.make_config(model, args.devices, max(args.tokens), granularity)
        for granularity in args.granularity
    ]
    hardware = shared.hardware() | {"gpus": gpu_measure.gpu_names()[: args.devices]}
    results = measure_gpu(
        configs, args.devices, args.tokens, args.repeats, args.seed, not args.no_unfused
    )
    gpu = hardware["gpus"][0] if hardware["gpus"] else "GPU"
    print(
        f"{args.devices} x {gpu}, jax {hardware['jax']}; back end {SM_90A.name}\n"
        f"{_shape_text(configs[0])}; medians of {args.repeats}\n"
        "us: the fused layer's kernel on the slowest rank, cold L2; call us and unfused us: host "
        "wall time, warm caches\n"
        f"floor: {gpu_measure.FLOOR_FORMULA}\n"
    )
    print(gpu_table(results))
    if args.json is not None:
        content = _content(args, hardware, SM_90A.name, configs[0], results)
        content |= {"floor": gpu_measure.FLOOR_FORMULA, "granularities": args.granularity}
        shared.write_json(args.json, content)
    if args.plot is not None:
        plot_gpu(args.plot, results, f"{args.devices} x {gpu}, {args.preset}")
    faults = gpu_faults(results)
    print("\n".join(faults) if faults else "")
    return 1 if faults else 0


def measure_gpu(
    configs: Sequence[Any],
    num_devices: int,
    tokens_per_rank: list[int],
    repeats: int,
    seed: int = 0,
    with_unfused: bool = True,
    make_ranks: Any = None,
) -> list[dict[str, Any]]:
    """Times the fused layer at every granularity, and the unfused one at the first.

    The unfused layer's time does not depend on the granularity, so that of the first one is in
    the other results too; its values do, so the two layers are compared there only.

    Args:
      configs: one for each granularity, of the same shape.
      num_devices: ranks, one on each of the first GPUs.
      tokens_per_rank: one result for each, and the extras of `gpu_measure.measure_tokens`.
      repeats: timed calls.
      seed: of weights, tokens and routings.
      with_unfused: measure the unfused layer.
      make_ranks: for tests, instead of GpuRanks.

    Returns:
      Dicts of `gpu_measure.measure_tokens`. If the unfused layer was measured: unfused_us, ratio
      (unfused over fused), call_us (a jitted call of the fused layer, timed by the host like the
      unfused one), call_ratio (unfused over that), and relative_difference where both layers were
      compared.
    """
    with shared.Progress() as progress:
        return _measure_gpu(
            configs, num_devices, tokens_per_rank, repeats, seed, with_unfused, make_ranks, progress
        )


def _measure_gpu(
    configs, num_devices, tokens_per_rank, repeats, seed, with_unfused, make_ranks, progress
):
    from jax_megamoe.devtools import gpu_measure

    results: list[dict[str, Any]] = []
    unfused_times: dict[int, dict[str, Any]] = {}
    for config in configs:
        rng = shared.generator(seed)
        granularity = config.activation_granularity
        progress(f"granularity {granularity}: random weights")
        kwargs = {} if make_ranks is None else {"make_ranks": make_ranks}
        fused = gpu_measure.Fused(config, range(num_devices), rng, **kwargs)
        first = config is configs[0]
        rows = gpu_measure.measure_tokens(
            fused, tokens_per_rank, rng, repeats=repeats, progress=progress
        )
        if with_unfused:
            progress(f"granularity {granularity}: jitted calls")
            try:
                with gpu_measure.Jitted(fused) as jitted:
                    for row in rows:
                        if row["routing"] == "uniform":
                            count = row["tokens_per_rank"]
                            operands = gpu_measure.random_operands(config, num_devices, count, rng)
                            row |= jitted.measure(operands)
                del jitted  # This frees its weights, too.
            except Exception as error:  # Memory runs out, mostly. The fused rows remain.
                progress(f"jitted calls failed: {' '.join(str(error).split())[:200]}")
        if first and with_unfused:
            progress("the unfused layer: widen its weights")
            unfused = gpu_measure.Unfused(fused)
            for row in rows:
                if row["routing"] != "uniform":
                    continue
                count = row["tokens_per_rank"]
                progress(f"{count} tokens per rank: the unfused layer")
                operands = gpu_measure.random_operands(config, num_devices, count, rng)
                try:
                    found = unfused.measure(operands)
                except Exception as error:  # Memory runs out, mostly. The fused rows remain.
                    progress(f"the unfused layer failed: {' '.join(str(error).split())[:200]}")
                    continue
                fused.set_operands(operands)
                fused.ranks.launch(row["tile"])
                row["relative_difference"] = gpu_measure.relative_difference(
                    fused.y(), found.pop("y")
                )
                unfused_times[count] = found
        for row in rows:
            if row["routing"] == "uniform" and row["tokens_per_rank"] in unfused_times:
                row |= unfused_times[row["tokens_per_rank"]]
                row["ratio"] = row["unfused_us"] / row["fused_us"]
                if "call_us" in row:
                    row["call_ratio"] = row["unfused_us"] / row["call_us"]
        results += rows
        del fused
    progress("done")
    return results


def gpu_table(results: Sequence[dict[str, Any]]) -> str:
    header = (
        *("granularity", "routing", "tokens/rank", "rows", "tile", "us", "floor us", "of floor"),
        *("TFLOP/s", "HBM GB/s", "link GB/s", "call us", "unfused us", "unfused/fused"),
        "unfused/call",
    )
    cells = []
    for row in results:
        has = "unfused_us" in row
        cells.append(
            (
                *(row["granularity"], row["routing"], row["tokens_per_rank"], row["rows"]),
                *(row["tile"], f"{row['fused_us']:.1f}", f"{row['floor_us']:.1f}"),
                *(f"{row['of_floor']:.0%}", f"{row['tflops']:.0f}", f"{row['hbm_gb_s']:.0f}"),
                f"{row['link_gb_s']:.0f}" if row["ranks"] > 1 else "-",
                f"{row['call_us']:.0f}" if "call_us" in row else "-",
                f"{row['unfused_us']:.0f}" if has else "-",
                f"{row['ratio']:.2f}" if has else "-",
                f"{row['call_ratio']:.2f}" if "call_ratio" in row else "-",
            )
        )
    return shared.format_table(cells, header, left=2)


def gpu_faults(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for everything that makes the command fail."""
    faults = []
    for row in results:
        name = (
            f"granularity {row['granularity']}, {row['routing']}, {row['tokens_per_rank']} tokens "
            "per rank"
        )
        if not row["finite"]:
            faults.append(f"FAIL: {name}: results that are not finite")
        if not row.get("relative_difference", 0.0) <= _MAX_GPU_DIFFERENCE:
            faults.append(
                f"FAIL: {name}: fused and unfused results differ by "
                f"{row['relative_difference']:.2e}, more than {_MAX_GPU_DIFFERENCE:g}"
            )
    return faults


def plot_gpu(path: Path, results: Sequence[dict[str, Any]], title: str) -> None:
    """Times over tokens: each granularity, the unfused layer, the floor."""
    rows = [row for row in results if row["routing"] == "uniform"]
    tokens = sorted({row["tokens_per_rank"] for row in rows})
    curves: dict[str, list[float]] = {}
    for row in rows:
        name = f"fused, {row['granularity']}"
        curves.setdefault(name, [float("nan")] * len(tokens))
        curves[name][tokens.index(row["tokens_per_rank"])] = row["fused_us"]
    for name, key in (("unfused (host time)", "unfused_us"), ("floor", "floor_us")):
        times = {row["tokens_per_rank"]: row[key] for row in rows if key in row}
        if times:
            curves[name] = [times.get(count, float("nan")) for count in tokens]
    _plot(path, tokens, curves, "us per call", title)


# Options and CPU ---------------------------------------------------------------------------------


def _check_options(args):
    remedy = "use positive numbers"
    at_least_1 = "at least 1"
    check(min(args.tokens) > 0, "--tokens", got=args.tokens, want=at_least_1, remedy=remedy)
    for name in ("repeats", "devices"):
        value = getattr(args, name)
        check(value is None or value > 0, f"--{name}", got=value, want=at_least_1, remedy=remedy)
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
    with shared.Progress() as progress:
        return _measure(config, num_devices, tokens_per_rank, repeats, seed, progress)


def _measure(config, num_devices, tokens_per_rank, repeats, seed, progress):
    import jax

    from jax_megamoe import unfused
    from jax_megamoe.layer import MegaMoE

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


def labels_above(curves: Mapping[str, Sequence[float]]) -> list[list[bool]]:
    """For each of at most two curves and each point: whether its number is written above it.

    The higher curve has its numbers above and the lower one below, so that they do not meet; of
    equal points the first curve's is the lower one.
    """
    times = list(curves.values())
    if len(times) == 1:
        return [[True] * len(times[0])]
    first = [a > b for a, b in zip(*times, strict=True)]
    return [first, [not above for above in first]]


def _plot(path, tokens, curves, unit, title):
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    for i, (name, times) in enumerate(curves.items()):
        style = "k:" if name == "floor" else ("o-", "s--", "^-", "d-", "v--")[i % 5]
        axes.plot(tokens, times, style, label=name)
        if len(curves) > 2:
            continue  # Otherwise numbers would cover each other.
        for point, above in zip(
            zip(tokens, times, strict=True), labels_above(curves)[i], strict=True
        ):
            # Fewer than ten times as much leaves a logarithmic axis with a single labelled tick.
            text = f"{point[1]:.0f}" if point[1] >= 100 else f"{point[1]:.3g}"
            offset = (0, 8 if above else -14)
            axes.annotate(text, point, offset, textcoords="offset points", ha="center")
    axes.set(xlabel="tokens per rank", ylabel=unit, title=title)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.xaxis.minorticks_off()
    if len(curves) <= 2:
        axes.yaxis.set_minor_formatter("")
    axes.margins(x=0.08, y=0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
