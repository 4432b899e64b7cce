"""The tensors that persist across steps: where their bytes are between steps, and how they get there.

``Place`` names where they can be, ``TRANSITIONS`` how they get from one place to another (both in ``aliases``).

Between two steps each of them has a *face*: the bytes that the user's own tensor object points to. Those are always
current, because a step ends with each state in a fixed place: in the arena for resident ones, at home for the rest. So
reading a parameter, changing it in place, saving a state dict or evaluating the model needs nothing special.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from itertools import pairwise

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.capture.captured import Captured, GradientLeft, StateBinding, Value
from outofcore.errors import SpillError, StateError
from outofcore.execution.aliases import (
    Faces,
    Place,
    State,
    Window,
    displaced,
    let_go,
    lie_otherwise,
    shared_otherwise,
    take_over,
    unmoved,
)
from outofcore.execution.arena import Memory
from outofcore.execution.mapped_files import MappedFiles
from outofcore.execution.memory import Region, map_anonymous
from outofcore.graph import StorageKind
from outofcore.program import Block, Program
from outofcore.units import MIB

_log = logging.getLogger("outofcore")

# What moves between two slots does so in pieces of so many bytes.
_MOVED_BYTES = MIB


class StateKeeper:
    """Moves states between memory of their own, their home and the arena, and keeps their faces right.

    ``faces`` are of the homes, nearest first; the program in the arena chooses the home of each large state. Small ones
    (below 64 KiB) get memory of their own instead.
    """

    def __init__(self, faces: Faces) -> None:
        self._faces = faces
        self.slots = faces.slots
        self._states: dict[str, State] = {}
        self._by_tensor: dict[str, State] = {}
        self._arena: Memory | None = None
        self._settled: set[int] = set()  # ids of states that are not to make way for others
        self._in_files: list[State] = []  # of the program in the arena, what is shown in others' files
        self._relied_on: set[int] = set()  # ids of states in the arena of which a program needs the copy at home
        self._origins: dict[str, torch.device] = {}
        self.generation = 0  # how often all states were forgotten
        self._shared: list[tuple[State, Window]] = []  # what lies in memory that others see
        self._mapped: MappedFiles | None = None
        self._looked = False  # whether that is what is mapped now

    def adopt(self, captured: Captured) -> dict[int, State]:
        """Return the states of a capture by storage id, registering new ones; nothing is moved."""
        found: dict[int, State] = {}
        self._looked = False
        for binding in captured.states:
            value = captured.values[binding.value]
            count = captured.own_bytes(value.storage)
            state = self._by_tensor.get(binding.key) or found.get(value.storage)
            if state is None:
                place = Place.UNBORN if binding.tensor is None else Place.OWN
                state = self._states[binding.key] = State(binding.key, count, place)
            found[value.storage] = state
            if binding.key not in self._by_tensor:
                tensor = binding.tensor if binding.tensor is not None else torch.empty(0, dtype=value.dtype)
                state.origin = self._origins.setdefault(binding.key, tensor.device)
                window = Window(binding.key, tensor, value, tensor.data_ptr())
                if binding.tensor is not None:
                    self._leave_to_others(state, window)
                state.windows.append(window)
                self._by_tensor[binding.key] = state
                if binding.tensor is not None and state.place is not Place.UNBORN:
                    self._settle(state)
            elif binding.tensor is not None:
                self.rebind(state, binding, binding.tensor)
                if binding.kind is StorageKind.GRADIENT:
                    state.lay(binding.key, value)
        return found

    def _settle(self, state: State) -> None:
        """Record where the bytes are that the user, a creation at home or another step has brought."""
        if state.slot is not None and state.place is Place.HOME:
            return
        face = self._faces.find(state.windows[0].tensor)
        state.become(Place.OWN)
        if face is None and is_large(state.bytes) and self._stays_in_file(state):
            return
        if face is None or face.owned or face.bytes != state.bytes or state.slot is not None:
            return
        if state.lies_together():
            face.owned = True
            state.home, state.slot = face.home, face.offset
            state.become(Place.HOME)
            state.look_at(internals.storage_bytes(state.windows[0].tensor)[: state.bytes])

    def _stays_in_file(self, state: State) -> bool:
        """Adopt a state in place from a file that the user has mapped; return whether that is possible."""
        tensor = state.windows[0].tensor
        if state.slot is not None or not state.lies_together() or tensor.untyped_storage().nbytes() != state.bytes:
            return False
        face = self._faces.adopt_mapped(tensor, self._what_is_mapped())
        known = None if face is None else self._faces.find(face)
        if face is None or known is None:
            return False
        known.owned = True
        state.home, state.slot = known.home, known.offset
        state.show(face, Place.HOME)
        return True

    def _what_is_mapped(self) -> MappedFiles:
        if self._mapped is None:
            self._mapped = MappedFiles()
        elif not self._looked:
            self._mapped.look()
        self._looked = True
        return self._mapped

    def _leave_to_others(self, state: State, window: Window) -> bool:
        """Keep the user's tensor in place if others see its memory; return whether they do."""
        if not self._what_is_mapped().is_shared(window.tensor):
            return False
        window.stay()
        self._shared.append((state, window))
        _log.info("%s lies in memory that others see, and stays there beside the budget", window.key)
        return True

    def read_shared(self) -> None:
        """Copy memory that files or other processes see to where the step expects it.

        Raises ``StateError`` if the user has put something of another shape or dtype there.
        """
        for _, window in self._shared:
            window.read()

    def write_shared(self, written: Set[int]) -> None:
        """Copy the states with these ids, which a step has written, to memory that others see."""
        for state, window in self._shared:
            if id(state) in written:
                window.write()

    def hand_over(self) -> None:
        """Leave what is at home to whoever needs it next; to be called while nothing is in the arena.

        It moves to the last home: the next owner could not free the room that it needs at a nearer one.
        """
        last = len(self.slots) - 1
        for state in self._states.values():
            if state.stays():
                self._to_own(state)
            if state.place is Place.HOME and state.home != last:
                with contextlib.suppress(SpillError):
                    self._to_home(state, last)
            if state.place is Place.HOME and state.slot is not None:
                self._faces.disown(state.home, state.slot, placed_bytes(state.bytes))
                state.slot = None
                state.become(Place.OWN)
                state.look_at(None)
            else:
                self._vacate(state)

    def take_back(self) -> bool:
        """Find where everything is after others have had it.

        Returns False if tensors share memory, or are laid out, otherwise than before. Raises ``StateError`` if
        something has another shape or dtype.
        """
        known = [state for state in self._states.values() if state.place is not Place.UNBORN]
        if shared_otherwise(known) or lie_otherwise(known):
            return False
        self._looked = False
        for state in self._states.values():
            if state.place is Place.OWN:
                take_over([state])
                self._settle(state)
        return True

    def let_go(self) -> None:
        """Release the user's replacements of what was shown; ``forget_all`` must follow."""
        for state in let_go(self._states.values()):
            self._vacate(state)
            state.lose()

    def forget_all(self) -> None:
        """Forget all states while nothing is in the arena. What is at home stays there."""
        self.hand_over()
        self._states.clear()
        self._by_tensor.clear()
        self._shared.clear()
        self.generation += 1

    def gradient(self, captured: Captured, left: GradientLeft) -> State:
        """Return the state for a gradient that a step leaves behind."""
        key = f"{captured.states[left.parameter].key}.grad"
        state = self._by_tensor.get(key)
        if state is None:
            value = captured.values[left.value]
            state = State(key, captured.own_bytes(value.storage), Place.UNBORN)
            state.windows.append(Window(key, torch.empty(0, dtype=value.dtype), value))
            self._states[key] = self._by_tensor[key] = state
        return state

    def tensor(self, binding: StateBinding) -> torch.Tensor:
        """Return the user's tensor of a binding; for optimizer state that was just created, the one to be shown."""
        for window in self._by_tensor[binding.key].windows:
            if window.key == binding.key:
                return window.known_as
        raise StateError(f"{binding.key} has no tensor")

    def slot(self, state: State) -> int:
        """Return the offset of a large state's slot at its home, by default a new one at the first home."""
        if state.place is Place.UNBORN and (state.home != 0 or self._is_range(state)):
            self._vacate(state)  # what a step leaves, it writes to the first home
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
                self._vacate(other)
            if home == last and not slots.home.in_memory and not spare:
                raise
        if home < last:
            for other in self._states.values():
                if other.place is Place.HOME and other.home == home and id(other) not in self._settled:
                    self._to_home(other, last)
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

    def _vacate(self, state: State) -> None:
        if state.slot is not None:
            self._faces.drop(state.home, state.slot)
            self.slots[state.home].give(state.slot, placed_bytes(state.bytes))
            state.slot = state.mark = None

    def rebind(self, state: State, binding: StateBinding, tensor: torch.Tensor) -> None:
        """Record the user's new tensor object for a state; raises ``StateError`` for another shape or dtype."""
        for window in state.windows:
            if window.key != binding.key or window.known_as is tensor:
                continue
            self._looked = False
            if window.users is not None:
                window.users, window.seen = tensor, None
                window.check_alike()
                continue
            old, window.tensor, window.stands_in = window.tensor, tensor, False
            window.check_alike()
            self._leave_to_others(state, window)
            if state.shown is None:
                window.address = tensor.data_ptr()
                self._settle(state)
                continue
            if old.data_ptr() == window.address:
                window.address = -1
                reference = weakref.ref(old)
                del old
                self._faces.part(reference())
            take_over([state])
            # What was written there when it came home is not what is there now.
            self.slots[state.home].home.start()

    def taken(self, state: State) -> None:
        """Handle a gradient that the user has taken away: the next one is another tensor."""
        if state.place is Place.UNBORN:
            return
        put_aside = state.windows[0].give_up()
        if state.place in (Place.HOME, Place.ARENA):
            self._faces.part(put_aside)
        state.lose()

    def arrived(self, state: State, value: Value, own: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor of a gradient that a step has just left at its home, or in memory of its own."""
        state.windows[0].renew(value)
        state.show(*((self._face(state), Place.HOME) if own is None else (own, Place.OWN)))
        return state.windows[0].tensor

    def stayed(self, state: State, value: Value, arena: Memory, offset: int) -> torch.Tensor:
        """Return the tensor of a gradient that a step has just left in the arena, where it stays until the next one."""
        known = state.windows[0].renew(value)
        if not known or state.place is not Place.ARENA or state.offset_in(arena.address) != offset:
            self._vacate(state)
            state.show(arena.view(offset, state.bytes), Place.ARENA)
        return state.windows[0].tensor

    def forget(self, state: State, binding: StateBinding) -> None:
        """Handle a gradient that the user's step has cleared: only those who still hold it need its bytes.

        The program in the arena still expects a gradient there, so a stand-in replaces it.
        """
        for window in state.windows:
            if window.key == binding.key:
                self._faces.part(window.give_up())
                window.stands_in = True
        if state.shown is None:
            state.lose()
        else:
            state.show(state.shown, state.place)

    def refresh(self, *, leaving: bool = False) -> list[str] | None:
        """Take over the user's replacements of faces, such as by ``p.data = other``, and return their keys.

        With ``leaving`` others take the model now, whose tensors may share that memory, so it stays in place. Returns
        None, having taken over nothing, if tensors share memory, or are laid out, otherwise than before. Raises
        ``StateError`` if the new data has another shape or dtype, or is in memory that processes share.
        """
        unborn = Place.UNBORN  # to look up a member of an enumeration takes longer than to compare with it
        known = [state for state in self._states.values() if state.place is not unborn]
        if unmoved(known):
            return []
        for state in known:
            state.check_in_place()
        self._looked = False
        for state in known if not leaving else ():
            for window in state.windows:
                if window.users is None and window.moved():
                    self._leave_to_others(state, window)
        if lie_otherwise(known) or shared_otherwise(known):
            return None
        for state in known if leaving else ():
            if state.is_elsewhere():
                self._vacate(state)
                state.look_at(None)
                state.become(Place.OWN)
        return take_over(known)

    def displaced(self) -> list[str]:
        """Return the keys of tensors whose memory is not what was last shown."""
        return displaced(self._states.values())

    def check(self) -> None:
        """Check the invariants that hold between two steps; for tests. Raises ``StateError`` that names the state."""
        spans: dict[object, list[tuple[int, int, str]]] = {}
        for state in self._states.values():
            shown, count = state.shown, placed_bytes(state.bytes)
            if state.place in (Place.HOME, Place.ARENA) and shown is None:
                raise StateError(f"{state.key} is at {state.place.value}, and nothing shows it: please report it")
            if state.place in (Place.OWN, Place.UNBORN) and shown is not None:
                raise StateError(f"{state.key} is {state.place.value}, and something is shown for it: please report it")
            if state.place is Place.OWN and state.slot is not None:
                raise StateError(f"{state.key} is {state.place.value}, and has a slot: please report it")
            if (state.mark is None) != (state.place is not Place.ARENA or state.slot is None):
                raise StateError(f"{state.key} is at {state.place.value}, and its copy is unknown: please report it")
            if state.place is Place.HOME and state.slot is None:
                raise StateError(f"{state.key} is at home, and has no slot: please report it")
            if state.slot is not None:
                spans.setdefault(state.home, []).append((state.slot, state.slot + count, state.key))
            if state.place is Place.ARENA and self._arena is not None and state.bytes:
                at = state.address - self._arena.address
                spans.setdefault("the arena", []).append((at, at + state.bytes, state.key))
        for where, found in spans.items():
            found.sort()
            for (_, end, one), (start, _, other) in pairwise(found):
                if start < end:
                    raise StateError(f"{one} and {other} overlap in {where}: please report it")

    def _face(self, state: State) -> torch.Tensor:
        slot = self.slot(state)
        return self._faces.show(state.home, slot, state.bytes)

    def enter(
        self, states: dict[int, State], program: Program, arena: Memory, unwritten: Set[int] = frozenset()
    ) -> None:
        """Bring every state to where ``program`` expects it when a step starts; the arena then holds no other.

        What is in the arena for another program stays if its place is the same, and else moves within the arena; it
        goes by way of a home only where two are in each other's place. No op writes the ``unwritten`` storages: they
        may be in the arena and on a disk at once, so that they leave without a copy. Raises ``SpillError`` or
        ``TransferError``.
        """
        self._arena = arena
        last = len(self.slots) - 1
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage is not None}
        lodgings = {lodging.storage: lodging.home for lodging in program.lodgings}
        leaving = {s: lodgings.get(s, 0) for s, state in states.items() if s not in wrapping and is_large(state.bytes)}
        self._settled = {id(states[storage]) for storage in leaving}
        self._relied_on = {id(states[storage]) for storage in program.clean}
        staying = {id(states[storage]) for storage in wrapping if storage in states}
        for state in self._states.values():
            if state.is_idle():
                self._discard(state)
            elif state.place is Place.ARENA and id(state) not in staying:
                self._out(state)
        kept = self._relied_on | {
            id(state) for s, state in states.items() if s in unwritten and not self.slots[state.home].home.in_memory
        }
        # What goes far first: it makes room for what comes near.
        for storage, home in leaving.items():
            if home == last:
                self._to_home(states[storage], home)
        self._rearrange([(state, wrapping[s]) for s, state in states.items() if s in wrapping], arena, kept)
        for home in range(last - 1, -1, -1):
            for storage, wanted in leaving.items():
                if wanted == home:
                    self._to_home(states[storage], home)
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
        buffer = Region(map_anonymous(_MOVED_BYTES), _MOVED_BYTES).memory(0, _MOVED_BYTES)
        try:
            for start in range(0, state.bytes, _MOVED_BYTES):
                piece = buffer[: min(_MOVED_BYTES, state.bytes - start)]
                slots.home.read(old + start, piece)
                slots.home.write(new + start, piece)
        except BaseException:
            slots.give(new, placed_bytes(state.bytes))
            raise
        self._vacate(state)
        state.slot = new
        state.show(self._faces.show(state.home, new, state.bytes), Place.HOME)

    def _copy_home(self, state: State, home: int, arena: Memory) -> None:
        """Copy a state in the arena to a home."""
        if state.home != home:
            self._vacate(state)
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
            self._vacate(state)
            state.slot = self._take(state.home, state)
        store = self.slots[state.home].home
        try:
            arena.save(state.offset_in(arena.address), placed_bytes(state.bytes), store, state.slot)
        except BaseException:
            self._vacate(state)  # who knows what is there
            raise
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
                self._discard(state)
            elif state.place is Place.ARENA:
                self._out(state)

    def _discard(self, state: State) -> None:
        self._vacate(state)
        state.lose()

    def _out(self, state: State) -> None:
        if state.slot is not None and self._leaves_for(state, state.home):
            return
        if not is_large(state.bytes) or not any(self._leaves_for(state, home) for home in range(len(self.slots))):
            self._to_own(state)

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
            self._to_home(state, home)
        except SpillError:
            return False
        return True

    def evacuate(self) -> None:
        """Move every state with memory of its own off a device, so that an arena has room there."""
        for state in self._states.values():
            if state.place is Place.OWN:
                own = state.bytes_now()
                if own.device.type != "cpu":
                    state.show(own.cpu(), Place.OWN)

    def go_back(self) -> None:
        """Move the user's tensors back to a device once there is no arena."""
        for state in self._states.values():
            if state.place is Place.OWN and state.origin.type != "cpu":
                state.show(state.bytes_now().to(state.origin), Place.OWN)

    def give_back(self) -> None:
        """Give every state memory of its own, as plain PyTorch has it, on the CPU."""
        for state in self._states.values():
            if state.place in (Place.HOME, Place.ARENA):
                self._to_own(state)

    def give_to_allocator(self) -> None:
        """Give every state memory of PyTorch's current allocator, and forget all states."""
        for state in self._states.values():
            if state.is_idle():
                self._discard(state)
            elif state.place in (Place.HOME, Place.ARENA):
                home, slot = state.home, state.slot
                self._to_own(state)
                if slot is not None:
                    self.slots[home].home.discard(slot, placed_bytes(state.bytes))
        self.forget_all()

    def _to_own(self, state: State) -> None:
        if state.stays():
            state.look_at(None)
            for window in state.windows:
                window.point_at(window.known_as.data)
            state.become(Place.OWN)
        else:
            now = state.bytes_now()
            if not self._is_in_file(state):  # there its pages are its own already: they are mapped for it alone
                now = now.clone() if now.device.type == "cpu" else now.cpu()
            state.show(now, Place.OWN)
        self._vacate(state)

    def _to_home(self, state: State, home: int) -> None:
        if state.place is Place.HOME and state.home == home:
            return
        if state.place is Place.ARENA and state.slot is not None and state.home == home and self._arena is not None:
            self.bring_home(state, self._arena)
            state.mark = None
            state.show(self._faces.show(home, state.slot, state.bytes), Place.HOME)
            return
        self._notice(state)
        slots = self.slots[home]
        fresh = slots.end
        slot = self._take(home, state)
        face = self._faces.show(home, slot, state.bytes)
        try:
            if state.place is Place.ARENA and self._arena is not None:
                offset = state.offset_in(self._arena.address)
                self._arena.save(offset, placed_bytes(state.bytes), slots.home, slot)
            elif state.place is Place.HOME and slots.home.in_memory and state.slot is not None:
                # Reading it through its face would fill the page cache.
                self.slots[state.home].home.read(state.slot, internals.memory_of(face))
            elif state.place is not Place.UNBORN:
                slots.home.write(slot, internals.memory_of(state.bytes_now().cpu()))
            elif slot < fresh:
                face.zero_()
        except BaseException:
            self._faces.drop(home, slot)
            slots.give(slot, placed_bytes(state.bytes))
            raise
        self._vacate(state)
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
        self._vacate(state)
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
