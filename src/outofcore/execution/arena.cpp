// An allocator for PyTorch that serves planned requests at planned addresses, on the CPU or (OUTOFCORE_CUDA) on CUDA.
//
// While a thread is inside a scope, its k-th request gets the k-th planned address. Every other request
// goes to the allocator that was there before (the stock allocator). Called by ctypes with the GIL held.

#ifdef OUTOFCORE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

enum Counter { kServed, kSmall, kLarge, kLargeBytes, kLive, kPeak, kRefused, kUnclaimed, kLastScope, kCounters };

struct Arena {
  std::atomic<uintptr_t> base{0}, end{0};  // both 0: not in use
  std::atomic<int64_t> holders{0};         // its owner, and each planned piece that is still referred to
  int64_t large = 0;                       // off-plan requests of at least this size are held to the reserve
  std::atomic<int64_t> reserve{0};
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
using Log = std::vector<Event>;
struct Table {
  Arena* arena;
  std::vector<int64_t> first;
  std::vector<Request> requests;
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
};
struct OffPlan {
  Arena* arena;
  int64_t bytes;
};

constexpr int kArenas = 256;
Arena arenas[kArenas];
std::atomic<int> arenas_used{0};  // no arena at or above this index was ever in use
thread_local Thread thread{};     // trivially destructible: tensors may be freed while a thread ends
std::atomic<c10::Allocator*> stock{nullptr};
std::atomic<int64_t> visits{0};
int installs = 0;

// Never destroyed: tensors outlive static destructors.
std::mutex& mutex = *new std::mutex;
std::unordered_map<void*, OffPlan>& off_plan = *new std::unordered_map<void*, OffPlan>;
std::atomic<int64_t> off_plan_live{0};

void add(Arena& arena, Counter counter, int64_t count) {
  arena.counters[counter].fetch_add(count, std::memory_order_relaxed);
}

void drop_holder(Arena& arena) {
  if (arena.holders.fetch_sub(1) != 1) return;
  const std::lock_guard<std::mutex> guard(mutex);
  const uintptr_t base = arena.base.exchange(0), end = arena.end.exchange(0);
  device::give_back(stock.load(), base, end);
}

bool overlap(const Request& a, const Request& b) {
  return a.address != nullptr && b.address != nullptr && a.address < b.address + b.bytes &&
         b.address < a.address + a.bytes;
}

// Whether a piece that is still in use lies where this request would go: the op does not keep to its plan.
bool taken(const Thread& t, const Request& request) {
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
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  if (thread.table != nullptr) thread.table->visit.push_back({1, 0, reinterpret_cast<int64_t>(pointer)});
  if (thread.log != nullptr) thread.log->push_back({1, 0, reinterpret_cast<int64_t>(pointer)});
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (int i = 0, used = arenas_used.load(std::memory_order_acquire); i < used; ++i) {
    if (address >= arenas[i].base.load(std::memory_order_relaxed) &&
        address < arenas[i].end.load(std::memory_order_relaxed)) {
      if (thread.arena == &arenas[i]) mark_free(thread, pointer);
      return drop_holder(arenas[i]);
    }
  }
  if (off_plan_live.load(std::memory_order_relaxed) != 0) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (const auto found = off_plan.find(pointer); found != off_plan.end()) {
      add(*found->second.arena, kLive, -found->second.bytes);
      off_plan.erase(found);
      --off_plan_live;
    }
  }
  stock.load()->raw_deallocate(pointer);
}

void* serve_off_plan(const Thread& t, int64_t bytes) {
  Arena& arena = *t.arena;
  if (bytes < arena.large) {
    add(arena, kSmall, 1);
    return stock.load()->raw_allocate(bytes);
  }
  const std::lock_guard<std::mutex> guard(mutex);
  const int64_t live = arena.counters[kLive] + bytes;
  arena.counters[kLastScope] = t.scope;
  t.table->surprised = true;
  if (live > arena.reserve) {
    add(arena, kRefused, 1);
    TORCH_CHECK(false, "outofcore arena: scope ", t.scope, " asked for ", bytes, " bytes off the plan; with ",
                live - bytes, " such bytes in use that exceeds the reserve of ", arena.reserve.load(), " bytes");
  }
  void* pointer = stock.load()->raw_allocate(bytes);
  off_plan[pointer] = {&arena, bytes};
  ++off_plan_live;
  add(arena, kLarge, 1);
  add(arena, kLargeBytes, bytes);
  arena.counters[kLive] = live;
  if (live > arena.counters[kPeak]) arena.counters[kPeak] = live;
  return pointer;
}

void* serve(Thread& t, int64_t bytes) {
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

struct PlannedAllocator final : device::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Thread& t = thread;
    if (device::kOwnDeleter && t.arena == nullptr && t.log == nullptr) return stock.load()->allocate(bytes);
    void* pointer = t.arena != nullptr && bytes != 0 ? serve(t, static_cast<int64_t>(bytes))
                                                     : stock.load()->raw_allocate(bytes);
    if (t.table != nullptr && bytes != 0)
      t.table->visit.push_back({0, static_cast<int64_t>(bytes), reinterpret_cast<int64_t>(pointer)});
    if (t.log != nullptr && bytes != 0)
      t.log->push_back({0, static_cast<int64_t>(bytes), reinterpret_cast<int64_t>(pointer)});
    return {pointer, pointer, &release, device::current()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};

// Ends the visit of the thread to a scope; what it did is kept if it went off the plan.
void leave(Thread& t) {
  Table* table = t.table;
  t.arena = nullptr;
  t.table = nullptr;
  if (table == nullptr) return;
  if (table->surprised) table->surprises[t.scope] = table->visit;
  table->surprised = false;
  table->visit.clear();
}

PlannedAllocator& allocator = *new PlannedAllocator;  // never destroyed: storages keep a pointer to it

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// 0: done. 1: the stock allocator cannot be wrapped. 2: it is another one than before. 3: it has a higher priority.
EXPORT int outofcore_install() {
  const std::lock_guard<std::mutex> guard(mutex);
  if (installs == 0) {
    c10::Allocator* current = device::installed();
    if (current->raw_deleter() == nullptr) return 1;
    if (stock.load() == nullptr) {
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
    } else if (stock.load() != current) {
      return 2;
    }
    stock = current;
    device::beneath(allocator, current);
    device::install(&allocator);
    if (device::installed() != &allocator) return 3;
  }
  ++installs;
  return 0;
}

EXPORT void outofcore_uninstall() {
  const std::lock_guard<std::mutex> guard(mutex);
  if (--installs == 0 && device::installed() == &allocator) device::install(stock);
}

// Takes over [base, base + bytes), which is given back when the owner and all planned pieces are gone.
EXPORT Arena* outofcore_arena_open(uintptr_t base, int64_t bytes, int64_t large, int64_t reserve) {
  const std::lock_guard<std::mutex> guard(mutex);
  for (int i = 0; i < kArenas; ++i) {
    Arena& arena = arenas[i];
    if (arena.base != 0 || arena.counters[kLive] != 0) continue;
    for (auto& counter : arena.counters) counter = 0;
    arena.counters[kLastScope] = -1;
    arena.large = large;
    arena.reserve = reserve;
    arena.holders = 1;
    arena.base = base;
    arena.end = base + bytes;
    if (i >= arenas_used) arenas_used = i + 1;
    return &arena;
  }
  return nullptr;
}

EXPORT void outofcore_arena_drop(Arena* arena) { drop_holder(*arena); }
EXPORT void outofcore_arena_reserve(Arena* arena, int64_t reserve) { arena->reserve = reserve; }
EXPORT void outofcore_arena_counters(const Arena* arena, int64_t* counters) {
  for (int i = 0; i < kCounters; ++i) counters[i] = arena->counters[i];
}

// Scope s has requests first[s] up to first[s + 1]; an address of 0 stands for the stock allocator.
EXPORT Table* outofcore_table_new(Arena* arena, int64_t scopes, const int64_t* first, const int64_t* requests) {
  auto* table = new Table{arena, std::vector<int64_t>(first, first + scopes + 1), {}, {}, false, {}};
  for (int64_t i = 0; i < first[scopes]; ++i)
    table->requests.push_back({requests[2 * i], reinterpret_cast<char*>(requests[2 * i + 1]), false, 0});
  for (int64_t s = 0; s < scopes; ++s)
    for (int64_t i = first[s]; i < first[s + 1]; ++i)
      for (int64_t j = first[s]; j < i && !table->requests[i].reuses; ++j)
        table->requests[i].reuses = overlap(table->requests[i], table->requests[j]);
  return table;
}
EXPORT void outofcore_table_free(Table* table) {
  if (thread.table == table) leave(thread);  // an exception may have come before the end of the scope
  delete table;
}

EXPORT void outofcore_begin(Table* table, int scope) {
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
EXPORT void outofcore_end() {
  Thread& t = thread;
  if (t.arena == nullptr) return;
  for (; t.next != t.end; ++t.next)
    if (t.next->address != nullptr) add(*t.arena, kUnclaimed, 1);
  leave(t);
}

// The scopes whose last visit went off the plan by a large request; their logs stay until the table is told to forget.
EXPORT int64_t outofcore_table_surprises(const Table* table) {
  return static_cast<int64_t>(table->surprises.size());
}
EXPORT int64_t outofcore_table_surprise(const Table* table, int64_t index) {
  return std::next(table->surprises.begin(), index)->first;
}
EXPORT const Log* outofcore_table_surprise_log(const Table* table, int64_t scope) {
  return &table->surprises.at(scope);
}
EXPORT void outofcore_table_forget(Table* table) { table->surprises.clear(); }

EXPORT Log* outofcore_record_begin() { return thread.log = new Log; }
EXPORT void outofcore_record_end() { thread.log = nullptr; }
EXPORT int64_t outofcore_record_size(const Log* log) { return static_cast<int64_t>(log->size()); }
EXPORT const Event* outofcore_record_data(const Log* log) { return log->data(); }
EXPORT void outofcore_record_free(Log* log) { delete log; }

// One transfer between a file and host memory. CUDA calls this on a thread of its own, in the order of a stream: it
// takes neither the GIL nor a lock, and calls nothing of CUDA. See transfers.py.
struct Transfer {
  int64_t address, bytes, offset;
  int32_t descriptor, writes, forgets;
  int32_t failure;  // 0: done; -1: the file ended; else what errno said
  int64_t done;     // bytes that were moved
};
EXPORT void outofcore_transfer(void* data) {
  auto& t = *static_cast<Transfer*>(data);
  constexpr int64_t kPage = 4096, kMost = int64_t{16} << 20;
  t.done = 0;
  t.failure = 0;
  while (t.done < t.bytes) {
    auto* memory = reinterpret_cast<char*>(t.address) + t.done;
    const int64_t left = t.bytes - t.done;
    const size_t count = left < kMost ? left : kMost;
    const ssize_t moved = t.writes ? pwrite(t.descriptor, memory, count, t.offset + t.done)
                                   : pread(t.descriptor, memory, count, t.offset + t.done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) {
      t.failure = errno;
      return;
    }
    // After a short one, direct I/O can go on from a page boundary only.
    const int64_t kept = moved == left ? moved : moved / kPage * kPage;
    if (kept == 0) {
      t.failure = -1;
      return;
    }
    t.done += kept;
  }
  if (t.forgets) posix_fadvise(t.descriptor, t.offset, t.bytes, POSIX_FADV_DONTNEED);
}
