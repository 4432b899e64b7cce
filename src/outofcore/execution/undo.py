"""Restore the model to before a failed step, where that is still possible.

A step changes large parameters and optimizer state late, in its updates. If it fails earlier, their bytes are unchanged
at home, in the arena, or in the slot of an evicted block. State that changes early is saved when the step starts: small
buffers, such as the running statistics of batch norm, and random generators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from outofcore.analysis import is_large
from outofcore.capture.captured import Captured
from outofcore.capture.optimizers import OptimizerUpdate
from outofcore.capture.recorder import default_generators
from outofcore.execution.arena import DeviceArena
from outofcore.program import Block, CopyIn, CopyOut, Program, Run
from outofcore.runtime.slots import SlotPiece, Slots, share_page
from outofcore.units import MIB

# The saved bytes do not count towards the budget, so they are limited.
_MAX_SAVED_BYTES = 4 * MIB


@dataclass(frozen=True)
class StepProgress:
    """The progress of a step: for each instruction, whether it has started and whether it has finished."""

    started: Sequence[bool]
    finished: Sequence[bool]

    @classmethod
    def from_times(cls, starts: Sequence[float], ends: Sequence[float]) -> Self:
        return cls([time > 0 for time in starts], [time > 0 for time in ends])


@dataclass(frozen=True)
class _EvictedBlock:
    """A block that persists from step to step and was evicted within the step."""

    block: Block
    copy_out: int | None  # the first copy out; None: evicted without one, since the home has the same bytes
    pieces: tuple[SlotPiece, ...]
    home: int
    copy_in: int | None  # the copy that fetches it before the step ends
    overwriting_copies: tuple[int, ...]  # later copies out that overwrite pages of the same slot


class Undo:
    """Restores the model after a failed run of one program."""

    def __init__(self, captured: Captured, program: Program, slots: Mapping[int, tuple[SlotPiece, ...]]) -> None:
        graph = captured.graph
        self._irreversible: list[int] = []  # the step cannot be undone once one of these has started
        early: set[int] = set()
        wrapping = {b.storage: b for b in program.blocks if b.wraps and b.storage in graph.persistent}
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                changed = [s for s in graph.ops[instruction.op].mutates if s in graph.persistent]
                update = isinstance(captured.calls[instruction.op].func, OptimizerUpdate)
                if update or any(is_large(graph.storages[s].bytes) for s in changed):
                    self._irreversible.append(index)
                else:
                    early.update(changed)
            elif isinstance(instruction, CopyOut):
                storage = program.blocks[instruction.block].storage
                # The user sees writes to a slot that outlives the step: a gradient, or a range of persistent state.
                if (storage in graph.outputs or storage in captured.ranges) and index in slots:
                    self._irreversible.append(index)
        small = [wrapping[storage] for storage in sorted(early) if storage in wrapping]
        self._saved_span = (min(b.offset for b in small), max(b.offset + b.bytes for b in small)) if small else (0, 0)
        self._is_supported = len(small) == len(early) and self._saved_span[1] - self._saved_span[0] <= _MAX_SAVED_BYTES
        self._evicted_blocks: list[_EvictedBlock] = []
        if self._is_supported:
            self._evicted_blocks = _find_evicted_blocks(program, {b.id for b in wrapping.values()}, slots)
            self._evicted_blocks += [
                _describe_clean_block(program, wrapping[storage], slots) for storage in program.clean
            ]
        self._saved_bytes: torch.Tensor | None = None
        self._device = captured.device
        self._generators = default_generators(captured.device)
        self._saved_generator_states: list[torch.Tensor] = []  # states of the generators when the step started

    def begin(self, arena: DeviceArena) -> None:
        """Save the random generators, and the small states that ops other than optimizer updates change."""
        if not self._is_supported:
            return
        first, last = self._saved_span
        if last > first:
            if self._saved_bytes is None:
                self._saved_bytes = torch.empty(last - first, dtype=torch.uint8, device=self._device)
            self._saved_bytes.copy_(arena.view(first, last - first))
        self._saved_generator_states = [generator.get_state() for generator in self._generators]

    def is_possible(self, progress: StepProgress) -> bool:
        """Return whether a step with this progress can be undone."""
        if (
            not self._is_supported
            or not self._saved_generator_states
            or any(progress.started[index] for index in self._irreversible)
        ):
            return False
        return not any(
            progress.started[index] for block in self._blocks_to_restore(progress) for index in block.overwriting_copies
        )

    def _blocks_to_restore(self, progress: StepProgress) -> list[_EvictedBlock]:
        """Return the evicted blocks that the step has not fetched again."""
        evicted = [
            block for block in self._evicted_blocks if block.copy_out is None or progress.finished[block.copy_out]
        ]
        return [block for block in evicted if block.copy_in is None or not progress.finished[block.copy_in]]

    def undo(self, arena: DeviceArena, homes: Sequence[Slots], progress: StepProgress) -> bool:
        """Restore the model to the start of a failed step; return False if it is too late. All queues must be idle."""
        if not self.is_possible(progress):
            return False
        for evicted in self._blocks_to_restore(progress):
            offset = evicted.block.offset
            for piece in evicted.pieces:
                arena.load(offset, piece.bytes, homes[evicted.home].home, piece.offset)
                offset += piece.bytes
        first, last = self._saved_span
        if self._saved_bytes is not None:
            arena.view(first, last - first).copy_(self._saved_bytes)
        for generator, state in zip(self._generators, self._saved_generator_states, strict=True):
            generator.set_state(state)
        return True


def _find_evicted_blocks(
    program: Program, persistent_block_ids: set[int], slots: Mapping[int, tuple[SlotPiece, ...]]
) -> list[_EvictedBlock]:
    """Describe the persistent blocks that the program copies out during a step."""
    evicted: list[_EvictedBlock] = []
    block_ids: set[int] = set()
    outs = [(i, c) for i, c in enumerate(program.instructions) if isinstance(c, CopyOut) and i in slots]
    for index, copy in outs:
        block = program.blocks[copy.block]
        if block.id not in persistent_block_ids or index >= block.dies or block.id in block_ids:
            continue
        block_ids.add(block.id)
        pieces = slots[index]
        fetch = next(
            (
                i
                for i, later in enumerate(program.instructions)
                if i > index and isinstance(later, CopyIn) and later.block == block.id
            ),
            None,
        )
        overwriting = tuple(
            i for i, later in outs if i > index and later.home == copy.home and share_page(pieces, slots[i])
        )
        evicted.append(_EvictedBlock(block, index, pieces, copy.home, fetch, overwriting))
    return evicted


def _describe_clean_block(program: Program, block: Block, slots: Mapping[int, tuple[SlotPiece, ...]]) -> _EvictedBlock:
    """Describe a block that is evicted without a copy; no other block uses its slot."""
    copies = enumerate(program.instructions)
    index, fetch = next((i, c) for i, c in copies if isinstance(c, CopyIn) and c.block == block.id)
    return _EvictedBlock(block, None, slots[index], fetch.home, index, ())
