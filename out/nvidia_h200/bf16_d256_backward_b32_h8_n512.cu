// attention_bf16_d256_backward: gradients of flash attention, bf16, head dim 256, tuned without a causal mask.
//
// dq, dk and dv of o = softmax(scale * q k^T) v, from dout, o and the log-sum-exp of each row, and from dlse, the gradient of
// that, where it is not null. Tensors are (batch, heads, seqlen, head_dim) by strides with a contiguous head dim; a causal
// mask is aligned bottom-right; several query heads may share one key/value head, whose gradients are sums over them.
// Lengths, strides, heads and scale are run-time arguments.
//
// Family wgmma-backward:
//   bc = 64                    keys that a block keeps, whose gradients it makes
//   apart = true               of 64 keys one warpgroup makes dv and another dk, which takes fewer registers
//   br = 64                    query rows that pass by them
//   schedule = ahead           when weights are made and multiplied: beside their gradients, after, or a tile ahead
//   parts = 1                  parts of them whose weights are made one behind the other
//   kept = shared              what products read from registers: values, or keys as well
//   q_stages = 2               tiles of queries in shared memory
//   dout_stages = 2            tiles of gradients of outputs in shared memory
//   dq_path = launch           who makes queries' gradients: a launch, or blocks of keys by sums in memory
//   ds_stages = 2              tiles of gradients of scores in shared memory, where blocks of keys do
//   rows = 128                 query rows that a block of the other launch keeps
//   keys = 64                  keys that pass by them
//   k_stages = 2               tiles of keys in shared memory
//   v_stages = 1               tiles of values in shared memory
//   order = by_head            blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds
//   turns = free               tiles of keys that a block takes: one, or each so-manieth, or the next whenever it is free
//   second = beside            when blocks of keys begin: behind the launch of query rows, or beside its last blocks
//
// Measured on NVIDIA H200, batch 32, 8 heads, 512 rows, without a mask: 447.8 us (median), spread 0.5 %,
// 383.6 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 1.2e-03.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c bf16_d256_backward_b32_h8_n512.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit bf16_d256_backward_b32_h8_n512.cu \
//         --device h200 --dtype bf16 --d 256 --backward --batch 32 --heads 8 --seqlen 512 \
//         --family wgmma-backward --set bc=64 --set apart=true --set br=64 --set schedule=ahead \
//         --set parts=1 --set kept=shared --set q_stages=2 --set dout_stages=2 --set dq_path=launch \
//         --set ds_stages=2 --set rows=128 --set keys=64 --set k_stages=2 --set v_stages=1 \
//         --set order=by_head --set turns=free --set second=beside

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
  CUtensorMap q, dout, k, v, dq, dk, dv;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 256, kDv = 256;  // head dims of keys and of values
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kBc = 64;  // keys that a block keeps, whose gradients it makes
constexpr int kPassingRows = 64;  // query rows that pass by them at a time
constexpr int kConsumers = 2;  // warpgroups that compute, beside the producer
constexpr int kThreads = 384;
constexpr int kMaxBlocks = 132;  // as many as run at once
constexpr int kQStages = 2, kDoutStages = 2;  // tiles of them in shared memory
constexpr int kBr = 128;  // query rows that a block of the other launch keeps
constexpr int kPassingKeys = 64;  // keys that pass by them at a time
constexpr int kQueryConsumers = 2;
constexpr int kQueryThreads = 384;
constexpr int kKStages = 2, kVStages = 1;  // tiles of them in shared memory
constexpr int kRowBox = 64, kKeyBox = 64;  // rows and keys that one copy brings
constexpr int kStatisticsRows = 64, kStatisticsThreads = 256;

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
  alignas(16) float4 weights[kConsumers / 2][kPassingRows / 8][kWarpgroup];  // from who makes them to its neighbour
  alignas(16) float lse[kQStages][kPassingRows], delta[kDoutStages][kPassingRows];
  // A stage is full once its bytes have arrived, and empty once every warp of consumers has done with it.
  Barrier kept_full, q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  Barrier kept_empty;  // once every warp of consumers has read what it needs of keys and values
  Barrier next_full, next_empty;  // once the producer has told the next turn, and every warp of consumers has read it
  int next;
};

using KeptRows = Element[kBr * kChunk];
using PassingKeys = Element[kPassingKeys * kChunk];
// Query rows and gradients of outputs, and keys and values that pass by.
struct QueryStorage {
  alignas(1024) KeptRows q[kDChunks];
  alignas(1024) KeptRows dout[kDvChunks];
  alignas(1024) PassingKeys k[kKStages][kDChunks];
  alignas(1024) PassingKeys v[kVStages][kDvChunks];
  Barrier kept_full, k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};

static_assert(sizeof(QueryStorage) == 230400, "the size that pruning counted on");
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

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// Waits until the launch in front of this one, of the same call, has ended: so this one does not end before it.
__device__ __forceinline__ void end_behind_earlier_launches() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
}

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

__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until all but the last kGroups groups of this thread's stores have read what they store.
template <int kGroups>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}

// Brings bytes that lie side by side to shared memory; counts them towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

__device__ __forceinline__ void wgmma_m64n256k16_bf16_rs_trans(
    float (&d)[128], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
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
  return (args.seqlen_q + 63) / 64 * 64;
}
__device__ __forceinline__ float* lse_of(const AttentionArgs& args, int batch, int head) {
  return args.workspace + (static_cast<long long>(batch) * args.num_q_heads + head) * filled_rows(args);
}
__device__ __forceinline__ float* delta_of(const AttentionArgs& args, int batch, int head) {
  return lse_of(args, batch, head) +
         ((static_cast<long long>(args.batch)) * args.num_q_heads * ((args.seqlen_q + 63) / 64 * 64) + 63) / 64 * 64;
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
    float (&s)[32], unsigned long long a, unsigned long long b, bool accumulate) {
  wgmma_m64n64k16_bf16_ss(s, a, b, accumulate);
}
__device__ __forceinline__ void multiply(float (&sum)[128], const unsigned (&a)[4], unsigned long long b) {
  wgmma_m64n256k16_bf16_rs_trans(sum, a, b, true);
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
    first_key = number % tiles * kBc;
    kv_head = number / tiles % args.num_kv_heads;
    batch = number / tiles / args.num_kv_heads;
    end_key = min(first_key + kBc, args.seqlen_k);
    find_rows(args, batch, first_key, end_key, first_row, end_row);
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

// How many turns have been taken beside the first ones of all blocks: behind what is known of rows of all heads.
__device__ __forceinline__ int* turns_taken(const AttentionArgs& args) {
  return reinterpret_cast<int*>(delta_of(args, args.batch, 0));
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

// Writes a warp's sixteen rows of gradients, from `first_row` on and before `end`, of keys that no row sees.
template <int columns>
__device__ __forceinline__ void write_zeros(Element* array, long long stride, int first_row, int end) {
  constexpr int kAccesses = columns / 8;  // of a row
  for (int i = threadIdx.x % 32; i < 16 * kAccesses; i += 32) {
    const int row = first_row + i / kAccesses;
    if (row < end) *reinterpret_cast<uint4*>(array + row * stride + i % kAccesses * 8) = uint4{};
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
    attention_bf16_d256_backward_statistics(const AttentionArgs args) {
  let_next_launch_begin();

  if (blockIdx.x == 0 && threadIdx.x == 0) *turns_taken(args) = 0;
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

// Gradients of keys and values: a block keeps kBc of them at a time, and the rows that see some pass by. Of 64 keys one
// warpgroup makes weights and the gradients of values, another those of keys.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d256_backward_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
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
    fence_barrier_init();
  }
  // Begins beside the last blocks that keep query rows, whose launch leaves nothing for this one. That had waited for
  // statistics before it let this one begin, and the copy engine brings these from L2: L1 may have older lines of them.
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kDoutStages> dout_pipe;
  unsigned kept_phase = 0, next_phase = 0;
  const int count = Turn::count(args);
  if (warp < 4) {
    give_registers<24>();
    if (warp == 1 && blockIdx.x == gridDim.x - 1) {
      // Who is told that this launch has ended counts on the end of the one in front of it, too.
      end_behind_earlier_launches();
    }
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
          // Rows have room sooner than keys, of which the turn before has need until its last sums.
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
#pragma unroll 1
  for (int number = blockIdx.x; number < count;) {
    const Turn turn(args, number);
    const int batch = turn.batch, kv_head = turn.kv_head, first_key = turn.first_key;
    const int first_row = turn.first_row, end_key = turn.end_key, of_head = turn.of_head;
    const int consumer = warp / 4 - 1, pair = consumer / 2, lane = threadIdx.x % 32, thread = threadIdx.x % kWarpgroup;
    const int own = pair * 64;  // the pair's first key here
    const int weights_full = 1 + 2 * pair, weights_empty = 2 + 2 * pair;  // named barriers
    const int values_next = kConsumers + weights_full, keys_next = kConsumers + weights_empty;  // whose products are next
    float4 (&passed)[kPassingRows / 8][kWarpgroup] = smem.weights[pair];
    if (of_head > 0) barrier_wait(&smem.kept_full, kept_phase);
    if (consumer % 2 == 0) {
      const int own_key = first_key + own + warp % 4 * 16 + lane / 4;  // the thread's first
      const unsigned long long k_desc = descriptor(smem.k[0] + own * kChunk);
      const float scale = args.scale * kLog2e;
      float sum_v[kDv / 2] = {}, s[kPassingRows / 2];
      unsigned weights[kPassingRows / 16][4];
      int left = of_head * group, head = kv_head * group, first = first_row;  // tiles, and which is the next
      const auto start_next = [&] {
        barrier_wait(&smem.q_full[q_pipe.stage], q_pipe.phase);
        start_products<kDSteps, KeptKeys, PassingRows>(s, k_desc, descriptor(smem.q[q_pipe.stage]));
      };
      // Makes weights of scores, passes them on, and starts the sums of values when it is their turn.
      const auto take_tile = [&] {
        float factors[kPassingRows / 2];
        // What the gradient of each weight is multiplied by.
        const auto weigh_all = [&](auto masked) {
          constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
          for (int i = 0; i < kPassingRows / 2; i += 4) {
            const int column = i * 2 + lane % 4 * 2;
            const float2 lse = *reinterpret_cast<const float2*>(smem.lse[q_pipe.stage] + column);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int row = first + column + e;
              const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int at = i + 2 * h + e, key = own_key + 8 * h;
                factors[at] = 1.0f;
                weigh<kMasked>(s[at], factors[at], args, batch, head, row, key, seen, scale, e ? lse.y : lse.x, 0.0f);
              }
            }
          }
        };
        if (is_partial(args, batch, first, first + kPassingRows, first_key, end_key)) {
          weigh_all(Constant<true>{});
        } else {
          weigh_all(Constant<false>{});
        }
        release(&smem.q_empty[q_pipe.stage]);
        q_pipe.advance();
        pack_weights(s, weights);
        const bool is_first = left == of_head * group;
        if (!is_first) named_barrier_sync(weights_empty, 2 * kWarpgroup);
#pragma unroll
        for (int i = 0; i < kPassingRows / 8; ++i) {
          passed[i][thread] = make_float4(factors[4 * i], factors[4 * i + 1], factors[4 * i + 2], factors[4 * i + 3]);
        }
        named_barrier_arrive(weights_full, 2 * kWarpgroup);
        barrier_wait(&smem.dout_full[dout_pipe.stage], dout_pipe.phase);
        if (!is_first) named_barrier_sync(values_next, 2 * kWarpgroup);
        start_sums(sum_v, weights, descriptor(smem.dout[dout_pipe.stage], sizeof(PassingRows)));
        first += kPassingRows;
        if (first == first_row + of_head * kPassingRows) {
          first = first_row;
          ++head;
        }
      };
      if (left > 0) {
        start_next();
        wgmma_wait<0>();
        hold(s);
#pragma unroll 1
        for (; left > 1; --left) {
          take_tile();
          start_next();
          named_barrier_arrive(keys_next, 2 * kWarpgroup);
          wgmma_wait<1>();
          hold(sum_v);
          release(&smem.dout_empty[dout_pipe.stage]);
          dout_pipe.advance();
          wgmma_wait<0>();
          hold(s);
        }
        release(&smem.kept_empty);
        take_tile();
        named_barrier_arrive(keys_next, 2 * kWarpgroup);
        wgmma_wait<0>();
      }
      hold(sum_v);
      if (of_head > 0) {
        named_barrier_sync(weights_empty, 2 * kWarpgroup);  // the other warpgroup has done with these rows, too
        Element* const staged = smem.dout[dout_pipe.stage][0] + (own + warp % 4 * 16) * kChunk;
        send_rows(&maps.dv, staged, kPassingRows * kChunk, sum_v, 1.0f,
                  first_key + own + warp % 4 * 16, kv_head, batch);
        if (lane == 0) tma_wait_read<0>();
        __syncwarp();
        release(&smem.dout_empty[dout_pipe.stage]);
        dout_pipe.advance();
      } else {
        write_zeros<kDv>(
            args.dv + batch * args.dv_stride_batch + kv_head * args.dv_stride_head, args.dv_stride_row,
            first_key + own + warp % 4 * 16, end_key);
      }
    } else {
      const unsigned long long v_desc = descriptor(smem.v[0] + own * kChunk);
      float sum_k[kD / 2] = {}, gradient[kPassingRows / 2];
      unsigned gradients[kPassingRows / 16][4];
      int left = of_head * group;  // tiles
      const auto start_next = [&] {
        barrier_wait(&smem.dout_full[dout_pipe.stage], dout_pipe.phase);
        start_products<kDvSteps, KeptKeys, PassingRows>(gradient, v_desc, descriptor(smem.dout[dout_pipe.stage]));
      };
      // Makes gradients of scores of those of weights, and starts the sums of keys when it is their turn.
      const auto take_tile = [&] {
        named_barrier_sync(weights_full, 2 * kWarpgroup);
#pragma unroll
        for (int i = 0; i < kPassingRows / 8; ++i) {
          const float2 delta = *reinterpret_cast<const float2*>(smem.delta[dout_pipe.stage] + i * 8 + lane % 4 * 2);
          const float4 four = passed[i][thread];
          const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float product = factors[e] * (gradient[4 * i + e] - (e % 2 ? delta.y : delta.x));
            gradient[4 * i + e] = factors[e] == 0.0f ? 0.0f : product;
          }
        }
        named_barrier_arrive(weights_empty, 2 * kWarpgroup);
        release(&smem.dout_empty[dout_pipe.stage]);
        dout_pipe.advance();
        pack_weights(gradient, gradients);
        barrier_wait(&smem.q_full[q_pipe.stage], q_pipe.phase);
        named_barrier_sync(keys_next, 2 * kWarpgroup);
        start_sums(sum_k, gradients, descriptor(smem.q[q_pipe.stage], sizeof(PassingRows)));
      };
      if (left > 0) {
        start_next();
        wgmma_wait<0>();
        hold(gradient);
#pragma unroll 1
        for (; left > 1; --left) {
          take_tile();
          start_next();
          named_barrier_arrive(values_next, 2 * kWarpgroup);
          wgmma_wait<1>();
          hold(sum_k);
          release(&smem.q_empty[q_pipe.stage]);
          q_pipe.advance();
          wgmma_wait<0>();
          hold(gradient);
        }
        release(&smem.kept_empty);
        take_tile();
        wgmma_wait<0>();
      }
      hold(sum_k);
      if (of_head > 0) {
        Element* const staged = smem.q[q_pipe.stage][0] + (own + warp % 4 * 16) * kChunk;
        send_rows(&maps.dk, staged, kPassingRows * kChunk, sum_k, args.scale,
                  first_key + own + warp % 4 * 16, kv_head, batch);
        if (lane == 0) tma_wait_read<0>();
        __syncwarp();
        release(&smem.q_empty[q_pipe.stage]);
        q_pipe.advance();
      } else {
        write_zeros<kD>(
            args.dk + batch * args.dk_stride_batch + kv_head * args.dk_stride_head, args.dk_stride_row,
            first_key + own + warp % 4 * 16, end_key);
      }
    }
    if (of_head > 0) kept_phase ^= 1;
    barrier_wait(&smem.next_full, next_phase);
    number = smem.next;
    __syncwarp();
    release(&smem.next_empty);
    next_phase ^= 1;
  }
}

// Gradients of query rows: the block keeps kBr of them, each consumer 64, and the keys that they see pass by.
extern "C" __global__ void __launch_bounds__(kQueryThreads, 1)
    attention_bf16_d256_backward_queries(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  QueryStorage& smem = *reinterpret_cast<QueryStorage*>(shared_bytes);
  const int tiles = (args.seqlen_q + kBr - 1) / kBr;
  const int first_row = (tiles - 1 - int(blockIdx.x) % tiles) * kBr, head = int(blockIdx.x) / tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads), end_row = min(first_row + kBr, args.seqlen_q);
  // What the block's rows see begins with the first's keys and ends with the last's.
  const int begin_keys = first_key_of(args, batch, first_row) / kPassingKeys * kPassingKeys;
  const int end_keys = end_key_of(args, batch, end_row - 1);

  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&smem.kept_full, 1);
    for (int i = 0; i < kKStages; ++i) {
      barrier_init(&smem.k_full[i], 1);
      barrier_init(&smem.k_empty[i], kArrivals * 4 * kQueryConsumers);
    }
    for (int i = 0; i < kVStages; ++i) {
      barrier_init(&smem.v_full[i], 1);
      barrier_init(&smem.v_empty[i], kArrivals * 4 * kQueryConsumers);
    }
    fence_barrier_init();
  }
  wait_for_earlier_launches();
  let_next_launch_begin();
  __syncthreads();

  PipelineState<kKStages> k_pipe;
  PipelineState<kVStages> v_pipe;
  if (warp < 4) {
    give_registers<24>();
    if (warp != 0 || begin_keys >= end_keys || !elect_one()) return;
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    barrier_expect(&smem.kept_full, sizeof(smem.q) + sizeof(smem.dout));
    load_rows<kBr, kRowBox, kDChunks>(smem.q, &maps.q, &smem.kept_full, first_row, head, batch);
    load_rows<kBr, kRowBox, kDvChunks>(smem.dout, &maps.dout, &smem.kept_full, first_row, head, batch);
    for (int first = begin_keys; first < end_keys; first += kPassingKeys) {
      barrier_wait(&smem.k_empty[k_pipe.stage], k_pipe.phase ^ 1);
      barrier_expect(&smem.k_full[k_pipe.stage], sizeof(smem.k[0]));
      load_rows<kPassingKeys, kKeyBox, kDChunks>(
          smem.k[k_pipe.stage], &maps.k, &smem.k_full[k_pipe.stage], first, kv_head, batch);
      k_pipe.advance();
      barrier_wait(&smem.v_empty[v_pipe.stage], v_pipe.phase ^ 1);
      barrier_expect(&smem.v_full[v_pipe.stage], sizeof(smem.v[0]));
      load_rows<kPassingKeys, kKeyBox, kDvChunks>(
          smem.v[v_pipe.stage], &maps.v, &smem.v_full[v_pipe.stage], first, kv_head, batch);
      v_pipe.advance();
    }
    return;
  }
  take_registers<240>();
  const int lane = threadIdx.x % 32;
  const int own = (warp / 4 - 1) * 64;  // the consumer's first row here
  const int own_row = first_row + own + warp % 4 * 16 + lane / 4;  // the thread's first
  const unsigned long long q_desc = descriptor(smem.q[0] + own * kChunk), dout_desc = descriptor(smem.dout[0] + own * kChunk);
  const float scale = args.scale * kLog2e;
  float lse[2], delta[2], sum[kD / 2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(own_row + 8 * h, args.seqlen_q - 1);  // what is not there weighs nothing
    lse[h] = lse_of(args, batch, head)[row];
    delta[h] = delta_of(args, batch, head)[row];
  }
  if (begin_keys < end_keys) barrier_wait(&smem.kept_full, 0);
#pragma unroll 1
  for (int first = begin_keys; first < end_keys; first += kPassingKeys) {
    const unsigned long long k_desc = descriptor(smem.k[k_pipe.stage], sizeof(PassingKeys));
    float s[kPassingKeys / 2], gradient[kPassingKeys / 2];
    unsigned gradients[kPassingKeys / 16][4];
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    start_products<kDSteps, KeptRows, PassingKeys>(s, q_desc, k_desc);
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    start_products<kDvSteps, KeptRows, PassingKeys>(gradient, dout_desc, descriptor(smem.v[v_pipe.stage]));
    wgmma_wait<0>();
    hold(s);
    hold(gradient);
    release(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
    const auto weigh_all = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = own_row + 8 * h;
        const KeyRange seen = kMasked ? keys_of(args, batch, row) : KeyRange{};
#pragma unroll
        for (int i = 2 * h; i < kPassingKeys / 2; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = first + i / 4 * 8 + lane % 4 * 2 + e;
            weigh<kMasked>(s[i + e], gradient[i + e], args, batch, head, row, key, seen, scale, lse[h], delta[h]);
          }
        }
      }
    };
    if (is_partial(args, batch, first_row, first_row + kBr, first, first + kPassingKeys)) {
      weigh_all(Constant<true>{});
    } else {
      weigh_all(Constant<false>{});
    }
    pack_weights(gradient, gradients);
    start_sums(sum, gradients, k_desc);
    wgmma_wait<0>();
    release(&smem.k_empty[k_pipe.stage]);
    k_pipe.advance();
  }
  hold(sum);
  // By way of the consumer's own query rows, which nobody reads any more.
  send_rows(&maps.dq, smem.q[0] + (own + warp % 4 * 16) * kChunk, kBr * kChunk, sum, args.scale,
            first_row + own + warp % 4 * 16, head, batch);
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
extern "C" long long attention_bf16_d256_backward_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  return 4 * ((batch * num_q_heads * ((seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 +
              (batch * num_q_heads * ((seqlen_q + 63) / 64 * 64) + 63) / 64 * 64 + 64);
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
      cudaFuncSetAttribute(attention_bf16_d256_backward_statistics, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 256, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d256_backward_statistics, *args);
}

static int launch_queries(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  const bool any_keys = args->seqlen_k > 0;  // without, their arrays may be null
  TensorMaps maps;
  const cudaError_t q_status = encode_map(
      &maps.q, args->q, {kD, args->seqlen_q, args->num_q_heads, args->batch},
      {args->q_stride_row, args->q_stride_head, args->q_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (q_status != cudaSuccess) return q_status;
  const cudaError_t dout_status = encode_map(
      &maps.dout, args->dout, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->dout_stride_row, args->dout_stride_head, args->dout_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dout_status != cudaSuccess) return dout_status;
  const cudaError_t k_status = encode_map(
      &maps.k, any_keys ? args->k : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->k_stride_row, args->k_stride_head, args->k_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const cudaError_t v_status = encode_map(
      &maps.v, any_keys ? args->v : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->v_stride_row, args->v_stride_head, args->v_stride_batch}, 64, 64,
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
  constexpr size_t smem_bytes = 230400;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d256_backward_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 384, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d256_backward_queries, *args, maps);
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
      {args->q_stride_row, args->q_stride_head, args->q_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (q_status != cudaSuccess) return q_status;
  const cudaError_t dout_status = encode_map(
      &maps.dout, args->dout, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->dout_stride_row, args->dout_stride_head, args->dout_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (dout_status != cudaSuccess) return dout_status;
  const cudaError_t k_status = encode_map(
      &maps.k, any_keys ? args->k : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->k_stride_row, args->k_stride_head, args->k_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const cudaError_t v_status = encode_map(
      &maps.v, any_keys ? args->v : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->v_stride_row, args->v_stride_head, args->v_stride_batch}, 64, 64,
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
      cudaFuncSetAttribute(attention_bf16_d256_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(grid, kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d256_backward_kernel, *args, maps);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d256_backward(const AttentionArgs* args, cudaStream_t stream) {
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
  if (const int status = launch_queries(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
// flashgen: {"problem": {"dtype": "bf16", "batch": 32, "num_q_heads": 8, "num_kv_heads": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 256, "head_dim_v": 256, "causal": false, "precision": "auto", "backward": true}, "family": "wgmma-backward", "variant": {"bc": 64, "apart": true, "br": 64, "schedule": "ahead", "parts": 1, "kept": "shared", "q_stages": 2, "dout_stages": 2, "dq_path": "launch", "cluster": 1, "sum_stages": 2, "heads": 1, "ds_stages": 2, "rows": 128, "keys": 64, "k_stages": 2, "v_stages": 1, "order": "by_head", "meeting": "at_once", "ranges": "of_rows", "min_blocks": 1, "turns": "free", "sums": "any_order", "walk": "down", "far_keys": "walked", "last_turn": "whole", "second": "beside", "sections": "held", "finisher": "consumers", "writer": "producer"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d256_backward", "launches": [{"threads": 256, "smem_bytes": 0, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "statistics"}, {"threads": 384, "smem_bytes": 230400, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [{"array": "q", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dout", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "k", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "v", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dq", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dk", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dv", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "queries", "dependent": true}, {"threads": 384, "smem_bytes": 215040, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [{"array": "q", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dout", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "k", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "v", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dq", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dk", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "dv", "rows": 16, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": 132, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "of_keys": true, "dependent": true}], "digest": "11b78e905d8f53ea", "figures": [2109, 1031]}
