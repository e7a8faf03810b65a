// check_in.h: which CTAs take part in a call.
#pragma once

#include "gpu/common/wait.h"

namespace jax_megamoe::gpu {

// A kernel of another stream, NCCL's for instance, may hold SMs until a call on another GPU has
// ended, which waits for this one. So a call must not need all its CTAs. CTA 0, with which GPUs
// begin, leads; each other one takes a ticket when it begins. When the leader has counted slots it
// closes the check-in. Usually everyone is there; if not, it gives them a little time and then goes
// on without them, and a CTA that comes later leaves at once. Work that is dealt out before that is
// done by others for the absent; all later work is dealt out to participants, or taken by whoever
// is free.

JMM_DEVICE uint32_t others() { return gridDim.x - 1; }
JMM_DEVICE uint32_t load_check_in(const Cta& cta) {
  return ld_relaxed_gpu(cta.args.rank_control + kCheckIn);
}
JMM_DEVICE uint64_t* participants_word(const Cta& cta) {
  return reinterpret_cast<uint64_t*>(cta.args.rank_control + kParticipants);
}
// Closes the check-in. `here` is how many CTAs had checked in when the leader last looked.
// Caller: one thread of the leader.
JMM_DEVICE void close_check_in(const Cta& cta, uint32_t here) {
  uint32_t* check_in = cta.args.rank_control + kCheckIn;
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
// Caller: all threads of a CTA.
JMM_DEVICE void leave_late(const Cta& cta) {
  if (threadIdx.x != 0 || (cta.ticket() & ~kCheckInClosed) != others()) return;
  *static_cast<volatile uint32_t*>(cta.args.rank_control + kCheckIn) = 0;
}
// A word that says how many take part, if the leader has decided in this call.
JMM_DEVICE uint64_t load_participants(const Cta& cta) {
  return ld_relaxed_gpu(participants_word(cta));
}
JMM_DEVICE bool decided(const Cta& cta, uint64_t participants) {
  return reached(participants, published_count(cta.epoch() + 1, 0));
}
// Waits for the decision if `participants`, loaded before, is not yet it. What does not come
// is reported as this rank's first count, which the leader publishes with it.
// Caller: one thread.
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

}  // namespace jax_megamoe::gpu
