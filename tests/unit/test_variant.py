"""Tests of the choice of a variant, on made-up needs and times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outofcore.costs import SOMEWHERE, Costs, OpCost
from outofcore.errors import BudgetError
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.units import MIB
from outofcore.variant import (
    FUSED,
    LOWEST_MEMORY,
    Form,
    Variant,
    choose_variant,
    finest_split,
    op_sizes,
    smallest_variant,
    split,
)


@dataclass(frozen=True)
class Planned:
    variant: Variant
    need: int
    seconds: float = 1.0

    @property
    def graph(self) -> StepGraph:
        storage = Storage(0, self.need, StorageKind.ACTIVATION)
        return StepGraph((storage,), (Op(0, "op", (), (), (0,)),))

    @property
    def costs(self) -> Costs:
        return Costs((OpCost(0.5),), (SOMEWHERE,))

    @property
    def arena_bytes(self) -> int:
        return self.need


@dataclass
class Step:
    """A step whose split ops need half of their bytes on top, down to a floor.

    Attributes:
        floor: bytes that every split needs at least; None: the ops cannot be split.
        later: bytes that later calls need in the lowest-memory form, whole and with split ops; None: the same as the
            first call. In other forms they need four times as much.
    """

    whole: dict[Form, int]
    room: int
    floor: int | None = None
    may_stay: bool = True
    may_split: bool = True
    seconds: tuple[float, float] = (0.5, 0.5)
    later: tuple[int, int] | None = None
    tried: list[Variant] = field(default_factory=list[Variant])

    @property
    def added_bytes(self) -> int:
        return self.room if self.later else 0

    def has(self, variant: Variant) -> bool:
        return self.smallest_arena(variant) is not None

    def smallest_arena(self, variant: Variant) -> int | None:
        if variant.op_bytes is None:
            return self.whole[variant.form]
        return None if self.floor is None else max(variant.op_bytes * 3 // 2, self.floor)

    def plan(self, variant: Variant) -> Planned | None:
        self.tried.append(variant)
        need = self.smallest_arena(variant)
        assert need is not None
        if need <= self.room:
            return Planned(variant, need, self.seconds[variant.op_bytes is not None])
        if variant.form is Form.FUSED:
            return None
        raise BudgetError(f"{variant} needs more", need)

    def later_refusal(self, variant: Variant, first_refusal: BudgetError | None = None) -> BudgetError | None:
        need = 0 if self.later is None else self.later[variant.op_bytes is not None]
        need *= 1 if variant.form is Form.LOWEST_MEMORY else 4
        return (
            BudgetError("later calls", need)
            if need > max(self.room, (first_refusal and first_refusal.smallest_budget) or 0)
            else first_refusal
        )


def needs(fused: int, low: int, lowest: int) -> dict[Form, int]:
    return {Form.FUSED: fused * MIB, Form.LOW_MEMORY: low * MIB, Form.LOWEST_MEMORY: lowest * MIB}


@pytest.mark.parametrize(
    ("room", "form"),
    [(100, Form.FUSED), (90, Form.LOW_MEMORY), (80, Form.LOWEST_MEMORY)],
    ids=["fused", "low", "lowest"],
)
def test_quickest_fitting_form_is_chosen(room: int, form: Form) -> None:
    step = Step(needs(100, 90, 80), room * MIB)
    assert choose_variant(step, step.room).variant.form is form


def test_policy_without_resident_state_does_not_use_the_fused_form() -> None:
    step = Step(needs(100, 90, 80), 100 * MIB, may_stay=False)
    assert choose_variant(step, step.room).variant == Variant(Form.LOW_MEMORY, step.room)


def test_coarsest_fitting_split_is_chosen() -> None:
    step = Step(needs(400, 300, 256), 60 * MIB, floor=2 * MIB)
    chosen = choose_variant(step, step.room).variant
    assert chosen == split(32 * MIB, step.room)
    assert [variant.op_bytes for variant in step.tried] == [None, None, None, 32 * MIB]


def test_split_stops_one_halving_below_the_smallest_need() -> None:
    step = Step(needs(400, 300, 256), 8 * MIB, floor=20 * MIB)
    with pytest.raises(BudgetError) as refused:
        choose_variant(step, step.room)
    assert refused.value.smallest_budget == 20 * MIB
    # 4 MiB is the first split, since larger ones leave no room. The finest split of any budget, 8 MiB, comes last.
    assert [variant.op_bytes for variant in step.tried[3:]] == [4 * MIB, 2 * MIB, 8 * MIB]


def test_refusal_names_the_variant_with_the_smallest_need() -> None:
    step = Step(needs(400, 300, 256), 8 * MIB)
    with pytest.raises(BudgetError, match="lowest memory") as refused:
        choose_variant(step, step.room)
    assert refused.value.smallest_budget == 256 * MIB


def test_refusal_names_later_calls_if_they_need_more() -> None:
    step = Step(needs(400, 300, 256), 8 * MIB, later=(260 * MIB, 260 * MIB))
    with pytest.raises(BudgetError, match="later calls"):
        choose_variant(step, step.room)


def test_later_calls_may_use_another_form() -> None:
    step = Step(needs(80, 80, 80), 100 * MIB, may_split=False, later=(90 * MIB, 90 * MIB))
    assert choose_variant(step, step.room).variant == FUSED


@pytest.mark.parametrize(("split_needs", "fits"), [(100, True), (110, False)])
def test_later_calls_must_fit_whole_or_split(split_needs: int, fits: bool) -> None:
    step = Step(needs(80, 80, 80), 100 * MIB, later=(120 * MIB, split_needs * MIB))
    if fits:
        assert choose_variant(step, step.room).variant == FUSED
    else:
        with pytest.raises(BudgetError) as refused:
            choose_variant(step, step.room)
        assert refused.value.smallest_budget == split_needs * MIB


@pytest.mark.parametrize(
    ("room", "whole", "seconds", "is_split"),
    [
        (80, 70, (1.0, 0.9), True),
        (80, 30, (1.0, 0.9), False),  # small ops leave room for copies
        (80, 70, (0.6, 0.5), False),  # ops hardly wait
        (80, 70, (1.0, 0.99), False),  # hardly quicker
        (60, 55, (1.0, 0.9), False),  # too small a budget
    ],
    ids=["quicker", "small ops", "no waits", "hardly quicker", "small budget"],
)
def test_fitting_step_is_split_only_for_speed(
    room: int, whole: int, seconds: tuple[float, float], is_split: bool
) -> None:
    step = Step(needs(100, whole, whole), room * MIB, floor=MIB, seconds=seconds)
    assert choose_variant(step, step.room).variant == (
        split(room * MIB // 4, step.room) if is_split else Variant(Form.LOW_MEMORY, step.room)
    )


def test_finest_split_does_not_depend_on_the_budget() -> None:
    splits = [finest_split(Step(needs(400, 300, 256), room, floor=10 * MIB), 256 * MIB) for room in (8 * MIB, 80 * MIB)]
    # Of the splits at 8 and 4 MiB, which need 12 and 10 MiB, the finer one saves more than 5 %.
    assert splits == [(split(4 * MIB, 4 * MIB), 10 * MIB)] * 2


def test_smallest_variant_is_whole_if_ops_cannot_be_split() -> None:
    assert smallest_variant(Step(needs(400, 300, 256), 8 * MIB)) == (LOWEST_MEMORY, 256 * MIB)


def test_op_sizes_halve_down_to_a_mebibyte() -> None:
    assert [size // MIB for size in op_sizes(20 * MIB)] == [10, 5, 2, 1]
    assert len(list(op_sizes(1 << 40))) == 7
