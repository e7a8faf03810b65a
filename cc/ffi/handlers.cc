#include "ffi/handlers.h"

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "cpu/gemm.h"
#include "host/symmetric_buffer.h"

namespace jax_megamoe::ffi_api {

namespace ffi = ::xla::ffi;

ffi::TypeId CallSite::id = {};

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

ffi::Future fail(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
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

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary) {
  static std::atomic<uint64_t> next{1};
  auto site = std::make_unique<CallSite>();
  site->number = next.fetch_add(1);
  return site;
}

ffi::Future execute(CallSite* site, ffi::RunId run, int32_t device_ordinal, std::string_view key,
                    float swiglu_limit, double timeout_s, bool checked, ffi::AnyBuffer x,
                    ffi::AnyBuffer x_sf, ffi::AnyBuffer topk_idx, ffi::AnyBuffer topk_weights,
                    ffi::AnyBuffer num_tokens, ffi::AnyBuffer ep_rank, ffi::AnyBuffer w13,
                    ffi::AnyBuffer w13_sf, ffi::AnyBuffer w2, ffi::AnyBuffer w2_sf,
                    ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                    ffi::Result<ffi::AnyBuffer> status) {
  const std::shared_ptr<host::SymmetricBuffer> buffer = host::find_buffer(std::string(key));
  if (buffer == nullptr) {
    return fail(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jax_megamoe: no symmetric buffer with key " + std::string(key) +
            " in this process; a program that calls the layer needs one. Create "
            "jax_megamoe.MegaMoE(config, mesh, axis) with the same configuration, mesh and axis "
            "before running it, and keep it open."));
  }
  const host::RankOfDevice* place = buffer->find_device(device_ordinal);
  if (place == nullptr) {
    return fail(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                   "jax_megamoe: device " + std::to_string(device_ordinal) +
                       " is not part of the mesh of symmetric buffer " + std::string(key) +
                       ". Create jax_megamoe.MegaMoE over the mesh that runs the program."));
  }

  const MoeShape& shape = buffer->shape();
  const int64_t h = shape.hidden, i = shape.intermediate, k = shape.top_k;
  const int64_t e = shape.num_local_experts();
  const Span x_dims = x.dimensions();
  const int64_t rows = x_dims.size() == 2 ? x_dims[0] : -1;
  const bool quantised = x.element_type() == ffi::DataType::U8;
  const auto x_type = quantised ? ffi::DataType::U8 : ffi::DataType::BF16;
  const auto idx_type =
      topk_idx.element_type() == ffi::DataType::S64 ? ffi::DataType::S64 : ffi::DataType::S32;
  const std::vector<int64_t> sf_dims =
      quantised ? std::vector<int64_t>{rows, h / kSfGroup} : std::vector<int64_t>{0, 0};
  const auto u8 = ffi::DataType::U8;
  const auto s32 = ffi::DataType::S32;
  const int64_t panel = cpu::kPanel, group = kSfGroup;
  for (const ffi::Error& error : {
           check_buffer("x", x, x_type, {rows, h}),
           check_buffer("x_sf", x_sf, u8, sf_dims),
           check_buffer("topk_idx", topk_idx, idx_type, {rows, k}),
           check_buffer("topk_weights", topk_weights, ffi::DataType::F32, {rows, k}),
           check_buffer("num_tokens", num_tokens, s32, {num_tokens.element_count() == 0 ? 0 : 1}),
           check_buffer("ep_rank", ep_rank, s32, {1}),
           check_buffer("w13", w13, u8, {e, 2 * i / panel, h / 2, panel}),
           check_buffer("w13_sf", w13_sf, u8, {e, 2 * i / panel, h / group, panel}),
           check_buffer("w2", w2, u8, {e, h / panel, i / 2, panel}),
           check_buffer("w2_sf", w2_sf, u8, {e, h / panel, i / group, panel}),
           check_buffer("y", *y, ffi::DataType::BF16, {rows, h}),
           check_buffer("received", *received, s32, {e}),
           check_buffer("status", *status, s32, {cpu::kNumStatusWords}),
       }) {
    if (error.failure()) return fail(error);
  }
  if (rows > int64_t{shape.max_tokens}) {
    return fail(ffi::Error::InvalidArgument(
        "jax_megamoe: x: got " + std::to_string(rows) + " rows; expected at most " +
        std::to_string(shape.max_tokens) + ". Raise MegaMoEConfig.max_tokens_per_rank."));
  }
  const int32_t traced_rank = *static_cast<const int32_t*>(ep_rank.untyped_data());
  if (traced_rank != static_cast<int32_t>(place->rank)) {
    return fail(ffi::Error::InvalidArgument(
        "jax_megamoe: expert-parallel rank: device " + std::to_string(device_ordinal) +
        " is rank " + std::to_string(traced_rank) + " in the program, but rank " +
        std::to_string(place->rank) + " in symmetric buffer " + std::string(key) +
        ". Run layer.local under shard_map over the mesh that the layer was created with."));
  }

  cpu::CallArgs args;
  args.x = x.untyped_data();
  args.x_sf = quantised ? static_cast<const uint8_t*>(x_sf.untyped_data()) : nullptr;
  args.topk_idx = topk_idx.untyped_data();
  args.topk_idx_is_64bit = idx_type == ffi::DataType::S64;
  args.topk_weights = static_cast<const float*>(topk_weights.untyped_data());
  if (num_tokens.element_count() != 0) {
    args.num_tokens = static_cast<const int32_t*>(num_tokens.untyped_data());
  }
  args.num_rows = static_cast<uint32_t>(rows);
  args.w13 = static_cast<const uint8_t*>(w13.untyped_data());
  args.w13_sf = static_cast<const uint8_t*>(w13_sf.untyped_data());
  args.w2 = static_cast<const uint8_t*>(w2.untyped_data());
  args.w2_sf = static_cast<const uint8_t*>(w2_sf.untyped_data());
  args.swiglu_limit = swiglu_limit;
  args.checked = checked;
  args.y = static_cast<uint16_t*>(y->untyped_data());
  args.received = static_cast<int32_t*>(received->untyped_data());
  args.status = static_cast<int32_t*>(status->untyped_data());

  ffi::Promise promise;
  ffi::Future future(promise);
  buffer->queue(place->group)
      .submit(run.run_id, site->number, place->rank, args, timeout_s,
              [promise](host::CallStatus call_status, const std::string& message) mutable {
                if (call_status == host::CallStatus::kOk) {
                  promise.SetAvailable();
                } else {
                  promise.SetError(error_of(call_status, message));
                }
              });
  return future;
}

}  // namespace
}  // namespace jax_megamoe::ffi_api

namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMegaMoeCpuInstantiate, jax_megamoe::ffi_api::instantiate,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMegaMoeCpuExecute, jax_megamoe::ffi_api::execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jax_megamoe::ffi_api::CallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("key")
                                  .Attr<float>("swiglu_limit")
                                  .Attr<double>("timeout_s")
                                  .Attr<bool>("checked")
                                  .Arg<ffi::AnyBuffer>()    // x
                                  .Arg<ffi::AnyBuffer>()    // x_sf, [0, 0] for BF16 x
                                  .Arg<ffi::AnyBuffer>()    // topk_idx
                                  .Arg<ffi::AnyBuffer>()    // topk_weights
                                  .Arg<ffi::AnyBuffer>()    // num_tokens, [0]: all rows
                                  .Arg<ffi::AnyBuffer>()    // ep_rank
                                  .Arg<ffi::AnyBuffer>()    // w13
                                  .Arg<ffi::AnyBuffer>()    // w13_sf
                                  .Arg<ffi::AnyBuffer>()    // w2
                                  .Arg<ffi::AnyBuffer>()    // w2_sf
                                  .Ret<ffi::AnyBuffer>()    // y
                                  .Ret<ffi::AnyBuffer>()    // received
                                  .Ret<ffi::AnyBuffer>());  // status
