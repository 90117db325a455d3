// attention_e4m3_d72_packed_paged16: flash attention, e4m3, head dim 72, tuned with a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (total, heads, head_dim) by
// strides with a contiguous head dim: sequences one behind the other, which attend each to itself. A causal mask is
// aligned bottom-right in each; several query heads may share one key/value head. Lengths, which only the card knows,
// strides, heads and scale are run-time arguments.
//
// Keys and values lie in pages of 16 keys: caches are (pages, heads, page_size, head_dim) by strides. Each
// sequence's row of page_table lists its pages, which others may have too.
//
// Family mma:
//   br = 32                    query rows per block
//   rows_per_warp = 16         query rows that one warp owns
//   bc = 48                    keys per tile
//   layout = padded            how rows in shared memory avoid bank conflicts
//   d_steps = exact            q k^T's last step: of 8 columns where the head dim ends, or of 16
//   q_in_registers = true      keep Q in registers for the whole block
//   stages = 1                 K/V tiles in shared memory; 1: K and V are fetched in turns
//   rescale = always           when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   heads = 1                  heads that one block takes in turn, one's copies beside another's products
//   min_blocks = 1             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length

#include <cuda_fp8.h>
#include <cuda_pipeline.h>

#if defined(FLASHGEN_DEBUG) && !defined(__CUDACC_RTC__)
#include <cstdio>
#endif

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 1
#endif

// Strides are in elements. lse may be null; else it is contiguous (num_q_heads, total_q). Of a sequence there are at most
// seqlen_q queries and seqlen_k keys, of the arrays' rows total_q.
struct AttentionArgs {
  const __nv_fp8_e4m3* q;
  const __nv_fp8_e4m3* k;
  const __nv_fp8_e4m3* v;
  __nv_bfloat16* o;
  float* lse;
  const int* page_table;  // (batch, max_pages): the pages of each sequence's keys, in their order
  const int* cu_seqlens_q;  // where each sequence's queries begin, and where the last one's end: batch + 1
  const int* seqused_q;  // how many of a sequence's queries count, the first of them; null: all
  const int* seqused_k;  // keys of each sequence; null: all have seqlen_k
  int* plan;  // memory for which block takes what
  long long q_stride_head, q_stride_row;
  long long k_stride_page, k_stride_head, k_stride_row;
  long long v_stride_page, v_stride_head, v_stride_row;
  long long o_stride_head, o_stride_row;
  long long page_table_stride;  // from one row to the next
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k, total_q, num_pages, page_size, max_pages;
  int plan_made;  // whether it is there from a call before
  float scale;  // multiplies q k^T: usually 1 / sqrt(head_dim), times the scales of q and k
  float value_scale;  // multiplies o: the scale of v
};
static_assert(sizeof(AttentionArgs) == 216, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __nv_fp8_e4m3;
using Output = __nv_bfloat16;
constexpr int kD = 72;  // head dim of queries and keys
constexpr int kDv = 72;  // head dim of values and outputs
constexpr int kVec = 8;  // elements per access of global memory

constexpr int kBr = 32;  // query rows per block
constexpr int kBc = 48;  // keys per tile
constexpr int kRowTiles = 1;  // tiles of 16 rows that one warp owns, so that softmax never leaves it
constexpr int kThreads = 64;
constexpr int kStages = 1;  // K/V tiles in shared memory

constexpr int kKeyTiles = kBc / 8;  // columns of eight keys in a warp's scores
constexpr int kWideSteps = 3;  // steps of 32 along the head dim in q k^T
constexpr int kValueTiles = 10;  // columns of eight in a warp's outputs

constexpr unsigned kSigns = 0x80808080u;  // of the four elements in a register

// Elements between rows in shared memory.
constexpr int kKStride = 112;
constexpr int kVStride = 80;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr bool kRowsMayBeEmpty = kCausal;  // though there are keys
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct SharedStorage {
  alignas(16) Element k[kStages][kBc * kKStride];
  alignas(16) Element v[kStages][kBc * kVStride];
};
static_assert(sizeof(SharedStorage) == 9216, "the size that pruning counted on");

constexpr int kPageSize = 16;  // keys per page

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

// What the plan lists, once for each tile of a sequence's rows, one behind the other: the sequence, its first place in
// the list, and where its rows and keys are.
struct alignas(16) Item {
  int sequence, first_item, first_row, num_rows;
  int first_key, num_keys, unused[2];
};
static_assert(sizeof(Item) == 32, "the size that memory for plans is counted by");

// The list of a plan, behind how many there are, which fills an item's place.
__device__ __forceinline__ Item* items_of(const AttentionArgs& packed) {
  return reinterpret_cast<Item*>(packed.plan) + 1;
}

// The arguments of one sequence, as if it were all there is.
__device__ __forceinline__ AttentionArgs of_sequence(const AttentionArgs& packed, const Item& item) {
  AttentionArgs args = packed;
  args.q += item.first_row * packed.q_stride_row;
  args.o += item.first_row * packed.o_stride_row;
  if (args.lse != nullptr) args.lse += item.first_row;
  args.seqlen_q = item.num_rows;
  args.seqlen_k = item.num_keys;
  return args;
}

// PTX by name; a host compiler that emulates a card brings its own.
#ifdef __CUDACC__
// Copies kBytes (4, 8 or 16) from global to shared memory while the thread goes on; zeros unless `inside`.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int from_global = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(global), "r"(from_global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(address), "l"(global), "n"(kBytes), "r"(from_global)
                 : "memory");
  }
}

__device__ __forceinline__ void ldmatrix_x4(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x2_trans(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// D += A B for one warp: A is 16 x k by rows, B is k x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

#ifdef __CUDACC__
// Four e4m3 numbers, the first in the low byte, as two pairs of f16.
__device__ __forceinline__ void e4m3_to_halves(unsigned (&pairs)[2], unsigned four) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(four));
}
#endif

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// The same of f16, which weights are.
__device__ __forceinline__ unsigned pack_halves(float first, float second) {
  const __half2 both = __floats2half2_rn(first, second);
  return reinterpret_cast<const unsigned&>(both);
}

// One access of a tile's copy: kVec elements, zeros unless `inside`.
__device__ __forceinline__ void copy_vector(Element* shared, const Element* global, bool inside) {
  copy_async<kVec * sizeof(Element)>(shared, global, inside);
}

__device__ __forceinline__ int k_offset(int key, int x) {
  return key * kKStride + x;
}

__device__ __forceinline__ int v_offset(int key, int x) {
  return key * kVStride + x;
}

// A thread's share of a copy to shared memory: columns from `source` on, of keys from `first` on. Those from `end` on
// become zeros.
__device__ __forceinline__ void fetch_k(Element* tile, const Element* source, const PagedRows& rows, int first, int end) {
  const int first_row = threadIdx.x / 9, first_x = threadIdx.x % 9 * kVec;
  if (threadIdx.x >= 63) return;
#pragma unroll
  for (int r = 0; r < 7; ++r) {
    const int row = first_row + r * 7;
    if (row >= 48) break;
    const Element* its_source = source + row_offset(rows, min(first + row, rows.last_key));
#pragma unroll
    for (int x = 0; x < kD; x += 72) {
      copy_vector(tile + k_offset(row, first_x + x), its_source + x, first + row < end);
    }
  }
}

// A thread's share of a copy to shared memory: columns from `source` on, of keys from `first` on. Those from `end` on
// become zeros.
__device__ __forceinline__ void fetch_v(Element* tile, const Element* source, const PagedRows& rows, int first, int end) {
  const int first_row = threadIdx.x / 9, first_x = threadIdx.x % 9 * kVec;
  if (threadIdx.x >= 63) return;
#pragma unroll
  for (int r = 0; r < 7; ++r) {
    const int row = first_row + r * 7;
    if (row >= 48) break;
    const Element* its_source = source + row_offset(rows, min(first + row, rows.last_key));
#pragma unroll
    for (int x = 0; x < kDv; x += 72) {
      copy_vector(tile + v_offset(row, first_x + x), its_source + x, first + row < end);
    }
  }
}

// The columns of K between the head dim and whole tiles of the products are zeros for good.
__device__ __forceinline__ void zero_k_columns(Element* tile) {
  for (int i = threadIdx.x; i < kBc * 24; i += kThreads) {
    tile[k_offset(i / 24, kD + i % 24)] = Element{};
  }
}

// The columns of V between the head dim and whole tiles of the products are zeros for good.
__device__ __forceinline__ void zero_v_columns(Element* tile) {
  for (int i = threadIdx.x; i < kBc * 8; i += kThreads) {
    tile[v_offset(i / 8, kDv + i % 8)] = Element{};
  }
}

// One warp's state: its rows of Q, O and the softmax, as the fragments of the tensor cores have them. A lane owns
// rows g and g + 8 of each row tile, g = lane / 4, and of each column tile columns 2 c and 2 c + 1, c = lane % 4;
// of o two neighbouring tiles are the even and the odd ones of sixteen columns, of which it so owns 4 c to 4 c + 3.
struct Warp {
  unsigned q[kRowTiles][12];
  float o[kRowTiles][kValueTiles][4] = {};
  float row_max[kRowTiles][2];  // in units of the exponents of two
  float row_sum[kRowTiles][2] = {};
};

using Scores = float[kRowTiles][kKeyTiles][4];
constexpr int kOperand = kRowTiles * 8;  // a lane's scores that make an operand of 16 keys

// Reads a warp's Q fragments, rows [first, first + 16 kRowTiles); rows from `end` on are zeros.
__device__ __forceinline__ void load_q(
    Warp& warp, const Element* q, long long stride, int first, int end, unsigned sign) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int f = 0; f < 12; ++f) {
      // Fragments of a step: rows g and g + 8 of its first half, then of its second.
      const int row = first + 16 * i + lane / 4 + f % 2 * 8;
      const int x = f / 2 * 16 + lane % 4 * 4;
      const Element* source = q + row * stride + x;
      unsigned bits = 0;
      if (row < end && x < kD) bits = *reinterpret_cast<const unsigned*>(source);
      warp.q[i][f] = bits ^ sign;
    }
  }
}

// Hides the keys that a row does not see.
__device__ __forceinline__ void mask(Scores& s, int first_row, int first_key, int seqlen_q, int seqlen_k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + 16 * i + lane / 4 + e / 2 * 8;
      const int end_key = kCausal ? min(seqlen_k, row + seqlen_k - seqlen_q + 1) : seqlen_k;
      const int end = end_key - (first_key + lane % 4 * 2 + e % 2);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        if (t * 8 >= end) s[i][t][e] = -kInfinity;
      }
    }
  }
}

// Raises the running maximum of each row to the tile's. What was summed so far must be multiplied by `rescale`.
__device__ __forceinline__ void raise_maximum(
    const Scores& s, Warp& warp, float (&rescale)[kRowTiles][2], float scale) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kKeyTiles; ++t) tile_max = fmaxf(tile_max, fmaxf(s[i][t][2 * h], s[i][t][2 * h + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      const float row_max = fmaxf(warp.row_max[i][h], tile_max * scale);
      // A row that has seen no key yet keeps its maximum of -infinity, against which nothing can be measured.
      const float base = kRowsMayBeEmpty && row_max == -kInfinity ? 0.0f : row_max;
      rescale[i][h] = exp2f(warp.row_max[i][h] - base);
      warp.row_max[i][h] = row_max;
      warp.row_sum[i][h] *= rescale[i][h];
    }
  }
}

// Turns element e of a lane's scores of one tile into a weight, 2^(score - maximum), and adds it to the row's sum.
__device__ __forceinline__ void weigh(
    Scores& s, Warp& warp, const float (&base)[kRowTiles][2], float scale, int i, int t, int e) {
  const float exponent = fmaf(s[i][t][e], scale, -base[i][e / 2]);
  s[i][t][e] = exp2f(exponent);
  warp.row_sum[i][e / 2] += s[i][t][e];
}

// The maxima that weights are measured against.
__device__ __forceinline__ void get_base(const Warp& warp, float (&base)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      base[i][h] = kRowsMayBeEmpty && warp.row_max[i][h] == -kInfinity ? 0.0f : warp.row_max[i][h];
    }
  }
}

// The weights of `count` operands of 16 keys from `first` on: of `shares` equal ones, share `share`.
__device__ __forceinline__ void weigh_share(
    Scores& s, Warp& warp, const float (&base)[kRowTiles][2], float scale, int first, int count, int share,
    int shares) {
#pragma unroll
  for (int e = 0; e < kKeyTiles * 4 * kRowTiles; ++e) {
    const int within = e % kOperand;  // row tile, then column tile, then element
    const int t = (first + e / kOperand) * 2 + within % 8 / 4;
    const bool chosen = e < count * kOperand && e * shares / (count * kOperand) == share;
    if (chosen && t < kKeyTiles) weigh(s, warp, base, scale, within / 8, t, within % 4);
  }
}

// s = q k^T for the warp's rows and one tile of keys, not scaled.
__device__ __forceinline__ void multiply_qk(
    Scores& s, const Warp& warp, const Element* k) {
  const int lane = threadIdx.x % 32;
  const Element* k_lane = k + k_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][t][e] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < kWideSteps; ++step) {
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int f = 0; f < 4; ++f) a[i][f] = warp.q[i][step * 4 + f];
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; t += 2) {
      // Two tiles of eight keys, each as two halves of the step.
      unsigned b[4];
      ldmatrix_x4(b, k_lane + t * 8 * kKStride + step * 32);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma_m16n8k32_e4m3(s[i][t + u], a[i], b + 2 * u);
      }
    }
  }
}

// The weights that the first products with V need.
__device__ __forceinline__ void weigh_first(Scores& s, Warp& warp, float scale) {
  float base[kRowTiles][2];
  get_base(warp, base);
  weigh_share(s, warp, base, scale, 0, 1, 0, 1);
}

__device__ __forceinline__ void rescale_output(Warp& warp, const float (&rescale)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) warp.o[i][n][e] *= rescale[i][e / 2];
    }
  }
}

// o += p v for one tile of keys, whose weights p are made of the scores s on the way: exponentials for the next
// operand run on the special-function unit beside the products of this one.
__device__ __forceinline__ void multiply_pv(Warp& warp, Scores& s, const Element* v, float scale) {
  const int lane = threadIdx.x % 32;
  float base[kRowTiles][2];
  get_base(warp, base);
#pragma unroll
  for (int u = 0; u < 6; u += 2) {
    // Two tiles of weights, as a lane has them, are one operand of sixteen keys.
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const float* pair = s[i][u + f / 2] + f % 2 * 2;
        a[i][f] = pack_halves(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles - 2; n += 4) {
      unsigned fours[4];
      ldmatrix_x4_trans(fours, v + v_offset(u * 8 + lane % 16, n * 8 + lane / 16 * 16));
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        // Two columns of each of two keys become two keys of each of two columns.
        unsigned first[2], second[2];
        e4m3_to_halves(first, __byte_perm(fours[2 * w], 0, 0x3120));
        e4m3_to_halves(second, __byte_perm(fours[2 * w + 1], 0, 0x3120));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned b[2] = {first[j], second[j]};
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) mma_m16n8k16_f16(warp.o[i][n + 2 * w + j], a[i], b);
        }
      }
      weigh_share(s, warp, base, scale, u / 2 + 1, 1, n / 4, 2);
    }
    {
      const int n = kValueTiles - 2;
      unsigned fours[2];
      ldmatrix_x2_trans(fours, v + v_offset(u * 8 + lane % 16, n * 8));
#pragma unroll
      for (int w = 0; w < 1; ++w) {
        // Two columns of each of two keys become two keys of each of two columns.
        unsigned first[2], second[2];
        e4m3_to_halves(first, __byte_perm(fours[2 * w], 0, 0x3120));
        e4m3_to_halves(second, __byte_perm(fours[2 * w + 1], 0, 0x3120));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned b[2] = {first[j], second[j]};
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) mma_m16n8k16_f16(warp.o[i][n + 2 * w + j], a[i], b);
        }
      }
    }
  }
}

__device__ __forceinline__ float e4m3_to_float(Element x) {
  unsigned halves[2];
  e4m3_to_halves(halves, x.__x);
  return __half2float(__ushort_as_half(halves[0] & 0xffff));
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
  const Element* q = args.q + head * args.q_stride_head + row * args.q_stride_row;
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
    for (int x = 0; x < kD; ++x) score += double(e4m3_to_float(q[x])) * double(e4m3_to_float(key[x]));
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
        if (x < kDv) o[c] += factor * double(e4m3_to_float(value[x]));
      }
    }
    if (__any_sync(0xffffffffu, row_sum != row_sum)) break;  // no number by now, nor will it be one
  }
  const bool seen = end_key > 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int x = c * 32 + lane;
    if (x < kDv) write(x, seen ? float(o[c] / row_sum * args.value_scale) : 0.0f);
  }
  if (args.lse != nullptr && lane == 0) {
    const double sum = log2f(float(row_sum));
    args.lse[1LL * head * args.total_q + row] =
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

// Divides by the sums and writes the warp's rows of o and of the log-sum-exp, but for those that it returns: bit i
// stands for the lane's row in the i-th eight of the warp's.
__device__ __forceinline__ unsigned write_rows(
    const Warp& warp, Output* o, long long stride, float* lse, int first_row, int seqlen_q, float value_scale) {
  const int lane = threadIdx.x % 32;
  unsigned untrusted = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_sum = warp.row_sum[i][h];
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
      const bool keeps = trusted(warp.row_max[i][h], row_sum);
      const float inverse = keeps ? value_scale / row_sum : 0.0f;
      const int row = first_row + 16 * i + lane / 4 + 8 * h;
      bool inside = row < seqlen_q;
      if (inside && !keeps) {
        untrusted |= 1u << (2 * i + h);
        inside = false;
      }
      if (lse != nullptr && inside && lane % 4 == 0) {
        lse[row] = (warp.row_max[i][h] + log2f(row_sum)) * kLn2;
      }
      Output* target = o + row * stride;
      if (!inside) continue;
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        const int x = n * 8 + lane % 4 * 4;
        const float columns[4] = {warp.o[i][n][2 * h] * inverse, warp.o[i][n + 1][2 * h] * inverse,
                                  warp.o[i][n][2 * h + 1] * inverse, warp.o[i][n + 1][2 * h + 1] * inverse};
        if (x >= kDv) continue;
        const uint2 packed = make_uint2(pack(columns[0], columns[1]), pack(columns[2], columns[3]));
        *reinterpret_cast<uint2*>(target + x) = packed;
      }
    }
  }
  return untrusted;
}

// Where a sequence is: within the arrays whatever the offsets say, and empty beyond the last.
__device__ __forceinline__ Item find_sequence(const AttentionArgs& args, int sequence) {
  Item item{};
  item.sequence = sequence;
  if (sequence >= args.batch) return item;
  item.first_row = min(max(args.cu_seqlens_q[sequence], 0), args.total_q);
  item.num_rows = max(min(args.cu_seqlens_q[sequence + 1], args.total_q) - item.first_row, 0);
  item.num_keys = count_keys(args, sequence);
  if (args.seqused_q != nullptr) item.num_rows = min(item.num_rows, max(args.seqused_q[sequence], 0));
  return item;
}

// Lists the items, a thread for each sequence: those with the most keys first, so that short ones fill the gaps.
extern "C" __global__ void __launch_bounds__(128) attention_e4m3_d72_packed_paged16_plan(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  int2* const others = reinterpret_cast<int2*>(shared_bytes);  // keys and tiles of some sequences
  const int own = int(blockIdx.x) * 128 + int(threadIdx.x), lane = threadIdx.x % 32;
  const auto tiles_of = [&](const Item& item) { return (item.num_rows + kBr - 1) / kBr; };
  Item item = find_sequence(args, own);
  const int num_tiles = tiles_of(item);
  // Offsets that fall may make more items than there is room for.
  const int room = args.total_q / kBr + args.batch;
  int num_items = 0;
  for (int first = 0; first < args.batch; first += 128) {
    __syncthreads();  // nobody reads the last ones any more
    const Item other = find_sequence(args, first + int(threadIdx.x));
    others[threadIdx.x] = make_int2(other.num_keys, tiles_of(other));
    __syncthreads();
    for (int i = 0; i < 128; ++i) {
      const int2 each = others[i];
      const bool sooner = each.x > item.num_keys || (each.x == item.num_keys && first + i < own);
      item.first_item = min(item.first_item + (sooner ? each.y : 0), room);
      num_items = min(num_items + each.y, room);
    }
  }
  if (own == 0) args.plan[0] = num_items;
  // What is left are empty items, which end the blocks that meet them.
  for (int place = num_items + own; place < room; place += int(gridDim.x) * 128) items_of(args)[place] = Item{};
  // A warp writes the items of each of its sequences together.
  for (int i = 0; i < 32; ++i) {
    Item each{};
    each.sequence = __shfl_sync(0xffffffffu, item.sequence, i);
    each.first_item = __shfl_sync(0xffffffffu, item.first_item, i);
    each.first_row = __shfl_sync(0xffffffffu, item.first_row, i);
    each.num_rows = __shfl_sync(0xffffffffu, item.num_rows, i);
    each.first_key = __shfl_sync(0xffffffffu, item.first_key, i);
    each.num_keys = __shfl_sync(0xffffffffu, item.num_keys, i);
    const int end = min(each.first_item + __shfl_sync(0xffffffffu, num_tiles, i), room);
    for (int place = each.first_item + lane; place < end; place += 32) items_of(args)[place] = each;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_e4m3_d72_packed_paged16_kernel(const AttentionArgs packed) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  // A sequence has as many blocks for each of its items as it has heads, which stand side by side.
  const int place = int(blockIdx.x) / packed.num_q_heads;
  const Item item = items_of(packed)[place];
  if (item.num_rows == 0) return;  // there are blocks for any lengths that make as many rows
  const AttentionArgs args = of_sequence(packed, item);
  const int batch = item.sequence, nth_block = int(blockIdx.x) - item.first_item * packed.num_q_heads;
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = nth_block % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
  const int head = nth_block / q_tiles;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);

  const PagedRows k_rows = find_rows(args, batch, args.k_stride_page, args.k_stride_row);
  const PagedRows v_rows = find_rows(args, batch, args.v_stride_page, args.v_stride_row);

  const Element* q = args.q + head * args.q_stride_head;
  const Element* k = args.k + kv_head * args.k_stride_head;
  const Element* v = args.v + kv_head * args.v_stride_head;
  Output* o = args.o + head * args.o_stride_head;
  float* lse = args.lse == nullptr ? nullptr : args.lse + 1LL * head * args.total_q;

  const int first_row = q_tile * kBr;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp_index = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int warp_row = warp_index * 16 * kRowTiles;  // the warp's first row within the block
  const int diagonal = args.seqlen_k - args.seqlen_q;
  int end_key = args.seqlen_k;  // of all that the block sees
  if (kCausal) end_key = max(0, min(end_key, first_row + kBr + diagonal));
  const int first_tile = 0, last_tile = (end_key + kBc - 1) / kBc;
  // The warp computes tiles before `end_tile`, none where its rows lie beyond Q, and masks from `masked_tile` on.
  int end_tile = first_row + warp_row < args.seqlen_q ? last_tile : first_tile, masked_tile = args.seqlen_k / kBc;
  if (kCausal) {
    const int seen_by_first = first_row + warp_row + diagonal + 1;
    masked_tile = min(masked_tile, max(0, seen_by_first) / kBc);
    const int seen_by_last = first_row + warp_row + 16 * kRowTiles + diagonal;
    end_tile = min(end_tile, (max(0, seen_by_last) + kBc - 1) / kBc);
  }
  // Maxima are taken of raw scores: a negative scale turns Q's sign instead. A scale of zero becomes too small to
  // matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;

#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) zero_k_columns(smem.k[stage]);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) zero_v_columns(smem.v[stage]);
  // Each thread copies its own share of every tile.
  k += threadIdx.x % 9 * kVec;
  v += threadIdx.x % 9 * kVec;
  if (first_tile < last_tile) {
    fetch_k(smem.k[0], k, k_rows, first_tile * kBc, args.seqlen_k);
  }
  __pipeline_commit();

  Warp warp;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) warp.row_max[i][0] = warp.row_max[i][1] = -kInfinity;
  load_q(warp, q, args.q_stride_row, first_row + warp_row, args.seqlen_q, args.scale < 0.0f ? kSigns : 0u);

  for (int tile = first_tile; tile < last_tile; ++tile) {
    __pipeline_wait_prior(0);

    __syncthreads();  // K is there, and no warp needs V any more
    fetch_v(smem.v[0], v, v_rows, tile * kBc, args.seqlen_k);
    __pipeline_commit();

    Scores s;
    if (tile < end_tile) multiply_qk(s, warp, smem.k[0]);
    __pipeline_wait_prior(0);

    __syncthreads();  // V is there, and no warp needs K any more
    if (tile + 1 < last_tile) {
      fetch_k(smem.k[0], k, k_rows, (tile + 1) * kBc, args.seqlen_k);
    }
    __pipeline_commit();

    if (tile < end_tile) {
      if (tile >= masked_tile) mask(s, first_row + warp_row, tile * kBc, args.seqlen_q, args.seqlen_k);
      float rescale[kRowTiles][2];
      raise_maximum(s, warp, rescale, scale);
      rescale_output(warp, rescale);

      weigh_first(s, warp, scale);
      multiply_pv(warp, s, smem.v[0], scale);
    }
  }
  const unsigned untrusted = write_rows(
      warp, o, args.o_stride_row, lse, first_row + warp_row, args.seqlen_q, args.value_scale);
  const auto write = [&](int row, int x, float value) {
    o[(first_row + warp_row + row) * args.o_stride_row + x] = __float2bfloat16_rn(value);
  };
  recompute_rows<16 * kRowTiles>(args, batch, head, first_row + warp_row, untrusted, write);
}

#ifndef __CUDACC_RTC__
// Returns how many integers args->plan must have room for.
extern "C" long long attention_e4m3_d72_packed_paged16_plan_ints(const AttentionArgs* args) {
  const long long batch = args->batch, total_q = args->total_q;
  return (total_q / kBr + batch + 1) * 8;
}

static int launch_plan(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch;
  const long long blocks = (batch + 127) / 128;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = 1024;
  const cudaError_t status =
      cudaFuncSetAttribute(attention_e4m3_d72_packed_paged16_plan, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_e4m3_d72_packed_paged16_plan, dim3(unsigned(blocks)), dim3(128), parameters,
                          smem_bytes, stream);
}

static int launch_kernel(const AttentionArgs* args, cudaStream_t stream) {
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long total_q = args->total_q;
  const long long blocks = (total_q / kBr + batch) * num_q_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_e4m3_d72_packed_paged16_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_e4m3_d72_packed_paged16_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}

// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 8-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_e4m3_d72_packed_paged16(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  if (args->total_q < 0) return cudaErrorInvalidValue;
  if (args->batch == 0 || args->total_q == 0) return cudaSuccess;
  if (args->cu_seqlens_q == nullptr || args->plan == nullptr ||
      reinterpret_cast<unsigned long long>(args->plan) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  if (args->num_pages < 0 || args->max_pages < 0 || args->page_size != kPageSize) return cudaErrorInvalidValue;
  if (args->seqlen_k > 0 && (args->page_table == nullptr || args->num_pages == 0)) return cudaErrorInvalidValue;
  // A table too narrow for the keys that there may be.
  if (1LL * args->max_pages * args->page_size < args->seqlen_k) return cudaErrorInvalidValue;
  const long long strides[] = {args->q_stride_head, args->q_stride_row,
                               args->k_stride_page, args->k_stride_head, args->k_stride_row,
                               args->v_stride_page, args->v_stride_head, args->v_stride_row,
                               args->o_stride_head, args->o_stride_row};
  for (const long long stride : strides) {
    if (stride % kVec != 0) return cudaErrorMisalignedAddress;
  }
  const void* const pointers[] = {args->q, args->k, args->v, args->o};
  for (const void* pointer : pointers) {
    const auto address = reinterpret_cast<unsigned long long>(pointer);
    if (address % (kVec * sizeof(__nv_fp8_e4m3)) != 0) return cudaErrorMisalignedAddress;
  }
  if (!args->plan_made) {
    if (const int status = launch_plan(args, stream)) return status;
  }
  if (const int status = launch_kernel(args, stream)) return status;
  return cudaSuccess;
}
#endif
