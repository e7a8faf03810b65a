"""gpt-oss: one tensor holds all experts of a layer."""

from __future__ import annotations

import re
from typing import Any

from jax_megamoe import routers
from jax_megamoe.checkpoints.families.record import (
    MXFP4,
    TOP_K_KEYS,
    Family,
    entry,
)

__all__ = ["FAMILY"]


def _gpt_oss_swiglu(model: dict[str, Any]) -> dict[str, Any]:
    # alpha is a constant of the model's code, not of its config.json
    return {"kind": "gpt_oss_swiglu", "limit": entry(model, "swiglu_limit"), "alpha": 1.702}


def _gpt_oss_router(model: dict[str, Any]) -> routers.Router:
    return routers.gpt_oss(top_k=entry(model, *TOP_K_KEYS))


def _original(model: dict[str, Any]) -> bool:
    """The original release has no model_type."""
    return {"num_experts", "experts_per_token", "swiglu_limit"} <= set(model)


FAMILY = Family(
    "gpt_oss",
    ("gpt_oss",),
    re.compile(
        r"(?:(?:.+\.)?layers|block)\.(?P<layer>\d+)\.mlp\.(?:experts\.)?"
        r"(?P<projection>gate_up_proj|down_proj|mlp1|mlp2)(?:_weight)?"
        r"(?P<part>[_.]blocks|[_.]scales|_bias|)"
    ),
    re.compile(
        r"(?:(?:.+\.)?layers|block)\.(?P<layer>\d+)\.mlp\.(?:router|gate)"
        r"\.(?P<part>weight|bias)"
    ),
    None,
    projections={
        "gate_up_proj": "gate_up",
        "mlp1": "gate_up",
        "down_proj": "down",
        "mlp2": "down",
    },
    formats=(MXFP4,),
    parts={
        "": "values",
        "_blocks": "values",
        ".blocks": "values",
        "_scales": "scales",
        ".scales": "scales",
        "_bias": "bias",
    },
    activation=_gpt_oss_swiglu,
    make_router=_gpt_oss_router,
    intermediate="intermediate_size",
    untyped=_original,
)
