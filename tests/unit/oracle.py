"""A brute-force judge of programs that shares no idea with the validator.

The validator counts versions and keeps vector clocks. Here values are symbolic (an op and its inputs). Order is
reachability in an explicit graph of instructions. All pairs of accesses are checked for conflicts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import combinations
from random import Random

from outofcore.graph import StepGraph
from outofcore.program import CopyIn, CopyOut, Instruction, Program, Queue, Run

Value = Hashable
GARBAGE: Value = "garbage"


Lane = tuple[Queue, int]  # a queue; for copies also the home


def lane(instruction: Instruction) -> Lane:
    queue = {Run: Queue.COMPUTE, CopyOut: Queue.COPY_OUT, CopyIn: Queue.COPY_IN}[type(instruction)]
    if isinstance(instruction, Run) and instruction.communicates:
        queue = Queue.COMMUNICATE
    return queue, getattr(instruction, "home", 0)


def lanes(program: Program) -> list[Lane]:
    return list(dict.fromkeys([*((q, 0) for q in Queue), *map(lane, program.instructions)]))


def blocks_of(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Run):
        return instruction.blocks if instruction.workspace is None else (*instruction.blocks, instruction.workspace)
    return (instruction.block,)


def predecessors(program: Program) -> list[list[int]]:
    """Return for each instruction its direct predecessors, which must have ended before it starts."""
    lines: dict[Lane, list[int]] = {q: [] for q in lanes(program)}
    for index, instruction in enumerate(program.instructions):
        lines[lane(instruction)].append(index)
    result: list[list[int]] = []
    last: dict[Lane, int] = {}
    for index, instruction in enumerate(program.instructions):
        previous = last.get(lane(instruction))
        result.append([] if previous is None else [previous])
        result[-1] += [lines[wait.queue, wait.home][wait.count - 1] for wait in instruction.waits]
        last[lane(instruction)] = index
    return result


def ancestors(program: Program) -> list[int]:
    """Return for each instruction the bit mask of all its predecessors."""
    masks: list[int] = []
    for before in predecessors(program):
        mask = 0
        for index in before:
            mask |= masks[index] | 1 << index
        masks.append(mask)
    return masks


Span = tuple[str, int, int, int]  # ("block", id, begin, end) | ("home", storage, home, home)


def accesses(graph: StepGraph, program: Program, index: int) -> Iterator[tuple[Span, bool]]:
    def span(number: int) -> Span:
        block = program.blocks[number]
        return ("block", number, block.offset, block.offset + block.bytes)

    instruction = program.instructions[index]
    if isinstance(instruction, Run):
        op = graph.ops[instruction.op]
        for storage, number in zip(op.touched, instruction.blocks, strict=True):
            yield span(number), storage in op.mutates + op.creates
        if instruction.workspace is not None:
            yield span(instruction.workspace), True
        return
    storage = program.blocks[instruction.block].storage
    assert storage is not None
    out = isinstance(instruction, CopyOut)
    yield span(instruction.block), not out
    yield ("home", storage, instruction.home, instruction.home), out


def conflicts(graph: StepGraph, program: Program) -> list[tuple[int, int]]:
    """Return pairs of instructions on different queues whose order matters, regardless of waits."""
    queues = [lane(instruction) for instruction in program.instructions]
    touched = [(index, *access) for index in range(len(queues)) for access in accesses(graph, program, index)]
    pairs = {
        (first, second)
        for (first, a, a_writes), (second, b, b_writes) in combinations(touched, 2)
        if (a_writes or b_writes) and queues[first] != queues[second] and _same_bytes(a, b)
    }
    return sorted(pairs)


def _same_bytes(a: Span, b: Span) -> bool:
    if a[0] != b[0]:
        return False
    if a[0] == "home":
        return a == b
    placed = a[2] >= 0 and b[2] >= 0
    return a[1] == b[1] or (placed and a[2] < b[3] and b[2] < a[3] and a[2] < a[3] and b[2] < b[3])


def is_racy(graph: StepGraph, program: Program, pairs: list[tuple[int, int]] | None = None) -> bool:
    """Return whether some conflict is unordered. ``pairs``: the conflicts, if already computed."""
    masks = ancestors(program)
    return any(not masks[second] >> first & 1 for first, second in pairs or conflicts(graph, program))


def plain_values(graph: StepGraph) -> tuple[list[dict[int, Value]], list[Value]]:
    """Return the inputs of each op and the final values of the step, in plain execution."""
    values: list[Value] = [("before", s.id) for s in graph.storages]
    inputs: list[dict[int, Value]] = []
    for op in graph.ops:
        needs = {s: values[s] for s in op.reads}
        inputs.append(needs)
        for storage in op.mutates + op.creates:
            values[storage] = (op.id, storage, hash(tuple(needs.items())))
    return inputs, values


class Machine:
    """Device blocks and homes with symbolic values; a write ruins all blocks that share its bytes."""

    def __init__(self, graph: StepGraph, program: Program) -> None:
        self.graph = graph
        self.program = program
        wraps = {b.storage for b in program.blocks if b.wraps}
        self.device: list[Value] = [("before", b.storage) if b.wraps else GARBAGE for b in program.blocks]
        # By storage and home; a missing entry is garbage.
        self.lodgings = {lodging.storage: lodging.home for lodging in program.lodgings}
        self.home: dict[tuple[int, int], Value] = {
            (s.id, self.lodgings.get(s.id, 0)): ("before", s.id)
            for s in graph.storages
            if s.arrives or (s.id in graph.persistent and s.id not in wraps) or s.id in program.clean
        }
        self.needs, self.final = plain_values(graph)
        self.faults: list[str] = []
        self.first_runs: dict[int, int] = {}  # op -> its first instruction
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                self.first_runs.setdefault(instruction.op, index)

    def write(self, number: int, value: Value) -> None:
        target = self.program.blocks[number]
        for neighbour in self.program.blocks:
            if target.offset >= 0 and max(target.offset, neighbour.offset) < min(
                target.offset + target.bytes, neighbour.offset + neighbour.bytes
            ):
                self.device[neighbour.id] = GARBAGE
        self.device[number] = value

    def begin(self, index: int) -> list[Value]:
        """Start an instruction: return its inputs; its targets are garbage until it ends."""
        instruction = self.program.instructions[index]
        if isinstance(instruction, Run):
            op = self.graph.ops[instruction.op]
            inputs = [self.device[b] for b in instruction.blocks]
            if instruction.workspace is not None:
                self.write(instruction.workspace, GARBAGE)
            for storage, number in zip(op.touched, instruction.blocks, strict=True):
                if storage in op.mutates + op.creates:
                    self.write(number, GARBAGE)
            return inputs
        storage = self.program.blocks[instruction.block].storage
        assert storage is not None
        if isinstance(instruction, CopyOut):
            self.home[storage, instruction.home] = GARBAGE
            return [self.device[instruction.block]]
        self.write(instruction.block, GARBAGE)
        return [self.home.get((storage, instruction.home), GARBAGE)]

    def end(self, index: int, inputs: list[Value]) -> None:
        """End an instruction: its inputs must be unchanged; its targets get their values."""
        instruction = self.program.instructions[index]
        if isinstance(instruction, Run):
            op = self.graph.ops[instruction.op]
            needs = self.needs[op.id]
            is_rerun = self.first_runs[op.id] != index
            checked = set(op.reads) - set(op.discards) if is_rerun else set(op.reads)
            for storage, number, value in zip(op.touched, instruction.blocks, inputs, strict=True):
                steady = storage in op.mutates or self.device[number] == value
                if storage in checked and not (steady and value == needs[storage]):
                    self.faults.append(f"instruction {index}, op {op.id}: wrong value in storage {storage}")
            for storage, number in zip(op.touched, instruction.blocks, strict=True):
                if storage in op.mutates + op.creates:
                    is_defined = not (is_rerun and storage in op.discards)
                    self.write(number, (op.id, storage, hash(tuple(needs.items()))) if is_defined else GARBAGE)
            if instruction.workspace is not None:
                self.write(instruction.workspace, GARBAGE)
            return
        storage = self.program.blocks[instruction.block].storage
        assert storage is not None
        if isinstance(instruction, CopyOut):
            steady = self.device[instruction.block] == inputs[0]
            self.home[storage, instruction.home] = inputs[0] if steady else GARBAGE
        else:
            steady = self.home.get((storage, instruction.home), GARBAGE) == inputs[0]
            self.write(instruction.block, inputs[0] if steady else GARBAGE)

    def finish(self) -> list[str]:
        due = set(self.program.results) | (set(self.graph.outputs) - set(self.program.staying))
        due |= {s for s in self.graph.persistent if not any(b.wraps and b.storage == s for b in self.program.blocks)}
        for storage in sorted(due | set(self.program.clean)):
            if self.home.get((storage, self.lodgings.get(storage, 0)), GARBAGE) != self.final[storage]:
                self.faults.append(f"wrong value at home in storage {storage}")
        for block in self.program.blocks:
            if block.wraps and block.storage is not None and self.device[block.id] != self.final[block.storage]:
                self.faults.append(f"wrong value at the end in block {block.id}")
        end = len(self.program.instructions)
        for storage in self.program.staying:
            contents = [self.device[b.id] for b in self.program.blocks if b.storage == storage and b.dies == end]
            if contents != [self.final[storage]]:
                self.faults.append(f"wrong value at the end in staying storage {storage}")
        return self.faults


def faults_in_order(graph: StepGraph, program: Program) -> list[str]:
    machine = Machine(graph, program)
    for index in range(len(program.instructions)):
        machine.end(index, machine.begin(index))
    return machine.finish()


def faults_on_schedule(graph: StepGraph, program: Program, random: Random) -> list[str]:
    """Run one random schedule that the queues and waits allow and return the faults."""
    machine = Machine(graph, program)
    before = [set(indices) for indices in predecessors(program)]
    waiting, running, finished = list(range(len(before))), {}, set[int]()
    # Prefer one queue, so that it runs far ahead and races show.
    favourite = random.choice(lanes(program))
    while waiting or running:
        ready = [index for index in waiting if before[index] <= finished]
        preferred = [index for index in ready if lane(program.instructions[index]) == favourite] or ready
        if preferred and (not running or random.random() < 0.5):
            index = random.choice(preferred)
            waiting.remove(index)
            running[index] = machine.begin(index)
        else:
            assert running, "the program deadlocks"
            index = random.choice(list(running))
            machine.end(index, running.pop(index))
            finished.add(index)
    return machine.finish()


def is_held(program: Program, index: int) -> bool:
    for number in blocks_of(program.instructions[index]):
        block = program.blocks[number]
        lifetime = set(range(block.born, block.dies))
        if block.wraps:
            indices = range(len(program.instructions))
            lifetime = {i for i in indices if i >= block.born or i < block.dies or block.born == block.dies == 0}
        if index not in lifetime:
            return False
    return True


def is_broken(graph: StepGraph, program: Program) -> bool:
    """Return whether a well-formed program breaks a rule other than the budget."""
    runs = [i for i in program.instructions if isinstance(i, Run)]
    first_runs = list(dict.fromkeys(run.op for run in runs))
    later_runs = [run.op in {former.op for former in runs[:place]} for place, run in enumerate(runs)]
    return (
        first_runs != list(range(len(graph.ops)))
        or [run.again for run in runs] != later_runs
        or not all(graph.ops[run.op].rerunnable for run in runs if run.again)
        or not all(is_held(program, index) for index in range(len(program.instructions)))
        or bool(faults_in_order(graph, program))
        or is_racy(graph, program)
    )
