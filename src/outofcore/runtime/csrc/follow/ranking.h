// Blocks ordered by next use, furthest first, without examining all of them for each request. A block's key is the
// number of the op that uses it next, which stays constant while other ops run. It is determined when the order is
// first needed, and again after each use. Predictions may change: too large a key is corrected when its block is
// visited, too small a key when all blocks are ranked again, from time to time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

namespace follow {

// A block's position in the order. Blocks start with a default one.
struct Rank {
  int64_t key = 0, tie = 0;
  size_t waiting = 0;  // number among the items without a key, from 1; 0: has a key, or is not in the order
};

template <class Item>
class Ranking {
 public:
  void add(Item* item) {
    waiting_.push_back(item);
    item->rank.waiting = waiting_.size();
  }
  void remove(Item* item) {
    if (item->rank.waiting == 0) {
      ranked_.erase(entry_of(item));
      return;
    }
    Item* last = waiting_.back();
    waiting_[item->rank.waiting - 1] = last;
    last->rank.waiting = item->rank.waiting;
    waiting_.pop_back();
    item->rank.waiting = 0;
  }
  // Call when the item's next use or tie has changed.
  void touch(Item* item) {
    if (item->rank.waiting != 0) return;
    ranked_.erase(entry_of(item));
    add(item);
  }
  void touch_all() {
    for (const auto& [key, tie, item] : ranked_) add(item);
    ranked_.clear();
  }

  // By descending key, then ascending tie, until `visit` returns false. `visit` must not change the ranking.
  template <class Key, class Tie, class Visit>
  void visit(Key&& key_of, Tie&& tie_of, Visit&& visit) {
    for (Item* item : waiting_) {
      item->rank = {key_of(*item), tie_of(*item), 0};
      ranked_.insert(entry_of(item));
    }
    waiting_.clear();
    for (auto it = ranked_.begin(); it != ranked_.end();) {
      Item* item = std::get<2>(*it);
      if (const int64_t key = key_of(*item); key < item->rank.key) {
        it = ranked_.erase(it);
        item->rank.key = key;
        const auto fresh = ranked_.insert(entry_of(item)).first;
        if (it == ranked_.end() || *fresh < *it) it = fresh;
        continue;
      }
      if (!visit(*item)) return;
      ++it;
    }
  }

  size_t size() const { return waiting_.size() + ranked_.size(); }

 private:
  using Entry = std::tuple<int64_t, int64_t, Item*>;  // negative key, tie
  static Entry entry_of(Item* item) { return {-item->rank.key, item->rank.tie, item}; }

  std::vector<Item*> waiting_;
  std::set<Entry> ranked_;
};

}  // namespace follow
