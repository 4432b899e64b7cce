// Transfers between a file and host memory, for streams of CUDA: see cuda/staging.py.
//
// CUDA calls a host function on a thread of its own, which may serve all streams of a process one after the other. So a
// transfer is not done there but posted to a thread of ours, one for each direction: files are read and written side by
// side. Nothing here takes the GIL or calls CUDA, and no memory is asked for where a stream waits.

#include "borders.h"
#include "lanes.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <new>
#include <system_error>

namespace {

const borders::Border kBorders[] = {
    STRUCT(Posted, address, bytes, offset, descriptor, writes, cache, failure, done, bounce, lane, next),
    ENUM("Cache", outofcore::Cache, kPast, kDropped, kKept),
};

void serve(Lane& lane) {
  while (true) {
    Posted* next = nullptr;
    {
      std::unique_lock<std::mutex> lock(lane.mutex);
      lane.posted.wait(lock, [&lane] { return lane.first != nullptr || lane.ends; });
      if (lane.first == nullptr) return;
      next = lane.first;
      lane.first = next->next;
    }
    if (next->descriptor == kPause) std::this_thread::sleep_for(std::chrono::microseconds(next->offset));
    else outofcore::transfer(*next);
    // What was read is there before the count says so. From here on the transfer may be posted anew.
    lane.done->fetch_add(1, std::memory_order_release);
  }
}

}  // namespace

// A host function: hands a transfer to the thread of its lane, and returns at once.
EXPORT void outofcore_post(void* data) noexcept {
  auto& t = *static_cast<Posted*>(data);
  Lane& lane = *t.lane;
  {
    const std::lock_guard<std::mutex> guard(lane.mutex);
    t.next = nullptr;
    (lane.first == nullptr ? lane.first : lane.last->next) = &t;
    lane.last = &t;
  }
  lane.posted.notify_one();
}

// A lane that counts at an address, which begins at 0 there; null where the system gives no thread.
EXPORT Lane* outofcore_lane_new(void* count) noexcept {
  auto* lane = new (std::nothrow) Lane(static_cast<std::atomic<uint32_t>*>(count));
  if (lane == nullptr) return nullptr;
  // Signals are for the interpreter's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    lane->thread = std::thread([lane] { serve(*lane); });
  } catch (const std::system_error&) {
    delete lane;
    lane = nullptr;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return lane;
}

// Does what was posted, and ends the thread. Nothing is posted any more.
EXPORT void outofcore_lane_free(Lane* lane) noexcept {
  {
    const std::lock_guard<std::mutex> guard(lane->mutex);
    lane->ends = true;
  }
  lane->posted.notify_one();
  lane->thread.join();
  delete lane;
}
