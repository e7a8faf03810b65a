// For processors of which only the architecture's baseline is known. Four floats side by side are
// one register nearly everywhere; products and sums are rounded apart.
#include <cstdint>
#include <cstring>

namespace jax_megamoe::cpu {
namespace {

struct Lanes {
  typedef float Vec __attribute__((vector_size(16)));
  static constexpr uint32_t kLanes = 4;
  // 2 rows times four vectors are 8 sums, of the 16 registers of x86-64.
  static constexpr uint32_t kTilePanels = 1;
  static constexpr uint32_t kFusedVecs = 0;

  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
  static Vec broadcast(const float* p) { return Vec{*p, *p, *p, *p}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec multiply(Vec a, Vec b) { return a * b; }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
  static void widen(const uint8_t* codes, Vec (&low)[4], Vec (&high)[4]) {
    static constexpr float kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (uint32_t v = 0; v < 4; ++v) {
      const uint8_t* bytes = codes + 4 * v;
      low[v] = Vec{kDoubled[bytes[0] & 15], kDoubled[bytes[1] & 15], kDoubled[bytes[2] & 15],
                   kDoubled[bytes[3] & 15]};
      high[v] = Vec{kDoubled[bytes[0] >> 4], kDoubled[bytes[1] >> 4], kDoubled[bytes[2] >> 4],
                    kDoubled[bytes[3] >> 4]};
    }
  }
};

}  // namespace
}  // namespace jax_megamoe::cpu

#define JMM_TILE_ROWS 2
#define JMM_SECTION "jmm_gemm_port"
#include "cpu/gemm_kernel.h"

namespace jax_megamoe::cpu {
const Kernels kPortableKernels = {&multiply_all, &widen_all};
}  // namespace jax_megamoe::cpu
