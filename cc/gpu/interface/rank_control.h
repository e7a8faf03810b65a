// rank_control.h: what the CTAs of a rank tell each other outside of the workspace. Host and
// device.
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe::gpu {

enum RankFlag : uint32_t {
  kFailed = 1,   // A failure record was written: y becomes NaN, the protocol goes on.
  kAborted = 2,  // A wait timed out: every role leaves. The host sets this flag, too.
};

// One per rank. All of it is zero when a call begins.
struct RankControl {
  uint32_t flags;          // RankFlag; the first word, which the host overwrites to abort a call
  uint32_t served_faults;  // how often the deliberate fault was asked for
  // What CTAs have found out about expert ids: how many slots are out of range, and the complement
  // of the first of these slots, so that zero means none.
  uint32_t num_out_of_range;
  uint32_t first_out_of_range_complement;
  uint32_t check_in;  // how many CTAs have taken a ticket, and kCheckInClosed
  uint32_t reserved_0;
  uint64_t participants;  // how many CTAs checked in in time, in the form of a published count
  uint32_t reserved_1[8];
};
static_assert(sizeof(RankControl) == 64);

// The same as indices of words, for the kernel: it addresses words, because with pointers to
// members the compiler schedules the prologue of some kernels otherwise than in the code that was
// measured.
#define JMM_WORD_OF(member) (__builtin_offsetof(RankControl, member) / sizeof(uint32_t))
enum RankControlWord : uint32_t {
  kFlags = JMM_WORD_OF(flags),
  kServedFaults = JMM_WORD_OF(served_faults),
  kOutOfRangeCount = JMM_WORD_OF(num_out_of_range),
  kOutOfRangeFirst = JMM_WORD_OF(first_out_of_range_complement),
  kCheckIn = JMM_WORD_OF(check_in),
  kParticipants = JMM_WORD_OF(participants),
};
#undef JMM_WORD_OF

// The bit of RankControl::check_in that says that the leader no longer waits for anyone.
inline constexpr uint32_t kCheckInClosed = 1u << 31;

}  // namespace jax_megamoe::gpu
