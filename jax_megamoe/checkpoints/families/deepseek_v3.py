"""DeepSeek-V3, V3.1, V3.2, R1 and Kimi-K2."""

from __future__ import annotations

from typing import Any

from jax_megamoe import routers
from jax_megamoe.checkpoints.families.record import (
    FP8,
    PROJ,
    TOP_K_KEYS,
    UNQUANTISED,
    Family,
    block_names,
    entry,
    silu,
    stated,
)

__all__ = ["FAMILY"]


def _deepseek_v3_router(model: dict[str, Any]) -> routers.Router:
    stated(model, "scoring_func", "sigmoid")
    stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v3(
        top_k=entry(model, *TOP_K_KEYS),
        n_group=entry(model, "n_group"),
        topk_group=entry(model, "topk_group"),
        norm_topk_prob=entry(model, "norm_topk_prob"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


FAMILY = Family(
    "deepseek_v3",
    ("deepseek_v3", "deepseek_v32", "kimi_k2"),
    *block_names("mlp", "gate_proj|up_proj|down_proj", "weight|e_score_correction_bias"),
    projections=PROJ,
    formats=(FP8, UNQUANTISED),
    activation=silu,
    make_router=_deepseek_v3_router,
)
