// harness_kernels.h: small kernels that set the scene for a measured or tested call.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace jax_megamoe::harness {

using namespace cuda;  // the harness is written in the terms of what it drives

// A kernel of a few lines, compiled at run time and loaded on one device.
class SmallKernel {
 public:
  // Throws CudaError or std::runtime_error.
  SmallKernel(const Device& device, const char* source, const char* name,
              const std::string& nvrtc_path, uint32_t shared_bytes = 0);
  ~SmallKernel();
  SmallKernel(const SmallKernel&) = delete;
  SmallKernel& operator=(const SmallKernel&) = delete;

  void launch(CUstream stream, uint32_t blocks, uint32_t threads, void** parameters) const;
  const Device& device() const { return device_; }
  void leak() { module_ = nullptr; }

 private:
  Device device_;
  uint32_t shared_bytes_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

// Replaces the contents of a device's L2.
class L2Flush {
 public:
  L2Flush(const Device& device, const std::string& nvrtc_path);
  void launch(CUstream stream) const;
  int ordinal() const { return kernel_.device().ordinal; }
  void leak();

 private:
  SmallKernel kernel_;
  DeviceMemory data_, sink_;
};

// Keeps SMs of a device busy, as a collective that waits for another GPU does: no block of a layer
// fits beside.
class SmHolder {
 public:
  SmHolder(const Device& device, const std::string& nvrtc_path);
  ~SmHolder();

  // Returns once `sms` SMs are held: until release(), or for `limit_s`. Throws CudaError.
  void hold(uint32_t sms, double limit_s);
  // False: the limit had come before.
  bool release();
  int ordinal() const { return kernel_.device().ordinal; }
  void leak();

 private:
  SmallKernel kernel_;
  CUstream stream_ = nullptr, control_ = nullptr;
  DeviceMemory ended_;   // uint32: number of the last hold that may end
  MappedMemory page_;    // uint32: what ended_ is copied from, then a word per block
  uint32_t number_ = 0;  // of the last hold
  uint32_t sms_ = 0;     // of it
};

}  // namespace jax_megamoe::harness
