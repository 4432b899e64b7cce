// What the libraries of the stub share: made in cudart.cpp, and exported by the stub's libcudart under these names.

#pragma once

#include <cstddef>
#include <cstdint>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

// Work for a stream, of so many seconds of the device's time. ``run`` (may be null) is called with ``data`` when its turn
// has come, in a graph each time; ``drop`` (may be null) when it will not come again.
void stub_issue(void* stream, const char* what, double seconds, void (*run)(void*), void* data, void (*drop)(void*));
// Where the host finds the memory behind an address that kernels may read and write, on the device or pinned; else null.
void* stub_memory(const void* address);
int stub_is_device(const void* address);
// Waits until a stream has nothing left to do.
void stub_synchronize(void* stream);
// Called by every entry point that is not written: names it once. Returns 0, success.
int stub_default(const char* name, char* told);
// While it is on, copies within the device and memsets that PyTorch itself issues on this thread do nothing: they are part
// of an op whose results are computed as a whole.
void stub_suppress(int on);
// Sets this thread's last error and returns it.
int stub_error(int code, const char* what);
// The error of a device that has failed, which nothing gets it out of; else 0.
int stub_failure();
// From the kernel on that comes after so many others the device fails, as it comes to that one; below 0: not any more.
void stub_fail_after(int64_t kernels);

// What stub_count counts.
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
  kStubDeviceBytes,   // in use now
  kStubPinnedPieces,  // now
  kStubStreams,       // ever made
  kStubEvents,        // now
  kStubCounts,
};
uint64_t stub_count(int which);

}  // extern "C"
