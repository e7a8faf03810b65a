// gemm.h: the arithmetic both linears share: FP8 rows times FP4 weight panels, accumulated in FP32.
#pragma once

#include <cstdint>
#include <vector>

namespace jax_megamoe::cpu {

inline constexpr uint32_t kPanel = 16;  // weight rows side by side in the CPU weight layout

// Widens `num_rows` FP8 rows of `k` elements to FP32, scales applied (exact within FP32's range).
void widen_rows(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k, float* out);

enum class Isa { kPortable, kAvx2, kAvx512 };
bool supports(Isa isa);
Isa best_isa();  // of this machine

// out[num_rows][num_panels * 16] = rows[num_rows][k] * panels^T. A panel is [k/2][16] bytes of E2M1
// pairs and [k/32][16] scale bytes. `scratch` is resized as needed. A row's result depends on that
// row and the weights alone, not on its position or on its neighbours.
void multiply_panels(const float* rows, uint32_t num_rows, uint32_t k, const uint8_t* panels,
                     const uint8_t* panels_sf, uint32_t num_panels, float* out,
                     std::vector<float>& scratch, Isa isa = best_isa());

}  // namespace jax_megamoe::cpu
