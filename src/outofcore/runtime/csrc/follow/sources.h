// Where ops come from in the user's program, for messages: an op of backward comes from where its node was made.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace follow {

// By the numbers that autograd gives nodes in one thread, which ascend.
class Sources {
 public:
  // The nodes from the last call on, up to that with the number before `next`, come from there; null: it is not known.
  void note(uint64_t next, const char* source) {
    last_ = next;
    if (!by_next_.empty() && std::prev(by_next_.end())->second == source) {
      auto last = by_next_.extract(std::prev(by_next_.end()));
      last.key() = next;
      by_next_.insert(std::move(last));
      return;
    }
    // Of what was made so long ago, nothing is differentiated any more; if it is, its source is not told.
    if (by_next_.size() >= kMost) by_next_.erase(by_next_.begin());
    by_next_[next] = source;
  }
  const char* find(uint64_t number) const {
    const auto found = by_next_.upper_bound(number);
    return found == by_next_.end() ? nullptr : found->second;
  }
  // Up to which number nodes are noted.
  uint64_t last() const { return last_; }

 private:
  static constexpr size_t kMost = size_t{1} << 16;

  std::map<uint64_t, const char*> by_next_;
  uint64_t last_ = 0;
};

}  // namespace follow
