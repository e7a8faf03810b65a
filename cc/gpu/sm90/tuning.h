// tuning.h: every tuned number of the sm_90a kernel, with its reason. Host and device.
//
// Weights are the rows of a tile (wgmma's M, in blocks of 64, from registers), tokens its columns
// (wgmma's N, from shared memory). One tile configuration is compiled for one kernel; the host
// picks it from the number of rows an expert is expected to receive.
#pragma once

#include "protocol/shape.h"

namespace jax_megamoe::gpu {

// Elements of an activation row that share one scale.
enum class Granularity : uint32_t {
  kRow = 0,    // linear 1's input: the whole row; linear 2's input: 128
  k32 = 32,    // exact MXFP8; BF16 tensor cores
  k128 = 128,  // FP8 tensor cores, sums rescaled every 128
};

inline constexpr uint32_t kBlockK = 128;           // K of one pipeline stage
inline constexpr uint32_t kWeightChunkRows = 128;  // rows whose packed weights are contiguous
inline constexpr uint32_t kMaxBlockM = 256;        // widest tile: the ring is allocated in these
inline constexpr uint32_t kMinBlockM = 8;          // narrowest tile: ring counters are sized for it

// Bytes of the packed weights of 128 rows and 128 of K: FP4 codes, then one exponent code a group.
// E4M3 operands: 4 bits a group (0..14 binades below the row's scale, 15: a group of zeros).
// BF16 operands: 8 bits a group, any spread.
inline constexpr uint32_t kWeightCodeBytes = kWeightChunkRows * kBlockK / 2;
JMM_HD constexpr uint32_t weight_scale_bytes(Granularity g) {
  return kWeightChunkRows * (kBlockK / kSfGroup) * (g == Granularity::k32 ? 8 : 4) / 8;
}
JMM_HD constexpr uint32_t weight_chunk_bytes(Granularity g) {
  return kWeightCodeBytes + weight_scale_bytes(g);
}

struct TileConfig {
  uint32_t block_m;          // tokens of a tile: N of the instruction
  uint32_t math_warpgroups;  // each has its own 64-row blocks
  uint32_t l1_row_blocks;    // 64-row blocks of one warpgroup in linear 1
  uint32_t l2_row_blocks;    // the same in linear 2
  uint32_t l1_passes;        // tiles of linear 1 that one item computes one after the other
  const char* reason;

  JMM_HD constexpr uint32_t num_threads() const { return (math_warpgroups + 1) * 128; }
  JMM_HD constexpr uint32_t l1_rows() const { return math_warpgroups * l1_row_blocks * 64; }
  JMM_HD constexpr uint32_t l2_rows() const { return math_warpgroups * l2_row_blocks * 64; }
  JMM_HD constexpr uint32_t l1_item_rows() const { return l1_rows() * l1_passes; }
};

// FP8 tensor cores (granularities 128 and row). An item of linear 1 has to cover 256 weight rows:
// its 128 channels share one scale.
inline constexpr TileConfig kFp8Tiles[] = {
    {8, 4, 1, 1, 1, "up to 8 rows per expert: four warpgroups hide the widening, HBM-bound"},
    {16, 4, 1, 1, 1, "up to 16 rows per expert, HBM-bound"},
    {48, 4, 1, 1, 1, "up to 48 rows per expert, close to HBM-bound"},
    {64, 4, 1, 1, 1, "one pass over the weights matters more than the tile's own rate"},
    {128, 2, 2, 2, 1, "two row blocks share each token fragment"},
    {256, 2, 1, 1, 2, "widening is amortised over 256 tokens; two passes make one scale group"},
};
// BF16 tensor cores (granularity 32).
inline constexpr TileConfig kBf16Tiles[] = {
    {8, 4, 1, 1, 1, "up to 8 rows per expert, HBM-bound"},
    {16, 4, 1, 1, 1, "up to 16 rows per expert, HBM-bound"},
    {48, 4, 1, 1, 1, "up to 48 rows per expert"},
    {64, 4, 1, 1, 1, "one pass over the weights matters more than the tile's own rate"},
    {128, 2, 2, 2, 1, "best BF16 rate: two row blocks share each token fragment"},
};
inline constexpr uint32_t kNumFp8Tiles = sizeof(kFp8Tiles) / sizeof(kFp8Tiles[0]);
inline constexpr uint32_t kNumBf16Tiles = sizeof(kBf16Tiles) / sizeof(kBf16Tiles[0]);

JMM_HD constexpr uint32_t num_tiles(Granularity g) {
  return g == Granularity::k32 ? kNumBf16Tiles : kNumFp8Tiles;
}
JMM_HD constexpr TileConfig tile_config(Granularity g, uint32_t index) {
  return g == Granularity::k32 ? kBf16Tiles[index] : kFp8Tiles[index];
}

// The narrowest tile that holds most experts' rows in one block: rows per expert of a uniform
// router are about Poisson distributed, and mean + 1.5 sqrt(mean) covers 93 % of experts. The
// others read their weights twice, the second time from the L2; wider tiles for all cost more.
JMM_HD constexpr uint32_t select_tile(Granularity g, const MoeShape& shape, uint32_t num_rows) {
  const double mean = double(num_rows) * shape.num_ranks * shape.top_k / double(shape.num_experts);
  uint32_t index = 0;
  while (index + 1 < num_tiles(g)) {
    const double room = tile_config(g, index).block_m - mean;
    if (room > 0 && room * room >= 2.25 * mean) break;
    ++index;
  }
  return index;
}

// ---- numbers beside the tile ----
//
// Versions are those of docs/performance_log.md, on an H200. Where no workload is named, the number
// follows from a limit of the machine or from an argument, and was not swept.

// Stages of the ring at most: shared memory is the limit of all but the narrowest tiles.
inline constexpr uint32_t kMaxStages = 12;
// Items that a CTA holds: the one in work and the next. A CTA that holds more keeps work from a
// free one: version 4, 2048 tokens, 17 us.
inline constexpr uint32_t kItemSlots = 2;
// Stages before an item's last one at which the weight loader takes the next item from the counter,
// which hides the counter's latency and holds an item no longer than that: version 4, 2048 tokens.
inline constexpr uint32_t kStagesBeforeNextItem = 3;
// Registers of a thread after setmaxnreg. A CTA starts with 168 x 384 or 96 x 640; setmaxnreg
// blocks for ever if the sum is larger. 72 and 216 instead of 56 and 224: 704 instead of 707 us
// with 2048 tokens (the activation loader's entry after version 9), which is within the noise.
JMM_HD constexpr uint32_t math_registers(const TileConfig& tile) {
  return tile.math_warpgroups == 2 ? 224 : 104;
}
JMM_HD constexpr uint32_t producer_registers(const TileConfig& tile) {
  return tile.math_warpgroups == 2 ? 56 : 64;
}
// Warps that pull rows: with 132 SMs two of each fill NVLink.
inline constexpr uint32_t kPullWarps = 2;
// Loads of 16 bytes that a lane of a pull warp has in flight. Eight FP8 loads spill and were 1 to 5
// us slower (version 7); four beside the wide BF16 values spill (version 6).
JMM_HD constexpr uint32_t pull_loads(Granularity g) { return g == Granularity::k32 ? 2 : 4; }
// Loads of 16 bytes that a lane has in flight in combine: so many rows of a token, and so many
// parts of 256 columns of each. 6 rows x 4 parts: 0.9 us less at 512 tokens (version 7). Tiles with
// four math warpgroups have registers for two parts.
inline constexpr uint32_t kCombineRows = 8;
JMM_HD constexpr uint32_t combine_parts(const TileConfig& tile) {
  return tile.math_warpgroups == 2 ? 4 : 2;
}
// Routes that a thread loads at once in the prologue, and the number of slots up to which one CTA
// lists all of them, because it needs no barrier in between: 3072 slots (512 tokens, top-6) took 7
// us, and 11 with a barrier and all CTAs (version 5).
inline constexpr uint32_t kRouteBatch = 8;
inline constexpr uint32_t kMaxSlotsOfOneCta = 4096;
// Rows that an expert has on average when the first items' weights are brought into the L2 before
// counts are known. At 3, one expert in twenty is without rows (e^-3). More stages ahead, 8 or 16,
// were 2 to 4 us slower at every size (after version 6).
inline constexpr uint32_t kRowsThatMakeItLikely = 3;
// How long the leader waits for CTAs that have not checked in yet (version 8).
inline constexpr uint64_t kCheckInGraceNs = 20000;

// Blocks that are not full have functions of their own with fewer columns, up to two for a tile:
// the first, the second, or 0. A function pays for itself only where tokens and not weights take
// the time, and all of them should fit the instruction cache. 112 columns beside 96 and 128 cost
// Pro 63 us at 512 tokens (version 8); 32 beside 48 came with that tile (version 9).
JMM_HD constexpr uint32_t narrow_columns(Granularity g, uint32_t block_m, uint32_t which) {
  if (block_m == 256) return which == 0 ? 128 : 192;
  if (block_m == 128 && g != Granularity::k32) return which == 0 ? 96 : 0;
  if (block_m == 48) return which == 0 ? 32 : 0;
  return 0;
}

// The shape that sizes a rank's buffer: independent of the tile that a call uses.
JMM_HD constexpr MoeShape layout_shape(MoeShape shape, Granularity g, uint64_t ring_tokens) {
  shape.block_m = kMaxBlockM;
  shape.min_block_m = kMinBlockM;
  shape.act_bytes = g == Granularity::k32 ? 2 : 1;
  // A quarter of a balanced call's rows: two to three waves of the schedule. Never less than a
  // block of every expert, so that small calls need not wait.
  const uint64_t wanted =
      ring_tokens != 0 ? ring_tokens
                       : max_of<uint64_t>(4096 + uint64_t{shape.num_local_experts()} * kMaxBlockM,
                                          shape.max_slots_per_rank() / 4);
  shape.ring_blocks = static_cast<uint32_t>(
      max_of<uint64_t>(1, min_of(ceil_div<uint64_t>(wanted, kMaxBlockM), shape.max_pool_blocks())));
  return shape;
}
// The shape of one call with tile `tile` in a buffer laid out for `layout`.
JMM_HD constexpr MoeShape call_shape(MoeShape layout, const TileConfig& tile) {
  const uint64_t ring_rows = layout.ring_rows();
  layout.block_m = tile.block_m;
  layout.ring_blocks = static_cast<uint32_t>(ring_rows / tile.block_m);
  return layout;
}

}  // namespace jax_megamoe::gpu
