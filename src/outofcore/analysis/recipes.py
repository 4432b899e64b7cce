"""How a storage can be recomputed: which op wrote which version, from which versions.

A *content* is a storage at a version, as ``(storage, version)``. The recipe of a content is the op that wrote it; that
op's other inputs are contents as well, at the versions that they had when it first ran. Available contents end the
recursion; since every op reads only what earlier ops wrote, it ends.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from outofcore.analysis.gaps import renewals_of
from outofcore.errors import GraphError
from outofcore.graph import ARRIVING_KINDS, Op, StepGraph, StorageKind

Content = tuple[int, int]

# What exists before the step and is no persistent storage.
_LASTING = ARRIVING_KINDS | {StorageKind.CONSTANT}
_EVER = sys.maxsize  # after all ops of any step


@dataclass(frozen=True)
class History:
    """The versions in plain execution.

    ``before`` has for each op the version at which it finds each storage that it reads or mutates; ``writes`` for each
    storage the ops that write it, in order: the v-th of them makes version v.
    """

    graph: StepGraph
    before: tuple[dict[int, int], ...]
    writes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: StepGraph) -> History:
        writes: list[list[int]] = [[] for _ in graph.storages]
        before: list[dict[int, int]] = []
        for op in graph.ops:
            before.append({s: len(writes[s]) for s in op.reads + op.mutates})
            for storage in dict.fromkeys(op.mutates + op.creates):
                writes[storage].append(op.id)
        return History(graph, tuple(before), tuple(tuple(ops) for ops in writes))

    @cached_property
    def chances(self) -> dict[Content, int]:
        """Map contents that ops leave to the last op before which they can be recomputed whatever the plan; or to -1.

        One pass in program order, since an op reads only what is older: for all contents it takes no longer than a
        recursion may take for one.
        """
        deadlines: dict[Content, int] = {}
        for op in self.graph.ops:
            last = (
                min((self._until(need, deadlines) for need in self.needs(op)), default=_EVER) if op.rerunnable else -1
            )
            before = self.before[op.id]
            for storage in dict.fromkeys(op.mutates + op.creates):
                deadlines[storage, before.get(storage, 0) + 1] = -1 if storage in op.discards else last
        return deadlines

    def _until(self, content: Content, chances: Mapping[Content, int]) -> int:
        """Return the last op before which a content exists, or can be recomputed, whatever the plan."""
        storage, _ = content
        recomputable_until = chances.get(content, -1)
        if storage not in self.graph.persistent and self.graph.storages[storage].kind not in _LASTING:
            return recomputable_until
        return max(self.last_op_with(content, _EVER), recomputable_until)

    def last_op_with(self, content: Content, end: int) -> int:
        """Return the last op before which a storage has a content if nothing is evicted; ``end`` if always.

        That is the next op that writes it, or if that one overwrites it as a whole, the last use before.
        """
        storage, version = content
        writes = self.writes[storage]
        if version >= len(writes):
            return end
        if writes[version] not in renewals_of(self.graph, storage):
            return writes[version]
        uses = self.graph.uses[storage]
        return max((use for use in uses if use < writes[version]), default=-1)

    def version_at(self, storage: int, op: int) -> int:
        """Return the version of a storage right before an op."""
        return bisect_left(self.writes[storage], op)

    def needs(self, op: Op) -> tuple[Content, ...]:
        """Return the contents that an op needs when it runs again: what it reads, except what it discards."""
        versions = self.before[op.id]
        return tuple((s, versions[s]) for s in op.reads if s not in op.discards)

    def makes(self, op: Op) -> tuple[Content, ...]:
        """Return the contents that an op leaves when it runs again."""
        versions = self.before[op.id]
        return tuple((s, versions.get(s, 0) + 1) for s in op.mutates + op.creates if s not in op.discards)

    def always_held(self, op: int) -> Callable[[Content], bool]:
        """Return a predicate: which contents are on the device or at home right before an op, whatever the plan.

        Those are the storages that exist before the step, at their first version. (A plan that recomputes an input that
        the step has changed breaks this.)
        """

        def held(content: Content) -> bool:
            storage, version = content
            if storage not in self.graph.persistent and self.graph.storages[storage].kind not in _LASTING:
                return False
            return version == self.version_at(storage, op) and op <= self.last_op_with(content, _EVER)

        return held


def replay(history: History, targets: Iterable[Content], is_held: Callable[[Content], bool]) -> tuple[int, ...]:
    """Return the ops that must run again to make the targets, in order, each once.

    Targets are made even if they are held. ``is_held`` tells whether a content is on the device or at home. Raises
    ``GraphError`` that names a content which cannot be recomputed.
    """
    unique_targets = dict.fromkeys(targets)
    pending = list(unique_targets)
    visited = set(pending)
    runs: set[int] = set()
    while pending:
        content = pending.pop()
        op = _maker(history, content)
        runs.add(op.id)
        for need in history.needs(op):
            if need not in visited and not is_held(need):
                visited.add(need)
                pending.append(need)
    return tuple(sorted(runs))


def can_recompute(history: History, storage: int, fetch_at: int) -> bool:
    """Return whether a storage can be recomputed right before an op, whatever else is evicted.

    What exists before the step cannot: after a step that fails, its home is what the user has.
    """
    if storage in history.graph.persistent or history.graph.storages[storage].arrives:
        return False
    return history.chances.get((storage, history.version_at(storage, fetch_at)), -1) >= fetch_at


def _maker(history: History, content: Content) -> Op:
    storage, version = content
    graph = history.graph
    if version < 1:
        raise GraphError(
            f"{_named(graph, content)} cannot be computed again: no op makes it, and neither device nor home holds it "
            "any more; keep or offload what is made from it"
        )
    op = graph.ops[history.writes[storage][version - 1]]
    if not op.rerunnable or storage in op.discards:
        reason = "may run once only" if not op.rerunnable else "does not make it from what is given to it again"
        raise GraphError(
            f"{_named(graph, content)} cannot be computed again: op {op.id} ({op.name}), which writes it, {reason}; "
            "keep or offload what is made from it"
        )
    return op


def _named(graph: StepGraph, content: Content) -> str:
    storage, version = content
    data = graph.storages[storage]
    return f"version {version} of storage {storage} ({data.name or data.kind.value})"
