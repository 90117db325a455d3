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
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
