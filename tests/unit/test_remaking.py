"""Which saved tensors are worth making again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outofcore.follow.remaking import ComputedStorage, choose_recomputed

MB = 1_000_000


def cheap(storage: int, *inputs: int, saved: bool = True, seconds: float | None = 1e-4) -> ComputedStorage:
    return ComputedStorage(storage, MB, seconds, inputs, saved)


def test_what_is_quicker_made_than_copied_is_chosen() -> None:
    hidden = cheap(1, 0, seconds=1.0)
    assert choose_recomputed([hidden, cheap(2, 1)], 1e9) == (2,)
    # Out and back at 1 GB/s takes 2 ms.
    assert choose_recomputed([hidden, cheap(2, 1, seconds=1.9e-3)], 1e9) == (2,)
    assert choose_recomputed([hidden, cheap(2, 1, seconds=2.1e-3)], 1e9) == ()


def test_what_is_not_saved_or_cannot_be_run_again_is_not_chosen() -> None:
    assert choose_recomputed([cheap(1, 0, saved=False), cheap(2, 0, seconds=None)], 1e9) == ()


def test_what_it_starts_from_has_to_be_kept_anyway() -> None:
    assert choose_recomputed([cheap(1, 0, saved=False, seconds=None), cheap(2, 1)], 1e9) == ()
    # Of a chain of cheap ones, each second one; the cheapest first.
    chain = [cheap(1, 0, seconds=3e-4), cheap(2, 1, seconds=1e-4), cheap(3, 2, seconds=2e-4)]
    assert choose_recomputed(chain, 1e9) == (2,)
    chain[1] = cheap(2, 1, seconds=5e-4)
    assert choose_recomputed(chain, 1e9) == (3, 1)


def test_what_was_made_on_the_way_counts_with_its_time() -> None:
    hidden = cheap(1, 0, seconds=1.0)
    way = [hidden, cheap(2, 1, saved=False, seconds=9e-4), cheap(3, 2, 1, saved=False, seconds=4e-4)]
    assert choose_recomputed([*way, cheap(4, 3, seconds=6e-4)], 1e9) == (4, 2, 3)
    assert choose_recomputed([*way, cheap(4, 3, seconds=8e-4)], 1e9) == ()
    # From four in a row at most, the one that was saved included.
    row = [hidden, *(cheap(i, i - 1, saved=False, seconds=1e-5) for i in range(2, 6))]
    assert choose_recomputed([*row[:4], cheap(5, 4)], 1e9) == (5, 2, 3, 4)
    assert choose_recomputed([*row, cheap(6, 5)], 1e9) == ()


def test_it_stops_when_it_is_enough() -> None:
    made = [cheap(i, 0, seconds=1e-5 * i) for i in range(1, 6)]
    assert choose_recomputed(made, 1e9, target_bytes=2 * MB) == (1, 2)
    assert choose_recomputed(made, 1e9, target_bytes=2 * MB + 1) == (1, 2, 3)
    assert choose_recomputed(made, 1e9, target_bytes=0) == ()


def test_speeds_that_make_no_sense_are_refused() -> None:
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
def test_no_recipe_needs_what_is_not_kept(made: list[ComputedStorage], speed: float) -> None:
    chosen = choose_recomputed(made, speed)
    assert len(set(chosen)) == len(chosen)
    by_id = {one.storage: one for one in made}
    for storage in chosen:
        one = by_id[storage]
        assert one.seconds is not None
        assert not one.saved or one.seconds < 2 * one.bytes / speed
        for i in one.inputs:  # there before, saved and to be kept, or made on the way
            assert i not in by_id or by_id[i].saved != (i in chosen)


@given(steps(), st.floats(1e6, 1e10), st.integers(0, 3 * MB))
def test_enough_is_a_beginning_of_all(made: list[ComputedStorage], speed: float, enough: int) -> None:
    every, some = choose_recomputed(made, speed), choose_recomputed(made, speed, target_bytes=enough)
    assert every[: len(some)] == some
    sizes = {one.storage: one.bytes for one in made if one.saved}
    total = sum(sizes.get(i, 0) for i in some)
    assert total >= enough or some == every
