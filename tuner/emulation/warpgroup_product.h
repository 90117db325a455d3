// The arithmetic of wgmma: D (64 x N) = A (64 x 16) B (16 x N), or with D added, of 16-bit factors, as matrix_product.h has
// it for Hopper's tensor cores: the sixteen products of an element and its accumulator are one block. Of 8-bit factors it
// is 32 products, and of their sum far fewer bits are kept.
//
// Most of what an emulated kernel does is this. Factors are decoded once, and sums formed side by side in the host's vector
// registers: there a product of two factors is exact as a float, and so is its multiple of a power of two.
#pragma once

#include <fenv.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <array>

#include "cuda_fp16.h"
#include "matrix_product.h"

namespace emulation {

constexpr int kGroupRows = 64, kMaxColumns = 256, kDepth = 16;

// Bits of the factors, columns of B side by side. Of 8-bit factors each place holds two, neighbours along the depth.
struct Factors {
  alignas(64) uint16_t a[kGroupRows][kDepth];
  alignas(64) uint16_t b[kDepth][kMaxColumns];
};

class WarpgroupProduct {
 public:
  alignas(64) float d[kGroupRows][kMaxColumns];

  // `columns` is N, a multiple of 8. Without `accumulate` what is in d counts for nothing.
  void run(Mma mma, const Factors& factors, int columns, bool accumulate) {
    const SubnormalsKept kept;
    if (!accumulate) {
      for (auto& row : d) std::fill_n(row, columns, 0.0f);
    }
    if (mma == Mma::kK32E4m3) return run_e4m3(factors, columns);
    mma == Mma::kK16F16 ? run_as<F16>(factors, columns) : run_as<Bf16>(factors, columns);
  }

  // As the tensor cores round accumulators of 16 bits.
  void round_to_halves(int columns) {
    for (int row = 0; row < kGroupRows; ++row) {
      for (int j = 0; j < columns; ++j) d[row][j] = half_to_float(float_to_half(d[row][j]));
    }
  }

 private:
  static constexpr int kLanes = 8;
  using Floats = float __attribute__((vector_size(4 * kLanes)));
  using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
  using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
  using Shorts = int16_t __attribute__((vector_size(2 * kLanes)));
  using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
  using Doubles = double __attribute__((vector_size(8 * kLanes)));
  using Longs = uint64_t __attribute__((vector_size(8 * kLanes)));

  static constexpr int kFractionBits = Hopper::kFractionBits;
  static_assert(Hopper::kBlockBytes == 2 * kDepth, "one block");
  // Zero has no exponent: far below those of others, as a product with any of them also is.
  static constexpr int16_t kNoExponent = -8192, kZeroProduct = -4096;
  // From products whose largest has an exponent in this range, floats lose nothing: what is too small for them would be
  // cut off anyway.
  static constexpr int16_t kLeastExponent = -80, kMostExponent = 125;

  template <typename Vector, typename From>
  static Vector load(const From* from) {
    static_assert(sizeof(Vector) == kLanes * sizeof(From), "as many lanes as elements");
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  template <typename To, typename Vector>
  static void store(To* to, Vector vector) {
    static_assert(sizeof(Vector) == kLanes * sizeof(To), "as many lanes as elements");
    memcpy(to, &vector, sizeof(vector));
  }
  template <typename To, typename From>
  static To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
  template <typename Vector>
  static bool any(Vector mask) {
    uint64_t parts[sizeof(Vector) / 8], all = 0;
    memcpy(parts, &mask, sizeof(mask));
    for (const uint64_t part : parts) all |= part;
    return all != 0;
  }

  template <typename Element>
  void run_as(const Factors& factors, int columns) {
    bool special = false;
    for (int row = 0; row < kGroupRows; ++row) {
      for (int k = 0; k < kDepth; k += kLanes) {
        special |= decode<Element>(&factors.a[row][k], &a_[row][k], &a_exponents_[row][k]);
      }
    }
    for (int k = 0; k < kDepth; ++k) {
      for (int j = 0; j < columns; j += kLanes) {
        special |= decode<Element>(&factors.b[k][j], &b_[k][j], &b_exponents_[k][j]);
      }
    }
    for (int row = 0; row < kGroupRows; ++row) {
      float c[kMaxColumns];
      const bool special_row = set_special_aside(row, columns, c) || special;
      for (int j = 0; j < columns; j += kLanes) sum(row, j);
      if (special_row) add_special<Element>(factors, row, columns, c);
    }
  }

  // Products of e4m3 are exact as floats. Those of an element and its accumulator are cut off to thirteen bits behind the
  // largest one's leading bit and summed exactly (Xie et al., table of Hopper).
  void run_e4m3(const Factors& factors, int columns) {
    constexpr int kE4m3FractionBits = 13, kFactors = 2 * kDepth;
    static const std::array<float, 256> values = e4m3_values();
    float a[kFactors];
    for (int k = 0; k < kDepth; ++k) {
      for (int j = 0; j < columns; ++j) {
        b8_[2 * k][j] = values[factors.b[k][j] & 0xff];
        b8_[2 * k + 1][j] = values[factors.b[k][j] >> 8];
      }
    }
    for (int row = 0; row < kGroupRows; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        a[2 * k] = values[factors.a[row][k] & 0xff];
        a[2 * k + 1] = values[factors.a[row][k] >> 8];
      }
      for (int j = 0; j < columns; j += kLanes) {
        const Floats c = load<Floats>(&d[row][j]);
        // As integers, magnitudes compare as they are.
        Ints largest = bits_as<Ints>(c) & 0x7fffffff;
        for (int k = 0; k < kFactors; ++k) {
          const Ints magnitude = bits_as<Ints>(load<Floats>(&b8_[k][j]) * a[k]) & 0x7fffffff;
          largest = magnitude > largest ? magnitude : largest;
        }
        if (any(largest >= 0x7f800000)) {
          Floats sum = c;  // not a number, whatever the order
          for (int k = 0; k < kFactors; ++k) sum += load<Floats>(&b8_[k][j]) * a[k];
          store(&d[row][j], sum);
          continue;
        }
        const Ints least = Ints{} + 64;  // below the least product's, 2^-18
        Ints exponent = largest >> 23;
        exponent = exponent > least ? exponent : least;
        const Floats scale = bits_as<Floats>((254 + kE4m3FractionBits - exponent) << 23);
        Ints sum = __builtin_convertvector(c * scale, Ints);
        for (int k = 0; k < kFactors; ++k) sum += __builtin_convertvector(load<Floats>(&b8_[k][j]) * a[k] * scale, Ints);
        const Floats unit = bits_as<Floats>((exponent - kE4m3FractionBits) << 23);
        store(&d[row][j], __builtin_convertvector(sum, Floats) * unit);
      }
    }
  }

  // Four bits of exponent, biased by 7, and three of fraction; all ones are no number, and none is infinite.
  static std::array<float, 256> e4m3_values() {
    std::array<float, 256> values;
    for (int bits = 0; bits < 256; ++bits) {
      const int field = bits >> 3 & 15, fraction = bits & 7;
      const float magnitude = field == 0 ? fraction * 0x1p-9f : (8 + fraction) * bit_cast<float>((field + 117) << 23);
      values[bits] = (bits & 0x7f) == 0x7f ? bit_cast<float>(0x7fffffff) : bits & 0x80 ? -magnitude : magnitude;
    }
    return values;
  }

  // Values and exponents of some elements; zero for what is not finite. Whether something is not.
  template <typename Element>
  static bool decode(const uint16_t* bits, float* values, int16_t* exponents) {
    constexpr bool kHalf = Element::kBias == 15;
    constexpr int kFraction = kHalf ? 10 : 7;
    constexpr int16_t kMaxField = kHalf ? 0x1f : 0xff;
    const Halves halves = load<Halves>(bits);
    const Shorts magnitude = bits_as<Shorts>(halves) & int16_t(0x7fff);
    const Shorts field = magnitude >> kFraction;
    const Words words = __builtin_convertvector(halves, Words);
    const Words sign = (words & 0x8000) << 16;
    // Infinities come out finite here, and are set to zero below.
    const Floats unsigned_value = kHalf ? bits_as<Floats>((words & 0x7fff) << 13) * 0x1p112f
                                        : bits_as<Floats>((words & 0x7fff) << 16);
    const Shorts not_finite = field == kMaxField;
    const Ints finite = ~__builtin_convertvector(not_finite, Ints);
    store(values, bits_as<Floats>((bits_as<Words>(unsigned_value) | sign) & bits_as<Words>(finite)));
    const Shorts exponent = (field > int16_t(1) ? field : Shorts{} + int16_t(1)) - int16_t(Element::kBias);
    store(exponents, (magnitude == int16_t(0)) | not_finite ? Shorts{} + kNoExponent : exponent);
    return any(not_finite);
  }

  // Whether an accumulator of the row is not finite, which then counts as zero; `c` are the accumulators as they were.
  bool set_special_aside(int row, int columns, float* c) {
    bool special = false;
    for (int j = 0; j < columns; j += kLanes) {
      const Ints bits = load<Ints>(&d[row][j]);
      special |= any((bits & 0x7f800000) == 0x7f800000);
    }
    std::copy_n(d[row], columns, c);
    for (int j = 0; special && j < columns; ++j) {
      if (!is_finite(c[j])) d[row][j] = 0;
    }
    return special;
  }

  // The sums of some columns of a row.
  void sum(int row, int first) {
    Shorts largest = Shorts{} + kNoExponent;
    for (int k = 0; k < kDepth; ++k) {
      const Shorts candidate = load<Shorts>(&b_exponents_[k][first]) + a_exponents_[row][k];
      largest = candidate > largest ? candidate : largest;
    }
    const Shorts zero = largest < kZeroProduct;
    if (any(((largest < kLeastExponent) & ~zero) | (largest > kMostExponent))) {
      for (int j = first; j < first + kLanes; ++j) d[row][j] = exact_sum(row, j);
      return;
    }
    const Floats c = load<Floats>(&d[row][first]);
    const Ints c_exponent = (bits_as<Ints>(c) >> 23 & 0xff) - 127;
    Ints exponent = __builtin_convertvector(largest, Ints);
    exponent = exponent > c_exponent ? exponent : c_exponent;
    exponent = exponent > kLeastExponent ? exponent : Ints{} + kLeastExponent;
    const Floats scale = bits_as<Floats>((127 + kFractionBits - exponent) << 23);
    // Terms are below 2^(fraction bits + 2): sixteen of them, and no more, fit into 32 bits with the sign.
    static_assert(kFractionBits + 2 + 4 <= 31);
    Ints products{};
    for (int k = 0; k < kDepth; ++k) {
      products += __builtin_convertvector(load<Floats>(&b_[k][first]) * a_[row][k] * scale, Ints);
    }
    const Ints accumulator = __builtin_convertvector(c * scale, Ints);
    const Doubles total = __builtin_convertvector(products, Doubles) + __builtin_convertvector(accumulator, Doubles);
    // Cut off to a float's bits, which then hold it exactly.
    const Doubles cut = bits_as<Doubles>(bits_as<Longs>(total) & ~uint64_t(0x1fffffff));
    const Floats unit = bits_as<Floats>((127 - kFractionBits + exponent) << 23);
    const Floats result = __builtin_convertvector(cut, Floats) * unit;
    // Only here may an accumulator be too small for the scale.
    const Ints untouched = __builtin_convertvector(zero, Ints);
    store(&d[row][first], untouched ? c + 0.0f : result);
  }

  // One sum, whatever its exponents.
  float exact_sum(int row, int j) const {
    const float c = d[row][j];
    int largest = std::max(int(bit_cast<uint32_t>(c) >> 23 & 0xff) - 127, -126);
    for (int k = 0; k < kDepth; ++k) largest = std::max(largest, a_exponents_[row][k] + b_exponents_[k][j]);
    const double scale = bit_cast<double>(uint64_t(1023 + kFractionBits - largest) << 52);
    double total = double(int64_t(c * scale));
    for (int k = 0; k < kDepth; ++k) total += double(int64_t(double(a_[row][k]) * b_[k][j] * scale));
    return truncate_to_float(total / scale);
  }

  // The sums that something infinite or not a number is part of.
  template <typename Element>
  void add_special(const Factors& factors, int row, int columns, const float* c) {
    float a[kDepth];
    bool in_row = false;
    for (int k = 0; k < kDepth; ++k) {
      a[k] = Element::value(factors.a[row][k]);
      in_row |= !is_finite(a[k]);
    }
    for (int j = 0; j < columns; ++j) {
      float b[kDepth];
      bool in_column = false;
      for (int k = 0; k < kDepth; ++k) {
        in_column |= !Element::finite(factors.b[k][j]);
        b[k] = Element::value(factors.b[k][j]);
      }
      if (in_row || in_column || !is_finite(c[j])) d[row][j] = sum_of_special(a, b, 1, kDepth, c[j]);
    }
  }

  alignas(64) float a_[kGroupRows][kDepth];
  alignas(64) float b_[kDepth][kMaxColumns], b8_[2 * kDepth][kMaxColumns];
  alignas(64) int16_t a_exponents_[kGroupRows][kDepth];
  alignas(64) int16_t b_exponents_[kDepth][kMaxColumns];
};

}  // namespace emulation
