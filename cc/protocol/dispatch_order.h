// dispatch_order.h: which source row stands at which position of an expert's rows (min-peeling).
//
// Consecutive positions rotate over all ranks that still have rows, so that the owner pulls over
// all links at once from the first row on. The order depends on the counts alone: no communication.
#pragma once

#include "protocol/shape.h"

namespace jax_megamoe {

struct SourceRow {
  uint32_t rank;   // source rank
  uint32_t index;  // index among that rank's rows for this expert
};

// counts(rank) is the number of rows that `rank` sends to the expert; position < sum of counts.
//
// Peel the smallest remaining count m off all A active ranks: these m * A positions rotate over the
// active ranks. At most num_ranks rounds, as each one retires a rank.
template <class Counts>
JMM_HD SourceRow locate_source_row(uint32_t num_ranks, uint32_t position, const Counts& counts) {
  uint32_t peeled = 0;
  for (;;) {
    uint32_t num_active = 0;
    uint32_t smallest = 0xFFFFFFFFu;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      const uint32_t count = counts(rank);
      if (count > peeled) {
        ++num_active;
        smallest = min_of(smallest, count - peeled);
      }
    }
    if (num_active == 0) return {num_ranks, 0};  // position is past the last row
    const uint64_t num_positions = uint64_t{smallest} * num_active;
    if (position < num_positions) {
      uint32_t nth = position % num_active;
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        if (counts(rank) > peeled && nth-- == 0) return {rank, peeled + position / num_active};
      }
    }
    position -= static_cast<uint32_t>(num_positions);
    peeled += smallest;
  }
}

}  // namespace jax_megamoe
