// The arithmetic of tensor cores, for one warp's mma instruction.
//
// Published measurements agree on its shape. Products are exact. A block of them and the accumulator are summed in
// fixed point: each is cut off (toward zero) some bits below the leading bit of the largest of them, judged by the sum
// of its factors' exponents; the sum is exact, and cut off once more to become a float32. A longer product goes from
// block to block through a float32. Subnormals count in full.
//
//   cards                         products in a block  fraction bits kept
//   Turing, Ampere, Ada Lovelace  16 bytes of factors  24
//   Hopper, Blackwell             32 bytes of factors  25
//   Ada Lovelace, of e4m3         16 bytes of factors  13, and as many of the sum
//
// Fasi, Higham, Mikaitis, Pranesh: "Numerical behavior of NVIDIA tensor cores" (2021), found truncation and blocks;
// Xie et al.: "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores" (2025) has the table and checked
// it bit for bit against each card. Emulated cards compute as the first row does, of e4m3 as the last, the less accurate
// ones: a bound that holds for them holds on all cards that have these instructions.
#pragma once

#include <fenv.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "e4m3.h"
#include "runtime.h"
#include "subnormals.h"

namespace emulation {

constexpr int kRows = 16, kColumns = 8;  // of a product

// What one lane brings to an mma.
struct MmaOperands {
  float* d;
  const unsigned *a, *b;
};

// An element's value and its exponent, by its bits.
struct F16 {
  static constexpr int kBytes = 2, kBias = 15;
  static float value(uint32_t bits) { return half_to_float(bits); }
  static int exponent_field(uint32_t bits) { return bits >> 10 & 0x1f; }
  static bool finite(uint32_t bits) { return (bits & 0x7c00) != 0x7c00; }
};
struct Bf16 {
  static constexpr int kBytes = 2, kBias = 127;
  static float value(uint32_t bits) { return bit_cast<float>(bits << 16); }
  static int exponent_field(uint32_t bits) { return bits >> 7 & 0xff; }
  static bool finite(uint32_t bits) { return (bits & 0x7f80) != 0x7f80; }
};
struct Tf32 {
  static constexpr int kBytes = 4, kBias = 127;
  static float value(uint32_t bits) { return bit_cast<float>(bits & ~0x1fffu); }
  static int exponent_field(uint32_t bits) { return bits >> 23 & 0xff; }
  static bool finite(uint32_t bits) { return (bits & 0x7f800000) != 0x7f800000; }
};

struct E4m3 {
  static constexpr int kBytes = 1, kBias = 7;
  static float value(uint32_t bits) { return half_to_float(e4m3_to_half(bits)); }
  static int exponent_field(uint32_t bits) { return bits >> 3 & 15; }
  static bool finite(uint32_t bits) { return (bits & 0x7f) != 0x7f; }
};

// `kSumBits` are those of a sum's fraction that it keeps as a float.
struct Ampere {
  static constexpr int kBlockBytes = 16, kFractionBits = 24, kSumBits = 23;
};
struct Hopper {
  static constexpr int kBlockBytes = 32, kFractionBits = 25, kSumBits = 23;
};
struct AdaE4m3 {
  static constexpr int kBlockBytes = 16, kFractionBits = 13, kSumBits = 13;
};

// Element number `i` of a lane's registers.
template <typename Element>
uint32_t element_of(const unsigned* registers, int i) {
  constexpr int kInRegister = 4 / Element::kBytes, kBits = 8 * Element::kBytes;
  return registers[i / kInRegister] >> kBits * (i % kInRegister) & (0xffffffffu >> (32 - kBits));
}

inline bool is_finite(float x) { return (bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000; }
inline bool is_nan(float x) { return (bit_cast<uint32_t>(x) & 0x7fffffff) > 0x7f800000; }
inline bool is_signalling(float x) { return is_nan(x) && !(bit_cast<uint32_t>(x) & 0x00400000); }

// Toward zero, to so many bits of fraction; beyond the largest float to infinity.
template <int kFraction = 23>
float truncate_to_float(double x) {
  const uint64_t bits = bit_cast<uint64_t>(x);
  const int exponent = int(bits >> 52 & 0x7ff) - 1023;
  if (exponent >= -126) return float(bit_cast<double>(bits & ~((uint64_t(1) << (52 - kFraction)) - 1)));
  return float(double(int32_t(x * 0x1p149)) * 0x1p-149);  // subnormal: a multiple of 2^-149
}

// As IEEE has it where inputs are infinite or NaN, with the flag that arithmetic on signalling NaNs leaves behind.
inline float sum_of_special(const float* a, const float* b, int stride, int count, float c) {
  bool invalid = is_signalling(c), nan = is_nan(c), positive = false, negative = false;
  const auto add_infinity = [&](uint32_t sign) { (sign >> 31 ? negative : positive) = true; };
  if (!nan && !is_finite(c)) add_infinity(bit_cast<uint32_t>(c));
  for (int k = 0; k < count; ++k, ++a, b += stride) {
    invalid |= is_signalling(*a) || is_signalling(*b);
    if (is_nan(*a) || is_nan(*b)) {
      nan = true;
    } else if (!is_finite(*a) || !is_finite(*b)) {
      const uint32_t x = bit_cast<uint32_t>(*a), y = bit_cast<uint32_t>(*b);
      const bool zero = (x & 0x7fffffff) == 0 || (y & 0x7fffffff) == 0;
      if (zero) invalid = nan = true;
      if (!zero) add_infinity(x ^ y);
    }
  }
  if (positive && negative && !nan) invalid = nan = true;
  if (invalid) feraiseexcept(FE_INVALID);
  return bit_cast<float>(nan ? 0x7fffffffu : positive ? 0x7f800000u : 0xff800000u);
}

template <typename Element, int kDepth, typename Cores>
class MatrixProduct {
 public:
  // Called once for a warp, with the operands of each lane.
  static void run(void* const lanes[32]) {
    const SubnormalsKept kept;
    MatrixProduct product;
    product.gather(lanes);
    for (int k = 0; k < kDepth; k += kBlock) product.add_block(k);
    if (product.special_) product.add_special();
    for (int lane = 0; lane < 32; ++lane) {
      float* d = operands_of(lanes, lane).d;
      const float* row = product.d_[lane / 4];
      for (int i = 0; i < 4; ++i) d[i] = row[i / 2 * 8 * kColumns + lane % 4 * 2 + i % 2];
    }
  }

 private:
  static constexpr int kBlock = std::min(Cores::kBlockBytes / Element::kBytes, kDepth);
  static constexpr int kInRegister = 4 / Element::kBytes;
  static constexpr int kStep = 4 * kInRegister;  // columns of a that one register of all lanes spans
  // Zero has no exponent: far below those of others, as a product with any of them also is.
  static constexpr int16_t kNoExponent = -8192;
  // The grid of a sum is never finer than that of a float's subnormals calls for.
  static constexpr int16_t kLeastExponent = -126;
  // A product cut to fixed point is below 2^(fraction bits + 2): that many fit into 32 bits with the sign.
  static constexpr int kExactTerms = 8;
  static_assert(Cores::kFractionBits + 2 + 3 < 31 && kBlock % std::min(kBlock, kExactTerms) == 0);

  static const MmaOperands& operands_of(void* const lanes[32], int lane) {
    return *static_cast<const MmaOperands*>(lanes[lane]);
  }

  // Registers hold four neighbouring columns of 8-bit elements, pairs of 16-bit ones, single columns of 32-bit ones. A
  // register of a holds rows 0-7, the next one rows 8-15, of the same columns.
  void gather(void* const lanes[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      const MmaOperands& operands = operands_of(lanes, lane);
      const int major = lane / 4, minor = lane % 4 * kInRegister;
      for (int i = 0; i < 16 * kDepth / 32; ++i) {
        const int reg = i / kInRegister, row = major + reg % 2 * 8;
        const int k = minor + reg / 2 * kStep + i % kInRegister;
        set(element_of<Element>(operands.a, i), a_special_[row][k], a_[row][k], a_exponents_[row][k]);
      }
      for (int i = 0; i < 8 * kDepth / 32; ++i) {
        const int k = minor + i / kInRegister * kStep + i % kInRegister;
        set(element_of<Element>(operands.b, i), b_special_[k][major], b_[k][major], b_exponents_[k][major]);
      }
      for (int i = 0; i < 4; ++i) {
        const float c = operands.d[i];
        const int row = major + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        if (!is_finite(c)) special_ = true;
        c_special_[row][column] = c;
        d_[row][column] = is_finite(c) ? c : 0;
      }
    }
  }

  // What is not finite counts as zero until add_special.
  void set(uint32_t bits, float& original, double& value, int16_t& exponent) {
    const bool finite = Element::finite(bits);
    if (!finite) special_ = true;
    original = Element::value(bits);
    value = finite ? original : 0;
    const int field = Element::exponent_field(bits);
    exponent = value == 0 ? kNoExponent : std::max(field, 1) - Element::kBias;
  }

  // Adds the products of columns [first, first + kBlock) of a. Inner loops run over columns of b, side by side in the
  // host's vector registers. Scaled by a power of two, a double holds product and accumulator exactly.
  void add_block(int first) {
    for (int row = 0; row < kRows; ++row) {
      // Where the block before has gone beyond the largest float, it stays there.
      float infinity[kColumns] = {};
      for (int j = 0; j < kColumns; ++j) {
        if (!is_finite(d_[row][j])) std::swap(infinity[j], d_[row][j]);
      }
      int16_t largest[kColumns];
      for (int j = 0; j < kColumns; ++j) {
        const int field = bit_cast<uint32_t>(d_[row][j]) >> 23 & 0xff;
        largest[j] = int16_t(std::max(field - 127, int(kLeastExponent)));
      }
      for (int k = first; k < first + kBlock; ++k) {
        const int16_t exponent = a_exponents_[row][k];
        for (int j = 0; j < kColumns; ++j) {
          const int16_t candidate = int16_t(exponent + b_exponents_[k][j]);
          largest[j] = largest[j] > candidate ? largest[j] : candidate;
        }
      }
      double scale[kColumns], total[kColumns];
      for (int j = 0; j < kColumns; ++j) {
        scale[j] = bit_cast<double>(uint64_t(1023 + Cores::kFractionBits - largest[j]) << 52);
        total[j] = double(int32_t(d_[row][j] * scale[j]));
      }
      for (int part = first; part < first + kBlock; part += kExactTerms) {
        int32_t sum[kColumns] = {};
        for (int k = part; k < std::min(part + kExactTerms, first + kBlock); ++k) {
          const double a = a_[row][k];
          for (int j = 0; j < kColumns; ++j) sum[j] += int32_t(a * b_[k][j] * scale[j]);
        }
        for (int j = 0; j < kColumns; ++j) total[j] += sum[j];
      }
      for (int j = 0; j < kColumns; ++j) {
        const double unit = bit_cast<double>(uint64_t(1023 - Cores::kFractionBits + largest[j]) << 52);
        d_[row][j] = truncate_to_float<Cores::kSumBits>(total[j] * unit) + infinity[j];
      }
    }
  }

  void add_special() {
    bool in_row[kRows] = {}, in_column[kColumns] = {};
    for (int k = 0; k < kDepth; ++k) {
      for (int row = 0; row < kRows; ++row) in_row[row] |= !is_finite(a_special_[row][k]);
      for (int j = 0; j < kColumns; ++j) in_column[j] |= !is_finite(b_special_[k][j]);
    }
    for (int row = 0; row < kRows; ++row) {
      for (int j = 0; j < kColumns; ++j) {
        const float c = c_special_[row][j];
        if (!in_row[row] && !in_column[j] && is_finite(c)) continue;
        d_[row][j] = sum_of_special(a_special_[row], &b_special_[0][j], kColumns, kDepth, c);
      }
    }
  }

  bool special_ = false;
  double a_[kRows][kDepth], b_[kDepth][kColumns];
  int16_t a_exponents_[kRows][kDepth], b_exponents_[kDepth][kColumns];
  float d_[kRows][kColumns];
  // As they came, for add_special.
  float a_special_[kRows][kDepth], b_special_[kDepth][kColumns], c_special_[kRows][kColumns];
};

template <typename Cores>
WarpWork product_of(Mma mma) {
  switch (mma) {
    case Mma::kK16F16: return MatrixProduct<F16, 16, Cores>::run;
    case Mma::kK16Bf16: return MatrixProduct<Bf16, 16, Cores>::run;
    case Mma::kK8F16: return MatrixProduct<F16, 8, Cores>::run;
    case Mma::kK8Bf16: return MatrixProduct<Bf16, 8, Cores>::run;
    case Mma::kK8Tf32: return MatrixProduct<Tf32, 8, Cores>::run;
    case Mma::kK32E4m3: return MatrixProduct<E4m3, 32, AdaE4m3>::run;
  }
  return nullptr;
}

}  // namespace emulation
