// Work on GPU streams and its dependencies. A mark identifies work: a stream and an increasing number. To run after
// marked work, a stream waits for the first event recorded at that mark or later. A copy has an event directly behind
// it, so its users do not wait for later copies; for an op an event is recorded only when needed. `Fences` keeps the
// marks of work on freed memory for its next user. The host blocks only for a destroyed stream.

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

class Marks {
 public:
  void add(const Mark& mark) {
    for (Mark* entry = begin(); entry != end(); ++entry)
      if (entry->stream == mark.stream) {
        entry->number = std::max(entry->number, mark.number);
        return;
      }
    if (more_.empty() && count_ < few_.size()) {
      few_[count_++] = mark;
      return;
    }
    if (more_.empty()) more_.assign(few_.begin(), few_.end());
    more_.push_back(mark);
  }
  void add(const Marks& marks) {
    for (const Mark& mark : marks) add(mark);
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

  // All marks are in one of the two: a block is rarely used by more than the loop's stream and the two copy streams.
  std::array<Mark, 3> few_;
  size_t count_ = 0;
  std::vector<Mark> more_;
};

// The streams of one device, by number. `Runtime` wraps its events; `record` returns false for a destroyed stream.
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

  // Makes no event and so cannot fail: deleters call it.
  int number_of(Handle handle) {
    if (last_ < streams_.size() && streams_[last_].handle == handle) return static_cast<int>(last_);
    for (size_t i = 0; i < streams_.size(); ++i)
      if (streams_[i].handle == handle) return static_cast<int>(last_ = i);
    streams_.push_back({handle, {}, 0, 0, {}});
    return static_cast<int>(streams_.size()) - 1;
  }
  Handle handle(int stream) const { return streams_[stream].handle; }

  // Marks all work issued to a stream so far, by any code.
  Mark now(int stream) { return {stream, ++streams_[stream].issued}; }

  // Records an event behind the last mark of a stream, unless there is one.
  void record(int stream) {
    Stream& marked = streams_[stream];
    if (!marked.recorded.empty() && marked.recorded.back().number == marked.issued) return;
    Event event;
    if (marked.recorded.size() >= kFew && runtime_.is_over(marked.recorded.front().event)) {
      event = marked.recorded.front().event;
      marked.completed = marked.recorded.front().number;
      marked.recorded.pop_front();
    } else {
      event = runtime_.make();
    }
    const bool is_alive = runtime_.record(event, marked.handle);
    marked.recorded.push_back({marked.issued, event});
    if (is_alive) return;
    // The stream was destroyed, perhaps before its work was done.
    runtime_.finish();
    marked.completed = marked.issued;
    for (const Recorded& recorded : std::exchange(marked.recorded, {})) runtime_.drop(recorded.event);
  }

  // Orders work issued to a stream from now on after marked work.
  void wait(int stream, const Mark& mark) {
    if (stream == mark.stream) return;
    Stream &marked = streams_[mark.stream], &waiter = streams_[stream];
    if (static_cast<int>(waiter.waited.size()) <= mark.stream) waiter.waited.resize(mark.stream + 1, 0);
    if (marked.completed >= mark.number || waiter.waited[mark.stream] >= mark.number) return;
    if (marked.recorded.empty() || marked.recorded.back().number < mark.number) record(mark.stream);
    if (marked.completed >= mark.number) return;
    const auto first =
        std::lower_bound(marked.recorded.begin(), marked.recorded.end(), mark.number,
                         [](const Recorded& recorded, int64_t number) { return recorded.number < number; });
    runtime_.wait(waiter.handle, first->event);
    waiter.waited[mark.stream] = first->number;
  }
  void wait(int stream, const Marks& marks) {
    for (const Mark& mark : marks) wait(stream, mark);
  }

 private:
  using Event = typename Runtime::Event;
  // Events per stream before the oldest is queried for reuse.
  static constexpr size_t kFew = 64;

  struct Recorded {
    int64_t number;  // the last mark that it covers
    Event event;
  };
  struct Stream {
    Handle handle;
    std::deque<Recorded> recorded;  // in order
    int64_t issued = 0, completed = 0;   // the last mark; the last completed mark
    std::vector<int64_t> waited;    // by stream: the last mark waited for
  };

  Runtime runtime_;
  std::vector<Stream> streams_;
  size_t last_ = 0;  // the stream of the last query
};

class Fences {
 public:
  void put(const char* at, int64_t bytes, Marks marks) {
    cut(at, bytes, nullptr);
    fences_[at] = {bytes, std::move(marks)};
  }
  // Removes and returns the marks of all work on a range.
  Marks take(const char* at, int64_t bytes) {
    Marks marks;
    cut(at, bytes, &marks);
    return marks;
  }

 private:
  struct Fence {
    int64_t bytes;
    Marks marks;
  };

  void cut(const char* at, int64_t bytes, Marks* removed) {
    auto it = fences_.upper_bound(at);
    if (it != fences_.begin() && std::prev(it)->first + std::prev(it)->second.bytes > at) --it;
    while (it != fences_.end() && it->first < at + bytes) {
      const char* begin = it->first;
      const char* end = begin + it->second.bytes;
      if (removed != nullptr) removed->add(it->second.marks);
      Marks marks = std::move(it->second.marks);
      it = fences_.erase(it);
      if (end > at + bytes) it = fences_.insert(it, {at + bytes, Fence{end - (at + bytes), marks}});
      if (begin < at) fences_.insert({begin, Fence{at - begin, std::move(marks)}});
    }
  }

  std::map<const char*, Fence> fences_;
};

}  // namespace follow
