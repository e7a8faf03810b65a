// linear2.h: token path, stage 4. The down projection of one item, pushed to the tokens' own ranks.
#pragma once

#include "gpu/common/signal.h"
#include "gpu/common/trace.h"
#include "gpu/sm90/mainloop.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

template <uint32_t N>
class Linear2Item {
 public:
  static constexpr uint32_t kBlocks = Linear2::kRowBlocks;

  JMM_DEVICE Linear2Item(Consumer& math, uint32_t item_slot)
      : math_(math),
        cta_(math.cta),
        item_(cta_.control->items[item_slot]),
        item_slot_(item_slot),
        thread_(threadIdx.x) {}

  // Caller: all math threads of a CTA.
  JMM_DEVICE void run() {
    float acc[kBlocks][N / 2];
    {
      Trace trace(cta_, math_.warpgroup, TraceName::kLinear2, thread_ % 128 == 0, item_.pool_block);
      multiply<Linear2, N>(math_, acc);
    }
    Trace trace(cta_, math_.warpgroup, TraceName::kPush, thread_ % 128 == 0, item_.pool_block);
    // After an abort the addresses of results may never have been written. The warpgroup decides as
    // one, because the barriers below need all of it.
    if (named_barrier_or(barrier_of_warpgroup(math_.warpgroup), 128, gave_up(cta_))) return;
    // The item's rows are in shared memory or used: the ring slot's next lap may overwrite them.
    if (thread_ == 0)
      add_release<Region::l2_empty>(cta_, item_.ring_slot, valid_chunks<Linear2>(item_.n));
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t row = item_.n * kTileRows<Linear2> + (math_.warpgroup * kBlocks + b) * 64;
      if (row < Linear2::kRows) push(row, acc[b]);
    }
  }

 private:
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void sync_warpgroup() const {
    named_barrier_sync(barrier_of_warpgroup(math_.warpgroup), 128);
  }

  // Up to 32 tokens x 64 columns at a time, transposed on the way into shared memory; then eight
  // threads write 128 contiguous bytes of a token's row, to whichever rank it belongs.
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void push(uint32_t first_row, const float (&acc)[N / 2]) const {
    constexpr uint32_t kSlab = N % 32 == 0 ? 32 : min_of(N, 16u);
    const uint8_t* row_scale = cta_.control->row_scale[item_slot_] +
                               first_row % kItemRows<Linear2> + math_.warp * 16 + math_.lane / 4;
    const float scale[2] = {ue8m0_to_float(row_scale[0]) * kWeightUnit,
                            ue8m0_to_float(row_scale[8]) * kWeightUnit};
#if JMM_BIAS
    const float* row_bias =
        cta_.control->row_bias[item_slot_] + (row_scale - cta_.control->row_scale[item_slot_]);
    const float bias[2] = {row_bias[0], row_bias[8]};
    const uint32_t weights =
        shared_address(cta_.control->token_weight[item_slot_]) + (math_.lane % 4) * 8;
#endif
    const uint32_t staging = shared_address(cta_.control->staging[math_.warpgroup]);
    const uint32_t units =
        shared_address(cta_.control->token_unit[item_slot_]) + (math_.lane % 4) * 8;
    const uint64_t* header =
        reinterpret_cast<const uint64_t*>(cta_.control->token_header[item_slot_]);
    const auto place = [&](uint32_t token, uint32_t chunk) {
      return staging + token * 128 + (chunk ^ (token % 8)) * 16;
    };
#pragma unroll
    for (uint32_t slab = 0; slab < N / kSlab; ++slab) {
      sync_warpgroup();
#pragma unroll
      for (uint32_t i = 0; i < kSlab / 8; i += 2) {
        // Matrices: tokens 8i.. and 8i + 8.., each with the warp's lower and upper 8 rows.
        uint32_t v[4];
#pragma unroll
        for (uint32_t m = 0; m < 4; ++m) {
          const uint32_t c = slab * (kSlab / 8) + i + m / 2, high = m % 2;
          if (4 * c >= N / 2) continue;  // a tile of 8 tokens
          uint2 unit = {0x3F800000u, 0x3F800000u};
          if constexpr (!kBf16) unit = ld_shared_v2(units + c * 32);
          float low_token = acc[4 * c + 2 * high] * scale[high] * bits_float(unit.x);
          float high_token = acc[4 * c + 2 * high + 1] * scale[high] * bits_float(unit.y);
#if JMM_BIAS
          const uint2 weight = ld_shared_v2(weights + c * 32);
          low_token += bias[high] * bits_float(weight.x);
          high_token += bias[high] * bits_float(weight.y);
#endif
          v[m] = cvt_bf16x2(low_token, high_token);
        }
        const uint32_t matrix = math_.lane / 8;
        if constexpr (kSlab >= 16) {
          stmatrix_x4_trans(
              place(8 * (i + matrix / 2) + math_.lane % 8, 2 * math_.warp + matrix % 2), v[0], v[1],
              v[2], v[3]);
        } else {
          stmatrix_x2_trans(place(math_.lane % 8, 2 * math_.warp + matrix % 2), v[0], v[1]);
        }
      }
      sync_warpgroup();
#pragma unroll
      for (uint32_t i = 0; i < ceil_div(kSlab * 8, 128u); ++i) {
        const uint32_t index = thread_ % 128 + i * 128;
        const uint32_t token = index / 8, chunk = index % 8;
        if (token >= kSlab) continue;
        const uint64_t target = header[slab * kSlab + token];
        if (target == 0) continue;
        *reinterpret_cast<uint4*>(target + first_row * 2 + chunk * 16) =
            ld_shared_v4(place(token, chunk));
      }
    }
  }

  Consumer& math_;
  const Cta& cta_;
  const Item& item_;  // in shared memory
  const uint32_t item_slot_;
  const uint32_t thread_;
};

}  // namespace jax_megamoe::gpu
