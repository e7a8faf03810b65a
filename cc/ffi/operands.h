// operands.h: operands of the layer's custom call, and their checks. The same on all platforms.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/call_queue.h"
#include "protocol/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jax_megamoe::ffi_api {

struct Operands {
  ::xla::ffi::AnyBuffer x;             // BF16 [rows, H], or E4M3 codes
  ::xla::ffi::AnyBuffer x_sf;          // UE8M0 [rows, H/32]; [0, 0] for BF16 x
  ::xla::ffi::AnyBuffer topk_idx;      // int32 or int64 [rows, K]
  ::xla::ffi::AnyBuffer topk_weights;  // float32 [rows, K]
  ::xla::ffi::AnyBuffer num_tokens;    // int32 [1]; [0]: all rows
  ::xla::ffi::AnyBuffer ep_rank;       // int32 [1]
  ::xla::ffi::AnyBuffer w13, w13_sf, w2, w2_sf;
  ::xla::ffi::AnyBuffer y;         // BF16 [rows, H]
  ::xla::ffi::AnyBuffer received;  // int32 [E/R]
  ::xla::ffi::AnyBuffer status;    // int32 [kNumStatusWords]

  int64_t rows() const;  // -1: x is not a matrix
  bool is_quantised() const { return x.element_type() == ::xla::ffi::DataType::U8; }
  bool has_64bit_idx() const { return topk_idx.element_type() == ::xla::ffi::DataType::S64; }
};

// Shapes of the weights in a back end's layout.
struct WeightDims {
  std::vector<int64_t> w13, w13_sf, w2, w2_sf;
};

// Shapes, dtypes, the number of rows, and the granularity attribute (32, 128, or 0 for rows).
::xla::ffi::Error check_operands(const Operands& operands, const MoeShape& shape,
                                 const WeightDims& weights, int32_t granularity);

::xla::ffi::Error no_buffer_error(std::string_view key);
::xla::ffi::Error foreign_device_error(int32_t device_ordinal, std::string_view key);
::xla::ffi::Error error_of(host::CallStatus status, const std::string& message);

}  // namespace jax_megamoe::ffi_api
