// Memory of the stub's device, and host memory that it may read, with CUDA's limits and rules.
//
// The host cannot access the device addresses that PyTorch gets: host code that does so crashes, as on a GPU. The same
// pages are mapped a second time for the copies and kernels of the stub.

#pragma once

#include "settings.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace stub {

// Whether a range of host memory is pinned.
enum class Pinned {
  kNo,
  kYes,
  kPartly,  // or in two pieces; CUDA does not copy across their seam
};

class Memory {
 public:
  // Returns null if there is no room.
  void* allocate(size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    open();
    bytes = std::max<size_t>((bytes + kUnit - 1) / kUnit * kUnit, kUnit);
    const size_t align = bytes >= kLarge ? 2 * kLarge : kUnit;  // as CUDA aligns
    size_t at = 0;
    for (const auto& [offset, count] : blocks_) {
      at = (at + align - 1) / align * align;
      if (at + bytes <= offset) break;
      at = offset + count;
    }
    at = (at + align - 1) / align * align;
    if (at + bytes > settings().memory) return nullptr;
    blocks_[at] = bytes;
    used_ += bytes;
    if (settings().poison) std::memset(inner_ + at, 0xff, bytes);
    return outer_ + at;
  }
  bool release(const void* address) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!is_device(address)) return false;
    const auto found = blocks_.find(offset_of(address));
    if (found == blocks_.end()) return false;
    madvise(inner_ + found->first, found->second, MADV_REMOVE);
    used_ -= found->second;
    blocks_.erase(found);
    return true;
  }
  size_t used() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return used_;
  }
  bool is_device(const void* address) const {
    return outer_ != nullptr && address >= outer_ && address < outer_ + settings().memory;
  }
  // Whether all of the bytes are in one allocation.
  bool is_live(const void* address, size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const size_t at = offset_of(address);
    const auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return false;
    const auto& [offset, count] = *std::prev(after);
    return at + bytes <= offset + count;
  }
  // Returns the address for the host of a device address; other addresses are unchanged.
  char* behind(const void* address) const {
    return is_device(address) ? inner_ + offset_of(address) : const_cast<char*>(static_cast<const char*>(address));
  }

  Pinned pinned(const void* address, size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return pinned_at(address, bytes);
  }
  size_t pinned_pieces() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return pinned_.size();
  }
  // Returns null if the limit is reached.
  void* allocate_pinned(size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (pinned_bytes_ + bytes > settings().pinnable) return nullptr;
    void* made = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    pinned_[static_cast<const char*>(made)] = {bytes, true};
    pinned_bytes_ += bytes;
    return made;
  }
  bool pin(const void* address, size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (pinned_bytes_ + bytes > settings().pinnable) return false;
    pinned_[static_cast<const char*>(address)] = {bytes, false};
    pinned_bytes_ += bytes;
    return true;
  }
  // Returns false if the address begins no piece of this kind.
  bool unpin(void* address, bool allocated) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = pinned_.find(static_cast<const char*>(address));
    if (found == pinned_.end() || found->second.allocated != allocated) return false;
    if (allocated) munmap(address, std::max<size_t>(found->second.bytes, 1));
    pinned_bytes_ -= found->second.bytes;
    pinned_.erase(found);
    return true;
  }

 private:
  static constexpr size_t kUnit = 512, kLarge = 1 << 20;
  struct Piece {
    size_t bytes;
    bool allocated;  // by the runtime, not registered by the program
  };

  void open() {
    if (outer_ != nullptr) return;
    const size_t bytes = settings().memory;
    const int file = memfd_create("stub-device", 0);
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
    void* inner = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* outer = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (inner == MAP_FAILED || outer == MAP_FAILED) std::abort();
    close(file);
    inner_ = static_cast<char*>(inner);
    outer_ = static_cast<char*>(outer);
  }
  size_t offset_of(const void* address) const { return static_cast<size_t>(static_cast<const char*>(address) - outer_); }
  Pinned pinned_at(const void* address, size_t bytes) {
    const auto* at = static_cast<const char*>(address);
    const auto after = pinned_.upper_bound(at);
    if (after != pinned_.begin()) {
      const auto& [start, piece] = *std::prev(after);
      if (at < start + piece.bytes) return at + bytes <= start + piece.bytes ? Pinned::kYes : Pinned::kPartly;
    }
    return after != pinned_.end() && after->first < at + bytes ? Pinned::kPartly : Pinned::kNo;
  }

  std::mutex mutex_;
  char* outer_ = nullptr;  // the addresses for PyTorch
  char* inner_ = nullptr;  // the same memory, for the stub
  std::map<size_t, size_t> blocks_;  // in use, by offset
  size_t used_ = 0;
  std::map<const char*, Piece> pinned_;
  size_t pinned_bytes_ = 0;
};

}  // namespace stub
