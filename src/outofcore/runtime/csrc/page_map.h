// What pages of this process are, as the kernel tells (https://docs.kernel.org/admin-guide/mm/pagemap.html).

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

  // Whether the kernel's page map can be read; it cannot where /proc is hidden.
  bool is_readable() const { return file_ >= 0; }
  // Whether a page of a stretch is in memory or swapped out; true where the kernel does not tell.
  bool any_mapped(const char* at, int64_t bytes) const {
    return any(at, bytes, [](uint64_t page) { return (page & kThere) != 0; });
  }
  // Whether a page of a private mapping of a file is no longer the file's, since somebody wrote to it.
  bool any_written(const char* at, int64_t bytes) const {
    return any(at, bytes, [](uint64_t page) { return (page & kThere) != 0 && (page & kOfFile) == 0; });
  }

 private:
  static constexpr uint64_t kThere = uint64_t{3} << 62, kOfFile = uint64_t{1} << 61;

  template <class Test>
  bool any(const char* at, int64_t bytes, Test&& test) const {
    if (file_ < 0) return true;
    constexpr int64_t kAtOnce = 2048;  // entries of eight bytes
    uint64_t pages[kAtOnce];
    const auto first = reinterpret_cast<uintptr_t>(at);
    const auto end = static_cast<int64_t>((first + static_cast<uintptr_t>(bytes) + kPage - 1) / kPage);
    for (auto page = static_cast<int64_t>(first / kPage); page < end; page += kAtOnce) {
      const int64_t count = std::min(kAtOnce, end - page), size = count * static_cast<int64_t>(sizeof(uint64_t));
      if (pread(file_, pages, static_cast<size_t>(size), page * static_cast<int64_t>(sizeof(uint64_t))) != size)
        return true;
      if (std::any_of(pages, pages + count, test)) return true;
    }
    return false;
  }

  // Of the process that opens it, whichever looks.
  int file_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
};

}  // namespace outofcore
