// The memory that an op requests while it runs: its results, and scratch memory that it frees.

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
  int32_t until = kToTheEnd;  // number of requests made when it was freed
  int32_t place = 0;          // of the result that it became; 0: scratch memory
  int32_t in = 0;             // place of the later result that lends its memory; 0: own scratch memory
  int64_t at = 0;             // offset within that result, or within the scratch memory
};

// Assigns offsets, first fit in request order, and returns the bytes of scratch memory. They serve the next step's op.
inline int64_t place_scratch(std::vector<Request>& requests) {
  constexpr size_t kMaxRequests = 256;
  int64_t height = 0;
  const auto lowest = [&](size_t index, int32_t in) {
    const Request& request = requests[index];
    std::vector<std::pair<int64_t, int64_t>> occupied;
    for (size_t i = 0; i < index; ++i)
      if (const Request& earlier = requests[i];
          earlier.place == 0 && earlier.in == in && earlier.until > static_cast<int32_t>(index))
        occupied.emplace_back(earlier.at, earlier.at + earlier.bytes);
    std::sort(occupied.begin(), occupied.end());
    int64_t at = 0;
    for (const auto& [begin, end] : occupied) {
      if (begin >= at + request.bytes) break;
      at = std::max(at, end);
    }
    return at;
  };
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    if (request.place != 0) continue;
    request.in = 0;
    if (i >= kMaxRequests) {  // more than any kernel does
      request.at = height;
      height += request.bytes;
      continue;
    }
    bool placed = false;
    for (size_t later = i + 1; later < requests.size() && !placed; ++later) {
      const Request& result = requests[later];
      if (result.place == 0 || request.until > static_cast<int32_t>(later)) continue;
      const int64_t at = lowest(i, result.place);
      if (at + request.bytes > result.bytes) continue;
      request.in = result.place, request.at = at;
      placed = true;
    }
    if (placed) continue;
    request.at = lowest(i, 0);
    height = std::max(height, request.at + request.bytes);
  }
  return height;
}

}  // namespace follow
