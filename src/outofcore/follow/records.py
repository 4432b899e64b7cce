"""Convert a recorded step of a loop to a graph that can be planned, and its plan to a schedule for the native code.

The graph differs from that of a compiled step in two ways. A storage's role for the user is unknown: it is persistent,
external, or made in the step. And a storage to which autograd or the loop refers exists, resident or at home, until it
is freed, even if no op uses it any more. A pseudo-op that reads the storage when it is freed models that: it takes no
time, never runs, and nothing is fetched for it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Plan, Residency
from outofcore.program import Program, Run
from outofcore.units import MIB

# Of the ops that stand for the end of a storage.
FREED = "freed"
# Bytes a second that a home is taken to copy until enough was copied to tell.
_USUAL_RATE = 1.5e9
_ENOUGH_BYTES = 16 * MIB
_LATENCY_SECONDS = 1e-4
# What copies both ways take from each other, and from ops, where nobody has measured it.
_CONTENTION = 0.5
_SLOWDOWN = 0.1
_HEADER = 8


@dataclass(frozen=True)
class StepRecord:
    """A step as it was recorded.

    Attributes:
        anchor: its number among the size buckets that plans are made for.
        graph: its ops, and a pseudo-op for the end of each storage.
        places: for each op of the graph, the op of the record; for a pseudo-op the next one.
        ops: of the record.
    """

    anchor: int
    graph: StepGraph
    costs: Costs
    places: tuple[int, ...]
    ops: int


@dataclass(frozen=True)
class Schedule:
    """A plan by ops of the record, as ordered pairs of op and storage.

    Attributes:
        leave: when an op begins, the room of a storage may be reused.
        fetch: when an op begins, the fetch of a storage begins.
        write: when an op is done, a storage begins to be copied to its home.
        offsets: (op, storage, offset): from this use on, the storage's offset in the arena, in bytes.
        scratch: (op, offset) of scratch memory.
    """

    leave: tuple[tuple[int, int], ...]
    fetch: tuple[tuple[int, int], ...]
    write: tuple[tuple[int, int], ...]
    offsets: tuple[tuple[int, int, int], ...] = ()
    scratch: tuple[tuple[int, int], ...] = ()

    def numbers(self) -> list[int]:
        """Flatten the lists, each after its length.

        >>> Schedule(((2, 0),), (), ((1, 0),), ((0, 0, 4096),)).numbers()
        [1, 2, 0, 0, 1, 1, 0, 1, 0, 0, 4096, 0]
        """
        lists = (self.leave, self.fetch, self.write, self.offsets, self.scratch)
        return [number for entries in lists for number in (len(entries), *chain.from_iterable(entries))]


def read_record(numbers: Sequence[int], names: Sequence[str]) -> StepRecord:
    """Read a step from the native code's numbers.

    Args:
        numbers: anchor; counts of ops, storages and leftovers; bytes and nanoseconds of copies in, and out. Then for
            each storage its bytes, the ops that had begun when it was freed (-1: none), whether the step made it, and
            whether it lasts; for each op the number of its name, its nanoseconds, bytes of scratch memory and count of
            touches, and for each touch its place, the storage, whether it writes and whether it creates; for each
            leftover the storage, and the ops of the next step that had begun when it was freed.
        names: of operators.
    """
    anchor, count, storages, leftovers, in_bytes, in_nanos, out_bytes, out_nanos = numbers[:_HEADER]
    rest = iter(numbers[_HEADER:])
    found = [tuple(_take(rest, 4)) for _ in range(storages)]
    touches: list[list[tuple[int, ...]]] = []
    ops: list[tuple[int, ...]] = []
    for _ in range(count):
        ops.append(tuple(_take(rest, 4)))
        touches.append([tuple(_take(rest, 4)) for _ in range(ops[-1][3])])
    left = dict(_pair(rest) for _ in range(leftovers))

    uses: list[list[int]] = [[] for _ in found]
    for index, touched in enumerate(touches):
        for _, storage, _, _ in touched:
            uses[storage].append(index)
    # What lives on into the next step, and ends there, is seen as lasting: made anew in each step.
    carried = {s: freed for s, freed in left.items() if found[s][2] and found[s][1] < 0 and 0 < freed < uses[s][0]}
    ends: list[list[int]] = [[] for _ in range(count + 1)]
    for storage, (_, freed, created, lasts) in enumerate(found):
        if storage in carried:
            ends[carried[storage]].append(storage)
        elif not lasts and (created or freed >= 0):
            end = freed if freed >= 0 else count
            if end > uses[storage][-1] + 1:
                ends[end].append(storage)

    made: list[Op] = []
    costs: list[OpCost] = []
    places: list[int] = []

    def add(place: int, cost: OpCost, name: str, *sets: Iterator[int]) -> None:
        reads, mutates, creates = (tuple(dict.fromkeys(s)) for s in sets)
        made.append(Op(len(made), name, reads, mutates, creates, rerunnable=False))
        costs.append(cost)
        places.append(place)

    for place in range(count + 1):
        for storage in ends[place]:
            add(place, OpCost(0.0), FREED, iter((storage,)), iter(()), iter(()))
        if place == count:
            break
        name, nanos, workspace, _ = ops[place]
        touched = touches[place]
        new = {s for _, s, _, creates in touched if creates}
        add(
            place,
            OpCost(nanos / 1e9, workspace),
            names[name],
            (s for _, s, _, _ in touched if s not in new),
            (s for _, s, writes, _ in touched if (writes and s not in new) or (s in new and s in carried)),
            (s for s in sorted(new) if s not in carried),
        )
    kinds = [
        StorageKind.PARAMETER
        if lasts or storage in carried
        else StorageKind.ACTIVATION
        if created
        else StorageKind.INPUT
        for storage, (_, _, created, lasts) in enumerate(found)
    ]
    graph = StepGraph(tuple(Storage(i, found[i][0], kind) for i, kind in enumerate(kinds)), tuple(made))
    home = Home(
        "home",
        None,
        _rate(out_bytes, out_nanos),
        _rate(in_bytes, in_nanos),
        _LATENCY_SECONDS,
        _CONTENTION,
        _SLOWDOWN,
    )
    graph.check()
    return StepRecord(anchor, graph, Costs(tuple(costs), (home,)), tuple(places), count)


def schedule_of(record: StepRecord, plan: Plan, program: Program) -> Schedule:
    """Derive the native code's schedule from a plan of a record and its placed program."""
    count, ops = len(record.graph.ops), record.ops
    leave: list[tuple[int, int]] = []
    fetch: list[tuple[int, int]] = []
    write: list[tuple[int, int]] = []
    for decision in plan.decisions:
        if decision.residency is not Residency.OFFLOAD:
            continue
        gap = decision.gap
        if gap.start >= 0:
            start = record.places[gap.start] - (record.graph.ops[gap.start].name == FREED)
            write.append((start % ops, gap.storage))
            leave.append((record.places[decision.release_by % count] % ops, gap.storage))
        if record.graph.ops[gap.end % count].name != FREED and gap.start >= 0:
            fetch.append((record.places[decision.fetch_at % count] % ops, gap.storage))
    offsets, scratch = _offsets(record, program)
    return Schedule(tuple(sorted(leave)), tuple(sorted(fetch)), tuple(sorted(write)), offsets, scratch)


def _offsets(
    record: StepRecord, program: Program
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]:
    last: dict[int, int] = {}
    found: list[tuple[int, int, int]] = []
    scratch: list[tuple[int, int]] = []
    for run in program.instructions:
        if not isinstance(run, Run) or record.graph.ops[run.op].name == FREED:
            continue
        for index in run.blocks:
            block = program.blocks[index]
            if block.storage is not None and last.get(block.storage) != block.offset:
                last[block.storage] = block.offset
                found.append((record.places[run.op], block.storage, block.offset))
        if run.workspace is not None:
            scratch.append((record.places[run.op], program.blocks[run.workspace].offset))
    return tuple(found), tuple(scratch)


def _rate(count: int, nanos: int) -> float:
    return count / nanos * 1e9 if count >= _ENOUGH_BYTES else _USUAL_RATE


def _take(rest: Iterator[int], count: int) -> Iterator[int]:
    return (next(rest) for _ in range(count))


def _pair(rest: Iterator[int]) -> tuple[int, int]:
    first, second = _take(rest, 2)
    return first, second
