// Which thread does what: the one that opened the loop, those that make copies, and all others.

#pragma once

#include "space.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <condition_variable>
#include <exception>

namespace {

thread_local int depth = 0;                    // atomic ops that the thread is in
thread_local const c10::OperatorHandle* running = nullptr;
thread_local std::exception_ptr* refusal = nullptr;  // what the op that runs was refused; null: none runs
thread_local const char* source = nullptr;     // of the op that runs, if autograd runs it and it is known
thread_local follow::Passing* passing = nullptr;  // the op that runs; null: it does not pass
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
void leave_space() {
  if (--entered != 0 || to_end.load() == nullptr) return;
  try {
    end_asked();
  } catch (...) {  // nobody asks what came of it
  }
}
struct Entered {
  Entered() { ++entered; }
  ~Entered() { leave_space(); }
  Entered(const Entered&) = delete;
};

// Whether the calling thread is the loop's, and between ops or inside one.
bool tracked() {
  return depth > 0 || (c10::impl::tls_is_dispatch_key_included(kKey) && !is_other() && current.load() != nullptr);
}

}  // namespace
