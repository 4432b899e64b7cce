"""Tests of the choice of split axes: neighbouring ops agree on axes that copy few bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from outofcore.analysis.agreement import WHOLE, SplitUses, choose_splits

Choices = dict[int, list[SplitUses]]


def copied_bytes(
    uses: Mapping[int, Sequence[SplitUses]], uncut_bytes: Mapping[int, int], single: set[int], chosen: list[int]
) -> int:
    uses_chosen = [choices[place] for choices, place in zip(uses.values(), chosen, strict=True)]
    total = sum(choice.copied for choice in uses_chosen)
    for storage in {s for choices in uses.values() for choice in choices for s, _, _ in choice.cells}:
        cells = [(axis, count) for choice in uses_chosen for s, axis, count in choice.cells if s == storage]
        axes = {axis for axis, count in cells if axis != WHOLE and count}
        if not axes:
            continue  # no op of the choice cuts it
        all_bytes = uncut_bytes.get(storage, 0) + sum(count for _, count in cells)
        if len(axes) > 1 and storage not in single:
            total += all_bytes
        else:
            total += min(all_bytes - sum(c for a, c in cells if a == axis) for axis in axes)
    return total


def best(uses: Choices, uncut_bytes: Mapping[int, int], single: set[int]) -> int:
    return min(
        copied_bytes(uses, uncut_bytes, single, list(chosen))
        for chosen in itertools.product(*map(range, map(len, uses.values())))
    )


def along(axis: int, *storages: int, count: int = 10) -> SplitUses:
    return SplitUses(tuple((storage, axis, count) for storage in storages))


def test_op_follows_its_neighbours() -> None:
    uses = {0: [along(1, 7)], 1: [along(0, 7, 8), along(1, 7, 8)], 2: [along(1, 8)]}
    assert choose_splits(uses, {}, set(), {7, 8}) == {0: 0, 1: 1, 2: 0}


def test_first_choice_wins_a_tie() -> None:
    either = [along(0, 7), along(1, 7)]
    assert choose_splits({3: either}, {}, set(), set()) == {3: 0}
    assert choose_splits({3: either[::-1]}, {}, set(), set()) == {3: 0}


def test_row_of_ops_switches_axis_together() -> None:
    """Changing one The alone only moves the copy to its is small."""
    row = {op: [along(0, op, op + 1), along(1, op, op + 1)] for op in (1, 2, 3)}
    uses = {0: [along(0, 1, count=1)], **row, 4: [along(1, 4, count=5)]}
    chosen = choose_splits(uses, {}, {1, 2, 3}, {1, 2, 3, 4})
    assert [chosen[op] for op in row] == [1, 1, 1]


def test_op_stays_whole_only_to_copy_less() -> None:
    uses = {0: [SplitUses(((7, 0, 10),)), SplitUses(((7, WHOLE, 10),), copied=2)]}
    assert choose_splits(uses, {7: 5}, set(), {7}) == {0: 1}
    assert choose_splits(uses, {7: 1}, set(), {7}) == {0: 0}


def test_storage_cut_along_several_axes_is_copied_by_each_op() -> None:
    uses = {0: [along(0, 7)], 1: [along(0, 7)], 2: [SplitUses(((7, 1, 10),)), SplitUses(((7, 0, 10),), copied=15)]}
    assert choose_splits(uses, {}, set(), single={7})[2] == 0  # the third copies its own
    assert choose_splits(uses, {}, set(), single=set())[2] == 1  # the two ops before it would copy, too


@st.composite
def steps(draw: st.DrawFn) -> tuple[Choices, dict[int, int], set[int], set[int]]:
    storages = st.integers(0, 3)
    use = st.tuples(storages, st.integers(WHOLE, 2), st.integers(0, 9))
    choices = st.builds(SplitUses, st.lists(use, max_size=3).map(tuple), st.integers(0, 5))
    uses = draw(st.dictionaries(st.integers(0, 9), st.lists(choices, min_size=1, max_size=3), min_size=1, max_size=5))
    uncut_bytes = draw(st.dictionaries(storages, st.integers(0, 9)))
    return uses, uncut_bytes, draw(st.sets(st.sampled_from(sorted(uses)))), draw(st.sets(storages))


@given(steps())
def test_no_single_change_saves_bytes(step: tuple[Choices, dict[int, int], set[int], set[int]]) -> None:
    uses, uncut_bytes, flexible, single = step
    agreement = choose_splits(uses, uncut_bytes, flexible, single)
    assert list(agreement) == list(uses)
    assert agreement == choose_splits(dict(reversed(uses.items())), uncut_bytes, flexible, single)
    chosen = list(agreement.values())
    cost = copied_bytes(uses, uncut_bytes, single, chosen)
    for number, choices in enumerate(uses.values()):
        for place in range(len(choices)):
            changed = copied_bytes(uses, uncut_bytes, single, [*chosen[:number], place, *chosen[number + 1 :]])
            assert (changed, place) >= (cost, chosen[number])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), min_size=2, max_size=7), st.data())
def test_row_of_ops_copies_at_most_twice_the_minimum(row: list[list[int]], data: st.DataObject) -> None:
    """Each op passes one storage to the next. If the minimum is zero, the result copies zero bytes."""
    uses = {op: [along(axis, op, op + 1) for axis in axes] for op, axes in enumerate(row)}
    single = set(range(len(row) + 1)) if data.draw(st.booleans()) else set[int]()
    agreement = choose_splits(uses, {}, set(uses), single)
    assert copied_bytes(uses, {}, single, list(agreement.values())) <= 2 * best(uses, {}, single)
