"""Move states between ordinary memory, homes and the arena; ``aliases.TRANSITIONS`` lists all moves."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.errors import SpillError
from outofcore.execution.aliases import HomeTensors, PersistentState, StatePlace
from outofcore.execution.arena import DeviceArena
from outofcore.program import Block, Program
from outofcore.runtime.file_io import new_copy_buffer

_log = logging.getLogger("outofcore")


class StateMoves:
    """Moves states between ordinary memory, homes and the arena. States below 64 KiB take no slot at a home."""

    def __init__(self, home_tensors: HomeTensors, states: Mapping[str, PersistentState]) -> None:
        self._home_tensors = home_tensors
        self.slots = home_tensors.slots
        self._states = states
        self.arena: DeviceArena | None = None
        self._fixed_at_home: set[int] = set()  # ids of states that must not move to make room
        self._states_in_files: list[PersistentState] = []  # the program's states in files that the home does not own
        self._needed_copies: set[int] = set()  # ids of states in the arena with a home copy that the program needs

    def ensure_slot(self, state: PersistentState) -> int:
        """Return the offset of a large state's slot; a state without one gets a slot at the first home."""
        if state.place is StatePlace.ABSENT and (state.home != 0 or self._is_range(state)):
            self.release_slot(state)  # steps write new state to the first home
        if state.slot is None:
            state.slot, state.home = self._take_slot(0, state), 0
        return state.slot

    def _take_slot(self, home: int, state: PersistentState) -> int:
        """Take a slot for a state at a home, and make room there if needed; raise ``SpillError`` if that fails."""
        count = placed_bytes(state.bytes)
        slots, last = self.slots[home], len(self.slots) - 1
        try:
            return slots.take(count)
        except SpillError:
            in_arena = [s for s in self._states.values() if s.place is StatePlace.ARENA and s.home == home]
            spare = [s for s in in_arena if s.slot is not None and id(s) not in self._needed_copies]
            spare = [s for s in spare if s.slot is not None and not slots.is_in_file(s.slot)]
            for neighbor in spare:
                self.release_slot(neighbor)
            if home == last and not slots.home.in_memory and not spare:
                raise
        if home < last:
            for neighbor in self._states.values():
                if (
                    neighbor.place is StatePlace.HOME
                    and neighbor.home == home
                    and id(neighbor) not in self._fixed_at_home
                ):
                    self.move_to_home(neighbor, last)
        if slots.home.in_memory:
            self._compact(home)
        return slots.take(count)

    def _compact(self, home: int) -> None:
        """Defragment a home in memory, so that its free room is contiguous."""
        slots = self.slots[home]
        places = (StatePlace.HOME, StatePlace.ARENA)
        states = [s for s in self._states.values() if s.place in places and s.home == home and s.slot is not None]
        for state in sorted(states, key=lambda s: s.slot or 0):
            old, count = self.ensure_slot(state), placed_bytes(state.bytes)
            self._home_tensors.forget(home, old)
            slots.free(old, count)
            state.slot = slots.take(count)
            if state.slot != old:
                slots.home.write(state.slot, internals.memory_of(state.current_bytes()))
            if state.place is StatePlace.HOME:
                state.show(self._home_tensors.create(home, state.slot, state.bytes), StatePlace.HOME)
            elif state.slot != old:
                state.home_fingerprint = state.fingerprint()

    def release_slot(self, state: PersistentState) -> None:
        """Free a state's slot, and forget its home tensor. The state's bytes must be elsewhere, or unused."""
        if state.slot is not None:
            self._home_tensors.forget(state.home, state.slot)
            self.slots[state.home].free(state.slot, placed_bytes(state.bytes))
            state.slot = state.home_fingerprint = None

    def enter(
        self,
        states: dict[int, PersistentState],
        program: Program,
        arena: DeviceArena,
        unwritten: Set[int] = frozenset(),
    ) -> None:
        """Move the states of a program to their planned places, and all other states out of the arena.

        No op writes the ``unwritten`` storages: in the arena they keep their slots on a disk, so that evicting them
        needs no copy. Raises ``SpillError`` or ``TransferError``.
        """
        self.arena = arena
        last = len(self.slots) - 1
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage is not None}
        lodgings = {lodging.storage: lodging.home for lodging in program.lodgings}
        leaving = {s: lodgings.get(s, 0) for s, state in states.items() if s not in wrapping and is_large(state.bytes)}
        self._fixed_at_home = {id(states[storage]) for storage in leaving}
        self._needed_copies = {id(states[storage]) for storage in program.clean}
        staying = {id(states[storage]) for storage in wrapping if storage in states}
        for state in self._states.values():
            if state.is_unused():
                self.discard(state)
            elif state.place is StatePlace.ARENA and id(state) not in staying:
                self._move_out(state)
        kept_ids = self._needed_copies | {
            id(state) for s, state in states.items() if s in unwritten and not self.slots[state.home].home.in_memory
        }
        # Moves to the last home make room at nearer ones, so they come first.
        for storage, home in leaving.items():
            if home == last:
                self.move_to_home(states[storage], home)
        self._rearrange([(state, wrapping[s]) for s, state in states.items() if s in wrapping], arena, kept_ids)
        for home in range(last - 1, -1, -1):
            for storage, target_home in leaving.items():
                if target_home == home:
                    self.move_to_home(states[storage], home)
        for storage in program.clean:
            self._ensure_home_copy(states[storage], lodgings.get(storage, 0), arena)
        for storage in sorted(leaving.keys() - unwritten):
            self._make_writable(states[storage])
        self._states_in_files = [state for state in states.values() if self._is_in_file(state)]

    def _make_writable(self, state: PersistentState) -> None:
        """Move a state that is in a user's file to a slot that the step may write."""
        if state.place is not StatePlace.HOME or state.slot is None or not self._is_range(state):
            return
        self._move_if_written(state)
        old, slots = state.slot, self.slots[state.home]
        new = self._take_slot(state.home, state)
        with contextlib.ExitStack() as undo:
            undo.callback(slots.free, new, placed_bytes(state.bytes))
            buffer = new_copy_buffer()
            for start in range(0, state.bytes, len(buffer)):
                piece = buffer[: min(len(buffer), state.bytes - start)]
                slots.home.read(old + start, piece)
                slots.home.write(new + start, piece)
            undo.pop_all()
        self.release_slot(state)
        state.slot = new
        state.show(self._home_tensors.create(state.home, new, state.bytes), StatePlace.HOME)

    def _ensure_home_copy(self, state: PersistentState, home: int, arena: DeviceArena) -> None:
        """Ensure that a state in the arena has a current copy at ``home``."""
        if state.home != home:
            self.release_slot(state)
        if state.slot is None:
            state.slot, state.home = self._take_slot(home, state), home
            state.home_fingerprint = None
        self.update_home_copy(state, arena)

    def update_home_copy(self, state: PersistentState, arena: DeviceArena) -> bool:
        """Update the copy at home of a state in the arena; return whether it was out of date."""
        fingerprint = state.fingerprint()
        if fingerprint == state.home_fingerprint:
            return False
        if state.slot is None or self._is_range(state):
            self.release_slot(state)
            state.slot = self._take_slot(state.home, state)
        store = self.slots[state.home].home
        with contextlib.ExitStack() as undo:
            undo.callback(self.release_slot, state)  # the slot may be partly written; the next call takes another one
            arena.save(state.offset_in(arena.address), placed_bytes(state.bytes), store, state.slot)
            undo.pop_all()
        state.home_fingerprint = fingerprint
        return True

    def move_written_states(self) -> None:
        """Move states that the user has written from the user's files to the home's own file."""
        for state in self._states_in_files:
            self._move_if_written(state)
        self._states_in_files = [state for state in self._states_in_files if self._is_in_file(state)]

    def _move_if_written(self, state: PersistentState) -> None:
        """Move a state from a user's file to the home's own file if the user has changed it."""
        if self._is_in_file(state) and state.slot is not None and self.slots[state.home].was_written(state.slot):
            self.slots[state.home].move_to_home(state.slot)
            _log.info("%s was changed, so it was moved from the user's file (unchanged) to the home", state.key)

    def _is_range(self, state: PersistentState) -> bool:
        """Return whether the slot is or was a range of a user's file; such a slot is never written."""
        return state.slot is not None and self.slots[state.home].is_range(state.slot)

    def _is_in_file(self, state: PersistentState) -> bool:
        return (
            state.place is StatePlace.HOME and state.slot is not None and self.slots[state.home].is_in_file(state.slot)
        )

    def leave_arena(self, arena: DeviceArena) -> None:
        """Move every state out of the arena, to a home or to ordinary memory."""
        self._fixed_at_home = {id(state) for state in self._states.values()}
        for state in self._states.values():
            if state.is_unused():
                self.discard(state)
            elif state.place is StatePlace.ARENA:
                self._move_out(state)

    def discard(self, state: PersistentState) -> None:
        self.release_slot(state)
        state.mark_absent()

    def _move_out(self, state: PersistentState) -> None:
        """Move a state from the arena to its home, else to the nearest home with room, else to ordinary memory."""
        if state.slot is not None and self._try_home(state, state.home):
            return
        if not is_large(state.bytes) or not any(self._try_home(state, home) for home in range(len(self.slots))):
            self.move_to_own_memory(state)

    def _rearrange(
        self, placements: list[tuple[PersistentState, Block]], arena: DeviceArena, kept_ids: Set[int]
    ) -> None:
        """Move states to their planned blocks in the arena, in an order that preserves their bytes."""
        offsets = {id(s): s.offset_in(arena.address) for s, _ in placements if s.place is StatePlace.ARENA}
        moving = [(s, b) for s, b in placements if id(s) in offsets and offsets[id(s)] != b.offset]
        sources = [(offsets[id(s)], offsets[id(s)] + b.bytes) for s, b in moving]
        for number in move_order(sources, [b.offset for _, b in moving]):
            if number < 0:
                self._move_out(moving[~number][0])
                continue
            state, block = moving[number]
            if arena.move(offsets[id(state)], block.offset, state.bytes):
                state.show(arena.view(block.offset, state.bytes), StatePlace.ARENA)
            else:
                self._move_out(state)
        for state, block in placements:
            if state.place is not StatePlace.ARENA:
                self._move_to_arena(state, block, arena, keep=id(state) in kept_ids)

    def _try_home(self, state: PersistentState, home: int) -> bool:
        """Move a state to a home; return False if the home has no room."""
        try:
            self.move_to_home(state, home)
        except SpillError:
            return False
        return True

    def move_to_own_memory(self, state: PersistentState) -> None:
        """Move a state to ordinary host memory, or back to the user's shared memory, and free its slot."""
        if state.is_shared():
            state.set_shown(None)
            for alias in state.aliases:
                alias.point_at(alias.user_tensor.data)
            state.become(StatePlace.OWN)
        else:
            data = state.current_bytes()
            if not self._is_in_file(state):  # its pages are mapped for this tensor alone, so it owns them
                data = data.to("cpu", copy=True)
            state.show(data, StatePlace.OWN)
        self.release_slot(state)

    def move_to_home(self, state: PersistentState, home: int) -> None:
        """Move a state to a slot at a home. After a ``SpillError`` the state is still in its old place."""
        if state.place is StatePlace.HOME and state.home == home:
            return
        if state.place is StatePlace.ARENA and state.slot is not None and state.home == home and self.arena is not None:
            self.update_home_copy(state, self.arena)
            state.home_fingerprint = None
            state.show(self._home_tensors.create(home, state.slot, state.bytes), StatePlace.HOME)
            return
        self._move_if_written(state)
        slots = self.slots[home]
        old_end = slots.end
        slot = self._take_slot(home, state)
        home_tensor = self._home_tensors.create(home, slot, state.bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(slots.free, slot, placed_bytes(state.bytes))
            undo.callback(self._home_tensors.forget, home, slot)
            if state.place is StatePlace.ARENA and self.arena is not None:
                offset = state.offset_in(self.arena.address)
                self.arena.save(offset, placed_bytes(state.bytes), slots.home, slot)
            elif state.place is StatePlace.HOME and slots.home.in_memory and state.slot is not None:
                # Reading it through its home tensor would fill the page cache.
                self.slots[state.home].home.read(state.slot, internals.memory_of(home_tensor))
            elif state.place is not StatePlace.ABSENT:
                slots.home.write(slot, internals.memory_of(state.current_bytes().cpu()))
            elif slot < old_end:
                home_tensor.zero_()
            undo.pop_all()
        self.release_slot(state)
        state.slot, state.home = slot, home
        state.show(home_tensor, StatePlace.HOME)

    def _move_to_arena(self, state: PersistentState, block: Block, arena: DeviceArena, *, keep: bool) -> None:
        """Copy a state into its block in the arena; free its slot unless ``keep``."""
        target = arena.view(block.offset, state.bytes)
        if state.place is StatePlace.ABSENT:
            target.zero_()
        elif state.place is StatePlace.HOME and state.slot is not None:
            self._move_if_written(state)
            arena.load(block.offset, block.bytes, self.slots[state.home].home, state.slot)
        else:
            target.copy_(state.current_bytes())
        if keep and state.place is StatePlace.HOME and state.slot is not None:
            self._home_tensors.forget(state.home, state.slot)
            state.show(target, StatePlace.ARENA)
            state.home_fingerprint = state.fingerprint()
            return
        self.release_slot(state)
        state.show(target, StatePlace.ARENA)


def move_order(sources: Sequence[tuple[int, int]], targets: Sequence[int]) -> list[int]:
    """Return the indices of moves in an order that never overwrites bytes before they have moved.

    ``sources`` are (start, end), ``targets`` the new starts; both are disjoint. To break a cycle, one of its moves is
    returned as ``~index`` (negative): its bytes must leave the region at that point.
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
