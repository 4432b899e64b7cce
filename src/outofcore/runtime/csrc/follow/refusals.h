// What the budget refused last: the numbers behind the messages of errors, for Python.
//
// An error goes through PyTorch, perhaps from a thread of autograd's, and has nothing but its text when Python catches it.
// The text finds the refusal.

#pragma once

#include "../borders.h"

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace follow {

// As ``Refusal`` in follow/native.py. In bytes, but for the last two.
struct Numbers {
  int64_t budget;
  int64_t asked;     // by the op, at once
  int64_t used;      // by the op, beside that
  int64_t kept;      // by others, which cannot be moved
  int64_t least;     // the budget that would do
  int64_t small;     // tensors of less than ``smallest`` bytes each
  int64_t smallest;
  int64_t beside;    // the arena: libraries, small tensors, holes
  int64_t sums;      // whether the op adds to the gradient of a parameter
  int64_t parameter;  // the number of its storage; -1: it has none
};
inline const borders::Border kNumbers = STRUCT(Numbers, budget, asked, used, kept, least, small, smallest, beside, sums, parameter);

struct Refusal {
  std::string text, op;
  Numbers numbers{};
};

class Refusals {
 public:
  void keep(Refusal&& refusal) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (last_.size() == kMost) last_.pop_front();
    last_.push_back(std::move(refusal));
  }
  // The last one whose message is part of a text, if there is one.
  std::optional<Refusal> find(const std::string& text) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto refusal = last_.rbegin(); refusal != last_.rend(); ++refusal)
      if (text.find(refusal->text) != std::string::npos) return *refusal;
    return {};
  }

 private:
  static constexpr size_t kMost = 16;  // errors that are thrown and not yet caught

  mutable std::mutex mutex_;
  std::deque<Refusal> last_;
};

inline Refusals& refusals() {
  static Refusals& all = *new Refusals;  // never destroyed: threads may end after static destructors
  return all;
}

}  // namespace follow
