// How an op of the loop runs, one of another thread, and a collective.

#pragma once

#include "saved.h"

#include <ATen/SequenceNumber.h>

namespace {

// The kernel of all collectives, in every thread: what a work has begun goes on after the op has returned, and until it is
// complete its tensors stay where they are.
void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<c10::IValue> operands;
  if (!is_left()) operands.assign(stack->end() - static_cast<int64_t>(op.schema().arguments().size()), stack->end());
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
        Block* block = known_or_enrolled(storage);
        block == nullptr ? fresh.plain.push_back(&storage) : fresh.blocks.push_back(block);
      });
    pending.push_back(fresh);
    for (Block* block : fresh.blocks) ++block->works;
    for (const StorageImpl* storage : fresh.plain) ++used_by_others[storage];
  }
}

// Runs the kernel of an op of the loop. What was refused to it is refused to the op, also if the kernel went another way.
void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  std::exception_ptr found;
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  struct Noting {
    std::exception_ptr* outer;
    ~Noting() { refusal = outer; }
  };
  {
    const Noting noting{std::exchange(refusal, &found)};
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      if (!found) throw;
    }
  }
  if (!found) return;
  if (refusal != nullptr) *refusal = found;  // the op is a part of another one
  std::rethrow_exception(found);
}

// Brings what an op uses side by side, so that it does not part the rest of the arena.
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

// Runs the kernel of an op whose operands are here. Where addresses are no more than bytes, these may part what is free,
// so that no hole is large enough for a result; then it is run once more with its operands side by side, if it changes
// nothing else. For others, the stock allocator serves the request.
void run_in_room(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                 torch::jit::Stack* stack, const Pinned& pinned) {
  if (Device::kAddresses > 1) return run_kernel(op, below, stack);
  const auto count = static_cast<int64_t>(about.writes.size());
  const auto writes = [](bool argument) { return argument; };
  const bool reruns = about.again == follow::Again::kMakes && 2 * space.charged > space.room() &&
                      !op.hasTag(at::Tag::nondeterministic_seeded) &&
                      std::none_of(about.writes.begin(), about.writes.end(), writes);
  if (!reruns) return run_kernel(op, below, stack);
  const torch::jit::Stack given(stack->end() - count, stack->end());
  const size_t below_given = stack->size() - given.size();
  struct Rerunning {
    explicit Rerunning(Space& space) : space(space) { space.parted = false, space.reruns = true; }
    ~Rerunning() { space.reruns = false; }
    Space& space;
  };
  try {
    const Rerunning rerunning(space);
    return run_kernel(op, below, stack);
  } catch (const c10::OutOfMemoryError&) {
    if (!space.parted) throw;
  }
  join_operands(space, pinned);
  stack->resize(below_given);
  stack->insert(stack->end(), given.begin(), given.end());
  run_kernel(op, below, stack);
}

// When an op arrived, started and ended, and ``kPlannedOps`` before it.
struct Moments {
  int64_t arrived, start, end, planned;
};
// An op has run: the large storages that it made become blocks. `lists` has its operands; `expected`: whether the history
// expected it; none: the history does not have it yet.
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
      if (!is_large(storage.nbytes()) || known(storage) != nullptr) return;
      Block* block = enroll(storage);
      if (block == nullptr || block->space != &space) return;
      if (!expected) expected = space.history.begin(schema, {});
      about.makes |= !operands;
      block->last_use = space.history.now();
      space.ranking.touch(block);
      space.device.used(block->order);
      space.history.note({place, block->id});
      if (const int64_t twin = space.history.twin(place); twin >= 0) cast(space, *block, twin);
      touched.push_back({place, block->id, block->bytes, true, true});
      places.emplace_back(place, block);
      for (follow::Request& request : space.requests)
        if (request.id == block->id) request.place = place;
      if (lineage != nullptr) lineage->made(*block, place);
    });
  if (touched.empty()) return space.requests.clear();  // its time counts with that of the next op
  ++space.counters[kOps];
  space.counters[kExpectedOps] += expected.value_or(false);
  if (!operands) {
    take_place(space, schema, touched, places);
  } else if (space.follower.on_course()) {
    for (const auto& [at, block] : places)
      if (const int32_t storage = space.follower.storage_at(at); storage >= 0) {
        play(space, *space.follower.known(), *block, storage);
        if (space.anchor != nullptr) match_anchor(space, storage, block->bytes);
      }
  }
  space.observer.add(follow::Event::kOp, moments.start, moments.end, reinterpret_cast<int64_t>(schema),
                     moments.start - moments.arrived, space.counters[kPlannedOps] != moments.planned);
  for (const follow::Touched& each : touched)
    space.observer.add(follow::Event::kTouch, 0, 0, each.id, each.bytes, each.written + 2 * each.created);
  const int64_t waited = space.counters[kTransferMicroseconds] - space.waited;
  space.recorder.add(schema, touched, std::max<int64_t>(0, nanos_since(space.since) - 1000 * waited),
                     std::move(space.requests), source);
  space.requests.clear();
  space.since = std::chrono::steady_clock::now();
  space.waited = space.counters[kTransferMicroseconds];
}

void run_atom(Space& space, const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
              torch::jit::Stack* stack) {
  const size_t count = about.writes.size(), first = stack->size() - count;
  if (space.recipes->any()) spare_recipes(*space.recipes, about, *stack);
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
    if (space.unseen) {
      for (Block* block : space.known) block->dirty |= block->here();
      space.unseen = false;
    }
    planned = space.counters[kPlannedOps];
    space.requests.clear();
    space.wanted.clear();
    std::vector<follow::History::Touch>& noted = lists->noted;
    std::vector<std::pair<int32_t, Block*>>& places = lists->places;
    int32_t place = 0;
    int64_t together = -1;  // bytes of all operands
    const auto use_of = [&](StorageImpl& storage, const c10::TensorImpl* tensor, size_t argument) -> Use {
      const auto bytes = static_cast<int64_t>(storage.nbytes());
      const Block* block = is_large(bytes) ? known(storage) : nullptr;
      if (!is_large(bytes) || (block != nullptr && block->space == &space)) return {};
      if (together < 0) together = bytes_of_operands(*stack, first);
      const bool in_part = tensor != nullptr && 2 * tensor->numel_default() * static_cast<int64_t>(tensor->itemsize()) < bytes;
      return {.in_part = in_part || (about.looks_up && argument == 0), .beside = together - whole_pages(bytes)};
    };
    for (size_t i = 0; about.kind == Kind::kAtom && i < count; ++i)
      each_storage((*stack)[first + i], [&](StorageImpl& storage, const c10::TensorImpl* tensor) {
        ++place;
        Block* block = block_of(space, storage, use_of(storage, tensor, i));
        if (block == nullptr) return;
        pinned.add(block, about.writes[i]);
        noted.emplace_back(place, block->id);
        places.emplace_back(place, block);
        touched.push_back({place, block->id, block->bytes, about.writes[i], false});
      });
    if (!noted.empty() || about.makes) expected = space.history.begin(schema, noted);
    for (const auto& [at, block] : places) {
      block->last_use = space.history.now();
      if (block->offset >= 0) space.ranking.touch(block);
      no_longer_early(space, *block);
      if (block->given >= 0) space.after_given = static_cast<size_t>(block->given) + 1;
      if (const int64_t twin = space.history.twin(at); twin >= 0) cast(space, *block, twin);
    }
    if (!touched.empty())
      take_place(space, schema, touched, places);
    else if (space.anchor != nullptr && space.follower.may_make(schema))
      want(space, space.follower.next());
    lineage.before(pinned.operands, below, *stack);
    for (const Operand& operand : pinned.operands) fetch(space, *operand.block);
    if (space.excess == Excess::kMeasured) note_need(space, 0);
    if (space.anchor != nullptr && space.ahead && !space.stress) fetch_due(space);
    timed.begin();
    start = follow::nanos_now();
  }
  run_in_room(space, op, about, below, stack, pinned);
  const int64_t end = follow::nanos_now();
  const Guard guard;
  if (!space.open) return;
  try {
    lineage.ran();
    note_results(space, schema, about, *stack, lists, expected, {arrived, start, end, planned}, &lineage);
    lineage.after(*stack);
    if (!touched.empty()) timed.keep();
    if (!space.stress) copy_ahead(space);
  } catch (const std::exception&) {  // the op has run: drop its record, and fetch on demand
    space.recorder.drop();
  }
}

// An argument of which each place of the lists has its own: a list of tensors, or of numbers. 0: it is not one.
size_t places_of(const c10::IValue& value) {
  return value.isList() ? value.toList().size() : 0;
}
c10::IValue slice_of(const c10::IValue& value, size_t begin, size_t end) {
  const c10::List<c10::IValue> list = value.toList();
  c10::List<c10::IValue> part(list.elementType());
  for (size_t k = begin; k < end; ++k) part.push_back(list.get(k));
  return c10::IValue(std::move(part));
}

// An op that works through lists, such as a fused optimizer: in slices that fit, one after the other.
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
  for (const int64_t each : bytes) total += each;
  // Where needs are measured, each place runs by itself: a smaller budget may have to do so.
  const int64_t most = space.excess == Excess::kMeasured ? 0 : space.room() / 4;
  if (total <= 2 * most) return run_atom(space, op, about, below, stack);
  const torch::jit::Stack arguments(stack->end() - count, stack->end());
  stack->resize(first);
  c10::List<at::Tensor> results;
  for (size_t begin = 0, end = 0; begin < length; begin = end) {
    int64_t taken = 0;
    for (end = begin; end < length && (end == begin || taken + bytes[end] <= most); ++end)
      taken += bytes[end];
    torch::jit::Stack part;
    for (const c10::IValue& value : arguments) {
      // Numbers for all places at once, such as sizes, are not in lists of that length but by chance, and not in such ops.
      if (places_of(value) == length)
        part.push_back(slice_of(value, begin, end));
      else
        part.push_back(value);
    }
    run_atom(space, op, about, below, &part);
    if (about.lists)
      for (const at::Tensor& result : part.back().toTensorVector()) results.push_back(result);
  }
  if (about.lists) stack->emplace_back(std::move(results));
}

// Python's part: says where the op that is about to run comes from, in words that stay; none: from nowhere in particular.
void (*ask_source)(int64_t* answer) = nullptr;

// Learns where ops of forward come from, as long as it is not known which op comes when; finds out of ops of backward.
void find_source(Space& space) {
  source = nullptr;
  if (ask_source == nullptr) return;
  const auto node = torch::autograd::get_current_node();
  const uint64_t made = at::sequence_number::peek();  // the number of the next node; the last one is the op's own
  const bool forward = !node || c10::GradMode::is_enabled();
  if (forward && opening != 0 && made != space.sources.last()) {
    if (!space.follower.on_course()) {  // else the record says it
      const int64_t answer = answer_of(ask_source);
      if (answer != kNoAnswer) source = reinterpret_cast<const char*>(answer);
      if (source != nullptr && *source == 0) source = nullptr;
    }
    const Guard guard;
    if (source == nullptr && node) source = space.sources.find(node->sequence_nr());
    space.sources.note(made, source);
  } else if (node) {
    const Guard guard;
    source = space.sources.find(forward ? made - 1 : node->sequence_nr());
  }
  if (!node) source = nullptr;
}

// Looks up where a passing op of backward comes from, without asking Python.
void find_noted_source(Space& space) {
  const auto node = torch::autograd::get_current_node();
  source = node ? space.sources.find(node->sequence_nr()) : nullptr;
}

// Learns which line of the user's runs the op that needs the most so far. Without the lock: Python's comes first.
void place_need(Space& space) {
  const int64_t answer = ask_source == nullptr ? kNoAnswer : answer_of(ask_source);
  const Guard guard;
  if (!space.open || !std::exchange(space.unplaced, false) || answer == kNoAnswer) return;
  space.need.text = reinterpret_cast<const char*>(answer);
}

// At the end of an op of the loop, whatever came of it, has leave what lies beyond the budget. Where a home fails, the op that
// needs room next tells.
struct Shrinking {
  ~Shrinking() {
    if (space.grown == 0 || depth > 0) return;
    try {
      const Guard guard;
      if (space.open) shrink(space);
    } catch (...) {
    }
  }
  Space& space;
};

// What code of the thread holds: blocks by their counts, or storages in PyTorch's own memory.
struct Hold {
  std::shared_ptr<int> of_block;
  const StorageImpl* plain = nullptr;
};
thread_local std::vector<Hold> holds;

// An op of a thread that is not the loop's: what it uses stays where it is as long as it runs. Results lie in PyTorch's own
// memory.
void run_for_other(const c10::OperatorHandle& op, const Operator& about, c10::DispatchKeySet below,
                   torch::jit::Stack* stack) {
  std::optional<Pinned> pinned;
  if (about.kind == Kind::kAtom) {
    if (const auto recipes = current_recipes(); recipes && recipes->any()) spare_recipes(*recipes, about, *stack);
    pinned.emplace(true);
    const Guard guard;
    const size_t count = about.writes.size(), first = stack->size() - count;
    for (size_t i = 0; i < count; ++i)
      each_storage((*stack)[first + i], [&](StorageImpl& storage) {
        if (!is_large(storage.nbytes())) return;
        Block* block = known_or_enrolled(storage);
        if (block == nullptr) return pinned->add(storage);
        pinned->add(block, about.writes[i]);
        // What has arrived would lack what is written to the window now.
        if (block->state == State::kArrived && about.writes[i]) unplace(*block->space, *block);
        block->here() ? block->space->device.use(block->order) : block->space->device.use_slot(block->order);
      });
  }
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
  op.redispatchBoxed(below, stack);
}

// The first op of a thread that is not the loop's. It passes the fallback by: nothing is moved until it has ended.
struct FirstOp final : at::ObserverContext {
  FirstOp() {
    const Guard guard;
    ++blind;
    ++own_blind;
    ++others_running;
  }
  ~FirstOp() override {
    const Guard guard;
    --blind;
    --own_blind;
    --others_running;
    if (Space* space = current) space->device.note_unseen(false);
    answer();
  }
};
// Finds threads that are not the loop's; from their next op on the fallback sees them.
std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& seen) {
  if (is_left() || c10::impl::tls_is_dispatch_key_included(kKey) || c10::impl::tls_is_dispatch_key_excluded(kKey))
    return nullptr;
  // The loop is paused and this thread will go on with it, or it does a part of an op's work.
  if (is_opener() || at::in_parallel_region()) return nullptr;
  outside_loop = true;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  const auto name = seen.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (op && operator_of(*op).kind != Kind::kAtom) return nullptr;  // it touches no memory, or by ops that are seen
  return std::make_unique<FirstOp>();
}
bool may_pass(const Operator& about, const torch::jit::Stack& stack) {
  if (about.makes || (about.kind != Kind::kAtom && about.kind != Kind::kShape)) return false;
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
    passing.failed();
    throw;
  }
  if (passing.concerns()) passing.ran({stack->end() - static_cast<int64_t>(about.results), stack->end()});
}

}  // namespace

follow::Passing::Passing(const c10::OperatorHandle& op) : op_(op) {
  if (may_disable_observers && (at::hasThreadLocalCallbacks() || is_other())) enable_observers();
  if (is_other() || !results_before.empty()) return;
  ++entered;
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
  if (Space* space = asked_ ? current.load() : nullptr) const Shrinking shrinking{*space};
  leave_space();
}
void follow::Passing::asks() {
  if (std::exchange(asked_, true)) return;
  const Guard guard;
  Space* space = current;
  if (space == nullptr) return;
  find_noted_source(*space);
  space->requests.clear();
  space->wanted.clear();
}
bool follow::Passing::ran(const torch::jit::Stack& results) {
  failed();
  Space* space = current;
  if (space != nullptr && space->unplaced) place_need(*space);
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
  } catch (const std::exception&) {  // as in ``run_atom``
    space->recorder.drop();
  }
  return true;
}
void follow::Passing::failed() const {
  if (refused_ == nullptr) return;
  if (refusal_ != nullptr) *refusal_ = refused_;  // the op is a part of another one
  std::rethrow_exception(refused_);
}

void follow::fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // A profiler was started in this thread. A profiler of all threads is noticed at the end of a step.
  if (may_disable_observers && (at::hasThreadLocalCallbacks() || is_other())) enable_observers();
  const auto below = follow::below_key(keys);
  if (others_pin()) {
    const Operator& about = operator_of(op);
    return about.kind == Kind::kParts ? op.redispatchBoxed(below, stack) : run_for_other(op, about, below, stack);
  }
  const Operator& about = operator_of(op);
  if (may_pass(about, *stack)) {
    follow::Passing passing(op);
    if (passing.allowed()) return run_passing(passing, op, about, below, stack);
  }
  std::optional<Entered> inside(std::in_place);
  Space* space = current;
  if (space == nullptr) {
    inside.reset();
    leave_thread();
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  const bool quiet = !results_before.empty() && !offer_results();
  if (about.kind != Kind::kParts && !quiet) find_source(*space);
  if (about.kind == Kind::kParts || about.kind == Kind::kView) inside.reset();  // neither uses the space
  if (about.kind == Kind::kParts) return op.redispatchBoxed(below, stack);
  if (about.kind == Kind::kView) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKey);
    return op.redispatchBoxed(below, stack);
  }
  const Shrinking shrinking{*space};
  if (about.sliced)
    run_in_slices(*space, op, about, below, stack);
  else
    run_atom(*space, op, about, below, stack);
  if (space->unplaced) place_need(*space);
  if (space->stress) {
    const Guard guard;
    if (space->open) evict_everything(*space);
  }
}
