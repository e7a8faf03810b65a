// Compiled with -mavx512f and some more, see gemm_kernel.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

namespace jax_megamoe::cpu {
namespace {

struct Lanes {
  using Vec = __m512;
  static constexpr uint32_t kLanes = 16;
  // 12 rows times two panels are 24 sums; with two columns and broadcasts, 32 registers suffice.
  static constexpr uint32_t kTilePanels = 2;
  static constexpr uint32_t kFusedVecs = 14;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static void widen(const uint8_t* codes, Vec (&low)[1], Vec (&high)[1]) {
    // A permutation looks at the lowest four bits of each lane: the code is the index.
    const Vec table = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m512i pairs =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    low[0] = _mm512_permutexvar_ps(pairs, table);
    high[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
  }
};

}  // namespace
}  // namespace jax_megamoe::cpu

#define JMM_TILE_ROWS 12
#define JMM_SECTION "jmm_gemm_avx512"
#include "cpu/gemm_kernel.h"

namespace jax_megamoe::cpu {
const Kernels kAvx512Kernels = {&multiply_all, &widen_all};
}  // namespace jax_megamoe::cpu

#endif
