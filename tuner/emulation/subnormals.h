// Floats below the least normal number, 2^-126. A card's builds flush them (-ftz=true): instructions take them for zero and
// make zero of results that are as small. Tensor cores do not, nor does what moves or converts bits.
#pragma once

#include <stdint.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace emulation {

// Has this host thread's instructions flush them from now on, or not. Hosts of other kinds than these keep them always.
inline void flush_subnormals(bool flush) {
#if defined(__SSE__)
  constexpr unsigned kResults = 0x8000, kOperands = 0x0040, kBoth = kResults | kOperands;
  _mm_setcsr((_mm_getcsr() & ~kBoth) | (flush ? kBoth : 0));
#elif defined(__aarch64__)
  constexpr uint64_t kBoth = uint64_t(1) << 24;
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"((control & ~kBoth) | (flush ? kBoth : 0)));
#endif
}

// Within a kernel, keeps them where it stands.
struct SubnormalsKept {
  SubnormalsKept() { flush_subnormals(false); }
  ~SubnormalsKept() { flush_subnormals(true); }
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;
};

}  // namespace emulation
