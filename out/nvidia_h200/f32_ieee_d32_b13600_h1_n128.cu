// attention_f32_ieee_d32: flash attention, f32, head dim 32, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family simt:
//   br = 128                   query rows per block
//   threads_per_block = 128    threads per block
//   lanes = 4                  lanes of a warp side by side along keys and head dim
//   bc = 32                    keys per tile
//   vec = 4                    floats per global access and per shared access along the head dim
//   q_in_registers = false     keep Q in registers for the whole block
//   q_layout = transposed      shared-memory layout of the Q tile
//   k_layout = transposed      shared-memory layout of the K tile
//   v_layout = row             shared-memory layout of the V tile
//   p_layout = transposed      shared-memory layout of the P tile
//   p_passes = 1               parts in which P passes through its slab, which shrinks as much
//   stages = 2                 K/V tiles in flight: shared-memory buffers, or registers before sm_80
//   min_blocks = 4             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length
//   unroll = 4                 unrolled steps of the two products
//   sweep = columns            side of a micro-tile that the innermost loop runs along
//
// Measured on NVIDIA H200, batch 13600, 1 heads, 128 rows, without a mask: 809 us (median), spread 0.1 %,
// 35.3 TFLOP/s, 127 registers per thread, occupancy 25 %. Largest error per head against float64: 9.3e-07.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -arch=sm_90 -c f32_ieee_d32_b13600_h1_n128.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit f32_ieee_d32_b13600_h1_n128.cu \
//         --device h200 --precision ieee --d 32 --batch 13600 --heads 1 --seqlen 128 --family simt \
//         --set br=128 --set threads_per_block=128 --set lanes=4 --set bc=32 --set vec=4 \
//         --set q_in_registers=false --set q_layout=transposed --set k_layout=transposed --set v_layout=row \
//         --set p_layout=transposed --set p_passes=1 --set stages=2 --set min_blocks=4 \
//         --set block_order=by_head --set unroll=4 --set sweep=columns

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
constexpr int kD = 32;  // head dim
constexpr int kVec = 4;  // floats per global access, and per shared access along the head dim

constexpr int kBr = 128;  // query rows per block
constexpr int kBc = 32;  // keys per tile
constexpr int kThreads = 128;
constexpr int kLanes = 4;  // lanes of a warp side by side along keys, then along the head dim
constexpr int kLaneRows = 32 / kLanes;  // lanes of a warp along the rows
constexpr int kRowsPerWarp = kBr / (kThreads / 32);  // a warp owns whole rows, so softmax never leaves it

// One lane's micro-tiles: kTm x kTn scores and kTm x kTd outputs, in registers.
constexpr int kTm = kRowsPerWarp / kLaneRows;
constexpr int kTn = kBc / kLanes;
constexpr int kTd = 8;
constexpr int kRowGroup = 4;  // adjacent rows of a lane
constexpr int kColGroup = 4;  // adjacent keys of a lane
constexpr int kOVec = 4;  // adjacent outputs of a lane
constexpr int kKeyStep = 4;  // keys per step of the PV product

constexpr int kQStride = 128;  // floats between columns of the shared Q tile
constexpr int kKStride = 36;
constexpr int kVStride = 32;
constexpr int kPStride = 36;

constexpr int kLaneBits = 3;  // lanes that share a row differ in these bits

// Rounding takes about sqrt(keys) / 2 ulps from a sum over that many keys, so a run of tiles is summed apart.
constexpr int kRunTiles = 64;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct SharedStorage {
  alignas(16) float q[4096];  // transposed, scaled by scale * log2(e)
  alignas(16) float k[2][1152];  // transposed
  alignas(16) float v[2][1024];  // row
  alignas(16) float p[4][1152];  // transposed, a slab per warp
  alignas(16) float parked_max[kBr];  // the maximum that the sums parked in o refer to
};
static_assert(sizeof(SharedStorage) == 52736, "the size that pruning counted on");

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
  return x * kKStride + key;
}

__device__ __forceinline__ int v_offset(int key, int x) {
  return key * kVStride + x;
}

__device__ __forceinline__ int p_offset(int row, int key) {
  // XOR of the 4-row chunk with the key spreads the stores of neighbouring keys over the banks.
  return key * kPStride + (row ^ (key / 4 % 4 * 4));
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
  for (int r = 0; r < 16; ++r) {
    const int row = first_row + r * 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int x = first_x + c * 16;
      tile[q_offset(row, x)] = first + row < end ? *(source + c * 16) * scale : 0.0f;
    }
    source += 8 * stride;
  }
}

// Starts copying keys [first, first + kBc) of K; keys from `end` on become zeros.
__device__ __forceinline__ void copy_k(float* tile, const float* k, long long stride, int first, int end) {
  const bool whole = first + kBc <= end;
  // A warp moves 4 rows by 8 columns, an element a lane: whole sectors of global memory, and
  // few rows that share a bank of the transposed tile.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = lane / 8;
  const int first_x = warp * 8 + lane % 8;
  const float* source = k + (first + first_row) * stride + first_x;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first_row + r * 4;
    const int zeros = whole || first + row < end ? 0 : 4;
    __pipeline_memcpy_async(tile + k_offset(row, first_x), source, 4, zeros);
    source += 4 * stride;
  }
}

// Starts copying keys [first, first + kBc) of V; keys from `end` on become zeros.
__device__ __forceinline__ void copy_v(float* tile, const float* v, long long stride, int first, int end) {
  const bool whole = first + kBc <= end;
  const int first_row = threadIdx.x / 8, first_x = threadIdx.x % 8 * 4;
  const float* source = v + (first + first_row) * stride + first_x;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 16;
    const int zeros = whole || first + row < end ? 0 : 16;
    __pipeline_memcpy_async(tile + v_offset(row, first_x), source, 16, zeros);
    source += 16 * stride;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    attention_f32_ieee_d32_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = int(blockIdx.x) % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
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
  const int lane_x = lane % kLanes, lane_y = lane / kLanes;
  const int lane_row = lane_y * kRowGroup, lane_key = lane_x * kColGroup, lane_column = lane_x * kOVec;
  const auto row_of = [&](int i) { return i / kRowGroup * (kRowGroup * kLaneRows) + i % kRowGroup + lane_row; };
  const auto key_of = [&](int j) { return j / kColGroup * (kColGroup * kLanes) + j % kColGroup + lane_key; };
  const auto column_of = [&](int c) { return c / kOVec * (kOVec * kLanes) + c % kOVec + lane_column; };

  const int end_key = kCausal ? min(args.seqlen_k, first_row + kBr + diagonal) : args.seqlen_k;  // of all that the block sees
  const int first_tile = 0, last_tile = end_key > 0 ? (end_key + kBc - 1) / kBc : 0;

  // The last row of this warp that exists; a warp without rows only helps to copy.
  const int last_row = min(first_row + warp_row + kRowsPerWarp, args.seqlen_q) - 1;
  if (first_tile < last_tile) copy_k(smem.k[0], k, args.k_stride_row, first_tile * kBc, args.seqlen_k);
  if (first_tile < last_tile) copy_v(smem.v[0], v, args.v_stride_row, first_tile * kBc, args.seqlen_k);
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
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int first_key = tile * kBc;
    const bool computes = last_row >= first_row + warp_row && (!kCausal || first_key <= last_row + diagonal);
    float s[kTm][kTn];
    const int buffer = tile % 2;
    __pipeline_wait_prior(0);
    __syncthreads();  // this tile has arrived, and nobody reads the other buffer any more
    if (tile + 1 < last_tile) {
      copy_k(smem.k[buffer ^ 1], k, args.k_stride_row, first_key + kBc, args.seqlen_k);
      copy_v(smem.v[buffer ^ 1], v, args.v_stride_row, first_key + kBc, args.seqlen_k);
    }
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
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int i = 0; i < kTn; i += kColGroup) {
            const Vec<kColGroup> rows = load<kColGroup>(smem.k[buffer] + k_offset(key_of(i), x) + e * kKStride);
#pragma unroll
            for (int u = 0; u < kColGroup; ++u) k_frag[i + u][e] = rows.at[u];
          }
        }

#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int i = 0; i < kTm; ++i) {
#pragma unroll
            for (int step = 0; step < kTn; ++step) {
              const int j = i % 2 ? kTn - 1 - step : step;
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
      __syncwarp();

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
            const Vec<kOVec> columns = load<kOVec>(smem.v[buffer] + v_offset(key + e, column_of(c)));
#pragma unroll
            for (int u = 0; u < kOVec; ++u) v_frag[c + u][e] = columns.at[u];
          }
        }
#pragma unroll
        for (int e = 0; e < kKeyStep; ++e) {
#pragma unroll
          for (int i = 0; i < kTm; ++i) {
#pragma unroll
            for (int step = 0; step < kTd; ++step) {
              const int j = i % 2 ? kTd - 1 - step : step;
              acc[i][j] = fmaf(p_frag[i][e], v_frag[j][e], acc[i][j]);
            }
          }
        }
      }

      // o parks the sum of the runs so far; only this lane reads it again.
      if ((tile + 1) % kRunTiles == 0 && tile + 1 < last_tile) {
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
    // A row that sees no key is zero, its log-sum-exp -inf. One whose scores are all -inf is no number.
    const bool sees_keys = (kCausal ? min(args.seqlen_k, row + diagonal + 1) : args.seqlen_k) > 0;
    const float inverse = sees_keys ? 1.0f / row_sum[i] : 0.0f;
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
extern "C" int attention_f32_ieee_d32(const AttentionArgs* args, cudaStream_t stream) {
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
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_ieee_d32_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_ieee_d32_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
// flashgen: {"problem": {"dtype": "f32", "batch": 13600, "num_q_heads": 1, "num_kv_heads": 1, "seqlen_q": 128, "seqlen_k": 128, "head_dim": 32, "head_dim_v": 32, "causal": false, "precision": "ieee"}, "family": "simt", "variant": {"br": 128, "workspace_splits": 1, "far_keys": "walked", "threads_per_block": 128, "lanes": 4, "bc": 32, "vec": 4, "q_in_registers": false, "q_layout": "transposed", "k_layout": "transposed", "v_layout": "row", "p_layout": "transposed", "p_passes": 1, "stages": 2, "min_blocks": 4, "block_order": "by_head", "unroll": 4, "sweep": "columns"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_f32_ieee_d32", "launches": [{"threads": 128, "smem_bytes": 52736, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel"}], "digest": "776511522ffd319a", "figures": [1620, 1009]}
