// The locks that several files take, and their order. A thread that holds one takes only later ones:
//
//   1. Python's lock
//   2. kLoops, over all state of paging.cpp (follow/lock.h)
//   3. kAllocator, over the allocator under PyTorch and the arenas of compiled steps (allocator.cpp, arena.cpp)
//   4. PyTorch's internal locks: of its allocator, of its generators, of works of collectives
//
// With OUTOFCORE_CHECK_LOCKS (tools/tsan.py), a thread that violates the order aborts the process.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <type_traits>

namespace locks {

enum Rank { kPython, kLoops, kAllocator, kRanks };

#ifdef OUTOFCORE_CHECK_LOCKS
inline thread_local int held_counts[kRanks] = {};  // acquisitions by the calling thread

// Aborts if the thread holds a lock that comes after the one it is about to take.
inline void check(Rank rank, bool is_recursive) {
  for (int later = is_recursive ? rank + 1 : rank; later < kRanks; ++later) {
    if (held_counts[later] == 0) continue;
    std::fprintf(stderr, "outofcore: a thread that holds lock %d takes lock %d (locks.h)\n", later, rank);
    std::abort();
  }
}
inline void count(Rank rank, int change) { held_counts[rank] += change; }
inline void forget(Rank rank) { held_counts[rank] = 0; }
#else
inline void check(Rank, bool) {}
inline void count(Rank, int) {}
inline void forget(Rank) {}
#endif

template <class Mutex, Rank kRank>
class Ranked {
 public:
  void lock() {
    check(kRank, std::is_same_v<Mutex, std::recursive_mutex>);
    mutex_.lock();
    count(kRank, 1);
  }
  void unlock() {
    count(kRank, -1);
    mutex_.unlock();
  }
  // Resets the lock in a child process if a thread of the parent held it.
  void reset_in_child() {
    new (&mutex_) Mutex;
    forget(kRank);
  }

 private:
  Mutex mutex_;
};

}  // namespace locks
