"""Correct costs by measured steps: the seconds of ops, and the bandwidth of copies concurrent with compute.

How much copies slow each other (``Home.contention``) stays as it was measured; how much they slow ops
(``Home.compute_slowdown``) shows where some ops of a family ran with copies and others did not. Both are subtracted
from the times of steps, so that the costs are those of ops and copies that run alone, and hold for other plans.

A single time is unreliable: whatever else the machine does makes it longer. So noisy steps are left out
(``undisturbed``), and an op gets the cost of its family, from the times of all its members and of all steps together,
unless its own clearly differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outofcore.costs import Costs, Home
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline
from outofcore.undisturbed import Lane, StepTimes, is_quiet, pace, step_times, undisturbed
from outofcore.units import MIB

# Copies of less than this in all say little of a link's bandwidth.
_TELLING_BYTES = 16 * MIB
# An op whose median is so far from that of its family costs something else than others of it.
_OF_ITS_OWN = 1.25
# A family has so many times without copies beside them before those alone count.
_ENOUGH_QUIET = 3
# Ops beside copies say what these take from them where they are so much of all ops' seconds.
_TELLING_SHARE = 0.1
# An op is beside a copy, for that, if it is for so much of its time.
_BESIDE = 0.5
# A prediction is off if it is by more than this share of itself.
_TOLERANCE = 0.1
# What copies may take from ops at most, each.
_MOST_SLOWDOWN = 1.0


def is_off(predicted: float, timelines: Sequence[Timeline]) -> bool:
    """Return whether the median of measured steps differs from the prediction by more than a tenth."""
    return abs(statistics.median(t.step_seconds for t in timelines) - predicted) > _TOLERANCE * predicted


def calm_steps(costs: Costs, program: Program, timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return the quiet ones among consecutive whole steps of a program.

    Of the costs only the seconds of ops matter, relative to each other.
    """
    paces = [pace(program, step_times(program, timeline, ()), costs.ops) for timeline in timelines]
    return [timeline for timeline, calm in zip(timelines, undisturbed(paces), strict=True) if calm]


def refined(
    costs: Costs,
    program: Program,
    timelines: Sequence[Timeline],
    moved: frozenset[int],
    families: Sequence[str] = (),
) -> Costs:
    """Return costs with the measured seconds of ops, and the measured bandwidth of copies.

    ``costs`` are those of the plan. Noisy timelines are left out. ``moved`` are the storages whose copies went to a
    home and not to the caller's memory. ``families`` are of the ops; without a name each is its own.
    """
    calm = calm_steps(costs, program, timelines)
    names = [families[op] if families and families[op] else f"#{op}" for op in range(len(costs.ops))]
    times = [step_times(program, timeline, costs.homes) for timeline in calm]
    homes = _with_slowdown(costs.homes, program, times, names)
    if homes != costs.homes:
        times = [step_times(program, timeline, homes) for timeline in calm]
    seconds = _op_seconds(costs, program, times, names)
    traffic: dict[Lane, _Traffic] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) or program.blocks[instruction.block].storage not in moved:
            continue
        lane = traffic.setdefault((type(instruction), instruction.home), _Traffic())
        lane.busy += statistics.median(one.alone[index] for one in times)
        lane.bytes += program.blocks[instruction.block].bytes
        lane.copies += 1
    ops = tuple(replace(cost, seconds=s) for cost, s in zip(costs.ops, seconds, strict=True))
    homes = tuple(
        replace(
            home,
            bytes_per_s_out=_rate(home, traffic.get((CopyOut, number)), home.bytes_per_s_out),
            bytes_per_s_in=_rate(home, traffic.get((CopyIn, number)), home.bytes_per_s_in),
        )
        for number, home in enumerate(homes)
    )
    return replace(costs, ops=ops, homes=homes)


@dataclass
class _Family:
    """Times of ops that cost the same."""

    quiet: list[float] = field(default_factory=list[float])
    all: list[float] = field(default_factory=list[float])

    @property
    def seconds(self) -> float:
        return statistics.median(self.quiet if len(self.quiet) >= _ENOUGH_QUIET else self.all)


def _op_seconds(costs: Costs, program: Program, times: Sequence[StepTimes], names: Sequence[str]) -> list[float]:
    families: dict[str, _Family] = {}
    own: dict[int, list[float]] = {}  # by op: one that runs again does so at other times
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            family = families.setdefault(names[instruction.op], _Family())
            for one in times:
                family.all.append(one.alone[index])
                own.setdefault(instruction.op, []).append(one.alone[index])
                if is_quiet(one.copies[index]):
                    family.quiet.append(one.alone[index])
    seconds = [cost.seconds for cost in costs.ops]
    for op, found in own.items():
        alike, mine = families[names[op]].seconds, statistics.median(found)
        is_alike = alike / _OF_ITS_OWN <= mine <= alike * _OF_ITS_OWN
        seconds[op] = alike if is_alike else mine
    return seconds


def _with_slowdown(
    homes: tuple[Home, ...], program: Program, times: Sequence[StepTimes], names: Sequence[str]
) -> tuple[Home, ...]:
    """Set how much copies slowed ops, if steps tell: all copies then went to one home."""
    used = {i.home for i in program.instructions if isinstance(i, CopyOut | CopyIn)}
    if len(used) != 1 or not times:
        return homes
    [at] = used
    quiet: dict[str, list[float]] = {}
    beside: list[tuple[str, float, float]] = []  # family, seconds, copies
    total = 0.0
    for index, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run) or instruction.communicates:
            continue
        for one in times:
            took, copies = one.took[index], one.copies[index]
            total += took
            if is_quiet(copies):
                quiet.setdefault(names[instruction.op], []).append(took)
            elif copies >= _BESIDE:
                beside.append((names[instruction.op], took, copies))
    usual = {name: statistics.median(found) for name, found in quiet.items() if len(found) >= _ENOUGH_QUIET}
    told = [
        ((took / usual[name] - 1) / copies, took) for name, took, copies in beside if usual.get(name, 0.0) > 0 < copies
    ]
    if sum(took for _, took in told) < _TELLING_SHARE * total:
        return homes
    slowdown = min(max(_weighted_median(told), 0.0), _MOST_SLOWDOWN)
    return tuple(replace(home, compute_slowdown=slowdown) if n == at else home for n, home in enumerate(homes))


def _weighted_median(found: Sequence[tuple[float, float]]) -> float:
    """Return the value with half of the weight on either side."""
    half, below = sum(weight for _, weight in found) / 2, 0.0
    for value, weight in sorted(found):
        below += weight
        if below >= half:
            return value
    return 0.0


@dataclass
class _Traffic:
    """The traffic over one link one way."""

    busy: float = 0.0  # seconds
    bytes: int = 0
    copies: int = 0


def _rate(home: Home, traffic: _Traffic | None, known: float) -> float:
    if traffic is None or traffic.bytes < _TELLING_BYTES:
        return known
    # No less than half of the time is put down to the bytes: latency may have been measured too high.
    return traffic.bytes / max(traffic.busy - traffic.copies * home.latency_s, traffic.busy / 2)
