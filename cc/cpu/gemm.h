// gemm.h: the arithmetic both linears share: FP8 rows times FP4 weight panels, accumulated in FP32.
#pragma once

#include <cstdint>

namespace jax_megamoe::cpu {

inline constexpr uint32_t kPanel = 16;       // weight rows side by side in the CPU weight layout
inline constexpr uint32_t kRowSegment = 16;  // elements of a widened row side by side: a cache line

// K is cut into chunks of 256: a widened panel's chunk (16 KiB) stays in the first-level cache, and
// summing chunk by chunk keeps the rounding error of a long K near that of a short one.
inline constexpr uint32_t kChunk = 256;
inline constexpr uint32_t kScratchFloats = (2 * kChunk + 1) * kPanel;  // of multiply_panels()

// Where element k of a row is in a block of `num_rows` widened rows, [K/16][num_rows][16]. Rows
// that are a power of two apart would compete for a few lines of the cache. Not inline: this
// header is compiled for several instruction sets, and a copy must not be shared.
static constexpr uint64_t row_offset(uint32_t num_rows, uint32_t row, uint32_t k) {
  return (uint64_t{k} / kRowSegment * num_rows + row) * kRowSegment + k % kRowSegment;
}

// Instruction sets, the better ones of a machine last.
enum class Isa : uint32_t { kPortable, kNeon, kAvx2, kAvx512 };
inline constexpr uint32_t kNumIsas = 4;
inline constexpr const char* kIsaNames[kNumIsas] = {"portable", "neon", "avx2", "avx512"};

bool supports(Isa isa);

// What calls use: the best one of this machine, or the one that JAX_MEGAMOE_CPU_ISA names. That is
// read once; a name that does not exist or that this machine does not support throws
// std::invalid_argument, in every call.
Isa selected_isa();

// Widens `num_rows` FP8 rows of `k` elements to FP32, scales applied: out * unit of the row, where
// the unit is 1 unless the row has scales so large that its values could leave FP32's range. `out`:
// see row_offset(); units[num_rows].
void widen_rows(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k, float* out,
                float* units, Isa isa = selected_isa());

struct PanelProduct {
  const float* rows;       // what widen_rows() wrote
  const float* row_units;  // likewise
  uint32_t num_rows;
  uint32_t k;                // a multiple of 32
  const uint8_t* panels;     // [num_panels][k/2][16] E2M1 pairs
  const uint8_t* panels_sf;  // [num_panels][k/32][16] UE8M0
  uint32_t num_panels;
  float* out;      // [num_rows][num_panels * 16]
  float* scratch;  // [kScratchFloats]
};

// out = rows * panels^T. No product and no sum is infinite on the way unless it is 2^118 times what
// FP32 holds. A row's result depends on that row and the weights alone, not on its
// position or on its neighbours, nor on `isa` as long as all products are normal FP32 numbers.
void multiply_panels(const PanelProduct& product, Isa isa = selected_isa());

// One pair of functions per instruction set, in gemm_<isa>.cc.
struct Kernels {
  void (*multiply)(const PanelProduct&);
  void (*widen_rows)(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k,
                     float* out, float* units);
};
extern const Kernels kPortableKernels;
#if defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace jax_megamoe::cpu
