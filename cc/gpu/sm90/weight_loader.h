// weight_loader.h: the lane that takes items of work, tells the other roles, and copies their
// weights into the stages.
#pragma once

#include "gpu/common/call_barrier.h"
#include "gpu/common/trace.h"
#include "gpu/sm90/stages.h"
#include "protocol/scheduler.h"

namespace jax_megamoe::gpu {

// Calls almost_done() a few stages before the last.
// Caller: one thread.
template <class P, class AlmostDone>
JMM_DEVICE void load_weights(const Cta& cta, const Item& item, StageCursor& at,
                             const uint8_t* weights, const AlmostDone& almost_done) {
  constexpr uint32_t kEarly = min_of(kStagesBeforeNextItem, kKBlocks<P>);
  constexpr uint32_t kChunks = P::kRows / kWeightChunkRows;
  for (uint32_t pass = 0; pass < valid_passes<P>(item.n); ++pass) {
    const uint32_t tile = item.n * P::kPasses + pass;
    const uint32_t chunks = valid_chunks<P>(tile);
    const uint8_t* source = weights + (uint64_t{item.expert} * kChunks +
                                       tile * kTileChunks<P>)*(uint64_t{kKBlocks<P>} * kChunkBytes);
    for (uint32_t k = 0; k < kKBlocks<P>; ++k) {
      mbarrier_wait(cta, empty_barrier(cta, at.index), at.parity ^ 1);
      if (gave_up(cta)) return;
      if (k + kEarly == kKBlocks<P> && pass + 1 == valid_passes<P>(item.n)) almost_done();
      const uint32_t full = full_barrier(cta, at.index);
      const uint32_t stage =
          cta.stages_address + kWeightStagesOffset + at.index * kWeightStageBytes;
      if constexpr (!kRacecheck) mbarrier_arrive_expect_tx(full, chunks * kChunkBytes);
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        bulk_load(stage + chunk * kChunkBytes,
                  source + (uint64_t{chunk} * kKBlocks<P> + k) * kChunkBytes, kChunkBytes, full);
      }
      if constexpr (kRacecheck) mbarrier_arrive(full);
      at.advance();
    }
  }
}

// Before counts are known: if every expert is likely to get rows, item b of the list is tile
// b % items of expert b / items, and the first stages' weights can be on their way to the L2 while
// rows are being dispatched.
// Caller: one thread.
JMM_DEVICE void prefetch_first_weights(const Cta& cta, uint32_t tokens) {
  if (uint64_t{tokens} * kTopK * kRanks < uint64_t{kRowsThatMakeItLikely} * kShape.num_experts) {
    return;
  }
  constexpr uint32_t kChunks = Linear1::kRows / kWeightChunkRows;
  constexpr uint32_t kChunksOfItem = kTileChunks<Linear1> * Linear1::kPasses;
  constexpr uint32_t kDepth = min_of(kStages, kKBlocks<Linear1>);
  const uint32_t expert = blockIdx.x / kItems<Linear1>, n = blockIdx.x % kItems<Linear1>;
  if (expert >= kLocalExperts) return;
#pragma unroll
  for (uint32_t i = 0; i < kTileChunks<Linear1>; ++i) {
    const uint64_t chunk = uint64_t{expert} * kChunks + n * kChunksOfItem + i;
    bulk_prefetch_l2(cta.args.w13 + chunk * kKBlocks<Linear1> * kChunkBytes, kDepth * kChunkBytes);
  }
}

// Hands the next item to the other roles.
// Caller: one thread.
JMM_DEVICE void pass_on(const Cta& cta, uint32_t index, const Item& item) {
  const uint32_t item_slot = index % kItemSlots, parity = index / kItemSlots % 2;
  if (!mbarrier_wait_for_role(cta, shared_address(&cta.control->item_empty[item_slot]),
                              parity ^ 1)) {
    return;
  }
  cta.control->items[item_slot] = item;
  mbarrier_arrive(shared_address(&cta.control->item_full[item_slot]));
}

// The weight loader's role. It always ends with ItemKind::kEnd or ItemKind::kAbort.
// Caller: one thread.
JMM_DEVICE void weight_role(const Cta& cta) {
  const SharedControl& control = *cta.control;
  const auto block_start = [&](uint32_t e) { return control.block_start[e]; };
  const auto rows = [&](uint32_t e) { return control.row_start[e + 1] - control.row_start[e]; };
  uint32_t index = 0;
  uint64_t participants = load_participants(cta);
  if (!gave_up(cta)) {
    BlockWalk walk(shape_of_kernel(), gridDim.x, kItems<Linear1>, kItems<Linear2>, block_start,
                   rows);
    uint32_t* counter = region<Region::next_item>(cta.local());
    StageCursor at;
    Block block;
    uint32_t number = atom_add_relaxed_gpu(counter, 1);
    for (; walk.find(number, &block); ++index) {
      const RingPosition ring = ring_position(shape_of_kernel(), block.pool_block);
      const Item item = {static_cast<ItemKind>(block.phase),
                         block.expert,
                         block.n_block,
                         block.pool_block,
                         block.valid_m,
                         ring.slot,
                         ring.lap,
                         0};
      pass_on(cta, index, item);
      // Not earlier than its latency takes: at the end of a call, an item that waits behind another
      // is one that a free CTA could have done.
      const auto take_next = [&] { number = atom_add_relaxed_gpu(counter, 1); };
      Trace trace(cta, kWeightLane,
                  item.kind == ItemKind::kLinear1 ? TraceName::kLinear1 : TraceName::kLinear2, true,
                  item.pool_block);
      if (item.kind == ItemKind::kLinear1) {
        load_weights<Linear1>(cta, item, at, cta.args.w13, take_next);
      } else {
        load_weights<Linear2>(cta, item, at, cta.args.w2, take_next);
      }
      if (gave_up(cta)) {
        ++index;
        break;
      }
    }
  }
  if (gave_up(cta) && !aborted(cta)) {
    record_failure(cta, FailureKind::kTimeout, kSharedBarrier,
                   control.stuck_barrier - shared_address(&control), control.stuck_parity ^ 1,
                   control.stuck_parity);
  }
  // For what math does after its last item.
  if (!gave_up(cta) && !receive_participants(cta, participants)) give_up(cta);
  Item last = {};
  last.kind = gave_up(cta) ? ItemKind::kAbort : ItemKind::kEnd;
  pass_on(cta, index, last);
}

}  // namespace jax_megamoe::gpu
