// attention_f32_d64_backward: gradients of flash attention, f32, head dim 64, tuned with a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family simt-backward:
//   br = 32                    query rows per tile
//   bc = 16                    keys per tile
//   threads_per_block = 64     threads per block
//   lanes = 8                  threads side by side along what passes by, then along the head dim
//   vec = 4                    floats per access along the head dim
//   unroll = 2                 unrolled steps of the products
//   min_blocks = 1             blocks per SM the compiler must leave registers for

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 1
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
constexpr int kD = 64, kDv = 64;  // head dims of keys and of values
constexpr int kVec = 4;  // floats per access along the head dim

constexpr int kBr = 32;  // query rows per tile
constexpr int kBc = 16;  // keys per tile
constexpr int kThreads = 64;
constexpr int kLanes = 8;  // threads side by side along what passes by, then along the head dim
constexpr int kHigh = kThreads / kLanes;  // threads above each other, along what the block keeps

// Columns in whole vectors of all threads of a row, and from one row of a tile to the next.
constexpr int kPaddedD = 64, kPaddedDv = 64;
constexpr int kStride = kPaddedD + kVec, kStrideV = kPaddedDv + kVec;
constexpr int kStatisticsRows = 32, kStatisticsThreads = 256;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Tiles, what is known of their rows, and weights or gradients of scores: a row of what passes by for each that stays.
template <int kStay, int kPass>
struct Storage {
  alignas(16) float q[kBr * kStride], out_gradient[kBr * kStrideV];
  alignas(16) float k[kBc * kStride], v[kBc * kStrideV];
  alignas(16) float weights[kPass * (kStay + 4)];
  float lse[kBr], delta[kBr];
};
using SharedStorage = Storage<kBc, kBr>;  // where keys stay
using QueryStorage = Storage<kBr, kBc>;   // where query rows do
static_assert(sizeof(SharedStorage) == 28928, "the size that pruning counted on");

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

// Reads rows [first, first + kRows) of an array into a tile; rows from `end` on, and columns beyond, become zeros.
template <int kRows, int kColumns, int kTileStride>
__device__ __forceinline__ void load_tile(float* tile, const float* array, long long stride, int first, int end) {
  constexpr int kAcross = (kTileStride - kVec) / kVec;
  for (int i = threadIdx.x; i < kRows * kAcross; i += kThreads) {
    const int row = i / kAcross, x = i % kAcross * kVec;
    Vec<kVec> value{};
    if (first + row < end && x < kColumns) value = load<kVec>(array + (first + row) * stride + x);
    store<kVec>(tile + row * kTileStride + x, value);
  }
}

// Reads what is known of rows; one that is not there weighs nothing.
__device__ __forceinline__ void load_statistics(
    float* lse, float* delta, const AttentionArgs& args, int batch, int head, int first) {
  for (int i = threadIdx.x; i < kBr; i += kThreads) {
    const bool is_there = first + i < args.seqlen_q;
    lse[i] = is_there ? lse_of(args, batch, head)[first + i] : kInfinity;
    delta[i] = is_there ? delta_of(args, batch, head)[first + i] : 0.0f;
  }
}

// Which rows of two tiles are a thread's: `stay_of` of the one that the block keeps, adjacent ones in groups, `pass_of` of
// the one that passes by. Lanes interleave, so that neighbours read neighbouring banks of shared memory.
template <int kStay, int kPass, int kGroup>
struct Tiling {
  static constexpr int kOwn = kStay / kHigh, kPassing = kPass / kLanes, kWeightStride = kStay + 4;
  static __device__ __forceinline__ int stay_of(int i) {
    return i / kGroup * (kGroup * kHigh) + i % kGroup + int(threadIdx.x) / kLanes * kGroup;
  }
  static __device__ __forceinline__ int pass_of(int j) { return j * kLanes + int(threadIdx.x) % kLanes; }

  // Products of rows of both tiles, over all columns.
  template <int kColumns, int kTileStride>
  static __device__ __forceinline__ void multiply(float (&s)[kPassing][kOwn], const float* stay, const float* pass) {
#pragma unroll
    for (int j = 0; j < kPassing; ++j) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) s[j][i] = 0.0f;
    }
#pragma unroll 2
    for (int x = 0; x < kColumns; x += kVec) {
      Vec<kVec> own[kOwn], passing[kPassing];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = load<kVec>(stay + stay_of(i) * kTileStride + x);
#pragma unroll
      for (int j = 0; j < kPassing; ++j) passing[j] = load<kVec>(pass + pass_of(j) * kTileStride + x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
#pragma unroll
        for (int j = 0; j < kPassing; ++j) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) s[j][i] = fmaf(own[i].at[e], passing[j].at[e], s[j][i]);
        }
      }
    }
  }

  // Lays a thread's share of what is summed over to where all see it.
  static __device__ __forceinline__ void put(float* weights, const float (&s)[kPassing][kOwn]) {
#pragma unroll
    for (int j = 0; j < kPassing; ++j) {
#pragma unroll
      for (int i = 0; i < kOwn; i += kGroup) {
        Vec<kGroup> group;
#pragma unroll
        for (int e = 0; e < kGroup; ++e) group.at[e] = s[j][i + e];
        store<kGroup>(weights + pass_of(j) * kWeightStride + stay_of(i), group);
      }
    }
  }

  // Adds to the rows that stay what passes by, by its weights.
  template <int kTileStride, int kColumns>
  static __device__ __forceinline__ void accumulate(
      float (&sum)[kOwn][kColumns], const float* weights, const float* pass) {
    const int first = int(threadIdx.x) % kLanes * kVec;
#pragma unroll 2
    for (int b = 0; b < kPass; ++b) {
      float own[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; i += kGroup) {
        const Vec<kGroup> group = load<kGroup>(weights + b * kWeightStride + stay_of(i));
#pragma unroll
        for (int e = 0; e < kGroup; ++e) own[i + e] = group.at[e];
      }
#pragma unroll
      for (int c = 0; c < kColumns; c += kVec) {
        const Vec<kVec> columns = load<kVec>(pass + b * kTileStride + c * kLanes + first);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[i][c + e] = fmaf(own[i], columns.at[e], sum[i][c + e]);
        }
      }
    }
  }

  // Writes the rows that stay, those before `end`, times a factor.
  template <int kWidth, int kColumns>
  static __device__ __forceinline__ void write(
      float* array, long long stride, int first_row, int end, const float (&sum)[kOwn][kColumns], float factor) {
    const int first = int(threadIdx.x) % kLanes * kVec;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first_row + stay_of(i);
#pragma unroll
      for (int c = 0; c < kColumns; c += kVec) {
        Vec<kVec> columns;
#pragma unroll
        for (int e = 0; e < kVec; ++e) columns.at[e] = sum[i][c + e] * factor;
        if (row < end && c * kLanes + first < kWidth) store<kVec>(array + row * stride + c * kLanes + first, columns);
      }
    }
  }
};

using KeysStay = Tiling<kBc, kBr, 2>;
using RowsStay = Tiling<kBr, kBc, 4>;

// Turns a product of a row and a key into its weight, and the gradient of the weight into that of the product, but for
// the scale of scores. `seen` are the keys that the row sees.
__device__ __forceinline__ void weigh(
    float& s, float& gradient, const AttentionArgs& args, int batch, int head, int row, int key, KeyRange seen,
    float lse, float delta) {
  const float score = s * (args.scale * kLog2e);
  const bool sees_key = key >= seen.begin && key < seen.end;
  s = sees_key ? exp2f(score - lse) : 0.0f;
  gradient = s == 0.0f ? 0.0f : s * (gradient - delta);
}

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; 16 lanes do a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_f32_d64_backward_statistics(const AttentionArgs args) {
  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    float at[4];
  };
  constexpr int kLanes = 16, kRowsAtOnce = kStatisticsThreads / kLanes;
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

// Gradients of keys and values: the block keeps kBc of them, and the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d64_backward_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int tiles = (args.seqlen_k + kBc - 1) / kBc, group = args.num_q_heads / args.num_kv_heads;
  const int first_key = int(blockIdx.x) % tiles * kBc, kv_head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const int end_key = min(first_key + kBc, args.seqlen_k);
  load_tile<kBc, kD, kStride>(
      smem.k, args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head, args.k_stride_row, first_key, end_key);
  load_tile<kBc, kDv, kStrideV>(
      smem.v, args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head, args.v_stride_row, first_key, end_key);
  int first_row, end_row;
  find_rows(args, batch, first_key, end_key, first_row, end_row);
  first_row -= first_row % kBr;
  float sum_k[KeysStay::kOwn][kPaddedD / kLanes] = {}, sum_v[KeysStay::kOwn][kPaddedDv / kLanes] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head;
    const float* out_gradient = args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head;
    for (int first = first_row; first < end_row; first += kBr) {
      __syncthreads();  // nobody reads the last tile any more
      load_tile<kBr, kD, kStride>(smem.q, q, args.q_stride_row, first, args.seqlen_q);
      load_tile<kBr, kDv, kStrideV>(smem.out_gradient, out_gradient, args.dout_stride_row, first, args.seqlen_q);
      load_statistics(smem.lse, smem.delta, args, batch, head, first);
      __syncthreads();
      float s[KeysStay::kPassing][KeysStay::kOwn], gradient[KeysStay::kPassing][KeysStay::kOwn];
      KeysStay::multiply<kD, kStride>(s, smem.k, smem.q);
      KeysStay::multiply<kDv, kStrideV>(gradient, smem.v, smem.out_gradient);
#pragma unroll
      for (int j = 0; j < KeysStay::kPassing; ++j) {
        const int row = first + KeysStay::pass_of(j);
        const KeyRange seen = keys_of(args, batch, row);
        const float lse = smem.lse[KeysStay::pass_of(j)], delta = smem.delta[KeysStay::pass_of(j)];
#pragma unroll
        for (int i = 0; i < KeysStay::kOwn; ++i) {
          weigh(s[j][i], gradient[j][i], args, batch, head, row, first_key + KeysStay::stay_of(i), seen, lse, delta);
        }
      }
      KeysStay::put(smem.weights, s);
      __syncthreads();
      KeysStay::accumulate<kStrideV>(sum_v, smem.weights, smem.out_gradient);
      __syncthreads();  // gradients of scores take the place of weights
      KeysStay::put(smem.weights, gradient);
      __syncthreads();
      KeysStay::accumulate<kStride>(sum_k, smem.weights, smem.q);
    }
  }
  KeysStay::write<kD>(args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row, first_key,
                      end_key, sum_k, args.scale);
  KeysStay::write<kDv>(args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row, first_key,
                       end_key, sum_v, 1.0f);
}

// Gradients of query rows: the block keeps kBr of them, and the keys that they see pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d64_backward_queries(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  QueryStorage& smem = *reinterpret_cast<QueryStorage*>(shared_bytes);
  const int tiles = (args.seqlen_q + kBr - 1) / kBr;
  const int first_row = int(blockIdx.x) % tiles * kBr, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const int end_row = min(first_row + kBr, args.seqlen_q);
  load_tile<kBr, kD, kStride>(
      smem.q, args.q + batch * args.q_stride_batch + head * args.q_stride_head, args.q_stride_row, first_row, end_row);
  load_tile<kBr, kDv, kStrideV>(
      smem.out_gradient, args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head, args.dout_stride_row, first_row,
      end_row);
  load_statistics(smem.lse, smem.delta, args, batch, head, first_row);
  const float* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const float* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  // What the block's rows see begins with the first's keys and ends with the last's.
  const int begin_keys = first_key_of(args, batch, first_row), end_keys = end_key_of(args, batch, end_row - 1);
  float sum[RowsStay::kOwn][kPaddedD / kLanes] = {};
  for (int first = begin_keys - begin_keys % kBc; first < end_keys; first += kBc) {
    __syncthreads();  // nobody reads the last tile any more
    load_tile<kBc, kD, kStride>(smem.k, k, args.k_stride_row, first, end_keys);
    load_tile<kBc, kDv, kStrideV>(smem.v, v, args.v_stride_row, first, end_keys);
    __syncthreads();
    float s[RowsStay::kPassing][RowsStay::kOwn], gradient[RowsStay::kPassing][RowsStay::kOwn];
    RowsStay::multiply<kD, kStride>(s, smem.q, smem.k);
    RowsStay::multiply<kDv, kStrideV>(gradient, smem.out_gradient, smem.v);
#pragma unroll
    for (int i = 0; i < RowsStay::kOwn; ++i) {
      const int row = first_row + RowsStay::stay_of(i);
      const KeyRange seen = keys_of(args, batch, row);
      const float lse = smem.lse[RowsStay::stay_of(i)], delta = smem.delta[RowsStay::stay_of(i)];
#pragma unroll
      for (int j = 0; j < RowsStay::kPassing; ++j) {
        weigh(s[j][i], gradient[j][i], args, batch, head, row, first + RowsStay::pass_of(j), seen, lse, delta);
      }
    }
    RowsStay::put(smem.weights, gradient);
    __syncthreads();
    RowsStay::accumulate<kStride>(sum, smem.weights, smem.k);
  }
  RowsStay::write<kD>(args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head, args.dq_stride_row, first_row,
                      end_row, sum, args.scale);
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_f32_d64_backward_workspace_bytes(const AttentionArgs* args) {
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
      cudaFuncSetAttribute(attention_f32_d64_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_d64_backward_statistics, dim3(unsigned(blocks)), dim3(256), parameters,
                          smem_bytes, stream);
}

static int launch_queries(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 28672;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d64_backward_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_d64_backward_queries, dim3(unsigned(blocks)), dim3(64), parameters,
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
      cudaFuncSetAttribute(attention_f32_d64_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_d64_backward_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d64_backward(const AttentionArgs* args, cudaStream_t stream) {
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
  if (const int status = launch_statistics(args, stream)) return status;
  if (const int status = launch_queries(args, stream)) return status;
  if (const int status = launch_kernel(args, stream)) return status;
  return cudaSuccess;
}
#endif
