"""Costs made better by what measured steps took: ops among others, and copies beside compute.

What copies take from each other and from ops (``Home.contention``, ``Home.compute_slowdown``) stays as it was
measured; it is taken off the times of steps, so that the costs are those of ops and copies that run alone, and hold
for another plan with other copies.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from outofcore.costs import Costs, Home
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline
from outofcore.units import MIB

# Copies of less than this in all say little of a link's bandwidth.
_TELLING_BYTES = 16 * MIB


def is_off(predicted: float, timelines: Sequence[Timeline], tolerance: float = 0.1) -> bool:
    """Whether the median of measured steps differs from the prediction by more than the tolerance."""
    return abs(statistics.median(t.step_seconds for t in timelines) - predicted) > tolerance * predicted


def refined(costs: Costs, program: Program, timelines: Sequence[Timeline], moved: frozenset[int]) -> Costs:
    """Costs with the median seconds of each op, and the bandwidth that copies got while ops ran.

    Args:
        costs: what the program was planned with.
        program: what ran.
        timelines: measured, of whole steps.
        moved: the storages whose copies went to the home and not to the caller's memory.
    """
    home = costs.homes[0] if costs.homes else Home("none", None, 1.0, 1.0)
    alone = [_alone(program, timeline, home) for timeline in timelines]
    seconds = [cost.seconds for cost in costs.ops]
    busy = {CopyOut: 0.0, CopyIn: 0.0}
    count = {CopyOut: 0, CopyIn: 0}
    copies = {CopyOut: 0, CopyIn: 0}
    for index, instruction in enumerate(program.instructions):
        took = statistics.median(times[index] for times in alone)
        if isinstance(instruction, Run):
            seconds[instruction.op] = took
        elif program.blocks[instruction.block].storage in moved:
            busy[type(instruction)] += took
            count[type(instruction)] += program.blocks[instruction.block].bytes
            copies[type(instruction)] += 1
    ops = tuple(replace(cost, seconds=s) for cost, s in zip(costs.ops, seconds, strict=True))
    if not costs.homes:
        return replace(costs, ops=ops)
    rates = {CopyOut: home.bytes_per_s_out, CopyIn: home.bytes_per_s_in}
    for kind in rates:
        if count[kind] >= _TELLING_BYTES:
            # No less than half of the time is put down to the bytes: latency may have been measured too high.
            rates[kind] = count[kind] / max(busy[kind] - copies[kind] * home.latency_s, busy[kind] / 2)
    home = replace(home, bytes_per_s_out=rates[CopyOut], bytes_per_s_in=rates[CopyIn])
    return replace(costs, ops=ops, homes=(home, *costs.homes[1:]))


def _alone(program: Program, timeline: Timeline, home: Home) -> list[float]:
    """What each instruction would have taken with nothing else under way."""
    spans = list(zip(timeline.starts, timeline.ends, strict=True))
    kinds = [type(i) for i in program.instructions]
    busy = {
        kind: _Busy([span for span, k in zip(spans, kinds, strict=True) if k is kind]) for kind in (CopyOut, CopyIn)
    }
    one, two = 1 / (1 + home.compute_slowdown), 1 / (1 + 2 * home.compute_slowdown)
    both = _Busy(_meeting(busy[CopyOut].spans, busy[CopyIn].spans))
    found: list[float] = []
    for (start, end), kind in zip(spans, kinds, strict=True):
        if kind is Run:
            together = both.within(start, end)
            single = busy[CopyOut].within(start, end) + busy[CopyIn].within(start, end) - 2 * together
            found.append(end - start - (1 - one) * single - (1 - two) * together)
        else:
            # Each of the two that meet has lost half of what both have lost.
            found.append(end - start - home.contention / 2 * both.within(start, end))
    return found


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
