r"""Flash attention for NVIDIA GPUs: f32, head dim 256.

For NVIDIA H200 (sm_90) at batch 4, 16 heads, 4096 rows, without a mask. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, without a mask: 26.09 ms (median), spread 0.1 %,
42.1 TFLOP/s, 244 registers per thread, occupancy 12 %. Largest error per head against float64: 1.3e-06. Built
by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.1.0, seed 0.

    from f32_d256 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, numpy, PyCUDA and nvcc; the first call compiles (PyCUDA keeps the
result in its cache). Make that call before capturing a CUDA graph. Forward only.

Regenerate:

    flashgen emit f32_d256.py \
        --preset sm_90 --family simt --d 256 --set br=96 --set threads_per_block=256 --set lanes=16 \
        --set bc=48 --set vec=4 --set q_in_registers=false --set q_layout=transposed --set k_layout=padded \
        --set v_layout=row --set p_layout=transposed --set p_passes=1 --set stages=1 --set min_blocks=1 \
        --set block_order=by_head --set unroll=4 --set sweep=rows
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
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
    "dtype": "f32",
    "batch": 4,
    "num_q_heads": 16,
    "num_kv_heads": 16,
    "seqlen_q": 4096,
    "seqlen_k": 4096,
    "head_dim": 256,
    "head_dim_v": 256,
    "causal": False,
    "precision": "auto",
}
VARIANT: dict[str, Any] = {
    "family": "simt",
    "br": 96,
    "threads_per_block": 256,
    "lanes": 16,
    "bc": 48,
    "vec": 4,
    "q_in_registers": False,
    "q_layout": "transposed",
    "k_layout": "padded",
    "v_layout": "row",
    "p_layout": "transposed",
    "p_passes": 1,
    "stages": 1,
    "min_blocks": 1,
    "block_order": "by_head",
    "unroll": 4,
    "sweep": "rows",
}
DEVICE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "arch": 90,
}
MEASUREMENT: dict[str, Any] = {
    "median_us": 26092.159271240234,
    "spread": 0.0013699024679151152,
    "tflops": 42.139541474741925,
    "registers": 244,
    "spill_bytes": 0,
    "smem_bytes": 216192,
    "occupancy": 0.125,
    "error": 1.3079894659946018e-06,
    "predicted": False,
    "busy": "",
    "driver": "580.159.04 (CUDA 13.0)",
    "toolkit": "nvcc 13.0.88",
    "flashgen": "0.1.0",
    "seed": 0,
}

HEAD_DIM = 256
VECTOR = 4  # floats per memory access: what pointers and strides must be multiples of
THREADS = 256  # per block
ROWS_PER_BLOCK = 96  # query rows
SMEM_BYTES = 216192  # dynamic shared memory per block
SYMBOL = b"attention_f32_d256_kernel"  # the kernel's name in the source
TOLERANCE = 2e-06  # per head, of norm(o - reference) / norm(reference) against float64

SOURCE = r"""// attention_f32_d256: flash attention, f32, head dim 256, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family simt:
//   br = 96                    query rows per block
//   threads_per_block = 256    threads per block
//   lanes = 16                 lanes of a warp side by side along keys and head dim
//   bc = 48                    keys per tile
//   vec = 4                    floats per global access and per shared access along the head dim
//   q_in_registers = false     keep Q in registers for the whole block
//   q_layout = transposed      shared-memory layout of the Q tile
//   k_layout = padded          shared-memory layout of the K tile
//   v_layout = row             shared-memory layout of the V tile
//   p_layout = transposed      shared-memory layout of the P tile
//   p_passes = 1               parts in which P passes through its slab, which shrinks as much
//   stages = 1                 K/V tiles in flight: shared-memory buffers, or registers before sm_80
//   min_blocks = 1             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length
//   unroll = 4                 unrolled steps of the two products
//   sweep = rows               side of a micro-tile that the innermost loop runs along
//
// Build:      nvcc -std=c++17 -O3 -ftz=true -arch=sm_90 -c attention_f32_d256.cu
//             (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
// Regenerate: flashgen emit attention_f32_d256.cu --preset sm_90 --family simt --d 256 \
//                 --set br=96 --set threads_per_block=256 --set lanes=16 --set bc=48 \
//                 --set vec=4 --set q_in_registers=false --set q_layout=transposed --set k_layout=padded \
//                 --set v_layout=row --set p_layout=transposed --set p_passes=1 --set stages=1 \
//                 --set min_blocks=1 --set block_order=by_head --set unroll=4 --set sweep=rows

#include <cuda_pipeline.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements. lse may be null; else it is contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const float* q;
  const float* k;
  const float* v;
  float* o;
  float* lse;
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 160, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
constexpr int kD = 256;  // head dim
constexpr int kVec = 4;  // floats per global access, and per shared access along the head dim

constexpr int kBr = 96;  // query rows per block
constexpr int kBc = 48;  // keys per tile
constexpr int kThreads = 256;
constexpr int kLanes = 16;  // lanes of a warp side by side along keys, then along the head dim
constexpr int kLaneRows = 32 / kLanes;  // lanes of a warp along the rows
constexpr int kRowsPerWarp = kBr / (kThreads / 32);  // a warp owns whole rows, so softmax never leaves it

// One lane's micro-tiles: kTm x kTn scores and kTm x kTd outputs, in registers.
constexpr int kTm = kRowsPerWarp / kLaneRows;
constexpr int kTn = kBc / kLanes;
constexpr int kTd = 16;
constexpr int kRowGroup = 2;  // adjacent rows of a lane
constexpr int kColGroup = 1;  // adjacent keys of a lane
constexpr int kOVec = 4;  // adjacent outputs of a lane
constexpr int kKeyStep = 4;  // keys per step of the PV product

constexpr int kQStride = 96;  // floats between columns of the shared Q tile
constexpr int kKStride = 260;
constexpr int kVStride = 256;
constexpr int kPStride = 12;

constexpr int kLaneBits = 23;  // lanes that share a row differ in these bits

// Rounding takes about sqrt(keys) / 2 ulps from a sum over that many keys, so a run of tiles is summed apart.
constexpr int kRunTiles = 42;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct SharedStorage {
  alignas(16) float q[24576];  // transposed, scaled by scale * log2(e)
  alignas(16) float k[1][12480];  // padded
  alignas(16) float v[1][12288];  // row
  alignas(16) float p[8][576];  // transposed, a slab per warp
  alignas(16) float parked_max[kBr];  // the maximum that the sums parked in o refer to
};
static_assert(sizeof(SharedStorage) == 216192, "the size that pruning counted on");

// N adjacent floats, moved by one access of 4 * N bytes.
template <int N>
struct alignas(4 * N) Vec {
  float at[N];
};

template <int N>
__device__ __forceinline__ Vec<N> load(const float* address) {
  return *reinterpret_cast<const Vec<N>*>(address);
}

template <int N>
__device__ __forceinline__ void store(float* address, const Vec<N>& value) {
  *reinterpret_cast<Vec<N>*>(address) = value;
}

__device__ __forceinline__ int q_offset(int row, int x) {
  return x * kQStride + row;
}

__device__ __forceinline__ int k_offset(int key, int x) {
  return key * kKStride + x;
}

__device__ __forceinline__ int v_offset(int key, int x) {
  return key * kVStride + x;
}

__device__ __forceinline__ int p_offset(int row, int key) {
  return key * kPStride + row;
}

// Reads rows [first, first + kBr) of Q, scaled; rows from `end` on become zeros.
__device__ __forceinline__ void load_q(float* tile, const float* q, long long stride, int first, int end, float scale) {
  // A warp moves 8 rows by 4 columns, an element a lane: parts of sectors of global memory, and
  // few rows that share a bank of the transposed tile.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = lane / 4;
  const int first_x = warp * 4 + lane % 4;
  const float* source = q + (first + first_row) * stride + first_x;
#pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int row = first_row + r * 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int x = first_x + c * 32;
      tile[q_offset(row, x)] = first + row < end ? *(source + c * 32) * scale : 0.0f;
    }
    source += 8 * stride;
  }
}

// Starts copying keys [first, first + kBc) of K; keys from `end` on become zeros.
__device__ __forceinline__ void copy_k(float* tile, const float* k, long long stride, int first, int end) {
  const bool whole = first + kBc <= end;
  const int first_row = threadIdx.x / 64, first_x = threadIdx.x % 64 * 4;
  const float* source = k + (first + first_row) * stride + first_x;
#pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int row = first_row + r * 4;
    const int zeros = whole || first + row < end ? 0 : 16;
    __pipeline_memcpy_async(tile + k_offset(row, first_x), source, 16, zeros);
    source += 4 * stride;
  }
}

// Starts copying keys [first, first + kBc) of V; keys from `end` on become zeros.
__device__ __forceinline__ void copy_v(float* tile, const float* v, long long stride, int first, int end) {
  const bool whole = first + kBc <= end;
  const int first_row = threadIdx.x / 64, first_x = threadIdx.x % 64 * 4;
  const float* source = v + (first + first_row) * stride + first_x;
#pragma unroll
  for (int r = 0; r < 12; ++r) {
    const int row = first_row + r * 4;
    const int zeros = whole || first + row < end ? 0 : 16;
    __pipeline_memcpy_async(tile + v_offset(row, first_x), source, 16, zeros);
    source += 4 * stride;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d256_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int turn = int(blockIdx.x) % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - turn : turn;
  const int head = int(blockIdx.x) / q_tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / q_tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);

  const float* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head;
  const float* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const float* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  float* o = args.o + batch * args.o_stride_batch + head * args.o_stride_head;

  const float scale_log2 = args.scale * kLog2e;
  const int first_row = q_tile * kBr;
  const int diagonal = args.seqlen_k - args.seqlen_q;  // row i sees keys up to i + diagonal

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp * kRowsPerWarp;
  float* const p = smem.p[warp];
  // Which row, key and output column this lane's micro-tile holds. Lanes interleave, so that neighbours read
  // neighbouring banks of shared memory.
  // Eight lanes deliver 128 bytes; the next eight read the same columns, so that both share a wavefront.
  const int lane_x = lane % 8 + lane / 16 * 8, lane_y = lane / 8 % 2;
  const int lane_row = lane_y * kRowGroup, lane_key = lane_x * kColGroup, lane_column = lane_x * kOVec;
  const auto row_of = [&](int i) { return i / kRowGroup * (kRowGroup * kLaneRows) + i % kRowGroup + lane_row; };
  const auto key_of = [&](int j) { return j / kColGroup * (kColGroup * kLanes) + j % kColGroup + lane_key; };
  const auto column_of = [&](int c) { return c / kOVec * (kOVec * kLanes) + c % kOVec + lane_column; };

  const int keys = kCausal ? min(args.seqlen_k, first_row + kBr + diagonal) : args.seqlen_k;
  const int kv_tiles = keys > 0 ? (keys + kBc - 1) / kBc : 0;
  // The last row of this warp that exists; a warp without rows only helps to copy.
  const int last_row = min(first_row + warp_row + kRowsPerWarp, args.seqlen_q) - 1;
  if (kv_tiles > 0) copy_k(smem.k[0], k, args.k_stride_row, 0, args.seqlen_k);
  __pipeline_commit();
  load_q(smem.q, q, args.q_stride_row, first_row, args.seqlen_q, scale_log2);

  float acc[kTm][kTd] = {};
  float row_max[kTm], row_sum[kTm];
#pragma unroll
  for (int i = 0; i < kTm; ++i) {
    row_max[i] = -kInfinity;
    row_sum[i] = 0.0f;
  }

  bool parked = false;
  for (int tile = 0; tile < kv_tiles; ++tile) {
    const int first_key = tile * kBc;
    const bool computes = last_row >= first_row + warp_row && (!kCausal || first_key <= last_row + diagonal);
    float s[kTm][kTn];
    __pipeline_wait_prior(0);
    __syncthreads();  // K has arrived, and nobody reads V any more
    copy_v(smem.v[0], v, args.v_stride_row, first_key, args.seqlen_k);
    __pipeline_commit();
    if (computes) {
      // S = Q K^T, in units of log2: scale * log2(e) is folded into Q.
#pragma unroll
      for (int i = 0; i < kTm; ++i) {
#pragma unroll
        for (int j = 0; j < kTn; ++j) s[i][j] = 0.0f;
      }
#pragma unroll 4
      for (int x = 0; x < kD; x += kVec) {
        float q_frag[kTm][kVec], k_frag[kTn][kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int i = 0; i < kTm; i += kRowGroup) {
            const Vec<kRowGroup> rows = load<kRowGroup>(smem.q + q_offset(warp_row + row_of(i), x) + e * kQStride);
#pragma unroll
            for (int u = 0; u < kRowGroup; ++u) q_frag[i + u][e] = rows.at[u];
          }
        }
#pragma unroll
        for (int i = 0; i < kTn; ++i) {
          const Vec<kVec> columns = load<kVec>(smem.k[0] + k_offset(key_of(i), x));
#pragma unroll
          for (int e = 0; e < kVec; ++e) k_frag[i][e] = columns.at[e];
        }

#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int j = 0; j < kTn; ++j) {
#pragma unroll
            for (int step = 0; step < kTm; ++step) {
              const int i = j % 2 ? kTm - 1 - step : step;
              s[i][j] = fmaf(q_frag[i][e], k_frag[j][e], s[i][j]);
            }
          }
        }
      }

      // Only tiles that cross the end of the keys or the diagonal pay for the mask.
      if (first_key + kBc > args.seqlen_k || (kCausal && first_key + kBc - 1 > first_row + warp_row + diagonal)) {
#pragma unroll
        for (int i = 0; i < kTm; ++i) {
          const int row = first_row + warp_row + row_of(i);
          const int visible = (kCausal ? min(args.seqlen_k, row + diagonal + 1) : args.seqlen_k) - first_key;
#pragma unroll
          for (int j = 0; j < kTn; ++j) s[i][j] = key_of(j) < visible ? s[i][j] : -kInfinity;
        }
      }

      // Online softmax: rescale what was summed under the old maximum, exponentiate under the new one.
#pragma unroll
      for (int i = 0; i < kTm; ++i) {
        float maximum = s[i][0];
#pragma unroll
        for (int j = 1; j < kTn; ++j) maximum = fmaxf(maximum, s[i][j]);
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
          if (kLaneBits & bit) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, bit));
        }
        maximum = fmaxf(maximum, row_max[i]);
        // A row that has seen no key yet keeps a maximum of -inf; zero stands in, for -inf - -inf is NaN.
        const float reference = maximum == -kInfinity ? 0.0f : maximum;
        const float rescale = exp2f(row_max[i] - reference);
        row_max[i] = maximum;
        row_sum[i] *= rescale;
#pragma unroll
        for (int c = 0; c < kTd; ++c) acc[i][c] *= rescale;
#pragma unroll
        for (int j = 0; j < kTn; ++j) {
          s[i][j] = exp2f(s[i][j] - reference);
          row_sum[i] += s[i][j];
        }
      }

      // P goes through shared memory: a lane holds scores of its own keys but needs those of all keys.
#pragma unroll
      for (int j = 0; j < kTn; ++j) {
#pragma unroll
        for (int i = 0; i < kTm; i += kRowGroup) {
          Vec<kRowGroup> rows;
#pragma unroll
          for (int u = 0; u < kRowGroup; ++u) rows.at[u] = s[i + u][j];
          store<kRowGroup>(p + p_offset(row_of(i), key_of(j)), rows);
        }
      }
    }
    __pipeline_wait_prior(0);
    __syncthreads();  // V has arrived, and nobody reads K any more
    if (tile + 1 < kv_tiles) copy_k(smem.k[0], k, args.k_stride_row, first_key + kBc, args.seqlen_k);
    __pipeline_commit();
    if (computes) {
      // O += P V
#pragma unroll 4
      for (int key = 0; key < kBc; key += kKeyStep) {
        float p_frag[kTm][kKeyStep], v_frag[kTd][kKeyStep];
#pragma unroll
        for (int e = 0; e < kKeyStep; ++e) {
#pragma unroll
          for (int i = 0; i < kTm; i += kRowGroup) {
            const Vec<kRowGroup> rows = load<kRowGroup>(p + p_offset(row_of(i), key) + e * kPStride);
#pragma unroll
            for (int u = 0; u < kRowGroup; ++u) p_frag[i + u][e] = rows.at[u];
          }
        }

#pragma unroll
        for (int e = 0; e < kKeyStep; ++e) {
#pragma unroll
          for (int c = 0; c < kTd; c += kOVec) {
            const Vec<kOVec> columns = load<kOVec>(smem.v[0] + v_offset(key + e, column_of(c)));
#pragma unroll
            for (int u = 0; u < kOVec; ++u) v_frag[c + u][e] = columns.at[u];
          }
        }
#pragma unroll
        for (int e = 0; e < kKeyStep; ++e) {
#pragma unroll
          for (int j = 0; j < kTd; ++j) {
#pragma unroll
            for (int step = 0; step < kTm; ++step) {
              const int i = j % 2 ? kTm - 1 - step : step;
              acc[i][j] = fmaf(p_frag[i][e], v_frag[j][e], acc[i][j]);
            }
          }
        }
      }

      // o parks the sum of the runs so far; only this lane reads it again.
      if ((tile + 1) % kRunTiles == 0 && tile + 1 < kv_tiles) {
#pragma unroll
        for (int i = 0; i < kTm; ++i) {
          const int row = first_row + warp_row + row_of(i);
          const bool carries = parked && row_max[i] != -kInfinity;
          const float carried = carries ? exp2f(smem.parked_max[row - first_row] - row_max[i]) : 0.0f;
#pragma unroll
          for (int c = 0; c < kTd; c += kOVec) {
            if (row < args.seqlen_q) {
              float* const total = o + row * args.o_stride_row + column_of(c);
              Vec<kOVec> sum{};
              if (parked) sum = load<kOVec>(total);
#pragma unroll
              for (int u = 0; u < kOVec; ++u) sum.at[u] = fmaf(sum.at[u], carried, acc[i][c + u]);
              store<kOVec>(total, sum);
            }
#pragma unroll
            for (int u = 0; u < kOVec; ++u) acc[i][c + u] = 0.0f;
          }
        }
        __syncwarp();  // all lanes have read the last maximum; the next tile's barrier precedes its next read
#pragma unroll
        for (int i = 0; i < kTm; ++i) {
          if (lane_x == 0) smem.parked_max[warp_row + row_of(i)] = row_max[i];
        }
        parked = true;
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kTm; ++i) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if (kLaneBits & bit) row_sum[i] += __shfl_xor_sync(0xffffffff, row_sum[i], bit);
    }
    const int row = first_row + warp_row + row_of(i);
    if (row >= args.seqlen_q) continue;
    // A row that sees no key is zero, its log-sum-exp -inf.
    const float inverse = row_sum[i] > 0.0f ? 1.0f / row_sum[i] : 0.0f;
    const float carried = parked ? exp2f(smem.parked_max[row - first_row] - row_max[i]) : 0.0f;
#pragma unroll
    for (int c = 0; c < kTd; c += kOVec) {
      float* const out = o + row * args.o_stride_row + column_of(c);
      Vec<kOVec> sum{};
      if (parked) sum = load<kOVec>(out);
#pragma unroll
      for (int u = 0; u < kOVec; ++u) sum.at[u] = fmaf(sum.at[u], carried, acc[i][c + u]) * inverse;
      store<kOVec>(out, sum);
    }
    if (args.lse != nullptr && lane_x == 0) {
      args.lse[(1LL * batch * args.num_q_heads + head) * args.seqlen_q + row] = (row_max[i] + log2f(row_sum[i])) * kLn2;
    }
  }
}

#ifndef __CUDACC_RTC__
// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d256(const AttentionArgs* args, cudaStream_t stream) {
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
    if (address % (kVec * sizeof(float)) != 0) return cudaErrorMisalignedAddress;
  }
  const long long tiles = (1LL * args->seqlen_q + kBr - 1) / kBr;
  const long long blocks = tiles * args->num_q_heads * args->batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_d256_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
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
    """softmax(scale * q k^T) v in float32.

    q is (batch, heads, seqlen_q, 256), k and v are (batch, kv_heads, seqlen_k, 256), where kv_heads
    divides heads; with layout="bshd", heads and seqlen are swapped in all of them. Any strides will do as
    long as the last dimension is contiguous: transposed views and slices of a packed qkv run without a copy.

    Takes torch tensors, CuPy arrays, PyCUDA GPUArrays and whatever else has __cuda_array_interface__ where
    they lie, others that have __dlpack__ (JAX's) where they lie too, by way of torch or CuPy, and numpy arrays
    with a copy to the GPU and back. Returns an array of q's kind and memory layout, or `out`, which may have
    strides of its own but not the memory of q, k or v.

    causal: None for the mask the kernel was tuned with (False); True masks bottom-right: query row i sees
        keys 0 .. i + seqlen_k - seqlen_q. A row that sees no key is zero, its log-sum-exp -inf.
    scale: None for 1 / sqrt(head_dim).
    stream: None for the stream the arrays are used on (torch's and CuPy's current one, else the default
        stream); otherwise an integer handle or a torch, CuPy or PyCUDA stream, whose order with other streams
        is the caller's.
    return_lse: also return the natural log-sum-exp, a contiguous (batch, heads, seqlen_q) array of q's kind.
    recompute: True lets gradients of torch tensors be taken, by PyTorch's attention, which the backward pass runs
        anew. Otherwise tensors that need one are refused.

    Under torch.compile and torch.export it is the operator of `register_torch`, without a graph break. In
    torch.autocast, tensors are cast to float32.

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
        out = _empty(q, plan.out_shape, plan.out_strides, side_stream)
        o_address = _address(out)
    lse = _empty(q, plan.rows_shape, plan.rows_strides, side_stream) if return_lse else None
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
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        """The arguments' addresses."""
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
    type_name = interface["typestr"]
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
    blocks = -(-seqlen_q // ROWS_PER_BLOCK) * heads * batch
    if blocks > _INT_MAX or max(seqlen_q, seqlen_k) > _INT_MAX:
        raise ValueError(f"{blocks} blocks exceed what a CUDA grid holds, {_INT_MAX}: split the batch")
    strides = (*query.strides, *key.strides, *value.strides, *output.strides)
    extents = (*strides, batch, heads, kv_heads, seqlen_q, seqlen_k)
    return _Plan(
        blocks=blocks,
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
    )


def _inspect(name: str, described: tuple[Any, ...], bshd: bool, torch: Any) -> _Array:
    """An array in the kernel's terms; raises what tells the caller how to mend it."""
    dtype, shape, strides, device = described
    if torch is not None:
        if dtype is not torch.float32:
            raise TypeError(f"{name} is {dtype}, not torch.float32: pass {name}.float()")
        if device.type not in _TORCH_DEVICES:
            raise ValueError(f"{name} is on the device {str(device)!r}; move it with {name}.cuda()")
        device = device.index
    else:
        if dtype != "<f4":
            raise TypeError(
                f"{name} has the type {dtype!r}, not float32 ('<f4'): pass {name}.astype('float32')"
            )
        if strides is not None:
            if any(stride % 4 for stride in strides):
                raise ValueError(f"{name} has the strides {strides} in bytes; they must be multiples of 4")
            strides = tuple(stride // 4 for stride in strides)
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
            f"flashgen tune {option} {head_dim}"
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
    """Whether the kernel's accesses suit such strides."""
    return all(stride % VECTOR == 0 for stride in strides)


def _check_alignment(addresses: tuple[int, ...], extents: tuple[int, ...]) -> None:
    """Each access moves 16 bytes and must start at a multiple of them."""
    for i, (name, address) in enumerate(zip(("q", "k", "v", "out"), addresses, strict=True)):
        strides = extents[3 * i : 3 * i + 3]
        if address % _ACCESS_BYTES == 0 and _can_step(strides):
            continue
        raise ValueError(
            f"{name} starts at address {address:#x} with strides {strides} (batch, head, row) in elements; "
            f"this kernel reads {VECTOR} floats at once and needs an address that is a multiple of {_ACCESS_BYTES} "
            f"and strides that are multiples of {VECTOR}: pass {name}.contiguous() (torch) or a copy"
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


def _empty(q: Any, shape: tuple[int, ...], strides: tuple[int, ...], side_stream: int | None) -> Any:
    """A float32 array of q's kind on q's device; strides in elements.

    CuPy hands out memory in the order of its current stream; `side_stream` is the launch's where that is another.
    """
    if isinstance(q, _Buffer):
        return _Buffer(shape)
    library = _library(q)
    if library == "cupy":
        import cupy

        order = sorted(range(len(shape)), key=lambda i: -strides[i])
        dense = tuple(shape[i] for i in order)
        with q.device:
            if side_stream is None:
                memory = cupy.empty(dense, dtype=cupy.float32)
            else:
                default = side_stream in _DEFAULT_STREAMS
                with cupy.cuda.Stream.null if default else cupy.cuda.ExternalStream(side_stream):
                    memory = cupy.empty(dense, dtype=cupy.float32)
        return memory.transpose([order.index(i) for i in range(len(shape))])
    if library == "pycuda":
        from pycuda.gpuarray import GPUArray

        return GPUArray(shape, np.float32, allocator=q.allocator, strides=tuple(4 * s for s in strides))
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
    """On views of the arrays, which torch or CuPy make; the results go back to q's library the same way.

    DLPack orders the memory's producers and consumers, on the streams that either library uses.
    """
    if stream is not None:
        raise ValueError(
            f"stream is taken with torch, CuPy, PyCUDA and numpy arrays only, and q is a {_kind(q)}"
        )
    if not hasattr(q, "__array_namespace__"):
        raise TypeError(f"q is a {_kind(q)}, whose library takes no results back: pass torch or CuPy arrays")
    for name in sorted(("torch", "cupy"), key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            library = importlib.import_module(name)
            break
    else:
        raise TypeError(f"q is a {_kind(q)}, which is read through torch or CuPy: install one of them")
    views = [library.from_dlpack(array) for array in (q, k, v)]
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
_ACCESS_BYTES = 4 * VECTOR
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


def _load(device: int, causal: bool) -> int:
    """The kernel for that device and mask, compiled on the first call. A CUDA library, so valid in every context."""
    with _LOCK:
        if (device, causal) in _KERNELS:
            return _KERNELS[device, causal]
        driver = _driver()
        arch = 10 * _attribute(device, _CAPABILITY_MAJOR) + _attribute(device, _CAPABILITY_MINOR)
        allowed = _attribute(device, _SMEM_PER_BLOCK)
        if allowed < SMEM_BYTES:
            raise RuntimeError(
                f"this kernel needs {SMEM_BYTES} bytes of shared memory per block, device {device} (sm_{arch}) allows "
                f"{allowed}; it was made for sm_{DEVICE['arch']}: run flashgen tune --device {device} --d {HEAD_DIM}"
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
        return nvcc_compile(SOURCE, nvcc, options, no_extern_c=True, arch=f"sm_{arch}", cache_dir=cache_dir)
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
    """float32 device memory of its own, dense, freed by `free`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.nbytes = 4 * math.prod(shape)
        address = ctypes.c_void_p()
        if self.nbytes:
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), self.nbytes)
            _check(status, f"allocating {self.nbytes} bytes on the GPU")
        self.address = address.value or 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "<f4", "data": (self.address, False), "version": 3}

    def write(self, array: np.ndarray, stream: int) -> None:
        """Copies a contiguous array in; it must live until the stream has got there."""
        if self.nbytes:
            status = _driver().cuMemcpyHtoDAsync_v2(self.address, array.ctypes.data, self.nbytes, stream)
            _check(status, "copying to the GPU")

    def read(self, stream: int) -> np.ndarray:
        array = np.empty(self.shape, np.float32)
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
        if array.dtype != np.float32:
            raise TypeError(f"{name} is {array.dtype}, not float32: pass {name}.astype(np.float32)")
    if out is not None and out.shape != q.shape:
        raise ValueError(f"out has the shape {out.shape}, q has {q.shape}; they must be equal")
    if out is not None and not out.flags.writeable:
        raise ValueError("out is read-only")
    handle = 0 if stream is None else _stream_handle(stream)
    hosts = [np.ascontiguousarray(array) for array in (q, k, v)]
    driver = _driver()
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    pushed = current.value is None and _push_context(driver, 0, 0)
    buffers: list[_Buffer] = []
    try:
        for host in (*hosts, hosts[0]):
            buffers.append(_Buffer(host.shape))
        for buffer, host in zip(buffers, hosts, strict=False):
            buffer.write(host, handle)
        query, key, value, output = buffers
        result = attention(query, key, value, causal, scale, output, handle, return_lse, layout=layout)
        if return_lse:
            buffers.append(result[1])
        out = np.empty_like(q, subok=False) if out is None else out
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
    return _run_torch(torch, plan, q, k, v, causal, scale, out, stream, return_lse)


def _run_torch(
    torch: Any,
    plan: _Plan,
    q: Any,
    k: Any,
    v: Any,
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
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
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
    return x.to(torch.float32) if x.is_floating_point() and x.dtype is not torch.float64 else x


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
    kernel serves where float32 is what PyTorch would cast to.
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
        if torch.get_autocast_dtype("cuda") is not torch.float32:
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
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _ACCESS_BYTES:
        return None
    return _run_torch(torch, plan, q, k, v, is_causal, scale, None, None, False)


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
        if dtype is not torch.float32 or device != query[3] or device.type not in _TORCH_DEVICES:
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

        attention_f32_d256_5bd11c2c(q, k, v, causal=None, scale=None, layout="bhsd") -> o
        attention_f32_d256_5bd11c2c_lse(q, k, v, causal=None, scale=None, layout="bhsd") -> (o, lse)
        attention_f32_d256_5bd11c2c_out(q, k, v, out, causal=None, scale=None, layout="bhsd")

    They take what `attention` takes; the first two copy what the kernel cannot step by. Those have gradients, too,
    by PyTorch's attention, which the backward pass runs anew. `attention` and `sdpa` register them as needed. Needs
    PyTorch 2.7 or newer.
    """
    import torch

    library = torch.library
    with _LOCK:
        if hasattr(torch.ops.flashgen, "attention_f32_d256_5bd11c2c_out"):
            return "attention_f32_d256_5bd11c2c"

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
            addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
            if out is None and (not plan.aligned or addresses % _ACCESS_BYTES):
                out = q.new_empty_strided(plan.out_shape, plan.out_strides)
                q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
                plan = _plan(*settings, _describe(out), *_describe(q), *_describe(k), *_describe(v))
            return _run_torch(torch, plan, q, k, v, causal, scale, out, None, return_lse)

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
            name = f"flashgen::attention_f32_d256_5bd11c2c{suffix}"
            schema = f"(Tensor q, Tensor k, Tensor v, {out}{settings}) -> {result}"
            library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, exact))
            library.impl(name, "default", function)
            library.register_fake(name, fake_function)
            if not out:
                library.register_autograd(name, differentiate, setup_context=keep)
                library.register_autocast(name, "cuda", torch.float32)
        return "attention_f32_d256_5bd11c2c"


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
        operators.attention_f32_d256_5bd11c2c_out(q, k, v, out, causal, scale, layout)
        return out
    if not return_lse:
        return operators.attention_f32_d256_5bd11c2c(q, k, v, causal, scale, layout)
    o, lse = operators.attention_f32_d256_5bd11c2c_lse(q, k, v, causal, scale, layout)
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


# ---- python f32_d256.py --------------------------------------------------------------------------------------


def _reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """float64 attention of (batch, heads, seqlen, head_dim) arrays."""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(HEAD_DIM)
    if causal:
        visible = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    return weights / weights.sum(axis=3, keepdims=True) @ v


def _self_check() -> float:
    """The largest per-head error over both masks, with lengths that no tile divides."""
    random = np.random.default_rng(0)
    shapes = [(2, 4, 197, HEAD_DIM), (2, 2, 333, HEAD_DIM), (2, 2, 333, HEAD_DIM)]
    q, k, v = (random.uniform(-3, 3, shape).astype(np.float32) for shape in shapes)
    worst = 0.0
    for causal in (False, True):
        reference = _reference(q, k, v, causal)
        difference = np.linalg.norm(attention(q, k, v, causal) - reference, axis=(2, 3))
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
            buffers.append(_Buffer(shape))
            host = random.standard_normal(shape, dtype=np.float32)
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
