// gpu_ranks.h: runs a group's kernels without JAX, for tests and measurements.
//
// R ranks run on G GPUs, R >= G: a rank has a stream of its own and a share of its GPU's SMs, so
// that one GPU can hold a whole group. Ranks of one GPU must not wait for a free SM, so their
// blocks together never exceed its SMs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/kernel.h"
#include "cuda/rank_group.h"
#include "harness/harness_kernels.h"

namespace jax_megamoe::harness {

// Host memory of an operand; copied. `data` null: not given.
struct HostArray {
  const void* data = nullptr;
  size_t num_bytes = 0;
};

struct LaunchOptions {
  int32_t tile = -1;  // -1: gpu::select_tile for the largest number of rows of a rank
  double timeout_s = 10;
  bool checked = false;
  Activation activation = Activation::kSwiglu;
  ActivationParams activation_params;
  int32_t skip_rank = -1;   // this rank's kernel is not launched
  int32_t fault_rank = -1;  // this rank loses its next signal to a counter of fault_region
  uint32_t fault_region = 0;
  bool gate = true;  // all ranks start together; false: as fast as they can be launched in turn
  // So many SMs of a GPU (an ordinal) run another kernel from before each call until all ranks'
  // kernels have ended.
  int32_t held_device = -1;
  uint32_t held_sms = 0;
};

class GpuRanks {
 public:
  // `layout` is gpu::layout_shape(); device_of_rank[r] is the GPU of rank r; ctas_per_rank = 0: its
  // SMs shared evenly. Throws std::invalid_argument, CudaError or std::runtime_error.
  GpuRanks(const MoeShape& layout, gpu::Granularity granularity,
           const std::vector<int>& device_of_rank, uint32_t ctas_per_rank, Toolchain toolchain,
           Build build);
  ~GpuRanks();

  const MoeShape& layout() const { return group_->layout(); }
  uint32_t num_ctas(uint32_t rank) const { return group_->place(rank).num_ctas; }

  // b13 and b2: FP32, or not given. All ranks have biases or none has.
  void set_weights(uint32_t rank, HostArray w13, HostArray w13_row_scale, HostArray w2,
                   HostArray w2_row_scale, HostArray b13, HostArray b2);
  void set_inputs(uint32_t rank, uint32_t num_rows, HostArray x, HostArray x_sf, HostArray topk_idx,
                  bool topk_idx_is_64bit, HostArray topk_weights,
                  std::optional<int32_t> num_tokens);

  uint32_t select_tile() const;
  // Compiles and loads, for biases if rank 0 has them; launch() does it too.
  void prepare(int32_t tile, Activation activation);

  // Runs the call `repeats` times. Returns [repeats][num_ranks] microseconds on the GPU, NaN for a
  // rank that was skipped. With flush_l2 the L2 holds other data before each call. Ends at the
  // first call that fails: see failure(). Afterwards all counters are as at first.
  std::vector<double> launch(const LaunchOptions& options, uint32_t repeats, bool flush_l2);
  // `calls` calls without waiting in between; returns seconds from the first launch to the end.
  double launch_burst(const LaunchOptions& options, uint32_t calls);

  std::string y(uint32_t rank) const;         // BF16 [num_rows][hidden]
  std::string received(uint32_t rank) const;  // int32 [E/R]
  std::string status(uint32_t rank) const;    // int32 [kNumStatusWords]
  std::string read(uint32_t rank, uint32_t region) const;
  std::string read_trace(uint32_t rank) const { return group_->read_trace(rank); }
  void poison();  // data regions and outputs: 0xFF
  // Of the last launch; empty: none.
  const std::string& failure(uint32_t rank) const { return failures_[rank]; }

 private:
  struct Rank {
    CUstream stream = nullptr;
    CUevent start = nullptr, end = nullptr;
    DeviceMemory w13, w13_row_scale, w2, w2_row_scale, b13, b2;
    DeviceMemory x, x_sf, topk_idx, topk_weights, num_tokens;
    DeviceMemory y, received, status;
    gpu::KernelArgs args{};
    bool has_weights = false, has_inputs = false;
  };

  void require(uint32_t rank) const;
  KernelVariant variant(int32_t tile, Activation activation) const;
  KernelVariant begin(const LaunchOptions& options);
  void launch_rank(uint32_t rank, const KernelVariant& kernel) const;
  void flush_l2();
  SmHolder* holder(const LaunchOptions& options);
  void wait(double timeout_s);
  bool collect_failures();

  std::unique_ptr<RankGroup> group_;
  std::vector<Device> devices_;  // each once
  gpu::Granularity granularity_;
  MoeShape shape_;
  Toolchain toolchain_;
  std::unique_ptr<KernelTable> kernels_;
  std::vector<Rank> ranks_;
  std::vector<std::string> failures_;
  MappedMemory gate_;  // uint32: streams wait for it to grow
  uint32_t gate_value_ = 0;
  bool can_gate_ = true;
  bool hung_ = false;
  std::vector<std::unique_ptr<L2Flush>> flushes_;  // of each device
  std::unique_ptr<SmHolder> holder_;               // of the device it was last asked for
};

}  // namespace jax_megamoe::harness
