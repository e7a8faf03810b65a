// isa.h: instructions of sm_90a alone, but for the generated wgmma.h, and the form of their
// operands.
#pragma once

#include "gpu/common/ptx.h"

namespace jax_megamoe::gpu {

JMM_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JMM_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <uint32_t N>
JMM_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps reads of the sums behind the wait above them.
template <uint32_t N>
JMM_DEVICE void pin(float (&d)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// A tile of rows of 128 bytes, 128-byte swizzle, 8 rows every 1024 bytes. 32 bytes further along K:
// + 2; 8 rows further: + 64.
JMM_DEVICE uint64_t tile_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address >> 4) & 0x3FFF) | (1ull << 16) | (64ull << 32) |
         (1ull << 62);
}

}  // namespace jax_megamoe::gpu
