#include "ffi/operands.h"

#include "cpu/rank.h"
#include "gpu/interface/kernel_args.h"

namespace jax_megamoe::ffi_api {

namespace ffi = ::xla::ffi;

// One order of status words for all back ends.
static_assert(static_cast<uint32_t>(cpu::kNumStatusWords) == gpu::kNumStatusWords &&
              static_cast<uint32_t>(cpu::kStatusOutOfRange) == gpu::kStatusOutOfRange &&
              static_cast<uint32_t>(cpu::kStatusReceivedRows) == gpu::kStatusReceivedRows &&
              static_cast<uint32_t>(cpu::kStatusPoolBlocks) == gpu::kStatusPoolBlocks &&
              static_cast<uint32_t>(cpu::kStatusRingLaps) == gpu::kStatusRingLaps);

namespace {

using Span = ffi::AnyBuffer::Dimensions;

std::string spelled(const char* dtype, const std::vector<int64_t>& dims) {
  std::string text = std::string(dtype) + "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

const char* dtype_name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::BF16:
      return "bfloat16";
    default:
      return "another dtype";
  }
}

// The Python layer checks all of this when it traces; a program may also call the target directly.
ffi::Error check_buffer(const char* operand, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                        const std::vector<int64_t>& dims) {
  const Span got = buffer.dimensions();
  const std::vector<int64_t> got_dims(got.begin(), got.end());
  if (buffer.element_type() == dtype && got_dims == dims) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string("jax_megamoe: ") + operand + ": got " +
                                     spelled(dtype_name(buffer.element_type()), got_dims) +
                                     "; expected " + spelled(dtype_name(dtype), dims) +
                                     ". Call jax_megamoe.MegaMoE, which prepares its operands.");
}

}  // namespace

int64_t Operands::rows() const {
  const Span dims = x.dimensions();
  return dims.size() == 2 ? dims[0] : -1;
}

ffi::Error check_operands(const Operands& o, const MoeShape& shape, const WeightDims& weights,
                          const Attributes& attributes) {
  const int64_t h = shape.hidden, k = shape.top_k, e = shape.num_local_experts();
  const int64_t rows = o.rows();
  const auto u8 = ffi::DataType::U8;
  const auto s32 = ffi::DataType::S32;
  const auto x_type = o.is_quantised() ? u8 : ffi::DataType::BF16;
  const auto idx_type = o.has_64bit_idx() ? ffi::DataType::S64 : s32;
  const std::vector<int64_t> sf_dims =
      o.is_quantised() ? std::vector<int64_t>{rows, h / kSfGroup} : std::vector<int64_t>{0, 0};
  using Dims = std::vector<int64_t>;
  const Dims b13_dims = o.has_biases() ? Dims{e, 2 * int64_t{shape.intermediate}} : Dims{0};
  const Dims b2_dims = o.has_biases() ? Dims{e, h} : Dims{0};
  for (const ffi::Error& error : {
           check_buffer("x", o.x, x_type, {rows, h}),
           check_buffer("x_sf", o.x_sf, u8, sf_dims),
           check_buffer("topk_idx", o.topk_idx, idx_type, {rows, k}),
           check_buffer("topk_weights", o.topk_weights, ffi::DataType::F32, {rows, k}),
           check_buffer("num_tokens", o.num_tokens, s32,
                        {o.num_tokens.element_count() == 0 ? 0 : 1}),
           check_buffer("ep_rank", o.ep_rank, s32, {1}),
           check_buffer("w13", o.w13, u8, weights.w13),
           check_buffer("w13_sf", o.w13_sf, u8, weights.w13_sf),
           check_buffer("w2", o.w2, u8, weights.w2),
           check_buffer("w2_sf", o.w2_sf, u8, weights.w2_sf),
           check_buffer("b13", o.b13, ffi::DataType::F32, b13_dims),
           check_buffer("b2", o.b2, ffi::DataType::F32, b2_dims),
           check_buffer("y", o.y, ffi::DataType::BF16, {rows, h}),
           check_buffer("received", o.received, s32, {e}),
           check_buffer("status", o.status, s32, {cpu::kNumStatusWords}),
       }) {
    if (error.failure()) return error;
  }
  if (rows > int64_t{shape.max_tokens}) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe: x: got " + std::to_string(rows) + " rows; expected at most " +
        std::to_string(shape.max_tokens) + ". Raise MegaMoEConfig.max_tokens_per_rank.");
  }
  const int32_t granularity = attributes.granularity;
  if (granularity != 0 && granularity != 32 && granularity != 128) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe: granularity: got " + std::to_string(granularity) +
        "; expected 32, 128, or 0 for rows. Call jax_megamoe.MegaMoE, which passes "
        "MegaMoEConfig.activation_granularity on.");
  }
  if (attributes.activation < 0 ||
      static_cast<uint32_t>(attributes.activation) >= kNumActivations ||
      attributes.activation_params.size() != kNumActivationParams) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe: activation: got " + std::to_string(attributes.activation) + " with " +
        std::to_string(attributes.activation_params.size()) +
        " parameters; expected a number from "
        "0 to " +
        std::to_string(kNumActivations - 1) + " with " + std::to_string(kNumActivationParams) +
        ". Call jax_megamoe.MegaMoE, which passes MegaMoEConfig.activation on.");
  }
  return ffi::Error::Success();
}

ffi::Error no_buffer_error(std::string_view key) {
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      "jax_megamoe: no symmetric buffer with key " + std::string(key) +
          " in this process; a program that calls the layer needs one. Create "
          "jax_megamoe.MegaMoE(config, mesh, axis) with the same configuration, mesh and axis "
          "before running it, and keep it open.");
}

ffi::Error foreign_device_error(int32_t device_ordinal, std::string_view key) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jax_megamoe: device " + std::to_string(device_ordinal) +
                        " is not part of the mesh of symmetric buffer " + std::string(key) +
                        ". Create jax_megamoe.MegaMoE over the mesh that runs the program.");
}

ffi::Error error_of(host::CallStatus status, const std::string& message) {
  switch (status) {
    case host::CallStatus::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
    case host::CallStatus::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, message);
    default:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, message);
  }
}

}  // namespace jax_megamoe::ffi_api
