// Which ops of two steps correspond: random steps, beside what a slow and obvious way finds. Says "ok".

#include "alignment.h"

#include <algorithm>
#include <map>
#include <set>

#include "check.h"

namespace {

using follow::Alignment;
using follow::Record;
using follow::StepOp;
using Keys = std::vector<uint64_t>;

// By dynamic programming.
size_t length_in_common(const Keys& a, const Keys& b) {
  std::vector<std::vector<size_t>> longest(a.size() + 1, std::vector<size_t>(b.size() + 1, 0));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < b.size(); ++j)
      longest[i + 1][j + 1] =
          a[i] == b[j] ? longest[i][j] + 1 : std::max(longest[i][j + 1], longest[i + 1][j]);
  return longest[a.size()][b.size()];
}

// How many ops are matched, all of them with their equals and in order.
size_t matches(const Keys& a, const Keys& b, const std::vector<int32_t>& matched) {
  SURE(matched.size() == a.size());
  int32_t last = -1;
  size_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (matched[i] < 0) continue;
    SURE(matched[i] > last);
    SURE(static_cast<size_t>(matched[i]) < b.size());
    SURE(a[i] == b[static_cast<size_t>(matched[i])]);
    last = matched[i];
    ++count;
  }
  return count;
}

size_t found_in_common(const Keys& a, const Keys& b) { return matches(a, b, follow::alignment::common_ops(a, b)); }

Keys random_keys(int count, int kinds) {
  Keys made;
  for (int i = 0; i < count; ++i) made.push_back(static_cast<uint64_t>(below(kinds)));
  return made;
}

Keys counted(size_t count, uint64_t first) {
  Keys made;
  for (size_t i = 0; i < count; ++i) made.push_back(first + i);
  return made;
}

void check_subsequences() {
  for (int round = 0; round < 8000; ++round) {
    const int kinds = 1 + below(12);
    const Keys a = random_keys(below(50), kinds);
    Keys b = random_keys(below(50), kinds);
    if (below(2)) {  // a text and its next version
      b = a;
      for (int edits = below(6); edits > 0 && !b.empty(); --edits) {
        const auto at = b.begin() + below(static_cast<int>(b.size()));
        if (below(2))
          b.erase(at);
        else
          b.insert(at, static_cast<uint64_t>(below(kinds)));
      }
    }
    SURE(found_in_common(a, b) == length_in_common(a, b));
    Keys left = a, right = b, both;
    std::sort(left.begin(), left.end());
    std::sort(right.begin(), right.end());
    std::set_intersection(left.begin(), left.end(), right.begin(), right.end(), std::back_inserter(both));
    SURE(follow::alignment::max_common_ops(a, b) == static_cast<int64_t>(both.size()));
  }
}

// What differs in too much is not compared to its end.
void check_limits() {
  const auto framed = [](size_t middle, uint64_t first) {
    Keys made = counted(5, 0), behind = counted(7, 100);
    const Keys inner = counted(middle, first);
    made.insert(made.end(), inner.begin(), inner.end());
    made.insert(made.end(), behind.begin(), behind.end());
    return made;
  };
  SURE(found_in_common(framed(1024, 10000), framed(1024, 20000)) == 12);
  SURE(found_in_common(framed(1025, 10000), framed(1024, 20000)) == 0);
  for (const auto& [changes, found] : {std::pair{60, true}, std::pair{100, false}}) {
    const Keys a = random_keys(50000, 40);
    Keys b = a;
    for (int change = 0; change < changes; ++change)
      b[static_cast<size_t>(change) * 49999 / static_cast<size_t>(changes - 1)] = 1000 + static_cast<uint64_t>(change);
    SURE(found_in_common(a, b) == (found ? a.size() - static_cast<size_t>(changes) : 0));
  }
}

Record record_of(const Program& program) {
  Record record;
  Run run;
  std::map<int64_t, int32_t> number;
  for (const Made& made : program) {
    StepOp op{run.op(made), {}};
    auto touched = run.operands(made);
    const auto results = run.results(made);
    touched.insert(touched.end(), results.begin(), results.end());
    for (const follow::Touched& touch : touched) {
      const auto [found, fresh] = number.emplace(touch.id, static_cast<int32_t>(record.storages.size()));
      if (fresh) record.storages.push_back({touch.id, touch.bytes, -1, touch.created});
      op.touched.push_back({touch.place, found->second, touch.written, touch.created});
    }
    record.ops.push_back(op);
    record.nanos.push_back(below(1000));
    record.workspaces.push_back(below(1000));
    record.requests.push_back({{0, below(1000)}});
  }
  return record;
}

bool of_a_kind(const StepOp& a, const StepOp& b) {
  if (a.op != b.op || a.touched.size() != b.touched.size()) return false;
  for (size_t k = 0; k < a.touched.size(); ++k)
    if (a.touched[k].place != b.touched[k].place || a.touched[k].written != b.touched[k].written ||
        a.touched[k].created != b.touched[k].created)
      return false;
  return true;
}

std::set<int64_t> ids_of(const Record& record) {
  std::set<int64_t> ids;
  for (const auto& storage : record.storages) ids.insert(storage.id);
  return ids;
}

// Of a kind, and on the same of those storages that both steps have.
bool alike(const Record& a, size_t i, const Record& b, size_t j, const std::unordered_set<int64_t>& common) {
  if (!of_a_kind(a.ops[i], b.ops[j])) return false;
  for (size_t k = 0; k < a.ops[i].touched.size(); ++k) {
    const int64_t mine = a.storages[static_cast<size_t>(a.ops[i].touched[k].storage)].id;
    const int64_t other = b.storages[static_cast<size_t>(b.ops[j].touched[k].storage)].id;
    if (mine != other && (common.count(mine) != 0 || common.count(other) != 0)) return false;
  }
  return true;
}

// What the second has in the gap of the first in which an op lies: pairs from its beginning on.
int32_t paired(const std::vector<int32_t>& core, size_t op, const Record& a, const Record& b) {
  size_t first = op, last = op;
  while (first > 0 && core[first - 1] < 0) --first;
  while (last < core.size() && core[last] < 0) ++last;
  const size_t begin = first == 0 ? 0 : static_cast<size_t>(core[first - 1]) + 1;
  const size_t end = last == core.size() ? b.ops.size() : static_cast<size_t>(core[last]);
  for (size_t k = first; k <= op; ++k)
    if (begin + k - first >= end || !of_a_kind(a.ops[k], b.ops[begin + k - first])) return -1;
  return static_cast<int32_t>(begin + op - first);
}

void check_storages(const Record& a, const Record& b, const Alignment& made) {
  std::set<int32_t> taken;
  for (size_t i = 0; i < a.storages.size(); ++i) {
    const int32_t there = made.storages[i];
    if (there >= 0) SURE(taken.insert(there).second);
    for (size_t j = 0; j < b.storages.size(); ++j)
      if (a.storages[i].id == b.storages[j].id) SURE(there == static_cast<int32_t>(j));
  }
  for (size_t i = 0; i < a.ops.size(); ++i) {
    if (made.ops[i] < 0) continue;
    const StepOp& there = b.ops[static_cast<size_t>(made.ops[i])];
    for (size_t k = 0; k < there.touched.size(); ++k) {
      // Two that have nobody would have been put together.
      const int32_t mine = a.ops[i].touched[k].storage, other = there.touched[k].storage;
      SURE(made.storages[static_cast<size_t>(mine)] >= 0 || taken.count(other) != 0);
    }
  }
}

void check_pair(const Record& a, const Record& b, bool one) {
  const auto found = follow::align(a, b, 0);
  SURE(found.has_value());
  const Alignment& made = *found;
  std::unordered_set<int64_t> common;
  const std::set<int64_t> in_b = ids_of(b);
  for (const int64_t id : ids_of(a))
    if (in_b.count(id) != 0) common.insert(id);
  const Keys keys_a = follow::alignment::keys(a, &common), keys_b = follow::alignment::keys(b, &common);
  const Keys kinds_a = follow::alignment::keys(a, nullptr), kinds_b = follow::alignment::keys(b, nullptr);
  for (size_t i = 0; i < a.ops.size(); ++i)
    for (size_t j = 0; j < b.ops.size(); ++j) {
      SURE((kinds_a[i] == kinds_b[j]) == of_a_kind(a.ops[i], b.ops[j]));
      SURE((keys_a[i] == keys_b[j]) == alike(a, i, b, j, common));
    }
  const std::vector<int32_t> core = follow::alignment::common_ops(keys_a, keys_b);
  SURE(made.ops.size() == a.ops.size() && made.other_storages.size() == a.ops.size());
  matches(kinds_a, kinds_b, made.ops);
  check_storages(a, b, made);
  int64_t both = 0, all = 0;
  for (size_t i = 0; i < a.ops.size(); ++i) {
    SURE(made.ops[i] == (core[i] >= 0 ? core[i] : paired(core, i, a, b)));
    bool other = core[i] < 0 && made.ops[i] >= 0;
    if (made.ops[i] >= 0) {
      const auto there = static_cast<size_t>(made.ops[i]);
      for (size_t k = 0; k < a.ops[i].touched.size(); ++k)
        other = other || made.storages[static_cast<size_t>(a.ops[i].touched[k].storage)] !=
                             b.ops[there].touched[k].storage;
      if (!other) both += a.nanos[i] + b.nanos[there];
    }
    SURE(made.other_storages[i] == other);
    if (one) SURE(made.ops[i] == static_cast<int32_t>(i) && !other);
  }
  for (const Record* each : {&a, &b})
    for (const int64_t nanos : each->nanos) all += nanos;
  SURE(made.share == (all == 0 ? 0 : static_cast<double>(both) / static_cast<double>(all)));
  const double least = 0.1 * below(11);
  const auto limited = follow::align(a, b, least);
  const auto longer = static_cast<double>(std::max(a.ops.size(), b.ops.size()));
  const auto most = static_cast<double>(follow::alignment::max_common_ops(kinds_a, kinds_b));
  SURE(limited.has_value() == (made.share >= least && most >= least / 2 * longer));
  if (limited)
    SURE(limited->ops == made.ops && limited->storages == made.storages &&
         limited->other_storages == made.other_storages);
  const Record told = follow::translate(b, a, made);
  SURE(told.ops.size() == a.ops.size() && told.storages.size() == a.storages.size());
  for (size_t i = 0; i < a.ops.size(); ++i) {
    const Record& from = made.ops[i] >= 0 ? b : a;
    const size_t at = made.ops[i] >= 0 ? static_cast<size_t>(made.ops[i]) : i;
    SURE(told.nanos[i] == from.nanos[at] && told.workspaces[i] == from.workspaces[at]);
    SURE(told.requests[i].front().bytes == from.requests[at].front().bytes);
    SURE(told.ops[i].op == a.ops[i].op);
  }
  for (size_t i = 0; i < a.storages.size(); ++i) {
    const int32_t there = made.storages[i];
    SURE(told.storages[i].id == (there < 0 ? -1 : b.storages[static_cast<size_t>(there)].id));
    const bool stays = there >= 0 && !a.storages[i].created && b.storages[static_cast<size_t>(there)].freed < 0;
    SURE(told.storages[i].freed == (stays ? -1 : a.storages[i].freed));
    SURE(told.storages[i].bytes == (there < 0 ? a.storages[i] : b.storages[static_cast<size_t>(there)]).bytes);
  }
}

void check_steps() {
  for (int round = 0; round < 1500; ++round) {
    const int schemas = 1 + below(20);
    const Program program = random_program(below(25), schemas);
    const Record a = record_of(program);
    check_pair(a, record_of(program), true);
    check_pair(a, record_of(edited(program, 1 + below(8), schemas)), false);
    check_pair(a, record_of(random_program(below(25), schemas)), false);
    Record made_again = record_of(program);
    made_again.variant = 1;
    SURE(!follow::align(a, made_again, 0));
  }
}

}  // namespace

int main() {
  check_subsequences();
  check_limits();
  check_steps();
  std::puts("ok");
  return 0;
}
