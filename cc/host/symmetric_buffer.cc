#include "host/symmetric_buffer.h"

#include <mutex>
#include <stdexcept>
#include <utility>

namespace jax_megamoe::host {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<SymmetricBuffer>> buffers;
};

Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: XLA's threads may outlive main
  return *instance;
}

}  // namespace

SymmetricBuffer::SymmetricBuffer(std::string key, const MoeShape& shape,
                                 const std::vector<std::vector<int32_t>>& groups)
    : key_(std::move(key)), shape_(shape), num_groups_(static_cast<uint32_t>(groups.size())) {
  for (uint32_t group = 0; group < groups.size(); ++group) {
    if (groups[group].size() != shape.num_ranks) {
      throw std::invalid_argument("jax_megamoe: a group needs one device per rank");
    }
    for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
      if (!devices_.emplace(groups[group][rank], RankOfDevice{group, rank}).second) {
        throw std::invalid_argument("jax_megamoe: a device may hold one rank only");
      }
    }
  }
}

const RankOfDevice* SymmetricBuffer::find_device(int32_t ordinal) const {
  const auto it = devices_.find(ordinal);
  return it == devices_.end() ? nullptr : &it->second;
}

void register_buffer(std::shared_ptr<SymmetricBuffer> buffer) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const std::string key = buffer->key();
  if (!registry().buffers.emplace(key, std::move(buffer)).second) {
    throw std::invalid_argument("jax_megamoe: a symmetric buffer with key " + key + " exists");
  }
}

std::shared_ptr<SymmetricBuffer> find_buffer(const std::string& key) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto it = registry().buffers.find(key);
  return it == registry().buffers.end() ? nullptr : it->second;
}

void release_buffer(const std::string& key) {
  std::shared_ptr<SymmetricBuffer>
      buffer;  // destroyed after the lock is gone: that waits for calls
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto it = registry().buffers.find(key);
  if (it == registry().buffers.end()) return;
  buffer = std::move(it->second);
  registry().buffers.erase(it);
}

std::vector<std::string> buffer_keys() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<std::string> keys;
  for (const auto& [key, buffer] : registry().buffers) keys.push_back(key);
  return keys;
}

}  // namespace jax_megamoe::host
