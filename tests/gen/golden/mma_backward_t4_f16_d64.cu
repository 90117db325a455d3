// attention_f16_d64_backward: gradients of flash attention, f16, head dim 64, tuned without a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family mma-backward:
//   bc = 64                    keys that a block keeps, whose gradients it makes
//   br = 32                    query rows that pass by them
//   key_warps = 4              warps of such a block, which share its keys
//   column_warps = 1           warps with the same keys, which take columns of their gradients each
//   dq_path = launch           who makes queries' gradients: a launch of its own, or blocks of keys by atomic sums
//   rows = 64                  query rows that a block of the other launch keeps
//   keys = 32                  keys that pass by them
//   row_warps = 4              warps of such a block, which share its rows
//   layout = padded            how rows in shared memory avoid bank conflicts
//   stages = 1                 tiles that pass by in shared memory
//   min_blocks = 1             blocks per SM the compiler must leave registers for

#include <cuda_fp16.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements; lse and dlse are contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const __half* q;
  const __half* k;
  const __half* v;
  const __half* o;
  const __half* dout;
  const float* lse;
  const float* dlse;
  __half* dq;
  __half* dk;
  __half* dv;
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
using Element = __half;
constexpr int kD = 64, kDv = 64;  // head dims of keys and of values
constexpr int kVec = 8;  // elements per access of global memory

constexpr int kBc = 64;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 32;  // query rows that pass by them at a time
constexpr int kThreads = 128;
constexpr int kBr = 64;  // query rows that a block of the other launch keeps
constexpr int kPassingKeys = 32;  // keys that pass by them at a time
constexpr int kQueryThreads = 128;
constexpr int kStages = 1;  // tiles that pass by in shared memory
constexpr int kStatisticsRows = 32, kStatisticsThreads = 256;

// Columns in whole steps of products, and elements from one row in shared memory to the next.
constexpr int kColumns = 64, kColumnsV = 64;
constexpr int kStride = 72, kStrideV = 72;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Keys and values, and of the query rows that pass by what is known of them.
struct SharedStorage {
  alignas(16) Element k[kBc * kStride], v[kBc * kStrideV];
  alignas(16) Element q[kStages][kPassingRows * kStride], out_gradient[kStages][kPassingRows * kStrideV];
  alignas(16) float lse[kStages][kPassingRows], delta[kStages][kPassingRows];
};

// Query rows and gradients of outputs, and keys that pass by.
struct QueryStorage {
  alignas(16) Element q[kBr * kStride], out_gradient[kBr * kStrideV];
  alignas(16) Element k[kStages][kPassingKeys * kStride], v[kStages][kPassingKeys * kStrideV];
  alignas(16) float lse[kBr], delta[kBr];
};
static_assert(sizeof(SharedStorage) == 27904, "the size that pruning counted on");

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
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

// D += A B for one warp: A is 16 x 8 by rows, B is 8 x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k8_f16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
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

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __half2 both = __floats2half2_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// Sixteen deep by two products that are eight deep.
__device__ __forceinline__ void multiply_sixteen(float* d, const unsigned* a, const unsigned* b) {
  mma_m16n8k8_f16(d, a, b);
  mma_m16n8k8_f16(d, a + 2, b + 1);
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
  using Access = uint4;
  *reinterpret_cast<Access*>(shared) = inside ? *reinterpret_cast<const Access*>(global) : Access{};
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
    tile[i] = inside ? numbers[first + i] : 0.0f;
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
        multiply_sixteen(s[i][t], a[i], b);
        multiply_sixteen(s[i][t + 1], a[i], b + 2);
      }
    }
  }
}

// Weights as the products left them to the warp: they are left operands.
template <int kRowTiles, int kTiles>
struct WeightsHeld {
  const float (&at)[kRowTiles][kTiles][4];
  __device__ __forceinline__ void read(unsigned (&a)[4], int i, int u) const {
#pragma unroll
    for (int f = 0; f < 4; ++f) a[f] = pack(at[i][u + f / 2][f % 2 * 2], at[i][u + f / 2][f % 2 * 2 + 1]);
  }
};

// Adds to a warp's rows what passes by, times its weights.
template <typename Place, int kRowTiles, int kTiles, int kWidth, typename Weights>
__device__ __forceinline__ void accumulate(
    float (&sum)[kRowTiles][kWidth / 8][4], const Weights& weights, const Element* pass) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < kTiles; u += 2) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) weights.read(a[i], i, u);
#pragma unroll
    for (int n = 0; n < kWidth / 8; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, pass + Place::at(u * 8 + lane % 16, n * 8 + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_sixteen(sum[i][n], a[i], b);
        multiply_sixteen(sum[i][n + 1], a[i], b + 2);
      }
    }
  }
}

// Writes a warp's rows, those before `end`, times a factor.
template <int kWidth, int kRowTiles, int kFilled>
__device__ __forceinline__ void write_rows(
    Element* array, long long stride, int first_row, int end, const float (&sum)[kRowTiles][kFilled][4], float factor) {
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
        const int x = n * 8 + lane % 4 * 2;
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

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; 8 lanes do a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_f16_d64_backward_statistics(const AttentionArgs args) {
  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    __half at[8];
  };
  constexpr int kLanes = 8, kRowsAtOnce = kStatisticsThreads / kLanes;
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
      const __half* const o =
          args.o + batch * args.o_stride_batch + head * args.o_stride_head + row * args.o_stride_row;
      const __half* const gradient =
          args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + row * args.dout_stride_row;
      for (int x = lane * 8; x < kDv; x += kLanes * 8) {
        const Elements of_o = *reinterpret_cast<const Elements*>(o + x);
        const Elements of_gradient = *reinterpret_cast<const Elements*>(gradient + x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum = fmaf(__half2float(of_o.at[i]), __half2float(of_gradient.at[i]), sum);
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

// Gradients of keys and values: the block keeps kBc of them, each warp its own, and the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f16_d64_backward_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  constexpr int kRowTiles = kBc / (kThreads / 2), kTiles = kPassingRows / 8;
  const int tiles = (args.seqlen_k + kBc - 1) / kBc, group = args.num_q_heads / args.num_kv_heads;
  const int first_key = int(blockIdx.x) % tiles * kBc, kv_head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const int end_key = min(first_key + kBc, args.seqlen_k), lane = threadIdx.x % 32;
  const int own = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) * 16 * kRowTiles;  // the warp's first key here
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
  const float scale = args.scale * kLog2e;
  float sum_k[kRowTiles][kColumns / 8][4] = {}, sum_v[kRowTiles][kColumnsV / 8][4] = {};
  for (int n = 0; n < count; ++n) {
    __syncthreads();  // no warp needs the last tile
    copy_rows(n);
    __syncthreads();
    const int head = current.head, first = current.first, stage = n % kStages;
    current = current.next(first_row, end_row);
    float s[kRowTiles][kTiles][4], gradient[kRowTiles][kTiles][4];
    multiply<OfKeys, kRowTiles, kTiles, kColumns>(s, smem.k, own, smem.q[stage]);
    multiply<OfValues, kRowTiles, kTiles, kColumnsV>(gradient, smem.v, own, smem.out_gradient[stage]);
    const auto weigh_all = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int column = t * 8 + lane % 4 * 2;
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
    if (is_partial(args, batch, first, first + kPassingRows, first_key, end_key)) {
      weigh_all(Constant<true>{});
    } else {
      weigh_all(Constant<false>{});
    }
    accumulate<OfValues, kRowTiles, kTiles, kColumnsV>(sum_v, WeightsHeld<kRowTiles, kTiles>{s}, smem.out_gradient[stage]);
    accumulate<OfKeys, kRowTiles, kTiles, kColumns>(sum_k, WeightsHeld<kRowTiles, kTiles>{gradient}, smem.q[stage]);
  }
  write_rows<kD>(args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row, first_key + own,
                 end_key, sum_k, args.scale);
  write_rows<kDv>(args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row,
                  first_key + own, end_key, sum_v, 1.0f);
}

// Gradients of query rows: the block keeps kBr of them, each warp its own, and the keys that they see pass by.
extern "C" __global__ void __launch_bounds__(kQueryThreads, 1)
    attention_f16_d64_backward_queries(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  QueryStorage& smem = *reinterpret_cast<QueryStorage*>(shared_bytes);
  constexpr int kRowTiles = kBr / (kQueryThreads / 2), kTiles = kPassingKeys / 8;
  const int tiles = (args.seqlen_q + kBr - 1) / kBr;
  const int first_row = int(blockIdx.x) % tiles * kBr, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const int end_row = min(first_row + kBr, args.seqlen_q), lane = threadIdx.x % 32;
  const int own = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) * 16 * kRowTiles;  // the warp's first row here
  // What the block's rows see begins with the first's keys and ends with the last's.
  const int begin_keys = first_key_of(args, batch, first_row) / kPassingKeys * kPassingKeys;
  const int end_keys = end_key_of(args, batch, end_row - 1);
  const int count = begin_keys < end_keys ? (end_keys - begin_keys + kPassingKeys - 1) / kPassingKeys : 0;
  const auto copy_keys = [&](int n) {
    const int first = begin_keys + n * kPassingKeys, stage = n % kStages;
    copy_tile<OfKeys, kPassingKeys, kD, kColumns, kQueryThreads>(
        smem.k[stage], keys_of_head(args, batch, kv_head), first, end_keys);
    copy_tile<OfValues, kPassingKeys, kDv, kColumnsV, kQueryThreads>(
        smem.v[stage], values_of_head(args, batch, kv_head), first, end_keys);
  };
  copy_tile<OfKeys, kBr, kD, kColumns, kQueryThreads>(smem.q, queries_of(args, batch, head), first_row, end_row);
  copy_tile<OfValues, kBr, kDv, kColumnsV, kQueryThreads>(
      smem.out_gradient, outputs_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads>(smem.lse, lse_of(args, batch, head), first_row, end_row);
  copy_numbers<kBr, kQueryThreads>(smem.delta, delta_of(args, batch, head), first_row, end_row);
  const float scale = args.scale * kLog2e;
  float sum[kRowTiles][kColumns / 8][4] = {};
  for (int n = 0; n < count; ++n) {
    __syncthreads();  // no warp needs the last tile
    copy_keys(n);
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
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = first + t * 8 + lane % 4 * 2 + e;
              weigh<kMasked>(s[i][t][2 * h + e], gradient[i][t][2 * h + e], args, batch, head, row, key, seen, scale, lse,
                             delta);
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
    accumulate<OfKeys, kRowTiles, kTiles, kColumns>(sum, WeightsHeld<kRowTiles, kTiles>{gradient}, smem.k[stage]);
  }
  write_rows<kD>(args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head, args.dq_stride_row, first_row + own,
                 end_row, sum, args.scale);
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_f16_d64_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * seqlen_q + 63) / 64 * 64 + (batch * num_q_heads * seqlen_q + 63) / 64 * 64);
}

static int launch_statistics(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kStatisticsRows - 1) / kStatisticsRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f16_d64_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f16_d64_backward_statistics, dim3(unsigned(blocks)), dim3(256), parameters,
                          smem_bytes, stream);
}

static int launch_queries(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 28160;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f16_d64_backward_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f16_d64_backward_queries, dim3(unsigned(blocks)), dim3(128), parameters,
                          smem_bytes, stream);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f16_d64_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f16_d64_backward_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f16_d64_backward(const AttentionArgs* args, cudaStream_t stream) {
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
    if (address % (kVec * sizeof(__half)) != 0) return cudaErrorMisalignedAddress;
  }
  if (const int status = launch_statistics(args, stream)) return status;
  if (const int status = launch_queries(args, stream)) return status;
  if (const int status = launch_kernel(args, stream)) return status;
  return cudaSuccess;
}
#endif
