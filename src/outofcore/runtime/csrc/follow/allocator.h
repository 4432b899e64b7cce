// The allocator of eager loops: serves the requests of their ops in the arena.

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
  int64_t offset = -1;
  if (depth > 0 && is_large(bytes)) {
    if (const size_t number = space.requests.size();
        number < space.planned_requests.size() && space.planned_requests[number].first >= whole_pages(bytes))
      offset = space.planned_requests[number].second;
  }
  const auto place_at = find_room(space, whole_pages(bytes), offset);
  if (!place_at && space.can_rerun && space.overrun == 0) {
    space.needs_rerun = true;
    refuse_request(space, bytes);
  }
  if (!place_at) {
    if (depth > 0) space.requests.push_back({space.next_id++, whole_pages(bytes)});
    return serve_outside(space, bytes, true);
  }
  Block* block = new_block(space, bytes);
  try {
    if (depth > 0 && is_large(bytes)) space.requests.push_back({block->id, block->bytes});
    place(space, *block, BlockState::kResident, *place_at);
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
    const auto entry = space->by_offset.find(static_cast<int64_t>(address - base));
    return entry == space->by_offset.end() ? nullptr : entry->second;
  }
  return nullptr;
}

std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};  // of all arenas ever reserved

// PyTorch's allocator serves small storages; the loop's own count in its budget.
int64_t size_of_small(void* pointer) { return static_cast<int64_t>(malloc_usable_size(pointer)); }

void release_block(void* context) {
  const Guard guard;
  auto* block = static_cast<Block*>(context);
  if (!pending.empty()) end_works();
  if (Device::kStreams && block->state == BlockState::kFetching) {  // the next user of its memory waits for the copy
    std::erase(block->space->ended_copies, block);
    block->set_state(BlockState::kFetched);
    --block->space->copying_in;
  }
  if (block->is_held()) {
    block->is_freed = true;
    if (block->pins == 0) block->space->recorder.free(block->id);  // the duration of its copy is not part of the step
    block->storage.reset();
    block->space->owned_blocks.erase(block);
    return;
  }
  destroy(block);
}

void release_small(void* pointer) {
  small_bytes.fetch_sub(size_of_small(pointer), std::memory_order_relaxed);
  stock.load()->raw_deallocate(pointer);
}
// On a new peak of small storages, evicts large ones. If that fails, the next large request is refused.
void make_room_for_small(Space& space, int64_t now) {
  const Guard guard;
  if (current != &space || now <= space.small_peak) return;
  const int64_t before = space.small();
  space.small_peak = now;
  if (space.small() == before || space.base == nullptr) return;
  try {
    make_room(space, 0);
  } catch (...) {  // reported when the home or the memory is needed next
  }
  trim_idle(space);
}
void count_small(void* pointer) {
  const int64_t bytes = size_of_small(pointer);
  const int64_t all = small_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return;
  if (const int64_t now = all - space->small_before; now > space->small_peak.load(std::memory_order_relaxed))
    make_room_for_small(*space, now);
}

// Kernels get an error that they do not handle: cuDNN would switch to another engine, with other bits, and keep it.
[[noreturn]] void throw_refusal(const c10::OutOfMemoryError& error) {
  if (refusal == nullptr || Device::picks_by_trying()) throw error;
  *refusal = std::make_exception_ptr(error);
  throw c10::Error(static_cast<const c10::Error&>(error));
}

// Serves small requests on a GPU once PyTorch's allocator has used up its segments. Null: PyTorch's allocator serves
// it.
void* serve_small(int64_t bytes) {
  constexpr int64_t kBetweenLooks = Device::kSegment / 2, kLeast = 512;
  Space* space = current.load(std::memory_order_relaxed);
  if (space == nullptr) return nullptr;
  const int64_t asked = space->small_requested.fetch_add(std::max(bytes, kLeast), std::memory_order_relaxed);
  if (asked < kBetweenLooks && !space->small_in_arena.load(std::memory_order_relaxed)) return nullptr;
  const Guard guard;
  if (space != current || space->base == nullptr) return nullptr;
  if (asked >= kBetweenLooks) {
    space->small_requested = 0;
    const int64_t remaining = space->segments - (space->device.bytes_of_segments() - space->segments_before);
    space->small_in_arena = remaining < Device::kSegment ||
                          (remaining < 2 * Device::kSegment && space->device.free_in_segments() < Device::kSegment);
  }
  if (!space->small_in_arena) return nullptr;
  try {
    return serve(*space, bytes);
  } catch (const c10::OutOfMemoryError& error) {
    throw_refusal(error);
  }
}

// Null: the loop has ended meanwhile.
void* serve_large(int64_t bytes) {
  if (passing != nullptr) passing->note_request();
  const Guard guard;
  Space* space = current;
  if (space == nullptr) return nullptr;
  // A thread without observed ops works for the loop unless another thread's op may have started it.
  const bool ours = is_tracked();
  if (ours || (!is_other_thread() && ops_running > 0 && other_ops_running == 0)) {
    // Compiled code allocates outside ops and may write anywhere.
    if (Device::kStreams && depth == 0) {
      space->has_unseen_writes = true;
      space->device.note_unobserved(true);
    }
    try {
      return serve(*space, bytes);
    } catch (const c10::OutOfMemoryError& error) {
      if (ours) throw_refusal(error);
    } catch (...) {
      if (ours) throw;  // requests of other threads are served outside
    }
  }
  return serve_outside(*space, bytes, false);
}

}  // namespace

bool eager_loop::serve(size_t count, c10::DataPtr& memory) {
  if (count == 0 || current.load(std::memory_order_relaxed) == nullptr) return false;
  const auto bytes = static_cast<int64_t>(count);
  void* pointer = nullptr;
  if (is_large(bytes)) {
    if (Device::is_current()) pointer = serve_large(bytes);
  } else if (is_tracked()) {
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

bool eager_loop::take_back(void* pointer) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address >= lowest && address < highest) {
    const Guard guard;
    if (Block* block = block_at(pointer)) {
      if (depth > 0)
        for (follow::Request& request : block->space->requests)
          if (request.id == block->id) request.until = static_cast<int32_t>(block->space->requests.size());
      if (block->is_held()) {
        block->is_freed = true;
        block->storage.reset();
      } else {
        destroy(block);
      }
      return true;
    }
  }
  if (outside_count.load(std::memory_order_relaxed) != 0) {
    const Guard guard;
    if (const auto entry = outside.find(pointer); entry != outside.end()) {
      if (Space* space = current) space->counters[kOutsideBytes] -= entry->second.bytes;
      if (Space* space = entry->second.space) {
        count_use(*space, -entry->second.bytes);
        count_total(*space, -entry->second.bytes);
      }
      outside.erase(entry);
      --outside_count;
      return false;
    }
  }
  // oneDNN kernels allocate without a DataPtr and free within the op.
  if (const int64_t bytes = !Device::kStreams && is_tracked() ? size_of_small(pointer) : 0; bytes < 2 * smallest)
    small_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

::device::MemoryOwner eager_loop::record_stream(const c10::DataPtr& data, void* stream) {
  using ::device::MemoryOwner;
  const bool whole = data.get_deleter() == &release_block;
  if (!whole && data.get_deleter() != &allocation::release) return MemoryOwner::kStock;
  const Guard guard;
  Block* block = whole ? static_cast<Block*>(data.get_context()) : block_at(data.get());
  if (block == nullptr) return MemoryOwner::kForwarded;
  block->space->device.record(block->order, stream);
  return MemoryOwner::kOurs;
}
