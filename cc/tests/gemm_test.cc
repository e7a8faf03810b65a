// gemm_test.cc: the panel product on every instruction set of this machine, against double and
// against the portable one.
#include "cpu/gemm.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "protocol/numerics.h"
#include "tests/check.h"

namespace jax_megamoe::cpu {
namespace {

std::vector<uint8_t> random_bytes(size_t size, std::mt19937& rng) {
  std::vector<uint8_t> out(size);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(rng());
  return out;
}

struct Case {
  uint32_t num_rows;
  uint32_t k;
  uint32_t num_panels;
  std::vector<float> rows;  // see row_offset()
  std::vector<uint8_t> panels, sf;
  std::vector<float> row_units;
};

// Any scale: every one that a product with numbers of order one cannot drive to infinity.
Case random_case(uint32_t num_rows, uint32_t k, uint32_t num_panels, bool any_scale,
                 std::mt19937& rng) {
  Case c = {num_rows,
            k,
            num_panels,
            std::vector<float>(size_t{num_rows} * k),
            {},
            {},
            std::vector<float>(num_rows, 1.0f)};
  std::normal_distribution<float> normal;
  for (float& value : c.rows) value = normal(rng);
  c.panels = random_bytes(size_t{num_panels} * k / 2 * kPanel, rng);
  c.sf = random_bytes(size_t{num_panels} * k / kSfGroup * kPanel, rng);
  for (uint8_t& byte : c.sf) byte = any_scale ? byte % 240 : 125 + byte % 4;
  return c;
}

std::vector<float> multiply(const Case& c, Isa isa) {
  std::vector<float> out(size_t{c.num_rows} * c.num_panels * kPanel, NAN), scratch(kScratchFloats);
  multiply_panels({c.rows.data(), c.row_units.data(), c.num_rows, c.k, c.panels.data(), c.sf.data(),
                   c.num_panels, out.data(), scratch.data()},
                  isa);
  return out;
}

double weight_of(const Case& c, uint32_t column, uint32_t j) {
  const uint32_t panel = column / kPanel, lane = column % kPanel;
  const uint8_t pair = c.panels[(size_t{panel} * c.k / 2 + j / 2) * kPanel + lane];
  const uint8_t scale = c.sf[(size_t{panel} * c.k / kSfGroup + j / kSfGroup) * kPanel + lane];
  return std::ldexp(e2m1_doubled(j % 2 == 0 ? pair & 15 : pair >> 4), scale - 128);
}

// value(row, j): of the widened rows, in double. `unit`: what sums may be multiplied by in the end.
template <class Value>
void check_product(Isa isa, const Case& c, double unit, const Value& value) {
  const std::vector<float> out = multiply(c, isa);
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    for (uint32_t column = 0; column < c.num_panels * kPanel; ++column) {
      double exact = 0, magnitude = 0;
      for (uint32_t j = 0; j < c.k; ++j) {
        const double product = value(row, j) * weight_of(c, column, j);
        exact += product;
        magnitude += std::fabs(product);
      }
      // |fp32 - exact| <= k u / (1 - k u) * sum |a||w| for any order of summation, u = 2^-24; with
      // products that are rounded before they are added, k + 1 roundings instead of k. A product
      // below the normal range is off by at most half the smallest denormal, 2^-150.
      const double rounding = std::ldexp(c.k + 1, -24);
      const double bound = rounding / (1 - rounding) * magnitude + unit * std::ldexp(c.k, -150);
      CHECK(std::fabs(out[size_t{row} * c.num_panels * kPanel + column] - exact) <= bound);
    }
  }
}
void check_product(Isa isa, const Case& c) {
  check_product(isa, c, 1,
                [&](uint32_t row, uint32_t j) { return c.rows[row_offset(c.num_rows, row, j)]; });
}

// A row's bits do not depend on the rows beside it, so not on the height of its tile either.
void check_rows_alone(Isa isa, const Case& c) {
  const std::vector<float> all = multiply(c, isa);
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    Case alone = {1, c.k, c.num_panels, std::vector<float>(c.k), c.panels, c.sf, {1.0f}};
    for (uint32_t j = 0; j < c.k; ++j) alone.rows[j] = c.rows[row_offset(c.num_rows, row, j)];
    const std::vector<float> one = multiply(alone, isa);
    CHECK(std::memcmp(one.data(), &all[row * one.size()], one.size() * sizeof(float)) == 0);
  }
}

// Products of E4M3 and E2M1 values are exact, so that fused and separate roundings are the same.
void check_same_bits(Isa isa, uint32_t num_rows, std::mt19937& rng) {
  Case c = random_case(num_rows, 640, 3, false, rng);
  auto codes = random_bytes(size_t{num_rows} * c.k, rng);
  for (uint8_t& code : codes) code = (code & 0x7F) == kE4m3Nan ? 0 : code;
  auto sf = random_bytes(size_t{num_rows} * c.k / kSfGroup, rng);
  for (uint8_t& byte : sf) byte = 117 + byte % 20;
  std::vector<float> rows(c.rows.size());
  std::vector<float> units(num_rows);
  widen_rows(codes.data(), sf.data(), num_rows, c.k, c.rows.data(), units.data(), Isa::kPortable);
  widen_rows(codes.data(), sf.data(), num_rows, c.k, rows.data(), units.data(), isa);
  for (float unit : units) CHECK(unit == 1);
  CHECK(std::memcmp(rows.data(), c.rows.data(), rows.size() * sizeof(float)) == 0);
  const std::vector<float> want = multiply(c, Isa::kPortable), got = multiply(c, isa);
  CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0);
}

// All codes with scales of both ends and of the middle of their range.
void check_widen_rows(Isa isa) {
  for (const uint8_t scale : {0, 1, 2, 127, 246, 254, 255}) {
    for (uint32_t first = 0; first < 256; first += 64) {
      std::vector<uint8_t> codes(64), sf(2, scale);
      for (uint32_t i = 0; i < 64; ++i) codes[i] = static_cast<uint8_t>(first + i);
      std::vector<float> out(64), units(2);
      widen_rows(codes.data(), sf.data(), 2, 32, out.data(), units.data(), isa);
      for (uint32_t i = 0; i < 64; ++i) {
        const float got = out[row_offset(2, i / 32, i % 32)];
        const double want = double{e4m3_to_float(codes[i])} * ue8m0_to_float(scale);
        CHECK(units[i / 32] == (scale < 247 ? 1 : 256));
        CHECK(std::isnan(want) ? std::isnan(got)
                               : double{got} * units[i / 32] == want && std::isfinite(got) &&
                                     std::signbit(got) == std::signbit(want));
      }
    }
  }
}

// Scales whose largest values are no FP32 numbers, beside ordinary ones, with a factor on the other
// side that makes the products ordinary.
void check_large_scales(Isa isa, uint32_t num_rows, bool large_rows, std::mt19937& rng) {
  Case c = random_case(num_rows, 64, 3, false, rng);
  auto codes = random_bytes(size_t{num_rows} * c.k, rng);
  for (uint8_t& code : codes) code = (code & 0x7F) == kE4m3Nan ? 0 : code;
  std::vector<uint8_t> row_sf(size_t{num_rows} * c.k / kSfGroup);
  for (uint8_t& byte : row_sf) byte = static_cast<uint8_t>((large_rows ? 240 : 4) + rng() % 15);
  for (uint8_t& byte : c.sf) byte = static_cast<uint8_t>((large_rows ? 4 : 240) + rng() % 15);
  widen_rows(codes.data(), row_sf.data(), num_rows, c.k, c.rows.data(), c.row_units.data(), isa);
  check_product(isa, c, 256 * 4, [&](uint32_t row, uint32_t j) {
    const uint32_t place = row * c.k + j;
    return std::ldexp(double{e4m3_to_float(codes[place])}, row_sf[place / kSfGroup] - 127);
  });
}

}  // namespace
}  // namespace jax_megamoe::cpu

int main() {
  using namespace jax_megamoe::cpu;
  const uint32_t seed = std::random_device{}();
  std::printf("gemm_test: seed %u\n", seed);
  std::mt19937 rng(seed);
  uint32_t num_checked = 0;
  for (uint32_t i = 0; i < kNumIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!supports(isa)) continue;
    check_widen_rows(isa);
    for (uint32_t rows = 1; rows <= 30; ++rows) {
      check_product(isa, random_case(rows, 32 * (1 + rng() % 20), 1 + rng() % 5, false, rng));
      check_product(isa, random_case(rows, 32 * (1 + rng() % 20), 1 + rng() % 5, true, rng));
      check_rows_alone(isa, random_case(rows, 288, 5, false, rng));
      check_same_bits(isa, rows, rng);
      check_large_scales(isa, rows, true, rng);
      check_large_scales(isa, rows, false, rng);
    }
    check_product(isa, random_case(64, 640, 2, false, rng));
    std::printf("gemm_test: %s checked\n", kIsaNames[i]);
    ++num_checked;
  }
  CHECK(num_checked > 0 && supports(selected_isa()));
  std::puts("gemm_test: passed");
}
