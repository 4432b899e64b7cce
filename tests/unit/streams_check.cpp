// Random work of several streams on memory that is freed and taken again, with streams and events that only keep count.
// Says "ok" if nobody ever touched memory before the work on it that came earlier was sure to be done.

#include "streams.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
  void record(Event event, Handle stream) const { *event = (*reached)[stream]; }
  void wait(Handle stream, Event event) const {
    if (!waits) return;
    for (int s = 0; s < kStreams; ++s) (*reached)[stream][s] = std::max((*reached)[stream][s], (*event)[s]);
  }
};

struct Piece {
  int page, count;
  follow::Marks before, after;
};

}  // namespace

int main(int, char** arguments) {
  const bool waits = std::strcmp(arguments[1], "no-waits") != 0, fenced = std::strcmp(arguments[1], "no-fences") != 0;
  std::mt19937 draw(7);
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
