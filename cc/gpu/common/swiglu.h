// swiglu.h: token path, stage 3. Arithmetic of linear 1's epilogue: activation, routing weight, the
// scale of a group.
#pragma once

#include "gpu/common/ptx.h"
#include "gpu/interface/kernel_args.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// tanh(x) within 2^-20 of its value. 1 - 2 / (1 + exp(2 |x|)) is a difference of nearly equal
// numbers for small x. There an odd polynomial stands in, whose coefficients minimise the largest
// relative error up to 0.5, 2^-20.5.
JMM_DEVICE float tanh_approx(float x) {
  const float square = x * x, magnitude = fabsf(x);
  const float cubic = fmaf(fmaf(-0.0447506607f, square, 0.132053599f), square, -0.333281606f);
  const float small = fmaf(x * square, cubic, x);
  const float large = fmaf(-2.0f, rcp_approx_ftz(1.0f + ex2_approx_ftz(2 * kLog2E * magnitude)), 1);
  return magnitude < 0.5f ? small : copysignf(large, x);
}

// activate() of protocol/activation.h. The exponential and the reciprocal are the hardware's
// approximations, each within 2 units in the last place; docs/numerics.md has the bound. `limit` is
// that of `args`, which a thread reads once.
JMM_DEVICE float activate_approx(float gate, float up, float weight, float limit,
                                 const KernelArgs& args) {
  if constexpr (kActivation == Activation::kSitu) {
    const float bounded = args.situ_beta * tanh_approx(gate * args.situ_inverse_beta);
    const float linear = args.situ_linear_beta * tanh_approx(up * args.situ_inverse_linear_beta);
    return bounded * rcp_approx_ftz(1.0f + ex2_approx_ftz(-kLog2E * gate)) * linear * weight;
  } else {
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
    constexpr bool kGptOss = kActivation == Activation::kGptOssSwiglu;
    const float power = kGptOss ? args.gpt_oss_power : -kLog2E;
    if constexpr (kGptOss) up += 1.0f;
    return gate * rcp_approx_ftz(1.0f + ex2_approx_ftz(power * gate)) * up * weight;
  }
}

// The scale of a group follows from the largest exponent in it, rounded up where the mantissa is
// above 1.75, as sf_e4m3 does: e = (|bits| + 0x1FFFFF) >> 23, sf = clamp(e - 8, 1, 254). The upper
// halves of two such sums make a pack. 0x61 more makes NaN and infinity negative, which maxima of
// signed halves never take; with them go numbers from 0x7F7F0001 on, 0.4 % below FP32's largest.
JMM_DEVICE uint32_t exponent_pack(float low, float high) {
  const uint32_t a = (float_bits(low) & kAbsMask) + 0x1FFFFFu;
  const uint32_t b = (float_bits(high) & kAbsMask) + 0x1FFFFFu;
  return prmt(a, b, 0x7632) + 0x00610061u;
}
JMM_DEVICE uint32_t scale_byte(uint32_t half) {  // of a pack
  const int32_t exponent = half < 0x61 ? 0 : static_cast<int32_t>(half - 0x61) >> 7;
  return static_cast<uint32_t>(min_of(max_of(exponent - 8, 1), 254));
}
// v * reciprocal; what is not finite, or was too large to be counted, becomes NaN.
JMM_DEVICE float scaled_or_nan(float v, float reciprocal) {
  const float scaled = v * reciprocal;
  return scaled + scaled * 0.0f;
}

// One step of the reduction below: a lane keeps one half of its packs and gives the other half
// away.
// Caller: one warp.
template <uint32_t kHalf, uint32_t kDistance, uint32_t kPacks>
JMM_DEVICE uint32_t halve_packs(uint32_t (&pack)[kPacks], uint32_t lane) {
  const bool upper = (lane & kDistance) != 0;
#pragma unroll
  for (uint32_t i = 0; i < kHalf; ++i) {
    const uint32_t keep = upper ? pack[kHalf + i] : pack[i];
    const uint32_t give = upper ? pack[i] : pack[kHalf + i];
    pack[i] = max_s16x2(keep, __shfl_xor_sync(~0u, give, kDistance));
  }
  return upper ? kHalf : 0;
}

// Maximum of 16-bit halves over the eight lanes that share q. On entry pack[c] belongs to token
// pair 4c + q; on return the lane holds those of c = first ... first + max(kPacks / 8, 1) - 1, or,
// of fewer than eight packs, all.
// Caller: one warp.
template <uint32_t kPacks>
JMM_DEVICE uint32_t reduce_over_rows(uint32_t (&pack)[kPacks], uint32_t lane) {
  if constexpr (kPacks < 8) {
#pragma unroll
    for (uint32_t c = 0; c < kPacks; ++c) {
#pragma unroll
      for (uint32_t distance = 4; distance < 32; distance *= 2) {
        pack[c] = max_s16x2(pack[c], __shfl_xor_sync(~0u, pack[c], distance));
      }
    }
    return 0;
  } else {
    uint32_t first = halve_packs<kPacks / 2, 16>(pack, lane);
    first += halve_packs<kPacks / 4, 8>(pack, lane);
    return first + halve_packs<kPacks / 8, 4>(pack, lane);
  }
}

}  // namespace jax_megamoe::gpu
