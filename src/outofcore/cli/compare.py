"""``outofcore plan --compare`` and ``--sweep``: all policies side by side. Without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outofcore.cli.answer import Answer, Subject, answer, json_text
from outofcore.planning import POLICIES
from outofcore.report import Line, columns, write_chart
from outofcore.units import MIB, format_bytes, format_seconds

# Parts of the budget at which nothing needs to leave; the smallest budget is added to them.
COMPARED = (0.9, 0.5, 0.25, 1 / 7.5)
# How many budgets a sweep tries, from the smallest to a little above that at which nothing needs to leave.
_SWEPT = 9
# The last budget of a sweep, in multiples of the latter.
_ROOMY = 1.05


@dataclass(frozen=True)
class Cell:
    """A policy at a budget."""

    label: str  # of the budget
    answer: Answer


def _compared(subject: Subject) -> list[tuple[str, int]]:
    """The budgets that are compared where none are named, falling, each with its name.

    Parts of the in-core budget that lie below the smallest budget are left out.
    """
    everything, smallest = subject.in_core_budget, subject.smallest_budget
    named = [(f"in core × {part:.3g}", int(everything * part)) for part in COMPARED]
    return [*((name, budget) for name, budget in named if budget > smallest), ("smallest", smallest)]


def _swept(subject: Subject) -> list[tuple[str, int]]:
    """The budgets of a sweep where none are named: rising, at equal ratios."""
    everything, smallest = max(subject.in_core_budget, 1), max(subject.smallest_budget, 1)
    ratio = max(everything * _ROOMY / smallest, 1.0)
    budgets = [int(smallest * ratio ** (step / (_SWEPT - 1))) for step in range(_SWEPT)]
    budgets[0] = smallest
    return [(format_bytes(budget), budget) for budget in dict.fromkeys(budgets)]


def side_by_side(subject: Subject, budgets: Sequence[int], *, swept: bool, as_json: bool, picture: Path | None) -> bool:
    """Print what each policy makes of each budget.

    Args:
        subject: the step.
        budgets: bytes; empty: a choice that suits the step.
        swept: print step times by budget, rather than every figure of each plan.
        as_json: print JSON.
        picture: an HTML file to draw the step times in.

    Returns:
        Whether any policy fits any of the budgets.

    Raises:
        OutOfCoreError: the homes cannot hold what leaves the device.
    """
    named = [(format_bytes(budget), budget) for budget in dict.fromkeys(budgets)]
    named = named or (_swept(subject) if swept else _compared(subject))
    cells = [Cell(label, answer(subject, budget, policy)) for label, budget in named for policy in POLICIES]
    if picture is not None:
        _draw(subject, cells, picture)
    if as_json:
        print(json_text(_content(subject, cells)))
    else:
        print((_sweep_text if swept else _compare_text)(subject, named, cells))
    return any(cell.answer.planned is not None for cell in cells)


def _compare_text(subject: Subject, budgets: Sequence[tuple[str, int]], cells: Sequence[Cell]) -> str:
    compute = subject.costs.compute_seconds
    parts = _heading(subject)
    head = ("policy", "fits", "step", "× ops", "bytes out", "bytes in", "again", "peak", "planned in")
    for label, budget in budgets:
        rows: list[tuple[str, ...]] = [head]
        for cell in cells:
            if cell.answer.budget == budget:
                rows.append((cell.answer.policy, *_figures(subject, cell.answer, compute)))
        parts.append(f"budget {format_bytes(budget)} ({label}, {budget} bytes)")
        parts.append(columns(rows))
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
        format_seconds(found.recompute_seconds(subject.costs)),
        format_bytes(report.peak_bytes),
        took,
    )


def _sweep_text(subject: Subject, budgets: Sequence[tuple[str, int]], cells: Sequence[Cell]) -> str:
    times = {(cell.answer.policy, cell.answer.budget): cell.answer.report for cell in cells}
    rows: list[tuple[str, ...]] = [("budget", *POLICIES)]
    for label, budget in budgets:
        found = [times[policy, budget] for policy in POLICIES]
        rows.append((label, *("-" if report is None else format_seconds(report.seconds) for report in found)))
    return "\n".join([*_heading(subject), "seconds a step, by budget and policy", columns(rows)])


def _heading(subject: Subject) -> list[str]:
    lines = [subject.title]
    if subject.simulated:
        lines.append(f"SIMULATED: {subject.simulated}")
    lines.append(
        f"  in core {format_bytes(subject.in_core_budget)}, smallest {format_bytes(subject.smallest_budget)}, "
        f"ops alone {format_seconds(subject.costs.compute_seconds)} a step"
    )
    return lines


def _content(subject: Subject, cells: Sequence[Cell]) -> dict[str, object]:
    return {
        "workload": subject.title,
        "simulated": subject.simulated or None,
        "in_core_budget": subject.in_core_budget,
        "smallest_budget": subject.smallest_budget,
        "compute_seconds": subject.costs.compute_seconds,
        "cells": [_cell_content(subject, cell) for cell in cells],
    }


def _cell_content(subject: Subject, cell: Cell) -> dict[str, object]:
    found, report = cell.answer, cell.answer.report
    content: dict[str, object] = {
        "label": cell.label,
        "budget": found.budget,
        "policy": found.policy,
        "feasible": report is not None,
        "plan_seconds": found.plan_seconds,
    }
    if report is not None:
        content |= {
            "predicted_step_seconds": report.seconds,
            "peak_bytes": report.peak_bytes,
            "arena_bytes": report.arena_bytes,
            "bytes_out": report.bytes_out,
            "bytes_in": report.bytes_in,
            "recompute_seconds": found.recompute_seconds(subject.costs),
        }
    return content


def _draw(subject: Subject, cells: Sequence[Cell], path: Path) -> None:
    lines: list[Line] = []
    for policy in POLICIES:
        points = [
            (cell.answer.budget / MIB, cell.answer.report.seconds)
            for cell in cells
            if cell.answer.policy == policy and cell.answer.report is not None
        ]
        lines.append(Line(policy, tuple(sorted(points)), bold=policy == "auto"))
    compute = subject.costs.compute_seconds
    title = subject.title + (f" (simulated: {subject.simulated})" if subject.simulated else "")
    write_chart(
        path, lines, title=title, x="budget in MiB", y="seconds a step, predicted", floor=("ops alone", compute)
    )
