"""Convert a recorded step of a loop to a graph for the planner, and its plan to a schedule for the native code.

A storage exists until autograd or the loop frees it. A pseudo-op that reads the storage models that; it never runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from outofcore.analysis import final_gap
from outofcore.costs import Costs, Home, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Plan, Residency
from outofcore.program import Program, Run
from outofcore.units import MIB

# The name of the pseudo-op that ends a storage.
FREED = "freed"
# The assumed home until enough bytes were copied; ``contention`` and ``compute_slowdown`` are guesses.
_USUAL_HOME = Home("home", None, 1.5e9, 1.5e9, latency_s=1e-4, contention=0.5, compute_slowdown=0.1)
# A measured speed is used once this many bytes were copied.
_ENOUGH_BYTES = 16 * MIB


@dataclass(frozen=True)
class StepRecord:
    bucket: int  # number of its size bucket; each size bucket has one plan
    graph: StepGraph  # with a pseudo-op for the end of each storage
    costs: Costs
    places: tuple[int, ...]  # for each op of the graph its index in the record; for a pseudo-op that of the next op
    op_count: int  # in the record


@dataclass(frozen=True)
class Schedule:
    """A plan for the native code, as sorted pairs of an op's and a storage's index in the record."""

    release: tuple[tuple[int, int], ...]  # when the op begins, the storage's memory may be reused
    fetch: tuple[tuple[int, int], ...]  # when the op begins, the fetch begins
    write: tuple[tuple[int, int], ...]  # when the op has finished, the copy to the home begins
    offsets: tuple[tuple[int, int, int], ...] = ()  # (op, storage, arena offset in bytes from this use on)
    scratch: tuple[tuple[int, int], ...] = ()  # (op, arena offset of its scratch memory)

    def flatten(self) -> list[int]:
        """Return all lists as one list of numbers: for each its length, then its entries one after another."""
        lists = (self.release, self.fetch, self.write, self.offsets, self.scratch)
        return [number for entries in lists for number in (len(entries), *chain.from_iterable(entries))]


class _RecordHeader(NamedTuple):
    bucket: int
    ops: int
    storages: int
    leftovers: int
    in_bytes: int
    in_nanos: int
    out_bytes: int
    out_nanos: int


class _RecordedStorage(NamedTuple):
    bytes: int
    freed: int  # number of ops begun when it was freed; -1 if it was not
    created: int  # whether an op of the step created it
    persistent: int  # whether it is persistent


class _RecordedOp(NamedTuple):
    name: int
    nanos: int
    workspace: int
    touches: int


class _Touch(NamedTuple):
    place: int
    storage: int
    writes: int
    creates: int


_T = TypeVar("_T", bound=NamedTuple)


def read_fields(numbers: Iterator[int], fields_type: type[_T]) -> _T:
    """Take the next numbers from an iterator as the fields of a named tuple."""
    return fields_type._make(islice(numbers, len(fields_type._fields)))


def read_record(numbers: Sequence[int], names: Sequence[str]) -> StepRecord:
    """Convert the native code's numbers and operator names to the graph and costs of a recorded step."""
    remaining = iter(numbers)
    header = read_fields(remaining, _RecordHeader)
    storages = [read_fields(remaining, _RecordedStorage) for _ in range(header.storages)]
    ops: list[tuple[_RecordedOp, list[_Touch]]] = []
    for _ in range(header.ops):
        op = read_fields(remaining, _RecordedOp)
        ops.append((op, [read_fields(remaining, _Touch) for _ in range(op.touches)]))
    # By storage: how many ops of the next step had begun when it was freed.
    leftovers = {next(remaining): next(remaining) for _ in range(header.leftovers)}

    uses: list[list[int]] = [[] for _ in storages]
    for index, (_, touches) in enumerate(ops):
        for touch in touches:
            uses[touch.storage].append(index)
    # A storage that ends in the next step is modelled as persistent state that each step overwrites.
    freed_in_next_step = {
        s: freed
        for s, freed in leftovers.items()
        if storages[s].created and storages[s].freed < 0 and 0 < freed < uses[s][0]
    }
    graph, costs, places = _build_graph(
        storages, ops, _list_late_frees(storages, uses, freed_in_next_step, header.ops), freed_in_next_step, names
    )
    home = replace(
        _USUAL_HOME,
        bytes_per_s_out=_measured_rate(header.out_bytes, header.out_nanos, _USUAL_HOME.bytes_per_s_out),
        bytes_per_s_in=_measured_rate(header.in_bytes, header.in_nanos, _USUAL_HOME.bytes_per_s_in),
    )
    graph.check()
    return StepRecord(header.bucket, graph, Costs(tuple(costs), (home,)), tuple(places), header.ops)


def _list_late_frees(
    storages: Sequence[_RecordedStorage],
    uses: Sequence[Sequence[int]],
    freed_in_next_step: Mapping[int, int],
    op_count: int,
) -> list[list[int]]:
    """Group the storages that are freed some ops after their last use, by the op before which they are freed."""
    late_frees: list[list[int]] = [[] for _ in range(op_count + 1)]
    for number, storage in enumerate(storages):
        if number in freed_in_next_step:
            late_frees[freed_in_next_step[number]].append(number)
        elif not storage.persistent:
            end = storage.freed if storage.freed >= 0 else op_count
            if end > uses[number][-1] + 1:
                late_frees[end].append(number)
    return late_frees


def _build_graph(
    storages: Sequence[_RecordedStorage],
    recorded_ops: Sequence[tuple[_RecordedOp, Sequence[_Touch]]],
    late_frees: Sequence[Sequence[int]],
    freed_in_next_step: Mapping[int, int],
    names: Sequence[str],
) -> tuple[StepGraph, list[OpCost], list[int]]:
    """Return a step's graph, and the cost and recorded index of each op; each late free becomes a pseudo-op."""
    ops: list[Op] = []
    costs: list[OpCost] = []
    places: list[int] = []

    def add(position: int, cost: OpCost, name: str, *storage_sets: Iterable[int]) -> None:
        reads, mutates, creates = (tuple(dict.fromkeys(numbers)) for numbers in storage_sets)
        ops.append(Op(len(ops), name, reads, mutates, creates, rerunnable=False))
        costs.append(cost)
        places.append(position)

    for position, ended in enumerate(late_frees):
        for storage in ended:
            add(position, OpCost(0.0), FREED, (storage,), (), ())
        if position == len(recorded_ops):
            break
        op, touches = recorded_ops[position]
        new = {touch.storage for touch in touches if touch.creates}
        add(
            position,
            OpCost(op.nanos / 1e9, op.workspace),
            names[op.name],
            (t.storage for t in touches if t.storage not in new),
            (t.storage for t in touches if (t.storage in freed_in_next_step if t.storage in new else t.writes)),
            (s for s in sorted(new) if s not in freed_in_next_step),
        )
    kinds = (_storage_kind(storage, is_carried=number in freed_in_next_step) for number, storage in enumerate(storages))
    graph_storages = tuple(Storage(number, storages[number].bytes, kind) for number, kind in enumerate(kinds))
    return StepGraph(graph_storages, tuple(ops)), costs, places


def _storage_kind(storage: _RecordedStorage, *, is_carried: bool) -> StorageKind:
    if storage.persistent or is_carried:
        return StorageKind.PARAMETER
    return StorageKind.ACTIVATION if storage.created else StorageKind.INPUT


def schedule_of(record: StepRecord, plan: Plan, program: Program) -> Schedule:
    """Convert a step's plan and program to a schedule for the native code."""
    op_count, record_ops = len(record.graph.ops), record.op_count
    release: list[tuple[int, int]] = []
    fetch: list[tuple[int, int]] = []
    write: list[tuple[int, int]] = []
    for decision in plan.decisions:
        if decision.residency is not Residency.OFFLOAD:
            continue
        gap = decision.gap
        if gap == final_gap(record.graph, gap.storage):
            continue  # freed before the next step
        if gap.start >= 0:
            start = record.places[gap.start] - (record.graph.ops[gap.start].name == FREED)
            write.append((start % record_ops, gap.storage))
            release.append((record.places[decision.release_by % op_count] % record_ops, gap.storage))
        if record.graph.ops[gap.end % op_count].name != FREED and gap.start >= 0:
            fetch.append((record.places[decision.fetch_at % op_count] % record_ops, gap.storage))
    offsets, scratch = _collect_offsets(record, program)
    return Schedule(tuple(sorted(release)), tuple(sorted(fetch)), tuple(sorted(write)), offsets, scratch)


def _collect_offsets(
    record: StepRecord, program: Program
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Return (op, storage, offset) where a storage gets a new arena offset, and (op, offset) for scratch memory."""
    last_offsets: dict[int, int] = {}
    offsets: list[tuple[int, int, int]] = []
    scratch_offsets: list[tuple[int, int]] = []
    for run in program.instructions:
        if not isinstance(run, Run) or record.graph.ops[run.op].name == FREED:
            continue
        for index in run.blocks:
            block = program.blocks[index]
            if block.storage is not None and last_offsets.get(block.storage) != block.offset:
                last_offsets[block.storage] = block.offset
                offsets.append((record.places[run.op], block.storage, block.offset))
        if run.workspace is not None:
            scratch_offsets.append((record.places[run.op], program.blocks[run.workspace].offset))
    return tuple(offsets), tuple(scratch_offsets)


def _measured_rate(copied_bytes: int, nanos: int, assumed: float) -> float:
    return copied_bytes / nanos * 1e9 if copied_bytes >= _ENOUGH_BYTES else assumed
