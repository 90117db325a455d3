// The run-time behind cuda_emulation.h: blocks on host threads, their CUDA threads as fibers, barriers, warp-wide
// exchanges, asynchronous copies and shared memory.
//
// What a card leaves undefined is made to hurt here: threads run in an order drawn from a seed, each as far as it can
// get, so that a missing barrier shows in the result; memory that nobody wrote is NaN, and so is the target of an
// asynchronous copy until it is waited for; a barrier that not all reach ends the launch with a message.
#include "cuda_emulation.h"

#include <fenv.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fiber.h"
#include "matrix_product.h"
#include "sanitizer.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;
__thread unsigned char shared_bytes[emulation::kMaxSharedBytes + emulation::kSharedGuardBytes]
    __attribute__((aligned(1024)));

namespace emulation {
namespace {

constexpr int kWarp = 32;
// Fibers alive at once, over all host threads: each takes two memory mappings, of 65530 that Linux grants a process.
constexpr uint64_t kMaxFibers = 24 * 1024;

Config config;
thread_local std::string message;

std::string format(const char* pattern, ...) {
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

void fill_uninitialized(void* target, size_t bytes) {
  // Whole words, then whatever is left of one.
  unsigned char* to = static_cast<unsigned char*>(target);
  for (size_t i = 0; i < bytes; i += sizeof(kUninitialized)) {
    memcpy(to + i, &kUninitialized, std::min(sizeof(kUninitialized), bytes - i));
  }
}

struct Copy {
  unsigned char* target;
  unsigned char data[16];
  size_t bytes;
  unsigned group;
};

enum class State { kReady, kAtBarrier, kAtWarp, kExited };

class Block;

struct Thread {
  Thread(Block* block, unsigned index);

  Block* block;
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
  std::vector<Copy> copies;
  Fiber fiber;
};

// What a launch is, for all its blocks.
struct Grid {
  KernelCall call;
  const void* kernel;
  void** parameters;
  dim3 blocks, threads;
  size_t shared_bytes;
};

// Runs one block at a time on the host thread that made it.
class Block {
 public:
  explicit Block(const Grid& grid) : grid_(grid) {
    const unsigned count = grid.threads.x * grid.threads.y * grid.threads.z;
    for (unsigned i = 0; i < count; ++i) {
      threads_.push_back(std::make_unique<Thread>(this, i));
      threads_[i]->position = {i % grid.threads.x, i / grid.threads.x % grid.threads.y,
                               i / grid.threads.x / grid.threads.y};
    }
    for (unsigned warp = 0; warp < (count + kWarp - 1) / kWarp; ++warp) warp_order_.push_back(warp);
    poison(shared_bytes + grid.shared_bytes, sizeof(shared_bytes) - grid.shared_bytes);
  }

  ~Block() { unpoison(shared_bytes, sizeof(shared_bytes)); }

  // An empty string, or why the block failed; after that the object is of no more use.
  std::string run(uint64_t number) {
    const dim3 blocks = grid_.blocks;
    random_ = Random(config.seed * 0x100000001b3 + number);
    blockIdx = {unsigned(number % blocks.x), unsigned(number / blocks.x % blocks.y),
                unsigned(number / blocks.x / blocks.y)};
    blockDim = grid_.threads;
    gridDim = grid_.blocks;
    fill_uninitialized(shared_bytes, grid_.shared_bytes);
    if (!EMULATION_ASAN) fill_uninitialized(shared_bytes + grid_.shared_bytes, kSharedGuardBytes);
    for (auto& thread : threads_) {
      thread->state = State::kReady;
      thread->copies.clear();
      thread->groups_committed = 0;
    }
    do {
      random_.shuffle(warp_order_.data(), warp_order_.size());
      for (const unsigned warp : warp_order_) run_warp(warp);
    } while (failure_.empty() && release_barrier());
    if (failure_.empty() && !EMULATION_ASAN) check_guard();
    return failure_;
  }

  Thread& current() { return *current_; }
  size_t size() const { return threads_.size(); }
  size_t shared_size() const { return grid_.shared_bytes; }

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
    failure_ = std::move(why);
    for (;;) current_->fiber.yield();
  }

  // The life of the running thread in this block.
  void run_kernel() {
    grid_.call(grid_.kernel, grid_.parameters);
    current_->state = State::kExited;
    if (EMULATION_ASAN) check_arithmetic();
    current_->fiber.yield();
  }

  std::string where(const Thread& thread) const {
    return format("block %u, thread %u", blockIdx.x, thread.index);
  }

 private:
  // Lets the warp's threads run, in a new order each time, until all of them wait for other warps or have ended.
  void run_warp(unsigned warp) {
    const unsigned first = warp * kWarp, end = std::min<unsigned>(first + kWarp, threads_.size());
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
        if (!failure_.empty()) return;
      }
    }
  }

  // Whether all threads stood at the barrier and now go on; false when all have ended, or with failure_ set.
  bool release_barrier() {
    size_t waiting = 0, exited = 0;
    for (const auto& thread : threads_) {
      waiting += thread->state == State::kAtBarrier;
      exited += thread->state == State::kExited;
    }
    if (exited == threads_.size()) return false;
    if (waiting < threads_.size()) {
      failure_ = describe_deadlock();
      return false;
    }
    const Thread& one = *threads_[0];
    for (const auto& thread : threads_) {
      if (thread->line != one.line) {
        failure_ = format("divergent %s in block %u: thread 0 waits at line %d, thread %u at line %d", one.waits_at,
                          blockIdx.x, one.line, thread->index, thread->line);
        return false;
      }
    }
    for (auto& thread : threads_) thread->state = State::kReady;
    return true;
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
    for (int i = 0; i < kWarp; ++i) {
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
    for (int i = 0; i < kWarp; ++i) {
      if (lanes[i]->line != lanes[0]->line) {
        fail(format("divergent %s in block %u: thread %u calls it in line %d, thread %u in line %d", last.waits_at,
                    blockIdx.x, lanes[0]->index, lanes[0]->line, lanes[i]->index, lanes[i]->line));
      }
      operands[i] = lanes[i]->operands;
    }
    last.work(operands);
    for (int i = 0; i < kWarp; ++i) lanes[i]->state = State::kReady;
  }

  std::string describe_deadlock() const {
    std::map<std::string, int> counts;
    for (const auto& thread : threads_) {
      switch (thread->state) {
        case State::kExited: ++counts["have returned"]; break;
        case State::kAtBarrier: ++counts[format("wait at %s in line %d", thread->waits_at, thread->line)]; break;
        case State::kAtWarp:
          ++counts[format("wait at %s(0x%08x) in line %d", thread->waits_at, thread->mask, thread->line)];
          break;
        case State::kReady: ++counts["could run"]; break;
      }
    }
    std::string text = format("deadlock in block %u of %zu threads: ", blockIdx.x, threads_.size());
    const char* separator = "";
    for (const auto& [what, count] : counts) {
      text += separator + std::to_string(count) + " " + what;
      separator = ", ";
    }
    return text;
  }

  void check_guard() {
    const unsigned char* guard = shared_bytes + grid_.shared_bytes;
    for (size_t i = 0; i < kSharedGuardBytes; i += sizeof(kUninitialized)) {
      if (memcmp(guard + i, &kUninitialized, sizeof(kUninitialized)) != 0) {
        failure_ = format("block %u wrote to byte %zu of %zu bytes of shared memory", blockIdx.x,
                          grid_.shared_bytes + i, grid_.shared_bytes);
        return;
      }
    }
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

  const Grid& grid_;
  FiberHost host_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<unsigned> warp_order_;
  Random random_{0};
  Thread* current_ = nullptr;
  std::string failure_;
};

// The block that this host thread runs.
__thread Block* running = nullptr;

void thread_main(void* argument) {
  Thread* thread = static_cast<Thread*>(argument);
  for (;;) thread->block->run_kernel();
}

Thread::Thread(Block* block, unsigned index) : block(block), index(index), fiber(thread_main, this) {}

// Refuses what a card would call undefined before it confuses the bookkeeping.
Thread& enter_exchange(uint32_t mask, const char* what, int line) {
  Thread& thread = running->current();
  if (!(mask >> (thread.index % kWarp) & 1)) {
    running->fail(format("%s called %s in line %d with mask 0x%08x, which does not name its own lane %u",
                         running->where(thread).c_str(), what, line, mask, thread.index % kWarp));
  }
  thread.work = nullptr;
  return thread;
}

// What one lane brings to an ldmatrix.
struct LoadOperands {
  unsigned* registers;
  uint16_t row[8];
};

template <int kCount, bool kTransposed>
void distribute_matrices(void* const lanes[kWarp]) {
  const auto operands = [lanes](int lane) { return static_cast<LoadOperands*>(lanes[lane]); };
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < kCount; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;
      const auto element = [&](int r, int c) { return unsigned(operands(8 * i + r)->row[c]); };
      operands(lane)->registers[i] = kTransposed ? element(column, row) | element(column + 1, row) << 16
                                                 : element(row, column) | element(row, column + 1) << 16;
    }
  }
}

std::mutex allowed_mutex;
std::map<const void*, int> allowed_shared_bytes;
constexpr int kAllowedUnasked = 48 * 1024;

int refuse(cudaError_t error, std::string why) {
  message = std::move(why);
  return error;
}

}  // namespace

int lane_of_warp() { return running->current().index % kWarp; }

void sync_block(const char* what, int line) { running->wait(State::kAtBarrier, what, line); }

void sync_warp(uint32_t mask, const char* what, int line) {
  Thread& thread = enter_exchange(mask, what, line);
  thread.source = thread.index % kWarp;
  running->wait(State::kAtWarp, what, line, mask);
}

uint64_t exchange(uint32_t mask, uint64_t bits, int source, const char* what, int line) {
  Thread& thread = enter_exchange(mask, what, line);
  thread.bits = bits;
  thread.source = source & (kWarp - 1);
  running->wait(State::kAtWarp, what, line, mask);
  return thread.bits;
}

uint32_t ballot(uint32_t mask, bool predicate, const char* what, int line) {
  Thread& thread = enter_exchange(mask, what, line);
  thread.bits = predicate;
  thread.source = -1;
  running->wait(State::kAtWarp, what, line, mask);
  return uint32_t(thread.bits);
}

void work_together(WarpWork work, void* operands, const char* what, int line) {
  constexpr uint32_t kAll = 0xffffffff;
  Thread& thread = enter_exchange(kAll, what, line);
  const unsigned first = thread.index / kWarp * kWarp, lanes = running->size() - first;
  if (lanes < kWarp) {
    running->fail(format("%s called %s in line %d in a warp of %u threads: it takes all %d",
                         running->where(thread).c_str(), what, line, lanes, kWarp));
  }
  thread.work = work;
  thread.operands = operands;
  running->wait(State::kAtWarp, what, line, kAll);
}

void load_matrices(unsigned* registers, const void* row, int count, bool transposed, const char* what, int line) {
  const Thread& thread = running->current();
  const ptrdiff_t offset = static_cast<const unsigned char*>(row) - shared_bytes;
  // All lanes, though only the first 8 * count name rows: cards before Ampere want good addresses from the others too.
  const ptrdiff_t end = running->shared_size();
  LoadOperands operands{registers, {}};
  if (offset < 0 || offset + ptrdiff_t(sizeof(operands.row)) > end || offset % sizeof(operands.row) != 0) {
    running->fail(format("%s: %s in line %d of the row at byte %td of %td bytes of shared memory: it loads 16 bytes "
                         "from a multiple of that",
                         running->where(thread).c_str(), what, line, offset, end));
  }
  // Read as the lane comes, not once all have: a row that another lane writes needs a barrier.
  memcpy(operands.row, row, sizeof(operands.row));
  const WarpWork work = count == 1   ? transposed ? distribute_matrices<1, true> : distribute_matrices<1, false>
                        : count == 2 ? transposed ? distribute_matrices<2, true> : distribute_matrices<2, false>
                                     : transposed ? distribute_matrices<4, true> : distribute_matrices<4, false>;
  work_together(work, &operands, what, line);
}

void multiply(Mma mma, float* d, const unsigned* a, const unsigned* b, const char* what, int line, TensorCores cores) {
  MmaOperands operands{d, a, b};
  work_together(cores == TensorCores::kHopper ? product_of<Hopper>(mma) : product_of<Ampere>(mma), &operands, what, line);
}

void copy_async(void* shared, const void* global, size_t bytes, size_t zero_fill, const char* what, int line) {
  Thread& thread = running->current();
  const bool served = (bytes == 4 || bytes == 8 || bytes == 16) && zero_fill <= bytes;
  if (!served || reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      (zero_fill < bytes && reinterpret_cast<uintptr_t>(global) % bytes != 0)) {
    running->fail(format("%s: %s in line %d of %zu bytes, %zu of them zeros: it copies 4, 8 or 16 bytes, both addresses "
                         "multiples of that",
                         running->where(thread).c_str(), what, line, bytes, zero_fill));
  }
  Copy copy{static_cast<unsigned char*>(shared), {}, bytes, thread.groups_committed};
  memcpy(copy.data, global, bytes - zero_fill);
  fill_uninitialized(shared, bytes);
  thread.copies.push_back(copy);
}

void commit_copies() { ++running->current().groups_committed; }

void wait_for_copies(size_t groups_left_in_flight) {
  Thread& thread = running->current();
  // Copies not yet committed belong to no group and stay in flight.
  const size_t landing = thread.groups_committed - std::min<size_t>(thread.groups_committed, groups_left_in_flight);
  size_t landed = 0;
  for (; landed < thread.copies.size() && thread.copies[landed].group < landing; ++landed) {
    const Copy& copy = thread.copies[landed];
    memcpy(copy.target, copy.data, copy.bytes);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + landed);
}

int allow_shared_bytes(const void* kernel, int bytes) {
  message.clear();
  if (bytes < 0 || bytes > config.shared_bytes_per_block) {
    return refuse(cudaErrorInvalidValue, format("%d bytes of dynamic shared memory were asked for, the card allows %lld",
                                                bytes, (long long)config.shared_bytes_per_block));
  }
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  allowed_shared_bytes[kernel] = bytes;
  return cudaSuccess;
}

int launch(KernelCall call, const void* kernel, dim3 grid_blocks, dim3 grid_threads, void** parameters,
           size_t shared) {
  message.clear();
  const uint64_t threads = uint64_t(grid_threads.x) * grid_threads.y * grid_threads.z;
  const uint64_t blocks = uint64_t(grid_blocks.x) * grid_blocks.y * grid_blocks.z;
  if (threads < 1 || threads > uint64_t(config.threads_per_block)) {
    return refuse(cudaErrorInvalidConfiguration, format("a block of %llu threads, the card allows %d",
                                                        (unsigned long long)threads, config.threads_per_block));
  }
  if (blocks < 1 || grid_blocks.y > 65535 || grid_blocks.z > 65535) {
    return refuse(cudaErrorInvalidConfiguration, format("a grid of %u x %u x %u blocks, y and z reach to 65535",
                                                        grid_blocks.x, grid_blocks.y, grid_blocks.z));
  }
  {
    const std::lock_guard<std::mutex> lock(allowed_mutex);
    const auto found = allowed_shared_bytes.find(kernel);
    const size_t asked = found == allowed_shared_bytes.end() ? kAllowedUnasked : std::max(kAllowedUnasked, found->second);
    const size_t allowed = std::min<size_t>(asked, config.shared_bytes_per_block);
    if (shared > allowed) {
      return refuse(cudaErrorInvalidValue,
                    format("%zu bytes of dynamic shared memory, %zu allowed (beyond 48 KiB after "
                           "cudaFuncSetAttribute, on this card at most %lld)",
                           shared, allowed, (long long)config.shared_bytes_per_block));
    }
  }
  const Grid grid{call, kernel, parameters, grid_blocks, grid_threads, shared};
  std::atomic<uint64_t> next{0};
  std::mutex failure_mutex;
  std::string failure;
  const auto work = [&] {
    fenv_t environment;
    feholdexcept(&environment);
    {
      Block block(grid);
      running = &block;
      for (uint64_t number; (number = next++) < blocks;) {
        const std::string why = block.run(number);
        if (why.empty()) continue;
        const std::lock_guard<std::mutex> lock(failure_mutex);
        if (failure.empty()) failure = why;
        next = blocks;
        break;
      }
      running = nullptr;
    }
    fesetenv(&environment);
  };
  const uint64_t wanted = config.host_threads > 0 ? config.host_threads : std::thread::hardware_concurrency();
  const uint64_t host_threads = std::max<uint64_t>(std::min({wanted, blocks, kMaxFibers / threads}), 1);
  std::vector<std::thread> helpers;
  // Host threads of their own even for a single one: thread-local shared memory goes away with them.
  for (uint64_t i = 0; i < host_threads; ++i) helpers.emplace_back(work);
  for (std::thread& helper : helpers) helper.join();
  return failure.empty() ? cudaSuccess : refuse(cudaErrorLaunchFailure, failure);
}

}  // namespace emulation

void emulation_configure(const emulation::Config* config) { emulation::config = *config; }

const char* emulation_message() { return emulation::message.c_str(); }
