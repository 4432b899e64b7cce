// Streams and events that only keep count. By the argument:
//
// as-it-is, no-waits, no-fences: random work of several streams on memory that is freed and taken again. Says "ok" if nobody
// ever touched memory before the work on it that came earlier was sure to be done.
// covered: what waits cover where a loop fetches ahead, by name.
// first-event: that each wait is for the first event that was recorded at the marked work or later, and how many events
// there are at the most.

#include "streams.h"

#include "check.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kStreams = 4, kPages = 24;
using Clock = std::array<long, kStreams>;  // for each stream, how much of its work is done

struct Counting {
  using Handle = int;
  using Event = Clock*;
  std::array<Clock, kStreams>* reached;  // by stream: what is done before its next work
  bool waits;

  Event make() const { return new Clock{}; }
  void drop(Event event) const { delete event; }
  bool record(Event event, Handle stream) const {
    *event = (*reached)[stream];
    return true;
  }
  // What the host has seen done is done before all that it issues from then on.
  bool is_over(Event event) const {
    if (below(2)) return false;
    for (int s = 0; s < kStreams; ++s) wait(s, event);
    return true;
  }
  void finish() const {}
  void wait(Handle stream, Event event) const {
    if (!waits) return;
    for (int s = 0; s < kStreams; ++s) (*reached)[stream][s] = std::max((*reached)[stream][s], (*event)[s]);
  }
};

// Work by name, and what the last wait was for.
struct Issued {
  std::array<std::vector<std::string>, kStreams> work;
  std::string waited;
};
struct Naming {
  using Handle = int;
  using Event = std::shared_ptr<std::pair<int, size_t>>;  // a stream, and how much of its work
  Issued* issued;

  Event make() const { return std::make_shared<std::pair<int, size_t>>(); }
  void drop(const Event&) const {}
  bool record(const Event& event, Handle stream) const {
    *event = {stream, issued->work[static_cast<size_t>(stream)].size()};
    return true;
  }
  bool is_over(const Event&) const { return false; }
  void finish() const {}
  void wait(Handle, const Event& event) const {
    for (size_t i = 0; i < event->second; ++i) issued->waited += issued->work[static_cast<size_t>(event->first)][i];
  }
};

// As device_cuda.h does it: copies in and out, each with an event, beside ops that have none.
int covered() {
  constexpr int kOps = 0, kIn = 1, kOut = 2;
  Issued issued;
  follow::Streams<Naming> streams(Naming{&issued});
  for (int s = 0; s < kStreams; ++s) streams.number_of(s);
  const auto op = [&](const char* name) {
    issued.work[kOps].emplace_back(name);
    return streams.now(kOps);
  };
  const auto copy = [&](int stream, const char* name) {
    issued.work[static_cast<size_t>(stream)].emplace_back(name);
    const follow::Mark done = streams.now(stream);
    streams.record(stream);
    if (stream == kIn) streams.record(kOps);
    return done;
  };
  const auto told = [&](const char* what, int stream, const follow::Mark& mark) {
    issued.waited.clear();
    streams.wait(stream, mark);
    std::printf("%s%s", what, issued.waited.c_str());
  };
  const follow::Mark x = copy(kIn, "X"), y = copy(kIn, "Y");
  copy(kIn, "Z");
  told("op:", kOps, x);
  told(" next:", kOps, y);
  const follow::Mark a = copy(kOut, "A");
  copy(kOut, "B");
  copy(kOut, "C");
  told(" memory:", kIn, a);
  const follow::Mark freed = op("1");
  op("2");
  copy(kIn, "V");
  op("3");
  op("4");
  told(" freed:", kIn, freed);
  std::puts("");
  return 0;
}

// How much of the work of each stream was issued and is done, how far events were recorded, and what waits were for.
struct Model {
  struct Event {
    int stream = -1;
    long covers = 0;
  };
  std::array<long, kStreams> issued{}, done{};
  std::array<std::vector<long>, kStreams> recorded;
  std::array<bool, kStreams> gone{};
  long events = 0, most = 0, waits = 0, finished = 0;
  Event last;  // that was waited for
};
struct Modelled {
  using Handle = int;
  using Event = Model::Event*;
  Model* model;

  Event make() const {
    model->most = std::max(model->most, ++model->events);
    return new Model::Event;
  }
  void drop(Event event) const {
    --model->events;
    delete event;
  }
  bool record(Event event, Handle stream) const {
    if (model->gone[static_cast<size_t>(stream)]) return false;
    *event = {stream, model->issued[static_cast<size_t>(stream)]};
    model->recorded[static_cast<size_t>(stream)].push_back(event->covers);
    return true;
  }
  bool is_over(Event event) const { return event->covers <= model->done[static_cast<size_t>(event->stream)]; }
  void finish() const {
    ++model->finished;
    model->done = model->issued;
  }
  void wait(Handle, Event event) const {
    ++model->waits;
    model->last = *event;
  }
};

int first_event() {
  constexpr int kCopies = 2, kKept = 1000;  // the first streams copy: each piece of work has an event
  constexpr long kBehind = 100;             // work of a stream that may be under way
  Model model;
  {
    follow::Streams<Modelled> streams(Modelled{&model});
    for (int s = 0; s < kStreams; ++s) SURE(streams.number_of(s) == s);
    std::vector<std::pair<follow::Mark, long>> marks;  // and how much of the work they are of
    std::array<Clock, kStreams> covers{};              // by waiter: how much of each stream's work it comes after
    for (int step = 0; step < 300000; ++step) {
      const auto stream = static_cast<size_t>(below(kStreams));
      model.gone[kStreams - 1] = below(200) == 0;
      switch (below(4)) {
        case 0:
        case 1: {
          long& done = model.done[stream];
          const long number = ++model.issued[stream];
          done = std::max(done, number - kBehind);
          const std::pair<follow::Mark, long> made{streams.now(static_cast<int>(stream)), number};
          if (stream < kCopies || below(8) == 0) streams.record(static_cast<int>(stream));
          marks.size() < kKept ? marks.push_back(made) : void(marks[static_cast<size_t>(below(kKept))] = made);
          break;
        }
        case 2:
          if (below(20) == 0) model.done[stream] += (model.issued[stream] - model.done[stream]) * below(11) / 10;
          break;
        default: {
          if (marks.empty()) break;
          const auto& [mark, number] = marks[static_cast<size_t>(below(static_cast<int>(marks.size())))];
          const auto of = static_cast<size_t>(mark.stream);
          if (of == stream || (stream == kCopies && below(100) != 0)) break;  // one of them waits seldom
          const auto& before = model.recorded[of];
          const auto first = std::lower_bound(before.begin(), before.end(), number);
          const long expected = first == before.end() ? model.issued[of] : *first;
          const long waits = model.waits;
          streams.wait(static_cast<int>(stream), mark);
          long& covered = covers[stream][of];
          if (model.waits == waits) {
            SURE(covered >= number || model.done[of] >= number);
          } else {
            SURE(model.last.stream == mark.stream && model.last.covers == expected);
            SURE(mark.stream >= kCopies || expected == number);
            covered = std::max(covered, expected);
          }
        }
      }
    }
    SURE(model.waits > 5000 && model.finished > 10);
    SURE(model.issued[0] > 20 * kBehind && model.most < kStreams * (kBehind + 100));
  }
  SURE(model.events == 0);
  std::puts("ok");
  return 0;
}

struct Piece {
  int page, count;
  follow::Marks before, after;
};

}  // namespace

int main(int, char** arguments) {
  if (std::strcmp(arguments[1], "covered") == 0) return covered();
  if (std::strcmp(arguments[1], "first-event") == 0) return first_event();
  const bool waits = std::strcmp(arguments[1], "no-waits") != 0, fenced = std::strcmp(arguments[1], "no-fences") != 0;
  std::array<Clock, kStreams> reached{};
  follow::Streams<Counting> streams(Counting{&reached, waits});
  for (int s = 0; s < kStreams; ++s)
    if (streams.number_of(s) != s) return 1;
  follow::Fences fences;
  static char memory[kPages];
  std::vector<std::vector<std::pair<int, long>>> touched(kPages);  // streams, and which of their work it was
  std::vector<Piece> pieces;
  long violations = 0, hops = 0;
  const auto touch = [&](Piece& piece, int stream) {
    streams.wait(stream, piece.before);
    streams.wait(stream, piece.after);
    const long number = ++reached[stream][stream];
    for (int page = piece.page; page < piece.page + piece.count; ++page) {
      for (const auto& [other, earlier] : touched[page]) {
        hops += other != stream;
        violations += other != stream && reached[stream][other] < earlier;
      }
      touched[page] = {{stream, number}};
    }
    piece.after.add(streams.now(stream));
    if (draw() % 2) streams.record(stream);
  };
  for (int step = 0; step < 200000; ++step) {
    if (pieces.size() < 5 && draw() % 2) {
      Piece piece{static_cast<int>(draw() % kPages), 1 + static_cast<int>(draw() % 6), {}, {}};
      bool free = piece.page + piece.count <= kPages;
      for (const Piece& other : pieces)
        free = free && (piece.page + piece.count <= other.page || other.page + other.count <= piece.page);
      if (!free) continue;
      piece.before = fences.take(memory + piece.page, piece.count);
      pieces.push_back(piece);
      touch(pieces.back(), static_cast<int>(draw() % kStreams));
    } else if (!pieces.empty()) {
      const size_t which = draw() % pieces.size();
      if (draw() % 3) {
        touch(pieces[which], static_cast<int>(draw() % kStreams));
        continue;
      }
      follow::Marks all = pieces[which].before;
      all.add(pieces[which].after);
      if (fenced) fences.put(memory + pieces[which].page, pieces[which].count, all);
      pieces.erase(pieces.begin() + static_cast<long>(which));
    }
  }
  if (hops < 10000) return 2;
  std::puts(violations == 0 ? "ok" : "too early");
  return 0;
}
