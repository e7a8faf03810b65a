#include "cuda/kernel.h"

#include <stdexcept>

#include "cuda/compiler.h"

namespace jax_megamoe::cuda {

std::vector<std::string> KernelConfig::options() const {
  const auto define = [](const char* name, uint64_t value) {
    return std::string("-D") + name + "=" + std::to_string(value);
  };
  std::vector<std::string> options = {
      "--gpu-architecture=sm_90a",
      "-std=c++20",
      "--ptxas-options=-v",  // registers and spills in the log, which `compile` reads
      define("JMM_NUM_RANKS", layout.num_ranks),
      define("JMM_NUM_EXPERTS", layout.num_experts),
      define("JMM_TOP_K", layout.top_k),
      define("JMM_HIDDEN", layout.hidden),
      define("JMM_INTERMEDIATE", layout.intermediate),
      define("JMM_MAX_TOKENS", layout.max_tokens),
      define("JMM_RING_BLOCKS", layout.ring_blocks),
      define("JMM_GRANULARITY", static_cast<uint32_t>(granularity)),
      define("JMM_TILE", variant.tile),
      define("JMM_ACTIVATION", static_cast<uint32_t>(variant.activation)),
      define("JMM_BIAS", variant.bias ? 1 : 0),
      define("JMM_TRACE", build == Build::kTrace ? 1 : 0),
      define("JMM_RACECHECK", build == Build::kRacecheck ? 1 : 0)};
  if (build == Build::kRacecheck) options.push_back("--generate-line-info");
  return options;
}

gpu::Granularity to_granularity(uint32_t value) {
  switch (value) {
    case 0:
      return gpu::Granularity::kRow;
    case 32:
      return gpu::Granularity::k32;
    case 128:
      return gpu::Granularity::k128;
    default:
      throw std::invalid_argument("jax_megamoe: activation granularity: got " +
                                  std::to_string(value) + "; expected 0 (row), 32 or 128.");
  }
}

Build to_build(uint32_t value) {
  if (value <= static_cast<uint32_t>(Build::kRacecheck)) return static_cast<Build>(value);
  throw std::invalid_argument("jax_megamoe: build: got " + std::to_string(value) +
                              "; expected 0 (plain), 1 (trace) or 2 (racecheck).");
}

Activation to_activation(uint32_t value) {
  if (value < kNumActivations) return static_cast<Activation>(value);
  std::string names;
  for (uint32_t i = 0; i < kNumActivations; ++i) {
    names += (i == 0 ? "" : ", ") + std::to_string(i) + " (" + kActivationNames[i] + ")";
  }
  throw std::invalid_argument("jax_megamoe: activation: got " + std::to_string(value) +
                              "; expected one of " + names + ".");
}

std::string KernelVariant::text() const {
  return "tile " + std::to_string(tile) + ", activation " +
         kActivationNames[static_cast<uint32_t>(activation)] + (bias ? ", biases" : ", no biases");
}

LoadedKernel::LoadedKernel(const Device& device, const std::string& cubin,
                           const KernelConfig& config)
    : device_(device),
      num_threads_(gpu::tile_config(config.granularity, config.variant.tile).num_threads()) {
  const Driver& api = driver();
  const ScopedContext scope(device_);
  check(api.module_load_data(&module_, cubin.data()), "cuModuleLoadData");
  try {
    check(api.module_get_function(&function_, module_, "jmm_mega_moe"), "cuModuleGetFunction");
    CUdeviceptr shared = 0;
    size_t size = 0;
    check(api.module_get_global(&shared, &size, module_, "jmm_smem_bytes"), "cuModuleGetGlobal");
    check(api.memcpy_d_to_h(&shared_bytes_, shared, sizeof(shared_bytes_)), "cuMemcpyDtoH");
    if (shared_bytes_ > static_cast<uint32_t>(device_.max_shared_bytes)) {
      throw CudaError(-1, "jax_megamoe: shared memory: got a kernel of " +
                              std::to_string(shared_bytes_) + " bytes a block; expected at most " +
                              std::to_string(device_.max_shared_bytes) + " on " + device_.name +
                              ". Use jax_megamoe.unfused for this shape.");
    }
    check(api.func_set_attribute(function_, kFuncAttributeMaxDynamicSharedSizeBytes,
                                 static_cast<int>(shared_bytes_)),
          "cuFuncSetAttribute");
    // The driver may put off loading the code until the first launch; asking for its occupancy
    // does not let it. All blocks have to run at once, so one that does not fit is an error here.
    int blocks = 0;
    check(api.max_active_blocks(&blocks, function_, static_cast<int>(num_threads_), shared_bytes_),
          "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    if (blocks < 1) {
      throw CudaError(-1,
                      "jax_megamoe: occupancy: got no room for a block of the kernel on an SM "
                      "of " +
                          device_.name + "; expected one. Use jax_megamoe.unfused instead.");
    }
  } catch (...) {
    api.module_unload(module_);
    throw;
  }
}

LoadedKernel::~LoadedKernel() {
  if (module_ == nullptr) return;
  release_on(device_, [&] { driver().module_unload(module_); });
}

void LoadedKernel::launch(CUstream stream, uint32_t num_ctas, gpu::KernelArgs& args) const {
  void* parameters[] = {&args};
  check(driver().launch_kernel(function_, num_ctas, 1, 1, num_threads_, 1, 1, shared_bytes_, stream,
                               parameters, nullptr),
        "cuLaunchKernel");
}

KernelTable::KernelTable(const MoeShape& layout, gpu::Granularity granularity, Build build,
                         std::vector<Device> devices, Toolchain toolchain)
    : layout_(layout),
      granularity_(granularity),
      build_(build),
      devices_(std::move(devices)),
      toolchain_(std::move(toolchain)) {
  for (const Device& device : devices_) {
    if (device.compute_capability == 90) continue;
    throw CudaError(-1, "jax_megamoe: GPU " + std::to_string(device.ordinal) + ": got " +
                            device.name + " (sm_" + std::to_string(device.compute_capability) +
                            "); expected compute capability 9.0 (H100, H200, GH200). Use "
                            "jax_megamoe.unfused, which runs on any device.");
  }
}

void KernelTable::prepare(const KernelVariant& variant) {
  if (variant.tile >= gpu::num_tiles(granularity_)) {
    throw std::invalid_argument("jax_megamoe: tile: got " + std::to_string(variant.tile) +
                                "; expected 0.." +
                                std::to_string(gpu::num_tiles(granularity_) - 1) + ".");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (kernels_.count({variant, devices_[0].ordinal}) != 0) return;
  const KernelConfig config{layout_, granularity_, variant, build_};
  const std::string cubin = toolchain_.compile ? toolchain_.compile(config)
                                               : compile(kKernelSource, toolchain_.include_dir,
                                                         config.options(), toolchain_.nvrtc_path)
                                                     .cubin;
  std::vector<std::unique_ptr<LoadedKernel>> loaded;
  for (const Device& device : devices_) {
    loaded.push_back(std::make_unique<LoadedKernel>(device, cubin, config));
  }
  for (size_t i = 0; i < devices_.size(); ++i) {
    kernels_[{variant, devices_[i].ordinal}] = std::move(loaded[i]);
  }
}

const LoadedKernel* KernelTable::find(const KernelVariant& variant, int device_ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = kernels_.find({variant, device_ordinal});
  return it == kernels_.end() ? nullptr : it->second.get();
}

void KernelTable::leak() {
  for (auto& [key, kernel] : kernels_) kernel->leak();
}

}  // namespace jax_megamoe::cuda
