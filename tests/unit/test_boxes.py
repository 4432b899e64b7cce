"""Tests of tensor slices as boxes, compared with numpy."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outofcore.analysis.boxes import (
    Axes,
    TensorWindow,
    cells,
    clip_box,
    count_elements,
    lines_of,
    place_window,
    window_within,
)


def window_of(view: Any, base: Any) -> TensorWindow:
    step = base.itemsize
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // step
    return TensorWindow(view.shape, tuple(stride // step for stride in view.strides), offset)


@st.composite
def views(draw: st.DrawFn) -> tuple[Any, Any]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = np.arange(prod(sizes))
    view = base.reshape(sizes)
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(sizes) - 1))
        low = draw(st.integers(0, sizes[dim] - 1))
        high = draw(st.integers(low + 1, sizes[dim]))
        view = view[(slice(None),) * dim + (slice(low, high),)]
    elif len(sizes) > 1:
        dim = draw(st.integers(0, len(sizes) - 2))
        view = view.reshape([*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]])
    return base, view.transpose(draw(st.permutations(range(view.ndim))))


@settings(max_examples=examples(300), deadline=None)
@given(views(), st.data())
def test_slice_is_where_numpy_has_it(pair: tuple[Any, Any], data: st.DataObject) -> None:
    base, view = pair
    window = window_of(view, base)
    lines = lines_of(base.size, [window])
    assert lines is not None
    place = place_window(lines, window)
    assert place is not None
    box = tuple(slice(low, high) for low, high in place.box)
    assert sorted(base.reshape(lines.sizes)[box].ravel()) == sorted(view.ravel())
    dims = [dim for dim in range(view.ndim) if view.shape[dim] > 1]
    if not dims:
        return
    dim = data.draw(st.sampled_from(dims))
    run = Axes.lines_of_dims(place, (dim, dim + 1))
    assert run is not None
    axes = Axes(lines, tuple(sorted({0, run[0]})))
    grain = axes.cut_unit(place, (dim, dim + 1))
    assert grain is not None
    low = data.draw(st.integers(0, view.shape[dim] // grain - 1)) * grain
    high = data.draw(st.integers(low // grain + 1, view.shape[dim] // grain)) * grain
    part = axes.box_of_part(place, (dim, dim + 1), low, high)
    expected = view[(slice(None),) * dim + (slice(low, high),)]
    if part is None:  # the slice covers no interval of an axis of another dimension
        assert axes.box_of(place) is None
        return
    memory = np.ascontiguousarray(base.reshape(axes.sizes)[tuple(slice(*ends) for ends in part)]).ravel()
    assert memory.size == count_elements(part)
    stride = axes.strides(place, expected.shape, part, (dim, dim + 1))
    if stride is not None:
        actual = np.lib.stride_tricks.as_strided(memory, expected.shape, [s * memory.itemsize for s in stride])
        assert (actual == expected).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_cells_cover_a_box_once(sizes: list[int], data: st.DataObject) -> None:
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in sizes]
    box = []
    for size in sizes:
        low = data.draw(st.integers(0, size - 1))
        box.append((low, data.draw(st.integers(low + 1, size))))
    array, filled = np.arange(prod(sizes)).reshape(sizes), np.full([high - low for low, high in box], -1)
    for cell in cells(cuts, tuple(box)):
        part = clip_box(cell, tuple(box))
        assert part is not None
        source = np.ascontiguousarray(array[tuple(slice(*ends) for ends in cell)])
        target = tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(part, box, strict=True))
        within = window_within(cell, part)
        shown = np.lib.stride_tricks.as_strided(
            source.ravel()[within.offset :], within.shape, [s * source.itemsize for s in within.stride]
        )
        assert (filled[target] == -1).all()
        filled[target] = shown
    assert (filled == array[tuple(slice(*ends) for ends in box)]).all()


def test_repeating_or_overlapping_window_has_no_place() -> None:
    assert lines_of(12, [TensorWindow((4, 3), (0, 1))]) is None
    assert lines_of(12, [TensorWindow((3, 4), (2, 1))]) is not None  # these have lines,
    lines = lines_of(12, [TensorWindow((3, 4), (2, 1))])
    assert lines is not None
    assert place_window(lines, TensorWindow((3, 4), (2, 1))) is None  # but overlapping windows are not boxes
    assert lines_of(12, [TensorWindow((4,), (5,))]) is None


@pytest.mark.parametrize("grain", [1, 4])
def test_merged_dimension_is_cut_at_the_inner_boundary(grain: int) -> None:
    lines = lines_of(24, [TensorWindow((6, 4), (4, 1)), TensorWindow((24,), (1,))])
    assert lines is not None
    place = place_window(lines, TensorWindow((24,), (1,)))
    assert place is not None
    axes = Axes(lines, (0,) if grain == 1 else (0, 1))
    assert axes.cut_unit(place, (0, 1)) == grain
    assert axes.box_of_part(place, (0, 1), 8, 12) == (((8, 12),) if grain == 1 else ((2, 3), (0, 4)))
    assert (axes.box_of_part(place, (0, 1), 3, 5) is None) == (grain == 4)
