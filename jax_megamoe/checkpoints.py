"""Expert weights of published models, from local directories of safetensors files.

MXFP4 experts load bit for bit. Other formats have no exact FP4 form: they are refused, unless
`requantize=True` asks for rounding. Names, formats and what is exact: docs/checkpoints.md.

Files are mapped into memory, and only what is asked for is touched: a host that holds experts
a to b of a layer reads those. With an index file, shards that are not needed need not be there.

The `safetensors` library checks each file. Its numpy interface has no FP8, E8M0 or BF16, so that
bytes are taken from the map, at the offsets that the file's header gives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe import quantize
from jax_megamoe.config import SF_GROUP, Activation, swiglu
from jax_megamoe.errors import check
from jax_megamoe.weights import ExpertWeights

#: Called with (experts done, experts in all).
Progress = Callable[[int, int], None]

# Files -------------------------------------------------------------------------------------------

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}

_AGAIN = "download it again"


def _load_json(text: str | bytes, where: Path) -> dict[str, Any]:
    """A JSON object in which no key stands twice: a plain dict would keep the last one."""

    def unique(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            check(False, str(where), got=f"{twice!r} twice", want="every name once", remedy=_AGAIN)
        return result

    try:
        result = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        result = error
    got = result if isinstance(result, Exception) else type(result).__name__
    check(isinstance(result, dict), str(where), got=got, want="a JSON object", remedy=_AGAIN)
    return result


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


class _Shard:
    """One safetensors file, mapped. `tensors` is its header."""

    def __init__(self, path: Path):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            check(
                False,
                "safetensors",
                got="no such module",
                want="safetensors 0.6 or newer",
                remedy="install it with pip install 'jax-megamoe[checkpoints]'",
            )
        try:
            with safe_open(path, framework="np"):  # checks header, offsets and size
                pass
        except (SafetensorError, OSError) as error:
            check(False, str(path), got=str(error), want="a whole safetensors file", remedy=_AGAIN)
        self.map = np.memmap(path, np.uint8, "r").view(np.ndarray)
        header_bytes = int.from_bytes(self.map[:8].tobytes(), "little")
        header = _load_json(self.map[8 : 8 + header_bytes].tobytes(), path)
        header.pop("__metadata__", None)
        self.tensors = {
            name: _Tensor(
                entry["dtype"],
                tuple(entry["shape"]),
                *(8 + header_bytes + offset for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }

    def bytes_of(self, name: str, index: int | None = None) -> np.ndarray:
        """uint8 view of a tensor's bytes, or of its part `index` along axis 0."""
        tensor = self.tensors[name]
        start, stop = tensor.start, tensor.stop
        if index is not None:
            part = (stop - start) // tensor.shape[0]
            start, stop = start + index * part, start + (index + 1) * part
        return self.map[start:stop]


def _tensor_files(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file, from the index file or from all headers."""
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        indices = [index for index in indices if index.name == "model.safetensors.index.json"]
        check(
            len(indices) == 1,
            str(path),
            got="several *.safetensors.index.json",
            want="one, or one that is called model.safetensors.index.json",
            remedy="keep the files of one checkpoint in a directory",
        )
    if indices:
        weight_map = _load_json(indices[0].read_bytes(), indices[0]).get("weight_map")
        good = isinstance(weight_map, dict) and all(
            isinstance(file, str) and file == Path(file).name for file in weight_map.values()
        )
        check(
            good,
            str(indices[0]),
            got="no usable weight_map",
            want="weight_map, an object of tensor names and names of files next to it",
            remedy=_AGAIN,
        )
        return dict(weight_map or {})
    shards = sorted(path.glob("*.safetensors"))
    check(
        bool(shards),
        str(path),
        got="no *.safetensors",
        want="a directory with a checkpoint in safetensors files",
        remedy="point to the directory that has config.json and the weights",
    )
    files: dict[str, str] = {}
    for shard in shards:
        for name in _Shard(shard).tensors:
            check(
                name not in files,
                f"tensor {name}",
                got=f"it in {files.get(name)} and in {shard.name}, and there is no index file",
                want="every tensor once",
                remedy="keep the files of one checkpoint in a directory, with their index file",
            )
            files[name] = shard.name
    return files


# Families ----------------------------------------------------------------------------------------


def _dtypes(values: str, scales: str | None) -> str:
    return f"{values} with {scales} scales" if scales else f"{values} without scales"


@dataclasses.dataclass(frozen=True)
class _Format:
    """How a matrix is stored: dtypes of its values and of its scales, () for no scales."""

    name: str
    values: tuple[str, ...]
    scales: tuple[str, ...]
    exact: bool = False

    def __str__(self):
        return f"{self.name} ({_dtypes(' or '.join(self.values), ' or '.join(self.scales))})"


class _Stored(NamedTuple):
    format: _Format
    values: str  # dtype
    scales: str | None  # dtype

    def __str__(self):
        return f"{self.format.name} ({_dtypes(self.values, self.scales)})"


class _Matrix(NamedTuple):
    values: str  # name
    scales: str | None  # name
    expert: int
    rows: int
    columns: int


_MXFP4 = _Format("MXFP4", ("I8", "U8"), ("F8_E8M0", "U8"), exact=True)
_FP8 = _Format("FP8", ("F8_E4M3",), ("F32", "BF16", "F8_E8M0"))
_BF16 = _Format("unquantised", ("BF16", "F16", "F32"), ())


def _silu(model: dict[str, Any]) -> dict[str, Any]:
    act = model.get("hidden_act", "silu")
    return {"kind": "swiglu", "limit": None} if act == "silu" else {"kind": act}


def _clamped_silu(model: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "swiglu", "limit": _entry(model, "swiglu_limit")}


def _situ(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "situ",
        "beta": _entry(model, "activation_situ_beta"),
        "linear_beta": _entry(model, "activation_situ_linear_beta"),
    }


def _gpt_oss_swiglu(model: dict[str, Any]) -> dict[str, Any]:
    # alpha is a constant of the model's code, not of its config.json
    return {"kind": "gpt_oss_swiglu", "limit": _entry(model, "swiglu_limit"), "alpha": 1.702}


@dataclasses.dataclass(frozen=True)
class _Family:
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
    formats: tuple[_Format, ...]
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
_PARTS = {
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

_FAMILIES = {
    "deepseek_v4": _Family(
        ("deepseek_v4", "deepseek_v41"),
        *_names("ffn", "w[123]", "weight|bias|tid2eid"),
        projections=_W123,
        formats=(_MXFP4, _FP8),
        activation=_clamped_silu,
    ),
    "deepseek_v3": _Family(
        ("deepseek_v3", "deepseek_v32", "kimi_k2"),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight|e_score_correction_bias"),
        projections=_PROJ,
        formats=(_FP8, _BF16),
        activation=_silu,
    ),
    "kimi_k3": _Family(
        ("kimi_k3",),
        *_names("block_sparse_moe", "w[123]", "weight|e_score_correction_bias"),
        projections=_W123,
        formats=(_MXFP4,),
        activation=_situ,
    ),
    "gpt_oss": _Family(
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
        formats=(_MXFP4,),
        activation=_gpt_oss_swiglu,
        intermediate="intermediate_size",
    ),
    "qwen3_moe": _Family(
        ("qwen3_moe",),
        *_names("mlp", "gate_proj|up_proj|down_proj", "weight"),
        projections=_PROJ,
        formats=(_FP8, _BF16),
        activation=_silu,
    ),
}
#: What `open` takes as `family`.
FAMILIES = tuple(_FAMILIES)

_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_HIDDEN_KEYS = ("routed_expert_hidden_size", "hidden_size")  # Kimi-K3's experts work on a latent


def _entry(model: dict[str, Any], *keys: str) -> Any:
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


def _detect_family(config: dict[str, Any], model: dict[str, Any], where: Path) -> str:
    model_types = [c["model_type"] for c in (config, model) if "model_type" in c]
    for name, family in _FAMILIES.items():
        if set(family.model_types) & set(model_types):
            return name
    # The original release of gpt-oss has no model_type.
    if not model_types and {"num_experts", "experts_per_token", "swiglu_limit"} <= set(model):
        return "gpt_oss"
    check(
        False,
        f"{where}: model_type",
        got=model_types[0] if model_types else "none",
        want=" or ".join(t for family in _FAMILIES.values() for t in family.model_types),
        remedy=f"if its tensors are named like those of another family, pass family=, one of "
        f"{FAMILIES}",
    )
    raise AssertionError


# The public part ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RelativeError:
    """||rounded - stored|| / ||stored||, Frobenius norms over the experts that were read."""

    gate: float
    up: float
    down: float

    def __str__(self):
        return f"gate {self.gate:.2%}, up {self.up:.2%}, down {self.down:.2%}"


def open(path: str | Path, family: str | None = None) -> Checkpoint:
    """Opens a checkpoint; reads config.json and the index, or all headers if there is no index.

    Args:
      path: a directory with config.json and safetensors files.
      family: one of `FAMILIES`; None takes it from config.json.

    Raises:
      MegaMoEError: a file that is missing or broken, an unknown family, tensors that are there
        twice, or no expert tensors.
    """
    return Checkpoint(path, family)


class Checkpoint:
    """A model's directory. Build it with `open`.

    Attributes:
      path: the directory.
      family: one of `FAMILIES`.
      model_config: what config.json says about the language model.
      layers: indices of the layers that have experts.
      tensor_names: names of all tensors, for `tensor`.
      relative_errors: layer -> `RelativeError` of the last `experts(layer, requantize=True)` that
        rounded.
    """

    def __init__(self, path: str | Path, family: str | None = None):
        self.path = Path(path)
        where = self.path / "config.json"
        check(
            where.is_file(),
            str(self.path),
            got="no config.json" if self.path.is_dir() else "no such directory",
            want="a directory with config.json and safetensors files",
            remedy="download the model first; nothing is fetched here",
        )
        config = _load_json(where.read_bytes(), where)
        model = config.get("text_config")
        self.model_config: dict[str, Any] = model if isinstance(model, dict) else config
        self._quantization: dict[str, Any] = (
            self.model_config.get("quantization_config") or config.get("quantization_config") or {}
        )
        check(
            family is None or family in _FAMILIES,
            "family",
            got=repr(family),
            want=f"one of {FAMILIES}",
            remedy="None takes it from config.json",
        )
        self.family: str = family or _detect_family(config, self.model_config, where)
        self._family = _FAMILIES[self.family]
        self.relative_errors: dict[int, RelativeError] = {}
        self._shards: dict[str, _Shard] = {}
        self._files = _tensor_files(self.path)
        # layer -> (expert, "gate", "values") -> name; expert -1: a tensor of all experts.
        self._experts: dict[int, dict[tuple[int, str, str], str]] = {}
        self._routers: dict[int, dict[str, str]] = {}
        self._scan()
        self.layers: tuple[int, ...] = tuple(sorted(self._experts))
        self.tensor_names: tuple[str, ...] = tuple(self._files)

        self._num_experts = self._size(*_EXPERT_KEYS)
        self._hidden = self._size(*_HIDDEN_KEYS)
        self._intermediate = self._size(self._family.intermediate)
        check(
            self._hidden % SF_GROUP == 0 and self._intermediate % SF_GROUP == 0,
            "config.json: width of a token and of an expert",
            got=f"{self._hidden} and {self._intermediate}",
            want=f"multiples of {SF_GROUP}",
            remedy="no other widths can be loaded",
        )

    def __repr__(self):
        return (
            f"<Checkpoint {self.path}: {self.family}, {len(self.layers)} layers of "
            f"{self._num_experts} experts, {self._hidden} x {self._intermediate}>"
        )

    @property
    def activation(self) -> dict[str, Any]:
        """The experts' activation: "kind" and its parameters, see docs/checkpoints.md.

        "swiglu" with "limit" is what `MegaMoE` computes. Others are "gpt_oss_swiglu" with "limit"
        and "alpha", "situ" with "beta" and "linear_beta", or config.json's own word.
        """
        return self._family.activation(self.model_config)

    def config(self, layer: int, *, activation: Activation | None = None) -> dict[str, Any]:
        """Fields of `MegaMoEConfig`: num_experts, top_k, hidden, intermediate, activation.

        ``MegaMoEConfig(**checkpoint.config(layer), max_tokens_per_rank=...)``

        Args:
          layer: one of `layers`. Its first expert whose shard is here is compared with config.json.
          activation: replaces the model's own.

        Raises:
          MegaMoEError: an activation that `MegaMoE` does not compute, unless one was passed; no
            such layer; a config.json that does not fit the tensors.
        """
        names = self._complete(layer)
        if activation is None:
            own = self.activation
            check(
                own["kind"] == "swiglu",
                f"activation of {self.path}",
                got=own,
                want="swiglu, with or without limit",
                remedy="MegaMoE would compute something else than the model does; for the shapes "
                "alone, pass activation=jax_megamoe.swiglu()",
            )
            activation = swiglu(own["limit"])
        for expert in range(self._num_experts):
            wanted = [names[key] for key in self._keys(expert) if key in names]
            if all((self.path / self._files[name]).is_file() for name in wanted):
                stored = self._stored(names, expert)
                for role in self._roles():
                    self._matrix(names, stored, expert, role)
                break
        return {
            "num_experts": self._num_experts,
            "top_k": self._size(*_TOP_K_KEYS),
            "hidden": self._hidden,
            "intermediate": self._intermediate,
            "activation": activation,
        }

    def experts(
        self,
        layer: int,
        experts: Sequence[int] | None = None,
        *,
        requantize: bool = False,
        progress: bool | Progress = False,
    ) -> ExpertWeights:
        """Weights of a layer's experts, in host memory, as numpy arrays in canonical layout.

        `MegaMoE.shard` takes them from there, and sends each device its own experts only.

        Args:
          layer: one of `layers`.
          experts: ids, in the order of the result; for one host's part a range. None: all.
          requantize: round what is not MXFP4 to it, by the rules of `quantize_weights`, on JAX's
            default device, one matrix at a time. `relative_errors` then has what it cost.
          progress: True for a bar on stderr, or a function that gets (experts done, in all).

        Returns:
          `ExpertWeights` of E = len(experts), H = hidden, I = intermediate of `config`. Gate rows
          come first, then up rows, whatever the order in the file.

        Raises:
          MegaMoEError: weights that have no exact MXFP4 form, unless `requantize`; a tensor that
            is missing or has another dtype or shape than the others or config.json say; a missing
            shard; a scale byte 255; values that are not finite.
        """
        names = self._complete(layer)
        ids = self._ids(experts)
        stored = self._stored(names, ids[0])
        exact = stored.format.exact
        check(
            exact or requantize,
            f"experts of layer {layer} in {self.path}",
            got=str(stored),
            want="MXFP4, which loads bit for bit",
            remedy="requantize=True rounds them to it; relative_errors says afterwards how much "
            "that changed",
        )
        show = _bar(layer) if progress is True else progress or None
        hidden, intermediate = self._hidden, self._intermediate
        w13 = np.empty((len(ids), 2 * intermediate, hidden // 2), np.uint8)
        w13_sf = np.empty((len(ids), 2 * intermediate, hidden // SF_GROUP), np.uint8)
        w2 = np.empty((len(ids), hidden, intermediate // 2), np.uint8)
        w2_sf = np.empty((len(ids), hidden, intermediate // SF_GROUP), np.uint8)
        squares = dict.fromkeys(self._roles(), np.zeros(2))  # of the error, of the values
        for i, expert in enumerate(ids):
            for role in self._roles():
                matrix = self._matrix(names, stored, expert, role)
                if exact:
                    packed, sf = self._mxfp4(matrix)
                else:
                    packed, sf, sums = self._rounded(matrix)
                    squares[role] = squares[role] + sums
                if role == "down":
                    w2[i], w2_sf[i] = packed, sf
                    continue
                for target, rows in ((w13[i], packed), (w13_sf[i], sf)):
                    if role in ("gate", "gate_up"):
                        target[:intermediate] = rows if role == "gate" else rows[0::2]
                    if role in ("up", "gate_up"):
                        target[intermediate:] = rows if role == "up" else rows[1::2]
            if show is not None:
                show(i + 1, len(ids))
        if not exact:
            self.relative_errors[layer] = RelativeError(
                **{
                    role: math.sqrt(error / norm) if norm > 0 else 0.0
                    for role, (error, norm) in squares.items()
                }
            )
            if progress is True:
                error = self.relative_errors[layer]
                print(f"layer {layer}, relative error: {error}", file=sys.stderr)
        return ExpertWeights(w13, w13_sf, w2, w2_sf)  # type: ignore[arg-type]  # host arrays

    def biases(self, layer: int, experts: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """gpt-oss: "gate" [E, I], "up" [E, I], "down" [E, H], as stored. Other families: empty.

        `MegaMoE` has no biases; these are for code of your own.
        """
        names = self._complete(layer)
        ids = self._ids(experts)
        if not self._family.stacked:
            return {}
        result = {}
        for role, width in (("gate_up", 2 * self._intermediate), ("down", self._hidden)):
            name = names[-1, role, "bias"]
            self._check_tensor(name, ("BF16", "F32"), (self._num_experts, width))
            dtype = _DTYPES[self._tensor(name).dtype]
            rows = np.stack([self._bytes(name, i) for i in ids]).view(dtype)
            if role == "down":
                result["down"] = rows
            else:
                result["gate"], result["up"] = rows[:, 0::2].copy(), rows[:, 1::2].copy()
        return result

    def router(self, layer: int) -> dict[str, np.ndarray]:
        """A layer's router tensors, as stored, by the last part of their names.

        "weight" [E, hidden_size] is always there. "e_score_correction_bias" [E] (DeepSeek-V3,
        Kimi) and DeepSeek-V4's "bias" [E] are added to scores for the choice of experts only;
        gpt-oss's "bias" [E] is added to the logits. "tid2eid" [vocabulary, K] are DeepSeek-V4's
        experts of each token id, in layers that do not choose.
        """
        self._layer(layer)
        names = self._routers.get(layer, {})
        self._require("weight" in names, f"router of layer {layer}", "no weight", "its weight")
        result = {part: self.tensor(name) for part, name in names.items()}
        for part, array in result.items():
            check(
                part == "tid2eid" or array.shape[0] == self._num_experts,
                f"tensor {names[part]}",
                got=f"{list(array.shape)}",
                want=f"{self._num_experts} experts, as config.json says",
                remedy="config.json and the weights are of different models or revisions",
            )
        return result

    def tensor(self, name: str) -> np.ndarray:
        """A copy of any tensor, by its full name, in numpy's or ml_dtypes' dtype for it."""
        self._require(name in self._files, f"tensor {name}", "no such tensor", "a tensor's name")
        tensor = self._tensor(name)
        check(
            tensor.dtype in _DTYPES,
            f"tensor {name}",
            got=tensor.dtype,
            want=" or ".join(_DTYPES),
            remedy="read this one with the safetensors library",
        )
        return self._bytes(name).copy().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)

    # Names and sizes

    def _scan(self):
        for name in self._files:
            if match := self._family.router.fullmatch(name):
                slots: dict[Any, str] = self._routers.setdefault(int(match["layer"]), {})
                key: Any = match["part"]
            elif match := self._family.experts.fullmatch(name):
                slots = self._experts.setdefault(int(match["layer"]), {})
                expert = -1 if self._family.stacked else int(match["expert"])
                role = self._family.projections[match["projection"]]
                key = (expert, role, _PARTS[match["part"]])
            else:
                continue
            check(
                key not in slots,
                f"tensor {name}",
                got=f"it next to {slots.get(key)}, which is the same part of the same layer",
                want="one tensor each",
                remedy="keep the files of one checkpoint in a directory",
            )
            slots[key] = name
        self._require(
            bool(self._experts),
            str(self.path),
            "no tensor that is named like an expert",
            f"names as in {self._family.experts.pattern}",
        )

    def _require(self, condition: bool, operand: str, got: str, want: str):
        check(
            condition,
            operand,
            got=got,
            want=f"{want} of family {self.family}",
            remedy=f"docs/checkpoints.md lists the names; family= overrides what config.json says, "
            f"one of {FAMILIES}",
        )

    def _size(self, *keys: str) -> int:
        size = _entry(self.model_config, *keys)
        good = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(
            good,
            f"config.json: {' or '.join(keys)}",
            got=repr(size),
            want="a positive int",
            remedy=_AGAIN,
        )
        return size

    def _roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._family.projections.values()))

    def _keys(self, expert: int) -> list[tuple[int, str, str]]:
        expert = -1 if self._family.stacked else expert
        return [(expert, role, part) for role in self._roles() for part in ("values", "scales")]

    def _layer(self, layer: int) -> dict[tuple[int, str, str], str]:
        check(
            layer in self._experts,
            "layer",
            got=layer,
            want=f"one of the layers with experts, {_ranges(self.layers)}",
            remedy="the others are dense, or not in this checkpoint",
        )
        return self._experts[layer]

    def _complete(self, layer: int) -> dict[tuple[int, str, str], str]:
        """The layer's names, after checking that its experts are 0..E-1 with every projection."""
        names = self._layer(layer)
        found = {expert for expert, _, _ in names}
        wanted = {-1} if self._family.stacked else set(range(self._num_experts))
        more = sorted(found - wanted)
        check(
            not more,
            f"experts of layer {layer} in {self.path}",
            got=f"expert {more[0] if more else ''}",
            want=f"{self._num_experts} experts, as config.json says",
            remedy="config.json and the weights are of different models or revisions",
        )
        # Scales are not looked for here: what is not quantised has none, `_matrix` knows.
        parts = ("values", "bias") if self._family.stacked else ("values",)
        missing = [
            f"{part} of {role}" + (f" of expert {expert}" if expert >= 0 else "")
            for expert in sorted(wanted)
            for role in self._roles()
            for part in parts
            if (expert, role, part) not in names
        ]
        check(
            not missing,
            f"experts of layer {layer} in {self.path}",
            got=f"no {missing[0] if missing else ''} ({len(missing)} tensors are missing)",
            want=f"{self._num_experts} whole experts",
            remedy="download the rest; without an index file all shards have to be there",
        )
        return names

    def _ids(self, experts: Sequence[int] | None) -> list[int]:
        ids = list(range(self._num_experts) if experts is None else map(int, experts))
        check(
            0 < len(ids) == len(set(ids)) and 0 <= min(ids) and max(ids) < self._num_experts,
            "experts",
            got=_ranges(ids) if ids else "none",
            want=f"different ids from 0 to {self._num_experts - 1}",
            remedy="pass range(first, last + 1), or None for all",
        )
        return ids

    # Bytes

    def _shard(self, name: str) -> _Shard:
        file = self._files[name]
        if file not in self._shards:
            check(
                (self.path / file).is_file(),
                str(self.path / file),
                got="no such file",
                want=f"the shard that holds {name}, as the index says",
                remedy="download this shard too",
            )
            self._shards[file] = _Shard(self.path / file)
        check(
            name in self._shards[file].tensors,
            f"tensor {name}",
            got=f"no such tensor in {file}",
            want="it there, as the index says",
            remedy="index and shards are of different revisions; download them again",
        )
        return self._shards[file]

    def _tensor(self, name: str) -> _Tensor:
        return self._shard(name).tensors[name]

    def _bytes(self, name: str, index: int | None = None) -> np.ndarray:
        return self._shard(name).bytes_of(name, index)

    def _check_tensor(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]):
        tensor = self._tensor(name)
        check(
            tensor.dtype in dtypes and tensor.shape == shape,
            f"tensor {name}",
            got=f"{tensor.dtype}{list(tensor.shape)}",
            want=f"{' or '.join(dtypes)} {list(shape)}, from {self._num_experts} experts of "
            f"{self._hidden} x {self._intermediate} in config.json",
            remedy="config.json and the weights are of different models or revisions"
            if tensor.dtype in dtypes
            else "all experts of a layer are stored alike in a published checkpoint",
        )

    # Matrices

    def _stored(self, names: dict[tuple[int, str, str], str], expert: int) -> _Stored:
        """How one expert is stored, from its first matrix: the others have to be alike."""
        values_key, scales_key = self._keys(expert)[:2]
        values = self._tensor(names[values_key]).dtype
        scales = self._tensor(names[scales_key]).dtype if scales_key in names else None
        for candidate in self._family.formats:
            if values in candidate.values and scales in (candidate.scales or (None,)):
                return _Stored(candidate, values, scales)
        check(
            False,
            f"tensor {names[values_key]}",
            got=_dtypes(values, scales),
            want=" or ".join(map(str, self._family.formats)),
            remedy="INT4 has no exact FP4 form; load a release in FP8"
            if values == "I32"
            else "load a release of the model in one of these formats",
        )
        raise AssertionError

    def _matrix(
        self, names: dict[tuple[int, str, str], str], stored: _Stored, expert: int, role: str
    ) -> _Matrix:
        """One matrix, found and checked: it has scales or none, dtypes, shapes."""
        own = -1 if self._family.stacked else expert
        values, scales = names[own, role, "values"], names.get((own, role, "scales"))
        check(
            (scales is None) == (stored.scales is None),
            f"tensor {values}",
            got="no scales" if scales is None else f"scales, {scales}",
            want=f"what the layer's other experts have, {stored}",
            remedy="all experts of a layer are stored alike in a published checkpoint",
        )
        rows, columns = {
            "gate": (self._intermediate, self._hidden),
            "up": (self._intermediate, self._hidden),
            "gate_up": (2 * self._intermediate, self._hidden),
            "down": (self._hidden, self._intermediate),
        }[role]
        shape: tuple[int, ...] = (rows, columns)
        scales_shape: tuple[int, ...] = (rows, columns // SF_GROUP)
        if stored.format is _MXFP4:
            shape = (rows, columns // 2)
        elif stored.format is _FP8:
            block = self._block()
            scales_shape = (-(-rows // block[0]), -(-columns // block[1]))
        if self._family.stacked:
            shape = (self._num_experts, *scales_shape, SF_GROUP // 2)
            scales_shape = (self._num_experts, *scales_shape)
        self._check_tensor(values, (stored.values,), shape)
        if scales is not None and stored.scales is not None:
            self._check_tensor(scales, (stored.scales,), scales_shape)
        return _Matrix(values, scales, expert, rows, columns)

    def _mxfp4(self, matrix: _Matrix) -> tuple[np.ndarray, np.ndarray]:
        """Views of the codes [N, K/2] and the scales [N, K/32]."""
        assert matrix.scales is not None
        index = matrix.expert if self._family.stacked else None
        sf = self._bytes(matrix.scales, index).reshape(matrix.rows, -1)
        _check_scales(matrix, sf)
        return self._bytes(matrix.values, index).reshape(matrix.rows, -1), sf

    def _rounded(self, matrix: _Matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes [N, K/2], scales [N, K/32], sums of squares of the error and of the values."""
        scale = None
        if matrix.scales is not None:
            scale = self.tensor(matrix.scales)
            if scale.dtype == ml_dtypes.float8_e8m0fnu:
                _check_scales(matrix, scale.view(np.uint8))
            scale = scale.astype(np.float32)
        result = _round_to_mxfp4(self.tensor(matrix.values), scale, self._block())
        packed, sf, error, norm = map(np.asarray, result)
        check(
            not np.any(sf == quantize.UE8M0_NAN),
            f"tensor {matrix.values}",
            got="a NaN or an infinity",
            want="finite weights",
            remedy=_AGAIN,
        )
        return packed, sf, np.array([error, norm], np.float64)

    def _block(self) -> tuple[int, int]:
        block = self._quantization.get("weight_block_size", [128, 128])
        good = (
            isinstance(block, list)
            and len(block) == 2
            and all(isinstance(size, int) and size > 0 for size in block)
        )
        check(
            good,
            "config.json: weight_block_size",
            got=repr(block),
            want="two positive ints, rows and columns that share a scale",
            remedy="FP8 with a scale per tensor or channel is not supported",
        )
        return block[0], block[1]


def _check_scales(matrix: _Matrix, sf: np.ndarray) -> None:
    bad = sf == quantize.UE8M0_NAN
    if not bad.any():
        return
    row, group = np.unravel_index(np.argmax(bad), bad.shape)
    check(
        False,
        f"tensor {matrix.scales}, expert {matrix.expert}, row {row}, block {group}",
        got=f"scale byte {quantize.UE8M0_NAN}, a NaN ({np.count_nonzero(bad)} of {bad.size})",
        want="finite scales",
        remedy=_AGAIN,
    )


@functools.partial(jax.jit, static_argnames="block")
def _round_to_mxfp4(matrix, scale, block):
    """[N, K] of a float dtype, times scales per block [ceil(N/b0), ceil(K/b1)] if there are any
    -> packed [N, K/2], scales [N, K/32], sum of squares of the error and of the values."""
    values = matrix.astype(jnp.float32)
    if scale is not None:
        rows, columns = matrix.shape
        scale = jnp.repeat(scale, block[0], axis=0)[:rows]
        values = values * jnp.repeat(scale, block[1], axis=1)[:, :columns]
    codes, sf = quantize.quantize_e2m1(values)
    error = quantize.dequantize_e2m1(codes, sf) - values
    return quantize.pack_e2m1(codes), sf, jnp.sum(error**2), jnp.sum(values**2)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def _bar(layer: int) -> Progress:
    def show(done: int, total: int) -> None:
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        line = f"\rlayer {layer} [{bar:30}] {done}/{total} experts"
        print(line, end=end, file=sys.stderr, flush=True)

    return show
