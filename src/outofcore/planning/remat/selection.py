"""Which gaps to recompute: a greedy search by single changes.

It drops the gap with the fewest seconds per overload removed, until no op is above the limit (overload: bytes above it,
summed over ops). Now and then, and in the end, it *settles* choices: a recomputed gap is fetched by an earlier chain if
that saves a run and fits, or kept if it fits after all. Otherwise chains would grow with the square of their length, or
all be resident at once. The loops are in ``remat.cpp``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from outofcore.errors import GraphError
from outofcore.planning.remat.chains import RECOMPUTED, Choices

# Runs of chains that a search may inspect: for each gap and each of some extra gaps, at most; and the maximum of these
# runs, or a maximum for each gap if that is more.
_RUNS_EACH, _EXTRA, _MOST, _MANY = 1000, 50, 300_000, 150


class Selection:
    """Greedy searches for gaps to recompute, starting from ``choices`` that recompute no gap."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self._search = choices, choices.open_search()
        self._max_runs = max_chain_runs(choices)

    def drop(self, limit: int) -> Choices | None:
        """Recompute gaps until large blocks take at most ``limit`` bytes; return the choices, or None on failure."""
        self._search.restore(array("q"))
        # An op with its chain must stay within the problem's limit, which may be lower.
        best = self._search.drop(limit, min(limit, self.choices.problem.limit), self._max_runs)
        return None if best is None else choices_from_pairs(self.choices, best.pairs, limit)

    def recompute_gaps(self, gaps: Iterable[int]) -> Choices:
        """Return choices that recompute ``gaps``, except where another choice is faster and fits."""
        limit = self.choices.problem.limit
        pairs = array("q")
        for g in gaps:
            pairs.extend((g, self.choices.end[g]))
        self._search.restore(pairs)
        return choices_from_pairs(self.choices, self._search.settle(limit, limit, self._max_runs).pairs, limit)


def max_chain_runs(choices: Choices) -> int:
    """Return the maximum number of recomputed ops that a search may inspect."""
    gaps = len(choices.recomputable)
    return min(_RUNS_EACH * (gaps + _EXTRA), max(_MOST, _MANY * gaps))


def choices_from_pairs(base: Choices, pairs: array[int], limit: int) -> Choices:
    """Return a copy of ``base`` that recomputes each gap of ``pairs`` before the op paired with it."""
    choices = Choices(base.problem, base.contents, limit, like=base)
    snapshot = tuple((g, RECOMPUTED, fetch) for g, fetch in zip(pairs[::2], pairs[1::2], strict=True))
    if not choices.apply_snapshot(snapshot):
        raise GraphError(
            f"a search recomputed gaps that cannot be recomputed: {snapshot}; this is a bug in outofcore: please "
            "report it"
        )
    return choices
