// numerics.h: E4M3, E2M1, UE8M0 and BF16 codes. Host and device, no flush to zero needed.
//
// The rules, with their derivation, stand in jax_megamoe/quantize.py; a test compares both bit for
// bit. Elements are rounded here by float arithmetic that is exact up to one rounding, which both
// vector units and GPUs run fast.
#pragma once

#include "protocol/shape.h"

#if !defined(__CUDACC_RTC__)
#include <bit>
#endif

namespace jax_megamoe {

#if defined(__CUDA_ARCH__)
JMM_HD uint32_t float_bits(float value) { return __float_as_uint(value); }
JMM_HD float bits_float(uint32_t bits) { return __uint_as_float(bits); }
#elif !defined(__CUDACC_RTC__)
JMM_HD constexpr uint32_t float_bits(float value) { return std::bit_cast<uint32_t>(value); }
JMM_HD constexpr float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }
#endif

inline constexpr uint32_t kAbsMask = 0x7FFFFFFFu;
inline constexpr uint32_t kInfBits = 0x7F800000u;
inline constexpr uint8_t kE4m3Nan = 0x7F;
inline constexpr uint8_t kUe8m0Nan = 0xFF;

JMM_HD float bf16_to_float(uint16_t bits) { return bits_float(uint32_t{bits} << 16); }

// Round to nearest even; a NaN stays a NaN (its top payload bit is set).
JMM_HD uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & kAbsMask) > kInfBits ? nan : rounded);
}

JMM_HD float fp16_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t{half} & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 31) return bits_float(sign | kInfBits | (mantissa << 13));
  if (exponent == 0) return bits_float(float_bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// amax candidates: |x| as bits, with NaN and infinity counted as zero.
JMM_HD uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = float_bits(value) & kAbsMask;
  return magnitude < kInfBits ? magnitude : 0;
}

// Smallest power of two that brings amax within the format: 448 = 1.75 * 2^8, 6 = 1.5 * 2^2.
JMM_HD uint8_t sf_from_amax(uint32_t amax_bits, int32_t emax, uint32_t mantissa_limit) {
  const int32_t byte = static_cast<int32_t>(amax_bits >> 23) - emax +
                       ((amax_bits & 0x7FFFFFu) > mantissa_limit ? 1 : 0);
  return static_cast<uint8_t>(min_of(max_of(byte, 1), 254));
}
JMM_HD uint8_t sf_e4m3(uint32_t amax_bits) { return sf_from_amax(amax_bits, 8, 0x600000u); }
JMM_HD uint8_t sf_e2m1(uint32_t amax_bits) { return sf_from_amax(amax_bits, 2, 0x400000u); }

// 2^(byte - 127); byte 0 is 2^-127 (an FP32 denormal), byte 255 is NaN.
JMM_HD float ue8m0_to_float(uint8_t byte) {
  const uint32_t bits = byte == 0 ? 0x00400000u : uint32_t{byte} << 23;
  return bits_float(byte == kUe8m0Nan ? 0x7FC00000u : bits);
}
// 2^(127 - byte) for byte in [1, 254].
JMM_HD float ue8m0_reciprocal(uint8_t byte) {
  return bits_float(byte == 254 ? 0x00400000u : (254u - byte) << 23);
}

// Largest codes whose values are FP32 numbers, by the scale's reciprocal: those of FP32's largest
// numbers would round up to 2^128 with the next code.
JMM_HD uint32_t largest_e4m3(float reciprocal) { return reciprocal == 0x1p-120f ? 0x77u : 0x7Eu; }
JMM_HD uint32_t largest_e2m1(float reciprocal) { return reciprocal == 0x1p-126f ? 5u : 7u; }

// E4M3 code of value * reciprocal. The product is exact unless it is below 2^-126, where the code
// is zero either way. |product| <= 448 by the choice of the scale.
JMM_HD uint8_t e4m3_from_float(float value, float reciprocal) {
  const float scaled = value * reciprocal;
  const uint32_t bits = float_bits(scaled);
  const uint32_t magnitude = bits & kAbsMask;
  // Normal codes: round the 23-bit mantissa to 3 bits and rebias 127 -> 7.
  const uint32_t normal = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes count multiples of 2^-9, which is the unit in the last place of 2^14.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 16384.0f) - float_bits(16384.0f);
  const uint32_t finite =
      min_of(magnitude < 0x3C800000u ? subnormal : normal, largest_e4m3(reciprocal));
  const uint32_t code = (float_bits(value) & kAbsMask) >= kInfBits ? kE4m3Nan : finite;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80u));
}

JMM_HD float e4m3_to_float(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15u;
  const uint32_t mantissa = code & 7u;
  const float subnormal = static_cast<float>(mantissa) * 0x1p-9f;
  const float normal = bits_float(((exponent + 120u) << 23) | (mantissa << 20));
  const float magnitude = exponent == 0 ? subnormal : normal;
  const uint32_t bits = (code & 0x7Fu) == kE4m3Nan ? 0x7FC00000u : float_bits(magnitude);
  return bits_float(bits | (uint32_t{code} & 0x80u) << 24);
}

// E2M1 code (0..15) of value * reciprocal for a finite value; the block's scale carries NaN.
JMM_HD uint8_t e2m1_from_float(float value, float reciprocal) {
  const uint32_t bits = float_bits(value * reciprocal);
  const uint32_t magnitude = bits & kAbsMask;
  const uint32_t normal = ((magnitude + 0x1FFFFFu + ((magnitude >> 22) & 1u)) >> 22) - (126u << 1);
  // Below 1 codes count multiples of 2^-1, the unit in the last place of 2^22.
  const uint32_t subnormal =
      float_bits(bits_float(magnitude) + 4194304.0f) - float_bits(4194304.0f);
  const uint32_t finite =
      min_of(magnitude < 0x3F800000u ? subnormal : normal, largest_e2m1(reciprocal));
  const uint32_t code = (float_bits(value) & kAbsMask) >= kInfBits ? 0 : finite;
  return static_cast<uint8_t>(code | ((float_bits(value) >> 28) & 8u));
}

// Twice the value of an E2M1 code: 0 1 2 3 4 6 8 12 and negatives are integers.
JMM_HD constexpr int32_t e2m1_doubled(uint32_t code) {
  const uint32_t exponent = (code >> 1) & 3u;
  const uint32_t mantissa = code & 1u;
  const int32_t magnitude =
      static_cast<int32_t>(exponent == 0 ? mantissa : (2u + mantissa) << (exponent - 1));
  return code & 8u ? -magnitude : magnitude;
}

// Quantises `length` values, a multiple of kSfGroup, to E4M3 with one scale, and writes its byte
// for every kSfGroup of them: scales are stored alike whatever their granularity.
JMM_HD void quantize_e4m3(const float* values, uint32_t length, uint8_t* codes, uint8_t* sf) {
  uint32_t amax = 0;
  for (uint32_t i = 0; i < length; ++i) amax = max_of(amax, finite_magnitude(values[i]));
  const uint8_t byte = sf_e4m3(amax);
  const float reciprocal = ue8m0_reciprocal(byte);
  for (uint32_t i = 0; i < length; ++i) codes[i] = e4m3_from_float(values[i], reciprocal);
  for (uint32_t group = 0; group < length / kSfGroup; ++group) sf[group] = byte;
}

// Quantises one group of kSfGroup values to E4M3; returns the scale byte.
JMM_HD uint8_t quantize_group_e4m3(const float* values, uint8_t* codes) {
  uint8_t sf;
  quantize_e4m3(values, kSfGroup, codes, &sf);
  return sf;
}

// Quantises one group of kSfGroup values to E2M1, one code a byte; returns the scale byte.
JMM_HD uint8_t quantize_group_e2m1(const float* values, uint8_t* codes) {
  uint32_t amax = 0;
  bool finite = true;
  for (uint32_t i = 0; i < kSfGroup; ++i) {
    amax = max_of(amax, finite_magnitude(values[i]));
    finite &= (float_bits(values[i]) & kAbsMask) < kInfBits;
  }
  const uint8_t sf = sf_e2m1(amax);
  const float reciprocal = ue8m0_reciprocal(sf);
  for (uint32_t i = 0; i < kSfGroup; ++i) codes[i] = e2m1_from_float(values[i], reciprocal);
  return finite ? sf : kUe8m0Nan;
}

}  // namespace jax_megamoe
