// Kernels for ATen operators by C++ signature: passing ops (passing.h) skip the boxed arguments, which would dominate
// their cost. All others are boxed and go to `fallback`.

#include "passing.h"

#include <ATen/Operators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace {

// Whether an argument is, or contains, a tensor with a large storage.
template <class Argument>
bool is_or_has_large(const Argument& argument) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    return follow::has_large(argument);
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    return argument.has_value() && follow::has_large(*argument);
  } else if constexpr (std::is_same_v<Argument, at::TensorList> || std::is_same_v<Argument, at::ITensorListRef>) {
    for (const at::Tensor& tensor : argument)
      if (follow::has_large(tensor)) return true;
    return false;
  } else if constexpr (std::is_same_v<Argument, c10::List<std::optional<at::Tensor>>>) {
    for (const std::optional<at::Tensor> tensor : argument)
      if (is_or_has_large(tensor)) return true;
    return false;
  } else {
    return false;
  }
}

template <class Result>
void push(torch::jit::Stack& stack, const Result& result) {
  if constexpr (std::is_same_v<Result, at::Tensor> || std::is_same_v<Result, std::vector<at::Tensor>>)
    stack.emplace_back(result);
}
template <class... Results>
void push(torch::jit::Stack& stack, const std::tuple<Results...>& results) {
  std::apply([&](const auto&... element) { (push(stack, element), ...); }, results);
}

template <class Signature>
class Unboxed;
template <class Result, class... Arguments>
class Unboxed<Result(Arguments...)> final : public c10::OperatorKernel {
 public:
  explicit Unboxed(const c10::OperatorHandle& op)
      : op_(op.typed<Result(Arguments...)>()), composite_(follow::is_composite(op)) {}

  Result operator()(c10::DispatchKeySet keys, Arguments... arguments) {
    if (composite_) return op_.redispatch(follow::below_key(keys), std::forward<Arguments>(arguments)...);
    if (!creates_large_.load(std::memory_order_relaxed) && !(is_or_has_large(arguments) || ...)) {
      follow::Passing passing(op_);
      if (passing.is_allowed()) return run(passing, follow::below_key(keys), std::forward<Arguments>(arguments)...);
    }
    static const auto boxed = c10::BoxedKernel::makeFromFunction<&follow::fallback>();
    return c10::impl::BoxedKernelWrapper<Result(Arguments...)>::call(boxed, op_, keys,
                                                                     std::forward<Arguments>(arguments)...);
  }

 private:
  Result run(follow::Passing& passing, c10::DispatchKeySet below, Arguments... arguments) {
    const auto take_results = [&](const torch::jit::Stack& results) {
      if (passing.take_results(results)) creates_large_ = true;
    };
    try {
      if constexpr (std::is_void_v<Result>) {
        op_.redispatch(below, std::forward<Arguments>(arguments)...);
        if (passing.needs_take_results()) take_results({});
      } else {
        Result result = op_.redispatch(below, std::forward<Arguments>(arguments)...);
        if (passing.needs_take_results()) {
          torch::jit::Stack results;
          push<std::remove_reference_t<Result>>(results, result);
          take_results(results);
        }
        return static_cast<Result>(result);
      }
    } catch (...) {
      passing.rethrow_refusal();
      throw;
    }
  }

  c10::TypedOperatorHandle<Result(Arguments...)> op_;
  bool composite_;
  std::atomic<bool> creates_large_{false};  // has created a large storage without large operands
};

// The schema's types as a key. Two C++ signatures may share a key, because tensor lists have two C++ types.
std::string type_key(const c10::FunctionSchema& schema) {
  std::string key;
  for (const auto* list : {&schema.arguments(), &schema.returns()}) {
    for (const c10::Argument& argument : *list) {
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      key += argument.real_type()->str() + (written ? "!," : ",");
    }
    key += ">";
  }
  return key;
}

using Register = bool (*)(const c10::OperatorHandle& op, const char* debug_name,
                          std::vector<c10::RegistrationHandleRAII>& to);
template <class Signature>
bool register_as(const c10::OperatorHandle& op, const char* debug_name, std::vector<c10::RegistrationHandleRAII>& to) {
  std::unique_ptr<c10::OperatorKernel> kernel;
  try {
    kernel = std::make_unique<Unboxed<Signature>>(op);
  } catch (const c10::Error&) {  // other signature
    return false;
  }
  to.push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), follow::kKey,
      c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Signature>>(std::move(kernel)), {}, nullptr,
      debug_name));
  return true;
}

using Signatures = std::unordered_multimap<std::string, Register>;
template <class Op>
void add(Signatures& signatures) {
  const auto op = c10::Dispatcher::singleton().findSchema({Op::name, Op::overload_name});
  if (op) signatures.emplace(type_key(op->schema()), &register_as<typename Op::schema>);
}
template <class... Ops>
Signatures signatures_of() {
  Signatures signatures;
  (add<Ops>(signatures), ...);
  return signatures;
}

// One operator per signature that is frequent in training.
namespace ops = at::_ops;
const Signatures& all_signatures() {
  static const Signatures signatures = signatures_of<
      ops::mul_Tensor, ops::add__Tensor, ops::addcmul_, ops::mul__Tensor, ops::zeros_like, ops::sqrt,
      ops::_local_scalar_dense, ops::add_Tensor, ops::mul_Scalar, ops::_to_copy, ops::_unsafe_view,
      ops::sum_dim_IntList, ops::clone, ops::normal_, ops::div__Scalar, ops::empty_memory_format,
      ops::bernoulli__float, ops::zeros, ops::addmm, ops::zero_, ops::_softmax_backward_data, ops::stack, ops::arange,
      ops::cat, ops::convolution, ops::convolution_backward, ops::_foreach_norm_Scalar, ops::linalg_vector_norm,
      ops::clamp, ops::_foreach_mul__Tensor, ops::embedding, ops::embedding_dense_backward, ops::_log_softmax,
      ops::nll_loss_forward, ops::nll_loss_backward, ops::gelu, ops::gelu_backward, ops::maximum_out, ops::full_like,
      ops::native_layer_norm, ops::native_layer_norm_backward, ops::where_self, ops::native_batch_norm,
      ops::native_batch_norm_backward, ops::_foreach_mul__Scalar, ops::sum, ops::copy_, ops::slice_backward,
      ops::select_backward, ops::lerp_Tensor, ops::argmax, ops::addcmul, ops::_foreach_add__List, ops::_foreach_sqrt,
      ops::_foreach_sqrt_, ops::_foreach_addcdiv__ScalarList, ops::_foreach_addcdiv__Scalar, ops::mse_loss,
      ops::mse_loss_backward, ops::new_zeros, ops::empty_strided, ops::lerp__Tensor, ops::full, ops::tril,
      ops::index_select, ops::gather, ops::add_Scalar>();
  return signatures;
}

}  // namespace

void follow::register_unboxed(const c10::OperatorHandle& op, const char* debug_name,
                              std::vector<c10::RegistrationHandleRAII>& registrations) {
  const auto [begin, end] = all_signatures().equal_range(type_key(op.schema()));
  for (auto candidate = begin; candidate != end; ++candidate)
    if (candidate->second(op, debug_name, registrations)) return;
}
