// Serves the requests of compiled steps at planned addresses; called by allocator.h. In a scope, a thread's k-th
// request gets the k-th planned address. An unplanned request is served from the op's workspace, else by the stock
// allocator within the reserve. Beyond the reserve, the arena's lender (demand_eviction.py) makes room, lets the
// request exceed the budget, or refuses it. Called through ctypes with the GIL; ops may run without it.

#include "allocator.h"
#include "borders.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

using allocation::mutex;
using allocation::stock;

// In the order of the fields of `ArenaCounters` in arena.py.
enum Counter {
  kServed,
  kSmall,
  kLarge,
  kLargeBytes,
  kLiveBytes,
  kPeakLiveBytes,
  kRefused,
  kUnclaimed,
  kLastScope,
  kLent,
  kLentLiveBytes,
  kBeyond,
  kBeyondBytes,
  kCounters
};

// Answers a request that exceeds the reserve with an address (in the arena or elsewhere) or one of `Answer`.
using Lender = void (*)(int64_t bytes, int64_t scope, int64_t* answer);
enum Answer : int64_t {
  kRefuse = 0,
  kExceed = 1,  // the stock allocator serves it, beyond the budget
};

struct Arena {
  // Both 0 if unused. Readers take no lock, so `end` is set last and cleared first (see `holds`).
  std::atomic<uintptr_t> base{0}, end{0};
  std::atomic<int64_t> holders{0};  // the owner, and each planned piece in use
  int64_t large = 0;                // smallest unplanned request that counts against the reserve
  std::atomic<int64_t> reserve{0};
  std::atomic<Lender> lender{nullptr};
  std::atomic<int64_t> counters[kCounters] = {};
};
struct Request {
  int64_t bytes;
  char* address;      // null: optional request (a library's cache), served by the stock allocator
  bool reuses;        // overlaps an earlier request of the scope
  int64_t in_use_in;  // the visit in which its piece is in use; 0: not in use
};
struct Event {
  int64_t freed, bytes, pointer;
};
static_assert(sizeof(Event) == 3 * sizeof(int64_t), "Python reads a log as three numbers for each event");
struct Log {
  std::vector<Event> events;
  bool lost = false;  // whether memory ran out for an event

  void add(const Event& event) noexcept {
    try {
      events.push_back(event);
    } catch (...) {  // a deleter must not throw
      lost = true;
    }
  }
};
struct Piece {
  char* address;
  int64_t bytes;
};
struct Table {
  Arena* arena;
  std::vector<int64_t> first;
  std::vector<Request> requests;
  std::vector<Piece> workspaces;     // by scope; may be empty
  std::vector<Piece> unplanned;      // workspace pieces in use in this visit
  Log visit;                         // events of the current scope
  bool surprised = false;            // whether a large unplanned request occurred
  std::map<int64_t, Log> surprises;  // by scope: its last visit with such a request
};
struct Thread {
  Request* first;
  Request* next;
  Request* end;
  Arena* arena;  // null outside scopes
  int64_t scope;
  int64_t visit;  // number of the stay in a scope, from 1
  Table* table;   // null outside scopes
  Log* log;
  bool unbounded;  // whether the stock allocator serves and counts its requests
};
struct OffPlan {
  Arena* arena;
  int64_t bytes;
};

constexpr int kArenas = 256;
Arena arenas[kArenas];
std::atomic<int> arenas_used{0};  // arenas at or above this index were never used
thread_local Thread thread{};     // trivially destructible: tensors may be freed while a thread ends
std::atomic<int64_t> visits{0};

// Never destroyed: tensors outlive static destructors.
std::unordered_map<void*, OffPlan>& off_plan = *new std::unordered_map<void*, OffPlan>;
std::unordered_map<void*, OffPlan>& lent = *new std::unordered_map<void*, OffPlan>;  // by lenders
std::atomic<int64_t> off_plan_live{0}, lent_live{0};

void add(Arena& arena, Counter counter, int64_t count) {
  arena.counters[counter].fetch_add(count, std::memory_order_relaxed);
}

void drop_holder(Arena& arena) {
  if (arena.holders.fetch_sub(1) != 1) return;
  const std::lock_guard guard(mutex);
  const uintptr_t end = arena.end.exchange(0);
  const uintptr_t base = arena.base.exchange(0);
  arena.lender = nullptr;
  device::release_arena(stock.load(), base, end);
}

// Reads the base again because another arena may open in between.
bool holds(const Arena& arena, uintptr_t address) {
  const uintptr_t base = arena.base.load();
  return address >= base && address < arena.end.load() && base == arena.base.load();
}

template <class A, class B>
bool overlap(const A& a, const B& b) {
  return a.address != nullptr && b.address != nullptr && a.address < b.address + b.bytes &&
         b.address < a.address + a.bytes;
}

// Whether the request's bytes overlap a piece in use: the op deviates from its plan.
bool overlaps_used(const Thread& t, const Request& request) {
  for (const Piece& piece : t.table->unplanned)
    if (overlap(piece, request)) return true;
  if (!request.reuses) return false;
  for (const Request* earlier = t.first; earlier != &request; ++earlier)
    if (earlier->in_use_in == t.visit && overlap(*earlier, request)) return true;
  return false;
}

void mark_free(Thread& t, const void* pointer) {
  for (Request* request = t.next; request-- != t.first;) {
    if (request->address == pointer && request->in_use_in == t.visit) {
      request->in_use_in = 0;
      return;
    }
  }
  auto& pieces = t.table->unplanned;
  for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
    if (piece->address == pointer) {
      pieces.erase(piece);
      return;
    }
  }
}

// Removes a lent piece. Returns null if it is not one.
Arena* take_back_lent(void* pointer) {
  const std::lock_guard guard(mutex);
  const auto entry = lent.find(pointer);
  if (entry == lent.end()) return nullptr;
  Arena* arena = entry->second.arena;
  add(*arena, kLentLiveBytes, -entry->second.bytes);
  lent.erase(entry);
  --lent_live;
  return arena;
}

// Returns free bytes of the op's workspace, for requests in another order than planned, or null.
void* from_workspace(Thread& t, int64_t bytes) {
  constexpr int64_t kAlign = 4096;
  Table& table = *t.table;
  if (table.workspaces.empty()) return nullptr;
  const Piece& whole = table.workspaces[static_cast<size_t>(t.scope)];
  Piece fresh{whole.address, bytes};
  for (bool moved = true; moved;) {
    moved = false;
    const auto skip_past = [&](const auto& earlier) {
      if (!overlap(fresh, earlier)) return;
      const auto end = reinterpret_cast<uintptr_t>(earlier.address) + static_cast<uintptr_t>(earlier.bytes);
      fresh.address = reinterpret_cast<char*>((end + kAlign - 1) / kAlign * kAlign);
      moved = true;
    };
    for (const Request* earlier = t.first; earlier != t.end; ++earlier)
      if (earlier->in_use_in == t.visit) skip_past(*earlier);
    for (const Piece& earlier : table.unplanned) skip_past(earlier);
  }
  if (whole.address == nullptr || fresh.address + bytes > whole.address + whole.bytes) return nullptr;
  table.unplanned.push_back(fresh);
  t.arena->holders.fetch_add(1, std::memory_order_relaxed);
  add(*t.arena, kServed, 1);
  return fresh.address;
}

// Serves a request from the stock allocator and counts it while it lives. The mutex must be held.
void* serve_counted(Arena& arena, int64_t bytes) {
  void* pointer = stock.load()->raw_allocate(bytes);
  try {
    off_plan[pointer] = {&arena, bytes};
  } catch (...) {
    stock.load()->raw_deallocate(pointer);
    throw;
  }
  ++off_plan_live;
  const int64_t live = arena.counters[kLiveBytes] += bytes;
  if (live > arena.counters[kPeakLiveBytes]) arena.counters[kPeakLiveBytes] = live;
  return pointer;
}

void* serve_off_plan(Thread& t, int64_t bytes) {
  Arena& arena = *t.arena;
  if (t.unbounded) {
    const std::lock_guard guard(mutex);
    void* pointer = serve_counted(arena, bytes);
    if (arena.counters[kLiveBytes] + arena.counters[kLentLiveBytes] > arena.reserve) {
      add(arena, kBeyond, 1);
      add(arena, kBeyondBytes, bytes);
    }
    return pointer;
  }
  if (bytes < arena.large) {
    add(arena, kSmall, 1);
    return stock.load()->raw_allocate(bytes);
  }
  if (void* pointer = from_workspace(t, bytes); pointer != nullptr) return pointer;
  arena.counters[kLastScope] = t.scope;
  t.table->surprised = true;
  {
    const std::lock_guard guard(mutex);
    if (arena.counters[kLiveBytes] + arena.counters[kLentLiveBytes] + bytes <= arena.reserve) {
      void* pointer = serve_counted(arena, bytes);
      add(arena, kLarge, 1);
      add(arena, kLargeBytes, bytes);
      return pointer;
    }
  }
  // The lender evicts, waits for copies and runs Python, so no lock is held.
  int64_t answer = kRefuse;
  if (const Lender lender = arena.lender.load(); lender != nullptr) lender(bytes, t.scope, &answer);
  if (answer == kRefuse) {
    add(arena, kRefused, 1);
    // Log it as freed at once, so that the next plan includes it.
    constexpr int64_t kNowhere = 8;
    t.table->visit.add({0, bytes, kNowhere});
    t.table->visit.add({1, 0, kNowhere});
    TORCH_CHECK(false, "outofcore arena: scope ", t.scope, " requested ", bytes, " bytes that are not planned; with ",
                arena.counters[kLiveBytes].load(), " such bytes in use this exceeds the reserve of ",
                arena.reserve.load(), " bytes");
  }
  const std::lock_guard guard(mutex);
  add(arena, kLarge, 1);
  add(arena, kLargeBytes, bytes);
  if (answer == kExceed) {
    add(arena, kBeyond, 1);
    add(arena, kBeyondBytes, bytes);
    return serve_counted(arena, bytes);
  }
  auto* pointer = reinterpret_cast<void*>(answer);
  lent[pointer] = {&arena, bytes};
  ++lent_live;
  arena.holders.fetch_add(1, std::memory_order_relaxed);
  add(arena, kLent, 1);
  add(arena, kLentLiveBytes, bytes);
  return pointer;
}

void* serve(Thread& t, int64_t bytes) {
  if (t.unbounded) return serve_off_plan(t, bytes);
  for (Request* request = t.next; request != t.end; ++request) {
    if (request->bytes == bytes && !overlaps_used(t, *request)) {
      t.next = request + 1;
      if (request->address == nullptr) return stock.load()->raw_allocate(bytes);
      request->in_use_in = t.visit;
      t.arena->holders.fetch_add(1, std::memory_order_relaxed);
      add(*t.arena, kServed, 1);
      return request->address;
    }
    if (request->address != nullptr) break;
  }
  return serve_off_plan(t, bytes);
}

// Ends the thread's visit to a scope. Its log is kept if a large unplanned request occurred.
void leave(Thread& t) noexcept {
  Table* table = t.table;
  t.arena = nullptr;
  t.table = nullptr;
  if (table == nullptr) return;
  try {
    if (table->surprised && !table->visit.lost) table->surprises[t.scope] = table->visit;
  } catch (...) {  // out of memory: drop the log
    table->surprises.erase(t.scope);
  }
  table->surprised = false;
  table->visit.events.clear();
  table->visit.lost = false;
  table->unplanned.clear();
}

const borders::Border kBorders[] = {
    ENUM("Counter", Counter, kServed, kSmall, kLarge, kLargeBytes, kLiveBytes, kPeakLiveBytes, kRefused, kUnclaimed,
                             kLastScope, kLent, kLentLiveBytes, kBeyond, kBeyondBytes),
    ENUM("Answer", Answer, kRefuse, kExceed),
};

}  // namespace

void* compiled_step::serve(int64_t bytes) {
  Thread& t = thread;
  if (t.arena == nullptr && t.log == nullptr) return nullptr;
  void* pointer = t.arena != nullptr ? ::serve(t, bytes) : stock.load()->raw_allocate(bytes);
  if (t.table != nullptr) t.table->visit.add({0, bytes, reinterpret_cast<int64_t>(pointer)});
  if (t.log != nullptr) t.log->add({0, bytes, reinterpret_cast<int64_t>(pointer)});
  return pointer;
}

// Called for every free in every thread; there are one or two arenas to scan.
bool compiled_step::take_back(void* pointer) noexcept {
  if (thread.table != nullptr) thread.table->visit.add({1, 0, reinterpret_cast<int64_t>(pointer)});
  if (thread.log != nullptr) thread.log->add({1, 0, reinterpret_cast<int64_t>(pointer)});
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (int i = 0, used = arenas_used.load(std::memory_order_acquire); i < used; ++i) {
    if (holds(arenas[i], address)) {
      if (thread.arena == &arenas[i]) mark_free(thread, pointer);
      if (lent_live != 0) take_back_lent(pointer);
      drop_holder(arenas[i]);
      return true;
    }
  }
  if (lent_live != 0) {  // in a home's memory
    if (Arena* arena = take_back_lent(pointer); arena != nullptr) {
      drop_holder(*arena);
      return true;
    }
  }
  if (off_plan_live.load(std::memory_order_relaxed) != 0) {
    const std::lock_guard guard(mutex);
    if (const auto entry = off_plan.find(pointer); entry != off_plan.end()) {
      add(*entry->second.arena, kLiveBytes, -entry->second.bytes);
      off_plan.erase(entry);
      --off_plan_live;
    }
  }
  return false;
}

void compiled_step::release(void* pointer) noexcept {
  if (!take_back(pointer)) stock.load()->raw_deallocate(pointer);
}

bool compiled_step::has(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (int i = 0, used = arenas_used.load(std::memory_order_acquire); i < used; ++i)
    if (holds(arenas[i], address)) return true;
  if (lent_live == 0) return false;
  const std::lock_guard guard(mutex);
  return lent.count(pointer) != 0;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Takes ownership of [base, base + bytes), which is released with the owner and the last planned piece.
EXPORT Arena* outofcore_arena_open(uintptr_t base, int64_t bytes, int64_t large, int64_t reserve) noexcept {
  const std::lock_guard guard(mutex);
  for (int i = 0; i < kArenas; ++i) {
    Arena& arena = arenas[i];
    if (arena.base != 0 || arena.counters[kLiveBytes] != 0 || arena.counters[kLentLiveBytes] != 0) continue;
    for (auto& counter : arena.counters) counter = 0;
    arena.counters[kLastScope] = -1;
    arena.large = large;
    arena.reserve = reserve;
    arena.lender = nullptr;
    arena.holders = 1;
    arena.base = base;
    arena.end = base + bytes;
    if (i >= arenas_used) arenas_used = i + 1;
    return &arena;
  }
  return nullptr;
}

EXPORT void outofcore_arena_drop(Arena* arena) noexcept { drop_holder(*arena); }
EXPORT void outofcore_arena_reserve(Arena* arena, int64_t reserve) noexcept { arena->reserve = reserve; }
EXPORT void outofcore_arena_lender(Arena* arena, Lender lender) noexcept { arena->lender = lender; }
// Writes up to `capacity` addresses of lent pieces in use. Returns their total count.
EXPORT int64_t outofcore_arena_lent(const Arena* arena, int64_t* addresses, int64_t capacity) noexcept {
  const std::lock_guard guard(mutex);
  int64_t count = 0;
  for (const auto& [pointer, piece] : lent)
    if (piece.arena == arena && count++ < capacity) addresses[count - 1] = reinterpret_cast<int64_t>(pointer);
  return count;
}
EXPORT int64_t outofcore_arena_counters(const Arena* arena, int64_t* counters, int64_t capacity) noexcept {
  for (int64_t i = 0; i < std::min<int64_t>(kCounters, capacity); ++i) counters[i] = arena->counters[i];
  return kCounters;
}

// Scope s has requests first[s] to first[s + 1]; address 0 means the stock allocator. Null: out of memory.
EXPORT Table* outofcore_table_new(Arena* arena, int64_t scopes, const int64_t* first,
                                  const int64_t* requests) noexcept try {
  std::unique_ptr<Table> table(new Table{arena, std::vector<int64_t>(first, first + scopes + 1), {}, {}, {}, {}, false, {}});
  for (int64_t i = 0; i < first[scopes]; ++i)
    table->requests.push_back({requests[2 * i], reinterpret_cast<char*>(requests[2 * i + 1]), false, 0});
  for (int64_t s = 0; s < scopes; ++s)
    for (int64_t i = first[s]; i < first[s + 1]; ++i)
      for (int64_t j = first[s]; j < i && !table->requests[i].reuses; ++j)
        table->requests[i].reuses = overlap(table->requests[i], table->requests[j]);
  return table.release();
} catch (...) {
  return nullptr;
}
// Sets the address and bytes of each scope's workspace. Returns 0, or -1 if memory ran out.
EXPORT int64_t outofcore_table_workspaces(Table* table, const int64_t* workspaces) noexcept try {
  table->workspaces.clear();
  for (size_t s = 0; s + 1 < table->first.size(); ++s)
    table->workspaces.push_back({reinterpret_cast<char*>(workspaces[2 * s]), workspaces[2 * s + 1]});
  return 0;
} catch (...) {
  table->workspaces.clear();
  return -1;
}
// Whether memory allocated in the current scope is in use and will be reused when the scope ends.
EXPORT int outofcore_passes(void* pointer) noexcept {
  const Thread& t = thread;
  if (t.arena == nullptr) return 0;
  for (const Request* request = t.first; request != t.end; ++request)
    if (request->address == pointer && request->in_use_in == t.visit) return 1;
  for (const Piece& piece : t.table->unplanned)
    if (piece.address == pointer) return 1;
  const std::lock_guard guard(mutex);
  return lent.find(pointer) != lent.end();
}
// Makes the stock allocator serve and count the calling thread's requests, or stops that.
EXPORT void outofcore_unbounded(int is_on) noexcept { thread.unbounded = is_on != 0; }
EXPORT void outofcore_table_free(Table* table) noexcept {
  if (thread.table == table) leave(thread);  // an exception may have skipped the end of the scope
  delete table;
}

EXPORT void outofcore_begin(Table* table, int scope) noexcept {
  Thread& t = thread;
  leave(t);
  if (scope < 0 || scope + 1 >= static_cast<int>(table->first.size())) return;
  t.first = t.next = table->requests.data() + table->first[scope];
  t.end = table->requests.data() + table->first[scope + 1];
  t.arena = table->arena;
  t.table = table;
  t.scope = scope;
  t.visit = ++visits;
}
EXPORT void outofcore_end() noexcept {
  Thread& t = thread;
  if (t.arena == nullptr) return;
  for (; t.next != t.end; ++t.next)
    if (t.next->address != nullptr) add(*t.arena, kUnclaimed, 1);
  leave(t);
}

// Writes up to `capacity` scopes, in order, with a large unplanned request in their last visit. Returns their total
// count. Their logs are kept until outofcore_table_forget.
EXPORT int64_t outofcore_table_surprises(const Table* table, int64_t* scopes, int64_t capacity) noexcept {
  int64_t count = 0;
  for (const auto& [scope, log] : table->surprises)
    if (count++ < capacity) scopes[count - 1] = scope;
  return count;
}
EXPORT const Log* outofcore_table_surprise_log(const Table* table, int64_t scope) noexcept {
  const auto entry = table->surprises.find(scope);
  return entry == table->surprises.end() ? nullptr : &entry->second;
}
EXPORT void outofcore_table_forget(Table* table) noexcept { table->surprises.clear(); }

EXPORT Log* outofcore_record_begin() noexcept { return thread.log = new (std::nothrow) Log; }
EXPORT void outofcore_record_end() noexcept { thread.log = nullptr; }
// Returns -1 if events were lost because memory ran out.
EXPORT int64_t outofcore_record_size(const Log* log) noexcept {
  return log->lost ? -1 : static_cast<int64_t>(log->events.size());
}
EXPORT const Event* outofcore_record_data(const Log* log) noexcept { return log->events.data(); }
EXPORT void outofcore_record_free(Log* log) noexcept { delete log; }
