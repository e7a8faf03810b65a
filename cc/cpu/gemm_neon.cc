// Every aarch64 processor has NEON with fused multiply-add, so this needs no options.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>

namespace jax_megamoe::cpu {
namespace {

struct Lanes {
  using Vec = float32x4_t;
  static constexpr uint32_t kLanes = 4;
  // 5 rows times four vectors are 20 sums; four columns and a broadcast for each row make 29 of 32
  // registers. With 6 rows GCC 12 kept two sums in memory.
  static constexpr uint32_t kTilePanels = 1;
  static constexpr uint32_t kFusedVecs = 12;

  static Vec zero() { return vdupq_n_f32(0); }
  static Vec load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Vec v) { vst1q_f32(p, v); }
  static Vec broadcast(const float* p) { return vld1q_dup_f32(p); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec multiply(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static void to_float(int8x16_t values, Vec (&out)[4]) {
    const int16x8_t first = vmovl_s8(vget_low_s8(values));
    const int16x8_t second = vmovl_s8(vget_high_s8(values));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(first)));
    out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(first)));
    out[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(second)));
    out[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(second)));
  }
  static void widen(const uint8_t* codes, Vec (&low)[4], Vec (&high)[4]) {
    static constexpr int8_t kDoubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(kDoubled);
    const uint8x16_t bytes = vld1q_u8(codes);
    to_float(vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15))), low);
    to_float(vqtbl1q_s8(table, vshrq_n_u8(bytes, 4)), high);
  }
};

}  // namespace
}  // namespace jax_megamoe::cpu

#define JMM_TILE_ROWS 5
#define JMM_SECTION "jmm_gemm_neon"
#include "cpu/gemm_kernel.h"

namespace jax_megamoe::cpu {
const Kernels kNeonKernels = {&multiply_all, &widen_all};
}  // namespace jax_megamoe::cpu

#endif
