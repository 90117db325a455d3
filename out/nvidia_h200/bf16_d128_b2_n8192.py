r"""Flash attention for NVIDIA GPUs: bf16, head dim 128.

For NVIDIA H200 (sm_90a) at batch 2, 16 heads, 8192 rows, without a mask. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 2, 16 heads, 8192 rows, without a mask: 1.349 ms (median), spread 0.1 %,
815.0 TFLOP/s, 128 registers per thread, occupancy 25 %. Largest error per head against float64: 2.4e-03.
Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.1.0, seed 0.

    from bf16_d128_b2_n8192 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, numpy, PyCUDA and nvcc 12.5 or newer; the first call compiles
(PyCUDA keeps the result in its cache). Make that call before capturing a CUDA graph. Forward only.

Regenerate:

    flashgen emit bf16_d128_b2_n8192.py \
        --preset sm_90 --family wgmma --dtype bf16 --d 128 --set br=192 --set bc=80 --set persistent=true \
        --set q_stages=1 --set o_apart=true --set p_in_shared=false --set k_stages=4 --set v_stages=2 \
        --set schedule=chained --set q_in_registers=false --set order_of_groups=products --set rescale=lazy \
        --set poly_exp=0 --set section=1 --set min_blocks=1 --set cluster_over=rows --set cluster=2 \
        --set tail=0 --set split_by=rows
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import os
import shutil
import struct
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "DEVICE",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "attention",
    "register_torch",
    "register_transformers",
    "sdpa",
]

# What the kernel was tuned for, which of its family's variants won, on which card, and how fast it was there.
PROBLEM: dict[str, Any] = {
    "dtype": "bf16",
    "batch": 2,
    "num_q_heads": 16,
    "num_kv_heads": 16,
    "seqlen_q": 8192,
    "seqlen_k": 8192,
    "head_dim": 128,
    "head_dim_v": 128,
    "causal": False,
    "precision": "auto",
}
VARIANT: dict[str, Any] = {
    "family": "wgmma",
    "br": 192,
    "bc": 80,
    "persistent": True,
    "q_stages": 1,
    "o_apart": True,
    "p_in_shared": False,
    "k_stages": 4,
    "v_stages": 2,
    "schedule": "chained",
    "q_in_registers": False,
    "order_of_groups": "products",
    "rescale": "lazy",
    "poly_exp": 0,
    "section": 1,
    "min_blocks": 1,
    "cluster_over": "rows",
    "cluster": 2,
    "tail": 0,
    "split_by": "rows",
}
DEVICE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "arch": 90,
}
MEASUREMENT: dict[str, Any] = {
    "median_us": 1349.1519689559937,
    "spread": 0.0013756563172437181,
    "tflops": 814.9649951049091,
    "registers": 128,
    "spill_bytes": 0,
    "smem_bytes": 222208,
    "occupancy": 0.25,
    "error": 0.0024287664419349706,
    "predicted": False,
    "busy": "",
    "driver": "580.159.04 (CUDA 13.0)",
    "toolkit": "nvcc 13.0.88",
    "flashgen": "0.1.0",
    "seed": 0,
}

DTYPE = "bfloat16"  # of q, k, v and o
HEAD_DIM = 128
VECTOR = 8  # elements per memory access: what pointers and strides must be multiples of
THREADS = 512  # per block
ROWS_PER_BLOCK = 192  # query rows
CLUSTER = 2  # neighbouring blocks that share what they copy
MAX_BLOCKS = 132  # what NVIDIA H200 runs at once: each block takes several tiles of rows
SMEM_BYTES = 222208  # dynamic shared memory per block
MAPS = (  # arrays as the copy engine moves them: rows and columns of a box, bytes of its swizzle and L2 promotion
    ("q", 64, 64, 128, 128),
    ("k", 40, 64, 128, 128),
    ("v", 40, 64, 128, 128),
    ("o", 64, 64, 128, 128),
)
ONLY_ARCH = 90  # compute capability, times ten, of the only cards with the instructions it uses
SYMBOL = b"attention_bf16_d128_kernel"  # the kernel's name in the source
TOLERANCE = 0.01  # per head, of norm(o - reference) / norm(reference) against float64

SOURCE = r"""// attention_bf16_d128: flash attention, bf16, head dim 128, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family wgmma:
//   br = 192                   query rows per tile, 64 for each warpgroup that computes
//   bc = 80                    keys per tile
//   persistent = true          blocks stay for several tiles
//   q_stages = 1               Q tiles in shared memory: 2 bring the next one early
//   k_stages = 4               K tiles in shared memory
//   v_stages = 2               V tiles in shared memory
//   schedule = chained         the next scores: before these outputs, or behind them
//   q_in_registers = false     keep Q in registers, which relieves shared memory
//   order_of_groups = products what warpgroups do in turns: nothing, products, exponentials
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   section = 1                heads whose tiles start together by length, 0 all of them
//   min_blocks = 1             blocks per SM
//   o_apart = true             outputs leave by room of their own, beside which the next Q comes
//   cluster = 2                blocks that share each copy of K and V
//
// Build:      nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c attention_bf16_d128.cu
//             (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
// Regenerate: flashgen emit attention_bf16_d128.cu --preset sm_90 --family wgmma --dtype bf16 --d 128 \
//                 --set br=192 --set bc=80 --set persistent=true --set q_stages=1 \
//                 --set k_stages=4 --set v_stages=2 --set schedule=chained --set q_in_registers=false \
//                 --set order_of_groups=products --set rescale=lazy --set poly_exp=0 --set section=1 \
//                 --set min_blocks=1 --set o_apart=true --set cluster=2

#include <cuda_bf16.h>
#include <cuda.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements. lse may be null; else it is contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  __nv_bfloat16* o;
  float* lse;
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 160, "callers from other languages pack the arguments by hand");

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap q, k, v, o;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 128;  // head dim of queries and keys
constexpr int kDv = 128;  // head dim of values and outputs
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kBr = 192;  // query rows per tile: 64 for each warpgroup that computes
constexpr int kBc = 80;  // keys per tile
constexpr int kConsumers = 3;  // warpgroups that compute, beside the one that copies
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kThreads = 512;
constexpr int kCluster = 2;  // blocks that walk the same keys, each with one of as many neighbouring tiles
constexpr int kClusterRows = kCluster * kBr;  // query rows of all of them
constexpr int kShare = kBc / kCluster;  // keys of a tile that each of them copies to all
constexpr unsigned short kEveryBlock = (1 << kCluster) - 1;  // of a cluster, a bit each
static_assert(kShare % 8 == 0, "shares are of whole groups of eight rows, within which rows are swizzled");
constexpr int kMaxBlocks = 132;  // that NVIDIA H200 runs at once, each of which takes several tiles
constexpr int kKStages = 4, kVStages = 2;  // tiles of K and of V in shared memory
constexpr int kQStages = 1;  // Q tiles in shared memory

// A tile in shared memory is made of chunks of 64 columns, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk;
constexpr int kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16;  // steps of 16 along the head dim in q k^T
constexpr int kKeySteps = kBc / 16;  // steps of 16 along the keys in p v
constexpr int kKeyTiles = kBc / 8;  // columns of eight keys in a thread's scores
constexpr int kValueTiles = kDv / 8;  // columns of eight in a thread's outputs

// Barriers of the block, by warpgroup that computes.
constexpr int kGroupBarrier = 1;  // its own
constexpr int kTurnBarrier = 1 + kConsumers;  // passes the turn to it

constexpr unsigned kQBytes = 64 * kDChunks * kChunk * sizeof(Element);  // of one warpgroup
constexpr unsigned kKBytes = kBc * kDChunks * kChunk * sizeof(Element);
constexpr unsigned kVBytes = kBc * kDvChunks * kChunk * sizeof(Element);

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using Chunk64 = Element[64 * kChunk];  // of the 64 rows of one warpgroup
using ChunkBc = Element[kBc * kChunk];

struct SharedStorage {
  // Q by warpgroup, and outputs on their way to global memory.
  alignas(1024) Chunk64 q[kQStages][kConsumers][kDChunks];
  alignas(1024) Chunk64 o[kConsumers][kDvChunks];
  alignas(1024) ChunkBc k[kKStages][kDChunks];
  alignas(1024) ChunkBc v[kVStages][kDvChunks];
  // A stage is full once its bytes have arrived, and empty once every warpgroup has done with it: for K and
  // V those of all blocks of the cluster, which copy to each other.
  Barrier q_full[kQStages][kConsumers], q_empty[kQStages];
  Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
static_assert(sizeof(SharedStorage) == 222208, "the size that pruning counted on");

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// A barrier in shared memory (PTX mbarrier): a phase ends when `arrivals` threads have arrived and all announced bytes
// are there.
__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Shows initialised barriers to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that copies will bring in this phase.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of that parity. A new barrier's previous phase counts as one of parity 1, ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// Waits until `threads` threads have come to barrier `id` of the block, this one's warp among them.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Comes to barrier `id` and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Shows ordinary writes to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Brings the box at (x, row, head, batch) to shared memory, zeros where it lies outside; counts its bytes towards
// `barrier`.
__device__ __forceinline__ void tma_load(
    void* shared, const CUtensorMap* map, Barrier* barrier, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Writes a box from shared memory to (x, row, head, batch), except for what lies outside.
__device__ __forceinline__ void tma_store(
    const CUtensorMap* map, const void* shared, int x, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(x), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until all but the last kGroups groups of this thread's stores have read what they store.
template <int kGroups>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}

// As `tma_load`, to the same place in each of the cluster's `blocks`, a bit each; counts the bytes towards the barrier
// of each that is where this block's `barrier` is.
__device__ __forceinline__ void tma_multicast(
    void* shared, const CUtensorMap* map, Barrier* barrier, unsigned short blocks, int x, int row, int head,
    int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(row), "r"(head),
        "r"(batch)
      : "memory");
}

// Arrives at the barrier of a block of the cluster that is where this block's `barrier` is. It publishes no writes to
// that block: what it gives up has been read, and a release to the whole cluster would be a fence of all memory.
__device__ __forceinline__ void barrier_arrive_at(Barrier* barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(block)
      : "memory");
}

// Waits until all threads of the cluster have come, but for those that have ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;"
      :
      :
      : "memory");
}

// Changes how many registers a thread of this warpgroup has, whose four warps all call it.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// True in one lane of a full warp.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Orders what this warpgroup's threads wrote to registers before its next products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// Waits for all but the last kGroups groups.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}

// Keeps the compiler from reading products before the wait that precedes this.
template <int n>
__device__ __forceinline__ void hold(float (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i]) : : "memory");
}

// D = A B, or D += A B if `accumulate`, for one warpgroup: D is 64 x n. q k^T reads both factors from shared memory,
// p v has p in registers and v by rows of n.
__device__ __forceinline__ void wgmma_m64n80k16_bf16_ss(
    float (&d)[40], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39}, "
      "%40, %41, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n128k16_bf16_rs_trans(
    float (&d)[64], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

#endif

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// What wgmma reads from `start` on: rows of 128 bytes, swizzled, groups of eight rows one after the other; chunks of 64
// columns `chunk_bytes` apart where the columns are what is multiplied in parallel.
__device__ __forceinline__ unsigned long long descriptor(const void* start, unsigned chunk_bytes = 16) {
  constexpr unsigned long long kSwizzle128 = 1ULL << 62, kGroupOfRows = 1024ULL >> 4 << 32;
  return kSwizzle128 | kGroupOfRows | static_cast<unsigned long long>(chunk_bytes >> 4) << 16 |
         (shared_address(start) & 0x3ffff) >> 4;
}

// Where a ring of `stages` buffers stands: the buffer, and the parity of the phase that fills it.
template <int stages>
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The work of one block at a time: kBr of the kClusterRows query rows that its cluster takes of one head, and the keys
// that some of these see.
struct Tile {
  int first_row, head, batch;
  int num_key_tiles;  // that some row of the cluster sees

  __device__ __forceinline__ Tile(const AttentionArgs& args, int q_tile, int head, int batch)
      : head(head), batch(batch) {
    first_row = q_tile * kClusterRows + blockIdx.x % kCluster * kBr;
    int num_keys = args.seqlen_k;
    if (kCausal) num_keys = max(0, min(num_keys, (q_tile + 1) * kClusterRows + args.seqlen_k - args.seqlen_q));
    num_key_tiles = (num_keys + kBc - 1) / kBc;
  }
};

// Divides by what is the same for many numbers, multiplying by its inverse (Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994), which finds the quotient or one less.
struct Divisor {
  int value;
  unsigned inverse;

  __device__ __forceinline__ explicit Divisor(int value) : value(value), inverse(0xffffffffu / unsigned(value)) {}

  __device__ __forceinline__ int divide(int number, int& remainder) const {
    const int quotient = __umulhi(number, inverse);
    remainder = number - quotient * value;
    const bool less = remainder >= value;
    remainder -= less ? value : 0;
    return quotient + less;
  }
};

// The tiles of a cluster that stays, in turns. Under a causal mask a turn is two tiles of one head, the longest and the
// shortest that are left, so that all turns take as long.
template <typename Work>
__device__ __forceinline__ void for_each_tile(const AttentionArgs& args, const Work& work) {
  const int q_tiles = (args.seqlen_q + kClusterRows - 1) / kClusterRows, num_heads = args.num_q_heads;
  const Divisor turns(kCausal ? (q_tiles + 1) / 2 : q_tiles);  // for one head
  const Divisor heads(num_heads);  // of one batch
  for (int turn = blockIdx.x / kCluster; turn < turns.value * num_heads * args.batch; turn += gridDim.x / kCluster) {
    int first, head;
    const int batch = heads.divide(turns.divide(turn, first), head), last = q_tiles - 1 - first;
    for (int q_tile = kCausal ? last : first;; q_tile = first) {
      work(Tile(args, q_tile, head, batch));
      if (q_tile == first) break;
    }
  }
}

// What a thread knows of its two rows, g = lane / 4 and g + 8 of its warp's sixteen: element i of its scores or outputs
// belongs to row i / 2 % 2 and column 8 (i / 4) + 2 (lane % 4) + i % 2.
struct Rows {
  float max[2];  // running maxima of scale * score, in powers of two, and
  float sum[2];  // this thread's share of the sums of weights
};

// Hides what a row must not see: keys from `seqlen_k` on and, under a causal mask, those after its diagonal.
__device__ __forceinline__ void mask(float (&s)[kBc / 2], int row, int first_key, int seqlen_q, int seqlen_k) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int end = seqlen_k;
    if (kCausal) end = min(end, row + e / 2 * 8 + seqlen_k - seqlen_q + 1);
    end -= first_key + threadIdx.x % 4 * 2 + e % 2;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      if (t * 8 >= end) s[4 * t + e] = -kInfinity;
    }
  }
}

// Raises the running maximum of each row to the tile's. What was summed so far must be multiplied by `rescale`,
// where true is returned.
__device__ __forceinline__ bool raise_maximum(
    const float (&s)[kBc / 2], Rows& rows, float (&rescale)[2], float scale) {
  // A maximum that is out of date by a factor of 2^8 harms neither range nor precision. As integers, positive
  // floats compare as they are; zero bounds the others.
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int bound = 0;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      bound = __vimax3_s32(bound, __float_as_int(s[4 * t + 2 * h]), __float_as_int(s[4 * t + 2 * h + 1]));
    }
    grown |= fmaf(__int_as_float(bound), scale, -rows.max[h]) > 8.0f;
  }
  if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float tile_max = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int t = 1; t < kKeyTiles; ++t) tile_max = fmaxf(tile_max, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
    const float row_max = fmaxf(rows.max[h], tile_max * scale);
    // A row that has seen no key yet keeps its maximum of -infinity, against which nothing can be measured.
    const float base = kCausal && row_max == -kInfinity ? 0.0f : row_max;
    rescale[h] = exp2f(rows.max[h] - base);
    rows.max[h] = row_max;
    rows.sum[h] *= rescale[h];
  }
  return true;
}

// Turns the scores of a tile into weights, 2^(score - maximum), and adds them to the rows' sums.
__device__ __forceinline__ void weigh(float (&s)[kBc / 2], Rows& rows, float scale) {
  float base[2], sum[2][2] = {};  // of even and of odd columns: short chains of additions
#pragma unroll
  for (int h = 0; h < 2; ++h) base[h] = kCausal && rows.max[h] == -kInfinity ? 0.0f : rows.max[h];
#pragma unroll
  for (int i = 0; i < kBc / 2; ++i) {
    const float exponent = fmaf(s[i], scale, -base[i / 2 % 2]);
    s[i] = exp2f(exponent);
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[h] += sum[h][0] + sum[h][1];
}

// Weights as operands of sixteen keys each: two neighbouring tiles of eight, as a thread has them.
__device__ __forceinline__ void pack_weights(const float (&s)[kBc / 2], unsigned (&p)[kKeySteps][4]) {
#pragma unroll
  for (int i = 0; i < kBc / 4; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale_output(float (&o)[kDv / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// Starts s = q k^T for a warpgroup's rows and one tile of keys, not scaled.
__device__ __forceinline__ void start_qk(
    float (&s)[kBc / 2], unsigned long long q, unsigned long long k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    const int chunk = step / 4, bytes = step % 4 * 32;
    const unsigned long long k_step = k + ((chunk * int(sizeof(ChunkBc)) + bytes) >> 4);
    const unsigned long long q_step = q + ((chunk * int(sizeof(Chunk64)) + bytes) >> 4);
    wgmma_m64n80k16_bf16_ss(s, q_step, k_step, step > 0);
  }
  wgmma_commit();
}

// Starts o += p v for a warpgroup's rows and one tile of keys.
__device__ __forceinline__ void start_pv(float (&o)[kDv / 2], const unsigned (&p)[kKeySteps][4], unsigned long long v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    wgmma_m64n128k16_bf16_rs_trans(o, p[step], v + (step * 16 * 128 >> 4), true);
  }
  wgmma_commit();
}

// Turns the sign of a warpgroup's Q: maxima are taken of raw scores, which a negative scale would turn round.
__device__ __forceinline__ void negate_q(Chunk64* q, int group) {
  unsigned* pairs = reinterpret_cast<unsigned*>(q);
  for (int i = threadIdx.x % kGroup; i < kDChunks * 64 * kChunk / 2; i += kGroup) pairs[i] ^= 0x80008000u;
  fence_proxy_async();
  named_barrier_sync(kGroupBarrier + group, kGroup);
}

// Warpgroups compute products in turns, so that one's softmax runs beside another's products.
__device__ __forceinline__ void await_turn(int group) {
  named_barrier_sync(kTurnBarrier + group, 2 * kGroup);
}
__device__ __forceinline__ void pass_turn(int group) {
  named_barrier_arrive(kTurnBarrier + (group + 1) % kConsumers, 2 * kGroup);
}

// Divides by the sums and brings a warp's sixteen rows of outputs to shared memory, as the copy engine wants them.
__device__ __forceinline__ void stage_output(
    Chunk64* staged, const float (&o)[kDv / 2], const float (&inverse)[2], int warp) {
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < kValueTiles; n += 2) {
    unsigned m[4];
#pragma unroll
    for (int j = 0; j < 4 && n + j / 2 < kValueTiles; ++j) {
      const int i = 4 * n + 2 * j;
      m[j] = pack(o[i] * inverse[j % 2], o[i + 1] * inverse[j % 2]);
    }
    // Lanes 0 to 15 name the rows of one column of eight, the others those of the next.
    const int piece = (n % 8 + lane / 16) ^ row % 8;
    Element* target = staged[n / 8] + row * kChunk + piece * 8;
    stmatrix_x4(target, m);
  }
}

// Brings one tile's Q, and the K and V that it sees, to shared memory as room is made for them. From the last keys to
// the first, so that tiles with a mask come first; each K before the V that its scores will overtake. The first
// warpgroup need not wait for the others' Q. Of K and V
// each block copies its share to all blocks of the cluster.
__device__ __forceinline__ void copy_tile(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile, Turn<kQStages>& q_turn,
    Turn<kKStages>& k_turn, Turn<kVStages>& v_turn) {
  const auto copy_q = [&](int group) {
    Barrier& full = smem.q_full[q_turn.stage][group];
    barrier_expect(&full, kQBytes);
#pragma unroll 1
    for (int c = 0; c < kDChunks; ++c) {
      tma_load(smem.q[q_turn.stage][group][c], &maps.q, &full, c * kChunk, tile.first_row + 64 * group, tile.head,
               tile.batch);
    }
  };
  barrier_wait(&smem.q_empty[q_turn.stage], q_turn.parity ^ 1);
  copy_q(0);
  const int kv_head = tile.head / (args.num_q_heads / args.num_kv_heads);
  const int first_key = blockIdx.x % kCluster * kShare;  // of a tile, in this block's share
  const auto copy_k = [&](int n) {
    Barrier& full = smem.k_full[k_turn.stage];
    barrier_wait(&smem.k_empty[k_turn.stage], k_turn.parity ^ 1);
    barrier_expect(&full, kKBytes);
#pragma unroll 1
    for (int c = 0; c < kDChunks; ++c) {
      tma_multicast(smem.k[k_turn.stage][c] + first_key * kChunk, &maps.k, &full, kEveryBlock, c * kChunk,
                    n * kBc + first_key, kv_head, tile.batch);
    }
    k_turn.advance();
  };
  if (tile.num_key_tiles > 0) copy_k(tile.num_key_tiles - 1);
#pragma unroll 1
  for (int group = 1; group < kConsumers; ++group) copy_q(group);
  q_turn.advance();
  for (int n = tile.num_key_tiles - 1; n >= 0; --n) {
    if (n > 0) copy_k(n - 1);
    Barrier& full = smem.v_full[v_turn.stage];
    barrier_wait(&smem.v_empty[v_turn.stage], v_turn.parity ^ 1);
    barrier_expect(&full, kVBytes);
#pragma unroll 1
    for (int c = 0; c < kDvChunks; ++c) {
      tma_multicast(smem.v[v_turn.stage][c] + first_key * kChunk, &maps.v, &full, kEveryBlock, c * kChunk,
                    n * kBc + first_key, kv_head, tile.batch);
    }
    v_turn.advance();
  }
}

// One warpgroup's 64 rows of a tile.
__device__ __forceinline__ void attend(const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem,
                                       const Tile& tile, int group, Turn<kQStages>& q_turn, Turn<kKStages>& k_turn,
                                       Turn<kVStages>& v_turn) {
  const int warp = threadIdx.x % kGroup / 32, lane = threadIdx.x % 32;
  const unsigned in_group = threadIdx.x % kGroup;
  const bool leader = in_group == 0;
  const int first_row = tile.first_row + 64 * group;
  const int row = first_row + 16 * warp + lane / 4;  // and row + 8
  // The warpgroup's rows see key tiles [0, end_tile), and those before `masked_tile` whole.
  int end_tile = first_row < args.seqlen_q ? tile.num_key_tiles : 0, masked_tile = args.seqlen_k / kBc;
  if (kCausal) {
    const int seen_by_first = first_row + args.seqlen_k - args.seqlen_q + 1;
    masked_tile = min(masked_tile, max(0, seen_by_first) / kBc);
    end_tile = min(end_tile, (max(0, seen_by_first + 63) + kBc - 1) / kBc);
  }
  // A scale of zero becomes too small to matter, since 0 * infinity is not a number.
  const float scale = fmaxf(fabsf(args.scale) * kLog2e, 1e-30f);
  Rows rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.max[h] = -kInfinity;
    rows.sum[h] = 0.0f;
  }
  float o[kDv / 2];
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;

  Chunk64* q = smem.q[q_turn.stage][group];
  barrier_wait(&smem.q_full[q_turn.stage][group], q_turn.parity);
  if (args.scale < 0.0f) negate_q(q, group);
  const unsigned long long q_desc = descriptor(q);
  const unsigned long long k_desc = descriptor(smem.k), v_desc = descriptor(smem.v, sizeof(ChunkBc));
  constexpr int kNextK = sizeof(smem.k[0]) >> 4, kNextV = sizeof(smem.v[0]) >> 4;  // as descriptors count
  for (int n = tile.num_key_tiles; n > end_tile; --n) {
    // Keys that only other warpgroups see, here or in the neighbouring block.
    await_turn(group);
    pass_turn(group);
    barrier_wait(&smem.k_full[k_turn.stage], k_turn.parity);
    named_barrier_sync(kGroupBarrier + group, kGroup);  // no warp may fall behind by a phase
    if (in_group < kCluster) barrier_arrive_at(&smem.k_empty[k_turn.stage], in_group);
    k_turn.advance();
    barrier_wait(&smem.v_full[v_turn.stage], v_turn.parity);
    named_barrier_sync(kGroupBarrier + group, kGroup);
    if (in_group < kCluster) barrier_arrive_at(&smem.v_empty[v_turn.stage], in_group);
    v_turn.advance();
  }
  int n = end_tile - 1;
  if (n >= 0) {
    float s[kBc / 2], rescale[2];
    unsigned p[kKeySteps][4];
    barrier_wait(&smem.k_full[k_turn.stage], k_turn.parity);
    await_turn(group);
    start_qk(s, q_desc, k_desc + k_turn.stage * kNextK);
    pass_turn(group);
    wgmma_wait<0>();
    hold(s);
    if (in_group < kCluster) barrier_arrive_at(&smem.k_empty[k_turn.stage], in_group);
    // After the last scores the next Q may come.
    if (leader && n == 0) barrier_arrive(&smem.q_empty[q_turn.stage]);
    k_turn.advance();
    if (n >= masked_tile) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
    raise_maximum(s, rows, rescale, scale);
    weigh(s, rows, scale);
    pack_weights(s, p);
#pragma unroll 1
    for (--n; n >= 0; --n) {
      // The next scores follow these outputs through the tensor cores without a gap.
      barrier_wait(&smem.v_full[v_turn.stage], v_turn.parity);
      await_turn(group);
      start_pv(o, p, v_desc + v_turn.stage * kNextV);
      barrier_wait(&smem.k_full[k_turn.stage], k_turn.parity);
      start_qk(s, q_desc, k_desc + k_turn.stage * kNextK);
      pass_turn(group);
      wgmma_wait<1>();
      hold(o);
      if (in_group < kCluster) barrier_arrive_at(&smem.v_empty[v_turn.stage], in_group);
      v_turn.advance();
      wgmma_wait<0>();
      hold(s);
      if (in_group < kCluster) barrier_arrive_at(&smem.k_empty[k_turn.stage], in_group);
      if (leader && n == 0) barrier_arrive(&smem.q_empty[q_turn.stage]);
      k_turn.advance();
      if (n >= masked_tile) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
      if (raise_maximum(s, rows, rescale, scale)) rescale_output(o, rescale);
      weigh(s, rows, scale);
      pack_weights(s, p);
    }
    barrier_wait(&smem.v_full[v_turn.stage], v_turn.parity);
    start_pv(o, p, v_desc + v_turn.stage * kNextV);
    wgmma_wait<0>();
    hold(o);
    if (in_group < kCluster) barrier_arrive_at(&smem.v_empty[v_turn.stage], in_group);
    v_turn.advance();
  }

  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_sum = rows.sum[h];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
    const bool seen = rows.max[h] != -kInfinity;
    inverse[h] = seen ? __fdividef(1.0f, row_sum) : 0.0f;
    if (args.lse != nullptr && row + 8 * h < args.seqlen_q && lane % 4 == 0) {
      const long long at = (1LL * tile.batch * args.num_q_heads + tile.head) * args.seqlen_q + row + 8 * h;
      args.lse[at] = seen ? (rows.max[h] + log2f(row_sum)) * kLn2 : -kInfinity;
    }
  }
  // The outputs before have left once the thread that sent them off sees so.
  Chunk64* staged = smem.o[group];
  if (leader) tma_wait_read<0>();
  named_barrier_sync(kGroupBarrier + group, kGroup);
  stage_output(staged, o, inverse, warp);
  fence_proxy_async();
  named_barrier_sync(kGroupBarrier + group, kGroup);
  if (leader) {
    for (int c = 0; c < kDvChunks; ++c) tma_store(&maps.o, staged[c], c * kChunk, first_row, tile.head, tile.batch);
    tma_commit();
    if (end_tile == 0) barrier_arrive(&smem.q_empty[q_turn.stage]);  // no scores have done so
  }
  q_turn.advance();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    attention_bf16_d128_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) {
      for (int group = 0; group < kConsumers; ++group) barrier_init(&smem.q_full[i][group], 1);
      barrier_init(&smem.q_empty[i], kConsumers);
    }
    for (int i = 0; i < kKStages; ++i) {
      barrier_init(&smem.k_full[i], 1);
      barrier_init(&smem.k_empty[i], kCluster * kConsumers);
    }
    for (int i = 0; i < kVStages; ++i) {
      barrier_init(&smem.v_full[i], 1);
      barrier_init(&smem.v_empty[i], kCluster * kConsumers);
    }
    fence_barrier_init();
  }
  cluster_sync();

  Turn<kQStages> q_turn;
  Turn<kKStages> k_turn;
  Turn<kVStages> v_turn;
  if (warp < 4) {
    give_registers<24>();
    if (warp == 0 && elect_one()) {
      prefetch_map(&maps.q);
      prefetch_map(&maps.k);
      prefetch_map(&maps.v);
      for_each_tile(args, [&](const Tile& tile) { copy_tile(args, maps, smem, tile, q_turn, k_turn, v_turn); });
    }
  } else {
    take_registers<160>();
    const int group = warp / 4 - 1;
    if (group == kConsumers - 1) pass_turn(group);
    for_each_tile(args, [&](const Tile& tile) { attend(args, maps, smem, tile, group, q_turn, k_turn, v_turn); });
    tma_wait_read<0>();
    // Barriers are there until their block ends: not before the neighbour has arrived at them for the last time.
    cluster_sync();
  }
}

#ifndef __CUDACC_RTC__
// Describes an array of `sizes` (columns, rows, heads, batch) and `strides` (of rows, heads, batches) in elements,
// which is moved in boxes of `columns` by `rows`.
static cudaError_t encode_map(
    CUtensorMap* map, const Element* array, const long long (&sizes)[4], const long long (&strides)[3],
    unsigned columns, unsigned rows, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  // From the driver by name, so that nothing needs to be linked with it.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  // An array without rows is never read, but a map must be of something.
  const bool any_rows = sizes[1] > 0;
  cuuint64_t whole[4], stride_bytes[3];
  for (int i = 0; i < 4; ++i) whole[i] = i == 0 || any_rows ? sizes[i] : 1;
  // The stride of a dimension of one is never used, but must be one that the driver takes.
  for (int i = 0; i < 3; ++i) stride_bytes[i] = whole[i + 1] > 1 ? strides[i] * sizeof(Element) : 16;
  const cuuint32_t box[4] = {columns, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<Element*>(array), whole, stride_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d128(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  const long long strides[] = {args->q_stride_batch, args->q_stride_head, args->q_stride_row,
                               args->k_stride_batch, args->k_stride_head, args->k_stride_row,
                               args->v_stride_batch, args->v_stride_head, args->v_stride_row,
                               args->o_stride_batch, args->o_stride_head, args->o_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->v, args->o};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(__nv_bfloat16)) != 0) return cudaErrorMisalignedAddress;
  }
  const long long tiles = (1LL * args->seqlen_q + kClusterRows - 1) / kClusterRows * kCluster;
  const long long blocks = tiles * args->num_q_heads * args->batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  const bool any_keys = args->seqlen_k > 0;  // without, their arrays may be null
  TensorMaps maps;
  const cudaError_t q_status = encode_map(
      &maps.q, args->q, {kD, args->seqlen_q, args->num_q_heads, args->batch},
      {args->q_stride_row, args->q_stride_head, args->q_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (q_status != cudaSuccess) return q_status;
  const cudaError_t k_status = encode_map(
      &maps.k, any_keys ? args->k : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->k_stride_row, args->k_stride_head, args->k_stride_batch}, 64, 40,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const cudaError_t v_status = encode_map(
      &maps.v, any_keys ? args->v : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->v_stride_row, args->v_stride_head, args->v_stride_batch}, 64, 40,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (v_status != cudaSuccess) return v_status;
  const cudaError_t o_status = encode_map(
      &maps.o, args->o, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->o_stride_row, args->o_stride_head, args->o_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (o_status != cudaSuccess) return o_status;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args), &maps};
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  return cudaLaunchKernel(attention_bf16_d128_kernel, dim3(grid), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
"""


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | None = None,
    scale: float | None = None,
    out: Any = None,
    stream: Any = None,
    return_lse: bool = False,
    *,
    layout: str = "bhsd",
    recompute: bool = False,
) -> Any:
    """softmax(scale * q k^T) v in bfloat16, summed in float32.

    q is (batch, heads, seqlen_q, 128), k and v are (batch, kv_heads, seqlen_k, 128), where kv_heads
    divides heads; with layout="bshd", heads and seqlen are swapped in all of them. Any strides will do as
    long as the last dimension is contiguous: transposed views and slices of a packed qkv run without a copy. Torch
    tensors with strides or an address that the kernel's accesses do not suit are copied, unless `out` or `stream` is given.

    Takes torch tensors and arrays with __cuda_array_interface__ whose dtype is ml_dtypes' bfloat16 where they
    lie, others that have __dlpack__ (JAX's) where they lie too, by way of torch, and numpy arrays of ml_dtypes'
    bfloat16 with a copy to the GPU and back. Returns an array of q's kind and memory layout, or `out`, which
    may have strides of its own but not the memory of q, k or v.

    causal: None for the mask the kernel was tuned with (False); True masks bottom-right: query row i sees
        keys 0 .. i + seqlen_k - seqlen_q. A row that sees no key is zero, its log-sum-exp -inf.
    scale: None for 1 / sqrt(head_dim).
    stream: None for the stream the arrays are used on (torch's and CuPy's current one, else the default
        stream); otherwise an integer handle or a torch, CuPy or PyCUDA stream, whose order with other streams
        is the caller's.
    return_lse: also return the natural log-sum-exp, a contiguous float32 (batch, heads, seqlen_q) array of q's kind.
    recompute: True lets gradients of torch tensors be taken, by PyTorch's attention, which the backward pass runs
        anew. Otherwise tensors that need one are refused.

    Under torch.compile and torch.export it is the operator of `register_torch`, without a graph break. In
    torch.autocast, tensors are cast to bfloat16.

    Runs in the arrays' CUDA context, from any thread. Raises TypeError and ValueError for arrays it cannot
    serve, RuntimeError when the GPU or the compiler fails, ImportError without PyCUDA.
    """
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; choose 'bhsd' or 'bshd'")
    if scale is not None and not abs(scale) < 3.4e38:
        raise ValueError(f"scale is {scale}; it must be a finite float32")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        return _attention_torch(torch, q, k, v, causal, scale, out, stream, return_lse, layout, recompute)
    if isinstance(q, np.ndarray):
        return _attention_numpy(q, k, v, causal, scale, out, stream, return_lse, layout)
    if out is None and not _can_allocate(q) and hasattr(q, "__dlpack__"):
        return _attention_dlpack(q, k, v, causal, scale, stream, return_lse, layout)
    _check_kinds(q, (("k", k), ("v", v), ("out", out)))
    q_address, query, q_stream = _read("q", q)
    k_address, key, k_stream = _read("k", k)
    v_address, value, v_stream = _read("v", v)
    o_address, output, o_stream = (0, None, None) if out is None else _read("out", out)
    plan = _plan(None, layout == "bshd", output, *query, *key, *value)
    # The stream on which q's library works now.
    current = q_stream or 0
    handle = current if stream is None else _stream_handle(stream)
    side_stream = None if handle == current else handle
    if out is None:
        out = _empty(q, DTYPE, plan.out_shape, plan.out_strides, side_stream)
        o_address = _address(out)
    lse = _empty(q, "float32", plan.rows_shape, plan.rows_strides, side_stream) if return_lse else None
    if plan.blocks:
        if stream is None:
            _wait_for_producers({q_stream, k_stream, v_stream, o_stream}, handle)
        lse_address = 0 if lse is None else _address(lse)
        addresses = (q_address, k_address, v_address, o_address, lse_address)
        _launch(plan, *addresses, causal, scale, handle, output is not None)
    return (out, lse) if return_lse else out


def _launch(
    plan: _Plan,
    q: int,
    k: int,
    v: int,
    o: int,
    lse: int,
    causal: bool | None,
    scale: float | None,
    handle: int,
    given: bool,
) -> None:
    """Of arrays at these addresses, on the stream of that handle. `o` was `given` or made for the call; `lse`, the
    log-sum-exp, is 0 where it is not wanted."""
    if not plan.has_keys:
        k = v = 0
    if given and o in (q, k, v):
        raise ValueError("out is the memory of q, k or v, which the kernel still reads; pass another array")
    if not plan.aligned or (q | k | v | o) % _ACCESS_BYTES:
        _check_alignment((q, k, v, o), plan.extents)
    device = _common_device((q, k, v, o)) if plan.device is None else plan.device
    masked = PROBLEM["causal"] if causal is None else bool(causal)
    idle = plan.idle[device, masked, handle]
    try:
        launch = idle.pop()
    except IndexError:
        if len(plan.idle) > _MOST_STREAMS:
            plan.idle.clear()
        launch = _Launch(plan, device, masked, handle)
    launch.write(q, k, v, o, lse)
    if scale != launch.scale:
        number = _DEFAULT_SCALE if scale is None else scale
        _SCALE.pack_into(launch.arguments, _ADDRESSES.size + _EXTENTS.size, number)
        launch.scale = scale
    pushed = False
    launch.ask_context()
    if launch.context.value != launch.primary:
        pushed = _push_context(_driver(), q, device)
    try:
        pointers = (q, k, v, o)
        maps = plan.maps.get(pointers) or _encode_maps(plan, pointers)
        launch.parameters[1] = maps.address
        status = launch.start()
    finally:
        if pushed:
            _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    if status:
        _check(status, f"launching on stream {handle:#x} (is it one of device {device} and its context?)")
    idle.append(launch)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Launch:
    """A launch but for addresses: what the driver is passed, kept with its plan, as making it takes longer than the launch
    itself. The driver copies the arguments, so that the next call may write its own; no two calls have it at once."""

    def __init__(self, plan: _Plan, device: int, masked: bool, handle: int) -> None:
        kernel = _load(device, masked)
        driver = _driver()
        self.scale: float | None = None
        """As of the last call."""
        scales = _SCALE.pack(_DEFAULT_SCALE)
        packed = bytes(_ADDRESSES.size) + _EXTENTS.pack(*plan.extents) + scales
        self.arguments = ctypes.create_string_buffer(packed, len(packed))
        """AttentionArgs of the source."""
        self.write = functools.partial(_ADDRESSES.pack_into, self.arguments, 0)
        """Takes the addresses."""
        self.parameters = (ctypes.c_void_p * 2)(ctypes.addressof(self.arguments))
        """The arguments' addresses, the maps' second."""
        self.primary = 0 if plan.device is None else _retain_primary_context(device)
        """The context to be in, where it is known: torch's is the device's primary."""
        self.context = ctypes.c_void_p()
        """The current one, once `ask_context` was called."""
        configuration = _Config((plan.blocks, 1, 1), (THREADS, 1, 1), SMEM_BYTES, handle)
        # Functions found by index have no argument types, and take ctypes' own objects as they are: in half the time.
        self.ask_context = functools.partial(driver["cuCtxGetCurrent"], ctypes.byref(self.context))
        self.start = functools.partial(
            driver["cuLaunchKernelEx"],
            ctypes.byref(configuration),
            ctypes.c_void_p(kernel),
            self.parameters,
            None,
        )


# ---- arrays ------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What follows from all about the arrays but their addresses: made once for arrays of the same shapes."""

    blocks: int
    """Of the launch; none where there is nothing to compute."""
    extents: tuple[int, ...]
    """The middle of AttentionArgs: strides, in elements and 0 along dimensions of one entry, and sizes."""
    aligned: bool
    """Whether the kernel can step by those strides."""
    has_keys: bool
    device: int | None
    """The device's ordinal where the arrays know it."""
    meta: bool
    """Whether they are tensors without data."""
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    """In elements, of the array made where none is passed."""
    rows_shape: tuple[int, int, int]
    rows_strides: tuple[int, int, int]
    """The same of the log-sum-exp."""
    like_q: bool
    """Whether that array is laid out as q is: then torch makes one faster."""
    idle: dict[tuple[int, bool, int], list[_Launch]]
    """Launches that no call has now, by device, mask and stream."""
    maps: dict[tuple[int, int, int, int], _Maps]
    """By the addresses of q, k, v and o."""


class _Array(NamedTuple):
    """An array as (batch, heads, seqlen). Strides are in elements, 0 along dimensions of one entry."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    device: int | None


def _torch_of(array: Any) -> Any:
    """The torch module where `array` is a tensor; importing it is left to who made the tensor."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _read(name: str, array: Any) -> tuple[int, tuple[Any, ...], int | None]:
    """An array's address, its type, shape, strides and device, which it does not tell, and the stream on which
    its data is ready, if any."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(
            f"{name} is a {_kind(array)}; pass torch tensors, CuPy arrays, PyCUDA GPUArrays, numpy arrays or "
            "others with __cuda_array_interface__ or, without out=, __dlpack__"
        )
    address, read_only = interface["data"]
    if read_only and name == "out":
        raise ValueError("out is read-only")
    # The interface has no name for bfloat16 ('<V2' is any two bytes), so the array's dtype must tell.
    type_name = getattr(getattr(array, "dtype", None), "name", interface["typestr"])
    strides = interface.get("strides")
    strides = None if strides is None else tuple(strides)
    return address, (type_name, tuple(interface["shape"]), strides, None), interface.get("stream")


@functools.lru_cache(maxsize=1024)
def _plan(torch: Any, bshd: bool, out: tuple[Any, ...] | None, *arrays: Any) -> _Plan:
    """Checks type, shape, strides and device of q, k and v, `arrays` one after the other, and of `out`, and draws from them
    all that they decide. `torch` is the module where they are tensors, else None. Strides are None where arrays are
    contiguous, as in the CUDA array interface, or as they are."""
    q, k, v = arrays[:4], arrays[4:8], arrays[8:]
    query, key, value = (
        _inspect("q", q, bshd, torch),
        _inspect("k", k, bshd, torch),
        _inspect("v", v, bshd, torch),
    )
    batch, heads, seqlen_q = query.shape
    kv_heads, seqlen_k = _check_shapes(query, key, value)
    out_shape, out_strides = _dense_like(query, bshd)
    if out is None:
        s0, s1, s2, _ = out_strides
        steps = (s0, s2, s1) if bshd else (s0, s1, s2)
        output = _Array(query.shape, _stepped(query.shape, steps), query.device)
    else:
        output = _inspect("out", out, bshd, torch)
        _check_output(output, query)
    device = query.device
    for name, array in (("k", key), ("v", value), ("out", output)):
        if array.device != device:
            raise ValueError(f"q is on device {device}, {name} on device {array.device}; move them to one")
    # Clusters are whole: the last may have blocks without rows.
    blocks = -(-seqlen_q // (ROWS_PER_BLOCK * CLUSTER)) * CLUSTER * heads * batch
    if blocks > _INT_MAX or max(seqlen_q, seqlen_k) > _INT_MAX:
        raise ValueError(f"{blocks} blocks exceed what a CUDA grid holds, {_INT_MAX}: split the batch")
    strides = (*query.strides, *key.strides, *value.strides, *output.strides)
    extents = (*strides, batch, heads, kv_heads, seqlen_q, seqlen_k)
    return _Plan(
        blocks=min(blocks, MAX_BLOCKS),
        extents=extents,
        aligned=_can_step(strides),
        has_keys=seqlen_k > 0,
        device=device,
        meta=torch is not None and q[3].type == "meta",
        out_shape=out_shape,
        out_strides=out_strides,
        rows_shape=query.shape,
        rows_strides=(heads * seqlen_q, seqlen_q, 1),
        like_q=out_shape == q[1] and q[2] in (None, out_strides),
        idle=collections.defaultdict(list),
        maps={},
    )


def _inspect(name: str, described: tuple[Any, ...], bshd: bool, torch: Any) -> _Array:
    """An array in the kernel's terms; raises what tells the caller how to mend it."""
    dtype, shape, strides, device = described
    if torch is not None:
        if dtype is not torch.bfloat16:
            raise TypeError(f"{name} is {dtype}, not torch.bfloat16: pass {name}.bfloat16()")
        if device.type not in _TORCH_DEVICES:
            raise ValueError(f"{name} is on the device {str(device)!r}; move it with {name}.cuda()")
        device = device.index
    else:
        if dtype != "bfloat16":
            raise TypeError(
                f"{name} has the type {dtype!r}, not bfloat16 of ml_dtypes: pass torch tensors, {name}.bfloat16()"
            )
        if strides is not None:
            if any(stride % 2 for stride in strides):
                raise ValueError(f"{name} has the strides {strides} in bytes; they must be multiples of 2")
            strides = tuple(stride // 2 for stride in strides)
    if len(shape) != 4:
        order = "batch, seqlen, heads" if bshd else "batch, heads, seqlen"
        hint = f"; add a dimension with {name}[None]" if len(shape) == 3 else ""
        raise ValueError(
            f"{name} has {len(shape)} dimensions, {tuple(shape)}; 4 are needed, ({order}, head_dim){hint}"
        )
    n0, n1, n2, head_dim = shape
    s0, s1, s2, s3 = (n1 * n2 * head_dim, n2 * head_dim, head_dim, 1) if strides is None else strides
    if head_dim != HEAD_DIM:
        option = f"--d {HEAD_DIM} --dv" if name in ("v", "out") else "--d"
        raise ValueError(
            f"{name} has the head dim {head_dim}, this kernel serves {HEAD_DIM}; make another with "
            f"flashgen tune --dtype bf16 {option} {head_dim}"
        )
    if bshd:
        n1, n2, s1, s2 = n2, n1, s2, s1
    if n0 == 0 or n1 == 0 or n2 == 0:
        return _Array((n0, n1, n2), (0, 0, 0), device)
    if s3 != 1 and head_dim > 1:
        raise ValueError(
            f"the last dimension of {name} has the stride {s3}, but must be contiguous (stride 1): pass "
            f"{name}.contiguous() (torch) or ascontiguousarray({name}) (CuPy, numpy)"
        )
    return _Array((n0, n1, n2), _stepped((n0, n1, n2), (s0, s1, s2)), device)


def _stepped(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> tuple[int, int, int]:
    """The strides without those that are never stepped, which may be anything."""
    (n0, n1, n2), (s0, s1, s2) = shape, strides
    return (s0 if n0 > 1 else 0, s1 if n1 > 1 else 0, s2 if n2 > 1 else 0)


def _kind(array: Any) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__qualname__}"


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _can_allocate(q: Any) -> bool:
    """Whether `_empty` knows how to make more of q's kind."""
    return isinstance(q, _Buffer) or _library(q) in ("cupy", "pycuda")


def _check_kinds(q: Any, others: tuple[tuple[str, Any], ...]) -> None:
    """torch tensors keep among themselves: what is mixed could neither be ordered nor returned clearly."""
    tensors = _torch_of(q) is not None
    for name, array in others:
        if array is None or type(array) is type(q):
            continue
        if (_torch_of(array) is not None) != tensors or isinstance(array, np.ndarray):
            raise TypeError(f"q is a {_kind(q)}, but {name} a {_kind(array)}; pass arrays of one library")


def _check_shapes(query: _Array, key: _Array, value: _Array) -> tuple[int, int]:
    """The number of key/value heads and keys."""
    batch, heads, _ = query.shape
    kv_batch, kv_heads, seqlen_k = key.shape
    if value.shape != key.shape:
        raise ValueError(f"k and v differ in (batch, heads, seqlen): {key.shape} and {value.shape}")
    if kv_batch != batch:
        raise ValueError(f"q has the batch {batch}, k and v have {kv_batch}; they must be equal")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}; theirs must divide q's")
    return kv_heads, seqlen_k


def _check_output(output: _Array, query: _Array) -> None:
    if output.shape != query.shape:
        raise ValueError(
            f"out has (batch, heads, seqlen) {output.shape}, q has {query.shape}; they must be equal"
        )
    if 0 in output.shape:  # nothing to write
        return
    if any(n > 1 and stride == 0 for n, stride in zip(output.shape, output.strides, strict=True)):
        raise ValueError(f"out overlaps itself, its strides are {output.strides}; pass a dense array")


def _can_step(strides: tuple[int, ...]) -> bool:
    """Whether the kernel's copies suit such strides."""
    return all(0 <= stride < _STRIDE_END and stride % VECTOR == 0 for stride in strides)


def _check_alignment(addresses: tuple[int, ...], extents: tuple[int, ...]) -> None:
    """Each access moves 16 bytes and must start at a multiple of them; the copy engine takes no step back."""
    for i, (name, address) in enumerate(zip(("q", "k", "v", "out"), addresses, strict=True)):
        strides = extents[3 * i : 3 * i + 3]
        if address % _ACCESS_BYTES == 0 and _can_step(strides):
            continue
        raise ValueError(
            f"{name} starts at address {address:#x} with strides {strides} (batch, head, row) in elements; "
            f"this kernel copies {VECTOR} elements at once and needs an address that is a multiple of {_ACCESS_BYTES} "
            f"and positive strides that are multiples of {VECTOR}: pass {name}.contiguous() (torch) or a copy"
        )


def _common_device(addresses: tuple[int, ...]) -> int:
    """The device of arrays that do not know it themselves; an address of 0 is on any."""
    devices = {}
    for name, address in zip(("q", "k", "v", "out"), addresses, strict=True):
        if address:
            devices[name] = _device_of(name, address)
    for name, device in devices.items():
        if device != devices["q"]:
            raise ValueError(f"q is on device {devices['q']}, {name} on device {device}; move them to one")
    return devices["q"]


def _dense_like(query: _Array, bshd: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a dense array with q's shape and order of dimensions."""
    lengths, steps = list(query.shape), list(query.strides)
    if bshd:
        lengths[1:], steps[1:] = lengths[:0:-1], steps[:0:-1]
    # Outermost first: dimensions without a stride, then by falling stride.
    order = sorted(range(3), key=lambda i: (steps[i] != 0, -abs(steps[i])))
    strides, step = [0, 0, 0, 1], HEAD_DIM
    for i in reversed(order):
        strides[i] = step
        step *= max(lengths[i], 1)
    return (*lengths, HEAD_DIM), tuple(strides)


def _empty(
    q: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], side_stream: int | None
) -> Any:
    """An array of that type and q's kind on q's device; strides in elements.

    CuPy hands out memory in the order of its current stream; `side_stream` is the launch's where that is another.
    """
    if isinstance(q, _Buffer):
        return _Buffer(shape, np.dtype(dtype))
    library = _library(q)
    if library == "cupy":
        import cupy

        order = sorted(range(len(shape)), key=lambda i: -strides[i])
        dense = tuple(shape[i] for i in order)
        with q.device:
            if side_stream is None:
                memory = cupy.empty(dense, dtype=dtype)
            else:
                default = side_stream in _DEFAULT_STREAMS
                with cupy.cuda.Stream.null if default else cupy.cuda.ExternalStream(side_stream):
                    memory = cupy.empty(dense, dtype=dtype)
        return memory.transpose([order.index(i) for i in range(len(shape))])
    if library == "pycuda":
        from pycuda.gpuarray import GPUArray

        steps = tuple(np.dtype(dtype).itemsize * s for s in strides)
        return GPUArray(shape, np.dtype(dtype), allocator=q.allocator, strides=steps)
    raise TypeError(
        f"q is a {_kind(q)}, which this module cannot allocate: pass out= and leave return_lse, or pass torch, "
        "CuPy, PyCUDA or numpy arrays"
    )


def _address(array: Any) -> int:
    return array.__cuda_array_interface__["data"][0]


def _attention_dlpack(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | None,
    scale: float | None,
    stream: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """On views of the arrays, which torch makes; the results go back to q's library the same way.

    DLPack orders the memory's producers and consumers, on the streams that either library uses.
    """
    if stream is not None:
        raise ValueError(
            f"stream is taken with torch, CuPy, PyCUDA and numpy arrays only, and q is a {_kind(q)}"
        )
    if not hasattr(q, "__array_namespace__"):
        raise TypeError(f"q is a {_kind(q)}, whose library takes no results back: pass torch tensors")
    try:
        import torch
    except ImportError:
        raise TypeError(f"q is a {_kind(q)}, which is read through torch: install it") from None
    views = [torch.from_dlpack(array) for array in (q, k, v)]
    results = attention(*views, causal, scale, return_lse=return_lse, layout=layout)
    give_back = q.__array_namespace__().from_dlpack
    return tuple(map(give_back, results)) if return_lse else give_back(results)


# ---- streams -----------------------------------------------------------------------------------------------

#: CUDA's handles of the default stream: null, and the legacy one by name.
_DEFAULT_STREAMS = (0, 1)


def _stream_handle(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, PyCUDA
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise TypeError(f"stream is a {_kind(stream)}; pass an integer handle or a torch, CuPy or PyCUDA stream")


def _wait_for_producers(streams: set[int | None], handle: int) -> None:
    """The CUDA array interface asks its readers to wait where data is ready on another stream than theirs."""
    for stream in streams - {None, handle}:
        if not (stream in _DEFAULT_STREAMS and handle in _DEFAULT_STREAMS):
            _check(_driver().cuStreamSynchronize(stream), f"waiting for stream {stream:#x}")


# ---- the CUDA driver ---------------------------------------------------------------------------------------

# PyCUDA compiles, but does not launch: it takes neither streams nor contexts that other libraries made.

# AttentionArgs of the source, in three parts.
_ADDRESSES = struct.Struct("<5Q")
_EXTENTS = struct.Struct("<12q5i")
_SCALE = struct.Struct("<f")
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_TYPE = 9  # CUtensorMapDataType of bfloat16
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion
_INVALID_VALUE = 1  # CUresult
_MOST_MAPS = 1024  # that a plan keeps
_STRIDE_END = 2**40 // 2  # in elements
_ACCESS_BYTES = 2 * VECTOR
_DEFAULT_SCALE = 1 / math.sqrt(HEAD_DIM)
_INT_MAX = 2**31 - 1
_POINTER_CONTEXT, _POINTER_DEVICE = 1, 9  # CUpointer_attribute
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SMEM_PER_BLOCK = 75, 76, 97  # CUdevice_attribute
_MAX_DYNAMIC_SMEM = 8  # CUfunction_attribute
_MOST_STREAMS = 64  # for which a plan keeps launches

_KERNELS: dict[tuple[int, bool], int] = {}
_PRIMARY_CONTEXTS: dict[int, int] = {}
_LOCK = threading.RLock()


@functools.cache
def _driver() -> ctypes.CDLL:
    """libcuda, initialised, with the argument types of the functions used."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"an NVIDIA GPU and its driver are needed: {error}") from None
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    integer, unsigned = ctypes.c_int, ctypes.c_uint
    signatures: dict[str, list[Any]] = {
        "cuCtxGetCurrent": [pointer],
        "cuCtxGetDevice": [pointer],
        "cuCtxPushCurrent_v2": [pointer],
        "cuCtxPopCurrent_v2": [pointer],
        "cuDeviceGet": [pointer, integer],
        "cuDeviceGetAttribute": [pointer, integer, integer],
        "cuDeviceGetName": [pointer, integer, integer],
        "cuDevicePrimaryCtxRetain": [pointer, integer],
        "cuEventCreate": [pointer, unsigned],
        "cuEventDestroy_v2": [pointer],
        "cuEventElapsedTime": [pointer, pointer, pointer],
        "cuEventRecord": [pointer, pointer],
        "cuEventSynchronize": [pointer],
        "cuGetErrorName": [integer, pointer],
        "cuGetErrorString": [integer, pointer],
        "cuKernelSetAttribute": [integer, integer, pointer, integer],
        "cuLaunchKernelEx": [pointer, pointer, pointer, pointer],
        "cuLibraryGetKernel": [pointer, pointer, text],
        "cuLibraryLoadData": [pointer, text, pointer, pointer, unsigned, pointer, pointer, unsigned],
        "cuMemAlloc_v2": [pointer, size],
        "cuMemFree_v2": [pointer],
        "cuMemcpyDtoHAsync_v2": [pointer, pointer, size, pointer],
        "cuMemcpyHtoDAsync_v2": [pointer, pointer, size, pointer],
        "cuPointerGetAttribute": [pointer, integer, pointer],
        "cuStreamSynchronize": [pointer],
        "cuTensorMapEncodeTiled": [pointer, integer, unsigned, *[pointer] * 5, *[integer] * 4],
    }
    for function, arguments in signatures.items():
        try:
            getattr(driver, function).argtypes = arguments
        except AttributeError:
            raise RuntimeError(
                f"the NVIDIA driver has no {function}; install one for CUDA 12.0 or newer (525 or newer)"
            ) from None
    status = driver.cuInit(0)
    if status:
        _check(status, "starting CUDA", driver)
    return driver


def _check(status: int, action: str, driver: ctypes.CDLL | None = None) -> None:
    if status == 0:
        return
    driver = driver or _driver()
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    code = (name.value or str(status).encode()).decode()
    raise RuntimeError(f"{action} failed: {code}, {(text.value or b'unknown error').decode()}")


def _device_of(name: str, pointer: int) -> int:
    device = ctypes.c_int()
    if _driver().cuPointerGetAttribute(ctypes.byref(device), _POINTER_DEVICE, pointer):
        raise ValueError(f"{name} points to {pointer:#x}, which is not memory of a CUDA device")
    return device.value


def _push_context(driver: ctypes.CDLL, pointer: int, device: int) -> bool:
    """Makes the context of `pointer` current; whether that took a push, which is then to be popped.

    Memory of a pool belongs to no context: any of its device serves, failing one the primary.
    """
    current, context = ctypes.c_void_p(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    if pointer:
        driver.cuPointerGetAttribute(ctypes.byref(context), _POINTER_CONTEXT, pointer)
    wanted = context.value
    if wanted is None:
        if current.value is not None:
            current_device = ctypes.c_int()
            _check(driver.cuCtxGetDevice(ctypes.byref(current_device)), "asking for the current device")
            if current_device.value == device:
                return False
        wanted = _retain_primary_context(device)
    if wanted == current.value:
        return False
    _check(driver.cuCtxPushCurrent_v2(wanted), f"entering the context of device {device}")
    return True


def _retain_primary_context(device: int) -> int:
    """Retained once and for the rest of the process."""
    with _LOCK:
        if device not in _PRIMARY_CONTEXTS:
            context = ctypes.c_void_p()
            status = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            _check(status, f"creating a context on device {device}")
            assert context.value is not None
            _PRIMARY_CONTEXTS[device] = context.value
        return _PRIMARY_CONTEXTS[device]


class _Maps(NamedTuple):
    """The kernel's second argument: maps of the arrays, one after the other, in host memory."""

    memory: ctypes.Array[ctypes.c_char]
    address: int


def _encode_maps(plan: _Plan, addresses: tuple[int, int, int, int]) -> _Maps:
    """The maps for arrays at these addresses, kept with their plan."""
    *strides, batch, heads, kv_heads, seqlen_q, seqlen_k = plan.extents
    memory = ctypes.create_string_buffer(_MAP_BYTES * len(MAPS) + _MAP_ALIGNMENT)
    first = ctypes.addressof(memory) + -ctypes.addressof(memory) % _MAP_ALIGNMENT
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    for place, (name, rows, columns, swizzle, promotion) in enumerate(MAPS):
        i = "qkvo".index(name)
        address = addresses[i]
        # From the innermost dimension out: columns, rows, heads, batch.
        lengths = (seqlen_k, kv_heads, batch) if name in "kv" else (seqlen_q, heads, batch)
        if seqlen_k == 0 and name in "kv":  # nothing is read of it, but a map must be of something
            address, lengths = addresses[0], (1, 1, 1)
        sizes = (ctypes.c_uint64 * 4)(HEAD_DIM, *lengths)
        # Of a length of 1 the stride is never used, but must be a possible one.
        steps = zip(lengths, reversed(strides[3 * i : 3 * i + 3]), strict=True)
        stride_bytes = [2 * step if length > 1 else 16 for length, step in steps]
        status = _driver().cuTensorMapEncodeTiled(
            first + _MAP_BYTES * place,
            _MAP_TYPE,
            4,
            address,
            sizes,
            (ctypes.c_uint64 * 3)(*stride_bytes),
            (ctypes.c_uint32 * 4)(columns, rows, 1, 1),
            ones,
            0,  # not interleaved
            _SWIZZLES[swizzle],
            _PROMOTIONS[promotion],
            0,  # zeros outside of the array
        )
        if status == _INVALID_VALUE:
            array = "out" if name == "o" else name
            raise ValueError(
                f"{array} has (batch, heads, seqlen) {lengths[::-1]} by {stride_bytes[::-1]} bytes, of which the driver "
                f"makes no map for the copy engine: pass {array}.contiguous() (torch) or a copy"
            )
        _check(status, "making a map for the copy engine")
    if len(plan.maps) >= _MOST_MAPS:
        plan.maps.clear()
    maps = plan.maps[addresses] = _Maps(memory, first)
    return maps


def _load(device: int, causal: bool) -> int:
    """The kernel for that device and mask, compiled on the first call. A CUDA library, so valid in every context."""
    with _LOCK:
        if (device, causal) in _KERNELS:
            return _KERNELS[device, causal]
        driver = _driver()
        arch = 10 * _attribute(device, _CAPABILITY_MAJOR) + _attribute(device, _CAPABILITY_MINOR)
        if arch != ONLY_ARCH:
            raise RuntimeError(
                f"this kernel has instructions of sm_{ONLY_ARCH} alone, device {device} is sm_{arch}: "
                f"run flashgen tune --dtype bf16 --device {device} --d {HEAD_DIM}"
            )
        allowed = _attribute(device, _SMEM_PER_BLOCK)
        if allowed < SMEM_BYTES:
            raise RuntimeError(
                f"this kernel needs {SMEM_BYTES} bytes of shared memory per block, device {device} (sm_{arch}) allows "
                f"{allowed}; it was made for sm_{DEVICE['arch']}: run flashgen tune --dtype bf16 --device {device} "
                f"--d {HEAD_DIM}"
            )
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        status = 0
        # Another process may be writing the cubin that PyCUDA's cache just handed out: then compile afresh.
        for cached in (True, False):
            cubin = _compile(arch, causal, cached)
            status = driver.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0)
            if status == 0:
                break
        _check(status, f"loading the kernel for sm_{arch}")
        status = driver.cuLibraryGetKernel(ctypes.byref(kernel), library, SYMBOL)
        _check(status, f"finding {SYMBOL.decode()}")
        status = driver.cuKernelSetAttribute(_MAX_DYNAMIC_SMEM, SMEM_BYTES, kernel, device)
        _check(status, f"reserving {SMEM_BYTES} bytes of shared memory per block")
        assert kernel.value is not None
        _KERNELS[device, causal] = kernel.value
        return kernel.value


def _attribute(device: int, attribute: int) -> int:
    value = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), f"asking device {device}")
    return value.value


def _compile(arch: int, causal: bool, cached: bool) -> bytes:
    """The cubin for one compute capability (times ten) and mask."""
    try:
        from pycuda.compiler import compile as nvcc_compile
        from pycuda.driver import CompileError
    except ImportError as error:
        raise ImportError(f"attention() compiles through PyCUDA: pip install pycuda ({error})") from error
    options = ["-std=c++17", "-O3", "-ftz=true", f"-DFLASHGEN_CAUSAL={int(causal)}"]
    if arch < 75:
        options.append("-Wno-deprecated-gpu-targets")
    nvcc = _find_nvcc()
    try:
        cache_dir = None if cached else False
        return nvcc_compile(SOURCE, nvcc, options, no_extern_c=True, arch=f"sm_{arch}a", cache_dir=cache_dir)
    except CompileError as error:
        # nvcc says "Unsupported gpu architecture" or "not defined for option 'gpu-architecture'".
        if "gpu architecture" in str(error) or "gpu-architecture" in str(error):
            needed = "CUDA 12.9 or older (13 dropped cards before sm_75)" if arch < 75 else "a newer CUDA"
            raise RuntimeError(
                f"{nvcc} does not compile for sm_{arch}; install {needed} and set CUDA_HOME to it"
            ) from error
        raise RuntimeError(f"{nvcc} failed:\n{error}") from error
    except OSError as error:
        if cached:  # a cache that cannot be written is done without
            return _compile(arch, causal, cached=False)
        raise RuntimeError(f"{nvcc} could not be run: {error}") from error


def _find_nvcc() -> str:
    """nvcc of $CUDA_HOME, $CUDA_PATH, $PATH, /usr/local/cuda, or of the PyPI package."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(home, "bin", "nvcc") for home in homes]
    candidates += [Path(found) for found in (shutil.which("nvcc"),) if found]
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in filter(None, sys.path):
        candidates += Path(folder, "nvidia").glob("*/bin/nvcc")
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    raise RuntimeError(
        "nvcc, the CUDA compiler, was not found; install the CUDA toolkit (and set CUDA_HOME where it is not on the "
        "PATH), or pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
    )


# ---- numpy -------------------------------------------------------------------------------------------------


class _Buffer:
    """Device memory of its own, dense, freed by `free`; `host_type` is what numpy holds such elements as."""

    def __init__(self, shape: tuple[int, ...], host_type: np.dtype) -> None:
        self.shape, self.host_type = shape, host_type
        self.nbytes = host_type.itemsize * math.prod(shape)
        address = ctypes.c_void_p()
        if self.nbytes:
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), self.nbytes)
            _check(status, f"allocating {self.nbytes} bytes on the GPU")
        self.address = address.value or 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "bfloat16", "data": (self.address, False), "version": 3}

    def write(self, array: np.ndarray, stream: int) -> None:
        """Copies a contiguous array in; it must live until the stream has got there."""
        if self.nbytes:
            status = _driver().cuMemcpyHtoDAsync_v2(self.address, array.ctypes.data, self.nbytes, stream)
            _check(status, "copying to the GPU")

    def read(self, stream: int) -> np.ndarray:
        array = np.empty(self.shape, self.host_type)
        if self.nbytes:
            status = _driver().cuMemcpyDtoHAsync_v2(array.ctypes.data, self.address, self.nbytes, stream)
            _check(status, "copying from the GPU")
        _check(_driver().cuStreamSynchronize(stream), "running the kernel")
        return array

    def free(self) -> None:
        if self.address:
            _driver().cuMemFree_v2(self.address)
            self.address = 0


def _attention_numpy(
    q: np.ndarray,
    k: Any,
    v: Any,
    causal: bool | None,
    scale: float | None,
    out: Any,
    stream: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """Through device memory, on the current context's device, failing that on device 0."""
    for name, array in {"q": q, "k": k, "v": v, "out": q if out is None else out}.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"q is a numpy array, but {name} a {_kind(array)}; pass arrays of one library")
        if array.dtype.name != DTYPE:
            raise TypeError(f"{name} is {array.dtype}, not bfloat16: pass {name}.astype(ml_dtypes.bfloat16)")
    if out is not None and out.shape != q.shape:
        raise ValueError(f"out has the shape {out.shape}, q has {q.shape}; they must be equal")
    if out is not None and not out.flags.writeable:
        raise ValueError("out is read-only")
    handle = 0 if stream is None else _stream_handle(stream)
    out = np.empty_like(q, subok=False) if out is None else out
    return _through_buffers(q, k, v, causal, scale, out, handle, return_lse, layout)


def _through_buffers(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool | None,
    scale: float | None,
    out: np.ndarray,
    handle: int,
    return_lse: bool,
    layout: str,
) -> Any:
    """Fills `out`. All arrays hold bfloat16, or the bits of it as integers."""
    hosts = [np.ascontiguousarray(array) for array in (q, k, v)]
    driver = _driver()
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    pushed = current.value is None and _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []
    try:
        for host in (*hosts, hosts[0]):
            buffers.append(_Buffer(host.shape, host.dtype))
        for buffer, host in zip(buffers, hosts, strict=False):
            buffer.write(host, handle)
        query, key, value, output = buffers
        result = attention(query, key, value, causal, scale, output, handle, return_lse, layout=layout)
        if return_lse:
            buffers.append(result[1])
        out[...] = output.read(handle)
        return (out, result[1].read(handle)) if return_lse else out
    finally:
        for buffer in buffers:
            buffer.free()
        if pushed:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


# ---- PyTorch -----------------------------------------------------------------------------------------------

# Whoever passes tensors has imported torch: it is found among the loaded modules, never imported here.

_TORCH_DEVICES = ("cuda", "meta")  # of the latter, tensors that have no data, results have none either


def _attention_torch(
    torch: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool | None,
    scale: float | None,
    out: Any,
    stream: Any,
    return_lse: bool,
    layout: str,
    recompute: bool,
) -> Any:
    """Of tensors: launched at once, or by the operator where PyTorch must see one."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind or (out is not None and type(out) is not kind):
        _check_kinds(q, (("k", k), ("v", v), ("out", out)))
    derived = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if derived and not recompute:
        name = "q" if q.requires_grad else "k" if k.requires_grad else "v"
        raise RuntimeError(
            f"{name} requires a gradient, but this kernel is forward only: call it under torch.no_grad(), pass "
            f"{name}.detach(), or recompute=True for a backward pass by PyTorch's attention"
        )
    if out is not None and torch.is_grad_enabled() and (derived or out.requires_grad):
        raise RuntimeError("no gradient is taken through out: leave it out, or call under torch.no_grad()")
    if torch.is_autocast_enabled():
        q, k, v = (_autocast(torch, x) for x in (q, k, v))
    if derived or torch.compiler.is_compiling() or kind is not torch.Tensor:
        plan = None
    else:
        plan = _plan(
            torch,
            layout == "bshd",
            None if out is None else _describe(out),
            # To ask for strides takes longer than to ask whether there is anything to tell of them.
            q.dtype,
            q.shape,
            None if q.is_contiguous() else q.stride(),
            q.device,
            k.dtype,
            k.shape,
            None if k.is_contiguous() else k.stride(),
            k.device,
            v.dtype,
            v.shape,
            None if v.is_contiguous() else v.stride(),
            v.device,
        )
    if plan is None or plan.meta:
        if stream is not None:
            raise ValueError("leave stream out where gradients are needed, and under torch.compile")
        return _attention_operator(torch, q, k, v, causal, scale, out, return_lse, layout)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if out is None and stream is None and not _suits(plan, addresses):
        # The operator copies.
        return _attention_operator(torch, q, k, v, causal, scale, out, return_lse, layout)
    return _run_torch(torch, plan, q, addresses, causal, scale, out, stream, return_lse)


def _suits(plan: _Plan, addresses: tuple[int, int, int]) -> bool:
    """Whether the kernel can step by the strides of q, k and v, and start where they do."""
    q, k, v = addresses
    return plan.aligned and not (q | k | v) % _ACCESS_BYTES


def _run_torch(
    torch: Any,
    plan: _Plan,
    q: Any,
    addresses: tuple[int, int, int],
    causal: bool | None,
    scale: float | None,
    out: Any,
    stream: Any,
    return_lse: bool,
) -> Any:
    """Of tensors on a GPU, whatever PyTorch would have done with them."""
    try:  # as Triton does, without making an object of the stream
        current = torch._C._cuda_getCurrentRawStream(plan.device)
    except AttributeError:
        current = torch.cuda.current_stream(plan.device).cuda_stream
    handle = current if stream is None else _stream_handle(stream)
    given, lse = out is not None, None
    if handle == current:
        if plan.like_q and not given:
            out = torch.empty_like(q)
        elif not given:
            out = q.new_empty_strided(plan.out_shape, plan.out_strides)
        if return_lse:
            lse = q.new_empty_strided(plan.rows_shape, plan.rows_strides, dtype=torch.float32)
    else:
        # Memory is handed out in the order of the current stream, so let that be the launch's.
        if handle in _DEFAULT_STREAMS:
            launches = torch.cuda.default_stream(q.device)
        else:
            launches = torch.cuda.ExternalStream(handle, q.device)
        with torch.cuda.stream(launches):
            if not given:
                out = q.new_empty_strided(plan.out_shape, plan.out_strides)
            if return_lse:
                lse = q.new_empty_strided(plan.rows_shape, plan.rows_strides, dtype=torch.float32)
    if plan.blocks:
        _launch(
            plan,
            *addresses,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            causal,
            scale,
            handle,
            given,
        )
    return (out, lse) if return_lse else out


def _describe(tensor: Any) -> tuple[Any, ...]:
    """What `_plan` is told of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _autocast(torch: Any, x: Any) -> Any:
    """What torch.autocast casts, in the kernel's type."""
    return x.to(torch.bfloat16) if x.is_floating_point() and x.dtype is not torch.float64 else x


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention, by this kernel where it serves and PyTorch elsewhere.

    PyTorch computes what has a mask, dropout, a type, head dim, device or number of dimensions that are not this
    kernel's, strides that it cannot step by, no rows or keys, and what a gradient must be taken of. `is_causal` is
    torch's, aligned top-left: query row i sees keys 0 .. i, however many there are. In torch.autocast, the
    kernel serves where bfloat16 is what PyTorch would cast to.
    """
    torch = _torch_of(query)
    if torch is None:
        raise TypeError(f"query is a {_kind(query)}; pass torch tensors, or other arrays to attention")
    if attn_mask is None and dropout_p == 0:
        o = _serve(torch, query, key, value, is_causal, scale, enable_gqa)
        if o is not None:
            return o
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _serve(torch: Any, q: Any, k: Any, v: Any, is_causal: bool, scale: float | None, enable_gqa: bool) -> Any:
    """`sdpa` by the kernel; None where it is PyTorch's."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if torch.is_autocast_enabled():
        if torch.get_autocast_dtype("cuda") is not torch.bfloat16:
            return None
        q, k, v = (_autocast(torch, x) for x in (q, k, v))
    if torch.compiler.is_compiling():
        if not _serves(torch, _describe(q), _describe(k), _describe(v), is_causal, enable_gqa):
            return None
        if is_causal and q.shape[2] < k.shape[2]:
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        return _attention_operator(torch, q, k, v, is_causal, scale, None, False, "bhsd")
    if type(q) not in (torch.Tensor, torch.nn.Parameter):
        return None
    plan = _plan_sdpa(
        torch,
        is_causal,
        enable_gqa,
        q.dtype,
        q.shape,
        q.stride(),
        q.device,
        k.dtype,
        k.shape,
        k.stride(),
        k.device,
        v.dtype,
        v.shape,
        v.stride(),
        v.device,
    )
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if plan is None or not _suits(plan, addresses):
        return None
    return _run_torch(torch, plan, q, addresses, is_causal, scale, None, None, False)


@functools.lru_cache(maxsize=1024)
def _plan_sdpa(torch: Any, is_causal: bool, enable_gqa: bool, *arrays: Any) -> _Plan | None:
    query, key, value = arrays[:4], arrays[4:8], arrays[8:]
    if query[3].type == "meta" or not _serves(torch, query, key, value, is_causal, enable_gqa):
        return None
    if is_causal:  # later keys are seen by no row
        key, value = (
            (dtype, (*shape[:2], query[1][2], shape[3]), strides, device)
            for dtype, shape, strides, device in (key, value)
        )
    return _plan(torch, False, None, *query, *key, *value)


def _serves(
    torch: Any,
    query: tuple[Any, ...],
    key: tuple[Any, ...],
    value: tuple[Any, ...],
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Whether the kernel computes what `sdpa` would of tensors of these types, shapes, strides and devices."""
    for dtype, shape, strides, device in (query, key, value):
        if dtype is not torch.bfloat16 or device != query[3] or device.type not in _TORCH_DEVICES:
            return False
        if len(shape) != 4 or shape[0] == 0 or shape[1] == 0 or shape[2] == 0 or strides[3] != 1:
            return False
        if not _can_step(_stepped(shape[:3], strides[:3])):
            return False
    batch, heads, rows, head_dim = query[1]
    _, kv_heads, keys, _ = key[1]
    if key[1] != (batch, kv_heads, keys, HEAD_DIM) or value[1] != (batch, kv_heads, keys, HEAD_DIM):
        return False
    if head_dim != HEAD_DIM or (is_causal and rows > keys):  # rows beyond the keys would see all of them
        return False
    return heads == kv_heads or (enable_gqa and heads % kv_heads == 0)


def register_torch() -> str:
    """Makes operators of the kernel in torch.ops.flashgen, for graphs to hold, once. The name of the first:

        attention_bf16_d128_320b3329(q, k, v, causal=None, scale=None, layout="bhsd") -> o
        attention_bf16_d128_320b3329_lse(q, k, v, causal=None, scale=None, layout="bhsd") -> (o, lse)
        attention_bf16_d128_320b3329_out(q, k, v, out, causal=None, scale=None, layout="bhsd")

    They take what `attention` takes; the first two copy what the kernel cannot step by. Those have gradients, too,
    by PyTorch's attention, which the backward pass runs anew. `attention` and `sdpa` register them as needed. Needs
    PyTorch 2.7 or newer.
    """
    import torch

    library = torch.library
    with _LOCK:
        if hasattr(torch.ops.flashgen, "attention_bf16_d128_320b3329_out"):
            return "attention_bf16_d128_320b3329"

        def run(
            q: Any,
            k: Any,
            v: Any,
            causal: bool | None = None,
            scale: float | None = None,
            layout: str = "bhsd",
            *,
            out: Any = None,
            return_lse: bool = False,
        ) -> Any:
            settings = (torch, layout == "bshd")
            output = None if out is None else _describe(out)
            plan = _plan(*settings, output, *_describe(q), *_describe(k), *_describe(v))
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if out is None and not _suits(plan, addresses):
                out = q.new_empty_strided(plan.out_shape, plan.out_strides)
                q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
                plan = _plan(*settings, _describe(out), *_describe(q), *_describe(k), *_describe(v))
                addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
            return _run_torch(torch, plan, q, addresses, causal, scale, out, None, return_lse)

        def run_lse(*arguments: Any) -> Any:
            return run(*arguments, return_lse=True)

        def run_out(q: Any, k: Any, v: Any, out: Any, *settings: Any) -> None:
            run(q, k, v, *settings, out=out)

        def fake(q: Any, k: Any, v: Any, *settings: Any) -> Any:
            made = _inspect_torch(torch, q, k, v, None, settings[2:3] == ("bshd",))
            return q.new_empty_strided(*made)

        def fake_lse(*arguments: Any) -> Any:
            o, q, layout = fake(*arguments), arguments[0], arguments[5:6]
            rows = (o.shape[0], o.shape[2], o.shape[1]) if layout == ("bshd",) else o.shape[:3]
            return o, q.new_empty(rows, dtype=torch.float32)

        def fake_out(q: Any, k: Any, v: Any, out: Any, *settings: Any) -> None:
            _inspect_torch(torch, q, k, v, out, settings[2:3] == ("bshd",))

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs[:3])
            ctx.settings = inputs[3:]
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, grad: Any, grad_lse: Any = None) -> tuple[Any, ...]:
            grads = _differentiate(torch, *ctx.saved_tensors, *ctx.settings, grad, grad_lse)
            return (*grads, None, None, None)

        # Strides decide how the kernel reads and what it returns: Inductor must not change them.
        exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
        settings = 'bool? causal=None, float? scale=None, str layout="bhsd"'
        for suffix, out, result, function, fake_function in (
            ("", "", "Tensor", run, fake),
            ("_lse", "", "(Tensor, Tensor)", run_lse, fake_lse),
            ("_out", "Tensor(a!) out, ", "()", run_out, fake_out),
        ):
            name = f"flashgen::attention_bf16_d128_320b3329{suffix}"
            schema = f"(Tensor q, Tensor k, Tensor v, {out}{settings}) -> {result}"
            library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, exact))
            library.impl(name, "default", function)
            library.register_fake(name, fake_function)
            if not out:
                library.register_autograd(name, differentiate, setup_context=keep)
                library.register_autocast(name, "cuda", torch.bfloat16)
        return "attention_bf16_d128_320b3329"


# As torch.compiler.assume_constant_result would mark it: torch.compile calls it as it traces, and moves on.
register_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attention_operator(
    torch: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool | None,
    scale: float | None,
    out: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    register_torch()
    operators = torch.ops.flashgen
    causal = None if causal is None else bool(causal)
    scale = None if scale is None else float(scale)
    if out is not None and not return_lse:
        operators.attention_bf16_d128_320b3329_out(q, k, v, out, causal, scale, layout)
        return out
    if not return_lse:
        return operators.attention_bf16_d128_320b3329(q, k, v, causal, scale, layout)
    o, lse = operators.attention_bf16_d128_320b3329_lse(q, k, v, causal, scale, layout)
    return (o if out is None else out.copy_(o)), lse


def _inspect_torch(
    torch: Any, q: Any, k: Any, v: Any, out: Any, bshd: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of what the kernel makes of tensors whose extents may be symbols; raises as `_plan`."""
    query = _inspect("q", _describe(q), bshd, torch)
    _check_shapes(query, _inspect("k", _describe(k), bshd, torch), _inspect("v", _describe(v), bshd, torch))
    if out is not None:
        _check_output(_inspect("out", _describe(out), bshd, torch), query)
    return _dense_like(query, bshd)


def _differentiate(
    torch: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool | None,
    scale: float | None,
    layout: str,
    grad: Any,
    grad_lse: Any,
) -> tuple[Any, ...]:
    """The gradients of q, k and v, given those of o and of the log-sum-exp, either of which may be None."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        query, key, value = (x.transpose(1, 2) for x in leaves) if layout == "bshd" else leaves
        if grad is not None and layout == "bshd":
            grad = grad.transpose(1, 2)
        masked = PROBLEM["causal"] if causal is None else causal
        rows, keys = query.shape[2], key.shape[2]
        if masked and rows > keys:  # the first rows see no key
            query, rows = query[:, :, rows - keys :], keys
            grad, grad_lse = (None if x is None else x[:, :, -keys:] for x in (grad, grad_lse))
        visible = None
        if masked and (rows < keys or grad_lse is not None):
            visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        groups = query.shape[1] // max(key.shape[1], 1)
        if groups > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        outputs = []
        if grad is not None:
            square = masked and rows == keys
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, None if square else visible, is_causal=square, scale=scale
                )
            )
        if grad_lse is not None:
            scores = query.float() @ key.float().transpose(2, 3)
            scores = scores * (_DEFAULT_SCALE if scale is None else scale)
            scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
            outputs.append(scores.logsumexp(3))
        given = [x for x in (grad, grad_lse) if x is not None]
        return torch.autograd.grad(outputs, leaves, given, allow_unused=True)


def register_transformers(name: str = "tuned") -> None:
    """Registers the kernel with Hugging Face's transformers: attn_implementation=name then has models call `sdpa`.

    Masks are made as for "sdpa", which also computes what the kernel does not serve; of compiled models, whatever has an
    attention_mask, as no graph can tell whether it hides anything. The name "sdpa" itself gives all models the kernel
    that do not ask for another attention. Raises ValueError for a name with "flash" in it, which transformers takes for
    one of FlashAttention's, ImportError without transformers or with one before 4.53.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if "flash" in name:
        raise ValueError(f"transformers takes {name!r} for FlashAttention's; choose a name without 'flash'")
    AttentionInterface.register(name, functools.partial(_attend, sdpa_attention_forward))
    AttentionMaskInterface.register(name, functools.partial(_make_mask, sdpa_mask))


def _attend(
    otherwise: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """As transformers calls an attention: (batch, heads, seqlen, head_dim) to (batch, seqlen, heads, head_dim)."""
    if others.get("s_aux") is not None:
        raise ValueError("attention sinks are computed neither here nor by PyTorch's attention: use 'eager'")
    torch = _torch_of(query)
    if attention_mask is None and dropout == 0 and others.get("position_bias") is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A single row is the latest: it sees all keys.
        causal = bool(causal) and query.shape[2] > 1
        o = _serve(torch, query, key, value, causal, scaling, True)
        if o is not None:
            return o.transpose(1, 2).contiguous(), None
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
    return otherwise(module, query, key, value, attention_mask, **arguments)


def _make_mask(otherwise: Any, **asked: Any) -> Any:
    """As transformers asks for a mask, which it makes while a graph is compiled or captured even where it says no more than
    `is_causal`, or nothing. None instead: then `_attend` is called without one, and the kernel can serve."""
    rows, keys, window = asked.get("q_length"), asked.get("kv_length"), asked.get("local_size")
    padded = asked.get("attention_mask") is not None
    if not padded and (window is None or keys < window) and not _is_exporting():
        # The latest row alone, or a row for each key.
        if asked.get("allow_is_causal_skip") and (rows == keys or rows == 1):
            return None
        if asked.get("allow_is_bidirectional_skip"):
            return None
    return otherwise(**asked)


def _is_exporting() -> bool:
    """Whether torch.export traces, whose graphs are for other lengths, too."""
    return sys.modules["torch"].compiler.is_exporting()


# Else torch.compile of PyTorch 2.11 and older takes it for True, whatever it returns.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- python bf16_d128_b2_n8192.py --------------------------------------------------------------------------------------


def _reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """float64 attention of float32 (batch, heads, seqlen, head_dim) arrays."""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(HEAD_DIM)
    if causal:
        visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    return weights / weights.sum(axis=3, keepdims=True) @ v


def _to_bits(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, whose bits are the upper half of float32's; numpy has no such type."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _self_check() -> float:
    """The largest per-head error over both masks, with lengths that no tile divides."""
    random = np.random.default_rng(0)
    shapes = [(2, 4, 197, HEAD_DIM), (2, 2, 333, HEAD_DIM), (2, 2, 333, HEAD_DIM)]
    bits = [_to_bits(random.uniform(-3, 3, shape).astype(np.float32)) for shape in shapes]
    q, k, v = map(_from_bits, bits)
    out = np.empty((2, 4, 197, HEAD_DIM), np.uint16)
    worst = 0.0
    for causal in (False, True):
        reference = _reference(q, k, v, causal)
        _through_buffers(*bits, causal, None, out, 0, False, "bhsd")
        difference = np.linalg.norm(_from_bits(out) - reference, axis=(2, 3))
        # NaN is an error too, which max() would pass over.
        worst = float(np.maximum(worst, (difference / np.linalg.norm(reference, axis=(2, 3))).max()))
    return worst


def _time_us(repeats: int = 20) -> float:
    """The median time of a call on the tuned problem's shape, by CUDA events, with a warm cache."""
    driver = _driver()
    batch, seqlen_q, seqlen_k = PROBLEM["batch"], PROBLEM["seqlen_q"], PROBLEM["seqlen_k"]
    q_shape = (batch, PROBLEM["num_q_heads"], seqlen_q, HEAD_DIM)
    kv_shape = (batch, PROBLEM["num_kv_heads"], seqlen_k, HEAD_DIM)
    random = np.random.default_rng(0)
    pushed = _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    try:
        for shape in (q_shape, kv_shape, kv_shape, q_shape):
            host = _to_bits(random.standard_normal(shape, dtype=np.float32))
            buffers.append(_Buffer(shape, host.dtype))
            buffers[-1].write(host, 0)
            _check(driver.cuStreamSynchronize(None), "copying to the GPU")
        query, key, value, output = buffers
        for event in events:
            _check(driver.cuEventCreate(ctypes.byref(event), 0), "creating an event")
        times = []
        for _ in range(repeats + 3):
            driver.cuEventRecord(events[0], None)
            attention(query, key, value, out=output)
            driver.cuEventRecord(events[1], None)
            _check(driver.cuEventSynchronize(events[1]), "running the kernel")
            milliseconds = ctypes.c_float()
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), *events)
            times.append(1000 * milliseconds.value)
        return sorted(times[3:])[repeats // 2]
    finally:
        for event in events:
            if event.value is not None:
                driver.cuEventDestroy_v2(event)
        for buffer in buffers:
            buffer.free()
        if pushed:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _main() -> int:
    print((__doc__ or "").partition("\n    from")[0])
    name = ctypes.create_string_buffer(256)
    try:
        _check(_driver().cuDeviceGetName(name, len(name), 0), "asking for device 0")
    except RuntimeError as reason:
        print(f"Not run here: {reason}")
        return 0
    try:
        error = _self_check()
        median_us = _time_us()
    except (ImportError, RuntimeError) as reason:
        print(f"Failed: {reason}")
        return 1
    pairs = math.prod(PROBLEM[extent] for extent in ("batch", "num_q_heads", "seqlen_q", "seqlen_k"))
    tflops = 4 * HEAD_DIM * pairs / (2 if PROBLEM["causal"] else 1) / median_us / 1e6
    print(f"Here, on {name.value.decode()}: {median_us:.1f} us, {tflops:.1f} TFLOP/s with a warm cache.")
    verdict = "correct" if error <= TOLERANCE else "WRONG"
    print(f"Error against float64: {error:.2e}, {TOLERANCE:.0e} allowed: {verdict}.")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(_main())
