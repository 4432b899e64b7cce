// Homes on a GPU: pinned host memory, which kernels can read, so evicted storages have valid addresses. It cannot grow
// in place and so comes in pieces; a copy must not span two of them. A forked child cannot use CUDA.

#pragma once

#include "extents.h"
#include "homes.h"

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace follow {

class PinnedPiece {
 public:
  explicit PinnedPiece(int64_t bytes) : bytes_(bytes), extents_(bytes) {}
  ~PinnedPiece() {
    if (base_ != nullptr && cudaFreeHost(base_) != cudaSuccess) cudaGetLastError();
  }
  PinnedPiece(const PinnedPiece&) = delete;

  // Returns false if the system refuses the memory.
  bool open() {
    void* base = nullptr;
    if (cudaHostAlloc(&base, bytes_, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
      cudaGetLastError();  // or the next kernel's check would report it
      return false;
    }
    base_ = static_cast<char*>(base);
    return true;
  }
  int64_t take(int64_t bytes) { return extents_.take(bytes); }
  void give(int64_t offset, int64_t bytes) { extents_.give(offset, bytes, false); }
  char* window(int64_t offset) const { return base_ + offset; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  Extents extents_;
  char* base_ = nullptr;
};

// As `Homes`; a slot's home is its piece.
class PinnedHomes {
 public:
  void add(int, int, bool, int64_t capacity) { capacity_ += capacity / kPage * kPage; }

  // Throws c10::OutOfMemoryError.
  Slot take(int64_t bytes) {
    for (size_t piece = 0; piece < pieces_.size(); ++piece)
      if (const int64_t offset = pieces_[piece]->take(bytes); offset >= 0) return make_slot(piece, offset, bytes);
    std::string reason = "its limit is reached";
    // Large pieces first, because pinning is slow; less if the system refuses.
    for (const int64_t preferred : {std::max({bytes, kMinPiece, pinned_ / 2}), std::max(bytes, kMinPiece), bytes}) {
      const int64_t count = std::max(bytes, std::min(preferred, capacity_ - pinned_));
      if (pinned_ + count > capacity_) continue;
      auto piece = std::make_unique<PinnedPiece>(count);
      if (!piece->open()) {
        reason = "the system does not pin more of its memory";
        continue;
      }
      pinned_ += count;
      pieces_.push_back(std::move(piece));
      return make_slot(pieces_.size() - 1, pieces_.back()->take(bytes), bytes);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "outofcore: no home has room for ", bytes, " bytes more (", reason,
                     "); give a home with more room, or free tensors");
  }
  void give(const Slot& slot) {
    if (!slot) return;
    pieces_[slot.home]->give(slot.offset, slot.bytes);
    used_ -= slot.bytes;
  }
  char* window(const Slot& slot) const { return pieces_[slot.home]->window(slot.offset); }

  bool is_on_disk(const Slot&) const { return false; }
  bool is_frozen(const Slot&) const { return false; }
  void before_fork() const {}
  void after_fork_in_parent() const {}
  void after_fork_in_child() const {}
  void free_frozen() const {}
  int64_t frozen_slots() const { return 0; }
  int64_t forks() const { return 0; }
  int64_t used() const { return used_; }
  int64_t most_used() const { return most_used_; }

 private:
  static constexpr int64_t kMinPiece = int64_t{64} << 20;

  Slot make_slot(size_t piece, int64_t offset, int64_t bytes) {
    used_ += bytes;
    most_used_ = std::max(most_used_, used_);
    return {static_cast<int>(piece), offset, bytes, 0};
  }

  std::vector<std::unique_ptr<PinnedPiece>> pieces_;
  int64_t capacity_ = 0, pinned_ = 0, used_ = 0, most_used_ = 0;
};

}  // namespace follow
