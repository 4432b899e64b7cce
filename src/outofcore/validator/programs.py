"""Validate programs by deliberately simple code, independent of planner, lowering and simulator.

Versions are replayed in program order, and all conflicting accesses must be ordered by queues and waits, as in a data
race detector with vector clocks (Mattern, "Virtual time and global states of distributed systems", 1989). So all other
execution orders give the same values. The state at the end of the step must equal the state assumed at its start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from operator import le
from typing import NoReturn

from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.graph import StepGraph, StorageKind
from outofcore.program import Block, CopyOut, Program, Run
from outofcore.validator.homes import check_capacity, check_homes
from outofcore.validator.step import ExecutionOrder, ValidatedStep


def validate(graph: StepGraph, program: Program, budget: int, costs: Costs | None = None) -> None:
    """Check that a program computes a step of a graph any number of times within a budget.

    - Every op runs, in graph order; only rerunnable ops run again, marked ``again``; collectives are on their queue.
    - Each run reads the versions of plain execution. A recomputed op reads and leaves garbage in ``discards``.
    - Blocks in use at the same time do not overlap, and their bytes do not exceed the budget.
    - Conflicting accesses of different queues are ordered.
    - No home exceeds its capacity.
    - At the end of the step, results are at home and wrapping blocks hold the state that the next step starts from.

    Args:
        graph: the step.
        program: placed, or with all offsets -1. Without offsets, overlaps are not checked; the bytes of live blocks are
            summed at each instruction.
        budget: bytes of device memory.
        costs: if given, workspaces and homes are checked against them.

    Limits: ``Op.rerunnable`` and ``Op.reads`` are trusted: recomputation gives the same bytes, and an op that mutates a
        storage without reading it overwrites it as a whole. The alignment of offsets is not checked.

    Raises:
        ValidationError: the program is invalid; names the instruction, op, module and storage.
        GraphError: the graph is inconsistent, or the costs do not fit it.
    """
    graph.check()
    if costs is not None:
        costs.check(graph)
    step = ValidatedStep(graph, program)
    _check_blocks(step)
    _check_instructions(step, costs)
    _check_op_order(step)
    lodgings = check_homes(step, costs)
    order = ExecutionOrder(program)
    _check_room(step, budget)
    if costs is not None:
        check_capacity(step, order, costs, lodgings)
    _Replay(step, order, lodgings).check()


def _is_held(block: Block, index: int) -> bool:
    if block.wraps:
        return block.born == block.dies == 0 or index >= block.born or index < block.dies
    return block.born <= index < block.dies


def _stay_of(block: Block, index: int) -> int:
    """Return 1 if a wrapping block has been born again in this step, and 0 before."""
    return int(block.wraps and not block.born == block.dies == 0 and index >= block.born)


def _check_blocks(step: ValidatedStep) -> None:
    """Check the ids, sizes, offsets and lifetimes of blocks."""
    graph, end = step.graph, len(step.program.instructions)
    lasting = graph.persistent | {s.id for s in graph.storages if s.kind is StorageKind.CONSTANT}
    wrapping: dict[int | None, int] = {}

    def refusal(block: Block, reason: str) -> ValidationError:
        return ValidationError(f"{step.block(block)} {reason}")

    for index, block in enumerate(step.program.blocks):
        if block.id != index:
            raise ValidationError(f"block at index {index} has id {block.id}; ids must be the indices")
        if block.storage is not None and not 0 <= block.storage < len(graph.storages):
            raise ValidationError(f"block {index} is of storage {block.storage}, which the graph does not have")
        if block.bytes < (0 if block.storage is None else graph.storages[block.storage].bytes):
            raise refusal(
                block,
                f"has {block.bytes} bytes, fewer than the "
                f"{0 if block.storage is None else graph.storages[block.storage].bytes} of its storage",
            )
        if block.offset < -1:
            raise ValidationError(
                f"{step.block(block)} has offset {block.offset}; it must be -1 (not placed) or not negative"
            )
        if not block.wraps:
            if not 0 <= block.born < block.dies <= end:
                raise ValidationError(
                    f"{step.block(block)} is held over [{block.born}, {block.dies}) of {end} instructions; it must "
                    "be born before it dies, and die by the end"
                )
            continue
        if not (block.born == block.dies == 0 or 0 <= block.dies <= block.born < end):
            raise ValidationError(
                f"{step.block(block)} wraps with born = {block.born}, dies = {block.dies} in {end} instructions; both "
                "must be 0, or it must die first and be born again before the end"
            )
        if block.storage not in lasting:
            raise refusal(
                block,
                "lives into the next step, but its storage is neither persistent nor a constant; end it in the step",
            )
        if block.storage in wrapping:
            raise ValidationError(
                f"{step.block(block)} wraps, and so does block {wrapping[block.storage]} of the same storage; only "
                "one block of a storage may wrap"
            )
        wrapping[block.storage] = index


def _check_instructions(step: ValidatedStep, costs: Costs | None) -> None:
    """Check that each instruction uses suitable blocks while they are live."""
    blocks = step.program.blocks
    for index, instruction in enumerate(step.program.instructions):
        used = instruction.blocks if isinstance(instruction, Run) else (instruction.block,)
        if isinstance(instruction, Run) and instruction.workspace is not None:
            used = (*used, instruction.workspace)
        for number in used:
            if not 0 <= number < len(blocks):
                raise ValidationError(f"instruction {index} uses block {number}, which does not exist")
        if isinstance(instruction, Run):
            _check_run(step, index, instruction, costs)
        elif blocks[instruction.block].storage is None:
            raise ValidationError(f"{step.instruction(index)} copies a block that has no home, since it is a workspace")
        for number in used:
            block = blocks[number]
            if not (block.born <= index < block.dies or (block.wraps and _is_held(block, index))):
                raise ValidationError(
                    f"{step.instruction(index)} uses {step.block(block)}, which is not held then "
                    f"(born {block.born}, dies {block.dies}, wraps {block.wraps})"
                )


def _check_run(step: ValidatedStep, index: int, run: Run, costs: Costs | None) -> None:
    """Check a run's queue, blocks and workspace."""
    if not 0 <= run.op < len(step.graph.ops):
        raise ValidationError(f"instruction {index} runs op {run.op}, which the graph does not have")
    if run.communicates != step.graph.ops[run.op].communicates:
        queue = "collectives" if run.communicates else "ops"
        raise ValidationError(
            f"{step.instruction(index)} is on the queue of {queue}, but it must be on that of "
            f"{'ops' if run.communicates else 'collectives'}"
        )
    touched = step.touched[run.op]
    owners = tuple(step.program.blocks[number].storage for number in run.blocks)
    if owners != touched:
        raise ValidationError(
            f"{step.instruction(index)} touches storages {touched}, but its blocks are of storages {owners}"
        )
    scratch = None if run.workspace is None else step.program.blocks[run.workspace]
    if scratch is not None and scratch.storage is not None:
        raise ValidationError(
            f"{step.instruction(index)} uses {step.block(scratch)} as its workspace; a workspace must be a block "
            "without a storage"
        )
    needed, available = costs.ops[run.op].workspace_bytes if costs else 0, scratch.bytes if scratch else 0
    if available < needed:
        raise ValidationError(f"{step.instruction(index)} has a workspace of {available} bytes and needs {needed}")


def _check_op_order(step: ValidatedStep) -> None:
    """Check that every op runs, in graph order, and that only rerunnable ops run again."""
    upcoming = 0
    for index, instruction in enumerate(step.program.instructions):
        if not isinstance(instruction, Run):
            continue
        if instruction.op == upcoming and not instruction.again:
            upcoming += 1
        elif instruction.op >= upcoming:
            raise ValidationError(
                f"{step.instruction(index)} comes before the first run of {step.op(upcoming)}; the first "
                "runs of ops must be in graph order"
            )
        elif not instruction.again:
            raise ValidationError(
                f"{step.instruction(index)} is not the op's first run, but is not marked as a recomputation (``again``)"
            )
        elif not step.graph.ops[instruction.op].rerunnable:
            raise ValidationError(
                f"{step.instruction(index)} runs again, but the op is not rerunnable: a second run may give other bytes"
            )
    if upcoming < len(step.graph.ops):
        raise ValidationError(f"{step.op(upcoming)} never runs")


def _check_room(step: ValidatedStep, budget: int) -> None:
    """Check that live blocks do not overlap, and that they fit the budget."""
    program = step.program
    is_placed = any(block.offset >= 0 for block in program.blocks)
    if is_placed and program.arena_bytes > budget:
        raise ValidationError(f"the arena has {program.arena_bytes} bytes, more than the budget of {budget}")
    for block in program.blocks:
        if is_placed and block.offset < 0:
            raise ValidationError(
                f"{step.block(block)} is not placed, but other blocks are; place every block, or leave all at -1"
            )
        if is_placed and block.offset + block.bytes > program.arena_bytes:
            end = block.offset + block.bytes
            raise ValidationError(
                f"{step.block(block)} ends at byte {end}, beyond the end of the arena of {program.arena_bytes} bytes"
            )
    births: list[list[Block]] = [[] for _ in program.instructions]
    deaths: list[list[Block]] = [[] for _ in program.instructions]
    live: list[tuple[int, int, int]] = []  # offset, end and id of the live blocks, by address
    held_bytes = 0
    for block in program.blocks:
        if block.wraps and (block.dies > 0 or block.born == 0):
            held_bytes += block.bytes
            _add_live_block(step, live, block, None)
        if block.born > 0 or not block.wraps:
            births[block.born].append(block)
        if 0 < block.dies < len(deaths):
            deaths[block.dies].append(block)
    peak, peak_at = held_bytes, -1
    for index, (born, dead) in enumerate(zip(births, deaths, strict=True)):
        for block in dead:
            held_bytes -= block.bytes
            if block.offset >= 0 and block.bytes > 0:
                del live[bisect_left(live, (block.offset, block.offset + block.bytes, block.id))]
        for block in born:
            held_bytes += block.bytes
            _add_live_block(step, live, block, index)
        if held_bytes > peak:
            peak, peak_at = held_bytes, index
    if not is_placed and peak > budget:
        when = "the start of the step" if peak_at < 0 else step.instruction(peak_at)
        raise ValidationError(f"{peak} bytes are held at {when}, more than the budget of {budget}")


def _add_live_block(step: ValidatedStep, live: list[tuple[int, int, int]], block: Block, index: int | None) -> None:
    """Add a block to ``live``; raise ``ValidationError`` if it overlaps another live block."""
    if block.offset < 0 or block.bytes == 0:
        return
    begin, end = block.offset, block.offset + block.bytes
    at = bisect_left(live, (begin, end, block.id))
    for neighbour_begin, neighbour_end, neighbour in live[max(at - 1, 0) : at + 1]:
        if neighbour_begin < end and begin < neighbour_end:
            when = "the start of the step" if index is None else f"instruction {index}"
            raise ValidationError(
                f"{step.block(block)} at bytes [{begin}, {end}) overlaps "
                f"{step.block(step.program.blocks[neighbour])} at [{neighbour_begin}, {neighbour_end}), and both are "
                f"held at {when}"
            )
    live.insert(at, (begin, end, block.id))


def _staying_blocks(step: ValidatedStep) -> dict[int, Block]:
    """Check the gradients in ``program.staying``; return the block that holds each when the step ends."""
    graph, program = step.graph, step.program
    blocks: dict[int, Block] = {}
    for storage in program.staying:
        exists = 0 <= storage < len(graph.storages)
        if not exists or storage not in graph.outputs or graph.storages[storage].kind is not StorageKind.GRADIENT:
            raise ValidationError(
                f"storage {storage} stays on the device after the step, but is not a gradient that the step outputs"
            )
        name = step.storage(storage)
        if not any(storage in op.creates for op in graph.ops):
            raise ValidationError(f"{name} stays on the device after the step, but the step does not create it")
        if storage in program.results:
            raise ValidationError(f"{name} stays on the device after the step, but is also a result, which goes home")
        lasting = [b for b in program.blocks if b.storage == storage and b.dies == len(program.instructions)]
        if len(lasting) != 1:
            raise ValidationError(
                f"{name} stays on the device after the step in {len(lasting)} blocks; it must be in one"
            )
        blocks[storage] = lasting[0]
    return blocks


@dataclass(eq=False, slots=True)
class _Location:
    """A block while it is held, or a slot at a home, with its version and its last accesses."""

    of: Block | tuple[int, int]  # the block; or the storage and its home
    version: int | None  # None: garbage, or bytes too old to trust
    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict[int, int])  # the last reader since then on each queue


class _Replay:
    """Follows versions through blocks and homes, and checks that waits order all conflicting accesses."""

    def __init__(self, step: ValidatedStep, order: ExecutionOrder, lodgings: dict[int, int]) -> None:
        graph, program = step.graph, step.program
        self.step, self.graph, self.program, self.order = step, graph, program, order
        # The current instruction: its index, its queue, and its entry of ``ExecutionOrder.ended``.
        self.index, self.queue, self.ended = 0, 0, [0]
        self.alone = True  # all earlier instructions have ended when it starts, so it has no conflicts
        # The versions that each op reads and writes in plain execution.
        self.before: list[list[int]] = []
        self.after: list[list[tuple[int, int]]] = []
        final = self.final = [0] * len(graph.storages)
        self.staying = _staying_blocks(step)
        for op in graph.ops:
            self.before.append([final[s] for s in op.reads])
            written = set(op.mutates + op.creates)
            for storage in written:
                final[storage] += 1
            self.after.append([(s, final[s]) for s in written])
        self.wrapping = {b.storage: b for b in program.blocks if b.wraps}
        # The home of a wrapping block may be stale, since the user may write to the device copy between steps.
        inputs = {s.id for s in graph.storages if s.arrives}
        # For clean storages, the executor updates the home before the step starts.
        at_home = inputs | (graph.persistent - self.wrapping.keys()) | set(program.clean)
        self.lodgings = lodgings
        # By storage and home; absent until the first access.
        self.homes: dict[tuple[int, int], _Location] = {}
        for storage in sorted(at_home):
            self._home_location(storage, lodgings.get(storage, 0)).version = 0
        # By block: its stay, and in ``later_stays`` that of a wrapping block after it is born again.
        self.stays: list[_Location | None] = [None] * len(program.blocks)
        self.later_stays: dict[int, _Location] = {}
        # The latest locations that hold the arena's bytes, over disjoint spans in order of address.
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.holders: list[_Location] = []

    def check(self) -> None:
        """Replay all instructions in program order, and check the contents at the end of the step."""
        order = self.order
        issued = [0] * len(order.ended[0]) if order.ended else []
        for index, instruction in enumerate(self.program.instructions):
            queue = order.queue[index]
            self.index, self.queue, self.ended = index, queue, order.ended[index]
            self.alone = all(map(le, issued, self.ended))
            issued[queue] += 1
            if isinstance(instruction, Run):
                self._run(instruction)
                continue
            location = self._block_location(instruction.block)
            home = self._home_location(self.program.blocks[instruction.block].storage or 0, instruction.home)
            source, target = (location, home) if isinstance(instruction, CopyOut) else (home, location)
            self._read(source, instruction.version)
            self._write(target, instruction.version)
        self._check_end()

    def _home_location(self, storage: int, home: int) -> _Location:
        location = self.homes.get((storage, home))
        if location is None:
            location = self.homes[storage, home] = _Location((storage, home), None)
        return location

    def _name(self, location: _Location) -> str:
        if isinstance(location.of, Block):
            return self.step.block(location.of)
        storage, home = location.of
        name = self.step.storage(storage)
        return f"the home of {name}" if home == 0 else f"{name} at home {home}"

    def _describe_contents(self, location: _Location) -> str:
        content = "undefined bytes" if location.version is None else f"version {location.version}"
        return f"{self._name(location)} holds {content}"

    def _run(self, run: Run) -> None:
        """Check the versions that a run reads, and record the versions that it writes."""
        op = self.graph.ops[run.op]
        locations = {s: self._block_location(b) for s, b in zip(self.step.touched[run.op], run.blocks, strict=True)}
        garbage = op.discards if run.again else ()
        for storage, version in zip(op.reads, self.before[run.op], strict=True):
            if storage not in garbage:
                self._read(locations[storage], version)
        for storage, version in self.after[run.op]:
            self._write(locations[storage], None if storage in garbage else version)
        if run.workspace is not None:
            self._write(self._block_location(run.workspace), None)

    def _block_location(self, block_id: int) -> _Location:
        """Return the record (location) of a block's contents and users; a new record at the block's first use."""
        location, block = self.stays[block_id], self.program.blocks[block_id]
        later = block.wraps and _stay_of(block, self.index) == 1
        if later:
            location = self.later_stays.get(block_id)
        if location is None:
            location = _Location(block, 0 if block.wraps and not later else None)
            if later:
                self.later_stays[block_id] = location
            else:
                self.stays[block_id] = location
            if block.offset >= 0 and block.bytes > 0:
                self._assign_bytes(location, block.offset, block.offset + block.bytes)
            elif later and (former := self.stays[block_id]) is not None and not self.alone:
                self._check_ordered(former, location)  # without addresses, the former stay is not found by its bytes
        return location

    def _assign_bytes(self, location: _Location, begin: int, end: int) -> None:
        """Assign bytes [begin, end) to a location; check that all earlier users of these bytes have ended."""
        begins, ends, holders = self.begins, self.ends, self.holders
        low, high = bisect_right(ends, begin), bisect_left(begins, end)
        for former in () if self.alone else holders[low:high]:
            if former.writer is not None or former.readers:
                self._check_ordered(former, location)
        if high == low + 1 and begins[low] == begin and ends[low] == end:
            holders[low] = location
            return
        news = [(begin, end, location)]
        if low < high and begins[low] < begin:
            news.insert(0, (begins[low], begin, holders[low]))
        if low < high and ends[high - 1] > end:
            news.append((end, ends[high - 1], holders[high - 1]))
        begins[low:high], ends[low:high], holders[low:high] = zip(*news, strict=True)

    def _check_ordered(self, former: _Location, location: _Location) -> None:
        """Check that all users of ``former`` have ended, since ``location`` reuses its bytes."""
        ended, order = self.ended, self.order
        for earlier in (former.writer, *former.readers.values()):
            if earlier is not None and ended[order.queue[earlier]] < order.position[earlier]:
                place = self._name(location)
                self._raise_unordered(
                    earlier, place if former is location else f"the bytes of {self._name(former)}, then of {place}"
                )

    def _raise_unordered(self, earlier: int, bytes_of: str) -> NoReturn:
        names = f"{self.step.instruction(self.index)} may start before {self.step.instruction(earlier)}"
        raise ValidationError(f"{names} has ended, and both touch {bytes_of}; it must wait")

    def _read(self, location: _Location, version: int) -> None:
        """Record a read of a location; check that it holds ``version`` and that its writer has ended."""
        if location.version != version:
            name = self.step.instruction(self.index)
            raise ValidationError(f"{name} needs version {version}, but {self._describe_contents(location)}")
        writer = None if self.alone else location.writer
        if writer is not None and self.ended[self.order.queue[writer]] < self.order.position[writer]:
            self._raise_unordered(writer, self._name(location))
        location.readers[self.queue] = self.index

    def _write(self, location: _Location, version: int | None) -> None:
        """Record a write to a location; check that all its earlier accesses have ended."""
        if not self.alone:
            self._check_ordered(location, location)
        if location.readers:
            location.readers.clear()
        location.writer = self.index
        location.version = version

    def _check_end(self) -> None:
        """Check that results and persistent state have their last versions when the step ends."""
        mutated = {storage for op in self.graph.ops for storage in op.mutates}
        due = (set(self.graph.outputs) - self.staying.keys()) | (self.graph.persistent - self.wrapping.keys())
        due |= {s.id for s in self.graph.storages if s.arrives and s.id in mutated}
        for storage in sorted(due - set(self.program.results)):
            raise ValidationError(
                f"{self.step.storage(storage)} is seen after the step, but is not a result; list it in ``results``"
            )
        if not set(self.program.results) <= set(range(len(self.final))):
            raise ValidationError(f"the results {self.program.results} name storages that the graph does not have")
        ends = [
            (self._home_location(storage, self.lodgings.get(storage, 0)), self.final[storage], "is a result")
            for storage in self.program.results
        ]
        ends += [(self._home_location(s, self.lodgings.get(s, 0)), 0, "is marked clean") for s in self.program.clean]
        for block in self.wrapping.values():
            stay = _stay_of(block, block.born)
            last = (self.later_stays.get(block.id) if stay else self.stays[block.id]) or _Location(
                block, None if stay else 0
            )
            ends.append((last, self.final[block.storage or 0], "starts the next step"))
        for storage, block in self.staying.items():
            last = self.stays[block.id] or _Location(block, None)
            ends.append((last, self.final[storage], "is seen after the step"))
        for location, version, reason in ends:
            if location.version != version:
                raise ValidationError(
                    f"{self._name(location)} {reason} and must end at version {version}, but "
                    f"{self._describe_contents(location)}"
                )
