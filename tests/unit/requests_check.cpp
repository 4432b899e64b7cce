// Where an op's scratch memory goes: random ops, beside first fit as slow and obvious as it can be. Says "ok".

#include "requests.h"

#include <algorithm>
#include <optional>

#include "check.h"

namespace {

using follow::Request;
using Requests = std::vector<Request>;

// What an op asks for and gives back, with results among it, which stay.
Requests random_requests(int count, int sizes) {
  Requests made;
  std::vector<size_t> live;
  int32_t place = 0;
  for (int i = 0; i < count; ++i) {
    made.push_back({i, 1 + below(sizes)});
    if (below(4) == 0)
      made.back().place = --place;
    else if (below(8) != 0)  // who stays without being a result: what a library keeps
      live.push_back(made.size() - 1);
    for (int frees = below(3); frees > 0 && !live.empty(); --frees) {
      const auto at = live.begin() + below(static_cast<int>(live.size()));
      made[*at].until = static_cast<int32_t>(made.size());
      live.erase(at);
    }
  }
  return made;
}

bool meet(const Requests& all, size_t a, size_t b) {
  const auto [earlier, later] = std::minmax(a, b);
  return all[earlier].until > static_cast<int32_t>(later);
}

// Whether a request may lie there, beside those before it.
bool fits(const Requests& all, size_t which, int32_t in, int64_t at) {
  for (size_t i = 0; i < which; ++i) {
    const Request& other = all[i];
    if (other.place == 0 && other.in == in && meet(all, i, which) && at < other.at + other.bytes &&
        other.at < at + all[which].bytes)
      return false;
  }
  return true;
}

int64_t lowest(const Requests& all, size_t which, int32_t in) {
  for (int64_t at = 0;; ++at)
    if (fits(all, which, in, at)) return at;
}

// In the room of the first result that comes when it is gone and that has room; else in room of its own.
int64_t place_slowly(Requests& all) {
  int64_t height = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].place != 0) continue;
    const auto end = static_cast<int32_t>(all.size());
    for (int32_t later = all[i].until; later < end && all[i].in == 0; ++later) {
      const Request& result = all[static_cast<size_t>(later)];
      if (result.place == 0) continue;
      if (const int64_t at = lowest(all, i, result.place); at + all[i].bytes <= result.bytes)
        all[i].in = result.place, all[i].at = at;
    }
    if (all[i].in != 0) continue;
    all[i].at = lowest(all, i, 0);
    height = std::max(height, all[i].at + all[i].bytes);
  }
  return height;
}

// Two that are in use at once share no byte, and each stays in the room that it was given.
void check_rooms(const Requests& all, int64_t height) {
  for (size_t i = 0; i < all.size(); ++i) {
    const Request& mine = all[i];
    if (mine.place != 0) continue;
    SURE(mine.at >= 0);
    int64_t room = height;
    if (mine.in != 0) {
      const auto result = std::find_if(all.begin(), all.end(), [&](const Request& r) { return r.place == mine.in; });
      SURE(result != all.end());
      SURE(mine.until <= result - all.begin());
      room = result->bytes;
    }
    SURE(mine.at + mine.bytes <= room);
    SURE(fits(all, i, mine.in, mine.at));
  }
}

}  // namespace

int main() {
  for (int round = 0; round < 20000; ++round) {
    Requests ours = random_requests(below(24), 1 + below(40)), theirs = ours;
    const int64_t height = follow::place_scratch(ours);
    check_rooms(ours, height);
    SURE(height == place_slowly(theirs));
    for (size_t i = 0; i < ours.size(); ++i) SURE(ours[i].in == theirs[i].in && ours[i].at == theirs[i].at);
    Requests again = random_requests(static_cast<int>(ours.size()), 40), fresh = again;
    for (size_t i = 0; i < again.size(); ++i) again[i].in = ours[i].in, again[i].at = ours[i].at;
    SURE(follow::place_scratch(again) == follow::place_scratch(fresh));  // what was found before does not matter
    for (size_t i = 0; i < again.size(); ++i)
      if (again[i].place == 0) SURE(again[i].in == fresh[i].in && again[i].at == fresh[i].at);
  }
  for (int round = 0; round < 20; ++round) {  // more than are placed with care
    Requests many = random_requests(200 + below(400), 1 + below(40));
    check_rooms(many, follow::place_scratch(many));
  }
  std::puts("ok");
  return 0;
}
