// The one translation unit: the interpreter of programs and the C ABI that Python calls.

#include <cstdint>
#include <algorithm>
#include <atomic>
#include <iterator>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"
#include "program.h"
#include "sample.h"

#define KF_API extern "C" __attribute__((visibility("default")))

namespace kitfox {

// What calls share: the threads, and the plan of the tile at hand.
struct Context {
  Pool pool;
  AttentionPlan plan;

  Context(int num_threads, std::vector<int> cores, int spin_us) : pool(num_threads, std::move(cores), spin_us) {}
};

// One op over the rows [first_row, first_row + rows) of a step: makes the kernel and hands it to `use`.
template <class Use>
void with_kernel(const Op& op, const Step& step, int64_t first_row, int64_t rows, AttentionPlan& plan, const Use& use) {
  switch (static_cast<OpCode>(op.code)) {
    case OpCode::kEmbed: return use(Embed(op.embed, step.token_ids + first_row, rows));
    case OpCode::kRmsNorm: {
      const bool returns = !op.rms_norm.out && !op.rms_norm.codes.codes;  // the step's result
      float* out = returns ? step.hidden + first_row * op.rms_norm.per_row * op.rms_norm.size : op.rms_norm.out;
      return use(RmsNorm(op.rms_norm, rows, out));
    }
    case OpCode::kQuantize: return use(Quantize(op.quantize, rows));
    case OpCode::kLinear: return use(Linear(op.linear, rows, op.linear.out));
    case OpCode::kActAndMul: return use(ActAndMul(op.act_and_mul, rows));
    case OpCode::kGatedLinear: return use(GatedLinear(op.gated_linear, rows));
    case OpCode::kLinearArgmax: return use(LinearArgmax(op.linear_argmax, rows));
    case OpCode::kArgmax: return use(Argmax(op.argmax, rows));
    case OpCode::kAdd: return use(Add(op.add, rows));
    case OpCode::kKeep: return use(Keep(op.keep, step, first_row, rows));
    case OpCode::kRotateAndWrite: return use(RotateAndWrite(op.rotate_and_write, step, first_row, rows));
    case OpCode::kAttention: return use(Attention(op.attention, step, plan));
  }
}

// Ops that follow one another without waiting are one phase: their tasks are one range, shared out together.
void run_tile(Context& context, const Op* ops, int64_t num_ops, const Step& step, int64_t first_row, int64_t rows) {
  std::vector<int64_t> totals, first_ops;
  for (int64_t i = 0; i < num_ops; ++i) {
    if (i == 0 || ops[i].starts_phase) {
      first_ops.push_back(i);
      totals.push_back(0);
    }
    with_kernel(ops[i], step, first_row, rows, context.plan, [&](const auto& kernel) { totals.back() += kernel.num_tasks(); });
  }
  first_ops.push_back(num_ops);
  static std::atomic<uint64_t> time{0};
  const uint64_t first_time = time.fetch_add(totals.size()) + 1;
  context.pool.run(totals, [&](int phase, int64_t begin, int64_t end, int thread) {
    phase_time = first_time + phase;
    int64_t offset = 0;
    for (int64_t i = first_ops[phase]; i < first_ops[phase + 1] && offset < end; ++i) {
      with_kernel(ops[i], step, first_row, rows, context.plan, [&](const auto& kernel) {
        const int64_t count = kernel.num_tasks();
        const int64_t from = std::max(begin, offset) - offset, to = std::min(end, offset + count) - offset;
        if (from < to) kernel.run(from, to, thread);
        offset += count;
      });
    }
#ifdef KF_AMX_TARGET
    amx::release();
#endif
  });
}

const AttentionArgs* find_attention(const Op* ops, int64_t num_ops) {
  for (int64_t i = 0; i < num_ops; ++i) {
    if (static_cast<OpCode>(ops[i].code) == OpCode::kAttention) return &ops[i].attention;
  }
  return nullptr;
}

}  // namespace kitfox

using namespace kitfox;

// Computes products in tile registers from now on; whether this machine has them for us.
KF_API bool kf_use_tiles() {
#ifdef KF_AMX_TARGET
  amx::in_use = amx::ask_for_permission();
  return amx::in_use;
#else
  return false;
#endif
}

// Sizes of the structs of the ABI, for the other side to compare with its own.
KF_API void kf_abi(int64_t* sizes) {
  const int64_t own[] = {sizeof(Weight), sizeof(Codes), sizeof(Step), sizeof(KvCache), sizeof(Op)};
  std::copy(std::begin(own), std::end(own), sizes);
}

// Likewise for sampling.
KF_API void kf_sampling_abi(int64_t* sizes) {
  sizes[0] = sizeof(SampleRow);
  sizes[1] = sizeof(LogprobsRow);
}

// cores: [num_threads], or null for threads that are not pinned.
KF_API Context* kf_new(int32_t num_threads, const int32_t* cores, int32_t spin_us) {
  return new Context(num_threads, cores ? std::vector<int>(cores, cores + num_threads) : std::vector<int>(), spin_us);
}

KF_API void kf_free(Context* context) { delete context; }

// Runs a program over a step, at most tile_rows rows at a time: the buffers of its activations are that long, and stay
// in the caches. A tile's rows see the keys and values of the tiles before it, as those of an earlier step.
KF_API void kf_run(Context* context, const Op* ops, int64_t num_ops, const Step* step, int64_t tile_rows) {
  const AttentionArgs* attention = find_attention(ops, num_ops);
  for (int64_t row = 0; row < step->num_rows; row += tile_rows) {
    const int64_t rows = std::min(tile_rows, step->num_rows - row);
    if (attention) context->plan.build(*step, row, rows, *attention, context->pool.size());
    run_tile(*context, ops, num_ops, *step, row, rows);
  }
}

namespace {

template <class Task>
void share_out(Context* context, int64_t total, const Task& task) {
  context->pool.run({total}, [&](int, int64_t begin, int64_t end, int) { task(begin, end); });
}

// Calls use with the pointer's real type.
template <class Use>
void with_source(const void* source, int32_t format, const Use& use) {
  switch (static_cast<Format>(format)) {
    case Format::kFloat32: return use(static_cast<const float*>(source));
    case Format::kBfloat16: return use(static_cast<const Bfloat16*>(source));
    case Format::kFloat16: return use(static_cast<const Float16*>(source));
    case Format::kGrouped: return;
  }
}

int64_t num_panels(const Weight& weight) { return (weight.num_rows + PANEL_CHANNELS - 1) / PANEL_CHANNELS; }

}  // namespace

// Fills in panel_bytes of a weight whose other fields are set; returns the bytes of all its panels.
KF_API int64_t kf_measure(Weight* weight) {
  weight->panel_bytes = panel_bytes(*weight);
  return weight->panel_bytes * num_panels(*weight);
}

// Packs a matrix [N, K] of float (0), bfloat16 (1) or float16 (2) into a weight of a float format.
KF_API void kf_pack_float(Context* context, const Weight* weight, const void* source, int32_t format, uint8_t* panels) {
  with_source(source, format, [&](const auto* numbers) {
    share_out(context, num_panels(*weight),
              [&](int64_t begin, int64_t end) { pack_float(*weight, numbers, panels, begin, end); });
  });
}

KF_API void kf_pack_codes(Context* context, const Weight* weight, const uint8_t* codes, const float* scale,
                          const float* minimum, uint8_t* panels) {
  share_out(context, num_panels(*weight), [&](int64_t begin, int64_t end) {
    pack_codes(*weight, codes, scale, minimum, panels, begin, end);
  });
}

// Likewise a matrix of floats into 8 bits per output channel; channel_scale [N] is an output.
KF_API void kf_pack_int8(Context* context, const Weight* weight, const void* source, int32_t format,
                         float* channel_scale, uint8_t* panels) {
  with_source(source, format, [&](const auto* numbers) {
    share_out(context, num_panels(*weight),
              [&](int64_t begin, int64_t end) { pack_int8(*weight, numbers, channel_scale, panels, begin, end); });
  });
}

// See copy_blocks in attention.h.
KF_API void kf_copy_blocks(const KvCache* cache, const int64_t* src, const int64_t* dst, const int64_t* num_tokens,
                           int64_t count) {
  copy_blocks(*cache, src, dst, num_tokens, count);
}

KF_API void kf_sample(Context* context, SampleRow* rows, int64_t num_rows, int64_t vocab_size) {
  share_out(context, num_rows, [&](int64_t begin, int64_t end) { sample_rows(rows, begin, end, vocab_size); });
}

KF_API void kf_logprobs(Context* context, LogprobsRow* rows, int64_t num_rows, int64_t vocab_size) {
  share_out(context, num_rows, [&](int64_t begin, int64_t end) { logprobs_of_rows(rows, begin, end, vocab_size); });
}
