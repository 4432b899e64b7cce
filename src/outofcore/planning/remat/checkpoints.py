"""Checkpoints chosen recursively: what a step keeps, what it computes again early, and what for each use.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 4.4, and before it Griewank,
"Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation" (1992): the
forward pass is cut into segments, of which only the borders are kept. When the backward pass comes to a segment, the
border in its middle is computed again and stays until it is used; then its second half is treated in the same way, and
after that its first half.

    forward    |--------- segment ---------|--- kept as it is ---| turn
    backward   first: to the middle, kept  <-- second half, then first half
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outofcore.planning.remat.chains import AGAIN, Choices
from outofcore.planning.remat.selection import Snapshot

# Segments that the forward pass is cut into, and how often each is halved.
_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_HALVINGS = (0, 1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Checkpoints:
    """One way to place checkpoints.

    Attributes:
        seconds: of what runs again.
        most: bytes that are held and needed at an op.
        snapshot: as a change to choices in which all is kept.
    """

    seconds: float
    most: int
    snapshot: Snapshot


def recursive_checkpoints(choices: Choices) -> list[Checkpoints]:
    """The ways to place checkpoints, the quickest first.

    Args:
        choices: of the step, with all kept; only read.
    """
    found: list[Checkpoints] = []
    for snapshot in _snapshots(choices):
        own = Choices(choices.problem, choices.contents, like=choices)
        if own.begin(snapshot):
            found.append(Checkpoints(own.seconds, int((own.held + own.need).max(initial=0)), snapshot))
    return sorted(found, key=lambda one: (one.seconds, one.most, one.snapshot))


def _snapshots(choices: Choices) -> Iterator[Snapshot]:
    waiting = _waiting(choices)
    found: set[Snapshot] = set()
    for segments in _SEGMENTS:
        if segments > len(waiting):
            return
        for halvings in _HALVINGS:
            snapshot = _Cuts(choices, waiting).snapshot(segments, halvings)
            if snapshot and snapshot not in found:
                found.add(snapshot)
                yield snapshot


def _waiting(choices: Choices) -> list[int]:
    """The gaps over the op at which most bytes of such gaps wait, in the order in which ops make what they hold."""
    change = [0] * (len(choices.need) + 1)
    for g in choices.free:
        change[choices.start[g] + 1] += choices.bytes[g]
        change[choices.end[g]] -= choices.bytes[g]
    turn, most, held = 0, -1, 0
    for op, more in enumerate(change):
        held += more
        if held > most:
            turn, most = op, held
    made = choices.contents.maker
    over = [g for g in choices.free if choices.start[g] < turn < choices.end[g]]
    return sorted(over, key=lambda g: (made[choices.content[g]], g))


class _Cuts:
    def __init__(self, choices: Choices, waiting: list[int]) -> None:
        self.choices, self.waiting = choices, waiting
        contents = choices.contents
        self.maker = [contents.maker[choices.content[g]] for g in waiting]
        # By position among those that wait, the last position whose op, or one between, reads what it holds.
        last_reader = [0] * len(contents.storage)
        turn = self.maker[-1] + 1 if waiting else 0
        for op in range(turn):
            for need in contents.needs[op]:
                last_reader[need] = op
        self.last_reader = [last_reader[choices.content[g]] for g in waiting]

    def snapshot(self, segments: int, halvings: int) -> Snapshot:
        self.again: dict[int, int] = {}
        parts = self._parts(0, len(self.waiting), segments)
        for first, last in parts[:-1] if segments > 1 else parts:
            border = self._border(first, last)
            self._segment([p for p in range(first, last) if p not in border], halvings)
        return tuple((self.waiting[p], AGAIN, fetch) for p, fetch in sorted(self.again.items()))

    def _parts(self, first: int, last: int, count: int) -> list[tuple[int, int]]:
        """Stretches of about the same bytes."""
        sizes = [self.choices.bytes[self.waiting[p]] for p in range(first, last)]
        total, below, cuts = sum(sizes), 0, [first]
        for p, size in enumerate(sizes, first):
            if below >= total * len(cuts) / count and p > cuts[-1]:
                cuts.append(p)
            below += size
        return list(zip(cuts, [*cuts[1:], last], strict=True))

    def _border(self, first: int, last: int) -> set[int]:
        """The positions in a stretch that ops after it read."""
        after = self.maker[last] if last < len(self.maker) else self.maker[last - 1] + 1
        return {p for p in range(first, last) if self.last_reader[p] >= after}

    def _segment(self, positions: list[int], halvings: int) -> None:
        """Compute a segment again when its first use comes, or only its middle border and the rest half by half."""
        if not positions:
            return
        choices, waiting = self.choices, self.waiting
        due = min(choices.end[waiting[p]] for p in positions)
        middle = len(positions) // 2
        if not halvings or not middle:
            for p in positions:
                self.again[p] = max(due, choices.start[waiting[p]] + 1)
            return
        after = self.maker[positions[middle]]
        border = [p for p in positions[:middle] if self.last_reader[p] >= after]
        for p in border:
            self.again[p] = max(due, choices.start[waiting[p]] + 1)
        held = set(border)
        self._segment(positions[middle:], halvings - 1)
        self._segment([p for p in positions[:middle] if p not in held], halvings - 1)
