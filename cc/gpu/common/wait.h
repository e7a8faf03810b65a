// wait.h: bounded waits, for counters in memory and for barriers within the CTA.
#pragma once

#include "gpu/common/failure.h"
#include "protocol/workspace.h"

namespace jax_megamoe::gpu {

// Everything here is inlined: a function call while products are in flight would make the compiler
// wait for them first, and call frames do not go with setmaxnreg.

// Waits until load() has reached `wanted`. False: the call is aborted.
// Caller: one thread.
template <class Load>
JMM_DEVICE bool wait_slow(const Cta& cta, uint32_t region, uint64_t index, uint64_t wanted,
                          uint64_t timeout_ns, const Load& load) {
  const uint64_t start = globaltimer_ns();
  for (uint32_t round = 1;; ++round) {
    const uint64_t seen = load();
    if (reached(seen, wanted)) return true;
    if (round % 64 != 0) continue;
    if (aborted(cta)) return false;
    if (globaltimer_ns() - start > timeout_ns) {
      record_failure(cta, FailureKind::kTimeout, region, index, wanted, seen);
      return false;
    }
  }
}

struct LoadGpu32 {
  const uint32_t* word;
  JMM_DEVICE uint64_t operator()() const { return ld_acquire_gpu(word); }
};
struct LoadSys64 {
  const uint64_t* word;
  JMM_DEVICE uint64_t operator()() const { return ld_acquire_sys(word); }
};

// Waits until element `index` of this rank's region R reaches `wanted`; acquires what its writer
// released.
// Caller: one thread.
template <Region R, class Load>
JMM_DEVICE bool wait_at_least(const Cta& cta, uint64_t index, uint64_t wanted,
                              uint64_t timeout_ns) {
  const Load load = {region<R>(cta.local()) + index};
  if (reached(load(), wanted)) return true;
  return wait_slow(cta, static_cast<uint32_t>(R), index, wanted, timeout_ns, load);
}
// Caller: one thread.
template <Region R, class Load>
JMM_DEVICE bool wait_at_least(const Cta& cta, uint64_t index, uint64_t wanted) {
  return wait_at_least<R, Load>(cta, index, wanted, cta.args.timeout_ns);
}

// Waits for a phase of an mbarrier. After an abort it returns at once, so
// that loops run to their end on whatever the stages hold. A quarter more time than for counters in
// memory: those are nearer to the cause. The weight loader reports what timed out here.
// Caller: any number of threads.
JMM_DEVICE void mbarrier_wait(const Cta& cta, uint32_t bar, uint32_t parity) {
  mbarrier_wait_parity_bounded(bar, parity, shared_address(&cta.control->failed),
                               cta.args.timeout_ns + cta.args.timeout_ns / 4);
}
// Between roles of one CTA, where the partner is known to answer also after an abort: the weight
// loader always ends with an item that says so, and the others always take it. False would be a bug
// of these files; the role leaves. (A trap here would take half of the math registers: with it, the
// compiler no longer uses what setmaxnreg adds.)
// Caller: any number of threads.
JMM_DEVICE bool mbarrier_wait_for_role(const Cta& cta, uint32_t bar, uint32_t parity) {
  mbarrier_wait_parity_bounded(bar, parity, shared_address(&cta.control->role_failed),
                               2 * cta.args.timeout_ns + 1000000000);
  return mbarrier_try_wait_parity(bar, parity);
}

}  // namespace jax_megamoe::gpu
