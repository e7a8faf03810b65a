"""Kimi-K3, whose experts work on a latent."""

from __future__ import annotations

import re
from typing import Any

from jax_megamoe import routers
from jax_megamoe.checkpoints.families.record import (
    MXFP4,
    TOP_K_KEYS,
    W123,
    Family,
    block_names,
    entry,
    stated,
)

__all__ = ["FAMILY"]


def _situ(model: dict[str, Any]) -> dict[str, Any]:
    act = model.get("hidden_act", "situ")
    if act != "situ":
        return {"kind": act}
    return {
        "kind": "situ",
        "beta": entry(model, "activation_situ_beta"),
        "linear_beta": entry(model, "activation_situ_linear_beta"),
    }


def _kimi_k3_router(model: dict[str, Any]) -> routers.Router:
    stated(model, "moe_router_activation_func", "sigmoid")
    stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v3(
        top_k=entry(model, *TOP_K_KEYS),
        n_group=entry(model, "num_expert_group"),
        topk_group=entry(model, "topk_group"),
        norm_topk_prob=entry(model, "moe_renormalize"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


def _block_options(model: dict[str, Any]) -> dict[str, Any]:
    return {"norm_eps": entry(model, "rms_norm_eps")}


FAMILY = Family(
    "kimi_k3",
    ("kimi_k3",),
    *block_names("block_sparse_moe", "w[123]", "weight|e_score_correction_bias"),
    projections=W123,
    formats=(MXFP4,),
    activation=_situ,
    make_router=_kimi_k3_router,
    hidden=("routed_expert_hidden_size", "hidden_size"),
    latent=re.compile(
        r"(?:.+\.)?layers\.(?P<layer>\d+)\.block_sparse_moe\."
        r"routed_expert_(?P<role>down|norm|up)(?:_proj)?\.weight"
    ),
    block_options=_block_options,
)
