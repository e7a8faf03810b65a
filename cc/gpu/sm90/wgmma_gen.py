"""Writes wgmma.h: one function per instruction. `python3 wgmma_gen.py > wgmma.h`."""

SIZES = {
    "e4m3": (8, 16, 32, 48, 64, 96, 128, 192, 256),
    "bf16": (8, 16, 32, 48, 64, 128),
}
HEAD = """// wgmma.h: wgmma with A from registers, B from shared memory, FP32 sums.
// Written by wgmma_gen.py.
// clang-format off
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe::gpu {

// d += a * b, or d = a * b if not `accumulate`. a: the fragment of 64 rows; b: descriptor of N
// columns, K-major. Only the first N / 2 elements of d are touched.
"""


def function(kind, n):
    k, operand = (32, "e4m3") if kind == "e4m3" else (16, "bf16")
    count = n // 2
    placeholders = [f"%{i}" for i in range(count)]
    lines = [", ".join(placeholders[i : i + 16]) for i in range(0, count, 16)]
    listed = ',"\n               "'.join(lines)
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = [f'"+f"(d[{i}])' for i in range(count)]
    outs = ",\n                 ".join(", ".join(outputs[i : i + 6]) for i in range(0, count, 6))
    tail = ", p, 1, 1;" if kind == "e4m3" else ", p, 1, 1, 0;"
    return f'''
template <uint32_t Size>
__device__ __forceinline__ void wgmma_m64n{n}k{k}_{kind}(float (&d)[Size], const uint32_t (&a)[4],
                                                     uint64_t b, uint32_t accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{operand}.{operand} {{"
               "{listed}}}, "
               "{{{a}}}, %{count + 4}{tail}\\n}}\\n"
               : {outs}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}
'''


def dispatch(kind, sizes):
    k = 32 if kind == "e4m3" else 16
    branches = "\n  else ".join(
        f"if constexpr (N == {n}) wgmma_m64n{n}k{k}_{kind}(d, a, b, accumulate);" for n in sizes
    )
    known = " || ".join(f"N == {n}" for n in sizes)
    return f"""
template <uint32_t N, uint32_t Size>
__device__ __forceinline__ void wgmma_{kind}(float (&d)[Size], const uint32_t (&a)[4], uint64_t b,
                                           uint32_t accumulate) {{
  static_assert(({known}) && Size >= N / 2);
  {branches}
}}
"""


def main():
    text = HEAD
    for kind, sizes in SIZES.items():
        text += "".join(function(kind, n) for n in sizes) + dispatch(kind, sizes)
    print(text + "\n}  // namespace jax_megamoe::gpu")


if __name__ == "__main__":
    main()
