// Makes room by evicting and moving blocks, and destroys blocks.

#pragma once

#include "blocks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

namespace {

// A block's storage in the current record, or -1.
int32_t role_of(const Space& space, const Block& block) {
  const follow::StepKind& kind = *space.follower.kind();
  int32_t storage = block.role_in == kind.number ? block.role : -1;
  if (storage < 0) {
    if (block.cached_role_version != kind.roles_version) {
      const auto entry = kind.storage_by_block.find(block.id);
      block.cached_role_version = kind.roles_version;
      block.cached_role = entry == kind.storage_by_block.end() ? -1 : entry->second;
    }
    storage = block.cached_role;
  }
  return storage >= 0 && kind.blocks[storage] == &block ? storage : -1;
}
int64_t planned_offset(const Space& space, const Block& block) {
  if (space.bucket == nullptr) return -1;
  const int32_t storage = role_of(space, block);
  const int32_t op = storage < 0 ? -1 : space.follower.next_from_here(storage);
  return op < 0 ? -1 : space.bucket->schedule->offset(storage, op);
}

int64_t next_use(const Space& space, const Block& block) {
  if (space.follower.is_active()) {
    if (block.released) return 2 * follow::Follower::kNever;
    const int32_t storage = role_of(space, block);
    if (storage >= 0)
      if (const int64_t distance = space.follower.next_use(storage); distance < follow::Follower::kNever)
        return distance;
    return follow::Follower::kNever + space.history.now() - block.last_use;
  }
  return space.history.next_use(block.twin, block.last_use);
}

// Visits the blocks in the arena, furthest next use first, until `visit` (block, ops until its next use) returns false.
template <class Visit>
void visit_furthest(Space& space, Visit&& visit) {
  constexpr int64_t kEvery = 1024;  // ops between full rankings
  const int64_t now = space.history.now();
  const void* by = space.follower.is_active() ? static_cast<const void*>(space.follower.kind())
                   : space.history.has_position() ? &space.history
                                           : nullptr;
  if (by != space.ranked_by || now >= space.ranked_until) {
    space.ranking.touch_all();
    space.ranked_by = by;
    space.ranked_until = now + std::max(kEvery, static_cast<int64_t>(space.ranking.size()));
  }
  int64_t distance = 0;  // of the block queried last, which is the one visited
  const auto key_of = [&](const Block& block) {
    constexpr int64_t kNever = follow::History::kNever;
    distance = next_use(space, block);
    if (distance >= 2 * kNever) return distance;
    // Without a prediction, blocks unused for longer come first.
    return by == nullptr || distance >= kNever ? kNever - block.last_use : now + distance;
  };
  const auto offset_of = [](const Block& block) { return block.offset; };
  space.ranking.visit(key_of, offset_of, [&](Block& block) { return visit(block, distance); });
}

// For a hole of `bytes` with at least `needed` freed. Empty if a neighbour is used in fewer than `no_earlier` ops.
std::vector<Block*> neighbours(const Space& space, Block& first, int64_t bytes, int64_t needed, int64_t no_earlier) {
  const auto it = space.by_offset.find(first.offset);
  auto before = std::make_reverse_iterator(it);
  auto behind = std::next(it);
  std::vector<Block*> chosen{&first};
  int64_t freed = first.bytes;
  const auto end_of = [](const Block& block) { return block.offset + block.bytes; };
  for (;;) {
    const int64_t begin = before == space.by_offset.rend() ? 0 : end_of(*before->second);
    const int64_t end = behind == space.by_offset.end() ? end_of(*chosen.back()) : behind->second->offset;
    if (freed >= needed && end - begin >= bytes) return chosen;
    const auto distance_of = [&](const Block* block) {
      return block != nullptr && can_leave_arena(*block) ? next_use(space, *block) : -1;
    };
    Block* left = before == space.by_offset.rend() ? nullptr : before->second;
    Block* right = behind == space.by_offset.end() ? nullptr : behind->second;
    const int64_t to_left = distance_of(left), to_right = distance_of(right);
    if (std::max(to_left, to_right) < std::max<int64_t>(no_earlier, 0)) return {};
    if (to_left >= to_right) {
      chosen.insert(chosen.begin(), left);
      ++before;
    } else {
      chosen.push_back(right);
      ++behind;
    }
    freed += (to_left >= to_right ? left : right)->bytes;
  }
}

bool is_held_by_others(const Space& space) {
  if (unpinned_ops > 0) return true;
  return std::any_of(space.by_offset.begin(), space.by_offset.end(), [](const auto& placed) {
    const Block& block = *placed.second;
    return block.is_resident() && block.storage && block.pins == block.other_pins && block.works == 0 &&
           (block.other_pins > 0 || is_held_elsewhere(block));
  });
}

// Waits for storages that are being destroyed. Returns false without any. Blocks that remain have lost their storage.
bool wait_for_dying(Space& space) {
  if (std::none_of(space.by_offset.begin(), space.by_offset.end(),
                   [](const auto& placed) { return placed.second->owner_dying; }))
    return false;
  if (wait_for_change(std::chrono::seconds(1))) return true;
  for (const auto& [offset, block] : space.by_offset)
    if (std::exchange(block->owner_dying, false)) block->storage.reset();
  return true;
}

// Also removes the fetched blocks from the list.
void unplace_fetched(Space& space, std::vector<Block*>& blocks) {
  std::erase_if(blocks, [&](Block* block) {
    if (block->state != BlockState::kFetched) return false;
    unplace(space, *block);
    return true;
  });
}

// Evicts those blocks that other threads have not started to use meanwhile.
void evict_all(Space& space, std::vector<Block*> victims) {
  unplace_fetched(space, victims);
  if (victims.empty()) return;
  Owners(std::move(victims)).each([&](Block& block, StorageImpl& storage) {
    if (is_movable(block) && !block.writing) evict(space, block, storage);
  });
}

constexpr int kMaxScanned = 256;

// Evicts blocks, furthest next use first, until `bytes` fit. Returns false if too much is in use. `easily`: evict only
// clean blocks with a next use further than this many ops (-1: any block).
bool make_room(Space& space, int64_t bytes, int64_t easily = -1) {
  if (easily < 0) catch_up(space);
  while (space.bytes_in_use + bytes > space.room()) {
    const int64_t needed = space.bytes_in_use + bytes - space.room();
    std::vector<Block*> victims;
    int64_t chosen = 0, soonest = 0;
    int skips_left = kMaxScanned;  // limit on skipped blocks that need writing
    visit_furthest(space, [&](Block& block, int64_t distance) {
      if (distance <= easily || skips_left == 0) return false;
      if (!can_leave_arena(block)) return true;
      if (easily >= 0 && block.is_resident() && (block.dirty || block.fixed || block.writing)) {
        --skips_left;
        return true;
      }
      victims.push_back(&block);
      chosen += block.bytes;
      soonest = distance;
      return chosen < needed;
    });
    if (chosen < needed) {
      if (easily >= 0) return false;
      if (space.copying_in + space.copying_out > 0 || is_held_by_others(space)) {
        wait_for_copy(space);  // a copy's end makes its block evictable, and other threads free memory
      } else if (!wait_for_dying(space) && !wait_for_works(space)) {
        return false;
      }
      continue;
    }
    if (easily < 0) space.has_evicted = true;
    // Prefer neighbours, unless needed much sooner: scattered blocks would leave holes that are too small.
    std::vector<Block*> together;
    if (space.bucket == nullptr && easily < 0) together = neighbours(space, *victims[0], bytes, needed, soonest / 2);
    if (!together.empty()) {
      victims = std::move(together);
    } else {
      // Drop smaller victims that a large one chosen last has made unnecessary.
      std::erase_if(victims, [&](const Block* block) {
        if (chosen - block->bytes < needed) return false;
        chosen -= block->bytes;
        return true;
      });
    }
    // They must be fetched ahead again.
    for (const Block* victim : victims)
      space.lookahead_position =
          std::min(space.lookahead_position, space.history.position() + next_use(space, *victim) - 1);
    if (std::any_of(victims.begin(), victims.end(), [](const Block* block) { return block->writing; })) {
      wait_for_copy(space);
      continue;
    }
    const int64_t before = space.bytes_in_use;
    evict_all(space, std::move(victims));
    if (easily >= 0 && space.bytes_in_use >= before) return false;
  }
  return true;
}

Block* find_block(StorageImpl& storage);

// The source line of the running op of a backward pass; empty: unknown, or not in a backward pass.
std::string source_of_running(const Space& space) {
  if (!torch::autograd::get_current_node()) return "";
  if (source != nullptr) return source;
  if (space.follower.on_course() && space.follower.op().source != nullptr) return space.follower.op().source;
  return "";
}
// The storage of the parameter with the gradient that the running op accumulates, or null.
StorageImpl* accumulated_parameter() {
  const auto node = torch::autograd::get_current_node();
  const auto* sum = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  const bool is_sum = source == nullptr && sum != nullptr && sum->variable.has_storage();
  return is_sum ? sum->variable.storage().unsafeGetStorageImpl() : nullptr;
}

// The running op's need: its operands, other memory that stays, and the requested bytes.
template <class Stays>
follow::Numbers need_of_running(const Space& space, int64_t bytes, Stays&& stays) {
  bytes = whole_pages(bytes);
  int64_t pinned = 0, unmovable = 0;
  for (const auto& [offset, block] : space.by_offset) {
    if (!block->is_resident() || !stays(*block)) continue;
    (block->pins > 0 || !block->storage ? pinned : unmovable) += block->bytes;
  }
  const int64_t bytes_outside = space.limit - space.budget + space.spare, small = space.small();
  const int64_t min_budget = Device::min_budget_for(bytes + pinned + unmovable + small + bytes_outside, space.limit);
  StorageImpl* parameter = accumulated_parameter();
  const Block* block = parameter == nullptr ? nullptr : find_block(*parameter);
  return {space.limit, bytes, pinned, unmovable, min_budget, small, smallest, bytes_outside, parameter != nullptr,
          block == nullptr ? -1 : block->id};
}
std::string describe_running_op(const Space& space, const follow::Numbers& numbers) {
  return name_of_running() + (numbers.sums != 0 ? "" : source_of_running(space));
}

// Excludes memory in use by other threads or collectives, because ops wait for it.
void record_need(Space& space, int64_t bytes) {
  const follow::Numbers numbers = need_of_running(space, bytes, [](const Block& block) {
    return block.pins > block.other_pins || !block.storage || block.is_immovable ||
           (!Device::kFixedLeave && block.fixed);
  });
  if (numbers.asked + numbers.used == 0 || numbers.least <= space.need.numbers.least) return;
  space.need = {"", describe_running_op(space, numbers), numbers};
  space.need_lacks_source = !torch::autograd::get_current_node();
}
// Returns false if the user does not allow it.
bool allow_excess(Space& space, int64_t bytes) {
  if (space.excess == Excess::kRefused) return false;
  record_need(space, bytes);
  if (space.overrun == 0) ++space.counters[kExceedances];
  space.overrun += space.bytes_in_use + bytes - space.room();
  return true;
}
void shrink(Space& space) {
  if (std::exchange(space.overrun, 0) == 0) return;
  make_room(space, 0);
  trim_idle(space);
}

// Programs that retry with smaller batches, such as accelerate, search for the message's last words.
[[noreturn]] void refuse_request(const Space& space, int64_t bytes) {
  const follow::Numbers numbers = need_of_running(space, bytes, [](const Block& block) { return !is_movable(block); });
  const std::string op = describe_running_op(space, numbers);
  const std::string text =
      c10::str("outofcore: the budget of ", space.limit, " bytes cannot hold ", op, ", which asks for ", numbers.asked,
               " bytes; at least ", numbers.least, " bytes are needed. The loop is out of memory.");
  follow::refusals().add({text, op, numbers});
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

// The block must be movable and its storage alive. Returns false if it stays.
bool move_away(Space& space, Block& block, StorageImpl& storage, int64_t from, int64_t bytes) {
  if (block.writing) return false;
  keep_for_array(space, block, storage);
  if (block.fixed) return false;
  // If free addresses have no memory, both places have some briefly.
  if (Device::kAddresses > 1 && space.bytes_in_use + block.bytes > space.room()) return false;
  const int64_t planned = planned_offset(space, block), before = block.offset;
  const auto outside = [&](int64_t offset) { return offset + block.bytes <= from || offset >= from + bytes; };
  int64_t to = planned;
  if (planned < 0 || !outside(planned) || !space.extents.take_at(planned, block.bytes))
    to = space.extents.take(block.bytes);
  if (to >= 0 && !outside(to)) {
    const int64_t inside = to;
    to = space.extents.take(block.bytes);
    space.extents.give(inside, block.bytes, false);
  }
  if (to < 0) return false;
  if (!outside(to)) {
    space.extents.give(to, block.bytes, false);
    return false;
  }
  count_use(space, Device::kAddresses > 1 ? block.bytes : 0);
  trim_idle(space);
  try {
    space.device.move(block.order, space.base + to, space.base + before, block.bytes);
  } catch (const c10::OutOfMemoryError&) {  // the system cannot commit memory for both places
    count_use(space, Device::kAddresses > 1 ? -block.bytes : 0);
    space.extents.give(to, block.bytes, false);
    return false;
  }
  space.by_offset.erase(before);
  block.offset = to;
  space.by_offset[to] = &block;
  space.ranking.touch(&block);
  count_core(space, block);
  show(block, storage, space.address(block));
  space.extents.give(before, block.bytes, true);
  count_use(space, Device::kAddresses > 1 ? -block.bytes : 0);
  return true;
}

// Moves blocks placed beyond the core before the first plan into it. Persistent ones would otherwise stay there.
void move_into_core(Space& space) {
  const int64_t end = space.addresses();
  std::vector<Block*> behind;
  for (auto it = space.by_offset.rbegin(); it != space.by_offset.rend() && it->first + it->second->bytes > space.core();
       ++it)
    behind.push_back(it->second);
  std::erase_if(behind, [](const Block* block) { return !is_movable(*block) || block->fixed; });
  if (!behind.empty())
    Owners(std::move(behind)).each([&](Block& block, StorageImpl& storage) {
      if (is_movable(block) && !block.fixed) move_away(space, block, storage, space.core(), end - space.core());
    });
  // Memory returned piecemeal comes back as small pages, which are slower to access. Collapse them, at increasing
  // intervals if it recurs. The core can have all of its memory only if no block is beyond it.
  if (!space.is_fragmented || Device::kAddresses == 1 || space.follower.steps() < space.next_collapse_step) return;
  if (!space.by_offset.empty() &&
      space.by_offset.rbegin()->first + space.by_offset.rbegin()->second->bytes > space.core())
    return;
  space.is_fragmented = false;
  space.next_collapse_step = space.follower.steps() + (int64_t{1} << std::min<int64_t>(++space.collapses, 40));
  space.core_counted = true;
  space.device.collapse(space.base, space.budget);
  space.extents.fill(space.budget);
  trim_idle(space);
}

// On a GPU: makes a hole of `bytes` by moving blocks and, unless `gently`, evicting immovable ones. Returns false if
// blocks that must stay prevent it.
bool make_hole(Space& space, int64_t bytes, bool gently = false) {
  if (Device::kAddresses > 1) return true;
  constexpr int kTries = 4;
  for (int tries = 0; tries < kTries && space.extents.longest() < bytes; ++tries) {
    // Find the smallest run of removable blocks that, with the holes between them, is large enough.
    std::vector<Block*> all, best;
    for (const auto& [offset, block] : space.by_offset) all.push_back(block);
    const auto end_of = [&](size_t i) { return all[i]->offset + all[i]->bytes; };
    int64_t best_bytes = INT64_MAX, from = 0;
    for (size_t first = 0; first < all.size(); ++first) {
      const int64_t begin = first == 0 ? 0 : end_of(first - 1);
      int64_t run_bytes = 0;
      for (size_t last = first; last < all.size() && is_movable(*all[last]) && !all[last]->fixed; ++last) {
        run_bytes += all[last]->bytes;
        const int64_t end = last + 1 == all.size() ? space.budget : all[last + 1]->offset;
        if (end - begin < bytes) continue;
        if (run_bytes < best_bytes) {
          best_bytes = run_bytes, from = begin;
          best.assign(all.begin() + static_cast<int64_t>(first), all.begin() + static_cast<int64_t>(last) + 1);
        }
        break;
      }
    }
    if (best.empty()) return false;
    bool moved = true;
    Owners(std::move(best)).each([&](Block& block, StorageImpl& storage) {
      if (!moved || !is_movable(block) || block.fixed || move_away(space, block, storage, from, bytes)) return;
      moved = !gently && !block.writing;
      if (moved) evict(space, block, storage, follow::Cause::kPlace);
    });
    if (!moved) return false;
  }
  return space.extents.longest() >= bytes;
}

// Frees a range of the arena for its planned use, by evicting released blocks and moving those planned elsewhere.
// `now`: even if that waits or writes.
bool clear_range(Space& space, int64_t offset, int64_t bytes, bool now) {
  for (;;) {
    std::vector<Block*> there;
    auto it = space.by_offset.upper_bound(offset);
    if (it != space.by_offset.begin()) --it;
    for (; it != space.by_offset.end() && it->first < offset + bytes; ++it)
      if (it->first + it->second->bytes > offset) there.push_back(it->second);
    if (there.empty()) return true;
    bool writing = false;
    for (const Block* block : there) {
      if (!can_leave_arena(*block) || block->fixed ||
          (!block->released && planned_offset(space, *block) == block->offset))
        return false;
      if (!now && block->is_resident() && (block->dirty || block->writing)) return false;
      writing |= block->writing;
    }
    if (writing) {
      wait_for_copy(space);
      continue;
    }
    unplace_fetched(space, there);
    if (there.empty()) return true;
    bool leaves = true;
    Owners(std::move(there)).each([&](Block& block, StorageImpl& storage) {
      if (!leaves || !is_movable(block) || block.writing) return;  // checked again in the next round
      if (!block.released && move_away(space, block, storage, offset, bytes)) return;
      leaves = block.released || space.bytes_in_use + block.bytes + bytes > space.room();
      if (leaves) evict(space, block, storage, follow::Cause::kPlace);
    });
    if (!leaves) return false;
  }
}

// Makes room for `bytes`, at a planned offset if it can be cleared (-1: anywhere). Returns that offset or -1, or
// nullopt if no hole is large enough. Throws if the budget is too small.
std::optional<int64_t> find_room(Space& space, int64_t bytes, int64_t planned) {
  for (;;) {
    if (space.excess == Excess::kMeasured) record_need(space, bytes);
    if (!make_room(space, bytes) && !allow_excess(space, bytes)) refuse_request(space, bytes);
    const bool is_clear = planned >= 0 && clear_range(space, planned, bytes, true);
    if (!is_clear && !make_hole(space, bytes)) return {};
    if (space.bytes_in_use + bytes <= space.room()) return is_clear ? planned : -1;  // no other thread has taken it
  }
}

void fetch(Space& space, Block& block) {
  if (Device::kStreams && block.state == BlockState::kFetching) {
    std::erase(space.ended_copies, &block);
    end_copy(space, &block, false);
  }
  if (block.state == BlockState::kFetching) {
    const Stopwatch watch{space.counters[kTransferMicroseconds]};
    while (block.state == BlockState::kFetching) wait_for_copy(space);
  }
  if (block.is_resident()) return space.device.use(block.order);
  if (block.state == BlockState::kFetched && show_fetched(space, block)) return;
  // Evicted blocks with a fixed address, or used by another thread, are used through their windows.
  const auto through_window = [&] {
    return (block.fixed && (!Device::kFixedLeave || block.offset < 0)) || is_used_elsewhere(block) ||
           !is_owned(block) || (!block.fixed && has_array(*block.storage->_unsafe_get_target()));
  };
  const auto use_at_home = [&] {
    space.counters[kAtHomeBytes] += block.bytes;
    space.device.use_slot(block.order);
  };
  if (through_window()) return use_at_home();
  const auto place_at = find_room(space, block.bytes, block.fixed ? -1 : planned_offset(space, block));
  if (!place_at || through_window()) return use_at_home();
  const Stopwatch watch{space.counters[kTransferMicroseconds]};
  int64_t start = follow::nanos_now();
  record_touch(space, block);
  if (block.fixed) {
    space.device.uncover_with(space.homes, block.slot, space.address(block), block.bytes);
    place(space, block, BlockState::kResident);
    check_bytes(space, block, space.address(block));
  } else {
    place(space, block, BlockState::kResident, *place_at);
    start = follow::nanos_now();
    space.device.note_unobserved(false);  // code before this op may have written to its window
    try {
      space.device.load(space.homes, block.slot, block.order, space.address(block));
      check_bytes(space, block, space.address(block));
    } catch (...) {
      unplace(space, block);
      throw;
    }
    space.device.use(block.order);
    show(block, *block.storage->_unsafe_get_target(), space.address(block));
  }
  block.dirty = block.slot.original && block.slot.original->was_written();  // the file has other bytes
  ++space.counters[kFetches];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kBytesEvicted] -= block.bytes;
  space.observer.add(follow::Event::kIn, start, follow::nanos_now(), block.id, block.bytes,
                     static_cast<int32_t>(follow::Copied::kOnDemand));
}

void forget_idle(Space& space) {
  while (space.extents.idle() > 0) discard_idle(space, space.extents.idle());
  if (!space.by_offset.empty()) return;
  space.device.start_over();
  space.core_counted = space.is_fragmented = false;
}

void evict_everything(Space& space) {
  wait_for_copies(space);
  std::vector<Block*> all;
  for (Block* block : std::vector<Block*>(space.owned_blocks.begin(), space.owned_blocks.end())) {
    if (block->state == BlockState::kFetched) unplace(space, *block);
    if (is_movable(*block)) all.push_back(block);
  }
  Owners(std::move(all)).each([&](Block& block, StorageImpl& storage) {
    if (!is_movable(block) || block.writing) return;
    const int64_t offset = block.offset, bytes = block.bytes;
    const bool poison = space.stress && !block.fixed;
    evict(space, block, storage);
    if (poison) space.device.fill(space.base + offset, bytes);
  });
}

void forget_space(Space* space) {
  living_spaces -= static_cast<int>(spaces.erase(space));
  update_observer();
  for (auto& [pointer, piece] : outside)
    if (piece.space == space) piece.space = nullptr;
  // A forked child cannot use the GPU to free memory there.
  if (!Device::kStreams || !space->is_inherited) delete space;
}

// The counterpart of each storage of the history: its own block, and at most one other.
void clear_twin(Space& space, const Block& block, int64_t part) {
  const auto entry = space.by_twin.find(part);
  if (entry != space.by_twin.end() && entry->second == &block) space.by_twin.erase(entry);
}
void set_twin(Space& space, Block& block, int64_t part) {
  if (block.twin != part && block.twin != block.id) clear_twin(space, block, block.twin);
  block.twin = part;
  space.by_twin[part] = &block;
}

void clear_role(Space& space, const Block& block) {
  for (const auto& kind : space.follower.all())
    if (kind->number == block.role_in && kind->blocks[block.role] == &block) kind->blocks[block.role] = nullptr;
}
void set_role(Space& space, follow::StepKind& kind, Block& block, int32_t storage) {
  if (kind.persistent[storage] >= 0) {
    if (kind.persistent[storage] == block.id) kind.blocks[storage] = &block;
    return;
  }
  if (kind.storage_by_block.count(block.id) != 0) return;  // another storage of the record, used in its place
  if (block.role_in != kind.number || block.role != storage) clear_role(space, block);
  kind.blocks[storage] = &block;
  block.role_in = kind.number;
  block.role = storage;
}

void destroy(Block* block) {
  Space& space = *block->space;
  if (block->managed_index >= 0) space.managed[static_cast<size_t>(block->managed_index)] = nullptr;
  space.recorder.free(block->id);
  clear_role(space, *block);
  space.follower.forget(block->id);
  if (block->origin) space.recipes->count_freed(*block->origin, block->storage_bytes);
  clear_twin(space, *block, block->id);
  clear_twin(space, *block, block->twin);
  if (!block->is_resident() && block->slot) space.counters[kBytesEvicted] -= block->bytes;
  unplace(space, *block);
  space.observer.add(follow::Event::kFreed, block->id, block->bytes);
  give_slot(space, *block);
  count_total(space, -block->bytes);
  space.owned_blocks.erase(block);
  block->storage.reset();
  delete block;
  notify_change();
  if (--space.block_count == 0 && !space.open) forget_space(&space);
}

Block* new_block(Space& space, int64_t bytes) {
  auto block = std::make_unique<Block>();
  block->space = &space;
  block->storage_bytes = bytes;
  block->bytes = whole_pages(bytes);
  block->id = space.next_id++;
  count_total(space, block->bytes);
  set_twin(space, *block, block->id);
  ++space.block_count;
  return block.release();
}

}  // namespace
