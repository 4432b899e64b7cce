// What happened when in the last complete step, and in the one under way; and where the loop left its plan.
//
// A flat log: a few dozen nanoseconds an op, and no memory is asked for once it is as long as a step. It is bounded: of a
// longer step the beginning is kept. How it is read says observed.py.

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace follow {

inline int64_t nanos_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// In the order of ``Event`` in observed.py.
enum class Event : int32_t {
  kHeld,   // a block has memory when the step begins
  kTaken,  // it gets memory
  kGiven,  // it gives it back
  kOp,     // an op ran; what it touched comes next
  kTouch,
  kIn,     // a copy from its home has taken effect
  kOut,    // a copy to its home
  kLeft,   // a block left for its home
  kFreed,  // a block is gone
};

// How a copy was made, in the order of ``Copied`` in observed.py.
enum class Copied : int32_t { kBeside, kWaited, kOnDemand };

// Why the loop left its plan, in the order of ``Cause`` in observed.py.
enum class Cause : int64_t {
  kOp,      // another op came
  kEnd,     // the step ended earlier
  kMemory,  // there was no room, so that something left that was to stay
  kPlace,   // something lay where the plan has something else, and left
};

class Observer {
 public:
  void add(Event event, int64_t start, int64_t end, int64_t number, int64_t bytes, int32_t flags = 0) {
    if (!open_) return;
    if (now_.events.size() >= kMost) {
      ++now_.missed;
      return;
    }
    try {
      now_.events.push_back({start, end, number, bytes, event, flags});
    } catch (const std::bad_alloc&) {  // a deleter of PyTorch's must not throw
      ++now_.missed;
    }
  }
  void add(Event event, int64_t number, int64_t bytes, int32_t flags = 0) {
    if (!open_) return;
    const int64_t now = nanos_now();
    add(event, now, now, number, bytes, flags);
  }

  // Begins the first step.
  void open() {
    open_ = true;
    begin();
  }
  void close() { open_ = false; }
  // A step has ended, and the next one begins; what has memory then is to be added.
  void end_step() {
    now_.end = nanos_now();
    departed_ = false;
    ++steps_;
    std::swap(now_, last_);
    begin();
  }

  // The loop is at an op of the plan, and something else came; what there is no name for is the end of the step.
  void depart(int64_t at, Cause cause, std::string expected, std::string came, int64_t bytes = 0) {
    if (!open_) return;
    const bool memory = cause == Cause::kMemory || cause == Cause::kPlace;
    if (memory && !departures_.empty()) {  // of one op that makes several leave
      Departure& last = departures_.back();
      if (last.step == steps_ && last.at == at && last.cause == cause) {
        last.bytes += bytes;
        return;
      }
    }
    ++departures_ever_;
    if (departures_.size() >= kMostDepartures) departures_.pop_front();
    departures_.push_back({steps_, at, nanos_now(), cause, bytes, 0, -1, std::move(expected), std::move(came)});
    if (cause == Cause::kOp) departed_ = true;
  }
  // The loop has left its plan, and one more op came. `back`: where a plan has it; -1: nowhere.
  void after_departure(int64_t back) {
    if (!departed_) return;
    for (auto each = departures_.rbegin(); each != departures_.rend(); ++each)
      if (each->cause == Cause::kOp) {
        if (back < 0)
          ++each->ops;
        else
          each->back = back;
        break;
      }
    departed_ = back < 0;
  }

  // The last complete step; what happened so far if none is, as numbers. `name` tells that of an operator.
  template <class Name>
  std::vector<int64_t> tell(std::string& names, Name&& name) const {
    const bool complete = steps_ > 0;
    const Step& step = complete ? last_ : now_;
    std::unordered_map<std::string, int64_t> number;
    names.clear();
    const auto number_of = [&](const std::string& text) {
      const auto [found, fresh] = number.emplace(text, static_cast<int64_t>(number.size()));
      if (fresh) names += text + "\n";
      return found->second;
    };
    std::unordered_map<int64_t, int64_t> of_op;
    std::vector<int64_t> told{steps_,
                              complete,
                              step.missed,
                              step.since_1970,
                              (complete ? step.end : nanos_now()) - step.start,
                              static_cast<int64_t>(step.events.size()),
                              static_cast<int64_t>(departures_.size()),
                              departures_ever_};
    for (const Entry& each : step.events) {
      int64_t subject = each.number;
      if (each.event == Event::kOp) {
        const auto found = of_op.find(subject);
        subject = found != of_op.end()
                      ? found->second
                      : (of_op[subject] = number_of(name(reinterpret_cast<const void*>(subject))));
      }
      told.insert(told.end(), {static_cast<int64_t>(each.event), each.start - step.start, each.end - step.start, subject,
                               each.bytes, each.flags});
    }
    for (const Departure& each : departures_)
      told.insert(told.end(), {each.step, each.at, each.nanos - step.start, static_cast<int64_t>(each.cause), each.bytes,
                               each.ops, each.back, each.expected.empty() ? -1 : number_of(each.expected),
                               each.came.empty() ? -1 : number_of(each.came)});
    return told;
  }

 private:
  static constexpr size_t kMost = size_t{1} << 18, kMostDepartures = 100;

  struct Entry {
    int64_t start, end;
    int64_t number;  // of the block; of an op the address of its schema
    int64_t bytes;   // of an op: the nanoseconds that it waited before it started
    Event event;
    int32_t flags;
  };
  struct Step {
    std::vector<Entry> events;
    int64_t start = 0, end = 0, since_1970 = 0, missed = 0;
  };
  struct Departure {
    int64_t step;  // steps that had ended
    int64_t at;    // op of the plan
    int64_t nanos;
    Cause cause;
    int64_t bytes;
    int64_t ops;   // that came until a plan had one of them again
    int64_t back;  // where it did; -1: not in that step
    std::string expected, came;
  };

  void begin() {
    now_.events.clear();
    now_.missed = 0;
    now_.start = nanos_now();
    now_.since_1970 = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  }

  Step now_, last_;
  std::deque<Departure> departures_;
  int64_t steps_ = 0, departures_ever_ = 0;
  bool open_ = false, departed_ = false;
};

}  // namespace follow
