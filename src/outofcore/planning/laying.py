"""When copies have their room, found by walking through the step once forwards and once backwards.

Forwards: what leaves waits for its link, each in turn, and holds its room until its copy is done. Where an
op finds too little room, the clock waits for the copy that is done first, whatever its link. Backwards in
time a copy in is the same: it takes its turn on the link from when its bytes are due, and frees its room when
it would have to start; where an op lacks room the clock waits likewise. So a stall lasts as long as the bytes
that are lacking, and not as long as the queue behind them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outofcore.plan import Decision, Residency
from outofcore.planning.model import Model
from outofcore.planning.timing import copies_needed


def lay(
    model: Model, keep: NDArray[np.bool_], homes: NDArray[np.int64], spare: NDArray[np.float64]
) -> tuple[Decision, ...]:
    """Decisions for the gaps that are not kept.

    Args:
        model: the step under its limit.
        keep: for each gap whether it is kept; arriving gaps are never kept, whatever it says.
        homes: for each gap the home that it goes to, an index into ``costs.homes``.
        spare: for each op the bytes that copies out should leave to copies in.
    """
    n = len(model.graph.ops)
    places = model.costs.homes
    keep = keep & ~np.array([info.arriving for info in model.gaps], dtype=np.bool_)
    free = model.free - model.held(keep)
    away = [g for g in range(len(model.gaps)) if not keep[g]]
    dirty = copies_needed(model, keep, homes)
    seconds = [cost.seconds for cost in model.costs.ops]
    release = {g: 0 if model.gaps[g].arriving else model.gaps[g].gap.start + 1 for g in away}

    walk = _Walk(model, free - spare, len(places))
    leaving: dict[int, list[int]] = defaultdict(list)
    for g in sorted(away, key=lambda g: model.gaps[g].gap):
        if dirty[g]:
            leaving[model.gaps[g].gap.start].append(g)
    stalls = [0.0] * (n + 1)
    for i in range(n):
        stalls[i] = walk.pass_op(i, seconds[i], lambda g: min(model.gaps[g].gap.end, n), i)
        for g in leaving[i]:
            walk.enqueue(g, int(homes[g]), places[int(homes[g])].out_seconds(model.gaps[g].bytes))
    release |= walk.left
    for g in walk.waiting():
        release[g] = min(model.gaps[g].gap.end, n)
    for g in away:
        for first, last in _out_room(model, g, release[g]):
            free[first:last] -= model.gaps[g].bytes

    back = _Walk(model, free, len(places))
    coming: dict[int, list[int]] = defaultdict(list)
    for g in sorted(away, key=lambda g: (-model.gaps[g].gap.end, -g)):
        coming[model.gaps[g].gap.end % n].append(g)

    def earliest(g: int) -> int:
        return 0 if model.gaps[g].cyclic else release[g]

    for i in range(n - 1, -1, -1):
        back.pass_op(i, seconds[i], earliest, i + 1)
        back.clock += stalls[i]
        for g in coming[i]:
            back.enqueue(g, int(homes[g]), places[int(homes[g])].in_seconds(model.gaps[g].bytes))
    fetch = {g: earliest(g) for g in away} | back.left
    decisions: list[Decision] = []
    for g in away:
        info = model.gaps[g]
        base = n if info.cyclic else 0
        first = min(max(fetch[g], earliest(g)), info.gap.end - base)
        release_by = 0 if info.arriving else min(release[g], n)
        decisions.append(Decision(info.gap, Residency.OFFLOAD, release_by, base + first, int(homes[g])))
    return tuple(sorted(decisions, key=lambda d: d.gap))


def _out_room(model: Model, g: int, release: int) -> tuple[tuple[int, int], ...]:
    info = model.gaps[g]
    return () if info.arriving else ((info.gap.start + 1, release),)


class _Walk:
    """A clock that passes the ops one by one, and copies that hold room until their turn is over."""

    def __init__(self, model: Model, free: NDArray[np.int64] | NDArray[np.float64], links: int) -> None:
        self.model, self.free = model, free
        self.clock = 0.0
        self.left: dict[int, int] = {}
        self._idle = [0.0] * links  # when each link has done all that is queued
        self._queues: list[deque[tuple[float, int]]] = [deque() for _ in range(links)]
        self._held = 0

    def enqueue(self, g: int, link: int, seconds: float) -> None:
        """A gap's copy may start now."""
        self._idle[link] = max(self._idle[link], self.clock) + seconds
        self._queues[link].append((self._idle[link], g))
        self._held += self.model.gaps[g].bytes

    def waiting(self) -> list[int]:
        """The gaps whose copies are not over."""
        return [g for queue in self._queues for _, g in queue]

    def pass_op(self, i: int, seconds: float, at_most: Callable[[int], int], note: int) -> float:
        """Pass op ``i``, after whatever has to end before it; returns for how long that took.

        ``left`` notes ``note`` for each gap whose copy is over; one is over in any case when ``note`` has come
        to ``at_most`` of it.
        """
        before = self.clock
        for queue in self._queues:
            while queue and queue[0][0] <= self.clock:
                self._leave(queue, note)
            for place in [place for place, (_, g) in enumerate(queue) if at_most(g) == note][::-1]:
                queue.rotate(-place)
                self._leave(queue, note)
                queue.rotate(place)
        while self._held > self.free[i]:
            queues = [queue for queue in self._queues if queue]
            if not queues:
                break
            first = min(queues, key=lambda queue: queue[0][0])
            self.clock = max(self.clock, first[0][0])
            self._leave(first, note)
        stalled = self.clock - before
        self.clock += seconds
        return stalled

    def _leave(self, queue: deque[tuple[float, int]], note: int) -> None:
        _, g = queue.popleft()
        self.left[g] = note
        self._held -= self.model.gaps[g].bytes
