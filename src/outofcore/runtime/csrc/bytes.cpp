// Transfers, checksums and page states for Python: see file_io.py, checksums.py and file_ranges.py.

#include "checksum.h"
#include "file_io.h"
#include "page_map.h"

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void outofcore_transfer(void* transfer) noexcept {
  outofcore::transfer(*static_cast<outofcore::Transfer*>(transfer));
}

// `before`: see sum_of.
EXPORT uint64_t outofcore_sum(const char* bytes, int64_t count, int64_t before) noexcept {
  return outofcore::sum_of(bytes, count, outofcore::kLine, before);
}

EXPORT uint64_t outofcore_sampled(const char* bytes, int64_t count, int64_t slot) noexcept {
  return outofcore::sampled_sum(bytes, count, slot);
}

// Whether a page of a private file mapping was written to. Returns -1 if the kernel does not report it.
EXPORT int outofcore_any_written(const char* at, int64_t bytes) noexcept {
  const outofcore::PageMap pages;
  return pages.is_readable() ? pages.any_written(at, bytes) : -1;
}
