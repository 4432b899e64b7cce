"""Tests of how logical workers are shared among processes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.errors import InputError
from outofcore.logical_workers.assignment import evenly, runs, shares


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=4), st.integers(0, 5))
def test_no_other_shares_end_sooner(seconds: list[float], more: int) -> None:
    workers = len(seconds) + more
    counts_by_process = shares(workers, seconds)
    assert sum(counts_by_process) == workers
    assert min(counts_by_process) >= 1
    best = min(
        max(n * s for n, s in zip(counts, seconds, strict=True))
        for counts in product(range(1, more + 2), repeat=len(seconds))
        if sum(counts) == workers
    )
    assert max(n * s for n, s in zip(counts_by_process, seconds, strict=True)) == best


def test_runs_are_consecutive() -> None:
    assert evenly(4, 3) == (range(2), range(2, 3), range(3, 4))
    assert runs((3, 1)) == (range(3), range(3, 4))
    assert evenly(1, 1) == (range(1),)


@pytest.mark.parametrize("seconds", [[1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_times_must_be_positive_numbers(seconds: list[float]) -> None:
    with pytest.raises(InputError, match="positive number"):
        shares(4, seconds)


def test_each_process_needs_a_worker() -> None:
    with pytest.raises(InputError, match="2 logical workers cannot be shared by 3 processes"):
        evenly(2, 3)
