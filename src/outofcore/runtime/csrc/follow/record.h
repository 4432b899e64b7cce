// Records of steps, as the basis of plans, and the loop's position in them. A step lasts from one optimizer update to
// the next. Steps of all sizes with (nearly) the same ops on storages in the same relations are of one kind. Each kind
// has plans for some sizes (size buckets).

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

class Recorder {
 public:
  void add(const void* op, const std::vector<Touched>& touched, int64_t nanos, std::vector<Request> requests,
           const char* source = nullptr) {
    if (touched.empty() || overflowed_) {
      waiting_ += nanos;
      return;
    }
    if (static_cast<int64_t>(now_.ops.size()) >= kMaxOps) return drop();
    try {
      write(op, touched, nanos, std::move(requests), source);
    } catch (const std::bad_alloc&) {
      drop();
    }
  }
  // Called again when a freed storage's copy has ended; the first call counts.
  void free(int64_t id) {
    if (overflowed_) return;
    const auto ops = static_cast<int32_t>(now_.ops.size());
    if (const auto entry = number_.find(id); entry != number_.end()) {
      if (int32_t& freed = now_.storages[entry->second].freed; freed < 0) freed = ops;
    } else if (const auto leftover = before_.find(id); leftover != before_.end()) {
      try {
        now_.leftovers.push_back({leftover->second, ops});
        before_.erase(leftover);
      } catch (const std::bad_alloc&) {  // PyTorch's deleters must not throw
        drop();
      }
    }
  }
  // Stops recording; the current step then has no record.
  void drop() {
    overflowed_ = true;
    now_ = {};
  }
  // Ends the step and starts the next. None: too long, or memory ran out.
  std::optional<Record> take() {
    std::optional<Record> record;
    if (!overflowed_ && !now_.ops.empty()) record = std::move(now_);
    now_ = {};
    number_.clear();
    before_.clear();
    overflowed_ = false;
    waiting_ = 0;
    if (record) record->before = signature_before_;
    signature_before_ = record ? record->signature : 0;
    if (!record) return record;
    for (size_t i = 0; i < record->storages.size(); ++i)
      if (record->storages[i].created && record->storages[i].freed < 0)
        before_.emplace(record->storages[i].id, static_cast<int32_t>(i));
    return record;
  }

 private:
  static constexpr int64_t kMaxOps = int64_t{1} << 18;

  void write(const void* op, const std::vector<Touched>& touched, int64_t nanos, std::vector<Request> requests,
             const char* source) {
    StepOp step_op{op, {}, source};
    step_op.touched.reserve(touched.size());
    sign(reinterpret_cast<uintptr_t>(op));
    for (const Touched& touch : touched) {
      auto entry = number_.find(touch.id);
      const bool fresh = entry == number_.end();
      if (fresh) {
        entry = number_.emplace(touch.id, static_cast<int32_t>(now_.storages.size())).first;
        now_.storages.push_back({touch.id, touch.bytes, -1, touch.created});
      }
      StepStorage& storage = now_.storages[entry->second];
      storage.bytes = std::max(storage.bytes, touch.bytes);
      step_op.touched.push_back({touch.place, entry->second, touch.written, fresh && touch.created});
      sign(static_cast<uint64_t>(static_cast<uint32_t>(touch.place)) << 32 | static_cast<uint32_t>(entry->second));
      sign(touch.written * 2 + (fresh && touch.created));
    }
    now_.ops.push_back(std::move(step_op));
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
  bool overflowed_ = false;
  uint64_t signature_before_ = 0;
};

// A plan, by op of the record.
struct Schedule {
  std::vector<std::vector<int32_t>> leave;  // storages that may be evicted from here on
  std::vector<std::vector<int32_t>> fetch;  // storages to start fetching here
  std::vector<std::vector<int32_t>> write;  // storages to start writing once the op is done
  // By storage: pairs of an op that uses it and its offset from there on.
  std::vector<std::vector<std::pair<int32_t, int64_t>>> offsets;
  std::vector<int64_t> scratch;  // by op: offset of scratch memory; -1: anywhere

  // The planned offset of a storage at an op that uses it; -1: anywhere.
  int64_t offset(int32_t storage, int32_t op) const {
    const auto& all = offsets[storage];
    const auto behind = std::upper_bound(all.begin(), all.end(), std::pair{op, INT64_MAX});
    return behind == all.begin() ? -1 : std::prev(behind)->second;
  }
};

// A step follows the plan of a size bucket that is larger by up to this factor.
constexpr double kClose = 1.15;

// The sizes of a record, and their plan.
struct SizeBucket {
  int64_t number;
  std::vector<int64_t> bytes;  // by storage
  std::vector<std::vector<Request>> requests;  // by op
  int64_t size = 0;
  int64_t last_used = 0;               // step of its last use
  std::unique_ptr<Schedule> schedule;  // null: not planned yet
};

struct StepKind {
  int64_t number;
  Record usual;                                           // an example
  std::vector<bool> other_storages;                       // by op: steps of this kind use various storages
  std::vector<std::vector<int32_t>> uses;                 // by storage
  std::vector<int64_t> persistent;                        // by storage: its permanent block; -1: varies
  std::unordered_map<int64_t, int32_t> storage_by_block;  // persistent storages
  std::vector<int64_t> last_blocks;                       // by storage: its block in the last step; -1: unknown
  int64_t roles_version;                                  // identifies `of_block`; changes with `mark_persistent`
  int persistence_updates = 0;                            // calls of `mark_persistent` that changed it
  int64_t unconfirmed_bytes = 0;                          // bytes of the last step that may turn out to persist
  bool has_waited = false;                                // the first plan was delayed by a step for them
  std::vector<void*> blocks;                              // by storage: its current block
  std::list<SizeBucket> buckets;
  int64_t last_used = 0;
  int64_t next_kind = -1;  // number of the kind that followed last
};

class Follower {
 public:
  static constexpr int64_t kNever = int64_t{1} << 40;

  // Call at an op's start, or after it has created results without large operands. Returns whether it matches the
  // record.
  bool advance(const void* op, const std::vector<Touched>& touched) {
    if (kind_ != nullptr) {
      if (const int32_t next = this->next(); fits(*kind_, next, op, touched)) {
        remember(op);
        return move_to(next);
      }
      // A few ops may be omitted or inserted.
      const auto n = static_cast<int32_t>(kind_->usual.ops.size());
      if (unexpected_ > 0)
        for (int32_t ahead = 2; ahead <= std::min(kAhead, n); ++ahead)
          if (const int32_t next = (position_ + ahead) % n;
              fits(*kind_, next, op, touched) &&
              (has_persistent_operand(*kind_, next, touched) || count_same_before(*kind_, next, kLikely) == kLikely)) {
            remember(op);
            return move_to(next);
          }
      if (++unexpected_ > kMaxUnexpected) kind_ = nullptr;
    }
    const bool matches = find(op, touched);
    remember(op);
    return matches;
  }
  // Whether an op without large operands is next if it creates a large result.
  bool may_make(const void* op) const {
    if (!on_course()) return false;
    const StepOp& there = kind_->usual.ops[next()];
    return there.op == op && std::all_of(there.touched.begin(), there.touched.end(),
                                         [](const auto& touch) { return touch.place < 0; });
  }
  int32_t next() const { return (position_ + 1) % static_cast<int32_t>(kind_->usual.ops.size()); }
  bool on_course() const { return kind_ != nullptr && unexpected_ == 0; }
  bool is_active() const { return kind_ != nullptr; }
  StepKind* kind() const { return kind_; }
  int32_t position() const { return position_; }
  // Ops skipped to reach the position.
  int32_t skipped_ops() const { return skipped_ops_; }

  const StepOp& op() const { return kind_->usual.ops[position_]; }
  // The storage at a place of the current op, or -1.
  int32_t storage_at(int32_t place) const {
    for (const auto& touch : op().touched)
      if (touch.place == place) return touch.storage;
    return -1;
  }
  // The number of ops until a storage's next use; the next step follows this one.
  int64_t next_use(int32_t storage) const {
    const std::vector<int32_t>& uses = kind_->uses[storage];
    const auto next = std::upper_bound(uses.begin(), uses.end(), position_);
    if (next != uses.end()) return *next - position_;
    if (kind_->persistent[storage] < 0) return kNever;
    return static_cast<int64_t>(kind_->usual.ops.size()) - position_ + uses.front();
  }

  // The current or a later op that uses a storage next, or -1.
  int32_t next_from_here(int32_t storage) const {
    const std::vector<int32_t>& uses = kind_->uses[storage];
    const auto next = std::lower_bound(uses.begin(), uses.end(), position_);
    if (next != uses.end()) return *next;
    return kind_->persistent[storage] < 0 ? -1 : uses.front();
  }

  // Ends a step and returns its kind, if any. For a similar step the record is translated to the usual one, and `ops`
  // has the step's op for each op; empty: identical.
  StepKind* end_of_step(Record& record, std::vector<int32_t>& ops) {
    ++steps_;
    ops.clear();
    for (auto& candidate : kinds_)
      if (candidate->usual.signature == record.signature && candidate->usual.ops.size() == record.ops.size()) {
        // Leftovers of another kind's step have other numbers.
        if (record.before != record.signature) record.leftovers = candidate->usual.leftovers;
        return finish_kind(*candidate);
      }
    const auto same = std::find_if(sightings_.begin(), sightings_.end(),
                                   [&](const Record& candidate) { return candidate.signature == record.signature; });
    if (same != sightings_.end()) {
      const Record before = std::move(*same);
      sightings_.erase(same);
      return finish_kind(add_kind(record, before, nullptr));
    }
    StepKind* similar = nullptr;
    std::optional<Alignment> best_alignment;
    for (auto& candidate : kinds_)
      if (auto alignment = align(candidate->usual, record, best_alignment ? best_alignment->share : kAlike))
        similar = candidate.get(), best_alignment = std::move(alignment);
    if (similar != nullptr) {
      for (size_t i = 0; i < best_alignment->other_storages.size(); ++i)
        similar->other_storages[i] = similar->other_storages[i] || best_alignment->other_storages[i];
      Record in_its_terms = translate(record, similar->usual, *best_alignment);
      remember_once(std::move(record));
      record = std::move(in_its_terms);
      ops = std::move(best_alignment->ops);
      return finish_kind(*similar);
    }
    auto nearest = sightings_.end();
    for (auto candidate = sightings_.begin(); candidate != sightings_.end(); ++candidate)
      if (auto alignment = align(record, *candidate, best_alignment ? best_alignment->share : kAlike))
        nearest = candidate, best_alignment = std::move(alignment);
    if (nearest == sightings_.end()) {
      remember_once(std::move(record));
      return nullptr;
    }
    const Record before = std::move(*nearest);
    sightings_.erase(nearest);
    return finish_kind(add_kind(record, before, &*best_alignment));
  }
  // Marks storages as persistent that were the same block in the last two steps and that neither step created, such as
  // the gradient buckets of DDP's second step. Returns whether any was marked. Earlier plans must then be dropped: they
  // treat the room of these storages as free.
  bool mark_persistent(StepKind& kind, const Record& record) {
    constexpr int kMaxUpdates = 4;  // a loop that uses each batch twice would never keep its plans
    bool changed = false;
    kind.unconfirmed_bytes = 0;
    for (size_t i = 0; i < record.storages.size(); ++i) {
      const StepStorage& storage = record.storages[i];
      const int64_t before = std::exchange(kind.last_blocks[i], storage.id);
      if (kind.persistent[i] >= 0 || storage.created || storage.freed >= 0) continue;
      if (storage.id < 0 || storage.id != before || kind.persistence_updates >= kMaxUpdates ||
          !kind.storage_by_block.emplace(storage.id, static_cast<int32_t>(i)).second) {
        kind.unconfirmed_bytes += storage.bytes;
        continue;
      }
      kind.persistent[i] = storage.id;
      kind.usual.storages[i].freed = -1;
      changed = true;
    }
    if (changed) kind.roles_version = roles_versions_++, ++kind.persistence_updates;
    return changed;
  }
  // After a step of a kind, expects the kind that followed it last.
  void expect_after(StepKind& kind) {
    kind_ = &kind;
    for (auto& candidate : kinds_)
      if (candidate->number == kind.next_kind) kind_ = candidate.get();
    position_ = static_cast<int32_t>(kind_->usual.ops.size()) - 1;
    unexpected_ = skipped_ops_ = 0;
  }
  void forget(int64_t id) {
    for (auto& kind : kinds_) {
      if (const auto entry = kind->storage_by_block.find(id); entry != kind->storage_by_block.end()) {
        kind->blocks[entry->second] = nullptr;
        kind->persistent[entry->second] = -1;
        kind->storage_by_block.erase(entry);
      }
    }
  }
  const std::list<std::unique_ptr<StepKind>>& all() const { return kinds_; }
  int64_t steps() const { return steps_; }

 private:
  StepKind* finish_kind(StepKind& kind) {
    for (auto& candidate : kinds_)
      if (candidate->number == last_ended_) candidate->next_kind = kind.number;
    last_ended_ = kind.number;
    kind.last_used = steps_;
    return &kind;
  }

  // `alignment`: from the later record to the earlier; null: identical.
  StepKind& add_kind(Record& record, const Record& before, const Alignment* alignment) {
    if (kinds_.size() >= kMaxKinds) forget_one();
    // Leftovers are numbered by the previous step.
    if (record.before != before.signature) {
      record.leftovers.clear();
    } else if (alignment != nullptr) {
      std::vector<Record::Leftover> leftovers;
      for (size_t i = 0; i < alignment->storages.size(); ++i)
        for (const Record::Leftover& leftover : record.leftovers)
          if (leftover.storage == alignment->storages[i])
            leftovers.push_back({static_cast<int32_t>(i), leftover.freed});
      record.leftovers = std::move(leftovers);
    }
    auto created = std::make_unique<StepKind>();
    created->number = numbers_++;
    created->usual = record;
    created->other_storages =
        alignment != nullptr ? alignment->other_storages : std::vector<bool>(record.ops.size(), false);
    created->uses.resize(record.storages.size());
    created->blocks.assign(record.storages.size(), nullptr);
    created->persistent.assign(record.storages.size(), -1);
    for (size_t i = 0; i < record.ops.size(); ++i)
      for (const auto& touch : record.ops[i].touched)
        if (auto& uses = created->uses[touch.storage]; uses.empty() || uses.back() != static_cast<int32_t>(i))
          uses.push_back(static_cast<int32_t>(i));
    for (size_t i = 0; i < record.storages.size(); ++i) {
      const int32_t there = alignment != nullptr ? alignment->storages[i] : static_cast<int32_t>(i);
      created->last_blocks.push_back(there < 0 ? -1 : before.storages[there].id);
      if (there < 0 || record.storages[i].id != before.storages[there].id || record.storages[i].freed >= 0) continue;
      created->persistent[i] = record.storages[i].id;
      created->storage_by_block.emplace(record.storages[i].id, static_cast<int32_t>(i));
    }
    created->roles_version = roles_versions_++;
    kinds_.push_back(std::move(created));
    return *kinds_.back();
  }
  void remember_once(Record record) {
    if (sightings_.size() >= kMaxSightings) sightings_.pop_front();
    sightings_.push_back(std::move(record));
  }

  // Least common share of time for steps of one kind.
  static constexpr double kAlike = 0.8;
  static constexpr int32_t kAhead = 24, kMaxUnexpected = 12, kContext = 16, kShortest = 2, kLikely = 4;
  static constexpr size_t kMaxSightings = 4, kMaxKinds = 8;

  bool move_to(int32_t position) {
    const auto n = static_cast<int32_t>(kind_->usual.ops.size());
    skipped_ops_ = (position - position_ - 1 + n) % n;
    position_ = position;
    unexpected_ = 0;
    return true;
  }

  // Whether an op can be at a position: the same operator, and the same persistent storages.
  static bool fits(const StepKind& kind, int32_t position, const void* op, const std::vector<Touched>& touched) {
    const StepOp& there = kind.usual.ops[position];
    if (there.op != op) return false;
    size_t operands = 0, expected = 0;
    for (const auto& touch : there.touched) expected += touch.place > 0;
    for (const Touched& operand : touched) {
      if (operand.place < 0) continue;
      ++operands;
      if (kind.other_storages[position]) continue;
      const auto entry = kind.storage_by_block.find(operand.id);
      for (const auto& touch : there.touched)
        if (touch.place == operand.place) {
          if (kind.persistent[touch.storage] >= 0
                  ? entry == kind.storage_by_block.end() || entry->second != touch.storage
                  : entry != kind.storage_by_block.end())
            return false;
        }
    }
    return operands == expected;
  }
  // Whether an op has a persistent operand, which makes it unambiguous.
  static bool has_persistent_operand(const StepKind& kind, int32_t position, const std::vector<Touched>& touched) {
    for (const auto& touch : kind.usual.ops[position].touched)
      if (kind.persistent[touch.storage] >= 0)
        for (const Touched& operand : touched)
          if (operand.place == touch.place) return true;
    return false;
  }

  int32_t count_same_before(const StepKind& kind, int32_t at, int32_t limit) const {
    int32_t same = 0;
    const auto n = static_cast<int32_t>(kind.usual.ops.size());
    while (same < std::min({limit, static_cast<int32_t>(recent_ops_.size()), n}) &&
           kind.usual.ops[(at - 1 - same + 2 * n) % n].op == recent_ops_[recent_ops_.size() - 1 - same])
      ++same;
    return same;
  }

  // Searches for the position by uses of persistent storages.
  bool find(const void* op, const std::vector<Touched>& touched) {
    StepKind* best = nullptr;
    int32_t best_at = -1, longest = kShortest - 1;
    int64_t latest = -1;
    for (auto& candidate : kinds_)
      for (const Touched& touch : touched) {
        const auto entry = candidate->storage_by_block.find(touch.id);
        if (entry == candidate->storage_by_block.end()) continue;
        for (const int32_t at : candidate->uses[entry->second]) {
          if (!fits(*candidate, at, op, touched)) continue;
          const int32_t same = count_same_before(*candidate, at, kContext);
          if (same > longest || (same == longest && candidate->last_used > latest)) {
            longest = same, latest = candidate->last_used;
            best = candidate.get(), best_at = at;
          }
        }
      }
    if (best == nullptr) return false;
    kind_ = best;
    position_ = best_at;
    skipped_ops_ = 0;
    unexpected_ = 0;
    return true;
  }

  void remember(const void* op) {
    recent_ops_.push_back(op);
    if (recent_ops_.size() > static_cast<size_t>(kContext)) recent_ops_.pop_front();
  }

  void forget_one() {
    const auto oldest = std::min_element(kinds_.begin(), kinds_.end(),
                                         [](const auto& a, const auto& b) { return a->last_used < b->last_used; });
    if (oldest->get() == kind_) kind_ = nullptr;
    kinds_.erase(oldest);
  }

  std::list<std::unique_ptr<StepKind>> kinds_;
  std::deque<Record> sightings_;
  std::deque<const void*> recent_ops_;
  StepKind* kind_ = nullptr;  // kind of the current position; null: unknown
  int32_t position_ = 0, unexpected_ = 0, skipped_ops_ = 0;
  int64_t steps_ = 0, numbers_ = 0, roles_versions_ = 0, last_ended_ = -1;
};

}  // namespace follow
