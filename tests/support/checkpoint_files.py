"""Small checkpoints with names, dtypes and config.json entries of the published models.

Everything is numpy. A `Model` has the tensors as bytes and what a loader should make of them;
`write` puts it into a directory, in any number of shards, and tests damage one or the other first.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

EXPERTS, TOP_K, HIDDEN, INTER, VOCAB = 4, 2, 192, 96, 10
BLOCK = 128  # neither width is a multiple of it: FP8 scales have partial blocks

NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}


@dataclasses.dataclass
class Model:
    """Attributes:
    config: config.json.
    tensors: name -> array; its dtype is one of `NAMES`.
    layers: indices of layers with experts.
    expected: layer -> w13 [E, 2I, H/2], w13_sf, w2, w2_sf, or w_gate [E, I, H], w_up, w_down in
      float32 for formats that are not exact. gpt-oss: gate_bias, up_bias, down_bias as well.
    shared: layer -> gate [S, H], up, down in float32, of families with a shared expert; Qwen2-MoE:
      token_gate [1, H] as well.
    """

    config: dict
    tensors: dict[str, np.ndarray]
    layers: tuple[int, ...]
    expected: dict[int, dict[str, np.ndarray]]
    shared: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def text_config(self) -> dict:
        return self.config.get("text_config", self.config)


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> dict[str, tuple[int, int]]:
    """Writes one safetensors file; returns the byte range of each tensor in it."""
    header: dict = {"__metadata__": {"format": "pt"}}
    ranges, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        ranges[name] = (offset, offset + array.nbytes)
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())
    return {name: (8 + len(text) + a, 8 + len(text) + b) for name, (a, b) in ranges.items()}


def write(model: Model, path: Path, num_shards: int = 1) -> Path:
    """Writes config.json and `num_shards` files, with an index if there are several.

    Tensors are dealt out in turn, so that an expert lies in several shards.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config))
    if num_shards == 1:
        write_file(path / "model.safetensors", model.tensors)
        return path
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(model.tensors.items())[i::num_shards])
        write_file(path / file, part)
        weight_map.update(dict.fromkeys(part, file))
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


# Contents ----------------------------------------------------------------------------------------


def fp4(rng, *shape, calm=False) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [..., K/2] and scale bytes [..., K/32] of a [..., K] matrix, all uint8.

    Every code is there, negative zero too, and the scale bytes 0, 1, 127 and 254, unless `calm`:
    then products of H or I such values and numbers of order one are of order one.
    """
    *lead, k = shape
    packed = rng.integers(0, 256, (*lead, k // 2), dtype=np.uint8)
    packed[..., 0] = 0x88
    if calm:
        return packed, rng.integers(121, 124, (*lead, k // 32), dtype=np.uint8)
    sf = rng.integers(100, 130, (*lead, k // 32), dtype=np.uint8)
    edges = rng.integers(0, 16, sf.shape)
    for i, byte in enumerate((0, 1, 127, 254)):
        sf[edges == i] = byte
    return packed, sf


def fp8(
    rng, rows, columns, scale_dtype, block=BLOCK, calm=False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 [N, K], scales per block x block, and their product in float32; `calm` as in `fp4`."""
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80  # no NaN
    values = codes.view(ml_dtypes.float8_e4m3fn)
    shape = (-(-rows // block), -(-columns // block))
    if scale_dtype == ml_dtypes.float8_e8m0fnu:
        bounds = (116, 119) if calm else (110, 125)
        scales = rng.integers(*bounds, shape, dtype=np.uint8).view(scale_dtype)
    else:
        scales = rng.uniform(1e-4, 1e-3, shape).astype(scale_dtype)
    product = np.empty((rows, columns), np.float32)
    for (i, j), scale in np.ndenumerate(scales.astype(np.float32)):
        where = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
        product[where] = values[where].astype(np.float32) * scale
    return values, scales, product


def bf16(rng, *shape, fan_in=1) -> np.ndarray:
    return (rng.normal(size=shape) * fan_in**-0.5).astype(ml_dtypes.bfloat16)


def f32(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def selection_bias(rng, calm) -> np.ndarray:
    """`calm`: smaller than differences of scores, so that these decide as well."""
    return f32(rng, EXPERTS) * np.float32(0.1 if calm else 1.0)


def _shapes():
    return {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}


def _add_mxfp4(rng, tensors, prefix, projections, suffixes, dtypes, calm) -> dict[str, np.ndarray]:
    """Experts of one layer, tensor by tensor; returns what `ExpertWeights` should hold."""
    parts: dict[str, list] = {}
    for expert in range(EXPERTS):
        for role, shape in _shapes().items():
            packed, sf = fp4(rng, *shape, calm=calm)
            for suffix, dtype, array in zip(suffixes, dtypes, (packed, sf), strict=True):
                name = f"{prefix}.experts.{expert}.{projections[role]}.{suffix}"
                tensors[name] = array.view(dtype)
            parts.setdefault(role, []).append(packed)
            parts.setdefault(role + "_sf", []).append(sf)
    return _stacked({role: np.stack(arrays) for role, arrays in parts.items()})


def _stacked(parts) -> dict[str, np.ndarray]:
    return {
        "w13": np.concatenate([parts["gate"], parts["up"]], axis=1),
        "w13_sf": np.concatenate([parts["gate_sf"], parts["up_sf"]], axis=1),
        "w2": parts["down"],
        "w2_sf": parts["down_sf"],
    }


def _add_matrix(rng, tensors, name, shape, scale_suffix, scale_dtype, **options) -> np.ndarray:
    """One matrix in FP8, or BF16 if scale_dtype is None; returns it in float32."""
    if scale_dtype is None:
        tensors[f"{name}.weight"] = bf16(rng, *shape, fan_in=shape[1])
        return tensors[f"{name}.weight"].astype(np.float32)
    values, scales, product = fp8(rng, *shape, scale_dtype, **options)
    tensors[f"{name}.weight"], tensors[f"{name}.{scale_suffix}"] = values, scales
    return product


def _add_dense(rng, tensors, prefix, projections, scale_suffix, scale_dtype, calm):
    """The same for FP8 (or BF16, scale_dtype None); returns the weights in float32."""
    parts: dict[str, list] = {}
    for expert in range(EXPERTS):
        for role, shape in _shapes().items():
            name = f"{prefix}.experts.{expert}.{projections[role]}"
            matrix = _add_matrix(rng, tensors, name, shape, scale_suffix, scale_dtype, calm=calm)
            parts.setdefault(f"w_{role}", []).append(matrix)
    return {name: np.stack(arrays) for name, arrays in parts.items()}


def _add_shared(rng, tensors, prefix, projections, *how, hidden=HIDDEN, width=INTER, **options):
    """A shared expert; `how` are scale_suffix and scale_dtype. Returns it in float32."""
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {
        role: _add_matrix(rng, tensors, f"{prefix}.{projections[role]}", shape, *how, **options)
        for role, shape in shapes.items()
    }


_W123 = {"gate": "w1", "up": "w3", "down": "w2"}
_PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INTER, "num_hidden_layers": 2}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def deepseek_v4(rng, *, nested=False, base_scales=None, calm=False) -> Model:
    """nested: V4.1's config.json. base_scales: V4-Base, FP8 experts with scales of that dtype."""
    text = {
        "model_type": "deepseek_v41" if nested else "deepseek_v4",
        **_SIZES,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
    }
    quantization = {**_BLOCKS, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    if nested:  # blocks of the dense layers, which say nothing about FP4 experts
        quantization["weight_block_size"] = [32, 32]
        config = {"model_type": "deepseek_v41", "text_config": text}
    else:
        config = text
    config["quantization_config"] = quantization
    tensors = {"embed.weight": bf16(rng, VOCAB, HIDDEN)}
    expected, expected_shared = {}, {}
    dense_scales = ml_dtypes.float8_e8m0fnu if base_scales is None else base_scales
    dense_block = quantization["weight_block_size"][0]
    for layer in (0, 1):
        prefix = f"layers.{layer}.ffn"
        tensors[f"{prefix}.gate.weight"] = bf16(rng, EXPERTS, HIDDEN, fan_in=HIDDEN)
        if layer == 0:
            table = rng.integers(0, EXPERTS, (VOCAB, TOP_K), dtype=np.int64)
            tensors[f"{prefix}.gate.tid2eid"] = table
        else:
            tensors[f"{prefix}.gate.bias"] = selection_bias(rng, calm)
        shared = f"{prefix}.shared_experts", _W123, "scale", dense_scales
        expected_shared[layer] = _add_shared(rng, tensors, *shared, block=dense_block, calm=calm)
        if base_scales is not None:
            expected[layer] = _add_dense(rng, tensors, prefix, _W123, "scale", base_scales, calm)
        else:
            dtypes = (np.int8, ml_dtypes.float8_e8m0fnu)
            names = ("weight", "scale")
            expected[layer] = _add_mxfp4(rng, tensors, prefix, _W123, names, dtypes, calm)
    draft = fp4(rng, INTER, HIDDEN)  # a draft block's experts are no layer
    tensors["mtp.0.ffn.experts.0.w1.weight"] = draft[0].view(np.int8)
    tensors["mtp.0.ffn.experts.0.w1.scale"] = draft[1].view(ml_dtypes.float8_e8m0fnu)
    return Model(config, tensors, (0, 1), expected, expected_shared)


def deepseek_v3(rng, model_type="deepseek_v3", scale_dtype=np.float32, *, calm=False) -> Model:
    groups = 1 if model_type == "kimi_k2" else 2
    config = {
        "model_type": model_type,
        **_SIZES,
        "intermediate_size": 4 * INTER,  # of dense layers
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 2,
        "n_group": groups,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "quantization_config": _BLOCKS,
    }
    dense = fp8(rng, 4 * INTER, HIDDEN, np.float32)
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": dense[0],
        "model.layers.0.mlp.gate_proj.weight_scale_inv": dense[1],
        "model.layers.1.mlp.gate.weight": bf16(rng, EXPERTS, HIDDEN, fan_in=HIDDEN),
        "model.layers.1.mlp.gate.e_score_correction_bias": selection_bias(rng, calm),
    }
    how = "weight_scale_inv", scale_dtype
    layer = "model.layers.1.mlp"
    shared = f"{layer}.shared_experts", _PROJ, *how
    expected_shared = _add_shared(rng, tensors, *shared, width=2 * INTER, calm=calm)
    weights = _add_dense(rng, tensors, layer, _PROJ, *how, calm)
    return Model(config, tensors, (1,), {1: weights}, {1: expected_shared})


def kimi_k3(rng, *, calm=False) -> Model:
    wide = 2 * HIDDEN
    text = {
        "model_type": "kimi_linear",
        "hidden_size": wide,
        "routed_expert_hidden_size": HIDDEN,  # the experts work on a latent
        "moe_intermediate_size": INTER,
        "num_hidden_layers": 2,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "num_shared_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "latent_moe_use_norm": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "quantization_config": {"format": "mxfp4-pack-quantized"},
    }
    prefix = "language_model.model.layers.1.block_sparse_moe"
    tensors = {
        f"{prefix}.gate.weight": bf16(rng, EXPERTS, wide, fan_in=wide),
        f"{prefix}.gate.e_score_correction_bias": selection_bias(rng, calm),
        f"{prefix}.routed_expert_down_proj.weight": bf16(rng, HIDDEN, wide, fan_in=wide),
        f"{prefix}.routed_expert_norm.weight": bf16(rng, HIDDEN),
        f"{prefix}.routed_expert_up_proj.weight": bf16(rng, wide, HIDDEN, fan_in=HIDDEN),
    }
    shared = f"{prefix}.shared_experts", _PROJ, "", None
    expected_shared = _add_shared(rng, tensors, *shared, hidden=wide, width=2 * INTER)
    suffixes, dtypes = ("weight_packed", "weight_scale"), (np.uint8, np.uint8)
    weights = _add_mxfp4(rng, tensors, prefix, _W123, suffixes, dtypes, calm)
    config = {"model_type": "kimi_k3", "text_config": text}
    return Model(config, tensors, (1,), {1: weights}, {1: expected_shared})


def gpt_oss(rng, *, original=False, calm=False) -> Model:
    """original: names and config.json of the first release, without model_type."""
    if original:
        config = {
            "num_experts": EXPERTS,
            "experts_per_token": TOP_K,
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "swiglu_limit": 7.0,
        }
    else:
        config = {
            "model_type": "gpt_oss",
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "experts_per_token": TOP_K,
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "hidden_act": "silu",
            "swiglu_limit": 7.0,
        }
    tensors, expected = {}, {}
    for layer in (0, 1):
        parts = {}
        for role, shape in _shapes().items():
            parts[role], parts[role + "_sf"] = fp4(rng, EXPERTS, *shape, calm=calm)
            parts[role + "_bias"] = bf16(rng, EXPERTS, shape[0])
        fused = {}
        for kind in ("", "_sf", "_bias"):  # gate, up, gate, up, ...
            pair = np.stack([parts["gate" + kind], parts["up" + kind]], axis=2)
            fused[kind] = pair.reshape(EXPERTS, 2 * INTER, *pair.shape[3:])
        first = f"block.{layer}.mlp." if original else f"model.layers.{layer}.mlp."
        experts = first if original else first + "experts."
        router = first + ("gate" if original else "router")
        names = ("mlp1", "mlp2") if original else ("gate_up_proj", "down_proj")
        values = (
            {"": fused[""], "_sf": fused["_sf"], "_bias": fused["_bias"]},
            {kind: parts["down" + kind] for kind in ("", "_sf", "_bias")},
        )
        for name, arrays in zip(names, values, strict=True):
            sf = arrays["_sf"]
            weight = f"{experts}{name}_weight." if original else f"{experts}{name}_"
            tensors[f"{weight}blocks"] = arrays[""].reshape(*sf.shape, 16)
            tensors[f"{weight}scales"] = sf
            tensors[f"{experts}{name}_bias"] = arrays["_bias"]
        tensors[f"{router}.weight"] = bf16(rng, EXPERTS, HIDDEN, fan_in=HIDDEN)
        tensors[f"{router}.bias"] = bf16(rng, EXPERTS)
        expected[layer] = _stacked(parts) | {
            f"{role}_bias": parts[f"{role}_bias"] for role in _shapes()
        }
    return Model(config, tensors, (0, 1), expected)


def qwen3_moe(rng, scale_dtype=None, *, model_type="qwen3_moe", calm=False) -> Model:
    """BF16, or FP8 with scales of `scale_dtype`. model_type qwen2_moe adds a shared expert."""
    config = {
        "model_type": model_type,
        **_SIZES,
        "intermediate_size": 4 * INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": model_type == "qwen3_moe",
        "hidden_act": "silu",
    }
    if model_type == "qwen2_moe":
        config["shared_expert_intermediate_size"] = 2 * INTER
    if scale_dtype is not None:
        config["quantization_config"] = _BLOCKS
    tensors, expected, expected_shared = {}, {}, {}
    how = "weight_scale_inv", scale_dtype
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = bf16(rng, EXPERTS, HIDDEN, fan_in=HIDDEN)
        expected[layer] = _add_dense(rng, tensors, prefix, _PROJ, *how, calm)
        if model_type == "qwen2_moe":
            parts = _add_shared(
                rng, tensors, f"{prefix}.shared_expert", _PROJ, *how, width=2 * INTER, calm=calm
            )
            gate = bf16(rng, 1, HIDDEN, fan_in=HIDDEN)
            tensors[f"{prefix}.shared_expert_gate.weight"] = gate
            expected_shared[layer] = parts | {"token_gate": gate.astype(np.float32)}
    return Model(config, tensors, (0, 1), expected, expected_shared)
