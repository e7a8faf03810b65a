"""Qwen3-MoE and Qwen2-MoE."""

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
)

__all__ = ["FAMILY"]


def _qwen3_moe_router(model: dict[str, Any]) -> routers.Router:
    # Entries that have the default of transformers' class may be left out, and it is False there.
    norm_topk_prob = model.get("norm_topk_prob", False)
    return routers.qwen3_moe(top_k=entry(model, *TOP_K_KEYS), norm_topk_prob=norm_topk_prob)


FAMILY = Family(
    "qwen3_moe",
    ("qwen3_moe", "qwen2_moe"),
    *block_names("mlp", "gate_proj|up_proj|down_proj", "weight"),
    projections=PROJ,
    formats=(FP8, UNQUANTISED),
    activation=silu,
    make_router=_qwen3_moe_router,
)
