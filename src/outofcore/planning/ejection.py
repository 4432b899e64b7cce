"""Lowering a placement by ejection: what stands above a ceiling pushes its way in below it.

Rectangles above the ceiling are taken out. One of them, drawn by lot, goes to the offset where what is in
its way weighs least, and what was in its way is taken out in turn. A rectangle weighs more each time it is
pushed, so that those that are hard to place settle, and the others move around them. Once nothing is left
out, the ceiling is lowered; if a ceiling takes too long, a higher one is tried from where things stand.

After the ejection pool of Nagata & Bräysy, "A powerful route minimization heuristic for the vehicle routing
problem with time windows" (2009), carried over to addresses. The best offset is found exactly, by a sweep
over all offsets: what is in the way changes only where a neighbour begins or ends.

The lots are drawn from a fixed seed and effort is counted in neighbours looked at, not in seconds: the
same rectangles come out the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outofcore.planning.rectangles import FAR, Ints, Rectangles

# What a move costs apart from its neighbours, in neighbours.
_MOVE = 250
# The share of all effort after which a ceiling is given up for a higher one.
_PATIENCE = 0.05
# The most moves for each rectangle until then: where there are few, all there is to find is found soon.
_MOVES_EACH = 100
# How often all ceilings may have failed.
_ROUNDS = 4
# How far towards the goal the first ceiling is, and the least step.
_FIRST_STEP = 0.25
_LEAST_STEP = 1 / 128
# How often the clock is looked at, in moves.
_GLANCES = 64


def improve(
    rectangles: Rectangles,
    offsets: Ints,
    goal: int,
    effort: int,
    deadline: float | None = None,
) -> Ints:
    """Offsets that reach less high, or the same ones.

    Args:
        rectangles: what is placed.
        offsets: a placement.
        goal: the height at which to stop.
        effort: how many neighbours may be looked at, about; 10 million take a second or two.
        deadline: by ``time.monotonic``; where it strikes the result depends on the machine.
    """
    search = _Search(rectangles, offsets, effort, deadline)
    best, height = offsets, rectangles.height(offsets)
    step = _FIRST_STEP
    count = len(rectangles)
    patience = min(int(effort * _PATIENCE), _MOVES_EACH * count * (_MOVE + count))
    rounds = 0
    while height > goal and search.effort > 0 and rounds < _ROUNDS:
        ceiling = max(goal, height - max(1, int((height - goal) * step)))
        search.lower(ceiling)
        if search.settle(patience):
            best = search.offsets.copy()
            height = rectangles.height(best)
            step = min(2 * step, _FIRST_STEP)
        elif step > _LEAST_STEP and ceiling < height - 1:
            step /= 2
        else:  # the ceiling is as good as the height: start again from the best, with what was learnt
            search.offsets[:] = best
            search.out.clear()
            step = _FIRST_STEP
            rounds += 1
    return best


class _Search:
    def __init__(self, rectangles: Rectangles, offsets: Ints, effort: int, deadline: float | None) -> None:
        self.rectangles = rectangles
        self.offsets = offsets.copy()
        self.effort = effort
        self.deadline = deadline
        self.ceiling = 0
        self.out: list[int] = []  # what is not placed
        # Whole numbers, so that sums do not depend on their order. The root: small ones are pushed rather
        # than large ones, but not any number of small ones.
        self.burden = 1 + np.sqrt(rectangles.sizes / rectangles.sizes.max() * (1 << 20)).astype(np.int64)
        self.weights: Ints = self.burden.copy()
        self.draw: Callable[[], float] = random.Random(0).random
        self.moves = 0

    def lower(self, ceiling: int) -> None:
        """Take out what stands above the ceiling; it may be higher than the one before."""
        self.ceiling = ceiling
        above = (self.offsets < FAR) & (self.offsets + self.rectangles.sizes > ceiling)
        for index in np.flatnonzero(above).tolist():
            self.offsets[index] = FAR
            self.out.append(index)

    def settle(self, patience: int) -> bool:
        """Move until everything is placed: False if that takes more effort than there is."""
        last = max(self.effort - patience, 0)
        while self.out:
            if self.effort <= last:
                return False
            self.moves += 1
            if self.deadline is not None and self.moves % _GLANCES == 0 and time.monotonic() > self.deadline:
                self.effort = 0
                return False
            at = int(self.draw() * len(self.out))
            self.out[at], self.out[-1] = self.out[-1], self.out[at]
            self._push_in(self.out.pop())
        return True

    def _push_in(self, index: int) -> None:
        near = self.rectangles.near(index)
        self.effort -= _MOVE + len(near)
        size = int(self.rectangles.sizes[index])
        lows = self.offsets[near]
        highs = lows + self.rectangles.sizes[near]
        weights = self.weights[near]
        base, last = self.rectangles.base, self.ceiling - size
        # Going up, at ``high`` a neighbour is out of the way, and just above ``low - size`` it is in it.
        keys = np.concatenate((2 * (lows - size) + 1, 2 * highs, np.array((2 * base,))))
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        in_the_way = np.cumsum(np.concatenate((weights, -weights, np.zeros(1, np.int64)))[order])
        alignment = int(self.rectangles.alignments[index])
        if alignment == 1:
            begin, end = np.searchsorted(keys, (2 * base, 2 * last + 1))
            places, costs = keys[begin:end] >> 1, in_the_way[begin:end]
        else:
            places = -(-(keys >> 1) // alignment) * alignment
            places = places[(places >= base) & (places <= last)]
            costs = in_the_way[np.searchsorted(keys, 2 * places, side="right") - 1]
        if not len(places):
            # Even alone it does not fit below the ceiling with its alignment: it stays out.
            self.out.append(index)
            return
        least = int(costs.min())
        equals = np.flatnonzero(costs == least)
        chosen = int(equals[0] if least == 0 else equals[int(self.draw() * len(equals))])
        offset = int(places[chosen])
        if least:
            self._eject(near[(lows < offset + size) & (highs > offset)])
        self.offsets[index] = offset

    def _eject(self, pushed: NDArray[np.int32]) -> None:
        self.weights[pushed] += self.burden[pushed]
        self.offsets[pushed] = FAR
        self.out += pushed.tolist()
