"""A validated step with texts for messages, and the guaranteed order of its instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.program import Block, CopyOut, Instruction, Program, Queue, Run, Wait, queue_of


@dataclass(frozen=True)
class ValidatedStep:
    """A graph with its program, and names of their parts for error messages."""

    graph: StepGraph
    program: Program

    @cached_property
    def touched(self) -> list[tuple[int, ...]]:
        return [op.touched for op in self.graph.ops]

    def storage(self, storage: int) -> str:
        return f"storage {storage} ({self.graph.storages[storage].name or 'unnamed'})"

    def block(self, block: Block) -> str:
        return f"block {block.id} of {'a workspace' if block.storage is None else self.storage(block.storage)}"

    def op(self, op: int) -> str:
        data = self.graph.ops[op]
        module = f" of module {data.module}" if data.module else ""
        return f"op {op}, {data.name}{module}" + (f" at {data.source}" if data.source else "")

    def instruction(self, index: int) -> str:
        instruction = self.program.instructions[index]
        if isinstance(instruction, Run):
            return f"instruction {index} (run of {self.op(instruction.op)})"
        block = self.program.blocks[instruction.block]
        return f"instruction {index} ({queue_of(instruction).value} of {self.block(block)})"


class ExecutionOrder:
    """The guaranteed order of instructions, as vector clocks."""

    def __init__(self, program: Program) -> None:
        self.queue: list[int] = []
        self.position: list[int] = []  # of each instruction on its queue, from 1
        # For each instruction, how many of each other queue have ended when it starts. Instructions share the list of
        # their predecessor if they wait for no more.
        self.ended: list[list[int]] = []
        lanes = [_lane(instruction) for instruction in program.instructions]
        number = {lane: i for i, lane in enumerate(dict.fromkeys(lanes))}
        lines: list[list[int]] = [[] for _ in number]
        latest = [[len(lanes) if of == queue else 0 for of in number.values()] for queue in number.values()]
        for index, (instruction, lane) in enumerate(zip(program.instructions, lanes, strict=True)):
            queue = number[lane]
            ended = latest[queue]
            for wait in instruction.waits:
                of = number.get(_lane(wait), -1)
                waited_line = lines[of] if of >= 0 else []
                if not 1 <= wait.count <= len(waited_line):
                    raise ValidationError(
                        f"instruction {index} waits for {wait.count} instructions of {wait.queue.value}, of which "
                        f"{len(waited_line)} come before it; the count must be at least 1, and at most that number"
                    )
                # If it is already known to have ended, its clock has been merged, too.
                if ended[of] < wait.count:
                    ended = list(map(max, ended, self.ended[waited_line[wait.count - 1]]))
                    ended[of] = wait.count
            latest[queue] = ended
            lines[queue].append(index)
            self.queue.append(queue)
            self.position.append(len(lines[queue]))
            self.ended.append(ended)

    def has_ended_before(self, first: int, second: int) -> bool:
        """Return whether the first instruction has always ended when the second starts."""
        return first < second and self.ended[second][self.queue[first]] >= self.position[first]


_COLLECTIVES = -1  # the number of the queue of collectives


def _lane(item: Instruction | Wait) -> int:
    """Return the number of an instruction's or wait's queue."""
    # Enums would take twice the time to hash.
    if isinstance(item, Run):
        return _COLLECTIVES if item.communicates else 0
    if isinstance(item, Wait):
        if item.queue is Queue.COMMUNICATE:
            return _COLLECTIVES
        return 3 * item.home + (0 if item.queue is Queue.COMPUTE else 1 if item.queue is Queue.COPY_OUT else 2)
    return 3 * item.home + (1 if isinstance(item, CopyOut) else 2)
