// What autograd need not keep: how the results of ops came about (lineage.h), and recipes for them (recipes.h).

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
    Block* block = known(storage);
    if (block == nullptr || block->fixed || block->stays || block->works > 0 || has_array(storage)) return {};
    if (!block->space->open || block->space != current) return {};
    if (!block->origin) {
      block->origin = std::make_shared<follow::Origin>();
      block->origin->id = block->id;
      block->origin->storage = block->storage;
    }
    return block->origin;
  }
  std::shared_ptr<follow::Origin> known_origin(StorageImpl& storage) override {
    const Block* block = known(storage);
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
    if (is_other()) return run_for_other(op, operator_of(op), below, stack);
    const Entered inside;
    source = nullptr;
    if (Space* space = current) return run_atom(*space, op, operator_of(op), below, stack);
    op.redispatchBoxed(below, stack);
  }
};
OurPager& our_pager = *new OurPager;

// Python's part: is given a result of an op, of whose node it offers the saved tensors to ``follow_pack``.
void (*offer_saved)(void* tensor, int64_t* answer) = nullptr;
// The results of the op before; only the next op sees them with the node that autograd has made.
thread_local std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> results_before;

// False: Ctrl-C came there, and Python is not to be called before it goes on.
bool offer_results() {
  for (auto& weak : std::exchange(results_before, {})) {
    const auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor tensor(impl);
    if (!tensor.requires_grad() || tensor.is_leaf() || tensor.is_view()) continue;
    const c10::impl::ExcludeDispatchKeyGuard quietly(
        c10::DispatchKeySet({kKey, DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
    // The other results have the same node.
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

// How an op's results come about, and what autograd may have saved for it.
class Lineage {
 public:
  Lineage(Space& space, const c10::OperatorHandle& op, const Operator& about) : space_(space), op_(op), about_(about) {}

  // Its operands are known; it has not run yet.
  void before(const std::vector<Operand>& operands, c10::DispatchKeySet below, const torch::jit::Stack& stack) {
    follow::Recipes& recipes = *space_.recipes;
    const bool changes = about_.later == follow::Again::kChanges || about_.later == follow::Again::kFills;
    for (const auto& [block, written] : operands) {
      if (!block->origin) continue;
      offers_ |= block->origin->wanted && !block->origin->steps.empty();
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
    // Autograd gives results a node if an operand asks for that; in a function of the user's own, whatever they are.
    differentiated_ = !c10::GradMode::is_enabled();
    for (size_t i = stack.size() - about_.writes.size(); i < stack.size() && !differentiated_; ++i)
      follow::each_tensor(stack[i], [&](const at::Tensor& tensor, int64_t) {
        differentiated_ |= tensor.defined() && tensor.requires_grad();
      });
    bool asked = changed_ != nullptr;
    if (!changes && about_.later != follow::Again::kNo) {
      asked = recipes.asks_for(-1);
      for (int32_t place = -1; !asked && place >= -kMostResults; --place)
        asked = recipes.asks_for(space_.history.twin(place));
    }
    if (asked)
      step_ = recipes.step_before(op_, about_.later, below, space_.device.stream(), stack, about_.writes.size(),
                                  about_.kind == Kind::kShape);
    if (!step_) return;
    waited_ = space_.counters[kTransferMicroseconds];
    start_ = std::chrono::steady_clock::now();
  }
  void ran() {
    if (!step_) return;
    step_->nanoseconds = nanos_since(start_) - 1000 * (space_.counters[kTransferMicroseconds] - waited_);
    step_->place = space_.moments.size();  // which ``Timed`` adds to next
  }
  void made(Block& block, int32_t place) {
    if (!step_) space_.recipes->made_for_good(block.id, block.used);
    if (!step_ || changed_ != nullptr) return;
    StorageImpl& storage = *block.storage->_unsafe_get_target();
    const auto origin = our_pager.origin_of(storage);
    if (!origin) return;
    space_.recipes->made_by(step_, about_.later, static_cast<size_t>(-place - 1), block.twin, block.used, *origin);
    offers_ |= origin->wanted;
  }
  void after(const torch::jit::Stack& stack) {
    if (step_ && changed_ != nullptr)
      if (const StorageImpl& owner = *changed_->storage->_unsafe_get_target();  // an operand
          owns(owner, *changed_) && static_cast<int64_t>(owner.nbytes()) == changed_->used)
        space_.recipes->changed_by(step_, about_.later, std::move(steps_), complete_, owner, *changed_->origin);
    if (!offers_ || !differentiated_ || offer_saved == nullptr || space_.recipes->mode == follow::Recompute::kOff) return;
    // Where somebody has hooks of their own for saved tensors, or does without any, it is left at that.
    if (!at::SavedTensorDefaultHooks::is_enabled() || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return;
    for (size_t i = stack.size() - op_.schema().returns().size(); i < stack.size(); ++i) remember_results(stack[i]);
  }

 private:
  // More results with storages of their own than ops have that are worth running again.
  static constexpr int32_t kMostResults = 6;

  Space& space_;
  const c10::OperatorHandle& op_;
  const Operator& about_;
  std::shared_ptr<follow::Step> step_;
  Block* changed_ = nullptr;  // what it changes in place, and how that came about before
  std::vector<std::shared_ptr<const follow::Step>> steps_;
  bool complete_ = false, offers_ = false, differentiated_ = false;
  int64_t waited_ = 0;
  std::chrono::steady_clock::time_point start_;
};

// Of the loop that is followed; null: none is.
std::shared_ptr<follow::Recipes> current_recipes() {
  const Guard guard;
  const Space* space = current;
  return space == nullptr ? nullptr : space->recipes;
}

// Recipes do not see what an op is about to write.
void spare_recipes(follow::Recipes& recipes, const Operator& about, const torch::jit::Stack& stack) {
  const size_t count = about.writes.size(), first = stack.size() - count;
  for (size_t i = 0; i < count; ++i)
    if (about.writes[i] || about.communicates)
      each_storage(stack[first + i], [&](StorageImpl& storage) { recipes.before_write(storage); });
}

}  // namespace
