"""A model's whole MoE block out of its checkpoint: router, experts and shared expert.

For each family, a small checkpoint is written with the names, dtypes and config.json entries of the
published ones. Then come the three lines that a real one takes: open, load, call. The result is
compared with the model's formulas, written out here in NumPy around the reference for the experts.

    python examples/model_blocks.py [deepseek_v4 deepseek_v3 kimi_k2 kimi_k3 gpt_oss qwen3_moe]
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
    """A matrix in FP4: bytes with two codes each, and those of a power of two for 32 values."""
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return codes, rng.integers(120, 123, (rows, columns // 32), dtype=np.uint8)


def mxfp4_of_deepseek(rows, columns):
    """{suffix: array}, as in all functions that `matrices` takes."""
    codes, scales = mxfp4(rows, columns)
    return {"weight": codes.view(np.int8), "scale": scales.view(ml_dtypes.float8_e8m0fnu)}


def mxfp4_of_kimi(rows, columns):
    return dict(zip(("weight_packed", "weight_scale"), mxfp4(rows, columns), strict=True))


def fp8(rows, columns, suffix, scale_dtype):
    """A matrix in FP8, with a scale for each block of 128 x 128."""
    values = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((rows // FP8_BLOCK, columns // FP8_BLOCK), columns**-0.5, np.float32)
    return {"weight": values, suffix: scales.astype(scale_dtype)}


def matrices(prefix, names, make, hidden=HIDDEN):
    """Gate, up and down projection under `prefix`, each from `make(rows, columns)`."""
    shapes = ((INTERMEDIATE, hidden), (INTERMEDIATE, hidden), (hidden, INTERMEDIATE))
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
        tensors |= matrices(f"{layer}.experts.{expert}", names, mxfp4_of_deepseek)
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


def kimi_k3():
    text = SIZES | {"model_type": "kimi_linear", "num_experts": EXPERTS, "num_shared_experts": 1}
    text |= {"hidden_size": 2 * HIDDEN, "routed_expert_hidden_size": HIDDEN, "rms_norm_eps": 1e-5}
    text |= {"num_expert_group": 1, "topk_group": 1, "moe_renormalize": True}
    text |= {"routed_scaling_factor": 1.0, "hidden_act": "situ", "activation_situ_beta": 4.0}
    text |= {"activation_situ_linear_beta": 25.0}
    layer = "language_model.model.layers.0.block_sparse_moe"
    tensors = {
        f"{layer}.gate.weight": bf16(EXPERTS, 2 * HIDDEN),
        f"{layer}.gate.e_score_correction_bias": rng.normal(0, 0.1, EXPERTS).astype(np.float32),
        f"{layer}.routed_expert_down_proj.weight": bf16(HIDDEN, 2 * HIDDEN),
        f"{layer}.routed_expert_norm.weight": bf16(HIDDEN, 1)[:, 0],
        f"{layer}.routed_expert_up_proj.weight": bf16(2 * HIDDEN, HIDDEN),
    }
    for expert in range(EXPERTS):
        tensors |= matrices(f"{layer}.experts.{expert}", ("w1", "w3", "w2"), mxfp4_of_kimi)
    names = ("gate_proj", "up_proj", "down_proj")
    shared = f"{layer}.shared_experts"
    tensors |= matrices(shared, names, lambda *s: {"weight": bf16(*s)}, hidden=2 * HIDDEN)
    return {"model_type": "kimi_k3", "text_config": text}, tensors


def gpt_oss():
    """Its experts are stacked, rows of gate and up alternate, and bytes are grouped by scale."""
    config = SIZES | {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "swiglu_limit": 7.0}
    config["intermediate_size"] = INTERMEDIATE
    layer = "model.layers.0.mlp"
    tensors = {
        f"{layer}.router.weight": bf16(EXPERTS, HIDDEN),
        f"{layer}.router.bias": bf16(EXPERTS),
    }
    shapes = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    for name, (rows, columns) in shapes.items():
        codes, scales = mxfp4(EXPERTS * rows, columns)
        scales = scales.reshape(EXPERTS, rows, -1)
        experts = f"{layer}.experts.{name}"
        tensors[f"{experts}_blocks"] = codes.reshape(*scales.shape, 16)
        tensors[f"{experts}_scales"] = scales
        tensors[f"{experts}_bias"] = bf16(EXPERTS, rows)
    return config, tensors


def qwen3_moe():
    config = SIZES | {"model_type": "qwen3_moe", "num_experts": EXPERTS, "norm_topk_prob": True}
    layer, names = "model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{layer}.gate.weight": bf16(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        experts = f"{layer}.experts.{expert}"
        tensors |= matrices(experts, names, lambda *s: {"weight": bf16(*s)})
    return config, tensors


FAMILIES = {
    make.__name__: make for make in (deepseek_v4, deepseek_v3, kimi_k2, kimi_k3, gpt_oss, qwen3_moe)
}

# The formulas -------------------------------------------------------------------------------------


def best(scores, count):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def route(config, router, x, token_ids):
    """Expert numbers and weights [T, K], as docs/routers.md has them."""
    z = x @ np.asarray(router["weight"], np.float64).T
    if config["model_type"] == "qwen3_moe":
        scores = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        idx, factor = best(scores, TOP_K), 1.0
    elif config["model_type"] == "gpt_oss":
        z = z + np.asarray(router["bias"], np.float64)
        idx, scores, factor = best(z, TOP_K), np.exp(z), 1.0
    elif config["model_type"] == "deepseek_v4":
        scores = np.sqrt(np.log1p(np.exp(z)))
        idx, factor = router["tid2eid"][token_ids], config["routed_scaling_factor"]
    else:
        scores = 1 / (1 + np.exp(-z))
        num_groups = config.get("n_group", 1)
        biased = (scores + router["bias"]).reshape(len(x), num_groups, -1)
        groups = best(np.sort(biased, axis=2)[:, :, -2:].sum(axis=2), config["topk_group"])
        kept = (groups[:, :, None] == np.arange(num_groups)).any(axis=1)
        biased = np.where(kept[:, :, None], biased, -np.inf).reshape(z.shape)
        idx, factor = best(biased, TOP_K), config["routed_scaling_factor"]
    w = np.take_along_axis(scores, idx, axis=1)
    return idx, factor * w / w.sum(axis=1, keepdims=True)


def activate(config, g, u):
    if config.get("hidden_act") == "situ":
        bounded = 4.0 * np.tanh(g / 4.0) / (1 + np.exp(-g))
        return bounded * 25.0 * np.tanh(u / 25.0)
    if "swiglu_limit" in config:
        limit = config["swiglu_limit"]
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return g / (1 + np.exp(-g)) * u


def shared_expert(config, x, shared):
    if not shared:
        return 0.0
    gate, up, down = (np.asarray(shared[name], np.float64) for name in ("gate", "up", "down"))
    return activate(config, x @ gate.T, x @ up.T) @ down.T


def routed_experts(config, x, routing, weights, layer_config):
    """The reference for the experts; around it, in Kimi-K3, the way to a latent and back."""
    latent = {name: np.asarray(array, np.float64) for name, array in weights.latent.items()}
    rows = x @ latent["down"].T if latent else x
    y = jmm.reference.mega_moe(
        jnp.asarray(rows, jnp.bfloat16)[None], *routing, weights.experts, layer_config
    )[0]
    y = np.asarray(y, np.float64)
    if latent:
        y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + config["rms_norm_eps"])
        y = (y * latent["norm"]) @ latent["up"].T
    return y


def run(family, directory):
    config, tensors = FAMILIES[family]()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    config = config.get("text_config", config)
    x = jnp.asarray(rng.standard_normal((TOKENS, config["hidden_size"])), jnp.bfloat16)
    token_ids = rng.integers(0, VOCAB, TOKENS)

    checkpoint = jmm.checkpoints.open(directory)
    weights = jmm.blocks.load(checkpoint, layer=0, requantize=True)  # in host memory
    with jmm.blocks.MoEBlock.of(checkpoint, mesh, axis="ep", max_tokens_per_rank=TOKENS) as block:
        y = jax.jit(block)(x, block.shard(weights), token_ids=token_ids)
        y = np.asarray(y, np.float64)

    wide = np.asarray(x, np.float64)
    idx, w = route(config, weights.router, wide, token_ids)
    routing = jnp.asarray(idx, jnp.int32)[None], jnp.asarray(w, jnp.float32)[None]
    expected = routed_experts(config, wide, routing, weights, block.config)
    expected = expected + shared_expert(config, wide, weights.shared)
    error = jmm.reference.relative_error(y, expected)
    print(f"{family}: {block.router}")
    for rounded in checkpoint.relative_errors.values():
        print(f"  experts moved by rounding to FP4: {rounded}")
    print(f"  relative difference from the formulas {error:.1e}")
    # Where NumPy is exact, the block has BF16: y, and the operands of two products, by 2^-9 each.
    assert error < 3 * 2.0**-9


jmm.use_virtual_cpu_devices(4)
mesh = jax.make_mesh((2, 2), ("data", "ep"))  # two expert-parallel groups of two ranks
for name in sys.argv[1:] or FAMILIES:
    with tempfile.TemporaryDirectory() as directory:
        run(name, Path(directory))
