"""Times the unfused layer's transports and grouped products against each other on this machine.

Each variant is compiled, checked against gemm="ragged_dot" with the same transport on the same
inputs, and timed: host wall time of one jitted call up to the end of the slowest device, warm
caches, median. A variant that cannot run prints its error and the next one follows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

EPILOG = """examples:
  python benchmarks/unfused_variants.py              # DeepSeek-V4-Flash, 32 experts a device
  python benchmarks/unfused_variants.py --tokens 8 512 8192 --gemms mosaic ragged_dot
  python benchmarks/unfused_variants.py --ranks 8 --scale 16 --tokens 8 64   # 8 virtual CPU devices
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="devices to use (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 128, 2048], help="per rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts-per-rank", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--limit", type=float, default=10.0, help="clamp of SwiGLU")
    parser.add_argument("--scale", type=int, default=1, help="divides hidden and intermediate")
    parser.add_argument("--weights", choices=("bf16", "fp4"), default="bf16", help="fp4: widened")
    parser.add_argument("--transports", nargs="+", help="default: all")
    parser.add_argument("--gemms", nargs="+", help="default: all")
    parser.add_argument("--samples", type=int, default=20, help="timed calls per variant")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit per variant")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


ARGUMENTS = parse_arguments()
if ARGUMENTS.ranks:
    # Before JAX starts: virtual devices if it will run on CPU, no effect on GPUs.
    flag = f"--xla_force_host_platform_device_count={ARGUMENTS.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_megamoe import MegaMoEConfig, quantize_weights, swiglu, unfused  # noqa: E402


def make_weights(mesh, config, rng):
    """Random FP4 weights, made on the devices that will hold them, never dense on the host."""
    experts, h, i = config.num_experts, config.hidden, config.intermediate
    key = jax.random.key(int(rng.integers(2**31)))

    def make(key):
        rank = jax.lax.axis_index("ep")
        keys = jax.random.split(jax.random.fold_in(key, rank), 3)
        local = experts // mesh.size
        shapes = ((local, i, h), (local, i, h), (local, h, i))
        dense = [
            jax.random.normal(k, s, jnp.bfloat16) / np.sqrt(s[-1]).astype(jnp.bfloat16)
            for k, s in zip(keys, shapes, strict=True)
        ]
        return quantize_weights(*dense)

    mapped = jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=P("ep"), check_vma=False)
    return jax.jit(mapped)(key)


def make_inputs(mesh, config, tokens, rng):
    """x, topk_idx (distinct experts, uniform), topk_weights, sharded over the mesh."""
    rows = mesh.size * tokens
    x = rng.standard_normal((rows, config.hidden), np.float32).astype(jnp.bfloat16)
    scores = rng.random((rows, config.num_experts), np.float32)
    idx = np.argpartition(scores, config.top_k - 1, axis=1)[:, : config.top_k].astype(np.int32)
    topk = rng.random((rows, config.top_k), np.float32)
    topk /= topk.sum(1, keepdims=True)
    return jax.device_put((x, idx, topk), NamedSharding(mesh, P("ep")))


def relative_distance(y, reference):
    """``||y - reference|| / ||reference||``; NaN if y holds one."""
    y, reference = (np.asarray(a).astype(np.float32) for a in (y, reference))
    return float(np.linalg.norm(y - reference) / np.linalg.norm(reference))


def measure(function, operands, samples, seconds):
    """Median, minimum and number of wall times in seconds, after compiling and one warm call."""
    y = jax.block_until_ready(function(*operands))
    jax.block_until_ready(function(*operands))
    times, end = [], time.perf_counter() + seconds
    while len(times) < samples and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        times.append(time.perf_counter() - start)
    return y, statistics.median(times), min(times), len(times)


def run(mesh, config, weights, tokens, arguments):
    operands = (*make_inputs(mesh, config, tokens, np.random.default_rng(arguments.seed)), weights)
    gemms = arguments.gemms or unfused.GEMMS
    # ragged_dot first: it is what the others are compared with.
    gemms = sorted(gemms, key=lambda name: name != "ragged_dot")
    print(f"\nT = {tokens} tokens per rank")
    print(f"{'transport':18} {'gemm':11} {'median us':>10} {'min us':>10} {'calls':>6} "
          f"{'vs first':>9} {'distance':>9}")  # fmt: skip
    first = want = None
    for transport in arguments.transports or unfused.TRANSPORTS:
        for gemm in gemms:

            @jax.jit
            def layer(*operands, transport=transport, gemm=gemm):
                return unfused.mega_moe(
                    *operands, config, mesh, "ep", transport=transport, gemm=gemm
                )

            label = f"{transport:18} {gemm:11}"
            try:
                y, median, least, calls = measure(
                    layer, operands, arguments.samples, arguments.seconds
                )
            except Exception as error:  # whatever fails, the other variants are still wanted
                text = " ".join(str(error).split())
                print(f"{label} {type(error).__name__}: {text[:300]}", flush=True)
                continue
            if want is None and gemm == "ragged_dot":
                want = y
            first = first or median
            distance = "-" if want is None else f"{relative_distance(y, want):9.2e}"
            print(f"{label} {median * 1e6:10.1f} {least * 1e6:10.1f} {calls:6d} "
                  f"{median / first:9.3f} {distance:>9}", flush=True)  # fmt: skip


def main():
    arguments = ARGUMENTS
    devices = jax.devices()[: arguments.ranks]
    if arguments.ranks and len(devices) < arguments.ranks:
        raise SystemExit(f"--ranks {arguments.ranks}: this machine shows {len(devices)} devices")
    mesh = jax.make_mesh((len(devices),), ("ep",), devices=devices, axis_types=(AxisType.Auto,))
    config = MegaMoEConfig(
        num_experts=arguments.experts_per_rank * len(devices),
        top_k=arguments.top_k,
        hidden=arguments.hidden // arguments.scale,
        intermediate=arguments.intermediate // arguments.scale,
        max_tokens_per_rank=max(arguments.tokens),
        activation=swiglu(limit=arguments.limit),
    )
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")
    print(config)
    print("distance: ||y - y(ragged_dot)|| / ||y(ragged_dot)||. 'mosaic' rounds gate and up to")
    print("BF16, which now and then moves an element to the next E4M3 code.")
    print(f"weights: {arguments.weights}")
    weights = make_weights(mesh, config, np.random.default_rng(arguments.seed))
    if arguments.weights == "bf16":
        weights = jax.jit(unfused.widen_weights)(weights)
    for tokens in arguments.tokens:
        run(mesh, config, weights, tokens, arguments)


if __name__ == "__main__":
    main()
