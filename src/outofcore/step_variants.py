"""The variants of a captured step on a machine: captured, measured and planned when ``variant`` asks for them.

The first call of a step that ends with ``zero_grad(set_to_none=False)`` makes its gradients, and later calls add to
them, which takes more bytes: ``StepVariants.later`` is the step as those run it. A budget has to hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from outofcore import planning
from outofcore.analysis import live_bytes
from outofcore.capture import Captured
from outofcore.capture.step import gradients_from_now_on
from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import BudgetError, InputError
from outofcore.execution.backend import Backend
from outofcore.planned_step import PlannedStep, describer, plan_in_core
from outofcore.profiling.cache import Cache
from outofcore.profiling.equality import refuted
from outofcore.profiling.ops import OpProfile, profile_some
from outofcore.runtime.homes import HomeStore
from outofcore.transforms.passes import fastest, lean, leanest
from outofcore.transforms.split import Tiled, tiled
from outofcore.units import MIB
from outofcore.variant import LOWEST_MEMORY, Form, Variant

# A split step of more ops takes longer to plan than it saves.
_MAX_OPS = 20_000
# Trials on the CPU may take so much memory, however small the budget is: it is taken once, and PyTorch takes as much.
_TRIAL_BYTES = 256 * MIB

# Called with the families of ops that are measured, and their number.
Advance = Callable[[int, int], None]


class Split(Enum):
    """Whether an op that needs more memory than there is may be split."""

    EXACT = "exact"  # where its parts give the bits of the whole
    CLOSE = "close"  # so too; and sums over rows and samples are always taken in parts, and rounded otherwise
    OFF = "off"  # never


def split_of(name: str) -> Split:
    """Parse the ``split`` option.

    Raises:
        InputError: there is no such split.
    """
    try:
        return Split(name)
    except ValueError:
        raise InputError(f"there is no split {name!r}; choose 'exact', 'close' or 'off'") from None


@dataclass(frozen=True)
class StepVariants:
    """The variants of a step as captured, each made and measured once.

    Attributes:
        traced: the step.
        capture: captures it again, given ``gradients`` as ``capture_step`` takes them.
        backend: where it runs, is measured, and splits are tried; None: on no machine, so that all splits count as
            exact and ops need no scratch memory.
        cache: where measurements are kept.
        split: whether ops may be split.
        home_bytes: capacity of the first home; None: unlimited (see ``transforms.split``).
        is_later: whether it is the step as later calls run it.
        workspaces: scratch bytes of whole ops by family, from which it follows how finely they are split; of the first
            variant with whole ops that is measured.
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
    # By family of ops, and whether they have yet to make their state; the timed ones first.
    _timed: dict[tuple[str, bool], OpProfile] = field(default_factory=dict[tuple[str, bool], OpProfile], repr=False)
    _sized: dict[tuple[str, bool], OpProfile] = field(default_factory=dict[tuple[str, bool], OpProfile], repr=False)

    @property
    def may_split(self) -> bool:
        """Whether ops may be split."""
        return self.split is not Split.OFF

    @cached_property
    def later(self) -> StepVariants | None:
        """The step as later calls run it; None if that is the same."""
        gradients = gradients_from_now_on(self.traced)
        if not gradients:
            return None
        return replace(self, traced=self.capture(gradients=gradients), is_later=True, _captured={})

    @property
    def added_bytes(self) -> int:
        """The bytes of gradients that later calls begin with and the first does not; they need no more besides."""
        first = self.traced
        left = {g.parameter: first.values[g.value].storage for g in first.gradients_left}
        changed = gradients_from_now_on(first)
        made = (storage for place, storage in left.items() if changed.get(id(first.states[place].tensor)) is not None)
        return sum(first.graph.storages[storage].bytes for storage in made)

    def captured(self, variant: Variant) -> Captured | None:
        """Return the step in a variant; None where no op can be split so."""
        if variant not in self._captured:
            self._captured[variant] = self._make(variant)
        return self._captured[variant]

    def made(self, variant: Variant) -> Captured:
        """Return the step in a variant that it has."""
        captured = self.captured(variant)
        if captured is None:
            raise RuntimeError(f"the step has no variant {variant}; please report it")
        return captured

    def _make(self, variant: Variant) -> Captured | None:
        if variant.op_bytes is not None:
            split = self._split(variant.op_bytes, variant.room)
            captured = None if split is None else leanest(split)
        elif variant.form is Form.FUSED:
            captured = fastest(self.traced)
        elif variant.form is Form.LOW_MEMORY:
            captured = lean(self.traced, variant.room)
        else:
            captured = leanest(self.traced)
        return captured if captured is None or self.backend is None else captured.aligned(self.backend.alignment)

    def _split(self, op_bytes: int, room: int) -> Captured | None:
        """Split ops so that the parts give the bits of the whole."""
        refused: frozenset[str] = frozenset()
        while True:
            found = tiled(
                self.traced,
                op_bytes,
                refused=refused,
                limit=_MAX_OPS,
                workspaces=self.workspaces,
                home=self.home_bytes,
            )
            if not found.is_cut:
                return None
            wrong = self._mismatches(found, room)
            if not wrong:
                return found.captured
            refused |= wrong

    def _mismatches(self, found: Tiled, room: int) -> frozenset[str]:
        if self.backend is None:
            return frozenset()
        if self.backend.driver is None:
            room = max(room, _TRIAL_BYTES)
        return refuted(found.claims, found.values, self.backend, room, self.cache)

    def profiles(self, variant: Variant, *, timed: bool, advance: Advance | None = None) -> tuple[OpProfile, ...]:
        """Return the profiles of a variant's ops on the backend, each family measured once.

        Args:
            variant: one that the step has.
            timed: whether seconds are measured as well as scratch memory.
            advance: progress callback ``(families measured, families)``.
        """
        captured = self.made(variant)
        keys = [
            (op.family, call.rehearse_first is not None)
            for op, call in zip(captured.graph.ops, captured.calls, strict=True)
        ]
        known = self._timed if timed else self._sized | self._timed
        unknown = [at for at, key in enumerate(keys) if not key[0] or key not in known]
        measured = profile_some(
            captured, unknown, advance=advance, measure_time=timed, cache=self.cache, backend=self.backend
        )
        found = tuple(measured[at] if at in measured else known[key] for at, key in enumerate(keys))
        (self._timed if timed else self._sized).update(zip(keys, found, strict=True))
        if variant.op_bytes is None and variant.form is not Form.FUSED and not self.workspaces:
            self.workspaces.update((key[0], p.cost.workspace_bytes) for key, p in zip(keys, found, strict=True))
        return found

    def costs(self, variant: Variant, *, timed: bool = False, advance: Advance | None = None) -> Costs:
        """Return the costs of a variant's ops, with a home somewhere; see ``profiles``."""
        if self.backend is None:
            return Costs((OpCost(0.0),) * len(self.made(variant).calls), (SOMEWHERE,))
        profiles = self.profiles(variant, timed=timed, advance=advance)
        return Costs(tuple(_later_cost(p) if self.is_later else p.cost for p in profiles), (SOMEWHERE,))

    def need(self, variant: Variant) -> int | None:
        """Return the smallest budget of the arena in bytes; None if the step has no such variant."""
        captured = self.captured(variant)
        return None if captured is None else planning.smallest_budget(captured.graph, self.costs(variant))


@dataclass(frozen=True)
class VariantPlans:
    """The plans of a step's variants in an arena.

    Attributes:
        step: its variants.
        room: bytes of the arena.
        may_stay: whether the policy may leave everything on the device.
        repeats: whether later calls may begin with gradients that the first has made.
        measure: returns the profiles and costs of a variant.
        plan_whole: plans a captured step with its costs and profiles; BudgetError: it does not fit.
        stores: the homes, nearest first.
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
        """Whether ops may be split."""
        return self.step.may_split

    @property
    def added_bytes(self) -> int:
        """The bytes that later calls begin with and the first call does not."""
        return self.step.added_bytes if self.repeats else 0

    def need(self, variant: Variant) -> int | None:
        """Return the smallest budget of the arena in bytes; None if the step has no such variant."""
        return self.step.need(variant)

    def has(self, variant: Variant) -> bool:
        """Return whether the step has such a variant."""
        return self.step.captured(variant) is not None

    def plan(self, variant: Variant) -> PlannedStep | None:
        """Return the step planned in a variant; None for ``FUSED`` if something would have to leave.

        Raises:
            BudgetError: it does not fit.
        """
        captured = self.step.made(variant)
        if variant.form is Form.FUSED:
            if live_bytes(captured.graph) > self.room:
                return None
            planned = plan_in_core(captured, *self.measure(self.step, variant), self.room, self.stores)
        else:
            planned = self.plan_whole(captured, *self.measure(self.step, variant))
        return None if planned is None else replace(planned, variant=variant)

    def later_refusal(self, variant: Variant, first: BudgetError | None = None) -> BudgetError | None:
        """Return the refusal of later calls in a variant, or ``first`` if that needs more; None if they fit."""
        later = self.step.later if self.repeats else None
        if later is None:
            return first
        captured = later.captured(variant)
        if captured is None:
            variant, captured = LOWEST_MEMORY, later.made(LOWEST_MEMORY)
        costs = later.costs(variant)
        smallest = planning.smallest_budget(captured.graph, costs)
        if smallest <= max(self.room, (first and first.smallest_budget) or 0):
            return first
        error = planning.explain_too_small(captured.graph, costs, self.room, describer(captured))
        return BudgetError(
            f"{error}\nThese are the needs of the second call, which begins with the gradients that the first one "
            "leaves. Call zero_grad() with set_to_none=True at the end of the step to leave none.",
            smallest,
        )


def _later_cost(profile: OpProfile) -> OpCost:
    """Return what an op costs once an optimizer has made its state."""
    if profile.first_requests is None:
        return profile.cost
    return replace(profile.cost, workspace_bytes=profile.requests.workspace_bytes)
