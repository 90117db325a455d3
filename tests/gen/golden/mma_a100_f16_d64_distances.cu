// attention_f16_d64_scorec61f42: flash attention, f16, head dim 64, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Masks and scores: score 20 * tanh((score + near[h, k - q + 512] + far[k // 2 - q, h]) / 20). Their numbers and
// arrays are run-time arguments, too.
//
// Family mma:
//   br = 64                    query rows per block
//   rows_per_warp = 16         query rows that one warp owns
//   bc = 32                    keys per tile
//   layout = padded            how rows in shared memory avoid bank conflicts
//   d_steps = exact            q k^T's last step: of 8 columns where the head dim ends, or of 16
//   q_in_registers = true      keep Q in registers for the whole block
//   stages = 2                 K/V tiles in shared memory; 1: K and V are fetched in turns
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   heads = 1                  heads that one block takes in turn, one's copies beside another's products
//   min_blocks = 1             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length

#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements. lse may be null; else it is contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const __half* q;
  const __half* k;
  const __half* v;
  __half* o;
  float* lse;
  const unsigned short* near;  // (num_q_heads, any) of f16
  const float* far;  // (any, num_q_heads) of f32
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  long long near_stride_0;
  long long far_stride_0;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  int near_size_1;
  int far_size_0;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 200, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = __half;
constexpr int kD = 64;  // head dim of queries and keys
constexpr int kDv = 64;  // head dim of values and outputs
constexpr int kVec = 8;  // elements per access of global memory

constexpr int kBr = 64;  // query rows per block
constexpr int kBc = 32;  // keys per tile
constexpr int kRowTiles = 1;  // tiles of 16 rows that one warp owns, so that softmax never leaves it
constexpr int kThreads = 128;
constexpr int kStages = 2;  // K/V tiles in shared memory

constexpr int kKeyTiles = kBc / 8;  // columns of eight keys in a warp's scores
constexpr int kWideSteps = 4;  // steps of 16 along the head dim in q k^T
constexpr int kValueTiles = 8;  // columns of eight in a warp's outputs

constexpr unsigned kSigns = 0x80008000u;  // of the two elements in a register

// Elements between rows in shared memory.
constexpr int kKStride = 72;
constexpr int kVStride = 72;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr bool kRowsMayBeEmpty = true;  // though there are keys
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct SharedStorage {
  alignas(16) Element k[kStages][kBc * kKStride];
  alignas(16) Element v[kStages][kBc * kVStride];
};
static_assert(sizeof(SharedStorage) == 18432, "the size that pruning counted on");

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

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned* m, const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// D += A B for one warp: A is 16 x k by rows, B is k x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The hyperbolic tangent by the special-function unit, to 2^-11 of it.
__device__ __forceinline__ float tanh_approximate(float x) {
  float tangent;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tangent) : "f"(x));
  return tangent;
}

#endif

// An address that others are told `behind`: the compiler then adds what it knows of that within its instructions.
template <typename T>
__device__ __forceinline__ const T* start_of(const T* address) {
#ifdef __CUDACC__
  asm("" : "+l"(address));
#endif
  return address;
}

#ifdef __CUDACC__
// An f16 by its bits, as a float: without the header, which compilers for old cards come without.
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
}
#endif

// An index as Python has it, negative ones counted from the end, and within the array whatever it is.
__device__ __forceinline__ int index_within(int index, int size) {
  return min(max(index < 0 ? index + size : index, 0), size - 1);
}

__device__ __forceinline__ float near_at(const AttentionArgs& args, int i0, int i1) {
  i1 = index_within(i1, args.near_size_1);
  const unsigned short bits = __ldg(args.near + i0 * args.near_stride_0 + i1);
  return half_to_float(bits);
}

// Where the element is of an index within the last axis, and what it is.
__device__ __forceinline__ const unsigned short* place_in_near(const AttentionArgs& args, int i0, int i1) {
  return start_of(args.near + i0 * args.near_stride_0 + i1);
}

__device__ __forceinline__ float near_there(const unsigned short* place) {
  const unsigned short bits = __ldg(place);
  return half_to_float(bits);
}

__device__ __forceinline__ float far_at(const AttentionArgs& args, int i0, int i1) {
  i0 = index_within(i0, args.far_size_0);
  return __ldg(args.far + i0 * args.far_stride_0 + i1);
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
  const float t0 = tanh_approximate((score + near_at(args, head, key - row + 512) + far_at(args, key / 2 - row, head)) / 20.0f);
  return kLog2e * (20.0f * t0);
}

// Two numbers in one register, the first in its low half.
__device__ __forceinline__ unsigned pack(float first, float second) {
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

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_k(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x / 8, first_x = threadIdx.x % 8 * kVec;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 16;
#pragma unroll
    for (int x = 0; x < kD; x += 64) {
      copy_vector(tile + k_offset(row, first_x + x), source + x, row < rows);
    }
    source += 16 * stride;
  }
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_v(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x / 8, first_x = threadIdx.x % 8 * kVec;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 16;
#pragma unroll
    for (int x = 0; x < kDv; x += 64) {
      copy_vector(tile + v_offset(row, first_x + x), source + x, row < rows);
    }
    source += 16 * stride;
  }
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

// One warp's state: its rows of Q, O and the softmax, as the fragments of the tensor cores have them. A lane owns
// rows g and g + 8 of each row tile, g = lane / 4, and of each column tile columns 2 c and 2 c + 1, c = lane % 4.
struct Warp {
  unsigned q[kRowTiles][16];
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
    // Fragments of a step: rows g and g + 8 of its first half, then of its second. Each lane of four reads one half,
    // whole, for all.
#pragma unroll
    for (int f = 0; f < 16; f += 8) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + 16 * i + lane / 4 + 8 * h, x = f / 2 * 8 + lane % 4 * 8;
        uint4 half = make_uint4(0, 0, 0, 0);
        if (row < end) half = *reinterpret_cast<const uint4*>(q + row * stride + x);
        unsigned pieces[4] = {half.x ^ sign, half.y ^ sign, half.z ^ sign, half.w ^ sign};
        transpose_quad(pieces);
#pragma unroll
        for (int j = 0; j < 4 && f + 2 * j < 16; ++j) warp.q[i][f + 2 * j + h] = pieces[j];
      }
    }
  }
}

// Hides the keys that a row does not see.
__device__ __forceinline__ void mask(
    Scores& s, int first_key,
    const AttentionArgs& args, int batch, int first_row) {
  first_key += int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + 16 * i + int(threadIdx.x) % 32 / 4 + 8 * h, args.seqlen_q - 1);
      const int end = end_key_of(args, batch, row) - first_key;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = t * 8 + j;
          bool seen = column < end;
          if (!seen) s[i][t][2 * h + j] = -kInfinity;
        }
      }
    }
  }
}

// Whether all elements that a warp's scores of a tile read, of arrays that slide past it, are within these.
__device__ __forceinline__ bool are_within(int first_key, const AttentionArgs& args, int batch, int first_head, int first_row) {
  first_key += int(threadIdx.x) % 4 * 2;
  const int near_index = first_key - (first_row + int(threadIdx.x) % 32 / 4) + 512;
  const bool near_is_within =
      near_index - (16 * kRowTiles - 8) >= 0 && near_index + (8 * kKeyTiles - 7) < args.near_size_1;
  return __all_sync(0xffffffffu, near_is_within);
}

// Changes a tile's scores, which come not scaled, to what a factor makes exponents of two. With `is_within`
// all elements that it reads of arrays that slide past the tile are within these.
template <bool is_within>
__device__ __forceinline__ void change(
    Scores& s, float score_scale, int first_key,
    const AttentionArgs& args, int batch, int first_head, int first_row) {
  first_key += int(threadIdx.x) % 4 * 2;
  const auto* const near_place =
      is_within ? place_in_near(args, first_head, first_key - (first_row + int(threadIdx.x) % 32 / 4) + 512) : nullptr;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + 16 * i + int(threadIdx.x) % 32 / 4 + 8 * h, args.seqlen_q - 1);
      const int head = first_head;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = t * 8 + j;
          const int key = first_key + column;
          const float raw = s[i][t][2 * h + j];
          const float near_value =
              is_within ? near_there(near_place + (-(16 * i + 8 * h) + column)) : near_at(args, head, key - row + 512);
          s[i][t][2 * h + j] = tanh_approximate((raw * score_scale + near_value + far_at(args, key / 2 - row, head)) * 0.05f);
        }
      }
    }
  }
}

// Raises the running maximum of each row to the tile's. What was summed so far must be multiplied by `rescale`,
// where true is returned.
__device__ __forceinline__ bool raise_maximum(
    const Scores& s, Warp& warp, float (&rescale)[kRowTiles][2], float scale) {
  // A maximum that is out of date by a factor of 2^8 harms neither range nor precision. As integers, positive
  // floats compare as they are; zero bounds the others.
  bool grown = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int bound = 0;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        bound = __vimax3_s32(bound, __float_as_int(s[i][t][2 * h]), __float_as_int(s[i][t][2 * h + 1]));
      }
      grown |= fmaf(__int_as_float(bound), scale, -warp.row_max[i][h]) > 8.0f;
    }
  }
  if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kKeyTiles; ++t) tile_max = fmaxf(tile_max, fmaxf(s[i][t][2 * h], s[i][t][2 * h + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      const float highest = tile_max * scale;
      // Rounded up: of scores of -1e9, by which masks hide, weights would else exceed what 16 bits hold.
      const float row_max = fmaxf(warp.row_max[i][h], highest * (highest < 0.0f ? 1.0f - 0x1p-22f : 1.0f + 0x1p-22f));
      // A row that has seen no key yet keeps its maximum of -infinity, against which nothing can be measured.
      const float base = kRowsMayBeEmpty && row_max == -kInfinity ? 0.0f : row_max;
      rescale[i][h] = exp2f(warp.row_max[i][h] - base);
      warp.row_max[i][h] = row_max;
      warp.row_sum[i][h] *= rescale[i][h];
    }
  }
  return true;
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
  const Element* k_lane = k + k_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);

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
      ldmatrix_x4(b, k_lane + t * 8 * kKStride + step * 16);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma_m16n8k16_f16(s[i][t + u], a[i], b + 2 * u);
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
  const Element* v_lane = v + v_offset(lane % 16, lane / 16 * 8);

#pragma unroll
  for (int u = 0; u < 4; u += 2) {
    // Two tiles of weights, as a lane has them, are one operand of sixteen keys.
    unsigned a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int f = 0; f < 4; ++f) a[i][f] = pack(s[i][u + f / 2][f % 2 * 2], s[i][u + f / 2][f % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, v_lane + u * 8 * kVStride + n * 8);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma_m16n8k16_f16(warp.o[i][n], a[i], b);
        mma_m16n8k16_f16(warp.o[i][n + 1], a[i], b + 2);
      }
      weigh_share(s, warp, base, scale, u / 2 + 1, 1, n / 2, 4);
    }
  }
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
#pragma unroll 1
  for (int first_key = begin_key; first_key < end_key; first_key += 32) {
    const Element* key = k + min(first_key + lane, end_key - 1) * args.k_stride_row;
    double score = 0.0;
#pragma unroll 4
    for (int x = 0; x < kD; ++x) score += double(__half2float(q[x])) * double(__half2float(key[x]));
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
        if (x < kDv) o[c] += factor * double(__half2float(value[x]));
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

// Divides by the sums and writes the warp's rows of o and of the log-sum-exp, but for those that it returns: bit i
// stands for the lane's row in the i-th eight of the warp's.
__device__ __forceinline__ unsigned write_rows(
    const Warp& warp, Element* o, long long stride, float* lse, int first_row, int seqlen_q) {
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
      const float inverse = keeps ? (row_sum > 0.0f ? 1.0f / row_sum : 0.0f) : 0.0f;
      const int row = first_row + 16 * i + lane / 4 + 8 * h;
      bool inside = row < seqlen_q;
      if (inside && !keeps) {
        untrusted |= 1u << (2 * i + h);
        inside = false;
      }
      if (lse != nullptr && inside && lane % 4 == 0) {
        lse[row] = (warp.row_max[i][h] + log2f(row_sum)) * kLn2;
      }
      Element* target = o + row * stride;
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 4) {
        unsigned pieces[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pieces[j] = pack(warp.o[i][n + j][2 * h] * inverse, warp.o[i][n + j][2 * h + 1] * inverse);
        }
        transpose_quad(pieces);
        if (inside) {
          *reinterpret_cast<uint4*>(target + n * 8 + lane % 4 * 8) =
              make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
        }
      }
    }
  }
  return untrusted;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_f16_d64_scorec61f42_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int q_tiles = (args.seqlen_q + kBr - 1) / kBr;
  // Blocks of one head are neighbours, so that they share its K and V in L2; under a causal mask the longest of
  // them go first.
  const int nth = int(blockIdx.x) % q_tiles;
  const int q_tile = kCausal ? q_tiles - 1 - nth : nth;
  const int head = int(blockIdx.x) / q_tiles % args.num_q_heads;
  const int batch = int(blockIdx.x) / q_tiles / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);

  const Element* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head;
  const Element* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const Element* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  Element* o = args.o + batch * args.o_stride_batch + head * args.o_stride_head;
  float* lse = args.lse == nullptr ? nullptr : args.lse + (1LL * batch * args.num_q_heads + head) * args.seqlen_q;

  const int first_row = q_tile * kBr;
  // Read from one lane, so that the compiler knows it to be the same in all.
  const int warp_index = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
  const int warp_row = warp_index * 16 * kRowTiles;  // the warp's first row within the block
  // Later rows see neither earlier nor less late: the block walks from what its first row sees to what its last does.
  const int end_key = end_key_of(args, batch, min(first_row + kBr, args.seqlen_q) - 1);
  const int first_tile = 0;
  const int last_tile = max(first_tile, (end_key + kBc - 1) / kBc);
  // The warp computes tiles that some row of its own sees, none where its rows lie beyond Q, and masks tiles
  // that not all of them see whole.
  const int warp_begin = min(first_row + warp_row, args.seqlen_q - 1);
  const int warp_last = min(first_row + warp_row + 16 * kRowTiles, args.seqlen_q) - 1;
  const int end_of_last = end_key_of(args, batch, warp_last);
  const int end_tile = first_row + warp_row < args.seqlen_q ? (end_of_last + kBc - 1) / kBc : 0;
  const int masked_tile = end_key_of(args, batch, warp_begin) / kBc;
  // A negative scale turns Q's sign instead. Where it is next to none, what is left of it is small: nothing is divided
  // by zero.
  const float scale = fabsf(args.scale) < 1e-30f ? 1e-30f : fabsf(args.scale);
  const float changed_scale = kLog2e * 20.0f;

  // Each thread copies its own share of every tile.
  k += (first_tile * kBc + int(threadIdx.x) / 8) * args.k_stride_row + threadIdx.x % 8 * kVec;
  v += (first_tile * kBc + int(threadIdx.x) / 8) * args.v_stride_row + threadIdx.x % 8 * kVec;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = first_tile + stage;
    if (tile < last_tile) {
      fetch_k(
          smem.k[stage], k,
          args.k_stride_row, end_key - tile * kBc);
      k += kBc * args.k_stride_row;
      fetch_v(
          smem.v[stage], v,
          args.v_stride_row, end_key - tile * kBc);
      v += kBc * args.v_stride_row;
    }
    __pipeline_commit();
  }

  Warp warp;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) warp.row_max[i][0] = warp.row_max[i][1] = -kInfinity;
  load_q(warp, q, args.q_stride_row, first_row + warp_row, args.seqlen_q, args.scale < 0.0f ? kSigns : 0u);

  for (int tile = first_tile; tile < last_tile; ++tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this tile is there, and no warp needs the one before it
    const int far_tile = tile + kStages - 1, far_stage = (far_tile - first_tile) % kStages;
    if (far_tile < last_tile) {
      fetch_k(
          smem.k[far_stage], k,
          args.k_stride_row, end_key - far_tile * kBc);
      k += kBc * args.k_stride_row;
      fetch_v(
          smem.v[far_stage], v,
          args.v_stride_row, end_key - far_tile * kBc);
      v += kBc * args.v_stride_row;
    }
    __pipeline_commit();
    const int stage = (tile - first_tile) % kStages;
    if (tile < end_tile) {
      Scores s;
      multiply_qk(s, warp, smem.k[stage]);
      if (are_within(tile * kBc, args, batch, head, first_row + warp_row)) {
        change<true>(s, scale, tile * kBc, args, batch, head, first_row + warp_row);
      } else {
        change<false>(s, scale, tile * kBc, args, batch, head, first_row + warp_row);
      }
      if (tile >= masked_tile) {
        mask(s, tile * kBc, args, batch, first_row + warp_row);
      }
      float rescale[kRowTiles][2];
      if (raise_maximum(s, warp, rescale, changed_scale)) rescale_output(warp, rescale);

      weigh_first(s, warp, changed_scale);
      multiply_pv(warp, s, smem.v[stage], changed_scale);
    }
  }
  const unsigned untrusted = write_rows(
      warp, o, args.o_stride_row, lse, first_row + warp_row, args.seqlen_q);
  const auto write = [&](int row, int x, float value) {
    o[(first_row + warp_row + row) * args.o_stride_row + x] = __float2half_rn(value);
  };
  recompute_rows<16 * kRowTiles>(args, batch, head, first_row + warp_row, untrusted, write);
}

#ifndef __CUDACC_RTC__
// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f16_d64_scorec61f42(const AttentionArgs* args, cudaStream_t stream) {
  if (args->batch < 0 || args->num_q_heads < 0 || args->num_kv_heads < 1 ||
      args->num_q_heads % args->num_kv_heads != 0 || args->seqlen_q < 0 || args->seqlen_k < 0) {
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
    if (address % (kVec * sizeof(__half)) != 0) return cudaErrorMisalignedAddress;
  }
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f16_d64_scorec61f42_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f16_d64_scorec61f42_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
