// NEON with dot products and half precision (Armv8.2): a vector is four registers of four lanes.
#pragma once

#include <arm_neon.h>

namespace simd {

struct f32 {
  float32x4_t a, b, c, d;
};
struct i32 {
  int32x4_t a, b, c, d;
};
struct u8x64 {
  uint8x16_t a, b, c, d;
};
struct i16x32 {
  int16x8_t a, b, c, d;
};
// All bits of a lane, or none.
struct mask {
  uint32x4_t a, b, c, d;
};
// Sixteen doubles, for sums of f32.
struct f64 {
  float64x2_t pairs[8];
};

constexpr const char* ISA = "neon";
constexpr int REGISTERS = 32 / 4;  // for whole vectors
// Accumulator tiles that fit the 32 registers: rows by 2 vectors of four registers each.
constexpr int FLOAT_ROWS = 3;
constexpr int INT8_ROWS = 2;

// f over the registers of vectors.
template <class To, class F, class... From>
KF_INLINE To each(const F& f, const From&... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

KF_INLINE f32 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
KF_INLINE f32 zero() { return set1(0.0f); }
KF_INLINE f32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
KF_INLINE void store(float* p, f32 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
KF_INLINE mask first(int n) {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32x4_t count = vdupq_n_s32(n);
  return {vcgtq_s32(count, vld1q_s32(lanes)), vcgtq_s32(count, vld1q_s32(lanes + 4)),
          vcgtq_s32(count, vld1q_s32(lanes + 8)), vcgtq_s32(count, vld1q_s32(lanes + 12))};
}
// The first n lanes; the others are 0 and their memory is not touched.
KF_INLINE f32 load_first(const float* p, int n) {
  if (n >= 16) return load(p);
  float lanes[16] = {};
  std::memcpy(lanes, p, sizeof(float) * n);
  return load(lanes);
}
KF_INLINE void store_first(float* p, f32 x, int n) {
  if (n >= 16) return store(p, x);
  float lanes[16];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(float) * n);
}

KF_INLINE f32 add(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }, x, y);
}
KF_INLINE f32 sub(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }, x, y);
}
KF_INLINE f32 mul(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }, x, y);
}
KF_INLINE f32 div(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }, x, y);
}
KF_INLINE f32 fma(f32 x, f32 y, f32 z) {
  return each<f32>([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }, x, y, z);
}
// fma(x, y, acc) into acc's own registers.
KF_INLINE void accumulate(f32& acc, f32 x, f32 y) { acc = fma(x, y, acc); }
// Where either is NaN, b: what x86 does, and not what vmaxq_f32 does.
KF_INLINE float32x4_t max_lanes(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
KF_INLINE float32x4_t min_lanes(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
KF_INLINE f32 max(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return max_lanes(a, b); }, x, y);
}
KF_INLINE f32 min(f32 x, f32 y) {
  return each<f32>([](float32x4_t a, float32x4_t b) { return min_lanes(a, b); }, x, y);
}
KF_INLINE f32 abs(f32 x) {
  return each<f32>([](float32x4_t a) { return vabsq_f32(a); }, x);
}
// To the nearest integer, ties to even.
KF_INLINE f32 round(f32 x) {
  return each<f32>([](float32x4_t a) { return vrndnq_f32(a); }, x);
}
KF_INLINE float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
// a * 2^n for an integral n in [-252, 254] and a * 2^(n/2) normal; over- and underflow give inf, denormals and 0.
// Two factors, as 2^n itself may be out of range; the first product is exact, so that only the last one rounds.
KF_INLINE f32 scale_by_power_of_two(f32 x, f32 n) {
  return each<f32>(
      [](float32x4_t a, float32x4_t b) {
        const int32x4_t exponent = vcvtnq_s32_f32(b), part = vshrq_n_s32(exponent, 1);
        return vmulq_f32(vmulq_f32(a, power_of_two(part)), power_of_two(vsubq_s32(exponent, part)));
      },
      x, n);
}
// a - floor(a), rounded down where it is not exact, as AVX-512 does; for an infinite a, which is 0 there, NaN.
KF_INLINE f32 fraction(f32 x) {
  return each<f32>(
      [](float32x4_t a) {
        const float32x4_t whole = vrndmq_f32(a), rest = vsubq_f32(a, whole);
        const uint32x4_t too_large = vcgtq_f32(vaddq_f32(rest, whole), a);  // by one unit: -1 as an integer
        return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(rest), too_large));
      },
      x);
}
// a * 2^floor(x) for a in [1, 2] and x < 129; 0 where x < -126: never a denormal, which slows down a hundredfold what
// it meets.
KF_INLINE f32 scale_by_two_to_floor(f32 x, f32 power) {
  return each<f32>(
      [](float32x4_t a, float32x4_t b) {
        const float32x4_t scaled = vmulq_f32(a, power_of_two(vcvtmq_s32_f32(b)));
        const uint32x4_t too_small = vcltq_f32(b, vdupq_n_f32(-126.0f));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), too_small));
      },
      x, power);
}

KF_INLINE mask less(f32 x, f32 y) {
  return each<mask>([](float32x4_t a, float32x4_t b) { return vcltq_f32(a, b); }, x, y);
}
KF_INLINE mask is_nan(f32 x) {
  return each<mask>([](float32x4_t a) { return vmvnq_u32(vceqq_f32(a, a)); }, x);
}
// x where the mask is set, else y.
KF_INLINE f32 select(mask m, f32 x, f32 y) {
  return each<f32>([](uint32x4_t chosen, float32x4_t a, float32x4_t b) { return vbslq_f32(chosen, a, b); }, m, x, y);
}
KF_INLINE bool any(mask m) { return vmaxvq_u32(vorrq_u32(vorrq_u32(m.a, m.b), vorrq_u32(m.c, m.d))) != 0; }
// Lane i in bit i.
KF_INLINE uint32_t bits(mask m) {
  const uint32x4_t bit = {1, 2, 4, 8};
  const uint32x4_t low = vorrq_u32(vandq_u32(m.a, bit), vandq_u32(m.b, vshlq_n_u32(bit, 4)));
  const uint32x4_t high = vorrq_u32(vandq_u32(m.c, vshlq_n_u32(bit, 8)), vandq_u32(m.d, vshlq_n_u32(bit, 12)));
  return vaddvq_u32(vorrq_u32(low, high));
}
// The other way round; bits from the 16th on count for nothing.
KF_INLINE mask from_bits(uint32_t bits) {
  const uint32x4_t all = vdupq_n_u32(bits), bit = {1, 2, 4, 8};
  return {vtstq_u32(all, bit), vtstq_u32(all, vshlq_n_u32(bit, 4)), vtstq_u32(all, vshlq_n_u32(bit, 8)),
          vtstq_u32(all, vshlq_n_u32(bit, 12))};
}

// Always the same tree: lanes i and i + 8, then 4, 2, 1.
KF_INLINE float sum(f32 x) {
  const float32x4_t quarter = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t pair = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
KF_INLINE float largest(f32 x) {
  const float32x4_t quarter = max_lanes(max_lanes(x.d, x.b), max_lanes(x.c, x.a));
  const float32x4_t pair = max_lanes(quarter, vextq_f32(quarter, quarter, 2));
  return vgetq_lane_f32(max_lanes(pair, vextq_f32(pair, pair, 1)), 0);
}

KF_INLINE f64 zero_f64() { return {}; }
KF_INLINE f64 add(f64 x, f32 y) {
  const float32x4_t quarters[4] = {y.a, y.b, y.c, y.d};
  for (int i = 0; i < 4; ++i) {
    x.pairs[2 * i] = vaddq_f64(x.pairs[2 * i], vcvt_f64_f32(vget_low_f32(quarters[i])));
    x.pairs[2 * i + 1] = vaddq_f64(x.pairs[2 * i + 1], vcvt_high_f64_f32(quarters[i]));
  }
  return x;
}
// The same tree as for f32.
KF_INLINE double sum(f64 x) {
  for (int distance = 4; distance >= 1; distance /= 2) {
    for (int i = 0; i < distance; ++i) x.pairs[i] = vaddq_f64(x.pairs[i], x.pairs[i + distance]);
  }
  return vgetq_lane_f64(x.pairs[0], 0) + vgetq_lane_f64(x.pairs[0], 1);
}

KF_INLINE float32x4_t from_bf16(uint16x4_t bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }
KF_INLINE f32 load_bf16(const uint16_t* p) {
  return {from_bf16(vld1_u16(p)), from_bf16(vld1_u16(p + 4)), from_bf16(vld1_u16(p + 8)), from_bf16(vld1_u16(p + 12))};
}
KF_INLINE float32x4_t from_f16(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
KF_INLINE f32 load_f16(const uint16_t* p) {
  return {from_f16(vld1_u16(p)), from_f16(vld1_u16(p + 4)), from_f16(vld1_u16(p + 8)), from_f16(vld1_u16(p + 12))};
}
// 32 numbers of which every second belongs to `even`: what two rows of a matrix look like when they are interleaved.
KF_INLINE void load_bf16_pairs(const uint16_t* p, f32& even, f32& odd) {
  const auto load_pairs = [p](int at) { return vreinterpretq_u32_u16(vld1q_u16(p + at)); };
  const mask pairs = {load_pairs(0), load_pairs(8), load_pairs(16), load_pairs(24)};
  even = each<f32>([](uint32x4_t a) { return vreinterpretq_f32_u32(vshlq_n_u32(a, 16)); }, pairs);
  odd = each<f32>([](uint32x4_t a) { return vreinterpretq_f32_u32(vandq_u32(a, vdupq_n_u32(0xFFFF0000u))); }, pairs);
}
KF_INLINE uint16x4_t to_bf16(float32x4_t a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7FFF)), 16);
  return vbsl_u16(vmovn_u32(vceqq_f32(a, a)), rounded, vdup_n_u16(0x7FC0));
}
// Rounded to nearest, ties to even; NaN stays NaN.
KF_INLINE void store_bf16(uint16_t* p, f32 x) {
  vst1q_u16(p, vcombine_u16(to_bf16(x.a), to_bf16(x.b)));
  vst1q_u16(p + 8, vcombine_u16(to_bf16(x.c), to_bf16(x.d)));
}
// Rounded to nearest, ties to even.
KF_INLINE void store_f16(uint16_t* p, f32 x) {
  const auto narrow = [](float32x4_t a) { return vreinterpret_u16_f16(vcvt_f16_f32(a)); };
  vst1q_u16(p, vcombine_u16(narrow(x.a), narrow(x.b)));
  vst1q_u16(p + 8, vcombine_u16(narrow(x.c), narrow(x.d)));
}

KF_INLINE i32 set1_i32(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
KF_INLINE f32 to_f32(i32 x) {
  return each<f32>([](int32x4_t a) { return vcvtq_f32_s32(a); }, x);
}
KF_INLINE u8x64 load_u8(const uint8_t* p) {
  return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
// 64 bytes hold 128 numbers of 4 bits: the low halves first, then the high ones.
KF_INLINE void load_u4(const uint8_t* p, u8x64& low, u8x64& high) {
  const u8x64 both = load_u8(p);
  low = each<u8x64>([](uint8x16_t a) { return vandq_u8(a, vdupq_n_u8(15)); }, both);
  high = each<u8x64>([](uint8x16_t a) { return vshrq_n_u8(a, 4); }, both);
}
// acc[lane] += sum over i < 4 of w[4 lane + i] * a[i]: unsigned weights, four signed activations for all lanes.
// This dot product takes signed bytes only, so it takes w - 128, and 128 times the sum of the activations comes on top.
// The compiler converts a vector of weights once for all rows, and sums activations once for all weights.
KF_INLINE void dot4(i32& acc, u8x64 w, i32 activations) {
  acc = each<i32>(
      [](int32x4_t sum, uint8x16_t codes, int32x4_t a) {
        const int8x16_t x = vreinterpretq_s8_s32(a);
        const int8x16_t signed_codes = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80)));
        const int32x4_t correction = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x), 7);
        return vdotq_s32(vaddq_s32(sum, correction), signed_codes, x);
      },
      acc, w, activations);
}
// acc[lane] += sum over i < 2 of x[2 lane + i] * a[i].
KF_INLINE void dot2(i32& acc, i16x32 x, i32 pairs) {
  acc = each<i32>(
      [](int32x4_t sum, int16x8_t codes, int32x4_t pair) {
        const int16x8_t a = vreinterpretq_s16_s32(pair);
        const int32x4_t low = vmull_s16(vget_low_s16(codes), vget_low_s16(a));
        return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(codes, a)));
      },
      acc, x, pairs);
}
KF_INLINE i16x32 load_i16(const int16_t* p) {
  return {vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)};
}
// To the nearest integers, ties to even, as far as 16 bits hold them.
KF_INLINE void store_i16(int16_t* p, f32 x) {
  const auto narrow = [](float32x4_t a, float32x4_t b) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
  };
  vst1q_s16(p, narrow(x.a, x.b));
  vst1q_s16(p + 8, narrow(x.c, x.d));
}
// Already rounded numbers in [-128, 127] to 16 bytes.
KF_INLINE void store_i8(int8_t* p, f32 x) {
  const auto narrow = [](float32x4_t a, float32x4_t b) {
    return vqmovn_s16(vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b))));
  };
  vst1q_s8(p, vcombine_s8(narrow(x.a, x.b), narrow(x.c, x.d)));
}

}  // namespace simd
