"""Which gaps to recompute: a greedy search by single changes.

Whatever costs the fewest seconds per overload removed is dropped, until nothing lies above the limit (overload: bytes
above it, summed over ops). Now and then, and in the end, choices are *settled*: what runs again is held from an earlier
run on where that saves a run and there is room, and kept altogether where it fits after all. Without that, chains of
runs grow with the square of their length, or all live at once. The loops are in ``remat.cpp``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from outofcore.errors import GraphError
from outofcore.planning.remat.chains import AGAIN, Choices

# Runs of chains that a search may look at: for each gap and for a few more, but no more than the most altogether; of
# very many gaps, so many for each.
_RUNS_EACH, _EXTRA, _MOST, _MANY = 1000, 50, 300_000, 150


class Selection:
    """The greedy search over the gaps of a step.

    Args:
        kept: choices in which nothing is recomputed.
    """

    def __init__(self, kept: Choices) -> None:
        self.kept, self._search = kept, kept.search()
        self._patience = patience(kept)

    def drop(self, limit: int) -> Choices | None:
        """Choices of what to recompute so that large blocks take no more than a limit; None if none are found.

        What an op needs with its chain keeps to the limit of the problem, which may be lower.
        """
        self._search.restore(array("q"))
        found = self._search.drop(limit, min(limit, self.kept.problem.limit), self._patience)
        return None if found is None else choices_of(self.kept, found.pairs, limit)

    def settle(self, gaps: Iterable[int]) -> Choices:
        """Choices in which some gaps are recomputed before their next use, or earlier where that saves seconds."""
        limit = self.kept.problem.limit
        pairs = array("q")
        for g in gaps:
            pairs.extend((g, self.kept.end[g]))
        self._search.restore(pairs)
        return choices_of(self.kept, self._search.settle(limit, limit, self._patience).pairs, limit)


def patience(choices: Choices) -> int:
    """Return how many runs of chains a search may look at."""
    gaps = len(choices.free)
    return min(_RUNS_EACH * (gaps + _EXTRA), max(_MOST, _MANY * gaps))


def choices_of(kept: Choices, pairs: array[int], limit: int) -> Choices:
    """Return choices within a limit in which gaps are recomputed, as ``Annealed.pairs`` names them."""
    choices = Choices(kept.problem, kept.contents, limit, like=kept)
    again = tuple((g, AGAIN, fetch) for g, fetch in zip(pairs[::2], pairs[1::2], strict=True))
    if not choices.begin(again):
        raise GraphError(f"a search recomputes what cannot be, which is a fault of outofcore: {again}")
    return choices
