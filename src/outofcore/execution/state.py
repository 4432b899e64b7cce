"""The tensors that persist across steps, and where the user sees them.

Between two steps each of them has a *face*: the bytes that the user's own tensor object points to.
It is always up to date, because it is wherever the bytes are when a step ends: in the arena, at the
same place after each step, for what is resident then; at home for the rest. So reading a parameter,
changing it in place, saving a state dict or evaluating the model needs nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import is_large, placed_bytes
from outofcore.capture.captured import Captured, GradientLeft, StateBinding, Value
from outofcore.errors import StateError
from outofcore.execution.arena import Arena
from outofcore.execution.binding import tensor_on
from outofcore.execution.slots import Slots
from outofcore.program import Block, Program


class Place(Enum):
    """Where the bytes of a state are between steps."""

    OWN = "own"  # in memory of the tensor's own, as plain PyTorch has it
    HOME = "home"  # in its slot
    ARENA = "arena"  # in a block that wraps around the step
    UNBORN = "unborn"  # nowhere: optimizer state before its first update, a gradient that was cleared


@dataclass
class _Window:
    """One of the user's tensors on a state."""

    key: str
    tensor: torch.Tensor
    value: Value
    address: int = 0  # of its data, as it was last set


@dataclass
class State:
    """One storage that persists across steps, with the tensors that the user knows it by."""

    key: str
    bytes: int
    place: Place
    windows: list[_Window] = field(default_factory=list[_Window])
    slot: int | None = None

    def show(self, base: torch.Tensor, place: Place) -> None:
        """Make the user's tensors look at these bytes."""
        for window in self.windows:
            view = tensor_on(base, window.value)
            window.tensor.data = view
            window.address = view.data_ptr()
        self.place = place

    def bytes_now(self) -> torch.Tensor:
        """The bytes as they are, as a uint8 tensor on the very storage that the user's tensors have."""
        return internals.storage_bytes(self.windows[0].tensor)[: self.bytes]


class StateKeeper:
    """Moves states between memory of their own, their home and the arena, and keeps their faces right.

    Args:
        slots: of the home where large states live when they are not in the arena. Small ones (below
            64 KiB) get memory of their own instead.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._home = slots.home
        self._states: dict[str, State] = {}
        self._by_tensor: dict[str, State] = {}
        self._arena: Arena | None = None

    def adopt(self, captured: Captured) -> dict[int, State]:
        """The states of a capture by storage id; new ones are taken note of, nothing is moved."""
        found: dict[int, State] = {}
        for binding in captured.states:
            value = captured.values[binding.value]
            count = captured.graph.storages[value.storage].bytes
            state = self._by_tensor.get(binding.key) or found.get(value.storage)
            if state is None:
                place = Place.UNBORN if binding.tensor is None else Place.OWN
                state = self._states[binding.key] = State(binding.key, count, place)
            found[value.storage] = state
            if binding.key not in self._by_tensor:
                tensor = binding.tensor if binding.tensor is not None else torch.empty(0, dtype=value.dtype)
                state.windows.append(_Window(binding.key, tensor, value, tensor.data_ptr()))
                self._by_tensor[binding.key] = state
            elif binding.tensor is not None:
                self.rebind(state, binding, binding.tensor)
        return found

    def gradient(self, captured: Captured, left: GradientLeft) -> State:
        """The state for a gradient that a step leaves behind."""
        key = f"{captured.states[left.parameter].key}.grad"
        state = self._by_tensor.get(key)
        if state is None:
            value = captured.values[left.value]
            state = State(key, captured.graph.storages[value.storage].bytes, Place.UNBORN)
            state.windows.append(_Window(key, torch.empty(0, dtype=value.dtype), value))
            self._states[key] = self._by_tensor[key] = state
        return state

    def tensor(self, binding: StateBinding) -> torch.Tensor:
        """The user's tensor of a binding; for optimizer state that was just born, the one to be shown."""
        for window in self._by_tensor[binding.key].windows:
            if window.key == binding.key:
                return window.tensor
        raise StateError(f"{binding.key} has no tensor")

    def slot(self, state: State) -> int:
        """The offset of a large state's slot at its home.

        Raises:
            SpillError: the home has no room for it.
        """
        if state.slot is None:
            state.slot = self._slots.reserve(placed_bytes(state.bytes))
        return state.slot

    def rebind(self, state: State, binding: StateBinding, tensor: torch.Tensor) -> None:
        """Take note that the user now has another tensor object for a state, with the bytes that count."""
        for window in state.windows:
            if window.key != binding.key or window.tensor is tensor:
                continue
            if state.place in (Place.HOME, Place.ARENA):
                window.tensor.data.copy_(tensor.data)
                tensor.data = window.tensor.data
            else:
                window.address = tensor.data_ptr()
                state.place = Place.OWN
            window.tensor = tensor

    def arrived(self, state: State, own: torch.Tensor | None) -> torch.Tensor:
        """The tensor of a gradient that a step has just left at its home, or in memory of its own."""
        if own is not None:
            state.show(own, Place.OWN)
        else:
            state.show(self._home.face(self.slot(state), state.bytes), Place.HOME)
        return state.windows[0].tensor

    def forget(self, state: State) -> None:
        """The user's step has cleared a gradient: its bytes no longer matter."""
        window = state.windows[0]
        window.tensor = torch.empty(0, dtype=window.value.dtype)
        state.place = Place.UNBORN

    def refresh(self) -> list[str]:
        """Take over what the user put in place of a face, such as by ``p.data = other``; returns their keys.

        Raises:
            StateError: the new data has another shape or dtype.
        """
        changed: list[str] = []
        for state in self._states.values():
            if state.place not in (Place.HOME, Place.ARENA):
                continue
            for window in state.windows:
                if window.tensor.data_ptr() == window.address:
                    continue
                new, value = window.tensor.data, window.value
                if tuple(new.shape) != value.shape or new.dtype != value.dtype:
                    raise StateError(
                        f"{window.key} was given data of shape {tuple(new.shape)} and {new.dtype} in place of "
                        f"{value.shape} and {value.dtype} after the step was compiled; compile the step again"
                    )
                changed.append(window.key)
                face = self._face_at(state, window)
                face.copy_(new)
                window.tensor.data = face
        return changed

    def _face_at(self, state: State, window: _Window) -> torch.Tensor:
        if state.place is Place.HOME:
            return tensor_on(self._home.face(self.slot(state), state.bytes), window.value)
        return tensor_on(self._block_of(state), window.value)

    def _block_of(self, state: State) -> torch.Tensor:
        if self._arena is None:
            raise StateError(f"{state.key} is said to be in the arena, and there is none")
        return self._arena.view(self._offset(state, self._arena), state.bytes)

    def _offset(self, state: State, arena: Arena) -> int:
        window = state.windows[0]
        return window.address - window.value.offset * window.value.dtype.itemsize - arena.address

    def enter(self, states: dict[int, State], program: Program, arena: Arena) -> None:
        """Bring every state to where ``program`` expects it when a step starts; the arena holds no other."""
        self._arena = arena
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage is not None}
        for storage, state in states.items():
            if storage not in wrapping and is_large(state.bytes):
                self._to_home(state, arena)
        for storage, state in states.items():
            if storage in wrapping:
                self._to_arena(state, wrapping[storage], arena)

    def leave(self, arena: Arena) -> None:
        """Take every state out of the arena, to its slot or, if small, to memory of its own."""
        for state in self._states.values():
            if state.place is Place.ARENA:
                if is_large(state.bytes):
                    self._to_home(state, arena)
                else:
                    self._to_own(state)

    def give_back(self) -> None:
        """Give every state memory of its own, as plain PyTorch has it."""
        for state in self._states.values():
            if state.place in (Place.HOME, Place.ARENA):
                self._to_own(state)

    def _to_own(self, state: State) -> None:
        state.show(state.bytes_now().clone(), Place.OWN)

    def _to_home(self, state: State, arena: Arena) -> None:
        if state.place is Place.HOME:
            return
        slot = self.slot(state)
        if state.place is Place.ARENA:
            self._home.write(slot, arena.memory(self._offset(state, arena), placed_bytes(state.bytes)))
        elif state.place is Place.OWN:
            self._home.write(slot, internals.memory_of(state.bytes_now()))
        state.show(self._home.face(slot, state.bytes), Place.HOME)

    def _to_arena(self, state: State, block: Block, arena: Arena) -> None:
        target = arena.view(block.offset, state.bytes)
        if state.place is Place.UNBORN:
            target.zero_()
        elif state.place is Place.HOME and state.slot is not None:
            self._home.read(state.slot, arena.memory(block.offset, block.bytes))
        else:
            target.copy_(state.bytes_now())
        state.show(target, Place.ARENA)
