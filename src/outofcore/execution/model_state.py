"""The tensors that persist across steps: where their bytes are between steps, and how they move.

Between two steps the user's own tensor objects point to the current bytes, because a step ends with each state in a
fixed place: resident ones in the arena, all others at home. So reading a parameter, changing it in place, saving a
state dict or evaluating the model needs no special calls.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Set
from itertools import pairwise

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.capture.captured import CPU, Captured, GradientLeft, StateBinding, Value
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
from outofcore.execution.state_moves import StateMoves
from outofcore.graph import StorageKind
from outofcore.runtime.mapped_files import MappedFiles

_log = logging.getLogger("outofcore")


class StateKeeper:
    """Tracks the states of all captures of a step, and the user's changes to their tensors."""

    def __init__(self, faces: Faces) -> None:
        self._faces = faces
        self.slots = faces.slots
        self._states: dict[str, State] = {}
        self.moves = StateMoves(faces, self._states)
        self._by_tensor: dict[str, State] = {}
        self._origins: dict[str, torch.device] = {}
        self.generation = 0  # number of calls of ``forget_all``
        self._shared: list[tuple[State, Window]] = []  # states in shared memory
        self._mapped: MappedFiles | None = None
        self._looked = False  # whether ``_mapping`` is up to date

    def adopt(self, captured: Captured) -> dict[int, State]:
        """Return the states of a capture by storage id, registering new ones without moving bytes."""
        states: dict[int, State] = {}
        self._looked = False
        for binding in captured.states:
            value = captured.values[binding.value]
            count = captured.own_bytes(value.storage)
            state = self._by_tensor.get(binding.key) or states.get(value.storage)
            if state is None:
                place = Place.UNBORN if binding.tensor is None else Place.OWN
                state = self._states[binding.key] = State(binding.key, count, place)
            states[value.storage] = state
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
        return states

    def _settle(self, state: State) -> None:
        """Record the place of bytes in memory that the user, a creation at home or another step has provided."""
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
        found_face = None if face is None else self._faces.find(face)
        if face is None or found_face is None:
            return False
        found_face.owned = True
        state.home, state.slot = found_face.home, found_face.offset
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
        """Keep the user's tensor in place if its memory is shared; return whether it is."""
        if not self._what_is_mapped().is_shared(window.tensor):
            return False
        window.stay()
        self._shared.append((state, window))
        _log.info("%s is in shared memory and stays there, outside of the budget", window.key)
        return True

    def read_shared(self) -> None:
        """Copy shared memory to the step's tensors; raise ``StateError`` for another shape or dtype."""
        for _, window in self._shared:
            window.read()

    def write_shared(self, written: Set[int]) -> None:
        for state, window in self._shared:
            if id(state) in written:
                window.write()

    def hand_over(self) -> None:
        """Release the slots of all states at home to their tensors, while the arena is empty.

        States move to the last home first: the next owner could not free the room that it needs at a nearer one.
        """
        last = len(self.slots) - 1
        for state in self._states.values():
            if state.stays():
                self.moves.to_own(state)
            if state.place is Place.HOME and state.home != last:
                with contextlib.suppress(SpillError):
                    self.moves.to_home(state, last)
            if state.place is Place.HOME and state.slot is not None:
                self._faces.disown(state.home, state.slot, placed_bytes(state.bytes))
                state.slot = None
                state.become(Place.OWN)
                state.look_at(None)
            else:
                self.moves.vacate(state)

    def take_back(self) -> bool:
        """Find the bytes of all states after other owners; return False if sharing or layouts have changed.

        Raises ``StateError`` if a tensor has another shape or dtype.
        """
        existing = [state for state in self._states.values() if state.place is not Place.UNBORN]
        if shared_otherwise(existing) or lie_otherwise(existing):
            return False
        self._looked = False
        for state in self._states.values():
            if state.place is Place.OWN:
                take_over([state])
                self._settle(state)
        return True

    def let_go(self) -> None:
        """Release the user's replacements of shown tensors; ``forget_all`` must follow."""
        for state in let_go(self._states.values()):
            self.moves.vacate(state)
            state.lose()

    def forget_all(self) -> None:
        """Forget all states while the arena is empty; tensors at home stay there."""
        self.hand_over()
        self._states.clear()
        self._by_tensor.clear()
        self._shared.clear()
        self.generation += 1

    def gradient(self, captured: Captured, produced: GradientLeft) -> State:
        key = f"{captured.states[produced.parameter].key}.grad"
        state = self._by_tensor.get(key)
        if state is None:
            value = captured.values[produced.value]
            state = State(key, captured.own_bytes(value.storage), Place.UNBORN)
            state.windows.append(Window(key, torch.empty(0, dtype=value.dtype), value))
            self._states[key] = self._by_tensor[key] = state
        return state

    def tensor(self, binding: StateBinding) -> torch.Tensor:
        """Return the user's tensor of a binding, or the tensor to show for new optimizer state."""
        for window in self._by_tensor[binding.key].windows:
            if window.key == binding.key:
                return window.known_as
        raise StateError(f"{binding.key} has no tensor")

    def rebind(self, state: State, binding: StateBinding, tensor: torch.Tensor) -> None:
        """Record the user's new tensor object for a state; raise ``StateError`` for another shape or dtype."""
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
            # The bytes at home now differ from the last ones written there.
            self.slots[state.home].home.start()

    def taken(self, state: State) -> None:
        if state.place is Place.UNBORN:
            return
        leftover = state.windows[0].give_up()
        if state.place in (Place.HOME, Place.ARENA):
            self._faces.part(leftover)
        state.lose()

    def arrived(self, state: State, value: Value, memory: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor of a gradient that a step has produced at home, or in other ``memory``."""
        state.windows[0].renew(value)
        state.show(*((self._face(state), Place.HOME) if memory is None else (memory, Place.OWN)))
        return state.windows[0].tensor

    def stayed(self, state: State, value: Value, arena: Memory, offset: int) -> torch.Tensor:
        """Return the tensor of a gradient that a step has left in the arena until the next step."""
        is_unchanged = state.windows[0].renew(value)
        if not is_unchanged or state.place is not Place.ARENA or state.offset_in(arena.address) != offset:
            self.moves.vacate(state)
            state.show(arena.view(offset, state.bytes), Place.ARENA)
        return state.windows[0].tensor

    def forget(self, state: State, binding: StateBinding) -> None:
        """Replace a cleared gradient by a placeholder for the program; other references keep its bytes."""
        for window in state.windows:
            if window.key == binding.key:
                self._faces.part(window.give_up())
                window.stands_in = True
        if state.shown is None:
            state.lose()
        else:
            state.show(state.shown, state.place)

    def refresh(self, *, leaving: bool = False) -> list[str] | None:
        """Adopt the user's replacements of tensors, such as by ``p.data = other``, and return their keys.

        With ``leaving`` the new memory stays in place, since tensors of the model's next owner may share it. Returns
        None, without any change, if sharing or layouts have changed. Raises ``StateError`` if the new data has another
        shape or dtype, or is in memory that processes share.
        """
        unborn = Place.UNBORN  # faster than looking up the enum member in the loop
        existing = [state for state in self._states.values() if state.place is not unborn]
        if unmoved(existing):
            return []
        for state in existing:
            state.check_in_place()
        self._looked = False
        for state in existing if not leaving else ():
            for window in state.windows:
                if window.users is None and window.moved():
                    self._leave_to_others(state, window)
        if lie_otherwise(existing) or shared_otherwise(existing):
            return None
        for state in existing if leaving else ():
            if state.is_elsewhere():
                self.moves.vacate(state)
                state.look_at(None)
                state.become(Place.OWN)
        return take_over(existing)

    def displaced(self) -> list[str]:
        return displaced(self._states.values())

    def check(self) -> None:
        """Check the invariants between two steps, for tests; raise ``StateError`` that names the state."""
        spans: dict[object, list[tuple[int, int, str]]] = {}
        for state in self._states.values():
            shown, count = state.shown, placed_bytes(state.bytes)
            if state.place in (Place.HOME, Place.ARENA) and shown is None:
                raise StateError(f"{state.key} is at {state.place.value}, but no tensor shows it: please report it")
            if state.place in (Place.OWN, Place.UNBORN) and shown is not None:
                raise StateError(f"{state.key} is {state.place.value}, but a tensor shows it: please report it")
            if state.place is Place.OWN and state.slot is not None:
                raise StateError(f"{state.key} is {state.place.value}, but has a slot: please report it")
            if (state.mark is None) != (state.place is not Place.ARENA or state.slot is None):
                raise StateError(f"{state.key} is at {state.place.value}, but its home copy is wrong: please report it")
            if state.place is Place.HOME and state.slot is None:
                raise StateError(f"{state.key} is at home, but has no slot: please report it")
            if state.slot is not None:
                spans.setdefault(state.home, []).append((state.slot, state.slot + count, state.key))
            if state.place is Place.ARENA and self.moves.arena is not None and state.bytes:
                offset = state.address - self.moves.arena.address
                spans.setdefault("the arena", []).append((offset, offset + state.bytes, state.key))
        for region, region_spans in spans.items():
            region_spans.sort()
            for (_, end, first_key), (start, _, second_key) in pairwise(region_spans):
                if start < end:
                    raise StateError(f"{first_key} and {second_key} overlap in {region}: please report it")

    def _face(self, state: State) -> torch.Tensor:
        slot = self.moves.slot(state)
        return self._faces.show(state.home, slot, state.bytes)

    def evacuate(self) -> None:
        """Move states in ordinary memory off a device, to make room there for an arena."""
        for state in self._states.values():
            self._bring_own(state, CPU)

    def go_back(self) -> None:
        for state in self._states.values():
            if state.origin != CPU:
                self._bring_own(state, state.origin)

    @staticmethod
    def _bring_own(state: State, device: torch.device) -> None:
        if state.place is Place.OWN and state.windows[0].tensor.device != device:
            state.show(state.bytes_now().to(device), Place.OWN)

    def give_back(self) -> None:
        for state in self._states.values():
            if state.place in (Place.HOME, Place.ARENA):
                self.moves.to_own(state)

    def give_to_allocator(self) -> None:
        for state in self._states.values():
            if state.is_idle():
                self.moves.discard(state)
            elif state.place in (Place.HOME, Place.ARENA):
                home, slot = state.home, state.slot
                self.moves.to_own(state)
                if slot is not None:
                    self.slots[home].home.discard(slot, placed_bytes(state.bytes))
        self.forget_all()
