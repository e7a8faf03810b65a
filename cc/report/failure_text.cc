#include "report/failure_text.h"

#include <algorithm>
#include <cstdio>

namespace jax_megamoe::report {

std::string wait_text(const MoeShape& shape, const Wait& wait) {
  std::string name = "a barrier within the SM", writer = "the same SM";
  unsigned long long wanted = wait.wanted, seen = wait.seen;
  const char* unit = "";
  if (wait.region < kNumRegions) {
    const RegionInfo info = WorkspaceLayout(shape).regions[wait.region];
    name = info.name;
    writer = info.writer;
  }
  if (wait.region == static_cast<uint32_t>(Region::rank_barrier)) {
    writer += ", here rank " + std::to_string(wait.index);
  } else if (wait.region == static_cast<uint32_t>(Region::expert_recv_count)) {
    const uint32_t num_local = shape.num_local_experts();
    writer += ", here rank " + std::to_string(wait.index / num_local) + " for local expert " +
              std::to_string(wait.index % num_local);
    unit = "call ";
    wanted = count_call(wanted);
    seen = count_call(seen);
  }
  char text[384];
  std::snprintf(text, sizeof(text),
                "rank %u, %s %u, role %s waited for %s[%llu] (written by: %s): wanted %s%llu, seen "
                "%s%llu",
                wait.rank, wait.worker_kind, wait.worker, wait.role, name.c_str(),
                static_cast<unsigned long long>(wait.index), writer.c_str(), unit, wanted, unit,
                seen);
  return text;
}

std::string timeout_text(double timeout_s, const std::vector<std::string>& waits) {
  constexpr size_t kMaxListed = 8;
  char head[64];
  std::snprintf(head, sizeof(head), "jax_megamoe: timed out after %.3g s: ", timeout_s);
  std::string text = head + waits[0];
  text += ". If a rank is only slow, raise MegaMoEConfig.timeout_s.";
  if (waits.size() > 1) text += " Also waiting:";
  for (size_t i = 1; i < std::min(waits.size(), kMaxListed); ++i) text += "\n  " + waits[i];
  if (waits.size() > kMaxListed) {
    text += "\n  and " + std::to_string(waits.size() - kMaxListed) + " more";
  }
  return text;
}

std::string out_of_range_text(const MoeShape& shape, uint32_t rank, long long expert, uint64_t slot,
                              uint32_t count) {
  char text[384];
  std::snprintf(text, sizeof(text),
                "jax_megamoe: topk_idx: got expert id %lld at token %llu, slot %llu of rank %u (%u "
                "such slots); expected -1 or 0..%u. Fix the router, mask the slot with -1, or set "
                "checked=False to have such slots dropped and counted.",
                expert, static_cast<unsigned long long>(slot / shape.top_k),
                static_cast<unsigned long long>(slot % shape.top_k), rank, count,
                shape.num_experts - 1);
  return text;
}

std::string unequal_scales_text(uint32_t rank, uint64_t token, uint64_t place, uint32_t wanted,
                                uint32_t seen, uint32_t granularity) {
  const std::string name = granularity == 0 ? "'row'" : std::to_string(granularity);
  return "jax_megamoe: x: got scale byte " + std::to_string(seen) + " at place " +
         std::to_string(place) + " of token " + std::to_string(token) + " on rank " +
         std::to_string(rank) + "; expected " + std::to_string(wanted) +
         ", because with activation_granularity=" + name +
         " its neighbours share one scale. Quantise x with quantize_e4m3(x, " + name +
         "), pass it in bfloat16, or use activation_granularity=32.";
}

std::string num_tokens_text(uint32_t rank, long long num_tokens, uint32_t num_rows) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "jax_megamoe: num_tokens: got %lld on rank %u; expected 0..%u, the rows of x. "
                "Pass the number of leading rows that hold tokens.",
                num_tokens, rank, num_rows);
  return text;
}

std::string rank_mismatch_text(const std::string& device, long long traced_rank,
                               uint32_t buffer_rank) {
  return "jax_megamoe: expert-parallel rank: " + device + " is rank " +
         std::to_string(traced_rank) + " in the program, but rank " + std::to_string(buffer_rank) +
         " in its symmetric buffer. Run layer.local under shard_map over the mesh that the layer "
         "was created with.";
}

}  // namespace jax_megamoe::report
