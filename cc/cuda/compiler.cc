#include "cuda/compiler.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "cuda/sha256.h"

namespace jax_megamoe::cuda {
namespace {

namespace fs = std::filesystem;

// ---- NVRTC ----

struct Nvrtc {
  using Program = void*;
  int (*version)(int*, int*);
  int (*create_program)(Program*, const char*, const char*, int, const char* const*,
                        const char* const*);
  int (*destroy_program)(Program*);
  int (*compile_program)(Program, int, const char* const*);
  int (*get_cubin_size)(Program, size_t*);
  int (*get_cubin)(Program, char*);
  int (*get_program_log_size)(Program, size_t*);
  int (*get_program_log)(Program, char*);
  const char* (*get_error_string)(int);
  std::string version_text;
};

constexpr const char* kSonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

void* open_library(const std::string& nvrtc_path) {
  std::string tried;
  const auto open = [&](const std::string& name, int flags) {
    void* library = dlopen(name.c_str(), flags);
    if (library == nullptr && !(flags & RTLD_NOLOAD)) {
      const char* reason = dlerror();
      tried += (tried.empty() ? "" : "; ") + (reason == nullptr ? name : std::string(reason));
    }
    return library;
  };
  const char* chosen = std::getenv("JAX_MEGAMOE_NVRTC");
  if (chosen != nullptr && *chosen != '\0') {
    if (void* library = open(chosen, RTLD_NOW)) return library;
    throw std::runtime_error("jax_megamoe: environment variable JAX_MEGAMOE_NVRTC: got " +
                             std::string(chosen) + ", which cannot be opened (" + tried +
                             "); expected the file of an NVRTC library. Unset it to let "
                             "jax_megamoe look for one.");
  }
  for (const char* name : kSonames) {
    if (void* library = open(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  if (!nvrtc_path.empty()) {
    if (void* library = open(nvrtc_path, RTLD_NOW)) return library;
  }
  for (const char* name : kSonames) {
    if (void* library = open(name, RTLD_NOW)) return library;
  }
  throw std::runtime_error(
      "jax_megamoe: NVRTC: got no library (" + tried +
      "); expected libnvrtc of CUDA 12 or 13, which compiles the GPU kernels. Install it with `pip "
      "install nvidia-cuda-nvrtc` or `pip install 'jax[cuda13]'`, or set JAX_MEGAMOE_NVRTC to its "
      "file.");
}

Nvrtc load_nvrtc(const std::string& nvrtc_path) {
  void* library = open_library(nvrtc_path);
  Nvrtc api;
  const auto find = [&](auto& member, const char* symbol) {
    member = reinterpret_cast<std::decay_t<decltype(member)>>(dlsym(library, symbol));
    if (member == nullptr) {
      throw std::runtime_error(std::string("jax_megamoe: NVRTC: got a library without ") + symbol +
                               "; expected NVRTC of CUDA 12 or 13. Update it with `pip install -U "
                               "nvidia-cuda-nvrtc`.");
    }
  };
  find(api.version, "nvrtcVersion");
  find(api.create_program, "nvrtcCreateProgram");
  find(api.destroy_program, "nvrtcDestroyProgram");
  find(api.compile_program, "nvrtcCompileProgram");
  find(api.get_cubin_size, "nvrtcGetCUBINSize");
  find(api.get_cubin, "nvrtcGetCUBIN");
  find(api.get_program_log_size, "nvrtcGetProgramLogSize");
  find(api.get_program_log, "nvrtcGetProgramLog");
  find(api.get_error_string, "nvrtcGetErrorString");
  int major = 0, minor = 0;
  api.version(&major, &minor);
  api.version_text = std::to_string(major) + "." + std::to_string(minor);
  return api;
}

// One library per process: the first that was found.
const Nvrtc& nvrtc(const std::string& nvrtc_path) {
  static std::mutex mutex;
  static Nvrtc* instance = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (instance == nullptr) instance = new Nvrtc(load_nvrtc(nvrtc_path));
  return *instance;
}

// ---- headers ----

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("jax_megamoe: cannot read " + path.string());
  return text.str();
}

// Path and text of every header that a kernel can include. More than one includes, so an edit
// compiles again too often rather than too seldom.
void hash_headers(const fs::path& include_dir, Sha256& hash) {
  std::vector<fs::path> files;
  for (const char* folder : {"gpu", "protocol"}) {
    std::error_code error;
    for (fs::recursive_directory_iterator it(include_dir / folder, error), end; !error && it != end;
         it.increment(error)) {
      if (it->is_regular_file(error) && it->path().extension() == ".h") files.push_back(it->path());
    }
  }
  if (files.empty()) {
    throw std::runtime_error("jax_megamoe: kernel sources: got no headers below " +
                             include_dir.string() +
                             "; expected gpu/ and protocol/, which are installed with the package. "
                             "Install it again.");
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    hash.update_field(file.lexically_relative(include_dir).generic_string());
    hash.update_field(read_file(file));
  }
}

// ---- cache ----

// An entry: this line, the hash of the rest, the length of the cubin, the cubin, the log.
constexpr char kMagic[] = "jax_megamoe cubin 1\n";

fs::path cache_dir() {
  if (const char* chosen = std::getenv("JAX_MEGAMOE_CACHE_DIR")) return chosen;
  const char* home = std::getenv("HOME");
  return home == nullptr || *home == '\0' ? fs::path() : fs::path(home) / ".cache" / "jax_megamoe";
}

std::string digest(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

bool read_entry(const fs::path& path, CompiledKernel& kernel) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  std::ostringstream text;
  text << file.rdbuf();
  const std::string entry = text.str();
  constexpr size_t kHead = sizeof(kMagic) - 1 + 64 + 1;
  if (entry.size() < kHead || entry.compare(0, sizeof(kMagic) - 1, kMagic) != 0) return false;
  const std::string_view payload = std::string_view(entry).substr(kHead);
  if (entry.compare(sizeof(kMagic) - 1, 64, digest(payload)) != 0) return false;
  const size_t newline = payload.find('\n');
  if (newline == std::string_view::npos) return false;
  const size_t length = std::strtoull(std::string(payload.substr(0, newline)).c_str(), nullptr, 10);
  const std::string_view rest = payload.substr(newline + 1);
  if (length == 0 || length > rest.size()) return false;
  kernel.cubin = rest.substr(0, length);
  kernel.log = rest.substr(length);
  return true;
}

// A reader sees no entry or a whole one, and of two writers one wins: both have the same bytes.
bool write_entry(const fs::path& path, const CompiledKernel& kernel) {
  static std::atomic<unsigned> next{0};
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const fs::path temporary = path.string() + "." + std::to_string(getpid()) + "." +
                             std::to_string(next.fetch_add(1)) + ".tmp";
  const std::string payload =
      std::to_string(kernel.cubin.size()) + "\n" + kernel.cubin + kernel.log;
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << kMagic << digest(payload) << "\n" << payload;
    file.close();
    if (!file) {
      fs::remove(temporary, error);
      return false;
    }
  }
  fs::rename(temporary, path, error);
  if (!error) return true;
  fs::remove(temporary, error);
  return false;
}

// ---- compilation ----

CompiledKernel run_nvrtc(const Nvrtc& api, const std::string& source,
                         const std::vector<std::string>& options) {
  struct Holder {
    const Nvrtc& api;
    Nvrtc::Program program = nullptr;
    ~Holder() {
      if (program != nullptr) api.destroy_program(&program);
    }
  } holder{api};
  const auto require = [&](int status, const char* call) {
    if (status == 0) return;
    throw std::runtime_error(std::string("jax_megamoe: ") + call + ": " +
                             api.get_error_string(status));
  };
  require(
      api.create_program(&holder.program, source.c_str(), "jax_megamoe.cu", 0, nullptr, nullptr),
      "nvrtcCreateProgram");
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  const int status =
      api.compile_program(holder.program, static_cast<int>(arguments.size()), arguments.data());
  CompiledKernel kernel;
  size_t size = 0;
  if (api.get_program_log_size(holder.program, &size) == 0 && size > 1) {
    kernel.log.resize(size);
    api.get_program_log(holder.program, kernel.log.data());
    kernel.log.resize(size - 1);  // NVRTC counts the terminating zero
  }
  if (status != 0) {
    std::string text = "jax_megamoe: NVRTC " + api.version_text + ": " +
                       api.get_error_string(status) + "; options:";
    for (const std::string& option : options) text += " " + option;
    throw std::runtime_error(text + "\n" + kernel.log);
  }
  require(api.get_cubin_size(holder.program, &size), "nvrtcGetCUBINSize");
  if (size == 0) {
    throw std::runtime_error(
        "jax_megamoe: NVRTC: got no machine code; expected an option --gpu-architecture=sm_...; a "
        "virtual architecture (compute_...) compiles to PTX only.");
  }
  kernel.cubin.resize(size);
  require(api.get_cubin(holder.program, kernel.cubin.data()), "nvrtcGetCUBIN");
  return kernel;
}

}  // namespace

CompiledKernel compile(const std::string& source, const std::string& include_dir,
                       std::vector<std::string> options, const std::string& nvrtc_path) {
  const Nvrtc& api = nvrtc(nvrtc_path);
  Sha256 hash;
  hash.update_field(api.version_text);
  hash.update_field(source);
  for (const std::string& option : options) hash.update_field(option);
  if (!include_dir.empty()) {
    hash_headers(include_dir, hash);
    options.push_back("-I" + include_dir);  // its place does not matter, its contents do
  }
  const std::string key = hash.hex();

  // Compiling one kernel at a time lets a second request for it find the first one's result.
  static std::mutex mutex;
  static std::map<std::string, CompiledKernel> compiled;
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto it = compiled.find(key); it != compiled.end()) return it->second;

  const fs::path dir = cache_dir();
  const fs::path file = dir.empty() ? fs::path() : dir / (key + ".cubin");
  CompiledKernel kernel;
  if (!file.empty() && read_entry(file, kernel)) {
    kernel.from_cache = true;
    kernel.cache_file = file.string();
  } else {
    kernel = run_nvrtc(api, source, options);
    if (!file.empty() && write_entry(file, kernel)) kernel.cache_file = file.string();
  }
  kernel.nvrtc_version = api.version_text;
  CompiledKernel& kept = compiled[key] = kernel;
  kept.from_cache = true;
  return kernel;
}

}  // namespace jax_megamoe::cuda
