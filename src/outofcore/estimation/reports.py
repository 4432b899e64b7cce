"""Write a report or a trace of a measured or planned step; needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outofcore.busy import NOTE
from outofcore.costs import Costs, Home
from outofcore.estimation.sweep import CURVE_POINTS, build_insight
from outofcore.graph import StepGraph
from outofcore.planning import Planned, PolicyLike
from outofcore.program import Timeline
from outofcore.progress import show_progress
from outofcore.report.content import Page, page_content
from outofcore.report.machine import this_machine
from outofcore.report.page import write_report
from outofcore.report.trace import write_trace
from outofcore.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ReportedStep:
    """A planned step to report: its graph, costs, plan, and planned and measured timelines."""

    graph: StepGraph
    costs: Costs
    planned: Planned
    budget: int  # in bytes
    policy: PolicyLike = "auto"  # for plans with other budgets
    measured: Timeline | None = None  # None: the step did not run
    simulated: str = ""  # the device of the costs; "": this machine

    def timelines(self, planned_name: str) -> list[tuple[str, Timeline]]:
        """Return the measured timeline, if any, and the planned one under the name ``planned_name``."""
        ran = [] if self.measured is None else [("measured", self.measured)]
        return [*ran, (planned_name, self.planned.timeline)]


def report_step(
    path: Path, step: ReportedStep, title: str, *, count: int | None = None, notes: Sequence[tuple[str, str]] = ()
) -> None:
    """Write an HTML report about a planned step and ``count`` (default: ``CURVE_POINTS``) other budgets."""
    graph, costs, planned = step.graph, step.costs, step.planned
    with show_progress() as tell:
        budget_insight = build_insight(
            graph,
            costs,
            step.budget,
            planned,
            measured=step.measured,
            count=CURVE_POINTS if count is None else count,
            policy=step.policy,
            tell=lambda finished, total: tell("plan for several budgets", finished, total),
        )
    page = Page(
        title, step.budget, budget_insight, [home.name for home in costs.homes], [*_standard_notes(step), *notes]
    )
    timelines = step.timelines("simulated" if step.simulated else "predicted")
    write_report(path, page_content(graph, planned.plan, planned.program, timelines, page))


def trace_step(path: Path, step: ReportedStep, *, began_ns: int = 0, profiler_trace: Path | None = None) -> None:
    timelines = step.timelines("predicted")
    write_trace(path, step.graph, step.planned.program, timelines, began_ns=began_ns, profiler_trace=profiler_trace)


def _standard_notes(step: ReportedStep) -> list[tuple[str, str]]:
    """Return facts about the machine, the step and the plan for a report, as labels and texts."""
    machine, graph, planned = this_machine(), step.graph, step.planned
    description = (
        f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)} of memory, {machine.kernel}"
    )
    return [
        ("SIMULATED" if step.simulated else "machine", step.simulated or description),
        *([("note", NOTE)] if step.costs.is_busy else []),
        *((f"link to {home.name}", _format_link(home)) for home in step.costs.homes),
        ("step", f"{len(graph.ops)} ops on {len(graph.storages)} storages"),
        ("plan", f"policy {planned.plan.policy}, {len(planned.program.instructions)} instructions"),
    ]


def _format_link(home: Home) -> str:
    return (
        f"{format_bytes(home.bytes_per_s_out)}/s out, {format_bytes(home.bytes_per_s_in)}/s in, "
        f"{format_seconds(home.latency_s)} a copy"
    )
