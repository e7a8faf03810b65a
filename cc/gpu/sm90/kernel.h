// kernel.h: the kernel. One launch per rank and call; the body is the table of roles.
#pragma once

// Headers of gpu/common see the constants and the ring of the architecture that includes them.
#include "gpu/sm90/plan.h"
#include "gpu/sm90/ring_layout.h"
#include "gpu/common/combine.h"
#include "gpu/common/dispatch.h"
#include "gpu/common/prologue.h"
#include "gpu/sm90/activation_loader.h"
#include "gpu/sm90/linear1.h"
#include "gpu/sm90/linear2.h"
#include "gpu/sm90/weight_loader.h"

namespace jax_megamoe::gpu {

// Caller: all threads of a CTA.
JMM_DEVICE void initialise(const KernelArgs& args, SharedControl& control) {
  uint64_t epoch = 0;
  uint32_t ticket = 0;
  if (threadIdx.x == 0) {  // on their way while the rest is done
    epoch = ld_relaxed_gpu(region<Region::call_epoch>(args.peer_buffer[args.rank]));
    if (blockIdx.x != 0) ticket = 1 + atom_add_relaxed_gpu(args.rank_control + kCheckIn, 1);
  }
  fill_widen_table(control.widen_table, threadIdx.x);
  if (threadIdx.x != 0) return;
  control.failed = 0;
  control.stuck_barrier = 0;
  control.stuck_parity = 0;
  control.role_failed = 0;
  for (uint32_t i = 0; i < kStages; ++i) {
    // Weight and activation loader; both are one thread but for the check's build.
    mbarrier_init(shared_address(&control.full[i]), 1 + kArrivalsOfWarp);
    mbarrier_init(shared_address(&control.empty[i]), kMathWarps * kArrivalsOfWarp);
  }
  for (uint32_t i = 0; i < kItemSlots; ++i) {
    mbarrier_init(shared_address(&control.item_full[i]), 1);
    mbarrier_init(shared_address(&control.item_empty[i]),
                  (kMathWarps + 1) * kArrivalsOfWarp);  // and act loader
  }
  fence_mbarrier_init();
  control.epoch = epoch;
  control.ticket = ticket;
}

// Caller: all threads of a CTA.
JMM_DEVICE void check_rank(const Cta& cta) {
  const KernelArgs& args = cta.args;
  if (!cta.leads() || threadIdx.x != 0 || args.ep_rank == nullptr) return;
  const int32_t given = *args.ep_rank;
  if (given == static_cast<int32_t>(args.rank)) return;
  record_failure(cta, FailureKind::kRankMismatch, 0, 0, args.rank,
                 static_cast<uint64_t>(int64_t{given}));
}

// Caller: all producer threads of a CTA.
JMM_DEVICE void producers(Cta& cta) {
  const uint32_t thread = threadIdx.x - kMathThreads, warp = thread / 32;
  cta.role = Role::kWeightLoader;
  bool counted;
  {
    Trace trace(cta, kWeightLane, TraceName::kWaitCounts, thread == 0);
    counted = receive_counts(cta, thread);
  }
  if (cta.leads() && counted) report_counts(cta, thread);
  if (warp == kWeightWarp) {
    if (thread % 32 == 0) weight_role(cta);
  } else if (warp == kActivationWarp) {
    cta.role = Role::kActivationLoader;
    activation_role(cta);
  } else if (counted) {
    cta.role = Role::kDispatch;
    pull_role(cta, warp - kFirstPullWarp);
  }
}

// One item with accumulators of N columns.
struct RunItem {
  Consumer& consumer;
  uint32_t item_slot;
  ItemKind kind;
  template <uint32_t N>
  JMM_DEVICE void operator()(Columns<N>) const {
    if (kind == ItemKind::kLinear1) {
      Linear1Item<N>(consumer, item_slot).run();
    } else {
      Linear2Item<N>(consumer, item_slot).run();
    }
  }
};

// Caller: all math threads of a CTA.
JMM_DEVICE void math(Cta& cta, uint32_t tokens) {
  cta.role = Role::kMath;
  Consumer consumer = {cta, {}, threadIdx.x / 128, threadIdx.x % 128 / 32, threadIdx.x % 32};
  for (uint32_t i = 0;; ++i) {
    const uint32_t item_slot = i % kItemSlots, parity = i / kItemSlots % 2;
    if (!mbarrier_wait_for_role(cta, shared_address(&cta.control->item_full[item_slot]), parity)) {
      return fill_with_nan(cta);
    }
    const ItemKind kind = cta.control->items[item_slot].kind;
    if (kind == ItemKind::kAbort) return fill_with_nan(cta);
    if (kind == ItemKind::kEnd) break;
    // Without this the compiler would compute addresses of all kinds of items before the first one,
    // and keep them on the stack.
    asm volatile("" : "+r"(consumer.warpgroup), "+r"(consumer.warp), "+r"(consumer.lane));
    with_columns(cta.control->items[item_slot].valid_m, RunItem{consumer, item_slot, kind});
    __syncwarp();
    if (kRacecheck || consumer.lane == 0) {
      mbarrier_arrive(shared_address(&cta.control->item_empty[item_slot]));
    }
  }
  // All rows of this CTA are pushed. When all CTAs of all ranks say so, every row is there.
  cta.role = Role::kCombine;
  Combine combine(cta, tokens);
  named_barrier_sync(kBarrierMath, kMathThreads);
  {
    Trace trace(cta, 0, TraceName::kWaitResults, threadIdx.x == 0);
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        fence_acq_rel_sys();
        arrive_call_barrier(cta);
      }
      __syncwarp();
      if (cta.leads()) publish_call_barrier(cta, kResultsPushed);
      if (!wait_call_barrier(cta, kResultsPushed)) give_up(cta);
    }
    named_barrier_sync(kBarrierMath, kMathThreads);
  }
  if (gave_up(cta) || ld_relaxed_gpu(cta.args.rank_control) != 0) return fill_with_nan(cta);
  Trace trace(cta, 0, TraceName::kCombine, threadIdx.x == 0);
  combine.run();
  clear_counters(cta);
}

}  // namespace jax_megamoe::gpu

// Bytes of dynamic shared memory to launch with.
extern "C" __device__ const unsigned int jmm_smem_bytes = jax_megamoe::gpu::kSharedBytes;

extern "C" __global__ void __launch_bounds__(jax_megamoe::gpu::kThreads, 1)
    jmm_mega_moe(const __grid_constant__ jax_megamoe::gpu::KernelArgs args) {
  using namespace jax_megamoe::gpu;
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedControl* control = reinterpret_cast<SharedControl*>(shared + kControlOffset);
  initialise(args, *control);
  __syncthreads();
  Cta cta = {args, control, shared_address(shared), Role::kPrologue};
  if (cta.ticket() & kCheckInClosed) return leave_late(cta);
  check_rank(cta);
  const uint32_t tokens = valid_tokens(cta);
  if (threadIdx.x == kMathThreads) prefetch_first_weights(cta, tokens);
  prologue(cta, tokens, shared);
  if (threadIdx.x >= kMathThreads) {
    setmaxnreg_dec<kProducerRegisters>();
    producers(cta);
  } else {
    setmaxnreg_inc<kMathRegisters>();
    math(cta, tokens);
  }
}
