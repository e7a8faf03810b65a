// protocol_test.cc: scheduler, ring, dispatch order and workspace table over random shapes, with
// the protocol's headers alone: no JAX, no threads.
#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <string>
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

ItemCounts items_of(const MoeShape& shape) {
  return {shape.linear1_n_blocks(), shape.linear2_n_blocks()};
}

// Rows of each local expert, within what the shape allows.
std::vector<uint32_t> random_rows(const MoeShape& shape, std::mt19937& rng) {
  std::vector<uint32_t> rows(shape.num_local_experts());
  uint64_t left = shape.max_received_rows();
  const uint32_t empty_share = static_cast<uint32_t>(rng() % 4);  // of 4; 3: most have none
  for (uint32_t& count : rows) {
    const bool empty = rng() % 4 < empty_share;
    count = empty ? 0 : static_cast<uint32_t>(rng() % std::min<uint64_t>(left + 1, 400));
    left -= count;
  }
  return rows;
}

// Walks all workers against the ring's counters in a random unfair order: every block is visited
// once and the walk never stalls, whatever the ring's size.
void check_schedule(const MoeShape& shape, std::mt19937& rng) {
  const std::vector<uint32_t> rows = random_rows(shape, rng);
  const auto rows_of = [&](uint32_t expert) { return rows[expert]; };
  const uint32_t num_workers = 1 + static_cast<uint32_t>(rng() % 9);
  std::vector<std::vector<Block>> lists(num_workers);
  for (uint32_t worker = 0; worker < num_workers; ++worker) {
    for_each_block(shape, items_of(shape), worker, num_workers, rows_of, [&](const Block& block) {
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

// Waves cover what is left in even parts, none of them short.
void check_wave_blocks(std::mt19937& rng) {
  const uint32_t num_workers = 1 + static_cast<uint32_t>(rng() % 200);
  const uint32_t l1_items = 1 + static_cast<uint32_t>(rng() % 40);
  const uint32_t wanted = ceil_div(2 * num_workers, l1_items);
  uint32_t left = 1 + static_cast<uint32_t>(rng() % 2000);
  while (left > 0) {
    const uint32_t size = wave_blocks(num_workers, l1_items, left);
    CHECK(size >= 1 && size <= left);
    CHECK(size == left || 4 * size >= 3 * wanted);
    CHECK(2 * size <= 3 * wanted + 2);
    left -= size;
  }
}

bool same_block(const Block& a, const Block& b) {
  return a.phase == b.phase && a.expert == b.expert && a.m_block == b.m_block &&
         a.n_block == b.n_block && a.pool_block == b.pool_block && a.valid_m == b.valid_m;
}

// The walk by item number gives the list of for_each_block, to one worker that takes every item and
// to workers that take some of them.
void check_block_walk(const MoeShape& shape, std::mt19937& rng) {
  const std::vector<uint32_t> rows = random_rows(shape, rng);
  const auto rows_of = [&](uint32_t expert) { return rows[expert]; };
  std::vector<uint32_t> starts(1, 0);
  for (const uint32_t count : rows)
    starts.push_back(starts.back() + ceil_div(count, shape.block_m));
  const auto start_of = [&](uint32_t expert) { return starts[expert]; };
  const uint32_t num_workers = 1 + static_cast<uint32_t>(rng() % 40);

  // The list in order: worker w's n-th block is item w + n * num_workers.
  std::vector<Block> list;
  std::vector<std::vector<Block>> of_worker(num_workers);
  for (uint32_t worker = 0; worker < num_workers; ++worker) {
    for_each_block(shape, items_of(shape), worker, num_workers, rows_of, [&](const Block& block) {
      of_worker[worker].push_back(block);
      return true;
    });
  }
  for (size_t item = 0; item / num_workers < of_worker[item % num_workers].size(); ++item) {
    list.push_back(of_worker[item % num_workers][item / num_workers]);
  }
  size_t num_items = 0;
  for (const auto& blocks : of_worker) num_items += blocks.size();
  CHECK(list.size() == num_items);

  const auto make_walk = [&](uint32_t l1_items, uint32_t l2_items) {
    return BlockWalk(shape, num_workers, l1_items, l2_items, start_of, rows_of);
  };
  Block block;
  for (const uint32_t longest_step : {1u, 7u, 200u}) {
    auto walk = make_walk(shape.linear1_n_blocks(), shape.linear2_n_blocks());
    uint64_t item = rng() % longest_step;
    for (; item < list.size(); item += 1 + rng() % longest_step) {
      CHECK(walk.find(item, &block) && same_block(block, list[item]));
      CHECK(walk.find(item, &block) && same_block(block, list[item]));  // asking again is allowed
    }
    CHECK(!walk.find(item, &block) && !walk.find(item + 1, &block));
  }

  // Other items: each M-block is cut as asked for, once in each phase, linear 1 first, and a wave
  // is no more than the ring.
  const uint32_t items[2] = {1 + static_cast<uint32_t>(rng() % 9),
                             1 + static_cast<uint32_t>(rng() % 9)};
  auto walk = make_walk(items[0], items[1]);
  std::vector<uint32_t> visits[2] = {std::vector<uint32_t>(starts.back()),
                                     std::vector<uint32_t>(starts.back())};
  uint32_t done[2] = {0, 0};  // M-blocks whose items have all been given out
  for (uint64_t item = 0; walk.find(item, &block); ++item) {
    const uint32_t phase = static_cast<uint32_t>(block.phase);
    CHECK(block.pool_block == done[phase] && block.n_block == visits[phase][block.pool_block]);
    CHECK(block.pool_block == starts[block.expert] + block.m_block);
    CHECK(block.valid_m ==
          std::min(rows[block.expert] - block.m_block * shape.block_m, shape.block_m));
    if (++visits[phase][block.pool_block] == items[phase]) ++done[phase];
    CHECK(done[1] <= done[0] && done[0] - done[1] <= shape.ring_blocks);
  }
  CHECK(done[0] == starts.back() && done[1] == starts.back());
}

void check_counts() {
  CHECK(count_rows(published_count(5, 77)) == 77 && count_call(published_count(5, 77)) == 5);
  CHECK(!reached(0, published_count(1, 0)) &&
        reached(published_count(1, 0), published_count(1, 0)));
  CHECK(!reached(published_count(6, 0xFFFFFFFFu), published_count(7, 0)));
  CHECK(reached(published_count(7, 3), published_count(7, 0)));
  const uint64_t last = 0xFFFFFFFFu;  // the next call's number starts again at 0
  CHECK(!reached(published_count(last, 9), published_count(last + 1, 0)));
  CHECK(reached(published_count(last + 1, 9), published_count(last + 1, 0)));
}

// A buffer for several block sizes and for BF16 activations.
void check_layout_for_narrow_blocks(MoeShape shape) {
  const WorkspaceLayout plain(shape);
  CHECK(shape.counter_blocks() == shape.ring_blocks);
  CHECK(plain.at(Region::l1_acts).element_bytes == 1);
  shape.min_block_m = 4;
  shape.act_bytes = 2;
  CHECK(shape.valid() && shape.counter_blocks() == shape.ring_rows() / 4);
  const WorkspaceLayout wide(shape);
  for (const Region region :
       {Region::l1_arrival, Region::l1_empty, Region::l2_arrival, Region::l2_empty}) {
    CHECK(wide.at(region).dims[0] == shape.counter_blocks());
  }
  for (const Region region : {Region::l1_acts, Region::l2_acts}) {
    CHECK(wide.at(region).num_bytes() == 2 * plain.at(region).num_bytes());
    CHECK(std::string(wide.at(region).dtype) == "bf16");
  }
  CHECK(wide.at(Region::x).num_bytes() == plain.at(Region::x).num_bytes());
  shape.act_bytes = 3;
  CHECK(!shape.valid());
  shape.act_bytes = 1;
  shape.min_block_m = shape.block_m + 1;
  CHECK(!shape.valid());
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
  jax_megamoe::check_counts();
  for (int turn = 0; turn < 500; ++turn) {
    const jax_megamoe::MoeShape shape = jax_megamoe::random_shape(rng);
    jax_megamoe::check_workspace(shape);
    jax_megamoe::check_dispatch_order(rng);
    jax_megamoe::check_schedule(shape, rng);
    jax_megamoe::check_wave_blocks(rng);
    jax_megamoe::check_block_walk(shape, rng);
    jax_megamoe::check_layout_for_narrow_blocks(shape);
  }
  std::puts("protocol_test: passed");
}
