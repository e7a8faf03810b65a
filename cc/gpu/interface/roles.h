// roles.h: the roles of a CTA, and the intervals of their timeline. Host and device.
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe::gpu {

// Every role, in one table: the enumerator, its name in reports, its first warp among the
// producers, and its first lane of the timeline. The roles without a warp of their own are those of
// all threads (the prologue) and of the math warpgroups, whose lanes come first.
#define JMM_GPU_ROLES(X)                             \
  X(kPrologue, "prologue", kNoWarp, 0)               \
  X(kWeightLoader, "weight loader", 0, 4)            \
  X(kActivationLoader, "activation loader", 1, 5)    \
  X(kDispatch, "dispatch", 2, 6) /* warps 2 and 3 */ \
  X(kMath, "math", kNoWarp, 0)                       \
  X(kCombine, "combine", kNoWarp, 0)

inline constexpr uint32_t kNoWarp = ~0u;

#define JMM_GPU_ROLE(name, text, warp, lane) name,
enum class Role : uint32_t { JMM_GPU_ROLES(JMM_GPU_ROLE) };
#undef JMM_GPU_ROLE
#define JMM_GPU_ROLE(name, text, warp, lane) text,
inline constexpr const char* kRoleNames[] = {JMM_GPU_ROLES(JMM_GPU_ROLE)};
#undef JMM_GPU_ROLE

JMM_HD constexpr uint32_t first_warp(Role role) {
  switch (role) {
#define JMM_GPU_ROLE(name, text, warp, lane) \
  case Role::name:                           \
    return warp;
    JMM_GPU_ROLES(JMM_GPU_ROLE)
#undef JMM_GPU_ROLE
  }
  return kNoWarp;
}
JMM_HD constexpr uint32_t first_trace_lane(Role role) {
  switch (role) {
#define JMM_GPU_ROLE(name, text, warp, lane) \
  case Role::name:                           \
    return lane;
    JMM_GPU_ROLES(JMM_GPU_ROLE)
#undef JMM_GPU_ROLE
  }
  return 0;
}

// One interval of one role, in nanoseconds of %globaltimer. Only with JMM_TRACE.
enum class TraceName : uint32_t {
  kStageInput = 0,
  kListRoutes,
  kWaitCounts,
  kWaitRanks,
  kPull,
  kWaitRing,
  kLinear1,
  kSwiglu,
  kLinear2,
  kPush,
  kWaitRows,
  kWaitResults,
  kCombine
};
inline constexpr const char* kTraceNames[] = {
    "stage input", "list routes",   "wait: counts", "wait: ranks", "pull",
    "wait: ring",  "linear 1",      "swiglu",       "linear 2",    "push",
    "wait: rows",  "wait: results", "combine"};
struct TraceEvent {
  uint64_t begin;
  uint64_t end;
  uint32_t name;   // TraceName
  uint32_t block;  // pool block, or 0
};
inline constexpr uint32_t kTraceLanes = 8;     // of a CTA; JMM_GPU_ROLES says which are whose
inline constexpr uint32_t kTraceEvents = 512;  // per lane; later ones are dropped
// trace is [num_ctas][kTraceLanes] counters (uint32), then [num_ctas][kTraceLanes][kTraceEvents].

}  // namespace jax_megamoe::gpu
