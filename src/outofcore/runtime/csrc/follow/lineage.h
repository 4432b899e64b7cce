// The lineage of a storage: the ops that produced its bytes, captured so that rerunning them gives the same bits. A
// step is an op with its arguments: tracked storages as references with a version, smaller ones as copies, because
// their writes are not observed. It also has the generator's state before a random op, and PyTorch's settings that
// affect kernels. In-place changes append steps.

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

enum class RerunEffect {
  kNo,       // differs, or has side effects
  kMakes,    // creates the same storages
  kEmpty,    // creates storages with undefined bytes
  kChanges,  // changes the first argument in the same way
  kFills,    // overwrites (part of) the first argument with the same bytes
};

// These ops update running statistics, which they do not read in training. Arguments 3 to 5: mean, variance, training.
inline bool is_batch_norm(const std::string& name) {
  return name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm";
}

inline RerunEffect rerun_effect_of(const c10::OperatorHandle& op) {
  // These read state outside their arguments, or give different bits each time.
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
  if (name.rfind("aten::", 0) != 0 || refused.count(name) != 0) return RerunEffect::kNo;
  if (op.hasTag(at::Tag::nondeterministic_bitwise) || op.hasTag(at::Tag::inplace_view)) return RerunEffect::kNo;
  if (schema.returns().empty() || schema.arguments().empty()) return RerunEffect::kNo;
  size_t written = 0, place = 0;
  for (const auto& argument : schema.arguments()) {
    written += argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    // capture_step() removes their running statistics.
    if (writes_silently(name, argument.name(), place++) && !is_batch_norm(name)) return RerunEffect::kNo;
  }
  if (written == 0) {
    for (const auto& result : schema.returns())
      if (result.alias_info() != nullptr) return RerunEffect::kNo;
    return empty.count(name) != 0 ? RerunEffect::kEmpty : RerunEffect::kMakes;
  }
  const auto* first = schema.arguments()[0].alias_info();
  if (written > 1 || first == nullptr || !first->isWrite() || schema.returns().size() != 1) return RerunEffect::kNo;
  if (name.back() != '_' || schema.arguments()[0].type()->kind() != c10::TypeKind::TensorType) return RerunEffect::kNo;
  return fills.count(name) != 0 ? RerunEffect::kFills : RerunEffect::kChanges;
}

inline bool is_differentiable(const at::Tensor& tensor) {
  return c10::isFloatingType(tensor.scalar_type()) || c10::isComplexType(tensor.scalar_type());
}

struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta type;
  c10::DispatchKey kernels = Device::kKernels;
  bool requires_grad = false;  // some kernels check it
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
  at::Tensor as_argument(c10::Storage storage) const {
    auto tensor = on(std::move(storage));
    if (requires_grad) tensor.unsafeGetTensorImpl()->set_requires_grad(true);
    return tensor;
  }
};

// Whether storage and geometry describe the tensor completely. GPU ops take scalars as CPU tensors.
inline bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::DispatchKey kernels = tensor.is_cpu() ? c10::DispatchKey::CPU : Device::kKernels;
  return impl->has_storage() && (tensor.is_cpu() || Device::is_ours(tensor.device())) &&
         impl->layout() == c10::kStrided && impl->key_set().has(kernels) && !impl->is_python_dispatch() &&
         !impl->has_symbolic_sizes_strides() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

struct Settings {
  std::array<bool, 6> flags{};
  std::array<at::Float32Precision, 3> precisions{};
  int threads = 0;
  c10::ScalarType type = c10::ScalarType::Float;
  unsigned rounding = 0;

  bool operator==(const Settings&) const = default;

  static Settings now() {
    const at::Context& context = at::globalContext();
    Settings settings;
    settings.flags = {context.deterministicAlgorithms(),  context.deterministicAlgorithmsWarnOnly(),
                   context.userEnabledMkldnn(),        context.deterministicMkldnn(),
                   context.deterministicFillUninitializedMemory(), c10::GradMode::is_enabled()};
    size_t i = 0;
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL})
      settings.precisions[i++] = context.float32Precision(at::Float32Backend::MKLDNN, op);
    settings.threads = at::get_num_threads();
    settings.type = c10::get_default_dtype_as_scalartype();
#if defined(__x86_64__)
    settings.rounding = _mm_getcsr() & 0xFFC0u;  // rounding and flushing of subnormals, without exception flags
#endif
    return settings;
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

class WithSettings {
 public:
  explicit WithSettings(const Settings& settings) : before_(Settings::now()), settings_(settings) {
    settings.apply(before_);
  }
  WithSettings(const WithSettings&) = delete;
  ~WithSettings() { before_.apply(settings_); }

 private:
  Settings before_;
  const Settings& settings_;
};

struct Origin;
struct Step;

// The lineage of a storage that may no longer exist.
struct Provenance {
  std::vector<std::shared_ptr<const Step>> steps;
  size_t result = 0;  // index among the storages that the first step created
  int64_t bytes = 0;
  int depth = 0;      // number of consecutive lineages before this one
};

struct Reference {
  size_t argument = 0;
  int64_t element = -1;  // of a list; -1: the argument itself
  std::weak_ptr<Origin> origin;
  bool is_own = false;  // the storage that this lineage belongs to
  int64_t version = 0;
  c10::VariableVersion counter;  // PyTorch's counter, which also counts writes of other threads
  uint32_t count = 0;
  std::shared_ptr<const Provenance> provenance;
  Geometry geometry;
};

inline uint32_t count_of(const c10::VariableVersion& counter) { return counter.enabled() ? counter.current_version() : 0; }

struct Step {
  Step(const c10::OperatorHandle& op, c10::DispatchKeySet below, Device::Stream stream)
      : op(op), below(below), stream(stream) {}
  c10::OperatorHandle op;
  c10::DispatchKeySet below;
  Device::Stream stream;
  std::vector<c10::IValue> arguments;  // undefined tensors in place of references
  std::vector<Reference> references;
  Settings settings;
  std::optional<at::Generator> generator;  // its state before the op
  bool generator_given = false;            // passed as an argument
  size_t generator_argument = 0;
  int64_t nanoseconds = 0;
  size_t place = 0;  // index among the step's ops, for a device's timer
};

struct Recipe;

// The state of one tracked storage. Guarded by the pager's lock.
struct Origin {
  int64_t id = 0;       // of its block
  int64_t version = 0;  // number of writes
  bool is_recomputed = false;  // selected for recomputation
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  std::vector<std::shared_ptr<const Step>> steps;  // its lineage; empty: unknown
  size_t result = 0;    // index among the storages that the first step created
  bool complete = false;  // the lineage determines every byte
  std::vector<std::weak_ptr<Recipe>> recipes;  // that produce it
  std::vector<std::weak_ptr<Recipe>> readers;  // recipes that start from it

  // Longest sequence of recomputed storages that depend on each other.
  static constexpr int kDeepest = 4;
  // Longer lineages are not worth rerunning; the lineage of optimizer state would grow without end.
  static constexpr size_t kMaxSteps = 8;

  void forget() {
    steps.clear();
    complete = false;
  }
  // Records a write by an op that is not captured.
  void mark_changed() {
    ++version;
    forget();
  }
};

// Returns null if the lineage is unknown or too deep.
inline std::shared_ptr<const Provenance> provenance_of(const Origin& origin, int64_t bytes) {
  if (origin.steps.empty() || !origin.complete) return {};
  auto provenance = std::make_shared<Provenance>();
  for (const auto& step : origin.steps)
    for (const Reference& reference : step->references)
      if (reference.provenance) provenance->depth = std::max(provenance->depth, reference.provenance->depth + 1);
  if (provenance->depth >= Origin::kDeepest) return {};
  provenance->steps = origin.steps;
  provenance->result = origin.result;
  provenance->bytes = bytes;
  return provenance;
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

// A storage without memory for ops that use only a tensor's shape.
inline c10::Storage empty_storage(c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            at::DataPtr(nullptr, device), nullptr, false));
}

// Captures an op and its `count` arguments on top of the stack before it runs. `origin_of` returns the origin of a
// tracked storage of at least `large` bytes, or null if the storage is unreliable. `copy_of` copies a smaller one.
// Returns null if the op cannot be rerun.
template <class OriginOf, class CopyOf>
std::shared_ptr<Step> capture_step(const c10::OperatorHandle& op, RerunEffect effect, c10::DispatchKeySet below,
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
        replaced.emplace_back(element, geometry.as_argument(empty_storage(tensor.device())));
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
        const bool changes = effect == RerunEffect::kChanges || effect == RerunEffect::kFills;
        if (changes && i == 0) self = origin;
        replaced.emplace_back(element, at::Tensor());
        const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        const bool is_own = changes && origin == self;
        step->references.push_back({i, element, origin, is_own, origin->version, counter, count_of(counter),
                                    is_own ? nullptr : provenance_of(*origin, static_cast<int64_t>(storage.nbytes())),
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

// Reruns a step and returns the stack with its results. `storage_of` returns a reference's storage; `run` runs an op.
template <class StorageOf, class Run>
torch::jit::Stack rerun(const Step& step, StorageOf&& storage_of, Run&& run) {
  torch::jit::Stack stack(step.arguments);
  size_t copied_argument = stack.size();  // the step's own lists must not change
  for (const Reference& reference : step.references) {
    at::Tensor tensor = reference.geometry.as_argument(c10::Storage(storage_of(reference)));
    c10::IValue& argument = stack[reference.argument];
    if (reference.element < 0) {
      argument = std::move(tensor);
      continue;
    }
    if (copied_argument != reference.argument) argument = argument.toList().copy();
    copied_argument = reference.argument;
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
  // The op draws from the default generator: restore its state afterwards.
  at::Generator default_generator = at::globalContext().defaultGenerator(Device::kType);
  const auto restore = [&](const at::Generator& from) {
    const at::Tensor state = from.get_state();
    const std::scoped_lock lock(default_generator.mutex());
    default_generator.set_state(state);
  };
  at::Generator now;
  {
    const std::scoped_lock lock(default_generator.mutex());
    now = default_generator.clone();
  }
  restore(*step.generator);
  try {
    run(step.op, step.below, &stack);
  } catch (...) {
    restore(now);
    throw;
  }
  restore(now);
  return stack;
}

}  // namespace follow
