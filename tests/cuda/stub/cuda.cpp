// The driver API, as far as PyTorch and ctypes use it; build.py adds defaults for the rest.

#include "shared.h"

#include <sched.h>

#include <cstddef>
#include <cstdint>

#define API STUB_EXPORT

namespace {
char context;
constexpr int kInvalid = 1, kNotFound = 500;

// A word of memory, and the value (modulo 2^32) that a stream waits for.
struct Awaited {
  const uint32_t* word;
  uint32_t value;

  static void wait(void* data) {
    const auto* awaited = static_cast<const Awaited*>(data);
    while (static_cast<int32_t>(__atomic_load_n(awaited->word, __ATOMIC_ACQUIRE) - awaited->value) < 0) sched_yield();
  }
  static void drop(void* data) { delete static_cast<Awaited*>(data); }
};
}  // namespace

extern "C" int cudaDeviceGetAttribute(int*, int, int);
extern "C" int cudaDriverGetVersion(int*);

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
API int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
API int cuDeviceGet(int* device, int) {
  *device = 0;
  return 0;
}
API int cuDeviceGetAttribute(int* value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
API int cuGetErrorString(int, const char** text) {
  *text = "an error of the stub";
  return 0;
}
API int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_UNKNOWN";
  return 0;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** made, int) {
  *made = &context;
  return 0;
}
API int cuCtxGetCurrent(void** current) {
  *current = &context;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
API int cuPointerGetAttribute(void* data, int which, uint64_t address) {
  const bool device = stub_is_device(reinterpret_cast<void*>(address)) != 0;
  if (which == 1) *static_cast<void**>(data) = &context;     // CU_POINTER_ATTRIBUTE_CONTEXT
  if (which == 2) *static_cast<int*>(data) = device ? 2 : 1;  // _MEMORY_TYPE
  if (which == 9) *static_cast<int*>(data) = 0;               // _DEVICE_ORDINAL
  return 0;
}
API int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (const int error = stub_failure()) return error;
  stub_issue(stream, "host function", -1, function, data, nullptr);
  return 0;
}
// Supports only the comparison "at least" (flags 0).
API int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  if (flags != 0) return kInvalid;
  if (const int error = stub_failure()) return error;
  auto* awaited = new Awaited{reinterpret_cast<const uint32_t*>(address), value};
  stub_issue(stream, "wait for a value", -1, &Awaited::wait, awaited, &Awaited::drop);
  return 0;
}
API int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void**, void**) {
  if (const int error = stub_failure()) return error;
  stub_issue(stream, "library", 0, nullptr, nullptr, nullptr);
  return 0;
}
API int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = 2 << 20;
  return 0;
}
// Requests for driver tables or for entry points by name return not found.
API int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kNotFound;
}
API int cuGetProcAddress(const char*, void** found, int, uint64_t) {
  *found = nullptr;
  return kNotFound;
}
API int cuGetProcAddress_v2(const char*, void** found, int, uint64_t, void*) {
  *found = nullptr;
  return kNotFound;
}
