"""Tests of windows that are derived from others by views: every element keeps its address."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.analysis.windows import Derivation, TensorWindow, derive_window


def addresses(window: TensorWindow) -> dict[tuple[int, ...], int]:
    return {
        index: window.offset + sum(i * step for i, step in zip(index, window.stride, strict=True))
        for index in product(*map(range, window.shape))
    }


def derived_addresses(base: TensorWindow, steps: Derivation) -> dict[tuple[int, ...], int]:
    order = [base.stride[dim] for dim in steps.order if base.shape[dim] > 1]
    assert order == sorted(order, reverse=True)
    assert sorted(steps.order) == list(range(len(base.shape)))
    assert prod(steps.factors) == prod(base.shape)
    assert sorted(place for place in steps.places if place is not None) == sorted(
        place for place, (_, count) in enumerate(steps.ranges) if count > 1
    )
    address_of: dict[tuple[int, ...], int] = {}
    for index in product(*map(range, steps.shape)):
        digits = [first for first, _ in steps.ranges]
        for number, place in zip(index, steps.places, strict=True):
            if place is not None:
                assert number < steps.ranges[place][1]
                digits[place] += number
        at = 0
        for digit, factor in zip(digits, steps.factors, strict=True):
            assert digit < factor
            at = at * factor + digit
        address_of[index] = base.offset + at
    return address_of


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
    """Draw views as ``narrow``, ``select``, ``permute``, ``unsqueeze`` and ``expand`` make them."""
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
def test_views_are_derived_from_their_base(data: st.DataObject) -> None:
    base = data.draw(dense())
    view = data.draw(views(base))
    steps = derive_window(base, view)
    assert steps is not None
    assert steps.shape == view.shape
    assert derived_addresses(base, steps) == addresses(view)


@given(dense(), dense())
def test_derived_windows_have_the_same_addresses(base: TensorWindow, target: TensorWindow) -> None:
    steps = derive_window(base, target)
    inside = set(addresses(target).values()) <= set(addresses(base).values())
    if steps is None:
        # A base with as many elements as the target contains them all.
        assert not inside or prod(base.shape) != prod(target.shape)
    else:
        assert derived_addresses(base, steps) == addresses(target)


@pytest.mark.parametrize(
    ("base", "target"),
    [
        (TensorWindow((4,), (2,)), TensorWindow((2,), (2,))),  # gaps in the base
        (TensorWindow((6,), (1,)), TensorWindow((3, 3), (1, 1))),  # overlaps
        (TensorWindow((6,), (1,), 3), TensorWindow((2,), (1,), 2)),  # begins before the base
        (TensorWindow((6,), (1,)), TensorWindow((2,), (1,), 5)),  # ends behind the base
        (TensorWindow((10,), (1,)), TensorWindow((3,), (3,))),  # strides that do not divide the base
        (TensorWindow((0,), (1,)), TensorWindow((0,), (1,))),
    ],
)
def test_unviewable_window_is_not_derived(base: TensorWindow, target: TensorWindow) -> None:
    assert derive_window(base, target) is None
