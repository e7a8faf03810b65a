"""Measurements of the GPU kernels: operands, what they move and compute, times.

`python -m jax_megamoe bench` and the programs in benchmarks/ are built from these functions. The
fused layer is timed through `gpu_harness.GpuRanks`, without JAX: events on each GPU before and
after the kernel, all ranks released together, the L2 filled with other data before each call. A
call's time is that of its slowest rank.

The floor of a call is what its busiest rank cannot go below on an H200:

    max(bytes of the weights of its experts that have rows / 4.6 TB/s,
        2 * rows * 3 * hidden * intermediate / 1340 TFLOP/s)

4.6 TB/s is what reading alone reaches of the 4.8 TB/s of HBM3e, 1340 TFLOP/s what dense FP8
products reach before power limits the clock. Granularity 32 has BF16 products, at half that rate;
its floor is the same, since it is a property of the layer and not of the kernel.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_megamoe._backends import SM_90A
from jax_megamoe._ffi import granularity_number, native
from jax_megamoe._headers import include_dir
from jax_megamoe._nvrtc import nvrtc_path
from jax_megamoe.config import MegaMoEConfig, swiglu
from jax_megamoe.devtools.gpu_harness import GpuRanks
from jax_megamoe.errors import check
from jax_megamoe.symmetric import moe_shape
from jax_megamoe.weights import GPU_CHUNK, ExpertWeights

__all__ = [
    "FLOOR_FORMULA",
    "FLOP_PER_S",
    "HBM_BYTES_PER_S",
    "MODELS",
    "ROUTINGS",
    "Fused",
    "Jitted",
    "Model",
    "Operands",
    "Traffic",
    "Unfused",
    "compile_ahead",
    "expert_bytes",
    "gpu_names",
    "make_config",
    "measure_tokens",
    "num_gpus",
    "random_operands",
    "random_weights",
    "relative_difference",
    "same_busiest_rank",
    "traffic",
]

HBM_BYTES_PER_S = 4.6e12
FLOP_PER_S = 1340e12
FLOOR_FORMULA = (
    "max(weight bytes of experts with rows / 4.6 TB/s, "
    "2 * rows * 3 * hidden * intermediate / 1340 TFLOP/s) of the busiest rank"
)
ROUTINGS = ("uniform", "zipf", "none")
_SWIGLU_LIMIT = 10.0


class Model(NamedTuple):
    """Sizes of a layer with the experts that one GPU holds."""

    hidden: int
    intermediate: int
    local_experts: int
    top_k: int


#: DeepSeek-V4 with its experts over 8 GPUs.
MODELS = {"flash": Model(4096, 2048, 32, 6), "pro": Model(7168, 3072, 48, 6)}


def make_config(
    model: Model, num_ranks: int, max_tokens: int, granularity: int | str, timeout_s: float = 10.0
) -> MegaMoEConfig:
    """The layer on `num_ranks` GPUs, each with `model.local_experts` experts."""
    return MegaMoEConfig(
        num_experts=model.local_experts * num_ranks,
        top_k=model.top_k,
        hidden=model.hidden,
        intermediate=model.intermediate,
        max_tokens_per_rank=max_tokens,
        activation=swiglu(_SWIGLU_LIMIT),
        activation_granularity=granularity,
        timeout_s=timeout_s,
    )


class Operands(NamedTuple):
    """x [R, T, H] bfloat16, topk_idx [R, T, K] int32, topk_weights [R, T, K] float32."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


def random_weights(
    config: MegaMoEConfig, num_ranks: int, rng: np.random.Generator
) -> ExpertWeights:
    """E/R experts of random codes in the GPU layout; scales of a row within 2^3 of each other.

    For timing: every byte of the layout is a valid one, and nobody has to quantise gigabytes. Gate
    and up sums of unit tokens are of order one.
    """
    bf16 = config.activation_granularity == 32
    chunk_bytes = native.gpu_weight_chunk_bytes(granularity_number(config))
    code_bytes = GPU_CHUNK * GPU_CHUNK // 2
    local = config.local_experts(num_ranks)
    hidden, intermediate = config.padded_hidden, config.padded_intermediate

    def chunks(rows: int, columns: int) -> Any:
        shape = (local, rows // GPU_CHUNK, columns // GPU_CHUNK, chunk_bytes)
        array = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
        scales = array[..., code_bytes:]
        array[..., code_bytes:] = 253 - (scales & 3) if bf16 else scales & 0x33
        return array

    def base(rows: int, columns: int) -> Any:
        # Root mean squares: 2.93 of the codes, 0.576 of their groups' scales.
        byte = 127 - round(np.log2(1.69 * columns**0.5))
        return np.full((local, rows), byte, np.uint8)

    return ExpertWeights(
        w13=chunks(2 * intermediate, hidden),
        w13_sf=base(2 * intermediate, hidden),
        w2=chunks(hidden, intermediate),
        w2_sf=base(hidden, intermediate),
        layout=SM_90A.layout(config),
    )


def _zipf(num_experts: int, rng: np.random.Generator) -> np.ndarray:
    return 1.0 / (1 + rng.permutation(num_experts))


def random_operands(
    config: MegaMoEConfig,
    num_ranks: int,
    num_tokens: int,
    rng: np.random.Generator,
    routing: str = "uniform",
    popularity: np.ndarray | None = None,
) -> Operands:
    """Unit Gaussian tokens and one of `ROUTINGS`.

    "uniform": distinct experts, all equally likely. "zipf": distinct experts, the i-th most popular
    with a weight of 1/i, in random order or, if given, of this popularity [E]. "none": every slot
    is -1.
    """
    check(
        routing in ROUTINGS,
        "routing",
        got=repr(routing),
        want=f"one of {ROUTINGS}",
        remedy="see random_operands",
    )
    shape = (num_ranks, num_tokens)
    x = rng.standard_normal((*shape, config.padded_hidden), np.float32).astype(ml_dtypes.bfloat16)
    num_experts, top_k = config.num_experts, config.top_k
    if routing == "none":
        idx = np.full((*shape, top_k), -1, np.int32)
    else:
        if routing == "uniform":
            popularity = np.ones(num_experts)
        elif popularity is None:
            popularity = _zipf(num_experts, rng)
        # Sorting log(popularity) + Gumbel noise draws without replacement.
        keys = np.log(popularity) + rng.gumbel(size=(*shape, num_experts))
        idx = np.argpartition(-keys, top_k - 1, axis=-1)[..., :top_k].astype(np.int32)
    weights = rng.random((*shape, top_k), np.float32)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-6)
    return Operands(x, idx, weights)


class Traffic(NamedTuple):
    """What a call asks of each rank, [R] each.

    Attributes:
      rows: rows its experts receive.
      experts: its experts that receive any.
      weight_bytes: bytes of their weights.
      flops: multiplications and additions of its rows' products.
      link_bytes: bytes that come in from other ranks: pulled rows, and results of its own tokens.
    """

    rows: np.ndarray
    experts: np.ndarray
    weight_bytes: np.ndarray
    flops: np.ndarray
    link_bytes: np.ndarray

    @property
    def floor_us(self) -> float:
        """See the module's description."""
        memory, compute = self.weight_bytes / HBM_BYTES_PER_S, self.flops / FLOP_PER_S
        return float(1e6 * np.maximum(memory, compute).max())


def expert_bytes(config: MegaMoEConfig) -> int:
    """Bytes of one expert in the GPU layout."""
    hidden, intermediate = config.padded_hidden, config.padded_intermediate
    chunks = 3 * hidden * intermediate // GPU_CHUNK**2
    chunk_bytes = native.gpu_weight_chunk_bytes(granularity_number(config))
    return chunks * chunk_bytes + 2 * intermediate + hidden


def traffic(config: MegaMoEConfig, topk_idx: np.ndarray) -> Traffic:
    """Counts of one call. topk_idx: [R, T, K]; ids outside [0, E) are not routed."""
    num_ranks = len(topk_idx)
    local = config.local_experts(num_ranks)
    counts = np.stack(
        [
            np.bincount(idx[(idx >= 0) & (idx < config.num_experts)], minlength=config.num_experts)
            for idx in topk_idx.reshape(num_ranks, -1)
        ]
    ).reshape(num_ranks, num_ranks, local)  # [source, owner, expert]
    between = counts.sum(axis=2)
    rows = between.sum(axis=0)
    others = between * (1 - np.eye(num_ranks, dtype=int))
    hidden = config.padded_hidden
    scales = {32: hidden // 32, 128: hidden // 128, "row": 1}[config.activation_granularity]
    pulled = hidden + scales + 8  # a row, its scales, its routing weight and slot number
    return Traffic(
        rows=rows,
        experts=np.count_nonzero(counts.sum(axis=0), axis=1),
        weight_bytes=np.count_nonzero(counts.sum(axis=0), axis=1) * expert_bytes(config),
        flops=2 * rows * 3 * hidden * config.padded_intermediate,
        link_bytes=others.sum(axis=0) * pulled + others.sum(axis=1) * 2 * hidden,
    )


def compile_ahead(kernels: Sequence[tuple[MegaMoEConfig, int, int]], *, bias: bool = False) -> None:
    """Compiles kernels, (config, number of ranks, tile) each, into the cache.

    `bias`: for experts with biases.

    In several processes: a kernel takes seconds, and the native module compiles one at a time.
    Without a cache (JAX_MEGAMOE_CACHE_DIR empty) this does nothing.

    Raises:
      RuntimeError: one of them does not compile.
    """
    if os.environ.get("JAX_MEGAMOE_CACHE_DIR") == "" or not kernels:
        return
    jobs = []
    for config, num_ranks, tile in kernels:
        shape = moe_shape(config, num_ranks, SM_90A.name)
        jobs.append(list(SM_90A.kernel_options(config, shape, tile, bias)))
    workers = min(len(jobs), 16, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        list(pool.map(_compile, jobs))


def _compile(options: list[str]) -> None:
    native.compile_kernel(str(include_dir()), options, nvrtc_path())


class Fused:
    """The fused layer's kernels on `devices`, with random weights, ready to be timed."""

    def __init__(
        self,
        config: MegaMoEConfig,
        devices: Sequence[int],
        rng: np.random.Generator,
        make_ranks: Callable[..., Any] = GpuRanks,
        **options: Any,
    ):
        self.config, self.num_ranks = config, len(devices)
        self.ranks = make_ranks(config, devices, **options)
        self.weights = random_weights(config, self.num_ranks, rng)
        for rank in range(self.num_ranks):
            self.ranks.set_weights(rank, self.weights)

    def set_operands(self, operands: Operands) -> None:
        for rank, own in enumerate(zip(*operands, strict=True)):
            self.ranks.set_inputs(rank, *own)

    def y(self) -> np.ndarray:
        """[R, T, H] bfloat16 of the last call."""
        rows = [self.ranks.outputs(rank).y for rank in range(self.num_ranks)]
        return np.stack(rows).view(ml_dtypes.bfloat16)

    def measure(
        self, operands: Operands, *, tile: int = -1, repeats: int = 15, flush_l2: bool = True
    ) -> dict[str, Any]:
        """Times one set of operands. Two untimed calls come first.

        Returns:
          A dict: tile, tokens_per_rank, rows (of the busiest rank), experts_touched (on it),
          fused_us (median over calls of the slowest rank), fused_us_all, floor_us, of_floor
          (floor over time, 0 to 1), tflops, hbm_gb_s (weights of the experts touched), link_gb_s
          (into the rank with the most), finite.
        """
        self.set_operands(operands)
        chosen = self.ranks.select_tile() if tile < 0 else tile
        self.ranks.launch(chosen, repeats=2)
        times = np.max(self.ranks.launch(chosen, repeats=repeats, flush_l2=flush_l2), axis=1)
        asked = traffic(self.config, operands.topk_idx)
        median = float(np.median(times))
        return {
            "granularity": self.config.activation_granularity,
            "ranks": self.num_ranks,
            "tokens_per_rank": operands.topk_idx.shape[1],
            "tile": chosen,
            "selected": chosen == self.ranks.select_tile(),
            "rows": int(asked.rows.max()),
            "experts_touched": int(asked.experts.max()),
            "fused_us": median,
            "fused_us_all": [float(t) for t in times],
            "floor_us": asked.floor_us,
            "of_floor": asked.floor_us / median,
            "tflops": float(asked.flops.max() / median / 1e6),
            "hbm_gb_s": float(asked.weight_bytes.max() / median / 1e3),
            "link_gb_s": float(asked.link_bytes.max() / median / 1e3),
            "finite": bool(np.isfinite(self.y().astype(np.float32)).all()),
        }


def same_busiest_rank(
    config: MegaMoEConfig, num_ranks: int, num_tokens: int, rng: np.random.Generator
) -> Operands:
    """Zipf-routed operands whose busiest rank gets about the rows it gets from `num_tokens` tokens
    under uniform routing: T * K. With one rank that is the same number of tokens."""
    wanted = num_tokens * config.top_k
    tokens = num_tokens
    popularity = _zipf(config.num_experts, rng)
    for _ in range(4):
        operands = random_operands(config, num_ranks, tokens, rng, "zipf", popularity)
        rows = int(traffic(config, operands.topk_idx).rows.max())
        if num_ranks == 1 or abs(rows - wanted) <= config.top_k:
            break
        tokens = min(num_tokens, max(1, round(tokens * wanted / rows)))
    return operands


def measure_tokens(
    fused: Fused,
    tokens: Sequence[int],
    rng: np.random.Generator,
    *,
    repeats: int = 15,
    extras: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One result for each number of tokens, and two more.

    Args:
      fused: from `Fused`.
      tokens: per rank.
      rng: of tokens and routings.
      repeats: timed calls of each.
      extras: also measure the fixed cost, a call of the least tokens with all slots -1, and Zipf
        routing: the most tokens, fewer if that gives the busiest rank more rows than uniform
        routing does.
      progress: is called with what comes next.

    Returns:
      Dicts of `Fused.measure` with a "routing".
    """
    results = []

    def add(operands, routing):
        results.append({"routing": routing, **fused.measure(operands, repeats=repeats)})

    config, ranks = fused.config, fused.num_ranks
    for count in tokens:
        progress(f"granularity {config.activation_granularity}: {count} tokens per rank")
        add(random_operands(config, ranks, count, rng), "uniform")
    if extras:
        progress(f"granularity {config.activation_granularity}: fixed cost and Zipf routing")
        add(random_operands(config, ranks, min(tokens), rng, "none"), "none")
        add(same_busiest_rank(config, ranks, max(tokens), rng), "zipf")
    return results


# Through JAX: the unfused layer, and the fused one as a jitted call ------------------------------


def _mesh(num_ranks: int) -> Any:
    """A mesh "ep" of the first devices that JAX shows."""
    import jax

    devices = jax.devices()[:num_ranks]
    check(
        len(devices) == num_ranks,
        "GPUs of JAX",
        got=len(devices),
        want=f"{num_ranks}, one for each rank",
        remedy="look at CUDA_VISIBLE_DEVICES and JAX_PLATFORMS",
    )
    return jax.make_mesh((num_ranks,), ("ep",), (jax.sharding.AxisType.Auto,), devices=devices)


def _place(mesh: Any, operands: Operands) -> Any:
    """Operands [R, T, ...] as global arrays [R * T, ...] over the mesh."""
    import jax

    by_rank = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    return jax.device_put(tuple(a.reshape(-1, a.shape[-1]) for a in operands), by_rank)


def _time_calls(call: Callable[..., Any], operands: Any, repeats: int) -> tuple[Any, list[float]]:
    """A result, and microseconds of host wall time from dispatch until each of `repeats` results is
    there, after two untimed calls: caches are warm."""
    import time

    import jax

    y = jax.block_until_ready(call(*operands))
    jax.block_until_ready(call(*operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*operands))
        times.append(1e6 * (time.perf_counter() - start))
    return y, times


class Jitted:
    """The fused layer as its users call it, with the weights of a `Fused`, timed as `Unfused` is.

    So its time holds the launch, and what JAX and XLA need for a call; its caches are warm.
    """

    def __init__(self, fused: Fused):
        import jax

        from jax_megamoe.layer import MegaMoE

        self.mesh = _mesh(fused.num_ranks)
        self.layer = MegaMoE(fused.config, self.mesh, axis="ep")
        # Every rank has the same experts.
        everywhere = jax.tree.map(lambda a: np.concatenate([a] * fused.num_ranks), fused.weights)
        self._weights = self.layer.shard(everywhere)
        self._call = jax.jit(self.layer)

    def measure(self, operands: Operands, repeats: int = 10) -> dict[str, Any]:
        """Times one set of operands: call_us, the median, and call_us_all."""
        placed = (*_place(self.mesh, operands), self._weights)
        _, times = _time_calls(self._call, placed, repeats)
        return {"call_us": float(np.median(times)), "call_us_all": times}

    def __enter__(self) -> Jitted:
        return self

    def __exit__(self, *_: object) -> None:
        self.layer.close()


class Unfused:
    """The unfused layer on the first GPUs that JAX shows, with the weights of a `Fused`.

    Its time is host wall time of a jitted call until its result is there, with warm caches: it is
    many kernels, and what lies between them belongs to it.
    """

    def __init__(self, fused: Fused):
        import jax

        from jax_megamoe import unfused

        self.config = fused.config
        self.mesh = _mesh(fused.num_ranks)
        everywhere = jax.sharding.PartitionSpec()
        # Every rank has the same experts: they are widened where they are needed.
        widen = jax.shard_map(
            unfused.widen_weights,
            mesh=self.mesh,
            in_specs=everywhere,
            out_specs=jax.sharding.PartitionSpec("ep"),
            check_vma=False,
        )
        replicated = jax.sharding.NamedSharding(self.mesh, everywhere)
        self._weights = jax.jit(widen)(jax.device_put(fused.weights, replicated))

    def variants(self) -> list[tuple[str, str]]:
        """(transport, gemm) of those worth measuring here."""
        from jax_megamoe import unfused

        # Which product is the fastest depends on the device, and on what is installed.
        _, gemm = unfused.choose("auto", "auto", config=self.config)
        transports = ("all_to_all", "all_gather") if self.mesh.size > 1 else ("all_to_all",)
        return [(transport, gemm) for transport in transports]

    def measure(self, operands: Operands, repeats: int = 10) -> dict[str, Any]:
        """Times every variant.

        Returns:
          A dict: unfused_us (median of the best variant), unfused_variant, unfused_us_all (of it),
          and y [R, T, H] of it.
        """
        import jax

        from jax_megamoe import unfused

        placed = (*_place(self.mesh, operands), self._weights)
        best: dict[str, Any] = {}
        for transport, gemm in self.variants():

            def layer(*operands, transport=transport, gemm=gemm):
                return unfused.mega_moe(
                    *operands, self.config, self.mesh, "ep", transport=transport, gemm=gemm
                )

            y, times = _time_calls(jax.jit(layer), placed, repeats)
            median = float(np.median(times))
            if not best or median < best["unfused_us"]:
                best = {
                    "unfused_us": median,
                    "unfused_variant": f"{transport}, {gemm}",
                    "unfused_us_all": times,
                    "y": np.asarray(y).reshape(operands.x.shape),
                }
        return best


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """``||a - b|| / ||b||`` in float64."""
    a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver shows to this process. Does not start JAX.

    Returns:
      One name for each ordinal; nothing without a driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    names = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names


def num_gpus() -> int:
    """GPUs that the driver shows to this process. Does not start JAX."""
    return len(gpu_names())
