// Serves planned requests to PyTorch at planned addresses: see allocator.h, which asks it.
//
// While a thread is inside a scope, its k-th request gets the k-th planned address. A request off the plan gets bytes of
// the op's own workspace if it fits there, else of the stock allocator as long as the reserve lasts. Beyond that the
// lender of the arena decides (demand_eviction.py): it makes room, or lets the request exceed the budget, or refuses it.
// Outside of scopes the stock allocator serves. Called by ctypes with the GIL held; ops may run without it.

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

// In the order of the fields of ``ArenaCounters`` in arena.py.
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

// Answers a request of ``bytes`` that the reserve cannot hold: an address (of the arena or not), or one of these.
using Lender = void (*)(int64_t bytes, int64_t scope, int64_t* answer);
enum Answer : int64_t {
  kRefuse = 0,
  kExceed = 1,  // the stock allocator is to serve it, beyond the budget
};

struct Arena {
  // Both 0: not in use. Who looks for a pointer takes no lock: ``end`` is set last and cleared first, so that no pointer
  // lies between the base of one arena and the end of another (see ``holds``).
  std::atomic<uintptr_t> base{0}, end{0};
  std::atomic<int64_t> holders{0};         // its owner, and each planned piece that is still referred to
  int64_t large = 0;                       // off-plan requests of at least this size are held to the reserve
  std::atomic<int64_t> reserve{0};
  std::atomic<Lender> lender{nullptr};
  std::atomic<int64_t> counters[kCounters] = {};
};
struct Request {
  int64_t bytes;
  char* address;      // null: may come or not (a library's cache), and is served by the stock allocator
  bool reuses;        // an earlier request of the scope has bytes in common with this one
  int64_t in_use_in;  // the visit to the scope in which its piece was handed out and is not yet freed
};
struct Event {
  int64_t freed, bytes, pointer;
};
static_assert(sizeof(Event) == 3 * sizeof(int64_t), "Python reads a log as three numbers for each event");
struct Log {
  std::vector<Event> events;
  bool lost = false;  // whether there was no memory for one of them

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
  std::vector<Piece> workspaces;     // by scope; empty: not told
  std::vector<Piece> unplanned;      // pieces of the workspace in use that no request was planned for, of this visit
  Log visit;                         // what the thread has done in the scope that it is in
  bool surprised = false;            // whether that went off the plan by a large request
  std::map<int64_t, Log> surprises;  // by scope: the last visit that did
};
struct Thread {
  Request* first;
  Request* next;
  Request* end;
  Arena* arena;  // null: outside of any scope
  int64_t scope;
  int64_t visit;  // numbers each stay in a scope, from 1
  Table* table;   // null: outside of any scope
  Log* log;
  bool unbounded;  // whether its requests are served by the stock allocator and only counted
};
struct OffPlan {
  Arena* arena;
  int64_t bytes;
};

constexpr int kArenas = 256;
Arena arenas[kArenas];
std::atomic<int> arenas_used{0};  // no arena at or above this index was ever in use
thread_local Thread thread{};     // trivially destructible: tensors may be freed while a thread ends
std::atomic<int64_t> visits{0};

// Never destroyed: tensors outlive static destructors.
std::unordered_map<void*, OffPlan>& off_plan = *new std::unordered_map<void*, OffPlan>;
std::unordered_map<void*, OffPlan>& lent = *new std::unordered_map<void*, OffPlan>;  // by the lenders of arenas
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
  device::give_back(stock.load(), base, end);
}

// Whether an address lies in an arena. The base is read again, since another arena may have been opened in between.
bool holds(const Arena& arena, uintptr_t address) {
  const uintptr_t base = arena.base.load();
  return address >= base && address < arena.end.load() && base == arena.base.load();
}

template <class A, class B>
bool overlap(const A& a, const B& b) {
  return a.address != nullptr && b.address != nullptr && a.address < b.address + b.bytes &&
         b.address < a.address + a.bytes;
}

// Whether a piece that is still in use lies where this request would go: the op does not keep to its plan.
bool taken(const Thread& t, const Request& request) {
  for (const Piece& piece : t.table->unplanned)
    if (overlap(piece, request)) return true;
  if (!request.reuses) return false;
  for (const Request* other = t.first; other != &request; ++other)
    if (other->in_use_in == t.visit && overlap(*other, request)) return true;
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

// Forgets a piece that a lender handed out; null: it is none.
Arena* take_back_lent(void* pointer) {
  const std::lock_guard guard(mutex);
  const auto found = lent.find(pointer);
  if (found == lent.end()) return nullptr;
  Arena* arena = found->second.arena;
  add(*arena, kLentLiveBytes, -found->second.bytes);
  lent.erase(found);
  --lent_live;
  return arena;
}

// A piece of the op's workspace that is not in use: where the op keeps to its needs, but not to the order of its
// requests. Null: there is none.
void* from_workspace(Thread& t, int64_t bytes) {
  constexpr int64_t kAlign = 4096;
  Table& table = *t.table;
  if (table.workspaces.empty()) return nullptr;
  const Piece& whole = table.workspaces[static_cast<size_t>(t.scope)];
  Piece fresh{whole.address, bytes};
  for (bool moved = true; moved;) {
    moved = false;
    const auto behind = [&](const auto& other) {
      if (!overlap(fresh, other)) return;
      const auto end = reinterpret_cast<uintptr_t>(other.address) + static_cast<uintptr_t>(other.bytes);
      fresh.address = reinterpret_cast<char*>((end + kAlign - 1) / kAlign * kAlign);
      moved = true;
    };
    for (const Request* other = t.first; other != t.end; ++other)
      if (other->in_use_in == t.visit) behind(*other);
    for (const Piece& other : table.unplanned) behind(other);
  }
  if (whole.address == nullptr || fresh.address + bytes > whole.address + whole.bytes) return nullptr;
  table.unplanned.push_back(fresh);
  t.arena->holders.fetch_add(1, std::memory_order_relaxed);
  add(*t.arena, kServed, 1);
  return fresh.address;
}

// Serves a request by the stock allocator, and counts it as long as it lives. The mutex is held.
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
  // It evicts, waits for copies and needs Python, and so no lock is held.
  int64_t answer = kRefuse;
  if (const Lender lender = arena.lender.load(); lender != nullptr) lender(bytes, t.scope, &answer);
  if (answer == kRefuse) {
    add(arena, kRefused, 1);
    // The log has it as if it had come and gone: the next plan is to hold it.
    constexpr int64_t kNowhere = 8;
    t.table->visit.add({0, bytes, kNowhere});
    t.table->visit.add({1, 0, kNowhere});
    TORCH_CHECK(false, "outofcore arena: scope ", t.scope, " asked for ", bytes, " bytes off the plan; with ",
                arena.counters[kLiveBytes].load(), " such bytes in use that exceeds the reserve of ", arena.reserve.load(),
                " bytes");
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
    if (request->bytes == bytes && !taken(t, *request)) {
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

// Ends the visit of the thread to a scope; what it did is kept if it went off the plan.
void leave(Thread& t) noexcept {
  Table* table = t.table;
  t.arena = nullptr;
  t.table = nullptr;
  if (table == nullptr) return;
  try {
    if (table->surprised && !table->visit.lost) table->surprises[t.scope] = table->visit;
  } catch (...) {  // no memory: the surprise is not told of
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

void* planned::serve(int64_t bytes) {
  Thread& t = thread;
  if (t.arena == nullptr && t.log == nullptr) return nullptr;
  void* pointer = t.arena != nullptr ? ::serve(t, bytes) : stock.load()->raw_allocate(bytes);
  if (t.table != nullptr) t.table->visit.add({0, bytes, reinterpret_cast<int64_t>(pointer)});
  if (t.log != nullptr) t.log->add({0, bytes, reinterpret_cast<int64_t>(pointer)});
  return pointer;
}

// What any thread frees, also what was allocated before: it scans the arenas, of which there are one or two.
bool planned::take_back(void* pointer) noexcept {
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
  if (lent_live != 0) {  // in memory of a home
    if (Arena* arena = take_back_lent(pointer); arena != nullptr) {
      drop_holder(*arena);
      return true;
    }
  }
  if (off_plan_live.load(std::memory_order_relaxed) != 0) {
    const std::lock_guard guard(mutex);
    if (const auto found = off_plan.find(pointer); found != off_plan.end()) {
      add(*found->second.arena, kLiveBytes, -found->second.bytes);
      off_plan.erase(found);
      --off_plan_live;
    }
  }
  return false;
}

void planned::release(void* pointer) noexcept {
  if (!take_back(pointer)) stock.load()->raw_deallocate(pointer);
}

bool planned::has(void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (int i = 0, used = arenas_used.load(std::memory_order_acquire); i < used; ++i)
    if (holds(arenas[i], address)) return true;
  if (lent_live == 0) return false;
  const std::lock_guard guard(mutex);
  return lent.count(pointer) != 0;
}

// Called through ctypes, which knows nothing of exceptions: none leaves a function here.
#define EXPORT extern "C" __attribute__((visibility("default")))

// Takes over [base, base + bytes), which is given back when the owner and all planned pieces are gone.
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
// Writes the addresses of pieces that the lender handed out and that are in use, as many as there is room for; returns how
// many there are.
EXPORT int64_t outofcore_arena_lent(const Arena* arena, int64_t* addresses, int64_t capacity) noexcept {
  const std::lock_guard guard(mutex);
  int64_t count = 0;
  for (const auto& [pointer, piece] : lent)
    if (piece.arena == arena && count++ < capacity) addresses[count - 1] = reinterpret_cast<int64_t>(pointer);
  return count;
}
// Writes as many counters as there is room for; returns how many there are.
EXPORT int64_t outofcore_arena_counters(const Arena* arena, int64_t* counters, int64_t capacity) noexcept {
  for (int64_t i = 0; i < std::min<int64_t>(kCounters, capacity); ++i) counters[i] = arena->counters[i];
  return kCounters;
}

// Scope s has requests first[s] up to first[s + 1]; an address of 0 stands for the stock allocator. Null: no memory.
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
// Tells for each scope the address and bytes of its workspace. 0: done; -1: no memory.
EXPORT int64_t outofcore_table_workspaces(Table* table, const int64_t* workspaces) noexcept try {
  table->workspaces.clear();
  for (size_t s = 0; s + 1 < table->first.size(); ++s)
    table->workspaces.push_back({reinterpret_cast<char*>(workspaces[2 * s]), workspaces[2 * s + 1]});
  return 0;
} catch (...) {
  table->workspaces.clear();
  return -1;
}
// Whether memory was handed out in the scope that the calling thread is in, is in use, and will be others' when it ends.
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
// Has the stock allocator serve the calling thread from now on, and count it; or no more.
EXPORT void outofcore_unbounded(int is_on) noexcept { thread.unbounded = is_on != 0; }
EXPORT void outofcore_table_free(Table* table) noexcept {
  if (thread.table == table) leave(thread);  // an exception may have come before the end of the scope
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

// The scopes whose last visit went off the plan by a large request, in order; their logs stay until the table is told to
// forget. Writes as many as there is room for; returns how many there are.
EXPORT int64_t outofcore_table_surprises(const Table* table, int64_t* scopes, int64_t capacity) noexcept {
  int64_t count = 0;
  for (const auto& [scope, log] : table->surprises)
    if (count++ < capacity) scopes[count - 1] = scope;
  return count;
}
// Null: that scope has none.
EXPORT const Log* outofcore_table_surprise_log(const Table* table, int64_t scope) noexcept {
  const auto found = table->surprises.find(scope);
  return found == table->surprises.end() ? nullptr : &found->second;
}
EXPORT void outofcore_table_forget(Table* table) noexcept { table->surprises.clear(); }

// Null: no memory.
EXPORT Log* outofcore_record_begin() noexcept { return thread.log = new (std::nothrow) Log; }
EXPORT void outofcore_record_end() noexcept { thread.log = nullptr; }
// -1: some events are lost, since there was no memory for them.
EXPORT int64_t outofcore_record_size(const Log* log) noexcept {
  return log->lost ? -1 : static_cast<int64_t>(log->events.size());
}
EXPORT const Event* outofcore_record_data(const Log* log) noexcept { return log->events.data(); }
EXPORT void outofcore_record_free(Log* log) noexcept { delete log; }
