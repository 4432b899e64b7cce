// Free and used stretches of one range of addresses or of a file: best fit, neighbours joined.

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace follow {

// Offsets in [0, size). Of free stretches it also keeps how many of their bytes may be in physical memory, as an upper
// bound, since nobody tells the kernel of bytes that are only free.
class Extents {
 public:
  explicit Extents(int64_t size) { insert(0, {size, 0}); }

  // The lowest bytes of a free stretch that is large enough: of the one with the most of them in memory, and of those
  // the smallest. -1: there is none.
  int64_t take(int64_t bytes) {
    int64_t offset = -1, most = -1;
    for (auto it = by_size_.lower_bound({bytes, 0}); it != by_size_.end() && most < bytes; ++it) {
      const int64_t resident = std::min(free_.find(it->second)->second.resident, bytes);
      if (resident > most) most = resident, offset = it->second;
    }
    if (offset < 0) return -1;
    const Free free = erase(free_.find(offset));
    if (free.bytes > bytes)
      insert(offset + bytes, {free.bytes - bytes, std::min(free.resident, free.bytes - bytes)});
    return offset;
  }

  void give(int64_t offset, int64_t bytes, int64_t resident) {
    Free joined{bytes, resident};
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + bytes) {
      const Free free = erase(next);
      joined.bytes += free.bytes;
      joined.resident += free.resident;
    }
    auto before = free_.lower_bound(offset);
    if (before != free_.begin() && std::prev(before)->first + std::prev(before)->second.bytes == offset) {
      --before;
      offset = before->first;
      const Free free = erase(before);
      joined.bytes += free.bytes;
      joined.resident += free.resident;
    }
    insert(offset, joined);
  }

  // Bytes of free stretches that may be in physical memory.
  int64_t idle() const { return idle_; }

  // Forgets the stretch with the most of them, and returns it for the caller to give to the kernel.
  std::pair<int64_t, int64_t> forget_most() {
    auto most = free_.begin();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second.resident > most->second.resident) most = it;
    idle_ -= most->second.resident;
    most->second.resident = 0;
    return {most->first, most->second.bytes};
  }

 private:
  struct Free {
    int64_t bytes, resident;
  };

  void insert(int64_t offset, Free free) {
    free_.emplace(offset, free);
    by_size_.emplace(free.bytes, offset);
    idle_ += free.resident;
  }
  Free erase(std::map<int64_t, Free>::iterator found) {
    const Free free = found->second;
    by_size_.erase({free.bytes, found->first});
    idle_ -= free.resident;
    free_.erase(found);
    return free;
  }

  std::map<int64_t, Free> free_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
  int64_t idle_ = 0;
};

}  // namespace follow
