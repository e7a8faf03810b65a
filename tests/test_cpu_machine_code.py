"""The innermost loops of the CPU back end's products keep all their sums in registers.

The kernels stand in sections of their own in the native module, one for each instruction set, so
that they are found in a stripped module too.
"""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jax_megamoe import _native

#: Section of each instruction set, and what multiplies and adds in it. A tile has two sums or more.
SECTIONS = {
    "avx512": ("jmm_gemm_avx512", r"vfmadd\d+ps"),
    "avx2": ("jmm_gemm_avx2", r"vfmadd\d+ps"),
    "neon": ("jmm_gemm_neon", r"fmla"),
    "portable": ("jmm_gemm_port", r"addps|fadd"),
}
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_TARGET = re.compile(r"^(?:[^,]+,\s*)*(?:0x)?([0-9a-f]+)(?:\s+<.*>)?$")
_JUMP = re.compile(r"^(j[a-z]+|b|b\.[a-z]+|cbn?z|tbn?z)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str


def disassemble(module: pathlib.Path, section: str) -> list[Instruction]:
    syntax = ["-M", "intel"] if _native.cpu_isas()[-1] != "neon" else []
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", section, *syntax, str(module)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text)


def parse(text: str) -> list[Instruction]:
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line.partition("//")[0].rstrip()):
            found.append(Instruction(int(match[1], 16), match[2], match[3].strip()))
    return found


def innermost_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Ranges from the target of a backward jump to the jump, without another such range inside."""
    position = {instruction.address: i for i, instruction in enumerate(code)}
    ranges = []
    for i, instruction in enumerate(code):
        if not _JUMP.match(instruction.name):
            continue
        target = _TARGET.match(instruction.operands)
        start = position.get(int(target[1], 16)) if target else None
        if start is not None and start <= i:
            ranges.append((start, i))
    inner = [
        (start, end)
        for start, end in ranges
        if not any(
            (start, end) != other and start <= other[0] and other[1] <= end for other in ranges
        )
    ]
    return [code[start : end + 1] for start, end in inner]


def stack_accesses(loop: list[Instruction], frame_pointer: bool) -> list[Instruction]:
    names = r"rsp|esp|sp|x29" + (r"|rbp" if frame_pointer else "")
    memory = re.compile(rf"\[[^\]]*\b(?:{names})\b")
    return [
        instruction
        for instruction in loop
        if memory.search(instruction.operands) or instruction.name in ("push", "pop")
    ]


def loops_with_products(code: list[Instruction], product: str) -> list[list[Instruction]]:
    def has_products(loop):
        return sum(bool(re.fullmatch(product, instruction.name)) for instruction in loop) >= 2

    return [loop for loop in innermost_loops(code) if has_products(loop)]


def uses_frame_pointer(code: list[Instruction]) -> bool:
    """Whether rbp points into the stack somewhere; elsewhere it is a register like others."""
    return any(i.name == "mov" and i.operands.replace(" ", "") == "rbp,rsp" for i in code)


def faults(code: list[Instruction], product: str) -> list[str]:
    frame_pointer = uses_frame_pointer(code)
    return [
        f"{access.address:x}: {access.name} {access.operands}"
        for loop in loops_with_products(code, product)
        for access in stack_accesses(loop, frame_pointer)
    ]


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("objdump") is None,
    reason="reads an ELF module with objdump, of the package binutils",
)
@pytest.mark.parametrize("isa", _native.cpu_isas())
def test_no_inner_loop_touches_the_stack(isa):
    section, product = SECTIONS[isa]
    code = disassemble(pathlib.Path(_native.__file__), section)
    # One loop per height of a tile at the least: none found would pass for none at fault.
    heights = {"avx512": 12, "avx2": 6, "neon": 5, "portable": 2}[isa]
    assert len(loops_with_products(code, product)) >= heights
    assert faults(code, product) == []


#: What GCC made of sums in an array whose indices were not constants early enough.
_SPILLING = """
0000000000000000 <tile>:
       0:\tpush   rbp
       1:\tmov    rbp,rsp
      10:\tvbroadcastss ymm14,DWORD PTR [rax]
      15:\tvfmadd231ps ymm2,ymm14,ymm1
      1a:\tvfmadd231ps ymm3,ymm14,ymm0
      1f:\tvmovaps YMMWORD PTR [{place}],ymm2
      25:\tadd    rax,0x4
      29:\tcmp    rdx,rax
      2c:\tjne    10 <tile+0x10>
      2e:\tret
"""


@pytest.mark.parametrize("place", ["rsp-0x78", "rbp-0x20", "rsp+rax*1+0x8"])
def test_a_sum_on_the_stack_is_found(place):
    assert len(faults(parse(_SPILLING.format(place=place)), SECTIONS["avx2"][1])) == 1
    assert faults(parse(_SPILLING.format(place="rcx")), SECTIONS["avx2"][1]) == []
