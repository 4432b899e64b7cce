// Capture of the lineage of op results (lineage.h), and recipes for saved tensors (recipes.h).

#pragma once

#include "ahead.h"

#include <ATen/SavedTensorHooks.h>

#include <cstring>

namespace {

void run_atom(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
              torch::jit::Stack* stack);
void run_for_other(const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack);

struct OurPager final : follow::Pager {
  std::shared_ptr<follow::Origin> origin_of(StorageImpl& storage) override {
    Block* block = find_block(storage);
    if (block == nullptr || block->fixed || block->is_immovable || block->works > 0 || has_array(storage)) return {};
    if (!block->space->open || block->space != current) return {};
    if (!block->origin) {
      block->origin = std::make_shared<follow::Origin>();
      block->origin->id = block->id;
      block->origin->storage = block->storage;
    }
    return block->origin;
  }
  std::shared_ptr<follow::Origin> known_origin(StorageImpl& storage) override {
    const Block* block = find_block(storage);
    return block == nullptr ? nullptr : block->origin;
  }
  c10::Storage copy_of(const StorageImpl& storage) override {
    const bool ours = Device::is_ours(storage.device());
    c10::Storage copy(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                       c10::GetAllocator(storage.device_type()), false));
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (bytes == 0) return copy;
    auto* to = static_cast<char*>(copy.mutable_data());
    const auto* from = static_cast<const char*>(storage.data());
    ours ? current.load()->device.copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
    return copy;
  }
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) override {
    if (is_other_thread()) return run_for_other(op, operator_of(op), below, stack);
    const InSpace inside;
    source = nullptr;
    if (Space* space = current) return run_atom(*space, op, operator_of(op), below, stack);
    op.redispatchBoxed(below, stack);
  }
};
OurPager& our_pager = *new OurPager;

// Python callback: gets an op's result, and offers the saved tensors of its node to `follow_pack`.
void (*offer_saved)(void* tensor, int64_t* answer) = nullptr;
// The previous op's results: their autograd node exists only when the next op runs.
thread_local std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_before;

// Returns false if Ctrl-C interrupted the callback: do not call Python again before returning to it.
bool offer_results() {
  for (auto& weak : std::exchange(results_before, {})) {
    const auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor tensor(impl);
    if (!tensor.requires_grad() || tensor.is_leaf() || tensor.is_view()) continue;
    const c10::impl::ExcludeDispatchKeyGuard quietly(
        c10::DispatchKeySet({kKey, DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
    return answer_of(offer_saved, static_cast<void*>(new at::Tensor(tensor))) != kNoAnswer;
  }
  return true;
}
void remember_results(const c10::IValue& value) {
  follow::each_tensor(value, [](const at::Tensor& tensor, int64_t) {
    if (tensor.defined() && follow::is_differentiable(tensor))
      results_before.emplace_back(tensor.getIntrusivePtr());
  });
}

// Captures an op's lineage, and its results for saved tensors.
class Lineage {
 public:
  Lineage(Space& space, const c10::OperatorHandle& op, const Operator& about) : space_(space), op_(op), about_(about) {}

  void before_run(const std::vector<Operand>& operands, c10::DispatchKeySet below, const torch::jit::Stack& stack) {
    follow::Recipes& recipes = *space_.recipes;
    const bool changes =
        about_.recipe_rerun == follow::RerunEffect::kChanges || about_.recipe_rerun == follow::RerunEffect::kFills;
    for (const auto& [block, written] : operands) {
      if (!block->origin) continue;
      offers_ |= block->origin->is_recomputed && !block->origin->steps.empty();
      if (!written) continue;
      if (changes && !block->origin->steps.empty()) {
        changed_ = block;
        steps_ = block->origin->steps;
        complete_ = block->origin->complete;
      }
      block->origin->forget();
    }
    if (recipes.mode == follow::Recompute::kOff) return;
    offers_ |= recipes.mode == follow::Recompute::kNoting;
    // Autograd creates a node if an operand requires gradients, and in a custom function always.
    differentiated_ = !c10::GradMode::is_enabled();
    for (size_t i = stack.size() - about_.writes.size(); i < stack.size() && !differentiated_; ++i)
      follow::each_tensor(stack[i], [&](const at::Tensor& tensor, int64_t) {
        differentiated_ |= tensor.defined() && tensor.requires_grad();
      });
    bool asked = changed_ != nullptr;
    if (!changes && about_.recipe_rerun != follow::RerunEffect::kNo) {
      asked = recipes.asks_for(-1);
      for (int32_t place = -1; !asked && place >= -kMostResults; --place)
        asked = recipes.asks_for(space_.history.twin(place));
    }
    if (asked)
      step_ = recipes.step_before(op_, about_.recipe_rerun, below, space_.device.stream(), stack, about_.writes.size(),
                                  about_.kind == Kind::kShape);
    if (!step_) return;
    waited_ = space_.counters[kTransferMicroseconds];
    start_ = std::chrono::steady_clock::now();
  }
  void after_run() {
    if (!step_) return;
    step_->nanoseconds = nanos_since(start_) - 1000 * (space_.counters[kTransferMicroseconds] - waited_);
    step_->place = space_.moments.size();  // the index that `Timed` appends next
  }
  void record_result(Block& block, int32_t place) {
    if (!step_) space_.recipes->record_unrepeatable(block.id, block.storage_bytes);
    if (!step_ || changed_ != nullptr) return;
    StorageImpl& storage = *block.storage->_unsafe_get_target();
    const auto origin = our_pager.origin_of(storage);
    if (!origin) return;
    space_.recipes->record_creation(step_, about_.recipe_rerun, static_cast<size_t>(-place - 1), block.twin,
                                    block.storage_bytes, *origin);
    offers_ |= origin->is_recomputed;
  }
  void finish(const torch::jit::Stack& stack) {
    if (step_ && changed_ != nullptr)
      if (const StorageImpl& owner = *changed_->storage->_unsafe_get_target();  // an operand
          owns(owner, *changed_) && static_cast<int64_t>(owner.nbytes()) == changed_->storage_bytes)
        space_.recipes->record_change(step_, about_.recipe_rerun, std::move(steps_), complete_, owner,
                                      *changed_->origin);
    if (!offers_ || !differentiated_ || offer_saved == nullptr || space_.recipes->mode == follow::Recompute::kOff) return;
    // Respect user hooks for saved tensors, and code that disables them.
    if (!at::SavedTensorDefaultHooks::is_enabled() || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return;
    for (size_t i = stack.size() - op_.schema().returns().size(); i < stack.size(); ++i) remember_results(stack[i]);
  }

 private:
  // More results with own storages than ops worth rerunning have.
  static constexpr int32_t kMostResults = 6;

  Space& space_;
  const c10::OperatorHandle& op_;
  const Operator& about_;
  std::shared_ptr<follow::Step> step_;
  Block* changed_ = nullptr;  // changed in place, with its lineage before
  std::vector<std::shared_ptr<const follow::Step>> steps_;
  bool complete_ = false, offers_ = false, differentiated_ = false;
  int64_t waited_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Null: no loop is open.
std::shared_ptr<follow::Recipes> current_recipes() {
  const Guard guard;
  const Space* space = current;
  return space == nullptr ? nullptr : space->recipes;
}

// Recipes are not informed of the op's writes otherwise.
void protect_recipes(follow::Recipes& recipes, const Operator& about, const torch::jit::Stack& stack) {
  const size_t count = about.writes.size(), first = stack.size() - count;
  for (size_t i = 0; i < count; ++i)
    if (about.writes[i] || about.communicates)
      each_storage(stack[first + i], [&](StorageImpl& storage) { recipes.before_write(storage); });
}

}  // namespace
