// dispatch.h: token path, stage 1. Input -> FP8 rows in the workspace -> counts and row lists at
// the owners of the experts -> rows pulled into the owners' ring.
#pragma once

#include <vector>

#include "cpu/rank.h"

namespace jax_megamoe::cpu {

// Writes this thread's share of x, x_sf, topk_idx (out-of-range ids become -1) and topk_weights.
void stage_input(const RankView& view);

// Counts this rank's rows per expert, lists them at their owners and publishes the counts.
void dispatch_publish(const RankView& view);

// Waits until every rank has published its counts for this rank's experts; counts[source * E/R +
// local expert] are the rows. False if a wait failed.
bool receive_counts(const RankView& view, std::vector<uint32_t>& counts);

// Pulls all rows of this rank's experts in pool order. False if a wait failed.
bool dispatch_pull(const RankView& view);

}  // namespace jax_megamoe::cpu
