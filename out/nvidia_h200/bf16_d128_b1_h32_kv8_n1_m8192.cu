// attention_bf16_d128: flash attention, bf16, head dim 128, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family mma:
//   br = 16                    query rows per block
//   rows_per_warp = 16         query rows that one warp owns
//   bc = 16                    keys per tile
//   layout = swizzled          how rows in shared memory avoid bank conflicts
//   d_steps = exact            q k^T's last step: of 8 columns where the head dim ends, or of 16
//   q_in_registers = false     keep Q in registers for the whole block
//   stages = 3                 K/V tiles in shared memory; 1: K and V are fetched in turns
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   heads = 1                  heads that one block takes in turn, one's copies beside another's products
//   min_blocks = 1             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length
//   pack_heads = true          query heads that share keys fill one tile's rows together
//   key_warps = 8              warps with the same rows, which take tiles of keys in turns
//   splits = 8                 blocks of a cluster that share the keys of a tile of rows
//   merge = at_once            how results of shares of keys meet: by halves of the warps, or all at once
//   evict_first = true         what is copied leaves L2 before anything else does
//
// Measured on NVIDIA H200, batch 1, 32 query and 8 key/value heads, 1 query and 8192 key rows, without a
// mask: 16.13 us (median), spread 2.0 %, 8.3 TFLOP/s, 145 registers per thread, occupancy 12 %. Largest error
// per head against float64: 2.2e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen
// 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -arch=sm_90 -c bf16_d128_b1_h32_kv8_n1_m8192.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit bf16_d128_b1_h32_kv8_n1_m8192.cu \
//         --device h200 --dtype bf16 --d 128 --batch 1 --heads 32 --kv-heads 8 --seqlen-q 1 --seqlen-k 8192 \
//         --family mma --set br=16 --set rows_per_warp=16 --set bc=16 --set layout=swizzled \
//         --set d_steps=exact --set q_in_registers=false --set stages=3 --set rescale=lazy --set poly_exp=0 \
//         --set heads=1 --set min_blocks=1 --set block_order=by_head --set pack_heads=true \
//         --set key_warps=8 --set splits=8 --set merge=at_once --set evict_first=true

#include <cuda_bf16.h>
#include <cuda_pipeline.h>

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

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_bfloat16;
constexpr int kD = 128;  // head dim of queries and keys
constexpr int kDv = 128;  // head dim of values and outputs
constexpr int kVec = 8;  // elements per access of global memory

constexpr int kBr = 16;  // query rows per block
constexpr int kBc = 16;  // keys per tile
constexpr int kRowTiles = 1;  // tiles of 16 rows that one warp owns, so that softmax never leaves it
constexpr int kThreads = 256;
constexpr int kStages = 3;  // K/V tiles in shared memory, of each warp
constexpr int kKeyWarps = 8;  // warps with the same rows, which take tiles of keys in turns
constexpr int kSplits = 8;  // blocks of a cluster with the same rows, each with a range of keys

constexpr int kKeyTiles = kBc / 8;  // columns of eight keys in a warp's scores
constexpr int kWideSteps = 8;  // steps of 16 along the head dim in q k^T
constexpr int kValueTiles = 16;  // columns of eight in a warp's outputs

// Elements between rows in shared memory.
constexpr int kQStride = 128;
constexpr int kKStride = 128;
constexpr int kVStride = 128;
constexpr int kPartialStride = 136;  // of outputs, as floats
constexpr int kWidth = 4;  // columns that a thread puts together
constexpr int kOwnColumns = 16;  // that a block of the cluster writes, kOwnColumns * split and those behind it

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr bool kRowsMayBeEmpty = kCausal;  // though there are keys
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct Tiles {
  alignas(16) Element q[kBr * kQStride];
  alignas(16) Element k[kKeyWarps][kStages][kBc * kKStride];
  alignas(16) Element v[kKeyWarps][kStages][kBc * kVStride];
};

// What some of the keys make of the block's rows: outputs before their division, sums by four lanes, maxima.
struct PartialResult {
  alignas(16) float o[kBr * kPartialStride];
  float row_sum[kBr][4];
  float row_max[kBr];
};

// What the cluster's blocks make of the columns that one of them writes.
struct ReceivedResults {
  alignas(16) float o[kSplits][kBr][kOwnColumns];
  float row_max[kSplits][kBr], row_sum[kSplits][kBr];
};

// Partial results take the place of tiles that nobody needs any more; those of others may come before that.
struct SharedStorage {
  union {
    Tiles tiles;
    PartialResult partial_results[8];
  };
  ReceivedResults received;
};
static_assert(sizeof(SharedStorage) == 209920, "the size that pruning counted on");

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// Copies kBytes (4, 8 or 16) from global to shared memory while the thread goes on; zeros unless `inside`.
// L2 gives up first what was copied so: nobody reads it again.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  // ptxas 13.0 garbles these copies where a uniform register holds a part of the address. The minimum, beyond every
  // address (of clusters they have the block's number from bit 24 on), keeps it whole.
  const unsigned address = min(static_cast<unsigned>(__cvta_generic_to_shared(shared)), 0x1fffffffu);
  const int from_global = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :
                 : "r"(address), "l"(global), "r"(from_global), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(address), "l"(global), "n"(kBytes), "r"(from_global)
                 : "memory");
  }
}

__device__ __forceinline__ void ldmatrix_x4(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
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

// Tells the cluster that this thread has begun; waits until all have. Orders no accesses.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" : : : "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait;" : : : "memory");
}

// Writes n floats (1, 2 or 4) to a block of the cluster, to where `shared` is in this block's shared memory.
template <int n>
__device__ __forceinline__ void store_to_block(float* shared, const float (&values)[n], int block) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
  if constexpr (n == 4) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
  } else if constexpr (n == 2) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                 :
                 : "r"(address), "f"(values[0]), "f"(values[1])
                 : "memory");
  } else {
    asm volatile("st.shared::cluster.f32 [%0], %1;" : : "r"(address), "f"(values[0]) : "memory");
  }
}

// D += A B for one warp: A is 16 x k by rows, B is k x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// One access of a tile's copy: kVec elements, zeros unless `inside`.
__device__ __forceinline__ void copy_vector(Element* shared, const Element* global, bool inside) {
  copy_async<kVec * sizeof(Element)>(shared, global, inside);
}

__device__ __forceinline__ int q_offset(int row, int x) {
  // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
  return row * kQStride + (x ^ (row % 8 * 8));
}

__device__ __forceinline__ int k_offset(int key, int x) {
  // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
  return key * kKStride + (x ^ (key % 8 * 8));
}

__device__ __forceinline__ int v_offset(int key, int x) {
  // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
  return key * kVStride + (x ^ (key % 8 * 8));
}

// Where a packed row begins: row r is position r / group of head r % group, of `group` query heads that share keys.
__device__ __forceinline__ long long packed_offset(int row, int group, long long stride, long long head_stride) {
  return row / group * stride + row % group * head_stride;
}

// A thread's share of the copy of Q to shared memory. Rows from `num_rows` on become zeros.
__device__ __forceinline__ void fetch_q(
    Element* tile, const Element* q, long long stride, long long head_stride, int group, int first_row, int num_rows) {
  const int tile_row = threadIdx.x / 16, first_x = threadIdx.x % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 1; ++r) {
    const int row = tile_row + r * 16;
    const Element* source = q + packed_offset(first_row + row, group, stride, head_stride) + first_x;
#pragma unroll
    for (int x = 0; x < kD; x += 128) {
      copy_vector(tile + q_offset(row, first_x + x), source + x, first_row + row < num_rows);
    }
  }
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_k(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x % 32 / 16, first_x = threadIdx.x % 32 % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first_row + r * 2;
#pragma unroll
    for (int x = 0; x < kD; x += 128) {
      copy_vector(tile + k_offset(row, first_x + x), source + x, row < rows);
    }
    source += 2 * stride;
  }
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_v(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x % 32 / 16, first_x = threadIdx.x % 32 % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first_row + r * 2;
#pragma unroll
    for (int x = 0; x < kDv; x += 128) {
      copy_vector(tile + v_offset(row, first_x + x), source + x, row < rows);
    }
    source += 2 * stride;
  }
}

// One warp's state: its rows of Q, O and the softmax, as the fragments of the tensor cores have them. A lane owns
// rows g and g + 8 of each row tile, g = lane / 4, and of each column tile columns 2 c and 2 c + 1, c = lane % 4.
struct Warp {
  float o[kRowTiles][kValueTiles][4] = {};
  float row_max[kRowTiles][2];  // in units of the exponents of two
  float row_sum[kRowTiles][2] = {};
};

using Scores = float[kRowTiles][kKeyTiles][4];
constexpr int kOperand = kRowTiles * 8;  // a lane's scores that make an operand of 16 keys

// Turns the sign of Q.
__device__ __forceinline__ void negate_q(Element* q) {
  for (int i = threadIdx.x; i < kBr * 128; i += kThreads) {
    Element& element = q[q_offset(i / 128, i % 128)];
    reinterpret_cast<unsigned short&>(element) ^= 0x8000u;
  }
  __syncthreads();
}

// Where the keys end that each of a lane's rows sees.
__device__ __forceinline__ void find_ends(
    int (&ends)[kRowTiles][2], int first_row, int group, int seqlen_q, int seqlen_k) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * i + threadIdx.x % 32 / 4 + 8 * h;
      ends[i][h] = kCausal ? min(seqlen_k, row / group + seqlen_k - seqlen_q + 1) : seqlen_k;
    }
  }
}

// Hides the keys that a row does not see.
__device__ __forceinline__ void mask(Scores& s, const int (&ends)[kRowTiles][2], int first_key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int end = ends[i][e / 2] - (first_key + lane % 4 * 2 + e % 2);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        if (t * 8 >= end) s[i][t][e] = -kInfinity;
      }
    }
  }
}

// Raises the running maximum of each row to the tile's. What was summed so far must be multiplied by `rescale`,
// where true is returned.
__device__ __forceinline__ bool raise_maximum(
    const Scores& s, Warp& warp, float (&rescale)[kRowTiles][2], float scale) {
  // A maximum that is out of date by a factor of 2^8 harms neither range nor precision. As integers, positive
  // floats compare as they are; zero bounds the others.
  bool grown = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int bound = 0;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        bound = __vimax3_s32(bound, __float_as_int(s[i][t][2 * h]), __float_as_int(s[i][t][2 * h + 1]));
      }
      grown |= fmaf(__int_as_float(bound), scale, -warp.row_max[i][h]) > 8.0f;
    }
  }
  if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kKeyTiles; ++t) tile_max = fmaxf(tile_max, fmaxf(s[i][t][2 * h], s[i][t][2 * h + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      const float row_max = fmaxf(warp.row_max[i][h], tile_max * scale);
      // A row that has seen no key yet keeps its maximum of -infinity, against which nothing can be measured.
      const float base = kRowsMayBeEmpty && row_max == -kInfinity ? 0.0f : row_max;
      rescale[i][h] = exp2f(warp.row_max[i][h] - base);
      warp.row_max[i][h] = row_max;
      warp.row_sum[i][h] *= rescale[i][h];
    }
  }
  return true;
}

// Turns element e of a lane's scores of one tile into a weight, 2^(score - maximum), and adds it to the row's sum.
__device__ __forceinline__ void weigh(
    Scores& s, Warp& warp, const float (&base)[kRowTiles][2], float scale, int i, int t, int e) {
  const float exponent = fmaf(s[i][t][e], scale, -base[i][e / 2]);
  s[i][t][e] = exp2f(exponent);
  warp.row_sum[i][e / 2] += s[i][t][e];
}

// The maxima that weights are measured against.
__device__ __forceinline__ void get_base(const Warp& warp, float (&base)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      base[i][h] = kRowsMayBeEmpty && warp.row_max[i][h] == -kInfinity ? 0.0f : warp.row_max[i][h];
    }
  }
}

// The weights of `count` operands of 16 keys from `first` on: of `shares` equal ones, share `share`.
__device__ __forceinline__ void weigh_share(
    Scores& s, Warp& warp, const float (&base)[kRowTiles][2], float scale, int first, int count, int share,
    int shares) {
#pragma unroll
  for (int e = 0; e < kKeyTiles * 4 * kRowTiles; ++e) {
    const int within = e % kOperand;  // row tile, then column tile, then element
    const int t = (first + e / kOperand) * 2 + within % 8 / 4;
    const bool chosen = e < count * kOperand && e * shares / (count * kOperand) == share;
    if (chosen && t < kKeyTiles) weigh(s, warp, base, scale, within / 8, t, within % 4);
  }
}

// s = q k^T for the warp's rows and one tile of keys, not scaled.
__device__ __forceinline__ void multiply_qk(
    Scores& s, const Element* q, const Element* k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][t][e] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < kWideSteps; ++step) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const Element* row = q + q_offset(16 * i + lane % 16, step * 16 + lane / 16 * 8);
      ldmatrix_x4(a[i], row);
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; t += 2) {
      // Two tiles of eight keys, each as two halves of the step.
      unsigned b[4];
      ldmatrix_x4(b, k + k_offset(t * 8 + lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma_m16n8k16_bf16(s[i][t + u], a[i], b + 2 * u);
      }
    }
  }
}

// The weights that the first products with V need.
__device__ __forceinline__ void weigh_first(Scores& s, Warp& warp, float scale) {
  float base[kRowTiles][2];
  get_base(warp, base);
  weigh_share(s, warp, base, scale, 0, 1, 0, 1);
}

__device__ __forceinline__ void rescale_output(Warp& warp, const float (&rescale)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) warp.o[i][n][e] *= rescale[i][e / 2];
    }
  }
}

// o += p v for one tile of keys, whose weights p are made of the scores s on the way: exponentials for the next
// operand run on the special-function unit beside the products of this one.
__device__ __forceinline__ void multiply_pv(Warp& warp, Scores& s, const Element* v, float scale) {
  const int lane = threadIdx.x % 32;
  float base[kRowTiles][2];
  get_base(warp, base);

#pragma unroll
  for (int u = 0; u < 2; u += 2) {
    // Two tiles of weights, as a lane has them, are one operand of sixteen keys.
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int f = 0; f < 4; ++f) a[i][f] = pack(s[i][u + f / 2][f % 2 * 2], s[i][u + f / 2][f % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, v + v_offset(u * 8 + lane % 16, n * 8 + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(warp.o[i][n], a[i], b);
        mma_m16n8k16_bf16(warp.o[i][n + 1], a[i], b + 2);
      }
      weigh_share(s, warp, base, scale, u / 2 + 1, 1, n / 2, 8);
    }
  }
}

// Whether what the tensor cores made of a row can be trusted. Beyond 2^20, the maximum is rounded by more than weights
// can bear; and sums that are no number, or huge, come of scores beyond float32 or of inputs that are no numbers.
__device__ __forceinline__ bool trusted(float row_max, float row_sum) {
  return fabsf(row_max) <= 1048576.0f && row_sum < 1e30f;
}

// Computes one row again by a warp, 32 keys at a time, in double precision, which holds every product of two inputs
// and every score: slow, and right wherever the result is a number. Of inputs that are none it makes what IEEE
// arithmetic makes of them. `write` takes a column and its output. Lanes never part, or the compiler would keep in
// registers of every lane what the caller has in uniform ones.
template <typename Write>
__device__ __forceinline__ void recompute_row(
    const AttentionArgs& args, int batch, int head, int row, const Write& write) {
  constexpr int kColumns = (kDv + 31) / 32;  // of a lane: every 32nd
  const int lane = threadIdx.x % 32, kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const Element* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head + row * args.q_stride_row;
  const Element* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const Element* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  const double scale = double(args.scale) * 1.4426950408889634;
  const int end_key = kCausal ? min(args.seqlen_k, row + args.seqlen_k - args.seqlen_q + 1) : args.seqlen_k;
  double row_max = -kInfinity, row_sum = 0.0, o[kColumns] = {};
#pragma unroll 1
  for (int first_key = 0; first_key < end_key; first_key += 32) {
    const Element* key = k + min(first_key + lane, end_key - 1) * args.k_stride_row;
    double score = 0.0;
#pragma unroll 4
    for (int x = 0; x < kD; ++x) score += double(__bfloat162float(q[x])) * double(__bfloat162float(key[x]));
    score = first_key + lane < end_key ? score * scale : -kInfinity;
    double largest = score;  // or what is no number, where one of them is none
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) {
      const double other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = largest >= other || largest != largest ? largest : other;
    }
    largest = row_max > largest ? row_max : largest;
    // Against a maximum of -infinity nothing can be measured.
    const double base = largest == -kInfinity ? 0.0 : largest;
    const float weight = exp2f(float(score - base)), rescale = exp2f(float(row_max - base));
    row_max = largest;
    row_sum *= rescale;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[c] *= rescale;
    const int num_keys = min(32, end_key - first_key);
#pragma unroll 1
    for (int j = 0; j < num_keys; ++j) {
      const double factor = __shfl_sync(0xffffffffu, weight, j);
      row_sum += factor;
      const Element* value = v + (first_key + j) * args.v_stride_row;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int x = c * 32 + lane;
        if (x < kDv) o[c] += factor * double(__bfloat162float(value[x]));
      }
    }
    if (__any_sync(0xffffffffu, row_sum != row_sum)) break;  // no number by now, nor will it be one
  }
  const bool seen = end_key > 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int x = c * 32 + lane;
    if (x < kDv) write(x, seen ? float(o[c] / row_sum) : 0.0f);
  }
  if (args.lse != nullptr && lane == 0) {
    const double sum = log2f(float(row_sum));
    args.lse[(1LL * batch * args.num_q_heads + head) * args.seqlen_q + row] =
        seen ? float((row_max + sum) * 0.6931471805599453) : -kInfinity;
  }
}

// Neighbouring columns, moved by one access.
template <int N>
struct alignas(4 * N) Columns {
  float at[N];
};

__device__ __forceinline__ float sum_of(const PartialResult& result, int row) {
  const float (&sums)[4] = result.row_sum[row];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Lays a warp's rows into a partial result, from `first_row` on, as far as `end_row`.
__device__ __forceinline__ void store_partial(
    PartialResult& partial, const Warp& warp, int first_row, int end_row = kBr) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * i + lane / 4 + 8 * h;
      if (row >= end_row) continue;
      if (lane % 4 == 0) partial.row_max[row] = warp.row_max[i][h];
      partial.row_sum[row][lane % 4] = warp.row_sum[i][h];
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        float* target = partial.o + row * kPartialStride + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(target) = make_float2(warp.o[i][n][2 * h], warp.o[i][n][2 * h + 1]);
      }
    }
  }
}

// What all of a row's keys, or those of a block, make of it: of kWidth columns outputs before their division.
struct RowResult {
  float row_max, row_sum;
  Columns<kWidth> o;
};

// Puts together what `count` shares of the keys make of a row, in their order; `share` says what each does.
template <int count, typename Share>
__device__ __forceinline__ RowResult put_together(const Share& share) {
  RowResult shares[count], all{-kInfinity};
#pragma unroll
  for (int i = 0; i < count; ++i) {
    shares[i] = share(i);
    all.row_max = fmaxf(all.row_max, shares[i].row_max);
  }
  const float base = all.row_max == -kInfinity ? 0.0f : all.row_max;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float weight = exp2f(shares[i].row_max - base);
    all.row_sum = fmaf(weight, shares[i].row_sum, all.row_sum);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) all.o.at[j] = fmaf(weight, shares[i].o.at[j], all.o.at[j]);
  }
  return all;
}

// The columns from x on of a row of the block, of all its warps.
__device__ __forceinline__ RowResult result_of_warps(const PartialResult* partials, int row, int x) {
  return put_together<kKeyWarps>([&](int warp) {
    const PartialResult& partial = partials[warp];
    const float* const o = partial.o + row * kPartialStride + x;
    return RowResult{partial.row_max[row], sum_of(partial, row), *reinterpret_cast<const Columns<kWidth>*>(o)};
  });
}

// Writes this block's columns of o, and the first block the log-sum-exp. `recompute` does the rows again that no
// product can be trusted with.
template <typename Recompute>
__device__ __forceinline__ void write_received(
    const ReceivedResults& received, int split, Element* o, long long stride, long long head_stride, int group,
    float* lse, int first_row, int num_rows, int seqlen_q, const Recompute& recompute) {
  constexpr int kPieces = kOwnColumns / kWidth;
  const int count = min(kBr, num_rows - first_row) * kPieces, lane = threadIdx.x % 32;
  for (int first = threadIdx.x - lane; first < count; first += kThreads) {
    const int i = first + lane, row = min(i, count - 1) / kPieces, own_x = i % kPieces * kWidth;
    const int x = kOwnColumns * split + own_x;
    const RowResult result = put_together<kSplits>([&](int block) {
      const auto its = reinterpret_cast<const Columns<kWidth>*>(received.o[block][row] + own_x);
      return RowResult{received.row_max[block][row], received.row_sum[block][row], *its};
    });
    const float row_max = result.row_max, row_sum = result.row_sum;
    // A row that cannot be trusted is done again by the warp that has its first columns.
    const bool keeps = trusted(row_max, row_sum);
    unsigned untrusted = __ballot_sync(0xffffffffu, !keeps && x == 0 && i < count);
    for (; untrusted != 0; untrusted &= untrusted - 1) {
      recompute(__shfl_sync(0xffffffffu, row, __ffs(untrusted) - 1));
    }
    if (!keeps || i >= count) continue;
    const float inverse = 1.0f / row_sum;
    float outputs[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) outputs[j] = result.o.at[j] * inverse;
    const int packed_row = first_row + row;
    if (lse != nullptr && x == 0) {
      lse[packed_row % group * seqlen_q + packed_row / group] = (row_max + log2f(row_sum)) * kLn2;
    }
    Element* target = o + packed_offset(packed_row, group, stride, head_stride) + x;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack(outputs[0], outputs[1]), pack(outputs[2], outputs[3]));
  }
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads, 1)
    attention_bf16_d128_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // The query heads that share a head of keys fill the rows of one tile.
  const int group = args.num_q_heads / args.num_kv_heads;
  const int num_rows = args.seqlen_q * group;
  // The blocks of a cluster have the same rows, and each a range of their keys.
  const int block = int(blockIdx.x) / kSplits, split = int(blockIdx.x) % kSplits;
  const int q_tiles = (num_rows + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = block % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
  const int kv_head = block / q_tiles % args.num_kv_heads;
  const int batch = block / q_tiles / args.num_kv_heads;
  const int head = kv_head * group;  // the first of those packed

  const Element* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head;
  const Element* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const Element* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  Element* o = args.o + batch * args.o_stride_batch + head * args.o_stride_head;
  float* lse = args.lse == nullptr ? nullptr : args.lse + (1LL * batch * args.num_q_heads + head) * args.seqlen_q;

  const int first_row = q_tile * kBr;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp_index = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int diagonal = args.seqlen_k - args.seqlen_q;
  int end_key = args.seqlen_k;  // of all that the block sees
  if (kCausal) end_key = max(0, min(end_key, (first_row + kBr - 1) / group + 1 + diagonal));
  const int first_tile = 0, last_tile = (end_key + kBc - 1) / kBc;
  // Of these the block has a range, and the warp every kKeyWarps-th from `own_tile` on.
  const int num_tiles = last_tile - first_tile, end_of_range = first_tile + num_tiles * (split + 1) / kSplits;
  const int own_tile = first_tile + num_tiles * split / kSplits + warp_index;
  const int num_steps = (end_of_range - own_tile + kKeyWarps - 1) / kKeyWarps;
  // The warp computes tiles before `end_tile`, none where its rows lie beyond Q, and masks from `masked_tile` on.
  int end_tile = first_row < num_rows ? last_tile : first_tile, masked_tile = args.seqlen_k / kBc;
  if (kCausal) {
    const int seen_by_first = first_row / group + diagonal + 1;
    const int seen_by_last = (first_row + 16 * kRowTiles - 1) / group + diagonal + 1;
    masked_tile = min(masked_tile, max(0, seen_by_first) / kBc);
    end_tile = min(end_tile, (max(0, seen_by_last) + kBc - 1) / kBc);
  }
  const Element* warp_q = smem.tiles.q;
  // Maxima are taken of raw scores: a negative scale turns Q's sign instead. A scale of zero becomes too small to
  // matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;

  // Each thread copies its own share of every tile of its warp.
  fetch_q(smem.tiles.q, q, args.q_stride_row, args.q_stride_head, group, first_row, num_rows);
  int keys_left = args.seqlen_k - own_tile * kBc;  // from the next tile to come on
  const int copier = threadIdx.x % 32;
  k += (own_tile * kBc + copier / 16) * args.k_stride_row + copier % 16 * kVec;
  v += (own_tile * kBc + copier / 16) * args.v_stride_row + copier % 16 * kVec;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < num_steps) {
      fetch_k(smem.tiles.k[warp_index][stage], k, args.k_stride_row, keys_left);
      k += kKeyWarps * kBc * args.k_stride_row;
      fetch_v(smem.tiles.v[warp_index][stage], v, args.v_stride_row, keys_left);
      v += kKeyWarps * kBc * args.v_stride_row;
      keys_left -= kKeyWarps * kBc;
    }
    __pipeline_commit();
  }

  cluster_arrive();  // before others bring anything, each has begun
  int ends[kRowTiles][2];
  find_ends(ends, first_row, group, args.seqlen_q, args.seqlen_k);
  Warp warp;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) warp.row_max[i][0] = warp.row_max[i][1] = -kInfinity;
  __pipeline_wait_prior(kStages - 2);

  __syncthreads();  // Q is there
  if (args.scale < 0.0f) negate_q(smem.tiles.q);

  for (int step = 0; step < num_steps; ++step) {
    const int tile = own_tile + step * kKeyWarps;
    __pipeline_wait_prior(kStages - 2);
    __syncwarp();  // this tile is there, and no lane needs the one before it
    const int far_step = step + kStages - 1;
    if (far_step < num_steps) {
      fetch_k(smem.tiles.k[warp_index][far_step % kStages], k, args.k_stride_row, keys_left);
      k += kKeyWarps * kBc * args.k_stride_row;
      fetch_v(smem.tiles.v[warp_index][far_step % kStages], v, args.v_stride_row, keys_left);
      v += kKeyWarps * kBc * args.v_stride_row;
      keys_left -= kKeyWarps * kBc;
    }
    __pipeline_commit();
    const int stage = step % kStages;
    if (tile < end_tile) {
      Scores s;
      multiply_qk(s, warp_q, smem.tiles.k[warp_index][stage]);
      if (tile >= masked_tile) mask(s, ends, tile * kBc);
      float rescale[kRowTiles][2];
      if (raise_maximum(s, warp, rescale, scale)) rescale_output(warp, rescale);

      weigh_first(s, warp, scale);
      multiply_pv(warp, s, smem.tiles.v[warp_index][stage], scale);
    }
  }
  __syncthreads();  // no warp needs tiles any more
  store_partial(smem.partial_results[warp_index], warp, 0, num_rows - first_row);
  __syncthreads();
  cluster_wait();  // every block has begun, and has room for what it receives
  const int end_row = min(kBr, num_rows - first_row);
  for (int i = threadIdx.x; i < end_row * (kDv / kWidth); i += kThreads) {
    const int row = i / (kDv / kWidth), x = i % (kDv / kWidth) * kWidth;
    const RowResult result = result_of_warps(smem.partial_results, row, x);
    const int owner = x / kOwnColumns, its_x = x % kOwnColumns;
    store_to_block(smem.received.o[split][row] + its_x, result.o.at, owner);
    if (its_x == 0) {
      store_to_block(smem.received.row_max[split] + row, {result.row_max}, owner);
      store_to_block(smem.received.row_sum[split] + row, {result.row_sum}, owner);
    }
  }
  cluster_sync();  // every block has what it writes
  const auto recompute = [&](int row) {
    const int packed_row = first_row + row, position = packed_row / group, its_head = packed_row % group;
    recompute_row(args, batch, head + its_head, position, [&](int x, float value) {
      o[packed_offset(packed_row, group, args.o_stride_row, args.o_stride_head) + x] = __float2bfloat16_rn(value);
    });
  };
  write_received(
      smem.received, split, o, args.o_stride_row, args.o_stride_head, group, lse, first_row, num_rows, args.seqlen_q,
      recompute);
}

#ifndef __CUDACC_RTC__
// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
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
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long num_kv_heads = args->num_kv_heads, seqlen_q = args->seqlen_q;
  if (seqlen_q * (num_q_heads / num_kv_heads) > 0x7fffffffLL - kBr) return cudaErrorInvalidValue;
  const long long blocks = (seqlen_q * (num_q_heads / num_kv_heads) + kBr - 1) / kBr * num_kv_heads * batch * kSplits;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_bf16_d128_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
// flashgen: {"problem": {"dtype": "bf16", "batch": 1, "num_q_heads": 32, "num_kv_heads": 8, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128, "head_dim_v": 128, "causal": false, "precision": "auto"}, "family": "mma", "variant": {"parts": "tf32", "pack_heads": true, "br": 16, "rows_per_warp": 16, "key_warps": 8, "splits": 8, "workspace_splits": 1, "merge": "at_once", "bc": 16, "layout": "swizzled", "d_steps": "exact", "q_in_registers": false, "q_whole": false, "stages": 3, "far_keys": "walked", "evict_first": true, "rescale": "lazy", "poly_exp": 0, "heads": 1, "min_blocks": 1, "block_order": "by_head"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d128", "launches": [{"threads": 256, "smem_bytes": 209920, "rows_per_block": 16, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": true, "splits": 8, "heads_per_cluster": 1, "role": "kernel"}], "digest": "98dff07a2bd7ef0b", "figures": [1844, 1084]}
