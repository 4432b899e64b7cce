// Device work of a step other than its ops. `CudaDriver.tape` in driver.py fills these structs in.

#pragma once

#include <cstdint>

enum Kind : int32_t {
  kWait,      // a stream waits for an event
  kRecord,    // an event is recorded in a stream
  kCopy,      // copies bytes
  kTransfer,  // transfers between a file and host memory
};

struct Action {
  int32_t kind, stream;
  void* to;        // the event of a wait or record; a copy's destination; the transfer
  const void* of;  // a copy's source
  int64_t bytes;   // of a copy
};

// Issues actions and returns a CUDA status, 0 on success.
using Issue = int (*)(const Action* actions, int64_t count, void* const* streams);
