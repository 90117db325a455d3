// What warpgroups do together: products (wgmma) of factors in shared memory, and sharing registers out (setmaxnreg).
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "async_view.h"
#include "scheduler.h"
#include "tensor_map.h"
#include "warpgroup_product.h"

namespace emulation {

// A product is computed when a warpgroup waits for its group, in the order of issue. From issue to then its accumulators are
// uninitialized, and neither they nor its factors, in registers or shared memory, may change.
class Warpgroups {
 public:
  Warpgroups(Scheduler& scheduler, AsyncView& view)
      : scheduler_(scheduler), view_(view), shares_(scheduler.size()),
        groups_((scheduler.size() + kWarpgroup - 1) / kWarpgroup) {}

  void start() {
    for (Share& share : shares_) share = {};
    for (auto& started : groups_) started.clear();
  }

  void fence() { shares_[scheduler_.current().index].fenced = true; }

  // What follows may have been written to registers since.
  void commit() {
    Share& share = shares_[scheduler_.current().index];
    share.fenced = false;
    ++share.groups;
  }

  void issue(const Product& product) {
    const Thread& thread = scheduler_.current();
    Share& share = shares_[thread.index];
    require_whole_group(product.what, product.line);
    if (!share.fenced) {
      scheduler_.fail(format("%s: %s in line %d without wgmma_fence since the last wgmma_commit or wgmma_wait",
                             here().c_str(), product.what, product.line));
    }
    join(thread, product, share.products.size());
    Pending pending{product.d, product.a, {}, {}, share.groups};
    if (product.a) memcpy(pending.factors, product.a, sizeof(pending.factors));
    bool chained = false;
    for (const Pending& other : share.products) chained |= other.d == product.d;
    if (!chained) set_aside(pending, words(product));
    share.products.push_back(std::move(pending));
  }

  void wait(unsigned groups_left, const char* what, int line) {
    const Thread& thread = scheduler_.current();
    Share& share = shares_[thread.index];
    share.fenced = false;
    share.groups_left = groups_left;
    require_whole_group(what, line);
    // This thread's state and line are set by wait(), which suspends it unless it is the last of its warpgroup to come.
    const unsigned first = thread.warpgroup() * kWarpgroup;
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
      const Thread& other = scheduler_.thread(i);
      if (i == thread.index || (other.state == State::kAtProducts && other.line == line)) continue;
      scheduler_.wait(State::kAtProducts, what, line);
      return;
    }
    finish(thread.warpgroup(), what, line);
    for (unsigned i = first; i < first + kWarpgroup; ++i) scheduler_.thread(i).state = State::kReady;
  }

  std::string describe(const Thread& thread) const {
    return format(" for warpgroup %u, whose four warps must all come", thread.warpgroup());
  }

  void check_thread_end() {
    const Thread& thread = scheduler_.current();
    const Share& share = shares_[thread.index];
    if (share.products.empty()) return;
    const Product& product = groups_[thread.warpgroup()][0].product;
    scheduler_.fail(format("%s ended with the %s of line %d not waited for%s", here().c_str(), product.what, product.line,
                           share.products[0].group == share.groups ? ": no wgmma_commit follows it" : ""));
  }

  // A warp's instruction to have so many registers per thread.
  void share_registers(int registers, const char* what, int line) {
    require_whole_group(what, line);
    shares_[scheduler_.current().index].registers.push_back(registers);
  }

  // All warps of a warpgroup must have come to the same instructions, and no more may be taken than a launch gives.
  void check_block_end() {
    const unsigned threads = scheduler_.size();
    const unsigned given = std::min(65536 / threads / 8 * 8, 256u);
    unsigned taken = 0;
    bool shared_out = false;
    for (unsigned i = 0; i < threads; ++i) {
      const std::vector<int>& mine = shares_[i].registers;
      const unsigned first = i / kWarpgroup * kWarpgroup;
      if (mine != shares_[first].registers) {
        scheduler_.report(format("block %u: threads %u and %u of a warpgroup came to different take_registers or "
                                 "give_registers",
                                 blockIdx.x, first, i));
        return;
      }
      shared_out |= !mine.empty();
      taken += mine.empty() ? given : mine.back();
    }
    if (!shared_out || taken <= given * threads) return;
    scheduler_.report(format("block %u: %u registers are taken, a launch of %u threads has at most %u: take_registers would "
                             "wait for ever",
                             blockIdx.x, taken, threads, given * threads));
  }

 private:
  // A thread's part of a product.
  struct Pending {
    void* d;
    const unsigned* a;
    unsigned factors[4];           // of a, as they were
    std::vector<uint32_t> before;  // what the first product of a chain finds in d
    unsigned group;
  };

  struct Share {
    std::vector<Pending> products;
    unsigned groups = 0, groups_left = 0;
    bool fenced = false;
    std::vector<int> registers{};  // that the thread asked for in turn
  };

  // A product as the first thread came to it, and its factors in shared memory then. Each warp reads its own rows of A.
  struct Started {
    Product product;
    Factors factors;
    unsigned warps;  // that have come, a bit each
  };

  std::string here() { return scheduler_.where(scheduler_.current()); }

  void require_whole_group(const char* what, int line) {
    const size_t first = scheduler_.current().warpgroup() * kWarpgroup;
    if (first + kWarpgroup <= scheduler_.size()) return;
    scheduler_.fail(format("%s called %s in line %d in a warpgroup of %zu threads: it takes all %u", here().c_str(), what,
                           line, scheduler_.size() - first, kWarpgroup));
  }

  // The warpgroup's product number `index` must be the same in all its threads.
  void join(const Thread& thread, const Product& product, size_t index) {
    std::deque<Started>& products = groups_[thread.warpgroup()];
    if (index == products.size()) {
      products.push_back({product, {}, 0});
      read_b(product, products.back().factors);
    }
    Started& started = products[index];
    const unsigned warp = thread.warp() % kWarps;
    if (!product.a && !(started.warps >> warp & 1)) read_a(product, warp, started.factors);
    started.warps |= 1u << warp;
    const auto key = [](const Product& p) {
      return std::make_tuple(p.line, p.mma, p.columns, p.a == nullptr, p.a_shared, p.b, p.a_by_columns, p.b_by_rows,
                             p.accumulate);
    };
    const Product& other = started.product;
    if (key(product) == key(other)) return;
    scheduler_.fail(format("divergent products in block %u: thread %u of warpgroup %u comes to %s of 0x%016llx and 0x%016llx "
                           "in line %d, others to %s of 0x%016llx and 0x%016llx in line %d",
                           blockIdx.x, thread.index, thread.warpgroup(), product.what,
                           (unsigned long long)product.a_shared, (unsigned long long)product.b, product.line, other.what,
                           (unsigned long long)other.a_shared, (unsigned long long)other.b, other.line));
  }

  // Of a thread's accumulators.
  static int words(const Product& product) { return product.columns / (product.halves ? 4 : 2); }

  static void set_aside(Pending& pending, int words) {
    const uint32_t* const d = static_cast<const uint32_t*>(pending.d);
    pending.before.assign(d, d + words);
    fill_uninitialized(pending.d, words * sizeof(uint32_t));
  }

  // Computes the groups that the warpgroup waits for.
  void finish(unsigned group, const char* what, int line) {
    const unsigned first = group * kWarpgroup;
    const Share& leader = shares_[first];
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
      const Share& share = shares_[i];
      if (share.groups == leader.groups && share.groups_left == leader.groups_left &&
          share.products.size() == leader.products.size()) {
        continue;
      }
      scheduler_.fail(format("divergent %s in line %d of block %u: threads %u and %u have started different products", what,
                             line, blockIdx.x, first, i));
    }
    const unsigned end = leader.groups - std::min(leader.groups, leader.groups_left);
    size_t done = 0;
    while (done < leader.products.size() && leader.products[done].group < end) {
      // A chain: products of the same accumulators, one after the other.
      size_t next = done + 1;
      while (next < leader.products.size() && leader.products[next].group < end &&
             leader.products[next].d == leader.products[done].d) {
        ++next;
      }
      multiply(group, done, next);
      done = next;
    }
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
      std::vector<Pending>& products = shares_[i].products;
      // Accumulators that products still under way go on with are not to be touched yet.
      for (size_t later = done; later < products.size(); ++later) {
        Pending& pending = products[later];
        bool first_of_chain = pending.before.empty();
        for (size_t between = done; between < later; ++between) first_of_chain &= products[between].d != pending.d;
        if (first_of_chain) set_aside(pending, words(groups_[group][later].product));
      }
      products.erase(products.begin(), products.begin() + done);
    }
    groups_[group].erase(groups_[group].begin(), groups_[group].begin() + done);
  }

  // Products [begin, end) of a warpgroup, all of the same accumulators.
  void multiply(unsigned group, size_t begin, size_t end) {
    const unsigned first = group * kWarpgroup;
    const int columns = groups_[group][begin].product.columns;
    const bool halves = groups_[group][begin].product.halves;
    if (!product_) product_ = std::make_unique<WarpgroupProduct>();
    // Rows 16 w + g and g + 8 are warp w's, columns 8 t + 2 c and the next one, in its lane 4 g + c.
    const auto each_pair = [&](const auto& work) {
      for (unsigned i = 0; i < kWarpgroup; ++i) {
        Pending& pending = shares_[first + i].products[begin];
        for (int p = 0; p < columns / 4; ++p) {
          work(pending, p, &product_->d[i / 32 * 16 + i % 32 / 4 + p % 2 * 8][p / 2 * 8 + i % 4 * 2]);
        }
      }
    };
    for (unsigned i = first; i < first + kWarpgroup; ++i) check_untouched(i, begin);
    each_pair([halves](const Pending& pending, int pair, float* d) {
      const uint32_t* const from =
          pending.before.empty() ? static_cast<const uint32_t*>(pending.d) : pending.before.data();
      if (halves) {
        for (int j = 0; j < 2; ++j) d[j] = half_to_float(from[pair] >> 16 * j & 0xffff);
      } else {
        memcpy(d, from + 2 * pair, 2 * sizeof(float));
      }
    });
    for (size_t index = begin; index < end; ++index) {
      Started& started = groups_[group][index];
      read_again(started);
      if (started.product.a) collect_registers(group, index, started.factors);
      product_->run(started.product.mma, started.factors, columns, started.product.accumulate);
      if (halves) product_->round_to_halves(columns);
    }
    each_pair([halves](Pending& pending, int pair, const float* d) {
      uint32_t* const to = static_cast<uint32_t*>(pending.d);
      if (halves) {
        to[pair] = float_to_half(d[0]) | uint32_t(float_to_half(d[1])) << 16;
      } else {
        memcpy(to + 2 * pair, d, 2 * sizeof(float));
      }
    });
  }

  // Accumulators that were set aside must still be what they were left as.
  void check_untouched(unsigned thread, size_t index) {
    const Pending& pending = shares_[thread].products[index];
    if (pending.before.empty()) return;
    const Product& product = groups_[thread / kWarpgroup][index].product;
    for (int i = 0; i < words(product); ++i) {
      if (memcmp(static_cast<const uint32_t*>(pending.d) + i, &kUninitialized, sizeof(kUninitialized)) == 0) continue;
      scheduler_.fail(format("block %u, thread %u: accumulator %d of %s in line %d changed before it was waited for",
                             blockIdx.x, thread, i, product.what, product.line));
    }
  }

  // Of A, lane 4 g + c of warp w has columns 2 c, 2 c + 8 and their neighbours of rows 16 w + g and g + 8.
  void collect_registers(unsigned group, size_t index, Factors& factors) {
    for (unsigned i = 0; i < kWarpgroup; ++i) {
      const Pending& pending = shares_[group * kWarpgroup + i].products[index];
      if (memcmp(pending.factors, pending.a, sizeof(pending.factors)) != 0) {
        const Product& product = groups_[group][index].product;
        scheduler_.fail(format("block %u, thread %u: the factor in registers of %s in line %d changed before it was waited "
                               "for",
                               blockIdx.x, group * kWarpgroup + i, product.what, product.line));
      }
      for (unsigned r = 0; r < 4; ++r) {
        const unsigned row = i / 32 * 16 + i % 32 / 4 + r % 2 * 8, column = i % 4 * 2 + r / 2 * 8;
        memcpy(&factors.a[row][column], &pending.factors[r], sizeof(unsigned));
      }
    }
  }

  // ---- factors in shared memory

  // How a descriptor says that a factor lies there: rows of a swizzled chunk, groups of eight of them, and chunks.
  struct Layout {
    size_t start, chunk_step, group_step;
    unsigned row_bytes;
  };

  Layout layout_of(uint64_t descriptor, const Product& product) {
    const unsigned mode = descriptor >> 62, row_bytes = 256u >> mode;
    const Layout layout{(descriptor & 0x3fff) << 4, (descriptor >> 16 & 0x3fff) << 4, (descriptor >> 32 & 0x3fff) << 4,
                        row_bytes};
    // The pattern repeats every eight rows: there each factor must start, or a base offset say how far off it does.
    const char* wrong = mode == 0                               ? "without a swizzle"
                        : descriptor >> 49 & 7                  ? "with a base offset"
                        : layout.start >> 7 & (row_bytes / 16 - 1) ? "from where its swizzle does not begin"
                                                                : nullptr;
    if (wrong) {
      scheduler_.fail(format("%s: %s in line %d by the descriptor 0x%016llx, %s: that is not emulated", here().c_str(),
                             product.what, product.line, (unsigned long long)descriptor, wrong));
    }
    return layout;
  }

  // Sixteen bytes of a factor, `offset` bytes from its start, as eight elements.
  void read_piece(const Layout& layout, size_t offset, const Product& product, uint16_t* elements) {
    const size_t place = swizzled(layout.start + offset, layout.row_bytes);
    if (place + 16 > scheduler_.shared_size()) {
      scheduler_.fail(format("%s: %s in line %d reads byte %zu of %zu bytes of shared memory", here().c_str(), product.what,
                             product.line, place, scheduler_.shared_size()));
    }
    if (!view_.read(place)) {
      scheduler_.fail(format("%s: %s in line %d of %s", here().c_str(), product.what, product.line,
                             view_.reason(place).c_str()));
    }
    memcpy(elements, shared_bytes + place, 16);
  }

  // Sixteen columns of a row lie side by side ("K-major").
  void read_row(const Layout& layout, int row, const Product& product, uint16_t* elements) {
    const size_t offset = row / 8 * layout.group_step + row % 8 * layout.row_bytes;
    read_piece(layout, offset, product, elements);
    read_piece(layout, offset + 16, product, elements + 8);
  }

  // Eight neighbours of one that lies `k` along the depth, side by side ("MN-major"), as many as a chunk is wide.
  void read_across(const Layout& layout, int k, int first, const Product& product, uint16_t* elements) {
    const int width = layout.row_bytes / 2;
    const size_t row = k / 8 * layout.group_step + k % 8 * layout.row_bytes;
    read_piece(layout, row + first / width * layout.chunk_step + first % width * 2, product, elements);
  }

  // One warp's rows.
  void read_a(const Product& product, unsigned warp, Factors& factors) {
    const Layout layout = layout_of(product.a_shared, product);
    const int begin = kGroupRows / kWarps * warp, end = begin + kGroupRows / kWarps;
    if (product.a_by_columns) {
      for (int k = 0; k < kDepth; ++k) {
        for (int first = begin; first < end; first += 8) {
          uint16_t rows[8];
          read_across(layout, k, first, product, rows);
          for (int i = 0; i < 8; ++i) factors.a[first + i][k] = rows[i];
        }
      }
      return;
    }
    for (int row = begin; row < end; ++row) read_row(layout, row, product, factors.a[row]);
  }

  void read_b(const Product& product, Factors& factors) {
    const Layout layout = layout_of(product.b, product);
    if (product.b_by_rows) {
      for (int k = 0; k < kDepth; ++k) {
        for (int j = 0; j < product.columns; j += 8) read_across(layout, k, j, product, &factors.b[k][j]);
      }
      return;
    }
    for (int j = 0; j < product.columns; ++j) {
      uint16_t column[kDepth];
      read_row(layout, j, product, column);
      for (int k = 0; k < kDepth; ++k) factors.b[k][j] = column[k];
    }
  }

  // Factors in shared memory must not have changed since the product was issued.
  void read_again(const Started& started) {
    const Product& product = started.product;
    bool same = true;
    if (!product.a) {
      for (unsigned warp = 0; warp < kWarps; ++warp) read_a(product, warp, again_);
      same = memcmp(again_.a, started.factors.a, sizeof(again_.a)) == 0;
    }
    read_b(product, again_);
    for (int k = 0; k < kDepth; ++k) {
      same &= memcmp(again_.b[k], started.factors.b[k], product.columns * sizeof(uint16_t)) == 0;
    }
    if (same) return;
    scheduler_.fail(format("block %u: what %s in line %d reads from shared memory changed before it was waited for",
                           blockIdx.x, product.what, product.line));
  }

  Scheduler& scheduler_;
  AsyncView& view_;
  std::vector<Share> shares_;               // by thread
  std::vector<std::deque<Started>> groups_;  // by warpgroup: issued and not finished
  std::unique_ptr<WarpgroupProduct> product_;
  Factors again_;
};

}  // namespace emulation
