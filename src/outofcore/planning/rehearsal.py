"""When copies start and when room is counted on, found by running through the step once with bytes counted.

Copies-out start at once, one after the other; an op whose room they still take waits for them. Copies-in go in the
order in which they are needed, each before the first op from which on its room is free up to its use; what is
still flowing out then keeps its room. So what runs ahead never makes an op wait that would not have waited
anyway, and the links stand still only where there is no room.

What flows out when is not known before the end; so the step is run through twice, the second time with what flowed
the first time in mind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outofcore.costs import Home
from outofcore.plan import Decision, Residency
from outofcore.planning.model import Ints, Model
from outofcore.planning.timing import copies_needed

# How much earlier than just in time copies-in may start, in multiples of their seconds.
SLACK = 1.5


@dataclass(frozen=True)
class Rehearsal:
    """A run through the step.

    Attributes:
        decisions: for the gaps that are not kept.
        seconds: that the step took.
        flowing: for each op the bytes that were still to leave when it started.
        waited: for gaps that ops waited for the seconds of it.
        copied: seconds of all copies.
    """

    decisions: tuple[Decision, ...]
    seconds: float
    flowing: Ints
    waited: dict[int, float]
    copied: float
    starts: tuple[float, ...]  # of each op


def rehearse(model: Model, keep: NDArray[np.bool_], runs: int = 2, slack: float = SLACK) -> Rehearsal:
    """Run through a step.

    Args:
        model: the step under its limit; with a home.
        keep: for each gap whether it is kept; arriving gaps are never kept, whatever it says.
        runs: how often.
        slack: how much earlier than just in time copies-in may start, in multiples of their seconds.
    """
    flowing: Ints = np.zeros(len(model.graph.ops), dtype=np.int64)
    if model.home is None:
        return Rehearsal((), model.times[-1], flowing, {}, 0.0, model.times)
    scene = _Scene.of(model, model.home, keep & ~model.arriving)
    found = _Run(scene, flowing, None, slack).run()
    for _ in range(runs - 1):
        found = _Run(scene, found.flowing, found.starts, slack).run()
    return found


def rehearse_again(
    model: Model, keep: NDArray[np.bool_], before: Rehearsal, most: float, weight: float
) -> Rehearsal | None:
    """Run through a step once, with what flowed in an earlier rehearsal of about the same choice in mind.

    Args:
        model: the step under its limit; with a home.
        keep: for each gap whether it is kept; arriving gaps are never kept, whatever it says.
        before: a rehearsal.
        most: None is returned as soon as the seconds are sure to be more than this, those of copies added.
        weight: what a second of copying counts there.
    """
    if model.home is None:
        return before
    scene = _Scene.of(model, model.home, keep & ~model.arriving)
    most -= weight * scene.copied
    found = _Run(scene, before.flowing, before.starts, SLACK, most).run()
    return found if found.seconds <= most else None


@dataclass(frozen=True)
class _Scene:
    """What is the same in all runs: lists, since a run looks at single gaps and ops all the time."""

    model: Model
    room: Ints  # for each op what is left for what is on its way
    away: list[int]
    dirty: list[bool]  # of each gap whether it takes a copy-out to leave
    leaving: list[list[int]]  # by the op after which they leave
    due: list[list[int]]  # by the op that needs them
    coming: list[int]  # in the order in which they are needed
    start: list[int]
    end: list[int]  # the op that needs it, of a gap that lasts into the next step too
    size: list[int]
    at_home: list[bool]  # of each gap whether it is at home when the step begins
    out_seconds: list[float]
    in_seconds: list[float]
    copied: float

    @staticmethod
    def of(model: Model, home: Home, keep: NDArray[np.bool_]) -> _Scene:
        n = len(model.graph.ops)
        away = [g for g, kept in enumerate(keep.tolist()) if not kept]
        dirty = copies_needed(model, keep)
        gaps = model.gaps
        end = [info.gap.end - n if info.cyclic else info.gap.end for info in gaps]
        leaving: list[list[int]] = [[] for _ in range(n)]
        due: list[list[int]] = [[] for _ in range(n)]
        out_seconds, in_seconds = [0.0] * len(gaps), [0.0] * len(gaps)
        for g in away:
            info = gaps[g]
            if not info.arriving:
                leaving[info.gap.start].append(g)
            due[end[g]].append(g)
            out_seconds[g], in_seconds[g] = home.out_seconds(info.bytes), home.in_seconds(info.bytes)
        copied = sum(in_seconds[g] for g in away) + sum(out_seconds[g] for g in away if dirty[g])
        return _Scene(
            model,
            model.free - model.held(keep),
            away,
            dirty,
            leaving,
            due,
            [g for gaps_due in due for g in gaps_due],
            [info.gap.start for info in gaps],
            end,
            [info.bytes for info in gaps],
            [info.cyclic or info.arriving for info in gaps],
            out_seconds,
            in_seconds,
            copied,
        )


@dataclass
class _Run:
    scene: _Scene
    reserved: Ints
    begun: tuple[float, ...] | None  # when each op started in the run before
    slack: float
    most: float = float("inf")  # the run breaks off where it has taken longer
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

    def run(self) -> Rehearsal:
        scene, release, begun = self.scene, self.release, self.begun
        start, end, size, at_home = scene.start, scene.end, scene.size, scene.at_home
        seconds = [cost.seconds for cost in scene.model.costs.ops]
        room: list[int] = scene.room.tolist()
        spare: Ints = scene.room - self.reserved
        coming, soonest = deque(scene.coming), self._soonest()
        pending: deque[tuple[float, int]] = deque()  # when a copy-out is done, and of which gap
        outgoing = ahead = 0  # bytes that leave, and that have come for later ops
        out_done = in_done = now = 0.0
        arrived: dict[int, float] = {}
        for op, own in enumerate(seconds):
            if now > self.most:
                return Rehearsal((), now, self.reserved, {}, scene.copied, ())
            while pending and pending[0][0] <= now:
                gap = pending.popleft()[1]
                outgoing -= size[gap]
                release[gap] = op
            # What there is room for comes; what this op needs has to, even if it waits for room.
            while coming:
                g = coming[0]
                if end[g] > op:
                    if begun is not None and begun[op + 1] <= soonest[g]:
                        break
                    if not at_home[g] and (start[g] >= op or g not in release):
                        break  # it is not there yet, or still leaving
                    if room[op] - outgoing - ahead < size[g] or int(spare[op : end[g]].min()) < size[g]:
                        break
                    ahead += size[g]
                    spare[op : end[g]] -= size[g]
                elif g not in release and not at_home[g]:
                    while g not in release:
                        done, gap = pending.popleft()
                        now = self._wait(now, done, gap)
                        outgoing -= size[gap]
                        release[gap] = op
                coming.popleft()
                self.fetch[g] = op
                in_done = max(in_done, now) + scene.in_seconds[g]
                arrived[g] = in_done
            for g in scene.due[op]:
                if self.fetch[g] < op:
                    ahead -= size[g]
                now = self._wait(now, arrived[g], g)
            self.flowing.append(outgoing)
            while pending and outgoing + ahead > room[op]:
                done, gap = pending.popleft()
                now = self._wait(now, done, gap)
                outgoing -= size[gap]
                release[gap] = op
            self.starts.append(now)
            now += own
            for g in scene.leaving[op]:
                if not scene.dirty[g]:
                    release[g] = op + 1
                    continue
                out_done = max(out_done, now) + scene.out_seconds[g]
                pending.append((out_done, g))
                outgoing += size[g]
        self.starts.append(now)
        return Rehearsal(
            self._decisions(),
            max(now, out_done),
            np.array(self.flowing, dtype=np.int64),
            self.waited,
            scene.copied,
            tuple(self.starts),
        )

    def _soonest(self) -> dict[int, float]:
        """When each copy-in may start: so much earlier than it has to, by the times of the run before."""
        found: dict[int, float] = {}
        due = float("inf")
        for g in reversed(self.scene.coming) if self.begun is not None else ():
            seconds = self.scene.in_seconds[g]
            due = min(due, self.begun[self.scene.end[g]] if self.begun is not None else 0.0) - seconds
            found[g] = due - self.slack * seconds
        return found

    def _decisions(self) -> tuple[Decision, ...]:
        model = self.scene.model
        n = len(model.graph.ops)
        found: list[Decision] = []
        for g in self.scene.away:
            info = model.gaps[g]
            fetch = self.fetch[g] + (n if info.cyclic else 0)
            release = 0 if info.arriving else min(self.release.get(g, n), n, fetch)
            found.append(Decision(info.gap, Residency.OFFLOAD, max(release, info.gap.start + 1), fetch))
        return tuple(sorted(found, key=lambda decision: decision.gap))
