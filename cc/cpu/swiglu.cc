#include "cpu/swiglu.h"

#include "cpu/wait.h"
#include "protocol/numerics.h"
#include "protocol/ring.h"

namespace jax_megamoe::cpu {

namespace {

constexpr uint32_t kColumns = kL1ItemRows / 2;

// One row of the accumulator -> values[kColumns].
template <Activation A>
void activate_row(const float* tile, float weight, const ActivationParams& params, float* values) {
  for (uint32_t column = 0; column < kColumns; ++column) {
    const uint32_t gate = column / kInterleave * 2 * kInterleave + column % kInterleave;
    values[column] = activate<A>(tile[gate], tile[gate + kInterleave], weight, params);
  }
}

}  // namespace

bool swiglu_epilogue(const RankView& view, const Block& block, const float* accumulator) {
  const MoeShape& shape = view.shape;
  const RingPosition ring = ring_position(shape, block.pool_block);
  if (!wait_at_least<Region::l2_empty>(view, ring.slot, l2_empty_target(shape, ring.lap),
                                       block.pool_block)) {
    return false;
  }
  const uint32_t group = view.args.granularity == 0 ? kColumns : view.args.granularity;
  const uint64_t width = shape.intermediate;
  const uint64_t first_column = uint64_t{block.n_block} * kColumns;
  const auto activate_any =
      with_activation(view.args.activation, []<Activation A>() { return &activate_row<A>; });
  for (uint32_t m = 0; m < block.valid_m; ++m) {
    const uint64_t row = uint64_t{ring.slot} * shape.block_m + m;
    const float weight = view.local<Region::l1_topk_weights>()[row];
    const float* tile = accumulator + uint64_t{m} * kL1ItemRows;
    float values[kColumns];
    activate_any(tile, weight, view.args.activation_params, values);
    // Linear 2 weights its bias. The row's own place for the weight may be overwritten by then.
    if (view.args.b2 != nullptr && block.n_block == 0) {
      view.local<Region::l2_topk_weights>()[row] = weight;
    }
    uint8_t* codes = view.local<Region::l2_acts>() + row * width + first_column;
    uint8_t* sf = view.local<Region::l2_acts_sf>() + (row * width + first_column) / kSfGroup;
    for (uint32_t first = 0; first < kColumns; first += group) {
      quantize_e4m3(values + first, group, codes + first, sf + first / kSfGroup);
    }
  }
  // Only now is the M-block's input no longer needed: the routing weights are part of it.
  add_release<Region::l1_empty>(view, view.rank, ring.slot, kL1ItemBlocks);
  add_release<Region::l2_arrival>(view, view.rank, ring.slot, kL1ItemBlocks);
  return true;
}

}  // namespace jax_megamoe::cpu
