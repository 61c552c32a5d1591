// Threads that work on a program together.
//
// A program is a sequence of phases, each a range of tasks, of which every thread has an equal share to begin with. A
// phase ends when its tasks are done, not when all threads have arrived: from one that the operating system has taken
// away the others take over all but the piece it was working on. A thread without work spins for a while, because a
// wake-up costs as much as many small phases, and then sleeps, because the server and the rest of the machine need the
// cores too.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kitfox {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while `word` is `seen`; may return early.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

class Pool {
 public:
  // Tasks [begin, end) of a phase, on a thread in [0, size).
  using Body = std::function<void(int phase, int64_t begin, int64_t end, int thread)>;

  // size: how many threads, the caller's included. cores: the core each is pinned to, or empty for none; the caller's
  // thread never is. spin_us: how long a thread without work stays awake.
  Pool(int size, std::vector<int> cores, int spin_us) : size_(size), cores_(std::move(cores)), spin_(spin_us), shares_(size) {
    for (int index = 1; index < size_; ++index) threads_.emplace_back([this, index] { help(index); });
  }

  ~Pool() {
    stopping_ = true;
    sleepers_ = 0;
    wakes_.fetch_add(1);
    wake_all(wakes_);
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs one phase after the other; totals[phase] says how many tasks it has.
  void run(const std::vector<int64_t>& totals, const Body& body) {
    body_ = &body;
    for (size_t phase = 0; phase < totals.size(); ++phase) {
      const int64_t total = totals[phase];
      if (total <= 1 || size_ == 1) {
        if (total > 0) body(static_cast<int>(phase), 0, total, 0);
        continue;
      }
      phase_ = static_cast<int>(phase);
      // Shares are counted in units of tasks, so that a count fits in its part of a word.
      unit_ = (total + MOST_UNITS - 1) / MOST_UNITS;
      total_ = total;
      const int64_t units = (total + unit_ - 1) / unit_;
      done_.store(0, std::memory_order_relaxed);
      for (int thread = 0; thread < size_; ++thread) {
        const auto begin = static_cast<uint64_t>(thread * units / size_);
        const auto end = static_cast<uint64_t>((thread + 1) * units / size_);
        shares_[thread].range.store(begin << BITS | end, std::memory_order_release);
      }
      generation_.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers_.exchange(0, std::memory_order_seq_cst) != 0) {
        wakes_.fetch_add(1, std::memory_order_seq_cst);
        wake_all(wakes_);
      }
      work(0);
      wait_until_done(static_cast<uint32_t>(units));
    }
  }

 private:
  // What is left of a thread's share of a phase: first unit and end, in one word. The owner takes from the front, so that
  // its tasks follow one another in memory; who has nothing left takes from the back of others' shares. Whoever takes a
  // piece by changing the word keeps the phase from ending until the piece is done, and may read all that belongs to it.
  struct alignas(64) Share {
    std::atomic<uint64_t> range{0};
  };
  static constexpr int BITS = 32;
  static constexpr int64_t MOST_UNITS = INT32_MAX;

  // Does all that this thread can get of the current phase.
  void work(int thread) {
    while (take<true>(shares_[thread], thread)) {
    }
    for (int i = 1; i < size_; ++i) {
      while (take<false>(shares_[(thread + i) % size_], thread)) {
      }
    }
  }

  // Takes half of what is left of a share and does it: large pieces first, small ones towards the end.
  template <bool FROM_FRONT>
  bool take(Share& share, int thread) {
    uint64_t range = share.range.load(std::memory_order_acquire);
    while (true) {
      const auto begin = static_cast<int64_t>(range >> BITS), end = static_cast<int64_t>(range & UINT32_MAX);
      if (begin == end) return false;
      const int64_t piece = (end - begin + 1) / 2;
      const int64_t first = FROM_FRONT ? begin : end - piece;
      const uint64_t rest = FROM_FRONT ? range + (static_cast<uint64_t>(piece) << BITS) : range - piece;
      if (!share.range.compare_exchange_weak(range, rest, std::memory_order_acq_rel)) continue;
      (*body_)(phase_, first * unit_, std::min((first + piece) * unit_, total_), thread);
      done_.fetch_add(static_cast<uint32_t>(piece), std::memory_order_seq_cst);
      if (waiting_.load(std::memory_order_seq_cst)) wake_all(done_);
      return true;
    }
  }

  void wait_until_done(uint32_t units) {
    for (int round = 0; round < ROUNDS_BEFORE_SLEEP; ++round) {
      if (done_.load(std::memory_order_acquire) == units) return;
      pause_cpu();
    }
    waiting_.store(true, std::memory_order_seq_cst);
    for (uint32_t done = done_.load(); done != units; done = done_.load()) sleep_on(done_, done);
    waiting_.store(false, std::memory_order_relaxed);
  }

  void help(int index) {
#if defined(__linux__)
    if (index < static_cast<int>(cores_.size())) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cores_[index], &set);
      pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
    }
#endif
    uint32_t seen = 0;
    while (!stopping_) {
      if (wait_for_phase(seen)) work(index);
    }
  }

  // Whether a phase has begun since `seen`, which is updated; spins first, then sleeps and may return early.
  bool wait_for_phase(uint32_t& seen) {
    const auto deadline = std::chrono::steady_clock::now() + spin_;
    do {
      for (int round = 0; round < 64; ++round) {
        const uint32_t now = generation_.load(std::memory_order_acquire);
        if (now != seen) {
          seen = now;
          return true;
        }
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    const uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!stopping_ && generation_.load(std::memory_order_seq_cst) == seen) sleep_on(wakes_, wakes);
    return false;
  }

  // About 50 microseconds: a piece that takes longer was taken away together with its thread.
  static constexpr int ROUNDS_BEFORE_SLEEP = 1000;

  const int size_;
  const std::vector<int> cores_;
  const std::chrono::microseconds spin_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  // Of the current phase; written before its shares, read by those who took a piece of one.
  const Body* body_ = nullptr;
  int phase_ = 0;
  int64_t unit_ = 1;
  int64_t total_ = 0;
  std::vector<Share> shares_;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> waiting_{false};
  alignas(64) std::atomic<uint32_t> wakes_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace kitfox
