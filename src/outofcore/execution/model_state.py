"""The tensors that persist across steps: where their bytes are between steps, and how they move.

Between two steps the user's own tensors point to the current bytes, because a step ends with each state in a fixed
place: resident ones in the arena, all others at home. So the user can read, change and save them without special calls.
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
    HomeTensors,
    PersistentState,
    StateAlias,
    StatePlace,
    adopt_replacements,
    displaced_keys,
    has_layout_changed,
    has_sharing_changed,
    is_unmoved,
    release_replacements,
)
from outofcore.execution.arena import DeviceArena
from outofcore.execution.state_moves import StateMoves
from outofcore.graph import StorageKind
from outofcore.runtime.mapped_files import MappedFiles

_log = logging.getLogger("outofcore")


class StateKeeper:
    """Tracks the persistent states of a step, and the user's changes to their tensors."""

    def __init__(self, home_tensors: HomeTensors) -> None:
        self._home_tensors = home_tensors
        self.slots = home_tensors.slots
        self._states: dict[str, PersistentState] = {}
        self.moves = StateMoves(home_tensors, self._states)
        self._by_tensor: dict[str, PersistentState] = {}
        self._origins: dict[str, torch.device] = {}
        self.generation = 0  # number of calls of ``forget_all``
        self._shared: list[tuple[PersistentState, StateAlias]] = []  # states in shared memory
        self._mapping: MappedFiles | None = None
        self._is_mapping_current = False  # whether ``_mapping`` is up to date

    def register(self, captured: Captured) -> dict[int, PersistentState]:
        """Track all persistent state of a capture; return the states by storage id."""
        states: dict[int, PersistentState] = {}
        self._is_mapping_current = False
        for binding in captured.states:
            value = captured.values[binding.value]
            count = captured.unrounded_bytes(value.storage)
            state = self._by_tensor.get(binding.key) or states.get(value.storage)
            if state is None:
                place = StatePlace.ABSENT if binding.tensor is None else StatePlace.OWN
                state = self._states[binding.key] = PersistentState(binding.key, count, place)
            states[value.storage] = state
            if binding.key not in self._by_tensor:
                tensor = binding.tensor if binding.tensor is not None else torch.empty(0, dtype=value.dtype)
                state.origin = self._origins.setdefault(binding.key, tensor.device)
                alias = StateAlias(binding.key, tensor, value, tensor.data_ptr())
                if binding.tensor is not None:
                    self._keep_if_shared(state, alias)
                state.aliases.append(alias)
                self._by_tensor[binding.key] = state
                if binding.tensor is not None and state.place is not StatePlace.ABSENT:
                    self._locate(state)
            elif binding.tensor is not None:
                self.rebind(state, binding, binding.tensor)
                if binding.kind is StorageKind.GRADIENT:
                    state.apply_layout(binding.key, value)
        return states

    def _locate(self, state: PersistentState) -> None:
        """Set a state's place to a home if a slot there holds exactly the state's bytes, else to ordinary memory."""
        if state.slot is not None and state.place is StatePlace.HOME:
            return
        slot = self._home_tensors.find(state.aliases[0].tensor)
        state.become(StatePlace.OWN)
        if slot is None and is_large(state.bytes) and self._adopt_mapped_file(state):
            return
        if slot is None or slot.owned or slot.bytes != state.bytes or state.slot is not None:
            return
        if state.has_expected_layout():
            slot.owned = True
            state.home, state.slot = slot.home, slot.offset
            state.become(StatePlace.HOME)
            state.set_shown(internals.view_storage_bytes(state.aliases[0].tensor)[: state.bytes])

    def _adopt_mapped_file(self, state: PersistentState) -> bool:
        """Use the file that backs a memory-mapped state as its slot; return False if that is impossible."""
        tensor = state.aliases[0].tensor
        if (
            state.slot is not None
            or not state.has_expected_layout()
            or tensor.untyped_storage().nbytes() != state.bytes
        ):
            return False
        home_tensor = self._home_tensors.adopt_mapped(tensor, self._current_mapping())
        slot = None if home_tensor is None else self._home_tensors.find(home_tensor)
        if home_tensor is None or slot is None:
            return False
        slot.owned = True
        state.home, state.slot = slot.home, slot.offset
        state.show(home_tensor, StatePlace.HOME)
        return True

    def _current_mapping(self) -> MappedFiles:
        """Return the files that are mapped into memory now."""
        if self._mapping is None:
            self._mapping = MappedFiles()
        elif not self._is_mapping_current:
            self._mapping.refresh()
        self._is_mapping_current = True
        return self._mapping

    def _keep_if_shared(self, state: PersistentState, alias: StateAlias) -> bool:
        """Keep a tensor in place if other processes share its memory; return whether they do."""
        if not self._current_mapping().is_shared(alias.tensor):
            return False
        alias.keep_in_place()
        self._shared.append((state, alias))
        _log.info("%s is in shared memory and stays there, outside of the budget", alias.key)
        return True

    def read_shared(self) -> None:
        """Copy the user's shared memory to the step's tensors; raise ``StateError`` for another shape or dtype."""
        for _, alias in self._shared:
            alias.read_shared()

    def write_shared(self, written: Set[int]) -> None:
        """Copy the step's tensors to the user's shared memory, for the states with ids in ``written``."""
        for state, alias in self._shared:
            if id(state) in written:
                alias.write_shared()

    def release_slots(self) -> None:
        """Let the user's tensors own the slots of states at home; free all other slots. The arena must be empty."""
        # States move to the last home first: the next owner could not free the room that it needs at a nearer one.
        last = len(self.slots) - 1
        for state in self._states.values():
            if state.is_shared():
                self.moves.move_to_own_memory(state)
            if state.place is StatePlace.HOME and state.home != last:
                with contextlib.suppress(SpillError):
                    self.moves.move_to_home(state, last)
            if state.place is StatePlace.HOME and state.slot is not None:
                self._home_tensors.disown(state.home, state.slot, placed_bytes(state.bytes))
                state.slot = None
                state.become(StatePlace.OWN)
                state.set_shown(None)
            else:
                self.moves.release_slot(state)

    def reclaim(self) -> bool:
        """Locate all states again after another step used them; return False if layouts or sharing have changed."""
        existing = [state for state in self._states.values() if state.place is not StatePlace.ABSENT]
        if has_sharing_changed(existing) or has_layout_changed(existing):
            return False
        self._is_mapping_current = False
        for state in self._states.values():
            if state.place is StatePlace.OWN:
                adopt_replacements([state])
                self._locate(state)
        return True

    def release_replacements(self) -> None:
        """Drop tensors with user-assigned memory from their states; ``forget_all`` must follow."""
        for state in release_replacements(self._states.values()):
            self.moves.release_slot(state)
            state.mark_absent()

    def forget_all(self) -> None:
        """Forget all states; tensors at home stay there. The arena must be empty."""
        self.release_slots()
        self._states.clear()
        self._by_tensor.clear()
        self._shared.clear()
        self.generation += 1

    def gradient_state(self, captured: Captured, produced: GradientLeft) -> PersistentState:
        """Return the state of a gradient that a step produces; create it without bytes if it is new."""
        key = f"{captured.states[produced.parameter].key}.grad"
        state = self._by_tensor.get(key)
        if state is None:
            value = captured.values[produced.value]
            state = PersistentState(key, captured.unrounded_bytes(value.storage), StatePlace.ABSENT)
            state.aliases.append(StateAlias(key, torch.empty(0, dtype=value.dtype), value))
            self._states[key] = self._by_tensor[key] = state
        return state

    def user_tensor(self, binding: StateBinding) -> torch.Tensor:
        """Return the user's tensor of a binding; for new optimizer state, the tensor to give to the optimizer."""
        for alias in self._by_tensor[binding.key].aliases:
            if alias.key == binding.key:
                return alias.user_tensor
        raise StateError(f"{binding.key} has no tensor; please report it")

    def rebind(self, state: PersistentState, binding: StateBinding, tensor: torch.Tensor) -> None:
        """Use the user's new tensor and its data for a state; raise ``StateError`` for a new shape or dtype."""
        for alias in state.aliases:
            if alias.key != binding.key or alias.user_tensor is tensor:
                continue
            self._is_mapping_current = False
            if alias.shared_tensor is not None:
                alias.shared_tensor, alias.fingerprint = tensor, None
                alias.check_shape_and_dtype()
                continue
            old, alias.tensor, alias.is_placeholder = alias.tensor, tensor, False
            alias.check_shape_and_dtype()
            self._keep_if_shared(state, alias)
            if state.shown is None:
                alias.address = tensor.data_ptr()
                self._locate(state)
                continue
            if old.data_ptr() == alias.address:
                alias.address = -1
                reference = weakref.ref(old)
                del old
                self._home_tensors.move_to_own_memory(reference())
            adopt_replacements([state])
            # The bytes at home now differ from the last ones written there.
            self.slots[state.home].home.start()

    def release_gradient(self, state: PersistentState) -> None:
        """Remove a gradient from its state; a tensor that the user still holds keeps its bytes."""
        if state.place is StatePlace.ABSENT:
            return
        leftover = state.aliases[0].release_tensor()
        if state.place in (StatePlace.HOME, StatePlace.ARENA):
            self._home_tensors.move_to_own_memory(leftover)
        state.mark_absent()

    def show_gradient(self, state: PersistentState, value: Value, memory: torch.Tensor | None) -> torch.Tensor:
        """Return a produced gradient's tensor over ``memory``, or over its slot at home if ``memory`` is None."""
        state.aliases[0].update_layout(value)
        state.show(
            *((self._create_home_tensor(state), StatePlace.HOME) if memory is None else (memory, StatePlace.OWN))
        )
        return state.aliases[0].tensor

    def show_arena_gradient(
        self, state: PersistentState, value: Value, arena: DeviceArena, offset: int
    ) -> torch.Tensor:
        """Point a produced gradient's tensor at its bytes in the arena; return the tensor."""
        is_unchanged = state.aliases[0].update_layout(value)
        if not is_unchanged or state.place is not StatePlace.ARENA or state.offset_in(arena.address) != offset:
            self.moves.release_slot(state)
            state.show(arena.view(offset, state.bytes), StatePlace.ARENA)
        return state.aliases[0].tensor

    def clear_gradient(self, state: PersistentState, binding: StateBinding) -> None:
        """Replace a cleared gradient by a placeholder; a tensor that the user still holds keeps its bytes."""
        for alias in state.aliases:
            if alias.key == binding.key:
                self._home_tensors.move_to_own_memory(alias.release_tensor())
                alias.is_placeholder = True
        if state.shown is None:
            state.mark_absent()
        else:
            state.show(state.shown, state.place)

    def adopt_replacements(self, *, leaving: bool = False) -> list[str] | None:
        """Adopt memory that the user assigned to tensors (``p.data = other``); return the keys of these tensors.

        With ``leaving`` the new memory stays in place, since tensors of the model's next owner may share it. Returns
        None, without any change, if sharing or layouts have changed. Raises ``StateError`` if the new data has
        another shape or dtype, or if the step's own memory was moved to memory that processes share.
        """
        absent = StatePlace.ABSENT  # faster than looking up the enum member in the loop
        existing = [state for state in self._states.values() if state.place is not absent]
        if is_unmoved(existing):
            return []
        for state in existing:
            state.check_not_moved()
        self._is_mapping_current = False
        for state in existing if not leaving else ():
            for alias in state.aliases:
                if alias.shared_tensor is None and alias.has_moved():
                    self._keep_if_shared(state, alias)
        if has_layout_changed(existing) or has_sharing_changed(existing):
            return None
        for state in existing if leaving else ():
            if state.is_replaced():
                self.moves.release_slot(state)
                state.set_shown(None)
                state.become(StatePlace.OWN)
        return adopt_replacements(existing)

    def find_displaced(self) -> list[str]:
        return displaced_keys(self._states.values())

    def check_invariants(self) -> None:
        """Raise ``StateError`` if a state breaks an invariant that holds between two steps; only for tests."""
        spans: dict[object, list[tuple[int, int, str]]] = {}
        for state in self._states.values():
            shown, count = state.shown, placed_bytes(state.bytes)
            if state.place in (StatePlace.HOME, StatePlace.ARENA) and shown is None:
                raise StateError(f"{state.key} is at {state.place.value}, but no tensor shows it: please report it")
            if state.place in (StatePlace.OWN, StatePlace.ABSENT) and shown is not None:
                raise StateError(f"{state.key} is {state.place.value}, but a tensor shows it: please report it")
            if state.place is StatePlace.OWN and state.slot is not None:
                raise StateError(f"{state.key} is {state.place.value}, but has a slot: please report it")
            if (state.home_fingerprint is None) != (state.place is not StatePlace.ARENA or state.slot is None):
                raise StateError(f"{state.key} is at {state.place.value}, but its home copy is wrong: please report it")
            if state.place is StatePlace.HOME and state.slot is None:
                raise StateError(f"{state.key} is at home, but has no slot: please report it")
            if state.slot is not None:
                spans.setdefault(state.home, []).append((state.slot, state.slot + count, state.key))
            if state.place is StatePlace.ARENA and self.moves.arena is not None and state.bytes:
                offset = state.address - self.moves.arena.address
                spans.setdefault("the arena", []).append((offset, offset + state.bytes, state.key))
        for region, region_spans in spans.items():
            region_spans.sort()
            for (_, end, first_key), (start, _, second_key) in pairwise(region_spans):
                if start < end:
                    raise StateError(f"{first_key} and {second_key} overlap in {region}: please report it")

    def _create_home_tensor(self, state: PersistentState) -> torch.Tensor:
        slot = self.moves.ensure_slot(state)
        return self._home_tensors.create(state.home, slot, state.bytes)

    def evacuate(self) -> None:
        """Move states in a device's ordinary memory to the CPU, to make room there for an arena."""
        for state in self._states.values():
            self._move_to_device(state, CPU)

    def return_to_device(self) -> None:
        """Move states in ordinary memory back to the devices where the user had them."""
        for state in self._states.values():
            if state.origin != CPU:
                self._move_to_device(state, state.origin)

    @staticmethod
    def _move_to_device(state: PersistentState, device: torch.device) -> None:
        """Move a state to ``device`` if it is in ordinary memory of another device."""
        if state.place is StatePlace.OWN and state.aliases[0].tensor.device != device:
            state.show(state.current_bytes().to(device), StatePlace.OWN)

    def move_to_cpu(self) -> None:
        """Move all states at home or in the arena to ordinary host memory."""
        for state in self._states.values():
            if state.place in (StatePlace.HOME, StatePlace.ARENA):
                self.moves.move_to_own_memory(state)

    def move_out_and_forget_all(self) -> None:
        """Move all states to ordinary host memory, free their slots' memory, and forget them."""
        for state in self._states.values():
            if state.is_unused():
                self.moves.discard(state)
            elif state.place in (StatePlace.HOME, StatePlace.ARENA):
                home, slot = state.home, state.slot
                self.moves.move_to_own_memory(state)
                if slot is not None:
                    self.slots[home].home.discard(slot, placed_bytes(state.bytes))
        self.forget_all()
