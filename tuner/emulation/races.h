// Races in shared memory: accesses of two threads of a block to the same byte, one of them a write, that nothing orders.
//
// The order in which threads run shows many of these in results, but not all: lanes that vote or shuffle go on together,
// though by CUDA's model neither orders memory, as __syncwarp does. So each thread has a clock of how far it knows the
// others to have come (vector clocks), which barriers and __syncwarp pass on. The compiler tells of accesses, as it would
// ThreadSanitizer; what copy engine and tensor cores read and write is AsyncView's business.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler.h"

#ifndef EMULATION_RACES
#define EMULATION_RACES 0
#endif

namespace emulation {

class Races {
 public:
  // Where threads meet; `id` says at which warp and mask, or at which barrier.
  enum Kind : uint64_t { kOfWarp, kOfBlock, kNamed, kPhases, kOfCluster };

  explicit Races(Scheduler& scheduler) : scheduler_(scheduler) {}

  void start() {
    if (!EMULATION_RACES) return;
    clocks_.assign(scheduler_.size(), Clock(scheduler_.size()));
    for (unsigned i = 0; i < scheduler_.size(); ++i) clocks_[i][i] = 1;
    met_.clear();
    times_.clear();
    writes_.assign(scheduler_.shared_size(), {});
    reads_.assign(scheduler_.shared_size(), {});
    doubts_.clear();
  }

  // What the running thread has done comes before what those do who `join` there. Who is early for the next meeting must
  // not be taken for one of this: `turn` tells one from the next.
  void leave(Kind kind, uint64_t id, uint64_t turn) {
    if (!EMULATION_RACES) return;
    settle();
    Clock& met = met_[{kind * 2 + turn % 2, id}];
    met.resize(scheduler_.size());
    Clock& own = own_clock();
    std::transform(own.begin(), own.end(), met.begin(), met.begin(), [](uint32_t a, uint32_t b) { return std::max(a, b); });
    ++own[scheduler_.current().index];
  }
  void join(Kind kind, uint64_t id, uint64_t turn) {
    if (!EMULATION_RACES) return;
    const auto found = met_.find({kind * 2 + turn % 2, id});
    if (found == met_.end()) return;
    Clock& own = own_clock();
    std::transform(own.begin(), own.end(), found->second.begin(), own.begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
  }

  // How often the running thread has been there before.
  uint64_t turn(Kind kind, uint64_t id) {
    return EMULATION_RACES ? times_[{{kind, id}, scheduler_.current().index}]++ : 0;
  }

  void access(const void* address, size_t bytes, bool writes) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared_bytes;
    if (offset < 0 || offset + bytes > writes_.size()) return;
    settle();
    const unsigned index = scheduler_.current().index;
    const Clock& own = own_clock();
    for (size_t place = offset; place < offset + bytes; ++place) {
      Access& last = writes_[place];
      if (!ordered(own, last)) {
        const std::string why = race(last, place, writes, true);
        if (!writes) scheduler_.fail(why);
        doubts_.push_back({place, shared_bytes[place], why});
      }
      std::vector<Access>& reads = reads_[place];
      if (writes) {
        for (const Access& each : reads) {
          if (!ordered(own, each)) scheduler_.fail(race(each, place, true, false));
        }
        reads.clear();
        last = {index, own[index]};
        continue;
      }
      const auto before = std::find_if(reads.begin(), reads.end(), [&](const Access& each) { return each.thread == index; });
      if (before == reads.end()) {
        reads.push_back({index, own[index]});
      } else {
        before->time = own[index];
      }
    }
  }

 private:
  using Clock = std::vector<uint32_t>;  // by thread

  struct Access {
    unsigned thread = 0;
    uint32_t time = 0;  // by that thread's clock; 0: none
  };

  Clock& own_clock() { return clocks_[scheduler_.current().index]; }

  // A byte that is about to be written a second time, which is no race if it stays as it is.
  struct Doubt {
    size_t place;
    unsigned char byte;
    std::string why;
  };

  // Once the running thread has written: no other has run since.
  void settle() {
    for (const Doubt& each : doubts_) {
      if (shared_bytes[each.place] != each.byte) scheduler_.fail(each.why);
    }
    doubts_.clear();
  }

  bool ordered(const Clock& own, const Access& earlier) {
    return earlier.time <= own[earlier.thread] || earlier.thread == scheduler_.current().index;
  }

  std::string race(const Access& earlier, size_t place, bool writes, bool written) {
    const Thread &thread = scheduler_.current(), &other = scheduler_.thread(earlier.thread);
    return format("race: %s, last at %s in line %d, %s byte %zu of shared memory, which thread %u, last at %s in line %d, "
                  "has %s: nothing in between orders memory",
                  scheduler_.where(thread).c_str(), thread.waits_at, thread.line, writes ? "writes" : "reads", place,
                  other.index, other.waits_at, other.line, written ? "written" : "read");
  }

  Scheduler& scheduler_;
  std::vector<Clock> clocks_;
  std::map<std::pair<uint64_t, uint64_t>, Clock> met_;
  std::map<std::pair<std::pair<uint64_t, uint64_t>, unsigned>, uint64_t> times_;
  std::vector<Access> writes_;              // the last one, by byte
  std::vector<std::vector<Access>> reads_;  // those since, one of each thread
  std::vector<Doubt> doubts_;               // of the running thread
};

}  // namespace emulation
