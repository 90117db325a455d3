// The run-time behind cuda_emulation.h: clusters of blocks on host threads, CUDA threads as fibers, barriers, warp-wide
// exchanges, asynchronous copies and shared memory; of Hopper's units scheduler.h and those that use it.
//
// What a card leaves undefined is made to hurt here: threads run in an order drawn from a seed, each as far as it can
// get, so that a missing barrier shows in the result; memory that nobody wrote is NaN, and so is the target of an
// asynchronous copy until it is waited for; a barrier that not all reach ends the launch with a message.
#include "cuda_emulation.h"

#include <fenv.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "barriers.h"
#include "copy_engine.h"
#include "matrix_product.h"
#include "races.h"
#include "sanitizer.h"
#include "scheduler.h"
#include "subnormals.h"
#include "warpgroups.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;
__thread unsigned char shared_bytes[emulation::kMaxSharedBytes + emulation::kSharedGuardBytes]
    __attribute__((aligned(1024)));

namespace emulation {
namespace {

// Fibers alive at once, over all host threads: each takes two memory mappings, of 65530 that Linux grants a process.
constexpr uint64_t kMaxFibers = 24 * 1024;

Config config;
std::vector<std::pair<const char*, const char*>> known_memory;  // where each begins and ends
unsigned cluster_blocks = 1;
thread_local std::string message;
thread_local bool front_waits = false;  // whether the last launch from this host thread was a dependent one

// How the blocks of a launch wait for the one in front of it.
struct Waits {
  std::atomic<bool> any{false};  // whether some block has
  std::atomic<bool> at_end{false};  // one has, only so that the launch does not end sooner
  std::mutex mutex;
  std::string early;  // who read first what earlier launches have left, without having waited
};

// What a launch is, for all its blocks.
struct Grid {
  KernelCall call;
  const void* kernel;
  void** parameters;
  dim3 blocks, threads;
  size_t shared_bytes;
  bool dependent;  // on launches in front of it, for which it waits
  Waits* waits;
  // Host threads that run blocks, those of them whose block waits for another's number, and whether a block has failed.
  std::atomic<unsigned>*running, *waiting;
  const std::atomic<bool>* failed;
};

class Cluster;

// Runs one block after the other on the host thread that made it.
class Block : public Scheduler {
 public:
  explicit Block(const Grid& grid) : Scheduler(grid.threads.x * grid.threads.y * grid.threads.z, grid.shared_bytes), grid_(grid) {
    for (unsigned i = 0; i < size(); ++i) {
      thread(i).position = {i % grid.threads.x, i / grid.threads.x % grid.threads.y,
                            i / grid.threads.x / grid.threads.y};
    }
    poison(shared_bytes + grid.shared_bytes, sizeof(shared_bytes) - grid.shared_bytes);
  }

  ~Block() override { unpoison(shared_bytes, sizeof(shared_bytes)); }

  void begin(uint64_t number) {
    const dim3 blocks = grid_.blocks;
    position_ = {unsigned(number % blocks.x), unsigned(number / blocks.x % blocks.y),
                 unsigned(number / blocks.x / blocks.y)};
    ended_ = false;
    enter();
    blockDim = grid_.threads;
    gridDim = grid_.blocks;
    fill_uninitialized(shared_bytes, grid_.shared_bytes);
    if (!EMULATION_ASAN) fill_uninitialized(shared_bytes + grid_.shared_bytes, kSharedGuardBytes);
    start(config.seed * 0x100000001b3 + number);
    view.start();
    phases.start();
    named.start();
    awaited_numbers_.clear();
    races.start();
    engine.start();
    warpgroups.start();
    elected_lane = random().next() % kWarp;
  }

  // What follows is in this block; shared memory was kept in `aside`, unless it is there already.
  void enter(const unsigned char* aside = nullptr) {
    blockIdx = position_;
    if (aside) memcpy(shared_bytes, aside, kept_bytes());
    set_aside(nullptr);
  }

  // Keeps shared memory until the block is entered again.
  void leave(unsigned char* aside) {
    memcpy(aside, shared_bytes, kept_bytes());
    set_aside(aside);
  }

  // Of shared memory, with what an error may have changed behind it.
  size_t kept_bytes() const { return grid_.shared_bytes + (EMULATION_ASAN ? 0 : kSharedGuardBytes); }

  // Lets each warp run, and copies too: these must, if nothing else goes on in the cluster. False if nothing did, and the
  // block waits for others; or it has ended, or failed.
  bool run_round(bool others_wait) {
    hear_numbers();
    run_warps(phases.used());
    if (failed()) return false;
    const Runnable threads = runnable();
    ended_ = threads == Runnable::kNone && all_exited();
    if (ended_) {
      check_end();
      return false;
    }
    if (engine.busy()) return engine.advance(!others_wait || threads == Runnable::kSome) || threads != Runnable::kNone;
    if (threads != Runnable::kNone || release_barrier()) return true;
    return !awaited_numbers_.empty() && await_numbers();
  }

  // Until a block of another cluster has left the number there; other threads of this block go on meanwhile.
  // Without a number, until any but 0 is there.
  void wait_for_number(const int* place, std::optional<int> number, const char* what, int line) {
    const AwaitedNumber awaited{&current(), place, number};
    if (awaited.is_there()) return;
    awaited_numbers_.push_back(awaited);
    wait(State::kAtNumber, what, line);
  }

  bool ended() const { return ended_; }
  bool dependent() const { return grid_.dependent; }
  Waits& waits() const { return *grid_.waits; }

  void note_early(const std::string& what) {
    const std::lock_guard<std::mutex> lock(waits().mutex);
    if (waits().early.empty()) waits().early = what;
  }

  // Whether all its threads have come to the cluster's barrier, but for those that have ended.
  bool at_cluster_barrier() {
    for (unsigned i = 0; i < size(); ++i) {
      const State state = thread(i).state;
      if (state != State::kAtCluster && state != State::kExited) return false;
    }
    return true;
  }

  bool arrived(unsigned times) {
    for (unsigned i = 0; i < size(); ++i) {
      if (thread(i).state != State::kExited && thread(i).cluster_arrivals < times) return false;
    }
    return true;
  }

  // The life of the running thread in this block.
  void run_kernel() override {
    grid_.call(grid_.kernel, grid_.parameters);
    warpgroups.check_thread_end();
    engine.check_thread_end();
    current().state = State::kExited;
    if (EMULATION_ASAN) check_arithmetic();
    current().fiber.yield();
  }

  AsyncView view{*this};
  PhaseBarriers phases{*this};
  NamedBarriers named{*this};
  Races races{*this};
  CopyEngine engine{*this, phases, view};
  Warpgroups warpgroups{*this, view};
  unsigned elected_lane = 0;  // by elect.sync, always the same

 private:
  // What a thread waits for in global memory.
  struct AwaitedNumber {
    Thread* thread;
    const int* place;
    std::optional<int> number;

    int there() const { return __atomic_load_n(place, __ATOMIC_ACQUIRE); }
    bool is_there() const { return number ? there() == *number : there() != 0; }
  };

  // Lets threads go on whose number is there. Whether there are some.
  bool hear_numbers() {
    const auto is_awaited = [](const AwaitedNumber& each) { return !each.is_there(); };
    const auto heard = std::partition(awaited_numbers_.begin(), awaited_numbers_.end(), is_awaited);
    const bool any = heard != awaited_numbers_.end();
    for (auto each = heard; each != awaited_numbers_.end(); ++each) each->thread->state = State::kReady;
    awaited_numbers_.erase(heard, awaited_numbers_.end());
    return any;
  }

  // For a block that can do nothing else, until a number is there: one that a block leaves which has been begun, for no
  // other gets this host thread. Where all blocks wait so for long, nobody does; false then.
  bool await_numbers() {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::seconds kLong{20};
    ++*grid_.waiting;
    bool heard = false, in_vain = false;
    for (auto since = Clock::now(); !heard && !in_vain;) {
      heard = hear_numbers();
      const unsigned others = *grid_.running - 1;
      if (*grid_.waiting <= others) since = Clock::now();
      in_vain = *grid_.failed || others == 0 || Clock::now() - since > kLong;
      std::this_thread::yield();
    }
    --*grid_.waiting;
    if (heard) return true;
    const AwaitedNumber& one = awaited_numbers_.front();
    const std::string awaited = one.number ? format("%d", *one.number) : "any";
    report(format("%s: %s in line %d for %s, where %d is: no block leaves it there", where(*one.thread).c_str(),
                  one.thread->waits_at, one.thread->line, awaited.c_str(), one.there()));
    return false;
  }

  void check_end() {
    engine.check_block_end();
    warpgroups.check_block_end();
    if (!EMULATION_ASAN) check_guard();
    if (grid_.dependent) check_waits();
  }

  // A block waits as a whole, or ends as one that has nothing to do. Of one whose threads wait alone, or not at all,
  // `load_bytes` sees who reads without having waited.
  void check_waits() {
    const Thread* one_that_did_not = nullptr;
    unsigned waited = 0;
    bool alone = false;
    for (unsigned i = 0; i < size(); ++i) {
      if (thread(i).waited_for_launches) {
        ++waited;
        alone |= thread(i).waited_alone;
      } else {
        one_that_did_not = &thread(i);
      }
    }
    if (waited > 0) grid_.waits->any = true;
    if (waited > 0 && one_that_did_not && !alone) {
      report(where(*one_that_did_not) + " did not wait for the launch in front of it, others of the block did");
    }
  }

  bool all_exited() {
    for (unsigned i = 0; i < size(); ++i) {
      if (thread(i).state != State::kExited) return false;
    }
    return true;
  }

  std::string awaited(const Thread& thread) const override {
    switch (thread.state) {
      case State::kPolls:
      case State::kAtPhase: return phases.describe(thread);
      case State::kAtMeeting: return named.describe(thread);
      case State::kAtProducts: return warpgroups.describe(thread);
      case State::kAtCluster: return " for all threads of the cluster";
      default: return "";
    }
  }

  void check_guard() {
    const unsigned char* guard = shared_bytes + grid_.shared_bytes;
    for (size_t i = 0; i < kSharedGuardBytes; i += sizeof(kUninitialized)) {
      if (memcmp(guard + i, &kUninitialized, sizeof(kUninitialized)) != 0) {
        report(format("block %u wrote to byte %zu of %zu bytes of shared memory", blockIdx.x, grid_.shared_bytes + i,
                      grid_.shared_bytes));
        return;
      }
    }
  }

  const Grid& grid_;
  uint3 position_{};
  bool ended_ = false;
  std::vector<AwaitedNumber> awaited_numbers_;
};

// The block that this host thread runs, and its cluster.
__thread Block* running = nullptr;
__thread Cluster* cluster = nullptr;

// Neighbouring blocks that take turns on one host thread and reach into each other's shared memory. That of the block
// whose turn it is lies where the kernel looks for it, the others' are set aside.
class Cluster {
 public:
  Cluster(const Grid& grid, unsigned count) {
    for (unsigned rank = 0; rank < count; ++rank) {
      blocks_.push_back(std::make_unique<Block>(grid));
      order_.push_back(rank);
    }
    if (count > 1) aside_.assign(count, std::vector<unsigned char>(blocks_[0]->kept_bytes()));
  }

  unsigned size() const { return blocks_.size(); }

  // An empty string, or why a block of cluster `number` failed; after that the object is of no more use.
  std::string run(uint64_t number) {
    const uint64_t first = number * size();
    random_ = Random(config.seed * 0x100000001b3 + ~first);
    cluster = this;
    for (unsigned rank = 0; rank < size(); ++rank) {
      if (rank > 0) leave();
      turn_ = rank;
      running = blocks_[rank].get();
      running->begin(first + rank);
    }
    while (failure().empty() && !all_ended()) pass();
    return failure();
  }

  // Whether all threads that have not ended have arrived so often.
  bool arrived(unsigned times) {
    return std::all_of(blocks_.begin(), blocks_.end(), [times](const auto& block) { return block->arrived(times); });
  }

  // A block that has not ended, for the running thread.
  Block& reach(unsigned rank, const char* what, int line) {
    if (rank >= size()) {
      running->fail(format("%s: %s in line %d at block %u of a cluster of %u", running->here().c_str(), what, line, rank,
                           size()));
    }
    if (blocks_[rank]->ended()) {
      running->fail(format("%s: %s in line %d at block %u, which has ended", running->here().c_str(), what, line,
                           blocks_[rank]->block()));
    }
    return *blocks_[rank];
  }

 private:
  // For a spell of passes one block falls behind the others, or none does.
  static constexpr unsigned kSpell = 32;

  // Lets the blocks run, in a new order. The slow one is seldom among them, unless the others wait for it.
  void pass() {
    const bool everyone = !going_;
    going_ = false;
    if (size() > 1) {
      random_.shuffle(order_.data(), size());
      if (passes_++ % kSpell == 0) slow_ = random_.next() % (size() + 1);
    }
    for (const unsigned rank : order_) {
      if (blocks_[rank]->ended() || (rank == slow_ && !everyone && random_.next() % 32 > 0)) continue;
      enter(rank);
      going_ |= running->run_round(everyone || size() == 1);
      if (running->failed()) return;
    }
    going_ |= release_barrier();
    for (const auto& block : blocks_) going_ = going_ || block->any_ready();
    if (everyone && !going_ && !all_ended()) report_deadlock();
  }

  void enter(unsigned rank) {
    if (rank == turn_) return;
    leave();
    turn_ = rank;
    running = blocks_[rank].get();
    running->enter(aside_[rank].data());
  }
  void leave() { running->leave(aside_[turn_].data()); }

  bool all_ended() const {
    return std::all_of(blocks_.begin(), blocks_.end(), [](const auto& block) { return block->ended(); });
  }

  // Whether all threads of the cluster that have not ended stood at its barrier and now go on; false too with a failure.
  bool release_barrier() {
    for (const auto& block : blocks_) {
      if (!block->at_cluster_barrier()) return false;
    }
    const Thread* one = nullptr;
    for (const auto& block : blocks_) {
      for (unsigned i = 0; i < block->size(); ++i) {
        Thread& thread = block->thread(i);
        if (thread.state == State::kExited) continue;
        if (!one) one = &thread;
        if (thread.line != one->line) {
          running->report(format("divergent %s: %s waits at line %d, %s at line %d", one->waits_at,
                                 one->scheduler->where(*one).c_str(), one->line, block->where(thread).c_str(),
                                 thread.line));
          return false;
        }
        thread.state = State::kReady;
      }
    }
    return one != nullptr;
  }

  void report_deadlock() {
    std::string text;
    for (unsigned rank = 0; rank < size(); ++rank) {
      if (blocks_[rank]->ended()) continue;
      text += (text.empty() ? "" : "; ") + blocks_[rank]->describe_deadlock();
    }
    running->report(text);
  }

  std::string failure() const {
    for (const auto& block : blocks_) {
      if (block->failed()) return block->failure();
    }
    return "";
  }

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<unsigned> order_;
  std::vector<std::vector<unsigned char>> aside_;  // shared memory, by block
  Random random_{0};
  unsigned turn_ = 0, slow_ = 0, passes_ = 0;
  bool going_ = true;  // whether some block got somewhere in the last pass
};

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
void distribute_matrices(void* const lanes[32]) {
  const auto operands = [lanes](int lane) { return static_cast<LoadOperands*>(lanes[lane]); };
  for (int lane = 0; lane < int(kWarp); ++lane) {
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
void collect_matrices(void* const lanes[32]) {
  const auto operands = [lanes](int lane) { return static_cast<StoreOperands*>(lanes[lane]); };
  for (int lane = 0; lane < 8 * kCount; ++lane) {
    // Row r of matrix i is four lanes' register i.
    uint32_t row[4];
    for (int c = 0; c < 4; ++c) row[c] = operands(lane % 8 * 4 + c)->registers[lane / 8];
    memcpy(operands(lane)->row, row, sizeof(row));
  }
}

void collect_transposed(void* const lanes[32]) {
  const auto operands = [lanes](int lane) { return static_cast<StoreOperands*>(lanes[lane]); };
  for (int lane = 0; lane < int(kWarp); ++lane) {
    // Column c of matrix i is a half of the register i of every fourth lane.
    const int column = lane % 8;
    uint16_t elements[8];
    for (int row = 0; row < 8; ++row) {
      elements[row] = operands(row * 4 + column / 2)->registers[lane / 8] >> 16 * (column % 2);
    }
    memcpy(operands(lane)->row, elements, sizeof(elements));
  }
}

std::mutex allowed_mutex;
std::map<const void*, int> allowed_shared_bytes;
constexpr int kAllowedUnasked = 48 * 1024;
std::map<const void*, bool> allowed_large_clusters;
constexpr unsigned kClusterUnasked = 8;

int refuse(cudaError_t error, std::string why) {
  message = std::move(why);
  return error;
}

}  // namespace

int lane_of_warp() { return running->current().index % kWarp; }

bool sync_block(const char* what, int line, bool predicate) {
  Thread& thread = running->current();
  thread.bits = predicate;
  const uint64_t turn = running->races.turn(Races::kOfBlock, 0);
  running->races.leave(Races::kOfBlock, 0, turn);
  running->wait(State::kAtBarrier, what, line);
  running->races.join(Races::kOfBlock, 0, turn);
  return thread.bits != 0;
}

void sync_warp(uint32_t mask, const char* what, int line) {
  Thread& thread = enter_exchange(mask, what, line);
  thread.source = thread.index % kWarp;
  const uint64_t id = uint64_t(thread.warp()) << 32 | mask, turn = running->races.turn(Races::kOfWarp, id);
  running->races.leave(Races::kOfWarp, id, turn);
  running->wait(State::kAtWarp, what, line, mask);
  running->races.join(Races::kOfWarp, id, turn);
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
    running->fail(format("%s called %s in line %d in a warp of %u threads: it takes all %u",
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

void add_to_sums(float* sums, const float* x, int count, const char* what, int line) {
  const Thread& thread = running->current();
  if (reinterpret_cast<uintptr_t>(sums) % (count * sizeof(float)) != 0) {
    running->fail(format("%s: %s in line %d of the address %p: it adds to %d numbers from a multiple of their bytes",
                         running->where(thread).c_str(), what, line, static_cast<void*>(sums), count));
  }
  for (int i = 0; i < count; ++i) add_at_once(sums + i, x[i]);
}

void multiply(Mma mma, float* d, const unsigned* a, const unsigned* b, const char* what, int line, TensorCores cores) {
  MmaOperands operands{d, a, b};
  work_together(cores == TensorCores::kHopper ? product_of<Hopper>(mma) : product_of<Ampere>(mma), &operands, what, line);
}

void start_product(const Product& product) { running->warpgroups.issue(product); }
void fence_products() { running->warpgroups.fence(); }
void commit_products() { running->warpgroups.commit(); }
void wait_for_products(unsigned groups_left, const char* what, int line) {
  running->warpgroups.wait(groups_left, what, line);
}

void init_barrier(unsigned long long* barrier, unsigned arrivals, const char* what, int line) {
  running->phases.init(barrier, arrivals, what, line);
}
void show_barriers() { running->phases.show(); }
void arrive(unsigned long long* barrier, unsigned bytes, const char* what, int line) {
  if (EMULATION_RACES) {
    const PhaseBarriers::Barrier& known = running->phases.at(*running, barrier, what, line);
    running->races.leave(Races::kPhases, known.place, known.phase);
  }
  running->phases.arrive(*running, barrier, bytes, what, line);
}
void arrive_at(unsigned long long* barrier, unsigned block, const char* what, int line) {
  cluster->reach(block, what, line).phases.arrive(*running, barrier, 0, what, line);
}
// What was done before a phase ended comes before what the running thread does.
static void join_phase(unsigned long long* barrier, unsigned parity) {
  running->races.join(Races::kPhases, reinterpret_cast<unsigned char*>(barrier) - shared_bytes, parity);
}

void wait_for_phase(unsigned long long* barrier, unsigned parity, const char* what, int line) {
  running->phases.wait(barrier, parity, what, line);
  join_phase(barrier, parity);
}
bool test_phase(unsigned long long* barrier, unsigned parity, const char* what, int line) {
  const bool ended = running->phases.test(barrier, parity, what, line);
  if (ended) join_phase(barrier, parity);
  return ended;
}

void meet(int id, int threads, bool waits, const char* what, int line) {
  // The instructions are of whole warps.
  int asked[] = {id, threads};
  const WarpWork compare = [](void* const lanes[32]) {
    const auto of = [lanes](int lane) { return static_cast<const int*>(lanes[lane]); };
    for (int lane = 1; lane < int(kWarp); ++lane) {
      if (std::equal(of(0), of(0) + 2, of(lane))) continue;
      running->fail(format("%s: a warp comes to barrier %d for %d threads and to barrier %d for %d",
                           running->where(running->current()).c_str(), of(0)[0], of(0)[1], of(lane)[0], of(lane)[1]));
    }
  };
  work_together(compare, asked, what, line);
  const unsigned turn = running->named.turn(id);
  running->races.leave(Races::kNamed, id, turn);
  running->named.meet(id, threads, waits, what, line);
  if (waits) running->races.join(Races::kNamed, id, turn);
}

void sync_cluster(const char* what, int line) {
  running->races.leave(Races::kOfCluster, 0, 0);
  running->wait(State::kAtCluster, what, line);
  running->races.join(Races::kOfCluster, 0, 0);
}

void arrive_at_cluster() {
  running->races.leave(Races::kOfCluster, 0, 0);
  ++running->current().cluster_arrivals;
}

void wait_for_cluster(const char* what, int line) {
  const unsigned times = running->current().cluster_arrivals;
  if (times == 0) running->fail(format("%s: %s in line %d before it has arrived", running->here().c_str(), what, line));
  while (!cluster->arrived(times)) running->wait(State::kPolls, what, line);
  running->races.join(Races::kOfCluster, 0, 0);
}

void write_block(void* shared, const void* values, size_t bytes, unsigned block, const char* what, int line) {
  const size_t place = running->place_of(shared, bytes, bytes, what, line);
  Block& target = cluster->reach(block, what, line);
  if (!target.arrived(1)) {
    running->fail(format("%s: %s in line %d at block %u, not all of which is known to have begun",
                         running->here().c_str(), what, line, target.block()));
  }
  memcpy(target.memory() + place, values, bytes);
}

void read_block(void* values, const void* shared, size_t bytes, unsigned block, const char* what, int line) {
  const size_t place = running->place_of(shared, bytes, bytes, what, line);
  memcpy(values, cluster->reach(block, what, line).memory() + place, bytes);
}

void send_to_block(unsigned shared, const void* values, unsigned barrier, const char* what, int line) {
  const unsigned block = shared >> kBlockShift, place = shared & kPlaceMask;
  if (barrier >> kBlockShift != block) {
    running->fail(format("%s: %s in line %d to block %u, to be counted in block %u: a barrier counts what comes to its own",
                         running->here().c_str(), what, line, block, barrier >> kBlockShift));
  }
  cluster->reach(block, what, line)
      .engine.send(*running, shared_bytes + place, values, shared_bytes + (barrier & kPlaceMask), what, line);
}

void check_map(const CUtensorMap* map, const char* what, int line) { CopyEngine::check_map(*running, map, what, line); }
bool is_memory(const void* address) {
  const auto holds = [&](const auto& each) { return address >= each.first && address < each.second; };
  return known_memory.empty() || std::any_of(known_memory.begin(), known_memory.end(), holds);
}
void load_box(void* shared, const CUtensorMap* map, unsigned long long* barrier, const Corner& corner,
              const char* what, int line) {
  running->engine.load(*running, shared, map, barrier, corner, what, line);
}
void multicast_box(void* shared, const CUtensorMap* map, unsigned long long* barrier, unsigned blocks,
                   const Corner& corner, const char* what, int line) {
  for (unsigned rank = 0; blocks >> rank; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    cluster->reach(rank, what, line).engine.load(*running, shared, map, barrier, corner, what, line);
  }
}
void store_box(const CUtensorMap* map, const void* shared, const Corner& corner, const char* what, int line) {
  running->engine.store(map, shared, corner, what, line);
}
// Tiles lie side by side because a launch has laid them out so, which in front of a dependent one is to be waited for.
void load_bytes(void* shared, const void* global, size_t bytes, unsigned long long* barrier, const char* what, int line) {
  if (running->dependent() && !running->current().waited_for_launches) {
    running->note_early(format("%s: %s in line %d before it has waited for the launch in front of it",
                               running->here().c_str(), what, line));
  }
  running->engine.load_bytes(shared, global, bytes, barrier, what, line);
}
void add_floats(float* global, const float* shared, size_t bytes, const char* what, int line) {
  running->engine.store_floats(global, shared, bytes, true, what, line);
}
void store_floats(float* global, const float* shared, size_t bytes, const char* what, int line) {
  running->engine.store_floats(global, shared, bytes, false, what, line);
}
void commit_stores() { running->engine.commit(); }
void wait_for_stores(unsigned groups_left, bool landed) { running->engine.wait(groups_left, landed); }
void discard(float* floats, size_t count, const char* what, int line) {
  if (reinterpret_cast<uintptr_t>(floats) % (count * sizeof(float)) != 0) {
    running->fail(format("%s: %s in line %d at %p, which does not begin a line of %zu bytes", running->here().c_str(), what,
                         line, static_cast<void*>(floats), count * sizeof(float)));
  }
  std::fill_n(floats, count, NAN);
}
void wait_for_number(const int* place, int number, const char* what, int line) {
  running->wait_for_number(place, number, what, line);
}
void wait_for_any_number(const int* place, const char* what, int line) {
  running->wait_for_number(place, std::nullopt, what, line);
}
void fence_proxy() { running->view.fence(); }

bool elect(const char* what, int line) {
  sync_warp(0xffffffff, what, line);
  return running->current().index % kWarp == running->elected_lane;
}

void share_registers(int registers, const char* what, int line) {
  sync_warp(0xffffffff, what, line);
  running->warpgroups.share_registers(registers, what, line);
}

void store_matrices(void* row, const unsigned* registers, int count, const char* what, int line, bool transposed) {
  StoreOperands operands{row, registers};
  if (int(running->current().index % kWarp) < 8 * count) {
    running->view.written(running->place_of(row, 16, 16, what, line));
    if (EMULATION_RACES) running->races.access(row, 16, true);
  }
  const WarpWork collect = transposed ? collect_transposed : count == 2 ? collect_matrices<2> : collect_matrices<4>;
  work_together(collect, &operands, what, line);
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

bool form_clusters(unsigned blocks) {
  cluster_blocks = blocks;
  return true;
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

int allow_large_clusters(const void* kernel, bool allowed) {
  message.clear();
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  allowed_large_clusters[kernel] = allowed;
  return cudaSuccess;
}

void wait_for_launches(bool alone) {
  running->current().waited_for_launches = true;
  running->current().waited_alone = alone;
}

void end_behind_launches() {
  wait_for_launches(true);
  running->waits().at_end = true;
}

void let_launch_begin(const char* what, int line) {
  const Thread& thread = running->current();
  if (running->dependent() && !thread.waited_for_launches) {
    running->fail(format("%s calls %s in line %d before it has waited for the launch in front of it: three would be under way",
                         running->where(thread).c_str(), what, line));
  }
}

int launch(KernelCall call, const void* kernel, unsigned cluster, bool dependent, dim3 grid_blocks, dim3 grid_threads,
           void** parameters, size_t shared) {
  message.clear();
  if (cluster == 0) cluster = cluster_blocks;
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
  if (grid_blocks.x % cluster != 0) {
    return refuse(cudaErrorInvalidConfiguration,
                  format("a grid of %u blocks in x, in clusters of %u", grid_blocks.x, cluster));
  }
  {
    const std::lock_guard<std::mutex> lock(allowed_mutex);
    if (cluster > kClusterUnasked && !allowed_large_clusters[kernel]) {
      return refuse(cudaErrorInvalidClusterSize,
                    format("a cluster of %u blocks, more than %u only after cudaFuncSetAttribute", cluster,
                           kClusterUnasked));
    }
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
  Waits waits;
  const uint64_t clusters = blocks / cluster;
  const uint64_t wanted = config.host_threads > 0 ? config.host_threads : std::thread::hardware_concurrency();
  const uint64_t host_threads = std::max<uint64_t>(std::min({wanted, clusters, kMaxFibers / threads / cluster}), 1);
  std::atomic<unsigned> running_threads{unsigned(host_threads)}, waiting_threads{0};
  std::atomic<bool> failed{false};
  const Grid grid{call,      kernel, parameters,       grid_blocks,      grid_threads, shared,
                  dependent, &waits, &running_threads, &waiting_threads, &failed};
  std::atomic<uint64_t> next{0};
  std::mutex failure_mutex;
  std::string failure;
  const auto work = [&] {
    fenv_t environment;
    feholdexcept(&environment);
    flush_subnormals(true);
    {
      Cluster own(grid, cluster);
      for (uint64_t number; (number = next++) < clusters;) {
        const std::string why = own.run(number);
        if (why.empty()) continue;
        const std::lock_guard<std::mutex> lock(failure_mutex);
        if (failure.empty()) failure = why;
        next = clusters;
        failed = true;
        break;
      }
      running = nullptr;
    }
    --running_threads;
    fesetenv(&environment);
  };
  std::vector<std::thread> helpers;
  // Host threads of their own even for a single one: thread-local shared memory goes away with them.
  for (uint64_t i = 0; i < host_threads; ++i) helpers.emplace_back(work);
  for (std::thread& helper : helpers) helper.join();
  // Who waits only to end behind the launch in front reads what those before that have left, for which it has waited. That
  // this is so of a launch is known at its end.
  if (failure.empty() && !(waits.at_end && front_waits)) failure = waits.early;
  front_waits = dependent;
  if (dependent && !waits.any && failure.empty()) {
    failure = "a launch that may begin before the one in front of it has ended did not wait for that";
  }
  return failure.empty() ? cudaSuccess : refuse(cudaErrorLaunchFailure, failure);
}

}  // namespace emulation

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  constexpr unsigned kSince = 12000;
  const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known && version >= kSince ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (found) {
    *found = *function ? cudaDriverEntryPointSuccess
             : known   ? cudaDriverEntryPointVersionNotSufficent
                       : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

void emulation_configure(const emulation::Config* config) {
  emulation::config = *config;
  emulation::known_memory.clear();
}

void emulation_add_memory(const void* begin, size_t bytes) {
  const char* const first = static_cast<const char*>(begin);
  emulation::known_memory.push_back({first, first + bytes});
}

const char* emulation_message() { return emulation::message.c_str(); }

#if EMULATION_RACES
// What the compiler calls for each access of a kernel, as it would ThreadSanitizer.
namespace {

void note(const void* address, size_t bytes, bool writes) {
  if (emulation::running) emulation::running->races.access(address, bytes, writes);
}

}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* address, size_t bytes) { note(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { note(address, bytes, true); }
#define EMULATION_ACCESSES(bytes)                                                      \
  void __tsan_read##bytes(void* address) { note(address, bytes, false); }              \
  void __tsan_write##bytes(void* address) { note(address, bytes, true); }              \
  void __tsan_unaligned_read##bytes(void* address) { note(address, bytes, false); }    \
  void __tsan_unaligned_write##bytes(void* address) { note(address, bytes, true); }
EMULATION_ACCESSES(1)
EMULATION_ACCESSES(2)
EMULATION_ACCESSES(4)
EMULATION_ACCESSES(8)
EMULATION_ACCESSES(16)
#undef EMULATION_ACCESSES
// Atomic accesses race with nothing that kernels do.
unsigned char __tsan_atomic8_load(const volatile unsigned char* from, int) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
unsigned __tsan_atomic32_load(const volatile unsigned* from, int) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
void __tsan_atomic32_store(volatile unsigned* to, unsigned value, int) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
unsigned __tsan_atomic32_fetch_add(volatile unsigned* to, unsigned value, int) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
int __tsan_atomic32_compare_exchange_strong(volatile unsigned* at, unsigned* expected, unsigned value, int, int) {
  return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
}
#endif
