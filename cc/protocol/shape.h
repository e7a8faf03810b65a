// shape.h: the sizes of one layer and everything that follows from them.
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe {

inline constexpr uint32_t kSfGroup = 32;  // elements along K that share one UE8M0 scale
inline constexpr uint32_t kBlockN = 128;  // weight rows of one tile (64 gate/up pairs in linear 1)
inline constexpr uint32_t kInterleave = 8;              // gate and up rows alternate in groups of 8
inline constexpr uint32_t kMaxRanks = 72;               // one NVLink domain
inline constexpr uint32_t kMaxTopK = 32;                // one lane per slot
inline constexpr uint64_t kMaxRows = (1ull << 31) - 1;  // row numbers are 32-bit words

struct MoeShape {
  uint32_t num_ranks = 1;           // R
  uint32_t num_experts = 1;         // E, over all ranks
  uint32_t top_k = 1;               // K
  uint32_t hidden = kBlockN;        // H
  uint32_t intermediate = kBlockN;  // I
  uint32_t max_tokens = 1;          // T, per rank
  uint32_t block_m = 64;            // rows of one M-block
  uint32_t ring_blocks = 1;         // M-blocks the pool's ring holds
  uint32_t min_block_m = 0;  // narrowest block_m that a call in this buffer may use; 0: block_m
  uint32_t act_bytes = 1;    // of one element of the ring's activations: 1 E4M3, 2 BF16

  JMM_HD constexpr uint32_t num_local_experts() const { return num_experts / num_ranks; }
  JMM_HD constexpr uint32_t owner_of(uint32_t expert) const { return expert / num_local_experts(); }

  // A token may name one expert in several slots, so a rank can receive every slot of every rank.
  JMM_HD constexpr uint64_t max_slots_per_rank() const { return uint64_t{max_tokens} * top_k; }
  JMM_HD constexpr uint64_t max_received_rows() const { return num_ranks * max_slots_per_rank(); }
  // Each expert's rows start at a block boundary: at most block_m - 1 rows of padding per expert.
  JMM_HD constexpr uint64_t max_pool_blocks() const {
    return (max_received_rows() + uint64_t{num_local_experts()} * (block_m - 1)) / block_m;
  }
  JMM_HD constexpr uint64_t ring_rows() const { return uint64_t{ring_blocks} * block_m; }
  // The ring's counters: one a block, enough for the ring cut into the narrowest blocks.
  JMM_HD constexpr uint64_t counter_blocks() const {
    return ring_rows() / (min_block_m != 0 ? min_block_m : block_m);
  }

  JMM_HD constexpr uint32_t linear1_n_blocks() const { return 2 * intermediate / kBlockN; }
  JMM_HD constexpr uint32_t linear2_n_blocks() const { return hidden / kBlockN; }

  // The ring a configuration gets when the user does not choose one: half of a balanced call's rows
  // (stages overlap by about that much), but never less than keeps all experts of a small call.
  JMM_HD constexpr uint32_t default_ring_blocks() const {
    uint64_t rows =
        max_of<uint64_t>(4096 + uint64_t{num_local_experts()} * block_m, max_slots_per_rank() / 2);
    return static_cast<uint32_t>(min_of(ceil_div<uint64_t>(rows, block_m), max_pool_blocks()));
  }

  JMM_HD constexpr bool valid() const {
    return num_ranks >= 1 && num_ranks <= kMaxRanks && num_experts >= num_ranks &&
           num_experts % num_ranks == 0 && top_k >= 1 && top_k <= kMaxTopK && hidden > 0 &&
           hidden % kBlockN == 0 && intermediate > 0 && intermediate % kBlockN == 0 &&
           max_tokens >= 1 && block_m >= 1 && ring_blocks >= 1 && min_block_m <= block_m &&
           (act_bytes == 1 || act_bytes == 2) &&
           max_received_rows() + uint64_t{num_local_experts()} * block_m <= kMaxRows;
  }
};

}  // namespace jax_megamoe
