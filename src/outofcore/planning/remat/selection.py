"""Which gaps to recompute: a greedy search by single changes.

Whatever costs the fewest seconds per overload removed is dropped, until nothing lies above the limit
(overload: bytes above it, summed over ops). Now and then, and in the end, choices are *settled*: what runs again is
held from an earlier run on where that saves a run and there is room, and kept altogether where it fits after all.
Without that, chains of runs grow with the square of their length, or all live at once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from outofcore.planning.remat.chains import AGAIN, KEPT, Choices

# After how many drops choices are settled.
_SETTLE_EVERY = 10
# How often all gaps are looked at when choices are settled.
_ROUNDS = 4
# Ops of chains that a search may look at: for each gap and for a few more, but no more than the most altogether; of
# very many gaps, so many for each.
_OPS_EACH, _EXTRA, _MOST, _MANY = 1000, 50, 300_000, 150
# A gap whose rate is worse than the next one's by no more than this factor is dropped all the same: rates of similar
# gaps worsen little by little, and to rate them all again and again takes most of the time.
_ABOUT = 1.001

Snapshot = tuple[tuple[int, int, int], ...]


def patience(gaps: int) -> int:
    """Ops of chains that a search over so many gaps may look at."""
    return min(_OPS_EACH * (gaps + _EXTRA), max(_MOST, _MANY * gaps))


def drop(choices: Choices) -> bool:
    """Choose what to compute again.

    Args:
        choices: where to start, and where the result is left.

    Returns:
        Whether everything fits then.
    """
    greedy = Greedy(choices)
    fits = greedy.drop()
    greedy.settle()
    return fits


@dataclass
class Greedy:
    """A search by single changes.

    Attributes:
        choices: what is changed.
        total: overload that is left, in bytes summed over ops.
    """

    choices: Choices
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.enough = self.choices.work + patience(len(self.choices.free))
        self._measure()

    def _measure(self) -> None:
        self.over = self.choices.over()
        self.total = int(self.over.sum())

    def drop(self) -> bool:
        """Drop gap after gap until there is no overload; False if some is left."""
        choices = self.choices
        heap: list[tuple[float, int]] = []
        loaded = np.concatenate(([0], np.cumsum(self.over > 0))).tolist()
        for g in choices.free:
            if choices.kind[g] == KEPT and loaded[choices.end[g]] > loaded[choices.start[g] + 1]:
                found = self._rate(g)
                if found is not None:
                    heapq.heappush(heap, (found[0], g))
        dropped = 0
        while self.total and heap and choices.work < self.enough:
            _, g = heapq.heappop(heap)
            found = self._rate(g)
            if found is None:
                continue
            # Rates hardly ever improve as others are dropped, so what is still about the best now is the best.
            if heap and found[0] > heap[0][0] * _ABOUT:
                heapq.heappush(heap, (found[0], g))
                continue
            choices.set(g, AGAIN, found[1])
            dropped += 1
            if dropped % _SETTLE_EVERY == 0:
                self.settle(keep=False, rounds=1)
            self._measure()
        return self.total == 0

    def _rate(self, g: int) -> tuple[float, int] | None:
        """Seconds per overload removed if a gap is dropped, and before which op it had best come back."""
        choices = self.choices
        if choices.kind[g] != KEPT or not self.over[choices.start[g] + 1 : choices.end[g]].any():
            return None
        before = choices.seconds
        meetings = choices.meetings(g)
        best: tuple[float, int] | None = None
        for fetch in dict.fromkeys((choices.end[g], *meetings[:1], *meetings[-1:])):
            would = choices.would(g, AGAIN, fetch, self.over)
            if would is None:
                continue
            cost, gain = would[0] - before, -would[1]
            if gain > 0 and (best is None or cost / gain < best[0]):
                best = (cost / gain, fetch)
        return best

    def settle(self, *, keep: bool = True, rounds: int = _ROUNDS) -> None:
        """Make every single change that saves seconds and adds no overload.

        Args:
            keep: also keep what runs again.
            rounds: how often to go over all gaps.
        """
        choices = self.choices
        self._measure()
        for _ in range(rounds):
            again = sorted((choices.fetch[g], g) for g in choices.free if choices.kind[g] == AGAIN)
            if choices.work > self.enough or not [g for _, g in again if self._settle_gap(g, keep)]:
                return

    def _settle_gap(self, g: int, keep: bool) -> bool:
        """Whether a gap was changed for the better."""
        choices = self.choices
        if choices.work > self.enough:
            return False
        now, end, before = choices.fetch[g], choices.end[g], choices.seconds
        options = [(KEPT, end)] if keep else []
        options += [(AGAIN, at) for at in (*choices.meetings(g), end) if at != now]
        best: tuple[float, int, int] | None = None
        for kind, fetch in options:
            would = choices.would(g, kind, fetch, self.over, before)
            if would is None:
                continue
            seconds, added = would
            better = seconds < before * (1 - 1e-12) or added < 0
            if added <= 0 and better and (best is None or seconds < best[0]):
                best = (seconds, kind, fetch)
        if best is None:
            return False
        choices.set(g, best[1], best[2])
        self._measure()
        return True
