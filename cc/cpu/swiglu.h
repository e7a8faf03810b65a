// swiglu.h: token path, stage 3. The epilogue of linear 1: activation, routing weight, FP8.
#pragma once

#include "cpu/rank.h"
#include "protocol/scheduler.h"

namespace jax_megamoe::cpu {

// `accumulator` is [valid_m][kL1ItemRows]: 8 gate, 8 up, 8 gate, ... columns of linear 1's item.
// Waits until linear 2 has left the ring slot's previous lap, then writes the item's 128 columns of
// l2_acts with their scales and signals l1_empty and l2_arrival. False if the wait failed.
bool swiglu_epilogue(const RankView& view, const Block& block, const float* accumulator);

}  // namespace jax_megamoe::cpu
