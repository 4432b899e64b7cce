// Copies beside the ops: what comes and what is written ahead of its use, without a plan and with one.

#pragma once

#include "operators.h"

namespace {

// Ops ahead within which what is used stays where it is for what is only fetched ahead.
constexpr int64_t kNear = 40;

// The same on streams. What is written is at home from now on, in their order; what comes is here once it is used.
void issue_copy(Space& space, Block& block, bool in) {
  block.copy_start = block.copy_end = follow::nanos_now();
  if (in) {
    space.device.load(space.homes, block.slot, block.order, space.address(block));
    block.copied = true;
    ++space.copying_in;
    space.finished.push_back(&block);
    return;
  }
  space.device.save(space.homes, block.slot, block.order, space.address(block));
  block.dirty = false;
  ++space.counters[kWrites];
  space.counters[kWrittenBytes] += block.bytes;
  space.observer.add(follow::Event::kOut, block.copy_start, block.copy_end, block.id, block.bytes,
                     static_cast<int32_t>(follow::Copied::kBeside));
}
// Has a block copied beside the ops.
void begin_copy(Space& space, Block& block, bool in) {
  block.copied_version = block.version;
  if (Device::kStreams) return issue_copy(space, block, in);
  space.finished.reserve(static_cast<size_t>(space.copying_in + space.copying_out) + 1);  // a thread must not lack memory
  (in ? fetching : writing_out).ask(block);
  block.writing = !in;
  ++(in ? space.copying_in : space.copying_out);
}

// Whether a block is at home, and can be fetched ahead: if it can be told later who wrote to its window meanwhile. Whether its
// storage is there is asked when it is shown.
bool fetchable(const Block& block) {
  return block.state == State::kAway && !block.fixed && block.slot && !block.dead && block.storage &&
         !used_elsewhere(block) && block.space->device.can_detect_touches(block.space->homes);
}

// Begins to fetch a block that is used in so many ops; false: there is no room without what is used sooner, or soon after.
bool fetch_ahead(Space& space, Block& block, int64_t distance) {
  if (!make_room(space, block.bytes, distance + kNear)) return false;
  const int64_t wanted = planned_offset(space, block);
  const bool clears = wanted >= 0 && clear(space, wanted, block.bytes, false);
  if (!clears && !make_hole(space, block.bytes, true)) return false;
  // Somebody may have taken it meanwhile, or its room.
  if (!fetchable(block) || space.charged + block.bytes > space.room()) return false;
  place(space, block, State::kComing, clears ? wanted : -1);
  block.early = true;
  note_touched(space, block);
  space.device.begin_watch(space.homes, block.slot);
  space.early += block.bytes;
  try {
    begin_copy(space, block, true);
  } catch (...) {
    unplace(space, block);
    throw;
  }
  return true;
}

// Begins to write a block that is to leave; false: no home has room, which is told when it has to leave.
bool write_ahead(Space& space, Block& block) {
  try {
    take_slot(space, block);
  } catch (const c10::Error&) {
    return false;
  }
  begin_copy(space, block, false);
  return true;
}

// As long as it is not known what comes next: the models' weights, in the order in which their modules have them.
void fetch_given(Space& space, int64_t window) {
  constexpr int64_t kMostIn = 2, kReach = 16;
  const size_t end = std::min(space.given.size(), space.after_given + kReach);
  for (size_t next = space.after_given; next < end && space.copying_in < kMostIn; ++next) {
    Block* block = space.given[next];
    if (block == nullptr || !fetchable(*block)) continue;
    if ((space.early > 0 && space.early + block->bytes > window) || !fetch_ahead(space, *block, 0)) return;
  }
}

// Looks ahead in the history: brings in what is needed next, and writes what is needed last.
void copy_ahead(Space& space) {
  constexpr int64_t kMostIn = 6, kMostOut = 6, kReach = 64;
  constexpr int kEvery = 2, kSeenPerOp = 32;
  const int64_t window = space.budget / 8;
  if (!space.ahead || space.anchor != nullptr) return;
  if (!space.history.known()) return fetch_given(space, window);
  if (!space.evicted) return;
  const int64_t position = space.history.position();
  if (space.looked < position || space.looked > position + kReach) space.looked = position;
  while (space.copying_in < kMostIn && space.looked < position + kReach) {
    if (space.looked + 1 > space.history.now()) break;
    bool full = false;
    for (const auto& [operand, storage] : space.history.touched(space.looked + 1)) {
      const auto found = space.parts.find(storage);
      if (found == space.parts.end() || !fetchable(*found->second)) continue;
      Block& block = *found->second;
      // Not so much that it would have to leave again.
      if ((space.early > 0 && space.early + block.bytes > window) ||
          !fetch_ahead(space, block, space.looked + 1 - position)) {
        full = true;
        break;
      }
    }
    if (full) break;
    ++space.looked;
  }
  if (--space.until_look > 0 || space.copying_out >= kMostOut) return;
  int64_t easy = space.room() - space.charged;
  std::vector<Block*> dirty;
  int left = kMostSeen;
  visit_furthest(space, [&](Block& block, int64_t distance) {
    if (distance <= kNear || easy >= window || --left < 0) return false;
    if (!movable(block) || block.fixed) return true;
    if (!block.dirty || block.writing)
      easy += block.bytes;
    else if (dirty.size() < kMostOut)
      dirty.push_back(&block);
    return true;
  });
  // A few blocks are looked at for each op, however many there are.
  space.until_look = std::max(kEvery, (kMostSeen - left) / kSeenPerOp);
  for (Block* block : dirty) {
    if (easy >= window || space.copying_out >= kMostOut || !write_ahead(space, *block)) break;
    easy += block->bytes;
  }
}

// ---- following a plan ----------------------------------------------------------------------------------------------

Block* played(const follow::Known& known, int32_t storage) { return static_cast<Block*>(known.playing[storage]); }

// The plan for the next larger size, by what a storage of the record has now; for want of one, that for the next smaller size.
// Null: all plans are for sizes that are too different.
follow::Anchor* close_anchor(Space& space, int32_t storage, int64_t bytes) {
  // Of a storage that grows with the square of the size, when the step as a whole is within kClose.
  constexpr double kCloseStorage = follow::kClose * follow::kClose;
  follow::Anchor* best = nullptr;
  const auto better = [&](const follow::Anchor& a, const follow::Anchor& b) {
    const int64_t mine = a.bytes[storage], other = b.bytes[storage];
    if ((mine >= bytes) != (other >= bytes)) return mine >= bytes;
    if (mine != other) return mine >= bytes ? mine < other : mine > other;
    return a.size < b.size;
  };
  for (follow::Anchor& anchor : space.follower.known()->anchors) {
    const auto planned = static_cast<double>(anchor.bytes[storage]), now = static_cast<double>(bytes);
    const bool close = planned <= kCloseStorage * now && now <= follow::kClose * planned;
    if (close && anchor.schedule && (best == nullptr || better(anchor, *best))) best = &anchor;
  }
  return best;
}
// Compares a storage of the step with the plan. Once more storages differ too much than fit, the rest of the step runs on
// demand: what the plan of a longer batch offloads would fit in this one, and that of a shorter one offloads too little.
void match_anchor(Space& space, int32_t storage, int64_t bytes) {
  if (space.anchor->bytes[storage] == bytes) {
    ++space.fitting;
  } else if (follow::Anchor* close = close_anchor(space, storage, bytes); close != nullptr) {
    ++space.fitting;
    space.anchor = close;
  } else if (--space.fitting < 0) {
    space.anchor = nullptr;
    space.due.clear();
  }
}

// The plan that was of use last; null: there is none.
follow::Anchor* usual_anchor(follow::Known& known) {
  follow::Anchor* found = nullptr;
  for (follow::Anchor& anchor : known.anchors)
    if (anchor.schedule && (found == nullptr || anchor.used > found->used)) found = &anchor;
  return found;
}

// Follows the plan that was of use last, until the sizes of the step show which one is close.
void begin_plan(Space& space) {
  space.anchor = space.follower.known() == nullptr ? nullptr : usual_anchor(*space.follower.known());
  space.fitting = 0;
  space.due.clear();
}

// An op of a plan begins: what is to leave may, or is written for it, and what is to come begins to.
void follow_plan(Space& space) {
  const follow::Known& known = *space.follower.known();
  const follow::Schedule& plan = *space.anchor->schedule;
  const auto count = static_cast<int32_t>(known.usual.ops.size());
  for (int32_t behind = std::min(space.follower.passed(), count - 1); behind >= 0; --behind) {
    const int32_t at = (space.follower.position() - behind + count) % count;
    for (const int32_t storage : plan.write[(at - 1 + count) % count])
      if (Block* block = played(known, storage);
          block != nullptr && movable(*block) && block->dirty && !block->fixed && !block->writing)
        write_ahead(space, *block);
    for (const int32_t storage : plan.leave[at])
      if (Block* block = played(known, storage); block != nullptr && block->here() && !block->released) {
        block->released = true;
        space.ranking.touch(block);
      }
    for (const int32_t storage : plan.fetch[at]) space.due.push_back(storage);
  }
}
void fetch_due(Space& space) {
  const follow::Known& known = *space.follower.known();
  while (!space.due.empty()) {
    const int32_t storage = space.due.front();
    Block* block = played(known, storage);
    if (block != nullptr && fetchable(*block) && !fetch_ahead(space, *block, space.follower.next_use(storage))) return;
    space.due.pop_front();
  }
}

// What an op of the record asks for is to lie where the plan has it.
void want(Space& space, int32_t position) {
  space.wanted.clear();
  const follow::Schedule& plan = *space.anchor->schedule;
  const auto& touched = space.follower.known()->usual.ops[position].touched;
  const auto made_at = [&](int32_t place) {
    for (const auto& touch : touched)
      if (touch.place == place) return plan.offset(touch.storage, position);
    return int64_t{-1};
  };
  for (const follow::Request& request : space.anchor->requests[position]) {
    const bool result = request.place != 0;
    const int64_t room = result ? made_at(request.place) : request.in != 0 ? made_at(request.in) : plan.scratch[position];
    space.wanted.emplace_back(request.bytes, room < 0 || result ? room : room + request.at);
  }
}

// Takes an op to its place in the records, with the blocks that it touches.
void take_place(Space& space, const void* op, const std::vector<follow::Touched>& touched,
                const std::vector<std::pair<int32_t, Block*>>& places) {
  follow::Follower& follower = space.follower;
  const bool before = follower.active();
  const int32_t position = follower.position();
  const follow::Known* known = follower.known();
  const int32_t planned_at = space.anchor != nullptr && follower.on_course() ? follower.next() : -1;
  const void* planned = planned_at >= 0 ? known->usual.ops[planned_at].op : nullptr;
  follower.advance(op, touched);
  if (planned != nullptr && (!follower.on_course() || follower.known() != known || follower.position() != planned_at))
    space.observer.depart(planned_at, follow::Cause::kOp, name_of(planned), name_of(op));
  const bool other = follower.known() != known;
  known = follower.known();
  if (other && before) ++space.counters[kDepartures];
  // The step begins again, as after an evaluation: its sizes may be others now.
  if (other || (space.anchor == nullptr && known != nullptr && follower.position() < position)) begin_plan(space);
  space.observer.after_departure(space.anchor != nullptr && follower.on_course() ? follower.position() : -1);
  for (const auto& [place, block] : places) block->released = false;
  if (!follower.on_course()) return;
  for (const auto& [place, block] : places)
    if (const int32_t storage = follower.storage_at(place); storage >= 0) {
      play(space, *follower.known(), *block, storage);
      if (space.anchor != nullptr && known->persistent[storage] < 0) match_anchor(space, storage, block->bytes);
    }
  if (space.anchor == nullptr) return;
  ++space.counters[kPlannedOps];
  if (follower.position() == 0) move_into_core(space);
  want(space, follower.position());
  if (space.ahead) follow_plan(space);
}

}  // namespace
