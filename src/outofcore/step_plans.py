"""Plans of compiled steps on disk, so that the next process has them before its first step.

One file for each step, budget and policy, in the folder of the measurements. Times are no part of its name: a plan
stays right where they change, and is as good as they are alike. What is read is proved before it runs; a file that is
damaged, or of another step, is left out of account.
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
    """Plans in a folder; None: none are kept."""

    folder: Path | None

    def find(self, graph: StepGraph, costs: Costs, budget: int, policy: Policy) -> Planned | None:
        """The plan of such a step, with its timeline under these costs, if one is kept and the validator passes it."""
        path = self._path(graph, costs, budget, policy)
        if path is None or not path.exists():
            return None
        try:
            found = read_plan(path, range(len(graph.storages)))
            validate(graph, found.program, budget, costs)
            os.utime(path)
        except (OutOfCoreError, OSError) as error:
            _log.warning("a plan that was kept is made anew: %s", error)
            return None
        return Planned(found.plan, found.program, simulate(graph, costs, found.program))

    def keep(self, graph: StepGraph, costs: Costs, budget: int, policy: Policy, planned: Planned) -> None:
        """Keep a plan for later processes."""
        path = self._path(graph, costs, budget, policy)
        if path is None:
            return
        file = PlanFile(budget, planned.plan, planned.program, planned.timeline.step_seconds)
        try:
            folder = private_folder(path.parent)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                whole = Path(beside, path.name)
                write_plan(whole, file, range(len(graph.storages)))
                whole.replace(path)
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
        text = repr((FORMAT, _version(), budget, policy, ops, graph.storages, graph.outputs, needs, homes))
        return self.folder / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _version() -> str:
    try:
        return metadata.version("outofcore")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        return ""
