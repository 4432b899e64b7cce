"""The fastest algorithm whose workspace fits, and in doubt the one that an op takes by itself."""

from __future__ import annotations

import pytest

from outofcore.costs import OpCost
from outofcore.planning.algorithms import choose

OWN = OpCost(1.0, 100)


@pytest.mark.parametrize(
    ("others", "room", "wanted"),
    [
        ([], 1000, None),
        ([OpCost(0.5, 50), OpCost(0.4, 900)], 1000, 1),
        # The faster of the two has too much workspace.
        ([OpCost(0.5, 50), OpCost(0.4, 900)], 800, 0),
        # Not worth other bits: measurements differ by so much.
        ([OpCost(0.95, 50)], 1000, None),
        # Its own does not fit, and so a slower one is taken; of two that fit the faster.
        ([OpCost(3.0, 50), OpCost(2.0, 60)], 80, 1),
        # None fits: the least.
        ([OpCost(3.0, 50), OpCost(2.0, 60)], 40, 0),
        ([OpCost(0.5, 150)], 40, None),
        # Alike: the first.
        ([OpCost(0.5, 50), OpCost(0.5, 50)], 1000, 0),
    ],
)
def test_the_fastest_that_fits(others: list[OpCost], room: int, wanted: int | None) -> None:
    assert choose(OWN, others, room) == wanted
