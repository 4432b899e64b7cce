"""The step as it is from its second call on, where the first call leaves other gradients than it found.

The first call of a step that ends with ``zero_grad(set_to_none=False)`` makes its gradients, and later ones add to
them, which takes more bytes. A budget has to hold both, and is to be refused before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outofcore import planning
from outofcore.capture import Captured
from outofcore.capture.passes import leanest
from outofcore.capture.step import gradients_from_now_on
from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.execution.backend import Backend
from outofcore.planned_step import describer
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import OpProfile, profile_some

Form = Callable[[Captured], Captured]


def settled_capture(
    first: Captured, capture: Callable[..., Captured], alignment: int, form: Form = leanest
) -> Captured | None:
    """The settled step in its leanest form; None where it is the first step.

    Args:
        first: the step as traced for its first call.
        capture: captures it anew, given ``gradients`` as for ``capture_step``.
        alignment: of blocks below 64 KiB, in bytes.
        form: what makes the form of the step as traced.
    """
    gradients = gradients_from_now_on(first)
    if not gradients:
        return None
    return form(capture(gradients=gradients)).aligned(alignment)


def settled_step(
    first: Captured,
    capture: Callable[..., Captured],
    cache: Cache | None,
    backend: Backend,
    known: Mapping[str, OpProfile] | None = None,
    *,
    measure_time: bool = False,
    form: Form = leanest,
) -> tuple[Captured, Costs] | None:
    """The settled step with the workspaces of its ops; None where it is the first step.

    Args:
        first: the step as traced for its first call.
        capture: captures it anew, given ``gradients`` as for ``capture_step``.
        cache: where measurements are kept.
        backend: where the step runs.
        known: the profiles of families of ops that were measured.
        measure_time: whether to measure the seconds of the other ops as well.
        form: as for ``settled_capture``.
    """
    settled = settled_capture(first, capture, backend.alignment, form)
    if settled is None:
        return None
    ops = settled.graph.ops
    found = {op.id: known[op.family] for op in ops if known and op.family in known}
    rest = [op.id for op in ops if op.id not in found]
    found |= profile_some(settled, rest, measure_time=measure_time, cache=cache, backend=backend)
    return settled, Costs(tuple(_later_cost(found[op.id]) for op in ops), (SOMEWHERE,))


def _later_cost(profile: OpProfile) -> OpCost:
    """What an op costs once an optimizer has made its state."""
    if profile.first_requests is None:
        return profile.cost
    return replace(profile.cost, workspace_bytes=profile.requests.workspace_bytes)


def added_bytes(first: Captured) -> int:
    """Bytes that later calls begin with and the first did not: the settled step needs no more besides."""
    left = {g.parameter: first.values[g.value].storage for g in first.gradients_left}
    changed = gradients_from_now_on(first)
    return sum(
        first.graph.storages[storage].bytes
        for place, storage in left.items()
        if changed.get(id(first.states[place].tensor)) is not None
    )


def shortfall(
    settled: tuple[Captured, Costs] | None, budget: int, first: BudgetError | None = None
) -> BudgetError | None:
    """The refusal of a budget that does not hold the settled step; or that of the first call, if that needs more."""
    if settled is None:
        return first
    captured, costs = settled
    smallest = planning.smallest_budget(captured.graph, costs)
    if smallest <= max(budget, (first and first.smallest_budget) or 0):
        return first
    error = planning.explain_too_small(captured.graph, costs, budget, describer(captured))
    return BudgetError(
        f"{error}\nThis is the step as it is from its second call on, with the gradients that the first call leaves; "
        "zero_grad() with set_to_none=True at its end leaves none.",
        smallest,
    )


def known_families(captured: Captured, profiles: Sequence[OpProfile]) -> dict[str, OpProfile]:
    """Profiles by the family of their ops."""
    return {op.family: p for op, p in zip(captured.graph.ops, profiles, strict=True) if op.family}
