"""Estimate what the ops and copies of a step take on their own, and find the quiet ones among several steps.

Another process that uses the processor slows all ops, even those without concurrent copies; a link that is slower than
measured does not. So a step whose ops took longer than those of its neighbours, by the *pace* of all, is noisy, and
says nothing about plans and links. Paces are compared among steps of one program, which have the same copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outofcore.costs import Home, OpCost
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline

# Steps whose ops took so many times as long as in the calmest of them were disturbed.
DISTURBED = 1.06
# An op is quiet if copies are under way for no more of its time than this.
_BESIDE = 0.02
# Slowdowns that are added up and taken off again leave less than this.
_TINY = 1e-9

Lane = tuple[type, int]  # the way of a copy, and its home


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A measured step.

    Attributes:
        took: by instruction, its seconds.
        alone: by instruction, the estimated seconds with nothing else under way.
        copies: by op, the average number of concurrent copies; 0 for other instructions.
    """

    took: tuple[float, ...]
    alone: tuple[float, ...]
    copies: tuple[float, ...]


def step_times(program: Program, timeline: Timeline, homes: Sequence[Home]) -> StepTimes:
    """Estimate the times of a measured step without contention; ``homes`` say how much copies slow each other."""
    spans = list(zip(timeline.starts, timeline.ends, strict=True))
    lanes: dict[Lane, list[tuple[float, float]]] = {}
    for instruction, span in zip(program.instructions, spans, strict=True):
        if not isinstance(instruction, Run):
            lanes.setdefault((type(instruction), instruction.home), []).append(span)
    busy = {lane: _Busy(found) for lane, found in lanes.items()}
    both = {
        home: _Busy(_meeting(busy[CopyOut, home].spans, busy[CopyIn, home].spans))
        for home in range(len(homes))
        if (CopyOut, home) in busy and (CopyIn, home) in busy
    }
    # Ops lose time by what runs beside them: stretches with the same copies under way, and how much longer they take.
    slowed = _slowed({lane: found for lane, found in busy.items() if lane[1] < len(homes)}, homes)
    alone: list[float] = []
    copies: list[float] = []
    for (start, end), instruction in zip(spans, program.instructions, strict=True):
        beside = 0.0
        if isinstance(instruction, Run):
            lost = 0.0
            if not instruction.communicates:
                lost = sum((1 - 1 / slower) * part.within(start, end) for slower, part in slowed)
                beside = sum(lane.within(start, end) for lane in busy.values())
        else:
            at = instruction.home
            lost = 0.0
            if at in both:
                lost = homes[at].lost(out=isinstance(instruction, CopyOut)) * both[at].within(start, end)
        alone.append(end - start - lost)
        copies.append(beside / (end - start) if end > start else 0.0)
    return StepTimes(tuple(end - start for start, end in spans), tuple(alone), tuple(copies))


def is_quiet(copies: float) -> bool:
    """Return whether an average number of concurrent copies counts as none."""
    return copies <= _BESIDE


def pace(program: Program, times: StepTimes, ops: Sequence[OpCost]) -> float:
    """Return the factor by which the ops of a step took longer than their known costs and copies explain."""
    took = known = 0.0
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not instruction.communicates:
            took += times.took[index]
            known += ops[instruction.op].seconds
    return took / known if known else 1.0


def undisturbed(paces: Sequence[float]) -> list[bool]:
    """Return which of some consecutive steps of one program are quiet."""
    lowest = min(paces, default=0.0)
    return [one <= lowest * DISTURBED for one in paces]


def _slowed(busy: Mapping[Lane, _Busy], homes: Sequence[Home]) -> list[tuple[float, _Busy]]:
    """Return the factors by which copies slow ops down, and when."""
    changes = sorted(
        (time, sign * homes[home].compute_slowdown)
        for (_, home), found in busy.items()
        for begin, end in found.spans
        for time, sign in ((begin, 1), (end, -1))
    )
    parts: dict[float, list[tuple[float, float]]] = {}
    slowdown, last = 0.0, 0.0
    for time, change in changes:
        if slowdown > _TINY and time > last:
            parts.setdefault(round(1 + slowdown, 9), []).append((last, time))
        slowdown, last = slowdown + change, time
    return [(slower, _Busy(spans)) for slower, spans in sorted(parts.items())]


class _Busy:
    """Disjoint spans of time, in order."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self.spans = sorted(span for span in spans if span[0] < span[1])
        self._starts = [begin for begin, _ in self.spans]
        self._before = [0.0]  # seconds in the spans before each
        for begin, end in self.spans:
            self._before.append(self._before[-1] + end - begin)

    def within(self, start: float, end: float) -> float:
        """Return the seconds of [start, end) that are in a span."""
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        at = bisect_right(self._starts, time) - 1
        if at < 0:
            return 0.0
        begin, end = self.spans[at]
        return self._before[at] + min(time, end) - begin


def _meeting(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the intersections of the spans of two lists."""
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found
