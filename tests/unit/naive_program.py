"""Valid but slow programs, to be mutated and compared with.

All storages are at home: each op's storages are copied in before it, and its results are copied out after it, without
overlap. Options add resident storages, blocks that wrap, recomputation, and two arena halves used in turn, so that
copies of one op overlap the next op.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Wait


@dataclass
class _Builder:
    graph: StepGraph
    costs: Costs | None
    halves: int
    instructions: list[Instruction] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    issued: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(Queue, 0))
    fixed: dict[int, int] = field(default_factory=dict)  # storage -> its permanent block
    version: list[int] = field(default_factory=list)
    home: list[int | None] = field(default_factory=list)  # the version at home
    home_ready: list[int] = field(default_factory=list)  # copies out that must be done before the home has it
    finished: list[dict[Queue, int]] = field(default_factory=list)  # counts after each group of instructions
    reading: dict[int, int] = field(default_factory=dict)  # permanent storage -> copies out that still read its block
    extents: list[int] = field(default_factory=list)  # bytes used of each half
    placed: list[tuple[int, int, int]] = field(default_factory=list)  # block, half, offset in it

    def add(self, instruction: Instruction) -> None:
        queue = {Run: Queue.COMPUTE, CopyOut: Queue.COPY_OUT, CopyIn: Queue.COPY_IN}[type(instruction)]
        self.instructions.append(instruction)
        self.issued[queue] += 1

    def waits(self, **counts: int) -> tuple[Wait, ...]:
        return tuple(Wait(Queue[name.upper()], count) for name, count in counts.items() if count)

    def group(self, op_id: int, copy_out: set[int], *, again: bool = False) -> None:
        """Add copies in, one run and copies out, with blocks stacked in one half of the arena."""
        op = self.graph.ops[op_id]
        half = len(self.finished) % self.halves
        # The half is free once the last group in it is done.
        free = self.finished[-self.halves] if len(self.finished) >= self.halves else dict.fromkeys(Queue, 0)
        born, top = len(self.instructions), 0
        first = len(self.blocks)
        numbers: list[int] = []

        def take(storage: int | None, size: int) -> int:
            nonlocal top
            number = len(self.blocks)
            self.blocks.append(Block(number, storage, size, born, born, offset=0))
            self.placed.append((number, half, top))
            top += size
            return number

        for storage in op.touched:
            scratch = again and storage in op.discards
            if storage in self.fixed and not scratch:
                numbers.append(self.fixed[storage])
                continue
            numbers.append(take(storage, self.graph.storages[storage].bytes))
            if storage not in op.creates and not scratch:
                home = self.home[storage]
                assert home is not None
                waits = self.waits(
                    compute=free[Queue.COMPUTE], copy_out=max(free[Queue.COPY_OUT], self.home_ready[storage])
                )
                self.add(CopyIn(numbers[-1], home, waits))
        workspace = None
        if self.costs is not None and self.costs.ops[op_id].workspace_bytes:
            workspace = take(None, self.costs.ops[op_id].workspace_bytes)
        copied = max([free[Queue.COPY_OUT], *(self.reading.get(s, 0) for s in op.mutates)])
        waits = self.waits(copy_in=self.issued[Queue.COPY_IN], copy_out=copied)
        self.add(Run(op_id, tuple(numbers), workspace, waits, again))
        for storage, number in zip(op.touched, numbers, strict=True):
            if storage in copy_out and storage not in self.fixed:
                version = self.version[storage]
                # The copy out must also follow copies in of the former version; the run waited for those.
                self.add(CopyOut(number, version, self.waits(compute=self.issued[Queue.COMPUTE])))
                self.home[storage] = version
                self.home_ready[storage] = self.issued[Queue.COPY_OUT]
        end = len(self.instructions)
        self.blocks[first:] = [replace(block, born=born, dies=end) for block in self.blocks[first:]]
        self.extents[half] = max(self.extents[half], top)
        self.finished.append(dict(self.issued))


def naive_program(
    graph: StepGraph,
    costs: Costs | None = None,
    *,
    resident: frozenset[int] = frozenset(),
    partial: frozenset[int] = frozenset(),
    recompute: frozenset[int] = frozenset(),
    snapshots: frozenset[int] = frozenset(),
    halves: int = 1,
) -> Program:
    """Return a valid, placed program.

    Args:
        resident: persistent storages that stay on the device for the whole step and from step to step.
        partial: persistent storages whose block wraps, but is released between two uses in the step.
        recompute: storages that are recomputed before their next use instead of being copied out, where possible.
        snapshots: resident storages that are also copied out after their first use, so that an op that changes one
            must wait for that copy.
        halves: 2: the arena has two halves used in turn, so that an op's copies overlap its neighbours.
    """
    builder = _Builder(graph, costs, halves, extents=[0] * halves)
    storages = graph.storages
    builder.version = [0] * len(storages)
    constants = {s.id for s in storages if s.kind is StorageKind.CONSTANT}
    whole = constants | (resident & graph.persistent)
    partly = {s for s in partial & graph.persistent - whole if len(graph.uses[s]) >= 2}
    builder.home = [0 if s.arrives or s.id in graph.persistent - whole else None for s in storages]
    builder.home_ready = [0] * len(storages)
    for storage in sorted(whole):
        builder.fixed[storage] = len(builder.blocks)
        builder.blocks.append(Block(len(builder.blocks), storage, storages[storage].bytes, 0, 0, wraps=True, offset=0))
    for storage in sorted(partly):
        builder.home[storage] = None
        builder.fixed[storage] = len(builder.blocks)
        builder.blocks.append(Block(len(builder.blocks), storage, storages[storage].bytes, 0, 0, wraps=True, offset=0))

    dropped: dict[int, tuple[int, list[int]]] = {}  # storage -> its creator, and the versions that it read
    for op in graph.ops:
        for storage in op.touched:
            if storage in dropped:
                _bring_back(builder, dropped, storage)
        for storage in partly & set(op.touched):
            if op.id == graph.uses[storage][-1]:
                _return(builder, storage)
        # Recompute before an op changes the inputs.
        for storage, (creator, _) in list(dropped.items()):
            if storage in dropped and set(graph.ops[creator].touched) & set(op.mutates):
                _bring_back(builder, dropped, storage)
        read = [builder.version[s] for s in op.reads if s not in op.discards]
        for storage in op.mutates + op.creates:
            builder.version[storage] += 1
        drop: set[int] = set()
        if op.rerunnable and set(op.mutates) <= set(op.discards):
            drop = {s for s in op.creates if s in recompute and len(graph.uses[s]) > 1}
        dropped.update(dict.fromkeys(drop, (op.id, read)))
        builder.group(op.id, set(op.mutates + op.creates) - drop)
        for storage in partly & set(op.touched):
            if op.id == graph.uses[storage][0]:
                _leave(builder, storage)
        for storage in sorted(snapshots & resident & graph.persistent & set(op.touched)):
            if op.id == graph.uses[storage][0]:
                _copy_out_fixed(builder, storage)
    while dropped:
        _bring_back(builder, dropped, next(iter(dropped)))

    results = set(graph.outputs) | (graph.persistent - whole - partly)
    results |= {s.id for s in storages if s.arrives and any(s.id in op.mutates for op in graph.ops)}
    for storage in sorted(results & (whole | partly)):
        waits = builder.waits(compute=builder.issued[Queue.COMPUTE], copy_in=builder.issued[Queue.COPY_IN])
        builder.add(CopyOut(builder.fixed[storage], builder.version[storage], waits))
    return _place(builder, sorted(whole | partly), tuple(sorted(results)))


def _bring_back(builder: _Builder, dropped: dict[int, tuple[int, list[int]]], storage: int) -> None:
    creator, read = dropped.pop(storage)
    op = builder.graph.ops[creator]
    assert read == [builder.version[s] for s in op.reads if s not in op.discards]
    for source in op.reads:
        if source in dropped:
            _bring_back(builder, dropped, source)
    builder.group(creator, {storage}, again=True)


def _copy_out_fixed(builder: _Builder, storage: int) -> None:
    waits = builder.waits(compute=builder.issued[Queue.COMPUTE])
    builder.add(CopyOut(builder.fixed[storage], builder.version[storage], waits))
    builder.home[storage] = builder.version[storage]
    builder.home_ready[storage] = builder.reading[storage] = builder.issued[Queue.COPY_OUT]


def _leave(builder: _Builder, storage: int) -> None:
    number = builder.fixed[storage]
    _copy_out_fixed(builder, storage)
    builder.blocks[number] = replace(builder.blocks[number], dies=len(builder.instructions))
    # Until it returns, it is an ordinary storage.
    del builder.fixed[storage]


def _return(builder: _Builder, storage: int) -> None:
    number = next(b.id for b in builder.blocks if b.wraps and b.storage == storage)
    version = builder.home[storage]
    assert version is not None
    builder.blocks[number] = replace(builder.blocks[number], born=len(builder.instructions))
    builder.add(CopyIn(number, version, builder.waits(copy_out=builder.home_ready[storage])))
    builder.fixed[storage] = number


def _place(builder: _Builder, fixed: list[int], results: tuple[int, ...]) -> Program:
    top = 0
    blocks = list(builder.blocks)
    for block in builder.blocks:
        if block.wraps:
            blocks[block.id] = replace(block, offset=top)
            top += block.bytes
    bases = [top + sum(builder.extents[:half]) for half in range(len(builder.extents))]
    for number, half, offset in builder.placed:
        blocks[number] = replace(blocks[number], offset=bases[half] + offset)
    return Program(tuple(builder.instructions), tuple(blocks), top + sum(builder.extents), results)
