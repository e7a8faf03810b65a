// Compiled with -ffp-contract=fast: accumulation uses fused multiply-add where the machine has it.
#include "cpu/gemm.h"

#include <cstring>

#include "protocol/numerics.h"

namespace jax_megamoe::cpu {
namespace {

// K is cut into chunks of 256: a widened panel chunk (16 KiB) stays in the first-level cache, and
// summing chunk by chunk keeps the rounding error of a long K near that of a short one.
constexpr uint32_t kChunk = 256;

typedef float Float16 __attribute__((vector_size(64)));
typedef int8_t Byte16 __attribute__((vector_size(16)));

constexpr Byte16 kE2m1Doubled = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#define JMM_INLINE inline __attribute__((always_inline))

JMM_INLINE Float16 e2m1_to_float(Byte16 codes) {
#if defined(__clang__)
  Byte16 values;
  for (uint32_t i = 0; i < kPanel; ++i) values[i] = kE2m1Doubled[codes[i]];
#else
  const Byte16 values = __builtin_shuffle(kE2m1Doubled, codes);
#endif
  return __builtin_convertvector(values, Float16);
}

// Widens columns [k0, k0 + length) of one panel to weights[length][16].
JMM_INLINE void widen_panel(const uint8_t* panel, const uint8_t* panel_sf, uint32_t k0,
                            uint32_t length, float* weights) {
  for (uint32_t group = 0; group < length / kSfGroup; ++group) {
    float scale[kPanel];
    const uint8_t* sf = panel_sf + (k0 / kSfGroup + group) * kPanel;
    // Codes are widened to twice their value, so scales are halved: exact down to byte 0 (2^-128).
    for (uint32_t i = 0; i < kPanel; ++i) scale[i] = 0.5f * ue8m0_to_float(sf[i]);
    Float16 scales;
    std::memcpy(&scales, scale, sizeof(scales));
    const uint8_t* pairs = panel + (k0 + group * kSfGroup) / 2 * kPanel;
    float* out = weights + group * kSfGroup * kPanel;
    for (uint32_t pair = 0; pair < kSfGroup / 2; ++pair) {
      Byte16 bytes;
      std::memcpy(&bytes, pairs + pair * kPanel, sizeof(bytes));
      const Byte16 low = bytes & 15;
      const Byte16 high = (bytes >> 4) & 15;
      const Float16 even = e2m1_to_float(low) * scales;
      const Float16 odd = e2m1_to_float(high) * scales;
      std::memcpy(out + 2 * pair * kPanel, &even, sizeof(even));
      std::memcpy(out + (2 * pair + 1) * kPanel, &odd, sizeof(odd));
    }
  }
}

template <uint32_t kRows>
JMM_INLINE void multiply_tile(const float* rows, uint32_t row_stride, uint32_t length,
                              const float* weights, float* out, uint32_t out_stride) {
  Float16 sum[kRows] = {};
  for (uint32_t k = 0; k < length; ++k) {
    Float16 column;
    std::memcpy(&column, weights + k * kPanel, sizeof(column));
    for (uint32_t i = 0; i < kRows; ++i) sum[i] += rows[i * row_stride + k] * column;
  }
  for (uint32_t i = 0; i < kRows; ++i) {
    Float16 total;
    std::memcpy(&total, out + i * out_stride, sizeof(total));
    total += sum[i];
    std::memcpy(out + i * out_stride, &total, sizeof(total));
  }
}

template <uint32_t kRows>
JMM_INLINE void multiply_all(const float* rows, uint32_t num_rows, uint32_t k,
                             const uint8_t* panels, const uint8_t* panels_sf, uint32_t num_panels,
                             float* out, float* weights) {
  const uint32_t out_stride = num_panels * kPanel;
  std::memset(out, 0, sizeof(float) * num_rows * out_stride);
  for (uint32_t k0 = 0; k0 < k; k0 += kChunk) {
    const uint32_t length = min_of(kChunk, k - k0);
    for (uint32_t panel = 0; panel < num_panels; ++panel) {
      widen_panel(panels + uint64_t{panel} * (k / 2) * kPanel,
                  panels_sf + uint64_t{panel} * (k / kSfGroup) * kPanel, k0, length, weights);
      uint32_t row = 0;
      for (; row + kRows <= num_rows; row += kRows) {
        multiply_tile<kRows>(rows + uint64_t{row} * k + k0, k, length, weights,
                             out + row * out_stride + panel * kPanel, out_stride);
      }
      for (; row < num_rows; ++row) {
        multiply_tile<1>(rows + uint64_t{row} * k + k0, k, length, weights,
                         out + row * out_stride + panel * kPanel, out_stride);
      }
    }
  }
}

#define JMM_MULTIPLY_ARGS                                                  \
  const float *rows, uint32_t num_rows, uint32_t k, const uint8_t *panels, \
      const uint8_t *panels_sf, uint32_t num_panels, float *out, float *weights
using MultiplyFn = void (*)(JMM_MULTIPLY_ARGS);

// Tile heights: one accumulator vector a row, as many rows as the registers hold beside a column.
void multiply_portable(JMM_MULTIPLY_ARGS) {
  multiply_all<2>(rows, num_rows, k, panels, panels_sf, num_panels, out, weights);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_avx2(JMM_MULTIPLY_ARGS) {
  multiply_all<6>(rows, num_rows, k, panels, panels_sf, num_panels, out, weights);
}
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) void multiply_avx512(
    JMM_MULTIPLY_ARGS) {
  multiply_all<14>(rows, num_rows, k, panels, panels_sf, num_panels, out, weights);
}
#endif

MultiplyFn multiply_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return multiply_avx512;
  if (isa == Isa::kAvx2) return multiply_avx2;
#endif
  return isa == Isa::kPortable ? multiply_portable : nullptr;
}

struct E4m3Table {
  float values[256];
  E4m3Table() {
    for (uint32_t code = 0; code < 256; ++code) {
      values[code] = e4m3_to_float(static_cast<uint8_t>(code));
    }
  }
};

}  // namespace

bool supports(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
  }
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::kPortable;
}

Isa best_isa() {
  static const Isa best = supports(Isa::kAvx512) ? Isa::kAvx512
                          : supports(Isa::kAvx2) ? Isa::kAvx2
                                                 : Isa::kPortable;
  return best;
}

void widen_rows(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k,
                float* out) {
  static const E4m3Table table;
  const uint64_t num_groups = uint64_t{num_rows} * k / kSfGroup;
  for (uint64_t group = 0; group < num_groups; ++group) {
    const float scale = ue8m0_to_float(sf[group]);
    for (uint32_t i = 0; i < kSfGroup; ++i) {
      out[group * kSfGroup + i] = table.values[codes[group * kSfGroup + i]] * scale;
    }
  }
}

void multiply_panels(const float* rows, uint32_t num_rows, uint32_t k, const uint8_t* panels,
                     const uint8_t* panels_sf, uint32_t num_panels, float* out,
                     std::vector<float>& scratch, Isa isa) {
  scratch.resize(kChunk * kPanel);
  multiply_for(isa)(rows, num_rows, k, panels, panels_sf, num_panels, out, scratch.data());
}

}  // namespace jax_megamoe::cpu
