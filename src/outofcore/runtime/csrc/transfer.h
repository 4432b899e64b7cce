// What moves between a file and host memory, and the threads that do it: see cuda/staging.py.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

struct Lane;

// As ``Transfer`` in cuda/staging.py.
struct Transfer {
  int64_t address, bytes, offset;  // of a pause, the last of these is its length in microseconds
  int32_t descriptor;              // of the file; ``kPause``: nothing is moved
  int32_t writes, forgets;
  int32_t failure;  // 0: done; -1: the file ended; else what errno said
  int64_t done;     // bytes that were moved
  Lane* lane;       // whose thread does it; null: the thread that calls
  Transfer* next;   // while it waits there
};
static_assert(sizeof(Transfer) == 8 * sizeof(int64_t), "Python fills it in by the same layout");

constexpr int32_t kPause = -1;

// A thread that does transfers in the order in which they are posted, and counts them where a device can see it.
struct Lane {
  explicit Lane(std::atomic<uint32_t>* count) : done(count) {}

  std::atomic<uint32_t>* const done;  // goes round at 2^32
  uint32_t issued = 0;                // to a stream, of those that will be posted: whoever issues counts them
  void* seen = nullptr;               // ``done`` by the address that the device knows it by
  std::mutex mutex;
  std::condition_variable posted;
  Transfer *first = nullptr, *last = nullptr;
  bool ends = false;
  std::thread thread;
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void outofcore_transfer(void* transfer) noexcept;
EXPORT void outofcore_post(void* transfer) noexcept;
