// A CUDA driver for machines without one: host memory plays the device's, and a launch runs plain attention on
// it, so that what a caller packs (pointers, strides, sizes, mask) shows in the result. Every launch is logged.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400;

struct Args {
  const void *q, *k, *v;
  void* o;
  float* lse;
  long long q_stride[3], k_stride[3], v_stride[3], o_stride[3];
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;
};
static_assert(sizeof(Args) == 160);

// What a tensor map was made of, the innermost dimension first; it fills the map's 128 bytes but for the mark. A fifth
// dimension is apart, of zero where there is none.
struct Map {
  uint64_t address;
  uint64_t sizes[4], stride_bytes[3], outer_size, outer_stride_bytes;
  uint32_t box[2];
  int32_t type, swizzle, promotion;
};
constexpr size_t kMapBytes = 128;
constexpr uint64_t kMapMark = 0x70616d726f736e74;
static_assert(sizeof(Map) + sizeof(kMapMark) <= kMapBytes);

struct Attribute {
  int id, padding, value[16];
};
constexpr int kProgrammaticStreamSerialization = 6;

struct Config {
  unsigned grid[3], block[3], smem_bytes;
  int64_t stream;
  const Attribute* attributes;
  unsigned num_attributes;
};

struct Launch {
  int64_t blocks, threads, smem, stream, context, causal, dependent;
  Args args;
  Map maps[4], met;  // of what is computed with, and of an array that scores meet
};

struct Allocation {
  size_t size;
  int64_t context;
  int device;
};

std::mutex mutex;
std::vector<Launch> launches;
std::map<uintptr_t, Allocation> allocations;
std::map<std::string, int64_t> calls;
std::vector<int64_t> waited;
thread_local std::vector<int64_t> contexts;
std::string kernel_name;
std::vector<std::string> kernel_names = {""};  // by a kernel's number, 0 for what was found otherwise
std::string launched_name;
enum Element { kF32, kF16, kBf16 };
int head_dim = 0, head_dim_v = 0;  // 0: launches are only logged
Element element = kF32;
int arch_major = 9, arch_minor = 0, smem_per_block = 232448, large_clusters = 0, next_load_status = 0, launch_status = 0;
void (*on_launch)(const void*, int) = nullptr;  // computes in the kernel's place, of its arguments and mask
int num_maps = 0;  // that the kernel takes as its second argument
int encode_status = 0;
int64_t captured = -1;  // the stream on which launches go to a graph

// A context of device n is 0xc000 + 16 n, plus 1 when it is the primary one.
int device_of(int64_t context) { return int((context - 0xc000) / 16); }

void count(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++calls[name];
}

double from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

uint16_t to_half(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7e00;
  if (std::abs(x) >= 65520) return sign | 0x7c00;
  const int exponent = x == 0 ? -14 : std::max(std::ilogb(x), -14);
  return sign | uint16_t((exponent + 14) * 1024 + std::nearbyint(std::ldexp(std::abs(x), 10 - exponent)));
}

double load(const void* array, int64_t index) {
  if (element == kF32) return static_cast<const float*>(array)[index];
  const uint16_t bits = static_cast<const uint16_t*>(array)[index];
  if (element == kF16) return from_half(bits);
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

void store(void* array, int64_t index, float x) {
  if (element == kF32) {
    static_cast<float*>(array)[index] = x;
  } else if (element == kF16) {
    static_cast<uint16_t*>(array)[index] = to_half(x);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    static_cast<uint16_t*>(array)[index] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

int64_t row_of(const long long (&strides)[3], int batch, int head, int row) {
  return batch * strides[0] + head * strides[1] + row * strides[2];
}

void attend(const Args& a, bool causal) {
  std::vector<double> weights(a.seqlen_k);
  for (int b = 0; b < a.batch; ++b) {
    for (int h = 0; h < a.num_q_heads; ++h) {
      const int g = h / (a.num_q_heads / a.num_kv_heads);
      for (int i = 0; i < a.seqlen_q; ++i) {
        const int64_t q = row_of(a.q_stride, b, h, i);
        const int visible = causal ? std::min(a.seqlen_k, i + 1 + a.seqlen_k - a.seqlen_q) : a.seqlen_k;
        double top = -INFINITY, sum = 0;
        for (int j = 0; j < visible; ++j) {
          const int64_t k = row_of(a.k_stride, b, g, j);
          weights[j] = 0;
          for (int x = 0; x < head_dim; ++x) weights[j] += load(a.q, q + x) * load(a.k, k + x);
          weights[j] *= a.scale;
          top = std::max(top, weights[j]);
        }
        std::vector<double> o(head_dim_v);
        for (int j = 0; j < visible; ++j) {
          const int64_t v = row_of(a.v_stride, b, g, j);
          const double weight = std::exp(weights[j] - top);
          sum += weight;
          for (int x = 0; x < head_dim_v; ++x) o[x] += weight * load(a.v, v + x);
        }
        const int64_t out = row_of(a.o_stride, b, h, i);
        for (int x = 0; x < head_dim_v; ++x) store(a.o, out + x, sum > 0 ? float(o[x] / sum) : 0.0f);
        if (a.lse) a.lse[(1LL * b * a.num_q_heads + h) * a.seqlen_q + i] = float(std::log(sum) + top);
      }
    }
  }
}

}  // namespace

extern "C" {

// ---- what the tests set and read ----

void fake_reset(int dim, int major, int minor, int smem) {
  launches.clear();
  calls.clear();
  waited.clear();
  contexts.clear();
  head_dim = head_dim_v = dim;
  element = kF32;
  arch_major = major;
  arch_minor = minor;
  smem_per_block = smem;
  large_clusters = next_load_status = launch_status = encode_status = num_maps = 0;
  on_launch = nullptr;
  captured = -1;
}
void fake_on_launch(void (*computes)(const void*, int)) { on_launch = computes; }
int fake_large_clusters() { return large_clusters; }
void fake_maps(int count) { num_maps = count; }
void fake_kernel(int dim_v, int type) {
  head_dim_v = dim_v;
  element = Element(type);
}
void fake_allocation(uintptr_t address, size_t size, int device, int64_t context) {
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[address] = {size, context, device};
}
void fake_push(int64_t context) { contexts.push_back(context); }
int fake_context_depth() { return int(contexts.size()); }
int fake_num_launches() { return int(launches.size()); }
void fake_launch(int index, Launch* launch) { *launch = launches[index]; }
int64_t fake_calls(const char* name) { return calls[name]; }
int fake_num_allocated() {
  int n = 0;
  for (const auto& entry : allocations) n += entry.second.context == -1;
  return n;
}
int64_t fake_waited(int index) { return index < int(waited.size()) ? waited[index] : -1; }
void fake_capture(int64_t stream) { captured = stream; }
void fake_fail_load(int status) { next_load_status = status; }
void fake_fail_launch(int status) { launch_status = status; }
void fake_fail_encode(int status) { encode_status = status; }
const char* fake_launched_name() { return launched_name.c_str(); }
const char* fake_kernel_name() { return kernel_name.c_str(); }

// ---- the driver ----

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int status, const char** name) {
  *name = status == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == kOutOfMemory ? "out of memory" : "something failed";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int length, int) { return std::strncpy(name, "Fake", length), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? arch_major : attribute == 76 ? arch_minor : attribute == 97 ? smem_per_block : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(int64_t* context, int device) {
  count("cuDevicePrimaryCtxRetain");
  return *context = 0xc001 + 16 * device, 0;
}
int cuCtxGetCurrent(int64_t* context) { return *context = contexts.empty() ? 0 : contexts.back(), 0; }
int cuCtxGetDevice(int* device) {
  if (contexts.empty()) return kInvalidContext;
  return *device = device_of(contexts.back()), 0;
}
int cuCtxPushCurrent_v2(int64_t context) { return contexts.push_back(context), 0; }
int cuCtxPopCurrent_v2(int64_t* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
int cuPointerGetAttribute(void* value, int attribute, uintptr_t pointer) {
  count("cuPointerGetAttribute");
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = allocations.upper_bound(pointer);
  if (found == allocations.begin()) return kInvalidValue;
  --found;
  if (pointer >= found->first + found->second.size) return kInvalidValue;
  if (attribute == 9) {
    *static_cast<int*>(value) = found->second.device;
    return 0;
  }
  // cuMemAlloc's own have -1: the context they were made in is not told apart here.
  if (attribute != 1 || found->second.context <= 0) return kInvalidValue;
  *static_cast<int64_t*>(value) = found->second.context;
  return 0;
}
int cuMemsetD8Async(void* address, unsigned char value, size_t size, int64_t) {
  std::memset(address, value, size);
  return 0;
}
int cuStreamSynchronize(int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  waited.push_back(stream);
  return 0;
}
int cuStreamIsCapturing(int64_t stream, int* state) { return *state = stream == captured, 0; }
int cuMemAlloc_v2(uintptr_t* address, size_t size) {
  if (contexts.empty()) return kInvalidContext;
  if (size > (size_t{1} << 40)) return kOutOfMemory;
  *address = reinterpret_cast<uintptr_t>(std::malloc(size));
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[*address] = {size, -1, device_of(contexts.back())};
  return 0;
}
int cuMemFree_v2(uintptr_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!allocations.erase(address)) return kInvalidValue;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, int64_t) { return std::memcpy(to, from, size), 0; }
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t size, int64_t) { return std::memcpy(to, from, size), 0; }
int cuMemcpyHtoD_v2(void* to, const void* from, size_t size) { return std::memcpy(to, from, size), 0; }
int cuMemcpyDtoH_v2(void* to, const void* from, size_t size) { return std::memcpy(to, from, size), 0; }
int cuCtxSetCurrent(int64_t context) { return contexts.assign(1, context), 0; }
int cuCtxSynchronize() { return 0; }
int cuEventCreate(int64_t* event, unsigned) { return *event = 7, 0; }
int cuEventDestroy_v2(int64_t) { return 0; }
int cuEventRecord(int64_t, int64_t) { return 0; }
int cuEventSynchronize(int64_t) { return 0; }
int cuEventElapsedTime(float* milliseconds, int64_t, int64_t) { return *milliseconds = 0.25f, 0; }

// A "cubin" is the text "causal=0" or "causal=1"; a library is 0x1000 plus the mask, its kernel also twice its number.
int cuLibraryLoadData(int64_t* library, const char* image, void*, void*, unsigned, void*, void*, unsigned) {
  count("cuLibraryLoadData");
  if (next_load_status) {
    const int status = next_load_status;
    next_load_status = 0;
    return status;
  }
  if (std::strncmp(image, "causal=", 7)) return kInvalidImage;
  return *library = 0x1000 + (image[7] - '0'), 0;
}
int cuLibraryGetKernel(int64_t* kernel, int64_t library, const char* name) {
  kernel_name = name;
  kernel_names.push_back(name);
  return *kernel = library + 2 * int64_t(kernel_names.size() - 1), 0;
}
int cuModuleLoad(int64_t* module, const char* path) {
  char image[8] = {};
  std::FILE* file = std::fopen(path, "r");
  if (!file) return kInvalidValue;
  const size_t read = std::fread(image, 1, sizeof image, file);
  std::fclose(file);
  if (read < sizeof image || std::strncmp(image, "causal=", 7)) return kInvalidImage;
  return *module = 0x1000 + (image[7] - '0'), 0;
}
int cuModuleUnload(int64_t) { return 0; }
int cuModuleGetFunction(int64_t* function, int64_t module, const char*) { return *function = module, 0; }
int cuFuncSetAttribute(int64_t, int attribute, int value) {
  return attribute == 8 && value <= smem_per_block ? 0 : kInvalidValue;
}
// A function is a kernel, and above its bits the context that it is of.
int cuKernelGetFunction(int64_t* function, int64_t kernel) {
  if (contexts.empty()) return kInvalidContext;
  return *function = kernel | contexts.back() << 32, 0;
}
int cuKernelSetAttribute(int attribute, int value, int64_t, int) {
  if (attribute == 14) return large_clusters = value, 0;
  return attribute == 8 && value <= smem_per_block ? 0 : kInvalidValue;
}
// Refuses what the driver's documentation says it refuses.
int cuTensorMapEncodeTiled(unsigned char* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes,
                           const uint64_t* stride_bytes, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  count("cuTensorMapEncodeTiled");
  if (encode_status) return encode_status;
  const uint64_t item = type == 7 ? 4 : type == 0 ? 1 : 2;
  if (reinterpret_cast<uintptr_t>(map) % 64 || rank < 4 || rank > 5 || interleave || fill || !address || address % 16) {
    return kInvalidValue;
  }
  const int dimensions = int(rank);
  for (int i = 0; i < dimensions; ++i) {
    if (!sizes[i] || sizes[i] > uint64_t{1} << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return kInvalidValue;
    if (i + 1 < dimensions && (stride_bytes[i] % 16 || stride_bytes[i] >> 40)) return kInvalidValue;
  }
  if (box[0] * item != 16u << swizzle || box[2] != 1 || box[dimensions - 1] != 1) return kInvalidValue;
  Map made = {address, {}, {}, rank > 4 ? sizes[4] : 0, rank > 4 ? stride_bytes[3] : 0, {box[0], box[1]}, type, swizzle, promotion};
  std::copy_n(sizes, 4, made.sizes);
  std::copy_n(stride_bytes, 3, made.stride_bytes);
  std::memcpy(map, &made, sizeof(made));
  std::memcpy(map + sizeof(made), &kMapMark, sizeof(kMapMark));
  return 0;
}
int cuLaunchKernelEx(const Config* config, int64_t kernel, void** parameters, void** extra) {
  if (launch_status) return launch_status;
  if (contexts.empty()) return kInvalidContext;
  const int64_t of = kernel >> 32, context = of ? of : contexts.back();
  if (context != contexts.back() && !config->stream) return kInvalidHandle;  // the default stream is that of the current one
  kernel &= 0xffffffff;
  const unsigned *grid = config->grid, *block = config->block;
  if (grid[1] != 1 || grid[2] != 1 || block[1] != 1 || block[2] != 1 || extra) return kInvalidValue;
  const Attribute* const attribute = config->num_attributes ? config->attributes : nullptr;
  if (config->num_attributes > 1 || (attribute && attribute->id != kProgrammaticStreamSerialization)) return kInvalidValue;
  const int64_t dependent = attribute && attribute->value[0];
  Launch launch{grid[0], block[0], config->smem_bytes, config->stream, context, (kernel - 0x1000) & 1, dependent, {}, {}};
  launched_name = kernel_names[(kernel - 0x1000) / 2];
  std::memcpy(&launch.args, parameters[0], sizeof(Args));
  const bool lists = launched_name.find("_lists") != std::string::npos;  // which take no maps
  for (int i = 0; i < (lists ? 0 : num_maps); ++i) {
    const auto* map = static_cast<const unsigned char*>(parameters[1]) + kMapBytes * i;
    if (std::memcmp(map + sizeof(Map), &kMapMark, sizeof(kMapMark)) != 0) return kInvalidValue;
    std::memcpy(i < 4 ? &launch.maps[i] : &launch.met, map, sizeof(Map));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    launches.push_back(launch);
  }
  if (on_launch) {
    on_launch(parameters[0], int(launch.causal));
  } else if (head_dim) {
    attend(launch.args, launch.causal);
  }
  return 0;
}
int cuLaunchKernel(int64_t kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned smem, int64_t stream, void** parameters, void** extra) {
  const Config config = {{gx, gy, gz}, {bx, by, bz}, smem, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, kernel, parameters, extra);
}

}  // extern "C"
