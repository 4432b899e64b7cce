"""The switches of the search for a plan, one for each technique; ``benchmarks/ablate.py`` measures them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SearchParams:
    """Switches and efforts of ``auto``.

    Efforts count work (ops inspected, changes tried), never seconds. So a step gets the same plan on every machine.

    Attributes:
        relaxations: how often the linear program chooses the recomputed gaps. After the first time it uses the seconds
            that the chains of its last answer take. 0: never.
        shares: shares of the bytes above the limit that the first candidates offload; they recompute the others.
            Limited homes lower these shares to their capacity. Empty: no such candidates.
        zooms: how often a share between the best ones is tried; halved for steps of more than 3,000 ops.
        slacks: how much earlier than just in time copies in may start, in multiples of their own seconds; all are
            tried.
        tunings: random changes to each candidate, judged by its schedule. In proportion fewer in steps of more than
            1,500 ops.
        recompute_changes: share of the changes that change which gaps are recomputed, or where.
        tuned: how many of the best candidates of each slack are tuned further.
        further: random changes to each of these.
        placed: candidates that are placed at addresses, at most, in steps of 2,000 ops. In proportion fewer in longer
            steps; up to four times more in shorter ones.
        polish_ops: ops that the local search over placed, simulated plans may lower in total; 0: no such search.
        annealing: without homes, random changes to recomputation for each gap and each of a thousand limits. 0: only
            those that find the smallest budget (``planning.front``).
    """

    relaxations: int = 2
    shares: tuple[float, ...] = (0.0, 0.25, 0.5)
    zooms: int = 2
    slacks: tuple[float, ...] = (0.25, 1.5)
    tunings: int = 1000
    recompute_changes: float = 0.5
    tuned: int = 2
    further: int = 8000
    placed: int = 16
    polish_ops: int = 24_000
    annealing: int = 20

    def in_a_hurry(self) -> SearchParams:
        """Return parameters with the least effort: a few hundred ops then take a fraction of a second."""
        return replace(
            self,
            relaxations=0 if self.shares else min(self.relaxations, 1),
            shares=self.shares[-1:],
            zooms=0,
            tunings=min(self.tunings, 200),
            further=0,
            placed=min(self.placed, 4),
            polish_ops=0,
            annealing=min(self.annealing, 2),
        )


QUICK = SearchParams(relaxations=1, shares=(0.5,), zooms=0, tunings=500, further=0, placed=4, polish_ops=0, annealing=2)
