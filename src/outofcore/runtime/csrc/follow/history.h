// What a loop has done, op by op, and from it when a storage is used next.
//
// Loops repeat themselves. The history is one list of ops, however the loop is made up of micro-steps, updates and
// evaluations. While the loop does what it did before, a position in the history runs beside the present, usually one
// step behind it, and what comes after that position is what is expected. Ops are compared by their operator alone, so
// that batches of another length match; storages are told by their place among the operands of an op.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

namespace follow {

class History {
 public:
  // The operand (or the result, numbered after them) of an op, and the storage it was.
  using Touch = std::pair<int32_t, int64_t>;

  static constexpr int64_t kNever = int64_t{1} << 40;

  // An op begins, with these operands. Returns whether it was expected.
  bool begin(const void* op, const std::vector<Touch>& operands) {
    advance(op, operands);
    if (static_cast<int64_t>(ops_.size()) >= kMost) forget_oldest();
    ops_.push_back({op, {}});
    ops_.back().touched.reserve(operands.size() + 1);  // it may have a result
    for (const Touch& touch : operands) note(touch);
    return known() && skipped_ == 0;
  }
  // A result of the op that began last.
  void note(const Touch& touch) {
    Uses& uses = uses_[touch.second];
    try {
      ops_.back().touched.push_back(touch);
      if (uses.empty() || uses.back() != now()) uses.add(now());
    } catch (...) {  // a storage that is listed has a use
      if (uses.empty()) uses_.erase(touch.second);
      throw;
    }
  }

  // The storage that had this place in the op as it was before; -1: not known.
  int64_t twin(int32_t place) const {
    if (!known() || skipped_ != 0) return -1;
    for (const Touch& touch : at(position_).touched)
      if (touch.first == place) return touch.second;
    return -1;
  }

  // In how many ops a storage is used next, as far as known: `twin` is the one whose part it plays (-1: none).
  // Unknown: the longer it was not used, the later.
  int64_t next_use(int64_t twin, int64_t last_use) const {
    const int64_t age = now() - last_use;
    if (!known()) return age;
    if (twin >= 0) {
      const auto found = uses_.find(twin);
      if (found != uses_.end()) {
        const auto next = std::upper_bound(found->second.begin(), found->second.end(), position_);
        if (next != found->second.end()) return *next - position_;
      }
    }
    return kNever + age;
  }

  bool known() const { return position_ >= 0; }
  // Where the loop was in the history when it was where it is now.
  int64_t position() const { return position_; }
  const std::vector<Touch>& touched(int64_t position) const { return at(position).touched; }
  // How much it keeps: ops, storages, uses of storages.
  int64_t size() const { return static_cast<int64_t>(ops_.size()); }
  int64_t storages() const { return static_cast<int64_t>(uses_.size()); }
  int64_t uses() const {
    int64_t count = 0;
    for (const auto& [storage, uses] : uses_) count += uses.end() - uses.begin();
    return count;
  }
  int64_t now() const { return oldest_ + static_cast<int64_t>(ops_.size()) - 1; }

 private:
  struct Op {
    const void* op;
    std::vector<Touch> touched;
  };
  // The ops that use a storage, in order. Those that are forgotten go by halves: some storages are used by each op.
  class Uses {
   public:
    bool empty() const { return gone_ == at_.size(); }
    int64_t front() const { return at_[gone_]; }
    int64_t back() const { return at_.back(); }
    using Iterator = std::vector<int64_t>::const_iterator;
    Iterator begin() const { return at_.begin() + static_cast<int64_t>(gone_); }
    Iterator end() const { return at_.end(); }
    auto rbegin() const { return std::make_reverse_iterator(end()); }
    auto rend() const { return std::make_reverse_iterator(begin()); }
    void add(int64_t op) { at_.push_back(op); }
    void forget_first() {
      if (2 * ++gone_ < at_.size()) return;
      at_.erase(at_.begin(), begin());
      gone_ = 0;
    }

   private:
    std::vector<int64_t> at_;
    size_t gone_ = 0;
  };

  // Ops that are kept. More than a step of any model has, and a few MB.
  static constexpr int64_t kMost = int64_t{1} << 16;
  // So many ops may be left out at once, and so many in a row may be new, before the place is lost.
  static constexpr int64_t kAhead = 24, kSkipped = 12;
  // How far back the ops before a candidate are compared.
  static constexpr int64_t kContext = 16;
  // So many uses of a storage are looked at as candidates.
  static constexpr size_t kCandidates = 8;

  const Op& at(int64_t position) const { return ops_[static_cast<size_t>(position - oldest_)]; }

  // Moves the position to the op in the history that corresponds to the one that begins now.
  void advance(const void* op, const std::vector<Touch>& operands) {
    if (known() && step(op)) {
      if (skipped_ != 0 || !contradicted(operands)) return;
      position_ = -1;
    }
    find(op, operands);
  }

  // By the operator alone; false: the place is lost.
  bool step(const void* op) {
    if (position_ + 1 <= now() && at(position_ + 1).op == op) {
      ++position_;
      skipped_ = 0;
      return true;
    }
    // Only once another op was new: a single one is more often inserted than a sequence left out.
    if (skipped_ > 0)
      for (int64_t next = position_ + 2; next <= std::min(now(), position_ + kAhead); ++next)
        if (at(next).op == op) {
          position_ = next;
          skipped_ = 0;
          return true;
        }
    if (++skipped_ <= kSkipped) return true;
    position_ = -1;
    return false;
  }

  // Whether a storage that was there already at that place in the history, such as a parameter, was another one then:
  // the same operators come again and again, in one layer after the other.
  bool contradicted(const std::vector<Touch>& operands) const {
    for (const auto& [place, storage] : operands) {
      const auto found = uses_.find(storage);
      if (found != uses_.end() && found->second.front() <= position_ && twin(place) != storage) return true;
    }
    return false;
  }

  // The place is lost: looks for it among the earlier uses of what this op uses, such as of a parameter.
  void find(const void* op, const std::vector<Touch>& operands) {
    int64_t longest = kShortest;
    for (const auto& [place, storage] : operands) {
      const auto found = uses_.find(storage);
      if (found == uses_.end()) continue;
      size_t tried = 0;
      for (auto use = found->second.rbegin(); use != found->second.rend() && tried < kCandidates; ++use) {
        if (*use < oldest_ || at(*use).op != op) continue;
        ++tried;
        int64_t same = 0;
        while (same < kContext && *use - 1 - same >= oldest_ && at(*use - 1 - same).op == at(now() - same).op) ++same;
        if (same > longest) {
          longest = same;
          position_ = *use;
          skipped_ = 0;
        }
      }
    }
  }

  void forget_oldest() {
    for (const auto& [place, storage] : ops_.front().touched) {
      const auto found = uses_.find(storage);
      if (found == uses_.end()) continue;
      Uses& uses = found->second;
      if (uses.front() == oldest_) uses.forget_first();
      if (uses.empty()) uses_.erase(found);
    }
    ops_.pop_front();
    ++oldest_;
    if (position_ < oldest_) position_ = -1;
  }

  // Fewer ops before a candidate that are the same do not make it the place.
  static constexpr int64_t kShortest = 2;

  std::deque<Op> ops_;
  int64_t oldest_ = 0;  // the number of the first op that is kept
  std::unordered_map<int64_t, Uses> uses_;  // by storage
  int64_t position_ = -1;  // -1: what happens now is not known from before
  int64_t skipped_ = 0;    // ops in a row that were not expected
};

}  // namespace follow
