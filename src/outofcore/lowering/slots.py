"""Slots of storages at homes over a step.

A temporary slot is in use from a copy out to the last copy in before the next copy out to it. Storages that are visible
between steps have permanent slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.program import CopyOut, Program, Run
from outofcore.units import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class Slot:
    """Space at a home that a storage uses from a copy out to its last copy in."""

    home: int
    storage: int
    copies: tuple[int, ...]  # instructions: the copy out, then its copies in

    @property
    def copy_out(self) -> int:
        return self.copies[0]

    @property
    def last_copy(self) -> int:
        """The last copy in, or the copy out if there is no copy in."""
        return self.copies[-1]


def slot_bytes(storage_bytes: int) -> int:
    return round_up(storage_bytes, PAGE_BYTES)


def permanent_slots(graph: StepGraph, program: Program) -> dict[int, int]:
    """Map each storage with a slot for the whole step to the home of this slot."""
    moving = {program.blocks[i.block].storage for i in program.instructions if not isinstance(i, Run)}
    wrapping = {block.storage for block in program.blocks if block.wraps}
    homes = {s: 0 for s in graph.outputs if s in moving}
    homes |= {s.id: 0 for s in graph.storages if s.arrives and s.id in moving}
    used = (s for s in sorted(graph.persistent - wrapping) if graph.uses[s])
    homes |= dict.fromkeys(program.clean, 0)
    return homes | dict.fromkeys(used, 0) | {lodging.storage: lodging.home for lodging in program.lodgings}


def temporary_slots(graph: StepGraph, program: Program) -> Iterator[Slot]:
    """Return the home slots used for only part of a step, in the order in which they become free."""
    permanent = set(permanent_slots(graph, program).items())
    last: dict[tuple[int, int], list[int]] = {}  # the copies of the latest stay, by storage and home
    stays: list[tuple[int, int, list[int]]] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            continue
        storage = program.blocks[instruction.block].storage
        if storage is None or (storage, instruction.home) in permanent:
            continue
        key = (storage, instruction.home)
        if isinstance(instruction, CopyOut):
            last[key] = [index]
            stays.append((instruction.home, storage, last[key]))
        elif key in last:
            last[key].append(index)
    slots = [Slot(home, storage, tuple(copies)) for home, storage, copies in stays]
    return iter(sorted(slots, key=lambda slot: (slot.last_copy, slot.copy_out)))


@dataclass(frozen=True, slots=True)
class SlotReuse:
    """A temporary slot and the freed slots that make room for it."""

    slot: Slot
    freed: tuple[Slot, ...]  # slots of the same home that are free from here on
    copies_in_before: int  # copies in from that home that must end first; 0 if earlier copies out have waited for them


def assign_slots(graph: StepGraph, costs: Costs, program: Program) -> list[SlotReuse] | None:
    """Choose freed slots to make room for each temporary slot; None if a home is too small."""
    size = [slot_bytes(storage.bytes) for storage in graph.storages]
    capacity = [home.bytes for home in costs.homes]
    home_bytes = [0] * len(capacity)
    for storage, home in permanent_slots(graph, program).items():
        if home < len(home_bytes):
            home_bytes[home] += size[storage]
    for home, limit in enumerate(capacity):
        if limit is not None and home_bytes[home] > limit:
            return None
    takers: dict[int, Slot] = {}
    givers: dict[int, list[Slot]] = {}
    for slot in temporary_slots(graph, program):
        takers[slot.copy_out] = slot
        givers.setdefault(slot.last_copy, []).append(slot)
    arrived = [0] * len(capacity)  # number of copies in so far
    # Slots that are freed by a copy in, with its number; waited for only if their bytes are needed.
    coming: list[deque[tuple[int, Slot]]] = [deque() for _ in capacity]
    unread: list[list[Slot]] = [
        [] for _ in capacity
    ]  # slots without copies in: the next copy out may reuse their bytes
    reuses: list[SlotReuse] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run) or instruction.home >= len(capacity):
            continue
        home = instruction.home
        if not isinstance(instruction, CopyOut):
            arrived[home] += 1
        elif index in takers:
            limit = capacity[home]
            after, vacated = 0, unread[home]
            unread[home] = []
            home_bytes[home] += size[takers[index].storage]
            while limit is not None and home_bytes[home] > limit:
                if not coming[home]:
                    return None
                after, slot = coming[home].popleft()
                home_bytes[home] -= size[slot.storage]
                vacated.append(slot)
            reuses.append(SlotReuse(takers[index], tuple(vacated), after))
        for slot in givers.get(index, ()):
            if slot.copy_out == index:
                home_bytes[home] -= size[slot.storage]
                unread[home].append(slot)
            else:
                coming[home].append((arrived[home], slot))
    return reuses


def copies_in_before_room(graph: StepGraph, costs: Costs, program: Program) -> dict[int, int] | None:
    """Map copies out to the number of copies in that must end first; None if a home is too small."""
    if all(home.bytes is None for home in costs.homes):
        return {}
    reuses = assign_slots(graph, costs, program)
    return (
        None
        if reuses is None
        else {reuse.slot.copy_out: reuse.copies_in_before for reuse in reuses if reuse.copies_in_before}
    )
