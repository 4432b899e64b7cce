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
from collections.abc import Iterable
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
    keep = keep & ~np.array([info.arriving for info in model.gaps], dtype=np.bool_)
    found = _Run(model, model.home, keep, flowing, None, slack).run()
    for _ in range(runs - 1):
        found = _Run(model, model.home, keep, found.flowing, found.starts, slack).run()
    return found


@dataclass
class _Run:
    model: Model
    home: Home
    keep: NDArray[np.bool_]
    reserved: Ints
    starts: tuple[float, ...] | None  # when each op started in the run before
    slack: float
    release: dict[int, int] = field(default_factory=dict[int, int])
    fetch: dict[int, int] = field(default_factory=dict[int, int])
    waited: dict[int, float] = field(default_factory=dict[int, float])

    def _wait(self, now: float, until: float, g: int) -> float:
        if until > now:
            self.waited[g] = self.waited.get(g, 0.0) + until - now
            return until
        return now

    def run(self) -> Rehearsal:
        model, home = self.model, self.home
        n = len(model.graph.ops)
        room: Ints = model.free - model.held(self.keep)  # for each op what is left for what is on its way
        spare: Ints = room - self.reserved
        away = [g for g in range(len(model.gaps)) if not self.keep[g]]
        dirty = copies_needed(model, self.keep)
        leaving: list[list[int]] = [[] for _ in range(n)]
        for g in away:
            if not model.gaps[g].arriving:
                leaving[model.gaps[g].gap.start].append(g)
        ends = {g: model.gaps[g].gap.end - (n if model.gaps[g].cyclic else 0) for g in away}
        coming = deque(sorted(away, key=lambda g: (ends[g], g)))
        soonest = self._soonest(coming, ends)
        began: list[float] = []
        flowing: Ints = np.zeros(n, dtype=np.int64)
        pending: deque[tuple[float, int]] = deque()  # when a copy-out is done, and of which gap
        outgoing = ahead = 0  # bytes that leave, and that have come for later ops
        out_done = in_done = now = 0.0
        arrived: dict[int, float] = {}
        for op in range(n):
            while pending and pending[0][0] <= now:
                gap = pending.popleft()[1]
                outgoing -= model.gaps[gap].bytes
                self.release[gap] = op
            # What there is room for comes; what this op needs has to, even if it waits for room.
            while coming:
                g = coming[0]
                info, end = model.gaps[g], ends[g]
                if end > op:
                    if soonest and self.starts and self.starts[op + 1] <= soonest[g]:
                        break
                    if not info.cyclic and not info.arriving and g not in self.release and info.gap.start < op:
                        break  # it is still leaving
                    if info.gap.start >= op and not info.cyclic:
                        break
                    if int(room[op]) - outgoing - ahead < info.bytes or int(spare[op:end].min()) < info.bytes:
                        break
                    ahead += info.bytes
                    spare[op:end] -= info.bytes
                elif g not in self.release and not info.cyclic and not info.arriving:
                    while g not in self.release:
                        done, gap = pending.popleft()
                        now = self._wait(now, done, gap)
                        outgoing -= model.gaps[gap].bytes
                        self.release[gap] = op
                coming.popleft()
                self.fetch[g] = op
                in_done = max(in_done, now) + home.in_seconds(info.bytes)
                arrived[g] = in_done
            for g in [g for g in arrived if ends[g] == op]:
                if self.fetch[g] < op:
                    ahead -= model.gaps[g].bytes
                now = self._wait(now, arrived.pop(g), g)
            flowing[op] = outgoing
            while pending and outgoing + ahead > int(room[op]):
                done, gap = pending.popleft()
                now = self._wait(now, done, gap)
                outgoing -= model.gaps[gap].bytes
                self.release[gap] = op
            began.append(now)
            now += model.costs.ops[op].seconds
            for g in leaving[op]:
                if not dirty[g]:
                    self.release[g] = op + 1
                    continue
                out_done = max(out_done, now) + home.out_seconds(model.gaps[g].bytes)
                pending.append((out_done, g))
                outgoing += model.gaps[g].bytes
        copied = sum(home.in_seconds(model.gaps[g].bytes) for g in away)
        copied += sum(home.out_seconds(model.gaps[g].bytes) for g in away if dirty[g])
        return Rehearsal(self._decisions(away), max(now, out_done), flowing, self.waited, copied, (*began, now))

    def _soonest(self, coming: Iterable[int], ends: dict[int, int]) -> dict[int, float]:
        """When each copy-in may start: so much earlier than it has to, by the times of the run before."""
        found: dict[int, float] = {}
        due = float("inf")
        for g in reversed(list(coming)) if self.starts else ():
            seconds = self.home.in_seconds(self.model.gaps[g].bytes)
            due = min(due, self.starts[ends[g]] if self.starts else 0.0) - seconds
            found[g] = due - self.slack * seconds
        return found

    def _decisions(self, away: list[int]) -> tuple[Decision, ...]:
        n = len(self.model.graph.ops)
        found: list[Decision] = []
        for g in away:
            info = self.model.gaps[g]
            fetch = self.fetch[g] + (n if info.cyclic else 0)
            release = 0 if info.arriving else min(self.release.get(g, n), n, fetch)
            found.append(Decision(info.gap, Residency.OFFLOAD, max(release, info.gap.start + 1), fetch))
        return tuple(sorted(found, key=lambda decision: decision.gap))
