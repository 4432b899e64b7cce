"""Plans of compiled steps in the store, so that a step whose plan is known starts without planning.

A plan is stored for a step as it was captured, with the variant that was chosen for it: the next process makes that
variant alone. The plan is proved before it runs, whatever was stored. One from a quick search is replaced once there is
a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from outofcore.costs import Costs
from outofcore.errors import GraphError
from outofcore.graph import StepGraph
from outofcore.plan_store import Document, PlanStore, key_of
from outofcore.planfile import FORMAT as PLAN_FORMAT
from outofcore.planfile import PlanDocument, PlanFile, document_of, plan_of
from outofcore.planning import POLICIES, Planned, Policy, policy_of
from outofcore.simulator import simulate
from outofcore.validator import validate
from outofcore.variant import Variant

_FORMAT = "outofcore-chosen/1"

_Bytes = Annotated[int, Meta(ge=0, le=2**62)]
_Step = TypeVar("_Step")


class _File(Document):
    variant: Variant
    is_quick: bool
    needs: tuple[_Bytes, ...]  # scratch memory of the ops
    workspaces: dict[str, _Bytes]
    plan: PlanDocument
    is_busy: bool = False


@dataclass(frozen=True)
class Choice:
    """A variant that was chosen for a step.

    Attributes:
        key: of the step and all that decides, in the store.
        variant: the variant.
        workspaces: scratch bytes of whole ops by family, from which it follows how finely a variant's ops are split;
            empty if they are whole.
    """

    key: str
    variant: Variant
    workspaces: Mapping[str, int] = field(default_factory=dict[str, int], repr=False)


@dataclass(frozen=True)
class StoredPlan:
    """A plan as it was stored, not yet proved.

    Attributes:
        choice: the variant that it is for.
        is_quick: whether a quick search has found it.
        is_busy: whether it was made for costs of a busy machine.
    """

    choice: Choice
    is_quick: bool
    is_busy: bool
    _file: _File
    _path: Path

    def proved(self, graph: StepGraph, costs: Costs, budget: int) -> Planned:
        """Return the plan for its variant's graph, with its timeline under these costs.

        Raises:
            GraphError: it was made for other scratch memory, or names what the graph does not have.
            ValidationError: it does not pass the validator.
        """
        if self._file.needs != _needs(costs):
            raise GraphError(f"{self._path}: ops need other scratch memory than when it was made")
        found = plan_of(self._file.plan, range(len(graph.storages)), self._path)
        validate(graph, found.program, budget, costs)
        return Planned(found.plan, found.program, simulate(graph, costs, found.program))


class StepPlans:
    """The plans of compiled steps in a folder; with None it keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self._store = PlanStore(folder, "plan", _FORMAT, _File)

    def key(self, graph: StepGraph, policy: Policy, *facts: object) -> str:
        """Return the key of a step as it was captured; empty if its plan is not to be stored.

        Args:
            graph: the step. Where its ops stand in the user's source is no part of it.
            policy: how it is planned.
            facts: all else that decides, except for costs; ``repr`` tells them apart.
        """
        # What a policy of the user's does may change while its name does not.
        if self._store.folder is None or policy.name not in POLICIES:
            return ""
        if type(policy) is not type(policy_of(policy.name)):
            return ""
        return key_of(_FORMAT, PLAN_FORMAT, graph.content(), policy, facts)

    def find(self, key: str, use: Callable[[StoredPlan], _Step]) -> _Step | None:
        """Return what ``use`` makes of the stored plan; None if there is none, or ``use`` refuses it."""

        def check(file: _File, path: Path) -> _Step:
            choice = Choice(key, file.variant, file.workspaces)
            return use(StoredPlan(choice, file.is_quick, file.is_busy, file, path))

        return self._store.find(key, check) if key else None

    def keep(
        self, choice: Choice, graph: StepGraph, costs: Costs, budget: int, planned: Planned, *, is_quick: bool
    ) -> None:
        """Keep a plan for later processes; one from a quick search does not replace a better one.

        It does replace one that was made for costs of a busy machine, if its own are not.
        """
        needs, is_busy = _needs(costs), costs.is_busy

        def is_better(file: _File, _: Path) -> bool:
            return not file.is_quick and file.needs == needs and (is_busy or not file.is_busy)

        if is_quick and self._store.find(choice.key, is_better):
            return
        plan = PlanFile(budget, planned.plan, planned.program, planned.timeline.step_seconds)
        document = document_of(plan, range(len(graph.storages)))
        file = _File(_FORMAT, choice.variant, is_quick, needs, dict(choice.workspaces), document, is_busy)
        self._store.keep(choice.key, file)


def _needs(costs: Costs) -> tuple[int, ...]:
    return tuple(cost.workspace_bytes for cost in costs.ops)
