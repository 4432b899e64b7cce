// The end of a step: proposes its record for planning, and starts to follow its plan.

#pragma once

#include "ops.h"

namespace {

int64_t bytes_created(const follow::Record& record) {
  int64_t bytes = 0;
  for (const follow::StepStorage& storage : record.storages)
    if (storage.created) bytes += storage.bytes;
  return bytes;
}

void observe_held(Space& space) {
  for (const auto& [offset, block] : space.by_offset)
    if (block->is_charged()) space.observer.add(follow::Event::kHeld, block->id, block->bytes);
}

// Keeps a step's events until the next step ends. Returns false if the step was not timed.
bool end_of_timing(Space& space) {
  if (!Device::kStreams) return false;
  const bool timed = space.timing;
  if (timed) space.moments.push_back(Device::Span{space.device.moment(), space.device.moment()});
  for (const Device::Span& span : space.moments_before) space.device.forget(span);
  space.moments_before = std::exchange(space.moments, {});
  space.timing = space.timed;  // until a plan turns out to be unnecessary
  return timed;
}

// Bytes that the last step needed at once, resident and evicted, with scratch memory.
int64_t most_at_once(Space& space, const follow::Record& record) {
  const auto largest = std::max_element(record.workspaces.begin(), record.workspaces.end());
  return std::exchange(space.step_total, space.total) + (largest == record.workspaces.end() ? 0 : *largest);
}

bool end_of_step(Space& space) {
  if (may_disable_observers) disable_observers_unless_used();
  const bool timed = end_of_timing(space);
  std::optional<follow::Record> record = space.recorder.take();
  space.last_op_end = std::chrono::steady_clock::now();
  if (!record) return false;
  record->variant = space.recipes->variant();
  const size_t count = record->ops.size();
  std::vector<int32_t> ops;
  follow::StepKind* kind = nullptr;
  try {
    kind = space.follower.end_of_step(*record, ops);
  } catch (const std::bad_alloc&) {
    if (!space.follower.is_active()) space.bucket = nullptr;  // as below
    throw;
  }
  if (!space.follower.is_active()) space.bucket = nullptr;  // its kind may be gone
  if (kind == nullptr) return false;
  if (space.follower.mark_persistent(*kind, *record)) {
    for (const follow::SizeBucket& bucket : kind->buckets)
      if (&bucket == space.bucket) space.bucket = nullptr;
    kind->buckets.clear();
  }
  if (kind->buckets.empty())
    for (Block* block : space.owned_blocks)
      if (const auto entry = kind->storage_by_block.find(block->id); entry != kind->storage_by_block.end())
        kind->blocks[entry->second] = block;
  const follow::StepKind* before = space.follower.kind();
  if (space.bucket != nullptr && space.follower.on_course() && space.follower.next() != 0)
    space.observer.record_departure(space.follower.next(), follow::Cause::kEnd,
                                    name_of(before->usual.ops[space.follower.next()].op), "");
  space.follower.expect_after(*kind);
  space.fit_score = 0;
  // A step of another size has deviated from the plan, too.
  if (before != space.follower.kind() || space.bucket == nullptr) begin_plan(space);
  // A step that fits needs no plan: its copies only undo evictions of a larger step before it.
  if (space.excess != Excess::kMeasured && most_at_once(space, *record) <= space.room()) {
    space.timing = space.lacks_times;
    return false;
  }
  const int64_t size = bytes_created(*record);
  for (follow::SizeBucket& bucket : kind->buckets)
    if (bucket.size >= size && bucket.size <= follow::kClose * size) {
      bucket.last_used = space.follower.steps();
      space.timing = space.lacks_times;
      return false;
    }
  // Wait one step before the first plan while the persistence of many bytes is unknown: more than a plan leaves free.
  constexpr int64_t kMuch = 50;  // a fiftieth of the room
  if (kind->unconfirmed_bytes > space.room() / kMuch && !std::exchange(kind->has_waited, true)) return false;
  if (Device::kStreams) {
    // One span per op and one for the end, unless an op failed or the record is too long.
    space.lacks_times = space.timed && (!timed || space.moments_before.size() != count + 1);
    if (!timed || space.lacks_times) return false;
    const std::vector<int64_t> nanos = space.device.nanos_between(space.moments_before);
    for (size_t i = 0; i < record->nanos.size(); ++i)
      if (const int64_t op = ops.empty() ? static_cast<int64_t>(i) : ops[i]; op >= 0) record->nanos[i] = nanos[op];
  }
  space.proposal = std::move(record);
  space.proposal_kind = kind->number;
  return true;
}

follow::StepKind* known_by(Space& space, int64_t number) {
  for (const auto& kind : space.follower.all())
    if (kind->number == number) return kind.get();
  return nullptr;
}

std::vector<int64_t> proposal_numbers(Space& space) {
  const follow::StepKind* kind = space.proposal ? known_by(space, space.proposal_kind) : nullptr;
  if (kind == nullptr) return {};
  const follow::Record& record = *space.proposal;
  std::unordered_map<const void*, int64_t> number;
  space.operator_names.clear();
  std::vector<int64_t> values{space.bucket_count,
                            static_cast<int64_t>(record.ops.size()),
                            static_cast<int64_t>(record.storages.size()),
                            static_cast<int64_t>(record.leftovers.size()),
                            space.in_bytes,
                            space.in_nanos,
                            space.out_bytes,
                            space.out_nanos};
  for (size_t i = 0; i < record.storages.size(); ++i) {
    const follow::StepStorage& storage = record.storages[i];
    values.insert(values.end(), {storage.bytes, storage.freed, storage.created, kind->persistent[i] >= 0});
  }
  for (size_t i = 0; i < record.ops.size(); ++i) {
    const follow::StepOp& op = record.ops[i];
    const auto [entry, fresh] = number.emplace(op.op, static_cast<int64_t>(number.size()));
    if (fresh) space.operator_names += static_cast<const c10::FunctionSchema*>(op.op)->name() + "\n";
    values.insert(values.end(),
                  {entry->second, record.nanos[i], record.workspaces[i], static_cast<int64_t>(op.touched.size())});
    for (const auto& touch : op.touched)
      values.insert(values.end(), {touch.place, touch.storage, touch.written, touch.created});
  }
  for (const auto& leftover : record.leftovers) values.insert(values.end(), {leftover.storage, leftover.freed});
  return values;
}

void accept_proposal(Space& space) {
  constexpr size_t kMaxBuckets = 8;
  follow::StepKind* kind = space.proposal ? known_by(space, space.proposal_kind) : nullptr;
  if (kind == nullptr) return;
  if (kind->buckets.size() >= kMaxBuckets) {
    const auto oldest = std::min_element(kind->buckets.begin(), kind->buckets.end(),
                                         [](const auto& a, const auto& b) { return a.last_used < b.last_used; });
    if (&*oldest == space.bucket) space.bucket = nullptr;
    kind->buckets.erase(oldest);
  }
  follow::SizeBucket bucket{space.bucket_count++, {}, std::move(space.proposal->requests),
                            bytes_created(*space.proposal), space.follower.steps(), nullptr};
  for (const follow::StepStorage& storage : space.proposal->storages) bucket.bytes.push_back(storage.bytes);
  kind->buckets.push_back(std::move(bucket));
  space.proposal.reset();
}

// Returns 0 if the size bucket is gone.
int64_t set_schedule(Space& space, int64_t number, const int64_t* numbers) {
  for (const auto& kind : space.follower.all())
    for (follow::SizeBucket& bucket : kind->buckets) {
      if (bucket.number != number) continue;
      auto schedule = std::make_unique<follow::Schedule>();
      for (auto* list : {&schedule->leave, &schedule->fetch, &schedule->write}) {
        list->resize(kind->usual.ops.size());
        for (int64_t remaining = *numbers++; remaining > 0; --remaining, numbers += 2)
          list->at(numbers[0]).push_back(static_cast<int32_t>(numbers[1]));
      }
      schedule->offsets.resize(kind->uses.size());
      for (int64_t remaining = *numbers++; remaining > 0; --remaining, numbers += 3)
        if (numbers[2] % kPage == 0)
          schedule->offsets.at(numbers[1]).emplace_back(static_cast<int32_t>(numbers[0]), numbers[2]);
      schedule->scratch.assign(kind->usual.ops.size(), -1);
      for (int64_t remaining = *numbers++; remaining > 0; --remaining, numbers += 2)
        if (numbers[1] % kPage == 0) schedule->scratch.at(numbers[0]) = numbers[1];
      bucket.schedule = std::move(schedule);
      if (space.bucket == nullptr && space.follower.kind() == kind.get()) space.bucket = &bucket;
      return 1;
    }
  return 0;
}

}  // namespace
