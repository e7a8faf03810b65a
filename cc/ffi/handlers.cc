#include "ffi/handlers.h"

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "cpu/cpu_buffer.h"
#include "cpu/gemm.h"
#include "ffi/operands.h"
#include "report/failure_text.h"

namespace jax_megamoe::ffi_api {

namespace ffi = ::xla::ffi;

ffi::TypeId CallSite::id = {};

namespace {

ffi::Future fail(const ffi::Error& error) {
  ffi::Promise promise;
  promise.SetError(error);
  return ffi::Future(promise);
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary) {
  static std::atomic<uint64_t> next{1};
  auto site = std::make_unique<CallSite>();
  site->number = next.fetch_add(1);
  return site;
}

ffi::Future execute(CallSite* site, ffi::RunId run, int32_t device_ordinal, std::string_view key,
                    int32_t activation, ffi::Span<const float> activation_params,
                    int32_t granularity, double timeout_s, bool checked, ffi::AnyBuffer x,
                    ffi::AnyBuffer x_sf, ffi::AnyBuffer topk_idx, ffi::AnyBuffer topk_weights,
                    ffi::AnyBuffer num_tokens, ffi::AnyBuffer ep_rank, ffi::AnyBuffer w13,
                    ffi::AnyBuffer w13_sf, ffi::AnyBuffer w2, ffi::AnyBuffer w2_sf,
                    ffi::AnyBuffer b13, ffi::AnyBuffer b2, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Result<ffi::AnyBuffer> received, ffi::Result<ffi::AnyBuffer> status) {
  const auto buffer = host::find_buffer_of<cpu::CpuBuffer>(std::string(key));
  if (buffer == nullptr) return fail(no_buffer_error(key));
  const host::RankOfDevice* place = buffer->find_device(device_ordinal);
  if (place == nullptr) return fail(foreign_device_error(device_ordinal, key));

  const MoeShape& shape = buffer->shape();
  const int64_t h = shape.hidden, i = shape.intermediate, e = shape.num_local_experts();
  const int64_t panel = cpu::kPanel, group = kSfGroup;
  const Operands operands = {x,       x_sf, topk_idx, topk_weights, num_tokens,
                             ep_rank, w13,  w13_sf,   w2,           w2_sf,
                             b13,     b2,   *y,       *received,    *status};
  const WeightDims weights = {{e, 2 * i / panel, h / 2, panel},
                              {e, 2 * i / panel, h / group, panel},
                              {e, h / panel, i / 2, panel},
                              {e, h / panel, i / group, panel}};
  const Attributes attributes = {granularity, activation, activation_params};
  if (const ffi::Error error = check_operands(operands, shape, weights, attributes);
      error.failure()) {
    return fail(error);
  }
  const int32_t traced_rank = *static_cast<const int32_t*>(ep_rank.untyped_data());
  if (traced_rank != static_cast<int32_t>(place->rank)) {
    return fail(ffi::Error::InvalidArgument(report::rank_mismatch_text(
        "device " + std::to_string(device_ordinal), traced_rank, place->rank)));
  }

  cpu::CallArgs args;
  fill_common(args, operands);
  args.w13_sf = static_cast<const uint8_t*>(w13_sf.untyped_data());
  args.w2_sf = static_cast<const uint8_t*>(w2_sf.untyped_data());
  args.activation = attributes.to_activation();
  args.activation_params = attributes.to_params();
  args.granularity = static_cast<uint32_t>(granularity);
  args.checked = checked;

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
                                  .Attr<int32_t>("activation")
                                  .Attr<ffi::Span<const float>>("activation_params")
                                  .Attr<int32_t>("granularity")  // 32, 128, or 0: rows of x
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
                                  .Arg<ffi::AnyBuffer>()    // b13, [0]: no biases
                                  .Arg<ffi::AnyBuffer>()    // b2
                                  .Ret<ffi::AnyBuffer>()    // y
                                  .Ret<ffi::AnyBuffer>()    // received
                                  .Ret<ffi::AnyBuffer>());  // status
