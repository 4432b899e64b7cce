// Calls the ops of a step again as they were called the first time: the same operators with the same arguments, which
// never change, since every tensor has its planned place. What lies between two kernels is then the dispatcher alone.
//
// An op is taken down while Python calls it, as the dispatcher tells observers of it (ATen/record_function.h). For the
// CPU, and for a GPU, on the stream that is current. Called by ctypes; what runs ops, without the GIL.

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

// A result that the plan has in a certain place.
struct Result {
  int64_t leaf;  // which of the tensors that the op returns, those of lists one by one
  const void* address;
  Tensor target;  // the tensor there
};
// A number in place of a tensor. Python makes a tensor of it for each call, in the scope of the op, and so what the op asks
// for was recorded with that request before its own.
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
// Of queues beside that of the ops; see copying.cpp.
using WaitFor = int (*)(void* queues, int64_t queue, int64_t number, double seconds);
using Publish = void (*)(void* queues, int64_t queue, int64_t number);

struct Entry {
  std::optional<Call> call;  // as soon as it was taken down; else something to issue
  Issue issue = nullptr;
  const Action* actions = nullptr;
  int64_t count = 0;
  void* const* streams = nullptr;
  int scope = 0;
  int64_t instruction = 0;  // whose times are told
  std::vector<std::pair<int64_t, int64_t>> waits;  // for queues, until so much is done
  int64_t publishes = 0;                           // its number in the queue of ops; 0: nobody waits for it
};

// As ``_Failure`` in replay.py.
enum Failure : int64_t {
  kNone = 0,
  kRuntime = 1,
  kIndex = 2,
  kValue = 3,
  kType = 4,
  kNotImplemented = 5,
  kMemory = 6,  // of a device
  kAlgebra = 7,
  kDevice = 8,  // it fails
  kNoMemory = 9,
  kIssue = 10,  // what was to be issued was not: there is a status
  kStopped = 11,  // another queue has failed
};

struct Replay {
  std::vector<Entry> entries;
  std::vector<Tensor> elsewhere;  // results that lay elsewhere: they live until the next scope has begun
  std::string message;
  Failure failure = kNone;
  int64_t at = 0;  // the entry that failed
  int status = 0;
};

// What a thread has called since it is watched.
struct Watch {
  std::optional<at::CallbackHandle> handle;
  // Only then is anything kept: what an update calls may not live a moment longer than it does without being watched.
  bool expects = false;
  int depth = 0, calls = 0;
  std::optional<c10::OperatorName> name;
  std::vector<IValue> arguments;
};
thread_local std::unique_ptr<Watch> watch;

std::unique_ptr<at::ObserverContext> begun(const at::RecordFunction& function) {
  Watch* seen = watch.get();
  if (seen == nullptr) return nullptr;
  if (seen->depth++ == 0 && seen->expects) {
    ++seen->calls;
    seen->name = function.operator_name();
    const auto inputs = function.inputs();
    seen->arguments.assign(inputs.begin(), inputs.end());
  }
  return nullptr;
}
void ended(const at::RecordFunction&, at::ObserverContext*) {
  if (watch) --watch->depth;
}

double now() {
  // What Python's perf_counter() is on Linux.
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Action>
void each_tensor(const IValue& value, Action&& action) {
  if (value.isTensor()) {
    action(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) action(tensor);
  } else if (value.isList()) {  // of optional tensors, or of numbers
    for (const IValue& element : value.toListRef()) each_tensor(element, action);
  }
}

// Copies results to where the plan has them, as far as they lie elsewhere.
void place(Replay& replay, const Call& call, const torch::jit::Stack& stack) {
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
      const Result& wanted = *next++;
      const void* address = result.const_data_ptr();
      if (address == wanted.address && result.strides() == wanted.target.strides()) return;
      wanted.target.copy_(address == wanted.address ? result.clone() : result);
      replay.elsewhere.push_back(result);
    });
  }
}

Tensor tensor_of(const Number& number) {
  Tensor tensor = at::scalar_tensor(number.value, at::TensorOptions().dtype(number.dtype));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

int64_t failed(Replay& replay, Failure failure, const char* message) {
  replay.failure = failure;
  try {
    replay.message = message;
  } catch (...) {
    replay.message.clear();
  }
  return -1;
}

// Runs what makes an error of a message, and tells which one it is to be in Python.
template <class Action>
int64_t guarded(Replay& replay, Action&& action) {
  try {
    return action();
  } catch (const c10::IndexError& error) {
    return failed(replay, kIndex, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return failed(replay, kValue, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    return failed(replay, kType, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    return failed(replay, kNotImplemented, error.what_without_backtrace());
  } catch (const c10::LinAlgError& error) {
    return failed(replay, kAlgebra, error.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& error) {
    return failed(replay, kMemory, error.what_without_backtrace());
  } catch (const c10::AcceleratorError& error) {
    return failed(replay, kDevice, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return failed(replay, kRuntime, error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return failed(replay, kNoMemory, error.what());
  } catch (const std::exception& error) {
    return failed(replay, kRuntime, error.what());
  } catch (...) {
    return failed(replay, kRuntime, "an op failed and does not say why");
  }
}

const borders::Border kBorders[] = {
    ENUM("ReplayFailure", Failure, kNone, kRuntime, kIndex, kValue, kType, kNotImplemented, kMemory, kAlgebra, kDevice,
                                   kNoMemory, kIssue, kStopped),
    // Filled in for issue.cpp, which is compiled for CUDA alone.
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

// Begins to take down what the calling thread calls. 0: done; -1: no memory.
EXPORT int64_t replay_watch() noexcept try {
  watch = std::make_unique<Watch>();
  watch->handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&begun, &ended).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  return 0;
} catch (...) {
  watch.reset();
  return -1;
}
EXPORT void replay_unwatch() noexcept {
  if (watch && watch->handle) at::removeCallback(*watch->handle);
  watch.reset();
}

// The next op may be taken down.
EXPORT void replay_expect() noexcept {
  if (!watch) return;
  watch->calls = 0;
  watch->expects = true;
}

// Has the op that was called since it was expected be an entry, if it was one, of this name, and on tensors that the
// caller knows or that are plain numbers. ``results`` are, for each, the leaf, the address and PyTorch's own object for the
// tensor; ``known`` these objects. 1: it is one now; 0: it is not.
EXPORT int64_t replay_take(Replay* replay, int64_t number, const char* name, const char* overload, int scope,
                           int64_t instruction, int64_t count, const int64_t* results, int64_t knows,
                           const int64_t* known) noexcept try {
  Watch* seen = watch.get();
  if (seen == nullptr) return 0;
  seen->expects = false;
  const int calls = std::exchange(seen->calls, 0);
  const auto called = std::exchange(seen->name, std::nullopt);
  auto arguments = std::exchange(seen->arguments, {});
  if (calls != 1 || seen->depth != 0 || !called || called->name != name || called->overload_name != overload) return 0;
  const auto op = c10::Dispatcher::singleton().findSchema(*called);
  if (!op || op->schema().arguments().size() != arguments.size()) return 0;
  for (const auto& returned : op->schema().returns()) {
    // Numbers, such as the lengths that attention returns, are what they were when the step was captured.
    const auto kind = returned.type()->str();
    if (kind != "Tensor" && kind != "Tensor[]" && kind != "int" && kind != "SymInt") return 0;
  }
  std::vector<Number> numbers;
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool all = true;
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() &&
        arguments[i].toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      const Tensor& tensor = arguments[i].toTensor();
      numbers.push_back({i, tensor.item(), tensor.scalar_type()});
      arguments[i] = IValue();
      continue;
    }
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      const auto object = reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl());
      all &= !tensor.defined() || std::find(known, known + knows, object) != known + knows;
    });
    if (!all) return 0;
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
// Has an entry issue actions to a device.
EXPORT void replay_issue(Replay* replay, int64_t number, Issue issue, const Action* actions, int64_t count,
                         void* const* streams) noexcept {
  Entry& entry = replay->entries[static_cast<size_t>(number)];
  entry.issue = issue;
  entry.actions = actions;
  entry.count = count;
  entry.streams = streams;
}

// Has an entry wait for ``count`` queues, given with how much is to be done in each, and tell its own number, if it is not
// 0. 0: done; -1: no memory.
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

// Runs entries from ``first`` on, up to ``end`` or until so many seconds are over. ``begin`` opens the scope of an op with
// ``table``; ``close``, if it is given, ends it. ``starts`` and ``ends`` are told when ops began and ended; null: nothing
// is. ``queues``, if they are given, are waited for and told with the two functions that follow. Returns the entry after
// the last one that has run; -1: the one at ``replay_at`` has failed. ``stops``, if it is given and not 0 after an op, has
// it return at once: nobody has been told of that op.
EXPORT int64_t replay_run(Replay* replay, int64_t first, int64_t end, double seconds, Begin begin, End close, void* table,
                          double* starts, double* ends, void* queues, WaitFor wait, Publish publish,
                          const volatile int64_t* stops) noexcept {
  int64_t at = first;
  const double until = now() + seconds;
  replay->failure = kNone;
  torch::jit::Stack stack;
  const int64_t done = guarded(*replay, [&]() -> int64_t {
    for (; at < end; ++at) {
      const Entry& entry = replay->entries[static_cast<size_t>(at)];
      if (entry.issue != nullptr) {
        replay->status = entry.issue(entry.actions, entry.count, entry.streams);
        if (replay->status != 0) return failed(*replay, kIssue, "");
        continue;
      }
      if (queues != nullptr) {
        for (const auto& [queue, count] : entry.waits) {
          const int status = wait(queues, queue, count, std::max(until - now(), 0.0));
          if (status > 1) return failed(*replay, kStopped, "");
          if (status != 0) return at;
        }
      }
      if (!entry.call) return failed(*replay, kRuntime, "an op was to be replayed that was not taken down");
      if (starts != nullptr) starts[entry.instruction] = now();
      if (begin != nullptr) begin(table, entry.scope);
      replay->elsewhere.clear();
      // Ends the scope whatever the op does.
      struct Scope {
        End close;
        ~Scope() {
          if (close != nullptr) close();
        }
      } const scope{close};
      stack = entry.call->arguments;
      for (const Number& number : entry.call->numbers) stack[number.argument] = tensor_of(number);
      entry.call->op.callBoxed(&stack);
      place(*replay, *entry.call, stack);
      stack.clear();
      if (ends != nullptr) ends[entry.instruction] = now();
      if (stops != nullptr && *stops != 0) return at + 1;
      if (queues != nullptr && entry.publishes != 0) publish(queues, 0, entry.publishes);
      if (ends != nullptr && ends[entry.instruction] > until) return at + 1;
    }
    return at;
  });
  replay->at = at;
  return done;
}
// Lets go of what was kept until the next scope begins.
EXPORT void replay_let_go(Replay* replay) noexcept { replay->elsewhere.clear(); }
EXPORT int64_t replay_status(const Replay* replay) noexcept { return replay->status; }
EXPORT int64_t replay_failure(const Replay* replay) noexcept { return replay->failure; }
EXPORT int64_t replay_at(const Replay* replay) noexcept { return replay->at; }
EXPORT const char* replay_message(const Replay* replay) noexcept { return replay->message.c_str(); }
