// compiler.h: compiles kernels with NVRTC when a program is built, and keeps them on disk.
//
// NVRTC needs neither a GPU nor a CUDA toolkit. It is a library of the CUDA runtime packages, found
// at run time. Kernels are compiled for a real architecture, so that loading one compiles nothing.
#pragma once

#include <string>
#include <vector>

namespace jax_megamoe::cuda {

struct CompiledKernel {
  std::string cubin;
  std::string log;            // what the compiler said, warnings included
  bool from_cache = false;    // of this process or on disk
  std::string cache_file;     // empty: not kept on disk
  std::string nvrtc_version;  // "13.0"
};

// Compiles `source`, whose #includes are found below `include_dir` (may be empty: none).
// `nvrtc_path` is a library file to try before the system's, or empty. Throws std::runtime_error
// with the compiler's log, or one that says how to install NVRTC. Any thread, any number of them.
//
// The library is the first of: the file that the environment variable JAX_MEGAMOE_NVRTC names; one
// that this process has loaded already; `nvrtc_path`; libnvrtc.so.13 or .12 of the system.
//
// The cache is $JAX_MEGAMOE_CACHE_DIR (empty: no cache), or ~/.cache/jax_megamoe. The name of an
// entry is a hash of the source, every header below `include_dir`, the options and NVRTC's version.
// An entry that is not whole is compiled again; a directory that cannot be written is not used.
CompiledKernel compile(const std::string& source, const std::string& include_dir,
                       std::vector<std::string> options, const std::string& nvrtc_path);

// The one translation unit of the layer's kernels.
inline constexpr const char* kKernelSource = "#include \"gpu/sm90/kernel.h\"\n";

}  // namespace jax_megamoe::cuda
