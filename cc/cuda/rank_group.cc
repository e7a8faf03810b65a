#include "cuda/rank_group.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "report/failure_text.h"

namespace jax_megamoe::cuda {
namespace {

constexpr size_t kTraceLaneBytes = sizeof(uint32_t);

size_t trace_bytes(uint32_t num_ctas) {
  return size_t{num_ctas} * gpu::kTraceLanes *
         (kTraceLaneBytes + gpu::kTraceEvents * sizeof(gpu::TraceEvent));
}

uint32_t load_kind_acquire(const gpu::FailureRecord* record) {
  return std::atomic_ref<uint32_t>(const_cast<uint32_t&>(record->kind))
      .load(std::memory_order_acquire);
}

// When one signal is lost, many waits hang; this is their order in the protocol. A rank reports one
// of its waits, so ranks that only wait for another rank's end come last.
uint32_t wait_order(const gpu::FailureRecord& record) {
  if (record.kind != static_cast<uint32_t>(gpu::FailureKind::kTimeout)) return 0;
  if (record.region == gpu::kSharedBarrier) return 8;
  switch (static_cast<Region>(record.region)) {
    case Region::expert_recv_count:
      return 1;
    case Region::l1_empty:
      return 2;
    case Region::l1_arrival:
      return 3;
    case Region::l2_empty:
      return 4;
    case Region::l2_arrival:
      return 5;
    case Region::grid_barrier:
      return 6;
    default:
      return 7;
  }
}

static_assert(gpu::kSharedBarrier == report::kLocalBarrier);

std::string wait_text(const MoeShape& layout, const gpu::FailureRecord& record) {
  constexpr uint32_t kNumRoles = sizeof(gpu::kRoleNames) / sizeof(gpu::kRoleNames[0]);
  return report::wait_text(
      layout, {record.rank, "SM", record.sm,
               record.role < kNumRoles ? gpu::kRoleNames[record.role] : "unknown", record.region,
               record.index, record.wanted, record.seen});
}

std::string refusal_text(const MoeShape& shape, const Device& device,
                         const gpu::FailureRecord& record, uint32_t num_rows) {
  const auto seen = static_cast<long long>(record.seen);
  switch (static_cast<gpu::FailureKind>(record.kind)) {
    case gpu::FailureKind::kOutOfRange:
      return report::out_of_range_text(shape, record.rank, seen, record.index, record.count);
    case gpu::FailureKind::kNumTokens:
      return report::num_tokens_text(record.rank, static_cast<int32_t>(record.seen), num_rows);
    case gpu::FailureKind::kRankMismatch:
      return report::rank_mismatch_text("GPU " + std::to_string(device.ordinal),
                                        static_cast<int32_t>(record.seen), record.rank);
    case gpu::FailureKind::kUnequalScales: {
      const uint64_t per_token = shape.hidden / kSfGroup;
      return report::unequal_scales_text(
          record.rank, record.index / per_token, record.index % per_token,
          static_cast<uint32_t>(record.wanted), static_cast<uint32_t>(record.seen), record.count);
    }
    default:
      return "jax_megamoe: rank " + std::to_string(record.rank) + ": unknown failure " +
             std::to_string(record.kind);
  }
}

}  // namespace

RankGroup::RankGroup(const MoeShape& layout, std::vector<RankPlace> places, bool trace)
    : layout_(layout), regions_(layout) {
  std::vector<const Device*> devices;
  for (const RankPlace& place : places) devices.push_back(&place.device);
  enable_peer_access(devices.data(), devices.size());
  for (RankPlace& place : places) {
    Rank& rank = ranks_.emplace_back();
    rank.place = std::move(place);
    const Device& device = rank.place.device;
    rank.symmetric = DeviceMemory(device, regions_.num_bytes, "symmetric buffer");
    rank.symmetric.fill(0);
    rank.rank_control = DeviceMemory(device, sizeof(gpu::RankControl), "abort flag");
    rank.rank_control.fill(0);
    rank.scratch = DeviceMemory(device, rank.place.num_ctas * gpu::kScratchBytesPerCta, "scratch");
    if (trace) {
      rank.trace = DeviceMemory(device, trace_bytes(rank.place.num_ctas), "trace");
      rank.trace.fill(0);
    }
    rank.host = MappedMemory(device, sizeof(HostPage));
    rank.host.host<HostPage>()->abort_value = gpu::kFailed | gpu::kAborted;
    const ScopedContext scope(device);
    check(driver().stream_create(&rank.control, kStreamNonBlocking), "cuStreamCreate");
  }
}

RankGroup::~RankGroup() {
  for (const Rank& rank : ranks_) {
    if (rank.control != nullptr) driver().stream_destroy(rank.control);
  }
}

void RankGroup::fill_args(uint32_t rank, gpu::KernelArgs& args) const {
  for (uint32_t peer = 0; peer < kMaxRanks; ++peer) {
    args.peer_buffer[peer] = peer < num_ranks() ? ranks_[peer].symmetric.ptr() : nullptr;
  }
  const Rank& own = ranks_[rank];
  args.rank_control = own.rank_control.ptr<uint32_t>();
  args.failure =
      reinterpret_cast<gpu::FailureRecord*>(own.host.address() + offsetof(HostPage, failure));
  args.scratch = own.scratch.ptr();
  args.trace = own.trace.ptr();
  args.rank = rank;
  args.fault_region = 0xFFFFFFFFu;
}

bool RankGroup::has_failed(uint32_t rank) const {
  return load_kind_acquire(&ranks_[rank].host.host<HostPage>()->failure) != 0;
}

bool RankGroup::has_failed() const {
  for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
    if (has_failed(rank)) return true;
  }
  return false;
}

bool RankGroup::has_timed_out() const {
  for (const Rank& rank : ranks_) {
    if (load_kind_acquire(&rank.host.host<HostPage>()->failure) ==
        static_cast<uint32_t>(gpu::FailureKind::kTimeout)) {
      return true;
    }
  }
  return false;
}

std::optional<Failure> RankGroup::failure(uint32_t rank, const gpu::KernelArgs& args) const {
  if (!has_failed(rank)) return std::nullopt;
  const gpu::FailureRecord record = ranks_[rank].host.host<HostPage>()->failure;
  if (record.kind == static_cast<uint32_t>(gpu::FailureKind::kTimeout)) {
    return Failure{true, report::timeout_text(static_cast<double>(args.timeout_ns) * 1e-9,
                                              {wait_text(layout_, record)})};
  }
  return Failure{false, refusal_text(layout_, ranks_[rank].place.device, record, args.num_rows)};
}

Failure RankGroup::failure(const std::vector<gpu::KernelArgs>& args) const {
  std::vector<gpu::FailureRecord> records;
  for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
    if (has_failed(rank)) records.push_back(ranks_[rank].host.host<HostPage>()->failure);
  }
  std::stable_sort(records.begin(), records.end(),
                   [](const auto& a, const auto& b) { return wait_order(a) < wait_order(b); });
  const uint32_t first = records[0].rank < num_ranks() ? records[0].rank : 0;
  if (records[0].kind != static_cast<uint32_t>(gpu::FailureKind::kTimeout)) {
    return {false,
            refusal_text(layout_, ranks_[first].place.device, records[0], args[first].num_rows)};
  }
  std::vector<std::string> waits;
  for (const auto& record : records) waits.push_back(wait_text(layout_, record));
  return {true, report::timeout_text(static_cast<double>(args[first].timeout_ns) * 1e-9, waits)};
}

void RankGroup::abort() const {
  for (const Rank& rank : ranks_) {
    const ScopedContext scope(rank.place.device);
    // A copy, not a memset: the latter is a kernel and may find no free SM.
    check(driver().memcpy_h_to_d_async(rank.rank_control.address(),
                                       &rank.host.host<HostPage>()->abort_value, sizeof(uint32_t),
                                       rank.control),
          "cuMemcpyHtoDAsync");
  }
}

void RankGroup::synchronize() const {
  for (const Rank& rank : ranks_) {
    const ScopedContext scope(rank.place.device);
    check(driver().ctx_synchronize(), "cuCtxSynchronize");
  }
}

void RankGroup::reset() const {
  for (const Rank& rank : ranks_) {
    for (const RegionInfo& region : regions_.regions) {
      if (region.lifetime != Lifetime::kData) {
        rank.symmetric.fill(0, region.offset, region.num_bytes());
      }
    }
    rank.rank_control.fill(0);
    rank.host.host<HostPage>()->failure = {};
  }
}

void RankGroup::arm_fault(uint32_t rank) const { ranks_[rank].rank_control.fill(0); }

void RankGroup::poison() const {
  for (const Rank& rank : ranks_) {
    for (const RegionInfo& region : regions_.regions) {
      if (region.lifetime == Lifetime::kData) {
        rank.symmetric.fill(0xFF, region.offset, region.num_bytes());
      }
    }
  }
}

std::string RankGroup::read(uint32_t rank, uint32_t region) const {
  const RegionInfo& info = regions_.regions[region];
  std::string bytes(info.num_bytes(), '\0');
  ranks_[rank].symmetric.download(bytes.data(), info.offset, bytes.size());
  return bytes;
}

std::string RankGroup::read_trace(uint32_t rank) const {
  const DeviceMemory& trace = ranks_[rank].trace;
  std::string bytes(trace.num_bytes(), '\0');
  trace.download(bytes.data(), 0, bytes.size());
  return bytes;
}

void RankGroup::clear_trace() const {
  for (const Rank& rank : ranks_) {
    if (rank.trace.num_bytes() != 0) {
      rank.trace.fill(0, 0, size_t{rank.place.num_ctas} * gpu::kTraceLanes * kTraceLaneBytes);
    }
  }
}

void RankGroup::leak() {
  for (Rank& rank : ranks_) {
    rank.symmetric.leak();
    rank.rank_control.leak();
    rank.scratch.leak();
    rank.trace.leak();
    rank.host.leak();
    rank.control = nullptr;
  }
}

}  // namespace jax_megamoe::cuda
