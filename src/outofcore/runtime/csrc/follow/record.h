// What a step of a loop does, as a plan is made of it, and where in such a record the loop is now.
//
// A step lasts from one update of the optimizer to the next, whatever lies between: micro-steps, evaluations, logging.
// Steps that run the same ops on storages in the same relations, or nearly so, are of one kind, whatever the sizes; for
// some sizes ("anchors") there is a plan.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "alignment.h"
#include "step.h"

namespace follow {

// Writes the record of the step under way.
class Recorder {
 public:
  void add(const void* op, const std::vector<Touched>& touched, int64_t nanos, std::vector<Request> requests,
           const char* source = nullptr) {
    if (touched.empty() || overflown_) {
      waiting_ += nanos;
      return;
    }
    if (static_cast<int64_t>(now_.ops.size()) >= kMost) return drop();
    try {
      write(op, touched, nanos, std::move(requests), source);
    } catch (const std::bad_alloc&) {
      drop();
    }
  }
  // Of a storage that is freed while it is copied this is called again when the copy has ended: the first call counts.
  void free(int64_t id) {
    if (overflown_) return;
    const auto ops = static_cast<int32_t>(now_.ops.size());
    if (const auto found = number_.find(id); found != number_.end()) {
      if (int32_t& freed = now_.storages[found->second].freed; freed < 0) freed = ops;
    } else if (const auto left = before_.find(id); left != before_.end()) {
      try {
        now_.leftovers.push_back({left->second, ops});
        before_.erase(left);
      } catch (const std::bad_alloc&) {  // a deleter of PyTorch's must not throw
        drop();
      }
    }
  }
  // Writes no more of the step under way, which then has no record.
  void drop() {
    overflown_ = true;
    now_ = {};
  }
  // The step has ended, and the next one begins. None: it was too long, or there was no memory for it.
  std::optional<Record> take() {
    std::optional<Record> done;
    if (!overflown_ && !now_.ops.empty()) done = std::move(now_);
    now_ = {};
    number_.clear();
    before_.clear();
    overflown_ = false;
    waiting_ = 0;
    if (done) done->before = signature_before_;
    signature_before_ = done ? done->signature : 0;
    if (!done) return done;
    for (size_t i = 0; i < done->storages.size(); ++i)
      if (done->storages[i].created && done->storages[i].freed < 0)
        before_.emplace(done->storages[i].id, static_cast<int32_t>(i));
    return done;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 18;

  void write(const void* op, const std::vector<Touched>& touched, int64_t nanos, std::vector<Request> requests,
             const char* source) {
    StepOp made{op, {}, source};
    made.touched.reserve(touched.size());
    sign(reinterpret_cast<uintptr_t>(op));
    for (const Touched& each : touched) {
      auto found = number_.find(each.id);
      const bool fresh = found == number_.end();
      if (fresh) {
        found = number_.emplace(each.id, static_cast<int32_t>(now_.storages.size())).first;
        now_.storages.push_back({each.id, each.bytes, -1, each.created});
      }
      StepStorage& storage = now_.storages[found->second];
      storage.bytes = std::max(storage.bytes, each.bytes);
      made.touched.push_back({each.place, found->second, each.written, fresh && each.created});
      sign(static_cast<uint64_t>(static_cast<uint32_t>(each.place)) << 32 | static_cast<uint32_t>(found->second));
      sign(each.written * 2 + (fresh && each.created));
    }
    now_.ops.push_back(std::move(made));
    now_.nanos.push_back(nanos + waiting_);
    now_.workspaces.push_back(place_scratch(requests));
    now_.requests.push_back(std::move(requests));
    waiting_ = 0;
  }

  void sign(uint64_t word) {
    now_.signature = (now_.signature ^ word) * 0x9E3779B97F4A7C15ull;
    now_.signature ^= now_.signature >> 32;
  }

  Record now_;
  std::unordered_map<int64_t, int32_t> number_, before_;
  int64_t waiting_ = 0;
  bool overflown_ = false;
  uint64_t signature_before_ = 0;
};

// What a plan says, by op of the record.
struct Schedule {
  std::vector<std::vector<int32_t>> leave;   // storages whose room others may take from here on
  std::vector<std::vector<int32_t>> fetch;   // that begin to come back here
  std::vector<std::vector<int32_t>> write;   // that begin to be written to their home once the op is done
  // By storage: from which op that uses it on it lies at which offset of the arena.
  std::vector<std::vector<std::pair<int32_t, int64_t>>> offsets;
  std::vector<int64_t> scratch;  // by op, where its scratch memory lies; -1: anywhere

  // Where a storage is to lie that an op uses; -1: anywhere.
  int64_t offset(int32_t storage, int32_t op) const {
    const auto& all = offsets[storage];
    const auto behind = std::upper_bound(all.begin(), all.end(), std::pair{op, INT64_MAX});
    return behind == all.begin() ? -1 : std::prev(behind)->second;
  }
};

// Steps that make up to so much less than an anchor follow its plan for good.
constexpr double kClose = 1.15;

// The record at certain sizes.
struct Anchor {
  int64_t number;
  std::vector<int64_t> bytes;  // by storage
  std::vector<std::vector<Request>> requests;  // by op
  int64_t size = 0;
  int64_t used = 0;            // the step in which it was last of use
  std::unique_ptr<Schedule> schedule;  // none: not planned yet
};

// All that is known of steps of one kind.
struct Known {
  int64_t number;
  Record usual;                                     // one of them
  std::vector<bool> other;                          // by op: others of the kind run the operator on other storages
  std::vector<std::vector<int32_t>> uses;           // by storage
  std::vector<int64_t> persistent;                  // by storage: the block that it always is; -1: another in each step
  std::unordered_map<int64_t, int32_t> of_block;    // the persistent ones
  std::vector<int64_t> last;                        // by storage: the block that it was in the last step; -1: unknown
  int64_t casting;                                  // identifies ``of_block``: another number once `settle` adds to it
  int settlings = 0;                                // how often `settle` has
  int64_t unsettled = 0;                            // bytes of the last step that may turn out to persist in the next one
  bool awaited = false;                             // the first plan has waited a step to see whether they do
  std::vector<void*> playing;                       // by storage: the block that is it now
  std::list<Anchor> anchors;
  int64_t used = 0;
  int64_t then = -1;  // the number of the kind that came after it last
};

// Follows a loop through the records that there are.
class Follower {
 public:
  static constexpr int64_t kNever = int64_t{1} << 40;

  // An op begins, or, for one that has no large operands, has made its results. True: it is where the record has it.
  bool advance(const void* op, const std::vector<Touched>& touched) {
    if (known_ != nullptr) {
      if (const int32_t next = this->next(); fits(*known_, next, op, touched)) {
        remember(op);
        return arrive(next);
      }
      // A few ops may be left out once, and a few may come in between.
      const auto n = static_cast<int32_t>(known_->usual.ops.size());
      if (strange_ > 0)
        for (int32_t ahead = 2; ahead <= std::min(kAhead, n); ++ahead)
          if (const int32_t next = (position_ + ahead) % n;
              fits(*known_, next, op, touched) &&
              (has_anchor(*known_, next, touched) || same_before(*known_, next, kLikely) == kLikely)) {
            remember(op);
            return arrive(next);
          }
      if (++strange_ > kStrange) known_ = nullptr;
    }
    const bool found = find(op, touched);
    remember(op);
    return found;
  }
  // Whether an op without large operands is, if it makes something large, the next one.
  bool may_make(const void* op) const {
    if (!on_course()) return false;
    const StepOp& there = known_->usual.ops[next()];
    return there.op == op && std::all_of(there.touched.begin(), there.touched.end(),
                                         [](const auto& touch) { return touch.place < 0; });
  }
  int32_t next() const { return (position_ + 1) % static_cast<int32_t>(known_->usual.ops.size()); }
  bool on_course() const { return known_ != nullptr && strange_ == 0; }
  bool active() const { return known_ != nullptr; }
  Known* known() const { return known_; }
  int32_t position() const { return position_; }
  // Ops that were passed over when the position was reached.
  int32_t passed() const { return passed_; }

  const StepOp& op() const { return known_->usual.ops[position_]; }
  // The storage at a place of the op where the loop is now; -1: none.
  int32_t storage_at(int32_t place) const {
    for (const auto& touch : op().touched)
      if (touch.place == place) return touch.storage;
    return -1;
  }
  // In how many ops a storage of the record is used next, with the next step behind this one.
  int64_t next_use(int32_t storage) const {
    const std::vector<int32_t>& uses = known_->uses[storage];
    const auto next = std::upper_bound(uses.begin(), uses.end(), position_);
    if (next != uses.end()) return *next - position_;
    if (known_->persistent[storage] < 0) return kNever;
    return static_cast<int64_t>(known_->usual.ops.size()) - position_ + uses.front();
  }

  // The op, this one or a later one, that uses a storage of the record next; -1: none.
  int32_t next_from_here(int32_t storage) const {
    const std::vector<int32_t>& uses = known_->uses[storage];
    const auto next = std::lower_bound(uses.begin(), uses.end(), position_);
    if (next != uses.end()) return *next;
    return known_->persistent[storage] < 0 ? -1 : uses.front();
  }

  // A step has ended: what is known of such steps, if anything. Where they differ a little the record is then in terms
  // of the usual one, and `ops` says of each of its ops which one of the step that was; empty: they are the same.
  Known* end_of_step(Record& record, std::vector<int32_t>& ops) {
    ++steps_;
    ops.clear();
    for (auto& each : known_ones_)
      if (each->usual.signature == record.signature && each->usual.ops.size() == record.ops.size()) {
        // What a step of another kind had left goes by its numbers there.
        if (record.before != record.signature) record.leftovers = each->usual.leftovers;
        return ended(*each);
      }
    const auto same = std::find_if(seen_once_.begin(), seen_once_.end(),
                                   [&](const Record& each) { return each.signature == record.signature; });
    if (same != seen_once_.end()) {
      const Record before = std::move(*same);
      seen_once_.erase(same);
      return ended(made_known(record, before, nullptr));
    }
    Known* like = nullptr;
    std::optional<Alignment> with_it;
    for (auto& each : known_ones_)
      if (auto found = align(each->usual, record, with_it ? with_it->share : kAlike))
        like = each.get(), with_it = std::move(found);
    if (like != nullptr) {
      for (size_t i = 0; i < with_it->other.size(); ++i) like->other[i] = like->other[i] || with_it->other[i];
      Record in_its_terms = translated(record, like->usual, *with_it);
      see_once(std::move(record));
      record = std::move(in_its_terms);
      ops = std::move(with_it->ops);
      return ended(*like);
    }
    auto nearest = seen_once_.end();
    for (auto each = seen_once_.begin(); each != seen_once_.end(); ++each)
      if (auto found = align(record, *each, with_it ? with_it->share : kAlike))
        nearest = each, with_it = std::move(found);
    if (nearest == seen_once_.end()) {
      see_once(std::move(record));
      return nullptr;
    }
    const Record before = std::move(*nearest);
    seen_once_.erase(nearest);
    return ended(made_known(record, before, &*with_it));
  }
  // Marks storages as persistent that were the same block in the last two steps of the kind, and that neither step made,
  // such as the gradient buckets that DDP makes in its second step. Returns whether it marked any: plans that were made
  // before must be dropped then, since they take the room of these storages for free.
  bool settle(Known& known, const Record& record) {
    constexpr int kMostSettlings = 4;  // a loop that uses each batch twice would drop its plans for ever
    bool changed = false;
    known.unsettled = 0;
    for (size_t i = 0; i < record.storages.size(); ++i) {
      const StepStorage& storage = record.storages[i];
      const int64_t before = std::exchange(known.last[i], storage.id);
      if (known.persistent[i] >= 0 || storage.created || storage.freed >= 0) continue;
      if (storage.id < 0 || storage.id != before || known.settlings >= kMostSettlings ||
          !known.of_block.emplace(storage.id, static_cast<int32_t>(i)).second) {
        known.unsettled += storage.bytes;
        continue;
      }
      known.persistent[i] = storage.id;
      known.usual.storages[i].freed = -1;
      changed = true;
    }
    if (changed) known.casting = castings_++, ++known.settlings;
    return changed;
  }
  // After such a step: the loop is about to do what it did after the last one of the kind.
  void stand_after(Known& known) {
    known_ = &known;
    for (auto& each : known_ones_)
      if (each->number == known.then) known_ = each.get();
    position_ = static_cast<int32_t>(known_->usual.ops.size()) - 1;
    strange_ = passed_ = 0;
  }
  // A block is gone.
  void forget(int64_t id) {
    for (auto& each : known_ones_) {
      if (const auto found = each->of_block.find(id); found != each->of_block.end()) {
        each->playing[found->second] = nullptr;
        each->persistent[found->second] = -1;
        each->of_block.erase(found);
      }
    }
  }
  const std::list<std::unique_ptr<Known>>& all() const { return known_ones_; }
  int64_t steps() const { return steps_; }

 private:
  Known* ended(Known& known) {
    for (auto& each : known_ones_)
      if (each->number == last_ended_) each->then = known.number;
    last_ended_ = known.number;
    known.used = steps_;
    return &known;
  }

  // Makes two sightings a kind; `alignment` from the later to the earlier, null: they are the same.
  Known& made_known(Record& record, const Record& before, const Alignment* alignment) {
    if (known_ones_.size() >= kKnown) forget_one();
    // What the step before had left is known by its numbers there.
    if (record.before != before.signature) {
      record.leftovers.clear();
    } else if (alignment != nullptr) {
      std::vector<Record::Leftover> left;
      for (size_t i = 0; i < alignment->storages.size(); ++i)
        for (const Record::Leftover& each : record.leftovers)
          if (each.storage == alignment->storages[i]) left.push_back({static_cast<int32_t>(i), each.freed});
      record.leftovers = std::move(left);
    }
    auto made = std::make_unique<Known>();
    made->number = numbers_++;
    made->usual = record;
    made->other = alignment != nullptr ? alignment->other : std::vector<bool>(record.ops.size(), false);
    made->uses.resize(record.storages.size());
    made->playing.assign(record.storages.size(), nullptr);
    made->persistent.assign(record.storages.size(), -1);
    for (size_t i = 0; i < record.ops.size(); ++i)
      for (const auto& touch : record.ops[i].touched)
        if (auto& uses = made->uses[touch.storage]; uses.empty() || uses.back() != static_cast<int32_t>(i))
          uses.push_back(static_cast<int32_t>(i));
    for (size_t i = 0; i < record.storages.size(); ++i) {
      const int32_t there = alignment != nullptr ? alignment->storages[i] : static_cast<int32_t>(i);
      made->last.push_back(there < 0 ? -1 : before.storages[there].id);
      if (there < 0 || record.storages[i].id != before.storages[there].id || record.storages[i].freed >= 0) continue;
      made->persistent[i] = record.storages[i].id;
      made->of_block.emplace(record.storages[i].id, static_cast<int32_t>(i));
    }
    made->casting = castings_++;
    known_ones_.push_back(std::move(made));
    return *known_ones_.back();
  }
  void see_once(Record record) {
    if (seen_once_.size() >= kSeenOnce) seen_once_.pop_front();
    seen_once_.push_back(std::move(record));
  }

  // How much of their time steps of one kind have in common at least.
  static constexpr double kAlike = 0.8;
  static constexpr int32_t kAhead = 24, kStrange = 12, kContext = 16, kShortest = 2, kLikely = 4;
  static constexpr size_t kSeenOnce = 4, kKnown = 8;

  bool arrive(int32_t position) {
    const auto n = static_cast<int32_t>(known_->usual.ops.size());
    passed_ = (position - position_ - 1 + n) % n;
    position_ = position;
    strange_ = 0;
    return true;
  }

  // Whether an op can be the one at a position: the same operator, and no storage that lasts is another one.
  static bool fits(const Known& known, int32_t position, const void* op, const std::vector<Touched>& touched) {
    const StepOp& there = known.usual.ops[position];
    if (there.op != op) return false;
    size_t operands = 0, expected = 0;
    for (const auto& touch : there.touched) expected += touch.place > 0;
    for (const Touched& each : touched) {
      if (each.place < 0) continue;
      ++operands;
      if (known.other[position]) continue;
      const auto mine = known.of_block.find(each.id);
      for (const auto& touch : there.touched)
        if (touch.place == each.place) {
          if (known.persistent[touch.storage] >= 0 ? mine == known.of_block.end() || mine->second != touch.storage
                                                   : mine != known.of_block.end())
            return false;
        }
    }
    return operands == expected;
  }
  // Whether an op has an operand that lasts, by which it is told from its like.
  static bool has_anchor(const Known& known, int32_t position, const std::vector<Touched>& touched) {
    for (const auto& touch : known.usual.ops[position].touched)
      if (known.persistent[touch.storage] >= 0)
        for (const Touched& each : touched)
          if (each.place == touch.place) return true;
    return false;
  }

  // How many operators before an op are those that have run last, up to so many.
  int32_t same_before(const Known& known, int32_t at, int32_t most) const {
    int32_t same = 0;
    const auto n = static_cast<int32_t>(known.usual.ops.size());
    while (same < std::min({most, static_cast<int32_t>(last_.size()), n}) &&
           known.usual.ops[(at - 1 - same + 2 * n) % n].op == last_[last_.size() - 1 - same])
      ++same;
    return same;
  }

  // The place is lost: looks for it where a storage that lasts is used.
  bool find(const void* op, const std::vector<Touched>& touched) {
    Known* best = nullptr;
    int32_t best_at = -1, longest = kShortest - 1;
    int64_t latest = -1;
    for (auto& each : known_ones_)
      for (const Touched& touch : touched) {
        const auto found = each->of_block.find(touch.id);
        if (found == each->of_block.end()) continue;
        for (const int32_t at : each->uses[found->second]) {
          if (!fits(*each, at, op, touched)) continue;
          const int32_t same = same_before(*each, at, kContext);
          if (same > longest || (same == longest && each->used > latest)) {
            longest = same, latest = each->used;
            best = each.get(), best_at = at;
          }
        }
      }
    if (best == nullptr) return false;
    known_ = best;
    position_ = best_at;
    passed_ = 0;
    strange_ = 0;
    return true;
  }

  void remember(const void* op) {
    last_.push_back(op);
    if (last_.size() > static_cast<size_t>(kContext)) last_.pop_front();
  }

  void forget_one() {
    const auto oldest = std::min_element(known_ones_.begin(), known_ones_.end(),
                                         [](const auto& a, const auto& b) { return a->used < b->used; });
    if (oldest->get() == known_) known_ = nullptr;
    known_ones_.erase(oldest);
  }

  std::list<std::unique_ptr<Known>> known_ones_;
  std::deque<Record> seen_once_;
  std::deque<const void*> last_;
  Known* known_ = nullptr;  // where the loop is now; null: not known
  int32_t position_ = 0, strange_ = 0, passed_ = 0;
  int64_t steps_ = 0, numbers_ = 0, castings_ = 0, last_ended_ = -1;
};

}  // namespace follow
