"""Restore the model to before a failed step, where that is still possible.

A step changes persistent state late: large parameters and optimizer state in its updates. If it fails before, at a
wrong index in the forward pass or a failed copy, all of that is unchanged: at its home, in its block of the arena, or,
if it was evicted for a while, in a slot. What little changes early, such as the running statistics of batch norm, is
saved when the step starts; so are the states of random generators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from outofcore.analysis import is_large
from outofcore.capture.captured import Captured
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.recorder import generators_on
from outofcore.execution.arena import Memory
from outofcore.program import Block, CopyIn, CopyOut, Program, Run
from outofcore.runtime.slots import Piece, Slots, meet
from outofcore.units import MIB

# More than this is not put aside at every step: it would be memory beside the budget.
_ASIDE_BYTES = 4 * MIB


@dataclass(frozen=True)
class Reached:
    """How far a step came: which instructions were started and which are done, by index."""

    started: Sequence[bool]
    done: Sequence[bool]

    @classmethod
    def at(cls, starts: Sequence[float], ends: Sequence[float]) -> Self:
        """Derive it from the times at which instructions began and ended; 0 if they did not yet."""
        return cls([time > 0 for time in starts], [time > 0 for time in ends])


@dataclass(frozen=True)
class _Stray:
    """A block that is held from step to step, and left the arena within the step."""

    block: Block
    out: int | None  # the first copy out; None: it left without one, since its home has the same bytes
    pieces: tuple[Piece, ...]
    home: int
    back: int | None  # the copy into the block, before the step ends
    others: tuple[int, ...]  # copies out, later on, to pages of the same slot


class Undo:
    """Restores the state of one program; ``slots`` has by copy index the block's pieces at home."""

    def __init__(self, captured: Captured, program: Program, slots: Mapping[int, tuple[Piece, ...]]) -> None:
        graph = captured.graph
        small: list[Block] = []
        self._final: list[int] = []  # once one of these has been started, there is no way back
        early: set[int] = set()
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage in graph.persistent}
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                changed = [s for s in graph.ops[instruction.op].mutates if s in graph.persistent]
                update = isinstance(captured.calls[instruction.op].func, OptimizerUpdate)
                if update or any(is_large(graph.storages[s].bytes) for s in changed):
                    self._final.append(index)
                else:
                    early.update(changed)
            elif isinstance(instruction, CopyOut):
                storage = program.blocks[instruction.block].storage
                # What is written to a slot that outlives the step (a gradient that is left, a range of what persists)
                # is seen by the user.
                if (storage in graph.outputs or storage in captured.ranges) and index in slots:
                    self._final.append(index)
        small = [wrapping[storage] for storage in sorted(early) if storage in wrapping]
        self._span = (min(b.offset for b in small), max(b.offset + b.bytes for b in small)) if small else (0, 0)
        self._possible = len(small) == len(early) and self._span[1] - self._span[0] <= _ASIDE_BYTES
        self._strays: list[_Stray] = []
        if self._possible:
            self._strays = _strays(program, {b.id for b in wrapping.values()}, slots)
            self._strays += [_clean(program, wrapping[storage], slots) for storage in program.clean]
        self._aside: torch.Tensor | None = None
        self._device = captured.device
        self._generators = generators_on(captured.device)
        self._drawn: list[torch.Tensor] = []  # their states when the step started

    def begin(self, arena: Memory) -> None:
        """Save what changes early, when a step starts."""
        if not self._possible:
            return
        first, last = self._span
        if last > first:
            if self._aside is None:
                self._aside = torch.empty(last - first, dtype=torch.uint8, device=self._device)
            self._aside.copy_(arena.view(first, last - first))
        self._drawn = [generator.get_state() for generator in self._generators]

    def is_possible(self, reached: Reached) -> bool:
        if not self._possible or not self._drawn or any(reached.started[index] for index in self._final):
            return False
        return not any(reached.started[index] for stray in self._lost(reached) for index in stray.others)

    def _lost(self, reached: Reached) -> list[_Stray]:
        """Return the blocks that left the arena and did not come back."""
        left = [stray for stray in self._strays if stray.out is None or reached.done[stray.out]]
        return [stray for stray in left if stray.back is None or not reached.done[stray.back]]

    def undo(self, arena: Memory, homes: Sequence[Slots], reached: Reached) -> bool:
        """Restore everything to the start of the step; False if it is too late for that.

        ``reached`` is how far it came; nothing of it is under way any more. Raises ``TransferError`` if what left the
        arena cannot be read back.
        """
        if not self.is_possible(reached):
            return False
        for stray in self._lost(reached):
            at = stray.block.offset
            for piece in stray.pieces:
                arena.load(at, piece.bytes, homes[stray.home].home, piece.offset)
                at += piece.bytes
        first, last = self._span
        if self._aside is not None:
            arena.view(first, last - first).copy_(self._aside)
        for generator, state in zip(self._generators, self._drawn, strict=True):
            generator.set_state(state)
        return True


def _strays(program: Program, wrapping: set[int], slots: Mapping[int, tuple[Piece, ...]]) -> list[_Stray]:
    found: list[_Stray] = []
    seen: set[int] = set()
    outs = [(i, c) for i, c in enumerate(program.instructions) if isinstance(c, CopyOut) and i in slots]
    for index, copy in outs:
        block = program.blocks[copy.block]
        if block.id not in wrapping or index >= block.dies or block.id in seen:
            continue
        seen.add(block.id)
        pieces = slots[index]
        back = next(
            (
                i
                for i, other in enumerate(program.instructions)
                if i > index and isinstance(other, CopyIn) and other.block == block.id
            ),
            None,
        )
        others = tuple(i for i, other in outs if i > index and other.home == copy.home and meet(pieces, slots[i]))
        found.append(_Stray(block, index, pieces, copy.home, back, others))
    return found


def _clean(program: Program, block: Block, slots: Mapping[int, tuple[Piece, ...]]) -> _Stray:
    """Describe a block that leaves without a copy: its slot is not shared, and the block is reused until it returns."""
    copies = enumerate(program.instructions)
    index, back = next((i, c) for i, c in copies if isinstance(c, CopyIn) and c.block == block.id)
    return _Stray(block, None, slots[index], back.home, index, ())
