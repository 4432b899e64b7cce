// Moves bytes between memory and a file, past the page cache or through it, and between memory and memory.
//
// Direct I/O wants addresses, offsets and lengths in whole pages. What it cannot move in place (memory that begins within a
// page, a range of somebody else's file, the end of either) goes through a buffer that begins at a page.

#pragma once

#include "pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace outofcore {

// As ``Cache`` in file_io.py: what becomes of a file's pages in the system's cache.
enum Cache : int32_t {
  kPast,     // there are none: direct I/O, or what does the same with whole pages
  kDropped,  // they are not needed any more
  kKept,
};

// As ``Transfer`` in file_io.py.
struct Transfer {
  int64_t address, bytes, offset;  // of a write the offset is a page's, and the last page is all its own
  int32_t descriptor, writes;  // of a file; ``kMemory``: offset is an address
  Cache cache;
  int32_t failure;  // 0: done; ``kEnded``; else what errno said
  int64_t done;     // bytes that were moved
  char* bounce;     // ``kBounce`` bytes that begin at a page; may be null if address, bytes and offset are whole pages
};
static_assert(sizeof(Transfer) == 7 * sizeof(int64_t), "Python fills it in by the same layout");

constexpr int32_t kMemory = -1;
constexpr int32_t kEnded = -1;  // the file ended, or took nothing
constexpr int64_t kBounce = int64_t{2} << 20;

namespace file_io {

struct Moved {
  int64_t bytes;
  int32_t failure;
};

// Moves `count` bytes by calls that may move fewer; a read may end after `least`, where the file does.
inline Moved all(const Transfer& t, char* memory, int64_t count, int64_t least, int64_t offset) {
  int64_t done = 0;
  for (bool stuck = false; done < least;) {
    const auto left = static_cast<size_t>(count - done);
    const ssize_t moved = t.writes ? pwrite(t.descriptor, memory + done, left, offset + done)
                                   : pread(t.descriptor, memory + done, left, offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return {done, errno};
    // After a short one, direct I/O can go on from a page boundary only. One that does not come to the first is tried
    // once more.
    const int64_t kept = done + moved >= least || t.cache != kPast ? moved : moved / kPage * kPage;
    if (moved == 0 || (kept == 0 && stuck)) return {done + moved, kEnded};
    stuck = kept == 0;
    done += kept;
  }
  return {least, 0};
}

}  // namespace file_io

// Fills in `failure` and `done`.
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
    const int64_t offset = t.offset + t.done, left = t.bytes - t.done;
    const int64_t before = offset % kPage, within = reinterpret_cast<uintptr_t>(memory) % kPage;  // in their pages
    file_io::Moved moved{};
    if (t.cache != kPast || (before == 0 && within == 0 && left >= kPage)) {
      const int64_t count = t.cache == kPast ? left / kPage * kPage : left;
      moved = file_io::all(t, memory, count, count, offset);
    } else if (t.bounce == nullptr || (t.writes && before != 0)) {
      moved.failure = EINVAL;
    } else {
      // Where both lie alike in their pages, only the first one goes this way.
      const int64_t count = std::min(left, (before == within ? kPage : kBounce) - before);
      const int64_t pages = whole_pages(before + count);
      if (t.writes) std::memcpy(t.bounce, memory, static_cast<size_t>(count));
      moved = file_io::all(t, t.bounce, pages, t.writes ? pages : before + count, offset - before);
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
