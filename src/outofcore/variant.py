"""Decide in which variant a step runs, and how finely its ops are split: ``choose_variant``.

A captured step can run in several variants. All compute the same bits; they differ in memory and in time:

    FUSED           ops as PyTorch runs them, all updates joined       quickest; nothing leaves the device
    LOW_MEMORY      combined ops separate, updates early, some joined  nearly as quick
    LOWEST_MEMORY   the same with each update on its own               the least memory with whole ops
    ... split       with each op that needs more than ``op_bytes`` in smaller ops

``ladder`` lists them in the order in which they are tried; the first with a plan is chosen. A step that waits much for
copies is then tried in split ops as well. A step whose later calls begin with gradients that the first call has made
has to fit in both. What does not fit is refused with the variant that needs the least, and all refusals are logged.

``compile``, ``estimate``, ``smallest_budget``, the command line and processes that follow another's plan all ask here.
This module decides; ``step_variants`` captures, measures and plans for it.
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

# Ops that need no more bytes than this are never split: their fixed time is all they cost.
MIN_OP_BYTES = MIB
# How often the bytes of an op are halved at most. At 1/256 of an op the number of ops, not their size, costs time.
_HALVINGS = 7
# A finer split has to save this share of the smallest budget, since it has more ops.
_WORTH = 0.95
# An op of a step that has to be split may need this share of the budget: the larger ops are, the fewer there are.
_ROOMY = 2 / 3
# A step that fits is split for speed where its budget is at least so many bytes, its ops wait for a fifth of the step,
# and the split step is predicted to be 5 % quicker. Then an op may need a quarter of the budget, and copies the rest.
_SPACIOUS_BYTES, _WAITS, _QUICKER, _SHARE_OF_OP = 64 * MIB, 1.25, 1.05, 4


class Form(Enum):
    """How the ops of a step are arranged."""

    FUSED = "fused"  # as PyTorch runs them, with all updates joined
    LOW_MEMORY = "low memory"  # combined ops separate, updates early, some joined
    LOWEST_MEMORY = "lowest memory"  # the same with each update on its own


@dataclass(frozen=True)
class Variant:
    """A form of a step, and how fine its ops are split.

    Attributes:
        form: how its ops are arranged.
        room: bytes of the arena that it is made for, where that matters: a share of it bounds how many updates are
            joined, and trials of split ops may take as much.
        op_bytes: bytes that an op may need before it is split; None: all ops are whole.
    """

    form: Form
    room: int = 0
    op_bytes: int | None = None

    def __str__(self) -> str:
        return self.form.value if self.op_bytes is None else f"ops split above {format_bytes(self.op_bytes)}"


FUSED, LOWEST_MEMORY = Variant(Form.FUSED), Variant(Form.LOWEST_MEMORY)


def split(op_bytes: int, room: int) -> Variant:
    """Return the variant in which ops that need more bytes are split."""
    return Variant(Form.LOWEST_MEMORY, room, op_bytes)


class PlannedVariant(Protocol):
    """A step planned in one of its variants."""

    @property
    def variant(self) -> Variant:
        """The variant."""
        ...

    @property
    def graph(self) -> StepGraph:
        """Its ops and storages."""
        ...

    @property
    def costs(self) -> Costs:
        """The costs of its ops and homes."""
        ...

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        ...

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena that the plan takes."""
        ...


Refusals: TypeAlias = Sequence[tuple[Variant, BudgetError]]
P = TypeVar("P", bound=PlannedVariant)
P_co = TypeVar("P_co", bound=PlannedVariant, covariant=True)


class Sizes(Protocol):
    """What a step needs in each of its variants."""

    def need(self, variant: Variant) -> int | None:
        """Return the smallest budget of the arena in bytes; None if the step has no such variant."""
        ...

    @property
    def may_split(self) -> bool:
        """Whether ops may be split."""
        ...


class Plans(Sizes, Protocol[P_co]):
    """The plans of a step within a budget, made when they are asked for."""

    @property
    def may_stay(self) -> bool:
        """Whether the policy may leave everything on the device."""
        ...

    @property
    def added_bytes(self) -> int:
        """The bytes that later calls begin with and the first call does not."""
        ...

    def has(self, variant: Variant) -> bool:
        """Return whether the step has such a variant: whether any op can be split so."""
        ...

    def plan(self, variant: Variant) -> P_co | None:
        """Return the step planned in a variant; None for ``FUSED`` if something would have to leave.

        Raises:
            BudgetError: it does not fit.
        """
        ...

    def later_refusal(self, variant: Variant, first: BudgetError | None = None) -> BudgetError | None:
        """Return the refusal of later calls in a variant, or ``first`` if that needs more; None if they fit."""
        ...


def choose_variant(step: Plans[P], room: int) -> P:
    """Return the step planned in the variant that runs.

    Args:
        step: its plans within the room.
        room: bytes of the arena.

    Raises:
        BudgetError: no variant fits, with the smallest budget of the variant that needs the least.
    """
    refusals: list[tuple[Variant, BudgetError]] = []
    for variant in ladder(step, room, refusals):
        try:
            planned = step.plan(variant)
        except BudgetError as refusal:
            _log.info("%s: needs %s", variant, format_bytes(refusal.smallest_budget or room))
            refusals.append((variant, refusal))
            continue
        if planned is not None:
            planned = _quicker(step, planned, room)
            refusal = _later_refusal(step, planned, room)
            if refusal is not None:
                raise refusal
            return planned
    variant, refusal = _least(refusals)
    raise step.later_refusal(variant, refusal) or refusal


def ladder(step: Plans[PlannedVariant], room: int, refusals: Refusals) -> Iterator[Variant]:
    """List the variants in the order in which they are tried.

    Args:
        step: its plans within the room.
        room: bytes of the arena.
        refusals: of the variants that were listed before; read when the next one is asked for.
    """
    if step.may_stay:
        yield FUSED
    yield Variant(Form.LOW_MEMORY, room)
    yield LOWEST_MEMORY
    if not step.may_split:
        return
    whole = _least(refusals)[1].smallest_budget or room
    # The coarsest splits that leave room for more than the op come first, among them all that ``finest_split`` sizes.
    coarse = {op_bytes for op_bytes in op_sizes(whole) if op_bytes <= room * _ROOMY}
    for op_bytes in sorted(coarse.union(op_sizes(room)), reverse=True):
        variant, best = split(op_bytes, room), _least(refusals)[0].op_bytes
        # More than one halving below the split that needs the least so far, ops cost more than they save.
        if not step.has(variant) or (best is not None and op_bytes < best // 2):
            break
        yield variant
    finest = finest_split(step, whole)
    if finest is not None:
        yield finest[0]


def smallest_variant(step: Sizes) -> tuple[Variant, int]:
    """Return the variant that needs the least memory, with its smallest budget of the arena in bytes."""
    whole = step.need(LOWEST_MEMORY) or 0
    return (step.may_split and finest_split(step, whole)) or (LOWEST_MEMORY, whole)


def finest_split(step: Sizes, whole: int) -> tuple[Variant, int] | None:
    """Return the split that needs the least memory, with its smallest budget; None if no split needs less.

    It depends on the step alone, not on a budget, so that it is what ``smallest_budget`` reports.

    Args:
        step: what it needs.
        whole: the smallest budget in bytes with whole ops.
    """
    best: tuple[Variant, int] | None = None
    in_vain = 0
    for op_bytes in op_sizes(whole):
        variant = split(op_bytes, op_bytes)
        need = step.need(variant)
        if need is None:
            break
        # One halving may save little and the next one much, where scratch memory does not grow with the op.
        is_worth = need <= (whole if best is None else best[1]) * _WORTH
        if is_worth or (best is None and need < whole):
            best = variant, need
        in_vain = 0 if is_worth else in_vain + 1
        if in_vain > 1:
            break
    return best


def op_sizes(need: int) -> Iterator[int]:
    """List the bytes above which ops are split, by halving what the neediest op takes."""
    for halving in range(1, _HALVINGS + 1):
        op_bytes = need >> halving
        if op_bytes < MIN_OP_BYTES:
            return
        yield op_bytes


def _quicker(step: Plans[P], planned: P, room: int) -> P:
    """Return the step with split ops where it waits much for copies and is quicker so."""
    variant = planned.variant
    waits = planned.seconds / max(planned.costs.compute_seconds, 1e-9)
    if not step.may_split or variant.op_bytes is not None or variant.form is Form.FUSED:
        return planned
    if room < _SPACIOUS_BYTES or waits < _WAITS:
        return planned
    op_bytes = room // _SHARE_OF_OP
    if smallest_budget(planned.graph, planned.costs) <= 2 * op_bytes or not step.has(split(op_bytes, room)):
        return planned
    try:
        other = step.plan(split(op_bytes, room))
    except BudgetError:
        return planned
    if other is None or other.seconds > planned.seconds / _QUICKER:
        return planned
    _log.info("ops that need more than %s are split, since the step is quicker so", format_bytes(op_bytes))
    return other


def _later_refusal(step: Plans[P], planned: P, room: int) -> BudgetError | None:
    """Return the refusal of later calls; None if they fit in this variant, or split where this one is whole."""
    if planned.arena_bytes + step.added_bytes <= room:
        return None
    # Later calls choose their own variant: with whole ops, that of the lowest memory is left to them in any case.
    variant = planned.variant if planned.variant.op_bytes is not None else LOWEST_MEMORY
    refusal = step.later_refusal(variant)
    if refusal is None or variant.op_bytes is not None or not step.may_split:
        return refusal
    for op_bytes in op_sizes(room):
        other = step.later_refusal(split(op_bytes, room))
        if other is None:
            return None
        refusal = min(refusal, other, key=lambda one: one.smallest_budget or 0)
    return refusal


def _least(refusals: Refusals) -> tuple[Variant, BudgetError]:
    """Return the refusal that asks for the least, of those of the lowest-memory form."""
    lowest = [one for one in refusals if one[0].form is Form.LOWEST_MEMORY]
    return min(lowest, key=lambda one: one[1].smallest_budget or 0)
