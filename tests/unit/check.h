// What the programs share that check parts of followed loops.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "step.h"

// Ends the program unless it is so.
#define SURE(what)                                                   \
  do {                                                               \
    if (!(what)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
      std::exit(0);                                                  \
    }                                                                \
  } while (0)

inline std::mt19937 draw(7);

inline int below(int end) { return static_cast<int>(draw() % static_cast<unsigned>(end)); }

// An op of a made-up loop: storages by names, of which those below `kLasting` are the same in each step.
struct Made {
  int schema;
  std::vector<std::pair<int, bool>> operands;  // and whether they are written
  std::vector<int> results;
};

using Program = std::vector<Made>;

constexpr int kLasting = 16;

inline int lasting_or_of(const std::vector<int>& names) {
  return names.empty() || below(2) ? below(kLasting) : names[static_cast<size_t>(below(static_cast<int>(names.size())))];
}

// Ops of `schemas` operators, each of which touches something.
inline Program random_program(int ops, int schemas) {
  Program made;
  std::vector<int> names;
  int fresh = kLasting;
  for (int i = 0; i < ops; ++i) {
    Made op{below(schemas), {}, {}};
    for (int k = below(4); k > 0; --k) op.operands.emplace_back(lasting_or_of(names), below(4) == 0);
    for (int k = op.operands.empty() ? 1 : below(3); k > 0; --k) op.results.push_back(fresh++);
    names.insert(names.end(), op.results.begin(), op.results.end());
    made.push_back(op);
  }
  return made;
}

// The program with something left out, put in or changed so many times.
inline Program edited(Program program, int edits, int schemas) {
  for (; edits > 0 && !program.empty(); --edits) {
    const auto at = program.begin() + below(static_cast<int>(program.size()));
    switch (below(4)) {
      case 0:
        program.erase(at);
        break;
      case 1:
        program.insert(at, Made{below(schemas), {{below(kLasting), false}}, {}});
        break;
      case 2:
        at->schema = below(schemas);
        break;
      default:
        if (!at->operands.empty()) at->operands.front().first = below(kLasting);
    }
  }
  return program;
}

// One run of a program: who is new has another number each time.
class Run {
 public:
  const void* op(const Made& made) const { return schemas_ + made.schema; }

  std::vector<follow::Touched> operands(const Made& made) {
    std::vector<follow::Touched> touched;
    int32_t place = 0;
    for (const auto& [name, written] : made.operands) touched.push_back({++place, id(name), bytes(name), written, false});
    return touched;
  }
  std::vector<follow::Touched> results(const Made& made) {
    std::vector<follow::Touched> touched;
    int32_t place = 0;
    for (const int name : made.results) touched.push_back({--place, id(name), bytes(name), true, true});
    return touched;
  }
  int64_t id(int name) {
    if (name == replaced) return kReplaced;
    return name < kLasting ? name + 1 : named(ids_, name, next_++);
  }
  int64_t bytes(int name) { return named(bytes_, name, 1 + below(1000)); }

  static constexpr int64_t kReplaced = 1 << 30;
  int replaced = -1;  // a lasting storage that is another block than in other runs

 private:
  static int64_t named(std::vector<int64_t>& all, int name, int64_t otherwise) {
    if (all.size() <= static_cast<size_t>(name)) all.resize(static_cast<size_t>(name) + 1, 0);
    int64_t& found = all[static_cast<size_t>(name)];
    return found == 0 ? found = otherwise : found;
  }

  inline static const char schemas_[256] = {};
  inline static int64_t next_ = kLasting + 1;
  std::vector<int64_t> ids_, bytes_;
};
