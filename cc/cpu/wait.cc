#include "cpu/wait.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "report/failure_text.h"

namespace jax_megamoe::cpu {

namespace {

std::string describe(const RankView& view, const PendingWait& wait) {
  return report::wait_text(
      view.shape, {wait.rank, "worker", wait.worker, wait.role, static_cast<uint32_t>(wait.region),
                   wait.index, wait.wanted, wait.load(wait.word)});
}

// Many waits hang when one signal is lost. The message leads with the one earliest in the protocol.
std::string timeout_text(const RankView& view, std::vector<const PendingWait*> pending) {
  std::stable_sort(pending.begin(), pending.end(),
                   [](const auto* a, const auto* b) { return a->order < b->order; });
  std::vector<std::string> waits;
  for (const PendingWait* wait : pending) waits.push_back(describe(view, *wait));
  return report::timeout_text(view.call.timeout_s, waits);
}

}  // namespace

uint64_t wait_order(Region region, uint64_t position) {
  constexpr uint64_t kGridStage[kGridBarriersPerCall] = {0, 4, 6, 7};
  constexpr uint64_t kRankStage[kRankBarriersPerCall] = {2, 5, 8};
  const auto at = [](uint64_t stage, uint64_t detail) { return (stage << 56) + detail; };
  switch (region) {
    case Region::grid_barrier:
      return at(kGridStage[position - 1], 0);
    case Region::rank_barrier:
      return at(kRankStage[position - 1], 0);
    case Region::expert_recv_count:
      return at(1, 0);
    case Region::l1_empty:
      return at(3, position * 4);
    case Region::l1_arrival:
      return at(3, position * 4 + 1);
    case Region::l2_empty:
      return at(3, position * 4 + 2);
    default:
      return at(3, position * 4 + 3);
  }
}

bool wait_slow(const RankView& view, Region region, uint64_t index, uint64_t wanted,
               uint64_t position, uint64_t (*load)(const void*), const void* word) {
  // Threads outnumber cores here: yield at first, sleep when the producer is clearly not running.
  for (uint32_t round = 0; round < 32; ++round) {
    if (reached(load(word), wanted)) return true;
    std::this_thread::yield();
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(view.call.timeout_s));
  const PendingWait wait = {wait_order(region, position),
                            view.rank,
                            view.worker,
                            view.role,
                            region,
                            index,
                            wanted,
                            word,
                            load};
  CallState& call = view.call;
  {
    std::lock_guard<std::mutex> lock(call.mutex);
    call.pending.push_back(&wait);
  }
  bool arrived = false;
  for (uint32_t round = 0;; ++round) {
    arrived = reached(load(word), wanted);
    if (arrived || call.aborted.load(std::memory_order_acquire)) break;
    if (Clock::now() > deadline) {
      std::lock_guard<std::mutex> lock(call.mutex);
      if (call.failure.empty()) call.failure = timeout_text(view, call.pending);
      call.aborted.store(true, std::memory_order_release);
      break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round < 256 ? 20 : 200));
  }
  std::lock_guard<std::mutex> lock(call.mutex);
  std::erase(call.pending, &wait);
  return arrived;
}

bool drop_signal(const RankView& view, Region region) {
  uint32_t armed = static_cast<uint32_t>(region);
  if (view.fault.region.load(std::memory_order_relaxed) != armed) return false;
  if (view.fault.rank.load(std::memory_order_relaxed) != view.rank) return false;
  return view.fault.region.compare_exchange_strong(armed, kNumRegions);
}

bool grid_barrier(const RankView& view, uint32_t nth) {
  const uint64_t epoch = *view.local<Region::call_epoch>();
  const uint64_t target = (epoch * kGridBarriersPerCall + nth) * view.num_threads();
  add_release<Region::grid_barrier>(view, view.rank, 0, 1);
  return wait_at_least<Region::grid_barrier>(view, 0, target, nth);
}

bool rank_barrier(const RankView& view, uint32_t nth) {
  const uint64_t target = *view.local<Region::call_epoch>() * kRankBarriersPerCall + nth;
  // One word per source rank: no atomic add, and a timeout names the rank that is missing.
  for (uint32_t peer = 0; peer < view.shape.num_ranks; ++peer) {
    add_release<Region::rank_barrier>(view, peer, view.rank, 1);
  }
  for (uint32_t peer = 0; peer < view.shape.num_ranks; ++peer) {
    if (!wait_at_least<Region::rank_barrier>(view, peer, target, nth)) return false;
  }
  return true;
}

}  // namespace jax_megamoe::cpu
