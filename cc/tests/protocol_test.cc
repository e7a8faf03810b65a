// protocol_test.cc: scheduler, ring, dispatch order and workspace table over random shapes, with
// the protocol's headers alone: no JAX, no threads.
#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "protocol/dispatch_order.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"
#include "protocol/scheduler.h"
#include "protocol/workspace.h"
#include "tests/check.h"

namespace jax_megamoe {
namespace {

MoeShape random_shape(std::mt19937& rng) {
  MoeShape shape;
  shape.num_ranks = 1 + static_cast<uint32_t>(rng() % 8);
  shape.num_experts = shape.num_ranks * (1 + static_cast<uint32_t>(rng() % 5));
  shape.top_k = 1 + static_cast<uint32_t>(rng() % std::min(8u, shape.num_experts));
  shape.hidden = kBlockN * (1 + static_cast<uint32_t>(rng() % 4));
  shape.intermediate = kBlockN * (1 + static_cast<uint32_t>(rng() % 4));
  shape.max_tokens = 1 + static_cast<uint32_t>(rng() % 200);
  shape.block_m = 8u << (rng() % 4);
  const uint64_t pool = shape.max_pool_blocks();
  shape.ring_blocks = 1 + static_cast<uint32_t>(rng() % pool);
  CHECK(shape.valid());
  return shape;
}

void check_workspace(const MoeShape& shape) {
  const WorkspaceLayout layout(shape);
  uint64_t end = 0;
  for (const RegionInfo& region : layout.regions) {
    CHECK(region.offset % kRegionAlignment == 0);
    CHECK(region.offset >= end && region.num_bytes() > 0);
    end = region.offset + region.num_bytes();
  }
  CHECK(end <= layout.num_bytes);
  char* base = nullptr;
  CHECK(reinterpret_cast<char*>(layout.ptr<Region::combine>(base)) - base ==
        static_cast<int64_t>(layout.at(Region::combine).offset));
}

void check_dispatch_order(std::mt19937& rng) {
  const uint32_t num_ranks = 1 + static_cast<uint32_t>(rng() % kMaxRanks);
  std::vector<uint32_t> counts(num_ranks);
  for (uint32_t& count : counts) count = rng() % 3 == 0 ? 0 : static_cast<uint32_t>(rng() % 50);
  const auto count_of = [&](uint32_t rank) { return counts[rank]; };
  uint32_t position = 0;
  for (uint32_t index = 0; index < 50; ++index) {  // one row of every rank, round after round
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      if (counts[rank] <= index) continue;
      const SourceRow row = locate_source_row(num_ranks, position++, count_of);
      CHECK(row.rank == rank && row.index == index);
    }
  }
  CHECK(locate_source_row(num_ranks, position, count_of).rank == num_ranks);
}

// Walks all workers against the ring's counters in a random unfair order: every block is visited
// once and the walk never stalls, whatever the ring's size.
void check_schedule(const MoeShape& shape, std::mt19937& rng) {
  std::vector<uint32_t> rows(shape.num_local_experts());
  uint64_t left = shape.max_received_rows();
  for (uint32_t& count : rows) {
    count = rng() % 4 == 0 ? 0 : static_cast<uint32_t>(rng() % std::min<uint64_t>(left + 1, 400));
    left -= count;
  }
  const auto rows_of = [&](uint32_t expert) { return rows[expert]; };
  const uint32_t num_workers = 1 + static_cast<uint32_t>(rng() % 9);
  std::vector<std::vector<Block>> lists(num_workers);
  for (uint32_t worker = 0; worker < num_workers; ++worker) {
    for_each_block(shape, worker, num_workers, rows_of, [&](const Block& block) {
      lists[worker].push_back(block);
      return true;
    });
  }

  const uint32_t total = num_pool_blocks(shape, rows_of);
  CHECK(total <= shape.max_pool_blocks());
  std::vector<uint32_t> l1_arrival(shape.ring_blocks), l1_empty(shape.ring_blocks),
      l2_arrival(shape.ring_blocks), l2_empty(shape.ring_blocks);
  std::vector<size_t> position(num_workers);
  std::set<std::tuple<uint32_t, uint32_t, uint32_t>> visited;
  uint32_t delivered = 0;
  for (bool progress = true; progress;) {
    progress = false;
    while (delivered < total) {
      const RingPosition ring = ring_position(shape, delivered);
      if (l1_empty[ring.slot] < l1_empty_target(shape, ring.lap)) break;
      l1_arrival[ring.slot] += shape.block_m;
      ++delivered;
      progress = true;
    }
    const uint32_t first = static_cast<uint32_t>(rng() % num_workers);
    for (uint32_t i = 0; i < num_workers; ++i) {
      const uint32_t worker = (first + i) % num_workers;
      for (; position[worker] < lists[worker].size(); ++position[worker], progress = true) {
        const Block& block = lists[worker][position[worker]];
        const RingPosition ring = ring_position(shape, block.pool_block);
        if (block.phase == Phase::kLinear1) {
          if (l1_arrival[ring.slot] < l1_arrival_target(shape, ring.lap)) break;
          if (l2_empty[ring.slot] < l2_empty_target(shape, ring.lap)) break;
          CHECK(l1_arrival[ring.slot] == l1_arrival_target(shape, ring.lap));
          ++l1_empty[ring.slot];
          ++l2_arrival[ring.slot];
        } else {
          if (l2_arrival[ring.slot] < l2_arrival_target(shape, ring.lap)) break;
          CHECK(l2_arrival[ring.slot] == l2_arrival_target(shape, ring.lap));
          ++l2_empty[ring.slot];
        }
        const uint32_t rows_here = rows[block.expert] - block.m_block * shape.block_m;
        CHECK(block.valid_m == std::min(rows_here, shape.block_m) && block.valid_m > 0);
        CHECK(visited.insert({static_cast<uint32_t>(block.phase), block.pool_block, block.n_block})
                  .second);
      }
    }
  }
  CHECK(delivered == total);
  CHECK(visited.size() == uint64_t{total} * (shape.linear1_n_blocks() + shape.linear2_n_blocks()));
}

void check_numerics() {
  static_assert(e2m1_doubled(0x7) == 12 && e2m1_doubled(0x9) == -1);
  for (uint32_t code = 0; code < 256; ++code) {  // every value is its own code
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    if ((code & 0x7F) == kE4m3Nan) continue;
    CHECK(e4m3_from_float(value, 1.0f) == code);
  }
  CHECK(sf_e4m3(0) == 1 && sf_e2m1(0) == 1);
  CHECK(sf_e4m3(float_bits(448.0f)) == 127 && sf_e4m3(float_bits(448.0f) + 1) == 128);
  CHECK(sf_e2m1(float_bits(6.0f)) == 127 && sf_e2m1(float_bits(6.0f) + 1) == 128);
}

}  // namespace
}  // namespace jax_megamoe

int main() {
  std::mt19937 rng(7);
  jax_megamoe::check_numerics();
  for (int turn = 0; turn < 500; ++turn) {
    const jax_megamoe::MoeShape shape = jax_megamoe::random_shape(rng);
    jax_megamoe::check_workspace(shape);
    jax_megamoe::check_dispatch_order(rng);
    jax_megamoe::check_schedule(shape, rng);
  }
  std::puts("protocol_test: passed");
}
