// The lock over all state of paging.cpp, and waiting under it. It is not held while PyTorch runs an op or Python,
// during overlapped copies, or while a strong reference is taken or dropped: PyTorch may then take Python's lock, which
// comes first (locks.h). To take a reference, code releases the lock (`Unlocked`) and checks its assumptions again.
// Objects to drop are queued (`deferred_drops`). Waiting threads watch a counter of changes.

#pragma once

#include "../locks.h"
#include "homes.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace follow {

using StoragePointer = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Recursive: freeing a storage calls `release_block`. Never destroyed, like all globals below.
using Mutex = locks::Ranked<std::recursive_mutex, locks::kLoops>;
inline Mutex& mutex = *new Mutex;

struct DeferredDrops {
  DeferredDrops() = default;
  DeferredDrops(DeferredDrops&&) = default;
  DeferredDrops& operator=(DeferredDrops&&) = default;
  ~DeferredDrops() {
    while (originals) originals = std::exchange(originals->next, nullptr);  // iteratively, not recursively
  }
  bool empty() const { return !originals && storages.empty() && works.empty(); }

  std::shared_ptr<Original> originals;  // foreign memory that is no longer needed, as a list that needs no allocation
  std::vector<StoragePointer> storages;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};
inline DeferredDrops& deferred_drops = *new DeferredDrops;

class Guard {
 public:
  Guard() {
    mutex.lock();
    ++depth;
  }
  ~Guard() {
    if (--depth == 0 && !deferred_drops.empty())
      unlock_and_drop();
    else
      mutex.unlock();
  }
  Guard(const Guard&) = delete;

  inline static thread_local int depth = 0;

 private:
  static void unlock_and_drop() {
    const DeferredDrops free = std::exchange(deferred_drops, {});
    mutex.unlock();
  }
};

// Releases the lock temporarily. Callers must check their assumptions again.
class Unlocked {
 public:
  Unlocked() : depth_(std::exchange(Guard::depth, 0)) {
    for (int i = 0; i < depth_; ++i) mutex.unlock();
  }
  ~Unlocked() {
    for (int i = 0; i < depth_; ++i) mutex.lock();
    Guard::depth = depth_;
  }
  Unlocked(const Unlocked&) = delete;

 private:
  int depth_;
};

// Releases Python's lock if the calling thread holds it: the awaited thread may need it.
class WithoutPython {
 public:
  WithoutPython() {
    static const auto has = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (has != nullptr && save != nullptr && has() == 1) state_ = save();
  }
  ~WithoutPython() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_ == nullptr) return;
    locks::check(locks::kPython, false);
    restore(state_);
  }
  WithoutPython(const WithoutPython&) = delete;

 private:
  void* state_ = nullptr;
};

// Signals a change: a copy has ended, memory was freed, or another thread's op has ended.
inline std::condition_variable_any& change_signal = *new std::condition_variable_any;
inline int64_t change_count = 0;
inline int waiting = 0;  // waiting threads
inline void notify_change() {
  ++change_count;
  if (waiting > 0) change_signal.notify_all();
}
// Waits for a change; returns false on timeout. Other threads may have changed any state meanwhile.
inline bool wait_for_change(std::chrono::milliseconds timeout = std::chrono::hours(24)) {
  const int64_t before = change_count;
  ++waiting;
  bool changed = false;
  {
    const Unlocked unlocked;
    const WithoutPython python_is_free;  // reacquired before the lock
    std::unique_lock lock(mutex);
    changed = change_signal.wait_for(lock, timeout, [&] { return change_count != before; });
  }
  --waiting;
  return changed;
}

// Makes a weak reference to a live storage without a temporary strong one.
inline WeakStorage weak_of(c10::StorageImpl& storage) {
  c10::raw::weak_intrusive_ptr::incref(&storage);
  return WeakStorage::reclaim(&storage);
}
// Returns a strong reference if the storage still exists. Releases the lock meanwhile.
inline StoragePointer strong_of(const WeakStorage& weak) {
  const WeakStorage copy = weak;
  const Unlocked unlocked;
  return copy.lock();
}
inline void drop(StoragePointer&& storage) {
  if (storage) deferred_drops.storages.push_back(std::move(storage));
}

}  // namespace follow
