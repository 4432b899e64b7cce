// The most recent refusals, with the numbers behind their error messages, for Python. Python catches an error with only
// its text, perhaps from an autograd thread, and finds the refusal by that text.

#pragma once

#include "../borders.h"

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace follow {

// As `Refusal` in follow/native.py. In bytes except for the last two.
struct Numbers {
  int64_t budget;
  int64_t asked;  // requested at once by the op
  int64_t used;   // operands of the op
  int64_t kept;   // other memory that cannot be moved
  int64_t least;  // smallest sufficient budget
  int64_t small;  // tensors below `smallest` bytes
  int64_t smallest;
  int64_t reserved;   // outside the arena: libraries, small tensors, holes
  int64_t sums;       // whether the op accumulates a parameter's gradient
  int64_t parameter;  // block id of its storage; -1: none
};
inline const borders::Border kNumbers =
    STRUCT(Numbers, budget, asked, used, kept, least, small, smallest, reserved, sums, parameter);

struct Refusal {
  std::string text, op;
  Numbers numbers{};
};

class Refusals {
 public:
  void add(Refusal&& refusal) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (last_.size() == kMaxRefusals) last_.pop_front();
    last_.push_back(std::move(refusal));
  }
  // Returns the latest refusal with a message contained in the text.
  std::optional<Refusal> find(const std::string& text) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto refusal = last_.rbegin(); refusal != last_.rend(); ++refusal)
      if (text.find(refusal->text) != std::string::npos) return *refusal;
    return {};
  }

 private:
  static constexpr size_t kMaxRefusals = 16;  // errors thrown and not yet caught

  mutable std::mutex mutex_;
  std::deque<Refusal> last_;
};

inline Refusals& refusals() {
  static Refusals& all = *new Refusals;  // never destroyed: threads may end after static destructors
  return all;
}

}  // namespace follow
