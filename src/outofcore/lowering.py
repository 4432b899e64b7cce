"""From a plan to a program: instructions, the blocks they work on, and what they wait for.

    lower(graph, costs, plan)    -> Program with blocks, no addresses and no waits
    (planning.addresses.place)   -> the same with an offset for each block
    wire(graph, program)         -> the same with the fewest waits that make it safe

The waits depend on the addresses: a block may be written as soon as whatever last held its bytes
is done with them, and need not wait for anything else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace

from outofcore.analysis.gaps import gaps_of, placed_bytes
from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait, queue_of


@dataclass
class _Stay:
    """A block while its lifetime is still being found out."""

    storage: int | None
    bytes: int
    born: int
    dies: int = -1
    wraps: bool = False


@dataclass
class _Lowering:
    graph: StepGraph
    costs: Costs
    plan: Plan
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    stays: list[_Stay] = field(default_factory=list[_Stay])
    block_of: dict[int, int] = field(default_factory=dict[int, int])  # storage -> its block now
    wrapping: dict[int, int] = field(default_factory=dict[int, int])  # storage -> its wrapping block

    def run(self) -> Program:
        graph, n = self.graph, len(self.graph.ops)
        offloads = self._offloads()
        releases: dict[int, list[Decision]] = defaultdict(list)
        fetches: dict[int, list[Decision]] = defaultdict(list)
        leaving: dict[int, list[Decision]] = defaultdict(list)
        last_fetch: dict[int, Decision] = {}  # the last stay of a storage starts with this one
        cyclic: set[int] = set()  # at home when the step ends
        for decision in offloads:
            gap = decision.gap
            if gap.start >= 0:
                releases[decision.release_by].append(decision)
                leaving[gap.start].append(decision)
            fetches[decision.fetch_at - n if gap.end >= n else decision.fetch_at].append(decision)
            if gap.end >= n:
                cyclic.add(gap.storage)
            elif gap.storage not in last_fetch or gap > last_fetch[gap.storage].gap:
                last_fetch[gap.storage] = decision
        version = [0] * len(graph.storages)
        home: list[int | None] = [None] * len(graph.storages)
        dying_stays: dict[Gap, int] = {}  # blocks whose copy-out may still be under way
        for storage in graph.storages:
            if not graph.uses[storage.id] and storage.kind is not StorageKind.CONSTANT:
                continue
            if storage.kind is StorageKind.INPUT or storage.id in cyclic:
                home[storage.id] = 0
            elif storage.kind is StorageKind.CONSTANT or storage.id in graph.persistent:
                self.wrapping[storage.id] = self.block_of[storage.id] = self._new_stay(storage.id, wraps=True)

        outputs = set(graph.outputs)
        last_use = {storage.id: uses[-1] for storage, uses in zip(graph.storages, graph.uses, strict=True) if uses}
        for op in graph.ops:
            for decision in releases.pop(op.id, ()):
                if decision.gap in dying_stays:
                    self._end(dying_stays.pop(decision.gap))
            for decision in sorted(fetches.pop(op.id, ()), key=lambda d: (d.gap.end, d.gap.storage)):
                storage = decision.gap.storage
                if storage in self.wrapping and decision is last_fetch.get(storage):
                    block = self.wrapping[storage]
                    self.stays[block].born = len(self.instructions)
                else:
                    block = self._new_stay(storage)
                self.block_of[storage] = block
                held = home[storage]
                if held is None:
                    raise GraphError(f"the plan fetches storage {storage} before anything was copied out: {decision}")
                self.instructions.append(CopyIn(block, held))
            self._run_op(op.id)
            for storage in op.mutates + op.creates:
                version[storage] += 1
            for storage in op.touched:
                if last_use[storage] != op.id or storage in graph.persistent:
                    continue
                if graph.storages[storage].kind is StorageKind.CONSTANT:
                    continue
                changed_input = graph.storages[storage].kind is StorageKind.INPUT and version[storage] > 0
                if (storage in outputs or changed_input) and home[storage] != version[storage]:
                    self.instructions.append(CopyOut(self.block_of[storage], version[storage]))
                    home[storage] = version[storage]
                self._end(self.block_of.pop(storage))
            for decision in leaving.pop(op.id, ()):
                storage = decision.gap.storage
                block = self.block_of.pop(storage)
                if home[storage] == version[storage]:
                    self._end(block)
                    continue
                self.instructions.append(CopyOut(block, version[storage]))
                home[storage] = version[storage]
                dying_stays[decision.gap] = block
        for storage in graph.outputs:
            if home[storage] != version[storage] and storage in self.block_of:
                self.instructions.append(CopyOut(self.block_of[storage], version[storage]))
        for block in dying_stays.values():
            self._end(block)
        return self._program(version)

    def _offloads(self) -> list[Decision]:
        """The decisions to offload, checked, and the arrival of every input added where it is not named."""
        n = len(self.graph.ops)
        found: list[Decision] = []
        arriving: set[int] = set()
        for decision in self.plan.decisions:
            gap = decision.gap
            if decision.residency is Residency.KEEP:
                continue
            if decision.residency is Residency.RECOMPUTE:
                raise GraphError(f"recomputation cannot be lowered yet: {decision}")
            if gap not in gaps_of(self.graph, gap.storage):
                raise GraphError(f"the plan decides about a gap that the graph has not: {gap}")
            latest_release = min(decision.fetch_at, n) if gap.end >= n else decision.fetch_at
            if not gap.start < decision.release_by <= latest_release <= decision.fetch_at <= gap.end or (
                gap.end >= n > decision.fetch_at
            ):
                raise GraphError(f"the times of a decision are out of order: {decision}")
            if gap.start < 0:
                arriving.add(gap.storage)
            found.append(decision)
        for storage in self.graph.storages:
            uses = self.graph.uses[storage.id]
            if storage.kind is StorageKind.INPUT and storage.id not in arriving and uses:
                found.append(Decision(Gap(storage.id, -1, uses[0]), Residency.OFFLOAD, 0, 0))
        return found

    def _new_stay(self, storage: int | None, count: int = 0, *, wraps: bool = False) -> int:
        if storage is not None:
            count = placed_bytes(self.graph.storages[storage].bytes)
        self.stays.append(_Stay(storage, count, 0 if wraps else len(self.instructions), wraps=wraps))
        return len(self.stays) - 1

    def _end(self, block: int) -> None:
        self.stays[block].dies = len(self.instructions)

    def _run_op(self, index: int) -> None:
        op = self.graph.ops[index]
        for storage in op.creates:
            self.block_of[storage] = self._new_stay(storage)
        scratch = placed_bytes(self.costs.ops[index].workspace_bytes)
        workspace = self._new_stay(None, scratch) if scratch else None
        self.instructions.append(Run(index, tuple(self.block_of[s] for s in op.touched), workspace))
        if workspace is not None:
            self._end(workspace)

    def _program(self, version: list[int]) -> Program:
        graph = self.graph
        blocks: list[Block] = []
        for index, stay in enumerate(self.stays):
            dies = stay.dies
            if stay.wraps and dies < 0:  # never left: over the whole step
                blocks.append(Block(index, stay.storage, stay.bytes, 0, 0, True))
            else:
                blocks.append(Block(index, stay.storage, stay.bytes, stay.born, dies, stay.wraps))
        changed = {s.id for s in graph.storages if s.kind is StorageKind.INPUT and version[s.id] > 0}
        results = sorted(set(graph.outputs) | (graph.persistent - set(self.wrapping)) | changed)
        return Program(tuple(self.instructions), tuple(blocks), 0, tuple(results))


def lower(graph: StepGraph, costs: Costs, plan: Plan) -> Program:
    """Turn a plan into instructions on blocks that have no addresses yet.

    Before each op come the copies-in that the plan fetches there, after it the copies-out of what
    leaves. A storage whose home copy is up to date leaves without a copy; one that is used no more
    is dropped. A persistent storage that is resident when the step ends counts as changed when the
    next one starts, since the user may have written to it in between.

    Raises:
        GraphError: a decision's times are out of order, or it names a gap that the graph has not.
    """
    return _Lowering(graph, costs, plan).run()


# --------------------------------------------------------------------------- waits

_QUEUES = (Queue.COMPUTE, Queue.COPY_OUT, Queue.COPY_IN)
_Clock = tuple[int, int, int]  # how many instructions of each queue are surely done


def _later(a: _Clock, b: _Clock) -> _Clock:
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]))


class _Ground:
    """Who last touched each byte of the arena, as disjoint intervals in order of address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, _Clock]] = []  # end of the interval, and when its bytes are free

    def take(self, start: int, end: int) -> _Clock:
        """When all of [start, end) is free."""
        needed: _Clock = (0, 0, 0)
        at = max(bisect_right(self._starts, start) - 1, 0)
        while at < len(self._starts) and self._starts[at] < end:
            piece_end, clock = self._pieces[at]
            if piece_end > start:
                needed = _later(needed, clock)
            at += 1
        return needed

    def give(self, start: int, end: int, clock: _Clock) -> None:
        """Record that [start, end) is free once ``clock`` is reached."""
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


def wire(graph: StepGraph, program: Program) -> Program:
    """Give each instruction of a placed program the waits that it needs, and no more.

    An instruction waits for whoever wrote what it reads, for whoever still reads what it overwrites
    (in a block, in a home slot, or in the bytes of a block that was there before), unless its own
    queue or another wait implies it.
    """
    ground = _Ground()
    counts = [0, 0, 0]
    clocks: dict[tuple[int, int], _Clock] = {}  # of the count-th instruction of a queue, once it is done
    written: dict[int, _Clock] = {}  # block -> when its contents are there
    touched: dict[int, _Clock] = {}  # block -> when everybody is done with it
    slot_written: dict[int, _Clock] = {}  # storage -> when its home holds what was last copied out
    slot_read: dict[int, _Clock] = {}
    nothing: _Clock = (0, 0, 0)
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
                    ground.give(block.offset, block.offset + block.bytes, touched.get(block.id, nothing))
                # A wrapping block that comes back later in the step starts afresh.
                written.pop(block.id, None)
                touched.pop(block.id, None)
            next_death += 1
        queue = _QUEUES.index(queue_of(instruction))
        needed = nothing
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
                raise GraphError(f"instruction {index} copies a workspace")
            needed = slot_written.get(storage, nothing)
            if isinstance(instruction, CopyOut):
                needed = _later(needed, slot_read.get(storage, nothing))
        for block_id, writes_it in accesses:
            block = program.blocks[block_id]
            if block_id not in touched and block.bytes and not (block.wraps and index < block.dies):
                needed = _later(needed, ground.take(block.offset, block.offset + block.bytes))
            needed = _later(needed, (touched if writes_it else written).get(block_id, nothing))
        counts[queue] += 1
        known = clocks.get((queue, counts[queue] - 1), nothing)
        waits: list[Wait] = []
        # The queue whose news imply most comes first, so that the other wait may be found superfluous.
        missing = [q for q in range(3) if q != queue and needed[q] > known[q]]
        merged = {q: clocks[q, needed[q]] for q in missing}
        for q in sorted(missing, key=lambda q: -sum(merged[q][p] >= needed[p] for p in missing)):
            if needed[q] > known[q]:
                waits.append(Wait(_QUEUES[q], needed[q]))
                known = _later(known, merged[q])
        done = list(known)
        done[queue] = counts[queue]
        clock: _Clock = (done[0], done[1], done[2])
        clocks[queue, counts[queue]] = clock
        own: list[int] = [0, 0, 0]
        own[queue] = counts[queue]
        mine: _Clock = (own[0], own[1], own[2])
        for block_id, writes_it in accesses:
            touched[block_id] = _later(touched.get(block_id, nothing), mine)
            if writes_it:
                written[block_id] = mine
        if isinstance(instruction, CopyOut | CopyIn):
            storage = program.blocks[instruction.block].storage
            if storage is not None:
                target = slot_written if isinstance(instruction, CopyOut) else slot_read
                target[storage] = _later(target.get(storage, nothing), mine)
        instructions.append(replace(instruction, waits=tuple(waits)))
    return replace(program, instructions=tuple(instructions))
