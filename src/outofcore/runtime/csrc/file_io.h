// Moves bytes between memory and a file, with or without the page cache, and between memory and memory. Direct I/O
// needs page-aligned addresses, offsets and lengths; the rest goes through a page-aligned bounce buffer.

#pragma once

#include "pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace outofcore {

// Use of the system's page cache. As `Cache` in file_io.py.
enum Cache : int32_t {
  kPast,     // bypassed: direct I/O, or the same in whole pages
  kDropped,  // dropped after use
  kKept,
};

// As `Transfer` in file_io.py.
struct Transfer {
  int64_t address, bytes, offset;  // a write's offset is page-aligned, and its last page belongs to the slot alone
  int32_t descriptor, writes;  // of a file; `kMemory`: `offset` is an address
  Cache cache;
  int32_t failure;  // 0, `kEnded`, or an errno
  int64_t done;     // bytes moved
  char* bounce;     // `kBounce` page-aligned bytes; may be null if address, bytes and offset are page-aligned
};
static_assert(sizeof(Transfer) == 7 * sizeof(int64_t), "Python fills it in by the same layout");

constexpr int32_t kMemory = -1;
constexpr int32_t kEnded = -1;  // end of file, or a write of 0 bytes
constexpr int64_t kBounce = int64_t{2} << 20;

namespace file_io {

struct Outcome {
  int64_t bytes;
  int32_t failure;
};

// Moves `count` bytes by calls that may move fewer. A read may end at the end of the file after `min_bytes`.
inline Outcome move_all(const Transfer& t, char* memory, int64_t count, int64_t min_bytes, int64_t offset) {
  int64_t moved_bytes = 0;
  for (bool stuck = false; moved_bytes < min_bytes;) {
    const auto remaining = static_cast<size_t>(count - moved_bytes);
    const ssize_t moved = t.writes ? pwrite(t.descriptor, memory + moved_bytes, remaining, offset + moved_bytes)
                                   : pread(t.descriptor, memory + moved_bytes, remaining, offset + moved_bytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return {moved_bytes, errno};
    // Direct I/O can resume only at a page boundary. Retry once if a short call does not reach the first.
    const int64_t advanced = moved_bytes + moved >= min_bytes || t.cache != kPast ? moved : moved / kPage * kPage;
    if (moved == 0 || (advanced == 0 && stuck)) return {moved_bytes + moved, kEnded};
    stuck = advanced == 0;
    moved_bytes += advanced;
  }
  return {min_bytes, 0};
}

}  // namespace file_io

inline void transfer(Transfer& t) noexcept {
  t.done = 0;
  t.failure = 0;
  if (t.descriptor == kMemory) {
    auto *inside = reinterpret_cast<void*>(t.address), *outside = reinterpret_cast<void*>(t.offset);
    std::memcpy(t.writes ? outside : inside, t.writes ? inside : outside, static_cast<size_t>(t.bytes));
    t.done = t.bytes;
    return;
  }
  while (t.done < t.bytes) {
    auto* memory = reinterpret_cast<char*>(t.address) + t.done;
    const int64_t offset = t.offset + t.done, remaining = t.bytes - t.done;
    const int64_t before = offset % kPage, within = reinterpret_cast<uintptr_t>(memory) % kPage;  // within their pages
    file_io::Outcome moved{};
    if (t.cache != kPast || (before == 0 && within == 0 && remaining >= kPage)) {
      const int64_t count = t.cache == kPast ? remaining / kPage * kPage : remaining;
      moved = file_io::move_all(t, memory, count, count, offset);
    } else if (t.bounce == nullptr || (t.writes && before != 0)) {
      moved.failure = EINVAL;
    } else {
      // If both have the same offset within a page, only the first page needs the bounce buffer.
      const int64_t count = std::min(remaining, (before == within ? kPage : kBounce) - before);
      const int64_t pages = whole_pages(before + count);
      if (t.writes) std::memcpy(t.bounce, memory, static_cast<size_t>(count));
      moved = file_io::move_all(t, t.bounce, pages, t.writes ? pages : before + count, offset - before);
      moved.bytes = std::clamp(moved.bytes - before, int64_t{0}, count);
      if (!t.writes) std::memcpy(memory, t.bounce + before, static_cast<size_t>(moved.bytes));
    }
    t.done += moved.bytes;
    t.failure = moved.failure;
    if (t.failure != 0) return;
  }
  const int64_t before = t.offset % kPage;
  if (t.cache == kDropped && t.bytes > 0)
    posix_fadvise(t.descriptor, t.offset - before, whole_pages(before + t.bytes), POSIX_FADV_DONTNEED);
}

}  // namespace outofcore
