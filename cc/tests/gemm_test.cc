// gemm_test.cc: the panel product on every instruction set of this machine, against double.
#include "cpu/gemm.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "protocol/numerics.h"
#include "tests/check.h"

namespace jax_megamoe::cpu {
namespace {

void check_product(Isa isa, uint32_t num_rows, uint32_t k, uint32_t num_panels, bool any_scale,
                   std::mt19937& rng) {
  const auto bytes = [&](size_t size) {
    std::vector<uint8_t> out(size);
    for (uint8_t& byte : out) byte = static_cast<uint8_t>(rng());
    return out;
  };
  std::vector<float> rows(size_t{num_rows} * k), scratch;
  std::normal_distribution<float> normal;
  for (float& value : rows) value = normal(rng);
  const auto panels = bytes(size_t{num_panels} * k / 2 * kPanel);
  auto sf = bytes(size_t{num_panels} * k / kSfGroup * kPanel);
  // Every scale of the format that a product with numbers of order one cannot drive to infinity.
  for (uint8_t& byte : sf) byte = any_scale ? byte % 240 : 125 + byte % 4;
  std::vector<float> out(size_t{num_rows} * num_panels * kPanel, NAN);
  multiply_panels(rows.data(), num_rows, k, panels.data(), sf.data(), num_panels, out.data(),
                  scratch, isa);
  for (uint32_t row = 0; row < num_rows; ++row) {
    for (uint32_t column = 0; column < num_panels * kPanel; ++column) {
      const uint32_t panel = column / kPanel, lane = column % kPanel;
      double exact = 0, magnitude = 0;
      for (uint32_t j = 0; j < k; ++j) {
        const uint8_t pair = panels[(size_t{panel} * k / 2 + j / 2) * kPanel + lane];
        const uint8_t scale = sf[(size_t{panel} * k / kSfGroup + j / kSfGroup) * kPanel + lane];
        const double weight =
            std::ldexp(e2m1_doubled(j % 2 == 0 ? pair & 15 : pair >> 4), scale - 128);
        exact += rows[size_t{row} * k + j] * weight;
        magnitude += std::fabs(rows[size_t{row} * k + j] * weight);
      }
      // |fp32 - exact| <= k u / (1 - k u) * sum |a||w| for any order of summation, u = 2^-24; a
      // product below the normal range is off by at most half the smallest denormal, 2^-150.
      const double unit = std::ldexp(k, -24);
      const double bound = unit / (1 - unit) * magnitude + std::ldexp(k, -150);
      CHECK(std::fabs(out[size_t{row} * num_panels * kPanel + column] - exact) <= bound);
    }
  }
}

void check_widen_rows(std::mt19937& rng) {
  std::vector<uint8_t> codes(64), sf = {0, 254};
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng() % 0x38);  // at most 1
  std::vector<float> out(64);
  widen_rows(codes.data(), sf.data(), 1, 64, out.data());
  for (uint32_t i = 0; i < 64; ++i) {
    CHECK(out[i] == std::ldexp(e4m3_to_float(codes[i]), i < 32 ? -127 : 127));
  }
}

}  // namespace
}  // namespace jax_megamoe::cpu

int main() {
  using jax_megamoe::cpu::Isa;
  std::mt19937 rng(3);
  jax_megamoe::cpu::check_widen_rows(rng);
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (!jax_megamoe::cpu::supports(isa)) continue;
    for (const uint32_t rows : {1u, 6u, 13u, 14u, 29u, 64u}) {
      for (const uint32_t k : {128u, 256u, 640u}) {
        jax_megamoe::cpu::check_product(isa, rows, k, 2, false, rng);
        jax_megamoe::cpu::check_product(isa, rows, k, 1, true, rng);
      }
    }
    std::printf("gemm_test: instruction set %d checked\n", static_cast<int>(isa));
  }
  std::puts("gemm_test: passed");
}
