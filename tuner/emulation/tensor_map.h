// The copy engine's maps, and how a box of one lies in shared memory.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "cuda.h"
#include "runtime.h"

namespace emulation {

constexpr int kRank = 5;  // at most; of fewer dimensions the outer ones are of one

// Shared memory swizzled within rows of so many bytes: bits of the address from 128 bytes on turn its 16-byte pieces.
inline size_t swizzled(size_t address, unsigned row_bytes) {
  return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

// Adds to a number that others may add to meanwhile.
inline void add_at_once(float* target, float addend) {
  uint32_t* const bits = reinterpret_cast<uint32_t*>(target);
  uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  do {
    float sum;
    memcpy(&sum, &before, sizeof(sum));
    sum += addend;
    memcpy(&after, &sum, sizeof(sum));
  } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

// What a CUtensorMap holds here.
struct BoxMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;

  uint64_t magic;
  uint32_t rank;
  uint32_t swizzle;  // bytes of a row, 16 for none
  unsigned char* base;
  uint64_t sizes[kRank];    // elements, innermost first
  uint64_t strides[kRank];  // bytes
  uint32_t box[kRank];      // elements

  static const BoxMap& of(const CUtensorMap* map) { return *reinterpret_cast<const BoxMap*>(map); }

  unsigned row_bytes() const { return box[0] * unsigned(strides[0]); }
  unsigned rows() const { return box[1] * box[2] * box[3] * box[4]; }
  size_t bytes() const { return size_t(row_bytes()) * rows(); }

  // Calls work(place in the box in bytes, address or null, bytes): pieces of at most 16 bytes that lie inside the
  // array, or outside of it.
  template <typename Work>
  void each_piece(const Corner& corner, const Work& work) const {
    const int64_t item = strides[0];
    for (unsigned row = 0; row < rows(); ++row) {
      bool inside = true;
      uintptr_t start = reinterpret_cast<uintptr_t>(base);  // which sums may come round to
      for (int i = 1, left = int(row); i < kRank; left /= int(box[i++])) {
        const int64_t at = int64_t(corner.at[i]) + left % int(box[i]);
        inside = inside && at >= 0 && at < int64_t(sizes[i]);
        start += uint64_t(at) * strides[i];
      }
      for (int64_t x = 0; x < int64_t(row_bytes()); x += 16) {
        // A piece may straddle an edge of the array: then element by element.
        const int64_t first = corner.at[0] + x / item, count = 16 / item;
        const bool whole = first >= 0 && first + count <= int64_t(sizes[0]);
        for (int64_t i = 0; i < count; i += whole ? count : 1) {
          const bool here = inside && first + i >= 0 && first + i < int64_t(sizes[0]);
          work(row * size_t(row_bytes()) + x + i * item,
               here ? reinterpret_cast<unsigned char*>(start + (first + i) * item) : nullptr, size_t(whole ? 16 : item));
        }
      }
    }
  }

  // From the array to shared memory, which starts at `memory`; the box at byte `target` of it.
  void load(const Corner& corner, unsigned char* memory, size_t target) const {
    each_piece(corner, [&](size_t place, const unsigned char* source, size_t bytes) {
      unsigned char* to = memory + swizzled(target + place, swizzle);
      source ? memcpy(to, source, bytes) : memset(to, 0, bytes);
    });
  }

  void store(const Corner& corner, const unsigned char* memory, size_t source) const {
    each_piece(corner, [&](size_t place, unsigned char* target, size_t bytes) {
      if (target) memcpy(target, memory + swizzled(source + place, swizzle), bytes);
    });
  }

  // Adds floats, each as one access, as blocks of the same grid may.
  void add(const Corner& corner, const unsigned char* memory, size_t source) const {
    each_piece(corner, [&](size_t place, unsigned char* target, size_t bytes) {
      for (size_t i = 0; target && i < bytes; i += sizeof(float)) {
        float addend;
        memcpy(&addend, memory + swizzled(source + place + i, swizzle), sizeof(addend));
        add_at_once(reinterpret_cast<float*>(target + i), addend);
      }
    });
  }
};
static_assert(sizeof(BoxMap) <= sizeof(CUtensorMap), "a map holds its description");

inline unsigned bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
  }
  return 0;
}

}  // namespace emulation

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  using emulation::BoxMap;
  constexpr cuuint32_t kLeastRank = 4;  // others exist, but are not emulated
  constexpr uint64_t kMaxSize = uint64_t(1) << 32, kStrideEnd = uint64_t(1) << 40;
  const unsigned item = emulation::bytes_of(type);
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return pointer && reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  if (item == 0 || rank < kLeastRank || rank > emulation::kRank || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      unsigned(swizzle) > CU_TENSOR_MAP_SWIZZLE_128B || unsigned(promotion) > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || !aligned(map, 64) || !aligned(address, 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  BoxMap made = {BoxMap::kMagic, rank, 16u << swizzle, static_cast<unsigned char*>(address), {}, {item}, {}};
  for (unsigned i = 0; i < emulation::kRank; ++i) made.sizes[i] = made.box[i] = 1;
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > kMaxSize || box[i] < 1 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    // Of the innermost dimension it is ignored. Others than 1 exist, but are not emulated.
    if (i > 0 && element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= kStrideEnd)) return CUDA_ERROR_INVALID_VALUE;
    made.sizes[i] = sizes[i];
    made.box[i] = box[i];
    if (i > 0) made.strides[i] = strides[i - 1];
  }
  const bool swizzles = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
  if (made.row_bytes() % 16 != 0 || (swizzles && made.row_bytes() > made.swizzle)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}
