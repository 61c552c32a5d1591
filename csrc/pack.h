// Matrices into the panels that kernels read, and one row back out of them.
//
// A panel is 16 output channels, one a lane. A format stores an element of all channels, or in the narrow formats a few
// elements that fill 4 bytes, side by side: packing is a transposition of words, after any conversion of numbers.
// A panel of a grouped format has all codes first, then scale [K/group][16], then minimum likewise. Codes of 8 bits are
// [K/4][16][4]; those of 4 bits [K/8][16][4] bytes, where byte i of a channel has k = 8 o + i in its low half and
// k = 8 o + 4 + i in its high half.
#pragma once

#include <algorithm>
#include <vector>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "program.h"
#include "simd.h"

namespace kitfox {

// Numbers of 16 bits, as bits.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

namespace packing {

constexpr int CHANNELS = simd::LANES;
// Elements of each of a panel's channels that are converted and transposed at a time: in the first cache level.
constexpr int TILE = 64;

inline int64_t padded_columns(const Weight& weight) {
  switch (static_cast<Format>(weight.format)) {
    case Format::kGrouped: return round_up(weight.num_columns, weight.group);
    case Format::kBfloat16: return round_up(weight.num_columns, 2);
    default: return weight.num_columns;
  }
}

inline int64_t code_bytes(const Weight& weight) { return padded_columns(weight) * CHANNELS * weight.bits / 8; }

// Of all scales of a panel, or all minima.
inline int64_t scale_bytes(const Weight& weight) {
  const int64_t count = padded_columns(weight) / weight.group * CHANNELS;
  switch (static_cast<ScaleType>(weight.scale_type)) {
    case ScaleType::kFloat16: return count * 2;
    case ScaleType::kFloat32: return count * 4;
    default: return 0;
  }
}

KF_INLINE simd::f32 load_lanes(const float* p) { return simd::load(p); }
KF_INLINE simd::f32 load_lanes(const Bfloat16* p) { return simd::load_bf16(&p->bits); }
KF_INLINE simd::f32 load_lanes(const Float16* p) { return simd::load_f16(&p->bits); }
KF_INLINE void store_lanes(float* p, simd::f32 a) { simd::store(p, a); }
KF_INLINE void store_lanes(Bfloat16* p, simd::f32 a) { simd::store_bf16(&p->bits, a); }
KF_INLINE void store_lanes(Float16* p, simd::f32 a) { simd::store_f16(&p->bits, a); }

// Up to TILE numbers; `to` has room for TILE.
template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, count * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + simd::LANES <= count; i += simd::LANES) store_lanes(to + i, load_lanes(from + i));
    if (i < count) {
      From rest[simd::LANES] = {};
      std::memcpy(rest, from + i, (count - i) * sizeof(From));
      store_lanes(to + i, load_lanes(rest));
    }
  }
}

// Asks for the numbers that lie where these do, but in the next panel: 16 short rows are no pattern that a processor
// foresees, and waiting for them would halve the speed. Past the end of the matrix this does nothing.
template <class From>
KF_INLINE void prefetch_next_panel(const Weight& weight, const From* from) {
  constexpr int64_t LINE = 64 / sizeof(From);
  for (int64_t i = 0; i < TILE; i += LINE) __builtin_prefetch(from + CHANNELS * weight.num_columns + i);
}

// Words of all channels side by side: out[word][channel], from tile[channel][word].
template <class Word, class Element>
KF_INLINE void interleave(const Element (&tile)[CHANNELS][TILE], int64_t num_words, uint8_t* out) {
  for (int64_t word = 0; word < num_words; ++word) {
    Word line[CHANNELS];
    for (int c = 0; c < CHANNELS; ++c) {
      std::memcpy(&line[c], reinterpret_cast<const uint8_t*>(tile[c]) + word * sizeof(Word), sizeof(Word));
    }
    std::memcpy(out + word * sizeof(line), line, sizeof(line));
  }
}

// The words of one channel.
template <class Word>
KF_INLINE void extract(const uint8_t* panel, int channel, int64_t num_words, void* out) {
  for (int64_t i = 0; i < num_words; ++i) {
    std::memcpy(static_cast<uint8_t*>(out) + i * sizeof(Word), panel + (i * CHANNELS + channel) * sizeof(Word),
                sizeof(Word));
  }
}

constexpr uint32_t LOW_HALVES = 0x0F0F0F0F;

// Eight codes of a channel, four beside four, become the low and high halves of four bytes.
KF_INLINE void interleave_halves(const uint8_t (&tile)[CHANNELS][TILE], int64_t num_octets, uint8_t* out) {
  for (int64_t octet = 0; octet < num_octets; ++octet) {
    uint32_t line[CHANNELS];
    for (int c = 0; c < CHANNELS; ++c) {
      uint32_t four[2];
      std::memcpy(four, tile[c] + octet * 8, 8);
      line[c] = four[0] | four[1] << 4;
    }
    std::memcpy(out + octet * sizeof(line), line, sizeof(line));
  }
}

// Calls tile(k, count, columns) for each TILE of the padded columns: `count` of them, `columns` of which exist.
template <class Tile>
void over_tiles(const Weight& weight, const Tile& tile) {
  const int64_t padded = padded_columns(weight);
  for (int64_t k = 0; k < padded; k += TILE) {
    tile(k, std::min<int64_t>(TILE, padded - k), std::min<int64_t>(TILE, weight.num_columns - k));
  }
}

template <class To, class From>
void pack_float_as(const Weight& weight, const From* source, uint8_t* panel, int64_t first_channel) {
  const int64_t channels = std::min<int64_t>(CHANNELS, weight.num_rows - first_channel);
  over_tiles(weight, [&](int64_t k, int64_t count, int64_t columns) {
    alignas(64) To tile[CHANNELS][TILE];
    if (channels < CHANNELS || columns < TILE) std::memset(tile, 0, sizeof(tile));
    for (int64_t c = 0; c < channels; ++c) {
      const From* from = source + (first_channel + c) * weight.num_columns + k;
      prefetch_next_panel(weight, from);
      convert(from, tile[c], columns);
    }
    uint8_t* out = panel + k * CHANNELS * static_cast<int64_t>(sizeof(To));
    if constexpr (std::is_same_v<To, float>) interleave<uint32_t>(tile, count, out);
    if constexpr (std::is_same_v<To, Bfloat16>) interleave<uint32_t>(tile, count / 2, out);  // pairs along K
    if constexpr (std::is_same_v<To, Float16>) interleave<uint16_t>(tile, count, out);
  });
}

// [N, G] in float to [G][16].
inline void pack_scales(const Weight& weight, const float* source, uint8_t* out, int64_t first_channel) {
  const int64_t groups = padded_columns(weight) / weight.group;
  const int64_t channels = std::min<int64_t>(CHANNELS, weight.num_rows - first_channel);
  for (int64_t g = 0; g < groups; ++g) {
    float line[CHANNELS] = {};
    for (int64_t c = 0; c < channels; ++c) line[c] = source[(first_channel + c) * groups + g];
    if (static_cast<ScaleType>(weight.scale_type) == ScaleType::kFloat16) {
      store_lanes(reinterpret_cast<Float16*>(out) + g * CHANNELS, simd::load(line));
    } else {
      simd::store(reinterpret_cast<float*>(out) + g * CHANNELS, simd::load(line));
    }
  }
}

// One channel's scales, or minima, from group `first` on: up to 16.
inline void unpack_scales(const Weight& weight, const uint8_t* scales, int channel, int64_t first, int64_t count,
                          float* out) {
  if (static_cast<ScaleType>(weight.scale_type) == ScaleType::kFloat16) {
    Float16 halves[simd::LANES] = {};
    extract<uint16_t>(scales + first * CHANNELS * 2, channel, count, halves);
    simd::store(out, load_lanes(halves));
  } else {
    extract<float>(scales + first * CHANNELS * 4, channel, count, out);
  }
}

template <class From>
void unpack_float_row(const Weight& weight, const uint8_t* panel, int channel, float* out) {
  over_tiles(weight, [&](int64_t k, int64_t count, int64_t columns) {
    From numbers[TILE];
    const uint8_t* tile = panel + k * CHANNELS * static_cast<int64_t>(sizeof(From));
    if constexpr (std::is_same_v<From, Bfloat16>) {
      extract<uint32_t>(tile, channel, count / 2, numbers);  // pairs along K
    } else {
      extract<From>(tile, channel, count, numbers);
    }
    float wide[TILE];
    convert(numbers, wide, columns);
    std::memcpy(out + k, wide, columns * sizeof(float));
  });
}

template <int BITS, int GROUP>
void unpack_codes_row(const Weight& weight, const uint8_t* panel, int64_t row, float* out) {
  const int channel = static_cast<int>(row % CHANNELS);
  const uint8_t* scales = panel + code_bytes(weight);
  const bool per_channel = static_cast<ScaleType>(weight.scale_type) == ScaleType::kChannel;
  const int64_t groups = padded_columns(weight) / GROUP;
  constexpr int64_t GROUP_BYTES = GROUP * CHANNELS * BITS / 8;
  float scale[simd::LANES], minimum[simd::LANES] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g % simd::LANES;
    if (at == 0) {
      const int64_t count = std::min<int64_t>(simd::LANES, groups - g);
      if (per_channel) {
        std::fill_n(scale, simd::LANES, weight.channel_scale[row]);
      } else {
        unpack_scales(weight, scales, channel, g, count, scale);
      }
      if (weight.has_minimum) unpack_scales(weight, scales + scale_bytes(weight), channel, g, count, minimum);
    }
    uint32_t words[GROUP / 4];
    if constexpr (BITS == 8) {
      extract<uint32_t>(panel + g * GROUP_BYTES, channel, GROUP / 4, words);
    } else {
      uint32_t halves[GROUP / 8];
      extract<uint32_t>(panel + g * GROUP_BYTES, channel, GROUP / 8, halves);
      for (int i = 0; i < GROUP / 8; ++i) {
        words[2 * i] = halves[i] & LOW_HALVES;
        words[2 * i + 1] = halves[i] >> 4 & LOW_HALVES;
      }
    }
    uint8_t codes[GROUP];
    std::memcpy(codes, words, GROUP);
    float numbers[GROUP];
    for (int i = 0; i < GROUP; ++i) {
      numbers[i] = scale[at] * static_cast<float>(codes[i] - weight.zero) + minimum[at];
    }
    const int64_t columns = std::min<int64_t>(GROUP, weight.num_columns - g * GROUP);
    std::memcpy(out + g * GROUP, numbers, columns * sizeof(float));
  }
}

template <int BITS>
void unpack_codes_row(const Weight& weight, const uint8_t* panel, int64_t row, float* out) {
  switch (weight.group) {
    case 16: return unpack_codes_row<BITS, 16>(weight, panel, row, out);
    case 32: return unpack_codes_row<BITS, 32>(weight, panel, row, out);
    default: return unpack_codes_row<BITS, 64>(weight, panel, row, out);
  }
}

}  // namespace packing

// What Weight::panel_bytes must be, from its other fields.
inline int64_t panel_bytes(const Weight& weight) {
  int64_t bytes = 0;
  switch (static_cast<Format>(weight.format)) {
    case Format::kFloat32: bytes = packing::padded_columns(weight) * packing::CHANNELS * 4; break;
    case Format::kBfloat16:
    case Format::kFloat16: bytes = packing::padded_columns(weight) * packing::CHANNELS * 2; break;
    case Format::kGrouped:
      bytes = packing::code_bytes(weight) + packing::scale_bytes(weight) * (weight.has_minimum ? 2 : 1);
      break;
  }
  return round_up(bytes, 64);
}

// Writes the panels [first_panel, last_panel) of a weight in one of the float formats to their places in `panels`, from
// a matrix [N, K] of float, Bfloat16 or Float16; numbers are rounded to nearest where the format is narrower.
template <class Source>
void pack_float(const Weight& weight, const Source* source, uint8_t* panels, int64_t first_panel, int64_t last_panel) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    uint8_t* out = panels + panel * weight.panel_bytes;
    const int64_t channel = panel * packing::CHANNELS;
    switch (static_cast<Format>(weight.format)) {
      case Format::kFloat32: packing::pack_float_as<float>(weight, source, out, channel); break;
      case Format::kBfloat16: packing::pack_float_as<Bfloat16>(weight, source, out, channel); break;
      case Format::kFloat16: packing::pack_float_as<Float16>(weight, source, out, channel); break;
      case Format::kGrouped: break;
    }
  }
}

// Likewise for a grouped weight, from codes [N, K] of a byte each and scale and minimum [N, K/group]. `scale` is not
// read where it is per channel, `minimum` where there is none. Numbers stored as float16 must be such.
inline void pack_codes(const Weight& weight, const uint8_t* codes, const float* scale, const float* minimum,
                       uint8_t* panels, int64_t first_panel, int64_t last_panel) {
  using namespace packing;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    uint8_t* out = panels + panel * weight.panel_bytes;
    const int64_t first_channel = panel * CHANNELS;
    const int64_t channels = std::min<int64_t>(CHANNELS, weight.num_rows - first_channel);
    over_tiles(weight, [&](int64_t k, int64_t count, int64_t columns) {
      alignas(64) uint8_t tile[CHANNELS][TILE];
      if (channels < CHANNELS || columns < TILE) std::memset(tile, weight.zero, sizeof(tile));
      for (int64_t c = 0; c < channels; ++c) {
        const uint8_t* from = codes + (first_channel + c) * weight.num_columns + k;
        prefetch_next_panel(weight, from);
        convert(from, tile[c], columns);
      }
      if (weight.bits == 8) {
        interleave<uint32_t>(tile, count / 4, out + k * CHANNELS);
      } else {
        interleave_halves(tile, count / 8, out + k * CHANNELS / 2);
      }
    });
    if (static_cast<ScaleType>(weight.scale_type) == ScaleType::kChannel) continue;
    uint8_t* scales = out + code_bytes(weight);
    pack_scales(weight, scale, scales, first_channel);
    if (weight.has_minimum) pack_scales(weight, minimum, scales + scale_bytes(weight), first_channel);
  }
}

// Quantises a matrix [N, K] to 8 bits per output channel and packs it; defined by quantize_int8 in quantized.py.
// channel_scale: out, [N]. Source is float, Bfloat16 or Float16.
template <class Source>
void pack_int8(const Weight& weight, const Source* source, float* channel_scale, uint8_t* panels, int64_t first_panel,
               int64_t last_panel) {
  using namespace packing;
  const int64_t k = weight.num_columns;
  std::vector<float> row(round_up(k, simd::LANES));
  std::vector<uint8_t> codes(CHANNELS * k + simd::LANES);
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    Weight one = weight;
    one.num_rows = std::min<int64_t>(CHANNELS, weight.num_rows - panel * CHANNELS);
    for (int64_t c = 0; c < one.num_rows; ++c) {
      const int64_t channel = panel * CHANNELS + c;
      for (int64_t i = 0; i < k; i += TILE) {
        float tile[TILE];
        convert(source + channel * k + i, tile, std::min<int64_t>(TILE, k - i));
        std::copy(tile, tile + std::min<int64_t>(TILE, k - i), row.data() + i);
      }
      simd::f32 amax = simd::zero(), poison = simd::zero();
      for (int64_t i = 0; i < k; i += simd::LANES) {
        const simd::f32 v = simd::load_first(row.data() + i, static_cast<int>(std::min<int64_t>(simd::LANES, k - i)));
        amax = simd::max(simd::abs(v), amax);
        poison = simd::fma(v, simd::zero(), poison);
      }
      float scale = simd::largest(amax) / 127.0f;
      if (simd::any(simd::is_nan(poison))) scale = NAN;
      channel_scale[channel] = scale;
      for (int64_t i = 0; i < k; i += simd::LANES) {
        const int count = static_cast<int>(std::min<int64_t>(simd::LANES, k - i));
        simd::f32 q = simd::round(simd::div(simd::load_first(row.data() + i, count), simd::set1(scale)));
        q = simd::select(simd::is_nan(q), simd::zero(), q);
        q = simd::min(simd::max(q, simd::set1(-127.0f)), simd::set1(127.0f));
        int8_t signed_codes[simd::LANES];
        simd::store_i8(signed_codes, q);
        for (int j = 0; j < count; ++j) codes[c * k + i + j] = static_cast<uint8_t>(signed_codes[j] + 128);
      }
    }
    pack_codes(one, codes.data(), nullptr, nullptr, panels + panel * weight.panel_bytes, 0, 1);
  }
}

// One output channel as float: out [K]. Product and sum of a grouped weight are rounded each.
inline void unpack_row(const Weight& weight, int64_t row, float* out) {
  const uint8_t* panel = weight.panels + row / packing::CHANNELS * weight.panel_bytes;
  const int channel = static_cast<int>(row % packing::CHANNELS);
  switch (static_cast<Format>(weight.format)) {
    case Format::kFloat32: return packing::unpack_float_row<float>(weight, panel, channel, out);
    case Format::kBfloat16: return packing::unpack_float_row<Bfloat16>(weight, panel, channel, out);
    case Format::kFloat16: return packing::unpack_float_row<Float16>(weight, panel, channel, out);
    case Format::kGrouped:
      if (weight.bits == 8) return packing::unpack_codes_row<8>(weight, panel, row, out);
      return packing::unpack_codes_row<4>(weight, panel, row, out);
  }
}

}  // namespace kitfox
