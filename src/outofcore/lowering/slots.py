"""Bytes that the homes hold over a step.

A storage copied out takes its slot from the start of that copy to the end of the last copy in before the next copy out
to the same slot. What is seen between two steps has its slot all the time: persistent storages that no wrapping block
holds, inputs, and outputs.
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
    """One stay of a storage at a home, among instructions."""

    home: int
    storage: int
    copies: tuple[int, ...]  # the copy out that takes it, and the copies in

    @property
    def taken(self) -> int:
        """The copy out."""
        return self.copies[0]

    @property
    def given(self) -> int:
        """The last copy in, or the copy out where nothing is read back."""
        return self.copies[-1]


def slot_bytes(count: int) -> int:
    """Return the bytes that a storage takes at a home: whole pages."""
    return round_up(count, PAGE_BYTES)


def lasting(graph: StepGraph, program: Program) -> dict[int, int]:
    """Return the storages that have a slot for the whole step, and their homes."""
    moving = {program.blocks[i.block].storage for i in program.instructions if not isinstance(i, Run)}
    wrapping = {block.storage for block in program.blocks if block.wraps}
    homes = {s: 0 for s in graph.outputs if s in moving}
    homes |= {s.id: 0 for s in graph.storages if s.arrives and s.id in moving}
    used = (s for s in sorted(graph.persistent - wrapping) if graph.uses[s])
    homes |= dict.fromkeys(program.clean, 0)
    return homes | dict.fromkeys(used, 0) | {lodging.storage: lodging.home for lodging in program.lodgings}


def slots_of(graph: StepGraph, program: Program) -> Iterator[Slot]:
    """Yield the temporary stays in the order in which they end."""
    permanent = set(lasting(graph, program).items())
    last: dict[tuple[int, int], list[int]] = {}  # the copies of the last stay, by storage and home
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
    return iter(sorted(slots, key=lambda slot: (slot.given, slot.taken)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One slot that is taken, and what it takes over.

    ``vacated`` are the slots of the same home whose bytes are free from here on, and ``after`` is the number of copies
    in from that home that must be done first; 0: those that the queue of copies out has waited for already.
    """

    slot: Slot
    vacated: tuple[Slot, ...]
    after: int


def turns(graph: StepGraph, costs: Costs, program: Program) -> list[Turn] | None:
    """Order the temporary slots and their predecessors so that no home holds too much.

    Bytes are counted as ``slot_bytes``. A slot's bytes are taken over only where the home has no others. Returns a turn
    for each stay of ``slots_of``, in the order of their copies out; None if the plan exceeds a home's capacity even
    with waits.
    """
    size = [slot_bytes(storage.bytes) for storage in graph.storages]
    capacity = [home.bytes for home in costs.homes]
    home_bytes = [0] * len(capacity)
    for storage, home in lasting(graph, program).items():
        if home < len(home_bytes):
            home_bytes[home] += size[storage]
    for home, limit in enumerate(capacity):
        if limit is not None and home_bytes[home] > limit:
            return None
    takers: dict[int, Slot] = {}
    givers: dict[int, list[Slot]] = {}
    for slot in slots_of(graph, program):
        takers[slot.taken] = slot
        givers.setdefault(slot.given, []).append(slot)
    arrived = [0] * len(capacity)  # copies in so far
    # Room that is given back, with the copies in after which it is: waited for only where it is needed.
    coming: list[deque[tuple[int, Slot]]] = [deque() for _ in capacity]
    unread: list[list[Slot]] = [[] for _ in capacity]  # nothing reads these: the next copy out may have their room
    reuses: list[Turn] = []
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
            reuses.append(Turn(takers[index], tuple(vacated), after))
        for slot in givers.get(index, ()):
            if slot.taken == index:
                home_bytes[home] -= size[slot.storage]
                unread[home].append(slot)
            else:
                coming[home].append((arrived[home], slot))
    return reuses


def room_at_homes(graph: StepGraph, costs: Costs, program: Program) -> dict[int, int] | None:
    """Return, for each copy out that must wait for room, after how many copies in from its home it may start.

    None if the plan exceeds a home's capacity even with waits.
    """
    if all(home.bytes is None for home in costs.homes):
        return {}
    reuses = turns(graph, costs, program)
    return None if reuses is None else {reuse.slot.taken: reuse.after for reuse in reuses if reuse.after}
