"""Decide whether a new plan may run: only if ``validator.validate`` passes it.

The validator shares no code with planning and lowering, so a plan that fails is a fault of this library: it is reported
with a file to send, and the next candidate is tried. Stored plans (``step_plans``) and from other processes
(``peers``) go to the validator directly, as there is no next candidate.
"""

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


def proved(graph: StepGraph, costs: Costs, budget: int, candidates: Iterable[Planned]) -> Planned:
    """Return the first candidate, best first, that the validator passes; later ones are generated only if needed.

    ``budget`` is the bytes of the arena. Raises ``BudgetError`` without candidates, ``ValidationError`` if none passes.
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
                "a plan by %s broke a promise, and is not run: %s. This is a fault of outofcore and not yours: please "
                "report it with %s",
                planned.plan.policy,
                error,
                _evidence(graph, costs, budget, planned),
            )
        else:
            if failures:
                _log.warning("the step goes on with another plan, by %s", planned.plan.policy)
            return planned
    raise ValidationError(
        f"none of the {len(failures)} plans that were found keeps its promises ({'; '.join(failures)}). This is a "
        "fault of outofcore and not yours: please report it with the files that the log names, and try another "
        "budget meanwhile"
    )


def _evidence(graph: StepGraph, costs: Costs, budget: int, planned: Planned) -> str:
    """Write what is needed to investigate a plan; return the file, or why there is none."""
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
        return f"what you ran (its graph and plan could not be written: {error})"
    return name
