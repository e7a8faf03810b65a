// prologue.h: token path, stage 1, first half. Input to FP8 rows in the workspace; which expert gets
// which slots. All threads of a CTA, before roles part.
#pragma once

#include "gpu/wait.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// Rows of this call that hold tokens. Every CTA sees the same; CTA 0 reports a bad number.
JMM_DEVICE uint32_t valid_tokens(const Cta& cta) {
  const KernelArgs& args = cta.args;
  if (args.num_tokens == nullptr) return args.num_rows;
  const int32_t given = *args.num_tokens;
  if (given >= 0 && static_cast<uint32_t>(given) <= args.num_rows) return given;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
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

// One warp quantises one row; a lane holds one group of 32 at a time. Coarser granularities share
// the magnitude over 4 lanes or over the row, which is read twice then.
JMM_DEVICE void stage_row(const Cta& cta, uint32_t token, uint32_t lane) {
  uint8_t* codes = region<Region::x>(cta.local()) + uint64_t{token} * kHidden;
  uint8_t* scales = region<Region::x_sf>(cta.local()) + uint64_t{token} * kGroups;
  if (cta.args.x_sf != nullptr) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(cta.args.x) +
                                                       uint64_t{token} * kHidden);
    for (uint32_t i = lane; i < kHidden / 16; i += 32) reinterpret_cast<uint4*>(codes)[i] = from[i];
    const uint8_t* from_sf = cta.args.x_sf + uint64_t{token} * kGroups;
    for (uint32_t i = lane; i < kGroups; i += 32) scales[i] = from_sf[i];
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(cta.args.x) + uint64_t{token} * kHidden;
  uint32_t row_amax = 0;
  if constexpr (kGranularity == Granularity::kRow) {
    for (uint32_t group = lane; group < kGroups; group += 32) {
      uint4 values[4];
      load_group(row + group * kSfGroup, values);
      uint32_t amax = magnitude_of(values);
      if (amax >= kInfBits) amax = finite_magnitude_of(row + group * kSfGroup);
      row_amax = max_of(row_amax, amax);
    }
    row_amax = __reduce_max_sync(~0u, row_amax);
  }
  for (uint32_t first = 0; first < kGroups; first += 32) {
    const uint32_t group = first + lane;
    const bool inside = group < kGroups;  // kGroups is a multiple of 4: lanes of 4 agree
    uint4 values[4] = {};
    uint32_t amax = 0;
    bool finite = true;
    if (inside) {
      load_group(row + group * kSfGroup, values);
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

// CTA 0 lists routes meanwhile, unless it is alone.
JMM_DEVICE void stage_input(const Cta& cta, uint32_t tokens) {
  const uint32_t skipped = gridDim.x > 1 ? 1 : 0;
  if (blockIdx.x < skipped) return;
  const uint32_t workers = gridDim.x - skipped;
  const uint32_t first = blockIdx.x - skipped + (threadIdx.x / 32) * workers;
  for (uint32_t token = first; token < tokens; token += workers * (kThreads / 32)) {
    stage_row(cta, token, threadIdx.x % 32);
  }
}

// ---- routes ----

JMM_DEVICE int64_t given_expert(const KernelArgs& args, uint64_t slot) {
  return args.topk_idx_is_64bit ? static_cast<const int64_t*>(args.topk_idx)[slot]
                                : static_cast<const int32_t*>(args.topk_idx)[slot];
}

// Counts of this rank's slots per expert, and next free place in each owner's list. They use the
// shared memory of the stages, which are empty yet.
struct RouteTable {
  uint32_t count[kShape.num_experts];
  uint32_t next[kShape.num_experts];
  uint32_t out_of_range;
  unsigned long long first_out_of_range;
};
static_assert(sizeof(RouteTable) <= kControlOffset);

// All threads of CTA 0. At each owner this rank's rows stand packed, local expert after local
// expert; within an expert in the order in which threads get there: no result depends on it.
JMM_DEVICE void list_routes(const Cta& cta, uint32_t tokens, void* shared) {
  RouteTable& table = *static_cast<RouteTable*>(shared);
  const KernelArgs& args = cta.args;
  const uint32_t thread = threadIdx.x;
  for (uint32_t e = thread; e < kShape.num_experts; e += kThreads) table.count[e] = 0;
  if (thread == 0) {
    table.out_of_range = 0;
    table.first_out_of_range = ~0ull;
  }
  __syncthreads();
  const uint32_t num_slots = tokens * kTopK;
  int32_t* staged_idx = region<Region::topk_idx>(cta.local());
  float* staged_weights = region<Region::topk_weights>(cta.local());
  constexpr uint32_t kBatch = 8;  // loads in flight: this is one CTA, and memory is far away
  for (uint32_t first = thread; first < num_slots; first += kThreads * kBatch) {
    int64_t experts[kBatch];
    float weights[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t slot = first + i * kThreads;
      experts[i] = slot < num_slots ? given_expert(args, slot) : -1;
      weights[i] = slot < num_slots ? args.topk_weights[slot] : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t slot = first + i * kThreads;
      if (slot >= num_slots) break;
      const bool inside = experts[i] >= 0 && experts[i] < int64_t{kShape.num_experts};
      if (inside) {
        atomicAdd(&table.count[experts[i]], 1);
      } else if (experts[i] != -1) {
        atomicAdd(&table.out_of_range, 1);
        atomicMin(&table.first_out_of_range, slot);
      }
      staged_idx[slot] = inside ? static_cast<int32_t>(experts[i]) : -1;
      staged_weights[slot] = weights[i];
    }
  }
  __syncthreads();
  // Counts go out first: weight loaders of all ranks wait for them.
  for (uint32_t e = thread; e < kShape.num_experts; e += kThreads) {
    const uint32_t owner = e / kLocalExperts, local_expert = e % kLocalExperts;
    store_release<Region::expert_recv_count>(
        cta, owner, uint64_t{args.rank} * kLocalExperts + local_expert,
        published_count(cta.epoch + 1, table.count[e]));
  }
  // Prefix sums of each owner's experts, a warp for an owner.
  for (uint32_t owner = thread / 32; owner < kRanks; owner += kThreads / 32) {
    uint32_t before = 0;
    for (uint32_t first = 0; first < kLocalExperts; first += 32) {
      const uint32_t e = first + thread % 32;
      const uint32_t count = e < kLocalExperts ? table.count[owner * kLocalExperts + e] : 0;
      uint32_t sum = count;
#pragma unroll
      for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, distance);
        if (thread % 32 >= distance) sum += other;
      }
      if (e < kLocalExperts) table.next[owner * kLocalExperts + e] = before + sum - count;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  for (uint32_t first = thread; first < num_slots; first += kThreads * kBatch) {
    int32_t experts[kBatch];  // written by this thread
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t slot = first + i * kThreads;
      experts[i] = slot < num_slots ? staged_idx[slot] : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      if (experts[i] < 0) continue;
      const uint32_t place = atomicAdd(&table.next[experts[i]], 1);
      region<Region::src_token_topk_idx>(args.base[experts[i] / kLocalExperts])
          [args.rank * kShape.max_slots_per_rank() + place] = first + i * kThreads;
    }
  }
  if (thread == 0) {
    args.status[kStatusOutOfRange] = static_cast<int32_t>(table.out_of_range);
    if (args.checked && table.out_of_range != 0) {
      const uint64_t slot = table.first_out_of_range;
      record_failure(cta, FailureKind::kOutOfRange, 0, slot, 0,
                     static_cast<uint64_t>(given_expert(args, slot)), table.out_of_range);
    }
  }
}

}  // namespace jax_megamoe::gpu
