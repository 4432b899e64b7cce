// What allocator.h needs to know of the CPU: its allocator in PyTorch, and where an arena's memory goes back to.

#pragma once

#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

#include <cstdint>

namespace device {

enum class Whose { kOurs, kStocks, kPassedOn };

// No streams use memory of the CPU, so nobody asks whose it is.
struct Allocator : c10::Allocator {
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 protected:
  virtual Whose remember(const c10::DataPtr& data, void* stream) = 0;
};

inline c10::Allocator* installed() { return c10::GetCPUAllocator(); }
inline void install(c10::Allocator* allocator) { c10::SetCPUAllocator(allocator); }
// Whether it is PyTorch's own, whose memory is malloc's.
inline bool is_pytorchs(c10::Allocator* allocator) { return allocator == c10::GetDefaultCPUAllocator(); }
inline void beneath(Allocator&, c10::Allocator*) {}
inline c10::Device current() { return c10::Device(c10::DeviceType::CPU); }

// An arena on the CPU is mapped by whoever opens it.
inline void give_back(c10::Allocator*, uintptr_t base, uintptr_t end) {
  munmap(reinterpret_cast<void*>(base), end - base);
}

}  // namespace device
