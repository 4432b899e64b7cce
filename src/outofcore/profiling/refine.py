"""Costs made better by what measured steps took: ops among others, and copies beside compute."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from outofcore.costs import Costs
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
    seconds = [cost.seconds for cost in costs.ops]
    busy = {CopyOut: 0.0, CopyIn: 0.0}
    count = {CopyOut: 0, CopyIn: 0}
    for index, instruction in enumerate(program.instructions):
        took = statistics.median(t.ends[index] - t.starts[index] for t in timelines)
        if isinstance(instruction, Run):
            seconds[instruction.op] = took
        elif program.blocks[instruction.block].storage in moved:
            busy[type(instruction)] += took
            count[type(instruction)] += program.blocks[instruction.block].bytes
    ops = tuple(replace(cost, seconds=s) for cost, s in zip(costs.ops, seconds, strict=True))
    if not costs.homes:
        return replace(costs, ops=ops)
    home = costs.homes[0]
    if count[CopyOut] >= _TELLING_BYTES:
        home = replace(home, bytes_per_s_out=count[CopyOut] / busy[CopyOut])
    if count[CopyIn] >= _TELLING_BYTES:
        home = replace(home, bytes_per_s_in=count[CopyIn] / busy[CopyIn])
    return replace(costs, ops=ops, homes=(home, *costs.homes[1:]))
