// The CUDA threads of a block as fibers: who may run, who waits for what, exchanges within a warp, and how to fail.
#pragma once

#include <fenv.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulation.h"
#include "fiber.h"
#include "sanitizer.h"

namespace emulation {

// Threads of a warp and of a warpgroup, and the warps of that.
constexpr unsigned kWarp = 32, kWarpgroup = 128, kWarps = kWarpgroup / kWarp;

__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

// SplitMix64: any seed will do, and blocks may count theirs up.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }

  template <typename T>
  void shuffle(T* values, size_t count) {
    for (size_t i = count; i > 1; --i) std::swap(values[i - 1], values[next() % i]);
  }

 private:
  uint64_t state_;
};

inline void fill_uninitialized(void* target, size_t bytes) {
  // Whole words, then whatever is left of one.
  unsigned char* to = static_cast<unsigned char*>(target);
  for (size_t i = 0; i < bytes; i += sizeof(kUninitialized)) {
    memcpy(to + i, &kUninitialized, std::min(sizeof(kUninitialized), bytes - i));
  }
}

// A thread that polls is one that could run, but would only ask again.
enum class State {
  kReady, kPolls, kAtBarrier, kAtWarp, kAtPhase, kAtMeeting, kAtProducts, kAtNumber, kAtCluster, kExited
};

class Scheduler;

struct Copy {
  unsigned char* target;
  unsigned char data[16];
  size_t bytes;
  unsigned group;
};

struct Thread {
  Thread(Scheduler* scheduler, unsigned index);

  unsigned warp() const { return index / kWarp; }
  unsigned warpgroup() const { return index / kWarpgroup; }

  Scheduler* scheduler;
  unsigned index;
  uint3 position{};
  State state = State::kReady;
  const char* waits_at = "";
  int line = 0;
  uint32_t mask = 0;
  // What this lane puts into the exchange it waits at, and then what it gets out.
  uint64_t bits = 0;
  int source = 0;
  // What its warp does together, and what this lane brings to it; no work for an exchange of bits.
  WarpWork work = nullptr;
  void* operands = nullptr;
  unsigned groups_committed = 0;
  bool waited_for_launches = false, waited_alone = false;
  unsigned cluster_arrivals = 0;
  std::vector<Copy> copies;
  Fiber fiber;
};

// What the units of a multiprocessor (barriers, copy engine, tensor cores) share: threads, shared memory, randomness.
// A thread's own calls run on its fiber; `run_warps` and what units do between its rounds run on the host thread's stack.
class Scheduler {
 public:
  Scheduler(unsigned count, size_t shared_size) : shared_size_(shared_size) {
    for (unsigned i = 0; i < count; ++i) threads_.push_back(std::make_unique<Thread>(this, i));
    for (unsigned warp = 0; warp < (count + kWarp - 1) / kWarp; ++warp) warp_order_.push_back(warp);
  }
  virtual ~Scheduler() = default;

  Thread& current() { return *current_; }
  Thread& thread(unsigned index) { return *threads_[index]; }
  size_t size() const { return threads_.size(); }
  size_t shared_size() const { return shared_size_; }
  unsigned block() const { return block_; }
  // The block's shared memory, also while it is set aside for another block that runs.
  unsigned char* memory() { return aside_ ? aside_ : shared_bytes; }
  Random& random() { return random_; }

  // Suspends the running thread until others made it ready.
  void wait(State state, const char* what, int line, uint32_t mask = 0) {
    Thread& thread = *current_;
    thread.state = state;
    thread.waits_at = what;
    thread.line = line;
    thread.mask = mask;
    if (EMULATION_ASAN) check_arithmetic();
    if (state == State::kAtWarp) complete_exchange(thread);
    if (thread.state != State::kReady) thread.fiber.yield();
  }

  // Ends the block: the running thread never continues.
  [[noreturn]] void fail(std::string why) {
    report(std::move(why));
    for (;;) current_->fiber.yield();
  }

  // Ends the block from outside of its threads.
  void report(std::string why) {
    if (failure_.empty()) failure_ = std::move(why);
  }
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }

  // The byte of shared memory that an address is, which an access of so many bytes may be at.
  size_t place_of(const void* address, size_t bytes, size_t alignment, const char* what, int line) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared_bytes;
    if (offset < 0 || offset + ptrdiff_t(bytes) > ptrdiff_t(shared_size_) || offset % alignment != 0) {
      fail(format("%s: %s in line %d at byte %td of %zu bytes of shared memory: it takes %zu bytes from a multiple of %zu",
                  where(*current_).c_str(), what, line, offset, shared_size_, bytes, alignment));
    }
    return offset;
  }

  std::string where(const Thread& thread) const {
    return format("block %u, thread %u", block_, thread.index);
  }

  // Whether some thread could run.
  bool any_ready() const {
    for (const auto& thread : threads_) {
      if (thread->state == State::kReady) return true;
    }
    return false;
  }

  std::string describe_deadlock() const {
    struct Group {
      unsigned count, first;
      bool named;
    };
    std::map<std::string, Group> groups;
    for (const auto& thread : threads_) {
      std::string what = format("wait at %s in line %d", thread->waits_at, thread->line), why;
      switch (thread->state) {
        case State::kExited: what = "have returned"; break;
        case State::kReady: what = "could run"; break;
        case State::kAtBarrier: break;
        case State::kAtWarp:
          what = format("wait at %s(0x%08x) in line %d", thread->waits_at, thread->mask, thread->line);
          break;
        default: why = awaited(*thread); break;
      }
      ++groups.try_emplace(what + why, Group{0, thread->index, !why.empty()}).first->second.count;
    }
    std::string text = format("deadlock in block %u of %zu threads: ", block_, threads_.size());
    const char* separator = "";
    for (const auto& [what, group] : groups) {
      text += separator + std::to_string(group.count) + " " + what;
      if (group.named) text += format(" (%sthread %u)", group.count > 1 ? "from " : "", group.first);
      separator = ", ";
    }
    return text;
  }

  std::string here() const { return where(*current_); }

  virtual void run_kernel() = 0;

 protected:
  // What a thread waits for, beside the place where it does.
  virtual std::string awaited(const Thread& thread) const = 0;

  // Where shared memory is while another block runs; null when this one does.
  void set_aside(unsigned char* place) { aside_ = place; }

  void start(uint64_t seed) {
    random_ = Random(seed);
    block_ = blockIdx.x;
    idle_rounds_ = 0;
    round_ = 0;
    for (auto& thread : threads_) {
      thread->state = State::kReady;
      thread->copies.clear();
      thread->groups_committed = 0;
      thread->waited_for_launches = thread->waited_alone = false;
      thread->cluster_arrivals = 0;
    }
  }

  // A round of all warps in a new order. Where units let warps drift apart, not all of them get their turn in each.
  void run_warps(bool drifting) {
    random_.shuffle(warp_order_.data(), warp_order_.size());
    if (drifting && round_++ % kSpell == 0) draw_turns();
    for (const unsigned warp : warp_order_) {
      if (!drifting || random_.next() % 64 < turns_[warp]) run_warp(warp);
    }
  }

  enum class Runnable { kSome, kPolling, kNone };

  // Which threads can run: some, or those alone that poll, and have not done so for very long.
  Runnable runnable() {
    bool ready = false, polls = false;
    for (const auto& thread : threads_) {
      ready |= thread->state == State::kReady;
      polls |= thread->state == State::kPolls;
    }
    idle_rounds_ = ready ? 0 : idle_rounds_ + 1;
    return ready ? Runnable::kSome : polls && idle_rounds_ <= kMaxIdleRounds ? Runnable::kPolling : Runnable::kNone;
  }

  // Whether all threads stood at the barrier and now go on; false too with a failure.
  bool release_barrier() {
    for (const auto& thread : threads_) {
      if (thread->state != State::kAtBarrier) return false;
    }
    const Thread& one = *threads_[0];
    for (const auto& thread : threads_) {
      if (thread->line != one.line) {
        report(format("divergent %s in block %u: thread 0 waits at line %d, thread %u at line %d", one.waits_at,
                      blockIdx.x, one.line, thread->index, thread->line));
        return false;
      }
    }
    bool any = false;
    for (const auto& thread : threads_) any |= thread->bits != 0;
    for (auto& thread : threads_) {
      thread->bits = any;
      thread->state = State::kReady;
    }
    return true;
  }

  // Arithmetic on a signalling NaN leaves a flag behind, even where the result is masked out or lost in a maximum.
  // Asked on the fiber itself: swapcontext keeps the flags of each apart.
  void check_arithmetic() {
    if (!fetestexcept(FE_INVALID)) return;
    const Thread& thread = *current_;
    const std::string before = thread.state == State::kExited
                                   ? "before it returned"
                                   : format("before %s in line %d", thread.waits_at, thread.line);
    fail(where(thread) + " computed with an uninitialized value, or inf - inf or 0 * inf, " + before);
  }

 private:
  // Rounds in which threads only polled. Copies that could end their waiting have ended long before.
  static constexpr int kMaxIdleRounds = 1000;

  // For a spell of rounds one warpgroup falls behind the others, or any warps behind any.
  static constexpr unsigned kSpell = 32;

  void draw_turns() {
    constexpr unsigned kTurns[] = {1, 8, 32, 60};
    turns_.assign(warp_order_.size(), kTurns[3]);
    const bool one_group = random_.next() % 2;
    const unsigned group = random_.next() % (warp_order_.size() / kWarps + 1);
    const unsigned slow = kTurns[random_.next() % 2];
    for (unsigned warp = 0; warp < turns_.size(); ++warp) {
      if (!one_group) turns_[warp] = kTurns[random_.next() % 4];
      if (one_group && warp / kWarps == group) turns_[warp] = slow;
    }
  }

  // Lets the warp's threads run, in a new order each time, until all of them wait for other warps or have ended.
  void run_warp(unsigned warp) {
    const unsigned first = warp * kWarp, end = std::min<unsigned>(first + kWarp, threads_.size());
    for (unsigned i = first; i < end; ++i) {
      if (threads_[i]->state == State::kPolls) threads_[i]->state = State::kReady;
    }
    for (;;) {
      Thread* ready[kWarp];
      size_t count = 0;
      for (unsigned i = first; i < end; ++i) {
        if (threads_[i]->state == State::kReady) ready[count++] = threads_[i].get();
      }
      if (count == 0) return;
      random_.shuffle(ready, count);
      for (size_t i = 0; i < count; ++i) {
        current_ = ready[i];
        threadIdx = current_->position;
        current_->fiber.resume(host_);
        if (failed()) return;
      }
    }
  }

  // Gives all lanes of the mask their results once the last of them has come.
  void complete_exchange(Thread& last) {
    const unsigned first = last.index / kWarp * kWarp, end = std::min<unsigned>(first + kWarp, threads_.size());
    Thread* lanes[kWarp] = {};
    for (unsigned i = first; i < end; ++i) {
      if (!(last.mask >> (i - first) & 1)) continue;
      Thread& lane = *threads_[i];
      // Lanes may meet in the same function at different lines, as they may on cards since Volta.
      const bool here = lane.state == State::kAtWarp && lane.mask == last.mask && lane.waits_at == last.waits_at;
      if (!here) return;
      lanes[i - first] = &lane;
    }
    if (last.work) {
      do_work(last, lanes);
      return;
    }
    uint64_t bits[kWarp];
    uint32_t votes = 0;
    for (unsigned i = 0; i < kWarp; ++i) {
      bits[i] = lanes[i] ? lanes[i]->bits : uint64_t(kUninitialized) << 32 | kUninitialized;
      if (lanes[i] && bits[i]) votes |= 1u << i;
    }
    for (Thread* lane : lanes) {
      if (!lane) continue;
      lane->bits = lane->source < 0 ? votes : bits[lane->source % kWarp];
      lane->state = State::kReady;
    }
  }

  void do_work(const Thread& last, Thread* const* lanes) {
    void* operands[kWarp];
    for (unsigned i = 0; i < kWarp; ++i) {
      if (lanes[i]->line != lanes[0]->line) {
        fail(format("divergent %s in block %u: thread %u calls it in line %d, thread %u in line %d", last.waits_at,
                    blockIdx.x, lanes[0]->index, lanes[0]->line, lanes[i]->index, lanes[i]->line));
      }
      operands[i] = lanes[i]->operands;
    }
    last.work(operands);
    for (unsigned i = 0; i < kWarp; ++i) lanes[i]->state = State::kReady;
  }

  FiberHost host_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<unsigned> warp_order_;
  size_t shared_size_;
  Random random_{0};
  Thread* current_ = nullptr;
  unsigned block_ = 0;
  unsigned char* aside_ = nullptr;
  std::string failure_;
  int idle_rounds_ = 0;
  unsigned round_ = 0;
  std::vector<unsigned> turns_;  // by warp, of 64
};

inline Thread::Thread(Scheduler* scheduler, unsigned index)
    : scheduler(scheduler),
      index(index),
      fiber(
          [](void* argument) {
            for (;;) static_cast<Thread*>(argument)->scheduler->run_kernel();
          },
          this) {}

}  // namespace emulation
