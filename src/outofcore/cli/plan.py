"""``outofcore plan``: whether a model fits, without training it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outofcore import planning
from outofcore.capture import capture_step
from outofcore.cli.common import find_workload, open_home
from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.planning import Planned
from outofcore.profiling.links import measure_link
from outofcore.profiling.ops import profile_ops
from outofcore.report import StepReport, moved_text, step_report, step_text, write_picture
from outofcore.units import format_bytes, format_seconds
from outofcore.zoo import Workload


@dataclass(frozen=True)
class Survey:
    """A step captured and measured on this machine, without a budget yet."""

    graph: StepGraph
    costs: Costs

    @property
    def smallest_budget(self) -> int:
        """The least bytes that can hold the step."""
        return planning.smallest_budget(self.graph, self.costs)

    @property
    def in_core_budget(self) -> int:
        """The bytes from which on nothing needs to move."""
        return planning.in_core_budget(self.graph, self.costs)


def survey(work: Workload, home: str, tell: Callable[[str, int, int], None]) -> Survey:
    """Capture a workload's step and measure its ops and the home. The model is let go of again.

    Args:
        work: the workload.
        home: as on the command line.
        tell: called with the stage, and how much of it is done.

    Raises:
        SpillError: the home cannot be used.
        CaptureError: the step cannot become one graph.
    """
    store = open_home(home)
    try:
        model = work.build()
        optimizer = work.optimizer(model)
        tell("capture", 0, 1)
        captured = capture_step(work.make_step(model, optimizer), [model], [optimizer], next(work.batches()), {})
        profiles = profile_ops(captured, advance=lambda done, total: tell("profile", done, total))
        tell("measure the home", 0, 1)
        link = measure_link(store).home
    finally:
        store.close()
    return Survey(captured.graph, Costs(tuple(profile.cost for profile in profiles), (link,)))


def plan(
    model: str,
    options: Mapping[str, Any],
    *,
    budget: int | None,
    home: str,
    policy: str,
    picture: Path | None,
    as_json: bool,
) -> bool:
    """Print what a step would need and do; True unless it does not fit the budget.

    Raises:
        OutOfCoreError: an argument cannot be used, or the step cannot be captured.
    """
    work = find_workload(model, options)
    found = survey(work, home, _silent if as_json else _to_stderr)
    planned, refusal = _planned(found, budget, policy)
    report = None
    if planned is not None and budget is not None:
        report = step_report(found.graph, planned.plan, planned.program, planned.timeline, budget)
        if picture is not None:
            timelines = [("predicted", planned.timeline)]
            write_picture(picture, found.graph, planned.program, timelines, budget=budget, title=work.describe())
    print(_json(work, found, budget, report) if as_json else _text(work, found, budget, report, refusal))
    return refusal is None


def _planned(found: Survey, budget: int | None, policy: str) -> tuple[Planned | None, BudgetError | None]:
    if budget is None:
        return None, None
    try:
        return planning.plan_step(found.graph, found.costs, budget, policy), None
    except BudgetError as error:
        return None, error


def _text(
    work: Workload, found: Survey, budget: int | None, report: StepReport | None, refusal: BudgetError | None
) -> str:
    rows = [
        ("in core", f"{format_bytes(found.in_core_budget)} ({found.in_core_budget} bytes)"),
        ("smallest budget", f"{format_bytes(found.smallest_budget)} ({found.smallest_budget} bytes)"),
        ("ops alone", f"{format_seconds(found.costs.compute_seconds)} a step"),
    ]
    if budget is not None:
        verdict = "does not fit" if report is None else "fits, with copies" if report.moved else "fits in core"
        rows.append(("the budget", f"{format_bytes(budget)}: {verdict}"))
    parts = [work.describe(), "\n".join(f"  {name:<16} {value}" for name, value in rows)]
    if refusal is not None:
        parts.append(str(refusal))
    if report is not None:
        parts += ["predicted", step_text(report), moved_text(report)]
    return "\n".join(parts)


def _json(work: Workload, found: Survey, budget: int | None, report: StepReport | None) -> str:
    content: dict[str, object] = {
        "workload": work.describe(),
        "in_core_budget": found.in_core_budget,
        "smallest_budget": found.smallest_budget,
        "compute_seconds": found.costs.compute_seconds,
        "budget": budget,
        "fits": None if budget is None else report is not None,
    }
    if report is not None:
        moved = [{**asdict(m), "kind": m.kind.value} for m in report.moved]
        content["predicted"] = {**asdict(report), "moved": moved}
    return json.dumps(content, indent=2)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _to_stderr(stage: str, done: int, total: int) -> None:
    """What goes on, on one line that is overwritten; nothing where nobody looks on."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{stage} {done}/{total}" if done < total else "\r\033[K")
        sys.stderr.flush()
