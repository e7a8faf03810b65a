// trace.h: the timeline. Nothing of it is compiled without JMM_TRACE.
#pragma once

#include "gpu/common/cta.h"

namespace jax_megamoe::gpu {

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
inline constexpr uint32_t kWeightLane = first_trace_lane(Role::kWeightLoader);
inline constexpr uint32_t kActivationLane = first_trace_lane(Role::kActivationLoader);
inline constexpr uint32_t kPullLane = first_trace_lane(Role::kDispatch);

}  // namespace jax_megamoe::gpu
