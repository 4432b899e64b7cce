"""Choose groups of ops for a compiler to fuse, from the graph alone.

- An op joins groups that write a large storage that it reads, if no other op depends on them yet. A group runs at the
  place of its last op, so it delays no other op and creates no cycle.
- An op is not fused with the group that wrote its argument if argument and result are both live beyond the peak.
  Plans can then recompute the result from the argument.
- A group needs no more bytes than the largest op of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from outofcore.analysis.gaps import LARGE_BYTES, placed_bytes
from outofcore.graph import Op, StepGraph, StorageKind

# Compile time grows faster than linearly with the number of ops.
MAX_OPS = 48
# A limit on how far an op is delayed, since its arguments stay live until it runs.
REACH = 16


@dataclass
class _Group:
    ops: list[int]
    written: set[int] = field(default_factory=set[int])
    open: bool = True  # no other op depends on it yet


def ops_to_fuse(
    graph: StepGraph,
    fusible: Collection[int],
    *,
    alone: Collection[int] = (),
    scratch: Mapping[int, int] | None = None,
    min_bytes: int = LARGE_BYTES,
    max_ops: int = MAX_OPS,
    reach: int = REACH,
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of op ids to fuse, in the order of their last ops.

    A group runs at the place of its last op. ``fusible`` ops have no random numbers, collectives or side effects.
    ``scratch`` has scratch bytes by op. An op may join a group that ends at most ``reach`` ops earlier if it reads
    storages that the group wrote, of ``min_bytes`` or more. ``alone`` ops that touch one may form groups of one op.
    """
    groups = _FusionSearch(graph, frozenset(fusible), scratch or {}, min_bytes, max_ops, reach).groups()
    alone_ops = {op for op in alone if any(graph.storages[s].bytes >= min_bytes for s in graph.ops[op].touched)}
    return tuple(ops for ops in groups if len(ops) > 1 or alone_ops.issuperset(ops))


class _FusionSearch:
    """Finds groups of fusible ops that save reads of large storages and need no more memory at once."""

    def __init__(
        self,
        graph: StepGraph,
        fusible: frozenset[int],
        scratch: Mapping[int, int],
        min_bytes: int,
        max_ops: int,
        reach: int,
    ) -> None:
        self.graph, self.fusible, self.min_bytes, self.max_ops, self.reach = graph, fusible, min_bytes, max_ops, reach
        self.peak = _peak_op(graph)
        self.room = max((self._needed_bytes([op.id]) + scratch.get(op.id, 0) for op in graph.ops), default=0)
        self.writes: list[list[int]] = [[] for _ in graph.storages]
        for op in graph.ops:
            for storage in op.mutates + op.creates:
                self.writes[storage].append(op.id)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all groups, including groups of one op, in the order of their last ops."""
        group_of: dict[int, _Group] = {}  # by op
        last_write: dict[int, int] = {}
        readers: dict[int, list[int]] = {}  # ops that read a storage since its last write
        for op in self.graph.ops:
            writes = set(op.mutates + op.creates)
            predecessors = {last_write[s] for s in op.touched if s in last_write}
            predecessors |= {reader for s in writes for reader in readers.get(s, ())}
            joined = self._join(
                op, [group_of[predecessor] for predecessor in sorted(predecessors) if predecessor in group_of]
            )
            if joined is not None:
                joined = _Group([*joined.ops, op.id], joined.written | writes)
                group_of.update(dict.fromkeys(joined.ops, joined))
            elif op.id in self.fusible:
                group_of[op.id] = _Group([op.id], set(writes))
            for predecessor in predecessors:
                if predecessor in group_of and group_of[predecessor] is not group_of.get(op.id):
                    group_of[predecessor].open = False
            for storage in op.touched:
                if storage in writes:
                    last_write[storage] = op.id
                    readers[storage] = []
                else:
                    readers.setdefault(storage, []).append(op.id)
        groups = {tuple(group.ops) for group in group_of.values()}
        return tuple(sorted(groups, key=lambda ops: ops[-1]))

    def _join(self, op: Op, groups: list[_Group]) -> _Group | None:
        """Merge the groups that an op should join, without adding the op; None if there are no such groups."""
        if op.id not in self.fusible:
            return None
        candidates = list(
            {id(group): group for group in groups if group.open and op.id - group.ops[-1] <= self.reach}.values()
        )
        gains = [(self._gain(op, group), group) for group in candidates]
        merged: _Group | None = None
        # The sort is stable: of equal gains, the first group comes first.
        for gain, group in sorted(gains, key=lambda pair: -pair[0]):
            ops = sorted([*(merged.ops if merged else ()), *group.ops])
            if not gain or len(ops) >= self.max_ops or self._needed_bytes([*ops, op.id]) > self.room:
                continue
            merged = _Group(ops, group.written if merged is None else group.written | merged.written)
        return merged

    def _gain(self, op: Op, group: _Group) -> int:
        """Return the bytes that an op need not read if it joins a group; 0 if it must not join."""
        storages = self.graph.storages
        shared = [s for s in op.reads if s in group.written and storages[s].bytes >= self.min_bytes]
        if any(self._is_held(s, op) for s in shared) and any(self._is_held(s, op) for s in op.creates):
            return 0
        return sum(storages[s].bytes for s in shared)

    def _is_held(self, storage: int, op: Op) -> bool:
        """Return whether a large storage must keep its contents from ``op`` until after the memory peak."""
        graph = self.graph
        if op.id > self.peak or graph.storages[storage].bytes < self.min_bytes or storage in op.mutates:
            return False
        writes = self.writes[storage]
        after = bisect_right(writes, op.id)
        end = writes[after] if after < len(writes) else len(graph.ops)
        lasts = end == len(graph.ops) and (storage in graph.outputs or storage in graph.persistent)
        return lasts or any(self.peak < use <= end for use in graph.uses[storage])

    def _needed_bytes(self, ops: list[int]) -> int:
        """Return the bytes of large storages that a group of ops needs at once when it is fused."""
        graph, members = self.graph, set(ops)
        created = {s for op in ops for s in graph.ops[op].creates}
        count, results, dying = 0, Counter[int](), Counter[int]()
        for storage in dict.fromkeys(s for op in ops for s in graph.ops[op].touched):
            kind, size = graph.storages[storage].kind, placed_bytes(graph.storages[storage].bytes)
            inside = graph.uses[storage][-1] in members and storage not in graph.outputs
            if kind is StorageKind.CONSTANT or size < self.min_bytes:
                continue
            if storage in created and inside and members.issuperset(graph.uses[storage]):
                continue
            count += size
            if storage in created:
                results[size] += 1
            elif inside and storage in graph.creator and len(ops) > 1:
                dying[size] += 1
        return count - sum(size * number for size, number in (results & dying).items())


def _peak_op(graph: StepGraph) -> int:
    """Return the op during which the storages created by the step need the most memory."""
    change = [0] * (len(graph.ops) + 1)
    for storage in graph.creator:
        uses = graph.uses[storage]
        change[uses[0]] += graph.storages[storage].bytes
        change[uses[-1] + 1] -= graph.storages[storage].bytes
    live = list(accumulate(change[:-1]))
    return max(range(len(live)), key=live.__getitem__, default=0)
