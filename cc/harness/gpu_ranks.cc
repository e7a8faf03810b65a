#include "harness/gpu_ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <thread>

#include "cuda/compiler.h"

namespace jax_megamoe::harness {
namespace {

using Clock = std::chrono::steady_clock;

// Time a failed call may need beyond its waits: every role finishes what it is doing.
constexpr double kEndSlack = 5;

void store(DeviceMemory& memory, const Device& device, const HostArray& array, const char* what) {
  if (memory.num_bytes() != array.num_bytes || memory.address() == 0) {
    memory = DeviceMemory();
    memory = DeviceMemory(device, array.num_bytes, what);
  }
  memory.upload(array.data, array.num_bytes);
}

void require_bytes(const HostArray& array, uint64_t wanted, const char* what) {
  if (array.num_bytes == wanted && (array.data != nullptr || wanted == 0)) return;
  throw std::invalid_argument(std::string("jax_megamoe: ") + what + ": got " +
                              std::to_string(array.num_bytes) + " bytes; expected " +
                              std::to_string(wanted) + ".");
}

std::string contents(const DeviceMemory& memory) {
  std::string bytes(memory.num_bytes(), '\0');
  memory.download(bytes.data(), 0, bytes.size());
  return bytes;
}

}  // namespace

GpuRanks::GpuRanks(const MoeShape& layout, gpu::Granularity granularity,
                   const std::vector<int>& device_of_rank, uint32_t ctas_per_rank,
                   Toolchain toolchain, Build build)
    : granularity_(granularity), shape_(layout), toolchain_(std::move(toolchain)) {
  if (!shape_.valid()) {
    throw std::invalid_argument("jax_megamoe: MoeShape: not a valid shape");
  }
  if (device_of_rank.size() != shape_.num_ranks) {
    throw std::invalid_argument(
        "jax_megamoe: devices: got " + std::to_string(device_of_rank.size()) +
        "; expected one per rank (" + std::to_string(shape_.num_ranks) + ").");
  }
  std::map<int, uint32_t> ranks_on;
  for (int ordinal : device_of_rank) ++ranks_on[ordinal];
  std::map<int, Device> device_of;
  for (const auto& [ordinal, count] : ranks_on) {
    const Device& device = device_of[ordinal] = open_device(ordinal);
    const uint32_t wanted = ctas_per_rank * count;
    if (wanted > static_cast<uint32_t>(device.num_sms) ||
        count > static_cast<uint32_t>(device.num_sms)) {
      throw std::invalid_argument("jax_megamoe: ctas_per_rank: got " +
                                  std::to_string(ctas_per_rank) + " for " + std::to_string(count) +
                                  " ranks on GPU " + std::to_string(ordinal) +
                                  "; expected at most its " + std::to_string(device.num_sms) +
                                  " SMs in all, because ranks wait for each other.");
    }
    devices_.push_back(device);
  }
  std::vector<RankPlace> places;
  for (int ordinal : device_of_rank) {
    const Device& device = device_of[ordinal];
    places.push_back(
        {device, ctas_per_rank != 0 ? ctas_per_rank : device.num_sms / ranks_on[ordinal]});
  }
  group_ = std::make_unique<RankGroup>(shape_, std::move(places), build == Build::kTrace);
  kernels_ = std::make_unique<KernelTable>(shape_, granularity_, build, devices_, toolchain_);
  failures_.resize(shape_.num_ranks);
  ranks_.resize(shape_.num_ranks);
  for (uint32_t r = 0; r < shape_.num_ranks; ++r) {
    Rank& rank = ranks_[r];
    const Device& device = group_->place(r).device;
    const ScopedContext scope(device);
    check(driver().stream_create(&rank.stream, kStreamNonBlocking), "cuStreamCreate");
    check(driver().event_create(&rank.start, 0), "cuEventCreate");
    check(driver().event_create(&rank.end, 0), "cuEventCreate");
    rank.received = DeviceMemory(device, shape_.num_local_experts() * sizeof(int32_t), "received");
    rank.status = DeviceMemory(device, gpu::kNumStatusWords * sizeof(int32_t), "status");
    group_->fill_args(r, rank.args);
  }
  gate_ = MappedMemory(devices_[0], 256);
}

GpuRanks::~GpuRanks() {
  if (hung_) {  // freeing would wait for ever
    group_->leak();
    kernels_->leak();
    gate_.leak();
    for (Rank& rank : ranks_) {
      for (DeviceMemory* memory :
           {&rank.w13, &rank.w13_row_scale, &rank.w2, &rank.w2_row_scale, &rank.b13, &rank.b2,
            &rank.x, &rank.x_sf, &rank.topk_idx, &rank.topk_weights, &rank.num_tokens, &rank.y,
            &rank.received, &rank.status}) {
        memory->leak();
      }
    }
    for (const auto& flush : flushes_) flush->leak();
    if (holder_ != nullptr) holder_->leak();
    return;
  }
  for (const Rank& rank : ranks_) {
    if (rank.stream != nullptr) driver().stream_destroy(rank.stream);
    if (rank.start != nullptr) driver().event_destroy(rank.start);
    if (rank.end != nullptr) driver().event_destroy(rank.end);
  }
}

void GpuRanks::require(uint32_t rank) const {
  if (rank >= ranks_.size()) {
    throw std::invalid_argument("jax_megamoe: rank: got " + std::to_string(rank) +
                                "; expected 0.." + std::to_string(ranks_.size() - 1) + ".");
  }
  if (hung_) {
    throw std::runtime_error(
        "jax_megamoe: an earlier kernel did not end; its GPU cannot be used any more by this "
        "process. End the process.");
  }
}

void GpuRanks::set_weights(uint32_t r, HostArray w13, HostArray w13_row_scale, HostArray w2,
                           HostArray w2_row_scale, HostArray b13, HostArray b2) {
  require(r);
  const uint64_t e = shape_.num_local_experts(), h = shape_.hidden, i = shape_.intermediate;
  const uint64_t chunk = gpu::weight_chunk_bytes(granularity_);
  const uint64_t area = gpu::kWeightChunkRows * gpu::kBlockK;
  require_bytes(w13, e * (2 * i * h / area) * chunk, "w13");
  require_bytes(w13_row_scale, e * 2 * i, "w13_row_scale");
  require_bytes(w2, e * (h * i / area) * chunk, "w2");
  require_bytes(w2_row_scale, e * h, "w2_row_scale");
  const bool bias = b13.data != nullptr || b2.data != nullptr;
  if (bias) {
    require_bytes(b13, e * 2 * i * sizeof(float), "b13");
    require_bytes(b2, e * h * sizeof(float), "b2");
  }
  Rank& rank = ranks_[r];
  const Device& device = group_->place(r).device;
  store(rank.w13, device, w13, "w13");
  store(rank.w13_row_scale, device, w13_row_scale, "w13_row_scale");
  store(rank.w2, device, w2, "w2");
  store(rank.w2_row_scale, device, w2_row_scale, "w2_row_scale");
  rank.args.w13 = rank.w13.ptr<uint8_t>();
  rank.args.w13_row_scale = rank.w13_row_scale.ptr<uint8_t>();
  rank.args.w2 = rank.w2.ptr<uint8_t>();
  rank.args.w2_row_scale = rank.w2_row_scale.ptr<uint8_t>();
  if (bias) {
    store(rank.b13, device, b13, "b13");
    store(rank.b2, device, b2, "b2");
  }
  rank.args.b13 = bias ? rank.b13.ptr<float>() : nullptr;
  rank.args.b2 = bias ? rank.b2.ptr<float>() : nullptr;
  rank.has_weights = true;
}

void GpuRanks::set_inputs(uint32_t r, uint32_t num_rows, HostArray x, HostArray x_sf,
                          HostArray topk_idx, bool topk_idx_is_64bit, HostArray topk_weights,
                          std::optional<int32_t> num_tokens) {
  require(r);
  const uint64_t rows = num_rows, h = shape_.hidden, k = shape_.top_k;
  const bool quantised = x_sf.data != nullptr;
  if (rows > shape_.max_tokens) {
    throw std::invalid_argument("jax_megamoe: x: got " + std::to_string(rows) +
                                " rows; expected at most " + std::to_string(shape_.max_tokens) +
                                ".");
  }
  require_bytes(x, rows * h * (quantised ? 1 : 2), "x");
  if (quantised) require_bytes(x_sf, rows * h / kSfGroup, "x_sf");
  require_bytes(topk_idx, rows * k * (topk_idx_is_64bit ? 8 : 4), "topk_idx");
  require_bytes(topk_weights, rows * k * 4, "topk_weights");
  Rank& rank = ranks_[r];
  const Device& device = group_->place(r).device;
  store(rank.x, device, x, "x");
  if (quantised) store(rank.x_sf, device, x_sf, "x_sf");
  store(rank.topk_idx, device, topk_idx, "topk_idx");
  store(rank.topk_weights, device, topk_weights, "topk_weights");
  const int32_t tokens = num_tokens.value_or(0);
  store(rank.num_tokens, device, {&tokens, sizeof(tokens)}, "num_tokens");
  if (rank.y.num_bytes() != rows * h * 2 || rank.y.address() == 0) {
    rank.y = DeviceMemory();
    rank.y = DeviceMemory(device, rows * h * 2, "y");
  }
  rank.y.fill(0xFF);
  rank.received.fill(0xFF);
  rank.status.fill(0xFF);
  gpu::KernelArgs& args = rank.args;
  args.x = rank.x.ptr();
  args.x_sf = quantised ? rank.x_sf.ptr<uint8_t>() : nullptr;
  args.topk_idx = rank.topk_idx.ptr();
  args.topk_idx_is_64bit = topk_idx_is_64bit;
  args.topk_weights = rank.topk_weights.ptr<float>();
  args.num_tokens = num_tokens ? rank.num_tokens.ptr<int32_t>() : nullptr;
  args.ep_rank = nullptr;
  args.num_rows = num_rows;
  args.y = rank.y.ptr<uint16_t>();
  args.received = rank.received.ptr<int32_t>();
  args.status = rank.status.ptr<int32_t>();
  rank.has_inputs = true;
}

uint32_t GpuRanks::select_tile() const {
  uint32_t rows = 0;
  for (const Rank& rank : ranks_) rows = std::max(rows, rank.args.num_rows);
  return gpu::select_tile(granularity_, shape_, rows);
}

KernelVariant GpuRanks::variant(int32_t tile, Activation activation) const {
  return {tile < 0 ? select_tile() : static_cast<uint32_t>(tile), activation,
          ranks_[0].args.b13 != nullptr};
}

void GpuRanks::prepare(int32_t tile, Activation activation) {
  require(0);
  kernels_->prepare(variant(tile, activation));
}

KernelVariant GpuRanks::begin(const LaunchOptions& options) {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    require(r);
    if (!ranks_[r].has_weights || !ranks_[r].has_inputs) {
      throw std::invalid_argument("jax_megamoe: rank " + std::to_string(r) +
                                  ": call set_weights and set_inputs for every rank first.");
    }
    if ((ranks_[r].args.b13 == nullptr) != (ranks_[0].args.b13 == nullptr)) {
      throw std::invalid_argument("jax_megamoe: biases: got them on rank " +
                                  std::to_string(ranks_[r].args.b13 == nullptr ? 0 : r) +
                                  " and none on rank " +
                                  std::to_string(ranks_[r].args.b13 == nullptr ? r : 0) +
                                  "; expected them on all ranks or on none.");
    }
  }
  const KernelVariant kernel = variant(options.tile, options.activation);
  kernels_->prepare(kernel);
  group_->synchronize();
  group_->clear_trace();
  if (options.fault_rank >= 0) {
    require(static_cast<uint32_t>(options.fault_rank));
    group_->arm_fault(static_cast<uint32_t>(options.fault_rank));
  }
  std::fill(failures_.begin(), failures_.end(), "");
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    gpu::KernelArgs& args = ranks_[r].args;
    args.timeout_ns = static_cast<uint64_t>(options.timeout_s * 1e9);
    gpu::set_activation_params(args, options.activation_params);
    args.checked = options.checked;
    args.fault_region =
        static_cast<int32_t>(r) == options.fault_rank ? options.fault_region : 0xFFFFFFFFu;
  }
  return kernel;
}

void GpuRanks::launch_rank(uint32_t r, const KernelVariant& kernel) const {
  const RankPlace& place = group_->place(r);
  gpu::KernelArgs args = ranks_[r].args;
  kernels_->find(kernel, place.device.ordinal)->launch(ranks_[r].stream, place.num_ctas, args);
}

void GpuRanks::flush_l2() {
  if (flushes_.empty()) {
    std::vector<std::unique_ptr<L2Flush>> prepared;
    for (const Device& device : devices_) {
      prepared.push_back(std::make_unique<L2Flush>(device, toolchain_.nvrtc_path));
    }
    flushes_ = std::move(prepared);
  }
  for (const auto& flush : flushes_) {
    CUstream stream = nullptr;  // of the first rank on this device
    for (uint32_t r = 0; stream == nullptr; ++r) {
      if (group_->place(r).device.ordinal == flush->ordinal()) stream = ranks_[r].stream;
    }
    flush->launch(stream);
  }
  group_->synchronize();
}

// Null if no SMs are to be held.
SmHolder* GpuRanks::holder(const LaunchOptions& options) {
  if (options.held_sms == 0) return nullptr;
  const auto device = std::find_if(devices_.begin(), devices_.end(), [&](const Device& device) {
    return device.ordinal == options.held_device;
  });
  if (device == devices_.end() || options.held_sms > static_cast<uint32_t>(device->num_sms)) {
    throw std::invalid_argument("jax_megamoe: hold: got " + std::to_string(options.held_sms) +
                                " SMs of GPU " + std::to_string(options.held_device) +
                                "; expected a GPU that has ranks, and at most its SMs.");
  }
  if (holder_ == nullptr || holder_->ordinal() != device->ordinal) {
    holder_ = std::make_unique<SmHolder>(*device, toolchain_.nvrtc_path);
  }
  return holder_.get();
}

// Waits until all ranks' streams are empty. Kernels end by themselves; one that does not is a fault
// of the kernel, and nothing can be done on its GPU any more.
void GpuRanks::wait(double timeout_s) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s + kEndSlack));
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const ScopedContext scope(group_->place(r).device);
    for (uint32_t round = 0;; ++round) {
      const CUresult result = driver().stream_query(ranks_[r].stream);
      if (result == kSuccess) break;
      if (result != kErrorNotReady) {
        hung_ = true;  // the context is lost
        check(result, "kernel of rank " + std::to_string(r));
      }
      if (Clock::now() > deadline) {
        hung_ = true;
        std::string text = "jax_megamoe: the kernel of rank " + std::to_string(r) +
                           " did not end within " + std::to_string(timeout_s + kEndSlack) +
                           " s: one of its waits has no limit.";
        for (uint32_t other = 0; other < ranks_.size(); ++other) {
          const auto failure = group_->failure(other, ranks_[other].args);
          if (failure) text += "\n" + failure->text;
        }
        throw std::runtime_error(text);
      }
      if (round > 2000) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

bool GpuRanks::collect_failures() {
  if (!group_->has_failed()) return false;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const auto failure = group_->failure(r, ranks_[r].args);
    failures_[r] = failure ? failure->text : "";
  }
  group_->reset();
  return true;
}

std::vector<double> GpuRanks::launch(const LaunchOptions& options, uint32_t repeats, bool flush) {
  const KernelVariant kernel = begin(options);
  SmHolder* const hold = holder(options);
  const auto runs = [&](uint32_t r) { return static_cast<int32_t>(r) != options.skip_rank; };
  std::vector<double> times;
  for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
    if (flush) flush_l2();
    group_->synchronize();
    if (hold != nullptr) hold->hold(options.held_sms, options.timeout_s + kEndSlack);
    bool gated = options.gate && can_gate_;
    if (gated) {
      ++gate_value_;
      for (uint32_t r = 0; r < ranks_.size() && gated; ++r) {
        const ScopedContext scope(group_->place(r).device);
        gated = driver().stream_wait_value32(ranks_[r].stream, gate_.address(), gate_value_,
                                             kStreamWaitValueGeq) == kSuccess;
      }
      if (!gated) can_gate_ = false;  // streams of this system cannot wait for memory
    }
    const auto open_gate = [&] {
      std::atomic_ref<uint32_t>(*gate_.host<uint32_t>())
          .store(gate_value_, std::memory_order_release);
    };
    try {
      for (uint32_t r = 0; r < ranks_.size(); ++r) {
        if (!runs(r)) continue;
        const ScopedContext scope(group_->place(r).device);
        check(driver().event_record(ranks_[r].start, ranks_[r].stream), "cuEventRecord");
        launch_rank(r, kernel);
        check(driver().event_record(ranks_[r].end, ranks_[r].stream), "cuEventRecord");
      }
    } catch (...) {
      open_gate();
      if (hold != nullptr) hold->release();
      throw;
    }
    open_gate();
    wait(options.timeout_s);
    if (hold != nullptr && !hold->release()) {
      group_->reset();
      throw std::runtime_error("jax_megamoe: hold: got a call that had not ended when " +
                               std::to_string(options.held_sms) + " SMs of GPU " +
                               std::to_string(options.held_device) +
                               " were let go; expected it to end while they are held. Leave it "
                               "more SMs, or raise timeout_s.");
    }
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      float milliseconds = std::numeric_limits<float>::quiet_NaN();
      if (runs(r)) {
        const ScopedContext scope(group_->place(r).device);
        check(driver().event_elapsed_time(&milliseconds, ranks_[r].start, ranks_[r].end),
              "cuEventElapsedTime");
      }
      times.push_back(1e3 * static_cast<double>(milliseconds));
    }
    if (collect_failures()) break;
    // A call without one of its ranks ends without a failure only if nobody waits for anybody; what
    // it left behind must not reach the next call.
    if (options.skip_rank >= 0) group_->reset();
  }
  return times;
}

double GpuRanks::launch_burst(const LaunchOptions& options, uint32_t calls) {
  const KernelVariant kernel = begin(options);
  group_->synchronize();
  const auto start = Clock::now();
  for (uint32_t call = 0; call < calls; ++call) {
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      const ScopedContext scope(group_->place(r).device);
      launch_rank(r, kernel);
    }
    if (group_->has_failed()) break;  // later calls would give up as well
  }
  // Each of the calls in the queue may use its whole time, but one that failed stops the others.
  wait(options.timeout_s + 1e-2 * calls);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  collect_failures();
  return seconds;
}

std::string GpuRanks::y(uint32_t rank) const {
  require(rank);
  return contents(ranks_[rank].y);
}

std::string GpuRanks::received(uint32_t rank) const {
  require(rank);
  return contents(ranks_[rank].received);
}

std::string GpuRanks::status(uint32_t rank) const {
  require(rank);
  return contents(ranks_[rank].status);
}

std::string GpuRanks::read(uint32_t rank, uint32_t region) const {
  require(rank);
  return group_->read(rank, region);
}

void GpuRanks::poison() {
  require(0);
  group_->poison();
  for (Rank& rank : ranks_) {
    if (rank.y.address() != 0) rank.y.fill(0xFF);
    rank.received.fill(0xFF);
    rank.status.fill(0xFF);
  }
}

}  // namespace jax_megamoe::harness
