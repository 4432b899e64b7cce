// Records of steps, the kinds that they make, and where a loop is in them: random loops, beside what is obvious of them.
// Says "ok".

#include "record.h"

#include <algorithm>
#include <map>
#include <set>

#include "check.h"

namespace {

using follow::StepKind;
using follow::Record;
using follow::Touched;

std::vector<Touched> all_of(Run& run, const Made& made) {
  std::vector<Touched> touched = run.operands(made);
  const std::vector<Touched> results = run.results(made);
  touched.insert(touched.end(), results.begin(), results.end());
  return touched;
}

Record recorded(const Program& program) {
  follow::Recorder recorder;
  Run run;
  for (const Made& made : program) recorder.add(run.op(made), all_of(run, made), 1, {});
  return *recorder.take();
}

// What a record says is what has happened.
void check_recorder() {
  for (int round = 0; round < 300; ++round) {
    const Program program = random_program(1 + below(40), 1 + below(20));
    follow::Recorder recorder;
    std::map<int64_t, int32_t> left;  // by block that the step before made and left: its number there
    for (int step = 0; step < 4; ++step) {
      Run run;
      std::map<int64_t, int32_t> number, freed;
      std::map<int64_t, int64_t> bytes;
      std::set<int64_t> made_here;
      std::vector<std::pair<int32_t, int32_t>> leftovers;
      int64_t nanos = 0;
      for (size_t i = 0; i < program.size(); ++i) {
        const std::vector<Touched> touched = all_of(run, program[i]);
        const int64_t small = below(50), large = below(50);  // of an op that touches nothing, and of this one
        recorder.add(run.op(program[i]), {}, small, {});
        recorder.add(run.op(program[i]), touched, large, {{1, 100}, {2, 100}});
        nanos += small + large;
        for (const Touched& touch : touched) {
          const auto next = static_cast<int32_t>(number.size());
          if (number.emplace(touch.id, next).second && touch.created) made_here.insert(touch.id);
          bytes[touch.id] = touch.bytes;
        }
        if (below(3)) continue;
        const bool before = below(2) != 0 && !left.empty();
        const auto gone = before ? std::next(left.begin(), below(static_cast<int>(left.size())))->first
                                 : std::next(number.begin(), below(static_cast<int>(number.size())))->first;
        recorder.free(gone);
        if (before)
          leftovers.emplace_back(left[gone], static_cast<int32_t>(i) + 1);
        else
          freed.emplace(gone, static_cast<int32_t>(i) + 1);  // the first time counts
        if (before) left.erase(gone);
      }
      recorder.add(nullptr, {}, 1000, {});  // behind all that touches something: of no op
      const Record record = *recorder.take();
      SURE(record.ops.size() == program.size() && record.storages.size() == number.size());
      for (size_t i = 0; i < record.storages.size(); ++i) {
        const auto& storage = record.storages[i];
        SURE(number.at(storage.id) == static_cast<int32_t>(i) && storage.bytes == bytes.at(storage.id));
        SURE(storage.created == (made_here.count(storage.id) != 0));
        SURE(storage.freed == (freed.count(storage.id) != 0 ? freed.at(storage.id) : -1));
      }
      int64_t told = 0;
      for (const int64_t each : record.nanos) told += each;
      SURE(told == nanos);
      for (const int64_t each : record.workspaces) SURE(each == 200);
      SURE(record.leftovers.size() == leftovers.size());
      for (size_t i = 0; i < leftovers.size(); ++i)
        SURE(record.leftovers[i].storage == leftovers[i].first && record.leftovers[i].freed == leftovers[i].second);
      left.clear();
      for (const int64_t id : made_here)
        if (freed.count(id) == 0) left[id] = number.at(id);
    }
  }
}

// Steps have one signature if they run the same ops on storages in the same relations.
void check_signatures() {
  for (int round = 0; round < 300; ++round) {
    const Program program = random_program(1 + below(30), 10);
    const uint64_t signature = recorded(program).signature;
    SURE(recorded(program).signature == signature);
    Program other = program;
    Made& changed = other[static_cast<size_t>(below(static_cast<int>(other.size())))];
    switch (below(4)) {
      case 0:
        changed.schema += 1;
        break;
      case 1:
        changed.results.push_back(10000);
        break;
      case 2:
        if (changed.operands.empty()) continue;
        changed.operands.back().second = !changed.operands.back().second;
        break;
      default:
        changed.operands.emplace_back(below(kLasting), false);
    }
    SURE(recorded(other).signature != signature);
  }
}

void check_too_long() {
  follow::Recorder recorder;
  Run run;
  const Made made{0, {{0, false}}, {}};
  for (int i = 0; i <= 1 << 18; ++i) recorder.add(run.op(made), all_of(run, made), 1, {});
  SURE(!recorder.take());
  recorder.add(run.op(made), all_of(run, made), 1, {});
  SURE(recorder.take()->ops.size() == 1);
}

struct Loop {
  follow::Follower follower;
  follow::Recorder recorder;
  Record record;              // of the last step
  std::vector<int32_t> ops;   // see `end_of_step`
  int64_t surprises = 0;      // of the last step
  int64_t passed = 0;         // likewise
  bool settled = false;       // by the last step
  std::vector<int64_t> left;  // blocks that the last step made and that are still there

  // In how many ops a storage is used next.
  void check_next_use() const {
    const StepKind& known = *follower.kind();
    const auto n = static_cast<int64_t>(known.usual.ops.size());
    const auto uses = [&](int64_t at, int32_t storage) {
      for (const auto& touch : known.usual.ops[static_cast<size_t>(at % n)].touched)
        if (touch.storage == storage) return true;
      return false;
    };
    const int32_t storage = below(static_cast<int>(known.usual.storages.size()));
    const bool lasts = known.persistent[static_cast<size_t>(storage)] >= 0;
    const auto first_from = [&](int64_t from) -> int64_t {
      for (int64_t at = from; at < (lasts ? 2 * n : n); ++at)
        if (uses(at, storage)) return at;
      return -1;
    };
    const int64_t next = first_from(follower.position() + 1), here = first_from(follower.position());
    SURE(follower.next_use(storage) == (next < 0 ? follow::Follower::kNever : next - follower.position()));
    SURE(follower.next_from_here(storage) == (here < 0 ? -1 : here % n));
  }

  // `replaced`: a lasting storage that is another block in this step.
  StepKind* step(const Program& program, int replaced = -1) {
    Run run;
    run.replaced = replaced;
    surprises = passed = 0;
    std::vector<int64_t> kept;
    for (const Made& made : program) {
      const void* op = run.op(made);
      const std::vector<Touched> operands = run.operands(made), results = run.results(made);
      if (operands.empty() && follower.on_course()) {
        const auto& next = follower.kind()->usual.ops[static_cast<size_t>(follower.next())];
        const bool makes = std::none_of(next.touched.begin(), next.touched.end(), [](auto& t) { return t.place > 0; });
        SURE(follower.may_make(op) == (next.op == op && makes));
      }
      const std::vector<Touched>& by = operands.empty() ? results : operands;
      const bool expected = follower.advance(op, by);
      surprises += !expected;
      SURE(expected == follower.on_course());
      if (expected) {
        passed += follower.skipped_ops();
        const auto& there = follower.op().touched;
        SURE(follower.op().op == op);
        SURE(std::count_if(there.begin(), there.end(), [](auto& touch) { return touch.place > 0; }) ==
             static_cast<std::ptrdiff_t>(operands.size()));
        const StepKind& known = *follower.kind();
        for (const Touched& touch : operands) {
          const int32_t storage = follower.storage_at(touch.place);
          const auto lasting = known.storage_by_block.find(touch.id);
          if (known.other_storages[static_cast<size_t>(follower.position())] || storage < 0) continue;
          SURE(known.persistent[static_cast<size_t>(storage)] ==
               (lasting == known.storage_by_block.end() ? -1 : touch.id));
        }
        check_next_use();
      }
      recorder.add(op, all_of(run, made), 10 + below(5), {});
      for (const Touched& touch : results) kept.push_back(touch.id);
      if (left.empty() || below(3) != 0) continue;
      recorder.free(left.back());
      left.pop_back();
    }
    left = std::move(kept);
    record = *recorder.take();
    const Record as_it_was = record;
    StepKind* known = follower.end_of_step(record, ops);
    if (known == nullptr) return nullptr;
    check_terms(as_it_was, *known);
    settled = follower.mark_persistent(*known, record);
    follower.expect_after(*known);
    SURE(follower.on_course());
    return known;
  }

  // The record of a step that differs a little is in terms of the usual one.
  void check_terms(const Record& as_it_was, const StepKind& known) const {
    SURE(record.ops.size() == known.usual.ops.size() && record.storages.size() == known.usual.storages.size());
    for (size_t i = 0; i < record.ops.size(); ++i) SURE(record.ops[i].op == known.usual.ops[i].op);
    for (const auto& freed : record.leftovers) {
      SURE(freed.storage >= 0 && static_cast<size_t>(freed.storage) < record.storages.size());
      SURE(record.storages[static_cast<size_t>(freed.storage)].created);
    }
    if (ops.empty()) {
      SURE(record.signature == as_it_was.signature);
      return;
    }
    SURE(ops.size() == record.ops.size());
    int32_t last = -1;
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i] < 0) continue;
      SURE(ops[i] > last);
      last = ops[i];
      SURE(as_it_was.ops[static_cast<size_t>(last)].op == record.ops[i].op);
      SURE(as_it_was.nanos[static_cast<size_t>(last)] == record.nanos[i]);
    }
  }
};

// From its third step on a loop that does the same in each is followed op by op.
void check_steady_loops() {
  for (int round = 0; round < 150; ++round) {
    const Program program = random_program(3 + below(30), 1 + below(12));
    Loop loop;
    SURE(loop.step(program) == nullptr);
    const StepKind* known = loop.step(program);
    SURE(known != nullptr);
    for (int step = 0; step < 3; ++step) {
      SURE(loop.step(program) == known && loop.ops.empty() && !loop.settled);
      SURE(loop.surprises == 0 && loop.passed == 0);
      SURE(loop.follower.position() == static_cast<int32_t>(program.size()) - 1);
    }
    SURE(loop.follower.all().size() == 1 && loop.follower.steps() == 5);
    // What lasts is what both steps had.
    for (int name = 0; name < kLasting; ++name) {
      const bool touched = std::any_of(program.begin(), program.end(), [&](const Made& made) {
        return std::any_of(made.operands.begin(), made.operands.end(), [&](auto& each) { return each.first == name; });
      });
      SURE((known->storage_by_block.count(name + 1) != 0) == touched);
    }
    SURE(known->storage_by_block.size() <= kLasting);
    const int64_t gone = 1 + below(kLasting);
    loop.follower.forget(gone);
    SURE(known->storage_by_block.count(gone) == 0);
    SURE(std::find(known->persistent.begin(), known->persistent.end(), gone) == known->persistent.end());
  }
}

// What is replaced in a later step persists once two steps had it, also if some of their ops differ.
void check_replaced() {
  int64_t settled = 0;
  for (int round = 0; round < 150; ++round) {
    const Program program = random_program(20 + below(30), 12);
    const int name = below(kLasting);
    if (std::none_of(program.begin(), program.end(), [&](const Made& made) {
          return std::any_of(made.operands.begin(), made.operands.end(), [&](auto& each) { return each.first == name; });
        }))
      continue;
    Loop loop;
    const int before = below(3);  // steps before it is replaced
    for (int step = 0; step < 1 + before; ++step) loop.step(program, name);
    const StepKind* known = loop.step(program);
    SURE(known != nullptr && !loop.settled && (known->storage_by_block.count(Run::kReplaced) != 0) == (before > 0));
    if (before > 0) loop.follower.forget(Run::kReplaced);
    const int64_t roles_version = known->roles_version;
    if (loop.step(below(4) ? program : edited(program, 1, 12)) != known) continue;
    SURE(loop.settled == (known->storage_by_block.count(name + 1) != 0) &&
         loop.settled == (known->roles_version != roles_version));
    settled += loop.settled;
    for (int step = 0; step < 2; ++step) {
      SURE(loop.step(program) == known);
      settled += loop.settled;
    }
    SURE(known->storage_by_block.count(name + 1) == 1);
    loop.step(program);
    SURE(!loop.settled && loop.surprises == 0);
  }
  SURE(settled > 50);
}

// A storage that is another block now and then does not have the plans of its kind thrown away for ever.
void check_replaced_again_and_again() {
  const Program program{Made{0, {{0, true}, {1, false}}, {kLasting}}, Made{1, {{1, false}, {2, true}}, {}}};
  Loop loop;
  int settled = 0;
  for (int step = 0; step < 40; ++step) {
    if (step % 4 == 2) loop.follower.forget(2);  // the block of storage 1
    if (step % 4 == 0) loop.follower.forget(Run::kReplaced);
    loop.step(program, step % 4 < 2 ? 1 : -1);
    settled += loop.settled;
  }
  SURE(settled == 4);
}

// Several kinds side by side, each found by itself; an op left out or put in now and then.
void check_mixed_loops() {
  int64_t ops = 0, surprises = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<Program> programs;
    for (int kind = 0; kind < 3; ++kind) programs.push_back(random_program(20 + below(20), 12));
    Loop loop;
    std::map<size_t, const StepKind*> kinds;
    for (int step = 0; step < 24; ++step) {
      const auto which = static_cast<size_t>(step < 9 ? step % 3 : below(3));
      const bool differs = step >= 9 && below(2);
      const StepKind* known = loop.step(differs ? edited(programs[which], 1, 12) : programs[which]);
      if (differs) continue;
      SURE((known != nullptr) == (step >= 3));
      if (step >= 6) SURE(known == kinds[which]);
      kinds[which] = known;
      if (step == 7 || step == 8) SURE(loop.surprises == 0);  // each kind comes after the one that it came after
      if (step < 6) continue;
      ops += static_cast<int64_t>(programs[which].size());
      surprises += loop.surprises;
    }
    SURE(loop.follower.all().size() >= kinds.size());
  }
  SURE(surprises < ops / 4);
}

void check_bounds() {
  Loop loop;
  for (int kind = 0; kind < 20; ++kind) {
    const Program program = random_program(20, 200);
    for (int step = 0; step < 2; ++step) loop.step(program);
    SURE(loop.follower.all().size() <= 8);
  }
  SURE(loop.follower.all().size() == 8);
}

void check_offsets() {
  for (int round = 0; round < 300; ++round) {
    follow::Schedule schedule;
    schedule.offsets.resize(1);
    std::map<int32_t, int64_t> from;
    for (int count = below(6); count > 0; --count) from[below(20)] = below(1000);
    schedule.offsets[0].assign(from.begin(), from.end());
    for (int32_t op = 0; op < 20; ++op) {
      int64_t expected = -1;
      for (const auto& [first, offset] : from)
        if (first <= op) expected = offset;
      SURE(schedule.offset(0, op) == expected);
    }
  }
}

}  // namespace

int main() {
  check_recorder();
  check_signatures();
  check_too_long();
  check_steady_loops();
  check_replaced();
  check_replaced_again_and_again();
  check_mixed_loops();
  check_bounds();
  check_offsets();
  std::puts("ok");
  return 0;
}
