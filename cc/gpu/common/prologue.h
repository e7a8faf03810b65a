// prologue.h: token path, stage 1, first half. Input to FP8 rows in the workspace; which expert
// gets which slots. All threads of a CTA, before roles part.
#pragma once

#include "gpu/common/call_barrier.h"
#include "gpu/common/trace.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// Rows of this call that hold tokens. Every CTA sees the same; the leader reports a bad number.
// Caller: all threads of a CTA.
JMM_DEVICE uint32_t valid_tokens(const Cta& cta) {
  const KernelArgs& args = cta.args;
  if (args.num_tokens == nullptr) return args.num_rows;
  const int32_t given = *args.num_tokens;
  if (given >= 0 && static_cast<uint32_t>(given) <= args.num_rows) return given;
  if (cta.leads() && threadIdx.x == 0) {
    record_failure(cta, FailureKind::kNumTokens, 0, 0, args.num_rows,
                   static_cast<uint64_t>(static_cast<int64_t>(given)));
  }
  return 0;
}

// ---- staging ----

inline constexpr uint32_t kGroups = kHidden / kSfGroup;  // scales of a row

// Largest magnitude of 32 BF16 values as FP32 bits, infinities and NaN included.
JMM_DEVICE uint32_t magnitude_of(const uint4 (&values)[4]) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      low = max_of(low, (words[j] << 16) & kAbsMask);
      high = max_of(high, words[j] & 0x7FFF0000u);
    }
  }
  return max_of(low, high);
}
// The same with infinities and NaN counted as zero.
JMM_DEVICE uint32_t finite_magnitude_of(const uint16_t* row) {
  uint32_t amax = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < kSfGroup; ++i) {
    amax = max_of(amax, finite_magnitude(bf16_to_float(row[i])));
  }
  return amax;
}
// Codes of a group with values that are not finite: exact, element by element.
JMM_DEVICE void quantize_slowly(const uint16_t* row, float reciprocal, uint8_t* out) {
#pragma unroll 1
  for (uint32_t i = 0; i < kSfGroup; ++i) {
    out[i] = e4m3_from_float(bf16_to_float(row[i]), reciprocal);
  }
}

JMM_DEVICE void load_group(const uint16_t* row, uint4 (&values)[4]) {
  const uint4* source = reinterpret_cast<const uint4*>(row);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) values[i] = __ldg(source + i);
}
JMM_DEVICE uint32_t quantize_4(uint32_t first, uint32_t second, float reciprocal) {
  const uint32_t low = cvt_e4m3x2(bits_float(first << 16) * reciprocal,
                                  bits_float(first & 0xFFFF0000u) * reciprocal);
  const uint32_t high = cvt_e4m3x2(bits_float(second << 16) * reciprocal,
                                   bits_float(second & 0xFFFF0000u) * reciprocal);
  return low | (high << 16);
}

// Quantises one row; a lane holds one group of 32 at a time. Coarser granularities share
// the magnitude over 4 lanes or over the row, which is read twice then.
// Caller: one warp.
JMM_DEVICE void stage_row(const Cta& cta, uint32_t token, uint32_t lane) {
  uint8_t* codes = region<Region::x>(cta.local()) + uint64_t{token} * kHidden;
  uint8_t* scales = region<Region::x_sf>(cta.local()) + uint64_t{token} * kGroups;
  if (cta.args.x_sf != nullptr) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(cta.args.x) +
                                                       uint64_t{token} * kHidden);
    for (uint32_t i = lane; i < kHidden / 16; i += 32) reinterpret_cast<uint4*>(codes)[i] = from[i];
    const uint8_t* from_sf = cta.args.x_sf + uint64_t{token} * kGroups;
    for (uint32_t i = lane; i < kGroups; i += 32) {
      const uint32_t sf = from_sf[i];
      scales[i] = static_cast<uint8_t>(sf);
      // FP8 tensor cores take one scale for all that should share it.
      if constexpr (kGranularity != Granularity::k32) {
        const uint32_t first = kGranularity == Granularity::kRow ? 0 : i / 4 * 4;
        if (sf != from_sf[first]) {
          record_failure(cta, FailureKind::kUnequalScales, 0, uint64_t{token} * kGroups + i,
                         from_sf[first], sf, static_cast<uint32_t>(kGranularity));
        }
      }
    }
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(cta.args.x) + uint64_t{token} * kHidden;
  uint32_t row_amax = 0;
  if constexpr (kGranularity == Granularity::kRow) {
#pragma unroll 4  // loads of several groups on their way
    for (uint32_t group = lane; group < kGroups; group += 32) {
      uint4 values[4];
      load_group(row + group * kSfGroup, values);
      row_amax = max_of(row_amax, magnitude_of(values));
    }
    if (row_amax >= kInfBits) {
      row_amax = 0;
      for (uint32_t group = lane; group < kGroups; group += 32) {
        row_amax = max_of(row_amax, finite_magnitude_of(row + group * kSfGroup));
      }
    }
    row_amax = __reduce_max_sync(~0u, row_amax);
  }
  uint4 next[4] = {};  // of the next group, on their way
  if (lane < kGroups) load_group(row + lane * kSfGroup, next);
  for (uint32_t first = 0; first < kGroups; first += 32) {
    const uint32_t group = first + lane;
    const bool inside = group < kGroups;  // kGroups is a multiple of 4: lanes of 4 agree
    uint4 values[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) values[i] = next[i];
    if (group + 32 < kGroups) load_group(row + (group + 32) * kSfGroup, next);
    uint32_t amax = 0;
    bool finite = true;
    if (inside) {
      amax = magnitude_of(values);
      finite = amax < kInfBits;
      if (!finite) amax = finite_magnitude_of(row + group * kSfGroup);
    }
    if constexpr (kGranularity == Granularity::k128) {
      amax = max_of(amax, __shfl_xor_sync(~0u, amax, 1));
      amax = max_of(amax, __shfl_xor_sync(~0u, amax, 2));
    } else if constexpr (kGranularity == Granularity::kRow) {
      amax = row_amax;
    }
    if (!inside) continue;
    const uint8_t sf = sf_e4m3(amax);
    const float reciprocal = ue8m0_reciprocal(sf);
    // The conversion of the tensor cores knows nothing of the one scale with fewer codes.
    finite &= largest_e4m3(reciprocal) == 0x7E;
    uint8_t* out = codes + group * kSfGroup;
    if (finite) {
      uint4* target = reinterpret_cast<uint4*>(out);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint4 a = values[2 * i], b = values[2 * i + 1];
        target[i] = {quantize_4(a.x, a.y, reciprocal), quantize_4(a.z, a.w, reciprocal),
                     quantize_4(b.x, b.y, reciprocal), quantize_4(b.z, b.w, reciprocal)};
      }
    } else {
      quantize_slowly(row + group * kSfGroup, reciprocal, out);
    }
    scales[group] = sf;
  }
}

// Rows of x are dealt out to CTAs in turn, skipping the first `skipped` CTAs. A thread works on the
// shares of CTA `first` and of every `step`-th CTA after it. In each share its warp does row `row`
// and every `row_step`-th row after it.
struct Shares {
  uint32_t first, step, row, row_step;
};
// Caller: all threads of a CTA.
JMM_DEVICE void stage_shares(const Cta& cta, uint32_t tokens, uint32_t skipped,
                             const Shares& shares) {
  const uint32_t workers = gridDim.x - skipped;
  for (uint32_t share = shares.first; share < gridDim.x; share += shares.step) {
    for (uint32_t token = share - skipped + shares.row * workers; token < tokens;
         token += shares.row_step * workers) {
      stage_row(cta, token, threadIdx.x % 32);
    }
  }
}

// ---- routes ----

JMM_DEVICE int64_t given_expert(const KernelArgs& args, uint64_t slot) {
  return args.topk_idx_is_64bit ? static_cast<const int64_t*>(args.topk_idx)[slot]
                                : static_cast<const int32_t*>(args.topk_idx)[slot];
}

// Slots per expert that this CTA counts, and next free places in the owners' lists. The table uses
// the shared memory of the stages, which are empty yet.
struct RouteTable {
  uint32_t count[kShape.num_experts];
  uint32_t next[kShape.num_experts];
  uint32_t out_of_range;
  uint32_t first_out_of_range;
};
static_assert(sizeof(RouteTable) <= kControlOffset);

// A thread's slots of one batch. Adding to a counter in shared memory is what takes the time, and
// tells the place as well: a CTA with a single batch adds once a slot.
struct RouteBatch {
  int32_t expert[kRouteBatch];  // or -1
  uint32_t place[kRouteBatch];  // among the CTA's slots of the expert
};
inline constexpr uint32_t kSlotsOfBatch = kThreads * kRouteBatch;

// Up to so many slots one CTA counts and lists them all: it needs no barrier in between.
inline constexpr uint32_t kSlotsOfOneCta = min_of(kMaxSlotsOfOneCta, kSlotsOfBatch);

// The slots of one CTA: a share, and behind it those of the absent, if it has taken them on.
struct Slots {
  uint32_t begin, share, begin_of_rest, count;

  JMM_DEVICE uint32_t at(uint32_t i) const {
    return i < share ? begin + i : begin_of_rest + (i - share);
  }
};

// Counts slots per expert; copies expert ids and weights into the workspace. `batch` is the last.
// Caller: all threads of a CTA.
JMM_DEVICE void count_slots(const Cta& cta, RouteTable& table, const Slots& slots,
                            RouteBatch& batch) {
  const KernelArgs& args = cta.args;
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < kShape.num_experts; e += kThreads) table.count[e] = 0;
  if (threadIdx.x == 0) {
    table.out_of_range = 0;
    table.first_out_of_range = ~0u;
  }
  __syncthreads();
  int32_t* staged_idx = region<Region::topk_idx>(cta.local());
  float* staged_weights = region<Region::topk_weights>(cta.local());
  for (uint32_t first = threadIdx.x; first < slots.count; first += kSlotsOfBatch) {
    int64_t experts[kRouteBatch];
    float weights[kRouteBatch];
#pragma unroll
    for (uint32_t i = 0; i < kRouteBatch; ++i) {
      const bool given = first + i * kThreads < slots.count;
      const uint32_t slot = slots.at(first + i * kThreads);
      experts[i] = given ? given_expert(args, slot) : -1;
      weights[i] = given ? args.topk_weights[slot] : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < kRouteBatch; ++i) {
      if (first + i * kThreads >= slots.count) break;
      const uint32_t slot = slots.at(first + i * kThreads);
      const bool inside = experts[i] >= 0 && experts[i] < int64_t{kShape.num_experts};
      batch.expert[i] = inside ? static_cast<int32_t>(experts[i]) : -1;
      if (inside) {
        batch.place[i] = atomicAdd(&table.count[experts[i]], 1);
      } else if (experts[i] != -1) {
        atomicAdd(&table.out_of_range, 1);
        atomicMin(&table.first_out_of_range, slot);
      }
      staged_idx[slot] = batch.expert[i];
      staged_weights[slot] = weights[i];
    }
  }
  __syncthreads();
}

// Publishes this rank's counts. Weight loaders of all ranks wait for them.
// Caller: all threads of the leader.
template <class Count>
JMM_DEVICE void publish_counts(const Cta& cta, const Count& count) {
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < kShape.num_experts; e += kThreads) {
    const uint32_t owner = e / kLocalExperts, local_expert = e % kLocalExperts;
    store_release<Region::expert_recv_count>(cta, owner,
                                             uint64_t{cta.args.rank} * kLocalExperts + local_expert,
                                             published_count(cta.epoch() + 1, count(e)));
  }
}

// At each owner this rank's rows are packed, local expert after local expert. This adds each
// expert's start to table.next. count(e) is that of the whole rank; each owner has a warp.
// Caller: all threads of a CTA.
template <class Count>
JMM_DEVICE void add_list_starts(RouteTable& table, const Count& count) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t owner = threadIdx.x / 32; owner < kRanks; owner += kWarps) {
    uint32_t before = 0;
    for (uint32_t first = 0; first < kLocalExperts; first += 32) {
      const uint32_t e = first + lane;
      const uint32_t own = e < kLocalExperts ? count(owner * kLocalExperts + e) : 0;
      uint32_t sum = own;
#pragma unroll
      for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (e < kLocalExperts) table.next[owner * kLocalExperts + e] += before + sum - own;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
}

JMM_DEVICE void list_slot(const Cta& cta, int32_t expert, uint32_t place, uint32_t slot) {
  region<Region::src_token_topk_idx>(
      cta.args.peer_buffer[expert / kLocalExperts])[cta.args.rank * kShape.max_slots_per_rank() +
                                                    place] = slot;
}
// Writes slots into the owners' lists; within an expert in the order in which threads get there: no
// result depends on it. `batch` is count_slots' last.
// Caller: all threads of a CTA.
JMM_DEVICE void list_slots(const Cta& cta, RouteTable& table, const Slots& slots,
                           const RouteBatch& batch) {
  if (slots.count <= kSlotsOfBatch) {
#pragma unroll
    for (uint32_t i = 0; i < kRouteBatch; ++i) {
      const uint32_t index = threadIdx.x + i * kThreads;
      if (index >= slots.count || batch.expert[i] < 0) continue;
      list_slot(cta, batch.expert[i], table.next[batch.expert[i]] + batch.place[i],
                slots.at(index));
    }
    return;
  }
  // A share of more than a batch is rare: few CTAs, or many of them absent.
  const int32_t* staged_idx = region<Region::topk_idx>(cta.local());
#pragma unroll 1
  for (uint32_t index = threadIdx.x; index < slots.count; index += kThreads) {
    const uint32_t slot = slots.at(index);
    const int32_t expert = staged_idx[slot];  // written by this thread
    if (expert >= 0) list_slot(cta, expert, atomicAdd(&table.next[expert], 1), slot);
  }
}

// Reports expert ids out of range. `all` says that the leader's table holds all slots; otherwise
// all CTAs have told what they found.
// Caller: one thread of the leader.
JMM_DEVICE void report_out_of_range(const Cta& cta, const RouteTable& table, bool all) {
  volatile uint32_t* control = cta.args.rank_control;
  uint32_t count = table.out_of_range, first_slot = table.first_out_of_range;
  if (!all) {
    count = control[kOutOfRangeCount];
    first_slot = ~control[kOutOfRangeFirst];
    control[kOutOfRangeCount] = 0;
    control[kOutOfRangeFirst] = 0;
  }
  cta.args.status[kStatusOutOfRange] = static_cast<int32_t>(count);
  if (!cta.args.checked || count == 0) return;
  record_failure(cta, FailureKind::kOutOfRange, 0, first_slot, 0,
                 static_cast<uint64_t>(given_expert(cta.args, first_slot)), count);
}

// ---- both ----

// This rank's input is in the workspace, its routes are with the owners of the experts.
//
// Few slots: the leader routes, the others quantise. Many slots: every CTA routes its share, the
// leader also those of the absent; places are reserved by atomic adds, and quantising hides the
// barrier that has to come before the lists. What the absent would have quantised comes last, done
// by those who know of it. All of it is one sequence, because a call begins with cold instruction
// caches.
// Caller: all threads of a CTA.
JMM_DEVICE void prologue(const Cta& cta, uint32_t tokens, void* shared) {
  RouteTable& table = *static_cast<RouteTable*>(shared);
  const uint32_t num_slots = tokens * kTopK, warp = threadIdx.x / 32;
  const bool few = num_slots <= kSlotsOfOneCta || gridDim.x == 1;
  const bool routes = !few || cta.leads();
  const uint32_t skipped = few && gridDim.x > 1 ? 1 : 0;  // CTAs that do not quantise
  unsigned long long* totals =
      reinterpret_cast<unsigned long long*>(region<Region::expert_send_count>(cta.local()));
  Slots slots = {0, num_slots, num_slots, num_slots};
  if (!few) {
    const uint32_t share = ceil_div(num_slots, gridDim.x);
    const auto first_slot = [&](uint32_t ticket) { return min_of(num_slots, ticket * share); };
    if (cta.leads()) {
      if (threadIdx.x == 0) close_check_in(cta, load_check_in(cta));
      __syncthreads();
      slots.begin_of_rest = first_slot(participants(cta));
    }
    slots.begin = first_slot(cta.ticket());
    slots.share = first_slot(cta.ticket() + 1) - slots.begin;
    slots.count = slots.share + (num_slots - slots.begin_of_rest);
  }
  RouteBatch batch;
  uint32_t checked_in = 0, taking_part = 0;  // the former of few slots, the latter of many
  if (routes) {
    Trace trace(cta, 0, TraceName::kListRoutes, threadIdx.x == 0);
    count_slots(cta, table, slots, batch);
    if (few) {
      checked_in = load_check_in(cta);  // on its way while counts are published
    } else {
#pragma unroll 1
      for (uint32_t e = threadIdx.x; e < kShape.num_experts; e += kThreads) {
        const uint32_t count = table.count[e];
        table.next[e] = count == 0 ? 0 : static_cast<uint32_t>(atomicAdd(&totals[e], count));
      }
      if (threadIdx.x == 0 && table.out_of_range != 0) {
        atomicAdd(cta.args.rank_control + kOutOfRangeCount, table.out_of_range);
        atomicMax(cta.args.rank_control + kOutOfRangeFirst, ~table.first_out_of_range);
      }
      __syncthreads();
      if (threadIdx.x == 0) arrive_call_barrier(cta);
    }
  }
  Shares shares = {max_of(cta.ticket(), skipped), gridDim.x, warp, kWarps};
  if (cta.ticket() < skipped) shares.first = gridDim.x;
  for (bool last = false;; last = true) {
    {
      Trace trace(cta, 0, TraceName::kStageInput, threadIdx.x == 0);
      stage_shares(cta, tokens, skipped, shares);
    }
    if (last || !routes) break;
    Trace trace(cta, 0, TraceName::kListRoutes, threadIdx.x == 0);
    if (!few) {
      if (threadIdx.x == 0 && !wait_grid(cta, kSlotsCounted)) give_up(cta);
      __syncthreads();
      taking_part = count_rows(load_participants(cta));  // on its way while slots are listed
      // After an abort nothing below can be waited for; counts that are too low do no harm.
#pragma unroll 1
      for (uint32_t e = threadIdx.x; e < kShape.num_experts; e += kThreads) {
        table.count[e] = static_cast<uint32_t>(ld_acquire_gpu(totals + e));
      }
      __syncthreads();
    }
    const auto count = [&](uint32_t e) { return table.count[e]; };
    if (cta.leads()) publish_counts(cta, count);
    if (few) {
      if (threadIdx.x == kThreads - 1) close_check_in(cta, checked_in);
#pragma unroll 1
      for (uint32_t e = threadIdx.x; e < kShape.num_experts; e += kThreads) table.next[e] = 0;
      __syncthreads();
    }
    add_list_starts(table, count);
    if (gave_up(cta)) break;
    list_slots(cta, table, slots, batch);
    if (cta.leads() && threadIdx.x == 0) report_out_of_range(cta, table, few);
    // A CTA takes a share, or a warp of the leader alone.
    shares = few ? Shares{participants(cta) + warp, kWarps, 0, 1}
                 : Shares{taking_part + cta.ticket(), taking_part, warp, kWarps};
  }
  fence_proxy_async_shared();  // the stages' memory was used for the table
  __syncthreads();
  if (threadIdx.x == 0) arrive_call_barrier(cta, few ? 2 : 1);
}

}  // namespace jax_megamoe::gpu
