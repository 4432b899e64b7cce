// Runs the ops of somebody else's loop within a byte budget, on the CPU or (OUTOFCORE_CUDA) on a GPU.
//
// A fallback on a dispatch key below autograd sees every op. Storages of 64 KiB and more live in an arena; those that
// come from outside are adopted when they are first touched. Before an op, what it touches is brought in and pinned.
// Memory is taken from a storage and given back under living tensors by swapping the data pointer of its StorageImpl:
// at the beginning of an op, or inside one while it allocates, never under what a running op touches. What is away has a
// valid pointer too (see homes.h), so that code that nobody sees reads the right bytes.
//
// On the CPU the arena has more addresses than the budget has bytes, so no request fails for want of a hole that is large
// enough: it then gets fresh addresses, and free pages elsewhere go back to the kernel. On a GPU, holes are joined.
//
// Copies are made beside the ops: some bring in what is needed next, others write what is to leave, so that it can leave
// at once. What that is, says a plan of the step (``Follower``, record.h), and where there is none, what the loop did
// before (``History``). On the CPU two threads make them. They touch bytes alone: a written block may leave once an op has
// noted the end of the copy (``end_copies``), and the next op of the loop that uses a fetched block shows it
// (``show_arrived``). On a GPU they are work on streams, which takes effect when it is issued: what comes after it waits for
// it there.
//
// What the device decides is in device_cpu.h and device_cuda.h, of which one is compiled in.
//
// Threads. One thread, which has opened the loop, and threads that autograd starts for it, ask for memory of the arena and
// move blocks. The ops of all other threads are seen too, from their first op on (``on_op``): each pins the blocks that it
// uses, so that nothing is moved under it, and that is all. Such an op never waits for a copy or for room, and its requests
// are served by the stock allocator. A block that is away and pinned by another thread is used through its window by
// everybody. Work of a collective holds its tensors until it is complete, whoever waits for it.
//
// All state is behind one lock (lock.h).

#include "steps.h"

#include <pthread.h>

namespace {

void before_fork() {
  mutex.lock();
  Guard::held = 1;
  // The child has no threads that would end the copies. A space may go while they are waited for.
  const auto copies = [] {
    return std::any_of(spaces.begin(), spaces.end(), [](Space* space) {
      end_copies(*space, true);
      return space->copying_in + space->copying_out > 0;
    });
  };
  while (copies()) wait_for_answer();
  for (Space* space : spaces) space->homes.before_fork();
}
void after_fork_in_parent() {
  for (Space* space : spaces) space->homes.after_fork_in_parent();
  Guard::held = 0;
  mutex.unlock();
}
void after_fork_in_child() {
  // The child pages nothing: to do so would change what its parent finds at home.
  current = nullptr;
  to_end = nullptr;
  open_spaces = 0;
  if (depth == 0) entered = 0;
  // What other threads were at is not here, and goes on nowhere.
  others_running = blind = follow::waiting = 0;
  new (&pending) std::vector<Pending>;
  for (Space* space : spaces) {
    space->open = false;
    space->of_parent = true;
    space->homes.after_fork_in_child();
    for (const Block* block : space->known)
      if (block->fixed && !block->here() && block->offset >= 0)
        space->device.cover(space->homes, block->slot, space->address(*block), true);
  }
  // A recursive lock belongs to a thread of the parent, which no thread of the child can unlock; and those that waited
  // are not here.
  Guard::held = 0;
  mutex.renew();
  new (&answered) std::condition_variable_any;
}

// Gives memory back that only shows what is at home.
void forget_window(const Block& block) {
  if (block.state == State::kAway && !block.fixed && block.slot)
    block.space->device.begin_watch(block.space->homes, block.slot);
}

// Moves the bytes of a storage to memory of PyTorch's own allocator, and forgets its block.
bool release_from(Block& block, StorageImpl& storage) {
  Space& space = *block.space;
  wait_for_copies(space);
  if (!owns(storage, block)) return false;  // something was done to it meanwhile
  if (block.fixed || block.stays || block.held() || used_elsewhere(block) || has_array(storage)) return false;
  if (return_to_file(block, storage)) return true;
  if (!block.here()) {
    note_touched(space, block);
    if (is_compared(space, block)) check_bytes(space, block, space.homes.window(block.slot));
  }
  at::DataPtr own = stock.load()->allocate(storage.nbytes());
  block.here() ? space.device.use(block.order) : space.device.use_slot(block.order);
  space.device.copy(static_cast<char*>(own.get()), static_cast<const char*>(storage._mutable_data_ptr_no_checks().get()),
                    static_cast<int64_t>(storage.nbytes()));
  block.here() ? space.device.used(block.order) : space.device.used_slot(block.order);
  forget_window(block);
  const at::DataPtr old = storage.set_data_ptr(std::move(own));
  return true;
}

bool installed = false;  // for the loop that is followed
// `beside`: also beside compiled steps.
void install(bool beside) {
  if (installed) return;
  using allocation::Installed;
  const bool is_shared = allocation::is_installed();
  TORCH_CHECK((beside || !is_shared) && ::device::is_pytorchs(is_shared ? stock.load() : ::device::installed()),
              "another allocator is installed under PyTorch, such as that of a compiled step; close that first");
  const Installed outcome = allocation::install();
  TORCH_CHECK(outcome != Installed::kOutranked, "PyTorch's allocator was installed with a higher priority");
  TORCH_CHECK(outcome == Installed::kDone, "the allocator under PyTorch cannot be wrapped");
  installed = true;
}
void uninstall() {
  if (std::exchange(installed, false)) allocation::uninstall();
}

// Ends what nothing follows any more.
void close(Space& space) {
  space.observer.close();
  wait_for_copies(space);
  space.open = false;
  forget_idle(space);
  if (std::exchange(space.seen, false) && --open_spaces == 0) at::disableCallback(*finding);
  if (current == nullptr) uninstall();
  if (space.pieces == 0) forget_space(&space);
}

// Brings back of a space what the budget holds.
void come_back(Space& space) {
  space.observer.close();
  wait_for_copies(space);
  std::vector<Block*> blocks(space.known.begin(), space.known.end());
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
      if (!block.here() && space.charged + block.bytes <= space.room()) fetch(space, block);
    });
  } catch (...) {  // a disk that fails: the rest is read through its windows, as far as it can be
  }
}

// Ends the space that is to end, unless another thread does.
void end_asked() {
  while (Space* space = to_end.exchange(nullptr)) {
    space->recipes->close();
    const Guard guard;
    current = nullptr;  // an op that begins from here on does not use it
    if (entered == 0) {
      come_back(*space);
      return close(*space);
    }
    current = space;  // an op has begun meanwhile, and may be the last one
    to_end = space;
    if (entered != 0) return;
  }
}

// Of the last call of the thread that failed, for Python; there may be no memory when something is to be said.
thread_local char failure[4096] = "";
void fail(const char* why) { std::strncpy(failure, why, sizeof failure - 1); }
// Python makes a MemoryError of it.
constexpr const char* kNoMemory = "outofcore: the system gave no memory; end other programs, or use smaller batches";
std::vector<c10::RegistrationHandleRAII>& registrations = *new std::vector<c10::RegistrationHandleRAII>;

// How fast copies are, so that the first plan does not guess: on the CPU those tell that are made, unless needs are measured.
void measure_copies(Space& space) {
  constexpr int64_t kMost = int64_t{16} << 20, kEnough = int64_t{32} << 20;
  follow::Slot slot;
  try {
    slot = space.homes.take(std::min(space.budget, kMost));
  } catch (const c10::OutOfMemoryError&) {  // what does not fit is told when it has to leave
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

// What came of a storage.
enum Adopted : int64_t {
  kNo,
  kYes,
  kHasArray,  // it stays, since a NumPy array may show it
};

// An action that returns nothing gives 0. -1: it has failed, see ``follow_failure``.
template <class Action>
int64_t guarded(Action&& action) noexcept {
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
// For an action that makes something; null: it has failed.
template <class Action>
auto guarded_pointer(Action&& action) noexcept {
  std::invoke_result_t<Action> made = nullptr;
  guarded([&] { made = action(); });
  return made;
}
// Under the lock.
template <class Action>
int64_t locked(Action&& action) noexcept {
  return guarded([&] {
    const Guard guard;
    return action();
  });
}

// Writes numbers, unless there are more than there is room for, and returns how many there are.
int64_t written(const std::vector<int64_t>& told, int64_t* numbers, int64_t capacity) {
  const auto count = static_cast<int64_t>(told.size());
  if (count <= capacity) std::copy(told.begin(), told.end(), numbers);
  return count;
}

const borders::Border kBorders[] = {
    ENUM("LoopCounter", Counter, kOps, kExpectedOps, kFetches, kFetchedBytes, kFetchesAhead, kEvictions, kWrites,
                                 kWrittenBytes, kUnseenWrites, kAdoptions, kAdoptedBytes, kBytesInUse, kPeakBytes,
                                 kAwayBytes, kFixed, kOutsideBytes, kPeakOutsideBytes, kForeign, kAtHomeBytes,
                                 kTransferMicroseconds, kPeakHomeBytes, kPlannedOps, kUnplannedEvictions, kDepartures,
                                 kRecipes, kReruns, kUnkeptBytes, kRerunMicroseconds, kFileBytes, kSmallBytes,
                                 kPeakSmallBytes, kPeakTotalBytes, kExceedances, kArenaBytes),
    ENUM("Adopted", Adopted, kNo, kYes, kHasArray),
    ENUM("Excess", Excess, kRefused, kAllowed, kMeasured),
    ENUM("Recompute", follow::Recompute, kOff, kChosen, kEverything, kNoting),
    ENUM("Event", follow::Event, kHeld, kTaken, kGiven, kOp, kTouch, kIn, kOut, kLeft, kFreed),
    ENUM("Copied", follow::Copied, kBeside, kWaited, kOnDemand),
    ENUM("Cause", follow::Cause, kOp, kEnd, kMemory, kPlace),
};

}  // namespace

// Called through ctypes, which knows nothing of exceptions: none leaves a function here. -1: see ``follow_failure``.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* follow_failure() noexcept { return failure; }
// What the budget refused, by the text of the error: the op, valid until this thread asks again. Null: it is no refusal.
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

// The op that has needed the most at once, by lines: its name, and where it comes from as ``follow_ask_source`` says it. Valid
// until this thread asks again. Null: no need was noted.
EXPORT const char* follow_need(Space* space, follow::Numbers* numbers) noexcept {
  thread_local std::string told;
  try {
    const Guard guard;
    if (space->need.op.empty()) return nullptr;
    *numbers = space->need.numbers;
    told = space->need.op + "\n" + space->need.text;
    return told.c_str();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Takes the dispatch key, which is one for all devices. 0: done; 1: PyTorch uses it for something else.
EXPORT int64_t follow_load(void (*python_kernel)(const char*, const char*, int64_t*)) noexcept {
  return guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (!registrations.empty()) return 0;
    if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) return 1;
    is_python = python_kernel;
    constexpr const char* kWhy = "outofcore follows the ops of a loop";
    registrations.push_back(
        dispatcher.registerFallback(kKey, c10::KernelFunction::makeFromBoxedFunction<&follow::fallback>(), kWhy));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (starts(name.name, "c10d::"))
        registrations.push_back(dispatcher.registerImpl(
            name, kCollectives, c10::KernelFunction::makeFromBoxedFunction<&run_collective>(), {}, nullptr, kWhy));
      // PyTorch's own views pass the fallback by, which would do nothing but take their operands into a list and out again.
      const auto op = starts(name.name, "aten::") ? dispatcher.findSchema(name) : std::nullopt;
      if (op && is_view(op->schema()))
        registrations.push_back(
            dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFallthrough(), {}, nullptr, kWhy));
      else if (op)
        follow::register_unboxed(*op, kWhy, registrations);
    }
    finding = at::addGlobalCallback(at::RecordFunctionCallback(&on_op).scopes({at::RecordScope::FUNCTION}));
    at::disableCallback(*finding);  // until a loop is open
    static const int once = pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
    static_cast<void>(once);
    return 0;
  });
}
// Leaves it to the library of another device. No loop is followed.
EXPORT void follow_unload() noexcept {
  guarded([&] {
    registrations.clear();
    at::removeCallback(*finding);
  });
}

// A space without homes and without memory yet. The descriptors of homes are its own from then on. `verified`: 0: nothing
// is compared; 1: of weights in their files a part; 2: everything. `timed`: steps are to be planned. `excess`: see Excess.
EXPORT Space* follow_new(int64_t budget, int device, int verified, int timed, int excess) noexcept {
  return guarded_pointer([&] {
    auto space = std::make_unique<Space>(budget / kPage * kPage, device, static_cast<Excess>(excess));
    space->verified = Device::kReadable && verified != 0;
    space->sampled = verified == 1;
    space->timing = space->timed = Device::kStreams && timed != 0;
    space->recipes = std::make_shared<follow::Recipes>(our_pager, smallest);
    return space.release();
  });
}
EXPORT int64_t follow_add_home(Space* space, int file, int direct, int memory, int64_t capacity) noexcept {
  return guarded([&] { space->homes.add(file, direct, memory != 0, capacity); });
}

// A step of the loop has ended. 1: a plan is wanted for such steps, see ``follow_proposal``.
EXPORT int64_t follow_end_of_step(Space* space) noexcept {
  return locked([&]() -> int64_t {
    catch_up(*space);
    const bool wanted = end_of_step(*space);
    space->observer.end_step();
    observe_held(*space);
    return wanted;
  });
}
// The step that a plan is wanted for, as numbers: how it is read says records.py. Returns how many there are; with
// fewer in ``capacity`` nothing is written.
EXPORT int64_t follow_proposal(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return locked([&]() -> int64_t {
    const int64_t count = written(tell_proposal(*space), numbers, capacity);
    if (count <= capacity) accept_proposal(*space);
    return count;
  });
}
// The names of the operators of that step, in the order of their numbers, by lines.
EXPORT const char* follow_names(Space* space) noexcept { return space->names.c_str(); }
// What happened in the last complete step, as numbers: how it is read says observed.py. Returns how many there are; with
// fewer in ``capacity`` nothing is written.
EXPORT int64_t follow_observed(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return locked([&]() -> int64_t {
    return written(space->observer.tell(space->observed_names, &name_of), numbers, capacity);
  });
}
// The names of operators there, in the order of their numbers, by lines.
EXPORT const char* follow_observed_names(Space* space) noexcept { return space->observed_names.c_str(); }
// By what number a storage is known there; -2: it is not.
EXPORT int64_t follow_number(Space* space, StorageImpl* storage) noexcept {
  const Guard guard;
  const Block* block = known(*storage);
  return block == nullptr || block->space != space ? -2 : block->id;
}
// The plan for an anchor: three lists of pairs of op and storage, each after its length: what leaves, what is fetched,
// what is written; one of triples: from which op on a storage lies at which offset, in the order of ops; and one of
// pairs of op and the offset of its scratch memory.
EXPORT int64_t follow_schedule(Space* space, int64_t anchor, const int64_t* numbers) noexcept {
  return locked([&]() -> int64_t { return set_schedule(*space, anchor, numbers); });
}

// Begins to follow the calling thread, and whatever threads its ops start. `beside`: also where compiled steps are open,
// none of which runs before ``follow_pause``.
EXPORT int64_t follow_open(Space* space, int beside) noexcept {
  return locked([&] {
    TORCH_CHECK(current == nullptr, "a loop is followed already");
    start_copiers();
    install(beside != 0);
    space->device.enter();
    living_spaces += spaces.insert(space).second;
    space->since = std::chrono::steady_clock::now();
    space->observer.open();
    if (!space->seen) space->small_before = small_bytes;
    current = space;
    ++openings;
    if (!std::exchange(space->seen, true) && ++open_spaces == 1) at::reenableCallback(*finding);
  });
}
// Gives an open space its arena. 1: done; 0: the device does not have the memory. Of the budget, so many bytes are the
// arena's, of which some are left free, and so many are for segments that small requests of the loop lie in.
EXPORT int64_t follow_reserve(Space* space, int64_t arena, int64_t spare, int64_t segments) noexcept {
  return locked([&]() -> int64_t {
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
// Follows nothing until it is opened again. Storages stay where they are.
EXPORT int64_t follow_pause(Space* space) noexcept {
  return locked([&]() -> int64_t {
    if (current != space) return 0;
    wait_for_copies(*space);
    // What is done to them meanwhile is not seen.
    for (Block* block : space->known) {
      block->touched |= !block->here();
      block->dirty |= block->here() && !space->verified;
    }
    current = nullptr;
    uninstall();
    return 0;
  });
}
// Brings everything home, and gives the arena's memory to the kernel.
EXPORT int64_t follow_vacate(Space* space) noexcept {
  return locked([&] {
    evict_everything(*space);
    forget_idle(*space);
  });
}
EXPORT int follow_current() noexcept { return current.load() != nullptr; }
EXPORT int follow_is_opener() noexcept { return is_opener(); }
// Whether the ops of the calling thread are those of a loop that is not paused.
EXPORT int follow_tracked() noexcept { return tracked(); }
// As ``set_followed``; a thread that is followed is the loop's.
EXPORT void follow_thread(int on) noexcept {
  if (on != 0) {
    opening = openings;
    outside_loop = false;
  }
  set_followed(on != 0);
}

EXPORT void follow_leave_thread() noexcept { leave_thread(); }

// Ends following. Storages stay where they are, of those that are away as many come back as the budget holds. In any
// thread, and at any time: while an op uses the space, it ends with that op, and is not the caller's any more either way.
EXPORT int64_t follow_close(Space* space) noexcept {
  return guarded([&] {
    if (current == space) {
      to_end = space;
      if (entered == 0) end_asked();
    } else {
      const Guard guard;
      close(*space);
    }
  });
}

// Moves a storage to a home, whosever memory it is, and gives an ``Adopted``. With the number of a file (not -1): it is
// mapped from there.
EXPORT int64_t follow_adopt(StorageImpl* storage, int64_t file, int64_t offset) noexcept {
  at::DataPtr left;  // freed without the lock
  return locked([&]() -> int64_t {
    Space* space = current;
    if (space == nullptr) return kNo;
    Block* block = nullptr;
    const bool has_run = space->small_peak > 0;  // else what ops have allocated belongs to an earlier loop
    const bool counted = has_run && storage->_mutable_data_ptr_no_checks().get_deleter() == &release_small;
    if (!Device::kStreams && !is_large(storage->nbytes()) && !counted && space->small_seen.insert(storage).second)
      space->small_given += static_cast<int64_t>(storage->nbytes());
    if (file >= 0 && is_large(storage->nbytes()) && known(*storage) == nullptr)
      block = adopt_in_file(*space, *storage, space->files.at(file), offset);
    if (block == nullptr) block = block_of(*space, *storage, {.given = true}, left);
    if (block == nullptr) return is_large(storage->nbytes()) && has_array(*storage) ? kHasArray : kNo;
    if (block->given < 0) {
      block->given = static_cast<int64_t>(space->given.size());
      space->given.push_back(block);
    }
    return kYes;
  });
}
// The address of a storage's memory, which nobody has taken by this.
EXPORT int64_t follow_memory(StorageImpl* storage) noexcept {
  const Guard guard;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get()));
}
// The number of a file of somebody else's. The descriptor is the space's own from then on.
EXPORT int64_t follow_add_file(Space* space, int file) noexcept {
  return guarded([&]() -> int64_t {
    follow::OpenFile open(file, file);
    const Guard guard;
    space->files.push_back(std::make_shared<follow::ForeignFile>(std::move(open)));
    return static_cast<int64_t>(space->files.size()) - 1;
  });
}
// The first of some storages that is large and not in this space; their number, if all are.
EXPORT int64_t follow_strangers(const Space* space, StorageImpl* const* storages, int64_t count) noexcept {
  const Guard guard;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_large(storages[i]->nbytes())) continue;
    const Block* block = known(*storages[i]);
    if (block == nullptr || block->space != space) return i;
  }
  return count;
}
// Whether a storage lies in memory that PyTorch has allocated for it, and nobody else looks at.
EXPORT int follow_plain(const StorageImpl* storage) noexcept {
  const Guard guard;
  return adoptable(*storage, false);
}
// Gives a storage memory of its own, of PyTorch's allocator. 1: done; 0: it is not followed, or keeps its address.
EXPORT int64_t follow_release(StorageImpl* storage) noexcept {
  return locked([&]() -> int64_t {
    Block* block = known_or_enrolled(*storage);
    return block != nullptr && release_from(*block, *storage);
  });
}
// The same for all that a space has.
EXPORT int64_t follow_release_all(Space* space) noexcept {
  return locked([&] {
    wait_for_copies(*space);
    Owners(std::vector<Block*>(space->known.begin(), space->known.end())).each([](Block& block, StorageImpl& storage) {
      release_from(block, storage);
    });
  });
}
// Gives back the memory that a storage takes up only because somebody looked at it where it is away.
EXPORT void follow_forget(StorageImpl* storage) noexcept {
  const Guard guard;
  if (const Block* block = known(*storage)) forget_window(*block);
}
// Somebody takes the address of a storage: it keeps it from now on. 1: done; 0: it is no loop's, and never will be.
EXPORT int64_t follow_fix(StorageImpl* storage) noexcept {
  return guarded([&]() -> int64_t {
    const std::shared_ptr<follow::Recipes> recipes = current_recipes();
    if (recipes && recipes->any()) recipes->before_write(*storage);
    const Guard guard;
    // Between the calls of a step that is followed nothing is current, and what it has may have to stay all the same.
    Space* space = current;
    const bool loops = space == nullptr || is_opener();
    Block* block = space != nullptr && loops ? block_of(*space, *storage) : nullptr;
    if (block == nullptr) block = known_or_enrolled(*storage);
    if (block == nullptr) {
      // On a GPU, PyTorch looks for its own deleter to note which streams use memory.
      if (!Device::kStreams && is_large(static_cast<int64_t>(storage->nbytes())) && adoptable(*storage, false))
        keep_outside(*storage);
      return 0;
    }
    if (!block->space->open) block->stays = true;  // where its loop has left it
    if (block->fixed || !block->space->open) return 1;
    space = block->space;
    if (loops) {
      ++block->pins;  // while others do what they like
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
      // It may be used in this thread at any time, so it is moved no more: at home, where it takes no memory of the arena.
      const auto own = std::count_if(holds.begin(), holds.end(), [&](const Hold& hold) {
        return hold.of_block != nullptr && hold.of_block == block->holds;
      });
      const auto looked_at = [&] {
        return block->works > 0 || blind > own_blind || (block->holds && *block->holds > own);
      };
      const auto copied = [&] { return block->writing || block->pins > 0; };
      // Two threads that hold a block, and both ask for its address, do not wait for each other for good.
      constexpr auto kLong = std::chrono::seconds(10);
      const auto since = std::chrono::steady_clock::now();
      const auto lately = [&] { return std::chrono::steady_clock::now() - since < kLong; };
      const auto on_its_way = [&] {
        if (block->state == State::kComing) return true;
        return Device::kFixedLeave && block->here() && (copied() || (looked_at() && lately()));
      };
      while (on_its_way()) {
        if (space->finished.empty()) wait_for_answer(std::chrono::milliseconds(10));
        end_copies(*space, true);
        end_works();
        if (known(*storage) != block) return 1;
      }
      if (block->state == State::kArrived) unplace(*space, *block);
      if (Device::kFixedLeave && block->here() && block->storage && !block->dying && !looked_at())
        evict(*space, *block, *storage);
      block->stays = true;
    }
    block->fixed = true;
    ++space->counters[kFixed];
    return 1;
  });
}

// Code of the calling thread reads a storage's memory without an op until ``follow_unhold``. 1: it stays where it is until
// then; 0: nobody moves it meanwhile, such as what the loop's own thread reads.
EXPORT int64_t follow_hold(StorageImpl* storage) noexcept {
  return guarded([&]() -> int64_t {
    if (living_spaces.load(std::memory_order_relaxed) == 0 || is_opener()) return 0;
    const Guard guard;
    Block* block = known_or_enrolled(*storage);
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
// Ends the last hold of the thread.
EXPORT void follow_unhold() noexcept {
  const Guard guard;
  const Hold last = std::move(holds.back());
  holds.pop_back();
  last.plain != nullptr ? no_longer_used(last.plain) : void(--*last.of_block);
  answer();
}

// Stands in for a function of Python's that is written in C: tells of each call what it is called with, then calls it.
template <int kNumber>
struct Told {
  inline static void* (*function)(void*, void*, void*) = nullptr;
  inline static void (*tell)(void* arguments, int64_t* answer) = nullptr;
  static void* call(void* self, void* arguments, void* named) {
    answer_of(tell, arguments);
    return function(self, arguments, named);
  }
};
// The address of one of two such functions.
EXPORT void* follow_told(int number, void* function, void (*tell)(void*, int64_t*)) noexcept {
  const auto made = [&](auto& told) {
    told.function = reinterpret_cast<void* (*)(void*, void*, void*)>(function);
    told.tell = tell;
    return reinterpret_cast<void*>(&told.call);
  };
  static Told<0> first;
  static Told<1> second;
  return number == 0 ? made(first) : made(second);
}
// How many pieces of memory all loops have, also those that have ended.
EXPORT int64_t follow_pieces() noexcept {
  const Guard guard;
  int64_t pieces = 0;
  for (const Space* space : spaces) pieces += space->pieces;
  return pieces;
}

// Where a storage is. 0: not followed; 1: in the arena; 2: away; 3: in the arena, of nobody yet.
EXPORT int64_t follow_where(StorageImpl* storage) noexcept {
  const Guard guard;
  if (const Block* block = known(*storage)) return block->here() ? 1 : 2;
  return block_at(storage->_mutable_data_ptr_no_checks().get()) != nullptr ? 3 : 0;
}
EXPORT int64_t follow_evict(StorageImpl* storage) noexcept {
  return locked([&]() -> int64_t {
    Space* space = current;
    if (space == nullptr) return 0;
    wait_for_copies(*space);
    Block* block = block_of(*space, *storage);
    if (block == nullptr || !may_leave(*block)) return 0;
    evict_all(*space, {block});
    return known(*storage) == nullptr || !known(*storage)->here();
  });
}
EXPORT int64_t follow_evict_all(Space* space) noexcept {
  return locked([&] { evict_everything(*space); });
}
// After each op everything leaves, and what is left in the arena is overwritten.
EXPORT void follow_stress(Space* space, int on) noexcept { space->stress = on != 0; }
// Of how many bytes storages are moved; 64 KiB unless a test wants to see smaller ones move.
EXPORT void follow_smallest(int64_t bytes) noexcept { smallest = bytes; }
// Whether to copy beside ops; it is done unless switched off.
EXPORT void follow_ahead(Space* space, int on) noexcept { space->ahead = on != 0; }

// For tests: where the arena begins.
EXPORT int64_t follow_base(const Space* space) noexcept { return reinterpret_cast<int64_t>(space->base); }
// For tests: how much is kept about a loop, each as in ``Sizes`` of test_follow_growth.py.
EXPORT void follow_sizes(Space* space, int64_t* sizes) noexcept {
  const Guard guard;
  space->homes.thaw();
  const auto count = [](const auto& kept) { return static_cast<int64_t>(kept.size()); };
  const int64_t all[] = {space->pieces,         count(space->known),         count(space->at),
                         count(space->parts),   count(space->finished),      count(outside),
                         space->history.size(), space->history.storages(),   space->history.uses(),
                         space->homes.used(),   space->homes.frozen_slots(), space->homes.forks()};
  std::copy(std::begin(all), std::end(all), sizes);
}
// Whose saved tensors can be made again is offered to this function, with a tensor that it has to free.
EXPORT void follow_offer_to(void (*offer)(void*, int64_t*)) noexcept { offer_saved = offer; }
// Where ops come from is asked of this function; what it returns is never freed.
EXPORT void follow_ask_source(void (*ask)(int64_t*)) noexcept { ask_source = ask; }
// What autograd need not keep: 0: nothing; 1: storages of ``follow_recompute_set``; 2: whatever can be made again; 3: it is
// only noted what could be.
EXPORT int64_t follow_recompute(Space* space, int mode) noexcept {
  return guarded([&] {
    TORCH_CHECK(mode >= 0 && mode <= 3, "there is no mode ", mode);
    const Guard guard;
    space->recipes->mode = static_cast<follow::Recompute>(mode);
    if (space->recipes->mode == follow::Recompute::kNoting) {
      space->recipes->forget_notes();
      space->timing = space->timed;
    }
  });
}
// Names the storages to make again, by their ids in the history; from the next step on it is those that play their part.
EXPORT int64_t follow_recompute_set(Space* space, const int64_t* ids, int64_t count) noexcept {
  return locked([&] { space->recipes->choose(ids, count); });
}
// What was noted, as numbers: of each storage its id, bytes, nanoseconds of the ops that made it (-1: they
// cannot be run again), whether autograd saved it, and the number of storages that they start from, then those. Returns
// how many numbers there are.
EXPORT int64_t follow_notes(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return locked([&]() -> int64_t {
    std::vector<int64_t> told, nanos;  // the second of the ops of the step that was noted
    if (space->timed && !space->moments_before.empty()) nanos = space->device.nanos_between(space->moments_before);
    for (const auto& [id, note] : space->recipes->notes()) {
      int64_t nanoseconds = note.nanoseconds;
      if (Device::kStreams && nanoseconds >= 0) {
        nanoseconds = 0;
        for (const size_t place : note.places)
          if (nanoseconds >= 0) nanoseconds = place < nanos.size() ? nanoseconds + nanos[place] : -1;
      }
      told.insert(told.end(), {id, note.bytes, nanoseconds, note.saved, static_cast<int64_t>(note.inputs.size())});
      told.insert(told.end(), note.inputs.begin(), note.inputs.end());
    }
    return written(told, numbers, capacity);
  });
}
// What autograd is to keep in place of a tensor that it has saved; null: the tensor.
EXPORT follow::Packed* follow_pack(c10::TensorImpl* tensor) noexcept {
  return guarded_pointer([&]() -> follow::Packed* {
    const at::Tensor held(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
    const auto recipes = current_recipes();
    return recipes ? recipes->pack(held) : nullptr;
  });
}
// The tensor, for the caller to free; null: see ``follow_failure``.
EXPORT at::Tensor* follow_unpack(const follow::Packed* packed) noexcept {
  return guarded_pointer([&] { return new at::Tensor(packed->recipes->unpack(*packed)); });
}
EXPORT void follow_drop(follow::Packed* packed) noexcept { delete packed; }

// Writes as many counters as there is room for; returns how many there are.
EXPORT int64_t follow_counters(const Space* space, int64_t* counters, int64_t capacity) noexcept {
  const Guard guard;
  for (int64_t i = 0; i < std::min<int64_t>(kCounters, capacity); ++i) counters[i] = space->counters[i];
  const auto tell = [&](Counter counter, int64_t value) {
    if (counter < capacity) counters[counter] = value;
  };
  tell(kArenaBytes, space->charged + space->extents.idle());
  tell(kPeakHomeBytes, space->homes.most_used());
  tell(kSmallBytes, space->small_given + std::max<int64_t>(small_bytes - space->small_before, 0));
  tell(kPeakSmallBytes, space->small_given + space->small_peak);
  tell(kRecipes, space->recipes->made);
  tell(kReruns, space->recipes->reruns);
  tell(kUnkeptBytes, space->recipes->unkept_bytes);
  tell(kRerunMicroseconds, space->recipes->nanoseconds / 1000);
  return kCounters;
}
