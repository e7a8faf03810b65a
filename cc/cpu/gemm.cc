#include "cpu/gemm.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace jax_megamoe::cpu {
namespace {

// Null where the architecture does not have the instruction set.
const Kernels* kernels_of(Isa isa) {
  switch (isa) {
#if defined(__aarch64__)
    case Isa::kNeon:
      return &kNeonKernels;
#endif
#if defined(__x86_64__)
    case Isa::kAvx2:
      return &kAvx2Kernels;
    case Isa::kAvx512:
      return &kAvx512Kernels;
#endif
    case Isa::kPortable:
      return &kPortableKernels;
    default:
      return nullptr;
  }
}

Isa choose_isa() {
  const char* name = std::getenv("JAX_MEGAMOE_CPU_ISA");
  const bool given = name != nullptr && *name != '\0';
  std::string supported;
  for (uint32_t i = kNumIsas; i-- > 0;) {
    if (!supports(static_cast<Isa>(i))) continue;
    if (!given || kIsaNames[i] == std::string(name)) return static_cast<Isa>(i);
    supported += std::string(supported.empty() ? "" : ", ") + kIsaNames[i];
  }
  throw std::invalid_argument("JAX_MEGAMOE_CPU_ISA: got " + std::string(name) +
                              "; expected one of " + supported +
                              ", which this machine supports; unset it for the first of them");
}

}  // namespace

bool supports(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return kernels_of(isa) != nullptr;
}

Isa selected_isa() {
  static const Isa selected = choose_isa();
  return selected;
}

void widen_rows(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k, float* out,
                float* units, Isa isa) {
  kernels_of(isa)->widen_rows(codes, sf, num_rows, k, out, units);
}

void multiply_panels(const PanelProduct& product, Isa isa) { kernels_of(isa)->multiply(product); }

}  // namespace jax_megamoe::cpu
