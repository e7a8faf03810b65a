"""One file for each family; its record says all that is particular to the family's checkpoints.

A new family is one more file, and its place in `FAMILY_OF_NAME`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_megamoe.checkpoints.families import deepseek_v3, deepseek_v4, gpt_oss, kimi_k3, qwen3_moe
from jax_megamoe.checkpoints.families.record import (
    EXPERT_KEYS,
    FP8,
    MXFP4,
    PARTS,
    SHARED_FORMATS,
    SHARED_KEYS,
    SHARED_PROJECTIONS,
    TOP_K_KEYS,
    Family,
    Format,
    Matrix,
    Stored,
    entry,
    spell_dtypes,
)
from jax_megamoe.errors import refuse

__all__ = [
    "EXPERT_KEYS",
    "FAMILIES",
    "FAMILY_OF_NAME",
    "FP8",
    "MXFP4",
    "PARTS",
    "SHARED_FORMATS",
    "SHARED_KEYS",
    "SHARED_PROJECTIONS",
    "TOP_K_KEYS",
    "Family",
    "Format",
    "Matrix",
    "Stored",
    "detect_family",
    "entry",
    "spell_dtypes",
]

#: In the order in which messages list them.
FAMILY_OF_NAME: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (deepseek_v4, deepseek_v3, kimi_k3, gpt_oss, qwen3_moe)
}
#: What `open` takes as `family`.
FAMILIES = tuple(FAMILY_OF_NAME)


def detect_family(config: dict[str, Any], model: dict[str, Any], where: Path) -> str:
    model_types = [c["model_type"] for c in (config, model) if "model_type" in c]
    for name, family in FAMILY_OF_NAME.items():
        if set(family.model_types) & set(model_types):
            return name
    for name, family in FAMILY_OF_NAME.items():
        if not model_types and family.untyped(model):
            return name
    refuse(
        f"{where}: model_type",
        got=model_types[0] if model_types else "none",
        want=" or ".join(t for family in FAMILY_OF_NAME.values() for t in family.model_types),
        remedy=f"if its tensors are named like those of another family, pass family=, one of "
        f"{FAMILIES}",
    )
