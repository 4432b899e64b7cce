"""The interface of engines, which run a step's instructions on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from outofcore.execution.arena import ScopeTable
from outofcore.execution.binding import BoundProgram, BoundRun, GeneratorUse
from outofcore.execution.undo import StepProgress
from outofcore.program import Timeline
from outofcore.runtime.slots import SlotPiece

# Whether native code may call ops, and on a GPU make CUDA graphs of them.
ReplayMode: TypeAlias = bool | Literal["graphs"]


class Port(NamedTuple):
    """The caller's memory for an input or an output of the step."""

    address: int
    bytes: int
    tensor: torch.Tensor  # begins at the address


class Engine(Protocol):
    """Runs bound programs on a device."""

    update_failure: Exception | None  # of an optimizer's code in the last step, which skipped its later updates

    def run(
        self, bound: BoundProgram, table: ScopeTable, slots: Mapping[int, tuple[SlotPiece, ...]], ports: dict[int, Port]
    ) -> Timeline:
        """Run one step; return its timeline, or the timeline of the last measured step.

        Copies without an entry in ``slots`` use the caller's memory in ``ports``. Raises ``TransferError`` if a copy
        failed, ``ArenaError`` if an op requested more memory than planned and reserved.
        """
        ...

    def read_progress(self) -> StepProgress | None:
        """Return the progress of the last step, once it has ended; None if the device failed."""
        ...

    def synchronize(self) -> None: ...

    def release_step(self) -> None:
        """Release references to the last step, which keep its arena's memory alive."""
        ...

    def close(self) -> None: ...


class GeneratorStates:
    """Saves states of random generators, so that an op that runs again in a step draws the same numbers."""

    # Another thread that draws while an op runs again gets the numbers of that op.
    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._saved: dict[int, list[torch.Tensor]] = {}  # by op
        self._current: list[torch.Tensor] = []

    def save_or_restore(self, run: BoundRun) -> None:
        """Save the generators' states before an op's first run, and restore them before a later run."""
        states = [generator.get_state() for generator in self._generators]
        if run.generator_use is GeneratorUse.SAVE:
            self._saved[run.op] = states
        else:
            self._current = states
            self._set(self._saved[run.op])

    def reset(self) -> None:
        """Set the generators to the states that they had before the later run of an op."""
        self._set(self._current)

    def clear(self) -> None:
        self._saved.clear()
        self._current = []

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)


def place_results(run: BoundRun, results: Sequence[Any]) -> list[torch.Tensor]:
    """Copy an op's misplaced results to their planned addresses; return the misplaced tensors."""
    # The caller keeps these until the op's scope has ended, or they count as scratch memory (see ``derive_requests``).
    misplaced: list[torch.Tensor] = []
    for leaf, address, target, stride in run.results:
        result = results[leaf]
        if result.data_ptr() != address or result.stride() != stride:
            target.copy_(result.clone() if result.data_ptr() == address else result)
            misplaced.append(result)
    return misplaced
