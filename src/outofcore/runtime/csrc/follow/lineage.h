// How the bytes of a storage came about: the ops that made it, such that they can be run again with the same bits.
//
// A step is one op with its arguments. Storages that are followed stand in it as references, with the version that the op
// saw; what is smaller is copied, since nobody tells when it changes. What else decides about the bits is kept with it:
// the state of the generator before a random op, and the settings of PyTorch that kernels look at. A lineage begins with
// the op that made the storage; ops that changed it in place since are further steps.

#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "silent_writes.h"

namespace follow {

// What running an op once more gives.
enum class Again {
  kNo,        // something else, or more than its results
  kMakes,     // the same new storages
  kEmpty,     // new storages, in which anything may stand
  kChanges,   // the same bytes in its first argument, if they were the same before
  kFills,     // the same bytes in its first argument, whatever was there
};

// Those that change their running mean and variance, and in training do not look at them. Arguments 3 to 5 are these two and
// whether it is training.
inline bool is_batch_norm(const std::string& name) {
  return name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm";
}

inline Again again_of(const c10::OperatorHandle& op) {
  // These read what lies outside of their arguments, or give other bits each time.
  static const std::unordered_set<std::string> refused{
      "aten::from_file", "aten::_cudnn_init_dropout_state", "aten::linalg_lstsq",
      "aten::fake_quantize_per_tensor_affine_cachemask_tensor_qparams"};
  static const std::unordered_set<std::string> empty{
      "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty",
      "aten::new_empty_strided"};
  static const std::unordered_set<std::string> fills{
      "aten::zero_", "aten::fill_", "aten::copy_", "aten::bernoulli_", "aten::normal_", "aten::uniform_",
      "aten::random_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"};
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (name.rfind("aten::", 0) != 0 || refused.count(name) != 0) return Again::kNo;
  if (op.hasTag(at::Tag::nondeterministic_bitwise) || op.hasTag(at::Tag::inplace_view)) return Again::kNo;
  if (schema.returns().empty() || schema.arguments().empty()) return Again::kNo;
  size_t written = 0, place = 0;
  for (const auto& argument : schema.arguments()) {
    written += argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    // step_of() keeps these from their statistics.
    if (writes_silently(name, argument.name(), place++) && !is_batch_norm(name)) return Again::kNo;
  }
  if (written == 0) {
    for (const auto& result : schema.returns())
      if (result.alias_info() != nullptr) return Again::kNo;
    return empty.count(name) != 0 ? Again::kEmpty : Again::kMakes;
  }
  const auto* first = schema.arguments()[0].alias_info();
  if (written > 1 || first == nullptr || !first->isWrite() || schema.returns().size() != 1) return Again::kNo;
  if (name.back() != '_' || schema.arguments()[0].type()->kind() != c10::TypeKind::TensorType) return Again::kNo;
  return fills.count(name) != 0 ? Again::kFills : Again::kChanges;
}

inline bool is_differentiable(const at::Tensor& tensor) {
  return c10::isFloatingType(tensor.scalar_type()) || c10::isComplexType(tensor.scalar_type());
}

// What a tensor is beside its storage.
struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta type;
  c10::DispatchKey kernels = Device::kKernels;
  bool requires_grad = false;  // some kernels look at it
  bool wrapped_number = false;

  static Geometry of(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.dtype(),
            tensor.is_cpu() ? c10::DispatchKey::CPU : Device::kKernels,
            is_differentiable(tensor) && tensor.requires_grad(), impl->is_wrapped_number()};
  }
  at::Tensor on(c10::Storage storage) const {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kernels), type);
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(sizes, strides, offset);
    if (wrapped_number) impl->set_wrapped_number(true);
    return tensor;
  }
  // As the argument of an op that runs again.
  at::Tensor as_argument(c10::Storage storage) const {
    auto tensor = on(std::move(storage));
    if (requires_grad) tensor.unsafeGetTensorImpl()->set_requires_grad(true);
    return tensor;
  }
};

// Whether a tensor is its storage and its geometry, and nothing else. Ops of a GPU take numbers in tensors of the CPU.
inline bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::DispatchKey kernels = tensor.is_cpu() ? c10::DispatchKey::CPU : Device::kKernels;
  return impl->has_storage() && (tensor.is_cpu() || Device::is_ours(tensor.device())) &&
         impl->layout() == c10::kStrided && impl->key_set().has(kernels) && !impl->is_python_dispatch() &&
         !impl->has_symbolic_sizes_strides() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

// Settings of PyTorch on which the bits depend that kernels compute.
struct Settings {
  std::array<bool, 6> flags{};
  std::array<at::Float32Precision, 3> precisions{};
  int threads = 0;
  c10::ScalarType type = c10::ScalarType::Float;
  unsigned rounding = 0;

  bool operator==(const Settings&) const = default;

  static Settings now() {
    const at::Context& context = at::globalContext();
    Settings found;
    found.flags = {context.deterministicAlgorithms(),  context.deterministicAlgorithmsWarnOnly(),
                   context.userEnabledMkldnn(),        context.deterministicMkldnn(),
                   context.deterministicFillUninitializedMemory(), c10::GradMode::is_enabled()};
    size_t i = 0;
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL})
      found.precisions[i++] = context.float32Precision(at::Float32Backend::MKLDNN, op);
    found.threads = at::get_num_threads();
    found.type = c10::get_default_dtype_as_scalartype();
#if defined(__x86_64__)
    found.rounding = _mm_getcsr() & 0xFFC0u;  // also whether subnormal numbers are flushed; without the exceptions seen
#endif
    return found;
  }
  void apply(const Settings& before) const {
    if (*this == before) return;
    at::Context& context = at::globalContext();
    context.setDeterministicAlgorithms(flags[0], flags[1]);
    context.setUserEnabledMkldnn(flags[2]);
    context.setDeterministicMkldnn(flags[3]);
    context.setDeterministicFillUninitializedMemory(flags[4]);
    c10::GradMode::set_enabled(flags[5]);
    size_t i = 0;
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL}) {
      if (precisions[i] != before.precisions[i]) context.setFloat32Precision(at::Float32Backend::MKLDNN, op, precisions[i]);
      ++i;
    }
    if (threads != before.threads) at::set_num_threads(threads);
    if (type != before.type) c10::set_default_dtype(c10::scalarTypeToTypeMeta(type));
#if defined(__x86_64__)
    if (rounding != before.rounding) _mm_setcsr((_mm_getcsr() & ~0xFFC0u) | rounding);
#endif
  }
};

// While it lives, the settings are those of an earlier moment.
class WithSettings {
 public:
  explicit WithSettings(const Settings& wanted) : before_(Settings::now()), wanted_(wanted) { wanted.apply(before_); }
  WithSettings(const WithSettings&) = delete;
  ~WithSettings() { before_.apply(wanted_); }

 private:
  Settings before_;
  const Settings& wanted_;
};

struct Origin;
struct Step;

// How a storage was made that may be gone.
struct Making {
  std::vector<std::shared_ptr<const Step>> steps;
  size_t result = 0;  // which of the storages that the first step made
  int64_t bytes = 0;
  int depth = 0;      // of how many storages in a row it is known how they were made, before this one
};

// An argument of a step that is a followed storage.
struct Reference {
  size_t argument = 0;
  int64_t element = -1;  // of a list; -1: the argument itself
  std::weak_ptr<Origin> origin;
  bool itself = false;  // the storage whose lineage it is
  int64_t version = 0;
  c10::VariableVersion counter;  // PyTorch's own, which also counts what other threads do
  uint32_t count = 0;
  std::shared_ptr<const Making> making;
  Geometry geometry;
};

inline uint32_t count_of(const c10::VariableVersion& counter) { return counter.enabled() ? counter.current_version() : 0; }

struct Step {
  Step(const c10::OperatorHandle& op, c10::DispatchKeySet below, Device::Stream stream)
      : op(op), below(below), stream(stream) {}
  c10::OperatorHandle op;
  c10::DispatchKeySet below;
  Device::Stream stream;
  std::vector<c10::IValue> arguments;  // undefined tensors where references belong
  std::vector<Reference> references;
  Settings settings;
  std::optional<at::Generator> generator;  // as it was
  bool generator_given = false;            // the op takes it as its argument
  size_t generator_argument = 0;
  int64_t nanoseconds = 0;
  size_t place = 0;  // among the ops of its loop's step, where a device times these
};

struct Recipe;

// What is known of one followed storage. All of it is behind the lock of the pager.
struct Origin {
  int64_t id = 0;       // of its block
  int64_t version = 0;  // how often it was written
  bool wanted = false;  // it is to be made again
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  std::vector<std::shared_ptr<const Step>> steps;  // that made it; empty: they are not known
  size_t result = 0;    // which of the storages that the first step made
  bool complete = false;  // they determine each of its bytes
  std::vector<std::weak_ptr<Recipe>> recipes;  // of it
  std::vector<std::weak_ptr<Recipe>> readers;  // recipes that start from it

  // So many storages in a row are made again, each from the one before.
  static constexpr int kDeepest = 4;
  // More steps than a storage has that is worth making again; those of an optimizer's state never end.
  static constexpr size_t kMostSteps = 8;

  void forget() {
    steps.clear();
    complete = false;
  }
  // Written, and not by a step.
  void changed() {
    ++version;
    forget();
  }
};

// Null: it is not known, or would begin too far back.
inline std::shared_ptr<const Making> making_of(const Origin& origin, int64_t bytes) {
  if (origin.steps.empty() || !origin.complete) return {};
  auto making = std::make_shared<Making>();
  for (const auto& step : origin.steps)
    for (const Reference& reference : step->references)
      if (reference.making) making->depth = std::max(making->depth, reference.making->depth + 1);
  if (making->depth >= Origin::kDeepest) return {};
  making->steps = origin.steps;
  making->result = origin.result;
  making->bytes = bytes;
  return making;
}

template <class Action>
void each_tensor(const c10::IValue& value, Action&& action) {
  if (value.isTensor()) {
    action(value.toTensor(), int64_t{-1});
  } else if (value.isList()) {
    const auto list = value.toListRef();
    for (size_t i = 0; i < list.size(); ++i)
      if (list[i].isTensor()) action(list[i].toTensor(), static_cast<int64_t>(i));
  }
}

inline bool is_generator(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The storage of a tensor that is only looked at for its shape.
inline c10::Storage no_bytes(c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            at::DataPtr(nullptr, device), nullptr, false));
}

// Keeps what an op needs to run again, before it runs. `count` arguments are on top of the stack. `origin_of` tells of a
// storage that is followed, and is asked of those that have at least `large` bytes; null: it cannot be relied upon.
// `copy_of` copies a smaller one. Null: the op could not be run again.
template <class OriginOf, class CopyOf>
std::shared_ptr<Step> step_of(const c10::OperatorHandle& op, Again again, c10::DispatchKeySet below,
                              Device::Stream stream, const torch::jit::Stack& stack, size_t count, bool shapes,
                              int64_t large, OriginOf&& origin_of, CopyOf&& copy_of) {
  if (c10::InferenceMode::is_enabled() || !Device::is_current()) return {};
  auto step = std::make_shared<Step>(op, below, stream);
  step->arguments.assign(stack.end() - static_cast<int64_t>(count), stack.end());
  const auto& schema = op.schema();
  if (is_batch_norm(schema.name()) && step->arguments[5].toBool())
    step->arguments[3] = step->arguments[4] = at::Tensor();
  std::shared_ptr<Origin> self;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& argument = step->arguments[i];
    if (argument.isStorage() || argument.isStream() || argument.isObject()) return {};
    const bool listed = argument.isList();
    std::vector<std::pair<int64_t, at::Tensor>> replaced;
    bool understood = true;
    each_tensor(argument, [&](const at::Tensor& tensor, int64_t element) {
      if (!tensor.defined() || !understood) return;
      if (!is_plain(tensor)) {
        understood = false;
        return;
      }
      Geometry geometry = Geometry::of(tensor);
      c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
      if (shapes) {
        replaced.emplace_back(element, geometry.as_argument(no_bytes(tensor.device())));
      } else if (static_cast<int64_t>(storage.nbytes()) < large) {
        understood = tensor.is_cpu() || Device::copies_alike(storage);
        if (!understood) return;
        replaced.emplace_back(element, geometry.as_argument(copy_of(storage)));
      } else {
        const std::shared_ptr<Origin> origin = origin_of(storage);
        if (!origin) {
          understood = false;
          return;
        }
        const bool changes = again == Again::kChanges || again == Again::kFills;
        if (changes && i == 0) self = origin;
        replaced.emplace_back(element, at::Tensor());
        const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        const bool itself = changes && origin == self;
        step->references.push_back({i, element, origin, itself, origin->version, counter, count_of(counter),
                                    itself ? nullptr : making_of(*origin, static_cast<int64_t>(storage.nbytes())),
                                    std::move(geometry)});
      }
    });
    if (!understood) return {};
    if (replaced.empty()) continue;
    if (!listed) {
      argument = replaced[0].second;
      continue;
    }
    auto list = argument.toList().copy();
    for (auto& [element, tensor] : replaced) list.set(static_cast<size_t>(element), c10::IValue(std::move(tensor)));
    argument = std::move(list);
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Generator generator = at::globalContext().defaultGenerator(Device::kType);
    for (size_t i = 0; i < count; ++i) {
      if (!is_generator(schema.arguments()[i])) continue;
      step->generator_given = true;
      step->generator_argument = i;
      if (step->arguments[i].isGenerator()) generator = step->arguments[i].toGenerator();
    }
    if (!Device::is_ours(generator.device())) return {};
    const std::scoped_lock lock(generator.mutex());
    step->generator = generator.clone();
  }
  step->settings = Settings::now();
  return step;
}

// Runs a step once more: `storage_of` tells where the bytes of a reference are, and `run` runs an op. The results are what
// is on the stack that it returns.
template <class StorageOf, class Run>
torch::jit::Stack run_again(const Step& step, StorageOf&& storage_of, Run&& run) {
  torch::jit::Stack stack(step.arguments);
  size_t copied = stack.size();  // the lists of the step are to stay as they are
  for (const Reference& reference : step.references) {
    at::Tensor tensor = reference.geometry.as_argument(c10::Storage(storage_of(reference)));
    c10::IValue& argument = stack[reference.argument];
    if (reference.element < 0) {
      argument = std::move(tensor);
      continue;
    }
    if (copied != reference.argument) argument = argument.toList().copy();
    copied = reference.argument;
    argument.toList().set(static_cast<size_t>(reference.element), c10::IValue(std::move(tensor)));
  }
  const WithSettings settings(step.settings);
  const Device::InOrder in_order(step.stream);
  if (!step.generator) {
    run(step.op, step.below, &stack);
    return stack;
  }
  if (step.generator_given) {
    stack[step.generator_argument] = step.generator->clone();
    run(step.op, step.below, &stack);
    return stack;
  }
  // It draws from the generator that everybody uses, who must not notice.
  at::Generator everybodys = at::globalContext().defaultGenerator(Device::kType);
  const auto put = [&](const at::Generator& from) {
    const at::Tensor state = from.get_state();
    const std::scoped_lock lock(everybodys.mutex());
    everybodys.set_state(state);
  };
  at::Generator now;
  {
    const std::scoped_lock lock(everybodys.mutex());
    now = everybodys.clone();
  }
  put(*step.generator);
  try {
    run(step.op, step.below, &stack);
  } catch (...) {
    put(now);
    throw;
  }
  put(now);
  return stack;
}

}  // namespace follow
