// Transfers between files and host memory, ordered by CUDA streams: see cuda/staging.py.

#pragma once

#include "copy_thread.h"
#include "file_io.h"

#include <atomic>
#include <cstdint>

struct Lane;

// As `Posted` in cuda/staging.py. With the descriptor `kPause` the thread sleeps for `offset` microseconds instead.
struct Posted : outofcore::Transfer, outofcore::CopyThread::Job {
  Lane* lane;  // makes the transfer on its thread; null: on the calling thread
};

constexpr int32_t kPause = -2;

void transfer_posted(outofcore::CopyThread::Job& job);

// A thread that makes transfers, and counts them where the device can read the count.
struct Lane {
  explicit Lane(std::atomic<uint32_t>* count) : completed(count) {}

  std::atomic<uint32_t>* const completed;  // wraps around at 2^32
  uint32_t issued = 0;                // transfers issued to streams, counted by the issuing thread
  void* device_count = nullptr;               // device address of `completed`
  outofcore::CopyThread thread{transfer_posted};
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void outofcore_transfer(void* transfer) noexcept;
EXPORT void outofcore_post(void* posted) noexcept;
