// scheduler.h: the order in which a rank's workers visit blocks.
//
// The list of items is a pure function of (rows per local expert, shape, number of workers). Pool
// blocks are cut into waves; a wave is first visited by linear 1, then by linear 2. for_each_block
// deals the list out without atomics: worker w takes items w, w + W, w + 2W, ... BlockWalk finds an
// item by its number, for workers that take the next one when they are free.
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
  uint32_t n_block;     // item of the M-block: its part of the rows of the phase's weight matrix
  uint32_t pool_block;  // M-block of the rank's pool
  uint32_t valid_m;     // rows of the M-block that hold tokens, 1..block_m
};

// Into how many items a back end cuts the work of one M-block in each phase.
struct ItemCounts {
  uint32_t linear1;
  uint32_t linear2;
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

// Blocks a wave should have when `left` are left, before it is extended to the end of an expert and
// cut to the ring: enough linear-1 items for every worker to get two (imbalance at the wave's end).
// What is left is split evenly, because a short last wave leaves most workers waiting for the
// linear 1 of a few.
JMM_HD constexpr uint32_t wave_blocks(uint32_t num_workers, uint32_t l1_items, uint32_t left) {
  const uint32_t wanted = ceil_div(2 * num_workers, l1_items);
  const uint32_t waves = max_of((left + wanted / 2) / wanted, 1u);
  return ceil_div(left, waves);
}

// Blocks in the wave that starts at `start`, of `total`: see wave_blocks(). Extended to the end of
// the expert so that its weights stay cached, and never more than the ring holds.
template <class Rows>
JMM_HD uint32_t wave_size(const MoeShape& shape, ItemCounts items, uint32_t num_workers,
                          uint32_t total, PoolCursor start, const Rows& rows_of_expert) {
  const uint32_t wanted =
      min_of(wave_blocks(num_workers, items.linear1, total - start.pool_block), shape.ring_blocks);
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
JMM_HD bool for_each_block(const MoeShape& shape, ItemCounts items, uint32_t worker,
                           uint32_t num_workers, const Rows& rows_of_expert, Visit&& visit) {
  const uint32_t total = num_pool_blocks(shape, rows_of_expert);
  PoolCursor wave;
  wave.advance_to(0, shape, rows_of_expert);
  uint64_t next = worker;  // this worker's next item, relative to the start of the current phase
  while (wave.pool_block < total) {
    const uint32_t size = wave_size(shape, items, num_workers, total, wave, rows_of_expert);
    for (uint32_t phase = 0; phase < 2; ++phase) {
      const uint32_t n_blocks = phase == 0 ? items.linear1 : items.linear2;
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

// The list of for_each_block by item number, for workers that take the next item from an atomic
// counter when they are free. `l1_items` and `l2_items` are ItemCounts.
//
//   block_start(e)  pool block at which local expert e starts; block_start(E/R): their number
//   rows(e)         rows of local expert e
//
// Both are random access, so a step costs binary searches over the experts, no loop over them.
//
// Progress: a worker's items ascend, and it finishes one before it takes the next. The counter
// hands them out in order, so the earliest unfinished item is either the one that its worker is at,
// or, if nobody has taken it, the next one that a free worker gets; all items before it are
// finished, and whatever it waits for comes from those or from dispatch. Which worker takes it is
// irrelevant.
template <class BlockStart, class Rows>
class BlockWalk {
 public:
  JMM_HD BlockWalk(const MoeShape& shape, uint32_t num_workers, uint32_t l1_items,
                   uint32_t l2_items, const BlockStart& block_start, const Rows& rows)
      : block_start_(block_start),
        rows_(rows),
        num_experts_(shape.num_local_experts()),
        block_m_(shape.block_m),
        ring_blocks_(shape.ring_blocks),
        num_workers_(num_workers),
        items_{l1_items, l2_items},
        total_(block_start(num_experts_)) {
    start_wave(0);
  }

  // The block of item `item`; not less than the item asked for before. False past the end.
  JMM_HD bool find(uint64_t item, Block* out) {
    while (wave_start_ < total_) {
      const uint32_t items = phase_ == 0 ? items_[0] : items_[1];
      const uint64_t in_phase = item - items_before_;
      if (in_phase < uint64_t{wave_size_} * items) {
        const uint32_t pool_block = wave_start_ + static_cast<uint32_t>(in_phase / items);
        const uint32_t expert = expert_of(pool_block);
        const uint32_t m_block = pool_block - block_start_(expert);
        *out = {static_cast<Phase>(phase_),
                expert,
                m_block,
                static_cast<uint32_t>(in_phase % items),
                pool_block,
                min_of(uint32_t(rows_(expert)) - m_block * block_m_, block_m_)};
        return true;
      }
      items_before_ += uint64_t{wave_size_} * items;
      if (phase_ == 0) {
        phase_ = 1;
      } else {
        start_wave(wave_start_ + wave_size_);
      }
    }
    return false;
  }

 private:
  // See wave_size().
  JMM_HD void start_wave(uint32_t start) {
    phase_ = 0;
    wave_start_ = start;
    if (start >= total_) return;
    wave_expert_ = expert_of(start);
    const uint32_t wanted =
        min_of(wave_blocks(num_workers_, items_[0], total_ - start), ring_blocks_);
    const uint32_t end = block_start_(expert_of(start + wanted - 1) + 1);
    wave_size_ = min_of(end - start, ring_blocks_);
  }

  // The last expert that starts at or before `pool_block`: those without rows start where the next
  // one does. Experts before the wave's first one need not be searched.
  JMM_HD uint32_t expert_of(uint32_t pool_block) const {
    uint32_t first = wave_expert_;
    uint32_t last = num_experts_ - 1;
    while (first < last) {
      const uint32_t middle = (first + last + 1) / 2;
      if (uint32_t(block_start_(middle)) <= pool_block) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }

  BlockStart block_start_;
  Rows rows_;
  uint32_t num_experts_;
  uint32_t block_m_;
  uint32_t ring_blocks_;
  uint32_t num_workers_;
  uint32_t items_[2];
  uint32_t total_;  // pool blocks

  uint32_t phase_ = 0;
  uint32_t wave_expert_ = 0;  // the expert at the start of the wave
  uint32_t wave_start_ = 0;
  uint32_t wave_size_ = 0;
  uint64_t items_before_ = 0;  // items of all phases before this one
};

}  // namespace jax_megamoe
