// What kinds of operators there are, and which storages an op uses: they are pinned while it runs.

#pragma once

#include "silent_writes.h"
#include "storages.h"

#include <ATen/core/ivalue.h>

namespace {

enum class Kind {
  kAtom,       // its kernel touches memory: what it touches is pinned
  kParts,      // made of other ops, which come one by one
  kView,       // makes another tensor of the same storage
  kShape,      // looks at the shape of its operands, not at their bytes
};
struct Operator {
  Kind kind;
  bool sliced;              // works through lists of tensors, each place for itself
  bool lists;               // and gives a list of results
  bool looks_up;            // uses places of its first operand that others name
  bool communicates;        // goes on after it has returned
  size_t results;
  std::vector<bool> writes;  // by argument
  follow::Again again;      // whether it can be run once more
  follow::Again later;      // and as a part of a recipe
  mutable bool makes = false;  // has made something large out of nothing large
  bool certain = true;      // Python was asked, unless Ctrl-C came
};

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

bool writes_to(const c10::FunctionSchema& schema, size_t argument) {
  const auto& given = schema.arguments()[argument];
  return (given.alias_info() != nullptr && given.alias_info()->isWrite()) ||
         follow::writes_silently(schema.name(), given.name(), argument);
}
// All that it returns are its operands, or other tensors of their storages, and it writes to none.
bool is_view(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (writes_to(schema, i)) return false;
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(),
                                                  [](const auto& result) { return result.alias_info() != nullptr; });
}

}  // namespace

// Other composites than these, such as copy_, have kernels that touch memory.
bool follow::is_composite(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(Device::kKernels)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         (starts(op.schema().name(), "aten::_foreach_") &&
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
  Operator found{};
  found.looks_up = lookups.count(name) != 0;
  found.results = schema.returns().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) found.writes.push_back(writes_to(schema, i));
  const auto in_python = [&] {
    const int64_t answer =
        is_python == nullptr ? 0 : answer_of(is_python, name.c_str(), schema.overload_name().c_str());
    found.certain &= answer != kNoAnswer;
    return answer;
  };
  // A kernel in Python runs ops that are seen, and so do functional collectives.
  if (follow::is_composite(op) || starts(name, "_c10d_functional::"))
    found.kind = Kind::kParts;
  else if (!starts(name, "aten::") && in_python() == 1)
    found.kind = Kind::kParts;
  else if (is_view(schema))
    found.kind = Kind::kView;
  else
    found.kind = shapes.count(name) != 0 ? Kind::kShape : Kind::kAtom;
  found.lists = schema.returns().size() == 1 && schema.returns()[0].type()->str() == "Tensor[]";
  found.sliced = (starts(name, "aten::_fused_") || starts(name, "aten::_amp_foreach_")) && schema.returns().empty();
  // On a GPU, lists have kernels of their own. Scalars in a tensor have their places there.
  found.sliced |= found.kind == Kind::kAtom && starts(name, "aten::_foreach_") &&
                  (schema.returns().empty() || found.lists) &&
                  !(schema.overload_name() == "Tensor" && starts(name, "aten::_foreach_addc"));
  found.communicates = starts(name, "c10d::");
  found.again = found.kind == Kind::kAtom || found.kind == Kind::kShape ? follow::again_of(op) : follow::Again::kNo;
  if (found.again != follow::Again::kNo && in_python() != 0) found.again = follow::Again::kNo;
  found.later = Device::repeats(op) ? found.again : follow::Again::kNo;
  return found;
}

const Operator& operator_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, Operator> cache;
  const auto found = cache.find(&op.schema());
  if (found != cache.end() && found->second.certain) return found->second;
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

// Bytes of the storages of 64 KiB and more that an op has as operands.
int64_t bytes_of_operands(const torch::jit::Stack& stack, size_t first) {
  std::unordered_set<const StorageImpl*> seen;
  int64_t bytes = 0;
  for (size_t i = first; i < stack.size(); ++i)
    each_storage(stack[i], [&](StorageImpl& storage) {
      const auto own = static_cast<int64_t>(storage.nbytes());
      if (is_large(own) && seen.insert(&storage).second) bytes += whole_pages(own);
    });
  return bytes;
}

struct Operand {
  Block* block;
  bool written;
};

// Lists that an op fills. A thread keeps them for its next op: to ask for their memory takes longer than to fill them.
struct Lists {
  std::vector<Operand> operands;
  std::vector<follow::Touched> touched;
  std::vector<follow::History::Touch> noted;
  std::vector<std::pair<int32_t, Block*>> places;
  std::unique_ptr<Lists> next;  // that the thread has too
};
class Borrowed {
 public:
  Borrowed() : idle_(idle_of_thread), lists_(idle_ ? std::move(idle_) : std::make_unique<Lists>()) {
    idle_ = std::move(lists_->next);
  }
  ~Borrowed() {
    lists_->operands.clear();
    lists_->touched.clear();
    lists_->noted.clear();
    lists_->places.clear();
    lists_->next = std::move(idle_);
    idle_ = std::move(lists_);
  }
  Borrowed(const Borrowed&) = delete;
  Lists* operator->() const { return lists_.get(); }

 private:
  inline static thread_local std::unique_ptr<Lists> idle_of_thread;
  std::unique_ptr<Lists>& idle_;  // of this thread: to look for it takes longer than the rest
  std::unique_ptr<Lists> lists_;
};

// When an op arrived and began, in the order of its stream; back to the device unless somebody keeps it.
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
    if (moments_) space_.device.again(moments_->second);
  }
  void keep() {
    if (moments_) space_.moments.push_back(*std::exchange(moments_, std::nullopt));
  }

 private:
  Space& space_;
  std::optional<Device::Span> moments_;
};

// What an op touches, pinned while it runs.
class Pinned {
 public:
  // `other`: the op is another thread's.
  explicit Pinned(bool other) : other_(other) { others_running += other; }
  Pinned(const Pinned&) = delete;
  ~Pinned() {
    const Guard guard;
    for (auto& [block, written] : operands) {
      Device& device = block->space->device;
      block->here() ? device.used(block->order) : device.used_slot(block->order);
      // An op that failed may have written as well.
      if (written) {
        block->dirty = true;
        ++block->version;
        if (block->origin) ++block->origin->version;
      }
      --block->pins;
      block->others -= other_;
      if (block->dead && block->pins == 0 && block->held()) block->space->recorder.free(block->id);
      destroy_if_free(block);
    }
    answer();
    if (!other_) return;
    for (const StorageImpl* storage : plain_) no_longer_used(storage);
    --others_running;
  }
  void add(Block* block, bool written) {
    for (Operand& operand : operands)
      if (operand.block == block) {
        operand.written |= written;
        return;
      }
    operands.push_back({block, written});
    ++block->pins;
    block->others += other_;
  }
  // A storage in PyTorch's own memory.
  void add(const StorageImpl& storage) {
    plain_.push_back(&storage);
    ++used_by_others[&storage];
  }

 private:
  bool other_;

 public:
  Borrowed lists;
  std::vector<Operand>& operands = lists->operands;

 private:
  std::vector<const StorageImpl*> plain_;
};

// The thread is inside of an op.
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
