"""Correct the seconds of ops and the bandwidth of copies by measured steps.

Contention is subtracted from measured times, so the costs hold for other plans. ``Home.compute_slowdown`` follows from
families of which some ops ran concurrently with copies. Noisy steps are left out. An op gets the median of its family,
unless its own median clearly differs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outofcore.costs import Costs, Home
from outofcore.program import CopyIn, CopyOut, Program, Run, Timeline
from outofcore.undisturbed import Lane, StepTimes, is_quiet, mark_quiet_steps, pace, step_times
from outofcore.units import MIB

# Below this total, copies do not determine a link's bandwidth.
_MIN_TRAFFIC_BYTES = 16 * MIB
# An op keeps its own cost if its median differs from its family's by more than this factor.
_FAMILY_TOLERANCE = 1.25
# With this many times without concurrent copies, a family uses only those.
_MIN_QUIET_TIMES = 3
# Minimum share of compute time with concurrent copies to derive the slowdown from.
_MIN_CONCURRENT_SHARE = 0.1
# Minimum average number of concurrent copies of such an op.
_MIN_CONCURRENT_COPIES = 0.5
# Relative tolerance of a prediction.
_TOLERANCE = 0.1
# Maximum slowdown of ops by each copy.
_MAX_SLOWDOWN = 1.0


def is_off(predicted: float, timelines: Sequence[Timeline]) -> bool:
    """Return whether the median of measured steps differs from the prediction by more than 10 %."""
    return abs(statistics.median(t.step_seconds for t in timelines) - predicted) > _TOLERANCE * predicted


def find_quiet_steps(costs: Costs, program: Program, timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return the measured steps that other programs did not slow down, out of consecutive ones."""
    paces = [pace(program, step_times(program, timeline, ()), costs.ops) for timeline in timelines]
    return [timeline for timeline, quiet in zip(timelines, mark_quiet_steps(paces), strict=True) if quiet]


def refine_costs(
    costs: Costs,
    program: Program,
    timelines: Sequence[Timeline],
    home_storages: frozenset[int],
    families: Sequence[str] = (),
) -> Costs:
    """Return costs that match measured steps: times of ops, bandwidths of copies, and the slowdown of ops by copies.

    ``home_storages`` were copied to a home, not to the caller's memory. ``families`` has the family of each op.
    """
    quiet_timelines = find_quiet_steps(costs, program, timelines)
    family_names = [families[op] if families and families[op] else f"#{op}" for op in range(len(costs.ops))]
    times = [step_times(program, timeline, costs.homes) for timeline in quiet_timelines]
    homes = _derive_slowdown(costs.homes, program, times, family_names)
    if homes != costs.homes:
        times = [step_times(program, timeline, homes) for timeline in quiet_timelines]
    seconds = _op_seconds(costs, program, times, family_names)
    traffic: dict[Lane, _Traffic] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) or program.blocks[instruction.block].storage not in home_storages:
            continue
        lane = traffic.setdefault((type(instruction), instruction.home), _Traffic())
        lane.busy += statistics.median(step.alone[index] for step in times)
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
    quiet: list[float] = field(default_factory=list[float])
    all: list[float] = field(default_factory=list[float])

    @property
    def seconds(self) -> float:
        return statistics.median(self.quiet if len(self.quiet) >= _MIN_QUIET_TIMES else self.all)


def _op_seconds(costs: Costs, program: Program, times: Sequence[StepTimes], family_names: Sequence[str]) -> list[float]:
    """Return the seconds of each op: the median of its family, or of the op alone if the two clearly differ."""
    families: dict[str, _Family] = {}
    by_op: dict[int, list[float]] = {}  # by op, including its recomputations
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            family = families.setdefault(family_names[instruction.op], _Family())
            for step in times:
                family.all.append(step.alone[index])
                by_op.setdefault(instruction.op, []).append(step.alone[index])
                if is_quiet(step.copies[index]):
                    family.quiet.append(step.alone[index])
    seconds = [cost.seconds for cost in costs.ops]
    for op, op_times in by_op.items():
        family_seconds, op_seconds = families[family_names[op]].seconds, statistics.median(op_times)
        is_alike = family_seconds / _FAMILY_TOLERANCE <= op_seconds <= family_seconds * _FAMILY_TOLERANCE
        seconds[op] = family_seconds if is_alike else op_seconds
    return seconds


def _derive_slowdown(
    homes: tuple[Home, ...], program: Program, times: Sequence[StepTimes], family_names: Sequence[str]
) -> tuple[Home, ...]:
    """Return the homes with the measured slowdown of ops by copies; unchanged if it cannot be measured."""
    used = {i.home for i in program.instructions if isinstance(i, CopyOut | CopyIn)}
    if len(used) != 1 or not times:
        return homes
    [at] = used
    quiet: dict[str, list[float]] = {}
    concurrent: list[tuple[str, float, float]] = []  # family, seconds, copies
    total = 0.0
    for index, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run) or instruction.communicates:
            continue
        for step in times:
            took, copies = step.took[index], step.copies[index]
            total += took
            if is_quiet(copies):
                quiet.setdefault(family_names[instruction.op], []).append(took)
            elif copies >= _MIN_CONCURRENT_COPIES:
                concurrent.append((family_names[instruction.op], took, copies))
    usual = {
        name: statistics.median(durations) for name, durations in quiet.items() if len(durations) >= _MIN_QUIET_TIMES
    }
    slowdowns = [
        ((took / usual[name] - 1) / copies, took)
        for name, took, copies in concurrent
        if usual.get(name, 0.0) > 0 < copies
    ]
    if sum(took for _, took in slowdowns) < _MIN_CONCURRENT_SHARE * total:
        return homes
    slowdown = min(max(_weighted_median(slowdowns), 0.0), _MAX_SLOWDOWN)
    return tuple(replace(home, compute_slowdown=slowdown) if n == at else home for n, home in enumerate(homes))


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the median of (value, weight) pairs; 0 without pairs."""
    half, below = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        below += weight
        if below >= half:
            return value
    return 0.0


@dataclass
class _Traffic:
    busy: float = 0.0  # seconds
    bytes: int = 0
    copies: int = 0


def _rate(home: Home, traffic: _Traffic | None, fallback: float) -> float:
    """Return the measured bytes per second of copies; ``fallback`` if they copied too little."""
    if traffic is None or traffic.bytes < _MIN_TRAFFIC_BYTES:
        return fallback
    # At least half of the time counts as transfer, since the measured latency may be too high.
    return traffic.bytes / max(traffic.busy - traffic.copies * home.latency_s, traffic.busy / 2)
