// wait.h: signals and bounded waits. Every wait ends: with its value, or with a recorded failure.
//
// Signals are release operations and waits acquire: what a role wrote before its signal is visible
// to whoever saw the signal.
#pragma once

#include "cpu/rank.h"

namespace jax_megamoe::cpu {

// Where a wait stands in the protocol; the smallest one of all pending waits is nearest to the
// cause of a hang. `position` is the pool block of a ring counter, the number (from 1) of a
// barrier.
uint64_t wait_order(Region region, uint64_t position);

// Slow path of a wait: true once load(word) >= wanted; false after a recorded timeout or another
// failure.
bool wait_slow(const RankView& view, Region region, uint64_t index, uint64_t wanted,
               uint64_t position, uint64_t (*load)(const void*), const void* word);

template <Region R>
uint64_t load_acquire(const void* word) {
  using T = typename RegionType<R>::T;
  return std::atomic_ref<T>(*static_cast<T*>(const_cast<void*>(word)))
      .load(std::memory_order_acquire);
}

// Packed receive counts compare by their high half, the number of ranks that have published.
inline uint64_t load_recv_ranks_acquire(const void* word) {
  return recv_ranks(load_acquire<Region::expert_recv_count_sum>(word));
}

// Waits until element `index` of this rank's region R is at least `wanted`. `position`:
// wait_order().
template <Region R>
bool wait_at_least(const RankView& view, uint64_t index, uint64_t wanted, uint64_t position) {
  const void* word = view.local<R>() + index;
  if (load_acquire<R>(word) >= wanted) return true;
  return wait_slow(view, R, index, wanted, position, &load_acquire<R>, word);
}

inline bool wait_recv_count(const RankView& view, uint32_t expert) {
  const void* word = view.local<Region::expert_recv_count_sum>() + expert;
  return wait_slow(view, Region::expert_recv_count_sum, expert, view.shape.num_ranks, expert,
                   &load_recv_ranks_acquire, word);
}

// True if the deliberate fault is armed for this signal; it is disarmed by that.
bool drop_signal(const RankView& view, Region region);

// Adds to element `index` of region R on `peer`, releasing everything written before.
template <Region R>
void add_release(const RankView& view, uint32_t peer, uint64_t index,
                 typename RegionType<R>::T value) {
  using T = typename RegionType<R>::T;
  if (drop_signal(view, R)) return;
  std::atomic_ref<T>(view.remote<R>(peer)[index]).fetch_add(value, std::memory_order_acq_rel);
}

// All threads of this rank. `nth` counts the barriers of one call from 1.
inline constexpr uint32_t kGridBarriersPerCall = 4;
bool grid_barrier(const RankView& view, uint32_t nth);

// All ranks; called by one thread of each. `nth` counts the barriers of one call from 1.
inline constexpr uint32_t kRankBarriersPerCall = 3;
bool rank_barrier(const RankView& view, uint32_t nth);

}  // namespace jax_megamoe::cpu
