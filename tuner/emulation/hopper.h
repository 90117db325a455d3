// The PTX of Hopper that flashgen's kernels wrap into small functions for nvcc, under the same names for an emulated
// card: barriers in shared memory (mbarrier), the copy engine (TMA), named barriers, clusters of blocks, products of
// warpgroups (wgmma).
#pragma once

#include "cuda.h"
#include "runtime.h"

// ---- mbarrier ----------------------------------------------------------------------------------------------------
// A phase ends when all arrivals have come and all bytes announced are there.

inline void barrier_init(unsigned long long* barrier, unsigned arrivals, int line = __builtin_LINE()) {
  emulation::init_barrier(barrier, arrivals, "barrier_init", line);
}
inline void barrier_arrive(unsigned long long* barrier, int line = __builtin_LINE()) {
  emulation::arrive(barrier, 0, "barrier_arrive", line);
}
inline void barrier_expect(unsigned long long* barrier, unsigned bytes, int line = __builtin_LINE()) {
  emulation::arrive(barrier, bytes, "barrier_expect", line);
}
inline void barrier_wait(unsigned long long* barrier, unsigned parity, int line = __builtin_LINE()) {
  emulation::wait_for_phase(barrier, parity, "barrier_wait", line);
}
// Whether the phase has ended by now.
inline bool barrier_test(unsigned long long* barrier, unsigned parity, int line = __builtin_LINE()) {
  return emulation::test_phase(barrier, parity, "barrier_test", line);
}
// At the barrier in the same place of a block of the cluster.
inline void barrier_arrive_at(unsigned long long* barrier, unsigned block, int line = __builtin_LINE()) {
  emulation::arrive_at(barrier, block, "barrier_arrive_at", line);
}
inline void fence_barrier_init() { emulation::show_barriers(); }
inline void fence_proxy_async() { emulation::fence_proxy(); }

// ---- griddepcontrol -----------------------------------------------------------------------------------------------

inline void wait_for_earlier_launches() { emulation::wait_for_launches(false); }
// By a thread alone: others of its block read nothing that those have left.
inline void wait_alone_for_earlier_launches() { emulation::wait_for_launches(true); }
// By threads of one block, of which nobody reads what the launch in front has left.
inline void end_behind_earlier_launches() { emulation::end_behind_launches(); }
inline void let_next_launch_begin(int line = __builtin_LINE()) {
  emulation::let_launch_begin("let_next_launch_begin", line);
}

// ---- cp.async.bulk.tensor ----------------------------------------------------------------------------------------

inline void prefetch_map(const CUtensorMap* map, int line = __builtin_LINE()) {
  emulation::check_map(map, "prefetch_map", line);
}
// Brings nothing where time does not count.
inline void tma_prefetch(const CUtensorMap* map, int, int, int, int, int line = __builtin_LINE()) {
  emulation::check_map(map, "tma_prefetch", line);
}
inline void tma_prefetch_until(const CUtensorMap* map, int, int, int, int, int line = __builtin_LINE()) {
  emulation::check_map(map, "tma_prefetch_until", line);
}
inline void tma_load(void* shared, const CUtensorMap* map, unsigned long long* barrier, int x, int row, int head,
                     int batch, int line = __builtin_LINE()) {
  emulation::load_box(shared, map, barrier, {4, {x, row, head, batch}}, "tma_load", line);
}
// By maps of five dimensions, the last of which takes kRowsEnd steps all the way round.
inline void tma_load_until(void* shared, const CUtensorMap* map, unsigned long long* barrier, int x, int row, int head,
                           int end, int line = __builtin_LINE()) {
  emulation::load_box(shared, map, barrier, {5, {x, row, head, end, emulation::kRowsEnd}}, "tma_load_until", line);
}
// To the same place in each of the cluster's blocks, a bit each.
inline void tma_multicast(void* shared, const CUtensorMap* map, unsigned long long* barrier, unsigned short blocks,
                          int x, int row, int head, int batch, int line = __builtin_LINE()) {
  emulation::multicast_box(shared, map, barrier, blocks, {4, {x, row, head, batch}}, "tma_multicast", line);
}
inline void tma_multicast_until(void* shared, const CUtensorMap* map, unsigned long long* barrier,
                                unsigned short blocks, int x, int row, int head, int end, int line = __builtin_LINE()) {
  emulation::multicast_box(shared, map, barrier, blocks, {5, {x, row, head, end, emulation::kRowsEnd}},
                           "tma_multicast_until", line);
}
inline void tma_store(const CUtensorMap* map, const void* shared, int x, int row, int head, int batch,
                      int line = __builtin_LINE()) {
  emulation::store_box(map, shared, {4, {x, row, head, batch}}, "tma_store", line);
}
inline void tma_store_until(const CUtensorMap* map, const void* shared, int x, int row, int head, int end,
                            int line = __builtin_LINE()) {
  emulation::store_box(map, shared, {5, {x, row, head, end, emulation::kRowsEnd}}, "tma_store_until", line);
}
// Bytes that lie side by side, and floats that are stored in global memory or added to those there.
inline void bulk_load(void* shared, const void* global, unsigned bytes, unsigned long long* barrier,
                      int line = __builtin_LINE()) {
  emulation::load_bytes(shared, global, bytes, barrier, "bulk_load", line);
}
inline void bulk_add(float* global, const float* shared, unsigned bytes, int line = __builtin_LINE()) {
  emulation::add_floats(global, shared, bytes, "bulk_add", line);
}
inline void bulk_store(float* global, const float* shared, unsigned bytes, int line = __builtin_LINE()) {
  emulation::store_floats(global, shared, bytes, "bulk_store", line);
}
inline void tma_commit() { emulation::commit_stores(); }
template <int kGroups>
void tma_wait_read() {
  emulation::wait_for_stores(kGroups, false);
}
// The same until what they store is there.
template <int kGroups>
void tma_wait() {
  emulation::wait_for_stores(kGroups, true);
}

// ---- ld.acquire, st.release ---------------------------------------------------------------------------------------
// Numbers in global memory by which blocks of a launch wait for each other.

inline void wait_for_number(const int* place, int number, int line = __builtin_LINE()) {
  emulation::wait_for_number(place, number, "wait_for_number", line);
}
inline void wait_for_any_number(const int* place, int line = __builtin_LINE()) {
  emulation::wait_for_any_number(place, "wait_for_any_number", line);
}
inline void add_to_number(int* place, int number) { __atomic_fetch_add(place, number, __ATOMIC_RELEASE); }
inline void leave_number(int* place, int number) { __atomic_store_n(place, number, __ATOMIC_RELEASE); }

// ---- discard -----------------------------------------------------------------------------------------------------
// A line of memory that is read no more: whoever does reads no numbers.

inline void discard_line(float* floats, int line = __builtin_LINE()) {
  emulation::discard(floats, 32, "discard_line", line);
}

// ---- bar.sync, bar.arrive ----------------------------------------------------------------------------------------

inline void named_barrier_sync(int id, int threads, int line = __builtin_LINE()) {
  emulation::meet(id, threads, true, "named_barrier_sync", line);
}
inline void named_barrier_arrive(int id, int threads, int line = __builtin_LINE()) {
  emulation::meet(id, threads, false, "named_barrier_arrive", line);
}

// ---- barrier.cluster ---------------------------------------------------------------------------------------------

inline void cluster_sync(int line = __builtin_LINE()) { emulation::sync_cluster("cluster_sync", line); }

// Both halves of it, which order no accesses.
inline void cluster_arrive() { emulation::arrive_at_cluster(); }
inline void cluster_wait(int line = __builtin_LINE()) { emulation::wait_for_cluster("cluster_wait", line); }

// ---- ld.shared::cluster, st.shared::cluster ----------------------------------------------------------------------

// From the same place of a block of the cluster.
template <int n>
void load_from_block(float (&values)[n], const float* shared, int block, int line = __builtin_LINE()) {
  static_assert(n == 1 || n == 2 || n == 4, "what the instruction takes");
  emulation::read_block(values, shared, sizeof(values), block, "load_from_block", line);
}

inline unsigned word_of_block(const unsigned* shared, int block, int line = __builtin_LINE()) {
  unsigned word;
  emulation::read_block(&word, shared, sizeof(word), block, "word_of_block", line);
  return word;
}

// To the same place of a block of the cluster, which has begun.
template <int n>
void store_to_block(float* shared, const float (&values)[n], int block, int line = __builtin_LINE()) {
  static_assert(n == 1 || n == 2 || n == 4, "what the instruction takes");
  emulation::write_block(shared, values, sizeof(values), block, "store_to_block", line);
}

// ---- mapa, st.async ----------------------------------------------------------------------------------------------

// Where `place` of this block's shared memory is in a block of the cluster.
inline unsigned place_in_block(unsigned place, unsigned block) { return block << emulation::kBlockShift | place; }
// Four floats to a place there, and their bytes to a barrier of the same block.
inline void send_to_block(unsigned place, const float (&four)[4], unsigned barrier, int line = __builtin_LINE()) {
  emulation::send_to_block(place, four, barrier, "send_to_block", line);
}

// ---- setmaxnreg, elect.sync --------------------------------------------------------------------------------------

template <int kRegisters>
void take_registers(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256, "what the instruction takes");
  emulation::share_registers(kRegisters, "take_registers", line);
}
template <int kRegisters>
void give_registers(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256, "what the instruction takes");
  emulation::share_registers(kRegisters, "give_registers", line);
}
inline bool elect_one(int line = __builtin_LINE()) { return emulation::elect("elect_one", line); }

// ---- stmatrix.sync.aligned.m8n8.xN.shared.b16 --------------------------------------------------------------------
// Stores N matrices of 8 rows by 8 16-bit elements. Lane 8 * i + r names row r of matrix i.

inline void stmatrix_x2(void* row, const unsigned* m, int line = __builtin_LINE()) {
  emulation::store_matrices(row, m, 2, "stmatrix_x2", line);
}
inline void stmatrix_x4(void* row, const unsigned* m, int line = __builtin_LINE()) {
  emulation::store_matrices(row, m, 4, "stmatrix_x4", line);
}
// Of transposed matrices: lane 8 * i + c names column c of matrix i.
inline void stmatrix_x4_trans(void* row, const unsigned* m, int line = __builtin_LINE()) {
  emulation::store_matrices(row, m, 4, "stmatrix_x4_trans", line, true);
}

// ---- wgmma.mma_async ---------------------------------------------------------------------------------------------
// D = A B, or A B + D, of 64 by N elements in the registers of a warpgroup: computed when it is waited for.

inline void wgmma_fence() { emulation::fence_products(); }
inline void wgmma_commit() { emulation::commit_products(); }
template <int kGroups>
void wgmma_wait(int line = __builtin_LINE()) {
  emulation::wait_for_products(kGroups, "wgmma_wait", line);
}
template <int n>
void hold(float (&)[n]) {}
template <int n>
void hold(unsigned (&)[n]) {}
inline void forget(unsigned long long&) {}
inline void forget(int&) {}

namespace emulation {

template <int n>
void start_product(Mma mma, float (&d)[n], const unsigned* a, unsigned long long a_shared, unsigned long long b,
                   bool b_by_rows, bool accumulate, const char* what, int line, bool a_by_columns = false) {
  start_product(Product{mma, 2 * n, d, false, a, a_shared, b, a_by_columns, b_by_rows, accumulate, what, line});
}
template <int n>
void start_product(Mma mma, unsigned (&d)[n], const unsigned* a, unsigned long long a_shared, unsigned long long b,
                   bool b_by_rows, bool accumulate, const char* what, int line) {
  start_product(Product{mma, 4 * n, d, true, a, a_shared, b, false, b_by_rows, accumulate, what, line});
}

}  // namespace emulation

#define EMULATION_WGMMA(N, type, mma)                                                                               \
  inline void wgmma_m64n##N##k16_##type##_ss(float (&d)[N / 2], unsigned long long a, unsigned long long b,         \
                                             bool accumulate, int line = __builtin_LINE()) {                        \
    emulation::start_product(mma, d, nullptr, a, b, false, accumulate, "wgmma_m64n" #N "k16_" #type "_ss", line);   \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k16_##type##_ss_trans(float (&d)[N / 2], unsigned long long a, unsigned long long b,   \
                                                   bool accumulate, int line = __builtin_LINE()) {                  \
    emulation::start_product(mma, d, nullptr, a, b, true, accumulate, "wgmma_m64n" #N "k16_" #type "_ss_trans",     \
                             line);                                                                                 \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k16_##type##_ss_across(float (&d)[N / 2], unsigned long long a, unsigned long long b,  \
                                                    bool accumulate, int line = __builtin_LINE()) {                 \
    emulation::start_product(mma, d, nullptr, a, b, false, accumulate, "wgmma_m64n" #N "k16_" #type "_ss_across",   \
                             line, true);                                                                           \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k16_##type##_rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,       \
                                             bool accumulate, int line = __builtin_LINE()) {                        \
    emulation::start_product(mma, d, a, 0, b, false, accumulate, "wgmma_m64n" #N "k16_" #type "_rs", line);         \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k16_##type##_rs_trans(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, \
                                                   bool accumulate, int line = __builtin_LINE()) {                  \
    emulation::start_product(mma, d, a, 0, b, true, accumulate, "wgmma_m64n" #N "k16_" #type "_rs_trans", line);    \
  }
#define EMULATION_WGMMA_E4M3(N)                                                                                    \
  inline void wgmma_m64n##N##k32_e4m3_ss(float (&d)[N / 2], unsigned long long a, unsigned long long b,             \
                                         bool accumulate, int line = __builtin_LINE()) {                            \
    emulation::start_product(emulation::Mma::kK32E4m3, d, nullptr, a, b, false, accumulate,                         \
                             "wgmma_m64n" #N "k32_e4m3_ss", line);                                                  \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k32_e4m3_rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,           \
                                         bool accumulate, int line = __builtin_LINE()) {                            \
    emulation::start_product(emulation::Mma::kK32E4m3, d, a, 0, b, false, accumulate,                               \
                             "wgmma_m64n" #N "k32_e4m3_rs", line);                                                  \
  }                                                                                                                 \
  inline void wgmma_m64n##N##k32_e4m3_ss(unsigned (&d)[N / 4], unsigned long long a, unsigned long long b,          \
                                         bool accumulate, int line = __builtin_LINE()) {                            \
    emulation::start_product(emulation::Mma::kK32E4m3, d, nullptr, a, b, false, accumulate,                         \
                             "wgmma_m64n" #N "k32_e4m3_ss", line);                                                  \
  }
#define EMULATION_WGMMA_OF(N)                      \
  EMULATION_WGMMA_E4M3(N)                          \
  EMULATION_WGMMA(N, f16, emulation::Mma::kK16F16) \
  EMULATION_WGMMA(N, bf16, emulation::Mma::kK16Bf16)
EMULATION_WGMMA_OF(8)
EMULATION_WGMMA_OF(16)
EMULATION_WGMMA_OF(24)
EMULATION_WGMMA_OF(32)
EMULATION_WGMMA_OF(40)
EMULATION_WGMMA_OF(48)
EMULATION_WGMMA_OF(56)
EMULATION_WGMMA_OF(64)
EMULATION_WGMMA_OF(72)
EMULATION_WGMMA_OF(80)
EMULATION_WGMMA_OF(88)
EMULATION_WGMMA_OF(96)
EMULATION_WGMMA_OF(104)
EMULATION_WGMMA_OF(112)
EMULATION_WGMMA_OF(120)
EMULATION_WGMMA_OF(128)
EMULATION_WGMMA_OF(136)
EMULATION_WGMMA_OF(144)
EMULATION_WGMMA_OF(152)
EMULATION_WGMMA_OF(160)
EMULATION_WGMMA_OF(168)
EMULATION_WGMMA_OF(176)
EMULATION_WGMMA_OF(184)
EMULATION_WGMMA_OF(192)
EMULATION_WGMMA_OF(200)
EMULATION_WGMMA_OF(208)
EMULATION_WGMMA_OF(216)
EMULATION_WGMMA_OF(224)
EMULATION_WGMMA_OF(232)
EMULATION_WGMMA_OF(240)
EMULATION_WGMMA_OF(248)
EMULATION_WGMMA_OF(256)
#undef EMULATION_WGMMA_OF
#undef EMULATION_WGMMA
#undef EMULATION_WGMMA_E4M3
