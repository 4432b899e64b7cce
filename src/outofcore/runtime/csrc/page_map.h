// The kernel's page map of this process (https://docs.kernel.org/admin-guide/mm/pagemap.html).

#pragma once

#include "pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace outofcore {

class PageMap {
 public:
  PageMap() = default;
  ~PageMap() {
    if (file_ >= 0) close(file_);
  }
  PageMap(const PageMap&) = delete;

  // False where /proc is hidden.
  bool is_readable() const { return file_ >= 0; }
  // Whether any page of a range is in memory or swapped out. True if the kernel does not report it.
  bool any_mapped(const char* at, int64_t bytes) const {
    return any(at, bytes, [](uint64_t page) { return (page & kPresent) != 0; });
  }
  // Whether any page of a private file mapping was written to and so is no longer the file's.
  bool any_written(const char* at, int64_t bytes) const {
    return any(at, bytes, [](uint64_t page) { return (page & kPresent) != 0 && (page & kFileBacked) == 0; });
  }

 private:
  static constexpr uint64_t kPresent = uint64_t{3} << 62, kFileBacked = uint64_t{1} << 61;

  template <class Test>
  bool any(const char* at, int64_t bytes, Test&& test) const {
    if (file_ < 0) return true;
    constexpr int64_t kBatch = 2048;  // entries of eight bytes
    uint64_t pages[kBatch];
    const auto first = reinterpret_cast<uintptr_t>(at);
    const auto end = static_cast<int64_t>((first + static_cast<uintptr_t>(bytes) + kPage - 1) / kPage);
    for (auto page = static_cast<int64_t>(first / kPage); page < end; page += kBatch) {
      const int64_t count = std::min(kBatch, end - page), size = count * static_cast<int64_t>(sizeof(uint64_t));
      if (pread(file_, pages, static_cast<size_t>(size), page * static_cast<int64_t>(sizeof(uint64_t))) != size)
        return true;
      if (std::any_of(pages, pages + count, test)) return true;
    }
    return false;
  }

  // Stays the map of the process that opened it, even in a forked child.
  int file_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
};

}  // namespace outofcore
