// Found in place of CUDA's <cuda_bf16.h>: its types, and its conversions in integer arithmetic.
#pragma once

#include "cuda_emulation.h"
#include "rounding.h"

struct __align__(2) __nv_bfloat16 {
  unsigned short bits;
};
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

namespace emulation {

inline unsigned short float_to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return invalid_if_signalling(magnitude), 0x7fff;
  return round_to_even(bits, 16);
}

}  // namespace emulation

inline float __bfloat162float(__nv_bfloat16 x) { return emulation::bit_cast<float>(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulation::float_to_bfloat16(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
