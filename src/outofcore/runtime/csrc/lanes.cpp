// Transfers between a file and host memory, for streams of CUDA: see cuda/staging.py.
//
// CUDA calls a host function on a thread of its own, which may serve all streams of a process one after the other. So a
// transfer is not done there but posted to a thread of ours, one for each direction: files are read and written side by
// side. Nothing here takes the GIL or calls CUDA, and no memory is asked for where a stream waits.

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
  // What was read is there before the count says so. From here on the transfer may be posted anew.
  lane.done->fetch_add(1, std::memory_order_release);
}

// A host function: hands a transfer to the thread of its lane, and returns at once.
EXPORT void outofcore_post(void* data) noexcept {
  auto& posted = *static_cast<Posted*>(data);
  posted.lane->thread.ask(posted);
}

// A lane that counts at an address, which begins at 0 there; null where the system gives no thread.
EXPORT Lane* outofcore_lane_new(void* count) noexcept {
  auto* lane = new (std::nothrow) Lane(static_cast<std::atomic<uint32_t>*>(count));
  if (lane == nullptr || lane->thread.start() == 0) return lane;
  delete lane;
  return nullptr;
}

// Does what was posted, and ends the thread. Nothing is posted any more.
EXPORT void outofcore_lane_free(Lane* lane) noexcept { delete lane; }
