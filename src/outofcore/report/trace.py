"""Timelines in the trace format of Chrome, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google; times in microseconds. A trace of ``torch.profiler`` has the same format, so both
can be merged on one axis of time.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from outofcore.errors import InputError
from outofcore.graph import StepGraph
from outofcore.program import Program, Queue, Run, Timeline, lane_of
from outofcore.report.data import MemoryOverTime, memory_over_time
from outofcore.report.naming import LANES, instruction_text, storage_text
from outofcore.report.waits import time_spent

# Above the numbers that systems give to processes, so that no process of a profiler's trace has one of them.
_FIRST_PROCESS = 1 << 30
_WAITS_THREAD = 1  # its number in each process; those of the queues follow, in this order
_ROWS = (Queue.COMPUTE, Queue.COPY_IN, Queue.COPY_OUT, Queue.COMMUNICATE)

Event = dict[str, Any]


@dataclass(frozen=True)
class LoopMeasurements:
    """What a loop has measured in a step, beside its timeline.

    Attributes:
        homes: the names of the links, in the order of their numbers.
        on_demand: ids of ops that ran without a plan; all others ran by one.
        marks: moments (seconds from the start of the step), each with its name and text.
    """

    homes: tuple[str, ...]
    memory: MemoryOverTime
    on_demand: Collection[int]
    marks: tuple[tuple[float, str, str], ...]


def trace_events(
    graph: StepGraph,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    origin_us: float = 0.0,
    measured: LoopMeasurements | None = None,
) -> list[Event]:
    """Return the events of a trace: for each named timeline a process with a thread for each queue, waits, and memory.

    ``origin_us`` is where the steps begin on the axis of time, in microseconds.
    """
    events: list[Event] = []
    for number, (name, timeline) in enumerate(timelines):
        process = _FIRST_PROCESS + number
        events += _named(process, number, f"outofcore, {name}")
        events += _lanes(graph, program, timeline, process, origin_us, measured)
        events += _waits(graph, program, timeline, process, origin_us)
        memory = memory_over_time(graph, program, timeline) if measured is None else measured.memory
        events += _memory(memory, process, origin_us)
        events += _marks(measured, process, origin_us)
    return events


def _named(process: int, number: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": number - 1000}}
    yield from _thread(process, _WAITS_THREAD, "waits of ops", 0)


def _thread(process: int, thread: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": order}}


def _lanes(
    graph: StepGraph,
    program: Program,
    timeline: Timeline,
    process: int,
    origin: float,
    measured: LoopMeasurements | None,
) -> Iterator[Event]:
    threads: dict[tuple[Queue, int], int] = {}
    several = any(not isinstance(i, Run) and i.home for i in program.instructions)
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        lane = lane_of(instruction)
        if lane not in threads:
            queue, home = lane
            threads[lane] = thread = 2 + _ROWS.index(queue) + len(_ROWS) * home
            link = f"home {home}" if measured is None else measured.homes[home]
            of = f", {link}" if several and queue not in (Queue.COMPUTE, Queue.COMMUNICATE) else ""
            yield from _thread(process, thread, LANES[queue] + of, thread)
        args: dict[str, object] = {}
        name = instruction_text(graph, program, instruction)
        category = lane[0].value
        if isinstance(instruction, Run):
            if measured is not None:
                category = "on demand" if instruction.op in measured.on_demand else "planned"
            op = graph.ops[instruction.op]
            args = {"op": op.name, "module": op.module, "source": op.source, "again": instruction.again}
        else:
            storage = program.blocks[instruction.block].storage
            if storage is not None:
                data = graph.storages[storage]
                args = {"storage": storage_text(data), "bytes": data.bytes, "kind": data.kind.value}
        yield {
            "ph": "X",
            "pid": process,
            "tid": threads[lane],
            "cat": category,
            "name": name,
            "ts": _time(start, origin),
            "dur": _time(end - start),
            "args": args,
        }


def _waits(graph: StepGraph, program: Program, timeline: Timeline, process: int, origin: float) -> Iterator[Event]:
    for waited in time_spent(graph, program, timeline)[1]:
        yield {
            "ph": "X",
            "pid": process,
            "tid": _WAITS_THREAD,
            "cat": "wait",
            "name": waited.text,
            "ts": _time(waited.start, origin),
            "dur": _time(waited.seconds),
            "args": {"why": waited.why},
        }


def _marks(measured: LoopMeasurements | None, process: int, origin: float) -> Iterator[Event]:
    for seconds, name, text in () if measured is None else measured.marks:
        yield {
            "ph": "i",
            "s": "p",
            "pid": process,
            "tid": _WAITS_THREAD,
            "cat": "departure",
            "name": name,
            "ts": _time(seconds, origin),
            "args": {"why": text},
        }


def _memory(memory: MemoryOverTime, process: int, origin: float) -> Iterator[Event]:
    for index, time in enumerate(memory.times):
        yield {
            "ph": "C",
            "pid": process,
            "name": "device bytes",
            "ts": _time(time, origin),
            "args": {kind: held[index] for kind, held in memory.held.items()},
        }


def _time(seconds: float, origin: float = 0.0) -> float:
    """Return microseconds."""
    return round(origin + seconds * 1e6, 3)


def write_trace(
    path: Path,
    graph: StepGraph,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    *,
    began_ns: int = 0,
    beside: Path | None = None,
    measured: LoopMeasurements | None = None,
) -> None:
    """Write timelines as a trace.

    Args:
        path: the file, compressed if its name ends in ``.gz``; its folder is created.
        timelines: each with its name.
        began_ns: when the measured step began, in nanoseconds since 1970.
        beside: a trace that ``torch.profiler`` exported, to be merged on its axis of time.

    Raises:
        InputError: the other trace cannot be read, or the file cannot be written.
    """
    content: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}
    origin = 0.0
    if beside is not None:
        content = _read(beside)
        origin = (began_ns - int(content.get("baseTimeNanoseconds", 0))) / 1e3
    content["traceEvents"] = [*content["traceEvents"], *trace_events(graph, program, timelines, origin, measured)]
    data = json.dumps(content).encode("utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a time in it, the same trace gives the same file.
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"cannot write the trace {path}: {error}; choose a path that can be written") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        found: object = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read the trace {path}: {error}; give a file of export_chrome_trace()") from error
    if not isinstance(found, Mapping) or not isinstance(cast(Mapping[str, object], found).get("traceEvents"), list):
        raise InputError(f"{path} has no list of traceEvents: it is no trace; give a file of export_chrome_trace()")
    return dict(cast(Mapping[str, Any], found))
