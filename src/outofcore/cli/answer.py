"""The output of ``plan``, ``report --steps 0`` and ``validate``. Works without PyTorch."""

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
from outofcore.cli.options import AnswerOptions, ReportOptions
from outofcore.costs import Costs
from outofcore.errors import BudgetError, ValidationError
from outofcore.estimation.reports import ReportedStep, report_step, trace_step
from outofcore.estimation.sweep import Estimate, budgets_between, estimate_graph, format_points
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile, read_graph, write_graph
from outofcore.planfile import PlanFile, read_plan, write_plan
from outofcore.planning import POLICIES, Planned
from outofcore.progress import ignore_progress, show_progress
from outofcore.report import (
    Page,
    StepReport,
    columns,
    copies_text,
    page_content,
    step_report,
    step_text,
    write_report,
    write_sweep,
)
from outofcore.units import format_bytes, format_seconds
from outofcore.validator import validate

# Fractions of the in-core budget, by name. A comparison adds the smallest budget.
COMPARED_FRACTIONS = {"0.9": 0.9, "0.5": 0.5, "0.25": 0.25, "0.133": 1 / 7.5}
Printer = Callable[[str], None]


@contextmanager
def answer_printer(*, answers_only: bool) -> Generator[Printer]:
    """Yield a function that prints answers; with ``answers_only``, all other output goes to stderr."""
    if not answers_only:
        yield print
        return
    answers: list[str] = []
    with contextlib.redirect_stdout(sys.stderr), _redirect_descriptor():
        yield answers.append
    for text in answers:
        print(text)


@contextmanager
def _redirect_descriptor() -> Generator[None]:
    """Redirect file descriptor 1 to stderr in the block, so that native code prints to stderr, too."""
    try:
        saved = os.dup(1)
    except OSError:  # the process has no standard output
        yield
        return
    try:
        _flush_native()
        os.dup2(2, 1)
        yield
    finally:
        _flush_native()
        os.dup2(saved, 1)
        os.close(saved)


def _flush_native() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


@dataclass(frozen=True)
class Subject:
    """A step to plan: its graph, costs and title, and a version with split ops if that needs less memory."""

    title: str
    file: GraphFile
    simulated: str = ""  # the device of simulated costs and their source; empty if costs were measured
    split_file: GraphFile | None = None  # the step with split ops, if that needs less memory

    @property
    def graph(self) -> StepGraph:
        return self.file.graph

    @property
    def costs(self) -> Costs:
        return self.file.costs

    @cached_property
    def smallest_budget(self) -> int:
        """The smallest budget in bytes that has a plan; ops may be split."""
        split_step = self.split_file
        split_budget = (
            self.whole_budget if split_step is None else planning.smallest_budget(split_step.graph, split_step.costs)
        )
        return min(split_budget, self.whole_budget)

    @cached_property
    def whole_budget(self) -> int:
        """The smallest budget in bytes that has a plan if no op is split."""
        return planning.smallest_budget(self.graph, self.costs)

    def for_budget(self, budget: int | None) -> Subject:
        """Return the step, or its version with split ops if the whole ops do not fit the budget."""
        if self.split_file is None or budget is None or budget >= self.whole_budget:
            return self
        return replace(self, title=f"{self.title}, large ops split", file=self.split_file, split_file=None)

    @cached_property
    def in_core_budget(self) -> int:
        """The smallest budget in bytes at which all tensors stay resident."""
        return planning.in_core_budget(self.graph, self.costs)


def read_subject(path: Path) -> Subject:
    file = read_graph(path)
    return Subject(f"{path}: {len(file.graph.ops)} ops on {len(file.graph.storages)} storages", file)


@dataclass(frozen=True)
class PolicyResult:
    policy: str
    budget: int
    planned: Planned | None  # None if the policy finds no plan
    report: StepReport | None
    refusal: BudgetError | None  # why there is no plan
    plan_seconds: float  # includes placement and simulation


def plan_subject(subject: Subject, budget: int, policy: str) -> PolicyResult:
    """Plan a step within a budget. The result contains the plan, or the ``BudgetError`` if no plan fits."""
    start = perf_counter()
    subject = subject.for_budget(budget)
    try:
        planned = planning.plan_step(subject.graph, subject.costs, budget, policy)
    except BudgetError as error:
        return PolicyResult(policy, budget, None, None, error, perf_counter() - start)
    seconds = perf_counter() - start
    report = step_report(subject.graph, planned.plan, planned.program, planned.timeline, budget)
    return PolicyResult(policy, budget, planned, report, None, seconds)


def print_plan(subject: Subject, budget: int | None, policy: str, options: AnswerOptions, printer: Printer) -> bool:
    """Print a step's memory needs and, with a budget, its plan; return False if no plan fits the budget."""
    whole_subject, subject = subject, subject.for_budget(budget)
    if options.save_graph is not None:
        write_graph(options.save_graph, subject.file)
    result = None if budget is None else plan_subject(subject, budget, policy)
    if result is not None and result.planned is not None:
        planned, timeline = result.planned, result.planned.timeline
        if options.save_plan is not None:
            content = PlanFile(result.budget, planned.plan, planned.program, timeline.step_seconds)
            write_plan(options.save_plan, content, subject.file.keys)
        if options.picture is not None:
            timelines = [("simulated" if subject.simulated else "predicted", timeline)]
            page = Page(subject.title, result.budget)
            content = page_content(subject.graph, planned.plan, planned.program, timelines, page)
            write_report(options.picture, content)
    bound = None if budget is None else planning.lower_bound_seconds(subject.graph, subject.costs, budget)
    forecast = None
    if options.curve:
        with show_progress(ignore_progress if options.as_json else None) as tell:
            split_step = whole_subject.split_file
            forecast = estimate_graph(
                whole_subject.graph,
                whole_subject.costs,
                parts=None if split_step is None else (split_step.graph, split_step.costs),
                budgets=[] if budget is None else [budget],
                policy=policy,
                machine=subject.simulated,
                tell=tell,
            )
    if options.as_json:
        content = _plan_json_fields(whole_subject, result, bound)
        if forecast is not None:
            content |= {
                "lossless_budget": forecast.lossless_budget,
                "points": [asdict(point) for point in forecast.points],
            }
        printer(json.dumps(content, indent=2))
    else:
        printer(_plan_text(whole_subject, result, bound, forecast))
    return result is None or result.planned is not None


def _plan_json_fields(
    subject: Subject, result: PolicyResult | None, lower_bound_seconds: float | None
) -> dict[str, object]:
    report = None if result is None else result.report
    content = _step_json_fields(subject) | {
        "policy": None if result is None else result.policy,
        "budget": None if result is None else result.budget,
        "feasible": None if result is None else report is not None,
        "fits": None if result is None else report is not None,
        **_figures_json_fields(subject, result),
        "lower_bound_seconds": lower_bound_seconds,
        "plan_seconds": None if result is None else result.plan_seconds,
    }
    if result is not None and result.refusal is not None:
        content["reason"] = str(result.refusal)
    if report is not None:
        moved = [{**asdict(m), "kind": m.kind.value} for m in report.moved]
        content["predicted"] = {**asdict(report), "moved": moved}
    return content


def _step_json_fields(subject: Subject) -> dict[str, object]:
    return {
        "workload": subject.title,
        "simulated": subject.simulated or None,
        "smallest_budget": subject.smallest_budget,
        "whole_budget": subject.whole_budget,
        "in_core_budget": subject.in_core_budget,
        "compute_seconds": subject.costs.compute_seconds,
        "measured_while_busy": subject.costs.is_busy,
    }


def _figures_json_fields(subject: Subject, result: PolicyResult | None) -> dict[str, object]:
    report = None if result is None else result.report
    return {
        "predicted_step_seconds": report and report.seconds,
        "peak_bytes": report and report.peak_bytes,
        "arena_bytes": report and report.arena_bytes,
        "bytes_out": report and report.bytes_out,
        "bytes_in": report and report.bytes_in,
        "recompute_seconds": report and report.again_seconds(subject.costs),
    }


def _plan_text(
    subject: Subject,
    result: PolicyResult | None,
    lower_bound_seconds: float | None,
    forecast: Estimate | None,
) -> str:
    """Return the text that ``outofcore plan`` prints; ``forecast`` contains step times for several budgets."""
    report = None if result is None else result.report
    is_split = subject.smallest_budget < subject.whole_budget
    splitting = ", with large ops split" if is_split else ""
    rows = [("smallest budget", f"{_bytes_text(subject.smallest_budget)}{splitting}")]
    if is_split:
        rows.append(("without splitting", _bytes_text(subject.whole_budget)))
    if forecast is not None:
        rows.append(("no slowdown", f"from {_bytes_text(forecast.lossless_budget)} on, at most 1 % slower"))
    rows.append(("nothing moves", f"from {_bytes_text(subject.in_core_budget)} on"))
    compute = f"{format_seconds(subject.costs.compute_seconds)} per step"
    if result is not None:
        whole = subject.for_budget(result.budget) is subject
        if report is None:
            verdict = "does not fit"
        elif whole:
            verdict = "fits, with copies" if report.moved else "fits, and nothing moves"
        else:
            verdict = "fits, with large ops split" + (" and copies" if report.moved else "; nothing moves")
            compute += (
                f", {format_seconds(subject.for_budget(result.budget).costs.compute_seconds)} with large ops split"
            )
        rows.append(("budget", f"{_bytes_text(result.budget)}: {verdict}"))
    rows.append(("compute time", compute))
    if report is not None and lower_bound_seconds is not None:
        over = report.seconds / lower_bound_seconds - 1 if lower_bound_seconds else 0.0
        rows.append(
            (
                "lower bound",
                f"{format_seconds(lower_bound_seconds)} per step; the plan takes {max(over, 0.0):.1%} longer",
            )
        )
    lines = _title_lines(subject)
    lines.append("\n".join(f"  {name:<18} {value}" for name, value in rows))
    if result is not None and result.refusal is not None:
        lines.append(str(result.refusal))
    if report is not None:
        lines += [f"{'simulated' if subject.simulated else 'predicted'} step", step_text(report), copies_text(report)]
    if forecast is not None:
        lines += ["step time over budgets", format_points(forecast.points)]
    return "\n".join(lines)


def _bytes_text(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)"


# The label of a budget, and the result of a policy at it.
Cell = tuple[str, PolicyResult]


def _comparison_budgets(subject: Subject) -> list[tuple[str, int]]:
    """Return the default budgets of a comparison as pairs of name and bytes, largest first."""
    in_core_bytes, smallest = subject.in_core_budget, subject.smallest_budget
    named = [(f"in core × {name}", int(in_core_bytes * fraction)) for name, fraction in COMPARED_FRACTIONS.items()]
    return [*((name, budget) for name, budget in named if budget > smallest), ("smallest", smallest)]


def _sweep_budgets(subject: Subject) -> list[tuple[str, int]]:
    budgets = budgets_between(subject.smallest_budget, int(1.05 * subject.in_core_budget), 9)
    return [(format_bytes(budget), budget) for budget in budgets]


def print_comparison(subject: Subject, budgets: Sequence[int], options: AnswerOptions, printer: Printer) -> bool:
    """Print a comparison of all policies at several budgets; return whether any plan fits."""
    named = [(format_bytes(budget), budget) for budget in dict.fromkeys(budgets)]
    named = named or (_sweep_budgets(subject) if options.sweep else _comparison_budgets(subject))
    results = [(label, plan_subject(subject, budget, policy)) for label, budget in named for policy in POLICIES]
    if options.picture is not None:
        _write_sweep_page(subject, results, options.picture)
    if options.as_json:
        content = _step_json_fields(subject) | {"cells": [_comparison_json_fields(subject, cell) for cell in results]}
        printer(json.dumps(content, indent=2))
    else:
        printer((_sweep_table if options.sweep else _comparison_tables)(subject, named, results))
    return any(result.planned is not None for _, result in results)


def _comparison_tables(subject: Subject, budgets: Sequence[tuple[str, int]], results: Sequence[Cell]) -> str:
    compute_seconds = subject.costs.compute_seconds
    lines = _heading_lines(subject)
    head = ("policy", "fits", "step", "slowdown", "evicted", "fetched", "recompute", "peak", "planning")
    for label, budget in budgets:
        rows = [
            (result.policy, *_figure_texts(subject, result, compute_seconds))
            for _, result in results
            if result.budget == budget
        ]
        name = "" if label == format_bytes(budget) else f", {label}"
        lines.append(f"budget {_bytes_text(budget)}{name}")
        lines.append(columns([head, *rows]))
    return "\n".join(lines)


def _figure_texts(subject: Subject, result: PolicyResult, compute_seconds: float) -> tuple[str, ...]:
    """Return the figures of a plan as cells of a table row; a dash replaces an unknown figure."""
    report = result.report
    plan_time = format_seconds(result.plan_seconds)
    if report is None:
        return ("no", "-", "-", "-", "-", "-", "-", plan_time)
    return (
        "yes",
        format_seconds(report.seconds),
        f"{report.seconds / compute_seconds:.3f}" if compute_seconds else "-",
        format_bytes(report.bytes_out),
        format_bytes(report.bytes_in),
        format_seconds(report.again_seconds(subject.costs)),
        format_bytes(report.peak_bytes),
        plan_time,
    )


def _sweep_table(subject: Subject, budgets: Sequence[tuple[str, int]], results: Sequence[Cell]) -> str:
    times = {(result.policy, result.budget): result.report for _, result in results}
    rows: list[tuple[str, ...]] = [("budget", *POLICIES)]
    for label, budget in budgets:
        reports = [times[policy, budget] for policy in POLICIES]
        rows.append((label, *("-" if report is None else format_seconds(report.seconds) for report in reports)))
    return "\n".join([*_heading_lines(subject), "step time by budget and policy", columns(rows)])


def _heading_lines(subject: Subject) -> list[str]:
    return [
        *_title_lines(subject),
        f"  smallest budget {format_bytes(subject.smallest_budget)}, "
        f"in core (nothing moves) from {format_bytes(subject.in_core_budget)} on, "
        f"compute time {format_seconds(subject.costs.compute_seconds)} per step",
    ]


def _title_lines(subject: Subject) -> list[str]:
    notes = [f"SIMULATED: {subject.simulated}"] if subject.simulated else []
    return [subject.title, *notes, *([NOTE] if subject.costs.is_busy else [])]


def _comparison_json_fields(subject: Subject, labelled_result: Cell) -> dict[str, object]:
    label, result = labelled_result
    report = result.report
    return {
        "label": label,
        "budget": result.budget,
        "policy": result.policy,
        "feasible": report is not None,
        "plan_seconds": result.plan_seconds,
        **({} if report is None else _figures_json_fields(subject, result)),
    }


def _write_sweep_page(subject: Subject, results: Sequence[Cell], path: Path) -> None:
    """Write an HTML chart of step time over budget, with a line for each policy."""
    lines = {
        policy: sorted(
            (result.budget, result.report.seconds) for _, result in results if result.policy == policy and result.report
        )
        for policy in POLICIES
    }
    title = subject.title + (f" (simulated: {subject.simulated})" if subject.simulated else "")
    write_sweep(path, lines, title=title, floor=subject.costs.compute_seconds)


def write_plan_report(subject: Subject, budget: int, policy: str, options: ReportOptions) -> None:
    """Plan a step, and write an HTML report of it; also a trace file if ``options`` names one."""
    subject = subject.for_budget(budget)
    planned = planning.plan_step(subject.graph, subject.costs, budget, policy)
    step = ReportedStep(subject.graph, subject.costs, planned, budget, policy, simulated=subject.simulated)
    report_step(options.output, step, subject.title, count=None if options.curve else 0)
    print(f"report: {options.output}")
    if options.trace is not None:
        trace_step(options.trace, step)
        print(f"trace: {options.trace}")


def check_plan_file(graph: Path, plan: Path, budget: int | None) -> None:
    """Check that a saved plan computes its step within a budget; raise ``ValidationError`` if it does not."""
    file = read_graph(graph)
    saved = read_plan(plan, file.keys)
    limit = saved.budget if budget is None else budget
    try:
        validate(file.graph, saved.program, limit, file.costs)
    except ValidationError as error:
        raise ValidationError(
            f"{plan} is not a valid plan of {graph} within {format_bytes(limit)}: {error}. Make the plan again; if "
            "outofcore made this one for this graph, please report it with both files"
        ) from None
    print(
        f"valid: the plan computes the {len(file.graph.ops)} ops of {graph} within {format_bytes(limit)} "
        f"({len(saved.program.instructions)} instructions, {format_bytes(saved.program.arena_bytes)} used, "
        f"policy {saved.plan.policy})"
    )
