"""Candidate plans: tuned states of a step (``tuner``), compared by their schedules."""

from __future__ import annotations

from array import array
from collections.abc import Set
from dataclasses import dataclass

from outofcore.plan import Plan
from outofcore.planning.parameters import SearchParams
from outofcore.planning.problem import Ints, Problem
from outofcore.planning.remat.chains import Choices
from outofcore.planning.tuner import TunedState, Tuner, TunerState

# Maximum number of scheduling passes for a state.
_PASSES = 8
# Tuning tries in proportion fewer changes in steps of more ops.
_TUNING_OPS = 1500
# Approximate seconds to schedule an op; and the most time that tuning may take, in steps, because the plan must save
# that time again.
_OP_SECONDS, _RUNS = 5e-8, 20


@dataclass(frozen=True)
class Candidate:
    """A state of a step with the schedule of its copies."""

    how: str  # how it was found, for logs and reports
    limit: int  # bytes that large blocks may take
    tuned_state: TunedState
    slack: float  # how much earlier than just in time copies in may start, in multiples of their own seconds

    @property
    def value(self) -> float:
        return self.tuned_state.value

    @property
    def plan(self) -> Plan:
        return Plan("auto", self.limit, self.tuned_state.decisions, self.tuned_state.staying)


class CandidateTuner:
    """Creates and improves the candidates of a step; the given ``choices`` must recompute no gap."""

    def __init__(self, choices: Choices, params: SearchParams) -> None:
        self.problem, self.params, self._tuner = choices.problem, params, Tuner(choices)

    def create(self, origin: str, choices: Choices, homes: Ints) -> list[Candidate]:
        """Return tuned candidates from these choices: one for each lead time of copies (slack), if it fits."""
        state = TunerState(choices.kind, choices.fetch, array("q", homes.tolist()))
        candidates: list[Candidate] = []
        for slack in self.params.slacks:
            begun = self._tuner.begin(state, slack, _PASSES)
            if begun is not None:
                tuned = self.tune(Candidate(origin, self.problem.limit, begun, slack), self.params.tunings)
                candidates += [] if tuned is None else [tuned]
        return candidates

    def tune(
        self,
        candidate: Candidate,
        changes: int,
        spared: Ints | None = None,
        forced_offloads: Set[int] = frozenset(),
        seed: int = 0,
    ) -> Candidate | None:
        """Improve a candidate by random changes (arguments: see ``Tuner.begin``); None if it cannot fit."""
        start = self._tuner.begin(candidate.tuned_state.state, candidate.slack, _PASSES, spared, forced_offloads)
        if start is None:
            return None
        tries = tuning_changes(self.problem, changes)
        tuned_state = self._tuner.tune(tries, self.params.recompute_changes, seed) if tries else start
        return Candidate(candidate.how, candidate.limit, tuned_state, candidate.slack)


def tuning_changes(problem: Problem, changes: int) -> int:
    """Return the number of changes to try: fewer in steps of many ops, and in steps that take little time."""
    ops = max(len(problem.graph.ops), 1)
    return int(min(changes, changes * _TUNING_OPS // ops, _RUNS * problem.costs.compute_seconds / (ops * _OP_SECONDS)))
