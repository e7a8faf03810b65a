"""Blocks against the classes of the `transformers` library, in float64 on the CPU.

Three steps, each with a rule of its own, from the class to the block:

1. The class routes as the block's router does: the same experts, weights within FP32 rounding.
2. With the class's own routing, the class and `block_case`'s dense computation are the same
   function: they differ by the rounding of float64.
3. What is left between that and the block is the rounding of activations to FP8, which
   `BlockCase.truth` has, and at most twice what FP32 and BF16 cost the plain computation.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint_files as files
import jax_megamoe as jmm
from block_case import CASES, BlockCase
from jax_megamoe import blocks
from moe_case import mesh_of
from router_oracle import EPS

REASON = "an independent implementation: needs pip install 'jax-megamoe[test-models]'"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", minversion="5.24", reason=REASON)

TOKENS = 16
#: There is no class of Kimi-K3.
WITH_CLASS = [(name, layer) for name, layer in CASES if name != "Kimi-K3"]


def wide(array):
    return torch.from_numpy(np.array(array, np.float64))


def make_class(case):
    """The class's block with a case's weights, in float64."""
    text = case.model.text_config
    sizes = {
        "hidden_size": files.HIDDEN,
        "moe_intermediate_size": files.INTER,
        "num_experts_per_tok": files.TOP_K,
        "vocab_size": files.VOCAB,
        "num_hidden_layers": 2,
    }
    from transformers.models import deepseek_v3, deepseek_v4, gpt_oss, qwen2_moe, qwen3_moe

    if case.family == "gpt_oss":
        config = gpt_oss.GptOssConfig(
            hidden_size=files.HIDDEN,
            intermediate_size=files.INTER,
            num_local_experts=files.EXPERTS,
            num_experts_per_tok=files.TOP_K,
            swiglu_limit=text["swiglu_limit"],
        )
        return with_weights(gpt_oss.modeling_gpt_oss.GptOssMLP(config), gpt_oss_state(case))
    if case.family == "deepseek_v4":
        config = deepseek_v4.DeepseekV4Config(
            **sizes,
            n_routed_experts=files.EXPERTS,
            n_shared_experts=1,
            routed_scaling_factor=text["routed_scaling_factor"],
            swiglu_limit=text["swiglu_limit"],
            mlp_layer_types=["hash_moe", "moe"],
        )
        module = deepseek_v4.modeling_deepseek_v4.DeepseekV4SparseMoeBlock(config, case.layer)
    elif text["model_type"] in ("deepseek_v3", "kimi_k2"):
        config = deepseek_v3.DeepseekV3Config(
            **sizes,
            n_routed_experts=files.EXPERTS,
            n_shared_experts=text["n_shared_experts"],
            n_group=text["n_group"],
            topk_group=text["topk_group"],
            routed_scaling_factor=text["routed_scaling_factor"],
        )
        module = deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config)
    elif text["model_type"] == "qwen3_moe":
        config = qwen3_moe.Qwen3MoeConfig(
            **sizes, num_experts=files.EXPERTS, norm_topk_prob=text["norm_topk_prob"]
        )
        module = qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    else:
        config = qwen2_moe.Qwen2MoeConfig(
            **sizes,
            num_experts=files.EXPERTS,
            norm_topk_prob=text["norm_topk_prob"],
            shared_expert_intermediate_size=text["shared_expert_intermediate_size"],
        )
        module = qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    w_gate, w_up, w_down = (np.asarray(w) for w in jmm.dequantize_weights(case.experts))
    state = {
        "gate.weight": wide(case.gate),
        "experts.gate_up_proj": wide(np.concatenate([w_gate, w_up], axis=1)),
        "experts.down_proj": wide(w_down),
    }
    if case.bias is not None:
        state["gate.e_score_correction_bias"] = wide(case.bias)
    if case.table is not None:
        state["gate.tid2eid"] = torch.from_numpy(case.table)
    shared = "shared_expert" if "token_gate" in case.shared else "shared_experts"
    for role, matrix in case.shared.items():
        name = "shared_expert_gate" if role == "token_gate" else f"{shared}.{role}_proj"
        state[f"{name}.weight"] = wide(matrix)
    return with_weights(module, state)


def gpt_oss_state(case):
    """Matrices there are transposed, and gate and up channels alternate."""
    w_gate, w_up, w_down = (np.asarray(w) for w in jmm.dequantize_weights(case.experts))
    b_gate, b_up, b_down = (np.asarray(b) for b in case.biases)
    gate_up = np.stack([w_gate, w_up], axis=2).reshape(files.EXPERTS, -1, files.HIDDEN)
    return {
        "router.weight": wide(case.gate),
        "router.bias": wide(case.bias),
        "experts.gate_up_proj": wide(gate_up.swapaxes(1, 2)),
        "experts.gate_up_proj_bias": wide(
            np.stack([b_gate, b_up], axis=2).reshape(files.EXPERTS, -1)
        ),
        "experts.down_proj": wide(w_down.swapaxes(1, 2)),
        "experts.down_proj_bias": wide(b_down),
    }


def with_weights(module, state):
    module = module.double()
    module.load_state_dict(state, strict=True)
    return module.eval()


@pytest.fixture(scope="module", params=WITH_CLASS, ids=lambda case: f"{case[0]}-{case[1]}")
def both(request, tmp_path_factory):
    name, layer = request.param
    rng = np.random.default_rng([*name.encode(), layer, 7])
    case = BlockCase(rng, name, layer, tmp_path_factory.mktemp("model"), TOKENS)
    module = make_class(case)
    x = wide(case.x.astype(np.float64))[None]
    ids = (torch.from_numpy(case.token_ids)[None],) if case.table is not None else ()
    with torch.no_grad():
        router = module.router if case.family == "gpt_oss" else module.gate
        _, weights, idx = router(x[0], *ids)
        y = module(x, *ids)
        y = y[0] if isinstance(y, tuple) else y
    return case, y[0].numpy(), idx.numpy(), weights.numpy()


def slots(idx, weights):
    """Sorted by expert, then weight: the order of slots is not the same everywhere."""
    order = np.lexsort((weights, idx), axis=1)
    return np.take_along_axis(idx, order, 1), np.take_along_axis(weights, order, 1)


def test_the_class_routes_alike(both):
    case, _, idx, weights = both
    router = case.checkpoint.make_router()
    hashed = {}
    if case.table is not None:
        hashed = {"tid2eid": case.table, "token_ids": jnp.asarray(case.token_ids, jnp.int32)}
    gate = jnp.asarray(case.gate, jnp.bfloat16)
    ours = router(jnp.asarray(case.x), gate, None if hashed else case.bias, **hashed)
    (got_idx, got), (want_idx, want) = slots(*map(np.asarray, ours)), slots(idx, weights)
    np.testing.assert_array_equal(got_idx, want_idx)
    np.testing.assert_allclose(got, want, rtol=64 * files.HIDDEN * EPS)


def test_the_class_is_the_same_function(both):
    case, y, idx, weights = both
    dense = case.dense(idx, weights)
    # Products sum H, I and 2 I terms of about the size of their sum, one rounding each.
    bound = (files.HIDDEN + 3 * files.INTER) * np.finfo(np.float64).eps
    assert jmm.reference.relative_error(y, dense) <= bound


def test_the_block_differs_by_its_roundings(both):
    case, y_class, idx, weights = both
    with blocks.MoEBlock.of(case.checkpoint, mesh_of(2), max_tokens_per_rank=TOKENS) as block:
        loaded = blocks.load(case.checkpoint, case.layer, requantize=True)
        y = np.asarray(block(case.x, block.shard(loaded), token_ids=case.token_ids), np.float64)
    truth = case.truth(idx, weights.astype(np.float32))
    plain = case.plain(idx, weights.astype(np.float32))
    fp8 = np.linalg.norm(truth - y_class)
    allowed = fp8 + 2 * np.linalg.norm(plain - truth)
    assert np.linalg.norm(y - y_class) <= allowed
    # and not by much less, as if nothing had been rounded
    assert np.linalg.norm(y - y_class) >= fp8 - 2 * np.linalg.norm(plain - truth) > 0
