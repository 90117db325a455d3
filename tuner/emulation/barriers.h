// Barriers among the threads of a block beside __syncthreads: those in shared memory (mbarrier), and named ones.
#pragma once

#include <stdint.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

#include "scheduler.h"

namespace emulation {

// mbarrier objects. A phase ends when all arrivals have come and all announced bytes are there; its parity is that of its
// number, from 0. The object itself is kept aside: shared memory holds only a mark, by which overwriting it is noticed.
class PhaseBarriers {
 public:
  struct Barrier {
    size_t place;
    unsigned arrivals;  // in a phase
    unsigned missing;   // of this phase
    int64_t bytes;      // announced and not there
    uint64_t phase;
    unsigned maker;  // the thread that initialised it
    bool shown;      // by that thread's fence, to the copy engine
  };

  explicit PhaseBarriers(Scheduler& scheduler) : scheduler_(scheduler), awaited_(scheduler.size()) {}

  void start() { barriers_.clear(); }
  bool used() const { return !barriers_.empty(); }

  void init(void* address, unsigned arrivals, const char* what, int line) {
    const size_t place = scheduler_.place_of(address, sizeof(kMark), sizeof(kMark), what, line);
    const bool again = barriers_.count(place) && memcmp(address, &kMark, sizeof(kMark)) == 0;
    if (arrivals < 1 || arrivals > kMaxCount || again) {
      scheduler_.fail(format("%s: %s in line %d for %u arrivals%s", scheduler_.here().c_str(), what, line, arrivals,
                             again ? ", where a barrier is already" : ": 1 to 1048575 are served"));
    }
    memcpy(address, &kMark, sizeof(kMark));
    barriers_[place] = {place, arrivals, arrivals, 0, 0, scheduler_.current().index, false};
  }

  void show() {
    for (auto& [place, barrier] : barriers_) barrier.shown |= barrier.maker == scheduler_.current().index;
  }

  // The barrier that is where `address` says, which is of the caller: of this block, or another of its cluster.
  Barrier& at(Scheduler& caller, const void* address, const char* what, int line) {
    const size_t place = caller.place_of(address, sizeof(kMark), sizeof(kMark), what, line);
    const auto found = barriers_.find(place);
    const bool known = found != barriers_.end();
    if (!known || memcmp(scheduler_.memory() + place, &kMark, sizeof(kMark)) != 0) {
      caller.fail(format("%s: %s in line %d of the %s barrier at byte %zu of shared memory%s", caller.here().c_str(), what,
                         line, known ? "overwritten" : "uninitialised", place, owner(caller).c_str()));
    }
    return found->second;
  }

  // One arrival, which announces bytes.
  void arrive(Scheduler& caller, void* address, unsigned bytes, const char* what, int line) {
    Barrier& barrier = at(caller, address, what, line);
    if (barrier.missing == 0) {
      caller.fail(format("%s: %s in line %d is one arrival more than the %u of a phase of the barrier at byte %zu%s",
                         caller.here().c_str(), what, line, barrier.arrivals, barrier.place, owner(caller).c_str()));
    }
    if (barrier.bytes + bytes > kMaxCount) {
      caller.fail(format("%s: %s in line %d announces %u bytes where %lld are to come: 1048575 is the limit",
                         caller.here().c_str(), what, line, bytes, (long long)barrier.bytes));
    }
    barrier.bytes += bytes;
    --barrier.missing;
    complete(barrier);
  }

  // For the copy engine.
  Barrier& shown_at(Scheduler& caller, const void* address, const char* what, int line) {
    Barrier& barrier = at(caller, address, what, line);
    if (barrier.shown) return barrier;
    caller.fail(format("%s: %s in line %d by the barrier at byte %zu%s, which thread %u initialised without "
                       "fence_barrier_init",
                       caller.here().c_str(), what, line, barrier.place, owner(caller).c_str(), barrier.maker));
  }

  // Bytes that it has brought.
  void bring(Barrier& barrier, size_t bytes) {
    barrier.bytes -= int64_t(bytes);
    complete(barrier);
  }

  // Whoever is late by a whole phase waits for the next but one, as on a card: it asks for a parity.
  void wait(const void* address, unsigned parity, const char* what, int line) {
    const Barrier& barrier = at(scheduler_, address, what, line);
    awaited_[scheduler_.current().index] = {&barrier, parity & 1};
    while ((barrier.phase & 1) == (parity & 1)) scheduler_.wait(State::kAtPhase, what, line);
  }

  bool test(const void* address, unsigned parity, const char* what, int line) {
    const Barrier& barrier = at(scheduler_, address, what, line);
    awaited_[scheduler_.current().index] = {&barrier, parity & 1};
    // Time passes, so that a loop of tests does not keep others from running.
    if ((barrier.phase & 1) == (parity & 1)) scheduler_.wait(State::kPolls, what, line);
    return (barrier.phase & 1) != (parity & 1);
  }

  std::string describe(const Thread& thread) const {
    const auto& [barrier, parity] = awaited_[thread.index];
    return format(" for parity %u of the barrier at byte %zu, whose phase %llu lacks %u of %u arrivals and %lld bytes",
                  parity, barrier->place, (unsigned long long)barrier->phase, barrier->missing, barrier->arrivals,
                  (long long)barrier->bytes);
  }

 private:
  static constexpr uint64_t kMark = 0x7265697272616221;
  static constexpr unsigned kMaxCount = (1u << 20) - 1;

  struct Awaited {
    const Barrier* barrier;
    unsigned parity;
  };

  // Whose the barrier is, where that is not the caller's block.
  std::string owner(const Scheduler& caller) const {
    return &caller == &scheduler_ ? "" : format(" of block %u", scheduler_.block());
  }

  // Ends a phase whose arrivals and bytes are all there.
  void complete(Barrier& barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.arrivals;
    for (unsigned i = 0; i < scheduler_.size(); ++i) {
      Thread& thread = scheduler_.thread(i);
      const bool waits = thread.state == State::kAtPhase || thread.state == State::kPolls;
      if (waits && awaited_[i].barrier == &barrier) thread.state = State::kReady;
    }
  }

  Scheduler& scheduler_;
  std::map<size_t, Barrier> barriers_;  // by their place
  std::vector<Awaited> awaited_;        // by thread, the last one
};

// bar.sync and bar.arrive, to which threads come by whole warps.
class NamedBarriers {
 public:
  explicit NamedBarriers(Scheduler& scheduler) : scheduler_(scheduler), met_(scheduler.size()) {}

  void start() {
    for (Meeting& meeting : meetings_) meeting = {};
  }

  void meet(int id, int threads, bool waits, const char* what, int line) {
    Thread& thread = scheduler_.current();
    if (id < 1 || id >= kCount || threads < int(kWarp) || threads % kWarp != 0 || threads > int(scheduler_.size())) {
      scheduler_.fail(format("%s: %s in line %d at barrier %d for %d threads: 1 to 15 are served, for whole warps of the "
                             "block's %zu",
                             scheduler_.where(thread).c_str(), what, line, id, threads, scheduler_.size()));
    }
    met_[thread.index] = id;
    Meeting& meeting = meetings_[id];
    if (meeting.arrived > 0 && meeting.threads != threads) {
      scheduler_.fail(format("%s: %s in line %d at barrier %d for %d threads, others came to it for %d",
                             scheduler_.where(thread).c_str(), what, line, id, threads, meeting.threads));
    }
    meeting.threads = threads;
    if (++meeting.arrived < threads) {
      if (waits) scheduler_.wait(State::kAtMeeting, what, line);
      return;
    }
    meeting.arrived = 0;
    ++meeting.turn;
    for (unsigned i = 0; i < scheduler_.size(); ++i) {
      Thread& other = scheduler_.thread(i);
      if (other.state == State::kAtMeeting && met_[i] == id) other.state = State::kReady;
    }
  }

  // How often all have come to a barrier.
  unsigned turn(int id) const { return id >= 0 && id < kCount ? meetings_[id].turn : 0; }

  std::string describe(const Thread& thread) const {
    const int id = met_[thread.index];
    return format(" for barrier %d, to which %d of %d threads have come", id, meetings_[id].arrived,
                  meetings_[id].threads);
  }

 private:
  static constexpr int kCount = 16;

  struct Meeting {
    int threads = 0, arrived = 0;
    unsigned turn = 0;
  };

  Scheduler& scheduler_;
  Meeting meetings_[kCount];
  std::vector<int> met_;  // by thread, the last one
};

}  // namespace emulation
