// attention_bf16_d128_backward: gradients of flash attention, bf16, head dim 128, tuned with a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family mma-backward:
//   bc = 128                   keys that a block keeps, whose gradients it makes
//   br = 64                    query rows that pass by them
//   key_warps = 4              warps of such a block, which share its keys
//   column_warps = 2           warps with the same keys, which take columns of their gradients each
//   dq_path = atomics          who makes queries' gradients: a launch of its own, or blocks of keys by atomic sums
//   rows = 64                  query rows that a block of the other launch keeps
//   keys = 64                  keys that pass by them
//   row_warps = 4              warps of such a block, which share its rows
//   layout = padded            how rows in shared memory avoid bank conflicts
//   stages = 2                 tiles that pass by in shared memory
//   min_blocks = 1             blocks per SM the compiler must leave registers for

#include <cuda_bf16.h>

#include <cuda_pipeline.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 1
#endif

// Strides are in elements; lse and dlse are contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  const __nv_bfloat16* o;
  const __nv_bfloat16* dout;
  const float* lse;
  const float* dlse;
  __nv_bfloat16* dq;
  __nv_bfloat16* dk;
  __nv_bfloat16* dv;
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
using Element = __nv_bfloat16;
constexpr int kD = 128, kDv = 128;  // head dims of keys and of values
constexpr int kVec = 8;  // elements per access of global memory

constexpr int kBc = 128;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 64;  // query rows that pass by them at a time
constexpr int kKeyWarps = 4, kColumnWarps = 2;  // warps along keys, and along columns of their gradients
constexpr int kThreads = 32 * kKeyWarps * kColumnWarps;
constexpr int kSumWarps = 2, kSumColumnWarps = 4;  // warps along rows and columns of the queries' gradients
constexpr int kStages = 2;  // tiles that pass by in shared memory
constexpr int kStatisticsRows = 32, kStatisticsThreads = 256;
constexpr int kPostprocessRows = 64, kPostprocessThreads = 128;

// Columns in whole steps of products, and elements from one row in shared memory to the next.
constexpr int kColumns = 128, kColumnsV = 128;
constexpr int kStride = 136, kStrideV = 136;
constexpr int kWeightStride = 72;  // between keys' weights of the rows that pass by

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Keys and values, and of the query rows that pass by what is known of them.
struct SharedStorage {
  alignas(16) Element k[kBc * kStride], v[kBc * kStrideV];
  alignas(16) Element q[kStages][kPassingRows * kStride], out_gradient[kStages][kPassingRows * kStrideV];
  alignas(16) Element weights[kBc * kWeightStride];
  alignas(16) Element gradients[kBc * kWeightStride];  // of scores
  alignas(16) float lse[kStages][kPassingRows], delta[kStages][kPassingRows];
};

static_assert(sizeof(SharedStorage) == 177152, "the size that pruning counted on");

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
__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Adds four numbers to neighbours in global memory, whoever else adds to them; nobody waits for what they were.
__device__ __forceinline__ void add_to_sums(float* sums, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(sums)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
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
// Sums of the gradients of a head's queries, before scores' scale: tiles of 16 rows by 8 columns, as products leave them.
__device__ __forceinline__ long long num_query_sums(const AttentionArgs& args) {
  return (args.seqlen_q + 15) / 16 * (16LL * 128);
}
__device__ __forceinline__ float* query_sums_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  return args.workspace + (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
         (batches * args.num_q_heads * args.seqlen_q + 63) / 64 * 64 +
         (static_cast<long long>(batch) * args.num_q_heads + head) * num_query_sums(args);
}
// Where a tile of them begins for a lane, whose next numbers are neighbours.
__device__ __forceinline__ float* query_sum_at(float* sums, int row_tile, int column_tile) {
  const int lane = threadIdx.x % 32;
  return sums + (row_tile * 16LL + column_tile) * 128 + lane * 4;
}

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// Where elements of tiles lie: of queries and keys, and of values and outputs.
struct OfKeys {
  static constexpr int kRowStride = kStride;
  static __device__ __forceinline__ int at(int row, int x) {
    return row * kRowStride + x;
  }
};
struct OfValues {
  static constexpr int kRowStride = kStrideV;
  static __device__ __forceinline__ int at(int row, int x) {
    return row * kRowStride + x;
  }
};

struct OfWeights {
  static constexpr int kRowStride = kWeightStride;
  static __device__ __forceinline__ int at(int row, int x) {
    return row * kRowStride + x;
  }
};

// The rows of an array of one head.
struct Rows {
  const Element* first;
  long long stride;
};
__device__ __forceinline__ Rows queries_of(const AttentionArgs& args, int batch, int head) {
  return {args.q + batch * args.q_stride_batch + head * args.q_stride_head, args.q_stride_row};
}
__device__ __forceinline__ Rows outputs_of(const AttentionArgs& args, int batch, int head) {
  return {args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head, args.dout_stride_row};
}
__device__ __forceinline__ Rows keys_of_head(const AttentionArgs& args, int batch, int head) {
  return {args.k + batch * args.k_stride_batch + head * args.k_stride_head, args.k_stride_row};
}
__device__ __forceinline__ Rows values_of_head(const AttentionArgs& args, int batch, int head) {
  return {args.v + batch * args.v_stride_batch + head * args.v_stride_head, args.v_stride_row};
}

// One access of a copy: kVec elements, zeros unless `inside`.
__device__ __forceinline__ void copy_vector(Element* shared, const Element* global, bool inside) {
  copy_async<kVec * sizeof(Element)>(shared, global, inside);
}

// Starts copying rows [first, first + kRows) of kWidth columns; rows from `end` on, and columns up to kFilled, become
// zeros.
template <typename Place, int kRows, int kWidth, int kFilled, int kBlock>
__device__ __forceinline__ void copy_tile(Element* tile, Rows rows, int first, int end) {
  constexpr int kAcross = kFilled / kVec, kTogether = kAcross < kBlock ? kAcross : kBlock, kRowStep = kBlock / kTogether;
  constexpr int kPasses = (kAcross + kTogether - 1) / kTogether;  // across a row
  const int own_row = threadIdx.x / kTogether, own_x = threadIdx.x % kTogether;
#pragma unroll 8
  for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep * kPasses; ++i) {
    const int row = own_row + i / kPasses * kRowStep, x = (own_x + i % kPasses * kTogether) * kVec;
    if (kBlock % kTogether != 0 && own_row >= kRowStep) break;
    if (kRows % kRowStep != 0 && row >= kRows) break;
    if (kAcross % kTogether != 0 && x >= kAcross * kVec) continue;
    const bool inside = first + row < end && x < kWidth;
    copy_vector(tile + Place::at(row, x), rows.first + (first + row) * rows.stride + x, inside);
  }
}

// Starts copying one number of each of rows [first, first + kRows), zeros from `end` on.
template <int kRows, int kBlock>
__device__ __forceinline__ void copy_numbers(float* tile, const float* numbers, int first, int end) {
  for (int i = threadIdx.x; i < kRows; i += kBlock) {
    const bool inside = first + i < end;
    copy_async<4>(tile + i, numbers + (inside ? first + i : 0), inside);
  }
}

// Products of a warp's rows, from `own` on, with those that pass by, over all columns.
template <typename Place, int kRowTiles, int kTiles, int kDepth>
__device__ __forceinline__ void multiply(
    float (&s)[kRowTiles][kTiles][4], const Element* stay, int own, const Element* pass) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][t][e] = 0.0f;
    }
  }
#pragma unroll
  for (int x = 0; x < kDepth; x += 16) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(a[i], stay + Place::at(own + 16 * i + lane % 16, x + lane / 16 * 8));
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      unsigned b[4];  // of two tiles of eight
      ldmatrix_x4(b, pass + Place::at(t * 8 + lane / 16 * 8 + lane % 8, x + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(s[i][t], a[i], b);
        mma_m16n8k16_bf16(s[i][t + 1], a[i], b + 2);
      }
    }
  }
}

// Lays a warp's weights, of its keys from `own` on and rows from `own_row` on, to where all warps see them.
template <int kRowTiles, int kTiles>
__device__ __forceinline__ void put_weights(
    Element* weights, const float (&s)[kRowTiles][kTiles][4], int own, int own_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Element* const place = weights + OfWeights::at(own + 16 * i + lane / 4 + 8 * h, own_row + t * 8 + lane % 4 * 2);
        *reinterpret_cast<unsigned*>(place) = pack(s[i][t][2 * h], s[i][t][2 * h + 1]);
      }
    }
  }
}

// Weights of keys from `own` on where warps have laid them.
struct WeightsThere {
  const Element* weights;
  int own;
  __device__ __forceinline__ void read(unsigned (&a)[4], int i, int u) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, weights + OfWeights::at(own + 16 * i + lane % 16, u * 8 + lane / 16 * 8));
  }
};

// Adds to a warp's rows what passes by, times its weights, in columns from one on.
template <typename Place, int kRowTiles, int kTiles, int kWidth, typename Weights>
__device__ __forceinline__ void accumulate(
    float (&sum)[kRowTiles][kWidth / 8][4], const Weights& weights, const Element* pass, int first_column = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < kTiles; u += 2) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) weights.read(a[i], i, u);
#pragma unroll
    for (int n = 0; n < kWidth / 8; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, pass + Place::at(u * 8 + lane % 16, first_column + n * 8 + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(sum[i][n], a[i], b);
        mma_m16n8k16_bf16(sum[i][n + 1], a[i], b + 2);
      }
    }
  }
}

// Adds what the block's keys make of the gradients of the query rows from `first` on, of which there are none from `end`
// on, to the sums of all blocks: each warp some tiles of it.
__device__ __forceinline__ void add_queries(
    float* sums, const Element* gradients, const Element* keys, int warp, int first, int end) {
  constexpr int kRowTiles = kPassingRows / (16 * kSumWarps);
  constexpr int kSteps = (kColumns / 16 + kSumColumnWarps - 1) / kSumColumnWarps;
  const int lane = threadIdx.x % 32, own_row = warp % kSumWarps * 16 * kRowTiles, own_step = warp / kSumWarps * kSteps;
  float sum[kRowTiles][2 * kSteps][4] = {};
#pragma unroll
  for (int key = 0; key < kBc; key += 16) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ldmatrix_x4_trans(
          a[i], gradients + OfWeights::at(key + lane / 16 * 8 + lane % 8, own_row + 16 * i + lane / 8 % 2 * 8));
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, keys + OfKeys::at(key + lane % 16, (own_step + n) * 16 + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_bf16(sum[i][2 * n], a[i], b);
        mma_m16n8k16_bf16(sum[i][2 * n + 1], a[i], b + 2);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const int row = first + own_row + 16 * i;
    if (row >= end) break;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      float* const place = query_sum_at(sums, row / 16, 2 * own_step + n);
      add_to_sums(place, sum[i][n]);
    }
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
        if (x < kWidth) *reinterpret_cast<unsigned*>(target + x) = pack(first, second);
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

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; 16 lanes do a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_bf16_d128_backward_statistics(const AttentionArgs args) {
  let_next_launch_begin();

  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    __nv_bfloat16 at[8];
  };
  constexpr int kLanes = 16, kRowsAtOnce = kStatisticsThreads / kLanes;
  const int tiles = (args.seqlen_q + kStatisticsRows - 1) / kStatisticsRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  // Sums begin at nothing, of the last block's rows also those that fill up a tile.
  constexpr int kBlockSums = kStatisticsRows * 128;
  float* const sums = query_sums_of(args, batch, head);
  const long long end_sum = tile + 1 < tiles ? (tile + 1LL) * kBlockSums : num_query_sums(args);
  for (long long i = 1LL * tile * kBlockSums + threadIdx.x * 4; i < end_sum; i += kStatisticsThreads * 4) {
    *reinterpret_cast<float4*>(sums + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int lane = int(threadIdx.x) % kLanes, end_row = min((tile + 1) * kStatisticsRows, args.seqlen_q);
#pragma unroll
  for (int n = 0; n < kStatisticsRows; n += kRowsAtOnce) {
    const int row = tile * kStatisticsRows + n + int(threadIdx.x) / kLanes;
    const bool is_there = row < end_row;
    float sum = 0.0f;
    if (is_there) {
      const __nv_bfloat16* const o =
          args.o + batch * args.o_stride_batch + head * args.o_stride_head + row * args.o_stride_row;
      const __nv_bfloat16* const gradient =
          args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + row * args.dout_stride_row;
      for (int x = lane * 8; x < kDv; x += kLanes * 8) {
        const Elements of_o = *reinterpret_cast<const Elements*>(o + x);
        const Elements of_gradient = *reinterpret_cast<const Elements*>(gradient + x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum = fmaf(__bfloat162float(of_o.at[i]), __bfloat162float(of_gradient.at[i]), sum);
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

// Gradients of keys and values: the block keeps kBc of them, of which warps that have the same ones take columns each, and
// the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d128_backward_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  wait_for_earlier_launches();
  let_next_launch_begin();
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
    copy_tile<OfKeys, kPassingRows, kD, kColumns, kThreads>(smem.q[stage], queries_of(args, batch, head), first, args.seqlen_q);
    copy_tile<OfValues, kPassingRows, kDv, kColumnsV, kThreads>(
        smem.out_gradient[stage], outputs_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads>(smem.lse[stage], lse_of(args, batch, head), first, args.seqlen_q);
    copy_numbers<kPassingRows, kThreads>(smem.delta[stage], delta_of(args, batch, head), first, args.seqlen_q);
  };
  copy_tile<OfKeys, kBc, kD, kColumns, kThreads>(smem.k, keys_of_head(args, batch, kv_head), first_key, end_key);
  copy_tile<OfValues, kBc, kDv, kColumnsV, kThreads>(smem.v, values_of_head(args, batch, kv_head), first_key, end_key);
  if (count > 0) copy_rows(0);
  __pipeline_commit();
  const float scale = args.scale * kLog2e;
  float sum_k[kRowTiles][kOwnColumns / 8][4] = {}, sum_v[kRowTiles][kOwnColumnsV / 8][4] = {};
  for (int n = 0; n < count; ++n) {
    __pipeline_wait_prior(0);
    __syncthreads();  // this tile is there, and no warp needs the one before it
    if (n + 1 < count) copy_rows(n + 1);
    __pipeline_commit();
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
              weigh<kMasked>(weight, of_score, args, batch, head, row, key, seen, scale, e ? lse.y : lse.x,
                             e ? delta.y : delta.x);
            }
          }
        }
      }
    };
    if (is_partial(args, batch, first, first + kPassingRows, first_key, first_key + kBc)) {
      weigh_all(Constant<true>{});
    } else {
      weigh_all(Constant<false>{});
    }
    put_weights(smem.weights, s, own, own_row);
    put_weights(smem.gradients, gradient, own, own_row);
    __syncthreads();
    accumulate<OfValues, kRowTiles, kPassingRows / 8, kOwnColumnsV>(
        sum_v, WeightsThere{smem.weights, own}, smem.out_gradient[stage], share * kOwnColumnsV);
    accumulate<OfKeys, kRowTiles, kPassingRows / 8, kOwnColumns>(
        sum_k, WeightsThere{smem.gradients, own}, smem.q[stage], share * kOwnColumns);
    add_queries(query_sums_of(args, batch, head), smem.gradients, smem.k, warp, first, args.seqlen_q);
  }
  __pipeline_wait_prior(0);
  write_rows<kD>(args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row, first_key + own,
                 end_key, sum_k, args.scale, share * kOwnColumns);
  write_rows<kDv>(args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row,
                  first_key + own, end_key, sum_v, 1.0f, share * kOwnColumnsV);
}

// Gradients of query rows: what all blocks have added up, times scores' scale; a warp writes 16 rows.
extern "C" __global__ void __launch_bounds__(kPostprocessThreads)
    attention_bf16_d128_backward_postprocess(const AttentionArgs args) {
  wait_for_earlier_launches();
  const int tiles = (args.seqlen_q + kPostprocessRows - 1) / kPostprocessRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int row_tile = tile * (kPostprocessRows / 16) + int(threadIdx.x) / 32;
  if (16 * row_tile >= args.seqlen_q) return;
  float* const sums = query_sums_of(args, batch, head);
  float sum[1][kColumns / 8][4];
#pragma unroll
  for (int x = 0; x < kColumns / 8; ++x) {
    const float* const place = query_sum_at(sums, row_tile, x);
    const float4 of_lane = *reinterpret_cast<const float4*>(place);
    sum[0][x][0] = of_lane.x, sum[0][x][1] = of_lane.y, sum[0][x][2] = of_lane.z, sum[0][x][3] = of_lane.w;
  }
  write_rows<kD>(args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head, args.dq_stride_row, 16 * row_tile,
                 args.seqlen_q, sum, args.scale);
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_bf16_d128_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * seqlen_q + 63) / 64 * 64 +
              (batch * num_q_heads * seqlen_q + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64);
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
      cudaFuncSetAttribute(attention_bf16_d128_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d128_backward_statistics, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d128_backward_kernel, *args);
}

static int launch_postprocess(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kPostprocessRows - 1) / kPostprocessRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_backward_postprocess, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d128_backward_postprocess, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_bf16_d128_backward(const AttentionArgs* args, cudaStream_t stream) {
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
    if (address % (kVec * sizeof(__nv_bfloat16)) != 0) return cudaErrorMisalignedAddress;
  }
  bool begun = false;  // by a launch
  if (const int status = launch_statistics(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  if (const int status = launch_postprocess(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
