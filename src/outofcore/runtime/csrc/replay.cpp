// Replays the ops of a step with the arguments of the first call, which never change because every tensor has a planned
// address. Ops are recorded through dispatcher observers (ATen/record_function.h) while Python calls them. On a GPU
// they run on the current stream. Called through ctypes; functions that run ops do so without the GIL.

#include "borders.h"
#include "issue.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using Tensor = at::Tensor;
using c10::IValue;

struct Result {
  int64_t leaf;  // index among the returned tensors, lists flattened
  const void* address;
  Tensor target;
};
// A number passed as a tensor. Python creates that tensor in the op's scope, so its request precedes the op's own.
struct Number {
  size_t argument;
  c10::Scalar value;
  c10::ScalarType dtype;
};
struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::vector<Result> results;
  std::vector<Number> numbers;
};
using Begin = void (*)(void* table, int scope);
using End = void (*)();
using WaitFor = int (*)(void* queues, int64_t queue, int64_t number, double seconds);
using Publish = void (*)(void* queues, int64_t queue, int64_t number);

struct Entry {
  std::optional<Call> call;  // once recorded; before that, or without it, `issue` applies
  Issue issue = nullptr;
  const Action* actions = nullptr;
  int64_t count = 0;
  void* const* streams = nullptr;
  int scope = 0;
  int64_t instruction = 0;  // index into the start and end times
  std::vector<std::pair<int64_t, int64_t>> waits;  // queue and the sequence number to wait for
  int64_t publishes = 0;                           // number in the queue of ops; 0: no other queue waits for it
};

// As `_Failure` in replay.py.
enum Failure : int64_t {
  kNone = 0,
  kRuntime = 1,
  kIndex = 2,
  kValue = 3,
  kType = 4,
  kNotImplemented = 5,
  kMemory = 6,  // of a device
  kAlgebra = 7,
  kDevice = 8,  // device failure
  kNoMemory = 9,
  kIssue = 10,  // issuing failed; see `status`
  kStopped = 11,  // another queue failed
};

struct Replay {
  std::vector<Entry> entries;
  std::vector<Tensor> unplanned_results;  // unplanned results, kept alive until the next scope begins
  std::string message;
  Failure failure = kNone;
  int64_t at = 0;  // index of the failed entry
  int status = 0;
};

// A thread's calls since replay_watch.
struct Watch {
  std::optional<at::CallbackHandle> handle;
  // Arguments are recorded only while an op is expected: references would prolong the lifetime of an update's tensors.
  bool expects = false;
  int depth = 0, calls = 0;
  std::optional<c10::OperatorName> name;
  std::vector<IValue> arguments;
};
thread_local std::unique_ptr<Watch> watch;

std::unique_ptr<at::ObserverContext> on_op_begin(const at::RecordFunction& function) {
  Watch* active = watch.get();
  if (active == nullptr) return nullptr;
  if (active->depth++ == 0 && active->expects) {
    ++active->calls;
    active->name = function.operator_name();
    const auto inputs = function.inputs();
    active->arguments.assign(inputs.begin(), inputs.end());
  }
  return nullptr;
}
void on_op_end(const at::RecordFunction&, at::ObserverContext*) {
  if (watch) --watch->depth;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Action>
void each_tensor(const IValue& value, Action&& action) {
  if (value.isTensor()) {
    action(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) action(tensor);
  } else if (value.isList()) {  // optional tensors or numbers
    for (const IValue& element : value.toListRef()) each_tensor(element, action);
  }
}

// Copies results to their planned addresses unless they are already there.
void copy_to_plan(Replay& replay, const Call& call, const torch::jit::Stack& stack) {
  if (call.results.empty()) return;
  int64_t leaf = 0;
  auto next = call.results.begin();
  for (const IValue& value : stack) {
    if (!value.isTensor() && !value.isTensorList()) {
      ++leaf;  // a number
      continue;
    }
    each_tensor(value, [&](const Tensor& result) {
      if (next == call.results.end() || next->leaf != leaf++) return;
      const Result& planned = *next++;
      const void* address = result.const_data_ptr();
      if (address == planned.address && result.strides() == planned.target.strides()) return;
      planned.target.copy_(address == planned.address ? result.clone() : result);
      replay.unplanned_results.push_back(result);
    });
  }
}

Tensor tensor_of(const Number& number) {
  Tensor tensor = at::scalar_tensor(number.value, at::TensorOptions().dtype(number.dtype));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

int64_t record_failure(Replay& replay, Failure failure, const char* message) {
  replay.failure = failure;
  try {
    replay.message = message;
  } catch (...) {
    replay.message.clear();
  }
  return -1;
}

// Runs an action and converts its exception to a failure code for Python.
template <class Action>
int64_t run_guarded(Replay& replay, Action&& action) {
  try {
    return action();
  } catch (const c10::IndexError& error) {
    return record_failure(replay, kIndex, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return record_failure(replay, kValue, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    return record_failure(replay, kType, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    return record_failure(replay, kNotImplemented, error.what_without_backtrace());
  } catch (const c10::LinAlgError& error) {
    return record_failure(replay, kAlgebra, error.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& error) {
    return record_failure(replay, kMemory, error.what_without_backtrace());
  } catch (const c10::AcceleratorError& error) {
    return record_failure(replay, kDevice, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return record_failure(replay, kRuntime, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return record_failure(replay, kNoMemory, error.what());
  } catch (const std::exception& error) {
    return record_failure(replay, kRuntime, error.what());
  } catch (...) {
    return record_failure(replay, kRuntime, "an op threw an unknown exception");
  }
}

const borders::Border kBorders[] = {
    ENUM("ReplayFailure", Failure, kNone, kRuntime, kIndex, kValue, kType, kNotImplemented, kMemory, kAlgebra, kDevice,
                                   kNoMemory, kIssue, kStopped),
    // issue.cpp fills these in but is compiled for CUDA only.
    ENUM("Kind", Kind, kWait, kRecord, kCopy, kTransfer),
    STRUCT(Action, kind, stream, to, of, bytes),
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Replay* replay_new(int64_t entries) noexcept try {
  auto replay = std::make_unique<Replay>();
  replay->entries.resize(static_cast<size_t>(entries));
  return replay.release();
} catch (...) {
  return nullptr;
}
EXPORT void replay_free(Replay* replay) noexcept { delete replay; }

EXPORT int64_t replay_watch() noexcept try {
  watch = std::make_unique<Watch>();
  watch->handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_op_begin, &on_op_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  return 0;
} catch (...) {
  watch.reset();
  return -1;
}
EXPORT void replay_unwatch() noexcept {
  if (watch && watch->handle) at::removeCallback(*watch->handle);
  watch.reset();
}

EXPORT void replay_expect() noexcept {
  if (!watch) return;
  watch->calls = 0;
  watch->expects = true;
}

// Stores the expected op as an entry if exactly one op of this name ran and each tensor argument is in `tensors` or is
// a plain number. `results` has three values per result: leaf, address, and PyTorch's TensorImpl. Returns whether the
// entry was stored.
EXPORT int64_t replay_take(Replay* replay, int64_t number, const char* name, const char* overload, int scope,
                           int64_t instruction, int64_t count, const int64_t* results, int64_t tensor_count,
                           const int64_t* tensors) noexcept try {
  Watch* active = watch.get();
  if (active == nullptr) return 0;
  active->expects = false;
  const int calls = std::exchange(active->calls, 0);
  const auto called = std::exchange(active->name, std::nullopt);
  auto arguments = std::exchange(active->arguments, {});
  if (calls != 1 || active->depth != 0 || !called || called->name != name || called->overload_name != overload)
    return 0;
  const auto op = c10::Dispatcher::singleton().findSchema(*called);
  if (!op || op->schema().arguments().size() != arguments.size()) return 0;
  for (const auto& returned : op->schema().returns()) {
    // Numbers, such as the lengths that attention returns, keep their captured values.
    const auto kind = returned.type()->str();
    if (kind != "Tensor" && kind != "Tensor[]" && kind != "int" && kind != "SymInt") return 0;
  }
  std::vector<Number> numbers;
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool all_known = true;
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() &&
        arguments[i].toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      const Tensor& tensor = arguments[i].toTensor();
      numbers.push_back({i, tensor.item(), tensor.scalar_type()});
      arguments[i] = IValue();
      continue;
    }
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      const auto object = reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl());
      all_known &= !tensor.defined() || std::find(tensors, tensors + tensor_count, object) != tensors + tensor_count;
    });
    if (!all_known) return 0;
  }
  Call call{*op, std::move(arguments), {}, std::move(numbers)};
  for (int64_t i = 0; i < count; ++i) {
    auto* target = reinterpret_cast<c10::TensorImpl*>(results[3 * i + 2]);
    call.results.push_back({results[3 * i], reinterpret_cast<const void*>(results[3 * i + 1]),
                            Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(target))});
  }
  Entry& entry = replay->entries[static_cast<size_t>(number)];
  entry.call = std::move(call);
  entry.scope = scope;
  entry.instruction = instruction;
  return 1;
} catch (...) {
  return 0;
}
EXPORT void replay_issue(Replay* replay, int64_t number, Issue issue, const Action* actions, int64_t count,
                         void* const* streams) noexcept {
  Entry& entry = replay->entries[static_cast<size_t>(number)];
  entry.issue = issue;
  entry.actions = actions;
  entry.count = count;
  entry.streams = streams;
}

// Makes an entry wait for `count` pairs of queue and sequence number in `waits`, and publish its own number unless that
// is 0. Returns 0, or -1 if memory ran out.
EXPORT int64_t replay_order(Replay* replay, int64_t number, int64_t count, const int64_t* waits,
                            int64_t publishes) noexcept try {
  Entry& entry = replay->entries[static_cast<size_t>(number)];
  entry.waits.clear();
  for (int64_t i = 0; i < count; ++i) entry.waits.emplace_back(waits[2 * i], waits[2 * i + 1]);
  entry.publishes = publishes;
  return 0;
} catch (...) {
  return -1;
}

// Runs entries from `first` to `end`, or until `seconds` have passed. `begin` opens an op's scope with `table`;
// `close`, if not null, ends it. `starts` and `ends`, if not null, receive the ops' times. `queues`, if not null, are
// waited for and published to with `wait` and `publish`. If `*stops` is not 0 after an op, returns without publishing
// that op. Returns the index after the last entry that ran, or -1 if the entry at `replay_at` failed.
EXPORT int64_t replay_run(Replay* replay, int64_t first, int64_t end, double seconds, Begin begin, End close, void* table,
                          double* starts, double* ends, void* queues, WaitFor wait, Publish publish,
                          const volatile int64_t* stops) noexcept {
  int64_t at = first;
  const double until = now() + seconds;
  replay->failure = kNone;
  torch::jit::Stack stack;
  const int64_t next_entry = run_guarded(*replay, [&]() -> int64_t {
    for (; at < end; ++at) {
      const Entry& entry = replay->entries[static_cast<size_t>(at)];
      if (entry.issue != nullptr) {
        replay->status = entry.issue(entry.actions, entry.count, entry.streams);
        if (replay->status != 0) return record_failure(*replay, kIssue, "");
        continue;
      }
      if (queues != nullptr) {
        for (const auto& [queue, count] : entry.waits) {
          const int status = wait(queues, queue, count, std::max(until - now(), 0.0));
          if (status > 1) return record_failure(*replay, kStopped, "");
          if (status != 0) return at;
        }
      }
      if (!entry.call) return record_failure(*replay, kRuntime, "an op cannot be replayed because it was not recorded");
      if (starts != nullptr) starts[entry.instruction] = now();
      if (begin != nullptr) begin(table, entry.scope);
      replay->unplanned_results.clear();
      struct Scope {
        End close;
        ~Scope() {
          if (close != nullptr) close();
        }
      } const scope{close};
      stack = entry.call->arguments;
      for (const Number& number : entry.call->numbers) stack[number.argument] = tensor_of(number);
      entry.call->op.callBoxed(&stack);
      copy_to_plan(*replay, *entry.call, stack);
      stack.clear();
      if (ends != nullptr) ends[entry.instruction] = now();
      if (stops != nullptr && *stops != 0) return at + 1;
      if (queues != nullptr && entry.publishes != 0) publish(queues, 0, entry.publishes);
      if (ends != nullptr && ends[entry.instruction] > until) return at + 1;
    }
    return at;
  });
  replay->at = at;
  return next_entry;
}
EXPORT void replay_let_go(Replay* replay) noexcept { replay->unplanned_results.clear(); }
EXPORT int64_t replay_status(const Replay* replay) noexcept { return replay->status; }
EXPORT int64_t replay_failure(const Replay* replay) noexcept { return replay->failure; }
EXPORT int64_t replay_at(const Replay* replay) noexcept { return replay->at; }
EXPORT const char* replay_message(const Replay* replay) noexcept { return replay->message.c_str(); }
