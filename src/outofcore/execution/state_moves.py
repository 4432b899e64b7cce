"""Move the bytes of states between memory of their own, their homes and the arena.

``TRANSITIONS`` in ``aliases`` lists all moves.
"""

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
    """Moves states, and finds room for them at homes; ``states`` are all that may have to make way for others.

    ``faces`` are of the homes, nearest first; the program in the arena chooses the home of each large state. Small ones
    (below 64 KiB) get memory of their own instead.
    """

    def __init__(self, faces: Faces, states: Mapping[str, State]) -> None:
        self._faces = faces
        self.slots = faces.slots
        self._states = states
        self.arena: Memory | None = None
        self._settled: set[int] = set()  # ids of states that are not to make way for others
        self._in_files: list[State] = []  # of the program in the arena, what is shown in others' files
        self._relied_on: set[int] = set()  # ids of states in the arena of which a program needs the copy at home

    def slot(self, state: State) -> int:
        """Return the offset of a large state's slot at its home, by default a new one at the first home."""
        if state.place is Place.UNBORN and (state.home != 0 or self._is_range(state)):
            self.vacate(state)  # what a step leaves, it writes to the first home
        if state.slot is None:
            state.slot, state.home = self._take(0, state), 0
        return state.slot

    def _take(self, home: int, state: State) -> int:
        """Make room for a state at a home, moving others if needed; raises ``SpillError``."""
        count = placed_bytes(state.bytes)
        slots, last = self.slots[home], len(self.slots) - 1
        try:
            return slots.take(count)
        except SpillError:
            kept = [s for s in self._states.values() if s.place is Place.ARENA and s.home == home]
            spare = [s for s in kept if s.slot is not None and id(s) not in self._relied_on]
            spare = [s for s in spare if s.slot is not None and not slots.is_in_file(s.slot)]
            for other in spare:
                self.vacate(other)
            if home == last and not slots.home.in_memory and not spare:
                raise
        if home < last:
            for other in self._states.values():
                if other.place is Place.HOME and other.home == home and id(other) not in self._settled:
                    self.to_home(other, last)
        if slots.home.in_memory:
            self._compact(home)
        return slots.take(count)

    def _compact(self, home: int) -> None:
        """Move the states at a home in memory together, so that free room is contiguous."""
        slots = self.slots[home]
        held = (Place.HOME, Place.ARENA)
        here = [s for s in self._states.values() if s.place in held and s.home == home and s.slot is not None]
        for state in sorted(here, key=lambda s: s.slot or 0):
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
        """Free the slot of a state, if it has one."""
        if state.slot is not None:
            self._faces.drop(state.home, state.slot)
            self.slots[state.home].give(state.slot, placed_bytes(state.bytes))
            state.slot = state.mark = None

    def enter(
        self, states: dict[int, State], program: Program, arena: Memory, unwritten: Set[int] = frozenset()
    ) -> None:
        """Bring every state to where ``program`` expects it when a step starts; the arena then holds no other.

        What is in the arena for another program stays if its place is the same, and else moves within the arena; it
        goes by way of a home only where two are in each other's place. No op writes the ``unwritten`` storages: they
        may be in the arena and on a disk at once, so that they leave without a copy. Raises ``SpillError`` or
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
        kept = self._relied_on | {
            id(state) for s, state in states.items() if s in unwritten and not self.slots[state.home].home.in_memory
        }
        # What goes far first: it makes room for what comes near.
        for storage, home in leaving.items():
            if home == last:
                self.to_home(states[storage], home)
        self._rearrange([(state, wrapping[s]) for s, state in states.items() if s in wrapping], arena, kept)
        for home in range(last - 1, -1, -1):
            for storage, wanted in leaving.items():
                if wanted == home:
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
        """Copy a state in the arena to a home."""
        if state.home != home:
            self.vacate(state)
        if state.slot is None:
            state.slot, state.home = self._take(home, state), home
            state.mark = None
        self.bring_home(state, arena)

    def bring_home(self, state: State, arena: Memory) -> bool:
        """Write a state in the arena to its copy at home if they differ; return whether they did.

        A copy in somebody else's file is not written: the state moves to a slot of its own. If this fails there is no
        copy, and the next attempt makes one.
        """
        mark = state.fingerprint()
        if mark == state.mark:
            return False
        if state.slot is None or self._is_range(state):
            self.vacate(state)
            state.slot = self._take(state.home, state)
        store = self.slots[state.home].home
        with contextlib.ExitStack() as undo:
            undo.callback(self.vacate, state)  # who knows what is there
            arena.save(state.offset_in(arena.address), placed_bytes(state.bytes), store, state.slot)
            undo.pop_all()
        state.mark = mark
        return True

    def notice_writes(self) -> None:
        """Keep what the user has written to tensors that are shown in a file."""
        for state in self._in_files:
            self._notice(state)
        self._in_files = [state for state in self._in_files if self._is_in_file(state)]

    def _notice(self, state: State) -> None:
        if self._is_in_file(state) and state.slot is not None and self.slots[state.home].was_written(state.slot):
            self.slots[state.home].own(state.slot)
            _log.info("%s was changed, and has been moved from the file that it was read from in place", state.key)

    def _is_range(self, state: State) -> bool:
        """Return whether its slot is, or was, in somebody else's file: not page-aligned, and never written."""
        return state.slot is not None and self.slots[state.home].is_range(state.slot)

    def _is_in_file(self, state: State) -> bool:
        return state.place is Place.HOME and state.slot is not None and self.slots[state.home].is_in_file(state.slot)

    def leave(self, arena: Memory) -> None:
        """Take every state out of the arena: to the nearest home with room or, if small, to memory of its own."""
        self._settled = {id(state) for state in self._states.values()}
        for state in self._states.values():
            if state.is_idle():
                self.discard(state)
            elif state.place is Place.ARENA:
                self._out(state)

    def discard(self, state: State) -> None:
        """Forget the bytes of a state that nobody refers to."""
        self.vacate(state)
        state.lose()

    def _out(self, state: State) -> None:
        if state.slot is not None and self._leaves_for(state, state.home):
            return
        if not is_large(state.bytes) or not any(self._leaves_for(state, home) for home in range(len(self.slots))):
            self.to_own(state)

    def _rearrange(self, wanted: list[tuple[State, Block]], arena: Memory, kept: Set[int]) -> None:
        """Bring states into their blocks, those in the arena first: a move may need the room of another.

        ``kept`` are ids of the states whose copies at home are kept.
        """
        now = {id(s): s.offset_in(arena.address) for s, _ in wanted if s.place is Place.ARENA}
        moving = [(s, b) for s, b in wanted if id(s) in now and now[id(s)] != b.offset]
        sources = [(now[id(s)], now[id(s)] + b.bytes) for s, b in moving]
        for number in move_order(sources, [b.offset for _, b in moving]):
            if number < 0:
                self._out(moving[~number][0])
                continue
            state, block = moving[number]
            if arena.move(now[id(state)], block.offset, state.bytes):
                state.show(arena.view(block.offset, state.bytes), Place.ARENA)
            else:
                self._out(state)
        for state, block in wanted:
            if state.place is not Place.ARENA:
                self._to_arena(state, block, arena, keep=id(state) in kept)

    def _leaves_for(self, state: State, home: int) -> bool:
        try:
            self.to_home(state, home)
        except SpillError:
            return False
        return True

    def to_own(self, state: State) -> None:
        """Give a state memory of its own, as plain PyTorch has it, on the CPU."""
        if state.stays():
            state.look_at(None)
            for window in state.windows:
                window.point_at(window.known_as.data)
            state.become(Place.OWN)
        else:
            now = state.bytes_now()
            if not self._is_in_file(state):  # there its pages are its own already: they are mapped for it alone
                now = now.to("cpu", copy=True)
            state.show(now, Place.OWN)
        self.vacate(state)

    def to_home(self, state: State, home: int) -> None:
        """Move a state to a home; raises ``SpillError`` or ``TransferError``."""
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

    ``sources`` are (start, end), ``targets`` starts; neither overlap among themselves, but a target may overlap its own
    source. Returns the numbers of the moves; in a cycle one has to be put aside first: it is listed as ``~number``, and
    its move is left out.
    """
    ends = [start + end - begin for start, (begin, end) in zip(targets, sources, strict=True)]
    by_address = sorted(range(len(sources)), key=lambda i: sources[i])
    starts = [sources[i][0] for i in by_address]
    # By move: whose sources lie where it goes; and the reverse.
    blockers: list[set[int]] = []
    waiting: list[list[int]] = [[] for _ in sources]
    for number, target in enumerate(targets):
        found: set[int] = set()
        for at in range(max(bisect_right(starts, target) - 1, 0), bisect_left(starts, ends[number])):
            other = by_address[at]
            if other != number and sources[other][1] > target and sources[other][0] < ends[number]:
                found.add(other)
                waiting[other].append(number)
        blockers.append(found)
    ready = [number for number, found in enumerate(blockers) if not found]
    left = set(range(len(sources))) - set(ready)
    order: list[int] = []
    while ready or left:
        if ready:
            gone = ready.pop()
            order.append(gone)
        else:
            # Of those in each other's place the smallest; it takes the least time to put aside.
            gone = min({b for number in left for b in blockers[number]}, key=lambda i: (_length(sources[i]), i))
            left.discard(gone)
            order.append(~gone)
        for number in waiting[gone]:
            blockers[number].discard(gone)
            if not blockers[number] and number in left:
                left.discard(number)
                ready.append(number)
    return order


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
