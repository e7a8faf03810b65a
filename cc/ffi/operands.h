// operands.h: operands of the layer's custom call, and their checks. The same on all platforms.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/status.h"
#include "protocol/activation.h"
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
  ::xla::ffi::AnyBuffer b13, b2;   // float32 [E/R, 2I] and [E/R, H]; [0]: no biases
  ::xla::ffi::AnyBuffer y;         // BF16 [rows, H]
  ::xla::ffi::AnyBuffer received;  // int32 [E/R]
  ::xla::ffi::AnyBuffer status;    // int32 [kNumStatusWords]

  int64_t rows() const;  // -1: x is not a matrix
  bool is_quantised() const { return x.element_type() == ::xla::ffi::DataType::U8; }
  bool has_biases() const { return b13.element_count() != 0 || b2.element_count() != 0; }
  bool has_64bit_idx() const { return topk_idx.element_type() == ::xla::ffi::DataType::S64; }
};

// Shapes of the weights in a back end's layout.
struct WeightDims {
  std::vector<int64_t> w13, w13_sf, w2, w2_sf;
};

// Attributes of the call that say how to compute, the same on all platforms.
struct Attributes {
  int32_t granularity;  // 32, 128, or 0 for rows
  int32_t activation;   // number of an Activation
  ::xla::ffi::Span<const float> activation_params;

  Activation to_activation() const { return static_cast<Activation>(activation); }
  ActivationParams to_params() const { return to_activation_params(activation_params.begin()); }
};

// Shapes, dtypes, the number of rows, and the attributes.
::xla::ffi::Error check_operands(const Operands& operands, const MoeShape& shape,
                                 const WeightDims& weights, const Attributes& attributes);

// What both platforms' arguments have in common, under the same names.
template <class Args>
void fill_common(Args& args, const Operands& operands) {
  const auto in = [](const ::xla::ffi::AnyBuffer& buffer) { return buffer.untyped_data(); };
  args.x = in(operands.x);
  args.x_sf = operands.is_quantised() ? static_cast<const uint8_t*>(in(operands.x_sf)) : nullptr;
  args.topk_idx = in(operands.topk_idx);
  args.topk_idx_is_64bit = operands.has_64bit_idx();
  args.topk_weights = static_cast<const float*>(in(operands.topk_weights));
  if (operands.num_tokens.element_count() != 0) {
    args.num_tokens = static_cast<const int32_t*>(in(operands.num_tokens));
  }
  args.num_rows = static_cast<uint32_t>(operands.rows());
  args.w13 = static_cast<const uint8_t*>(in(operands.w13));
  args.w2 = static_cast<const uint8_t*>(in(operands.w2));
  args.b13 = operands.has_biases() ? static_cast<const float*>(in(operands.b13)) : nullptr;
  args.b2 = operands.has_biases() ? static_cast<const float*>(in(operands.b2)) : nullptr;
  args.y = static_cast<uint16_t*>(in(operands.y));
  args.received = static_cast<int32_t*>(in(operands.received));
  args.status = static_cast<int32_t*>(in(operands.status));
}

::xla::ffi::Error no_buffer_error(std::string_view key);
::xla::ffi::Error foreign_device_error(int32_t device_ordinal, std::string_view key);
::xla::ffi::Error error_of(host::CallStatus status, const std::string& message);

}  // namespace jax_megamoe::ffi_api
