// attention_bf16_d64_backward: gradients of flash attention, bf16, head dim 64, tuned with a causal mask.
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
//   order = by_head            blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds
//   meeting = late             when consumers await each other's gradients of scores: at once, or with other products begun
//   ranges = of_keys           what masks are told by: the keys that each row sees, or the rows that see each key
//   turns = free               tiles of keys that a block takes: one, or each so-manieth, or the next whenever it is free
//   sums = ends_in_order       who adds to queries' gradients next: whoever comes, whose keys are next, or ends alone in order
//   walk = up                  rows that pass by, where sums are handed on: from the last one down, or up
//   last_turn = shared         tiles of keys left for fewer blocks than stay: one takes each, or several share its rows
//   writer = consumers         who has gradients of keys written, where sums are handed on: the producer, or consumers
//
// Measured on NVIDIA H200, batch 8, 32 heads, 2048 rows, with a causal mask: 765.2 us (median), spread 0.2 %,
// 449.1 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 1.4e-03.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c bf16_d64_backward_causal_b8_h32_n2048.cu
//     (-DFLASHGEN_CAUSAL=0 builds it with no mask)
//
// Regenerate:
//
//     flashgen emit bf16_d64_backward_causal_b8_h32_n2048.cu \
//         --device h200 --dtype bf16 --d 64 --backward --causal --batch 8 --heads 32 --seqlen 2048 \
//         --family wgmma-backward --set bc=128 --set apart=false --set br=128 --set schedule=ahead \
//         --set parts=2 --set kept=registers --set q_stages=2 --set dout_stages=2 --set dq_path=bulk \
//         --set ds_stages=2 --set rows=128 --set keys=64 --set k_stages=2 --set v_stages=2 \
//         --set order=by_head --set meeting=late --set ranges=of_keys --set turns=free \
//         --set sums=ends_in_order --set walk=up --set last_turn=shared --set writer=consumers

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
  CUtensorMap q, dout, k, v, dq, dk, dv;
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
constexpr int kMostSlices = 4;  // of a tile of keys, by rows
constexpr int kSliceTiles = 3;  // what each takes beside its tiles of rows, as so many of these
constexpr int kHandedBarrier = 2;  // and those behind it, named, of each consumer: all have left their sums
// What becomes of a block's sums of a tile of rows: others add to them, or they are gradients with those of all other keys,
// or they alone.
constexpr int kHandedOn = 0, kLast = 1, kOnly = 2;
// A query head, where memory has its sums and, of its tiles of rows, whose keys are next.
struct HandedHead {
  int number;
  float* sums;
  int* next_keys;
};
// A turn as far as sums go: how many tiles of keys come before it, of how many tiles from `first_row` on a head's rows are,
// which of them see no keys before the turn's, those from `end_before` on, and none behind, those up to `first_behind`; both
// begin tiles. And the heads that share its keys: the first one, and the number of that behind the last.
struct HandedTurn {
  int batch, kv_head, first_key, keys_before, first_row, of_head, end_before, first_behind;
  HandedHead first_head;
  int end_head;
};
constexpr int kSentBarrier = 4;  // and those behind it, named, of each consumer: what its warps sent has been read
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
// Keys and values, and query rows and gradients of outputs that pass by, with what is known of the rows.
struct SharedStorage {
  alignas(1024) KeptKeys k[kDChunks];
  alignas(1024) KeptKeys v[kDvChunks];
  alignas(1024) PassingRows q[kQStages][kDChunks];
  alignas(1024) PassingRows dout[kDoutStages][kDvChunks];
  alignas(1024) PassingRows gradients[kDsStages][kBc / kChunk];  // of scores, a row for each query row
  // What is moved, by who moves it: sums of a tile of rows as they lie in memory, on their way there or from there, or
  // the gradients that they make, a warp's where its sums were.
  struct alignas(1024) {
    float sums[kPassingRows * kD];
  } moved[2];
  alignas(16) float lse[kQStages][kPassingRows], delta[kDoutStages][kPassingRows];
  // A stage is full once its bytes have arrived, and empty once every warp of consumers has done with it.
  Barrier kept_full, q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  Barrier gradients_full[kDsStages];  // once every warp of consumers has stored its own
  Barrier kept_empty;  // once every warp of consumers has read what it needs of keys and values
  Barrier next_full, next_empty;  // once the producer has told the next turn, and every warp of consumers has read it
  int next;  // -1: none
  HandedTurn handed[2];  // what comes with every other turn
  struct Mover {
    Barrier open, done;  // once it is known what becomes of sums, and once every warp of consumers has done it
    int become;
    int counted;  // the tiles of keys that others are told of: a row's first one is told with those before it
    float* ended;  // where memory has sums that end here
    // Its own, whose thread has few registers: the head that is next, where others are told of sums, once these are in
    // memory, and the phase in which the next turn comes.
    HandedHead head;
    int* told;
    unsigned next_phase;
  } movers[2];
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

// Stores them there.
__device__ __forceinline__ void bulk_store(float* global, const float* shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
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

// The same until they are there.
template <int kGroups>
__device__ __forceinline__ void tma_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" : : "n"(kGroups) : "memory");
}

// Waits until another block has left `number` there. What it did before can be seen then, by the copy engine too.
__device__ __forceinline__ void wait_for_number(const int* place, int number) {
  int there;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(__cvta_generic_to_global(place)) : "memory");
  } while (there != number);
  asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Waits until another block has left any number but 0 there.
__device__ __forceinline__ void wait_for_any_number(const int* place) {
  int there;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(__cvta_generic_to_global(place)) : "memory");
  } while (there == 0);
  asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Says that nobody reads 128 bytes of memory any more, a line of L2, which then need not write them.
__device__ __forceinline__ void discard_line(float* line) {
  asm volatile("discard.global.L2 [%0], 128;" : : "l"(__cvta_generic_to_global(line)) : "memory");
}

// Leaves a number for whoever waits for it.
__device__ __forceinline__ void leave_number(int* place, int number) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(place)), "r"(number)
               : "memory");
}

// Adds to the number that is there, beside others who do.
__device__ __forceinline__ void add_to_number(int* place, int number) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(place)), "r"(number)
               : "memory");
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

// What a row sees of the keys ends there.
__device__ __forceinline__ int end_key_of(const AttentionArgs& args, int batch, int row) {
  return kCausal ? min(args.seqlen_k, row + args.seqlen_k - args.seqlen_q + 1) : args.seqlen_k;
}

__device__ __forceinline__ int first_key_of(const AttentionArgs& args, int batch, int row) { return 0; }

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
// Sums of the gradients of a head's queries, before scores' scale: tiles of 16 rows by 8 columns, as products leave them,
// which blocks hand on.
__device__ __forceinline__ long long num_query_sums(const AttentionArgs& args) {
  return filled_rows(args) * 64LL;
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
// Of a head's tiles of rows, how many tiles of keys have added to their sums, or come before all that do.
__device__ __forceinline__ int row_tiles_of(const AttentionArgs& args) {
  return (args.seqlen_q + kPassingRows - 1) / kPassingRows;
}
__device__ __forceinline__ int* next_keys_of(const AttentionArgs& args, int batch, int head) {
  const long long batches = args.batch;
  return reinterpret_cast<int*>(
             args.workspace + (batches * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
             (batches * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) + 63) / 64 * 64 +
             (batches * args.num_q_heads * ((args.seqlen_q + 127) / 128 * 128) * 64 + 63) / 64 * 64 + 2163136) +
         (static_cast<long long>(batch) * args.num_q_heads + head) * row_tiles_of(args);
}

// Turns a product of a row and a key into its weight, and the gradient of the weight into that of the product, but for
// the scale of scores. `masked`: the row may not see the key, and then is none of those that `see` it.
template <bool masked>
__device__ __forceinline__ void weigh(
    float& s, float& gradient, const AttentionArgs& args, int batch, int head, int row, int key, RowRange see,
    float scale, float lse, float delta) {
  s = exp2f(fmaf(s, scale, -lse));
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

// How many tiles of keys are a turn each; into how many slices of their rows the others are cut, which are left for fewer
// blocks than stay, each slice a turn; and how many turns that makes. The launch in front says so.
struct Turns {
  int whole, slices, count;
};
__device__ __forceinline__ Turns* turns_of(const AttentionArgs& args) {
  return reinterpret_cast<Turns*>(query_sums_of(args, args.batch, 0) + 64);
}

// Of each tile that is left, of how many slices a consumer's sums are by now.
__device__ __forceinline__ int* slices_added(const AttentionArgs& args, int tile, int consumer) {
  return reinterpret_cast<int*>(query_sums_of(args, args.batch, 0) + 128) + tile * kConsumers + consumer;
}

// And the sums, a thread's every kWarpgroup-th four: of keys, then of values.
__device__ __forceinline__ float4* handed_sums(const AttentionArgs& args, int tile, int consumer) {
  float4* const sums = reinterpret_cast<float4*>(query_sums_of(args, args.batch, 0) + 448);
  return sums + (tile * kConsumers + consumer) * ((kD + kDv) / 8 * kWarpgroup) + threadIdx.x % kWarpgroup;
}

// Says that no slice has been added, and chooses how many there are: as many as blocks have done with soonest.
__device__ __forceinline__ void begin_slices(const AttentionArgs& args, int tiles) {
  for (int i = threadIdx.x; i < kMaxBlocks * kConsumers; i += kStatisticsThreads) *slices_added(args, 0, i) = 0;
  if (threadIdx.x != 0) return;
  const int left = tiles < kMaxBlocks ? 0 : tiles % kMaxBlocks;
  const int rows = args.num_q_heads / args.num_kv_heads * ((args.seqlen_q + kPassingRows - 1) / kPassingRows);
  const auto tiles_of = [&](int slices) {
    return (left * slices + kMaxBlocks - 1) / kMaxBlocks * (1.0f * rows / slices + kSliceTiles);
  };
  int best = 1;
  for (int slices = 2; slices <= min(kMostSlices, rows); ++slices) {
    if (tiles_of(slices) < tiles_of(best)) best = slices;
  }
  *turns_of(args) = {tiles - left, best, tiles - left + left * best};
}

// A turn's tile of keys, and its slice of the tile's rows.
struct Slice {
  int tile, nth, count;

  __device__ __forceinline__ Slice(const Turns& turns, int turn) : tile(turn), nth(0), count(1) {
    if (turn < turns.whole) return;
    count = turns.slices;
    tile = turns.whole + (turn - turns.whole) / count;
    nth = (turn - turns.whole) % count;
  }

  __device__ __forceinline__ bool is_last() const { return nth == count - 1; }
};

// The keys that a block takes in a turn, of a head, and the rows that see some of them: so many tiles of each query head.
struct Turn {
  int batch, kv_head, first_key, end_key, first_row, end_row, of_head;
  bool is_last;  // slice of the tile

  __device__ __forceinline__ Turn(const AttentionArgs& args, int number) {
    int tiles = tiles_of_keys(args), heads = args.num_kv_heads;
    // A producer has no registers to keep in what it divides by, from turn to turn.
    forget(tiles);
    forget(heads);
    const Slice slice(*turns_of(args), number);
    number = slice.tile;
    is_last = slice.is_last();
    first_key = (tiles - 1 - number % tiles) * kBc;
    kv_head = number / tiles % heads;
    batch = number / tiles / heads;
    end_key = min(first_key + kBc, args.seqlen_k);
    find_rows(args, batch, first_key, end_key, first_row, end_row);
    first_row -= first_row % kPassingRows;
    // Where a tile's rows end before these keys or begin behind them, too: its sums pass by here.
    of_head = (end_row - first_row + kPassingRows - 1) / kPassingRows;
    if (slice.count > 1) {
      const int all = max(of_head, 0), begin = all * slice.nth / slice.count;
      of_head = all * (slice.nth + 1) / slice.count - begin;
      first_row += begin * kPassingRows;
      end_row = min(end_row, first_row + of_head * kPassingRows);
    }
  }

  static __device__ __forceinline__ int tiles_of_keys(const AttentionArgs& args) {
    return (args.seqlen_k + kBc - 1) / kBc;
  }
  static __device__ __forceinline__ int count(const AttentionArgs& args) {
    return turns_of(args)->count;
  }
};

// How many turns have been taken: behind the sums of all heads.
__device__ __forceinline__ int* turns_taken(const AttentionArgs& args) {
  return reinterpret_cast<int*>(query_sums_of(args, args.batch, 0));
}

template <int n>
__device__ __forceinline__ void add_handed(float (&sum)[n], const float4* handed) {
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    if (i % 8 == 0) __syncwarp();  // or all of it would be loaded first, for which there are no registers
    const float4 four = handed[i * kWarpgroup];
    sum[4 * i] += four.x, sum[4 * i + 1] += four.y, sum[4 * i + 2] += four.z, sum[4 * i + 3] += four.w;
  }
}

template <int n>
__device__ __forceinline__ void leave_sums(float4* handed, const float (&sum)[n]) {
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    handed[i * kWarpgroup] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  }
}

// Adds what the slices before a turn's make of its keys. Tells whether that is all; otherwise leaves it to the slice behind.
__device__ __forceinline__ bool complete_sums(
    const AttentionArgs& args, int number, float (&sum_k)[kD / 2], float (&sum_v)[kDv / 2], int consumer) {
  const Turns turns = *turns_of(args);
  const Slice slice(turns, number);
  if (slice.count == 1) return true;
  int* const added = slices_added(args, slice.tile - turns.whole, consumer);
  float4* const handed = handed_sums(args, slice.tile - turns.whole, consumer);
  if (slice.nth > 0) {
    wait_for_number(added, slice.nth);
    add_handed(sum_k, handed);
    add_handed(sum_v, handed + kD / 8 * kWarpgroup);
  }
  if (slice.is_last()) return true;
  leave_sums(handed, sum_k);
  leave_sums(handed + kD / 8 * kWarpgroup, sum_v);
  named_barrier_sync(kHandedBarrier + consumer, kWarpgroup);  // all have left theirs
  if (threadIdx.x % kWarpgroup == 0) leave_number(added, slice.nth + 1);
  return false;
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
// memory that only the warp has need of and what was there has gone from: chunks of columns, which begin so many elements apart.
template <int n>
__device__ __forceinline__ void send_rows(
    const CUtensorMap* map, Element* staged, int apart, const float (&sum)[n], float factor, int first_row, int head,
    int batch) {
  const bool sends = threadIdx.x % 32 == 0;
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

// A warp has done what it had to where movers opened shared memory.
__device__ __forceinline__ void leave_to_mover(SharedStorage& smem, PipelineState<2>& pipe) {
  fence_proxy_async();
  __syncwarp();
  release(&smem.movers[pipe.stage].done);
  pipe.advance();
}

// A lane's place in a warp's share of sums that end, which begins with a column: memory needs the share no more.
__device__ __forceinline__ void discard_share(float* place, int column) {
  const int lane = threadIdx.x % 32;
  // Each line has two columns of sixteen rows, a lane the four sums at its place.
  for (int line = lane; line < min(kShareColumns, kD - column) / 2; line += 32) {
    discard_line(place - lane * 4 + line * 32);
  }
}

// Has a warp's share of a tile's sums, once it is made, where it is moved from, or the gradients that it is the last part
// of. `sixteen` and `column`: with which sixteen rows of the tile and which column the share begins.
__device__ __forceinline__ void hand_on_share(
    SharedStorage& smem, PipelineState<2>& pipe, float (&shares)[kShareTiles][kShareColumns / 2], int sixteen, int column,
    float scale) {
#pragma unroll
  for (int tile = 0; tile < kShareTiles; ++tile) hold(shares[tile]);
  barrier_wait(&smem.movers[pipe.stage].open, pipe.phase);
  float* const place = query_sum_at(smem.moved[pipe.stage].sums, sixteen, column / 8);
  const int become = smem.movers[pipe.stage].become;
  if (become == kHandedOn) {
#pragma unroll
    for (int tile = 0; tile < kShareTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kShareColumns / 2; i += 4) {
        *reinterpret_cast<float4*>(place + tile * 64 * kD + i * 32) =
            make_float4(shares[tile][i], shares[tile][i + 1], shares[tile][i + 2], shares[tile][i + 3]);
      }
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kShareTiles; ++tile) {
      if (become == kLast) {
#pragma unroll
        for (int i = 0; i < kShareColumns / 2; i += 4) {
          const float4 before = *reinterpret_cast<const float4*>(place + tile * 64 * kD + i * 32);
          shares[tile][i] += before.x, shares[tile][i + 1] += before.y;
          shares[tile][i + 2] += before.z, shares[tile][i + 3] += before.w;
        }
        __syncwarp();  // all lanes have read what gradients take the place of
        discard_share(smem.movers[pipe.stage].ended + (place - smem.moved[pipe.stage].sums) + tile * 64 * kD, column);
      }
      // The warp's, of which a lane has four sums at its place.
      Element* const rows = reinterpret_cast<Element*>(place + tile * 64 * kD - threadIdx.x % 32 * 4);
      store_rows(shares[tile], scale, [&](int row, int piece) {
        return rows + row * kShareColumns + (piece ^ row % 8) * 8;
      });
    }
  }
  leave_to_mover(smem, pipe);
}

// What movers are told of a turn.
__device__ __forceinline__ HandedTurn find_handed(const AttentionArgs& args, const Turn& turn) {
  const int group = args.num_q_heads / args.num_kv_heads, head = turn.kv_head * group;
  const int keys_before = Turn::tiles_of_keys(args) - 1 - turn.first_key / kBc;
  const HandedHead first{head, query_sums_of(args, turn.batch, head), next_keys_of(args, turn.batch, head)};
  HandedTurn found{turn.batch, turn.kv_head, turn.first_key, keys_before, turn.first_row, max(turn.of_head, 0), 0, 0x7fffffff,
                   first, head + group};
  int first_row, end_row;
  if (turn.first_key > 0) {
    find_rows(args, turn.batch, turn.first_key - kBc, turn.first_key, first_row, end_row);
    found.end_before = (end_row + kPassingRows - 1) / kPassingRows * kPassingRows;
  }
  if (turn.end_key < args.seqlen_k) {
    find_rows(args, turn.batch, turn.end_key, min(turn.end_key + kBc, args.seqlen_k), first_row, end_row);
    found.first_behind = first_row / kPassingRows * kPassingRows;
  }
  return found;
}

// Starts to write gradients of all of a tile's rows, by what a warp has made of them.
__device__ __forceinline__ void write_queries(
    const TensorMaps& maps, const float* sums, int first, int head, int batch) {
#pragma unroll 1
  for (int row = 0; row < kPassingRows; row += 16) {
#pragma unroll 1
    for (int column = 0; column < kD; column += kShareColumns) {
      tma_store(&maps.dq, sums + row * kD + column * 16, column, first + row, head, batch);
    }
  }
}

// The part of one of two threads, of every other tile of rows of a block's turns: opens shared memory of its own for a
// tile's sums, with those of all others where these end there, and has moved what becomes of them.
__device__ __forceinline__ void hand_on_sums(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, int number) {
  auto& moved = smem.moved[number];
  SharedStorage::Mover& mover = smem.movers[number];
  mover.next_phase = 0;
  unsigned phase = 0;
  int nth = number;  // tile of a head's walk
#pragma unroll 1
  while (true) {
    barrier_wait(&smem.next_full, mover.next_phase);
    if (smem.next < 0) break;
    const HandedTurn& turn = smem.handed[mover.next_phase];
    HandedHead& head = mover.head;
    head.number = turn.first_head.number;
    head.sums = turn.first_head.sums;
    // In between, for otherwise all of it would be in registers at once; the turn stays until the next but one.
    barrier_arrive(&smem.next_empty);
    head.next_keys = turn.first_head.next_keys;
    mover.next_phase ^= 1;
    mover.told = nullptr;
    const auto tell = [&] {
      if (mover.told == nullptr) return;
      tma_wait<0>();
      add_to_number(mover.told, mover.counted);
      mover.told = nullptr;
    };
#pragma unroll 1
    for (;; nth += 2, phase ^= 1) {
#pragma unroll 1
      for (; head.number < turn.end_head && nth >= turn.of_head; ++head.number) {
        nth -= turn.of_head;
        head.sums += num_query_sums(args);
        head.next_keys += row_tiles_of(args);
      }
      if (head.number == turn.end_head) break;
      const int first = turn.first_row + nth * kPassingRows;
      const bool begins = first < turn.first_behind, ends = first >= turn.end_before;
      int* const next_keys = head.next_keys + first / kPassingRows;
      mover.become = !ends ? kHandedOn : begins ? kOnly : kLast;
      if (ends && !begins) {
        tell();
        wait_for_number(next_keys, turn.keys_before);
        float* const sums = head.sums + 1LL * first * kD;
        mover.ended = sums;
        barrier_expect(&mover.open, sizeof(moved.sums));
        bulk_load(moved.sums, sums, sizeof(moved.sums), &mover.open);
      } else {
        // Consumers need not wait for what is told to others.
        barrier_arrive(&mover.open);
        tell();
        if (!begins) wait_for_any_number(next_keys);
      }
      barrier_wait(&mover.done, phase);
      if (ends) {
        write_queries(maps, moved.sums, first, head.number, turn.batch);
        tma_commit();
        tma_wait_read<0>();
        continue;
      }
      float* const sums = head.sums + 1LL * first * kD;
      if (begins) bulk_store(sums, moved.sums, sizeof(moved.sums)); else bulk_add(sums, moved.sums, sizeof(moved.sums));
      tma_commit();
      tma_wait_read<0>();
      mover.told = next_keys;
      mover.counted = begins ? turn.keys_before + 1 : 1;
    }
    tell();  // nothing comes behind its tiles
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

  if (blockIdx.x == 0 && threadIdx.x == 0) *turns_taken(args) = 0;
  if (blockIdx.x == 0) begin_slices(args, args.batch * args.num_kv_heads * Turn::tiles_of_keys(args));
  // Neighbouring elements, moved by one access.
  struct alignas(16) Elements {
    __nv_bfloat16 at[8];
  };
  constexpr int kLanes = 4, kRowsAtOnce = kStatisticsThreads / kLanes;
  const int tiles = (args.seqlen_q + kStatisticsRows - 1) / kStatisticsRows;
  const int tile = int(blockIdx.x) % tiles, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  // Of the tiles of rows that begin here the next keys are the first, for whom nobody waits.
  const int first_tile = (tile * kStatisticsRows + kPassingRows - 1) / kPassingRows;
  const int end_tile = (min((tile + 1) * kStatisticsRows, args.seqlen_q) + kPassingRows - 1) / kPassingRows;
  for (int n = first_tile + int(threadIdx.x); n < end_tile; n += kStatisticsThreads) {
    next_keys_of(args, batch, head)[n] = 0;
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
    if (first_key_of(args, batch, row) >= end_key_of(args, batch, row)) {
      // Sees nothing, nor may the rest of its tile: then nobody else writes its gradient.
      __nv_bfloat16* const dq =
          args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head + row * args.dq_stride_row;
      for (int x = lane * 8; x < kD; x += kLanes * 8) {
        *reinterpret_cast<Elements*>(dq + x) = Elements{};
      }
    }
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
    attention_bf16_d64_backward_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int group = args.num_q_heads / args.num_kv_heads;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&smem.kept_full, 1);
    barrier_init(&smem.kept_empty, kArrivals * 4 * kConsumers);
    barrier_init(&smem.next_full, 1);
    barrier_init(&smem.next_empty, kArrivals * 4 * kConsumers + 2);
    for (auto& mover : smem.movers) {
      barrier_init(&mover.open, 1);
      barrier_init(&mover.done, kArrivals * 4 * kConsumers);
    }
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
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kDoutStages> dout_pipe;
  unsigned kept_phase = 0, next_phase = 0;
  if (warp < 4) {
    give_registers<24>();
    if ((warp == 1 || warp == 2) && elect_one()) hand_on_sums(args, maps, smem, warp - 1);
    if (warp != 0 || !elect_one()) return;
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    prefetch_map(&maps.q);
    prefetch_map(&maps.dout);
    // Turns are taken in their order from the first on: none waits for one that nobody has begun.
    int number = atomicAdd(turns_taken(args), 1);
    barrier_wait(&smem.next_empty, next_phase ^ 1);
    smem.next = number < Turn::count(args) ? number : -1;
    if (number < Turn::count(args)) smem.handed[next_phase] = find_handed(args, Turn(args, number));
    barrier_arrive(&smem.next_full);
    next_phase ^= 1;
#pragma unroll 1
    while (number < Turn::count(args)) {
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
      // Not before: others would wait for a turn that this block has taken and not begun.
      number = atomicAdd(turns_taken(args), 1);
      barrier_wait(&smem.next_empty, next_phase ^ 1);
      smem.next = number < Turn::count(args) ? number : -1;
      if (number < Turn::count(args)) smem.handed[next_phase] = find_handed(args, Turn(args, number));
      barrier_arrive(&smem.next_full);
      next_phase ^= 1;
    }
    return;
  }
  take_registers<240>();
  PipelineState<kDsStages> ds_pipe;
  PipelineState<2> sums_pipe;
  int number = 0;
  barrier_wait(&smem.next_full, next_phase);
  number = smem.next;
  __syncwarp();
  release(&smem.next_empty);
  next_phase ^= 1;
#pragma unroll 1
  while (number >= 0) {
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
      // What was sent of the turn before has gone from where gradients of scores are stored now.
      if (lane == 0) tma_wait_read<0>();
      named_barrier_sync(kSentBarrier + consumer, kWarpgroup);
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
                hand_on_share(smem, sums_pipe, shares, share_row / 16 + warp % 4, 0, args.scale);
              },
              [&] {
                      },
              wait_for_all);
        }
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
      hand_on_share(smem, sums_pipe, shares, share_row / 16 + warp % 4, 0, args.scale);
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
    if (complete_sums(args, number, sum_k, sum_v, consumer)) {
      const HandedTurn& made = smem.handed[next_phase ^ 1];
      const int first_made = made.first_key + own + warp % 4 * 16;
      Element* const staged = smem.gradients[ds_pipe.stage][consumer] + warp % 4 * 16 * kChunk;
      if (lane == 0) tma_wait_read<0>();  // of a turn before without rows
      __syncwarp();
      send_rows(&maps.dk, staged, 64 * kChunk, sum_k, args.scale, first_made, made.kv_head, made.batch);
      send_rows(&maps.dv, staged + kDChunks * 64 * kChunk, 64 * kChunk, sum_v, 1.0f, first_made, made.kv_head, made.batch);
    }
    barrier_wait(&smem.next_full, next_phase);
    number = smem.next;
    __syncwarp();
    release(&smem.next_empty);
    next_phase ^= 1;
  }
  tma_wait_read<0>();
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
              (batch * num_q_heads * ((seqlen_q + 127) / 128 * 128) * 64 + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 127) / 128) + 63) / 64 * 64 + 2163136);
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
  const cudaError_t dq_status = encode_map(
      &maps.dq, args->dq, {kD, args->seqlen_q, args->num_q_heads, args->batch},
      {args->dq_stride_row, args->dq_stride_head, args->dq_stride_batch}, 64, 16,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dq_status != cudaSuccess) return dq_status;
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
      cudaFuncSetAttribute(attention_bf16_d64_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(grid, kThreads, smem_bytes, stream, attribute, begun);
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
// flashgen: {"problem": {"dtype": "bf16", "batch": 8, "num_q_heads": 32, "num_kv_heads": 32, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 64, "head_dim_v": 64, "causal": true, "precision": "auto", "backward": true}, "family": "wgmma-backward", "variant": {"bc": 128, "apart": false, "br": 128, "schedule": "ahead", "parts": 2, "kept": "registers", "q_stages": 2, "dout_stages": 2, "dq_path": "bulk", "cluster": 1, "sum_stages": 2, "heads": 1, "ds_stages": 2, "rows": 128, "keys": 64, "k_stages": 2, "v_stages": 2, "order": "by_head", "meeting": "late", "ranges": "of_keys", "min_blocks": 1, "turns": "free", "sums": "ends_in_order", "walk": "up", "far_keys": "walked", "last_turn": "shared", "second": "behind", "sections": "held", "finisher": "consumers", "writer": "consumers"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d64_backward", "launches": [{"threads": 256, "smem_bytes": 0, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "statistics"}, {"threads": 384, "smem_bytes": 232448, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [{"array": "q", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dout", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "k", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "v", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dq", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dk", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dv", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": 132, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "of_keys": true, "dependent": true}], "digest": "807b9f62777e04e9", "figures": [2702, 1173]}
