// gemm_kernel.h: the panel product, written once for all instruction sets.
//
// Each gemm_<isa>.cc includes this file after it has defined `Lanes`, the vector of its instruction
// set, JMM_TILE_ROWS, how many rows the registers hold sums for, and JMM_SECTION. It is compiled
// with the options of that set. So nothing here may have a name that another file sees too: the
// linker would keep one of the two copies, maybe the one that this machine cannot run. Everything
// is in an unnamed namespace, and nothing of the standard library or of protocol/ is called.
//
// `Lanes` has
//   Vec                      kLanes floats in one register
//   kTilePanels              panels that a tile of that height takes side by side
//   kFusedVecs               sums and scales that registers hold beside the widening of a column
//   zero(), load(p), store(p, v), broadcast(p), add(a, b), multiply(a, b)
//   multiply_add(a, b, c)    a * b + c, in one rounding where the set has such an instruction
//   widen(bytes, low, high)  16 bytes, two E2M1 codes each -> twice their values as
//                            Vec[16 / kLanes], of the low and of the high nibbles
//
// Every output has one accumulator, in which products are summed with ascending k over a chunk of
// kChunk; then the chunk's sum is added to the output. That order is the same in all instruction
// sets and for every height of a tile, and products of E4M3 and E2M1 values with their scales are
// exact within FP32's normal range, so all instruction sets give the same bits.
#pragma once

#include <cstdint>

#include "cpu/gemm.h"

#define JMM_INLINE inline __attribute__((always_inline))
// Functions whose machine code a test looks at stand in the section JMM_SECTION, which is there
// also when symbols are not.
#if defined(__APPLE__)
#define JMM_KERNEL \
  __attribute__((section("__TEXT," JMM_SECTION ",regular,pure_instructions"), noinline))
#else
#define JMM_KERNEL __attribute__((section(JMM_SECTION), noinline))
#endif

namespace jax_megamoe::cpu {
namespace {

constexpr uint32_t kVecs = kPanel / Lanes::kLanes;  // of one column of a panel
constexpr uint32_t kGroup = 32;                     // columns that share one scale of a weight row
using Vec = Lanes::Vec;

// fn(Index<0>), ..., fn(Index<N - 1>). The compiler keeps an array in registers only if all indices
// are constants early on; those of a loop that it unrolls late are not, and then every sum is
// stored in every step.
template <uint32_t I>
struct Index {
  static constexpr uint32_t value = I;
};
template <uint32_t N, class Fn>
JMM_INLINE void unrolled(const Fn& fn) {
  if constexpr (N > 0) {
    unrolled<N - 1>(fn);
    fn(Index<N - 1>{});
  }
}
#define JMM_EACH(index) [&](auto index) __attribute__((always_inline))

constexpr uint32_t kMaxPanels = 4;  // side by side in a tile

// The tile's place in the rows, the panels and the output.
struct Tile {
  const float* rows;      // see row_offset()
  uint32_t num_rows;      // of the whole block
  uint32_t length;        // columns, a multiple of kGroup
  const uint8_t* codes;   // of the first panel, from the tile's first column on
  const uint8_t* sf;      // likewise
  uint64_t codes_stride;  // from one panel to the next
  uint64_t sf_stride;
  float fractions[kMaxPanels];  // of the panels' units: 1 / unit, see panel_unit()
  const float* weights;         // widened panels: [panel][kChunk][kPanel]
  float* out;
  uint32_t out_stride;  // from one row to the next
};

// Half of 2^(byte - 127), because codes are widened to twice their values: exact down to byte 0,
// which is 2^-128. Byte 255 is NaN.
JMM_INLINE float half_scale(uint8_t byte) {
  const uint32_t normal = byte == 255 ? 0x7FC00000u : (uint32_t{byte} - 1) << 23;
  const uint32_t bits = byte < 2 ? 0x00200000u << byte : normal;
  return __builtin_bit_cast(float, bits);
}

// FP32 ends below 2^128, but 4 * 2^126 and 6 * 2^127 are weights, and 448 * 2^127 is an activation.
// A panel or a row that has such values is widened in another unit, a power of two by which its
// sums are multiplied in the end: what is finite then stays finite on the way. In all others the
// unit is one, so no bit changes.
constexpr float kPanelUnit = 4, kRowUnit = 256;
JMM_INLINE uint8_t max_byte(const uint8_t* bytes, uint64_t length) {
  uint8_t largest = 0;
  for (uint64_t i = 0; i < length; ++i) largest = bytes[i] > largest ? bytes[i] : largest;
  return largest;
}
JMM_INLINE float panel_unit(const uint8_t* sf, uint64_t length) {
  return max_byte(sf, length) >= 253 ? kPanelUnit : 1.0f;  // 3 * 2^(252 - 127) * 2 is finite
}
JMM_INLINE float row_unit(const uint8_t* sf, uint64_t length) {
  return max_byte(sf, length) >= 247 ? kRowUnit : 1.0f;  // 448 * 2^(246 - 127) is finite
}

JMM_INLINE void load_scales(const uint8_t* sf, const float& fraction, Vec (&scales)[kVecs]) {
  alignas(64) float scale[kPanel];
  for (uint32_t i = 0; i < kPanel; ++i) scale[i] = half_scale(sf[i]);
  const Vec factor = Lanes::broadcast(&fraction);
  unrolled<kVecs>(JMM_EACH(v) {
    scales[v.value] = Lanes::multiply(Lanes::load(scale + v.value * Lanes::kLanes), factor);
  });
}

// Widens `length` columns of one panel to weights[length][kPanel].
JMM_INLINE void widen_panel(const uint8_t* codes, const uint8_t* sf, uint32_t length,
                            const float& fraction, float* weights) {
  for (uint32_t k = 0; k < length; k += kGroup, sf += kPanel) {
    Vec scales[kVecs];
    load_scales(sf, fraction, scales);
    for (uint32_t pair = 0; pair < kGroup / 2; ++pair) {
      Vec low[kVecs], high[kVecs];
      Lanes::widen(codes, low, high);
      for (uint32_t v = 0; v < kVecs; ++v) {
        Lanes::store(weights + v * Lanes::kLanes, Lanes::multiply(low[v], scales[v]));
        Lanes::store(weights + kPanel + v * Lanes::kLanes, Lanes::multiply(high[v], scales[v]));
      }
      codes += kPanel;
      weights += 2 * kPanel;
    }
  }
}

template <uint32_t kRows, uint32_t kSums>
JMM_INLINE void clear(Vec (&sum)[kRows][kSums]) {
  unrolled<kRows>(
      JMM_EACH(i) { unrolled<kSums>(JMM_EACH(v) { sum[i.value][v.value] = Lanes::zero(); }); });
}

template <uint32_t kRows, uint32_t kSums>
JMM_INLINE void add_to_output(const Tile& tile, const Vec (&sum)[kRows][kSums]) {
  unrolled<kRows>(JMM_EACH(i) {
    unrolled<kSums>(JMM_EACH(v) {
      float* out = tile.out + i.value * tile.out_stride + v.value * Lanes::kLanes;
      Lanes::store(out, Lanes::add(Lanes::load(out), sum[i.value][v.value]));
    });
  });
}

// Adds the products of one column: rows[i][0] * column[v]. `sum` begins at sum[..][kFirst].
template <uint32_t kFirst, uint32_t kRows, uint32_t kSums, uint32_t kColumns>
JMM_INLINE void add_column(const float* rows, const Vec (&column)[kColumns],
                           Vec (&sum)[kRows][kSums]) {
  unrolled<kRows>(JMM_EACH(i) {
    const Vec row = Lanes::broadcast(rows + i.value * kRowSegment);
    unrolled<kColumns>(JMM_EACH(v) {
      Vec& s = sum[i.value][kFirst + v.value];
      s = Lanes::multiply_add(row, column[v.value], s);
    });
  });
}

// kRows rows times kPanels widened panels.
template <uint32_t kRows, uint32_t kPanels>
JMM_INLINE void multiply_tile(const Tile& tile) {
  Vec sum[kRows][kPanels * kVecs];
  clear(sum);
  const float* rows = tile.rows;
  const float* weights = tile.weights;
  for (uint32_t k = 0; k < tile.length; k += kRowSegment) {
#pragma GCC unroll 1
    for (uint32_t j = 0; j < kRowSegment; ++j) {
      Vec column[kPanels * kVecs];
      unrolled<kPanels * kVecs>(JMM_EACH(v) {
        column[v.value] = Lanes::load(weights + (v.value / kVecs * kChunk + j) * kPanel +
                                      v.value % kVecs * Lanes::kLanes);
      });
      add_column<0>(rows + j, column, sum);
    }
    rows += uint64_t{tile.num_rows} * kRowSegment;
    weights += kRowSegment * kPanel;
  }
  add_to_output(tile, sum);
}

// The same from packed panels: with few rows a widened weight is used a few times only, and its way
// through memory would cost as much as the products.
template <uint32_t kRows, uint32_t kPanels>
JMM_INLINE void multiply_tile_fused(const Tile& tile) {
  Vec sum[kRows][kPanels * kVecs];
  clear(sum);
  const float* rows = tile.rows;
  const uint8_t* codes = tile.codes;
  const uint8_t* sf = tile.sf;
  for (uint32_t k = 0; k < tile.length; k += kGroup, sf += kPanel) {
    Vec scales[kPanels][kVecs];
    unrolled<kPanels>(JMM_EACH(p) {
      load_scales(sf + p.value * tile.sf_stride, tile.fractions[p.value], scales[p.value]);
    });
    for (uint32_t segment = 0; segment < kGroup / kRowSegment; ++segment) {
#pragma GCC unroll 1
      for (uint32_t j = 0; j < kRowSegment; j += 2, codes += kPanel) {
        unrolled<kPanels>(JMM_EACH(p) {
          Vec low[kVecs], high[kVecs];
          Lanes::widen(codes + p.value * tile.codes_stride, low, high);
          unrolled<kVecs>(JMM_EACH(v) {
            low[v.value] = Lanes::multiply(low[v.value], scales[p.value][v.value]);
            high[v.value] = Lanes::multiply(high[v.value], scales[p.value][v.value]);
          });
          add_column<p.value * kVecs>(rows + j, low, sum);
          add_column<p.value * kVecs>(rows + j + 1, high, sum);
        });
      }
      rows += uint64_t{tile.num_rows} * kRowSegment;
    }
  }
  add_to_output(tile, sum);
}

// One function per height, in a section of its own, by whose name a test finds the machine code.
using TileFn = void (*)(const Tile&);
#define JMM_TILES(rows)                                                                            \
  JMM_KERNEL void tile_##rows(const Tile& tile) { multiply_tile<rows, Lanes::kTilePanels>(tile); } \
  JMM_KERNEL void narrow_tile_##rows(const Tile& tile) { multiply_tile<rows, 1>(tile); }

// Whether sums and scales of a fused tile fit into registers.
constexpr bool fits_fused(uint32_t rows, uint32_t panels) {
  return panels * kVecs * (rows + 1) <= Lanes::kFusedVecs;
}
// How many panels a fused tile takes: one sum alone would wait for itself.
constexpr uint32_t fused_panels(uint32_t rows) {
  return fits_fused(rows, 4) ? 4 : fits_fused(rows, 2) ? 2 : 1;
}
constexpr bool is_fused(uint32_t rows) { return rows <= JMM_TILE_ROWS && fits_fused(rows, 1); }
template <uint32_t kRows, uint32_t kPanels>
JMM_INLINE void fused_if_small(const Tile& tile) {
  if constexpr (is_fused(kRows)) multiply_tile_fused<kRows, kPanels>(tile);
}
#define JMM_FUSED(rows)                             \
  JMM_KERNEL void fused_##rows(const Tile& tile) {  \
    fused_if_small<rows, fused_panels(rows)>(tile); \
  }                                                 \
  JMM_KERNEL void narrow_fused_##rows(const Tile& tile) { fused_if_small<rows, 1>(tile); }

#define JMM_HEIGHTS_5(X) X(1) X(2) X(3) X(4) X(5)
#if JMM_TILE_ROWS == 12
#define JMM_HEIGHTS(X) JMM_HEIGHTS_5(X) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#elif JMM_TILE_ROWS == 6
#define JMM_HEIGHTS(X) JMM_HEIGHTS_5(X) X(6)
#elif JMM_TILE_ROWS == 5
#define JMM_HEIGHTS(X) JMM_HEIGHTS_5(X)
#else
#define JMM_HEIGHTS(X) X(1) X(2)
#endif

JMM_HEIGHTS(JMM_TILES)
JMM_HEIGHTS(JMM_FUSED)
#define JMM_NAME(rows) tile_##rows,
#define JMM_NARROW_NAME(rows) narrow_tile_##rows,
#define JMM_FUSED_NAME(rows) fused_##rows,
#define JMM_NARROW_FUSED_NAME(rows) narrow_fused_##rows,
constexpr TileFn kTiles[] = {JMM_HEIGHTS(JMM_NAME)};
constexpr TileFn kNarrowTiles[] = {JMM_HEIGHTS(JMM_NARROW_NAME)};
constexpr TileFn kFused[] = {JMM_HEIGHTS(JMM_FUSED_NAME)};
constexpr TileFn kNarrowFused[] = {JMM_HEIGHTS(JMM_NARROW_FUSED_NAME)};
constexpr uint32_t kTileRows = sizeof(kTiles) / sizeof(kTiles[0]);
static_assert(kTileRows == JMM_TILE_ROWS && Lanes::kTilePanels <= kMaxPanels);

JMM_KERNEL void widen_columns(const Tile& tile, uint32_t num_panels, float* weights) {
  for (uint32_t p = 0; p < num_panels; ++p) {
    widen_panel(tile.codes + p * tile.codes_stride, tile.sf + p * tile.sf_stride, tile.length,
                tile.fractions[p], weights + p * kChunk * kPanel);
  }
}

// Multiplies the sums of one panel by its unit and by those of the rows.
JMM_INLINE void apply_units(const PanelProduct& product, float unit, uint32_t panel) {
  float* out = product.out + panel * kPanel;
  for (uint32_t row = 0; row < product.num_rows; ++row, out += product.num_panels * kPanel) {
    const float factor = unit * product.row_units[row];
    if (factor == 1) continue;
    for (uint32_t i = 0; i < kPanel; ++i) out[i] *= factor;
  }
}

// See multiply_panels(). Panel by panel, so that weights are read in the order of memory.
void multiply_all(const PanelProduct& product) {
  const uint32_t num_rows = product.num_rows, k = product.k;
  const bool fused = is_fused(num_rows);
  const uint32_t width = fused ? fused_panels(num_rows) : Lanes::kTilePanels;
  Tile tile;
  tile.num_rows = num_rows;
  tile.codes_stride = uint64_t{k} / 2 * kPanel;
  tile.sf_stride = uint64_t{k} / kGroup * kPanel;
  // A vector that crosses a cache line is loaded in two steps.
  float* weights = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(product.scratch) + 63) &
                                            ~uintptr_t{63});
  tile.weights = weights;
  tile.out_stride = product.num_panels * kPanel;
  const uint64_t num_out = uint64_t{num_rows} * tile.out_stride;
  for (uint64_t i = 0; i < num_out; ++i) product.out[i] = 0;
  // All tiles of a block are about equally high: a low one wastes what it loads.
  const uint32_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  for (uint32_t panel = 0, panels; panel < product.num_panels; panel += panels) {
    panels = product.num_panels - panel < width ? 1 : width;
    float units[kMaxPanels];
    for (uint32_t p = 0; p < panels; ++p) {
      units[p] = panel_unit(product.panels_sf + (panel + p) * tile.sf_stride, tile.sf_stride);
      tile.fractions[p] = 1 / units[p];
    }
    for (uint32_t k0 = 0; k0 < k; k0 += kChunk) {
      tile.length = k - k0 < kChunk ? k - k0 : kChunk;
      tile.codes = product.panels + panel * tile.codes_stride + uint64_t{k0} / 2 * kPanel;
      tile.sf = product.panels_sf + panel * tile.sf_stride + uint64_t{k0} / kGroup * kPanel;
      if (!fused) widen_columns(tile, panels, weights);
      const TileFn* functions = fused ? (panels == width ? kFused : kNarrowFused)
                                      : (panels == width ? kTiles : kNarrowTiles);
      for (uint32_t t = 0, row = 0; t < num_tiles; ++t) {
        const uint32_t height = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
        tile.rows = product.rows + row_offset(num_rows, row, k0);
        tile.out = product.out + uint64_t{row} * tile.out_stride + panel * kPanel;
        functions[height - 1](tile);
        row += height;
      }
    }
    for (uint32_t p = 0; p < panels; ++p) apply_units(product, units[p], panel + p);
  }
}

// The value of an E4M3 code. A loop over codes becomes vector code: selects, no branches.
JMM_INLINE float e4m3_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  // Codes below 8 are multiples of 2^-9, which 2^-6 * (1 + code / 8) is away from 2^-6 exactly.
  const uint32_t biased = (magnitude << 20) + ((magnitude < 8 ? 121u : 120u) << 23);
  const float offset = magnitude < 8 ? 0x1p-6f : 0.0f;
  const float value = __builtin_bit_cast(float, biased) - offset;
  uint32_t bits = magnitude == 0x7F ? 0x7FC00000u : __builtin_bit_cast(uint32_t, value);
  bits |= (uint32_t{code} & 0x80u) << 24;
  return __builtin_bit_cast(float, bits);
}

// See widen_rows().
void widen_all(const uint8_t* codes, const uint8_t* sf, uint32_t num_rows, uint32_t k, float* out,
               float* units) {
  for (uint32_t row = 0; row < num_rows; ++row) {
    units[row] = row_unit(sf, k / kGroup);
    const float fraction = 2 / units[row];
    for (uint32_t first = 0; first < k; first += kGroup, ++sf) {
      const float scale = fraction * half_scale(*sf);
      for (uint32_t segment = 0; segment < kGroup; segment += kRowSegment) {
        float* to = out + row_offset(num_rows, row, first + segment);
        for (uint32_t i = 0; i < kRowSegment; ++i) to[i] = e4m3_value(codes[i]) * scale;
        codes += kRowSegment;
      }
    }
  }
}

}  // namespace
}  // namespace jax_megamoe::cpu
