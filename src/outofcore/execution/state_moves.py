"""Move states between ordinary memory, homes and the arena; ``aliases.TRANSITIONS`` lists all moves."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.errors import SpillError
from outofcore.execution.aliases import Faces, Place, State
from outofcore.execution.arena import Memory
from outofcore.program import Block, Program
from outofcore.runtime.file_io import copy_buffer

_log = logging.getLogger("outofcore")


class StateMoves:
    """Moves states, and finds room for them at homes; states below 64 KiB are in ordinary memory instead."""

    def __init__(self, faces: Faces, states: Mapping[str, State]) -> None:
        self._faces = faces
        self.slots = faces.slots
        self._states = states
        self.arena: Memory | None = None
        self._settled: set[int] = set()  # ids of states that must not move to make room
        self._in_files: list[State] = []  # the program's states in files that the home does not own
        self._relied_on: set[int] = set()  # ids of states in the arena with a home copy that the program needs

    def slot(self, state: State) -> int:
        """Return the offset of a large state's slot at its home, by default a new one at the first home."""
        if state.place is Place.UNBORN and (state.home != 0 or self._is_range(state)):
            self.vacate(state)  # steps write new state to the first home
        if state.slot is None:
            state.slot, state.home = self._take(0, state), 0
        return state.slot

    def _take(self, home: int, state: State) -> int:
        """Take a slot for a state at a home, moving other states if needed; raise ``SpillError``."""
        count = placed_bytes(state.bytes)
        slots, last = self.slots[home], len(self.slots) - 1
        try:
            return slots.take(count)
        except SpillError:
            in_arena = [s for s in self._states.values() if s.place is Place.ARENA and s.home == home]
            spare = [s for s in in_arena if s.slot is not None and id(s) not in self._relied_on]
            spare = [s for s in spare if s.slot is not None and not slots.is_in_file(s.slot)]
            for neighbor in spare:
                self.vacate(neighbor)
            if home == last and not slots.home.in_memory and not spare:
                raise
        if home < last:
            for neighbor in self._states.values():
                if neighbor.place is Place.HOME and neighbor.home == home and id(neighbor) not in self._settled:
                    self.to_home(neighbor, last)
        if slots.home.in_memory:
            self._compact(home)
        return slots.take(count)

    def _compact(self, home: int) -> None:
        """Move the states at a home in memory together, so that the free room is contiguous."""
        slots = self.slots[home]
        places = (Place.HOME, Place.ARENA)
        states = [s for s in self._states.values() if s.place in places and s.home == home and s.slot is not None]
        for state in sorted(states, key=lambda s: s.slot or 0):
            old, count = self.slot(state), placed_bytes(state.bytes)
            self._faces.drop(home, old)
            slots.give(old, count)
            state.slot = slots.take(count)
            if state.slot != old:
                slots.home.write(state.slot, internals.memory_of(state.bytes_now()))
            if state.place is Place.HOME:
                state.show(self._faces.show(home, state.slot, state.bytes), Place.HOME)
            elif state.slot != old:
                state.mark = state.fingerprint()

    def vacate(self, state: State) -> None:
        if state.slot is not None:
            self._faces.drop(state.home, state.slot)
            self.slots[state.home].give(state.slot, placed_bytes(state.bytes))
            state.slot = state.mark = None

    def enter(
        self, states: dict[int, State], program: Program, arena: Memory, unwritten: Set[int] = frozenset()
    ) -> None:
        """Move every state to its place at the start of ``program``'s step, and others out of the arena.

        States move through a home only to break a cycle of moves within the arena. No op writes the ``unwritten``
        storages: they are evicted without a copy, as a disk keeps their bytes. Raises ``SpillError`` or
        ``TransferError``.
        """
        self.arena = arena
        last = len(self.slots) - 1
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage is not None}
        lodgings = {lodging.storage: lodging.home for lodging in program.lodgings}
        leaving = {s: lodgings.get(s, 0) for s, state in states.items() if s not in wrapping and is_large(state.bytes)}
        self._settled = {id(states[storage]) for storage in leaving}
        self._relied_on = {id(states[storage]) for storage in program.clean}
        staying = {id(states[storage]) for storage in wrapping if storage in states}
        for state in self._states.values():
            if state.is_idle():
                self.discard(state)
            elif state.place is Place.ARENA and id(state) not in staying:
                self._out(state)
        kept_ids = self._relied_on | {
            id(state) for s, state in states.items() if s in unwritten and not self.slots[state.home].home.in_memory
        }
        # Moves to the last home make room at nearer ones, so they come first.
        for storage, home in leaving.items():
            if home == last:
                self.to_home(states[storage], home)
        self._rearrange([(state, wrapping[s]) for s, state in states.items() if s in wrapping], arena, kept_ids)
        for home in range(last - 1, -1, -1):
            for storage, target_home in leaving.items():
                if target_home == home:
                    self.to_home(states[storage], home)
        for storage in program.clean:
            self._copy_home(states[storage], lodgings.get(storage, 0), arena)
        for storage in sorted(leaving.keys() - unwritten):
            self._to_slot(states[storage])
        self._in_files = [state for state in states.values() if self._is_in_file(state)]

    def _to_slot(self, state: State) -> None:
        """Move a state that a step writes to a writable slot."""
        if state.place is not Place.HOME or state.slot is None or not self._is_range(state):
            return
        self._notice(state)
        old, slots = state.slot, self.slots[state.home]
        new = self._take(state.home, state)
        with contextlib.ExitStack() as undo:
            undo.callback(slots.give, new, placed_bytes(state.bytes))
            buffer = copy_buffer()
            for start in range(0, state.bytes, len(buffer)):
                piece = buffer[: min(len(buffer), state.bytes - start)]
                slots.home.read(old + start, piece)
                slots.home.write(new + start, piece)
            undo.pop_all()
        self.vacate(state)
        state.slot = new
        state.show(self._faces.show(state.home, new, state.bytes), Place.HOME)

    def _copy_home(self, state: State, home: int, arena: Memory) -> None:
        if state.home != home:
            self.vacate(state)
        if state.slot is None:
            state.slot, state.home = self._take(home, state), home
            state.mark = None
        self.bring_home(state, arena)

    def bring_home(self, state: State, arena: Memory) -> bool:
        """Update the home copy of a state in the arena; return whether it was outdated.

        A failed update leaves no copy, and the next call creates one.
        """
        mark = state.fingerprint()
        if mark == state.mark:
            return False
        if state.slot is None or self._is_range(state):
            self.vacate(state)
            state.slot = self._take(state.home, state)
        store = self.slots[state.home].home
        with contextlib.ExitStack() as undo:
            undo.callback(self.vacate, state)  # the slot may be partly written
            arena.save(state.offset_in(arena.address), placed_bytes(state.bytes), store, state.slot)
            undo.pop_all()
        state.mark = mark
        return True

    def notice_writes(self) -> None:
        """Move written tensors from files that the home does not own to its own file."""
        for state in self._in_files:
            self._notice(state)
        self._in_files = [state for state in self._in_files if self._is_in_file(state)]

    def _notice(self, state: State) -> None:
        if self._is_in_file(state) and state.slot is not None and self.slots[state.home].was_written(state.slot):
            self.slots[state.home].own(state.slot)
            _log.info("%s was changed, and has been moved from the file that it was read from in place", state.key)

    def _is_range(self, state: State) -> bool:
        """Return whether the slot is, or was, in a file that the home does not own; it is never written."""
        return state.slot is not None and self.slots[state.home].is_range(state.slot)

    def _is_in_file(self, state: State) -> bool:
        return state.place is Place.HOME and state.slot is not None and self.slots[state.home].is_in_file(state.slot)

    def leave(self, arena: Memory) -> None:
        """Move every state out of the arena: to the nearest home with room or, if small, to ordinary memory."""
        self._settled = {id(state) for state in self._states.values()}
        for state in self._states.values():
            if state.is_idle():
                self.discard(state)
            elif state.place is Place.ARENA:
                self._out(state)

    def discard(self, state: State) -> None:
        self.vacate(state)
        state.lose()

    def _out(self, state: State) -> None:
        if state.slot is not None and self._leaves_for(state, state.home):
            return
        if not is_large(state.bytes) or not any(self._leaves_for(state, home) for home in range(len(self.slots))):
            self.to_own(state)

    def _rearrange(self, placements: list[tuple[State, Block]], arena: Memory, kept_ids: Set[int]) -> None:
        """Move states to their blocks; states in ``kept_ids`` keep their copies at home."""
        offsets = {id(s): s.offset_in(arena.address) for s, _ in placements if s.place is Place.ARENA}
        moving = [(s, b) for s, b in placements if id(s) in offsets and offsets[id(s)] != b.offset]
        sources = [(offsets[id(s)], offsets[id(s)] + b.bytes) for s, b in moving]
        for number in move_order(sources, [b.offset for _, b in moving]):
            if number < 0:
                self._out(moving[~number][0])
                continue
            state, block = moving[number]
            if arena.move(offsets[id(state)], block.offset, state.bytes):
                state.show(arena.view(block.offset, state.bytes), Place.ARENA)
            else:
                self._out(state)
        for state, block in placements:
            if state.place is not Place.ARENA:
                self._to_arena(state, block, arena, keep=id(state) in kept_ids)

    def _leaves_for(self, state: State, home: int) -> bool:
        try:
            self.to_home(state, home)
        except SpillError:
            return False
        return True

    def to_own(self, state: State) -> None:
        if state.stays():
            state.look_at(None)
            for window in state.windows:
                window.point_at(window.known_as.data)
            state.become(Place.OWN)
        else:
            data = state.bytes_now()
            if not self._is_in_file(state):  # its pages are mapped for this tensor alone, so it owns them
                data = data.to("cpu", copy=True)
            state.show(data, Place.OWN)
        self.vacate(state)

    def to_home(self, state: State, home: int) -> None:
        if state.place is Place.HOME and state.home == home:
            return
        if state.place is Place.ARENA and state.slot is not None and state.home == home and self.arena is not None:
            self.bring_home(state, self.arena)
            state.mark = None
            state.show(self._faces.show(home, state.slot, state.bytes), Place.HOME)
            return
        self._notice(state)
        slots = self.slots[home]
        fresh = slots.end
        slot = self._take(home, state)
        face = self._faces.show(home, slot, state.bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(slots.give, slot, placed_bytes(state.bytes))
            undo.callback(self._faces.drop, home, slot)
            if state.place is Place.ARENA and self.arena is not None:
                offset = state.offset_in(self.arena.address)
                self.arena.save(offset, placed_bytes(state.bytes), slots.home, slot)
            elif state.place is Place.HOME and slots.home.in_memory and state.slot is not None:
                # Reading it through its face would fill the page cache.
                self.slots[state.home].home.read(state.slot, internals.memory_of(face))
            elif state.place is not Place.UNBORN:
                slots.home.write(slot, internals.memory_of(state.bytes_now().cpu()))
            elif slot < fresh:
                face.zero_()
            undo.pop_all()
        self.vacate(state)
        state.slot, state.home = slot, home
        state.show(face, Place.HOME)

    def _to_arena(self, state: State, block: Block, arena: Memory, *, keep: bool) -> None:
        target = arena.view(block.offset, state.bytes)
        if state.place is Place.UNBORN:
            target.zero_()
        elif state.place is Place.HOME and state.slot is not None:
            self._notice(state)
            arena.load(block.offset, block.bytes, self.slots[state.home].home, state.slot)
        else:
            target.copy_(state.bytes_now())
        if keep and state.place is Place.HOME and state.slot is not None:
            self._faces.drop(state.home, state.slot)
            state.show(target, Place.ARENA)
            state.mark = state.fingerprint()
            return
        self.vacate(state)
        state.show(target, Place.ARENA)


def move_order(sources: Sequence[tuple[int, int]], targets: Sequence[int]) -> list[int]:
    """Order moves within one region such that no bytes are overwritten before they have moved.

    ``sources`` are (start, end), ``targets`` starts; both are disjoint. To break a cycle, one state must be moved out
    of the region first: it is listed as ``~number``, and its move is left out.
    """
    ends = [start + end - begin for start, (begin, end) in zip(targets, sources, strict=True)]
    by_address = sorted(range(len(sources)), key=lambda i: sources[i])
    starts = [sources[i][0] for i in by_address]
    # For each move, the moves with sources that overlap its target; and the reverse.
    blockers: list[set[int]] = []
    waiting: list[list[int]] = [[] for _ in sources]
    for number, target in enumerate(targets):
        overlapping: set[int] = set()
        for position in range(max(bisect_right(starts, target) - 1, 0), bisect_left(starts, ends[number])):
            source = by_address[position]
            if source != number and sources[source][1] > target and sources[source][0] < ends[number]:
                overlapping.add(source)
                waiting[source].append(number)
        blockers.append(overlapping)
    ready = [number for number, overlapping in enumerate(blockers) if not overlapping]
    blocked = set(range(len(sources))) - set(ready)
    order: list[int] = []
    while ready or blocked:
        if ready:
            move = ready.pop()
            order.append(move)
        else:
            # The smallest one in a cycle takes the least time to move out.
            move = min({b for number in blocked for b in blockers[number]}, key=lambda i: (_length(sources[i]), i))
            blocked.discard(move)
            order.append(~move)
        for number in waiting[move]:
            blockers[number].discard(move)
            if not blockers[number] and number in blocked:
                blocked.discard(number)
                ready.append(number)
    return order


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
