// attention_f32_d256_backward: gradients of flash attention, f32, head dim 256, tuned without a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family mma-backward:
//   bc = 32                    keys that a block keeps, whose gradients it makes
//   br = 64                    query rows that pass by them
//   key_warps = 2              warps of such a block, which share its keys
//   column_warps = 4           warps with the same keys, which take columns of their gradients each
//   dq_path = launch           who makes queries' gradients: a launch of its own, or blocks of keys by atomic sums
//   rows = 64                  query rows that a block of the other launch keeps
//   keys = 32                  keys that pass by them
//   row_warps = 4              warps of such a block, which share its rows
//   layout = swizzled          how rows in shared memory avoid bank conflicts
//   stages = 1                 tiles that pass by in shared memory
//   min_blocks = 1             blocks per SM the compiler must leave registers for
//   gradient_warps = 2         warps with the same rows, which take columns of their gradients each, and make weights anew

#include <cuda_fp16.h>

#include <cuda_pipeline.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements; lse and dlse are contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const float* q;
  const float* k;
  const float* v;
  const float* o;
  const float* dout;
  const float* lse;
  const float* dlse;
  float* dq;
  float* dk;
  float* dv;
  float* workspace;  // for what launches leave each other
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long dout_stride_batch, dout_stride_head, dout_stride_row;
  long long dq_stride_batch, dq_stride_head, dq_stride_row;
  long long dk_stride_batch, dk_stride_head, dk_stride_row;
  long long dv_stride_batch, dv_stride_head, dv_stride_row;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 304, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = float;
constexpr int kD = 256, kDv = 256;  // head dims of keys and of values
constexpr int kVec = 4;  // elements per access of global memory

constexpr int kBc = 32;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 64;  // query rows that pass by them at a time
constexpr int kKeyWarps = 2, kColumnWarps = 4;  // warps along keys, and along columns of their gradients
constexpr int kThreads = 32 * kKeyWarps * kColumnWarps;
constexpr int kBr = 64;  // query rows that a block of the other launch keeps
constexpr int kPassingKeys = 32;  // keys that pass by them at a time
constexpr int kRowWarps = 4, kGradientWarps = 2;  // its warps along rows, and along columns of gradients
constexpr int kQueryThreads = 32 * kRowWarps * kGradientWarps;
constexpr int kStages = 1;  // tiles that pass by in shared memory
constexpr int kStatisticsRows = 32, kStatisticsThreads = 256;

// Columns in whole steps of products, and elements from one row in shared memory to the next.
constexpr int kColumns = 256, kColumnsV = 256;
constexpr int kStride = 512, kStrideV = 512;
constexpr int kWeightStride = 128;  // between keys' weights of the rows that pass by
using Operand = __half;
// float32 is brought into the range of f16 by powers of two, its units: each row of an array has its own, behind its parts,
// in which its largest element is between 2^12 and 2^13.
constexpr int kTopExponent = 12;
constexpr float kLeastUnit = 9.62964972193618e-35f;  // 2^-113, that of zeros, so that products of units are normal
constexpr int kSplitRows = 8, kSplitThreads = 256;  // of a block that splits
constexpr int kUnitWords = 4;  // of 32 bits, from the end of a row's parts to the next row

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Keys and values, and of the query rows that pass by what is known of them.
struct SharedStorage {
  alignas(16) Operand k[kBc * kStride], v[kBc * kStrideV];
  alignas(16) Operand q[kStages][kPassingRows * kStride], out_gradient[kStages][kPassingRows * kStrideV];
  alignas(16) Operand weights[kBc * kWeightStride];
  alignas(16) Operand gradients[kBc * kWeightStride];  // of scores
  float weight_units[kColumnWarps][kBc], gradient_units[kColumnWarps][kBc];
  alignas(16) float lse[kStages][kPassingRows], delta[kStages][kPassingRows];
  alignas(16) float q_unit[kStages][kPassingRows], out_unit[kStages][kPassingRows];
};

// Query rows and gradients of outputs, and keys that pass by.
struct QueryStorage {
  alignas(16) Operand q[kBr * kStride], out_gradient[kBr * kStrideV];
  alignas(16) Operand k[kStages][kPassingKeys * kStride], v[kStages][kPassingKeys * kStrideV];
  alignas(16) float lse[kBr], delta[kBr];
  alignas(16) float q_unit[kBr], out_unit[kBr];
  alignas(16) float k_unit[kStages][kPassingKeys], v_unit[kStages][kPassingKeys];
};
static_assert(sizeof(SharedStorage) == 215040, "the size that pruning counted on");

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// Waits until the launches in front of this one, of the same call, have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_earlier_launches() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
}

// Lets the next launch begin wherever there is room. It waits for the end of this one itself.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
#endif

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// Copies kBytes (4, 8 or 16) from global to shared memory while the thread goes on; zeros unless `inside`.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int from_global = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(global), "r"(from_global)
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

// D += A B for one warp: A is 16 x 16 by rows, B is 16 x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// What a row sees of the keys ends there.
__device__ __forceinline__ int end_key_of(const AttentionArgs& args, int batch, int row) {
  return kCausal ? min(args.seqlen_k, row + args.seqlen_k - args.seqlen_q + 1) : args.seqlen_k;
}

__device__ __forceinline__ int first_key_of(const AttentionArgs& args, int batch, int row) { return 0; }

// What a row sees of the keys, a predicate aside: none where it is not there.
struct KeyRange {
  int begin, end;
};
__device__ __forceinline__ KeyRange keys_of(const AttentionArgs& args, int batch, int row) {
  if (row >= args.seqlen_q) return {0, 0};
  return {first_key_of(args, batch, row), end_key_of(args, batch, row)};
}

// The first of the rows [below, above) whose keys end behind a key, and the first whose begin behind it; `above` where
// none do. Bounds rise with rows.
__device__ __forceinline__ int first_row_that_ends(
    const AttentionArgs& args, int batch, int key, int below, int above) {
  int row = key < args.seqlen_k ? below : above;
  if (kCausal) row = max(row, key + 1 - (args.seqlen_k - args.seqlen_q + 1));
  return min(row, above);
}
__device__ __forceinline__ int first_row_that_begins(
    const AttentionArgs& args, int batch, int key, int below, int above) {
  return above;
}

// The rows that see some of the keys [first_key, end_key): neighbours.
__device__ __forceinline__ void find_rows(
    const AttentionArgs& args, int batch, int first_key, int end_key, int& first_row, int& end_row) {
  first_row = first_row_that_ends(args, batch, first_key, 0, args.seqlen_q);
  end_row = first_row_that_begins(args, batch, end_key - 1, first_row, args.seqlen_q);
}

// Of each row, its log-sum-exp in powers of two (infinity where it sees nothing, and so weighs nothing), and what its
// scores' gradients are less by.
__device__ __forceinline__ float* lse_of(const AttentionArgs& args, int batch, int head) {
  return args.workspace + (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q;
}
__device__ __forceinline__ float* delta_of(const AttentionArgs& args, int batch, int head) {
  return lse_of(args, batch, head) + ((static_cast<long long>(args.batch)) * args.num_q_heads * args.seqlen_q + 63) / 64 * 64;
}

// Two float32, each as the sum of two f16: eleven bits, and what these leave, rounded to eleven bits again. The first
// number is in the low halves.
struct Parts {
  unsigned big, small;
};

__device__ __forceinline__ Parts split(float first, float second) {
  const __half2 big = __floats2half2_rn(first, second);
  const float2 rounded = __half22float2(big);
  const __half2 small = __floats2half2_rn(first - rounded.x, second - rounded.y);
  return {reinterpret_cast<const unsigned&>(big), reinterpret_cast<const unsigned&>(small)};
}

// The power of two in which the largest of some numbers is between 2^kTopExponent and twice that, by its bits.
__device__ __forceinline__ float unit_of(float largest) {
  constexpr unsigned kExponent = 0x7f800000u, kTop = kTopExponent << 23;
  constexpr unsigned kLeast = __builtin_bit_cast(unsigned, kLeastUnit);
  return __uint_as_float(max(__float_as_uint(largest) & kExponent, kLeast + kTop) - kTop);
}

// Exact for units: the exponents of a number and its inverse add up to twice the bias.
__device__ __forceinline__ float inverse_of(float unit) {
  return __uint_as_float((254u << 23) - __float_as_uint(unit));
}

// Where elements of tiles lie: of queries and keys, and of values and outputs.
struct OfKeys {
  static constexpr int kRowStride = kStride;
  static __device__ __forceinline__ int at(int row, int x) {
    // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
    return row * kRowStride + (x ^ (row % 8 * 8));
  }
};
struct OfValues {
  static constexpr int kRowStride = kStrideV;
  static __device__ __forceinline__ int at(int row, int x) {
    // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
    return row * kRowStride + (x ^ (row % 8 * 8));
  }
};

struct OfWeights {
  static constexpr int kRowStride = kWeightStride;
  static __device__ __forceinline__ int at(int row, int x) {
    // XOR of the 16-byte chunk with the row spreads neighbouring rows over the banks.
    return row * kRowStride + (x ^ (row % 8 * 8));
  }
};

// Rows of a head in parts, and their units, each so many words from the next.
__device__ __forceinline__ Operand* queries_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  float* const parts = args.workspace + (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64;
  return reinterpret_cast<Operand*>(
      parts + (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q * (kColumns + kUnitWords));
}
__device__ __forceinline__ const float* query_units_of(const AttentionArgs& args, int batch, int head) {
  return reinterpret_cast<const float*>(queries_of(args, batch, head)) + kColumns;
}
__device__ __forceinline__ Operand* outputs_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  float* const parts = args.workspace + (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q * 260 + 63) / 64 * 64;
  return reinterpret_cast<Operand*>(
      parts + (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q * (kColumnsV + kUnitWords));
}
__device__ __forceinline__ const float* output_units_of(const AttentionArgs& args, int batch, int head) {
  return reinterpret_cast<const float*>(outputs_of(args, batch, head)) + kColumnsV;
}
__device__ __forceinline__ Operand* keys_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  float* const parts = args.workspace + (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q * 260 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q * 260 + 63) / 64 * 64;
  return reinterpret_cast<Operand*>(
      parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * args.seqlen_k * (kColumns + kUnitWords));
}
__device__ __forceinline__ const float* key_units_of(const AttentionArgs& args, int batch, int head) {
  return reinterpret_cast<const float*>(keys_of_head(args, batch, head)) + kColumns;
}
__device__ __forceinline__ Operand* values_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  float* const parts = args.workspace + (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q * 260 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * args.seqlen_q * 260 + 63) / 64 * 64 +
                       (batches * args.num_kv_heads * args.seqlen_k * 260 + 63) / 64 * 64;
  return reinterpret_cast<Operand*>(
      parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * args.seqlen_k * (kColumnsV + kUnitWords));
}
__device__ __forceinline__ const float* value_units_of(const AttentionArgs& args, int batch, int head) {
  return reinterpret_cast<const float*>(values_of_head(args, batch, head)) + kColumnsV;
}

// Starts copying rows [first, first + kRows) of kWidth columns in parts; rows from `end` on become zeros.
template <typename Place, int kRows, int kWidth, int kBlock>
__device__ __forceinline__ void copy_tile(Operand* tile, const Operand* rows, int first, int end) {
  constexpr int kAcross = kWidth / 4, kTogether = kAcross < kBlock ? kAcross : kBlock, kRowStep = kBlock / kTogether;
  constexpr int kPasses = (kAcross + kTogether - 1) / kTogether;  // across a row
  const int own_row = threadIdx.x / kTogether, own_x = threadIdx.x % kTogether;
#pragma unroll 8
  for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep * kPasses; ++i) {
    const int row = own_row + i / kPasses * kRowStep, x = (own_x + i % kPasses * kTogether) * 8;
    if (kBlock % kTogether != 0 && own_row >= kRowStep) break;
    if (kRows % kRowStep != 0 && row >= kRows) break;
    if (kAcross % kTogether != 0 && x >= kAcross * 8) continue;
    const bool inside = first + row < end;
    const Operand* const source = rows + (first + row) * (2LL * (kWidth + kUnitWords)) + x;
    copy_async<16>(tile + Place::at(row, x), source, inside);
  }
}

// Starts copying one number of each of rows [first, first + kRows), which are so many words apart, zeros from `end` on.
template <int kRows, int kBlock, int kApart = 1>
__device__ __forceinline__ void copy_numbers(float* tile, const float* numbers, int first, int end) {
  for (int i = threadIdx.x; i < kRows; i += kBlock) {
    const bool inside = first + i < end;
    const float* const source = numbers + (inside ? static_cast<long long>(first + i) * kApart : 0);
    copy_async<4>(tile + i, source, inside);
  }
}

// Products of a warp's rows, from `own` on, with those that pass by, over all columns. What two steps add is summed apart,
// since accumulators cut off what they cannot hold.
template <typename Place, int kRowTiles, int kTiles, int kDepth>
__device__ __forceinline__ void multiply(
    float (&s)[kRowTiles][kTiles][4], const Operand* stay, int own, const Operand* pass) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][t][e] = 0.0f;
    }
  }
#pragma unroll 2  // else too much is read ahead
  for (int first = 0; first < kDepth; first += 32) {
    constexpr int kSteps = 2;
    const int steps = min(kSteps, (kDepth - first) / 16);
    unsigned a[kSteps][kRowTiles][4], a_small[kSteps][kRowTiles][4];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int x = first + step * 16 + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ldmatrix_x4(a[step][i], stay + Place::at(own + 16 * i + lane % 16, x));
        ldmatrix_x4(a_small[step][i], stay + Place::at(own + 16 * i + lane % 16, kDepth + x));
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      float added[kRowTiles][2][4] = {};
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        const int row = t * 8 + lane / 16 * 8 + lane % 8, x = first + step * 16 + lane / 8 % 2 * 8;
        unsigned b[4], b_small[4];  // of two tiles of eight
        ldmatrix_x4(b, pass + Place::at(row, x));
        ldmatrix_x4(b_small, pass + Place::at(row, kDepth + x));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            mma_m16n8k16_f16(added[i][j], a_small[step][i], b + 2 * j);
            mma_m16n8k16_f16(added[i][j], a[step][i], b_small + 2 * j);
            mma_m16n8k16_f16(added[i][j], a[step][i], b + 2 * j);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) s[i][t + e / 4][e % 4] += added[i][e / 4][e % 4];
      }
    }
  }
}

// A warp's weights as left operands in parts: rows are what it keeps, each in a unit of its own, columns what passes by.
template <int kRowTiles, int kSteps>
struct Weights {
  unsigned big[kRowTiles][kSteps][4], small[kRowTiles][kSteps][4];
  float units[kRowTiles][2];
};

// Splits weights as the products left them.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ Weights<kRowTiles, kTiles / 2> split_weights(const float (&s)[kRowTiles][kTiles][4]) {
  Weights<kRowTiles, kTiles / 2> weights;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.0f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) largest = fmaxf(largest, fmaxf(fabsf(s[i][t][2 * h]), fabsf(s[i][t][2 * h + 1])));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float unit = unit_of(largest), factor = inverse_of(unit);
      weights.units[i][h] = unit;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const Parts both = split(s[i][t][2 * h] * factor, s[i][t][2 * h + 1] * factor);
        weights.big[i][t / 2][t % 2 * 2 + h] = both.big;
        weights.small[i][t / 2][t % 2 * 2 + h] = both.small;
      }
    }
  }
  return weights;
}

// Lays a warp's weights, of its keys from `own` on and rows from `own_row` on, to where all warps see them.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void put_weights(
    Operand* tile, float (&units)[kColumnWarps][kBc], const float (&s)[kRowTiles][kTiles][4], int own, int own_row) {
  const int lane = threadIdx.x % 32;
  const Weights<kRowTiles, kTiles / 2> weights = split_weights(s);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = own + 16 * i + lane / 4 + 8 * h;
      if (lane % 4 == 0) units[own_row / (8 * kTiles)][key] = weights.units[i][h];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int row = own_row + t * 8 + lane % 4 * 2;
        *reinterpret_cast<unsigned*>(tile + OfWeights::at(key, row)) = weights.big[i][t / 2][t % 2 * 2 + h];
        *reinterpret_cast<unsigned*>(tile + OfWeights::at(key, kPassingRows + row)) = weights.small[i][t / 2][t % 2 * 2 + h];
      }
    }
  }
}

// Reads weights of keys from `own` on, of the rows that one of the warps along columns has made, where it has laid them.
template <int kRowTiles, int kSteps>
__device__ __forceinline__ Weights<kRowTiles, kSteps> read_weights(
    const Operand* tile, const float (&units)[kColumnWarps][kBc], int own, int share) {
  const int lane = threadIdx.x % 32;
  Weights<kRowTiles, kSteps> weights;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const int key = own + 16 * i + lane % 16;
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int row = (share * kSteps + u) * 16 + lane / 16 * 8;
      ldmatrix_x4(weights.big[i][u], tile + OfWeights::at(key, row));
      ldmatrix_x4(weights.small[i][u], tile + OfWeights::at(key, kPassingRows + row));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) weights.units[i][h] = units[share][own + 16 * i + lane / 4 + 8 * h];
  }
  return weights;
}

// Adds to a warp's rows what passes by, times its weights, in columns from one on. What a tile adds is summed apart.
template <typename Place, int kWidth, int kAll, int kRowTiles, int kSteps>
__device__ __forceinline__ void accumulate(
    float (&sum)[kRowTiles][kWidth / 8][4], const Weights<kRowTiles, kSteps>& weights, const Operand* pass,
    int first_column = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kWidth / 8; n += 2) {
    float added[kRowTiles][2][4] = {};
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int row = u * 16 + lane % 16, x = first_column + n * 8 + lane / 16 * 8;
      unsigned b[4], b_small[4];
      ldmatrix_x4_trans(b, pass + Place::at(row, x));
      ldmatrix_x4_trans(b_small, pass + Place::at(row, kAll + x));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_m16n8k16_f16(added[i][j], weights.small[i][u], b + 2 * j);
          mma_m16n8k16_f16(added[i][j], weights.big[i][u], b_small + 2 * j);
          mma_m16n8k16_f16(added[i][j], weights.big[i][u], b + 2 * j);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& total = sum[i][n + e / 4][e % 4];
        total = fmaf(weights.units[i][e % 4 / 2], added[i][e / 4][e % 4], total);
      }
    }
  }
}

// The same by the weights that warps have laid where all see them: one warp's after the other's, which have units of their own.
template <typename Place, int kWidth, int kAll, int kRowTiles>
__device__ __forceinline__ void accumulate_shares(
    float (&sum)[kRowTiles][kWidth / 8][4], const Operand* tile, const float (&units)[kColumnWarps][kBc], int own,
    const Operand* pass, int first_column) {
  constexpr int kSteps = kPassingRows / (16 * kColumnWarps);
#pragma unroll 1  // else too much is read ahead
  for (int share = 0; share < kColumnWarps; ++share) {
    accumulate<Place, kWidth, kAll>(
        sum, read_weights<kRowTiles, kSteps>(tile, units, own, share), pass + share * kSteps * 16 * Place::kRowStride,
        first_column);
  }
}

// Writes a warp's rows, those before `end`, times a factor, from a column on.
template <int kWidth, int kRowTiles, int kFilled>
__device__ __forceinline__ void write_rows(
    Element* array, long long stride, int first_row, int end, const float (&sum)[kRowTiles][kFilled][4], float factor,
    int first_column = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * i + lane / 4 + 8 * h;
      Element* const target = array + row * stride;
      if (row >= end) continue;
#pragma unroll
      for (int n = 0; n < kFilled; ++n) {
        const int x = first_column + n * 8 + lane % 4 * 2;
        const float first = sum[i][n][2 * h] * factor, second = sum[i][n][2 * h + 1] * factor;
        if (x < kWidth) *reinterpret_cast<float2*>(target + x) = make_float2(first, second);
      }
    }
  }
}

// Turns a product of a row and a key into its weight, and the gradient of the weight into that of the product, but for
// the scale of scores. `masked`: the row may not see the key, which then is none of those `seen`.
template <bool masked>
__device__ __forceinline__ void weigh(
    float& s, float& gradient, const AttentionArgs& args, int batch, int head, int row, int key, KeyRange seen,
    float scale, float lse, float delta) {
  s = exp2f(fmaf(s, scale, -lse));
  if (masked) {
    const bool sees_key = key >= seen.begin && key < seen.end;
    s = sees_key ? s : 0.0f;
  }
  gradient = s * (gradient - delta);
  if (masked) gradient = s == 0.0f ? 0.0f : gradient;
}

// A truth that is known when a kernel is built.
template <bool is_true>
struct Constant {
  static constexpr bool value = is_true;
};

// Whether some of the rows [first_row, end_row) do not see some of the keys [first_key, end_key), or are not there.
__device__ __forceinline__ bool is_partial(
    const AttentionArgs& args, int batch, int first_row, int end_row, int first_key, int end_key) {
  return end_row > args.seqlen_q || first_key_of(args, batch, end_row - 1) > first_key ||
         end_key_of(args, batch, first_row) < end_key;
}

// Where a block is among the rows of heads that pass by its keys.
struct Walk {
  int head, first;
  // The next tile, of this head or of the next one.
  __device__ __forceinline__ Walk next(int first_row, int end_row) const {
    return first + kPassingRows < end_row ? Walk{head, first + kPassingRows} : Walk{head + 1, first_row};
  }
};

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; a warp does a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_f32_d256_backward_statistics(const AttentionArgs args) {
  let_next_launch_begin();

  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    float at[4];
  };
  constexpr int kLanes = 32, kRowsAtOnce = kStatisticsThreads / kLanes;
  const int tiles = (args.seqlen_q + kStatisticsRows - 1) / kStatisticsRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int lane = int(threadIdx.x) % kLanes, end_row = min((tile + 1) * kStatisticsRows, args.seqlen_q);
#pragma unroll
  for (int n = 0; n < kStatisticsRows; n += kRowsAtOnce) {
    const int row = tile * kStatisticsRows + n + int(threadIdx.x) / kLanes;
    const bool is_there = row < end_row;
    float sum = 0.0f;
    if (is_there) {
      const float* const o =
          args.o + batch * args.o_stride_batch + head * args.o_stride_head + row * args.o_stride_row;
      const float* const gradient =
          args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + row * args.dout_stride_row;
      for (int x = lane * 4; x < kDv; x += kLanes * 4) {
        const Elements of_o = *reinterpret_cast<const Elements*>(o + x);
        const Elements of_gradient = *reinterpret_cast<const Elements*>(gradient + x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum = fmaf(of_o.at[i], of_gradient.at[i], sum);
        }
      }
    }
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (!is_there) continue;
    if (lane != 0) continue;
    const long long place = (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q + row;
    const float lse = args.lse[place];
    lse_of(args, batch, head)[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
    delta_of(args, batch, head)[row] = sum - (args.dlse != nullptr ? args.dlse[place] : 0.0f);
  }
}

// Splits a row of kWidth numbers, a warp together: its big parts, its small ones, and its unit.
template <int kWidth, int kFilled>
__device__ __forceinline__ void split_row(Operand* parts, const Element* row) {
  constexpr int kPairs = (kFilled + 63) / 64;
  const int lane = threadIdx.x % 32;
  float first[kPairs], second[kPairs], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int x = 64 * i + 2 * lane;
    first[i] = x < kWidth ? row[x] : 0.0f;
    second[i] = x + 1 < kWidth ? row[x + 1] : 0.0f;
    largest = fmaxf(largest, fmaxf(fabsf(first[i]), fabsf(second[i])));
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  const float unit = unit_of(largest), factor = inverse_of(unit);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int x = 64 * i + 2 * lane;
    if (x >= kFilled) break;
    const Parts both = split(first[i] * factor, second[i] * factor);
    *reinterpret_cast<unsigned*>(parts + x) = both.big;
    *reinterpret_cast<unsigned*>(parts + kFilled + x) = both.small;
  }
  if (lane == 0) reinterpret_cast<float*>(parts)[kFilled] = unit;
}

// Splits queries and gradients of outputs; a warp does a row.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d256_backward_query_parts(const AttentionArgs args) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_q + kSplitRows - 1) / kSplitRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int row = tile * kSplitRows + int(threadIdx.x) / 32;
  if (row >= args.seqlen_q) return;
  split_row<kD, kColumns>(
      queries_of(args, batch, head) + 2LL * row * (kColumns + kUnitWords),
      args.q + batch * args.q_stride_batch + head * args.q_stride_head + row * args.q_stride_row);
  split_row<kDv, kColumnsV>(
      outputs_of(args, batch, head) + 2LL * row * (kColumnsV + kUnitWords),
      args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + row * args.dout_stride_row);
}

// Splits keys and values; a warp does a row.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d256_backward_key_parts(const AttentionArgs args) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_k + kSplitRows - 1) / kSplitRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const int row = tile * kSplitRows + int(threadIdx.x) / 32;
  if (row >= args.seqlen_k) return;
  split_row<kD, kColumns>(
      keys_of_head(args, batch, head) + 2LL * row * (kColumns + kUnitWords),
      args.k + batch * args.k_stride_batch + head * args.k_stride_head + row * args.k_stride_row);
  split_row<kDv, kColumnsV>(
      values_of_head(args, batch, head) + 2LL * row * (kColumnsV + kUnitWords),
      args.v + batch * args.v_stride_batch + head * args.v_stride_head + row * args.v_stride_row);
}

// Gradients of keys and values: the block keeps kBc of them, of which warps that have the same ones take columns each, and
// the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d256_backward_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  wait_for_earlier_launches();
  constexpr int kRowTiles = kBc / (kKeyWarps * 16), kOwnRows = kPassingRows / kColumnWarps, kTiles = kOwnRows / 8;
  constexpr int kOwnColumns = 64, kOwnColumnsV = 64;
  const int tiles = (args.seqlen_k + kBc - 1) / kBc, group = args.num_q_heads / args.num_kv_heads;
  const int first_key = int(blockIdx.x) % tiles * kBc, kv_head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const int end_key = min(first_key + kBc, args.seqlen_k), lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int own = warp % kKeyWarps * 16 * kRowTiles;  // the warp's first key here
  // What its scores are of the rows that pass by, and its columns.
  const int share = warp / kKeyWarps, own_row = share * kOwnRows;
  int first_row, end_row;
  find_rows(args, batch, first_key, end_key, first_row, end_row);
  first_row -= first_row % kPassingRows;
  // Tiles of rows of all heads that share the keys, one head behind the other.
  const int of_head = first_row < end_row ? (end_row - first_row + kPassingRows - 1) / kPassingRows : 0;
  const int count = of_head * group;
  Walk current = {kv_head * group, first_row}, copied = current;
  const auto copy_rows = [&](int n) {
    const int head = copied.head, first = copied.first, stage = n % kStages;
    copied = copied.next(first_row, end_row);
    copy_tile<OfKeys, kPassingRows, kColumns, kThreads>(smem.q[stage], queries_of(args, batch, head), first, args.seqlen_q);
    copy_tile<OfValues, kPassingRows, kColumnsV, kThreads>(
        smem.out_gradient[stage], outputs_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads>(smem.lse[stage], lse_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads>(smem.delta[stage], delta_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads, kColumns + kUnitWords>(
        smem.q_unit[stage], query_units_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads, kColumnsV + kUnitWords>(
        smem.out_unit[stage], output_units_of(args, batch, head), first, args.seqlen_q);
  };
  copy_tile<OfKeys, kBc, kColumns, kThreads>(smem.k, keys_of_head(args, batch, kv_head), first_key, end_key);
  copy_tile<OfValues, kBc, kColumnsV, kThreads>(smem.v, values_of_head(args, batch, kv_head), first_key, end_key);
  __pipeline_commit();
  const float scale = args.scale * kLog2e;
  float k_unit[kRowTiles][2], v_unit[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const long long key = min(first_key + own + 8 * i + lane / 4, args.seqlen_k - 1);
    k_unit[i / 2][i % 2] = key_units_of(args, batch, kv_head)[key * (kColumns + kUnitWords)];
    v_unit[i / 2][i % 2] = value_units_of(args, batch, kv_head)[key * (kColumnsV + kUnitWords)];
  }
  float sum_k[kRowTiles][kOwnColumns / 8][4] = {}, sum_v[kRowTiles][kOwnColumnsV / 8][4] = {};
  for (int n = 0; n < count; ++n) {
    __syncthreads();  // no warp needs the last tile
    copy_rows(n);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    const int head = current.head, first = current.first, stage = n % kStages;
    current = current.next(first_row, end_row);
    float s[kRowTiles][kTiles][4], gradient[kRowTiles][kTiles][4];
    multiply<OfKeys, kRowTiles, kTiles, kColumns>(s, smem.k, own, smem.q[stage] + own_row * kStride);
    multiply<OfValues, kRowTiles, kTiles, kColumnsV>(gradient, smem.v, own, smem.out_gradient[stage] + own_row * kStrideV);
    const auto weigh_all = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int column = own_row + t * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(smem.lse[stage] + column);
        const float2 delta = *reinterpret_cast<const float2*>(smem.delta[stage] + column);
        const float2 q_unit = *reinterpret_cast<const float2*>(smem.q_unit[stage] + column);
        const float2 out_unit = *reinterpret_cast<const float2*>(smem.out_unit[stage] + column);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = first + column + e;
          const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int key = first_key + own + 16 * i + lane / 4 + 8 * h;
              float& weight = s[i][t][2 * h + e];
              float& of_score = gradient[i][t][2 * h + e];
              weight *= (e ? q_unit.y : q_unit.x) * k_unit[i][h];
              of_score *= (e ? out_unit.y : out_unit.x) * v_unit[i][h];
              weigh<kMasked>(weight, of_score, args, batch, head, row, key, seen, scale, e ? lse.y : lse.x,
                             e ? delta.y : delta.x);
              // In the units of what they will be multiplied by.
              weight *= e ? out_unit.y : out_unit.x;
              of_score *= e ? q_unit.y : q_unit.x;
            }
          }
        }
      }
    };
    if (is_partial(args, batch, first, first + kPassingRows, first_key, end_key)) {
      weigh_all(Constant<true>{});
    } else {
      weigh_all(Constant<false>{});
    }
    put_weights(smem.weights, smem.weight_units, s, own, own_row);
    put_weights(smem.gradients, smem.gradient_units, gradient, own, own_row);
    __syncthreads();
    accumulate_shares<OfValues, kOwnColumnsV, kColumnsV>(
        sum_v, smem.weights, smem.weight_units, own, smem.out_gradient[stage], share * kOwnColumnsV);
    accumulate_shares<OfKeys, kOwnColumns, kColumns>(
        sum_k, smem.gradients, smem.gradient_units, own, smem.q[stage], share * kOwnColumns);
  }
  __pipeline_wait_prior(0);
  write_rows<kD>(args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row, first_key + own,
                 end_key, sum_k, args.scale, share * kOwnColumns);
  write_rows<kDv>(args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row,
                  first_key + own, end_key, sum_v, 1.0f, share * kOwnColumnsV);
}

// Gradients of query rows: the block keeps kBr of them, of which warps that have the same ones take columns each, and the
// keys that they see pass by.
extern "C" __global__ void __launch_bounds__(kQueryThreads, 1)
    attention_f32_d256_backward_queries(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  QueryStorage& smem = *reinterpret_cast<QueryStorage*>(shared_bytes);
  wait_for_earlier_launches();
  let_next_launch_begin();
  constexpr int kRowTiles = kBr / (kRowWarps * 16), kTiles = kPassingKeys / 8, kOwnColumns = 128;
  const int tiles = (args.seqlen_q + kBr - 1) / kBr;
  const int first_row = int(blockIdx.x) % tiles * kBr, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const int end_row = min(first_row + kBr, args.seqlen_q), lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  // The warp's first row here, and the first column of the gradients that it makes.
  const int own = warp % kRowWarps * 16 * kRowTiles, own_column = warp / kRowWarps * kOwnColumns;
  // What the block's rows see begins with the first's keys and ends with the last's.
  const int begin_keys = first_key_of(args, batch, first_row) / kPassingKeys * kPassingKeys;
  const int end_keys = end_key_of(args, batch, end_row - 1);
  const int count = begin_keys < end_keys ? (end_keys - begin_keys + kPassingKeys - 1) / kPassingKeys : 0;
  const auto copy_keys = [&](int n) {
    const int first = begin_keys + n * kPassingKeys, stage = n % kStages;
    copy_tile<OfKeys, kPassingKeys, kColumns, kQueryThreads>(
        smem.k[stage], keys_of_head(args, batch, kv_head), first, end_keys);
    copy_tile<OfValues, kPassingKeys, kColumnsV, kQueryThreads>(
        smem.v[stage], values_of_head(args, batch, kv_head), first, end_keys);
    copy_numbers<kPassingKeys, kQueryThreads, kColumns + kUnitWords>(
        smem.k_unit[stage], key_units_of(args, batch, kv_head), first, end_keys);
    copy_numbers<kPassingKeys, kQueryThreads, kColumnsV + kUnitWords>(
        smem.v_unit[stage], value_units_of(args, batch, kv_head), first, end_keys);
  };
  copy_tile<OfKeys, kBr, kColumns, kQueryThreads>(smem.q, queries_of(args, batch, head), first_row, end_row);
  copy_tile<OfValues, kBr, kColumnsV, kQueryThreads>(
      smem.out_gradient, outputs_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads>(smem.lse, lse_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads>(smem.delta, delta_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads, kColumns + kUnitWords>(
        smem.q_unit, query_units_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads, kColumnsV + kUnitWords>(
        smem.out_unit, output_units_of(args, batch, head), first_row, end_row);
  __pipeline_commit();
  const float scale = args.scale * kLog2e;
  float sum[kRowTiles][kOwnColumns / 8][4] = {};
  for (int n = 0; n < count; ++n) {
    __syncthreads();  // no warp needs the last tile
    copy_keys(n);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    const int first = begin_keys + n * kPassingKeys, stage = n % kStages;
    float s[kRowTiles][kTiles][4], gradient[kRowTiles][kTiles][4];
    multiply<OfKeys, kRowTiles, kTiles, kColumns>(s, smem.q, own, smem.k[stage]);
    multiply<OfValues, kRowTiles, kTiles, kColumnsV>(gradient, smem.out_gradient, own, smem.v[stage]);
    const auto weigh_all = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int place = own + 16 * i + lane / 4 + 8 * h, row = first_row + place;
          const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
          const float lse = smem.lse[place], delta = smem.delta[place];
          const float q_unit = smem.q_unit[place], out_unit = smem.out_unit[place];
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = first + t * 8 + lane % 4 * 2 + e;
              const float k_unit = smem.k_unit[stage][key - first];
              s[i][t][2 * h + e] *= q_unit * k_unit;
              gradient[i][t][2 * h + e] *= out_unit * smem.v_unit[stage][key - first];
              weigh<kMasked>(s[i][t][2 * h + e], gradient[i][t][2 * h + e], args, batch, head, row, key, seen, scale, lse,
                             delta);
              gradient[i][t][2 * h + e] *= k_unit;
            }
          }
        }
      }
    };
    if (is_partial(args, batch, first_row, first_row + kBr, first, first + kPassingKeys)) {
      weigh_all(Constant<true>{});
    } else {
      weigh_all(Constant<false>{});
    }
    accumulate<OfKeys, kOwnColumns, kColumns>(sum, split_weights(gradient), smem.k[stage], own_column);
  }
  __pipeline_wait_prior(0);
  write_rows<kD>(args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head, args.dq_stride_row, first_row + own,
                 end_row, sum, args.scale, own_column);
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_f32_d256_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long num_q_heads = args->num_q_heads, seqlen_k = args->seqlen_k;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * seqlen_q + 63) / 64 * 64 +
              (batch * num_q_heads * seqlen_q + 63) / 64 * 64 +
              (batch * num_q_heads * seqlen_q * 260 + 63) / 64 * 64 +
              (batch * num_q_heads * seqlen_q * 260 + 63) / 64 * 64 +
              (batch * num_kv_heads * seqlen_k * 260 + 63) / 64 * 64 +
              (batch * num_kv_heads * seqlen_k * 260 + 63) / 64 * 64);
}

// How a launch of a call is made. Once one has `begun` it, the next may begin before that ends, and waits for that
// itself; the first waits for whatever was launched before the call.
static cudaLaunchConfig_t configure(unsigned blocks, unsigned threads, size_t smem_bytes, cudaStream_t stream,
                                    cudaLaunchAttribute& attribute, bool& begun) {
  attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = begun;
  begun = true;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

static int launch_statistics(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kStatisticsRows - 1) / kStatisticsRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d256_backward_statistics, *args);
}

static int launch_query_parts(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kSplitRows - 1) / kSplitRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_backward_query_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d256_backward_query_parts, *args);
}

static int launch_key_parts(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kSplitRows - 1) / kSplitRows * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_backward_key_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d256_backward_key_parts, *args);
}

static int launch_queries(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 197888;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_backward_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d256_backward_queries, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d256_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d256_backward_kernel, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d256_backward(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  if (args->workspace == nullptr || reinterpret_cast<unsigned long long>(args->workspace) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  const long long strides[] = {args->q_stride_batch, args->q_stride_head, args->q_stride_row,
                               args->k_stride_batch, args->k_stride_head, args->k_stride_row,
                               args->v_stride_batch, args->v_stride_head, args->v_stride_row,
                               args->o_stride_batch, args->o_stride_head, args->o_stride_row,
                               args->dout_stride_batch, args->dout_stride_head, args->dout_stride_row,
                               args->dq_stride_batch, args->dq_stride_head, args->dq_stride_row,
                               args->dk_stride_batch, args->dk_stride_head, args->dk_stride_row,
                               args->dv_stride_batch, args->dv_stride_head, args->dv_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->v, args->o, args->dout, args->dq, args->dk, args->dv};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(float)) != 0) return cudaErrorMisalignedAddress;
  }
  bool begun = false;  // by a launch
  if (const int status = launch_statistics(args, stream, begun)) return status;
  if (const int status = launch_query_parts(args, stream, begun)) return status;
  if (const int status = launch_key_parts(args, stream, begun)) return status;
  if (const int status = launch_queries(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
