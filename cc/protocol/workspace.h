// workspace.h: the symmetric buffer of one rank as one table of regions.
//
// Sizes, offsets, totals, dumps and the documentation derive from JMM_WORKSPACE_REGIONS. Every rank
// lays its buffer out alike, so an address on a peer is the peer's base plus the same offset.
#pragma once

#include "protocol/shape.h"

namespace jax_megamoe {

enum class Lifetime : uint32_t {
  kPersistent,  // counts or is tagged with calls: zero at first, never zeroed between calls
  kPerCall,     // counters of one call: the owner zeroes them at its end
  kData,        // written before it is read in every call
};

// X(name, C++ type, dtype, dim0, dim1, dim2, lifetime, writer, reader); `s` is the MoeShape.
#define JMM_WORKSPACE_REGIONS(X)                                                                   \
  X(call_epoch, uint64_t, "u64", 1, 1, 1, kPersistent, "owner, end of call", "owner")              \
  X(rank_barrier, uint64_t, "u64", s.num_ranks, 1, 1, kPersistent, "each peer its word", "owner")  \
  X(grid_barrier, uint64_t, "u64", 1, 1, 1, kPersistent, "owner's workers", "owner's workers")     \
  X(expert_send_count, uint64_t, "u64", s.num_experts, 1, 1, kPerCall, "owner's dispatch",         \
    "owner's dispatch")                                                                            \
  X(expert_recv_count, uint64_t, "u64", s.num_ranks, s.num_local_experts(), 1, kPersistent,        \
    "peers' dispatch", "every role's scheduler")                                                   \
  X(next_item, uint32_t, "u32", 1, 1, 1, kPerCall, "owner's workers", "owner's workers")           \
  X(l1_arrival, uint32_t, "u32", s.counter_blocks(), 1, 1, kPerCall, "dispatch", "linear1")        \
  X(l1_empty, uint32_t, "u32", s.counter_blocks(), 1, 1, kPerCall, "swiglu", "dispatch")           \
  X(l2_arrival, uint32_t, "u32", s.counter_blocks(), 1, 1, kPerCall, "swiglu", "linear2")          \
  X(l2_empty, uint32_t, "u32", s.counter_blocks(), 1, 1, kPerCall, "linear2", "swiglu")            \
  X(src_token_topk_idx, uint32_t, "u32", s.num_ranks, s.max_slots_per_rank(), 1, kData,            \
    "peers' dispatch", "owner's dispatch")                                                         \
  X(token_src_metadata, TokenSource, "2xu32", s.max_pool_blocks() * s.block_m, 1, 1, kData,        \
    "dispatch", "linear2")                                                                         \
  X(x, uint8_t, "e4m3", s.max_tokens, s.hidden, 1, kData, "owner's input", "peers' dispatch")      \
  X(x_sf, uint8_t, "ue8m0", s.max_tokens, s.hidden / kSfGroup, 1, kData, "owner's input",          \
    "peers' dispatch")                                                                             \
  X(topk_idx, int32_t, "i32", s.max_tokens, s.top_k, 1, kData, "owner's input",                    \
    "owner's dispatch, combine")                                                                   \
  X(topk_weights, float, "f32", s.max_tokens, s.top_k, 1, kData, "owner's input",                  \
    "peers' dispatch")                                                                             \
  X(l1_acts, uint8_t, s.act_bytes == 2 ? "bf16" : "e4m3", s.ring_rows(), s.hidden, 1, kData,       \
    "dispatch", "linear1")                                                                         \
  X(l1_acts_sf, uint8_t, "ue8m0", s.ring_rows(), s.hidden / kSfGroup, 1, kData, "dispatch",        \
    "linear1")                                                                                     \
  X(l1_topk_weights, float, "f32", s.ring_rows(), 1, 1, kData, "dispatch", "swiglu")               \
  X(l2_acts, uint8_t, s.act_bytes == 2 ? "bf16" : "e4m3", s.ring_rows(), s.intermediate, 1, kData, \
    "swiglu", "linear2")                                                                           \
  X(l2_acts_sf, uint8_t, "ue8m0", s.ring_rows(), s.intermediate / kSfGroup, 1, kData, "swiglu",    \
    "linear2")                                                                                     \
  X(combine, uint16_t, "bf16", s.top_k, s.max_tokens, s.hidden, kData, "peers' linear2",           \
    "owner's combine")                                                                             \
  X(l2_topk_weights, float, "f32", s.ring_rows(), 1, 1, kData, "swiglu", "linear2")

// Where a pool row came from, and so where its result goes: combine[slot % K][slot / K] of `rank`.
struct TokenSource {
  uint32_t rank;
  uint32_t slot;  // token * top_k + k
};

enum class Region : uint32_t {
#define JMM_NAME(name, ...) name,
  JMM_WORKSPACE_REGIONS(JMM_NAME)
#undef JMM_NAME
      kCount
};
inline constexpr uint32_t kNumRegions = static_cast<uint32_t>(Region::kCount);

// The ring's activations are E4M3 codes or BF16 values; their C++ type is a byte for both. Elements
// of any other region have the size of their type.
JMM_HD constexpr uint64_t element_bytes(const MoeShape& s, Region region, uint64_t type_bytes) {
  return region == Region::l1_acts || region == Region::l2_acts ? s.act_bytes : type_bytes;
}

// Start of every region: bulk copies and tensor maps want 128 bytes; 256 also separates cache
// lines.
inline constexpr uint64_t kRegionAlignment = 256;

struct RegionInfo {
  const char* name;
  const char* dtype;
  uint64_t dims[3];
  uint64_t element_bytes;
  uint64_t offset;  // bytes from the base of the rank's buffer
  Lifetime lifetime;
  const char* writer;
  const char* reader;

  JMM_HD constexpr uint64_t num_bytes() const {
    return dims[0] * dims[1] * dims[2] * element_bytes;
  }
};

// Maps each Region to its C++ type.
template <Region>
struct RegionType;
#define JMM_TYPE(name, type, ...)   \
  template <>                       \
  struct RegionType<Region::name> { \
    using T = type;                 \
  };
JMM_WORKSPACE_REGIONS(JMM_TYPE)
#undef JMM_TYPE

struct WorkspaceLayout {
  RegionInfo regions[kNumRegions];
  uint64_t num_bytes;

  JMM_HD explicit constexpr WorkspaceLayout(const MoeShape& s) : regions{}, num_bytes(0) {
    uint32_t index = 0;
#define JMM_REGION(name, type, dtype, d0, d1, d2, lifetime, writer, reader) \
  regions[index++] = {#name,                                                \
                      dtype,                                                \
                      {uint64_t{d0}, uint64_t{d1}, uint64_t{d2}},           \
                      element_bytes(s, Region::name, sizeof(type)),         \
                      0,                                                    \
                      Lifetime::lifetime,                                   \
                      writer,                                               \
                      reader};
    JMM_WORKSPACE_REGIONS(JMM_REGION)
#undef JMM_REGION
    for (RegionInfo& region : regions) {
      region.offset = num_bytes;
      num_bytes += ceil_div(region.num_bytes(), kRegionAlignment) * kRegionAlignment;
    }
  }

  JMM_HD constexpr const RegionInfo& at(Region region) const {
    return regions[static_cast<uint32_t>(region)];
  }

  // First element of a region in the buffer that starts at `base`.
  template <Region R>
  JMM_HD typename RegionType<R>::T* ptr(void* base) const {
    return reinterpret_cast<typename RegionType<R>::T*>(static_cast<char*>(base) + at(R).offset);
  }
};

// A word of expert_recv_count holds the rows that one rank sends to one expert, and the call that
// they belong to, so that one store publishes both and nothing has to be zeroed between calls.
// Calls are numbered from 1: call_epoch + 1. A count of call `call` is there once reached(word,
// published_count(call, 0)).
JMM_HD constexpr uint64_t published_count(uint64_t call, uint32_t num_rows) {
  return call << 32 | num_rows;
}
JMM_HD constexpr uint32_t count_rows(uint64_t word) { return static_cast<uint32_t>(word); }
JMM_HD constexpr uint32_t count_call(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

// What every wait on a counter asks. The difference is signed because the 32 bits of a call's
// number are used up after days of small calls: the order survives that.
JMM_HD constexpr bool reached(uint64_t seen, uint64_t wanted) {
  return static_cast<int64_t>(seen - wanted) >= 0;
}

}  // namespace jax_megamoe
