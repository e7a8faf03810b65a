// linear2.h: token path, stage 4. One tile of the down projection, pushed to the tokens' own ranks.
#pragma once

#include "cpu/math_worker.h"

namespace jax_megamoe::cpu {

// Waits for all SwiGLU tiles of the block, multiplies, rounds to BF16 and writes each row's 128
// columns into combine[slot] of the rank the token came from. False if the wait failed.
bool linear2(const RankView& view, const Block& block, MathWorker& worker);

}  // namespace jax_megamoe::cpu
