// What is expected of a loop: loops that repeat themselves, loops that do not, and very long ones. Says "ok".

#include "history.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "check.h"

namespace {

using follow::History;
using Touches = std::vector<History::Touch>;

Touches touches(const std::vector<follow::Touched>& touched) {
  Touches made;
  for (const follow::Touched& each : touched) made.emplace_back(each.place, each.id);
  return made;
}

bool begin(History& history, Run& run, const Made& made) {
  const bool expected = history.begin(run.op(made), touches(run.operands(made)));
  for (const auto& touch : touches(run.results(made))) history.add_touch(touch);
  return expected;
}

// The next use of a storage is the first op behind the position that touched its twin.
void check_next_use(const History& history, int64_t twin, int64_t last_use) {
  const int64_t age = history.now() - last_use;
  int64_t expected = history.has_position() ? History::kNever + age : age;
  for (int64_t at = history.position() + 1; history.has_position() && at <= history.now(); ++at) {
    const Touches& touched = history.touched(at);
    if (std::none_of(touched.begin(), touched.end(), [&](const auto& touch) { return touch.second == twin; })) continue;
    expected = at - history.position();
    break;
  }
  SURE(history.next_use(twin, last_use) == expected);
}

// A loop that does the same in each step: from its third on all is expected, and where it was a step before.
void check_steady_loops() {
  for (int round = 0; round < 200; ++round) {
    Program step = random_program(4 + below(40), 1 + below(12));
    step.front() = {200, {{0, false}}, {}};  // by which the beginning of a step is told
    const auto length = static_cast<int64_t>(step.size());
    History history;
    std::vector<Run> runs(5);
    for (size_t number = 0; number < runs.size(); ++number)
      for (const Made& made : step) {
        const bool expected = begin(history, runs[number], made);
        if (number < 2) continue;
        SURE(expected && history.has_position());
        SURE(history.position() == history.now() - length);
        int32_t place = 0;
        for (const auto& [name, written] : made.operands)
          SURE(history.twin(++place) == runs[number - 1].id(name));
        place = 0;
        for (const int name : made.results) SURE(history.twin(--place) == runs[number - 1].id(name));
        SURE(history.twin(99) == -1);
        const int name = below(kLasting);
        check_next_use(history, name + 1, history.now() - below(3));
      }
  }
}

// Whatever a loop does: what is expected is in the past, by the same operator, and is told right.
void check_restless_loops() {
  for (int round = 0; round < 150; ++round) {
    const int schemas = 1 + below(30);
    Program usual = random_program(30, schemas);
    History history;
    std::vector<const void*> ops;
    int64_t found = 0;
    for (int number = 0; number < 8; ++number) {
      Run run;
      for (const Made& made : edited(usual, below(4), schemas)) {
        const bool expected = begin(history, run, made);
        ops.push_back(run.op(made));
        SURE(history.now() == static_cast<int64_t>(ops.size()) - 1);
        SURE(history.position() < history.now());
        SURE(!expected || (history.has_position() && ops[static_cast<size_t>(history.position())] == ops.back()));
        if (!expected) SURE(history.twin(1) == -1);
        found += expected && number > 1;
        check_next_use(history, below(60), history.now() - below(50));
      }
    }
    SURE(schemas < 10 || found > 90);  // of some 180
  }
}

// A few ops that come in between, or that are left out, do not lose the place.
void check_surprises() {
  for (int round = 0; round < 200; ++round) {
    Program step;
    for (int i = 0; i < 60; ++i) step.push_back({i, {{i % kLasting, false}}, {}});  // each op is told from its like
    const auto length = static_cast<int64_t>(step.size());
    History history;
    Run run;
    for (int number = 0; number < 2; ++number)
      for (const Made& made : step) begin(history, run, made);
    const int at = 5 + below(20);
    for (int i = 0; i < at; ++i) SURE(begin(history, run, step[static_cast<size_t>(i)]));
    const int inserted = below(12);
    for (int i = 0; i < inserted; ++i) {
      SURE(!begin(history, run, Made{100 + i, {{below(kLasting), false}}, {}}));
      SURE(history.has_position() && history.position() == length + at - 1);
    }
    // An op that is not the next one is taken for new, the one behind it for one further on.
    const int skipped = below(20);
    int next = at + skipped;
    if (skipped > 0 && inserted == 0) {
      SURE(!begin(history, run, step[static_cast<size_t>(next)]));
      ++next;
    }
    for (; next < 60; ++next) {
      SURE(begin(history, run, step[static_cast<size_t>(next)]));
      SURE(history.position() == length + next);
    }
  }
}

// What is kept is bounded, and is what a plain list of the last ops says.
void check_long_loops() {
  constexpr size_t kKept = 1 << 16;
  History history;
  std::deque<std::set<int64_t>> ops;
  std::map<int64_t, int64_t> count;
  int64_t uses = 0, fresh = 1000;
  for (int i = 0; i < 200000; ++i) {
    Touches operands{{1, 1 + below(kLasting)}, {2, fresh - below(3)}};
    if (below(2)) operands.emplace_back(3, operands.front().second);
    history.begin(nullptr, operands);
    const int64_t made = ++fresh;
    history.add_touch({-1, made});
    std::set<int64_t> storages{made};
    for (const auto& touch : operands) storages.insert(touch.second);
    ops.push_back(storages);
    for (const int64_t storage : storages) ++uses, ++count[storage];
    if (ops.size() > kKept) {
      for (const int64_t storage : ops.front()) {
        --uses;
        if (--count[storage] == 0) count.erase(storage);
      }
      ops.pop_front();
    }
  }
  SURE(history.size() == static_cast<int64_t>(ops.size()) && history.now() == 199999);
  SURE(history.uses() == uses && history.storages() == static_cast<int64_t>(count.size()));
}

}  // namespace

int main() {
  check_steady_loops();
  check_restless_loops();
  check_surprises();
  check_long_loops();
  std::puts("ok");
  return 0;
}
