// gpu_buffer.h: the symmetric buffer of a mesh of GPUs, its kernels, and what becomes of their
// failures.
//
// A launch is asynchronous and nothing waits for a kernel, so a failure is found by a thread that
// looks at the kernels' records in host memory. It tells the process (wait_for_report), stops
// further launches on that group until the devices are idle, puts all counters back to their first
// state, and lets launches go on. A program whose launch meets a failure that nobody has heard of,
// or that took part in the failed call, gets it as an error, on all of its ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernel.h"
#include "cuda/rank_group.h"
#include "host/status.h"
#include "host/symmetric_buffer.h"

namespace jax_megamoe::cuda {

struct LaunchResult {
  host::CallStatus status = host::CallStatus::kOk;
  std::string message;
};

// What one execution of a call passes besides KernelArgs.
struct Launch {
  int64_t run;  // XLA's number of the execution of the program; the same on all ranks
  KernelVariant kernel;
  CUstream stream;
};

class GpuBuffer final : public host::SymmetricBuffer {
 public:
  // `layout` is gpu::layout_shape(). Loads the kernels that programs of this key have asked for.
  GpuBuffer(std::string key, const MoeShape& layout, gpu::Granularity granularity,
            const std::vector<std::vector<int32_t>>& groups, const Toolchain& toolchain);
  ~GpuBuffer() override;

  gpu::Granularity granularity() const { return granularity_; }
  KernelTable& kernels() { return *kernels_; }

  // Fills in what belongs to the buffer and launches; the device's context is current. While XLA
  // captures a CUDA graph, `*captured` becomes true: the graph holds addresses of this buffer,
  // which then has to live as long as the graph.
  LaunchResult launch(const host::RankOfDevice& place, const Launch& launch, gpu::KernelArgs& args,
                      bool* captured);

  void poison() override;
  void arm_fault(uint32_t group, uint32_t region, uint32_t rank) override;
  std::string read(uint32_t group, uint32_t rank, uint32_t region) override;

  // Texts of failures that nobody has been told yet; each is returned once.
  std::vector<std::string> take_failures();
  // Stops looking for failures and makes running kernels give up: the process ends.
  void shut_down();

 private:
  struct Group {
    std::unique_ptr<RankGroup> ranks;
    // Launches share it; whoever inspects or resets the group's memory owns it.
    std::shared_mutex launching;
    std::vector<gpu::KernelArgs> args;  // [rank] of its last launch
    std::vector<int64_t> runs;          // [rank] run of its last launch
    std::atomic<bool> failed{false};    // found, and counters not yet reset

    // Guarded by mutex_.
    Failure failure;
    bool told = true;
    std::string lost;                  // the GPU cannot be used any more; empty: it can
    std::deque<int64_t> refused_runs;  // executions that get `failure` as an error
    uint32_t fault_region = 0xFFFFFFFFu;
    uint32_t fault_rank = 0;
  };

  void watch();
  void settle(Group& group);
  LaunchResult admit(Group& group, const Launch& launch, double timeout_s);
  template <class Use>
  void with_idle_group(Group& group, const Use& use);

  const gpu::Granularity granularity_;
  std::unique_ptr<KernelTable> kernels_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread watcher_;
};

// Waits until a call has failed or a GPU is lost, and returns the report; each is returned once, in
// the order in which they were found. Nothing once the process ends, see shut_down_all.
std::optional<std::string> wait_for_report();

// Of all buffers that exist, released ones that a CUDA graph keeps included.
std::vector<std::string> take_failures();
void shut_down_all();

// A program's wish for a kernel, for the life of the program: loading has to happen while nothing
// runs, so a buffer that is created later loads it then.
class KernelWish {
 public:
  // Loads the kernel now if the buffer exists. Throws what KernelTable::prepare throws.
  KernelWish(std::string key, const KernelVariant& kernel);
  ~KernelWish();
  KernelWish(const KernelWish&) = delete;
  KernelWish& operator=(const KernelWish&) = delete;

 private:
  const std::string key_;
  const KernelVariant kernel_;
};

}  // namespace jax_megamoe::cuda
