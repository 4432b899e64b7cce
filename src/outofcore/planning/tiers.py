"""Plans for several homes out of plans for one.

Most policies know of one home. They plan for the farthest, which holds the most; then what gains the most by it
moves to nearer homes, as far as these have room.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering.slots import slot_bytes
from outofcore.plan import Decision, Plan, Residency
from outofcore.planning.placing import Planned, fit_once
from outofcore.program import CopyIn, CopyOut, Program

# Nearer homes that take no more than this share of the bytes that are copied change nothing worth another plan.
_LITTLE = 0.1


def farthest(costs: Costs) -> Costs:
    """The costs with no home but the last."""
    return Costs(costs.ops, costs.homes[-1:])


def lasting_at_first(graph: StepGraph) -> int:
    """Bytes of the inputs and outputs, which the first home holds all the time."""
    found = set(graph.outputs) | {s.id for s in graph.storages if s.kind is StorageKind.INPUT}
    return sum(slot_bytes(graph.storages[s].bytes) for s in found)


def relieved(graph: StepGraph, costs: Costs, planned: Planned) -> Costs | None:
    """The costs with no home but the last, whose link is as much faster as nearer homes take copies off it.

    Args:
        graph: the step.
        costs: with all homes.
        planned: made with ``farthest(costs)``.

    Returns:
        None if they take hardly any.
    """
    near = _nearer(graph, costs, planned)
    total = taken = 0
    for storage, count in _copies(planned.program).items():
        total += count * graph.storages[storage].bytes
        taken += count * graph.storages[storage].bytes if storage in near else 0
    if taken < _LITTLE * total:
        return None
    # Their own links take time as well: no more than makes all take as long.
    rate = min(home.bytes_per_s_in for home in costs.homes[:-1])
    last = costs.homes[-1]
    left = max(1 - taken / total, last.bytes_per_s_in / (last.bytes_per_s_in + rate))
    faster = replace(last, bytes_per_s_out=last.bytes_per_s_out / left, bytes_per_s_in=last.bytes_per_s_in / left)
    return Costs(costs.ops, (faster,))


def over_tiers(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> list[Planned]:
    """What becomes of a plan for the farthest home alone where there are nearer ones as well.

    Args:
        graph: the step.
        costs: with all homes.
        budget: bytes of the arena.
        planned: made with ``farthest(costs)``.

    Returns:
        The plan with as much at nearer homes as these hold, and with nothing there but inputs and outputs; those of
        the two that can be placed.
    """
    last = len(costs.homes) - 1
    far = _moved(graph, planned.plan, {}, last)
    near = _moved(graph, planned.plan, _nearer(graph, costs, planned), last)
    found = [fit_once(graph, costs, budget, plan) for plan in dict.fromkeys((near, far))]
    return [one for one in found if one is not None]


def _moved(graph: StepGraph, plan: Plan, homes: dict[int, int], last: int) -> Plan:
    """The plan with other homes by storage; the last where none is given, but for inputs and outputs."""

    def home(decision: Decision) -> int:
        storage = decision.gap.storage
        if storage in graph.outputs or graph.storages[storage].kind is StorageKind.INPUT:
            return 0  # there they have room of their own
        return homes.get(storage, last)

    decisions = tuple(replace(d, home=home(d)) if d.residency is Residency.OFFLOAD else d for d in plan.decisions)
    return replace(plan, decisions=decisions)


def _nearer(graph: StepGraph, costs: Costs, planned: Planned) -> dict[int, int]:
    """The storages that are to be at nearer homes than the last, and at which."""
    n = len(graph.ops)
    spans: dict[int, tuple[int, int]] = {}  # of ops between which a storage may be at a home
    for decision in planned.plan.decisions:
        gap = decision.gap
        storage = graph.storages[gap.storage]
        if decision.residency is not Residency.OFFLOAD or storage.kind is StorageKind.INPUT:
            continue
        if gap.storage in graph.outputs:
            continue
        first, last = spans.get(gap.storage, (gap.start, gap.end + 1))
        spans[gap.storage] = (min(first, gap.start), max(last, gap.end + 1)) if gap.end < n else (0, n)
    copies = _copies(planned.program)

    def gain(storage: int) -> float:
        """Copies for each op over which the storage takes room: all bytes and links alike, that is what it gains."""
        first, last = spans[storage]
        return copies.get(storage, 0) / (last - first)

    order = sorted(spans, key=lambda storage: (-gain(storage), storage))
    found: dict[int, int] = {}
    for home, place in enumerate(costs.homes[:-1]):
        room = None if place.bytes is None else np.full(n, place.bytes, dtype=np.int64)
        if room is not None and home == 0:
            room -= lasting_at_first(graph)
        for storage in order:
            if storage in found:
                continue
            first, last = spans[storage]
            count = slot_bytes(graph.storages[storage].bytes)
            if room is not None:
                if np.any(room[first:last] < count):
                    continue
                room[first:last] -= count
            found[storage] = home
    return found


def _copies(program: Program) -> dict[int, int]:
    found: dict[int, int] = {}
    for instruction in program.instructions:
        if isinstance(instruction, CopyIn | CopyOut):
            storage = program.blocks[instruction.block].storage
            if storage is not None:
                found[storage] = found.get(storage, 0) + 1
    return found
