"""`Checkpoint`: experts, router, shared expert and latent of a layer, out of a directory."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe import quantize
from jax_megamoe.checkpoints.families import FAMILIES, FAMILY_OF_NAME, detect_family
from jax_megamoe.checkpoints.families.record import (
    EXPERT_KEYS,
    FP8,
    MXFP4,
    PARTS,
    SHARED_FORMATS,
    SHARED_KEYS,
    SHARED_PROJECTIONS,
    TOP_K_KEYS,
    Format,
    Matrix,
    Stored,
    entry,
    spell_dtypes,
)
from jax_megamoe.checkpoints.files import AGAIN, DTYPES, Shard, Tensor, load_json, tensor_files
from jax_megamoe.config import ACTIVATIONS, SF_GROUP, Activation
from jax_megamoe.errors import check, describe, refuse
from jax_megamoe.routers import Router
from jax_megamoe.weights import ExpertWeights

__all__ = ["Checkpoint", "Progress", "RelativeError", "open"]

logger = logging.getLogger("jax_megamoe")

#: Called with (experts done, experts in all).
Progress = Callable[[int, int], None]


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


#: (dtype of values, dtype of scales or None for any) -> what is to be said of them.
_REMEDIES = {
    ("I32", None): "INT4 has no exact FP4 form; ",
    ("U8", "F8_E4M3"): "this is NVFP4, whose scales are no powers of two; ",
}


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
        check(
            isinstance(path, (str, os.PathLike)),
            "path",
            got=describe(path),
            want="a str or a pathlib.Path",
            remedy="it is a directory with config.json and safetensors files",
        )
        self.path = Path(path)
        where = self.path / "config.json"
        check(
            where.is_file(),
            str(self.path),
            got="no config.json"
            if self.path.is_dir()
            else "a file"
            if self.path.exists()
            else "no such directory",
            want="a directory with config.json and safetensors files",
            remedy="pass the directory of the file"
            if self.path.is_file()
            else "download the model first; nothing is fetched here",
        )
        config = load_json(where.read_bytes(), where)
        model = config.get("text_config")
        self.model_config: dict[str, Any] = model if isinstance(model, dict) else config
        self._quantization: dict[str, Any] = (
            self.model_config.get("quantization_config") or config.get("quantization_config") or {}
        )
        check(
            family is None or family in FAMILY_OF_NAME,
            "family",
            got=repr(family),
            want=f"one of {FAMILIES}",
            remedy="None takes it from config.json",
        )
        self.family: str = family or detect_family(config, self.model_config, where)
        self._family = FAMILY_OF_NAME[self.family]
        self.relative_errors: dict[int, RelativeError] = {}
        self._shards: dict[str, Shard] = {}
        self._files = tensor_files(self.path)
        # layer -> (expert, "gate", "values") -> name; expert -1: a tensor of all experts.
        self._experts: dict[int, dict[tuple[int, str, str], str]] = {}
        self._routers: dict[int, dict[str, str]] = {}
        # layer -> ("gate", "values") -> name.
        self._shared: dict[int, dict[tuple[str, str], str]] = {}
        self._latents: dict[int, dict[str, str]] = {}
        self._scan()
        self.layers: tuple[int, ...] = tuple(sorted(self._experts))
        self.tensor_names: tuple[str, ...] = tuple(self._files)

        self._num_experts = self._size(*EXPERT_KEYS)
        self._hidden = self._size(*self._family.hidden)
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
        """The experts' activation: fields of `Activation`, see docs/checkpoints.md.

        If "kind" is config.json's own word, `MegaMoE` does not compute it.
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
                own["kind"] in ACTIVATIONS,
                f"activation of {self.path}",
                got=own,
                want=f"one of {tuple(ACTIVATIONS)}",
                remedy="MegaMoE would compute something else than the model does; for the shapes "
                "alone, pass activation=jax_megamoe.swiglu()",
            )
            activation = Activation(**own)
        for expert in range(self._num_experts):
            wanted = [names[key] for key in self._keys(expert) if key in names]
            if all((self.path / self._files[name]).is_file() for name in wanted):
                stored = self._stored(names, expert)
                for role in self._roles():
                    self._matrix(names, stored, expert, role)
                break
        return {
            "num_experts": self._num_experts,
            "top_k": self._size(*TOP_K_KEYS),
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
            default device, one matrix at a time. `relative_errors` then has what it cost, and a log
            record of level INFO.
          progress: True for a bar on stderr, or a function that gets (experts done, in all).

        Returns:
          `ExpertWeights` of E = len(experts), H = hidden, I = intermediate of `config`. Gate rows
          come first, then up rows, whatever the order in the file. gpt-oss's have biases, in FP32.

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
        check(
            progress is None or isinstance(progress, bool) or callable(progress),
            "progress",
            got=describe(progress),
            want="True, False or a function of (experts done, experts in all)",
            remedy="True draws a bar on stderr",
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
            logger.info("layer %d, relative error: %s", layer, self.relative_errors[layer])
        bias: dict[str, Any] = {}
        stored_biases = self.biases(layer, ids)
        if stored_biases:
            b = {role: array.astype(np.float32) for role, array in stored_biases.items()}
            bias = {"b13": np.concatenate([b["gate"], b["up"]], axis=1), "b2": b["down"]}
        return ExpertWeights(w13, w13_sf, w2, w2_sf, **bias)  # type: ignore[arg-type]  # host arrays

    def biases(self, layer: int, experts: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """gpt-oss: "gate" [E, I], "up" [E, I], "down" [E, H], as stored. Other families: empty.

        `experts` has them too, in FP32.

        Raises:
          MegaMoEError: as `experts`.
        """
        names = self._complete(layer)
        ids = self._ids(experts)
        if not self._family.stacked:
            return {}
        result = {}
        for role, width in (("gate_up", 2 * self._intermediate), ("down", self._hidden)):
            name = names[-1, role, "bias"]
            self._check_tensor(name, ("BF16", "F32"), (self._num_experts, width))
            dtype = DTYPES[self._tensor(name).dtype]
            rows = np.stack([self._bytes(name, i) for i in ids]).view(dtype)
            check(
                bool(np.isfinite(rows.astype(np.float32)).all()),
                f"tensor {name}",
                got="a NaN or an infinity",
                want="finite biases",
                remedy=AGAIN,
            )
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

    def make_router(self) -> Router:
        """The router of this model, with the numbers of its config.json.

        Its operands are what `router(layer)` returns, see docs/routers.md.

        Raises:
          MegaMoEError: an entry that is missing, or says that the scores are others than in the
            published models of this family.
        """
        return self._family.make_router(self.model_config)

    def shared_expert(self, layer: int) -> dict[str, np.ndarray]:
        """A layer's shared expert: "gate" and "up" [S, hidden_size], "down" [hidden_size, S].

        FP8 is multiplied by its scales in FP32 and rounded to bfloat16, which is exact if scales
        are powers of two and no product is denormal; other dtypes come as stored. Several shared
        experts are one, with S the sum of their widths. Qwen2-MoE also has "token_gate"
        [1, hidden_size]. Empty for a model without.

        Raises:
          MegaMoEError: a tensor that is missing or has another dtype or shape than config.json
            says; one that is there against config.json; values that are not finite.
        """
        self._layer(layer)
        names = self._shared.get(layer, {})
        hidden, width = self._size("hidden_size"), self._shared_width(bool(names))
        if width == 0:
            self._require(
                not names,
                f"shared expert of layer {layer}",
                next(iter(names.values()), ""),
                "none, as config.json says",
            )
            return {}
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        if "shared_expert_intermediate_size" in self.model_config:
            shapes["token_gate"] = (1, hidden)
        more = sorted({role for role, _ in names} - set(shapes))
        missing = [role for role in shapes if (role, "values") not in names]
        self._require(
            not missing and not more,
            f"shared expert of layer {layer}",
            f"no {missing[0]}" if missing else f"a {''.join(more[:1])}",
            " and ".join(shapes),
        )
        return {
            role: self._dense_matrix(names[role, "values"], names.get((role, "scales")), shape)
            for role, shape in shapes.items()
        }

    def latent(self, layer: int) -> dict[str, np.ndarray]:
        """What stands around Kimi-K3's experts: "down" [L, H], "norm" [L] and "up" [H, L].

        H is hidden_size, L routed_expert_hidden_size, the width that the experts work on. A model
        with `latent_moe_use_norm` False has no "norm". Empty for the other families.

        Raises:
          MegaMoEError: a tensor that is missing or has another dtype or shape than config.json
            says, or values that are not finite.
        """
        self._layer(layer)
        if self._family.latent is None:
            return {}
        hidden, width = self._size("hidden_size"), self._hidden
        shapes: dict[str, tuple[int, ...]] = {"down": (width, hidden), "up": (hidden, width)}
        if self.model_config.get("latent_moe_use_norm", True):
            shapes["norm"] = (width,)
        names = self._latents.get(layer, {})
        self._require(
            set(names) == set(shapes),
            f"latent of layer {layer}",
            " and ".join(sorted(names)) or "no tensors",
            " and ".join(sorted(shapes)),
        )
        return {role: self._dense_matrix(names[role], None, shapes[role]) for role in shapes}

    def _shared_width(self, there: bool) -> int:
        """Width of all shared experts together; 0 if config.json says that there are none."""
        if "shared_expert_intermediate_size" in self.model_config:
            return self._size("shared_expert_intermediate_size")
        if not there and not set(SHARED_KEYS) & set(self.model_config):
            return 0
        count = entry(self.model_config, *SHARED_KEYS)
        return self._size(*SHARED_KEYS) * self._intermediate if count else 0

    def _dense_matrix(self, values: str, scales: str | None, shape: tuple[int, ...]) -> np.ndarray:
        """A matrix that is no expert's: FP8 in BF16, others as stored."""
        stored = self._format(values, scales, SHARED_FORMATS)
        self._check_tensor(values, (stored.values,), shape)
        matrix, scale = self.tensor(values), None
        if scales is not None and stored.scales is not None:
            block = self._block()
            scale_shape = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
            self._check_blocks(scales, shape, block)
            self._check_tensor(scales, (stored.scales,), scale_shape)
            scale = self._scale(scales)
            matrix = np.asarray(_widen_to_bf16(matrix, scale, block))
        check(
            bool(np.isfinite(matrix.astype(np.float32)).all()),
            f"tensor {values}",
            got="a NaN or an infinity",
            want="finite weights",
            remedy=AGAIN,
        )
        return matrix

    def tensor(self, name: str) -> np.ndarray:
        """A copy of any tensor, by its full name, in numpy's or ml_dtypes' dtype for it."""
        check(
            isinstance(name, str),
            "name",
            got=describe(name),
            want="the full name of a tensor",
            remedy="tensor_names lists them",
        )
        self._require(name in self._files, f"tensor {name}", "no such tensor", "a tensor's name")
        tensor = self._tensor(name)
        check(
            tensor.dtype in DTYPES,
            f"tensor {name}",
            got=tensor.dtype,
            want=" or ".join(DTYPES),
            remedy="read this one with the safetensors library",
        )
        return self._bytes(name).copy().view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    # Names and sizes

    def _scan(self):
        for name in self._files:
            if match := self._family.router.fullmatch(name):
                slots: dict[Any, str] = self._routers.setdefault(int(match["layer"]), {})
                key: Any = match["part"]
            elif self._family.shared and (match := self._family.shared.fullmatch(name)):
                slots = self._shared.setdefault(int(match["layer"]), {})
                key = (SHARED_PROJECTIONS[match["projection"]], PARTS[match["part"]])
            elif self._family.latent and (match := self._family.latent.fullmatch(name)):
                slots = self._latents.setdefault(int(match["layer"]), {})
                key = match["role"]
            elif match := self._family.experts.fullmatch(name):
                slots = self._experts.setdefault(int(match["layer"]), {})
                expert = -1 if self._family.stacked else int(match["expert"])
                role = self._family.projections[match["projection"]]
                key = (expert, role, self._family.parts[match["part"]])
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
        if not self._experts:
            self._refuse_names()

    def _refuse_names(self):
        """Says why nothing is an expert: another format, or other names."""
        like = [name for name in self._files if "expert" in name]
        method = str(self._quantization.get("quant_method", "")).lower()
        packed = [name for name in like if name.endswith(".qweight")]
        formats = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes"}
        kind = formats.get(method)
        if kind is None and packed:
            kind = "GPTQ" if any(name.endswith(".g_idx") for name in like) else "AWQ"
        check(
            kind is None,
            str(self.path),
            got=f"experts in {kind}, such as {(packed or like or ['none'])[0]}",
            want=" or ".join(map(str, self._family.formats)),
            remedy="its 4-bit integers have no exact FP4 form: load a release of the model in one "
            "of these formats, or widen the weights and call jax_megamoe.quantize_weights",
        )
        self._require(
            False,
            str(self.path),
            "no tensor that is named like an expert" + (f", but {like[0]}" if like else ""),
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
        size = entry(self.model_config, *keys)
        good = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(
            good,
            f"config.json: {' or '.join(keys)}",
            got=repr(size),
            want="a positive int",
            remedy=AGAIN,
        )
        return size

    def _roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._family.projections.values()))

    def _keys(self, expert: int) -> list[tuple[int, str, str]]:
        expert = -1 if self._family.stacked else expert
        return [(expert, role, part) for role in self._roles() for part in ("values", "scales")]

    def _layer(self, layer: int) -> dict[tuple[int, str, str], str]:
        number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        check(
            number and layer in self._experts,
            "layer",
            got=layer if number else describe(layer),
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
        try:
            ids = list(map(_index, range(self._num_experts) if experts is None else experts))
            got = _ranges(ids) if ids else "none"
        except TypeError:  # no sequence, or not of integers
            ids, got = [], describe(experts)
        check(
            0 < len(ids) == len(set(ids)) and 0 <= min(ids) and max(ids) < self._num_experts,
            "experts",
            got=got,
            want=f"different ids from 0 to {self._num_experts - 1}",
            remedy="pass range(first, last + 1), a list such as [0], or None for all",
        )
        return ids

    # Bytes

    def _shard(self, name: str) -> Shard:
        file = self._files[name]
        if file not in self._shards:
            check(
                (self.path / file).is_file(),
                str(self.path / file),
                got="no such file",
                want=f"the shard that holds {name}, as the index says",
                remedy="download this shard too",
            )
            self._shards[file] = Shard(self.path / file)
        check(
            name in self._shards[file].tensors,
            f"tensor {name}",
            got=f"no such tensor in {file}",
            want="it there, as the index says",
            remedy="index and shards are of different revisions; download them again",
        )
        return self._shards[file]

    def _tensor(self, name: str) -> Tensor:
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

    def _stored(self, names: dict[tuple[int, str, str], str], expert: int) -> Stored:
        """How one expert is stored, from its first matrix: the others have to be alike."""
        values_key, scales_key = self._keys(expert)[:2]
        return self._format(names[values_key], names.get(scales_key), self._family.formats)

    def _format(self, values: str, scales: str | None, formats: tuple[Format, ...]) -> Stored:
        """Which of `formats` these tensors are stored in."""
        dtype = self._tensor(values).dtype
        scales_dtype = self._tensor(scales).dtype if scales else None
        for candidate in formats:
            if dtype in candidate.values and scales_dtype in (candidate.scales or (None,)):
                return Stored(candidate, dtype, scales_dtype)
        refuse(
            f"tensor {values}",
            got=spell_dtypes(dtype, scales_dtype),
            want=" or ".join(map(str, formats)),
            remedy=_REMEDIES.get((dtype, scales_dtype), _REMEDIES.get((dtype, None), ""))
            + "load a release of the model in one of these formats, or widen the weights and call "
            "jax_megamoe.quantize_weights",
        )

    def _matrix(
        self, names: dict[tuple[int, str, str], str], stored: Stored, expert: int, role: str
    ) -> Matrix:
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
        if stored.format is MXFP4:
            shape = (rows, columns // 2)
        elif stored.format is FP8:
            block = self._block()
            scales_shape = (-(-rows // block[0]), -(-columns // block[1]))
        if self._family.stacked:
            shape = (self._num_experts, *scales_shape, SF_GROUP // 2)
            scales_shape = (self._num_experts, *scales_shape)
        self._check_tensor(values, (stored.values,), shape)
        if scales is not None and stored.scales is not None:
            if stored.format is FP8:
                self._check_blocks(scales, (rows, columns), self._block())
            self._check_tensor(scales, (stored.scales,), scales_shape)
        return Matrix(values, scales, expert, rows, columns)

    def _check_blocks(self, name: str, shape: tuple[int, ...], block: tuple[int, int]) -> None:
        """Refuses scales of a matrix of FP8 that belong to larger parts of it than blocks."""
        tensor = self._tensor(name)
        if tensor.shape == tuple(-(-n // size) for n, size in zip(shape, block, strict=True)):
            return
        per = ""
        if math.prod(tensor.shape) == 1:
            per = "a scale per tensor"
        elif tensor.shape in ((shape[0],), (shape[0], 1)):
            per = "a scale per channel"
        check(
            not per,
            f"tensor {name}",
            got=f"{tensor.dtype}{list(tensor.shape)}: {per}",
            want=f"a scale per block of {block[0]} x {block[1]}",
            remedy="FP8 with a scale per tensor or channel is not supported: load a release with "
            "block scales or in BF16, or multiply the matrices by their scales, both from "
            "Checkpoint.tensor, and call jax_megamoe.quantize_weights",
        )

    def _mxfp4(self, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
        """Views of the codes [N, K/2] and the scales [N, K/32]."""
        assert matrix.scales is not None
        index = matrix.expert if self._family.stacked else None
        sf = self._bytes(matrix.scales, index).reshape(matrix.rows, -1)
        _check_scales(matrix.scales, matrix.expert, sf)
        return self._bytes(matrix.values, index).reshape(matrix.rows, -1), sf

    def _rounded(self, matrix: Matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes [N, K/2], scales [N, K/32], sums of squares of the error and of the values."""
        scale = None if matrix.scales is None else self._scale(matrix.scales, matrix.expert)
        result = _round_to_mxfp4(self.tensor(matrix.values), scale, self._block())
        packed, sf, error, norm = map(np.asarray, result)
        check(
            not np.any(sf == quantize.UE8M0_NAN),
            f"tensor {matrix.values}",
            got="a NaN or an infinity",
            want="finite weights",
            remedy=AGAIN,
        )
        return packed, sf, np.array([error, norm], np.float64)

    def _scale(self, name: str, expert: int | None = None) -> np.ndarray:
        """Scales of FP8 blocks, in float32."""
        scale = self.tensor(name)
        if scale.dtype == ml_dtypes.float8_e8m0fnu:
            _check_scales(name, expert, scale.view(np.uint8))
        scale = scale.astype(np.float32)
        bad = np.count_nonzero(~np.isfinite(scale))
        check(
            bad == 0,
            f"tensor {name}",
            got=f"a NaN or an infinity ({bad} of {scale.size})",
            want="finite scales",
            remedy=AGAIN,
        )
        return scale

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
            remedy="FP8 with a scale per tensor or channel is not supported; load a release with "
            "block scales or in BF16",
        )
        return block[0], block[1]


def _check_scales(name: str, expert: int | None, sf: np.ndarray) -> None:
    bad = sf == quantize.UE8M0_NAN
    if not bad.any():
        return
    row, group = np.unravel_index(np.argmax(bad), bad.shape)
    of_expert = "" if expert is None else f", expert {expert}"
    refuse(
        f"tensor {name}{of_expert}, row {row}, block {group}",
        got=f"scale byte {quantize.UE8M0_NAN}, a NaN ({np.count_nonzero(bad)} of {bad.size})",
        want="finite scales",
        remedy=AGAIN,
    )


def _widen(matrix, scale, block):
    """[N, K] of a float dtype, times scales per block if there are any, in float32."""
    values = matrix.astype(jnp.float32)
    if scale is not None:
        rows, columns = matrix.shape
        scale = jnp.repeat(scale, block[0], axis=0)[:rows]
        values = values * jnp.repeat(scale, block[1], axis=1)[:, :columns]
    return values


@functools.partial(jax.jit, static_argnames="block")
def _widen_to_bf16(matrix, scale, block):
    return _widen(matrix, scale, block).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="block")
def _round_to_mxfp4(matrix, scale, block):
    """[N, K] of a float dtype, times scales per block [ceil(N/b0), ceil(K/b1)] if there are any
    -> packed [N, K/2], scales [N, K/32], sum of squares of the error and of the values."""
    values = _widen(matrix, scale, block)
    codes, sf = quantize.quantize_e2m1(values)
    error = quantize.dequantize_e2m1(codes, sf) - values
    return quantize.pack_e2m1(codes), sf, jnp.sum(error**2), jnp.sum(values**2)


def _index(number: Any) -> int:
    """An int, of Python or numpy; not a bool or a float that would be rounded."""
    if isinstance(number, (bool, np.bool_)):
        raise TypeError
    return operator.index(number)


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
