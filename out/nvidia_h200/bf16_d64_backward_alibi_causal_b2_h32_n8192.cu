// attention_bf16_d64_backward_alibi: gradients of flash attention, bf16, head dim 64, tuned with a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Masks and scores: ALiBi. Their numbers and arrays are run-time arguments, too.
//
// Family wgmma-backward:
//   bc = 128                   keys that a block keeps, whose gradients it makes
//   apart = false              of 64 keys one warpgroup makes dv and another dk, which takes fewer registers
//   br = 128                   query rows that pass by them
//   schedule = ahead           when weights are made and multiplied: beside their gradients, after, or a tile ahead
//   parts = 2                  parts of them whose weights are made one behind the other
//   kept = registers           what products read from registers: values, or keys as well
//   q_stages = 2               tiles of queries in shared memory
//   dout_stages = 2            tiles of gradients of outputs in shared memory
//   dq_path = bulk             who makes queries' gradients: a launch, or blocks of keys by sums in memory
//   ds_stages = 2              tiles of gradients of scores in shared memory, where blocks of keys do
//   rows = 128                 query rows that a block of the other launch keeps
//   keys = 64                  keys that pass by them
//   k_stages = 2               tiles of keys in shared memory
//   v_stages = 2               tiles of values in shared memory
//   order = heaviest_first     blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds
//   meeting = late             when consumers await each other's gradients of scores: at once, or with other products begun
//   ranges = of_keys           what masks are told by: the keys that each row sees, or the rows that see each key
//   turns = free               tiles of keys that a block takes: one, or each so-manieth, or the next whenever it is free
//   far_keys = left_out        keys so far off that slopes leave them no weight: walked, or left out by lengths of rows
//
// Tuned with ALiBi.
//
// Measured on NVIDIA H200, batch 2, 32 heads, 8192 rows, with a causal mask, ALiBi: 1.659 ms (median), spread
// 0.1 %, 828.5 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64:
// 1.4e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c bf16_d64_backward_alibi_causal_b2_h32_n8192.cu
//     (-DFLASHGEN_CAUSAL=0 builds it with no causal mask)
//
// Regenerate:
//
//     flashgen emit bf16_d64_backward_alibi_causal_b2_h32_n8192.cu \
//         --device h200 --dtype bf16 --d 64 --backward --causal --alibi --batch 2 --heads 32 --seqlen 8192 \
//         --family wgmma-backward --set bc=128 --set apart=false --set br=128 --set schedule=ahead \
//         --set parts=2 --set kept=registers --set q_stages=2 --set dout_stages=2 --set dq_path=bulk \
//         --set ds_stages=2 --set rows=128 --set keys=64 --set k_stages=2 --set v_stages=2 \
//         --set order=heaviest_first --set meeting=late --set ranges=of_keys --set turns=free \
//         --set far_keys=left_out

#include <cuda_bf16.h>
#include <cuda.h>

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
  const float* slopes;  // (batch, num_q_heads) of f32
  float* workspace;  // for what launches leave each other
  float* dslopes;  // the gradient of slopes; null: not wanted
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long dout_stride_batch, dout_stride_head, dout_stride_row;
  long long dq_stride_batch, dq_stride_head, dq_stride_row;
  long long dk_stride_batch, dk_stride_head, dk_stride_row;
  long long dv_stride_batch, dv_stride_head, dv_stride_row;
  long long slopes_stride_0;
  long long dslopes_stride_0;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 336, "callers from other languages pack the arguments by hand");

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap q, dout, k, v, dk, dv;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 64, kDv = 64;  // head dims of keys and of values
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kBc = 128;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 128;  // query rows that pass by them at a time
constexpr int kParts = 2, kWeighedRows = kPassingRows / kParts;  // of them, which are weighed one behind the other
constexpr int kConsumers = 2;  // warpgroups that compute, beside the producer
constexpr int kThreads = 384;
constexpr int kMaxBlocks = 132;  // as many as run at once
constexpr int kQStages = 2, kDoutStages = 2;  // tiles of them in shared memory
constexpr int kDsStages = 2;  // tiles of gradients of scores in shared memory
constexpr int kShareTiles = 1, kShareColumns = 64;  // of queries' gradients, of 64 rows, by consumer
constexpr int kPostprocessRows = 64, kPostprocessThreads = 128;
constexpr int kRowBox = 128, kKeyBox = 128;  // rows and keys that one copy brings
constexpr int kStatisticsRows = 128, kStatisticsThreads = 256;

// A tile in shared memory is made of chunks of 64 columns, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk, kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16, kDvSteps = (kDv + 15) / 16;  // steps of 16 along the columns
constexpr int kPairThreads = 256;
constexpr int kPairRows = 64, kPairKeys = 64;  // of a tile of pairs whose gradients are made
constexpr int kPairColumns = 16;  // that are multiplied at a time

constexpr int kReachThreads = 128;  // of a block of the launches that find how far rows must look
constexpr int kLengthKeys = 64, kReachRows = 256;  // rows of keys, and of queries, of one of theirs
constexpr int kLongestOf = kLengthKeys * 32 / kReachThreads, kReachOf = kReachRows * 32 / kReachThreads;  // of a warp
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using KeptKeys = Element[kBc * kChunk];
using PassingRows = Element[kPassingRows * kChunk];
// Keys and values, and query rows and gradients of outputs that pass by, with what is known of the rows.
struct SharedStorage {
  alignas(1024) KeptKeys k[kDChunks];
  alignas(1024) KeptKeys v[kDvChunks];
  alignas(1024) PassingRows q[kQStages][kDChunks];
  alignas(1024) PassingRows dout[kDoutStages][kDvChunks];
  alignas(1024) PassingRows gradients[kDsStages][kBc / kChunk];  // of scores, a row for each query row
  // Sums on their way to memory, by warp.
  alignas(1024) float shares[kConsumers][4][kShareTiles][16 * kShareColumns];
  alignas(16) float lse[kQStages][kPassingRows], delta[kDoutStages][kPassingRows];
  // A stage is full once its bytes have arrived, and empty once every warp of consumers has done with it.
  Barrier kept_full, q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  Barrier gradients_full[kDsStages];  // once every warp of consumers has stored its own
  Barrier kept_empty;  // once every warp of consumers has read what it needs of keys and values
  Barrier next_full, next_empty;  // once the producer has told the next turn, and every warp of consumers has read it
  int next;
};

static_assert(sizeof(SharedStorage) == 199680, "the size that pruning counted on");

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

// Writes a box from shared memory to (x, row, head, batch), except for what lies outside.
__device__ __forceinline__ void tma_store(
    const CUtensorMap* map, const void* shared, int x, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(x), "r"(row), "r"(head), "r"(batch)
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

// Adds floats that lie side by side in shared memory to those in global memory, each at once for all who add to it.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until all but the last kGroups groups of this thread's stores have read what they store.
template <int kGroups>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
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

__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
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
__device__ __forceinline__ void wgmma_m64n64k16_bf16_ss(
    float (&d)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n64k16_bf16_rs(
    float (&d)[32], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
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

// Where the lengths of a head's keys are, of every kLongestOf rows the longest.
__device__ __forceinline__ float* key_lengths_of(const AttentionArgs& args, int batch, int kv_head) {
  const int num_lengths = (args.seqlen_k + kLongestOf - 1) / kLongestOf;
  const long long begin = ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
      ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
      ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 64 + 63) / 64 * 64 + 64;
  return args.workspace + begin + (1LL * batch * args.num_kv_heads + kv_head) * num_lengths;
}

// Where it is said how far from their places the rows of all heads that share keys must look for these.
__device__ __forceinline__ int* reach_of(const AttentionArgs& args, int batch, int kv_head) {
  const long long begin = ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
      ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
      ((1LL * args.batch) * args.num_q_heads * ((args.seqlen_q + 15) / 16 * 16) * 64 + 63) / 64 * 64 +
      ((1LL * args.batch) * args.num_kv_heads * ((args.seqlen_k + 15) / 16) + 63) / 64 * 64 + 64;
  return reinterpret_cast<int*>(args.workspace + begin) + batch * args.num_kv_heads + kv_head;
}

__device__ __forceinline__ float slopes_at(const AttentionArgs& args, int i0, int i1) {
  return __ldg(args.slopes + i0 * args.slopes_stride_0 + i1);
}

// What a row sees of the keys: [first_key_of, end_key_of), nothing where the one is not below the other.
__device__ __forceinline__ int first_key_of(const AttentionArgs& args, int batch, int row) {
  return 0;
}

__device__ __forceinline__ int end_key_of(const AttentionArgs& args, int batch, int row) {
  int end = args.seqlen_k;
  if (kCausal) end = min(end, row + args.seqlen_k - args.seqlen_q + 1);
  return max(0, end);
}

// What becomes of a scaled score, in powers of two.
__device__ __forceinline__ float change_score(
    const AttentionArgs& args, float score, int batch, int head, int row, int key) {
  return kLog2e * (score - slopes_at(args, batch, head) * float(abs(row + args.seqlen_k - args.seqlen_q - key)));
}

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

// The rows that see some of the keys [first_key, end_key) and are near enough for them to weigh anything: neighbours.
__device__ __forceinline__ void find_rows(
    const AttentionArgs& args, int batch, int kv_head, int first_key, int end_key, int& first_row, int& end_row) {
  first_row = first_row_that_ends(args, batch, first_key, 0, args.seqlen_q);
  end_row = first_row_that_begins(args, batch, end_key - 1, first_row, args.seqlen_q);
  const int reach = *reach_of(args, batch, kv_head), first_place = args.seqlen_k - args.seqlen_q;
  first_row = max(first_row, first_key - reach - first_place);
  end_row = max(first_row, min(end_row, end_key + reach - first_place));
}

// The rows that see a key, a predicate aside: none where it is not there.
struct RowRange {
  int begin, end;
};
// `first_row` and `end_row`: no others see it.
__device__ __forceinline__ RowRange rows_of(
    const AttentionArgs& args, int batch, int key, int first_row, int end_row) {
  const int begin = first_row_that_ends(args, batch, key, first_row, end_row);
  return {begin, first_row_that_begins(args, batch, key, begin, end_row)};
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
// Sums of the gradients of a head's queries, before scores' scale: tiles of 16 rows by 8 columns, as products leave them.
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

// Columns of rows and of keys, the rows of a column side by side.
struct PairTiles {
  alignas(16) float rows[kPairColumns][kPairRows + 4], keys[kPairColumns][kPairKeys + 4];
};

// Which rows and keys of a tile of pairs are a thread's: four of each, side by side.
__device__ __forceinline__ int pair_row_of(int i) { return int(threadIdx.x) / (kPairKeys / 4) * 4 + i; }
__device__ __forceinline__ int pair_key_of(int j) { return int(threadIdx.x) % (kPairKeys / 4) * 4 + j; }

// Products of rows and keys over all columns; those from `end_row` and `end_key` on are zeros.
template <int kColumns>
__device__ __forceinline__ void multiply_pairs(
    float (&product)[4][4], PairTiles& tiles, const __nv_bfloat16* rows, long long row_stride, int first_row, int end_row,
    const __nv_bfloat16* keys, long long key_stride, int first_key, int end_key) {
#pragma unroll
  for (int i = 0; i < 16; ++i) product[i / 4][i % 4] = 0.0f;
  for (int first = 0; first < kColumns; first += kPairColumns) {
    __syncthreads();  // nobody reads the last columns any more
    for (int n = threadIdx.x; n < kPairRows * kPairColumns; n += kPairThreads) {
      const int row = first_row + n / kPairColumns, x = first + n % kPairColumns;
      const bool inside = row < end_row && x < kColumns;
      tiles.rows[n % kPairColumns][n / kPairColumns] = inside ? __bfloat162float(rows[row * row_stride + x]) : 0.0f;
    }
    for (int n = threadIdx.x; n < kPairKeys * kPairColumns; n += kPairThreads) {
      const int key = first_key + n / kPairColumns, x = first + n % kPairColumns;
      const bool inside = key < end_key && x < kColumns;
      tiles.keys[n % kPairColumns][n / kPairColumns] = inside ? __bfloat162float(keys[key * key_stride + x]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < kPairColumns; ++x) {
      float row[4], key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        row[i] = tiles.rows[x][pair_row_of(i)];
        key[i] = tiles.keys[x][pair_key_of(i)];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) product[i][j] = fmaf(row[i], key[j], product[i][j]);
      }
    }
  }
}

// Finds the scaled scores of a thread's pairs, and the gradients of what became of them; false where no pair is seen.
__device__ __forceinline__ bool find_gradients(
    float (&scaled)[4][4], float (&gradient)[4][4], PairTiles& tiles, const AttentionArgs& args, int batch, int head,
    int first_row, int first_key) {
  const int end_row = min(first_row + kPairRows, args.seqlen_q), end_key = min(first_key + kPairKeys, args.seqlen_k);
  if (first_row >= end_row || first_key >= end_key) return false;
  if (end_key_of(args, batch, end_row - 1) <= first_key || first_key_of(args, batch, first_row) >= end_key) return false;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  multiply_pairs<kD>(
      scaled, tiles, args.q + batch * args.q_stride_batch + head * args.q_stride_head, args.q_stride_row, first_row, end_row,
      args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head, args.k_stride_row, first_key, end_key);
  multiply_pairs<kDv>(
      gradient, tiles, args.dout + batch * args.dout_stride_batch + head * args.dout_stride_head, args.dout_stride_row,
      first_row, end_row, args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head, args.v_stride_row, first_key,
      end_key);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + pair_row_of(i), a_row = min(row, end_row - 1);  // arrays are read at no others
    const KeyRange seen = keys_of(args, batch, row);
    const float lse = lse_of(args, batch, head)[a_row], delta = delta_of(args, batch, head)[a_row];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = first_key + pair_key_of(j), a_key = min(key, end_key - 1);
      scaled[i][j] *= args.scale;
      const bool sees_key = key >= seen.begin && key < seen.end;
      const float weight = sees_key ? exp2f(change_score(args, scaled[i][j], batch, head, a_row, a_key) - lse) : 0.0f;
      gradient[i][j] = weight == 0.0f ? 0.0f : weight * (gradient[i][j] - delta);
    }
  }
  return true;
}

// A part of what there is along an axis: one, or all where a sum is over them.
struct Span {
  int begin, end;
};
__device__ __forceinline__ Span span_of(bool is_own, int one, int count) {
  return is_own ? Span{one, one + 1} : Span{0, count};
}

// How fast a score rises with slopes[b, h].
__device__ __forceinline__ float rate_of_slopes(
    const AttentionArgs& args, float score, int batch, int head, int row, int key) {
  return -float(abs(row + args.seqlen_k - args.seqlen_q - key));
}

// Turns a product of a row and a key into its weight, and the gradient of the weight into that of the product, but for
// the scale of scores. `masked`: the row may not see the key, and then is none of those that `see` it.
template <bool masked>
__device__ __forceinline__ void weigh(
    float& s, float& gradient, const AttentionArgs& args, int batch, int head, int row, int key, RowRange see,
    float scale, float lse, float delta) {
  const float scaled = s * args.scale;
  // Arrays are read at no others.
  const int a_row = masked ? min(row, args.seqlen_q - 1) : row, a_key = masked ? min(key, args.seqlen_k - 1) : key;
  s = exp2f(change_score(args, scaled, batch, head, a_row, a_key) - lse);
  if (masked) {
    const bool sees_key = row >= see.begin && row < see.end;
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
    float (&s)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  wgmma_m64n64k16_bf16_ss(s, a, b, accumulate);
}
__device__ __forceinline__ void multiply(
    float (&s)[32], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  wgmma_m64n64k16_bf16_rs(s, a, b, accumulate);
}
__device__ __forceinline__ void multiply(float (&sum)[32], const unsigned (&a)[4], unsigned long long b) {
  wgmma_m64n64k16_bf16_rs_trans(sum, a, b, true);
}

// Starts the products of 64 rows that stay with those that pass by, over all columns.
template <int steps, typename Kept, typename Passing, int n>
__device__ __forceinline__ void start_products(float (&s)[n], unsigned long long kept, unsigned long long passing) {
  forget(kept);  // descriptors of all steps would be many
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    multiply(s, step_of_columns<Kept>(kept, step), step_of_columns<Passing>(passing, step), step > 0);
  }
  wgmma_commit();
}

// The same of rows that stay in registers.
template <typename Passing, int steps, int n>
__device__ __forceinline__ void start_products(
    float (&s)[n], const unsigned (&kept)[steps][4], unsigned long long passing) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) multiply(s, kept[step], step_of_columns<Passing>(passing, step), step > 0);
  wgmma_commit();
}

// A warp's sixteen of 64 rows, from `first` on, as operands of sixteen columns each.
template <int steps>
__device__ __forceinline__ void take_kept(unsigned (&kept)[steps][4], const KeptKeys* tile, int first) {
  const int lane = threadIdx.x % 32, row = first + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    ldmatrix_x4(kept[step], tile[step / 4] + row * kChunk + ((step % 4 * 2 + lane / 16) ^ row % 8) * 8);
  }
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

// The keys that a block takes in a turn, of a head, and the rows that see some of them: so many tiles of each query head.
struct Turn {
  int batch, kv_head, first_key, end_key, first_row, end_row, of_head;

  __device__ __forceinline__ Turn(const AttentionArgs& args, int number) {
    const int tiles = tiles_of_keys(args);
    const int all_heads = args.batch * args.num_kv_heads;
    first_key = number / all_heads * kBc;
    kv_head = number % args.num_kv_heads;
    batch = number % all_heads / args.num_kv_heads;
    end_key = min(first_key + kBc, args.seqlen_k);
    find_rows(args, batch, kv_head, first_key, end_key, first_row, end_row);
    first_row -= first_row % kPassingRows;
    of_head = first_row < end_row ? (end_row - first_row + kPassingRows - 1) / kPassingRows : 0;
  }

  static __device__ __forceinline__ int tiles_of_keys(const AttentionArgs& args) {
    return (args.seqlen_k + kBc - 1) / kBc;
  }
  static __device__ __forceinline__ int count(const AttentionArgs& args) {
    return args.batch * args.num_kv_heads * tiles_of_keys(args);
  }
};

// How many turns have been taken beside the first ones of all blocks: behind the sums of all heads.
__device__ __forceinline__ int* turns_taken(const AttentionArgs& args) {
  return reinterpret_cast<int*>(query_sums_of(args, args.batch, 0));
}

// Stores a warp's part of gradients, of sixteen rows and times a factor, as the copy engine shall take it: `place_of` has
// the place of eight columns of a row.
template <int n, typename Place>
__device__ __forceinline__ void store_rows(const float (&sum)[n], float factor, Place place_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < n; i += 8) {
    unsigned m[4];
#pragma unroll
    for (int j = 0; j < 4 && i + 2 * j < n; ++j) m[j] = pack(sum[i + 2 * j] * factor, sum[i + 2 * j + 1] * factor);
    // Lanes 0 to 15 name the rows of one column of eight, the others those of the next.
    Element* const place = place_of(lane % 16, i / 4 + lane / 16);
    stmatrix_x4(place, m);
  }
}

// Has the copy engine write a warp's sixteen rows of gradients, times a factor, from `first_row` on, by way of shared
// memory that only the warp has need of: chunks of columns, which begin so many elements apart.
template <int n>
__device__ __forceinline__ void send_rows(
    const CUtensorMap* map, Element* staged, int apart, const float (&sum)[n], float factor, int first_row, int head,
    int batch) {
  const bool sends = threadIdx.x % 32 == 0;
  if (sends) tma_wait_read<0>();  // what was there has gone
  __syncwarp();
  store_rows(sum, factor, [&](int row, int piece) {
    return staged + piece / 8 * apart + row * kChunk + (piece % 8 ^ row % 8) * 8;
  });
  fence_proxy_async();
  __syncwarp();
  if (!sends) return;
#pragma unroll
  for (int column = 0; column < 2 * n; column += kChunk) {
    tma_store(map, staged + column / kChunk * apart, column, first_row, head, batch);
  }
  tma_commit();
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
    Element* tile, const unsigned (&gradients)[kWeighedRows / 16][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const int row = lane / 16 * 8 + lane % 8;  // of the sixteen of a step
  const int piece = (2 * warp + lane / 8 % 2) ^ row % 8;  // eight keys
#pragma unroll
  for (int step = 0; step < kWeighedRows / 16; ++step) {
    stmatrix_x4_trans(tile + (16 * step + row) * kChunk + piece * 8, gradients[step]);
  }
}

// Starts what all keys of the block make of the gradients of a consumer's share of rows and columns.
__device__ __forceinline__ void start_shares(
    float (&shares)[kShareTiles][kShareColumns / 2], unsigned long long gradients, unsigned long long keys) {
  constexpr int kTile = 64 * kChunk * sizeof(Element) >> 4;  // as descriptors count
  forget(keys);
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

// Brings a warp's share to shared memory, as it shall lie in memory, once it is made.
__device__ __forceinline__ void stage_shares(
    float (&staged)[kShareTiles][16 * kShareColumns], float (&shares)[kShareTiles][kShareColumns / 2]) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) tma_wait_read<0>();  // what was there has gone
  __syncwarp();
#pragma unroll
  for (int tile = 0; tile < kShareTiles; ++tile) {
    hold(shares[tile]);
#pragma unroll
    for (int i = 0; i < kShareColumns / 2; i += 4) {
      *reinterpret_cast<float4*>(staged[tile] + i * 32 + lane * 4) =
          make_float4(shares[tile][i], shares[tile][i + 1], shares[tile][i + 2], shares[tile][i + 3]);
    }
  }
}

// Has the copy engine add a warp's share, of rows from `first_row` on, to sums; `place`: where its columns of them begin.
__device__ __forceinline__ void add_shares(
    const AttentionArgs& args, float* place, int first_row, const float (&staged)[kShareTiles][16 * kShareColumns]) {
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int tile = 0; tile < kShareTiles; ++tile) {
    if (first_row + 64 * tile >= args.seqlen_q) break;
    bulk_add(place + tile * 64 * kD, staged[tile], kShareColumns * 16 * sizeof(float));
  }
  tma_commit();
}

constexpr int kReachLanes = 8;  // that share a row, so that a warp reads several at once
constexpr int kFarthest = 1 << 30;  // reaches all keys

// What two rows multiply to, by neighbouring lanes, each of which has it then.
__device__ __forceinline__ float multiply_rows(const Element* first, const Element* second) {
  struct alignas(kVec * sizeof(Element)) Elements {
    Element at[kVec];
  };
  float sum = 0.0f;
  for (int x = int(threadIdx.x) % kReachLanes * kVec; x < kD; x += kReachLanes * kVec) {
    const Elements a = *reinterpret_cast<const Elements*>(first + x);
    const Elements b = *reinterpret_cast<const Elements*>(second + x);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum = fmaf(__bfloat162float(a.at[i]), __bfloat162float(b.at[i]), sum);
    }
  }
#pragma unroll
  for (int bit = 1; bit < kReachLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  return sum;
}

// The length whose square that is, or more: float32 squares nothing below 1e-19, and what is no number may be any.
__device__ __forceinline__ float length_of(float square) {
  return square < 3e38f ? sqrtf(fmaxf(square, 1e-30f)) : kInfinity;
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, bit));
  return value;
}

// Finds the length of the longest of every kLongestOf rows of keys, a warp's.
extern "C" __global__ void __launch_bounds__(kReachThreads)
    attention_bf16_d64_backward_alibi_key_lengths(const AttentionArgs args) {
  let_next_launch_begin();
  const int tiles = (args.seqlen_k + kLengthKeys - 1) / kLengthKeys;
  const int tile = int(blockIdx.x) % tiles, kv_head = int(blockIdx.x) / tiles % args.num_kv_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_kv_heads;
  const int first_key = tile * kLengthKeys + int(threadIdx.x) / 32 * kLongestOf, lane = int(threadIdx.x) % 32;
  if (first_key >= args.seqlen_k) return;
  const Element* const keys = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  float longest = 0.0f;
#pragma unroll
  for (int i = 0; i < kLongestOf; i += 32 / kReachLanes) {
    const int nth = min(first_key + i + lane / kReachLanes, args.seqlen_k - 1);
    const Element* const key = keys + nth * args.k_stride_row;
    longest = fmaxf(longest, length_of(multiply_rows(key, key)));
  }
  longest = largest_of_warp(longest);
  if (lane == 0) key_lengths_of(args, batch, kv_head)[first_key / kLongestOf] = longest;
  if (first_key == 0 && lane == 0) *reach_of(args, batch, kv_head) = 0;
}

// Finds how far from their places every kReachOf rows of queries, a warp's, must look for keys. No score is larger than
// the length of a row times that of the longest key, and slopes take from it what grows with the distance: beyond the
// reach all keys together weigh less than 2^-24 of what a row sees. The farthest of all counts, by the heads of keys.
extern "C" __global__ void __launch_bounds__(kReachThreads)
    attention_bf16_d64_backward_alibi_reach(const AttentionArgs args) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int tiles = (args.seqlen_q + kReachRows - 1) / kReachRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const int first_row = tile * kReachRows + int(threadIdx.x) / 32 * kReachOf, lane = int(threadIdx.x) % 32;
  if (first_row >= args.seqlen_q) return;
  const int end_row = args.seqlen_k > 0 ? min(first_row + kReachOf, args.seqlen_q) : first_row;
  const Element* const queries = args.q + batch * args.q_stride_batch + head * args.q_stride_head;
  const float* const lse = args.lse + (1LL * batch * args.num_q_heads + head) * args.seqlen_q;
  float longest = 0.0f;
  for (int i = lane; i < (args.seqlen_k + kLongestOf - 1) / kLongestOf; i += 32) {
    longest = fmaxf(longest, key_lengths_of(args, batch, kv_head)[i]);
  }
  longest = largest_of_warp(longest);
  const float slope = kLog2e * slopes_at(args, batch, head), scale = kLog2e * args.scale;
  // Farther off on either side weights fall from 2^-depth by 2^-slope a key: a geometric series.
  const float depth = 25.0f + log2f(fmaxf(1.0f, fminf(float(args.seqlen_k), 1.0f / (kLn2 * slope))));
  float reach = 0.0f;
#pragma unroll 4
  for (int i = first_row; i < end_row; i += 32 / kReachLanes) {
    const int row = min(i + lane / kReachLanes, end_row - 1);
    const int place = row + args.seqlen_k - args.seqlen_q, next = max(place, 0);
    const Element* const query = queries + row * args.q_stride_row;
    // A thousandth more, for what rounding takes.
    const float most = 1.001f * fabsf(scale) * longest * length_of(multiply_rows(query, query));
    // A row that sees nothing has nothing to look for. Each has keys that write its gradient: those next to its place.
    const float known = kLog2e * lse[row];
    const float found = fmaxf(known == -kInfinity ? 0.0f : (most - known + depth) / slope, float(next - place));
    reach = slope > 0.0f && found < float(kFarthest) ? fmaxf(reach, found) : float(kFarthest);
  }
  reach = largest_of_warp(reach);
  if (lane == 0) atomicMax(reach_of(args, batch, kv_head), int(ceilf(reach)));
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
    attention_bf16_d64_backward_alibi_statistics(const AttentionArgs args) {
  wait_for_earlier_launches();
  let_next_launch_begin();

  if (blockIdx.x == 0 && threadIdx.x == 0) *turns_taken(args) = 0;
  constexpr int kLanes = 4, kRowsAtOnce = kStatisticsThreads / kLanes;
  const int tiles = (args.seqlen_q + kStatisticsRows - 1) / kStatisticsRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  // Sums begin at nothing, of the last block's rows also those that fill up a tile.
  constexpr int kBlockSums = kStatisticsRows * 64;
  float* const sums = query_sums_of(args, batch, head);
  const long long end_sum = tile + 1 < tiles ? (tile + 1LL) * kBlockSums : num_query_sums(args);
  for (long long i = 1LL * tile * kBlockSums + threadIdx.x * 4; i < end_sum; i += kStatisticsThreads * 4) {
    *reinterpret_cast<float4*>(sums + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
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

// Gradients of keys and values: a block keeps kBc of them at a time, 64 for each consumer, and the rows that see some pass by.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d64_backward_alibi_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int group = args.num_q_heads / args.num_kv_heads;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&smem.kept_full, 1);
    barrier_init(&smem.kept_empty, kArrivals * 4 * kConsumers);
    barrier_init(&smem.next_full, 1);
    barrier_init(&smem.next_empty, kArrivals * 4 * kConsumers);
    for (int i = 0; i < kQStages; ++i) {
      barrier_init(&smem.q_full[i], 1);
      barrier_init(&smem.q_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kDoutStages; ++i) {
      barrier_init(&smem.dout_full[i], 1);
      barrier_init(&smem.dout_empty[i], kArrivals * 4 * kConsumers);
    }
    for (int i = 0; i < kDsStages; ++i) barrier_init(&smem.gradients_full[i], kArrivals * 4 * kConsumers);
    fence_barrier_init();
  }
  wait_for_earlier_launches();
  let_next_launch_begin();
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kDoutStages> dout_pipe;
  unsigned kept_phase = 0, next_phase = 0;
  const int count = Turn::count(args);
  if (warp < 4) {
    give_registers<24>();
    if (warp != 0 || !elect_one()) return;
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    prefetch_map(&maps.q);
    prefetch_map(&maps.dout);
#pragma unroll 1
    for (int number = blockIdx.x; number < count;) {
      const Turn turn(args, number);
      const int batch = turn.batch;
      bool is_kept = false;
#pragma unroll 1
      for (int head = turn.kv_head * group; head < (turn.kv_head + 1) * group; ++head) {
#pragma unroll 1
        for (int n = 0, first = turn.first_row; n < turn.of_head; ++n, first += kPassingRows) {
          Barrier* const q_full = &smem.q_full[q_pipe.stage];
          barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
          barrier_expect(q_full, sizeof(smem.q[0]) + sizeof(smem.lse[0]));
          load_rows<kPassingRows, kRowBox, kDChunks>(smem.q[q_pipe.stage], &maps.q, q_full, first, head, batch);
          bulk_load(smem.lse[q_pipe.stage], lse_of(args, batch, head) + first, sizeof(smem.lse[0]), q_full);
          q_pipe.advance();
          Barrier* const dout_full = &smem.dout_full[dout_pipe.stage];
          barrier_wait(&smem.dout_empty[dout_pipe.stage], dout_pipe.phase ^ 1);
          barrier_expect(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
          load_rows<kPassingRows, kRowBox, kDvChunks>(
              smem.dout[dout_pipe.stage], &maps.dout, dout_full, first, head, batch);
          bulk_load(smem.delta[dout_pipe.stage], delta_of(args, batch, head) + first, sizeof(smem.delta[0]), dout_full);
          dout_pipe.advance();
          if (is_kept) continue;
          // Rows have room sooner than keys, of which the turn before has need until its end.
          is_kept = true;
          barrier_wait(&smem.kept_empty, kept_phase ^ 1);
          barrier_expect(&smem.kept_full, sizeof(smem.k) + sizeof(smem.v));
          load_rows<kBc, kKeyBox, kDChunks>(smem.k, &maps.k, &smem.kept_full, turn.first_key, turn.kv_head, batch);
          load_rows<kBc, kKeyBox, kDvChunks>(smem.v, &maps.v, &smem.kept_full, turn.first_key, turn.kv_head, batch);
          kept_phase ^= 1;
        }
      }
      // Not before: a block with much to do yet would keep a turn from others.
      number = gridDim.x + atomicAdd(turns_taken(args), 1);
      barrier_wait(&smem.next_empty, next_phase ^ 1);
      smem.next = number;
      barrier_arrive(&smem.next_full);
      next_phase ^= 1;
    }
    return;
  }
  take_registers<240>();
  PipelineState<kDsStages> ds_pipe;
#pragma unroll 1
  for (int number = blockIdx.x; number < count;) {
    const Turn turn(args, number);
    const int batch = turn.batch, kv_head = turn.kv_head, first_key = turn.first_key;
    const int first_row = turn.first_row, end_row = turn.end_row, of_head = turn.of_head;
    const int consumer = warp / 4 - 1, lane = threadIdx.x % 32;
    const int own = consumer * 64;  // the consumer's first key here
    const int own_key = first_key + own + warp % 4 * 16 + lane / 4;  // the thread's first
    const RowRange rows_of_own = rows_of(args, batch, own_key, first_row, end_row);
    const RowRange rows_of_other = rows_of(args, batch, own_key + 8, first_row, end_row);
    unsigned kept_k[kDSteps][4];
    unsigned kept_v[kDvSteps][4];
    const float scale = args.scale * kLog2e;
    float sum_k[kD / 2] = {}, sum_v[kDv / 2] = {};
    const int share_row = consumer * kShareTiles * 64;  // a consumer's share of each tile of rows begins there
    const unsigned long long all_keys = descriptor(smem.k, sizeof(KeptKeys));
    int left = of_head * group;  // tiles
    if (left > 0) {
      int head = kv_head * group, first = first_row;
      // Where a warp adds its share of a tile.
      float* place = query_sum_at(query_sums_of(args, batch, head), (first + share_row) / 16 + warp % 4, 0);
      float gradient[kWeighedRows / 2];
      // Makes the gradients of the scores of a part of a tile, and adds what it makes of those of values;
      // `beside_scores` is done while scores are made, `beside_others` while gradients of weights are;
      // `finish` waits for what it has started, or for all but what it starts itself.
      const auto make_gradients = [&](int part, auto beside_scores, auto beside_others, auto finish) {
        const int first_of_part = first + part * kWeighedRows, step = part * (kWeighedRows / 16);
        const unsigned long long all_dout_desc = descriptor(smem.dout[dout_pipe.stage], sizeof(PassingRows));
        const unsigned long long q_desc = step_of_keys(descriptor(smem.q[q_pipe.stage]), step);
        const unsigned long long dout_desc = step_of_keys(all_dout_desc, step);
        float s[kWeighedRows / 2];
        unsigned weights[kWeighedRows / 16][4];
        if (part == 0) barrier_wait(&smem.q_full[q_pipe.stage], q_pipe.phase);
        start_products<PassingRows>(s, kept_k, q_desc);
        beside_scores();
        if (part == 0) barrier_wait(&smem.dout_full[dout_pipe.stage], dout_pipe.phase);
        start_products<PassingRows>(gradient, kept_v, dout_desc);
        beside_others();
        wgmma_wait<1>();
        hold(s);
        const bool partial = is_partial(args, batch, first_of_part, first_of_part + kWeighedRows, first_key, first_key + kBc);
        const auto weigh_all = [&](auto masked) {
          constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
          for (int i = 0; i < kWeighedRows / 2; i += 4) {
            const int column = part * kWeighedRows + i * 2 + lane % 4 * 2;
            const float2 lse = *reinterpret_cast<const float2*>(smem.lse[q_pipe.stage] + column);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int row = first + column + e;
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int at = i + 2 * h + e, key = own_key + 8 * h;
                const RowRange see = h ? rows_of_other : rows_of_own;
                float factor = 1.0f;
                weigh<kMasked>(s[at], factor, args, batch, head, row, key, see, scale, e ? lse.y : lse.x, 0.0f);
              }
            }
          }
        };
        if (partial) {
          weigh_all(Constant<true>{});
        } else {
          weigh_all(Constant<false>{});
        }
        pack_weights(s, weights);
        start_sums(sum_v, weights, dout_desc);
        wgmma_wait<1>();
        hold(gradient);
        const float* const delta_of_row = smem.delta[dout_pipe.stage] + part * kWeighedRows + lane % 4 * 2;
        const auto differentiate = [&](auto masked) {
#pragma unroll
          for (int i = 0; i < kWeighedRows / 2; i += 4) {
            const float2 delta = *reinterpret_cast<const float2*>(delta_of_row + i * 2);
#pragma unroll
            for (int at = i; at < i + 4; ++at) {
              gradient[at] = s[at] * (gradient[at] - (at % 2 ? delta.y : delta.x));
              if (decltype(masked)::value && s[at] == 0.0f) gradient[at] = 0.0f;
            }
          }
        };
        if (partial) {
          differentiate(Constant<true>{});
        } else {
          differentiate(Constant<false>{});
        }
        finish();
        if (part < 1) return;
        release(&smem.dout_empty[dout_pipe.stage]);
        dout_pipe.advance();
      };
      barrier_wait(&smem.kept_full, kept_phase);
      take_kept(kept_k, smem.k, own);
      take_kept(kept_v, smem.v, own);
      const auto nothing = [] {};
      const auto wait_for_all = [] { wgmma_wait<0>(); };
      make_gradients(0, nothing, nothing, wait_for_all);
      {
        unsigned gradients[kWeighedRows / 16][4];
        pack_weights(gradient, gradients);
        store_gradients(smem.gradients[ds_pipe.stage][consumer], gradients);
        const unsigned long long q_desc = descriptor(smem.q[q_pipe.stage], sizeof(PassingRows));
        start_sums(sum_k, gradients, q_desc);
        make_gradients(1, nothing, nothing, wait_for_all);
      }
#pragma unroll 1
      while (--left > 0) {
        const int first_before = first;
        Barrier* const q_empty = &smem.q_empty[q_pipe.stage];
        unsigned gradients[kWeighedRows / 16][4];
        pack_weights(gradient, gradients);
        store_gradients(smem.gradients[ds_pipe.stage][consumer] + 1 * kWeighedRows * kChunk, gradients);
        fence_proxy_async();
        __syncwarp();
        release(&smem.gradients_full[ds_pipe.stage]);
        const unsigned long long q_desc = descriptor(smem.q[q_pipe.stage], sizeof(PassingRows));
        start_sums(sum_k, gradients, step_of_keys(q_desc, 1 * (kWeighedRows / 16)));
        q_pipe.advance();
        first += kPassingRows;
        const bool other_head = first >= first_row + of_head * kPassingRows;
        if (other_head) first = first_row, ++head;
        float shares[kShareTiles][kShareColumns / 2];
        make_gradients(
            0,
            [&] {
              wgmma_wait<1>();
              release(q_empty);
            },
            nothing,
            [&] {
              barrier_wait(&smem.gradients_full[ds_pipe.stage], ds_pipe.phase);
              start_shares(shares, descriptor(smem.gradients[ds_pipe.stage][0] + share_row * kChunk), all_keys);
              wgmma_wait<1>();
            });
        ds_pipe.advance();
        {
          unsigned gradients[kWeighedRows / 16][4];
          pack_weights(gradient, gradients);
          store_gradients(smem.gradients[ds_pipe.stage][consumer], gradients);
          const unsigned long long q_desc = descriptor(smem.q[q_pipe.stage], sizeof(PassingRows));
          start_sums(sum_k, gradients, q_desc);
          make_gradients(
              1,
              [&] {
                wgmma_wait<1>();
                stage_shares(smem.shares[consumer][warp % 4], shares);
              },
              [&] {
                add_shares(args, place, first_before + share_row + warp % 4 * 16, smem.shares[consumer][warp % 4]);
              },
              wait_for_all);
        }
        place += kPassingRows * kD;
        if (other_head) place = query_sum_at(query_sums_of(args, batch, head), (first + share_row) / 16 + warp % 4, 0);
      }
      unsigned gradients[kWeighedRows / 16][4];
      pack_weights(gradient, gradients);
      store_gradients(smem.gradients[ds_pipe.stage][consumer] + 1 * kWeighedRows * kChunk, gradients);
      fence_proxy_async();
      __syncwarp();
      release(&smem.gradients_full[ds_pipe.stage]);
      const unsigned long long q_desc = descriptor(smem.q[q_pipe.stage], sizeof(PassingRows));
      start_sums(sum_k, gradients, step_of_keys(q_desc, 1 * (kWeighedRows / 16)));
      barrier_wait(&smem.gradients_full[ds_pipe.stage], ds_pipe.phase);
      float shares[kShareTiles][kShareColumns / 2];
      start_shares(shares, descriptor(smem.gradients[ds_pipe.stage][0] + share_row * kChunk), all_keys);
      wgmma_wait<0>();
      stage_shares(smem.shares[consumer][warp % 4], shares);
      add_shares(args, place, first + share_row + warp % 4 * 16, smem.shares[consumer][warp % 4]);
      release(&smem.q_empty[q_pipe.stage]);
      q_pipe.advance();
      ds_pipe.advance();
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
    const int made_key = made.first_key + own;
    send_rows(&maps.dk, reinterpret_cast<Element*>(smem.shares[consumer][warp % 4]), 16 * kChunk, sum_k, args.scale,
              made_key + warp % 4 * 16, made.kv_head, made.batch);
    send_rows(&maps.dv, reinterpret_cast<Element*>(smem.shares[consumer][warp % 4]), 16 * kChunk, sum_v, 1.0f,
              made_key + warp % 4 * 16, made.kv_head, made.batch);
    barrier_wait(&smem.next_full, next_phase);
    number = smem.next;
    __syncwarp();
    release(&smem.next_empty);
    next_phase ^= 1;
  }
  tma_wait_read<0>();
}

// Gradients of query rows: what all blocks have added up, times scores' scale; a warp writes 16 rows.
extern "C" __global__ void __launch_bounds__(kPostprocessThreads)
    attention_bf16_d64_backward_alibi_postprocess(const AttentionArgs args) {
  wait_for_earlier_launches();
  let_next_launch_begin();
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
// The gradient of slopes: the block makes a tile of it, and adds up what the array is repeated along.
extern "C" __global__ void __launch_bounds__(kPairThreads)
    attention_bf16_d64_backward_alibi_gradient_of_slopes(const AttentionArgs args) {
  wait_for_earlier_launches();
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  PairTiles& tiles = *reinterpret_cast<PairTiles*>(shared_bytes);
  if (args.dslopes == nullptr) return;
  const int key_tiles = (args.seqlen_k + kPairKeys - 1) / kPairKeys;
  const int row_tiles = (args.seqlen_q + kPairRows - 1) / kPairRows;
  const int own_tile = int(blockIdx.x) % row_tiles, own_head = int(blockIdx.x) / row_tiles % args.num_q_heads;
  const int own_keys = int(blockIdx.x) / row_tiles / args.num_q_heads % key_tiles;
  const int own_batch = int(blockIdx.x) / row_tiles / args.num_q_heads / key_tiles;
  const bool each_batch = args.dslopes_stride_0 != 0, each_head = true;
  const bool each_row = false, each_key = false;
  if (!each_batch && own_batch > 0) return;  // another block adds these up
  if (!each_row && own_tile > 0) return;  // another block adds these up
  if (!each_key && own_keys > 0) return;  // another block adds these up
  const Span batches = span_of(each_batch, own_batch, args.batch), heads = span_of(each_head, own_head, args.num_q_heads);
  const Span tiles_of_rows = span_of(each_row, own_tile, row_tiles), tiles_of_keys = span_of(each_key, own_keys, key_tiles);
  float sum[4][4] = {};
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    for (int head = heads.begin; head < heads.end; ++head) {
      for (int r = tiles_of_rows.begin; r < tiles_of_rows.end; ++r) {
        for (int n = tiles_of_keys.begin; n < tiles_of_keys.end; ++n) {
          float scaled[4][4], gradient[4][4];
          if (!find_gradients(scaled, gradient, tiles, args, batch, head, r * kPairRows, n * kPairKeys)) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = min(r * kPairRows + pair_row_of(i), args.seqlen_q - 1);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int key = min(n * kPairKeys + pair_key_of(j), args.seqlen_k - 1);
              if (gradient[i][j] != 0.0f) {
                sum[i][j] += gradient[i][j] * rate_of_slopes(args, scaled[i][j], batch, head, row, key);
              }
            }
          }
        }
      }
    }
  }
  // What a tile's rows or keys share is added up here.
  float (&sums)[kPairRows][kPairKeys + 1] = *reinterpret_cast<float (*)[kPairRows][kPairKeys + 1]>(shared_bytes);
  __syncthreads();  // nobody reads columns any more
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[pair_row_of(i / 4)][pair_key_of(i % 4)] = sum[i / 4][i % 4];
  __syncthreads();
  const int own_rows = each_row ? kPairRows : 1, across = each_key ? kPairKeys : 1;
  for (int i = threadIdx.x; i < own_rows * across; i += kPairThreads) {
    const Span rows = span_of(each_row, i / across, kPairRows), keys = span_of(each_key, i % across, kPairKeys);
    float total = 0.0f;
    for (int row = rows.begin; row < rows.end; ++row) {
      for (int key = keys.begin; key < keys.end; ++key) total += sums[row][key];
    }
    const int row = own_tile * kPairRows + i / across, key = own_keys * kPairKeys + i % across;
    if (row >= args.seqlen_q || key >= args.seqlen_k) continue;
    args.dslopes[own_batch * args.dslopes_stride_0 + own_head] = total;
  }
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
extern "C" long long attention_bf16_d64_backward_alibi_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long num_q_heads = args->num_q_heads, seqlen_k = args->seqlen_k;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * ((seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 15) / 16 * 16) * 64 + 63) / 64 * 64 +
              (batch * num_kv_heads * ((seqlen_k + 15) / 16) + 63) / 64 * 64 +
              (batch * num_kv_heads + 63) / 64 * 64 + 64);
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

static int launch_key_lengths(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kLengthKeys - 1) / kLengthKeys * num_kv_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_key_lengths, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_key_lengths, *args);
}

static int launch_reach(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kReachRows - 1) / kReachRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_reach, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_reach, *args);
}

static int launch_statistics(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kStatisticsRows - 1) / kStatisticsRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_statistics, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_k + kBc - 1) / kBc * num_kv_heads * batch;
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
  const cudaError_t dk_status = encode_map(
      &maps.dk, any_keys ? args->dk : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->dk_stride_row, args->dk_stride_head, args->dk_stride_batch}, 64, 16,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dk_status != cudaSuccess) return dk_status;
  const cudaError_t dv_status = encode_map(
      &maps.dv, any_keys ? args->dv : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->dv_stride_row, args->dv_stride_head, args->dv_stride_batch}, 64, 16,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dv_status != cudaSuccess) return dv_status;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(grid, kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_kernel, *args, maps);
}

static int launch_postprocess(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kPostprocessRows - 1) / kPostprocessRows * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_postprocess, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_postprocess, *args);
}

static int launch_gradient_of_slopes(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q, seqlen_k = args->seqlen_k;
  const long long blocks = (seqlen_q + kPairRows - 1) / kPairRows * num_q_heads *
      ((seqlen_k + kPairKeys - 1) / kPairKeys) * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 16640;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d64_backward_alibi_gradient_of_slopes,
          cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d64_backward_alibi_gradient_of_slopes, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d64_backward_alibi(const AttentionArgs* args, cudaStream_t stream) {
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
  if (const int status = launch_key_lengths(args, stream, begun)) return status;
  if (const int status = launch_reach(args, stream, begun)) return status;
  if (const int status = launch_statistics(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  if (const int status = launch_postprocess(args, stream, begun)) return status;
  if (args->dslopes != nullptr) {
    if (const int status = launch_gradient_of_slopes(args, stream, begun)) return status;
  }
  return cudaSuccess;
}
#endif
// flashgen: {"problem": {"dtype": "bf16", "batch": 2, "num_q_heads": 32, "num_kv_heads": 32, "seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 64, "head_dim_v": 64, "causal": true, "precision": "auto", "scoring": {"alibi": true}, "backward": true}, "family": "wgmma-backward", "variant": {"bc": 128, "apart": false, "br": 128, "schedule": "ahead", "parts": 2, "kept": "registers", "q_stages": 2, "dout_stages": 2, "dq_path": "bulk", "cluster": 1, "sum_stages": 2, "heads": 1, "ds_stages": 2, "rows": 128, "keys": 64, "k_stages": 2, "v_stages": 2, "order": "heaviest_first", "meeting": "late", "ranges": "of_keys", "min_blocks": 1, "turns": "free", "sums": "any_order", "walk": "down", "far_keys": "left_out", "last_turn": "whole", "second": "behind", "sections": "held", "finisher": "consumers", "writer": "producer"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d64_backward_alibi", "launches": [{"threads": 128, "smem_bytes": 0, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "key_lengths", "of_keys": true}, {"threads": 128, "smem_bytes": 0, "rows_per_block": 256, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "reach", "dependent": true}, {"threads": 256, "smem_bytes": 0, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "statistics", "dependent": true}, {"threads": 384, "smem_bytes": 199680, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [{"array": "q", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dout", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "k", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "v", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dk", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dv", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": 132, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "of_keys": true, "dependent": true}, {"threads": 128, "smem_bytes": 0, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "postprocess", "dependent": true}, {"threads": 256, "smem_bytes": 16640, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "gradient_of_slopes", "keys_per_block": 64, "makes": "dslopes", "dependent": true}], "digest": "173866f7e1c934c7", "figures": [2438, 1177]}
