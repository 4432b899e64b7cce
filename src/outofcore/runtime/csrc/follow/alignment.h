// Which ops of two steps correspond.
//
// Loops seldom do the same in each step down to the last op: batches are cut and mirrored at random, a sample is picked,
// a layer is dropped. The steps are compared as texts are: E. W. Myers, "An O(ND) difference algorithm and its
// variations" (Algorithmica 1986, section 4a), where an op equals another if it is the same operator with operands of
// the same kind, and those that outlast the steps are the very same.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "step.h"

namespace follow {

struct Alignment {
  std::vector<int32_t> ops;       // by op of the first step: the op of the second; -1: none
  std::vector<int32_t> storages;  // by storage of the first step: the storage of the second; -1: none
  std::vector<bool> other;        // by op of the first: the second runs the operator on other storages
  double share = 0;               // of the time of both steps that ops take which both have
};

namespace alignment {

inline uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 32;
}

// By op: what it is, with the storages that both steps have, or without.
inline std::vector<uint64_t> keys(const Record& record, const std::unordered_set<int64_t>* common) {
  std::vector<uint64_t> found;
  found.reserve(record.ops.size());
  for (const StepOp& op : record.ops) {
    uint64_t key = mixed(14695981039346656037ull, reinterpret_cast<uintptr_t>(op.op));
    for (const auto& touch : op.touched) {
      key = mixed(key, static_cast<uint64_t>(static_cast<uint32_t>(touch.place)) << 2 | touch.written << 1 | touch.created);
      // A word for each, so that the number of a storage is never taken for what comes next.
      const int64_t id = record.storages[touch.storage].id;
      key = mixed(key, common != nullptr && common->count(id) != 0 ? static_cast<uint64_t>(id) : UINT64_MAX);
    }
    found.push_back(key);
  }
  return found;
}

// How many ops two steps can have in common at most.
inline int64_t most_in_common(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  std::unordered_map<uint64_t, int64_t> left;
  for (const uint64_t key : a) ++left[key];
  int64_t common = 0;
  for (const uint64_t key : b)
    if (const auto found = left.find(key); found != left.end() && found->second-- > 0) ++common;
  return common;
}

// By op of the first, the op of the second in a longest common subsequence; all -1 where they differ in too much.
inline std::vector<int32_t> common_ops(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  constexpr int64_t kMostWork = int64_t{1} << 24;  // some 20 ms
  const auto n = static_cast<int32_t>(a.size()), m = static_cast<int32_t>(b.size());
  std::vector<int32_t> matched(a.size(), -1);
  int32_t head = 0, tail = 0;
  while (head < std::min(n, m) && a[head] == b[head]) matched[head] = head, ++head;
  while (tail < std::min(n, m) - head && a[n - 1 - tail] == b[m - 1 - tail])
    matched[n - 1 - tail] = m - 1 - tail, ++tail;
  const int32_t rows = n - head - tail, columns = m - head - tail;
  if (rows == 0 || columns == 0) return matched;
  const auto most = static_cast<int32_t>(
      std::min({int64_t{rows} + columns, std::max<int64_t>(64, kMostWork / (rows + columns)), int64_t{2048}}));
  std::vector<std::vector<int32_t>> trace;  // furthest row by diagonal, for each count of differences
  std::vector<int32_t> furthest(2 * most + 3, 0);
  const auto at = [&](std::vector<int32_t>& ends, int32_t diagonal) -> int32_t& { return ends[diagonal + most + 1]; };
  int32_t needed = -1;
  for (int32_t differences = 0; differences <= most && needed < 0; ++differences) {
    trace.emplace_back(furthest.begin() + (most + 1 - differences), furthest.begin() + (most + 2 + differences));
    for (int32_t diagonal = -differences; diagonal <= differences; diagonal += 2) {
      const bool down = diagonal == -differences ||
                        (diagonal != differences && at(furthest, diagonal - 1) < at(furthest, diagonal + 1));
      int32_t row = down ? at(furthest, diagonal + 1) : at(furthest, diagonal - 1) + 1;
      while (row < rows && row - diagonal < columns && row - diagonal >= 0 && a[head + row] == b[head + row - diagonal])
        ++row;
      at(furthest, diagonal) = row;
      if (row >= rows && row - diagonal >= columns) {
        needed = differences;
        break;
      }
    }
  }
  if (needed < 0) return std::vector<int32_t>(a.size(), -1);
  int32_t row = rows, column = columns;
  for (int32_t differences = needed; row > 0 || column > 0; --differences) {
    // What each diagonal had reached with one difference less.
    const std::vector<int32_t>& before = trace[differences];
    const auto reached = [&](int32_t diagonal) { return before[diagonal + differences]; };
    const int32_t diagonal = row - column;
    int32_t from_row = 0, from_column = 0;
    if (differences > 0) {
      const bool down = diagonal == -differences ||
                        (diagonal != differences && reached(diagonal - 1) < reached(diagonal + 1));
      from_row = down ? reached(diagonal + 1) : reached(diagonal - 1);
      from_column = from_row - (down ? diagonal + 1 : diagonal - 1);
    }
    while (row > from_row && column > from_column) {
      --row, --column;
      matched[head + row] = head + column;
    }
    row = from_row, column = from_column;
  }
  return matched;
}

// In the stretches between ops that correspond: pairs from their beginning on that run the same operator on others.
inline void pair_others(Alignment& made, const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  int32_t j = 0;
  for (size_t i = 0; i < made.ops.size();) {
    if (made.ops[i] >= 0) {
      j = made.ops[i++] + 1;
      continue;
    }
    const auto next = std::find_if(made.ops.begin() + i, made.ops.end(), [](int32_t op) { return op >= 0; });
    const auto last = static_cast<size_t>(next - made.ops.begin());
    const int32_t end = next == made.ops.end() ? static_cast<int32_t>(b.size()) : *next;
    for (; i < last && j < end && a[i] == b[j]; ++i, ++j) made.ops[i] = j, made.other[i] = true;
    i = last;
  }
}

// Which storages the ops that correspond use; those of which they use different ones are then of other storages.
inline void match_storages(Alignment& made, const Record& a, const Record& b) {
  std::vector<int32_t> back(b.storages.size(), -1);
  std::unordered_map<int64_t, int32_t> known;
  for (size_t i = 0; i < b.storages.size(); ++i) known.emplace(b.storages[i].id, static_cast<int32_t>(i));
  for (size_t i = 0; i < a.storages.size(); ++i)
    if (const auto same = known.find(a.storages[i].id); same != known.end())
      made.storages[i] = same->second, back[same->second] = static_cast<int32_t>(i);
  for (size_t i = 0; i < a.ops.size(); ++i) {
    if (made.ops[i] < 0) continue;
    const auto &touched = a.ops[i].touched, &others = b.ops[made.ops[i]].touched;
    for (size_t k = 0; k < std::min(touched.size(), others.size()); ++k) {
      const int32_t mine = touched[k].storage, other = others[k].storage;
      if (made.storages[mine] < 0 && back[other] < 0)
        made.storages[mine] = other, back[other] = mine;
      else if (made.storages[mine] != other)
        made.other[i] = true;
    }
  }
}

}  // namespace alignment

// Nothing where they have too little in common.
inline std::optional<Alignment> align(const Record& a, const Record& b, double least) {
  if (a.variant != b.variant) return std::nullopt;
  const std::vector<uint64_t> kinds_a = alignment::keys(a, nullptr), kinds_b = alignment::keys(b, nullptr);
  const auto longer = static_cast<double>(std::max(kinds_a.size(), kinds_b.size()));
  if (alignment::most_in_common(kinds_a, kinds_b) < least / 2 * longer) return std::nullopt;
  std::unordered_set<int64_t> in_a, common;
  for (const StepStorage& storage : a.storages) in_a.insert(storage.id);
  for (const StepStorage& storage : b.storages)
    if (in_a.count(storage.id) != 0) common.insert(storage.id);
  Alignment made{alignment::common_ops(alignment::keys(a, &common), alignment::keys(b, &common)),
                 std::vector<int32_t>(a.storages.size(), -1), std::vector<bool>(a.ops.size(), false)};
  alignment::pair_others(made, kinds_a, kinds_b);
  alignment::match_storages(made, a, b);
  int64_t all = 0, both = 0;
  for (const Record* each : {&a, &b})
    for (const int64_t nanos : each->nanos) all += nanos;
  for (size_t i = 0; i < a.ops.size(); ++i)
    if (made.ops[i] >= 0 && !made.other[i]) both += a.nanos[i] + b.nanos[made.ops[i]];
  made.share = all == 0 ? 0 : static_cast<double>(both) / static_cast<double>(all);
  if (made.share < least) return std::nullopt;
  return made;
}

// A step in the terms of one that it resembles: its sizes and times, by the other's ops and storages.
inline Record translated(const Record& step, const Record& usual, const Alignment& from_usual) {
  Record made = usual;
  for (size_t i = 0; i < usual.storages.size(); ++i) {
    const int32_t there = from_usual.storages[i];
    made.storages[i].id = -1;
    if (there < 0) continue;
    made.storages[i].id = step.storages[there].id;
    made.storages[i].bytes = step.storages[there].bytes;
    // A storage that was not freed has no end. Other ends are kept: `freed` counts ops of the usual step.
    if (!made.storages[i].created && step.storages[there].freed < 0) made.storages[i].freed = -1;
  }
  for (size_t i = 0; i < usual.ops.size(); ++i)
    if (const int32_t op = from_usual.ops[i]; op >= 0) {
      made.nanos[i] = step.nanos[op];
      made.workspaces[i] = step.workspaces[op];
      made.requests[i] = step.requests[op];
    }
  return made;
}

}  // namespace follow
