// Paged attention, and the writing of the cache that it reads.
//
// Work is done in tiles: the rows of a tile are the query heads that share a KV head, of one or several tokens of one
// request, and its keys are KEY_TILE neighbours. A row's arithmetic does not depend on what else is in its tile, on
// how rows are shared out among tiles, or on which thread does what:
// - key tiles start at multiples of their length, whatever the row's position;
// - a key tile is computed from nothing (maximum, sum and weighted values), and its result is merged into that of the
//   tiles before it, also where one thread does all of them;
// - a score that a row must not see is -inf and weighs 0, and a maximum is a finite number, so that a key tile in which
//   a row sees nothing leaves the row as it was.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops.h"
#include "program.h"
#include "simd.h"

namespace kitfox {

// Keys that share one step of the running softmax: the smallest piece in which a long request can be shared out.
constexpr int KEY_TILE = 128;
constexpr int KEY_GROUPS = KEY_TILE / LANES;
// Up to this many rows read keys and values straight from the cache; more expand them to float once, for all rows.
constexpr int DIRECT_ROWS = 4 * simd::FLOAT_ROWS;
// Rows that pass over keys and values in the first cache level together.
constexpr int64_t BLOCK_ROWS = 48 / simd::FLOAT_ROWS * simd::FLOAT_ROWS;
// The reading of keys and values costs about as much as so many rows' arithmetic.
constexpr int64_t READING_ROWS = 8;
// Rows that a task computes, and about how many numbers (rows by head size) neighbouring tasks compute together.
constexpr int64_t TASK_ROWS = 48;
constexpr int64_t JOINT_NUMBERS = 384 * 64;
constexpr int64_t LARGEST_HEAD = 256;
// From a row of queries to the next: a constant, so that the rows of a strip are addressed by one register, and not a
// multiple of a page's part, so that they do not compete for a place in the first cache level.
constexpr int64_t QUERY_STRIDE = LARGEST_HEAD + LANES;
constexpr float LOWEST_SCORE = -1e30f;
// Fixed point (CacheFormat::kFixed16): the largest code of a query, key or value, and log2 of that of a weight. Sums of
// 256 elements of a head, or of a tile's 128 keys, stay below 2^31.
constexpr int LARGEST_CODE_LOG2 = 11;
constexpr int LARGEST_WEIGHT_LOG2 = 12;
// No scale is less, so that a value of zeros does not take its weight out of reach of the others'.
constexpr int LEAST_SCALE_LOG2 = -40;

// How many vectors of keys or values meet this many rows at a time: a power of two that leaves registers for expanding.
constexpr int direct_vectors(int rows) {
  int count = 8;
  while (count > 2 && count * rows > simd::FLOAT_ROWS * 4 / 3) count /= 2;
  return count;
}

// Strips are as long as they can be (Attention::with_strips): one of so few rows is alone.
constexpr bool may_have_neighbours(int rows) { return rows > simd::FLOAT_ROWS / 2; }

// Uninitialised floats that begin at a cache line.
class FloatBuffer {
 public:
  void reserve(int64_t size) {
    if (size <= size_) return;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(size * sizeof(float), 64))));
    size_ = size;
  }
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

// The result of a key tile, or of several, for a tile's rows, not yet divided by the sums. Where the cache is in 16 bit,
// each 32 columns of `weighted` are the even ones followed by the odd ones, as they come out of a load.
struct RowStates {
  float* highest;   // [padded rows]
  float* sums;      // [padded rows, LANES]: of a lane's keys
  float* weighted;  // [padded rows, D]

  // In strips of up to FLOAT_ROWS, and vectors.
  static int64_t padded(int64_t rows) { return round_up(round_up(rows, simd::FLOAT_ROWS), LANES); }
  static int64_t size(int64_t rows, int64_t head_dim) { return padded(rows) * (1 + LANES + head_dim); }

  RowStates() = default;
  RowStates(float* memory, int64_t rows)
      : highest(memory),
        sums(memory + padded(rows)),
        weighted(memory + (1 + LANES) * padded(rows)) {}
  RowStates from(int64_t row, int64_t head_dim) const {
    RowStates rest = *this;
    rest.highest += row;
    rest.sums += row * LANES;
    rest.weighted += row * head_dim;
    return rest;
  }
};

// Which rows of a tile of a step attend to which keys, and how that is divided into tasks: the same for every layer.
class AttentionPlan {
 public:
  // Some consecutive tokens of one request and one KV head, and the key tiles they attend to.
  struct Item {
    int32_t request;
    int32_t kv_head;
    int64_t row;       // of the first token, counted from the tile's first row
    int64_t position;  // of the first token
    int32_t tokens;
    int32_t first_tile;
    int32_t end_tile;
    int32_t split;  // index of the Split that this item is a piece of, or -1

    bool is_followed_by(const Item& next) const {
      return split < 0 && next.split < 0 && request == next.request && kv_head == next.kv_head &&
             row + tokens == next.row;
    }
  };

  // Items that differ in their key tiles only; who computes the last of them merges all.
  struct Split {
    int32_t pieces;
    int64_t partials;  // offset of the first tile's RowStates
  };

  void build(const Step& step, int64_t first_row, int64_t rows, const AttentionArgs& args, int threads) {
    num_kv_heads_ = args.cache.num_kv_heads;
    head_dim_ = args.cache.head_dim;
    group_ = args.num_heads / num_kv_heads_;
    const int64_t joint_rows = std::max(JOINT_NUMBERS / std::max<int64_t>(head_dim_, 64), tokens_a_task() * group_);
    scratch_rows_ = round_up(joint_rows, simd::FLOAT_ROWS);
    scratch_.resize(threads);
    for (auto& scratch : scratch_) scratch.reserve(scratch_size());

    const int64_t total = find_spans(step, first_row, rows);
    items_.clear();
    splits_.clear();
    partials_size_ = 0;
    // Many more tasks than threads, so that all finish together; long items are cut only if they alone are too long.
    const int64_t longest_item = total / (4 * threads), task_cost = total / (16 * threads);
    for (const Span& span : spans_) add_items(span, longest_item);
    partials_.reserve(partials_size_);
    if (splits_.size() > pending_.size()) pending_ = std::vector<std::atomic<int32_t>>(splits_.size());
    for (size_t i = 0; i < splits_.size(); ++i) pending_[i].store(splits_[i].pieces, std::memory_order_relaxed);

    first_items_.clear();
    int64_t sum = task_cost;
    for (size_t i = 0; i < items_.size(); ++i) {
      sum += cost(items_[i]);
      if (first_items_.empty() || sum > task_cost) {
        first_items_.push_back(static_cast<int32_t>(i));
        sum = cost(items_[i]);
      }
    }
    num_tasks_ = static_cast<int64_t>(first_items_.size());
    first_items_.push_back(static_cast<int32_t>(items_.size()));
  }

  int64_t num_tasks() const { return num_tasks_; }
  // The items of tasks [begin, end).
  const Item* begin_of(int64_t task) const { return items_.data() + first_items_[task]; }
  const Item* end() const { return items_.data() + items_.size(); }

  int64_t group() const { return group_; }
  int64_t scratch_rows() const { return scratch_rows_; }
  float* scratch(int thread) const { return scratch_[thread].data(); }
  int64_t scratch_size() const {
    return 2 * KEY_TILE * head_dim_ + scratch_rows_ * (QUERY_STRIDE + 2) + (BLOCK_ROWS + 1) * KEY_TILE +
           RowStates::size(scratch_rows_, head_dim_);
  }

  const Split& split(const Item& item) const { return splits_[item.split]; }
  RowStates partial(const Item& item, int64_t tile) const {
    const int64_t rows = item.tokens * group_;
    return RowStates(partials_.data() + splits_[item.split].partials + tile * RowStates::size(rows, head_dim_), rows);
  }
  // Whether all other pieces are done. Then counts them anew, for the next layer.
  bool finish_piece(const Item& item) {
    std::atomic<int32_t>& pending = pending_[item.split];
    if (pending.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    pending.store(splits_[item.split].pieces, std::memory_order_relaxed);
    return true;
  }

 private:
  // The rows of one request that lie in the tile.
  struct Span {
    int32_t request;
    int64_t row;
    int64_t position;
    int64_t tokens;
  };

  int64_t tokens_a_task() const { return std::max<int64_t>(1, TASK_ROWS / group_); }

  int64_t cost(int64_t tokens, int64_t keys) const { return (tokens * group_ + READING_ROWS) * keys; }
  int64_t cost(const Item& item) const {
    const int64_t last = std::min<int64_t>(item.position + item.tokens, item.end_tile * KEY_TILE);
    return cost(item.tokens, last - item.first_tile * KEY_TILE);
  }

  // Returns the cost of all.
  int64_t find_spans(const Step& step, int64_t first_row, int64_t rows) {
    spans_.clear();
    int64_t total = 0;
    const int32_t* starts = step.query_start_loc;
    int64_t request = std::upper_bound(starts, starts + step.num_requests, first_row) - starts - 1;
    for (; request < step.num_requests && starts[request] < first_row + rows; ++request) {
      const int64_t begin = std::max<int64_t>(starts[request], first_row);
      const int64_t end = std::min<int64_t>(starts[request + 1], first_row + rows);
      if (begin >= end) continue;
      const int64_t position = step.seq_lens[request] - (starts[request + 1] - begin);
      spans_.push_back({static_cast<int32_t>(request), begin - first_row, position, end - begin});
      const int64_t tasks = (end - begin + tokens_a_task() - 1) / tokens_a_task();
      total += num_kv_heads_ * cost(end - begin + (tasks - 1) * READING_ROWS / group_, position + (end - begin));
    }
    return total;
  }

  void add_items(const Span& span, int64_t longest_item) {
    for (int32_t head = 0; head < num_kv_heads_; ++head) {
      for (int64_t token = 0; token < span.tokens; token += tokens_a_task()) {
        Item item{span.request, head, span.row + token, span.position + token, 0, 0, 0, -1};
        item.tokens = static_cast<int32_t>(std::min(tokens_a_task(), span.tokens - token));
        const int64_t keys = item.position + item.tokens;
        const auto tiles = static_cast<int32_t>((keys + KEY_TILE - 1) / KEY_TILE);
        const auto piece = static_cast<int32_t>(std::max<int64_t>(1, longest_item / cost(item.tokens, KEY_TILE)));
        if (tiles <= piece) {
          item.end_tile = tiles;
          items_.push_back(item);
          continue;
        }
        item.split = static_cast<int32_t>(splits_.size());
        splits_.push_back({(tiles + piece - 1) / piece, partials_size_});
        partials_size_ += tiles * RowStates::size(item.tokens * group_, head_dim_);
        for (item.first_tile = 0; item.first_tile < tiles; item.first_tile = item.end_tile) {
          item.end_tile = std::min(tiles, item.first_tile + piece);
          items_.push_back(item);
        }
      }
    }
  }

  int64_t num_kv_heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t group_ = 0;
  int64_t scratch_rows_ = 0;
  int64_t num_tasks_ = 0;
  std::vector<Span> spans_;
  std::vector<Item> items_;
  std::vector<int32_t> first_items_;  // [num_tasks + 1]
  std::vector<Split> splits_;
  std::vector<std::atomic<int32_t>> pending_;
  int64_t partials_size_ = 0;
  FloatBuffer partials_;
  std::vector<FloatBuffer> scratch_;
};

template <class T>
constexpr bool is_fixed = std::is_same_v<T, int16_t>;

// Calls visit(T()) for the type of a cache's elements: float, uint16_t for bfloat16, or int16_t for fixed point.
template <class Visit>
KF_INLINE void with_elements(const KvCache& cache, const Visit& visit) {
  switch (static_cast<CacheFormat>(cache.format)) {
    case CacheFormat::kFloat32: return visit(float());
    case CacheFormat::kBfloat16: return visit(uint16_t());
    case CacheFormat::kFixed16: return visit(int16_t());
  }
}
inline int64_t element_bytes(const KvCache& cache) {
  return cache.format == static_cast<int32_t>(CacheFormat::kFloat32) ? 4 : 2;
}
// Of the keys, or the values, of a block and head.
inline int64_t half_block_bytes(const KvCache& cache) {
  const int64_t scale_bytes = cache.format == static_cast<int32_t>(CacheFormat::kFixed16) ? sizeof(float) : 0;
  return cache.block_size * (cache.head_dim * element_bytes(cache) + scale_bytes);
}

// Calls body(0), ..., body(N - 1) with compile-time constants: GCC keeps an array in registers only where no index is
// left when it looks, which is before it unrolls loops.
#define KF_LAMBDA __attribute__((always_inline))
template <int... I, class Body>
KF_INLINE void repeat_each(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
KF_INLINE void repeat(const Body& body) {
  repeat_each(std::make_integer_sequence<int, N>(), body);
}

// Where the keys and values of a key tile are, 16 positions at a time. T is uint16_t for bfloat16, int16_t for fixed
// point, or float. Keys: elements 2p and 2p + 1 of 16 keys begin at keys[g] + p * key_stride, interleaved in 16 bit, half
// of a stride apart in float. Values: those of a group's i-th position begin at values[g] + i * value_stride, or in fixed
// point, where two positions are interleaved, those of its i-th pair.
template <class T>
struct KeyTile {
  const T* keys[KEY_GROUPS];
  const T* values[KEY_GROUPS];
  const float* key_scales[KEY_GROUPS];      // in fixed point
  const float* value_scales_log[KEY_GROUPS];
  int64_t key_stride;
  int64_t value_stride;
  int first;  // the keys that are there are [first, last) of the tile's
  int last;
};

template <int COUNT, class T>
KF_INLINE void prefetch(const T* p) {
  repeat<COUNT * sizeof(T) / 64>([&](auto i) KF_LAMBDA { __builtin_prefetch(p + i * 64 / sizeof(T), 0, 2); });
}
// A pair of elements of 16 keys.
KF_INLINE void prefetch_key_pair(const float* p, int64_t stride) {
  __builtin_prefetch(p, 0, 2);
  __builtin_prefetch(p + stride / 2, 0, 2);
}
template <class T>
KF_INLINE void prefetch_key_pair(const T* p, int64_t) {
  __builtin_prefetch(p, 0, 2);
}

KF_INLINE void load_key_pair(const float* p, int64_t stride, simd::f32& even, simd::f32& odd) {
  even = simd::load(p);
  odd = simd::load(p + stride / 2);
}
KF_INLINE void load_key_pair(const uint16_t* p, int64_t, simd::f32& even, simd::f32& odd) {
  simd::load_bf16_pairs(p, even, odd);
}
template <int V>
KF_INLINE void load_values(const float* p, simd::f32 (&v)[V]) {
  repeat<V>([&](auto i) KF_LAMBDA { v[i] = simd::load(p + i * LANES); });
}
template <int V>
KF_INLINE void load_values(const uint16_t* p, simd::f32 (&v)[V]) {
  if constexpr (V == 1) {
    v[0] = simd::load_bf16(p);
  } else {
    repeat<V / 2>([&](auto i) KF_LAMBDA { simd::load_bf16_pairs(p + 2 * i * LANES, v[2 * i], v[2 * i + 1]); });
  }
}

// acc[r][v] += x[r * x_stride] * y[v].
template <int R, int V>
KF_INLINE void multiply_add(simd::f32 (&acc)[R][V], const float* x, int64_t x_stride, const simd::f32 (&y)[V]) {
  repeat<R>([&](auto r) KF_LAMBDA {
    const simd::f32 factor = simd::set1(x[r * x_stride]);
    repeat<V>([&](auto v) KF_LAMBDA { simd::accumulate(acc[r][v], factor, y[v]); });
  });
}

// scores[r][16 g + lane] for V groups from g on. Can ask for the values of these keys.
template <int R, int V, bool PREFETCH, class T>
KF_INLINE void score(const float* q, const KeyTile<T>& tile, int g, int64_t head_dim, float* scores) {
  simd::f32 acc[R][V];
  const T* keys[V];
  repeat<V>([&](auto v) KF_LAMBDA {
    keys[v] = tile.keys[g + v];
    repeat<R>([&](auto r) KF_LAMBDA { acc[r][v] = simd::zero(); });
  });
  const int64_t stride = tile.key_stride;
  for (int64_t d = 0; d < head_dim; d += 2) {
    simd::f32 even[V], odd[V];
    repeat<V>([&](auto v) KF_LAMBDA {
      load_key_pair(keys[v], stride, even[v], odd[v]);
      keys[v] += stride;
      if constexpr (PREFETCH) prefetch<2 * LANES>(tile.values[g + v] + d * LANES);
    });
    multiply_add(acc, q + d, QUERY_STRIDE, even);
    multiply_add(acc, q + d + 1, QUERY_STRIDE, odd);
  }
  repeat<R>([&](auto r) KF_LAMBDA {
    repeat<V>([&](auto v) KF_LAMBDA { simd::store(scores + r * KEY_TILE + (g + v) * LANES, acc[r][v]); });
  });
}

// In fixed point: sums of products of codes times the keys' scales, but for the scale of the row's query.
template <int R, int V, bool PREFETCH>
KF_INLINE void score(const float* q, const KeyTile<int16_t>& tile, int g, int64_t head_dim, float* scores) {
  simd::i32 acc[R][V];
  const int16_t* keys[V];
  repeat<V>([&](auto v) KF_LAMBDA {
    keys[v] = tile.keys[g + v];
    repeat<R>([&](auto r) KF_LAMBDA { acc[r][v] = simd::set1_i32(0); });
  });
  const int64_t stride = tile.key_stride;
  const auto* codes = reinterpret_cast<const int16_t*>(q);
  for (int64_t d = 0; d < head_dim; d += 2) {
    simd::i16x32 pairs[V];
    repeat<V>([&](auto v) KF_LAMBDA {
      pairs[v] = simd::load_i16(keys[v]);
      keys[v] += stride;
      if constexpr (PREFETCH) prefetch<2 * LANES>(tile.values[g + v] + d * LANES);
    });
    repeat<R>([&](auto r) KF_LAMBDA {
      const simd::i32 factors = simd::broadcast_bytes(codes + d + r * 2 * QUERY_STRIDE);
      repeat<V>([&](auto v) KF_LAMBDA { simd::dot2(acc[r][v], pairs[v], factors); });
    });
  }
  repeat<V>([&](auto v) KF_LAMBDA {
    const simd::f32 scale = simd::load(tile.key_scales[g + v]);
    repeat<R>([&](auto r) KF_LAMBDA {
      simd::store(scores + r * KEY_TILE + (g + v) * LANES, simd::mul(simd::to_f32(acc[r][v]), scale));
    });
  });
}

// How a key tile's result goes into that of the tiles before it: old * kept + new * taken, for each row.
struct Shares {
  float kept[LANES];
  float taken[LANES];
};

// Sums for V * 16 columns, merged with what is there if there are shares.
template <int R, int V>
KF_INLINE void store_weighted(simd::f32 (&acc)[R][V], const Shares* shares, float* weighted, int64_t head_dim) {
  repeat<R>([&](auto r) KF_LAMBDA {
    float* out = weighted + r * head_dim;
    if (shares) {
      const simd::f32 kept = simd::set1(shares->kept[r]), taken = simd::set1(shares->taken[r]);
      repeat<V>([&](auto v) KF_LAMBDA {
        acc[r][v] = simd::fma(acc[r][v], taken, simd::mul(simd::load(out + v * LANES), kept));
      });
    }
    repeat<V>([&](auto v) KF_LAMBDA { simd::store(out + v * LANES, acc[r][v]); });
  });
}

// weighted[r] = sum over keys [begin, end) of weights[r][key] * value. Can ask for the keys of the next tile.
template <int R, int V, bool PREFETCH, class T>
KF_INLINE void weigh(const float* weights, const KeyTile<T>& tile, const KeyTile<T>& next, int begin, int end,
                     int64_t column, const Shares* shares, float* weighted, int64_t head_dim) {
  simd::f32 acc[R][V];
  repeat<R>([&](auto r) KF_LAMBDA { repeat<V>([&](auto v) KF_LAMBDA { acc[r][v] = simd::zero(); }); });
  const int64_t stride = tile.value_stride;
  for (int key = begin; key < end;) {
    const T* values = tile.values[key / LANES] + key % LANES * stride + column;
    const T* coming = next.keys[key / LANES] + (key % LANES * head_dim + column) / (2 * LANES) * next.key_stride;
    const int64_t coming_stride = head_dim / (2 * LANES) * next.key_stride;
    for (const int stop = std::min(end, (key / LANES + 1) * LANES); key < stop; ++key, values += stride) {
      simd::f32 value[V];
      load_values(values, value);
      if constexpr (PREFETCH && V > 1) {
        repeat<V / 2>([&](auto i) KF_LAMBDA { prefetch_key_pair(coming + i * next.key_stride, next.key_stride); });
        coming += coming_stride;
      }
      multiply_add(acc, weights + key, KEY_TILE, value);
    }
  }
  store_weighted<R, V>(acc, shares, weighted + column, head_dim);
}

// In fixed point: sums of products of codes, since scales are in the weights. A weight that is not there is 0.
template <int R, int V, bool PREFETCH>
KF_INLINE void weigh(const float* weights, const KeyTile<int16_t>& tile, const KeyTile<int16_t>& next, int begin,
                     int end, int64_t column, const Shares* shares, float* weighted, int64_t head_dim) {
  simd::i32 acc[R][V];
  repeat<R>([&](auto r) KF_LAMBDA { repeat<V>([&](auto v) KF_LAMBDA { acc[r][v] = simd::set1_i32(0); }); });
  const auto* codes = reinterpret_cast<const int16_t*>(weights);
  for (int key = begin / 2 * 2; key < end;) {
    const int pair = key % LANES / 2;
    const int16_t* values = tile.values[key / LANES] + pair * tile.value_stride + 2 * column;
    const int16_t* coming = next.keys[key / LANES] + (pair * head_dim + column) / LANES * next.key_stride;
    const int64_t coming_stride = head_dim / LANES * next.key_stride;
    for (const int stop = std::min(end, (key / LANES + 1) * LANES); key < stop; key += 2) {
      simd::i16x32 pairs[V];
      repeat<V>([&](auto v) KF_LAMBDA {
        pairs[v] = simd::load_i16(values + v * 2 * LANES);
        if constexpr (PREFETCH) prefetch_key_pair(coming + v * next.key_stride, next.key_stride);
      });
      values += tile.value_stride;
      coming += coming_stride;
      repeat<R>([&](auto r) KF_LAMBDA {
        const simd::i32 factors = simd::broadcast_bytes(codes + key + r * 2 * KEY_TILE);
        repeat<V>([&](auto v) KF_LAMBDA { simd::dot2(acc[r][v], pairs[v], factors); });
      });
    }
  }
  simd::f32 sums[R][V];
  repeat<R>([&](auto r) KF_LAMBDA { repeat<V>([&](auto v) KF_LAMBDA { sums[r][v] = simd::to_f32(acc[r][v]); }); });
  store_weighted<R, V>(sums, shares, weighted + column, head_dim);
}

// Codes of a head's numbers, and the power of two that is their scale: NaN where one of them is not finite.
inline float to_fixed_point(const float* x, int64_t head_dim, int16_t* codes) {
  simd::f32 top = simd::zero(), zeros_or_nan = simd::zero();
  for (int64_t d = 0; d < head_dim; d += LANES) {
    const simd::f32 numbers = simd::load(x + d);
    top = simd::max(top, simd::abs(numbers));
    zeros_or_nan = simd::add(zeros_or_nan, simd::sub(numbers, numbers));
  }
  if (simd::any(simd::is_nan(zeros_or_nan))) return NAN;
  int exponent;
  std::frexp(simd::largest(top), &exponent);
  const int scale_log2 = std::max(exponent - LARGEST_CODE_LOG2, LEAST_SCALE_LOG2);
  const simd::f32 inverse = simd::set1(std::ldexp(1.0f, -scale_log2));
  for (int64_t d = 0; d < head_dim; d += LANES) simd::store_i16(codes + d, simd::mul(simd::load(x + d), inverse));
  return std::ldexp(1.0f, scale_log2);
}

class Attention {
 public:
  Attention(const AttentionArgs& args, const Step& step, AttentionPlan& plan)
      : args_(args), step_(step), plan_(plan), group_(plan.group()), head_dim_(args.cache.head_dim) {}

  int64_t num_tasks() const { return plan_.num_tasks(); }

  void run(int64_t begin, int64_t end, int thread) const {
    const AttentionPlan::Item *item = plan_.begin_of(begin), *last = plan_.begin_of(end);
    with_elements(args_.cache, [&](auto element) { run_items<decltype(element)>(item, last, thread); });
  }

 private:
  // A thread's memory. A strip is as many rows as are computed side by side; a block is some strips.
  struct Scratch {
    float* keys;         // of a pair of groups after the other [KEY_GROUPS / 2][D][32]
    float* values;       // [KEY_TILE][D]
    float* queries;      // [rows][QUERY_STRIDE], D of it used
    float* scores;       // of a block [rows][KEY_TILE]
    int32_t* positions;  // [rows]
    // In fixed point, where the codes of queries and weights take half of the memory that is theirs.
    float* query_scales;          // [rows]
    float* value_scales_inverse;  // [KEY_TILE]
    RowStates states;             // of all tiles so far

    Scratch(float* memory, int64_t rows, int64_t head_dim)
        : keys(memory),
          values(keys + KEY_TILE * head_dim),
          queries(values + KEY_TILE * head_dim),
          scores(queries + rows * QUERY_STRIDE),
          positions(reinterpret_cast<int32_t*>(scores + BLOCK_ROWS * KEY_TILE)),
          query_scales(scores + BLOCK_ROWS * KEY_TILE + rows),
          value_scales_inverse(query_scales + rows),
          states(value_scales_inverse + KEY_TILE, rows) {}
  };

  // A strip that attends to keys [begin, end) of a key tile.
  struct Strip {
    int64_t row;
    int begin;
    int end;
    bool merges;      // there are tiles before this one in its states
    RowStates states;
    float* scores;  // [R][KEY_TILE]
    Shares shares;
  };

  template <class T>
  void run_items(const AttentionPlan::Item* item, const AttentionPlan::Item* end, int thread) const {
    const Scratch scratch(plan_.scratch(thread), plan_.scratch_rows(), head_dim_);
    while (item < end) {
      // Neighbours expand a key tile once for all.
      AttentionPlan::Item joint = *item;
      for (++item; item < end && joint.is_followed_by(*item); ++item) {
        if ((joint.tokens + item->tokens) * group_ > plan_.scratch_rows()) break;
        joint.tokens += item->tokens;
        joint.end_tile = item->end_tile;
      }
      with_strips<T, simd::FLOAT_ROWS>(joint, scratch);
    }
  }

  // As few strips as there can be, of R rows each or of fewer, so that the last is not left with a row or two.
  template <class T, int R>
  void with_strips(const AttentionPlan::Item& item, const Scratch& scratch) const {
    const int64_t rows = item.tokens * group_, strips = (rows + simd::FLOAT_ROWS - 1) / simd::FLOAT_ROWS;
    if constexpr (R > 1) {
      if ((rows + strips - 1) / strips < R) return with_strips<T, R - 1>(item, scratch);
    }
    if constexpr (may_have_neighbours(R)) {
      if (rows > DIRECT_ROWS) return attend<T, R, true>(item, scratch);
    }
    attend<T, R, false>(item, scratch);
  }

  // In strips of R rows, in blocks of strips or all at once.
  template <class T, int R, bool BLOCKS>
  void attend(const AttentionPlan::Item& item, const Scratch& scratch) const {
    const int64_t rows = item.tokens * group_;
    load_queries<T, R>(item, rows, scratch);
    const int64_t first_key = first_key_of(scratch, 0), end_key = item.position + item.tokens;
    const int64_t first_tile = std::max<int64_t>(item.first_tile, first_key / KEY_TILE);
    KeyTile<T> next;
    if (first_tile < item.end_tile) next = locate<T>(item, first_tile * KEY_TILE, first_key, end_key);
    for (int64_t index = first_tile; index < item.end_tile; ++index) {
      const int64_t start = index * KEY_TILE;
      const KeyTile<T> tile = next;
      if (index + 1 < item.end_tile) next = locate<T>(item, start + KEY_TILE, first_key, end_key);
      const RowStates states = item.split < 0 ? scratch.states : plan_.partial(item, index);
      if constexpr (is_fixed<T>) invert_scales(tile, scratch);
      [[maybe_unused]] constexpr int64_t BLOCK = BLOCK_ROWS / R * R;
      if constexpr (BLOCKS && is_fixed<T>) {
        attend_block<R, 2, true>(item, tile, next, start, 0, std::min(rows, BLOCK), states, scratch);
        for (int64_t row = BLOCK; row < rows; row += BLOCK) {
          attend_block<R, 2, false>(item, tile, next, start, row, std::min(rows, row + BLOCK), states, scratch);
        }
      } else if constexpr (BLOCKS) {
        const KeyTile<float> expanded = expand(tile, scratch);
        for (int64_t row = 0; row < rows; row += BLOCK) {
          attend_block<R, 2, false>(item, expanded, expanded, start, row, std::min(rows, row + BLOCK), states, scratch);
        }
      } else {
        attend_block<R, direct_vectors(R), true>(item, tile, next, start, 0, rows, states, scratch);
      }
    }
    if (item.split >= 0) {
      if (!plan_.finish_piece(item)) return;
      for (int64_t row = 0; row < rows; row += R) {
        const int64_t first = first_key_of(scratch, row) / KEY_TILE, last = scratch.positions[row + R - 1] / KEY_TILE;
        reset<R>(scratch.states, row);
        for (int64_t index = first; index <= last; ++index) merge<R>(plan_.partial(item, index), row, scratch.states);
      }
    }
    write<T>(item, rows, scratch.states);
  }

  int64_t first_key_of(const Scratch& scratch, int64_t row) const {
    return args_.window ? std::max<int64_t>(0, scratch.positions[row] + 1 - args_.window) : 0;
  }

  template <class T, int R>
  void load_queries(const AttentionPlan::Item& item, int64_t rows, const Scratch& scratch) const {
    // Scores are in units of log2, for exp2, or of the soft cap.
    const auto factor = static_cast<float>(args_.softcap != 0 ? args_.scale / args_.softcap : args_.scale * LOG2_E);
    for (int64_t row = 0; row < round_up(rows, R); ++row) {
      // Rows that fill the last strip repeat the last row.
      const int64_t source = std::min(row, rows - 1);
      scratch.positions[row] = static_cast<int32_t>(item.position + source / group_);
      const float* q = args_.q + head_of(item, source) * head_dim_;
      float* out = scratch.queries + row * QUERY_STRIDE;
      for (int64_t d = 0; d < head_dim_; d += LANES) {
        simd::store(out + d, simd::mul(simd::load(q + d), simd::set1(factor)));
      }
      if constexpr (is_fixed<T>) {
        scratch.query_scales[row] = to_fixed_point(out, head_dim_, reinterpret_cast<int16_t*>(out));
      }
    }
  }

  // What a weight is multiplied by to become that of the value's numbers instead of its codes. Always finite: it meets
  // weights of 0 where keys are not there yet.
  void invert_scales(const KeyTile<int16_t>& tile, const Scratch& scratch) const {
    for (int g = 0; g < KEY_GROUPS; ++g) {
      simd::f32 exponent = simd::sub(simd::zero(), simd::load(tile.value_scales_log[g]));
      exponent = simd::max(simd::min(exponent, simd::set1(100.0f)), simd::set1(-100.0f));
      simd::store(scratch.value_scales_inverse + g * LANES, simd::scale_by_power_of_two(simd::set1(1.0f), exponent));
    }
  }

  // The index of a row's query head among those of all rows of the step's tile.
  int64_t head_of(const AttentionPlan::Item& item, int64_t row) const {
    return (item.row + row / group_) * args_.num_heads + item.kv_head * group_ + row % group_;
  }

  // Finds the positions of [first_key, end_key) that are in the tile from `start` on. Groups without any of them get
  // the address of a neighbour, which may be read in their stead.
  template <class T>
  KeyTile<T> locate(const AttentionPlan::Item& item, int64_t start, int64_t first_key, int64_t end_key) const {
    KeyTile<T> tile;
    tile.first = static_cast<int>(std::max<int64_t>(0, first_key - start));
    tile.last = static_cast<int>(std::min<int64_t>(KEY_TILE, end_key - start));
    const KvCache& cache = args_.cache;
    const int64_t size = cache.block_size, half = half_block_bytes(cache) / sizeof(T);
    constexpr int64_t KEY_STEP = sizeof(T) == 2 ? 2 : 1;
    const int32_t* table = step_.block_table + item.request * step_.block_table_stride;
    const int first_group = tile.first / LANES, last_group = (tile.last - 1) / LANES;
    int64_t index = (start + first_group * LANES) / size, offset = (start + first_group * LANES) % size;
    for (int g = first_group; g <= last_group; ++g) {
      const int64_t pair = table[index] * cache.num_kv_heads + item.kv_head;
      const T* block = static_cast<const T*>(cache.data) + pair * 2 * half;
      tile.keys[g] = block + offset * KEY_STEP;
      tile.values[g] = block + half + offset * head_dim_;
      if constexpr (is_fixed<T>) {
        tile.key_scales[g] = reinterpret_cast<const float*>(block + size * head_dim_) + offset;
        tile.value_scales_log[g] = reinterpret_cast<const float*>(block + half + size * head_dim_) + offset;
      }
      offset += LANES;
      if (offset == size) {
        offset = 0;
        ++index;
      }
    }
    for (int g = 0; g < KEY_GROUPS; ++g) {
      const int known = std::min(std::max(g, first_group), last_group);
      tile.keys[g] = tile.keys[known];
      tile.values[g] = tile.values[known];
      if constexpr (is_fixed<T>) {
        tile.key_scales[g] = tile.key_scales[known];
        tile.value_scales_log[g] = tile.value_scales_log[known];
      }
    }
    tile.key_stride = 2 * size;
    tile.value_stride = is_fixed<T> ? 2 * head_dim_ : head_dim_;
    return tile;
  }

  // Copies a tile to the thread's memory as floats; values keep the order in which load_values brings their columns.
  template <class T>
  KeyTile<float> expand(const KeyTile<T>& tile, const Scratch& scratch) const {
    KeyTile<float> expanded;
    expanded.first = tile.first;
    expanded.last = tile.last;
    expanded.key_stride = 4 * LANES;
    expanded.value_stride = head_dim_;
    for (int g = 0; g < KEY_GROUPS; ++g) {
      expanded.keys[g] = scratch.keys + (g / 2 * head_dim_ * 2 + g % 2) * LANES;
      expanded.values[g] = scratch.values + g * LANES * head_dim_;
    }
    for (int g = tile.first / LANES; g <= (tile.last - 1) / LANES; ++g) {
      const T* keys = tile.keys[g];
      float* to = scratch.keys + (g / 2 * head_dim_ * 2 + g % 2) * LANES;
      for (int64_t d = 0; d < head_dim_; d += 2, keys += tile.key_stride, to += 4 * LANES) {
        simd::f32 even, odd;
        load_key_pair(keys, tile.key_stride, even, odd);
        simd::store(to, even);
        simd::store(to + 2 * LANES, odd);
      }
    }
    for (int key = tile.first; key < tile.last; ++key) {
      const T* values = tile.values[key / LANES] + key % LANES * head_dim_;
      float* to = scratch.values + key * head_dim_;
      int64_t d = 0;
      for (; d + 2 * LANES <= head_dim_; d += 2 * LANES) {
        simd::f32 v[2];
        load_values(values + d, v);
        simd::store(to + d, v[0]);
        simd::store(to + d + LANES, v[1]);
      }
      if (d < head_dim_) {
        simd::f32 v[1];
        load_values(values + d, v);
        simd::store(to + d, v[0]);
      }
    }
    return expanded;
  }

  // Lets rows [row, end_row) attend to the key tile that begins at position `start`. Loops so that what several strips
  // need is in the first cache level when they come: V groups of keys, then V vectors of every value. What comes next
  // from the cache is asked for by the first strip.
  template <int R, int V, bool FROM_CACHE, class T>
  void attend_block(const AttentionPlan::Item& item, const KeyTile<T>& tile, const KeyTile<T>& next, int64_t start,
                    int64_t row, int64_t end_row, const RowStates& states, const Scratch& scratch) const {
    Strip strips[BLOCK_ROWS / R];
    int count = 0;
    float* scores = scratch.scores;
    for (; row < end_row; row += R) {
      const int64_t first_key = first_key_of(scratch, row);
      Strip& strip = strips[count];
      strip.end = static_cast<int>(std::min<int64_t>(KEY_TILE, scratch.positions[row + R - 1] + 1 - start));
      strip.begin = static_cast<int>(std::max<int64_t>(0, first_key - start));
      if (strip.begin >= strip.end) continue;
      strip.row = row;
      strip.merges = item.split < 0 && first_key < start;
      strip.states = states.from(row, head_dim_);
      strip.scores = scores;
      scores += R * KEY_TILE;
      ++count;
    }
    for (int g = 0; g < KEY_GROUPS; g += V) {
      for (int i = 0; i < count; ++i) {
        const Strip& strip = strips[i];
        if (strip.begin >= (g + V) * LANES || strip.end <= g * LANES) continue;
        const float* queries = scratch.queries + strip.row * QUERY_STRIDE;
        if (FROM_CACHE && i == 0) {
          score<R, V, true>(queries, tile, g, head_dim_, strip.scores);
        } else if constexpr (may_have_neighbours(R)) {
          score<R, V, false>(queries, tile, g, head_dim_, strip.scores);
        }
      }
    }
    for (int i = 0; i < count; ++i) weights<R>(tile, start, strips[i], scratch);
    weigh_columns<R, V, FROM_CACHE>(tile, next, 0, strips, count);
  }

  // All columns from `column` on, V vectors at a time and then half as many.
  template <int R, int V, bool FROM_CACHE, class T>
  void weigh_columns(const KeyTile<T>& tile, const KeyTile<T>& next, int64_t column, const Strip* strips,
                     int count) const {
    for (; column + V * LANES <= head_dim_; column += V * LANES) {
      for (int i = 0; i < count; ++i) {
        const Strip& strip = strips[i];
        const Shares* shares = strip.merges ? &strip.shares : nullptr;
        if (FROM_CACHE && i == 0) {
          weigh<R, V, true>(strip.scores, tile, next, strip.begin, strip.end, column, shares, strip.states.weighted,
                            head_dim_);
        } else if constexpr (may_have_neighbours(R)) {
          weigh<R, V, false>(strip.scores, tile, next, strip.begin, strip.end, column, shares, strip.states.weighted,
                             head_dim_);
        }
      }
    }
    if constexpr (V > 1) weigh_columns<R, V / 2, FROM_CACHE>(tile, next, column, strips, count);
  }

  // Turns scores into weights, and merges the highest score and the sum into those of the tiles before.
  template <int R, class T>
  void weights(const KeyTile<T>& tile, int64_t start, Strip& strip, const Scratch& scratch) const {
    const int first = strip.begin / LANES, last = (strip.end + LANES - 1) / LANES;
    const int32_t* positions = scratch.positions + strip.row;
    if constexpr (is_fixed<T>) {
      scale<R>(tile, scratch.query_scales + strip.row, strip.scores, first, last);
    } else if (args_.softcap != 0) {
      cap<R>(strip.scores, first, last);
    }
    const bool hides_later = positions[0] + 1 - start < last * LANES;
    const bool hides_earlier = args_.window && positions[R - 1] + 1 - args_.window - start > first * LANES;
    if (hides_later || hides_earlier) hide<R>(positions, start, strip.scores, first, last);
    float highest[LANES] = {};
    for (int r = 0; r < R; ++r) {
      const float* s = strip.scores + r * KEY_TILE;
      simd::f32 top = simd::load(s + first * LANES);
      for (int g = first + 1; g < last; ++g) top = simd::max(top, simd::load(s + g * LANES));
      highest[r] = std::max(LOWEST_SCORE, simd::largest(top));
      if constexpr (is_fixed<T>) highest[r] -= LARGEST_WEIGHT_LOG2;
    }
    if (strip.merges) {
      strip.shares = raise_highest<R>(strip.states, highest);
    } else {
      simd::store_first(strip.states.highest, simd::load(highest), R);
    }
    for (int r = 0; r < R; ++r) {
      float* s = strip.scores + r * KEY_TILE;
      const simd::f32 top = simd::set1(highest[r]);
      simd::f32 sum = simd::zero();
      for (int g = first; g < last; ++g) {
        const simd::f32 weight = simd::exp2(simd::sub(simd::load(s + g * LANES), top));
        if constexpr (is_fixed<T>) {
          simd::store_i16(reinterpret_cast<int16_t*>(s) + g * LANES, weight);
          sum = simd::fma(weight, simd::load(scratch.value_scales_inverse + g * LANES), sum);
        } else {
          simd::store(s + g * LANES, weight);
          sum = simd::add(sum, weight);
        }
      }
      if (strip.merges) sum = merged(strip.states.sums + r * LANES, sum, strip.shares, r);
      simd::store(strip.states.sums + r * LANES, sum);
    }
  }

  // Takes what comes next into a strip's highest scores.
  template <int R>
  static Shares raise_highest(const RowStates& states, const float* highest) {
    const simd::f32 before = simd::load_first(states.highest, R), here = simd::load_first(highest, R);
    const simd::f32 now = simd::max(before, here);
    simd::store_first(states.highest, now, R);
    Shares shares;
    simd::store(shares.kept, simd::exp2(simd::sub(before, now)));
    simd::store(shares.taken, simd::exp2(simd::sub(here, now)));
    return shares;
  }

  static simd::f32 merged(const float* old, simd::f32 here, const Shares& shares, int row) {
    return simd::fma(here, simd::set1(shares.taken[row]), simd::mul(simd::load(old), simd::set1(shares.kept[row])));
  }

  // Multiplies fixed point scores by the queries' scales, and their weights to come by the values'.
  template <int R>
  void scale(const KeyTile<int16_t>& tile, const float* query_scales, float* scores, int first, int last) const {
    const simd::f32 limit = simd::set1(static_cast<float>(args_.softcap * LOG2_E));
    for (int r = 0; r < R; ++r) {
      const simd::f32 query_scale = simd::set1(query_scales[r]);
      for (int g = first; g < last; ++g) {
        float* at = scores + r * KEY_TILE + g * LANES;
        const simd::f32 score = simd::load(at), value_scale_log = simd::load(tile.value_scales_log[g]);
        simd::store(at, args_.softcap != 0
                            ? simd::fma(simd::tanh(simd::mul(score, query_scale)), limit, value_scale_log)
                            : simd::fma(score, query_scale, value_scale_log));
      }
    }
  }

  template <int R>
  void cap(float* scores, int first, int last) const {
    const simd::f32 limit = simd::set1(static_cast<float>(args_.softcap * LOG2_E));
    for (int r = 0; r < R; ++r) {
      for (int g = first; g < last; ++g) {
        float* at = scores + r * KEY_TILE + g * LANES;
        simd::store(at, simd::mul(simd::tanh(simd::load(at)), limit));
      }
    }
  }

  template <int R>
  void hide(const int32_t* positions, int64_t start, float* scores, int first, int last) const {
    for (int r = 0; r < R; ++r) {
      const auto end = static_cast<int>(positions[r] + 1 - start);
      const auto begin = args_.window ? static_cast<int>(positions[r] + 1 - args_.window - start) : 0;
      for (int g = first; g < last; ++g) {
        float* at = scores + r * KEY_TILE + g * LANES;
        const simd::mask is_earlier = simd::first(std::max(0, begin - g * LANES));
        const simd::mask is_not_later = simd::first(std::max(0, end - g * LANES));
        simd::f32 s = simd::select(is_not_later, simd::load(at), simd::set1(-INFINITY));
        simd::store(at, simd::select(is_earlier, simd::set1(-INFINITY), s));
      }
    }
  }

  template <int R>
  void reset(const RowStates& states, int64_t row) const {
    std::fill(states.highest + row, states.highest + row + R, LOWEST_SCORE);
    std::fill(states.sums + row * LANES, states.sums + (row + R) * LANES, 0.0f);
    std::fill(states.weighted + row * head_dim_, states.weighted + (row + R) * head_dim_, 0.0f);
  }

  // all += part, for a strip.
  template <int R>
  void merge(const RowStates& part, int64_t row, const RowStates& all) const {
    const RowStates from = part.from(row, head_dim_), to = all.from(row, head_dim_);
    const Shares shares = raise_highest<R>(to, from.highest);
    for (int r = 0; r < R; ++r) {
      simd::store(to.sums + r * LANES, merged(to.sums + r * LANES, simd::load(from.sums + r * LANES), shares, r));
      for (int64_t at = r * head_dim_; at < (r + 1) * head_dim_; at += LANES) {
        simd::store(to.weighted + at, merged(to.weighted + at, simd::load(from.weighted + at), shares, r));
      }
    }
  }

  template <class T>
  void write(const AttentionPlan::Item& item, int64_t rows, const RowStates& states) const {
    for (int64_t row = 0; row < rows; ++row) {
      const float inverse = 1.0f / simd::sum(simd::load(states.sums + row * LANES));
      const float* weighted = states.weighted + row * head_dim_;
      float* out = args_.out + head_of(item, row) * head_dim_;
      int64_t d = 0;
      if constexpr (std::is_same_v<T, uint16_t>) {
        for (; d + 2 * LANES <= head_dim_; d += 2 * LANES) interleave(weighted + d, inverse, out + d);
      }
      for (; d < head_dim_; ++d) out[d] = weighted[d] * inverse;
    }
  }

  static void interleave(const float* __restrict halves, float factor, float* __restrict out) {
    for (int i = 0; i < LANES; ++i) {
      out[2 * i] = halves[i] * factor;
      out[2 * i + 1] = halves[LANES + i] * factor;
    }
  }

  static constexpr double LOG2_E = 1.4426950408889634;

  const AttentionArgs& args_;
  const Step& step_;
  AttentionPlan& plan_;
  const int64_t group_;
  const int64_t head_dim_;
};

// One task a row and head: the query heads, then the KV heads.
class RotateAndWrite {
 public:
  RotateAndWrite(const RotateAndWriteArgs& args, const Step& step, int64_t first_row, int64_t rows)
      : args_(args), step_(step), first_row_(first_row), rows_(rows), head_dim_(args.cache.head_dim) {}

  int64_t num_tasks() const { return rows_ * (args_.num_heads + args_.cache.num_kv_heads); }

  void run(int64_t begin, int64_t end, int /*thread*/) const {
    const int64_t heads = args_.num_heads + args_.cache.num_kv_heads;
    int64_t row = begin / heads, head = begin % heads;
    for (int64_t task = begin; task < end; ++task) {
      if (head < args_.num_heads) {
        const int64_t at = (row * args_.num_heads + head) * head_dim_;
        rotate(args_.q + at, args_.q_norm, row, args_.q_out + at);
      } else {
        with_elements(args_.cache, [&](auto element) { write<decltype(element)>(row, head - args_.num_heads); });
      }
      if (++head == heads) {
        head = 0;
        ++row;
      }
    }
  }

 private:
  void rotate(const float* x, const float* norm, int64_t row, float* out) const {
    float normed[LARGEST_HEAD];
    if (norm) {
      const auto eps = static_cast<float>(args_.eps), offset = static_cast<float>(args_.offset);
      rms_norm_row(x, norm, nullptr, normed, head_dim_, eps, offset);
      x = normed;
    }
    const int64_t half = head_dim_ / 2;
    const float* cosines = args_.table + step_.positions[first_row_ + row] * head_dim_;
    for (int64_t i = 0; i < half; i += LANES) {
      const int count = static_cast<int>(std::min<int64_t>(LANES, half - i));
      const simd::f32 cosine = simd::load_first(cosines + i, count), sine = simd::load_first(cosines + half + i, count);
      const simd::f32 first = simd::load_first(x + i, count), second = simd::load_first(x + half + i, count);
      simd::store_first(out + i, simd::sub(simd::mul(first, cosine), simd::mul(second, sine)), count);
      simd::store_first(out + half + i, simd::add(simd::mul(second, cosine), simd::mul(first, sine)), count);
    }
  }

  template <class T>
  void write(int64_t row, int64_t kv_head) const {
    const KvCache& cache = args_.cache;
    const int64_t slot = step_.slot_mapping[first_row_ + row], size = cache.block_size;
    const int64_t block = slot / size, offset = slot % size;
    const int64_t half = half_block_bytes(cache) / sizeof(T);
    T* keys = static_cast<T*>(cache.data) + (block * cache.num_kv_heads + kv_head) * 2 * half;
    T* values = keys + half;
    const int64_t at = (row * cache.num_kv_heads + kv_head) * head_dim_;
    float key[LARGEST_HEAD];
    rotate(args_.k + at, args_.k_norm, row, key);
    if constexpr (is_fixed<T>) {
      int16_t codes[LARGEST_HEAD];
      const float key_scale = to_fixed_point(key, head_dim_, codes);
      for (int64_t d = 0; d < head_dim_; d += 2) std::memcpy(keys + d * size + 2 * offset, codes + d, 4);
      reinterpret_cast<float*>(keys + size * head_dim_)[offset] = key_scale;
      const float value_scale = to_fixed_point(args_.v + at, head_dim_, codes);
      int16_t* pairs = values + offset / 2 * 2 * head_dim_ + offset % 2;
      for (int64_t d = 0; d < head_dim_; ++d) pairs[2 * d] = codes[d];
      reinterpret_cast<float*>(values + size * head_dim_)[offset] = std::log2(value_scale);
    } else if constexpr (sizeof(T) == 2) {
      uint16_t narrow[LARGEST_HEAD];
      for (int64_t d = 0; d < head_dim_; d += LANES) {
        simd::store_bf16(narrow + d, simd::load(key + d));
        simd::store_bf16(values + offset * head_dim_ + d, simd::load(args_.v + at + d));
      }
      for (int64_t d = 0; d < head_dim_; d += 2) std::memcpy(keys + d * size + 2 * offset, narrow + d, 4);
    } else {
      for (int64_t d = 0; d < head_dim_; ++d) keys[d * size + offset] = key[d];
      std::memcpy(values + offset * head_dim_, args_.v + at, head_dim_ * sizeof(float));
    }
  }

  const RotateAndWriteArgs& args_;
  const Step& step_;
  const int64_t first_row_;
  const int64_t rows_;
  const int64_t head_dim_;
};

// Copies the first num_tokens[i] slots of block src[i] into block dst[i]. All copies read before any writes.
inline void copy_blocks(const KvCache& cache, const int64_t* src, const int64_t* dst, const int64_t* num_tokens,
                        int64_t count) {
  // A slot has four bytes in each row of the keys: two elements, one, or a scale.
  const bool fixed = cache.format == static_cast<int32_t>(CacheFormat::kFixed16);
  const int64_t value_bytes = cache.head_dim * element_bytes(cache), half_bytes = half_block_bytes(cache);
  const int64_t key_rows = half_bytes / cache.block_size / 4;
  auto* data = static_cast<uint8_t*>(cache.data);
  std::vector<uint8_t> copies;
  // Calls visit(address, bytes) for each run of bytes that the first `tokens` slots of a block occupy.
  auto visit_runs = [&](int64_t block, int64_t tokens, auto visit) {
    for (int64_t head = 0; tokens > 0 && head < cache.num_kv_heads; ++head) {
      uint8_t* keys = data + (block * cache.num_kv_heads + head) * 2 * half_bytes;
      for (int64_t row = 0; row < key_rows; ++row) {
        visit(keys + row * cache.block_size * 4, tokens * 4);
      }
      uint8_t* values = keys + half_bytes;
      if (!fixed) {
        visit(values, tokens * value_bytes);
        continue;
      }
      visit(values, tokens / 2 * 2 * value_bytes);
      // Half of a pair.
      uint8_t* pair = values + tokens / 2 * 2 * value_bytes;
      for (int64_t d = 0; tokens % 2 && d < cache.head_dim; ++d) visit(pair + 4 * d, 2);
      visit(values + cache.block_size * value_bytes, tokens * 4);
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    visit_runs(src[i], num_tokens[i], [&](const uint8_t* p, int64_t bytes) {
      copies.insert(copies.end(), p, p + bytes);
    });
  }
  const uint8_t* from = copies.data();
  for (int64_t i = 0; i < count; ++i) {
    visit_runs(dst[i], num_tokens[i], [&](uint8_t* p, int64_t bytes) {
      std::memcpy(p, from, bytes);
      from += bytes;
    });
  }
}

}  // namespace kitfox
