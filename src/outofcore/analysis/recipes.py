"""Find the ops that recompute a storage.

A *content* is a version of a storage, as ``(storage, version)``. The op that wrote it recomputes it from the contents
that the op read at its first run. These are recomputed in turn unless they are available.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from outofcore.analysis.gaps import full_overwrites_of
from outofcore.errors import GraphError
from outofcore.graph import ARRIVING_KINDS, Op, StepGraph, StorageKind

Content = tuple[int, int]

# Kinds of storages that exist before the step without being persistent.
_PREEXISTING_KINDS = ARRIVING_KINDS | {StorageKind.CONSTANT}
_ALWAYS = sys.maxsize  # after all ops of any step


@dataclass(frozen=True)
class History:
    """The versions of all storages in a step, and the ops that write them, without evictions."""

    graph: StepGraph
    before: tuple[dict[int, int], ...]  # for each op the versions right before it of the storages that it uses
    writes: tuple[tuple[int, ...], ...]  # for each storage the ops that write it; the v-th writes version v

    @staticmethod
    def of(graph: StepGraph) -> History:
        """Record the storage versions that each op reads, and the ops that write each storage."""
        writes: list[list[int]] = [[] for _ in graph.storages]
        before: list[dict[int, int]] = []
        for op in graph.ops:
            before.append({s: len(writes[s]) for s in op.reads + op.mutates})
            for storage in dict.fromkeys(op.mutates + op.creates):
                writes[storage].append(op.id)
        return History(graph, tuple(before), tuple(tuple(ops) for ops in writes))

    @cached_property
    def recompute_deadlines(self) -> dict[Content, int]:
        """Map each written storage version to the last op before which every plan can recompute it; -1 for never."""
        deadlines: dict[Content, int] = {}
        for op in self.graph.ops:
            last = (
                min((self._recomputable_until(need, deadlines) for need in self.needs(op)), default=_ALWAYS)
                if op.rerunnable
                else -1
            )
            before = self.before[op.id]
            for storage in dict.fromkeys(op.mutates + op.creates):
                deadlines[storage, before.get(storage, 0) + 1] = -1 if storage in op.discards else last
        return deadlines

    def _recomputable_until(self, content: Content, deadlines: Mapping[Content, int]) -> int:
        """Return the last op before which every plan has a storage version or can recompute it; -1 for never."""
        storage, _ = content
        recomputable_until = deadlines.get(content, -1)
        if storage not in self.graph.persistent and self.graph.storages[storage].kind not in _PREEXISTING_KINDS:
            return recomputable_until
        return max(self.last_op_with(content, _ALWAYS), recomputable_until)

    def last_op_with(self, content: Content, end: int) -> int:
        """Return the last op before which a storage version still exists; ``end`` if no op overwrites it."""
        storage, version = content
        writes = self.writes[storage]
        if version >= len(writes):
            return end
        if writes[version] not in full_overwrites_of(self.graph, storage):
            return writes[version]
        uses = self.graph.uses[storage]
        return max((use for use in uses if use < writes[version]), default=-1)

    def version_at(self, storage: int, op: int) -> int:
        return bisect_left(self.writes[storage], op)

    def needs(self, op: Op) -> tuple[Content, ...]:
        """Return the storage versions that an op must read to run again."""
        versions = self.before[op.id]
        return tuple((s, versions[s]) for s in op.reads if s not in op.discards)

    def makes(self, op: Op) -> tuple[Content, ...]:
        """Return the storage versions that an op writes and does not discard."""
        versions = self.before[op.id]
        return tuple((s, versions.get(s, 0) + 1) for s in op.mutates + op.creates if s not in op.discards)

    def always_available(self, op: int) -> Callable[[Content], bool]:
        """Return a function that checks whether a storage version exists in every plan right before an op."""

        def is_available(content: Content) -> bool:
            storage, version = content
            if storage not in self.graph.persistent and self.graph.storages[storage].kind not in _PREEXISTING_KINDS:
                return False
            return version == self.version_at(storage, op) and op <= self.last_op_with(content, _ALWAYS)

        return is_available


def ops_to_recompute(
    history: History, targets: Iterable[Content], is_available: Callable[[Content], bool]
) -> tuple[int, ...]:
    """Return the ops that recompute storage versions, in graph order; raises ``GraphError`` if that fails."""
    unique_targets = dict.fromkeys(targets)
    pending = list(unique_targets)
    visited = set(pending)
    runs: set[int] = set()
    while pending:
        content = pending.pop()
        op = _op_writing(history, content)
        runs.add(op.id)
        for need in history.needs(op):
            if need not in visited and not is_available(need):
                visited.add(need)
                pending.append(need)
    return tuple(sorted(runs))


def can_recompute(history: History, storage: int, fetch_at: int) -> bool:
    """Return whether a storage can be recomputed right before op ``fetch_at`` under any plan."""
    # The home of a storage that exists before the step must stay valid: the user reads it if the step fails.
    if storage in history.graph.persistent or history.graph.storages[storage].arrives:
        return False
    return history.recompute_deadlines.get((storage, history.version_at(storage, fetch_at)), -1) >= fetch_at


def _op_writing(history: History, content: Content) -> Op:
    """Return the op that recomputes a storage version; raises ``GraphError`` if no op can."""
    storage, version = content
    graph = history.graph
    if version < 1:
        raise GraphError(
            f"{_describe(graph, content)} cannot be recomputed: no op creates it, and it is no longer on the device or "
            "at home; keep or offload the storages that are computed from it"
        )
    op = graph.ops[history.writes[storage][version - 1]]
    if not op.rerunnable or storage in op.discards:
        reason = "may run only once" if not op.rerunnable else "discards its former contents"
        raise GraphError(
            f"{_describe(graph, content)} cannot be recomputed: op {op.id} ({op.name}), which writes it, {reason}; "
            "keep or offload the storages that are computed from it"
        )
    return op


def _describe(graph: StepGraph, content: Content) -> str:
    storage, version = content
    data = graph.storages[storage]
    return f"version {version} of storage {storage} ({data.name or data.kind.value})"
