"""Plans of compiled steps on disk, so that the next process has them before its first step.

There is one file for each step, budget and policy, in the folder of the measurements. A plan whose costs have changed
stays correct, but may be slower. A plan is proved before it runs; a damaged file, or one of another step, is ignored. A
plan from a quick search is kept until there is a better one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from outofcore.compiling import private_folder
from outofcore.costs import Costs
from outofcore.errors import OutOfCoreError
from outofcore.graph import StepGraph
from outofcore.planfile import FORMAT, PlanFile, read_plan, write_plan
from outofcore.planning import POLICIES, Planned, Policy, policy_of
from outofcore.simulator import simulate
from outofcore.validator import validate

_log = logging.getLogger("outofcore")

# What was used longest ago goes first.
_MOST_FILES = 200


@dataclass(frozen=True)
class StepPlans:
    """Plans in a folder; with None it keeps none."""

    folder: Path | None

    def find(self, graph: StepGraph, costs: Costs, budget: int, policy: Policy) -> tuple[Planned, bool] | None:
        """Return the stored plan of a step, with its timeline under these costs, if the validator passes it.

        The flag tells whether a quick search has found it.
        """
        best = self._path(graph, costs, budget, policy)
        if best is None:
            return None
        path = next((one for one in (best, _quick(best)) if one.exists()), None)
        if path is None:
            return None
        try:
            found = read_plan(path, range(len(graph.storages)))
            validate(graph, found.program, budget, costs)
            os.utime(path)
        except (OutOfCoreError, OSError) as error:
            _log.warning("a plan that was kept is made anew: %s", error)
            return None
        return Planned(found.plan, found.program, simulate(graph, costs, found.program)), path != best

    def keep(
        self, graph: StepGraph, costs: Costs, budget: int, policy: Policy, planned: Planned, *, is_quick: bool = False
    ) -> None:
        """Keep a plan for later processes; ``is_quick``: a quick search has found it."""
        best = self._path(graph, costs, budget, policy)
        if best is None or (is_quick and best.exists()):
            return
        path = _quick(best) if is_quick else best
        file = PlanFile(budget, planned.plan, planned.program, planned.timeline.step_seconds)
        try:
            folder = private_folder(path.parent)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                whole = Path(beside, path.name)
                write_plan(whole, file, range(len(graph.storages)))
                whole.replace(path)
            if not is_quick:
                _quick(best).unlink(missing_ok=True)
            kept = sorted(folder.glob("plan-*.json"), key=lambda one: one.stat().st_mtime)
            for one in kept[:-_MOST_FILES]:
                one.unlink(missing_ok=True)
        except (OutOfCoreError, OSError) as error:
            _log.info("a plan is not kept for later processes: %s", error)

    def _path(self, graph: StepGraph, costs: Costs, budget: int, policy: Policy) -> Path | None:
        # What a policy of the user's does may change while its name does not.
        if self.folder is None or policy.name not in POLICIES or type(policy) is not type(policy_of(policy.name)):
            return None
        ops = [replace(op, source="") for op in graph.ops]
        needs = [cost.workspace_bytes for cost in costs.ops]
        homes = [home.name for home in costs.homes]
        text = repr((FORMAT, library_version(), budget, policy, ops, graph.storages, graph.outputs, needs, homes))
        return self.folder / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _quick(path: Path) -> Path:
    return path.with_stem(f"{path.stem}-quick")


def library_version() -> str:
    """Return the version of this library; empty if it is not installed."""
    try:
        return metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        return ""
