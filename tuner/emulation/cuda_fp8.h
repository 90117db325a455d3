// Found in place of CUDA's <cuda_fp8.h>: its type of four bits of exponent and three of fraction, and the conversion that
// kernels wrap into a function.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

struct __nv_fp8_e4m3 {
  unsigned char __x;
};

namespace emulation {

// As f16, which holds all of them; no number becomes the positive one of f16.
inline unsigned e4m3_to_half(unsigned bits) {
  const unsigned sign = (bits & 0x80) << 8, field = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return 0x7fff;
  if (field != 0) return sign | (field + 8) << 10 | fraction << 7;
  return sign | float_to_half(fraction * 0x1p-9f);
}

}  // namespace emulation

// Four numbers, the first in the low byte, as two pairs of f16.
inline void e4m3_to_halves(unsigned (&pairs)[2], unsigned four) {
  for (int i = 0; i < 2; ++i) {
    pairs[i] = emulation::e4m3_to_half(four >> 16 * i & 0xff) | emulation::e4m3_to_half(four >> (16 * i + 8) & 0xff) << 16;
  }
}
