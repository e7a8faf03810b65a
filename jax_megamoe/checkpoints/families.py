"""What each family calls its tensors, and how it stores them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_megamoe import routers
from jax_megamoe.errors import check, refuse

__all__ = [
    "EXPERT_KEYS",
    "FAMILIES",
    "FAMILY_OF_NAME",
    "FP8",
    "HIDDEN_KEYS",
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
    act = model.get("hidden_act", "situ")
    if act != "situ":
        return {"kind": act}
    return {
        "kind": "situ",
        "beta": entry(model, "activation_situ_beta"),
        "linear_beta": entry(model, "activation_situ_linear_beta"),
    }


def _gpt_oss_swiglu(model: dict[str, Any]) -> dict[str, Any]:
    # alpha is a constant of the model's code, not of its config.json
    return {"kind": "gpt_oss_swiglu", "limit": entry(model, "swiglu_limit"), "alpha": 1.702}


def _stated(model: dict[str, Any], key: str, want: str) -> None:
    """Refuses a config.json that says something else than the published models of the family."""
    check(
        model.get(key, want) == want,
        f"config.json: {key}",
        got=repr(model.get(key)),
        want=repr(want),
        remedy="build a jax_megamoe.routers.Router for this model",
    )


def _deepseek_v3_router(model: dict[str, Any]) -> routers.Router:
    _stated(model, "scoring_func", "sigmoid")
    _stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v3(
        top_k=entry(model, *TOP_K_KEYS),
        n_group=entry(model, "n_group"),
        topk_group=entry(model, "topk_group"),
        norm_topk_prob=entry(model, "norm_topk_prob"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


def _deepseek_v4_router(model: dict[str, Any]) -> routers.Router:
    _stated(model, "scoring_func", "sqrtsoftplus")
    _stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v4(
        top_k=entry(model, *TOP_K_KEYS),
        norm_topk_prob=entry(model, "norm_topk_prob"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


def _kimi_k3_router(model: dict[str, Any]) -> routers.Router:
    _stated(model, "moe_router_activation_func", "sigmoid")
    _stated(model, "topk_method", "noaux_tc")
    return routers.deepseek_v3(
        top_k=entry(model, *TOP_K_KEYS),
        n_group=entry(model, "num_expert_group"),
        topk_group=entry(model, "topk_group"),
        norm_topk_prob=entry(model, "moe_renormalize"),
        routed_scaling_factor=entry(model, "routed_scaling_factor"),
    )


def _gpt_oss_router(model: dict[str, Any]) -> routers.Router:
    return routers.gpt_oss(top_k=entry(model, *TOP_K_KEYS))


def _qwen3_moe_router(model: dict[str, Any]) -> routers.Router:
    # Entries that have the default of transformers' class may be left out, and it is False there.
    norm_topk_prob = model.get("norm_topk_prob", False)
    return routers.qwen3_moe(top_k=entry(model, *TOP_K_KEYS), norm_topk_prob=norm_topk_prob)


@dataclasses.dataclass(frozen=True)
class Family:
    """Attributes:
    model_types: what config.json calls the family's models.
    experts: matches an expert tensor's name, with groups layer, projection and part, and expert
      unless a tensor holds all experts of a layer.
    router: matches a router tensor's name, with groups layer and part.
    shared: matches a shared expert's tensor, with groups layer, projection and part.
    projections: group projection -> "gate", "up", "gate_up" (rows alternate) or "down".
    formats: what the experts may be stored in.
    activation: config.json -> what `Checkpoint.activation` is.
    make_router: config.json -> its router.
    intermediate: key of the width of an expert in config.json.
    latent: matches a tensor between the block's width and the experts', with groups layer and role.
    """

    model_types: tuple[str, ...]
    experts: re.Pattern[str]
    router: re.Pattern[str]
    shared: re.Pattern[str] | None
    projections: dict[str, str]
    formats: tuple[Format, ...]
    activation: Callable[[dict[str, Any]], dict[str, Any]]
    make_router: Callable[[dict[str, Any]], routers.Router]
    intermediate: str = "moe_intermediate_size"
    latent: re.Pattern[str] | None = None

    @property
    def stacked(self) -> bool:
        return "expert" not in self.experts.groupindex


def _names(
    block: str, projections: str, router: str
) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    start = rf"(?:.+\.)?layers\.(?P<layer>\d+)\.{block}\."
    part = r"(?P<part>weight|weight_packed|scale|weight_scale|weight_scale_inv)"
    shared = rf"shared_expert(?:s?\.|_)(?P<projection>{'|'.join(SHARED_PROJECTIONS)})"
    return (
        re.compile(rf"{start}experts\.(?P<expert>\d+)\.(?P<projection>{projections})\.{part}"),
        re.compile(rf"{start}gate\.(?P<part>{router})"),
        re.compile(rf"{start}{shared}\.{part}"),
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
#: Group projection of a shared expert -> what it is; the last one weighs its output per token.
SHARED_PROJECTIONS = _W123 | _PROJ | {"gate": "token_gate"}
#: What a shared expert may be stored in, whatever the others are.
SHARED_FORMATS = (FP8, _BF16)

FAMILY_OF_NAME = {
    "deepseek_v4": Family(
        ("deepseek_v4", "deepseek_v41"),
        *_names("ffn", "w[123]", "weight|bias|tid2eid"),
        projections=_W123,
        formats=(MXFP4, FP8),
        activation=_clamped_silu,
        make_router=_deepseek_v4_router,
    ),
    "deepseek_v3": Family(
        ("deepseek_v3", "deepseek_v32", "kimi_k2"),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight|e_score_correction_bias"),
        projections=_PROJ,
        formats=(FP8, _BF16),
        activation=_silu,
        make_router=_deepseek_v3_router,
    ),
    "kimi_k3": Family(
        ("kimi_k3",),
        *_names("block_sparse_moe", "w[123]", "weight|e_score_correction_bias"),
        projections=_W123,
        formats=(MXFP4,),
        activation=_situ,
        make_router=_kimi_k3_router,
        latent=re.compile(
            r"(?:.+\.)?layers\.(?P<layer>\d+)\.block_sparse_moe\."
            r"routed_expert_(?P<role>down|norm|up)(?:_proj)?\.weight"
        ),
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
        None,
        projections={
            "gate_up_proj": "gate_up",
            "mlp1": "gate_up",
            "down_proj": "down",
            "mlp2": "down",
        },
        formats=(MXFP4,),
        activation=_gpt_oss_swiglu,
        make_router=_gpt_oss_router,
        intermediate="intermediate_size",
    ),
    "qwen3_moe": Family(
        ("qwen3_moe", "qwen2_moe"),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight"),
        projections=_PROJ,
        formats=(FP8, _BF16),
        activation=_silu,
        make_router=_qwen3_moe_router,
    ),
}
#: What `open` takes as `family`.
FAMILIES = tuple(FAMILY_OF_NAME)

EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
#: How many shared experts; they are one matrix, so many times as wide.
SHARED_KEYS = ("n_shared_experts", "num_shared_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
HIDDEN_KEYS = ("routed_expert_hidden_size", "hidden_size")  # Kimi-K3's experts work on a latent


def entry(model: dict[str, Any], *keys: str) -> Any:
    """The first of `keys` that config.json has."""
    for key in keys:
        if key in model:
            return model[key]
    refuse(
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
    refuse(
        f"{where}: model_type",
        got=model_types[0] if model_types else "none",
        want=" or ".join(t for family in FAMILY_OF_NAME.values() for t in family.model_types),
        remedy=f"if its tensors are named like those of another family, pass family=, one of "
        f"{FAMILIES}",
    )
