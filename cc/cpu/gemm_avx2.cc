// Compiled with -mavx2 -mfma, see gemm_kernel.h.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

namespace jax_megamoe::cpu {
namespace {

struct Lanes {
  using Vec = __m256;
  static constexpr uint32_t kLanes = 8;
  // 6 rows times two vectors are 12 sums; two columns and a broadcast make 15 of 16 registers.
  static constexpr uint32_t kTilePanels = 1;
  static constexpr uint32_t kFusedVecs = 8;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec multiply(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static void widen(const uint8_t* codes, Vec (&low)[2], Vec (&high)[2]) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, nibble));
    const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    low[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(even));
    low[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(even, even)));
    high[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(odd));
    high[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(odd, odd)));
  }
};

}  // namespace
}  // namespace jax_megamoe::cpu

#define JMM_TILE_ROWS 6
#define JMM_SECTION "jmm_gemm_avx2"
#include "cpu/gemm_kernel.h"

namespace jax_megamoe::cpu {
const Kernels kAvx2Kernels = {&multiply_all, &widen_all};
}  // namespace jax_megamoe::cpu

#endif
