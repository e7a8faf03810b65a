// dispatch.h: token path, stage 1, second half. Row counts of this rank's experts, and the rows
// themselves pulled from their ranks into the ring.
#pragma once

#include "gpu/common/call_barrier.h"
#include "gpu/common/trace.h"
#include "protocol/ring.h"

namespace jax_megamoe::gpu {

// ---- counts ----

// Exclusive prefix sum of value(e) over the local experts into start[0 .. E/R].
// Caller: one warp.
template <class Value>
JMM_DEVICE uint32_t prefix_sum(uint32_t* start, const Value& value) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t first = 0; first < kLocalExperts; first += 32) {
    const uint32_t e = first + lane;
    const uint32_t own = e < kLocalExperts ? value(e) : 0;
    uint32_t sum = own;
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (e < kLocalExperts) start[e] = before + sum - own;
    before += __shfl_sync(~0u, sum, 31);
  }
  return before;
}

// The producers wait until every rank has published its counts, and lay out the pool. Then nothing
// about the schedule is unknown. False: the call is aborted.
// Caller: all producer threads of a CTA.
JMM_DEVICE bool receive_counts(const Cta& cta, uint32_t thread) {
  SharedControl& control = *cta.control;
  const uint64_t call = cta.epoch() + 1;
  bool arrived = true;
  for (uint32_t i = thread; i < kRanks * kLocalExperts && arrived; i += 128) {
    arrived = wait_at_least<Region::expert_recv_count, LoadSys64>(cta, i, published_count(call, 0));
    if (arrived) {
      const uint64_t word = ld_acquire_sys(region<Region::expert_recv_count>(cta.local()) + i);
      control.recv_count[i / kLocalExperts][i % kLocalExperts] = count_rows(word);
    }
  }
  if (!arrived) give_up(cta);
  named_barrier_sync(kBarrierProducers, 128);
  if (gave_up(cta)) return false;
  const uint32_t warp = thread / 32;
  const auto rows_of = [&](uint32_t e) {
    uint32_t rows = 0;
    for (uint32_t source = 0; source < kRanks; ++source) rows += control.recv_count[source][e];
    return rows;
  };
  if (warp == 0) {
    const uint32_t rows = prefix_sum(control.row_start, rows_of);
    if (thread == 0) control.row_start[kLocalExperts] = rows;
  } else if (warp == 1) {
    const uint32_t blocks =
        prefix_sum(control.block_start, [&](uint32_t e) { return ceil_div(rows_of(e), kBlockM); });
    if (thread == 32) control.block_start[kLocalExperts] = blocks;
  } else {
    for (uint32_t source = warp - 2; source < kRanks; source += 2) {
      prefix_sum(control.list_start[source],
                 [&](uint32_t e) { return control.recv_count[source][e]; });
    }
  }
  named_barrier_sync(kBarrierProducers, 128);
  return true;
}

// CTA 0 tells the caller.
// Caller: all producer threads of the leader.
JMM_DEVICE void report_counts(const Cta& cta, uint32_t thread) {
  const SharedControl& control = *cta.control;
  for (uint32_t e = thread; e < kLocalExperts; e += 128) {
    cta.args.received[e] = static_cast<int32_t>(control.row_start[e + 1] - control.row_start[e]);
  }
  if (thread != 0) return;
  const uint32_t blocks = control.block_start[kLocalExperts];
  cta.args.status[kStatusReceivedRows] = static_cast<int32_t>(control.row_start[kLocalExperts]);
  cta.args.status[kStatusPoolBlocks] = static_cast<int32_t>(blocks);
  cta.args.status[kStatusRingLaps] = static_cast<int32_t>(ceil_div(blocks, kShape.ring_blocks));
}

// ---- which source row is where ----

struct SourceRow32 {
  uint32_t rank;
  uint32_t index;
};

// Does what locate_source_row() of protocol/dispatch_order.h does; each lane looks after every 32nd
// rank.
// Caller: one warp.
JMM_DEVICE SourceRow32 locate_source_row_by_warp(const SharedControl& control, uint32_t expert,
                                                 uint32_t position) {
  if constexpr (kRanks == 1) return {0, position};
  constexpr uint32_t kPerLane = ceil_div(kRanks, 32u);
  const uint32_t lane = threadIdx.x % 32;
  uint32_t remaining[kPerLane];
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) {
    const uint32_t rank = i * 32 + lane;
    remaining[i] = rank < kRanks ? control.recv_count[rank][expert] : 0;
  }
  uint32_t peeled = 0;
  for (uint32_t round = 0; round < kRanks; ++round) {
    uint32_t active = 0, smallest = ~0u;
    uint32_t mask[kPerLane];
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      mask[i] = __ballot_sync(~0u, remaining[i] > 0);
      active += __popc(mask[i]);
      if (remaining[i] > 0) smallest = min_of(smallest, remaining[i]);
    }
    smallest = __reduce_min_sync(~0u, smallest);
    if (active == 0) break;
    if (position < smallest * active) {
      uint32_t nth = position % active;
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) {
        const uint32_t here = __popc(mask[i]);
        if (nth < here)
          return {i * 32 + __fns(mask[i], 0, static_cast<int>(nth) + 1),
                  peeled + position / active};
        nth -= here;
      }
    }
    position -= smallest * active;
    peeled += smallest;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) remaining[i] -= min_of(remaining[i], smallest);
  }
  return {0, 0};
}

// ---- rows into the ring ----

// A row of the pool: where it goes, and where it comes from.
struct PoolRow {
  RingPosition ring;
  uint32_t pool_block;
  uint32_t row;        // of the block
  uint32_t increment;  // of l1_arrival
  uint32_t source;     // rank
  uint32_t topk_slot;  // of that rank
};

// Finds the row at `pool_row`, in pool order and without padding. `expert` is where the last
// search ended; rows are asked for in ascending order.
// Caller: one warp.
JMM_DEVICE PoolRow find_pool_row(const Cta& cta, uint32_t pool_row, uint32_t& expert) {
  const SharedControl& control = *cta.control;
  while (pool_row >= control.row_start[expert + 1]) ++expert;
  const uint32_t position = pool_row - control.row_start[expert];
  const uint32_t rows = control.row_start[expert + 1] - control.row_start[expert];
  const uint32_t pool_block = control.block_start[expert] + position / kBlockM;
  const uint32_t row = position % kBlockM;
  const SourceRow32 source = locate_source_row_by_warp(control, expert, position);
  const uint32_t listed = source.rank * kShape.max_slots_per_rank() +
                          control.list_start[source.rank][expert] + source.index;
  return {ring_position(shape_of_kernel(), pool_block),
          pool_block,
          row,
          l1_arrival_increment(shape_of_kernel(), row, min_of(rows - (position - row), kBlockM)),
          source.rank,
          region<Region::src_token_topk_idx>(cta.local())[listed]};
}

// Brings one row into the ring. Weight and scales are asked for before the codes, and used after
// them, so that a row waits for its rank once per batch of codes and no more. False: the call is
// aborted.
// Caller: one warp.
JMM_DEVICE bool pull_row(const Cta& cta, const PoolRow& from) {
  const uint32_t lane = threadIdx.x % 32;
  if (from.ring.lap > 0) {
    bool free = true;
    if (lane == 0) {
      free = wait_at_least<Region::l1_empty, LoadGpu32>(
          cta, from.ring.slot, l1_empty_target(shape_of_kernel(), from.ring.lap));
    }
    if (!__shfl_sync(~0u, free, 0)) return false;
    __syncwarp();
  }
  void* source = cta.args.peer_buffer[from.source];
  const uint64_t token = from.topk_slot / kTopK;
  const uint8_t* sf = region<Region::x_sf>(source) + token * (kHidden / kSfGroup);
  float topk_weight = 0.0f;
  if (lane == 0) topk_weight = region<Region::topk_weights>(source)[from.topk_slot];
  const RowScales scales(sf);
  copy_row(region<Region::x>(source) + token * kHidden, sf,
           reinterpret_cast<uint8_t*>(region<Region::l1_acts>(cta.local())) +
               from.ring.slot * kRingBlockBytes<Linear1>,
           from.row);
  scales.store(cta, from.ring.slot, from.row);
  if (lane == 0) {
    region<Region::l1_topk_weights>(cta.local())[from.ring.slot * kBlockM + from.row] = topk_weight;
    region<Region::token_src_metadata>(
        cta.local())[uint64_t{from.pool_block} * kBlockM + from.row] = {from.source,
                                                                        from.topk_slot};
  }
  fence_proxy_async_global();  // the copy engine reads what this lane has written
  __syncwarp();
  if (lane == 0) add_release<Region::l1_arrival>(cta, from.ring.slot, from.increment);
  return true;
}

// The pull role: rows in pool order, spread over all pull warps of the rank, so that the first
// blocks are complete first.
// Caller: one warp.
JMM_DEVICE void pull_role(const Cta& cta, uint32_t pull_warp) {
  const uint32_t lane = threadIdx.x % 32;
  uint64_t participants = load_participants(cta);
  if (cta.leads() && pull_warp == 0) publish_call_barrier(cta, kRowsListed);
  {
    Trace trace(cta, kPullLane + pull_warp, TraceName::kWaitRanks, lane == 0);
    if (!wait_call_barrier(cta, kRowsListed)) return give_up(cta);
    __syncwarp();
  }
  Trace trace(cta, kPullLane + pull_warp, TraceName::kPull, lane == 0);
  const uint32_t num_rows = cta.control->row_start[kLocalExperts];
  // Decided before this rank's rows were listed.
  if (!decided(cta, participants)) participants = load_participants(cta);
  const uint32_t ctas = count_rows(participants);
  const uint32_t first = cta.ticket() + pull_warp * ctas, stride = kPullWarps * ctas;
  uint32_t expert = 0;
  PoolRow next = {};
  // A row is looked up while the one before it is copied. Both at one place: what is inlined twice
  // does not fit the producers' registers.
  for (uint32_t row = first;; row += stride) {
    const PoolRow from = next;
    if (row < num_rows) next = find_pool_row(cta, row, expert);
    if (row != first && !pull_row(cta, from)) return give_up(cta);
    if (row >= num_rows) return;
  }
}

}  // namespace jax_megamoe::gpu
