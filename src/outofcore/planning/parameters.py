"""What the search for a plan does, and how much of it: one documented switch for each technique.

Each has earned its default: ``benchmarks/ablate.py`` prints what every one gives in step time and costs in planning
time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SearchParams:
    """Switches and efforts of ``auto``.

    Efforts are counted in work (ops looked at, changes tried), never in seconds, so that the same step gives the same
    plan on every machine.

    Attributes:
        relaxations: how often the linear program is asked what to recompute, after the first time with the
            seconds that the chains of its last answer take; 0: it is not.
        shares: shares of the bytes above the limit that are offloaded, the rest being computed again, in the first
            candidates. Limited homes lower these shares to what they can hold. Empty: no candidates by share.
        zooms: how often a share between the best ones is tried; halved for steps of more than 3,000 ops.
        slacks: how much earlier than just in time copies in may start, in multiples of their own seconds; each is
            tried.
        tunings: random changes to each candidate that the schedule judges (in steps of more than 1,500 ops, in
            proportion fewer).
        recompute_changes: share of the changes that recompute a gap, recompute it elsewhere, or no longer do.
        tuned: how many of the best candidates of each slack are tuned further.
        further: random changes to each of these.
        placed: candidates placed at addresses at most in steps of 2,000 ops; in longer steps fewer, in proportion, and
            in shorter ones up to four times as many.
        polish_ops: ops that all lowerings of the local search over placed, simulated plans may run through; 0: no such
            search.
        annealing: where nothing can be offloaded, random changes to what is recomputed that are tried on each of a
            thousand limits, for each gap; 0: only those that find the smallest budget (``planning.front``).
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
        """The same techniques with the least effort: a fraction of a second for a few hundred ops."""
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
