#include "cpu/linear2.h"

#include "cpu/gemm.h"
#include "cpu/wait.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"

namespace jax_megamoe::cpu {

bool linear2(const RankView& view, const Block& block, MathWorker& worker) {
  const MoeShape& shape = view.shape;
  const RingPosition ring = ring_position(shape, block.pool_block);
  if (!wait_at_least<Region::l2_arrival>(view, ring.slot, l2_arrival_target(shape, ring.lap),
                                         block.pool_block)) {
    return false;
  }
  const uint64_t k = shape.intermediate;
  if (!worker.holds(block)) {
    const uint64_t first_row = uint64_t{ring.slot} * shape.block_m;
    widen_rows(view.local<Region::l2_acts>() + first_row * k,
               view.local<Region::l2_acts_sf>() + first_row * (k / kSfGroup), block.valid_m,
               shape.intermediate, worker.rows.data(), worker.row_units.data());
    worker.rows_phase = block.phase;
    worker.rows_pool_block = block.pool_block;
  }
  constexpr uint32_t kPanels = kBlockN / kPanel;
  const uint64_t first_panel =
      (uint64_t{block.expert} * shape.linear2_n_blocks() + block.n_block) * kPanels;
  multiply_panels({worker.rows.data(), worker.row_units.data(), block.valid_m, shape.intermediate,
                   view.args.w2 + first_panel * (k / 2) * kPanel,
                   view.args.w2_sf + first_panel * (k / kSfGroup) * kPanel, kPanels,
                   worker.accumulator.data(), worker.weights.data()});
  if (view.args.b2 != nullptr) {
    const float* bias =
        view.args.b2 + uint64_t{block.expert} * shape.hidden + uint64_t{block.n_block} * kBlockN;
    const float* weights =
        view.local<Region::l2_topk_weights>() + uint64_t{ring.slot} * shape.block_m;
    for (uint32_t m = 0; m < block.valid_m; ++m) {
      float* tile = worker.accumulator.data() + uint64_t{m} * kBlockN;
      for (uint32_t column = 0; column < kBlockN; ++column) {
        tile[column] += weights[m] * bias[column];
      }
    }
  }
  add_release<Region::l2_empty>(view, view.rank, ring.slot, 1);

  const TokenSource* metadata =
      view.local<Region::token_src_metadata>() + uint64_t{block.pool_block} * shape.block_m;
  for (uint32_t m = 0; m < block.valid_m; ++m) {
    const uint64_t token = metadata[m].slot / shape.top_k;
    const uint64_t k_slot = metadata[m].slot % shape.top_k;
    uint16_t* row = view.remote<Region::combine>(metadata[m].rank) +
                    (k_slot * shape.max_tokens + token) * shape.hidden +
                    uint64_t{block.n_block} * kBlockN;
    const float* tile = worker.accumulator.data() + uint64_t{m} * kBlockN;
    for (uint32_t column = 0; column < kBlockN; ++column) row[column] = float_to_bf16(tile[column]);
  }
  return true;
}

}  // namespace jax_megamoe::cpu
