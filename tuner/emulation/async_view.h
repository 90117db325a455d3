// What the copy engine and the tensor cores may see of shared memory: their accesses go by the "async proxy", to which
// ordinary stores become visible only by a fence of the thread that wrote.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "scheduler.h"

namespace emulation {

// Keeps shared memory as these units last saw it, in pieces of 16 bytes. A piece that differs has been written by ordinary
// stores since then. Who wrote is known of stmatrix alone: that thread must have fenced. Of other stores one knows only
// that someone must have, since the piece was last seen: a fence by the wrong thread goes unnoticed.
class AsyncView {
 public:
  explicit AsyncView(Scheduler& scheduler) : scheduler_(scheduler) {}

  void start() {
    active_ = false;
    fences_ = 0;
  }

  void fence() {
    if (!active_) begin();
    ++fences_;
    std::vector<size_t>& mine = unfenced_[scheduler_.current().index];
    for (const size_t piece : mine) {
      if (writers_[piece] == scheduler_.current().index + 1) writers_[piece] = 0;
    }
    mine.clear();
  }

  // By stmatrix, which writes whole pieces.
  void written(size_t place) {
    if (!active_) begin();
    writers_[place / kPiece] = scheduler_.current().index + 1;
    unfenced_[scheduler_.current().index].push_back(place / kPiece);
  }

  // By the units themselves, at this block's bidding or another's of its cluster.
  void written_by_unit(size_t place, size_t bytes) {
    if (!active_) begin();
    memcpy(&bytes_[place], scheduler_.memory() + place, bytes);
    std::fill_n(&seen_[place / kPiece], bytes / kPiece, fences_);
    std::fill_n(&writers_[place / kPiece], bytes / kPiece, 0);
  }

  // A unit reads a piece. False where it need not see what was written to it.
  bool read(size_t place) {
    if (!active_) begin();
    const size_t piece = place / kPiece;
    const bool same = memcmp(&bytes_[place], shared_bytes + place, kPiece) == 0;
    if (writers_[piece] || (!same && seen_[piece] == fences_)) return false;
    if (!same) memcpy(&bytes_[place], shared_bytes + place, kPiece);
    seen_[piece] = fences_;
    return true;
  }

  // Why `read` said no.
  std::string reason(size_t place) const {
    const unsigned writer = writers_[place / kPiece];
    return format("byte %zu of shared memory, written%s without fence_proxy_async", place,
                  writer ? format(" by thread %u", writer - 1).c_str() : "");
  }

 private:
  static constexpr size_t kPiece = 16;

  // Blocks that use neither unit need no view. Before it began nothing but ordinary stores have written.
  void begin() {
    active_ = true;
    const size_t bytes = (scheduler_.shared_size() + kPiece - 1) / kPiece * kPiece;
    bytes_.resize(bytes);
    fill_uninitialized(bytes_.data(), bytes);
    seen_.assign(bytes / kPiece, 0);
    writers_.assign(bytes / kPiece, 0);
    unfenced_.assign(scheduler_.size(), {});
  }

  Scheduler& scheduler_;
  bool active_ = false;
  unsigned fences_ = 0;
  std::vector<unsigned char> bytes_;
  std::vector<unsigned> seen_;     // by piece: the number of fences when it was last seen
  std::vector<unsigned> writers_;  // by piece: one more than the thread that wrote it and has not fenced, or 0
  std::vector<std::vector<size_t>> unfenced_;  // by thread
};

}  // namespace emulation
