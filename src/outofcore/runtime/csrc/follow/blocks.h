// Moves of single blocks: how one gets memory of the arena, is evicted to its home, and is fetched.

#pragma once

#include "thread_roles.h"

#include <cstring>

namespace {

void release_block(void* context);

// The stride of checksums that detect changes. 64 more than a page, so that the offset within a page varies.
int64_t checksum_stride(const Space& space, const Block& block) {
  return space.samples && block.slot.original ? kPage + 64 : 64;
}

// Whether bytes fetched from a block's slot must match their checksum. A fixed address can be used to write to the
// window at any time, and the kernel does not report dirty pages that it has written back and dropped.
bool is_verified(const Space& space, const Block& block) {
  return space.verifies && !block.dirty && !block.fixed && !block.slot.original &&
         (!space.samples || space.homes.is_on_disk(block.slot));
}
// Call before reading a slot: records whether unobserved code may have written to it.
void record_touch(Space& space, Block& block) {
  if (is_verified(space, block)) block.touched |= space.device.was_touched(space.homes, block.slot);
}
// Checksums of the bytes of a slot; `step` is the stride for the checksum of all bytes.
Sums sums_of(const Space& space, const Block& block, const char* at, int64_t step) {
  const uint64_t all = sum_of(at, block.bytes, step);
  if (!space.samples) return {all, all};
  return {all, space.homes.is_on_disk(block.slot) ? sum_of(at, block.bytes, kPage + outofcore::kLine) : 0};
}
ChecksumScope checksum_scope_of(const Space& space, const Block& block) {
  if (is_verified(space, block)) return block.touched ? ChecksumScope::kAll : ChecksumScope::kCompared;
  return space.verifies && block.dirty ? ChecksumScope::kAll : ChecksumScope::kNothing;
}
Sums sums_of(const Space& space, const Block& block, const char* at, ChecksumScope scope) {
  if (scope == ChecksumScope::kAll || !space.samples) return sums_of(space, block, at, checksum_stride(space, block));
  return {0, sum_of(at, block.bytes, kPage + outofcore::kLine)};
}
// Records the checksums of fetched bytes. Returns false if they differ from those written.
bool accept_sums(Space& space, Block& block, ChecksumScope scope, const Sums& sums) {
  if (scope == ChecksumScope::kCompared) return sums.compared == block.sums.compared;
  if (!block.dirty && sums.all != block.sums.all) {
    ++space.counters[kUnseenWrites];
    if (block.origin) block.origin->mark_changed();
  }
  block.sums = sums;
  block.touched = false;
  return true;
}
// Verifies bytes read through a block's window or around it. Throws c10::Error if they differ from those written.
void check_bytes(Space& space, Block& block, const char* at) {
  const auto is_accepted = [&] {
    const ChecksumScope scope = checksum_scope_of(space, block);
    return scope == ChecksumScope::kNothing || accept_sums(space, block, scope, sums_of(space, block, at, scope));
  };
  if (is_accepted()) return;
  if (at != space.homes.window(block.slot)) record_touch(space, block);  // another thread may have written since
  TORCH_CHECK(block.touched && is_accepted(), "outofcore: the ", block.bytes, " bytes at byte ", block.slot.offset,
              " of the ", space.homes.is_on_disk(block.slot) ? "disk" : "host", " home are not what was written there: the "
              "checksum differs, so they were damaged in transfer or storage; check that disk and its file system, "
              "or use another home");
}

int64_t nanos_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

struct Stopwatch {
  int64_t& micros;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  ~Stopwatch() { micros += nanos_since(start) / 1000; }
};

at::DataPtr pointer_to(Block& block, void* address) {
  return {address, &block, &release_block, block.space->device.ours()};
}

void show(Block& block, StorageImpl& storage, void* address) {
  at::DataPtr old = storage.set_data_ptr(pointer_to(block, address));
  old.release_context();
}

bool owns(const StorageImpl& storage, const Block& block) {
  return const_cast<StorageImpl&>(storage)._mutable_data_ptr_no_checks().get_context() == &block;
}
// The storage must be alive: it is an operand of the running op.
bool is_owned(const Block& block) { return block.storage && owns(*block.storage->_unsafe_get_target(), block); }

bool is_held_elsewhere(const Block& block) { return block.holds && *block.holds > 0; }
// Another thread or a collective may use the block: its storage must keep its address.
bool is_used_elsewhere(const Block& block) {
  return block.other_pins > 0 || block.works > 0 || unpinned_ops > 0 || is_held_elsewhere(block);
}

// Whether a NumPy array shows the storage: `Tensor.numpy` makes it unresizable. Without an allocator it always is.
bool has_array(const StorageImpl& storage) {
  const c10::Allocator* made_by = storage.allocator();
  return !storage.resizable() && made_by != nullptr && (made_by == stock || made_by == &allocation::our_allocator());
}
void keep_for_array(Space& space, Block& block, const StorageImpl& storage) {
  if (block.fixed || !has_array(storage)) return;
  block.fixed = true;
  ++space.counters[kFixed];
}

bool is_movable(const Block& block) {
  return block.is_resident() && block.storage && !block.owner_dying && block.pins == 0 && block.works == 0 &&
         unpinned_ops == 0 && !block.is_immovable && !is_held_elsewhere(block) && (Device::kFixedLeave || !block.fixed);
}
bool can_leave_arena(const Block& block) { return block.state == BlockState::kFetched || is_movable(block); }

void destroy(Block* block);

void count_use(Space& space, int64_t bytes) {
  space.bytes_in_use += bytes;
  space.counters[kBytesInUse] = space.bytes_in_use;
  space.counters[kPeakBytes] = std::max(space.counters[kPeakBytes], space.bytes_in_use);
}

void count_total(Space& space, int64_t bytes) {
  space.total += bytes;
  space.step_total = std::max(space.step_total, space.total);
  space.counters[kPeakTotalBytes] = std::max(space.counters[kPeakTotalBytes], space.total);
}

// Returns about `bytes` of idle memory to the kernel. There must be some.
void discard_idle(Space& space, int64_t bytes) {
  const auto [offset, discarded] = space.extents.forget_some(space.core(), bytes);
  space.device.discard(space.base + offset, discarded);
  space.is_fragmented |= offset < space.core();
}
void trim_idle(Space& space) {
  while (space.extents.idle() > 0 && space.bytes_in_use + space.extents.idle() > space.room())
    discard_idle(space, std::min(space.bytes_in_use + space.extents.idle() - space.room(), space.extents.idle()));
}

// Huge pages may give the core more memory than blocks use. It counts once a block is placed beyond the core.
void count_core(Space& space, const Block& block) {
  if (Device::kAddresses == 1 || space.core_counted || block.offset + block.bytes <= space.budget) return;
  space.core_counted = true;
  space.extents.fill(space.budget);
}

void unplace(Space& space, Block& block);

// Gives a block addresses and memory in the arena, at `preferred_offset` if that is free. The arena must have room.
void place(Space& space, Block& block, BlockState state, int64_t preferred_offset = -1) {
  TORCH_CHECK(space.base != nullptr, "outofcore: a tensor was used before the arena was reserved");
  count_use(space, block.bytes);
  if (block.offset < 0) {
    if (preferred_offset >= 0 && space.extents.take_at(preferred_offset, block.bytes))
      block.offset = preferred_offset;
    else
      block.offset = space.extents.take(block.bytes);
    if (block.offset < 0) {
      count_use(space, -block.bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "outofcore: the arena has no addresses left for ", block.bytes,
                       " bytes; give a larger budget");
    }
    space.by_offset[block.offset] = &block;
    space.ranking.add(&block);
    try {
      space.device.take(block.order, space.address(block), block.bytes);
    } catch (...) {
      count_use(space, -block.bytes);
      unplace(space, block);
      throw;
    }
    count_core(space, block);
  }
  trim_idle(space);
  block.set_state(state);
  space.observer.add(follow::Event::kTaken, block.id, block.bytes);
}

void clear_early(Space& space, Block& block) {
  if (block.is_early) space.early_bytes -= block.bytes;
  block.is_early = false;
}

void unplace(Space& space, Block& block) {
  clear_early(space, block);
  const bool charged = block.is_charged();
  if (charged) {
    count_use(space, -block.bytes);
    space.observer.add(follow::Event::kGiven, block.id, block.bytes);
  }
  if (block.offset >= 0) {
    // If its window cannot be unmapped, these addresses are never reused: writes there would go to a slot.
    const bool usable = !block.fixed || block.is_resident() || space.device.uncover(space.address(block), block.bytes);
    space.device.give(block.order, space.address(block), block.bytes);
    space.by_offset.erase(block.offset);
    space.ranking.remove(&block);
    if (usable) space.extents.give(block.offset, block.bytes, charged);
    if (!space.open && space.extents.idle() > 0) discard_idle(space, space.extents.idle());
  }
  block.offset = -1;
  if (charged) block.set_state(BlockState::kEvicted);
}

// Destroys a block that was freed while held, once it is no longer held.
bool destroy_if_free(Block* block) {
  if (!block->is_freed || block->is_held()) return false;
  destroy(block);
  return true;
}

void observe_copy(Space& space, const Block& block, follow::Event event) {
  const auto mode = block.copy_waited ? follow::Copied::kWaited : follow::Copied::kOverlapped;
  space.observer.add(event, block.copy_start, block.copy_end, block.id, block.bytes, static_cast<int32_t>(mode));
}

// `waited`: an op waited for it. The next op that uses a fetched block shows it.
void end_copy(Space& space, Block* block, bool waited) {
  block->copy_waited = waited;
  if (block->state == BlockState::kFetching) {
    --space.copying_in;
    if (block->copy_succeeded && !block->is_freed && block->version == block->copied_version &&
        (block->checksum_scope == ChecksumScope::kNothing ||
         accept_sums(space, *block, block->checksum_scope, block->copied_sums)))
      block->set_state(BlockState::kFetched);
    else
      unplace(space, *block);
  } else {
    --space.copying_out;
    block->writing = false;
    if (block->copy_succeeded && block->version == block->copied_version) {
      block->dirty = block->touched = false;
      block->sums = block->copied_sums;
      ++space.counters[kWrites];
      space.counters[kWrittenBytes] += block->bytes;
      observe_copy(space, *block, follow::Event::kOut);
    }
  }
  destroy_if_free(block);
}
// `waited`: an op waited for one. With streams copies end when they are used, since the stream then waits for them.
void end_copies(Space& space, bool waited = false) {
  if (Device::kStreams && !waited) return;
  while (!space.ended_copies.empty()) {
    Block* block = space.ended_copies.back();
    space.ended_copies.pop_back();
    end_copy(space, block, waited);
  }
}
// Replaces a fetched block's window by its arena address. Returns false, and evicts the block, if it is used elsewhere
// or if unobserved code may have written to the window since the copy. The storage must be alive.
bool show_fetched(Space& space, Block& block) {
  if (block.is_immovable || is_used_elsewhere(block) || !is_owned(block) || block.version != block.copied_version ||
      has_array(*block.storage->_unsafe_get_target()) || space.device.was_touched(space.homes, block.slot)) {
    unplace(space, block);
    return false;
  }
  block.dirty = false;
  block.set_state(BlockState::kResident);
  space.device.use(block.order);
  show(block, *block.storage->_unsafe_get_target(), space.address(block));
  ++space.counters[kFetches];
  ++space.counters[kFetchesAhead];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kBytesEvicted] -= block.bytes;
  observe_copy(space, block, follow::Event::kIn);
  return true;
}

struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<Block*> blocks;
  std::vector<const StorageImpl*> plain;  // in PyTorch's own memory
};
std::vector<Pending>& pending = *new std::vector<Pending>;

void end_works() {
  for (size_t i = 0; i < pending.size();) {
    if (!pending[i].work->isCompleted()) {
      ++i;
      continue;
    }
    Pending completed = std::move(pending[i]);
    pending.erase(pending.begin() + static_cast<int64_t>(i));
    deferred_drops.works.push_back(std::move(completed.work));
    for (Block* block : completed.blocks) {
      --block->works;
      block->dirty = true;
      ++block->version;
      destroy_if_free(block);
    }
    for (const StorageImpl* storage : completed.plain) release_use(storage);
  }
}

// Returns false without one, or after a while: it may depend on the loop's next collective.
bool wait_for_works(Space& space) {
  constexpr auto kLong = std::chrono::seconds(30);
  const auto since = std::chrono::steady_clock::now();
  const auto count_works = [&] {
    int64_t works = 0;
    for (const auto& [offset, block] : space.by_offset) works += block->works;
    return works;
  };
  for (const int64_t before = count_works(); before > 0; wait_for_change(std::chrono::milliseconds(1))) {
    end_works();
    if (count_works() < before) return true;
    if (std::chrono::steady_clock::now() - since > kLong) return false;
  }
  return false;
}

void catch_up(Space& space) {
  end_copies(space);
  if (!pending.empty()) end_works();
}

// Waits for a copy to end, or another change. Callers must check their assumptions again.
void wait_for_copy(Space& space) {
  if (space.ended_copies.empty()) wait_for_change();
  end_copies(space, true);
}
void wait_for_copies(Space& space) {
  end_copies(space);
  while (space.copying_in + space.copying_out > 0) wait_for_copy(space);
}

void run_copy(outofcore::CopyThread::Job& job) {
  auto* block = static_cast<Block*>(&job);
  std::unique_lock lock(mutex);
  Space& space = *block->space;
  char* at = space.address(*block);
  const bool in = block->state == BlockState::kFetching;
  const ChecksumScope scope = in               ? checksum_scope_of(space, *block)
                              : space.verifies ? ChecksumScope::kAll
                                               : ChecksumScope::kNothing;
  lock.unlock();
  bool copied = true;
  Sums sums;
  const auto start = std::chrono::steady_clock::now();
  try {
    // Checksum first: an unobserved write during the copy then causes a mismatch later.
    if (!in && scope != ChecksumScope::kNothing)
      sums = sums_of(space, *block, at, outofcore::kLine);  // of the bytes at home
    in ? space.device.load(space.homes, block->slot, block->order, at)
       : space.device.save(space.homes, block->slot, block->order, at);
    if (in && scope != ChecksumScope::kNothing) sums = sums_of(space, *block, at, scope);
  } catch (...) {  // an op that needs the block copies again and reports the error
    copied = false;
  }
  const auto nanos = nanos_since(start);
  lock.lock();
  (in ? space.in_nanos : space.out_nanos) += nanos;
  (in ? space.in_bytes : space.out_bytes) += block->bytes;
  block->copy_succeeded = copied;
  block->checksum_scope = scope;
  block->copied_sums = sums;
  block->copy_end = follow::nanos_now();
  block->copy_start = block->copy_end - nanos;
  space.ended_copies.push_back(block);
  notify_change();
}
outofcore::CopyThread& fetch_thread = *new outofcore::CopyThread(run_copy);
outofcore::CopyThread& write_thread = *new outofcore::CopyThread(run_copy);
pid_t copier_process = -1;  // the process of the copy threads

// Throws c10::Error. A later call starts the missing threads.
void start_copiers() {
  if (Device::kStreams) return;
  if (copier_process != getpid()) {
    copier_process = getpid();
    new (&fetch_thread) outofcore::CopyThread(run_copy);
    new (&write_thread) outofcore::CopyThread(run_copy);
  }
  for (outofcore::CopyThread* thread : {&fetch_thread, &write_thread}) {
    const int status = thread->start();
    TORCH_CHECK(status == 0, "outofcore: the system gives no thread for overlapped copies (", std::strerror(status),
                "); raise the limit on processes (ulimit -u), or end other programs");
  }
}

void give_slot(Space& space, Block& block) {
  if (!block.slot) return;
  if (block.slot.original) {
    space.counters[kFileBytes] -= block.bytes;
    block.slot.original->next = std::exchange(deferred_drops.originals, nullptr);
    deferred_drops.originals = std::move(block.slot.original);
  } else {
    space.device.give_slot(block.order, space.homes.window(block.slot), block.slot.bytes);
    space.homes.give(block.slot);
  }
  block.slot = {};
}
// Gives a block a slot that no other process sees.
void take_slot(Space& space, Block& block) {
  if (block.slot && !block.slot.original && !space.homes.is_frozen(block.slot)) return;
  const follow::Slot fresh = space.homes.take(block.bytes);
  give_slot(space, block);
  block.slot = fresh;
  space.device.take_slot(block.order, space.homes.window(fresh), fresh.bytes);
}

std::string name_of(const void* schema) {
  const auto& function_schema = *static_cast<const c10::FunctionSchema*>(schema);
  return function_schema.overload_name().empty() ? function_schema.name()
                                                 : function_schema.name() + "." + function_schema.overload_name();
}
std::string name_of_running() { return running == nullptr ? "code between ops" : name_of(&running->schema()); }

void observe_unplanned_eviction(Space& space, const Block& block, follow::Cause cause) {
  if (space.bucket == nullptr || block.released || !space.follower.on_course()) return;
  const int32_t at = space.follower.position();
  const auto& ops = space.follower.kind()->usual.ops;
  space.observer.record_departure(at, cause, name_of(ops[at].op), name_of_running(), block.bytes);
}

// The block must be movable and its storage alive. If its home fails, throws and leaves it resident.
void evict(Space& space, Block& block, StorageImpl& storage, follow::Cause cause = follow::Cause::kMemory) {
  keep_for_array(space, block, storage);
  const Stopwatch watch{space.counters[kTransferMicroseconds]};
  const char* from = space.address(block);
  bool write = block.dirty || !block.slot || space.has_unseen_writes ||
               (block.fixed && (!space.verifies || block.slot.original));  // a window is mapped from a home's file
  if (!write && space.verifies && sum_of(from, block.bytes, checksum_stride(space, block)) != block.sums.all) {
    ++space.counters[kUnseenWrites];
    if (block.origin) block.origin->mark_changed();
    write = true;
  }
  if (write) {
    take_slot(space, block);
    if (space.verifies) block.sums = sums_of(space, block, from, outofcore::kLine);
    block.dirty = true;
    const int64_t start = follow::nanos_now();
    space.device.save(space.homes, block.slot, block.order, from);
    space.observer.add(follow::Event::kOut, start, follow::nanos_now(), block.id, block.bytes,
                       static_cast<int32_t>(follow::Copied::kOnDemand));
    ++space.counters[kWrites];
    space.counters[kWrittenBytes] += block.bytes;
    block.dirty = block.touched = false;
  }
  if (block.fixed)
    space.device.cover(space.homes, block.slot, space.address(block), false);  // if this fails, the block stays
  ++space.counters[kEvictions];
  if (space.bucket != nullptr && !block.released) ++space.counters[kUnplannedEvictions];
  space.observer.add(follow::Event::kLeft, block.id, block.bytes, block.released);
  observe_unplanned_eviction(space, block, cause);
  block.released = false;
  space.counters[kBytesEvicted] += block.bytes;
  if (block.fixed) {
    count_use(space, -block.bytes);
    space.observer.add(follow::Event::kGiven, block.id, block.bytes);
    block.set_state(BlockState::kEvicted);
    return;
  }
  space.device.use_slot(block.order);
  show(block, storage, space.homes.window(block.slot));
  unplace(space, block);
}

// Strong references to the storages of blocks, for changing their addresses. Taking them releases the lock.
class Owners {
 public:
  explicit Owners(std::vector<Block*> blocks) : blocks_(std::move(blocks)), storages_(blocks_.size()) {
    std::vector<std::optional<follow::WeakStorage>> weak;  // the blocks' own may be reset meanwhile
    for (Block* block : blocks_) weak.push_back(block->storage);
    for (Block* block : blocks_) ++block->pins;
    {
      const follow::Unlocked unlocked;
      for (size_t i = 0; i < weak.size(); ++i)
        if (weak[i]) storages_[i] = weak[i]->lock();
    }
    deferred_drops.storages.reserve(deferred_drops.storages.size() + blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
      Block*& block = blocks_[i];
      --block->pins;
      if (destroy_if_free(block)) {
        block = nullptr;
      } else if (!storages_[i] || !owns(*storages_[i], *block)) {
        block->owner_dying = true;
        block = nullptr;
      }
    }
  }
  ~Owners() {
    for (StoragePointer& storage : storages_) follow::drop(std::move(storage));
  }
  Owners(const Owners&) = delete;

  // Blocks without an owner are skipped: they are destroyed soon, or found again at their next use.
  template <class Action>
  void each(Action&& action) const {
    for (size_t i = 0; i < blocks_.size(); ++i)
      if (blocks_[i] != nullptr && owns(*storages_[i], *blocks_[i])) action(*blocks_[i], *storages_[i]);
  }

 private:
  std::vector<Block*> blocks_;
  std::vector<StoragePointer> storages_;
};

}  // namespace
