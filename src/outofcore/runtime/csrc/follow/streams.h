// Work on streams of a GPU, and who has to wait for which of it.
//
// Work that was issued to a stream has a mark: the stream, and a number that grows. Whoever has to come after it lets its
// own stream wait for the first event that was recorded at that mark or later. A copy has an event right behind it, so that
// whoever needs its bytes does not wait for the copies behind it. An op has none: one is recorded where somebody waits for
// it and nothing later has one. Nothing here blocks the host, but for a stream that is gone.
//
// Memory that is free may still be in use by work that was issued before it was freed: ``Fences`` keeps the marks of that
// by address, for whoever gets the memory next.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace follow {

struct Mark {
  int stream;
  int64_t number;
};

// At most one for each stream: the last.
class Marks {
 public:
  void add(const Mark& mark) {
    for (Mark* each = begin(); each != end(); ++each)
      if (each->stream == mark.stream) {
        each->number = std::max(each->number, mark.number);
        return;
      }
    if (more_.empty() && count_ < few_.size()) {
      few_[count_++] = mark;
      return;
    }
    if (more_.empty()) more_.assign(few_.begin(), few_.end());
    more_.push_back(mark);
  }
  void add(const Marks& others) {
    for (const Mark& mark : others) add(mark);
  }
  void clear() {
    count_ = 0;
    more_.clear();
  }
  const Mark* begin() const { return more_.empty() ? few_.data() : more_.data(); }
  const Mark* end() const { return begin() + (more_.empty() ? count_ : more_.size()); }

 private:
  Mark* begin() { return const_cast<Mark*>(std::as_const(*this).begin()); }
  Mark* end() { return const_cast<Mark*>(std::as_const(*this).end()); }

  // All, in one of the two: a block is used by the loop's stream and the two of copies, and few by others.
  std::array<Mark, 3> few_;
  size_t count_ = 0;
  std::vector<Mark> more_;
};

// The streams of one device, by number. A ``Runtime`` makes events and drops them, records one on a stream (what is waited
// for from then on is all that was issued there before; false: the stream is gone), says whether what one was recorded
// behind is over, lets a stream wait for one as it was recorded last, and waits for all work itself.
template <class Runtime>
class Streams {
 public:
  using Handle = typename Runtime::Handle;

  explicit Streams(Runtime runtime) : runtime_(std::move(runtime)) {}
  ~Streams() {
    for (const Stream& stream : streams_)
      for (const Recorded& recorded : stream.recorded) runtime_.drop(recorded.event);
  }
  Streams(const Streams&) = delete;

  // Makes no event, and so never fails for want of one: deleters ask as well.
  int number_of(Handle handle) {
    if (last_ < streams_.size() && streams_[last_].handle == handle) return static_cast<int>(last_);
    for (size_t i = 0; i < streams_.size(); ++i)
      if (streams_[i].handle == handle) return static_cast<int>(last_ = i);
    streams_.push_back({handle, {}, 0, 0, {}});
    return static_cast<int>(streams_.size()) - 1;
  }
  Handle handle(int stream) const { return streams_[stream].handle; }

  // Of all that was issued to a stream so far, also by others.
  Mark now(int stream) { return {stream, ++streams_[stream].issued}; }

  // Records an event behind what has a mark on a stream, unless there is one: who waits for that waits for no more.
  void record(int stream) {
    Stream& marked = streams_[stream];
    if (!marked.recorded.empty() && marked.recorded.back().number == marked.issued) return;
    Event event;
    if (marked.recorded.size() >= kFew && runtime_.is_over(marked.recorded.front().event)) {
      event = marked.recorded.front().event;
      marked.over = marked.recorded.front().number;
      marked.recorded.pop_front();
    } else {
      event = runtime_.make();
    }
    const bool is_there = runtime_.record(event, marked.handle);
    marked.recorded.push_back({marked.issued, event});
    if (is_there) return;
    // Its owner has destroyed it, perhaps before its work was done.
    runtime_.finish();
    marked.over = marked.issued;
    for (const Recorded& each : std::exchange(marked.recorded, {})) runtime_.drop(each.event);
  }

  // Lets what is issued to a stream from now on come after marked work.
  void wait(int stream, const Mark& mark) {
    if (stream == mark.stream) return;
    Stream &marked = streams_[mark.stream], &waiter = streams_[stream];
    if (static_cast<int>(waiter.waited.size()) <= mark.stream) waiter.waited.resize(mark.stream + 1, 0);
    if (marked.over >= mark.number || waiter.waited[mark.stream] >= mark.number) return;
    if (marked.recorded.empty() || marked.recorded.back().number < mark.number) record(mark.stream);
    if (marked.over >= mark.number) return;
    const auto first = std::lower_bound(marked.recorded.begin(), marked.recorded.end(), mark.number,
                                        [](const Recorded& each, int64_t number) { return each.number < number; });
    runtime_.wait(waiter.handle, first->event);
    waiter.waited[mark.stream] = first->number;
  }
  void wait(int stream, const Marks& marks) {
    for (const Mark& mark : marks) wait(stream, mark);
  }

 private:
  using Event = typename Runtime::Event;
  // So many events a stream has before it is asked whether the oldest can be used again.
  static constexpr size_t kFew = 64;

  struct Recorded {
    int64_t number;  // the last mark that it covers
    Event event;
  };
  struct Stream {
    Handle handle;
    std::deque<Recorded> recorded;  // in their order
    int64_t issued = 0, over = 0;   // the last mark; what has it or an earlier one is done
    std::vector<int64_t> waited;    // for each other stream: the last mark that it waits for
  };

  Runtime runtime_;
  std::vector<Stream> streams_;
  size_t last_ = 0;  // that was asked for
};

// Marks of work on memory that is free.
class Fences {
 public:
  void put(const char* at, int64_t bytes, Marks marks) {
    cut(at, bytes, nullptr);
    fences_[at] = {bytes, std::move(marks)};
  }
  // Of all work on some memory, which is forgotten.
  Marks take(const char* at, int64_t bytes) {
    Marks found;
    cut(at, bytes, &found);
    return found;
  }

 private:
  struct Fence {
    int64_t bytes;
    Marks marks;
  };

  void cut(const char* at, int64_t bytes, Marks* found) {
    auto it = fences_.upper_bound(at);
    if (it != fences_.begin() && std::prev(it)->first + std::prev(it)->second.bytes > at) --it;
    while (it != fences_.end() && it->first < at + bytes) {
      const char* begin = it->first;
      const char* end = begin + it->second.bytes;
      if (found != nullptr) found->add(it->second.marks);
      Marks marks = std::move(it->second.marks);
      it = fences_.erase(it);
      if (end > at + bytes) it = fences_.insert(it, {at + bytes, Fence{end - (at + bytes), marks}});
      if (begin < at) fences_.insert({begin, Fence{at - begin, std::move(marks)}});
    }
  }

  std::map<const char*, Fence> fences_;
};

}  // namespace follow
