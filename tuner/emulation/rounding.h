// What conversions to 16-bit floats share.
#pragma once

#include <fenv.h>
#include <stdint.h>

namespace emulation {

// value / 2^shift to the nearest integer, halves to the even one; shift is from 1 to 31.
constexpr uint32_t round_to_even(uint32_t value, int shift) {
  return (value + ((1u << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
}

// The flag that converting an uninitialized float leaves behind, as arithmetic on it does.
inline void invalid_if_signalling(uint32_t nan) {
  if (!(nan & 0x00400000)) feraiseexcept(FE_INVALID);
}

}  // namespace emulation
