// mainloop.h: the product of one tile. Packed FP4 weights are widened in registers and are wgmma's
// A operand (64 rows an instruction); tokens are its B operand in shared memory.
//
// The shape of each loop follows from measurements: see docs/performance_log.md.
#pragma once

#include "gpu/common/wait.h"
#include "gpu/sm90/isa.h"
#include "gpu/sm90/stages.h"
#include "gpu/sm90/wgmma.h"
#include "protocol/numerics.h"

namespace jax_megamoe::gpu {

// The math warpgroup's view of the ring.
struct Consumer {
  const Cta& cta;
  StageCursor at;
  uint32_t warpgroup, warp, lane;  // warp of the warpgroup

  JMM_DEVICE uint32_t acts(uint32_t stage) const {
    return cta.stages_address + stage * kActStageBytes;
  }
  JMM_DEVICE uint32_t weights(uint32_t stage) const {
    return cta.stages_address + kWeightStagesOffset + stage * kWeightStageBytes;
  }
  JMM_DEVICE uint32_t scales(uint32_t stage) const {
    return cta.stages_address + kScaleStagesOffset + stage * kScaleStageBytes;
  }
  // Caller: all threads of a math warpgroup.
  JMM_DEVICE void wait_full() const {
    mbarrier_wait(cta, shared_address(&cta.control->full[at.index]), at.parity);
  }
  // Caller: one warp.
  JMM_DEVICE void release(uint32_t stage) const {
    if (kRacecheck || lane == 0) mbarrier_arrive(shared_address(&cta.control->empty[stage]));
  }
};

// Packed codes and exponent codes of one 64-row block and one stage, for this thread: rows g and
// g + 8 of its warp, four groups of 32.
struct PackedFragment {
  uint4 codes[2];
  uint2 scales;  // .y only for BF16 operands
};

template <uint32_t RowBlocks>
JMM_DEVICE void load_fragment(const Consumer& math, uint32_t stage, uint32_t row_block,
                              PackedFragment& out) {
  const uint32_t block = math.warpgroup * RowBlocks + row_block;  // 64-row block of the tile
  const uint32_t chunk = math.weights(stage) + (block / 2) * kChunkBytes;
  const uint32_t codes =
      chunk + (block % 2) * (kWeightCodeBytes / 2) + (math.warp * 32 + math.lane) * 16;
  out.codes[0] = ld_shared_v4(codes);
  out.codes[1] = ld_shared_v4(codes + 2048);
  const uint32_t scales = chunk + kWeightCodeBytes + (block % 2) * kScaleBytesPerBlock;
  const uint32_t row = math.warp * 8 + math.lane / 4;
  if constexpr (kBf16) {
    out.scales = ld_shared_v2(scales + row * 8);
  } else {
    out.scales.x = ld_shared_u32(scales + row * 4);
  }
}

JMM_DEVICE uint32_t word_of(const PackedFragment& packed, uint32_t group, uint32_t high_row) {
  const uint4 v = packed.codes[group / 2];
  return group % 2 ? (high_row ? v.w : v.z) : (high_row ? v.y : v.x);
}

// ---- E4M3 operands ----

// Entry d of the table holds the E4M3 codes of the eight E2M1 magnitudes times 2^(6 - d): exact for
// d <= 14, where 0.5 and 1.5 are still whole multiples of 2^-9. Entry 15 is zero.
inline constexpr int kWidenExponent = 6;
// What that leaves for the epilogues; BF16 operands carry their scales whole.
inline constexpr float kWeightUnit = kBf16 ? 1.0f : 0x1p-6f;
static_assert(kWidenExponent == 6);
// Caller: all threads of a CTA.
JMM_DEVICE void fill_widen_table(uint8_t* table, uint32_t thread) {
  if (thread >= 128) return;
  const uint32_t d = thread / 8, magnitude = thread % 8;
  const float value = 0.5f * static_cast<float>(e2m1_doubled(magnitude));
  const float scaled = value * ue8m0_to_float(static_cast<uint8_t>(127 + kWidenExponent - d));
  table[thread] = d == 15 ? 0 : static_cast<uint8_t>(cvt_e4m3x2(scaled, 0.0f) & 0xFF);
}

// One word, eight values of one row and one group, becomes two registers: k = 4q + t and
// k = 16 + 4q + t. The table's entry for the group's exponent code does the scaling.
JMM_DEVICE void widen_word_e4m3(uint32_t word, uint2 entry, uint32_t& low, uint32_t& high) {
  const uint32_t magnitudes = word & 0x77777777u;
  low = prmt(entry.x, entry.y, magnitudes) | (word & 0x80808080u);
  high = prmt(entry.x, entry.y, magnitudes >> 16) | ((word << 4) & 0x80808080u);
}
JMM_DEVICE uint2 widen_entry(uint32_t table, uint32_t exponents, uint32_t shift) {
  const uint32_t offset = shift < 3 ? exponents << (3 - shift) : exponents >> (shift - 3);
  return ld_shared_constant_v2(table | (offset & 0x78u));
}
// Group is a compile-time constant in every caller's unrolled loop.
JMM_DEVICE void widen_e4m3(const PackedFragment& packed, uint32_t group, uint32_t table,
                           uint32_t (&out)[4]) {
  widen_word_e4m3(word_of(packed, group, 0), widen_entry(table, packed.scales.x, 4 * group), out[0],
                  out[2]);
  widen_word_e4m3(word_of(packed, group, 1), widen_entry(table, packed.scales.x, 16 + 4 * group),
                  out[1], out[3]);
}

// ---- BF16 operands ----

// One word becomes four BF16 pairs. The code's bits move to the sign, the two low exponent bits and
// the top mantissa bit, which is the value times 2^-126; the scale makes up for it.
JMM_DEVICE void widen_word_bf16(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
  constexpr uint32_t kBits = 0x81C081C0u, kInPlace = 0x01000100u;
  out[0] = mul_bf16x2((word << 2) & kBits, scale);
  out[1] = mul_bf16x2((word << 6) & kBits, scale);
  out[2] = mul_bf16x2(__funnelshift_l(word, word, 12) & kBits, scale);
  const uint32_t rotated = __funnelshift_l(word, word, 8);
  out[3] = mul_bf16x2(((word & kInPlace) | (rotated & ~kInPlace)) & kBits, scale);
}
JMM_DEVICE void widen_bf16(const PackedFragment& packed, uint32_t group, uint32_t (&out)[2][4]) {
  // The group's byte becomes the exponent of both halves.
  const uint32_t selector = 0x4440u | group;
  const uint32_t low = prmt(packed.scales.x, 0, selector) * 0x00800080u;
  const uint32_t high = prmt(packed.scales.y, 0, selector) * 0x00800080u;
  uint32_t a[4], b[4];
  widen_word_bf16(word_of(packed, group, 0), low, a);
  widen_word_bf16(word_of(packed, group, 1), high, b);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    out[half][0] = a[2 * half];
    out[half][1] = b[2 * half];
    out[half][2] = a[2 * half + 1];
    out[half][3] = b[2 * half + 1];
  }
}

// ---- the loop ----

// Brings the sums to the unit of the next stage: one power of two a token, exact.
template <uint32_t N, uint32_t kBlocks>
JMM_DEVICE void rescale(uint32_t ratios, uint32_t lane, float (&acc)[kBlocks][N / 2]) {
#pragma unroll
  for (uint32_t c = 0; c < N / 8; ++c) {
    const uint2 ratio = ld_shared_v2(ratios + c * 32 + (lane % 4) * 8);
    const float low = bits_float(ratio.x), high = bits_float(ratio.y);
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      acc[b][4 * c] *= low;
      acc[b][4 * c + 1] *= high;
      acc[b][4 * c + 2] *= low;
      acc[b][4 * c + 3] *= high;
    }
  }
}

// While a group's products run, the next group is widened into the other fragment buffer. A stage
// is given back one step late, when the products that read it are known to be done.
//
// Where a token's scale changes every 128 of K, the sums stay in the tensor core's accumulators as
// well, in the unit of the stage at hand: before a stage they are multiplied by the ratio of two
// scales, which the activation loader has put beside the tokens. Separate partial sums, added up
// with FFMA, need registers that wide tiles do not have and were a third slower
// (docs/performance_log.md).
// Caller: all threads of a math warpgroup.
template <class P, uint32_t N>
JMM_DEVICE void multiply(Consumer& math, float (&acc)[P::kRowBlocks][N / 2]) {
  constexpr uint32_t kBlocks = P::kRowBlocks, kHalves = kBf16 ? 2 : 1;
  const uint32_t table = shared_address(math.cta.control->widen_table);
  uint32_t fragment[2][kBlocks][kHalves][4];
  PackedFragment packed[kBlocks];
  const auto load = [&](uint32_t stage) {
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) load_fragment<kBlocks>(math, stage, b, packed[b]);
  };
  const auto widen = [&](uint32_t group) {
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if constexpr (kBf16) {
        widen_bf16(packed[b], group, fragment[group % 2][b]);
      } else {
        widen_e4m3(packed[b], group, table, fragment[group % 2][b][0]);
      }
    }
  };
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (uint32_t i = 0; i < N / 2; ++i) acc[b][i] = 0.0f;
  }
  math.wait_full();
  load(math.at.index);
  widen(0);
  uint32_t previous = kStages;  // none
  for (uint32_t k = 0; k < kKBlocks<P>; ++k) {
    const uint32_t stage = math.at.index;
    const uint64_t tokens = tile_descriptor(math.acts(stage));
    math.at.advance();
    if constexpr (P::kRescale) {
      wgmma_wait<0>();
      if (previous != kStages) math.release(previous);
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) pin(acc[b]);
      rescale<N>(math.scales(stage), math.lane, acc);  // of the first stage: by one
    }
#pragma unroll
    for (uint32_t group = 0; group < 4; ++group) {
      wgmma_fence();
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) {
        if constexpr (kBf16) {
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half) {
            // Two tiles of 64 columns a stage; 16 columns are 32 bytes.
            const uint32_t step = 2 * group + half;
            wgmma_bf16<N>(acc[b], fragment[group % 2][b][half],
                          tokens + (step / 4) * (kBlockM * 8) + (step % 4) * 2, 1);
          }
        } else {
          wgmma_e4m3<N>(acc[b], fragment[group % 2][b][0], tokens + group * 2, 1);
        }
      }
      wgmma_commit();
      if (group < 3) {
        wgmma_wait<1>();
        if (!P::kRescale && group == 0 && previous != kStages) math.release(previous);
        widen(group + 1);
      } else if (k + 1 < kKBlocks<P>) {
        math.wait_full();
        load(math.at.index);
        wgmma_wait<1>();
        widen(0);
      }
    }
    previous = stage;
  }
  wgmma_wait<0>();
  math.release(previous);
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) pin(acc[b]);
}

// Calls fn with the number of columns that covers `valid` tokens, as a constant.
template <uint32_t N>
struct Columns {
  static constexpr uint32_t value = N;
};
template <class Fn>
JMM_DEVICE void with_columns(uint32_t valid, const Fn& fn) {
  constexpr uint32_t kFirst = narrow_columns(kGranularity, kBlockM, 0);
  constexpr uint32_t kSecond = narrow_columns(kGranularity, kBlockM, 1);
  if constexpr (kFirst != 0) {
    if (valid <= kFirst) return fn(Columns<kFirst>{});
  }
  if constexpr (kSecond != 0) {
    if (valid <= kSecond) return fn(Columns<kSecond>{});
  }
  fn(Columns<kBlockM>{});
}
// The same number, for the loader.
struct NumColumns {
  uint32_t& columns;
  template <uint32_t N>
  JMM_DEVICE void operator()(Columns<N>) const {
    columns = N;
  }
};
JMM_DEVICE uint32_t num_columns(uint32_t valid) {
  uint32_t columns = 0;
  with_columns(valid, NumColumns{columns});
  return columns;
}

}  // namespace jax_megamoe::gpu
