// Matrix products, tile by tile: up to 12 rows of activations with one or two panels of packed weights, in vectors.
//
// An output element is one accumulator, summed sequentially along K whatever the number of rows, so its bits depend on
// nothing else in the batch.
//
// Quantised weights: activations are codes in groups along K, and a group's dot product is exact in int32. With
// unsigned weight codes c and signed activation codes a, sum((c - zero) * a) = sum(c * a) - zero * sum(a), so the
// accumulator starts at -zero * sum(a) and no correction row is stored.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops.h"
#include "program.h"
#include "simd.h"

namespace kitfox {

constexpr int PANEL_CHANNELS = 16;
constexpr int TASK_PANELS = 2;
constexpr int TASK_CHANNELS = PANEL_CHANNELS * TASK_PANELS;

// Addresses of up to 12 rows from few registers: a base every four rows, and multiples of the stride.
template <int R, class T>
struct RowPointers {
  const T* base[(R + 3) / 4];
  int64_t stride;

  RowPointers(const T* first, int64_t row_stride) : stride(row_stride) {
    for (int i = 0; i < (R + 3) / 4; ++i) base[i] = first + 4 * i * row_stride;
  }
  KF_INLINE const T* at(int row) const { return base[row / 4] + (row % 4) * stride; }
  KF_INLINE void advance(int64_t count) {
#pragma GCC unroll 3
    for (int i = 0; i < (R + 3) / 4; ++i) base[i] += count;
  }
};

// Fetches memory at an even pace: `step` bytes of each panel for every line of weights that is multiplied. Hardware
// does not: its streams end at every page of 4 KiB. Past the end of the weights it is harmless.
struct Prefetch {
  const uint8_t* at;
  int64_t panel_bytes;
  int64_t step;

  template <int V>
  KF_INLINE void advance() {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) __builtin_prefetch(at + v * panel_bytes, 0, 2);
    at += step;
  }
};

// A tile of up to 12 rows by one or two panels: a function fills out [R][V * 16] with sums over K, before channel scales.
struct TileInputs {
  const Weight* weight;
  int64_t first_panel;
  int64_t first_row;
  const float* x;      // [rows, K], for float formats
  const Codes* codes;  // for kGrouped
  Prefetch next;
  int64_t rows;             // of a tile in tile registers; the others know them at compile time
  const uint8_t* unpacked;  // likewise, weights of 4 bits as bytes: [panels][K * 16]
};
using TileFunction = void (*)(const TileInputs&, float* out);
constexpr int MAX_TILE_ROWS = 12;

template <int R, int V>
KF_INLINE void multiply_add(simd::f32 (&acc)[R][V], const RowPointers<R, float>& x, int offset,
                            const simd::f32 (&w)[V]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const simd::f32 a = simd::set1(x.at(r)[offset]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) simd::accumulate(acc[r][v], a, w[v]);
  }
}

template <Format F, int R, int V>
void float_tile(const TileInputs& in, float* out) {
  const Weight& weight = *in.weight;
  const int64_t k = weight.num_columns;
  const uint8_t* panel[V];
  simd::f32 acc[R][V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) panel[v] = weight.panels + (in.first_panel + v) * weight.panel_bytes;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = simd::zero();
  }
  RowPointers<R, float> x(in.x + in.first_row * k, k);
  Prefetch next = in.next;
  if constexpr (F == Format::kBfloat16) {
    simd::f32 even[V], odd[V];
    auto load = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        simd::load_bf16_pairs(reinterpret_cast<const uint16_t*>(panel[v]), even[v], odd[v]);
        panel[v] += 64;
      }
    };
    for (int64_t pair = 0; pair < k / 2; ++pair) {
      load();
      next.advance<V>();
      multiply_add<R, V>(acc, x, 0, even);
      multiply_add<R, V>(acc, x, 1, odd);
      x.advance(2);
    }
    if (k % 2) {
      load();
      multiply_add<R, V>(acc, x, 0, even);
    }
  } else {
    simd::f32 w[V];
    for (int64_t i = 0; i < k; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (F == Format::kFloat32) {
          w[v] = simd::load(reinterpret_cast<const float*>(panel[v]));
          panel[v] += 64;
        } else {
          w[v] = simd::load_f16(reinterpret_cast<const uint16_t*>(panel[v]));
          panel[v] += 32;
        }
      }
      next.advance<V>();
      multiply_add<R, V>(acc, x, 0, w);
      x.advance(1);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) simd::store(out + (r * V + v) * simd::LANES, acc[r][v]);
  }
}

template <ScaleType S>
KF_INLINE simd::f32 load_scale(const uint8_t* p) {
  if constexpr (S == ScaleType::kFloat16) return simd::load_f16(reinterpret_cast<const uint16_t*>(p));
  return simd::load(reinterpret_cast<const float*>(p));
}

template <int BITS, int GROUP, ScaleType S, bool MINIMUM, int R, int V>
void grouped_tile(const TileInputs& in, float* out) {
  constexpr int64_t SCALE_BYTES = S == ScaleType::kFloat16 ? 32 : 64;
  constexpr int64_t GROUP_BYTES = PANEL_CHANNELS * GROUP * BITS / 8;
  const Weight& weight = *in.weight;
  const int64_t groups = (weight.num_columns + GROUP - 1) / GROUP;
  const uint8_t* panel[V];
  const uint8_t* scales[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    panel[v] = weight.panels + (in.first_panel + v) * weight.panel_bytes;
    scales[v] = panel[v] + groups * GROUP_BYTES;
  }
  // Registers hold the dot products of one group. What they add up to is touched once a group: where it does not fit
  // beside them it waits in memory.
  constexpr bool IN_MEMORY = R * V * 2 + V + 2 > simd::REGISTERS;
  simd::f32 acc[R][V];
  float memory[IN_MEMORY ? R * V : 1][simd::LANES];
  auto total = [&](int r, int v) __attribute__((always_inline)) {
    return IN_MEMORY ? simd::load(memory[r * V + v]) : acc[r][v];
  };
  auto set_total = [&](int r, int v, simd::f32 y) __attribute__((always_inline)) {
    if constexpr (IN_MEMORY) {
      simd::store(memory[r * V + v], y);
    } else {
      acc[r][v] = y;
    }
  };
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) set_total(r, v, simd::zero());
  }
  const Codes& codes = *in.codes;
  RowPointers<R, int8_t> a(codes.codes + in.first_row * groups * GROUP, groups * GROUP);
  RowPointers<R, int32_t> sum(codes.sum + in.first_row * groups, groups);
  RowPointers<R, float> scale(codes.scale + in.first_row * groups, groups);
  RowPointers<R, float> scaled_sum(codes.scaled_sum + in.first_row * groups, groups);
  Prefetch next = in.next;
  for (int64_t g = 0; g < groups; ++g) {
    simd::i32 dot[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const simd::i32 start = simd::set1_i32(-weight.zero * *sum.at(r));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dot[r][v] = start;
    }
    auto multiply = [&](const simd::u8x64(&w)[V], int offset) __attribute__((always_inline)) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const simd::i32 x = simd::broadcast_bytes(a.at(r) + offset);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) simd::dot4(dot[r][v], w[v], x);
      }
    };
    constexpr int BYTES_A_LOAD = BITS == 8 ? 4 : 8;  // activations that one load of weights meets
#pragma GCC unroll 4
    for (int i = 0; i < GROUP / BYTES_A_LOAD; ++i) {
      next.advance<V>();
      simd::u8x64 low[V], high[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (BITS == 8) {
          low[v] = simd::load_u8(panel[v] + 64 * i);
        } else {
          simd::load_u4(panel[v] + 64 * i, low[v], high[v]);
        }
      }
      multiply(low, BYTES_A_LOAD * i);
      if constexpr (BITS == 4) multiply(high, BYTES_A_LOAD * i + 4);
    }
    simd::f32 w_scale[V], w_minimum[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      panel[v] += GROUP_BYTES;
      if constexpr (S != ScaleType::kChannel) {
        w_scale[v] = load_scale<S>(scales[v]);
        if constexpr (MINIMUM) w_minimum[v] = load_scale<S>(scales[v] + groups * SCALE_BYTES);
        scales[v] += SCALE_BYTES;
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const simd::f32 x_scale = simd::set1(*scale.at(r));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        simd::f32 y = total(r, v);
        if constexpr (S == ScaleType::kChannel) {
          y = simd::fma(simd::to_f32(dot[r][v]), x_scale, y);
        } else {
          y = simd::fma(simd::mul(simd::to_f32(dot[r][v]), x_scale), w_scale[v], y);
        }
        if constexpr (MINIMUM) y = simd::fma(w_minimum[v], simd::set1(*scaled_sum.at(r)), y);
        set_total(r, v, y);
      }
    }
    a.advance(GROUP);
    sum.advance(1);
    scale.advance(1);
    scaled_sum.advance(1);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) simd::store(out + (r * V + v) * simd::LANES, total(r, v));
  }
}

}  // namespace kitfox
