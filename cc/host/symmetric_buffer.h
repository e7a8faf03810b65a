// symmetric_buffer.h: the process's symmetric buffers, found by a stable key at execution.
//
// A compiled program holds the key, never an address, so that it can be serialised and cached. One
// buffer serves one (mesh, axis, configuration): a group of ranks for every combination of the
// other mesh axes, and a table from device ordinal to (group, rank). What a group is differs
// between back ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "protocol/shape.h"

namespace jax_megamoe::host {

struct RankOfDevice {
  uint32_t group;
  uint32_t rank;
};

class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;

  const std::string& key() const { return key_; }
  const MoeShape& shape() const { return shape_; }
  const RankOfDevice* find_device(int32_t ordinal) const;
  uint32_t num_groups() const { return num_groups_; }

  // For tests and dumps; these wait until no call is running.
  virtual void poison() = 0;  // data regions: 0xFF
  virtual void arm_fault(uint32_t group, uint32_t region, uint32_t rank) = 0;
  virtual std::string read(uint32_t group, uint32_t rank, uint32_t region) = 0;

 protected:
  // groups[g][r] is the ordinal of the device that is rank r of group g.
  SymmetricBuffer(std::string key, const MoeShape& shape,
                  const std::vector<std::vector<int32_t>>& groups);

 private:
  const std::string key_;
  const MoeShape shape_;
  const uint32_t num_groups_;
  std::map<int32_t, RankOfDevice> devices_;
};

// The registry. All functions may be called from any thread.
void register_buffer(std::shared_ptr<SymmetricBuffer> buffer);         // throws if the key is taken
std::shared_ptr<SymmetricBuffer> find_buffer(const std::string& key);  // null if there is none
void release_buffer(const std::string& key);
std::vector<std::string> buffer_keys();

// The buffer of that key if it is of that kind.
template <class Buffer>
std::shared_ptr<Buffer> find_buffer_of(const std::string& key) {
  return std::dynamic_pointer_cast<Buffer>(find_buffer(key));
}

}  // namespace jax_megamoe::host
