"""DeepSeek-V4, V4.1, Flash and Pro."""

from __future__ import annotations

from typing import Any

from jax_megamoe import routers
from jax_megamoe.checkpoints.families.record import (
    FP8,
    MXFP4,
    TOP_K_KEYS,
    W123,
    Family,
    block_names,
    entry,
    stated,
)

__all__ = ["FAMILY"]


def _clamped_silu(model: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "swiglu", "limit": entry(model, "swiglu_limit")}


def _deepseek_v4_router(model: dict[str, Any]) -> routers.Router:
    stated(model, "scoring_func", "sqrtsoftplus")
    stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v4(
        top_k=entry(model, *TOP_K_KEYS),
        norm_topk_prob=entry(model, "norm_topk_prob"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


FAMILY = Family(
    "deepseek_v4",
    ("deepseek_v4", "deepseek_v41"),
    *block_names("ffn", "w[123]", "weight|bias|tid2eid"),
    projections=W123,
    formats=(MXFP4, FP8),
    activation=_clamped_silu,
    make_router=_deepseek_v4_router,
)
