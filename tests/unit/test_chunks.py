"""Tests of how elements are divided among processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.analysis.chunks import GRAIN, Chunks, is_dense
from outofcore.errors import InputError


@given(st.integers(0, 1 << 40), st.integers(1, 1000))
def test_chunks_cover_all_elements_in_order(elements: int, ranks: int) -> None:
    chunks = Chunks(elements, ranks)
    end = 0
    for rank in range(ranks):
        assert chunks.start(rank) == end
        assert 0 <= chunks.count(rank) <= chunks.each
        if chunks.count(rank):
            assert chunks.start(rank) == rank * chunks.each
            assert chunks.start(rank) % GRAIN == 0
        end += chunks.count(rank)
    assert end == elements
    # The padding is at most a grain for each process.
    assert elements <= chunks.padded < elements + ranks * GRAIN + ranks


def test_zero_processes_are_refused() -> None:
    with pytest.raises(InputError, match="among 0 processes"):
        Chunks(10, 0)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 1, 3), (3, 77, 1), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((), (), True),
    ],
)
def test_strides_without_holes_are_dense(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, stride) is dense
