"""Axes along which neighbouring ops are cut: few bytes are copied between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from outofcore.analysis.agreement import WHOLE, Uses, agreed

Ways = dict[int, list[Uses]]


def copied(uses: Mapping[int, Sequence[Uses]], others: Mapping[int, int], single: set[int], chosen: list[int]) -> int:
    """Bytes that are copied, storage by storage, as naively as it can be said."""
    taken = [ways[place] for ways, place in zip(uses.values(), chosen, strict=True)]
    total = sum(way.copied for way in taken)
    for storage in {s for ways in uses.values() for way in ways for s, _, _ in way.cells}:
        looked = [(axis, count) for way in taken for s, axis, count in way.cells if s == storage]
        axes = {axis for axis, count in looked if axis != WHOLE and count}
        if not axes:
            continue  # it has no cells
        everything = others.get(storage, 0) + sum(count for _, count in looked)
        if len(axes) > 1 and storage not in single:
            total += everything
        else:
            total += min(everything - sum(c for a, c in looked if a == axis) for axis in axes)
    return total


def best(uses: Ways, others: Mapping[int, int], single: set[int]) -> int:
    return min(
        copied(uses, others, single, list(chosen)) for chosen in itertools.product(*map(range, map(len, uses.values())))
    )


def along(axis: int, *storages: int, count: int = 10) -> Uses:
    return Uses(tuple((storage, axis, count) for storage in storages))


def test_an_op_follows_its_neighbours() -> None:
    uses = {0: [along(1, 7)], 1: [along(0, 7, 8), along(1, 7, 8)], 2: [along(1, 8)]}
    assert agreed(uses, {}, set(), {7, 8}) == {0: 0, 1: 1, 2: 0}


def test_of_ways_that_copy_as_much_the_first_is_taken() -> None:
    either = [along(0, 7), along(1, 7)]
    assert agreed({3: either}, {}, set(), set()) == {3: 0}
    assert agreed({3: either[::-1]}, {}, set(), set()) == {3: 0}


def test_a_row_changes_together() -> None:
    """Between rows and columns somebody copies, and it had better be where little is to be copied.

    Each op by itself is content: it would only copy on the other side.
    """
    row = {op: [along(0, op, op + 1), along(1, op, op + 1)] for op in (1, 2, 3)}
    uses = {0: [along(0, 1, count=1)], **row, 4: [along(1, 4, count=5)]}
    found = agreed(uses, {}, {1, 2, 3}, {1, 2, 3, 4})
    assert [found[op] for op in row] == [1, 1, 1]


def test_whoever_stays_whole_copies_what_has_cells() -> None:
    uses = {0: [Uses(((7, 0, 10),)), Uses(((7, WHOLE, 10),), copied=2)]}
    assert agreed(uses, {7: 5}, set(), {7}) == {0: 1}
    assert agreed(uses, {7: 1}, set(), {7}) == {0: 0}


def test_cells_along_several_axes_are_copied_by_everybody() -> None:
    uses = {0: [along(0, 7)], 1: [along(0, 7)], 2: [Uses(((7, 1, 10),)), Uses(((7, 0, 10),), copied=15)]}
    assert agreed(uses, {}, set(), single={7})[2] == 0  # the third copies its own
    assert agreed(uses, {}, set(), single=set())[2] == 1  # the others would copy, too


@st.composite
def steps(draw: st.DrawFn) -> tuple[Ways, dict[int, int], set[int], set[int]]:
    storages = st.integers(0, 3)
    use = st.tuples(storages, st.integers(WHOLE, 2), st.integers(0, 9))
    ways = st.builds(Uses, st.lists(use, max_size=3).map(tuple), st.integers(0, 5))
    uses = draw(st.dictionaries(st.integers(0, 9), st.lists(ways, min_size=1, max_size=3), min_size=1, max_size=5))
    others = draw(st.dictionaries(storages, st.integers(0, 9)))
    return uses, others, draw(st.sets(st.sampled_from(sorted(uses)))), draw(st.sets(storages))


@given(steps())
def test_no_op_saves_anything_by_itself(step: tuple[Ways, dict[int, int], set[int], set[int]]) -> None:
    uses, others, flexible, single = step
    found = agreed(uses, others, flexible, single)
    assert list(found) == list(uses)
    assert found == agreed(dict(reversed(uses.items())), others, flexible, single)
    chosen = list(found.values())
    cost = copied(uses, others, single, chosen)
    for number, ways in enumerate(uses.values()):
        for place in range(len(ways)):
            other = copied(uses, others, single, [*chosen[:number], place, *chosen[number + 1 :]])
            assert (other, place) >= (cost, chosen[number])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), min_size=2, max_size=7), st.data())
def test_rows_of_ops_copy_little(row: list[list[int]], data: st.DataObject) -> None:
    """Of ops that pass on one storage each: at most twice the least, and nothing where nothing has to be copied."""
    uses = {op: [along(axis, op, op + 1) for axis in axes] for op, axes in enumerate(row)}
    single = set(range(len(row) + 1)) if data.draw(st.booleans()) else set[int]()
    found = agreed(uses, {}, set(uses), single)
    assert copied(uses, {}, single, list(found.values())) <= 2 * best(uses, {}, single)
