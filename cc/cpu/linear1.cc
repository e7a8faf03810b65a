#include "cpu/linear1.h"

#include "cpu/gemm.h"
#include "cpu/swiglu.h"
#include "cpu/wait.h"
#include "protocol/ring.h"

namespace jax_megamoe::cpu {

bool linear1(const RankView& view, const Block& block, MathWorker& worker) {
  const MoeShape& shape = view.shape;
  const RingPosition ring = ring_position(shape, block.pool_block);
  if (!wait_at_least<Region::l1_arrival>(view, ring.slot, l1_arrival_target(shape, ring.lap),
                                         block.pool_block)) {
    return false;
  }
  const uint64_t k = shape.hidden;
  if (!worker.holds(block)) {
    const uint64_t first_row = uint64_t{ring.slot} * shape.block_m;
    widen_rows(view.local<Region::l1_acts>() + first_row * k,
               view.local<Region::l1_acts_sf>() + first_row * (k / kSfGroup), block.valid_m,
               shape.hidden, worker.rows.data(), worker.row_units.data());
    worker.rows_phase = block.phase;
    worker.rows_pool_block = block.pool_block;
  }
  constexpr uint32_t kPanels = kL1ItemRows / kPanel;
  const uint64_t items = shape.linear1_n_blocks() / kL1ItemBlocks;
  const uint64_t first_panel = (block.expert * items + block.n_block) * kPanels;
  multiply_panels({worker.rows.data(), worker.row_units.data(), block.valid_m, shape.hidden,
                   view.args.w13 + first_panel * (k / 2) * kPanel,
                   view.args.w13_sf + first_panel * (k / kSfGroup) * kPanel, kPanels,
                   worker.accumulator.data(), worker.weights.data()});
  if (view.args.b13 != nullptr) {
    const float* bias = view.args.b13 + (block.expert * items + block.n_block) * kL1ItemRows;
    float* tile = worker.accumulator.data();
    for (uint32_t m = 0; m < block.valid_m; ++m, tile += kL1ItemRows) {
      for (uint32_t row = 0; row < kL1ItemRows; ++row) tile[row] += bias[row];
    }
  }
  return swiglu_epilogue(view, block, worker.accumulator.data());
}

}  // namespace jax_megamoe::cpu
