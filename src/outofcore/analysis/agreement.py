"""Choose the axes along which neighbouring ops are split so that few bytes are copied between parts.

Split ops pass tensors in cells; an op copies cells together unless it is split along their axis. The search is iterated
conditional modes (Besag, "On the statistical analysis of dirty pictures", Journal of the Royal Statistical Society B
48, 1986): each op in turn takes its best split given the others. Groups of neighbours are also changed together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

# The axis of a storage that is accessed as a whole.
WHOLE = -1
# Maximum number of passes over all groups of neighbours.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class SplitUses:
    """The storages that an op accesses under one of its splits."""

    # Each: a storage, an axis or ``WHOLE``, and the bytes that are copied if its cells are along another axis.
    cells: tuple[tuple[int, int, int], ...]
    copied: int = 0  # bytes that are always copied


def choose_splits(
    uses: Mapping[int, Sequence[SplitUses]], unsplit_bytes: Mapping[int, int], flexible: Set[int], single: Set[int]
) -> dict[int, int]:
    """Choose a split for each op such that few bytes are copied; return the index of each op's split.

    Args:
        uses: by op, the possible splits and the storages that each accesses; earlier splits are preferred.
        unsplit_bytes: by storage, the bytes that unsplit ops access.
        flexible: ops that can be split along most axes; neighbours among them are also changed together.
        single: storages that are divided along one axis only; others are divided along every axis in use.
    """
    search = _SplitSearch(uses, unsplit_bytes, single)
    groups = [*search.group_neighbours(flexible), *search.group_neighbours(uses.keys())]
    for _ in range(_PASSES):
        changed = [group for group in groups if search.change_group(group)]
        if not changed:
            break
    return {op: search.chosen[op] for op in uses}


class _SplitSearch:
    """Chooses a split for each op, and counts the bytes that ops access along each axis of each storage."""

    def __init__(
        self, uses: Mapping[int, Sequence[SplitUses]], unsplit_bytes: Mapping[int, int], single: Set[int]
    ) -> None:
        self._uses, self._single = uses, single
        self._touched = {
            op: tuple(dict.fromkeys(storage for split in splits for storage, _, _ in split.cells))
            for op, splits in uses.items()
        }
        self._users: dict[int, list[int]] = {}
        for op, storages in self._touched.items():
            for storage in storages:
                self._users.setdefault(storage, []).append(op)
        self._accessed = {storage: {WHOLE: unsplit_bytes.get(storage, 0)} for storage in self._users}
        self.chosen: dict[int, int] = {}
        # Ops with the fewest choices first, so that the others adapt to them.
        for op in sorted(uses, key=lambda op: (len(uses[op]), op)):
            self._assign(op, self._best_split(op))
        self._improve(sorted(uses))

    def _assign(self, op: int, split_index: int) -> None:
        self._unassign(op)
        self.chosen[op] = split_index
        self._count_accesses(op, split_index, 1)

    def _unassign(self, op: int) -> None:
        if op in self.chosen:
            self._count_accesses(op, self.chosen.pop(op), -1)

    def _count_accesses(self, op: int, split_index: int, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) the bytes that an op accesses under a split."""
        for storage, axis, accessed_bytes in self._uses[op][split_index].cells:
            accessed = self._accessed[storage]
            accessed[axis] = accessed.get(axis, 0) + sign * accessed_bytes

    def _copied_bytes(self, storage: int) -> int:
        """Return how many bytes of a storage the ops copy under the chosen splits."""
        accessed = self._accessed[storage]
        along = [count for axis, count in accessed.items() if axis != WHOLE and count]
        if not along:
            return 0
        uncopied_bytes = max(along) if storage in self._single or len(along) == 1 else 0
        return accessed[WHOLE] + sum(along) - uncopied_bytes

    def _bytes_copied_by(self, ops: Iterable[int]) -> int:
        """Return the bytes that ops always copy, plus the copied bytes of all storages that they access."""
        storages = dict.fromkeys(storage for op in ops for storage in self._touched[op])
        return sum(self._uses[op][self.chosen[op]].copied for op in ops) + sum(map(self._copied_bytes, storages))

    def _best_split(self, op: int) -> int:
        """Remove an op's split; return the index of the split that would copy the fewest bytes."""
        costs: list[int] = []
        for split_index in range(len(self._uses[op])):
            self._assign(op, split_index)
            costs.append(self._bytes_copied_by((op,)))
        self._unassign(op)
        return costs.index(min(costs))

    def _improve(self, ops: Iterable[int]) -> dict[int, int]:
        """Choose better splits for ops and their neighbours; return the former split index of each changed op."""
        before: dict[int, int] = {}
        queue = deque(ops)
        waiting = set(queue)
        while queue:
            op = queue.popleft()
            waiting.remove(op)
            old = self.chosen[op]
            # This ends, since each change saves bytes, or takes an earlier split at equal bytes.
            best = self._best_split(op)
            self._assign(op, best)
            if best != old:
                before.setdefault(op, old)
                neighbours = sorted(self._neighbours_of(op) - waiting)
                queue.extend(neighbours)
                waiting.update(neighbours)
        return before

    def _neighbours_of(self, op: int) -> set[int]:
        return {neighbour for storage in self._touched[op] for neighbour in self._users[storage]} - {op}

    def group_neighbours(self, ops: Iterable[int]) -> list[list[int]]:
        """Divide ops into groups; ops of a group are connected through storages that they share."""
        remaining = set(ops)
        groups: list[list[int]] = []
        while remaining:
            group = [min(remaining)]
            remaining.remove(group[0])
            for op in group:  # grows while iterating
                neighbours = sorted(self._neighbours_of(op) & remaining)
                group += neighbours
                remaining.difference_update(neighbours)
            groups.append(group)
        return groups

    def change_group(self, group: Sequence[int]) -> bool:
        """Split a group of ops along each axis in turn; return whether this ever saved copied bytes."""
        axes = sorted({axis for op in group for split in self._uses[op] for _, axis, _ in split.cells if axis != WHOLE})
        changed = [axis for axis in axes if self._change_group_to(axis, group)]
        return bool(changed)

    def _change_group_to(self, axis: int, group: Sequence[int]) -> bool:
        """Split the ops of a group along an axis if this saves copied bytes; return whether it did."""
        changed: dict[int, int] = {}
        for op in group:
            splits_along_axis = [
                split_index
                for split_index, split in enumerate(self._uses[op])
                if any(a == axis for _, a, _ in split.cells)
            ]
            if splits_along_axis and self.chosen[op] not in splits_along_axis:
                changed[op] = splits_along_axis[0]
        before = {op: self.chosen[op] for op in changed}
        all_ops = list(self._uses)
        cost = self._bytes_copied_by(all_ops)
        for op, split_index in changed.items():
            self._assign(op, split_index)
        changed_neighbours = self._improve(
            sorted({neighbour for op in changed for neighbour in self._neighbours_of(op)})
        )
        if self._bytes_copied_by(all_ops) < cost:
            self._improve(sorted(changed))  # single ops may improve further
            return True
        for op, split_index in (changed_neighbours | before).items():
            self._assign(op, split_index)
        return False
