// Issues the device work of a step other than its ops, a list at a time: see `CudaDriver.tape` in driver.py. Called
// through ctypes with the GIL; does not wait for the device if host memory is pinned. A host function posts each file
// transfer to its lane's thread, and the stream waits until the lane has counted it (cuStreamWaitValue32). As the
// driver's manual requires, that wait depends on no CUDA work: streams and events order everything around a transfer.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <new>
#include <thread>

#include "issue.h"
#include "lanes.h"

namespace {

// cuStreamWaitValue32: blocks a stream until a value in memory, which may wrap around, reaches another.
using WaitValue = int (*)(cudaStream_t, unsigned long long address, uint32_t value, unsigned flags);
constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ

WaitValue wait_value() {
  static const auto function = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<WaitValue>(driver == nullptr ? nullptr : dlsym(driver, "cuStreamWaitValue32_v2"));
  }();
  return function;
}

cudaError_t post(Posted& transfer, cudaStream_t stream) {
  Lane& lane = *transfer.lane;
  const cudaError_t status = cudaLaunchHostFunc(stream, outofcore_post, &transfer);
  if (status != cudaSuccess) return status;
  // Both APIs have the same error numbers.
  return static_cast<cudaError_t>(
      wait_value()(stream, reinterpret_cast<unsigned long long>(lane.device_count), ++lane.issued, kAtLeast));
}

cudaError_t issue(const Action& action, cudaStream_t stream) {
  switch (action.kind) {
    case kWait:
      return cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(action.to), 0);
    case kRecord:
      return cudaEventRecord(static_cast<cudaEvent_t>(action.to), stream);
    case kCopy:
      return cudaMemcpyAsync(action.to, action.of, static_cast<size_t>(action.bytes), cudaMemcpyDefault, stream);
    case kTransfer: {
      auto& transfer = *static_cast<Posted*>(action.to);
      if (transfer.lane == nullptr) return cudaLaunchHostFunc(stream, outofcore_transfer, &transfer);
      return post(transfer, stream);
    }
  }
  return cudaErrorInvalidValue;
}

// A slow transfer, and its lane's count after the stream waited for it.
struct WaitProbe {
  Posted pause;
  const Lane* lane;
  uint32_t count;
};

void read_count(void* data) noexcept {
  auto& probe = *static_cast<WaitProbe*>(data);
  probe.count = probe.lane->completed->load(std::memory_order_acquire);
}

bool is_behind(uint32_t count, uint32_t target) { return static_cast<int32_t>(count - target) < 0; }

}  // namespace

// Returns 0 or the first error, which is cleared: the next kernel's check would report it.
EXPORT int outofcore_issue(const Action* actions, int64_t count, void* const* streams) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const cudaError_t status = issue(actions[i], static_cast<cudaStream_t>(streams[actions[i].stream]));
    if (status != cudaSuccess) {
      cudaGetLastError();
      return static_cast<int>(status);
    }
  }
  return 0;
}

// Whether streams can wait for a lane, tested with a lane that pauses. Blocks for some milliseconds. A driver may lack
// the call, refuse it, or not block the stream.
EXPORT int outofcore_lane_holds(Lane* lane, void* on) noexcept {
  auto stream = static_cast<cudaStream_t>(on);
  if (wait_value() == nullptr) return 0;
  void* count = lane->completed;
  lane->device_count = count;
  if (cudaHostGetDevicePointer(&lane->device_count, count, 0) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  // On a failed device the callbacks may run much later or never. The probe is then leaked.
  auto* probe = new (std::nothrow) WaitProbe();
  if (probe == nullptr) return 0;
  probe->pause.descriptor = kPause;
  probe->pause.offset = 3000;
  probe->pause.lane = lane;
  probe->lane = lane;
  probe->count = lane->issued;
  cudaError_t status = post(probe->pause, stream);
  if (status == cudaSuccess) status = cudaLaunchHostFunc(stream, read_count, probe);
  const cudaError_t sync_status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess || sync_status != cudaSuccess) cudaGetLastError();
  if (sync_status != cudaSuccess) return 0;
  while (is_behind(lane->completed->load(std::memory_order_acquire), lane->issued)) std::this_thread::yield();
  const bool holds = status == cudaSuccess && !is_behind(probe->count, lane->issued);
  delete probe;
  return holds;
}

EXPORT const char* outofcore_cuda_error(int status) noexcept {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
