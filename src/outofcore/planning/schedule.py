"""Decide when copies run under ``auto``: when each eviction frees its room and when each prefetch takes it.

``polish`` may change single copies of a small step afterwards; other policies decide for themselves. ``lowering.waits``
then derives what each instruction waits for.

The schedule is found by running through the step once with times and bytes counted. Copies out start at once, one after
the other on the link to their home; an op whose room they still take waits for them. Copies in go in the order in which
they are needed, each before the first op from which on its room is free up to its use; what is still flowing out then
keeps its room. So a prefetch never makes an op wait that would not have waited anyway, and a link is idle only where
there is no room.

When each op starts, and what still flows out then, is not known before the end. So the step is run through twice, the
second time with the first in mind: prefetches then start no earlier than they need to, with some slack.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf

import numpy as np

from outofcore.plan import Decision, Residency
from outofcore.planning.problem import KEPT, Ints, Problem

# A schedule that is no shorter than this, as a share of the one before, ends the passes.
_SHORTER = 0.9999


@dataclass(frozen=True)
class Schedule:
    """The copies of a choice, and what a step then takes.

    Attributes:
        decisions: for the gaps that are not kept.
        seconds: of the step.
        copied: seconds of all copies.
        waited: for gaps that ops waited for, the seconds of that.
        flowing: shape (ops,), bytes that are still to leave when each op starts.
        starts: shape (ops + 1,), seconds at which each op starts, and the last one ends.
    """

    decisions: tuple[Decision, ...]
    seconds: float
    copied: float
    waited: dict[int, float]
    flowing: Ints
    starts: tuple[float, ...]


def schedule(
    problem: Problem, choice: Ints, slack: float, before: Schedule | None = None, most: float = inf, weight: float = 0.0
) -> Schedule | None:
    """Schedule the copies of a choice.

    Args:
        problem: the step under its limit.
        choice: shape (gaps,), where each gap's bytes are; must fit (see ``Problem.held``).
        slack: how much earlier than just in time a copy in may start, in multiples of its own seconds.
        before: of about the same choice, to have in mind; None: the step is run through once more to find it.
        most: seconds of the step and ``weight`` times those of its copies.
        weight: of copies, in what is compared with ``most``.

    Returns:
        None as soon as the step is sure to take more than ``most``.
    """
    scene = _Scene.of(problem, choice)
    most -= weight * scene.copied
    if before is None:
        flowing: Ints = np.zeros(len(problem.graph.ops), dtype=np.int64)
        before = _Walk(scene, flowing, None, slack, inf).run()
    found = _Walk(scene, before.flowing, before.starts, slack, most).run()
    return found if found.seconds <= most else None


def settled(problem: Problem, choice: Ints, slack: float, passes: int) -> Schedule | None:
    """The schedule of a choice, made again with the last one in mind for as long as it gets shorter.

    Args:
        problem: the step under its limit.
        choice: shape (gaps,), where each gap's bytes are; must fit.
        slack: see ``schedule``.
        passes: schedules at most.
    """
    best = schedule(problem, choice, slack)
    for _ in range(passes - 1):
        if best is None or not best.waited:
            break
        found = schedule(problem, choice, slack, best, best.seconds)
        if found is None or found.seconds >= best.seconds * _SHORTER:
            break
        best = found
    return best


@dataclass(frozen=True)
class _Scene:
    """What all walks through the step share; lists, since a walk looks at single gaps and ops all the time."""

    problem: Problem
    room: Ints  # shape (ops,), bytes left for what is on its way
    away: list[int]
    where: list[int]  # by gap, its home
    dirty: list[bool]  # by gap, whether it leaves with a copy
    leaving: list[list[int]]  # by op, the gaps that begin after it
    due: list[list[int]]  # by op, the gaps that it needs back
    coming: list[list[int]]  # by home, gaps in the order in which they are needed
    start: list[int]
    end: list[int]  # the op that needs it; of a gap over the end of the step, in the next one
    size: list[int]
    at_home: list[bool]  # by gap, whether it is at home when the step begins
    out_seconds: list[float]
    in_seconds: list[float]
    copied: float

    @staticmethod
    def of(problem: Problem, choice: Ints) -> _Scene:
        n, gaps, homes = len(problem.graph.ops), problem.gaps, problem.homes
        where: list[int] = choice.tolist()
        away = [g for g, home in enumerate(where) if home != KEPT]
        dirty = problem.copies_needed(choice)
        start, end, size, at_home = problem.columns
        leaving: list[list[int]] = [[] for _ in range(n)]
        due: list[list[int]] = [[] for _ in range(n)]
        out_seconds, in_seconds = [0.0] * len(gaps), [0.0] * len(gaps)
        for g in away:
            info = gaps[g]
            home = homes[where[g]] if homes else None
            if not info.arriving:
                leaving[info.gap.start].append(g)
            if info.fetched:
                due[end[g]].append(g)
                in_seconds[g] = home.in_seconds(info.copied) if home else 0.0
            out_seconds[g] = home.out_seconds(info.copied) if home and dirty[g] else 0.0
        coming: list[list[int]] = [[] for _ in range(max(len(homes), 1))]
        for gaps_due in due:
            for g in gaps_due:
                coming[where[g]].append(g)
        return _Scene(
            problem,
            problem.free - problem.held(choice == KEPT),
            away,
            where,
            dirty,
            leaving,
            due,
            coming,
            start,
            end,
            size,
            at_home,
            out_seconds,
            in_seconds,
            sum(in_seconds[g] + out_seconds[g] for g in away),
        )


@dataclass
class _Walk:
    scene: _Scene
    reserved: Ints  # shape (ops,), bytes that copies in leave to copies out
    begun: tuple[float, ...] | None  # when each op started in the walk before
    slack: float
    most: float  # seconds after which the walk breaks off
    release: dict[int, int] = field(default_factory=dict[int, int])
    fetch: dict[int, int] = field(default_factory=dict[int, int])
    waited: dict[int, float] = field(default_factory=dict[int, float])
    starts: list[float] = field(default_factory=list[float])
    flowing: list[int] = field(default_factory=list[int])

    def _wait(self, now: float, until: float, g: int) -> float:
        if until > now:
            self.waited[g] = self.waited.get(g, 0.0) + until - now
            return until
        return now

    def run(self) -> Schedule:
        scene, release, fetch, begun = self.scene, self.release, self.fetch, self.begun
        start, end, size, at_home, where = scene.start, scene.end, scene.size, scene.at_home, scene.where
        room: list[int] = scene.room.tolist()
        spare: Ints = scene.room - self.reserved
        lanes, soonest = [deque(line) for line in scene.coming if line], self._soonest()
        out_done, in_done = [0.0] * len(scene.coming), [0.0] * len(scene.coming)
        pending: list[tuple[float, int]] = []  # a heap: when a copy out is done, and of which gap
        outgoing = ahead = 0  # bytes that leave, and that have come for later ops
        now = 0.0
        arrived: dict[int, float] = {}
        for op, cost in enumerate(scene.problem.costs.ops):
            if now > self.most:
                return Schedule((), inf, scene.copied, {}, self.reserved, ())
            while pending and pending[0][0] <= now:
                gap = heapq.heappop(pending)[1]
                outgoing -= size[gap]
                release[gap] = op
            # What there is room for comes; what this op needs has to, even if it waits for room.
            for coming in lanes:
                while coming:
                    g = coming[0]
                    if end[g] > op:
                        if begun is not None and begun[op + 1] <= soonest[g]:
                            break
                        if not at_home[g] and (start[g] >= op or g not in release):
                            break  # it has not left yet, or is still leaving
                        if room[op] - outgoing - ahead < size[g] or int(spare[op : end[g]].min()) < size[g]:
                            break
                        ahead += size[g]
                        spare[op : end[g]] -= size[g]
                    elif g not in release and not at_home[g]:
                        while g not in release:
                            done, gap = heapq.heappop(pending)
                            now = self._wait(now, done, gap)
                            outgoing -= size[gap]
                            release[gap] = op
                    coming.popleft()
                    fetch[g] = op
                    home = where[g]
                    in_done[home] = max(in_done[home], now) + scene.in_seconds[g]
                    arrived[g] = in_done[home]
            for g in scene.due[op]:
                if fetch[g] < op:
                    ahead -= size[g]
                now = self._wait(now, arrived[g], g)
            self.flowing.append(outgoing)
            while pending and outgoing + ahead > room[op]:
                done, gap = heapq.heappop(pending)
                now = self._wait(now, done, gap)
                outgoing -= size[gap]
                release[gap] = op
            self.starts.append(now)
            now += cost.seconds
            for g in scene.leaving[op]:
                if not scene.dirty[g]:
                    release[g] = op + 1
                    continue
                home = where[g]
                out_done[home] = max(out_done[home], now) + scene.out_seconds[g]
                heapq.heappush(pending, (out_done[home], g))
                outgoing += size[g]
        self.starts.append(now)
        return Schedule(
            self._decisions(),
            max(now, *out_done),
            scene.copied,
            self.waited,
            np.array(self.flowing, dtype=np.int64),
            tuple(self.starts),
        )

    def _soonest(self) -> dict[int, float]:
        """When each copy in may start: just in time by the walk before, and earlier by the slack."""
        found: dict[int, float] = {}
        if self.begun is None:
            return found
        for line in self.scene.coming:
            due = inf
            for g in reversed(line):
                seconds = self.scene.in_seconds[g]
                due = min(due, self.begun[self.scene.end[g]]) - seconds
                found[g] = due - self.slack * seconds
        return found

    def _decisions(self) -> tuple[Decision, ...]:
        problem, where = self.scene.problem, self.scene.where
        n = len(problem.graph.ops)
        found: list[Decision] = []
        for g in self.scene.away:
            info = problem.gaps[g]
            fetch = (self.fetch[g] + (n if info.cyclic else 0)) if info.fetched else info.gap.end
            release = 0 if info.arriving else max(min(self.release.get(g, n), n, fetch), info.gap.start + 1)
            found.append(Decision(info.gap, Residency.OFFLOAD, release, fetch, where[g]))
        return tuple(sorted(found, key=lambda decision: decision.gap))
