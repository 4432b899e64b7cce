// The block of a storage, and how storages enter and leave the budget.

#pragma once

#include "allocator.h"

namespace {

void set_owner(Block& block, StorageImpl& storage) {
  block.storage.emplace(follow::weak_of(storage));
  block.owner_dying = false;
  if (block.origin) block.origin->storage = block.storage;
  block.storage_bytes = static_cast<int64_t>(storage.nbytes());
  block.space->owned_blocks.insert(&block);
}

Block* find_block(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_block) return nullptr;
  auto* block = static_cast<Block*>(data.get_context());
  if (!block->storage || block->storage->_unsafe_get_target() != &storage) set_owner(*block, storage);
  return block;
}

// Makes a storage the owner of arena memory that an op, or unobserved code, gave it.
Block* enroll(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &allocation::release) return nullptr;
  Block* block = block_at(data.get());
  if (block == nullptr || block->storage || !is_large(block->storage_bytes))
    return nullptr;  // small blocks are never moved
  set_owner(*block, storage);
  show(*block, storage, block->space->address(*block));
  return block;
}

Block* find_or_enroll(StorageImpl& storage) {
  Block* block = find_block(storage);
  return block == nullptr ? enroll(storage) : block;
}

// Someone took the address of memory outside all loops, so no loop may adopt it.
void delete_kept_pointer(void* context) { delete static_cast<at::DataPtr*>(context); }
void keep_outside(StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  void* const at = data.get();
  const c10::Device device = data.device();
  auto memory = std::make_unique<at::DataPtr>();
  *memory = storage.set_data_ptr(at::DataPtr(at, device));
  storage.set_data_ptr_noswap(at::DataPtr(at, memory.release(), &delete_kept_pointer, device));
}

// `managed`: the user has put it under the budget, so any memory qualifies.
bool can_adopt(const StorageImpl& storage, bool managed) {
  const at::DataPtr& data = const_cast<StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  if (!Device::is_ours(data.device()) || data.get() == nullptr || has_array(storage)) return false;
  if (unpinned_ops > 0 || used_by_others.count(&storage) != 0) return false;
  if (managed) return data.get_deleter() != &delete_kept_pointer;
  return data.get() == data.get_context() &&
         (data.get_deleter() == stock.load()->raw_deleter() || data.get_deleter() == &allocation::release ||
          data.get_deleter() == &compiled_step::release || data.get_deleter() == &release_small);
}

// Copies a foreign storage, or one of a loop that has ended, into the arena (which must have room) or, with `evicted`,
// to a home. Its memory goes to `old_memory`: freeing Python memory takes Python's lock, which must not be awaited
// under ours.
Block* adopt(Space& space, StorageImpl& storage, bool evicted, at::DataPtr& old_memory) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  Block* block = new_block(space, bytes);
  const char* from = static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
  void* to = nullptr;
  try {
    if (evicted) {
      take_slot(space, *block);
      to = space.homes.window(block->slot);
      space.device.save_foreign(space.homes, block->slot, block->order, from, bytes);
      space.counters[kBytesEvicted] += block->bytes;
    } else {
      place(space, *block, BlockState::kResident);
      to = space.address(*block);
      space.device.use(block->order);
      space.device.copy(space.address(*block), from, bytes);
      space.device.mark_used(block->order);
    }
  } catch (...) {
    destroy(block);
    throw;
  }
  block->last_use = space.history.now();
  set_owner(*block, storage);
  ++space.counters[kAdoptions];
  space.counters[kAdoptedBytes] += bytes;
  old_memory = storage.set_data_ptr(pointer_to(*block, to));
  space.device.retire(old_memory);
  return block;
}

// Adopts a storage mapped from a file, which becomes its home. Returns null if its bytes differ from the file's.
Block* adopt_in_file(Space& space, StorageImpl& storage, std::shared_ptr<const follow::ForeignFile> file, int64_t offset) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  void* at = storage._mutable_data_ptr_no_checks().get();
  if (file->pages().any_written(static_cast<const char*>(at), bytes)) return nullptr;
  Block* block = new_block(space, bytes);
  block->last_use = space.history.now();
  set_owner(*block, storage);
  block->slot.bytes = block->bytes;
  block->slot.original = std::make_shared<follow::Original>(std::move(file), offset, bytes,
                                                            storage.set_data_ptr(pointer_to(*block, at)));
  space.counters[kBytesEvicted] += block->bytes;
  space.counters[kFileBytes] += block->bytes;
  ++space.counters[kAdoptions];
  space.counters[kAdoptedBytes] += bytes;
  return block;
}

// Gives a storage its file mapping back and drops its block. Returns false if the bytes have changed.
bool return_to_file(Block& block, StorageImpl& storage) {
  if (!block.slot.original || block.fixed || block.is_held()) return false;
  if (block.state == BlockState::kFetched) unplace(*block.space, block);
  if (block.is_resident() && (has_array(storage) || !is_movable(block))) return false;
  if (block.is_resident()) evict(*block.space, block, storage);
  if (!block.slot.original) return false;
  const at::DataPtr ours = storage.set_data_ptr(block.slot.original->release_memory());
  return true;
}

struct Use {
  bool is_managed = false;  // put under the budget by the user: always adopted, at a home
  bool is_partial = false;  // reads only a part, such as rows of a data set
  int64_t other_bytes = 0;  // bytes of its other operands
};
// Adopt an operand only as a whole, and if room remains for the others and a result of its size.
bool is_worth_adopting(const Space& space, int64_t bytes, const Use& use) {
  if (space.excess == Excess::kMeasured) return use.is_managed || !use.is_partial;  // as with unlimited room
  return use.is_managed || (!use.is_partial && use.other_bytes + 2 * whole_pages(bytes) <= space.room());
}

// Returns the block of a storage in this space. Null: use it in place.
Block* block_of(Space& space, StorageImpl& storage, const Use& use, at::DataPtr& old_memory) {
  if (!is_large(storage.nbytes()) || !Device::is_ours(storage.device())) return nullptr;
  Block* block = find_or_enroll(storage);
  if (block != nullptr && block->space == &space) return block;
  // A storage of an ended loop keeps its address if that was taken.
  const auto moves = [&] {
    if (find_block(storage) != block) return false;
    if (block == nullptr) return can_adopt(storage, use.is_managed);
    return !block->fixed && !block->is_immovable && !block->is_held() && !is_used_elsewhere(*block) &&
           !has_array(storage);
  };
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (moves() && is_worth_adopting(space, bytes, use)) {
    if (use.is_managed) return adopt(space, storage, true, old_memory);
    // Another thread may have started to use it while room was made.
    const bool fits = make_room(space, whole_pages(bytes)) ||
                      (space.excess == Excess::kMeasured && allow_excess(space, whole_pages(bytes)));
    if (fits && make_hole(space, whole_pages(bytes)) && moves() &&
        space.bytes_in_use + whole_pages(bytes) <= space.room())
      return adopt(space, storage, false, old_memory);
  }
  ++space.counters[kUntrackedUses];
  return nullptr;
}
Block* block_of(Space& space, StorageImpl& storage, const Use& use = {}) {
  at::DataPtr old_memory;
  return block_of(space, storage, use, old_memory);
}

}  // namespace
