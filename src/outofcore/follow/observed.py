"""Convert the native code's log of a step to reports and traces."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from itertools import islice
from typing import NamedTuple

from outofcore.follow.records import read_fields
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Program, Queue, Run, Timeline, Wait, lane_of
from outofcore.report.data import WORKSPACE, MemoryOverTime
from outofcore.units import format_bytes, format_seconds

# Names and kinds of storages, by number.
KnownStorages = Mapping[int, tuple[str, StorageKind]]


class Link(IntEnum):
    AHEAD = 0  # copies that overlap with ops
    LATE = 1  # copies that an op waits for


LINKS = tuple(link.name.lower() for link in Link)


class TouchFlags(IntFlag):
    """How an op uses a block, in addition to reading it."""

    WRITES = 1
    CREATES = 2


class LogEvent(IntEnum):
    HELD = 0  # a block has memory when the step begins
    TAKEN = 1  # a block gets memory
    GIVEN = 2  # a block releases its memory
    OP = 3  # an op ran; rows for the blocks it touched follow
    TOUCH = 4  # the preceding op touched a block
    IN = 5  # a copy of a block from its home has taken effect
    OUT = 6  # a copy of a block to its home
    LEFT = 7  # a block was evicted
    FREED = 8  # a block was freed


class CopyTiming(IntEnum):
    OVERLAPPED = 0  # overlapped with ops
    WAITED = 1  # overlapped, and then the loop waited for it
    ON_DEMAND = 2  # in the loop's thread, between two ops or in one


class Cause(IntEnum):
    OP = 0  # another op ran than was planned
    END = 1  # the step ended earlier than planned
    MEMORY = 2  # an op needed memory, so that a storage was evicted that the plan keeps resident
    PLACE = 3  # a storage was evicted, because the plan has another storage at its offset


@dataclass(frozen=True, slots=True)
class Departure:
    """A point at which a loop left its plan, and why."""

    step: int
    op: int  # index in the plan
    seconds: float  # since the beginning of the observed step
    cause: Cause
    expected: str  # the planned operator
    actual: str  # the operator that ran; empty at the end of the step
    bytes: int
    missed_ops: int  # ops until a plan matched again
    resumed_at: int  # the op of the plan that matched; -1 if no plan matched in that step

    @property
    def text(self) -> str:
        """A sentence that describes the departure from the plan.

        >>> Departure(3, 17, 0.0, Cause.OP, "aten::mm", "aten::mul", 0, 2, 20).text
        'aten::mul ran where aten::mm was planned; 2 ops ran on demand, then the plan resumed at op 20'
        """
        if self.cause is Cause.END:
            return f"the step ended where {self.expected} was planned"
        if self.cause is Cause.MEMORY:
            return f"{self.actual} needed more memory than planned: an extra {format_bytes(self.bytes)} was evicted"
        if self.cause is Cause.PLACE:
            return f"{format_bytes(self.bytes)} was evicted from an offset planned for {self.actual}"
        event = (
            f"{self.actual} ran with other tensors than planned"
            if self.actual == self.expected
            else f"{self.actual} ran where {self.expected} was planned"
        )
        ops = f"{self.missed_ops} {'op' if self.missed_ops == 1 else 'ops'}"
        if self.resumed_at < 0:
            return f"{event}; {ops} ran on demand, and the plan did not resume"
        on_demand = f"{ops} ran on demand, then " if self.missed_ops else ""
        return f"{event}; {on_demand}the plan resumed at op {self.resumed_at}"


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The summary of a plan for steps of ``ops`` ops, which was ready after step number ``step``."""

    step: int
    ops: int
    policy: str
    predicted_seconds: float
    planning_seconds: float

    @property
    def text(self) -> str:
        return (
            f"after step {self.step}, for steps of {self.ops} ops: {format_seconds(self.predicted_seconds)} predicted "
            f"by {self.policy}, planned in {format_seconds(self.planning_seconds)}"
        )


@dataclass(frozen=True)
class ObservedStep:
    step: int
    is_complete: bool
    missing_events: int  # events missing at the end, because the log was full
    began_ns: int  # since 1970
    graph: StepGraph  # storages of 64 KiB and more
    plan: Plan  # evictions, planned or not
    program: Program  # ops and copies in the order in which they began; the home of a copy is a ``Link``
    timeline: Timeline
    memory: MemoryOverTime  # arena bytes in use, including unused storages that stay resident
    on_demand: frozenset[int]
    departures: tuple[Departure, ...]  # the last ones, in order
    departure_count: int

    @property
    def planned_count(self) -> int:
        return len(self.graph.ops) - len(self.on_demand)


class _LogHeader(NamedTuple):
    steps: int  # number of ended steps
    complete: int  # whether this step has ended
    cut: int  # number of omitted events
    began_ns: int  # since 1970
    nanos: int
    events: int
    departures: int  # number of listed departures
    departure_count: int


class _LogRow(NamedTuple):
    """An event of the log; its times are in nanoseconds in the native log, and in seconds after parsing."""

    event: LogEvent
    start: float
    end: float
    number: int  # of the block or the operator
    bytes: int  # for an op: the nanoseconds that it waited
    flags: int  # for an op: whether it was planned; for a touch: ``TouchFlags``; for a copy: ``CopyTiming``


def read_observed(
    numbers: Sequence[int], names: Sequence[str], known: KnownStorages, budget: int, policy: str
) -> ObservedStep:
    """Build the observed step from the numbers of the native log."""
    remaining = iter(numbers)
    header = read_fields(remaining, _LogHeader)
    seconds = header.nanos / 1e9

    def clamp_seconds(time: float) -> float:
        return min(max(time / 1e9, 0.0), seconds)

    rows = (read_fields(remaining, _LogRow) for _ in range(header.events))
    log = [_LogRow(LogEvent(row.event), clamp_seconds(row.start), clamp_seconds(row.end), *row[3:]) for row in rows]
    departures: list[Departure] = []
    for _ in range(header.departures):
        step, op, nanos, cause, evicted_bytes, missed_ops, resumed_at, expected, actual = islice(
            remaining, len(fields(Departure))
        )
        expected_name, actual_name = _operator_name(names, expected), _operator_name(names, actual)
        departures.append(
            Departure(
                step, op, nanos / 1e9, Cause(cause), expected_name, actual_name, evicted_bytes, missed_ops, resumed_at
            )
        )
    reader = _LogReader(log, names, known)
    graph = reader.graph()
    program, timeline = reader.program(seconds)
    memory = reader.memory(seconds)
    decisions = reader.decisions()
    return ObservedStep(
        header.steps - header.complete,
        bool(header.complete),
        header.cut,
        header.began_ns,
        graph,
        Plan(policy if len(reader.on_demand) < len(graph.ops) else "on demand", budget, decisions),
        Program(program.instructions, program.blocks, memory.peak_bytes),
        timeline,
        memory,
        frozenset(reader.on_demand),
        tuple(departures),
        header.departure_count,
    )


class _LogReader:
    """Builds the parts of an ``ObservedStep`` from a log of events."""

    def __init__(self, log: Sequence[_LogRow], names: Sequence[str], known: KnownStorages) -> None:
        self._known = known
        self._bytes: dict[int, int] = {}
        self._copied: set[int] = set()
        self._initial: set[int] = set()  # blocks that existed at the beginning
        self._freed: dict[int, int] = {}  # by block: the number of ops before
        self._uses: dict[int, list[int]] = defaultdict(list)
        self._creator: dict[int, int] = {}
        self._ops: list[tuple[str, list[_LogRow]]] = []
        self._starts: list[float] = []
        self.on_demand: set[int] = set()
        self._stays: list[tuple[int, float, float | None]] = []  # block, begin and end of its time in memory
        # Executions: begin, end; op or -1; block, whether it is copied out, link; stays; copies that the op waited for.
        self._executions: list[tuple[float, float, int, int, bool, int, list[int], list[int]]] = []
        self._evictions: list[tuple[int, int, int]] = []  # block, its last use, the number of ops before
        self._fetch_starts: dict[int, list[float]] = defaultdict(list)  # by block: begins of copies in
        self._read_rows(log, names)
        self._numbers = {block: i for i, block in enumerate(b for b in self._bytes if self._is_storage(b))}

    def _read_rows(self, log: Sequence[_LogRow], names: Sequence[str]) -> None:
        """Collect ops, copies and evictions from the log, and the times at which each block was in the arena."""
        current_stays: dict[int, int] = {}
        awaited: list[int] = []
        for row in log:
            block = row.number
            if row.event is not LogEvent.OP:
                self._bytes.setdefault(block, row.bytes)
            if row.event in (LogEvent.HELD, LogEvent.TAKEN):
                current_stays[block] = len(self._stays)
                self._stays.append((block, 0.0 if row.event is LogEvent.HELD else row.start, None))
                if row.event is LogEvent.HELD:
                    self._initial.add(block)
            elif row.event is LogEvent.GIVEN and block in current_stays:
                stay = current_stays.pop(block)
                self._stays[stay] = (block, self._stays[stay][1], row.start)
            elif row.event is LogEvent.OP:
                awaited_copies = [i for i in awaited if self._executions[i][1] <= row.start]
                awaited = []
                if not row.flags:
                    self.on_demand.add(len(self._ops))
                self._executions.append((row.start, row.end, len(self._ops), -1, False, Link.AHEAD, [], awaited_copies))
                self._ops.append((names[row.number], []))
                self._starts.append(row.start)
            elif row.event is LogEvent.TOUCH:
                self._record_touch(row, current_stays.get(block))
            elif row.event in (LogEvent.IN, LogEvent.OUT):
                self._copied.add(block)
                if row.event is LogEvent.IN:
                    self._fetch_starts[block].append(row.start)
                link = Link.LATE if row.flags == CopyTiming.ON_DEMAND else Link.AHEAD
                if row.flags != CopyTiming.OVERLAPPED:
                    awaited.append(len(self._executions))
                stays = [current_stays[block]] if block in current_stays else []
                self._executions.append((row.start, row.end, -1, block, row.event is LogEvent.OUT, link, stays, []))
            elif row.event is LogEvent.LEFT:
                self._copied.add(block)
                uses = self._uses.get(block)
                self._evictions.append((block, uses[-1] if uses else -1, len(self._ops)))
            elif row.event is LogEvent.FREED:
                self._freed[block] = len(self._ops)

    def _record_touch(self, row: _LogRow, stay_index: int | None) -> None:
        """Record that the latest op used a block; ``stay_index`` numbers the block's period in memory."""
        op = len(self._ops) - 1
        block = row.number
        uses = self._uses[block]
        if row.flags & TouchFlags.CREATES and not uses and block not in self._initial and block not in self._copied:
            self._creator[block] = op
        if not uses or uses[-1] != op:
            uses.append(op)
        self._ops[-1][1].append(row)
        stays = self._executions[-1][6]
        if stay_index is not None and stay_index not in stays:
            stays.append(stay_index)

    def _is_storage(self, block: int) -> bool:
        """Return whether a block is a storage, and not an op's scratch memory."""
        return block in self._uses or block in self._copied or block in self._initial

    def _is_persistent(self, block: int) -> bool:
        return block not in self._freed and block not in self._creator

    def _kind(self, block: int) -> StorageKind:
        """Return the kind of a storage, guessed from its uses and copies if it is unknown."""
        if block in self._known:
            return self._known[block][1]
        if self._is_persistent(block):
            return StorageKind.BUFFER
        # A report does not count copies of inputs, so a block that was copied must not be an input.
        outside = block not in self._creator and block not in self._initial and block not in self._copied
        return StorageKind.INPUT if outside else StorageKind.ACTIVATION

    def graph(self) -> StepGraph:
        """Return the graph of the logged ops and storages."""
        ops: list[Op] = []
        for index, (name, touches) in enumerate(self._ops):
            new = {t.number for t in touches if self._creator.get(t.number) == index}
            reads = dict.fromkeys(self._numbers[t.number] for t in touches if t.number not in new)
            writes = dict.fromkeys(
                self._numbers[t.number] for t in touches if t.number not in new and t.flags & TouchFlags.WRITES
            )
            creates = dict.fromkeys(self._numbers[t.number] for t in touches if t.number in new)
            ops.append(
                Op(
                    index,
                    graph_name(name),
                    tuple(reads),
                    tuple(writes),
                    tuple(creates),
                    rerunnable=False,
                    module=self._module(touches),
                )
            )
        storages = [
            Storage(number, self._bytes[block], self._kind(block), self._storage_name(block, ops))
            for block, number in self._numbers.items()
        ]
        return StepGraph(tuple(storages), tuple(ops))

    def _module(self, touches: Sequence[_LogRow]) -> str:
        """Return the module that owns the parameters of an op; empty unless exactly one module owns them."""
        known_blocks = (self._known[t.number] for t in touches if t.number in self._known)
        owners = {name.rpartition(".")[0] for name, kind in known_blocks if kind is StorageKind.PARAMETER}
        return owners.pop() if len(owners) == 1 else ""

    def _storage_name(self, block: int, ops: Sequence[Op]) -> str:
        """Return a storage's name, or else the module and operator that created it; empty if unknown."""
        if block in self._known:
            return self._known[block][0]
        creator = self._creator.get(block)
        if creator is None:
            return ""
        short = ops[creator].name.removeprefix("aten.").partition(".")[0]
        return f"{ops[creator].module} {short}".strip()

    def program(self, step_seconds: float) -> tuple[Program, Timeline]:
        """Return the ops and copies as a program in order of start time, and the program's timeline."""
        order = sorted(range(len(self._executions)), key=lambda i: self._executions[i][0])
        lanes: dict[tuple[Queue, int], int] = defaultdict(int)
        places: dict[int, Wait] = {}  # by index of the execution: how to wait for its end
        blocks: dict[int, int] = {}  # by stay
        spans: list[tuple[int, int]] = []  # by block: its first and last instruction
        versions: dict[int, int] = defaultdict(int)
        instructions: list[Instruction] = []
        for execution in order:
            _, _, op, block, is_copy_out, link, stays, awaited_copies = self._executions[execution]
            for stay in stays:
                number = blocks.setdefault(stay, len(blocks))
                if number == len(spans):
                    spans.append((len(instructions), len(instructions)))
                spans[number] = (spans[number][0], len(instructions))
            used_blocks = tuple(blocks[stay] for stay in stays)
            if op >= 0:
                latest: dict[tuple[Queue, int], Wait] = {}
                for wait in (places[i] for i in awaited_copies if i in places):
                    link_key = wait.queue, wait.home
                    if link_key not in latest or latest[link_key].count < wait.count:
                        latest[link_key] = wait
                instruction: Instruction = Run(op, used_blocks, None, tuple(latest.values()))
                for touch in self._ops[op][1]:
                    versions[touch.number] += bool(touch.flags & TouchFlags.WRITES)
            elif used_blocks:
                instruction = (CopyOut if is_copy_out else CopyIn)(used_blocks[0], versions[block], (), link)
            else:  # the block's memory was released before the copy was logged
                continue
            lane = lane_of(instruction)
            lanes[lane] += 1
            places[execution] = Wait(lane[0], lanes[lane], lane[1])
            instructions.append(instruction)
        executed = [i for i in order if i in places]
        placed = tuple(self._block(number, self._stays[stay][0], *spans[number]) for stay, number in blocks.items())
        timeline = Timeline(
            tuple(self._executions[i][0] for i in executed),
            tuple(self._executions[i][1] for i in executed),
            step_seconds,
        )
        return Program(tuple(instructions), placed), timeline

    def _block(self, number: int, block: int, first: int, last: int) -> Block:
        return Block(number, self._numbers[block], self._bytes[block], first, last + 1)

    def memory(self, step_seconds: float) -> MemoryOverTime:
        """Return the arena bytes in use over time, by kind of storage."""
        changes: dict[str, dict[float, int]] = defaultdict(lambda: defaultdict(int))
        for block, start, end in self._stays:
            kind = self._kind(block).value if self._is_storage(block) else WORKSPACE
            changes[kind][start] += self._bytes[block]
            if end is not None:
                changes[kind][end] -= self._bytes[block]
        times = sorted({0.0, step_seconds}.union(*changes.values()))
        levels_by_kind: dict[str, tuple[int, ...]] = {}
        for kind in [*(kind.value for kind in StorageKind), WORKSPACE]:
            if kind not in changes:
                continue
            level, levels = 0, list[int]()
            for time in times:
                level += changes[kind].get(time, 0)
                levels.append(level)
            if any(levels):
                levels_by_kind[kind] = tuple(levels)
        return MemoryOverTime(tuple(times), levels_by_kind)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the logged evictions as decisions of a plan."""
        op_count = len(self._ops)
        by_gap: dict[Gap, Decision] = {}
        for block, last, ops_before in self._evictions:
            uses = self._uses.get(block, [])
            if last < 0:
                # Its last use is in the step before; assume that this was the same as this step's.
                if not uses or not self._is_persistent(block):
                    continue
                gap = Gap(self._numbers[block], uses[-1], op_count + uses[0])
                release_by = uses[-1] + 1
            else:
                next_use = bisect_right(uses, last)
                if next_use < len(uses):
                    end = uses[next_use]
                elif self._is_persistent(block):
                    end = op_count + uses[0]
                else:  # it was freed, or is used in another step
                    end = max(self._freed.get(block, op_count), last + 1)
                gap = Gap(self._numbers[block], last, end)
                release_by = max(ops_before, last + 1)
            release_by = min(release_by, gap.end)
            returns = [
                i for start in self._fetch_starts[block] if release_by <= (i := self._count_begun(start)) <= gap.end
            ]
            by_gap[gap] = Decision(gap, Residency.OFFLOAD, release_by, returns[0] if returns else gap.end, Link.AHEAD)
        return tuple(by_gap[gap] for gap in sorted(by_gap))

    def _count_begun(self, time: float) -> int:
        return bisect_right(self._starts, time)


def graph_name(name: str) -> str:
    """Return an operator's name in graphs: ``aten.mm.default`` for ``aten::mm``."""
    space, _, operator = name.partition("::")
    return f"{space}.{operator}" if "." in operator else f"{space}.{operator}.default"


def _operator_name(names: Sequence[str], number: int) -> str:
    return names[number] if number >= 0 else ""


def observed_notes(observed: ObservedStep, plans: Sequence[PlanSummary]) -> list[tuple[str, str]]:
    """Return a report's notes on a step and the recent plans, as pairs of label and text."""
    graph, max_departures = observed.graph, 20
    size = f"{len(graph.ops)} ops on {len(graph.storages)} storages of 64 KiB and more"
    notes = [
        ("step", f"step {observed.step + 1} of the loop: {size}")
        if observed.is_complete
        else ("so far", f"no step is complete; since the loop was started: {size}"),
        ("ops", f"{observed.planned_count} by plan, {len(observed.on_demand)} on demand"),
        ("copies", "ahead: overlapped with ops; late: while an op waited for them"),
    ]
    if observed.missing_events:
        notes.append(("left out", f"the last {observed.missing_events} events of the step"))
    notes += [("plan", plan.text) for plan in plans] or [("plan", "no plan so far")]
    listed = observed.departures[-max_departures:]
    if observed.departure_count > len(listed):
        notes.append(("departures from plans", f"{observed.departure_count} in total; the last are listed"))
    return [*notes, *((f"step {d.step + 1}, op {d.op} of the plan", d.text) for d in listed)]


def departure_marks(observed: ObservedStep) -> tuple[tuple[float, str, str], ...]:
    """Return the times, names and reasons of the departures in the observed step."""
    return tuple((d.seconds, "left the plan", d.text) for d in observed.departures if d.step == observed.step)
