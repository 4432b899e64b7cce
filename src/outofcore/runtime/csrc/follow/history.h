// The history of a loop, op by op, to predict the next use of each storage. While the loop repeats itself, a position
// in the history advances with it, usually one step behind, and the ops after that position are the prediction. Ops are
// compared by operator only, so batches of another length match. Storages are identified by their place among an op's
// operands.

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
  // Place of an operand or result, and its storage.
  using Touch = std::pair<int32_t, int64_t>;

  static constexpr int64_t kNever = int64_t{1} << 40;

  // Adds an op with its operands. Returns whether it was predicted.
  bool begin(const void* op, const std::vector<Touch>& operands) {
    advance(op, operands);
    if (static_cast<int64_t>(ops_.size()) >= kMaxOps) forget_oldest();
    ops_.push_back({op, {}});
    ops_.back().touched.reserve(operands.size() + 1);  // room for a result
    for (const Touch& touch : operands) add_touch(touch);
    return has_position() && skipped_ == 0;
  }
  // Adds an operand or a result of the last op.
  void add_touch(const Touch& touch) {
    Uses& uses = uses_[touch.second];
    try {
      ops_.back().touched.push_back(touch);
      if (uses.empty() || uses.back() != now()) uses.add(now());
    } catch (...) {  // every storage in the map has a use
      if (uses.empty()) uses_.erase(touch.second);
      throw;
    }
  }

  // Returns the storage at this place of the corresponding earlier op, or -1.
  int64_t twin(int32_t place) const {
    if (!has_position() || skipped_ != 0) return -1;
    for (const Touch& touch : at(position_).touched)
      if (touch.first == place) return touch.second;
    return -1;
  }

  // Ops until the next use, as far as known. `twin`: its counterpart in the history, or -1.
  int64_t next_use(int64_t twin, int64_t last_use) const {
    const int64_t age = now() - last_use;
    if (!has_position()) return age;
    if (twin >= 0) {
      const auto entry = uses_.find(twin);
      if (entry != uses_.end()) {
        const auto next = std::upper_bound(entry->second.begin(), entry->second.end(), position_);
        if (next != entry->second.end()) return *next - position_;
      }
    }
    return kNever + age;
  }

  bool has_position() const { return position_ >= 0; }
  // The earlier position that corresponds to the present.
  int64_t position() const { return position_; }
  const std::vector<Touch>& touched(int64_t position) const { return at(position).touched; }
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
  // The ops that use a storage, in order. Forgotten ones are erased in halves, because there may be many.
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

  // More ops than a step of any model has; a few MB.
  static constexpr int64_t kMaxOps = int64_t{1} << 16;
  // Ops that may be skipped at once, and consecutive new ops, before the position is lost.
  static constexpr int64_t kAhead = 24, kSkipped = 12;
  static constexpr int64_t kContext = 16;
  // Uses of a storage that are tried as candidates.
  static constexpr size_t kCandidates = 8;

  const Op& at(int64_t position) const { return ops_[static_cast<size_t>(position - oldest_)]; }

  void advance(const void* op, const std::vector<Touch>& operands) {
    if (has_position() && step(op)) {
      if (skipped_ != 0 || !contradicts(operands)) return;
      position_ = -1;
    }
    find(op, operands);
  }

  // Compares operators only. Returns false if the position is lost.
  bool step(const void* op) {
    if (position_ + 1 <= now() && at(position_ + 1).op == op) {
      ++position_;
      skipped_ = 0;
      return true;
    }
    // Only after another new op: single insertions are more common than omitted sequences.
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

  // Whether a storage that existed at this position was another one there, because layers repeat the same operators.
  bool contradicts(const std::vector<Touch>& operands) const {
    for (const auto& [place, storage] : operands) {
      const auto entry = uses_.find(storage);
      if (entry != uses_.end() && entry->second.front() <= position_ && twin(place) != storage) return true;
    }
    return false;
  }

  void find(const void* op, const std::vector<Touch>& operands) {
    int64_t longest = kShortest;
    for (const auto& [place, storage] : operands) {
      const auto entry = uses_.find(storage);
      if (entry == uses_.end()) continue;
      size_t tried = 0;
      for (auto use = entry->second.rbegin(); use != entry->second.rend() && tried < kCandidates; ++use) {
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
      const auto entry = uses_.find(storage);
      if (entry == uses_.end()) continue;
      Uses& uses = entry->second;
      if (uses.front() == oldest_) uses.forget_first();
      if (uses.empty()) uses_.erase(entry);
    }
    ops_.pop_front();
    ++oldest_;
    if (position_ < oldest_) position_ = -1;
  }

  // A candidate needs more matching predecessors than this.
  static constexpr int64_t kShortest = 2;

  std::deque<Op> ops_;
  int64_t oldest_ = 0;  // number of the first op kept
  std::unordered_map<int64_t, Uses> uses_;  // by storage
  int64_t position_ = -1;  // -1: the present does not match the history
  int64_t skipped_ = 0;    // consecutive ops that were not predicted
};

}  // namespace follow
