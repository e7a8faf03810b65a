// failure_text.h: how a failed call is told to the user; the same words on every back end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "protocol/workspace.h"

namespace jax_megamoe::report {

// Instead of a Region: a barrier between the threads of one worker.
inline constexpr uint32_t kLocalBarrier = 0xFFFFFFFFu;

// A wait that did not end.
struct Wait {
  uint32_t rank;
  const char* worker_kind;  // "worker" or "SM"
  uint32_t worker;
  const char* role;
  uint32_t region;  // Region of the counter, or kLocalBarrier
  uint64_t index;   // element of the region
  uint64_t wanted;
  uint64_t seen;
};
std::string wait_text(const MoeShape& shape, const Wait& wait);

// `waits` begins with the one nearest to the cause.
std::string timeout_text(double timeout_s, const std::vector<std::string>& waits);

// Slot `slot` (token * K + k) of `rank` named `expert`; `count` slots did so.
std::string out_of_range_text(const MoeShape& shape, uint32_t rank, long long expert, uint64_t slot,
                              uint32_t count);

// Scale `place` of x's row `token` is not the one that the granularity (128, or 0: row) asks for.
std::string unequal_scales_text(uint32_t rank, uint64_t token, uint64_t place, uint32_t wanted,
                                uint32_t seen, uint32_t granularity);

std::string num_tokens_text(uint32_t rank, long long num_tokens, uint32_t num_rows);

// `device` is rank `traced_rank` in the program and `buffer_rank` in the buffer.
std::string rank_mismatch_text(const std::string& device, long long traced_rank,
                               uint32_t buffer_rank);

}  // namespace jax_megamoe::report
