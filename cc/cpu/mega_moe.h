// mega_moe.h: one expert-parallel group of the CPU back end: its buffers, its threads, its calls.
#pragma once

#include <condition_variable>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/math_worker.h"
#include "cpu/rank.h"

namespace jax_megamoe::cpu {

// What became of a call, for all of its ranks: if one rank's program went on and met a collective
// while another's had stopped, it would wait there forever.
struct CallResult {
  std::string timeout;  // a wait failed; empty: none did
  std::string refusal;  // a rank's operand was refused; empty: none was
  std::string failure;  // no memory or no thread was to be had; empty: they were
};

class MegaMoeGroup {
 public:
  // `shape.block_m` is kBlockM. Reserves one buffer per rank; pages are taken as they are touched.
  // Throws std::bad_alloc if the address space is not to be had.
  MegaMoeGroup(const MoeShape& shape, uint32_t workers_per_rank);
  ~MegaMoeGroup();
  MegaMoeGroup(const MegaMoeGroup&) = delete;
  MegaMoeGroup& operator=(const MegaMoeGroup&) = delete;

  // Runs one call; args[r] are rank r's operands. A wait of more than `timeout_s` fails the call.
  // One call at a time.
  CallResult run(const std::vector<CallArgs>& args, double timeout_s);

  const MoeShape& shape() const { return shape_; }
  const WorkspaceLayout& layout() const { return layout_; }
  uint32_t workers_per_rank() const { return workers_per_rank_; }
  void* base(uint32_t rank) const { return bases_[rank]; }

  // Fills the data regions (written before they are read in every call) with 0xFF bytes. For tests;
  // no call may be running.
  void poison();
  void arm_fault(uint32_t region, uint32_t rank);

 private:
  void thread_main(uint32_t rank, uint32_t worker, uint64_t seen_generation);
  void run_role(uint32_t rank, uint32_t worker, MathWorker* math);
  void start_threads();  // those that do not run yet; throws if one cannot be had
  template <class Predicate>
  void fill_regions(int byte, const Predicate& selected);

  const MoeShape shape_;
  const WorkspaceLayout layout_;
  const uint32_t workers_per_rank_;
  std::vector<void*> bases_;
  Fault fault_;

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  uint64_t generation_ = 0;  // calls started; threads run when it moves
  uint32_t num_running_ = 0;
  bool stopping_ = false;
  const std::vector<CallArgs>* args_ = nullptr;
  std::vector<uint32_t> num_tokens_;
  std::unique_ptr<CallState> call_;
  std::unique_ptr<RankCounters[]> counters_;
  std::vector<std::thread> threads_;
};

}  // namespace jax_megamoe::cpu
