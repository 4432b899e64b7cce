"""Stored plans of compiled steps: a step with a stored plan starts without planning."""

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


class _PlanRecord(Document):
    variant: Variant
    is_quick: bool
    needs: tuple[_Bytes, ...]  # scratch memory of the ops
    workspaces: dict[str, _Bytes]
    plan: PlanDocument
    is_busy: bool = False


@dataclass(frozen=True)
class VariantChoice:
    """The variant chosen for a step, with the ``key`` of its plan in the store.

    ``workspaces`` are the scratch bytes of whole ops by family, which decide the split factors.
    """

    key: str
    variant: Variant
    workspaces: Mapping[str, int] = field(default_factory=dict[str, int], repr=False)


@dataclass(frozen=True)
class StoredPlan:
    """A plan from the store that is not validated yet.

    ``is_quick``: from a quick search. ``is_busy``: with costs that were measured on a busy machine.
    """

    choice: VariantChoice
    is_quick: bool
    is_busy: bool
    _file: _PlanRecord
    _path: Path

    def prove(self, graph: StepGraph, costs: Costs, budget: int) -> Planned:
        """Validate the stored plan for a graph, and return it with the timeline that these costs predict.

        Raises ``ValidationError`` for an invalid plan, ``GraphError`` if ops now need other scratch memory.
        """
        if self._file.needs != _scratch_bytes_by_op(costs):
            raise GraphError(f"{self._path}: ops need other scratch memory than when the plan was made")
        plan = plan_of(self._file.plan, range(len(graph.storages)), self._path)
        validate(graph, plan.program, budget, costs)
        return Planned(plan.plan, plan.program, simulate(graph, costs, plan.program))


class StepPlans:
    """Plans of compiled steps, stored in a folder; if the folder is None, they are not stored."""

    def __init__(self, folder: Path | None) -> None:
        self._store = PlanStore(folder, "plan", _FORMAT, _PlanRecord)

    def key(self, graph: StepGraph, policy: Policy, *facts: object) -> str:
        """Return the key under which a step's plan is stored; empty if it cannot be stored.

        ``facts`` are all other inputs of planning except costs, distinguished by ``repr``. The user's source lines are
        not part of the key.
        """
        # A user's policy may change its behaviour under the same name.
        if self._store.folder is None or policy.name not in POLICIES:
            return ""
        if type(policy) is not type(policy_of(policy.name)):
            return ""
        return key_of(_FORMAT, PLAN_FORMAT, graph.content(), policy, facts)

    def find(self, key: str, use: Callable[[StoredPlan], _Step]) -> _Step | None:
        """Return ``use(plan)`` for the plan stored under a key; None if no valid one is stored."""

        def check(file: _PlanRecord, path: Path) -> _Step:
            choice = VariantChoice(key, file.variant, file.workspaces)
            return use(StoredPlan(choice, file.is_quick, file.is_busy, file, path))

        return self._store.find(key, check) if key else None

    def keep(
        self, choice: VariantChoice, graph: StepGraph, costs: Costs, budget: int, planned: Planned, *, is_quick: bool
    ) -> None:
        """Store a plan; with ``is_quick``, a stored plan from a full search stays instead if it is still usable.

        A usable plan is for the same scratch memory, and not from a busy machine unless the new one is as well.
        """
        needs, is_busy = _scratch_bytes_by_op(costs), costs.is_busy

        def is_better(file: _PlanRecord, _: Path) -> bool:
            return not file.is_quick and file.needs == needs and (is_busy or not file.is_busy)

        if is_quick and self._store.find(choice.key, is_better):
            return
        plan = PlanFile(budget, planned.plan, planned.program, planned.timeline.step_seconds)
        document = document_of(plan, range(len(graph.storages)))
        file = _PlanRecord(_FORMAT, choice.variant, is_quick, needs, dict(choice.workspaces), document, is_busy)
        self._store.save(choice.key, file)


def _scratch_bytes_by_op(costs: Costs) -> tuple[int, ...]:
    return tuple(cost.workspace_bytes for cost in costs.ops)
