// What an op asks the allocator for while it runs: its results, and memory that it gives back.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace follow {

struct Request {
  static constexpr int32_t kToTheEnd = INT32_MAX;

  int64_t id;  // of the block
  int64_t bytes;
  int32_t until = kToTheEnd;  // how many requests there had been when it was given back
  int32_t place = 0;          // of the result that it became; 0: it is scratch memory
  int32_t in = 0;             // the result whose room, not yet in use, scratch memory takes; 0: room of its own
  int64_t at = 0;             // its offset there
};

// Finds offsets for scratch memory, first fit in the order of the requests, and returns the bytes of room that it needs
// beside the results. The same kernel asks for the same in each step, so that this serves the next one.
inline int64_t place_scratch(std::vector<Request>& requests) {
  constexpr size_t kMost = 256;
  int64_t height = 0;
  const auto lowest = [&](size_t index, int32_t in) {
    const Request& mine = requests[index];
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (size_t i = 0; i < index; ++i)
      if (const Request& other = requests[i];
          other.place == 0 && other.in == in && other.until > static_cast<int32_t>(index))
        taken.emplace_back(other.at, other.at + other.bytes);
    std::sort(taken.begin(), taken.end());
    int64_t at = 0;
    for (const auto& [begin, end] : taken) {
      if (begin >= at + mine.bytes) break;
      at = std::max(at, end);
    }
    return at;
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& mine = requests[i];
    if (mine.place != 0) continue;
    mine.in = 0;
    if (i >= kMost) {  // no kernel of note does that
      mine.at = height;
      height += mine.bytes;
      continue;
    }
    bool found = false;
    for (size_t later = i + 1; later < requests.size() && !found; ++later) {
      const Request& result = requests[later];
      if (result.place == 0 || mine.until > static_cast<int32_t>(later)) continue;
      const int64_t at = lowest(i, result.place);
      if (at + mine.bytes > result.bytes) continue;
      mine.in = result.place, mine.at = at;
      found = true;
    }
    if (found) continue;
    mine.at = lowest(i, 0);
    height = std::max(height, mine.at + mine.bytes);
  }
  return height;
}

}  // namespace follow
