// attention_bf16_d128_biasbf16_sinks: flash attention, bf16, head dim 128, tuned with a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Masks and scores: bias of bf16, sinks. Their numbers and arrays are run-time arguments, too.
//
// Family wgmma:
//   br = 192                   query rows per tile, 64 for each warpgroup that computes
//   bc = 80                    keys per tile
//   persistent = true          blocks stay for several tiles
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
//   last_turn = shared         tiles left for fewer blocks than stay: one takes each, or all share their keys evenly
//   bias_stages = 2            tiles of biases and masks that the copy engine brings, 0: each warp brings its own

#include <cuda_bf16.h>
#include <cuda.h>

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
  const unsigned short* bias;  // (batch, num_q_heads, seqlen_q, seqlen_k) of bf16
  const float* sinks;  // (num_q_heads) of f32
  float* workspace;  // for what launches leave each other
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long bias_stride_0, bias_stride_1, bias_stride_2;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 208, "callers from other languages pack the arguments by hand");

// The arrays as the copy engine reads and writes them.
struct TensorMaps {
  CUtensorMap q, k, v, o, bias;
};

constexpr bool kCausal = FLASHGEN_CAUSAL;
constexpr bool kRowsMayBeEmpty = true;  // though there are keys
constexpr bool kLaterRowsSeeMore = kCausal;

using Element = __nv_bfloat16;
using Barrier = unsigned long long;
constexpr int kD = 128;  // head dim of queries and keys
constexpr int kDv = 128;  // head dim of values and outputs
constexpr int kVec = 8;  // elements that strides must be multiples of, for the copy engine

constexpr int kBr = 192;  // query rows per tile: 64 for each consumer
constexpr int kBc = 80;  // keys per tile
constexpr int kConsumers = 3;  // warpgroups that compute, beside the producer
constexpr int kWarpgroup = 128;  // threads of a warpgroup
constexpr int kThreads = 512;
constexpr int kMostShares = 8;  // of an item of the last turn
constexpr int kAllTiles = 0x7fffffff;
constexpr bool kHaveRegisters = kD + kDv <= 256;  // whether consumers may keep what finds tiles sooner
constexpr int kMaxBlocks = 132;  // that H200 runs at once, each of which takes several tiles
constexpr int kKStages = 2, kVStages = 2;  // tiles of K and of V in shared memory
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

constexpr int kArrayStages = 2;  // tiles of bias in shared memory

// What a block's rows meet of a tile of an array: chunks of columns one after the other, whose rows are swizzled. So what is
// read at once, the same columns of eight rows, is in different banks.
template <typename T>
struct StagedTile {
  static constexpr int kRowBytes = kBc * sizeof(T);
  static constexpr int kWidest = 128;
  static constexpr int kChunkBytes = kRowBytes % kWidest == 0 ? kWidest : kRowBytes & -kRowBytes;
  static constexpr int kColumns = kChunkBytes / sizeof(T);  // of a chunk
  alignas(1024) unsigned char bytes[kBr * kRowBytes];

  // Where byte x of a row's columns from byte `first` on is; the bits of both are different ones.
  static __device__ __forceinline__ int place(int row, int x, int first) {
    const int swizzle = row * kChunkBytes / 128 % (kChunkBytes / 16) * 16;
    return first / kChunkBytes * (kBr * kChunkBytes) + ((row * kChunkBytes + (x ^ swizzle)) ^ first % kChunkBytes);
  }
};
using QChunk = Element[64 * kChunk];  // of the 64 rows of one consumer
using KChunk = Element[kBc * kChunk];
using VChunk = KChunk;
using OChunk = QChunk;

struct SharedStorage {
  // Q by consumer, and then its outputs on their way to global memory.
  alignas(1024) QChunk q[kQStages][kConsumers][kDChunks];
  alignas(1024) KChunk k[kKStages][kDChunks];
  alignas(1024) VChunk v[kVStages][kDvChunks];
  // What scores meet of arrays.
  StagedTile<unsigned short> bias_tiles[kArrayStages];
  // A stage is full once its bytes have arrived, and empty once every consumer has done with it.
  Barrier q_full[kQStages][kConsumers], q_empty[kQStages];
  Barrier k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  Barrier arrays_full[kArrayStages], arrays_empty[kArrayStages];
};
static_assert(sizeof(SharedStorage) == 193536, "the size that pruning counted on");

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

// Makes the compiler forget what it knows of a value: it then works out what follows from it where that is needed,
// rather than once and for all in a register each.
__device__ __forceinline__ void forget(int& value) {
  asm volatile("" : "+r"(value));
}

// Waits until another block has left `number` there. What it did before can be seen then, by the copy engine too.
__device__ __forceinline__ void wait_for_number(const int* place, int number) {
  int there;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(__cvta_generic_to_global(place)) : "memory");
  } while (there != number);
  asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Leaves a number for whoever waits for it.
__device__ __forceinline__ void leave_number(int* place, int number) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(place)), "r"(number)
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

__device__ __forceinline__ void ldmatrix_x2(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
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

// D = A B, or D += A B if `accumulate`, for one warpgroup: D is 64 x n. q k^T reads both factors from shared memory,
// p v has p in registers and v by rows of n.
__device__ __forceinline__ void wgmma_m64n80k16_bf16_ss(
    float (&d)[40], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39}, "
      "%40, %41, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "l"(a), "l"(b), "r"(int(accumulate)));
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

// An address that others are told `behind`: the compiler then adds what it knows of that within its instructions.
template <typename T>
__device__ __forceinline__ const T* start_of(const T* address) {
#ifdef __CUDACC__
  asm("" : "+l"(address));
#endif
  return address;
}

__device__ __forceinline__ float bias_at(const AttentionArgs& args, int i0, int i1, int i2, int i3, int behind = 0) {
  const unsigned short bits = __ldg(start_of(args.bias + i0 * args.bias_stride_0 + i1 * args.bias_stride_1 + i2 * args.bias_stride_2 + i3) + behind);
  return __uint_as_float(unsigned(bits) << 16);
}

__device__ __forceinline__ float sinks_at(const AttentionArgs& args, int i0) {
  return __ldg(args.sinks + i0);
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
  return kLog2e * (score + bias_at(args, batch, head, row, key));
}

// A block's range of a tile's keys, as tiles of them. Where several blocks have some, the one with the last makes
// outputs of all: it takes over from its `givers`, so many blocks before it, of which each `hands_on`.
struct Share {
  int first_tile, last_tile, givers;
  bool hands_on;
};

// How many tiles of keys some row of a tile sees: of rows that see none, one without keys.
__device__ __forceinline__ int count_key_tiles(const AttentionArgs& args, int q_tile) {
  int end_key = args.seqlen_k;
  if (kCausal) end_key = max(0, min(end_key, (q_tile + 1) * kBr + args.seqlen_k - args.seqlen_q));
  forget(end_key);
  return max(1, (end_key + kBc - 1) / kBc);
}

// The last turn of blocks that stay, where fewer items are left than there are blocks: their tiles of keys, one behind
// the other, are shared out evenly (Osama et al., "Stream-K", 2023).
struct LastTurn {
  int key_tiles;     // that there is room for in each item
  int takers;        // blocks with a share
  int share, extra;  // tiles of keys of each, and how many have one more

  __device__ __forceinline__ LastTurn(const AttentionArgs& args, int q_tiles, int items, int blocks) {
    key_tiles = count_key_tiles(args, q_tiles - 1);
    if (kLaterRowsSeeMore) {
      // As much for each pair as any has: one of the first two, but for rounding.
      const int first = key_tiles + count_key_tiles(args, 0);
      key_tiles = max(first, count_key_tiles(args, q_tiles - 2) + count_key_tiles(args, 1)) + 2;
    }
    takers = max(1, min(blocks, items * min(key_tiles, kMostShares)));
    share = items * key_tiles / takers;
    extra = items * key_tiles % takers;
  }

  // The first of all tiles of keys that a block has, and, of one of these, the block that has it.
  __device__ __forceinline__ int begin(int block) const {
    return min(block, takers) * share + min(block, extra);
  }
  __device__ __forceinline__ int block_of(int key_tile) const {
    const int longer = extra * (share + 1);
    return key_tile < longer ? key_tile / (share + 1) : extra + (key_tile - longer) / share;
  }
};

// The work of one block at a time: kBr query rows of one head, and all keys or a share of them.
struct Tile {
  int first_row, head, batch;
  Share share;
  int first_tile, last_tile;  // of keys: some row sees those of [first_tile, last_tile)

  __device__ __forceinline__ Tile(const AttentionArgs& args, int q_tile, int head, int batch, const Share& share)
      : head(head), batch(batch), share(share) {
    first_row = q_tile * kBr;
    first_tile = first_key_of(args, batch, q_tile * kBr) / kBc;
    const int end_key = end_key_of(args, batch, min(first_row + kBr, args.seqlen_q) - 1);
    last_tile = max(first_tile, (end_key + kBc - 1) / kBc);

    first_tile = min(share.first_tile, last_tile);
    last_tile = min(share.last_tile, last_tile);
  }
};

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

// A tile of rows that a block has next, and its share of the keys.
struct NextTile {
  int q_tile, head, batch;
  Share share;
};

// How many tiles of an item a block passes with this one, of which `first` is done last: the one in the middle is both.
__device__ __forceinline__ int tiles_passed(int q_tile, int first, int done) {
  return kLaterRowsSeeMore && done % 2 == 0 && q_tile == first ? 2 : 1;
}

// Finds it. `done` are the tiles of whole turns before, those of an item in each; in the last turn, as a complement, up
// to where the block still has its share: from the end back, so that what it hands on is there before it takes over.
__device__ __forceinline__ bool find_tile(const AttentionArgs& args, int& done, NextTile& next) {
  // Worked out anew each time, lest it keep registers from the work on tiles.
  int blocks = gridDim.x, q_tiles = (args.seqlen_q + kBr - 1) / kBr;
  forget(blocks);
  forget(q_tiles);
  const unsigned num_heads = args.num_q_heads, of_head = kLaterRowsSeeMore ? unsigned(q_tiles + 1) / 2 : q_tiles;
  const unsigned num_items = of_head * num_heads * args.batch;
  const int turns = num_items / unsigned(blocks), nth_turn = kLaterRowsSeeMore ? done / 2 : done;
  // Says where an item is, and which one of its head.
  const auto place = [&](unsigned item) {
    const unsigned head = item / of_head;
    next.batch = head / num_heads;
    next.head = head - next.batch * num_heads;
    return int(item - head * of_head);
  };
  next.share = {0, kAllTiles, 0, false};
  if (done >= 0 && nth_turn < turns) {
    const int first = place(nth_turn * blocks + blockIdx.x), last = kLaterRowsSeeMore ? q_tiles - 1 - first : first;
    next.q_tile = kLaterRowsSeeMore && done % 2 == 1 ? first : last;
    done += tiles_passed(next.q_tile, first, done);
    return true;
  }
  const LastTurn turn(args, q_tiles, int(num_items) - turns * blocks, blocks);
  const int begin = turn.begin(blockIdx.x);
  const int end = done < 0 ? ~done : turn.begin(blockIdx.x + 1);
  if (begin >= end) return false;
  const int nth = (end - 1) / turn.key_tiles, before = nth * turn.key_tiles;
  const int first = place(turns * blocks + nth), last = kLaterRowsSeeMore ? q_tiles - 1 - first : first;
  // The last tile's keys come before those of the first.
  const int of_last = count_key_tiles(args, last);
  const bool takes_first = kLaterRowsSeeMore && end > before + of_last;
  next.q_tile = takes_first ? first : last;
  const int from = before + (takes_first ? of_last : 0), from_own = max(begin, from);
  const int tiles = takes_first && first == last ? 0 : count_key_tiles(args, next.q_tile);
  next.share.first_tile = from_own - from;
  next.share.last_tile = min(end - from, tiles);
  next.share.hands_on = next.share.last_tile < tiles;
  if (!next.share.hands_on && from_own > from) next.share.givers = int(blockIdx.x) - turn.block_of(from);
  done = ~from_own;
  return true;
}

// The tiles of a block that stays: those of an item in each whole turn, then its share of what is left.
template <bool kHasRegisters, typename Work>
__device__ __forceinline__ void for_each_tile(const AttentionArgs& args, const Work& work) {
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr, num_heads = args.num_q_heads;
  const Divisor items(kLaterRowsSeeMore ? (q_tiles + 1) / 2 : q_tiles);  // of one head
  const Divisor heads(num_heads);  // of one batch
  const int num_items = items.value * num_heads * args.batch, whole = num_items - num_items % int(gridDim.x);
  int done = 0;
  while (true) {
    NextTile next;
    const int item = (kLaterRowsSeeMore ? done / 2 : done) * int(gridDim.x) + int(blockIdx.x);
    if (kHasRegisters && done >= 0 && item < whole) {
      // Sooner than by `find_tile`.
      int first;
      next.batch = heads.divide(items.divide(item, first), next.head);
      next.q_tile = kLaterRowsSeeMore && done % 2 == 0 ? q_tiles - 1 - first : first;
      next.share = {0, kAllTiles, 0, false};
      done += tiles_passed(next.q_tile, first, done);
    } else if (!find_tile(args, done, next)) {
      break;
    }
    // There may be none in what is left.
    if (next.share.first_tile < next.share.last_tile) work(Tile(args, next.q_tile, next.head, next.batch, next.share));
  }
}

// What a thread's two rows, `row` and row + 8, see of the keys: from begin to before end.
struct SeenKeys {
  int begin[2], end[2];

  __device__ __forceinline__ SeenKeys(const AttentionArgs& args, int batch, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      begin[h] = first_key_of(args, batch, row + 8 * h);
      end[h] = end_key_of(args, batch, row + 8 * h);
    }
  }
};

// Whether there are keys between a row's bounds.
__device__ __forceinline__ bool has_keys(const AttentionArgs& args, int batch, int row) {
  return first_key_of(args, batch, row) < end_key_of(args, batch, row);
}

// Hides the keys of a tile that are behind those that a row sees.
template <int n>
__device__ __forceinline__ void hide_last(float (&s)[n], const SeenKeys& seen, int first_key) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int end = seen.end[e / 2] - (first_key + threadIdx.x % 4 * 2 + e % 2);
#pragma unroll
    for (int t = 0; t < n / 4; ++t) {
      if (t * 8 >= end) s[4 * t + e] = -kInfinity;
    }
  }
}

// Whether the copy engine takes bias as it lies: from addresses and by strides of 16 bytes, no step back.
__host__ __device__ __forceinline__ bool arrays_suit(const AttentionArgs& args) {
  const long long bias_strides = args.bias_stride_0 | args.bias_stride_1 | args.bias_stride_2;
  const unsigned long long bytes =
reinterpret_cast<unsigned long long>(args.bias) | bias_strides * sizeof(unsigned short);
  return bytes % 16 == 0 && bias_strides >= 0;
}

// Starts to copy what a block's rows, from `row` on, meet of the keys from the first one on; zeros for what is not there.
template <typename T>
__device__ __forceinline__ void copy_tile(
    StagedTile<T>& tile, const CUtensorMap* map, Barrier* full, int first_key, int row, int head, int batch) {
#pragma unroll 1
  for (int x = 0; x < kBc; x += tile.kColumns) {
    tma_load(tile.bytes + x * int(kBr * sizeof(T)), map, full, first_key + x, row, head, batch);
  }
}

// Copies the same element by element, a warp's lanes side by side: of what begins at `from`, so many `rows` and `keys` are
// there. Of rows that are all alike, a stride of zero apart, it is the first one.
template <typename T>
__device__ __forceinline__ void copy_elements(StagedTile<T>& tile, const T* from, long long stride, int rows, int keys) {
  const int rows_read = stride == 0 ? 1 : kBr;
#pragma unroll 1
  for (int row = 0; row < rows_read; ++row) {
#pragma unroll 1
    for (int key = threadIdx.x % 32; key < kBc; key += 32) {
      const T value = row < rows && key < keys ? __ldg(from + key) : T(0);
      *reinterpret_cast<T*>(tile.bytes + tile.place(row, 0, key * int(sizeof(T)))) = value;
    }
    from += stride;
  }
}

// Brings what a block's rows meet of bias to shared memory as stages become empty, from the last keys to the first: one
// thread by the copy engine, or a warp.
__device__ __forceinline__ void bring_arrays(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile,
    PipelineState<kArrayStages>& pipe) {
  if (arrays_suit(args)) {
    constexpr unsigned bias_bytes = sizeof(smem.bias_tiles[0]);
#pragma unroll 1
    for (int n = tile.last_tile - 1; n >= tile.first_tile; --n) {
      Barrier* const full = &smem.arrays_full[pipe.stage];
      barrier_wait(&smem.arrays_empty[pipe.stage], pipe.phase ^ 1);
      barrier_expect(full, bias_bytes);
      copy_tile(smem.bias_tiles[pipe.stage], &maps.bias, full, n * kBc,
                args.bias_stride_2 == 0 ? 0 : tile.first_row, args.bias_stride_1 == 0 ? 0 : tile.head,
                args.bias_stride_0 == 0 ? 0 : tile.batch);
      pipe.advance();
    }
  } else {
    const auto* const bias = args.bias + tile.batch * args.bias_stride_0 + tile.head * args.bias_stride_1 + tile.first_row * args.bias_stride_2;
    const int rows = args.seqlen_q - tile.first_row;
#pragma unroll 1
    for (int n = tile.last_tile - 1; n >= tile.first_tile; --n) {
      const int first_key = n * kBc, keys = args.seqlen_k - first_key;
      barrier_wait(&smem.arrays_empty[pipe.stage], pipe.phase ^ 1);
      copy_elements(smem.bias_tiles[pipe.stage], bias + first_key, args.bias_stride_2, rows, keys);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&smem.arrays_full[pipe.stage]);
      pipe.advance();
    }
  }
}

// Reads what four of a thread's scores meet, from a column on: those of its first row or its second (h), two pairs of
// columns eight apart.
__device__ __forceinline__ void read_bf16(
    float (&values)[4], const StagedTile<unsigned short>& tile, bool rows_alike, int h, int column) {
  const int lane = threadIdx.x % 32, first_row = (int(threadIdx.x) - kWarpgroup) / 32 * 16;  // of the warp
  const int row = rows_alike ? 0 : first_row + 8 * h + lane % 8;
  unsigned m[2];
  ldmatrix_x2(m, tile.bytes + tile.place(row, lane / 8 % 2 * 16, 2 * column));
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    values[2 * j] = __uint_as_float(m[j] << 16);
    values[2 * j + 1] = __uint_as_float(m[j] & 0xffff0000u);
  }
}

// Changes a tile's scores, which come not scaled; then they are to be multiplied by `scale`.
template <int n>
__device__ __forceinline__ void change(
    const AttentionArgs& args, const StagedTile<unsigned short>& bias_tile,
    float (&s)[n], float unit, int batch, int head,
    int first_row, int first_key) {
  first_key += int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int first = 0; first < n; first += 8) {
      float bias_values[4];
      read_bf16(bias_values, bias_tile, args.bias_stride_2 == 0, h, first / 8 * 16);
#pragma unroll
      for (int i = first; i < first + 8; ++i) {
        if (i / 2 % 2 != h) continue;
        const float bias_value = bias_values[(i - first) / 4 * 2 + i % 2];
        const float raw = s[i];
        s[i] = raw + bias_value * unit;
      }
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
    const float highest = tile_max * scale;
    // Rounded up: of scores of -1e9, by which masks hide, weights would else exceed what 16 bits hold.
    const float row_max = fmaxf(softmax.max[h], highest * (highest < 0.0f ? 1.0f - 0x1p-22f : 1.0f + 0x1p-22f));
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
    float (&s)[kBc / 2], unsigned long long q, unsigned long long k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDSteps; ++step) {
    const unsigned long long k_step = step_of_columns<KChunk>(k, step);
    wgmma_m64n80k16_bf16_ss(s, step_of_columns<QChunk>(q, step), k_step, step > 0);
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

// Turns the sign of a consumer's Q: maxima are taken of raw scores, which a negative scale would turn round.
__device__ __forceinline__ void negate_q(QChunk* q, int consumer) {
  unsigned* pairs = reinterpret_cast<unsigned*>(q);
  for (int i = threadIdx.x % kWarpgroup; i < kDChunks * 64 * kChunk / 2; i += kWarpgroup) pairs[i] ^= 0x80008000u;
  fence_proxy_async();
  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
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
  if (row_max == -kInfinity) return row_sum == 0.0f;  // by a bias, say: such scores hide
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
  const int begin_key = first_key_of(args, batch, row), end_key = end_key_of(args, batch, row);
  double row_max = -kInfinity, row_sum = 0.0, o[kColumns] = {};
  row_max = kLog2e * sinks_at(args, head);
  row_sum = row_max == -kInfinity ? 0.0 : 1.0;
#pragma unroll 1
  for (int first_key = begin_key; first_key < end_key; first_key += 32) {
    const Element* key = k + min(first_key + lane, end_key - 1) * args.k_stride_row;
    double score = 0.0;
#pragma unroll 4
    for (int x = 0; x < kD; ++x) score += double(__bfloat162float(q[x])) * double(__bfloat162float(key[x]));
    score = change_score(args, float(score * args.scale), batch, head, row, min(first_key + lane, end_key - 1));
    score = first_key + lane < end_key ? score : -kInfinity;
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
        if (x < kDv) o[c] += factor * double(__bfloat162float(value[x]));
      }
    }
    if (__any_sync(0xffffffffu, row_sum != row_sum)) break;  // no number by now, nor will it be one
  }
  const bool seen = row_max != -kInfinity;
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

// Where a warpgroup leaves that it has handed on what it had to: 1, or 0.
__device__ __forceinline__ int* handed_number(const AttentionArgs& args, int block, int consumer) {
  return reinterpret_cast<int*>(args.workspace) + block * kConsumers + consumer;
}

// And where its results are, a thread's every kWarpgroup-th four: outputs, then maxima and sums of its two rows.
__device__ __forceinline__ float4* handed_results(const AttentionArgs& args, int block, int consumer) {
  float4* const results = reinterpret_cast<float4*>(args.workspace + 448);
  return results + (block * kConsumers + consumer) * ((kDv / 8 + 1) * kWarpgroup) + threadIdx.x % kWarpgroup;
}

// Leaves what the block's keys make of the rows.
__device__ __forceinline__ void hand_on(
    const AttentionArgs& args, const SoftmaxState& softmax, const float (&o)[kDv / 2], int consumer) {
  float4* const results = handed_results(args, blockIdx.x, consumer);
#pragma unroll
  for (int i = 0; i < kDv / 8; ++i) {
    results[i * kWarpgroup] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
  results[kDv / 8 * kWarpgroup] = make_float4(softmax.max[0], softmax.max[1], softmax.sum[0], softmax.sum[1]);
  named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);  // all have left theirs
  if (threadIdx.x % kWarpgroup == 0) leave_number(handed_number(args, blockIdx.x, consumer), 1);
}

// Adds what the keys of another block make of the rows.
__device__ __forceinline__ void take_over(
    const AttentionArgs& args, int block, SoftmaxState& softmax, float (&o)[kDv / 2], int consumer) {
  wait_for_number(handed_number(args, block, consumer), 1);
  const float4* const results = handed_results(args, block, consumer);
  const float4 its = results[kDv / 8 * kWarpgroup];
  const float its_max[2] = {its.x, its.y}, its_sum[2] = {its.z, its.w};
  float own[2], others[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float row_max = fmaxf(softmax.max[h], its_max[h]);
    const float base = row_max == -kInfinity ? 0.0f : row_max;
    own[h] = exp2f(softmax.max[h] - base);
    others[h] = exp2f(its_max[h] - base);
    softmax.max[h] = row_max;
    softmax.sum[h] = fmaf(others[h], its_sum[h], own[h] * softmax.sum[h]);
  }
  if (__any_sync(0xffffffffu, own[0] != 1.0f || own[1] != 1.0f)) rescale_output(o, own);
#pragma unroll
  for (int i = 0; i < kDv / 8; ++i) {
    // Or all of it would be loaded first, for which there are no registers.
    if (i % 4 == 0) named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
    const float4 four = results[i * kWarpgroup];
    o[4 * i] = fmaf(others[0], four.x, o[4 * i]);
    o[4 * i + 1] = fmaf(others[0], four.y, o[4 * i + 1]);
    o[4 * i + 2] = fmaf(others[1], four.z, o[4 * i + 2]);
    o[4 * i + 3] = fmaf(others[1], four.w, o[4 * i + 3]);
  }
}

// Where the keys are that a tile sees.
struct KeySource {
  int kv_head, batch;

  __device__ __forceinline__ KeySource(const AttentionArgs& args, const Tile& tile)
      : kv_head(tile.head / (args.num_q_heads / args.num_kv_heads)), batch(tile.batch) {}
};

// Starts to bring 64 rows of Q, counting their bytes towards `full`.
__device__ __forceinline__ void load_queries(
    QChunk* q, const TensorMaps& maps, Barrier* full, const Tile& tile, int first_row) {
#pragma unroll 1
  for (int i = 0; i < kDChunks; ++i) {
    tma_load(q[i], &maps.q, full, i * kChunk, first_row, tile.head, tile.batch);
  }
}

// Starts to bring a tile of K, counting its bytes towards `full`.
__device__ __forceinline__ void load_keys(
    KChunk* k, const TensorMaps& maps, Barrier* full, int first_key, const KeySource& source) {
#pragma unroll 1
  for (int i = 0; i < kDChunks; ++i) {
    tma_load(k[i], &maps.k, full, i * kChunk, first_key, source.kv_head, source.batch);
  }
}

// Starts to bring a tile of V, counting its bytes towards `full`.
__device__ __forceinline__ void load_values(
    VChunk* v, const TensorMaps& maps, Barrier* full, int first_key, const KeySource& source) {
#pragma unroll 1
  for (int i = 0; i < kDvChunks; ++i) {
    tma_load(v[i], &maps.v, full, i * kChunk, first_key, source.kv_head, source.batch);
  }
}

// Brings one tile's Q, and the K and V that it sees, to shared memory as stages become empty. From the last keys to
// the first, so that tiles with a mask come first; each K before the V that its scores will overtake. The first
// consumer need not wait for the others' Q.
__device__ __forceinline__ void produce_tile(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile,
    PipelineState<kQStages>& q_pipe, PipelineState<kKStages>& k_pipe, PipelineState<kVStages>& v_pipe) {
  const auto produce_q = [&](int consumer) {
    Barrier* const full = &smem.q_full[q_pipe.stage][consumer];
    barrier_expect(full, kQBytes);
    load_queries(smem.q[q_pipe.stage][consumer], maps, full, tile, tile.first_row + 64 * consumer);
  };
  barrier_wait(&smem.q_empty[q_pipe.stage], q_pipe.phase ^ 1);
  produce_q(0);
  const KeySource source(args, tile);
  const auto produce_k = [&](int n) {
    Barrier* const full = &smem.k_full[k_pipe.stage];
    barrier_wait(&smem.k_empty[k_pipe.stage], k_pipe.phase ^ 1);
    barrier_expect(full, kKBytes);
    load_keys(smem.k[k_pipe.stage], maps, full, n * kBc, source);
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
    load_values(smem.v[v_pipe.stage], maps, full, n * kBc, source);
    v_pipe.advance();
  }
}

// One consumer's 64 rows of a tile.
__device__ __forceinline__ void consume_tile(
    const AttentionArgs& args, const TensorMaps& maps, SharedStorage& smem, const Tile& tile, int consumer,
    PipelineState<kQStages>& q_pipe, PipelineState<kKStages>& k_pipe, PipelineState<kVStages>& v_pipe, PipelineState<kArrayStages>& array_pipe) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const int first_row = tile.first_row + 64 * consumer;
  const int row = first_row + 16 * warp + lane / 4;  // and row + 8
  // The consumer's rows see tiles [first_tile, last_tile) of keys, and those before first_partial whole.
  const int last_row = min(first_row + 64, args.seqlen_q) - 1;
  int first_tile = tile.first_tile;
  int last_tile = min(tile.last_tile, (end_key_of(args, tile.batch, last_row) + kBc - 1) / kBc);
  if (first_row > last_row || last_tile < first_tile) first_tile = last_tile = tile.first_tile;
  const int first_partial = end_key_of(args, tile.batch, first_row) / kBc;
  // Where it is next to none, what is left of the scale is small: nothing is divided by zero.
  const float score_scale = fabsf(args.scale) < 1e-30f ? 1e-30f : fabsf(args.scale);
  const float scale = kLog2e * score_scale;
  const float unit = 1.0f / score_scale;
  // What counts beside the keys, in the sum of one of the four lanes that share a row of the block that writes it.
  const float sink = tile.share.hands_on ? -kInfinity : kLog2e * sinks_at(args, tile.head);
  const bool counts = lane % 4 == 0 && sink > -kInfinity;
  SoftmaxState softmax;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.max[h] = sink;
    softmax.sum[h] = counts ? 1.0f : 0.0f;
  }
  float o[kDv / 2];
#pragma unroll
  for (int i = 0; i < kDv / 2; ++i) o[i] = 0.0f;

  QChunk* q = smem.q[q_pipe.stage][consumer];
  barrier_wait(&smem.q_full[q_pipe.stage][consumer], q_pipe.phase);
  if (args.scale < 0.0f) negate_q(q, consumer);
  const unsigned long long q_desc = descriptor(q);
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
    barrier_wait(&smem.arrays_full[array_pipe.stage], array_pipe.phase);
    __syncwarp();
    if (lane == 0) barrier_arrive(&smem.arrays_empty[array_pipe.stage]);
    array_pipe.advance();
  }
  int n = last_tile - 1;
  if (n >= first_tile) {
    float s[kBc / 2], rescale[2];
    unsigned p[kKeySteps][4];
    barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
    order_wait(consumer);
    start_qk(s, q_desc, k_desc + k_pipe.stage * kNextK);
    order_arrive(consumer);
    wgmma_wait<0>();
    hold(s);
    if (leader) barrier_arrive(&smem.k_empty[k_pipe.stage]);
    k_pipe.advance();
    barrier_wait(&smem.arrays_full[array_pipe.stage], array_pipe.phase);
    change(args, smem.bias_tiles[array_pipe.stage], s, unit, tile.batch, tile.head, row, n * kBc);
    if (n >= first_partial) hide_last(s, SeenKeys(args, tile.batch, row), n * kBc);
    __syncwarp();
    if (lane == 0) barrier_arrive(&smem.arrays_empty[array_pipe.stage]);
    array_pipe.advance();
    raise_maximum(s, softmax, rescale, scale);
    weigh(s, softmax, scale);
    pack_weights(s, p);
#pragma unroll 1
    for (--n; n >= first_tile; --n) {
      // The next scores follow these outputs through the tensor cores without a gap.
      barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
      order_wait(consumer);
      start_pv(o, p, v_desc + v_pipe.stage * kNextV);
      barrier_wait(&smem.k_full[k_pipe.stage], k_pipe.phase);
      start_qk(s, q_desc, k_desc + k_pipe.stage * kNextK);
      order_arrive(consumer);
      wgmma_wait<1>();
      hold(o);
      if (leader) barrier_arrive(&smem.v_empty[v_pipe.stage]);
      v_pipe.advance();
      wgmma_wait<0>();
      hold(s);
      if (leader) barrier_arrive(&smem.k_empty[k_pipe.stage]);
      k_pipe.advance();
      barrier_wait(&smem.arrays_full[array_pipe.stage], array_pipe.phase);
      change(args, smem.bias_tiles[array_pipe.stage], s, unit, tile.batch, tile.head, row, n * kBc);
      if (n >= first_partial) hide_last(s, SeenKeys(args, tile.batch, row), n * kBc);
      __syncwarp();
      if (lane == 0) barrier_arrive(&smem.arrays_empty[array_pipe.stage]);
      array_pipe.advance();
      if (raise_maximum(s, softmax, rescale, scale)) rescale_output(o, rescale);
      weigh(s, softmax, scale);
      pack_weights(s, p);
    }
    barrier_wait(&smem.v_full[v_pipe.stage], v_pipe.phase);
    start_pv(o, p, v_desc + v_pipe.stage * kNextV);
    wgmma_wait<0>();
    hold(o);
    if (leader) barrier_arrive(&smem.v_empty[v_pipe.stage]);
    v_pipe.advance();
  }

  if (tile.share.hands_on) {
    hand_on(args, softmax, o, consumer);
    if (leader) barrier_arrive(&smem.q_empty[q_pipe.stage]);
    q_pipe.advance();
    return;
  }
#pragma unroll 1
  for (int i = 1; i <= tile.share.givers; ++i) take_over(args, int(blockIdx.x) - i, softmax, o, consumer);
  float inverse[2];
  unsigned untrusted = 0;  // of the thread's rows, by bits: what is to be computed again
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float row_sum = softmax.sum[h];
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);

    const bool inside = row + 8 * h < args.seqlen_q, keeps = trusted(softmax.max[h], row_sum);
    inverse[h] = keeps && row_sum > 0.0f ? __fdividef(1.0f, row_sum) : 0.0f;
    if (inside && has_keys(args, tile.batch, row + 8 * h) && !keeps) {
      untrusted |= 1u << h;
    } else if (inside && args.lse != nullptr && lane % 4 == 0) {
      const long long at = lse_index(args, tile) + row + 8 * h;
      args.lse[at] = (softmax.max[h] + log2f(row_sum)) * kLn2;
    }
  }
  // Outputs take the place of Q, of which each warp has read its own rows alone.
  OChunk* staged = q;
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
    tma_wait_read<0>();
    barrier_arrive(&smem.q_empty[q_pipe.stage]);
  }
  q_pipe.advance();
}

// Says that nobody has handed on anything.
extern "C" __global__ void __launch_bounds__(128) attention_bf16_d128_biasbf16_sinks_clear(const AttentionArgs args) {
  let_next_launch_begin();
  for (int i = threadIdx.x; i < kMaxBlocks * kConsumers; i += 128) *handed_number(args, 0, i) = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bf16_d128_biasbf16_sinks_kernel(const AttentionArgs args, const __grid_constant__ TensorMaps maps) {
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
      barrier_init(&smem.k_empty[i], kConsumers);
    }
    for (int i = 0; i < kVStages; ++i) {
      barrier_init(&smem.v_full[i], 1);
      barrier_init(&smem.v_empty[i], kConsumers);
    }
    for (int i = 0; i < kArrayStages; ++i) {
      barrier_init(&smem.arrays_full[i], 1);
      barrier_init(&smem.arrays_empty[i], 4 * kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  PipelineState<kQStages> q_pipe;
  PipelineState<kKStages> k_pipe;
  PipelineState<kVStages> v_pipe;
  PipelineState<kArrayStages> array_pipe;
  if (warp < 4) {
    give_registers<32>();
    if (warp == 0 && elect_one()) {
      prefetch_map(&maps.q);
      prefetch_map(&maps.k);
      prefetch_map(&maps.v);
      for_each_tile<false>(args, [&](const Tile& tile) {
        produce_tile(args, maps, smem, tile, q_pipe, k_pipe, v_pipe);
      });
    } else if (warp == 1 && (elect_one() || !arrays_suit(args))) {
      for_each_tile<false>(args, [&](const Tile& tile) { bring_arrays(args, maps, smem, tile, array_pipe); });
    }
  } else {
    take_registers<160>();
    const int consumer = warp / 4 - 1;
    if (consumer == kConsumers - 1) order_arrive(consumer);
    for_each_tile<kHaveRegisters>(args, [&](const Tile& tile) {
      consume_tile(args, maps, smem, tile, consumer, q_pipe, k_pipe, v_pipe, array_pipe);
    });
  }
}

#ifndef __CUDACC_RTC__
// Describes an array of `sizes` (columns, rows, heads, batch) and `strides` (of rows, heads, batches) in elements,
// which is moved in boxes of `columns` by `rows`.
template <typename Item>
static cudaError_t encode_map(
    CUtensorMap* map, const Item* array, const long long (&sizes)[4], const long long (&strides)[3],
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
  for (int i = 0; i < 3; ++i) stride_bytes[i] = whole[i + 1] > 1 ? strides[i] * sizeof(Item) : 16;
  const cuuint32_t box[4] = {columns, rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr CUtensorMapDataType type =
      sizeof(Item) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult status = encode(
      map, type, 4, const_cast<Item*>(array), whole, stride_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Returns how many bytes args->workspace must have room for.
extern "C" long long attention_bf16_d128_biasbf16_sinks_workspace_bytes(const AttentionArgs* args) {
  return 4 * (3447232);
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

static int launch_clear(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 0;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_biasbf16_sinks_clear, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  const unsigned grid = unsigned(blocks < 1 ? blocks : 1);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(grid, 128, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d128_biasbf16_sinks_clear, *args);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream, bool& begun) {
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
  const cudaError_t k_status = encode_map(
      &maps.k, any_keys ? args->k : args->q, {kD, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->k_stride_row, args->k_stride_head, args->k_stride_batch}, 64, 80,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (k_status != cudaSuccess) return k_status;
  const cudaError_t v_status = encode_map(
      &maps.v, any_keys ? args->v : args->q, {kDv, args->seqlen_k, args->num_kv_heads, args->batch},
      {args->v_stride_row, args->v_stride_head, args->v_stride_batch}, 64, 80,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (v_status != cudaSuccess) return v_status;
  const cudaError_t o_status = encode_map(
      &maps.o, args->o, {kDv, args->seqlen_q, args->num_q_heads, args->batch},
      {args->o_stride_row, args->o_stride_head, args->o_stride_batch}, 64, 64,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  if (o_status != cudaSuccess) return o_status;
  if (any_keys && arrays_suit(*args)) {
    const cudaError_t bias_status = encode_map(
        &maps.bias, args->bias,
        {args->seqlen_k, args->bias_stride_2 == 0 ? 1 : args->seqlen_q, args->bias_stride_1 == 0 ? 1 : args->num_q_heads,
         args->bias_stride_0 == 0 ? 1 : args->batch},
        {args->bias_stride_2, args->bias_stride_1, args->bias_stride_0}, 16, 192,
        CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    if (bias_status != cudaSuccess) return bias_status;
  }
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_bf16_d128_biasbf16_sinks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  const unsigned grid = unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure(grid, kThreads, smem_bytes, stream, attribute, begun);
  return cudaLaunchKernelEx(&config, attention_bf16_d128_biasbf16_sinks_kernel, *args, maps);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape or stride the kernel does not serve.
extern "C" int attention_bf16_d128_biasbf16_sinks(const AttentionArgs* args, cudaStream_t stream) {
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
    if (address % (kVec * sizeof(__nv_bfloat16)) != 0) return cudaErrorMisalignedAddress;
  }
  bool begun = false;  // by a launch
  if (const int status = launch_clear(args, stream, begun)) return status;
  if (const int status = launch_kernel(args, stream, begun)) return status;
  return cudaSuccess;
}
#endif
