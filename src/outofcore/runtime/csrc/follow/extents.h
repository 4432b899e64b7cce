// Free and used stretches of one range of addresses or of a file: best fit, neighbours joined.

#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <set>
#include <utility>

namespace follow {

// Offsets in [0, size). Of free stretches it also knows which bytes may be in physical memory, since nobody tells the
// kernel of bytes that are only free. Nothing throws, since deleters of PyTorch's give stretches back: one that has no
// free neighbour is lost where there is no memory to write it down.
class Extents {
 public:
  static constexpr int64_t kHuge = int64_t{2} << 20;  // bytes of a huge page; offset 0 begins one

  explicit Extents(int64_t size) {
    if (!insert(0, size)) throw std::bad_alloc();
  }

  // The lowest bytes of a free stretch that is large enough: of the one with the most of them in memory, and of those
  // the smallest. -1: there is none.
  int64_t take(int64_t bytes) {
    int64_t offset = -1, most = -1;
    for (auto it = by_size_.lower_bound({bytes, 0}); it != by_size_.end() && most < bytes; ++it) {
      const int64_t resident = resident_in(it->second, bytes);
      if (resident > most) most = resident, offset = it->second;
    }
    if (offset >= 0) take_at(offset, bytes);
    return offset;
  }

  // Takes exactly this stretch. Returns false if part of it is taken, or no memory is left to record its remainders.
  bool take_at(int64_t offset, int64_t bytes) {
    auto found = free_.upper_bound(offset);
    if (found == free_.begin()) return false;
    --found;
    const int64_t begin = found->first, end = begin + found->second;
    if (end < offset + bytes) return false;
    const int64_t before = offset - begin, behind = end - offset - bytes;
    if (before > 0 && behind > 0 && !insert(offset + bytes, behind)) return false;
    if (before > 0)
      resize(found, begin, before);
    else if (behind > 0)
      resize(found, offset + bytes, behind);
    else
      erase(found);
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

  // The most that ``take`` could give.
  int64_t longest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

  // Bytes of free stretches that may be in physical memory.
  int64_t idle() const { return idle_; }

  // Takes it that all free bytes before `end` may be in physical memory.
  void fill(int64_t end) {
    for (const auto& [offset, bytes] : free_) {
      const int64_t count = std::min(bytes, end - offset);
      if (count <= 0) break;
      if (resident_in(offset, count) == count) continue;
      forget(offset, count);
      keep_resident(offset, count);
    }
  }

  // Forgets one of these stretches, of which there must be one, or about `wanted` bytes at its end, and returns it for the
  // caller to give to the kernel: of the last that ends behind `core`, where nothing is put on purpose, else of the
  // longest. A stretch on both sides of the border gives only what is behind. Where possible these are whole huge
  // pages: a part that is given back comes again as small pages.
  std::pair<int64_t, int64_t> forget_some(int64_t core, int64_t wanted) {
    auto most = std::prev(resident_.end());
    if (most->first + most->second <= core)
      most = std::max_element(resident_.begin(), resident_.end(),
                              [](const auto& a, const auto& b) { return a.second < b.second; });
    const int64_t begin = most->first, end = begin + most->second;
    int64_t to = end / kHuge * kHuge;
    int64_t from = std::max((begin + kHuge - 1) / kHuge, (end - std::min(wanted, end - begin)) / kHuge) * kHuge;
    if (from >= to) from = begin, to = end;
    if (from < core && core < end) from = core, to = end;
    resident_.erase(most);
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
    int64_t found = 0;
    auto it = resident_.upper_bound(offset);
    if (it != resident_.begin()) --it;
    for (; it != resident_.end() && it->first < offset + bytes; ++it)
      found += std::max<int64_t>(0, std::min(it->first + it->second, offset + bytes) - std::max(it->first, offset));
    return found;
  }
  // What is taken is no longer idle.
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
  // False: there is no memory for it.
  bool insert(int64_t offset, int64_t bytes) {
    try {
      const auto [found, fresh] = free_.emplace(offset, bytes);
      try {
        by_size_.emplace(bytes, offset);
        return true;
      } catch (const std::bad_alloc&) {
        free_.erase(found);
      }
    } catch (const std::bad_alloc&) {
    }
    return false;
  }
  // Gives a free stretch other ends, between the same neighbours; takes no memory.
  void resize(Stretches::iterator found, int64_t offset, int64_t bytes) {
    auto size = by_size_.extract({found->second, found->first});
    auto stretch = free_.extract(found);
    stretch.key() = offset, stretch.mapped() = bytes;
    size.value() = {bytes, offset};
    free_.insert(std::move(stretch));
    by_size_.insert(std::move(size));
  }
  Stretches::iterator erase(Stretches::iterator found) {
    by_size_.erase({found->second, found->first});
    return free_.erase(found);
  }

  Stretches free_, resident_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
  int64_t idle_ = 0;
};

}  // namespace follow
