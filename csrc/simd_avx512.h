// AVX-512 with VNNI: a vector is one zmm.
#pragma once

#include <immintrin.h>

namespace simd {

struct f32 {
  __m512 v;
};
struct i32 {
  __m512i v;
};
struct u8x64 {
  __m512i v;
};
struct i16x32 {
  __m512i v;
};
struct mask {
  __mmask16 v;
};
// Sixteen doubles, for sums of f32.
struct f64 {
  __m512d low, high;
};

constexpr const char* ISA = "avx512";
// Accumulator tiles that fill the register file without spilling: rows by 2 vectors.
constexpr int REGISTERS = 32;
constexpr int FLOAT_ROWS = 12;
constexpr int INT8_ROWS = 12;

KF_INLINE f32 zero() { return {_mm512_setzero_ps()}; }
KF_INLINE f32 set1(float x) { return {_mm512_set1_ps(x)}; }
KF_INLINE f32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
KF_INLINE void store(float* p, f32 a) { _mm512_storeu_ps(p, a.v); }
KF_INLINE mask first(int n) { return {static_cast<__mmask16>(n >= 16 ? 0xFFFF : (1u << n) - 1)}; }
// The first n lanes; the others are 0 and their memory is not touched.
KF_INLINE f32 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n).v, p)}; }
KF_INLINE void store_first(float* p, f32 a, int n) { _mm512_mask_storeu_ps(p, first(n).v, a.v); }

KF_INLINE f32 add(f32 a, f32 b) { return {_mm512_add_ps(a.v, b.v)}; }
KF_INLINE f32 sub(f32 a, f32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KF_INLINE f32 mul(f32 a, f32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KF_INLINE f32 div(f32 a, f32 b) { return {_mm512_div_ps(a.v, b.v)}; }
KF_INLINE f32 fma(f32 a, f32 b, f32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// fma(a, b, acc) into acc's own register: GCC 12 moves the accumulators of a tile around otherwise.
KF_INLINE void accumulate(f32& acc, f32 a, f32 b) { asm("vfmadd231ps %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v)); }
// Where either is NaN, b.
KF_INLINE f32 max(f32 a, f32 b) { return {_mm512_max_ps(a.v, b.v)}; }
KF_INLINE f32 min(f32 a, f32 b) { return {_mm512_min_ps(a.v, b.v)}; }
KF_INLINE f32 abs(f32 a) { return {_mm512_abs_ps(a.v)}; }
// To the nearest integer, ties to even.
KF_INLINE f32 round(f32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for an integral n; over- and underflow give inf, denormals and 0.
KF_INLINE f32 scale_by_power_of_two(f32 a, f32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a - floor(a).
KF_INLINE f32 fraction(f32 a) { return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// a * 2^floor(x) for a in [1, 2]; 0 where x < -126: never a denormal, which slows down a hundredfold what it meets.
KF_INLINE f32 scale_by_two_to_floor(f32 a, f32 x) {
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a.v, x.v)};
}

KF_INLINE mask less(f32 a, f32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
KF_INLINE mask is_nan(f32 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
// a where the mask is set, else b.
KF_INLINE f32 select(mask m, f32 a, f32 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
KF_INLINE bool any(mask m) { return m.v != 0; }
// Lane i in bit i.
KF_INLINE uint32_t bits(mask m) { return m.v; }
// The other way round; bits from the 16th on count for nothing.
KF_INLINE mask from_bits(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }

// Always the same tree: lanes i and i + 8, then 4, 2, 1.
KF_INLINE float sum(f32 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
KF_INLINE float largest(f32 a) { return _mm512_reduce_max_ps(a.v); }

KF_INLINE f64 zero_f64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
KF_INLINE f64 add(f64 a, f32 b) {
  return {_mm512_add_pd(a.low, _mm512_cvtps_pd(_mm512_castps512_ps256(b.v))),
          _mm512_add_pd(a.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(b.v, 1)))};
}
// The same tree as for f32.
KF_INLINE double sum(f64 a) {
  const __m512d half = _mm512_add_pd(a.low, a.high);
  const __m256d quarter = _mm256_add_pd(_mm512_castpd512_pd256(half), _mm512_extractf64x4_pd(half, 1));
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(quarter), _mm256_extractf128_pd(quarter, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

KF_INLINE f32 from_bf16(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
KF_INLINE f32 load_bf16(const uint16_t* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
KF_INLINE f32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// 32 numbers of which every second belongs to `even`: what two rows of a matrix look like when they are interleaved.
KF_INLINE void load_bf16_pairs(const uint16_t* p, f32& even, f32& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
// Rounded to nearest, ties to even; NaN stays NaN.
KF_INLINE void store_bf16(uint16_t* p, f32 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF)), 16);
  rounded = _mm512_mask_mov_epi32(rounded, is_nan(a).v, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// Rounded to nearest, ties to even.
KF_INLINE void store_f16(uint16_t* p, f32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

KF_INLINE i32 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
KF_INLINE f32 to_f32(i32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
KF_INLINE u8x64 load_u8(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// 64 bytes hold 128 numbers of 4 bits: the low halves first, then the high ones.
KF_INLINE void load_u4(const uint8_t* p, u8x64& low, u8x64& high) {
  const __m512i both = _mm512_loadu_si512(p), nibble = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(both, nibble)};
  high = {_mm512_and_si512(_mm512_srli_epi16(both, 4), nibble)};
}
// acc[lane] += sum over i < 4 of w[4 lane + i] * a[i]: unsigned weights, four signed activations for all lanes.
// In assembly because GCC 12 copies and spills accumulators around the intrinsic, at less than half the speed.
KF_INLINE void dot4(i32& acc, u8x64 w, i32 a) { asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v)); }
// acc[lane] += sum over i < 2 of x[2 lane + i] * a[i].
KF_INLINE void dot2(i32& acc, i16x32 x, i32 a) { asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(x.v), "v"(a.v)); }
KF_INLINE i16x32 load_i16(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
// To the nearest integers, ties to even, as far as 16 bits hold them.
KF_INLINE void store_i16(int16_t* p, f32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
// Already rounded numbers in [-128, 127] to 16 bytes.
KF_INLINE void store_i8(int8_t* p, f32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

}  // namespace simd
