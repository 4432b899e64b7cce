// Free stretches of a range: random demands, beside a list that says of each byte what it is. Says "ok".

#include "extents.h"

#include <algorithm>
#include <optional>

#include "check.h"

namespace {

// Counted in quarters of huge pages.
constexpr int kSize = 96, kHuge = 4;
constexpr int64_t kUnit = follow::Extents::kHuge / kHuge;

enum class Is {
  kUsed,
  kFree,
  kIdle,  // free, and perhaps in memory
};

using Stretch = std::pair<int64_t, int64_t>;  // offset, bytes

class Bytes {
 public:
  Bytes() : is_(kSize, Is::kFree) {}

  template <class Wanted>
  std::vector<Stretch> stretches(Wanted&& wanted) const {
    std::vector<Stretch> found;
    for (int64_t begin = 0; begin < kSize; ++begin) {
      int64_t end = begin;
      while (end < kSize && wanted(is_[static_cast<size_t>(end)])) ++end;
      if (end > begin) found.emplace_back(begin, end - begin);
      begin = end;
    }
    return found;
  }
  std::vector<Stretch> free() const {
    return stretches([](Is is) { return is != Is::kUsed; });
  }
  std::vector<Stretch> idle() const {
    return stretches([](Is is) { return is == Is::kIdle; });
  }
  int64_t idle(int64_t offset, int64_t bytes) const {
    return std::count(is_.begin() + offset, is_.begin() + offset + bytes, Is::kIdle);
  }
  bool all_free(int64_t offset, int64_t bytes) const {
    return std::count(is_.begin() + offset, is_.begin() + offset + bytes, Is::kUsed) == 0;
  }
  void set(int64_t offset, int64_t bytes, Is is) {
    std::fill(is_.begin() + offset, is_.begin() + offset + bytes, is);
  }

  // The beginning of the stretch with the most bytes in memory there; the smallest of those, and the first.
  int64_t best(int64_t bytes) const {
    std::optional<Stretch> found;
    for (const Stretch& each : free()) {
      if (each.second < bytes) continue;
      const int64_t more = found ? idle(each.first, bytes) - idle(found->first, bytes) : 1;
      if (more > 0 || (more == 0 && each.second < found->second)) found = each;
    }
    return found ? found->first : -1;
  }

  // Of the last stretch in memory if it ends behind `core`, else of the first of the longest: its last whole huge pages,
  // from the one on in which the `wanted` bytes at its end begin; all of it where that is none.
  Stretch to_forget(int64_t core, int64_t wanted) const {
    const std::vector<Stretch> all = idle();
    Stretch most = all.back();
    if (most.first + most.second <= core)
      most = *std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    const int64_t end = most.first + most.second;
    std::optional<Stretch> pages;
    for (int64_t page = 0; page + kHuge <= end; page += kHuge)
      if (page >= most.first && page + kHuge > end - wanted)
        pages = Stretch{pages ? pages->first : page, page + kHuge - (pages ? pages->first : page)};
    const Stretch found = pages ? *pages : most;
    return found.first < core && core < end ? Stretch{core, end - core} : found;
  }

 private:
  std::vector<Is> is_;
};

}  // namespace

int main() {
  for (int round = 0; round < 300; ++round) {
    follow::Extents ours(kSize * kUnit);
    Bytes theirs;
    std::vector<Stretch> used;
    const int most = 1 + below(30);
    for (int step = 0; step < 300; ++step) {
      const int64_t bytes = 1 + below(most);
      switch (below(5)) {
        case 0:
        case 1: {
          const int64_t expected = theirs.best(bytes);
          SURE(ours.take(bytes * kUnit) == (expected < 0 ? -1 : expected * kUnit));
          if (expected < 0) break;
          theirs.set(expected, bytes, Is::kUsed);
          used.emplace_back(expected, bytes);
          break;
        }
        case 2: {
          const int64_t offset = below(kSize - static_cast<int>(bytes) + 1);
          const bool expected = theirs.all_free(offset, bytes);
          SURE(ours.take_at(offset * kUnit, bytes * kUnit) == expected);
          if (!expected) break;
          theirs.set(offset, bytes, Is::kUsed);
          used.emplace_back(offset, bytes);
          break;
        }
        case 3: {
          if (used.empty()) break;
          const auto at = used.begin() + below(static_cast<int>(used.size()));
          const bool resident = below(2) != 0;
          ours.give(at->first * kUnit, at->second * kUnit, resident);
          theirs.set(at->first, at->second, resident ? Is::kIdle : Is::kFree);
          used.erase(at);
          break;
        }
        default: {
          if (theirs.idle().empty() || below(4)) break;
          const int64_t core = below(kSize + 1);
          const int64_t wanted = below(kSize);
          const Stretch expected = theirs.to_forget(core, wanted);
          SURE(ours.forget_some(core * kUnit, wanted * kUnit) == Stretch(expected.first * kUnit, expected.second * kUnit));
          theirs.set(expected.first, expected.second, Is::kFree);
        }
      }
      SURE(ours.idle() == theirs.idle(0, kSize) * kUnit);
      int64_t longest = 0;
      for (const Stretch& each : theirs.free()) longest = std::max(longest, each.second);
      SURE(ours.longest() == longest * kUnit);
    }
  }
  std::puts("ok");
  return 0;
}
