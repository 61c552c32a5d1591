// From logits to tokens and log-probabilities, one row a task. kitfox/sampling/sampler.py defines what this computes.
// Nothing sorts the vocabulary: a bound on the logits, which always errs towards too many, leaves few survivors, and
// the exact cut is found among those. All sums are in double and in the order of the ids.
#pragma once

#include <algorithm>
#include <cfloat>
#include <vector>

#include "simd.h"

namespace kitfox {

// kitfox/sampling/native_sampler.py mirrors this and the next struct: fields of eight bytes only.
struct SampleRow {
  const float* logits;      // [V]
  const uint32_t* allowed;  // [ceil(V / 32)], a bit a token, the lowest first; the others count as -inf. Null: all
  double temperature;       // 0: the largest logit, the first of equals
  double top_p;             // 1: all
  double min_p;             // 0: all
  int64_t top_k;            // outside [1, V): all
  double uniform;           // in [0, 1)
  int64_t token;            // out; -1 where a logit, allowed or not, is NaN or +inf, or none is above -inf
};

struct LogprobsRow {
  const float* logits;   // [V]
  int64_t token;
  int64_t num_top;       // at most V
  double logprob;        // out, of token; this and top_logprobs are NaN where a row to sample would have no token
  int64_t rank;          // out: 1 + how many logits are larger
  int64_t* top_ids;      // out: [num_top] ids of the largest, of equals the first
  double* top_logprobs;  // out: [num_top]
};

// Numbers as they lie in memory.
struct Numbers {
  const float* x;

  float operator[](int64_t i) const { return x[i]; }
  Numbers from(int64_t begin) const { return {x + begin}; }
  simd::f32 vector(int64_t i) const { return simd::load(x + i); }
  simd::f32 vector_of_first(int64_t i, int count) const { return simd::load_first(x + i, count); }
};

// Numbers of which those that are not allowed read as -inf, or NaN where they are NaN or +inf: no mask hides a fault.
// So what is done with them is bit for bit what is done with such numbers in memory.
struct MaskedNumbers {
  const float* x;
  const uint32_t* allowed;

  float operator[](int64_t i) const { return (allowed[i / 32] >> (i % 32) & 1) ? x[i] : x[i] - INFINITY; }
  // begin: a multiple of 32.
  MaskedNumbers from(int64_t begin) const { return {x + begin, allowed + begin / 32}; }
  simd::f32 vector(int64_t i) const { return masked(simd::load(x + i), i); }
  simd::f32 vector_of_first(int64_t i, int count) const { return masked(simd::load_first(x + i, count), i); }

 private:
  // i: a multiple of 16.
  simd::f32 masked(simd::f32 v, int64_t i) const {
    const simd::mask is_allowed = simd::from_bits(allowed[i / 32] >> (i % 32));
    return simd::sub(v, simd::select(is_allowed, simd::zero(), simd::set1(INFINITY)));
  }
};

// visit(v, i) for each sixteen numbers from i on. Those past the end are -inf: they have no weight and are no maximum.
template <class X, class Visit>
KF_INLINE void for_vectors(const X& x, int64_t size, const Visit& visit) {
  int64_t i = 0;
  for (; i + simd::LANES <= size; i += simd::LANES) visit(x.vector(i), i);
  if (i < size) {
    const int rest = static_cast<int>(size - i);
    visit(simd::select(simd::first(rest), x.vector_of_first(i, rest), simd::set1(-INFINITY)), i);
  }
}

// How many numbers are below a limit, which is not -inf.
inline int64_t count_less(Numbers x, int64_t size, float limit) {
  int64_t count = -(-size & (simd::LANES - 1));  // the padding's
  for_vectors(x, size, [&](simd::f32 v, int64_t) {
    count += __builtin_popcount(simd::bits(simd::less(v, simd::set1(limit))));
  });
  return count;
}

// The largest number up to `largest` that `reaches`, which must hold for all numbers below one for which it holds;
// -inf if there is none. Bisects the floats themselves, whose bits count them in their order.
template <class Reaches>
inline float last_reaching(float largest, const Reaches& reaches) {
  const auto to_float = [](int64_t key) {
    const int32_t bits = static_cast<int32_t>(key >= 0 ? key : INT32_MIN - key);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  const auto to_key = [](float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >= 0 ? int64_t{bits} : int64_t{INT32_MIN} - bits;
  };
  int64_t low = to_key(-INFINITY), end = to_key(largest) + 1;
  while (end - low > 1) {
    const int64_t middle = low + (end - low) / 2;
    (reaches(to_float(middle)) ? low : end) = middle;
  }
  return to_float(low);
}

// The k-th largest of numbers of which none is above `largest`; 1 <= k <= size.
inline float kth_largest(Numbers x, int64_t size, int64_t k, float largest) {
  return last_reaching(largest, [&](float limit) { return size - count_less(x, size, limit) >= k; });
}

// Works on one row after another; holds the memory that takes.
class RowSampler {
 public:
  // The one of the calling thread, with room for rows of this size.
  static RowSampler& of_this_thread(int64_t vocab_size) {
    thread_local RowSampler sampler;
    if (sampler.vocab_size_ != vocab_size) sampler.resize(vocab_size);
    return sampler;
  }

  void sample(SampleRow& row) {
    row.token = row.allowed ? choose(row, MaskedNumbers{row.logits, row.allowed}) : choose(row, Numbers{row.logits});
  }

  void logprobs(LogprobsRow& row) {
    const Numbers logits{row.logits};
    const bool is_distribution = scan(logits);
    temperature_ = 1.0;
    const double log_total = is_distribution ? largest_ + std::log(total_weight(logits, vocab_size_)) : NAN;
    const float own = logits[row.token];
    row.logprob = own - log_total;
    row.rank = 1;
    for_vectors(logits, vocab_size_, [&](simd::f32 v, int64_t) {
      row.rank += __builtin_popcount(simd::bits(simd::less(simd::set1(own), v)));
    });
    if (row.num_top == 0) return;
    if (is_distribution) {
      collect(logits, bound_of_largest(row.num_top));
      std::partial_sort(ids_.begin(), ids_.begin() + row.num_top, ids_.begin() + num_survivors_, [&](int a, int b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
      });
    }
    for (int64_t i = 0; i < row.num_top; ++i) {
      row.top_ids[i] = is_distribution ? ids_[i] : i;
      row.top_logprobs[i] = logits[row.top_ids[i]] - log_total;
    }
  }

 private:
  // Numbers whose sum, and whose lanes' maxima, are kept by themselves.
  static constexpr int64_t kBlock = 16 * simd::LANES;

  void resize(int64_t vocab_size) {
    vocab_size_ = vocab_size;
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    maxima_.resize(num_blocks * simd::LANES);
    cumulative_.resize(num_blocks);
    survivors_.resize(vocab_size + simd::LANES);
    weights_.resize(vocab_size + simd::LANES);
    ids_.resize(vocab_size + simd::LANES);
  }

  template <class Logits>
  int64_t choose(const SampleRow& row, const Logits& logits) {
    if (!scan(logits)) return -1;
    if (row.temperature == 0.0) return first_of_largest(logits);
    // Neither the temperature nor its inverse may overflow a float: infinity times 0 is no weight.
    temperature_ = std::min(std::max(row.temperature, 1e-37), 1e37);
    const bool limits_count = 0 < row.top_k && row.top_k < vocab_size_;
    if (!limits_count && row.top_p >= 1.0 && row.min_p == 0.0) {
      return draw(logits, vocab_size_, row.uniform);
    }
    const float min_logit = row.min_p > 0.0 ? at_least(largest_ + temperature_ * std::log(row.min_p)) : -INFINITY;
    if (limits_count) {
      // Fewer than top_k may be above -inf; what has no weight need not survive.
      collect(logits, std::max(bound_of_largest(row.top_k), -FLT_MAX));
      keep_largest(row.top_k);
      if (row.top_p < 1.0) keep_mass(row.top_p * total_weight(survivors(), num_survivors_));
      keep_if([&](float logit) { return logit >= min_logit; });
    } else if (row.top_p < 1.0) {
      const double total = total_weight(logits, vocab_size_);
      // All logits below this one together weigh less than what top_p leaves out. A thousandth covers the rounding.
      const double least_weight = (1.0 - row.top_p) * total / static_cast<double>(vocab_size_);
      const double bound = largest_ + temperature_ * (std::log(least_weight) - 1e-3);
      collect(logits, std::max(min_logit, std::nextafter(static_cast<float>(bound), -INFINITY)));
      keep_mass(row.top_p * total);
    } else {
      collect(logits, min_logit);
    }
    return ids_[draw(survivors(), num_survivors_, row.uniform)];
  }

  Numbers survivors() const { return {survivors_.data()}; }

  // Sets largest_ and maxima_; returns whether the row is a distribution.
  template <class Logits>
  bool scan(const Logits& logits) {
    simd::f32 all = simd::set1(-INFINITY), nan = simd::zero();
    for (int64_t begin = 0, block = 0; begin < vocab_size_; begin += kBlock, ++block) {
      simd::f32 maxima = simd::set1(-INFINITY);
      for_vectors(logits.from(begin), std::min(kBlock, vocab_size_ - begin), [&](simd::f32 v, int64_t) {
        maxima = simd::max(v, maxima);
        nan = simd::select(simd::is_nan(v), v, nan);
      });
      simd::store(maxima_.data() + block * simd::LANES, maxima);
      all = simd::max(maxima, all);
    }
    largest_ = simd::largest(all);
    return std::isfinite(largest_) && !simd::any(simd::is_nan(nan));
  }

  template <class Logits>
  int64_t first_of_largest(const Logits& logits) const {
    const int64_t block = (std::find(maxima_.begin(), maxima_.end(), largest_) - maxima_.begin()) / simd::LANES;
    int64_t id = block * kBlock;
    while (logits[id] != largest_) ++id;
    return id;
  }

  simd::f32 weight(simd::f32 logit) const {
    const simd::f32 inverse = simd::set1(static_cast<float>(1.0 / temperature_));
    return simd::exp(simd::mul(simd::sub(logit, simd::set1(largest_)), inverse));
  }

  // Sets cumulative_ to the weight up to the end of each block; returns the last.
  template <class Logits>
  double total_weight(const Logits& logits, int64_t size) {
    double total = 0.0;
    for (int64_t begin = 0, block = 0; begin < size; begin += kBlock, ++block) {
      simd::f64 sum = simd::zero_f64();
      for_vectors(logits.from(begin), std::min(kBlock, size - begin), [&](simd::f32 v, int64_t) {
        sum = simd::add(sum, weight(v));
      });
      cumulative_[block] = total += simd::sum(sum);
    }
    return total;
  }

  // The first index at which the cumulative weight exceeds the uniform share of the total.
  template <class Logits>
  int64_t draw(const Logits& logits, int64_t size, double uniform) {
    const double total = total_weight(logits, size);
    const double target = uniform * total;
    const auto end = cumulative_.begin() + (size + kBlock - 1) / kBlock;
    // Rounding may make target the total; what lies behind the total weighs nothing.
    const auto found = std::min(std::upper_bound(cumulative_.begin(), end, target),
                                std::lower_bound(cumulative_.begin(), end, total));
    const int64_t begin = (found - cumulative_.begin()) * kBlock;
    double cumulative = found == cumulative_.begin() ? 0.0 : found[-1];
    float weights[kBlock];
    for_vectors(logits.from(begin), std::min(kBlock, size - begin),
                [&](simd::f32 v, int64_t i) { simd::store(weights + i, weight(v)); });
    int64_t chosen = 0;
    for (int64_t i = 0; i < std::min(kBlock, size - begin) && cumulative <= target; ++i) {
      if (weights[i] > 0.0f) chosen = i;
      cumulative += weights[i];
    }
    return begin + chosen;
  }

  // The smallest float that is not below x.
  static float at_least(double x) {
    const float rounded = static_cast<float>(x);
    return rounded < x ? std::nextafter(rounded, INFINITY) : rounded;
  }

  // At least `count` logits are not below this: as many lanes of blocks have such a maximum.
  float bound_of_largest(int64_t count) const {
    const int64_t num_maxima = static_cast<int64_t>(maxima_.size());
    return count <= num_maxima ? kth_largest({maxima_.data()}, num_maxima, count, largest_) : -INFINITY;
  }

  // Makes the logits that are not below the bound the survivors, in the order of their ids.
  template <class Logits>
  void collect(const Logits& logits, float bound) {
    int64_t count = 0;
    for_vectors(logits, vocab_size_, [&](simd::f32 v, int64_t i) {
      if ((0xFFFF & ~simd::bits(simd::less(v, simd::set1(bound)))) == 0) return;
      float lanes[simd::LANES];
      simd::store(lanes, v);
      for (int64_t lane = 0; lane < std::min<int64_t>(simd::LANES, vocab_size_ - i); ++lane) {
        survivors_[count] = lanes[lane];
        ids_[count] = static_cast<int32_t>(i + lane);
        count += lanes[lane] >= bound;
      }
    });
    num_survivors_ = count;
  }

  template <class Keeps>
  void keep_if(const Keeps& keeps) {
    int64_t count = 0;
    for (int64_t i = 0; i < num_survivors_; ++i) {
      const float logit = survivors_[i];
      survivors_[count] = logit;
      ids_[count] = ids_[i];
      count += keeps(logit);
    }
    num_survivors_ = count;
  }

  // All survivors above the limit and the first `num_equal`, one or more, of those at it.
  void keep_above(float limit, int64_t num_equal) {
    float least = limit;
    keep_if([&](float logit) {
      const bool keeps = logit >= least;
      if (logit == limit && --num_equal == 0) least = std::nextafter(limit, INFINITY);
      return keeps;
    });
  }

  void keep_largest(int64_t count) {
    if (num_survivors_ <= count) return;
    const float limit = kth_largest(survivors(), num_survivors_, count, largest_);
    int64_t num_above = 0;
    for (int64_t i = 0; i < num_survivors_; ++i) num_above += survivors_[i] > limit;
    keep_above(limit, count - num_above);
  }

  // The fewest of the largest survivors that weigh `mass` together; all of them if they do not.
  void keep_mass(double mass) {
    for_vectors(survivors(), num_survivors_,
                [&](simd::f32 v, int64_t i) { simd::store(weights_.data() + i, weight(v)); });
    const auto mass_from = [&](float limit) {
      simd::f64 sum = simd::zero_f64();
      for_vectors(survivors(), num_survivors_, [&](simd::f32 v, int64_t i) {
        const simd::mask is_below = simd::less(v, simd::set1(limit));
        sum = simd::add(sum, simd::select(is_below, simd::zero(), simd::load(weights_.data() + i)));
      });
      return simd::sum(sum);
    };
    const float limit = last_reaching(largest_, [&](float logit) { return mass_from(logit) >= mass; });
    if (limit == -INFINITY) return;
    const int64_t at = std::find(survivors_.begin(), survivors_.begin() + num_survivors_, limit) - survivors_.begin();
    const double missing = mass - mass_from(std::nextafter(limit, INFINITY));
    keep_above(limit, static_cast<int64_t>(std::ceil(missing / weights_[at])));
  }

  int64_t vocab_size_ = 0;
  std::vector<float> maxima_;        // of each lane in each block
  std::vector<double> cumulative_;   // of each block
  std::vector<float> survivors_;     // logits
  std::vector<float> weights_;       // of survivors
  std::vector<int32_t> ids_;         // of survivors
  int64_t num_survivors_ = 0;
  float largest_ = 0.0f;
  double temperature_ = 1.0;
};

inline void sample_rows(SampleRow* rows, int64_t begin, int64_t end, int64_t vocab_size) {
  RowSampler& sampler = RowSampler::of_this_thread(vocab_size);
  for (int64_t i = begin; i < end; ++i) sampler.sample(rows[i]);
}

inline void logprobs_of_rows(LogprobsRow* rows, int64_t begin, int64_t end, int64_t vocab_size) {
  RowSampler& sampler = RowSampler::of_this_thread(vocab_size);
  for (int64_t i = begin; i < end; ++i) sampler.logprobs(rows[i]);
}

}  // namespace kitfox
