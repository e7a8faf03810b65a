#include "harness/harness_kernels.h"

#include <atomic>
#include <chrono>
#include <string>

#include "cuda/compiler.h"

namespace jax_megamoe::harness {
namespace {

// Reading more than the L2 holds replaces what is in it; writing would leave dirty lines that the
// timed call has to evict.
constexpr size_t kFlushBytes = size_t{256} << 20;
constexpr const char* kFlushSource = R"(
extern "C" __global__ void jmm_read_all(const uint4* data, unsigned long long size, unsigned* sink) {
  unsigned sum = 0;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < size;
       i += gridDim.x * blockDim.x) {
    const uint4 value = data[i];
    sum += value.x ^ value.y ^ value.z ^ value.w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;  // keeps the loads
}
)";

// One thread of each block. It polls memory of its GPU, as NCCL does: reads of the host's memory
// would slow down the whole GPU. A block's word tells the host that it has begun and, as ~0, that
// its limit has come.
constexpr const char* kHoldSource = R"(
extern "C" __global__ void jmm_hold(const volatile unsigned* ended, volatile unsigned* words,
                                    unsigned number, unsigned long long limit_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  words[blockIdx.x] = number;
  __threadfence_system();
  while (*ended < number) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start > limit_ns) {
      words[blockIdx.x] = ~0u;
      return;
    }
  }
}
)";
constexpr uint32_t kHoldSharedBytes = 200 << 10;  // a layer's block does not fit beside it

std::atomic_ref<uint32_t> word(const MappedMemory& page, uint32_t index) {
  return std::atomic_ref<uint32_t>(page.host<uint32_t>()[index]);
}

}  // namespace

SmallKernel::SmallKernel(const Device& device, const char* source, const char* name,
                         const std::string& nvrtc_path, uint32_t shared_bytes)
    : device_(device), shared_bytes_(shared_bytes) {
  const Driver& api = driver();
  const std::string cubin =
      compile(source, "", {"--gpu-architecture=sm_90a", "-std=c++20"}, nvrtc_path).cubin;
  const ScopedContext scope(device_);
  check(api.module_load_data(&module_, cubin.data()), "cuModuleLoadData");
  try {
    check(api.module_get_function(&function_, module_, name), "cuModuleGetFunction");
    check(api.func_set_attribute(function_, kFuncAttributeMaxDynamicSharedSizeBytes,
                                 static_cast<int>(shared_bytes_)),
          "cuFuncSetAttribute");
  } catch (...) {
    api.module_unload(module_);
    throw;
  }
}

SmallKernel::~SmallKernel() {
  if (module_ == nullptr) return;
  release_on(device_, [&] { driver().module_unload(module_); });
}

void SmallKernel::launch(CUstream stream, uint32_t blocks, uint32_t threads,
                         void** parameters) const {
  const ScopedContext scope(device_);
  check(driver().launch_kernel(function_, blocks, 1, 1, threads, 1, 1, shared_bytes_, stream,
                               parameters, nullptr),
        "cuLaunchKernel");
}

L2Flush::L2Flush(const Device& device, const std::string& nvrtc_path)
    : kernel_(device, kFlushSource, "jmm_read_all", nvrtc_path),
      data_(device, kFlushBytes, "memory that flushes the L2"),
      sink_(device, 256, "sink") {
  data_.fill(0);
}

void L2Flush::launch(CUstream stream) const {
  CUdeviceptr data = data_.address(), sink = sink_.address();
  unsigned long long size = kFlushBytes / 16;
  void* parameters[] = {&data, &size, &sink};
  kernel_.launch(stream, 4 * kernel_.device().num_sms, 256, parameters);
}

void L2Flush::leak() {
  kernel_.leak();
  data_.leak();
  sink_.leak();
}

SmHolder::SmHolder(const Device& device, const std::string& nvrtc_path)
    : kernel_(device, kHoldSource, "jmm_hold", nvrtc_path, kHoldSharedBytes),
      ended_(device, sizeof(uint32_t), "word that ends a hold"),
      page_(device, (1 + device.num_sms) * sizeof(uint32_t)) {
  ended_.fill(0);
  const ScopedContext scope(device);
  check(driver().stream_create(&control_, kStreamNonBlocking), "cuStreamCreate");
  check(driver().stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
}

SmHolder::~SmHolder() {
  if (control_ == nullptr) return;
  release();
  release_on(kernel_.device(), [&] {
    if (stream_ != nullptr) driver().stream_destroy(stream_);
    driver().stream_destroy(control_);
  });
}

void SmHolder::hold(uint32_t sms, double limit_s) {
  CUdeviceptr ended = ended_.address(), words = page_.address() + sizeof(uint32_t);
  uint32_t number = ++number_;
  sms_ = sms;
  unsigned long long limit_ns = static_cast<unsigned long long>(limit_s * 1e9);
  void* parameters[] = {&ended, &words, &number, &limit_ns};
  kernel_.launch(stream_, sms, 1, parameters);
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t block = 0; block < sms; ++block) {
    while (word(page_, 1 + block).load(std::memory_order_acquire) != number) {
      if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(limit_s)) {
        release();
        throw CudaError(-1, "jax_megamoe: hold: got " + std::to_string(block) + " of " +
                                std::to_string(sms) + " SMs of GPU " + std::to_string(ordinal()) +
                                "; expected them to be free. Nothing else may run there.");
      }
    }
  }
}

bool SmHolder::release() {
  bool held = true;
  for (uint32_t block = 0; block < sms_; ++block) {
    held &= word(page_, 1 + block).load(std::memory_order_acquire) != ~0u;
  }
  word(page_, 0).store(number_, std::memory_order_release);
  const ScopedContext scope(kernel_.device());
  // If this fails the hold ends with its limit.
  driver().memcpy_h_to_d_async(ended_.address(), page_.host<uint32_t>(), sizeof(uint32_t),
                               control_);
  return held;
}

void SmHolder::leak() {
  release();
  kernel_.leak();
  control_ = nullptr;
  ended_.leak();
  page_.leak();
}

}  // namespace jax_megamoe::harness
