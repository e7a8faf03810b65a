// fake_driver.h: a CUDA driver in host memory, for tests of the host side without a GPU.
//
// Streams are threads, contexts are numbers, and the one kernel is a function of the test.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cuda/driver.h"
#include "gpu/interface/kernel_args.h"

namespace jax_megamoe::fake {

using namespace cuda;

inline constexpr int kNumDevices = 4;
inline constexpr int kNumSms = 8;
inline constexpr size_t kDeviceBytes = size_t{1} << 30;

inline std::function<void(const gpu::KernelArgs&)> kernel;  // what a launch runs
inline bool linked = true;                                  // peers can be accessed
inline int capability_major = 9;
inline std::atomic<bool> capturing{false};
inline std::atomic<int> loads{0};
inline std::atomic<size_t> allocated{0};

class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty(); });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = tasks_.front();
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();  // only now: a stream with a running task is not idle
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

inline std::mutex streams_mutex;
inline std::set<Stream*> streams;
inline thread_local CUcontext current = nullptr;
inline uint32_t shared_bytes = 4096;

inline Stream* as_stream(CUstream stream) { return reinterpret_cast<Stream*>(stream); }
inline CUresult context_or_error() { return current == nullptr ? 201 : kSuccess; }

inline CUresult synchronize() {
  std::set<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    all = streams;
  }
  for (Stream* stream : all) stream->wait();
  return context_or_error();
}

inline std::mutex sizes_mutex;
inline std::map<CUdeviceptr, size_t> sizes;

inline CUresult allocate(CUdeviceptr* address, size_t num_bytes) {
  if (allocated + num_bytes > kDeviceBytes) return kErrorOutOfMemory;
  *address = reinterpret_cast<CUdeviceptr>(std::malloc(num_bytes));
  std::lock_guard<std::mutex> lock(sizes_mutex);
  sizes[*address] = num_bytes;
  allocated += num_bytes;
  return context_or_error();
}

inline CUresult release(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(sizes_mutex);
  allocated -= sizes[address];
  sizes.erase(address);
  std::free(reinterpret_cast<void*>(address));
  return context_or_error();
}

inline Driver make_driver() {
  Driver api{};
  api.init = [](unsigned) { return kSuccess; };
  api.get_error_name = [](CUresult, const char** text) {
    *text = "FAKE_ERROR";
    return kSuccess;
  };
  api.get_error_string = [](CUresult, const char** text) {
    *text = "fake error";
    return kSuccess;
  };
  api.device_get_count = [](int* count) {
    *count = kNumDevices;
    return kSuccess;
  };
  api.device_get = [](CUdevice* device, int ordinal) {
    *device = ordinal;
    return kSuccess;
  };
  api.device_get_name = [](char* name, int, CUdevice) {
    std::strcpy(name, "fake");
    return kSuccess;
  };
  api.device_get_attribute = [](int* value, int which, CUdevice) {
    *value = which == kAttributeMultiprocessorCount      ? kNumSms
             : which == kAttributeComputeCapabilityMajor ? capability_major
             : which == kAttributeComputeCapabilityMinor ? 0
                                                         : 1 << 17;
    return kSuccess;
  };
  api.device_can_access_peer = [](int* possible, CUdevice, CUdevice) {
    *possible = linked;
    return kSuccess;
  };
  api.primary_ctx_retain = [](CUcontext* context, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(uintptr_t(device) + 1);
    return kSuccess;
  };
  api.ctx_get_current = [](CUcontext* context) {
    *context = current;
    return kSuccess;
  };
  api.ctx_set_current = [](CUcontext context) {
    current = context;
    return kSuccess;
  };
  api.ctx_synchronize = synchronize;
  api.ctx_enable_peer_access = [](CUcontext, unsigned) { return kErrorPeerAccessAlreadyEnabled; };
  api.mem_get_info = [](size_t* free_bytes, size_t* total) {
    *free_bytes = kDeviceBytes - allocated;
    *total = kDeviceBytes;
    return kSuccess;
  };
  api.mem_alloc = allocate;
  api.mem_free = release;
  api.mem_host_alloc = [](void** address, size_t num_bytes, unsigned) {
    *address = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    return context_or_error();
  };
  api.mem_free_host = [](void* address) {
    std::free(address);
    return context_or_error();
  };
  api.mem_host_get_device_pointer = [](CUdeviceptr* address, void* host, unsigned) {
    *address = reinterpret_cast<CUdeviceptr>(host);
    return kSuccess;
  };
  api.memcpy_h_to_d = [](CUdeviceptr target, const void* source, size_t num_bytes) {
    std::memcpy(reinterpret_cast<void*>(target), source, num_bytes);
    return context_or_error();
  };
  api.memcpy_d_to_h = [](void* target, CUdeviceptr source, size_t num_bytes) {
    std::memcpy(target, reinterpret_cast<void*>(source), num_bytes);
    return context_or_error();
  };
  // The copy engine works while kernels run; only single words are copied like this.
  api.memcpy_h_to_d_async = [](CUdeviceptr target, const void* source, size_t num_bytes, CUstream) {
    if (num_bytes != sizeof(uint32_t)) return 1;
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(target))
        .store(*static_cast<const uint32_t*>(source));
    return context_or_error();
  };
  api.memset_d8 = [](CUdeviceptr target, unsigned char byte, size_t num_bytes) {
    std::memset(reinterpret_cast<void*>(target), byte, num_bytes);
    return context_or_error();
  };
  api.stream_create = [](CUstream* stream, unsigned) {
    auto* created = new Stream;
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.insert(created);
    *stream = reinterpret_cast<CUstream>(created);
    return context_or_error();
  };
  api.stream_destroy = [](CUstream stream) {
    {
      std::lock_guard<std::mutex> lock(streams_mutex);
      streams.erase(as_stream(stream));
    }
    delete as_stream(stream);
    return kSuccess;
  };
  api.stream_query = [](CUstream stream) {
    return as_stream(stream)->idle() ? kSuccess : kErrorNotReady;
  };
  api.stream_is_capturing = [](CUstream, int* status) {
    *status = capturing;
    return kSuccess;
  };
  api.stream_wait_value32 = [](CUstream stream, CUdeviceptr address, uint32_t value, unsigned) {
    as_stream(stream)->push([=] {
      std::atomic_ref<uint32_t> word(*reinterpret_cast<uint32_t*>(address));
      while (static_cast<int32_t>(word.load() - value) < 0) std::this_thread::yield();
    });
    return kSuccess;
  };
  api.event_create = [](CUevent* event, unsigned) {
    *event = reinterpret_cast<CUevent>(uintptr_t{1});
    return kSuccess;
  };
  api.event_destroy = [](CUevent) { return kSuccess; };
  api.event_record = [](CUevent, CUstream) { return context_or_error(); };
  api.event_elapsed_time = [](float* time, CUevent, CUevent) {
    *time = 0.25f;
    return context_or_error();
  };
  api.module_load_data = [](CUmodule* module, const void*) {
    ++loads;
    *module = reinterpret_cast<CUmodule>(uintptr_t{1});
    return context_or_error();
  };
  api.module_unload = [](CUmodule) { return kSuccess; };
  api.module_get_function = [](CUfunction* function, CUmodule, const char*) {
    *function = reinterpret_cast<CUfunction>(uintptr_t{1});
    return kSuccess;
  };
  api.module_get_global = [](CUdeviceptr* address, size_t* size, CUmodule, const char*) {
    *address = reinterpret_cast<CUdeviceptr>(&shared_bytes);
    *size = sizeof(shared_bytes);
    return kSuccess;
  };
  api.func_set_attribute = [](CUfunction, int, int) { return kSuccess; };
  api.max_active_blocks = [](int* blocks, CUfunction, int, size_t) {
    *blocks = 1;
    return kSuccess;
  };
  api.launch_kernel = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, CUstream stream, void** parameters, void**) {
    const gpu::KernelArgs args = *static_cast<const gpu::KernelArgs*>(parameters[0]);
    if (!capturing) as_stream(stream)->push([args] { kernel(args); });
    return context_or_error();
  };
  return api;
}

}  // namespace jax_megamoe::fake
