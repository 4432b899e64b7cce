// Kinds of operators, and the storages that an op uses, pinned while it runs.

#pragma once

#include "silent_writes.h"
#include "storages.h"

#include <ATen/core/ivalue.h>

namespace {

enum class Kind {
  kAtom,       // its kernel accesses memory: operands are pinned
  kComposite,  // composed of other ops, which are observed one by one
  kView,       // returns a tensor of the same storage
  kShape,      // uses its operands' shapes only
};
struct Operator {
  Kind kind;
  bool runs_in_slices;  // processes lists of tensors elementwise
  bool returns_list;    // and returns a list
  bool looks_up;        // reads indexed elements of its first operand
  bool communicates;    // continues after it has returned
  size_t results;
  std::vector<bool> writes;  // by argument
  follow::RerunEffect rerun;      // effect of rerunning it
  follow::RerunEffect recipe_rerun;      // effect of rerunning it in a recipe
  mutable bool creates_large = false;  // has created a large storage without large operands
  bool is_certain = true;      // Python has answered: false after Ctrl-C
};

bool starts_with(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

bool writes_to(const c10::FunctionSchema& schema, size_t argument) {
  const auto& formal = schema.arguments()[argument];
  return (formal.alias_info() != nullptr && formal.alias_info()->isWrite()) ||
         follow::writes_silently(schema.name(), formal.name(), argument);
}
// Whether it writes no operand and all results alias operands.
bool is_view(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (writes_to(schema, i)) return false;
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(),
                                                  [](const auto& result) { return result.alias_info() != nullptr; });
}

}  // namespace

// Other composites, such as copy_, have kernels that access memory.
bool follow::is_composite(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(Device::kKernels)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         (starts_with(op.schema().name(), "aten::_foreach_") &&
          op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd));
}

namespace {

Operator describe(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> shapes{
      "aten::empty_like",   "aten::zeros_like",       "aten::ones_like", "aten::full_like",  "aten::rand_like",
      "aten::randn_like",   "aten::randint_like",     "aten::new_empty", "aten::new_zeros",  "aten::new_ones",
      "aten::new_full",     "aten::new_empty_strided", "aten::set_",     "aten::is_same_size"};
  static const std::unordered_set<std::string> lookups{
      "aten::index",       "aten::_unsafe_index", "aten::index_select",   "aten::gather",
      "aten::take",        "aten::masked_select", "aten::embedding",      "aten::_embedding_bag",
      "aten::index_put",   "aten::index_put_",    "aten::_index_put_impl_", "aten::_embedding_bag_forward_only",
      "aten::index_copy_", "aten::index_add_",    "aten::index_fill_",    "aten::scatter_",
      "aten::slice_copy",  "aten::select_copy",   "aten::narrow_copy"};
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Operator info{};
  info.looks_up = lookups.count(name) != 0;
  info.results = schema.returns().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) info.writes.push_back(writes_to(schema, i));
  const auto in_python = [&] {
    const int64_t answer =
        is_python == nullptr ? 0 : answer_of(is_python, name.c_str(), schema.overload_name().c_str());
    info.is_certain &= answer != kNoAnswer;
    return answer;
  };
  // A kernel in Python runs observed ops, and so do functional collectives.
  if (follow::is_composite(op) || starts_with(name, "_c10d_functional::"))
    info.kind = Kind::kComposite;
  else if (!starts_with(name, "aten::") && in_python() == 1)
    info.kind = Kind::kComposite;
  else if (is_view(schema))
    info.kind = Kind::kView;
  else
    info.kind = shapes.count(name) != 0 ? Kind::kShape : Kind::kAtom;
  info.returns_list = schema.returns().size() == 1 && schema.returns()[0].type()->str() == "Tensor[]";
  info.runs_in_slices =
      (starts_with(name, "aten::_fused_") || starts_with(name, "aten::_amp_foreach_")) && schema.returns().empty();
  // On a GPU, list operators have kernels of their own. Scalars passed as a tensor are indexed by list position.
  info.runs_in_slices |= info.kind == Kind::kAtom && starts_with(name, "aten::_foreach_") &&
                  (schema.returns().empty() || info.returns_list) &&
                  !(schema.overload_name() == "Tensor" && starts_with(name, "aten::_foreach_addc"));
  info.communicates = starts_with(name, "c10d::");
  info.rerun =
      info.kind == Kind::kAtom || info.kind == Kind::kShape ? follow::rerun_effect_of(op) : follow::RerunEffect::kNo;
  if (info.rerun != follow::RerunEffect::kNo && in_python() != 0) info.rerun = follow::RerunEffect::kNo;
  info.recipe_rerun = Device::repeats(op) ? info.rerun : follow::RerunEffect::kNo;
  return info;
}

const Operator& operator_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, Operator> cache;
  const auto entry = cache.find(&op.schema());
  if (entry != cache.end() && entry->second.is_certain) return entry->second;
  return cache.insert_or_assign(&op.schema(), describe(op)).first->second;
}

template <class Action>
void act_on(StorageImpl& storage, const c10::TensorImpl* tensor, Action& action) {
  if constexpr (std::is_invocable_v<Action, StorageImpl&, const c10::TensorImpl*>)
    action(storage, tensor);
  else
    action(storage);
}
template <class Action>
void each_storage(const c10::IValue& value, Action&& action) {
  const auto visit = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage() || !Device::is_ours(impl->device())) return;
    act_on(*impl->unsafe_storage().unsafeGetStorageImpl(), impl, action);
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) each_storage(element, action);
  } else if (value.isStorage() && Device::is_ours(value.toStorage().device())) {
    act_on(*value.toStorage().unsafeGetStorageImpl(), nullptr, action);
  }
}

int64_t bytes_of_operands(const torch::jit::Stack& stack, size_t first) {
  std::unordered_set<const StorageImpl*> visited;
  int64_t bytes = 0;
  for (size_t i = first; i < stack.size(); ++i)
    each_storage(stack[i], [&](StorageImpl& storage) {
      const auto storage_bytes = static_cast<int64_t>(storage.nbytes());
      if (is_large(storage_bytes) && visited.insert(&storage).second) bytes += whole_pages(storage_bytes);
    });
  return bytes;
}

struct Operand {
  Block* block;
  bool written;
};

// Lists that an op fills. Threads reuse them, because allocation would take longer than filling them.
struct Lists {
  std::vector<Operand> operands;
  std::vector<follow::Touched> touched;
  std::vector<follow::History::Touch> history_touches;
  std::vector<std::pair<int32_t, Block*>> places;
  std::unique_ptr<Lists> next;  // another one of the thread
};
class Borrowed {
 public:
  Borrowed() : idle_(idle_of_thread), lists_(idle_ ? std::move(idle_) : std::make_unique<Lists>()) {
    idle_ = std::move(lists_->next);
  }
  ~Borrowed() {
    lists_->operands.clear();
    lists_->touched.clear();
    lists_->history_touches.clear();
    lists_->places.clear();
    lists_->next = std::move(idle_);
    idle_ = std::move(lists_);
  }
  Borrowed(const Borrowed&) = delete;
  Lists* operator->() const { return lists_.get(); }

 private:
  inline static thread_local std::unique_ptr<Lists> idle_of_thread;
  std::unique_ptr<Lists>& idle_;  // cached, because thread-local lookups are slow
  std::unique_ptr<Lists> lists_;
};

// Events for an op's arrival and start in stream order. Returned to the device unless kept.
class Timed {
 public:
  explicit Timed(Space& space) : space_(space) {}
  Timed(const Timed&) = delete;
  ~Timed() {
    if (!moments_) return;
    const Guard guard;
    space_.device.forget(*moments_);
  }
  void arrive() {
    if (space_.timing) moments_ = Device::Span{space_.device.moment(), space_.device.moment()};
  }
  void begin() {
    if (moments_) space_.device.restart(moments_->second);
  }
  void keep() {
    if (moments_) space_.moments.push_back(*std::exchange(moments_, std::nullopt));
  }

 private:
  Space& space_;
  std::optional<Device::Span> moments_;
};

class Pinned {
 public:
  // `of_other_thread`: the op runs on another thread.
  explicit Pinned(bool of_other_thread) : of_other_thread_(of_other_thread) { other_ops_running += of_other_thread; }
  Pinned(const Pinned&) = delete;
  ~Pinned() {
    const Guard guard;
    for (auto& [block, written] : operands) {
      Device& device = block->space->device;
      block->is_resident() ? device.mark_used(block->order) : device.mark_slot_used(block->order);
      // A failed op may have written as well.
      if (written) {
        block->dirty = true;
        ++block->version;
        if (block->origin) ++block->origin->version;
      }
      --block->pins;
      block->other_pins -= of_other_thread_;
      if (block->is_freed && block->pins == 0 && block->is_held()) block->space->recorder.free(block->id);
      destroy_if_free(block);
    }
    notify_change();
    if (!of_other_thread_) return;
    for (const StorageImpl* storage : plain_) release_use(storage);
    --other_ops_running;
  }
  void add(Block* block, bool written) {
    for (Operand& operand : operands)
      if (operand.block == block) {
        operand.written |= written;
        return;
      }
    operands.push_back({block, written});
    ++block->pins;
    block->other_pins += of_other_thread_;
  }
  void add(const StorageImpl& storage) {
    plain_.push_back(&storage);
    ++used_by_others[&storage];
  }

 private:
  bool of_other_thread_;

 public:
  Borrowed lists;
  std::vector<Operand>& operands = lists->operands;

 private:
  std::vector<const StorageImpl*> plain_;
};

struct Running {
  explicit Running(const c10::OperatorHandle& op)
      : outer(std::exchange(running, &op)), passing_outside(std::exchange(passing, nullptr)) {
    ++depth;
    ++ops_running;
  }
  ~Running() {
    --ops_running;
    --depth;
    passing = passing_outside;
    running = outer;
  }
  Running(const Running&) = delete;
  const c10::OperatorHandle* outer;
  follow::Passing* passing_outside;
};

}  // namespace
