#include "allocator.h"

#include "borders.h"

#include <pthread.h>

#include <utility>

namespace allocation {
namespace {

struct Ours final : device::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (void* pointer = bytes == 0 ? nullptr : planned::serve(static_cast<int64_t>(bytes)))
      return {pointer, pointer, &planned::release, device::current()};
    c10::DataPtr memory;
    return followed::serve(bytes, memory) ? std::move(memory) : stock.load()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

 protected:
  // A plan reuses the memory of an arena whichever streams use it, so none are remembered.
  device::Whose remember(const c10::DataPtr& data, void* stream) override {
    if (data.get_deleter() == &planned::release)
      return planned::has(data.get()) ? device::Whose::kOurs : device::Whose::kPassedOn;
    return followed::remember(data, stream);
  }
};

Ours& allocator = *new Ours;  // never destroyed: storages keep a pointer to it
int installs = 0;

// Before those of loops (paging.cpp), whose lock is taken first.
const int at_fork = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

const borders::Border kBorders[] = {
    ENUM("Installed", Installed, kDone, kNoDeleter, kAnother, kOutranked, kFailed),
};

}  // namespace

Installed install() noexcept try {
  const std::lock_guard guard(mutex);
  if (installs == 0) {
    c10::Allocator* current = device::installed();
    if (current->raw_deleter() == nullptr) return Installed::kNoDeleter;
    if (stock.load() != nullptr && stock.load() != current) return Installed::kAnother;
    stock = current;
    device::beneath(allocator, current);
    device::install(&allocator);
    if (device::installed() != &allocator) return Installed::kOutranked;
  }
  ++installs;
  return Installed::kDone;
} catch (...) {
  return Installed::kFailed;
}

void uninstall() noexcept {
  const std::lock_guard guard(mutex);
  if (--installs == 0 && device::installed() == &allocator) device::install(stock);
}

bool is_installed() {
  const std::lock_guard guard(mutex);
  return installs > 0;
}

c10::Allocator& ours() { return allocator; }

void release(void* pointer) noexcept {
  if (pointer == nullptr || planned::take_back(pointer) || followed::take_back(pointer)) return;
  stock.load()->raw_deallocate(pointer);
}

}  // namespace allocation

#define EXPORT extern "C" __attribute__((visibility("default")))

// Called by ctypes: gives an ``Installed``.
EXPORT int outofcore_install() noexcept { return static_cast<int>(allocation::install()); }
EXPORT void outofcore_uninstall() noexcept { allocation::uninstall(); }
// What C++ and Python both have, in lines: see borders.h.
EXPORT const char* outofcore_borders() noexcept { return borders::told().c_str(); }
