#include "cpu/cpu_buffer.h"

#include <cstring>
#include <utility>

namespace jax_megamoe::cpu {

CpuBuffer::CpuBuffer(std::string key, const MoeShape& shape,
                     const std::vector<std::vector<int32_t>>& groups, uint32_t workers_per_rank)
    : host::SymmetricBuffer(std::move(key), shape, groups) {
  for (uint32_t group = 0; group < num_groups(); ++group) {
    queues_.push_back(std::make_unique<CallQueue>(shape, workers_per_rank));
  }
}

void CpuBuffer::poison() {
  for (const auto& queue : queues_) {
    queue->with_idle_group([](MegaMoeGroup& g) { g.poison(); });
  }
}

void CpuBuffer::arm_fault(uint32_t group, uint32_t region, uint32_t rank) {
  queue(group).with_idle_group([&](MegaMoeGroup& g) { g.arm_fault(region, rank); });
}

std::string CpuBuffer::read(uint32_t group, uint32_t rank, uint32_t region) {
  const RegionInfo info = WorkspaceLayout(shape()).regions[region];
  std::string copy(info.num_bytes(), '\0');
  queue(group).with_idle_group([&](MegaMoeGroup& g) {
    std::memcpy(copy.data(), static_cast<const char*>(g.base(rank)) + info.offset, copy.size());
  });
  return copy;
}

}  // namespace jax_megamoe::cpu
