// attention_f32_tf32_d64: flash attention, f32, head dim 64, tuned without a causal mask.
//
// o = softmax(scale * q k^T) v, and optionally the log-sum-exp of each row. Tensors are (batch, heads, seqlen,
// head_dim) by strides with a contiguous head dim; a causal mask is aligned bottom-right; several query heads
// may share one key/value head. Lengths, strides, heads and scale are run-time arguments.
//
// Family mma:
//   br = 128                   query rows per block
//   rows_per_warp = 32         query rows that one warp owns
//   bc = 32                    keys per tile
//   layout = padded            how rows in shared memory avoid bank conflicts
//   d_steps = exact            q k^T's last step: of 8 columns where the head dim ends, or of 16
//   q_in_registers = false     keep Q in registers for the whole block
//   stages = 2                 K/V tiles in shared memory; 1: K and V are fetched in turns
//   rescale = lazy             when outputs follow the running maximum: once it grew, or always
//   poly_exp = 0               one exponential in so many is a polynomial, 0 none
//   heads = 1                  heads that one block takes in turn, one's copies beside another's products
//   min_blocks = 3             blocks per SM the compiler must leave registers for
//   block_order = by_head      what neighbouring blocks share: a head, or a length
//
// Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, without a mask: 1.747 ms (median), spread 1.2 %,
// 157.4 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 4.4e-04.
// Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.
//
// Build:
//
//     nvcc -std=c++17 -O3 -ftz=true -arch=sm_90 -c f32_tf32_d64.cu
//     (-DFLASHGEN_CAUSAL=1 builds it with the causal mask)
//
// Regenerate:
//
//     flashgen emit f32_tf32_d64.cu \
//         --device h200 --precision tf32 --d 64 --family mma --set br=128 --set rows_per_warp=32 \
//         --set bc=32 --set layout=padded --set d_steps=exact --set q_in_registers=false --set stages=2 \
//         --set rescale=lazy --set poly_exp=0 --set heads=1 --set min_blocks=3 --set block_order=by_head

#include <cuda_pipeline.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL 0
#endif

// Strides are in elements. lse may be null; else it is contiguous (batch, num_q_heads, seqlen_q).
struct AttentionArgs {
  const float* q;
  const float* k;
  const float* v;
  float* o;
  float* lse;
  long long q_stride_batch, q_stride_head, q_stride_row;
  long long k_stride_batch, k_stride_head, k_stride_row;
  long long v_stride_batch, v_stride_head, v_stride_row;
  long long o_stride_batch, o_stride_head, o_stride_row;
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;  // multiplies q k^T, usually 1 / sqrt(head_dim)
};
static_assert(sizeof(AttentionArgs) == 160, "callers from other languages pack the arguments by hand");

constexpr bool kCausal = FLASHGEN_CAUSAL;
using Element = float;
constexpr int kD = 64;  // head dim of queries and keys
constexpr int kDv = 64;  // head dim of values and outputs
constexpr int kVec = 4;  // elements per access of global memory

constexpr int kBr = 128;  // query rows per block
constexpr int kBc = 32;  // keys per tile
constexpr int kRowTiles = 2;  // tiles of 16 rows that one warp owns, so that softmax never leaves it
constexpr int kThreads = 128;
constexpr int kStages = 2;  // K/V tiles in shared memory

constexpr int kKeyTiles = kBc / 8;  // columns of eight keys in a warp's scores
constexpr int kWideSteps = 8;  // steps of 8 along the head dim in q k^T
constexpr int kValueTiles = 8;  // columns of eight in a warp's outputs

// Elements between rows in shared memory.
constexpr int kQStride = 68;
constexpr int kKStride = 68;
constexpr int kVStride = 68;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr bool kRowsMayBeEmpty = kCausal;  // though there are keys
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct SharedStorage {
  alignas(16) Element q[kBr * kQStride];
  alignas(16) Element k[kStages][kBc * kKStride];
  alignas(16) Element v[kStages][kBc * kVStride];
};
static_assert(sizeof(SharedStorage) == 69632, "the size that pruning counted on");

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

// D += A B for one warp: A is 16 x k by rows, B is k x 8 by columns, D is 16 x 8.
__device__ __forceinline__ void mma_m16n8k8_tf32(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// Rounded to the eleven bits that a tensor core reads.
__device__ __forceinline__ unsigned to_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// One access of a tile's copy: kVec elements, zeros unless `inside`.
__device__ __forceinline__ void copy_vector(Element* shared, const Element* global, bool inside) {
  copy_async<kVec * sizeof(Element)>(shared, global, inside);
}

__device__ __forceinline__ int q_offset(int row, int x) {
  return row * kQStride + x;
}

__device__ __forceinline__ int k_offset(int key, int x) {
  return key * kKStride + x;
}

__device__ __forceinline__ int v_offset(int key, int x) {
  return key * kVStride + x;
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_q(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x / 16, first_x = threadIdx.x % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int row = first_row + r * 8;
#pragma unroll
    for (int x = 0; x < kD; x += 64) {
      copy_vector(tile + q_offset(row, first_x + x), source + x, row < rows);
    }
    source += 8 * stride;
  }
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_k(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x / 16, first_x = threadIdx.x % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = first_row + r * 8;
#pragma unroll
    for (int x = 0; x < kD; x += 64) {
      copy_vector(tile + k_offset(row, first_x + x), source + x, row < rows);
    }
    source += 8 * stride;
  }
}

// A thread's share of a copy to shared memory: it reads from `source` on, its own element of a tile's first row.
// Rows from `rows` on become zeros.
__device__ __forceinline__ void fetch_v(Element* tile, const Element* source, long long stride, int rows) {
  const int first_row = threadIdx.x / 16, first_x = threadIdx.x % 16 * kVec;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = first_row + r * 8;
#pragma unroll
    for (int x = 0; x < kDv; x += 64) {
      copy_vector(tile + v_offset(row, first_x + x), source + x, row < rows);
    }
    source += 8 * stride;
  }
}

// One warp's state: its rows of Q, O and the softmax, as the fragments of the tensor cores have them. A lane owns
// rows g and g + 8 of each row tile, g = lane / 4, and of each column tile columns 2 c and 2 c + 1, c = lane % 4.
struct Warp {
  float o[kRowTiles][kValueTiles][4] = {};
  float row_max[kRowTiles][2];  // in units of the exponents of two
  float row_sum[kRowTiles][2] = {};
};

using Scores = float[kRowTiles][kKeyTiles][4];
constexpr int kOperand = kRowTiles * 4;  // a lane's scores that make an operand of 8 keys

// Turns the sign of a warp's own rows of Q.
__device__ __forceinline__ void negate_q(Element* q, int first_row) {
  for (int i = threadIdx.x % 32; i < 16 * kRowTiles * 64; i += 32) {
    Element& element = q[q_offset(first_row + i / 64, i % 64)];
    element = -element;
  }
  __syncwarp();
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
      const float row_max = fmaxf(warp.row_max[i][h], tile_max * scale);
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

// The weights of `count` operands of 8 keys from `first` on: of `shares` equal ones, share `share`.
__device__ __forceinline__ void weigh_share(
    Scores& s, Warp& warp, const float (&base)[kRowTiles][2], float scale, int first, int count, int share,
    int shares) {
#pragma unroll
  for (int e = 0; e < kKeyTiles * 4 * kRowTiles; ++e) {
    const int within = e % kOperand;  // row tile, then column tile, then element
    const int t = (first + e / kOperand) * 1 + within % 4 / 4;
    const bool chosen = e < count * kOperand && e * shares / (count * kOperand) == share;
    if (chosen && t < kKeyTiles) weigh(s, warp, base, scale, within / 4, t, within % 4);
  }
}

// s = q k^T for the warp's rows and one tile of keys, not scaled.
__device__ __forceinline__ void multiply_qk(
    Scores& s, const Element* q, const Element* k) {
  const int lane = threadIdx.x % 32;
  const Element* q_lane = q + q_offset(lane % 16, lane / 16 * 4);

  const Element* k_lane = k + k_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 4);

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
      const Element* row = q_lane + 16 * i * kQStride + step * 8;
      ldmatrix_x4(a[i], row);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int f = 0; f < 4; ++f) a[i][f] = to_tf32(__uint_as_float(a[i][f]));
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; t += 2) {
      // Two tiles of eight keys, each as two halves of the step.
      unsigned b[4];
      ldmatrix_x4(b, k_lane + t * 8 * kKStride + step * 8);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const unsigned b_rounded[2] = {to_tf32(__uint_as_float(b[2 * u])), to_tf32(__uint_as_float(b[2 * u + 1]))};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma_m16n8k8_tf32(s[i][t + u], a[i], b_rounded);
      }
    }
  }
}

// The weights that the first products with V need.
__device__ __forceinline__ void weigh_first(Scores& s, Warp& warp, float scale) {
  float base[kRowTiles][2];
  get_base(warp, base);
  weigh_share(s, warp, base, scale, 0, 4, 0, 1);
}

// o = o rescale + p v for one tile of keys. 32 keys at a time are summed apart from zero: a tensor core cuts
// off, at each step, what its accumulator cannot hold, and the sum over all keys would feel it.
__device__ __forceinline__ void multiply_pv(
    Warp& warp, const Scores& p, const Element* v, const float (&rescale)[kRowTiles][2]) {
  const int lane = threadIdx.x % 32;
  // Keys may be taken in any order: an operand's columns c and c + 4 stand for keys 2 c and 2 c + 1, which are
  // the scores that a lane has.
  unsigned p_rounded[kRowTiles][kKeyTiles][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int f = e / 2 + e % 2 * 2;  // where element e of the scores stands in the operand
        p_rounded[i][t][f] = to_tf32(p[i][t][e]);
      }
    }
  }
  const Element* v_lane = v + v_offset(lane % 4 * 2, lane / 4);

#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
    for (int first_tile = 0; first_tile < kKeyTiles; first_tile += 4) {
      float sum[kRowTiles][4] = {};
#pragma unroll
      for (int t = first_tile; t < min(first_tile + 4, kKeyTiles); ++t) {
        // Read one by one, since an operand wants its two keys in neighbouring registers.
        const float first = *(v_lane + t * 8 * kVStride + n * 8);
        const float second = *(v_lane + (t * 8 + 1) * kVStride + n * 8);
        const unsigned b[2] = {to_tf32(first), to_tf32(second)};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma_m16n8k8_tf32(sum[i], p_rounded[i][t], b);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& o = warp.o[i][n][e];
          o = first_tile == 0 ? fmaf(o, rescale[i][e / 2], sum[i][e]) : o + sum[i][e];
        }
      }
    }
  }
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
  const Element* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const Element* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  const double scale = double(args.scale) * 1.4426950408889634;
  const int end_key = kCausal ? min(args.seqlen_k, row + args.seqlen_k - args.seqlen_q + 1) : args.seqlen_k;
  double row_max = -kInfinity, row_sum = 0.0, o[kColumns] = {};
#pragma unroll 1
  for (int first_key = 0; first_key < end_key; first_key += 32) {
    const Element* key = k + min(first_key + lane, end_key - 1) * args.k_stride_row;
    double score = 0.0;
#pragma unroll 4
    for (int x = 0; x < kD; ++x) score += double(q[x]) * double(key[x]);
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
      const Element* value = v + (first_key + j) * args.v_stride_row;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int x = c * 32 + lane;
        if (x < kDv) o[c] += factor * double(value[x]);
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
      const float inverse = keeps ? 1.0f / row_sum : 0.0f;
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
      if (!inside) continue;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        const int x = n * 8 + lane % 4 * 2;
        const float first = warp.o[i][n][2 * h] * inverse, second = warp.o[i][n][2 * h + 1] * inverse;
        *reinterpret_cast<float2*>(target + x) = make_float2(first, second);
      }
    }
  }
  return untrusted;
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    attention_f32_tf32_d64_kernel(const AttentionArgs args) {
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
  const Element* warp_q = smem.q + warp_row * kQStride;
  // Maxima are taken of raw scores: a negative scale turns Q's sign instead. A scale of zero becomes too small to
  // matter, since 0 * infinity is not a number.
  const float scale = args.scale == 0.0f ? 1e-30f : fabsf(args.scale) * kLog2e;

  // Each thread copies its own share of every tile.
  const Element* q_share = q + (first_row + int(threadIdx.x) / 16) * args.q_stride_row + threadIdx.x % 16 * kVec;
  fetch_q(smem.q, q_share, args.q_stride_row, args.seqlen_q - first_row);
  k += (first_tile * kBc + int(threadIdx.x) / 16) * args.k_stride_row + threadIdx.x % 16 * kVec;
  v += (first_tile * kBc + int(threadIdx.x) / 16) * args.v_stride_row + threadIdx.x % 16 * kVec;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = first_tile + stage;
    if (tile < last_tile) {
      fetch_k(smem.k[stage], k, args.k_stride_row, args.seqlen_k - tile * kBc);
      k += kBc * args.k_stride_row;
      fetch_v(smem.v[stage], v, args.v_stride_row, args.seqlen_k - tile * kBc);
      v += kBc * args.v_stride_row;
    }
    __pipeline_commit();
  }

  Warp warp;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) warp.row_max[i][0] = warp.row_max[i][1] = -kInfinity;
  if (args.scale < 0.0f) {
    __pipeline_wait_prior(kStages - 2);

    __syncthreads();
    negate_q(smem.q, warp_row);
  }

  for (int tile = first_tile; tile < last_tile; ++tile) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this tile is there, and no warp needs the one before it
    const int far_tile = tile + kStages - 1, far_stage = (far_tile - first_tile) % kStages;
    if (far_tile < last_tile) {
      fetch_k(smem.k[far_stage], k, args.k_stride_row, args.seqlen_k - far_tile * kBc);
      k += kBc * args.k_stride_row;
      fetch_v(smem.v[far_stage], v, args.v_stride_row, args.seqlen_k - far_tile * kBc);
      v += kBc * args.v_stride_row;
    }
    __pipeline_commit();
    const int stage = (tile - first_tile) % kStages;
    if (tile < end_tile) {
      Scores s;
      multiply_qk(s, warp_q, smem.k[stage]);
      if (tile >= masked_tile) mask(s, first_row + warp_row, tile * kBc, args.seqlen_q, args.seqlen_k);
      float rescale[kRowTiles][2];
      if (!raise_maximum(s, warp, rescale, scale)) {
      #pragma unroll
        for (int i = 0; i < kRowTiles; ++i) rescale[i][0] = rescale[i][1] = 1.0f;
      }
      weigh_first(s, warp, scale);
      multiply_pv(warp, s, smem.v[stage], rescale);
    }
  }
  const unsigned untrusted = write_rows(
      warp, o, args.o_stride_row, lse, first_row + warp_row, args.seqlen_q);
  const auto write = [&](int row, int x, float value) {
    o[(first_row + warp_row + row) * args.o_stride_row + x] = value;
  };
  recompute_rows<16 * kRowTiles>(args, batch, head, first_row + warp_row, untrusted, write);
}

#ifndef __CUDACC_RTC__
// Launches on `stream` and returns a cudaError_t: cudaErrorMisalignedAddress when a pointer or stride does not
// suit 16-byte accesses, cudaErrorInvalidValue for a shape the kernel does not serve.
extern "C" int attention_f32_tf32_d64(const AttentionArgs* args, cudaStream_t stream) {
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
    if (address % (kVec * sizeof(float)) != 0) return cudaErrorMisalignedAddress;
  }
  const long long batch = args->batch, num_q_heads = args->num_q_heads;
  const long long seqlen_q = args->seqlen_q;
  const long long blocks = (seqlen_q + kBr - 1) / kBr * num_q_heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffffLL) return cudaErrorInvalidValue;
  constexpr size_t smem_bytes = sizeof(SharedStorage);
  const cudaError_t status =
      cudaFuncSetAttribute(attention_f32_tf32_d64_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status != cudaSuccess) return status;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(attention_f32_tf32_d64_kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters,
                          smem_bytes, stream);
}
#endif
// flashgen: {"problem": {"dtype": "f32", "batch": 4, "num_q_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 64, "head_dim_v": 64, "causal": false, "precision": "tf32"}, "family": "mma", "variant": {"parts": "tf32", "pack_heads": false, "br": 128, "rows_per_warp": 32, "key_warps": 1, "splits": 1, "workspace_splits": 1, "merge": "by_halves", "bc": 32, "layout": "padded", "d_steps": "exact", "q_in_registers": false, "q_whole": false, "stages": 2, "far_keys": "walked", "evict_first": false, "rescale": "lazy", "poly_exp": 0, "heads": 1, "min_blocks": 3, "block_order": "by_head"}, "device": "NVIDIA H200", "arch": 90, "entry": "attention_f32_tf32_d64", "launches": [{"threads": 128, "smem_bytes": 69632, "rows_per_block": 128, "heads_per_block": 1, "tensor_maps": [], "max_blocks": null, "cluster": 1, "pack_heads": false, "splits": 1, "heads_per_cluster": 1, "role": "kernel"}], "digest": "80173c2318536518", "figures": [1383, 826]}
