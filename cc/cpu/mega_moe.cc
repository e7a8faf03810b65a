#include "cpu/mega_moe.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "cpu/combine.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "cpu/linear1.h"
#include "cpu/linear2.h"
#include "cpu/wait.h"
#include "report/failure_text.h"

namespace jax_megamoe::cpu {
namespace {

// Which barrier of a call is which.
enum GridBarrier : uint32_t { kInputStaged = 1, kBlocksDone, kResultsArrived, kCombined };
enum RankBarrier : uint32_t { kRowsListed = 1, kResultsPushed, kWorkspaceReady };
static_assert(kCombined == kGridBarriersPerCall && kWorkspaceReady == kRankBarriersPerCall);

// The dispatch thread: everything that talks to other ranks except linear 2's push.
void dispatch_role(const RankView& view) {
  stage_input(view);
  if (!grid_barrier(view, kInputStaged)) return;
  dispatch_publish(view);
  if (!rank_barrier(view, kRowsListed)) return;
  if (!dispatch_pull(view)) return;
  if (!grid_barrier(view, kBlocksDone)) return;
  if (!rank_barrier(view, kResultsPushed)) return;
  if (!grid_barrier(view, kResultsArrived)) return;
  combine(view);
  clear_counters(view);
  if (!grid_barrier(view, kCombined)) return;
  if (!rank_barrier(view, kWorkspaceReady)) return;
  ++*view.local<Region::call_epoch>();
}

void report_counts(const RankView& view, const std::vector<uint32_t>& rows_of_expert) {
  uint32_t total = 0;
  for (size_t expert = 0; expert < rows_of_expert.size(); ++expert) {
    view.args.received[expert] = static_cast<int32_t>(rows_of_expert[expert]);
    total += rows_of_expert[expert];
  }
  const auto rows = [&](uint32_t expert) { return rows_of_expert[expert]; };
  const uint32_t blocks = num_pool_blocks(view.shape, rows);
  view.args.status[kStatusReceivedRows] = static_cast<int32_t>(total);
  view.args.status[kStatusPoolBlocks] = static_cast<int32_t>(blocks);
  view.args.status[kStatusRingLaps] =
      static_cast<int32_t>(ceil_div(blocks, view.shape.ring_blocks));
}

// A math worker: walks the scheduler's blocks.
void math_role(RankView view, MathWorker& math) {
  stage_input(view);
  if (!grid_barrier(view, kInputStaged)) return;
  std::vector<uint32_t> counts;
  if (!receive_counts(view, counts)) return;
  std::vector<uint32_t> rows_of_expert(view.shape.num_local_experts());
  for (size_t i = 0; i < counts.size(); ++i) rows_of_expert[i % rows_of_expert.size()] += counts[i];
  if (view.worker == 0) report_counts(view, rows_of_expert);
  math.rows_pool_block = -1;
  const auto rows = [&](uint32_t expert) { return rows_of_expert[expert]; };
  const ItemCounts items = {view.shape.linear1_n_blocks() / kL1ItemBlocks,
                            view.shape.linear2_n_blocks()};
  const bool finished = for_each_block(
      view.shape, items, view.worker, view.num_workers, rows, [&](const Block& block) {
        view.role = block.phase == Phase::kLinear1 ? "linear1" : "linear2";
        return block.phase == Phase::kLinear1 ? linear1(view, block, math)
                                              : linear2(view, block, math);
      });
  if (!finished) return;
  view.role = "combine";
  if (!grid_barrier(view, kBlocksDone)) return;
  if (!grid_barrier(view, kResultsArrived)) return;
  combine(view);
  grid_barrier(view, kCombined);
}

std::string out_of_range_text(const MoeShape& shape, const CallArgs& args, uint32_t rank,
                              uint32_t count, uint64_t slot) {
  const long long expert = args.topk_idx_is_64bit
                               ? static_cast<const int64_t*>(args.topk_idx)[slot]
                               : static_cast<const int32_t*>(args.topk_idx)[slot];
  return report::out_of_range_text(shape, rank, expert, slot, count);
}

}  // namespace

MegaMoeGroup::MegaMoeGroup(const MoeShape& shape, uint32_t workers_per_rank)
    : shape_(shape),
      layout_(shape),
      workers_per_rank_(workers_per_rank),
      num_tokens_(shape.num_ranks) {
  selected_isa();  // throws here rather than in a worker
  for (uint32_t rank = 0; rank < shape_.num_ranks; ++rank) {
    void* base = mmap(nullptr, layout_.num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      for (void* mapped : bases_) munmap(mapped, layout_.num_bytes);
      throw std::bad_alloc();
    }
    bases_.push_back(base);
  }
}

MegaMoeGroup::~MegaMoeGroup() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (void* base : bases_) munmap(base, layout_.num_bytes);
}

void MegaMoeGroup::start_threads() {
  const uint32_t per_rank = workers_per_rank_ + 1;
  for (size_t i = threads_.size(); i < size_t{shape_.num_ranks} * per_rank; ++i) {
    threads_.emplace_back(&MegaMoeGroup::thread_main, this, static_cast<uint32_t>(i / per_rank),
                          static_cast<uint32_t>(i % per_rank), generation_);
  }
}

template <class Predicate>
void MegaMoeGroup::fill_regions(int byte, const Predicate& selected) {
  for (void* base : bases_) {
    for (const RegionInfo& region : layout_.regions) {
      if (selected(region.lifetime)) {
        std::memset(static_cast<char*>(base) + region.offset, byte, region.num_bytes());
      }
    }
  }
}

CallResult MegaMoeGroup::run(const std::vector<CallArgs>& args, double timeout_s) {
  CallResult result;
  for (uint32_t rank = 0; rank < shape_.num_ranks; ++rank) {
    // A refused rank still takes part, with no tokens, so that its peers' calls end.
    const int64_t tokens =
        args[rank].num_tokens == nullptr ? int64_t{args[rank].num_rows} : *args[rank].num_tokens;
    const bool valid = tokens >= 0 && tokens <= int64_t{args[rank].num_rows};
    num_tokens_[rank] = valid ? static_cast<uint32_t>(tokens) : 0;
    if (!valid && result.refusal.empty()) {
      result.refusal = report::num_tokens_text(rank, tokens, args[rank].num_rows);
    }
  }

  std::unique_lock<std::mutex> lock(mutex_);
  start_threads();
  args_ = &args;
  call_ = std::make_unique<CallState>();
  call_->timeout_s = timeout_s;
  counters_ = std::make_unique<RankCounters[]>(shape_.num_ranks);
  num_running_ = static_cast<uint32_t>(threads_.size());
  ++generation_;
  start_.notify_all();
  done_.wait(lock, [&] { return num_running_ == 0; });
  args_ = nullptr;

  if (!call_->failure.empty()) {
    (call_->timed_out ? result.timeout : result.failure) = call_->failure;
    // The protocol stopped half-way: put every control word back to its first state.
    fill_regions(0, [](Lifetime lifetime) { return lifetime != Lifetime::kData; });
    return result;
  }
  for (uint32_t rank = 0; rank < shape_.num_ranks; ++rank) {
    const uint32_t count = counters_[rank].out_of_range.load();
    args[rank].status[kStatusOutOfRange] = static_cast<int32_t>(count);
    if (count > 0 && args[rank].checked && result.refusal.empty()) {
      result.refusal = out_of_range_text(shape_, args[rank], rank, count,
                                         counters_[rank].first_out_of_range.load());
    }
  }
  return result;
}

void MegaMoeGroup::thread_main(uint32_t rank, uint32_t worker, uint64_t seen_generation) {
  std::unique_ptr<MathWorker> math;
  if (worker < workers_per_rank_) math = std::make_unique<MathWorker>(shape_);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return stopping_ || generation_ != seen_generation; });
      if (stopping_) return;
      seen_generation = generation_;
    }
    run_role(rank, worker, math.get());
    std::lock_guard<std::mutex> lock(mutex_);
    if (--num_running_ == 0) done_.notify_one();
  }
}

void MegaMoeGroup::run_role(uint32_t rank, uint32_t worker, MathWorker* math) {
  const RankView view = {shape_,
                         layout_,
                         bases_.data(),
                         rank,
                         workers_per_rank_,
                         worker,
                         math == nullptr ? "dispatch" : "linear1",
                         (*args_)[rank],
                         num_tokens_[rank],
                         *call_,
                         counters_[rank],
                         fault_};
  try {
    if (math == nullptr) {
      dispatch_role(view);
    } else {
      math_role(view, *math);
    }
  } catch (const std::exception& error) {
    call_->fail(std::string("jax_megamoe: rank ") + std::to_string(rank) + ", role " + view.role +
                ": " + error.what());
  }
}

void MegaMoeGroup::poison() {
  fill_regions(0xFF, [](Lifetime lifetime) { return lifetime == Lifetime::kData; });
}

void MegaMoeGroup::arm_fault(uint32_t region, uint32_t rank) {
  fault_.rank.store(rank);
  fault_.region.store(region);
}

}  // namespace jax_megamoe::cpu
