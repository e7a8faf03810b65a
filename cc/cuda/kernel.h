// kernel.h: one compiled kernel on one device, and the sizes it was compiled for.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "gpu/interface/kernel_args.h"
#include "gpu/sm90/tuning.h"
#include "protocol/activation.h"

namespace jax_megamoe::cuda {

// Which of a buffer's kernels: what its calls may differ in.
struct KernelVariant {
  uint32_t tile = 0;  // of gpu::tile_config()
  Activation activation = Activation::kSwiglu;
  bool bias = false;  // of both linears

  auto operator<=>(const KernelVariant&) const = default;
  std::string text() const;  // "tile 3, activation situ, no biases"
};

// What else a kernel is compiled for: to run, to record a timeline, or to be looked at by
// compute-sanitizer's racecheck, see cc/gpu/common/ptx.h.
enum class Build : uint32_t { kPlain = 0, kTrace, kRacecheck };

// What a kernel is specialised on. `layout` is gpu::layout_shape() of the layer's shape.
struct KernelConfig {
  MoeShape layout;
  gpu::Granularity granularity;
  KernelVariant variant;
  Build build = Build::kPlain;

  std::vector<std::string> options() const;  // of the compiler
};

// Where the device headers and the compiler are. Known to Python.
struct Toolchain {
  std::string include_dir;  // holds gpu/ and protocol/
  std::string nvrtc_path;   // see compiler.h
  // Tests without NVRTC: what makes a cubin instead.
  std::function<std::string(const KernelConfig&)> compile = nullptr;
};

// Granularity from 0 ("row"), 32 or 128; throws std::invalid_argument otherwise.
gpu::Granularity to_granularity(uint32_t value);
// Build from its number; throws std::invalid_argument otherwise.
Build to_build(uint32_t value);
// Activation from its number; throws std::invalid_argument otherwise.
Activation to_activation(uint32_t value);

// A kernel loaded on one device. Loading may wait for everything the device is doing, so it must
// not happen while a kernel there waits for a peer that is still to be launched.
class LoadedKernel {
 public:
  LoadedKernel(const Device& device, const std::string& cubin, const KernelConfig& config);
  ~LoadedKernel();
  LoadedKernel(const LoadedKernel&) = delete;
  LoadedKernel& operator=(const LoadedKernel&) = delete;

  // In the device's context, which is current.
  void launch(CUstream stream, uint32_t num_ctas, gpu::KernelArgs& args) const;
  void leak() { module_ = nullptr; }

 private:
  Device device_;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  uint32_t num_threads_ = 0;
  uint32_t shared_bytes_ = 0;
};

// The kernels of one buffer, by variant, each on all of the buffer's devices. Thread-safe.
class KernelTable {
 public:
  KernelTable(const MoeShape& layout, gpu::Granularity granularity, Build build,
              std::vector<Device> devices, Toolchain toolchain);

  // Compiles and loads a kernel unless it is there. Throws CudaError, std::invalid_argument or
  // std::runtime_error.
  void prepare(const KernelVariant& variant);
  // Null if it has not been prepared.
  const LoadedKernel* find(const KernelVariant& variant, int device_ordinal);
  void leak();

 private:
  const MoeShape layout_;
  const gpu::Granularity granularity_;
  const Build build_;
  const std::vector<Device> devices_;  // each once
  const Toolchain toolchain_;
  std::mutex mutex_;
  std::map<std::pair<KernelVariant, int>, std::unique_ptr<LoadedKernel>> kernels_;
};

}  // namespace jax_megamoe::cuda
