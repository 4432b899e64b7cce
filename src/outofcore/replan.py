"""Plans of a captured step: the first one, and another where steps have shown that it was wrong.

It was wrong if steps took longer or shorter than predicted, or if an op asked for memory that no plan foresaw.
Each is mended once for a captured step, and never again, so that no step is planned for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outofcore import planning
from outofcore.capture import Captured
from outofcore.costs import Costs, Home
from outofcore.errors import BudgetError
from outofcore.execution.backend import Backend
from outofcore.execution.homes import HomeStore
from outofcore.execution.runner import Runner
from outofcore.execution.slots import needed_bytes
from outofcore.execution.state import StateKeeper
from outofcore.planning import Planned, Policy
from outofcore.planning.placement.requests import Requests
from outofcore.profiling.cache import Cache
from outofcore.profiling.links import forget_link
from outofcore.profiling.ops import OpProfile, keep_profiles
from outofcore.profiling.refine import is_off, refined
from outofcore.program import Timeline
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# How many steps are measured, after the first, before the prediction is judged.
_MEASURED_STEPS = 3
# A link that is so much slower or faster in steps than it was measured is measured again by the next process.
_OTHER_LINK = 1.25


@dataclass
class Entry:
    """A captured step, planned."""

    captured: Captured
    costs: Costs
    planned: Planned
    runner: Runner
    profiles: tuple[OpProfile, ...]
    refined: bool = False  # whether measured steps have had their say
    surprised: bool = False  # whether a plan was made for requests that the first one did not foresee
    runs: int = 0
    measured: list[Timeline] = field(default_factory=list[Timeline])


@dataclass(frozen=True)
class Planner:
    """Makes plans for one compiled step.

    Attributes:
        budget: bytes.
        policy: how to plan.
        keeper: the states of all captures of the step.
        homes: where bytes live that are not on the device, nearest first.
        cache: where measurements are kept, if anywhere.
        backend: where the step runs.
    """

    budget: int
    policy: Policy
    keeper: StateKeeper
    homes: tuple[HomeStore, ...]
    cache: Cache | None
    backend: Backend

    def plan(
        self,
        captured: Captured,
        costs: Costs,
        profiles: tuple[OpProfile, ...],
        describe: Callable[[int], str] | None = None,
    ) -> Entry:
        """The first plan of a captured step.

        Raises:
            BudgetError: the budget cannot hold it.
        """
        planned = planning.plan_step(captured.graph, costs, self.budget, self.policy, describe)
        return self._entry(captured, costs, profiles, planned)

    def plan_in_core(self, captured: Captured, costs: Costs, profiles: tuple[OpProfile, ...]) -> Entry | None:
        """The plan in which nothing moves, if the budget holds it."""
        planned = planning.plan_in_core(captured.graph, costs, self.budget)
        return None if planned is None else self._entry(captured, costs, profiles, planned)

    def _entry(self, captured: Captured, costs: Costs, profiles: tuple[OpProfile, ...], planned: Planned) -> Entry:
        requests = [profile.requests for profile in profiles]
        first = {i: p.first_requests for i, p in enumerate(profiles) if p.first_requests is not None}
        runner = Runner(captured, planned.program, costs, requests, first, self.keeper)
        return Entry(captured, costs, planned, runner, profiles)

    def after(self, entry: Entry, timeline: Timeline, make_room: Callable[[], None]) -> Entry | None:
        """The plan to go on with after a step, where it is another one than before.

        Args:
            entry: what ran.
            timeline: of its last step.
            make_room: called before another plan is made for a step that does not fit: planning takes memory, too,
                and not beside that of the step.
        """
        surprises = entry.runner.surprises()
        entry.runs += 1
        # The first step of a program warms up: libraries fill their caches, and optimizer state may be made.
        if entry.runs == 1:
            return None
        if surprises and not entry.surprised:
            entry.surprised = True
            if entry.planned.plan.policy != "keep-all":
                make_room()
            return self._foreseeing(entry, surprises)
        if entry.refined:
            return None
        entry.measured.append(timeline)
        if len(entry.measured) < _MEASURED_STEPS:
            return None
        entry.refined = True
        measured, entry.measured = entry.measured, []
        if entry.planned.plan.policy == "keep-all" or not is_off(entry.planned.timeline.step_seconds, measured):
            return None
        make_room()
        return self._measured(entry, measured)

    def _measured(self, entry: Entry, measured: Sequence[Timeline]) -> Entry | None:
        """Planned with the times that ops and copies took in steps."""
        graph = entry.captured.graph
        costs = refined(entry.costs, entry.planned.program, measured, entry.runner.spilled)
        try:
            planned = planning.plan_step(graph, costs, self.budget, self.policy)
        except BudgetError as error:
            _log.warning("the plan stays as it is, although its prediction was off: %s", error)
            return None
        _log.info(
            "planned again with measured costs: a step was predicted to take %.3f s and took %.3f s; now %.3f s by %s",
            entry.planned.timeline.step_seconds,
            measured[-1].step_seconds,
            planned.timeline.step_seconds,
            planned.plan.policy,
        )
        profiles = tuple(replace(p, cost=cost) for p, cost in zip(entry.profiles, costs.ops, strict=True))
        if self.cache is not None:
            keep_profiles(self.cache, graph, profiles, device=self.backend.facts())
            for store, before, after in zip(self.homes, entry.costs.homes, costs.homes, strict=True):
                if _differ(before, after):
                    forget_link(store, self.cache, self.backend.facts())
        return self._again(entry, costs, planned, profiles)

    def _foreseeing(self, entry: Entry, surprises: Mapping[int, Requests]) -> Entry | None:
        """Planned with the requests that ops turned out to make; None where the budget cannot hold those."""
        graph = entry.captured.graph
        profiles, ops = list(entry.profiles), list(entry.costs.ops)
        for index, seen in surprises.items():
            cost = ops[index]
            # Never less than before: an op that asked for more may yet ask for less again.
            ops[index] = replace(cost, workspace_bytes=max(cost.workspace_bytes, seen.workspace_bytes))
            profiles[index] = replace(profiles[index], cost=ops[index], requests=seen)
            _log.info(
                "op %d (%s, %s) asked for memory that no plan foresaw: scratch memory of %s, and not of %s",
                index,
                graph.ops[index].name,
                graph.ops[index].source,
                format_bytes(seen.workspace_bytes),
                format_bytes(cost.workspace_bytes),
            )
        costs = replace(entry.costs, ops=tuple(ops))
        try:
            planned = planning.plan_step(graph, costs, self.budget, self.policy)
        except BudgetError as error:
            _log.warning("the plan stays as it is, and such requests are served from the reserve: %s", error)
            return None
        _log.info(
            "planned again for %d ops: %.3f s predicted by %s",
            len(surprises),
            planned.timeline.step_seconds,
            planned.plan.policy,
        )
        if self.cache is not None:
            keep_profiles(self.cache, graph, profiles, only=surprises, device=self.backend.facts())
        return self._again(entry, costs, planned, tuple(profiles))

    def _again(self, entry: Entry, costs: Costs, planned: Planned, profiles: tuple[OpProfile, ...]) -> Entry:
        runner = entry.runner.replanned(planned.program, costs, [profile.requests for profile in profiles])
        return Entry(entry.captured, costs, planned, runner, profiles, refined=entry.refined, surprised=entry.surprised)


def _differ(before: Home, after: Home) -> bool:
    """Whether the rates of a link are not what they were."""
    return any(
        max(a / b, b / a) > _OTHER_LINK
        for a, b in (
            (before.bytes_per_s_out, after.bytes_per_s_out),
            (before.bytes_per_s_in, after.bytes_per_s_in),
        )
    )


def describer(captured: Captured) -> Callable[[int], str]:
    """Tells of a storage of a step what it is, with its shape and dtype, for people."""
    shapes = {}
    for value in captured.values:
        shapes.setdefault(value.storage, (value.shape, value.dtype))

    def describe(storage: int) -> str:
        name = captured.graph.storages[storage].name or f"storage {storage}"
        shape, dtype = shapes.get(storage, ((), None))
        return f"{name} {tuple(shape)} {str(dtype).removeprefix('torch.')}"

    return describe


def check_spill(entry: Entry, stores: Sequence[HomeStore]) -> None:
    """Refuse a plan that takes more of a home than there is.

    Raises:
        SpillError: it does.
    """
    needed = needed_bytes(entry.captured.graph, entry.costs, entry.planned.program)
    for home, count in zip(stores, needed, strict=True):
        home.check(max(count, home.bytes))
        _log.info("away from the device, at %s: %s at most", home.name, format_bytes(count))
