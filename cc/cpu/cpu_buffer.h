// cpu_buffer.h: the symmetric buffer of a mesh of CPU devices: a queue of calls for every group.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/call_queue.h"
#include "host/symmetric_buffer.h"

namespace jax_megamoe::cpu {

class CpuBuffer final : public host::SymmetricBuffer {
 public:
  CpuBuffer(std::string key, const MoeShape& shape, const std::vector<std::vector<int32_t>>& groups,
            uint32_t workers_per_rank);

  CallQueue& queue(uint32_t group) { return *queues_[group]; }

  void poison() override;
  void arm_fault(uint32_t group, uint32_t region, uint32_t rank) override;
  std::string read(uint32_t group, uint32_t rank, uint32_t region) override;

 private:
  std::vector<std::unique_ptr<CallQueue>> queues_;
};

}  // namespace jax_megamoe::cpu
