// One transfer between a file and host memory, for a stream of CUDA: see cuda/transfers.py.
//
// CUDA calls this on a thread of its own, in the order of the stream: it takes neither the GIL nor a lock, and calls
// nothing of CUDA.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace {

// As ``Transfer`` in cuda/transfers.py.
struct Transfer {
  int64_t address, bytes, offset;
  int32_t descriptor, writes, forgets;
  int32_t failure;  // 0: done; -1: the file ended; else what errno said
  int64_t done;     // bytes that were moved
};
static_assert(sizeof(Transfer) == 6 * sizeof(int64_t), "Python fills it in by the same layout");

constexpr int64_t kPage = 4096, kMost = int64_t{16} << 20;

}  // namespace

extern "C" __attribute__((visibility("default"))) void outofcore_transfer(void* data) noexcept {
  auto& t = *static_cast<Transfer*>(data);
  t.done = 0;
  t.failure = 0;
  while (t.done < t.bytes) {
    auto* memory = reinterpret_cast<char*>(t.address) + t.done;
    const int64_t left = t.bytes - t.done;
    const auto count = static_cast<size_t>(std::min(left, kMost));
    const ssize_t moved = t.writes ? pwrite(t.descriptor, memory, count, t.offset + t.done)
                                   : pread(t.descriptor, memory, count, t.offset + t.done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) {
      t.failure = errno;
      return;
    }
    // After a short one, direct I/O can go on from a page boundary only.
    const int64_t kept = moved == left ? moved : moved / kPage * kPage;
    if (kept == 0) {
      t.failure = -1;
      return;
    }
    t.done += kept;
  }
  if (t.forgets) posix_fadvise(t.descriptor, t.offset, t.bytes, POSIX_FADV_DONTNEED);
}
