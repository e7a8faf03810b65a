"""The kernels' headers: cc/protocol compiles as device code for both GPU architectures, without a
GPU; the package has them; and the numbers that `compile` reads out of machine code are right."""

import ctypes
import pathlib
import re
import subprocess
import sys

import pytest

from jax_megamoe import _headers
from jax_megamoe._ffi import native
from jax_megamoe.cli import cubin
from jax_megamoe.errors import MegaMoEError

HEADERS = pathlib.Path(__file__).parent.parent / "cc"
SOURCE = """
#include "protocol/activation.h"
#include "protocol/dispatch_order.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"
#include "protocol/scheduler.h"
#include "protocol/workspace.h"

using namespace jax_megamoe;

struct Activate {
  const float* values;
  const ActivationParams& params;
  template <Activation A>
  __device__ float operator()() const {
    return activate<A>(values[0], values[1], values[2], params);
  }
};

extern "C" __global__ void use_everything(MoeShape shape, const uint32_t* rows, char* base,
                                          float* values) {
  const auto rows_of = [&](uint32_t expert) { return rows[expert]; };
  const WorkspaceLayout layout(shape);
  uint32_t* arrival = layout.ptr<Region::l1_arrival>(base);
  for_each_block(shape, {1, 1}, blockIdx.x, gridDim.x, rows_of, [&](const Block& block) {
    const RingPosition ring = ring_position(shape, block.pool_block);
    arrival[ring.slot] = l1_arrival_target(shape, ring.lap);
    const SourceRow source = locate_source_row(shape.num_ranks, block.valid_m, rows_of);
    const ActivationParams params = {values[3], values[4], values[5], values[6]};
    const Activation activation = static_cast<Activation>(rows[0]);
    values[source.index] = with_activation(activation, Activate{values, params});
    uint8_t codes[kSfGroup];
    const uint8_t sf = quantize_group_e4m3(values, codes);
    values[source.rank] = e4m3_to_float(codes[0]) * ue8m0_to_float(sf);
    return true;
  });
  const auto start_of = [&](uint32_t expert) { return rows[expert]; };
  BlockWalk walk(shape, gridDim.x, 2, 3, start_of, rows_of);
  uint32_t* next_item = layout.ptr<Region::next_item>(base);
  Block block;
  while (walk.find(atomicAdd(next_item, 1), &block)) values[block.pool_block] = block.valid_m;
  const uint64_t word = *layout.ptr<Region::expert_recv_count>(base);
  if (reached(word, published_count(block.n_block, 0))) values[0] = count_rows(word);
}
"""


def compile_to(kind, nvrtc, source, options):
    """(PTX or CUBIN bytes, log)."""
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    args = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(options), args)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, code)
    return code.raw, log.value.decode()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_protocol_compiles_for(nvrtc, arch):
    compute = arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={compute}", "-std=c++20", f"-I{HEADERS}"]
    ptx = compile_to("PTX", ctypes.CDLL(nvrtc), SOURCE, options)[0].decode()
    assert re.search(rf"\.target {arch}", ptx) and "use_everything" in ptx


def test_package_has_the_headers():
    """Also where it was installed: all of them, and the same."""
    folder = _headers.include_dir()
    for name in _headers.FOLDERS:
        mine = {path.name: path.read_text() for path in (HEADERS / name).glob("*.h")}
        assert mine == {path.name: path.read_text() for path in (folder / name).glob("*.h")}
        assert mine


def test_generated_header_has_not_drifted():
    command = [sys.executable, str(HEADERS / "gpu/sm90/wgmma_gen.py")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (HEADERS / "gpu/sm90/wgmma.h").read_text() == text, (
        "write it again: python cc/gpu/sm90/wgmma_gen.py > cc/gpu/sm90/wgmma.h"
    )


INCLUDES = {"interface": {"interface"}, "common": {"interface", "common"}}


def forbidden_includes(cc):
    """Lines of cc/gpu that include what their folder may not see.

    An architecture's folder sees itself and what is in INCLUDES; every file sees cc/protocol.
    """
    folders = {path.name for path in (cc / "gpu").iterdir() if path.is_dir()}
    found = []
    for path in sorted((cc / "gpu").rglob("*.h")):
        folder = path.relative_to(cc / "gpu").parts[0]
        may_see = INCLUDES.get(folder, {*INCLUDES, folder}) & folders
        for line in path.read_text().splitlines():
            included = re.match(r'\s*#\s*include\s*["<](.*)[">]', line)
            if included and not re.match(rf"protocol/|gpu/({'|'.join(may_see)})/", included[1]):
                found.append(f"{path.relative_to(cc)}: {line.strip()}")
    return found


def test_shared_headers_include_no_architecture():
    assert forbidden_includes(HEADERS) == []
    for folder in INCLUDES:
        assert any((HEADERS / "gpu" / folder).glob("*.h"))
    assert list((HEADERS / "gpu").glob("*.h")) == []  # each file has a folder


@pytest.mark.parametrize(
    "folder, header, allowed",
    [
        ("interface", "gpu/interface/roles.h", True),
        ("interface", "gpu/common/wait.h", False),
        ("interface", "gpu/sm90/tuning.h", False),
        ("common", "gpu/interface/roles.h", True),
        ("common", "protocol/ring.h", True),
        ("common", "gpu/sm90/plan.h", False),
        ("common", "../sm90/plan.h", False),
        ("common", "plan.h", False),
        ("common", "cuda/driver.h", False),
        ("sm90", "gpu/common/wait.h", True),
        ("sm90", "gpu/sm90/plan.h", True),
        ("sm90", "gpu/sm100/plan.h", False),
        ("sm100", "gpu/sm90/plan.h", False),
    ],
)
def test_a_forbidden_include_is_found(tmp_path, folder, header, allowed):
    for name in ("interface", "common", "sm90", "sm100"):
        (tmp_path / "gpu" / name).mkdir(parents=True)
    line = f'#include "{header}"'
    (tmp_path / "gpu" / folder / "new.h").write_text(f"#pragma once\n{line}\n")
    assert forbidden_includes(tmp_path) == ([] if allowed else [f"gpu/{folder}/new.h: {line}"])


CALLERS = (
    *("one thread", "one thread of the leader", "one warp", "one warp of the leader"),
    *("all threads of a CTA", "all threads of the leader", "all threads of a math warpgroup"),
    *("all math threads of a CTA", "all producer threads of a CTA"),
    *("all producer threads of the leader", "any number of threads"),
)
COOPERATES = re.compile(r"__(syncthreads|syncwarp|\w+_sync)\(|named_barrier_(sync|or)\(")


def functions_without_caller(text):
    """Heads of device functions whose threads wait for each other, but whose comment has no last
    line that says which threads have to call them."""
    lines, found = text.splitlines(), []
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*JMM_DEVICE ", line)]
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=False):
        above = head - 1
        while lines[above].strip().startswith("template"):
            above -= 1
        caller = re.fullmatch(r"\s*// Caller: (.*)\.", lines[above])
        if COOPERATES.search("\n".join(lines[head:end])) and not (caller and caller[1] in CALLERS):
            found.append(lines[head].strip())
    return found


def test_device_functions_say_who_calls_them():
    for path in sorted([*HEADERS.glob("gpu/common/*.h"), *HEADERS.glob("gpu/sm*/*.h")]):
        text = path.read_text()
        if path.name != "ptx.h":  # one instruction each
            assert functions_without_caller(text) == [], path
        for line in text.splitlines():
            if "Caller:" in line:
                caller = re.fullmatch(r"\s*// Caller: (.*)\.", line)
                assert caller and caller[1] in CALLERS, (path, line)


def test_a_missing_caller_is_found():
    body = "JMM_DEVICE void meet() {\n  __syncwarp();\n}\n"
    assert functions_without_caller(f"// Caller: one warp.\n{body}") == []
    assert functions_without_caller(f"// Caller: one warp.\ntemplate <int N>\n{body}") == []
    for comment in ("", "// They meet.", "// Caller: someone.", "// They meet. Caller: one warp."):
        assert functions_without_caller(f"{comment}\n{body}") == ["JMM_DEVICE void meet() {"]
    assert functions_without_caller("\nJMM_DEVICE int one() { return 1; }") == []


def test_missing_headers_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "package" / "_native.so"))
    with pytest.raises(MegaMoEError, match=r"kernel headers: got none in .*Install jax_megamoe"):
        _headers.include_dir()
    for name in _headers.FOLDERS:  # next to the module, or in the checkout around it
        (tmp_path / "cc" / name).mkdir(parents=True)
        (tmp_path / "cc" / name / "one.h").touch()
    assert _headers.include_dir() == tmp_path / "cc"
    for name in _headers.FOLDERS:
        (tmp_path / "package" / "cc" / name).mkdir(parents=True)
        (tmp_path / "package" / "cc" / name / "one.h").touch()
    assert _headers.include_dir() == tmp_path / "package" / "cc"


NEEDY_SOURCE = """
extern "C" __device__ const unsigned int some_word = 123456789;
extern "C" __device__ unsigned int cleared_word;

extern "C" __global__ void __launch_bounds__(256, 1) needy(float* p, int n) {
  float local[64];
  for (int i = 0; i < 64; ++i) local[i] = p[i];
  for (int i = 0; i < n; ++i) local[(i * n) % 64] += local[i % 64];
  for (int i = 0; i < 64; ++i) p[i] = local[i];
  cleared_word = some_word;
}
"""
PLAIN_SOURCE = 'extern "C" __global__ void plain(float* p) { p[threadIdx.x] = 1; }'


def test_needs_of_machine_code_are_those_of_the_log(nvrtc):
    library = ctypes.CDLL(nvrtc)
    options = ["--gpu-architecture=sm_90a", "--ptxas-options=-v"]
    code, log = compile_to("CUBIN", library, NEEDY_SOURCE, options)
    needs = cubin.read_needs(code, ("some_word", "cleared_word", "no_such_word"))
    assert needs.registers == int(re.search(r"Used (\d+) registers", log)[1])
    assert needs.local_bytes == int(re.search(r"(\d+) bytes stack frame", log)[1]) >= 256
    assert needs.words == {"some_word": 123456789}
    plain, log = compile_to("CUBIN", library, PLAIN_SOURCE, options)
    assert cubin.read_needs(plain).local_bytes == 0
    assert cubin.read_needs(plain).registers == int(re.search(r"Used (\d+) registers", log)[1])


@pytest.mark.parametrize("code", [b"", b"not machine code", b"\x7fELF\x02" + bytes(100)])
def test_other_files_have_no_needs(code):
    with pytest.raises(ValueError, match="jax_megamoe: cubin"):
        cubin.read_needs(code)
