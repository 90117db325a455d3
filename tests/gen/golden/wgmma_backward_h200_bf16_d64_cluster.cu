// attention_bf16_d64_backward: gradients of flash attention, bf16, head dim 64, tuned without a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family wgmma-backward:
//   bc = 128                   keys that a block keeps, whose gradients it makes
//   apart = false              of 64 keys one warpgroup makes dv and another dk, which takes fewer registers
//   br = 128                   query rows that pass by them
//   schedule = together        when weights are made and multiplied: beside their gradients, after, or a tile ahead
//   parts = 1                  parts of them whose weights are made one behind the other
//   kept = shared              what products read from registers: values, or keys as well
//   q_stages = 2               tiles of queries in shared memory
//   dout_stages = 2            tiles of gradients of outputs in shared memory
//   dq_path = cluster          who makes queries' gradients: a launch, or blocks of keys by sums in memory
//   ds_stages = 2              tiles of gradients of scores in shared memory, where blocks of keys do
//   rows = 128                 query rows that a block of the other launch keeps
//   keys = 64                  keys that pass by them
//   k_stages = 2               tiles of keys in shared memory
//   v_stages = 2               tiles of values in shared memory
//   order = by_head            blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds
//   cluster = 4                blocks that send each other queries' gradients, or get the same rows by one copy

#include <cuda_bf16.h>
#include <cuda.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
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

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap q, dout, k, v;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 64, kDv = 64;  // head dims of keys and of values
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kBc = 128;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 128;  // query rows that pass by them at a time
constexpr int kConsumers = 2;  // warpgroups that compute, beside the producer
constexpr int kThreads = 384;
constexpr int kQStages = 2, kDoutStages = 2;  // tiles of them in shared memory
constexpr int kDsStages = 2;  // tiles of gradients of scores in shared memory
constexpr int kShareTiles = 1, kShareColumns = 64;  // of queries' gradients, of 64 rows, by consumer
constexpr int kGradientsBarrier = 1;  // named: all consumers have written their gradients of scores
constexpr int kCluster = 4;  // blocks with neighbouring keys of a head, which send each other sums of the queries' gradients
constexpr int kClusterKeys = kCluster * kBc;  // which they keep in turns, where a head has more
constexpr int kHeadsPerBlock = 1;  // heads of keys that they take one after the other
constexpr int kSumStages = 2;  // tiles of sums in shared memory, on their way
constexpr int kRowSums = kD / 8;  // tiles of 16 rows by 8 columns, as products leave them, side by side
constexpr int kBlockSums = 16;  // of each tile of rows, those that a block adds up and writes
constexpr int kSumsAtOnce = 4;  // of them, by a warp
constexpr int kAddingWarps = 3;  // beside the producer's
constexpr int kRowBox = 128, kKeyBox = 128;  // rows and keys that one copy brings
constexpr int kStatisticsRows = 128, kStatisticsThreads = 256;

// A tile in shared memory is made of chunks of 64 columns, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk, kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16, kDvSteps = (kDv + 15) / 16;  // steps of 16 along the columns

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using KeptKeys = Element[kBc * kChunk];
using PassingRows = Element[kPassingRows * kChunk];
// Tiles of rows [begin, end).
struct Tiles {
  int begin, end;

  __device__ __forceinline__ int count() const { return max(end - begin, 0); }
};

// Keys and values, and query rows and gradients of outputs that pass by, with what is known of the rows.
struct SharedStorage {
  alignas(1024) KeptKeys k[kDChunks];
  alignas(1024) KeptKeys v[kDvChunks];
  alignas(1024) PassingRows q[kQStages][kDChunks];
  alignas(1024) PassingRows dout[kDoutStages][kDvChunks];
  alignas(1024) PassingRows gradients[kDsStages][kBc / kChunk];  // of scores, a row for each query row
  // What each block sends of this block's share.
  alignas(128) float sums[kSumStages][kCluster][kBlockSums * 128];
  alignas(16) float lse[kQStages][kPassingRows], delta[kDoutStages][kPassingRows];
  // A stage is full once its bytes have arrived, and empty once every warp of consumers has done with it.
  Barrier kept_full, q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  // Sums are full once all blocks that have some have sent them. This block has room for those that it sends once all who
  // add them up have said so, which they do where it has some.
  Barrier kept_empty, sums_full[kSumStages], sums_room[kSumStages];
  Tiles walks[kAddingWarps][kCluster + 1];  // as each of the warps that add up knows them
};

static_assert(sizeof(SharedStorage) == 232448, "the size that pruning counted on");

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

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Brings the box at (x, row, head, batch) to shared memory, zeros where it lies outside; counts its bytes towards
// `barrier`.
__device__ __forceinline__ void tma_load(
    void* shared, const CUtensorMap* map, Barrier* barrier, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Brings bytes that lie side by side to shared memory; counts them towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Where `place` of this block's shared memory is in a block of the cluster.
__device__ __forceinline__ unsigned place_in_block(unsigned place, unsigned block) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
  return there;
}

// Sends four floats to a place there; counts their bytes, once they have come, towards `barrier`, a place of that block.
__device__ __forceinline__ void send_to_block(unsigned place, const float (&four)[4], unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :
               : "r"(place), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
               : "memory");
}

// Arrives at the barrier of a block of the cluster that is where this block's `barrier` is. It publishes no writes to
// that block: what it gives up has been read, and a release to the whole cluster would be a fence of all memory.
__device__ __forceinline__ void barrier_arrive_at(Barrier* barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(block)
      : "memory");
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

__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
__device__ __forceinline__ void forget(int& value) {
  asm volatile("" : "+r"(value));
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
// them from shared memory; sums have their weights in registers and what they weigh by rows.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_ss(
    float (&d)[64], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n64k16_bf16_rs_trans(
    float (&d)[32], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
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

__device__ __forceinline__ void wgmma_m64n64k16_bf16_ss_trans(
    float (&d)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
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

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
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
  return (args.seqlen_q + 127) / 128 * 128;
}
__device__ __forceinline__ float* lse_of(const AttentionArgs& args, int batch, int head) {
  return args.workspace + (static_cast<long long>(batch) * args.num_q_heads + head) * filled_rows(args);
}
__device__ __forceinline__ float* delta_of(const AttentionArgs& args, int batch, int head) {
  return lse_of(args, batch, head) +
         ((static_cast<long long>(args.batch)) * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64;
}
// Sums of the gradients of a head's queries, before scores' scale: tiles of 16 rows by 8 columns, as products leave them,
// where a cluster comes to keys of the head more than once.
__device__ __forceinline__ long long num_query_sums(const AttentionArgs& args) {
  return (args.seqlen_q + 15) / 16 * (16LL * 64);
}
__device__ __forceinline__ float* query_sums_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  return args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
         (batches * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
         (static_cast<long long>(batch) * args.num_q_heads + head) * num_query_sums(args);
}
// Where a tile of them begins for a lane, whose next numbers are neighbours.
__device__ __forceinline__ float* query_sum_at(float* sums, int row_tile, int column_tile) {
  const int lane = threadIdx.x % 32;
  return sums + (row_tile * 8LL + column_tile) * 128 + lane * 4;
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

// One step of products along columns, and of sums.
__device__ __forceinline__ void multiply(
    float (&s)[64], unsigned long long a, unsigned long long b, bool accumulate) {
  wgmma_m64n128k16_bf16_ss(s, a, b, accumulate);
}
__device__ __forceinline__ void multiply(float (&sum)[32], const unsigned (&a)[4], unsigned long long b) {
  wgmma_m64n64k16_bf16_rs_trans(sum, a, b, true);
}

// Starts the products of 64 rows that stay with those that pass by, over all columns.
template <int steps, typename Kept, typename Passing, int n>
__device__ __forceinline__ void start_products(float (&s)[n], unsigned long long kept, unsigned long long passing) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    multiply(s, step_of_columns<Kept>(kept, step), step_of_columns<Passing>(passing, step), step > 0);
  }
  wgmma_commit();
}

// Starts to add what passes by to sums, by the weights of sixteen rows of it a step.
template <int steps, int n>
__device__ __forceinline__ void start_sums(
    float (&sum)[n], const unsigned (&weights)[steps][4], unsigned long long passing) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) multiply(sum, weights[step], step_of_keys(passing, step));
  wgmma_commit();
}

// Weights as operands of sixteen rows that pass by each, as products leave them.
template <int n>
__device__ __forceinline__ void pack_weights(const float (&s)[n], unsigned (&packed)[n / 8][4]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) packed[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}

// Starts to bring `rows` rows of an array from `first` on, all columns, by boxes of `box` rows, counting their bytes
// towards `full`; zeros where there are none.
template <int rows, int box, int chunks>
__device__ __forceinline__ void load_rows(
    Element (*tile)[rows * kChunk], const CUtensorMap* map, Barrier* full, int first, int head, int batch) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
    for (int row = 0; row < rows; row += box) {
      tma_load(tile[chunk] + row * kChunk, map, full, chunk * kChunk, first + row, head, batch);
    }
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

// Four neighbouring lanes have each a part of four chunks: gives each all parts of one.
__device__ __forceinline__ uint4 exchange_quarters(const unsigned (&part)[4]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
  unsigned all[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? part[i] : part[i + 1], 1);
    all[i] = odd ? other : part[i];
    all[i + 1] = odd ? part[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? all[i] : all[i + 2], 2);
    all[i] = upper ? other : all[i];
    all[i + 2] = upper ? all[i + 2] : other;
  }
  return make_uint4(all[0], all[1], all[2], all[3]);
}

// Writes a thread's part of 64 rows, from `first_row` on and before `end`, times a factor: eight columns at once, and of
// the last ones two where there are not four times eight.
template <int n>
__device__ __forceinline__ void write_rows(
    Element* array, long long stride, int first_row, int end, const float (&sum)[n], float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 16 * warp + lane / 4 + 8 * h;
    Element* const target = array + row * stride;
#pragma unroll
    for (int i = 2 * h; i + 12 < n; i += 16) {
      const unsigned parts[4] = {
          pack(sum[i] * factor, sum[i + 1] * factor), pack(sum[i + 4] * factor, sum[i + 5] * factor),
          pack(sum[i + 8] * factor, sum[i + 9] * factor), pack(sum[i + 12] * factor, sum[i + 13] * factor)};
      const uint4 columns = exchange_quarters(parts);
      if (row < end) *reinterpret_cast<uint4*>(target + (i / 4 + lane % 4) * 8) = columns;
    }
#pragma unroll
    for (int i = n / 16 * 16 + 2 * h; i < n; i += 4) {
      const unsigned two = pack(sum[i] * factor, sum[i + 1] * factor);
      if (row < end) *reinterpret_cast<unsigned*>(target + i / 4 * 8 + lane % 4 * 2) = two;
    }
  }
}

// Brings a consumer's gradients of scores to shared memory, where a row has those of 64 keys.
__device__ __forceinline__ void store_gradients(
    Element* tile, const unsigned (&gradients)[kPassingRows / 16][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const int row = lane / 16 * 8 + lane % 8;  // of the sixteen of a step
  const int piece = (2 * warp + lane / 8 % 2) ^ row % 8;  // eight keys
#pragma unroll
  for (int step = 0; step < kPassingRows / 16; ++step) {
    stmatrix_x4_trans(tile + (16 * step + row) * kChunk + piece * 8, gradients[step]);
  }
}

// Starts what all keys of the block make of the gradients of a consumer's share of rows and columns.
__device__ __forceinline__ void start_shares(
    float (&shares)[kShareTiles][kShareColumns / 2], unsigned long long gradients, unsigned long long keys) {
  constexpr int kTile = 64 * kChunk * sizeof(Element) >> 4;  // as descriptors count
  wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kShareTiles; ++tile) {
#pragma unroll
    for (int step = 0; step < kBc / 16; ++step) {
      wgmma_m64n64k16_bf16_ss_trans(
          shares[tile], step_of_columns<PassingRows>(gradients, step) + tile * kTile, step_of_keys(keys, step), step > 0);
    }
  }
  wgmma_commit();
}

// What a cluster takes in one turn: kClusterKeys neighbouring keys of a head.
struct Turn {
  int batch, kv_head, first_key;
  bool is_first, is_last;  // of a head

  __device__ __forceinline__ Turn(const AttentionArgs& args, int number) {
    const int of_head = turns_of_head(args), nth_head = number / of_head, nth = number - nth_head * of_head;
    batch = nth_head / args.num_kv_heads, kv_head = nth_head - batch * args.num_kv_heads;
    first_key = nth * kClusterKeys;
    is_first = nth == 0, is_last = nth == of_head - 1;
  }

  // Without keys, too, there are gradients of queries to write.
  static __device__ __forceinline__ int turns_of_head(const AttentionArgs& args) {
    return max(1, (args.seqlen_k + kClusterKeys - 1) / kClusterKeys);
  }
  // The cluster's turns are [first, end).
  static __device__ __forceinline__ int first(const AttentionArgs& args) {
    return int(blockIdx.x) / kCluster * kHeadsPerBlock * turns_of_head(args);
  }
  static __device__ __forceinline__ int end(const AttentionArgs& args) {
    const int heads = (int(blockIdx.x) / kCluster + 1) * kHeadsPerBlock;
    return min(heads, args.batch * args.num_kv_heads) * turns_of_head(args);
  }
};

// Those of which some row sees some of a block's keys.
__device__ __forceinline__ Tiles tiles_of(const AttentionArgs& args, int batch, int first_key) {
  const int end_key = min(first_key + kBc, args.seqlen_k);
  int first_row = 0, end_row = 0;
  if (first_key < end_key) find_rows(args, batch, first_key, end_key, first_row, end_row);
  if (first_row >= end_row) return {0x7fffffff, 0};
  return {first_row / kPassingRows, (end_row + kPassingRows - 1) / kPassingRows};
}

// The same of a block of the cluster in each lane.
__device__ __forceinline__ Tiles tiles_of_blocks(const AttentionArgs& args, const Turn& turn) {
  return tiles_of(args, turn.batch, turn.first_key + int(threadIdx.x) % kCluster * kBc);
}

__device__ __forceinline__ Tiles of_lane(const Tiles& tiles, int lane) {
  return {__shfl_sync(0xffffffffu, tiles.begin, lane), __shfl_sync(0xffffffffu, tiles.end, lane)};
}

// From the first that some block walks to the last.
__device__ __forceinline__ Tiles tiles_of_cluster(Tiles tiles) {
#pragma unroll
  for (int bit = 1; bit < kCluster; bit *= 2) {
    tiles.begin = min(tiles.begin, __shfl_xor_sync(0xffffffffu, tiles.begin, bit));
    tiles.end = max(tiles.end, __shfl_xor_sync(0xffffffffu, tiles.end, bit));
  }
  return tiles;
}

// Those whose gradients are written or left in memory: of all rows, for some see no keys, where gradients begin or end.
__device__ __forceinline__ Tiles tiles_to_add(const AttentionArgs& args, const Turn& turn, Tiles of_block) {
  if (turn.is_first || turn.is_last) return {0, (args.seqlen_q + kPassingRows - 1) / kPassingRows};
  return tiles_of_cluster(of_block);
}

// Where a warp stands that sends sums. All blocks count the same steps: tiles of rows, whether or not they have some.
struct SumsPipe {
  int step = 0;
  unsigned phases = 0;  // of room, a bit for each stage

  // Waits until all blocks have room for the step's sums, and goes on. Returns their stage.
  __device__ __forceinline__ int find_room(SharedStorage& smem) {
    const int stage = step++ % kSumStages;
    barrier_wait(&smem.sums_room[stage], phases >> stage & 1);
    phases ^= 1u << stage;
    return stage;
  }
};

// Sends a warp's share of a tile's sums, once it is made, to the blocks that add it up: of every 64 rows to one.
__device__ __forceinline__ void send_shares(
    SharedStorage& smem, SumsPipe& pipe, float (&shares)[kShareTiles][kShareColumns / 2], int first_row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const int stage = pipe.find_room(smem);
  const unsigned full = shared_address(&smem.sums_full[stage]);
  const unsigned all = shared_address(smem.sums[stage][blockIdx.x % kCluster] + lane * 4);
#pragma unroll
  for (int tile = 0; tile < kShareTiles; ++tile) {
    hold(shares[tile]);
    const int first = (first_row / 16 + 4 * tile + warp) * kRowSums;  // of the tile of rows
    const unsigned block = first / kBlockSums, there = place_in_block(all + first % kBlockSums * 512, block);
    const unsigned full_there = place_in_block(full, block);
#pragma unroll
    for (int i = 0; i < kShareColumns / 2; i += 4) {
      const float four[4] = {shares[tile][i], shares[tile][i + 1], shares[tile][i + 2], shares[tile][i + 3]};
      send_to_block(there + i * 128, four, full_there);
    }
  }
}

// A tile of rows of whose gradients this block makes a share, of what keys of a turn add to them.
struct Step {
  int turn, head, tile;
  unsigned senders;  // of sums, a bit for each block of the cluster
};

// The cluster's steps, one after the other. A warp that adds up has few registers: shared memory keeps which tiles each
// block walks in a turn and, behind these, which there are to add.
struct Steps {
  Tiles (&walks)[kCluster + 1];
  int turn, head = 0, tile = 0;

  __device__ __forceinline__ Steps(const AttentionArgs& args, Tiles (&walks)[kCluster + 1])
      : walks(walks), turn(Turn::first(args) - 1) {
    walks[kCluster] = {0, 0};
    __syncwarp();
  }

  // The next one; of turn Turn::end behind the last.
  __device__ __forceinline__ Step next(const AttentionArgs& args) {
    const int lane = threadIdx.x % 32, group = args.num_q_heads / args.num_kv_heads;
    for (++tile; tile >= walks[kCluster].end; tile = walks[kCluster].begin) {
      if (++head % group != 0) continue;
      if (++turn >= Turn::end(args)) return {turn, 0, 0, 0};
      const Turn taken(args, turn);
      head = taken.kv_head * group;
      const Tiles of_block = tiles_of_blocks(args, taken), all = tiles_to_add(args, taken, of_block);
      __syncwarp();
      if (lane <= kCluster) walks[lane] = lane < kCluster ? of_block : all;
      __syncwarp();
    }
    const Tiles of_block = walks[lane % kCluster];
    const bool sends = lane < kCluster && tile >= of_block.begin && tile < of_block.end;
    return {turn, head, tile, __ballot_sync(0xffffffffu, sends)};
  }
};

// Tells those that have sums for a step that this block has room for them, as far as this warp is concerned.
__device__ __forceinline__ void make_room(SharedStorage& smem, const Step& step, int stage) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // all its lanes have read what was there
  if (step.senders >> lane & 1) barrier_arrive_at(&smem.sums_room[stage], lane);
}

// Adds up this block's share of a tile of rows, in the order of keys: what came before in memory, and what has been sent.
// Then these are gradients, or remain in memory for the keys to come.
__device__ __forceinline__ void add_up(
    const AttentionArgs& args, const Step& step, const float (&sent)[kCluster][kBlockSums * 128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int n = (warp - 1) * kSumsAtOnce; n < kBlockSums; n += kAddingWarps * kSumsAtOnce) {
    const int first = int(blockIdx.x) % kCluster * kBlockSums + n;
    const int row_tile = step.tile * (kPassingRows / 16) + first / kRowSums, column_tile = first % kRowSums;
    if (16 * row_tile >= args.seqlen_q) continue;
    int number = step.turn;
    forget(number);  // addresses of a head would take registers from one tile of sums to the next
    const Turn turn(args, number);
    float* const place = query_sum_at(query_sums_of(args, turn.batch, step.head), row_tile, column_tile);
    float sum[4 * kSumsAtOnce] = {};
    const auto add = [&](const float* first_of_lane) {
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(first_of_lane + i * 128);
        sum[4 * i] += four.x, sum[4 * i + 1] += four.y, sum[4 * i + 2] += four.z, sum[4 * i + 3] += four.w;
      }
    };
    if (!turn.is_first) add(place);
#pragma unroll
    for (int block = 0; block < kCluster; ++block) {
      if (step.senders >> block & 1) add(sent[block] + n * 128 + lane * 4);
    }
    if (turn.is_last) {
      Element* const columns =
          args.dq + turn.batch * args.dq_stride_batch + step.head * args.dq_stride_head + column_tile * 8;
      write_rows(columns, args.dq_stride_row, 16 * (row_tile - warp), args.seqlen_q, sum, args.scale);
    } else {
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) {
        reinterpret_cast<float4*>(place)[i * 32] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
      }
    }
  }
}

// The sum of o * gradient of a row that four lanes read, each 8 of 32 columns: for the one of them that has it. Tensor cores
// multiply a warp's eight rows of outputs with all eight of gradients, and of that the diagonal is wanted.
__device__ __forceinline__ float product_of_rows(const Element* o, const Element* gradient) {
  const int lane = threadIdx.x % 4;
  float products[4] = {};
#pragma unroll
  for (int first = 0; first < kDv; first += 32) {
    const int x = first + 8 * lane;
    const uint4 a = *reinterpret_cast<const uint4*>(o + x);
    const uint4 b = *reinterpret_cast<const uint4*>(gradient + x);
    // Columns come in any order, the same of both; of the outputs' other eight rows nothing is asked.
    const unsigned factors[2][4] = {{a.x, 0, a.y, 0}, {a.z, 0, a.w, 0}}, others[2][2] = {{b.x, b.y}, {b.z, b.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_m16n8k16_bf16(products, factors[i], others[i]);
  }
  return threadIdx.x / 4 % 2 ? products[1] : products[0];
}

// Whether that is the thread's.
__device__ __forceinline__ bool has_sum() { return threadIdx.x % 4 == threadIdx.x % 32 / 8; }

// Leaves of each row its log-sum-exp and the sum of dout * o, less the gradient of the log-sum-exp; 4 lanes do a row.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    attention_bf16_d64_backward_statistics(const AttentionArgs args) {
  let_next_launch_begin();

  constexpr int kLanes = 4, kRowsAtOnce = kStatisticsThreads / kLanes;
  const int tiles = (args.seqlen_q + kStatisticsRows - 1) / kStatisticsRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int lane = int(threadIdx.x) % kLanes, end_row = min((tile + 1) * kStatisticsRows, args.seqlen_q);
  float totals[kStatisticsRows / kRowsAtOnce];
#pragma unroll
  for (int n = 0; n < kStatisticsRows; n += kRowsAtOnce) {
    // In place of rows that are not there the last one: no branch is between reads, which are all under way at once.
    const int row = min(tile * kStatisticsRows + n + int(threadIdx.x) / kLanes, end_row - 1);
    const __nv_bfloat16* const o =
        args.o + batch * args.o_stride_batch + head * args.o_stride_head + row * args.o_stride_row;
    const __nv_bfloat16* const gradient =
        args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head + row * args.dout_stride_row;
    totals[n / kRowsAtOnce] = product_of_rows(o, gradient);
  }
#pragma unroll
  for (int n = 0; n < kStatisticsRows; n += kRowsAtOnce) {
    const int row = tile * kStatisticsRows + n + int(threadIdx.x) / kLanes;
    const bool is_there = row < end_row;
    const float sum = totals[n / kRowsAtOnce];
    if (!is_there) continue;
    if (row == args.seqlen_q - 1) {
      for (int filling = args.seqlen_q + lane; filling < filled_rows(args); filling += kLanes) {
        lse_of(args, batch, head)[filling] = kInfinity;
        delta_of(args, batch, head)[filling] = 0.0f;
      }
    }
    if (!has_sum()) continue;
    const long long place = (static_cast<long long>(batch) * args.num_q_heads + head) * args.seqlen_q + row;
    const float lse = args.lse[place];
    lse_of(args, batch, head)[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
    delta_of(args, batch, head)[row] = sum - (args.dlse != nullptr ? args.dlse[place] : 0.0f);
  }
}

// Gradients of keys, values and queries: a cluster takes heads of keys one after the other, of which each block keeps kBc
// keys at a time, 64 for each consumer, and the rows that see some pass by.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    attention_bf16_d64_backward_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int group = args.num_q_heads / args.num_kv_heads, first_own = int(blockIdx.x) % kCluster * kBc;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&smem.kept_full, 1);
    barrier_init(&smem.kept_empty, kArrivals * 4 * kConsumers);
    for (int i = 0; i < kQStages; ++i) {
      barrier_init(&smem.q_full[i], 1);
      barrier_init(&smem.q_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kDoutStages; ++i) {
      barrier_init(&smem.dout_full[i], 1);
      barrier_init(&smem.dout_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kSumStages; ++i) {
      barrier_init(&smem.sums_full[i], 1);
      barrier_init(&smem.sums_room[i], kAddingWarps * kCluster);
    }
    fence_barrier_init();
  }
  wait_for_earlier_launches();
  cluster_sync();

  PipelineState<kQStages> q_pipe;
  PipelineState<kDoutStages> dout_pipe;
  unsigned kept_phase = 0;
  if (warp < 4) {
    give_registers<56>();
    if (warp > 0) {
      Steps steps(args, smem.walks[warp - 1]);
      unsigned phases = 0;  // of sums, a bit for each stage
      int stage = 0;
      Step next = steps.next(args);
      make_room(smem, next, stage);
#pragma unroll 1
      while (true) {
        const Step step = next;
        if (step.turn >= Turn::end(args)) break;
        next = steps.next(args);
        make_room(smem, next, stage ^ 1);
        if (step.senders != 0) {
          if (threadIdx.x == 32) {
            barrier_expect(&smem.sums_full[stage], __popc(step.senders) * sizeof(smem.sums[0][0]));
          }
          barrier_wait(&smem.sums_full[stage], phases >> stage & 1);
          phases ^= 1u << stage;
        }
        add_up(args, step, smem.sums[stage]);
        stage ^= 1;
      }
    } else if (elect_one()) {
      prefetch_map(&maps.k);
      prefetch_map(&maps.v);
      prefetch_map(&maps.q);
      prefetch_map(&maps.dout);
#pragma unroll 1
      for (int number = Turn::first(args); number < Turn::end(args); ++number) {
        const Turn turn(args, number);
        const int first_key = turn.first_key + first_own, batch = turn.batch;
        const Tiles tiles = tiles_of(args, batch, first_key);
        bool is_kept = false;
#pragma unroll 1
        for (int head = turn.kv_head * group; head < (turn.kv_head + 1) * group; ++head) {
#pragma unroll 1
          for (int n = tiles.begin; n < tiles.end; ++n) {
            const int first = n * kPassingRows;
            Barrier* const q_full = &smem.q_full[q_pipe.stage];
            barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
            barrier_expect(q_full, sizeof(smem.q[0]) + sizeof(smem.lse[0]));
            load_rows<kPassingRows, kRowBox, kDChunks>(smem.q[q_pipe.stage], &maps.q, q_full, first, head, batch);
            bulk_load(smem.lse[q_pipe.stage], lse_of(args, batch, head) + first, sizeof(smem.lse[0]), q_full);
            q_pipe.advance();
            if (!is_kept) {
              barrier_wait(&smem.kept_empty, kept_phase ^ 1);
              barrier_expect(&smem.kept_full, sizeof(smem.k) + sizeof(smem.v));
              load_rows<kBc, kKeyBox, kDChunks>(smem.k, &maps.k, &smem.kept_full, first_key, turn.kv_head, batch);
              load_rows<kBc, kKeyBox, kDvChunks>(smem.v, &maps.v, &smem.kept_full, first_key, turn.kv_head, batch);
              kept_phase ^= 1;
              is_kept = true;
            }
            Barrier* const dout_full = &smem.dout_full[dout_pipe.stage];
            barrier_wait(&smem.dout_empty[dout_pipe.stage], dout_pipe.phase ^ 1);
            barrier_expect(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
            load_rows<kPassingRows, kRowBox, kDvChunks>(
                smem.dout[dout_pipe.stage], &maps.dout, dout_full, first, head, batch);
            bulk_load(smem.delta[dout_pipe.stage], delta_of(args, batch, head) + first, sizeof(smem.delta[0]), dout_full);
            dout_pipe.advance();
          }
        }
      }
    }
  } else {
    take_registers<224>();
    SumsPipe sums_pipe;
    int ds_stage = 0;
#pragma unroll 1
    for (int number = Turn::first(args); number < Turn::end(args); ++number) {
      const Turn turn(args, number);
      const int batch = turn.batch, kv_head = turn.kv_head;
      const int first_key = turn.first_key + first_own;
      const Tiles of_blocks = tiles_of_blocks(args, turn), all = tiles_to_add(args, turn, of_blocks);
      const Tiles tiles = of_lane(of_blocks, int(blockIdx.x) % kCluster);
      const int of_head = tiles.count(), first_row = of_head > 0 ? tiles.begin * kPassingRows : 0;
      // Of each head's steps as many come before those of this block, and as many behind.
      const int before = of_head > 0 ? tiles.begin - all.begin : all.count(), behind = all.count() - of_head - before;
      const int consumer = warp / 4 - 1, lane = threadIdx.x % 32;
      const int own = consumer * 64;  // the consumer's first key here
      const int own_key = first_key + own + warp % 4 * 16 + lane / 4;  // the thread's first
      const unsigned long long k_desc = descriptor(smem.k[0] + own * kChunk);
      const unsigned long long v_desc = descriptor(smem.v[0] + own * kChunk);
      const float scale = args.scale * kLog2e;
      float sum_k[kD / 2] = {}, sum_v[kDv / 2] = {};
      const int share_row = consumer * kShareTiles * 64;  // a consumer's share of each tile of rows begins there
      const unsigned long long all_keys = descriptor(smem.k, sizeof(KeptKeys));

      if (of_head > 0) {
        barrier_wait(&smem.kept_full, kept_phase);
      }
#pragma unroll 1
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        sums_pipe.step += before;
#pragma unroll 1
        for (int n = 0, first = first_row; n < of_head; ++n, first += kPassingRows) {
          const unsigned long long q_desc = descriptor(smem.q[q_pipe.stage], sizeof(PassingRows));
          const unsigned long long dout_desc = descriptor(smem.dout[dout_pipe.stage], sizeof(PassingRows));
          float s[kPassingRows / 2], gradient[kPassingRows / 2];
          unsigned weights[kPassingRows / 16][4], gradients[kPassingRows / 16][4];
          barrier_wait(&smem.q_full[q_pipe.stage], q_pipe.phase);
          start_products<kDSteps, KeptKeys, PassingRows>(s, k_desc, q_desc);
          barrier_wait(&smem.dout_full[dout_pipe.stage], dout_pipe.phase);
          start_products<kDvSteps, KeptKeys, PassingRows>(gradient, v_desc, dout_desc);
          wgmma_wait<0>();
          hold(s);
          hold(gradient);
          const auto weigh_all = [&](auto masked) {
            constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
            for (int i = 0; i < kPassingRows / 2; i += 4) {
              const int column = i * 2 + lane % 4 * 2;
              const float2 lse = *reinterpret_cast<const float2*>(smem.lse[q_pipe.stage] + column);
              const float2 delta = *reinterpret_cast<const float2*>(smem.delta[dout_pipe.stage] + column);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int row = first + column + e;
                const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                  const int at = i + 2 * h + e, key = own_key + 8 * h;
                  weigh<kMasked>(s[at], gradient[at], args, batch, head, row, key, seen, scale, e ? lse.y : lse.x,
                                 e ? delta.y : delta.x);
                }
              }
            }
          };
          if (is_partial(args, batch, first, first + kPassingRows, first_key, first_key + kBc)) {
            weigh_all(Constant<true>{});
          } else {
            weigh_all(Constant<false>{});
          }
          pack_weights(s, weights);
          pack_weights(gradient, gradients);
          start_sums(sum_v, weights, dout_desc);
          store_gradients(smem.gradients[ds_stage][consumer], gradients);
          fence_proxy_async();
          named_barrier_sync(kGradientsBarrier, kConsumers * kWarpgroup);
          float shares[kShareTiles][kShareColumns / 2];
          start_shares(shares, descriptor(smem.gradients[ds_stage][0] + share_row * kChunk), all_keys);

          start_sums(sum_k, gradients, q_desc);
          wgmma_wait<2>();
          release(&smem.dout_empty[dout_pipe.stage]);
          dout_pipe.advance();
          wgmma_wait<1>();
          send_shares(smem, sums_pipe, shares, share_row);
          ds_stage ^= 1;

          wgmma_wait<0>();
          release(&smem.q_empty[q_pipe.stage]);
          q_pipe.advance();
        }
        sums_pipe.step += behind;
      }
      hold(sum_k);
      hold(sum_v);
      if (of_head > 0) {
        release(&smem.kept_empty);
        kept_phase ^= 1;
      }
      int same = number;
      forget(same);  // until here registers are for what is added up
      const Turn made(args, same);
      const int made_key = made.first_key + first_own + own, end_of_made = min(made_key + 64, args.seqlen_k);
      write_rows(args.dk + made.batch * args.dk_stride_batch + made.kv_head * args.dk_stride_head, args.dk_stride_row, made_key,
                 end_of_made, sum_k, args.scale);
      write_rows(args.dv + made.batch * args.dv_stride_batch + made.kv_head * args.dv_stride_head, args.dv_stride_row, made_key,
                 end_of_made, sum_v, 1.0f);
    }
  }
  // Barriers are there until their block ends: not before all others have arrived at them for the last time.
  cluster_sync();
}

#ifndef __CUDACC_RTC__
// Describes an array of `sizes` (columns, rows, heads, batch) and `strides` (of rows, heads, batches) in elements,
// which is moved in boxes of `columns` by `rows`.
static cudaError_t encode_map(
    CUtensorMap* map, const Element* array, const long long (&sizes)[4], const long long (&strides)[3],
    unsigned columns, unsigned rows, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  // From the driver by name, so that nothing needs to be linked with it.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  // An array without rows is never read, but a map must be of something.
  const bool any_rows = sizes[1] > 0;
  cuuint64_t whole[4], stride_bytes[3];
  for (int i = 0; i < 4; ++i) whole[i] = i == 0 || any_rows ? sizes[i] : 1;
  // The stride of a dimension of one is never used, but must be one that the driver takes.
  for (int i = 0; i < 3; ++i) stride_bytes[i] = whole[i + 1] > 1 ? strides[i] * sizeof(Element) : 16;
  const cuuint32_t box[4] = {columns, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<Element*>(array), whole, stride_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_bf16_d64_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * ((seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 15) / 16 * 16) * 64 + 63) / 64 * 64);
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
      cudaFuncSetAttribute(attention_bf16_d64_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_statistics, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long blocks = kCluster * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  const bool any_keys = args->seqlen_k > 0;  // without, their arrays may be null
  TensorMaps maps;
  const cudaError_t q_status = encode_map(
      &maps.q, args->q, {kD, args->seqlen_q, args->num_q_heads, args->batch},
      {args->q_stride_row, args->q_stride_head, args->q_stride_batch}, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (q_status != cudaSuccess) return q_status;
  const cudaError_t dout_status = encode_map(
      &maps.dout, args->dout, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->dout_stride_row, args->dout_stride_head, args->dout_stride_batch}, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dout_status != cudaSuccess) return dout_status;
  const cudaError_t k_status = encode_map(
      &maps.k, any_keys ? args->k : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->k_stride_row, args->k_stride_head, args->k_stride_batch}, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const cudaError_t v_status = encode_map(
      &maps.v, any_keys ? args->v : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->v_stride_row, args->v_stride_head, args->v_stride_batch}, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (v_status != cudaSuccess) return v_status;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_kernel, *args, maps);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d64_backward(const AttentionArgs* args, cudaStream_t stream) {
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
  return cudaSuccess;
}
#endif
