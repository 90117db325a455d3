// Found in place of CUDA's <cuda_fp16.h>: its types, and its conversions in integer arithmetic.
#pragma once

#include "cuda_emulation.h"
#include "rounding.h"

struct __align__(2) __half {
  unsigned short bits;
};
struct __align__(4) __half2 {
  __half x, y;
};

inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

namespace emulation {

inline unsigned short float_to_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return invalid_if_signalling(magnitude), 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // from 65520, half way to the next power of two
  if (magnitude >= 0x38800000) return sign | round_to_even(magnitude - (uint32_t(127 - 15) << 23), 13);
  if (magnitude <= 0x33000000) return sign;  // up to half of the least subnormal, 2^-24
  return sign | round_to_even((magnitude & 0x7fffff) | 0x800000, 126 - (magnitude >> 23));
}

}  // namespace emulation

inline float __half2float(__half x) { return half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {emulation::float_to_half(x)}; }
// The largest that is not above x.
inline __half __float2half_rd(float x) {
  const unsigned short nearest = emulation::float_to_half(x);
  if (!(half_to_float(nearest) > x)) return {nearest};
  // One nearer to minus infinity: of positive numbers a lower place, of others a higher one.
  return {static_cast<unsigned short>(nearest & 0x8000 ? nearest + 1 : nearest - 1)};
}
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }

// ---- fma.rn.f16x2, max.f16x2 --------------------------------------------------------------------------------------
// Pairs of halves in a word, as kernels wrap the instructions.

// a b + c, rounded once: what a double cuts off of the sum is too little to be seen by way of rounding to odd.
inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  return emulation::of_each_half([&](int shift) -> unsigned {
    const auto half = [shift](unsigned pair) { return double(half_to_float(pair >> shift & 0xffff)); };
    const double sum = half(a) * half(b) + half(c);
    // To float by rounding to odd, so that rounding to f16 then is the only one.
    float nearest = float(sum);
    if (double(nearest) != sum && __builtin_isfinite(nearest)) {
      uint32_t bits = emulation::bit_cast<uint32_t>(nearest);
      if (fabs(double(nearest)) > fabs(sum)) --bits;
      nearest = emulation::bit_cast<float>(bits | 1);
    }
    return emulation::float_to_half(nearest);
  });
}
// The larger of two numbers, the other one where one is none.
inline unsigned larger_halves(unsigned a, unsigned b) {
  return emulation::of_each_half([&](int shift) -> unsigned {
    const unsigned first = a >> shift & 0xffff, second = b >> shift & 0xffff;
    if ((first & 0x7fff) > 0x7c00) return second;
    if ((second & 0x7fff) > 0x7c00) return first;
    return half_to_float(first) > half_to_float(second) ? first : second;
  });
}
