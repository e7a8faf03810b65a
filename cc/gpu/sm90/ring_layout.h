// ring_layout.h: how rows and their scales are stored in the ring, and how a row gets there.
#pragma once

#include "gpu/sm90/plan.h"
#include "gpu/common/cta.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// The ring holds tiles as the tensor cores want them: for each block, for each 128 bytes along K,
// block_m rows of 128 bytes whose 16-byte chunks are swizzled by the row.
inline constexpr uint32_t kActBytes = kBf16 ? 2 : 1;
template <class P>
inline constexpr uint64_t kRingBlockBytes = uint64_t{kBlockM} * P::kK * kActBytes;
JMM_DEVICE uint64_t tile_chunk(uint32_t row, uint32_t chunk) {  // chunk: 16 bytes along K
  return uint64_t{chunk / 8} * (kBlockM * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}
// Scales of promoted sums: FP32, for each 128 of K one for each row.
template <class P>
inline constexpr uint64_t kRingScaleBytes = uint64_t{kBlockM} * kKBlocks<P> * 4;
// With one scale a row, the scales are stored row by row.

JMM_DEVICE uint32_t widen_pair_bf16(uint32_t codes, float scale) {
  const float2 v = cvt_f32x2_e4m3x2(codes & 0xFFFF);
  return cvt_bf16x2(v.x * scale, v.y * scale);
}

// Scales of a row, on their way while its codes are copied.
class RowScales {
 public:
  // Caller: one warp.
  JMM_DEVICE explicit RowScales(const uint8_t* scales) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      const uint32_t scale = lane() + 32 * i;
      if (scale < kScales) bytes_[i] = scales[scale * (kBlockK / kSfGroup)];
    }
  }
  // Caller: one warp.
  JMM_DEVICE void store(const Cta& cta, uint32_t ring_slot, uint32_t row) const {
    float* to = reinterpret_cast<float*>(region<Region::l1_acts_sf>(cta.local()) +
                                         ring_slot * kBlockBytes) +
                row;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      const uint32_t scale = lane() + 32 * i;
      if (scale < kScales) to[scale * kBlockM] = ue8m0_to_float(bytes_[i]);
    }
  }

 private:
  // BF16 rows carry theirs.
  static constexpr uint32_t kScales = kBf16                               ? 0
                                      : kGranularity == Granularity::kRow ? 1
                                                                          : kKBlocks<Linear1>;
  static constexpr uint32_t kBlockBytes = kScales * kBlockM * 4;  // of a ring block
  static_assert(kGranularity != Granularity::k128 || kBlockBytes == kRingScaleBytes<Linear1>);
  static_assert(uint64_t{kBlockBytes} * kShape.ring_blocks <= ~0u, "offsets are 32-bit");
  static constexpr uint32_t kPerLane = ceil_div(max_of(kScales, 1u), 32u);
  JMM_DEVICE static uint32_t lane() { return threadIdx.x % 32; }
  uint8_t bytes_[kPerLane];
};

// Copies codes of one row of x, at `codes` with its scales at `scales`, into row `row` of a ring
// slot's tile.
// Caller: one warp.
JMM_DEVICE void copy_row(const uint8_t* codes, const uint8_t* scales, uint8_t* tile, uint32_t row) {
  constexpr uint32_t kChunks = kHidden / 16;
  constexpr uint32_t kInFlight = pull_loads(kGranularity);
#pragma unroll 1
  for (uint32_t first = threadIdx.x % 32; first < kChunks; first += 32 * kInFlight) {
    uint4 data[kInFlight];
    uint32_t sf[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t chunk = first + i * 32;
      if (chunk < kChunks) {
        data[i] = ld_global_v4(codes + chunk * 16);
        if constexpr (kBf16) sf[i] = scales[chunk / 2];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t chunk = first + i * 32;
      if (chunk >= kChunks) continue;
      if constexpr (kBf16) {
        const float scale = ue8m0_to_float(static_cast<uint8_t>(sf[i]));
        const uint32_t words[4] = {data[i].x, data[i].y, data[i].z, data[i].w};
        uint32_t wide[8];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          wide[2 * j] = widen_pair_bf16(words[j], scale);
          wide[2 * j + 1] = widen_pair_bf16(words[j] >> 16, scale);
        }
        *reinterpret_cast<uint4*>(tile + tile_chunk(row, 2 * chunk)) = {wide[0], wide[1], wide[2],
                                                                        wide[3]};
        *reinterpret_cast<uint4*>(tile + tile_chunk(row, 2 * chunk + 1)) = {wide[4], wide[5],
                                                                            wide[6], wide[7]};
      } else {
        *reinterpret_cast<uint4*>(tile + tile_chunk(row, chunk)) = data[i];
      }
    }
  }
}

}  // namespace jax_megamoe::gpu
