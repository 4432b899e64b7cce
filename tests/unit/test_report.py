"""Tests of reports, on a small step worked out by hand and on random programs."""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from pathlib import Path

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings

from outofcore.costs import Costs
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.plan import Plan
from outofcore.program import Block, CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait
from outofcore.report import (
    StepReport,
    columns,
    copies_text,
    machine,
    memory_over_time,
    step_report,
    step_text,
)
from outofcore.report.machine import peak_memory_bytes, resident_memory_bytes, this_machine
from outofcore.simulator import resident_bytes, simulate
from tests.unit.strategies import naive_programs

GRAPH = StepGraph(
    (
        Storage(0, 100, StorageKind.PARAMETER),
        Storage(1, 40, StorageKind.INPUT),
        Storage(2, 60, StorageKind.ACTIVATION),
        Storage(3, 4, StorageKind.OUTPUT),
    ),
    (Op(0, "double", (1,), (), (2,)), Op(1, "sum", (2,), (), (3,)), Op(2, "update", (0, 2), (0,), ())),
    outputs=(3,),
)
PROGRAM = Program(
    (
        CopyIn(1, 0),  # 0 to 1: the input
        Run(0, (1, 2), waits=(Wait(Queue.COPY_IN, 1),)),  # 1 to 3
        CopyIn(0, 0),  # 1 to 5: the parameter
        Run(1, (2, 3), workspace=4),  # 3 to 4
        CopyOut(3, 1, (Wait(Queue.COMPUTE, 2),)),  # 4 to 5: the output
        Run(0, (1, 2), again=True),  # 4 to 6: again
        Run(2, (0, 2), waits=(Wait(Queue.COPY_IN, 2),)),  # 6 to 9
        CopyOut(0, 1, (Wait(Queue.COMPUTE, 4),)),  # 9 to 12
    ),
    (
        Block(0, 0, 128, 2, 8, offset=0),
        Block(1, 1, 64, 0, 6, offset=128),
        Block(2, 2, 64, 1, 7, offset=192),
        Block(3, 3, 64, 3, 5, offset=256),
        Block(4, None, 32, 3, 4, offset=320),
    ),
    arena_bytes=400,
    results=(0, 3),
)
TIMELINE = Timeline((0.0, 1.0, 1.0, 3.0, 4.0, 4.0, 6.0, 9.0), (1.0, 3.0, 5.0, 4.0, 5.0, 6.0, 9.0, 12.0), 12.0)
REPORT = step_report(GRAPH, Plan("by hand", 300, ()), PROGRAM, TIMELINE, 500)


def test_report_counts_time_runs_and_bytes() -> None:
    expected = StepReport(
        policy="by hand",
        budget=500,
        arena_bytes=400,
        peak_bytes=128 + 64 + 64 + 64 + 32,
        seconds=12.0,
        compute_seconds=8.0,
        recomputed=1,
        moved=REPORT.moved,
    )
    assert expected == REPORT


def test_copies_of_the_caller_do_not_count_as_moved() -> None:
    [moved] = REPORT.moved
    assert moved.kind is StorageKind.PARAMETER
    assert (moved.storages, moved.copies_out, moved.copies_in) == (1, 1, 1)
    assert (REPORT.bytes_out, REPORT.bytes_in) == (100, 100)


def test_memory_over_time_by_kind() -> None:
    memory = memory_over_time(GRAPH, PROGRAM, TIMELINE)
    assert memory.times == (0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 9.0, 12.0)
    assert memory.bytes_by_kind == {
        "parameter": (0, 128, 128, 128, 128, 128, 128, 0),
        "activation": (0, 64, 64, 64, 64, 64, 0, 0),
        "input": (64, 64, 64, 64, 64, 0, 0, 0),
        "output": (0, 0, 64, 64, 0, 0, 0, 0),
        "workspace": (0, 0, 32, 0, 0, 0, 0, 0),
    }
    assert memory.peak_bytes == 352


def test_wrapping_block_is_held_from_start_to_end() -> None:
    blocks = (replace(PROGRAM.blocks[0], wraps=True, born=0, dies=0), *PROGRAM.blocks[1:])
    memory = memory_over_time(GRAPH, replace(PROGRAM, blocks=blocks), TIMELINE)
    assert set(memory.bytes_by_kind["parameter"]) == {128}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(naive_programs())
def test_kinds_add_up_to_all_bytes(case: tuple[StepGraph, Costs, Program]) -> None:
    graph, costs, program = case
    timeline = simulate(graph, costs, program)
    memory = memory_over_time(graph, program, timeline)
    at = {time: sum(level[index] for level in memory.bytes_by_kind.values()) for index, time in enumerate(memory.times)}
    assert list(at) == sorted(at)
    for time, level in resident_bytes(program, timeline):
        assert at[time] == level
    report = step_report(graph, Plan("naive", 1, ()), program, timeline, 1)
    assert report.peak_bytes == memory.peak_bytes
    assert report.recomputed == sum(isinstance(i, Run) for i in program.instructions) - len(graph.ops)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns([("a", "bytes", "x"), ("longer", "1", "22")]) == "  a       bytes   x\n  longer      1  22"


def test_text_has_the_numbers() -> None:
    text = copies_text(REPORT)
    assert re.search(r"^ +parameter +1 +1 +100 B +1 +100 B$", text, re.MULTILINE)
    assert re.search(r"^ +total +1 +1 +100 B +1 +100 B$", text, re.MULTILINE)
    text_of_step = step_text(REPORT)
    assert "400 B of 500 B reserved, peak 352 B (policy by hand)" in text_of_step
    assert "12.0 s: ops 8.00 s, waiting and overhead 4.00 s; ops recomputed: 1" in text_of_step
    assert "nothing moves" in copies_text(replace(REPORT, moved=()))


def test_available_memory_respects_control_groups(tmp_path: Path) -> None:
    inner = tmp_path / "user" / "job"
    inner.mkdir(parents=True)

    def limit(group: Path, max_bytes: str, current: int, files: int) -> None:
        (group / "memory.max").write_text(f"{max_bytes}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 5\nfile 900\ninactive_file {files}\nactive_file 1\n")

    assert machine._free_in_group(inner) is None
    limit(inner, "max", 700, 0)
    assert machine._free_in_group(inner) is None
    limit(inner, "1000", 700, 99)
    assert machine._free_in_group(inner) == 400
    limit(inner.parent, "1000", 950, 9)
    assert machine._free_in_group(inner) == 60
    limit(inner, "1000", 2000, 0)
    assert machine._free_in_group(inner) == 0


def test_machine_has_cpu_cores_and_memory() -> None:
    description = this_machine()
    assert description.cpu
    assert description.cores >= 1
    assert description.memory_bytes > 1 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc/self/status")
def test_peak_memory_remains_after_memory_is_freed() -> None:
    before = resident_memory_bytes()
    # An own mapping: the heap may have free memory already, and keep it.
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    during = resident_memory_bytes()
    block.close()
    after, peak = resident_memory_bytes(), peak_memory_bytes()
    assert before is not None
    assert during is not None
    assert after is not None
    assert peak is not None
    assert during - before > 60 << 20
    assert during - after > 60 << 20
    assert peak > during - (1 << 20)  # the kernel counts pages in batches
