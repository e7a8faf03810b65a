"""Blocks of generated checkpoints, with float64 oracles that share no code with `blocks`.

Three results belong to a case. `dense` rounds nothing but what the files and the loader round.
`truth` also has the FP8 roundings of the contract: their difference is what quantised activations
cost. `plain` is the computation in the block's own formats; its distance from `truth` comes from
FP32 and BF16 alone, and a block is allowed twice that distance. Kimi-K3's experts get a latent that
is rounded to BF16, in `truth` as well: what follows is a function of that.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import checkpoint_files as files
import jax_megamoe as jmm
from generators import tokens
from router_oracle import EPS, deepseek_scores, route64

#: name -> (maker, family of `router_oracle.route64`, layers)
MODELS = {
    "V4": (files.deepseek_v4, "deepseek_v4", (0, 1)),
    "V4.1": (functools.partial(files.deepseek_v4, nested=True), "deepseek_v4", (1,)),
    "V4-Base": (
        functools.partial(files.deepseek_v4, base_scales=np.float32),
        "deepseek_v4",
        (1,),
    ),
    "V3": (files.deepseek_v3, "deepseek_v3", (1,)),
    "V3 in BF16": (functools.partial(files.deepseek_v3, scale_dtype=None), "deepseek_v3", (1,)),
    "Kimi-K2": (functools.partial(files.deepseek_v3, model_type="kimi_k2"), "kimi_k2", (1,)),
    "Kimi-K3": (files.kimi_k3, "kimi_k3", (1,)),
    "gpt-oss": (files.gpt_oss, "gpt_oss", (1,)),
    "gpt-oss original": (functools.partial(files.gpt_oss, original=True), "gpt_oss", (0,)),
    "Qwen3": (files.qwen3_moe, "qwen3_moe", (1,)),
    "Qwen3 FP8": (functools.partial(files.qwen3_moe, scale_dtype=np.float32), "qwen3_moe", (1,)),
    "Qwen2": (functools.partial(files.qwen3_moe, model_type="qwen2_moe"), "qwen3_moe", (1,)),
}
CASES = [(name, layer) for name, (_, _, layers) in MODELS.items() for layer in layers]


def rounded_experts(expected: dict[str, np.ndarray]) -> jmm.ExpertWeights:
    """What a loader should make of a layer's experts, rounded if they are not MXFP4."""
    if "w13" in expected:
        biases = {}
        if "down_bias" in expected:
            b_gate, b_up, b2 = (np.float32(expected[f"{n}_bias"]) for n in ("gate", "up", "down"))
            biases = {"b13": np.concatenate([b_gate, b_up], axis=1), "b2": b2}
        names = ("w13", "w13_sf", "w2", "w2_sf")
        return jmm.ExpertWeights(*(expected[name] for name in names), **biases)
    return jmm.quantize_weights(*(expected[f"w_{role}"] for role in ("gate", "up", "down")))


class BlockCase:
    """A layer of one of `MODELS`, its file, and tokens whose experts no rounding can change."""

    def __init__(self, rng, name, layer, path, num_tokens=32):
        maker, self.family, _ = MODELS[name]
        self.model, self.layer, self.rng = maker(rng, calm=True), layer, rng
        self.path = files.write(self.model, path, num_shards=2)
        self.checkpoint = jmm.checkpoints.open(self.path)
        self.gate = self._find("gate.weight", "router.weight").astype(np.float64)
        self.table = self._find("gate.tid2eid")
        self.bias = self._find("gate.bias", "router.bias", "gate.e_score_correction_bias")
        self.latent = {
            role: self._find(f"routed_expert_{name}.weight").astype(np.float64)
            for role, name in (("down", "down_proj"), ("norm", "norm"), ("up", "up_proj"))
            if self.family == "kimi_k3"
        }
        self.token_ids = rng.integers(0, files.VOCAB, num_tokens)
        self.x = self._separated(num_tokens)
        self.shared = {
            role: matrix.astype(ml_dtypes.bfloat16).astype(np.float64)
            for role, matrix in self.model.shared.get(layer, {}).items()
        }
        self.config = jmm.MegaMoEConfig(
            num_experts=files.EXPERTS,
            top_k=files.TOP_K,
            hidden=files.HIDDEN,
            intermediate=files.INTER,
            max_tokens_per_rank=num_tokens,
            activation={"kimi_k3": jmm.situ(), "gpt_oss": jmm.gpt_oss_swiglu()}.get(
                self.family, jmm.swiglu(self.model.text_config.get("swiglu_limit"))
            ),
        )
        self.experts = rounded_experts(self.model.expected[layer])

    @property
    def _block(self):
        return {"deepseek_v4": "ffn", "kimi_k3": "block_sparse_moe"}.get(self.family, "mlp")

    def _find(self, *suffixes):
        names = [
            f"{start}.{self.layer}.{self._block}.{suffix}"
            for start in ("layers", "block")
            for suffix in suffixes
        ]
        found = [a for tensor, a in self.model.tensors.items() if tensor.endswith(tuple(names))]
        return found[0] if found else None

    def _separated(self, num_tokens):
        """Tokens with biased scores further apart than FP32 logits can be wrong.

        A sum of H products in FP32 is off by at most H EPS sum |x w|. Scores have slopes below 1,
        those that decide about groups are sums of two, and two of them are compared.
        """
        x = tokens(self.rng, 4 * num_tokens, self.gate.shape[1])
        wide = x.astype(np.float64)
        z = wide @ self.gate.T
        scores = z if self.family in ("qwen3_moe", "gpt_oss") else deepseek_scores(z, self.family)
        scores = scores + (0 if self.bias is None else self.bias.astype(np.float64))
        gaps = np.diff(np.sort(scores, axis=1), axis=1).min(axis=1)
        error = wide.shape[1] * EPS * (np.abs(wide) @ np.abs(self.gate).T).max(axis=1)
        x = x[gaps > 4 * error]
        assert len(x) >= num_tokens
        return x[:num_tokens]

    def routes64(self):
        """[(expert numbers, weights)] of the tokens, by the model's config.json."""
        text = self.model.text_config
        norm = "moe_renormalize" if self.family == "kimi_k3" else "norm_topk_prob"
        keywords = {"top_k": files.TOP_K, "norm": text.get(norm, True)}
        keywords |= {"scale": text.get("routed_scaling_factor", 1.0)}
        keywords |= {"groups": (text.get("n_group", 1), text.get("topk_group", 1))}
        bias = np.zeros(files.EXPERTS) if self.bias is None else self.bias.astype(np.float64)
        z = self.x.astype(np.float64) @ self.gate.T
        fixed = [None] * len(z) if self.table is None else self.table[self.token_ids]
        return [
            route64(self.family, row, bias, **keywords, fixed=f)
            for row, f in zip(z, fixed, strict=True)
        ]

    def shared64(self):
        """The shared expert in float64: numbers, not formats."""
        if not self.shared:
            return np.zeros(self.x.shape)
        x = self.x.astype(np.float64)
        y = activate64(x @ self.shared["gate"].T, x @ self.shared["up"].T, self.config.activation)
        return (y @ self.shared["down"].T) * self._token_gate(x)

    def _token_gate(self, x):
        gate = self.shared.get("token_gate")
        return 1.0 if gate is None else 1 / (1 + np.exp(-x @ gate.T))

    def shared_plain(self):
        """The shared expert in the block's formats: FP32 sums, BF16 between the products."""
        if not self.shared:
            return np.zeros(self.x.shape, np.float32)
        x = self.x.astype(np.float64)
        gate, up = ((x @ self.shared[name].T).astype(np.float32) for name in ("gate", "up"))
        acts = bf16(activate64(gate, up, self.config.activation)).astype(np.float64)
        return (acts @ self.shared["down"].T).astype(np.float32) * np.float32(self._token_gate(x))

    def into_latent(self):
        """What the experts get, in float64."""
        x = self.x.astype(np.float64)
        return x @ self.latent["down"].T if self.latent else x

    def out_of_latent(self, y, rounded):
        """Norm and up projection; `rounded`: to BF16 in between."""
        if not self.latent:
            return y
        eps = self.model.text_config["rms_norm_eps"]
        z = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + eps) * self.latent["norm"]
        return (bf16(z).astype(np.float64) if rounded else z) @ self.latent["up"].T

    @property
    def biases(self):
        return jmm.expert_biases(self.experts)

    def dense(self, topk_idx, topk_weights):
        weights = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(self.experts)]
        routing = np.asarray(topk_idx)[None], np.asarray(topk_weights)[None]
        rows = self.into_latent()[None]
        y = jmm.reference.dense_float64(rows, *routing, *weights, self.config, biases=self.biases)[
            0
        ]
        return self.out_of_latent(y, False) + self.shared64()

    def truth(self, topk_idx, topk_weights):
        weights = [np.asarray(w, np.float64) for w in jmm.dequantize_weights(self.experts)]
        rows = jnp.asarray(bf16(self.into_latent()))[None]
        codes, sf = jmm.quantize.quantize_e4m3(rows, self.config.x_group)
        routing = np.asarray(topk_idx)[None], np.asarray(topk_weights)[None]
        y = jmm.reference.staged_float64(
            codes, sf, *routing, *weights, self.config, biases=self.biases
        )[0]
        return self.out_of_latent(y, False) + self.shared64()

    def plain(self, topk_idx, topk_weights):
        routing = jnp.asarray(topk_idx)[None], jnp.asarray(topk_weights)[None]
        rows = jnp.asarray(bf16(self.into_latent()))[None]
        y = jmm.reference.mega_moe(rows, *routing, self.experts, self.config)[0]
        y = self.out_of_latent(np.asarray(y, np.float64), True).astype(np.float32)
        return bf16(y + self.shared_plain()).astype(np.float64)

    def check(self, y, topk_idx, topk_weights):
        truth = self.truth(topk_idx, topk_weights)
        plain = self.plain(topk_idx, topk_weights)
        error = np.linalg.norm(np.asarray(y, np.float64) - truth)
        assert 0 < error <= 2 * np.linalg.norm(plain - truth)


def bf16(array):
    return np.asarray(array).astype(ml_dtypes.bfloat16)


def activate64(gate, up, activation):
    limit = activation.limit
    if activation.kind == "situ":
        beta, linear_beta = activation.beta, activation.linear_beta
        gate = beta * np.tanh(gate / beta) / (1 + np.exp(-gate))
        return gate * (linear_beta * np.tanh(up / linear_beta))
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up
