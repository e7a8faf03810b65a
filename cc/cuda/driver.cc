#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <utility>

namespace jax_megamoe::cuda {
namespace {

constexpr const char* kUseWithoutGpu =
    " The CPU back end and jax_megamoe.unfused do not need a GPU.";

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw CudaError(-1, std::string("jax_megamoe: CUDA driver: got no libcuda.so.1 (") +
                            (reason == nullptr ? "unknown reason" : reason) +
                            "); expected the NVIDIA driver. Install it, or make it visible in the "
                            "container." +
                            kUseWithoutGpu);
  }
  Driver loaded{};
  const auto find = [&](const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr) {
      throw CudaError(-1, std::string("jax_megamoe: CUDA driver: got a libcuda.so.1 without ") +
                              symbol + "; expected a driver of CUDA 12 or newer. Update it." +
                              kUseWithoutGpu);
    }
    return address;
  };
#define JMM_FIND(member, symbol, parameters) \
  loaded.member = reinterpret_cast<decltype(loaded.member)>(find(symbol));
  JMM_CUDA_FUNCTIONS(JMM_FIND)
#undef JMM_FIND
  return loaded;
}

const Driver* replacement = nullptr;

std::string describe(const Driver& api, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  api.get_error_name(result, &name);
  api.get_error_string(result, &text);
  return std::string(name == nullptr ? "unknown CUDA error" : name) + " (" +
         (text == nullptr ? std::to_string(result) : text) + ")";
}

}  // namespace

void replace_driver(const Driver* api) { replacement = api; }

const Driver& driver() {
  if (replacement != nullptr) return *replacement;
  static const Driver instance = [] {
    Driver api = load_driver();
    const CUresult result = api.init(0);
    if (result != kSuccess) {
      throw CudaError(result, "jax_megamoe: CUDA driver: cuInit: got " + describe(api, result) +
                                  "; expected a usable GPU. Look at nvidia-smi and "
                                  "CUDA_VISIBLE_DEVICES." +
                                  kUseWithoutGpu);
    }
    return api;
  }();  // a throw leaves it uninitialised: the next call tries again
  return instance;
}

void check(CUresult result, const std::string& what) {
  if (result == kSuccess) return;
  throw CudaError(result, "jax_megamoe: " + what + ": " + describe(driver(), result));
}

Device open_device(int ordinal) {
  const Driver& api = driver();
  int count = 0;
  check(api.device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw CudaError(-1, "jax_megamoe: device: got ordinal " + std::to_string(ordinal) +
                            "; expected 0.." + std::to_string(count - 1) +
                            ", the GPUs of this process. Check CUDA_VISIBLE_DEVICES.");
  }
  Device device;
  device.ordinal = ordinal;
  check(api.device_get(&device.handle, ordinal), "cuDeviceGet");
  check(api.primary_ctx_retain(&device.context, device.handle), "cuDevicePrimaryCtxRetain");
  const auto attribute = [&](int which) {
    int value = 0;
    check(api.device_get_attribute(&value, which, device.handle), "cuDeviceGetAttribute");
    return value;
  };
  device.num_sms = attribute(kAttributeMultiprocessorCount);
  device.compute_capability = 10 * attribute(kAttributeComputeCapabilityMajor) +
                              attribute(kAttributeComputeCapabilityMinor);
  device.max_shared_bytes = attribute(kAttributeMaxSharedMemoryPerBlockOptin);
  char name[256] = "";
  check(api.device_get_name(name, sizeof(name), device.handle), "cuDeviceGetName");
  device.name = name;
  return device;
}

ScopedContext::ScopedContext(const Device& device) {
  check(driver().ctx_get_current(&previous_), "cuCtxGetCurrent");
  check(driver().ctx_set_current(device.context), "cuCtxSetCurrent");
}

ScopedContext::~ScopedContext() { driver().ctx_set_current(previous_); }

void enable_peer_access(const Device* const* devices, size_t num_devices) {
  const Driver& api = driver();
  for (size_t a = 0; a < num_devices; ++a) {
    const ScopedContext scope(*devices[a]);
    for (size_t b = 0; b < num_devices; ++b) {
      if (devices[a]->handle == devices[b]->handle) continue;
      const std::string pair = "GPU " + std::to_string(devices[a]->ordinal) + " (" +
                               devices[a]->name + ") to GPU " +
                               std::to_string(devices[b]->ordinal) + " (" + devices[b]->name + ")";
      int possible = 0;
      check(api.device_can_access_peer(&possible, devices[a]->handle, devices[b]->handle),
            "cuDeviceCanAccessPeer");
      if (!possible) {
        throw CudaError(-1,
                        "jax_megamoe: peer access: got no direct link from " + pair +
                            "; expected NVLink or PCIe peer access between all GPUs of an "
                            "expert-parallel group (`nvidia-smi topo -p2p rw` shows them). Build "
                            "the mesh from GPUs that are linked, or use jax_megamoe.unfused.");
      }
      const CUresult result = api.ctx_enable_peer_access(devices[b]->context, 0);
      if (result != kErrorPeerAccessAlreadyEnabled) {
        check(result, "cuCtxEnablePeerAccess from " + pair);
      }
    }
  }
}

DeviceMemory::DeviceMemory(const Device& device, size_t num_bytes, const char* what)
    : device_(device), num_bytes_(num_bytes) {
  const ScopedContext scope(device_);
  const CUresult result = driver().mem_alloc(&address_, num_bytes == 0 ? 1 : num_bytes);
  if (result == kErrorOutOfMemory) {
    size_t free_bytes = 0, total_bytes = 0;
    driver().mem_get_info(&free_bytes, &total_bytes);
    throw CudaError(
        result, std::string("jax_megamoe: ") + what + ": got " + std::to_string(free_bytes) +
                    " free bytes of " + std::to_string(total_bytes) + " on GPU " +
                    std::to_string(device_.ordinal) + "; expected " + std::to_string(num_bytes) +
                    ". JAX takes three quarters of a GPU's memory when it starts: "
                    "lower XLA_PYTHON_CLIENT_MEM_FRACTION, or lower "
                    "max_tokens_per_rank or ring_tokens.");
  }
  check(result, std::string("cuMemAlloc of ") + what);
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  release_on(device_, [&] { driver().mem_free(address_); });
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void DeviceMemory::fill(uint8_t byte, size_t offset, size_t num_bytes) const {
  if (num_bytes == 0) return;
  const ScopedContext scope(device_);
  check(driver().memset_d8(address_ + offset, byte, num_bytes), "cuMemsetD8");
  // A memset returns before it is done, and other streams do not wait for it.
  check(driver().ctx_synchronize(), "cuCtxSynchronize");
}

void DeviceMemory::upload(const void* source, size_t num_bytes) const {
  if (num_bytes == 0) return;
  const ScopedContext scope(device_);
  check(driver().memcpy_h_to_d(address_, source, num_bytes), "cuMemcpyHtoD");
  check(driver().ctx_synchronize(), "cuCtxSynchronize");
}

void DeviceMemory::download(void* target, size_t offset, size_t num_bytes) const {
  if (num_bytes == 0) return;
  const ScopedContext scope(device_);
  check(driver().memcpy_d_to_h(target, address_ + offset, num_bytes), "cuMemcpyDtoH");
}

MappedMemory::MappedMemory(const Device& device, size_t num_bytes) : device_(device) {
  const ScopedContext scope(device);
  check(driver().mem_host_alloc(&host_, num_bytes, kMemHostAllocPortable | kMemHostAllocDeviceMap),
        "cuMemHostAlloc");
  std::memset(host_, 0, num_bytes);
  check(driver().mem_host_get_device_pointer(&address_, host_, 0), "cuMemHostGetDevicePointer");
}

MappedMemory::~MappedMemory() {
  if (host_ == nullptr) return;
  release_on(device_, [&] { driver().mem_free_host(host_); });
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept { *this = std::move(other); }

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(host_, other.host_);
  std::swap(address_, other.address_);
  return *this;
}

}  // namespace jax_megamoe::cuda
