// What stands in autograd's place for a saved tensor whose bytes can be made again.
//
// A recipe is the lineage of a storage (see lineage.h) with references to what it starts from. Autograd holds it instead
// of the tensor, so that the storage goes when nobody else has it; nothing that anybody can see is ever dropped. While the
// storage is there all the same, it is taken as it is.
//
// What a recipe starts from must be what it was. Before an op writes to such a storage, the recipes that start from it are
// carried out, and their results kept; before one writes to a storage that has a recipe, the recipe keeps the storage, as
// autograd would have done.

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
  kChosen,      // the storages that were named
  kEverything,  // whatever can be made again
  kNoting,      // nothing, but it is written down what could be
};

// What recipes need of the code that pages.
struct Pager {
  virtual ~Pager() = default;
  // Of a storage that is followed and changes only where that is seen; null: another one.
  virtual std::shared_ptr<Origin> origin_of(c10::StorageImpl& storage) = 0;
  // Of any storage that has one.
  virtual std::shared_ptr<Origin> known_origin(c10::StorageImpl& storage) = 0;
  // Of one that is too small to be followed.
  virtual c10::Storage copy_of(const c10::StorageImpl& storage) = 0;
  // Runs an op as if the loop had.
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) = 0;
};

// Recipes that somebody holds. It outlives the loop.
struct Shelf {
  std::unordered_set<Recipe*> recipes;
};

struct Input {
  std::vector<const Reference*> references;  // that mean it
  std::shared_ptr<const Making> making;
  std::shared_ptr<Origin> origin;  // null: it is gone, or was changed since
  int64_t version = 0;
  c10::VariableVersion counter;
  uint32_t count = 0;
  StoragePointer storage;          // either it,
  std::shared_ptr<Recipe> recipe;  // or how to make it
};

struct Recipe : std::enable_shared_from_this<Recipe> {
  explicit Recipe(std::shared_ptr<Shelf> on) : shelf(std::move(on)) { shelf->recipes.insert(this); }
  Recipe(const Recipe&) = delete;
  ~Recipe() {
    const Guard guard;
    shelf->recipes.erase(this);
    forget();
    drop(std::move(kept));
  }

  std::shared_ptr<Shelf> shelf;
  std::shared_ptr<Origin> origin;
  int64_t version = 0, bytes = 0;
  std::vector<std::shared_ptr<const Step>> steps;
  size_t result = 0;
  std::vector<Input> inputs;
  int depth = 0;  // how many recipes have to be carried out one after the other
  std::optional<WeakStorage> original;
  std::optional<WeakStorage> again;  // the storage that was made last
  std::shared_ptr<Origin> again_origin;
  int64_t again_version = 0;
  StoragePointer kept;  // it need not be made any more
  std::string lost;     // why it cannot be

  void keep(StoragePointer storage) {
    kept = std::move(storage);
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

// What autograd has in place of one saved tensor.
struct Packed {
  std::shared_ptr<Recipes> recipes;
  std::shared_ptr<Recipe> recipe;
  Geometry geometry;
  c10::VariableVersion counter;  // that of the tensor
  uint32_t version = 0;
};

// What was seen of a storage that could be made again.
struct Note {
  int64_t bytes = 0, nanoseconds = 0;  // of the ops that made it
  std::vector<size_t> places;          // of these ops, where a device times them
  bool saved = false;                  // by autograd
  std::vector<int64_t> inputs;         // the storages that they start from
};

class Recipes : public std::enable_shared_from_this<Recipes> {
 public:
  // A longer chain of recipes is not made: what it would start from is kept.
  static constexpr int kDeepest = Origin::kDeepest;
  static constexpr size_t kMostNotes = size_t{1} << 16;

  Recipes(Pager& pager, int64_t large) : pager_(pager), large_(large), shelf_(new Shelf) {}

  Recompute mode = Recompute::kOff;
  int64_t made = 0, reruns = 0, unkept_bytes = 0, nanoseconds = 0;  // counters

  bool any() const {
    const Guard guard;
    return !shelf_->recipes.empty();
  }

  // Differs where steps make other storages again.
  int64_t variant() const {
    return mode == Recompute::kChosen ? choices_ : mode == Recompute::kEverything ? -1 : 0;
  }
  void choose(const int64_t* ids, int64_t count) {
    ++choices_;
    chosen_.clear();
    chosen_.insert(ids, ids + count);
    most_chosen_ = 4 * chosen_.size() + 1024;
  }
  void forget_notes() { notes_.clear(); }
  const std::map<int64_t, Note>& notes() const { return notes_; }

  // Whether the lineage is to be known of a storage that plays the part of `twin`.
  bool asks_for(int64_t twin) const {
    return mode == Recompute::kEverything || mode == Recompute::kNoting ||
           (mode == Recompute::kChosen && chosen_.count(twin) != 0);
  }

  // An op is about to run. Null: it is not to be kept.
  std::shared_ptr<Step> step_before(const c10::OperatorHandle& op, Again again, c10::DispatchKeySet below,
                                    Device::Stream stream, const torch::jit::Stack& stack, size_t count, bool shapes) {
    return step_of(
        op, again, below, stream, stack, count, shapes, large_,
        [&](c10::StorageImpl& storage) { return pager_.origin_of(storage); },
        [&](const c10::StorageImpl& storage) { return pager_.copy_of(storage); });
  }

  // It has made a storage, the one that has this number among the storages of its results.
  void made_by(const std::shared_ptr<Step>& step, Again again, size_t result, int64_t twin, int64_t bytes,
               Origin& origin) {
    origin.steps.assign(1, step);
    origin.result = result;
    origin.complete = again == Again::kMakes;
    origin.wanted = mode == Recompute::kEverything;
    if (mode == Recompute::kChosen && chosen_.count(twin) != 0) {
      origin.wanted = true;
      // The next time round, this one is the twin.
      chosen_.insert(origin.id);
      while (chosen_.size() > most_chosen_) chosen_.erase(chosen_.begin());
    }
    if (mode == Recompute::kNoting) note(origin, *step, bytes);
  }
  // An op that cannot be run again has made a storage.
  void made_for_good(int64_t id, int64_t bytes) {
    if (mode == Recompute::kNoting) noted(id, bytes).nanoseconds = -1;
  }
  // It has changed a storage of which this was known before.
  void changed_by(const std::shared_ptr<Step>& step, Again again, std::vector<std::shared_ptr<const Step>> before,
                  bool complete, const c10::StorageImpl& storage, Origin& origin) {
    if (before.empty() || before.size() >= Origin::kMostSteps) return;
    origin.steps = std::move(before);
    origin.steps.push_back(step);
    origin.complete = complete || (again == Again::kFills && covers(step->references, storage));
    if (mode == Recompute::kNoting) note(origin, *step, static_cast<int64_t>(storage.nbytes()));
  }

  // Somebody who holds a storage is about to change it, or may change it at any time from now on.
  void before_write(c10::StorageImpl& storage) {
    const auto held = StoragePointer::reclaim_copy(&storage);
    std::vector<std::shared_ptr<Recipe>> readers;
    {
      const Guard guard;
      const std::shared_ptr<Origin> origin = pager_.known_origin(storage);
      if (!origin) return;
      for (const auto& weak : origin->recipes) {
        const auto recipe = weak.lock();
        if (recipe && !recipe->kept && recipe->original && recipe->original->_unsafe_get_target() == &storage)
          recipe->keep(held);
      }
      for (const auto& weak : origin->readers)
        if (auto recipe = weak.lock(); recipe && !recipe->kept) readers.push_back(std::move(recipe));
    }
    for (const auto& recipe : readers) keep(recipe);
  }

  // Of a tensor that autograd has saved. Null: it stays as it is.
  Packed* pack(const at::Tensor& tensor) {
    const Guard guard;
    if (mode == Recompute::kOff || !is_plain(tensor)) return nullptr;
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    if (static_cast<int64_t>(storage.nbytes()) < large_) return nullptr;
    const std::shared_ptr<Origin> origin = pager_.origin_of(storage);
    if (!origin) return nullptr;
    if (mode == Recompute::kNoting) {
      Note& note = noted(origin->id, static_cast<int64_t>(storage.nbytes()));
      note.saved = true;
      if (origin->steps.empty() || !origin->complete) note.nanoseconds = -1;
      return nullptr;
    }
    if (!origin->wanted || origin->steps.empty() || !origin->complete) return nullptr;
    const std::shared_ptr<Recipe> recipe = recipe_of(origin, storage);
    if (!recipe) return nullptr;
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    return new Packed{shared_from_this(), recipe, Geometry::of(tensor), counter, counter.current_version()};
  }

  // The tensor again.
  at::Tensor unpack(const Packed& packed) {
    const auto now = packed.counter.current_version();
    TORCH_CHECK(now == packed.version,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                c10::DeviceTypeName(Device::kType), c10::scalarTypeToTypeMeta(packed.geometry.type.toScalarType()).name(), " ",
                c10::IntArrayRef(packed.geometry.sizes), "] is at version ", now, "; expected version ", packed.version,
                " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True).");
    at::Tensor tensor = packed.geometry.on(c10::Storage(bytes_of(packed.recipe, false)));
    // Who changes what was unpacked changes the saved tensor, and that is noticed at the next unpacking.
    tensor.unsafeGetTensorImpl()->set_version_counter(packed.counter);
    return tensor;
  }

  // A storage goes.
  void gone(const Origin& origin, int64_t bytes) {
    for (const auto& weak : origin.recipes)
      if (const auto recipe = weak.lock(); recipe && !recipe->kept && recipe->version == origin.version) {
        unkept_bytes += bytes;
        return;
      }
  }

  // Nobody will see writes any more: all recipes are carried out.
  void close() {
    std::vector<std::shared_ptr<Recipe>> all;  // those that autograd has; others are parts of them
    {
      const Guard guard;
      mode = Recompute::kOff;
      for (Recipe* recipe : shelf_->recipes)
        if (auto held = recipe->weak_from_this().lock(); held && held->origin && !held->kept) all.push_back(std::move(held));
    }
    for (const auto& recipe : all) {
      try {
        keep(recipe);
      } catch (const std::exception& error) {
        recipe->lost = error.what();
        recipe->lost = recipe->lost.substr(0, recipe->lost.find('\n'));
      }
    }
  }

 private:
  void keep(const std::shared_ptr<Recipe>& recipe) {
    StoragePointer storage = bytes_of(recipe, false);
    const Guard guard;
    if (!recipe->kept) recipe->keep(std::move(storage));
  }

  // Whether one argument, the one that is written, is all of a storage.
  static bool covers(const std::vector<Reference>& references, const c10::StorageImpl& storage) {
    for (const Reference& reference : references) {
      if (!reference.itself || reference.argument != 0) continue;
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

  Note& noted(int64_t id, int64_t bytes) {
    while (notes_.size() >= kMostNotes && notes_.count(id) == 0) notes_.erase(notes_.begin());
    Note& note = notes_[id];
    note.bytes = bytes;
    return note;
  }
  void note(const Origin& origin, const Step& step, int64_t bytes) {
    Note& note = noted(origin.id, bytes);
    note.nanoseconds += step.nanoseconds;
    note.places.push_back(step.place);
    for (const Reference& reference : step.references) {
      const auto from = reference.origin.lock();
      if (!reference.itself && from && std::find(note.inputs.begin(), note.inputs.end(), from->id) == note.inputs.end())
        note.inputs.push_back(from->id);
    }
  }

  template <class Weak>
  static void add(std::vector<Weak>& list, const std::shared_ptr<Recipe>& recipe) {
    if (list.size() >= 8 && (list.size() & (list.size() - 1)) == 0)
      std::erase_if(list, [](const Weak& weak) {
        const auto held = weak.lock();
        return !held || held->kept;
      });
    list.push_back(recipe);
  }

  static std::shared_ptr<Recipe> live(const Origin& origin, int64_t version) {
    for (const auto& weak : origin.recipes)
      if (auto recipe = weak.lock(); recipe && !recipe->kept && recipe->version == version) return recipe;
    return {};
  }

  std::shared_ptr<Recipe> recipe_of(const std::shared_ptr<Origin>& origin, c10::StorageImpl& storage) {
    if (auto found = live(*origin, origin->version)) return found;
    const auto recipe = recipe_of({origin->steps, origin->result, static_cast<int64_t>(storage.nbytes())}, kDeepest);
    if (!recipe) return {};
    recipe->origin = origin;
    recipe->version = origin->version;
    recipe->original.emplace(weak_of(storage));
    add(origin->recipes, recipe);
    ++made;
    return recipe;
  }
  // Null: what it starts from is neither there nor can it be made, by so many recipes at most.
  std::shared_ptr<Recipe> recipe_of(const Making& making, int deepest) {
    if (deepest <= 0) return {};
    auto recipe = std::make_shared<Recipe>(shelf_);
    recipe->bytes = making.bytes;
    recipe->steps = making.steps;
    recipe->result = making.result;
    for (const auto& step : recipe->steps)
      for (const Reference& reference : step->references) {
        if (reference.itself) continue;
        const auto from = reference.origin.lock();
        const bool as_it_was =
            from && from->version == reference.version && count_of(reference.counter) == reference.count;
        const auto same = [&](const Input& input) {
          return as_it_was ? input.origin == from : reference.making && input.making == reference.making;
        };
        const auto found = std::find_if(recipe->inputs.begin(), recipe->inputs.end(), same);
        if (found != recipe->inputs.end()) {
          found->references.push_back(&reference);
          continue;
        }
        Input input;
        input.references = {&reference};
        input.making = reference.making;
        if (as_it_was) {
          input.origin = from;
          input.version = from->version;
          input.counter = reference.counter;
          input.count = reference.count;
          input.recipe = live(*from, from->version);
          if (input.recipe && input.recipe->depth + 1 >= deepest) input.recipe.reset();
        }
        // Of what was made only on the way, and may be there still, nothing is kept.
        if (!input.recipe && reference.making && (!as_it_was || from->wanted))
          input.recipe = recipe_of(*reference.making, deepest - 1);
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
    // Another thread may have written to one of them meanwhile.
    for (const Input& input : recipe->inputs)
      if (input.origin && input.origin->version != input.version) return {};
    for (const Input& input : recipe->inputs)
      if (input.origin) add(input.origin->readers, recipe);
    return recipe;
  }

  // What is there of it without running anything. `exact`: only if it is what it was when the recipe was made.
  StoragePointer present(Recipe& recipe, bool exact) {
    const auto holds = [&](c10::StorageImpl& storage, const std::shared_ptr<Origin>& origin, int64_t version) {
      return pager_.known_origin(storage) == origin && (!exact || origin->version == version) &&
             static_cast<int64_t>(storage.nbytes()) == recipe.bytes;
    };
    if (recipe.kept) return recipe.kept;
    if (!recipe.original) return again(recipe);
    if (auto storage = strong_of(*recipe.original)) {
      if (holds(*storage, recipe.origin, recipe.version)) return storage;
      drop(std::move(storage));
    }
    return recipe.kept ? recipe.kept : again(recipe);
  }
  StoragePointer again(Recipe& recipe) {
    if (!recipe.again) return {};
    auto storage = strong_of(*recipe.again);
    if (storage && recipe.again && recipe.again_origin && pager_.known_origin(*storage) == recipe.again_origin &&
        recipe.again_origin->version == recipe.again_version)
      return storage;
    drop(std::move(storage));
    recipe.again.reset();
    recipe.again_origin.reset();
    return {};
  }

  StoragePointer bytes_of(const std::shared_ptr<Recipe>& recipe, bool exact) {
    std::vector<Input> inputs;
    std::vector<std::shared_ptr<const Step>> steps;
    {
      const Guard guard;
      TORCH_CHECK(recipe->lost.empty(), "outofcore: a tensor that autograd has saved could not be made again when the "
                  "loop ended, since ", recipe->lost, "; call backward() before the context ends, or give a larger budget");
      if (auto storage = present(*recipe, exact)) return storage;
      inputs = recipe->inputs;
      steps = recipe->steps;
    }
    for (Input& input : inputs) {
      if (!input.storage) input.storage = bytes_of(input.recipe, true);
      if (input.recipe) continue;
      const Guard guard;
      const bool same = pager_.known_origin(*input.storage) == input.origin &&
                        input.origin->version == input.version && count_of(input.counter) == input.count;
      TORCH_CHECK(same, "outofcore: a tensor that autograd needs cannot be made again: what it is made from was changed "
                        "by code that is not followed, such as another thread or a resize of its storage; change it after "
                        "backward, or in the thread that is followed");
    }
    const auto start = std::chrono::steady_clock::now();
    StoragePointer storage;
    for (const auto& step : steps) {
      const auto storage_of = [&](const Reference& reference) -> StoragePointer {
        if (reference.itself) return storage;
        for (const Input& input : inputs)
          for (const Reference* meant : input.references)
            if (meant == &reference) return input.storage;
        TORCH_CHECK(false, "outofcore: a recipe lacks one of its inputs");
      };
      const auto run = [&](const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
        const c10::impl::ExcludeDispatchKeyGuard past(
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                 c10::DispatchKey::FuncTorchDynamicLayerFrontMode}));
        pager_.run(op, below, stack);
      };
      const torch::jit::Stack results = run_again(*step, storage_of, run);
      if (storage) continue;
      size_t place = 0;
      for (const c10::IValue& result : results)
        each_tensor(result, [&](const at::Tensor& tensor, int64_t) {
          if (tensor.defined() && tensor.has_storage() && place++ == recipe->result)
            storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
        });
      TORCH_CHECK(storage && static_cast<int64_t>(storage->nbytes()) == recipe->bytes,
                  "outofcore: ", step->op.operator_name(), " made another storage than it had made before");
    }
    const Guard guard;
    recipe->again.emplace(weak_of(*storage));
    recipe->again_origin = pager_.known_origin(*storage);
    if (recipe->again_origin) recipe->again_version = recipe->again_origin->version;
    ++reruns;
    nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    return storage;
  }

  Pager& pager_;
  const int64_t large_;
  std::shared_ptr<Shelf> shelf_;
  std::set<int64_t> chosen_;
  int64_t choices_ = 0;  // there ever were
  size_t most_chosen_ = 0;
  std::map<int64_t, Note> notes_;
};

}  // namespace follow
