// What a loop is to the native code: its blocks, its space, and what there is once in a process.
//
// This header and those built on it, one on the other up to steps.h, are parts of paging.cpp: one translation unit, of
// which only the functions at its end are seen from outside.

#pragma once

#ifdef OUTOFCORE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif
#include "../allocator.h"
#include "../borders.h"
#include "../checksum.h"
#include "../copy_thread.h"
#include "extents.h"
#include "history.h"
#include "homes.h"
#include "lock.h"
#include "observed.h"
#include "passing.h"
#include "ranking.h"
#include "recipes.h"
#include "record.h"
#include "refusals.h"
#include "sources.h"

#include <c10/core/Allocator.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::StorageImpl;
using allocation::stock;
using follow::Device;
using follow::Guard;
using follow::StoragePointer;
using follow::answer;
using follow::answered;
using follow::is_large;
using follow::kKey;
using follow::let_go;
using follow::mutex;
using follow::smallest;
using follow::wait_for_answer;
using outofcore::kPage;
using outofcore::sum_of;
using outofcore::whole_pages;

// Every thread passes it below that one, and collectives have no kernel there.
constexpr DispatchKey kCollectives = DispatchKey::BackendSelect;

// In the order of the fields of ``LoopStats`` in stats.py.
enum Counter {
  kOps,                  // that touched something large
  kExpectedOps,          // of them, where the history expected them
  kFetches,
  kFetchedBytes,
  kFetchesAhead,         // of the fetches, those that were begun before an op needed them
  kEvictions,
  kWrites,               // of them, those whose bytes had changed
  kWrittenBytes,
  kUnseenWrites,         // storages that were taken to be unchanged and were not
  kAdoptions,
  kAdoptedBytes,
  kBytesInUse,           // bytes of the arena now
  kPeakBytes,            // and at the most
  kAwayBytes,            // bytes of storages that are away now
  kFixed,                // storages whose address somebody took
  kOutsideBytes,         // bytes of 64 KiB and more that threads outside of the loop hold
  kPeakOutsideBytes,
  kForeign,              // operands that were used where they are: see ``block_of``
  kAtHomeBytes,          // bytes of operands that were used at their home, by ops of the loop
  kTransferMicroseconds,
  kPeakHomeBytes,        // bytes of the homes at the most
  kPlannedOps,           // ops that came where a plan has them
  kUnplannedEvictions,   // evictions that no plan had foreseen, while one was followed
  kDepartures,           // times the loop left what a plan has
  kRecipes,              // storages that autograd does not keep, but can make again
  kReruns,               // times that one was made again
  kUnkeptBytes,          // of storages that went for that
  kRerunMicroseconds,    // the loop spent so long on making them again
  kFileBytes,            // of storages whose home is the file that they were mapped from
  kSmallBytes,           // bytes of smaller storages, of the models and of what the loop's ops have allocated
  kPeakSmallBytes,
  kPeakTotalBytes,       // bytes of all storages of 64 KiB and more, resident and evicted, at the most
  kExceedances,          // times that an op was allowed more than the budget
  kArenaBytes,           // memory of the arena: in use, or free and not given back to the system
  kCounters
};

struct Space;

// What happens where an op needs more than the budget. As ``Excess`` in space.py.
enum class Excess : int {
  kRefused,   // the op is refused
  kAllowed,   // the op may exceed the budget
  kMeasured,  // likewise, and the need of each op is noted
};

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

// Of what is at home: of all bytes, and of those that are compared when they come back.
struct Sums {
  uint64_t all = 0, compared = 0;
};
// What is summed of bytes that come from a home.
enum class Summed {
  kNothing,
  kCompared,
  kAll,  // since the sums are not known, or code that nobody sees may have written there
};

struct Block : outofcore::CopyThread::Job {
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
  Sums sums;                    // while it is not dirty
  bool touched = false;         // code that nobody sees may have written to it there since
  int64_t version = 0;          // how often it was written
  bool early = false;           // it was brought in before an op needed it, and none has used it yet
  bool copied = false;          // the copy beside the ops came off
  bool waited = false;          // somebody waited for it
  int64_t copied_version = 0;
  Summed summed = Summed::kNothing;
  Sums copied_sums;
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
  Space(int64_t budget_bytes, int device_index, Excess excess_allowed)
      : limit(budget_bytes),
        budget(budget_bytes),
        excess(excess_allowed),
        device(device_index),
        extents(addresses()) {}

  int64_t limit;                         // what the user gave, of which so much is the arena's:
  int64_t budget;
  Excess excess;
  int64_t grown = 0;                     // bytes by which the op that runs may exceed the budget
  int64_t total = 0;                     // bytes of all storages, resident and evicted
  follow::Refusal need;                  // of the op that needs the most at once, as far as needs are noted
  bool unplaced = false;                 // whether the user's line of that op is not known yet
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
  int64_t fitting = 0;                   // storages in this step: close to the plan in size, minus not close
  bool torn = false;                     // memory of the core was given back in pieces
  int64_t collapses = 0, collapses_from = 0;  // how often it was put together, and from which step on it is next
  std::deque<int32_t> due;               // storages of the record that are to be fetched
  std::vector<follow::Request> requests;  // of the op that runs
  std::vector<std::pair<int64_t, int64_t>> wanted;  // bytes and planned offsets of what it is to ask for; -1: anywhere
  std::optional<follow::Record> proposed;  // a step that a plan is wanted for
  int64_t proposed_for = -1;             // the number of the record
  std::string names;                     // of its operators
  std::string observed_names;            // of operators of what was observed
  int64_t anchors = 0;                   // there ever were
  int64_t step_total = 0;                // the most that ``total`` was in the step under way
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
  bool verified = true;          // whether what is taken to be unchanged is compared, and what comes from a disk
  bool sampled = false;          // and of weights still in their files a part; else also what comes from host memory
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

  ~Space() { device.unreserve(base, addresses()); }
  char* address(const Block& block) const { return base + block.offset; }
  int64_t small() const { return whole_pages(small_given + small_peak.load(std::memory_order_relaxed)); }
  // Bytes of the budget that small storages leave to the arena. What they have taken once, they will take again.
  int64_t room() const { return budget + grown - spare - small(); }
  // Where the addresses end that plans speak of.
  int64_t core() const { return room() / kPage * kPage; }
  // Bytes of addresses of the arena.
  int64_t addresses() const {
    return Device::kAddresses * budget + (excess == Excess::kRefused ? 0 : Device::addresses_to_grow());
  }
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
// Decides whether the kernel of an operator is written in Python.
void (*is_python)(const char* name, const char* overload, int64_t* answer) = nullptr;

// The answer of a Python callback that Ctrl-C interrupted.
constexpr int64_t kNoAnswer = -1;
// Calls a Python callback, which writes its answer through its last argument (see native_callback in compiling.py).
template <class Function, class... Given>
int64_t answer_of(Function* function, Given... given) {
  int64_t answer = kNoAnswer;
  locks::check(locks::kPython, false);
  function(given..., &answer);
  if (answer == kNoAnswer) raise(SIGINT);  // Python handles it after this library returns
  return answer;
}

}  // namespace
