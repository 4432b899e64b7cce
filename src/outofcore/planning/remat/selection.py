"""Which gaps to compute again: a greedy search by single changes, and simulated annealing.

*Greedy*: whatever costs the fewest seconds per overload removed is dropped, until nothing lies above the limit
(overload: bytes above it, summed over ops). Now and then, and in the end, choices are *settled*: what runs again is
held from an earlier run on where that saves a run and there is room, and kept altogether where it fits after all.
Without that, chains of runs grow with the square of their length, or all live at once.

*Annealing* (Kirkpatrick, Gelatt & Vecchi, "Optimization by simulated annealing", 1983): random changes, accepted the
more readily the earlier. It minimises the seconds that run again, plus for each op a price for every byte above the
limit. Prices rise while an op stays above the limit and fall slowly otherwise, as the multipliers of a Lagrangian
relaxation do, so the search passes through states that do not fit and comes back. Numbers are drawn from a fixed seed,
and effort is counted in
changes: the same state gives the same result.
"""

from __future__ import annotations

import heapq
import math
import random
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
# Temperatures at the start and at the end, in mean seconds of what may run again.
_HOT, _COLD = 0.3, 0.001
# How prices rise and fall, and after how many changes.
_RISE, _FALL, _EVERY = 1.3, 0.97, 50
# How far prices may fall and rise from where they start.
_CHEAPEST, _DEAREST = 1e-2, 1e4
# Ops of chains that a random change may look at, on average.
_WORK = 60

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


def anneal(choices: Choices, changes: int) -> bool:
    """Change things at random and leave the best state found that fits in ``choices``.

    Args:
        choices: where to start, and where the result is left.
        changes: how many to try.

    Returns:
        False, with the choices as they were, if no state that fits was seen.
    """
    snapshot = choices.snapshot()
    best = (choices.seconds, snapshot) if not choices.over().any() else None
    if choices.free:
        best = _Annealing(choices, changes).run(best) or best
    choices.restore(snapshot if best is None else best[1])
    return best is not None


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


class _Annealing:
    def __init__(self, choices: Choices, changes: int) -> None:
        contents, free = choices.contents, choices.free
        self.choices, self.changes = choices, changes
        self.draw = random.Random(0).random
        unit = math.fsum(contents.seconds[contents.maker[choices.content[g]]] for g in free) / len(free)
        area = sum(choices.bytes[g] * (choices.end[g] - choices.start[g]) for g in free) / len(free)
        self.unit = max(unit, 1e-12)
        self.least, self.most = self.unit / area * _CHEAPEST, self.unit / area * _DEAREST
        self.price = np.full(len(choices.held), self.unit / area)

    def run(self, best: tuple[float, Snapshot] | None) -> tuple[float, Snapshot] | None:
        choices, draw = self.choices, self.draw
        over = choices.over()
        fine = float(self.price @ over)
        enough = choices.work + self.changes * _WORK
        for turn in range(self.changes):
            if choices.work > enough:
                break
            if turn % _EVERY == _EVERY - 1:
                self.price *= _FALL
                self.price[over > 0] *= _RISE / _FALL
                np.clip(self.price, self.least, self.most, out=self.price)
                fine = float(self.price @ over)
            option = self._option()
            if option is None:
                continue
            heat = self.unit * _HOT * (_COLD / _HOT) ** (turn / self.changes)
            before = choices.seconds
            leave = -heat * math.log(max(draw(), 1e-12))
            change = choices.set(*option, before + fine + leave)
            if change is None:
                continue
            new_over = choices.over()
            new_fine = float(self.price @ new_over)
            if choices.seconds - before + new_fine - fine > leave:
                choices.undo(change)
                continue
            over, fine = new_over, new_fine
            if fine == 0 and (best is None or choices.seconds < best[0] * (1 - 1e-12)):
                best = (choices.seconds, choices.snapshot())
        return best

    def _option(self) -> tuple[int, int, int] | None:
        """A gap, and something else to do with it than what is done now."""
        choices, draw = self.choices, self.draw
        g = choices.free[int(draw() * len(choices.free))]
        end = choices.end[g]
        now = (choices.kind[g], choices.fetch[g]) if choices.kind[g] == AGAIN else (KEPT, end)
        options = [(KEPT, end), (AGAIN, end)]
        meetings = choices.meetings(g)
        if meetings:
            options.append((AGAIN, meetings[int(draw() * len(meetings))]))
        options = [option for option in options if option != now]
        if not options:
            return None
        return (g, *options[int(draw() * len(options))])
