// sha256.h: SHA-256, for the names of cache entries and to tell a whole entry from a broken one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_megamoe::cuda {

class Sha256 {
 public:
  void update(std::string_view bytes);
  // Length first, so that ("ab", "c") and ("a", "bc") differ.
  void update_field(std::string_view bytes);
  std::string hex();  // 64 characters; ends the computation

 private:
  void block(const uint8_t* bytes);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  uint64_t num_bytes_ = 0;
};

}  // namespace jax_megamoe::cuda
