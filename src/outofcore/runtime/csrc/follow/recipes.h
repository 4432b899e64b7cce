// Recipes, kept by autograd in place of saved tensors that can be recomputed. A recipe is a storage's lineage
// (lineage.h) with references to its inputs; the storage is freed with its last other reference. Inputs must not
// change: before an op writes to one, the recipes that use it are evaluated and their results kept. Before an op writes
// to a storage with a recipe, the recipe keeps that storage, as autograd would have done.

#pragma once

#include "lineage.h"
#include "lock.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace follow {

enum class Recompute {
  kOff,
  kChosen,      // selected storages
  kAll,  // all that can be recomputed
  kNoting,      // off, but records the candidates
};

struct Pager {
  virtual ~Pager() = default;
  // Returns the origin of a tracked storage with observed writes only, or null.
  virtual std::shared_ptr<Origin> origin_of(c10::StorageImpl& storage) = 0;
  virtual std::shared_ptr<Origin> known_origin(c10::StorageImpl& storage) = 0;
  virtual c10::Storage copy_of(const c10::StorageImpl& storage) = 0;
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) = 0;
};

// Recipes in use. Outlives the loop.
struct LiveRecipes {
  std::unordered_set<Recipe*> recipes;
};

struct Input {
  std::vector<const Reference*> references;  // of the steps to it
  std::shared_ptr<const Provenance> provenance;
  std::shared_ptr<Origin> origin;  // null: freed or changed since
  int64_t version = 0;
  c10::VariableVersion counter;
  uint32_t count = 0;
  StoragePointer storage;          // the input, or
  std::shared_ptr<Recipe> recipe;  // how to recompute it
};

struct Recipe : std::enable_shared_from_this<Recipe> {
  explicit Recipe(std::shared_ptr<LiveRecipes> on) : live_recipes(std::move(on)) { live_recipes->recipes.insert(this); }
  Recipe(const Recipe&) = delete;
  ~Recipe() {
    const Guard guard;
    live_recipes->recipes.erase(this);
    forget();
    drop(std::move(kept_storage));
  }

  std::shared_ptr<LiveRecipes> live_recipes;
  std::shared_ptr<Origin> origin;
  int64_t version = 0, bytes = 0;
  std::vector<std::shared_ptr<const Step>> steps;
  size_t result = 0;
  std::vector<Input> inputs;
  int depth = 0;  // length of the recomputation sequence below it
  std::optional<WeakStorage> original;
  std::optional<WeakStorage> rerun_storage;  // result of the last evaluation
  std::shared_ptr<Origin> rerun_origin;
  int64_t rerun_version = 0;
  StoragePointer kept_storage;  // set if it need not be recomputed
  std::string error;            // why it cannot be recomputed

  void keep(StoragePointer storage) {
    kept_storage = std::move(storage);
    forget();
  }

 private:
  void forget() {
    for (Input& input : inputs) drop(std::move(input.storage));
    inputs.clear();
    steps.clear();
  }
};

class Recipes;

struct Packed {
  std::shared_ptr<Recipes> recipes;
  std::shared_ptr<Recipe> recipe;
  Geometry geometry;
  c10::VariableVersion counter;  // of the tensor
  uint32_t version = 0;
};

struct Note {
  int64_t bytes = 0, nanoseconds = 0;  // of its ops
  std::vector<size_t> places;          // of its ops, for a device's timer
  bool saved = false;                  // by autograd
  std::vector<int64_t> inputs;         // its input storages
};

class Recipes : public std::enable_shared_from_this<Recipes> {
 public:
  // Longest recomputation sequence; the inputs of a longer one are kept.
  static constexpr int kDeepest = Origin::kDeepest;
  static constexpr size_t kMaxNotes = size_t{1} << 16;

  Recipes(Pager& pager, int64_t large) : pager_(pager), large_(large), live_recipes_(new LiveRecipes) {}

  Recompute mode = Recompute::kOff;
  int64_t recipe_count = 0, reruns = 0, dropped_bytes = 0, nanoseconds = 0;  // counters

  bool any() const {
    const Guard guard;
    return !live_recipes_->recipes.empty();
  }

  // Differs between steps that recompute different storages.
  int64_t variant() const {
    return mode == Recompute::kChosen ? choices_ : mode == Recompute::kAll ? -1 : 0;
  }
  void choose(const int64_t* ids, int64_t count) {
    ++choices_;
    chosen_.clear();
    chosen_.insert(ids, ids + count);
    most_chosen_ = 4 * chosen_.size() + 1024;
  }
  void forget_notes() { notes_.clear(); }
  const std::map<int64_t, Note>& notes() const { return notes_; }

  // Whether to capture the lineage of a storage with the role of `twin`.
  bool asks_for(int64_t twin) const {
    return mode == Recompute::kAll || mode == Recompute::kNoting ||
           (mode == Recompute::kChosen && chosen_.count(twin) != 0);
  }

  // Captures an op before it runs. Null: it cannot be rerun.
  std::shared_ptr<Step> step_before(const c10::OperatorHandle& op, RerunEffect effect, c10::DispatchKeySet below,
                                    Device::Stream stream, const torch::jit::Stack& stack, size_t count, bool shapes) {
    return capture_step(
        op, effect, below, stream, stack, count, shapes, large_,
        [&](c10::StorageImpl& storage) { return pager_.origin_of(storage); },
        [&](const c10::StorageImpl& storage) { return pager_.copy_of(storage); });
  }

  // The op has created the `result`-th storage of its results.
  void record_creation(const std::shared_ptr<Step>& step, RerunEffect effect, size_t result, int64_t twin,
                       int64_t bytes, Origin& origin) {
    origin.steps.assign(1, step);
    origin.result = result;
    origin.complete = effect == RerunEffect::kMakes;
    origin.is_recomputed = mode == Recompute::kAll;
    if (mode == Recompute::kChosen && chosen_.count(twin) != 0) {
      origin.is_recomputed = true;
      chosen_.insert(origin.id);
      while (chosen_.size() > most_chosen_) chosen_.erase(chosen_.begin());
    }
    if (mode == Recompute::kNoting) add_note(origin, *step, bytes);
  }
  // An op that cannot be rerun has created a storage.
  void record_unrepeatable(int64_t id, int64_t bytes) {
    if (mode == Recompute::kNoting) note_for(id, bytes).nanoseconds = -1;
  }
  // The op has changed a storage with a known lineage.
  void record_change(const std::shared_ptr<Step>& step, RerunEffect effect,
                     std::vector<std::shared_ptr<const Step>> before, bool complete, const c10::StorageImpl& storage,
                     Origin& origin) {
    if (before.empty() || before.size() >= Origin::kMaxSteps) return;
    origin.steps = std::move(before);
    origin.steps.push_back(step);
    origin.complete = complete || (effect == RerunEffect::kFills && covers(step->references, storage));
    if (mode == Recompute::kNoting) add_note(origin, *step, static_cast<int64_t>(storage.nbytes()));
  }

  // Call before a write, or before code may write at any time. The caller holds the storage.
  void before_write(c10::StorageImpl& storage) {
    const auto owner = StoragePointer::reclaim_copy(&storage);
    std::vector<std::shared_ptr<Recipe>> readers;
    {
      const Guard guard;
      const std::shared_ptr<Origin> origin = pager_.known_origin(storage);
      if (!origin) return;
      for (const auto& weak : origin->recipes) {
        const auto recipe = weak.lock();
        if (recipe && !recipe->kept_storage && recipe->original && recipe->original->_unsafe_get_target() == &storage)
          recipe->keep(owner);
      }
      for (const auto& weak : origin->readers)
        if (auto recipe = weak.lock(); recipe && !recipe->kept_storage) readers.push_back(std::move(recipe));
    }
    for (const auto& recipe : readers) keep(recipe);
  }

  // Returns a packed tensor for autograd to save. Null: save the tensor.
  Packed* pack(const at::Tensor& tensor) {
    const Guard guard;
    if (mode == Recompute::kOff || !is_plain(tensor)) return nullptr;
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    if (static_cast<int64_t>(storage.nbytes()) < large_) return nullptr;
    const std::shared_ptr<Origin> origin = pager_.origin_of(storage);
    if (!origin) return nullptr;
    if (mode == Recompute::kNoting) {
      Note& note = note_for(origin->id, static_cast<int64_t>(storage.nbytes()));
      note.saved = true;
      if (origin->steps.empty() || !origin->complete) note.nanoseconds = -1;
      return nullptr;
    }
    if (!origin->is_recomputed || origin->steps.empty() || !origin->complete) return nullptr;
    const std::shared_ptr<Recipe> recipe = recipe_of(origin, storage);
    if (!recipe) return nullptr;
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    return new Packed{shared_from_this(), recipe, Geometry::of(tensor), counter, counter.current_version()};
  }

  at::Tensor unpack(const Packed& packed) {
    const auto now = packed.counter.current_version();
    TORCH_CHECK(now == packed.version,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                c10::DeviceTypeName(Device::kType), c10::scalarTypeToTypeMeta(packed.geometry.type.toScalarType()).name(), " ",
                c10::IntArrayRef(packed.geometry.sizes), "] is at version ", now, "; expected version ", packed.version,
                " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True).");
    at::Tensor tensor = packed.geometry.on(c10::Storage(bytes_of(packed.recipe, false)));
    // A change to the unpacked tensor counts as one of the saved tensor, and the next unpacking reports it.
    tensor.unsafeGetTensorImpl()->set_version_counter(packed.counter);
    return tensor;
  }

  void count_freed(const Origin& origin, int64_t bytes) {
    for (const auto& weak : origin.recipes)
      if (const auto recipe = weak.lock(); recipe && !recipe->kept_storage && recipe->version == origin.version) {
        dropped_bytes += bytes;
        return;
      }
  }

  // Evaluates all recipes: later writes are not observed.
  void close() {
    std::vector<std::shared_ptr<Recipe>> all;  // held by autograd directly
    {
      const Guard guard;
      mode = Recompute::kOff;
      for (Recipe* recipe : live_recipes_->recipes)
        if (auto owner = recipe->weak_from_this().lock(); owner && owner->origin && !owner->kept_storage)
          all.push_back(std::move(owner));
    }
    for (const auto& recipe : all) {
      try {
        keep(recipe);
      } catch (const std::exception& error) {
        recipe->error = error.what();
        recipe->error = recipe->error.substr(0, recipe->error.find('\n'));
      }
    }
  }

 private:
  void keep(const std::shared_ptr<Recipe>& recipe) {
    StoragePointer storage = bytes_of(recipe, false);
    const Guard guard;
    if (!recipe->kept_storage) recipe->keep(std::move(storage));
  }

  // Whether the written first argument covers the whole storage.
  static bool covers(const std::vector<Reference>& references, const c10::StorageImpl& storage) {
    for (const Reference& reference : references) {
      if (!reference.is_own || reference.argument != 0) continue;
      const Geometry& geometry = reference.geometry;
      std::vector<std::pair<int64_t, int64_t>> dimensions;
      for (size_t i = 0; i < geometry.sizes.size(); ++i)
        if (geometry.sizes[i] != 1) dimensions.emplace_back(geometry.strides[i], geometry.sizes[i]);
      std::sort(dimensions.begin(), dimensions.end());
      int64_t dense = 1;
      for (const auto& [stride, size] : dimensions) {
        if (stride != dense) return false;
        dense *= size;
      }
      return geometry.offset == 0 && dense * static_cast<int64_t>(geometry.type.itemsize()) ==
                                         static_cast<int64_t>(storage.nbytes());
    }
    return false;
  }

  Note& note_for(int64_t id, int64_t bytes) {
    while (notes_.size() >= kMaxNotes && notes_.count(id) == 0) notes_.erase(notes_.begin());
    Note& note = notes_[id];
    note.bytes = bytes;
    return note;
  }
  void add_note(const Origin& origin, const Step& step, int64_t bytes) {
    Note& note = note_for(origin.id, bytes);
    note.nanoseconds += step.nanoseconds;
    note.places.push_back(step.place);
    for (const Reference& reference : step.references) {
      const auto from = reference.origin.lock();
      if (!reference.is_own && from && std::find(note.inputs.begin(), note.inputs.end(), from->id) == note.inputs.end())
        note.inputs.push_back(from->id);
    }
  }

  template <class Weak>
  static void add(std::vector<Weak>& list, const std::shared_ptr<Recipe>& recipe) {
    if (list.size() >= 8 && (list.size() & (list.size() - 1)) == 0)
      std::erase_if(list, [](const Weak& weak) {
        const auto recipe_owner = weak.lock();
        return !recipe_owner || recipe_owner->kept_storage;
      });
    list.push_back(recipe);
  }

  static std::shared_ptr<Recipe> find_live(const Origin& origin, int64_t version) {
    for (const auto& weak : origin.recipes)
      if (auto recipe = weak.lock(); recipe && !recipe->kept_storage && recipe->version == version) return recipe;
    return {};
  }

  std::shared_ptr<Recipe> recipe_of(const std::shared_ptr<Origin>& origin, c10::StorageImpl& storage) {
    if (auto existing = find_live(*origin, origin->version)) return existing;
    const auto recipe = recipe_of({origin->steps, origin->result, static_cast<int64_t>(storage.nbytes())}, kDeepest);
    if (!recipe) return {};
    recipe->origin = origin;
    recipe->version = origin->version;
    recipe->original.emplace(weak_of(storage));
    add(origin->recipes, recipe);
    ++recipe_count;
    return recipe;
  }
  // Returns null if an input is gone and has no recomputation sequence of at most `deepest`.
  std::shared_ptr<Recipe> recipe_of(const Provenance& provenance, int deepest) {
    if (deepest <= 0) return {};
    auto recipe = std::make_shared<Recipe>(live_recipes_);
    recipe->bytes = provenance.bytes;
    recipe->steps = provenance.steps;
    recipe->result = provenance.result;
    for (const auto& step : recipe->steps)
      for (const Reference& reference : step->references) {
        if (reference.is_own) continue;
        const auto from = reference.origin.lock();
        const bool as_it_was =
            from && from->version == reference.version && count_of(reference.counter) == reference.count;
        const auto same = [&](const Input& input) {
          return as_it_was ? input.origin == from : reference.provenance && input.provenance == reference.provenance;
        };
        const auto existing = std::find_if(recipe->inputs.begin(), recipe->inputs.end(), same);
        if (existing != recipe->inputs.end()) {
          existing->references.push_back(&reference);
          continue;
        }
        Input input;
        input.references = {&reference};
        input.provenance = reference.provenance;
        if (as_it_was) {
          input.origin = from;
          input.version = from->version;
          input.counter = reference.counter;
          input.count = reference.count;
          input.recipe = find_live(*from, from->version);
          if (input.recipe && input.recipe->depth + 1 >= deepest) input.recipe.reset();
        }
        // Intermediate results that may still exist are not kept alive.
        if (!input.recipe && reference.provenance && (!as_it_was || from->is_recomputed))
          input.recipe = recipe_of(*reference.provenance, deepest - 1);
        if (input.recipe) {
          recipe->depth = std::max(recipe->depth, input.recipe->depth + 1);
        } else {
          if (as_it_was && from->storage) input.storage = strong_of(*from->storage);
          if (!input.storage || pager_.origin_of(*input.storage) != from || from->version != input.version) {
            drop(std::move(input.storage));
            return {};
          }
        }
        recipe->inputs.push_back(std::move(input));
      }
    // Another thread may have written to one meanwhile.
    for (const Input& input : recipe->inputs)
      if (input.origin && input.origin->version != input.version) return {};
    for (const Input& input : recipe->inputs)
      if (input.origin) add(input.origin->readers, recipe);
    return recipe;
  }

  // Returns an existing storage of the recipe. `exact`: only in the recipe's version.
  StoragePointer find_storage(Recipe& recipe, bool exact) {
    const auto holds = [&](c10::StorageImpl& storage, const std::shared_ptr<Origin>& origin, int64_t version) {
      return pager_.known_origin(storage) == origin && (!exact || origin->version == version) &&
             static_cast<int64_t>(storage.nbytes()) == recipe.bytes;
    };
    if (recipe.kept_storage) return recipe.kept_storage;
    if (!recipe.original) return find_rerun(recipe);
    if (auto storage = strong_of(*recipe.original)) {
      if (holds(*storage, recipe.origin, recipe.version)) return storage;
      drop(std::move(storage));
    }
    return recipe.kept_storage ? recipe.kept_storage : find_rerun(recipe);
  }
  StoragePointer find_rerun(Recipe& recipe) {
    if (!recipe.rerun_storage) return {};
    auto storage = strong_of(*recipe.rerun_storage);
    if (storage && recipe.rerun_storage && recipe.rerun_origin &&
        pager_.known_origin(*storage) == recipe.rerun_origin && recipe.rerun_origin->version == recipe.rerun_version)
      return storage;
    drop(std::move(storage));
    recipe.rerun_storage.reset();
    recipe.rerun_origin.reset();
    return {};
  }

  StoragePointer bytes_of(const std::shared_ptr<Recipe>& recipe, bool exact) {
    std::vector<Input> inputs;
    std::vector<std::shared_ptr<const Step>> steps;
    {
      const Guard guard;
      TORCH_CHECK(recipe->error.empty(),
                  "outofcore: a saved tensor could not be recomputed when the loop ended: ", recipe->error,
                  "; call backward() before the loop ends, or use a larger budget");
      if (auto storage = find_storage(*recipe, exact)) return storage;
      inputs = recipe->inputs;
      steps = recipe->steps;
    }
    for (Input& input : inputs) {
      if (!input.storage) input.storage = bytes_of(input.recipe, true);
      if (input.recipe) continue;
      const Guard guard;
      const bool same = pager_.known_origin(*input.storage) == input.origin &&
                        input.origin->version == input.version && count_of(input.counter) == input.count;
      TORCH_CHECK(same,
                  "outofcore: a saved tensor cannot be recomputed: one of its inputs was changed by code that is not "
                  "observed, such as another thread or a resize of its storage; change it after backward(), or on the "
                  "thread of the loop");
    }
    const auto start = std::chrono::steady_clock::now();
    StoragePointer storage;
    for (const auto& step : steps) {
      const auto storage_of = [&](const Reference& reference) -> StoragePointer {
        if (reference.is_own) return storage;
        for (const Input& input : inputs)
          for (const Reference* candidate : input.references)
            if (candidate == &reference) return input.storage;
        TORCH_CHECK(false, "outofcore: a recipe lacks one of its inputs");
      };
      const auto run = [&](const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
        const c10::impl::ExcludeDispatchKeyGuard past(
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                 c10::DispatchKey::FuncTorchDynamicLayerFrontMode}));
        pager_.run(op, below, stack);
      };
      const torch::jit::Stack results = rerun(*step, storage_of, run);
      if (storage) continue;
      size_t place = 0;
      for (const c10::IValue& result : results)
        each_tensor(result, [&](const at::Tensor& tensor, int64_t) {
          if (tensor.defined() && tensor.has_storage() && place++ == recipe->result)
            storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
        });
      TORCH_CHECK(storage && static_cast<int64_t>(storage->nbytes()) == recipe->bytes,
                  "outofcore: ", step->op.operator_name(), " created a different storage than before");
    }
    const Guard guard;
    recipe->rerun_storage.emplace(weak_of(*storage));
    recipe->rerun_origin = pager_.known_origin(*storage);
    if (recipe->rerun_origin) recipe->rerun_version = recipe->rerun_origin->version;
    ++reruns;
    nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    return storage;
  }

  Pager& pager_;
  const int64_t large_;
  std::shared_ptr<LiveRecipes> live_recipes_;
  std::set<int64_t> chosen_;
  int64_t choices_ = 0;  // number of selections
  size_t most_chosen_ = 0;
  std::map<int64_t, Note> notes_;
};

}  // namespace follow
