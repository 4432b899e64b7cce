// The allocator under PyTorch, for compiled steps and eager loops, on the CPU or (OUTOFCORE_CUDA) on CUDA. A request
// goes to the arena of a compiled step if its thread is in a scope (arena.cpp), else to an eager loop if it counts
// there (follow/allocator.h), else to PyTorch's own allocator, which then also frees it.

#pragma once

#ifdef OUTOFCORE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif
#include "locks.h"

#include <atomic>
#include <cstddef>
#include <mutex>

namespace allocation {

using Mutex = locks::Ranked<std::mutex, locks::kAllocator>;
inline Mutex& mutex = *new Mutex;  // never destroyed: tensors outlive static destructors

enum class Installed : int {
  kDone = 0,
  kNoDeleter = 1,  // PyTorch's allocator cannot be wrapped
  kAnother = 2,    // PyTorch's allocator has changed since the first installation
  kOutranked = 3,  // another one was installed with a higher priority
  kFailed = 4,     // an exception was thrown
};

inline std::atomic<c10::Allocator*> stock{nullptr};

// Installs our allocator under PyTorch. Each call that returns kDone needs one `uninstall`.
Installed install() noexcept;
void uninstall() noexcept;
bool is_installed();
c10::Allocator& our_allocator();

// Frees memory of any owner: the deleter of raw allocations and of loops' memory.
void release(void* pointer) noexcept;

}  // namespace allocation

namespace compiled_step {

// Serves a request in a scope, or one that is recorded. Null if it is neither.
void* serve(int64_t bytes);
void release(void* pointer) noexcept;
// Releases memory of an arena. Returns false if it is not an arena's.
bool take_back(void* pointer) noexcept;
bool has(void* pointer);

}  // namespace planned

namespace eager_loop {

// Serves a request that counts in an eager loop. Returns false if it does not.
bool serve(size_t bytes, c10::DataPtr& memory);
bool take_back(void* pointer) noexcept;
device::MemoryOwner record_stream(const c10::DataPtr& data, void* stream);

}  // namespace followed
