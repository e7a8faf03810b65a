// rank.h: what a role of the CPU back end sees: its rank, its workspace, its peers, its operands.
//
// The CPU back end keeps the GPU kernels' structure. A rank has one dispatch thread and W math
// workers; roles are functions that take a RankView; all of them run until the call ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "protocol/activation.h"
#include "protocol/shape.h"
#include "protocol/workspace.h"

namespace jax_megamoe::cpu {

// Rows of an M-block. 64 rows amortise the widening of a weight tile over enough FMAs; fewer would
// repeat it, more would pad small experts' pools without a gain.
inline constexpr uint32_t kBlockM = 64;

// N-blocks that one item of linear 1 covers: its 128 channels can share one scale.
inline constexpr uint32_t kL1ItemBlocks = 2;
inline constexpr uint32_t kL1ItemRows = kL1ItemBlocks * kBlockN;  // weight rows, gate and up

enum StatusWord : uint32_t {
  kStatusOutOfRange = 0,    // this rank's slots whose expert id was outside [-1, E)
  kStatusReceivedRows = 1,  // rows this rank received from all ranks
  kStatusPoolBlocks = 2,    // M-blocks they fill
  kStatusRingLaps = 3,      // how often the ring was filled
  kNumStatusWords = 4,
};

// One rank's operands and results, in the memory of its device. Null `x_sf` means `x` is BF16.
struct CallArgs {
  const void* x = nullptr;         // [num_rows, hidden] bf16, or e4m3 codes
  const uint8_t* x_sf = nullptr;   // [num_rows, hidden/32] ue8m0
  const void* topk_idx = nullptr;  // [num_rows, top_k] i32 or i64
  bool topk_idx_is_64bit = false;
  const float* topk_weights = nullptr;  // [num_rows, top_k]
  const int32_t* num_tokens = nullptr;  // [1], rows that hold tokens; null: all
  uint32_t num_rows = 0;                // rows of the operands
  const uint8_t* w13 = nullptr;     // [E/R, 2I/16, H/2, 16] e2m1 pairs, gate/up interleaved by 8
  const uint8_t* w13_sf = nullptr;  // [E/R, 2I/16, H/32, 16] ue8m0
  const uint8_t* w2 = nullptr;      // [E/R, H/16, I/2, 16]
  const uint8_t* w2_sf = nullptr;   // [E/R, H/16, I/32, 16]
  const float* b13 = nullptr;       // [E/R, 2I] in the order of w13's rows; null: no biases
  const float* b2 = nullptr;        // [E/R, H]; null like b13
  Activation activation = Activation::kSwiglu;
  ActivationParams activation_params;
  // Elements that share one scale: 32, 128, or 0: all of x's row, and 128 of SwiGLU's output.
  uint32_t granularity = kSfGroup;
  bool checked = false;         // an out-of-range expert id fails the call
  uint16_t* y = nullptr;        // [num_rows, hidden] bf16
  int32_t* received = nullptr;  // [E/R] rows per local expert
  int32_t* status = nullptr;    // [kNumStatusWords]
};

// A wait that a thread is in right now, kept so that a timeout can say who waits for what.
struct PendingWait {
  uint64_t order;  // place in the protocol, see wait_order()
  uint32_t rank;
  uint32_t worker;
  const char* role;
  Region region;
  uint64_t index;
  uint64_t wanted;
  const void* word;
  uint64_t (*load)(const void*);
};

// State of one call that its ranks share. The first failure wins and makes every wait give up.
struct CallState {
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::string failure;                      // guarded by mutex
  bool timed_out = true;                    // what `failure` is about; guarded by mutex
  std::vector<const PendingWait*> pending;  // guarded by mutex
  double timeout_s = 0;                     // of each single wait

  // For what a role throws, such as std::bad_alloc.
  void fail(std::string message) {
    std::lock_guard<std::mutex> lock(mutex);
    if (failure.empty()) {
      failure = std::move(message);
      timed_out = false;
    }
    aborted.store(true, std::memory_order_release);
  }
};

// A deliberate fault: the next signal to `region` by `rank` is not sent. Region::kCount: none.
struct Fault {
  std::atomic<uint32_t> region{kNumRegions};
  std::atomic<uint32_t> rank{0};
};

// Counters that several workers of one rank update during a call.
struct RankCounters {
  std::atomic<uint32_t> out_of_range{0};
  std::atomic<uint64_t> first_out_of_range{~0ull};  // slot (token * K + k)
};

struct RankView {
  const MoeShape& shape;
  const WorkspaceLayout& layout;
  void* const* bases;  // [num_ranks] base of every rank's buffer: the peer map
  uint32_t rank;
  uint32_t num_workers;  // math workers of this rank
  uint32_t worker;       // 0..num_workers-1, or num_workers for the dispatch thread
  const char* role;      // named in a failure
  const CallArgs& args;
  uint32_t num_tokens;  // rows of args that hold tokens
  CallState& call;
  RankCounters& counters;
  Fault& fault;

  template <Region R>
  auto* local() const {
    return layout.ptr<R>(bases[rank]);
  }
  template <Region R>
  auto* remote(uint32_t peer) const {
    return layout.ptr<R>(bases[peer]);
  }
  uint32_t num_threads() const { return num_workers + 1; }
};

}  // namespace jax_megamoe::cpu
