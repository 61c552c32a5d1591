// Matrix products in tile registers, where there are some.
//
// Of codes in groups: a group's dot products are exact integers here as in tiles.h, and what is done with them afterwards
// is done in the same order, so that an element has the same bits whichever of the two computes it. Of bfloat16: tile
// registers sum in an order of their own, which vectors follow where they do it for few rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "tiles.h"

namespace kitfox {

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
  const float* rows = x.numbers.data();
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

using WideTileFunction = void (*)(const TileInputs&, int64_t panels, const RowScales&, float* out);

// `over_tiles` of gemm.h for codes in groups; `in` says where it begins.
template <class Use>
KF_AMX_TARGET void over_wide_tiles(WideTileFunction tile, TileInputs in, int64_t panels, int64_t next_panel, int64_t rows,
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
    tile(in, panels, scales, sums);
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
    in.next = {weight.panels + next_panel * weight.panel_bytes, weight.panel_bytes, 64};
    if (panels == 2) {
      (rows == 2 ? bf16_rows<2, 2> : bf16_rows<1, 2>)(in, x, sums);
    } else {
      (rows == 2 ? bf16_rows<2, 1> : bf16_rows<1, 1>)(in, x, sums);
    }
    return use(0, rows, panels, sums);
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

}  // namespace kitfox
