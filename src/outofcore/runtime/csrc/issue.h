// What a step issues beside its ops to a GPU: see ``CudaDriver.tape`` in driver.py, which fills these in.

#pragma once

#include <cstdint>

// What an action is.
enum Kind : int32_t {
  kWait,      // of a stream, for an event
  kRecord,    // of an event, in a stream
  kCopy,      // of bytes
  kTransfer,  // between a file and host memory
};

struct Action {
  int32_t kind, stream;
  void* to;        // a wait's and a record's event; where a copy goes; the transfer
  const void* of;  // where a copy comes from
  int64_t bytes;   // likewise
};

// Issues actions; a status, 0 if all went well.
using Issue = int (*)(const Action* actions, int64_t count, void* const* streams);
