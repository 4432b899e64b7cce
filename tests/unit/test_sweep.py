"""The sweep takes the stretch that a plain search over all free bytes would take."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outofcore.planning.sweep import _without


@st.composite
def _stretches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Free stretches and barred ones; of the latter some are there twice, and some lie end to end."""

    def apart(count: int) -> list[tuple[int, int]]:
        bounds = sorted(draw(st.lists(st.integers(0, 60), min_size=2 * count, max_size=2 * count)))
        return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]

    free = [(a, b) for i, (a, b) in enumerate(apart(draw(st.integers(0, 6)))) if i == 0 or a >= 0]
    barred = apart(draw(st.integers(1, 8))) or [(7, 9)]
    again = draw(st.lists(st.sampled_from(barred), max_size=4))
    return free, draw(st.permutations(barred + again))


@settings(max_examples=300, deadline=None)
@given(_stretches(), st.integers(1, 10))
def test_what_is_left_is_found(case: tuple[list[tuple[int, int]], list[tuple[int, int]]], least: int) -> None:
    free, barred = case
    taken = {byte for low, high in barred for byte in range(low, high)}
    expected: list[tuple[int, int]] = []
    for low, high in free:
        left = [byte for byte in range(low, high) if byte not in taken]
        for byte in left:
            if expected and expected[-1][1] == byte and byte != low:
                expected[-1] = (expected[-1][0], byte + 1)
            else:
                expected.append((byte, byte + 1))
    rows = np.array(barred, dtype=np.int64).reshape(-1, 2)
    assert list(_without(free, rows, least)) == [(a, b) for a, b in expected if b - a >= least]
