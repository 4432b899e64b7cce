"""Tests of the observation of an eager step, read from a log worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outofcore.follow.observed import (
    LINKS,
    Cause,
    CopyTiming,
    Departure,
    Link,
    LogEvent,
    ObservedStep,
    PlanSummary,
    departure_marks,
    observed_notes,
    read_observed,
)
from outofcore.graph import Op, StorageKind
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait
from outofcore.report import Page, page_content, step_report
from outofcore.report.data import MemoryOverTime
from outofcore.report.trace import LoopMeasurements, write_trace
from outofcore.units import MIB

SECOND = 10**9
NAMES = ("aten::linear", "aten::add.Tensor", "mine::op")
WEIGHT, MADE, BATCH, SCRATCH, OLD = 10, 11, 12, 13, 14
KNOWN = {WEIGHT: ("body.weight", StorageKind.PARAMETER)}

# Event, start and end in seconds, block or operator, bytes, flags.
LOG = (
    (LogEvent.HELD, 0, 0, WEIGHT, 2 * MIB, 0),
    (LogEvent.HELD, 0, 0, OLD, MIB, 0),
    (LogEvent.TAKEN, 1, 1, BATCH, MIB, 0),
    (LogEvent.TAKEN, 1, 1, SCRATCH, 4096, 0),
    (LogEvent.TAKEN, 1, 1, MADE, MIB, 0),
    (LogEvent.GIVEN, 2, 2, SCRATCH, 4096, 0),
    (LogEvent.FREED, 2, 2, SCRATCH, 4096, 0),
    (LogEvent.OP, 1, 3, 0, 0, 1),  # the first op, by plan
    (LogEvent.TOUCH, 0, 0, BATCH, MIB, 0),
    (LogEvent.TOUCH, 0, 0, WEIGHT, 2 * MIB, 0),
    (LogEvent.TOUCH, 0, 0, MADE, MIB, 3),
    (LogEvent.GIVEN, 3, 3, BATCH, MIB, 0),
    (LogEvent.FREED, 3, 3, BATCH, MIB, 0),
    (LogEvent.OUT, 3, 4, MADE, MIB, CopyTiming.OVERLAPPED),
    (LogEvent.LEFT, 4, 4, MADE, MIB, 1),
    (LogEvent.GIVEN, 4, 4, MADE, MIB, 0),
    (LogEvent.OP, 4, 5, 1, 0, 0),  # on demand
    (LogEvent.TOUCH, 0, 0, WEIGHT, 2 * MIB, 1),
    (LogEvent.TAKEN, 6, 6, MADE, MIB, 0),
    (LogEvent.IN, 6, 8, MADE, MIB, CopyTiming.ON_DEMAND),
    (LogEvent.OP, 8, 9, 2, 3, 1),
    (LogEvent.TOUCH, 0, 0, MADE, MIB, 0),
    (LogEvent.GIVEN, 9, 9, MADE, MIB, 0),
    (LogEvent.FREED, 9, 9, MADE, MIB, 0),
    (LogEvent.OUT, 9, 10, WEIGHT, 2 * MIB, CopyTiming.ON_DEMAND),
    (LogEvent.LEFT, 10, 10, WEIGHT, 2 * MIB, 0),
    (LogEvent.GIVEN, 10, 10, WEIGHT, 2 * MIB, 0),
)
DEPARTURES = (
    (6, 1, 4 * SECOND, Cause.OP, 0, 1, 2, 0, 1),
    (5, 2, -SECOND, Cause.MEMORY, MIB, 0, -1, 2, 0),
)


def observe(log: tuple[tuple[int, ...], ...] = LOG, *, complete: int = 1, steps: int = 7, cut: int = 0) -> ObservedStep:
    numbers = [steps, complete, cut, 5, 12 * SECOND, len(log), len(DEPARTURES), 9]
    for kind, start, end, number, count, flags in log:
        numbers += [int(kind), start * SECOND, end * SECOND, number, count, int(flags)]
    numbers += [int(number) for departure in DEPARTURES for number in departure]
    return read_observed(numbers, NAMES, KNOWN, 8 * MIB, "auto")


def test_graph_has_the_storages_of_the_ops() -> None:
    graph = observe().graph
    graph.check()
    assert [(s.bytes, s.kind, s.name) for s in graph.storages] == [
        (2 * MIB, StorageKind.PARAMETER, "body.weight"),
        (MIB, StorageKind.BUFFER, ""),  # resident before and after the step, of unknown kind
        (MIB, StorageKind.INPUT, ""),
        (MIB, StorageKind.ACTIVATION, "body linear"),
    ]
    assert graph.ops == (
        Op(0, "aten.linear.default", (2, 0), (), (3,), rerunnable=False, module="body"),
        Op(1, "aten.add.Tensor", (0,), (0,), (), rerunnable=False, module="body"),
        Op(2, "mine.op.default", (3,), (), (), rerunnable=False),
    )


def test_program_has_the_instructions_and_waits_of_the_log() -> None:
    observation = observe()
    assert observation.program == Program(
        (
            Run(0, (0, 1, 2)),
            CopyOut(2, 1, (), Link.AHEAD),
            Run(1, (1,)),
            CopyIn(3, 1, (), Link.LATE),
            Run(2, (3,), None, (Wait(Queue.COPY_IN, 1, Link.LATE),)),
            CopyOut(1, 1, (), Link.LATE),
        ),
        (
            Block(0, 2, MIB, 0, 1),
            Block(1, 0, 2 * MIB, 0, 6),
            Block(2, 3, MIB, 0, 2),
            Block(3, 3, MIB, 3, 5),
        ),
        arena_bytes=5 * MIB + 4096,
    )
    assert observation.timeline == Timeline((1.0, 3.0, 4.0, 6.0, 8.0, 9.0), (3.0, 4.0, 5.0, 8.0, 9.0, 10.0), 12.0)
    assert observation.on_demand == {1}
    assert observation.planned_count == 2


def test_memory_counts_bytes_outside_ops() -> None:
    assert observe().memory == MemoryOverTime(
        (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 10.0, 12.0),
        {
            "parameter": tuple(n * MIB for n in (2, 2, 2, 2, 2, 2, 2, 0, 0)),
            "buffer": (MIB,) * 9,
            "activation": tuple(n * MIB for n in (0, 1, 1, 1, 0, 1, 0, 0, 0)),
            "input": tuple(n * MIB for n in (0, 1, 1, 0, 0, 0, 0, 0, 0)),
            "workspace": (0, 4096, 0, 0, 0, 0, 0, 0, 0),
        },
    )


def test_plan_lists_the_evictions() -> None:
    assert observe().plan == Plan(
        "auto",
        8 * MIB,
        (
            Decision(Gap(0, 1, 3), Residency.OFFLOAD, 3, 3),  # the weight, until the next step
            Decision(Gap(3, 0, 2), Residency.OFFLOAD, 1, 2),
        ),
    )
    no_plans = tuple((*row[:5], 0) if row[0] is LogEvent.OP else row for row in LOG)
    assert observe(no_plans).plan.policy == "on demand"


def test_departures_give_their_reasons() -> None:
    observation = observe()
    assert observation.departures == (
        Departure(6, 1, 4.0, Cause.OP, "aten::linear", "aten::add.Tensor", 0, 1, 2),
        Departure(5, 2, -1.0, Cause.MEMORY, "mine::op", "aten::linear", MIB, 0, -1),
    )
    op_text, memory_text = (d.text for d in observation.departures)
    assert op_text == (
        "aten::add.Tensor ran where aten::linear was planned; 1 op ran on demand, then the plan resumed at op 2"
    )
    assert memory_text == "aten::linear needed more memory than planned: an extra 1.00 MiB was evicted"
    # The second departure was in another step.
    assert departure_marks(observation) == ((4.0, "left the plan", op_text),)

    def text(cause: Cause, expected: str, actual: str, back: int = -1) -> str:
        return Departure(0, 0, 0.0, cause, expected, actual, MIB, 4, back).text

    assert text(Cause.END, "aten::mm", "") == "the step ended where aten::mm was planned"
    assert text(Cause.PLACE, "aten::mm", "aten::mm") == "1.00 MiB was evicted from an offset planned for aten::mm"
    assert text(Cause.OP, "aten::mm", "aten::mm") == (
        "aten::mm ran with other tensors than planned; 4 ops ran on demand, and the plan did not resume"
    )


def test_notes_count_ops_and_departures() -> None:
    plan = PlanSummary(3, 3, "auto", 0.5, 2.0)
    notes = observed_notes(observe(cut=3), [plan])
    assert ("step", "step 7 of the loop: 3 ops on 4 storages of 64 KiB and more") in notes
    assert ("ops", "2 by plan, 1 on demand") in notes
    assert ("left out", "the last 3 events of the step") in notes
    assert ("plan", plan.text) in notes
    assert ("departures from plans", "9 in total; the last are listed") in notes
    assert [name for name, _ in notes[-2:]] == ["step 7, op 1 of the plan", "step 6, op 2 of the plan"]
    so_far = observed_notes(observe(complete=0, steps=0), [])
    assert so_far[0][0] == "so far"
    assert ("plan", "no plan so far") in so_far


def test_page_and_trace_agree(tmp_path: Path) -> None:
    observation = observe()
    report = step_report(observation.graph, observation.plan, observation.program, observation.timeline, 8 * MIB)
    assert (report.bytes_out, report.bytes_in, report.compute_seconds) == (3 * MIB, MIB, 4.0)
    measured = LoopMeasurements(LINKS, observation.memory, observation.on_demand, departure_marks(observation))
    timelines = [("measured", observation.timeline)]
    content: Any = page_content(
        observation.graph, observation.plan, observation.program, timelines, Page("", 8 * MIB, homes=LINKS), measured
    )
    (timeline,) = content["timelines"]
    assert content["lanes"] == ["ops", "copies in, ahead", "copies in, late", "copies out, ahead", "copies out, late"]
    assert timeline["peak"] == 5 * MIB + 4096
    assert [instruction[2] for instruction in content["instructions"] if instruction[0] == 0] == [0, 2, 0]
    assert [(wait["start"], wait["length"], wait["instruction"]) for wait in timeline["waits"]] == [
        (5e6, 3e6, 4),
        (9e6, 1e6, -1),  # the last copy outlasts the last op
    ]
    assert timeline["spent"]["for_copies"] == 3.0

    path = tmp_path / "trace.json"
    write_trace(path, observation.graph, observation.program, timelines, measured=measured)
    events = json.loads(path.read_text())["traceEvents"]
    ops = [(e["name"], e["cat"]) for e in events if e.get("cat") in ("planned", "on demand")]
    assert ops == [("linear in body", "planned"), ("add in body", "on demand"), ("mine.op.default", "planned")]
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert (mark["ts"], mark["args"]["why"]) == (4e6, observation.departures[0].text)
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == 5 * MIB + 4096
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {*content["lanes"], "waits of ops"} - {
        "copies in, ahead"
    }


def test_empty_log_is_an_empty_step() -> None:
    observation = observe((), complete=0, steps=0)
    assert observation.graph.ops == ()
    assert observation.memory.times == (0.0, 12.0)
    assert not observation.is_complete
