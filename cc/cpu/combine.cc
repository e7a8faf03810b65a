#include "cpu/combine.h"

#include <cstring>
#include <vector>

#include "protocol/numerics.h"

namespace jax_megamoe::cpu {

void combine(const RankView& view) {
  const MoeShape& shape = view.shape;
  const uint64_t hidden = shape.hidden;
  const int32_t* topk_idx = view.local<Region::topk_idx>();
  const uint16_t* rows = view.local<Region::combine>();
  std::vector<float> sum(hidden);
  for (uint32_t token = view.worker; token < view.args.num_rows; token += view.num_threads()) {
    std::memset(sum.data(), 0, hidden * sizeof(float));
    if (token < view.num_tokens) {
      for (uint64_t k = 0; k < shape.top_k; ++k) {
        if (topk_idx[uint64_t{token} * shape.top_k + k] < 0) continue;
        const uint16_t* row = rows + (k * shape.max_tokens + token) * hidden;
        for (uint64_t i = 0; i < hidden; ++i) sum[i] += bf16_to_float(row[i]);
      }
    }
    uint16_t* y = view.args.y + token * hidden;
    for (uint64_t i = 0; i < hidden; ++i) y[i] = float_to_bf16(sum[i]);
  }
}

void clear_counters(const RankView& view) {
  for (const RegionInfo& region : view.layout.regions) {
    if (region.lifetime == Lifetime::kPerCall) {
      std::memset(static_cast<char*>(view.bases[view.rank]) + region.offset, 0, region.num_bytes());
    }
  }
}

}  // namespace jax_megamoe::cpu
