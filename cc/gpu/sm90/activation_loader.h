// activation_loader.h: the warp that waits for an item's rows, copies them into the stages, and
// prepares what the epilogues need.
#pragma once

#include "gpu/sm90/ring_layout.h"
#include "gpu/common/trace.h"
#include "gpu/common/wait.h"
#include "gpu/sm90/mainloop.h"

namespace jax_megamoe::gpu {

// Unit of a token's sums along K: sums of stage k are in units of its scale. When the next scale is
// more than 2^100 below the unit, the unit only moves by that much: the sums cannot overflow (they
// stay below 2^26 in units of a scale they met), and what is added then is below 2^-70 of them.
struct TokenUnit {
  int32_t exponent;  // biased, of FP32

  // Moves on to a stage with scale `bits` (FP32, a power of two); returns the ratio's FP32 bits.
  JMM_DEVICE uint32_t advance(uint32_t bits) {
    const int32_t scale = static_cast<int32_t>(bits >> 23);
    const int32_t change = min_of(exponent - scale, 100);
    exponent -= change;
    return change < -126 ? 0 : static_cast<uint32_t>(change + 127) << 23;
  }
  JMM_DEVICE float value() const { return bits_float(static_cast<uint32_t>(exponent) << 23); }
};

// Fills the stages of one item with tokens and, where scales change along K, with the ratios of
// consecutive scales. What it writes is visible with the stage.
// Caller: one warp.
template <class P>
JMM_DEVICE void load_acts(const Cta& cta, const Item& item, uint32_t item_slot, StageCursor& at,
                          const uint8_t* acts, const uint8_t* scales) {
  constexpr uint32_t kTilesPerStage = kBf16 ? 2 : 1;
  constexpr uint32_t kPerLane = ceil_div(kBlockM, 32u);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t columns = num_columns(item.valid_m);
  const uint32_t bytes = columns * 128;
  const uint8_t* block = acts + item.ring_slot * kRingBlockBytes<P>;
  const uint32_t* block_scales =
      reinterpret_cast<const uint32_t*>(scales + item.ring_slot * kRingScaleBytes<P>);
  for (uint32_t pass = 0; pass < valid_passes<P>(item.n); ++pass) {
    TokenUnit unit[kPerLane];
    uint32_t next[kPerLane];  // scales of the next stage, on their way
    const auto fetch = [&](uint32_t k) {
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) {
        const uint32_t token = lane + 32 * i;
        next[i] = token < item.valid_m ? __ldcg(block_scales + k * kBlockM + token) : 0x3F800000u;
      }
    };
    if constexpr (P::kRescale) {
      fetch(0);
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) unit[i] = {static_cast<int32_t>(next[i] >> 23)};
    }
    for (uint32_t k = 0; k < kKBlocks<P>; ++k) {
      mbarrier_wait(cta, empty_barrier(cta, at.index), at.parity ^ 1);
      if constexpr (P::kRescale) {
        const uint32_t ratios =
            cta.stages_address + kScaleStagesOffset + at.index * kScaleStageBytes + lane * 4;
#pragma unroll
        for (uint32_t i = 0; i < kPerLane; ++i) {
          if (lane + 32 * i < kBlockM) st_shared_u32(ratios + i * 128, unit[i].advance(next[i]));
        }
        if (k + 1 < kKBlocks<P>) {
          fetch(k + 1);
        } else {
#pragma unroll
          for (uint32_t i = 0; i < kPerLane; ++i) {
            const uint32_t token = lane + 32 * i;
            if (token < kBlockM) cta.control->token_unit[item_slot][token] = unit[i].value();
          }
        }
      }
      __syncwarp();
      if ((kRacecheck || lane == 0) && !gave_up(cta)) {
        const uint32_t full = full_barrier(cta, at.index);
        const uint32_t stage = cta.stages_address + at.index * kActStageBytes;
        if constexpr (!kRacecheck) mbarrier_arrive_expect_tx(full, kTilesPerStage * bytes);
#pragma unroll
        for (uint32_t tile = 0; tile < kTilesPerStage; ++tile) {
          bulk_load(stage + tile * (kBlockM * 128),
                    block + (uint64_t{k} * kTilesPerStage + tile) * (kBlockM * 128), bytes, full,
                    lane, kRacecheck ? 32 : 1);
        }
        if constexpr (kRacecheck) {
          fence_proxy_async_shared();
          mbarrier_arrive(full);
        }
      }
      at.advance();
    }
  }
}

#if JMM_BIAS
// Biases of an item's weight rows, a multiple of 4 of them.
// Caller: one warp.
JMM_DEVICE void load_bias(const Cta& cta, uint32_t item_slot, const float* from, uint32_t rows) {
  for (uint32_t row = threadIdx.x % 32 * 4; row < rows; row += 128) {
    *reinterpret_cast<float4*>(cta.control->row_bias[item_slot] + row) =
        __ldg(reinterpret_cast<const float4*>(from + row));
  }
}
#endif

// What the epilogue needs, so that math does not wait for memory there. What it writes is
// visible with the item's first stage.
// Caller: one warp.
JMM_DEVICE void load_header(const Cta& cta, const Item& item, uint32_t item_slot) {
  const uint32_t lane = threadIdx.x % 32;
  void* local = cta.local();
  uint2* header = cta.control->token_header[item_slot];
  uint8_t* row_scale = cta.control->row_scale[item_slot];
  if (item.kind == ItemKind::kLinear1) {
    for (uint32_t token = lane; token < kBlockM; token += 32) {
      uint2 entry = {0, 0};
      if (token < item.valid_m) {
        const uint32_t row = item.ring_slot * kBlockM + token;
        entry.x = float_bits(region<Region::l1_topk_weights>(local)[row]);
        if constexpr (kGranularity == Granularity::kRow) {
          cta.control->token_unit[item_slot][token] =
              reinterpret_cast<const float*>(region<Region::l1_acts_sf>(local))[row];
        }
      }
      header[token] = entry;
    }
    const uint8_t* from = cta.args.w13_row_scale + uint64_t{item.expert} * Linear1::kRows +
                          item.n * kItemRows<Linear1>;
    for (uint32_t row = lane * 8; row < kItemRows<Linear1>; row += 256) {
      *reinterpret_cast<uint2*>(row_scale + row) =
          __ldg(reinterpret_cast<const uint2*>(from + row));
    }
#if JMM_BIAS
    load_bias(cta, item_slot, cta.args.b13 + (from - cta.args.w13_row_scale), kItemRows<Linear1>);
#endif
  } else {
    const TokenSource* sources =
        region<Region::token_src_metadata>(local) + uint64_t{item.pool_block} * kBlockM;
    for (uint32_t token = lane; token < kBlockM; token += 32) {
      uint64_t target = 0;
      if (token < item.valid_m) {
        const TokenSource source = sources[token];
        const uint64_t row =
            uint64_t{source.slot % kTopK} * kShape.max_tokens + source.slot / kTopK;
        target = reinterpret_cast<uint64_t>(
            region<Region::combine>(cta.args.peer_buffer[source.rank]) + row * kHidden);
      }
      reinterpret_cast<uint64_t*>(header)[token] = target;
    }
    const uint32_t first = item.n * kItemRows<Linear2>;
    const uint8_t* from = cta.args.w2_row_scale + uint64_t{item.expert} * Linear2::kRows + first;
    for (uint32_t row = lane * 8; row < min_of(kItemRows<Linear2>, Linear2::kRows - first);
         row += 256) {
      *reinterpret_cast<uint2*>(row_scale + row) =
          __ldg(reinterpret_cast<const uint2*>(from + row));
    }
#if JMM_BIAS
    load_bias(cta, item_slot, cta.args.b2 + (from - cta.args.w2_row_scale),
              min_of(kItemRows<Linear2>, Linear2::kRows - first));
    const float* weights = region<Region::l2_topk_weights>(local) + item.ring_slot * kBlockM;
    for (uint32_t token = lane; token < kBlockM; token += 32) {
      cta.control->token_weight[item_slot][token] =
          token < item.valid_m ? __ldcg(weights + token) : 0.0f;
    }
#endif
  }
}

// Waits for an item's rows. It also waits until SwiGLU may write into the slot, so that math never
// has to.
// Caller: one thread.
JMM_DEVICE bool wait_for_rows(const Cta& cta, const Item& item) {
  Trace trace(cta, kActivationLane, TraceName::kWaitRows, true, item.pool_block);
  if (item.kind == ItemKind::kLinear1) {
    return wait_at_least<Region::l1_arrival, LoadGpu32>(
               cta, item.ring_slot, l1_arrival_target(shape_of_kernel(), item.lap)) &&
           wait_at_least<Region::l2_empty, LoadGpu32>(cta, item.ring_slot,
                                                      l2_empty_target(shape_of_kernel(), item.lap));
  }
  return wait_at_least<Region::l2_arrival, LoadGpu32>(
      cta, item.ring_slot, l2_arrival_target(shape_of_kernel(), item.lap));
}

// The activation loader's role.
// Caller: one warp.
JMM_DEVICE void activation_role(const Cta& cta) {
  const uint32_t lane = threadIdx.x % 32;
  void* local = cta.local();
  StageCursor at;
  for (uint32_t i = 0;; ++i) {
    const uint32_t item_slot = i % kItemSlots, parity = i / kItemSlots % 2;
    if (!mbarrier_wait_for_role(cta, shared_address(&cta.control->item_full[item_slot]), parity))
      return;
    const Item item = cta.control->items[item_slot];
    if (item.kind >= ItemKind::kEnd) return;
    // After an abort only the items are taken, up to the last one.
    if (lane == 0 && !gave_up(cta) && !wait_for_rows(cta, item)) give_up(cta);
    __syncwarp();
    if (!__any_sync(~0u, gave_up(cta))) {
      fence_proxy_async_global();  // rows were written by ordinary stores
      load_header(cta, item, item_slot);
      if (item.kind == ItemKind::kLinear1) {
        load_acts<Linear1>(cta, item, item_slot, at, region<Region::l1_acts>(local),
                           region<Region::l1_acts_sf>(local));
      } else {
        load_acts<Linear2>(cta, item, item_slot, at, region<Region::l2_acts>(local),
                           region<Region::l2_acts_sf>(local));
      }
    }
    __syncwarp();
    if (kRacecheck || lane == 0)
      mbarrier_arrive(shared_address(&cta.control->item_empty[item_slot]));
  }
}

}  // namespace jax_megamoe::gpu
