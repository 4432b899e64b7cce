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

#ifdef OUTOFCORE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif
#include "checksum.h"
#include "extents.h"
#include "history.h"
#include "homes.h"
#include "lock.h"
#include "observed.h"
#include "ranking.h"
#include "recipes.h"
#include "record.h"
#include "silent_writes.h"
#include "sources.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::StorageImpl;
using follow::Device;
using follow::Guard;
using follow::StoragePointer;
using follow::answer;
using follow::answered;
using follow::kPage;
using follow::let_go;
using follow::mutex;
using follow::sum_of;
using follow::wait_for_answer;

// Below autograd and Python modes, above what makes up factory functions; nothing in PyTorch registers a fallback there.
// Operators in Python do not know that fallback: DISPATCH_KEY in native.py has them pass the key on.
constexpr DispatchKey kKey = DispatchKey::Fake;
// Every thread passes it below that one, and collectives have no kernel there.
constexpr DispatchKey kCollectives = DispatchKey::BackendSelect;
// Smaller storages stay with PyTorch's allocator.
std::atomic<int64_t> smallest{64 * 1024};
bool is_large(int64_t bytes) { return bytes >= smallest.load(std::memory_order_relaxed); }

// In the order of the fields of ``LoopStats`` in stats.py.
enum Counter {
  kOps,            // that were looked at
  kExpected,       // of them, where the history expected them
  kFetches,
  kFetchedBytes,
  kFetchesAhead,   // of the fetches, those that were begun before an op needed them
  kEvictions,
  kWrites,         // of them, those whose bytes had changed
  kWrittenBytes,
  kUnseenWrites,   // storages that were taken to be unchanged and were not
  kAdoptions,
  kAdoptedBytes,
  kInUse,          // bytes of the arena now
  kPeak,           // and at the most
  kAway,           // bytes of storages that are away now
  kFixed,          // storages whose address somebody took
  kOutside,        // bytes of 64 KiB and more that threads outside of the loop hold
  kOutsidePeak,
  kForeign,        // operands that were used where they are: see ``block_of``
  kAtHome,         // bytes of operands that were used at their home, by ops of the loop
  kTransferMicros,
  kHomePeak,       // bytes of the homes at the most
  kPlanned,        // ops that came where a plan has them
  kUnplanned,      // evictions that no plan had foreseen, while one was followed
  kLost,           // times the loop left what a plan has
  kRecipes,        // storages that autograd does not keep, but can make again
  kReruns,         // times that one was made again
  kUnkeptBytes,    // of storages that went for that
  kRerunMicros,    // the loop spent so long on making them again
  kFileBytes,      // of storages whose home is the file that they were mapped from
  kSmall,          // bytes of smaller storages, of the models and of what the loop's ops have allocated
  kSmallPeak,
  kCounters
};

struct Space;

int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Where the bytes of a block are, and what its storage shows.
enum class State : uint8_t {
  kAway,     // at home; the storage shows the window there
  kComing,   // a copy to the arena is under way; the window
  kArrived,  // the copy has ended; the window, until an op of the loop uses the block
  kHere,     // in the arena, which the storage shows, or there is no storage yet
};
// What may follow. A block that is not away takes up memory of the arena; one that is here may be written to its home
// beside the ops (``writing``), and stays here until that has ended.
constexpr bool may_follow(State before, State after) {
  switch (before) {
    case State::kAway: return after == State::kComing || after == State::kHere;
    case State::kComing: return after == State::kArrived || after == State::kAway;
    case State::kArrived: return after == State::kHere || after == State::kAway;
    case State::kHere: return after == State::kAway;
  }
  return false;
}

struct Block {
  Space* space = nullptr;
  std::optional<follow::WeakStorage> storage;  // none: a piece that no storage is known to own yet
  int64_t id = 0;
  int64_t bytes = 0, used = 0;  // in whole pages; of the storage
  int64_t offset = -1;          // in the arena; -1: it has no addresses there
  State state = State::kAway;
  bool writing = false;         // it is copied to its home beside the ops
  follow::Slot slot;
  bool dirty = true;            // what is at home, if anything, is not what it holds
  bool fixed = false;           // somebody has its address: it keeps it, here and away
  bool stays = false;           // and may use it at any time, in another thread: it stays where it is, here or away
  std::shared_ptr<int> holds;   // of code in other threads that reads its memory without an op; null: there were none
  bool dead = false;            // freed while it was held
  bool dying = false;           // its storage is being destroyed in another thread, or has given its memory to another one
  int pins = 0;                 // of ops that use it
  int others = 0;               // of them, those of threads that are not the loop's
  int works = 0;                // of collectives that may read or write it
  int64_t last_use = 0;
  int64_t twin = -1;            // whose part it plays in the history
  int64_t role_in = -1;         // the record in which it plays a part that others play in other steps
  int32_t role = -1;
  // Which storage of a record it is that is there from step to step, as it was looked up; and of which record that is.
  mutable int32_t looked_up = -1;
  mutable int64_t looked_up_in = -1;
  bool released = false;        // the plan has given its room to others
  int64_t given = -1;           // its place among those that the user put under the budget
  uint64_t sum = 0;             // of what is at home, while it is not dirty
  int64_t version = 0;          // how often it was written
  bool early = false;           // it was brought in before an op needed it, and none has used it yet
  bool copied = false;          // the copy beside the ops came off
  bool waited = false;          // somebody waited for it
  int64_t copied_version = 0;
  uint64_t copied_sum = 0;
  std::shared_ptr<follow::Origin> origin;  // how its bytes came about, if recipes ask for that
  follow::Rank rank;
  [[no_unique_address]] Device::Order order;
  int64_t copy_start = 0, copy_end = 0;

  bool here() const { return state == State::kHere; }
  bool charged() const { return state != State::kAway; }  // its bytes count as in use
  bool copying() const { return state == State::kComing || writing; }
  // Somebody uses it, so that it has to outlive its storage.
  bool held() const { return pins > 0 || works > 0 || copying(); }
  void become(State next) {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(may_follow(state, next), "a block cannot go from ", int(state), " to ", int(next));
    state = next;
  }
};

// One loop's arena and homes. It stays until the last storage that lies in it is gone.
struct Space {
  Space(int64_t budget_bytes, int device_index)
      : limit(budget_bytes), budget(budget_bytes), device(device_index), extents(Device::kAddresses * budget_bytes) {}

  int64_t limit;                         // what the user gave, of which so much is the arena's:
  int64_t budget;
  int64_t spare = 0;                     // bytes of the arena that are left free, so that there are holes
  int64_t segments = 0;                  // bytes that PyTorch's allocator may take for small requests of the loop
  int64_t segments_before = 0;           // and had taken before
  bool reruns = false;                   // the op that runs can be run once more
  bool parted = false;                   // and is to be, since a request found no hole, though there was room for it
  std::atomic<bool> small_inside{false};  // it has taken them: small requests are served in the arena
  std::atomic<int64_t> small_asked{0};   // bytes of such requests since it was last looked
  int64_t small_before = 0;              // ``small_bytes`` when this loop was opened: earlier loops' tensors
  std::atomic<int64_t> small_peak{0};    // the most that ``small_bytes`` has exceeded that
  int64_t small_given = 0;               // bytes of small storages that the user has put under the budget
  std::unordered_set<const StorageImpl*> small_seen;  // those
  Device device;
  char* base = nullptr;  // null: not reserved yet
  follow::Extents extents;
  Device::Homes homes;
  follow::History history;
  follow::Recorder recorder;
  follow::Follower follower;
  follow::Observer observer;
  follow::Sources sources;
  follow::Anchor* anchor = nullptr;      // whose plan is followed
  bool torn = false;                     // memory of the arena was given back in pieces
  std::deque<int32_t> due;               // storages of the record that are to be fetched
  std::vector<follow::Request> requests;  // of the op that runs
  std::vector<std::pair<int64_t, int64_t>> wanted;  // bytes and planned offsets of what it is to ask for; -1: anywhere
  std::optional<follow::Record> proposed;  // a step that a plan is wanted for
  int64_t proposed_for = -1;             // the number of the record
  std::string names;                     // of its operators
  std::string observed_names;            // of operators of what was observed
  int64_t anchors = 0;                   // there ever were
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();  // the last op ended
  int64_t waited = 0;                    // microseconds of transfers until then
  int64_t in_nanos = 1, out_nanos = 1, in_bytes = 0, out_bytes = 0;  // of copies of all kinds
  std::map<int64_t, Block*> at;  // by offset
  follow::Ranking<Block> ranking;  // of the same blocks
  int64_t ranked_until = 0;      // all are ranked anew from this op on,
  const void* ranked_by = nullptr;  // or once another record says when they are used
  std::unordered_set<Block*> known;
  std::vector<Block*> given;     // what the user put under the budget, in that order; null: it is gone
  size_t after_given = 0;        // behind the one of them that was used last
  std::unordered_map<int64_t, Block*> parts;  // by storage of the history, who plays its part now
  std::vector<Block*> finished;               // copies beside ops that are to take effect
  int64_t copying_in = 0, copying_out = 0;    // copies beside ops that are under way
  int64_t early = 0;                          // bytes of blocks that are early
  bool core_counted = false;                  // see ``count_core``
  int64_t looked = -1;                        // how far ahead in the history was looked for what to fetch
  int64_t until_look = 0;                     // ops until it is looked for what to write
  bool evicted = false;                       // whether there ever was too little room
  int64_t charged = 0;           // bytes of the arena in use
  int64_t ids = 0;
  int64_t pieces = 0;            // blocks of all kinds
  bool open = true;
  bool seen = false;             // ops of all threads are seen because of it
  bool of_parent = false;        // this process is a child that was forked from the one that made it
  bool verified = true;          // whether what is taken to be unchanged is compared
  bool sampled = false;          // and of weights that are still in their files, which nobody writes to, a part
  bool stress = false;
  bool ahead = true;             // whether to copy beside ops
  int64_t counters[kCounters] = {};
  std::shared_ptr<follow::Recipes> recipes;
  std::vector<std::shared_ptr<const follow::ForeignFile>> files;  // that storages were mapped from
  // On a GPU, where what the host's clock says of ops means little: whether steps are timed, and the one under way; when
  // each of its ops arrived and began; the same of the step before, with its end.
  bool timed = false, timing = false;
  bool lacking_times = false;    // a plan was wanted of a step that was not timed
  std::vector<Device::Span> moments, moments_before;
  bool unseen = false;           // code that nobody sees may have written to what is here

  ~Space() { device.unreserve(base, Device::kAddresses * budget); }
  char* address(const Block& block) const { return base + block.offset; }
  int64_t small() const { return whole_pages(small_given + small_peak.load(std::memory_order_relaxed)); }
  // Bytes of the budget that small storages leave to the arena. What they have taken once, they will take again.
  int64_t room() const { return budget - spare - small(); }
};

std::unordered_set<Space*>& spaces = *new std::unordered_set<Space*>;
std::atomic<Space*> current{nullptr};
// Memory of the stock allocator's for requests that were not served in an arena.
struct Outside {
  int64_t bytes;
  Space* charged;  // whose budget they count in; null: nobody's
};
std::unordered_map<void*, Outside>& outside = *new std::unordered_map<void*, Outside>;  // by address
std::atomic<int64_t> outside_count{0};
// Of smaller storages that ops of loops have asked for, as the stock allocator gives them.
std::atomic<int64_t> small_bytes{0};
std::atomic<c10::Allocator*> stock{nullptr};
std::atomic<c10::Allocator*> beneath{nullptr};  // what was installed before ours: the stock allocator, or that of compiled steps
// Decides whether the kernel of an operator is written in Python.
void (*is_python)(const char* name, const char* overload, int64_t* answer) = nullptr;

// The answer of a Python callback that Ctrl-C interrupted.
constexpr int64_t kNoAnswer = -1;
// Calls a Python callback, which writes its answer through its last argument (see native_callback in compiling.py).
template <class Function, class... Given>
int64_t answer_of(Function* function, Given... given) {
  int64_t answer = kNoAnswer;
  function(given..., &answer);
  if (answer == kNoAnswer) raise(SIGINT);  // Python handles it after this library returns
  return answer;
}

// A thread that makes copies beside ops.
struct Copier {
  std::deque<Block*> queue;
  std::condition_variable_any asked;
  bool runs = false, sleeps = false;
  void ask(Block* block) {
    queue.push_back(block);
    if (sleeps) asked.notify_one();
  }
};
Copier& fetching = *new Copier;
Copier& writing_out = *new Copier;
pid_t copiers = -1;  // the process that has them

thread_local int depth = 0;                    // atomic ops that the thread is in
thread_local const c10::OperatorHandle* running = nullptr;
thread_local std::exception_ptr* refusal = nullptr;  // what the op that runs was refused; null: none runs
thread_local const char* source = nullptr;     // of the op that runs, if autograd runs it and it is known
std::atomic<int> ops_running{0};               // of all threads

// How often a loop was opened; and as how many-th the thread opened its own; 0: none. A loop may end in another thread
// than the one that opened it, or in backward, which restores the keys of the thread at its end: see ``leave_thread``.
std::atomic<int64_t> openings{0};
thread_local int64_t opening = 0;
// Whether a loop is open, perhaps paused: then ops of all threads are seen.
std::atomic<int> open_spaces{0};
// Whether ``on_op`` has seen the thread run an op without being the loop's. Threads of autograd, which get the keys of the
// thread that they work for, are the loop's.
thread_local bool outside_loop = false;
bool is_other() { return outside_loop || (opening != 0 && opening != openings.load()); }
// Ops of other threads that run; of them, those that pin nothing, since they were under way when their thread was found.
std::atomic<int> others_running{0};
int blind = 0;
thread_local int own_blind = 0;  // of them, those of the calling thread
// Storages in PyTorch's own memory that ops of other threads use, or works of collectives.
std::unordered_map<const StorageImpl*, int>& used_by_others = *new std::unordered_map<const StorageImpl*, int>;
void no_longer_used(const StorageImpl* storage) {
  if (const auto used = used_by_others.find(storage); --used->second == 0) used_by_others.erase(used);
}

// Whether the calling thread has opened the loop.
bool is_opener() { return opening != 0 && opening == openings.load(); }

bool is_left() { return open_spaces.load(std::memory_order_relaxed) == 0; }
// Spaces that hold tensors. As long as there are some, threads that were found to be others pin what they use: another loop
// may be opened meanwhile, and take those tensors over.
std::atomic<int> living_spaces{0};
bool others_pin() { return is_other() && living_spaces.load(std::memory_order_relaxed) > 0; }
// Whether the calling thread has opened a loop. Then PyTorch calls no observers of its ops while ``on_op`` is the only one: the
// calls are a quarter of the cost of following an op, and ``on_op`` looks for other threads.
thread_local bool may_disable_observers = false;
void disable_observers_unless_used() {
  if (!may_disable_observers && !at::isRecordFunctionEnabled()) return;
  may_disable_observers = true;
  at::enableRecordFunction(true);
  const auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  at::enableRecordFunction(observers && observers->callbacks_.size() > 1);
}
// It may be necessary once more: when backward ends, it restores the state in which it began.
void enable_observers() {
  if (may_disable_observers && !at::isRecordFunctionEnabled()) at::enableRecordFunction(true);
}

// Switches following on or off in the calling thread.
void set_followed(bool on) {
  c10::impl::tls_set_dispatch_key_included(kKey, on);
  on ? disable_observers_unless_used() : enable_observers();
}
// Follows the calling thread no more, if no loop is open.
void leave_thread() {
  if (is_left()) set_followed(false);
}

std::optional<at::CallbackHandle> finding;  // of ``on_op``

// Ops of all threads that use a space: it must not end under them. If that is asked for meanwhile, the last one ends it.
std::atomic<int> entered{0};
std::atomic<Space*> to_end{nullptr};
void end_asked();
struct Entered {
  Entered() { ++entered; }
  ~Entered() {
    if (--entered != 0 || to_end.load() == nullptr) return;
    try {
      end_asked();
    } catch (...) {  // nobody asks what came of it
    }
  }
  Entered(const Entered&) = delete;
};

// Whether the calling thread is the loop's, and between ops or inside one.
bool tracked() {
  return depth > 0 || (c10::impl::tls_is_dispatch_key_included(kKey) && !is_other() && current.load() != nullptr);
}

void release_raw(void* pointer);
void release_block(void* context);
c10::Allocator& allocator_of_loops();

// Of how many bytes 64 are looked at to see whether a block has changed. The size of a page and 64 more, so that it is not
// always the beginning of one.
int64_t step_of_sums(const Space& space, const Block& block) {
  return space.sampled && block.slot.original ? kPage + 64 : 64;
}

int64_t nanos_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

struct Stopwatch {
  int64_t& micros;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  ~Stopwatch() {
    using std::chrono::microseconds;
    micros += std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - start).count();
  }
};

// ---- blocks: here and away -----------------------------------------------------------------------------------------

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
  return !storage.resizable() && made_by != nullptr &&
         (made_by == stock || made_by == beneath || made_by == &allocator_of_loops());
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
  space.counters[kInUse] = space.charged;
  space.counters[kPeak] = std::max(space.counters[kPeak], space.charged);
}

// Gives memory that nothing uses to the kernel, as far as the budget wants it.
void let_go_of_idle(Space& space) {
  while (space.extents.idle() > 0 && space.charged + space.extents.idle() > space.room()) {
    const int64_t excess = std::min(space.charged + space.extents.idle() - space.room(), space.extents.idle());
    const auto [offset, bytes] = space.extents.forget_some(space.budget, excess);
    space.device.discard(space.base + offset, bytes);
    space.torn = true;
  }
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
    if (!space.open && space.extents.idle() > 0) {
      const auto [offset, bytes] = space.extents.forget_some(space.budget, space.extents.idle());
      space.device.discard(space.base + offset, bytes);
    }
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
    if (block->copied && !block->dead && block->version == block->copied_version)
      block->become(State::kArrived);
    else
      unplace(space, *block);
  } else {
    --space.copying_out;
    block->writing = false;
    if (block->copied && block->version == block->copied_version) {
      block->dirty = false;
      block->sum = block->copied_sum;
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
  if (block.dirty) block.sum = block.copied_sum;
  block.dirty = false;
  block.become(State::kHere);
  space.device.use(block.order);
  show(block, *block.storage->_unsafe_get_target(), space.address(block));
  ++space.counters[kFetches];
  ++space.counters[kFetchesAhead];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kAway] -= block.bytes;
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

// The life of a thread that copies beside ops.
void copy_on_demand(Copier& copier) {
  std::unique_lock<std::recursive_mutex> lock(mutex);
  for (;;) {
    copier.sleeps = true;
    copier.asked.wait(lock, [&] { return !copier.queue.empty(); });
    copier.sleeps = false;
    Block* block = copier.queue.front();
    copier.queue.pop_front();
    Space& space = *block->space;
    char* at = space.address(*block);
    const int64_t step = step_of_sums(space, *block);
    const bool in = block->state == State::kComing, sums = space.verified && (!in || block->dirty);
    lock.unlock();
    bool copied = true;
    uint64_t sum = 0;
    const auto start = std::chrono::steady_clock::now();
    try {
      // The sum comes first: what is written meanwhile, and not seen, differs from it later.
      if (!in && sums) sum = sum_of(at, block->bytes);  // of what a home has
      in ? space.device.load(space.homes, block->slot, block->order, at)
         : space.device.save(space.homes, block->slot, block->order, at);
      if (in && sums) sum = sum_of(at, block->bytes, step);
    } catch (...) {  // whoever needs the copy makes it again, and tells
      copied = false;
    }
    const auto nanos = nanos_since(start);
    lock.lock();
    (in ? space.in_nanos : space.out_nanos) += nanos;
    (in ? space.in_bytes : space.out_bytes) += block->bytes;
    block->copied = copied;
    block->copied_sum = sum;
    block->copy_end = follow::nanos_now();
    block->copy_start = block->copy_end - nanos;
    space.finished.push_back(block);
    answer();
  }
}
// Throws c10::Error if the system gives no thread. A later call starts the missing threads.
void start_copiers() {
  if (Device::kStreams) return;
  if (copiers != getpid()) {
    copiers = getpid();
    new (&fetching) Copier;
    new (&writing_out) Copier;
  }
  const auto start = [](Copier& copier) {
    if (!copier.runs) std::thread(copy_on_demand, std::ref(copier)).detach();
    copier.runs = true;
  };
  try {
    start(fetching);
    start(writing_out);
  } catch (const std::system_error& error) {
    TORCH_CHECK(false, "outofcore: the system gives no thread for copies beside ops (", error.code().message(),
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
std::string name_of_running();

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
  const Stopwatch watch{space.counters[kTransferMicros]};
  const char* from = space.address(block);
  bool write = block.dirty || !block.slot || space.unseen ||
               (block.fixed && (!space.verified || block.slot.original));  // a window is mapped from a home's file
  uint64_t sum = 0;
  if (Device::kReadable && (space.verified || write))
    sum = sum_of(from, block.bytes, write ? 64 : step_of_sums(space, block));
  if (!write && space.verified && sum != block.sum) {
    ++space.counters[kUnseenWrites];
    if (block.origin) block.origin->changed();
    write = true;
    sum = sum_of(from, block.bytes);
  }
  if (write) {
    take_slot(space, block);
    block.dirty = true;
    const int64_t start = follow::nanos_now();
    space.device.save(space.homes, block.slot, block.order, from);
    space.observer.add(follow::Event::kOut, start, follow::nanos_now(), block.id, block.bytes,
                       static_cast<int32_t>(follow::Copied::kOnDemand));
    ++space.counters[kWrites];
    space.counters[kWrittenBytes] += block.bytes;
    block.dirty = false;
    block.sum = sum;
  }
  if (block.fixed) space.device.cover(space.homes, block.slot, space.address(block), false);  // if it cannot, it stays
  ++space.counters[kEvictions];
  if (space.anchor != nullptr && !block.released) ++space.counters[kUnplanned];
  space.observer.add(follow::Event::kLeft, block.id, block.bytes, block.released);
  observe_surprise(space, block, cause);
  block.released = false;
  space.counters[kAway] += block.bytes;
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

// Which storage of the record a block is that the loop is in; -1: none.
int32_t part_of(const Space& space, const Block& block) {
  const follow::Known& known = *space.follower.known();
  int32_t storage = block.role_in == known.number ? block.role : -1;
  if (storage < 0) {
    if (block.looked_up_in != known.number) {
      const auto found = known.of_block.find(block.id);
      block.looked_up_in = known.number;
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

// Has some blocks leave, of which others may have taken hold meanwhile: what may not leave any more stays.
void evict_all(Space& space, std::vector<Block*> victims) {
  std::erase_if(victims, [&](Block* block) {
    if (block->state != State::kArrived) return false;
    unplace(space, *block);
    return true;
  });
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

std::string name_of_running() {
  if (running == nullptr) return "what runs between ops";
  const auto& name = running->operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

Block* known(StorageImpl& storage);

// Where in backward the op comes from that runs; empty: it does not run there, or that is not known.
std::string source_of_running(const Space& space) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return "";
  if (source != nullptr) return source;
  if (const auto* sum = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()); sum && sum->variable.has_storage()) {
    const Block* block = known(*sum->variable.storage().unsafeGetStorageImpl());
    return " in the backward pass of parameter " + std::to_string(block == nullptr ? -1 : block->id);  // see ``_named``
  }
  if (space.follower.on_course() && space.follower.op().source != nullptr) return space.follower.op().source;
  return "";
}

// Python knows this message, and makes a BudgetError of it (loop.py). Programs that then try smaller batches, such as
// accelerate's, look for its last words.
[[noreturn]] void refuse(const Space& space, int64_t bytes) {
  bytes = whole_pages(bytes);
  int64_t pinned = 0, kept = 0;
  for (const auto& [offset, block] : space.at) {
    if (!block->here() || movable(*block)) continue;
    (block->pins > 0 || !block->storage ? pinned : kept) += block->bytes;
  }
  const int64_t beside = space.limit - space.budget + space.spare;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "outofcore: the budget of ", space.limit, " bytes cannot hold ",
                   name_of_running(), source_of_running(space), ", which asks for ", bytes, " bytes beside ", pinned, " bytes that it uses and ",
                   kept, " bytes that cannot be moved; at least ",
                   Device::least_for(bytes + pinned + kept + space.small() + beside, space.limit),
                   " bytes are needed, of which tensors of less than ", smallest.load(), " bytes each take ",
                   space.small(), ", and ", beside, " lie beside the arena. The loop is out of memory.");
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
  const int64_t end = Device::kAddresses * space.budget;
  std::vector<Block*> behind;
  for (auto it = space.at.rbegin(); it != space.at.rend() && it->first + it->second->bytes > space.budget; ++it)
    behind.push_back(it->second);
  std::erase_if(behind, [](const Block* block) { return !movable(*block) || block->fixed; });
  if (!behind.empty())
    Owners(std::move(behind)).each([&](Block& block, StorageImpl& storage) {
      if (movable(block) && !block.fixed) move_away(space, block, storage, space.budget, end - space.budget);
    });
  // What was given back in pieces has come again in small pages, which take longer to walk through. As long as something
  // lies behind, the core cannot have all of its memory.
  if (!space.torn || Device::kAddresses == 1) return;
  if (!space.at.empty() && space.at.rbegin()->first + space.at.rbegin()->second->bytes > space.budget) return;
  space.torn = false;
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
    std::erase_if(there, [&](Block* block) {
      if (block->state != State::kArrived) return false;
      unplace(space, *block);
      return true;
    });
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
    if (!make_room(space, bytes)) refuse(space, bytes);
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
    const Stopwatch watch{space.counters[kTransferMicros]};
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
    space.counters[kAtHome] += block.bytes;
    space.device.use_slot(block.order);
  };
  if (through_window()) return use_at_home();
  const auto place_for = room_for(space, block.bytes, block.fixed ? -1 : planned_offset(space, block));
  if (!place_for || through_window()) return use_at_home();
  const Stopwatch watch{space.counters[kTransferMicros]};
  int64_t start = follow::nanos_now();
  if (block.fixed) {
    space.device.uncover_with(space.homes, block.slot, space.address(block), block.bytes);
    place(space, block, State::kHere);
  } else {
    place(space, block, State::kHere, *place_for);
    start = follow::nanos_now();
    space.device.note_unseen(false);  // just before this op, somebody may have written to its window
    try {
      space.device.load(space.homes, block.slot, block.order, space.address(block));
    } catch (...) {
      unplace(space, block);
      throw;
    }
    space.device.use(block.order);
    show(block, *block.storage->_unsafe_get_target(), space.address(block));
  }
  // What was adopted at home has no sum yet.
  if (block.dirty && space.verified) block.sum = sum_of(space.address(block), block.bytes, step_of_sums(space, block));
  block.dirty = block.slot.original && block.slot.original->was_written();  // its file has other bytes
  ++space.counters[kFetches];
  space.counters[kFetchedBytes] += block.bytes;
  space.counters[kAway] -= block.bytes;
  space.observer.add(follow::Event::kIn, start, follow::nanos_now(), block.id, block.bytes,
                     static_cast<int32_t>(follow::Copied::kOnDemand));
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
  if (!block->here() && block->slot) space.counters[kAway] -= block->bytes;
  unplace(space, *block);
  space.observer.add(follow::Event::kFreed, block->id, block->bytes);
  give_slot(space, *block);
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
  cast(space, *block, block->id);
  ++space.pieces;
  return block.release();
}

// ---- the allocator under PyTorch -----------------------------------------------------------------------------------

void* serve_outside(Space& space, int64_t bytes, bool charged) {
  void* pointer = stock.load()->raw_allocate(bytes);
  outside[pointer] = {bytes, charged ? &space : nullptr};
  ++outside_count;
  if (charged) count_use(space, bytes);
  int64_t& now = space.counters[kOutside];
  now += bytes;
  space.counters[kOutsidePeak] = std::max(space.counters[kOutsidePeak], now);
  return pointer;
}

void* serve(Space& space, int64_t bytes) {
  int64_t wanted = -1;
  if (depth > 0 && is_large(bytes)) {
    if (const size_t number = space.requests.size();
        number < space.wanted.size() && space.wanted[number].first >= whole_pages(bytes))
      wanted = space.wanted[number].second;
  }
  const auto place_for = room_for(space, whole_pages(bytes), wanted);
  if (!place_for && space.reruns) {
    space.parted = true;
    refuse(space, bytes);
  }
  if (!place_for) {
    if (depth > 0) space.requests.push_back({space.ids++, whole_pages(bytes)});
    return serve_outside(space, bytes, true);
  }
  Block* block = new_block(space, bytes);
  try {
    if (depth > 0 && is_large(bytes)) space.requests.push_back({block->id, block->bytes});
    place(space, *block, State::kHere, *place_for);
  } catch (...) {
    destroy(block);
    throw;
  }
  space.device.use(block->order);
  block->last_use = space.history.now();
  return space.address(*block);
}

Block* block_at(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (const Space* space : spaces) {
    const auto base = reinterpret_cast<uintptr_t>(space->base);
    if (space->base == nullptr || address < base || address >= base + Device::kAddresses * space->budget) continue;
    const auto found = space->at.find(static_cast<int64_t>(address - base));
    return found == space->at.end() ? nullptr : found->second;
  }
  return nullptr;
}

std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};  // addresses of all arenas there ever were

// Small storages stay with PyTorch's allocator; those that the loop asks for count in its budget.
int64_t size_of_small(void* pointer) { return static_cast<int64_t>(malloc_usable_size(pointer)); }

void release_raw(void* pointer) {
  if (pointer == nullptr) return;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address >= lowest && address < highest) {
    const Guard guard;
    if (Block* block = block_at(pointer)) {
      if (depth > 0)
        for (follow::Request& request : block->space->requests)
          if (request.id == block->id) request.until = static_cast<int32_t>(block->space->requests.size());
      if (block->held()) {
        block->dead = true;
        block->storage.reset();
      } else {
        destroy(block);
      }
      return;
    }
  }
  if (outside_count.load(std::memory_order_relaxed) != 0) {
    const Guard guard;
    if (const auto found = outside.find(pointer); found != outside.end()) {
      if (Space* space = current) space->counters[kOutside] -= found->second.bytes;
      if (Space* space = found->second.charged) count_use(*space, -found->second.bytes);
      outside.erase(found);
      --outside_count;
      stock.load()->raw_deallocate(pointer);
      return;
    }
  }
  // Kernels of oneDNN ask for memory without a DataPtr, and give it back in the same op.
  if (const int64_t bytes = tracked() ? size_of_small(pointer) : 0; bytes < 2 * smallest)
    small_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  stock.load()->raw_deallocate(pointer);
}

void release_block(void* context) {
  const Guard guard;
  auto* block = static_cast<Block*>(context);
  if (!pending.empty()) end_works();
  if (Device::kStreams && block->state == State::kComing) {  // whoever gets its memory waits for the copy
    std::erase(block->space->finished, block);
    block->become(State::kArrived);
    --block->space->copying_in;
  }
  if (block->held()) {
    block->dead = true;
    if (block->pins == 0) block->space->recorder.free(block->id);  // how long its copy takes is no part of the step
    block->storage.reset();
    block->space->known.erase(block);
    return;
  }
  destroy(block);
}

void release_small(void* pointer) {
  small_bytes.fetch_sub(size_of_small(pointer), std::memory_order_relaxed);
  stock.load()->raw_deallocate(pointer);
}
// More than ever: something large has to leave for it. Where nothing can, the next large request is refused.
void make_room_for_small(Space& space, int64_t now) {
  const Guard guard;
  if (current != &space || now <= space.small_peak) return;
  const int64_t before = space.small();
  space.small_peak = now;
  if (space.small() == before || space.base == nullptr) return;
  try {
    make_room(space, 0);
  } catch (...) {  // a home has failed, or there is no memory: told when one of them is needed next
  }
  let_go_of_idle(space);
}
void count_small(void* pointer) {
  const int64_t bytes = size_of_small(pointer);
  const int64_t all = small_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return;
  if (const int64_t now = all - space->small_before; now > space->small_peak.load(std::memory_order_relaxed))
    make_room_for_small(*space, now);
}

// What ``run_kernel`` is to throw. Kernels get an error that those do not catch which have another way for want of memory,
// such as cuDNN, whose other engine has other bits, and would be used from then on. An engine that is found by trying is
// another one each time as it is.
[[noreturn]] void throw_refusal(const c10::OutOfMemoryError& error) {
  if (refusal == nullptr || Device::picks_by_trying()) throw error;
  *refusal = std::make_exception_ptr(error);
  throw c10::Error(static_cast<const c10::Error&>(error));
}

// Serves a small request of a loop on a GPU in the arena, once PyTorch's allocator has taken what it may for such. Null:
// that one serves it. It takes memory in segments, each of which holds what is asked for between two looks.
void* serve_small(int64_t bytes) {
  constexpr int64_t kBetweenLooks = Device::kSegment / 2, kLeast = 512;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return nullptr;
  const int64_t asked = space->small_asked.fetch_add(std::max(bytes, kLeast), std::memory_order_relaxed);
  if (asked < kBetweenLooks && !space->small_inside.load(std::memory_order_relaxed)) return nullptr;
  const Guard guard;
  if (space != current || space->base == nullptr) return nullptr;
  if (asked >= kBetweenLooks) {
    space->small_asked = 0;
    const int64_t left = space->segments - (space->device.bytes_of_segments() - space->segments_before);
    space->small_inside = left < Device::kSegment ||
                          (left < 2 * Device::kSegment && space->device.free_in_segments() < Device::kSegment);
  }
  if (!space->small_inside) return nullptr;
  try {
    return serve(*space, bytes);
  } catch (const c10::OutOfMemoryError& error) {
    throw_refusal(error);
  }
}

struct PagedAllocator final : ::device::Allocator {
  c10::DataPtr allocate(size_t count) override {
    const auto bytes = static_cast<int64_t>(count);
    void* pointer = nullptr;
    if (is_large(bytes) && current.load(std::memory_order_relaxed) != nullptr && Device::is_current()) {
      const Guard guard;
      if (Space* space = current) {
        // A thread that no op was seen in works for one of the loop's, if no op of another thread can have started it.
        const bool ours = tracked();
        if (ours || (!is_other() && ops_running > 0 && others_running == 0)) {
          // Compiled code asks for memory without an op, and writes to what it likes.
          if (Device::kStreams && depth == 0) {
            space->unseen = true;
            space->device.note_unseen(true);
          }
          try {
            pointer = serve(*space, bytes);
          } catch (const c10::OutOfMemoryError& error) {
            if (ours) throw_refusal(error);
          } catch (...) {
            if (ours) throw;  // another thread's request is served all the same
          }
        }
        if (pointer == nullptr) pointer = serve_outside(*space, bytes, false);
      }
    } else if (Device::kStreams && count != 0 && !is_large(bytes) && tracked() && Device::is_current()) {
      pointer = serve_small(bytes);
    }
    if (pointer == nullptr) {
      if (::device::kOwnDeleter || count == 0 || is_large(bytes) || !tracked()) return stock.load()->allocate(count);
      pointer = stock.load()->raw_allocate(count);
      count_small(pointer);
      return {pointer, pointer, &release_small, ::device::current()};
    }
    return {pointer, pointer, &release_raw, ::device::current()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }

 protected:
  ::device::Whose remember(const c10::DataPtr& data, void* stream) override {
    using ::device::Whose;
    if (data.get_deleter() != &release_raw && data.get_deleter() != &release_block) return Whose::kStocks;
    const Guard guard;
    Block* block = data.get_deleter() == &release_block ? static_cast<Block*>(data.get_context()) : block_at(data.get());
    if (block == nullptr) return Whose::kPassedOn;
    block->space->device.record(block->order, stream);
    return Whose::kOurs;
  }
};
PagedAllocator& allocator = *new PagedAllocator;  // never destroyed: storages keep a pointer to it
c10::Allocator& allocator_of_loops() { return allocator; }

// ---- storages and blocks -------------------------------------------------------------------------------------------

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
  if (data.get_deleter() != &release_raw) return nullptr;
  Block* block = block_at(data.get());
  if (block == nullptr || block->storage || !is_large(block->used)) return nullptr;  // small ones are never moved
  own(*block, storage);
  show(*block, storage, block->space->address(*block));
  return block;
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
         (data.get_deleter() == stock.load()->raw_deleter() || data.get_deleter() == &release_raw ||
          data.get_deleter() == &release_small ||
          (beneath != nullptr && data.get_deleter() == beneath.load()->raw_deleter()));
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
      space.counters[kAway] += block->bytes;
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
  space.counters[kAway] += block->bytes;
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
  return use.given || (!use.in_part && use.beside + 2 * whole_pages(bytes) <= space.room());
}

// The block of a storage, in this space; null: it is used where it is.
Block* block_of(Space& space, StorageImpl& storage, const Use& use, at::DataPtr& left) {
  if (!is_large(storage.nbytes()) || !Device::is_ours(storage.device())) return nullptr;
  Block* block = known(storage);
  if (block == nullptr) block = enroll(storage);
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
    if (make_room(space, whole_pages(bytes)) && make_hole(space, whole_pages(bytes)) && moves() &&
        space.charged + whole_pages(bytes) <= space.room())
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

// ---- ops -----------------------------------------------------------------------------------------------------------

enum class Kind {
  kAtom,       // its kernel touches memory: what it touches is pinned
  kParts,      // made of other ops, which come one by one
  kView,       // makes another tensor of the same storage
  kShape,      // looks at the shape of its operands, not at their bytes
};
struct Operator {
  Kind kind;
  bool sliced;              // works through lists of tensors, each place for itself
  bool lists;               // and gives a list of results
  bool looks_up;            // uses places of its first operand that others name
  bool communicates;        // goes on after it has returned
  size_t results;
  std::vector<bool> writes;  // by argument
  follow::Again again;      // whether it can be run once more
  follow::Again later;      // and as a part of a recipe
  bool certain = true;      // Python was asked, unless Ctrl-C came
};

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

bool writes_to(const c10::FunctionSchema& schema, size_t argument) {
  const auto& given = schema.arguments()[argument];
  return (given.alias_info() != nullptr && given.alias_info()->isWrite()) ||
         follow::writes_silently(schema.name(), given.name(), argument);
}
// All that it returns are its operands, or other tensors of their storages, and it writes to none.
bool is_view(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (writes_to(schema, i)) return false;
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(),
                                                  [](const auto& result) { return result.alias_info() != nullptr; });
}

Operator describe(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> shapes{
      "aten::empty_like",   "aten::zeros_like",       "aten::ones_like", "aten::full_like",  "aten::rand_like",
      "aten::randn_like",   "aten::randint_like",     "aten::new_empty", "aten::new_zeros",  "aten::new_ones",
      "aten::new_full",     "aten::new_empty_strided", "aten::set_",     "aten::is_same_size"};
  static const std::unordered_set<std::string> lookups{
      "aten::index",       "aten::_unsafe_index", "aten::index_select",   "aten::gather",
      "aten::take",        "aten::masked_select", "aten::embedding",      "aten::_embedding_bag",
      "aten::index_put",   "aten::index_put_",    "aten::_index_put_impl_", "aten::_embedding_bag_forward_only",
      "aten::index_copy_", "aten::index_add_",    "aten::index_fill_",    "aten::scatter_",
      "aten::slice_copy",  "aten::select_copy",   "aten::narrow_copy"};
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Operator found{};
  found.looks_up = lookups.count(name) != 0;
  found.results = schema.returns().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) found.writes.push_back(writes_to(schema, i));
  const auto in_python = [&] {
    const int64_t answer =
        is_python == nullptr ? 0 : answer_of(is_python, name.c_str(), schema.overload_name().c_str());
    found.certain &= answer != kNoAnswer;
    return answer;
  };
  const bool kernel = op.hasKernelForDispatchKey(Device::kKernels);
  const bool implicit = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
  const bool listed = starts(name, "aten::_foreach_") && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  // Other composites, such as copy_, have kernels that touch memory. A kernel in Python runs ops that are seen, and so do
  // functional collectives.
  if ((!kernel && (implicit || listed)) || starts(name, "_c10d_functional::"))
    found.kind = Kind::kParts;
  else if (!starts(name, "aten::") && in_python() == 1)
    found.kind = Kind::kParts;
  else if (is_view(schema))
    found.kind = Kind::kView;
  else
    found.kind = shapes.count(name) != 0 ? Kind::kShape : Kind::kAtom;
  found.lists = schema.returns().size() == 1 && schema.returns()[0].type()->str() == "Tensor[]";
  found.sliced = (starts(name, "aten::_fused_") || starts(name, "aten::_amp_foreach_")) && schema.returns().empty();
  // On a GPU, lists have kernels of their own. Scalars in a tensor have their places there.
  found.sliced |= found.kind == Kind::kAtom && starts(name, "aten::_foreach_") &&
                  (schema.returns().empty() || found.lists) &&
                  !(schema.overload_name() == "Tensor" && starts(name, "aten::_foreach_addc"));
  found.communicates = starts(name, "c10d::");
  found.again = found.kind == Kind::kAtom || found.kind == Kind::kShape ? follow::again_of(op) : follow::Again::kNo;
  if (found.again != follow::Again::kNo && in_python() != 0) found.again = follow::Again::kNo;
  found.later = Device::repeats(op) ? found.again : follow::Again::kNo;
  return found;
}

const Operator& operator_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, Operator> cache;
  const auto found = cache.find(&op.schema());
  if (found != cache.end() && found->second.certain) return found->second;
  return cache.insert_or_assign(&op.schema(), describe(op)).first->second;
}

template <class Action>
void each_storage(const c10::IValue& value, Action&& action) {
  const auto visit = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage() || !Device::is_ours(impl->device())) return;
    StorageImpl& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
    if constexpr (std::is_invocable_v<Action, StorageImpl&, const c10::TensorImpl*>)
      action(storage, impl);
    else
      action(storage);
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) each_storage(element, action);
  } else if (value.isStorage() && Device::is_ours(value.toStorage().device())) {
    StorageImpl& storage = *value.toStorage().unsafeGetStorageImpl();
    if constexpr (std::is_invocable_v<Action, StorageImpl&, const c10::TensorImpl*>)
      action(storage, nullptr);
    else
      action(storage);
  }
}

// Bytes of the storages of 64 KiB and more that an op has as operands.
int64_t bytes_of_operands(const torch::jit::Stack& stack, size_t first) {
  std::unordered_set<const StorageImpl*> seen;
  int64_t bytes = 0;
  for (size_t i = first; i < stack.size(); ++i)
    each_storage(stack[i], [&](StorageImpl& storage) {
      const auto own = static_cast<int64_t>(storage.nbytes());
      if (is_large(own) && seen.insert(&storage).second) bytes += whole_pages(own);
    });
  return bytes;
}

struct Operand {
  Block* block;
  bool written;
};

// Lists that an op fills. A thread keeps them for its next op: to ask for their memory takes longer than to fill them.
struct Lists {
  std::vector<Operand> operands;
  std::vector<follow::Touched> touched;
  std::vector<follow::History::Touch> noted;
  std::vector<std::pair<int32_t, Block*>> places;
  std::unique_ptr<Lists> next;  // that the thread has too
};
class Borrowed {
 public:
  Borrowed() : idle_(idle_of_thread), lists_(idle_ ? std::move(idle_) : std::make_unique<Lists>()) {
    idle_ = std::move(lists_->next);
  }
  ~Borrowed() {
    lists_->operands.clear();
    lists_->touched.clear();
    lists_->noted.clear();
    lists_->places.clear();
    lists_->next = std::move(idle_);
    idle_ = std::move(lists_);
  }
  Borrowed(const Borrowed&) = delete;
  Lists* operator->() const { return lists_.get(); }

 private:
  inline static thread_local std::unique_ptr<Lists> idle_of_thread;
  std::unique_ptr<Lists>& idle_;  // of this thread: to look for it takes longer than the rest
  std::unique_ptr<Lists> lists_;
};

// When an op arrived and began, in the order of its stream; back to the device unless somebody keeps it.
class Timed {
 public:
  explicit Timed(Space& space) : space_(space) {}
  Timed(const Timed&) = delete;
  ~Timed() {
    if (!moments_) return;
    const Guard guard;
    space_.device.forget(*moments_);
  }
  void arrive() {
    if (space_.timing) moments_ = Device::Span{space_.device.moment(), space_.device.moment()};
  }
  void begin() {
    if (moments_) space_.device.again(moments_->second);
  }
  void keep() {
    if (moments_) space_.moments.push_back(*std::exchange(moments_, std::nullopt));
  }

 private:
  Space& space_;
  std::optional<Device::Span> moments_;
};

// What an op touches, pinned while it runs.
class Pinned {
 public:
  // `other`: the op is another thread's.
  explicit Pinned(bool other) : other_(other) { others_running += other; }
  Pinned(const Pinned&) = delete;
  ~Pinned() {
    const Guard guard;
    for (auto& [block, written] : operands) {
      Device& device = block->space->device;
      block->here() ? device.used(block->order) : device.used_slot(block->order);
      // An op that failed may have written as well.
      if (written) {
        block->dirty = true;
        ++block->version;
        if (block->origin) ++block->origin->version;
      }
      --block->pins;
      block->others -= other_;
      if (block->dead && block->pins == 0 && block->held()) block->space->recorder.free(block->id);
      destroy_if_free(block);
    }
    answer();
    if (!other_) return;
    for (const StorageImpl* storage : plain_) no_longer_used(storage);
    --others_running;
  }
  void add(Block* block, bool written) {
    for (Operand& operand : operands)
      if (operand.block == block) {
        operand.written |= written;
        return;
      }
    operands.push_back({block, written});
    ++block->pins;
    block->others += other_;
  }
  // A storage in PyTorch's own memory.
  void add(const StorageImpl& storage) {
    plain_.push_back(&storage);
    ++used_by_others[&storage];
  }

 private:
  bool other_;

 public:
  Borrowed lists;
  std::vector<Operand>& operands = lists->operands;

 private:
  std::vector<const StorageImpl*> plain_;
};

// The thread is inside of an op.
struct Running {
  explicit Running(const c10::OperatorHandle& op) : outer(running) {
    running = &op;
    ++depth;
    ++ops_running;
  }
  ~Running() {
    --ops_running;
    --depth;
    running = outer;
  }
  const c10::OperatorHandle* outer;
};

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
  (in ? fetching : writing_out).ask(&block);
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

// The plan for the next larger size, by what a storage of the record has now; of the largest if there is none.
void choose_anchor(Space& space, int32_t storage, int64_t bytes) {
  follow::Anchor* best = nullptr;
  const auto better = [&](const follow::Anchor& a, const follow::Anchor& b) {
    const int64_t mine = a.bytes[storage], other = b.bytes[storage];
    if ((mine >= bytes) != (other >= bytes)) return mine >= bytes;
    if (mine != other) return mine >= bytes ? mine < other : mine > other;
    return a.size < b.size;
  };
  for (follow::Anchor& anchor : space.follower.known()->anchors)
    if (anchor.schedule && (best == nullptr || better(anchor, *best))) best = &anchor;
  space.anchor = best;
}

// The plan that was of use last; null: there is none.
follow::Anchor* usual_anchor(follow::Known& known) {
  follow::Anchor* found = nullptr;
  for (follow::Anchor& anchor : known.anchors)
    if (anchor.schedule && (found == nullptr || anchor.used > found->used)) found = &anchor;
  return found;
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
  const follow::Known* known = follower.known();
  const int32_t planned_at = space.anchor != nullptr && follower.on_course() ? follower.next() : -1;
  const void* planned = planned_at >= 0 ? known->usual.ops[planned_at].op : nullptr;
  follower.advance(op, touched);
  if (planned != nullptr && (!follower.on_course() || follower.known() != known || follower.position() != planned_at))
    space.observer.depart(planned_at, follow::Cause::kOp, name_of(planned), name_of(op));
  if (follower.known() != known) {
    known = follower.known();
    space.anchor = known == nullptr ? nullptr : usual_anchor(*follower.known());
    space.due.clear();
    if (before) ++space.counters[kLost];
  }
  space.observer.after_departure(space.anchor != nullptr && follower.on_course() ? follower.position() : -1);
  for (const auto& [place, block] : places) block->released = false;
  if (!follower.on_course()) return;
  for (const auto& [place, block] : places)
    if (const int32_t storage = follower.storage_at(place); storage >= 0) {
      play(space, *follower.known(), *block, storage);
      if (space.anchor != nullptr && known->persistent[storage] < 0 && space.anchor->bytes[storage] != block->bytes)
        choose_anchor(space, storage, block->bytes);
    }
  if (space.anchor == nullptr) return;
  ++space.counters[kPlanned];
  if (follower.position() == 0) move_into_core(space);
  want(space, follower.position());
  if (space.ahead) follow_plan(space);
}

void forget_idle(Space& space) {
  while (space.extents.idle() > 0) {
    const auto [offset, bytes] = space.extents.forget_some(space.budget, space.extents.idle());
    space.device.discard(space.base + offset, bytes);
  }
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

// ---- recipes -------------------------------------------------------------------------------------------------------

void run_atom(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
              torch::jit::Stack* stack);
void run_for_other(const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack);

struct OurPager final : follow::Pager {
  std::shared_ptr<follow::Origin> origin_of(StorageImpl& storage) override {
    Block* block = known(storage);
    if (block == nullptr || block->fixed || block->stays || block->works > 0 || has_array(storage)) return {};
    if (!block->space->open || block->space != current) return {};
    if (!block->origin) {
      block->origin = std::make_shared<follow::Origin>();
      block->origin->id = block->id;
      block->origin->storage = block->storage;
    }
    return block->origin;
  }
  std::shared_ptr<follow::Origin> known_origin(StorageImpl& storage) override {
    const Block* block = known(storage);
    return block == nullptr ? nullptr : block->origin;
  }
  c10::Storage copy_of(const StorageImpl& storage) override {
    const bool ours = Device::is_ours(storage.device());
    c10::Storage copy(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                       c10::GetAllocator(storage.device_type()), false));
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (bytes == 0) return copy;
    auto* to = static_cast<char*>(copy.mutable_data());
    const auto* from = static_cast<const char*>(storage.data());
    ours ? current.load()->device.copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
    return copy;
  }
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) override {
    if (is_other()) return run_for_other(op, operator_of(op), below, stack);
    const Entered inside;
    source = nullptr;
    if (Space* space = current) return run_atom(*space, op, operator_of(op), below, stack);
    op.redispatchBoxed(below, stack);
  }
};
OurPager& our_pager = *new OurPager;

// Python's part: is given a result of an op, of whose node it offers the saved tensors to ``follow_pack``.
void (*offer_saved)(void* tensor, int64_t* answer) = nullptr;
// The results of the op before; only the next op sees them with the node that autograd has made.
thread_local std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_before;

// False: Ctrl-C came there, and Python is not to be called before it goes on.
bool offer_results() {
  for (auto& weak : std::exchange(results_before, {})) {
    const auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor tensor(impl);
    if (!tensor.requires_grad() || tensor.is_leaf() || tensor.is_view()) continue;
    const c10::impl::ExcludeDispatchKeyGuard quietly(
        c10::DispatchKeySet({kKey, DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
    // The other results have the same node.
    return answer_of(offer_saved, static_cast<void*>(new at::Tensor(tensor))) != kNoAnswer;
  }
  return true;
}
void remember_results(const c10::IValue& value) {
  follow::each_tensor(value, [](const at::Tensor& tensor, int64_t) {
    if (tensor.defined() && follow::is_differentiable(tensor))
      results_before.emplace_back(tensor.getIntrusivePtr());
  });
}

// How an op's results come about, and what autograd may have saved for it.
class Lineage {
 public:
  Lineage(Space& space, const c10::OperatorHandle& op, const Operator& about) : space_(space), op_(op), about_(about) {}

  // Its operands are known; it has not run yet.
  void before(const std::vector<Operand>& operands, c10::DispatchKeySet below, const torch::jit::Stack& stack) {
    follow::Recipes& recipes = *space_.recipes;
    const bool changes = about_.later == follow::Again::kChanges || about_.later == follow::Again::kFills;
    for (const auto& [block, written] : operands) {
      if (!block->origin) continue;
      offers_ |= block->origin->wanted && !block->origin->steps.empty();
      if (!written) continue;
      if (changes && !block->origin->steps.empty()) {
        changed_ = block;
        steps_ = block->origin->steps;
        complete_ = block->origin->complete;
      }
      block->origin->forget();
    }
    if (recipes.mode == follow::Recompute::kOff) return;
    offers_ |= recipes.mode == follow::Recompute::kNoting;
    // Autograd gives results a node if an operand asks for that; in a function of the user's own, whatever they are.
    differentiated_ = !c10::GradMode::is_enabled();
    for (size_t i = stack.size() - about_.writes.size(); i < stack.size() && !differentiated_; ++i)
      follow::each_tensor(stack[i], [&](const at::Tensor& tensor, int64_t) {
        differentiated_ |= tensor.defined() && tensor.requires_grad();
      });
    bool asked = changed_ != nullptr;
    if (!changes && about_.later != follow::Again::kNo) {
      asked = recipes.asks_for(-1);
      for (int32_t place = -1; !asked && place >= -kMostResults; --place)
        asked = recipes.asks_for(space_.history.twin(place));
    }
    if (asked)
      step_ = recipes.step_before(op_, about_.later, below, space_.device.stream(), stack, about_.writes.size(),
                                  about_.kind == Kind::kShape);
    if (!step_) return;
    waited_ = space_.counters[kTransferMicros];
    start_ = std::chrono::steady_clock::now();
  }
  void ran() {
    if (!step_) return;
    const auto took = std::chrono::steady_clock::now() - start_;
    step_->nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count() -
                         1000 * (space_.counters[kTransferMicros] - waited_);
    step_->place = space_.moments.size();  // which ``Timed`` adds to next
  }
  void made(Block& block, int32_t place) {
    if (!step_) space_.recipes->made_for_good(block.id, block.used);
    if (!step_ || changed_ != nullptr) return;
    StorageImpl& storage = *block.storage->_unsafe_get_target();
    const auto origin = our_pager.origin_of(storage);
    if (!origin) return;
    space_.recipes->made_by(step_, about_.later, static_cast<size_t>(-place - 1), block.twin, block.used, *origin);
    offers_ |= origin->wanted;
  }
  void after(const torch::jit::Stack& stack) {
    if (step_ && changed_ != nullptr)
      if (const StorageImpl& owner = *changed_->storage->_unsafe_get_target();  // an operand
          owns(owner, *changed_) && static_cast<int64_t>(owner.nbytes()) == changed_->used)
        space_.recipes->changed_by(step_, about_.later, std::move(steps_), complete_, owner, *changed_->origin);
    if (!offers_ || !differentiated_ || offer_saved == nullptr || space_.recipes->mode == follow::Recompute::kOff) return;
    // Where somebody has hooks of their own for saved tensors, or does without any, it is left at that.
    if (!at::SavedTensorDefaultHooks::is_enabled() || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return;
    for (size_t i = stack.size() - op_.schema().returns().size(); i < stack.size(); ++i) remember_results(stack[i]);
  }

 private:
  // More results with storages of their own than ops have that are worth running again.
  static constexpr int32_t kMostResults = 6;

  Space& space_;
  const c10::OperatorHandle& op_;
  const Operator& about_;
  std::shared_ptr<follow::Step> step_;
  Block* changed_ = nullptr;  // what it changes in place, and how that came about before
  std::vector<std::shared_ptr<const follow::Step>> steps_;
  bool complete_ = false, offers_ = false, differentiated_ = false;
  int64_t waited_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Recipes do not see what an op is about to write.
void spare_recipes(follow::Recipes& recipes, const Operator& about, const torch::jit::Stack& stack) {
  const size_t count = about.writes.size(), first = stack.size() - count;
  for (size_t i = 0; i < count; ++i)
    if (about.writes[i] || about.communicates)
      each_storage(stack[first + i], [&](StorageImpl& storage) { recipes.before_write(storage); });
}

// --------------------------------------------------------------------------------------------------------------------

// The kernel of all collectives, in every thread: what a work has begun goes on after the op has returned, and until it is
// complete its tensors stay where they are.
void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<c10::IValue> operands;
  if (!is_left()) operands.assign(stack->end() - static_cast<int64_t>(op.schema().arguments().size()), stack->end());
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kCollectives), stack);
  if (operands.empty()) return;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    if (!(*stack)[i].isObject()) continue;
    const auto object = (*stack)[i].toObject();
    if (object->slots().empty() || !object->getSlot(0).isCapsule()) continue;
    Pending fresh{c10::dynamic_intrusive_pointer_cast<c10d::Work>(object->getSlot(0).toCapsule()), {}, {}};
    if (!fresh.work) continue;
    const Guard guard;
    for (const c10::IValue& operand : operands)
      each_storage(operand, [&](StorageImpl& storage) {
        if (!is_large(static_cast<int64_t>(storage.nbytes()))) return;
        Block* block = known(storage);
        if (block == nullptr) block = enroll(storage);
        block == nullptr ? fresh.plain.push_back(&storage) : fresh.blocks.push_back(block);
      });
    pending.push_back(fresh);
    for (Block* block : fresh.blocks) ++block->works;
    for (const StorageImpl* storage : fresh.plain) ++used_by_others[storage];
  }
}

// Runs the kernel of an op of the loop. What was refused to it is refused to the op, also if the kernel went another way.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  std::exception_ptr found;
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  struct Noting {
    std::exception_ptr* outer;
    ~Noting() { refusal = outer; }
  };
  {
    const Noting noting{std::exchange(refusal, &found)};
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      if (!found) throw;
    }
  }
  if (!found) return;
  if (refusal != nullptr) *refusal = found;  // the op is a part of another one
  std::rethrow_exception(found);
}

// Brings what an op uses side by side, so that it does not part the rest of the arena.
void join_operands(Space& space, const Pinned& pinned) {
  const Guard guard;
  const auto pin = [&](int by) {
    for (const Operand& operand : pinned.operands) operand.block->pins += by;
  };
  pin(-1);
  try {
    evict_everything(space);
  } catch (...) {
    pin(1);
    throw;
  }
  pin(1);
  space.requests.clear();
  for (const Operand& operand : pinned.operands) fetch(space, *operand.block);
}

// Runs the kernel of an op whose operands are here. Where addresses are no more than bytes, these may part what is free,
// so that no hole is large enough for a result; then it is run once more with its operands side by side, if it changes
// nothing else. For others, the stock allocator serves the request.
void run_in_room(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                 torch::jit::Stack* stack, const Pinned& pinned) {
  if (Device::kAddresses > 1) return run_kernel(op, below, stack);
  const auto count = static_cast<int64_t>(about.writes.size());
  const auto writes = [](bool argument) { return argument; };
  const bool reruns = about.again == follow::Again::kMakes && 2 * space.charged > space.room() &&
                      !op.hasTag(at::Tag::nondeterministic_seeded) &&
                      std::none_of(about.writes.begin(), about.writes.end(), writes);
  if (!reruns) return run_kernel(op, below, stack);
  const torch::jit::Stack given(stack->end() - count, stack->end());
  const size_t below_given = stack->size() - given.size();
  space.parted = false;
  space.reruns = true;
  try {
    run_kernel(op, below, stack);
    space.reruns = false;
    return;
  } catch (const c10::OutOfMemoryError&) {
    space.reruns = false;
    if (!space.parted) throw;
  } catch (...) {
    space.reruns = false;
    throw;
  }
  join_operands(space, pinned);
  stack->resize(below_given);
  stack->insert(stack->end(), given.begin(), given.end());
  run_kernel(op, below, stack);
}

void run_atom(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
              torch::jit::Stack* stack) {
  const size_t count = about.writes.size(), first = stack->size() - count;
  if (space.recipes->any()) spare_recipes(*space.recipes, about, *stack);
  Pinned pinned(false);
  Lineage lineage(space, op, about);
  Timed timed(space);
  const Running inside(op);
  const Borrowed& lists = pinned.lists;
  std::vector<follow::Touched>& touched = lists->touched;
  const void* const schema = &op.schema();
  const int64_t arrived = follow::nanos_now();
  int64_t start = arrived, planned = 0;
  const auto touch = [&](int32_t place, const Block& block, bool written, bool created) {
    touched.push_back({place, block.id, block.bytes, written, created});
  };
  {
    const Guard guard;
    timed.arrive();
    catch_up(space);
    if (space.unseen) {
      for (Block* block : space.known) block->dirty |= block->here();
      space.unseen = false;
    }
    planned = space.counters[kPlanned];
    space.requests.clear();
    space.wanted.clear();
    std::vector<follow::History::Touch>& noted = lists->noted;
    std::vector<std::pair<int32_t, Block*>>& places = lists->places;
    int32_t place = 0;
    int64_t together = -1;  // bytes of all operands
    const auto use_of = [&](StorageImpl& storage, const c10::TensorImpl* tensor, size_t argument) -> Use {
      const auto bytes = static_cast<int64_t>(storage.nbytes());
      const Block* block = is_large(bytes) ? known(storage) : nullptr;
      if (!is_large(bytes) || (block != nullptr && block->space == &space)) return {};
      if (together < 0) together = bytes_of_operands(*stack, first);
      const bool in_part = tensor != nullptr && 2 * tensor->numel_default() * static_cast<int64_t>(tensor->itemsize()) < bytes;
      return {.in_part = in_part || (about.looks_up && argument == 0), .beside = together - whole_pages(bytes)};
    };
    for (size_t i = 0; about.kind == Kind::kAtom && i < count; ++i)
      each_storage((*stack)[first + i], [&](StorageImpl& storage, const c10::TensorImpl* tensor) {
        ++place;
        Block* block = block_of(space, storage, use_of(storage, tensor, i));
        if (block == nullptr) return;
        pinned.add(block, about.writes[i]);
        noted.emplace_back(place, block->id);
        places.emplace_back(place, block);
        touch(place, *block, about.writes[i], false);
      });
    ++space.counters[kOps];
    if (space.history.begin(schema, noted)) ++space.counters[kExpected];
    for (const auto& [at, block] : places) {
      block->last_use = space.history.now();
      if (block->offset >= 0) space.ranking.touch(block);
      no_longer_early(space, *block);
      if (block->given >= 0) space.after_given = static_cast<size_t>(block->given) + 1;
      if (const int64_t twin = space.history.twin(at); twin >= 0) cast(space, *block, twin);
    }
    if (!touched.empty())
      take_place(space, schema, touched, places);
    else if (space.anchor != nullptr && space.follower.may_make(schema))
      want(space, space.follower.next());
    lineage.before(pinned.operands, below, *stack);
    for (const Operand& operand : pinned.operands) fetch(space, *operand.block);
    if (space.anchor != nullptr && space.ahead && !space.stress) fetch_due(space);
    timed.begin();
    start = follow::nanos_now();
  }
  run_in_room(space, op, about, below, stack, pinned);
  const int64_t end = follow::nanos_now();
  const Guard guard;
  if (!space.open) return;
  try {
    lineage.ran();
    int32_t place = 0;
    std::vector<std::pair<int32_t, Block*>>& places = lists->places;
    places.clear();
    const bool operands = !touched.empty();
    for (size_t i = stack->size() - about.results; i < stack->size(); ++i)
      each_storage((*stack)[i], [&](StorageImpl& storage) {
        --place;
        if (!is_large(storage.nbytes()) || known(storage) != nullptr) return;
        Block* block = enroll(storage);
        if (block == nullptr || block->space != &space) return;
        block->last_use = space.history.now();
        space.ranking.touch(block);
        space.device.used(block->order);
        space.history.note({place, block->id});
        if (const int64_t twin = space.history.twin(place); twin >= 0) cast(space, *block, twin);
        touch(place, *block, true, true);
        places.emplace_back(place, block);
        for (follow::Request& request : space.requests)
          if (request.id == block->id) request.place = place;
        lineage.made(*block, place);
      });
    lineage.after(*stack);
    if (!operands && !touched.empty()) {
      take_place(space, schema, touched, places);
    } else if (operands && space.follower.on_course()) {
      for (const auto& [at, block] : places)
        if (const int32_t storage = space.follower.storage_at(at); storage >= 0) {
          play(space, *space.follower.known(), *block, storage);
          if (space.anchor != nullptr && space.anchor->bytes[storage] != block->bytes)
            choose_anchor(space, storage, block->bytes);
        }
    }
    if (!touched.empty())
      space.observer.add(follow::Event::kOp, start, end, reinterpret_cast<int64_t>(schema), start - arrived,
                         space.counters[kPlanned] != planned);
    for (const follow::Touched& each : touched)
      space.observer.add(follow::Event::kTouch, 0, 0, each.id, each.bytes, each.written + 2 * each.created);
    if (!touched.empty()) timed.keep();
    const int64_t waited = space.counters[kTransferMicros] - space.waited;
    space.recorder.add(schema, touched, std::max<int64_t>(0, nanos_since(space.since) - 1000 * waited),
                       std::move(space.requests), source);
    space.requests.clear();
    space.since = std::chrono::steady_clock::now();
    space.waited = space.counters[kTransferMicros];
    if (!space.stress) copy_ahead(space);
  } catch (const std::exception&) {  // the op has run: drop its record, and fetch on demand
    space.recorder.drop();
  }
}

// An argument of which each place of the lists has its own: a list of tensors, or of numbers. 0: it is not one.
size_t places_of(const c10::IValue& value) {
  return value.isList() ? value.toList().size() : 0;
}
c10::IValue slice_of(const c10::IValue& value, size_t begin, size_t end) {
  const c10::List<c10::IValue> list = value.toList();
  c10::List<c10::IValue> part(list.elementType());
  for (size_t k = begin; k < end; ++k) part.push_back(list.get(k));
  return c10::IValue(std::move(part));
}

// An op that works through lists, such as a fused optimizer: in slices that fit, one after the other.
void run_in_slices(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  const size_t count = about.writes.size(), first = stack->size() - count;
  size_t length = 0;
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    if (!value.isTensorList()) continue;
    const auto tensors = value.toTensorList();
    if (tensors.empty()) continue;
    if (length != 0 && tensors.size() != length) return run_atom(space, op, about, below, stack);
    length = tensors.size();
    bytes.resize(length);
    for (size_t k = 0; k < length; ++k) {
      const at::Tensor tensor = tensors.get(k);
      if (tensor.has_storage()) bytes[k] += whole_pages(static_cast<int64_t>(tensor.storage().nbytes()));
    }
  }
  int64_t total = 0;
  for (const int64_t each : bytes) total += each;
  if (total <= space.room() / 2) return run_atom(space, op, about, below, stack);
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  stack->resize(first);
  c10::List<at::Tensor> results;
  for (size_t begin = 0, end = 0; begin < length; begin = end) {
    int64_t taken = 0;
    for (end = begin; end < length && (end == begin || taken + bytes[end] <= space.room() / 4); ++end)
      taken += bytes[end];
    torch::jit::Stack part;
    for (const c10::IValue& value : arguments) {
      // Numbers for all places at once, such as sizes, are not in lists of that length but by chance, and not in such ops.
      if (places_of(value) == length)
        part.push_back(slice_of(value, begin, end));
      else
        part.push_back(value);
    }
    run_atom(space, op, about, below, &part);
    if (about.lists)
      for (const at::Tensor& result : part.back().toTensorVector()) results.push_back(result);
  }
  if (about.lists) stack->emplace_back(std::move(results));
}

// Python's part: says where the op that is about to run comes from, in words that stay; none: from nowhere in particular.
void (*ask_source)(int64_t* answer) = nullptr;

// Learns where ops of forward come from, as long as it is not known which op comes when; finds out of ops of backward.
void find_source(Space& space) {
  source = nullptr;
  if (ask_source == nullptr) return;
  const auto node = torch::autograd::get_current_node();
  const uint64_t made = at::sequence_number::peek();  // the number of the next node; the last one is the op's own
  const bool forward = !node || c10::GradMode::is_enabled();
  if (forward && opening != 0 && made != space.sources.last()) {
    if (!space.follower.on_course()) {  // else the record says it
      const int64_t answer = answer_of(ask_source);
      if (answer != kNoAnswer) source = reinterpret_cast<const char*>(answer);
      if (source != nullptr && *source == 0) source = nullptr;
    }
    const Guard guard;
    if (source == nullptr && node) source = space.sources.find(node->sequence_nr());
    space.sources.note(made, source);
  } else if (node) {
    const Guard guard;
    source = space.sources.find(forward ? made - 1 : node->sequence_nr());
  }
  if (!node) source = nullptr;
}

// What the thread reads without an op, if it is not the loop's.
// What code of the thread holds: blocks by their counts, or storages in PyTorch's own memory.
struct Hold {
  std::shared_ptr<int> of_block;
  const StorageImpl* plain = nullptr;
};
thread_local std::vector<Hold> holds;

// An op of a thread that is not the loop's: what it uses stays where it is as long as it runs. Results lie in PyTorch's own
// memory.
void run_for_other(const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  if (about.kind == Kind::kAtom) {
    const size_t count = about.writes.size(), first = stack->size() - count;
    std::shared_ptr<follow::Recipes> recipes;
    {
      const Guard guard;
      if (const Space* space = current) recipes = space->recipes;
    }
    if (recipes && recipes->any()) spare_recipes(*recipes, about, *stack);
    Pinned pinned(true);
    {
      const Guard guard;
      for (size_t i = 0; i < count; ++i)
        each_storage((*stack)[first + i], [&](StorageImpl& storage) {
          if (!is_large(storage.nbytes())) return;
          Block* block = known(storage);
          if (block == nullptr) block = enroll(storage);
          if (block == nullptr) return pinned.add(storage);
          pinned.add(block, about.writes[i]);
          // What has arrived would lack what is written to the window now.
          if (block->state == State::kArrived && about.writes[i]) unplace(*block->space, *block);
          block->here() ? block->space->device.use(block->order) : block->space->device.use_slot(block->order);
        });
    }
    {
      const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
      op.redispatchBoxed(below, stack);
    }
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  op.redispatchBoxed(below, stack);
}

// The first op of a thread that is not the loop's. It passes the fallback by: nothing is moved until it has ended.
struct FirstOp final : at::ObserverContext {
  FirstOp() {
    const Guard guard;
    ++blind;
    ++own_blind;
    ++others_running;
  }
  ~FirstOp() override {
    const Guard guard;
    --blind;
    --own_blind;
    --others_running;
    if (Space* space = current) space->device.note_unseen(false);
    answer();
  }
};
// Finds threads that are not the loop's; from their next op on the fallback sees them.
std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& seen) {
  if (is_left() || c10::impl::tls_is_dispatch_key_included(kKey) || c10::impl::tls_is_dispatch_key_excluded(kKey))
    return nullptr;
  // The loop is paused and this thread will go on with it, or it does a part of an op's work.
  if (is_opener() || at::in_parallel_region()) return nullptr;
  outside_loop = true;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  const auto name = seen.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (op && operator_of(*op).kind != Kind::kAtom) return nullptr;  // it touches no memory, or by ops that are seen
  return std::make_unique<FirstOp>();
}
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // A profiler was started in this thread. A profiler of all threads is noticed at the end of a step.
  if (may_disable_observers && (at::hasThreadLocalCallbacks() || is_other())) enable_observers();
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (others_pin()) {
    const Operator& about = operator_of(op);
    return about.kind == Kind::kParts ? op.redispatchBoxed(below, stack) : run_for_other(op, about, below, stack);
  }
  std::optional<Entered> inside(std::in_place);
  Space* space = current;
  if (space == nullptr) {
    inside.reset();
    leave_thread();
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  const bool quiet = !results_before.empty() && !offer_results();
  const Operator& about = operator_of(op);
  if (about.kind != Kind::kParts && !quiet) find_source(*space);
  if (about.kind == Kind::kParts || about.kind == Kind::kView) inside.reset();  // neither uses the space
  if (about.kind == Kind::kParts) return op.redispatchBoxed(below, stack);
  if (about.kind == Kind::kView) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  if (about.sliced)
    run_in_slices(*space, op, about, below, stack);
  else
    run_atom(*space, op, about, below, stack);
  if (space->stress) {
    const Guard guard;
    if (space->open) evict_everything(*space);
  }
}

// ---- steps, and plans for them ------------------------------------------------------------------------------------

int64_t made_by(const follow::Record& record) {
  int64_t bytes = 0;
  for (const follow::StepStorage& storage : record.storages)
    if (storage.created) bytes += storage.bytes;
  return bytes;
}

void observe_held(Space& space) {
  for (const auto& [offset, block] : space.at)
    if (block->charged()) space.observer.add(follow::Event::kHeld, block->id, block->bytes);
}

// The moments of a step are kept until the next one has ended. False: there are none.
bool end_of_timing(Space& space) {
  if (!Device::kStreams) return false;
  const bool timed = space.timing;
  if (timed) space.moments.push_back(Device::Span{space.device.moment(), space.device.moment()});
  for (const Device::Span& span : space.moments_before) space.device.forget(span);
  space.moments_before = std::exchange(space.moments, {});
  space.timing = space.timed;  // until it is known that no plan is wanted
  return timed;
}

bool end_of_step(Space& space) {
  if (may_disable_observers) disable_observers_unless_used();
  // Steps that make up to so much less than an anchor follow its plan for good.
  constexpr double kClose = 1.15;
  const bool timed = end_of_timing(space);
  std::optional<follow::Record> record = space.recorder.take();
  space.since = std::chrono::steady_clock::now();
  if (!record) return false;
  record->variant = space.recipes->variant();
  const size_t count = record->ops.size();
  std::vector<int32_t> ops;
  follow::Known* known = nullptr;
  try {
    known = space.follower.end_of_step(*record, ops);
  } catch (const std::bad_alloc&) {
    if (!space.follower.active()) space.anchor = nullptr;  // as below
    throw;
  }
  if (!space.follower.active()) space.anchor = nullptr;  // what it belonged to may be gone
  if (known == nullptr) return false;
  if (known->anchors.empty())
    for (Block* block : space.known)
      if (const auto found = known->of_block.find(block->id); found != known->of_block.end())
        known->playing[found->second] = block;
  const follow::Known* before = space.follower.known();
  if (space.anchor != nullptr && space.follower.on_course() && space.follower.next() != 0)
    space.observer.depart(space.follower.next(), follow::Cause::kEnd, name_of(before->usual.ops[space.follower.next()].op), "");
  space.follower.stand_after(*known);
  if (before != space.follower.known()) {
    space.anchor = usual_anchor(*space.follower.known());
    space.due.clear();
  }
  const int64_t size = made_by(*record);
  for (follow::Anchor& anchor : known->anchors)
    if (anchor.size >= size && anchor.size <= kClose * size) {
      anchor.used = space.follower.steps();
      space.timing = space.lacking_times;
      return false;
    }
  if (Device::kStreams) {
    // Each op has its moments, unless one failed or the record is too long; then comes the end.
    space.lacking_times = space.timed && (!timed || space.moments_before.size() != count + 1);
    if (!timed || space.lacking_times) return false;
    const std::vector<int64_t> nanos = space.device.nanos_between(space.moments_before);
    for (size_t i = 0; i < record->nanos.size(); ++i)
      if (const int64_t op = ops.empty() ? static_cast<int64_t>(i) : ops[i]; op >= 0) record->nanos[i] = nanos[op];
  }
  space.proposed = std::move(record);
  space.proposed_for = known->number;
  return true;
}

follow::Known* known_by(Space& space, int64_t number) {
  for (const auto& known : space.follower.all())
    if (known->number == number) return known.get();
  return nullptr;
}

std::vector<int64_t> tell_proposal(Space& space) {
  const follow::Known* known = space.proposed ? known_by(space, space.proposed_for) : nullptr;
  if (known == nullptr) return {};
  const follow::Record& record = *space.proposed;
  std::unordered_map<const void*, int64_t> number;
  space.names.clear();
  std::vector<int64_t> told{space.anchors,
                            static_cast<int64_t>(record.ops.size()),
                            static_cast<int64_t>(record.storages.size()),
                            static_cast<int64_t>(record.leftovers.size()),
                            space.in_bytes,
                            space.in_nanos,
                            space.out_bytes,
                            space.out_nanos};
  for (size_t i = 0; i < record.storages.size(); ++i) {
    const follow::StepStorage& storage = record.storages[i];
    told.insert(told.end(), {storage.bytes, storage.freed, storage.created, known->persistent[i] >= 0});
  }
  for (size_t i = 0; i < record.ops.size(); ++i) {
    const follow::StepOp& op = record.ops[i];
    const auto [found, fresh] = number.emplace(op.op, static_cast<int64_t>(number.size()));
    if (fresh) space.names += static_cast<const c10::FunctionSchema*>(op.op)->name() + "\n";
    told.insert(told.end(), {found->second, record.nanos[i], record.workspaces[i], static_cast<int64_t>(op.touched.size())});
    for (const auto& touch : op.touched) told.insert(told.end(), {touch.place, touch.storage, touch.written, touch.created});
  }
  for (const auto& left : record.leftovers) told.insert(told.end(), {left.storage, left.freed});
  return told;
}

void accept_proposal(Space& space) {
  constexpr size_t kMostAnchors = 8;
  follow::Known* known = space.proposed ? known_by(space, space.proposed_for) : nullptr;
  if (known == nullptr) return;
  if (known->anchors.size() >= kMostAnchors) {
    const auto oldest = std::min_element(known->anchors.begin(), known->anchors.end(),
                                         [](const auto& a, const auto& b) { return a.used < b.used; });
    if (&*oldest == space.anchor) space.anchor = nullptr;
    known->anchors.erase(oldest);
  }
  follow::Anchor anchor{space.anchors++, {}, std::move(space.proposed->requests), made_by(*space.proposed), space.follower.steps(), nullptr};
  for (const follow::StepStorage& storage : space.proposed->storages) anchor.bytes.push_back(storage.bytes);
  known->anchors.push_back(std::move(anchor));
  space.proposed.reset();
}

// 0: such an anchor is gone.
int64_t set_schedule(Space& space, int64_t number, const int64_t* numbers) {
  for (const auto& known : space.follower.all())
    for (follow::Anchor& anchor : known->anchors) {
      if (anchor.number != number) continue;
      auto schedule = std::make_unique<follow::Schedule>();
      for (auto* list : {&schedule->leave, &schedule->fetch, &schedule->write}) {
        list->resize(known->usual.ops.size());
        for (int64_t left = *numbers++; left > 0; --left, numbers += 2)
          list->at(numbers[0]).push_back(static_cast<int32_t>(numbers[1]));
      }
      schedule->offsets.resize(known->uses.size());
      for (int64_t left = *numbers++; left > 0; --left, numbers += 3)
        if (numbers[2] % kPage == 0)
          schedule->offsets.at(numbers[1]).emplace_back(static_cast<int32_t>(numbers[0]), numbers[2]);
      schedule->scratch.assign(known->usual.ops.size(), -1);
      for (int64_t left = *numbers++; left > 0; --left, numbers += 2)
        if (numbers[1] % kPage == 0) schedule->scratch.at(numbers[0]) = numbers[1];
      anchor.schedule = std::move(schedule);
      if (space.anchor == nullptr && space.follower.known() == known.get()) space.anchor = &anchor;
      return 1;
    }
  return 0;
}

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
  new (&mutex) std::recursive_mutex;
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
  at::DataPtr own = stock.load()->allocate(storage.nbytes());
  block.here() ? space.device.use(block.order) : space.device.use_slot(block.order);
  space.device.copy(static_cast<char*>(own.get()), static_cast<const char*>(storage._mutable_data_ptr_no_checks().get()),
                    static_cast<int64_t>(storage.nbytes()));
  block.here() ? space.device.used(block.order) : space.device.used_slot(block.order);
  forget_window(block);
  const at::DataPtr old = storage.set_data_ptr(std::move(own));
  return true;
}

// Ends what nothing follows any more.
void close(Space& space) {
  space.observer.close();
  wait_for_copies(space);
  space.open = false;
  forget_idle(space);
  if (std::exchange(space.seen, false) && --open_spaces == 0) at::disableCallback(*finding);
  if (current == nullptr && ::device::installed() == &allocator) ::device::install(beneath);
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

// How fast copies are, so that the first plan does not guess: on the CPU those tell that are made.
void measure_copies(Space& space) {
  constexpr int64_t kMost = int64_t{16} << 20, kEnough = int64_t{32} << 20;
  follow::Slot slot;
  try {
    slot = space.homes.take(std::min(space.budget, kMost));
  } catch (const c10::OutOfMemoryError&) {  // what does not fit is told when it has to leave
    return;
  }
  char* window = space.homes.window(slot);
  while (space.out_bytes < kEnough) {
    space.out_nanos += space.device.nanos_of_copy(window, space.base, slot.bytes, false);
    space.in_nanos += space.device.nanos_of_copy(window, space.base, slot.bytes, true);
    space.in_bytes += slot.bytes;
    space.out_bytes += slot.bytes;
  }
  space.homes.give(slot);
}

template <class Action>
int64_t guarded(Action&& action) noexcept {
  try {
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

}  // namespace

// Called through ctypes, which knows nothing of exceptions: none leaves a function here. -1: see ``follow_failure``.
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* follow_failure() noexcept { return failure; }

// Takes the dispatch key, which is one for all devices. 0: done; 1: PyTorch uses it for something else.
EXPORT int64_t follow_load(void (*python_kernel)(const char*, const char*, int64_t*)) noexcept {
  return guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (!registrations.empty()) return 0;
    if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) return 1;
    is_python = python_kernel;
    constexpr const char* kWhy = "outofcore follows the ops of a loop";
    registrations.push_back(
        dispatcher.registerFallback(kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), kWhy));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (starts(name.name, "c10d::"))
        registrations.push_back(dispatcher.registerImpl(
            name, kCollectives, c10::KernelFunction::makeFromBoxedFunction<&run_collective>(), {}, nullptr, kWhy));
      // PyTorch's own views pass the fallback by, which would do nothing but take their operands into a list and out again.
      const auto op = starts(name.name, "aten::") ? dispatcher.findSchema(name) : std::nullopt;
      if (op && is_view(op->schema()))
        registrations.push_back(
            dispatcher.registerImpl(name, kKey, c10::KernelFunction::makeFallthrough(), {}, nullptr, kWhy));
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
  guarded([&]() -> int64_t {
    registrations.clear();
    at::removeCallback(*finding);
    return 0;
  });
}

// A space without homes and without memory yet. The descriptors of homes are its own from then on. `verified`: 0: nothing
// is compared; 1: of weights in their files a part; 2: everything. `timed`: steps are to
// be planned.
EXPORT Space* follow_new(int64_t budget, int device, int verified, int timed) noexcept {
  Space* made = nullptr;
  guarded([&]() -> int64_t {
    auto space = std::make_unique<Space>(budget / kPage * kPage, device);
    space->verified = Device::kReadable && verified != 0;
    space->sampled = verified == 1;
    space->timing = space->timed = Device::kStreams && timed != 0;
    space->recipes = std::make_shared<follow::Recipes>(our_pager, smallest);
    made = space.release();
    return 0;
  });
  return made;
}
EXPORT int64_t follow_add_home(Space* space, int file, int direct, int memory, int64_t capacity) noexcept {
  return guarded([&]() -> int64_t {
    space->homes.add(file, direct, memory != 0, capacity);
    return 0;
  });
}

// A step of the loop has ended. 1: a plan is wanted for such steps, see ``follow_proposal``.
EXPORT int64_t follow_end_of_step(Space* space) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
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
  return guarded([&]() -> int64_t {
    const Guard guard;
    const std::vector<int64_t> told = tell_proposal(*space);
    if (static_cast<int64_t>(told.size()) <= capacity) {
      std::copy(told.begin(), told.end(), numbers);
      accept_proposal(*space);
    }
    return static_cast<int64_t>(told.size());
  });
}
// The names of the operators of that step, in the order of their numbers, by lines.
EXPORT const char* follow_names(Space* space) noexcept { return space->names.c_str(); }
// What happened in the last complete step, as numbers: how it is read says observed.py. Returns how many there are; with
// fewer in ``capacity`` nothing is written.
EXPORT int64_t follow_observed(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    const std::vector<int64_t> told = space->observer.tell(space->observed_names, &name_of);
    if (static_cast<int64_t>(told.size()) <= capacity) std::copy(told.begin(), told.end(), numbers);
    return static_cast<int64_t>(told.size());
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
  return guarded([&]() -> int64_t {
    const Guard guard;
    return set_schedule(*space, anchor, numbers);
  });
}

// Begins to follow the calling thread, and whatever threads its ops start. `beside`: also where compiled steps are open,
// none of which runs before ``follow_pause``.
EXPORT int64_t follow_open(Space* space, int beside) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    TORCH_CHECK(current == nullptr, "a loop is followed already");
    start_copiers();
    c10::Allocator* installed = ::device::installed();
    if (installed != &allocator) {
      TORCH_CHECK(beside != 0 || Device::is_stock(installed),
                  "another allocator is installed under PyTorch, such as that of a compiled step; close that first");
      TORCH_CHECK(installed->raw_deleter() != nullptr, "the allocator under PyTorch cannot be wrapped");
      stock = Device::stock_beneath(installed);
      beneath = installed;
      ::device::beneath(allocator, installed);
      ::device::install(&allocator);
      TORCH_CHECK(::device::installed() == &allocator, "PyTorch's allocator was installed with a higher priority");
    }
    space->device.enter();
    living_spaces += spaces.insert(space).second;
    space->since = std::chrono::steady_clock::now();
    space->observer.open();
    if (!space->seen) space->small_before = small_bytes;
    current = space;
    ++openings;
    if (!std::exchange(space->seen, true) && ++open_spaces == 1) at::reenableCallback(*finding);
    return 0;
  });
}
// Gives an open space its arena. 1: done; 0: the device does not have the memory. Of the budget, so many bytes are the
// arena's, of which some are left free, and so many are for segments that small requests of the loop lie in.
EXPORT int64_t follow_reserve(Space* space, int64_t arena, int64_t spare, int64_t segments) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    if (Device::kStreams) {
      space->budget = arena / kPage * kPage;
      space->spare = spare / kPage * kPage;
      space->segments = segments;
      space->segments_before = space->device.bytes_of_segments();
      space->extents = follow::Extents(Device::kAddresses * space->budget);
    }
    try {
      space->base = space->device.reserve(Device::kAddresses * space->budget);
    } catch (const c10::OutOfMemoryError&) {
      return 0;
    }
    const auto base = reinterpret_cast<uintptr_t>(space->base);
    lowest = std::min(lowest.load(), base);
    highest = std::max(highest.load(), base + Device::kAddresses * space->budget);
    if (space->timed) measure_copies(*space);
    return 1;
  });
}
// Follows nothing until it is opened again. Storages stay where they are.
EXPORT int64_t follow_pause(Space* space) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    if (current != space) return 0;
    wait_for_copies(*space);
    // What is done to them meanwhile is not seen.
    if (!space->verified)
      for (Block* block : space->known)
        if (block->here()) block->dirty = true;
    current = nullptr;
    if (::device::installed() == &allocator) ::device::install(beneath);
    return 0;
  });
}
// Brings everything home, and gives the arena's memory to the kernel.
EXPORT int64_t follow_vacate(Space* space) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    evict_everything(*space);
    forget_idle(*space);
    return 0;
  });
}
// Whether a loop is followed now.
EXPORT int follow_current() noexcept { return current.load() != nullptr; }
// Whether the calling thread has opened the loop.
EXPORT int follow_is_opener() noexcept { return is_opener(); }
// Whether the ops of the calling thread are those of a loop that is not paused.
EXPORT int follow_tracked() noexcept { return tracked(); }
// Switches following on or off in the calling thread.
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
  return guarded([&]() -> int64_t {
    if (current == space) {
      to_end = space;
      if (entered == 0) end_asked();
    } else {
      const Guard guard;
      close(*space);
    }
    return 0;
  });
}

// Moves a storage to a home, whosever memory it is. 1: it is followed; 0: it cannot be; 2: nor, since a NumPy array may
// show it.
// With the number of a file (not -1): it is mapped from there.
EXPORT int64_t follow_adopt(StorageImpl* storage, int64_t file, int64_t offset) noexcept {
  at::DataPtr left;  // freed without the lock
  return guarded([&]() -> int64_t {
    const Guard guard;
    Space* space = current;
    if (space == nullptr) return 0;
    Block* block = nullptr;
    const bool has_run = space->history.now() > 0;  // else what ops have allocated belongs to an earlier loop
    const bool counted = has_run && storage->_mutable_data_ptr_no_checks().get_deleter() == &release_small;
    if (!Device::kStreams && !is_large(storage->nbytes()) && !counted && space->small_seen.insert(storage).second)
      space->small_given += static_cast<int64_t>(storage->nbytes());
    if (file >= 0 && is_large(storage->nbytes()) && known(*storage) == nullptr)
      block = adopt_in_file(*space, *storage, space->files.at(file), offset);
    if (block == nullptr) block = block_of(*space, *storage, {.given = true}, left);
    if (block == nullptr) return is_large(static_cast<int64_t>(storage->nbytes())) && has_array(*storage) ? 2 : 0;
    if (block->given < 0) {
      block->given = static_cast<int64_t>(space->given.size());
      space->given.push_back(block);
    }
    return 1;
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
  return guarded([&]() -> int64_t {
    const Guard guard;
    Block* block = known(*storage);
    if (block == nullptr) block = enroll(*storage);
    return block != nullptr && release_from(*block, *storage);
  });
}
// The same for all that a space has.
EXPORT int64_t follow_release_all(Space* space) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    wait_for_copies(*space);
    Owners(std::vector<Block*>(space->known.begin(), space->known.end())).each([](Block& block, StorageImpl& storage) {
      release_from(block, storage);
    });
    return 0;
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
    std::shared_ptr<follow::Recipes> recipes;
    {
      const Guard guard;
      if (const Space* space = current) recipes = space->recipes;
    }
    if (recipes && recipes->any()) recipes->before_write(*storage);
    const Guard guard;
    // Between the calls of a step that is followed nothing is current, and what it has may have to stay all the same.
    Space* space = current;
    const bool loops = space == nullptr || is_opener();
    Block* block = space != nullptr && loops ? block_of(*space, *storage) : nullptr;
    if (block == nullptr) block = known(*storage);
    if (block == nullptr) block = enroll(*storage);
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
    Block* block = known(*storage);
    if (block == nullptr) block = enroll(*storage);
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
  return guarded([&]() -> int64_t {
    const Guard guard;
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
  return guarded([&]() -> int64_t {
    const Guard guard;
    evict_everything(*space);
    return 0;
  });
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
  return guarded([&]() -> int64_t {
    TORCH_CHECK(mode >= 0 && mode <= 3, "there is no mode ", mode);
    const Guard guard;
    space->recipes->mode = static_cast<follow::Recompute>(mode);
    if (space->recipes->mode == follow::Recompute::kNoting) {
      space->recipes->forget_notes();
      space->timing = space->timed;
    }
    return 0;
  });
}
// Names the storages to make again, by their ids in the history; from the next step on it is those that play their part.
EXPORT int64_t follow_recompute_set(Space* space, const int64_t* ids, int64_t count) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    space->recipes->choose(ids, count);
    return 0;
  });
}
// What was noted, as far as there is room: of each storage its id, bytes, nanoseconds of the ops that made it (-1: they
// cannot be run again), whether autograd saved it, and the number of storages that they start from, then those. Returns
// how many numbers there are.
EXPORT int64_t follow_notes(Space* space, int64_t* numbers, int64_t capacity) noexcept {
  return guarded([&]() -> int64_t {
    const Guard guard;
    int64_t count = 0;
    const auto tell = [&](int64_t number) {
      if (count < capacity) numbers[count] = number;
      ++count;
    };
    std::vector<int64_t> nanos;  // of the ops of the step that was noted
    if (space->timed && !space->moments_before.empty()) nanos = space->device.nanos_between(space->moments_before);
    for (const auto& [id, note] : space->recipes->notes()) {
      int64_t nanoseconds = note.nanoseconds;
      if (Device::kStreams && nanoseconds >= 0) {
        nanoseconds = 0;
        for (const size_t place : note.places)
          if (nanoseconds >= 0) nanoseconds = place < nanos.size() ? nanoseconds + nanos[place] : -1;
      }
      for (const int64_t number : {id, note.bytes, nanoseconds, static_cast<int64_t>(note.saved),
                                   static_cast<int64_t>(note.inputs.size())})
        tell(number);
      for (const int64_t input : note.inputs) tell(input);
    }
    return count;
  });
}
// What autograd is to keep in place of a tensor that it has saved; null: the tensor.
EXPORT follow::Packed* follow_pack(c10::TensorImpl* tensor) noexcept {
  follow::Packed* packed = nullptr;
  guarded([&]() -> int64_t {
    const at::Tensor held(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
    std::shared_ptr<follow::Recipes> recipes;
    {
      const Guard guard;
      if (const Space* space = current) recipes = space->recipes;
    }
    if (recipes) packed = recipes->pack(held);
    return 0;
  });
  return packed;
}
// The tensor, for the caller to free; null: see ``follow_failure``.
EXPORT at::Tensor* follow_unpack(const follow::Packed* packed) noexcept {
  at::Tensor* tensor = nullptr;
  guarded([&]() -> int64_t {
    tensor = new at::Tensor(packed->recipes->unpack(*packed));
    return 0;
  });
  return tensor;
}
EXPORT void follow_drop(follow::Packed* packed) noexcept { delete packed; }

// Writes as many counters as there is room for; returns how many there are.
EXPORT int64_t follow_counters(const Space* space, int64_t* counters, int64_t capacity) noexcept {
  const Guard guard;
  for (int64_t i = 0; i < std::min<int64_t>(kCounters, capacity); ++i) counters[i] = space->counters[i];
  const auto tell = [&](Counter counter, int64_t value) {
    if (counter < capacity) counters[counter] = value;
  };
  tell(kHomePeak, space->homes.most_used());
  tell(kSmall, space->small_given + std::max<int64_t>(small_bytes - space->small_before, 0));
  tell(kSmallPeak, space->small_given + space->small_peak);
  tell(kRecipes, space->recipes->made);
  tell(kReruns, space->recipes->reruns);
  tell(kUnkeptBytes, space->recipes->unkept_bytes);
  tell(kRerunMicros, space->recipes->nanoseconds / 1000);
  return kCounters;
}
