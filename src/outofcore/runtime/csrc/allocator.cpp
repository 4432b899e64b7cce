#include "allocator.h"

#include "borders.h"

#include <pthread.h>

#include <utility>

namespace allocation {
namespace {

struct Ours final : device::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (void* pointer = bytes == 0 ? nullptr : compiled_step::serve(static_cast<int64_t>(bytes)))
      return {pointer, pointer, &compiled_step::release, device::current()};
    c10::DataPtr memory;
    return eager_loop::serve(bytes, memory) ? std::move(memory) : stock.load()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

 protected:
  // Plans reuse arena memory regardless of the streams that use it, so streams are not recorded.
  device::MemoryOwner record_stream(const c10::DataPtr& data, void* stream) override {
    if (data.get_deleter() == &compiled_step::release)
      return compiled_step::has(data.get()) ? device::MemoryOwner::kOurs : device::MemoryOwner::kForwarded;
    return eager_loop::record_stream(data, stream);
  }
};

Ours& allocator = *new Ours;  // never destroyed: storages keep a pointer to it
int installs = 0;

// Registered before the handler of loops (paging.cpp), because the loops' lock is taken first.
const int at_fork = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

const borders::Border kBorders[] = {
    ENUM("Installed", Installed, kDone, kNoDeleter, kAnother, kOutranked, kFailed),
};

}  // namespace

Installed install() noexcept try {
  const std::lock_guard guard(mutex);
  if (installs == 0) {
    c10::Allocator* current = device::installed_allocator();
    if (current->raw_deleter() == nullptr) return Installed::kNoDeleter;
    if (stock.load() != nullptr && stock.load() != current) return Installed::kAnother;
    stock = current;
    device::set_stock(allocator, current);
    device::install(&allocator);
    if (device::installed_allocator() != &allocator) return Installed::kOutranked;
  }
  ++installs;
  return Installed::kDone;
} catch (...) {
  return Installed::kFailed;
}

void uninstall() noexcept {
  const std::lock_guard guard(mutex);
  if (--installs == 0 && device::installed_allocator() == &allocator) device::install(stock);
}

bool is_installed() {
  const std::lock_guard guard(mutex);
  return installs > 0;
}

c10::Allocator& our_allocator() { return allocator; }

void release(void* pointer) noexcept {
  if (pointer == nullptr || compiled_step::take_back(pointer) || eager_loop::take_back(pointer)) return;
  stock.load()->raw_deallocate(pointer);
}

}  // namespace allocation

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int outofcore_install() noexcept { return static_cast<int>(allocation::install()); }
EXPORT void outofcore_uninstall() noexcept { allocation::uninstall(); }
EXPORT const char* outofcore_borders() noexcept { return borders::listing().c_str(); }
