"""What a family's record says: names of tensors, formats, entries of config.json."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_megamoe import routers
from jax_megamoe.errors import check, refuse

__all__ = [
    "EXPERT_KEYS",
    "FP8",
    "MXFP4",
    "PARTS",
    "PROJ",
    "SHARED_FORMATS",
    "SHARED_KEYS",
    "SHARED_PROJECTIONS",
    "TOP_K_KEYS",
    "UNQUANTISED",
    "W123",
    "Family",
    "Format",
    "Matrix",
    "Stored",
    "block_names",
    "entry",
    "silu",
    "spell_dtypes",
    "stated",
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
UNQUANTISED = Format("unquantised", ("BF16", "F16", "F32"), ())


def silu(model: dict[str, Any]) -> dict[str, Any]:
    act = model.get("hidden_act", "silu")
    return {"kind": "swiglu", "limit": None} if act == "silu" else {"kind": act}


def stated(model: dict[str, Any], key: str, want: str) -> None:
    """Refuses a config.json that says something else than the published models of the family."""
    check(
        model.get(key, want) == want,
        f"config.json: {key}",
        got=repr(model.get(key)),
        want=repr(want),
        remedy="build a jax_megamoe.routers.Router for this model",
    )


def _never(model: dict[str, Any]) -> bool:
    return False


def _no_options(model: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """Attributes:
    name: what `open` takes as `family`.
    model_types: what config.json calls the family's models.
    experts: matches an expert tensor's name, with groups layer, projection and part, and expert
      unless a tensor holds all experts of a layer.
    router: matches a router tensor's name, with groups layer and part.
    shared: matches a shared expert's tensor, with groups layer, projection and part.
    projections: group projection -> "gate", "up", "gate_up" (rows alternate) or "down".
    formats: what the experts may be stored in.
    activation: config.json -> what `Checkpoint.activation` is.
    make_router: config.json -> its router.
    parts: group part of an expert's tensor -> "values", "scales" or "bias".
    hidden: keys of the width of an expert's input and output in config.json, the best first.
    intermediate: key of the width of an expert in config.json.
    latent: matches a tensor between the block's width and the experts', with groups layer and role.
    untyped: whether a config.json without model_type is of this family.
    block_options: config.json -> further arguments of its `MoEBlock`.
    """

    name: str
    model_types: tuple[str, ...]
    experts: re.Pattern[str]
    router: re.Pattern[str]
    shared: re.Pattern[str] | None
    projections: dict[str, str]
    formats: tuple[Format, ...]
    activation: Callable[[dict[str, Any]], dict[str, Any]]
    make_router: Callable[[dict[str, Any]], routers.Router]
    parts: dict[str, str] = dataclasses.field(default_factory=lambda: PARTS)
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: str = "moe_intermediate_size"
    latent: re.Pattern[str] | None = None
    untyped: Callable[[dict[str, Any]], bool] = _never
    block_options: Callable[[dict[str, Any]], dict[str, Any]] = _no_options

    @property
    def stacked(self) -> bool:
        return "expert" not in self.experts.groupindex


def block_names(
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
PARTS: dict[str, str] = {
    "weight": "values",
    "weight_packed": "values",
    "scale": "scales",
    "weight_scale": "scales",
    "weight_scale_inv": "scales",  # a factor, in spite of its name
}
W123 = {"w1": "gate", "w3": "up", "w2": "down"}
PROJ = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
#: Group projection of a shared expert -> what it is; the last one weighs its output per token.
SHARED_PROJECTIONS = W123 | PROJ | {"gate": "token_gate"}
#: What a shared expert may be stored in, whatever the others are.
SHARED_FORMATS = (FP8, UNQUANTISED)

EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
#: How many shared experts; they are one matrix, so many times as wide.
SHARED_KEYS = ("n_shared_experts", "num_shared_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")


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
