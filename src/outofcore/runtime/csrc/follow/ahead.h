// Overlapped copies: fetches of blocks needed soon and writes of blocks to evict, selected by a plan (record.h) or else
// by the history. On the CPU two threads copy the bytes; ops then end the copies (`end_copies`) and show fetched blocks
// (`show_fetched`). On a GPU copies are work on streams that takes effect when issued, because later work waits for it
// there.

#pragma once

#include "operators.h"

namespace {

// Storages used within this many ops are not evicted for a fetch ahead.
constexpr int64_t kNear = 40;

// The same on streams: the copy takes effect in stream order.
void issue_copy(Space& space, Block& block, bool in) {
  block.copy_start = block.copy_end = follow::nanos_now();
  if (in) {
    space.device.load(space.homes, block.slot, block.order, space.address(block));
    block.copy_succeeded = true;
    ++space.copying_in;
    space.ended_copies.push_back(&block);
    return;
  }
  space.device.save(space.homes, block.slot, block.order, space.address(block));
  block.dirty = false;
  ++space.counters[kWrites];
  space.counters[kWrittenBytes] += block.bytes;
  space.observer.add(follow::Event::kOut, block.copy_start, block.copy_end, block.id, block.bytes,
                     static_cast<int32_t>(follow::Copied::kOverlapped));
}
void begin_copy(Space& space, Block& block, bool in) {
  block.copied_version = block.version;
  if (Device::kStreams) return issue_copy(space, block, in);
  // The copy thread must not fail to allocate.
  space.ended_copies.reserve(static_cast<size_t>(space.copying_in + space.copying_out) + 1);
  (in ? fetch_thread : write_thread).ask(block);
  block.writing = !in;
  ++(in ? space.copying_in : space.copying_out);
}

// Writes to the block's window must be detectable until it is shown. Its storage is checked then.
bool can_fetch_ahead(const Block& block) {
  return block.state == BlockState::kEvicted && !block.fixed && block.slot && !block.is_freed && block.storage &&
         !is_used_elsewhere(block) && block.space->device.can_detect_touches(block.space->homes);
}

// Returns false if that needs the room of blocks used before or soon after `distance` ops.
bool fetch_ahead(Space& space, Block& block, int64_t distance) {
  if (!make_room(space, block.bytes, distance + kNear)) return false;
  const int64_t offset = planned_offset(space, block);
  const bool is_clear = offset >= 0 && clear_range(space, offset, block.bytes, false);
  if (!is_clear && !make_hole(space, block.bytes, true)) return false;
  if (!can_fetch_ahead(block) || space.bytes_in_use + block.bytes > space.room()) return false;
  place(space, block, BlockState::kFetching, is_clear ? offset : -1);
  block.is_early = true;
  record_touch(space, block);
  space.device.begin_watch(space.homes, block.slot);
  space.early_bytes += block.bytes;
  try {
    begin_copy(space, block, true);
  } catch (...) {
    unplace(space, block);
    throw;
  }
  return true;
}

// Returns false if no home has room; the eviction reports that.
bool write_ahead(Space& space, Block& block) {
  try {
    take_slot(space, block);
  } catch (const c10::Error&) {
    return false;
  }
  begin_copy(space, block, false);
  return true;
}

// Without a prediction, fetches the models' weights in the order of their modules.
void fetch_managed(Space& space, int64_t window) {
  constexpr int64_t kMostIn = 2, kReach = 16;
  const size_t end = std::min(space.managed.size(), space.next_managed + kReach);
  for (size_t next = space.next_managed; next < end && space.copying_in < kMostIn; ++next) {
    Block* block = space.managed[next];
    if (block == nullptr || !can_fetch_ahead(*block)) continue;
    if ((space.early_bytes > 0 && space.early_bytes + block->bytes > window) || !fetch_ahead(space, *block, 0)) return;
  }
}

// Fetches blocks needed next and writes blocks needed last, as predicted by the history.
void copy_ahead(Space& space) {
  constexpr int64_t kMostIn = 6, kMostOut = 6, kReach = 64;
  constexpr int kEvery = 2, kSeenPerOp = 32;
  const int64_t window = space.budget / 8;
  if (!space.copies_ahead || space.bucket != nullptr) return;
  if (!space.history.has_position()) return fetch_managed(space, window);
  if (!space.has_evicted) return;
  const int64_t position = space.history.position();
  if (space.lookahead_position < position || space.lookahead_position > position + kReach)
    space.lookahead_position = position;
  while (space.copying_in < kMostIn && space.lookahead_position < position + kReach) {
    if (space.lookahead_position + 1 > space.history.now()) break;
    bool full = false;
    for (const auto& [operand, storage] : space.history.touched(space.lookahead_position + 1)) {
      const auto entry = space.by_twin.find(storage);
      if (entry == space.by_twin.end() || !can_fetch_ahead(*entry->second)) continue;
      Block& block = *entry->second;
      // A fetched block must not be evicted before its use.
      if ((space.early_bytes > 0 && space.early_bytes + block.bytes > window) ||
          !fetch_ahead(space, block, space.lookahead_position + 1 - position)) {
        full = true;
        break;
      }
    }
    if (full) break;
    ++space.lookahead_position;
  }
  if (--space.ops_until_write_scan > 0 || space.copying_out >= kMostOut) return;
  int64_t evictable_bytes = space.room() - space.bytes_in_use;
  std::vector<Block*> dirty;
  int remaining = kMaxScanned;
  visit_furthest(space, [&](Block& block, int64_t distance) {
    if (distance <= kNear || evictable_bytes >= window || --remaining < 0) return false;
    if (!is_movable(block) || block.fixed) return true;
    if (!block.dirty || block.writing)
      evictable_bytes += block.bytes;
    else if (dirty.size() < kMostOut)
      dirty.push_back(&block);
    return true;
  });
  // Bounds the work per op for any number of blocks.
  space.ops_until_write_scan = std::max(kEvery, (kMaxScanned - remaining) / kSeenPerOp);
  for (Block* block : dirty) {
    if (evictable_bytes >= window || space.copying_out >= kMostOut || !write_ahead(space, *block)) break;
    evictable_bytes += block->bytes;
  }
}

Block* role_block(const follow::StepKind& kind, int32_t storage) { return static_cast<Block*>(kind.blocks[storage]); }

// Returns the plan for the closest larger size of this storage, else the closest smaller; null: all differ too much.
follow::SizeBucket* close_bucket(Space& space, int32_t storage, int64_t bytes) {
  // For a storage that grows with the square of the batch's size.
  constexpr double kCloseStorage = follow::kClose * follow::kClose;
  follow::SizeBucket* best = nullptr;
  const auto better = [&](const follow::SizeBucket& a, const follow::SizeBucket& b) {
    const int64_t a_bytes = a.bytes[storage], b_bytes = b.bytes[storage];
    if ((a_bytes >= bytes) != (b_bytes >= bytes)) return a_bytes >= bytes;
    if (a_bytes != b_bytes) return a_bytes >= bytes ? a_bytes < b_bytes : a_bytes > b_bytes;
    return a.size < b.size;
  };
  for (follow::SizeBucket& bucket : space.follower.kind()->buckets) {
    const auto planned = static_cast<double>(bucket.bytes[storage]), now = static_cast<double>(bytes);
    const bool close = planned <= kCloseStorage * now && now <= follow::kClose * planned;
    if (close && bucket.schedule && (best == nullptr || better(bucket, *best))) best = &bucket;
  }
  return best;
}
// If more sizes differ from the plan than match, runs the rest of the step on demand: another size needs other
// evictions.
void match_bucket(Space& space, int32_t storage, int64_t bytes) {
  if (space.bucket->bytes[storage] == bytes) {
    ++space.fit_score;
  } else if (follow::SizeBucket* close = close_bucket(space, storage, bytes); close != nullptr) {
    ++space.fit_score;
    space.bucket = close;
  } else if (--space.fit_score < 0) {
    space.bucket = nullptr;
    space.due_fetches.clear();
  }
}

// Returns the last used plan, or null.
follow::SizeBucket* usual_bucket(follow::StepKind& kind) {
  follow::SizeBucket* last = nullptr;
  for (follow::SizeBucket& bucket : kind.buckets)
    if (bucket.schedule && (last == nullptr || bucket.last_used > last->last_used)) last = &bucket;
  return last;
}

// Starts with the last used plan; the step's sizes may select another one.
void begin_plan(Space& space) {
  space.bucket = space.follower.kind() == nullptr ? nullptr : usual_bucket(*space.follower.kind());
  space.fit_score = 0;
  space.due_fetches.clear();
}

// Applies the plan at this op: releases storages, starts writes, and queues fetches.
void follow_plan(Space& space) {
  const follow::StepKind& kind = *space.follower.kind();
  const follow::Schedule& plan = *space.bucket->schedule;
  const auto count = static_cast<int32_t>(kind.usual.ops.size());
  for (int32_t behind = std::min(space.follower.skipped_ops(), count - 1); behind >= 0; --behind) {
    const int32_t at = (space.follower.position() - behind + count) % count;
    for (const int32_t storage : plan.write[(at - 1 + count) % count])
      if (Block* block = role_block(kind, storage);
          block != nullptr && is_movable(*block) && block->dirty && !block->fixed && !block->writing)
        write_ahead(space, *block);
    for (const int32_t storage : plan.leave[at])
      if (Block* block = role_block(kind, storage); block != nullptr && block->is_resident() && !block->released) {
        block->released = true;
        space.ranking.touch(block);
      }
    for (const int32_t storage : plan.fetch[at]) space.due_fetches.push_back(storage);
  }
}
void fetch_due(Space& space) {
  const follow::StepKind& kind = *space.follower.kind();
  while (!space.due_fetches.empty()) {
    const int32_t storage = space.due_fetches.front();
    Block* block = role_block(kind, storage);
    if (block != nullptr && can_fetch_ahead(*block) && !fetch_ahead(space, *block, space.follower.next_use(storage)))
      return;
    space.due_fetches.pop_front();
  }
}

void plan_requests(Space& space, int32_t position) {
  space.planned_requests.clear();
  const follow::Schedule& plan = *space.bucket->schedule;
  const auto& touched = space.follower.kind()->usual.ops[position].touched;
  const auto made_at = [&](int32_t place) {
    for (const auto& touch : touched)
      if (touch.place == place) return plan.offset(touch.storage, position);
    return int64_t{-1};
  };
  for (const follow::Request& request : space.bucket->requests[position]) {
    const bool result = request.place != 0;
    const int64_t room = result ? made_at(request.place) : request.in != 0 ? made_at(request.in) : plan.scratch[position];
    space.planned_requests.emplace_back(request.bytes, room < 0 || result ? room : room + request.at);
  }
}

void match_op(Space& space, const void* op, const std::vector<follow::Touched>& touched,
                const std::vector<std::pair<int32_t, Block*>>& places) {
  follow::Follower& follower = space.follower;
  const bool before = follower.is_active();
  const int32_t position = follower.position();
  const follow::StepKind* kind = follower.kind();
  const int32_t planned_at = space.bucket != nullptr && follower.on_course() ? follower.next() : -1;
  const void* planned = planned_at >= 0 ? kind->usual.ops[planned_at].op : nullptr;
  follower.advance(op, touched);
  if (planned != nullptr && (!follower.on_course() || follower.kind() != kind || follower.position() != planned_at))
    space.observer.record_departure(planned_at, follow::Cause::kOp, name_of(planned), name_of(op));
  const bool is_other_kind = follower.kind() != kind;
  kind = follower.kind();
  if (is_other_kind && before) ++space.counters[kDepartures];
  // The step starts over, as after an evaluation, perhaps with other sizes.
  if (is_other_kind || (space.bucket == nullptr && kind != nullptr && follower.position() < position))
    begin_plan(space);
  space.observer.after_departure(space.bucket != nullptr && follower.on_course() ? follower.position() : -1);
  for (const auto& [place, block] : places) block->released = false;
  if (!follower.on_course()) return;
  for (const auto& [place, block] : places)
    if (const int32_t storage = follower.storage_at(place); storage >= 0) {
      set_role(space, *follower.kind(), *block, storage);
      if (space.bucket != nullptr && kind->persistent[storage] < 0) match_bucket(space, storage, block->bytes);
    }
  if (space.bucket == nullptr) return;
  ++space.counters[kPlannedOps];
  if (follower.position() == 0) move_into_core(space);
  plan_requests(space, follower.position());
  if (space.copies_ahead) follow_plan(space);
}

}  // namespace
