// The conversion of e4m3, a type of four bits of exponent and three of fraction, that kernels wrap into a function.
#pragma once

#include "cuda_emulation.h"

namespace emulation {

// As f16, which holds all of them; no number becomes the positive one of f16.
inline unsigned e4m3_to_half(unsigned bits) {
  const unsigned sign = (bits & 0x80) << 8, field = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return 0x7fff;
  if (field != 0) return sign | (field + 8) << 10 | fraction << 7;
  if (fraction == 0) return sign;
  const unsigned highest = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0;  // fraction * 2^-9
  return sign | (highest + 6) << 10 | (fraction << (10 - highest) & 0x3ff);
}

}  // namespace emulation

// Four numbers, the first in the low byte, as two pairs of f16.
inline void e4m3_to_halves(unsigned (&pairs)[2], unsigned four) {
  for (int i = 0; i < 2; ++i) {
    pairs[i] = emulation::e4m3_to_half(four >> 16 * i & 0xff) | emulation::e4m3_to_half(four >> (16 * i + 8) & 0xff) << 16;
  }
}
