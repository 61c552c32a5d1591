// AVX2 with FMA and F16C: a vector is two ymm, lanes 0 to 7 and 8 to 15.
#pragma once

#include <immintrin.h>

namespace simd {

struct f32 {
  __m256 low, high;
};
struct i32 {
  __m256i low, high;
};
struct u8x64 {
  __m256i low, high;
};
struct i16x32 {
  __m256i low, high;
};
// All bits of a lane, or none.
struct mask {
  __m256 low, high;
};
// Sixteen doubles, for sums of f32.
struct f64 {
  __m256d a, b, c, d;
};

constexpr const char* ISA = "avx2";
constexpr int REGISTERS = 16 / 2;  // for whole vectors
// Accumulator tiles, rows by 2 vectors of two registers each: the fastest with the 16 there are. The integer one spills,
// which costs less than splitting the weights into even and odd bytes more often (see dot4).
constexpr int FLOAT_ROWS = 3;
constexpr int INT8_ROWS = 4;

KF_INLINE f32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KF_INLINE f32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KF_INLINE f32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KF_INLINE void store(float* p, f32 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
KF_INLINE mask first(int n) {
  const __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
// The first n lanes; the others are 0 and their memory is not touched.
KF_INLINE f32 load_first(const float* p, int n) {
  const mask m = first(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.low)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.high))};
}
KF_INLINE void store_first(float* p, f32 a, int n) {
  const mask m = first(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.low), a.low);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.high), a.high);
}

KF_INLINE f32 add(f32 a, f32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
KF_INLINE f32 sub(f32 a, f32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
KF_INLINE f32 mul(f32 a, f32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
KF_INLINE f32 div(f32 a, f32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
KF_INLINE f32 fma(f32 a, f32 b, f32 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// fma(a, b, acc) into acc's own registers.
KF_INLINE void accumulate(f32& acc, f32 a, f32 b) { acc = fma(a, b, acc); }
// Where either is NaN, b.
KF_INLINE f32 max(f32 a, f32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
KF_INLINE f32 min(f32 a, f32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
KF_INLINE f32 abs(f32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
// To the nearest integer, ties to even.
KF_INLINE f32 round(f32 a) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, NEAREST), _mm256_round_ps(a.high, NEAREST)};
}
// Two factors, as 2^n itself may be out of range; a * 2^(n/2) is exact, so that only the last product rounds.
KF_INLINE __m256 scale_half_by_power_of_two(__m256 a, __m256 n) {
  const __m256i exponent = _mm256_cvtps_epi32(n), bias = _mm256_set1_epi32(127);
  const __m256i part = _mm256_srai_epi32(exponent, 1), rest = _mm256_sub_epi32(exponent, part);
  const __m256 scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(part, bias), 23)));
  return _mm256_mul_ps(scaled, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
// a * 2^n for an integral n in [-252, 254] and a * 2^(n/2) normal; over- and underflow give inf, denormals and 0.
KF_INLINE f32 scale_by_power_of_two(f32 a, f32 n) {
  return {scale_half_by_power_of_two(a.low, n.low), scale_half_by_power_of_two(a.high, n.high)};
}
KF_INLINE __m256 half_fraction(__m256 a) {
  const __m256 whole = _mm256_floor_ps(a), rest = _mm256_sub_ps(a, whole);
  const __m256 too_large = _mm256_cmp_ps(_mm256_add_ps(rest, whole), a, _CMP_GT_OQ);  // by one unit: -1 as an integer
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(rest), _mm256_castps_si256(too_large)));
}
// a - floor(a), rounded down where it is not exact, as AVX-512 does; for an infinite a, which is 0 there, NaN.
KF_INLINE f32 fraction(f32 a) { return {half_fraction(a.low), half_fraction(a.high)}; }
KF_INLINE __m256 scale_half_by_two_to_floor(__m256 a, __m256 x) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
  const __m256 scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}
// a * 2^floor(x) for a in [1, 2] and x < 129; 0 where x < -126: never a denormal, which slows down a hundredfold what
// it meets.
KF_INLINE f32 scale_by_two_to_floor(f32 a, f32 x) {
  return {scale_half_by_two_to_floor(a.low, x.low), scale_half_by_two_to_floor(a.high, x.high)};
}

KF_INLINE mask less(f32 a, f32 b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}
KF_INLINE mask is_nan(f32 a) {
  return {_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q)};
}
// a where the mask is set, else b.
KF_INLINE f32 select(mask m, f32 a, f32 b) {
  return {_mm256_blendv_ps(b.low, a.low, m.low), _mm256_blendv_ps(b.high, a.high, m.high)};
}
KF_INLINE bool any(mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.low, m.high)) != 0; }
// Lane i in bit i.
KF_INLINE uint32_t bits(mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.low) | _mm256_movemask_ps(m.high) << 8);
}
// The other way round; bits from the 16th on count for nothing.
KF_INLINE mask from_bits(uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high))};
}

// Always the same tree: lanes i and i + 8, then 4, 2, 1.
KF_INLINE float sum(f32 a) {
  const __m256 half = _mm256_add_ps(a.low, a.high);
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
KF_INLINE float largest(f32 a) {
  const __m256 half = _mm256_max_ps(a.high, a.low);
  const __m128 quarter = _mm_max_ps(_mm256_extractf128_ps(half, 1), _mm256_castps256_ps128(half));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

KF_INLINE f64 zero_f64() {
  const __m256d v = _mm256_setzero_pd();
  return {v, v, v, v};
}
KF_INLINE f64 add(f64 x, f32 y) {
  return {_mm256_add_pd(x.a, _mm256_cvtps_pd(_mm256_castps256_ps128(y.low))),
          _mm256_add_pd(x.b, _mm256_cvtps_pd(_mm256_extractf128_ps(y.low, 1))),
          _mm256_add_pd(x.c, _mm256_cvtps_pd(_mm256_castps256_ps128(y.high))),
          _mm256_add_pd(x.d, _mm256_cvtps_pd(_mm256_extractf128_ps(y.high, 1)))};
}
// The same tree as for f32.
KF_INLINE double sum(f64 x) {
  const __m256d quarter = _mm256_add_pd(_mm256_add_pd(x.a, x.c), _mm256_add_pd(x.b, x.d));
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(quarter), _mm256_extractf128_pd(quarter, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

KF_INLINE __m256 half_from_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
KF_INLINE f32 load_bf16(const uint16_t* p) {
  return {half_from_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          half_from_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
KF_INLINE f32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// 32 numbers of which every second belongs to `even`: what two rows of a matrix look like when they are interleaved.
KF_INLINE void load_bf16_pairs(const uint16_t* p, f32& even, f32& odd) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}
KF_INLINE __m256i half_to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF)), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
}
// Packing works within 128 bits: this is how to put the quarters of a result into their order.
constexpr int UNPACKED_QUARTERS = 0xD8;
// Rounded to nearest, ties to even; NaN stays NaN.
KF_INLINE void store_bf16(uint16_t* p, f32 a) {
  const __m256i packed = _mm256_packus_epi32(half_to_bf16(a.low), half_to_bf16(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, UNPACKED_QUARTERS));
}
// Rounded to nearest, ties to even.
KF_INLINE void store_f16(uint16_t* p, f32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}

KF_INLINE i32 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
KF_INLINE f32 to_f32(i32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
KF_INLINE u8x64 load_u8(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
// 64 bytes hold 128 numbers of 4 bits: the low halves first, then the high ones.
KF_INLINE void load_u4(const uint8_t* p, u8x64& low, u8x64& high) {
  const u8x64 both = load_u8(p);
  const __m256i nibble = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(both.low, nibble), _mm256_and_si256(both.high, nibble)};
  high = {_mm256_and_si256(_mm256_srli_epi16(both.low, 4), nibble),
          _mm256_and_si256(_mm256_srli_epi16(both.high, 4), nibble)};
}
// In 16 bits, even and odd bytes apart: vpmaddubsw would be shorter, but its sums of two products saturate. The
// compiler splits a vector of weights once for all rows, and activations once for all weights.
KF_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i a) {
  const __m256i even_w = _mm256_and_si256(w, _mm256_set1_epi16(0xFF)), odd_w = _mm256_srli_epi16(w, 8);
  const __m256i even_a = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd_a = _mm256_srai_epi16(a, 8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even_w, even_a));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(odd_w, odd_a));
}
// acc[lane] += sum over i < 4 of w[4 lane + i] * a[i]: unsigned weights, four signed activations for all lanes.
KF_INLINE void dot4(i32& acc, u8x64 w, i32 a) {
  acc = {dot4_half(acc.low, w.low, a.low), dot4_half(acc.high, w.high, a.high)};
}
// acc[lane] += sum over i < 2 of x[2 lane + i] * a[i].
KF_INLINE void dot2(i32& acc, i16x32 x, i32 a) {
  acc = {_mm256_add_epi32(acc.low, _mm256_madd_epi16(x.low, a.low)),
         _mm256_add_epi32(acc.high, _mm256_madd_epi16(x.high, a.high))};
}
KF_INLINE i16x32 load_i16(const int16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
// To the nearest integers, ties to even, as far as 16 bits hold them.
KF_INLINE void store_i16(int16_t* p, f32 a) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, UNPACKED_QUARTERS));
}
// Already rounded numbers in [-128, 127] to 16 bytes.
KF_INLINE void store_i8(int8_t* p, f32 a) {
  const __m256i pairs = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)), UNPACKED_QUARTERS);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace simd
