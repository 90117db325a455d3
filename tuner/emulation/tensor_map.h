// The copy engine's maps, and how a box of one lies in shared memory.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "cuda.h"

namespace emulation {

constexpr int kRank = 4;

// Shared memory swizzled within rows of so many bytes: bits of the address from 128 bytes on turn its 16-byte pieces.
inline size_t swizzled(size_t address, unsigned row_bytes) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

// What a CUtensorMap holds here.
struct BoxMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;

  uint64_t magic;
  unsigned char* base;
  uint64_t sizes[kRank];    // elements, innermost first
  uint64_t strides[kRank];  // bytes
  uint32_t box[kRank];      // elements
  uint32_t swizzle;         // bytes of a row, 16 for none

  static const BoxMap& of(const CUtensorMap* map) { return *reinterpret_cast<const BoxMap*>(map); }

  unsigned row_bytes() const { return box[0] * unsigned(strides[0]); }
  unsigned rows() const { return box[1] * box[2] * box[3]; }
  size_t bytes() const { return size_t(row_bytes()) * rows(); }

  // Calls work(place in the box in bytes, address or null, bytes): pieces of at most 16 bytes that lie inside the
  // array, or outside of it.
  template <typename Work>
  void each_piece(const int* corner, const Work& work) const {
    const int64_t item = strides[0];
    for (unsigned row = 0; row < rows(); ++row) {
      const int64_t at[kRank] = {corner[0], corner[1] + int64_t(row % box[1]), corner[2] + int64_t(row / box[1] % box[2]),
                                 corner[3] + int64_t(row / box[1] / box[2])};
      bool inside = true;
      unsigned char* start = base;
      for (int i = 1; i < kRank; ++i) {
        inside = inside && at[i] >= 0 && at[i] < int64_t(sizes[i]);
        start += at[i] * int64_t(strides[i]);
      }
      for (int64_t x = 0; x < int64_t(row_bytes()); x += 16) {
        // A piece may straddle an edge of the array: then element by element.
        const int64_t first = at[0] + x / item, count = 16 / item;
        const bool whole = first >= 0 && first + count <= int64_t(sizes[0]);
        for (int64_t i = 0; i < count; i += whole ? count : 1) {
          const bool here = inside && first + i >= 0 && first + i < int64_t(sizes[0]);
          work(row * size_t(row_bytes()) + x + i * item, here ? start + (first + i) * item : nullptr,
               size_t(whole ? 16 : item));
        }
      }
    }
  }

  // From the array to shared memory, which starts at `memory`; the box at byte `target` of it.
  void load(const int* corner, unsigned char* memory, size_t target) const {
    each_piece(corner, [&](size_t place, const unsigned char* source, size_t bytes) {
      unsigned char* to = memory + swizzled(target + place, swizzle);
      source ? memcpy(to, source, bytes) : memset(to, 0, bytes);
    });
  }

  void store(const int* corner, const unsigned char* memory, size_t source) const {
    each_piece(corner, [&](size_t place, unsigned char* target, size_t bytes) {
      if (target) memcpy(target, memory + swizzled(source + place, swizzle), bytes);
    });
  }
};
static_assert(sizeof(BoxMap) <= sizeof(CUtensorMap), "a map holds its description");

}  // namespace emulation

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  using emulation::BoxMap;
  const unsigned item = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  if (rank != emulation::kRank || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return CUDA_ERROR_INVALID_VALUE;
  if (reinterpret_cast<uintptr_t>(map) % 64 || !address || reinterpret_cast<uintptr_t>(address) % 16) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  BoxMap made = {BoxMap::kMagic, static_cast<unsigned char*>(address), {}, {}, {}, 0};
  made.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 16 : 16u << swizzle;
  for (int i = 0; i < emulation::kRank; ++i) {
    if (sizes[i] < 1 || sizes[i] > 1ULL << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >= 1ULL << 40)) return CUDA_ERROR_INVALID_VALUE;
    made.sizes[i] = sizes[i];
    made.strides[i] = i == 0 ? item : strides[i - 1];
    made.box[i] = box[i];
  }
  if (made.row_bytes() % 16 || (made.swizzle > 16 && made.row_bytes() > made.swizzle)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}
