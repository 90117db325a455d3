// attention_f32_d32: flash attention, f32, head dim 32, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family wgmma:
//   br = 256                   query rows per tile, 64 for each warpgroup that computes
//   bc = 48                    keys per tile
//   persistent = false         blocks stay for several tiles
//   q_stages = 1               Q tiles in shared memory: 2 bring the next one early
//   k_stages = 2               K tiles in shared memory
//   v_stages = 2               V tiles in shared memory
//   schedule = chained         the next scores: before these outputs, or behind them
//   q_in_registers = false     keep Q in registers, which relieves shared memory
//   order_of_groups = products what warpgroups do in turns: nothing, products, exponentials
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   section = 1                heads whose tiles start together by length, 0 all of them
//   min_blocks = 1             blocks per SM
//   split = in_front           who splits float32: the blocks that read it, or launches in front of them
//
// Measured on NVIDIA H200, batch 4, 1 heads, 32768 rows, without a mask: 3.19 ms (median), spread 1.8 %,
// 172.3 TFLOP/s, 96 registers per thread, occupancy 31 %. Largest error per head against float64: 3.6e-07.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c f32_d32_h1_n32768.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit f32_d32_h1_n32768.cu \
//         --device h200 --d 32 --heads 1 --seqlen 32768 --family wgmma --set br=256 --set bc=48 \
//         --set persistent=false --set q_stages=1 --set k_stages=2 --set v_stages=2 --set schedule=chained \
//         --set q_in_registers=false --set order_of_groups=products --set rescale=lazy --set poly_exp=0 \
//         --set section=1 --set min_blocks=1 --set split=in_front

#include <cuda_fp16.h>

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
  float* workspace;  // for what launches leave each other
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 168, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
constexpr bool kRowsMayBeEmpty = kCausal;  // though there are keys
constexpr bool kLaterRowsSeeMore = kCausal;

using Element = float;
using Barrier = unsigned long long;
constexpr int kD = 32;  // head dim of queries and keys
constexpr int kDv = 32;  // head dim of values and outputs
constexpr int kVec = 4;  // elements that strides must be multiples of, as four are read at once

constexpr int kBr = 256;  // query rows per tile: 64 for each consumer
constexpr int kBc = 48;  // keys per tile
constexpr int kConsumers = 4;  // warpgroups that compute, beside the producer
constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kThreads = 640;
constexpr int kKStages = 2, kVStages = 2;  // tiles of K and of V in shared memory
constexpr int kQStages = 1;  // Q tiles in shared memory

// A tile in shared memory is made of chunks of 64 columns in two parts, large ones and small ones, whose rows of 128
// bytes are swizzled. So it lies in memory as well, where launches in front leave it.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk;
constexpr int kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16;  // steps of 16 along the head dim in q k^T
constexpr int kKeySteps = kBc / 16;  // steps of 16 along the keys in p v
constexpr int kValueTiles = kDv / 8;  // columns of eight in a thread's outputs

// Named barriers of the block, by consumer.
constexpr int kConsumerBarrier = 1;  // its own
constexpr int kOrderBarrier = 1 + kConsumers;  // tells it that the one before it has done

// At the barriers of K and V one lane arrives for its warp. compute-sanitizer's racecheck takes an arrival for the
// arriving lane's alone, whatever __syncwarp came before: for it all arrive.
#ifdef FLASHGEN_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

constexpr int kTileRows = 64, kSplitThreads = 128;  // of a block that splits
// Words of 32 bits from one tile in memory to the next: 32 behind its chunks, the first of which is its unit.
constexpr int kQueryWords = kTileRows * kDChunks * kChunk + 32;
constexpr int kKeyWords = kBc * kDChunks * kChunk + 32, kValueWords = kBc * kDvChunks * kChunk + 32;
// What comes of it to shared memory: two parts are as many bytes as one float32.
constexpr unsigned kUnitBytes = 4 * sizeof(float);
constexpr unsigned kQBytes = kTileRows * kDChunks * kChunk * sizeof(Element) + kUnitBytes;  // of one consumer
constexpr unsigned kKBytes = kBc * kDChunks * kChunk * sizeof(Element) + kUnitBytes;
constexpr unsigned kVBytes = kBc * kDvChunks * kChunk * sizeof(Element) + kUnitBytes;

// float32 is brought into the range of f16 by powers of two, its units: each tile of Q, K and V has its own, in which its
// largest element is between 2^12 and 2^13.
constexpr int kTopExponent = 12;
constexpr float kLeastUnit = 9.62964972193618e-35f;  // 2^-113, that of zeros, so that products of units are normal
// Weights are kept 2^13 times as large, so that their small parts are not too small for f16.
constexpr float kWeightExponent = 13.0f, kWeightUnit = 0.0001220703125f;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using QChunk = __half[2][kTileRows * kChunk];  // of the 64 rows of one consumer, large parts and small ones
using KChunk = __half[2][kBc * kChunk];
using VChunk = KChunk;

struct SharedStorage {
  alignas(1024) QChunk q[kQStages][kConsumers][kDChunks];  // by consumer
  alignas(1024) KChunk k[kKStages][kDChunks];
  alignas(1024) VChunk v[kVStages][kDvChunks];
  alignas(16) float q_unit[kQStages][kConsumers][4], k_unit[kKStages][4], v_unit[kVStages][4];
  // A stage is full once its bytes have arrived, and empty once every consumer has done with it.
  Barrier q_full[kQStages][kConsumers], q_empty[kQStages];
  Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
static_assert(sizeof(SharedStorage) == 115712, "the size that pruning counted on");

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

// Brings bytes that lie side by side to shared memory; counts them towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
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
__device__ __forceinline__ void wgmma_m64n48k16_f16_ss(
    float (&d)[24], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %26, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23}, "
      "%24, %25, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n32k16_f16_rs_trans(
    float (&d)[16], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

#endif

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

__device__ __forceinline__ float largest_of(float4 x) {
  return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

// Where a head's tiles in parts begin.
__device__ __forceinline__ float* queries_of(const AttentionArgs& args, int batch, int head) {
  const long long tiles = (args.seqlen_q + kTileRows - 1) / kTileRows;
  float* const parts = args.workspace;
  return parts + (static_cast<long long>(batch) * args.num_q_heads + head) * tiles * kQueryWords;
}
__device__ __forceinline__ float* keys_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch, tiles = (args.seqlen_k + kBc - 1) / kBc;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 4128 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * tiles * kKeyWords;
}
__device__ __forceinline__ float* values_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch, tiles = (args.seqlen_k + kBc - 1) / kBc;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 4128 + 63) / 64 * 64 +
                       (batches * args.num_kv_heads * ((args.seqlen_k + 47) / 48) * 3104 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * tiles * kValueWords;
}

// What wgmma reads from `start` on: rows of 128 bytes, swizzled, groups of eight rows one after the other; chunks of 64
// columns `chunk_bytes` apart where the columns are what is multiplied in parallel.
__device__ __forceinline__ unsigned long long descriptor(const void* start, unsigned chunk_bytes = 16) {
  constexpr unsigned long long kSwizzle128 = 1ULL << 62, kGroupOfRows = 1024ULL >> 4 << 32;
  return kSwizzle128 | kGroupOfRows | static_cast<unsigned long long>(chunk_bytes >> 4) << 16 |
         (shared_address(start) & 0x3ffff) >> 4;
}

// The descriptor of a step of 32 bytes along the columns of a tile's chunks, and of one of sixteen keys along its rows.
template <typename Chunk>
__device__ __forceinline__ unsigned long long step_of_columns(unsigned long long tile, int step) {
  return tile + ((step / 4 * int(sizeof(Chunk)) + step % 4 * 32) >> 4);
}
__device__ __forceinline__ unsigned long long step_of_keys(unsigned long long tile, int step) {
  return tile + (step * 16 * 128 >> 4);
}

// Where a pipeline of `stages` buffers stands: the buffer, and the parity of the phase that fills it.
template <int stages>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The work of one block at a time: kBr query rows of one head, and the keys that they see.
struct Tile {
  int first_row, head, batch;
  int last_tile;  // of keys: some row sees those of [first_tile, last_tile)
  static constexpr int first_tile = 0;

  __device__ __forceinline__ Tile(const AttentionArgs& args, int q_tile, int head, int batch)
      : head(head), batch(batch) {
    first_row = q_tile * kBr;
    int end_key = args.seqlen_k;
    if (kCausal) end_key = max(0, min(end_key, first_row + kBr + args.seqlen_k - args.seqlen_q));
    last_tile = (end_key + kBc - 1) / kBc;
  }
};

// The one tile of a block.
template <typename Work>
__device__ __forceinline__ void for_each_tile(const AttentionArgs& args, const Work& work) {
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr, index = blockIdx.x;
  const int heads = args.num_q_heads;
  const int nth = index % q_tiles, head_index = index / q_tiles;
  work(Tile(args, kLaterRowsSeeMore ? q_tiles - 1 - nth : nth, head_index % heads, head_index / heads));
}

// Hides the keys of a tile that a row does not see.
template <int n>
__device__ __forceinline__ void mask(float (&s)[n], int row, int first_key, int seqlen_q, int seqlen_k) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int end = seqlen_k;
    if (kCausal) end = min(end, row + e / 2 * 8 + seqlen_k - seqlen_q + 1);
    end -= first_key + threadIdx.x % 4 * 2 + e % 2;
#pragma unroll
    for (int t = 0; t < n / 4; ++t) {
      if (t * 8 >= end) s[4 * t + e] = -kInfinity;
    }
  }
}

// The softmax of a thread's two rows, g = lane / 4 and g + 8 of its warp's sixteen: element i of its scores or outputs
// belongs to row i / 2 % 2 and column 8 (i / 4) + 2 (lane % 4) + i % 2.
struct SoftmaxState {
  float max[2];  // running maxima of scale * score, in powers of two, and
  float sum[2];  // this thread's share of the sums of weights
};

// Raises the running maximum of each row to the tile's. What was summed so far must be multiplied by `rescale`,
// where true is returned.
template <int n>
__device__ __forceinline__ bool raise_maximum(
    const float (&s)[n], SoftmaxState& softmax, float (&rescale)[2], const float (&scale)[2]) {
  // A maximum that is out of date by a factor of 2^2.875 harms neither range nor precision. As integers, positive
  // floats compare as they are; zero bounds the others.
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int bound = 0;
#pragma unroll
    for (int t = 0; t < n / 4; ++t) {
      bound = __vimax3_s32(bound, __float_as_int(s[4 * t + 2 * h]), __float_as_int(s[4 * t + 2 * h + 1]));
    }
    grown |= fmaf(__int_as_float(bound), scale[h], -softmax.max[h]) > 2.875f;
  }
  if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float tile_max = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int t = 1; t < n / 4; ++t) tile_max = fmaxf(tile_max, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
    const float row_max = fmaxf(softmax.max[h], tile_max * scale[h]);
    // A row that has seen no key yet keeps its maximum of -infinity, against which nothing can be measured.
    const float base = kRowsMayBeEmpty && row_max == -kInfinity ? 0.0f : row_max;
    rescale[h] = exp2f(softmax.max[h] - base);
    softmax.max[h] = row_max;
    softmax.sum[h] *= rescale[h];
  }
  return true;
}

// Turns the scores of a tile into weights, 2^(score - maximum), and adds them to the rows' sums.
template <int n>
__device__ __forceinline__ void weigh(float (&s)[n], SoftmaxState& softmax, const float (&scale)[2]) {
  float base[2], sum[2][2] = {};  // of even and of odd columns: short chains of additions
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    base[h] = (kRowsMayBeEmpty && softmax.max[h] == -kInfinity ? 0.0f : softmax.max[h]) - kWeightExponent;
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float exponent = fmaf(s[i], scale[i / 2 % 2], -base[i / 2 % 2]);
    s[i] = exp2f(exponent);
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) softmax.sum[h] += sum[h][0] + sum[h][1];
}

// The largest units of K and V so far.
struct LargestUnits {
  float of_keys = 0.0f, of_values = 0.0f;
};

// What scores of a tile of keys are multiplied by, which are in its unit. Where that is next to none, what is left of the
// scale is small, since 0 * infinity is not a number.
__device__ __forceinline__ void scale_of_tile(
    float (&tile_scale)[2], const float (&scale)[2], float unit, LargestUnits& largest) {
  tile_scale[0] = fmaxf(scale[0] * unit, 1e-37f);
  tile_scale[1] = fmaxf(scale[1] * unit, 1e-37f);
  largest.of_keys = fmaxf(largest.of_keys, unit);
  __syncwarp();  // one lane tells for all that the unit is read
}

// Weights as operands of sixteen keys each, in two parts: two neighbouring tiles of eight, as a thread has them.
struct Weights {
  unsigned big[kKeySteps][4], small[kKeySteps][4];
};

__device__ __forceinline__ void split_weights(const float (&s)[kBc / 2], Weights& p) {
#pragma unroll
  for (int i = 0; i < kBc / 4; ++i) {
    const Parts parts = split(s[2 * i], s[2 * i + 1]);
    p.big[i / 4][i % 4] = parts.big;
    p.small[i / 4][i % 4] = parts.small;
  }
}

__device__ __forceinline__ void accumulate(float (&o)[kDv / 2], const float (&tile_o)[kDv / 2], float unit) {
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] = fmaf(tile_o[i], unit, o[i]);
}

__device__ __forceinline__ void rescale_output(float (&o)[kDv / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// Starts s = q k^T for a consumer's rows and one tile of keys, not scaled.
__device__ __forceinline__ void start_qk(
    float (&s)[kBc / 2], unsigned long long q, unsigned long long k) {
  wgmma_fence();
  // The small terms first: what the large ones leave no room for is cut off.
  constexpr int kSmallQ = sizeof(QChunk) / 2 >> 4, kSmallK = sizeof(KChunk) / 2 >> 4;
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    const unsigned long long q_step = step_of_columns<QChunk>(q, step), k_step = step_of_columns<KChunk>(k, step);
    wgmma_m64n48k16_f16_ss(s, q_step + kSmallQ, k_step, step > 0);
    wgmma_m64n48k16_f16_ss(s, q_step, k_step + kSmallK, true);
  }
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    wgmma_m64n48k16_f16_ss(s, step_of_columns<QChunk>(q, step), step_of_columns<KChunk>(k, step), true);
  }
  wgmma_commit();
}

// Starts tile_o = p v for a consumer's rows and one tile of keys, apart from o: the tensor cores cut off what a sum
// cannot hold, and the sum over all keys would feel it.
__device__ __forceinline__ void start_pv(float (&tile_o)[32 / 2], const Weights& p, unsigned long long v) {
  constexpr int kSmallV = sizeof(VChunk) / 2 >> 4;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const unsigned long long v_step = step_of_keys(v, step);
    wgmma_m64n32k16_f16_rs_trans(tile_o, p.small[step], v_step, step > 0);
    wgmma_m64n32k16_f16_rs_trans(tile_o, p.big[step], v_step + kSmallV, true);
  }
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    wgmma_m64n32k16_f16_rs_trans(tile_o, p.big[step], step_of_keys(v, step), true);
  }
  wgmma_commit();
}

// An ordered barrier: consumers compute products one after the other, so that one's softmax runs beside
// another's products.
__device__ __forceinline__ void order_wait(int consumer) {
  named_barrier_sync(kOrderBarrier + consumer, 2 * kWarpgroup);
}
__device__ __forceinline__ void order_arrive(int consumer) {
  named_barrier_arrive(kOrderBarrier + (consumer + 1) % kConsumers, 2 * kWarpgroup);
}

// Where the log-sum-exps of a tile's head start.
__device__ __forceinline__ long long lse_index(const AttentionArgs& args, const Tile& tile) {
  return (1LL * tile.batch * args.num_q_heads + tile.head) * args.seqlen_q;
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
    for (int x = 0; x < kD; ++x) score += double(q[x]) * double(key[x]);
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
        if (x < kDv) o[c] += factor * double(value[x]);
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

// Computes rows of a warp again, from `first_row` on: row 8 i + g where bit i of `untrusted` is set in one of the four
// lanes from 4 g on that share it. `write` takes a row, counted from the first, a column and its output.
template <int kRows, typename Write>
__device__ __forceinline__ void recompute_rows(
    const AttentionArgs& args, int batch, int head, int first_row, unsigned untrusted,
    const Write& write) {
  if (!__any_sync(0xffffffffu, untrusted != 0)) return;
  __syncwarp();
  first_row = __shfl_sync(0xffffffffu, first_row, 0);
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const unsigned of_lanes = __ballot_sync(0xffffffffu, untrusted >> i / 8 & 1);
    if (!(of_lanes >> i % 8 * 4 & 15)) continue;
    recompute_row(args, batch, head, first_row + i, [&](int x, float value) { write(i, x, value); });
  }
}

// The rows of outputs of a tile's head.
__device__ __forceinline__ float* output_rows(const AttentionArgs& args, const Tile& tile) {
  return args.o + tile.batch * args.o_stride_batch + tile.head * args.o_stride_head;
}

// Whether parts of f16 lose no more of a row than float32 may. They are multiples of 2^-24 of their units, so that they
// lose up to 2^-25, of elements that are small beside the largest of their tensor. What that does to scores must be
// below 2^-21, or below the rounding of float32 in the row's largest; what it does to outputs, with the weights that
// are too small for parts (of 4096 keys, were all of them just so small), below 2^-19 of these. `score_unit` is that of
// products of Q and K, `magnitude` the sum of |o| over a lane's columns before its division by `row_sum`.
__device__ __forceinline__ bool within_range(
    float score_unit, float row_max, float value_unit, float magnitude, float row_sum, int num_keys) {
  const bool scores_keep = score_unit * (kD * 1024.0f) <= fmaxf(1.0f, 0.25f * fabsf(row_max));
  const float least = value_unit * (kDv / 256.0f) * (min(num_keys, 4096) + row_sum);
  const bool outputs_keep = magnitude >= least && magnitude < kInfinity;
  return scores_keep && (outputs_keep || (magnitude == 0.0f && value_unit == kLeastUnit));
}

// Of a thread's columns of a row.
__device__ __forceinline__ float sum_of_magnitudes(const float (&o)[kDv / 2], int h) {
  float sums[2] = {};  // of even and of odd columns: short chains of additions
#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) {
    sums[0] += fabsf(o[4 * n + 2 * h]);
    sums[1] += fabsf(o[4 * n + 2 * h + 1]);
  }
  return sums[0] + sums[1];
}

// Divides by the sums and writes a thread's shares of its two rows, but for what is to be computed again.
__device__ __forceinline__ void write_output(
    float* o_rows, long long stride, const float (&o)[kDv / 2], const float (&inverse)[2], unsigned untrusted, int row,
    int seqlen_q) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= seqlen_q || untrusted >> h & 1) continue;
    float* target = o_rows + (row + 8 * h) * stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const float first = o[4 * n + 2 * h] * inverse[h], second = o[4 * n + 2 * h + 1] * inverse[h];
      *reinterpret_cast<float2*>(target + 8 * n) = make_float2(first, second);
    }
  }
}

// Where the tiles of the head of keys are that a tile of rows sees.
struct KeySource {
  const float *keys, *values;

  __device__ __forceinline__ KeySource(const AttentionArgs& args, const Tile& tile) {
    const int kv_head = tile.head / (args.num_q_heads / args.num_kv_heads);
    keys = keys_of_head(args, tile.batch, kv_head);
    values = values_of_head(args, tile.batch, kv_head);
  }
};

// Starts to bring a tile in parts, and its unit, counting their bytes towards `full`.
template <int kRows, int kChunks>
__device__ __forceinline__ void load_tile(
    __half (*chunks)[2][kRows * kChunk], float (&unit)[4], const float* source, Barrier* full) {
  constexpr int kWords = kRows * kChunks * kChunk;
  bulk_load(chunks, source, kWords * sizeof(float), full);
  bulk_load(unit, source + kWords, kUnitBytes, full);
}

// Of 64 rows of Q. Consumers that have none take others'.
__device__ __forceinline__ void load_queries(
    const AttentionArgs& args, QChunk* q, float (&unit)[4], Barrier* full, const Tile& tile, int first_row) {
  const long long nth = min(first_row, args.seqlen_q - 1) / kTileRows;
  load_tile<kTileRows, kDChunks>(q, unit, queries_of(args, tile.batch, tile.head) + nth * kQueryWords, full);
}
__device__ __forceinline__ void load_keys(
    KChunk* k, float (&unit)[4], Barrier* full, int nth, const KeySource& source) {
  load_tile<kBc, kDChunks>(k, unit, source.keys + static_cast<long long>(nth) * kKeyWords, full);
}
__device__ __forceinline__ void load_values(
    VChunk* v, float (&unit)[4], Barrier* full, int nth, const KeySource& source) {
  load_tile<kBc, kDvChunks>(v, unit, source.values + static_cast<long long>(nth) * kValueWords, full);
}

// Brings one tile's Q, and the K and V that it sees, to shared memory as stages become empty. From the last keys to
// the first, so that tiles with a mask come first; each K before the V that its scores will overtake. The first
// consumer need not wait for the others' Q.
__device__ __forceinline__ void produce_tile(
    const AttentionArgs& args, SharedStorage& smem, const Tile& tile,
    PipelineState<kQStages>& q_pipe, PipelineState<kKStages>& k_pipe, PipelineState<kVStages>& v_pipe) {
  const auto produce_q = [&](int consumer) {
    Barrier* const full = &smem.q_full[q_pipe.stage][consumer];
    barrier_expect(full, kQBytes);
    load_queries(args, smem.q[q_pipe.stage][consumer], smem.q_unit[q_pipe.stage][consumer], full, tile, tile.first_row + 64 * consumer);
  };
  barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
  produce_q(0);
  const KeySource source(args, tile);
  const auto produce_k = [&](int n) {
    Barrier* const full = &smem.k_full[k_pipe.stage];
    barrier_wait(&smem.k_empty[k_pipe.stage], k_pipe.phase ^ 1);
    barrier_expect(full, kKBytes);
    load_keys(smem.k[k_pipe.stage], smem.k_unit[k_pipe.stage], full, n, source);
    k_pipe.advance();
  };
  if (tile.first_tile < tile.last_tile) produce_k(tile.last_tile - 1);
#pragma unroll 1
  for (int consumer = 1; consumer < kConsumers; ++consumer) produce_q(consumer);
  q_pipe.advance();
#pragma unroll 1
  for (int n = tile.last_tile - 1; n >= tile.first_tile; --n) {
    if (n > tile.first_tile) produce_k(n - 1);
    Barrier* const full = &smem.v_full[v_pipe.stage];
    barrier_wait(&smem.v_empty[v_pipe.stage], v_pipe.phase ^ 1);
    barrier_expect(full, kVBytes);
    load_values(smem.v[v_pipe.stage], smem.v_unit[v_pipe.stage], full, n, source);
    v_pipe.advance();
  }
}

// One consumer's 64 rows of a tile.
__device__ __forceinline__ void consume_tile(
    const AttentionArgs& args, SharedStorage& smem, const Tile& tile, int consumer,
    PipelineState<kQStages>& q_pipe, PipelineState<kKStages>& k_pipe, PipelineState<kVStages>& v_pipe) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const int first_row = tile.first_row + 64 * consumer;
  const int row = first_row + 16 * warp + lane / 4;  // and row + 8
  // The consumer's rows see tiles [first_tile, last_tile) of keys, and those before `first_partial` whole.
  const int first_tile = Tile::first_tile;
  int last_tile = first_row < args.seqlen_q ? tile.last_tile : first_tile, first_partial = args.seqlen_k / kBc;
  if (kCausal) {
    const int aligned = first_row + args.seqlen_k - args.seqlen_q;  // the first row's own place among the keys
    first_partial = min(first_partial, max(0, aligned + 1) / kBc);
    last_tile = min(last_tile, (max(0, aligned + 64) + kBc - 1) / kBc);
  }
  SoftmaxState softmax;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.max[h] = -kInfinity;
    softmax.sum[h] = 0.0f;
  }
  float o[kDv / 2];
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;

  const QChunk* q = smem.q[q_pipe.stage][consumer];
  barrier_wait(&smem.q_full[q_pipe.stage][consumer], q_pipe.phase);
  const float q_unit = smem.q_unit[q_pipe.stage][consumer][0];
  float scale[2] = {q_unit, q_unit};
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = fmaxf(scale[h] * (fabsf(args.scale) * kLog2e), 1e-37f);
  LargestUnits largest;
  const unsigned long long q_desc = descriptor(q);
  const unsigned long long k_desc = descriptor(smem.k), v_desc = descriptor(smem.v, sizeof(VChunk));
  constexpr int kNextK = sizeof(smem.k[0]) >> 4, kNextV = sizeof(smem.v[0]) >> 4;  // as descriptors count
  for (int n = tile.last_tile; n > last_tile; --n) {
    // Keys that only other consumers see.
    order_wait(consumer);
    order_arrive(consumer);
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);  // no warp may fall behind by a phase
    if (lane < kArrivals) barrier_arrive(&smem.k_empty[k_pipe.stage]);
    k_pipe.advance();
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
    if (lane < kArrivals) barrier_arrive(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
  }
  int n = last_tile - 1;
  if (n >= first_tile) {
    float s[kBc / 2], rescale[2], tile_scale[2];
    float tile_o[kDv / 2], v_unit;
    Weights p;
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    order_wait(consumer);
    start_qk(s, q_desc, k_desc + k_pipe.stage * kNextK);
    order_arrive(consumer);
    wgmma_wait<0>();
    hold(s);
    scale_of_tile(tile_scale, scale, smem.k_unit[k_pipe.stage][0], largest);
    if (lane < kArrivals) barrier_arrive(&smem.k_empty[k_pipe.stage]);
    // After the last scores the next Q may come.
    if (leader && n == first_tile) barrier_arrive(&smem.q_empty[q_pipe.stage]);
    k_pipe.advance();
    if (n >= first_partial) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
    raise_maximum(s, softmax, rescale, tile_scale);
    weigh(s, softmax, tile_scale);
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    split_weights(s, p);
    v_unit = smem.v_unit[v_pipe.stage][0];
    largest.of_values = fmaxf(largest.of_values, v_unit);
#pragma unroll 1
    for (--n; n >= first_tile; --n) {
      // The next scores follow these outputs through the tensor cores without a gap.
      order_wait(consumer);
      start_pv(tile_o, p, v_desc + v_pipe.stage * kNextV);
      barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
      start_qk(s, q_desc, k_desc + k_pipe.stage * kNextK);
      order_arrive(consumer);
      wgmma_wait<1>();
      hold(tile_o);
      accumulate(o, tile_o, v_unit);
      if (lane < kArrivals) barrier_arrive(&smem.v_empty[v_pipe.stage]);
      v_pipe.advance();
      wgmma_wait<0>();
      hold(s);
      scale_of_tile(tile_scale, scale, smem.k_unit[k_pipe.stage][0], largest);
      if (lane < kArrivals) barrier_arrive(&smem.k_empty[k_pipe.stage]);
      if (leader && n == first_tile) barrier_arrive(&smem.q_empty[q_pipe.stage]);
      k_pipe.advance();
      if (n >= first_partial) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
      if (raise_maximum(s, softmax, rescale, tile_scale)) rescale_output(o, rescale);
      weigh(s, softmax, tile_scale);
      barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
      split_weights(s, p);
      v_unit = smem.v_unit[v_pipe.stage][0];
      largest.of_values = fmaxf(largest.of_values, v_unit);
    }
    start_pv(tile_o, p, v_desc + v_pipe.stage * kNextV);
    wgmma_wait<0>();
    hold(tile_o);
    accumulate(o, tile_o, v_unit);
    if (lane < kArrivals) barrier_arrive(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
  }

  float inverse[2];
  unsigned untrusted = 0;  // of the thread's rows, by bits: what is to be computed again
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_sum = softmax.sum[h];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
    const float magnitude = sum_of_magnitudes(o, h) * kWeightUnit;
    const float score_unit = scale[h] * largest.of_keys, sum = row_sum * kWeightUnit;
    if (!within_range(score_unit, softmax.max[h], largest.of_values, magnitude, sum, args.seqlen_k)) {
      row_sum = kInfinity;  // which one lane of four may see alone
    }
    const bool inside = row + 8 * h < args.seqlen_q, keeps = trusted(softmax.max[h], row_sum);
    inverse[h] = keeps ? 1.0f / row_sum : 0.0f;
    if (inside && !keeps) {
      untrusted |= 1u << h;
    } else if (inside && args.lse != nullptr && lane % 4 == 0) {
      const long long at = lse_index(args, tile) + row + 8 * h;
      args.lse[at] = (softmax.max[h] + log2f(row_sum) - kWeightExponent) * kLn2;
    }
  }  float* const o_rows = output_rows(args, tile);
  write_output(o_rows, args.o_stride_row, o, inverse, untrusted, row, args.seqlen_q);
  const auto write = [&](int i, int x, float value) {
    o_rows[(first_row + 16 * warp + i) * args.o_stride_row + x] = value;
  };
  recompute_rows<16>(args, tile.batch, tile.head, first_row + 16 * warp, untrusted, write);
  if (leader && last_tile == first_tile) barrier_arrive(&smem.q_empty[q_pipe.stage]);  // no scores have done so
  q_pipe.advance();
}

// The largest of all threads' numbers of a block, none of which is negative.
__device__ __forceinline__ float largest_of_block(float x, float* of_warps) {
  const unsigned of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));  // positive floats compare as they are
  __syncthreads();  // nobody reads those of another array any more
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = __uint_as_float(of_warp);
  __syncthreads();
  float largest = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kSplitThreads / 32; ++warp) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

// Splits a tile of `count` rows of kWidth numbers, times a sign, all threads of a block together; zeros for what is not
// there.
template <int kRows, int kWidth, int kChunks>
__device__ __forceinline__ void split_tile(
    float* tile, const Element* source, long long stride, int count, float sign, float* of_warps) {
  constexpr int kRowsAtOnce = kSplitThreads / 8, kTimes = kRows / kRowsAtOnce;  // eight threads do a row of a chunk
  constexpr int kPart = kRows * 128;  // bytes of the large parts of a chunk, or of the small ones behind them
  const int piece = threadIdx.x % 8, first_row = threadIdx.x / 8;
  float4 x[kChunks][kTimes][2];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kChunks * kTimes; ++i) {
    const int chunk = i / 2 / kTimes, row = first_row + i / 2 % kTimes * kRowsAtOnce, column = chunk * kChunk + piece * 8;
    const bool inside = row < count && column < kWidth;
    const float4* const four_of = reinterpret_cast<const float4*>(source + row * stride + column) + i % 2;
    const float4 four = inside ? *four_of : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    x[chunk][i / 2 % kTimes][i % 2] = four;
    largest = fmaxf(largest, largest_of(four));
  }
  const float unit = unit_of(largest_of_block(largest, of_warps)), factor = sign * inverse_of(unit);
#pragma unroll
  for (int i = 0; i < kChunks * kTimes; ++i) {
    const float4 (&eight)[2] = x[i / kTimes][i % kTimes];
    const int row = first_row + i % kTimes * kRowsAtOnce;
    const Parts pairs[4] = {
        split(eight[0].x * factor, eight[0].y * factor), split(eight[0].z * factor, eight[0].w * factor),
        split(eight[1].x * factor, eight[1].y * factor), split(eight[1].z * factor, eight[1].w * factor)};
    char* const target =
        reinterpret_cast<char*>(tile) + i / kTimes * 2 * kPart + row * 128 + (piece ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0].big, pairs[1].big, pairs[2].big, pairs[3].big);
    *reinterpret_cast<uint4*>(target + kPart) =
        make_uint4(pairs[0].small, pairs[1].small, pairs[2].small, pairs[3].small);
  }
  float4* const behind = reinterpret_cast<float4*>(tile + kChunks * 2 * kPart / 4);
  if (threadIdx.x == 0) *behind = make_float4(unit, 0.0f, 0.0f, 0.0f);
}

// Splits queries; a block does a tile.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d32_query_tiles(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  float* const of_warps = reinterpret_cast<float*>(shared_bytes);
  let_next_launch_begin();
  const int tiles = (args.seqlen_q + kTileRows - 1) / kTileRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const long long first_row = tile * kTileRows;
  const int count = args.seqlen_q - tile * kTileRows;
  split_tile<kTileRows, kD, kDChunks>(
      queries_of(args, batch, head) + static_cast<long long>(tile) * kQueryWords,
      args.q + batch * args.q_stride_batch + head * args.q_stride_head + first_row * args.q_stride_row,
      args.q_stride_row, count, args.scale < 0.0f ? -1.0f : args.scale > 0.0f ? 1.0f : 0.0f, of_warps);
}

// Splits keys and values; a block does a tile of both.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d32_walked_tiles(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  float* const of_warps = reinterpret_cast<float*>(shared_bytes);
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_k + kBc - 1) / kBc;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const long long first_row = tile * kBc;
  const int count = args.seqlen_k - tile * kBc;
  split_tile<kBc, kD, kDChunks>(
      keys_of_head(args, batch, head) + static_cast<long long>(tile) * kKeyWords,
      args.k + batch * args.k_stride_batch + head * args.k_stride_head + first_row * args.k_stride_row,
      args.k_stride_row, count, 1.0f, of_warps);
  split_tile<kBc, kDv, kDvChunks>(
      values_of_head(args, batch, head) + static_cast<long long>(tile) * kValueWords,
      args.v + batch * args.v_stride_batch + head * args.v_stride_head + first_row * args.v_stride_row,
      args.v_stride_row, count, 1.0f, of_warps);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d32_kernel(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  wait_for_earlier_launches();
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) barrier_init(&smem.q_full[i][consumer], 1);
      barrier_init(&smem.q_empty[i], kConsumers);
    }
    for (int i = 0; i < kKStages; ++i) {
      barrier_init(&smem.k_full[i], 1);
      barrier_init(&smem.k_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kVStages; ++i) {
      barrier_init(&smem.v_full[i], 1);
      barrier_init(&smem.v_empty[i], kArrivals * 4 * kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kKStages> k_pipe;
  PipelineState<kVStages> v_pipe;
  if (warp < 4) {
    give_registers<32>();
    if (warp == 0 && elect_one()) {
      for_each_tile(args, [&](const Tile& tile) {
        produce_tile(args, smem, tile, q_pipe, k_pipe, v_pipe);
      });
    }
  } else {
    take_registers<112>();
    const int consumer = warp / 4 - 1;
    if (consumer == kConsumers - 1) order_arrive(consumer);
    for_each_tile(args, [&](const Tile& tile) {
      consume_tile(args, smem, tile, consumer, q_pipe, k_pipe, v_pipe);
    });
  }
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_f32_d32_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long num_q_heads = args->num_q_heads, seqlen_k = args->seqlen_k;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * ((seqlen_q + 63) / 64) * 4128 + 63) / 64 * 64 +
              (batch * num_kv_heads * ((seqlen_k + 47) / 48) * 3104 + 63) / 64 * 64 +
              (batch * num_kv_heads * ((seqlen_k + 47) / 48) * 3104 + 63) / 64 * 64);
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

static int launch_query_tiles(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kTileRows - 1) / kTileRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 16;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d32_query_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d32_query_tiles, *args);
}

static int launch_walked_tiles(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 16;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d32_walked_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d32_walked_tiles, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d32_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d32_kernel, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d32(const AttentionArgs* args, cudaStream_t stream) {
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
                               args->o_stride_batch, args->o_stride_head, args->o_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->v, args->o};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(float)) != 0) return cudaErrorMisalignedAddress;
  }
  bool begun = false;  // by a launch
  if (const int status = launch_query_tiles(args, stream, begun)) return status;
  if (const int status = launch_walked_tiles(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
// flashgen: {"problem": {"dtype": "f32", "batch": 4, "num_q_heads": 1, "num_kv_heads": 1, "seqlen_q": 32768, "seqlen_k": 32768, "head_dim": 32, "head_dim_v": 32, "causal": false, "precision": "auto"}, "family": "wgmma", "variant": {"pack_heads": false, "br": 256, "splits": 1, "workspace_splits": 1, "split": "in_front", "bc": 48, "persistent": false, "last_turn": "whole", "q_stages": 1, "o_apart": false, "p_in_shared": false, "weights": "f16", "values": "in_place", "powers": "rounded", "score_type": "f32", "promotion": "tiles", "bias_stages": 0, "bias_heads": 1, "seen_bits": false, "far_keys": "walked", "copiers": 1, "k_stages": 2, "v_stages": 2, "summed_columns": 0, "schedule": "chained", "q_in_registers": false, "order_of_groups": "products", "rescale": "lazy", "poly_exp": 0, "section": 1, "min_blocks": 1, "cluster_over": "rows", "cluster": 1, "tail": 0, "split_by": "rows", "tangent": "polynomial"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_f32_d32", "launches": [{"threads": 128, "smem_bytes": 16, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "query_tiles"}, {"threads": 128, "smem_bytes": 16, "rows_per_block": 48, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "walked_tiles", "of_keys": true, "dependent": true}, {"threads": 640, "smem_bytes": 115712, "rows_per_block": 256, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "dependent": true}], "digest": "83213f3e5c116b32", "figures": [1502, 930]}
