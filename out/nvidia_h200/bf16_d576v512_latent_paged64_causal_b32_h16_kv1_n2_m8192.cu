// attention_bf16_d576v512_latent_paged64: flash attention, bf16, head dim 576 (values 512), tuned with a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Queries are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right in each sequence; several query
// heads may share one key/value head. How many keys a sequence has only the card knows; that, lengths, strides, heads
// and scale are run-time arguments.
//
// Values are the first 512 columns of the keys: k is both.
//
// Keys and values lie in pages of 64 keys: caches are (pages, heads, page_size, head_dim) by strides. Each
// sequence's row of page_table lists its pages, which others may have too.
//
// Family latent:
//   splits = 1                 blocks of a cluster that share a tile's keys
//   boxes = 1                  chunks of 64 columns of keys that are waited for at once
//   workspace_splits = 4       blocks of no cluster that do so by way of the workspace
//
// Measured on NVIDIA H200, batch 32, 16 query and 1 key/value heads, 2 query and 8192 key rows, pages of 64,
// with a causal mask: 91.66 us (median), spread 1.9 %, 199.1 TFLOP/s, 168 registers per thread, occupancy
// 19 %. Largest error per head against float64: 1.7e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA
// 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c bf16_d576v512_latent_paged64_causal_b32_h16_kv1_n2_m8192.cu
//     (-DFLASHGEN_CAUSAL=0 builds it with no mask)
//
// Regenerate:
//
//     flashgen emit bf16_d576v512_latent_paged64_causal_b32_h16_kv1_n2_m8192.cu \
//         --device h200 --dtype bf16 --d 576 --dv 512 --latent --page-size 64 --causal --batch 32 \
//         --seqlen-q 2 --seqlen-k 8192 --family latent --set splits=1 --set boxes=1 \
//         --set workspace_splits=4

#include <cuda_bf16.h>
#include <cuda.h>
#if defined(FLASHGEN_DEBUG) && !defined(__CUDACC_RTC__)
#include <cstdio>
#endif

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 1
#endif

// Strides are in elements. lse may be null; else it is contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  __nv_bfloat16* o;
  float* lse;
  const int* page_table;  // (batch, max_pages): the pages of each sequence's keys, in their order
  const int* seqused_k;  // keys of each sequence; null: all have seqlen_k
  float* workspace;  // for what launches leave each other
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_page, k_stride_head, k_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long page_table_stride;  // from one row to the next
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k, num_pages, page_size, max_pages;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 176, "callers from other languages pack the arguments by hand");

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap k;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
constexpr bool kRowsMayBeEmpty = true;  // of the keys that a block walks
using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 576;  // head dim of queries and keys
constexpr int kDv = 512;  // of values, the first columns of keys, and of outputs
constexpr int kVec = 8;  // elements that strides must be multiples of

constexpr int kBr = 64;  // query rows of a block, those of all heads that share keys
constexpr int kBc = 64;  // keys per tile
constexpr int kSplits = 4;  // blocks with the same rows, each with a range of keys
constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kConsumerThreads = 2 * kWarpgroup;  // that compute, beside the warpgroup that copies
constexpr int kThreads = 384;

// A tile in shared memory is made of chunks of 64 columns, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16;  // steps of 16 along the head dim in q k^T
constexpr int kKeySteps = kBc / 16;  // steps of 16 along the keys in p v
constexpr int kHalf = kDv / 2;  // columns of values of which a consumer has the outputs
constexpr int kHalfChunks = kHalf / kChunk;
constexpr int kRestChunks = kDChunks - 2 * kHalfChunks;  // of keys that are no values
constexpr int kBoxes = 1;  // chunks of keys that are waited for at once
constexpr int kArrivals = (kDChunks + kBoxes - 1) / kBoxes;

// Named barriers of the block.
constexpr int kConsumersBarrier = 1;  // of both consumers
constexpr int kWeightsBarrier = 2;  // tells, by consumer, the other one that its weights are there

constexpr unsigned kChunkBytes = kBc * kChunk * sizeof(Element);
// Rows of maps end here, where those of a sequence do; as many steps of so many bytes come round to the same address.
constexpr int kRowsEnd = 1 << 30;
constexpr long long kWayRound = 1LL << 34;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using Chunk = Element[64 * kChunk];  // of 64 rows of Q, or keys
// Outputs before their division, as threads of the consumers hold them: of eight neighbouring columns a thread's two,
// of row g and then of row g + 8 of its warp's sixteen.
using Outputs = float4[2][kHalf / 8][kWarpgroup];

struct SharedStorage {
  alignas(1024) Chunk q[kDChunks];
  alignas(1024) Chunk k[2][kDChunks];  // a tile of each consumer
  alignas(1024) Chunk p;  // one consumer's weights, for the other
  // Of a tile, chunks are full once their bytes have arrived. Those of each half of values are empty once the consumer
  // that has its outputs has done with them; the rest as soon as the tile's scores are there.
  Barrier full[2][kArrivals], half_empty[2][2], rest_empty[2];
  Barrier queries;  // there once Q is
  float row_max[kBr];  // running maxima, as of the last tile that a consumer weighed
};

// What some of the keys make of the block's rows: outputs, sums by both consumers, maxima.
struct PartialResult {
  Outputs o;
  float row_sum[2][kBr];
  float row_max[kBr];
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

constexpr int kPageSize = 64;  // keys per page

// How the rows of a sequence's keys, or of its values, are found: in pages, which its row of the table lists.
struct PagedRows {
  const int* pages;
  long long page_stride, row_stride;
  int num_pages;  // of the cache
  int last_key;  // of the sequence: the table says nothing of later ones
};

__device__ __forceinline__ PagedRows find_rows(
    const AttentionArgs& args, int batch, long long page_stride, long long row_stride) {
  const int* pages = args.page_table + batch * args.page_table_stride;
  return {pages, page_stride, row_stride, args.num_pages, args.seqlen_k - 1};
}

// How many keys a sequence has: no more than the caller knows there to be room for.
__device__ __forceinline__ int count_keys(const AttentionArgs& args, int batch) {
  return args.seqused_k == nullptr ? args.seqlen_k : min(max(__ldg(args.seqused_k + batch), 0), args.seqlen_k);
}

// The page that is number `nth` of a sequence. Whatever the table says, it is one of the cache.
__device__ __forceinline__ unsigned page_of(const PagedRows& rows, int nth) {
  const int page = __ldg(rows.pages + nth);
#ifdef FLASHGEN_DEBUG
  if (unsigned(page) >= unsigned(rows.num_pages)) {
    printf("flashgen: the page table has page %d, the cache has %d pages\n", page, rows.num_pages);
  }
#endif
  return min(unsigned(page), unsigned(rows.num_pages - 1));
}

// How far it begins.
__device__ __forceinline__ long long page_offset(const PagedRows& rows, int nth) {
  return page_of(rows, nth) * rows.page_stride;
}

// How far a key's row is.
__device__ __forceinline__ long long row_offset(const PagedRows& rows, int key) {
  const int nth = int(unsigned(key) / unsigned(kPageSize));
  return page_offset(rows, nth) + (key - nth * kPageSize) * rows.row_stride;
}

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

// Shows ordinary writes to shared memory to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Brings the box of rows from (x, kRowsEnd - row before `end`, head) on, where they end, to shared memory, zeros for
// what is not there; counts its bytes towards `barrier`.
__device__ __forceinline__ void tma_load_until(
    void* shared, const CUtensorMap* map, Barrier* barrier, int x, int row, int head, int end) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(row), "r"(head), "r"(end),
        "r"(kRowsEnd)
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

__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned* m) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
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
// p v has p in registers or, of the other consumer, in shared memory, and v by rows of n.
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

__device__ __forceinline__ void wgmma_m64n256k16_bf16_ss_trans(
    float (&d)[128], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 1;\n"
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

// The work of a block: kBr of the rows of all query heads that share a head of keys, row r being position r / group of
// head r % group, and the tiles of keys that it walks, from the last to the first.
struct Tile {
  int first_row, num_rows, group, head, kv_head, batch;
  int first_tile, last_tile;

  __device__ __forceinline__ int num_tiles() const { return last_tile - first_tile; }
};

// The end of the keys that a row sees.
__device__ __forceinline__ int end_of_keys(const AttentionArgs& args, const Tile& tile, int row) {
  int end = args.seqlen_k;
  if (kCausal) end = min(end, max(0, row / tile.group + args.seqlen_k - args.seqlen_q + 1));
  return end;
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
    const float (&s)[n], SoftmaxState& softmax, float (&rescale)[2], float scale) {
  // A maximum that is out of date by a factor of 2^8 harms neither range nor precision. As integers, positive
  // floats compare as they are; zero bounds the others.
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int bound = 0;
#pragma unroll
    for (int t = 0; t < n / 4; ++t) {
      bound = __vimax3_s32(bound, __float_as_int(s[4 * t + 2 * h]), __float_as_int(s[4 * t + 2 * h + 1]));
    }
    grown |= fmaf(__int_as_float(bound), scale, -softmax.max[h]) > 8.0f;
  }
  if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float tile_max = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int t = 1; t < n / 4; ++t) tile_max = fmaxf(tile_max, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
    const float row_max = fmaxf(softmax.max[h], tile_max * scale);
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
__device__ __forceinline__ void weigh(float (&s)[n], SoftmaxState& softmax, float scale) {
  float base[2], sum[2][2] = {};  // of even and of odd columns: short chains of additions
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    base[h] = kRowsMayBeEmpty && softmax.max[h] == -kInfinity ? 0.0f : softmax.max[h];
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float exponent = fmaf(s[i], scale, -base[i / 2 % 2]);
    s[i] = exp2f(exponent);
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) softmax.sum[h] += sum[h][0] + sum[h][1];
}

// Takes over maxima that the other consumer may have raised; true where that changed some.
__device__ __forceinline__ bool follow_maximum(
    const float* row_max, int row, SoftmaxState& softmax, float (&rescale)[2]) {
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float raised = row_max[row + 8 * h];
    const float base = kRowsMayBeEmpty && raised == -kInfinity ? 0.0f : raised;
    grown |= raised != softmax.max[h];
    rescale[h] = exp2f(softmax.max[h] - base);
    softmax.max[h] = raised;
    softmax.sum[h] *= rescale[h];
  }
  return __any_sync(0xffffffffu, grown);
}

__device__ __forceinline__ void rescale_output(float (&o)[kHalf / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kHalf / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// Hides the keys of a tile, from `first_key` on, that a thread's rows do not see: those from `ends` on.
__device__ __forceinline__ void mask(float (&s)[kBc / 2], const int (&ends)[2], int first_key) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int end = ends[e / 2] - first_key - int(threadIdx.x) % 4 * 2 - e % 2;
#pragma unroll
    for (int t = 0; t < kBc / 8; ++t) {
      if (t * 8 >= end) s[4 * t + e] = -kInfinity;
    }
  }
}

// Weights as operands of sixteen keys each: two neighbouring tiles of eight, as a thread has them.
template <int n>
__device__ __forceinline__ void pack_weights(const float (&s)[n], unsigned (&p)[n / 8][4]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}

// Starts s = q k^T, not scaled, for a tile of keys, chunk by chunk as these arrive.
__device__ __forceinline__ void start_qk(
    float (&s)[kBc / 2], unsigned long long q, unsigned long long k, Barrier* full, unsigned phase) {
#pragma unroll
  for (int place = 0; place < kDChunks; ++place) {
    if (place % kBoxes == 0) {
      barrier_wait(&full[place / kBoxes], phase);
      wgmma_fence();
    }
    const int first_step = 4 * (place < kRestChunks ? 2 * kHalfChunks + place : place - kRestChunks);
#pragma unroll
    for (int step = first_step; step < first_step + 4 && step < kDSteps; ++step) {
      wgmma_m64n64k16_bf16_ss(s, step_of_columns<Chunk>(q, step), step_of_columns<Chunk>(k, step),
                            place > 0 || step > first_step);
    }
  }
  wgmma_commit();
}

// Starts o += p v for one tile of keys and half of the columns of its values: by the consumer that made the weights,
// and by the other one.
__device__ __forceinline__ void start_pv(
    float (&o)[kHalf / 2], const unsigned (&p)[kKeySteps][4], unsigned long long v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    wgmma_m64n256k16_bf16_rs_trans(o, p[step], step_of_keys(v, step), true);
  }
  wgmma_commit();
}
__device__ __forceinline__ void start_pv(float (&o)[kHalf / 2], unsigned long long p, unsigned long long v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    wgmma_m64n256k16_bf16_ss_trans(o, step_of_columns<Chunk>(p, step), step_of_keys(v, step), true);
  }
  wgmma_commit();
}

// Brings a tile's weights and its rows' maxima to shared memory, and tells the other consumer so.
__device__ __forceinline__ void pass_weights(
    SharedStorage& smem, const unsigned (&p)[kKeySteps][4], const SoftmaxState& softmax, int row, int consumer) {
  const int lane = threadIdx.x % 32;
  const int own_row = row - lane / 4 + lane % 16;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    // Lanes 0 to 15 name the rows of one column of eight, the others those of the next.
    stmatrix_x4(smem.p + own_row * kChunk + ((step * 2 + lane / 16) ^ own_row % 8) * 8, p[step]);
  }
  __syncwarp();  // all lanes have read the maxima that one of four overwrites
  if (lane % 4 == 0) {
    smem.row_max[row] = softmax.max[0];
    smem.row_max[row + 8] = softmax.max[1];
  }
  fence_proxy_async();
#ifdef FLASHGEN_RACECHECK
  // compute-sanitizer's racecheck does not see all that the arrival orders: for it both wait.
  named_barrier_sync(kWeightsBarrier + consumer, kConsumerThreads);
#else
  named_barrier_arrive(kWeightsBarrier + consumer, kConsumerThreads);
#endif
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
  const Element* k = args.k + kv_head * args.k_stride_head;
  const PagedRows k_rows = find_rows(args, batch, args.k_stride_page, args.k_stride_row);

  const double scale = double(args.scale) * 1.4426950408889634;
  const int end_key = kCausal ? min(args.seqlen_k, row + args.seqlen_k - args.seqlen_q + 1) : args.seqlen_k;
  double row_max = -kInfinity, row_sum = 0.0, o[kColumns] = {};
#pragma unroll 1
  for (int first_key = 0; first_key < end_key; first_key += 32) {
    const Element* key = k + row_offset(k_rows, min(first_key + lane, end_key - 1));
    double score = 0.0;
#pragma unroll 4
    for (int x = 0; x < kD; ++x) score += double(__bfloat162float(q[x])) * double(__bfloat162float(key[x]));
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
      const Element* value = k + row_offset(k_rows, first_key + j);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int x = c * 32 + lane;
        if (x < kDv) o[c] += factor * double(__bfloat162float(value[x]));
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

// Brings a block's rows of Q to shared memory, swizzled as products read them; what is not there becomes zeros. Maxima
// are taken of raw scores: a negative scale turns Q's sign instead.
__device__ __forceinline__ void load_queries(const AttentionArgs& args, Chunk* q, const Tile& tile, int thread) {
  constexpr int kRowPieces = kDChunks * kChunk / kVec;  // 16 bytes each
  constexpr int kOwn = kBr * kRowPieces / kConsumerThreads;  // of a thread: neighbours have neighbouring ones
  const unsigned signs = args.scale < 0.0f ? 0x80008000u : 0u;
  const Element* const first = args.q + tile.batch * args.q_stride_batch + tile.head * args.q_stride_head;
  // All are asked for before any is there: keys are on their way, too, and behind these each answer takes long.
  uint4 values[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int piece = i * kConsumerThreads + thread, column = piece % kRowPieces * kVec;
    const int packed_row = tile.first_row + piece / kRowPieces;
    const Element* const source =
        first + packed_row / tile.group * args.q_stride_row + packed_row % tile.group * args.q_stride_head + column;
    values[i] = make_uint4(0, 0, 0, 0);
    if (packed_row < tile.num_rows && column < kD) values[i] = *reinterpret_cast<const uint4*>(source);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int piece = i * kConsumerThreads + thread, row = piece / kRowPieces, of_row = piece % kRowPieces;
    const uint4 value = values[i];
    *reinterpret_cast<uint4*>(q[of_row / 8] + row * kChunk + (of_row % 8 ^ row % 8) * kVec) =
        make_uint4(value.x ^ signs, value.y ^ signs, value.z ^ signs, value.w ^ signs);
  }
}

// How many heads, as maps of caches number those of all pages, lie between a page and the next.
__device__ __forceinline__ int heads_of_page(const AttentionArgs& args, long long page_stride, long long head_stride) {
  return args.num_kv_heads == 1 || args.num_pages == 1 ? 1 : int(page_stride / head_stride);
}

// The chunk of a tile that comes in this place: those first that are no values, whose room is free first.
__device__ __forceinline__ int chunk_at(int place) {
  return place < kRestChunks ? 2 * kHalfChunks + place : place - kRestChunks;
}

// Brings tiles of keys to shared memory, chunk by chunk as there is room.
__device__ __forceinline__ void produce_keys(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile, const PagedRows& rows) {
  // Pages are looked up a tile ahead. What the sequence has not may be in any: zeros will come of it.
  const auto find_page = [&](int first_key) {
    const int key = first_key;
    if (first_key < 0 || key > rows.last_key) return 0;
    return int(page_of(rows, unsigned(key) / unsigned(kPageSize)));
  };
  const int heads = heads_of_page(args, args.k_stride_page, args.k_stride_head);
  int next_page = tile.num_tiles() > 0 ? find_page((tile.last_tile - 1) * kBc) : 0;
#pragma unroll 1
  for (int i = 0; i < tile.num_tiles(); ++i) {
    const int stage = i % 2, first_key = (tile.last_tile - 1 - i) * kBc;
    const unsigned before = (i / 2 + 1) % 2;  // the parity of what was there
    // Memory is busy with what came first: Q and one tile are enough to begin with.
    if (i == 1) barrier_wait(&smem.queries, 0);
    const int page = next_page;
    next_page = find_page(first_key - kBc);
    // Rows end where those of the sequence do.
    const int key = first_key, row = unsigned(key) % unsigned(kPageSize);
    const int end = min(max(rows.last_key + 1 - (key - row), 0), kPageSize);  // of the page's rows
#pragma unroll 1
    for (int place = 0; place < kDChunks; ++place) {
      Barrier* const full = &smem.full[stage][place / kBoxes];
      if (place == 0) barrier_wait(&smem.rest_empty[stage], before);
      if (place == kRestChunks) barrier_wait(&smem.half_empty[stage][0], before);
      if (place == kRestChunks + kHalfChunks) barrier_wait(&smem.half_empty[stage][1], before);
      const int chunk = chunk_at(place);
      if (place % kBoxes == 0) barrier_expect(full, min(kBoxes, kDChunks - place) * kChunkBytes);
      tma_load_until(smem.k[stage][chunk], &maps.k, full, chunk * kChunk, kRowsEnd - end + row,
                     page * heads + tile.kv_head, end);
    }
  }
}

// The first consumer makes the weights of the first of two tiles, and the outputs of the first half of columns.
__device__ __forceinline__ void walk_of_first(
    const AttentionArgs& args, SharedStorage& smem, const Tile& tile, SoftmaxState& softmax, float (&o)[kHalf / 2]) {
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const int row = int(threadIdx.x) % kWarpgroup / 32 * 16 + int(threadIdx.x) % 32 / 4;  // of the block, and row + 8
  const int ends[] = {end_of_keys(args, tile, tile.first_row + row), end_of_keys(args, tile, tile.first_row + row + 8)};
  const int first_partial = end_of_keys(args, tile, tile.first_row) / kBc;  // tiles before are seen whole
  // A scale of zero becomes too small to matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;
  const unsigned long long q = descriptor(smem.q), k = descriptor(smem.k[0]), weights = descriptor(smem.p);
  // Of each tile the columns of values that the consumer multiplies.
  const unsigned long long v_first = descriptor(smem.k[0][0], sizeof(Chunk));
  const unsigned long long v_second = descriptor(smem.k[1][0], sizeof(Chunk));
#pragma unroll 1
  for (int n = tile.last_tile - 1, phase = 0; n >= tile.first_tile; n -= 2, phase ^= 1) {
    float s[kBc / 2], rescale[2];
    start_qk(s, q, k, smem.full[0], phase);
    wgmma_wait<0>();
    hold(s);
    if (leader) barrier_arrive(&smem.rest_empty[0]);
    if (n >= first_partial) mask(s, ends, n * kBc);
    const bool grown = raise_maximum(s, softmax, rescale, scale);
    weigh(s, softmax, scale);
    unsigned p[kKeySteps][4];
    pack_weights(s, p);
    pass_weights(smem, p, softmax, row, 0);
    if (grown) rescale_output(o, rescale);
    start_pv(o, p, v_first);
    wgmma_wait<0>();
    hold(o);
    if (leader) barrier_arrive(&smem.half_empty[0][0]);
    if (n > tile.first_tile) {
      // The other consumer's weights are of the same maxima or higher ones.
      named_barrier_sync(kWeightsBarrier + 1, kConsumerThreads);
      if (follow_maximum(smem.row_max, row, softmax, rescale)) rescale_output(o, rescale);
      start_pv(o, weights, v_second);
      wgmma_wait<0>();
      hold(o);
      if (leader) barrier_arrive(&smem.half_empty[1][0]);
    }
  }
}

// The second consumer makes the weights of the second of two tiles, which may be missing in the end, and the outputs
// of the second half of columns.
__device__ __forceinline__ void walk_of_second(
    const AttentionArgs& args, SharedStorage& smem, const Tile& tile, SoftmaxState& softmax, float (&o)[kHalf / 2]) {
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const int row = int(threadIdx.x) % kWarpgroup / 32 * 16 + int(threadIdx.x) % 32 / 4;  // of the block, and row + 8
  const int ends[] = {end_of_keys(args, tile, tile.first_row + row), end_of_keys(args, tile, tile.first_row + row + 8)};
  const int first_partial = end_of_keys(args, tile, tile.first_row) / kBc;  // tiles before are seen whole
  // A scale of zero becomes too small to matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;
  const unsigned long long q = descriptor(smem.q), k = descriptor(smem.k[1]), weights = descriptor(smem.p);
  // Of each tile the columns of values that the consumer multiplies.
  const unsigned long long v_first = descriptor(smem.k[0][kHalfChunks], sizeof(Chunk));
  const unsigned long long v_second = descriptor(smem.k[1][kHalfChunks], sizeof(Chunk));
#pragma unroll 1
  for (int n = tile.last_tile - 2, phase = 0; n >= tile.first_tile - 1; n -= 2, phase ^= 1) {
    const bool has_tile = n >= tile.first_tile;
    float s[kBc / 2], rescale[2];
    if (has_tile) {
      start_qk(s, q, k, smem.full[1], phase);
      wgmma_wait<0>();
      hold(s);
      if (leader) barrier_arrive(&smem.rest_empty[1]);
      if (n >= first_partial) mask(s, ends, n * kBc);
    }
    named_barrier_sync(kWeightsBarrier, kConsumerThreads);
    if (follow_maximum(smem.row_max, row, softmax, rescale)) rescale_output(o, rescale);
    start_pv(o, weights, v_first);
    if (has_tile) {
      // These weights are made while the other consumer's are multiplied.
      const bool grown = raise_maximum(s, softmax, rescale, scale);
      weigh(s, softmax, scale);
      unsigned p[kKeySteps][4];
      pack_weights(s, p);
      wgmma_wait<0>();
      hold(o);
      if (leader) barrier_arrive(&smem.half_empty[0][1]);
      pass_weights(smem, p, softmax, row, 1);
      if (grown) rescale_output(o, rescale);
      start_pv(o, p, v_second);
      wgmma_wait<0>();
      hold(o);
      if (leader) barrier_arrive(&smem.half_empty[1][1]);
    } else {
      wgmma_wait<0>();
      hold(o);
      if (leader) barrier_arrive(&smem.half_empty[0][1]);
    }
  }
}

static_assert(sizeof(PartialResult) == 4 * 32960, "the size that the workspace is counted by");

// Neighbouring columns, moved by one access.
template <int N>
struct alignas(4 * N) Columns {
  float at[N];
};

// Where a block leaves what its keys make of its rows. Those of the blocks that share a tile's keys are neighbours.
__device__ __forceinline__ PartialResult& result_of(const AttentionArgs& args, int block) {
  return reinterpret_cast<PartialResult*>(args.workspace)[block];
}

// Transposes four registers of four neighbouring lanes: lane c's register j goes to lane j's register c. So the pieces
// of 4 bytes that a fragment is made of turn into accesses of 16 bytes.
__device__ __forceinline__ void transpose_quad(unsigned (&r)[4]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, odd ? r[j] : r[j + 1], 1);
    if (odd) {
      r[j] = received;
    } else {
      r[j + 1] = received;
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, upper ? r[j] : r[j + 2], 2);
    if (upper) {
      r[j] = received;
    } else {
      r[j + 2] = received;
    }
  }
}

// Where a packed row of outputs begins.
__device__ __forceinline__ Element* output_row(const AttentionArgs& args, const Tile& tile, int packed_row) {
  return args.o + tile.batch * args.o_stride_batch + (tile.head + packed_row % tile.group) * args.o_stride_head +
         packed_row / tile.group * args.o_stride_row;
}

// A thread's two rows, all their keys being weighed.
struct FinishedRows {
  Element* target[2];  // null if there is no such row, or it cannot be trusted
  float inverse[2];  // of the sums of weights
  unsigned untrusted[2];  // by lane
};

// Of warps that have the same rows, one `writes_lse`.
__device__ __forceinline__ FinishedRows finish_rows(
    const AttentionArgs& args, const Tile& tile, int own_row, const float (&row_max)[2], const float (&row_sum)[2],
    bool writes_lse) {
  FinishedRows rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int packed_row = tile.first_row + own_row + 8 * h;
    const bool inside = packed_row < tile.num_rows, keeps = trusted(row_max[h], row_sum[h]);
    rows.target[h] = inside && keeps ? output_row(args, tile, packed_row) : nullptr;
    rows.inverse[h] = keeps ? 1.0f / row_sum[h] : 0.0f;
    rows.untrusted[h] = __ballot_sync(0xffffffffu, inside && !keeps);
    if (inside && keeps && writes_lse && args.lse != nullptr && threadIdx.x % 4 == 0) {
      const long long head = 1LL * tile.batch * args.num_q_heads + tile.head + packed_row % tile.group;
      args.lse[head * args.seqlen_q + packed_row / tile.group] = (row_max[h] + log2f(row_sum[h])) * kLn2;
    }
  }
  return rows;
}

// Divides and writes 32 neighbouring columns of a thread's rows, of which it has two of every eight. Lanes of a row
// exchange theirs, so that each writes eight neighbouring ones.
__device__ __forceinline__ void write_columns(const FinishedRows& rows, const float (&sums)[16], int column) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned pieces[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      pieces[t] = pack(sums[4 * t + 2 * h] * rows.inverse[h], sums[4 * t + 2 * h + 1] * rows.inverse[h]);
    }
    transpose_quad(pieces);
    if (rows.target[h] == nullptr) continue;
    *reinterpret_cast<uint4*>(rows.target[h] + column + threadIdx.x % 4 * 8) =
        make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
  }
}

// Computes again what cannot be trusted of a warp's sixteen rows, of which it does every `sharers`-th from `own` on.
__device__ __forceinline__ void recompute_rows(
    const AttentionArgs& args, const Tile& tile, const FinishedRows& rows, int first_row, int own, int sharers) {
  if ((rows.untrusted[0] | rows.untrusted[1]) == 0) return;
#pragma unroll 1
  for (int i = own; i < 16; i += sharers) {
    if (((i < 8 ? rows.untrusted[0] : rows.untrusted[1]) >> i % 8 * 4 & 1) == 0) continue;
    const int packed_row = tile.first_row + first_row + i;
    Element* const target = output_row(args, tile, packed_row);
    recompute_row(args, tile.batch, tile.head + packed_row % tile.group, packed_row / tile.group,
                  [&](int x, float value) { target[x] = __float2bfloat16_rn(value); });
  }
}

// What a block's keys make of a row: the maximum, and the sum of both consumers' weights.
struct RowNumbers {
  float max, sum;
};

__device__ __forceinline__ RowNumbers numbers_of(const PartialResult* left, int block, int row) {
  return {left[block].row_max[row], left[block].row_sum[0][row] + left[block].row_sum[1][row]};
}

// What they make of eight columns.
__device__ __forceinline__ float4 outputs_of(
    const PartialResult* left, int block, int consumer, int eight, int thread) {
  return left[block].o[consumer][eight][thread];
}

constexpr int kParts = 512 / kConsumerThreads;  // that a block does of its columns
constexpr int kShares = kSplits * kParts;  // of the columns of consumers, by block and part

// Puts together what the blocks with the same rows have left, in the order of their keys: always the same bits. Does
// every kShares-th 32 of the columns of consumers, whose `thread` has them, from `share` on.
__device__ __forceinline__ void put_together(
    const AttentionArgs& args, const Tile& tile, const PartialResult* left, int thread, int share) {
  constexpr int kGroups = kHalf / 32;  // of four times eight columns
  // What is under way together, as far as there are registers: blocks' outputs, and groups of a share.
  constexpr int kAtOnce = kSplits > 8 ? 1 : kSplits < 4 ? kSplits : 4;
  constexpr int kOwnGroups = (kGroups + kShares - 1) / kShares, kMost = 4 / kAtOnce;
  constexpr int kTogether = kOwnGroups < kMost ? kOwnGroups : kMost;
  const int consumer = thread / kWarpgroup, first_row = thread % kWarpgroup / 32 * 16, lane = thread % 32;
  const int own_row = first_row + lane / 4;
  float4 outputs[kTogether][kAtOnce][4];
  const auto bring = [&](float4 (&its)[kAtOnce][4], int group, int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (group < kGroups && first + i < kSplits) {
          its[i][t] = outputs_of(left, first + i, consumer, group * 4 + t, thread % kWarpgroup);
        }
      }
    }
  };
  const auto bring_together = [&](int first_group) {
#pragma unroll
    for (int g = 0; g < kTogether; ++g) bring(outputs[g], first_group + g * kShares, 0);
  };
  bring_together(share);  // while weights are found
  float weights[kSplits][2], row_max[2], row_sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sums[kSplits];
    row_max[h] = -kInfinity;
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const RowNumbers numbers = numbers_of(left, i, own_row + 8 * h);
      weights[i][h] = numbers.max;
      sums[i] = numbers.sum;
      row_max[h] = fmaxf(row_max[h], numbers.max);
    }
    const float base = row_max[h] == -kInfinity ? 0.0f : row_max[h];
    row_sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      weights[i][h] = exp2f(weights[i][h] - base);
      row_sum[h] = fmaf(weights[i][h], sums[i], row_sum[h]);
    }
  }
  const FinishedRows rows = finish_rows(args, tile, own_row, row_max, row_sum, share == 0 && consumer == 0);
#pragma unroll 1
  for (int first_group = share; first_group < kGroups; first_group += kTogether * kShares) {
    if (first_group != share) bring_together(first_group);
#pragma unroll
    for (int g = 0; g < kTogether; ++g) {
      const int group = first_group + g * kShares;
      if (group >= kGroups) break;
      float sums[16] = {};
#pragma unroll
      for (int n = 0; n < kSplits; n += kAtOnce) {
        if (n > 0) bring(outputs[g], group, n);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (n + i >= kSplits) break;
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const float4 its = outputs[g][i][t];
            sums[4 * t] = fmaf(weights[n + i][0], its.x, sums[4 * t]);
            sums[4 * t + 1] = fmaf(weights[n + i][0], its.y, sums[4 * t + 1]);
            sums[4 * t + 2] = fmaf(weights[n + i][1], its.z, sums[4 * t + 2]);
            sums[4 * t + 3] = fmaf(weights[n + i][1], its.w, sums[4 * t + 3]);
          }
        }
      }
      write_columns(rows, sums, consumer * kHalf + group * 32);
    }
  }
  recompute_rows(args, tile, rows, first_row, share * 2 + consumer, kShares * 2);
}

// Leaves what the block's keys make of its rows, but for warps that have none.
__device__ __forceinline__ void finish(
    const AttentionArgs& args, SharedStorage& smem, const Tile& tile, const SoftmaxState& softmax,
    const float (&o)[kHalf / 2]) {
  const int thread = int(threadIdx.x) - kWarpgroup, consumer = thread / kWarpgroup, lane = thread % 32;
  const int first_row = thread % kWarpgroup / 32 * 16, own_row = first_row + lane / 4;
  if (tile.first_row + first_row >= tile.num_rows) return;
  PartialResult& partial = result_of(args, int(blockIdx.x));
#pragma unroll
  for (int t = 0; t < kHalf / 8; ++t) {
    partial.o[consumer][t][thread % kWarpgroup] =
        make_float4(o[4 * t], o[4 * t + 1], o[4 * t + 2], o[4 * t + 3]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_sum = softmax.sum[h];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
    if (lane % 4 == 0) {
      partial.row_sum[consumer][own_row + 8 * h] = row_sum;
      if (consumer == 0) partial.row_max[own_row + 8 * h] = softmax.max[h];  // which is the other one's, too
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d576v512_latent_paged64_kernel(AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  let_next_launch_begin();
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      for (int i = 0; i < kArrivals; ++i) barrier_init(&smem.full[stage][i], 1);
      for (int half = 0; half < 2; ++half) barrier_init(&smem.half_empty[stage][half], 1);
      barrier_init(&smem.rest_empty[stage], 1);
    }
    barrier_init(&smem.queries, 1);
    fence_barrier_init();
  }
  __syncthreads();

  // The query heads that share a head of keys fill the rows of one tile.
  const int group = args.num_q_heads / args.num_kv_heads;
  const int num_rows = args.seqlen_q * group;
  // Neighbouring blocks have the same rows, and each a range of their keys.
  const int block = int(blockIdx.x) / kSplits, split = int(blockIdx.x) % kSplits;
  const int q_tiles = (num_rows + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = block % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
  const int kv_head = block / q_tiles % args.num_kv_heads;
  const int batch = block / q_tiles / args.num_kv_heads;
  const int head = kv_head * group;  // the first of those packed

  args.seqlen_k = count_keys(args, batch);
  const PagedRows k_rows = find_rows(args, batch, args.k_stride_page, args.k_stride_row);

  Tile tile{q_tile * kBr, num_rows, group, head, kv_head, batch, 0, 0};
  const int num_tiles = (end_of_keys(args, tile, min(tile.first_row + kBr, num_rows) - 1) + kBc - 1) / kBc;
  tile.first_tile = int(1LL * num_tiles * split / kSplits);
  tile.last_tile = int(1LL * num_tiles * (split + 1) / kSplits);

  if (warp < 4) {
    give_registers<24>();
    if (warp == 0 && elect_one()) {
      prefetch_map(&maps.k);
      produce_keys(args, maps, smem, tile, k_rows);
    }
  } else {
    take_registers<240>();
    const int thread = int(threadIdx.x) - kWarpgroup;
    if (thread < kBr) smem.row_max[thread] = -kInfinity;
    load_queries(args, smem.q, tile, thread);
    fence_proxy_async();
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);
    if (thread == 0) barrier_arrive(&smem.queries);
    float o[kHalf / 2];
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) o[i] = 0.0f;
    SoftmaxState softmax = { {-kInfinity, -kInfinity}, {0.0f, 0.0f} };
    if (warp < 8) {
      walk_of_first(args, smem, tile, softmax, o);
    } else {
      walk_of_second(args, smem, tile, softmax, o);
    }
    finish(args, smem, tile, softmax, o);
  }
}

// Puts together what the blocks of each tile have left of its rows: each does a share of the columns, by parts.
extern "C" __global__ void __launch_bounds__(512) attention_bf16_d576v512_latent_paged64_combine(AttentionArgs args) {
  // The query heads that share a head of keys fill the rows of one tile.
  const int group = args.num_q_heads / args.num_kv_heads;
  const int num_rows = args.seqlen_q * group;
  // Neighbouring blocks have the same rows, and each a range of their keys.
  const int block = int(blockIdx.x) / kSplits, split = int(blockIdx.x) % kSplits;
  const int q_tiles = (num_rows + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = block % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
  const int kv_head = block / q_tiles % args.num_kv_heads;
  const int batch = block / q_tiles / args.num_kv_heads;
  const int head = kv_head * group;  // the first of those packed

  args.seqlen_k = count_keys(args, batch);
  Tile tile{q_tile * kBr, num_rows, group, head, kv_head, batch, 0, 0};
  const int thread = int(threadIdx.x) % kConsumerThreads, part = int(threadIdx.x) / kConsumerThreads;
  wait_for_earlier_launches();
  if (tile.first_row + thread % kWarpgroup / 32 * 16 >= num_rows) return;  // there are no such rows
  put_together(args, tile, &result_of(args, int(blockIdx.x) - split), thread, split * kParts + part);
}

#ifndef __CUDACC_RTC__
// Describes an array of `sizes` (columns, rows, heads, batch) and `strides` (of rows, heads, batches) in elements,
// which is moved in boxes of `columns` by `rows`.
template <int rank>
static cudaError_t encode_map(
    CUtensorMap* map, const Element* array, const long long (&sizes)[rank], const long long (&strides)[rank - 1],
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
  cuuint64_t whole[rank], stride_bytes[rank - 1];
  for (int i = 0; i < rank; ++i) whole[i] = i == 0 || any_rows ? sizes[i] : 1;
  // The stride of a dimension of one is never used, but must be one that the driver takes.
  for (int i = 0; i < rank - 1; ++i) stride_bytes[i] = whole[i + 1] > 1 ? strides[i] * sizeof(Element) : 16;
  const cuuint32_t box[5] = {columns, rows, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};  // the last of which need not count
  const CUresult status = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<Element*>(array), whole, stride_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Describes an array whose rows end where each box says, by columns, rows, heads, rows again, and the way round. The
// sum of both rows names one, too large by kRowsEnd, where the first of both ends; the last dimension takes that back,
// modulo 2^64. A map that begins so far before its array would do as well, but begin with what may be no memory.
static cudaError_t encode_clipped_map(
    CUtensorMap* map, const Element* array, long long width, long long num_rows, long long heads,
    long long row_stride, long long head_stride, unsigned columns, unsigned rows, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion) {
  const long long sizes[5] = {width, num_rows > 0 ? kRowsEnd : 0, heads, num_rows + 1, kRowsEnd + 1};
  const long long strides[4] = {row_stride, head_stride, row_stride, kWayRound / int(sizeof(Element)) - row_stride};
  return encode_map<5>(map, array, sizes, strides, columns, rows, swizzle, promotion);
}

// The end of the numbers that maps give heads, those of a page following on those of the last; -1 if pages are not a
// whole number of heads apart, or there are too many.
static long long count_heads(const AttentionArgs* args, long long page_stride, long long head_stride) {
  if (args->num_pages == 1) return args->num_kv_heads;
  if (head_stride == 0 || page_stride % head_stride != 0) return -1;
  const long long heads = (args->num_pages - 1) * (page_stride / head_stride) + args->num_kv_heads;
  return heads > 0x7fffffffLL ? -1 : heads;
}

// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_bf16_d576v512_latent_paged64_workspace_bytes(const AttentionArgs* args) {
  const long long batch = args->batch, num_kv_heads = args->num_kv_heads;
  const long long num_q_heads = args->num_q_heads, seqlen_q = args->seqlen_q;
  return 4 * (((seqlen_q * (num_q_heads / num_kv_heads) + kBr - 1) / kBr *
      num_kv_heads * batch * kSplits * 32960 + 63) / 64 * 64);
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

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long num_kv_heads = args->num_kv_heads, seqlen_q = args->seqlen_q;
  if (seqlen_q * (num_q_heads / num_kv_heads) > 0x7fffffffLL - kBr) return cudaErrorInvalidValue;
  const long long blocks = (seqlen_q * (num_q_heads / num_kv_heads) + kBr - 1) / kBr * num_kv_heads * batch * kSplits;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  const bool any_keys = args->seqlen_k > 0;  // without, their arrays may be null
  TensorMaps maps;
  const long long k_apart = args->num_kv_heads > 1 ? args->k_stride_head : args->k_stride_page;
  const long long k_heads = any_keys ? count_heads(args, args->k_stride_page, k_apart) : 1;
  if (k_heads < 0) return cudaErrorInvalidValue;
  const cudaError_t k_status = encode_clipped_map(
      &maps.k, any_keys ? args->k : args->q, kD, any_keys ? kPageSize : 0, k_heads,
      args->k_stride_row, k_apart, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d576v512_latent_paged64_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d576v512_latent_paged64_kernel, *args, maps);
}

static int launch_combine(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long num_kv_heads = args->num_kv_heads, seqlen_q = args->seqlen_q;
  if (seqlen_q * (num_q_heads / num_kv_heads) > 0x7fffffffLL - kBr) return cudaErrorInvalidValue;
  const long long blocks = (seqlen_q * (num_q_heads / num_kv_heads) + kBr - 1) / kBr * num_kv_heads * batch * kSplits;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d576v512_latent_paged64_combine,
          cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(unsigned(blocks), 512, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d576v512_latent_paged64_combine, *args);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d576v512_latent_paged64(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  if (args->num_pages < 0 || args->max_pages < 0 || args->page_size != kPageSize) return cudaErrorInvalidValue;
  if (args->seqlen_k > 0 && (args->page_table == nullptr || args->num_pages == 0)) return cudaErrorInvalidValue;
  // A table too narrow for the keys that there may be.
  if (1LL * args->max_pages * args->page_size < args->seqlen_k) return cudaErrorInvalidValue;
  if (args->workspace == nullptr || reinterpret_cast<unsigned long long>(args->workspace) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  const long long strides[] = {args->q_stride_batch, args->q_stride_head, args->q_stride_row,
                               args->k_stride_page, args->k_stride_head, args->k_stride_row,
                               args->o_stride_batch, args->o_stride_head, args->o_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->o};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(__nv_bfloat16)) != 0) return cudaErrorMisalignedAddress;
  }
  bool begun = false;  // by a launch
  if (const int status = launch_kernel(args, stream, begun)) return status;
  if (const int status = launch_combine(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
// flashgen: {"problem": {"dtype": "bf16", "batch": 32, "num_q_heads": 16, "num_kv_heads": 1, "seqlen_q": 2, "seqlen_k": 8192, "head_dim": 576, "head_dim_v": 512, "causal": true, "precision": "auto", "page_size": 64, "latent": true}, "family": "latent", "variant": {"splits": 1, "workspace_splits": 4, "boxes": 1, "l2_ahead": 0}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d576v512_latent_paged64", "launches": [{"threads": 384, "smem_bytes": 230400, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [{"array": "k", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": null, "cluster": 1, "pack_heads": true, "splits": 1, "heads_per_cluster": 1, "role": "kernel", "workspace_splits": 4}, {"threads": 512, "smem_bytes": 0, "rows_per_block": 64, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": true, "splits": 1, "heads_per_cluster": 1, "role": "combine", "workspace_splits": 4, "dependent": true}], "digest": "b2eed2087744ef99", "figures": [1037, 902]}
