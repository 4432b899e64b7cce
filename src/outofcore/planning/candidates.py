"""Candidate plans: states of a step, tuned (``tuner``), that are compared by what their schedules say."""

from __future__ import annotations

from array import array
from collections.abc import Set
from dataclasses import dataclass

from outofcore.plan import Plan
from outofcore.planning.parameters import SearchParams
from outofcore.planning.problem import Ints, Problem
from outofcore.planning.remat.chains import Choices
from outofcore.planning.tuner import State, Tuned, Tuner

# How often the copies of a state are scheduled, at most.
_PASSES = 8
# In steps of more ops, tuning tries fewer changes, in proportion.
_TUNING_OPS = 1500
# About how long it takes to schedule an op; and tuning may take no longer than so many runs of the step, since the plan
# has to win that time back.
_OP_SECONDS, _RUNS = 5e-8, 20


@dataclass(frozen=True)
class Candidate:
    """A state of a step, with the schedule of its copies.

    Attributes:
        how: how it was found, for logs and reports.
        limit: bytes that large blocks may take.
        found: the state.
        slack: how much earlier than just in time copies in may start, in multiples of their own seconds.
    """

    how: str
    limit: int
    found: Tuned
    slack: float

    @property
    def value(self) -> float:
        """Seconds by which candidates are compared: of the step, and a little for copies."""
        return self.found.value

    @property
    def plan(self) -> Plan:
        """What it comes to for the whole step."""
        return Plan("auto", self.limit, self.found.decisions, self.found.staying)


class Candidates:
    """Makes and changes the candidates of a step.

    Args:
        kept: choices in which nothing is recomputed.
        params: how much is searched.
    """

    def __init__(self, kept: Choices, params: SearchParams) -> None:
        self.problem, self.params, self._tuner = kept.problem, params, Tuner(kept)

    def of(self, how: str, choices: Choices, homes: Ints) -> list[Candidate]:
        """Return a tuned candidate for each slack with which the state can be made to fit.

        Args:
            how: how they were found.
            choices: says which gaps are recomputed.
            homes: shape (gaps,), the home of each other gap, or ``KEPT``. More is offloaded if that does not fit.
        """
        state = State(choices.kind, choices.fetch, array("q", homes.tolist()))
        found: list[Candidate] = []
        for slack in self.params.slacks:
            begun = self._tuner.begin(state, slack, _PASSES)
            if begun is not None:
                tuned = self.tuned(Candidate(how, self.problem.limit, begun, slack), self.params.tunings)
                found += [] if tuned is None else [tuned]
        return found

    def tuned(
        self,
        candidate: Candidate,
        changes: int,
        spared: Ints | None = None,
        leaving: Set[int] = frozenset(),
        seed: int = 0,
    ) -> Candidate | None:
        """Return a candidate after random changes that made it no slower; None if it does not fit.

        Args:
            candidate: to begin with.
            changes: how many to try, at most.
            spared: shape (ops,), bytes to leave free at each op, as far as the op by itself does.
            leaving: storages that are not kept between two uses.
            seed: of the changes.
        """
        begun = self._tuner.begin(candidate.found.state, candidate.slack, _PASSES, spared, leaving)
        if begun is None:
            return None
        tries = tuning_tries(self.problem, changes)
        found = self._tuner.tune(tries, self.params.recompute_changes, seed) if tries else begun
        return Candidate(candidate.how, candidate.limit, found, candidate.slack)


def tuning_tries(problem: Problem, changes: int) -> int:
    """Return how many changes tuning tries: fewer in steps of many ops, and in steps that take little time."""
    ops = max(len(problem.graph.ops), 1)
    return int(min(changes, changes * _TUNING_OPS // ops, _RUNS * problem.costs.compute_seconds / (ops * _OP_SECONDS)))
