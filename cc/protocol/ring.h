// ring.h: which ring slot a pool block uses, and what its counters have to reach.
//
// Pool blocks are numbered through all experts of a rank; block b uses slot b mod ring_blocks, in
// lap b div ring_blocks. Four counters per slot only ever grow within a call:
//
//   l1_arrival   +1 by dispatch for every row; linear 1 waits for it before it reads.
//                Target in lap g: (g + 1) * block_m
//   l1_empty     +1 by SwiGLU for every N-block of linear 1 that is done; dispatch waits before it
//                writes.
//                Target in lap g: g * linear1_n_blocks
//   l2_arrival   +1 by SwiGLU for every N-block of linear 1 that is written; linear 2 waits before
//   it
//                reads.
//                Target in lap g: (g + 1) * linear1_n_blocks
//   l2_empty     +1 by linear 2 for every N-block that has read it; SwiGLU waits before it writes.
//                Target in lap g: g * linear2_n_blocks
//
// The last row of a partly filled block adds the missing rows too, so every block reaches block_m.
#pragma once

#include "protocol/shape.h"

namespace jax_megamoe {

struct RingPosition {
  uint32_t slot;
  uint32_t lap;
};

JMM_HD constexpr RingPosition ring_position(const MoeShape& shape, uint32_t pool_block) {
  return {pool_block % shape.ring_blocks, pool_block / shape.ring_blocks};
}
JMM_HD constexpr uint32_t l1_arrival_target(const MoeShape& shape, uint32_t lap) {
  return (lap + 1) * shape.block_m;
}
JMM_HD constexpr uint32_t l1_empty_target(const MoeShape& shape, uint32_t lap) {
  return lap * shape.linear1_n_blocks();
}
JMM_HD constexpr uint32_t l2_arrival_target(const MoeShape& shape, uint32_t lap) {
  return (lap + 1) * shape.linear1_n_blocks();
}
JMM_HD constexpr uint32_t l2_empty_target(const MoeShape& shape, uint32_t lap) {
  return lap * shape.linear2_n_blocks();
}
// What the row at `row_in_block` of a block with `valid_rows` rows adds to l1_arrival.
JMM_HD constexpr uint32_t l1_arrival_increment(const MoeShape& shape, uint32_t row_in_block,
                                               uint32_t valid_rows) {
  return row_in_block + 1 == valid_rows ? 1 + shape.block_m - valid_rows : 1;
}

}  // namespace jax_megamoe
