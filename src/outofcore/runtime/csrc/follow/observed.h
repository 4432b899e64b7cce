// A log of the events of the current and the last complete step, and of deviations from the plan, in the format of
// observed.py. It costs some ten nanoseconds per op and allocates only while it grows. Of a very long step only the
// beginning is kept.

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

// In the order of `Event` in observed.py.
enum class Event : int32_t {
  kHeld,   // a block has memory when the step begins
  kTaken,  // gets memory
  kGiven,  // releases memory
  kOp,     // an op ran; its touches follow
  kTouch,
  kIn,     // a fetch took effect
  kOut,    // a copy to its home
  kLeft,   // evicted
  kFreed,  // freed
};

// How a copy was made, in the order of `Copied` in observed.py.
enum class Copied : int32_t { kOverlapped, kWaited, kOnDemand };

// Why the loop deviated from its plan, in the order of `Cause` in observed.py.
enum class Cause : int64_t {
  kOp,      // another op ran
  kEnd,     // the step ended early
  kMemory,  // an unplanned eviction for lack of room
  kPlace,   // an unplanned eviction from the planned place of another storage
};

class Observer {
 public:
  void add(Event event, int64_t start, int64_t end, int64_t number, int64_t bytes, int32_t flags = 0) {
    if (!open_) return;
    if (now_.events.size() >= kMaxEvents) {
      ++now_.missed;
      return;
    }
    try {
      now_.events.push_back({start, end, number, bytes, event, flags});
    } catch (const std::bad_alloc&) {  // PyTorch's deleters must not throw
      ++now_.missed;
    }
  }
  void add(Event event, int64_t number, int64_t bytes, int32_t flags = 0) {
    if (!open_) return;
    const int64_t now = nanos_now();
    add(event, now, now, number, bytes, flags);
  }

  void open() {
    open_ = true;
    begin();
  }
  void close() { open_ = false; }
  // Starts the next step. The caller adds the blocks that have memory.
  void end_step() {
    now_.end = nanos_now();
    departed_ = false;
    ++steps_;
    std::swap(now_, last_);
    begin();
  }

  // Records a deviation at op `at` of the plan. An empty `actual` means the end of the step.
  void record_departure(int64_t at, Cause cause, std::string expected, std::string actual, int64_t bytes = 0) {
    if (!open_) return;
    const bool memory = cause == Cause::kMemory || cause == Cause::kPlace;
    if (memory && !departures_.empty()) {  // one op causes several evictions
      Departure& last = departures_.back();
      if (last.step == steps_ && last.at == at && last.cause == cause) {
        last.bytes += bytes;
        return;
      }
    }
    ++departures_ever_;
    if (departures_.size() >= kMaxDepartures) departures_.pop_front();
    departures_.push_back({steps_, at, nanos_now(), cause, bytes, 0, -1, std::move(expected), std::move(actual)});
    if (cause == Cause::kOp) departed_ = true;
  }
  // Counts an op after a deviation. `back`: its index in a plan, or -1.
  void after_departure(int64_t back) {
    if (!departed_) return;
    for (auto departure = departures_.rbegin(); departure != departures_.rend(); ++departure)
      if (departure->cause == Cause::kOp) {
        if (back < 0)
          ++departure->ops;
        else
          departure->back = back;
        break;
      }
    departed_ = back < 0;
  }

  // Returns the last complete step, or else the current one, as numbers. `name` returns an operator's name.
  template <class Name>
  std::vector<int64_t> to_numbers(std::string& names, Name&& name) const {
    const bool complete = steps_ > 0;
    const Step& step = complete ? last_ : now_;
    std::unordered_map<std::string, int64_t> number;
    names.clear();
    const auto number_of = [&](const std::string& text) {
      const auto [entry, fresh] = number.emplace(text, static_cast<int64_t>(number.size()));
      if (fresh) names += text + "\n";
      return entry->second;
    };
    std::unordered_map<int64_t, int64_t> of_op;
    std::vector<int64_t> numbers{steps_,
                              complete,
                              step.missed,
                              step.since_1970,
                              (complete ? step.end : nanos_now()) - step.start,
                              static_cast<int64_t>(step.events.size()),
                              static_cast<int64_t>(departures_.size()),
                              departures_ever_};
    for (const Entry& event : step.events) {
      int64_t subject = event.number;
      if (event.event == Event::kOp) {
        const auto entry = of_op.find(subject);
        subject = entry != of_op.end()
                      ? entry->second
                      : (of_op[subject] = number_of(name(reinterpret_cast<const void*>(subject))));
      }
      numbers.insert(numbers.end(), {static_cast<int64_t>(event.event), event.start - step.start,
                                     event.end - step.start, subject, event.bytes, event.flags});
    }
    for (const Departure& departure : departures_)
      numbers.insert(numbers.end(), {departure.step, departure.at, departure.nanos - step.start,
                                     static_cast<int64_t>(departure.cause), departure.bytes, departure.ops,
                                     departure.back, departure.expected.empty() ? -1 : number_of(departure.expected),
                                     departure.actual.empty() ? -1 : number_of(departure.actual)});
    return numbers;
  }

 private:
  static constexpr size_t kMaxEvents = size_t{1} << 18, kMaxDepartures = 100;

  struct Entry {
    int64_t start, end;
    int64_t number;  // the block, or the address of an op's schema
    int64_t bytes;   // of an op: nanoseconds that it waited
    Event event;
    int32_t flags;
  };
  struct Step {
    std::vector<Entry> events;
    int64_t start = 0, end = 0, since_1970 = 0, missed = 0;
  };
  struct Departure {
    int64_t step;  // number of steps ended
    int64_t at;    // op of the plan
    int64_t nanos;
    Cause cause;
    int64_t bytes;
    int64_t ops;   // ops until a plan matched again
    int64_t back;  // where it matched; -1: not in that step
    std::string expected, actual;
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
