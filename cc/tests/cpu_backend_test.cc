// cpu_backend_test.cc: the CPU back end against a plain scalar computation, without JAX. Also the
// program that runs under ThreadSanitizer and AddressSanitizer.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/check.h"
#include "tests/operands.h"

namespace jax_megamoe::cpu {
namespace {

constexpr double kTimeoutSeconds = 60;

float weight_at(const std::vector<uint8_t>& w, const std::vector<uint8_t>& sf, size_t row,
                size_t column, size_t columns) {
  const uint8_t pair = w[row * columns / 2 + column / 2];
  const int32_t doubled = e2m1_doubled(column % 2 == 0 ? pair & 15 : pair >> 4);
  return 0.5f * static_cast<float>(doubled) *
         ue8m0_to_float(sf[row * columns / kSfGroup + column / kSfGroup]);
}

// Rounds values to E4M3 with one scale per `group` of them.
void round_to_e4m3(std::vector<float>& values, uint32_t group) {
  std::vector<uint8_t> codes(group), sf(group / kSfGroup);
  for (size_t first = 0; first < values.size(); first += group) {
    quantize_e4m3(&values[first], group, codes.data(), sf.data());
    for (uint32_t j = 0; j < group; ++j) {
      values[first + j] = e4m3_to_float(codes[j]) * ue8m0_to_float(sf[j / kSfGroup]);
    }
  }
}

double activated_value(const CallArgs& args, double gate, double up) {
  const ActivationParams& p = args.activation_params;
  if (args.activation == Activation::kSitu) {
    return p.beta * std::tanh(gate / p.beta) / (1 + std::exp(-gate)) * p.linear_beta *
           std::tanh(up / p.linear_beta);
  }
  const double limit = p.limit;
  gate = std::fmin(gate, limit);
  up = std::fmax(std::fmin(up, limit), -limit);
  if (args.activation == Activation::kSwiglu) return gate / (1 + std::exp(-gate)) * up;
  return gate / (1 + std::exp(-p.alpha * gate)) * (up + 1);
}

// One slot's contribution, by the formula, in double except where the contract rounds. `args` has
// granularity and activation.
std::vector<double> expert_row(const MoeShape& shape, const Operands& owner, uint32_t expert,
                               const uint16_t* x, float weight, const CallArgs& args) {
  const uint32_t granularity = args.granularity;
  const uint32_t h = shape.hidden, inter = shape.intermediate;
  std::vector<float> dequantised(h), activated(inter);
  for (uint32_t j = 0; j < h; ++j) dequantised[j] = bf16_to_float(x[j]);
  round_to_e4m3(dequantised, granularity == 0 ? h : granularity);
  for (uint32_t c = 0; c < inter; ++c) {
    double gate = 0, up = 0;
    const size_t row = size_t{expert} * 2 * inter + c;
    for (uint32_t j = 0; j < h; ++j) {
      gate += double{dequantised[j]} * weight_at(owner.w13, owner.w13_sf, row, j, h);
      up += double{dequantised[j]} * weight_at(owner.w13, owner.w13_sf, row + inter, j, h);
    }
    if (args.b13 != nullptr) {
      gate += owner.b13[row];
      up += owner.b13[row + inter];
    }
    activated[c] = static_cast<float>(activated_value(args, gate, up) * weight);
  }
  round_to_e4m3(activated, granularity == 0 ? 128 : granularity);
  std::vector<double> out(h);
  for (uint32_t c = 0; c < h; ++c) {
    for (uint32_t j = 0; j < inter; ++j) {
      out[c] +=
          double{activated[j]} * weight_at(owner.w2, owner.w2_sf, size_t{expert} * h + c, j, inter);
    }
    if (args.b2 != nullptr) out[c] += double{weight} * owner.b2[size_t{expert} * h + c];
  }
  return out;
}

void check_against_formula(const MoeShape& shape, const std::vector<Operands>& ranks,
                           const CallArgs& call) {
  double error = 0, bound = 0;
  for (const Operands& rank : ranks) {
    for (size_t token = 0; token < rank.y.size() / shape.hidden; ++token) {
      std::vector<double> sum(shape.hidden), magnitude(shape.hidden);
      for (uint32_t k = 0; k < shape.top_k; ++k) {
        const size_t slot = token * shape.top_k + k;
        const int32_t expert = rank.topk_idx[slot];
        if (expert < 0 || expert >= static_cast<int32_t>(shape.num_experts)) continue;
        const uint32_t owner = shape.owner_of(static_cast<uint32_t>(expert));
        const auto row = expert_row(shape, ranks[owner],
                                    static_cast<uint32_t>(expert) % shape.num_local_experts(),
                                    &rank.x[token * shape.hidden], rank.topk_weights[slot], call);
        for (uint32_t i = 0; i < shape.hidden; ++i) {
          sum[i] += row[i];
          magnitude[i] += std::fabs(row[i]);
        }
      }
      for (uint32_t i = 0; i < shape.hidden; ++i) {
        const double got = bf16_to_float(rank.y[token * shape.hidden + i]);
        error += (got - sum[i]) * (got - sum[i]);
        const double rounded = std::ldexp(magnitude[i] + std::fabs(sum[i]), -8);
        bound += rounded * rounded;
      }
    }
  }
  // BF16 has 8 significant bits: rounding a slot's row, and then the sum, changes an element by at
  // most 2^-8 of it. Random roundings stay well below that worst case in norm, which leaves room
  // for the rare FP8 code that moves because FP32 and double sums fall on two sides of a tie.
  CHECK(bound > 0);
  CHECK(error <= bound);
}

void run_shape(MoeShape shape, uint32_t workers, uint32_t granularity, Activation activation,
               std::mt19937& rng) {
  shape.block_m = kBlockM;
  CHECK(shape.valid());
  MegaMoeGroup group(shape, workers);
  for (uint32_t routing = 0; routing < 4; ++routing) {
    group.poison();
    std::vector<Operands> ranks;
    for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
      const uint32_t rows = rank == 1 ? 0 : 1 + static_cast<uint32_t>(rng()) % shape.max_tokens;
      ranks.push_back(make_operands(shape, rng, rows, routing));
    }
    std::vector<CallArgs> args;
    for (Operands& o : ranks) args.push_back(args_of(o, shape));
    for (size_t rank = 0; rank < args.size(); ++rank) {
      CallArgs& a = args[rank];
      a.granularity = granularity;
      a.activation = activation;
      if (activation != Activation::kSwiglu) a.activation_params.limit = 7.0f;
      if (routing % 2 == 1) {
        a.b13 = ranks[rank].b13_cpu.data();
        a.b2 = ranks[rank].b2.data();
      }
    }
    const CallResult result = group.run(args, kTimeoutSeconds);
    CHECK(result.timeout.empty() && result.refusal.empty());
    check_against_formula(shape, ranks, args[0]);
    // The same call again gives the same bits.
    std::vector<std::vector<uint16_t>> first;
    for (const Operands& o : ranks) first.push_back(o.y);
    CHECK(group.run(args, kTimeoutSeconds).timeout.empty());
    for (size_t rank = 0; rank < ranks.size(); ++rank) CHECK(first[rank] == ranks[rank].y);
  }
}

// Every signal, dropped once, ends in a failure that names its counter; the next call works.
void run_faults(std::mt19937& rng) {
  MoeShape shape{3, 6, 2, 128, 128, 40, kBlockM, 1};
  MegaMoeGroup group(shape, 2);
  const Region signals[] = {Region::rank_barrier, Region::grid_barrier, Region::expert_recv_count,
                            Region::l1_arrival,   Region::l1_empty,     Region::l2_arrival,
                            Region::l2_empty};
  std::vector<Operands> ranks;
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.push_back(make_operands(shape, rng, 40, 0));
  std::vector<CallArgs> args;
  for (Operands& o : ranks) args.push_back(args_of(o, shape));
  for (const Region region : signals) {
    group.arm_fault(static_cast<uint32_t>(region), 1);
    const std::string failure = group.run(args, 1.0).timeout;
    const std::string name = group.layout().at(region).name;
    CHECK(failure.find(name + "[") != std::string::npos);
    CHECK(failure.find("rank") != std::string::npos);
    if (region == Region::rank_barrier || region == Region::expert_recv_count) {
      CHECK(failure.find("here rank 1") != std::string::npos);  // who did not send
    }
    CHECK(group.run(args, kTimeoutSeconds).timeout.empty());
    check_against_formula(shape, ranks, args[0]);
  }
}

}  // namespace
}  // namespace jax_megamoe::cpu

int main() {
  using jax_megamoe::Activation, jax_megamoe::MoeShape;
  std::mt19937 rng(20260);
  // {ranks, experts, top_k, hidden, intermediate, max_tokens, block_m, ring_blocks}
  jax_megamoe::cpu::run_shape(MoeShape{1, 4, 2, 128, 128, 70, 0, 2}, 1, 32, Activation::kSwiglu,
                              rng);
  jax_megamoe::cpu::run_shape(MoeShape{4, 8, 3, 256, 128, 33, 0, 1}, 2, 0, Activation::kSitu, rng);
  jax_megamoe::cpu::run_shape(MoeShape{8, 8, 2, 256, 256, 20, 0, 3}, 1, 128,
                              Activation::kGptOssSwiglu, rng);
  jax_megamoe::cpu::run_faults(rng);
  std::puts("cpu_backend_test: passed");
}
