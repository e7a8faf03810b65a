"""What each family calls its tensors, and how it stores them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_megamoe.errors import check


def spell_dtypes(values: str, scales: str | None) -> str:
    return f"{values} with {scales} scales" if scales else f"{values} without scales"


@dataclasses.dataclass(frozen=True)
class Format:
    """How a matrix is stored: dtypes of its values and of its scales, () for no scales."""

    name: str
    values: tuple[str, ...]
    scales: tuple[str, ...]
    exact: bool = False

    def __str__(self):
        return f"{self.name} ({spell_dtypes(' or '.join(self.values), ' or '.join(self.scales))})"


class Stored(NamedTuple):
    format: Format
    values: str  # dtype
    scales: str | None  # dtype

    def __str__(self):
        return f"{self.format.name} ({spell_dtypes(self.values, self.scales)})"


class Matrix(NamedTuple):
    values: str  # name
    scales: str | None  # name
    expert: int
    rows: int
    columns: int


MXFP4 = Format("MXFP4", ("I8", "U8"), ("F8_E8M0", "U8"), exact=True)
FP8 = Format("FP8", ("F8_E4M3",), ("F32", "BF16", "F8_E8M0"))
_BF16 = Format("unquantised", ("BF16", "F16", "F32"), ())


def _silu(model: dict[str, Any]) -> dict[str, Any]:
    act = model.get("hidden_act", "silu")
    return {"kind": "swiglu", "limit": None} if act == "silu" else {"kind": act}


def _clamped_silu(model: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "swiglu", "limit": entry(model, "swiglu_limit")}


def _situ(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "situ",
        "beta": entry(model, "activation_situ_beta"),
        "linear_beta": entry(model, "activation_situ_linear_beta"),
    }


def _gpt_oss_swiglu(model: dict[str, Any]) -> dict[str, Any]:
    # alpha is a constant of the model's code, not of its config.json
    return {"kind": "gpt_oss_swiglu", "limit": entry(model, "swiglu_limit"), "alpha": 1.702}


@dataclasses.dataclass(frozen=True)
class Family:
    """Attributes:
    model_types: what config.json calls the family's models.
    experts: matches an expert tensor's name, with groups layer, projection and part, and expert
      unless a tensor holds all experts of a layer.
    router: matches a router tensor's name, with groups layer and part.
    projections: group projection -> "gate", "up", "gate_up" (rows alternate) or "down".
    formats: what the experts may be stored in.
    activation: config.json -> what `Checkpoint.activation` is.
    intermediate: key of the width of an expert in config.json.
    """

    model_types: tuple[str, ...]
    experts: re.Pattern[str]
    router: re.Pattern[str]
    projections: dict[str, str]
    formats: tuple[Format, ...]
    activation: Callable[[dict[str, Any]], dict[str, Any]]
    intermediate: str = "moe_intermediate_size"

    @property
    def stacked(self) -> bool:
        return "expert" not in self.experts.groupindex


def _names(block: str, projections: str, router: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    start = rf"(?:.+\.)?layers\.(?P<layer>\d+)\.{block}\."
    part = r"(?P<part>weight|weight_packed|scale|weight_scale|weight_scale_inv)"
    return (
        re.compile(rf"{start}experts\.(?P<expert>\d+)\.(?P<projection>{projections})\.{part}"),
        re.compile(rf"{start}gate\.(?P<part>{router})"),
    )


# Group part -> what it holds.
PARTS = {
    "weight": "values",
    "weight_packed": "values",
    "scale": "scales",
    "weight_scale": "scales",
    "weight_scale_inv": "scales",  # a factor, in spite of its name
    # gpt-oss
    "": "values",
    "_blocks": "values",
    ".blocks": "values",
    "_scales": "scales",
    ".scales": "scales",
    "_bias": "bias",
}
_W123 = {"w1": "gate", "w3": "up", "w2": "down"}
_PROJ = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

FAMILY_OF_NAME = {
    "deepseek_v4": Family(
        ("deepseek_v4", "deepseek_v41"),
        *_names("ffn", "w[123]", "weight|bias|tid2eid"),
        projections=_W123,
        formats=(MXFP4, FP8),
        activation=_clamped_silu,
    ),
    "deepseek_v3": Family(
        ("deepseek_v3", "deepseek_v32", "kimi_k2"),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight|e_score_correction_bias"),
        projections=_PROJ,
        formats=(FP8, _BF16),
        activation=_silu,
    ),
    "kimi_k3": Family(
        ("kimi_k3",),
        *_names("block_sparse_moe", "w[123]", "weight|e_score_correction_bias"),
        projections=_W123,
        formats=(MXFP4,),
        activation=_situ,
    ),
    "gpt_oss": Family(
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
        projections={
            "gate_up_proj": "gate_up",
            "mlp1": "gate_up",
            "down_proj": "down",
            "mlp2": "down",
        },
        formats=(MXFP4,),
        activation=_gpt_oss_swiglu,
        intermediate="intermediate_size",
    ),
    "qwen3_moe": Family(
        ("qwen3_moe",),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight"),
        projections=_PROJ,
        formats=(FP8, _BF16),
        activation=_silu,
    ),
}
#: What `open` takes as `family`.
FAMILIES = tuple(FAMILY_OF_NAME)

EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
HIDDEN_KEYS = ("routed_expert_hidden_size", "hidden_size")  # Kimi-K3's experts work on a latent


def entry(model: dict[str, Any], *keys: str) -> Any:
    """The first of `keys` that config.json has."""
    for key in keys:
        if key in model:
            return model[key]
    check(
        False,
        f"config.json: {' or '.join(keys)}",
        got="no such entry",
        want="the config.json of this family's models",
        remedy="compare it with the published one; family=... overrides model_type",
    )


def detect_family(config: dict[str, Any], model: dict[str, Any], where: Path) -> str:
    model_types = [c["model_type"] for c in (config, model) if "model_type" in c]
    for name, family in FAMILY_OF_NAME.items():
        if set(family.model_types) & set(model_types):
            return name
    # The original release of gpt-oss has no model_type.
    if not model_types and {"num_experts", "experts_per_token", "swiglu_limit"} <= set(model):
        return "gpt_oss"
    check(
        False,
        f"{where}: model_type",
        got=model_types[0] if model_types else "none",
        want=" or ".join(t for family in FAMILY_OF_NAME.values() for t in family.model_types),
        remedy=f"if its tensors are named like those of another family, pass family=, one of "
        f"{FAMILIES}",
    )
    raise AssertionError
