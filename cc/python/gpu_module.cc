#include "python/gpu_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/compiler.h"
#include "cuda/gpu_buffer.h"
#include "ffi/handlers.h"
#include "gpu/interface/kernel_args.h"
#include "gpu/sm90/tuning.h"
#include "harness/gpu_ranks.h"
#include "protocol/workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_megamoe {
namespace {

using HostBytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using ParamArray = std::array<float, kNumActivationParams>;
using Release = nb::call_guard<nb::gil_scoped_release>;

harness::HostArray host_array(const HostBytes& array) { return {array.data(), array.nbytes()}; }
harness::HostArray host_array(const std::optional<HostBytes>& array) {
  return array ? host_array(*array) : harness::HostArray{};
}

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

uint32_t region_number(const std::string& name) {
  const WorkspaceLayout layout{MoeShape{}};
  for (uint32_t i = 0; i < kNumRegions; ++i) {
    if (name == layout.regions[i].name) return i;
  }
  throw std::invalid_argument("jax_megamoe: no workspace region is called " + name);
}

nb::tuple compile_kernel(const std::string& include_dir, const std::vector<std::string>& options,
                         const std::string& nvrtc_path) {
  cuda::CompiledKernel kernel;
  {
    nb::gil_scoped_release release;
    kernel = cuda::compile(cuda::kKernelSource, include_dir, options, nvrtc_path);
  }
  const char* cache = kernel.from_cache ? "read" : kernel.cache_file.empty() ? "none" : "written";
  return nb::make_tuple(to_bytes(kernel.cubin), kernel.log, cache);
}

MoeShape gpu_shape(uint32_t num_ranks, uint32_t num_experts, uint32_t top_k, uint32_t hidden,
                   uint32_t intermediate, uint32_t max_tokens, uint32_t granularity,
                   uint64_t ring_tokens) {
  MoeShape shape;
  shape.num_ranks = num_ranks;
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.max_tokens = max_tokens;
  shape.block_m = gpu::kMaxBlockM;
  if (!shape.valid()) throw std::invalid_argument("jax_megamoe: MoeShape: not a valid shape");
  shape = gpu::layout_shape(shape, cuda::to_granularity(granularity), ring_tokens);
  if (!shape.valid()) throw std::invalid_argument("jax_megamoe: MoeShape: not a valid shape");
  return shape;
}

std::vector<std::string> kernel_options(const MoeShape& layout, uint32_t granularity, uint32_t tile,
                                        uint32_t build, uint32_t activation, bool bias) {
  const gpu::Granularity g = cuda::to_granularity(granularity);
  if (tile >= gpu::num_tiles(g)) throw std::invalid_argument("jax_megamoe: no such tile");
  return cuda::KernelConfig{
      layout, g, {tile, cuda::to_activation(activation), bias}, cuda::to_build(build)}
      .options();
}

nb::list tiles(uint32_t granularity) {
  const gpu::Granularity g = cuda::to_granularity(granularity);
  nb::list out;
  for (uint32_t index = 0; index < gpu::num_tiles(g); ++index) {
    const gpu::TileConfig tile = gpu::tile_config(g, index);
    nb::dict row;
    row["block_m"] = tile.block_m;
    row["math_warpgroups"] = tile.math_warpgroups;
    row["num_threads"] = tile.num_threads();
    row["reason"] = tile.reason;
    out.append(row);
  }
  return out;
}

std::unique_ptr<harness::GpuRanks> make_gpu_ranks(const MoeShape& layout, uint32_t granularity,
                                                  const std::vector<int>& devices,
                                                  uint32_t ctas_per_rank,
                                                  const std::string& include_dir,
                                                  const std::string& nvrtc_path, uint32_t build) {
  nb::gil_scoped_release release;
  return std::make_unique<harness::GpuRanks>(
      layout, cuda::to_granularity(granularity), devices, ctas_per_rank,
      cuda::Toolchain{include_dir, nvrtc_path, nullptr}, cuda::to_build(build));
}

harness::LaunchOptions launch_options(int32_t tile, double timeout_s, bool checked,
                                      uint32_t activation, const ActivationParams& params,
                                      int32_t skip_rank, int32_t fault_rank,
                                      const std::string& fault_region, bool gate,
                                      std::pair<int32_t, uint32_t> hold) {
  harness::LaunchOptions options;
  options.tile = tile;
  options.timeout_s = timeout_s;
  options.checked = checked;
  options.activation = cuda::to_activation(activation);
  options.activation_params = params;
  options.skip_rank = skip_rank;
  options.fault_rank = fault_rank;
  options.fault_region = fault_rank < 0 ? 0 : region_number(fault_region);
  options.gate = gate;
  std::tie(options.held_device, options.held_sms) = hold;
  return options;
}

void bind_gpu_ranks(nb::module_& m) {
  using harness::GpuRanks;
  nb::class_<GpuRanks>(m, "GpuRanks",
                       "Runs the ranks' kernels on GPUs without JAX; see "
                       "jax_megamoe.devtools.gpu_harness for NumPy arrays.")
      .def(nb::new_(&make_gpu_ranks), "layout"_a, "granularity"_a, "devices"_a, "ctas_per_rank"_a,
           "include_dir"_a, "nvrtc_path"_a, "build"_a)
      .def("num_ctas", &GpuRanks::num_ctas, "rank"_a)
      .def(
          "set_weights",
          [](GpuRanks& self, uint32_t rank, const HostBytes& w13, const HostBytes& w13_row_scale,
             const HostBytes& w2, const HostBytes& w2_row_scale,
             const std::optional<HostBytes>& b13, const std::optional<HostBytes>& b2) {
            nb::gil_scoped_release release;
            self.set_weights(rank, host_array(w13), host_array(w13_row_scale), host_array(w2),
                             host_array(w2_row_scale), host_array(b13), host_array(b2));
          },
          "rank"_a, "w13"_a, "w13_row_scale"_a, "w2"_a, "w2_row_scale"_a, "b13"_a.none(),
          "b2"_a.none(), "This rank's E/R experts in the GPU layout.")
      .def(
          "set_inputs",
          [](GpuRanks& self, uint32_t rank, uint32_t num_rows, const HostBytes& x,
             const std::optional<HostBytes>& x_sf, const HostBytes& topk_idx,
             const HostBytes& topk_weights, std::optional<int32_t> num_tokens) {
            const bool wide = topk_idx.itemsize() == 8;
            nb::gil_scoped_release release;
            self.set_inputs(rank, num_rows, host_array(x), host_array(x_sf), host_array(topk_idx),
                            wide, host_array(topk_weights), num_tokens);
          },
          "rank"_a, "num_rows"_a, "x"_a, "x_sf"_a.none(), "topk_idx"_a, "topk_weights"_a,
          "num_tokens"_a.none(), "Copies one rank's operands to its GPU.")
      .def("select_tile", &GpuRanks::select_tile, "The tile that the number of rows asks for.")
      .def(
          "prepare",
          [](GpuRanks& self, int32_t tile, uint32_t activation) {
            self.prepare(tile, cuda::to_activation(activation));
          },
          "tile"_a, "activation"_a, Release(), "Compiles and loads a kernel.")
      .def(
          "launch",
          [](GpuRanks& self, int32_t tile, uint32_t repeats, bool flush_l2, double timeout_s,
             bool checked, uint32_t activation, const ParamArray& params, int32_t skip_rank,
             int32_t fault_rank, const std::string& fault_region, bool gate,
             std::pair<int32_t, uint32_t> hold) {
            const auto options = launch_options(tile, timeout_s, checked, activation,
                                                to_activation_params(params.data()), skip_rank,
                                                fault_rank, fault_region, gate, hold);
            nb::gil_scoped_release release;
            return self.launch(options, repeats, flush_l2);
          },
          "tile"_a, "repeats"_a, "flush_l2"_a, "timeout_s"_a, "checked"_a, "activation"_a,
          "activation_params"_a, "skip_rank"_a, "fault_rank"_a, "fault_region"_a, "gate"_a,
          "hold"_a, "Microseconds of every rank in every repeat, flat.")
      .def(
          "launch_burst",
          [](GpuRanks& self, int32_t tile, uint32_t calls, double timeout_s, bool checked,
             uint32_t activation, const ParamArray& params) {
            const auto options =
                launch_options(tile, timeout_s, checked, activation,
                               to_activation_params(params.data()), -1, -1, "", false, {-1, 0});
            nb::gil_scoped_release release;
            return self.launch_burst(options, calls);
          },
          "tile"_a, "calls"_a, "timeout_s"_a, "checked"_a, "activation"_a, "activation_params"_a,
          "Calls without waiting in between; seconds in all.")
      .def(
          "y", [](const GpuRanks& self, uint32_t rank) { return to_bytes(self.y(rank)); }, "rank"_a)
      .def(
          "received",
          [](const GpuRanks& self, uint32_t rank) { return to_bytes(self.received(rank)); },
          "rank"_a)
      .def(
          "status", [](const GpuRanks& self, uint32_t rank) { return to_bytes(self.status(rank)); },
          "rank"_a)
      .def(
          "read",
          [](const GpuRanks& self, uint32_t rank, const std::string& region) {
            return to_bytes(self.read(rank, region_number(region)));
          },
          "rank"_a, "region"_a, "A copy of one region's bytes.")
      .def(
          "trace",
          [](const GpuRanks& self, uint32_t rank) { return to_bytes(self.read_trace(rank)); },
          "rank"_a,
          "The trace buffer of the last launch, as cc/gpu/interface/kernel_args.h describes it.")
      .def("poison", &GpuRanks::poison, Release(),
           "Fills every data region and all outputs with 0xFF bytes.")
      .def("failure", &GpuRanks::failure, "rank"_a,
           "What a rank reported in the last launch; empty: nothing.");
}

void create_gpu_buffer(const std::string& key, const MoeShape& layout, uint32_t granularity,
                       const std::vector<std::vector<int32_t>>& groups,
                       const std::string& include_dir, const std::string& nvrtc_path) {
  nb::gil_scoped_release release;
  host::register_buffer(
      std::make_shared<cuda::GpuBuffer>(key, layout, cuda::to_granularity(granularity), groups,
                                        cuda::Toolchain{include_dir, nvrtc_path, nullptr}));
}

// Python runs pending calls in the main thread, between two byte codes; an exception from there is
// raised in whatever the main thread is doing.
int run_pending(void* callback) {
  PyObject* result = PyObject_CallNoArgs(static_cast<PyObject*>(callback));
  Py_DECREF(static_cast<PyObject*>(callback));
  if (result == nullptr) return -1;
  Py_DECREF(result);
  return 0;
}

bool call_in_main_thread(nb::callable callback) {
  PyObject* owned = callback.release().ptr();
  if (Py_AddPendingCall(&run_pending, owned) == 0) return true;
  Py_DECREF(owned);
  return false;
}

void prepare_gpu_kernel(const std::string& key, int32_t tile, uint32_t activation, bool bias) {
  const auto buffer = host::find_buffer_of<cuda::GpuBuffer>(key);
  if (buffer == nullptr) throw std::invalid_argument("jax_megamoe: no GPU buffer with key " + key);
  buffer->kernels().prepare({static_cast<uint32_t>(tile), cuda::to_activation(activation), bias});
}

void bind_gpu_layer(nb::module_& m) {
  using ffi_api::GpuCallSite;
  m.def(
      "gpu_ffi_handlers",
      [] {
        nb::dict stages;
        stages["instantiate"] = nb::capsule(
            reinterpret_cast<void*>(ffi_api::with_type<GpuCallSite, JaxMegaMoeGpuInstantiate>));
        stages["execute"] = nb::capsule(reinterpret_cast<void*>(JaxMegaMoeGpuExecute));
        return stages;
      },
      "Stage name -> capsule, for jax.ffi.register_ffi_target(platform='CUDA').");
  m.def("create_gpu_buffer", &create_gpu_buffer, "key"_a, "shape"_a, "granularity"_a, "groups"_a,
        "include_dir"_a, "nvrtc_path"_a,
        "Allocates one buffer per rank on its GPU; groups[g][r] is the ordinal of rank r of group "
        "g. Raises MemoryError, or RuntimeError if GPUs have no link or there is no driver.");
  m.def("prepare_gpu_kernel", &prepare_gpu_kernel, "key"_a, "tile"_a, "activation"_a, "bias"_a,
        Release(), "Compiles and loads a kernel of a buffer, unless it is there.");
  m.def("wait_gpu_report", &cuda::wait_for_report, Release(),
        "Waits until a call has failed; returns its report, or None once the process ends.");
  m.def("call_in_main_thread", &call_in_main_thread, "callback"_a,
        "The main thread calls `callback` between two byte codes, and raises what it raises. False "
        "if too many such calls wait already.");
  m.def("take_gpu_failures", &cuda::take_failures, nb::call_guard<nb::gil_scoped_release>(),
        "Texts of failed calls that nobody has been told of yet; each is returned once.");
  m.def("shut_down_gpu", &cuda::shut_down_all, nb::call_guard<nb::gil_scoped_release>(),
        "Stops looking for failures and makes running kernels give up. Before the process ends.");
}

void translate_cuda_error(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const cuda::CudaError& cuda_error) {
    PyErr_SetString(
        cuda_error.code == cuda::kErrorOutOfMemory ? PyExc_MemoryError : PyExc_RuntimeError,
        cuda_error.what());
  }
}

}  // namespace

void bind_gpu(nb::module_& m) {
  nb::register_exception_translator(&translate_cuda_error);
  m.attr("GPU_WEIGHT_CHUNK_ROWS") = gpu::kWeightChunkRows;
  m.attr("GPU_TRACE_LANES") = gpu::kTraceLanes;
  m.attr("GPU_TRACE_EVENTS") = gpu::kTraceEvents;
  nb::list trace_names;
  for (const char* name : gpu::kTraceNames) trace_names.append(name);
  m.attr("GPU_TRACE_NAMES") = nb::tuple(trace_names);

  m.def("compile_kernel", &compile_kernel, "include_dir"_a, "options"_a, "nvrtc_path"_a,
        "(cubin, log, cache) of the layer's kernel. cache: \"read\" if it was in the cache, "
        "\"written\" if it is now, \"none\" if it could not be kept. Raises RuntimeError with the "
        "compiler's log.");
  m.def("gpu_shape", &gpu_shape, "num_ranks"_a, "num_experts"_a, "top_k"_a, "hidden"_a,
        "intermediate"_a, "max_tokens"_a, "granularity"_a, "ring_tokens"_a = 0,
        "The shape that sizes a rank's buffer on a GPU. granularity: 0 (row), 32 or 128. Raises "
        "ValueError for an invalid shape.");
  m.def("gpu_kernel_options", &kernel_options, "shape"_a, "granularity"_a, "tile"_a, "build"_a = 0,
        "activation"_a = 0, "bias"_a = false,
        "The compiler's options for one kernel, without include directories. build: 0 to run, 1 "
        "with a "
        "timeline, 2 for compute-sanitizer's racecheck.");
  m.def("gpu_tiles", &tiles, "granularity"_a, "The tile configurations, narrowest first.");
  m.def(
      "gpu_select_tile",
      [](const MoeShape& shape, uint32_t granularity, uint32_t num_rows) {
        return gpu::select_tile(cuda::to_granularity(granularity), shape, num_rows);
      },
      "shape"_a, "granularity"_a, "num_rows"_a,
      "The tile that a call with this many rows per rank uses.");
  m.def(
      "gpu_weight_chunk_bytes",
      [](uint32_t granularity) {
        return gpu::weight_chunk_bytes(cuda::to_granularity(granularity));
      },
      "granularity"_a, "Bytes of the packed weights of 128 rows and 128 of K.");
  bind_gpu_ranks(m);
  bind_gpu_layer(m);
}

}  // namespace jax_megamoe
