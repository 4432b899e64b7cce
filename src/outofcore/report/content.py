"""The content of the report's page, as plain JSON; the page only draws it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from outofcore.analysis import final_gap, is_large
from outofcore.graph import StepGraph, Storage, StorageKind
from outofcore.plan import Decision, Plan, Residency
from outofcore.program import CopyIn, CopyOut, Program, Queue, Run, Timeline, lane_of
from outofcore.report.data import Insight, MemoryOverTime, memory_over_time, step_report
from outofcore.report.naming import LANES, instruction_text, storage_text
from outofcore.report.trace import LoopMeasurements
from outofcore.report.waits import time_spent

Object = dict[str, object]

# Moments of memory over time that a screen can resolve; omitted ones never exceed both neighbours.
_MAX_MOMENTS = 1500
# The number of waits that are listed: the longest.
_MAX_WAITS = 100
# The rows that every page has.
_MANDATORY_LANES = tuple((queue, 0) for queue in Queue if queue is not Queue.COMMUNICATE)


@dataclass(frozen=True)
class Page:
    title: str
    budget: int  # bytes that the user named
    insight: Insight | None = None  # predictions for other budgets
    homes: Sequence[str] = ()  # names, by number
    notes: Sequence[tuple[str, str]] = ()  # pairs of name and text, such as the machine


def page_content(
    graph: StepGraph,
    plan: Plan,
    program: Program,
    timelines: Sequence[tuple[str, Timeline]],
    page: Page,
    measured: LoopMeasurements | None = None,  # of the first timeline, if it is of an eager loop
) -> Object:
    """Return the content of a report page as plain data for JSON; the page opens with the first timeline."""
    lanes = list(dict.fromkeys([*_MANDATORY_LANES, *map(lane_of, program.instructions)]))
    lanes.sort(key=lambda lane: (list(LANES).index(lane[0]), lane[1]))
    several = len({home for _, home in lanes}) > 1
    report = step_report(graph, plan, program, timelines[0][1], page.budget)
    shown, fates = _storage_rows(graph, plan, program)
    on_demand = () if measured is None else measured.on_demand
    return {
        "title": page.title,
        "budget": page.budget,
        "arena": report.arena_bytes,
        "policy": plan.policy,
        "moved": [{**asdict(moved), "kind": _kind_text(moved.kind)} for moved in report.moved],
        "recomputed": report.recomputed,
        "lanes": [_lane_name(queue, home, page.homes if several else ()) for queue, home in lanes],
        "ops": [[op.short_name, op.module, op.source] for op in graph.ops],
        "storages": shown,
        "fates": fates,
        "instructions": [
            # Lane; op or storage; 1 for a recomputed op, 2 for an op without a plan.
            [
                lanes.index(lane_of(instruction)),
                instruction.op,
                1 if instruction.again else 2 * (instruction.op in on_demand),
            ]
            if isinstance(instruction, Run)
            else [
                lanes.index(lane_of(instruction)),
                -1 if (s := program.blocks[instruction.block].storage) is None else s,
                0,
            ]
            for instruction in program.instructions
        ],
        "timelines": [
            _timeline_content(graph, program, name, timeline, None if number or measured is None else measured.memory)
            for number, (name, timeline) in enumerate(timelines)
        ],
        "insight": None if page.insight is None else _insight_content(page.insight),
        "notes": [list(note) for note in page.notes],
    }


def _kind_text(kind: StorageKind) -> str:
    return kind.value.replace("_", " ")


def _lane_name(queue: Queue, home: int, homes: Sequence[str]) -> str:
    if queue in (Queue.COMPUTE, Queue.COMMUNICATE) or not homes:
        return LANES[queue]
    return f"{LANES[queue]}, {homes[home] if home < len(homes) else home}"


def _timeline_content(
    graph: StepGraph, program: Program, name: str, timeline: Timeline, memory: MemoryOverTime | None
) -> Object:
    spent, waits = time_spent(graph, program, timeline)
    longest = sorted(waits, key=lambda w: -w.seconds)[:_MAX_WAITS]
    memory = memory or memory_over_time(graph, program, timeline)
    return {
        "name": name,
        "seconds": timeline.step_seconds,
        "peak": memory.peak_bytes,
        "starts": [_microseconds(start) for start in timeline.starts],
        "ends": [_microseconds(end) for end in timeline.ends],
        "memory": _thin_moments(memory),
        "spent": asdict(spent),
        "waits": [
            {
                "start": _microseconds(w.start),
                "length": _microseconds(w.seconds),
                "instruction": w.instruction,
                "cause": w.cause,
                "reason": w.reason.value,
                "who": ""
                if w.instruction < 0
                else instruction_text(graph, program, program.instructions[w.instruction]),
                "text": w.text,
                "why": w.explanation,
            }
            for w in sorted(longest, key=lambda w: w.start)
        ],
        "more_waits": len(waits) - len(longest),
    }


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _thin_moments(memory: MemoryOverTime) -> Object:
    """Reduce memory over time to about one moment per pixel of a chart, the one with the most bytes."""
    total = [sum(levels) for levels in zip(*memory.bytes_by_kind.values(), strict=True)] or [0] * len(memory.times)
    length = memory.times[-1] or 1.0
    indices_by_pixel: dict[int, int] = {}
    for index, time in enumerate(memory.times):
        pixel = int(time / length * _MAX_MOMENTS)
        if pixel not in indices_by_pixel or total[index] > total[indices_by_pixel[pixel]]:
            indices_by_pixel[pixel] = index
    indices = sorted({0, len(total) - 1, *indices_by_pixel.values()})
    return {
        "times": [_microseconds(memory.times[i]) for i in indices],
        "held": {kind.replace("_", " "): [counts[i] for i in indices] for kind, counts in memory.bytes_by_kind.items()},
    }


def _storage_rows(graph: StepGraph, plan: Plan, program: Program) -> tuple[list[Object], dict[str, int]]:
    """Return a row for each large or copied storage, the largest first; also the total bytes by decision."""
    decisions: dict[int, list[Decision]] = defaultdict(list)
    for decision in plan.decisions:
        if decision.residency is not Residency.KEEP:
            decisions[decision.gap.storage].append(decision)
    copies: dict[int, Counter[bool]] = defaultdict(Counter)
    for instruction in program.instructions:
        if isinstance(instruction, CopyOut | CopyIn):
            storage = program.blocks[instruction.block].storage
            if storage is not None:
                copies[storage][isinstance(instruction, CopyOut)] += 1
    rows: list[Object] = []
    fates: Counter[str] = Counter()
    for data in sorted(graph.storages, key=lambda s: (-s.bytes, s.id)):
        if not is_large(data.bytes) and data.id not in copies:
            continue
        returning = [d for d in decisions[data.id] if d.gap != final_gap(graph, data.id)]
        fate = _decision_text(data, returning) if returning or not decisions[data.id] else "evicted at the end"
        fates[fate] += data.bytes
        creator = graph.creator.get(data.id)
        uses = graph.uses[data.id]
        rows.append(
            {
                "id": data.id,
                "name": storage_text(data),
                "kind": _kind_text(data.kind),
                "bytes": data.bytes,
                "module": _module(graph, data),
                "source": graph.ops[creator].source if creator is not None else "",
                "fate": fate,
                "out": copies[data.id][True],
                "in": copies[data.id][False],
                "uses": list(uses),
                "gaps": [_gap_row(decision, len(graph.ops)) for decision in sorted(decisions[data.id], key=_gap_key)],
            }
        )
    return rows, dict(fates)


def _gap_key(decision: Decision) -> tuple[int, int]:
    return decision.gap.start, decision.gap.end


def _gap_row(decision: Decision, ops: int) -> list[object]:
    """Return a row for a gap: its residency, the ops at its ends, and 1 if it ends in the next step."""
    return [decision.residency.value, decision.gap.start, decision.gap.end % ops, int(decision.gap.end >= ops)]


def _module(graph: StepGraph, data: Storage) -> str:
    """Return the module of the op that creates or first uses a storage; "" without one."""
    creator = graph.creator.get(data.id)
    uses = graph.uses[data.id]
    op = creator if creator is not None else uses[0] if uses else None
    return graph.ops[op].module if op is not None else ""


def _decision_text(data: Storage, decisions: Sequence[Decision]) -> str:
    if data.arrives:
        return "fetched input"
    kinds = {decision.residency for decision in decisions}
    if kinds == {Residency.OFFLOAD, Residency.RECOMPUTE}:
        return "offloaded or recomputed"
    if Residency.OFFLOAD in kinds:
        return "offloaded"
    if Residency.RECOMPUTE in kinds:
        return "recomputed"
    return "resident"


def _insight_content(insight: Insight) -> Object:
    return {
        "smallest": insight.smallest_budget,
        "in_core": insight.in_core_budget,
        "compute": insight.compute_seconds,
        "points": [asdict(point) for point in insight.points],
        "helps": [asdict(help_item) for help_item in insight.helps],
        "verdict": insight.verdict,
    }
