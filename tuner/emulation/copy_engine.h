// The copy engine (TMA): boxes of arrays on their way between global and shared memory.
#pragma once

#include <stdint.h>
#include <string.h>

#include <string>
#include <utility>
#include <vector>

#include "async_view.h"
#include "barriers.h"
#include "sanitizer.h"
#include "scheduler.h"
#include "tensor_map.h"

namespace emulation {

// A copy is under way from its issue to a random later moment. Meanwhile the target of a load is uninitialized; the source
// of a store is read when that is waited for, or at the end, and there is nothing where it goes until then: in some blocks
// until that, too, is waited for, or their end.
class CopyEngine {
 public:
  CopyEngine(Scheduler& scheduler, PhaseBarriers& barriers, AsyncView& view)
      : scheduler_(scheduler), barriers_(barriers), view_(view), groups_(scheduler.size()) {}

  void start() {
    loads_.clear();
    stores_.clear();
    withheld_.clear();
    sends_.clear();
    std::fill(groups_.begin(), groups_.end(), 0);
    reluctant_ = scheduler_.random().next() % 2;
    Random ahead = scheduler_.random();  // which draws no number that others would draw
    withholds_ = ahead.next() >> 8 & 1;
  }

  bool busy() const { return !loads_.empty() || !stores_.empty() || !sends_.empty(); }

  static void check_map(Scheduler& caller, const CUtensorMap* map, const char* what, int line) {
    if (reinterpret_cast<uintptr_t>(map) % 64 == 0 && BoxMap::of(map).magic == BoxMap::kMagic) return;
    caller.fail(format("%s: %s in line %d of what is no tensor map", caller.here().c_str(), what, line));
  }

  // A load to this block that one of its threads issues, or one of another block of its cluster. Shared memory and the
  // barrier are where they would be for the caller.
  void load(Scheduler& caller, void* shared, const CUtensorMap* map, void* barrier_address, const Corner& corner,
            const char* what, int line) {
    PhaseBarriers::Barrier& barrier = barriers_.shown_at(caller, barrier_address, what, line);
    const BoxCopy copy = describe(caller, map, shared, corner, what, line);
    if (!is_memory(copy.map.base)) {
      caller.fail(format("%s: %s in line %d by a map that begins with what is no memory", caller.here().c_str(), what, line));
    }
    start_load(copy, barrier);
  }

  // Of bytes that lie side by side in global memory, too.
  void load_bytes(void* shared, const void* global, size_t bytes, void* barrier_address, const char* what, int line) {
    PhaseBarriers::Barrier& barrier = barriers_.shown_at(scheduler_, barrier_address, what, line);
    start_load(describe_bytes(global, shared, bytes, what, line), barrier);
  }

  void store(const CUtensorMap* map, const void* shared, const Corner& corner, const char* what, int line) {
    start_store(describe(scheduler_, map, shared, corner, what, line));
  }

  // Sixteen bytes of registers on their way to this block, which a thread of the cluster sends: no unit's access, but they,
  // too, come at a later moment, and are counted by a barrier. Until then nothing is to be read where they go.
  void send(Scheduler& caller, const void* shared, const void* values, const void* barrier_address, const char* what,
            int line) {
    PhaseBarriers::Barrier& barrier = barriers_.at(caller, barrier_address, what, line);
    Send send{caller.place_of(shared, sizeof(Send::bytes), sizeof(Send::bytes), what, line), &barrier, caller.block(),
              caller.current().index, what, line, {}};
    memcpy(send.bytes, values, sizeof(send.bytes));
    fill_uninitialized(scheduler_.memory() + send.place, sizeof(send.bytes));
    sends_.push_back(send);
  }

  // Stores floats in global memory, or adds them to those there, each of them at once, in whatever order.
  void store_floats(void* global, const void* shared, size_t bytes, bool adds, const char* what, int line) {
    BoxCopy copy = describe_bytes(global, shared, bytes, what, line);
    copy.adds = adds;
    start_store(std::move(copy));
  }

  void commit() { ++groups_[scheduler_.current().index]; }

  // Lets stores of the running thread's earlier groups read what they store, or land.
  void wait(unsigned groups_left, bool landed) {
    const unsigned thread = scheduler_.current().index, committed = groups_[thread];
    const unsigned end = committed - std::min(committed, groups_left);
    const auto awaited = [&](const BoxCopy& copy) { return copy.thread == thread && copy.group < end; };
    for (size_t i = 0; i < stores_.size();) {
      if (!awaited(stores_[i])) {
        ++i;
      } else if (withholds_) {
        withheld_.push_back(take_store(i));
      } else {
        land(take_store(i));
      }
    }
    for (size_t i = 0; landed && i < withheld_.size();) {
      if (awaited(withheld_[i])) {
        land(withheld_[i]);
        withheld_.erase(withheld_.begin() + i);
      } else {
        ++i;
      }
    }
    if (scheduler_.failed()) scheduler_.fail("");
  }

  // Lets some copies end, in any order; at least one if nothing else can happen. For spells each takes as long as anyone can
  // do without it. Whether any has ended.
  bool advance(bool others_ready) {
    if (scheduler_.random().next() % 32 == 0) reluctant_ = !reluctant_;
    const size_t count = loads_.size() + stores_.size() + sends_.size();
    size_t landing = others_ready ? 0 : 1;
    if (!reluctant_) landing += scheduler_.random().next() % (count + others_ready);
    const bool any = landing > 0;
    for (; landing > 0; --landing) {
      const size_t others = loads_.size() + stores_.size(), left = others + sends_.size();
      if (left == 0) break;
      const size_t i = scheduler_.random().next() % left;
      if (i >= others) {
        land_send(i - others);
      } else {
        i < loads_.size() ? land_load(i) : land(take_store(i - loads_.size()));
      }
    }
    return any;
  }

  // A thread may not end before its stores have read their source, which is gone when the block has ended.
  void check_thread_end() {
    const Thread& thread = scheduler_.current();
    for (const BoxCopy& copy : stores_) {
      if (copy.thread != thread.index) continue;
      scheduler_.fail(format("%s ended with the %s of line %d not waited for%s", scheduler_.here().c_str(), copy.what, copy.line,
                             copy.group == groups_[thread.index] ? ": no tma_commit follows it" : ""));
    }
  }

  // Nor may a block end before all that it loads has come: another block may have that shared memory next. What it stores
  // lands by itself.
  void check_block_end() {
    for (const BoxCopy& copy : withheld_) land(copy);
    if (!loads_.empty()) {
      report_under_way(loads_[0]);
    } else if (!sends_.empty()) {
      report_under_way(sends_[0]);
    }
  }

 private:
  // Bytes that the pattern of swizzles repeats after.
  static constexpr size_t kSwizzled = 1024;

  struct BoxCopy {
    BoxMap map;
    Corner corner;
    size_t place;  // in shared memory
    unsigned block, thread;  // that issued it
    const char* what;
    int line;
    PhaseBarriers::Barrier* barrier = nullptr;  // of a load
    unsigned group = 0;                         // of a store
    bool adds = false;                          // a store, to what is there
    std::vector<unsigned char> source{};        // of a store, as it was, from where swizzles begin on
  };

  // What is sent to this block.
  struct Send {
    size_t place;
    PhaseBarriers::Barrier* barrier;
    unsigned block, thread;  // that sent it
    const char* what;
    int line;
    unsigned char bytes[16];
  };

  template <typename Copy>
  void report_under_way(const Copy& copy) {
    const std::string of = copy.block == scheduler_.block() ? "" : format(" of block %u", copy.block);
    scheduler_.report(format("block %u ended with the %s of line %d by thread %u%s under way", scheduler_.block(),
                             copy.what, copy.line, copy.thread, of.c_str()));
  }

  static BoxCopy describe(Scheduler& caller, const CUtensorMap* map, const void* shared, const Corner& corner,
                          const char* what, int line) {
    check_map(caller, map, what, line);
    const BoxMap& box = BoxMap::of(map);
    if (box.rank != corner.rank) {
      caller.fail(format("%s: %s in line %d of %u coordinates by a map of %u", caller.here().c_str(), what, line,
                         corner.rank, box.rank));
    }
    if (box.swizzle > 16 && box.row_bytes() != box.swizzle) {
      caller.fail(format("%s: %s in line %d of rows of %u bytes swizzled by %u: only whole ones are emulated",
                         caller.here().c_str(), what, line, box.row_bytes(), box.swizzle));
    }
    const size_t place = caller.place_of(shared, box.bytes(), 128, what, line);
    return {box, corner, place, caller.block(), caller.current().index, what, line};
  }

  // What lies side by side is a box of one row.
  BoxCopy describe_bytes(const void* global, const void* shared, size_t bytes, const char* what, int line) {
    constexpr size_t kPiece = 16;
    if (bytes == 0 || bytes % kPiece != 0 || reinterpret_cast<uintptr_t>(global) % kPiece != 0) {
      scheduler_.fail(format("%s: %s in line %d of %zu bytes at %p: it takes multiples of %zu", scheduler_.here().c_str(), what,
                             line, bytes, global, kPiece));
    }
    const size_t place = scheduler_.place_of(shared, bytes, kPiece, what, line);
    BoxMap row = {BoxMap::kMagic, 1, 16, static_cast<unsigned char*>(const_cast<void*>(global)), {}, {sizeof(float)}, {}};
    for (unsigned i = 0; i < kRank; ++i) row.sizes[i] = row.box[i] = 1;
    row.sizes[0] = row.box[0] = unsigned(bytes / sizeof(float));
    return {row, {1, {}}, place, scheduler_.block(), scheduler_.current().index, what, line};
  }

  void start_load(BoxCopy copy, PhaseBarriers::Barrier& barrier) {
    copy.barrier = &barrier;
    if (EMULATION_ASAN) probe_load(copy);
    fill_uninitialized(scheduler_.memory() + copy.place, copy.map.bytes());
    view_.written_by_unit(copy.place, copy.map.bytes());
    loads_.push_back(std::move(copy));
  }

  void start_store(BoxCopy copy) {
    copy.group = groups_[copy.thread];
    for (size_t place = copy.place; place < copy.place + copy.map.bytes(); place += 16) {
      if (view_.read(place)) continue;
      scheduler_.fail(format("%s: %s in line %d of %s", scheduler_.here().c_str(), copy.what, copy.line,
                             view_.reason(place).c_str()));
    }
    if (EMULATION_ASAN) probe_store(copy);
    copy.source.assign(shared_bytes + copy.place / kSwizzled * kSwizzled, shared_bytes + copy.place + copy.map.bytes());
    stores_.push_back(std::move(copy));
  }

  void land_load(size_t i) {
    const BoxCopy copy = std::move(loads_[i]);
    loads_.erase(loads_.begin() + i);
    copy.map.load(copy.corner, shared_bytes, copy.place);
    view_.written_by_unit(copy.place, copy.map.bytes());
    barriers_.bring(*copy.barrier, copy.map.bytes());
  }

  void land_send(size_t i) {
    std::swap(sends_[i], sends_.back());
    const Send send = sends_.back();
    sends_.pop_back();
    memcpy(shared_bytes + send.place, send.bytes, sizeof(send.bytes));
    barriers_.bring(*send.barrier, sizeof(send.bytes));
  }

  // A store whose source is read now, and then free for others.
  BoxCopy take_store(size_t i) {
    BoxCopy copy = std::move(stores_[i]);
    stores_.erase(stores_.begin() + i);
    if (memcmp(copy.source.data() + copy.place % kSwizzled, shared_bytes + copy.place, copy.map.bytes()) != 0) {
      scheduler_.report(format("block %u, thread %u: the source of the %s in line %d, from byte %zu of shared memory, "
                               "changed before it was waited for",
                               blockIdx.x, copy.thread, copy.what, copy.line, copy.place));
    }
    return copy;
  }

  static void land(const BoxCopy& copy) {
    const unsigned char* source = copy.source.data();
    const size_t place = copy.place % kSwizzled;
    copy.adds ? copy.map.add(copy.corner, source, place) : copy.map.store(copy.corner, source, place);
  }

  // For the sanitizer, which tells the line of the kernel only while the thread itself accesses the array.
  static void probe_load(const BoxCopy& copy) {
    copy.map.each_piece(copy.corner, [](size_t, const unsigned char* source, size_t bytes) {
      unsigned char piece[16];
      if (source) memcpy(piece, source, bytes);
      asm volatile("" : : "r"(piece) : "memory");
    });
  }
  static void probe_store(const BoxCopy& copy) {
    copy.map.each_piece(copy.corner, [](size_t, unsigned char* target, size_t bytes) {
      // Writes nothing new, and loses nothing that others write meanwhile.
      for (size_t i = 0; target && i < bytes; ++i) __atomic_fetch_or(target + i, 0, __ATOMIC_RELAXED);
    });
  }

  Scheduler& scheduler_;
  PhaseBarriers& barriers_;
  AsyncView& view_;
  std::vector<BoxCopy> loads_, stores_, withheld_;  // withheld: stores that have been read
  std::vector<Send> sends_;
  std::vector<unsigned> groups_;  // committed, by thread
  bool reluctant_ = false;
  bool withholds_ = false;
};

}  // namespace emulation
