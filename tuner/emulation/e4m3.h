// The conversions of e4m3, a type of four bits of exponent and three of fraction, that kernels wrap into functions.
#pragma once

#include <string.h>

#include "cuda_emulation.h"
#include "rounding.h"

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

// The nearest, halfway cases to the even one; the largest there is, 448, for those beyond. cvt.rn.satfinite.e4m3x2.f32
inline unsigned float_to_e4m3(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof(bits));
  const unsigned sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return invalid_if_signalling(magnitude), 0x7f;
  const int exponent = int(magnitude >> 23) - 127;
  if (exponent > 8) return sign | 0x7e;
  if (exponent < -10) return sign;  // below half of the least, 2^-9
  // Of 24 bits, four are kept of normal numbers, and fewer of those below 2^-6.
  const unsigned significand = (magnitude & 0x7fffff) | 0x800000;
  const bool normal = exponent >= -6;
  const unsigned kept = round_to_even(significand, normal ? 20 : 14 - exponent);
  const unsigned code = normal ? kept + ((exponent + 6) << 3) : kept;
  return sign | (code < 0x7e ? code : 0x7e);
}

}  // namespace emulation

// Four numbers as e4m3, the first in the low byte.
inline unsigned floats_to_e4m3(float first, float second, float third, float fourth) {
  using emulation::float_to_e4m3;
  return float_to_e4m3(first) | float_to_e4m3(second) << 8 | float_to_e4m3(third) << 16 | float_to_e4m3(fourth) << 24;
}

// Four numbers, the first in the low byte, as two pairs of f16.
inline void e4m3_to_halves(unsigned (&pairs)[2], unsigned four) {
  for (int i = 0; i < 2; ++i) {
    pairs[i] = emulation::e4m3_to_half(four >> 16 * i & 0xff) | emulation::e4m3_to_half(four >> (16 * i + 8) & 0xff) << 16;
  }
}
