// Blocks in the order in which they are used next, the furthest first, without looking at all of them for each request.
//
// The key of a block is the number of the op that uses it next, which stays the same while others run. A block is ranked
// when somebody asks for the order, and again once an op has used it. What the loop does next may turn out otherwise: a
// block whose key has become too large is found when its turn comes, and gets its new place; keys that have become too
// small are found every now and then, when all are ranked anew.

#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

namespace follow {

// The place of a block in the order. A block begins with a default one.
struct Rank {
  int64_t key = 0, tie = 0;
  size_t waiting = 0;  // its number among those without a key, from 1; 0: it has one, or is not in the order
};

// `Item` has a member ``rank``.
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
  // Its next use is another one, or its tie is.
  void touch(Item* item) {
    if (item->rank.waiting != 0) return;
    ranked_.erase(entry_of(item));
    add(item);
  }
  void touch_all() {
    for (const auto& [key, tie, item] : ranked_) add(item);
    ranked_.clear();
  }

  // Visits the items, those with the largest key first and of equal ones those with the smallest tie, until `visit` returns
  // false. `key_of` and `tie_of` give those of an item. `visit` changes nothing in here.
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
  using Entry = std::tuple<int64_t, int64_t, Item*>;  // the negative key, the tie
  static Entry entry_of(Item* item) { return {-item->rank.key, item->rank.tie, item}; }

  std::vector<Item*> waiting_;
  std::set<Entry> ranked_;
};

}  // namespace follow
