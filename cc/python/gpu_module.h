// gpu_module.h: what the Python module offers for GPUs. It works without one: calls raise then.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_megamoe {

void bind_gpu(nanobind::module_& m);

}  // namespace jax_megamoe
