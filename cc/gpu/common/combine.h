// combine.h: token path, stage 5. Sums a token's expert rows, and readies the workspace.
#pragma once

#include "gpu/common/call_barrier.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// Makes y NaN, so that nobody takes it for a result. The leader does the shares of the absent as
// well.
// Caller: all math threads of a CTA.
JMM_DEVICE void fill_with_nan(const Cta& cta) {
  const uint64_t words = uint64_t{cta.args.num_rows} * kHidden / 2;
  uint32_t* y = reinterpret_cast<uint32_t*>(cta.args.y);
  uint32_t share = cta.ticket();
  while (share < gridDim.x) {
    for (uint64_t i = share * kMathThreads + threadIdx.x; i < words;
         i += uint64_t{gridDim.x} * kMathThreads) {
      y[i] = 0x7FFF7FFFu;
    }
    share = cta.leads() ? max_of(share + 1, participants(cta)) : gridDim.x;
  }
}

// Columns of a step of one warp; a lane has 16 bytes of each part of each row in flight.
inline constexpr uint32_t kCombineParts = combine_parts(kTile);
inline constexpr uint32_t kCombineColumns = kCombineParts * 256;

// Writes columns [begin, end) of y of one token: the FP32 sum of its routed rows in the order of
// top-k slots, rounded once. Bit k of `routed` says that slot k has a row.
// Caller: one warp.
JMM_DEVICE void combine_token(const Cta& cta, uint32_t token, uint32_t routed, uint32_t begin,
                              uint32_t end) {
  const uint32_t lane = threadIdx.x % 32;
  uint16_t* y = cta.args.y + uint64_t{token} * kHidden;
  const uint16_t* rows = region<Region::combine>(cta.local()) + uint64_t{token} * kHidden;
  constexpr uint64_t kSlotStride = uint64_t{kShape.max_tokens} * kHidden;
  constexpr uint32_t kInFlight = min_of(kTopK, kCombineRows);
  for (uint32_t first_column = begin + lane * 8; first_column < end;
       first_column += kCombineColumns) {
    float sum[kCombineParts][8] = {};
#pragma unroll
    for (uint32_t first = 0; first < kTopK; first += kInFlight) {
      uint4 v[kCombineParts][kInFlight];
#pragma unroll
      for (uint32_t part = 0; part < kCombineParts; ++part) {
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
      for (uint32_t part = 0; part < kCombineParts; ++part) {
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
    for (uint32_t part = 0; part < kCombineParts; ++part) {
      const uint32_t column = first_column + part * 256;
      if (column >= end) continue;
      const float* s = sum[part];
      *reinterpret_cast<uint4*>(y + column) = {cvt_bf16x2(s[0], s[1]), cvt_bf16x2(s[2], s[3]),
                                               cvt_bf16x2(s[4], s[5]), cvt_bf16x2(s[6], s[7])};
    }
  }
}

// Combine by one of all math warps of the rank. Of few tokens each is cut into pieces, so that no
// warp walks a row alone. Routes of a piece are loaded one piece ahead, the first before results
// are waited for: they were staged before the first count was published.
class Combine {
 public:
  // Caller: all math threads of a CTA.
  JMM_DEVICE Combine(const Cta& cta, uint32_t tokens)
      : cta_(cta),
        tokens_(tokens),
        stride_(kMathWarps * participants(cta)),
        pieces_(cta.args.num_rows < stride_ ? ceil_div(kHidden, kCombineColumns) : 1),
        next_(cta.ticket() + (threadIdx.x / 32) * participants(cta)) {
    load_route();
  }

  // Caller: all math threads of a CTA.
  JMM_DEVICE void run() {
    const uint32_t num_pieces = cta_.args.num_rows * pieces_;
    while (next_ < num_pieces) {
      const uint32_t token = next_ / pieces_, begin = next_ % pieces_ * kCombineColumns;
      const uint32_t end = pieces_ == 1 ? kHidden : min_of(begin + kCombineColumns, kHidden);
      const uint32_t routed = __ballot_sync(~0u, route_ >= 0);
      next_ += stride_;
      load_route();
      combine_token(cta_, token, routed, begin, end);
    }
  }

 private:
  // Caller: one warp.
  JMM_DEVICE void load_route() {
    const uint32_t token = next_ / pieces_, lane = threadIdx.x % 32;
    route_ = -1;
    if (token < tokens_ && lane < kTopK) {
      route_ = region<Region::topk_idx>(cta_.local())[uint64_t{token} * kTopK + lane];
    }
  }

  const Cta& cta_;
  const uint32_t tokens_, stride_, pieces_;
  uint32_t next_;
  int32_t route_;  // expert of this lane's slot of the next token, or -1
};

// Zeroes the counters of this call (Lifetime::kPerCall). Every CTA of the rank has finished its
// items, and no other rank touches them.
// Caller: all math threads of a CTA.
JMM_DEVICE void clear_counters(const Cta& cta) {
  void* local = cta.local();
  const uint32_t first = cta.ticket() * kMathThreads + threadIdx.x;
  const uint32_t stride = participants(cta) * kMathThreads;
  for (uint32_t i = first; i < kShape.ring_blocks; i += stride) {
    region<Region::l1_arrival>(local)[i] = 0;
    region<Region::l1_empty>(local)[i] = 0;
    region<Region::l2_arrival>(local)[i] = 0;
    region<Region::l2_empty>(local)[i] = 0;
  }
  for (uint32_t e = first; e < kShape.num_experts; e += stride) {
    region<Region::expert_send_count>(local)[e] = 0;
  }
  if (first == 0) {
    *region<Region::next_item>(local) = 0;
    *region<Region::call_epoch>(local) = cta.epoch() + 1;
  }
}

}  // namespace jax_megamoe::gpu
