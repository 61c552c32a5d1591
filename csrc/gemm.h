// Matrix products of a few rows of activations with packed weights.
//
// A task is two panels (32 output channels) for all rows of the tile: the panels are read from memory once and stay in
// the first cache levels while tiles of rows pass over them.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "amx_tiles.h"
#include "ops.h"
#include "program.h"
#include "simd.h"
#include "tiles.h"

namespace kitfox {

// The functions of one format: [V - 1][R - 1], and for more rows at a time the one that uses tile registers, if any.
struct TileTable {
  int max_rows;
  TileFunction tiles[TASK_PANELS][MAX_TILE_ROWS];
#ifdef KF_AMX_TARGET
  WideTileFunction wide = nullptr;
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
  if (table.wide && amx::in_use && rows >= table.wide_from) {
    return over_wide_tiles(table.wide, in, panels, next_panel, rows, use);
  }
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
