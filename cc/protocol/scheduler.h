// scheduler.h: the order in which a rank's workers visit blocks. One visitor, used by every role.
//
// The order is a pure function of (rows per local expert, shape, number of workers): no atomics,
// and every role of every worker replays the same walk. Pool blocks are cut into waves; a wave is
// first visited by linear 1, then by linear 2. Worker w takes items w, w + W, w + 2W, ... of that
// list.
//
// Progress: a wave never holds more than ring_blocks blocks. So whatever an item waits for (rows
// that dispatch brings in pool order, the slot's previous lap, linear 1 of the same block) is
// produced by dispatch or by items earlier in the list, and the earliest unfinished item can always
// run.
#pragma once

#include "protocol/ring.h"
#include "protocol/shape.h"

namespace jax_megamoe {

enum class Phase : uint32_t { kLinear1 = 0, kLinear2 = 1 };

struct Block {
  Phase phase;
  uint32_t expert;      // local expert
  uint32_t m_block;     // M-block of that expert
  uint32_t n_block;     // N-block of the phase's weight matrix
  uint32_t pool_block;  // M-block of the rank's pool
  uint32_t valid_m;     // rows of the M-block that hold tokens, 1..block_m
};

// A position in the pool: block `m_block` of `expert` is pool block `pool_block`.
struct PoolCursor {
  uint32_t expert = 0;
  uint32_t m_block = 0;
  uint32_t pool_block = 0;

  // Moves to the pool block `target` >= pool_block. Experts without rows have no blocks.
  template <class Rows>
  JMM_HD void advance_to(uint32_t target, const MoeShape& shape, const Rows& rows_of_expert) {
    uint32_t remaining = target - pool_block;
    while (expert < shape.num_local_experts()) {
      const uint32_t left = ceil_div(uint32_t(rows_of_expert(expert)), shape.block_m) - m_block;
      if (remaining < left) {
        m_block += remaining;
        break;
      }
      remaining -= left;
      m_block = 0;
      ++expert;
    }
    pool_block = target;
  }
};

template <class Rows>
JMM_HD uint32_t num_pool_blocks(const MoeShape& shape, const Rows& rows_of_expert) {
  uint32_t blocks = 0;
  for (uint32_t expert = 0; expert < shape.num_local_experts(); ++expert) {
    blocks += ceil_div(uint32_t(rows_of_expert(expert)), shape.block_m);
  }
  return blocks;
}

// Blocks in the wave that starts at `start`: enough linear-1 tiles for every worker to get two
// (imbalance at the wave's end), extended to the end of the expert so that its weights stay cached,
// and never more than the ring holds.
template <class Rows>
JMM_HD uint32_t wave_size(const MoeShape& shape, uint32_t num_workers, PoolCursor start,
                          const Rows& rows_of_expert) {
  const uint32_t wanted =
      min_of(ceil_div(2 * num_workers, shape.linear1_n_blocks()), shape.ring_blocks);
  uint32_t size = 0;
  uint32_t m_block = start.m_block;
  for (uint32_t expert = start.expert; expert < shape.num_local_experts(); ++expert) {
    size += ceil_div(uint32_t(rows_of_expert(expert)), shape.block_m) - m_block;
    m_block = 0;
    if (size >= wanted) break;
  }
  return min_of(size, shape.ring_blocks);
}

// Calls visit(Block) for each block of `worker`. visit returns false to stop the walk (a wait
// failed); the function returns false in that case.
template <class Rows, class Visit>
JMM_HD bool for_each_block(const MoeShape& shape, uint32_t worker, uint32_t num_workers,
                           const Rows& rows_of_expert, Visit&& visit) {
  const uint32_t total = num_pool_blocks(shape, rows_of_expert);
  PoolCursor wave;
  wave.advance_to(0, shape, rows_of_expert);
  uint64_t next = worker;  // this worker's next item, relative to the start of the current phase
  while (wave.pool_block < total) {
    const uint32_t size = wave_size(shape, num_workers, wave, rows_of_expert);
    for (uint32_t phase = 0; phase < 2; ++phase) {
      const uint32_t n_blocks = phase == 0 ? shape.linear1_n_blocks() : shape.linear2_n_blocks();
      const uint64_t num_items = uint64_t{size} * n_blocks;
      PoolCursor cursor = wave;
      for (; next < num_items; next += num_workers) {
        const uint32_t pool_block = wave.pool_block + static_cast<uint32_t>(next / n_blocks);
        cursor.advance_to(pool_block, shape, rows_of_expert);
        const uint32_t rows_left = rows_of_expert(cursor.expert) - cursor.m_block * shape.block_m;
        const Block block = {static_cast<Phase>(phase),
                             cursor.expert,
                             cursor.m_block,
                             static_cast<uint32_t>(next % n_blocks),
                             pool_block,
                             min_of(rows_left, shape.block_m)};
        if (!visit(block)) return false;
      }
      next -= num_items;  // numbering flows through phases and waves, so no worker is favoured
    }
    wave.advance_to(wave.pool_block + size, shape, rows_of_expert);
  }
  return true;
}

}  // namespace jax_megamoe
