// attention_f32_d64: flash attention, f32, head dim 64, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family ladder:
//   br = 128                   query rows per tile, and threads per block
//   bc = 16                    keys per tile
//   split_queries = true       a block per query tile, not one walking a head's tiles
//   vec = 4                    floats per access along the head dim
//   hoisted = true             Q load, exponentials and division outside the loops
//   coalesced = true           neighbouring threads load neighbouring elements
//   stats_in_registers = true  running maximum and sum in registers
//   transposed = false         Q and S column by column in shared memory
//   q_in_registers = false     Q and the weights of a tile in registers

// Step 4.2.8 of a ladder from a first fused kernel to a fast one, each step one change on top of the last:
//   4.2.2   fused tiles in shared memory, one block per head
//   4.2.3   a taller query tile, for less K and V traffic
//   4.2.4   query tiles split over blocks
//   4.2.5   vector accesses
//   4.2.6   Q load, exponentials and division out of the loops
//   4.2.7   coalesced loads of Q, K and V
//   4.2.8   running maximum and sum in registers   <- this one
//   4.2.9   Q and S transposed against bank conflicts
//   4.2.10  Q in registers, the key tile doubled
//
// Every thread owns one query row: it computes the row's scores against a tile of keys, their softmax so far, and
// adds the weighted values to the row's output, which stays in global memory. All threads read the same element of
// K or V at a time; shared memory broadcasts it to the whole warp in one access.

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
constexpr int kD = 64;  // head dim

// 16 bytes per access: a quarter of the load instructions, to global as to shared memory, for the same bytes. A
// broadcast of 4 floats of K or V now feeds 4 multiply-adds.
constexpr int kVec = 4;  // floats per access along the head dim

constexpr int kBr = 128;  // query rows per tile, one per thread
constexpr int kBc = 16;  // keys per tile
constexpr int kThreads = kBr;  // every K or V tile that is loaded serves this many rows

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// Banks are 4 bytes wide and there are 32. A warp's threads read one column of Q or S at a time, elements kD or kBc
// floats apart: where that is a multiple of 32 all fall into one bank, and the hardware serves them one after another.
struct SharedStorage {
  alignas(16) float q[kBr][kD];
  alignas(16) float kv[kBc][kD];  // K for the scores, then V: one buffer, so that the rest fits beside it
  alignas(16) float s[kBr][kBc];  // scores, then softmax weights
};
static_assert(sizeof(SharedStorage) == 45056, "the size that pruning counted on");

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

// Copies rows [first, first + kRows) of a tensor into a tile in shared memory; rows from `end` on become zeros.
template <int kRows>
__device__ __forceinline__ void load_tile(float (&tile)[kRows][kD], const float* tensor, long long stride, int first,
                                          int end) {
  constexpr int kChunks = kD / kVec;  // per row
  constexpr int kSteps = (kRows * kChunks + kThreads - 1) / kThreads;
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    // Neighbouring threads take neighbouring chunks: a warp's 512 bytes are 4 whole lines of 128 bytes.
    const int chunk = step * kThreads + int(threadIdx.x);
    const int row = chunk / kChunks, x = chunk % kChunks * kVec;
    const bool present = first + row < end;
    const Vec<kVec> value = present ? load<kVec>(tensor + (first + row) * stride + x) : Vec<kVec>{};
    store<kVec>(&tile[row][x], value);
  }
}

// Attention of rows [first_row, first_row + kBr) of one head.
__device__ __forceinline__ void attend(SharedStorage& smem, const AttentionArgs& args, const float* q, const float* k,
                                       const float* v, float* o, float* lse, int first_row) {
  const int thread = threadIdx.x;
  const int row = first_row + thread;
  const bool exists = row < args.seqlen_q;
  float* const o_row = o + row * args.o_stride_row;

  const int diagonal = args.seqlen_k - args.seqlen_q;  // under a causal mask row i sees keys up to i + diagonal
  const int last_row = min(first_row + kBr, args.seqlen_q) - 1;
  const int end_key = kCausal ? min(args.seqlen_k, last_row + diagonal + 1) : args.seqlen_k;  // of the block
  const int row_keys = exists ? (kCausal ? min(args.seqlen_k, row + diagonal + 1) : args.seqlen_k) : 0;  // of this row
  const float scale_log2 = args.scale * kLog2e;  // scores in units of log2: exp2f is a single instruction

  // Q stays the same for all tiles of keys: load it once.
  load_tile(smem.q, q, args.q_stride_row, first_row, args.seqlen_q);

  // Only this thread uses them: in registers they cost neither loads nor stores.
  float row_max = -kInfinity;  // of all keys so far, in units of log2
  float row_sum = 0.0f;        // of exp2(score - row_max)
  if (exists) {
    for (int x = 0; x < kD; x += kVec) store<kVec>(o_row + x, Vec<kVec>{});
  }

  for (int first_key = 0; first_key < end_key; first_key += kBc) {
    __syncthreads();  // nobody reads the last tile any more
    load_tile(smem.kv, k, args.k_stride_row, first_key, args.seqlen_k);
    __syncthreads();

    // A row that sees any key of the tile sees the first one, so that its maximum is finite from here on.
    const bool sees = first_key < row_keys;
    const float old_max = row_max;
    if (sees) {
#pragma unroll 1
      for (int key = 0; key < kBc; ++key) {
        Vec<kVec> dot{};  // a sum for each lane of the vector
#pragma unroll 4
        for (int x = 0; x < kD; x += kVec) {
          const Vec<kVec> k_part = load<kVec>(&smem.kv[key][x]);
          const Vec<kVec> q_part = load<kVec>(&smem.q[thread][x]);
#pragma unroll
          for (int e = 0; e < kVec; ++e) dot.at[e] = fmaf(q_part.at[e], k_part.at[e], dot.at[e]);
        }
        float score = dot.at[0];
#pragma unroll
        for (int e = 1; e < kVec; ++e) score += dot.at[e];
        score = first_key + key < row_keys ? score * scale_log2 : -kInfinity;
        smem.s[thread][key] = score;
        row_max = fmaxf(row_max, score);
      }
    }

    __syncthreads();  // nobody reads K any more
    load_tile(smem.kv, v, args.v_stride_row, first_key, args.seqlen_k);
    __syncthreads();

    if (sees) {
      // Online softmax: what was summed under the old maximum is rescaled to the new one. A tile is summed by itself
      // first: tens of thousands of weights, added one by one to a growing sum, gather too much rounding.
      float tile_sum = 0.0f;
#pragma unroll 4
      for (int key = 0; key < kBc; ++key) {
        const float weight = exp2f(smem.s[thread][key] - row_max);
        smem.s[thread][key] = weight;
        tile_sum += weight;
      }
      const float rescale = exp2f(old_max - row_max);
      row_sum = fmaf(row_sum, rescale, tile_sum);

#pragma unroll 1
      for (int x = 0; x < kD; x += kVec) {
        Vec<kVec> out = load<kVec>(o_row + x);
        Vec<kVec> added{};
#pragma unroll
        for (int key = 0; key < kBc; ++key) {
          const float weight = smem.s[thread][key];
          const Vec<kVec> v_part = load<kVec>(&smem.kv[key][x]);
#pragma unroll
          for (int e = 0; e < kVec; ++e) added.at[e] = fmaf(weight, v_part.at[e], added.at[e]);
        }
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          out.at[e] = fmaf(out.at[e], rescale, added.at[e]);
        }
        store<kVec>(o_row + x, out);
      }
    }
  }

  // One division per row: until here its output was a plain weighted sum. A row without keys keeps its zeros.
  if (row_keys > 0) {
    const float normalise = 1.0f / row_sum;
    for (int x = 0; x < kD; x += kVec) {
      Vec<kVec> out = load<kVec>(o_row + x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) out.at[e] *= normalise;
      store<kVec>(o_row + x, out);
    }
  }
  // Natural logarithm of the softmax denominator; -inf for a row without keys, as log2(0) is.
  if (exists && lse != nullptr) lse[row] = (row_max + log2f(row_sum)) * kLn2;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_f32_d64_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // A block for each tile of rows: they are independent, and a few heads already fill the card.
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

  float* lse = args.lse == nullptr ? nullptr : args.lse + (1LL * batch * args.num_q_heads + head) * args.seqlen_q;
  attend(smem, args, q, k, v, o, lse, q_tile * kBr);
}

#ifndef __CUDACC_RTC__
// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d64(const AttentionArgs* args, cudaStream_t stream) {
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
      cudaFuncSetAttribute(attention_f32_d64_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_d64_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
