// cta.h: what every role of a CTA needs to know.
#pragma once

#include "gpu/common/ptx.h"
#include "gpu/interface/kernel_args.h"

namespace jax_megamoe::gpu {

// What every role needs to know.
struct Cta {
  const KernelArgs& args;
  SharedControl* control;
  uint32_t stages_address;  // of the stages
  Role role;

  JMM_DEVICE uint64_t epoch() const { return control->epoch; }  // calls before this one
  JMM_DEVICE uint32_t ticket() const { return control->ticket; }
  JMM_DEVICE bool leads() const { return blockIdx.x == 0; }
  JMM_DEVICE void* local() const { return args.peer_buffer[args.rank]; }
};

}  // namespace jax_megamoe::gpu
