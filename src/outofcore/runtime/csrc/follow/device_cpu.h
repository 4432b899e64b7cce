// The CPU part of paging.cpp. The host accesses this memory itself, so work is complete when a call returns. Threads of
// paging.cpp make overlapped copies.

#pragma once

#include "../device_cpu.h"
#include "homes.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace follow {

class Device {
 public:
  explicit Device(int) {}

  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;
  static constexpr c10::DispatchKey kKernels = c10::DispatchKey::CPU;
  // Bytes of addresses per byte of budget: enough that no request fails because free addresses are fragmented.
  static constexpr int64_t kAddresses = 64;
  // Additional addresses if the budget may be exceeded: more than the machine has memory.
  static int64_t addresses_to_grow() { return int64_t{4} * sysconf(_SC_PHYS_PAGES) * outofcore::kPage; }
  // Whether streams order work on memory. If not, work is complete when a call returns.
  static constexpr bool kStreams = false;
  static constexpr bool kReadable = true;

  using Homes = follow::Homes;
  // Pending work on a block's memory and slot: always empty.
  struct Order {};
  struct Moment {};
  using Span = std::pair<Moment, Moment>;

  static c10::Device ours() { return c10::Device(c10::DeviceType::CPU); }
  static bool is_ours(c10::Device device) { return device.type() == c10::DeviceType::CPU; }
  static bool is_current() { return true; }
  static void enter() {}

  // Whether rerunning an op on the same operands gives the same bits.
  static bool repeats(const c10::OperatorHandle&) { return true; }
  // Whether kernels give the same bits for a copy of a small storage at another address.
  static bool copies_alike(const c10::StorageImpl&) { return true; }
  // The stream of an op. While an `InOrder` lives, ops run on that stream.
  struct Stream {};
  static Stream stream() { return {}; }
  struct InOrder {
    explicit InOrder(Stream) {}
    ~InOrder() {}  // avoids a warning about an unused variable
  };

  static bool picks_by_trying() { return false; }
  // Small requests are counted one by one.
  static constexpr int64_t kSegment = 0;
  static int64_t bytes_of_segments() { return 0; }
  static int64_t free_in_segments() { return 0; }
  static int64_t min_budget_for(int64_t min_bytes, int64_t) { return min_bytes; }

  // Only the first `core` bytes and large blocks get huge pages: khugepaged would fill unused parts of shared ones.
  char* reserve(int64_t bytes, int64_t core) {
    constexpr int64_t kHuge = Extents::kHuge;  // alignment of huge pages
    bytes = outofcore::whole_pages(bytes);
    constexpr int kHow = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, kHow, -1, 0);
    strict_ = mapped == MAP_FAILED && errno == ENOMEM;
    if (strict_) mapped = mmap(nullptr, bytes + kHuge, PROT_NONE, kHow, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "outofcore: ", bytes, " bytes of addresses could not be mapped for the arena (",
                std::strerror(errno), "); lift the limit on address space (ulimit -v), or give a smaller budget");
    const int64_t before = (kHuge - static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped) % kHuge)) % kHuge;
    char* base = static_cast<char*>(mapped) + before;
    if (before > 0) munmap(mapped, before);
    munmap(base + bytes, kHuge - before);
    base_ = base;
    size_ = bytes;
    core_ = core;
    try {
      open_up(base, core);
    } catch (...) {
      unreserve(base, bytes);
      throw;
    }
    start_over();
    return base;
  }
  static void unreserve(char* base, int64_t bytes) {
    if (base != nullptr) munmap(base, bytes);
  }
  void discard(char* at, int64_t bytes) {
    madvise(at, bytes, MADV_DONTNEED);
    // Under strict overcommit unused addresses count unless they are not writable.
    char* behind = std::max(at, base_ + core_);
    if (strict_ && behind < at + bytes)
      mmap(behind, at + bytes - behind, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    want_small(at, bytes);
  }
  void start_over() {
    madvise(base_, core_, MADV_HUGEPAGE);
    madvise(base_ + core_, size_ - core_, MADV_NOHUGEPAGE);
    huge_ = {{0, core_}};
  }
  // Collapses a range into huge pages (Linux 6.1 or later) in one call, because each waits for all processors.
  void collapse(char* at, int64_t bytes) {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, missing in older headers
    want_huge(at - base_, at - base_ + bytes);
    madvise(at, bytes, kCollapse);
  }

  // Hooks for a block's memory: allocated, freed, about to be used, used. Throw c10::OutOfMemoryError.
  void take(Order&, char* at, int64_t bytes) {
    open_up(at, bytes);
    const int64_t begin = at - base_;
    if (bytes >= kLeastHuge) want_huge((begin + kHuge - 1) / kHuge * kHuge, (begin + bytes) / kHuge * kHuge);
  }
  void give(Order&, const char*, int64_t) {}
  void use(Order&) {}
  void mark_used(Order&) {}
  // The same hooks for its slot.
  void take_slot(Order&, const char*, int64_t) {}
  void give_slot(Order&, const char*, int64_t) {}
  void use_slot(Order&) {}
  void mark_slot_used(Order&) {}
  // Unobserved code has run and may have written to windows; `more`: it may do so at any time from now on.
  void note_unobserved(bool) {}
  void record(Order&, void*) {}

  static constexpr const char* kNoMemory = "outofcore: the system gave no memory: ";
  static constexpr const char* kLessMemory = " bytes were requested; end other programs, or use smaller batches";

  // Copy between a block's memory and its slot. Throw c10::Error.
  void save(Homes& homes, const Slot& slot, Order&, const char* from) {
    homes.of(slot).write(from, slot.offset, slot.bytes);
  }
  void load(Homes& homes, const Slot& slot, Order&, char* to) { homes.read(slot, to); }
  // Copies foreign memory to a slot through a bounce buffer, which suits direct I/O and maps no page of the window.
  void save_foreign(Homes& homes, const Slot& slot, Order&, const char* from, int64_t bytes) {
    constexpr int64_t kBytes = outofcore::kBounce;
    void* buffer = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, buffer != MAP_FAILED, kNoMemory, kBytes, kLessMemory);
    const std::unique_ptr<void, void (*)(void*)> unmapped(buffer, [](void* at) { munmap(at, kBytes); });
    homes.of(slot).write(from, slot.offset, bytes, static_cast<char*>(buffer));
  }
  void copy(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }
  void move(Order&, char* to, const char* from, int64_t bytes) {
    open_up(to, bytes);
    std::memcpy(to, from, bytes);
  }
  void fill(char* at, int64_t bytes) { std::memset(at, 0xAB, bytes); }
  // Keeps memory alive until issued work is complete.
  void retire(const c10::DataPtr&) {}

  // An evicted block with a fixed address is covered by a mapping of its slot.
  static constexpr bool kFixedLeave = true;
  void cover(Homes& homes, const Slot& slot, char* at, bool privately) {
    homes.of(slot).show(at, slot.offset, slot.bytes, privately);
  }
  // Returns false if the mapping is still there.
  bool uncover(char* at, int64_t bytes) {
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      return false;
    want_small(at, bytes);
    return true;
  }
  // Replaces a slot's mapping by memory atomically: other threads may read it. Throws c10::Error and leaves the
  // mapping.
  void uncover_with(Homes& homes, const Slot& slot, char* at, int64_t bytes) {
    void* filled = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, filled != MAP_FAILED, kNoMemory, bytes, kLessMemory);
    std::unique_ptr<void, std::function<void(void*)>> unmapped(filled, [bytes](void* at) { munmap(at, bytes); });
    homes.read(slot, static_cast<char*>(filled));
    TORCH_CHECK_WITH(OutOfMemoryError,
                     mremap(filled, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED, kNoMemory, bytes,
                     kLessMemory);
    unmapped.release();
    want_small(at, bytes);
  }

  void begin_watch(Homes& homes, const Slot& slot) { homes.begin_watch(slot); }
  bool was_touched(Homes& homes, const Slot& slot) { return homes.was_touched(slot); }
  bool can_detect_touches(const Homes& homes) const { return homes.can_detect_touches(); }

  // The host's clock times ops instead.
  Moment moment() { return {}; }
  void restart(Moment) {}
  void forget(const Span&) {}
  std::vector<int64_t> nanos_between(const std::vector<Span>&) { return {}; }
  int64_t nanos_of_copy(char*, char*, int64_t, bool) { return 0; }

 private:
  static constexpr int64_t kHuge = Extents::kHuge, kLeastHuge = 2 * kHuge;
  // The kernel splits a mapping at each range of either kind; a process may have 65,530 mappings.
  static constexpr size_t kMostStretches = 8192;

  // Under strict overcommit (vm.overcommit_memory=2, ulimit -d) only the core and blocks are writable.
  void open_up(char* at, int64_t bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, !strict_ || mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0, kNoMemory, bytes,
                     kLessMemory);
  }

  void want_huge(int64_t begin, int64_t end) {
    auto it = huge_.upper_bound(begin);
    if (it != huge_.begin() && std::prev(it)->second >= end) return;
    if (begin >= end || huge_.size() >= kMostStretches) return;
    forget_huge(begin, end);
    try {
      huge_[begin] = end;
    } catch (const std::bad_alloc&) {
      return;
    }
    madvise(base_ + begin, end - begin, MADV_HUGEPAGE);
  }
  // Applies to every huge page that overlaps the range. Does not throw, because destructors return memory.
  void want_small(const char* at, int64_t bytes) {
    const int64_t begin = (at - base_) / kHuge * kHuge;
    const int64_t end = std::min((at - base_ + bytes + kHuge - 1) / kHuge * kHuge, size_);
    madvise(base_ + begin, end - begin, MADV_NOHUGEPAGE);
    forget_huge(begin, end);
    if (huge_.size() >= 2 * kMostStretches) no_huge();
  }
  void forget_huge(int64_t begin, int64_t end) {
    auto it = huge_.upper_bound(begin);
    if (it != huge_.begin()) --it;
    while (it != huge_.end() && it->first < end) {
      const auto [from, to] = *it;
      if (to <= begin) {
        ++it;
        continue;
      }
      it = huge_.erase(it);
      try {
        if (from < begin) huge_[from] = begin;
        if (to > end) huge_[end] = to;
      } catch (const std::bad_alloc&) {
        return no_huge();
      }
    }
  }
  void no_huge() {
    madvise(base_, size_, MADV_NOHUGEPAGE);
    huge_.clear();
  }

  char* base_ = nullptr;
  int64_t size_ = 0, core_ = 0;
  bool strict_ = false;              // see `open_up`
  std::map<int64_t, int64_t> huge_;  // ranges that may have huge pages: end by begin
};

}  // namespace follow
