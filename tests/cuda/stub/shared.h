// The interface between the stub's libraries: defined in cudart.cpp, exported by the stub's libcudart.

#pragma once

#include <cstddef>
#include <cstdint>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

// A task for a stream that takes ``seconds`` of device time. ``run`` (may be null) is called with ``data`` on its turn,
// for a graph at each launch; ``drop`` (may be null) after the last call.
void stub_issue(void* stream, const char* what, double seconds, void (*run)(void*), void* data, void (*drop)(void*));
// Returns the host address of memory that kernels may access, on the device or pinned; else null.
void* stub_memory(const void* address);
int stub_is_device(const void* address);
// Waits until a stream is idle.
void stub_synchronize(void* stream);
// Called by every entry point that the stub lacks: prints its name once. Returns 0, success.
int stub_default(const char* name, char* told);
// While it is on, copies within the device and memsets of PyTorch on this thread do not run: they are part of an op
// that is computed as a whole.
void stub_suppress(int on);
// Sets this thread's last error and returns it.
int stub_error(int code, const char* what);
// The permanent error of a failed device; else 0.
int stub_failure();
// Lets the device fail at the kernel after ``kernels`` others; below 0: never.
void stub_fail_after(int64_t kernels);

// The counters of stub_count.
enum StubCount {
  kStubLaunches,
  kStubCopies,
  kStubCopiedBytes,
  kStubRecords,
  kStubWaits,
  kStubSynchronizations,
  kStubPageableCopies,
  kStubAllocations,
  kStubFrees,
  kStubHostFunctions,
  kStubMemsets,
  kStubDeviceBytes,   // currently in use
  kStubPinnedPieces,  // currently
  kStubStreams,       // ever created
  kStubEvents,        // currently
  kStubCounts,
};
uint64_t stub_count(int which);

}  // extern "C"
