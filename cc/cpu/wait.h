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

// Slow path of a wait: true once reached(load(word), wanted); false after a recorded timeout or
// another failure.
bool wait_slow(const RankView& view, Region region, uint64_t index, uint64_t wanted,
               uint64_t position, uint64_t (*load)(const void*), const void* word);

template <Region R>
uint64_t load_acquire(const void* word) {
  using T = typename RegionType<R>::T;
  return std::atomic_ref<T>(*static_cast<T*>(const_cast<void*>(word)))
      .load(std::memory_order_acquire);
}

// Waits until element `index` of this rank's region R has reached `wanted`. `position`:
// wait_order().
template <Region R>
bool wait_at_least(const RankView& view, uint64_t index, uint64_t wanted, uint64_t position) {
  const void* word = view.local<R>() + index;
  if (reached(load_acquire<R>(word), wanted)) return true;
  return wait_slow(view, R, index, wanted, position, &load_acquire<R>, word);
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

// Stores element `index` of region R on `peer`, releasing everything written before. For words that
// one rank alone writes.
template <Region R>
void store_release(const RankView& view, uint32_t peer, uint64_t index,
                   typename RegionType<R>::T value) {
  using T = typename RegionType<R>::T;
  if (drop_signal(view, R)) return;
  std::atomic_ref<T>(view.remote<R>(peer)[index]).store(value, std::memory_order_release);
}

// All threads of this rank. `nth` counts the barriers of one call from 1.
inline constexpr uint32_t kGridBarriersPerCall = 4;
bool grid_barrier(const RankView& view, uint32_t nth);

// All ranks; called by one thread of each. `nth` counts the barriers of one call from 1.
inline constexpr uint32_t kRankBarriersPerCall = 3;
bool rank_barrier(const RankView& view, uint32_t nth);

}  // namespace jax_megamoe::cpu
