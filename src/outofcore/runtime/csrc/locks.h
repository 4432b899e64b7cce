// The locks that several parts of this library take, and their order. A thread that has one takes only later ones:
//
//   1. Python's lock
//   2. kLoops, over everything that paging.cpp knows (follow/lock.h)
//   3. kAllocator, over the allocator under PyTorch and the arenas of compiled steps (allocator.cpp, arena.cpp)
//   4. those inside of PyTorch: of its allocator, of its generators, of works of collectives
//
// With OUTOFCORE_CHECK_LOCKS, as tools/tsan.py builds, a thread that takes one in another order ends the process.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <type_traits>

namespace locks {

enum Rank { kPython, kLoops, kAllocator, kRanks };

#ifdef OUTOFCORE_CHECK_LOCKS
inline thread_local int held[kRanks] = {};  // how often the calling thread has each

// Ends the process if the thread has a lock that comes after one that it is about to take.
inline void check(Rank rank, bool again) {
  for (int later = again ? rank + 1 : rank; later < kRanks; ++later) {
    if (held[later] == 0) continue;
    std::fprintf(stderr, "outofcore: a thread that has lock %d takes lock %d (locks.h)\n", later, rank);
    std::abort();
  }
}
inline void count(Rank rank, int more) { held[rank] += more; }
inline void forget(Rank rank) { held[rank] = 0; }
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
  // In a child process, for a lock that a thread of the parent has.
  void renew() {
    new (&mutex_) Mutex;
    forget(kRank);
  }

 private:
  Mutex mutex_;
};

}  // namespace locks
