// The one lock over everything that paging.cpp knows, and how threads wait under it.
//
// It is never held while PyTorch runs an op or Python, while bytes are copied beside ops, or while a strong reference is
// taken or dropped: PyTorch may take Python's lock for that, which comes before this one (locks.h). Who needs a reference
// lets go of the lock meanwhile (``Unlocked``), and looks at everything again; what is to be dropped is dropped once the
// lock is free (``let_go``). Who waits does so for ``answer``, which counts up, so that nobody can take it away.

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

// Recursive: to free a storage comes back through ``release_block``. Never destroyed, nor is anything below.
using Mutex = locks::Ranked<std::recursive_mutex, locks::kLoops>;
inline Mutex& mutex = *new Mutex;

// What is dropped once the lock is free.
struct LetGo {
  LetGo() = default;
  LetGo(LetGo&&) = default;
  LetGo& operator=(LetGo&&) = default;
  ~LetGo() {
    while (originals) originals = std::exchange(originals->next, nullptr);  // one after the other, not within each other
  }
  bool empty() const { return !originals && storages.empty() && works.empty(); }

  std::shared_ptr<Original> originals;  // memory of others that is not needed any more: a list, which needs no memory
  std::vector<StoragePointer> storages;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};
inline LetGo& let_go = *new LetGo;

class Guard {
 public:
  Guard() {
    mutex.lock();
    ++held;
  }
  ~Guard() {
    if (--held == 0 && !let_go.empty())
      unlock_and_drop();
    else
      mutex.unlock();
  }
  Guard(const Guard&) = delete;

  // How often the calling thread has the lock.
  inline static thread_local int held = 0;

 private:
  static void unlock_and_drop() {
    const LetGo free = std::exchange(let_go, {});
    mutex.unlock();
  }
};

// Lets go of the lock for a while. What was looked at before has to be looked at again.
class Unlocked {
 public:
  Unlocked() : held_(std::exchange(Guard::held, 0)) {
    for (int i = 0; i < held_; ++i) mutex.unlock();
  }
  ~Unlocked() {
    for (int i = 0; i < held_; ++i) mutex.lock();
    Guard::held = held_;
  }
  Unlocked(const Unlocked&) = delete;

 private:
  int held_;
};

// Lets go of Python's lock, if the calling thread has it: the thread that is waited for may need it.
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

// What is waited for: copies that have ended, memory that was freed, ops of other threads that have ended.
inline std::condition_variable_any& answered = *new std::condition_variable_any;
inline int64_t answers = 0;
inline int waiting = 0;  // threads that do
inline void answer() {
  ++answers;
  if (waiting > 0) answered.notify_all();
}
// Until there is an answer; false: there was none for so long. Others may have done anything meanwhile.
inline bool wait_for_answer(std::chrono::milliseconds most = std::chrono::hours(24)) {
  const int64_t before = answers;
  ++waiting;
  bool any = false;
  {
    const Unlocked unlocked;
    const WithoutPython python_is_free;  // taken again before the lock is
    std::unique_lock lock(mutex);
    any = answered.wait_for(lock, most, [&] { return answers != before; });
  }
  --waiting;
  return any;
}

// A weak reference to a storage that somebody holds: none that is strong is made on the way.
inline WeakStorage weak_of(c10::StorageImpl& storage) {
  c10::raw::weak_intrusive_ptr::incref(&storage);
  return WeakStorage::reclaim(&storage);
}
// A strong one, if the storage is there still. Lets go of the lock meanwhile.
inline StoragePointer strong_of(const WeakStorage& weak) {
  const WeakStorage copy = weak;
  const Unlocked unlocked;
  return copy.lock();
}
inline void drop(StoragePointer&& storage) {
  if (storage) let_go.storages.push_back(std::move(storage));
}

}  // namespace follow
