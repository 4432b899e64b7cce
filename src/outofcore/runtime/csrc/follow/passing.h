// Passing ops: ops of the loop without large operands run as in plain PyTorch and skip the loop's state. Once such an
// op has created a large storage, later ops of its operator are tracked (`fallback`).

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

namespace follow {

// Below autograd and Python modes, above decompositions of factory functions; PyTorch registers no fallback there.
// Python operators would stop at this key: DISPATCH_KEY in native.py makes them pass it on.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
inline c10::DispatchKeySet below_key(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

// Smaller storages stay with PyTorch's allocator.
inline std::atomic<int64_t> smallest{64 * 1024};
inline bool is_large(int64_t bytes) { return bytes >= smallest.load(std::memory_order_relaxed); }
inline bool has_large(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() &&
         is_large(static_cast<int64_t>(impl->unsafe_storage().unsafeGetStorageImpl()->nbytes()));
}

class Passing {
 public:
  explicit Passing(const c10::OperatorHandle& op);
  Passing(const Passing&) = delete;
  ~Passing();
  // Returns false if the loop has to see all ops now, or if the thread is not the loop's.
  bool is_allowed() const { return allowed_; }
  void note_request();
  // Whether the op requested large memory or was refused some, and so needs `take_results`.
  bool needs_take_results() const { return has_requested_ || refused_ != nullptr; }
  // Call after the op has run. Returns whether it has large results. Rethrows a refusal that the kernel has caught.
  bool take_results(const torch::jit::Stack& results);
  void rethrow_refusal() const;

 private:
  const c10::OperatorHandle& op_;
  bool allowed_ = false, has_requested_ = false;
  std::exception_ptr refused_;
  const c10::OperatorHandle* running_ = nullptr;
  std::exception_ptr* refusal_ = nullptr;
  Passing* passing_ = nullptr;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// Whether an operator's kernel calls other ops that are observed one by one.
bool is_composite(const c10::OperatorHandle& op);
// Registers a kernel for an ATen operator that passes without boxing its arguments, unless its signature is rare.
void register_unboxed(const c10::OperatorHandle& op, const char* debug_name,
                      std::vector<c10::RegistrationHandleRAII>& registrations);

}  // namespace follow
