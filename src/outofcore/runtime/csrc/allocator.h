// The one allocator that goes under PyTorch, for compiled steps and loops alike, on the CPU or (OUTOFCORE_CUDA) on CUDA.
//
// It asks, for each request: is the calling thread in a scope of a compiled step (arena.cpp)? Is a loop followed that the
// request counts in (follow/allocator.h)? Else PyTorch's own allocator serves it, and its memory has that one's deleter.

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
  kAnother = 2,    // it is another one than before
  kOutranked = 3,  // it was installed with a higher priority
  kFailed = 4,     // something threw
};

// PyTorch's allocator, as it was when ours was first installed.
inline std::atomic<c10::Allocator*> stock{nullptr};

// Puts ours under PyTorch. Each call that gives kDone is undone by one of ``uninstall``.
Installed install() noexcept;
void uninstall() noexcept;
bool is_installed();
c10::Allocator& ours();

// The deleter of memory that was asked for without a DataPtr, and of what loops have: it finds out whose it is.
void release(void* pointer) noexcept;

}  // namespace allocation

namespace planned {

// Memory for a request of a thread in a scope, or whose requests are recorded; null: it is neither.
void* serve(int64_t bytes);
// Its deleter.
void release(void* pointer) noexcept;
// Whether memory lay in an arena, and is given back.
bool take_back(void* pointer) noexcept;
// Whether it lies in an arena or was lent to one.
bool has(void* pointer);

}  // namespace planned

namespace followed {

// Memory for a request that counts in a loop; false: no loop has to do with it.
bool serve(size_t bytes, c10::DataPtr& memory);
// Whether memory lay in a loop's arena, and is given back.
bool take_back(void* pointer) noexcept;
device::Whose remember(const c10::DataPtr& data, void* stream);

}  // namespace followed
