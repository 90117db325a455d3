// AddressSanitizer's interface, and nothing where it is not compiled in.
#pragma once

#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATION_ASAN 1
#endif
#endif
#ifndef EMULATION_ASAN
#define EMULATION_ASAN 0
#endif

#if EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

inline void poison([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if EMULATION_ASAN
  __asan_poison_memory_region(address, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if EMULATION_ASAN
  __asan_unpoison_memory_region(address, bytes);
#endif
}

}  // namespace emulation
