// Free and used ranges of addresses or of a file: best fit, with neighbours joined.

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <set>
#include <utility>

namespace follow {

// Offsets in [0, size). Also tracks which bytes of free ranges may be in physical memory, because only discarding
// returns them to the kernel. Deleters of PyTorch return ranges, so no function throws: if memory runs out, a range
// without a free neighbour is lost.
class Extents {
 public:
  static constexpr int64_t kHuge = int64_t{2} << 20;  // bytes of a huge page; offset 0 begins one

  explicit Extents(int64_t size) {
    if (!insert(0, size)) throw std::bad_alloc();
  }

  // Takes the start of the free range with the most bytes in memory, then the smallest. Returns -1 if none is large
  // enough.
  int64_t take(int64_t bytes) {
    int64_t offset = -1, most_resident = -1;
    for (auto it = by_size_.lower_bound({bytes, 0}); it != by_size_.end() && most_resident < bytes; ++it) {
      const int64_t resident = resident_in(it->second, bytes);
      if (resident > most_resident) most_resident = resident, offset = it->second;
    }
    if (offset >= 0) take_at(offset, bytes);
    return offset;
  }

  // Takes exactly this range. Returns false if part of it is taken, or if memory runs out.
  bool take_at(int64_t offset, int64_t bytes) {
    auto stretch = free_.upper_bound(offset);
    if (stretch == free_.begin()) return false;
    --stretch;
    const int64_t begin = stretch->first, end = begin + stretch->second;
    if (end < offset + bytes) return false;
    const int64_t before = offset - begin, behind = end - offset - bytes;
    if (before > 0 && behind > 0 && !insert(offset + bytes, behind)) return false;
    if (before > 0)
      resize(stretch, begin, before);
    else if (behind > 0)
      resize(stretch, offset + bytes, behind);
    else
      erase(stretch);
    forget(offset, bytes);
    return true;
  }

  // `resident`: whether its bytes may be in memory.
  void give(int64_t offset, int64_t bytes, bool resident) {
    if (resident) keep_resident(offset, bytes);
    auto next = free_.lower_bound(offset);
    const bool behind = next != free_.end() && next->first == offset + bytes;
    const bool before = next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset;
    if (before) {
      const auto first = std::prev(next);
      const int64_t joined = first->second + bytes + (behind ? next->second : 0);
      if (behind) erase(next);
      resize(first, first->first, joined);
    } else if (behind) {
      resize(next, offset, bytes + next->second);
    } else {
      insert(offset, bytes);
    }
  }

  // The largest size that `take` can serve.
  int64_t longest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

  int64_t idle() const { return idle_; }

  // Assumes that all free bytes before `end` may be in physical memory.
  void fill(int64_t end) {
    for (const auto& [offset, bytes] : free_) {
      const int64_t count = std::min(bytes, end - offset);
      if (count <= 0) break;
      if (resident_in(offset, count) == count) continue;
      forget(offset, count);
      keep_resident(offset, count);
    }
  }

  // Forgets about `bytes` bytes of one idle range (there must be one) and returns them, for the caller to give to the
  // kernel. Picks the end of the last range if it reaches beyond `core`, where placement is not planned, else of the
  // longest. A range across the border gives only its part beyond. Prefers whole huge pages: the rest of a split one
  // would come back as small pages.
  std::pair<int64_t, int64_t> forget_some(int64_t core, int64_t bytes) {
    auto chosen = std::prev(resident_.end());
    if (chosen->first + chosen->second <= core)
      chosen = std::max_element(resident_.begin(), resident_.end(),
                              [](const auto& a, const auto& b) { return a.second < b.second; });
    const int64_t begin = chosen->first, end = begin + chosen->second;
    int64_t to = end / kHuge * kHuge;
    int64_t from = std::max((begin + kHuge - 1) / kHuge, (end - std::min(bytes, end - begin)) / kHuge) * kHuge;
    if (from >= to) from = begin, to = end;
    if (from < core && core < end) from = core, to = end;
    resident_.erase(chosen);
    idle_ -= end - begin;
    if (begin < from) keep_resident(begin, from - begin);
    if (to < end) keep_resident(to, end - to);
    return {from, to - from};
  }

 private:
  using Stretches = std::map<int64_t, int64_t>;  // bytes by offset

  static void join(Stretches& all, int64_t offset, int64_t bytes) {
    auto next = all.lower_bound(offset);
    if (next != all.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = all.erase(next);
    }
    if (next != all.begin() && std::prev(next)->first + std::prev(next)->second == offset)
      std::prev(next)->second += bytes;
    else
      all.emplace(offset, bytes);
  }

  int64_t resident_in(int64_t offset, int64_t bytes) const {
    int64_t total = 0;
    auto it = resident_.upper_bound(offset);
    if (it != resident_.begin()) --it;
    for (; it != resident_.end() && it->first < offset + bytes; ++it)
      total += std::max<int64_t>(0, std::min(it->first + it->second, offset + bytes) - std::max(it->first, offset));
    return total;
  }
  void forget(int64_t offset, int64_t bytes) {
    auto it = resident_.upper_bound(offset);
    if (it != resident_.begin()) --it;
    while (it != resident_.end() && it->first < offset + bytes) {
      const int64_t begin = it->first, end = begin + it->second;
      if (end <= offset) {
        ++it;
        continue;
      }
      it = resident_.erase(it);
      idle_ -= end - begin;
      if (begin < offset) keep_resident(begin, offset - begin);
      if (end > offset + bytes) keep_resident(offset + bytes, end - offset - bytes);
    }
  }

  void keep_resident(int64_t offset, int64_t bytes) {
    try {
      join(resident_, offset, bytes);
      idle_ += bytes;
    } catch (const std::bad_alloc&) {
    }
  }
  bool insert(int64_t offset, int64_t bytes) {
    try {
      const auto [entry, fresh] = free_.emplace(offset, bytes);
      try {
        by_size_.emplace(bytes, offset);
        return true;
      } catch (const std::bad_alloc&) {
        free_.erase(entry);
      }
    } catch (const std::bad_alloc&) {
    }
    return false;
  }
  // Changes a free range between the same neighbours. Allocates no memory.
  void resize(Stretches::iterator entry, int64_t offset, int64_t bytes) {
    auto size = by_size_.extract({entry->second, entry->first});
    auto stretch = free_.extract(entry);
    stretch.key() = offset, stretch.mapped() = bytes;
    size.value() = {bytes, offset};
    free_.insert(std::move(stretch));
    by_size_.insert(std::move(size));
  }
  Stretches::iterator erase(Stretches::iterator entry) {
    by_size_.erase({entry->second, entry->first});
    return free_.erase(entry);
  }

  Stretches free_, resident_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
  int64_t idle_ = 0;
};

}  // namespace follow
