// signal.h: adding to and storing counters that others wait for; a deliberate fault loses one.
#pragma once

#include "gpu/common/cta.h"
#include "protocol/workspace.h"

namespace jax_megamoe::gpu {

// True if the deliberate fault is armed for this signal; it is served once.
template <Region R>
JMM_DEVICE bool drop_signal(const Cta& cta) {
  if (cta.args.fault_region != static_cast<uint32_t>(R)) return false;
  return atom_add_relaxed_gpu(cta.args.rank_control + kServedFaults, 1) == 0;
}
// Caller: one thread.
template <Region R>
JMM_DEVICE void add_release(const Cta& cta, uint64_t index, uint32_t value) {
  if (!drop_signal<R>(cta)) red_add_release_gpu(region<R>(cta.local()) + index, value);
}
// Caller: one thread.
template <Region R>
JMM_DEVICE void add_release_sys(const Cta& cta, uint64_t index, uint64_t value) {
  if (!drop_signal<R>(cta)) red_add_release_sys(region<R>(cta.local()) + index, value);
}
// Caller: one thread.
template <Region R>
JMM_DEVICE void store_release(const Cta& cta, uint32_t peer, uint64_t index, uint64_t value) {
  if (!drop_signal<R>(cta)) st_release_sys(region<R>(cta.args.peer_buffer[peer]) + index, value);
}

}  // namespace jax_megamoe::gpu
