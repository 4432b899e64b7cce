// Transfers between files and host memory for streams of CUDA: see cuda/staging.py.

#pragma once

#include "copy_thread.h"
#include "file_io.h"

#include <atomic>
#include <cstdint>

struct Lane;

// As ``Posted`` in cuda/staging.py. With the descriptor ``kPause`` nothing is moved for `offset` microseconds.
struct Posted : outofcore::Transfer, outofcore::CopyThread::Job {
  Lane* lane;  // whose thread does it; null: the thread that calls
};

constexpr int32_t kPause = -2;

void transfer_posted(outofcore::CopyThread::Job& job);

// A thread that does transfers, and counts them where a device can see it.
struct Lane {
  explicit Lane(std::atomic<uint32_t>* count) : done(count) {}

  std::atomic<uint32_t>* const done;  // goes round at 2^32
  uint32_t issued = 0;                // to a stream, of those that will be posted: whoever issues counts them
  void* seen = nullptr;               // ``done`` by the address that the device knows it by
  outofcore::CopyThread thread{transfer_posted};
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void outofcore_transfer(void* transfer) noexcept;
EXPORT void outofcore_post(void* posted) noexcept;
