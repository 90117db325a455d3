// A stand-in for libcuda, of one card: device memory is host memory, and every call is written down.
//
// It does what runners without PyCUDA rely on. A launch copies q to o, each by its address in AttentionArgs.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidImage = 200, kInvalidContext = 201, kNotFound = 500;
constexpr int64_t kTotalBytes = int64_t(1) << 26;

std::string calls;
std::map<std::string, int> failures;  // what a function returns from now on
std::map<void*, size_t> memory;
int64_t contexts[8], depth = 0, retained = 0, next_handle = 0x1000, copied_bytes = 0;
float clock_ms = 0;
std::map<int64_t, float> happened;

int noted(const char* name) {
  calls += std::string(name) + "\n";
  const auto failure = failures.find(name);
  return failure == failures.end() ? 0 : failure->second;
}

int in_context(const char* name) {
  const int status = noted(name);
  return status ? status : depth ? 0 : kInvalidContext;
}

int make(const char* name, int64_t* handle) {
  *handle = next_handle++;
  return in_context(name);
}

}  // namespace

extern "C" {

const char* fake_calls() { return calls.c_str(); }
void fake_fail(const char* name, int status) { failures[name] = status; }
int64_t fake_live_bytes() {
  int64_t total = 0;
  for (const auto& each : memory) total += each.second;
  return total;
}
int64_t fake_retained() { return retained; }
void fake_reset(int64_t copied) {
  calls.clear();
  failures.clear();
  depth = retained = 0;
  copied_bytes = copied;
}

int cuInit(unsigned flags) { return noted("cuInit"); }
int cuDriverGetVersion(int* version) { *version = 12080; return noted("cuDriverGetVersion"); }
int cuGetErrorString(int status, const char** text) {
  *text = status == kOutOfMemory ? "out of memory" : status == 700 ? "an illegal memory access was encountered" : "no device";
  return 0;
}
int cuDeviceGetCount(int* count) { *count = 1; return noted("cuDeviceGetCount"); }
int cuDeviceGet(int* device, int ordinal) { *device = 40 + ordinal; return noted("cuDeviceGet"); }
int cuDeviceGetName(char* name, int size, int device) {
  std::strncpy(name, "NVIDIA A100-SXM4-80GB", size);
  return device == 40 ? noted("cuDeviceGetName") : kInvalidValue;
}
int cuDeviceGetPCIBusId(char* id, int size, int device) {
  std::strncpy(id, "0000:3B:00.0", size);
  return device == 40 ? noted("cuDeviceGetPCIBusId") : kInvalidValue;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  static const std::map<int, int> values = {{1, 1024}, {8, 49152}, {13, 1410000}, {16, 108}, {36, 1593000},
      {37, 5120}, {38, 41943040}, {39, 2048}, {75, 8}, {76, 0}, {81, 167936}, {82, 65536}, {97, 166912}, {106, 32}};
  const auto found = values.find(attribute);
  if (device != 40 || found == values.end()) return kInvalidValue;
  *value = found->second;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* size, int device) { *size = kTotalBytes; return noted("cuDeviceTotalMem_v2"); }
int cuDevicePrimaryCtxRetain(int64_t* context, int device) { *context = 0xC0FFEE; ++retained; return noted("cuDevicePrimaryCtxRetain"); }
int cuDevicePrimaryCtxRelease_v2(int device) { --retained; return noted("cuDevicePrimaryCtxRelease_v2"); }
int cuCtxPushCurrent_v2(int64_t context) {
  if (context != 0xC0FFEE) return kInvalidContext;
  contexts[depth++] = context;
  return noted("cuCtxPushCurrent_v2");
}
int cuCtxPopCurrent_v2(int64_t* context) {
  if (!depth) return kInvalidContext;
  *context = contexts[--depth];
  return noted("cuCtxPopCurrent_v2");
}
int cuCtxSynchronize() { return in_context("cuCtxSynchronize"); }
int cuStreamCreate(int64_t* stream, unsigned flags) { return make("cuStreamCreate", stream); }
int cuStreamDestroy_v2(int64_t stream) { return in_context("cuStreamDestroy_v2"); }
int cuStreamSynchronize(int64_t stream) { return in_context("cuStreamSynchronize"); }
int cuEventCreate(int64_t* event, unsigned flags) { return make("cuEventCreate", event); }
int cuEventDestroy_v2(int64_t event) { return in_context("cuEventDestroy_v2"); }
int cuEventRecord(int64_t event, int64_t stream) {
  happened[event] = clock_ms;
  return in_context("cuEventRecord");
}
int cuEventElapsedTime(float* ms, int64_t start, int64_t end) {
  *ms = happened[end] - happened[start];
  return in_context("cuEventElapsedTime");
}
int cuMemAlloc_v2(void** address, size_t size) {
  if (const int status = in_context("cuMemAlloc_v2")) return status;
  if (fake_live_bytes() + int64_t(size) > kTotalBytes) return kOutOfMemory;
  *address = std::aligned_alloc(256, (size + 255) / 256 * 256);
  memory[*address] = size;
  return 0;
}
int cuMemFree_v2(void* address) {
  if (!memory.erase(address)) return kInvalidValue;
  std::free(address);
  return noted("cuMemFree_v2");
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  *free_bytes = kTotalBytes - fake_live_bytes();
  *total = kTotalBytes;
  return in_context("cuMemGetInfo_v2");
}
int cuMemcpyHtoD_v2(void* to, const void* from, size_t size) { std::memcpy(to, from, size); return in_context("cuMemcpyHtoD_v2"); }
int cuMemcpyDtoH_v2(void* to, const void* from, size_t size) { std::memcpy(to, from, size); return in_context("cuMemcpyDtoH_v2"); }
int cuMemcpyDtoD_v2(void* to, const void* from, size_t size) { std::memcpy(to, from, size); return in_context("cuMemcpyDtoD_v2"); }
int cuMemsetD32_v2(unsigned* to, unsigned value, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = value;
  return in_context("cuMemsetD32_v2");
}
int cuMemsetD8Async(void* to, unsigned char value, size_t count, int64_t stream) {
  std::memset(to, value, count);
  return in_context("cuMemsetD8Async");
}
int cuModuleLoadData(int64_t* module, const char* image) {
  return std::strncmp(image, "\x7f" "ELF", 4) ? kInvalidImage : make("cuModuleLoadData", module);
}
int cuModuleUnload(int64_t module) { return in_context("cuModuleUnload"); }
int cuModuleGetFunction(int64_t* function, int64_t module, const char* name) {
  return std::strstr(name, "_kernel") ? make("cuModuleGetFunction", function) : kNotFound;
}
int cuFuncSetAttribute(int64_t function, int attribute, int value) { return in_context("cuFuncSetAttribute"); }
int cuFuncGetAttribute(int* value, int attribute, int64_t function) { *value = 64; return in_context("cuFuncGetAttribute"); }
int cuLaunchKernel(int64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned smem, int64_t stream, void** parameters, void** extra) {
  if (const int status = in_context("cuLaunchKernel")) return status;
  char* const* arrays = static_cast<char* const*>(parameters[0]);  // q, k, v, o
  std::memcpy(arrays[3], arrays[0], copied_bytes);
  clock_ms += 0.5f;
  return 0;
}

}  // extern "C"
