#include "cpu/dispatch.h"

#include <cstring>
#include <vector>

#include "cpu/wait.h"
#include "protocol/dispatch_order.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"

namespace jax_megamoe::cpu {
namespace {

// `values` is scratch of one row.
void stage_row(const RankView& view, uint32_t token, std::vector<float>& values) {
  const uint64_t hidden = view.shape.hidden;
  const uint64_t num_groups = hidden / kSfGroup;
  uint8_t* codes = view.local<Region::x>() + token * hidden;
  uint8_t* sf = view.local<Region::x_sf>() + token * num_groups;
  if (view.args.x_sf != nullptr) {
    std::memcpy(codes, static_cast<const uint8_t*>(view.args.x) + token * hidden, hidden);
    std::memcpy(sf, view.args.x_sf + token * num_groups, num_groups);
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(view.args.x) + token * hidden;
  for (uint64_t i = 0; i < hidden; ++i) values[i] = bf16_to_float(row[i]);
  const uint64_t group = view.args.granularity == 0 ? hidden : view.args.granularity;
  for (uint64_t first = 0; first < hidden; first += group) {
    quantize_e4m3(&values[first], static_cast<uint32_t>(group), codes + first,
                  sf + first / kSfGroup);
  }
}

int32_t checked_expert(const RankView& view, uint64_t slot) {
  const int64_t expert = view.args.topk_idx_is_64bit
                             ? static_cast<const int64_t*>(view.args.topk_idx)[slot]
                             : static_cast<const int32_t*>(view.args.topk_idx)[slot];
  if (expert >= 0 && expert < int64_t{view.shape.num_experts}) return static_cast<int32_t>(expert);
  if (expert != -1) {
    view.counters.out_of_range.fetch_add(1, std::memory_order_relaxed);
    uint64_t first = view.counters.first_out_of_range.load(std::memory_order_relaxed);
    while (slot < first && !view.counters.first_out_of_range.compare_exchange_weak(first, slot)) {
    }
  }
  return -1;
}

}  // namespace

void stage_input(const RankView& view) {
  const uint32_t top_k = view.shape.top_k;
  std::vector<float> values(view.shape.hidden);
  int32_t* topk_idx = view.local<Region::topk_idx>();
  float* topk_weights = view.local<Region::topk_weights>();
  for (uint32_t token = view.worker; token < view.num_tokens; token += view.num_threads()) {
    stage_row(view, token, values);
    for (uint32_t k = 0; k < top_k; ++k) {
      const uint64_t slot = uint64_t{token} * top_k + k;
      topk_idx[slot] = checked_expert(view, slot);
      topk_weights[slot] = view.args.topk_weights[slot];
    }
  }
}

void dispatch_publish(const RankView& view) {
  const MoeShape& shape = view.shape;
  const uint32_t num_local = shape.num_local_experts();
  const int32_t* topk_idx = view.local<Region::topk_idx>();
  uint64_t* send_count = view.local<Region::expert_send_count>();
  const uint64_t num_slots = uint64_t{view.num_tokens} * shape.top_k;
  for (uint64_t slot = 0; slot < num_slots; ++slot) {
    if (topk_idx[slot] >= 0) ++send_count[topk_idx[slot]];
  }
  // At each owner this rank's rows stand packed, local expert after local expert.
  std::vector<uint32_t> next(shape.num_experts);
  for (uint32_t expert = 0; expert < shape.num_experts; ++expert) {
    next[expert] = expert % num_local == 0
                       ? 0
                       : next[expert - 1] + static_cast<uint32_t>(send_count[expert - 1]);
  }
  for (uint64_t slot = 0; slot < num_slots; ++slot) {
    if (topk_idx[slot] < 0) continue;
    const uint32_t expert = static_cast<uint32_t>(topk_idx[slot]);
    uint32_t* list = view.remote<Region::src_token_topk_idx>(shape.owner_of(expert)) +
                     view.rank * shape.max_slots_per_rank();
    list[next[expert]++] = static_cast<uint32_t>(slot);
  }
  const uint64_t call = *view.local<Region::call_epoch>() + 1;
  for (uint32_t expert = 0; expert < shape.num_experts; ++expert) {
    store_release<Region::expert_recv_count>(
        view, shape.owner_of(expert), view.rank * num_local + expert % num_local,
        published_count(call, static_cast<uint32_t>(send_count[expert])));
  }
}

bool receive_counts(const RankView& view, std::vector<uint32_t>& counts) {
  const uint64_t num_counts = uint64_t{view.shape.num_ranks} * view.shape.num_local_experts();
  const uint64_t wanted = published_count(*view.local<Region::call_epoch>() + 1, 0);
  counts.resize(num_counts);
  for (uint64_t i = 0; i < num_counts; ++i) {
    if (!wait_at_least<Region::expert_recv_count>(view, i, wanted, i)) return false;
    counts[i] = count_rows(
        load_acquire<Region::expert_recv_count>(view.local<Region::expert_recv_count>() + i));
  }
  return true;
}

bool dispatch_pull(const RankView& view) {
  const MoeShape& shape = view.shape;
  const uint32_t num_local = shape.num_local_experts();
  const uint64_t hidden = shape.hidden;
  const uint64_t num_groups = hidden / kSfGroup;
  std::vector<uint32_t> counts;
  if (!receive_counts(view, counts)) return false;
  TokenSource* metadata = view.local<Region::token_src_metadata>();
  std::vector<uint32_t> list_start(shape.num_ranks, 0);  // of the expert, in each source's list
  uint32_t pool_block = 0;
  for (uint32_t expert = 0; expert < num_local; ++expert) {
    const auto count_of = [&](uint32_t source) { return counts[source * num_local + expert]; };
    uint32_t num_rows = 0;
    for (uint32_t source = 0; source < shape.num_ranks; ++source) num_rows += count_of(source);
    for (uint32_t row = 0; row < num_rows; ++row) {
      const uint32_t row_in_block = row % shape.block_m;
      const uint32_t block = pool_block + row / shape.block_m;
      const RingPosition ring = ring_position(shape, block);
      if (row_in_block == 0 && !wait_at_least<Region::l1_empty>(
                                   view, ring.slot, l1_empty_target(shape, ring.lap), block)) {
        return false;
      }
      const SourceRow source = locate_source_row(shape.num_ranks, row, count_of);
      const uint32_t slot =
          view.local<Region::src_token_topk_idx>()[source.rank * shape.max_slots_per_rank() +
                                                   list_start[source.rank] + source.index];
      const uint64_t token = slot / shape.top_k;
      const uint64_t ring_row = uint64_t{ring.slot} * shape.block_m + row_in_block;
      std::memcpy(view.local<Region::l1_acts>() + ring_row * hidden,
                  view.remote<Region::x>(source.rank) + token * hidden, hidden);
      std::memcpy(view.local<Region::l1_acts_sf>() + ring_row * num_groups,
                  view.remote<Region::x_sf>(source.rank) + token * num_groups, num_groups);
      view.local<Region::l1_topk_weights>()[ring_row] =
          view.remote<Region::topk_weights>(source.rank)[slot];
      metadata[uint64_t{block} * shape.block_m + row_in_block] = {source.rank, slot};
      const uint32_t valid_rows = min_of(num_rows - (row - row_in_block), shape.block_m);
      add_release<Region::l1_arrival>(view, view.rank, ring.slot,
                                      l1_arrival_increment(shape, row_in_block, valid_rows));
    }
    pool_block += ceil_div(num_rows, shape.block_m);
    for (uint32_t source = 0; source < shape.num_ranks; ++source) {
      list_start[source] += count_of(source);
    }
  }
  return true;
}

}  // namespace jax_megamoe::cpu
