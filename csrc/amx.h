// Tile registers (AMX), where the processor has them: products of sixteen rows and sixteen output channels at a time.
// amx_tiles.h computes with them.
//
// In assembly, which is all that GCC's intrinsics for them are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "program.h"
#include "simd.h"

#if defined(__clang__)
#define KF_COMPILER_KNOWS_AMX (__clang_major__ >= 12)
#else
#define KF_COMPILER_KNOWS_AMX (__GNUC__ >= 11)
#endif

#if defined(__AVX512F__) && defined(__linux__) && KF_COMPILER_KNOWS_AMX
#define KF_AMX_TARGET __attribute__((target("amx-tile,amx-int8,amx-bf16")))

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kitfox::amx {

constexpr int ROWS = 16;

// Whether the processor has them, the system keeps them for a thread that is interrupted, and lets this process.
inline bool ask_for_permission() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  constexpr unsigned BFLOAT16 = 1u << 22, TILES = 1u << 24, INT8 = 1u << 25, ALL = BFLOAT16 | TILES | INT8;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & ALL) != ALL) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Set by who loads the library, before it computes anything.
inline bool in_use = false;

struct alignas(64) Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Dot products that are under way at a time: each has registers of its own, so that none waits for another.
constexpr int DEPTH = 4;

// How this thread's registers are set up at the moment; 0 for not at all. To set them up anew for each task, or to free
// them behind each, would cost more than some tasks take.
inline thread_local uint32_t set_up = 0;

KF_AMX_TARGET inline void use(const Config& config, uint32_t name) {
  asm volatile("ldtilecfg %0" : : "m"(config));
  set_up = name;
}

// For products of codes in groups.
KF_AMX_TARGET inline void configure(int rows, int group) {
  const uint32_t name = static_cast<uint32_t>(group << 16 | rows);
  if (set_up == name) return;
  Config config;
  for (int tile = 0; tile < 8; ++tile) {  // 0 to 3 are sums; then inputs and weights take turns
    const bool is_inputs = tile >= DEPTH && tile % 2 == 0, is_weights = tile >= DEPTH && tile % 2 == 1;
    config.row_bytes[tile] = static_cast<uint16_t>(is_inputs ? group : 64);
    config.rows[tile] = static_cast<uint8_t>(is_weights ? group / 4 : rows);
  }
  use(config, name);
}

#define KF_AMX_MULTIPLY(sums_tile, inputs_tile, weights_tile)               \
  asm volatile(                                                             \
      "tilezero %%tmm" #sums_tile "\n\t"                                    \
      "tileloadd (%0,%1,1), %%tmm" #inputs_tile "\n\t"                      \
      "tileloadd (%2,%4,1), %%tmm" #weights_tile "\n\t"                     \
      "tdpbsud %%tmm" #weights_tile ", %%tmm" #inputs_tile ", %%tmm" #sums_tile "\n\t" \
      "tilestored %%tmm" #sums_tile ", (%3,%4,1)"                           \
      :                                                                     \
      : "r"(inputs), "r"(stride), "r"(weights), "r"(sums), "r"(int64_t{64}) \
      : "memory")

// sums[row][channel] = the dot products of one group, in registers of `SLOT`: inputs [rows][group] with a stride between
// rows, weights [group / 4][16][4].
template <int SLOT>
KF_AMX_TARGET KF_INLINE void multiply(const int8_t* inputs, int64_t stride, const uint8_t* weights, int32_t (*sums)[16]) {
  static_assert(SLOT < DEPTH);
  if constexpr (SLOT == 0) KF_AMX_MULTIPLY(0, 4, 5);
  if constexpr (SLOT == 1) KF_AMX_MULTIPLY(1, 6, 7);
  if constexpr (SLOT == 2) KF_AMX_MULTIPLY(2, 4, 5);
  if constexpr (SLOT == 3) KF_AMX_MULTIPLY(3, 6, 7);
}

// For products of bfloat16: sums of the first rows by two panels, of further rows by two, inputs of both, weights of both.
// There may be no further rows.
KF_AMX_TARGET inline void configure_bf16(int rows, int further_rows) {
  const auto name = static_cast<uint32_t>(further_rows << 8 | rows);
  if (set_up == name) return;
  Config config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_further = tile == 2 || tile == 3 || tile == 5, is_weights = tile >= 6;
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(is_weights ? 16 : is_further ? std::max(further_rows, 1) : rows);
  }
  use(config, name);
}

#define KF_AMX_ZERO(tile) asm volatile("tilezero %%tmm" #tile : : : "memory")
#define KF_AMX_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(int64_t{stride}) : "memory")
#define KF_AMX_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(int64_t{stride}) : "memory")
#define KF_AMX_ADD_BF16(sums, inputs, weights) \
  asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #sums : : : "memory")

// Behind a thread's work: one that is interrupted or sleeps has less to keep.
KF_AMX_TARGET inline void release() {
  if (set_up) asm volatile("tilerelease");
  set_up = 0;
}

}  // namespace kitfox::amx
#endif
