// Ops of the loop that touch nothing large pass: they run as in plain PyTorch, without a look at the loop's state.
//
// Once such an op has made something large, later ops of its operator are followed (``fallback``).

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

namespace follow {

// Below autograd and Python modes, above what makes up factory functions; nothing in PyTorch registers a fallback there.
// Operators in Python do not know that fallback: DISPATCH_KEY in native.py has them pass the key on.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
inline c10::DispatchKeySet below_key(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

// Smaller storages stay with PyTorch's allocator.
inline std::atomic<int64_t> smallest{64 * 1024};
inline bool is_large(int64_t bytes) { return bytes >= smallest.load(std::memory_order_relaxed); }
// Whether a tensor, on whatever device, has a large storage.
inline bool has_large(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() &&
         is_large(static_cast<int64_t>(impl->unsafe_storage().unsafeGetStorageImpl()->nbytes()));
}

// An op that passes, while it runs.
class Passing {
 public:
  explicit Passing(const c10::OperatorHandle& op);
  Passing(const Passing&) = delete;
  ~Passing();
  // False: the op does not pass, since the loop has to see every op now, or the thread is not the loop's.
  bool allowed() const { return allowed_; }
  // The op asks for large memory.
  void asks();
  // It asked for large memory, or was refused some: ``ran`` has something to do.
  bool concerns() const { return asked_ || refused_ != nullptr; }
  // Call after the op has run: takes its large results over, and returns whether there are any. Rethrows a refusal that the
  // kernel has caught.
  bool ran(const torch::jit::Stack& results);
  // Call after the op has thrown: rethrows the refusal, if there was one.
  void failed() const;

 private:
  const c10::OperatorHandle& op_;
  bool allowed_ = false, asked_ = false;
  std::exception_ptr refused_;
  // Values of the thread's variables, restored at the end.
  const c10::OperatorHandle* running_ = nullptr;
  std::exception_ptr* refusal_ = nullptr;
  Passing* passing_ = nullptr;
};

// The kernel of all other ops.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// Whether an operator's kernel is made of other ops, which are seen one by one.
bool is_composite(const c10::OperatorHandle& op);
// Registers a kernel for one of PyTorch's own operators that lets its ops pass without putting arguments on a stack, unless
// its signature is a rare one.
void register_unboxed(const c10::OperatorHandle& op, const char* why, std::vector<c10::RegistrationHandleRAII>& registrations);

}  // namespace follow
