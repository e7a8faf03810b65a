#include "cpu/call_queue.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

namespace jax_megamoe::cpu {
namespace {

// Tells one rank. Each rank gets a thread: with one for all, the first rank's program could block
// in a collective before the second rank heard that its call was done.
void notify(CallDone done, CallStatus status, std::string message) {
  std::thread([done = std::move(done), status, message = std::move(message)] {
#if defined(__x86_64__)
    // XLA's own threads flush denormals; the rest of the program must not depend on who runs it.
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
#endif
    done(status, message);
  }).detach();
}

}  // namespace

CallQueue::CallQueue(const MoeShape& shape, uint32_t workers_per_rank)
    : group_(shape, workers_per_rank), thread_(&CallQueue::thread_main, this) {}

CallQueue::~CallQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CallQueue::submit(int64_t run, uint64_t site, uint32_t rank, const CallArgs& args,
                       double timeout_s, CallDone done) {
  const uint32_t num_ranks = group_.shape().num_ranks;
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopping_) {
    lock.unlock();
    done(CallStatus::kUnavailable, "jax_megamoe: the symmetric buffer was closed.");
    return;
  }
  Call& call = open_[{run, site}];
  if (call.done.empty()) {
    call.args.resize(num_ranks);
    call.done.resize(num_ranks);
    call.timeout_s = timeout_s;
    call.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(timeout_s));
  }
  if (call.done[rank]) {
    lock.unlock();
    done(
        CallStatus::kUnavailable,
        "jax_megamoe: rank " + std::to_string(rank) +
            " entered a call a second time before its first time was done. Two devices of the mesh "
            "must not share a rank.");
    return;
  }
  call.args[rank] = args;
  call.done[rank] = std::move(done);
  if (++call.num_arrived == num_ranks) {
    ready_.push_back(std::move(call));
    open_.erase({run, site});
  }
  lock.unlock();
  changed_.notify_all();
}

void CallQueue::with_idle_group(const std::function<void(MegaMoeGroup&)>& use) {
  std::lock_guard<std::mutex> lock(group_mutex_);
  use(group_);
}

void CallQueue::thread_main() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!ready_.empty()) {
      Call call = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      run(call);
      lock.lock();
      continue;
    }
    if (stopping_) break;
    expire_overdue_calls(lock);
    if (!ready_.empty() || stopping_) continue;
    if (open_.empty()) {
      changed_.wait(lock);
    } else {
      auto next = Clock::time_point::max();
      for (const auto& [key, call] : open_) next = std::min(next, call.deadline);
      changed_.wait_until(lock, next);
    }
  }
  for (auto& [key, call] : open_) {
    for (CallDone& done : call.done) {
      if (done) {
        notify(std::move(done), CallStatus::kUnavailable,
               "jax_megamoe: the symmetric buffer was closed.");
      }
    }
  }
}

void CallQueue::run(Call& call) {
  CallResult result;
  {
    std::lock_guard<std::mutex> lock(group_mutex_);
    try {
      result = group_.run(call.args, call.timeout_s);
    } catch (const std::exception& error) {  // no thread or no memory to be had
      result.failure = std::string("jax_megamoe: the call could not be started: ") + error.what();
    }
  }
  CallStatus status = CallStatus::kOk;
  std::string message;
  if (!result.timeout.empty()) {
    status = CallStatus::kDeadlineExceeded;
    message = result.timeout;
  } else if (!result.failure.empty()) {
    status = CallStatus::kUnavailable;
    message = result.failure;
  } else if (!result.refusal.empty()) {
    status = CallStatus::kInvalidArgument;
    message = result.refusal;
  }
  for (CallDone& done : call.done) notify(std::move(done), status, message);
}

void CallQueue::expire_overdue_calls(std::unique_lock<std::mutex>& lock) {
  std::vector<Call> overdue;
  const auto now = Clock::now();
  for (auto it = open_.begin(); it != open_.end();) {
    if (now >= it->second.deadline) {
      overdue.push_back(std::move(it->second));
      it = open_.erase(it);
    } else {
      ++it;
    }
  }
  if (overdue.empty()) return;
  lock.unlock();
  for (Call& call : overdue) {
    std::string missing;
    for (size_t rank = 0; rank < call.done.size(); ++rank) {
      if (!call.done[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    char head[64];
    std::snprintf(head, sizeof(head), "jax_megamoe: timed out after %.3g s: ", call.timeout_s);
    const std::string text =
        head + std::string("stage arrival: ranks entered: wanted ") +
        std::to_string(call.done.size()) + ", seen " + std::to_string(call.num_arrived) +
        "; missing rank " + missing +
        ". Every device of the expert-parallel axis has to run the call. With jaxlib < 0.12 "
        "XLA:CPU "
        "itself stalls when more than 32 multi-device programs are dispatched without waiting for "
        "results: call jax_megamoe.use_virtual_cpu_devices(n) before JAX starts, or wait more "
        "often. If a rank is only slow, raise MegaMoEConfig.timeout_s.";
    for (CallDone& done : call.done) {
      if (done) notify(std::move(done), CallStatus::kDeadlineExceeded, text);
    }
  }
  lock.lock();
}

}  // namespace jax_megamoe::cpu
