"""Decide in which variant a step runs, and how finely its ops are split: ``choose_variant``.

All variants compute the same bits; they differ in memory and time:

    FUSED           ops as PyTorch runs them, updates joined           fastest; without evictions
    LOW_MEMORY      combined ops separate, updates early, some joined  nearly as fast
    LOWEST_MEMORY   the same with each update on its own               the least memory with whole ops
    ... split       each op that needs more than ``op_bytes`` in smaller ops

``variants_to_try`` lists them in the order of trial; the first with a plan is chosen. A step that waits much for copies
is then tried with split ops as well. Later calls, which may start with gradients of the first, must also fit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

from outofcore.costs import Costs
from outofcore.errors import BudgetError
from outofcore.graph import StepGraph
from outofcore.planning import smallest_budget
from outofcore.units import MIB, format_bytes

_log = logging.getLogger("outofcore")

# Ops up to this size are never split: their time is all overhead.
MIN_OP_BYTES = MIB
# The most halvings of an op. At 1/256 of an op, the number of ops dominates the time.
_MAX_HALVINGS = 7
# A finer split, which has more ops, must reduce the smallest arena to this share.
_MAX_SPLIT_SHARE = 0.95
# In a step that needs splits, an op may need this share of the budget. Larger ops mean fewer ops.
_MAX_OP_SHARE = 2 / 3
# A step that fits is split for speed if its budget has at least these bytes, its ops wait for a fifth of the step, and
# the split step is predicted to be 5 % faster. Then an op may need a quarter of the budget; copies use the remainder.
_MIN_SPEED_SPLIT_BYTES, _MIN_SLOWDOWN, _MIN_SPEEDUP, _ROOM_DIVISOR = 64 * MIB, 1.25, 1.05, 4


class Form(Enum):
    """The arrangement of the ops of a step."""

    FUSED = "fused"  # as PyTorch runs them, with all updates joined
    LOW_MEMORY = "low memory"  # combined ops separate, updates early, some joined
    LOWEST_MEMORY = "lowest memory"  # the same with each update on its own


@dataclass(frozen=True)
class Variant:
    """A form of a step with its split.

    Attributes:
        room: bytes of the arena that it is made for, which limits joined updates and exactness checks; 0: any.
        op_bytes: bytes above which an op is split; None: all ops are whole.
    """

    form: Form
    room: int = 0
    op_bytes: int | None = None

    def __str__(self) -> str:
        return self.form.value if self.op_bytes is None else f"ops split above {format_bytes(self.op_bytes)}"


FUSED, LOWEST_MEMORY = Variant(Form.FUSED), Variant(Form.LOWEST_MEMORY)


def split(op_bytes: int, room: int) -> Variant:
    """Return the variant in which ops that need more than ``op_bytes`` are split."""
    return Variant(Form.LOWEST_MEMORY, room, op_bytes)


class PlannedVariant(Protocol):
    """A step planned in one of its variants."""

    @property
    def variant(self) -> Variant: ...

    @property
    def graph(self) -> StepGraph: ...

    @property
    def costs(self) -> Costs: ...

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        ...

    @property
    def arena_bytes(self) -> int: ...


Refusals: TypeAlias = Sequence[tuple[Variant, BudgetError]]
P = TypeVar("P", bound=PlannedVariant)
P_co = TypeVar("P_co", bound=PlannedVariant, covariant=True)


class VariantSizes(Protocol):
    """The memory that a step needs in each of its variants."""

    def smallest_arena(self, variant: Variant) -> int | None:
        """Return the smallest arena in bytes; None if the step has no such variant."""
        ...

    @property
    def may_split(self) -> bool: ...


class VariantPlanner(VariantSizes, Protocol[P_co]):
    """The plans of a step within a budget, made on request."""

    @property
    def may_stay(self) -> bool:
        """Whether the policy may keep all storages resident."""
        ...

    @property
    def added_bytes(self) -> int:
        """The bytes of gradients that exist at the start of later calls, but not of the first call."""
        ...

    def has(self, variant: Variant) -> bool:
        """Return whether the step has a variant; a split exists if at least one op can be split."""
        ...

    def plan(self, variant: Variant) -> P_co | None:
        """Plan the step in a variant; if it does not fit, return None for ``FUSED``, else raise ``BudgetError``."""
        ...

    def later_refusal(self, variant: Variant, first_refusal: BudgetError | None = None) -> BudgetError | None:
        """Return an error if later calls do not fit and need more than the first call; else ``first_refusal``."""
        ...


def choose_variant(step: VariantPlanner[P], room: int) -> P:
    """Return the step planned in the best variant for an arena of ``room`` bytes.

    Raises ``BudgetError``, with the smallest budget of any variant, if the first call or later calls do not fit.
    """
    refusals: list[tuple[Variant, BudgetError]] = []
    for variant in variants_to_try(step, room, refusals):
        try:
            planned = step.plan(variant)
        except BudgetError as refusal:
            _log.info("%s: needs %s", variant, format_bytes(refusal.smallest_budget or room))
            refusals.append((variant, refusal))
            continue
        if planned is not None:
            planned = _split_for_speed(step, planned, room)
            refusal = _find_later_refusal(step, planned, room)
            if refusal is not None:
                raise refusal
            return planned
    variant, refusal = _smallest_refusal(refusals)
    raise step.later_refusal(variant, refusal) or refusal


def variants_to_try(step: VariantPlanner[PlannedVariant], room: int, refusals: Refusals) -> Iterator[Variant]:
    """Yield the variants in the order in which to try them; the caller adds the failed ones to ``refusals``."""
    if step.may_stay:
        yield FUSED
    yield Variant(Form.LOW_MEMORY, room)
    yield LOWEST_MEMORY
    if not step.may_split:
        return
    whole_bytes = _smallest_refusal(refusals)[1].smallest_budget or room
    # Coarse splits come first; they include all sizes that ``finest_split`` measures.
    coarse = {op_bytes for op_bytes in op_sizes(whole_bytes) if op_bytes <= room * _MAX_OP_SHARE}
    for op_bytes in sorted(coarse.union(op_sizes(room)), reverse=True):
        variant, best = split(op_bytes, room), _smallest_refusal(refusals)[0].op_bytes
        # More than one halving below the best split so far, extra ops cost more than they save.
        if not step.has(variant) or (best is not None and op_bytes < best // 2):
            break
        yield variant
    finest = finest_split(step, whole_bytes)
    if finest is not None:
        yield finest[0]


def smallest_variant(step: VariantSizes) -> tuple[Variant, int]:
    """Return the variant that needs the least memory, with its smallest arena in bytes."""
    whole_bytes = step.smallest_arena(LOWEST_MEMORY) or 0
    return (step.may_split and finest_split(step, whole_bytes)) or (LOWEST_MEMORY, whole_bytes)


def finest_split(step: VariantSizes, whole_bytes: int) -> tuple[Variant, int] | None:
    """Return the split with the smallest arena, and the arena's bytes; None if all need ``whole_bytes`` or more.

    The result depends on the step only, not on a budget, so ``smallest_budget`` reports it.
    """
    best: tuple[Variant, int] | None = None
    misses = 0
    for op_bytes in op_sizes(whole_bytes):
        variant = split(op_bytes, op_bytes)
        need = step.smallest_arena(variant)
        if need is None:
            break
        # One halving may save little and the next much, if scratch memory does not grow with the op.
        is_worth = need <= (whole_bytes if best is None else best[1]) * _MAX_SPLIT_SHARE
        if is_worth or (best is None and need < whole_bytes):
            best = variant, need
        misses = 0 if is_worth else misses + 1
        if misses > 1:
            break
    return best


def op_sizes(need: int) -> Iterator[int]:
    """Yield the sizes above which ops are split: halvings of ``need`` bytes, down to 1 MiB."""
    for halving in range(1, _MAX_HALVINGS + 1):
        op_bytes = need >> halving
        if op_bytes < MIN_OP_BYTES:
            return
        yield op_bytes


def _split_for_speed(step: VariantPlanner[P], planned: P, room: int) -> P:
    """Return the step planned with split ops if that is predicted to be 5 % faster, else ``planned``."""
    variant = planned.variant
    slowdown = planned.seconds / max(planned.costs.compute_seconds, 1e-9)
    if not step.may_split or variant.op_bytes is not None or variant.form is Form.FUSED:
        return planned
    if room < _MIN_SPEED_SPLIT_BYTES or slowdown < _MIN_SLOWDOWN:
        return planned
    op_bytes = room // _ROOM_DIVISOR
    if smallest_budget(planned.graph, planned.costs) <= 2 * op_bytes or not step.has(split(op_bytes, room)):
        return planned
    try:
        split_step = step.plan(split(op_bytes, room))
    except BudgetError:
        return planned
    if split_step is None or split_step.seconds > planned.seconds / _MIN_SPEEDUP:
        return planned
    _log.info("ops that need more than %s are split, which makes the step faster", format_bytes(op_bytes))
    return split_step


def _find_later_refusal(step: VariantPlanner[P], planned: P, room: int) -> BudgetError | None:
    """Return the error of later calls that do not fit into ``room``; None if they fit.

    If this plan splits ops, later calls must use the same split; else they may use LOWEST_MEMORY or any split.
    """
    if planned.arena_bytes + step.added_bytes <= room:
        return None
    # Later calls choose their own variant; if ops are whole, LOWEST_MEMORY is always possible.
    variant = planned.variant if planned.variant.op_bytes is not None else LOWEST_MEMORY
    refusal = step.later_refusal(variant)
    if refusal is None or variant.op_bytes is not None or not step.may_split:
        return refusal
    for op_bytes in op_sizes(room):
        split_refusal = step.later_refusal(split(op_bytes, room))
        if split_refusal is None:
            return None
        refusal = min(refusal, split_refusal, key=lambda candidate: candidate.smallest_budget or 0)
    return refusal


def _smallest_refusal(refusals: Refusals) -> tuple[Variant, BudgetError]:
    """Return the failed variant that needs the smallest budget, and its error."""
    lowest = [refusal for refusal in refusals if refusal[0].form is Form.LOWEST_MEMORY]
    return min(lowest, key=lambda refusal: refusal[1].smallest_budget or 0)
