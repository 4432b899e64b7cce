// The record of one step: its ops and the storages that they touched. Storages are numbered by first touch, so the
// numbers agree between steps that run the same ops on storages in the same relations.

#pragma once

#include <cstdint>
#include <vector>

#include "requests.h"

namespace follow {

// An op's use of a storage. Operands have places 1, 2, ...; results have -1, -2, ...
struct Touched {
  int32_t place;
  int64_t id;  // of the block
  int64_t bytes;
  bool written, created;
};

struct StepOp {
  struct Touch {
    int32_t place;
    int32_t storage;
    bool written, created;
  };
  const void* op;  // operator schema
  std::vector<Touch> touched;
  const char* source = nullptr;  // see sources.h; null: unknown
};

struct StepStorage {
  int64_t id;  // of the block
  int64_t bytes;
  int32_t freed = -1;  // number of ops begun when it was freed; -1: not freed in this step
  bool created = false;
};

struct Record {
  // A storage that an earlier step created and this one frees without touching it.
  struct Leftover {
    int32_t storage;  // its number in the previous step
    int32_t freed;
  };

  std::vector<StepOp> ops;
  std::vector<StepStorage> storages;
  std::vector<int64_t> nanos, workspaces;  // per op: time including Python's before it; scratch bytes
  std::vector<std::vector<Request>> requests;  // per op
  std::vector<Leftover> leftovers;
  uint64_t before = 0;  // signature of the previous step
  int64_t variant = 0;  // steps with different recomputed storages are of different kinds
  uint64_t signature = 14695981039346656037ull;  // equal for the same ops on storages in the same relations
};

}  // namespace follow
