"""Routers of MoE models: from hidden states or logits to `topk_idx` and `topk_weights`.

A `Router` holds what a model's config.json says. One function per family makes it, and its
docstring has the family's formula:

    router = jax_megamoe.routers.deepseek_v3()
    topk_idx, topk_weights = router(x, w_gate, bias)

Routers are plain JAX: they can be jitted, differentiated, and called inside `shard_map`. Everything
after reading x and w_gate is FP32. Experts with equal scores are chosen by lowest number, and so
are groups. docs/routers.md has the formulas side by side, and what other implementations round.

Below, z are the logits [..., E] of tokens for E experts, K is top_k, topk picks by size, largest
first, and w are the routing weights of the experts idx.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe.errors import (
    Array,
    as_array,
    check,
    check_array,
    check_bool,
    check_positive_int,
    describe,
    is_array,
    narrow_ids,
    to_float,
)
from jax_megamoe.operands import Operand

__all__ = [
    "BIAS_ROLES",
    "NORM_EPS",
    "SCALING_FACTORS",
    "SCORES",
    "Router",
    "deepseek_v3",
    "deepseek_v4",
    "expert_load",
    "gate_logits",
    "gpt_oss",
    "kimi_k2",
    "kimi_k3",
    "linear",
    "qwen3_moe",
    "update_bias",
]

#: What `Router.scores` may be.
SCORES = ("sigmoid", "sqrtsoftplus", "softmax", "logits")
#: What `Router.bias_role` may be.
BIAS_ROLES = ("selection", "logits", None)
#: Added to a sum of scores before dividing by it, so that scores which are all 0 give weights 0.
NORM_EPS = 1e-20
#: Below this logit sqrt(softplus(z)) is exp(z / 2): the relative difference is under exp(z) / 4.
_SOFTPLUS_TAIL = -20.0

#: Bounds of `Router.routed_scaling_factor`, which is an FP32 number: weights times it are, too.
SCALING_FACTORS = (1e-30, 1e30)

_FLOATS = ("float32", "bfloat16", "float16")
_INTS = ("int32", "int64")


@dataclasses.dataclass(frozen=True)
class Router:
    """A router: static numbers here, arrays as operands of the call. Hashable, so jit caches it.

    Attributes (the names are those of config.json where a model has them there):
      top_k: K, experts per token (`num_experts_per_tok`).
      scores: how logits become scores: "sigmoid", "sqrtsoftplus", "softmax" over all experts, or
        "logits": unchanged, and the weights are a softmax over the chosen ones.
      bias_role: what the operand `bias` is. "selection": added to the scores to choose experts, and
        no part of the weights. "logits": added to the logits. None: the router has no bias.
      n_group, topk_group: with n_group > 1, experts are cut into that many groups of consecutive
        numbers, and only the best topk_group groups of a token can be chosen from. A group is as
        good as the sum of its two largest biased scores.
      norm_topk_prob: whether the scores of the chosen experts are divided by their sum.
      routed_scaling_factor: factor of the weights, after that.

    Raises:
      MegaMoEError: values that are out of range or do not belong together.
    """

    top_k: int
    scores: str
    bias_role: str | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self):
        for name in ("top_k", "n_group", "topk_group"):
            number = check_positive_int(getattr(self, name), name, "a router")
            object.__setattr__(self, name, number)
        remedy = "it says whether the chosen scores are divided by their sum"
        norm = check_bool(self.norm_topk_prob, "norm_topk_prob", remedy)
        object.__setattr__(self, "norm_topk_prob", norm)
        check(
            self.scores in SCORES,
            "scores",
            got=repr(self.scores),
            want=f"one of {SCORES}",
            remedy="the functions of jax_megamoe.routers make the routers of known models",
        )
        check(
            self.bias_role in BIAS_ROLES,
            "bias_role",
            got=repr(self.bias_role),
            want=f"one of {BIAS_ROLES}",
            remedy="say whether a bias is for the selection only or part of the logits",
        )
        check(
            self.topk_group <= self.n_group,
            "topk_group",
            got=self.topk_group,
            want=f"at most n_group = {self.n_group}",
            remedy="pass n_group=1, topk_group=1 for a router without groups",
        )
        check(
            self.n_group == 1 or self.scores != "logits",
            "n_group",
            got=f"{self.n_group} with scores='logits'",
            want="1",
            remedy="groups are ranked by sums of scores, which logits are not",
        )
        check(
            self.norm_topk_prob or self.scores != "logits",
            "norm_topk_prob",
            got=f"{self.norm_topk_prob} with scores='logits'",
            want="True",
            remedy="a softmax over the chosen experts is normalised; use scores='softmax' for one "
            "over all of them",
        )
        factor, (low, high) = to_float(self.routed_scaling_factor), SCALING_FACTORS
        check(
            factor is not None and (factor == 0 or low <= abs(factor) <= high),
            "routed_scaling_factor",
            got=repr(self.routed_scaling_factor),
            want=f"0 or a finite number, in magnitude from {low:g} to {high:g}",
            remedy="pass 1.0 for a router without it",
        )
        object.__setattr__(self, "routed_scaling_factor", factor)

    def __call__(
        self,
        x: Operand,
        w_gate: Operand,
        bias: Operand | None = None,
        *,
        tid2eid: Operand | None = None,
        token_ids: Operand | None = None,
        mask: Operand | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Routes the tokens x.

        Args:
          x: [..., H] float32, bfloat16 or float16, the input of the MoE block.
          w_gate: [E, H], same dtypes; row e belongs to expert e, as in checkpoints.
          bias, tid2eid, token_ids, mask: see `from_logits`.

        Returns:
          topk_idx [..., K] int32 and topk_weights [..., K] float32, as `MegaMoE` takes them.
          Gradients with respect to x and w_gate pass through topk_weights.

        Raises:
          MegaMoEError: shapes or dtypes that do not fit, a missing or a superfluous operand.
        """
        tokens, gate, mask = map(as_array, (x, w_gate, mask))
        check_array(tokens, "x", ("...", "H"), _FLOATS, "the last axis has the channels of a token")
        _check_mask(mask, tokens.shape[:-1])
        if mask is not None:
            # Logits of padding are cleared below, but 0 * NaN would reach the gradient of w_gate.
            tokens = jnp.where(jnp.asarray(mask)[..., None], tokens, 0)
        check(
            bias is not None or self.bias_role != "logits",
            "bias",
            got="None",
            want="[E], part of the logits",
            remedy="pass the bias of the router's linear layer; from_logits takes logits that "
            "have it already",
        )
        return self.from_logits(
            gate_logits(tokens, gate), bias, tid2eid=tid2eid, token_ids=token_ids, mask=mask
        )

    def from_logits(
        self,
        logits: Operand,
        bias: Operand | None = None,
        *,
        tid2eid: Operand | None = None,
        token_ids: Operand | None = None,
        mask: Operand | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Routes tokens whose logits x @ w_gate.T are known.

        Args:
          logits: [..., E] float32, bfloat16 or float16.
          bias: [E], same dtypes. For `bias_role` "selection" it is required, unless experts are
            looked up; pass zeros if the model has none. For "logits" it is added; None if the
            logits have it already.
          tid2eid: [vocab, K] int32 or int64, expert numbers of each token id, instead of choosing
            by score: hash layers of DeepSeek-V4. Takes the place of `bias`, needs `token_ids`, and
            groups are not looked at. -1 is a slot not routed, an expert named twice counts twice.
          token_ids: [...] int32 or int64. A token whose id is outside [0, vocab) gets expert number
            E, which a layer counts as out of range or, if `checked`, refuses.
          mask: [...] bool, False for padding: its slots are -1, with weight 0, and whatever x or
            logits hold there, NaN included, reaches neither results nor gradients.

        Returns, Raises: see `__call__`.
        """
        given, bias, mask = map(as_array, (logits, bias, mask))
        tid2eid, token_ids = map(as_array, (tid2eid, token_ids))
        remedy = "the last axis has one logit per expert"
        check_array(given, "logits", ("...", "E"), _FLOATS, remedy)
        *leading, num_experts = given.shape
        check(
            self.top_k <= num_experts,
            "top_k",
            got=self.top_k,
            want=f"at most the {num_experts} experts that there are logits for",
            remedy="w_gate is [experts, hidden], logits are [tokens, experts]",
        )
        self._check_groups(num_experts)
        _check_mask(mask, tuple(leading))
        hashed = tid2eid is not None or token_ids is not None
        if hashed:
            self._check_table(tid2eid, token_ids, bias, tuple(leading))
        else:
            self._check_bias(bias, num_experts)

        z = _unsharded_experts(jnp.asarray(given).astype(jnp.float32))
        if mask is not None:
            mask = jnp.asarray(mask)[..., None]
            z = jnp.where(mask, z, 0.0)
        if bias is not None:
            bias = _unsharded_experts(jnp.asarray(bias).astype(jnp.float32))
        if bias is not None and self.bias_role == "logits":
            z, bias = z + bias, None
        scores = _scores(self.scores, z)
        if hashed:
            table, ids = (jnp.asarray(narrow_ids(a)) for a in (tid2eid, token_ids))
            idx = _look_up(table, ids, num_experts)
        else:
            idx = self._choose(scores if bias is None else scores + bias)
        known = (idx >= 0) & (idx < num_experts)
        chosen = jnp.take_along_axis(scores, jnp.where(known, idx, 0), axis=-1)
        if self.scores == "logits":
            weights = jax.nn.softmax(chosen, axis=-1)
        else:
            weights = jnp.where(known, chosen, 0.0)
            if self.norm_topk_prob:
                total = jnp.sum(weights, axis=-1, keepdims=True)
                weights = _divide(weights, total + NORM_EPS)
        weights = weights * jnp.float32(self.routed_scaling_factor)
        if mask is not None:
            idx, weights = jnp.where(mask, idx, -1), jnp.where(mask, weights, 0.0)
        return idx, weights

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Biased scores [..., E] -> numbers of the K best experts [..., K] int32, best first."""
        *leading, num_experts = scores.shape
        scores = jax.lax.stop_gradient(scores)
        scores = jnp.where(scores == 0, 0.0, scores)  # top_k puts 0.0 before -0.0
        if self.n_group > 1:
            grouped = scores.reshape(*leading, self.n_group, num_experts // self.n_group)
            best_two, _ = jax.lax.top_k(grouped, 2)
            _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), self.topk_group)
            numbers = jnp.arange(self.n_group, dtype=groups.dtype)
            kept = jnp.any(groups[..., None] == numbers, axis=-2)  # [..., n_group]
            scores = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.top_k)[1].astype(jnp.int32)

    def _check_groups(self, num_experts: int) -> None:
        if self.n_group == 1:
            return
        size = num_experts // self.n_group
        check(
            num_experts % self.n_group == 0 and size >= 2,
            "n_group",
            got=f"{self.n_group} groups of {num_experts} experts",
            want="groups of one size, with at least 2 experts each",
            remedy="n_group is the number of groups, not the number of experts in one",
        )
        check(
            self.topk_group * size >= self.top_k,
            "topk_group",
            got=f"{self.topk_group} groups of {size} experts",
            want=f"at least top_k = {self.top_k} experts to choose from",
            remedy="raise topk_group, or lower top_k",
        )

    def _check_bias(self, bias: object, num_experts: int) -> None:
        if self.bias_role is None:
            check(
                bias is None,
                "bias",
                got="an array",
                want="None: this router has no bias",
                remedy="construct a Router with bias_role='selection' or 'logits' to use one",
            )
        elif bias is None:
            check(
                self.bias_role == "logits",
                "bias",
                got="None",
                want=f"[{num_experts}], for the selection of experts",
                remedy="pass gate.e_score_correction_bias or gate.bias of the checkpoint, or zeros",
            )
        else:
            check_array(bias, "bias", (num_experts,), _FLOATS, "one number per expert")

    def _check_table(
        self, tid2eid: object, token_ids: object, bias: object, leading: tuple[int, ...]
    ) -> None:
        check(
            tid2eid is not None and token_ids is not None,
            "tid2eid and token_ids",
            got="one of them",
            want="both, or neither",
            remedy="a hash layer looks each token's id up in its own tid2eid",
        )
        check(
            self.bias_role == "selection",
            "tid2eid",
            got=f"a table for a router with bias_role={self.bias_role!r}",
            want="a router that chooses by biased scores otherwise",
            remedy="only DeepSeek-V4 has hash layers: use jax_megamoe.routers.deepseek_v4",
        )
        check(
            bias is None,
            "bias",
            got="an array besides tid2eid",
            want="None: a hash layer has no bias",
            remedy="layers below num_hash_layers have a table, the others a bias",
        )
        check_array(tid2eid, "tid2eid", ("vocab", self.top_k), _INTS, "top_k columns of numbers")
        check_array(token_ids, "token_ids", leading, _INTS, "one id for each token of x")


# Families ----------------------------------------------------------------------------------------


def deepseek_v3(
    *,
    top_k: int = 8,
    n_group: int = 8,
    topk_group: int = 4,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 2.5,
) -> Router:
    """DeepSeek-V3, R1 and V3.1, whose values are the defaults.

        s = sigmoid(z)
        c = s + bias
        a group's score is the sum of its 2 largest c; c = -inf outside the topk_group best groups
        idx = topk(c)
        w = routed_scaling_factor * s[idx] / (sum_k s[idx_k] + 1e-20)

    Operands: w_gate is `mlp.gate.weight`, bias is `mlp.gate.e_score_correction_bias`.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.1.2; deepseek-ai/DeepSeek-V3,
    inference/model.py, class Gate (-inf outside the chosen groups); 1e-20 is that of transformers,
    models/deepseek_v3.
    """
    return Router(
        top_k, "sigmoid", "selection", n_group, topk_group, norm_topk_prob, routed_scaling_factor
    )


def kimi_k2(
    *, top_k: int = 8, norm_topk_prob: bool = True, routed_scaling_factor: float = 2.827
) -> Router:
    """Kimi-K2, K2-Thinking and the later K2.x: DeepSeek-V3's router without groups.

        s = sigmoid(z)
        idx = topk(s + bias)
        w = routed_scaling_factor * s[idx] / (sum_k s[idx_k] + 1e-20)

    Operands: w_gate is `mlp.gate.weight`, bias is `mlp.gate.e_score_correction_bias`.

    Source: Kimi-K2's config.json (`scoring_func` sigmoid, `topk_method` noaux_tc, `n_group` 1) and
    the modeling_deepseek.py beside it.
    """
    return Router(
        top_k,
        "sigmoid",
        "selection",
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )


def kimi_k3(
    *, top_k: int = 16, norm_topk_prob: bool = True, routed_scaling_factor: float = 1.0
) -> Router:
    """Kimi-K3: the formula of `kimi_k2` with K = 16 and no scaling.

        s = sigmoid(z)
        idx = topk(s + bias)
        w = routed_scaling_factor * s[idx] / (sum_k s[idx_k] + 1e-20)

    x is the block's input, 7168 wide, and not the latent that the experts get. Operands: w_gate is
    `block_sparse_moe.gate.weight`, bias is `block_sparse_moe.gate.e_score_correction_bias`. In
    config.json `norm_topk_prob` is called `moe_renormalize`.

    Source: Kimi-K3's config.json (`moe_router_activation_func` sigmoid, `num_expert_group` 1) and
    vLLM, models/kimi_k3.
    """
    return kimi_k2(
        top_k=top_k, norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor
    )


def deepseek_v4(
    *, routed_scaling_factor: float, top_k: int = 6, norm_topk_prob: bool = True
) -> Router:
    """DeepSeek-V4. `routed_scaling_factor` is 1.5 in Flash and V4.1-Flash, 2.5 in Pro.

        s = sqrt(softplus(z)), softplus(z) = log(1 + exp(z))
        idx = topk(s + bias), or tid2eid[token_id] in the first num_hash_layers layers
        w = routed_scaling_factor * s[idx] / (sum_k s[idx_k] + 1e-20)

    One router serves both kinds of layers:

        router(x, w_gate, bias)                                       # gate.bias
        router(x, w_gate, tid2eid=tid2eid, token_ids=token_ids)       # gate.tid2eid

    In hash layers too the weights come from w_gate, which therefore has gradients there as well.
    Operands: `ffn.gate.weight`, and `ffn.gate.bias` or `ffn.gate.tid2eid`.

    Source: DeepSeek-V4's inference/model.py, class Gate, which has no 1e-20; transformers,
    models/deepseek_v4, classes DeepseekV4TopKRouter and DeepseekV4HashRouter, which have it.
    """
    return Router(
        top_k,
        "sqrtsoftplus",
        "selection",
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )


def gpt_oss(*, top_k: int = 4) -> Router:
    """gpt-oss-20b and gpt-oss-120b.

        z = x @ w_gate.T + bias
        idx = topk(z)
        w = softmax(z[idx]) over the K chosen

    Operands: w_gate is `mlp.router.weight`, bias is `mlp.router.bias`; in the original release
    `mlp.gate.weight` and `mlp.gate.bias`.

    Source: openai/gpt-oss, gpt_oss/torch/model.py, class MLPBlock; transformers, models/gpt_oss,
    class GptOssTopKRouter. Both compute z and the softmax in BF16.
    """
    return Router(top_k, "logits", "logits")


def qwen3_moe(*, top_k: int = 8, norm_topk_prob: bool = True) -> Router:
    """Qwen3-MoE. `norm_topk_prob` is in the model's config.json: look there.

        p = softmax(z) over all E experts
        idx = topk(p)
        w = p[idx] / sum_k p[idx_k] if norm_topk_prob, else p[idx]

    Operand: w_gate is `mlp.gate.weight`; there is no bias.

    Source: transformers, models/qwen3_moe, classes Qwen3MoeSparseMoeBlock and (later)
    Qwen3MoeTopKRouter, whose configuration class has norm_topk_prob False as its default.
    """
    return Router(top_k, "softmax", None, norm_topk_prob=norm_topk_prob)


# Load balancing ----------------------------------------------------------------------------------


def expert_load(topk_idx: Array, num_experts: int) -> jax.Array:
    """Slots per expert, [E] int32; slots that are -1 or out of range do not count.

    topk_idx is [..., K] int32 or int64. Within `shard_map` these are the slots of this shard: sum
    them with `jax.lax.psum`. `MoEStats.tokens_per_expert` has the same numbers after a call.
    """
    check_array(topk_idx, "topk_idx", ("...", "K"), _INTS, "pass what a router returned")
    if isinstance(num_experts, np.integer):
        num_experts = int(num_experts)
    check_positive_int(num_experts, "num_experts", "expert_load")
    topk_idx = narrow_ids(topk_idx)
    experts = jnp.arange(num_experts, dtype=topk_idx.dtype)
    axes = tuple(range(topk_idx.ndim))
    return jnp.sum(topk_idx[..., None] == experts, axis=axes, dtype=jnp.int32)


def update_bias(bias: Array, load: Array, rate: float | Array = 0.001) -> jax.Array:
    """One step of balancing without an auxiliary loss: bias + rate * sign(mean(load) - load).

    The selection bias of DeepSeek-V3 has no gradient. It is trained by this rule after each step:
    experts with more than the average load become less likely, the others more.

    Args:
      bias: [E] float32.
      load: [E], slots per expert of the whole batch, see `expert_load`.
      rate: DeepSeek-V3 used 0.001, and 0 in the last part of its pre-training.

    Source: arXiv 2412.19437, section 2.1.2, and arXiv 2408.15664, algorithm 1.
    """
    check_array(bias, "bias", ("E",), ("float32",), "a step of 0.001 is lost in smaller formats")
    check_array(load, "load", bias.shape, (*_INTS, "float32"), "pass expert_load(topk_idx, E)")
    check(
        (isinstance(rate, (int, float)) and not isinstance(rate, bool))
        or (is_array(rate) and jnp.size(rate) == 1),
        "rate",
        got=describe(rate),
        want="a number",
        remedy="DeepSeek-V3 used 0.001",
    )
    load = load.astype(jnp.float32)
    return jnp.asarray(bias) + rate * jnp.sign(jnp.mean(load) - load)


# Parts -------------------------------------------------------------------------------------------


def gate_logits(x: Array, w_gate: Array) -> jax.Array:
    """x [..., H] @ w_gate [E, H] transposed, summed in FP32: [..., E] float32.

    If both are bfloat16, or both float16, their products are exact in FP32 and the product stays
    one of that format with FP32 sums, which tensor cores do. Otherwise both are widened first.
    """
    check_array(x, "x", ("...", "H"), _FLOATS, "the last axis has the channels of a token")
    check_array(
        w_gate, "w_gate", ("E", x.shape[-1]), _FLOATS, "one row per expert; transpose [H, E] first"
    )
    return linear(x, w_gate)


def linear(x: Array, w: Array) -> jax.Array:
    """x [..., K] @ w [N, K] transposed, as precise as `gate_logits`: [..., N] float32."""
    x, w = jnp.asarray(x), jnp.asarray(w)
    # With Explicit axes a product of sharded operands has to be told its result's sharding.
    spec = _explicit_spec(x) or (_explicit_spec(w) and P(*(None,) * x.ndim))
    mesh = jax.typeof(x if _explicit_spec(x) else w).sharding.mesh
    out = NamedSharding(mesh, P(*spec[:-1], None)) if spec else None
    if x.dtype == w.dtype and x.dtype != jnp.float32:
        return jnp.einsum(
            "...k,nk->...n", x, w, preferred_element_type=jnp.float32, out_sharding=out
        )
    # On GPUs the default precision of float32 is TF32, which would tip close decisions.
    return jnp.einsum(
        "...k,nk->...n",
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        out_sharding=out,
    )


def _explicit_spec(array: jax.Array) -> P | None:
    """How an array is sharded over Explicit mesh axes; None if it is not."""
    spec = jax.typeof(array).sharding.spec
    return P(*spec, *(None,) * (array.ndim - len(spec))) if any(spec) else None


def _unsharded_experts(array: jax.Array) -> jax.Array:
    """[..., E], with all experts on each device if Explicit axes spread them: scores are compared.

    With Auto axes the compiler sees to it.
    """
    spec = _explicit_spec(array)
    if spec is None or spec[-1] is None:
        return array
    mesh = jax.typeof(array).sharding.mesh
    return jax.sharding.reshard(array, NamedSharding(mesh, P(*spec[:-1], None)))


def _check_mask(mask: object, leading: tuple[int, ...]) -> None:
    if mask is not None:
        remedy = "one for each token: True for tokens, False for padding"
        check_array(mask, "mask", leading, ("bool",), remedy, cast=remedy)


def _scores(kind: str, z: jax.Array) -> jax.Array:
    if kind == "sigmoid":
        return jax.nn.sigmoid(z)
    if kind == "softmax":
        return jax.nn.softmax(z, axis=-1)
    if kind == "sqrtsoftplus":
        # Far out softplus underflows, and the square root's slope there is infinite.
        tail = z < _SOFTPLUS_TAIL
        body = jnp.sqrt(jax.nn.softplus(jnp.where(tail, 0.0, z)))
        return jnp.where(tail, jnp.exp(0.5 * jnp.where(tail, z, 0.0)), body)
    return z


@jax.custom_jvp
def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b. JAX's own derivative divides by b * b, which underflows for b = NORM_EPS."""
    return a / b


@_divide.defjvp
def _divide_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    quotient = a / b
    return quotient, da / b - quotient * (db / b)


def _look_up(tid2eid: jax.Array, token_ids: jax.Array, num_experts: int) -> jax.Array:
    """Rows of tid2eid as int32; num_experts, which is out of range, for ids outside the table."""
    vocab = tid2eid.shape[0]
    ids = jnp.where(token_ids < 0, vocab, token_ids)  # negative ids would count from the end
    sharding = jax.typeof(ids).sharding  # with Explicit axes the gather has to be told its result's
    spec = P(*sharding.spec, None) if any(sharding.spec) else None
    rows = tid2eid.at[ids].get(
        mode="fill",
        fill_value=num_experts,
        out_sharding=spec and NamedSharding(sharding.mesh, spec),
    )
    limits = jnp.iinfo(jnp.int32)
    return jnp.clip(rows, limits.min, limits.max).astype(jnp.int32)
