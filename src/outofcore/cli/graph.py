"""``outofcore plan --graph`` and ``outofcore validate``: graphs and plans from files. Without PyTorch."""

from __future__ import annotations

from pathlib import Path

from outofcore.cli.answer import Subject
from outofcore.graphfile import read_graph
from outofcore.planfile import read_plan
from outofcore.units import format_bytes
from outofcore.validator import validate


def subject_from(path: Path) -> Subject:
    """The step in a graph file.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not a graph file, or contradicts itself.
    """
    file = read_graph(path)
    return Subject(f"{path}: {len(file.graph.ops)} ops on {len(file.graph.storages)} storages", file)


def check(graph: Path, plan: Path, budget: int | None) -> None:
    """Prove that a saved plan computes the step of a graph file within a budget, and say so.

    Args:
        graph: the graph file.
        plan: the plan file.
        budget: bytes; None: what the plan file says.

    Raises:
        InputError: a file cannot be read.
        GraphError: a file is not of its format, or contradicts itself.
        ValidationError: the program in the plan file breaks a promise.
    """
    file = read_graph(graph)
    saved = read_plan(plan, file.keys)
    limit = saved.budget if budget is None else budget
    validate(file.graph, saved.program, limit, file.costs)
    print(
        f"valid: {len(saved.program.instructions)} instructions compute the {len(file.graph.ops)} ops of {graph} "
        f"within {format_bytes(limit)} (policy {saved.plan.policy}, {format_bytes(saved.program.arena_bytes)} used)"
    )
