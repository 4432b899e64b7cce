"""Capture, measure and plan a step for its first call; ``peers`` lets one process do so for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outofcore.capture import Captured
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.costs import Costs, Home
from outofcore.errors import BudgetError
from outofcore.execution.backend import in_terms_of_the_budget, room_for_arena
from outofcore.execution.interrupts import Deferred
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.planned_step import PlannedStep, plan
from outofcore.policies import OffloadAll, ProfileGuided
from outofcore.profiling.groups import GroupCost, with_collectives
from outofcore.profiling.links import links_to
from outofcore.profiling.ops import OpProfile
from outofcore.progress import Tell, silent
from outofcore.step_plans import StepPlans
from outofcore.step_variants import Split, StepVariants, VariantPlans
from outofcore.transforms.fusing import fused, fusing
from outofcore.transforms.partial_sums import in_partial_sums, summing
from outofcore.units import MIB, format_bytes
from outofcore.variant import Variant, choose_variant

_log = logging.getLogger("outofcore")

# Captures a step again, given ``gradients`` as ``capture_step`` takes them.
Recapture = Callable[..., Captured]


class StepPlanner:
    """Captures, measures and plans one user's step; nothing of the user's is changed.

    Args:
        empty_device: brings the model home, so that ops are measured on the device alone.

    Attributes:
        links: the homes as measured.
        is_ahead: whether no call waits for the plan.
        tell: reports progress.
    """

    def __init__(
        self,
        user: UserStep[..., Any],
        memory: MemoryOptions,
        planning: PlanOptions,
        running: RunOptions,
        empty_device: Callable[[], None],
    ) -> None:
        self._user, self._empty_device = user, empty_device
        self.budget, self.stores = memory.budget, memory.home.stores
        self.policy, self._split, self.cache = planning.policy, planning.split, planning.cache
        self.backend, self._kernels = running.backend, running.kernels
        self._repeats = not planning.is_alternating
        self._orders: dict[int, tuple[int, ...]] = {}  # see ``CaptureOptions``
        self._layouts = KernelLayouts()
        self.plans = StepPlans(None if self.cache is None else self.cache.folder)
        self.links: tuple[Home, ...] = ()
        self.is_ahead = False
        self.tell: Tell = silent

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, Recapture]:
        """Capture a call of the step."""
        self.tell("capture", 0, 1)
        # It puts stand-ins where the model has its tensors.
        capture = self._user.capturing(args, kwargs, self.backend.device, self._layouts, self._orders)
        with Deferred("the capture of the step", stops=3):
            traced = capture()
            for end in traced.replicas:
                if end.reduced:
                    self._orders.setdefault(id(end.model), end.order)
        kernels, is_close = self._kernels, self._split is Split.CLOSE
        traced = traced if kernels is None else fused(traced, kernels, self.tell)
        traced = in_partial_sums(traced) if is_close else traced
        return traced, summing(fusing(capture, kernels), is_on=is_close)

    def plan_alone(self, traced: Captured, recapture: Recapture, others: Sequence[PlannedStep]) -> PlannedStep:
        """Plan a step that this process runs alone.

        ``others`` were planned where the step had read other values: their plan is reused if only numbers in ops
        differ.
        """
        for other in others:
            captured = self.variants_of(traced).captured(other.variant)
            if captured is not None and captured.is_alike(other.captured):
                _log.info("its plan holds for the step as it is now")
                return replace(other, captured=captured)
        return self.plan(traced, recapture)

    def plan(
        self, traced: Captured, recapture: Recapture, groups: Mapping[int, GroupCost] | None = None
    ) -> PlannedStep:
        """Measure and plan a step.

        ``groups`` are the costs of process groups by their size, if other processes run the step as well. They follow
        its plan for long, so it is worth the whole search.
        """
        self.tell("capture", 1, 1)
        room = self.make_room(traced)
        together = groups is not None
        plans = VariantPlans(
            self.variants_of(traced, recapture),
            room,
            may_stay=not isinstance(self.policy, OffloadAll | ProfileGuided),
            repeats=self._repeats,
            measure=partial(self._measure, groups=groups or {}),
            plan_whole=partial(
                plan,
                budget=room,
                policy=self.policy,
                stores=self.stores,
                quickly=not self.is_ahead and not together,
                kept=None if together else self.plans,
            ),
            stores=self.stores,
        )
        try:
            found = choose_variant(plans, room)
        except BudgetError as refusal:
            raise in_terms_of_the_budget(refusal, self.budget, room) from None
        self.tell("plan", 1, 1)
        _log.info(
            "planned %d ops (%s) in %s of %s by %s: %s predicted, %s of them ops",
            len(found.graph.ops),
            found.variant,
            format_bytes(found.arena_bytes),
            format_bytes(self.budget),
            found.planned.plan.policy,
            f"{found.seconds:.3f} s",
            f"{found.costs.compute_seconds:.3f} s",
        )
        return found

    def make_room(self, traced: Captured) -> int:
        """Empty the device, and return the bytes that the arena of a step may have."""
        self._empty_device()
        self.backend.prepare()
        return room_for_arena(traced, self.backend, self.budget)

    def variants_of(self, traced: Captured, recapture: Recapture | None = None) -> StepVariants:
        """Return the variants of a step; without ``recapture``, those of this call alone."""
        again = recapture or _not_captured_again
        return StepVariants(traced, again, self.backend, self.cache, self._split, self.stores[0].capacity)

    def _measure(
        self, step: StepVariants, variant: Variant, groups: Mapping[int, GroupCost]
    ) -> tuple[Costs, tuple[OpProfile, ...]]:
        """Measure a variant of a step, and the links to its homes."""
        profiles = step.profiles(variant, timed=True, advance=partial(self.tell, "profile"))
        profiles = with_collectives(step.made(variant), profiles, groups)
        if not self.links:
            self.tell("measure the home", 0, 1)
            size = min(64 * MIB, max(self.budget // 8, MIB))
            self.links = links_to(self.stores, self.cache, self.backend, size)
        self.tell("plan", 0, 1)
        return Costs(tuple(profile.cost for profile in profiles), self.links), profiles


def _not_captured_again(**_: object) -> Captured:
    raise RuntimeError("a step was captured again for a plan that is known; please report it")
