// Prints what every word of simd.h makes of random and special numbers: two instruction sets must print the same.
#include "simd.h"

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int ROUNDS = 5000;
std::mt19937 random_bits(1);
constexpr float SPECIAL[] = {0.0f,    -0.0f,     INFINITY, -INFINITY, NAN,     0.5f,    1.5f,     2.5f,    -1.0f,
                             1e-45f,  -1e-45f,   1e-38f,   1.17e-38f, 3.4e38f, -3.4e38f, 65504.0f, 5.9e-8f, -87.3f,
                             -87.4f,  -103.9f,   -104.1f,  88.7f,     88.8f,   89.1f};

// Of a word's results: a NaN counts as a NaN, whatever its payload.
struct Hash {
  uint64_t value = 1469598103934665603u;
  void add(uint64_t x) { value = (value ^ x) * 1099511628211u; }
  void add(float x) {
    uint32_t bits = 0x7FC00000;
    if (x == x) std::memcpy(&bits, &x, 4);
    add(uint64_t{bits});
  }
  void add(double x) {
    uint64_t bits = 1;
    if (x == x) std::memcpy(&bits, &x, 8);
    add(bits);
  }
  void add(simd::f32 x) {
    float lanes[16];
    simd::store(lanes, x);
    for (float lane : lanes) add(lane);
  }
  template <class T>
  void add_array(const T* p, int n) {
    for (int i = 0; i < n; ++i) add(static_cast<uint64_t>(p[i]));
  }
};

float any_float() {
  const uint32_t kind = random_bits() % 8;
  if (kind == 0) return SPECIAL[random_bits() % (sizeof(SPECIAL) / sizeof(float))];
  if (kind == 1) {
    const uint32_t bits = random_bits();
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const float ranges[] = {1.0f, 8.0f, 100.0f, 120.0f, 1e5f, 1e-39f};
  return (static_cast<float>(random_bits()) / 2147483648.0f - 1.0f) * ranges[kind - 2];
}

simd::f32 any_vector() {
  float lanes[16];
  for (float& lane : lanes) lane = any_float();
  return simd::load(lanes);
}

// Its arguments are made one after the other: C++ leaves the order within a call to the compiler.
template <class Word>
void test(const char* name, const Word& word) {
  random_bits.seed(7);
  Hash hash;
  for (int i = 0; i < ROUNDS; ++i) {
    const simd::f32 a = any_vector(), b = any_vector(), c = any_vector();
    hash.add(word(a, b, c));
  }
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash.value));
}

template <class Rounds>
void test_hashed(const char* name, const Rounds& round) {
  random_bits.seed(7);
  Hash hash;
  for (int i = 0; i < ROUNDS; ++i) round(hash);
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash.value));
}

template <class T>
std::vector<T> bytes(int count) {
  std::vector<T> result(count);
  for (T& x : result) x = static_cast<T>(random_bits() % 4 == 0 ? (random_bits() % 2 ? 0x80 : 0xFF) : random_bits());
  return result;
}

// Heap blocks that end with the last lane, so that the sanitizers see an access past it.
void tails(Hash& hash) {
  const int n = static_cast<int>(random_bits() % 18);
  const int count = n < 16 ? n : 16;
  std::vector<float> in(count), out(18, 3.0f);
  for (float& x : in) x = any_float();
  const simd::f32 v = simd::load_first(in.data(), n);
  hash.add(v);
  simd::store_first(out.data(), v, n);
  for (float x : out) hash.add(x);
  hash.add(simd::select(simd::first(n), simd::set1(1.0f), simd::set1(2.0f)));
}

}  // namespace

int main() {
  using namespace simd;
  test("add", [](f32 a, f32 b, f32) { return add(a, b); });
  test("sub", [](f32 a, f32 b, f32) { return sub(a, b); });
  test("mul", [](f32 a, f32 b, f32) { return mul(a, b); });
  test("div", [](f32 a, f32 b, f32) { return div(a, b); });
  test("fma", [](f32 a, f32 b, f32 c) { return fma(a, b, c); });
  test("accumulate", [](f32 a, f32 b, f32 c) {
    accumulate(a, b, c);
    return a;
  });
  test("max", [](f32 a, f32 b, f32) { return max(a, b); });
  test("min", [](f32 a, f32 b, f32) { return min(a, b); });
  test("abs", [](f32 a, f32, f32) { return abs(a); });
  test("round", [](f32 a, f32, f32) { return round(a); });
  test("exp", [](f32 a, f32, f32) { return simd::exp(a); });
  test("tanh", [](f32 a, f32, f32) { return simd::tanh(a); });
  test("less", [](f32 a, f32 b, f32 c) { return select(less(a, b), c, a); });
  test("is_nan", [](f32 a, f32 b, f32) { return select(is_nan(a), b, a); });
  // The sign of a fraction of 0 and an infinite number's are left open.
  test("fraction", [](f32 a, f32, f32) {
    const f32 number = select(less(abs(a), set1(INFINITY)), a, set1(0.25f));
    return add(fraction(number), zero());
  });
  test("scale_by_two_to_floor", [](f32 a, f32 b, f32) {
    const f32 power = select(less(b, set1(128.0f)), b, set1(-126.0f));
    return scale_by_two_to_floor(add(fraction(select(less(abs(a), set1(1e6f)), a, zero())), set1(1.0f)), power);
  });
  test("exp2", [](f32 a, f32, f32) { return simd::exp2(min(set1(127.0f), a)); });
  test("bits", [](f32 a, f32 b, f32) { return static_cast<float>(bits(less(a, b))); });
  test("from_bits", [](f32 a, f32 b, f32 c) { return select(from_bits(0xABCD0000u | bits(less(a, b))), c, a); });
  test("sum of doubles", [](f32 a, f32 b, f32 c) { return sum(add(add(add(zero_f64(), a), b), c)); });
  test("any", [](f32 a, f32 b, f32) { return any(is_nan(a)) + 2.0f * any(less(mul(a, a), b)); });
  test("sum", [](f32 a, f32, f32) { return sum(a); });
  test("largest", [](f32 a, f32, f32) { return largest(a); });
  test_hashed("scale_by_power_of_two", [](Hash& hash) {
    float lanes[16], powers[16];
    for (int i = 0; i < 16; ++i) {
      lanes[i] = 0.5f + static_cast<float>(random_bits()) / 4294967296.0f * 1.5f;
      powers[i] = static_cast<float>(static_cast<int>(random_bits() % 507) - 252);
    }
    hash.add(scale_by_power_of_two(load(lanes), load(powers)));
  });
  test_hashed("tails", tails);
  test_hashed("load_16_bits", [](Hash& hash) {
    uint16_t bits[33];
    for (uint16_t& x : bits) x = static_cast<uint16_t>(random_bits());
    f32 even, odd;
    load_bf16_pairs(bits + 1, even, odd);
    for (f32 v : {load_bf16(bits + 1), load_f16(bits + 1), even, odd}) hash.add(v);
  });
  test_hashed("store_bf16", [](Hash& hash) {
    uint16_t bits[17];
    store_bf16(bits + 1, any_vector());
    hash.add_array(bits + 1, 16);
  });
  test_hashed("store_f16", [](Hash& hash) {
    uint16_t bits[17];
    const f32 a = any_vector();
    store_f16(bits + 1, select(is_nan(a), zero(), a));
    hash.add_array(bits + 1, 16);
  });
  test_hashed("store_i8", [](Hash& hash) {
    float lanes[16];
    int8_t codes[17];
    for (float& lane : lanes) lane = static_cast<float>(static_cast<int>(random_bits() % 256) - 128);
    store_i8(codes + 1, load(lanes));
    hash.add_array(codes + 1, 16);
  });
  test_hashed("dot4", [](Hash& hash) {
    const auto codes = bytes<uint8_t>(65);
    const auto activations = bytes<int8_t>(4);
    u8x64 low, high;
    load_u4(codes.data() + 1, low, high);
    i32 acc = set1_i32(static_cast<int32_t>(random_bits() % 2000) - 1000);
    for (u8x64 w : {load_u8(codes.data() + 1), low, high}) {
      dot4(acc, w, broadcast_bytes(activations.data()));
      hash.add(to_f32(acc));  // below 2^24, so exact
    }
  });
}
