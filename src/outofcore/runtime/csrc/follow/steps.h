// Where a step ends: what is recorded of it is proposed for a plan, and its plan is taken.

#pragma once

#include "ops.h"

namespace {

int64_t made_by(const follow::Record& record) {
  int64_t bytes = 0;
  for (const follow::StepStorage& storage : record.storages)
    if (storage.created) bytes += storage.bytes;
  return bytes;
}

void observe_held(Space& space) {
  for (const auto& [offset, block] : space.at)
    if (block->charged()) space.observer.add(follow::Event::kHeld, block->id, block->bytes);
}

// The moments of a step are kept until the next one has ended. False: there are none.
bool end_of_timing(Space& space) {
  if (!Device::kStreams) return false;
  const bool timed = space.timing;
  if (timed) space.moments.push_back(Device::Span{space.device.moment(), space.device.moment()});
  for (const Device::Span& span : space.moments_before) space.device.forget(span);
  space.moments_before = std::exchange(space.moments, {});
  space.timing = space.timed;  // until it is known that no plan is wanted
  return timed;
}

// Bytes that the step which has ended needed at once, resident and evicted, with its ops' scratch memory.
int64_t most_at_once(Space& space, const follow::Record& record) {
  const auto most = std::max_element(record.workspaces.begin(), record.workspaces.end());
  return std::exchange(space.step_total, space.total) + (most == record.workspaces.end() ? 0 : *most);
}

bool end_of_step(Space& space) {
  if (may_disable_observers) disable_observers_unless_used();
  const bool timed = end_of_timing(space);
  std::optional<follow::Record> record = space.recorder.take();
  space.since = std::chrono::steady_clock::now();
  if (!record) return false;
  record->variant = space.recipes->variant();
  const size_t count = record->ops.size();
  std::vector<int32_t> ops;
  follow::Known* known = nullptr;
  try {
    known = space.follower.end_of_step(*record, ops);
  } catch (const std::bad_alloc&) {
    if (!space.follower.active()) space.anchor = nullptr;  // as below
    throw;
  }
  if (!space.follower.active()) space.anchor = nullptr;  // what it belonged to may be gone
  if (known == nullptr) return false;
  if (space.follower.settle(*known, *record)) {
    for (const follow::Anchor& anchor : known->anchors)
      if (&anchor == space.anchor) space.anchor = nullptr;
    known->anchors.clear();
  }
  if (known->anchors.empty())
    for (Block* block : space.known)
      if (const auto found = known->of_block.find(block->id); found != known->of_block.end())
        known->playing[found->second] = block;
  const follow::Known* before = space.follower.known();
  if (space.anchor != nullptr && space.follower.on_course() && space.follower.next() != 0)
    space.observer.depart(space.follower.next(), follow::Cause::kEnd, name_of(before->usual.ops[space.follower.next()].op), "");
  space.follower.stand_after(*known);
  space.fitting = 0;
  // A step of another size has left the plan, too.
  if (before != space.follower.known() || space.anchor == nullptr) begin_plan(space);
  // A step that fits needs no plan: its copies only undo what a larger step before it has evicted.
  if (space.excess != Excess::kMeasured && most_at_once(space, *record) <= space.room()) {
    space.timing = space.lacking_times;
    return false;
  }
  const int64_t size = made_by(*record);
  for (follow::Anchor& anchor : known->anchors)
    if (anchor.size >= size && anchor.size <= follow::kClose * size) {
      anchor.used = space.follower.steps();
      space.timing = space.lacking_times;
      return false;
    }
  // Wait one step before the first plan if it is unknown whether many bytes persist: more than a plan leaves free.
  constexpr int64_t kMuch = 50;  // a fiftieth of the room
  if (known->unsettled > space.room() / kMuch && !std::exchange(known->awaited, true)) return false;
  if (Device::kStreams) {
    // Each op has its moments, unless one failed or the record is too long; then comes the end.
    space.lacking_times = space.timed && (!timed || space.moments_before.size() != count + 1);
    if (!timed || space.lacking_times) return false;
    const std::vector<int64_t> nanos = space.device.nanos_between(space.moments_before);
    for (size_t i = 0; i < record->nanos.size(); ++i)
      if (const int64_t op = ops.empty() ? static_cast<int64_t>(i) : ops[i]; op >= 0) record->nanos[i] = nanos[op];
  }
  space.proposed = std::move(record);
  space.proposed_for = known->number;
  return true;
}

follow::Known* known_by(Space& space, int64_t number) {
  for (const auto& known : space.follower.all())
    if (known->number == number) return known.get();
  return nullptr;
}

std::vector<int64_t> tell_proposal(Space& space) {
  const follow::Known* known = space.proposed ? known_by(space, space.proposed_for) : nullptr;
  if (known == nullptr) return {};
  const follow::Record& record = *space.proposed;
  std::unordered_map<const void*, int64_t> number;
  space.names.clear();
  std::vector<int64_t> told{space.anchors,
                            static_cast<int64_t>(record.ops.size()),
                            static_cast<int64_t>(record.storages.size()),
                            static_cast<int64_t>(record.leftovers.size()),
                            space.in_bytes,
                            space.in_nanos,
                            space.out_bytes,
                            space.out_nanos};
  for (size_t i = 0; i < record.storages.size(); ++i) {
    const follow::StepStorage& storage = record.storages[i];
    told.insert(told.end(), {storage.bytes, storage.freed, storage.created, known->persistent[i] >= 0});
  }
  for (size_t i = 0; i < record.ops.size(); ++i) {
    const follow::StepOp& op = record.ops[i];
    const auto [found, fresh] = number.emplace(op.op, static_cast<int64_t>(number.size()));
    if (fresh) space.names += static_cast<const c10::FunctionSchema*>(op.op)->name() + "\n";
    told.insert(told.end(), {found->second, record.nanos[i], record.workspaces[i], static_cast<int64_t>(op.touched.size())});
    for (const auto& touch : op.touched) told.insert(told.end(), {touch.place, touch.storage, touch.written, touch.created});
  }
  for (const auto& left : record.leftovers) told.insert(told.end(), {left.storage, left.freed});
  return told;
}

void accept_proposal(Space& space) {
  constexpr size_t kMostAnchors = 8;
  follow::Known* known = space.proposed ? known_by(space, space.proposed_for) : nullptr;
  if (known == nullptr) return;
  if (known->anchors.size() >= kMostAnchors) {
    const auto oldest = std::min_element(known->anchors.begin(), known->anchors.end(),
                                         [](const auto& a, const auto& b) { return a.used < b.used; });
    if (&*oldest == space.anchor) space.anchor = nullptr;
    known->anchors.erase(oldest);
  }
  follow::Anchor anchor{space.anchors++, {}, std::move(space.proposed->requests), made_by(*space.proposed), space.follower.steps(), nullptr};
  for (const follow::StepStorage& storage : space.proposed->storages) anchor.bytes.push_back(storage.bytes);
  known->anchors.push_back(std::move(anchor));
  space.proposed.reset();
}

// 0: such an anchor is gone.
int64_t set_schedule(Space& space, int64_t number, const int64_t* numbers) {
  for (const auto& known : space.follower.all())
    for (follow::Anchor& anchor : known->anchors) {
      if (anchor.number != number) continue;
      auto schedule = std::make_unique<follow::Schedule>();
      for (auto* list : {&schedule->leave, &schedule->fetch, &schedule->write}) {
        list->resize(known->usual.ops.size());
        for (int64_t left = *numbers++; left > 0; --left, numbers += 2)
          list->at(numbers[0]).push_back(static_cast<int32_t>(numbers[1]));
      }
      schedule->offsets.resize(known->uses.size());
      for (int64_t left = *numbers++; left > 0; --left, numbers += 3)
        if (numbers[2] % kPage == 0)
          schedule->offsets.at(numbers[1]).emplace_back(static_cast<int32_t>(numbers[0]), numbers[2]);
      schedule->scratch.assign(known->usual.ops.size(), -1);
      for (int64_t left = *numbers++; left > 0; --left, numbers += 2)
        if (numbers[1] % kPage == 0) schedule->scratch.at(numbers[0]) = numbers[1];
      anchor.schedule = std::move(schedule);
      if (space.anchor == nullptr && space.follower.known() == known.get()) space.anchor = &anchor;
      return 1;
    }
  return 0;
}

}  // namespace
