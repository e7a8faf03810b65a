// combine.h: token path, stage 5. Sums a token's expert rows, and readies the workspace.
#pragma once

#include "cpu/rank.h"

namespace jax_megamoe::cpu {

// Writes this thread's share of y: for each token the FP32 sum of its routed rows in slot order,
// rounded once to BF16. Rows past num_tokens become zero.
void combine(const RankView& view);

// Zeroes this rank's counters (Lifetime::kPerCall). One thread, after the rank's last block.
void clear_counters(const RankView& view);

}  // namespace jax_megamoe::cpu
