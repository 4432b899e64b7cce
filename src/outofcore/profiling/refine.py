"""Costs made better by what measured steps took: ops among others, and copies beside compute.

What copies take from each other and from ops (``Home.contention``, ``Home.compute_slowdown``) stays as it was
measured; it is taken off the times of steps, so that the costs are those of ops and copies that run alone, and hold
for another plan with other copies.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outofcore.costs import Costs, Home
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline
from outofcore.units import MIB

# Copies of less than this in all say little of a link's bandwidth.
_TELLING_BYTES = 16 * MIB
# Slowdowns that are added up and taken off again leave less than this.
_TINY = 1e-9

_Lane = tuple[type, int]  # the way of a copy, and its home


def is_off(predicted: float, timelines: Sequence[Timeline], tolerance: float = 0.1) -> bool:
    """Whether the median of measured steps differs from the prediction by more than the tolerance."""
    return abs(statistics.median(t.step_seconds for t in timelines) - predicted) > tolerance * predicted


def refined(costs: Costs, program: Program, timelines: Sequence[Timeline], moved: frozenset[int]) -> Costs:
    """Costs with the median seconds of each op, and the bandwidth that copies got while ops ran.

    Args:
        costs: what the program was planned with.
        program: what ran.
        timelines: measured, of whole steps.
        moved: the storages whose copies went to a home and not to the caller's memory.
    """
    alone = [_alone(program, timeline, costs.homes) for timeline in timelines]
    seconds = [cost.seconds for cost in costs.ops]
    traffic: dict[_Lane, _Traffic] = {}
    for index, instruction in enumerate(program.instructions):
        took = statistics.median(times[index] for times in alone)
        if isinstance(instruction, Run):
            seconds[instruction.op] = took
        elif program.blocks[instruction.block].storage in moved:
            lane = traffic.setdefault((type(instruction), instruction.home), _Traffic())
            lane.busy += took
            lane.bytes += program.blocks[instruction.block].bytes
            lane.copies += 1
    ops = tuple(replace(cost, seconds=s) for cost, s in zip(costs.ops, seconds, strict=True))
    homes = tuple(
        replace(
            home,
            bytes_per_s_out=_rate(home, traffic.get((CopyOut, number)), home.bytes_per_s_out),
            bytes_per_s_in=_rate(home, traffic.get((CopyIn, number)), home.bytes_per_s_in),
        )
        for number, home in enumerate(costs.homes)
    )
    return replace(costs, ops=ops, homes=homes)


@dataclass
class _Traffic:
    """What went over one link one way."""

    busy: float = 0.0  # seconds
    bytes: int = 0
    copies: int = 0


def _rate(home: Home, traffic: _Traffic | None, known: float) -> float:
    if traffic is None or traffic.bytes < _TELLING_BYTES:
        return known
    # No less than half of the time is put down to the bytes: latency may have been measured too high.
    return traffic.bytes / max(traffic.busy - traffic.copies * home.latency_s, traffic.busy / 2)


def _alone(program: Program, timeline: Timeline, homes: Sequence[Home]) -> list[float]:
    """What each instruction would have taken with nothing else under way."""
    spans = list(zip(timeline.starts, timeline.ends, strict=True))
    lanes: dict[_Lane, list[tuple[float, float]]] = {}
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
    found: list[float] = []
    for (start, end), instruction in zip(spans, program.instructions, strict=True):
        if isinstance(instruction, Run) and instruction.communicates:
            found.append(end - start)
        elif isinstance(instruction, Run):
            found.append(end - start - sum((1 - 1 / slower) * part.within(start, end) for slower, part in slowed))
        else:
            # Each of the two that meet has lost half of what both have lost.
            at = instruction.home
            lost = homes[at].contention / 2 * both[at].within(start, end) if at in both else 0.0
            found.append(end - start - lost)
    return found


def _slowed(busy: Mapping[_Lane, _Busy], homes: Sequence[Home]) -> list[tuple[float, _Busy]]:
    """How many times as long ops take while copies are under way, and when."""
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
    """Spans of time in order, none of which meet."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self.spans = sorted(span for span in spans if span[0] < span[1])
        self._starts = [begin for begin, _ in self.spans]
        self._before = [0.0]  # seconds in the spans before each
        for begin, end in self.spans:
            self._before.append(self._before[-1] + end - begin)

    def within(self, start: float, end: float) -> float:
        """Seconds of [start, end) that lie in a span."""
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        at = bisect_right(self._starts, time) - 1
        if at < 0:
            return 0.0
        begin, end = self.spans[at]
        return self._before[at] + min(time, end) - begin


def _meeting(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches in which a span of both lists is under way."""
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
