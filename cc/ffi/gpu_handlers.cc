#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/gpu_buffer.h"
#include "ffi/handlers.h"
#include "ffi/operands.h"

namespace jax_megamoe::ffi_api {

namespace ffi = ::xla::ffi;

ffi::TypeId GpuCallSite::id = {};

namespace {

// What a program's calls need is compiled and loaded here, while the program is compiled: loading
// may wait for the GPU, which it must not do once some of the ranks are running.
ffi::ErrorOr<std::unique_ptr<GpuCallSite>> instantiate(ffi::Dictionary attributes) {
  const auto key = attributes.get<std::string_view>("key");
  const auto tile = attributes.get<int32_t>("tile");
  const auto activation = attributes.get<int32_t>("activation");
  const auto bias = attributes.get<bool>("bias");
  if (!key.has_value() || !tile.has_value() || *tile < 0 || !activation.has_value() ||
      !bias.has_value()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax_megamoe: custom call: got no attributes key, tile, activation and bias; expected "
        "those that jax_megamoe.MegaMoE passes. Call it instead of the target."));
  }
  auto site = std::make_unique<GpuCallSite>();
  try {
    const cuda::KernelVariant kernel = {static_cast<uint32_t>(*tile),
                                        cuda::to_activation(static_cast<uint32_t>(*activation)),
                                        *bias};
    site->wish = std::make_unique<cuda::KernelWish>(std::string(*key), kernel);
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what()));
  }
  return site;
}

ffi::Error execute(GpuCallSite* site, ffi::RunId run, int32_t device_ordinal, void* stream,
                   std::string_view key, int32_t activation,
                   ffi::Span<const float> activation_params, int32_t granularity, double timeout_s,
                   bool checked, int32_t tile, bool bias, ffi::AnyBuffer x, ffi::AnyBuffer x_sf,
                   ffi::AnyBuffer topk_idx, ffi::AnyBuffer topk_weights, ffi::AnyBuffer num_tokens,
                   ffi::AnyBuffer ep_rank, ffi::AnyBuffer w13, ffi::AnyBuffer w13_sf,
                   ffi::AnyBuffer w2, ffi::AnyBuffer w2_sf, ffi::AnyBuffer b13, ffi::AnyBuffer b2,
                   ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                   ffi::Result<ffi::AnyBuffer> status) {
  const auto buffer = host::find_buffer_of<cuda::GpuBuffer>(std::string(key));
  if (buffer == nullptr) return no_buffer_error(key);
  const host::RankOfDevice* place = buffer->find_device(device_ordinal);
  if (place == nullptr) return foreign_device_error(device_ordinal, key);

  const MoeShape& shape = buffer->shape();
  const int64_t h = shape.hidden, i = shape.intermediate, e = shape.num_local_experts();
  const int64_t rows = gpu::kWeightChunkRows, columns = gpu::kBlockK;
  const int64_t chunk = gpu::weight_chunk_bytes(buffer->granularity());
  const Operands operands = {x,       x_sf, topk_idx, topk_weights, num_tokens,
                             ep_rank, w13,  w13_sf,   w2,           w2_sf,
                             b13,     b2,   *y,       *received,    *status};
  const WeightDims weights = {
      {e, 2 * i / rows, h / columns, chunk}, {e, 2 * i}, {e, h / rows, i / columns, chunk}, {e, h}};
  const Attributes attributes = {granularity, activation, activation_params};
  if (const ffi::Error error = check_operands(operands, shape, weights, attributes);
      error.failure()) {
    return error;
  }
  if (static_cast<uint32_t>(granularity) != static_cast<uint32_t>(buffer->granularity())) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe: granularity: got " + std::to_string(granularity) + "; expected " +
        std::to_string(static_cast<uint32_t>(buffer->granularity())) +
        ", that of the symmetric buffer. Call jax_megamoe.MegaMoE, which passes both.");
  }

  gpu::KernelArgs args{};
  fill_common(args, operands);
  args.ep_rank = static_cast<const int32_t*>(ep_rank.untyped_data());
  args.w13_row_scale = static_cast<const uint8_t*>(w13_sf.untyped_data());
  args.w2_row_scale = static_cast<const uint8_t*>(w2_sf.untyped_data());
  gpu::set_activation_params(args, attributes.to_params());
  args.checked = checked;
  args.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);

  if (bias != operands.has_biases()) {
    return ffi::Error::InvalidArgument(
        "jax_megamoe: b13 and b2: got " + std::string(bias ? "none" : "biases") +
        "; expected what attribute bias says. Call jax_megamoe.MegaMoE, which passes both.");
  }
  const cuda::KernelVariant kernel = {static_cast<uint32_t>(tile), attributes.to_activation(),
                                      bias};
  try {
    bool captured = false;
    const cuda::LaunchResult result = buffer->launch(
        *place, {run.run_id, kernel, static_cast<cuda::CUstream>(stream)}, args, &captured);
    if (captured) site->keep(buffer);
    if (result.status == host::CallStatus::kOk) return ffi::Error::Success();
    return error_of(result.status, result.message);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace

void GpuCallSite::keep(std::shared_ptr<cuda::GpuBuffer> buffer) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& kept : captured) {
    if (kept == buffer) return;
  }
  captured.push_back(std::move(buffer));
}

}  // namespace jax_megamoe::ffi_api

namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMegaMoeGpuInstantiate, jax_megamoe::ffi_api::instantiate,
                              ffi::Ffi::BindInstantiate().Attrs());

// Compatible with CUDA graphs: everything that changes from call to call is in device memory.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMegaMoeGpuExecute, jax_megamoe::ffi_api::execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<jax_megamoe::ffi_api::GpuCallSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Attr<std::string_view>("key")
                                  .Attr<int32_t>("activation")
                                  .Attr<ffi::Span<const float>>("activation_params")
                                  .Attr<int32_t>("granularity")
                                  .Attr<double>("timeout_s")
                                  .Attr<bool>("checked")
                                  .Attr<int32_t>("tile")
                                  .Attr<bool>("bias")
                                  .Arg<ffi::AnyBuffer>()   // x
                                  .Arg<ffi::AnyBuffer>()   // x_sf
                                  .Arg<ffi::AnyBuffer>()   // topk_idx
                                  .Arg<ffi::AnyBuffer>()   // topk_weights
                                  .Arg<ffi::AnyBuffer>()   // num_tokens
                                  .Arg<ffi::AnyBuffer>()   // ep_rank
                                  .Arg<ffi::AnyBuffer>()   // w13
                                  .Arg<ffi::AnyBuffer>()   // w13_sf
                                  .Arg<ffi::AnyBuffer>()   // w2
                                  .Arg<ffi::AnyBuffer>()   // w2_sf
                                  .Arg<ffi::AnyBuffer>()   // b13, [0]: no biases
                                  .Arg<ffi::AnyBuffer>()   // b2
                                  .Ret<ffi::AnyBuffer>()   // y
                                  .Ret<ffi::AnyBuffer>()   // received
                                  .Ret<ffi::AnyBuffer>(),  // status
                              {ffi::Traits::kCmdBufferCompatible});
