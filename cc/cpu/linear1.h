// linear1.h: token path, stage 2. One tile of gate and up projections, handed to SwiGLU.
#pragma once

#include "cpu/math_worker.h"

namespace jax_megamoe::cpu {

// Waits for the block's rows, multiplies them with 64 gate and 64 up rows, and runs the SwiGLU
// epilogue on the tile. False if a wait failed.
bool linear1(const RankView& view, const Block& block, MathWorker& worker);

}  // namespace jax_megamoe::cpu
