"""cc/protocol compiles as CUDA device code for both GPU architectures, without a GPU."""

import ctypes
import pathlib
import re

import pytest

HEADERS = pathlib.Path(__file__).parent.parent / "cc"
SOURCE = """
#include "protocol/dispatch_order.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"
#include "protocol/scheduler.h"
#include "protocol/workspace.h"

using namespace jax_megamoe;

extern "C" __global__ void use_everything(MoeShape shape, const uint32_t* rows, char* base,
                                          float* values) {
  const auto rows_of = [&](uint32_t expert) { return rows[expert]; };
  const WorkspaceLayout layout(shape);
  uint32_t* arrival = layout.ptr<Region::l1_arrival>(base);
  for_each_block(shape, blockIdx.x, gridDim.x, rows_of, [&](const Block& block) {
    const RingPosition ring = ring_position(shape, block.pool_block);
    arrival[ring.slot] = l1_arrival_target(shape, ring.lap);
    const SourceRow source = locate_source_row(shape.num_ranks, block.valid_m, rows_of);
    values[source.index] = swiglu(values[0], values[1], values[2], values[3]);
    uint8_t codes[kSfGroup];
    const uint8_t sf = quantize_group_e4m3(values, codes);
    values[source.rank] = e4m3_to_float(codes[0]) * ue8m0_to_float(sf);
    return true;
  });
}
"""


def find_nvrtc():
    spec = pytest.importorskip("nvidia", reason="NVRTC is not installed: pip install '.[dev]'")
    for folder in spec.__path__:
        found = sorted(pathlib.Path(folder).glob("**/libnvrtc.so*"))
        found = [path for path in found if "builtins" not in path.name]
        if found:
            return ctypes.CDLL(str(found[0]))
    pytest.skip("NVRTC is not installed: pip install '.[dev]'")


def compile_to_ptx(nvrtc, source, options):
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    args = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(options), args)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.value.decode()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_protocol_compiles_for(arch):
    compute = arch.replace("sm_", "compute_")
    options = [f"--gpu-architecture={compute}", "-std=c++20", f"-I{HEADERS}"]
    ptx = compile_to_ptx(find_nvrtc(), SOURCE, options)
    assert re.search(rf"\.target {arch}", ptx) and "use_everything" in ptx
