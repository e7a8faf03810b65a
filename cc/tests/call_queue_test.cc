// call_queue_test.cc: ranks that arrive in any order from many threads, late, not at all, or while
// the queue closes. Runs under ThreadSanitizer and AddressSanitizer.
#include "cpu/call_queue.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "tests/check.h"
#include "tests/operands.h"

namespace jax_megamoe::cpu {
namespace {

constexpr double kTimeoutSeconds = 60;

// One call's operands for all ranks, and what became of it.
struct TestCall {
  std::vector<cpu::Operands> ranks;
  std::atomic<uint32_t> num_done{0};
  std::atomic<uint32_t> num_ok{0};
  std::mutex mutex;
  std::string message;

  TestCall(const MoeShape& shape, std::mt19937& rng) {
    for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
      ranks.push_back(cpu::make_operands(shape, rng, 5, 0));
    }
  }
  CallDone done() {
    return [this](CallStatus status, const std::string& text) {
      if (status == CallStatus::kOk) ++num_ok;
      {
        std::lock_guard<std::mutex> lock(mutex);
        message = text;
      }
      ++num_done;
    };
  }
  void wait(uint32_t num_ranks) {
    while (num_done < num_ranks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

MoeShape test_shape() { return MoeShape{4, 4, 2, 128, 128, 8, cpu::kBlockM, 1}; }

// Four threads, one a rank, submit the same calls in four different orders.
void check_any_order(std::mt19937& rng) {
  const MoeShape shape = test_shape();
  CallQueue queue(shape, 1);
  std::vector<std::unique_ptr<TestCall>> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(std::make_unique<TestCall>(shape, rng));
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    std::vector<uint64_t> order(calls.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    threads.emplace_back([&, rank, order] {
      for (const uint64_t site : order) {
        TestCall& call = *calls[site];
        queue.submit(7, site, rank, cpu::args_of(call.ranks[rank], shape), kTimeoutSeconds,
                     call.done());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& call : calls) {
    call->wait(shape.num_ranks);
    CHECK(call->num_ok == shape.num_ranks);
  }
}

void check_missing_rank(std::mt19937& rng) {
  const MoeShape shape = test_shape();
  CallQueue queue(shape, 1);
  TestCall call(shape, rng);
  for (const uint32_t rank : {0u, 1u, 3u}) {
    queue.submit(1, 1, rank, cpu::args_of(call.ranks[rank], shape), 0.1, call.done());
  }
  call.wait(3);
  CHECK(call.num_ok == 0);
  CHECK(call.message.find("missing rank 2") != std::string::npos);
}

void check_rank_twice(std::mt19937& rng) {
  const MoeShape shape = test_shape();
  CallQueue queue(shape, 1);
  TestCall call(shape, rng), again(shape, rng);
  queue.submit(1, 1, 0, cpu::args_of(call.ranks[0], shape), kTimeoutSeconds, call.done());
  queue.submit(1, 1, 0, cpu::args_of(again.ranks[0], shape), kTimeoutSeconds, again.done());
  again.wait(1);
  CHECK(again.message.find("rank 0 entered a call a second time") != std::string::npos);
  for (const uint32_t rank : {1u, 2u, 3u}) {
    queue.submit(1, 1, rank, cpu::args_of(call.ranks[rank], shape), kTimeoutSeconds, call.done());
  }
  call.wait(4);
  CHECK(call.num_ok == 4);
}

// Ready calls finish; open ones are told.
void check_closing(std::mt19937& rng) {
  const MoeShape shape = test_shape();
  auto queue = std::make_unique<CallQueue>(shape, 2);
  TestCall complete(shape, rng), open(shape, rng);
  queue->submit(1, 2, 0, cpu::args_of(open.ranks[0], shape), kTimeoutSeconds, open.done());
  for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    queue->submit(1, 1, rank, cpu::args_of(complete.ranks[rank], shape), kTimeoutSeconds,
                  complete.done());
  }
  queue.reset();
  complete.wait(shape.num_ranks);
  open.wait(1);
  CHECK(complete.num_ok == shape.num_ranks);
  CHECK(open.num_ok == 0 && open.message.find("closed") != std::string::npos);
}

}  // namespace
}  // namespace jax_megamoe::cpu

int main() {
  std::mt19937 rng(11);
  for (int turn = 0; turn < 5; ++turn) {
    jax_megamoe::cpu::check_any_order(rng);
    jax_megamoe::cpu::check_closing(rng);
  }
  jax_megamoe::cpu::check_missing_rank(rng);
  jax_megamoe::cpu::check_rank_twice(rng);
  std::puts("call_queue_test: passed");
}
