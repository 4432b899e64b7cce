// What a step issues beside its ops, a list at a time: see ``CudaDriver.tape`` in driver.py.
//
// By the runtime's API, whose version is that of PyTorch's own runtime: it is found among the libraries that PyTorch has
// loaded. Called by ctypes with the GIL held; nothing here waits for the device where host memory is pinned.
//
// A transfer to or from a file is posted by a host function to the thread of its lane, and the stream then waits until
// the lane has counted it (cuStreamWaitValue32 of the driver's API). That wait is for nothing that CUDA itself has to
// do, and all that comes before or after a transfer is put in order by its stream and by events, as the driver's manual
// asks for it: no two streams can wait for each other by it.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <new>
#include <thread>

#include "issue.h"
#include "lanes.h"

namespace {

// cuStreamWaitValue32: holds a stream up until a number in memory, which may go round, is at least another.
using WaitValue = int (*)(cudaStream_t, unsigned long long address, uint32_t value, unsigned flags);
constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ

WaitValue wait_value() {
  static const auto found = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<WaitValue>(driver == nullptr ? nullptr : dlsym(driver, "cuStreamWaitValue32_v2"));
  }();
  return found;
}

cudaError_t post(Posted& transfer, cudaStream_t stream) {
  Lane& lane = *transfer.lane;
  const cudaError_t status = cudaLaunchHostFunc(stream, outofcore_post, &transfer);
  if (status != cudaSuccess) return status;
  // The numbers of an error are the same in both APIs.
  return static_cast<cudaError_t>(
      wait_value()(stream, reinterpret_cast<unsigned long long>(lane.seen), ++lane.issued, kAtLeast));
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

// A transfer that takes its time, and how far its lane was when the stream had waited for it.
struct Try {
  Posted pause;
  const Lane* lane;
  uint32_t count;
};

void glance(void* data) noexcept {
  auto& found = *static_cast<Try*>(data);
  found.count = found.lane->done->load(std::memory_order_acquire);
}

bool behind(uint32_t count, uint32_t wanted) { return static_cast<int32_t>(count - wanted) < 0; }

}  // namespace

// 0: all are issued. Else the runtime's error of the first that could not be, and the rest are not; the error is taken
// out of the runtime's memory, where the next kernel's check would take it for its own.
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

// Whether a stream can wait for a lane: it is let wait for a lane that takes its time, and asked what it has seen after.
// Blocks for some milliseconds. A driver may lack the call, refuse it, or let streams pass.
EXPORT int outofcore_lane_holds(Lane* lane, void* on) noexcept {
  auto stream = static_cast<cudaStream_t>(on);
  if (wait_value() == nullptr) return 0;
  void* count = lane->done;
  lane->seen = count;
  if (cudaHostGetDevicePointer(&lane->seen, count, 0) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  // On a device that has failed neither may ever be called for, or much later: then they are left.
  auto* tried = new (std::nothrow) Try();
  if (tried == nullptr) return 0;
  tried->pause.descriptor = kPause;
  tried->pause.offset = 3000;
  tried->pause.lane = lane;
  tried->lane = lane;
  tried->count = lane->issued;
  cudaError_t status = post(tried->pause, stream);
  if (status == cudaSuccess) status = cudaLaunchHostFunc(stream, glance, tried);
  const cudaError_t reached = cudaStreamSynchronize(stream);
  if (status != cudaSuccess || reached != cudaSuccess) cudaGetLastError();
  if (reached != cudaSuccess) return 0;
  while (behind(lane->done->load(std::memory_order_acquire), lane->issued)) std::this_thread::yield();
  const bool holds = status == cudaSuccess && !behind(tried->count, lane->issued);
  delete tried;
  return holds;
}

EXPORT const char* outofcore_cuda_error(int status) noexcept {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
