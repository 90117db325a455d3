// The PTX that flashgen's kernels wrap into small functions for nvcc, under the same names for an emulated card:
// asynchronous copies, matrices from shared memory (ldmatrix) and products of matrices (mma).
#pragma once

#include "e4m3.h"
#include "runtime.h"

// ---- cp.async ----------------------------------------------------------------------------------------------------
// Copies 4, 8 or 16 bytes from global to shared memory; zeros, reading nothing, unless `inside`.

template <int kBytes>
void copy_async(void* shared, const void* global, bool inside, int line = __builtin_LINE()) {
  emulation::copy_async(shared, global, kBytes, inside ? 0 : kBytes, "copy_async", line);
}

inline void copy_16_async(void* shared, const void* global, int line = __builtin_LINE()) {
  emulation::copy_async(shared, global, 16, 0, "copy_16_async", line);
}

// Of kBytes as many as are asked for, and zeros behind them.
template <int kBytes>
void copy_async_of(void* shared, const void* global, int num_bytes, int line = __builtin_LINE()) {
  emulation::copy_async(shared, global, kBytes, size_t(kBytes - num_bytes), "copy_async_of", line);
}

// All 32 lanes of a warp take part in what follows, each at the same place.

// ---- ldmatrix.sync.aligned.m8n8.xN[.trans].shared.b16 ------------------------------------------------------------
// Loads N matrices of 8 rows by 8 16-bit elements. Lane 8 * i + r names row r of matrix i: 16 bytes; register i of lane
// l receives elements 2 * (l % 4) and the next one of row l / 4 of matrix i, or of its transpose.

inline void ldmatrix_x1(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 1, false, "ldmatrix_x1", line);
}
inline void ldmatrix_x2(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 2, false, "ldmatrix_x2", line);
}
inline void ldmatrix_x4(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 4, false, "ldmatrix_x4", line);
}
inline void ldmatrix_x1_trans(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 1, true, "ldmatrix_x1_trans", line);
}
inline void ldmatrix_x2_trans(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 2, true, "ldmatrix_x2_trans", line);
}
inline void ldmatrix_x4_trans(unsigned* m, const void* row, int line = __builtin_LINE()) {
  emulation::load_matrices(m, row, 4, true, "ldmatrix_x4_trans", line);
}

// ---- mma.sync.aligned.m16n8kK.row.col.f32.T.T.f32 ----------------------------------------------------------------
// D = A B + D for A of 16 by K, B of K by 8 and D of 16 by 8 elements, each in the registers of the warp's lanes as
// the PTX ISA lays it out.

inline void mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK16F16, d, a, b, "mma_m16n8k16_f16", line);
}
inline void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK16Bf16, d, a, b, "mma_m16n8k16_bf16", line);
}
inline void mma_m16n8k8_f16(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK8F16, d, a, b, "mma_m16n8k8_f16", line);
}
inline void mma_m16n8k8_bf16(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK8Bf16, d, a, b, "mma_m16n8k8_bf16", line);
}
// Ignores the low 13 bits of the elements of a and b.
inline void mma_m16n8k8_tf32(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK8Tf32, d, a, b, "mma_m16n8k8_tf32", line);
}
inline void mma_m16n8k32_e4m3(float* d, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emulation::multiply(emulation::Mma::kK32E4m3, d, a, b, "mma_m16n8k32_e4m3", line);
}

// ---- red.global.add[.v4].f32 -------------------------------------------------------------------------------------
// Adds to numbers in global memory to which threads of any block add at the same time.

inline void add_to_sum(float* sum, float x, int line = __builtin_LINE()) {
  emulation::add_to_sums(sum, &x, 1, "add_to_sum", line);
}
inline void add_to_sums(float* sums, const float (&x)[4], int line = __builtin_LINE()) {
  emulation::add_to_sums(sums, x, 4, "add_to_sums", line);
}
