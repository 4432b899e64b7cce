"""Bytes that the homes hold over a step.

A storage copied out takes its slot from the start of that copy to the end of the last copy in before the
next copy out to the same slot. What is seen between two steps has its slot all the time: persistent
storages that no wrapping block holds, inputs, and outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.program import CopyOut, Program, Run


@dataclass(frozen=True, slots=True)
class Slot:
    """One stay of a storage at a home, among instructions."""

    home: int
    storage: int
    taken: int  # the copy out that takes it
    given: int  # the last copy in; the copy out itself where nothing is read back


def lasting(graph: StepGraph, program: Program) -> dict[int, int]:
    """The storages that have a slot for the whole step, and the home it is at."""
    moving = {program.blocks[i.block].storage for i in program.instructions if not isinstance(i, Run)}
    wrapping = {block.storage for block in program.blocks if block.wraps}
    found = {s: 0 for s in graph.outputs if s in moving}
    found |= {s.id: 0 for s in graph.storages if s.kind is StorageKind.INPUT and s.id in moving}
    used = (s for s in sorted(graph.persistent - wrapping) if graph.uses[s])
    return found | dict.fromkeys(used, 0) | {lodging.storage: lodging.home for lodging in program.lodgings}


def slots_of(graph: StepGraph, program: Program) -> Iterator[Slot]:
    """The stays of what does not last, in the order in which they end."""
    settled = set(lasting(graph, program).items())
    open_: dict[tuple[int, int], Slot] = {}
    found: list[Slot] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            continue
        storage = program.blocks[instruction.block].storage
        if storage is None or (storage, instruction.home) in settled:
            continue
        key = (storage, instruction.home)
        if isinstance(instruction, CopyOut):
            if key in open_:
                found.append(open_[key])
            open_[key] = Slot(instruction.home, storage, index, index)
        elif key in open_:
            slot = open_[key]
            open_[key] = Slot(slot.home, storage, slot.taken, index)
    return iter(sorted([*found, *open_.values()], key=lambda slot: (slot.given, slot.taken)))


def room_at_homes(graph: StepGraph, costs: Costs, program: Program) -> dict[int, int] | None:
    """How copies out have to wait until there is room at their home.

    Args:
        graph: the step.
        costs: with the capacities of the homes.
        program: as lowered.

    Returns:
        For the index of each copy out that has to wait: after how many copies in from its home. None if
        waiting does not help: the plan wants more at a home than it can hold.
    """
    if all(home.bytes is None for home in costs.homes):
        return {}
    size = [storage.bytes for storage in graph.storages]
    held = [0] * len(costs.homes)
    for storage, home in lasting(graph, program).items():
        if home < len(held):
            held[home] += size[storage]
    capacity = [home.bytes for home in costs.homes]
    for home, most in enumerate(capacity):
        if most is not None and held[home] > most:
            return None
    takers: dict[int, Slot] = {}
    givers: dict[int, list[Slot]] = {}
    for slot in slots_of(graph, program):
        takers[slot.taken] = slot
        givers.setdefault(slot.given, []).append(slot)
    arrived = [0] * len(costs.homes)  # copies in so far
    # Room that is given back, with the copies in after which it is: waited for only where it is needed.
    coming: list[deque[tuple[int, int]]] = [deque() for _ in costs.homes]
    waits: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            continue
        home = instruction.home
        if not isinstance(instruction, CopyOut):
            arrived[home] += 1
        elif index in takers:
            most = capacity[home]
            held[home] += size[takers[index].storage]
            while most is not None and held[home] > most:
                if not coming[home]:
                    return None
                waits[index], count = coming[home].popleft()
                held[home] -= count
        for slot in givers.get(index, ()):
            if slot.taken == index:  # nothing reads it: the next copy out may have its room
                held[home] -= size[slot.storage]
            else:
                coming[home].append((arrived[home], size[slot.storage]))
    return {index: count for index, count in waits.items() if count}
