"""Which gaps to recompute: a greedy search by single changes.

Whatever costs the fewest seconds per overload removed is dropped, until nothing lies above the limit (overload: bytes
above it, summed over ops). Now and then, and in the end, choices are *settled*: what runs again is held from an earlier
run on where that saves a run and there is room, and kept altogether where it fits after all. Without that, chains of
runs grow with the square of their length, or all live at once. The loops are in ``remat.cpp``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from outofcore.planning.remat.chains import AGAIN, Choices, Snapshot

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
        return None if found is None else self._choices(found.pairs, limit)

    def settle(self, gaps: Iterable[int]) -> Choices:
        """Choices in which some gaps are recomputed before their next use, or earlier where that saves seconds."""
        limit = self.kept.problem.limit
        pairs = array("q")
        for g in gaps:
            pairs.extend((g, self.kept.end[g]))
        self._search.restore(pairs)
        found = self._search.settle(limit, limit, self._patience)
        assert found is not None, "settled choices are what there is"
        return self._choices(found.pairs, limit)

    def _choices(self, pairs: array[int], limit: int) -> Choices:
        choices = Choices(self.kept.problem, self.kept.contents, limit, like=self.kept)
        is_possible = choices.begin(snapshot_of(pairs))
        assert is_possible, "what a search found can be recomputed"
        return choices


def patience(choices: Choices) -> int:
    """Return how many runs of chains a search may look at."""
    gaps = len(choices.free)
    return min(_RUNS_EACH * (gaps + _EXTRA), max(_MOST, _MANY * gaps))


def snapshot_of(pairs: array[int]) -> Snapshot:
    """Return pairs of gaps that are recomputed and the ops before which they come back as a change to choices."""
    return tuple((g, AGAIN, fetch) for g, fetch in zip(pairs[::2], pairs[1::2], strict=True))
