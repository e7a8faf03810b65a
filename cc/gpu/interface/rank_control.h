// rank_control.h: what the CTAs of a rank tell each other outside of the workspace. Host and
// device.
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe::gpu {

enum RankFlag : uint32_t {
  kFailed = 1,   // A failure record was written: y becomes NaN, the protocol goes on.
  kAborted = 2,  // A wait timed out: every role leaves. The host sets this flag, too.
};

// The words of a rank's control block. All of them are zero when a call begins.
//
// Indices rather than members: with pointers to members the compiler schedules the prologue of some
// kernels otherwise than in the code that was measured, and NVRTC 13.0 has no `offsetof`.
enum RankControlWord : uint32_t {
  kFlags,         // RankFlag; the first word, which the host overwrites to abort a call
  kServedFaults,  // how often the deliberate fault was asked for
  // What CTAs have found out about expert ids: how many slots are out of range, and the complement
  // of the first of these slots, so that zero means none.
  kOutOfRangeCount,
  kOutOfRangeFirst,
  kCheckIn,  // how many CTAs have taken a ticket, and kCheckInClosed
  // How many CTAs checked in in time, in the form of a published count: two words, one uint64_t.
  kParticipants = 6,
  kRankControlWords = 16,
};

struct alignas(uint64_t) RankControl {
  uint32_t words[kRankControlWords];
};

// The bit of word kCheckIn that says that the leader no longer waits for anyone.
inline constexpr uint32_t kCheckInClosed = 1u << 31;

}  // namespace jax_megamoe::gpu
