"""What is being validated, how messages speak of it, and in what order its instructions are certain to run."""

from __future__ import annotations

from dataclasses import dataclass

from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.program import Block, Program, Run, lane_of


@dataclass(frozen=True)
class Step:
    """What is being validated, and how messages speak of it."""

    graph: StepGraph
    program: Program

    def storage(self, storage: int) -> str:
        return f"storage {storage} ({self.graph.storages[storage].name or 'unnamed'})"

    def block(self, block: Block) -> str:
        return f"block {block.id} of {'a workspace' if block.storage is None else self.storage(block.storage)}"

    def op(self, op: int) -> str:
        found = self.graph.ops[op]
        module = f" of module {found.module}" if found.module else ""
        return f"op {op}, {found.name}{module}" + (f" at {found.source}" if found.source else "")

    def instruction(self, index: int) -> str:
        instruction = self.program.instructions[index]
        if isinstance(instruction, Run):
            return f"instruction {index} (run of {self.op(instruction.op)})"
        block = self.program.blocks[instruction.block]
        return f"instruction {index} ({lane_of(instruction)[0].value} of {self.block(block)})"


class Order:
    """Which instructions are certain to be over when another starts."""

    def __init__(self, program: Program) -> None:
        lanes = [lane_of(instruction) for instruction in program.instructions]
        number = {lane: i for i, lane in enumerate(dict.fromkeys(lanes))}
        self.queue = [number[lane] for lane in lanes]
        self.position: list[int] = []  # of each instruction on its queue, from 1
        self._known: list[list[int]] = []  # of each instruction, how many of each queue are over when it starts
        lines: list[list[int]] = [[] for _ in number]
        for index, instruction in enumerate(program.instructions):
            line = lines[self.queue[index]]
            known = self._known_after(line[-1]) if line else [0] * len(number)
            for wait in instruction.waits:
                of = number.get((wait.queue, wait.home))
                others = [] if of is None else lines[of]
                if not 1 <= wait.count <= len(others):
                    raise ValidationError(
                        f"instruction {index} waits for {wait.count} instructions of {wait.queue.value}, of which "
                        f"{len(others)} come before it; a wait must name one of them"
                    )
                known = [max(pair) for pair in zip(known, self._known_after(others[wait.count - 1]), strict=True)]
            line.append(index)
            self.position.append(len(line))
            self._known.append(known)

    def _known_after(self, index: int) -> list[int]:
        known = list(self._known[index])
        known[self.queue[index]] = self.position[index]
        return known

    def before(self, first: int, second: int) -> bool:
        """Whether the first instruction has ended whenever the second starts."""
        return self._known[second][self.queue[first]] >= self.position[first]
