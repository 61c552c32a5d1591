// The ops that go over rows: embedding, norms, quantisation, gates, sums, the largest number.
#pragma once

#include <algorithm>
#include <vector>

#include "pack.h"
#include "program.h"
#include "simd.h"

namespace kitfox {

using simd::LANES;

// One group of numbers as codes: x = scale * code. Not finite in, NaN out: the scale, and so every product, is NaN.
// Defined by quantize_groups in kitfox/kernels/quantized.py.
inline void quantize_group(const float* x, int64_t size, const Codes& codes, int64_t row, int64_t group, int64_t groups) {
  simd::f32 amax = simd::zero(), poison = simd::zero();
  for (int64_t i = 0; i < size; i += LANES) {
    const simd::f32 v = simd::load_first(x + i, static_cast<int>(std::min<int64_t>(LANES, size - i)));
    amax = simd::max(amax, simd::abs(v));
    poison = simd::fma(v, simd::zero(), poison);  // NaN as soon as one is NaN or inf
  }
  const float largest = simd::largest(amax);
  const bool finite = !simd::any(simd::is_nan(poison));
  const float inverse = finite && largest >= 0x1p-120f ? 127.0f / largest : 0.0f;  // 127 / largest may not overflow
  int8_t* out = codes.codes + (row * groups + group) * codes.group;
  simd::f32 sums = simd::zero();
  for (int64_t i = 0; i < codes.group; i += LANES) {
    simd::f32 v = simd::zero();
    if (finite && i < size) {
      v = simd::load_first(x + i, static_cast<int>(std::min<int64_t>(LANES, size - i)));
      v = simd::round(simd::mul(v, simd::set1(inverse)));
    }
    simd::store_i8(out + i, v);
    sums = simd::add(sums, v);
  }
  const auto total = static_cast<int32_t>(simd::sum(sums));  // whole numbers below 2^24: exact in any order
  const int64_t at = row * groups + group;
  codes.scale[at] = finite ? largest / 127.0f : NAN;
  codes.sum[at] = total;
  codes.scaled_sum[at] = codes.scale[at] * static_cast<float>(total);
}

// The part [start, start + count) of a row of `size` numbers, from the beginning of a group on. x: where the part is.
inline void quantize_part(const float* x, int64_t start, int64_t count, int64_t size, const Codes& codes, int64_t row) {
  const int64_t groups = (size + codes.group - 1) / codes.group;
  for (int64_t i = 0; i < count; i += codes.group) {
    quantize_group(x + i, std::min(codes.group, count - i), codes, row, (start + i) / codes.group, groups);
  }
}

class Embed {
 public:
  Embed(const EmbedArgs& args, const int64_t* ids, int64_t rows) : args_(args), ids_(ids), rows_(rows) {}

  int64_t num_tasks() const { return rows_; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    const int64_t size = args_.weight->num_columns;
    for (int64_t row = begin; row < end; ++row) {
      float* out = args_.out + row * size;
      unpack_row(*args_.weight, ids_[row], out);
      if (args_.scale == 1.0) continue;
      for (int64_t i = 0; i < size; ++i) out[i] *= static_cast<float>(args_.scale);
    }
  }

 private:
  const EmbedArgs& args_;
  const int64_t* const ids_;
  const int64_t rows_;
};

inline void rms_norm_row(const float* x, const float* weight, const float* residual, float* out, int64_t size, float eps,
                         float offset) {
  simd::f32 squares = simd::zero();
  for (int64_t i = 0; i < size; i += LANES) {
    const simd::f32 v = simd::load_first(x + i, static_cast<int>(std::min<int64_t>(LANES, size - i)));
    squares = simd::fma(v, v, squares);
  }
  const float mean = simd::sum(squares) / static_cast<float>(size);
  const simd::f32 inverse = simd::set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < size; i += LANES) {
    const int count = static_cast<int>(std::min<int64_t>(LANES, size - i));
    const simd::f32 w = simd::add(simd::load_first(weight + i, count), simd::set1(offset));
    simd::f32 y = simd::mul(simd::mul(simd::load_first(x + i, count), inverse), w);
    if (residual) y = simd::add(y, simd::load_first(residual + i, count));
    simd::store_first(out + i, y, count);
  }
}

class RmsNorm {
 public:
  RmsNorm(const RmsNormArgs& args, int64_t rows, float* out) : args_(args), rows_(rows), out_(out) {}

  int64_t num_tasks() const { return rows_ * args_.per_row; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    thread_local std::vector<float> only_codes;
    const auto eps = static_cast<float>(args_.eps), offset = static_cast<float>(args_.offset);
    const int64_t size = args_.size;
    for (int64_t row = begin; row < end; ++row) {
      float* out = out_ ? out_ + row * size : nullptr;
      if (!out) {
        only_codes.resize(size);
        out = only_codes.data();
      }
      const float* residual = args_.residual ? args_.residual + row * size : nullptr;
      rms_norm_row(args_.x + row * size, args_.weight, residual, out, size, eps, offset);
      if (args_.codes.codes) quantize_part(out, 0, size, size, args_.codes, row);
    }
  }

 private:
  const RmsNormArgs& args_;
  const int64_t rows_;
  float* const out_;
};

// Wide rows are cut into pieces of whole groups, so that a single row keeps several threads busy.
constexpr int64_t PIECE = 512;

class Quantize {
 public:
  Quantize(const QuantizeArgs& args, int64_t rows) : args_(args), rows_(rows) {}

  int64_t num_tasks() const { return rows_ * num_pieces(); }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / num_pieces(), start = task % num_pieces() * PIECE;
      const int64_t count = std::min(PIECE, args_.size - start);
      quantize_part(args_.x + row * args_.size + start, start, count, args_.size, args_.codes, row);
    }
  }

 private:
  int64_t num_pieces() const { return (args_.size + PIECE - 1) / PIECE; }

  const QuantizeArgs& args_;
  const int64_t rows_;
};

KF_INLINE simd::f32 activate(simd::f32 x, Activation activation) {
  const simd::f32 one = simd::set1(1.0f), half_x = simd::mul(x, simd::set1(0.5f));
  if (activation == Activation::kSilu) {
    // x / (1 + e^-x); where e^-x is beyond 2^127 that is 0.
    const simd::f32 power = simd::min(simd::set1(127.0f), simd::mul(x, simd::set1(-1.44269504088896341f)));
    const simd::f32 gated = simd::div(x, simd::add(one, simd::exp2(power)));
    return simd::select(simd::less(x, simd::set1(-88.0f)), simd::zero(), gated);
  }
  if (activation == Activation::kGeluTanh) {
    const simd::f32 cube = simd::mul(simd::mul(x, x), x);
    const simd::f32 inner = simd::mul(simd::set1(0.7978845608f), simd::fma(cube, simd::set1(0.044715f), x));
    return simd::mul(half_x, simd::add(one, simd::tanh(inner)));
  }
  float lanes[LANES];  // erf has no vector form here and no model of ours is fast with it
  simd::store(lanes, x);
  for (float& lane : lanes) lane = std::erf(lane * 0.70710678f);
  return simd::mul(half_x, simd::add(one, simd::load(lanes)));
}

class ActAndMul {
 public:
  ActAndMul(const ActAndMulArgs& args, int64_t rows) : args_(args), rows_(rows) {}

  int64_t num_tasks() const { return rows_ * num_pieces(); }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    float only_codes[PIECE];
    const auto activation = static_cast<Activation>(args_.activation);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / num_pieces(), start = task % num_pieces() * PIECE;
      const int64_t size = std::min(PIECE, args_.size - start), at = row * args_.size + start;
      float* out = args_.out ? args_.out + at : only_codes;
      for (int64_t i = 0; i < size; i += LANES) {
        const int count = static_cast<int>(std::min<int64_t>(LANES, size - i));
        const simd::f32 gate = simd::load_first(args_.gate + at + i, count);
        const simd::f32 up = simd::load_first(args_.up + at + i, count);
        simd::store_first(out + i, simd::mul(activate(gate, activation), up), count);
      }
      if (args_.codes.codes) quantize_part(out, start, size, args_.size, args_.codes, row);
    }
  }

 private:
  int64_t num_pieces() const { return (args_.size + PIECE - 1) / PIECE; }

  const ActAndMulArgs& args_;
  const int64_t rows_;
};

class Keep {
 public:
  Keep(const KeepArgs& args, const Step& step, int64_t first_row, int64_t rows)
      : args_(args), out_(step.features + first_row * step.features_stride + args.column),
        stride_(step.features_stride), rows_(rows) {}

  int64_t num_tasks() const { return rows_; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(args_.x + row * args_.size, args_.size, out_ + row * stride_);
    }
  }

 private:
  const KeepArgs& args_;
  float* const out_;
  const int64_t stride_, rows_;
};

class Add {
 public:
  Add(const AddArgs& args, int64_t rows) : args_(args), rows_(rows) {}

  int64_t num_tasks() const { return rows_; }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    for (int64_t i = begin * args_.size; i < end * args_.size; i += LANES) {
      const int count = static_cast<int>(std::min<int64_t>(LANES, end * args_.size - i));
      const simd::f32 sum = simd::add(simd::load_first(args_.a + i, count), simd::load_first(args_.b + i, count));
      simd::store_first(args_.out + i, sum, count);
    }
  }

 private:
  const AddArgs& args_;
  const int64_t rows_;
};

}  // namespace kitfox
