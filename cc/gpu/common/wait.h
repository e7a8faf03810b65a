// wait.h: signals, bounded waits, failure records, and the timeline.
#pragma once

#include "gpu/sm90/plan.h"
#include "gpu/common/ptx.h"

namespace jax_megamoe::gpu {

// What every role needs to know.
struct Cta {
  const KernelArgs& args;
  SharedControl* control;
  uint32_t shared_base;  // of the stages
  Role role;

  JMM_DEVICE uint64_t epoch() const { return control->epoch; }  // calls before this one
  JMM_DEVICE uint32_t ticket() const { return control->ticket; }
  JMM_DEVICE bool leads() const { return blockIdx.x == 0; }
  JMM_DEVICE void* local() const { return args.base[args.rank]; }
};

// ---- failures ----

// Claims the rank's record; only the first failure is told. Aborting failures make every role
// leave.
JMM_DEVICE void record_failure(const Cta& cta, FailureKind kind, uint32_t region, uint64_t index,
                               uint64_t wanted, uint64_t seen, uint32_t count = 0) {
  const bool aborts = kind == FailureKind::kTimeout;
  const uint32_t before =
      atom_or_acq_rel_gpu(cta.args.abort_flag, kFailed | (aborts ? kAborted : 0));
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
  return (ld_relaxed_gpu(cta.args.abort_flag) & kAborted) != 0;
}

// ---- waits ----

// Everything here is inlined: a function call while products are in flight would make the compiler
// wait for them first, and call frames do not go with setmaxnreg.

// Waits until load() has reached `wanted`. One thread. False: the call is aborted.
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
// released. One thread.
template <Region R, class Load>
JMM_DEVICE bool wait_at_least(const Cta& cta, uint64_t index, uint64_t wanted,
                              uint64_t timeout_ns) {
  const Load load = {region<R>(cta.local()) + index};
  if (reached(load(), wanted)) return true;
  return wait_slow(cta, static_cast<uint32_t>(R), index, wanted, timeout_ns, load);
}
template <Region R, class Load>
JMM_DEVICE bool wait_at_least(const Cta& cta, uint64_t index, uint64_t wanted) {
  return wait_at_least<R, Load>(cta, index, wanted, cta.args.timeout_ns);
}

// Waits for a phase of an mbarrier. Any number of threads. After an abort it returns at once, so
// that loops run to their end on whatever the stages hold. A quarter more time than for counters in
// memory: those are nearer to the cause. The weight loader reports what timed out here.
JMM_DEVICE void mbarrier_wait(const Cta& cta, uint32_t bar, uint32_t parity) {
  mbarrier_wait_parity_bounded(bar, parity, shared_address(&cta.control->failed),
                               cta.args.timeout_ns + cta.args.timeout_ns / 4);
}
// Between roles of one CTA, where the partner is known to answer also after an abort: the weight
// loader always ends with an item that says so, and the others always take it. False would be a bug
// of these files; the role leaves. (A trap here would take half of the math registers: with it, the
// compiler no longer uses what setmaxnreg adds.)
JMM_DEVICE bool mbarrier_wait_for_role(const Cta& cta, uint32_t bar, uint32_t parity) {
  mbarrier_wait_parity_bounded(bar, parity, shared_address(&cta.control->role_failed),
                               2 * cta.args.timeout_ns + 1000000000);
  return mbarrier_try_wait_parity(bar, parity);
}
JMM_DEVICE bool gave_up(const Cta& cta) {
  return *static_cast<volatile uint32_t*>(&cta.control->failed) != 0;
}
JMM_DEVICE void give_up(const Cta& cta) {
  *static_cast<volatile uint32_t*>(&cta.control->failed) = 1;
}

// ---- signals ----

// True if the deliberate fault is armed for this signal; it is served once.
template <Region R>
JMM_DEVICE bool drop_signal(const Cta& cta) {
  if (cta.args.fault_region != static_cast<uint32_t>(R)) return false;
  return atom_add_relaxed_gpu(cta.args.abort_flag + kServedFaults, 1) == 0;
}
template <Region R>
JMM_DEVICE void add_release(const Cta& cta, uint64_t index, uint32_t value) {
  if (!drop_signal<R>(cta)) red_add_release_gpu(region<R>(cta.local()) + index, value);
}
template <Region R>
JMM_DEVICE void add_release_sys(const Cta& cta, uint64_t index, uint64_t value) {
  if (!drop_signal<R>(cta)) red_add_release_sys(region<R>(cta.local()) + index, value);
}
template <Region R>
JMM_DEVICE void store_release(const Cta& cta, uint32_t peer, uint64_t index, uint64_t value) {
  if (!drop_signal<R>(cta)) st_release_sys(region<R>(cta.args.base[peer]) + index, value);
}

// ---- who takes part ----

// A kernel of another stream, NCCL's for instance, may hold SMs until a call on another GPU has
// ended, which waits for this one. So a call must not need all its CTAs. CTA 0, with which GPUs
// begin, leads; each other one takes a ticket when it begins. When the leader has counted slots it
// closes the check-in. Usually everyone is there; if not, it gives them a little time and then goes
// on without them, and who comes later leaves at once. Work that is dealt out before that is done
// by others for the absent; all later work is dealt out to participants, or taken by whoever is
// free.
inline constexpr uint64_t kCheckInGraceNs = 20000;

JMM_DEVICE uint32_t others() { return gridDim.x - 1; }
JMM_DEVICE uint32_t load_check_in(const Cta& cta) {
  return ld_relaxed_gpu(cta.args.abort_flag + kCheckIn);
}
JMM_DEVICE uint64_t* participants_word(const Cta& cta) {
  return reinterpret_cast<uint64_t*>(cta.args.abort_flag + kParticipants);
}
// One thread of the leader. `here`: how many had checked in when it last looked.
JMM_DEVICE void close_check_in(const Cta& cta, uint32_t here) {
  uint32_t* check_in = cta.args.abort_flag + kCheckIn;
  if (here < others()) here = load_check_in(cta);
  if (here < others()) {
    const uint64_t start = globaltimer_ns();
    do {
      here = load_check_in(cta);
    } while (here < others() && globaltimer_ns() - start < kCheckInGraceNs);
    if (here < others()) here = atom_or_acq_rel_gpu(check_in, kCheckInClosed);
  }
  if (here == others()) *static_cast<volatile uint32_t*>(check_in) = 0;  // for the next call
  *static_cast<volatile uint64_t*>(participants_word(cta)) =
      published_count(cta.epoch() + 1, 1 + here);
  cta.control->participants = 1 + here;
}
// The last one to come readies the check-in for the next call.
JMM_DEVICE void leave_late(const Cta& cta) {
  if (threadIdx.x != 0 || (cta.ticket() & ~kCheckInClosed) != others()) return;
  *static_cast<volatile uint32_t*>(cta.args.abort_flag + kCheckIn) = 0;
}
// A word that says how many take part, if the leader has decided in this call.
JMM_DEVICE uint64_t load_participants(const Cta& cta) {
  return ld_relaxed_gpu(participants_word(cta));
}
JMM_DEVICE bool decided(const Cta& cta, uint64_t participants) {
  return reached(participants, published_count(cta.epoch() + 1, 0));
}
// Waits for the decision if `participants`, loaded before, is not yet it. One thread. What does not
// come is reported as this rank's first count, which the leader publishes with it.
JMM_DEVICE bool receive_participants(const Cta& cta, uint64_t participants) {
  if (!decided(cta, participants)) {
    const auto load = [&] { return load_participants(cta); };
    if (!wait_slow(cta, static_cast<uint32_t>(Region::expert_recv_count),
                   uint64_t{cta.args.rank} * kLocalExperts, published_count(cta.epoch() + 1, 0),
                   cta.args.timeout_ns, load)) {
      return false;
    }
    participants = load();
  }
  cta.control->participants = count_rows(participants);
  return true;
}
// In the leader known with the decision, elsewhere after the last item.
JMM_DEVICE uint32_t participants(const Cta& cta) { return cta.control->participants; }
JMM_DEVICE uint32_t absent_ctas(const Cta& cta) { return gridDim.x - participants(cta); }

// ---- barriers of a call ----

// All CTAs of this rank arrive at each, the leader also for the absent. For kSlotsCounted everyone
// waits; at the others the leader alone waits, and then tells all ranks. A rank waits for its own
// word too: it stands for "all CTAs of this rank".
enum CallBarrier : uint32_t { kSlotsCounted = 1, kRowsListed = 2, kResultsPushed = 3 };
inline constexpr uint32_t kCallBarriers = 3;

JMM_DEVICE void arrive_call_barrier(const Cta& cta, uint32_t barriers = 1) {
  add_release_sys<Region::grid_barrier>(cta, 0,
                                        barriers * (1 + (cta.leads() ? absent_ctas(cta) : 0)));
}
// Everything that hangs keeps the results from being complete, and who has no work waits for them
// from the start. These waits give up later, so that the report is about one nearer to the cause.
JMM_DEVICE uint64_t timeout_of(const Cta& cta, CallBarrier nth) {
  return cta.args.timeout_ns + (nth == kResultsPushed ? cta.args.timeout_ns / 8 : 0);
}
// One thread.
JMM_DEVICE bool wait_grid(const Cta& cta, CallBarrier nth) {
  return wait_at_least<Region::grid_barrier, LoadSys64>(
      cta, 0, (cta.epoch() * kCallBarriers + nth) * gridDim.x, timeout_of(cta, nth));
}
// One whole warp of the leader.
JMM_DEVICE void publish_call_barrier(const Cta& cta, CallBarrier nth) {
  if constexpr (kRanks > 1) {
    const uint32_t lane = threadIdx.x % 32;
    bool arrived = true;
    if (lane == 0) arrived = wait_grid(cta, nth);
    if (!__shfl_sync(~0u, arrived, 0)) return;
    __syncwarp();  // what lane 0 has seen comes before any lane's signal
    fence_acq_rel_sys();
    for (uint32_t peer = lane; peer < kRanks; peer += 32) {
      store_release<Region::rank_barrier>(cta, peer, cta.args.rank,
                                          cta.epoch() * kCallBarriers + nth);
    }
    __syncwarp();
  }
}
// One whole warp.
JMM_DEVICE bool wait_call_barrier(const Cta& cta, CallBarrier nth) {
  const uint32_t lane = threadIdx.x % 32;
  bool arrived = true;
  if constexpr (kRanks == 1) {  // nobody to be told: one hop less
    if (lane == 0) arrived = wait_grid(cta, nth);
  } else {
    for (uint32_t peer = lane; peer < kRanks; peer += 32) {
      arrived &= wait_at_least<Region::rank_barrier, LoadSys64>(
          cta, peer, cta.epoch() * kCallBarriers + nth, timeout_of(cta, nth));
    }
  }
  return __all_sync(~0u, arrived);
}

// ---- timeline ----

// Records one interval of one role; one thread of it. Compiled only with JMM_TRACE.
class Trace {
 public:
  JMM_DEVICE Trace(const Cta& cta, uint32_t lane, TraceName name, bool records,
                   uint32_t block = 0) {
#if JMM_TRACE
    if (!records) return;
    uint32_t* counts = static_cast<uint32_t*>(cta.args.trace);
    TraceEvent* events = reinterpret_cast<TraceEvent*>(counts + uint64_t{gridDim.x} * kTraceLanes);
    const uint32_t row = blockIdx.x * kTraceLanes + lane;
    const uint32_t index = counts[row];
    if (index >= kTraceEvents) return;
    counts[row] = index + 1;
    event_ = events + uint64_t{row} * kTraceEvents + index;
    event_->name = static_cast<uint32_t>(name);
    event_->block = block;
    event_->begin = globaltimer_ns();
#endif
  }
  JMM_DEVICE ~Trace() {
#if JMM_TRACE
    if (event_ != nullptr) event_->end = globaltimer_ns();
#endif
  }

 private:
#if JMM_TRACE
  TraceEvent* event_ = nullptr;
#endif
};
// Lanes of the timeline: math warpgroups first.
inline constexpr uint32_t kTraceWeights = 4, kTraceActs = 5, kTracePull = 6;

}  // namespace jax_megamoe::gpu
