// failure.h: the record of a rank's first failure, and how a CTA's roles tell each other to leave.
#pragma once

#include "gpu/common/cta.h"

namespace jax_megamoe::gpu {

// Claims the rank's record; only the first failure is told. Aborting failures make every role
// leave.
// Caller: one thread.
JMM_DEVICE void record_failure(const Cta& cta, FailureKind kind, uint32_t region, uint64_t index,
                               uint64_t wanted, uint64_t seen, uint32_t count = 0) {
  const bool aborts = kind == FailureKind::kTimeout;
  const uint32_t before =
      atom_or_acq_rel_gpu(cta.args.rank_control, kFailed | (aborts ? kAborted : 0));
  if (before & kFailed) return;
  volatile FailureRecord* record = cta.args.failure;
  record->rank = cta.args.rank;
  record->cta = blockIdx.x;
  record->sm = sm_id();
  record->role = static_cast<uint32_t>(cta.role);
  record->region = region;
  record->index = index;
  record->wanted = wanted;
  record->seen = seen;
  record->count = count;
  __threadfence_system();
  record->kind = static_cast<uint32_t>(kind);
  __threadfence_system();
  if (!aborts) return;
  // The host looks for records every few milliseconds. It should see this one before the kernel's
  // end lets the program go on.
  const uint64_t start = globaltimer_ns();
  while (globaltimer_ns() - start < 50000000) {
  }
}

JMM_DEVICE bool aborted(const Cta& cta) {
  return (ld_relaxed_gpu(cta.args.rank_control) & kAborted) != 0;
}

JMM_DEVICE bool gave_up(const Cta& cta) {
  return *static_cast<volatile uint32_t*>(&cta.control->failed) != 0;
}
JMM_DEVICE void give_up(const Cta& cta) {
  *static_cast<volatile uint32_t*>(&cta.control->failed) = 1;
}

}  // namespace jax_megamoe::gpu
