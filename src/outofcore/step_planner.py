"""Capture, measure and plan a step for its first call. With ``peers``, one process does so for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outofcore.capture import Captured
from outofcore.capture.kernel_layouts import KernelLayouts
from outofcore.capture.step import steady_state_gradients
from outofcore.costs import Costs, Home
from outofcore.errors import BudgetError, GraphError
from outofcore.execution.backend import add_smallest_budget, room_for_arena
from outofcore.execution.interrupts import DeferredSignals
from outofcore.options import MemoryOptions, PlanOptions, RunOptions, UserStep
from outofcore.planned_step import PlannedStep, check_spill, plan
from outofcore.policies import OffloadAll, ProfileGuided
from outofcore.profiling.groups import GroupCost, add_collective_costs
from outofcore.profiling.links import measure_homes
from outofcore.profiling.ops import OpProfile, op_shelf
from outofcore.progress import ProgressCallback, ignore_progress
from outofcore.step_plans import StepPlans, StoredPlan, VariantChoice
from outofcore.step_variants import Split, StepVariants, VariantPlans
from outofcore.transforms.fusing import capture_and_fuse, fuse_ops
from outofcore.transforms.partial_sums import capture_and_split_sums, split_sums
from outofcore.units import MIB, format_bytes
from outofcore.variant import Variant, choose_variant

_log = logging.getLogger("outofcore")

# Captures a step again, given ``gradients`` as ``capture_step`` takes them.
Recapture = Callable[..., Captured]


class StepPlanner:
    """The planner of a user's step: captures, measures and plans it. It changes no tensor of the user.

    Attributes:
        links: the homes with their measured links; empty: not measured yet.
        is_ahead: whether no call waits for the plan, so that a full search is affordable.
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
        self._repeats = planning.repeats
        self._orders: dict[int, tuple[int, ...]] = {}  # see ``CaptureOptions``
        self._layouts = KernelLayouts()
        self.plans = StepPlans(None if self.cache is None else self.cache.folder)
        self.links: tuple[Home, ...] = ()
        self.is_ahead = False
        self.on_progress: ProgressCallback = ignore_progress

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, Recapture]:
        """Capture a call of the step; return the capture and a function that captures the call again."""
        self.on_progress("capture the step", 0, 1)
        # The capture replaces the model's tensors by fake ones, so an interrupt must wait.
        capture = self._user.capturer(args, kwargs, self.backend.device, self._layouts, self._orders)
        with DeferredSignals("the capture of the step", stops=3):
            traced = capture()
            for end in traced.replicas:
                if end.is_reduced:
                    self._orders.setdefault(id(end.model), end.order)
        kernels, is_close = self._kernels, self._split is Split.CLOSE
        traced = traced if kernels is None else fuse_ops(traced, kernels, self.on_progress)
        traced = split_sums(traced) if is_close else traced
        return traced, capture_and_split_sums(capture_and_fuse(capture, kernels), is_on=is_close)

    def plan_alone(self, traced: Captured, recapture: Recapture, alternatives: Sequence[PlannedStep]) -> PlannedStep:
        """Plan a step for this process alone; reuse the plan of an alternative if it is valid for the step."""
        for similar in alternatives:
            captured = self.variants_of(traced).find_variant(similar.variant)
            if captured is not None and captured.can_share_plan(similar.captured):
                _log.info("an existing plan is valid for the new values")
                return replace(similar, captured=captured)
        return self.plan(traced, recapture)

    def plan(
        self, traced: Captured, recapture: Recapture, groups: Mapping[int, GroupCost] | None = None
    ) -> PlannedStep:
        """Return the step with its stored plan; without a stored plan, measure and plan it.

        ``groups``: costs of collectives by size of their process group; None: no other process uses the plan.
        """
        self.on_progress("capture the step", 1, 1)
        room = self.make_room(traced)
        # Processes replace a shared plan only once, so it gets a full search.
        together = groups is not None
        quickly = not self.is_ahead and not together
        key = "" if together else self._key(traced, room)
        step = self._load_stored_plan(key, self.variants_of(traced), room, quickly=quickly)
        if step is None:
            step = self._plan_best_variant(
                self.variants_of(traced, recapture), room, groups or {}, key, quickly=quickly
            )
        self.on_progress("plan", 1, 1)
        _log.info(
            "planned %d ops (%s) in %s of %s by %s: %s predicted, %s of them ops",
            len(step.graph.ops),
            step.variant,
            format_bytes(step.arena_bytes),
            format_bytes(self.budget),
            step.planned.plan.policy,
            f"{step.seconds:.3f} s",
            f"{step.costs.compute_seconds:.3f} s",
        )
        if step.costs.is_busy:
            _log.info("ops or links were measured while the machine was busy; later processes will measure them again")
        return step

    def _plan_best_variant(
        self, variants: StepVariants, room: int, groups: Mapping[int, GroupCost], key: str, *, quickly: bool
    ) -> PlannedStep:
        """Plan a step in its best variant, and store the plan under ``key`` unless that is empty."""
        plans = VariantPlans(
            variants,
            room,
            may_stay=not isinstance(self.policy, OffloadAll | ProfileGuided),
            repeats=self._repeats,
            measure=partial(self._measure, groups=groups),
            plan_whole=partial(plan, budget=room, policy=self.policy, stores=self.stores, quickly=quickly),
            stores=self.stores,
        )
        try:
            step = choose_variant(plans, room)
        except BudgetError as refusal:
            raise add_smallest_budget(refusal, self.budget, room) from None
        if not key:
            return step
        # Workspaces matter only if ops are split.
        is_whole = step.variant.op_bytes is None
        workspaces = {family: count for family, count in variants.workspaces.items() if count and not is_whole}
        choice = VariantChoice(key, step.variant, workspaces)
        self.plans.keep(choice, step.graph, step.costs, room, step.planned, is_quick=step.is_quick)
        return replace(step, choice=choice)

    def _load_stored_plan(self, key: str, variants: StepVariants, room: int, *, quickly: bool) -> PlannedStep | None:
        """Return the step with its stored plan; None without a usable one (a quick plan is usable if ``quickly``)."""

        def use(stored: StoredPlan) -> PlannedStep | None:
            """Return the step with the stored plan; None if the step should be planned again."""
            if stored.is_quick and not quickly:
                return None
            choice = stored.choice
            variants.workspaces.update(choice.workspaces)
            captured = variants.find_variant(choice.variant)
            if captured is None:
                raise GraphError(f"the step has no variant {choice.variant}")
            costs, profiles = self._measure(variants, choice.variant, {})
            if stored.is_busy and not costs.is_busy:
                _log.info("planning again: the stored plan was made with times of a busy machine")
                return None
            planned = stored.prove(captured.graph, costs, room)
            return PlannedStep(
                captured, room, costs, planned, profiles, choice.variant, is_quick=stored.is_quick, choice=choice
            )

        step = self.plans.find(key, use)
        if step is not None:
            check_spill(step.graph, step.costs, step.planned, self.stores)
        return step

    def _key(self, traced: Captured, room: int) -> str:
        """Return the key of a step's stored plan, derived from the inputs of planning; empty without a cache."""
        if self.cache is None:
            return ""
        changed = steady_state_gradients(traced) if self._repeats else {}
        tensors = [id(binding.tensor) for binding in traced.states]
        max_bytes = sum(storage.bytes for storage in traced.graph.storages)
        return self.plans.key(
            traced.graph,
            self.policy,
            (self.budget, room, self._split.value, self.backend.alignment),
            [call.rehearse_first is not None for call in traced.calls],
            [(index, changed[tensor] is None) for index, tensor in enumerate(tensors) if tensor in changed],
            [(store.name, min(_round_down(store.capacity), max_bytes)) for store in self.stores],
            # The memory that ops need, and whether splits are exact, depends on the facts in this name.
            op_shelf(self.cache, self.backend.facts(), "parts").path.name,
        )

    def make_room(self, traced: Captured) -> int:
        """Empty the device, and return the bytes available to the arena of a step."""
        self._empty_device()
        self.backend.prepare()
        return room_for_arena(traced, self.backend, self.budget)

    def variants_of(self, traced: Captured, recapture: Recapture | None = None) -> StepVariants:
        """Return the variants of a step; ``StepVariants.later`` needs ``recapture``, which captures the step again."""
        capture_again = recapture or _refuse_recapture
        return StepVariants(traced, capture_again, self.backend, self.cache, self._split, self.stores[0].capacity)

    def _measure(
        self, step: StepVariants, variant: Variant, groups: Mapping[int, GroupCost]
    ) -> tuple[Costs, tuple[OpProfile, ...]]:
        """Return the costs and profiles of a variant; measure ops and links where needed."""
        profiles = step.profiles(variant, timed=True, advance=partial(self.on_progress, "measure ops"))
        profiles = add_collective_costs(step.get_variant(variant), profiles, groups)
        if not self.links:
            self.on_progress("measure copies", 0, 1)
            size = min(64 * MIB, max(self.budget // 8, MIB))
            self.links = measure_homes(self.stores, self.cache, self.backend, size)
        self.on_progress("plan", 0, 1)
        return Costs(tuple(profile.cost for profile in profiles), self.links), profiles


def _refuse_recapture(**_: object) -> Captured:
    raise RuntimeError("a step was captured again for an existing plan; please report it")


def _round_down(count: int) -> int:
    """Round bytes down to three leading bits, since free bytes differ a little in each process."""
    spare = max(count.bit_length() - 3, 0)
    return count >> spare << spare
