"""When copies start and when room is counted on, for a given choice of what leaves.

Copies-out start at once and are counted on only when they should be done by then, as far as there is
room to wait; a copy-in takes its room just in time: so early that it is done by its use if the link
does nothing before it is due, and no earlier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from outofcore.graph import StorageKind
from outofcore.plan import Decision, Residency
from outofcore.planning.model import Model


def copies_needed(model: Model, keep: NDArray[np.bool_], homes: NDArray[np.int64] | None = None) -> list[bool]:
    """For each gap whether offloading it takes a copy-out, its home being out of date by then.

    ``homes`` has for each gap the home that it goes to; None: the first.
    """

    def home_of(g: int) -> int:
        return 0 if homes is None else int(homes[g])

    leaving: dict[int, list[int]] = {}
    at_home: dict[tuple[int, int], int | None] = {}
    for g, info in enumerate(model.gaps):
        storage = info.gap.storage
        leaving.setdefault(storage, [])
        if info.arriving:
            at_home[storage, 0] = 0
        elif not keep[g]:
            leaving[storage].append(g)
            if info.cyclic:
                at_home[storage, home_of(g)] = 0
    needed = [False] * len(model.gaps)
    for storage, gaps in leaving.items():
        if model.graph.storages[storage].kind is StorageKind.INPUT:
            at_home[storage, 0] = 0
        for g in sorted(gaps, key=lambda g: model.gaps[g].gap):
            if at_home.get((storage, home_of(g))) != model.gaps[g].segment:
                needed[g] = True
                at_home[storage, home_of(g)] = model.gaps[g].segment
    return needed


class _Room:
    """Free bytes at each op, taken range by range."""

    def __init__(self, free: NDArray[np.int64]) -> None:
        self.free = free

    def fits_until(self, first: int, last: int, count: int) -> int:
        """The first op in [first, last) at which ``count`` bytes do not fit; ``last`` if they fit at all."""
        short = np.flatnonzero(self.free[first:last] < count)
        return first + int(short[0]) if len(short) else last

    def fits_from(self, first: int, last: int, count: int) -> int:
        """The first op from which on ``count`` bytes fit up to ``last``."""
        short = np.flatnonzero(self.free[first:last] < count)
        return first + int(short[-1]) + 1 if len(short) else first

    def take(self, first: int, last: int, count: int) -> None:
        """Take ``count`` bytes at each op in [first, last)."""
        self.free[first:last] -= count


def schedule(
    model: Model, keep: NDArray[np.bool_], slack: float = 0.0, homes: NDArray[np.int64] | None = None
) -> tuple[Decision, ...]:
    """Decisions for the gaps that are not kept.

    Args:
        model: the step under its limit.
        keep: for each gap whether it is kept; arriving gaps are never kept, whatever it says.
        slack: how much earlier than just in time copies-in take their room, in multiples of their seconds.
        homes: for each gap the home that it goes to, an index into ``costs.homes``; None: the first.
    """
    n = len(model.graph.ops)
    times, total, places = model.times, model.times[-1], model.costs.homes
    if not places:
        return ()
    if homes is None:
        homes = np.zeros(len(model.gaps), dtype=np.int64)
    keep = keep & ~np.array([info.arriving for info in model.gaps], dtype=np.bool_)
    room = _Room(model.free - model.held(keep))
    away = [g for g in range(len(model.gaps)) if not keep[g]]
    dirty = copies_needed(model, keep, homes)
    release: dict[int, int] = {}
    done = [0.0] * len(places)
    for g in sorted(away, key=lambda g: model.gaps[g].gap.start):
        info = model.gaps[g]
        first = info.gap.start + 1
        last = min(info.gap.end, n)
        if info.arriving or not dirty[g]:
            release[g] = first
            continue
        at = int(homes[g])
        done[at] = max(done[at], times[first]) + places[at].out_seconds(info.bytes)
        safe = min(bisect_left(times, done[at]), last)
        release[g] = max(room.fits_until(first, safe, info.bytes), first)
        room.take(first, release[g], info.bytes)

    def seconds_at(index: int) -> float:
        return times[index] if index <= n else total + times[index - n]

    latest: dict[int, float] = {}
    due = [float("inf")] * len(places)
    for g in sorted(away, key=lambda g: -model.gaps[g].gap.end):
        info = model.gaps[g]
        at = int(homes[g])
        seconds = places[at].in_seconds(info.bytes)
        due[at] = min(due[at], seconds_at(info.gap.end)) - seconds
        latest[g] = due[at] - slack * seconds
    decisions: list[Decision] = []
    for g in sorted(away, key=lambda g: (model.gaps[g].gap.end, g)):
        info = model.gaps[g]
        base = n if info.cyclic else 0
        end = info.gap.end - base
        wish = bisect_right(times, latest[g] - (total if info.cyclic else 0.0)) - 1
        first = min(max(wish, 0, 0 if info.cyclic else release[g]), end)
        fetch = room.fits_from(first, end, info.bytes)
        room.take(fetch, end, info.bytes)
        release_by = 0 if info.arriving else min(release[g], n)
        decisions.append(Decision(info.gap, Residency.OFFLOAD, release_by, base + fetch, int(homes[g])))
    return tuple(sorted(decisions, key=lambda d: d.gap))
