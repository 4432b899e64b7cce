// How ops run: of the loop, of other threads, and collectives.

#pragma once

#include "saved.h"

#include <ATen/SequenceNumber.h>

namespace {

// The kernel of all collectives. A collective holds its tensors until it is complete, after its op has returned.
void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<c10::IValue> operands;
  if (loops_own_tensors())
    operands.assign(stack->end() - static_cast<int64_t>(op.schema().arguments().size()), stack->end());
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kCollectives), stack);
  if (operands.empty()) return;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    if (!(*stack)[i].isObject()) continue;
    const auto object = (*stack)[i].toObject();
    if (object->slots().empty() || !object->getSlot(0).isCapsule()) continue;
    Pending fresh{c10::dynamic_intrusive_pointer_cast<c10d::Work>(object->getSlot(0).toCapsule()), {}, {}};
    if (!fresh.work) continue;
    const Guard guard;
    for (const c10::IValue& operand : operands)
      each_storage(operand, [&](StorageImpl& storage) {
        if (!is_large(static_cast<int64_t>(storage.nbytes()))) return;
        Block* block = find_or_enroll(storage);
        block == nullptr ? fresh.plain.push_back(&storage) : fresh.blocks.push_back(block);
      });
    end_works();  // between loops no op of a loop does it
    pending.push_back(fresh);
    for (Block* block : fresh.blocks) ++block->works;
    for (const StorageImpl* storage : fresh.plain) ++used_by_others[storage];
  }
}

// Runs the kernel of an op of the loop. A refused request fails the op even if the kernel has handled the error.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  std::exception_ptr refused;
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  struct RestoreRefusal {
    std::exception_ptr* outer;
    ~RestoreRefusal() { refusal = outer; }
  };
  {
    const RestoreRefusal restore{std::exchange(refusal, &refused)};
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      if (!refused) throw;
    }
  }
  if (!refused) return;
  if (refusal != nullptr) *refusal = refused;  // within another op
  std::rethrow_exception(refused);
}

// Operands side by side do not fragment the rest of the arena.
void join_operands(Space& space, const Pinned& pinned) {
  const Guard guard;
  struct Unpinned {
    explicit Unpinned(const Pinned& pinned) : pinned(pinned) { pin(-1); }
    ~Unpinned() { pin(1); }
    void pin(int by) const {
      for (const Operand& operand : pinned.operands) operand.block->pins += by;
    }
    const Pinned& pinned;
  };
  {
    const Unpinned unpinned(pinned);
    evict_everything(space);
  }
  space.requests.clear();
  for (const Operand& operand : pinned.operands) fetch(space, *operand.block);
}

// On a GPU the operands may leave no hole for a result. An op without other effects is then rerun with its operands
// side by side; for other ops the stock allocator serves the request.
void run_in_room(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                 torch::jit::Stack* stack, const Pinned& pinned) {
  if (Device::kAddresses > 1) return run_kernel(op, below, stack);
  const auto count = static_cast<int64_t>(about.writes.size());
  const auto writes = [](bool argument) { return argument; };
  const bool reruns = about.rerun == follow::RerunEffect::kMakes && 2 * space.bytes_in_use > space.room() &&
                      !op.hasTag(at::Tag::nondeterministic_seeded) &&
                      std::none_of(about.writes.begin(), about.writes.end(), writes);
  if (!reruns) return run_kernel(op, below, stack);
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  const size_t base_size = stack->size() - arguments.size();
  struct Rerunning {
    explicit Rerunning(Space& space) : space(space) { space.needs_rerun = false, space.can_rerun = true; }
    ~Rerunning() { space.can_rerun = false; }
    Space& space;
  };
  try {
    const Rerunning rerunning(space);
    return run_kernel(op, below, stack);
  } catch (const c10::OutOfMemoryError&) {
    if (!space.needs_rerun) throw;
  }
  join_operands(space, pinned);
  stack->resize(base_size);
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  run_kernel(op, below, stack);
}

struct Moments {
  int64_t arrived, start, end, planned;
};
// Takes over large results. `expected`: whether the history predicted the op; nullopt: not recorded there yet.
void note_results(Space& space, const void* schema, const Operator& about, const torch::jit::Stack& stack,
                  const Borrowed& lists, std::optional<bool> expected, const Moments& moments, Lineage* lineage) {
  std::vector<follow::Touched>& touched = lists->touched;
  std::vector<std::pair<int32_t, Block*>>& places = lists->places;
  places.clear();
  const bool operands = !touched.empty();
  int32_t place = 0;
  for (size_t i = stack.size() - about.results; i < stack.size(); ++i)
    each_storage(stack[i], [&](StorageImpl& storage) {
      --place;
      if (!is_large(storage.nbytes()) || find_block(storage) != nullptr) return;
      Block* block = enroll(storage);
      if (block == nullptr || block->space != &space) return;
      if (!expected) expected = space.history.begin(schema, {});
      about.creates_large |= !operands;
      block->last_use = space.history.now();
      space.ranking.touch(block);
      space.device.mark_used(block->order);
      space.history.add_touch({place, block->id});
      if (const int64_t twin = space.history.twin(place); twin >= 0) set_twin(space, *block, twin);
      touched.push_back({place, block->id, block->bytes, true, true});
      places.emplace_back(place, block);
      for (follow::Request& request : space.requests)
        if (request.id == block->id) request.place = place;
      if (lineage != nullptr) lineage->record_result(*block, place);
    });
  if (touched.empty()) return space.requests.clear();  // its time counts with the next op's
  ++space.counters[kOps];
  space.counters[kExpectedOps] += expected.value_or(false);
  if (!operands) {
    match_op(space, schema, touched, places);
  } else if (space.follower.on_course()) {
    for (const auto& [at, block] : places)
      if (const int32_t storage = space.follower.storage_at(at); storage >= 0) {
        set_role(space, *space.follower.kind(), *block, storage);
        if (space.bucket != nullptr) match_bucket(space, storage, block->bytes);
      }
  }
  space.observer.add(follow::Event::kOp, moments.start, moments.end, reinterpret_cast<int64_t>(schema),
                     moments.start - moments.arrived, space.counters[kPlannedOps] != moments.planned);
  for (const follow::Touched& touch : touched)
    space.observer.add(follow::Event::kTouch, 0, 0, touch.id, touch.bytes, touch.written + 2 * touch.created);
  const int64_t waited = space.counters[kTransferMicroseconds] - space.transfer_micros_before;
  space.recorder.add(schema, touched, std::max<int64_t>(0, nanos_since(space.last_op_end) - 1000 * waited),
                     std::move(space.requests), source);
  space.requests.clear();
  space.last_op_end = std::chrono::steady_clock::now();
  space.transfer_micros_before = space.counters[kTransferMicroseconds];
}

void run_atom(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
              torch::jit::Stack* stack) {
  const size_t count = about.writes.size(), first = stack->size() - count;
  if (space.recipes->any()) protect_recipes(*space.recipes, about, *stack);
  Pinned pinned(false);
  Lineage lineage(space, op, about);
  Timed timed(space);
  const Running inside(op);
  const Borrowed& lists = pinned.lists;
  std::vector<follow::Touched>& touched = lists->touched;
  const void* const schema = &op.schema();
  const int64_t arrived = follow::nanos_now();
  int64_t start = arrived, planned = 0;
  std::optional<bool> expected;
  {
    const Guard guard;
    timed.arrive();
    catch_up(space);
    if (space.has_unseen_writes) {
      for (Block* block : space.owned_blocks) block->dirty |= block->is_resident();
      space.has_unseen_writes = false;
    }
    planned = space.counters[kPlannedOps];
    space.requests.clear();
    space.planned_requests.clear();
    std::vector<follow::History::Touch>& history_touches = lists->history_touches;
    std::vector<std::pair<int32_t, Block*>>& places = lists->places;
    int32_t place = 0;
    int64_t operand_bytes = -1;  // -1: not computed yet
    const auto use_of = [&](StorageImpl& storage, const c10::TensorImpl* tensor, size_t argument) -> Use {
      const auto bytes = static_cast<int64_t>(storage.nbytes());
      const Block* block = is_large(bytes) ? find_block(storage) : nullptr;
      if (!is_large(bytes) || (block != nullptr && block->space == &space)) return {};
      if (operand_bytes < 0) operand_bytes = bytes_of_operands(*stack, first);
      const bool is_partial =
          tensor != nullptr && 2 * tensor->numel_default() * static_cast<int64_t>(tensor->itemsize()) < bytes;
      return {.is_partial = is_partial || (about.looks_up && argument == 0),
              .other_bytes = operand_bytes - whole_pages(bytes)};
    };
    for (size_t i = 0; about.kind == Kind::kAtom && i < count; ++i)
      each_storage((*stack)[first + i], [&](StorageImpl& storage, const c10::TensorImpl* tensor) {
        ++place;
        Block* block = block_of(space, storage, use_of(storage, tensor, i));
        if (block == nullptr) return;
        pinned.add(block, about.writes[i]);
        history_touches.emplace_back(place, block->id);
        places.emplace_back(place, block);
        touched.push_back({place, block->id, block->bytes, about.writes[i], false});
      });
    if (!history_touches.empty() || about.creates_large) expected = space.history.begin(schema, history_touches);
    for (const auto& [at, block] : places) {
      block->last_use = space.history.now();
      if (block->offset >= 0) space.ranking.touch(block);
      clear_early(space, *block);
      if (block->managed_index >= 0) space.next_managed = static_cast<size_t>(block->managed_index) + 1;
      if (const int64_t twin = space.history.twin(at); twin >= 0) set_twin(space, *block, twin);
    }
    if (!touched.empty())
      match_op(space, schema, touched, places);
    else if (space.bucket != nullptr && space.follower.may_make(schema))
      plan_requests(space, space.follower.next());
    lineage.before_run(pinned.operands, below, *stack);
    for (const Operand& operand : pinned.operands) fetch(space, *operand.block);
    if (space.excess == Excess::kMeasured) record_need(space, 0);
    if (space.bucket != nullptr && space.copies_ahead && !space.stress) fetch_due(space);
    timed.begin();
    start = follow::nanos_now();
  }
  run_in_room(space, op, about, below, stack, pinned);
  const int64_t end = follow::nanos_now();
  const Guard guard;
  if (!space.open) return;
  try {
    lineage.after_run();
    note_results(space, schema, about, *stack, lists, expected, {arrived, start, end, planned}, &lineage);
    lineage.finish(*stack);
    if (!touched.empty()) timed.keep();
    if (!space.stress) copy_ahead(space);
  } catch (const std::exception&) {  // the op has run: drop the record and fetch on demand
    space.recorder.drop();
  }
}

// The length of a list argument, or 0.
size_t places_of(const c10::IValue& value) {
  return value.isList() ? value.toList().size() : 0;
}
c10::IValue slice_of(const c10::IValue& value, size_t begin, size_t end) {
  const c10::List<c10::IValue> list = value.toList();
  c10::List<c10::IValue> part(list.elementType());
  for (size_t k = begin; k < end; ++k) part.push_back(list.get(k));
  return c10::IValue(std::move(part));
}

void run_in_slices(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  const size_t count = about.writes.size(), first = stack->size() - count;
  size_t length = 0;
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    if (!value.isTensorList()) continue;
    const auto tensors = value.toTensorList();
    if (tensors.empty()) continue;
    if (length != 0 && tensors.size() != length) return run_atom(space, op, about, below, stack);
    length = tensors.size();
    bytes.resize(length);
    for (size_t k = 0; k < length; ++k) {
      const at::Tensor tensor = tensors.get(k);
      if (tensor.has_storage()) bytes[k] += whole_pages(static_cast<int64_t>(tensor.storage().nbytes()));
    }
  }
  int64_t total = 0;
  for (const int64_t element_bytes : bytes) total += element_bytes;
  // When needs are measured, elements run one by one, as under the smallest budget.
  const int64_t max_bytes = space.excess == Excess::kMeasured ? 0 : space.room() / 4;
  if (total <= 2 * max_bytes) return run_atom(space, op, about, below, stack);
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  stack->resize(first);
  c10::List<at::Tensor> results;
  for (size_t begin = 0, end = 0; begin < length; begin = end) {
    int64_t slice_bytes = 0;
    for (end = begin; end < length && (end == begin || slice_bytes + bytes[end] <= max_bytes); ++end)
      slice_bytes += bytes[end];
    torch::jit::Stack part;
    for (const c10::IValue& value : arguments) {
      // These operators have no number list, such as sizes, that applies to all elements.
      if (places_of(value) == length)
        part.push_back(slice_of(value, begin, end));
      else
        part.push_back(value);
    }
    run_atom(space, op, about, below, &part);
    if (about.returns_list)
      for (const at::Tensor& result : part.back().toTensorVector()) results.push_back(result);
  }
  if (about.returns_list) stack->emplace_back(std::move(results));
}

// Python callback: returns the source line of the next op as a permanent string; empty: unknown.
void (*ask_source)(int64_t* answer) = nullptr;

// Asks for the source of forward ops until the record has it, and looks up that of backward ops.
void find_source(Space& space) {
  source = nullptr;
  if (ask_source == nullptr) return;
  const auto node = torch::autograd::get_current_node();
  const uint64_t next_node = at::sequence_number::peek();  // the last node is the op's own
  const bool forward = !node || c10::GradMode::is_enabled();
  if (forward && loop_number != 0 && next_node != space.sources.last()) {
    if (!space.follower.on_course()) {  // otherwise the record has it
      const int64_t answer = answer_of(ask_source);
      if (answer != kNoAnswer) source = reinterpret_cast<const char*>(answer);
      if (source != nullptr && *source == 0) source = nullptr;
    }
    const Guard guard;
    if (source == nullptr && node) source = space.sources.find(node->sequence_nr());
    space.sources.record(next_node, source);
  } else if (node) {
    const Guard guard;
    source = space.sources.find(forward ? next_node - 1 : node->sequence_nr());
  }
  if (!node) source = nullptr;
}

// Looks up the source of a passing backward op without calling Python.
void find_recorded_source(Space& space) {
  const auto node = torch::autograd::get_current_node();
  source = node ? space.sources.find(node->sequence_nr()) : nullptr;
}

// Asks for the source line of the op with the largest need. Without the lock, because Python's comes first.
void locate_need(Space& space) {
  const int64_t answer = ask_source == nullptr ? kNoAnswer : answer_of(ask_source);
  const Guard guard;
  if (!space.open || !std::exchange(space.need_lacks_source, false) || answer == kNoAnswer) return;
  space.need.text = reinterpret_cast<const char*>(answer);
}

// Evicts the excess at the end of an op of the loop. If a home fails, the next op that needs room reports it.
struct Shrinking {
  ~Shrinking() {
    if (space.overrun == 0 || depth > 0) return;
    try {
      const Guard guard;
      if (space.open) shrink(space);
    } catch (...) {
    }
  }
  Space& space;
};

// A hold of this thread's code: a block's counter, or a storage in PyTorch's own memory.
struct Hold {
  std::shared_ptr<int> of_block;
  const StorageImpl* plain = nullptr;
};
thread_local std::vector<Hold> holds;

// Operands keep their places, and results are in PyTorch's own memory.
void run_for_other(const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  std::optional<Pinned> pinned;
  if (about.kind == Kind::kAtom) {
    if (const auto recipes = current_recipes(); recipes && recipes->any()) protect_recipes(*recipes, about, *stack);
    pinned.emplace(true);
    const Guard guard;
    const size_t count = about.writes.size(), first = stack->size() - count;
    for (size_t i = 0; i < count; ++i)
      each_storage((*stack)[first + i], [&](StorageImpl& storage) {
        if (!is_large(storage.nbytes())) return;
        Block* block = find_or_enroll(storage);
        if (block == nullptr) return pinned->add(storage);
        pinned->add(block, about.writes[i]);
        // The fetched copy would miss this write.
        if (block->state == BlockState::kFetched && about.writes[i]) unplace(*block->space, *block);
        block->is_resident() ? block->space->device.use(block->order) : block->space->device.use_slot(block->order);
      });
  }
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  op.redispatchBoxed(below, stack);
}

// An op that skips the fallback, such as the first one of another thread: no block is moved until it has ended.
struct UnpinnedOp final : at::ObserverContext {
  UnpinnedOp() {
    const Guard guard;
    ++unpinned_ops;
    ++own_unpinned_ops;
    ++other_ops_running;
  }
  ~UnpinnedOp() override {
    const Guard guard;
    --unpinned_ops;
    --own_unpinned_ops;
    --other_ops_running;
    if (Space* space = current) space->device.note_unobserved(false);
    notify_change();
  }
};
// Detects other threads, and the end of a mode in which the loop was opened. The fallback sees their next ops.
std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& function) {
  if (!observer_is_enabled || c10::impl::tls_is_dispatch_key_included(kKey) ||
      c10::impl::tls_is_dispatch_key_excluded(kKey))
    return nullptr;
  if (is_opener() && current.load() != nullptr) {
    set_tracked(true);
    return nullptr;
  }
  // The loop's thread while paused, or a worker inside an op.
  if (is_only_mover() || at::in_parallel_region()) return nullptr;
  // Between loops a new thread may be autograd's.
  if (no_loop_is_open() && !outside_loop && loop_number == 0) return nullptr;
  if (!is_opener()) {
    outside_loop = true;
    c10::impl::tls_set_dispatch_key_included(kKey, true);
    if (!has_other_threads.exchange(true)) {
      const Guard guard;
      update_observer();
    }
  }
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (op && operator_of(*op).kind != Kind::kAtom) return nullptr;  // accesses no memory, or only by observed ops
  return std::make_unique<UnpinnedOp>();
}
bool may_pass(const Operator& about, const torch::jit::Stack& stack) {
  if (about.creates_large || (about.kind != Kind::kAtom && about.kind != Kind::kShape)) return false;
  bool large = false;
  for (size_t i = stack.size() - about.writes.size(); i < stack.size() && !large; ++i)
    each_storage(stack[i], [&](StorageImpl& storage) { large |= is_large(static_cast<int64_t>(storage.nbytes())); });
  return !large;
}
void run_passing(follow::Passing& passing, const c10::OperatorHandle& op, const Operator& about,
                 c10::DispatchKeySet below, torch::jit::Stack* stack) {
  try {
    op.redispatchBoxed(below, stack);
  } catch (...) {
    passing.rethrow_refusal();
    throw;
  }
  if (passing.needs_take_results())
    passing.take_results({stack->end() - static_cast<int64_t>(about.results), stack->end()});
}

}  // namespace

follow::Passing::Passing(const c10::OperatorHandle& op) : op_(op) {
  if (may_disable_observers && (at::hasThreadLocalCallbacks() || is_other_thread())) enable_observers();
  if (is_other_thread() || !results_before.empty()) return;
  ++ops_in_space;
  const Space* space = current;
  if (space == nullptr || space->stress || space->excess == Excess::kMeasured ||
      space->recipes->mode == follow::Recompute::kNoting) {
    leave_space();
    return;
  }
  allowed_ = true;
  running_ = std::exchange(running, &op);
  refusal_ = std::exchange(refusal, &refused_);
  passing_ = std::exchange(passing, this);
  ++depth;
  ++ops_running;
  c10::impl::tls_set_dispatch_key_excluded(kKey, true);
}
follow::Passing::~Passing() {
  if (!allowed_) return;
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  --ops_running;
  --depth;
  passing = passing_;
  refusal = refusal_;
  running = running_;
  if (Space* space = has_requested_ ? current.load() : nullptr) const Shrinking shrinking{*space};
  leave_space();
}
void follow::Passing::note_request() {
  if (std::exchange(has_requested_, true)) return;
  const Guard guard;
  Space* space = current;
  if (space == nullptr) return;
  find_recorded_source(*space);
  space->requests.clear();
  space->planned_requests.clear();
}
bool follow::Passing::take_results(const torch::jit::Stack& results) {
  rethrow_refusal();
  Space* space = current;
  if (space != nullptr && space->need_lacks_source) locate_need(*space);
  bool any = false;
  for (const c10::IValue& result : results)
    each_storage(result, [&](StorageImpl& storage) { any |= is_large(static_cast<int64_t>(storage.nbytes())); });
  if (!any || space == nullptr) return false;
  const Operator& about = operator_of(op_);
  find_source(*space);
  const Guard guard;
  if (!space->open) return false;
  const int64_t now = follow::nanos_now();
  try {
    const Borrowed lists;
    const Moments moments{now, now, now, space->counters[kPlannedOps]};
    note_results(*space, &op_.schema(), about, results, lists, std::nullopt, moments, nullptr);
  } catch (const std::exception&) {  // as in `run_atom`
    space->recorder.drop();
  }
  return true;
}
void follow::Passing::rethrow_refusal() const {
  if (refused_ == nullptr) return;
  if (refusal_ != nullptr) *refusal_ = refused_;  // within another op
  std::rethrow_exception(refused_);
}

void follow::fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // This thread has started a profiler. A profiler for all threads is noticed at the end of a step.
  if (may_disable_observers && (at::hasThreadLocalCallbacks() || is_other_thread())) enable_observers();
  const auto below = follow::below_key(keys);
  if (must_pin_as_other()) {
    const Operator& about = operator_of(op);
    return about.kind == Kind::kComposite ? op.redispatchBoxed(below, stack) : run_for_other(op, about, below, stack);
  }
  const Operator& about = operator_of(op);
  if (may_pass(about, *stack)) {
    follow::Passing passing(op);
    if (passing.is_allowed()) return run_passing(passing, op, about, below, stack);
  }
  std::optional<InSpace> inside(std::in_place);
  Space* space = current;
  if (space == nullptr) {
    inside.reset();
    leave_thread();
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  const bool quiet = !results_before.empty() && !offer_results();
  if (about.kind != Kind::kComposite && !quiet) find_source(*space);
  if (about.kind == Kind::kComposite || about.kind == Kind::kView) inside.reset();  // neither uses the space
  if (about.kind == Kind::kComposite) return op.redispatchBoxed(below, stack);
  if (about.kind == Kind::kView) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  const Shrinking shrinking{*space};
  if (about.runs_in_slices)
    run_in_slices(*space, op, about, below, stack);
  else
    run_atom(*space, op, about, below, stack);
  if (space->need_lacks_source) locate_need(*space);
  if (space->stress) {
    const Guard guard;
    if (space->open) evict_everything(*space);
  }
}
