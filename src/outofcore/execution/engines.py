"""What a step needs of whoever runs its instructions, on whichever device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from outofcore.execution.arena import Memory, ScopeTable
from outofcore.execution.binding import Bound, BoundRun, Draws
from outofcore.execution.slots import Piece
from outofcore.execution.undo import Reached
from outofcore.program import Program, Timeline

# Whether native code may call ops, and on a GPU make CUDA graphs of them.
Replaying: TypeAlias = bool | Literal["graphs"]


class Port(NamedTuple):
    """The caller's memory for an input or an output of the step."""

    address: int
    bytes: int
    tensor: torch.Tensor  # that begins there


class Engine(Protocol):
    """Runs bound programs.

    Attributes:
        update_failure: what the code of an optimizer raised in the last step. Its later updates were left out, and
            everything else was done.
    """

    update_failure: Exception | None

    def run(
        self,
        program: Program,
        bound: Bound,
        arena: Memory,
        table: ScopeTable,
        slots: Mapping[int, tuple[Piece, ...]],
        ports: dict[int, Port],
    ) -> Timeline:
        """Run one step.

        Args:
            program: what ``bound`` was made from.
            bound: the instructions.
            arena: the device.
            table: the planned requests of each run.
            slots: by the index of a copy, where the bytes of the block are at its home, one piece after the other.
            ports: for each input and output the caller's memory: where copies without a slot go to and come from.

        Returns:
            When everything ran; an engine that does not measure every step gives the times of the last one measured.

        Raises:
            TransferError: a copy failed.
            ArenaError: an op asked for more memory than was planned and reserved.
        """
        ...

    def reached(self) -> Reached | None:
        """How far the last step came, of which nothing is under way any more; None: the device failed, who knows."""
        ...

    def synchronize(self) -> None:
        """Return when everything issued is done."""
        ...

    def forget(self) -> None:
        """Let go of what was kept of the last step, which would keep its arena's memory; nothing is under way."""
        ...

    def close(self) -> None:
        """End what runs beside the caller. May be called again."""
        ...


class GeneratorStates:
    """The states of random generators that one step needs to draw the same numbers again.

    A state takes up to 5 KB of ordinary memory. Whoever else draws from such a generator while an op runs
    again, from another thread, draws the numbers of that op.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._saved: dict[int, list[torch.Tensor]] = {}  # by op
        self._current: list[torch.Tensor] = []

    def before(self, run: BoundRun) -> None:
        """Save the states before an op's first run, or set them for another."""
        states = [generator.get_state() for generator in self._generators]
        if run.draws is Draws.FIRST:
            self._saved[run.op] = states
        else:
            self._current = states
            self._set(self._saved[run.op])

    def after(self) -> None:
        """Let the generators go on from where they were before the op ran again."""
        self._set(self._current)

    def forget(self) -> None:
        """Let go of the states that were saved: the step has ended."""
        self._saved.clear()
        self._current = []

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)


def place_results(run: BoundRun, results: Sequence[Any]) -> list[torch.Tensor]:
    """Copy what an op has returned to where the plan has it, as far as it lies elsewhere.

    Args:
        run: the op.
        results: the leaves of what it returned.

    Returns:
        the results that lay elsewhere. They are to live until the op's scope has ended: what is freed in it is taken
        for scratch memory (see ``requests_seen``).
    """
    elsewhere: list[torch.Tensor] = []
    for leaf, address, target, stride in run.results:
        result = results[leaf]
        if result.data_ptr() != address or result.stride() != stride:
            target.copy_(result.clone() if result.data_ptr() == address else result)
            elsewhere.append(result)
    return elsewhere
