// The types of an eager loop: its blocks, its space, and process-wide state. The headers from here to steps.h form
// paging.cpp: one translation unit that exports only the functions at its end.

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
using follow::notify_change;
using follow::change_signal;
using follow::is_large;
using follow::kKey;
using follow::deferred_drops;
using follow::mutex;
using follow::smallest;
using follow::wait_for_change;
using outofcore::kPage;
using outofcore::sum_of;
using outofcore::whole_pages;

// Every thread dispatches collectives through this key, which has no kernel for them.
constexpr DispatchKey kCollectives = DispatchKey::BackendSelect;

// In the order of the fields of `LoopStats` in stats.py.
enum Counter {
  kOps,          // that touched a large storage
  kExpectedOps,  // of these, ops that the history predicted
  kFetches,
  kFetchedBytes,
  kFetchesAhead,         // fetches that started before an op needed them
  kEvictions,
  kWrites,               // evictions of changed bytes
  kWrittenBytes,
  kUnseenWrites,         // storages assumed unchanged that had changed
  kAdoptions,
  kAdoptedBytes,
  kBytesInUse,    // of the arena, current
  kPeakBytes,     // of the arena
  kBytesEvicted,     // of evicted storages, current
  kFixed,         // storages with a fixed address
  kOutsideBytes,  // storages of 64 KiB and more of threads outside the loop
  kPeakOutsideBytes,
  kUntrackedUses,      // operands used in place: see `block_of`
  kAtHomeBytes,  // operands of the loop's ops used at their home
  kTransferMicroseconds,
  kPeakHomeBytes,       // of the homes
  kPlannedOps,          // ops that followed a plan
  kUnplannedEvictions,  // evictions outside the plan while one was followed
  kDepartures,          // deviations from a plan
  kRecipes,             // storages to be recomputed instead of saved by autograd
  kReruns,              // recomputations
  kDroppedBytes,         // storages freed because they can be recomputed
  kRerunMicroseconds,   // time of recomputations
  kFileBytes,           // storages with the file they were mapped from as home
  kSmallBytes,          // smaller storages of the models and of the loop's ops
  kPeakSmallBytes,
  kPeakTotalBytes,  // all storages of 64 KiB and more, resident and evicted
  kExceedances,     // ops that were allowed to exceed the budget
  kArenaBytes,      // memory of the arena: used, or free and not returned to the system
  kCounters
};

struct Space;

// Handling of ops that need more than the budget. As `Excess` in space.py.
enum class Excess : int {
  kRefused,
  kAllowed,   // the op may exceed the budget
  kMeasured,  // as kAllowed; each op's need is recorded
};

// Where a block's bytes are, and the address in its storage.
enum class BlockState : uint8_t {
  kEvicted,     // at home; the storage points to the window
  kFetching,   // being copied to the arena; window
  kFetched,  // copied; window until an op of the loop uses the block
  kResident,     // in the arena; the storage, if any, points there
};
// All states but kEvicted use arena memory. A resident block that is being written to its home stays resident until
// then.
constexpr bool may_follow(BlockState before, BlockState after) {
  switch (before) {
    case BlockState::kEvicted: return after == BlockState::kFetching || after == BlockState::kResident;
    case BlockState::kFetching: return after == BlockState::kFetched || after == BlockState::kEvicted;
    case BlockState::kFetched: return after == BlockState::kResident || after == BlockState::kEvicted;
    case BlockState::kResident: return after == BlockState::kEvicted;
  }
  return false;
}

struct Sums {
  uint64_t all = 0, compared = 0;
};
enum class ChecksumScope {
  kNothing,
  kCompared,
  kAll,  // the checksum is unknown, or unobserved code may have written there
};

struct Block : outofcore::CopyThread::Job {
  Space* space = nullptr;
  std::optional<follow::WeakStorage> storage;  // none: memory not yet owned by a storage
  int64_t id = 0;
  int64_t bytes = 0, storage_bytes = 0;  // page-aligned; of the storage
  int64_t offset = -1;                   // in the arena; -1: none
  BlockState state = BlockState::kEvicted;
  bool writing = false;         // a concurrent copy to its home is in progress
  follow::Slot slot;
  bool dirty = true;           // the bytes at home, if any, are outdated
  bool fixed = false;          // its address was taken and must not change, resident or evicted
  bool is_immovable = false;   // used at any time by another thread: it is no longer moved
  std::shared_ptr<int> holds;  // current reads without an op by code of other threads; null: never any
  bool is_freed = false;       // freed while it was held
  bool owner_dying = false;    // its storage is being destroyed on another thread, or has given its memory away
  int pins = 0;                // ops that use it
  int other_pins = 0;          // of these, ops of other threads
  int works = 0;               // collectives that may read or write it
  int64_t last_use = 0;
  int64_t twin = -1;     // the storage in the history with its role
  int64_t role_in = -1;  // the step kind in which it has a role that changes from step to step
  int32_t role = -1;
  // The cached role of a persistent storage, and the version of the roles it was looked up in.
  mutable int32_t cached_role = -1;
  mutable int64_t cached_role_version = -1;
  bool released = false;        // the plan allows its eviction
  int64_t managed_index = -1;   // position among the user's managed storages
  Sums sums;                    // valid unless `dirty`
  bool touched = false;         // unobserved code may have written to its window
  int64_t version = 0;          // number of writes
  bool is_early = false;        // fetched ahead and not used yet
  bool copy_succeeded = false;  // result of the concurrent copy
  bool copy_waited = false;     // an op waited for the copy
  int64_t copied_version = 0;
  ChecksumScope checksum_scope = ChecksumScope::kNothing;
  Sums copied_sums;
  std::shared_ptr<follow::Origin> origin;  // its lineage, if recipes need it
  follow::Rank rank;
  [[no_unique_address]] Device::Order order;
  int64_t copy_start = 0, copy_end = 0;

  bool is_resident() const { return state == BlockState::kResident; }
  bool is_charged() const { return state != BlockState::kEvicted; }  // counts as memory in use
  bool is_copying() const { return state == BlockState::kFetching || writing; }
  // It is in use and must outlive its storage.
  bool is_held() const { return pins > 0 || works > 0 || is_copying(); }
  void set_state(BlockState next) {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(may_follow(state, next), "a block cannot go from ", int(state), " to ", int(next));
    state = next;
  }
};

// The arena and homes of one loop. It lives until its last storage is gone.
struct Space {
  Space(int64_t budget_bytes, int device_index, Excess excess_allowed)
      : limit(budget_bytes),
        budget(budget_bytes),
        excess(excess_allowed),
        device(device_index),
        extents(addresses()) {}

  int64_t limit;                         // the user's budget; `budget` is the arena's part
  int64_t budget;
  Excess excess;
  int64_t overrun = 0;                   // bytes by which the running op may exceed the budget
  int64_t total = 0;                     // all storages, resident and evicted
  follow::Refusal need;                  // largest need of an op recorded so far
  bool need_lacks_source = false;        // the source line of that op is not known yet
  int64_t spare = 0;                     // free bytes of the arena, against fragmentation
  int64_t segments = 0;                  // allowed for small requests in PyTorch's allocator
  int64_t segments_before = 0;           // in use there before the loop
  bool can_rerun = false;                // the running op can be rerun
  bool needs_rerun = false;              // a request found no hole despite enough free bytes
  std::atomic<bool> small_in_arena{false};  // the segments are used up: the arena serves small requests
  std::atomic<int64_t> small_requested{0};  // bytes requested since the last check
  int64_t small_before = 0;              // `small_bytes` when the loop was opened
  std::atomic<int64_t> small_peak{0};    // maximum of `small_bytes` minus that
  int64_t small_managed = 0;             // small storages that the user has put under the budget
  std::unordered_set<const StorageImpl*> counted_small;  // these storages
  Device device;
  char* base = nullptr;  // null: not reserved yet
  follow::Extents extents;
  Device::Homes homes;
  follow::History history;
  follow::Recorder recorder;
  follow::Follower follower;
  follow::Observer observer;
  follow::Sources sources;
  follow::SizeBucket* bucket = nullptr;           // its plan is followed
  int64_t fit_score = 0;  // storages of this step with sizes close to the plan's, minus the others
  bool is_fragmented = false;                     // memory of the core was returned piecemeal
  int64_t collapses = 0, next_collapse_step = 0;  // collapses into huge pages; step of the next one
  std::deque<int32_t> due_fetches;                // storages of the record to fetch
  std::vector<follow::Request> requests;          // of the running op
  std::vector<std::pair<int64_t, int64_t>> planned_requests;  // bytes and planned offset (-1: anywhere)
  std::optional<follow::Record> proposal;         // a step to plan
  int64_t proposal_kind = -1;                     // the number of its kind
  std::string operator_names;                     // of that step
  std::string observed_names;                     // of the observed step
  int64_t bucket_count = 0;                       // created so far
  int64_t step_total = 0;                         // maximum of `total` in the current step
  std::chrono::steady_clock::time_point last_op_end = std::chrono::steady_clock::now();  // end of the last op
  int64_t transfer_micros_before = 0;             // transfer microseconds until then
  int64_t in_nanos = 1, out_nanos = 1, in_bytes = 0, out_bytes = 0;  // of all copies
  std::map<int64_t, Block*> by_offset;
  follow::Ranking<Block> ranking;  // of the same blocks
  int64_t ranked_until = 0;      // op at which all are ranked again,
  const void* ranked_by = nullptr;  // also if the source of predictions changes
  std::unordered_set<Block*> owned_blocks;
  std::vector<Block*> managed;                  // storages that the user put under the budget, in order; null: freed
  size_t next_managed = 0;                      // index after the last one used
  std::unordered_map<int64_t, Block*> by_twin;  // by storage of the history: its counterpart now
  std::vector<Block*> ended_copies;             // concurrent copies not yet in effect
  int64_t copying_in = 0, copying_out = 0;      // concurrent copies in progress
  int64_t early_bytes = 0;                      // bytes of early blocks
  bool core_counted = false;                    // see `count_core`
  int64_t lookahead_position = -1;              // position in the history up to which fetches were issued
  int64_t ops_until_write_scan = 0;             // ops until blocks to write are selected again
  bool has_evicted = false;                     // whether the room was ever insufficient
  int64_t bytes_in_use = 0;                     // of the arena
  int64_t next_id = 0;
  int64_t block_count = 0;            // of all kinds
  bool open = true;
  bool observes_threads = false;  // this loop makes ops of all threads observed
  bool is_inherited = false;      // this process is a child forked by the owner
  bool verifies = true;           // verify bytes assumed unchanged and bytes from a disk
  bool samples = false;           // verify a part of weights mapped from files; otherwise bytes from host memory, too
  bool stress = false;
  bool copies_ahead = true;             // make overlapped copies
  int64_t counters[kCounters] = {};
  std::shared_ptr<follow::Recipes> recipes;
  std::vector<std::shared_ptr<const follow::ForeignFile>> files;  // storages were mapped from these
  // On a GPU: whether to time steps, and whether the current one is timed. The arrival and start of its ops, and those
  // of the previous step with its end.
  bool timed = false, timing = false;
  bool lacks_times = false;    // a step to plan was not timed
  std::vector<Device::Span> moments, moments_before;
  bool has_unseen_writes = false;           // unobserved code may have written to resident blocks

  ~Space() { device.unreserve(base, addresses()); }
  char* address(const Block& block) const { return base + block.offset; }
  int64_t small() const { return whole_pages(small_managed + small_peak.load(std::memory_order_relaxed)); }
  // Bytes of the budget that small storages leave to the arena. The peak of small storages stays reserved for them.
  int64_t room() const { return budget + overrun - spare - small(); }
  // End of the offsets that plans use.
  int64_t core() const { return room() / kPage * kPage; }
  int64_t addresses() const {
    return Device::kAddresses * budget + (excess == Excess::kRefused ? 0 : Device::addresses_to_grow());
  }
};

std::unordered_set<Space*>& spaces = *new std::unordered_set<Space*>;
std::atomic<Space*> current{nullptr};
// Requests that the stock allocator served in place of an arena.
struct Outside {
  int64_t bytes;
  Space* space;  // counted in its budget; null: not counted
};
std::unordered_map<void*, Outside>& outside = *new std::unordered_map<void*, Outside>;  // by address
std::atomic<int64_t> outside_count{0};
// Smaller storages that ops of loops have requested, by usable size.
std::atomic<int64_t> small_bytes{0};
// Returns whether an operator's kernel is written in Python.
void (*is_python)(const char* name, const char* overload, int64_t* answer) = nullptr;

// The result of a Python callback that Ctrl-C interrupted.
constexpr int64_t kNoAnswer = -1;
// Calls a Python callback, which writes its result through its last argument (see native_callback in compiling.py).
template <class Function, class... Given>
int64_t answer_of(Function* function, Given... given) {
  int64_t answer = kNoAnswer;
  locks::check(locks::kPython, false);
  function(given..., &answer);
  if (answer == kNoAnswer) raise(SIGINT);  // Python handles it after this library returns
  return answer;
}

}  // namespace
