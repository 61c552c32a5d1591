// Sixteen lanes of float or int32, the same on every instruction set: one zmm, two ymm or four NEON registers.
// Everything above this file is written in these words, so that an element's arithmetic is the same operations in the
// same order whatever the machine. Multiplication and addition are never contracted behind our back (-ffp-contract=off):
// where a fused operation is meant, it says fma.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define KF_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#error "no instruction set that kitfox has kernels for"
#endif

namespace simd {

constexpr int LANES = 16;

// Four bytes for all lanes: what dot4 and dot2 multiply by.
KF_INLINE i32 broadcast_bytes(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return set1_i32(bits);
}

// e^x to about 2 ulp; 0 below -87.3 (never a denormal), inf above 88.7, NaN for NaN.
// Cody-Waite reduction to |r| <= ln(2)/2, then a polynomial of degree 6: https://doi.org/10.1145/355769.355776
KF_INLINE f32 exp(f32 x) {
  const mask is_too_small = less(x, set1(-87.33654f));
  // Not even on the way a denormal, which slows down tenfold what it meets.
  const f32 clamped = min(select(is_too_small, zero(), x), set1(89.0f));
  const f32 n = round(mul(clamped, set1(1.44269504088896341f)));
  f32 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  f32 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  f32 result = scale_by_power_of_two(p, n);
  result = select(is_too_small, zero(), result);
  result = select(less(set1(88.72283f), x), set1(INFINITY), result);
  return select(is_nan(x), x, result);
}

// 2^x to about 2 ulp for x <= 127, in half of the operations of exp; 1 for 0, 0 below -126, NaN for NaN. The polynomial
// minimises the largest relative error on [0, 1], 9e-8, among those of degree 5 that are 1 at 0.
KF_INLINE f32 exp2(f32 x) {
  const f32 r = fraction(x);
  f32 p = set1(1.867130515e-3f);
  p = fma(p, r, set1(9.017028846e-3f));
  p = fma(p, r, set1(5.579991266e-2f));
  p = fma(p, r, set1(2.401644439e-1f));
  p = fma(p, r, set1(6.931512952e-1f));
  p = fma(p, r, set1(1.0f));
  return scale_by_two_to_floor(p, x);
}

// 1 - 2 / (e^2x + 1), exact at 0 and at the ends.
KF_INLINE f32 tanh(f32 x) {
  const f32 e = exp(mul(x, set1(2.0f)));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

}  // namespace simd
