// attention_bf16_d128_paged128: flash attention, bf16, head dim 128, tuned with a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Queries are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right in each sequence; several query
// heads may share one key/value head. How many keys a sequence has only the card knows; that, lengths, strides, heads
// and scale are run-time arguments.
//
// Keys and values lie in pages of 128 keys: caches are (pages, heads, page_size, head_dim) by strides. Each
// sequence's row of page_table lists its pages, which others may have too.
//
// Family wgmma:
//   br = 128                   query rows per tile, 64 for each warpgroup that computes
//   bc = 128                   keys per tile
//   persistent = true          blocks stay for several tiles
//   q_stages = 1               Q tiles in shared memory: 2 bring the next one early
//   k_stages = 3               K tiles in shared memory
//   v_stages = 2               V tiles in shared memory
//   schedule = overlapped      the next scores: before these outputs, or behind them
//   q_in_registers = true      keep Q in registers, which relieves shared memory
//   order_of_groups = products what warpgroups do in turns: nothing, products, exponentials
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   section = 1                heads whose tiles start together by length, 0 all of them
//   min_blocks = 1             blocks per SM
//   o_apart = true             outputs leave by room of their own, beside which the next Q comes
//
// Measured on NVIDIA H200, batch 2, 32 query and 8 key/value heads, 512 query and 8192 key rows, pages of
// 128, with a causal mask: 186.9 us (median), spread 0.2 %, 712.6 TFLOP/s, 168 registers per thread,
// occupancy 19 %. Largest error per head against float64: 1.9e-03. Built by nvcc 13.0.88, driver 580.159.04
// (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -gencode arch=compute_90a,code=sm_90a -c bf16_d128_paged128_causal_b2_h32_kv8_n512_m8192.cu
//     (-DFLASHGEN_CAUSAL=0 builds it with no mask)
//
// Regenerate:
//
//     flashgen emit bf16_d128_paged128_causal_b2_h32_kv8_n512_m8192.cu \
//         --device h200 --dtype bf16 --d 128 --page-size 128 --causal --batch 2 --heads 32 --kv-heads 8 \
//         --seqlen-q 512 --seqlen-k 8192 --family wgmma --set br=128 --set bc=128 --set persistent=true \
//         --set q_stages=1 --set k_stages=3 --set v_stages=2 --set schedule=overlapped \
//         --set q_in_registers=true --set order_of_groups=products --set rescale=lazy --set poly_exp=0 \
//         --set section=1 --set min_blocks=1 --set o_apart=true

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
  const __nv_bfloat16* v;
  __nv_bfloat16* o;
  float* lse;
  const int* page_table;  // (batch, max_pages): the pages of each sequence's keys, in their order
  const int* seqused_k;  // keys of each sequence; null: all have seqlen_k
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_page, k_stride_head, k_stride_row;
  long long v_stride_page, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long page_table_stride;  // from one row to the next
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k, num_pages, page_size, max_pages;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 200, "callers from other languages pack the arguments by hand");

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap q, k, v, o;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
constexpr bool kRowsMayBeEmpty = kCausal;  // though there are keys
constexpr bool kLaterRowsSeeMore = kCausal;

using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 128;  // head dim of queries and keys
constexpr int kDv = 128;  // head dim of values and outputs
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kBr = 128;  // query rows per tile: 64 for each consumer
constexpr int kBc = 128;  // keys per tile
constexpr int kConsumers = 2;  // warpgroups that compute, beside the producer
constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kThreads = 384;
constexpr int kMaxBlocks = 132;  // that NVIDIA H200 runs at once, each of which takes several tiles
// Rows of maps end here, where those of a sequence do; as many steps of so many bytes come round to the same address.
constexpr int kRowsEnd = 1 << 30;
constexpr long long kWayRound = 1LL << 34;
constexpr int kKStages = 3, kVStages = 2;  // tiles of K and of V in shared memory
constexpr int kQStages = 1;  // Q tiles in shared memory

// A tile in shared memory is made of chunks of 64 columns, whose rows of 128 bytes are swizzled.
constexpr int kChunk = 64;
constexpr int kDChunks = (kD + kChunk - 1) / kChunk;
constexpr int kDvChunks = (kDv + kChunk - 1) / kChunk;
constexpr int kDSteps = (kD + 15) / 16;  // steps of 16 along the head dim in q k^T
constexpr int kKeySteps = kBc / 16;  // steps of 16 along the keys in p v
constexpr int kValueTiles = kDv / 8;  // columns of eight in a thread's outputs

// Named barriers of the block, by consumer.
constexpr int kConsumerBarrier = 1;  // its own
constexpr int kOrderBarrier = 1 + kConsumers;  // tells it that the one before it has done

constexpr unsigned kQBytes = 64 * kDChunks * kChunk * sizeof(Element);  // of one consumer
constexpr unsigned kKBytes = kBc * kDChunks * kChunk * sizeof(Element);
constexpr unsigned kVBytes = kBc * kDvChunks * kChunk * sizeof(Element);

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

using QChunk = Element[64 * kChunk];  // of the 64 rows of one consumer
using KChunk = Element[kBc * kChunk];
using VChunk = KChunk;
using OChunk = QChunk;

struct SharedStorage {
  // Q by consumer, and outputs on their way to global memory.
  alignas(1024) QChunk q[kQStages][kConsumers][kDChunks];
  alignas(1024) OChunk o[kConsumers][kDvChunks];
  alignas(1024) KChunk k[kKStages][kDChunks];
  alignas(1024) VChunk v[kVStages][kDvChunks];
  // A stage is full once its bytes have arrived, and empty once every consumer has done with it.
  Barrier q_full[kQStages][kConsumers], q_empty[kQStages];
  Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
};
static_assert(sizeof(SharedStorage) == 230400, "the size that pruning counted on");

constexpr int kPageSize = 128;  // keys per page

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

__device__ __forceinline__ void ldmatrix_x4(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
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

// D = A B, or D += A B if `accumulate`, for one warpgroup: D is 64 x n. q k^T reads k from shared memory,
// p v has p in registers and v by rows of n.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_rs(
    float (&d)[64], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

__device__ __forceinline__ void wgmma_m64n128k16_bf16_rs_trans(
    float (&d)[64], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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

// Does `work` on one tile, by the arguments of its sequence.
template <typename Work>
__device__ __forceinline__ void work_on_tile(
    const AttentionArgs& all, const Work& work, int q_tile, int head, int batch) {
  AttentionArgs args = all;
  args.seqlen_k = count_keys(all, batch);
  work(args, Tile(args, q_tile, head, batch));
}

// Divides by what is the same for many numbers, multiplying by its inverse (Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994), which finds the quotient or one less.
struct Divisor {
  int value;
  unsigned inverse;

  __device__ __forceinline__ explicit Divisor(int value) : value(value), inverse(0xffffffffu / unsigned(value)) {}

  __device__ __forceinline__ int divide(int number, int& remainder) const {
    const int quotient = __umulhi(number, inverse);
    remainder = number - quotient * value;
    const bool less = remainder >= value;
    remainder -= less ? value : 0;
    return quotient + less;
  }
};

// The tiles of a block that stays. Where later rows see more keys, they come in pairs of one head, the longest and
// the shortest that are left, so that all pairs take as long.
template <typename Work>
__device__ __forceinline__ void for_each_tile(const AttentionArgs& args, const Work& work) {
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr, num_heads = args.num_q_heads;
  const Divisor items(kLaterRowsSeeMore ? (q_tiles + 1) / 2 : q_tiles);  // tiles or pairs, of one head
  const Divisor heads(num_heads);  // of one batch
  for (int item = blockIdx.x; item < items.value * num_heads * args.batch; item += gridDim.x) {
    int first, head;
    const int batch = heads.divide(items.divide(item, first), head), last = q_tiles - 1 - first;
    for (int q_tile = kLaterRowsSeeMore ? last : first;; q_tile = first) {
      work_on_tile(args, work, q_tile, head, batch);
      if (q_tile == first) break;
    }
  }
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

// Weights as operands of sixteen keys each: two neighbouring tiles of eight, as a thread has them.
template <int n>
__device__ __forceinline__ void pack_weights(const float (&s)[n], unsigned (&p)[n / 8][4]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale_output(float (&o)[kDv / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// Starts s = q k^T for a consumer's rows and one tile of keys, not scaled.
__device__ __forceinline__ void start_qk(
    float (&s)[kBc / 2], const unsigned (&q)[kDSteps][4], unsigned long long k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    const unsigned long long k_step = step_of_columns<KChunk>(k, step);
    wgmma_m64n128k16_bf16_rs(s, q[step], k_step, step > 0);
  }
  wgmma_commit();
}

// Starts o += p v for a consumer's rows and one tile of keys.
template <int steps>
__device__ __forceinline__ void start_pv(float (&o)[kDv / 2], const unsigned (&p)[steps][4], unsigned long long v) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    wgmma_m64n128k16_bf16_rs_trans(o, p[step], step_of_keys(v, step), true);
  }
  wgmma_commit();
}

// A warp's sixteen rows of Q, as operands of sixteen columns each. Maxima are taken of raw scores: a negative scale
// turns Q's sign instead.
__device__ __forceinline__ void hold_q(unsigned (&q)[kDSteps][4], const QChunk* staged, int warp, bool negative) {
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    const int piece = (step % 4 * 2 + lane / 16) ^ row % 8;
    ldmatrix_x4(q[step], staged[step / 4] + row * kChunk + piece * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[step][i] ^= negative ? 0x80008000u : 0u;
  }
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
  const Element* k = args.k + kv_head * args.k_stride_head;
  const Element* v = args.v + kv_head * args.v_stride_head;
  const PagedRows k_rows = find_rows(args, batch, args.k_stride_page, args.k_stride_row);
  const PagedRows v_rows = find_rows(args, batch, args.v_stride_page, args.v_stride_row);

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
      const Element* value = v + row_offset(v_rows, first_key + j);
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

// Starts to write 64 rows of outputs, but for those that are not there.
__device__ __forceinline__ void store_outputs(
    const TensorMaps& maps, const OChunk* o, const Tile& tile, int first_row) {
  for (int i = 0; i < kDvChunks; ++i) tma_store(&maps.o, o[i], i * kChunk, first_row, tile.head, tile.batch);
}

// Divides by the sums and brings a warp's sixteen rows of outputs to shared memory, as the copy engine wants them.
__device__ __forceinline__ void stage_output(
    OChunk* staged, const float (&o)[kDv / 2], const float (&inverse)[2], int warp) {
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < kValueTiles; n += 2) {
    unsigned m[4];
#pragma unroll
    for (int j = 0; j < 4 && n + j / 2 < kValueTiles; ++j) {
      const int i = 4 * n + 2 * j;
      m[j] = pack(o[i] * inverse[j % 2], o[i + 1] * inverse[j % 2]);
    }
    // Lanes 0 to 15 name the rows of one column of eight, the others those of the next.
    const int piece = (n % 8 + lane / 16) ^ row % 8;
    Element* target = staged[n / 8] + row * kChunk + piece * 8;
    stmatrix_x4(target, m);
  }
}

// A row and column of a warp's outputs in shared memory, as the copy engine wants them.
__device__ __forceinline__ Element& staged_output(OChunk* staged, int row, int x) {
  return staged[x / kChunk][row * kChunk + (x % kChunk / 8 ^ row % 8) * 8 + x % 8];
}

// How many heads, as maps of caches number those of all pages, lie between a page and the next.
__device__ __forceinline__ int heads_of_page(const AttentionArgs& args, long long page_stride, long long head_stride) {
  return args.num_kv_heads == 1 || args.num_pages == 1 ? 1 : int(page_stride / head_stride);
}

// Where the keys are that a tile sees, all of which are of one page.
struct KeySource {
  PagedRows rows;
  int kv_head, k_heads, v_heads;  // of maps: so many a page

  __device__ __forceinline__ KeySource(const AttentionArgs& args, const Tile& tile)
      : rows(find_rows(args, tile.batch, args.k_stride_page, args.k_stride_row)),
        kv_head(tile.head / (args.num_q_heads / args.num_kv_heads)),
        k_heads(heads_of_page(args, args.k_stride_page, args.k_stride_head)),
        v_heads(heads_of_page(args, args.v_stride_page, args.v_stride_head)) {}

  // The page of a tile. What the sequence has not may be in any: zeros will come of it.
  __device__ __forceinline__ int find_page(int first_key) const {
    const int key = first_key;
    if (key > rows.last_key) return 0;
    return page_of(rows, unsigned(key) / unsigned(kPageSize));
  }
};

// Starts to bring 64 rows of Q, counting their bytes towards `full`.
__device__ __forceinline__ void load_queries(
    QChunk* q, const TensorMaps& maps, Barrier* full, const Tile& tile, int first_row) {
#pragma unroll 1
  for (int i = 0; i < kDChunks; ++i) {
    tma_load(q[i], &maps.q, full, i * kChunk, first_row, tile.head, tile.batch);
  }
}

// Starts to bring a tile of K, counting its bytes towards `full`, from `page`, whose rows end
// where those of the sequence do.
__device__ __forceinline__ void load_keys(
    KChunk* k, const TensorMaps& maps, Barrier* full, int first_key, const KeySource& source, int page) {
  const int key = first_key, row = unsigned(key) % unsigned(kPageSize);
  const int end = min(max(source.rows.last_key + 1 - (key - row), 0), kPageSize);  // of the page's rows
#pragma unroll 1
  for (int i = 0; i < kDChunks; ++i) {
    tma_load_until(k[i], &maps.k, full, i * kChunk,
                   kRowsEnd - end + row, page * source.k_heads + source.kv_head, end);
  }
}

// Starts to bring a tile of V, counting its bytes towards `full`, from `page`, whose rows end
// where those of the sequence do.
__device__ __forceinline__ void load_values(
    VChunk* v, const TensorMaps& maps, Barrier* full, int first_key, const KeySource& source, int page) {
  const int key = first_key, row = unsigned(key) % unsigned(kPageSize);
  const int end = min(max(source.rows.last_key + 1 - (key - row), 0), kPageSize);  // of the page's rows
#pragma unroll 1
  for (int i = 0; i < kDvChunks; ++i) {
    tma_load_until(v[i], &maps.v, full, i * kChunk,
                   kRowsEnd - end + row, page * source.v_heads + source.kv_head, end);
  }
}

// Brings one tile's Q, and the K and V that it sees, to shared memory as stages become empty. From the last keys to
// the first, so that tiles with a mask come first; each K before the V that its scores will overtake. The first
// consumer need not wait for the others' Q.
__device__ __forceinline__ void produce_tile(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile,
    PipelineState<kQStages>& q_pipe, PipelineState<kKStages>& k_pipe, PipelineState<kVStages>& v_pipe) {
  const KeySource source(args, tile);
  // Of a tile. Looked up before the wait for its stage, which hides how long that takes.
  const auto find_page = [&](int n) { return n < tile.first_tile ? 0 : source.find_page(n * kBc); };
  int page = find_page(tile.last_tile - 1), page_before = find_page(tile.last_tile - 2);
  const auto produce_q = [&](int consumer) {
    Barrier* const full = &smem.q_full[q_pipe.stage][consumer];
    barrier_expect(full, kQBytes);
    load_queries(smem.q[q_pipe.stage][consumer], maps, full, tile, tile.first_row + 64 * consumer);
  };
  barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
  produce_q(0);
  const auto produce_k = [&](int n, int page) {
    Barrier* const full = &smem.k_full[k_pipe.stage];
    barrier_wait(&smem.k_empty[k_pipe.stage], k_pipe.phase ^ 1);
    barrier_expect(full, kKBytes);
    load_keys(smem.k[k_pipe.stage], maps, full, n * kBc, source, page);
    k_pipe.advance();
  };
  if (tile.first_tile < tile.last_tile) produce_k(tile.last_tile - 1, page);
#pragma unroll 1
  for (int consumer = 1; consumer < kConsumers; ++consumer) produce_q(consumer);
  q_pipe.advance();
  for (int n = tile.last_tile - 1; n >= tile.first_tile; --n) {
    if (n > tile.first_tile) produce_k(n - 1, page_before);
    Barrier* const full = &smem.v_full[v_pipe.stage];
    barrier_wait(&smem.v_empty[v_pipe.stage], v_pipe.phase ^ 1);
    barrier_expect(full, kVBytes);
    load_values(smem.v[v_pipe.stage], maps, full, n * kBc, source, page);
    v_pipe.advance();
    page = page_before;
    page_before = find_page(n - 2);
  }
}

// One consumer's 64 rows of a tile.
__device__ __forceinline__ void consume_tile(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile, int consumer,
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
  // A scale of zero becomes too small to matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;
  SoftmaxState softmax;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.max[h] = -kInfinity;
    softmax.sum[h] = 0.0f;
  }
  float o[kDv / 2];
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;

  QChunk* q = smem.q[q_pipe.stage][consumer];
  barrier_wait(&smem.q_full[q_pipe.stage][consumer], q_pipe.phase);
  unsigned q_operands[kDSteps][4];
  hold_q(q_operands, q, warp, args.scale < 0.0f);
  // Once all four warps have read theirs, the next Q may come.
  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
  if (leader) barrier_arrive(&smem.q_empty[q_pipe.stage]);
  const unsigned long long k_desc = descriptor(smem.k), v_desc = descriptor(smem.v, sizeof(VChunk));
  constexpr int kNextK = sizeof(smem.k[0]) >> 4, kNextV = sizeof(smem.v[0]) >> 4;  // as descriptors count
  for (int n = tile.last_tile; n > last_tile; --n) {
    // Keys that only other consumers see.
    order_wait(consumer);
    order_arrive(consumer);
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);  // no warp may fall behind by a phase
    if (leader) barrier_arrive(&smem.k_empty[k_pipe.stage]);
    k_pipe.advance();
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
    if (leader) barrier_arrive(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
  }
  int n = last_tile - 1;
  if (n >= first_tile) {
    float s[kBc / 2], rescale[2];
    unsigned p[kKeySteps][4];
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    order_wait(consumer);
    start_qk(s, q_operands, k_desc + k_pipe.stage * kNextK);
    order_arrive(consumer);
    wgmma_wait<0>();
    hold(s);
    if (leader) barrier_arrive(&smem.k_empty[k_pipe.stage]);
    k_pipe.advance();
    if (n >= first_partial) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
    raise_maximum(s, softmax, rescale, scale);
    weigh(s, softmax, scale);
    pack_weights(s, p);
    if (n > first_tile) barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
#pragma unroll 1
    for (--n; n >= first_tile; --n) {
      // The next weights are made while these outputs are multiplied.
      order_wait(consumer);
      start_qk(s, q_operands, k_desc + k_pipe.stage * kNextK);
      barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
      start_pv(o, p, v_desc + v_pipe.stage * kNextV);
      order_arrive(consumer);
      const int v_stage = v_pipe.stage;
      v_pipe.advance();
      wgmma_wait<1>();
      hold(s);
      if (leader) barrier_arrive(&smem.k_empty[k_pipe.stage]);
      k_pipe.advance();
      if (n >= first_partial) mask(s, row, n * kBc, args.seqlen_q, args.seqlen_k);
      const bool grown = raise_maximum(s, softmax, rescale, scale);
      weigh(s, softmax, scale);
      // Sums are never negative. Asked for here, they keep the compiler from making weights after the outputs.
      const bool positive = !(softmax.sum[0] + softmax.sum[1] < 0.0f);
      if (n > first_tile && positive) barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
      wgmma_wait<0>();
      hold(o);
      if (leader) barrier_arrive(&smem.v_empty[v_stage]);
      pack_weights(s, p);
      if (grown) rescale_output(o, rescale);
    }
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    start_pv(o, p, v_desc + v_pipe.stage * kNextV);
    wgmma_wait<0>();
    hold(o);
    if (leader) barrier_arrive(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
  }

  float inverse[2];
  unsigned untrusted = 0;  // of the thread's rows, by bits: what is to be computed again
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_sum = softmax.sum[h];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);

    const bool inside = row + 8 * h < args.seqlen_q, keeps = trusted(softmax.max[h], row_sum);
    inverse[h] = keeps ? __fdividef(1.0f, row_sum) : 0.0f;
    if (inside && !keeps) {
      untrusted |= 1u << h;
    } else if (inside && args.lse != nullptr && lane % 4 == 0) {
      const long long at = lse_index(args, tile) + row + 8 * h;
      args.lse[at] = (softmax.max[h] + log2f(row_sum)) * kLn2;
    }
  }
  // The outputs before have left once the thread that sent them off sees so.
  OChunk* staged = smem.o[consumer];
  if (leader) tma_wait_read<0>();
  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
  stage_output(staged, o, inverse, warp);
  const auto write = [&](int row, int x, float value) {
    staged_output(staged, 16 * warp + row, x) = __float2bfloat16_rn(value);
  };
  recompute_rows<16>(args, tile.batch, tile.head, first_row + 16 * warp, untrusted, write);
  fence_proxy_async();
  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
  if (leader) {
    store_outputs(maps, staged, tile, first_row);
    tma_commit();
  }
  q_pipe.advance();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d128_paged128_kernel(AttentionArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) barrier_init(&smem.q_full[i][consumer], 1);
      barrier_init(&smem.q_empty[i], kConsumers);
    }
    for (int i = 0; i < kKStages; ++i) {
      barrier_init(&smem.k_full[i], 1);
      barrier_init(&smem.k_empty[i], kConsumers);
    }
    for (int i = 0; i < kVStages; ++i) {
      barrier_init(&smem.v_full[i], 1);
      barrier_init(&smem.v_empty[i], kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kKStages> k_pipe;
  PipelineState<kVStages> v_pipe;
  if (warp < 4) {
    give_registers<24>();
    if (warp == 0 && elect_one()) {
      prefetch_map(&maps.q);
      prefetch_map(&maps.k);
      prefetch_map(&maps.v);
      for_each_tile(args, [&](const AttentionArgs& args, const Tile& tile) {
        produce_tile(args, maps, smem, tile, q_pipe, k_pipe, v_pipe);
      });
    }
  } else {
    take_registers<240>();
    const int consumer = warp / 4 - 1;
    if (consumer == kConsumers - 1) order_arrive(consumer);
    for_each_tile(args, [&](const AttentionArgs& args, const Tile& tile) {
      consume_tile(args, maps, smem, tile, consumer, q_pipe, k_pipe, v_pipe);
    });
    tma_wait_read<0>();
  }
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

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d128_paged128(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  if (args->num_pages < 0 || args->max_pages < 0 || args->page_size != kPageSize) return cudaErrorInvalidValue;
  if (args->seqlen_k > 0 && (args->page_table == nullptr || args->num_pages == 0)) return cudaErrorInvalidValue;
  // A table too narrow for the keys that there may be.
  if (1LL * args->max_pages * args->page_size < args->seqlen_k) return cudaErrorInvalidValue;
  const long long strides[] = {args->q_stride_batch, args->q_stride_head, args->q_stride_row,
                               args->k_stride_page, args->k_stride_head, args->k_stride_row,
                               args->v_stride_page, args->v_stride_head, args->v_stride_row,
                               args->o_stride_batch, args->o_stride_head, args->o_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->v, args->o};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(__nv_bfloat16)) != 0) return cudaErrorMisalignedAddress;
  }
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  const bool any_keys = args->seqlen_k > 0;  // without, their arrays may be null
  TensorMaps maps;
  const cudaError_t q_status = encode_map<4>(
      &maps.q, args->q, {kD, args->seqlen_q, args->num_q_heads, args->batch},
      {args->q_stride_row, args->q_stride_head, args->q_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (q_status != cudaSuccess) return q_status;
  const long long k_apart = args->num_kv_heads > 1 ? args->k_stride_head : args->k_stride_page;
  const long long k_heads = any_keys ? count_heads(args, args->k_stride_page, k_apart) : 1;
  if (k_heads < 0) return cudaErrorInvalidValue;
  const cudaError_t k_status = encode_clipped_map(
      &maps.k, any_keys ? args->k : args->q, kD, any_keys ? kPageSize : 0, k_heads,
      args->k_stride_row, k_apart, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const long long v_apart = args->num_kv_heads > 1 ? args->v_stride_head : args->v_stride_page;
  const long long v_heads = any_keys ? count_heads(args, args->v_stride_page, v_apart) : 1;
  if (v_heads < 0) return cudaErrorInvalidValue;
  const cudaError_t v_status = encode_clipped_map(
      &maps.v, any_keys ? args->v : args->q, kDv, any_keys ? kPageSize : 0, v_heads,
      args->v_stride_row, v_apart, 64, 128,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (v_status != cudaSuccess) return v_status;
  const cudaError_t o_status = encode_map<4>(
      &maps.o, args->o, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->o_stride_row, args->o_stride_head, args->o_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (o_status != cudaSuccess) return o_status;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_paged128_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args), &maps};
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  return cudaLaunchKernel(attention_bf16_d128_paged128_kernel, dim3(grid), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
// flashgen: {"problem": {"dtype": "bf16", "batch": 2, "num_q_heads": 32, "num_kv_heads": 8, "seqlen_q": 512, "seqlen_k": 8192, "head_dim": 128, "head_dim_v": 128, "causal": true, "precision": "auto", "page_size": 128}, "family": "wgmma", "variant": {"pack_heads": false, "br": 128, "splits": 1, "workspace_splits": 1, "split": "in_place", "bc": 128, "persistent": true, "last_turn": "whole", "q_stages": 1, "o_apart": true, "p_in_shared": false, "weights": "f16", "values": "in_place", "powers": "rounded", "score_type": "f32", "promotion": "tiles", "bias_stages": 0, "bias_heads": 1, "seen_bits": false, "far_keys": "walked", "copiers": 1, "k_stages": 3, "v_stages": 2, "summed_columns": 0, "schedule": "overlapped", "q_in_registers": true, "order_of_groups": "products", "rescale": "lazy", "poly_exp": 0, "section": 1, "min_blocks": 1, "cluster_over": "rows", "cluster": 1, "tail": 0, "split_by": "rows", "tangent": "polynomial"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_bf16_d128_paged128", "launches": [{"threads": 384, "smem_bytes": 230400, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [{"array": "q", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "k", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "v", "rows": 128, "columns": 64, "swizzle": 128, "l2_promotion": 128}, {"array": "o", "rows": 64, "columns": 64, "swizzle": 128, "l2_promotion": 128}], "max_blocks": 132, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel"}], "digest": "ba0c4baece27acbc", "figures": [1768, 1137]}
