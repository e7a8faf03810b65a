// platform.h: what differs between a host compiler, nvcc and NVRTC. Included by all of protocol/.
//
// protocol/ is plain C++20 without the standard library's containers, so that the CPU back end and
// the GPU kernels compile the same scheduler, workspace and numerics.
#pragma once

#if defined(__CUDACC_RTC__)
// NVRTC comes without a C++ library; its platforms all have these sizes.
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define JMM_HD __host__ __device__ __forceinline__
#else
#define JMM_HD inline
#endif

namespace jax_megamoe {

template <class T>
JMM_HD constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
JMM_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
JMM_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace jax_megamoe
