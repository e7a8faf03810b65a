// math_worker.h: the scratch memory of one math worker, kept from call to call.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/rank.h"
#include "protocol/scheduler.h"

namespace jax_megamoe::cpu {

struct MathWorker {
  std::vector<float> rows;         // widened activations of one M-block, see row_offset()
  std::vector<float> row_units;    // of `rows`
  std::vector<float> accumulator;  // [block_m][kL1ItemRows], or [block_m][kBlockN] in linear 2
  std::vector<float> weights;      // widened panels, of multiply_panels()

  // Which M-block `rows` holds: consecutive items of a worker mostly share it.
  Phase rows_phase = Phase::kLinear1;
  int64_t rows_pool_block = -1;

  explicit MathWorker(const MoeShape& shape)
      : rows(uint64_t{shape.block_m} * max_of(shape.hidden, shape.intermediate)),
        row_units(shape.block_m),
        accumulator(uint64_t{shape.block_m} * kL1ItemRows),
        weights(kScratchFloats) {}

  bool holds(const Block& block) const {
    return rows_phase == block.phase && rows_pool_block == int64_t{block.pool_block};
  }
};

}  // namespace jax_megamoe::cpu
