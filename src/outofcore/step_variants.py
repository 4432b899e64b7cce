"""The variants of a captured step: made, measured and planned when ``variant`` requests them.

With ``zero_grad(set_to_none=False)``, the first call creates gradients and later calls add to them, which takes more
memory: ``StepVariants.later`` is the step in those calls. A budget must hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from outofcore import planning
from outofcore.analysis import live_bytes
from outofcore.capture import Captured
from outofcore.capture.step import steady_state_gradients
from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import BudgetError, InputError
from outofcore.execution.backend import Backend
from outofcore.planned_step import PlannedStep, plan_in_core, storage_describer
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import find_mismatches
from outofcore.profiling.ops import OpProfile, profile_selected
from outofcore.runtime.homes import HomeStore
from outofcore.transforms.passes import rewrite_for_low_memory, rewrite_for_lowest_memory, rewrite_for_speed
from outofcore.transforms.split import SplitStep, split_step
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Form, Variant

# A split step with more ops takes longer to plan than it saves.
_MAX_OPS = 20_000
# Minimum memory of exactness checks on the CPU, even if the budget is smaller. PyTorch itself takes as much, once.
_TRIAL_BYTES = 256 * MIB

# Called with the number of families measured, and the number of families.
Advance = Callable[[int, int], None]


class Split(Enum):
    """Whether an op that needs more memory than is available may be split."""

    EXACT = "exact"  # if the result is bit-identical
    CLOSE = "close"  # as EXACT; sums over rows and samples are always split, with other rounding
    OFF = "off"  # never


def split_of(name: str) -> Split:
    """Parse the ``split`` option; raise ``InputError`` for an unknown value."""
    try:
        return Split(name)
    except ValueError:
        raise InputError(f"there is no split {name!r}; choose 'exact', 'close' or 'off'") from None


@dataclass(frozen=True)
class StepVariants:
    """The variants of a captured step, each made and measured once.

    Attributes:
        backend: None: ops are not measured; all splits count as exact, and ops need no scratch memory.
        home_bytes: capacity of the first home; None: unlimited (see ``transforms.split``).
        is_later: whether this is the step in later calls.
        workspaces: scratch bytes of whole ops by family, which decide split factors.
    """

    traced: Captured
    capture: Callable[..., Captured]
    backend: Backend | None
    cache: Cache | None = None
    split: Split = Split.OFF
    home_bytes: int | None = None
    is_later: bool = False
    workspaces: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    _captured: dict[Variant, Captured | None] = field(default_factory=dict[Variant, Captured | None], repr=False)
    # By family of ops, and whether the op still has to create its state. First profiles with times, then those without.
    _timed: dict[tuple[str, bool], OpProfile] = field(default_factory=dict[tuple[str, bool], OpProfile], repr=False)
    _untimed: dict[tuple[str, bool], OpProfile] = field(default_factory=dict[tuple[str, bool], OpProfile], repr=False)

    @property
    def may_split(self) -> bool:
        return self.split is not Split.OFF

    @cached_property
    def later(self) -> StepVariants | None:
        """The variants of the step in later calls; None if later calls equal the first."""
        gradients = steady_state_gradients(self.traced)
        if not gradients:
            return None
        return replace(self, traced=self.capture(gradients=gradients), is_later=True, _captured={})

    @property
    def added_bytes(self) -> int:
        """The bytes of gradients that exist at the start of later calls, but not of the first call."""
        first = self.traced
        kept_gradients = {g.parameter: first.values[g.value].storage for g in first.gradients_left}
        changed = steady_state_gradients(first)
        new_storages = (
            storage
            for index, storage in kept_gradients.items()
            if changed.get(id(first.states[index].tensor)) is not None
        )
        return sum(first.graph.storages[storage].bytes for storage in new_storages)

    def find_variant(self, variant: Variant) -> Captured | None:
        """Return the step rewritten as a variant; None if the variant splits ops but no op can be split."""
        if variant not in self._captured:
            self._captured[variant] = self._make(variant)
        return self._captured[variant]

    def get_variant(self, variant: Variant) -> Captured:
        """Return the step rewritten as a variant; raise ``RuntimeError`` if it has no such variant."""
        captured = self.find_variant(variant)
        if captured is None:
            raise RuntimeError(f"the step has no variant {variant}; please report it")
        return captured

    def _make(self, variant: Variant) -> Captured | None:
        """Return the step rewritten as a variant; None if the variant splits ops but no op can be split."""
        if variant.op_bytes is not None:
            split = self._split(variant.op_bytes, variant.room)
            captured = None if split is None else rewrite_for_lowest_memory(split)
        elif variant.form is Form.FUSED:
            captured = rewrite_for_speed(self.traced)
        elif variant.form is Form.LOW_MEMORY:
            captured = rewrite_for_low_memory(self.traced, variant.room)
        else:
            captured = rewrite_for_lowest_memory(self.traced)
        return captured if captured is None or self.backend is None else captured.align_to(self.backend.alignment)

    def _split(self, op_bytes: int, check_bytes: int) -> Captured | None:
        """Split ops that need more than ``op_bytes`` if their results stay equal; return None if no op is split."""
        refused: frozenset[str] = frozenset()
        while True:
            split = split_step(
                self.traced,
                op_bytes,
                refused=refused,
                limit=_MAX_OPS,
                workspaces=self.workspaces,
                home=self.home_bytes,
            )
            if not split.is_split:
                return None
            mismatched = self._mismatches(split, check_bytes)
            if not mismatched:
                return split.captured
            refused |= mismatched

    def _mismatches(self, split: SplitStep, check_bytes: int) -> frozenset[str]:
        """Return the splits that give other results than whole ops; a check uses at most ``check_bytes``."""
        if self.backend is None:
            return frozenset()
        if self.backend.driver is None:
            check_bytes = max(check_bytes, _TRIAL_BYTES)
        return find_mismatches(split.checks, split.values, self.backend, check_bytes, self.cache)

    def profiles(self, variant: Variant, *, timed: bool, advance: Advance | None = None) -> tuple[OpProfile, ...]:
        """Return the profile of each op of a variant, with seconds if ``timed``; measure each family of ops once."""
        captured = self.get_variant(variant)
        keys = [
            (op.family, call.rehearse_first is not None)
            for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        ]
        cached = self._timed if timed else self._untimed | self._timed
        missing = [index for index, key in enumerate(keys) if not key[0] or key not in cached]
        measured = profile_selected(
            captured, missing, advance=advance, measure_time=timed, cache=self.cache, backend=self.backend
        )
        profiles = tuple(measured[index] if index in measured else cached[key] for index, key in enumerate(keys))
        (self._timed if timed else self._untimed).update(zip(keys, profiles, strict=True))
        if variant.op_bytes is None and variant.form is not Form.FUSED and not self.workspaces:
            self.workspaces.update((key[0], p.cost.workspace_bytes) for key, p in zip(keys, profiles, strict=True))
        return profiles

    def costs(self, variant: Variant, *, timed: bool = False, advance: Advance | None = None) -> Costs:
        """Return the costs of a variant's ops, with seconds if ``timed``; the costs contain a dummy home."""
        if self.backend is None:
            return Costs((OpCost(0.0),) * len(self.get_variant(variant).calls), (SOMEWHERE,))
        profiles = self.profiles(variant, timed=timed, advance=advance)
        return Costs(tuple(_later_cost(p) if self.is_later else p.cost for p in profiles), (SOMEWHERE,))

    def smallest_arena(self, variant: Variant) -> int | None:
        """Return the smallest arena in bytes; None if the step has no such variant."""
        captured = self.find_variant(variant)
        return None if captured is None else planning.smallest_budget(captured.graph, self.costs(variant))


@dataclass(frozen=True)
class VariantPlans:
    """Plans the variants of a step for one arena, on request.

    Attributes:
        room: bytes of the arena.
        may_stay: whether the policy may keep all storages resident.
        repeats: whether later calls may start with gradients of the first.
    """

    step: StepVariants
    room: int
    may_stay: bool
    repeats: bool
    measure: Callable[[StepVariants, Variant], tuple[Costs, tuple[OpProfile, ...]]]
    plan_whole: Callable[[Captured, Costs, tuple[OpProfile, ...]], PlannedStep]
    stores: Sequence[HomeStore]

    @property
    def may_split(self) -> bool:
        return self.step.may_split

    @property
    def added_bytes(self) -> int:
        return self.step.added_bytes if self.repeats else 0

    def smallest_arena(self, variant: Variant) -> int | None:
        return self.step.smallest_arena(variant)

    def has(self, variant: Variant) -> bool:
        return self.step.find_variant(variant) is not None

    def plan(self, variant: Variant) -> PlannedStep | None:
        """Plan the step in a variant; if it does not fit, return None for ``FUSED``, else raise ``BudgetError``."""
        captured = self.step.get_variant(variant)
        if variant.form is Form.FUSED:
            if live_bytes(captured.graph) > self.room:
                return None
            planned = plan_in_core(captured, *self.measure(self.step, variant), self.room, self.stores)
        else:
            planned = self.plan_whole(captured, *self.measure(self.step, variant))
        return None if planned is None else replace(planned, variant=variant)

    def later_refusal(self, variant: Variant, first_refusal: BudgetError | None = None) -> BudgetError | None:
        """Return an error if later calls do not fit and need more than the first call; else ``first_refusal``."""
        later = self.step.later if self.repeats else None
        if later is None:
            return first_refusal
        captured = later.find_variant(variant)
        if captured is None:
            variant, captured = LOWEST_MEMORY, later.get_variant(LOWEST_MEMORY)
        costs = later.costs(variant)
        smallest = planning.smallest_budget(captured.graph, costs)
        if smallest <= max(self.room, (first_refusal and first_refusal.smallest_budget) or 0):
            return first_refusal
        error = planning.explain_too_small(captured.graph, costs, self.room, storage_describer(captured))
        return BudgetError(
            f"{error}\nThese are the needs of the second call, which starts with the gradients of the first. To avoid "
            "that, call zero_grad() with set_to_none=True at the end of the step.",
            smallest,
        )


def _later_cost(profile: OpProfile) -> OpCost:
    """Return the cost of an op in later calls, when optimizer state exists already."""
    if profile.first_requests is None:
        return profile.cost
    return replace(profile.cost, workspace_bytes=profile.requests.workspace_bytes)
