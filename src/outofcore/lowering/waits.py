"""Derive the waits of each instruction of a placed program from the addresses of its blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import replace

from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph, StorageKind
from outofcore.lowering.slots import copies_in_before_room
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait, lane_of

# The number of instructions of each queue that have certainly ended; queues in the order of ``_lanes``.
_Clock = tuple[int, ...]


def _later(a: _Clock, b: _Clock) -> _Clock:
    """Return the elementwise maximum of two clocks: when both have been reached."""
    return a if a is b else tuple(map(max, a, b))


# Kinds that updates change. Other persistent storages change early in a step, or are saved for undo (statistics).
_LEARNT = frozenset({StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE, StorageKind.STATE_RANGE})


class _FreeTimes:
    """Records when each byte of the arena becomes free, as disjoint intervals in order of address."""

    def __init__(self, start: _Clock) -> None:
        self._initial = start
        self._starts: list[int] = []
        self._pieces: list[tuple[int, _Clock]] = []  # the end of each interval, and when it is free

    def free_time(self, start: int, end: int) -> _Clock:
        """Return the clock (instructions ended per queue) from which all bytes of [start, end) are free."""
        needed = self._initial
        at = max(bisect_right(self._starts, start) - 1, 0)
        while at < len(self._starts) and self._starts[at] < end:
            piece_end, clock = self._pieces[at]
            if piece_end > start:
                needed = _later(needed, clock)
            at += 1
        return needed

    def set_free_time(self, start: int, end: int, clock: _Clock) -> None:
        """Record the clock (instructions ended per queue) from which the bytes [start, end) are free."""
        first = bisect_left(self._starts, start)
        if first and self._pieces[first - 1][0] > start:
            first -= 1
        last = first
        new_starts: list[int] = []
        new_pieces: list[tuple[int, _Clock]] = []
        while last < len(self._starts) and self._starts[last] < end:
            old_start, (old_end, old_clock) = self._starts[last], self._pieces[last]
            if old_start < start:
                new_starts.append(old_start)
                new_pieces.append((start, old_clock))
            if old_end > end:
                new_starts.append(end)
                new_pieces.append((old_end, old_clock))
            last += 1
        at = 1 if new_starts and new_starts[0] < start else 0
        new_starts.insert(at, start)
        new_pieces.insert(at, (end, clock))
        self._starts[first:last] = new_starts
        self._pieces[first:last] = new_pieces


def wire(graph: StepGraph, program: Program, costs: Costs | None = None) -> Program:
    """Return a placed program with the waits that each of its instructions needs.

    An instruction waits for the last accesses of the bytes that it uses, in blocks and home slots, unless its queue or
    another wait implies this. Updates of the model also wait for all earlier collectives: if one fails, the step is
    undone. Raises ``GraphError`` if the program exceeds the capacity of a home, or if a workspace is copied.
    """
    room = copies_in_before_room(graph, costs, program) if costs is not None else {}
    if room is None:
        raise GraphError(
            "the plan needs more bytes at a home than its capacity; give the home more bytes, or plan fewer evictions "
            "to it"
        )
    lanes = _lanes(program)
    numbers = {lane: number for number, lane in enumerate(lanes)}
    at_start: _Clock = (0,) * len(lanes)
    free_times = _FreeTimes(at_start)
    counts = [0] * len(lanes)
    collectives = numbers.get((Queue.COMMUNICATE, 0))
    clocks: dict[tuple[int, int], _Clock] = {}  # after the count-th instruction of a queue has ended
    written: dict[int, _Clock] = {}  # block -> when its contents are written
    touched: dict[int, _Clock] = {}  # block -> when its users have ended
    # (storage, home) -> when the last copy out to this slot has ended, and when its readers have ended
    slot_written: dict[tuple[int, int], _Clock] = {}
    slot_read: dict[tuple[int, int], _Clock] = {}
    deaths: dict[int, list[Block]] = defaultdict(list)
    for block in program.blocks:
        if not (block.wraps and block.born == block.dies == 0):
            deaths[block.dies].append(block)
    pending = sorted(deaths)
    next_death = 0
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        while next_death < len(pending) and pending[next_death] <= index:
            for block in deaths[pending[next_death]]:
                if block.bytes:
                    free_times.set_free_time(block.offset, block.offset + block.bytes, touched.get(block.id, at_start))
                    # A wrapping block that is born again later in the step has new users.
                    written.pop(block.id, None)
                    touched.pop(block.id, None)
            next_death += 1
        queue = numbers[lane_of(instruction)]
        needed = at_start
        if collectives is not None and queue != collectives and _is_final(graph, program, instruction):
            needed = tuple(counts[collectives] if q == collectives else 0 for q in range(len(lanes)))
        if isinstance(instruction, Run):
            op = graph.ops[instruction.op]
            writes = set(op.mutates) | set(op.creates)
            accesses = [(b, s in writes) for b, s in zip(instruction.blocks, op.touched, strict=True)]
            if instruction.workspace is not None:
                accesses.append((instruction.workspace, True))
        else:
            accesses = [(instruction.block, isinstance(instruction, CopyIn))]
            storage = program.blocks[instruction.block].storage
            if storage is None:
                raise GraphError(
                    f"instruction {index} copies block {instruction.block}, a workspace; only blocks of storages may "
                    "be copied"
                )
            needed = _later(needed, slot_written.get((storage, instruction.home), at_start))
            if isinstance(instruction, CopyOut):
                needed = _later(needed, slot_read.get((storage, instruction.home), at_start))
            if index in room:
                after = numbers[Queue.COPY_IN, instruction.home]
                needed = _later(needed, tuple(room[index] if q == after else 0 for q in range(len(lanes))))
        for block_id, writes_it in accesses:
            block = program.blocks[block_id]
            if block_id not in touched and block.bytes and not (block.wraps and index < block.dies):
                needed = _later(needed, free_times.free_time(block.offset, block.offset + block.bytes))
            needed = _later(needed, (touched if writes_it else written).get(block_id, at_start))
        counts[queue] += 1
        reached = clocks.get((queue, counts[queue] - 1), at_start)
        waits: list[Wait] = []
        # Waits that imply the most others come first, so that the others can be left out.
        missing = [q for q in range(len(lanes)) if q != queue and needed[q] > reached[q]]
        merged = {q: clocks[q, needed[q]] for q in missing}
        for q in sorted(missing, key=lambda q: -sum(merged[q][p] >= needed[p] for p in missing)):
            if needed[q] > reached[q]:
                waits.append(Wait(lanes[q][0], needed[q], lanes[q][1]))
                reached = _later(reached, merged[q])
        next_clock = list(reached)
        next_clock[queue] = counts[queue]
        clock = tuple(next_clock)
        clocks[queue, counts[queue]] = clock
        own_clock = tuple(counts[queue] if q == queue else 0 for q in range(len(lanes)))
        for block_id, writes_it in accesses:
            touched[block_id] = _later(touched.get(block_id, at_start), own_clock)
            if writes_it:
                written[block_id] = own_clock
        if isinstance(instruction, CopyOut | CopyIn):
            storage = program.blocks[instruction.block].storage
            if storage is not None:
                target = slot_written if isinstance(instruction, CopyOut) else slot_read
                slot = (storage, instruction.home)
                target[slot] = _later(target.get(slot, at_start), own_clock)
        instructions.append(_with_waits(instruction, tuple(waits)))
    return replace(program, instructions=tuple(instructions))


def _is_final(graph: StepGraph, program: Program, instruction: Instruction) -> bool:
    """Return whether an instruction cannot be undone: it changes the model or copies a gradient home."""
    if isinstance(instruction, Run):
        changed = graph.ops[instruction.op].mutates
        kinds = {graph.storages[s].kind for s in changed if s in graph.persistent or graph.storages[s].arrives}
        return not kinds.isdisjoint(_LEARNT)
    return isinstance(instruction, CopyOut) and program.blocks[instruction.block].storage in graph.gradients_left


def _with_waits(instruction: Instruction, waits: tuple[Wait, ...]) -> Instruction:
    if isinstance(instruction, Run):
        recompute, communicates = instruction.again, instruction.communicates
        return Run(instruction.op, instruction.blocks, instruction.workspace, waits, recompute, communicates)
    return type(instruction)(instruction.block, instruction.version, waits, instruction.home)


def _lanes(program: Program) -> list[tuple[Queue, int]]:
    """Return the queues of a program, each with its home, in the order of a clock's entries."""
    homes = {i.home for i in program.instructions if not isinstance(i, Run)} | {0}
    copies = [(queue, home) for home in sorted(homes) for queue in (Queue.COPY_OUT, Queue.COPY_IN)]
    has_collectives = any(isinstance(i, Run) and i.communicates for i in program.instructions)
    return [(Queue.COMPUTE, 0), *([(Queue.COMMUNICATE, 0)] if has_collectives else []), *copies]
