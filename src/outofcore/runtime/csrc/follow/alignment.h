// Aligns the ops of two steps, which often differ in a few ops: random crops, sampling, dropped layers. Computes a
// longest common subsequence: E. W. Myers, "An O(ND) difference algorithm and its variations" (Algorithmica 1986,
// section 4a). Ops are equal if their operators and kinds of operands are, with the same persistent storages.

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
  std::vector<int32_t> ops;          // by op of the first step: op of the second; -1: none
  std::vector<int32_t> storages;     // by storage of the first step: storage of the second; -1: none
  std::vector<bool> other_storages;  // by op of the first: the second uses other storages
  double share = 0;                  // of the time of both steps, in ops common to both
};

namespace alignment {

inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 32;
}

// The identity of each op, with or without the storages common to both steps.
inline std::vector<uint64_t> keys(const Record& record, const std::unordered_set<int64_t>* common) {
  std::vector<uint64_t> keys;
  keys.reserve(record.ops.size());
  for (const StepOp& op : record.ops) {
    uint64_t key = mix(14695981039346656037ull, reinterpret_cast<uintptr_t>(op.op));
    for (const auto& touch : op.touched) {
      key =
          mix(key, static_cast<uint64_t>(static_cast<uint32_t>(touch.place)) << 2 | touch.written << 1 | touch.created);
      // One word per storage, so that an id cannot be mistaken for other data.
      const int64_t id = record.storages[touch.storage].id;
      key = mix(key, common != nullptr && common->count(id) != 0 ? static_cast<uint64_t>(id) : UINT64_MAX);
    }
    keys.push_back(key);
  }
  return keys;
}

// An upper bound of the number of common ops.
inline int64_t max_common_ops(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  std::unordered_map<uint64_t, int64_t> remaining;
  for (const uint64_t key : a) ++remaining[key];
  int64_t common = 0;
  for (const uint64_t key : b)
    if (const auto entry = remaining.find(key); entry != remaining.end() && entry->second-- > 0) ++common;
  return common;
}

// A longest common subsequence: by op of the first, the op of the second; all -1 if they differ too much.
inline std::vector<int32_t> common_ops(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  constexpr int64_t kMostWork = int64_t{1} << 24;  // about 20 ms
  const auto n = static_cast<int32_t>(a.size()), m = static_cast<int32_t>(b.size());
  std::vector<int32_t> matched(a.size(), -1);
  int32_t head = 0, tail = 0;
  while (head < std::min(n, m) && a[head] == b[head]) matched[head] = head, ++head;
  while (tail < std::min(n, m) - head && a[n - 1 - tail] == b[m - 1 - tail])
    matched[n - 1 - tail] = m - 1 - tail, ++tail;
  const int32_t rows = n - head - tail, columns = m - head - tail;
  if (rows == 0 || columns == 0) return matched;
  const auto max_differences = static_cast<int32_t>(
      std::min({int64_t{rows} + columns, std::max<int64_t>(64, kMostWork / (rows + columns)), int64_t{2048}}));
  std::vector<std::vector<int32_t>> trace;  // furthest row by diagonal, per number of differences
  std::vector<int32_t> furthest(2 * max_differences + 3, 0);
  const auto at = [&](std::vector<int32_t>& ends, int32_t diagonal) -> int32_t& {
    return ends[diagonal + max_differences + 1];
  };
  int32_t needed = -1;
  for (int32_t differences = 0; differences <= max_differences && needed < 0; ++differences) {
    trace.emplace_back(furthest.begin() + (max_differences + 1 - differences),
                       furthest.begin() + (max_differences + 2 + differences));
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
    // The furthest rows with one difference fewer.
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

// Between aligned ops: pairs leading ops with the same operator on other storages.
inline void pair_others(Alignment& result, const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  int32_t j = 0;
  for (size_t i = 0; i < result.ops.size();) {
    if (result.ops[i] >= 0) {
      j = result.ops[i++] + 1;
      continue;
    }
    const auto next = std::find_if(result.ops.begin() + i, result.ops.end(), [](int32_t op) { return op >= 0; });
    const auto last = static_cast<size_t>(next - result.ops.begin());
    const int32_t end = next == result.ops.end() ? static_cast<int32_t>(b.size()) : *next;
    for (; i < last && j < end && a[i] == b[j]; ++i, ++j) result.ops[i] = j, result.other_storages[i] = true;
    i = last;
  }
}

// Matches the storages of aligned ops. Ops with conflicting storages are marked.
inline void match_storages(Alignment& result, const Record& a, const Record& b) {
  std::vector<int32_t> back(b.storages.size(), -1);
  std::unordered_map<int64_t, int32_t> index_by_id;
  for (size_t i = 0; i < b.storages.size(); ++i) index_by_id.emplace(b.storages[i].id, static_cast<int32_t>(i));
  for (size_t i = 0; i < a.storages.size(); ++i)
    if (const auto same = index_by_id.find(a.storages[i].id); same != index_by_id.end())
      result.storages[i] = same->second, back[same->second] = static_cast<int32_t>(i);
  for (size_t i = 0; i < a.ops.size(); ++i) {
    if (result.ops[i] < 0) continue;
    const auto &touched = a.ops[i].touched, &other_touched = b.ops[result.ops[i]].touched;
    for (size_t k = 0; k < std::min(touched.size(), other_touched.size()); ++k) {
      const int32_t storage_a = touched[k].storage, storage_b = other_touched[k].storage;
      if (result.storages[storage_a] < 0 && back[storage_b] < 0)
        result.storages[storage_a] = storage_b, back[storage_b] = storage_a;
      else if (result.storages[storage_a] != storage_b)
        result.other_storages[i] = true;
    }
  }
}

}  // namespace alignment

// No alignment if the steps have too little in common.
inline std::optional<Alignment> align(const Record& a, const Record& b, double min_share) {
  if (a.variant != b.variant) return std::nullopt;
  const std::vector<uint64_t> kinds_a = alignment::keys(a, nullptr), kinds_b = alignment::keys(b, nullptr);
  const auto longer = static_cast<double>(std::max(kinds_a.size(), kinds_b.size()));
  if (alignment::max_common_ops(kinds_a, kinds_b) < min_share / 2 * longer) return std::nullopt;
  std::unordered_set<int64_t> in_a, common;
  for (const StepStorage& storage : a.storages) in_a.insert(storage.id);
  for (const StepStorage& storage : b.storages)
    if (in_a.count(storage.id) != 0) common.insert(storage.id);
  Alignment result{alignment::common_ops(alignment::keys(a, &common), alignment::keys(b, &common)),
                 std::vector<int32_t>(a.storages.size(), -1), std::vector<bool>(a.ops.size(), false)};
  alignment::pair_others(result, kinds_a, kinds_b);
  alignment::match_storages(result, a, b);
  int64_t all = 0, both = 0;
  for (const Record* record : {&a, &b})
    for (const int64_t nanos : record->nanos) all += nanos;
  for (size_t i = 0; i < a.ops.size(); ++i)
    if (result.ops[i] >= 0 && !result.other_storages[i]) both += a.nanos[i] + b.nanos[result.ops[i]];
  result.share = all == 0 ? 0 : static_cast<double>(both) / static_cast<double>(all);
  if (result.share < min_share) return std::nullopt;
  return result;
}

// A step in terms of a similar one: its sizes and times for that one's ops and storages.
inline Record translate(const Record& step, const Record& usual, const Alignment& from_usual) {
  Record result = usual;
  for (size_t i = 0; i < usual.storages.size(); ++i) {
    const int32_t there = from_usual.storages[i];
    result.storages[i].id = -1;
    if (there < 0) continue;
    result.storages[i].id = step.storages[there].id;
    result.storages[i].bytes = step.storages[there].bytes;
    // A storage that was not freed has no end. Others keep the usual one, because `freed` counts ops of the usual step.
    if (!result.storages[i].created && step.storages[there].freed < 0) result.storages[i].freed = -1;
  }
  for (size_t i = 0; i < usual.ops.size(); ++i)
    if (const int32_t op = from_usual.ops[i]; op >= 0) {
      result.nanos[i] = step.nanos[op];
      result.workspaces[i] = step.workspaces[op];
      result.requests[i] = step.requests[op];
    }
  return result;
}

}  // namespace follow
