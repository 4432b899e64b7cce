"""A report and a trace of a step that ran, or that was only planned. Without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outofcore.costs import Costs, Home
from outofcore.graph import StepGraph
from outofcore.insight import POINTS, insight
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.progress import following
from outofcore.report.content import page_content
from outofcore.report.machine import this_machine
from outofcore.report.page import write_report
from outofcore.report.trace import write_trace
from outofcore.units import format_bytes, format_seconds


def report_step(
    path: Path,
    graph: StepGraph,
    costs: Costs,
    planned: Planned,
    measured: Timeline | None,
    *,
    budget: int,
    title: str,
    count: int | None = None,
    policy: PolicyLike = "auto",
    simulated: str = "",
    notes: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the report of a step.

    Args:
        path: the HTML file; its folder is created.
        graph: the step.
        costs: that it was planned with.
        planned: its plan.
        measured: when everything ran, if it did.
        budget: bytes.
        title: the heading.
        count: of budgets to plan for besides, for the curve of step time against budget; 0: no curve.
        policy: to plan with.
        simulated: what device the costs are of, where that is not this machine.
        notes: what else is to be known, each with its name.

    Raises:
        InputError: the file cannot be written.
    """
    with following() as tell:
        known = insight(
            graph,
            costs,
            budget,
            planned,
            measured=measured,
            count=POINTS if count is None else count,
            policy=policy,
            tell=lambda done, total: tell("plan for other budgets", done, total),
        )
    content = page_content(
        graph,
        planned.plan,
        planned.program,
        timelines_of(planned, measured, "simulated" if simulated else "predicted"),
        budget=budget,
        title=title,
        insight=known,
        homes=[home.name for home in costs.homes],
        notes=[*_notes(graph, costs, planned, simulated), *notes],
    )
    write_report(path, content)


def trace_step(
    path: Path,
    graph: StepGraph,
    planned: Planned,
    measured: Timeline | None,
    *,
    began_ns: int = 0,
    beside: Path | None = None,
) -> None:
    """Write the timelines of a step as a trace; see ``report.trace.write_trace``.

    Raises:
        InputError: a file cannot be read or written.
    """
    timelines = timelines_of(planned, measured, "predicted")
    write_trace(path, graph, planned.program, timelines, began_ns=began_ns, beside=beside)


def timelines_of(planned: Planned, measured: Timeline | None, foreseen: str) -> list[tuple[str, Timeline]]:
    """The timelines that there are, each with its name."""
    return [*([("measured", measured)] if measured is not None else []), (foreseen, planned.timeline)]


def _notes(graph: StepGraph, costs: Costs, planned: Planned, simulated: str) -> list[tuple[str, str]]:
    machine = this_machine()
    here = f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, {machine.kernel}"
    return [
        ("SIMULATED" if simulated else "machine", simulated or here),
        *((f"link to {home.name}", _link(home)) for home in costs.homes),
        ("step", f"{len(graph.ops)} ops on {len(graph.storages)} storages"),
        ("plan", f"policy {planned.plan.policy}, {len(planned.program.instructions)} instructions"),
    ]


def _link(home: Home) -> str:
    return (
        f"{format_bytes(home.bytes_per_s_out)}/s out, {format_bytes(home.bytes_per_s_in)}/s in, "
        f"{format_seconds(home.latency_s)} a copy"
    )
