"""Tests of the report page and the trace, on a step worked out by hand and on random programs."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from examples import GRAPH, INSIGHT, MIB, PLAN, PROGRAM, TIMELINE
from hypothesis import HealthCheck, given, settings
from strategies import naive_programs

from outofcore.costs import Costs, Home, OpCost
from outofcore.errors import InputError
from outofcore.graph import Op, StepGraph
from outofcore.program import Block, CopyIn, Program, Queue, Run, Timeline, Wait
from outofcore.report.content import Page, page_content
from outofcore.report.naming import op_text, storage_text
from outofcore.report.page import page_text, write_report
from outofcore.report.trace import write_trace
from outofcore.report.waits import Reason, time_spent
from outofcore.simulator import simulate


def content(**changes: Any) -> dict[str, Any]:
    timelines = [("measured", TIMELINE), ("predicted", TIMELINE)]
    return page_content(GRAPH, PLAN, PROGRAM, timelines, replace(Page("by hand", 7 * MIB, INSIGHT), **changes))


def test_names_are_readable() -> None:
    assert storage_text(GRAPH.storages[0]) == "conv1.weight"
    assert storage_text(GRAPH.storages[1]) == "conv1 convolution output"
    assert storage_text(GRAPH.storages[3]) == "output 3"
    assert op_text(GRAPH.ops[0]) == "convolution in conv1"
    assert op_text(GRAPH.ops[2]) == "loss"


def test_wait_is_attributed_to_its_copy_and_its_cause() -> None:
    spent, waits = time_spent(GRAPH, PROGRAM, TIMELINE)
    assert [(w.start, w.seconds, w.instruction, w.cause) for w in waits] == [(5.0, 4.0, 5, 4), (12.0, 1.0, -1, 6)]
    first, last = waits
    assert first.text == "waits for copy-in of conv1 convolution output"
    assert first.reason is Reason.ROOM
    assert first.explanation == "The copy had no memory before the end of copy-out of conv1 convolution output."
    assert last.reason is Reason.END
    assert last.text == "the step ends with copy-out of output 3"
    assert (spent.ops, spent.for_room, spent.end, spent.again, spent.between) == (8.0, 4.0, 1.0, 0.0, 0.0)


def test_busy_link_is_distinguished_from_a_slow_copy() -> None:
    alone = Program((CopyIn(0, 0), CopyIn(1, 0), Run(0, (0, 1), waits=(Wait(Queue.COPY_IN, 2),))), PROGRAM.blocks, MIB)
    _, (behind,) = time_spent(GRAPH, alone, Timeline((0.0, 1.0, 3.0), (1.0, 3.0, 4.0), 4.0))
    assert behind.reason is Reason.LINK
    assert "copy-in of conv1.weight" in behind.explanation
    slow = replace(alone, instructions=(alone.instructions[0], Run(0, (0, 1), waits=(Wait(Queue.COPY_IN, 1),))))
    _, (slow_wait,) = time_spent(GRAPH, slow, Timeline((0.0, 3.0), (3.0, 4.0), 4.0))
    assert slow_wait.reason is Reason.COPY


def test_unexplained_time_is_between_ops() -> None:
    late = Timeline((*TIMELINE.starts[:5], 9.5, 7.0), (*TIMELINE.ends[:5], 12.0, 11.0), 12.25)
    spent, waits = time_spent(GRAPH, PROGRAM, late)
    assert [wait.seconds for wait in waits] == [4.0]  # half a second was the thread waking up
    assert (spent.for_room, spent.end, spent.between) == (4.0, 0.0, 0.75)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(naive_programs())
def test_parts_of_a_step_add_up(case: tuple[StepGraph, Costs, Program]) -> None:
    graph, costs, program = case
    timeline = simulate(graph, costs, program)
    spent, waits = time_spent(graph, program, timeline)
    assert spent.seconds == pytest.approx(timeline.step_seconds)
    assert all(wait.seconds > 0 and wait.explanation for wait in waits)
    # Simulated ops are separated only by waits.
    assert spent.between == pytest.approx(0.0, abs=1e-9)


def test_content_has_the_decisions_for_each_storage() -> None:
    by_id = {storage["id"]: storage for storage in content()["storages"]}
    assert by_id[1]["fate"] == "offloaded"
    assert by_id[1]["gaps"] == [["offload", 1, 3, 0]]
    assert (by_id[1]["out"], by_id[1]["in"], by_id[1]["uses"]) == (1, 1, [0, 1, 3])
    assert (by_id[1]["module"], by_id[1]["source"]) == ("conv1", "net.py:3")
    assert by_id[0]["fate"] == by_id[2]["fate"] == "resident"
    assert [storage["bytes"] for storage in content()["storages"]] == [3 * MIB, 2 * MIB, MIB, 4]
    assert content()["fates"] == {"resident": 4 * MIB + 4, "offloaded": 2 * MIB}


def test_thinned_memory_keeps_its_peak() -> None:
    ops = tuple(Op(i, "op", (0,), (), (1,) if i == 0 else ()) for i in range(4000))
    graph = StepGraph(GRAPH.storages[:2], ops)
    instructions = tuple(Run(i, (0, 1) if i == 0 else (0,), 2 if i == 2001 else None) for i in range(4000))
    blocks = (Block(0, 0, MIB, 0, 0, True, 0), Block(1, 1, 64, 0, 1), Block(2, None, 9 * MIB, 2001, 2002))
    program = Program(instructions, blocks, 10 * MIB)
    timeline = simulate(graph, Costs(tuple(OpCost(0.001) for _ in ops)), program)
    (shown,) = page_content(graph, PLAN, program, [("predicted", timeline)], Page("", 1))["timelines"]
    memory = shown["memory"]
    assert len(memory["times"]) <= 1502
    assert shown["peak"] == max(map(sum, zip(*memory["held"].values(), strict=True))) == 10 * MIB


def test_page_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_report(path, content(title="a < b </script><img src=x>"))
    page = path.read_text(encoding="utf-8")
    # Names of namespaces are not loaded.
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=(?!\"data:)", page)
    assert page.count("</script>") == 2
    assert "%%" not in page
    assert len(page) < 80_000
    shown = re.search(r'<script id="content" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert shown is not None
    assert json.loads(shown.group(1))["title"] == "a < b </script><img src=x>"
    assert page_text(content()) == page_text(content())


def test_unwritable_page_and_trace_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(tmp_path / "file" / "report.html", content())
    with pytest.raises(InputError, match="cannot write the trace"):
        write_trace(tmp_path / "file" / "trace.json", GRAPH, PROGRAM, [("measured", TIMELINE)])


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_has_every_instruction_at_its_time(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / name
    write_trace(path, GRAPH, PROGRAM, [("measured", TIMELINE), ("predicted", TIMELINE)])
    events = read(path)["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["outofcore, measured", "outofcore, predicted"]
    measured = [e for e in events if e["pid"] == processes["outofcore, measured"]]
    spans = [(e["name"], e["ts"], e["dur"]) for e in measured if e["ph"] == "X" and e["cat"] != "wait"]
    assert len(spans) == len(PROGRAM.instructions)
    assert spans[0] == ("convolution in conv1", 0, 2e6)
    assert spans[4] == ("copy-in of conv1 convolution output", 7e6, 2e6)
    waits = [e for e in measured if e.get("cat") == "wait"]
    assert next((e["name"], e["ts"]) for e in waits) == ("waits for copy-in of conv1 convolution output", 5e6)
    # Every span is on a thread with a name.
    threads = {e["tid"] for e in measured if e["name"] == "thread_name"}
    assert {e["tid"] for e in measured if e["ph"] == "X"} == threads
    counted = [e for e in measured if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counted) == 6 * MIB + 64


def test_trace_is_merged_with_a_profiler_trace(tmp_path: Path) -> None:
    profiler_trace = tmp_path / "profiler.json"
    profiler_event = {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 1000.0, "dur": 5}
    profiler_trace.write_text(
        json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 5_000_000, "traceEvents": [profiler_event]})
    )
    path = tmp_path / "both.json"
    write_trace(path, GRAPH, PROGRAM, [("measured", TIMELINE)], began_ns=6_000_000, profiler_trace=profiler_trace)
    both = read(path)
    assert both["schemaVersion"] == 1
    assert both["traceEvents"][0] == profiler_event
    ours = [e for e in both["traceEvents"] if e["ph"] == "X" and e["pid"] != 7]
    assert min(e["ts"] for e in ours) == 1000.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}'])
def test_invalid_profiler_trace_is_refused(tmp_path: Path, text: str) -> None:
    profiler_trace = tmp_path / "profiler.json"
    profiler_trace.write_text(text)
    with pytest.raises(InputError, match=r"profiler\.json"):
        write_trace(tmp_path / "both.json", GRAPH, PROGRAM, [], profiler_trace=profiler_trace)


def test_lanes_of_several_homes_have_their_names() -> None:
    instructions = (CopyIn(0, 0), CopyIn(1, 0, home=1), Run(0, (0, 1), waits=(Wait(Queue.COPY_IN, 1, 1),)))
    program = Program(instructions, PROGRAM.blocks, MIB)
    homes = (Home("host", None, 1e9, 1e9), Home("disk", None, 1e9, 1e9))
    costs = Costs(tuple(OpCost(1.0) for _ in GRAPH.ops), homes)
    shown = page_content(
        GRAPH,
        PLAN,
        program,
        [("predicted", simulate(GRAPH, costs, program))],
        Page("", MIB, homes=["host", "disk"]),
    )
    assert shown["lanes"] == ["ops", "copies in, host", "copies in, disk", "copies out, host"]
    assert [instruction[0] for instruction in shown["instructions"]] == [1, 2, 0]
