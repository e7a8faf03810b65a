// stages.h: the ring of stages between loaders and math, and the parts of an item that pass through
// it.
#pragma once

#include "gpu/sm90/plan.h"
#include "gpu/common/cta.h"

namespace jax_megamoe::gpu {

// Where a role stands in the ring of stages.
struct StageCursor {
  uint32_t index = 0;
  uint32_t parity = 0;
  JMM_DEVICE void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

JMM_DEVICE uint32_t full_barrier(const Cta& cta, uint32_t stage) {
  return shared_address(&cta.control->full[stage]);
}
JMM_DEVICE uint32_t empty_barrier(const Cta& cta, uint32_t stage) {
  return shared_address(&cta.control->empty[stage]);
}

// Chunks of 128 weight rows that tile `tile` of phase P has; the last tile may have fewer.
template <class P>
JMM_DEVICE uint32_t valid_chunks(uint32_t tile) {
  constexpr uint32_t kChunks = P::kRows / kWeightChunkRows;
  return min_of(kTileChunks<P>, kChunks - tile * kTileChunks<P>);
}
template <class P>
JMM_DEVICE uint32_t valid_passes(uint32_t item) {
  constexpr uint32_t kTiles = ceil_div(P::kRows, kTileRows<P>);
  return min_of(P::kPasses, kTiles - item * P::kPasses);
}

}  // namespace jax_megamoe::gpu
