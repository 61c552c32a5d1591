// The C ABI: what Python hands over. A program is an array of `Op`; one call runs it over all rows of a step.
// kitfox/kernels/native.py mirrors these structs field by field and compares the sizes at load.
#pragma once

#include <cstdint>

namespace kitfox {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

enum class Format : int32_t {
  kFloat32 = 0,   // panels [N/16][K][16] float
  kBfloat16 = 1,  // panels [N/16][K/2][16][2]
  kFloat16 = 2,   // panels [N/16][K][16]
  kGrouped = 3,   // panels [N/16]{codes, scale [K/group][16], minimum [K/group][16]}, see pack.h
};

enum class ScaleType : int32_t { kChannel = 0, kFloat16 = 1, kFloat32 = 2 };

// A packed matrix [N, K]: 16 output channels side by side, N padded to 16 and K to a whole group with zeros.
struct Weight {
  int32_t format;          // Format
  int32_t bits;            // kGrouped: 4 or 8 a code
  int32_t group;           // kGrouped: 16, 32 or 64 numbers along K share a scale, those of the activations too
  int32_t zero;            // kGrouped: the code that stands for 0
  int32_t scale_type;      // kGrouped: ScaleType; kChannel has no scale in the panels
  int32_t has_minimum;     // kGrouped: w = scale * (code - zero) + minimum
  int64_t num_rows;        // N
  int64_t num_columns;     // K
  int64_t panel_bytes;     // from one panel to the next
  const uint8_t* panels;   // 64-byte aligned
  const float* channel_scale;  // kChannel: [N padded to 16], else null
};

// Activations in groups along K: x = scale * code. `scale` and both sums are [rows, K/group].
struct Codes {
  int8_t* codes;         // [rows, K padded to the group]
  float* scale;
  float* scaled_sum;     // scale * sum of the group's codes
  int32_t* sum;          // sum of the group's codes
  int64_t group;
};

// One step: T rows (tokens) of R requests, back to back. Pointers that no op of the program reads may be null.
struct Step {
  int64_t num_rows;                // T
  int64_t num_requests;            // R
  const int64_t* token_ids;        // [T]
  const int64_t* positions;        // [T]
  const int64_t* slot_mapping;     // [T] block * block_size + offset
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R], this step included
  const int32_t* block_table;      // [R, block_table_stride]
  int64_t block_table_stride;
  float* hidden;                   // [T, I]: where an op with out == null writes
  float* features;                 // [T, features_stride]: where kKeep writes
  int64_t features_stride;
};

enum class CacheFormat : int32_t {
  kFloat32 = 0,   // K [D][S], V [S][D]
  kBfloat16 = 1,  // K [D/2][S][2], V [S][D]
  kFixed16 = 2,   // K {[D/2][S][2], float scale [S]}, V {[S/2][D][2], float log2 of the scale [S]}, int16 but for those
};

// The paged cache of one layer, [num_blocks][kv_heads]{K, V}. S, the block size, and D, the head's, are multiples of 16.
// In fixed point the numbers of a token and head are scale * code, |code| <= 2048 and the scale a power of two.
struct KvCache {
  void* data;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int32_t format;  // CacheFormat
  int32_t unused;
};

enum class OpCode : int32_t {
  kEmbed = 1,
  kRmsNorm = 2,
  kQuantize = 3,
  kLinear = 4,
  kActAndMul = 5,
  kAdd = 6,
  kRotateAndWrite = 7,
  kAttention = 8,
  kGatedLinear = 9,
  kLinearArgmax = 10,
  kArgmax = 11,
  kKeep = 12,
};

enum class Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// out[row] = scale * row token_ids[row] of the matrix.
struct EmbedArgs {
  const Weight* weight;
  float* out;
  double scale;
};

// out = x / rms(x) * (offset + weight) + residual, over `size` numbers; `per_row` of them in a row (heads). `codes.codes`
// may be null, and so may `out` where codes are wanted only; residual may be null.
struct RmsNormArgs {
  const float* x;
  const float* weight;
  const float* residual;
  float* out;
  Codes codes;
  int64_t size;
  int64_t per_row;
  double eps;
  double offset;
};

struct QuantizeArgs {
  const float* x;  // [rows, size]
  Codes codes;
  int64_t size;
};

// out = x @ weight.T * channel_scale + bias + residual, then softcap * tanh(out / softcap) unless softcap is 0.
struct LinearArgs {
  const Weight* weight;
  const float* x;  // [rows, K]; null for a grouped weight, which reads codes
  Codes codes;
  const float* bias;
  const float* residual;
  float* out;  // [rows, N]
  double softcap;
};

// out = act(gate) * up. `out` may be null where codes are wanted only.
struct ActAndMulArgs {
  const float* gate;
  const float* up;
  float* out;
  Codes codes;
  int64_t size;
  int64_t activation;
};

// out = act(x @ gate.T) * (x @ up.T), with channel scales; `out` and out_codes as in ActAndMulArgs.
struct GatedLinearArgs {
  const Weight* gate;
  const Weight* up;
  const float* x;
  Codes codes;
  float* out;
  Codes out_codes;
  int64_t activation;
};

// The first largest number of each piece of TASK_CHANNELS channels of x @ weight.T * channel_scale: [pieces, rows]. Where
// a piece has a NaN, the largest is NaN. Channels that a row's bit forbids do not count; a piece that all rows forbid is
// not computed.
struct LinearArgmaxArgs {
  const Weight* weight;
  const float* x;
  Codes codes;
  float* largest;
  int32_t* ids;
  const uint32_t* allowed;  // [rows, allowed_stride], a bit a channel, least significant first; null allows all
  int64_t allowed_stride;
};

// The first largest of all pieces; -1 where it is not finite or any number was NaN.
struct ArgmaxArgs {
  const float* largest;
  const int32_t* ids;
  int64_t num_pieces;
  int64_t* out;  // [rows]
};

// Columns [column, column + size) of the step's features are x.
struct KeepArgs {
  const float* x;  // [rows, size]
  int64_t size;
  int64_t column;
};

struct AddArgs {
  const float* a;
  const float* b;
  float* out;
  int64_t size;
};

// q is normed (unless q_norm is null), rotated and written to q_out; k likewise and written, with v, to its slot.
struct RotateAndWriteArgs {
  const float* q;         // [rows, H, D]
  const float* k;         // [rows, K, D]
  const float* v;         // [rows, K, D]
  const float* q_norm;    // [D] or null
  const float* k_norm;    // [D] or null
  const float* table;     // [positions, 2, D/2]: cosines, then sines
  float* q_out;           // [rows, H, D]
  KvCache cache;
  int64_t num_heads;
  double eps;
  double offset;
};

struct AttentionArgs {
  const float* q;  // [rows, H, D]
  float* out;      // [rows, H, D]
  KvCache cache;
  int64_t num_heads;
  int64_t window;  // 0: none
  double scale;
  double softcap;  // 0: none
};

struct Op {
  int32_t code;            // OpCode
  int32_t starts_phase;    // 1: waits for all ops before it; 0: may run beside the one before
  union {
    EmbedArgs embed;
    RmsNormArgs rms_norm;
    QuantizeArgs quantize;
    LinearArgs linear;
    ActAndMulArgs act_and_mul;
    AddArgs add;
    KeepArgs keep;
    RotateAndWriteArgs rotate_and_write;
    AttentionArgs attention;
    GatedLinearArgs gated_linear;
    LinearArgmaxArgs linear_argmax;
    ArgmaxArgs argmax;
  };
};

}  // namespace kitfox
