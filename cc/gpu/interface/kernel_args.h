// kernel_args.h: what the host passes to the kernel, and what the kernel reports. Host and device.
#pragma once

#include "gpu/interface/rank_control.h"
#include "gpu/interface/roles.h"
#include "protocol/activation.h"
#include "protocol/shape.h"

namespace jax_megamoe::gpu {

enum class FailureKind : uint32_t {
  kNone = 0,
  kTimeout,        // region, index, wanted, seen
  kOutOfRange,     // checked mode: index = slot, seen = expert id (two's complement)
  kNumTokens,      // seen = num_tokens
  kRankMismatch,   // wanted = rank of the buffer, seen = rank of the program
  kUnequalScales,  // index = token * (hidden / 32) + place of the scale, wanted and seen = bytes,
                   // count = Granularity
};

// Written by one thread of a rank's kernel into host memory, `kind` last.
struct FailureRecord {
  uint32_t kind;  // FailureKind
  uint32_t rank;
  uint32_t cta;  // one per SM
  uint32_t sm;
  uint32_t role;    // Role
  uint32_t region;  // Region of the counter; kSharedBarrier: a barrier within the CTA
  uint64_t index;   // element of the region
  uint64_t wanted;
  uint64_t seen;
  uint32_t count;  // kOutOfRange: number of such slots
  uint32_t reserved;
};
inline constexpr uint32_t kSharedBarrier = 0xFFFFFFFFu;

enum StatusWord : uint32_t {
  kStatusOutOfRange = 0,
  kStatusReceivedRows,
  kStatusPoolBlocks,
  kStatusRingLaps,
  kNumStatusWords
};

struct KernelArgs {
  void* peer_buffer[kMaxRanks];  // every rank's symmetric buffer, as this device maps it

  const void* x;         // BF16 [num_rows][hidden], or E4M3 codes if x_sf is set
  const uint8_t* x_sf;   // UE8M0 [num_rows][hidden / 32], or null
  const void* topk_idx;  // int32 or int64 [num_rows][top_k]
  const float* topk_weights;
  const int32_t* num_tokens;     // null: all rows
  const int32_t* ep_rank;        // rank in the program, checked against `rank`; null: not checked
  const uint8_t* w13;            // packed chunks, see tuning.h
  const uint8_t* w13_row_scale;  // UE8M0 byte of every weight row [E/R][2 * intermediate]
  const uint8_t* w2;
  const uint8_t* w2_row_scale;  // [E/R][hidden]

  uint16_t* y;        // BF16 [num_rows][hidden]
  int32_t* received;  // [E/R]
  int32_t* status;    // StatusWord

  uint32_t* rank_control;  // in this rank's own device memory
  FailureRecord* failure;  // host memory, mapped
  void* scratch;           // kScratchBytesPerCta * num_ctas, this rank's own device memory
  void* trace;             // null without JMM_TRACE

  uint64_t timeout_ns;
  float swiglu_limit;  // of swiglu and gpt_oss_swiglu; +infinity: no clamp
  uint32_t rank;
  uint32_t num_rows;
  uint32_t topk_idx_is_64bit;
  uint32_t checked;
  uint32_t fault_region;  // deliberate fault: this rank's next signal to a counter of that Region
                          // is lost; 0xFFFFFFFF: none

  // What the other activations are computed with; see set_activation_params.
  float gpt_oss_power;  // -alpha * log2(e)
  float situ_beta, situ_inverse_beta, situ_linear_beta, situ_inverse_linear_beta;

  // Only with JMM_BIAS.
  const float* b13;  // [E/R][2 * intermediate], in the order of w13's rows
  const float* b2;   // [E/R][hidden]
};

inline constexpr float kLog2E = 1.44269504088896340736f;

// Fills in what activations are computed with; the kernel multiplies by reciprocals. The host calls
// it, and so do tests of the arithmetic on a device.
JMM_HD void set_activation_params(KernelArgs& args, const ActivationParams& params) {
  args.swiglu_limit = params.limit;
  args.gpt_oss_power = -params.alpha * kLog2E;
  args.situ_beta = params.beta;
  args.situ_inverse_beta = 1.0f / params.beta;
  args.situ_linear_beta = params.linear_beta;
  args.situ_inverse_linear_beta = 1.0f / params.linear_beta;
}

// Linear 1's values of a first pass wait here for the scale of the second.
inline constexpr uint64_t kScratchBytesPerCta = 64 * 256 * 4;

}  // namespace jax_megamoe::gpu
