"""``demo``: runs a layer on virtual CPU devices, checks it and compares it with the unfused one."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import numpy as np

from jax_megamoe.cli import shared
from jax_megamoe.errors import check

__all__ = ["add_parser", "run"]

#: Tokens compared with the float64 layer, spread over the ranks; all of them would take minutes.
_TRUTH_TOKENS = 64
#: The layer's error may be this many times the reference's.
_ERROR_RATIO = 2.0


def add_parser(commands: Any) -> Any:
    parser = shared.add_command(
        commands,
        "demo",
        "run a layer on virtual CPU devices and check it",
        "Random weights and tokens go through the fused\nlayer and through the same layer in plain "
        "JAX. Exit code 1 says that a check failed.",
        "demo --devices 4 --tokens 64 --experts 32\n"
        "      4 ranks with 64 tokens each and 8 of 32 experts on every rank",
    )
    shared.add_layer_options(parser)
    option = parser.add_argument
    option("--tokens", type=int, default=128, metavar="T", help="per rank and step (default 128)")
    option("--steps", type=int, default=3, metavar="N", help="timed steps (default 3)")
    return parser


def run(args: Any) -> int:
    check(args.steps > 0, "--steps", got=args.steps, want="1 or more", remedy="3 is the default")
    with shared.Progress() as progress:
        rows, summary, passed = _run(args, progress)
    print(shared.format_table(rows, left=2))
    print(f"\n{summary}")
    return 0 if passed else 1


def _run(args: Any, progress: shared.Progress) -> tuple[list[tuple[str, str]], str, bool]:
    """Rows of the table, what they mean in two sentences, and whether all checks passed."""
    import jax

    from jax_megamoe import unfused
    from jax_megamoe._ffi import native
    from jax_megamoe.config import MegaMoEConfig, swiglu
    from jax_megamoe.layer import MegaMoE

    config = MegaMoEConfig(
        num_experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        intermediate=args.intermediate,
        max_tokens_per_rank=args.tokens,
        activation=swiglu(shared.SWIGLU_LIMIT),
    )
    config.local_experts(args.devices)
    rng = shared.generator(args.seed)
    mesh = shared.cpu_mesh(args.devices)

    progress("make random weights and quantise them to FP4")
    weights = shared.random_weights(config, rng)
    num_tokens = args.devices * args.tokens
    tokens = shared.random_tokens(config, num_tokens, rng)

    layer = MegaMoE(config, mesh)
    buffer = shared.readable_bytes(layer.buffer.num_bytes)
    progress(
        f"layer created: back end {layer.backend}, {buffer} of buffers per rank; place weights"
    )
    by_rank = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    operands = jax.device_put(tokens, by_rank)
    fused_operands = (*operands, layer.shard(weights))
    wide = jax.jit(unfused.widen_weights)(jax.device_put(weights, by_rank))
    plain_operands = (*operands, wide)

    progress("compile the fused layer")
    fused = jax.jit(functools.partial(layer, return_stats=True)).lower(*fused_operands).compile()
    progress("compile the unfused layer")
    unfused_layer = functools.partial(unfused.mega_moe, config=config, mesh=mesh, axis="ep")
    plain = jax.jit(unfused_layer).lower(*plain_operands).compile()

    progress("run each once to warm up")
    y, stats = jax.block_until_ready(fused(*fused_operands))
    y_plain = np.asarray(plain(*plain_operands)).astype(np.float64)
    y_bytes = np.asarray(y).tobytes()
    fused_times, plain_times, same_bits = [], [], True
    for step in range(args.steps):
        # They alternate, so that other load on the machine slows both.
        ms, (y_again, _) = shared.timed_ms(fused, *fused_operands)
        fused_times.append(ms)
        same_bits &= np.asarray(y_again).tobytes() == y_bytes
        plain_times.append(shared.timed_ms(plain, *plain_operands)[0])
        progress(f"step {step + 1}: fused {ms:.1f} ms, unfused {plain_times[-1]:.1f} ms")

    progress("compare with the reference and with float64")
    error = _errors(config, tokens, weights, args.devices, {"fused": y, "unfused": y_plain})
    topk_idx = np.asarray(tokens[1])
    per_expert = np.asarray(stats.tokens_per_expert)
    layer.close()
    progress("done")

    fused_ms, plain_ms = statistics.median(fused_times), statistics.median(plain_times)
    checks = {
        f"fused error at most {_ERROR_RATIO:g}x the reference's": (
            error["fused"] <= _ERROR_RATIO * error["reference"]
        ),
        f"same bits in {args.steps + 1} runs": same_bits,
        "tokens_per_expert counts the routed slots": (
            per_expert.sum() == topk_idx.size
            and np.array_equal(per_expert, np.bincount(topk_idx.ravel(), minlength=args.experts))
        ),
    }
    fp4, bf16 = (
        shared.readable_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
        for tree in (weights, wide)
    )
    fused_rate, plain_rate = (1e3 * num_tokens / ms for ms in (fused_ms, plain_ms))
    difference = np.linalg.norm(np.asarray(y).astype(np.float64) - y_plain)
    rows = [
        (
            "shape",
            f"hidden {args.hidden}, intermediate {args.intermediate}, {args.experts} experts, "
            f"top-{args.top_k}, {args.tokens} tokens per rank",
        ),
        ("devices", f"{args.devices} virtual CPU devices on {shared.hardware()['cores']} cores"),
        ("back end", f"{layer.backend}, instruction set {native.cpu_isa()}"),
        ("symmetric buffer", f"{buffer} per rank"),
        ("fused", f"{fused_ms:.1f} ms per call, {fused_rate:.0f} tokens/s"),
        ("unfused (plain JAX)", f"{plain_ms:.1f} ms per call, {plain_rate:.0f} tokens/s"),
        ("expert weights", f"{fp4} in FP4 for the fused layer, {bf16} in BF16 for the unfused one"),
        ("unfused / fused", f"{plain_ms / fused_ms:.2f}"),
        ("fused vs unfused", f"{difference / np.linalg.norm(y_plain):.2e} relative difference"),
        *[(f"error of {name}", f"{e:.3e} relative to float64") for name, e in error.items()],
        ("busiest expert", f"number {per_expert.argmax()}, {per_expert.max()} rows"),
        ("least busy expert", f"number {per_expert.argmin()}, {per_expert.min()} rows"),
        *[(f"check: {name}", "PASS" if passed else "FAIL") for name, passed in checks.items()],
    ]
    summary = (
        f"On this CPU the fused layer does {fused_rate:.0f} tokens/s, {plain_ms / fused_ms:.1f} "
        f"times what plain JAX does, with {fp4} of expert\nweights instead of {bf16}. Its error "
        f"against float64 is {error['fused']:.2e}, the reference's {error['reference']:.2e}.\n"
        "Next: `python -m jax_megamoe bench` for other numbers of tokens, README.md for your own "
        "program."
    )
    return rows, summary, all(checks.values())


def _errors(config, tokens, weights, num_ranks, outputs):
    """Relative errors of the reference and of `outputs` on some tokens of every rank.

    The truth has the contract's FP8 roundings and float64 products. Rows do not depend on each
    other, so the chosen tokens alone, on one rank, have the results they have in the batch.
    """
    import jax

    from jax_megamoe import reference
    from jax_megamoe.weights import dequantize_weights

    num_tokens = tokens[0].shape[0]
    per_rank = min(num_tokens // num_ranks, max(1, _TRUTH_TOKENS // num_ranks))
    # They are spread evenly over each rank's tokens; per_rank is at most their number.
    within = np.arange(per_rank) * (num_tokens // num_ranks) // per_rank
    chosen = (np.arange(num_ranks)[:, None] * (num_tokens // num_ranks) + within).ravel()
    x, topk_idx, topk_weights = (array[chosen][None] for array in tokens)
    ours = reference.mega_moe(x, topk_idx, topk_weights, weights, config, block_m=8)
    dense = jax.jit(dequantize_weights)(weights)
    codes, sf = jax.jit(reference.stage_input)(x)
    truth = reference.staged_float64(codes, sf, topk_idx, topk_weights, *dense, config)[0]
    rows = {name: np.asarray(y)[chosen] for name, y in outputs.items()} | {"reference": ours[0]}
    return {name: reference.relative_error(y, truth) for name, y in rows.items()}
