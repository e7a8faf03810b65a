// handlers.h: the XLA FFI handlers. ffi/ is the only place that knows XLA's types.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_megamoe::ffi_api {

// Made once per call instruction of a compiled program; its id tells call sites apart at execution.
struct CallSite {
  static ::xla::ffi::TypeId id;
  uint64_t number = 0;
};

}  // namespace jax_megamoe::ffi_api

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuExecute);
