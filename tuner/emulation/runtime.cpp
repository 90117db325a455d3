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
#include "tensor_map.h"

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

// A product that a thread has started and not yet waited for.
struct Pending {
  Product product;
  unsigned a[4];               // as they were
  std::vector<float> before;   // what the first product of a chain found in d
  unsigned group;
};

// A barrier in shared memory.
struct Barrier {
  unsigned arrivals;  // in a phase
  unsigned missing;   // of this phase
  int64_t bytes;      // announced and not there
  uint64_t phase;
};

// Copies of boxes under way. Places are bytes of shared memory.
struct BoxCopy {
  BoxMap map;
  int corner[kRank];
  size_t place;
  Barrier* barrier;    // of a load
  struct Thread* thread;  // of a store, and its group
  unsigned group;
};

// Who has come to a named barrier.
struct Meeting {
  int threads = 0, arrived = 0;
};

enum class State { kReady, kAtBarrier, kAtWarp, kAtPhase, kAtMeeting, kAtProducts, kExited };

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
  // What it waits for: a phase of a barrier, or all at a named one.
  const Barrier* barrier = nullptr;
  unsigned parity = 0;
  int meeting = 0;
  std::vector<Pending> products;
  unsigned product_groups = 0, groups_left = 0;
  bool fenced = false;
  unsigned store_groups = 0;
  bool wrote_matrices = false;  // since its last fence
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
      thread->products.clear();
      thread->product_groups = thread->store_groups = 0;
      thread->fenced = thread->wrote_matrices = false;
    }
    barriers_.clear();
    loads_.clear();
    stores_.clear();
    for (Meeting& meeting : meetings_) meeting = {};
    elected_ = int(random_.next() % kWarp);
    const unsigned slow = random_.next() % ((threads_.size() + kWarpgroup - 1) / kWarpgroup);
    do {
      random_.shuffle(warp_order_.data(), warp_order_.size());
      for (const unsigned warp : warp_order_) {
        // Where copies and barriers let warps drift apart, some fall behind, those of one warpgroup most.
        const uint64_t turns_of_eight = warp / 4 == slow ? 1 : 7;
        if (barriers_.empty() || random_.next() % 8 < turns_of_eight) run_warp(warp);
      }
    } while (failure_.empty() && (advance() || release_barrier()));
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
    check_finished();
    current_->state = State::kExited;
    if (EMULATION_ASAN) check_arithmetic();
    current_->fiber.yield();
  }

  // ---- barriers in shared memory

  Barrier& barrier_at(const void* address, const char* what, int line) {
    const auto found = barriers_.find(place_of(address, sizeof(uint64_t), sizeof(uint64_t), what, line));
    if (found == barriers_.end() || memcmp(address, &kBarrierMark, sizeof(kBarrierMark)) != 0) {
      fail(format("%s: %s in line %d of the %s at byte %td of shared memory", where(*current_).c_str(), what, line,
                  found == barriers_.end() ? "uninitialised barrier" : "overwritten barrier",
                  static_cast<const unsigned char*>(address) - shared_bytes));
    }
    return found->second;
  }

  void init_barrier(void* address, unsigned arrivals, const char* what, int line) {
    const size_t place = place_of(address, sizeof(uint64_t), sizeof(uint64_t), what, line);
    if (arrivals < 1 || arrivals >= 1u << 20 || barriers_.count(place)) {
      fail(format("%s: %s in line %d for %u arrivals%s", where(*current_).c_str(), what, line, arrivals,
                  barriers_.count(place) ? ", where a barrier is already" : ": 1 to 1048575 are served"));
    }
    memcpy(address, &kBarrierMark, sizeof(kBarrierMark));
    barriers_[place] = {arrivals, arrivals, 0, 0};
  }

  void arrive(void* address, unsigned bytes, const char* what, int line) {
    Barrier& barrier = barrier_at(address, what, line);
    if (barrier.missing == 0) {
      fail(format("%s: %s in line %d is one arrival more than the %u of a phase", where(*current_).c_str(), what, line,
                  barrier.arrivals));
    }
    barrier.bytes += bytes;
    --barrier.missing;
    complete(barrier);
  }

  void wait_for_phase(const void* address, unsigned parity, const char* what, int line) {
    const Barrier& barrier = barrier_at(address, what, line);
    if ((barrier.phase & 1) != (parity & 1)) return;
    current_->barrier = &barrier;
    current_->parity = parity & 1;
    wait(State::kAtPhase, what, line);
  }

  void meet(int id, int threads, bool waits, const char* what, int line) {
    if (id < 0 || id > 15 || threads < kWarp || threads % kWarp != 0 || threads > int(threads_.size())) {
      fail(format("%s: %s in line %d at barrier %d for %d threads: 0 to 15 exist, for whole warps of the block's %zu",
                  where(*current_).c_str(), what, line, id, threads, threads_.size()));
    }
    Meeting& meeting = meetings_[id];
    if (meeting.arrived > 0 && meeting.threads != threads) {
      fail(format("%s: %s in line %d at barrier %d for %d threads, others came to it for %d", where(*current_).c_str(),
                  what, line, id, threads, meeting.threads));
    }
    meeting.threads = threads;
    if (++meeting.arrived == threads) {
      meeting.arrived = 0;
      for (auto& thread : threads_) {
        if (thread->state == State::kAtMeeting && thread->meeting == id) thread->state = State::kReady;
      }
    } else if (waits) {
      current_->meeting = id;
      wait(State::kAtMeeting, what, line);
    }
  }

  // ---- the copy engine

  void load_box(void* shared, const CUtensorMap* map, void* barrier_address, const int* corner, const char* what,
                int line) {
    Barrier& barrier = barrier_at(barrier_address, what, line);
    BoxCopy copy = box_copy(map, shared, corner, what, line);
    copy.barrier = &barrier;
    fill_uninitialized(shared, copy.map.bytes());
    loads_.push_back(copy);
  }

  void store_box(const CUtensorMap* map, const void* shared, const int* corner, const char* what, int line) {
    BoxCopy copy = box_copy(map, shared, corner, what, line);
    copy.thread = current_;
    copy.group = current_->store_groups;
    const unsigned group = current_->index / kWarpgroup * kWarpgroup;
    for (unsigned i = group; i < std::min<size_t>(group + kWarpgroup, threads_.size()); ++i) {
      if (!threads_[i]->wrote_matrices) continue;
      fail(format("%s: %s in line %d, but thread %u has written matrices to shared memory without fence_proxy_async",
                  where(*current_).c_str(), what, line, i));
    }
    stores_.push_back(copy);
  }

  void check_map(const CUtensorMap* map, const char* what, int line) {
    if (BoxMap::of(map).magic == BoxMap::kMagic) return;
    fail(format("%s: %s in line %d of what is no tensor map", where(*current_).c_str(), what, line));
  }

  // Lets stores of the running thread's earlier groups read what they store.
  void wait_for_stores(unsigned groups_left) {
    const Thread& thread = *current_;
    const unsigned end = thread.store_groups - std::min(thread.store_groups, groups_left);
    for (size_t i = 0; i < stores_.size();) {
      stores_[i].thread == &thread && stores_[i].group < end ? land_store(i) : void(++i);
    }
  }

  // ---- products of warpgroups

  void start_product(const Product& product) {
    Thread& thread = *current_;
    if (!thread.fenced) {
      fail(format("%s: %s in line %d without wgmma_fence since registers could last be touched", where(thread).c_str(),
                  product.what, product.line));
    }
    Pending pending{product, {}, {}, thread.product_groups};
    if (product.a) memcpy(pending.a, product.a, sizeof(pending.a));
    bool chained = false;
    for (const Pending& other : thread.products) chained |= other.product.d == product.d;
    const int count = product.columns / 2;
    if (!chained) {
      pending.before.assign(product.d, product.d + count);
      fill_uninitialized(product.d, count * sizeof(float));
    }
    thread.products.push_back(std::move(pending));
  }

  void wait_for_products(unsigned groups_left, const char* what, int line) {
    Thread& thread = *current_;
    thread.fenced = false;
    thread.groups_left = groups_left;
    const unsigned first = thread.index / kWarpgroup * kWarpgroup;
    if (first + kWarpgroup > threads_.size()) {
      fail(format("%s called %s in line %d in a warpgroup of %zu threads: it takes all %u", where(thread).c_str(), what,
                  line, threads_.size() - first, kWarpgroup));
    }
    // State and line are set by wait(), which yields unless this thread is the last of its warpgroup to come.
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
      const Thread& other = *threads_[i];
      if (&other == &thread) continue;
      if (other.state != State::kAtProducts || other.line != line) {
        wait(State::kAtProducts, what, line);
        return;
      }
    }
    multiply_group(first, what, line);
    for (unsigned i = first; i < first + kWarpgroup; ++i) threads_[i]->state = State::kReady;
  }

  int elected_lane() const { return elected_; }

  // The byte of shared memory that an address is, which an access of so many bytes may be at.
  size_t place_of(const void* address, size_t bytes, size_t alignment, const char* what, int line) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared_bytes;
    if (offset < 0 || offset + ptrdiff_t(bytes) > ptrdiff_t(grid_.shared_bytes) || offset % alignment != 0) {
      fail(format("%s: %s in line %d at byte %td of %zu bytes of shared memory: it takes %zu bytes from a multiple of %zu",
                  where(*current_).c_str(), what, line, offset, grid_.shared_bytes, bytes, alignment));
    }
    return offset;
  }

  std::string where(const Thread& thread) const {
    return format("block %u, thread %u", blockIdx.x, thread.index);
  }

 private:
  static constexpr unsigned kWarpgroup = 128;
  static constexpr uint64_t kBarrierMark = 0x7265697272616221;

  // Ends a phase whose arrivals and bytes are all there.
  void complete(Barrier& barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.arrivals;
    for (auto& thread : threads_) {
      if (thread->state == State::kAtPhase && thread->barrier == &barrier && thread->parity != (barrier.phase & 1)) {
        thread->state = State::kReady;
      }
    }
  }

  BoxCopy box_copy(const CUtensorMap* map, const void* shared, const int* corner, const char* what, int line) {
    check_map(map, what, line);
    BoxCopy copy{BoxMap::of(map), {}, 0, nullptr, nullptr, 0};
    memcpy(copy.corner, corner, sizeof(copy.corner));
    copy.place = place_of(shared, copy.map.bytes(), 128, what, line);
    return copy;
  }

  void land_load(size_t i) {
    const BoxCopy copy = loads_[i];
    loads_.erase(loads_.begin() + i);
    copy.map.load(copy.corner, shared_bytes, copy.place);
    copy.barrier->bytes -= copy.map.bytes();
    complete(*copy.barrier);
  }

  void land_store(size_t i) {
    const BoxCopy copy = stores_[i];
    stores_.erase(stores_.begin() + i);
    copy.map.store(copy.corner, shared_bytes, copy.place);
  }

  // When no thread can go on: lets some copies land, in any order. Whether there is more to do then.
  bool advance() {
    bool ready = false;
    if (!barriers_.empty() || !stores_.empty()) {
      for (const auto& thread : threads_) ready |= thread->state == State::kReady;
    }
    const size_t count = loads_.size() + stores_.size();
    if (count == 0) return ready;
    // At least one, unless a thread that a phase has woken may still overtake it.
    for (size_t landing = random_.next() % (count + ready) + !ready; landing > 0; --landing) {
      const size_t left = loads_.size() + stores_.size();
      if (left == 0) break;
      const size_t i = random_.next() % left;
      i < loads_.size() ? land_load(i) : land_store(i - loads_.size());
    }
    return true;
  }

  // A thread may not end with work under way that needs it or its shared memory.
  void check_finished() {
    const Thread& thread = *current_;
    if (!thread.products.empty()) {
      const Product& product = thread.products[0].product;
      fail(format("%s ended with %s of line %d not waited for", where(thread).c_str(), product.what, product.line));
    }
    for (const BoxCopy& copy : stores_) {
      if (copy.thread == &thread) {
        fail(format("%s ended with a tma_store from byte %zu of shared memory not waited for", where(thread).c_str(),
                    copy.place));
      }
    }
  }

  // Computes the groups of products that a warpgroup waits for, from shared memory as it is now.
  void multiply_group(unsigned first, const char* what, int line) {
    Thread& leader = *threads_[first];
    const unsigned end = leader.product_groups - std::min(leader.product_groups, leader.groups_left);
    size_t done = 0;
    for (; done < leader.products.size() && leader.products[done].group < end; ++done) multiply(first, done);
    const size_t started = leader.products.size();
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
      Thread& thread = *threads_[i];
      if (thread.product_groups != leader.product_groups || thread.groups_left != leader.groups_left ||
          thread.products.size() != started) {
        fail(format("divergent %s in line %d of block %u: threads %u and %u have started different products", what, line,
                    blockIdx.x, leader.index, thread.index));
      }
      thread.products.erase(thread.products.begin(), thread.products.begin() + done);
    }
  }

  // Product number `index` of the warpgroup's, as mma instructions on tiles of 16 by 8.
  void multiply(unsigned first, size_t index) {
    const Product& product = threads_[first]->products[index].product;
    Pending* lanes[kWarpgroup];
    for (unsigned i = 0; i < kWarpgroup; ++i) {
      Thread& thread = *threads_[first + i];
      if (index >= thread.products.size() || thread.products[index].product.line != product.line ||
          thread.products[index].product.a_shared != product.a_shared ||
          thread.products[index].product.b != product.b) {
        fail(format("divergent %s in line %d of block %u: threads %u and %u multiply different things", product.what,
                    product.line, blockIdx.x, first, first + i));
      }
      Pending& pending = thread.products[index];
      lanes[i] = &pending;
      if (product.a && memcmp(pending.a, pending.product.a, sizeof(pending.a)) != 0) {
        fail(format("%s: the factor in registers of %s in line %d changed before it was waited for",
                    where(thread).c_str(), product.what, product.line));
      }
      float* d = pending.product.d;
      if (!pending.before.empty()) memcpy(d, pending.before.data(), pending.before.size() * sizeof(float));
      if (!product.accumulate) std::fill(d, d + product.columns / 2, 0.0f);
    }
    const WarpWork work = product_of<Hopper>(product.mma);
    // Of A, rows 16 w + g and g + 8 are warp w's, lane 4 g + c; columns 2 c, 2 c + 8 and their neighbours.
    unsigned a[kWarpgroup][4];
    for (unsigned i = 0; i < kWarpgroup; ++i) {
      if (product.a) {
        memcpy(a[i], lanes[i]->a, sizeof(a[i]));
        continue;
      }
      for (int f = 0; f < 4; ++f) {
        const int row = i / 32 * 16 + i % 32 / 4 + f % 2 * 8, column = i % 4 * 2 + f / 2 * 8;
        a[i][f] = element_by_rows(product.a_shared, row, column, product) |
                  element_by_rows(product.a_shared, row, column + 1, product) << 16;
      }
    }
    for (int n = 0; n < product.columns; n += 8) {
      unsigned b[kWarp][2];
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int f = 0; f < 2; ++f) {
          const int column = n + lane / 4, k = lane % 4 * 2 + 8 * f;
          const auto element = [&](int k) {
            return product.b_by_rows ? element_by_columns(product.b, column, k, product)
                                     : element_by_rows(product.b, column, k, product);
          };
          b[lane][f] = element(k) | element(k + 1) << 16;
        }
      }
      for (unsigned warp = 0; warp < 4; ++warp) {
        MmaOperands operands[kWarp];
        void* pointers[kWarp];
        for (int lane = 0; lane < kWarp; ++lane) {
          const unsigned i = warp * kWarp + lane;
          operands[lane] = {lanes[i]->product.d + n / 2, a[i], b[lane]};
          pointers[lane] = &operands[lane];
        }
        work(pointers);
      }
    }
  }

  // An element of a factor whose rows of 16 columns lie one after the other ("K-major"), `row` of them on.
  unsigned element_by_rows(uint64_t descriptor, int row, int column, const Product& product) {
    const unsigned row_bytes = row_bytes_of(descriptor, product);
    const size_t groups = descriptor >> 32 & 0x3fff;
    return element_at(start_of(descriptor) + row / 8 * (groups << 4) + row % 8 * row_bytes + column * 2, row_bytes, product);
  }

  // An element of a factor of 16 rows of N columns ("MN-major"): chunks of columns, groups of eight rows.
  unsigned element_by_columns(uint64_t descriptor, int column, int row, const Product& product) {
    const unsigned row_bytes = row_bytes_of(descriptor, product), chunk = row_bytes / 2;
    const size_t chunks = descriptor >> 16 & 0x3fff, groups = descriptor >> 32 & 0x3fff;
    return element_at(start_of(descriptor) + column / chunk * (chunks << 4) + row / 8 * (groups << 4) +
                          row % 8 * row_bytes + column % chunk * 2,
                      row_bytes, product);
  }

  static size_t start_of(uint64_t descriptor) { return (descriptor & 0x3fff) << 4; }

  unsigned row_bytes_of(uint64_t descriptor, const Product& product) {
    const unsigned mode = descriptor >> 62;
    if (mode == 0 || descriptor >> 49 & 7) {
      fail(format("block %u: %s in line %d by the descriptor 0x%016llx: only swizzled layouts are emulated, from "
                  "aligned starts",
                  blockIdx.x, product.what, product.line, (unsigned long long)descriptor));
    }
    return 256u >> mode;
  }

  unsigned element_at(size_t place, unsigned row_bytes, const Product& product) {
    if (place + 2 > grid_.shared_bytes) {
      fail(format("block %u: %s in line %d reads byte %zu of %zu bytes of shared memory", blockIdx.x, product.what,
                  product.line, place, grid_.shared_bytes));
    }
    uint16_t bits;
    memcpy(&bits, shared_bytes + swizzled(place, row_bytes), sizeof(bits));
    return bits;
  }

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
        case State::kAtPhase:
        case State::kAtMeeting:
        case State::kAtProducts:
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
  std::map<size_t, Barrier> barriers_;  // by their place
  std::vector<BoxCopy> loads_, stores_;
  Meeting meetings_[16];
  int elected_ = 0;
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

// What one lane brings to a stmatrix.
struct StoreOperands {
  void* row;
  const unsigned* registers;
};

template <int kCount>
void collect_matrices(void* const lanes[kWarp]) {
  const auto operands = [lanes](int lane) { return static_cast<StoreOperands*>(lanes[lane]); };
  for (int lane = 0; lane < 8 * kCount; ++lane) {
    // Row r of matrix i is four lanes' register i.
    uint32_t row[4];
    for (int c = 0; c < 4; ++c) row[c] = operands(lane % 8 * 4 + c)->registers[lane / 8];
    memcpy(operands(lane)->row, row, sizeof(row));
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

void start_product(const Product& product) { running->start_product(product); }
void fence_products() { running->current().fenced = true; }
void commit_products() { ++running->current().product_groups; }
void wait_for_products(unsigned groups_left, const char* what, int line) {
  running->wait_for_products(groups_left, what, line);
}

void init_barrier(unsigned long long* barrier, unsigned arrivals, const char* what, int line) {
  running->init_barrier(barrier, arrivals, what, line);
}
void arrive(unsigned long long* barrier, unsigned bytes, const char* what, int line) {
  running->arrive(barrier, bytes, what, line);
}
void wait_for_phase(unsigned long long* barrier, unsigned parity, const char* what, int line) {
  running->wait_for_phase(barrier, parity, what, line);
}
void meet(int id, int threads, bool wait, const char* what, int line) { running->meet(id, threads, wait, what, line); }

void check_map(const CUtensorMap* map, const char* what, int line) { running->check_map(map, what, line); }
void load_box(void* shared, const CUtensorMap* map, unsigned long long* barrier, const int* corner, const char* what,
              int line) {
  running->load_box(shared, map, barrier, corner, what, line);
}
void store_box(const CUtensorMap* map, const void* shared, const int* corner, const char* what, int line) {
  running->store_box(map, shared, corner, what, line);
}
void commit_stores() { ++running->current().store_groups; }
void wait_for_stores(unsigned groups_left) { running->wait_for_stores(groups_left); }
void fence_proxy() { running->current().wrote_matrices = false; }
int elected_lane() { return running->elected_lane(); }

void store_matrices(void* row, const unsigned* registers, int count, const char* what, int line) {
  Thread& thread = running->current();
  StoreOperands operands{row, registers};
  if (int(thread.index % kWarp) < 8 * count) running->place_of(row, 16, 16, what, line);
  thread.wrote_matrices = true;
  work_together(count == 2 ? collect_matrices<2> : collect_matrices<4>, &operands, what, line);
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

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known ? cudaSuccess : cudaErrorInvalidValue;
}

void emulation_configure(const emulation::Config* config) { emulation::config = *config; }

const char* emulation_message() { return emulation::message.c_str(); }
