// driver.h: the part of the CUDA driver API that the host uses, opened at run time.
//
// No CUDA header is needed to build and no CUDA library to import the module: libcuda.so.1 comes
// with the driver, and is opened when a GPU is first used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_megamoe::cuda {

// ABI of cuda.h. Handles are opaque.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kErrorOutOfMemory = 2;
inline constexpr CUresult kErrorNotReady = 600;
inline constexpr CUresult kErrorPeerAccessAlreadyEnabled = 704;

inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeComputeCapabilityMajor = 75;
inline constexpr int kAttributeComputeCapabilityMinor = 76;
inline constexpr int kAttributeMaxSharedMemoryPerBlockOptin = 97;
inline constexpr int kFuncAttributeMaxDynamicSharedSizeBytes = 8;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kMemHostAllocPortable = 1;
inline constexpr unsigned kMemHostAllocDeviceMap = 2;
inline constexpr unsigned kStreamWaitValueGeq = 0;

// X(member, exported symbol, parameters); the symbols are those that cuda.h's macros name.
#define JMM_CUDA_FUNCTIONS(X)                                                                     \
  X(init, "cuInit", (unsigned))                                                                   \
  X(get_error_name, "cuGetErrorName", (CUresult, const char**))                                   \
  X(get_error_string, "cuGetErrorString", (CUresult, const char**))                               \
  X(driver_get_version, "cuDriverGetVersion", (int*))                                             \
  X(device_get_count, "cuDeviceGetCount", (int*))                                                 \
  X(device_get, "cuDeviceGet", (CUdevice*, int))                                                  \
  X(device_get_name, "cuDeviceGetName", (char*, int, CUdevice))                                   \
  X(device_get_attribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                          \
  X(device_can_access_peer, "cuDeviceCanAccessPeer", (int*, CUdevice, CUdevice))                  \
  X(primary_ctx_retain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                       \
  X(ctx_get_current, "cuCtxGetCurrent", (CUcontext*))                                             \
  X(ctx_set_current, "cuCtxSetCurrent", (CUcontext))                                              \
  X(ctx_synchronize, "cuCtxSynchronize", ())                                                      \
  X(ctx_enable_peer_access, "cuCtxEnablePeerAccess", (CUcontext, unsigned))                       \
  X(mem_get_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                          \
  X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                                           \
  X(mem_free, "cuMemFree_v2", (CUdeviceptr))                                                      \
  X(mem_host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                 \
  X(mem_free_host, "cuMemFreeHost", (void*))                                                      \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2", (CUdeviceptr*, void*, unsigned)) \
  X(memcpy_h_to_d, "cuMemcpyHtoD_v2", (CUdeviceptr, const void*, size_t))                         \
  X(memcpy_d_to_h, "cuMemcpyDtoH_v2", (void*, CUdeviceptr, size_t))                               \
  X(memcpy_h_to_d_async, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, size_t, CUstream))    \
  X(memset_d8, "cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t))                             \
  X(stream_create, "cuStreamCreate", (CUstream*, unsigned))                                       \
  X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                                             \
  X(stream_query, "cuStreamQuery", (CUstream))                                                    \
  X(stream_is_capturing, "cuStreamIsCapturing", (CUstream, int*))                                 \
  X(stream_wait_value32, "cuStreamWaitValue32_v2", (CUstream, CUdeviceptr, uint32_t, unsigned))   \
  X(event_create, "cuEventCreate", (CUevent*, unsigned))                                          \
  X(event_destroy, "cuEventDestroy_v2", (CUevent))                                                \
  X(event_record, "cuEventRecord", (CUevent, CUstream))                                           \
  X(event_elapsed_time, "cuEventElapsedTime", (float*, CUevent, CUevent))                         \
  X(module_load_data, "cuModuleLoadData", (CUmodule*, const void*))                               \
  X(module_unload, "cuModuleUnload", (CUmodule))                                                  \
  X(module_get_function, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))             \
  X(module_get_global, "cuModuleGetGlobal_v2", (CUdeviceptr*, size_t*, CUmodule, const char*))    \
  X(func_set_attribute, "cuFuncSetAttribute", (CUfunction, int, int))                             \
  X(max_active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                             \
    (int*, CUfunction, int, size_t))                                                              \
  X(launch_kernel, "cuLaunchKernel",                                                              \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,  \
     void**, void**))

struct Driver {
#define JMM_MEMBER(member, symbol, parameters) CUresult(*member) parameters;
  JMM_CUDA_FUNCTIONS(JMM_MEMBER)
#undef JMM_MEMBER
};

// The driver is missing, or a call to it failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(CUresult result, const std::string& what) : std::runtime_error(what), code(result) {}
  const CUresult code;
};

// Opens libcuda.so.1 and initialises it once; throws CudaError if there is no driver or no GPU.
const Driver& driver();

// Tests without a GPU: `api` takes the place of the driver. Before driver() is first called.
void replace_driver(const Driver* api);

// "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)" as a CudaError, unless `result` is
// success.
void check(CUresult result, const std::string& what);

// A GPU by its ordinal in this process, as CUDA and JAX count.
struct Device {
  int ordinal = -1;
  CUdevice handle = 0;
  CUcontext context = nullptr;  // the primary context, which JAX uses as well
  int num_sms = 0;
  int compute_capability = 0;  // 10 * major + minor
  int max_shared_bytes = 0;    // of one block
  std::string name;
};

// Retains the primary context for the life of the process. Throws CudaError.
Device open_device(int ordinal);

// Makes a device's context current in this thread for the life of the object.
class ScopedContext {
 public:
  explicit ScopedContext(const Device& device);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  CUcontext previous_ = nullptr;
};

// For destructors: calls `release` with the device's context current, or not at all if it cannot
// be. The driver may be gone when the process ends; then so is what would be released.
template <class Release>
void release_on(const Device& device, const Release& release) noexcept {
  CUcontext previous = nullptr;
  driver().ctx_get_current(&previous);
  if (driver().ctx_set_current(device.context) == kSuccess) release();
  driver().ctx_set_current(previous);
}

// Lets every device of the list read and write memory of every other one. Throws CudaError with the
// pair of GPUs that have no link.
void enable_peer_access(const Device* const* devices, size_t num_devices);

// Device memory, freed with the object. Throws CudaError that names `what`, the bytes asked for and
// the bytes that are free.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const Device& device, size_t num_bytes, const char* what);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  CUdeviceptr address() const { return address_; }
  template <class T = void>
  T* ptr(size_t offset = 0) const {
    return reinterpret_cast<T*>(address_ + offset);
  }
  size_t num_bytes() const { return num_bytes_; }
  void fill(uint8_t byte, size_t offset, size_t num_bytes) const;
  void fill(uint8_t byte) const { fill(byte, 0, num_bytes_); }
  void upload(const void* source, size_t num_bytes) const;
  void download(void* target, size_t offset, size_t num_bytes) const;
  void leak() { address_ = 0; }  // a kernel without an end may still use it

 private:
  Device device_;
  CUdeviceptr address_ = 0;
  size_t num_bytes_ = 0;
};

// Pinned host memory that every device can read and write, zeroed. Freed with the object.
class MappedMemory {
 public:
  MappedMemory() = default;
  MappedMemory(const Device& device, size_t num_bytes);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  template <class T>
  T* host() const {
    return static_cast<T*>(host_);
  }
  CUdeviceptr address() const { return address_; }  // as the devices see it
  void leak() { host_ = nullptr; }

 private:
  Device device_;
  void* host_ = nullptr;
  CUdeviceptr address_ = 0;
};

}  // namespace jax_megamoe::cuda
