// What a step of a loop did: ops, and the storages that they touched.
//
// Storages have numbers in the order of their first touch, so that these numbers mean the same in steps that run the same
// ops on storages in the same relations.

#pragma once

#include <cstdint>
#include <vector>

#include "requests.h"

namespace follow {

// How an op has touched a storage: operands are numbered from 1 on, results from -1 downwards.
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
  const void* op;  // the schema of its operator
  std::vector<Touch> touched;
  const char* source = nullptr;  // see sources.h; null: it is not known
};

struct StepStorage {
  int64_t id;  // of the block
  int64_t bytes;
  int32_t freed = -1;  // the ops that had begun when it was freed; -1: not in this step
  bool created = false;
};

// One step that has been.
struct Record {
  // A storage that an earlier step made, that this one does not touch, and that it frees.
  struct Leftover {
    int32_t storage;  // its number in the step before
    int32_t freed;
  };

  std::vector<StepOp> ops;
  std::vector<StepStorage> storages;
  std::vector<int64_t> nanos, workspaces;  // by op: what it took with what Python did before it; its scratch memory
  std::vector<std::vector<Request>> requests;  // by op
  std::vector<Leftover> leftovers;
  uint64_t before = 0;  // the signature of the step before
  int64_t variant = 0;  // steps of which other storages are made again are never of one kind
  uint64_t signature = 14695981039346656037ull;  // equal: the same ops on storages in the same relations
};

}  // namespace follow
