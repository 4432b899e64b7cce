// The CPU part of allocator.h: PyTorch's CPU allocator, and how an arena's memory is released.

#pragma once

#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

#include <cstdint>

namespace device {

enum class MemoryOwner { kOurs, kStock, kForwarded };

// Streams do not use CPU memory, so `record_stream` is never called.
struct Allocator : c10::Allocator {
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 protected:
  virtual MemoryOwner record_stream(const c10::DataPtr& data, void* stream) = 0;
};

inline c10::Allocator* installed_allocator() { return c10::GetCPUAllocator(); }
inline void install(c10::Allocator* allocator) { c10::SetCPUAllocator(allocator); }
// Whether it is PyTorch's own allocator, which uses malloc.
inline bool is_pytorchs(c10::Allocator* allocator) { return allocator == c10::GetDefaultCPUAllocator(); }
inline void set_stock(Allocator&, c10::Allocator*) {}
inline c10::Device current() { return c10::Device(c10::DeviceType::CPU); }

// The opener of an arena on the CPU has mapped its memory.
inline void release_arena(c10::Allocator*, uintptr_t base, uintptr_t end) {
  munmap(reinterpret_cast<void*>(base), end - base);
}

}  // namespace device
