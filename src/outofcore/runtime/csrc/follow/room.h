// What leaves so that something else has room, where that then lies, and how a block ends.

#pragma once

#include "blocks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

namespace {

// Which storage of the record a block is that the loop is in; -1: none.
int32_t part_of(const Space& space, const Block& block) {
  const follow::Known& known = *space.follower.known();
  int32_t storage = block.role_in == known.number ? block.role : -1;
  if (storage < 0) {
    if (block.looked_up_in != known.casting) {
      const auto found = known.of_block.find(block.id);
      block.looked_up_in = known.casting;
      block.looked_up = found == known.of_block.end() ? -1 : found->second;
    }
    storage = block.looked_up;
  }
  return storage >= 0 && known.playing[storage] == &block ? storage : -1;
}
// Where the plan has a block that is to be used next; -1: anywhere.
int64_t planned_offset(const Space& space, const Block& block) {
  if (space.anchor == nullptr) return -1;
  const int32_t storage = part_of(space, block);
  const int32_t op = storage < 0 ? -1 : space.follower.next_from_here(storage);
  return op < 0 ? -1 : space.anchor->schedule->offset(storage, op);
}

// In how many ops a block is used next, as far as known.
int64_t next_use(const Space& space, const Block& block) {
  if (space.follower.active()) {
    if (block.released) return 2 * follow::Follower::kNever;
    const int32_t storage = part_of(space, block);
    if (storage >= 0)
      if (const int64_t distance = space.follower.next_use(storage); distance < follow::Follower::kNever)
        return distance;
    return follow::Follower::kNever + space.history.now() - block.last_use;
  }
  return space.history.next_use(block.twin, block.last_use);
}

// Visits what lies in the arena, what is used furthest from now first, until `visit` (block, in how many ops it is used
// next) returns false.
template <class Visit>
void visit_furthest(Space& space, Visit&& visit) {
  constexpr int64_t kEvery = 1024;  // ops after which all blocks are ranked anew
  const int64_t now = space.history.now();
  const void* by = space.follower.active() ? static_cast<const void*>(space.follower.known())
                   : space.history.known() ? &space.history
                                           : nullptr;
  if (by != space.ranked_by || now >= space.ranked_until) {
    space.ranking.touch_all();
    space.ranked_by = by;
    space.ranked_until = now + std::max(kEvery, static_cast<int64_t>(space.ranking.size()));
  }
  int64_t distance = 0;  // of the block that was asked for last, which is the one that is visited
  const auto key_of = [&](const Block& block) {
    constexpr int64_t kNever = follow::History::kNever;
    distance = next_use(space, block);
    if (distance >= 2 * kNever) return distance;
    // The longer it was not used, the later it comes, where nothing is known.
    return by == nullptr || distance >= kNever ? kNever - block.last_use : now + distance;
  };
  const auto offset_of = [](const Block& block) { return block.offset; };
  space.ranking.visit(key_of, offset_of, [&](Block& block) { return visit(block, distance); });
}

// The neighbours in the arena to evict with a block for a hole of so many bytes, of which so many are needed, if none of
// them is used in fewer ops. Empty: they do not leave such a hole.
std::vector<Block*> neighbours(const Space& space, Block& first, int64_t bytes, int64_t needed, int64_t no_earlier) {
  const auto it = space.at.find(first.offset);
  auto before = std::make_reverse_iterator(it);
  auto behind = std::next(it);
  std::vector<Block*> found{&first};
  int64_t freed = first.bytes;
  const auto end_of = [](const Block& block) { return block.offset + block.bytes; };
  for (;;) {
    const int64_t begin = before == space.at.rend() ? 0 : end_of(*before->second);
    const int64_t end = behind == space.at.end() ? end_of(*found.back()) : behind->second->offset;
    if (freed >= needed && end - begin >= bytes) return found;
    const auto distance_of = [&](const Block* block) {
      return block != nullptr && may_leave(*block) ? next_use(space, *block) : -1;
    };
    Block* left = before == space.at.rend() ? nullptr : before->second;
    Block* right = behind == space.at.end() ? nullptr : behind->second;
    const int64_t to_left = distance_of(left), to_right = distance_of(right);
    if (std::max(to_left, to_right) < std::max<int64_t>(no_earlier, 0)) return {};
    if (to_left >= to_right) {
      found.insert(found.begin(), left);
      ++before;
    } else {
      found.push_back(right);
      ++behind;
    }
    freed += (to_left >= to_right ? left : right)->bytes;
  }
}

// Whether an op of another thread keeps something where it is, for as long as it runs.
bool is_kept_by_others(const Space& space) {
  if (blind > 0) return true;
  return std::any_of(space.at.begin(), space.at.end(), [](const auto& placed) {
    const Block& block = *placed.second;
    return block.here() && block.storage && block.pins == block.others && block.works == 0 &&
           (block.others > 0 || is_held_elsewhere(block));
  });
}

// Waits for storages to go that are being destroyed; false: there are none. Those that stay have given their memory to other
// storages.
bool outlive_dying(Space& space) {
  if (std::none_of(space.at.begin(), space.at.end(), [](const auto& placed) { return placed.second->dying; }))
    return false;
  if (wait_for_answer(std::chrono::seconds(1))) return true;
  for (const auto& [offset, block] : space.at)
    if (std::exchange(block->dying, false)) block->storage.reset();
  return true;
}

// Takes blocks out of the arena that show their windows still, and out of the list.
void unplace_arrived(Space& space, std::vector<Block*>& blocks) {
  std::erase_if(blocks, [&](Block* block) {
    if (block->state != State::kArrived) return false;
    unplace(space, *block);
    return true;
  });
}

// Has some blocks leave, of which others may have taken hold meanwhile: what may not leave any more stays.
void evict_all(Space& space, std::vector<Block*> victims) {
  unplace_arrived(space, victims);
  if (victims.empty()) return;
  Owners(std::move(victims)).each([&](Block& block, StorageImpl& storage) {
    if (movable(block) && !block.writing) evict(space, block, storage);
  });
}

constexpr int kMostSeen = 256;

// Evicts what is used furthest from now, until there is room for so many bytes; false: too much is in use. `easily`: only
// what need not be written, and is not used for so many ops (-1: anything).
bool make_room(Space& space, int64_t bytes, int64_t easily = -1) {
  if (easily < 0) catch_up(space);
  while (space.charged + bytes > space.room()) {
    const int64_t needed = space.charged + bytes - space.room();
    std::vector<Block*> victims;
    int64_t chosen = 0, soonest = 0;
    int left = kMostSeen;  // blocks that may still be passed over because they would have to be written first
    visit_furthest(space, [&](Block& block, int64_t distance) {
      if (distance <= easily || left == 0) return false;
      if (!may_leave(block)) return true;
      if (easily >= 0 && block.here() && (block.dirty || block.fixed || block.writing)) {
        --left;
        return true;
      }
      victims.push_back(&block);
      chosen += block.bytes;
      soonest = distance;
      return chosen < needed;
    });
    if (chosen < needed) {
      if (easily >= 0) return false;
      if (space.copying_in + space.copying_out > 0 || is_kept_by_others(space)) {
        wait_for_copy(space);  // what is on its way can leave again, and what was freed meanwhile is gone
      } else if (!outlive_dying(space) && !outlive_works(space)) {
        return false;
      }
      continue;
    }
    if (easily < 0) space.evicted = true;
    // Neighbours leave a hole of memory that is there already, where pieces from all over the arena leave holes that
    // are too small: better, unless they are needed much sooner.
    std::vector<Block*> together;
    if (space.anchor == nullptr && easily < 0) together = neighbours(space, *victims[0], bytes, needed, soonest / 2);
    if (!together.empty()) {
      victims = std::move(together);
    } else {
      // A large one that came last may have made smaller ones before it needless.
      std::erase_if(victims, [&](const Block* block) {
        if (chosen - block->bytes < needed) return false;
        chosen -= block->bytes;
        return true;
      });
    }
    // They are to be fetched ahead again, although that far was looked already.
    for (const Block* victim : victims)
      space.looked = std::min(space.looked, space.history.position() + next_use(space, *victim) - 1);
    if (std::any_of(victims.begin(), victims.end(), [](const Block* block) { return block->writing; })) {
      wait_for_copy(space);
      continue;
    }
    const int64_t before = space.charged;
    evict_all(space, std::move(victims));
    if (easily >= 0 && space.charged >= before) return false;
  }
  return true;
}

Block* known(StorageImpl& storage);

// Where in backward the op comes from that runs; empty: it does not run there, or that is not known.
std::string source_of_running(const Space& space) {
  if (!torch::autograd::get_current_node()) return "";
  if (source != nullptr) return source;
  if (space.follower.on_course() && space.follower.op().source != nullptr) return space.follower.op().source;
  return "";
}
// The storage of the parameter to whose gradient the op adds that runs; null: it adds to none.
StorageImpl* summed_by_running() {
  const auto node = torch::autograd::get_current_node();
  const auto* sum = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  const bool is_sum = source == nullptr && sum != nullptr && sum->variable.has_storage();
  return is_sum ? sum->variable.storage().unsafeGetStorageImpl() : nullptr;
}

// What the op that runs needs at once: what it uses, what else stays, and the bytes that it asks for.
template <class Stays>
follow::Numbers need_of_running(const Space& space, int64_t bytes, Stays&& stays) {
  bytes = whole_pages(bytes);
  int64_t pinned = 0, kept = 0;
  for (const auto& [offset, block] : space.at) {
    if (!block->here() || !stays(*block)) continue;
    (block->pins > 0 || !block->storage ? pinned : kept) += block->bytes;
  }
  const int64_t beside = space.limit - space.budget + space.spare, small = space.small();
  const int64_t least = Device::least_for(bytes + pinned + kept + small + beside, space.limit);
  StorageImpl* parameter = summed_by_running();
  const Block* block = parameter == nullptr ? nullptr : known(*parameter);
  return {space.limit, bytes, pinned, kept, least, small, smallest, beside, parameter != nullptr,
          block == nullptr ? -1 : block->id};
}
// The op that runs, with where it comes from if it runs in backward.
std::string running_op(const Space& space, const follow::Numbers& numbers) {
  return name_of_running() + (numbers.sums != 0 ? "" : source_of_running(space));
}

// Keeps the need of the op that runs, if none has needed more. What another thread uses, or a collective, an op waits for.
void note_need(Space& space, int64_t bytes) {
  const follow::Numbers numbers = need_of_running(space, bytes, [](const Block& block) {
    return block.pins > block.others || !block.storage || block.stays || (!Device::kFixedLeave && block.fixed);
  });
  if (numbers.asked + numbers.used == 0 || numbers.least <= space.need.numbers.least) return;
  space.need = {"", running_op(space, numbers), numbers};
  space.unplaced = !torch::autograd::get_current_node();
}
// Lets the op that runs exceed the budget by what it lacks of so many bytes; false: the user does not allow that.
bool exceed(Space& space, int64_t bytes) {
  if (space.excess == Excess::kRefused) return false;
  note_need(space, bytes);
  if (space.grown == 0) ++space.counters[kExceedances];
  space.grown += space.charged + bytes - space.room();
  return true;
}
// Has leave what an op has left beyond the budget.
void shrink(Space& space) {
  if (std::exchange(space.grown, 0) == 0) return;
  make_room(space, 0);
  let_go_of_idle(space);
}

// Throws, and keeps the numbers for ``follow_refusal``. Programs that then try smaller batches, such as accelerate's, look
// for the last words of the message.
[[noreturn]] void refuse(const Space& space, int64_t bytes) {
  const follow::Numbers numbers = need_of_running(space, bytes, [](const Block& block) { return !movable(block); });
  const std::string op = running_op(space, numbers);
  const std::string text =
      c10::str("outofcore: the budget of ", space.limit, " bytes cannot hold ", op, ", which asks for ", numbers.asked,
               " bytes; at least ", numbers.least, " bytes are needed. The loop is out of memory.");
  follow::refusals().keep({text, op, numbers});
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}

// Moves a block that is movable within the arena, to where the plan has it if that is free, but out of a stretch; false: it
// stays. Its storage must not go meanwhile.
bool move_away(Space& space, Block& block, StorageImpl& storage, int64_t from, int64_t bytes) {
  if (block.writing) return false;
  keep_for_array(space, block, storage);
  if (block.fixed) return false;
  // Where free addresses have no memory, both places have some for a moment.
  if (Device::kAddresses > 1 && space.charged + block.bytes > space.room()) return false;
  const int64_t wanted = planned_offset(space, block), before = block.offset;
  const auto outside = [&](int64_t offset) { return offset + block.bytes <= from || offset >= from + bytes; };
  int64_t to = wanted;
  if (wanted < 0 || !outside(wanted) || !space.extents.take_at(wanted, block.bytes)) to = space.extents.take(block.bytes);
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
  let_go_of_idle(space);
  try {
    space.device.move(block.order, space.base + to, space.base + before, block.bytes);
  } catch (const c10::OutOfMemoryError&) {  // the system promises no memory for both places
    count_use(space, Device::kAddresses > 1 ? -block.bytes : 0);
    space.extents.give(to, block.bytes, false);
    return false;
  }
  space.at.erase(before);
  block.offset = to;
  space.at[to] = &block;
  space.ranking.touch(&block);
  count_core(space, block);
  show(block, storage, space.address(block));
  space.extents.give(before, block.bytes, true);
  count_use(space, Device::kAddresses > 1 ? -block.bytes : 0);
  return true;
}

// Moves what lies behind the addresses that plans speak of, since there was no plan when it came, to where its plan has it.
// What never leaves would stay there for good, and as much of the planned addresses could not have memory.
void move_into_core(Space& space) {
  const int64_t end = space.addresses();
  std::vector<Block*> behind;
  for (auto it = space.at.rbegin(); it != space.at.rend() && it->first + it->second->bytes > space.core(); ++it)
    behind.push_back(it->second);
  std::erase_if(behind, [](const Block* block) { return !movable(*block) || block->fixed; });
  if (!behind.empty())
    Owners(std::move(behind)).each([&](Block& block, StorageImpl& storage) {
      if (movable(block) && !block.fixed) move_away(space, block, storage, space.core(), end - space.core());
    });
  // What was given back in pieces has come again in small pages, which take longer to walk through. As long as something
  // lies behind, the core cannot have all of its memory. Where it is torn again and again, this is done ever less often.
  if (!space.torn || Device::kAddresses == 1 || space.follower.steps() < space.collapses_from) return;
  if (!space.at.empty() && space.at.rbegin()->first + space.at.rbegin()->second->bytes > space.core()) return;
  space.torn = false;
  space.collapses_from = space.follower.steps() + (int64_t{1} << std::min<int64_t>(++space.collapses, 40));
  space.core_counted = true;
  space.device.collapse(space.base, space.budget);
  space.extents.fill(space.budget);
  let_go_of_idle(space);
}

// Where the arena has no more addresses than bytes: makes a hole of so many bytes, by moving what parts holes, and (unless
// `gently`) letting leave what cannot be moved. False: what has to stay parts them.
bool make_hole(Space& space, int64_t bytes, bool gently = false) {
  if (Device::kAddresses > 1) return true;
  constexpr int kTries = 4;
  for (int tries = 0; tries < kTries && space.extents.longest() < bytes; ++tries) {
    // Of the runs of blocks that may go, and that have room for it with the holes between them, the smallest.
    std::vector<Block*> all, best;
    for (const auto& [offset, block] : space.at) all.push_back(block);
    const auto end_of = [&](size_t i) { return all[i]->offset + all[i]->bytes; };
    int64_t best_bytes = INT64_MAX, from = 0;
    for (size_t first = 0; first < all.size(); ++first) {
      const int64_t begin = first == 0 ? 0 : end_of(first - 1);
      int64_t taken = 0;
      for (size_t last = first; last < all.size() && movable(*all[last]) && !all[last]->fixed; ++last) {
        taken += all[last]->bytes;
        const int64_t end = last + 1 == all.size() ? space.budget : all[last + 1]->offset;
        if (end - begin < bytes) continue;
        if (taken < best_bytes) {
          best_bytes = taken, from = begin;
          best.assign(all.begin() + static_cast<int64_t>(first), all.begin() + static_cast<int64_t>(last) + 1);
        }
        break;
      }
    }
    if (best.empty()) return false;
    bool moved = true;
    Owners(std::move(best)).each([&](Block& block, StorageImpl& storage) {
      if (!moved || !movable(block) || block.fixed || move_away(space, block, storage, from, bytes)) return;
      moved = !gently && !block.writing;
      if (moved) evict(space, block, storage, follow::Cause::kPlace);
    });
    if (!moved) return false;
  }
  return space.extents.longest() >= bytes;
}

// Whether a stretch of the arena is free where a plan has something for it, once what is there has left: what the plan
// has let go, and what it has elsewhere, or not at all. `now`: also if it takes waiting or writing.
bool clear(Space& space, int64_t offset, int64_t bytes, bool now) {
  for (;;) {
    std::vector<Block*> there;
    auto it = space.at.upper_bound(offset);
    if (it != space.at.begin()) --it;
    for (; it != space.at.end() && it->first < offset + bytes; ++it)
      if (it->first + it->second->bytes > offset) there.push_back(it->second);
    if (there.empty()) return true;
    bool writing = false;
    for (const Block* block : there) {
      if (!may_leave(*block) || block->fixed || (!block->released && planned_offset(space, *block) == block->offset))
        return false;
      if (!now && block->here() && (block->dirty || block->writing)) return false;
      writing |= block->writing;
    }
    if (writing) {
      wait_for_copy(space);
      continue;
    }
    unplace_arrived(space, there);
    if (there.empty()) return true;
    bool leaves = true;
    Owners(std::move(there)).each([&](Block& block, StorageImpl& storage) {
      if (!leaves || !movable(block) || block.writing) return;  // as it is now, it is looked at again
      if (!block.released && move_away(space, block, storage, offset, bytes)) return;
      // There is room elsewhere.
      leaves = block.released || space.charged + block.bytes + bytes > space.room();
      if (leaves) evict(space, block, storage, follow::Cause::kPlace);
    });
    if (!leaves) return false;
  }
}

// Makes room for so many bytes, at a planned offset if that can be cleared (-1: anywhere). The offset where they can be
// placed now, or -1: anywhere, or nothing: no hole is large enough. Throws if the budget cannot hold them.
std::optional<int64_t> room_for(Space& space, int64_t bytes, int64_t wanted) {
  for (;;) {
    if (space.excess == Excess::kMeasured) note_need(space, bytes);
    if (!make_room(space, bytes) && !exceed(space, bytes)) refuse(space, bytes);
    const bool clears = wanted >= 0 && clear(space, wanted, bytes, true);
    if (!clears && !make_hole(space, bytes)) return {};
    if (space.charged + bytes <= space.room()) return clears ? wanted : -1;  // nobody has taken it meanwhile
  }
}

// Brings in what an op of the loop uses, or has it used where it is.
void fetch(Space& space, Block& block) {
  if (Device::kStreams && block.state == State::kComing) {
    std::erase(space.finished, &block);
    end_copy(space, &block, false);
  }
  if (block.state == State::kComing) {
    const Stopwatch watch{space.counters[kTransferMicroseconds]};
    while (block.state == State::kComing) wait_for_copy(space);
  }
  if (block.here()) return space.device.use(block.order);
  if (block.state == State::kArrived && show_arrived(space, block)) return;
  // What keeps its address away, or is used by another thread, is used through its window.
  const auto through_window = [&] {
    return (block.fixed && (!Device::kFixedLeave || block.offset < 0)) || used_elsewhere(block) || !is_owned(block) ||
           (!block.fixed && has_array(*block.storage->_unsafe_get_target()));
  };
  const auto use_at_home = [&] {
    space.counters[kAtHomeBytes] += block.bytes;
    space.device.use_slot(block.order);
  };
  if (through_window()) return use_at_home();
  const auto place_for = room_for(space, block.bytes, block.fixed ? -1 : planned_offset(space, block));
  if (!place_for || through_window()) return use_at_home();
  const Stopwatch watch{space.counters[kTransferMicroseconds]};
  int64_t start = follow::nanos_now();
  note_touched(space, block);
  if (block.fixed) {
    space.device.uncover_with(space.homes, block.slot, space.address(block), block.bytes);
    place(space, block, State::kHere);
    check_bytes(space, block, space.address(block));
  } else {
    place(space, block, State::kHere, *place_for);
    start = follow::nanos_now();
    space.device.note_unseen(false);  // just before this op, somebody may have written to its window
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
  block.dirty = block.slot.original && block.slot.original->was_written();  // its file has other bytes
  ++space.counters[kFetches];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kAwayBytes] -= block.bytes;
  space.observer.add(follow::Event::kIn, start, follow::nanos_now(), block.id, block.bytes,
                     static_cast<int32_t>(follow::Copied::kOnDemand));
}

void forget_idle(Space& space) {
  while (space.extents.idle() > 0) discard_idle(space, space.extents.idle());
  if (!space.at.empty()) return;
  space.device.start_over();
  space.core_counted = space.torn = false;
}

void evict_everything(Space& space) {
  wait_for_copies(space);
  std::vector<Block*> all;
  for (Block* block : std::vector<Block*>(space.known.begin(), space.known.end())) {
    if (block->state == State::kArrived) unplace(space, *block);
    if (movable(*block)) all.push_back(block);
  }
  Owners(std::move(all)).each([&](Block& block, StorageImpl& storage) {
    if (!movable(block) || block.writing) return;
    const int64_t offset = block.offset, bytes = block.bytes;
    const bool poison = space.stress && !block.fixed;
    evict(space, block, storage);
    if (poison) space.device.fill(space.base + offset, bytes);
  });
}

void forget_space(Space* space) {
  living_spaces -= static_cast<int>(spaces.erase(space));
  for (auto& [pointer, piece] : outside)
    if (piece.charged == space) piece.charged = nullptr;
  // A GPU cannot be used in the child of a fork, nor be told that what it has there is not needed.
  if (!Device::kStreams || !space->of_parent) delete space;
}

// Who plays the part of a storage of the history: each block its own, and at most one other.
void leave_part(Space& space, const Block& block, int64_t part) {
  const auto found = space.parts.find(part);
  if (found != space.parts.end() && found->second == &block) space.parts.erase(found);
}
void cast(Space& space, Block& block, int64_t part) {
  if (block.twin != part && block.twin != block.id) leave_part(space, block, block.twin);
  block.twin = part;
  space.parts[part] = &block;
}

// A block is no longer the storage of a record that it was.
void leave_role(Space& space, const Block& block) {
  for (const auto& known : space.follower.all())
    if (known->number == block.role_in && known->playing[block.role] == &block) known->playing[block.role] = nullptr;
}
// Which storage of a record a block is now.
void play(Space& space, follow::Known& known, Block& block, int32_t storage) {
  if (known.persistent[storage] >= 0) {
    if (known.persistent[storage] == block.id) known.playing[storage] = &block;
    return;
  }
  if (known.of_block.count(block.id) != 0) return;  // it is another one of the record, which the op uses in its place
  if (block.role_in != known.number || block.role != storage) leave_role(space, block);
  known.playing[storage] = &block;
  block.role_in = known.number;
  block.role = storage;
}

void destroy(Block* block) {
  Space& space = *block->space;
  if (block->given >= 0) space.given[static_cast<size_t>(block->given)] = nullptr;
  space.recorder.free(block->id);
  leave_role(space, *block);
  space.follower.forget(block->id);
  if (block->origin) space.recipes->gone(*block->origin, block->used);
  leave_part(space, *block, block->id);
  leave_part(space, *block, block->twin);
  if (!block->here() && block->slot) space.counters[kAwayBytes] -= block->bytes;
  unplace(space, *block);
  space.observer.add(follow::Event::kFreed, block->id, block->bytes);
  give_slot(space, *block);
  count_total(space, -block->bytes);
  space.known.erase(block);
  block->storage.reset();
  delete block;
  answer();
  if (--space.pieces == 0 && !space.open) forget_space(&space);
}

Block* new_block(Space& space, int64_t bytes) {
  auto block = std::make_unique<Block>();
  block->space = &space;
  block->used = bytes;
  block->bytes = whole_pages(bytes);
  block->id = space.ids++;
  count_total(space, block->bytes);
  cast(space, *block, block->id);
  ++space.pieces;
  return block.release();
}

}  // namespace
