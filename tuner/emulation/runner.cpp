// A program around one kernel, for AddressSanitizer, which wants to be in charge of a whole process:
//
//   runner REQUEST REPLY
//
// REQUEST holds a Config, an AttentionArgs whose leading addresses do not count, and its arrays, each as: number of
// words, offset of the first element, shape[4], strides[4], then the words. All but the arrays' own rows is poisoned. REPLY
// receives the words of those that are written. Exits with 3, error code and message on stdout, when the launch fails.
#include <stdio.h>
#include <stdlib.h>

#include "cuda_emulation.h"
#include "sanitizer.h"

extern "C" int EMULATION_ENTRY(const void* args, cudaStream_t stream);

namespace {

constexpr int kLaunchFailed = 3;
constexpr size_t kArgsBytes = EMULATION_ARGS_BYTES;

struct Array {
  const char* name;
  bool is_output;
  int64_t words, offset, shape[4], strides[4];
  float* memory;

  float* first() const { return words ? memory + offset : nullptr; }
};

Array arrays[] = {EMULATION_ARRAYS};  // in the order of the arguments' addresses

void read(void* target, size_t bytes, FILE* file) {
  if (fread(target, 1, bytes, file) != bytes) {
    fprintf(stderr, "the request is cut short\n");
    exit(2);
  }
}

void read_array(Array& array, FILE* file) {
  read(&array.words, sizeof(int64_t) * 10, file);
  if (array.words == 0) return;
  array.memory = static_cast<float*>(aligned_alloc(256, (array.words * sizeof(float) + 255) / 256 * 256));
  read(array.memory, array.words * sizeof(float), file);
  emulation::poison(array.memory, (array.words * sizeof(float) + 255) / 256 * 256);
  for (int64_t a = 0; a < array.shape[0]; ++a) {
    for (int64_t b = 0; b < array.shape[1]; ++b) {
      for (int64_t c = 0; c < array.shape[2]; ++c) {
        const float* row = array.first() + a * array.strides[0] + b * array.strides[1] + c * array.strides[2];
        emulation::unpoison(row, array.shape[3] * sizeof(float));
      }
    }
  }
}

void write_array(const Array& array, FILE* file) {
  if (array.words == 0) return;
  emulation::unpoison(array.memory, array.words * sizeof(float));
  fwrite(array.memory, sizeof(float), array.words, file);
}

const char* begin_of(const Array& array) { return reinterpret_cast<const char*>(array.memory); }
const char* end_of(const Array& array) { return begin_of(array) + array.words * sizeof(float); }

// "global memory, 12 bytes past the end of k".
void describe(const char* address, char* text, size_t bytes) {
  const char* shared = reinterpret_cast<const char*>(shared_bytes);
  if (address >= shared && address < shared + sizeof(shared_bytes)) {
    snprintf(text, bytes, "byte %td of shared memory, past its end", address - shared);
    return;
  }
  // The array whose extent is nearest.
  const Array* nearest = nullptr;
  long long nearest_distance = 0;
  for (const Array& array : arrays) {
    if (!array.words) continue;
    const char *begin = begin_of(array), *end = end_of(array);
    const long long distance = address < begin ? address - begin : address >= end ? address - end : 0;
    if (!nearest || llabs(distance) < llabs(nearest_distance)) nearest = &array, nearest_distance = distance;
  }
  if (!nearest) {
    snprintf(text, bytes, "address %p", (const void*)address);
  } else if (address >= begin_of(*nearest) && address < end_of(*nearest)) {
    snprintf(text, bytes, "global memory, between the rows of %s", nearest->name);
  } else {
    snprintf(text, bytes, "global memory, %lld bytes %s %s", llabs(nearest_distance),
             nearest_distance < 0 ? "before" : "past the end of", nearest->name);
  }
}

}  // namespace

#if EMULATION_ASAN
// Called before AddressSanitizer prints its report.
extern "C" void __asan_on_error() {
  char place[200];
  describe(static_cast<const char*>(__asan_get_report_address()), place, sizeof(place));
  fprintf(stderr, "flashgen: out of bounds: %s of %zu bytes at %s (block %u, thread %u)\n",
          __asan_get_report_access_type() ? "write" : "read", __asan_get_report_access_size(), place, blockIdx.x,
          threadIdx.x);
}
#endif

int main(int count, char** words) {
  FILE* request = count == 3 ? fopen(words[1], "rb") : nullptr;
  if (!request) {
    fprintf(stderr, "usage: %s REQUEST REPLY\n", words[0]);
    return 2;
  }
  emulation::Config config;
  read(&config, sizeof(config), request);
  emulation_configure(&config);
  alignas(8) unsigned char args[kArgsBytes];
  read(args, sizeof(args), request);
  int i = 0;
  for (Array& array : arrays) {
    read_array(array, request);
    const float* pointer = array.first();
    memcpy(args + sizeof(pointer) * i++, &pointer, sizeof(pointer));
  }
  fclose(request);

  const int status = EMULATION_ENTRY(args, nullptr);
  if (status != 0) {
    const char* message = emulation_message();
    printf("%d %s\n", status, *message ? message : cudaGetErrorString(cudaError_t(status)));
    return kLaunchFailed;
  }
  FILE* reply = fopen(words[2], "wb");
  if (!reply) return 2;
  for (const Array& array : arrays) {
    if (array.is_output) write_array(array, reply);
  }
  return fclose(reply) == 0 ? 0 : 2;
}
