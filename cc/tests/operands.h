// operands.h: random operands of one rank, in the memory of a test program.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "cpu/mega_moe.h"
#include "protocol/numerics.h"

namespace jax_megamoe::cpu {

struct Operands {
  std::vector<uint16_t> x;
  std::vector<int32_t> topk_idx;
  std::vector<float> topk_weights;
  std::vector<uint8_t> w13, w13_sf, w2, w2_sf;  // canonical: rows [out][in/2], all local experts
  std::vector<uint8_t> w13_cpu, w13_sf_cpu, w2_cpu, w2_sf_cpu;
  std::vector<float> b13, b2;  // canonical: [E/R][2I] gate rows first, [E/R][H]
  std::vector<float> b13_cpu;
  std::vector<uint16_t> y;
  std::vector<int32_t> received, status;
  int32_t num_tokens;
};

// [E][rows][columns] -> [E][rows/16][columns][16]
inline std::vector<uint8_t> to_panels(const std::vector<uint8_t>& rows, uint32_t num_rows,
                                      uint32_t columns) {
  std::vector<uint8_t> panels(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t column = i % columns;
    const size_t row = i / columns % num_rows;
    const size_t expert = i / columns / num_rows;
    panels[((expert * num_rows + row / 16 * 16) * columns) + column * 16 + row % 16] = rows[i];
  }
  return panels;
}

template <class T>
std::vector<T> interleave(const std::vector<T>& rows, uint32_t num_rows, uint32_t columns) {
  std::vector<T> out(rows.size());
  const uint32_t half = num_rows / 2;
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t column = i % columns;
    const size_t row = i / columns % num_rows;
    const size_t expert = i / columns / num_rows;
    const size_t channel = row % half;
    const size_t to = channel / 8 * 16 + (row >= half ? 8 : 0) + channel % 8;
    out[(expert * num_rows + to) * columns + column] = rows[i];
  }
  return out;
}

inline Operands make_operands(const MoeShape& shape, std::mt19937& rng, uint32_t num_rows,
                              uint32_t routing) {
  Operands o;
  std::normal_distribution<float> normal;
  for (uint32_t i = 0; i < num_rows * shape.hidden; ++i) o.x.push_back(float_to_bf16(normal(rng)));
  for (uint32_t i = 0; i < num_rows * shape.top_k; ++i) {
    const int32_t any = static_cast<int32_t>(rng() % shape.num_experts);
    const int32_t ids[4] = {any, 0, rng() % 3 == 0 ? -1 : any,
                            rng() % 5 == 0 ? static_cast<int32_t>(shape.num_experts) + any : any};
    o.topk_idx.push_back(ids[routing % 4]);
    o.topk_weights.push_back(0.1f + static_cast<float>(rng() % 100) / 100.0f);
  }
  const auto bytes = [&](size_t size) {
    std::vector<uint8_t> out(size);
    for (uint8_t& byte : out) byte = static_cast<uint8_t>(rng());
    return out;
  };
  const auto scales = [&](size_t size) {
    std::vector<uint8_t> out(size);
    for (uint8_t& byte : out) byte = static_cast<uint8_t>(120 + rng() % 4);
    return out;
  };
  const size_t experts = shape.num_local_experts();
  const uint32_t h = shape.hidden, i = shape.intermediate;
  o.w13 = bytes(experts * 2 * i * h / 2);
  o.w13_sf = scales(experts * 2 * i * h / kSfGroup);
  o.w2 = bytes(experts * h * i / 2);
  o.w2_sf = scales(experts * h * i / kSfGroup);
  o.w13_cpu = to_panels(interleave(o.w13, 2 * i, h / 2), 2 * i, h / 2);
  o.w13_sf_cpu = to_panels(interleave(o.w13_sf, 2 * i, h / kSfGroup), 2 * i, h / kSfGroup);
  o.w2_cpu = to_panels(o.w2, h, i / 2);
  o.w2_sf_cpu = to_panels(o.w2_sf, h, i / kSfGroup);
  for (size_t row = 0; row < experts * 2 * i; ++row) o.b13.push_back(normal(rng));
  for (size_t row = 0; row < experts * h; ++row) o.b2.push_back(normal(rng));
  o.b13_cpu = interleave(o.b13, 2 * i, 1);
  o.y.assign(size_t{num_rows} * h, 0xFFFF);
  o.received.assign(experts, -1);
  o.status.assign(kNumStatusWords, -1);
  o.num_tokens = static_cast<int32_t>(num_rows);
  return o;
}

inline CallArgs args_of(Operands& o, const MoeShape& shape) {
  CallArgs args;
  args.x = o.x.data();
  args.topk_idx = o.topk_idx.data();
  args.topk_weights = o.topk_weights.data();
  args.num_tokens = &o.num_tokens;
  args.num_rows = static_cast<uint32_t>(o.x.size() / shape.hidden);
  args.w13 = o.w13_cpu.data();
  args.w13_sf = o.w13_sf_cpu.data();
  args.w2 = o.w2_cpu.data();
  args.w2_sf = o.w2_sf_cpu.data();
  args.activation_params = {INFINITY, 1.702f, 4.0f, 25.0f};
  args.y = o.y.data();
  args.received = o.received.data();
  args.status = o.status.data();
  return args;
}

}  // namespace jax_megamoe::cpu
