// Which block a storage has, and how one comes under the budget or out of it.

#pragma once

#include "allocator.h"

namespace {

void own(Block& block, StorageImpl& storage) {
  block.storage.emplace(follow::weak_of(storage));
  block.dying = false;
  if (block.origin) block.origin->storage = block.storage;
  block.used = static_cast<int64_t>(storage.nbytes());
  block.space->known.insert(&block);
}

// The block of a storage that has one.
Block* known(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_block) return nullptr;
  auto* block = static_cast<Block*>(data.get_context());
  if (!block->storage || block->storage->_unsafe_get_target() != &storage) own(*block, storage);
  return block;
}

// A piece of the arena that an op, or code that nobody sees, has put into a storage.
Block* enroll(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &allocation::release) return nullptr;
  Block* block = block_at(data.get());
  if (block == nullptr || block->storage || !is_large(block->used)) return nullptr;  // small ones are never moved
  own(*block, storage);
  show(*block, storage, block->space->address(*block));
  return block;
}

// The block of a storage, if it lies in memory of a loop.
Block* known_or_enrolled(StorageImpl& storage) {
  Block* block = known(storage);
  return block == nullptr ? enroll(storage) : block;
}

// Somebody has the address of memory that is not a loop's: no loop takes it over.
void release_kept(void* context) { delete static_cast<at::DataPtr*>(context); }
void keep_outside(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  void* const at = data.get();
  const c10::Device device = data.device();
  auto kept = std::make_unique<at::DataPtr>();
  *kept = storage.set_data_ptr(at::DataPtr(at, device));
  storage.set_data_ptr_noswap(at::DataPtr(at, kept.release(), &release_kept, device));
}

// `given`: whose memory it is does not matter, since the user has put it under the budget.
bool adoptable(const StorageImpl& storage, bool given) {
  const at::DataPtr& data = const_cast<StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  if (!Device::is_ours(data.device()) || data.get() == nullptr || has_array(storage)) return false;
  if (blind > 0 || used_by_others.count(&storage) != 0) return false;
  if (given) return data.get_deleter() != &release_kept;
  return data.get() == data.get_context() &&
         (data.get_deleter() == stock.load()->raw_deleter() || data.get_deleter() == &allocation::release ||
          data.get_deleter() == &planned::release || data.get_deleter() == &release_small);
}

// Copies a storage of outside, or of a loop that has ended, into this arena, or (``away``) to a home. What it lay in goes
// to ``left``: to free memory of Python's takes its lock, which must not be waited for under ours. The arena must have room.
Block* adopt(Space& space, StorageImpl& storage, bool away, at::DataPtr& left) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  Block* block = new_block(space, bytes);
  const char* from = static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
  void* to = nullptr;
  try {
    if (away) {
      take_slot(space, *block);
      to = space.homes.window(block->slot);
      space.device.save_foreign(space.homes, block->slot, block->order, from, bytes);
      space.counters[kAwayBytes] += block->bytes;
    } else {
      place(space, *block, State::kHere);
      to = space.address(*block);
      space.device.use(block->order);
      space.device.copy(space.address(*block), from, bytes);
      space.device.used(block->order);
    }
  } catch (...) {
    destroy(block);
    throw;
  }
  block->last_use = space.history.now();
  own(*block, storage);
  ++space.counters[kAdoptions];
  space.counters[kAdoptedBytes] += bytes;
  left = storage.set_data_ptr(pointer_to(*block, to));
  space.device.retire(left);
  return block;
}

// The same for a storage that was mapped from a file, which is its home from now on. Null: its bytes are not the file's.
Block* adopt_in_file(Space& space, StorageImpl& storage, std::shared_ptr<const follow::ForeignFile> file, int64_t offset) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  void* at = storage._mutable_data_ptr_no_checks().get();
  if (file->pages().any_written(static_cast<const char*>(at), bytes)) return nullptr;
  Block* block = new_block(space, bytes);
  block->last_use = space.history.now();
  own(*block, storage);
  block->slot.bytes = block->bytes;
  block->slot.original = std::make_shared<follow::Original>(std::move(file), offset, bytes,
                                                            storage.set_data_ptr(pointer_to(*block, at)));
  space.counters[kAwayBytes] += block->bytes;
  space.counters[kFileBytes] += block->bytes;
  ++space.counters[kAdoptions];
  space.counters[kAdoptedBytes] += bytes;
  return block;
}

// Gives a storage the memory back that was mapped from a file, and forgets its block; false: it has other bytes by now.
bool return_to_file(Block& block, StorageImpl& storage) {
  if (!block.slot.original || block.fixed || block.held()) return false;
  if (block.state == State::kArrived) unplace(*block.space, block);
  if (block.here() && (has_array(storage) || !movable(block))) return false;
  if (block.here()) evict(*block.space, block, storage);
  if (!block.slot.original) return false;
  const at::DataPtr ours = storage.set_data_ptr(block.slot.original->give_back());
  return true;
}

// How an op uses a storage.
struct Use {
  bool given = false;    // the user has put it under the budget: it is adopted in any case, at a home
  bool in_part = false;  // it looks at a part of it, such as at rows of a data set
  int64_t beside = 0;    // bytes of its other operands
};
// Whether to take over memory of outside: what an op uses as a whole, and that leaves room for its other operands and for
// a result of the same size. Else it would be copied for a few rows, or be the reason to refuse what needs no room.
bool is_worth_adopting(const Space& space, int64_t bytes, const Use& use) {
  if (space.excess == Excess::kMeasured) return use.given || !use.in_part;  // as with room for all
  return use.given || (!use.in_part && use.beside + 2 * whole_pages(bytes) <= space.room());
}

// The block of a storage, in this space; null: it is used where it is.
Block* block_of(Space& space, StorageImpl& storage, const Use& use, at::DataPtr& left) {
  if (!is_large(storage.nbytes()) || !Device::is_ours(storage.device())) return nullptr;
  Block* block = known_or_enrolled(storage);
  if (block != nullptr && block->space == &space) return block;
  // What comes from a loop that has ended keeps an address that somebody took.
  const auto moves = [&] {
    if (known(storage) != block) return false;
    if (block == nullptr) return adoptable(storage, use.given);
    return !block->fixed && !block->stays && !block->held() && !used_elsewhere(*block) && !has_array(storage);
  };
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (moves() && is_worth_adopting(space, bytes, use)) {
    if (use.given) return adopt(space, storage, true, left);
    // Another thread may have begun to use it while room was made.
    const bool fits = make_room(space, whole_pages(bytes)) ||
                      (space.excess == Excess::kMeasured && exceed(space, whole_pages(bytes)));
    if (fits && make_hole(space, whole_pages(bytes)) && moves() && space.charged + whole_pages(bytes) <= space.room())
      return adopt(space, storage, false, left);
  }
  ++space.counters[kForeign];
  return nullptr;
}
// What lies in PyTorch's own memory can be freed at once.
Block* block_of(Space& space, StorageImpl& storage, const Use& use = {}) {
  at::DataPtr left;
  return block_of(space, storage, use, left);
}

}  // namespace
