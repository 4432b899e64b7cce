"""The user's gradients around a step: which ones it reads, produces and clears."""

from __future__ import annotations

import torch

from outofcore.analysis import is_large
from outofcore.capture.captured import Captured, StateBinding
from outofcore.errors import StateError
from outofcore.execution.aliases import PersistentState, StatePlace, assign_gradient, count_references
from outofcore.execution.arena import DeviceArena
from outofcore.execution.model_state import StateKeeper
from outofcore.graph import StorageKind
from outofcore.program import Program


class StepGradients:
    """Connects the gradients of one program with the ``.grad`` of the user's parameters."""

    def __init__(
        self, captured: Captured, program: Program, keeper: StateKeeper, states: dict[int, PersistentState]
    ) -> None:
        self._captured = captured
        self._keeper = keeper
        self._produced = {
            produced.value: (captured.states[produced.parameter], keeper.gradient_state(captured, produced))
            for produced in captured.gradients_left
        }
        end = len(program.instructions)
        blocks = {b.storage: b for b in program.blocks if b.storage in program.staying and b.dies == end}
        # Offsets of the gradients that stay in the arena, by value.
        self._arena_offsets = {
            index: blocks[storage].offset
            for index in self._produced
            if (storage := captured.values[index].storage) in blocks
        }
        self._cleared_parameters = [parameter_of(captured.states[i]) for i in captured.gradients_cleared]
        self._accumulated = [
            (binding, states[captured.values[binding.value].storage])
            for binding in captured.states
            if binding.kind is StorageKind.GRADIENT
        ]

    def states_at_home(self) -> dict[int, PersistentState]:
        """Return the states of large gradients that the step leaves in a slot at home, by storage."""
        return {
            self._captured.values[index].storage: state
            for index, (_, state) in self._produced.items()
            if is_large(state.bytes) and index not in self._arena_offsets
        }

    def storages_in_arena(self) -> set[int]:
        return {self._captured.values[index].storage for index in self._arena_offsets}

    def adopt_replacements(self) -> None:
        """Update the tracked gradients after the user may have changed ``.grad`` of parameters."""
        for binding, state in self._produced.values():
            # A gradient that the step clears must survive for other references to it.
            is_referenced = count_references(state.aliases[0].tensor) > state.reference_count
            if is_referenced or parameter_of(binding).grad is not state.aliases[0].tensor:
                self._keeper.release_gradient(state)
        for binding, state in self._accumulated:
            self._keeper.rebind(state, binding, self._current_gradient(binding))
            state.apply_layout(binding.key, self._captured.values[binding.value])

    def assign(self, arena: DeviceArena, results: dict[int, torch.Tensor]) -> None:
        """Set ``.grad`` of the parameters to the gradients that a step has produced, or to None if it cleared them."""
        for index, (parameter, state) in self._produced.items():
            value = self._captured.values[index]
            if index in self._arena_offsets:
                shown = self._keeper.show_arena_gradient(state, value, arena, self._arena_offsets[index])
            else:
                shown = self._keeper.show_gradient(state, value, results.get(value.storage))
            assign_gradient(parameter_of(parameter), shown)
        shown = None
        for _, state in self._produced.values():
            state.reference_count = count_references(state.aliases[0].tensor)
        for parameter in self._cleared_parameters:
            parameter.grad = None
        for binding, state in self._accumulated:
            if self._find_parameter(binding).grad is None:
                self._keeper.clear_gradient(state, binding)

    def detach_from_arena(self) -> None:
        """Remove gradients in the arena from the parameters, before the memory is reused."""
        for index in self._arena_offsets:
            parameter, state = self._produced[index]
            if state.place is StatePlace.ARENA:
                if parameter_of(parameter).grad is state.aliases[0].tensor:
                    parameter_of(parameter).grad = None
                self._keeper.release_gradient(state)

    def _find_parameter(self, binding: StateBinding) -> torch.Tensor:
        key = binding.key.removesuffix(".grad")
        return parameter_of(next(b for b in self._captured.states if b.key == key))

    def _current_gradient(self, binding: StateBinding) -> torch.Tensor:
        """Return the user's gradient; raise ``StateError`` if it is None."""
        gradient = self._find_parameter(binding).grad
        if gradient is None:
            raise StateError(
                f"the gradient {binding.key} was there when the step was captured and is None now, but the step adds "
                "to it: clear gradients in the step, or set them to None before the step is compiled"
            )
        return gradient


def parameter_of(binding: StateBinding) -> torch.Tensor:
    """Return the tensor of a parameter's binding; raise ``StateError`` if it is None."""
    if binding.tensor is None:
        raise StateError(f"{binding.key} is not a parameter of the model; please report it")
    return binding.tensor
