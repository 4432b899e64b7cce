// Thread roles. The thread that opened the loop, and autograd threads that work for it, allocate in the arena and move
// blocks. Ops of other threads are observed from their first op on (`on_op`): they pin their operands, never wait for
// copies or room, and get memory from the stock allocator. An evicted block pinned by another thread is used through
// its window by all threads. Collectives hold their tensors until complete. Copy threads move bytes only. Between two
// loops these rules remain, because the next loop may adopt tensors that other threads use.

#pragma once

#include "space.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <condition_variable>
#include <exception>

namespace {

thread_local int depth = 0;                    // nesting of atomic ops on this thread
thread_local const c10::OperatorHandle* running = nullptr;
thread_local std::exception_ptr* refusal = nullptr;  // the running op's refusal; null outside ops
thread_local const char* source = nullptr;           // user's line of the running op in a backward pass, if known
thread_local follow::Passing* passing = nullptr;     // the running op if it passes
std::atomic<int> ops_running{0};                     // on all threads

// The number of loops opened, and the number of the loop that this thread opened, from 1. A loop may end on another
// thread than its opener. It may also end during a backward pass, which restores the thread's dispatch keys afterwards:
// see `leave_thread`.
std::atomic<int64_t> loops_opened{0};
thread_local int64_t loop_number = 0;
// Open loops, including paused ones: while there are any, ops of all threads are observed.
std::atomic<int> open_spaces{0};
// Whether the thread ran an op outside the loop. Autograd threads inherit dispatch keys and belong to the loop.
thread_local bool outside_loop = false;
bool is_other_thread() { return outside_loop || (loop_number != 0 && loop_number != loops_opened.load()); }
// Running ops of other threads. `unpinned_ops` of them pin no blocks: they were running when their thread was detected.
std::atomic<int> other_ops_running{0};
int unpinned_ops = 0;
thread_local int own_unpinned_ops = 0;  // of the calling thread
// Storages in PyTorch's own memory that other threads' ops or collectives use.
std::unordered_map<const StorageImpl*, int>& used_by_others = *new std::unordered_map<const StorageImpl*, int>;
void release_use(const StorageImpl* storage) {
  if (const auto used = used_by_others.find(storage); --used->second == 0) used_by_others.erase(used);
}

bool is_opener() { return loop_number != 0 && loop_number == loops_opened.load(); }

bool no_loop_is_open() { return open_spaces.load(std::memory_order_relaxed) == 0; }
// Spaces that own tensors. While there are any, other threads pin their operands: a new loop may adopt these tensors.
std::atomic<int> living_spaces{0};
bool loops_own_tensors() { return living_spaces.load(std::memory_order_relaxed) > 0; }
bool must_pin_as_other() { return is_other_thread() && loops_own_tensors(); }
// Whether no other thread moves tensors. Between loops another one may open the next loop.
bool is_only_mover() { return is_opener() && !no_loop_is_open(); }
// Whether PyTorch may skip observers on this thread, which has opened a loop. Calling `on_op` would add a quarter to
// the cost of tracking an op, and it only has to detect other threads.
thread_local bool may_disable_observers = false;
// Needed repeatedly: the end of a backward pass restores the state of its beginning.
void enable_observers() {
  if (may_disable_observers && !at::isRecordFunctionEnabled()) at::enableRecordFunction(true);
}
void disable_observers_unless_used() {
  // The end of this inference mode restores the dispatch keys of its beginning. `on_op` then notices it.
  if (c10::InferenceMode::is_enabled()) return enable_observers();
  if (!may_disable_observers && !at::isRecordFunctionEnabled()) return;
  may_disable_observers = true;
  at::enableRecordFunction(true);
  const auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  at::enableRecordFunction(observers && observers->callbacks_.size() > 1);
}

void set_tracked(bool on) {
  c10::impl::tls_set_dispatch_key_included(kKey, on);
  on ? disable_observers_unless_used() : enable_observers();
}
void leave_thread() {
  if (no_loop_is_open()) set_tracked(false);
}

std::optional<at::CallbackHandle> observer_handle;  // of `on_op`
std::atomic<bool> observer_is_enabled{false};
std::atomic<bool> has_other_threads{false};  // `on_op` has detected one
// Observes ops between loops only if there are other threads, because that costs time. A thread may lose the key
// between loops, for example at the end of a backward pass or of an inference mode.
void update_observer() {
  if (!observer_handle) return;
  const bool is_needed = !no_loop_is_open() || (has_other_threads && loops_own_tensors());
  if (observer_is_enabled.exchange(is_needed) != is_needed)
    is_needed ? at::reenableCallback(*observer_handle) : at::disableCallback(*observer_handle);
}

// Ops that use a space, on all threads. A space cannot end during one; if requested, the last op ends it.
std::atomic<int> ops_in_space{0};
std::atomic<Space*> space_to_end{nullptr};
void end_requested_space();
void leave_space() {
  if (--ops_in_space != 0 || space_to_end.load() == nullptr) return;
  try {
    end_requested_space();
  } catch (...) {  // there is no caller to report to
  }
}
struct InSpace {
  InSpace() { ++ops_in_space; }
  ~InSpace() { leave_space(); }
  InSpace(const InSpace&) = delete;
};

bool is_tracked() {
  return depth > 0 ||
         (c10::impl::tls_is_dispatch_key_included(kKey) && !is_other_thread() && current.load() != nullptr);
}

}  // namespace
