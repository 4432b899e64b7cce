"""The instructions and their queues."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait, queue_of


@pytest.mark.parametrize(
    ("instruction", "queue"),
    [(Run(0, ()), Queue.COMPUTE), (CopyOut(0, 1), Queue.COPY_OUT), (CopyIn(0, 1), Queue.COPY_IN)],
)
def test_each_instruction_has_its_queue(instruction: Instruction, queue: Queue) -> None:
    assert queue_of(instruction) is queue


def test_programs_are_values() -> None:
    """Equal programs are equal and hash alike, so that they can key a cache."""

    def make() -> Program:
        waits = (Wait(Queue.COPY_IN, 1),)
        return Program((CopyIn(0, 0), Run(0, (0,), None, waits)), (Block(0, 0, 8, 0, 2),), 8, (0,))

    assert make() == make()
    assert hash(make()) == hash(make())
    with pytest.raises(FrozenInstanceError):
        make().arena_bytes = 9  # type: ignore[misc]


def test_a_block_is_not_placed_until_it_is() -> None:
    assert Block(0, None, 8, 0, 1).offset == -1
