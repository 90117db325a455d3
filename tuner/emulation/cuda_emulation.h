// CUDA C++ for a host compiler: the qualifiers, built-in variables, intrinsics and host functions that flashgen's
// kernels use, so that g++ compiles them unchanged:
//
//   g++ -x c++ -std=c++17 -include cuda_emulation.h -I<here> -shared -fPIC kernel.cu runtime.cpp -o kernel.so -pthread
//
// Arithmetic is IEEE float32: compile with -ffp-contract=off, so that only fmaf fuses.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "hopper.h"
#include "runtime.h"
#include "tensor_cores.h"

// ---- qualifiers --------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
// In a kernel's declaration, behind its `void`, which so becomes another one's: an attribute of the kernel alone would be
// lost. It says how many blocks the file's clusters have; EMULATION_CLUSTERS, how many each kernel's, by its name, where
// they differ: " name=blocks name=blocks ".
#ifndef EMULATION_CLUSTERS
#define EMULATION_CLUSTERS ""
#endif
#define EMULATION_JOINED(name, line) name##line
#define EMULATION_OF_LINE(name, line) EMULATION_JOINED(name, line)
#define __cluster_dims__(x, y, z)                                                        \
  emulation_clusters();                                                                  \
  static_assert((y) == 1 && (z) == 1, "clusters are emulated of blocks that differ in x"); \
  static const bool EMULATION_OF_LINE(emulation_of_clusters_, __LINE__) = emulation::form_clusters(x); \
  extern "C" void
#define __align__(bytes) __attribute__((aligned(bytes)))

// A block owns its host thread while it runs, so its shared memory is thread-local. Only dynamic shared memory exists
// (`extern __shared__ ... shared_bytes[]`): that alone can be bounded and filled before each block. Its linkage is C's, as
// that of kernels is, and so of what they declare within.
#define __shared__ __thread
extern "C" __thread unsigned char shared_bytes[emulation::kMaxSharedBytes + emulation::kSharedGuardBytes]
    __attribute__((aligned(1024)));

constexpr int warpSize = 32;

// ---- vector types ------------------------------------------------------------------------------------------------

struct __align__(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- arithmetic that the C library lacks -------------------------------------------------------------------------

constexpr int min(int a, int b) { return b < a ? b : a; }
constexpr int max(int a, int b) { return a < b ? b : a; }
constexpr unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
constexpr unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
constexpr long min(long a, long b) { return b < a ? b : a; }
constexpr long max(long a, long b) { return a < b ? b : a; }
constexpr long long min(long long a, long long b) { return b < a ? b : a; }
constexpr long long max(long long a, long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline float larger_or_none(float x, float y) { return x != x || x > y ? x : y; }
inline float fma_saturated(float a, float b, float c) {
  const float x = fmaf(a, b, c);
  return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
// The low word of both, side by side, moved to the right by the last five bits of `shift`.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
// The high word of both, moved to the left by `shift`, as far as 32.
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift < 32 ? shift : 32) >> 32);
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }

namespace emulation {

// What `work` makes of the halves of words that it is told to shift down.
template <typename Work>
unsigned of_each_half(const Work& work) {
  return (work(0) & 0xffff) | work(16) << 16;
}

}  // namespace emulation

// Of each half of a word, as integers with and without a sign.
inline unsigned __vimax3_s16x2(unsigned a, unsigned b, unsigned c) {
  return emulation::of_each_half([&](int shift) {
    return unsigned(max(max(int(int16_t(a >> shift)), int(int16_t(b >> shift))), int(int16_t(c >> shift))));
  });
}
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c) {
  return emulation::of_each_half(
      [&](int shift) { return max(max(a >> shift & 0xffff, b >> shift & 0xffff), c >> shift & 0xffff); });
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
inline float __frcp_rn(float x) { return 1.0f / x; }

namespace emulation {

template <typename To, typename From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulation

// Of the eight bytes of both, four: each nibble of `selector` numbers one, the lowest first.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline int __float_as_int(float x) { return emulation::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emulation::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emulation::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bit_cast<float>(x); }

// Off by what tanh.approx.f32 may be off: up to 2^-11 of the result, more or less by the bits of x; one at most.
inline float tanh_approximate(float x) {
  const float error = __float_as_uint(x) * 0x9e3779b1u / 4294967296.0f - 0.5f;
  const float tangent = tanhf(x) * (1.0f + error / 1024.0f);
  return fabsf(tangent) > 1.0f ? copysignf(1.0f, tangent) : tangent;
}

// An f16 by its bits, as cvt.f32.f16 makes a float of it.
inline float half_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude > 0x7c00) {
    // As a float, what nobody wrote must go on to hurt. Other NaNs lose sign and payload, as on cards.
    return __uint_as_float(bits == (emulation::kUninitialized & 0xffff) ? emulation::kUninitialized : 0x7fffffffu);
  }
  if (magnitude == 0x7c00) return __uint_as_float(sign | 0x7f800000u);
  if (magnitude < 0x0400) return __uint_as_float(sign | __float_as_uint(float(magnitude) * 0x1p-24f));
  // The bits in a float's place, their exponent biased by 15 instead of 127.
  return __uint_as_float(sign | (magnitude << 13) + (112u << 23));
}

// The address within shared memory, as instructions and descriptors take it.
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - shared_bytes;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}

// Adds to memory to which other blocks add, too; returns what was there.
inline float atomicAdd(float* address, float value) {
  float before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do {
    after = before + value;
  } while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline int atomicMax(int* address, int value) {
  int before = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(
                               address, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

// ---- barriers and warp-wide functions ----------------------------------------------------------------------------
// The last parameter is the line of the call, for messages.

inline void __syncthreads(int line = __builtin_LINE()) { emulation::sync_block("__syncthreads", line); }
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emulation::sync_block("__syncthreads_or", line, predicate != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffff, int line = __builtin_LINE()) {
  emulation::sync_warp(mask, "__syncwarp", line);
}

namespace emulation {

template <typename T>
T shuffle(unsigned mask, T value, int source, const char* what, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source, what, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulation

// A source outside the lane's own segment of `width` lanes stands for the lane itself, except that xor may reach
// back into earlier segments.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_warp();
  return emulation::shuffle(mask, value, (lane & -width) | (source & (width - 1)), "__shfl_sync", line);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_warp(), source = lane - int(delta);
  return emulation::shuffle(mask, value, source < (lane & -width) ? lane : source, "__shfl_up_sync", line);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_warp(), source = lane + int(delta);
  return emulation::shuffle(mask, value, source >= (lane & -width) + width ? lane : source, "__shfl_down_sync", line);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_warp(), source = lane ^ lane_mask;
  return emulation::shuffle(mask, value, source >= (lane & -width) + width ? lane : source, "__shfl_xor_sync", line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emulation::ballot(mask, predicate != 0, "__ballot_sync", line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emulation::ballot(mask, predicate != 0, "__any_sync", line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emulation::ballot(mask, predicate == 0, "__all_sync", line) == 0;
}

// The largest of all lanes'.
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
  for (int distance = 1; distance < warpSize; distance *= 2) {
    const unsigned other = __shfl_xor_sync(mask, value, distance, warpSize, line);
    value = value > other ? value : other;
  }
  return value;
}

// ---- asynchronous copies -----------------------------------------------------------------------------------------

inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zero_fill = 0,
                                    int line = __builtin_LINE()) {
  emulation::copy_async(shared, global, bytes, zero_fill, "__pipeline_memcpy_async", line);
}
inline void __pipeline_commit() { emulation::commit_copies(); }
inline void __pipeline_wait_prior(size_t groups) { emulation::wait_for_copies(groups); }

// ---- host functions ----------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorInvalidClusterSize = 912,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};
typedef struct CUstream_st* cudaStream_t;

// The driver's functions by name; null for those that the emulated driver lacks.
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,  // the name as CUDA spells it
};
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found = nullptr);

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    return cudaError_t(emulation::allow_large_clusters(reinterpret_cast<const void*>(kernel), value != 0));
  }
  return cudaError_t(emulation::allow_shared_bytes(reinterpret_cast<const void*>(kernel), value));
}

namespace emulation {

template <typename... Parameters, size_t... I>
void call_kernel(void (*kernel)(Parameters...), void** parameters, std::index_sequence<I...>) {
  kernel(*static_cast<Parameters*>(parameters[I])...);
}

// The blocks of a kernel's cluster, of its name between a blank and an equals sign; 0 where all kernels' are alike.
inline unsigned cluster_of(const char* named) {
  const char* found = strstr(EMULATION_CLUSTERS, named);
  return found == nullptr ? 0 : unsigned(atoi(found + strlen(named)));
}

}  // namespace emulation

// Runs the whole grid before it returns: a stream has nothing left to wait for.
#define cudaLaunchKernel(kernel, ...) \
  emulation_launch(emulation::cluster_of(" " #kernel "="), false, kernel, __VA_ARGS__)
template <typename... Parameters>
cudaError_t emulation_launch(unsigned cluster, bool dependent, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                             void** parameters, size_t shared_bytes, cudaStream_t) {
  const emulation::KernelCall call = [](const void* address, void** values) {
    using Kernel = void (*)(Parameters...);
    emulation::call_kernel(reinterpret_cast<Kernel>(const_cast<void*>(address)), values,
                           std::index_sequence_for<Parameters...>());
  };
  return cudaError_t(emulation::launch(call, reinterpret_cast<const void*>(kernel), cluster, dependent, grid, block, parameters,
                                       shared_bytes));
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// The same by a configuration. What may begin before the launch in front of it has ended must wait for that, though here
// it has.
#define cudaLaunchKernelEx(config, kernel, ...) \
  emulation_launch_as(emulation::cluster_of(" " #kernel "="), config, kernel, __VA_ARGS__)
template <typename... Parameters, typename... Arguments>
cudaError_t emulation_launch_as(unsigned cluster, const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                Arguments&&... arguments) {
  bool dependent = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    dependent |= config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                 config->attrs[i].val.programmaticStreamSerializationAllowed;
  }
  return [&](Parameters... values) {
    void* parameters[] = {&values...};
    return emulation_launch(cluster, dependent, kernel, config->gridDim, config->blockDim, parameters,
                            config->dynamicSmemBytes, config->stream);
  }(static_cast<Arguments&&>(arguments)...);
}

struct cudaFuncAttributes {};
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Parameters...)) {
  return cudaSuccess;
}

// Memory of the card is the host's.
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
template <typename T>
cudaError_t cudaMalloc(T** array, size_t bytes) {
  *array = static_cast<T*>(aligned_alloc(256, (bytes + 255) / 256 * 256));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* array) { return free(array), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  if (bytes) memcpy(target, source, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = nullptr, cudaSuccess; }

// No time passes.
typedef struct CUevent_st* cudaEvent_t;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = nullptr, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 0, cudaSuccess; }

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorInvalidClusterSize: return "cluster misconfiguration";
  }
  return "unrecognized error code";
}
