// plan.h: what one compiled kernel is specialised on, and its shared memory. Everything here is a
// constant derived from the macros that the host passes to NVRTC.
#pragma once

#include "gpu/interface/kernel_args.h"
#include "gpu/sm90/tuning.h"
#include "protocol/ring.h"
#include "protocol/scheduler.h"
#include "protocol/workspace.h"

namespace jax_megamoe::gpu {

inline constexpr Granularity kGranularity = static_cast<Granularity>(JMM_GRANULARITY);
inline constexpr bool kBf16 = kGranularity == Granularity::k32;
inline constexpr TileConfig kTile = tile_config(kGranularity, JMM_TILE);
inline constexpr Activation kActivation = static_cast<Activation>(JMM_ACTIVATION);

// The buffer's layout, and the same with the tile's M-blocks. Functions, because device code cannot
// refer to a constant of class type.
JMM_HD constexpr MoeShape layout_shape_of_kernel() {
  return {JMM_NUM_RANKS,  JMM_NUM_EXPERTS, JMM_TOP_K,       JMM_HIDDEN, JMM_INTERMEDIATE,
          JMM_MAX_TOKENS, kMaxBlockM,      JMM_RING_BLOCKS, kMinBlockM, kBf16 ? 2u : 1u};
}
JMM_HD constexpr MoeShape shape_of_kernel() {
  return call_shape(layout_shape_of_kernel(), tile_config(kGranularity, JMM_TILE));
}
inline constexpr MoeShape kLayoutShape = layout_shape_of_kernel();
inline constexpr MoeShape kShape = shape_of_kernel();
static_assert(kLayoutShape.valid() && kShape.valid());

inline constexpr uint32_t kRanks = kShape.num_ranks;
inline constexpr uint32_t kLocalExperts = kShape.num_local_experts();
inline constexpr uint32_t kTopK = kShape.top_k;
inline constexpr uint32_t kHidden = kShape.hidden;
inline constexpr uint32_t kIntermediate = kShape.intermediate;
inline constexpr uint32_t kBlockM = kTile.block_m;

template <Region R>
JMM_HD typename RegionType<R>::T* region(void* base) {
  constexpr uint64_t offset = WorkspaceLayout(kLayoutShape).at(R).offset;
  return reinterpret_cast<typename RegionType<R>::T*>(static_cast<char*>(base) + offset);
}

// ---- threads ----

inline constexpr uint32_t kMathThreads = kTile.math_warpgroups * 128;
inline constexpr uint32_t kMathWarps = kMathThreads / 32;
inline constexpr uint32_t kThreads = kTile.num_threads(), kWarps = kThreads / 32;
// A CTA's registers are those it starts with; setmaxnreg moves them from the producers to the math
// warpgroups.
inline constexpr uint32_t kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr uint32_t kMathRegisters = math_registers(kTile);
inline constexpr uint32_t kProducerRegisters = producer_registers(kTile);
static_assert(kMathThreads * kMathRegisters + 128 * kProducerRegisters <=
              kThreads * kLaunchRegisters);
// Warps of the last warpgroup.
inline constexpr uint32_t kWeightWarp = first_warp(Role::kWeightLoader);
inline constexpr uint32_t kActivationWarp = first_warp(Role::kActivationLoader);
inline constexpr uint32_t kFirstPullWarp = first_warp(Role::kDispatch);
static_assert(kFirstPullWarp + kPullWarps == 4);

// Hardware barriers of a CTA, by number.
enum NamedBarrier : uint32_t {
  kBarrierCta = 0,         // all threads; this is the barrier of __syncthreads()
  kBarrierMath = 1,        // the math warpgroups
  kBarrierProducers = 2,   // the last warpgroup
  kBarrierWarpgroup0 = 3,  // one math warpgroup each
  kBarrierWarpgroup1,
  kBarrierWarpgroup2,
  kBarrierWarpgroup3,
};
static_assert(kBarrierWarpgroup0 + kTile.math_warpgroups - 1 <= kBarrierWarpgroup3);
JMM_HD uint32_t barrier_of_warpgroup(uint32_t warpgroup) { return kBarrierWarpgroup0 + warpgroup; }

// ---- shapes of the two products ----

struct Linear1 {
  static constexpr uint32_t kK = kHidden, kRows = 2 * kIntermediate;
  static constexpr uint32_t kRowBlocks = kTile.l1_row_blocks, kPasses = kTile.l1_passes;
  static constexpr bool kRescale = kGranularity == Granularity::k128;  // scales change along K
};
struct Linear2 {
  static constexpr uint32_t kK = kIntermediate, kRows = kHidden;
  static constexpr uint32_t kRowBlocks = kTile.l2_row_blocks, kPasses = 1;
  static constexpr bool kRescale = !kBf16;
};
template <class P>
inline constexpr uint32_t kTileRows = kTile.math_warpgroups * P::kRowBlocks * 64;
template <class P>
inline constexpr uint32_t kTileChunks = kTileRows<P> / kWeightChunkRows;
template <class P>
inline constexpr uint32_t kItemRows = kTileRows<P> * P::kPasses;
template <class P>
inline constexpr uint32_t kItems = ceil_div(P::kRows, kItemRows<P>);  // of one M-block
template <class P>
inline constexpr uint32_t kKBlocks = P::kK / kBlockK;
static_assert(kItemRows<Linear2> <= 256);
static_assert(kItemRows<Linear1> == 256, "128 channels of one scale");
static_assert(Linear1::kRows % kWeightChunkRows == 0 && Linear2::kRows % kWeightChunkRows == 0);

inline constexpr uint32_t kChunkBytes = weight_chunk_bytes(kGranularity);
inline constexpr uint32_t kScaleBytesPerBlock = weight_scale_bytes(kGranularity) / 2;  // 64 rows

// ---- shared memory ----

// 1024-byte tiles of tokens come first: the swizzle pattern repeats every 1024 bytes.
inline constexpr uint32_t kActStageBytes = kBlockM * kBlockK * (kBf16 ? 2 : 1);
inline constexpr uint32_t kWeightStageBytes =
    max_of(kTileChunks<Linear1>, kTileChunks<Linear2>) * kChunkBytes;
inline constexpr uint32_t kScaleStageBytes = kBf16 ? 0 : kBlockM * 4;
inline constexpr uint32_t kStageBytes = kActStageBytes + kWeightStageBytes + kScaleStageBytes;
static_assert(kActStageBytes % 1024 == 0);

inline constexpr uint32_t kSharedLimit = 232448;  // bytes a CTA may use on sm_90

// What a CTA does next: an item of one of the scheduler's phases, or none any more.
enum class ItemKind : uint32_t {
  kLinear1 = static_cast<uint32_t>(Phase::kLinear1),
  kLinear2 = static_cast<uint32_t>(Phase::kLinear2),
  kEnd,    // there are no more items
  kAbort,  // the call is aborted
};
// One item of work as the roles pass it on.
struct Item {
  ItemKind kind;
  uint32_t expert;
  uint32_t n;  // item of the M-block
  uint32_t pool_block;
  uint32_t valid_m;
  uint32_t ring_slot;
  uint32_t lap;
  uint32_t reserved;
};

// Everything but the stages.
struct SharedControl {
  alignas(128) uint8_t staging[kTile.math_warpgroups][4096];
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  alignas(16) Item items[kItemSlots];
  // What the epilogue of an item needs of each token: linear 1, routing weight (FP32 bits); linear
  // 2, address of the result's row. The unit of a token's sums. The scale byte of each weight row.
  alignas(16) uint2 token_header[kItemSlots][kBlockM];
  alignas(16) float token_unit[kItemSlots][kBlockM];
  alignas(16) uint8_t row_scale[kItemSlots][256];
  alignas(128) uint8_t widen_table[128];
  // Rows of this rank's experts.
  uint32_t row_start[kLocalExperts + 1];    // first row of an expert, padding not counted
  uint32_t block_start[kLocalExperts + 1];  // first pool block of an expert
  uint32_t recv_count[kRanks][kLocalExperts];
  uint32_t list_start[kRanks][kLocalExperts];  // first row of an expert in a source's list
  uint64_t epoch;
  uint32_t ticket;                       // 0: the leader; the others as they began
  uint32_t participants;                 // CTAs of the call
  uint32_t failed;                       // a role of this CTA gave up: the others leave too
  uint32_t stuck_barrier, stuck_parity;  // what timed out within the CTA; they follow `failed`
  uint32_t role_failed, role_stuck_barrier, role_stuck_parity;  // the same between roles
  // Epilogues.
  alignas(16) uint32_t amax_part[kMathWarps][kBlockM / 2];  // two tokens a word
  // Reciprocals of the scales, FP32 bits, two tokens an entry; a copy for each independent group.
  alignas(16) uint2 reciprocal[kBf16 ? kTile.math_warpgroups : 1][kBlockM / 2];
#if JMM_BIAS
  // For an item's epilogue, too: the bias of each weight row; for linear 2, routing weights.
  alignas(16) float row_bias[kItemSlots][256];
  alignas(16) float token_weight[kItemSlots][kBlockM];
#endif
};
inline constexpr uint32_t kControlBytes = ceil_div(uint32_t(sizeof(SharedControl)), 1024u) * 1024;
inline constexpr uint32_t kStages =
    min_of(kMaxStages, (kSharedLimit - 1024 - kControlBytes) / kStageBytes);
static_assert(kStages >= 2, "too many experts per rank for this tile's shared memory");
inline constexpr uint32_t kWeightStagesOffset = kStages * kActStageBytes;
inline constexpr uint32_t kScaleStagesOffset = kWeightStagesOffset + kStages * kWeightStageBytes;
inline constexpr uint32_t kControlOffset =
    ceil_div(kScaleStagesOffset + kStages * kScaleStageBytes, 1024u) * 1024;
inline constexpr uint32_t kSharedBytes = kControlOffset + kControlBytes;
static_assert(kSharedBytes <= kSharedLimit);

}  // namespace jax_megamoe::gpu
