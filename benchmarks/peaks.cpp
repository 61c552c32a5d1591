// What this machine can do at most, on a number of threads: `peaks THREADS` prints float, int16 and int8 operations per
// second and bytes read per second. Registers only for the former, memory that no cache keeps for the latter.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

double float_operations() {
#define DECLARE(i) __m512 a##i = _mm512_set1_ps(1.0f);
#define STEP(i) asm volatile("vfmadd231ps %2, %1, %0" : "+v"(a##i) : "v"(b), "v"(c));
  TWELVE(DECLARE)
  const __m512 b = _mm512_set1_ps(1.0f), c = _mm512_setzero_ps();
  constexpr int64_t ROUNDS = 20'000'000;
  const double start = seconds();
  for (int64_t i = 0; i < ROUNDS; ++i) {
    TWELVE(STEP)
  }
  return 12.0 * 32 * ROUNDS / (seconds() - start);
#undef DECLARE
#undef STEP
}

// Operations of 12 instructions over and over: INSTRUCTION on codes of which 128 or 64 pairs are multiplied and added.
#define INTEGER_OPERATIONS(NAME, INSTRUCTION, OPERATIONS)                                  \
  double NAME() {                                                                          \
    TWELVE(DECLARE)                                                                        \
    const __m512i b = _mm512_set1_epi32(1);                                                \
    constexpr int64_t ROUNDS = 20'000'000;                                                 \
    const double start = seconds();                                                        \
    for (int64_t i = 0; i < ROUNDS; ++i) {                                                 \
      TWELVE(INSTRUCTION)                                                                  \
    }                                                                                      \
    return 12.0 * OPERATIONS * ROUNDS / (seconds() - start);                               \
  }
#define DECLARE(i) __m512i a##i = _mm512_set1_epi32(1);
#define BYTES(i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(a##i) : "v"(b));
#define WORDS(i) asm volatile("vpdpwssd %1, %1, %0" : "+v"(a##i) : "v"(b));
INTEGER_OPERATIONS(int8_operations, BYTES, 128)
INTEGER_OPERATIONS(int16_operations, WORDS, 64)

// Huge pages and prefetches far ahead: what a program gets that does all it can.
double bytes_read(const float* memory, size_t size) {
  const double start = seconds();
  __m512 sums[8] = {};
  for (int pass = 0; pass < 4; ++pass) {
    for (size_t i = 0; i + 128 <= size; i += 128) {
      for (int j = 0; j < 8; ++j) {
        _mm_prefetch(reinterpret_cast<const char*>(memory + i + 16 * j + 4096), _MM_HINT_T1);
        sums[j] = _mm512_add_ps(sums[j], _mm512_loadu_ps(memory + i + 16 * j));
      }
    }
  }
  const double elapsed = seconds() - start;
  float total = 0;
  for (const __m512& sum : sums) total += _mm512_reduce_add_ps(sum);
  return 4.0 * size * sizeof(float) / elapsed + (total == 12345.0f);
}

float* huge_pages(size_t bytes) {
  constexpr size_t PAGE = 2 << 20;
  void* memory = std::aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::fill_n(static_cast<float*>(memory), bytes / sizeof(float), 1.0f);
  return static_cast<float*>(memory);
}

template <class Measure>
double together(int threads, const Measure& measure) {
  std::vector<double> results(threads);
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back([&, i] { results[i] = measure(i); });
  double sum = 0;
  for (int i = 0; i < threads; ++i) {
    workers[i].join();
    sum += results[i];
  }
  return sum;
}

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  const size_t size = (128 << 20) / sizeof(float) / threads;
  std::vector<float*> memory;
  for (int i = 0; i < threads; ++i) memory.push_back(huge_pages(size * sizeof(float)));
  double floats = 0, words = 0, codes = 0, bytes = 0;
  for (int round = 0; round < 5; ++round) {
    floats = std::max(floats, together(threads, [](int) { return float_operations(); }));
    words = std::max(words, together(threads, [](int) { return int16_operations(); }));
    codes = std::max(codes, together(threads, [](int) { return int8_operations(); }));
    bytes = std::max(bytes, together(threads, [&](int i) { return bytes_read(memory[i], size); }));
  }
  std::printf("{\"float\": %.4g, \"int16\": %.4g, \"int8\": %.4g, \"read\": %.4g}\n", floats, words, codes, bytes);
}
