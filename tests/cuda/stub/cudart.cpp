// The CUDA runtime without a device. Memory, streams, events, host functions, graphs and copies are real. Kernels are
// checked for their sizes and take simulated time, but compute nothing (``replay.cpp`` gives ops their results).
// Missing entry points return success and are named once (``stub_default``).

#include "memory.h"
#include "settings.h"
#include "shared.h"
#include "streams.h"

#include <cuda_runtime_api.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#undef cudaGetDeviceProperties

namespace stub {
namespace {

// Never destroyed: threads of streams and PyTorch's statics may live longer.
Streams& streams() {
  static Streams* one = new Streams;
  return *one;
}
Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}
std::atomic<uint64_t> counts[kStubCounts];

thread_local cudaError_t last_error = cudaSuccess;
thread_local int suppressed = 0;

std::atomic<bool> failed{false};
std::atomic<int64_t> kernels_until_failure{-1};

cudaError_t fail(cudaError_t code, const char* what) {
  last_error = code;
  if (!settings().quiet) std::fprintf(stderr, "stub: %s: error %d\n", what, code);
  return code;
}
// The result of every call on a failed device.
cudaError_t failure() {
  if (!failed) return cudaSuccess;
  last_error = cudaErrorLaunchFailure;
  return last_error;
}

struct Event {
  PointP point;  // its last record
  bool timed;
};
Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }
PointP point_of(cudaEvent_t handle) {
  const std::lock_guard<std::mutex> guard(streams().mutex());
  return event_of(handle)->point;
}

Stream* stream_of(const void* handle) {
  const bool ordinary = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return ordinary ? streams().ordinary() : static_cast<Stream*>(const_cast<void*>(handle));
}
bool is_captured(Stream* stream) {
  const std::lock_guard<std::mutex> guard(streams().mutex());
  return stream->captured != nullptr;
}

// Tasks of a failed device do not run.
void put(Stream* stream, Task task) {
  if (task.run)
    task.run = [run = std::move(task.run)] {
      if (!failed) run();
    };
  streams().put(stream, std::move(task));
}

void count_kernel(Stream* stream) {
  ++counts[kStubLaunches];
  if (kernels_until_failure < 0 || kernels_until_failure-- > 0) return;
  Task task;
  task.what = "failure";
  task.run = [] { failed = true; };
  put(stream, std::move(task));
}

const void* idling = nullptr;  // the kernel of torch.cuda._sleep

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, const void* handle) {
  if (const cudaError_t error = failure()) return error;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0 ||
      static_cast<size_t>(block.x) * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535)
    return fail(cudaErrorInvalidConfiguration, "a launch of an impossible size");
  if (shared > 232448) return fail(cudaErrorInvalidValue, "a launch with too much shared memory");
  Stream* stream = stream_of(handle);
  Task task;
  task.what = "kernel";
  const double threads = static_cast<double>(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
  task.seconds = settings().kernel + threads * 32 / 4e12;
  if (function == idling && arguments != nullptr)
    task.seconds = static_cast<double>(*static_cast<int64_t*>(arguments[0])) / 1.98e9;
  put(stream, std::move(task));
  count_kernel(stream);
  return cudaSuccess;
}

// Whether code at this address is PyTorch's. Its calls within an op belong to that op; calls of others, for example to
// free memory for it, do not.
bool is_pytorchs(const void* code) {
  Dl_info info;
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return false;
  const char* slash = std::strrchr(info.dli_fname, '/');
  const char* name = slash == nullptr ? info.dli_fname : slash + 1;
  return std::strncmp(name, "libtorch", 8) == 0 || std::strncmp(name, "libc10", 6) == 0;
}

// Whether to plant a fault that hits every n-th of its kind.
std::atomic<uint64_t> lost{0}, flipped{0};
bool is_planted(uint64_t n, std::atomic<uint64_t>& count) { return n != 0 && ++count % n == 0; }

// Copies bytes between any two places, in stream order.
cudaError_t copy(void* to, const void* from, size_t bytes, const void* handle, bool part_of_op, bool blocks) {
  if (const cudaError_t error = failure()) return error;
  if (bytes == 0) return cudaSuccess;
  Memory& all = memory();
  const bool into = all.is_device(to), out = all.is_device(from);
  if ((into && !all.is_live(to, bytes)) || (out && !all.is_live(from, bytes)))
    return fail(cudaErrorInvalidValue, "a copy beyond an allocation on the device");
  const Pinned target_is = into ? Pinned::kYes : all.pinned(to, bytes);
  const Pinned source_is = out ? Pinned::kYes : all.pinned(from, bytes);
  if (target_is == Pinned::kPartly || source_is == Pinned::kPartly)
    return fail(cudaErrorInvalidValue, "a copy over a seam of pinned memory");
  ++counts[kStubCopies];
  counts[kStubCopiedBytes] += bytes;
  if (into && out && part_of_op) return cudaSuccess;
  const double rate = into && out ? settings().within : into ? settings().into : settings().out;
  Task task;
  task.what = "copy";
  task.engine = into == out ? Engine::kNone : into ? Engine::kInto : Engine::kOut;
  task.seconds = 4e-6 + static_cast<double>(bytes) / rate;
  char* target = all.behind(to);
  const char* source = all.behind(from);
  std::shared_ptr<std::vector<char>> kept;
  if (source_is == Pinned::kNo) {  // the host goes on once this has been read
    kept = std::make_shared<std::vector<char>>(source, source + bytes);
    source = kept->data();
  }
  const bool flips = into && !out && source_is == Pinned::kYes && bytes >= (1 << 16) && is_planted(settings().flip_bit, flipped);
  counts[kStubPageableCopies] += target_is == Pinned::kNo || source_is == Pinned::kNo;
  if (settings().numbers || bytes < (1 << 16))
    task.run = [target, source, bytes, kept, flips] {
      std::memmove(target, source, bytes);
      if (flips) target[bytes / 2] ^= 1;
    };
  Stream* stream = stream_of(handle);
  put(stream, std::move(task));
  if (blocks || target_is == Pinned::kNo) streams().await(stream);
  return failure();
}

cudaError_t fill(void* at, int value, size_t bytes, const void* handle, bool part_of_op) {
  if (const cudaError_t error = failure()) return error;
  if (bytes == 0) return cudaSuccess;
  if (!memory().is_device(at) || !memory().is_live(at, bytes))
    return fail(cudaErrorInvalidValue, "a memset beyond an allocation on the device");
  ++counts[kStubMemsets];
  if (part_of_op) return cudaSuccess;
  Task task;
  task.what = "memset";
  task.seconds = settings().kernel + static_cast<double>(bytes) / settings().within;
  task.run = [target = memory().behind(at), value, bytes] { std::memset(target, value, bytes); };
  put(stream_of(handle), std::move(task));
  return cudaSuccess;
}

cudaError_t await_all() {
  ++counts[kStubSynchronizations];
  streams().await_all();
  return failure();
}

int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrTotalConstantMemory:
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported: return 1;
    default: return 0;
  }
}

// A graph is the list of tasks of a captured stream; each launch issues them again.
using Graph = std::vector<Task>;

}  // namespace
}  // namespace stub

using namespace stub;

// Whether the current call is PyTorch's own within an op. Checks the caller of the entry point.
#define PART_OF_OP (suppressed > 0 && is_pytorchs(__builtin_return_address(0)))

// For the other libraries

STUB_EXPORT void stub_issue(void* handle, const char* what, double seconds, void (*run)(void*), void* data, void (*drop)(void*)) {
  Task task;
  task.what = what;
  task.seconds = seconds;
  if (run != nullptr) {
    std::shared_ptr<void> kept(data, [drop](void* held) {
      if (drop != nullptr) drop(held);
    });
    task.run = [run, kept] { run(kept.get()); };
  }
  Stream* stream = stream_of(handle);
  const bool kernel = std::strcmp(what, "library") == 0;
  if (kernel) task.seconds += settings().kernel;
  put(stream, std::move(task));
  if (kernel) count_kernel(stream);
}
STUB_EXPORT void* stub_memory(const void* address) {
  if (memory().is_device(address) || memory().pinned(address, 1) == Pinned::kYes) return memory().behind(address);
  return nullptr;
}
STUB_EXPORT int stub_is_device(const void* address) { return memory().is_device(address); }
STUB_EXPORT void stub_synchronize(void* handle) { streams().await(stream_of(handle)); }
STUB_EXPORT int stub_default(const char* name, char* told) {
  if (*told == 0 && !settings().quiet) std::fprintf(stderr, "stub: %s is not written and returns 0\n", name);
  *told = 1;
  return 0;
}
STUB_EXPORT void stub_suppress(int on) { suppressed += on != 0 ? 1 : -1; }
STUB_EXPORT int stub_error(int code, const char* what) { return fail(static_cast<cudaError_t>(code), what); }
STUB_EXPORT int stub_failure() { return failure(); }
STUB_EXPORT void stub_fail_after(int64_t kernels) { kernels_until_failure = kernels; }
STUB_EXPORT uint64_t stub_count(int which) {
  switch (which) {
    case kStubDeviceBytes: return memory().used();
    case kStubPinnedPieces: return memory().pinned_pieces();
    case kStubStreams: return streams().count();
    default: return which >= 0 && which < kStubCounts ? counts[which].load() : 0;
  }
}

#define API STUB_EXPORT

// Errors

API cudaError_t cudaGetLastError() {
  const cudaError_t error = failed ? cudaErrorLaunchFailure : last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return failed ? cudaErrorLaunchFailure : last_error; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "an error of the stub";
  }
}
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "cudaErrorUnknown";
  }
}

// Devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice, "cudaSetDevice");
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* about, int) {
  std::memset(about, 0, sizeof *about);
  std::strcpy(about->name, "Stub H200");
  about->totalGlobalMem = settings().memory;
  about->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  about->regsPerBlock = about->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  about->warpSize = 32;
  about->memPitch = 2147483647;
  about->maxThreadsPerBlock = about->maxThreadsDim[0] = about->maxThreadsDim[1] = 1024;
  about->maxThreadsDim[2] = 64;
  about->maxGridSize[0] = 2147483647;
  about->maxGridSize[1] = about->maxGridSize[2] = 65535;
  about->totalConstMem = 65536;
  about->major = 9;
  about->textureAlignment = 512;
  about->texturePitchAlignment = 32;
  about->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  about->canMapHostMemory = about->concurrentKernels = about->unifiedAddressing = 1;
  about->pciBusID = 1;
  about->asyncEngineCount = 3;
  about->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  about->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  about->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  about->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  about->streamPrioritiesSupported = about->globalL1CacheSupported = about->localL1CacheSupported = 1;
  about->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  about->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  about->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  about->managedMemory = about->cooperativeLaunch = about->hostRegisterSupported = 1;
  about->memoryPoolsSupported = about->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { return await_all(); }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int) {
  std::snprintf(id, static_cast<size_t>(bytes), "0000:01:00.0");
  return cudaSuccess;
}

// Memory

API cudaError_t cudaMalloc(void** made, size_t bytes) {
  if (const cudaError_t error = failure()) return error;
  ++counts[kStubAllocations];
  *made = bytes == 0 ? nullptr : memory().allocate(bytes);
  if (bytes != 0 && *made == nullptr) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
  return cudaSuccess;
}
API cudaError_t cudaFree(void* address) {
  ++counts[kStubFrees];
  if (address == nullptr) return failure();
  streams().await_all();
  if (!memory().release(address)) return fail(cudaErrorInvalidValue, "cudaFree");
  return failure();
}
API cudaError_t cudaMallocAsync(void** made, size_t bytes, cudaStream_t) { return cudaMalloc(made, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
API cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *total = settings().memory;
  *left = settings().memory - memory().used();
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  *made = memory().allocate_pinned(bytes);
  return *made == nullptr ? fail(cudaErrorMemoryAllocation, "cudaHostAlloc") : cudaSuccess;
}
API cudaError_t cudaMallocHost(void** made, size_t bytes) { return cudaHostAlloc(made, bytes, 0); }
API cudaError_t cudaFreeHost(void* address) {
  streams().await_all();
  return memory().unpin(address, true) ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaFreeHost");
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  if (address == nullptr || bytes == 0) return fail(cudaErrorInvalidValue, "cudaHostRegister");
  if (memory().pinned(address, bytes) != Pinned::kNo)
    return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
  return memory().pin(address, bytes) ? cudaSuccess : fail(cudaErrorMemoryAllocation, "cudaHostRegister");
}
API cudaError_t cudaHostUnregister(void* address) {
  streams().await_all();
  return memory().unpin(address, false) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* address) {
  std::memset(about, 0, sizeof *about);
  about->type = cudaMemoryTypeUnregistered;
  if (memory().is_device(address)) {
    if (!memory().is_live(address, 1)) return cudaSuccess;
    about->type = cudaMemoryTypeDevice;
    about->devicePointer = const_cast<void*>(address);
    return cudaSuccess;
  }
  about->hostPointer = const_cast<void*>(address);
  if (memory().pinned(address, 1) == Pinned::kYes) {
    about->type = cudaMemoryTypeHost;
    about->devicePointer = about->hostPointer;
  } else {
    about->device = -1;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, PART_OF_OP, false);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, PART_OF_OP, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, PART_OF_OP, false);
}
API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill(at, value, bytes, stream, PART_OF_OP);
}
API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  const cudaError_t error = fill(at, value, bytes, nullptr, PART_OF_OP);
  streams().await(streams().ordinary());
  return error;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  static std::mutex mutex;
  static auto* places = new std::unordered_map<const void*, void*>;
  const std::lock_guard<std::mutex> guard(mutex);
  void*& place = (*places)[symbol];
  if (place == nullptr) place = memory().allocate(1 << 16);
  *address = place;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// Streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  *made = reinterpret_cast<cudaStream_t>(streams().make(flags, priority));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++counts[kStubSynchronizations];
  if (is_captured(stream_of(stream))) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  streams().await(stream_of(stream));
  return failure();
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = failure()) return error;
  if (streams().is_idle(stream_of(stream))) return cudaSuccess;
  last_error = cudaErrorNotReady;
  return last_error;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t error = failure()) return error;
  ++counts[kStubWaits];
  Task task;
  task.what = "wait";
  task.wait = point_of(event);
  if (task.wait && !is_planted(settings().lose_wait, lost)) put(stream_of(stream), std::move(task));
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (const cudaError_t error = failure()) return error;
  ++counts[kStubHostFunctions];
  stub_issue(stream, "host function", -1, function, data, nullptr);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  Task task;
  task.what = "callback";
  task.seconds = -1;
  task.run = [stream, callback, data] { callback(stream, cudaSuccess, data); };
  put(stream_of(stream), std::move(task));
  return cudaSuccess;
}

// Graphs of one stream: marks and waits within it have no effect.

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard<std::mutex> guard(streams().mutex());
  if (stream_of(stream)->captured != nullptr) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  stream_of(stream)->captured = new Graph;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard<std::mutex> guard(streams().mutex());
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(stream_of(stream)->captured, nullptr));
  return *graph == nullptr ? fail(cudaErrorIllegalState, "cudaStreamEndCapture") : cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_captured(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                         size_t* count) {
  const bool captured = is_captured(stream_of(stream));
  if (status != nullptr) *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = captured ? stream_of(stream)->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (const cudaError_t error = failure()) return error;
  for (const Task& task : *reinterpret_cast<Graph*>(graph)) streams().put(stream_of(stream), task);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  streams().await_all();
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

// Events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  ++counts[kStubEvents];
  *made = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0});
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --counts[kStubEvents];
  delete event_of(event);
  return failure();
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = failure()) return error;
  ++counts[kStubRecords];
  if (is_captured(stream_of(stream))) return cudaSuccess;
  Task task;
  task.what = "record";
  task.record = std::make_shared<Point>();
  {
    const std::lock_guard<std::mutex> guard(streams().mutex());
    event_of(event)->point = task.record;
  }
  put(stream_of(stream), std::move(task));
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = failure()) return error;
  const PointP point = point_of(event);
  if (!point || streams().is_reached(point)) return cudaSuccess;
  last_error = cudaErrorNotReady;
  return last_error;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++counts[kStubSynchronizations];
  if (const PointP point = point_of(event)) streams().await(point);
  return failure();
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (const cudaError_t error = failure()) return error;
  const PointP from = point_of(start), to = point_of(end);
  if (!event_of(start)->timed || !event_of(end)->timed || !from || !to)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime of events without a time");
  const std::lock_guard<std::mutex> guard(streams().mutex());
  if (!from->reached || !to->reached) return fail(cudaErrorNotReady, "cudaEventElapsedTime before the events");
  *milliseconds = static_cast<float>((to->at - from->at) * 1e3);
  return cudaSuccess;
}

// Kernels

namespace {
struct Call {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
std::vector<Call>& calls() {
  thread_local auto* one = new std::vector<Call>;
  return *one;
}
}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  if (name != nullptr && std::strstr(name, "spin_kernel") != nullptr) idling = host;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  calls().push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Call call = calls().back();
  calls().pop_back();
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *static_cast<void**>(stream) = call.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                   cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                                 cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                                            cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** arguments) {
  return launch(function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* about, const void*) {
  std::memset(about, 0, sizeof *about);
  about->maxThreadsPerBlock = 1024;
  about->numRegs = 32;
  about->ptxVersion = about->binaryVersion = 90;
  about->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
  *blocks = std::max(1, std::min(32, 2048 / std::max(threads, 1)));
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// Entry points of the driver that PyTorch looks up by name

namespace {
int unknown() {
  static char told;
  return stub_default("an entry point of the driver", &told);
}
}  // namespace

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *found = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"})
    if (*found == nullptr && driver != nullptr) *found = dlsym(driver, (std::string(symbol) + suffix).c_str());
  if (*found == nullptr) *found = reinterpret_cast<void*>(&unknown);
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** found, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(symbol, found, CUDART_VERSION, flags, status);
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
