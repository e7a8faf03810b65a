// linear1.h: token path, stages 2 and 3. Gate and up projection of one item; its epilogue, SwiGLU,
// leaves FP8 rows in the ring.
//
// After linear 1 a thread holds, for each 64-row block b and tokens 8c + 2q + {0, 1}, the gate and
// the up value of one channel: acc[b][4c + t] and acc[b][4c + 2 + t]. The activated value takes the
// gate's place.
#pragma once

#include "gpu/sm90/ring_layout.h"
#include "gpu/common/call_barrier.h"
#include "gpu/common/swiglu.h"
#include "gpu/common/trace.h"
#include "gpu/sm90/mainloop.h"

namespace jax_megamoe::gpu {

// One item of linear 1 by one math thread: all passes, and the epilogue. N columns cover its
// tokens; a function for each N, because accumulators of different shapes do not share registers
// well.
template <uint32_t N>
class Linear1Item {
 public:
  static constexpr uint32_t kBlocks = Linear1::kRowBlocks;
  static constexpr uint32_t kPairs = N / 2;
  static constexpr uint32_t kPacks = N / 8;
  static constexpr uint32_t kPaddedPacks =
      kPacks <= 8 ? kPacks : (kPacks <= 16 ? 16 : 32);  // halved three times
  static_assert(N % 16 == 0 || N == 8);
  // Values of this thread: [block][2 * c + t].
  using Values = float[kBlocks][N / 4];

  JMM_DEVICE Linear1Item(Consumer& math, uint32_t item_slot)
      : math_(math),
        cta_(math.cta),
        item_(cta_.control->items[item_slot]),
        item_slot_(item_slot),
        thread_(threadIdx.x) {}

  // Caller: all math threads of a CTA.
  JMM_DEVICE void run() {
    uint32_t running = 0;  // largest exponents of this thread's token pair, over passes
#pragma unroll 1
    for (uint32_t pass = 0; pass < Linear1::kPasses; ++pass) {
      Values values;
      {
        float acc[kBlocks][N / 2];
        {
          Trace trace(cta_, math_.warpgroup, TraceName::kLinear1, thread_ % 128 == 0,
                      item_.pool_block);
          multiply<Linear1, N>(math_, acc);
        }
        activate(pass, acc, values);
      }
      Trace trace(cta_, math_.warpgroup, TraceName::kSwiglu, thread_ % 128 == 0, item_.pool_block);
      if constexpr (kBf16) {
        finish_bf16(values);
      } else {
        finish_fp8(pass, values, running);
      }
    }
#if JMM_BIAS
    // Linear 2 weights its bias. The row's own place for the weight may be overwritten by then.
    if (item_.n == 0 && thread_ < item_.valid_m) {
      region<Region::l2_topk_weights>(cta_.local())[item_.ring_slot * kBlockM + thread_] =
          bits_float(cta_.control->token_header[item_slot_][thread_].x);
    }
#endif
    fence_proxy_async_global();  // the copy engine reads what this thread has written
    named_barrier_sync(kBarrierMath, kMathThreads);
    if (thread_ == 0) {
      constexpr uint32_t kDone = kItemRows<Linear1> / kBlockN;
      add_release<Region::l2_arrival>(cta_, item_.ring_slot, kDone);
      add_release<Region::l1_empty>(cta_, item_.ring_slot, kDone);
    }
  }

 private:
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void sync_warpgroup() const {
    named_barrier_sync(barrier_of_warpgroup(math_.warpgroup), 128);
  }
  JMM_DEVICE uint32_t first_row(uint32_t pass, uint32_t b) const {
    return (item_.n * Linear1::kPasses + pass) * kTileRows<Linear1> +
           (math_.warpgroup * kBlocks + b) * 64;
  }

  JMM_DEVICE void activate(uint32_t pass, const float (&acc)[kBlocks][N / 2],
                           Values& values) const {
    const float limit = cta_.args.swiglu_limit;
    const uint32_t q = math_.lane % 4;
    const uint32_t header = shared_address(cta_.control->token_header[item_slot_]) + q * 16;
    const uint32_t units = shared_address(cta_.control->token_unit[item_slot_]) + q * 8;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint8_t* row_scale = cta_.control->row_scale[item_slot_] +
                                 first_row(pass, b) % kItemRows<Linear1> + math_.warp * 16 +
                                 math_.lane / 4;
      const float gate_scale = ue8m0_to_float(row_scale[0]) * kWeightUnit;
      const float up_scale = ue8m0_to_float(row_scale[8]) * kWeightUnit;
#if JMM_BIAS
      const float* bias =
          cta_.control->row_bias[item_slot_] + (row_scale - cta_.control->row_scale[item_slot_]);
      const float gate_bias = bias[0], up_bias = bias[8];
#endif
#pragma unroll
      for (uint32_t c = 0; c < kPacks; ++c) {
        const uint4 tokens = ld_shared_v4(header + c * 64);  // 8c + 2q and the next
        const float weight[2] = {bits_float(tokens.x), bits_float(tokens.z)};
        uint2 unit = {0x3F800000u, 0x3F800000u};
        if constexpr (!kBf16) unit = ld_shared_v2(units + c * 32);
        const float token_unit[2] = {bits_float(unit.x), bits_float(unit.y)};
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
          float gate = acc[b][4 * c + t] * gate_scale, up = acc[b][4 * c + 2 + t] * up_scale;
          if constexpr (!kBf16) {
            gate *= token_unit[t];
            up *= token_unit[t];
          }
#if JMM_BIAS
          gate += gate_bias;
          up += up_bias;
#endif
          values[b][2 * c + t] = activate_approx(gate, up, weight[t], limit, cta_.args);
        }
      }
    }
  }

  // This warp's largest exponents of row blocks [begin, end) into amax_part.
  // Caller: one warp.
  JMM_DEVICE void reduce_exponents(const Values& values, uint32_t begin, uint32_t end) const {
    uint32_t pack[kPaddedPacks] = {};
#pragma unroll
    for (uint32_t c = 0; c < kPacks; ++c) {
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) {
        if (b < begin || b >= end) continue;
        pack[c] = max_s16x2(pack[c], exponent_pack(values[b][2 * c], values[b][2 * c + 1]));
      }
    }
    const uint32_t first = reduce_over_rows(pack, math_.lane);
    uint32_t* part = cta_.control->amax_part[thread_ / 32];
#pragma unroll
    for (uint32_t i = 0; i < (kPaddedPacks < 8 ? kPaddedPacks : kPaddedPacks / 8); ++i) {
      part[(first + i) * 4 + math_.lane % 4] = pack[i];
    }
  }
  JMM_DEVICE uint32_t max_of_warps(uint32_t pair, uint32_t first_warp, uint32_t num_warps) const {
    uint32_t exponents = 0;
#pragma unroll
    for (uint32_t w = 0; w < num_warps; ++w) {
      exponents = max_s16x2(exponents, cta_.control->amax_part[first_warp + w][pair]);
    }
    return exponents;
  }
  // Scales of a token pair, and their reciprocals for everyone.
  JMM_DEVICE float2 publish_scales(uint32_t copy, uint32_t pair, uint32_t exponents) const {
    const uint8_t low = static_cast<uint8_t>(scale_byte(exponents & 0xFFFF));
    const uint8_t high = static_cast<uint8_t>(scale_byte(exponents >> 16));
    cta_.control->reciprocal[copy][pair] = {float_bits(ue8m0_reciprocal(low)),
                                            float_bits(ue8m0_reciprocal(high))};
    return {ue8m0_to_float(low), ue8m0_to_float(high)};
  }

  // ---- one scale per 128 channels: all warpgroups, all passes ----

  // Caller: all math threads of a CTA.
  JMM_DEVICE void finish_fp8(uint32_t pass, const Values& values, uint32_t& running) const {
    reduce_exponents(values, 0, kBlocks);
    named_barrier_sync(kBarrierMath, kMathThreads);
    if (thread_ < kPairs) running = max_s16x2(running, max_of_warps(thread_, 0, kMathWarps));
    if constexpr (Linear1::kPasses == 2) {
      if (pass == 0) {
        stash(values);
        named_barrier_sync(kBarrierMath, kMathThreads);  // amax_part may be overwritten
        return;
      }
    }
    if (thread_ < kPairs) {
      float2* scales = reinterpret_cast<float2*>(region<Region::l2_acts_sf>(cta_.local()) +
                                                 item_.ring_slot * kRingScaleBytes<Linear2>);
      scales[item_.n * (kBlockM / 2) + thread_] = publish_scales(0, thread_, running);
    }
    Values earlier;
    if constexpr (Linear1::kPasses == 2) unstash(earlier);  // on its way during the next lines
    named_barrier_sync(kBarrierMath, kMathThreads);
    store_codes(pass, values);
    if constexpr (Linear1::kPasses == 2) store_codes(0, earlier);
  }

  // A first pass's values wait in this CTA's scratch memory; every thread reads its own back.
  JMM_DEVICE float4* scratch() const {
    return reinterpret_cast<float4*>(static_cast<uint8_t*>(cta_.args.scratch) +
                                     blockIdx.x * kScratchBytesPerCta) +
           thread_;
  }
  JMM_DEVICE void stash(const Values& values) const {
    static_assert(Linear1::kPasses == 1 || kMathThreads * sizeof(Values) <= kScratchBytesPerCta);
#pragma unroll
    for (uint32_t i = 0; i < N / 16; ++i) {
      scratch()[i * kMathThreads] = {values[0][4 * i], values[0][4 * i + 1], values[0][4 * i + 2],
                                     values[0][4 * i + 3]};
    }
  }
  JMM_DEVICE void unstash(Values& values) const {
#pragma unroll
    for (uint32_t i = 0; i < N / 16; ++i) {
      const float4 v = scratch()[i * kMathThreads];
      values[0][4 * i] = v.x;
      values[0][4 * i + 1] = v.y;
      values[0][4 * i + 2] = v.z;
      values[0][4 * i + 3] = v.w;
    }
  }

  // 128 tokens x 32 channels at a time go through shared memory, so that global memory gets 16
  // bytes of a row from a thread. There the codes of two tokens stand together, channel by channel:
  // 64 bytes a pair, whose four 16-byte chunks trade places so that no two lanes meet in a bank.
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void store_codes(uint32_t pass, const Values& values) const {
    constexpr uint32_t kSlab = min_of(N, 128u);
    const uint32_t staging = shared_address(cta_.control->staging[math_.warpgroup]);
    const auto place = [&](uint32_t pair, uint32_t chunk) {
      return staging + pair * 64 + (chunk ^ ((pair >> 1) & 3)) * 16;
    };
    const uint32_t q = math_.lane % 4, channel = math_.lane / 4;  // of the warp's eight
    const uint32_t reciprocals = shared_address(cta_.control->reciprocal[0]) + q * 8;
    uint8_t* tile =
        region<Region::l2_acts>(cta_.local()) + item_.ring_slot * kRingBlockBytes<Linear2>;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t first_chunk = first_row(pass, b) / 2 / 16;
#pragma unroll
      for (uint32_t slab = 0; slab < ceil_div(N, kSlab); ++slab) {
        sync_warpgroup();
#pragma unroll
        for (uint32_t i = 0; i < kSlab / 8; ++i) {
          const uint32_t c = slab * (kSlab / 8) + i;
          if (c >= kPacks) break;
          const uint2 reciprocal = ld_shared_v2(reciprocals + c * 32);
          st_shared_u16(place(4 * i + q, math_.warp) + channel * 2,
                        cvt_e4m3x2(scaled_or_nan(values[b][2 * c], bits_float(reciprocal.x)),
                                   scaled_or_nan(values[b][2 * c + 1], bits_float(reciprocal.y))));
        }
        sync_warpgroup();
        const uint32_t pair = thread_ % 128 / 2, half = thread_ % 2;  // of 32 channels
        const uint32_t token = slab * kSlab + 2 * pair;
        if (2 * pair >= kSlab || token >= item_.valid_m) continue;
        const uint4 v = ld_shared_v4(place(pair, 2 * half));
        const uint4 w = ld_shared_v4(place(pair, 2 * half + 1));
        uint8_t* target = tile + tile_chunk(token, first_chunk + half);
        *reinterpret_cast<uint4*>(target) = {prmt(v.x, v.y, 0x6420), prmt(v.z, v.w, 0x6420),
                                             prmt(w.x, w.y, 0x6420), prmt(w.z, w.w, 0x6420)};
        if (token + 1 >= item_.valid_m) continue;
        target = tile + tile_chunk(token + 1, first_chunk + half);
        *reinterpret_cast<uint4*>(target) = {prmt(v.x, v.y, 0x7531), prmt(v.z, v.w, 0x7531),
                                             prmt(w.x, w.y, 0x7531), prmt(w.z, w.w, 0x7531)};
      }
    }
  }

  // ---- one scale per 32 channels: a warpgroup's row block, stored as exact BF16 ----

  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void finish_bf16(const Values& values) const {
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      reduce_exponents(values, b, b + 1);
      sync_warpgroup();
      const uint32_t pair = thread_ % 128;
      if (pair < kPairs) {
        publish_scales(math_.warpgroup, pair, max_of_warps(pair, math_.warpgroup * 4, 4));
      }
      sync_warpgroup();
      store_bf16(b, values);
    }
  }
  // E4M3 and back, scaled back: exact in BF16. Scales are powers of two, their reciprocals too;
  // byte 254 is never reached (see docs/numerics.md).
  JMM_DEVICE uint32_t rounded_pair(float low, float high, uint2 reciprocal) const {
    const float2 v = cvt_f32x2_e4m3x2(cvt_e4m3x2(scaled_or_nan(low, bits_float(reciprocal.x)),
                                                 scaled_or_nan(high, bits_float(reciprocal.y))));
    return cvt_bf16x2(v.x * bits_float(0x7F000000u - reciprocal.x),
                      v.y * bits_float(0x7F000000u - reciprocal.y));
  }
  // 64 tokens x 32 channels at a time, transposed on the way into shared memory.
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void store_bf16(uint32_t b, const Values& values) const {
    constexpr uint32_t kSlab = min_of(N, 64u);
    static_assert(N % kSlab == 0);
    constexpr uint32_t kMatrices = kSlab % 32 == 0 ? 4 : (kSlab % 16 == 0 ? 2 : 1);
    const uint32_t staging = shared_address(cta_.control->staging[math_.warpgroup]);
    const uint32_t reciprocals =
        shared_address(cta_.control->reciprocal[math_.warpgroup]) + (math_.lane % 4) * 8;
    const auto place = [&](uint32_t token, uint32_t chunk) {
      return staging + token * 64 + (chunk ^ ((token >> 1) & 3)) * 16;
    };
    uint8_t* tile =
        region<Region::l2_acts>(cta_.local()) + item_.ring_slot * kRingBlockBytes<Linear2>;
    const uint32_t first_chunk = first_row(0, b) / 2 / 8;
#pragma unroll
    for (uint32_t slab = 0; slab < N / kSlab; ++slab) {
      sync_warpgroup();
#pragma unroll
      for (uint32_t i = 0; i < kSlab / 8; i += kMatrices) {
        uint32_t v[kMatrices];
#pragma unroll
        for (uint32_t m = 0; m < kMatrices; ++m) {
          const uint32_t c = slab * (kSlab / 8) + i + m;
          v[m] = rounded_pair(values[b][2 * c], values[b][2 * c + 1],
                              ld_shared_v2(reciprocals + c * 32));
        }
        const uint32_t address =
            place(8 * (i + (math_.lane / 8) % kMatrices) + math_.lane % 8, math_.warp);
        if constexpr (kMatrices == 4) {
          stmatrix_x4_trans(address, v[0], v[1], v[2], v[3]);
        } else if constexpr (kMatrices == 2) {
          stmatrix_x2_trans(address, v[0], v[1]);
        } else {
          stmatrix_x1_trans(address, v[0]);
        }
      }
      sync_warpgroup();
#pragma unroll
      for (uint32_t i = 0; i < ceil_div(kSlab * 4, 128u); ++i) {
        const uint32_t index = thread_ % 128 + i * 128;
        const uint32_t token = index / 4, chunk = index % 4;
        if (token >= kSlab || slab * kSlab + token >= item_.valid_m) continue;
        *reinterpret_cast<uint4*>(tile + tile_chunk(slab * kSlab + token, first_chunk + chunk)) =
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
