// The host side of the GPU back end against a fake driver: launches, failures, recovery.
#include <bit>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cuda/gpu_buffer.h"
#include "harness/gpu_ranks.h"
#include "report/failure_text.h"
#include "tests/check.h"
#include "tests/fake_driver.h"

using namespace jax_megamoe;
using cuda::Build;
using cuda::GpuBuffer;
using harness::GpuRanks;
using harness::LaunchOptions;
using host::CallStatus;

namespace {

constexpr uint32_t kRanks = 3;
constexpr double kTimeout = 0.2;  // of waits that are in vain
constexpr double kPatience = 60;  // of the others, on a machine that has other work
constexpr uint16_t kNan = 0x7FC0;
MoeShape layout;

#define CHECK_THROWS(expression)      \
  do {                                \
    bool thrown = false;              \
    try {                             \
      (void)(expression);             \
    } catch (const std::exception&) { \
      thrown = true;                  \
    }                                 \
    CHECK(thrown);                    \
  } while (0)

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A protocol of one barrier: tells all ranks, waits for all ranks, writes a result.
void barrier_kernel(const gpu::KernelArgs& args) {
  const WorkspaceLayout regions(layout);
  std::atomic_ref<uint32_t> abort(args.rank_control[gpu::kFlags]);
  auto* epoch = regions.ptr<Region::call_epoch>(args.peer_buffer[args.rank]);
  const uint64_t wanted = *epoch + 1;
  const bool lost = args.fault_region == static_cast<uint32_t>(Region::rank_barrier) &&
                    args.rank_control[gpu::kServedFaults]++ == 0;
  for (uint32_t peer = 0; peer < layout.num_ranks && !lost; ++peer) {
    std::atomic_ref<uint64_t>(regions.ptr<Region::rank_barrier>(args.peer_buffer[peer])[args.rank])
        .fetch_add(1);
  }
  const auto report = [&](gpu::FailureKind kind, uint32_t index, uint64_t seen, uint32_t bits) {
    if (abort.fetch_or(gpu::kFailed | bits) & gpu::kFailed) return;
    args.failure->rank = args.rank;
    args.failure->sm = 7;
    args.failure->role = static_cast<uint32_t>(gpu::Role::kDispatch);
    args.failure->region = static_cast<uint32_t>(Region::rank_barrier);
    args.failure->index = index;
    args.failure->wanted = wanted;
    args.failure->seen = seen;
    std::atomic_ref<uint32_t>(args.failure->kind).store(static_cast<uint32_t>(kind));
  };
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(args.timeout_ns);
  for (uint32_t peer = 0; peer < layout.num_ranks; ++peer) {
    std::atomic_ref<uint64_t> word(
        regions.ptr<Region::rank_barrier>(args.peer_buffer[args.rank])[peer]);
    while (word.load() < wanted && !(abort.load() & gpu::kAborted)) {
      if (std::chrono::steady_clock::now() > deadline) {
        report(gpu::FailureKind::kTimeout, peer, word.load(), gpu::kAborted);
      }
      std::this_thread::yield();
    }
  }
  if (args.num_tokens != nullptr && *args.num_tokens < 0) {
    report(gpu::FailureKind::kNumTokens, 0, static_cast<uint32_t>(*args.num_tokens), 0);
  }
  const bool failed = abort.load() & gpu::kFailed;
  for (uint64_t i = 0; i < uint64_t{args.num_rows} * layout.hidden; ++i) {
    args.y[i] = failed ? kNan : static_cast<uint16_t>(args.rank + 1);
  }
  if (!(abort.load() & gpu::kAborted)) ++*epoch;
}

const cuda::Toolchain kToolchain = {"", "",
                                    [](const cuda::KernelConfig&) { return std::string("cubin"); }};

// The first `biased` ranks get biases.
void set_operands(GpuRanks& ranks, uint32_t num_rows, uint32_t biased = 0) {
  const uint64_t e = layout.num_local_experts(), h = layout.hidden, i = layout.intermediate;
  const uint64_t chunk = gpu::weight_chunk_bytes(gpu::Granularity::k128);
  const std::vector<uint8_t> bytes(e * 2 * i * h + h * 64);
  const auto part = [&](uint64_t size) { return harness::HostArray{bytes.data(), size}; };
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.set_weights(rank, part(e * 2 * i * h / (128 * 128) * chunk), part(e * 2 * i),
                      part(e * i * h / (128 * 128) * chunk), part(e * h),
                      rank < biased ? part(e * 2 * i * 4) : harness::HostArray{},
                      rank < biased ? part(e * h * 4) : harness::HostArray{});
    ranks.set_inputs(rank, num_rows, part(num_rows * h * 2), {}, part(num_rows * layout.top_k * 4),
                     false, part(num_rows * layout.top_k * 4), std::nullopt);
  }
}

uint16_t first(const std::string& y) {
  return static_cast<uint16_t>(static_cast<uint8_t>(y[0]) | static_cast<uint8_t>(y[1]) << 8);
}

void test_ranks() {
  GpuRanks ranks(layout, gpu::Granularity::k128, {0, 1, 1}, 0, kToolchain, Build::kPlain);
  CHECK(ranks.num_ctas(0) == fake::kNumSms && ranks.num_ctas(1) == fake::kNumSms / 2);
  set_operands(ranks, 4);
  LaunchOptions options;
  options.timeout_s = kPatience;
  const std::vector<double> times = ranks.launch(options, 3, false);
  CHECK(times.size() == 3 * kRanks && times[0] == 250);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    CHECK(first(ranks.y(rank)) == rank + 1);
    CHECK(ranks.failure(rank).empty());
  }
  CHECK(ranks.launch_burst(options, 50) > 0);
  const std::string epochs = ranks.read(2, static_cast<uint32_t>(Region::call_epoch));
  CHECK(epochs[0] == 53);

  options.skip_rank = 1;
  options.timeout_s = kTimeout;
  CHECK(std::isnan(ranks.launch(options, 2, false)[1]));
  CHECK(contains(ranks.failure(0),
                 "timed out after 0.2 s: rank 0, SM 7, role dispatch waited for "
                 "rank_barrier[1]"));
  CHECK(contains(ranks.failure(2), "here rank 1"));
  CHECK(first(ranks.y(0)) == kNan);
  options.skip_rank = -1;
  options.timeout_s = kPatience;
  ranks.poison();
  ranks.launch(options, 1, false);
  CHECK(ranks.failure(0).empty() && first(ranks.y(0)) == 1);

  for (int round = 0; round < 2; ++round) {  // a served fault can be armed again
    options.fault_rank = 2;
    options.timeout_s = kTimeout;
    options.fault_region = static_cast<uint32_t>(Region::rank_barrier);
    CHECK(ranks.launch(options, 5, false).size() == kRanks);
    CHECK(contains(ranks.failure(1), "rank_barrier[2]"));
    options.fault_rank = -1;
    options.timeout_s = kPatience;
    options.gate = false;
    CHECK(ranks.launch(options, 2, false).size() == 2 * kRanks);
    CHECK(ranks.failure(1).empty());
  }
  // Biases on all ranks, or on none.
  set_operands(ranks, 4, kRanks);
  ranks.launch(options, 1, false);
  set_operands(ranks, 4, 1);
  try {
    ranks.launch(options, 1, false);
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(contains(error.what(), "biases: got them on rank 0 and none on rank 1"));
  }
}

void test_refusals() {
  const std::string scales = report::unequal_scales_text(2, 7, 5, 120, 121, 128);
  CHECK(contains(scales, "got scale byte 121 at place 5 of token 7 on rank 2; expected 120"));
  CHECK(contains(scales, "activation_granularity=128") && contains(scales, "(x, 128)"));
  CHECK(contains(report::unequal_scales_text(0, 0, 1, 2, 3, 0), "(x, 'row')"));
  CHECK_THROWS(GpuRanks(layout, gpu::Granularity::k128, {0, 1}, 0, kToolchain, Build::kPlain));
  CHECK_THROWS(GpuRanks(layout, gpu::Granularity::k128, {0, 0, 0}, 4, kToolchain, Build::kPlain));
  CHECK_THROWS(GpuRanks(layout, gpu::Granularity::k128, {0, 1, 9}, 0, kToolchain, Build::kPlain));
  fake::capability_major = 8;
  CHECK_THROWS(GpuRanks(layout, gpu::Granularity::k128, {0, 1, 2}, 0, kToolchain, Build::kPlain));
  fake::capability_major = 9;
  fake::linked = false;
  try {
    GpuRanks(layout, gpu::Granularity::k128, {0, 2, 1}, 0, kToolchain, Build::kPlain);
    CHECK(false);
  } catch (const cuda::CudaError& error) {
    CHECK(contains(error.what(), "no direct link from GPU 0 (fake) to GPU 2 (fake)"));
  }
  fake::linked = true;
  MoeShape large = layout;
  large.max_tokens = 1 << 20;
  large = gpu::layout_shape(large, gpu::Granularity::k128, 0);
  try {
    GpuRanks(large, gpu::Granularity::k128, {0, 2, 1}, 0, kToolchain, Build::kPlain);
    CHECK(false);
  } catch (const cuda::CudaError& error) {
    CHECK(error.code == cuda::kErrorOutOfMemory);
    CHECK(contains(error.what(), "XLA_PYTHON_CLIENT_MEM_FRACTION"));
  }
}

// What XLA does: one stream per device, all ranks launch with the same run.
struct Program {
  std::shared_ptr<GpuBuffer> buffer;
  cuda::CUstream streams[kRanks];
  std::vector<uint16_t> y[kRanks];
  int32_t num_tokens = 0;
  double timeout_s = kPatience;

  explicit Program(std::shared_ptr<GpuBuffer> b) : buffer(std::move(b)) {
    fake::current = reinterpret_cast<cuda::CUcontext>(uintptr_t{1});
    for (auto& stream : streams) cuda::driver().stream_create(&stream, 0);
    for (auto& rows : y) rows.resize(layout.hidden);
  }
  cuda::LaunchResult launch(uint32_t rank, int64_t run, const cuda::KernelVariant& kernel = {}) {
    fake::current = reinterpret_cast<cuda::CUcontext>(uintptr_t{rank} + 1);
    gpu::KernelArgs args{};
    args.num_rows = 1;
    args.y = y[rank].data();
    args.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    if (num_tokens != 0) args.num_tokens = &num_tokens;
    bool captured = false;
    const auto result = buffer->launch({0, rank}, {run, kernel, streams[rank]}, args, &captured);
    CHECK(captured == (fake::capturing && result.status == CallStatus::kOk));
    return result;
  }
  bool run_all(int64_t run) {
    bool ok = true;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      ok &= launch(rank, run).status == CallStatus::kOk;
    wait();
    return ok;
  }
  void wait() {
    for (auto& stream : streams) fake::as_stream(stream)->wait();
  }
  ~Program() {
    wait();
    for (auto& stream : streams) cuda::driver().stream_destroy(stream);
  }
};

void expect_report() {
  const auto text = cuda::wait_for_report();
  CHECK(text && (contains(*text, "rank_barrier[") || contains(*text, "num_tokens")));
}

// Of another back end.
class OtherBuffer : public host::SymmetricBuffer {};

void test_buffer() {
  const std::string key = "fake";
  const cuda::KernelWish early(key, {0});  // a program that was compiled before the buffer existed
  host::register_buffer(std::make_shared<GpuBuffer>(key, layout, gpu::Granularity::k128,
                                                    std::vector<std::vector<int32_t>>{{0, 1, 2}},
                                                    kToolchain));
  const auto buffer = host::find_buffer_of<GpuBuffer>(key);
  CHECK(buffer != nullptr && host::find_buffer_of<OtherBuffer>(key) == nullptr);
  const int loads = fake::loads;
  const cuda::KernelWish again(key, {0});
  CHECK(fake::loads == loads);
  {
    Program program(buffer);
    for (int64_t run = 1; run <= 20; ++run) CHECK(program.run_all(run));
    CHECK(program.y[2][0] == 3);
    CHECK(program.launch(0, 20, {1}).status == CallStatus::kUnavailable);

    // Kernels of another activation are loaded on top, by whoever wishes for them.
    const cuda::KernelVariant situ = {0, Activation::kSitu, true};
    const auto missing = program.launch(0, 20, situ);
    CHECK(missing.status == CallStatus::kUnavailable);
    CHECK(contains(missing.message, "no kernel with tile 0, activation situ, biases"));
    const cuda::KernelWish other(key, situ);
    CHECK(fake::loads == loads + static_cast<int>(kRanks));
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      CHECK(program.launch(rank, 20, situ).status == CallStatus::kOk);
    }
    program.wait();

    // A rank is late: its program fails, the next one runs.
    program.timeout_s = kTimeout;
    CHECK(program.launch(0, 21).status == CallStatus::kOk);
    CHECK(program.launch(2, 21).status == CallStatus::kOk);
    program.timeout_s = kPatience;
    expect_report();
    program.wait();
    CHECK(program.y[0][0] == kNan);
    const auto late = program.launch(1, 21);
    CHECK(late.status == CallStatus::kDeadlineExceeded && contains(late.message, "here rank 1"));
    CHECK(buffer->take_failures().empty());  // the program has been told
    CHECK(program.run_all(22) && program.y[0][0] == 1);

    // Nobody launches for the lost rank, and nobody asks: the next program is told, on all ranks.
    program.timeout_s = kTimeout;
    program.launch(0, 23);
    program.launch(1, 23);
    program.timeout_s = kPatience;
    expect_report();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      CHECK(program.launch(rank, 24).status == CallStatus::kDeadlineExceeded);
    }
    CHECK(program.run_all(25));

    // Somebody asks first.
    buffer->arm_fault(0, static_cast<uint32_t>(Region::rank_barrier), 1);
    program.timeout_s = kTimeout;
    program.run_all(26);
    program.timeout_s = kPatience;
    expect_report();
    const auto texts = cuda::take_failures();
    CHECK(texts.size() == 1 && contains(texts[0], "rank_barrier[1]"));
    CHECK(contains(texts[0], "Also waiting:"));
    CHECK(cuda::take_failures().empty());
    CHECK(program.run_all(27));

    // A refused value does not stop the protocol, and is an argument error.
    program.num_tokens = -5;
    program.run_all(28);
    expect_report();
    const auto refused = program.launch(0, 29);
    CHECK(refused.status == CallStatus::kInvalidArgument);
    CHECK(contains(refused.message, "num_tokens: got -5 on rank 0; expected 0..1"));
    program.num_tokens = 0;
    CHECK(program.run_all(30));

    // While a graph is captured an armed fault is kept for a launch.
    buffer->arm_fault(0, static_cast<uint32_t>(Region::rank_barrier), 0);
    fake::capturing = true;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      CHECK(program.launch(rank, 31).status == CallStatus::kOk);
    }
    fake::capturing = false;
    program.timeout_s = kTimeout;
    program.run_all(32);
    program.timeout_s = kPatience;
    expect_report();
    CHECK(cuda::take_failures().size() == 1);
    buffer->poison();
    const std::string combine = buffer->read(0, 1, static_cast<uint32_t>(Region::combine));
    CHECK(static_cast<uint8_t>(combine[0]) == 0xFF);
    CHECK(program.run_all(33));

    // Programs on several threads, one of which loses a signal now and then.
    program.timeout_s = kTimeout;
    for (int64_t run = 100; run < 110; ++run) {
      if (run % 4 == 0) buffer->arm_fault(0, static_cast<uint32_t>(Region::rank_barrier), 2);
      std::vector<std::thread> threads;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&, rank] {
          for (int call = 0; call < 5; ++call) program.launch(rank, run);
        });
      }
      for (std::thread& thread : threads) thread.join();
      program.wait();
    }
    // Whatever was left is reset: two executions may be told of it, then all is well.
    program.run_all(200);
    cuda::take_failures();
    program.run_all(201);
    program.timeout_s = kPatience;
    CHECK(program.run_all(202) && program.y[1][0] == 2);

    // The process ends while a kernel waits for a rank, which it would do for an hour.
    program.timeout_s = 3600;
    program.launch(0, 300);
    cuda::shut_down_all();
    program.wait();
    while (cuda::wait_for_report()) {  // what nobody has asked for; then it says that it is over
    }
    CHECK(program.launch(1, 300).status == CallStatus::kUnavailable);
  }
  host::release_buffer(key);
}

}  // namespace

int main() {
  const cuda::Driver api = fake::make_driver();
  cuda::replace_driver(&api);
  fake::kernel = barrier_kernel;
  layout.num_ranks = kRanks;
  layout.num_experts = 2 * kRanks;
  layout.top_k = 2;
  layout.hidden = 256;
  layout.intermediate = 128;
  layout.max_tokens = 16;
  layout = gpu::layout_shape(layout, gpu::Granularity::k128, 0);
  test_ranks();
  test_refusals();
  test_buffer();
  CHECK(fake::allocated == 0);
  return 0;
}
