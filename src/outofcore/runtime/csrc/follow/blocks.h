// How a block gets memory of the arena, leaves for its home, and comes back: one at a time, whoever decides it.

#pragma once

#include "thread_roles.h"

#include <cstring>

namespace {

void release_block(void* context);

// Of how many bytes 64 are looked at to see whether a block has changed. The size of a page and 64 more, so that it is not
// always the beginning of one.
int64_t step_of_sums(const Space& space, const Block& block) {
  return space.sampled && block.slot.original ? kPage + 64 : 64;
}

// Whether what comes from a block's slot is compared with what was written there. Who has a block's address may write to its
// window at any time, and the kernel does not tell of a page that it has written to the disk and taken away since.
bool is_compared(const Space& space, const Block& block) {
  return space.verified && !block.dirty && !block.fixed && !block.slot.original &&
         (!space.sampled || space.homes.is_on_disk(block.slot));
}
// Takes note, before a slot is read, whether code that nobody sees may have written to it.
void note_touched(Space& space, Block& block) {
  if (is_compared(space, block)) block.touched |= space.device.was_touched(space.homes, block.slot);
}
// Sums of bytes that go to a slot or come from there. `step`: of those of all bytes.
Sums sums_of(const Space& space, const Block& block, const char* at, int64_t step) {
  const uint64_t all = sum_of(at, block.bytes, step);
  if (!space.sampled) return {all, all};
  return {all, space.homes.is_on_disk(block.slot) ? sum_of(at, block.bytes, kPage + outofcore::kLine) : 0};
}
Summed summed(const Space& space, const Block& block) {
  if (is_compared(space, block)) return block.touched ? Summed::kAll : Summed::kCompared;
  return space.verified && block.dirty ? Summed::kAll : Summed::kNothing;
}
Sums sums_of(const Space& space, const Block& block, const char* at, Summed how) {
  if (how == Summed::kAll || !space.sampled) return sums_of(space, block, at, step_of_sums(space, block));
  return {0, sum_of(at, block.bytes, kPage + outofcore::kLine)};
}
// Takes over the sums of bytes that have come from a slot; false: they are not what was written there.
bool accept(Space& space, Block& block, Summed how, const Sums& sums) {
  if (how == Summed::kCompared) return sums.compared == block.sums.compared;
  if (!block.dirty && sums.all != block.sums.all) {
    ++space.counters[kUnseenWrites];
    if (block.origin) block.origin->changed();
  }
  block.sums = sums;
  block.touched = false;
  return true;
}
// The same of bytes read beside a block's window or through it. Throws c10::Error: they are not what was written there.
void check_bytes(Space& space, Block& block, const char* at) {
  const auto is_accepted = [&] {
    const Summed how = summed(space, block);
    return how == Summed::kNothing || accept(space, block, how, sums_of(space, block, at, how));
  };
  if (is_accepted()) return;
  if (at != space.homes.window(block.slot)) note_touched(space, block);  // another thread, since it was noted
  TORCH_CHECK(block.touched && is_accepted(), "outofcore: the ", block.bytes, " bytes at byte ", block.slot.offset,
              " of the ", space.homes.is_on_disk(block.slot) ? "disk" : "host", " home are not what was written there: the "
              "checksum differs, so they were damaged on the way or where they lay; check that disk and its file system, "
              "or name another home");
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

// Shows another address to the tensors of a block. The storage must own it.
void show(Block& block, StorageImpl& storage, void* address) {
  at::DataPtr old = storage.set_data_ptr(pointer_to(block, address));
  old.release_context();
}

bool owns(const StorageImpl& storage, const Block& block) {
  return const_cast<StorageImpl&>(storage)._mutable_data_ptr_no_checks().get_context() == &block;
}
// The same of the storage that a block is known to have, which somebody must hold: an op whose operand it is.
bool is_owned(const Block& block) { return block.storage && owns(*block.storage->_unsafe_get_target(), block); }

bool is_held_elsewhere(const Block& block) { return block.holds && *block.holds > 0; }
// Another thread, or a work of a collective, may be using it: what its storage shows stays as it is.
bool used_elsewhere(const Block& block) {
  return block.others > 0 || block.works > 0 || blind > 0 || is_held_elsewhere(block);
}

// Whether a NumPy array was ever taken of a storage: ``Tensor.numpy`` then forbids to resize it. It has to stay where it is.
// Storages that are made around memory, such as by ``torch.load``, never can be resized, and have no allocator.
bool has_array(const StorageImpl& storage) {
  const c10::Allocator* made_by = storage.allocator();
  return !storage.resizable() && made_by != nullptr && (made_by == stock || made_by == &allocation::ours());
}
// The same, for a block that is in the arena: it keeps its address from now on.
void keep_for_array(Space& space, Block& block, const StorageImpl& storage) {
  if (block.fixed || !has_array(storage)) return;
  block.fixed = true;
  ++space.counters[kFixed];
}

bool movable(const Block& block) {
  return block.here() && block.storage && !block.dying && block.pins == 0 && block.works == 0 && blind == 0 &&
         !block.stays && !is_held_elsewhere(block) && (Device::kFixedLeave || !block.fixed);
}
// What takes up memory of the arena and need not.
bool may_leave(const Block& block) { return block.state == State::kArrived || movable(block); }

void destroy(Block* block);

void count_use(Space& space, int64_t bytes) {
  space.charged += bytes;
  space.counters[kBytesInUse] = space.charged;
  space.counters[kPeakBytes] = std::max(space.counters[kPeakBytes], space.charged);
}

// Storages come to be or end, wherever their bytes are.
void count_total(Space& space, int64_t bytes) {
  space.total += bytes;
  space.step_total = std::max(space.step_total, space.total);
  space.counters[kPeakTotalBytes] = std::max(space.counters[kPeakTotalBytes], space.total);
}

// Gives about so much of the memory that nothing uses to the kernel, of which there must be some.
void discard_idle(Space& space, int64_t bytes) {
  const auto [offset, discarded] = space.extents.forget_some(space.core(), bytes);
  space.device.discard(space.base + offset, discarded);
  space.torn |= offset < space.core();
}
// As much of it as the budget wants.
void let_go_of_idle(Space& space) {
  while (space.extents.idle() > 0 && space.charged + space.extents.idle() > space.room())
    discard_idle(space, std::min(space.charged + space.extents.idle() - space.room(), space.extents.idle()));
}

// The kernel fills the core with huge pages, so more of it may have memory than blocks have used. That is within the
// budget until something lies behind the core: from then on, what is free there counts, and is given back if need be.
void count_core(Space& space, const Block& block) {
  if (Device::kAddresses == 1 || space.core_counted || block.offset + block.bytes <= space.budget) return;
  space.core_counted = true;
  space.extents.fill(space.budget);
}

void unplace(Space& space, Block& block);

// Addresses and memory in the arena, of which there must be enough; at `wanted` if that is free.
void place(Space& space, Block& block, State as, int64_t wanted = -1) {
  TORCH_CHECK(space.base != nullptr, "outofcore: a tensor was used before the loop had its arena");
  count_use(space, block.bytes);
  if (block.offset < 0) {
    if (wanted >= 0 && space.extents.take_at(wanted, block.bytes))
      block.offset = wanted;
    else
      block.offset = space.extents.take(block.bytes);
    if (block.offset < 0) {
      count_use(space, -block.bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "outofcore: the arena has no addresses left for ", block.bytes,
                       " bytes; give a larger budget");
    }
    space.at[block.offset] = &block;
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
  let_go_of_idle(space);
  block.become(as);
  space.observer.add(follow::Event::kTaken, block.id, block.bytes);
}

void no_longer_early(Space& space, Block& block) {
  if (block.early) space.early -= block.bytes;
  block.early = false;
}

// Takes a block out of the arena.
void unplace(Space& space, Block& block) {
  no_longer_early(space, block);
  const bool charged = block.charged();
  if (charged) {
    count_use(space, -block.bytes);
    space.observer.add(follow::Event::kGiven, block.id, block.bytes);
  }
  if (block.offset >= 0) {
    // A window lies over one that keeps its address. Where it cannot be taken away, nobody gets these addresses again: to
    // write to them would be to write to a slot.
    const bool usable = !block.fixed || block.here() || space.device.uncover(space.address(block), block.bytes);
    space.device.give(block.order, space.address(block), block.bytes);
    space.at.erase(block.offset);
    space.ranking.remove(&block);
    if (usable) space.extents.give(block.offset, block.bytes, charged);
    if (!space.open && space.extents.idle() > 0) discard_idle(space, space.extents.idle());
  }
  block.offset = -1;
  if (charged) block.become(State::kAway);
}

// Destroys a block that was freed while it was held, if it is not any more.
bool destroy_if_free(Block* block) {
  if (!block->dead || block->held()) return false;
  destroy(block);
  return true;
}

void observe_copy(Space& space, const Block& block, follow::Event event) {
  const auto how = block.waited ? follow::Copied::kWaited : follow::Copied::kBeside;
  space.observer.add(event, block.copy_start, block.copy_end, block.id, block.bytes, static_cast<int32_t>(how));
}

// Takes note of a copy beside ops that has ended; `waited`: for it. What has come is shown by the next op that uses it.
void end_copy(Space& space, Block* block, bool waited) {
  block->waited = waited;
  if (block->state == State::kComing) {
    --space.copying_in;
    if (block->copied && !block->dead && block->version == block->copied_version &&
        (block->summed == Summed::kNothing || accept(space, *block, block->summed, block->copied_sums)))
      block->become(State::kArrived);
    else
      unplace(space, *block);
  } else {
    --space.copying_out;
    block->writing = false;
    if (block->copied && block->version == block->copied_version) {
      block->dirty = block->touched = false;
      block->sums = block->copied_sums;
      ++space.counters[kWrites];
      space.counters[kWrittenBytes] += block->bytes;
      observe_copy(space, *block, follow::Event::kOut);
    }
  }
  destroy_if_free(block);
}
// Takes note of the copies beside ops that have ended; `waited`: for one of them. In the order of streams that is done when
// they are used, since the stream waits for them then.
void end_copies(Space& space, bool waited = false) {
  if (Device::kStreams && !waited) return;
  while (!space.finished.empty()) {
    Block* block = space.finished.back();
    space.finished.pop_back();
    end_copy(space, block, waited);
  }
}
// Shows what has arrived in place of its window; false: it is used elsewhere, or code that nobody sees may have written to
// the window since it was read, and it is away again. The storage must not go meanwhile.
bool show_arrived(Space& space, Block& block) {
  if (block.stays || used_elsewhere(block) || !is_owned(block) || has_array(*block.storage->_unsafe_get_target()) ||
      space.device.was_touched(space.homes, block.slot)) {
    unplace(space, block);
    return false;
  }
  block.dirty = false;
  block.become(State::kHere);
  space.device.use(block.order);
  show(block, *block.storage->_unsafe_get_target(), space.address(block));
  ++space.counters[kFetches];
  ++space.counters[kFetchesAhead];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kAwayBytes] -= block.bytes;
  observe_copy(space, block, follow::Event::kIn);
  return true;
}

// Works of collectives that are under way, with what they may read or write.
struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<Block*> blocks;
  std::vector<const StorageImpl*> plain;  // in PyTorch's own memory
};
std::vector<Pending>& pending = *new std::vector<Pending>;

// Takes note of the works that are complete.
void end_works() {
  for (size_t i = 0; i < pending.size();) {
    if (!pending[i].work->isCompleted()) {
      ++i;
      continue;
    }
    Pending done = std::move(pending[i]);
    pending.erase(pending.begin() + static_cast<int64_t>(i));
    let_go.works.push_back(std::move(done.work));
    for (Block* block : done.blocks) {
      --block->works;
      block->dirty = true;
      ++block->version;
      destroy_if_free(block);
    }
    for (const StorageImpl* storage : done.plain) no_longer_used(storage);
  }
}

// Waits for a work to complete that holds something in the arena; false: there is none, or it goes on for long. It may need
// the loop's next collective.
bool outlive_works(Space& space) {
  constexpr auto kLong = std::chrono::seconds(30);
  const auto since = std::chrono::steady_clock::now();
  const auto held = [&] {
    int64_t works = 0;
    for (const auto& [offset, block] : space.at) works += block->works;
    return works;
  };
  for (const int64_t before = held(); before > 0; wait_for_answer(std::chrono::milliseconds(1))) {
    end_works();
    if (held() < before) return true;
    if (std::chrono::steady_clock::now() - since > kLong) return false;
  }
  return false;
}

// What has happened meanwhile takes effect.
void catch_up(Space& space) {
  end_copies(space);
  if (!pending.empty()) end_works();
}

// Until a copy has ended, or something else has happened: what was looked at before has to be looked at again.
void wait_for_copy(Space& space) {
  if (space.finished.empty()) wait_for_answer();
  end_copies(space, true);
}
void wait_for_copies(Space& space) {
  end_copies(space);
  while (space.copying_in + space.copying_out > 0) wait_for_copy(space);
}

// Copies a block beside ops, in a thread for that.
void copy_beside(outofcore::CopyThread::Job& job) {
  auto* block = static_cast<Block*>(&job);
  std::unique_lock lock(mutex);
  Space& space = *block->space;
  char* at = space.address(*block);
  const bool in = block->state == State::kComing;
  const Summed how = in ? summed(space, *block) : space.verified ? Summed::kAll : Summed::kNothing;
  lock.unlock();
  bool copied = true;
  Sums sums;
  const auto start = std::chrono::steady_clock::now();
  try {
    // The sum comes first: what is written meanwhile, and not seen, differs from it later.
    if (!in && how != Summed::kNothing) sums = sums_of(space, *block, at, outofcore::kLine);  // of what a home has
    in ? space.device.load(space.homes, block->slot, block->order, at)
       : space.device.save(space.homes, block->slot, block->order, at);
    if (in && how != Summed::kNothing) sums = sums_of(space, *block, at, how);
  } catch (...) {  // whoever needs the copy makes it again, and tells
    copied = false;
  }
  const auto nanos = nanos_since(start);
  lock.lock();
  (in ? space.in_nanos : space.out_nanos) += nanos;
  (in ? space.in_bytes : space.out_bytes) += block->bytes;
  block->copied = copied;
  block->summed = how;
  block->copied_sums = sums;
  block->copy_end = follow::nanos_now();
  block->copy_start = block->copy_end - nanos;
  space.finished.push_back(block);
  answer();
}
// Never destroyed.
outofcore::CopyThread& fetching = *new outofcore::CopyThread(copy_beside);
outofcore::CopyThread& writing_out = *new outofcore::CopyThread(copy_beside);
pid_t copiers = -1;  // the process that has them

// Throws c10::Error if the system gives no thread. A later call starts the missing threads.
void start_copiers() {
  if (Device::kStreams) return;
  if (copiers != getpid()) {
    copiers = getpid();
    new (&fetching) outofcore::CopyThread(copy_beside);
    new (&writing_out) outofcore::CopyThread(copy_beside);
  }
  for (outofcore::CopyThread* thread : {&fetching, &writing_out}) {
    const int status = thread->start();
    TORCH_CHECK(status == 0, "outofcore: the system gives no thread for copies beside ops (", std::strerror(status),
                "); raise the limit on processes (ulimit -u), or end other programs");
  }
}

void give_slot(Space& space, Block& block) {
  if (!block.slot) return;
  if (block.slot.original) {
    space.counters[kFileBytes] -= block.bytes;
    block.slot.original->next = std::exchange(let_go.originals, nullptr);
    let_go.originals = std::move(block.slot.original);
  } else {
    space.device.give_slot(block.order, space.homes.window(block.slot), block.slot.bytes);
    space.homes.give(block.slot);
  }
  block.slot = {};
}
// A slot to write to that no other process sees.
void take_slot(Space& space, Block& block) {
  if (block.slot && !block.slot.original && !space.homes.frozen(block.slot)) return;
  const follow::Slot fresh = space.homes.take(block.bytes);
  give_slot(space, block);
  block.slot = fresh;
  space.device.take_slot(block.order, space.homes.window(fresh), fresh.bytes);
}

std::string name_of(const void* schema) {
  const auto& known = *static_cast<const c10::FunctionSchema*>(schema);
  return known.overload_name().empty() ? known.name() : known.name() + "." + known.overload_name();
}
std::string name_of_running() { return running == nullptr ? "what runs between ops" : name_of(&running->schema()); }

// Something leaves that the plan has here.
void observe_surprise(Space& space, const Block& block, follow::Cause cause) {
  if (space.anchor == nullptr || block.released || !space.follower.on_course()) return;
  const int32_t at = space.follower.position();
  const auto& ops = space.follower.known()->usual.ops;
  space.observer.depart(at, cause, name_of(ops[at].op), name_of_running(), block.bytes);
}

// Lets a block leave that is movable and not being copied; its storage must not go meanwhile. Throws if its home fails, and
// then it stays.
void evict(Space& space, Block& block, StorageImpl& storage, follow::Cause cause = follow::Cause::kMemory) {
  keep_for_array(space, block, storage);
  const Stopwatch watch{space.counters[kTransferMicroseconds]};
  const char* from = space.address(block);
  bool write = block.dirty || !block.slot || space.unseen ||
               (block.fixed && (!space.verified || block.slot.original));  // a window is mapped from a home's file
  if (!write && space.verified && sum_of(from, block.bytes, step_of_sums(space, block)) != block.sums.all) {
    ++space.counters[kUnseenWrites];
    if (block.origin) block.origin->changed();
    write = true;
  }
  if (write) {
    take_slot(space, block);
    if (space.verified) block.sums = sums_of(space, block, from, outofcore::kLine);
    block.dirty = true;
    const int64_t start = follow::nanos_now();
    space.device.save(space.homes, block.slot, block.order, from);
    space.observer.add(follow::Event::kOut, start, follow::nanos_now(), block.id, block.bytes,
                       static_cast<int32_t>(follow::Copied::kOnDemand));
    ++space.counters[kWrites];
    space.counters[kWrittenBytes] += block.bytes;
    block.dirty = block.touched = false;
  }
  if (block.fixed) space.device.cover(space.homes, block.slot, space.address(block), false);  // if it cannot, it stays
  ++space.counters[kEvictions];
  if (space.anchor != nullptr && !block.released) ++space.counters[kUnplannedEvictions];
  space.observer.add(follow::Event::kLeft, block.id, block.bytes, block.released);
  observe_surprise(space, block, cause);
  block.released = false;
  space.counters[kAwayBytes] += block.bytes;
  if (block.fixed) {
    count_use(space, -block.bytes);
    space.observer.add(follow::Event::kGiven, block.id, block.bytes);
    block.become(State::kAway);
    return;
  }
  space.device.use_slot(block.order);
  show(block, storage, space.homes.window(block.slot));
  unplace(space, block);
}

// Strong references to the storages of some blocks, which are needed to show them other memory. The lock is let go of
// meanwhile. Null: the storage is gone, or has other memory, and the block may be gone as well.
class Owners {
 public:
  explicit Owners(std::vector<Block*> blocks) : blocks_(std::move(blocks)), storages_(blocks_.size()) {
    std::vector<std::optional<follow::WeakStorage>> weak;  // those of the blocks may be dropped meanwhile
    for (Block* block : blocks_) weak.push_back(block->storage);
    for (Block* block : blocks_) ++block->pins;
    {
      const follow::Unlocked unlocked;
      for (size_t i = 0; i < weak.size(); ++i)
        if (weak[i]) storages_[i] = weak[i]->lock();
    }
    let_go.storages.reserve(let_go.storages.size() + blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
      Block*& block = blocks_[i];
      --block->pins;
      if (destroy_if_free(block)) {
        block = nullptr;
      } else if (!storages_[i] || !owns(*storages_[i], *block)) {
        block->dying = true;
        block = nullptr;
      }
    }
  }
  ~Owners() {
    for (StoragePointer& storage : storages_) follow::drop(std::move(storage));
  }
  Owners(const Owners&) = delete;

  // Calls `action` with each block that a storage owns, and that storage. One without an owner stays: it is destroyed soon,
  // or found again when it is next touched.
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
