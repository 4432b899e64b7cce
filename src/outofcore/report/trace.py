"""Timelines in the trace format of Chrome, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google; times in microseconds. ``torch.profiler`` writes the same format.
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

# Above all process ids of systems, so that they do not clash with a profiler's trace.
_FIRST_PROCESS = 1 << 30
_WAITS_THREAD = 1  # in each process; the threads of the queues follow, in the order of ``_ROWS``
_ROWS = (Queue.COMPUTE, Queue.COPY_IN, Queue.COPY_OUT, Queue.COMMUNICATE)

Event = dict[str, Any]


@dataclass(frozen=True)
class LoopMeasurements:
    """Measurements of one step of an eager loop: memory, ops without a plan, and departures from the plan."""

    homes: tuple[str, ...]  # names of the links, by number
    memory: MemoryOverTime
    on_demand: Collection[int]  # ids of ops that ran without a plan
    marks: tuple[
        tuple[float, str, str], ...
    ]  # departures from the plan: seconds from the start of the step, name, text


def trace_events(
    graph: StepGraph,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    origin_us: float = 0.0,
    measured: LoopMeasurements | None = None,
) -> list[Event]:
    """Return trace events for the instructions, waits and memory of each named timeline."""
    events: list[Event] = []
    for number, (name, timeline) in enumerate(timelines):
        process = _FIRST_PROCESS + number
        events += _process_events(process, number, f"outofcore, {name}")
        events += _instruction_events(graph, program, timeline, process, origin_us, measured)
        events += _wait_events(graph, program, timeline, process, origin_us)
        memory = memory_over_time(graph, program, timeline) if measured is None else measured.memory
        events += _memory_events(memory, process, origin_us)
        events += _plan_departure_events(measured, process, origin_us)
    return events


def _process_events(process: int, number: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": number - 1000}}
    yield from _thread_events(process, _WAITS_THREAD, "waits of ops", 0)


def _thread_events(process: int, thread: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": order}}


def _instruction_events(
    graph: StepGraph,
    program: Program,
    timeline: Timeline,
    process: int,
    origin: float,
    measured: LoopMeasurements | None,
) -> Iterator[Event]:
    threads: dict[tuple[Queue, int], int] = {}
    has_several_homes = any(not isinstance(i, Run) and i.home for i in program.instructions)
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        lane = lane_of(instruction)
        if lane not in threads:
            queue, home = lane
            threads[lane] = thread = 2 + _ROWS.index(queue) + len(_ROWS) * home
            link = f"home {home}" if measured is None else measured.homes[home]
            suffix = f", {link}" if has_several_homes and queue not in (Queue.COMPUTE, Queue.COMMUNICATE) else ""
            yield from _thread_events(process, thread, LANES[queue] + suffix, thread)
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
            "ts": _microseconds(start, origin),
            "dur": _microseconds(end - start),
            "args": args,
        }


def _wait_events(
    graph: StepGraph, program: Program, timeline: Timeline, process: int, origin: float
) -> Iterator[Event]:
    for wait in time_spent(graph, program, timeline)[1]:
        yield {
            "ph": "X",
            "pid": process,
            "tid": _WAITS_THREAD,
            "cat": "wait",
            "name": wait.text,
            "ts": _microseconds(wait.start, origin),
            "dur": _microseconds(wait.seconds),
            "args": {"why": wait.explanation},
        }


def _plan_departure_events(measured: LoopMeasurements | None, process: int, origin: float) -> Iterator[Event]:
    for seconds, name, text in () if measured is None else measured.marks:
        yield {
            "ph": "i",
            "s": "p",
            "pid": process,
            "tid": _WAITS_THREAD,
            "cat": "departure",
            "name": name,
            "ts": _microseconds(seconds, origin),
            "args": {"why": text},
        }


def _memory_events(memory: MemoryOverTime, process: int, origin: float) -> Iterator[Event]:
    for index, time in enumerate(memory.times):
        yield {
            "ph": "C",
            "pid": process,
            "name": "device bytes",
            "ts": _microseconds(time, origin),
            "args": {kind: counts[index] for kind, counts in memory.bytes_by_kind.items()},
        }


def _microseconds(seconds: float, origin: float = 0.0) -> float:
    return round(origin + seconds * 1e6, 3)


def write_trace(
    path: Path,
    graph: StepGraph,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    *,
    began_ns: int = 0,
    profiler_trace: Path | None = None,
    measured: LoopMeasurements | None = None,
) -> None:
    """Write named timelines as a trace, compressed if the path ends in ``.gz``.

    ``profiler_trace``, a trace exported by ``torch.profiler``, is merged into it; for that, ``began_ns`` is the start
    of the step in nanoseconds since 1970. Raises ``InputError`` if a file cannot be read or written.
    """
    content: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": []}
    origin = 0.0
    if profiler_trace is not None:
        content = _read_trace(profiler_trace)
        origin = (began_ns - int(content.get("baseTimeNanoseconds", 0))) / 1e3
    content["traceEvents"] = [*content["traceEvents"], *trace_events(graph, program, timelines, origin, measured)]
    data = json.dumps(content).encode("utf-8")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a time stamp, equal traces give equal files.
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"cannot write the trace {path}: {error}; choose a path that can be written") from error


def _read_trace(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        content: object = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read the trace {path}: {error}; give a file of export_chrome_trace()") from error
    if not isinstance(content, Mapping) or not isinstance(cast(Mapping[str, object], content).get("traceEvents"), list):
        raise InputError(
            f"{path} is not a trace, since it has no list of traceEvents; give a file of export_chrome_trace()"
        )
    return dict(cast(Mapping[str, Any], content))
