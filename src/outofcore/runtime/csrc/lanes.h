// Threads that move bytes between files and host memory for streams of CUDA: see cuda/staging.py.

#pragma once

#include "file_io.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

struct Lane;

// As ``Posted`` in cuda/staging.py. With the descriptor ``kPause`` nothing is moved for `offset` microseconds.
struct Posted : outofcore::Transfer {
  Lane* lane;    // whose thread does it; null: the thread that calls
  Posted* next;  // while it waits there
};

constexpr int32_t kPause = -1;

// A thread that does transfers in the order in which they are posted, and counts them where a device can see it.
struct Lane {
  explicit Lane(std::atomic<uint32_t>* count) : done(count) {}

  std::atomic<uint32_t>* const done;  // goes round at 2^32
  uint32_t issued = 0;                // to a stream, of those that will be posted: whoever issues counts them
  void* seen = nullptr;               // ``done`` by the address that the device knows it by
  std::mutex mutex;
  std::condition_variable posted;
  Posted *first = nullptr, *last = nullptr;
  bool ends = false;
  std::thread thread;
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void outofcore_transfer(void* transfer) noexcept;
EXPORT void outofcore_post(void* posted) noexcept;
