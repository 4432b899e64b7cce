"""Estimate the times of ops and copies without contention, and find the quiet steps among several.

Another process on the cores slows all ops; a slow link does not. So a step is noisy if its *pace*, the slowdown of all
its ops, is higher than in other steps of the same program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outofcore.costs import Home, OpCost
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline

# A step is noisy if its pace is this many times the lowest one.
DISTURBED = 1.06
# An op is quiet if copies run for at most this share of its time.
_QUIET_COPIES = 0.02
# Larger than the rounding error of added and subtracted slowdowns.
_TINY = 1e-9

Lane = tuple[type, int]  # the type of a copy, and its home


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measured and estimated seconds of each instruction of a step."""

    took: tuple[float, ...]  # seconds
    alone: tuple[float, ...]  # estimated seconds without contention
    copies: tuple[float, ...]  # average number of copies concurrent with each op; 0 for copies


def step_times(program: Program, timeline: Timeline, homes: Sequence[Home]) -> StepTimes:
    """Return the measured seconds of each instruction, and an estimate of its seconds without contention."""
    spans = list(zip(timeline.starts, timeline.ends, strict=True))
    lanes: dict[Lane, list[tuple[float, float]]] = {}
    for instruction, span in zip(program.instructions, spans, strict=True):
        if not isinstance(instruction, Run):
            lanes.setdefault((type(instruction), instruction.home), []).append(span)
    busy = {lane: _Spans(lane_spans) for lane, lane_spans in lanes.items()}
    both = {
        home: _Spans(_intersect_spans(busy[CopyOut, home].spans, busy[CopyIn, home].spans))
        for home in range(len(homes))
        if (CopyOut, home) in busy and (CopyIn, home) in busy
    }
    # Spans in which the same copies run, and the factor by which they slow ops.
    slowed = _slowdown_spans({lane: lane_spans for lane, lane_spans in busy.items() if lane[1] < len(homes)}, homes)
    alone: list[float] = []
    copies: list[float] = []
    for (start, end), instruction in zip(spans, program.instructions, strict=True):
        concurrent = 0.0
        if isinstance(instruction, Run):
            lost = 0.0
            if not instruction.communicates:
                lost = sum((1 - 1 / slower) * part.within(start, end) for slower, part in slowed)
                concurrent = sum(lane.within(start, end) for lane in busy.values())
        else:
            at = instruction.home
            lost = 0.0
            if at in both:
                lost = homes[at].lost_share(out=isinstance(instruction, CopyOut)) * both[at].within(start, end)
        alone.append(end - start - lost)
        copies.append(concurrent / (end - start) if end > start else 0.0)
    return StepTimes(tuple(end - start for start, end in spans), tuple(alone), tuple(copies))


def is_quiet(copies: float) -> bool:
    """Return whether an op ran almost without concurrent copies; ``copies`` is their average number."""
    return copies <= _QUIET_COPIES


def pace(program: Program, times: StepTimes, ops: Sequence[OpCost]) -> float:
    """Return the measured time of the ops divided by their predicted time in ``ops``; 1 without ops."""
    took = expected = 0.0
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) and not instruction.communicates:
            took += times.took[index]
            expected += ops[instruction.op].seconds
    return took / expected if expected else 1.0


def mark_quiet_steps(paces: Sequence[float]) -> list[bool]:
    """Return whether each step of one program, given by its pace, is quiet: within 6 % of the lowest pace."""
    lowest = min(paces, default=0.0)
    return [value <= lowest * DISTURBED for value in paces]


def _slowdown_spans(busy: Mapping[Lane, _Spans], homes: Sequence[Home]) -> list[tuple[float, _Spans]]:
    """Return the factors by which copies slow ops, each with the time spans in which it applies."""
    changes = sorted(
        (time, sign * homes[home].compute_slowdown)
        for (_, home), lane_spans in busy.items()
        for begin, end in lane_spans.spans
        for time, sign in ((begin, 1), (end, -1))
    )
    parts: dict[float, list[tuple[float, float]]] = {}
    slowdown, last = 0.0, 0.0
    for time, change in changes:
        if slowdown > _TINY and time > last:
            parts.setdefault(round(1 + slowdown, 9), []).append((last, time))
        slowdown, last = slowdown + change, time
    return [(slower, _Spans(spans)) for slower, spans in sorted(parts.items())]


class _Spans:
    """Disjoint time spans in ascending order."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self.spans = sorted(span for span in spans if span[0] < span[1])
        self._starts = [begin for begin, _ in self.spans]
        self._before = [0.0]  # seconds in the spans before each one
        for begin, end in self.spans:
            self._before.append(self._before[-1] + end - begin)

    def within(self, start: float, end: float) -> float:
        """Return the seconds of these spans between two times."""
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        """Return the seconds of these spans up to a time."""
        at = bisect_right(self._starts, time) - 1
        if at < 0:
            return 0.0
        begin, end = self.spans[at]
        return self._before[at] + min(time, end) - begin


def _intersect_spans(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the intersection of two lists of disjoint, ascending time spans."""
    shared: list[tuple[float, float]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared
