// What the device code of an emulated kernel asks of the run-time behind it (runtime.cpp).
//
// A block runs on one thread of the host, and so do all blocks of its cluster. Its CUDA threads are fibers: each runs until
// it must wait for others, at a barrier or a warp-wide exchange, and only there do they interleave.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// __thread, not thread_local: none has a constructor, and __thread spares every use the check for one.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;

struct CUtensorMap;

namespace emulation {

// Room for the largest dynamic shared memory of any card (227 KiB) and a guard band behind it.
constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr size_t kSharedGuardBytes = 4096;

// Fills shared memory at the start of a block and the target of an asynchronous copy in flight: a signalling NaN, so
// that arithmetic on it yields NaN and raises FE_INVALID, while merely moving it does neither. Both halves are NaN as
// f16 and as bf16. No bits are a signalling NaN as either: as f16 these are quiet, and known by their value.
constexpr uint32_t kUninitialized = 0x7fa07fa0;

// The defaults are the least that any card allows. Set by emulation_configure.
struct Config {
  uint64_t seed = 0;  // of the order in which fibers run
  int64_t shared_bytes_per_block = 48 * 1024;
  int32_t threads_per_block = 1024;
  int32_t host_threads = 0;  // that blocks are spread over; 0: one per core
};

// `what` names the CUDA function for messages, `line` the place in the kernel's source.
// Whether any thread of the block came with `predicate`.
bool sync_block(const char* what, int line, bool predicate = false);
void sync_warp(uint32_t mask, const char* what, int line);

// The bits that lane `source` passed in; kUninitialized when the mask does not name it.
uint64_t exchange(uint32_t mask, uint64_t bits, int source, const char* what, int line);
uint32_t ballot(uint32_t mask, bool predicate, const char* what, int line);

// Calls `work` once, when all lanes of the warp have come, with what each of them passed, by lane. They must come to the
// same line: instructions that PTX calls aligned are undefined for a divergent warp.
using WarpWork = void (*)(void* const lanes[32]);
void work_together(WarpWork work, void* operands, const char* what, int line);

// ldmatrix of `count` matrices into as many registers.
void load_matrices(unsigned* registers, const void* row, int count, bool transposed, const char* what, int line);

// Adds to `count` neighbours in global memory, each at once for all who add to it, in no order.
void add_to_sums(float* sums, const float* x, int count, const char* what, int line);

// mma.m16n8kK of elements of a type, accumulating in float32, in the arithmetic of a generation of cards.
enum class Mma { kK16F16, kK16Bf16, kK8F16, kK8Bf16, kK8Tf32, kK32E4m3 };
enum class TensorCores { kAmpere, kHopper };
void multiply(Mma mma, float* d, const unsigned* a, const unsigned* b, const char* what, int line,
              TensorCores cores = TensorCores::kAmpere);

// One product of a warpgroup: D of 64 by `columns` elements, a thread's share of it in `d`; A of 64 by 32 bytes in registers, or
// in shared memory where a descriptor says, by rows or, as a tile that is read across, by columns; B by columns, or by rows.
// Accumulators are floats, or pairs of `halves`, a word each: what is added to them is rounded to f16 each time.
struct Product {
  Mma mma;
  int columns;
  void* d;
  bool halves;
  const unsigned* a;
  uint64_t a_shared, b;
  bool a_by_columns, b_by_rows, accumulate;
  const char* what;
  int line;
};
// Called by each thread of the warpgroup. The product is computed when its group is waited for; until then `d` is poison.
void start_product(const Product& product);
void fence_products();
void commit_products();
void wait_for_products(unsigned groups_left_in_flight, const char* what, int line);

// Barriers in shared memory. Arrivals may announce bytes, which copies then bring.
void init_barrier(unsigned long long* barrier, unsigned arrivals, const char* what, int line);
void show_barriers();  // that this thread initialised, to the copy engine
void arrive(unsigned long long* barrier, unsigned bytes, const char* what, int line);
void arrive_at(unsigned long long* barrier, unsigned block, const char* what, int line);
void wait_for_phase(unsigned long long* barrier, unsigned parity, const char* what, int line);
bool test_phase(unsigned long long* barrier, unsigned parity, const char* what, int line);
// Barrier `id` of the block, for so many threads.
void meet(int id, int threads, bool wait, const char* what, int line);

// Where rows end in maps of which the last dimension takes as many steps all the way round: kRowsEnd in kernels.
constexpr int kRowsEnd = 1 << 30;

// Where a box begins, in a map of so many dimensions, the innermost first.
struct Corner {
  unsigned rank;
  int at[5];
};

// Whether an address is of global memory that was told of; of any, where none was.
bool is_memory(const void* address);

// Boxes of arrays, by the copy engine.
void check_map(const CUtensorMap* map, const char* what, int line);
void load_box(void* shared, const CUtensorMap* map, unsigned long long* barrier, const Corner& corner,
              const char* what, int line);
void multicast_box(void* shared, const CUtensorMap* map, unsigned long long* barrier, unsigned blocks,
                   const Corner& corner, const char* what, int line);
void store_box(const CUtensorMap* map, const void* shared, const Corner& corner, const char* what, int line);
// Bytes side by side, by the copy engine; floats are stored, or added to those that are there.
void load_bytes(void* shared, const void* global, size_t bytes, unsigned long long* barrier, const char* what, int line);
void add_floats(float* global, const float* shared, size_t bytes, const char* what, int line);
void store_floats(float* global, const float* shared, size_t bytes, const char* what, int line);
void commit_stores();
// Until they have been read where they come from, or `landed` where they go.
void wait_for_stores(unsigned groups_left_in_flight, bool landed);
// A line of memory that nobody reads any more holds no numbers.
void discard(float* floats, size_t count, const char* what, int line);
// Until another block has left the number there, or any but 0.
void wait_for_number(const int* place, int number, const char* what, int line);
void wait_for_any_number(const int* place, const char* what, int line);
// Shows this thread's ordinary writes to the copy engine and to products.
void fence_proxy();
void store_matrices(void* row, const unsigned* registers, int count, const char* what, int line, bool transposed = false);

// For all threads of a cluster, but for those that have ended.
void sync_cluster(const char* what, int line);

// Tells the cluster that this thread has come as far; waits until all have, but for those that have ended.
void arrive_at_cluster();
void wait_for_cluster(const char* what, int line);

// Writes to where `shared` says in a block of the cluster all of whose threads have arrived once.
void write_block(void* shared, const void* values, size_t bytes, unsigned block, const char* what, int line);
// Where a place in shared memory is in a block of the cluster: as many bits lower down are the place's.
constexpr unsigned kBlockShift = 24, kPlaceMask = (1u << kBlockShift) - 1;
// Sends sixteen bytes to a place in a block, whose barrier counts them once they are there.
void send_to_block(unsigned shared, const void* values, unsigned barrier, const char* what, int line);

// Reads what is where `shared` says in a block of the cluster.
void read_block(void* values, const void* shared, size_t bytes, unsigned block, const char* what, int line);

// True in one lane of a whole warp.
bool elect(const char* what, int line);
// A warpgroup's threads are to have so many registers each.
void share_registers(int registers, const char* what, int line);

void copy_async(void* shared, const void* global, size_t bytes, size_t zero_fill, const char* what, int line);
void commit_copies();
void wait_for_copies(size_t groups_left_in_flight);

int lane_of_warp();

// `call` runs the kernel body with `parameters`, once for each thread. Returns a cudaError_t.
using KernelCall = void (*)(const void* kernel, void** parameters);
// `cluster`: how many neighbouring blocks form one; 0: as many as `form_clusters` was told. `dependent`: it may begin
// before the launch in front of it has ended, so that all blocks must wait for that but those that do nothing. A block
// waits as a whole or, where threads do so `alone`, by those that read what earlier launches have left. Or one block does
// so before it ends, of a launch that reads nothing of the one in front.
int launch(KernelCall call, const void* kernel, unsigned cluster, bool dependent, dim3 grid, dim3 block, void** parameters,
           size_t shared_bytes);
// Waits for the launches in front of this one; lets the next one begin, which counts on this thread's having waited.
void wait_for_launches(bool alone);
void end_behind_launches();
void let_launch_begin(const char* what, int line);
// From now on so many neighbouring blocks are a cluster.
bool form_clusters(unsigned blocks);
int allow_shared_bytes(const void* kernel, int bytes);
// Of more than eight blocks.
int allow_large_clusters(const void* kernel, bool allowed);

}  // namespace emulation

extern "C" {
void emulation_configure(const emulation::Config* config);
// Tells of global memory. The copy engine loads by no map that begins elsewhere, wherever its boxes are; told of none, by
// any.
void emulation_add_memory(const void* begin, size_t bytes);
// Why the last launch from this host thread failed; empty when it did not.
const char* emulation_message();
}
