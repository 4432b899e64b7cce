// Runs the ops of a user's training loop within a byte budget, on the CPU or (OUTOFCORE_CUDA) on a GPU. A fallback on a
// dispatch key below autograd sees every op, fetches its operands and pins them. Storages of 64 KiB and more live in an
// arena; evicting and fetching swap the data pointer of a StorageImpl, never under a running op. Evicted storages have
// a valid pointer, too (homes.h), so unobserved code reads the right bytes. See docs/internals/eager-loop.md,
// thread_roles.h for threads, and ahead.h for overlapped copies.

#include "steps.h"

#include <pthread.h>

namespace {

void before_fork() {
  mutex.lock();
  Guard::depth = 1;
  // The child has no copy threads. A space may be freed during the wait.
  const auto copies = [] {
    return std::any_of(spaces.begin(), spaces.end(), [](Space* space) {
      end_copies(*space, true);
      return space->copying_in + space->copying_out > 0;
    });
  };
  while (copies()) wait_for_change();
  for (Space* space : spaces) space->homes.before_fork();
}
void after_fork_in_parent() {
  for (Space* space : spaces) space->homes.after_fork_in_parent();
  Guard::depth = 0;
  mutex.unlock();
}
void after_fork_in_child() {
  // Moving bytes would change the parent's homes.
  current = nullptr;
  space_to_end = nullptr;
  open_spaces = 0;
  observer_is_enabled = has_other_threads = false;
  if (depth == 0) ops_in_space = 0;
  other_ops_running = unpinned_ops = follow::waiting = 0;
  new (&pending) std::vector<Pending>;
  for (Space* space : spaces) {
    space->open = false;
    space->is_inherited = true;
    space->homes.after_fork_in_child();
    for (const Block* block : space->owned_blocks)
      if (block->fixed && !block->is_resident() && block->offset >= 0)
        space->device.cover(space->homes, block->slot, space->address(*block), true);
  }
  // The lock belongs to a thread of the parent, so the child cannot unlock it.
  Guard::depth = 0;
  mutex.reset_in_child();
  new (&change_signal) std::condition_variable_any;
}

// Frees pages that only show bytes at home.
void drop_window_pages(const Block& block) {
  if (block.state == BlockState::kEvicted && !block.fixed && block.slot)
    block.space->device.begin_watch(block.space->homes, block.slot);
}

bool release_storage(Block& block, StorageImpl& storage) {
  Space& space = *block.space;
  wait_for_copies(space);
  if (!owns(storage, block)) return false;  // another thread changed it meanwhile
  if (block.fixed || block.is_immovable || block.is_held() || is_used_elsewhere(block) || has_array(storage))
    return false;
  if (return_to_file(block, storage)) return true;
  if (!block.is_resident()) {
    record_touch(space, block);
    if (is_verified(space, block)) check_bytes(space, block, space.homes.window(block.slot));
  }
  at::DataPtr memory = stock.load()->allocate(storage.nbytes());
  block.is_resident() ? space.device.use(block.order) : space.device.use_slot(block.order);
  space.device.copy(static_cast<char*>(memory.get()),
                    static_cast<const char*>(storage._mutable_data_ptr_no_checks().get()),
                    static_cast<int64_t>(storage.nbytes()));
  block.is_resident() ? space.device.mark_used(block.order) : space.device.mark_slot_used(block.order);
  drop_window_pages(block);
  const at::DataPtr window_pointer = storage.set_data_ptr(std::move(memory));
  return true;
}

bool is_installed = false;  // for the current loop
// `shared`: also with open compiled steps.
void install(bool shared) {
  if (is_installed) return;
  using allocation::Installed;
  const bool is_shared = allocation::is_installed();
  TORCH_CHECK(
      (shared || !is_shared) && ::device::is_pytorchs(is_shared ? stock.load() : ::device::installed_allocator()),
      "another allocator is installed under PyTorch, such as that of a compiled step; close that first");
  const Installed outcome = allocation::install();
  TORCH_CHECK(outcome != Installed::kOutranked, "PyTorch's allocator was installed with a higher priority");
  TORCH_CHECK(outcome == Installed::kDone, "the allocator under PyTorch cannot be wrapped");
  is_installed = true;
}
void uninstall() {
  if (std::exchange(is_installed, false)) allocation::uninstall();
}

void close(Space& space) {
  space.observer.close();
  wait_for_copies(space);
  space.open = false;
  forget_idle(space);
  open_spaces -= std::exchange(space.observes_threads, false);
  update_observer();
  if (current == nullptr) uninstall();
  if (space.block_count == 0) forget_space(&space);
}

void fetch_back(Space& space) {
  space.observer.close();
  wait_for_copies(space);
  std::vector<Block*> blocks(space.owned_blocks.begin(), space.owned_blocks.end());
  std::sort(blocks.begin(), blocks.end(), [](const Block* a, const Block* b) { return a->last_use > b->last_use; });
  Owners owners(std::move(blocks));
  try {
    owners.each([](Block& block, StorageImpl& storage) {
      if (block.slot.original) return_to_file(block, storage);
    });
  } catch (...) {  // as below
  }
  try {
    owners.each([&](Block& block, StorageImpl&) {
      if (!block.is_resident() && space.bytes_in_use + block.bytes <= space.room()) fetch(space, block);
    });
  } catch (...) {  // a failing disk: the rest is read through its windows as far as possible
  }
}

// Ends the space that is marked for it, unless another thread does.
void end_requested_space() {
  while (Space* space = space_to_end.exchange(nullptr)) {
    space->recipes->close();
    const Guard guard;
    current = nullptr;  // new ops no longer use it
    if (ops_in_space == 0) {
      fetch_back(*space);
      return close(*space);
    }
    current = space;  // an op has begun meanwhile and may be the last
    space_to_end = space;
    if (ops_in_space != 0) return;
  }
}

// The error of the thread's last failed call, for Python. Static, because memory may be exhausted.
thread_local char failure[4096] = "";
void fail(const char* message) { std::strncpy(failure, message, sizeof failure - 1); }
// Python raises MemoryError with it.
constexpr const char* kNoMemory = "outofcore: the system gave no memory; end other programs, or use smaller batches";
std::vector<c10::RegistrationHandleRAII>& registrations = *new std::vector<c10::RegistrationHandleRAII>;

// Measures copy speeds for the first plan. On the CPU real copies give them, unless needs are measured.
void measure_copies(Space& space) {
  constexpr int64_t kMost = int64_t{16} << 20, kEnough = int64_t{32} << 20;
  follow::Slot slot;
  try {
    slot = space.homes.take(std::min(space.budget, kMost));
  } catch (const c10::OutOfMemoryError&) {  // evictions report a lack of room
    return;
  }
  char* window = space.homes.window(slot);
  Device::Order order;
  const auto nanos_of = [&](bool in) {
    if (Device::kStreams) return space.device.nanos_of_copy(window, space.base, slot.bytes, in);
    const auto start = std::chrono::steady_clock::now();
    in ? space.device.load(space.homes, slot, order, space.base) : space.device.save(space.homes, slot, order, space.base);
    return nanos_since(start);
  };
  while (space.out_bytes < kEnough) {
    space.out_nanos += nanos_of(false);
    space.in_nanos += nanos_of(true);
    space.in_bytes += slot.bytes;
    space.out_bytes += slot.bytes;
  }
  space.device.discard(space.base, slot.bytes);
  space.device.start_over();
  space.homes.give(slot);
}

enum Adopted : int64_t {
  kNo,
  kYes,
  kHasArray,  // not adopted, because a NumPy array may show it
};

// Runs an action and returns its result (0 if void), or -1 on failure: see `follow_failure`.
template <class Action>
int64_t run_guarded(Action&& action) noexcept {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Action>>)
      return action(), 0;
    else
      return action();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    fail(kNoMemory);
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return -1;
}
template <class Action>
auto create_guarded(Action&& action) noexcept {
  std::invoke_result_t<Action> created = nullptr;
  run_guarded([&] { created = action(); });
  return created;
}
template <class Action>
int64_t run_locked(Action&& action) noexcept {
  return run_guarded([&] {
    const Guard guard;
    return action();
  });
}

int64_t copy_out(const std::vector<int64_t>& values, int64_t* numbers, int64_t capacity) {
  const auto count = static_cast<int64_t>(values.size());
  if (count <= capacity) std::copy(values.begin(), values.end(), numbers);
  return count;
}

const borders::Border kBorders[] = {
    ENUM("LoopCounter", Counter, kOps, kExpectedOps, kFetches, kFetchedBytes, kFetchesAhead, kEvictions, kWrites,
                                 kWrittenBytes, kUnseenWrites, kAdoptions, kAdoptedBytes, kBytesInUse, kPeakBytes,
                                 kBytesEvicted, kFixed, kOutsideBytes, kPeakOutsideBytes, kUntrackedUses, kAtHomeBytes,
                                 kTransferMicroseconds, kPeakHomeBytes, kPlannedOps, kUnplannedEvictions, kDepartures,
                                 kRecipes, kReruns, kDroppedBytes, kRerunMicroseconds, kFileBytes, kSmallBytes,
                                 kPeakSmallBytes, kPeakTotalBytes, kExceedances, kArenaBytes),
    ENUM("Adopted", Adopted, kNo, kYes, kHasArray),
    ENUM("Excess", Excess, kRefused, kAllowed, kMeasured),
    ENUM("Recompute", follow::Recompute, kOff, kChosen, kAll, kNoting),
    ENUM("Event", follow::Event, kHeld, kTaken, kGiven, kOp, kTouch, kIn, kOut, kLeft, kFreed),
    ENUM("Copied", follow::Copied, kOverlapped, kWaited, kOnDemand),
    ENUM("Cause", follow::Cause, kOp, kEnd, kMemory, kPlace),
};

}  // namespace

// Called through ctypes: exceptions must not leave these functions. A result of -1 means failure: see `follow_failure`.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* follow_failure() noexcept { return failure; }
// Returns the op of the refusal with this error text, valid until the thread's next call. Null: not a refusal.
EXPORT const char* follow_refusal(const char* text, follow::Numbers* numbers) noexcept {
  thread_local std::string op;
  try {
    const auto refusal = follow::refusals().find(text);
    if (!refusal) return nullptr;
    *numbers = refusal->numbers;
    op = refusal->op;
    return op.c_str();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Returns name and source of the op with the largest need, valid until the thread's next call. Null: none recorded.
EXPORT const char* follow_need(Space* space, follow::Numbers* numbers) noexcept {
  thread_local std::string lines;
  try {
    const Guard guard;
    if (space->need.op.empty()) return nullptr;
    *numbers = space->need.numbers;
    lines = space->need.op + "\n" + space->need.text;
    return lines.c_str();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Takes the dispatch key, which all devices share. Returns 0, or 1 if PyTorch uses it.
EXPORT int64_t follow_load(void (*python_kernel)(const char*, const char*, int64_t*)) noexcept {
  return run_guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (!registrations.empty()) return 0;
    if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) return 1;
    is_python = python_kernel;
    constexpr const char* kWhy = "outofcore tracks the ops of a loop";
    registrations.push_back(
        dispatcher.registerFallback(kKey, c10::KernelFunction::makeFromBoxedFunction<&follow::fallback>(), kWhy));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (starts_with(name.name, "c10d::"))
        registrations.push_back(dispatcher.registerImpl(
            name, kCollectives, c10::KernelFunction::makeFromBoxedFunction<&run_collective>(), {}, nullptr, kWhy));
      // ATen views skip the fallback, which would only box and unbox their operands.
      const auto op = starts_with(name.name, "aten::") ? dispatcher.findSchema(name) : std::nullopt;
      if (op && is_view(op->schema()))
        registrations.push_back(
            dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFallthrough(), {}, nullptr, kWhy));
      else if (op)
        follow::register_unboxed(*op, kWhy, registrations);
    }
    observer_handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_op).scopes({at::RecordScope::FUNCTION}));
    at::disableCallback(*observer_handle);
    update_observer();
    static const int once = pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
    static_cast<void>(once);
    return 0;
  });
}
// Releases the key for another device's library. No loop may be open.
EXPORT void follow_unload() noexcept {
  run_guarded([&] {
    registrations.clear();
    at::removeCallback(*std::exchange(observer_handle, std::nullopt));
    observer_is_enabled = false;
  });
}

// Creates a space without homes and memory. It owns the descriptors of its homes. `verified`: 0: no checks; 1: a part
// of weights mapped from files; 2: everything. `timed`: whether steps will be planned. `excess`: see Excess.
EXPORT Space* follow_new(int64_t budget, int device, int verified, int timed, int excess) noexcept {
  return create_guarded([&] {
    auto space = std::make_unique<Space>(budget / kPage * kPage, device, static_cast<Excess>(excess));
    space->verifies = Device::kReadable && verified != 0;
    space->samples = verified == 1;
    space->timing = space->timed = Device::kStreams && timed != 0;
    space->recipes = std::make_shared<follow::Recipes>(our_pager, smallest);
    return space.release();
  });
}
EXPORT int64_t follow_add_home(Space* space, int file, int direct, int memory, int64_t capacity) noexcept {
  return run_guarded([&] { space->homes.add(file, direct, memory != 0, capacity); });
}

// Ends a step. Returns 1 if such steps need a plan: see `follow_proposal`.
EXPORT int64_t follow_end_of_step(Space* space) noexcept {
  return run_locked([&]() -> int64_t {
    catch_up(*space);
    const bool wants_plan = end_of_step(*space);
    space->observer.end_step();
    observe_held(*space);
    return wants_plan;
  });
}
// Writes the step to plan as numbers, in the format of records.py, if they fit. Returns their count.
EXPORT int64_t follow_proposal(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return run_locked([&]() -> int64_t {
    const int64_t count = copy_out(proposal_numbers(*space), numbers, capacity);
    if (count <= capacity) accept_proposal(*space);
    return count;
  });
}
EXPORT const char* follow_names(Space* space) noexcept { return space->operator_names.c_str(); }
// Writes the events of the last step as numbers, in the format of observed.py, if they fit. Returns their count.
EXPORT int64_t follow_observed(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return run_locked([&]() -> int64_t {
    return copy_out(space->observer.to_numbers(space->observed_names, &name_of), numbers, capacity);
  });
}
EXPORT const char* follow_observed_names(Space* space) noexcept { return space->observed_names.c_str(); }
// Returns the storage's number in those events, or -2.
EXPORT int64_t follow_number(Space* space, StorageImpl* storage) noexcept {
  const Guard guard;
  const Block* block = find_block(*storage);
  return block == nullptr || block->space != space ? -2 : block->id;
}
// Sets the plan of a size bucket: three lists of pairs (op, storage), each after its length, of storages to release,
// fetch and write; a list of triples (op, storage, offset) ordered by op: the storage's offset from that op on; and a
// list of pairs (op, offset) of scratch memory.
EXPORT int64_t follow_schedule(Space* space, int64_t bucket, const int64_t* numbers) noexcept {
  return run_locked([&]() -> int64_t { return set_schedule(*space, bucket, numbers); });
}

// Tracks the calling thread and threads that its ops start. `shared`: also with open compiled steps that do not run.
EXPORT int64_t follow_open(Space* space, int shared) noexcept {
  return run_locked([&] {
    TORCH_CHECK(current == nullptr, "an eager loop is already open");
    start_copiers();
    install(shared != 0);
    space->device.enter();
    living_spaces += spaces.insert(space).second;
    space->last_op_end = std::chrono::steady_clock::now();
    space->observer.open();
    if (!space->observes_threads) space->small_before = small_bytes;
    current = space;
    ++loops_opened;
    open_spaces += !std::exchange(space->observes_threads, true);
    update_observer();
  });
}
// Reserves the arena of an open space. Returns 1, or 0 if the device lacks the memory. Of the budget, `arena` bytes
// belong to the arena, `spare` of them stay free, and `segments` bytes are for small requests in PyTorch's allocator.
EXPORT int64_t follow_reserve(Space* space, int64_t arena, int64_t spare, int64_t segments) noexcept {
  return run_locked([&]() -> int64_t {
    if (Device::kStreams) {
      space->budget = arena / kPage * kPage;
      space->spare = spare / kPage * kPage;
      space->segments = segments;
      space->segments_before = space->device.bytes_of_segments();
      space->extents = follow::Extents(space->addresses());
    }
    try {
      space->base = space->device.reserve(space->addresses(), space->budget);
    } catch (const c10::OutOfMemoryError&) {
      return 0;
    }
    const auto base = reinterpret_cast<uintptr_t>(space->base);
    lowest = std::min(lowest.load(), base);
    highest = std::max(highest.load(), base + space->addresses());
    if (space->timed || space->excess == Excess::kMeasured) measure_copies(*space);
    return 1;
  });
}
EXPORT int64_t follow_pause(Space* space) noexcept {
  return run_locked([&]() -> int64_t {
    if (current != space) return 0;
    wait_for_copies(*space);
    for (Block* block : space->owned_blocks) {
      block->touched |= !block->is_resident();
      block->dirty |= block->is_resident() && !space->verifies;
    }
    current = nullptr;
    uninstall();
    return 0;
  });
}
// Evicts everything and returns the arena's memory to the kernel.
EXPORT int64_t follow_vacate(Space* space) noexcept {
  return run_locked([&] {
    evict_everything(*space);
    forget_idle(*space);
  });
}
EXPORT int follow_current() noexcept { return current.load() != nullptr; }
EXPORT int follow_is_opener() noexcept { return is_opener(); }
// Whether the calling thread's ops belong to a loop that is not paused.
EXPORT int follow_tracked() noexcept { return is_tracked(); }
EXPORT void follow_thread(int on) noexcept {
  if (on != 0) {
    loop_number = loops_opened;
    outside_loop = false;
  }
  set_tracked(on != 0);
}

EXPORT void follow_leave_thread() noexcept { leave_thread(); }

// Ends the loop and fetches evicted storages as far as they fit. May be called on any thread at any time: if an op is
// using the space, the space ends with that op. The caller gives up ownership in either case.
EXPORT int64_t follow_close(Space* space) noexcept {
  return run_guarded([&] {
    if (current == space) {
      space_to_end = space;
      if (ops_in_space == 0) end_requested_space();
    } else {
      const Guard guard;
      close(*space);
    }
  });
}

// Moves a storage to a home and returns an `Adopted`. `file`: the number of the file it was mapped from, or -1.
EXPORT int64_t follow_adopt(StorageImpl* storage, int64_t file, int64_t offset) noexcept {
  at::DataPtr old_memory;  // freed without the lock
  return run_locked([&]() -> int64_t {
    Space* space = current;
    if (space == nullptr) return kNo;
    Block* block = nullptr;
    const bool has_run = space->small_peak > 0;  // otherwise allocated in an earlier loop
    const bool counted = has_run && storage->_mutable_data_ptr_no_checks().get_deleter() == &release_small;
    if (!Device::kStreams && !is_large(storage->nbytes()) && !counted && space->counted_small.insert(storage).second)
      space->small_managed += static_cast<int64_t>(storage->nbytes());
    if (file >= 0 && is_large(storage->nbytes()) && find_block(*storage) == nullptr)
      block = adopt_in_file(*space, *storage, space->files.at(file), offset);
    if (block == nullptr) block = block_of(*space, *storage, {.is_managed = true}, old_memory);
    if (block == nullptr) return is_large(storage->nbytes()) && has_array(*storage) ? kHasArray : kNo;
    if (block->managed_index < 0) {
      block->managed_index = static_cast<int64_t>(space->managed.size());
      space->managed.push_back(block);
    }
    return kYes;
  });
}
// Returns the storage's current address without fixing it.
EXPORT int64_t follow_memory(StorageImpl* storage) noexcept {
  const Guard guard;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get()));
}
// Registers a foreign file and returns its number. The space owns the descriptor.
EXPORT int64_t follow_add_file(Space* space, int file) noexcept {
  return run_guarded([&]() -> int64_t {
    follow::OpenFile open(file, file);
    const Guard guard;
    space->files.push_back(std::make_shared<follow::ForeignFile>(std::move(open)));
    return static_cast<int64_t>(space->files.size()) - 1;
  });
}
// Returns the index of the first large storage outside this space, or `count`.
EXPORT int64_t follow_strangers(const Space* space, StorageImpl* const* storages, int64_t count) noexcept {
  const Guard guard;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_large(storages[i]->nbytes())) continue;
    const Block* block = find_block(*storages[i]);
    if (block == nullptr || block->space != space) return i;
  }
  return count;
}
// Whether PyTorch has allocated the storage's memory and no other code shares it.
EXPORT int follow_plain(const StorageImpl* storage) noexcept {
  const Guard guard;
  return can_adopt(*storage, false);
}
// Moves a storage to PyTorch's own memory. Returns 1, or 0 if it is not tracked or has a fixed address.
EXPORT int64_t follow_release(StorageImpl* storage) noexcept {
  return run_locked([&]() -> int64_t {
    Block* block = find_or_enroll(*storage);
    return block != nullptr && release_storage(*block, *storage);
  });
}
EXPORT int64_t follow_release_all(Space* space) noexcept {
  return run_locked([&] {
    wait_for_copies(*space);
    Owners(std::vector<Block*>(space->owned_blocks.begin(), space->owned_blocks.end()))
        .each([](Block& block, StorageImpl& storage) { release_storage(block, storage); });
  });
}
// Frees pages of an evicted storage that exist only because its window was read.
EXPORT void follow_forget(StorageImpl* storage) noexcept {
  const Guard guard;
  if (const Block* block = find_block(*storage)) drop_window_pages(*block);
}
// Fixes a storage's address, which the caller takes. Returns 1, or 0 if no loop has it or ever will.
EXPORT int64_t follow_fix(StorageImpl* storage) noexcept {
  return run_guarded([&]() -> int64_t {
    const std::shared_ptr<follow::Recipes> recipes = current_recipes();
    if (recipes && recipes->any()) recipes->before_write(*storage);
    const Guard guard;
    // Between calls of a tracked step no space is current, but its storages may need fixing.
    Space* space = current;
    const bool loops = space == nullptr || is_opener();
    Block* block = space != nullptr && loops ? block_of(*space, *storage) : nullptr;
    if (block == nullptr) block = find_or_enroll(*storage);
    if (block == nullptr) {
      // On a GPU, PyTorch checks for its own deleter to record streams.
      if (!Device::kStreams && is_large(static_cast<int64_t>(storage->nbytes())) && can_adopt(*storage, false))
        keep_outside(*storage);
      return 0;
    }
    if (!block->space->open) block->is_immovable = true;  // where its loop has left it
    if (block->fixed || !block->space->open) return 1;
    space = block->space;
    if (loops) {
      ++block->pins;  // other threads may run meanwhile
      try {
        fetch(*space, *block);
      } catch (...) {
        --block->pins;
        destroy_if_free(block);
        throw;
      }
      --block->pins;
      if (destroy_if_free(block)) return 1;
    } else {
      // This thread may use it at any time, so it is no longer moved: at home, where it takes no arena memory.
      const auto own_holds = std::count_if(holds.begin(), holds.end(), [&](const Hold& hold) {
        return hold.of_block != nullptr && hold.of_block == block->holds;
      });
      const auto is_read = [&] {
        return block->works > 0 || unpinned_ops > own_unpinned_ops || (block->holds && *block->holds > own_holds);
      };
      const auto is_copied = [&] { return block->writing || block->pins > 0; };
      // Time limit for two threads that hold a block and both fix its address.
      constexpr auto kLong = std::chrono::seconds(10);
      const auto since = std::chrono::steady_clock::now();
      const auto has_time_left = [&] { return std::chrono::steady_clock::now() - since < kLong; };
      const auto is_moving = [&] {
        if (block->state == BlockState::kFetching) return true;
        return Device::kFixedLeave && block->is_resident() && (is_copied() || (is_read() && has_time_left()));
      };
      while (is_moving()) {
        if (space->ended_copies.empty()) wait_for_change(std::chrono::milliseconds(10));
        end_copies(*space, true);
        end_works();
        if (find_block(*storage) != block) return 1;
      }
      if (block->state == BlockState::kFetched) unplace(*space, *block);
      if (Device::kFixedLeave && block->is_resident() && block->storage && !block->owner_dying && !is_read())
        evict(*space, *block, *storage);
      block->is_immovable = true;
    }
    block->fixed = true;
    ++space->counters[kFixed];
    return 1;
  });
}

// The thread reads a storage without an op until `follow_unhold`. Returns 0 if no other thread may move it.
EXPORT int64_t follow_hold(StorageImpl* storage) noexcept {
  return run_guarded([&]() -> int64_t {
    if (!loops_own_tensors() || is_only_mover()) return 0;
    const Guard guard;
    Block* block = find_or_enroll(*storage);
    if (block == nullptr) {
      holds.push_back({nullptr, storage});
      ++used_by_others[storage];
      return 1;
    }
    if (!block->holds) block->holds = std::make_shared<int>(0);
    holds.push_back({block->holds});
    ++*block->holds;
    return 1;
  });
}
EXPORT void follow_unhold() noexcept {
  const Guard guard;
  const Hold last = std::move(holds.back());
  holds.pop_back();
  last.plain != nullptr ? release_use(last.plain) : void(--*last.of_block);
  notify_change();
}

// Wraps a Python function that is written in C: calls a hook with the arguments first.
template <int kNumber>
struct HookedFunction {
  inline static void* (*function)(void*, void*, void*) = nullptr;
  inline static void (*hook)(void* arguments, int64_t* answer) = nullptr;
  static void* call(void* self, void* arguments, void* named) {
    answer_of(hook, arguments);
    return function(self, arguments, named);
  }
};
EXPORT void* follow_told(int number, void* function, void (*hook)(void*, int64_t*)) noexcept {
  const auto install_hook = [&](auto& hooked) {
    hooked.function = reinterpret_cast<void* (*)(void*, void*, void*)>(function);
    hooked.hook = hook;
    return reinterpret_cast<void*>(&hooked.call);
  };
  static HookedFunction<0> first;
  static HookedFunction<1> second;
  return number == 0 ? install_hook(first) : install_hook(second);
}
EXPORT int64_t follow_pieces() noexcept {
  const Guard guard;
  int64_t pieces = 0;
  for (const Space* space : spaces) pieces += space->block_count;
  return pieces;
}

// 0: not tracked; 1: in the arena; 2: evicted; 3: in the arena, without an owner.
EXPORT int64_t follow_where(StorageImpl* storage) noexcept {
  const Guard guard;
  if (const Block* block = find_block(*storage)) return block->is_resident() ? 1 : 2;
  return block_at(storage->_mutable_data_ptr_no_checks().get()) != nullptr ? 3 : 0;
}
EXPORT int64_t follow_evict(StorageImpl* storage) noexcept {
  return run_locked([&]() -> int64_t {
    Space* space = current;
    if (space == nullptr) return 0;
    wait_for_copies(*space);
    Block* block = block_of(*space, *storage);
    if (block == nullptr || !can_leave_arena(*block)) return 0;
    evict_all(*space, {block});
    return find_block(*storage) == nullptr || !find_block(*storage)->is_resident();
  });
}
EXPORT int64_t follow_evict_all(Space* space) noexcept {
  return run_locked([&] { evict_everything(*space); });
}
// Evicts everything after each op, and overwrites free arena memory.
EXPORT void follow_stress(Space* space, int on) noexcept { space->stress = on != 0; }
// Sets the smallest size of tracked storages: 64 KiB except in tests.
EXPORT void follow_smallest(int64_t bytes) noexcept { smallest = bytes; }
EXPORT void follow_ahead(Space* space, int on) noexcept { space->copies_ahead = on != 0; }

EXPORT int64_t follow_base(const Space* space) noexcept { return reinterpret_cast<int64_t>(space->base); }
// For tests: sizes of the loop's data structures, as in `Sizes` of test_follow_growth.py.
EXPORT void follow_sizes(Space* space, int64_t* sizes) noexcept {
  const Guard guard;
  space->homes.free_frozen();
  const auto count = [](const auto& container) { return static_cast<int64_t>(container.size()); };
  const int64_t all[] = {space->block_count,         count(space->owned_blocks),         count(space->by_offset),
                         count(space->by_twin),   count(space->ended_copies),      count(outside),
                         space->history.size(), space->history.storages(),   space->history.uses(),
                         space->homes.used(),   space->homes.frozen_slots(), space->homes.forks()};
  std::copy(std::begin(all), std::end(all), sizes);
}
// Sets the function that gets ops with recomputable saved tensors, as a new tensor that it must free.
EXPORT void follow_offer_to(void (*offer)(void*, int64_t*)) noexcept { offer_saved = offer; }
// Sets the function that returns an op's source line, as a string that is never freed.
EXPORT void follow_ask_source(void (*ask)(int64_t*)) noexcept { ask_source = ask; }
// The modes: 0: off; 1: the storages of `follow_recompute_set`; 2: all that can be recomputed; 3: record candidates.
EXPORT int64_t follow_recompute(Space* space, int mode) noexcept {
  return run_guarded([&] {
    TORCH_CHECK(mode >= 0 && mode <= 3, "unknown mode ", mode);
    const Guard guard;
    space->recipes->mode = static_cast<follow::Recompute>(mode);
    if (space->recipes->mode == follow::Recompute::kNoting) {
      space->recipes->forget_notes();
      space->timing = space->timed;
    }
  });
}
// Selects storages to recompute by their ids in the history. Their counterparts in later steps are selected, too.
EXPORT int64_t follow_recompute_set(Space* space, const int64_t* ids, int64_t count) noexcept {
  return run_locked([&] { space->recipes->choose(ids, count); });
}
// Writes per recorded storage: id, bytes, nanoseconds of its ops (-1: cannot be rerun), whether autograd saved it, the
// number of input storages, and these. Returns the count of numbers.
EXPORT int64_t follow_notes(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return run_locked([&]() -> int64_t {
    std::vector<int64_t> values, nanos;  // `nanos`: by op of the recorded step
    if (space->timed && !space->moments_before.empty()) nanos = space->device.nanos_between(space->moments_before);
    for (const auto& [id, note] : space->recipes->notes()) {
      int64_t nanoseconds = note.nanoseconds;
      if (Device::kStreams && nanoseconds >= 0) {
        nanoseconds = 0;
        for (const size_t place : note.places)
          if (nanoseconds >= 0) nanoseconds = place < nanos.size() ? nanoseconds + nanos[place] : -1;
      }
      values.insert(values.end(), {id, note.bytes, nanoseconds, note.saved, static_cast<int64_t>(note.inputs.size())});
      values.insert(values.end(), note.inputs.begin(), note.inputs.end());
    }
    return copy_out(values, numbers, capacity);
  });
}
// Returns a packed tensor for autograd to keep, or null to keep the tensor itself.
EXPORT follow::Packed* follow_pack(c10::TensorImpl* tensor) noexcept {
  return create_guarded([&]() -> follow::Packed* {
    const at::Tensor saved(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
    const auto recipes = current_recipes();
    return recipes ? recipes->pack(saved) : nullptr;
  });
}
// Returns the tensor, which the caller frees. Null: see `follow_failure`.
EXPORT at::Tensor* follow_unpack(const follow::Packed* packed) noexcept {
  return create_guarded([&] { return new at::Tensor(packed->recipes->unpack(*packed)); });
}
EXPORT void follow_drop(follow::Packed* packed) noexcept { delete packed; }

EXPORT int64_t follow_counters(const Space* space, int64_t* counters, int64_t capacity) noexcept {
  const Guard guard;
  for (int64_t i = 0; i < std::min<int64_t>(kCounters, capacity); ++i) counters[i] = space->counters[i];
  const auto set = [&](Counter counter, int64_t value) {
    if (counter < capacity) counters[counter] = value;
  };
  set(kArenaBytes, space->bytes_in_use + space->extents.idle());
  set(kPeakHomeBytes, space->homes.most_used());
  set(kSmallBytes, space->small_managed + std::max<int64_t>(small_bytes - space->small_before, 0));
  set(kPeakSmallBytes, space->small_managed + space->small_peak);
  set(kRecipes, space->recipes->recipe_count);
  set(kReruns, space->recipes->reruns);
  set(kDroppedBytes, space->recipes->dropped_bytes);
  set(kRerunMicroseconds, space->recipes->nanoseconds / 1000);
  return kCounters;
}
