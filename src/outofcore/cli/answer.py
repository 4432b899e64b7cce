"""A step to be planned, wherever it comes from, and what planning it says. Without PyTorch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

from outofcore import planning
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.forecast import Estimate, estimated, points_text
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile, write_graph
from outofcore.planfile import PlanFile, write_plan
from outofcore.planning import Planned
from outofcore.progress import following, silent
from outofcore.report import StepReport, moved_text, step_report, step_text, write_picture
from outofcore.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Subject:
    """A step with its costs, and what it is called.

    Attributes:
        title: one line for people.
        file: graph, costs, and what a file calls the storages.
        simulated: where the costs were not measured: of what device they are, and how they were come by.
    """

    title: str
    file: GraphFile
    simulated: str = ""

    @property
    def graph(self) -> StepGraph:
        """The step."""
        return self.file.graph

    @property
    def costs(self) -> Costs:
        """What its ops and homes cost."""
        return self.file.costs

    @cached_property
    def smallest_budget(self) -> int:
        """The least bytes that can hold the step."""
        return planning.smallest_budget(self.graph, self.costs)

    @cached_property
    def in_core_budget(self) -> int:
        """The bytes from which on nothing needs to move."""
        return planning.in_core_budget(self.graph, self.costs)


@dataclass(frozen=True)
class Wish:
    """What is to become of a plan, besides being summed up.

    Attributes:
        policy: one of ``planning.POLICIES``.
        as_json: print JSON.
        picture: an HTML file to draw the memory of the step in.
        save_graph: a file to write the graph to.
        save_plan: a file to write the plan to.
        curve: plan for other budgets as well, and tell from which on nothing is lost.
    """

    policy: str = "auto"
    as_json: bool = False
    picture: Path | None = None
    save_graph: Path | None = None
    save_plan: Path | None = None
    curve: bool = False


@dataclass(frozen=True)
class Answer:
    """What one policy makes of one budget.

    Attributes:
        planned: None where the policy finds no plan.
        refusal: why it does not.
        plan_seconds: that planning took, placing and simulating included.
    """

    policy: str
    budget: int
    planned: Planned | None
    report: StepReport | None
    refusal: BudgetError | None
    plan_seconds: float

    def recompute_seconds(self, costs: Costs) -> float:
        """Seconds of ops that run again."""
        return 0.0 if self.report is None else max(self.report.compute_seconds - costs.compute_seconds, 0.0)


def answer(subject: Subject, budget: int, policy: str) -> Answer:
    """Plan a step.

    Raises:
        InputError: the policy is not known, or the homes cannot hold what leaves the device.
    """
    start = perf_counter()
    try:
        planned = planning.plan_step(subject.graph, subject.costs, budget, policy)
    except BudgetError as error:
        return Answer(policy, budget, None, None, error, perf_counter() - start)
    seconds = perf_counter() - start
    report = step_report(subject.graph, planned.plan, planned.program, planned.timeline, budget)
    return Answer(policy, budget, planned, report, None, seconds)


def present(subject: Subject, budget: int | None, wish: Wish) -> bool:
    """Plan where there is a budget, print what comes of it, and write the files asked for; False: it does not fit.

    Raises:
        OutOfCoreError: an argument cannot be used, or a file cannot be written.
    """
    if wish.save_graph is not None:
        write_graph(wish.save_graph, subject.file)
    found = None if budget is None else answer(subject, budget, wish.policy)
    if found is not None and found.planned is not None:
        planned, timeline = found.planned, found.planned.timeline
        if wish.save_plan is not None:
            content = PlanFile(found.budget, planned.plan, planned.program, timeline.step_seconds)
            write_plan(wish.save_plan, content, subject.file.keys)
        if wish.picture is not None:
            timelines = [("simulated" if subject.simulated else "predicted", timeline)]
            write_picture(
                wish.picture, subject.graph, planned.program, timelines, budget=found.budget, title=subject.title
            )
    bound = None if budget is None else planning.lower_bound_seconds(subject.graph, subject.costs, budget)
    forecast = _forecast(subject, budget, wish) if wish.curve else None
    if wish.as_json:
        print(json_text(content_of(subject, found, bound) | _forecast_content(forecast)))
    else:
        print(_text(subject, found, bound, forecast))
    return found is None or found.planned is not None


def _forecast(subject: Subject, budget: int | None, wish: Wish) -> Estimate:
    with following(silent if wish.as_json else None) as tell:
        return estimated(
            subject.graph,
            subject.costs,
            budgets=[] if budget is None else [budget],
            policy=wish.policy,
            machine=subject.simulated,
            tell=tell,
        )


def _forecast_content(forecast: Estimate | None) -> dict[str, object]:
    if forecast is None:
        return {}
    return {"lossless_budget": forecast.lossless_budget, "points": [asdict(point) for point in forecast.points]}


def json_text(content: object) -> str:
    """JSON as the commands print it."""
    return json.dumps(content, indent=2)


def content_of(subject: Subject, found: Answer | None, bound: float | None) -> dict[str, object]:
    """An answer as JSON. Bytes and seconds throughout; null where nothing fits or nothing was asked."""
    report = None if found is None else found.report
    content: dict[str, object] = {
        "workload": subject.title,
        "simulated": subject.simulated or None,
        "policy": None if found is None else found.policy,
        "budget": None if found is None else found.budget,
        "feasible": None if found is None else report is not None,
        "fits": None if found is None else report is not None,
        "smallest_budget": subject.smallest_budget,
        "in_core_budget": subject.in_core_budget,
        "compute_seconds": subject.costs.compute_seconds,
        "predicted_step_seconds": None if report is None else report.seconds,
        "lower_bound_seconds": bound,
        "peak_bytes": None if report is None else report.peak_bytes,
        "arena_bytes": None if report is None else report.arena_bytes,
        "bytes_out": None if report is None else report.bytes_out,
        "bytes_in": None if report is None else report.bytes_in,
        "recompute_seconds": None if found is None or report is None else found.recompute_seconds(subject.costs),
        "plan_seconds": None if found is None else found.plan_seconds,
    }
    if found is not None and found.refusal is not None:
        content["reason"] = str(found.refusal)
    if report is not None:
        moved = [{**asdict(m), "kind": m.kind.value} for m in report.moved]
        content["predicted"] = {**asdict(report), "moved": moved}
    return content


def _text(
    subject: Subject,
    found: Answer | None,
    bound: float | None,
    forecast: Estimate | None,
) -> str:
    report = None if found is None else found.report
    rows = [
        ("in core", f"{format_bytes(subject.in_core_budget)} ({subject.in_core_budget} bytes)"),
        ("smallest budget", f"{format_bytes(subject.smallest_budget)} ({subject.smallest_budget} bytes)"),
        ("ops alone", f"{format_seconds(subject.costs.compute_seconds)} a step"),
    ]
    if forecast is not None:
        enough = forecast.lossless_budget
        rows.insert(1, ("nothing lost", f"from {format_bytes(enough)} ({enough} bytes) on: at most 1 % slower"))
    if found is not None:
        verdict = "does not fit" if report is None else "fits, with copies" if report.moved else "fits in core"
        rows.append(("the budget", f"{format_bytes(found.budget)}: {verdict}"))
    if report is not None and bound is not None:
        over = report.seconds / bound - 1 if bound else 0.0
        rows.append(("lower bound", f"{format_seconds(bound)}: the plan is within {max(over, 0.0):.1%} of the best"))
    parts = [subject.title]
    if subject.simulated:
        parts.append(f"SIMULATED: {subject.simulated}")
    parts.append("\n".join(f"  {name:<16} {value}" for name, value in rows))
    if found is not None and found.refusal is not None:
        parts.append(str(found.refusal))
    if report is not None:
        parts += ["simulated" if subject.simulated else "predicted", step_text(report), moved_text(report)]
    if forecast is not None:
        parts += ["step time over budgets", points_text(forecast.points)]
    return "\n".join(parts)
