"""``outofcore report --steps 0``: what a plan says of a step, without running it. Without PyTorch."""

from __future__ import annotations

from pathlib import Path

from outofcore.cli.answer import Subject
from outofcore.planning import plan_step
from outofcore.reporting import report_step, trace_step


def foresee(subject: Subject, *, budget: int, policy: str, output: Path, trace: Path | None, curve: bool) -> None:
    """Plan a step and report what is predicted.

    Args:
        subject: the step.
        budget: bytes.
        policy: one of ``outofcore.planning.POLICIES``.
        output: the HTML file.
        trace: a file for the trace, if one is wanted.
        curve: plan for other budgets as well.

    Raises:
        BudgetError: the budget cannot hold the step.
        InputError: an argument cannot be used, or a file cannot be written.
    """
    planned = plan_step(subject.graph, subject.costs, budget, policy)
    report_step(
        output,
        subject.graph,
        subject.costs,
        planned,
        None,
        budget=budget,
        title=subject.title,
        count=None if curve else 0,
        policy=policy,
        simulated=subject.simulated,
    )
    print(f"report: {output}")
    if trace is not None:
        trace_step(trace, subject.graph, planned, None)
        print(f"trace: {trace}")
