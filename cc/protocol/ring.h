// ring.h: which ring slot a pool block uses, and what its counters have to reach.
//
// Pool blocks are numbered through all experts of a rank; block b uses slot b mod ring_blocks, in
// lap b div ring_blocks. Four counters per slot only ever grow within a call:
//
//   counter      +1 by                          waited for by               target in lap g
//   l1_arrival   dispatch, per row (see below)  linear 1, before reading    (g + 1) * block_m
//   l1_empty     linear 1, per N-block read     dispatch, before writing    g * linear1_n_blocks
//   l2_arrival   SwiGLU, per N-block written    linear 2, before reading    (g + 1) *
//   linear1_n_blocks l2_empty     linear 2, per N-block read     SwiGLU, before writing      g *
//   linear2_n_blocks
//
// The last row of a partly filled block adds the missing rows as well, so every block reaches
// block_m.
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
