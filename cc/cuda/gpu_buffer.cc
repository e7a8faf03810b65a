#include "cuda/gpu_buffer.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

namespace jax_megamoe::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often the watcher looks at host memory. A call that fails has taken its timeout already.
constexpr milliseconds kWatchInterval(5);
// Ranks that miss the same signal report it at about the same time: one message for all.
constexpr milliseconds kReportGrace(20);
// A failed call's kernels end at once when told to; more means that a GPU is lost.
constexpr double kSettleSlack = 30;
constexpr size_t kMaxRefusedRuns = 64;
constexpr size_t kMaxReports = 64;  // that nobody waits for

struct Process {
  std::mutex mutex;
  std::set<GpuBuffer*> buffers;
  std::multimap<std::string, KernelVariant> wishes;  // of a buffer's key
  std::deque<std::string> reports;
  std::condition_variable reported;
  bool ending = false;
};

Process& process() {
  static Process* instance = new Process;  // never destroyed: XLA's threads may outlive main
  return *instance;
}

void report(const std::string& text) {
  std::lock_guard<std::mutex> lock(process().mutex);
  process().reports.push_back(text);
  if (process().reports.size() > kMaxReports) process().reports.pop_front();
  process().reported.notify_one();
}

std::vector<Device> open_devices(const std::vector<std::vector<int32_t>>& groups) {
  std::set<int32_t> ordinals;
  for (const auto& group : groups) ordinals.insert(group.begin(), group.end());
  std::vector<Device> devices;
  for (int32_t ordinal : ordinals) devices.push_back(open_device(ordinal));
  return devices;
}

bool is_capturing(CUstream stream) {
  int status = 0;
  return driver().stream_is_capturing(stream, &status) == kSuccess && status != 0;
}

host::CallStatus status_of(const Failure& failure) {
  return failure.timed_out ? host::CallStatus::kDeadlineExceeded
                           : host::CallStatus::kInvalidArgument;
}

}  // namespace

GpuBuffer::GpuBuffer(std::string key, const MoeShape& layout, gpu::Granularity granularity,
                     const std::vector<std::vector<int32_t>>& groups, const Toolchain& toolchain)
    : SymmetricBuffer(std::move(key), layout, groups), granularity_(granularity) {
  const std::vector<Device> devices = open_devices(groups);
  std::map<int32_t, const Device*> by_ordinal;
  for (const Device& device : devices) by_ordinal[device.ordinal] = &device;
  kernels_ = std::make_unique<KernelTable>(layout, granularity, Build::kPlain, devices, toolchain);
  for (const auto& ordinals : groups) {
    auto group = std::make_unique<Group>();
    std::vector<RankPlace> places;
    for (int32_t ordinal : ordinals) {
      const Device& device = *by_ordinal[ordinal];
      places.push_back({device, static_cast<uint32_t>(device.num_sms)});
    }
    group->ranks = std::make_unique<RankGroup>(layout, std::move(places), false);
    group->args.resize(layout.num_ranks);
    group->runs.resize(layout.num_ranks, -1);
    groups_.push_back(std::move(group));
  }
  std::set<KernelVariant> wanted;
  {
    std::lock_guard<std::mutex> lock(process().mutex);
    const auto [begin, end] = process().wishes.equal_range(this->key());
    for (auto it = begin; it != end; ++it) wanted.insert(it->second);
  }
  for (const KernelVariant& variant : wanted) kernels_->prepare(variant);
  {
    std::lock_guard<std::mutex> lock(process().mutex);
    process().buffers.insert(this);
  }
  watcher_ = std::thread(&GpuBuffer::watch, this);
}

GpuBuffer::~GpuBuffer() {
  {
    std::lock_guard<std::mutex> lock(process().mutex);
    process().buffers.erase(this);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  for (const auto& group : groups_) {
    try {
      group->ranks->synchronize();  // kernels end by themselves
    } catch (const CudaError&) {
      group->ranks->leak();  // the context is lost, and its memory with it
    }
  }
}

LaunchResult GpuBuffer::launch(const host::RankOfDevice& place, const Launch& launch,
                               gpu::KernelArgs& args, bool* captured) {
  Group& group = *groups_[place.group];
  const double timeout_s = static_cast<double>(args.timeout_ns) * 1e-9;
  for (;;) {
    const LaunchResult admitted = admit(group, launch, timeout_s);
    if (admitted.status != host::CallStatus::kOk) return admitted;
    std::shared_lock<std::shared_mutex> lock(group.launching);
    // Between the two another rank's kernel may have failed.
    if (group.failed.load() || group.ranks->has_failed()) continue;
    const int ordinal = group.ranks->place(place.rank).device.ordinal;
    const LoadedKernel* kernel = kernels_->find(launch.kernel, ordinal);
    if (kernel == nullptr) {
      return {host::CallStatus::kUnavailable,
              "jax_megamoe: symmetric buffer " + key() + ": got no kernel with " +
                  launch.kernel.text() +
                  "; expected the one that was loaded when the program was compiled. Compile the "
                  "program again: jax.clear_caches()."};
    }
    group.ranks->fill_args(place.rank, args);
    *captured = is_capturing(launch.stream);
    if (!*captured) {  // a graph would repeat the fault
      std::lock_guard<std::mutex> guard(mutex_);
      if (group.fault_region != 0xFFFFFFFFu && group.fault_rank == place.rank) {
        args.fault_region = std::exchange(group.fault_region, 0xFFFFFFFFu);
      }
    }
    group.args[place.rank] = args;
    group.runs[place.rank] = launch.run;
    kernel->launch(launch.stream, group.ranks->place(place.rank).num_ctas, args);
    return {};
  }
}

// Waits while a failure is being dealt with, then says whether this execution may go on.
LaunchResult GpuBuffer::admit(Group& group, const Launch& launch, double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s + kSettleSlack));
  while (group.lost.empty() && (group.failed.load() || group.ranks->has_failed())) {
    if (stopping_) break;
    changed_.notify_all();
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      return {host::CallStatus::kDeadlineExceeded,
              "jax_megamoe: a call that failed has not ended on all GPUs. End the process."};
    }
  }
  if (!group.lost.empty()) return {host::CallStatus::kUnavailable, group.lost};
  if (stopping_) return {host::CallStatus::kUnavailable, "jax_megamoe: the process is ending."};
  const auto& refused = group.refused_runs;
  bool refuse = std::find(refused.begin(), refused.end(), launch.run) != refused.end();
  if (!refuse && !group.told) {  // a program after the failed one, on all of its ranks
    refuse = true;
    if (launch.run >= 0) group.refused_runs.push_back(launch.run);
  }
  if (!refuse) return {};
  group.told = true;
  return {status_of(group.failure), group.failure.text};
}

void GpuBuffer::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, kWatchInterval);
    for (const auto& group : groups_) {
      if (stopping_ || !group->lost.empty() || !group->ranks->has_failed()) continue;
      lock.unlock();
      settle(*group);
      lock.lock();
    }
  }
}

void GpuBuffer::settle(Group& group) {
  group.failed.store(true);  // no launch begins from here on
  const auto reported = [&] {
    for (uint32_t rank = 0; rank < group.ranks->num_ranks(); ++rank) {
      if (!group.ranks->has_failed(rank)) return false;
    }
    return true;
  };
  const auto deadline = Clock::now() + kReportGrace;
  while (!reported() && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(1));

  std::string lost;
  try {
    Failure failure;
    {
      // A launch may wait for room in its stream, until kernels end: tell them before waiting for
      // it.
      if (group.ranks->has_timed_out()) group.ranks->abort();
      std::unique_lock<std::shared_mutex> launches(group.launching);
      failure = group.ranks->failure(group.args);
      std::lock_guard<std::mutex> lock(mutex_);
      group.failure = failure;
      group.told = false;
      for (int64_t run : group.runs) {
        if (run >= 0) group.refused_runs.push_back(run);
      }
      while (group.refused_runs.size() > kMaxRefusedRuns) group.refused_runs.pop_front();
    }
    report(failure.text);
    if (failure.timed_out) group.ranks->abort();  // kernels launched since
    group.ranks->synchronize();
    group.ranks->reset();
  } catch (const std::exception& error) {
    lost = std::string("jax_megamoe: symmetric buffer ") + key() +
           ": a GPU cannot be used any more after a failed call: " + error.what() +
           ". End the process.";
    report(lost);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  group.lost = lost;
  group.failed.store(false);
  changed_.notify_all();
}

// Waits until nothing that was launched is running, and keeps launches out.
template <class Use>
void GpuBuffer::with_idle_group(Group& group, const Use& use) {
  {
    // Counters of a call that failed are reset first.
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.notify_all();
    changed_.wait(lock, [&] {
      return stopping_ || !group.lost.empty() ||
             (!group.failed.load() && !group.ranks->has_failed());
    });
  }
  std::unique_lock<std::shared_mutex> launches(group.launching);
  group.ranks->synchronize();
  use(*group.ranks);
}

void GpuBuffer::poison() {
  for (const auto& group : groups_) {
    with_idle_group(*group, [](RankGroup& ranks) { ranks.poison(); });
  }
}

void GpuBuffer::arm_fault(uint32_t group, uint32_t region, uint32_t rank) {
  with_idle_group(*groups_[group], [&](RankGroup& ranks) {
    ranks.arm_fault(rank);
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[group]->fault_region = region;
    groups_[group]->fault_rank = rank;
  });
}

std::string GpuBuffer::read(uint32_t group, uint32_t rank, uint32_t region) {
  std::string bytes;
  with_idle_group(*groups_[group], [&](RankGroup& ranks) { bytes = ranks.read(rank, region); });
  return bytes;
}

std::vector<std::string> GpuBuffer::take_failures() {
  std::vector<std::string> texts;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& group : groups_) {
    if (!group->told) texts.push_back(group->failure.text);
    group->told = true;
  }
  return texts;
}

void GpuBuffer::shut_down() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  for (const auto& group : groups_) {
    try {
      group->ranks->abort();
    } catch (const CudaError&) {  // nothing is left to stop
    }
  }
}

std::optional<std::string> wait_for_report() {
  std::unique_lock<std::mutex> lock(process().mutex);
  process().reported.wait(lock, [] { return process().ending || !process().reports.empty(); });
  if (process().reports.empty()) return std::nullopt;
  std::string text = std::move(process().reports.front());
  process().reports.pop_front();
  return text;
}

std::vector<std::string> take_failures() {
  std::vector<std::string> texts;
  std::lock_guard<std::mutex> lock(process().mutex);
  for (GpuBuffer* buffer : process().buffers) {
    for (std::string& text : buffer->take_failures()) texts.push_back(std::move(text));
  }
  return texts;
}

void shut_down_all() {
  std::vector<GpuBuffer*> buffers;
  {
    std::lock_guard<std::mutex> lock(process().mutex);
    process().ending = true;
    process().reported.notify_all();
    buffers.assign(process().buffers.begin(), process().buffers.end());
  }
  for (GpuBuffer* buffer : buffers) buffer->shut_down();
}

KernelWish::KernelWish(std::string key, const KernelVariant& kernel)
    : key_(std::move(key)), kernel_(kernel) {
  if (const auto buffer = host::find_buffer_of<GpuBuffer>(key_)) buffer->kernels().prepare(kernel_);
  std::lock_guard<std::mutex> lock(process().mutex);
  process().wishes.emplace(key_, kernel_);
}

KernelWish::~KernelWish() {
  std::lock_guard<std::mutex> lock(process().mutex);
  const auto [begin, end] = process().wishes.equal_range(key_);
  for (auto it = begin; it != end; ++it) {
    if (it->second != kernel_) continue;
    process().wishes.erase(it);
    return;
  }
}

}  // namespace jax_megamoe::cuda
