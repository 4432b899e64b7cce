// Work on streams of a GPU, and who has to wait for which of it. It has never run on a GPU.
//
// Work that was issued to a stream has a mark: the stream, and a number that grows. Whoever has to come after it lets its
// own stream wait for an event; one that was recorded later will do as well, so a stream has one event, which is recorded
// anew only when somebody waits for what came after it. Nothing here blocks the host.
//
// Memory that is free may still be in use by work that was issued before it was freed: ``Fences`` keeps the marks of that
// by address, for whoever gets the memory next.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
    for (Mark& each : marks_)
      if (each.stream == mark.stream) {
        each.number = std::max(each.number, mark.number);
        return;
      }
    marks_.push_back(mark);
  }
  void add(const Marks& others) {
    for (const Mark& mark : others) add(mark);
  }
  void clear() { marks_.clear(); }
  std::vector<Mark>::const_iterator begin() const { return marks_.begin(); }
  std::vector<Mark>::const_iterator end() const { return marks_.end(); }

 private:
  std::vector<Mark> marks_;
};

// The streams of one device, by number. A ``Runtime`` makes events and drops them, records one on a stream (what is waited
// for from then on is all that was issued there before), and lets a stream wait for one as it was recorded last.
template <class Runtime>
class Streams {
 public:
  using Handle = typename Runtime::Handle;

  explicit Streams(Runtime runtime) : runtime_(std::move(runtime)) {}
  ~Streams() {
    for (const Stream& stream : streams_) runtime_.drop(stream.event);
  }
  Streams(const Streams&) = delete;

  int number_of(Handle handle) {
    for (size_t i = 0; i < streams_.size(); ++i)
      if (streams_[i].handle == handle) return static_cast<int>(i);
    streams_.push_back({handle, runtime_.make()});
    return static_cast<int>(streams_.size()) - 1;
  }
  Handle handle(int stream) const { return streams_[stream].handle; }

  // Of all that was issued to a stream so far, also by others.
  Mark now(int stream) { return {stream, ++streams_[stream].issued}; }

  // Lets what is issued to a stream from now on come after marked work.
  void wait(int stream, const Mark& mark) {
    if (stream == mark.stream) return;
    Stream& waiter = streams_[stream];
    if (static_cast<int>(waiter.waited.size()) <= mark.stream) waiter.waited.resize(mark.stream + 1, 0);
    if (waiter.waited[mark.stream] >= mark.number) return;
    Stream& marked = streams_[mark.stream];
    if (marked.recorded < mark.number) {
      runtime_.record(marked.event, marked.handle);
      marked.recorded = marked.issued;
    }
    runtime_.wait(waiter.handle, marked.event);
    waiter.waited[mark.stream] = marked.recorded;
  }
  void wait(int stream, const Marks& marks) {
    for (const Mark& mark : marks) wait(stream, mark);
  }

 private:
  struct Stream {
    Handle handle;
    typename Runtime::Event event;
    int64_t issued = 0, recorded = 0;  // the last mark; the last that the event covers
    std::vector<int64_t> waited;       // for each other stream: the last mark that it waits for
  };

  Runtime runtime_;
  std::vector<Stream> streams_;
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
