// handlers.h: the XLA FFI handlers. ffi/ is the only place that knows XLA's types.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/gpu_buffer.h"
#include "xla/ffi/api/ffi.h"

namespace jax_megamoe::ffi_api {

// Made once per call instruction of a compiled program; its id tells call sites apart at execution.
struct CallSite {
  static ::xla::ffi::TypeId id;
  uint64_t number = 0;
};

// The same for GPUs.
struct GpuCallSite {
  static ::xla::ffi::TypeId id;
  std::unique_ptr<cuda::KernelWish> wish;

  // CUDA graphs of this call hold addresses of these buffers.
  std::mutex mutex;
  std::vector<std::shared_ptr<cuda::GpuBuffer>> captured;
  void keep(std::shared_ptr<cuda::GpuBuffer> buffer);
};

}  // namespace jax_megamoe::ffi_api

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeCpuExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeGpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxMegaMoeGpuExecute);
