// call_queue.h: brings the ranks of a call together and runs the calls of a group one by one.
//
// XLA runs one program on all devices of a group and calls the FFI handler once per device, on
// threads of a shared pool. A handler that waited for its peers there could starve the very thread
// that its peer needs. So handlers do not wait: they submit, and the last one to arrive makes the
// call ready. The group's own threads run it, and every rank is told when it is done.
//
// A call is identified by (run, site): the execution of the program and the call instruction in it.
// Within one execution a device enters a site again (in a loop) only after the previous time is
// done, so at most one call per (run, site) is open. Several calls of one program may arrive in
// different orders on different devices; each runs once it is complete.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/mega_moe.h"
#include "host/status.h"

namespace jax_megamoe::cpu {

using host::CallStatus;

// Called once per submitted rank, on a thread of its own: XLA continues the rank's program inside
// it, up to the next collective, which may block until other ranks have been told as well.
using CallDone = std::function<void(CallStatus, const std::string& message)>;

class CallQueue {
 public:
  CallQueue(const MoeShape& shape, uint32_t workers_per_rank);
  ~CallQueue();  // fails open calls and waits for the running one

  void submit(int64_t run, uint64_t site, uint32_t rank, const CallArgs& args, double timeout_s,
              CallDone done);

  // For tests and dumps; waits until no call is running.
  void with_idle_group(const std::function<void(MegaMoeGroup&)>& use);

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::vector<CallArgs> args;
    std::vector<CallDone> done;  // [num_ranks], empty: not arrived
    uint32_t num_arrived = 0;
    double timeout_s = 0;
    Clock::time_point deadline;
  };

  void thread_main();
  void run(Call& call);
  void expire_overdue_calls(std::unique_lock<std::mutex>& lock);

  MegaMoeGroup group_;
  std::mutex group_mutex_;  // held while the group runs a call or is inspected

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int64_t, uint64_t>, Call> open_;
  std::deque<Call> ready_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace jax_megamoe::cpu
