"""Windows onto a storage made of others by views: every element comes from its address."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.analysis.windows import Derivation, TensorWindow, derive_window


def addresses(window: TensorWindow) -> dict[tuple[int, ...], int]:
    """Where each element lies."""
    return {
        index: window.offset + sum(i * step for i, step in zip(index, window.stride, strict=True))
        for index in product(*map(range, window.shape))
    }


def made(given_: TensorWindow, how: Derivation) -> dict[tuple[int, ...], int]:
    """Where each element of what is made lies, told by its place in the shape that the elements are divided into."""
    order = [given_.stride[dim] for dim in how.order if given_.shape[dim] > 1]
    assert order == sorted(order, reverse=True)
    assert sorted(how.order) == list(range(len(given_.shape)))
    assert prod(how.factors) == prod(given_.shape)
    assert sorted(place for place in how.places if place is not None) == sorted(
        place for place, (_, count) in enumerate(how.ranges) if count > 1
    )
    found: dict[tuple[int, ...], int] = {}
    for index in product(*map(range, how.shape)):
        digits = [first for first, _ in how.ranges]
        for number, place in zip(index, how.places, strict=True):
            if place is not None:
                assert number < how.ranges[place][1]
                digits[place] += number
        at = 0
        for digit, factor in zip(digits, how.factors, strict=True):
            assert digit < factor
            at = at * factor + digit
        found[index] = given_.offset + at
    return found


@st.composite
def dense(draw: st.DrawFn) -> TensorWindow:
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    stride, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = step if shape[dim] > 1 else draw(st.integers(0, 9))
        step *= shape[dim]
    return TensorWindow(tuple(shape), tuple(stride), draw(st.integers(0, 3)))


@st.composite
def views(draw: st.DrawFn, of: TensorWindow) -> TensorWindow:
    """Views as ``narrow``, ``select``, ``permute``, ``unsqueeze`` and ``expand`` make them."""
    dims, offset = list(zip(of.shape, of.stride, strict=True)), of.offset
    for place in reversed(range(len(dims))):
        size, step = dims[place]
        kind = draw(st.sampled_from(["all", "some", "one", "split"]))
        if kind == "some":
            first = draw(st.integers(0, size - 1))
            dims[place] = (draw(st.integers(1, size - first)), step)
            offset += first * step
        elif kind == "one":
            offset += draw(st.integers(0, size - 1)) * step
            del dims[place]
        elif kind == "split" and size % 2 == 0:
            dims[place : place + 1] = [(2, size // 2 * step), (size // 2, step)]
    for _ in range(draw(st.integers(0, 2))):
        dims.insert(draw(st.integers(0, len(dims))), (draw(st.integers(1, 3)), 0))
    dims = list(draw(st.permutations(dims)))
    return TensorWindow(tuple(size for size, _ in dims), tuple(step for _, step in dims), offset)


@given(st.data())
def test_views_are_made_of_what_they_are_views_of(data: st.DataObject) -> None:
    given_ = data.draw(dense())
    wanted = data.draw(views(given_))
    how = derive_window(given_, wanted)
    assert how is not None
    assert how.shape == wanted.shape
    assert made(given_, how) == addresses(wanted)


@given(dense(), dense())
def test_whatever_is_made_lies_where_it_was_wanted(given_: TensorWindow, wanted: TensorWindow) -> None:
    how = derive_window(given_, wanted)
    inside = set(addresses(wanted).values()) <= set(addresses(given_).values())
    if how is None:
        # The elements of one that is as large are all there.
        assert not inside or prod(given_.shape) != prod(wanted.shape)
    else:
        assert made(given_, how) == addresses(wanted)


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        (TensorWindow((4,), (2,)), TensorWindow((2,), (2,))),  # gaps in what is given
        (TensorWindow((6,), (1,)), TensorWindow((3, 3), (1, 1))),  # overlaps
        (TensorWindow((6,), (1,), 3), TensorWindow((2,), (1,), 2)),  # begins before it
        (TensorWindow((6,), (1,)), TensorWindow((2,), (1,), 5)),  # ends behind it
        (TensorWindow((10,), (1,)), TensorWindow((3,), (3,))),  # steps that do not divide it
        (TensorWindow((0,), (1,)), TensorWindow((0,), (1,))),
    ],
)
def test_what_is_no_view_is_not_made(given_: TensorWindow, wanted: TensorWindow) -> None:
    assert derive_window(given_, wanted) is None
