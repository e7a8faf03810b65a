"""What a compiled kernel needs of a GPU, read from its machine code: an ELF file with notes.

The compiler's log says the same and more, but only if it was asked to and only in words.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

__all__ = ["KernelNeeds", "read_needs"]

#: Attributes of a function in .nv.info: registers, bytes of local memory of the function alone, and
#: with what it calls. Each value is a pair (index of the function's symbol, number).
_REGISTERS, _FRAME_BYTES, _STACK_BYTES = 0x2F, 0x11, 0x12
#: Formats of an attribute: with a size and that many bytes behind it. Others hold two bytes.
_SIZED = 0x04
_NO_BITS = 8  # type of a section without contents in the file


@dataclasses.dataclass(frozen=True)
class KernelNeeds:
    """Attributes:
    registers: per thread at the start of the kernel.
    local_bytes: local memory per thread: spilled registers, and arrays that no register can hold.
    words: 32-bit constants of device memory by name, of the names that were asked for.
    """

    registers: int
    local_bytes: int
    words: dict[str, int]


_SECTION = struct.Struct("<IIQQQQIIQQ")
_SECTION_FIELDS = ("name", "type", "flags", "address", "offset", "size", "link", "info")
_SYMBOL = struct.Struct("<IBBHQQ")


def read_needs(cubin: bytes, words: tuple[str, ...] = ()) -> KernelNeeds:
    """Reads the needs of the kernels in `cubin`, the largest of each.

    Raises:
      ValueError: not an ELF file of NVIDIA machine code.
    """
    try:
        return _read_needs(cubin, words)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"jax_megamoe: cubin: {error}") from error


def _read_needs(cubin, words):
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("jax_megamoe: cubin: not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    each, count, names_idx = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [
        dict(zip(_SECTION_FIELDS, _SECTION.unpack_from(cubin, table + i * each), strict=False))
        for i in range(count)
    ]
    by_name = {_text(cubin, sections[names_idx], section["name"]): section for section in sections}
    numbers: dict[int, list[int]] = {_REGISTERS: [], _FRAME_BYTES: [], _STACK_BYTES: []}
    for attribute, value in _attributes(_contents(cubin, by_name[".nv.info"])):
        if attribute in numbers:
            numbers[attribute].append(struct.unpack("<II", value)[1])
    return KernelNeeds(
        registers=max(numbers[_REGISTERS]),
        local_bytes=max(*numbers[_FRAME_BYTES], *numbers[_STACK_BYTES], 0),
        words=_words(cubin, sections, by_name[".symtab"], words),
    )


def _contents(cubin, section) -> bytes:
    return cubin[section["offset"] : section["offset"] + section["size"]]


def _text(cubin, section, offset) -> str:
    start = section["offset"] + offset
    return cubin[start : cubin.index(b"\0", start)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _SIZED:
            yield attribute, info[at : at + size]
            at += size


def _words(cubin, sections, symbols, wanted) -> dict[str, int]:
    found = {}
    for entry in _SYMBOL.iter_unpack(_contents(cubin, symbols)):
        name_offset, _, _, section_idx, value, size = entry
        name = _text(cubin, sections[symbols["link"]], name_offset)
        if name in wanted and size == 4 and sections[section_idx]["type"] != _NO_BITS:
            at = sections[section_idx]["offset"] + value
            (found[name],) = struct.unpack_from("<I", cubin, at)
    return found
