// module.cc: the Python module. Registration data for XLA, buffer management, and the protocol's
// pure functions for tests and for `python -m jax_megamoe info`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/cpu_buffer.h"
#include "cpu/gemm.h"
#include "cuda/kernel.h"
#include "ffi/handlers.h"
#include "host/symmetric_buffer.h"
#include "protocol/activation.h"
#include "protocol/dispatch_order.h"
#include "protocol/numerics.h"
#include "protocol/scheduler.h"
#include "protocol/workspace.h"
#include "python/gpu_module.h"
#include "python/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jax_megamoe {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
OutArray<T> make_array(size_t size, T** data) {
  *data = new T[size];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return OutArray<T>(*data, {size}, owner);
}

template <class Out, class In, class Fn>
OutArray<Out> map_array(const Array<In>& in, Fn fn) {
  Out* out;
  auto result = make_array<Out>(in.size(), &out);
  for (size_t i = 0; i < in.size(); ++i) out[i] = fn(in.data()[i]);
  return result;
}

MoeShape make_shape(uint32_t num_ranks, uint32_t num_experts, uint32_t top_k, uint32_t hidden,
                    uint32_t intermediate, uint32_t max_tokens, uint64_t ring_tokens,
                    uint32_t block_m) {
  MoeShape shape{num_ranks, num_experts, top_k, hidden, intermediate, max_tokens, block_m, 1};
  if (!shape.valid()) throw std::invalid_argument("jax_megamoe: MoeShape: not a valid shape");
  shape.ring_blocks = ring_tokens == 0
                          ? shape.default_ring_blocks()
                          : static_cast<uint32_t>(min_of(ceil_div<uint64_t>(ring_tokens, block_m),
                                                         shape.max_pool_blocks()));
  return shape;
}

nb::list workspace_regions(const MoeShape& shape) {
  nb::list out;
  for (const RegionInfo& region : WorkspaceLayout(shape).regions) {
    nb::dict row;
    row["name"] = region.name;
    row["dtype"] = region.dtype;
    row["shape"] = nb::make_tuple(region.dims[0], region.dims[1], region.dims[2]);
    row["offset"] = region.offset;
    row["num_bytes"] = region.num_bytes();
    row["writer"] = region.writer;
    row["reader"] = region.reader;
    out.append(row);
  }
  return out;
}

uint32_t region_index(const std::string& name) {
  const WorkspaceLayout layout{MoeShape{}};
  for (uint32_t i = 0; i < kNumRegions; ++i) {
    if (name == layout.regions[i].name) return i;
  }
  throw std::invalid_argument("jax_megamoe: no workspace region is called " + name);
}

std::shared_ptr<host::SymmetricBuffer> require_buffer(const std::string& key) {
  auto buffer = host::find_buffer(key);
  if (buffer == nullptr) {
    throw std::invalid_argument("jax_megamoe: no symmetric buffer has key " + key);
  }
  return buffer;
}

void require_rank(const host::SymmetricBuffer& buffer, uint32_t group, uint32_t rank) {
  if (group >= buffer.num_groups() || rank >= buffer.shape().num_ranks) {
    throw std::invalid_argument("jax_megamoe: symmetric buffer " + buffer.key() +
                                " has no such group or rank");
  }
}

void create_buffer(const std::string& key, const MoeShape& shape,
                   const std::vector<std::vector<int32_t>>& groups, uint32_t workers_per_rank) {
  if (!shape.valid() || shape.block_m != cpu::kBlockM || workers_per_rank == 0) {
    throw std::invalid_argument("jax_megamoe: create_buffer: shape or workers_per_rank is invalid");
  }
  host::register_buffer(std::make_shared<cpu::CpuBuffer>(key, shape, groups, workers_per_rank));
}

void poison_buffer(const std::string& key) {
  const auto buffer = require_buffer(key);
  nb::gil_scoped_release release;
  buffer->poison();
}

void arm_fault(const std::string& key, uint32_t group, const std::string& region, uint32_t rank) {
  const auto buffer = require_buffer(key);
  const uint32_t index = region_index(region);
  require_rank(*buffer, group, rank);
  nb::gil_scoped_release release;
  buffer->arm_fault(group, index, rank);
}

nb::bytes read_region(const std::string& key, uint32_t group, uint32_t rank,
                      const std::string& name) {
  const auto buffer = require_buffer(key);
  require_rank(*buffer, group, rank);
  const uint32_t region = region_index(name);
  std::string copy;
  {
    nb::gil_scoped_release release;
    copy = buffer->read(group, rank, region);
  }
  return nb::bytes(copy.data(), copy.size());
}

// ---- pure functions of the protocol, for tests ----

std::vector<std::tuple<uint32_t, uint32_t>> source_rows(const std::vector<uint32_t>& counts) {
  const auto count_of = [&](uint32_t rank) { return counts[rank]; };
  const uint32_t total = std::accumulate(counts.begin(), counts.end(), 0u);
  std::vector<std::tuple<uint32_t, uint32_t>> out;
  for (uint32_t position = 0; position < total; ++position) {
    const SourceRow row =
        locate_source_row(static_cast<uint32_t>(counts.size()), position, count_of);
    out.emplace_back(row.rank, row.index);
  }
  return out;
}

using BlockTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;

std::vector<BlockTuple> visit_blocks(const MoeShape& shape, const std::vector<uint32_t>& rows,
                                     uint32_t worker, uint32_t num_workers) {
  if (rows.size() != shape.num_local_experts() || num_workers == 0) {
    throw std::invalid_argument("jax_megamoe: visit_blocks: rows or num_workers do not fit");
  }
  std::vector<BlockTuple> out;
  const ItemCounts items = {shape.linear1_n_blocks(), shape.linear2_n_blocks()};
  for_each_block(
      shape, items, worker, num_workers, [&](uint32_t expert) { return rows[expert]; },
      [&](const Block& b) {
        out.emplace_back(static_cast<uint32_t>(b.phase), b.expert, b.m_block, b.n_block,
                         b.pool_block, b.valid_m);
        return true;
      });
  return out;
}

template <uint8_t (*kQuantizeGroup)(const float*, uint8_t*)>
nb::tuple quantize_groups(const Array<float>& values) {
  if (values.size() % kSfGroup != 0) {
    throw std::invalid_argument("jax_megamoe: the number of values must be a multiple of 32");
  }
  uint8_t *codes, *sf;
  auto codes_array = make_array<uint8_t>(values.size(), &codes);
  auto sf_array = make_array<uint8_t>(values.size() / kSfGroup, &sf);
  for (size_t group = 0; group < values.size() / kSfGroup; ++group) {
    sf[group] = kQuantizeGroup(values.data() + group * kSfGroup, codes + group * kSfGroup);
  }
  return nb::make_tuple(codes_array, sf_array);
}

OutArray<float> activate_array(const Array<float>& gate, const Array<float>& up,
                               const Array<float>& weight, uint32_t activation,
                               const std::array<float, kNumActivationParams>& params) {
  if (gate.size() != up.size() || gate.size() != weight.size()) {
    throw std::invalid_argument("jax_megamoe: activate: gate, up and weight differ in length");
  }
  float* out;
  auto result = make_array<float>(gate.size(), &out);
  with_activation(cuda::to_activation(activation), [&]<Activation A>() {
    for (size_t i = 0; i < gate.size(); ++i) {
      out[i] = activate<A>(gate.data()[i], up.data()[i], weight.data()[i],
                           to_activation_params(params.data()));
    }
  });
  return result;
}

void bind_protocol(nb::module_& m) {
  nb::list activations;
  for (const char* name : kActivationNames) activations.append(name);
  m.attr("ACTIVATIONS") = nb::tuple(activations);
  m.def("source_rows", &source_rows, "counts"_a,
        "(rank, index) of every row of an expert, in pool order, from the ranks' row counts.");
  m.def("visit_blocks", &visit_blocks, "shape"_a, "rows_of_expert"_a, "worker"_a, "num_workers"_a,
        "(phase, expert, m_block, n_block, pool_block, valid_m) of every block of a worker.");
  m.def(
      "ring_targets",
      [](const MoeShape& shape, uint32_t pool_block) {
        const RingPosition ring = ring_position(shape, pool_block);
        return std::make_tuple(ring.slot, ring.lap, l1_arrival_target(shape, ring.lap),
                               l1_empty_target(shape, ring.lap), l2_arrival_target(shape, ring.lap),
                               l2_empty_target(shape, ring.lap));
      },
      "shape"_a, "pool_block"_a,
      "(slot, lap, l1_arrival, l1_empty, l2_arrival, l2_empty targets) of a pool block.");
  m.def("l1_arrival_increment", &l1_arrival_increment, "shape"_a, "row_in_block"_a, "valid_rows"_a);
  m.def("quantize_e4m3", &quantize_groups<&quantize_group_e4m3>, "values"_a,
        "(codes, sf) of float32 values in groups of 32.");
  m.def("quantize_e2m1", &quantize_groups<&quantize_group_e2m1>, "values"_a,
        "(codes, sf) of float32 values in groups of 32, one code a byte.");
  m.def(
      "sf_e4m3", [](const Array<uint32_t>& amax) { return map_array<uint8_t>(amax, sf_e4m3); },
      "amax_bits"_a);
  m.def(
      "sf_e2m1", [](const Array<uint32_t>& amax) { return map_array<uint8_t>(amax, sf_e2m1); },
      "amax_bits"_a);
  m.def(
      "e4m3_to_float", [](const Array<uint8_t>& c) { return map_array<float>(c, e4m3_to_float); },
      "codes"_a);
  m.def(
      "e2m1_doubled", [](const Array<uint8_t>& c) { return map_array<int32_t>(c, e2m1_doubled); },
      "codes"_a);
  m.def(
      "ue8m0_to_float", [](const Array<uint8_t>& c) { return map_array<float>(c, ue8m0_to_float); },
      "bytes"_a);
  m.def(
      "bf16_to_float", [](const Array<uint16_t>& c) { return map_array<float>(c, bf16_to_float); },
      "bits"_a);
  m.def(
      "fp16_to_float", [](const Array<uint16_t>& c) { return map_array<float>(c, fp16_to_float); },
      "bits"_a);
  m.def(
      "float_to_bf16", [](const Array<float>& v) { return map_array<uint16_t>(v, float_to_bf16); },
      "values"_a);
  m.def("activate", &activate_array, "gate"_a, "up"_a, "weight"_a, "activation"_a, "params"_a,
        "The activation in FP32; its number is an index of ACTIVATIONS.");
}

}  // namespace
}  // namespace jax_megamoe

NB_MODULE(_native, m) {
  using namespace jax_megamoe;
  using ffi_api::CallSite;

  // A layer that lives until the interpreter ends, in a registry of JAX or in a module's globals,
  // is no mistake to be reported to whoever ends a program.
  nb::set_leak_warnings(false);

  m.attr("VERSION") = JAX_MEGAMOE_VERSION;
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("CPU_BLOCK_M") = cpu::kBlockM;
  m.attr("NUM_STATUS_WORDS") = static_cast<uint32_t>(cpu::kNumStatusWords);

  m.def(
      "cpu_ffi_handlers",
      [] {
        nb::dict stages;
        stages["instantiate"] = nb::capsule(
            reinterpret_cast<void*>(ffi_api::with_type<CallSite, JaxMegaMoeCpuInstantiate>));
        stages["execute"] = nb::capsule(reinterpret_cast<void*>(JaxMegaMoeCpuExecute));
        return stages;
      },
      "Stage name -> capsule, for jax.ffi.register_ffi_target(platform='cpu').");

  nb::class_<MoeShape>(m, "MoeShape", "Sizes of one layer on R ranks; see cc/protocol/shape.h.")
      .def_static("make", &make_shape, "num_ranks"_a, "num_experts"_a, "top_k"_a, "hidden"_a,
                  "intermediate"_a, "max_tokens"_a, "ring_tokens"_a = 0, "block_m"_a = cpu::kBlockM,
                  "ring_tokens = 0 picks the default. Raises ValueError for an invalid shape.")
      .def_ro("num_ranks", &MoeShape::num_ranks)
      .def_ro("num_experts", &MoeShape::num_experts)
      .def_ro("top_k", &MoeShape::top_k)
      .def_ro("hidden", &MoeShape::hidden)
      .def_ro("intermediate", &MoeShape::intermediate)
      .def_ro("max_tokens", &MoeShape::max_tokens)
      .def_ro("block_m", &MoeShape::block_m)
      .def_ro("ring_blocks", &MoeShape::ring_blocks)
      .def_prop_ro("max_pool_blocks", &MoeShape::max_pool_blocks)
      .def_prop_ro("num_bytes",
                   [](const MoeShape& shape) { return WorkspaceLayout(shape).num_bytes; });

  m.def("workspace_regions", &workspace_regions, "shape"_a,
        "The symmetric buffer's regions in order, without allocating anything.");
  m.def("create_buffer", &create_buffer, "key"_a, "shape"_a, "groups"_a, "workers_per_rank"_a,
        "Allocates one buffer per rank; groups[g][r] is the device ordinal of rank r of group g.");
  m.def("release_buffer", &host::release_buffer, "key"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Frees a buffer; runs the calls that all ranks have entered and fails the others.");
  m.def("buffer_keys", &host::buffer_keys);
  m.def(
      "cpu_isa", [] { return cpu::kIsaNames[static_cast<uint32_t>(cpu::selected_isa())]; },
      "The instruction set of the CPU back end's products; ValueError if JAX_MEGAMOE_CPU_ISA "
      "names\n"
      "one that this machine does not support.");
  m.def(
      "cpu_isas",
      [] {
        std::vector<std::string> names;
        for (uint32_t i = 0; i < cpu::kNumIsas; ++i) {
          if (cpu::supports(static_cast<cpu::Isa>(i))) names.push_back(cpu::kIsaNames[i]);
        }
        return names;
      },
      "The instruction sets that this machine supports, the best one last.");
  m.def("poison_buffer", &poison_buffer, "key"_a,
        "Fills every data region with 0xFF bytes; a correct call does not notice.");
  m.def("arm_fault", &arm_fault, "key"_a, "group"_a, "region"_a, "rank"_a,
        "The next signal that `rank` sends to a counter of `region` is lost.");
  m.def("read_region", &read_region, "key"_a, "group"_a, "rank"_a, "region"_a,
        "A copy of one region's bytes.");

  bind_protocol(m);
  bind_gpu(m);
}
