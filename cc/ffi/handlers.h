// handlers.h: the XLA FFI handlers. ffi/ is the only place that knows XLA's types.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "cuda/gpu_buffer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_megamoe::ffi_api {

// Made once per call instruction of a compiled program; its id tells call sites apart at execution.
struct CallSite {
  static constexpr std::string_view kName = "jax_megamoe.call_site.v1";
  static ::xla::ffi::TypeId id;
  uint64_t number = 0;
};

// The same for GPUs.
struct GpuCallSite {
  static constexpr std::string_view kName = "jax_megamoe.gpu_call_site.v1";
  static ::xla::ffi::TypeId id;
  std::unique_ptr<cuda::KernelWish> wish;

  // CUDA graphs of this call hold addresses of these buffers.
  std::mutex mutex;
  std::vector<std::shared_ptr<cuda::GpuBuffer>> captured;
  void keep(std::shared_ptr<cuda::GpuBuffer> buffer);
};

// XLA wants a handler's types before the handler. JAX hands over in the other order what was
// registered before its back end started, so the handler that makes a State registers the type
// itself, when XLA first asks it what it is.
template <typename State, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)>
XLA_FFI_Error* with_type(XLA_FFI_CallFrame* frame) {
  static constexpr auto info = ::xla::ffi::MakeTypeInfo<State>();
  static std::mutex mutex;
  {
    const std::lock_guard lock(mutex);
    if (State::id == XLA_FFI_UNKNOWN_TYPE_ID) {
      if (XLA_FFI_Error* error =
              ::xla::ffi::Ffi::RegisterTypeId(frame->api, State::kName, &State::id, &info);
          error != nullptr) {
        return error;
      }
    }
  }
  return handler(frame);
}

}  // namespace jax_megamoe::ffi_api

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeGpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeGpuExecute);
