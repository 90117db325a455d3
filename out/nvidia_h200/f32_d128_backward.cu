// attention_f32_d128_backward: gradients of flash attention, f32, head dim 128, tuned without a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family wgmma-backward:
//   bc = 128                   keys that a block keeps, whose gradients it makes
//   apart = false              of 64 keys one warpgroup makes dv and another dk, which takes fewer registers
//   br = 64                    query rows that pass by them
//   schedule = together        when weights are made and multiplied: beside their gradients, after, or a tile ahead
//   parts = 2                  parts of them whose weights are made one behind the other
//   kept = shared              what products read from registers: values, or keys as well
//   q_stages = 1               tiles of queries in shared memory
//   dout_stages = 1            tiles of gradients of outputs in shared memory
//   dq_path = atomics          who makes queries' gradients: a launch, or blocks of keys by sums in memory
//   ds_stages = 1              tiles of gradients of scores in shared memory, where blocks of keys do
//   rows = 128                 query rows that a block of the other launch keeps
//   keys = 64                  keys that pass by them
//   k_stages = 2               tiles of keys in shared memory
//   v_stages = 2               tiles of values in shared memory
//   order = by_head            blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds
//
// Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, without a mask: 8.264 ms (median), spread 2.0 %,
// 166.3 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 7.6e-07.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c f32_d128_backward.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit f32_d128_backward.cu \
//         --device h200 --d 128 --backward --family wgmma-backward --set bc=128 --set apart=false \
//         --set br=64 --set schedule=together --set parts=2 --set kept=shared --set q_stages=1 \
//         --set dout_stages=1 --set dq_path=atomics --set ds_stages=1 --set rows=128 --set keys=64 \
//         --set k_stages=2 --set v_stages=2 --set order=by_head

#include <cuda_fp16.h>

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
using Barrier = unsigned long long;
constexpr int kD = 128, kDv = 128;  // head dims of keys and of values
constexpr int kVec = 4;  // elements per access of global memory

constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kBc = 128;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 64;  // query rows that pass by them at a time
constexpr int kParts = 2, kWeighedRows = kPassingRows / kParts;  // of them, which are weighed one behind the other
constexpr int kConsumers = 2;  // warpgroups that compute, beside the producer
constexpr int kThreads = 384;
constexpr int kQStages = 1, kDoutStages = 1;  // tiles of them in shared memory
constexpr int kStatisticsRows = 32, kStatisticsThreads = 256;
constexpr int kPostprocessRows = 64, kPostprocessThreads = 128;

// A tile in shared memory is made of chunks of 64 columns in two parts, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk, kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16, kDvSteps = (kDv + 15) / 16;  // steps of 16 along the columns
// float32 is brought into the range of f16 by powers of two, its units: each tile of 64 rows of an array has its own, in
// which its largest element is between 2^12 and 2^13.
constexpr int kTopExponent = 12;
constexpr float kLeastUnit = 9.62964972193618e-35f;  // 2^-113, that of zeros, so that products of units are normal
constexpr int kTileRows = 64, kSplitThreads = 256;  // of a block that splits

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLargest = __builtin_bit_cast(float, 0x7f000000);  // of the powers of two

using Chunk = __half[2][kTileRows * kChunk];  // large parts and small ones
// Words of 32 bits from one tile to the next: 32 behind its chunks, the first of which is its unit.
constexpr int kTileWords = kDChunks * int(sizeof(Chunk) / 4) + 32, kTileWordsV = kDvChunks * int(sizeof(Chunk) / 4) + 32;

// Keys and values by consumer, and query rows and gradients of outputs that pass by, in parts, with what is known of the
// rows; gradients of scores, a row for each query row; and of all tiles their units.
struct SharedStorage {
  alignas(1024) Chunk k[kConsumers][kDChunks];
  alignas(1024) Chunk v[kConsumers][kDvChunks];
  alignas(1024) Chunk q[kQStages][kDChunks];
  alignas(1024) Chunk dout[kDoutStages][kDvChunks];
  alignas(1024) Chunk gradients[kConsumers];
  alignas(16) float lse[kQStages][kPassingRows], delta[kDoutStages][kPassingRows];
  alignas(16) float k_unit[kConsumers][4], v_unit[kConsumers][4], q_unit[kQStages][4], dout_unit[kDoutStages][4];
  alignas(16) float largest[kConsumers][kParts][4];  // units of each warp's gradients of scores
  // A stage is full once its bytes have arrived, and empty once every warp of consumers has done with it.
  Barrier kept_full, q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
};

static_assert(sizeof(SharedStorage) == 230400, "the size that pruning counted on");

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

// Shows ordinary writes to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Brings bytes that lie side by side to shared memory; counts them towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Adds four numbers to neighbours in global memory, whoever else adds to them; nobody waits for what they were.
__device__ __forceinline__ void add_to_sums(float* sums, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(sums)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(void* row, const unsigned* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
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

// Makes the compiler forget what it knows of a value: it then works out what follows from it where that is needed,
// rather than once and for all in a register each.
__device__ __forceinline__ void forget(unsigned long long& value) {
  asm volatile("" : "+l"(value));
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

// D = A B, or D += A B if `accumulate`, for one warpgroup: D is 64 x n. Products along the columns of both factors read
// them from shared memory; sums have their weights in registers, or in shared memory for queries, and what they weigh by
// rows.
__device__ __forceinline__ void wgmma_m64n32k16_f16_ss(
    float (&d)[16], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n64k16_f16_rs_trans(
    float (&d)[32], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n64k16_f16_ss_trans(
    float (&d)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

#endif

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
// A head's last tile, which is copied as a whole, is filled up with rows that weigh nothing, too.
__device__ __forceinline__ int filled_rows(const AttentionArgs& args) {
  return (args.seqlen_q + 63) / 64 * 64;
}
__device__ __forceinline__ float* lse_of(const AttentionArgs& args, int batch, int head) {
  return args.workspace + (static_cast<long long>(batch) * args.num_q_heads + head) * filled_rows(args);
}
__device__ __forceinline__ float* delta_of(const AttentionArgs& args, int batch, int head) {
  return lse_of(args, batch, head) +
         ((static_cast<long long>(args.batch)) * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64;
}
// Sums of the gradients of a head's queries, before scores' scale: tiles of 16 rows by 8 columns, as products leave them.
__device__ __forceinline__ long long num_query_sums(const AttentionArgs& args) {
  return (args.seqlen_q + 15) / 16 * (16LL * 128);
}
__device__ __forceinline__ float* query_sums_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  return args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
         (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
         (static_cast<long long>(batch) * args.num_q_heads + head) * num_query_sums(args);
}
// Where a tile of them begins for a lane, whose next numbers are neighbours.
__device__ __forceinline__ float* query_sum_at(float* sums, int row_tile, int column_tile) {
  const int lane = threadIdx.x % 32;
  return sums + (row_tile * 16LL + column_tile) * 128 + lane * 4;
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
  const long long batches = args.batch, tiles = (args.seqlen_q + kTileRows - 1) / kTileRows;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_q_heads + head) * tiles * kTileWords;
}
__device__ __forceinline__ float* outputs_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch, tiles = (args.seqlen_q + kTileRows - 1) / kTileRows;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_q_heads + head) * tiles * kTileWordsV;
}
__device__ __forceinline__ float* keys_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch, tiles = (args.seqlen_k + kTileRows - 1) / kTileRows;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * tiles * kTileWords;
}
__device__ __forceinline__ float* values_of_head(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch, tiles = (args.seqlen_k + kTileRows - 1) / kTileRows;
  float* const parts = args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64 +
                       (batches * args.num_q_heads * ((args.seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64 +
                       (batches * args.num_kv_heads * ((args.seqlen_k + 63) / 64) * 8224 + 63) / 64 * 64;
  return parts + (static_cast<long long>(batch) * args.num_kv_heads + head) * tiles * kTileWordsV;
}

// Starts the products of 64 rows that stay with those that pass by, over all columns. The small terms come first: what the
// large ones leave no room for is cut off.
template <int kSteps>
__device__ __forceinline__ void start_products(
    float (&s)[16], unsigned long long kept, unsigned long long passing) {
  constexpr int kSmall = sizeof(Chunk) / 2 >> 4;  // from large parts to small ones, as descriptors count
  forget(kept);  // descriptors of all steps would be many
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const unsigned long long a = step_of_columns<Chunk>(kept, step), b = step_of_columns<Chunk>(passing, step);
    wgmma_m64n32k16_f16_ss(s, a + kSmall, b, step > 0);
    wgmma_m64n32k16_f16_ss(s, a, b + kSmall, true);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_m64n32k16_f16_ss(s, step_of_columns<Chunk>(kept, step), step_of_columns<Chunk>(passing, step), true);
  }
  wgmma_commit();
}

// A thread's weights as operands of sixteen rows that pass by each, in parts; either of its two keys has a unit of its own.
struct Weights {
  unsigned big[2][4], small[2][4];
  float units[2];
};

// Makes them of what products leave, times a unit of what they will be multiplied by.
__device__ __forceinline__ Weights split_weights(const float (&s)[16], float unit) {
  Weights weights;
  float factors[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 2 * h; i < 16; i += 4) largest = fmaxf(largest, fmaxf(fabsf(s[i]), fabsf(s[i + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    weights.units[h] = unit_of(largest * unit);
    factors[h] = fminf(unit * inverse_of(weights.units[h]), kLargest);  // of zeros finite, too
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Parts both = split(s[2 * i] * factors[i % 2], s[2 * i + 1] * factors[i % 2]);
    weights.big[i / 4][i % 4] = both.big;
    weights.small[i / 4][i % 4] = both.small;
  }
  return weights;
}

// Starts what weighted rows add to 64 columns of sums.
__device__ __forceinline__ void start_sums(
    float (&added)[32], const Weights& weights, unsigned long long passing, bool never) {
  constexpr int kSmall = sizeof(Chunk) / 2 >> 4;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const unsigned long long b = step_of_keys(passing, step);
    wgmma_m64n64k16_f16_rs_trans(added, weights.small[step], b, step > 0 || never);
    wgmma_m64n64k16_f16_rs_trans(added, weights.big[step], b + kSmall, true);
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    wgmma_m64n64k16_f16_rs_trans(added, weights.big[step], step_of_keys(passing, step), true);
  }
  wgmma_commit();
}

// Adds it to the sums, in columns from kFirst on, by units of the thread's keys times that of what was weighed.
template <int kFirst, int kColumns, int kAll>
__device__ __forceinline__ void add_to_rows(float (&sum)[kAll], float (&added)[kColumns], const float (&units)[2]) {
  hold(added);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[kFirst / 2 + i] = fmaf(added[i], units[i / 2 % 2], sum[kFirst / 2 + i]);
}

// Two numbers of f16 by as many others.
__device__ __forceinline__ unsigned times(unsigned pair, __half2 factors) {
  const __half2 products = __hmul2(reinterpret_cast<const __half2&>(pair), factors);
  return reinterpret_cast<const unsigned&>(products);
}

// The largest of the units of a warpgroup's warps.
__device__ __forceinline__ float largest_of(const float (&units)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(units);
  return fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
}

// Brings a warpgroup's gradients of scores to shared memory, where a row has those of 64 keys, in a unit of all, which the
// thread's own become multiples of.
__device__ __forceinline__ void store_gradients(Chunk& tile, int first_row, const Weights& gradients, float unit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const int row = lane / 16 * 8 + lane % 8;  // of the sixteen of a step
  const int piece = (2 * warp + lane / 8 % 2) ^ row % 8;  // eight keys
  __half2 factors[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = gradients.units[h] * inverse_of(unit);
    factors[h] = __floats2half2_rn(factor, factor);
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int place = (first_row + 16 * step + row) * kChunk + piece * 8;
    unsigned big[4], small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      big[i] = times(gradients.big[step][i], factors[i % 2]);
      small[i] = times(gradients.small[step][i], factors[i % 2]);
    }
    stmatrix_x4_trans(tile[0] + place, big);
    stmatrix_x4_trans(tile[1] + place, small);
  }
}

// Starts what 64 keys make of 64 columns of the gradients of 64 query rows.
__device__ __forceinline__ void start_queries(
    float (&added)[32], unsigned long long gradients, unsigned long long keys, bool never) {
  constexpr int kSmall = sizeof(Chunk) / 2 >> 4;
  forget(gradients);
  forget(keys);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    const unsigned long long a = step_of_columns<Chunk>(gradients, step), b = step_of_keys(keys, step);
    wgmma_m64n64k16_f16_ss_trans(added, a + kSmall, b, step > 0 || never);
    wgmma_m64n64k16_f16_ss_trans(added, a, b + kSmall, true);
  }
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    wgmma_m64n64k16_f16_ss_trans(added, step_of_columns<Chunk>(gradients, step), step_of_keys(keys, step), true);
  }
  wgmma_commit();
}

// Adds some columns of a warp's rows to sums in memory, from their units to what they are.
template <int kColumns>
__device__ __forceinline__ void add_queries(float* place, float (&added)[kColumns], float unit, bool is_there) {
  hold(added);
  if (!is_there) return;
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    const float four[4] = {added[i] * unit, added[i + 1] * unit, added[i + 2] * unit, added[i + 3] * unit};
    add_to_sums(place + i * 32, four);
  }
}

// At the barriers where warps tell one lane arrives for its warp. compute-sanitizer's racecheck takes an arrival for the
// arriving lane's alone, whatever __syncwarp came before: for it all arrive.
#ifdef FLASHGEN_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

// A warp has done with a stage.
__device__ __forceinline__ void release(Barrier* empty) {
  if (threadIdx.x % 32 < kArrivals) barrier_arrive(empty);
}

// Writes a thread's part of 64 rows, from `first_row` on and before `end`, times a factor.
template <int n>
__device__ __forceinline__ void write_rows(
    Element* array, long long stride, int first_row, int end, const float (&sum)[n], float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 16 * warp + lane / 4 + 8 * h;
    Element* const target = array + row * stride + lane % 4 * 2;
    if (row >= end) continue;
#pragma unroll
    for (int i = 2 * h; i < n; i += 4) {
      *reinterpret_cast<float2*>(target + i / 4 * 8) = make_float2(sum[i] * factor, sum[i + 1] * factor);
    }
  }
}

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; a warp does a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_f32_d128_backward_statistics(const AttentionArgs args) {
  let_next_launch_begin();

  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    float at[4];
  };
  constexpr int kLanes = 32, kRowsAtOnce = kStatisticsThreads / kLanes;
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
    if (row == args.seqlen_q - 1) {
      for (int filling = args.seqlen_q + lane; filling < filled_rows(args); filling += kLanes) {
        lse_of(args, batch, head)[filling] = kInfinity;
        delta_of(args, batch, head)[filling] = 0.0f;
      }
    }
    if (lane != 0) continue;
    const long long place = (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q + row;
    const float lse = args.lse[place];
    lse_of(args, batch, head)[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
    delta_of(args, batch, head)[row] = sum - (args.dlse != nullptr ? args.dlse[place] : 0.0f);
  }
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

// Splits a tile of `count` rows of kWidth numbers, all threads of a block together; zeros for what is not there.
template <int kWidth, int kChunks>
__device__ __forceinline__ void split_tile(float* tile, const Element* rows, long long stride, int count, float* of_warps) {
  constexpr int kRowsAtOnce = kSplitThreads / 8, kTimes = kTileRows / kRowsAtOnce;  // eight threads do a row of a chunk
  const int piece = threadIdx.x % 8, first_row = threadIdx.x / 8;
  float4 x[kChunks][kTimes][2];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kChunks * kTimes; ++i) {
    const int chunk = i / 2 / kTimes, row = first_row + i / 2 % kTimes * kRowsAtOnce, column = chunk * kChunk + piece * 8;
    const bool inside = row < count && column < kWidth;
    const float4* const source = reinterpret_cast<const float4*>(rows + row * stride + column) + i % 2;
    const float4 four = inside ? *source : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    x[chunk][i / 2 % kTimes][i % 2] = four;
    largest = fmaxf(largest, largest_of(four));
  }
  const float unit = unit_of(largest_of_block(largest, of_warps)), factor = inverse_of(unit);
#pragma unroll
  for (int i = 0; i < kChunks * kTimes; ++i) {
    const float4 (&eight)[2] = x[i / kTimes][i % kTimes];
    const int row = first_row + i % kTimes * kRowsAtOnce;
    const Parts pairs[4] = {
        split(eight[0].x * factor, eight[0].y * factor), split(eight[0].z * factor, eight[0].w * factor),
        split(eight[1].x * factor, eight[1].y * factor), split(eight[1].z * factor, eight[1].w * factor)};
    char* const target =
        reinterpret_cast<char*>(tile) + i / kTimes * sizeof(Chunk) + row * 128 + (piece ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0].big, pairs[1].big, pairs[2].big, pairs[3].big);
    *reinterpret_cast<uint4*>(target + sizeof(Chunk) / 2) =
        make_uint4(pairs[0].small, pairs[1].small, pairs[2].small, pairs[3].small);
  }
  float4* const behind = reinterpret_cast<float4*>(tile + kChunks * sizeof(Chunk) / 4);
  if (threadIdx.x == 0) *behind = make_float4(unit, 0.0f, 0.0f, 0.0f);
}

// Splits queries and gradients of outputs; a block does a tile of both.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d128_backward_query_tiles(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  float* const of_warps = reinterpret_cast<float*>(shared_bytes);
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_q + kTileRows - 1) / kTileRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const long long first_row = tile * kTileRows;
  const int count = args.seqlen_q - tile * kTileRows;
  split_tile<kD, kDChunks>(
      queries_of(args, batch, head) + static_cast<long long>(tile) * kTileWords,
      args.q + batch * args.q_stride_batch + head * args.q_stride_head + first_row * args.q_stride_row,
      args.q_stride_row, count, of_warps);
  split_tile<kDv, kDvChunks>(
      outputs_of(args, batch, head) + static_cast<long long>(tile) * kTileWordsV,
      args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + first_row * args.dout_stride_row,
      args.dout_stride_row, count, of_warps);
}

// Splits keys and values; a block does a tile of both.
extern "C" __global__ void __launch_bounds__(kSplitThreads)
    attention_f32_d128_backward_key_tiles(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  float* const of_warps = reinterpret_cast<float*>(shared_bytes);
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_k + kTileRows - 1) / kTileRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const long long first_row = tile * kTileRows;
  const int count = args.seqlen_k - tile * kTileRows;
  split_tile<kD, kDChunks>(
      keys_of_head(args, batch, head) + static_cast<long long>(tile) * kTileWords,
      args.k + batch * args.k_stride_batch + head * args.k_stride_head + first_row * args.k_stride_row,
      args.k_stride_row, count, of_warps);
  split_tile<kDv, kDvChunks>(
      values_of_head(args, batch, head) + static_cast<long long>(tile) * kTileWordsV,
      args.v + batch * args.v_stride_batch + head * args.v_stride_head + first_row * args.v_stride_row,
      args.v_stride_row, count, of_warps);
}

// Brings a tile in parts to shared memory, and its unit, counting their bytes towards `full`.
template <int kChunks>
__device__ __forceinline__ void load_tile(Chunk (&tile)[kChunks], float (&unit)[4], const float* source, Barrier* full) {
  bulk_load(tile, source, sizeof(tile), full);
  bulk_load(unit, source + sizeof(tile) / 4, sizeof(unit), full);
}

// What a block keeps, and the rows that see some of it: of all heads that share the keys, one head behind the other.
struct Walk {
  int batch, kv_head, first_key, first_row, end_row;
};

// Found by the producer and by consumers each, so that nothing is held while registers change hands.
__device__ __forceinline__ Walk find_walk(const AttentionArgs& args) {
  const int tiles = (args.seqlen_k + kBc - 1) / kBc;
  const int first_key = int(blockIdx.x) % tiles * kBc, kv_head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  int first_row, end_row;
  find_rows(args, batch, first_key, min(first_key + kBc, args.seqlen_k), first_row, end_row);
  return {batch, kv_head, first_key, first_row - first_row % kPassingRows, end_row};
}

// Gradients of keys and values: the block keeps kBc of them, each consumer 64, and the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f32_d128_backward_kernel(const AttentionArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&smem.kept_full, 1);
    for (int i = 0; i < kQStages; ++i) {
      barrier_init(&smem.q_full[i], 1);
      barrier_init(&smem.q_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kDoutStages; ++i) {
      barrier_init(&smem.dout_full[i], 1);
      barrier_init(&smem.dout_empty[i], kArrivals * 4 * kConsumers);
    }
    fence_barrier_init();
  }
  wait_for_earlier_launches();
  let_next_launch_begin();
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kDoutStages> dout_pipe;
  if (warp < 4) {
    give_registers<40>();
    if (warp != 0) return;
    const Walk walk = find_walk(args);
    const int batch = walk.batch, kv_head = walk.kv_head, first_key = walk.first_key, end_row = walk.end_row;
    if (walk.first_row >= end_row || !elect_one()) return;
    const int group = args.num_q_heads / args.num_kv_heads;
    barrier_expect(&smem.kept_full, sizeof(smem.k) + sizeof(smem.v) + sizeof(smem.k_unit) + sizeof(smem.v_unit));
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      // Who has no keys takes others', which nothing is seen of.
      const long long tile = min(first_key / kTileRows + consumer, (args.seqlen_k - 1) / kTileRows);
      const float* const keys = keys_of_head(args, batch, kv_head) + tile * kTileWords;
      const float* const values = values_of_head(args, batch, kv_head) + tile * kTileWordsV;
      load_tile(smem.k[consumer], smem.k_unit[consumer], keys, &smem.kept_full);
      load_tile(smem.v[consumer], smem.v_unit[consumer], values, &smem.kept_full);
    }
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int first = walk.first_row; first < end_row; first += kPassingRows) {
        const long long tile = first / kTileRows;
        Barrier* const q_full = &smem.q_full[q_pipe.stage];
        barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
        barrier_expect(q_full, sizeof(smem.q[0]) + sizeof(smem.q_unit[0]) + sizeof(smem.lse[0]));
        const float* const queries = queries_of(args, batch, head) + tile * kTileWords;
        load_tile(smem.q[q_pipe.stage], smem.q_unit[q_pipe.stage], queries, q_full);
        bulk_load(smem.lse[q_pipe.stage], lse_of(args, batch, head) + first, sizeof(smem.lse[0]), q_full);
        q_pipe.advance();
        Barrier* const dout_full = &smem.dout_full[dout_pipe.stage];
        barrier_wait(&smem.dout_empty[dout_pipe.stage], dout_pipe.phase ^ 1);
        barrier_expect(dout_full, sizeof(smem.dout[0]) + sizeof(smem.dout_unit[0]) + sizeof(smem.delta[0]));
        const float* const gradients = outputs_of(args, batch, head) + tile * kTileWordsV;
        load_tile(smem.dout[dout_pipe.stage], smem.dout_unit[dout_pipe.stage], gradients, dout_full);
        bulk_load(smem.delta[dout_pipe.stage], delta_of(args, batch, head) + first, sizeof(smem.delta[0]), dout_full);
        dout_pipe.advance();
      }
    }
    return;
  }
  take_registers<232>();
  const Walk walk = find_walk(args);
  const int batch = walk.batch, kv_head = walk.kv_head, first_key = walk.first_key;
  const int first_row = walk.first_row, end_row = walk.end_row;
  const int group = args.num_q_heads / args.num_kv_heads, end_key = min(first_key + kBc, args.seqlen_k);
  const int consumer = warp / 4 - 1, lane = threadIdx.x % 32;
  const int own_first_key = first_key + consumer * 64;
  const int own_key = own_first_key + warp % 4 * 16 + lane / 4;  // the thread's first
  const int own_row = warp % 4 * 16;  // of a tile, from which on the warp has gradients of queries
  const int consumers_barrier = 1 + consumer;  // named: all warps of the consumer have come
  const unsigned long long k_desc = descriptor(smem.k[consumer], sizeof(Chunk)), v_desc = descriptor(smem.v[consumer]);
  const unsigned long long gradients_desc = descriptor(smem.gradients[consumer]);
  constexpr int kNextChunk = sizeof(Chunk) >> 4;  // as descriptors count
  // All products of sums add to the same registers, and begin anew where they are told so: were that known when a kernel is
  // built, they could be others each time, and too many.
  const bool never = args.seqlen_q < 0;
  float sum_k[kD / 2] = {}, sum_v[kDv / 2] = {};
  if (first_row < end_row) barrier_wait(&smem.kept_full, 0);
#pragma unroll 1
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
    for (int first = first_row; first < end_row; first += kPassingRows) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        const int step = part * (kWeighedRows / 16);
        const unsigned long long q_desc = step_of_keys(descriptor(smem.q[q_pipe.stage], sizeof(Chunk)), step);
        const unsigned long long dout_desc = step_of_keys(descriptor(smem.dout[dout_pipe.stage], sizeof(Chunk)), step);
        float s[kWeighedRows / 2], gradient[kWeighedRows / 2];
        if (part == 0) barrier_wait(&smem.q_full[q_pipe.stage], q_pipe.phase);
        start_products<kDSteps>(s, k_desc, q_desc);
        if (part == 0) barrier_wait(&smem.dout_full[dout_pipe.stage], dout_pipe.phase);
        start_products<kDvSteps>(gradient, v_desc, dout_desc);
        const float q_unit = smem.q_unit[q_pipe.stage][0], dout_unit = smem.dout_unit[dout_pipe.stage][0];
        const float scale = args.scale * kLog2e * (q_unit * smem.k_unit[consumer][0]);
        const float gradient_unit = dout_unit * smem.v_unit[consumer][0];
        wgmma_wait<0>();
        hold(s);
        hold(gradient);
        const auto weigh_all = [&](auto masked) {
          constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
          for (int i = 0; i < kWeighedRows / 2; i += 4) {
            const int column = part * kWeighedRows + i * 2 + lane % 4 * 2;
            const float2 lse = *reinterpret_cast<const float2*>(smem.lse[q_pipe.stage] + column);
            const float2 delta = *reinterpret_cast<const float2*>(smem.delta[dout_pipe.stage] + column);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int row = first + column + e;
              const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int at = i + 2 * h + e, key = own_key + 8 * h;
                gradient[at] *= gradient_unit;
                weigh<kMasked>(s[at], gradient[at], args, batch, head, row, key, seen, scale, e ? lse.y : lse.x,
                               e ? delta.y : delta.x);
              }
            }
          }
        };
        const int first_of_part = first + part * kWeighedRows;
        if (is_partial(args, batch, first_of_part, first_of_part + kWeighedRows, own_first_key, own_first_key + 64)) {
          weigh_all(Constant<true>{});
        } else {
          weigh_all(Constant<false>{});
        }
        const Weights weights = split_weights(s, dout_unit);
        const Weights gradients = split_weights(gradient, 1.0f);
        float added[32];
        start_sums(added, weights, dout_desc, false);
        wgmma_wait<0>();
        add_to_rows<0>(sum_v, added, weights.units);
        start_sums(added, weights, dout_desc + 1 * kNextChunk, never);
        wgmma_wait<0>();
        add_to_rows<64>(sum_v, added, weights.units);
        start_sums(added, gradients, q_desc, never);
        // Of units whose product is nothing, what is lost is below 2^-94.
        const float k_units[2] = {gradients.units[0] * q_unit, gradients.units[1] * q_unit};
        // All warps agree on a unit, for sums over keys; and nobody needs the gradients of the tile before any more.
        const float own_unit = fmaxf(gradients.units[0], gradients.units[1]);
        const unsigned of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(own_unit));
        if (lane == 0) smem.largest[consumer][part][warp % 4] = __uint_as_float(of_warp);
        named_barrier_sync(consumers_barrier, kWarpgroup);
        const float unit = largest_of(smem.largest[consumer][part]);
        store_gradients(smem.gradients[consumer], part * kWeighedRows, gradients, unit);
        wgmma_wait<0>();
        add_to_rows<0>(sum_k, added, k_units);
        start_sums(added, gradients, q_desc + 1 * kNextChunk, never);
        wgmma_wait<0>();
        add_to_rows<64>(sum_k, added, k_units);
      }
      const float row_unit = largest_of(smem.largest[consumer][own_row / kWeighedRows]) * smem.k_unit[consumer][0];
      fence_proxy_async();
      named_barrier_sync(consumers_barrier, kWarpgroup);
      float added[32];
      start_queries(added, gradients_desc, k_desc, false);
      release(&smem.dout_empty[dout_pipe.stage]);
      dout_pipe.advance();
      release(&smem.q_empty[q_pipe.stage]);
      q_pipe.advance();
      float* const place = query_sum_at(query_sums_of(args, batch, head), (first + own_row) / 16, 0);
      const bool is_there = first + own_row < args.seqlen_q;
      wgmma_wait<0>();
      add_queries(place, added, row_unit, is_there);
      start_queries(added, gradients_desc, k_desc + 1 * kNextChunk, never);
      wgmma_wait<0>();
      add_queries(place + 64 * 16, added, row_unit, is_there);
    }
  }
  write_rows(args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row, own_first_key,
             end_key, sum_k, args.scale);
  write_rows(args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row, own_first_key,
             end_key, sum_v, 1.0f);
}

// Gradients of query rows: what all blocks have added up, times scores' scale; a warp writes 16 rows.
extern "C" __global__ void __launch_bounds__(kPostprocessThreads)
    attention_f32_d128_backward_postprocess(const AttentionArgs args) {
  wait_for_earlier_launches();
  const int tiles = (args.seqlen_q + kPostprocessRows - 1) / kPostprocessRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int row_tile = tile * (kPostprocessRows / 16) + int(threadIdx.x) / 32;
  if (16 * row_tile >= args.seqlen_q) return;
  float* const sums = query_sums_of(args, batch, head);
  float sum[kD / 2];
#pragma unroll
  for (int x = 0; x < kD / 8; ++x) {
    const float* const place = query_sum_at(sums, row_tile, x);
    const float4 of_lane = *reinterpret_cast<const float4*>(place);
    sum[4 * x + 0] = of_lane.x, sum[4 * x + 1] = of_lane.y, sum[4 * x + 2] = of_lane.z, sum[4 * x + 3] = of_lane.w;
  }
  write_rows(args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head, args.dq_stride_row,
             tile * kPostprocessRows, args.seqlen_q, sum, args.scale);
}

#ifndef __CUDACC_RTC__
// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_f32_d128_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long num_q_heads = args->num_q_heads, seqlen_k = args->seqlen_k;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * ((seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 15) / 16 * 16) * 128 + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 63) / 64) * 8224 + 63) / 64 * 64 +
              (batch * num_kv_heads * ((seqlen_k + 63) / 64) * 8224 + 63) / 64 * 64 +
              (batch * num_kv_heads * ((seqlen_k + 63) / 64) * 8224 + 63) / 64 * 64);
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
      cudaFuncSetAttribute(attention_f32_d128_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d128_backward_statistics, *args);
}

static int launch_query_tiles(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kTileRows - 1) / kTileRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 32;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d128_backward_query_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d128_backward_query_tiles, *args);
}

static int launch_key_tiles(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kTileRows - 1) / kTileRows * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 32;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d128_backward_key_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d128_backward_key_tiles, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d128_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d128_backward_kernel, *args);
}

static int launch_postprocess(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kPostprocessRows - 1) / kPostprocessRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_d128_backward_postprocess, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_f32_d128_backward_postprocess, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_d128_backward(const AttentionArgs* args, cudaStream_t stream) {
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
  if (const int status = launch_query_tiles(args, stream, begun)) return status;
  if (const int status = launch_key_tiles(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  if (const int status = launch_postprocess(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
// flashgen: {"problem": {"dtype": "f32", "batch": 4, "num_q_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "head_dim_v": 128, "causal": false, "precision": "auto", "backward": true}, "family": "wgmma-backward", "variant": {"bc": 128, "apart": false, "br": 64, "schedule": "together", "parts": 2, "kept": "shared", "q_stages": 1, "dout_stages": 1, "dq_path": "atomics", "cluster": 1, "sum_stages": 2, "heads": 1, "ds_stages": 1, "rows": 128, "keys": 64, "k_stages": 2, "v_stages": 2, "order": "by_head", "meeting": "at_once", "ranges": "of_rows", "min_blocks": 1, "turns": "one", "sums": "any_order", "walk": "down", "far_keys": "walked", "last_turn": "whole", "second": "behind", "sections": "held", "finisher": "consumers", "writer": "producer"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_f32_d128_backward", "launches": [{"threads": 256, "smem_bytes": 0, "rows_per_block": 32, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "statistics"}, {"threads": 256, "smem_bytes": 32, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "query_tiles", "dependent": true}, {"threads": 256, "smem_bytes": 32, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "key_tiles", "of_keys": true, "dependent": true}, {"threads": 384, "smem_bytes": 230400, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "of_keys": true, "dependent": true}, {"threads": 128, "smem_bytes": 0, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "postprocess", "dependent": true}], "digest": "a3c9d95dc94ccf12", "figures": [1866, 915]}
