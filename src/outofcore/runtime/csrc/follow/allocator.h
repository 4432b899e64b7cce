// What the allocator under PyTorch asks of loops: requests of their ops are served in the arena.

#pragma once

#include "room.h"

#include <malloc.h>

namespace {

void* serve_outside(Space& space, int64_t bytes, bool charged) {
  void* pointer = stock.load()->raw_allocate(bytes);
  outside[pointer] = {bytes, charged ? &space : nullptr};
  ++outside_count;
  if (charged) {
    count_use(space, bytes);
    count_total(space, bytes);
  }
  int64_t& now = space.counters[kOutsideBytes];
  now += bytes;
  space.counters[kPeakOutsideBytes] = std::max(space.counters[kPeakOutsideBytes], now);
  return pointer;
}

void* serve(Space& space, int64_t bytes) {
  int64_t wanted = -1;
  if (depth > 0 && is_large(bytes)) {
    if (const size_t number = space.requests.size();
        number < space.wanted.size() && space.wanted[number].first >= whole_pages(bytes))
      wanted = space.wanted[number].second;
  }
  const auto place_for = room_for(space, whole_pages(bytes), wanted);
  if (!place_for && space.reruns && space.grown == 0) {
    space.parted = true;
    refuse(space, bytes);
  }
  if (!place_for) {
    if (depth > 0) space.requests.push_back({space.ids++, whole_pages(bytes)});
    return serve_outside(space, bytes, true);
  }
  Block* block = new_block(space, bytes);
  try {
    if (depth > 0 && is_large(bytes)) space.requests.push_back({block->id, block->bytes});
    place(space, *block, State::kHere, *place_for);
  } catch (...) {
    destroy(block);
    throw;
  }
  space.device.use(block->order);
  block->last_use = space.history.now();
  return space.address(*block);
}

Block* block_at(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (const Space* space : spaces) {
    const auto base = reinterpret_cast<uintptr_t>(space->base);
    if (space->base == nullptr || address < base || address >= base + space->addresses()) continue;
    const auto found = space->at.find(static_cast<int64_t>(address - base));
    return found == space->at.end() ? nullptr : found->second;
  }
  return nullptr;
}

std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};  // addresses of all arenas there ever were

// Small storages stay with PyTorch's allocator; those that the loop asks for count in its budget.
int64_t size_of_small(void* pointer) { return static_cast<int64_t>(malloc_usable_size(pointer)); }

void release_block(void* context) {
  const Guard guard;
  auto* block = static_cast<Block*>(context);
  if (!pending.empty()) end_works();
  if (Device::kStreams && block->state == State::kComing) {  // whoever gets its memory waits for the copy
    std::erase(block->space->finished, block);
    block->become(State::kArrived);
    --block->space->copying_in;
  }
  if (block->held()) {
    block->dead = true;
    if (block->pins == 0) block->space->recorder.free(block->id);  // how long its copy takes is no part of the step
    block->storage.reset();
    block->space->known.erase(block);
    return;
  }
  destroy(block);
}

void release_small(void* pointer) {
  small_bytes.fetch_sub(size_of_small(pointer), std::memory_order_relaxed);
  stock.load()->raw_deallocate(pointer);
}
// More than ever: something large has to leave for it. Where nothing can, the next large request is refused.
void make_room_for_small(Space& space, int64_t now) {
  const Guard guard;
  if (current != &space || now <= space.small_peak) return;
  const int64_t before = space.small();
  space.small_peak = now;
  if (space.small() == before || space.base == nullptr) return;
  try {
    make_room(space, 0);
  } catch (...) {  // a home has failed, or there is no memory: told when one of them is needed next
  }
  let_go_of_idle(space);
}
void count_small(void* pointer) {
  const int64_t bytes = size_of_small(pointer);
  const int64_t all = small_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return;
  if (const int64_t now = all - space->small_before; now > space->small_peak.load(std::memory_order_relaxed))
    make_room_for_small(*space, now);
}

// What ``run_kernel`` is to throw. Kernels get an error that those do not catch which have another way for want of memory,
// such as cuDNN, whose other engine has other bits, and would be used from then on. An engine that is found by trying is
// another one each time as it is.
[[noreturn]] void throw_refusal(const c10::OutOfMemoryError& error) {
  if (refusal == nullptr || Device::picks_by_trying()) throw error;
  *refusal = std::make_exception_ptr(error);
  throw c10::Error(static_cast<const c10::Error&>(error));
}

// Serves a small request of a loop on a GPU in the arena, once PyTorch's allocator has taken what it may for such. Null:
// that one serves it. It takes memory in segments, each of which holds what is asked for between two looks.
void* serve_small(int64_t bytes) {
  constexpr int64_t kBetweenLooks = Device::kSegment / 2, kLeast = 512;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return nullptr;
  const int64_t asked = space->small_asked.fetch_add(std::max(bytes, kLeast), std::memory_order_relaxed);
  if (asked < kBetweenLooks && !space->small_inside.load(std::memory_order_relaxed)) return nullptr;
  const Guard guard;
  if (space != current || space->base == nullptr) return nullptr;
  if (asked >= kBetweenLooks) {
    space->small_asked = 0;
    const int64_t left = space->segments - (space->device.bytes_of_segments() - space->segments_before);
    space->small_inside = left < Device::kSegment ||
                          (left < 2 * Device::kSegment && space->device.free_in_segments() < Device::kSegment);
  }
  if (!space->small_inside) return nullptr;
  try {
    return serve(*space, bytes);
  } catch (const c10::OutOfMemoryError& error) {
    throw_refusal(error);
  }
}

// For a request while a loop is followed, whoever makes it. Null: the loop has ended meanwhile.
void* serve_large(int64_t bytes) {
  if (passing != nullptr) passing->asks();
  const Guard guard;
  Space* space = current;
  if (space == nullptr) return nullptr;
  // A thread that no op was seen in works for one of the loop's, if no op of another thread can have started it.
  const bool ours = tracked();
  if (ours || (!is_other() && ops_running > 0 && others_running == 0)) {
    // Compiled code asks for memory without an op, and writes to what it likes.
    if (Device::kStreams && depth == 0) {
      space->unseen = true;
      space->device.note_unseen(true);
    }
    try {
      return serve(*space, bytes);
    } catch (const c10::OutOfMemoryError& error) {
      if (ours) throw_refusal(error);
    } catch (...) {
      if (ours) throw;  // another thread's request is served all the same
    }
  }
  return serve_outside(*space, bytes, false);
}

}  // namespace

bool followed::serve(size_t count, c10::DataPtr& memory) {
  if (count == 0 || current.load(std::memory_order_relaxed) == nullptr) return false;
  const auto bytes = static_cast<int64_t>(count);
  void* pointer = nullptr;
  if (is_large(bytes)) {
    if (Device::is_current()) pointer = serve_large(bytes);
  } else if (tracked()) {
    if (!Device::kStreams) {
      pointer = stock.load()->raw_allocate(count);
      count_small(pointer);
      memory = {pointer, pointer, &release_small, ::device::current()};
      return true;
    }
    if (Device::is_current()) pointer = serve_small(bytes);
  }
  if (pointer == nullptr) return false;
  memory = {pointer, pointer, &allocation::release, ::device::current()};
  return true;
}

bool followed::take_back(void* pointer) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address >= lowest && address < highest) {
    const Guard guard;
    if (Block* block = block_at(pointer)) {
      if (depth > 0)
        for (follow::Request& request : block->space->requests)
          if (request.id == block->id) request.until = static_cast<int32_t>(block->space->requests.size());
      if (block->held()) {
        block->dead = true;
        block->storage.reset();
      } else {
        destroy(block);
      }
      return true;
    }
  }
  if (outside_count.load(std::memory_order_relaxed) != 0) {
    const Guard guard;
    if (const auto found = outside.find(pointer); found != outside.end()) {
      if (Space* space = current) space->counters[kOutsideBytes] -= found->second.bytes;
      if (Space* space = found->second.charged) {
        count_use(*space, -found->second.bytes);
        count_total(*space, -found->second.bytes);
      }
      outside.erase(found);
      --outside_count;
      return false;
    }
  }
  // Kernels of oneDNN ask for memory without a DataPtr, and give it back in the same op.
  if (const int64_t bytes = !Device::kStreams && tracked() ? size_of_small(pointer) : 0; bytes < 2 * smallest)
    small_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

::device::Whose followed::remember(const c10::DataPtr& data, void* stream) {
  using ::device::Whose;
  const bool whole = data.get_deleter() == &release_block;
  if (!whole && data.get_deleter() != &allocation::release) return Whose::kStocks;
  const Guard guard;
  Block* block = whole ? static_cast<Block*>(data.get_context()) : block_at(data.get());
  if (block == nullptr) return Whose::kPassedOn;
  block->space->device.record(block->order, stream);
  return Whose::kOurs;
}
