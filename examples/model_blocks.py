"""A model's whole MoE block out of its checkpoint: router, experts and shared expert.

For each family, a small checkpoint is written with the names, dtypes and config.json entries of the
published ones. Then come the three lines that a real one takes: open, load, call. The result is
compared with the model's formulas, written out here in NumPy around the reference for the experts.

    python examples/model_blocks.py [deepseek_v4 deepseek_v3 kimi_k2 qwen3_moe]
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import jax_megamoe as jmm

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, VOCAB, FP8_BLOCK = 64, 8, 2, 256, 128, 100, 128
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts_per_tok": TOP_K}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
rng = np.random.default_rng(0)

# Checkpoints: config.json, and tensors of one layer -----------------------------------------------


def bf16(*shape):
    return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)


def mxfp4(rows, columns):
    """{suffix: array} of a matrix in FP4: two codes a byte, a power of two for each 32 values."""
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = rng.integers(120, 123, (rows, columns // 32), dtype=np.uint8)
    return {"weight": codes.view(np.int8), "scale": scales.view(ml_dtypes.float8_e8m0fnu)}


def fp8(rows, columns, suffix, scale_dtype):
    """The same in FP8, with a scale for each block of 128 x 128."""
    values = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((rows // FP8_BLOCK, columns // FP8_BLOCK), columns**-0.5, np.float32)
    return {"weight": values, suffix: scales.astype(scale_dtype)}


def matrices(prefix, names, make):
    """Gate, up and down projection under `prefix`, each from `make(rows, columns)`."""
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return {
        f"{prefix}.{name}.{suffix}": array
        for name, shape in zip(names, shapes, strict=True)
        for suffix, array in make(*shape).items()
    }


def deepseek_v4():
    config = SIZES | {"model_type": "deepseek_v4", "n_routed_experts": EXPERTS}
    config |= {"n_shared_experts": 1, "num_hash_layers": 1, "swiglu_limit": 10.0}
    config |= {"norm_topk_prob": True, "routed_scaling_factor": 1.5}
    config["quantization_config"] = FP8_CONFIG
    layer, names = "layers.0.ffn", ("w1", "w3", "w2")
    tensors = {
        f"{layer}.gate.weight": bf16(EXPERTS, HIDDEN),
        f"{layer}.gate.tid2eid": rng.integers(0, EXPERTS, (VOCAB, TOP_K)),
    }
    for expert in range(EXPERTS):
        tensors |= matrices(f"{layer}.experts.{expert}", names, mxfp4)
    e8m0 = ml_dtypes.float8_e8m0fnu
    shared = matrices(f"{layer}.shared_experts", names, lambda *s: fp8(*s, "scale", e8m0))
    return config, tensors | shared


def deepseek_v3(model_type="deepseek_v3", groups=4):
    config = SIZES | {"model_type": model_type, "n_routed_experts": EXPERTS}
    config |= {"n_shared_experts": 1, "n_group": groups, "topk_group": max(1, groups // 2)}
    config |= {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    config["quantization_config"] = FP8_CONFIG
    layer, names = "model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")
    tensors = {
        f"{layer}.gate.weight": bf16(EXPERTS, HIDDEN),
        f"{layer}.gate.e_score_correction_bias": rng.normal(0, 0.1, EXPERTS).astype(np.float32),
    }
    for part in (*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"):
        tensors |= matrices(
            f"{layer}.{part}", names, lambda *s: fp8(*s, "weight_scale_inv", np.float32)
        )
    return config, tensors


def kimi_k2():
    return deepseek_v3("kimi_k2", groups=1)


def qwen3_moe():
    config = SIZES | {"model_type": "qwen3_moe", "num_experts": EXPERTS, "norm_topk_prob": True}
    layer, names = "model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{layer}.gate.weight": bf16(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        experts = f"{layer}.experts.{expert}"
        tensors |= matrices(experts, names, lambda *s: {"weight": bf16(*s)})
    return config, tensors


FAMILIES = (deepseek_v4, deepseek_v3, kimi_k2, qwen3_moe)

# The formulas -------------------------------------------------------------------------------------


def best(scores, count):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def route(config, router, x, token_ids):
    """Expert numbers and weights [T, K], as docs/routers.md has them."""
    z = x @ np.asarray(router["weight"], np.float64).T
    if config["model_type"] == "qwen3_moe":
        scores = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        idx, factor = best(scores, TOP_K), 1.0
    elif config["model_type"] == "deepseek_v4":
        scores = np.sqrt(np.log1p(np.exp(z)))
        idx, factor = router["tid2eid"][token_ids], config["routed_scaling_factor"]
    else:
        scores = 1 / (1 + np.exp(-z))
        biased = (scores + router["bias"]).reshape(len(x), config["n_group"], -1)
        groups = best(np.sort(biased, axis=2)[:, :, -2:].sum(axis=2), config["topk_group"])
        kept = (groups[:, :, None] == np.arange(config["n_group"])).any(axis=1)
        biased = np.where(kept[:, :, None], biased, -np.inf).reshape(z.shape)
        idx, factor = best(biased, TOP_K), config["routed_scaling_factor"]
    w = np.take_along_axis(scores, idx, axis=1)
    return idx, factor * w / w.sum(axis=1, keepdims=True)


def shared_expert(x, shared, limit):
    if not shared:
        return 0.0
    gate, up, down = (np.asarray(shared[name], np.float64) for name in ("gate", "up", "down"))
    g, u = x @ gate.T, x @ up.T
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (g / (1 + np.exp(-g)) * u) @ down.T


def run(family, directory):
    config, tensors = family()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.bfloat16)
    token_ids = rng.integers(0, VOCAB, TOKENS)

    checkpoint = jmm.checkpoints.open(directory)
    weights = jmm.blocks.load(checkpoint, layer=0, requantize=True)  # in host memory
    with jmm.blocks.MoEBlock.of(checkpoint, mesh, axis="ep", max_tokens_per_rank=TOKENS) as block:
        y = jax.jit(block)(x, block.shard(weights), token_ids=token_ids)
        y = np.asarray(y, np.float64)

    wide = np.asarray(x, np.float64)
    idx, w = route(config, weights.router, wide, token_ids)
    routing = jnp.asarray(idx, jnp.int32)[None], jnp.asarray(w, jnp.float32)[None]
    experts = jmm.reference.mega_moe(x[None], *routing, weights.experts, block.config)[0]
    limit = block.config.activation.limit
    expected = np.asarray(experts, np.float64) + shared_expert(wide, weights.shared, limit)
    error = jmm.reference.relative_error(y, expected)
    print(f"{family.__name__}: {block.router}")
    for rounded in checkpoint.relative_errors.values():
        print(f"  experts moved by rounding to FP4: {rounded}")
    print(f"  relative difference from the formulas {error:.1e}")
    assert error < 2.0**-8  # y, and the shared expert between its products, are BF16: 2^-9 each


jmm.use_virtual_cpu_devices(4)
mesh = jax.make_mesh((2, 2), ("data", "ep"))  # two expert-parallel groups of two ranks
names = sys.argv[1:] or [family.__name__ for family in FAMILIES]
for family in FAMILIES:
    if family.__name__ in names:
        with tempfile.TemporaryDirectory() as directory:
            run(family, Path(directory))
