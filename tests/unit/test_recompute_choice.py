"""Tests of the choice of saved tensors that are worth recomputing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.follow.remaking import ComputedStorage, choose_recomputed

MB = 1_000_000


def cheap(storage: int, *inputs: int, saved: bool = True, seconds: float | None = 1e-4) -> ComputedStorage:
    return ComputedStorage(storage, MB, seconds, inputs, saved)


def test_tensor_cheaper_to_recompute_than_to_copy_is_chosen() -> None:
    hidden = cheap(1, 0, seconds=1.0)
    assert choose_recomputed([hidden, cheap(2, 1)], 1e9) == (2,)
    # Out and back at 1 GB/s takes 2 ms.
    assert choose_recomputed([hidden, cheap(2, 1, seconds=1.9e-3)], 1e9) == (2,)
    assert choose_recomputed([hidden, cheap(2, 1, seconds=2.1e-3)], 1e9) == ()


def test_unsaved_or_unrepeatable_tensor_is_not_chosen() -> None:
    assert choose_recomputed([cheap(1, 0, saved=False), cheap(2, 0, seconds=None)], 1e9) == ()


def test_inputs_of_a_recomputation_must_be_saved() -> None:
    assert choose_recomputed([cheap(1, 0, saved=False, seconds=None), cheap(2, 1)], 1e9) == ()
    # Of a chain of cheap tensors, every second one; the cheapest first.
    chain = [cheap(1, 0, seconds=3e-4), cheap(2, 1, seconds=1e-4), cheap(3, 2, seconds=2e-4)]
    assert choose_recomputed(chain, 1e9) == (2,)
    chain[1] = cheap(2, 1, seconds=5e-4)
    assert choose_recomputed(chain, 1e9) == (3, 1)


def test_time_of_intermediate_results_counts() -> None:
    hidden = cheap(1, 0, seconds=1.0)
    intermediates = [hidden, cheap(2, 1, saved=False, seconds=9e-4), cheap(3, 2, 1, saved=False, seconds=4e-4)]
    assert choose_recomputed([*intermediates, cheap(4, 3, seconds=6e-4)], 1e9) == (4, 2, 3)
    assert choose_recomputed([*intermediates, cheap(4, 3, seconds=8e-4)], 1e9) == ()
    # At most four in a row, the saved one included.
    row = [hidden, *(cheap(i, i - 1, saved=False, seconds=1e-5) for i in range(2, 6))]
    assert choose_recomputed([*row[:4], cheap(5, 4)], 1e9) == (5, 2, 3, 4)
    assert choose_recomputed([*row, cheap(6, 5)], 1e9) == ()


def test_choice_stops_at_enough_bytes() -> None:
    tensors = [cheap(i, 0, seconds=1e-5 * i) for i in range(1, 6)]
    assert choose_recomputed(tensors, 1e9, target_bytes=2 * MB) == (1, 2)
    assert choose_recomputed(tensors, 1e9, target_bytes=2 * MB + 1) == (1, 2, 3)
    assert choose_recomputed(tensors, 1e9, target_bytes=0) == ()


def test_non_positive_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        choose_recomputed([], bytes_per_second=0.0)


@st.composite
def steps(draw: st.DrawFn) -> list[ComputedStorage]:
    count = draw(st.integers(0, 12))
    return [
        ComputedStorage(
            i,
            draw(st.integers(1, MB)),
            draw(st.none() | st.floats(0, 1e-3)),
            tuple(draw(st.sets(st.integers(-2, i - 1), max_size=3))),
            draw(st.booleans()),
        )
        for i in range(count)
    ]


@given(steps(), st.floats(1e6, 1e10))
def test_inputs_of_chosen_tensors_are_available(tensors: list[ComputedStorage], speed: float) -> None:
    chosen = choose_recomputed(tensors, speed)
    assert len(set(chosen)) == len(chosen)
    by_id = {tensor.storage: tensor for tensor in tensors}
    for storage in chosen:
        tensor = by_id[storage]
        assert tensor.seconds is not None
        assert not tensor.saved or tensor.seconds < 2 * tensor.bytes / speed
        for i in tensor.inputs:  # existing before the step, saved and not chosen, or recomputed first
            assert i not in by_id or by_id[i].saved != (i in chosen)


@given(steps(), st.floats(1e6, 1e10), st.integers(0, 3 * MB))
def test_choice_for_enough_bytes_is_a_prefix_of_all(tensors: list[ComputedStorage], speed: float, enough: int) -> None:
    all_chosen, prefix = choose_recomputed(tensors, speed), choose_recomputed(tensors, speed, target_bytes=enough)
    assert all_chosen[: len(prefix)] == prefix
    sizes = {tensor.storage: tensor.bytes for tensor in tensors if tensor.saved}
    total = sum(sizes.get(i, 0) for i in prefix)
    assert total >= enough or prefix == all_chosen
