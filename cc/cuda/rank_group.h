// rank_group.h: the memory of one expert-parallel group on GPUs, and what its kernels report.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "gpu/interface/kernel_args.h"
#include "gpu/sm90/tuning.h"
#include "protocol/workspace.h"

namespace jax_megamoe::cuda {

struct RankPlace {
  Device device;
  uint32_t num_ctas;  // blocks of a launch: this rank's share of the SMs
};

// Why a call failed, for all of its ranks.
struct Failure {
  bool timed_out = false;  // else an operand was refused
  std::string text;
};

class RankGroup {
 public:
  // `layout` is gpu::layout_shape(). Opens links between all devices and allocates, zeroed.
  RankGroup(const MoeShape& layout, std::vector<RankPlace> places, bool trace);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  const MoeShape& layout() const { return layout_; }
  uint32_t num_ranks() const { return layout_.num_ranks; }
  const RankPlace& place(uint32_t rank) const { return ranks_[rank].place; }

  // Sets everything in `args` that belongs to the buffer: addresses, rank, no fault.
  void fill_args(uint32_t rank, gpu::KernelArgs& args) const;

  bool has_failed(uint32_t rank) const;  // reads host memory only
  bool has_failed() const;
  bool has_timed_out() const;  // of any rank: the protocol has stopped half-way
  // One rank's report, or nothing. `args` has the limits of the call.
  std::optional<Failure> failure(uint32_t rank, const gpu::KernelArgs& args) const;
  // The reports of all ranks, the one nearest to the cause first. There has to be one.
  Failure failure(const std::vector<gpu::KernelArgs>& args) const;

  // Makes every wait of running kernels give up. Does not wait for the kernels.
  void abort() const;
  // Waits until all devices are idle.
  void synchronize() const;
  // All counters, abort flags and records as at first. No kernel may be running.
  void reset() const;
  // The next launch of `rank` with a fault_region serves that fault. No kernel may be running.
  void arm_fault(uint32_t rank) const;
  // Fills data regions with 0xFF. No kernel may be running.
  void poison() const;
  std::string read(uint32_t rank, uint32_t region) const;
  std::string read_trace(uint32_t rank) const;  // as kernel_args.h lays it out; empty: no trace
  void clear_trace() const;
  // A kernel may never end: keep the memory it may write to for the life of the process.
  void leak();

 private:
  struct Rank {
    RankPlace place;
    DeviceMemory symmetric;
    DeviceMemory rank_control;
    DeviceMemory scratch;
    DeviceMemory trace;
    MappedMemory host;  // HostPage
    CUstream control = nullptr;
  };
  // What a rank's kernel and the host exchange.
  struct HostPage {
    gpu::FailureRecord failure;
    uint32_t abort_value;  // copied to RankControl's kFlags
  };

  const MoeShape layout_;
  const WorkspaceLayout regions_;
  std::vector<Rank> ranks_;
};

}  // namespace jax_megamoe::cuda
