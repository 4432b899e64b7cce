"""The output of ``plan``, ``report --steps 0`` and ``validate``, for any step. Without PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter

from outofcore import planning
from outofcore.busy import NOTE
from outofcore.cli.options import Answers, ReportOptions
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.estimation.reports import ReportedStep, report_step, trace_step
from outofcore.estimation.sweep import Estimate, budgets_between, estimated, points_text
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile, read_graph, write_graph
from outofcore.planfile import PlanFile, read_plan, write_plan
from outofcore.planning import POLICIES, Planned
from outofcore.progress import following, silent
from outofcore.report import (
    Page,
    StepReport,
    columns,
    moved_text,
    page_content,
    step_report,
    step_text,
    write_report,
    write_sweep,
)
from outofcore.units import format_bytes, format_seconds
from outofcore.validator import validate

# Parts of the budget at which nothing needs to leave, by their names; the smallest budget is added to them.
COMPARED = {"0.9": 0.9, "0.5": 0.5, "0.25": 0.25, "0.133": 1 / 7.5}
Say = Callable[[str], None]


@contextmanager
def saying(*, alone: bool) -> Generator[Say]:
    """Yield a function that prints an answer; ``alone``: standard output has nothing else, whatever libraries print.

    Their output, that of native code included, goes to standard error, and the answer is printed at the end.
    """
    if not alone:
        yield print
        return
    answers: list[str] = []
    with contextlib.redirect_stdout(sys.stderr), _descriptor_to_errors():
        yield answers.append
    for text in answers:
        print(text)


@contextmanager
def _descriptor_to_errors() -> Generator[None]:
    """Redirect standard output of native code to standard error."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        _flush_native()
        os.dup2(2, 1)
        yield
    finally:
        _flush_native()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_native() -> None:
    """Flush the buffers of Python and C."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


@dataclass(frozen=True)
class Subject:
    """A step with its costs, and its title.

    Attributes:
        simulated: the device of simulated costs and their source; empty if they were measured.
        parts: the split step, where that needs less memory.
    """

    title: str
    file: GraphFile
    simulated: str = ""
    parts: GraphFile | None = None

    @property
    def graph(self) -> StepGraph:
        return self.file.graph

    @property
    def costs(self) -> Costs:
        return self.file.costs

    @cached_property
    def smallest_budget(self) -> int:
        """The smallest budget in bytes that can hold the step, with split ops where that needs less."""
        parts = self.parts
        least = self.whole_budget if parts is None else planning.smallest_budget(parts.graph, parts.costs)
        return min(least, self.whole_budget)

    @cached_property
    def whole_budget(self) -> int:
        """The smallest budget in bytes that can hold the step with whole ops."""
        return planning.smallest_budget(self.graph, self.costs)

    def within(self, budget: int | None) -> Subject:
        """Return the step that is planned for a budget: with split ops where it does not fit otherwise."""
        if self.parts is None or budget is None or budget >= self.whole_budget:
            return self
        return replace(self, title=f"{self.title}, large ops split", file=self.parts, parts=None)

    @cached_property
    def in_core_budget(self) -> int:
        """The budget in bytes from which on nothing needs to move."""
        return planning.in_core_budget(self.graph, self.costs)


def subject_from(path: Path) -> Subject:
    """Read the step in a graph file; raises ``InputError`` or ``GraphError``."""
    file = read_graph(path)
    return Subject(f"{path}: {len(file.graph.ops)} ops on {len(file.graph.storages)} storages", file)


@dataclass(frozen=True)
class Answer:
    """The result of one policy at one budget.

    ``planned`` is None where the policy finds no plan, and ``refusal`` says why. ``plan_seconds`` includes placing and
    simulating.
    """

    policy: str
    budget: int
    planned: Planned | None
    report: StepReport | None
    refusal: BudgetError | None
    plan_seconds: float


def answer(subject: Subject, budget: int, policy: str) -> Answer:
    """Plan a step; raises ``InputError`` for an unknown policy, or if the homes cannot hold what is evicted."""
    start = perf_counter()
    subject = subject.within(budget)
    try:
        planned = planning.plan_step(subject.graph, subject.costs, budget, policy)
    except BudgetError as error:
        return Answer(policy, budget, None, None, error, perf_counter() - start)
    seconds = perf_counter() - start
    report = step_report(subject.graph, planned.plan, planned.program, planned.timeline, budget)
    return Answer(policy, budget, planned, report, None, seconds)


def present(subject: Subject, budget: int | None, policy: str, wish: Answers, say: Say) -> bool:
    """Plan if there is a budget, print the result, and write the requested files; False if it does not fit."""
    everything, subject = subject, subject.within(budget)
    if wish.save_graph is not None:
        write_graph(wish.save_graph, subject.file)
    found = None if budget is None else answer(subject, budget, policy)
    if found is not None and found.planned is not None:
        planned, timeline = found.planned, found.planned.timeline
        if wish.save_plan is not None:
            content = PlanFile(found.budget, planned.plan, planned.program, timeline.step_seconds)
            write_plan(wish.save_plan, content, subject.file.keys)
        if wish.picture is not None:
            timelines = [("simulated" if subject.simulated else "predicted", timeline)]
            page = Page(subject.title, found.budget)
            content = page_content(subject.graph, planned.plan, planned.program, timelines, page)
            write_report(wish.picture, content)
    bound = None if budget is None else planning.lower_bound_seconds(subject.graph, subject.costs, budget)
    forecast = None
    if wish.curve:
        with following(silent if wish.as_json else None) as tell:
            parts = everything.parts
            forecast = estimated(
                everything.graph,
                everything.costs,
                parts=None if parts is None else (parts.graph, parts.costs),
                budgets=[] if budget is None else [budget],
                policy=policy,
                machine=subject.simulated,
                tell=tell,
            )
    if wish.as_json:
        content = _content(everything, found, bound)
        if forecast is not None:
            content |= {
                "lossless_budget": forecast.lossless_budget,
                "points": [asdict(point) for point in forecast.points],
            }
        say(json.dumps(content, indent=2))
    else:
        say(_text(everything, found, bound, forecast))
    return found is None or found.planned is not None


def _content(subject: Subject, found: Answer | None, bound: float | None) -> dict[str, object]:
    """Return an answer as JSON in bytes and seconds; null where nothing fits or nothing was asked."""
    report = None if found is None else found.report
    content = _step_content(subject) | {
        "policy": None if found is None else found.policy,
        "budget": None if found is None else found.budget,
        "feasible": None if found is None else report is not None,
        "fits": None if found is None else report is not None,
        **_figures_content(subject, found),
        "lower_bound_seconds": bound,
        "plan_seconds": None if found is None else found.plan_seconds,
    }
    if found is not None and found.refusal is not None:
        content["reason"] = str(found.refusal)
    if report is not None:
        moved = [{**asdict(m), "kind": m.kind.value} for m in report.moved]
        content["predicted"] = {**asdict(report), "moved": moved}
    return content


def _step_content(subject: Subject) -> dict[str, object]:
    return {
        "workload": subject.title,
        "simulated": subject.simulated or None,
        "smallest_budget": subject.smallest_budget,
        "whole_budget": subject.whole_budget,
        "in_core_budget": subject.in_core_budget,
        "compute_seconds": subject.costs.compute_seconds,
        "measured_while_busy": subject.costs.is_busy,
    }


def _figures_content(subject: Subject, found: Answer | None) -> dict[str, object]:
    report = None if found is None else found.report
    return {
        "predicted_step_seconds": report and report.seconds,
        "peak_bytes": report and report.peak_bytes,
        "arena_bytes": report and report.arena_bytes,
        "bytes_out": report and report.bytes_out,
        "bytes_in": report and report.bytes_in,
        "recompute_seconds": report and report.again_seconds(subject.costs),
    }


def _text(
    subject: Subject,
    found: Answer | None,
    bound: float | None,
    forecast: Estimate | None,
) -> str:
    report = None if found is None else found.report
    is_split = subject.smallest_budget < subject.whole_budget
    splitting = ", with large ops split" if is_split else ""
    rows = [("smallest budget", f"{_exactly(subject.smallest_budget)}{splitting}")]
    if is_split:
        rows.append(("without splitting", _exactly(subject.whole_budget)))
    if forecast is not None:
        rows.append(("no slowdown", f"from {_exactly(forecast.lossless_budget)} on, at most 1 % slower"))
    rows.append(("nothing moves", f"from {_exactly(subject.in_core_budget)} on"))
    compute = f"{format_seconds(subject.costs.compute_seconds)} per step"
    if found is not None:
        whole = subject.within(found.budget) is subject
        if report is None:
            verdict = "does not fit"
        elif whole:
            verdict = "fits, with copies" if report.moved else "fits, and nothing moves"
        else:
            verdict = "fits, with large ops split" + (" and copies" if report.moved else "; nothing moves")
            compute += f", {format_seconds(subject.within(found.budget).costs.compute_seconds)} with large ops split"
        rows.append(("budget", f"{_exactly(found.budget)}: {verdict}"))
    rows.append(("compute time", compute))
    if report is not None and bound is not None:
        over = report.seconds / bound - 1 if bound else 0.0
        rows.append(("lower bound", f"{format_seconds(bound)} per step; the plan takes {max(over, 0.0):.1%} longer"))
    parts = _titles(subject)
    parts.append("\n".join(f"  {name:<18} {value}" for name, value in rows))
    if found is not None and found.refusal is not None:
        parts.append(str(found.refusal))
    if report is not None:
        parts += [f"{'simulated' if subject.simulated else 'predicted'} step", step_text(report), moved_text(report)]
    if forecast is not None:
        parts += ["step time over budgets", points_text(forecast.points)]
    return "\n".join(parts)


def _exactly(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"


# A policy at a budget, which has a label.
Cell = tuple[str, Answer]


def _compared(subject: Subject) -> list[tuple[str, int]]:
    """Return the default budgets of a comparison, falling, each with its name.

    Fractions of the in-core budget below the smallest budget are left out.
    """
    everything, smallest = subject.in_core_budget, subject.smallest_budget
    named = [(f"in core × {name}", int(everything * part)) for name, part in COMPARED.items()]
    return [*((name, budget) for name, budget in named if budget > smallest), ("smallest", smallest)]


def _swept(subject: Subject) -> list[tuple[str, int]]:
    """Return nine default budgets of a sweep, up to 5 % above that at which nothing needs to leave."""
    budgets = budgets_between(subject.smallest_budget, int(1.05 * subject.in_core_budget), 9)
    return [(format_bytes(budget), budget) for budget in budgets]


def side_by_side(subject: Subject, budgets: Sequence[int], wish: Answers, say: Say) -> bool:
    """Print the result of each policy at each budget; return whether any fits any.

    Empty ``budgets`` are chosen to suit the step. A sweep prints step times by budget, rather than every figure of each
    plan. Raises ``OutOfCoreError`` if the homes cannot hold what is evicted.
    """
    named = [(format_bytes(budget), budget) for budget in dict.fromkeys(budgets)]
    named = named or (_swept(subject) if wish.sweep else _compared(subject))
    cells = [(label, answer(subject, budget, policy)) for label, budget in named for policy in POLICIES]
    if wish.picture is not None:
        _draw(subject, cells, wish.picture)
    if wish.as_json:
        content = _step_content(subject) | {"cells": [_cell_content(subject, cell) for cell in cells]}
        say(json.dumps(content, indent=2))
    else:
        say((_sweep_text if wish.sweep else _compare_text)(subject, named, cells))
    return any(found.planned is not None for _, found in cells)


def _compare_text(subject: Subject, budgets: Sequence[tuple[str, int]], cells: Sequence[Cell]) -> str:
    compute = subject.costs.compute_seconds
    parts = _heading(subject)
    head = ("policy", "fits", "step", "slowdown", "evicted", "fetched", "recompute", "peak", "planning")
    for label, budget in budgets:
        rows = [(one.policy, *_figures(subject, one, compute)) for _, one in cells if one.budget == budget]
        named = "" if label == format_bytes(budget) else f", {label}"
        parts.append(f"budget {_exactly(budget)}{named}")
        parts.append(columns([head, *rows]))
    return "\n".join(parts)


def _figures(subject: Subject, found: Answer, compute: float) -> tuple[str, ...]:
    report = found.report
    took = format_seconds(found.plan_seconds)
    if report is None:
        return ("no", "-", "-", "-", "-", "-", "-", took)
    return (
        "yes",
        format_seconds(report.seconds),
        f"{report.seconds / compute:.3f}" if compute else "-",
        format_bytes(report.bytes_out),
        format_bytes(report.bytes_in),
        format_seconds(report.again_seconds(subject.costs)),
        format_bytes(report.peak_bytes),
        took,
    )


def _sweep_text(subject: Subject, budgets: Sequence[tuple[str, int]], cells: Sequence[Cell]) -> str:
    times = {(one.policy, one.budget): one.report for _, one in cells}
    rows: list[tuple[str, ...]] = [("budget", *POLICIES)]
    for label, budget in budgets:
        found = [times[policy, budget] for policy in POLICIES]
        rows.append((label, *("-" if report is None else format_seconds(report.seconds) for report in found)))
    return "\n".join([*_heading(subject), "step time by budget and policy", columns(rows)])


def _heading(subject: Subject) -> list[str]:
    return [
        *_titles(subject),
        f"  smallest budget {format_bytes(subject.smallest_budget)}, "
        f"in core (nothing moves) from {format_bytes(subject.in_core_budget)} on, "
        f"compute time {format_seconds(subject.costs.compute_seconds)} per step",
    ]


def _titles(subject: Subject) -> list[str]:
    notes = [f"SIMULATED: {subject.simulated}"] if subject.simulated else []
    return [subject.title, *notes, *([NOTE] if subject.costs.is_busy else [])]


def _cell_content(subject: Subject, cell: Cell) -> dict[str, object]:
    label, found = cell
    report = found.report
    return {
        "label": label,
        "budget": found.budget,
        "policy": found.policy,
        "feasible": report is not None,
        "plan_seconds": found.plan_seconds,
        **({} if report is None else _figures_content(subject, found)),
    }


def _draw(subject: Subject, cells: Sequence[Cell], path: Path) -> None:
    lines = {
        policy: sorted((one.budget, one.report.seconds) for _, one in cells if one.policy == policy and one.report)
        for policy in POLICIES
    }
    title = subject.title + (f" (simulated: {subject.simulated})" if subject.simulated else "")
    write_sweep(path, lines, title=title, floor=subject.costs.compute_seconds)


def report_plan(subject: Subject, budget: int, policy: str, options: ReportOptions) -> None:
    """Plan a step and report what is predicted."""
    subject = subject.within(budget)
    planned = planning.plan_step(subject.graph, subject.costs, budget, policy)
    step = ReportedStep(subject.graph, subject.costs, planned, budget, policy, simulated=subject.simulated)
    report_step(options.output, step, subject.title, count=None if options.curve else 0)
    print(f"report: {options.output}")
    if options.trace is not None:
        trace_step(options.trace, step)
        print(f"trace: {options.trace}")


def check(graph: Path, plan: Path, budget: int | None) -> None:
    """Prove that a saved plan computes a graph file's step within a budget, by default the plan file's, and say so.

    Raises ``InputError`` or ``GraphError`` for the files, ``ValidationError`` if the program breaks a promise.
    """
    file = read_graph(graph)
    saved = read_plan(plan, file.keys)
    limit = saved.budget if budget is None else budget
    validate(file.graph, saved.program, limit, file.costs)
    print(
        f"valid: the plan computes the {len(file.graph.ops)} ops of {graph} within {format_bytes(limit)} "
        f"({len(saved.program.instructions)} instructions, {format_bytes(saved.program.arena_bytes)} used, "
        f"policy {saved.plan.policy})"
    )
