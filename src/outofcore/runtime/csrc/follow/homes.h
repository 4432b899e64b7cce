// Homes: slots of files on a disk or in host memory (memfd) for evicted storages. Each slot is also mapped (its
// window), so evicted storages have valid addresses. A storage mapped from a file, such as a checkpoint's weight, has
// that file as home until it is written, and its mapping as window. A forked child must see the bytes at the time of
// the fork: its windows become private, and slots that it can see are not overwritten while it lives.

#pragma once

#include "../file_io.h"
#include "../page_map.h"
#include "extents.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace follow {

using outofcore::kPage;
using outofcore::PageMap;
using outofcore::Transfer;

inline const char* error_text(const Transfer& failed) {
  return std::strerror(failed.failure > 0 ? failed.failure : EIO);
}

// The descriptors of one file, closed on destruction. `direct`, for direct I/O, may equal `file`.
struct OpenFile {
  OpenFile(int file, int direct) : file(file), direct(direct) {}
  OpenFile(OpenFile&& other) noexcept : file(std::exchange(other.file, -1)), direct(std::exchange(other.direct, -1)) {}
  ~OpenFile() {
    if (direct >= 0 && direct != file) close(direct);
    if (file >= 0) close(file);
  }

  int file, direct;
};

class ForeignFile {
 public:
  explicit ForeignFile(OpenFile&& open) : open_(std::move(open)) {
    TORCH_CHECK(fstat(file_, &opened_stat_) == 0,
                "outofcore: the status of a file of weights cannot be read: ", std::strerror(errno));
  }
  ForeignFile(const ForeignFile&) = delete;

  // Throws c10::Error if the file has changed or cannot be read.
  void read(char* to, int64_t offset, int64_t bytes) const {
    struct stat now;
    const bool same = fstat(file_, &now) == 0 && now.st_size == opened_stat_.st_size &&
                      now.st_mtim.tv_sec == opened_stat_.st_mtim.tv_sec &&
                      now.st_mtim.tv_nsec == opened_stat_.st_mtim.tv_nsec;
    TORCH_CHECK(same, "outofcore: ", name(), " was changed while weights that were mapped from it were in use; do not "
                "modify it until the loop is stopped");
    Transfer transfer{reinterpret_cast<int64_t>(to), bytes, offset, file_, false, outofcore::kKept, 0, 0, nullptr};
    outofcore::transfer(transfer);
    TORCH_CHECK(transfer.failure == 0, "outofcore: reading weights from ", name(), " failed: ", error_text(transfer));
  }
  const PageMap& pages() const { return pages_; }

 private:
  std::string name() const {
    std::string path(4096, '\0');
    const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file_)).c_str(), path.data(), path.size());
    return length > 0 ? path.substr(0, length) : "a file";
  }

  OpenFile open_;
  const int file_ = open_.file;
  struct stat opened_stat_;
  PageMap pages_;
};

class Original {
 public:
  Original(std::shared_ptr<const ForeignFile> file, int64_t offset, int64_t bytes, at::DataPtr memory)
      : file_(std::move(file)), offset_(offset), bytes_(bytes), memory_(std::move(memory)) {}

  char* window() const { return static_cast<char*>(memory_.get()); }
  // Whether the bytes differ from the file's because unobserved code wrote to the window.
  bool was_written() const { return file_->pages().any_written(window(), bytes_); }
  // Copies the bytes and fills the last page with zeros. Throws c10::Error.
  void read(char* to) const {
    if (was_written())
      std::memcpy(to, window(), bytes_);
    else
      file_->read(to, offset_, bytes_);
    std::memset(to + bytes_, 0, (kPage - bytes_ % kPage) % kPage);
  }
  at::DataPtr release_memory() { return std::move(memory_); }

  std::shared_ptr<Original> next;  // in the list of `DeferredDrops`

 private:
  std::shared_ptr<const ForeignFile> file_;
  int64_t offset_, bytes_;
  at::DataPtr memory_;
};

struct Slot {
  int home = -1;  // -1: none
  int64_t offset = 0, bytes = 0;
  int64_t forks = 0;  // before the slot was taken
  std::shared_ptr<Original> original = nullptr;  // replaces a home's slot; read-only

  explicit operator bool() const { return home >= 0 || original; }
};

class Home {
 public:
  // `memory`: the file is in host memory. Throws c10::Error.
  Home(OpenFile&& open, bool memory, int64_t capacity)
      : open_(std::move(open)), memory_(memory), capacity_(capacity / kPage * kPage), extents_(capacity_) {
    void* window = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(window != MAP_FAILED, "outofcore: ", capacity_, " bytes of addresses could not be mapped for a home (",
                std::strerror(errno), "); lift the limit on address space (ulimit -v), or give a smaller host_budget");
    window_ = static_cast<char*>(window);
  }
  ~Home() { munmap(window_, capacity_); }
  Home(const Home&) = delete;

  // Returns a slot's offset, or -1 and the reason.
  int64_t take(int64_t bytes, std::string& reason) {
    const int64_t offset = extents_.take(bytes);
    if (offset < 0) {
      reason = "its limit is reached";
      return -1;
    }
    if (offset + bytes > file_bytes_ && !grow(offset + bytes, reason)) {
      extents_.give(offset, bytes, false);
      return -1;
    }
    used_ += bytes;
    most_used_ = std::max(most_used_, used_);
    return offset;
  }
  void give(int64_t offset, int64_t bytes) {
    if (memory_ && !is_detached_) fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
    extents_.give(offset, bytes, false);
    used_ -= bytes;
  }

  // The offset is page-aligned; the last page belongs to the slot. `bounce`: see file_io.h. Throws c10::Error.
  void write(const char* from, int64_t offset, int64_t bytes, char* bounce = nullptr) const {
    move({reinterpret_cast<int64_t>(from), bytes, offset, direct_, true, outofcore::kPast, 0, 0, bounce});
  }
  void read(char* to, int64_t offset, int64_t bytes) const {
    move({reinterpret_cast<int64_t>(to), bytes, offset, direct_, false, outofcore::kPast, 0, 0, nullptr});
  }

  char* window(int64_t offset) const { return window_ + offset; }
  // Unmaps a window's pages, so that `was_touched` reports later accesses only. Written bytes remain.
  void begin_watch(int64_t offset, int64_t bytes) const { madvise(window_ + offset, bytes, MADV_DONTNEED); }
  // Whether a window was accessed since: its pages are mapped then.
  bool was_touched(int64_t offset, int64_t bytes) const { return pages_.any_mapped(window_ + offset, bytes); }
  bool can_detect_touches() const { return pages_.is_readable(); }
  void show(char* at, int64_t offset, int64_t bytes, bool privately) const {
    const void* shown = mmap(at, bytes, PROT_READ | PROT_WRITE, (privately ? MAP_PRIVATE : MAP_SHARED) | MAP_FIXED,
                             file_, offset);
    TORCH_CHECK(shown != MAP_FAILED, "outofcore: ", bytes, " bytes of a home could not be mapped (",
                std::strerror(errno), "); raise vm.max_map_count, or lift the limit on address space (ulimit -v)");
  }
  // In a forked child: makes writes private, and keeps the parent's slots on free.
  void detach() {
    is_detached_ = true;
    constexpr int kHow = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
    if (mmap(window_, capacity_, PROT_READ | PROT_WRITE, kHow, file_, 0) != MAP_FAILED) return;
    // Strict overcommit may refuse a writable mapping. The child must not see later writes of its parent.
    if (mmap(window_, capacity_, PROT_READ, kHow, file_, 0) == MAP_FAILED) munmap(window_, capacity_);
  }
  bool is_on_disk() const { return !memory_; }
  int64_t used() const { return used_; }
  int64_t most_used() const { return most_used_; }

 private:
  static constexpr int64_t kStep = int64_t{64} << 20;

  void move(Transfer&& transfer) const {
    outofcore::transfer(transfer);
    TORCH_CHECK(transfer.failure == 0, "outofcore: ", transfer.writes ? "writing " : "reading ",
                transfer.bytes - transfer.done, " bytes ", transfer.writes ? "to" : "from", " the home failed (",
                error_text(transfer), "); ",
                transfer.failure == ENOSPC ? "make room there"
                : memory_                  ? "lower host_budget"
                                           : "check that disk",
                ", or use another home");
  }

  // Allocates disk blocks, so that later writes cannot fail for lack of room.
  bool grow(int64_t bytes, std::string& reason) {
    const int64_t preferred = std::min(capacity_, memory_ ? bytes : (bytes + kStep - 1) / kStep * kStep);
    for (const int64_t count : {preferred, bytes}) {
      int error = 0;
      if (memory_) {
        error = ftruncate(file_, count) ? errno : 0;
      } else {
        do error = fallocate(file_, 0, file_bytes_, count - file_bytes_) ? errno : 0;
        while (error == EINTR);
        if (error == EOPNOTSUPP) error = ftruncate(file_, count) ? errno : 0;
      }
      if (error == 0) {
        file_bytes_ = count;
        return true;
      }
      reason = std::strerror(error);
    }
    return false;
  }

  OpenFile open_;
  const int file_ = open_.file, direct_ = open_.direct;
  PageMap pages_;
  bool memory_, is_detached_ = false;
  int64_t capacity_;
  Extents extents_;
  char* window_ = nullptr;
  int64_t file_bytes_ = 0, used_ = 0, most_used_ = 0;
};

class Homes {
 public:
  ~Homes() {
    for (const Fork& fork : forks_) close(fork.pipe_end);
  }

  void add(int file, int direct, bool memory, int64_t capacity) {
    OpenFile open(file, direct);
    homes_.push_back(std::make_unique<Home>(std::move(open), memory, capacity));
  }

  // Throws c10::OutOfMemoryError if no home has room.
  Slot take(int64_t bytes) {
    free_frozen();
    std::string reason = "no home was given";
    for (size_t home = 0; home < homes_.size(); ++home) {
      const int64_t offset = homes_[home]->take(bytes, reason);
      if (offset >= 0) return {static_cast<int>(home), offset, bytes, fork_count_};
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "outofcore: no home has room for ", bytes, " bytes more (", reason,
                     "); give a home with more room, or free tensors");
  }
  void give(const Slot& slot) {
    if (!slot || slot.original) return;
    if (is_frozen(slot))
      frozen_.push_back(slot);
    else
      homes_[slot.home]->give(slot.offset, slot.bytes);
  }
  // Whether a live child sees the slot, which must then keep its bytes.
  bool is_frozen(const Slot& slot) {
    if (slot.original || !seen_by_forks(slot)) return false;
    free_frozen();
    return seen_by_forks(slot);
  }

  Home& of(const Slot& slot) const { return *homes_[slot.home]; }
  char* window(const Slot& slot) const {
    return slot.original ? slot.original->window() : of(slot).window(slot.offset);
  }
  void read(const Slot& slot, char* to) const {
    slot.original ? slot.original->read(to) : of(slot).read(to, slot.offset, slot.bytes);
  }
  // An original's private pages keep their writes, so they remain detectable.
  void begin_watch(const Slot& slot) const {
    if (!slot.original) of(slot).begin_watch(slot.offset, slot.bytes);
  }
  bool was_touched(const Slot& slot) const {
    return slot.original ? slot.original->was_written() : of(slot).was_touched(slot.offset, slot.bytes);
  }
  bool is_on_disk(const Slot& slot) const { return !slot.original && of(slot).is_on_disk(); }

  // Whether `was_touched` works; otherwise it always returns true.
  bool can_detect_touches() const {
    return std::all_of(homes_.begin(), homes_.end(), [](const auto& home) { return home->can_detect_touches(); });
  }

  // Call around a fork. The child holds one end of a pipe until it ends or executes another program.
  void before_fork() {
    if (pipe2(pipe_, O_CLOEXEC) != 0) pipe_[0] = pipe_[1] = -1;
  }
  void after_fork_in_parent() {
    ++fork_count_;
    if (pipe_[1] >= 0) close(pipe_[1]);
    forks_.push_back({pipe_[0], fork_count_});
  }
  void after_fork_in_child() const {
    for (const auto& home : homes_) home->detach();
  }
  void free_frozen() {
    if (forks_.empty()) return;
    std::erase_if(forks_, [](const Fork& fork) {
      pollfd request{fork.pipe_end, POLLIN, 0};
      if (fork.pipe_end < 0 || poll(&request, 1, 0) <= 0) return false;
      close(fork.pipe_end);
      return true;
    });
    std::erase_if(frozen_, [&](const Slot& slot) {
      if (seen_by_forks(slot)) return false;
      homes_[slot.home]->give(slot.offset, slot.bytes);
      return true;
    });
  }

  int64_t used() const {
    int64_t used = 0;
    for (const auto& home : homes_) used += home->used();
    return used;
  }
  int64_t frozen_slots() const { return static_cast<int64_t>(frozen_.size()); }
  int64_t forks() const { return static_cast<int64_t>(forks_.size()); }
  int64_t most_used() const {
    int64_t sum = 0;
    for (const auto& home : homes_) sum += home->most_used();
    return sum;
  }

 private:
  struct Fork {
    int pipe_end;  // end of file when the child and its descendants are gone; -1: assume alive
    int64_t number;  // number of forks up to this one
  };

  // Whether a child forked after the slot was taken may be alive. Earlier children do not see it.
  bool seen_by_forks(const Slot& slot) const {
    return std::any_of(forks_.begin(), forks_.end(), [&](const Fork& fork) { return fork.number > slot.forks; });
  }

  std::vector<std::unique_ptr<Home>> homes_;
  std::vector<Fork> forks_;
  std::vector<Slot> frozen_;
  int64_t fork_count_ = 0;
  int pipe_[2] = {-1, -1};
};

}  // namespace follow
