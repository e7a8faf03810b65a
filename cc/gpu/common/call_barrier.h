// call_barrier.h: barriers that all CTAs of a rank, and all ranks, pass once a call.
#pragma once

#include "gpu/common/check_in.h"
#include "gpu/common/signal.h"

namespace jax_megamoe::gpu {

// All CTAs of this rank arrive at each, the leader also for the absent. For kSlotsCounted everyone
// waits; at the others the leader alone waits, and then tells all ranks. A rank waits for its own
// word too: it stands for "all CTAs of this rank".
enum CallBarrier : uint32_t { kSlotsCounted = 1, kRowsListed = 2, kResultsPushed = 3 };
inline constexpr uint32_t kCallBarriers = 3;

// Caller: one thread.
JMM_DEVICE void arrive_call_barrier(const Cta& cta, uint32_t barriers = 1) {
  add_release_sys<Region::grid_barrier>(cta, 0,
                                        barriers * (1 + (cta.leads() ? absent_ctas(cta) : 0)));
}
// Everything that hangs keeps the results from being complete, and who has no work waits for them
// from the start. These waits give up later, so that the report is about one nearer to the cause.
JMM_DEVICE uint64_t timeout_of(const Cta& cta, CallBarrier nth) {
  return cta.args.timeout_ns + (nth == kResultsPushed ? cta.args.timeout_ns / 8 : 0);
}
// Caller: one thread.
JMM_DEVICE bool wait_grid(const Cta& cta, CallBarrier nth) {
  return wait_at_least<Region::grid_barrier, LoadSys64>(
      cta, 0, (cta.epoch() * kCallBarriers + nth) * gridDim.x, timeout_of(cta, nth));
}
// The leader waits until all CTAs of its rank have arrived, and tells every rank.
// Caller: one warp of the leader.
JMM_DEVICE void publish_call_barrier(const Cta& cta, CallBarrier nth) {
  if constexpr (kRanks > 1) {
    const uint32_t lane = threadIdx.x % 32;
    bool arrived = true;
    if (lane == 0) arrived = wait_grid(cta, nth);
    if (!__shfl_sync(~0u, arrived, 0)) return;
    __syncwarp();  // what lane 0 has seen comes before any lane's signal
    fence_acq_rel_sys();
    for (uint32_t peer = lane; peer < kRanks; peer += 32) {
      store_release<Region::rank_barrier>(cta, peer, cta.args.rank,
                                          cta.epoch() * kCallBarriers + nth);
    }
    __syncwarp();
  }
}
// Waits until all ranks have told. False: the call is aborted.
// Caller: one warp.
JMM_DEVICE bool wait_call_barrier(const Cta& cta, CallBarrier nth) {
  const uint32_t lane = threadIdx.x % 32;
  bool arrived = true;
  if constexpr (kRanks == 1) {  // nobody to be told: one hop less
    if (lane == 0) arrived = wait_grid(cta, nth);
  } else {
    for (uint32_t peer = lane; peer < kRanks; peer += 32) {
      arrived &= wait_at_least<Region::rank_barrier, LoadSys64>(
          cta, peer, cta.epoch() * kCallBarriers + nth, timeout_of(cta, nth));
    }
  }
  return __all_sync(~0u, arrived);
}

}  // namespace jax_megamoe::gpu
