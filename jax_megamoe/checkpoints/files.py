"""Safetensors files: what is in which, and their bytes.

The `safetensors` library checks each file. Its numpy interface has no FP8, E8M0 or BF16, so that
bytes are taken from the map, at the offsets that the file's header gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_megamoe.errors import check, refuse

__all__ = ["AGAIN", "DTYPES", "Shard", "Tensor", "check_no_pointer", "load_json", "tensor_files"]

DTYPES: dict[str, Any] = {
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

AGAIN = "download it again"
#: How a file begins that git-lfs has left in place of another one.
_LFS = b"version https://git-lfs.github.com/spec/"
#: Ends of names of weights in formats that are not read.
_OTHER_FILES = {".bin": "PyTorch", ".pth": "PyTorch", ".pt": "PyTorch", ".gguf": "GGUF"}


def check_no_pointer(start: bytes, where: Path) -> None:
    """Refuses what a clone without git-lfs has in place of a large file."""
    check(
        not start.startswith(_LFS),
        str(where),
        got="a git-lfs pointer: the text that stands for the file",
        want="the file itself",
        remedy="run `git lfs pull` in this directory, or download the model with huggingface_hub",
    )


def load_json(text: str | bytes, where: Path) -> dict[str, Any]:
    """A JSON object in which no key stands twice: a plain dict would keep the last one."""

    def unique(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            refuse(str(where), got=f"{twice!r} twice", want="every name once", remedy=AGAIN)
        return result

    check_no_pointer(text.encode() if isinstance(text, str) else text, where)
    try:
        result = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        result = error
    got = result if isinstance(result, Exception) else type(result).__name__
    check(isinstance(result, dict), str(where), got=got, want="a JSON object", remedy=AGAIN)
    return result


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


class Shard:
    """One safetensors file, mapped. `tensors` is its header."""

    def __init__(self, path: Path):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            refuse(
                "safetensors",
                got="no such module",
                want="safetensors 0.6 or newer",
                remedy="install it with pip install 'jax-megamoe[checkpoints]'",
            )
        with path.open("rb") as file:
            check_no_pointer(file.read(len(_LFS)), path)
        try:
            with safe_open(path, framework="np"):  # checks header, offsets and size
                pass
        except (SafetensorError, OSError) as error:
            refuse(str(path), got=str(error), want="a whole safetensors file", remedy=AGAIN)
        self.map = np.memmap(path, np.uint8, "r").view(np.ndarray)
        header_bytes = int.from_bytes(self.map[:8].tobytes(), "little")
        header = load_json(self.map[8 : 8 + header_bytes].tobytes(), path)
        header.pop("__metadata__", None)
        self.tensors = {
            name: Tensor(
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


def tensor_files(path: Path) -> dict[str, str]:
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
        weight_map = load_json(indices[0].read_bytes(), indices[0]).get("weight_map")
        good = isinstance(weight_map, dict) and all(
            isinstance(file, str) and file == Path(file).name for file in weight_map.values()
        )
        check(
            good,
            str(indices[0]),
            got="no usable weight_map",
            want="weight_map, an object of tensor names and names of files next to it",
            remedy=AGAIN,
        )
        return dict(weight_map or {})
    shards = sorted(path.glob("*.safetensors"))
    others = sorted(file for file in path.iterdir() if file.suffix in _OTHER_FILES)
    other = f", but {others[0].name} ({_OTHER_FILES[others[0].suffix]})" if others else ""
    check(
        bool(shards),
        str(path),
        got=f"no *.safetensors{other}",
        want="a directory with a checkpoint in safetensors files",
        remedy="download the safetensors files of the model, or save it as such with transformers"
        if others
        else "point to the directory that has config.json and the weights",
    )
    files: dict[str, str] = {}
    for shard in shards:
        for name in Shard(shard).tensors:
            check(
                name not in files,
                f"tensor {name}",
                got=f"it in {files.get(name)} and in {shard.name}, and there is no index file",
                want="every tensor once",
                remedy="keep the files of one checkpoint in a directory, with their index file",
            )
            files[name] = shard.name
    return files
