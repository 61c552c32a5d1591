// Matrix products of a few rows of activations with packed weights.
//
// A task is two panels (32 output channels) for all rows of the tile: the panels are read from memory once and stay in
// the first cache levels while tiles of rows pass over them. An output element is one accumulator, summed sequentially
// along K whatever the number of rows, so its bits depend on nothing else in the batch.
//
// Quantised weights: activations are codes in groups along K, and a group's dot product is exact in int32. With
// unsigned weight codes c and signed activation codes a, sum((c - zero) * a) = sum(c * a) - zero * sum(a), so the
// accumulator starts at -zero * sum(a) and no correction row is stored.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "amx.h"
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

// Which phase of which tile of rows this thread works on: within one nobody writes what its ops read, so what a thread has
// made of an operand is good for all tasks of the same time.
inline thread_local uint64_t phase_time = 0;

#ifdef KF_AMX_TARGET
// Scales of codes as tiles in tile registers want them, [groups][16] for each 16 rows; rows that are not there have zeros.
struct RowScales {
  std::vector<int32_t> start;  // -zero * sum
  std::vector<float> scale, scaled_sum;

  void take(const Codes& codes, int32_t zero, int64_t rows, int64_t groups) {
    const int64_t size = (rows + amx::ROWS - 1) / amx::ROWS * amx::ROWS * groups;
    start.assign(size, 0);
    scale.assign(size, 0);
    scaled_sum.assign(size, 0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = row * groups, to = row / amx::ROWS * amx::ROWS * groups + row % amx::ROWS;
      for (int64_t g = 0; g < groups; ++g) {
        start[to + g * amx::ROWS] = -zero * codes.sum[from + g];
        scale[to + g * amx::ROWS] = codes.scale[from + g];
        scaled_sum[to + g * amx::ROWS] = codes.scaled_sum[from + g];
      }
    }
  }
};

// Those of an operand, made once for all tasks that this thread has of a phase.
inline const RowScales& row_scales(const Weight& weight, const Codes& codes, int64_t rows, int64_t groups) {
  struct Kept : RowScales {
    const void* of = nullptr;
    int32_t zero = 0;
    uint64_t time = 0;
  };
  thread_local Kept kept;
  if (kept.of != codes.codes || kept.zero != weight.zero || kept.time != phase_time) {
    kept.take(codes, weight.zero, rows, groups);
    kept.of = codes.codes;
    kept.zero = weight.zero;
    kept.time = phase_time;
  }
  return kept;
}

// Up to 16 rows by one panel of one or two, in tile registers. While they work on one group, what the dot products of an
// earlier one add up to is scaled and summed as in grouped_tile.
template <int BITS, int GROUP, ScaleType S, bool MINIMUM>
struct AmxTile {
  static constexpr int64_t SCALE_BYTES = S == ScaleType::kFloat16 ? 32 : 64;

  int64_t groups;
  const int8_t* inputs;   // [rows][groups * GROUP]
  const uint8_t* bytes;   // weights, one each
  const uint8_t* scales;  // of the weights' groups
  const int32_t* start;   // of the rows, [groups][16], as are the next two
  const float* scale;
  const float* scaled_sum;
  Prefetch next;
  alignas(64) int32_t dots[amx::DEPTH][amx::ROWS][PANEL_CHANNELS];

  AmxTile(const TileInputs& in, const RowScales& rows, int64_t panel)
      : groups((in.weight->num_columns + GROUP - 1) / GROUP),
        inputs(in.codes->codes + in.first_row * groups * GROUP),
        start(rows.start.data() + in.first_row * groups),
        scale(rows.scale.data() + in.first_row * groups),
        scaled_sum(rows.scaled_sum.data() + in.first_row * groups),
        next(in.next) {
    const uint8_t* stored = in.weight->panels + (in.first_panel + panel) * in.weight->panel_bytes;
    bytes = BITS == 8 ? stored : in.unpacked + panel * groups * GROUP * PANEL_CHANNELS;
    scales = stored + groups * PANEL_CHANNELS * GROUP * BITS / 8;
    next.at += panel * next.panel_bytes;
  }

  template <int SLOT>
  KF_AMX_TARGET KF_INLINE void multiply(int64_t g) {
    if (g >= groups) return;
    amx::multiply<SLOT>(inputs + g * GROUP, groups * GROUP, bytes + g * GROUP * PANEL_CHANNELS, dots[SLOT]);
  }

  template <int SLOT>
  KF_AMX_TARGET KF_INLINE void add(int64_t g, simd::f32 (&acc)[amx::ROWS]) {
    if (g >= groups) return;
    for (int64_t line = 0; line < next.step; line += 64) __builtin_prefetch(next.at + line, 0, 2);
    next.at += next.step;
    simd::f32 w_scale = simd::zero(), w_minimum = simd::zero();
    if constexpr (S != ScaleType::kChannel) {
      w_scale = load_scale<S>(scales + g * SCALE_BYTES);
      if constexpr (MINIMUM) w_minimum = load_scale<S>(scales + (groups + g) * SCALE_BYTES);
    }
    const int64_t at = g * amx::ROWS;
#pragma GCC unroll 16
    for (int r = 0; r < amx::ROWS; ++r) {
      simd::i32 dot = {_mm512_load_si512(dots[SLOT][r])};
      if constexpr (!MINIMUM) dot.v = _mm512_add_epi32(dot.v, _mm512_set1_epi32(start[at + r]));
      const simd::f32 y = simd::to_f32(dot), x_scale = simd::set1(scale[at + r]);
      if constexpr (S == ScaleType::kChannel) {
        acc[r] = simd::fma(y, x_scale, acc[r]);
      } else {
        acc[r] = simd::fma(simd::mul(y, x_scale), w_scale, acc[r]);
      }
      if constexpr (MINIMUM) acc[r] = simd::fma(w_minimum, simd::set1(scaled_sum[at + r]), acc[r]);
    }
  }

  KF_AMX_TARGET KF_INLINE void run(simd::f32 (&acc)[amx::ROWS]) {
#pragma GCC unroll 16
    for (int r = 0; r < amx::ROWS; ++r) acc[r] = simd::zero();
    multiply<0>(0);
    multiply<1>(1);
    multiply<2>(2);
    for (int64_t g = 0; g < groups; g += amx::DEPTH) {
      multiply<3>(g + 3);
      add<0>(g, acc);
      multiply<0>(g + 4);
      add<1>(g + 1, acc);
      multiply<1>(g + 5);
      add<2>(g + 2, acc);
      multiply<2>(g + 6);
      add<3>(g + 3, acc);
    }
  }
};

template <int BITS, int GROUP, ScaleType S, bool MINIMUM>
KF_AMX_TARGET void amx_tile(const TileInputs& in, int64_t panels, const RowScales& rows, float* out) {
  for (int64_t v = 0; v < panels; ++v) {
    AmxTile<BITS, GROUP, S, MINIMUM> tile(in, rows, v);
    simd::f32 acc[amx::ROWS];
    tile.run(acc);
#pragma GCC unroll 16
    for (int r = 0; r < amx::ROWS; ++r) {
      if (r < in.rows) simd::store(out + (r * panels + v) * simd::LANES, acc[r]);
    }
  }
}

// Activations as two bfloat16 each, whose sum is the float32 to within 2^-17 of itself: tile registers multiply them with
// weights of bfloat16 exactly. [PARTS][rows][K].
struct SplitRows {
  static constexpr int PARTS = 2;

  uint16_t* parts = nullptr;
  int64_t stride = 0;          // between parts
  std::vector<float> numbers;  // the same as float32, of few rows

  void take(const float* x, int64_t rows, int64_t k) {
    stride = rows * k;
    memory_.resize(PARTS * stride + 32);
    // At a cache line: loads of tiles take seven times as long where each of their rows lies across two.
    parts = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    for (int64_t i = 0; i < stride; i += simd::LANES) {  // K is a multiple of 32
      simd::f32 rest = simd::load(x + i);
      for (int64_t part = 0; part < PARTS; ++part) {
        uint16_t* to = parts + part * stride + i;
        simd::store_bf16(to, rest);
        rest = simd::sub(rest, simd::load_bf16(to));
      }
    }
    numbers.resize(rows <= FEW_ROWS ? PARTS * stride : 0);
    for (size_t i = 0; i < numbers.size(); i += simd::LANES) simd::store(numbers.data() + i, simd::load_bf16(parts + i));
  }

  // So few rows wait for weights, which come sooner where no tile is loaded: vectors do for them what tiles do.
  static constexpr int64_t FEW_ROWS = 2;

 private:
  std::vector<uint16_t> memory_;
};

inline const SplitRows& split_rows(const float* x, int64_t rows, int64_t k) {
  struct Kept : SplitRows {
    const float* of = nullptr;
    uint64_t time = 0;
  };
  thread_local Kept kept;
  if (kept.of != x || kept.time != phase_time) {
    kept.take(x, rows, k);
    kept.of = x;
    kept.time = phase_time;
  }
  return kept;
}

constexpr int64_t AMX_COLUMNS = 32;  // of bfloat16 in a row of a tile

// Up to 32 rows by one or two panels of bfloat16. An element's sum goes along K in steps of 32, in each of which the parts
// follow one another, whatever the number of rows.
template <bool TWO_ROWS, bool TWO_PANELS>
KF_AMX_TARGET void amx_bf16_tile(const TileInputs& in, const SplitRows& x, float* out) {
  const int64_t k = in.weight->num_columns;
  const uint8_t* weights = in.weight->panels + in.first_panel * in.weight->panel_bytes;
  const uint8_t* more_weights = weights + in.weight->panel_bytes;
  const uint16_t* inputs = x.parts + in.first_row * k;
  constexpr int64_t OUT_BYTES = (TWO_PANELS ? 2 : 1) * PANEL_CHANNELS * sizeof(float);
  Prefetch next = in.next;
  KF_AMX_ZERO(0);
  if constexpr (TWO_PANELS) KF_AMX_ZERO(1);
  if constexpr (TWO_ROWS) KF_AMX_ZERO(2);
  if constexpr (TWO_ROWS && TWO_PANELS) KF_AMX_ZERO(3);
  for (int64_t column = 0; column < k; column += AMX_COLUMNS) {
    KF_AMX_LOAD(6, weights + column * 32, 64);
    if constexpr (TWO_PANELS) KF_AMX_LOAD(7, more_weights + column * 32, 64);
    for (int64_t line = 0; line < next.step; line += 64) {
      __builtin_prefetch(next.at + line, 0, 2);
      if constexpr (TWO_PANELS) __builtin_prefetch(next.at + next.panel_bytes + line, 0, 2);
    }
    next.at += next.step;
#pragma GCC unroll 2
    for (int64_t part = 0; part < SplitRows::PARTS; ++part) {
      const uint16_t* from = inputs + part * x.stride + column;
      KF_AMX_LOAD(4, from, 2 * k);
      KF_AMX_ADD_BF16(0, 4, 6);
      if constexpr (TWO_PANELS) KF_AMX_ADD_BF16(1, 4, 7);
      if constexpr (TWO_ROWS) {
        KF_AMX_LOAD(5, from + amx::ROWS * k, 2 * k);
        KF_AMX_ADD_BF16(2, 5, 6);
        if constexpr (TWO_PANELS) KF_AMX_ADD_BF16(3, 5, 7);
      }
    }
  }
  float* further = out + amx::ROWS * OUT_BYTES / sizeof(float);
  KF_AMX_STORE(0, out, OUT_BYTES);
  if constexpr (TWO_PANELS) KF_AMX_STORE(1, out + PANEL_CHANNELS, OUT_BYTES);
  if constexpr (TWO_ROWS) KF_AMX_STORE(2, further, OUT_BYTES);
  if constexpr (TWO_ROWS && TWO_PANELS) KF_AMX_STORE(3, further + PANEL_CHANNELS, OUT_BYTES);
}

// What amx_bf16_tile makes of R rows, with the same bits: an instruction on tiles sums the even and the odd ones of 32
// columns apart, from zero on, and adds their sum to what was there; denormals are zeros to it.
template <int R, int PANELS>
void bf16_rows(const TileInputs& in, const SplitRows& x, float* out) {
  constexpr unsigned DENORMALS_ARE_ZEROS = 0x8040;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | DENORMALS_ARE_ZEROS);
  const int64_t k = in.weight->num_columns;
  const uint8_t* weights = in.weight->panels + in.first_panel * in.weight->panel_bytes;
  const float* rows = x.numbers.data() + in.first_row * k;
  Prefetch next = in.next;
  simd::f32 total[R][PANELS];
  for (auto& row : total) {
    for (auto& y : row) y = simd::zero();
  }
  for (int64_t column = 0; column < k; column += AMX_COLUMNS) {
    simd::f32 sums[SplitRows::PARTS][R][PANELS][2];  // of even and of odd columns
#pragma GCC unroll 2
    for (auto& part : sums) {
#pragma GCC unroll 2
      for (auto& row : part) {
#pragma GCC unroll 2
        for (auto& pair : row) pair[0] = pair[1] = simd::zero();
      }
    }
    for (int64_t i = column; i < column + AMX_COLUMNS; i += 2) {
      next.advance<PANELS>();
#pragma GCC unroll 2
      for (int v = 0; v < PANELS; ++v) {
        simd::f32 even, odd;
        simd::load_bf16_pairs(reinterpret_cast<const uint16_t*>(weights + v * in.weight->panel_bytes + i * 32), even, odd);
#pragma GCC unroll 2
        for (int part = 0; part < SplitRows::PARTS; ++part) {
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
            const float* a = rows + part * x.stride + r * k + i;
            simd::accumulate(sums[part][r][v][0], simd::set1(a[0]), even);
            simd::accumulate(sums[part][r][v][1], simd::set1(a[1]), odd);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (auto& part : sums) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < PANELS; ++v) total[r][v] = simd::add(total[r][v], simd::add(part[r][v][0], part[r][v][1]));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < PANELS; ++v) simd::store(out + (r * PANELS + v) * simd::LANES, total[r][v]);
  }
  _mm_setcsr(mode);
}

// Weights of 4 bits as bytes, in the order of weights of 8: of `panels` panels from `first_panel` on.
inline const uint8_t* unpack_nibbles(const Weight& weight, int64_t first_panel, int64_t panels) {
  thread_local std::vector<uint8_t> unpacked;
  const int64_t groups = (weight.num_columns + weight.group - 1) / weight.group;
  const int64_t lines = groups * weight.group * PANEL_CHANNELS / 128;
  unpacked.resize(panels * lines * 128);
  for (int64_t v = 0; v < panels; ++v) {
    const uint8_t* from = weight.panels + (first_panel + v) * weight.panel_bytes;
    uint8_t* to = unpacked.data() + v * lines * 128;
    for (int64_t line = 0; line < lines; ++line) {
      simd::u8x64 low, high;
      simd::load_u4(from + 64 * line, low, high);
      _mm512_storeu_si512(to + 128 * line, low.v);
      _mm512_storeu_si512(to + 128 * line + 64, high.v);
    }
  }
  return unpacked.data();
}
#endif

// The functions of one format: [V - 1][R - 1], and for more rows at a time the one that uses tile registers, if any.
struct TileTable {
  int max_rows;
  TileFunction tiles[TASK_PANELS][MAX_TILE_ROWS];
#ifdef KF_AMX_TARGET
  void (*wide)(const TileInputs&, int64_t panels, const RowScales&, float* out) = nullptr;
  int64_t wide_from = 0;  // so many rows
#endif
};

template <Format F, int... I>
constexpr TileTable float_table(std::integer_sequence<int, I...>) {
  return {simd::FLOAT_ROWS, {{float_tile<F, I + 1, 1>...}, {float_tile<F, I + 1, 2>...}}};
}

template <int BITS, int GROUP, ScaleType S, bool MINIMUM, int... I>
constexpr TileTable grouped_table(std::integer_sequence<int, I...>) {
  return {simd::INT8_ROWS,
          {{grouped_tile<BITS, GROUP, S, MINIMUM, I + 1, 1>...}, {grouped_tile<BITS, GROUP, S, MINIMUM, I + 1, 2>...}},
#ifdef KF_AMX_TARGET
          amx_tile<BITS, GROUP, S, MINIMUM>, GROUP == 64 ? 12 : 48
#endif
  };
}

inline const TileTable& tiles_for(const Weight& weight) {
  constexpr auto FLOAT_SIZES = std::make_integer_sequence<int, simd::FLOAT_ROWS>();
  constexpr auto INT8_SIZES = std::make_integer_sequence<int, simd::INT8_ROWS>();
  static constexpr TileTable FLOAT32 = float_table<Format::kFloat32>(FLOAT_SIZES);
  static constexpr TileTable BFLOAT16 = float_table<Format::kBfloat16>(FLOAT_SIZES);
  static constexpr TileTable FLOAT16 = float_table<Format::kFloat16>(FLOAT_SIZES);
  static constexpr TileTable INT8 = grouped_table<8, 64, ScaleType::kChannel, false>(INT8_SIZES);
  static constexpr TileTable CODES8_HALF = grouped_table<8, 32, ScaleType::kFloat16, false>(INT8_SIZES);
  static constexpr TileTable CODES8_HALF_MINIMUM = grouped_table<8, 32, ScaleType::kFloat16, true>(INT8_SIZES);
  static constexpr TileTable CODES4_HALF = grouped_table<4, 32, ScaleType::kFloat16, false>(INT8_SIZES);
  static constexpr TileTable CODES4_HALF_MINIMUM = grouped_table<4, 32, ScaleType::kFloat16, true>(INT8_SIZES);
  static constexpr TileTable CODES8_OF_16 = grouped_table<8, 16, ScaleType::kFloat32, false>(INT8_SIZES);
  static constexpr TileTable CODES8_MINIMUM = grouped_table<8, 32, ScaleType::kFloat32, true>(INT8_SIZES);
  static constexpr TileTable CODES4_MINIMUM = grouped_table<4, 32, ScaleType::kFloat32, true>(INT8_SIZES);
  switch (static_cast<Format>(weight.format)) {
    case Format::kFloat32: return FLOAT32;
    case Format::kBfloat16: return BFLOAT16;
    case Format::kFloat16: return FLOAT16;
    case Format::kGrouped: break;
  }
  const bool wide = weight.bits == 8;
  switch (static_cast<ScaleType>(weight.scale_type)) {
    case ScaleType::kChannel: return INT8;
    case ScaleType::kFloat16:
      if (weight.has_minimum) return wide ? CODES8_HALF_MINIMUM : CODES4_HALF_MINIMUM;
      return wide ? CODES8_HALF : CODES4_HALF;
    case ScaleType::kFloat32: break;
  }
  if (weight.group == 16) return CODES8_OF_16;
  return wide ? CODES8_MINIMUM : CODES4_MINIMUM;
}

#ifdef KF_AMX_TARGET
// `over_tiles` in tile registers; `in` says where it begins.
template <class Use>
KF_AMX_TARGET void over_wide_tiles(const TileTable& table, TileInputs in, int64_t panels, int64_t next_panel, int64_t rows,
                                   const Use& use) {
  const Weight& weight = *in.weight;
  const Codes& codes = *in.codes;
  const int64_t groups = (weight.num_columns + weight.group - 1) / weight.group;
  const int64_t num_tiles = (rows + amx::ROWS - 1) / amx::ROWS;
  const RowScales& scales = row_scales(weight, codes, rows, groups);
  if (weight.bits == 4) in.unpacked = unpack_nibbles(weight, in.first_panel, panels);
  alignas(64) float sums[amx::ROWS * TASK_PANELS * PANEL_CHANNELS];
  const int64_t share = weight.panel_bytes / num_tiles;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t count = std::min<int64_t>(amx::ROWS, rows - in.first_row);
    amx::configure(static_cast<int>(count), static_cast<int>(weight.group));
    in.rows = count;
    in.next = {weight.panels + next_panel * weight.panel_bytes + i * share, weight.panel_bytes, (share + groups - 1) / groups};
    table.wide(in, panels, scales, sums);
    use(in.first_row, count, panels, sums);
    in.first_row += count;
  }
}
// Likewise for weights of bfloat16.
template <class Use>
KF_AMX_TARGET void over_bf16_tiles(TileInputs in, int64_t panels, int64_t next_panel, int64_t rows, const Use& use) {
  const Weight& weight = *in.weight;
  const SplitRows& x = split_rows(in.x, rows, weight.num_columns);
  alignas(64) float sums[2 * amx::ROWS * TASK_PANELS * PANEL_CHANNELS];
  if (rows <= SplitRows::FEW_ROWS) {
    const int64_t num_tiles = (rows + 1) / 2;
    for (; in.first_row < rows; in.first_row += 2) {
      const int64_t count = std::min<int64_t>(2, rows - in.first_row);
      const uint8_t* share =
          weight.panels + next_panel * weight.panel_bytes + in.first_row / 2 * (weight.panel_bytes / num_tiles);
      in.next = {share, weight.panel_bytes, 64 / num_tiles};
      if (panels == 2) {
        (count == 2 ? bf16_rows<2, 2> : bf16_rows<1, 2>)(in, x, sums);
      } else {
        (count == 2 ? bf16_rows<2, 1> : bf16_rows<1, 1>)(in, x, sums);
      }
      use(in.first_row, count, panels, sums);
    }
    return;
  }
  const int64_t num_tiles = (rows + 2 * amx::ROWS - 1) / (2 * amx::ROWS), steps = weight.num_columns / AMX_COLUMNS;
  const int64_t share = weight.panel_bytes / num_tiles;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t count = std::min<int64_t>(2 * amx::ROWS, rows - in.first_row), first = std::min<int64_t>(count, amx::ROWS);
    amx::configure_bf16(static_cast<int>(first), static_cast<int>(count - first));
    in.next = {weight.panels + next_panel * weight.panel_bytes + i * share, weight.panel_bytes, (share + steps - 1) / steps};
    if (panels == 2) {
      (count > amx::ROWS ? amx_bf16_tile<true, true> : amx_bf16_tile<false, true>)(in, x, sums);
    } else {
      (count > amx::ROWS ? amx_bf16_tile<true, false> : amx_bf16_tile<false, false>)(in, x, sums);
    }
    use(in.first_row, count, panels, sums);
    in.first_row += count;
  }
}
#endif

// A column of tiles: `rows` rows, divided evenly into tiles, by one or two panels from `first_panel` on. Calls
// use(first row, count, sums [count][V * 16]) for each. While the tiles pass over their panels each fetches its share of
// the panels from `next_panel` on.
template <class Use>
void over_tiles(const TileTable& table, const Weight& weight, int64_t first_panel, int64_t next_panel, int64_t rows,
                const float* x, const Codes& codes, const Use& use) {
  const int64_t num_panels = (weight.num_rows + PANEL_CHANNELS - 1) / PANEL_CHANNELS;
  const int64_t panels = std::min<int64_t>(TASK_PANELS, num_panels - first_panel);
  TileInputs in{&weight, first_panel, 0, x, &codes, {}, 0, nullptr};
#ifdef KF_AMX_TARGET
  const bool is_bf16 = static_cast<Format>(weight.format) == Format::kBfloat16;
  if (amx::in_use && is_bf16 && weight.num_columns % AMX_COLUMNS == 0) {
    return over_bf16_tiles(in, panels, next_panel, rows, use);
  }
  if (table.wide && amx::in_use && rows >= table.wide_from) return over_wide_tiles(table, in, panels, next_panel, rows, use);
#endif
  alignas(64) float sums[MAX_TILE_ROWS * TASK_PANELS * PANEL_CHANNELS];
  const int64_t num_tiles = (rows + table.max_rows - 1) / table.max_rows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t count = rows / num_tiles + (i < rows % num_tiles);
    const uint8_t* share = weight.panels + next_panel * weight.panel_bytes + i * (weight.panel_bytes / num_tiles);
    in.next = {share, weight.panel_bytes, (64 + num_tiles - 1) / num_tiles};
    table.tiles[panels - 1][count - 1](in, sums);
    use(in.first_row, count, panels, sums);
    in.first_row += count;
  }
}

class Linear {
 public:
  Linear(const LinearArgs& args, int64_t rows, float* out) : args_(args), weight_(*args.weight), rows_(rows), out_(out) {}

  int64_t num_tasks() const { return (weight_.num_rows + TASK_CHANNELS - 1) / TASK_CHANNELS; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    const TileTable& table = tiles_for(weight_);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task * TASK_PANELS;
      over_tiles(table, weight_, panel, panel + TASK_PANELS, rows_, args_.x, args_.codes,
                 [&](int64_t row, int64_t count, int64_t panels, const float* sums) {
                   for (int64_t v = 0; v < panels; ++v) finish(row, count, panels, panel + v, sums + v * PANEL_CHANNELS);
                 });
    }
  }

 private:
  // What happens to finished sums: channel scale, bias, residual, soft cap, store.
  void finish(int64_t first_row, int64_t rows, int64_t panels, int64_t panel, const float* sums) const {
    const int64_t channel = panel * PANEL_CHANNELS;
    const int count = static_cast<int>(std::min<int64_t>(PANEL_CHANNELS, weight_.num_rows - channel));
    const simd::f32 cap = simd::set1(static_cast<float>(args_.softcap));
    const simd::f32 scale = weight_.channel_scale ? simd::load(weight_.channel_scale + channel) : simd::set1(1.0f);
    const simd::f32 bias = args_.bias ? simd::load_first(args_.bias + channel, count) : simd::zero();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (first_row + r) * weight_.num_rows + channel;
      simd::f32 y = simd::load(sums + r * panels * PANEL_CHANNELS);
      if (weight_.channel_scale) y = simd::mul(y, scale);
      if (args_.bias) y = simd::add(y, bias);
      if (args_.residual) y = simd::add(y, simd::load_first(args_.residual + at, count));
      if (args_.softcap != 0) y = simd::mul(simd::tanh(simd::div(y, cap)), cap);
      simd::store_first(out_ + at, y, count);
    }
  }

  const LinearArgs& args_;
  const Weight& weight_;
  const int64_t rows_;
  float* const out_;
};

// A head's product for those who only want to know where it is largest: the logits never are in memory.
class LinearArgmax {
 public:
  LinearArgmax(const LinearArgmaxArgs& args, int64_t rows) : args_(args), weight_(*args.weight), rows_(rows) {}

  int64_t num_tasks() const { return (weight_.num_rows + TASK_CHANNELS - 1) / TASK_CHANNELS; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    const TileTable& table = tiles_for(weight_);
    for (int64_t task = begin; task < end; ++task) {
      if (args_.allowed && all_forbid(task)) continue;
      const int64_t panel = task * TASK_PANELS;
      over_tiles(table, weight_, panel, panel + TASK_PANELS, rows_, args_.x, args_.codes,
                 [&](int64_t row, int64_t count, int64_t panels, const float* sums) {
                   for (int64_t r = 0; r < count; ++r) find(task, row + r, sums + r * panels * PANEL_CHANNELS);
                 });
    }
  }

 private:
  static_assert(TASK_CHANNELS == 32, "a word of `allowed` is a task");

  bool all_forbid(int64_t task) const {
    for (int64_t row = 0; row < rows_; ++row) {
      if (args_.allowed[row * args_.allowed_stride + task]) return false;
    }
    for (int64_t row = 0; row < rows_; ++row) {
      args_.largest[task * rows_ + row] = -INFINITY;
      args_.ids[task * rows_ + row] = static_cast<int32_t>(task * TASK_CHANNELS);
    }
    return true;
  }

  void find(int64_t task, int64_t row, const float* sums) const {
    const uint32_t allowed = args_.allowed ? args_.allowed[row * args_.allowed_stride + task] : ~0u;
    const int64_t channel = task * TASK_CHANNELS;
    const int64_t channels = std::min<int64_t>(TASK_CHANNELS, weight_.num_rows - channel);
    float y[TASK_CHANNELS];
    simd::f32 largest = simd::set1(-INFINITY), poison = simd::zero();
    for (int64_t i = 0; i < channels; i += simd::LANES) {
      const int count = static_cast<int>(std::min<int64_t>(simd::LANES, channels - i));
      simd::f32 v = simd::load(sums + i);
      if (weight_.channel_scale) v = simd::mul(v, simd::load(weight_.channel_scale + channel + i));
      v = simd::select(simd::first(count), v, simd::set1(-INFINITY));
      simd::store(y + i, v);
      if (allowed != ~0u) {
        for (int lane = 0; lane < count; ++lane) {
          if (!(allowed >> (i + lane) & 1)) y[i + lane] = -INFINITY;
        }
        v = simd::load(y + i);
      }
      largest = simd::max(v, largest);
      poison = simd::select(simd::is_nan(v), v, poison);
    }
    const float best = simd::largest(largest);
    int64_t first = 0;
    while (first < channels - 1 && y[first] != best) ++first;
    const int64_t at = task * rows_ + row;
    args_.largest[at] = simd::any(simd::is_nan(poison)) ? NAN : best;
    args_.ids[at] = static_cast<int32_t>(channel + first);
  }

  const LinearArgmaxArgs& args_;
  const Weight& weight_;
  const int64_t rows_;
};

class Argmax {
 public:
  Argmax(const ArgmaxArgs& args, int64_t rows) : args_(args), rows_(rows) {}

  int64_t num_tasks() const { return rows_; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    for (int64_t row = begin; row < end; ++row) {
      float best = -INFINITY;
      int64_t id = -1;
      bool is_number = true;
      for (int64_t piece = 0; piece < args_.num_pieces; ++piece) {
        const float value = args_.largest[piece * rows_ + row];
        is_number &= value == value;
        if (value > best) {
          best = value;
          id = args_.ids[piece * rows_ + row];
        }
      }
      args_.out[row] = is_number && std::isfinite(best) ? id : -1;
    }
  }

 private:
  const ArgmaxArgs& args_;
  const int64_t rows_;
};

// act(x @ gate.T) * (x @ up.T) without the two products in memory: a task is 64 channels, which are whole groups of codes.
class GatedLinear {
 public:
  GatedLinear(const GatedLinearArgs& args, int64_t rows) : args_(args), rows_(rows) {}

  int64_t num_tasks() const { return (args_.gate->num_rows + CHANNELS - 1) / CHANNELS; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    thread_local std::vector<float> gates, gated;
    gates.resize(rows_ * TASK_CHANNELS);
    gated.resize(rows_ * CHANNELS);
    const Weight &gate = *args_.gate, &up = *args_.up;
    const auto activation = static_cast<Activation>(args_.activation);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first_channel = task * CHANNELS;
      const int64_t channels = std::min<int64_t>(CHANNELS, gate.num_rows - first_channel);
      for (int64_t start = 0; start < channels; start += TASK_CHANNELS) {
        const int64_t panel = (first_channel + start) / PANEL_CHANNELS, next = panel + CHANNELS / PANEL_CHANNELS;
        over_tiles(tiles_for(gate), gate, panel, next, rows_, args_.x, args_.codes,
                   [&](int64_t row, int64_t count, int64_t panels, const float* sums) {
                     std::copy(sums, sums + count * panels * PANEL_CHANNELS, gates.data() + row * panels * PANEL_CHANNELS);
                   });
        over_tiles(tiles_for(up), up, panel, next, rows_, args_.x, args_.codes,
                   [&](int64_t row, int64_t count, int64_t panels, const float* sums) {
                     const float* gate_sums = gates.data() + row * panels * PANEL_CHANNELS;
                     for (int64_t r = 0; r < count; ++r) {
                       for (int64_t v = 0; v < panels; ++v) {
                         const int64_t at = (r * panels + v) * PANEL_CHANNELS, channel = (panel + v) * PANEL_CHANNELS;
                         simd::f32 a = simd::load(gate_sums + at), b = simd::load(sums + at);
                         if (gate.channel_scale) a = simd::mul(a, simd::load(gate.channel_scale + channel));
                         if (up.channel_scale) b = simd::mul(b, simd::load(up.channel_scale + channel));
                         simd::store(gated.data() + (row + r) * CHANNELS + start + v * PANEL_CHANNELS,
                                     simd::mul(activate(a, activation), b));
                       }
                     }
                   });
      }
      finish(first_channel, channels, gated.data());
    }
  }

 private:
  static constexpr int CHANNELS = 64;

  void finish(int64_t first_channel, int64_t channels, const float* gated) const {
    for (int64_t row = 0; row < rows_; ++row) {
      const float* from = gated + row * CHANNELS;
      if (args_.out) std::copy(from, from + channels, args_.out + row * args_.gate->num_rows + first_channel);
      if (args_.out_codes.codes) {
        quantize_part(from, first_channel, channels, args_.gate->num_rows, args_.out_codes, row);
      }
    }
  }

  const GatedLinearArgs& args_;
  const int64_t rows_;
};

}  // namespace kitfox
