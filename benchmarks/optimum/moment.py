"""Partial schedules: locations of storages, free times of queues and bytes, and their history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from outofcore.plan import Residency


class Location(IntEnum):
    NOWHERE = 0  # not yet created, or dead
    RESIDENT = 1  # resident, or being fetched
    OFFLOADED = 2  # offloaded, or being evicted
    DROPPED = 3  # to be recomputed


@dataclass(frozen=True, slots=True)
class Event:
    """An action that allocated memory: a copy-in (OFFLOAD), reruns (RECOMPUTE) or an op (KEEP).

    Attributes:
        storages: the fetched storage; the recomputed storages; or pairs of an op's storages and their residencies.
        freed: for an op: pairs of time and storage at which evicted bytes were freed.
        pinned: for reruns: storages read while being copied out.
    """

    residency: Residency
    storages: Any
    op: int
    start: float
    freed: tuple[tuple[float, int], ...] = ()
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A partial schedule; ``op`` is the next op.

    Attributes:
        home: version of each storage at home; -1: no version.
        initially_offloaded: persistent storages that are at home at the start and end of the step.
        last: time of the last allocation.
        done, in_free, out_free: times at which the compute, copy-in and copy-out queues are free.
        arrive, ready: ends of each storage's copy-in and copy-out.
        written: time at which each storage's resident bytes were created and can be copied out.
        held: bytes allocated at ``last``.
        frees: pairs of time and bytes to be freed, in order.
        penalty: seconds by which the choices exceed the linear program's optimum.
        pinned: frees that are delayed to the end of the next op, because reruns read these blocks.
        replayed: 1 after reruns since the last op.
        event: the action since ``before``, the previous moment.
    """

    op: int
    places: tuple[Location, ...]
    home: tuple[int, ...]
    initially_offloaded: frozenset[int]
    last: float
    done: float
    in_free: float
    out_free: float
    arrive: tuple[float, ...]
    ready: tuple[float, ...]
    written: tuple[float, ...]
    held: int
    frees: tuple[tuple[float, int], ...]
    penalty: float
    pinned: tuple[tuple[float, int], ...] = ()
    finished: bool = False
    replayed: int = 0
    before: Moment | None = None
    event: Event | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for moments that differ only in times."""
        return (self.op, self.places, self.home, self.initially_offloaded, len(self.pinned))

    def dominates(self, other: Moment) -> bool:
        """Return whether no time of this moment is later than in another moment with the same key."""
        if self.last > other.last or self.done > other.done:
            return False
        if self.in_free > other.in_free or self.out_free > other.out_free:
            return False
        if any(a > b for a, b in zip(self.arrive, other.arrive, strict=True)):
            return False
        if any(a > b for a, b in zip(self.ready, other.ready, strict=True)):
            return False
        if any(a > b for a, b in zip(self.written, other.written, strict=True)):
            return False
        times = [other.last, *(time for time, _ in other.frees)]
        return all(_allocated_at(self, time) <= _allocated_at(other, time) for time in times)


def _allocated_at(moment: Moment, time: float) -> int:
    return moment.held - sum(count for free_time, count in moment.frees if free_time <= time)


def free_at(moment: Moment, earliest: float, max_bytes: int) -> float | None:
    """Return the first time from ``earliest`` at which at most ``max_bytes`` bytes are allocated, or None."""
    allocated = moment.held
    if allocated <= max_bytes:
        return earliest
    for time, count in moment.frees:
        allocated -= count
        if allocated <= max_bytes:
            return max(earliest, time)
    return None


def advance(
    moment: Moment, last: float, event: Event | None, *, frees: Sequence[tuple[float, int]] = (), **changes: Any
) -> Moment:
    """Return the moment after an allocation at ``last``, without frees up to then."""
    pending = sorted([*moment.frees, *(item for item in frees if item[1])])
    allocated = changes.pop("held", moment.held) - sum(count for time, count in pending if time <= last)
    written, out_free = changes.pop("written", moment.written), changes.get("out_free", moment.out_free)
    arrive, ready = changes.pop("arrive", moment.arrive), changes.pop("ready", moment.ready)
    return replace(
        moment,
        last=last,
        held=allocated,
        frees=tuple(item for item in pending if item[0] > last),
        arrive=tuple(time if time > last else 0.0 for time in arrive),
        ready=tuple(time if time > last else 0.0 for time in ready),
        written=tuple(time if time > out_free else 0.0 for time in written),
        before=moment if event is not None else moment.before,
        event=event if event is not None else moment.event,
        **changes,
    )
