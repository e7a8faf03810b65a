// activation.h: what stands between the two products. Host and device.
#pragma once

#include "protocol/platform.h"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace jax_megamoe {

// Custom calls and JMM_ACTIVATION carry the numbers, Python the names.
enum class Activation : uint32_t { kSwiglu = 0, kGptOssSwiglu, kSitu };
inline constexpr const char* kActivationNames[] = {"swiglu", "gpt_oss_swiglu", "situ"};
inline constexpr uint32_t kNumActivations = sizeof(kActivationNames) / sizeof(kActivationNames[0]);

// Numbers of the formulas; an activation ignores those that it has no use for. Custom calls carry
// them as an array in this order.
struct ActivationParams {
  float limit = 0;        // swiglu, gpt_oss_swiglu: clamp; +infinity: none
  float alpha = 0;        // gpt_oss_swiglu
  float beta = 0;         // situ: bound of the gate's side
  float linear_beta = 0;  // situ: bound of up's side
};
inline constexpr uint32_t kNumActivationParams = sizeof(ActivationParams) / sizeof(float);
JMM_HD constexpr ActivationParams to_activation_params(const float* values) {
  return {values[0], values[1], values[2], values[3]};
}

// In FP32. A NaN in gate or up stays a NaN, because comparisons with it are false.
//   swiglu:          gate * sigmoid(gate) * up * weight of the clamped gate and up
//   gpt_oss_swiglu:  gate * sigmoid(alpha * gate) * (up + 1) * weight of the same
//   situ:            beta * tanh(gate / beta) * sigmoid(gate)
//                      * linear_beta * tanh(up / linear_beta) * weight
#if defined(__CUDA_ARCH__) || !defined(__CUDACC_RTC__)
template <Activation A>
JMM_HD float activate(float gate, float up, float weight, const ActivationParams& params) {
  if constexpr (A == Activation::kSitu) {
    const float bounded = params.beta * tanhf(gate / params.beta) * (1.0f / (1.0f + expf(-gate)));
    return bounded * (params.linear_beta * tanhf(up / params.linear_beta)) * weight;
  } else {
    const float limit = params.limit;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    if constexpr (A == Activation::kGptOssSwiglu) {
      return gate / (1.0f + expf(-params.alpha * gate)) * (up + 1.0f) * weight;
    } else {
      return gate / (1.0f + expf(-gate)) * up * weight;
    }
  }
}
#endif

// Calls fn.template operator()<A>() with the activation as a constant.
template <class Fn>
JMM_HD decltype(auto) with_activation(Activation activation, const Fn& fn) {
  switch (activation) {
    case Activation::kGptOssSwiglu:
      return fn.template operator()<Activation::kGptOssSwiglu>();
    case Activation::kSitu:
      return fn.template operator()<Activation::kSitu>();
    default:
      return fn.template operator()<Activation::kSwiglu>();
  }
}

}  // namespace jax_megamoe
