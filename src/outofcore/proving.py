"""Run only plans that the validator accepts; log each rejected plan as a bug of this library."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from outofcore.costs import Costs
from outofcore.errors import BudgetError, InputError, ValidationError
from outofcore.graph import StepGraph
from outofcore.graphfile import GraphFile, write_graph
from outofcore.planfile import PlanFile, write_plan
from outofcore.planning import Planned
from outofcore.validator import validate

_log = logging.getLogger("outofcore")


def prove_plan(graph: StepGraph, costs: Costs, budget: int, candidates: Iterable[Planned]) -> Planned:
    """Return the first candidate plan that the validator accepts; ``budget`` is the arena size in bytes.

    Raises ``ValidationError`` if every candidate is invalid, ``BudgetError`` if ``candidates`` raises it at the start.
    """
    failures: list[str] = []
    plans = iter(candidates)
    while True:
        try:
            planned = next(plans, None)
        except BudgetError:
            if not failures:
                raise
            planned = None
        if planned is None:
            break
        try:
            validate(graph, planned.program, budget, costs)
        except ValidationError as error:
            failures.append(f"by {planned.plan.policy}: {error}")
            _log.error(
                "the validator rejected a plan by %s, which will not run: %s. This is a bug in outofcore: please "
                "report it with %s",
                planned.plan.policy,
                error,
                _write_evidence(graph, costs, budget, planned),
            )
        else:
            if failures:
                _log.warning("the step uses another plan, by %s", planned.plan.policy)
            return planned
    raise ValidationError(
        f"no plan is valid: the validator rejected {len(failures)} plans ({'; '.join(failures)}). This is a bug in "
        "outofcore: please report it with the files that the log names, and try another budget"
    )


def _write_evidence(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> str:
    """Write graph and plan to a zip file for a bug report; return the file's name, or a hint if that fails."""
    keys = GraphFile.of(graph, costs).keys
    try:
        with tempfile.TemporaryDirectory() as folder:
            parts = (Path(folder, "graph.json"), Path(folder, "plan.json"))
            write_graph(parts[0], GraphFile.of(graph, costs))
            write_plan(parts[1], PlanFile(budget, planned.plan, planned.program, planned.timeline.step_seconds), keys)
            descriptor, name = tempfile.mkstemp(prefix="outofcore-fault-", suffix=".zip")
            os.close(descriptor)
            with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as archive:
                for part in parts:
                    archive.write(part, part.name)
    except (OSError, InputError) as error:
        return f"your program (its graph and plan could not be written: {error})"
    return name
