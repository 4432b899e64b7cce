// Transfers between files and host memory, ordered by CUDA streams: see cuda/staging.py. CUDA may run the host
// functions of all streams on one thread, so they only post transfers to our threads, one per direction. No code here
// takes the GIL, calls CUDA, or allocates while a stream waits.

#include "lanes.h"

#include "borders.h"

#include <chrono>
#include <new>

namespace {

const borders::Border kBorders[] = {
    STRUCT(Posted, address, bytes, offset, descriptor, writes, cache, failure, done, bounce, next, lane),
    ENUM("Cache", outofcore::Cache, kPast, kDropped, kKept),
};

}  // namespace

void transfer_posted(outofcore::CopyThread::Job& job) {
  auto& posted = static_cast<Posted&>(job);
  Lane& lane = *posted.lane;
  if (posted.descriptor == kPause) std::this_thread::sleep_for(std::chrono::microseconds(posted.offset));
  else outofcore::transfer(posted);
  // The count is published after the bytes. From here on the transfer may be posted again.
  lane.completed->fetch_add(1, std::memory_order_release);
}

// A host function: posts a transfer to its lane's thread and returns at once.
EXPORT void outofcore_post(void* data) noexcept {
  auto& posted = *static_cast<Posted*>(data);
  posted.lane->thread.ask(posted);
}

// Creates a lane that counts at an address, initially 0. Returns null if no thread can be created.
EXPORT Lane* outofcore_lane_new(void* count) noexcept {
  auto* lane = new (std::nothrow) Lane(static_cast<std::atomic<uint32_t>*>(count));
  if (lane == nullptr || lane->thread.start() == 0) return lane;
  delete lane;
  return nullptr;
}

// Finishes posted transfers and ends the thread. No more may be posted.
EXPORT void outofcore_lane_free(Lane* lane) noexcept { delete lane; }
