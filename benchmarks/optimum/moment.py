"""A partial schedule: where everything is, when the queues and the bytes are free, and how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from outofcore.plan import Residency


class Place(IntEnum):
    """Where the bytes of a storage are."""

    NOWHERE = 0  # not made yet, or used no more
    HERE = 1  # on the device, or on the way to it
    AWAY = 2  # at home, or on the way there
    DROPPED = 3  # to be computed again


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took room.

    Attributes:
        what: OFFLOAD: a copy-in; RECOMPUTE: runs that make storages again; KEEP: an op.
        storages: the storage; the storages; of an op, the storages with what becomes of each.
        op: the op, or that before which it happens.
        start: seconds from the start of the step.
        gone: of an op: when the bytes of which storage have left.
        pinned: of runs: what they read from where it was being copied out.
    """

    what: Residency
    storages: Any
    op: int
    start: float
    gone: tuple[tuple[float, int], ...] = ()
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A partial schedule.

    Attributes:
        op: the next op.
        places: for each storage where it is.
        home: for each storage the version at its home; -1: none.
        begun: persistent storages that were at home when the step began, and will be when it ends.
        last: when room was last taken.
        done: when the compute queue is free.
        in_free: when the copy-in queue is free.
        out_free: when the copy-out queue is free.
        arrive: for each storage when its copy-in is done.
        ready: for each storage when its copy-out is done.
        written: for each storage when its bytes were made that are on the device: from then on they can be copied out.
        held: bytes taken at ``last``.
        frees: when how many of them come back, in order.
        penalty: seconds by which the choices so far are dearer than the linear program's.
        pinned: bytes that are read where they are copied out from, before the next op: they come back after it.
        finished: all ops are done.
        replayed: 1 if ops ran again since the last op.
        before: how it came about.
        event: likewise.
    """

    op: int
    places: tuple[Place, ...]
    home: tuple[int, ...]
    begun: frozenset[int]
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
        """The same for moments that differ in nothing but times."""
        return (self.op, self.places, self.home, self.begun, len(self.pinned))

    def dominates(self, other: Moment) -> bool:
        """Whether nothing is later than in another moment with the same key."""
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
        return all(_held(self, time) <= _held(other, time) for time in times)


def _held(moment: Moment, time: float) -> int:
    return moment.held - sum(count for at, count in moment.frees if at <= time)


def free_at(moment: Moment, earliest: float, most: int) -> float | None:
    """The first time from ``earliest`` on at which at most ``most`` bytes are taken; None: it never comes."""
    held = moment.held
    if held <= most:
        return earliest
    for time, count in moment.frees:
        held -= count
        if held <= most:
            return max(earliest, time)
    return None


def advanced(
    moment: Moment, last: float, event: Event | None, *, frees: Sequence[tuple[float, int]] = (), **changes: Any
) -> Moment:
    """A moment with room taken at ``last``, and what has come back by then forgotten.

    Args:
        moment: the one before.
        last: when room is taken.
        event: what took it; None: part of something larger.
        frees: when how many more bytes come back.
        **changes: other fields.
    """
    pending = sorted([*moment.frees, *(item for item in frees if item[1])])
    held = changes.pop("held", moment.held) - sum(count for time, count in pending if time <= last)
    written, out_free = changes.pop("written", moment.written), changes.get("out_free", moment.out_free)
    arrive, ready = changes.pop("arrive", moment.arrive), changes.pop("ready", moment.ready)
    return replace(
        moment,
        last=last,
        held=held,
        frees=tuple(item for item in pending if item[0] > last),
        arrive=tuple(time if time > last else 0.0 for time in arrive),
        ready=tuple(time if time > last else 0.0 for time in ready),
        written=tuple(time if time > out_free else 0.0 for time in written),
        before=moment if event is not None else moment.before,
        event=event if event is not None else moment.event,
        **changes,
    )
