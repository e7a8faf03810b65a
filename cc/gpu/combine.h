// combine.h: token path, stage 5. Sums a token's expert rows, and readies the workspace.
#pragma once

#include "gpu/wait.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// Rows that no result may be read from.
JMM_DEVICE void fill_with_nan(const Cta& cta) {
  const uint64_t words = uint64_t{cta.args.num_rows} * kHidden / 2;
  uint32_t* y = reinterpret_cast<uint32_t*>(cta.args.y);
  for (uint64_t i = blockIdx.x * kMathThreads + threadIdx.x; i < words;
       i += uint64_t{gridDim.x} * kMathThreads) {
    y[i] = 0x7FFF7FFFu;
  }
}

inline constexpr uint32_t kCombineColumns = 512;  // of a step of one warp

// Columns [begin, end) of y of one token by one warp: the FP32 sum of its routed rows in slot
// order, rounded once.
JMM_DEVICE void combine_token(const Cta& cta, uint32_t token, bool valid, uint32_t begin,
                              uint32_t end) {
  const uint32_t lane = threadIdx.x % 32;
  uint16_t* y = cta.args.y + uint64_t{token} * kHidden;
  uint32_t routed = 0;
  if (valid) {
    const int32_t* idx = region<Region::topk_idx>(cta.local()) + uint64_t{token} * kTopK;
    routed = __ballot_sync(~0u, lane < kTopK && idx[min_of(lane, kTopK - 1)] >= 0);
  }
  const uint16_t* rows = region<Region::combine>(cta.local()) + uint64_t{token} * kHidden;
  constexpr uint64_t kSlotStride = uint64_t{kShape.max_tokens} * kHidden;
  constexpr uint32_t kInFlight = min_of(kTopK, 8u);
  constexpr uint32_t kParts = kCombineColumns / 256;  // 16 bytes of a row each, in flight together
  for (uint32_t first_column = begin + lane * 8; first_column < end;
       first_column += kCombineColumns) {
    float sum[kParts][8] = {};
#pragma unroll
    for (uint32_t first = 0; first < kTopK; first += kInFlight) {
      uint4 v[kParts][kInFlight];
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        const uint32_t column = first_column + part * 256;
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t k = first + i;
          if (column < end && k < kTopK && (routed >> k) & 1) {
            v[part][i] = ld_global_v4(rows + k * kSlotStride + column);
          }
        }
      }
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t k = first + i;
          if (k >= kTopK || !((routed >> k) & 1)) continue;
          const uint32_t words[4] = {v[part][i].x, v[part][i].y, v[part][i].z, v[part][i].w};
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) {
            sum[part][2 * j] += bits_float(words[j] << 16);
            sum[part][2 * j + 1] += bits_float(words[j] & 0xFFFF0000u);
          }
        }
      }
    }
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      const uint32_t column = first_column + part * 256;
      if (column >= end) continue;
      const float* s = sum[part];
      *reinterpret_cast<uint4*>(y + column) = {cvt_bf16x2(s[0], s[1]), cvt_bf16x2(s[2], s[3]),
                                               cvt_bf16x2(s[4], s[5]), cvt_bf16x2(s[6], s[7])};
    }
  }
}

// All math warps of the rank. Of few tokens each is cut into pieces, so that no warp walks a row
// alone.
JMM_DEVICE void combine(const Cta& cta, uint32_t tokens) {
  const uint32_t num_rows = cta.args.num_rows, num_warps = kMathWarps * gridDim.x;
  const uint32_t pieces = num_rows < num_warps ? ceil_div(kHidden, kCombineColumns) : 1;
  for (uint32_t i = blockIdx.x + (threadIdx.x / 32) * gridDim.x; i < num_rows * pieces;
       i += num_warps) {
    const uint32_t token = i / pieces, piece = i % pieces;
    const uint32_t begin = piece * kCombineColumns;
    const uint32_t end = pieces == 1 ? kHidden : min_of(begin + kCombineColumns, kHidden);
    combine_token(cta, token, token < tokens, begin, end);
  }
}

// Zeroes the counters of this call (Lifetime::kPerCall). Every CTA of the rank has finished its
// items, and no other rank touches them.
JMM_DEVICE void clear_counters(const Cta& cta) {
  void* local = cta.local();
  for (uint32_t i = blockIdx.x * kMathThreads + threadIdx.x; i < kShape.ring_blocks;
       i += gridDim.x * kMathThreads) {
    region<Region::l1_arrival>(local)[i] = 0;
    region<Region::l1_empty>(local)[i] = 0;
    region<Region::l2_arrival>(local)[i] = 0;
    region<Region::l2_empty>(local)[i] = 0;
  }
  for (uint32_t e = blockIdx.x * kMathThreads + threadIdx.x; e < kShape.num_experts;
       e += gridDim.x * kMathThreads) {
    region<Region::expert_send_count>(local)[e] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *region<Region::next_item>(local) = 0;
    *region<Region::call_epoch>(local) = cta.epoch + 1;
  }
}

}  // namespace jax_megamoe::gpu
