// Source lines of ops for messages. An op of a backward pass has the line that created its autograd node.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace follow {

class Sources {
 public:
  // Sets the source of the nodes from the last call up to, not including, `next`. Null: unknown.
  void record(uint64_t next, const char* source) {
    last_ = next;
    if (!by_next_.empty() && std::prev(by_next_.end())->second == source) {
      auto last = by_next_.extract(std::prev(by_next_.end()));
      last.key() = next;
      by_next_.insert(std::move(last));
      return;
    }
    // Nodes this old are rarely differentiated; their source is then unknown.
    if (by_next_.size() >= kMaxEntries) by_next_.erase(by_next_.begin());
    by_next_[next] = source;
  }
  const char* find(uint64_t number) const {
    const auto entry = by_next_.upper_bound(number);
    return entry == by_next_.end() ? nullptr : entry->second;
  }
  uint64_t last() const { return last_; }

 private:
  static constexpr size_t kMaxEntries = size_t{1} << 16;

  std::map<uint64_t, const char*> by_next_;
  uint64_t last_ = 0;
};

}  // namespace follow
