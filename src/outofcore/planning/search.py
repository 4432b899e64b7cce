"""The search for the best plan: ``policy="auto"`` for steps with a home (``front`` plans the others).

A linear program (``guide``) chooses resident, offloaded and recomputed gaps, and is solved again with the seconds that
its chains really take. Candidates start with different recomputation: the program's; the result of the greedy search
(``remat.selection``) if a share of the bytes above the limit is offloaded; or no recomputation. Each candidate is tuned
(``tuner``), which matters most. The best are tuned further, placed within the budget, repaired where blocks exceed it
(``repair``) and simulated. In small steps the best plan is polished (``polish``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from outofcore.costs import Costs
from outofcore.graph import StepGraph
from outofcore.plan import Plan
from outofcore.planning.candidates import Candidate, CandidateTuner
from outofcore.planning.guide import GapShares, solve
from outofcore.planning.offload_all import offload_all
from outofcore.planning.parameters import SearchParams
from outofcore.planning.placing import (
    ATTEMPTS,
    CandidateOutcome,
    Planned,
    comparison_seconds,
    fit_policy,
    room_for_large,
)
from outofcore.planning.polish import MAX_OPS, polish_plan
from outofcore.planning.problem import Problem
from outofcore.planning.remat.chains import Choices
from outofcore.planning.remat.contents import StepContents
from outofcore.planning.remat.selection import Selection
from outofcore.planning.repair import Attempts
from outofcore.planning.tuner import copy_weight
from outofcore.program import Program
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore.planning")

# In steps of more ops the slow greedy search runs only if the linear program yields no candidate.
_LONG = 5000
# The search for candidates ends at this ratio of step time to compute time; in long steps at the second.
_GOOD, _NEARLY_GOOD = 1.0005, 1.01
# The search ends if a placed plan takes at most this ratio of the best candidate's scheduled time.
_KEPT_PROMISE = 1.02
# The share of the limit that the linear program leaves free: it models flows of bytes, but copies hold whole blocks.
_MARGIN = 0.03
# Shares of limited homes that the bytes above the limit may fill; each is tried if the one before has no candidate.
_FILLED = (0.9, 0.75, 0.6)
# ``placed`` candidates are placed in a step of this many ops, in proportion fewer in longer ones; and the minimum.
_LENGTH, _MIN_PLACED = 2000, 4
# How often the best candidates are tuned further, with other seeds, until a plan keeps its promise.
_SEEDS = 4


def search(graph: StepGraph, costs: Costs, budget: int, params: SearchParams, whole: Program) -> list[Planned]:
    """Return plans within the budget, the best first; ``whole`` is the in-core program, not placed."""
    candidate_search = _CandidateSearch(graph, costs, budget, params, room_for_large(graph, costs, budget, whole))
    candidate_search.search_plans()
    return candidate_search.ranked_plans()


@dataclass
class _CandidateSearch:
    """One search for plans of a step: it tunes candidates (states with schedules) and places the best."""

    graph: StepGraph
    costs: Costs
    budget: int
    params: SearchParams
    room: int  # for large blocks
    planned: list[tuple[str, Planned]] = field(default_factory=list[tuple[str, Planned]])
    outcomes: list[CandidateOutcome] = field(default_factory=list[CandidateOutcome])
    candidates: list[Candidate] = field(default_factory=list[Candidate])

    def __post_init__(self) -> None:
        self.problem = Problem.of(self.graph, self.costs, self.room)
        self.resident_choices = Choices(self.problem, StepContents.of(self.graph, self.costs))
        self.selection = Selection(self.resident_choices)
        self.candidate_tuner = CandidateTuner(self.resident_choices, self.params)
        length = max(len(self.graph.ops), 1)
        self.placements_left = min(max(self.params.placed * _LENGTH // length, _MIN_PLACED), 4 * self.params.placed)
        self.best = inf  # value of the best placed plan
        self.shares: GapShares | None = None
        self.home_choice = self.problem.all_resident()

    def search_plans(self) -> None:
        """Create, tune and place candidates; if no candidate fits, try to offload everything."""
        choices = self.resident_choices
        for turn in range(max(self.params.relaxations, 1)):
            self._solve_relaxation(choices)
            if not turn:
                self._add_candidates("nothing recomputed", self.resident_choices)
            if self.shares is None or self._is_good_enough or turn >= self.params.relaxations:
                break
            choices = self.selection.recompute_gaps(
                g for g in self.resident_choices.recomputable if self.shares.recomputed[g] >= 0.5
            )
            self._add_candidates(f"relaxation {turn + 1}", choices)
        if not self._is_good_enough and (not self._is_long or not self.candidates):
            self._try_shares()
        self.candidates.sort(key=lambda candidate: candidate.value)
        untried = self.candidates
        for seed in range(1, _SEEDS + 1) if untried else ():
            self._place_best([*self._tune_further(seed), *untried])
            untried = []
            if self.placements_left <= 0 or self.best <= self.candidates[0].value * _KEPT_PROMISE:
                break
        if not self.planned:
            self._offload_everything()

    def _tune_further(self, seed: int) -> list[Candidate]:
        """Return the best candidates after further tuning; an empty list if that is unnecessary."""
        if not self.params.further or self._is_good(_GOOD):
            return []
        best = [
            candidate
            for slack in self.params.slacks
            for candidate in [entry for entry in self.candidates if entry.slack == slack][: self.params.tuned]
        ]
        tuned = [self.candidate_tuner.tune(candidate, self.params.further, seed=seed) for candidate in best]
        return [replace(candidate, how=f"{candidate.how}, tuned further") for candidate in tuned if candidate]

    @property
    def _is_long(self) -> bool:
        return len(self.graph.ops) > _LONG

    @property
    def _is_good_enough(self) -> bool:
        return self._is_good(_NEARLY_GOOD if self._is_long else _GOOD)

    def _is_good(self, ratio: float) -> bool:
        """Return whether a candidate takes at most ``ratio`` times the seconds of all ops."""
        return any(candidate.value <= self.costs.compute_seconds * ratio for candidate in self.candidates)

    def _add_candidates(self, origin: str, choices: Choices) -> float:
        """Add candidates tuned from these choices; return the fewest seconds, or infinity if no candidate fits."""
        candidates = self.candidate_tuner.create(origin, choices, self.home_choice)
        if not candidates:
            _log.debug("%s: does not fit", origin)
        for candidate in candidates:
            _log.debug("%s: %.6f s scheduled", origin, candidate.tuned_state.seconds)
            if all(candidate.plan != existing.plan for existing in self.candidates):
                self.candidates.append(candidate)
        return min((candidate.value for candidate in candidates), default=inf)

    def _solve_relaxation(self, choices: Choices) -> None:
        """Solve the linear program with these choices' costs of recomputation; store its shares and homes."""
        self.shares = solve(self.problem, _chain_seconds(choices), _MARGIN, weight=copy_weight(self.costs))
        homes = None if self.shares is None else self.shares.round_to_choice(self.problem)
        self.home_choice = self.problem.all_resident() if homes is None else homes

    def _try_shares(self) -> None:
        """Try candidates that offload a share of the bytes above the limit and recompute the rest."""
        excess = max(
            int((self.resident_choices.held + self.resident_choices.need).max(initial=0)) - self.problem.limit, 0
        )
        room = [inf if home.bytes is None else home.bytes for home in self.problem.homes]
        capacity = sum(room) / max(excess, 1)  # of the homes, as a share
        max_share = _FILLED[0] * capacity
        values = {share: self._try_share(excess, share) for share in self.params.shares if share <= max_share}
        if len(values) < len(self.params.shares):
            # The homes hold more over a step than exceeds the limit at one op, so smaller shares may be needed.
            for part in _FILLED:
                values[part * capacity] = self._try_share(excess, part * capacity)
                if values[part * capacity] < inf:
                    break
        # Recomputation dominates a step without offloading, so its value is a poor estimate for nearby shares.
        values[0.0] = inf
        values.setdefault(min(capacity, 1.0), inf)
        for _ in range(self.params.zooms):
            shares = sorted(values)
            at = min(range(len(shares)), key=lambda i: (values[shares[i]], -i))
            for near in (at - 1, at + 1):
                if 0 <= near < len(shares):
                    share = (shares[at] + shares[near]) / 2
                    values[share] = self._try_share(excess, share)

    def _try_share(self, excess: int, share: float) -> float:
        """Add candidates that offload this share of ``excess`` bytes; return the fewest seconds, or infinity."""
        choices = self.selection.drop(self.problem.limit + int(excess * share))
        return inf if choices is None else self._add_candidates(f"{share:.1%} of the excess offloaded", choices)

    # Placing

    def _tune_to_fit(self, candidate: Candidate, attempts: Attempts) -> Candidate | None:
        """Tune a candidate to need fewer bytes where earlier placements failed; None if it cannot fit."""
        if not attempts.spared_bytes.any() and not attempts.forced_offloads:
            return candidate
        return self.candidate_tuner.tune(
            candidate, self.params.tunings, attempts.spared_bytes, attempts.forced_offloads, seed=attempts.count
        )

    def _place(self, origin: str, plan: Plan, attempts: Attempts) -> Planned | None:
        """Place a plan and record the outcome; return None if it does not fit."""
        planned = attempts.place(plan)
        if planned is not None:
            self._record(origin, planned)
            return planned
        verdict = "the homes are too small for the offloaded tensors"
        if attempts.height < inf:
            verdict = f"its blocks reach {format_bytes(int(attempts.height))}, above the budget"
        _log.debug("%s: %s", origin, verdict)
        self.outcomes.append(CandidateOutcome(origin, plan, attempts.height, None, verdict))
        return None

    def _record(self, origin: str, planned: Planned) -> None:
        seconds = planned.timeline.step_seconds
        _log.debug("%s: %.6f s simulated", origin, seconds)
        self.planned.append((origin, planned))
        self.outcomes.append(
            CandidateOutcome(origin, planned.plan, planned.program.arena_bytes, seconds, "slower than the best")
        )

    def _place_best(self, candidates: list[Candidate]) -> None:
        """Place candidates, the best first; a candidate that does not fit is tuned to need fewer bytes."""
        for candidate in sorted(candidates, key=lambda candidate: candidate.value):
            attempts = Attempts(self.graph, self.costs, self.budget)
            trial: Candidate | None = candidate
            while trial is not None and trial.value < self.best and (self.placements_left > 0 or not self.planned):
                planned = self._place(f"{candidate.how}, attempt {attempts.count + 1}", trial.plan, attempts)
                self.placements_left -= not attempts.is_repeat
                if planned is not None:
                    self.best = min(self.best, comparison_seconds(self.costs, planned))
                    break
                if attempts.is_exhausted or attempts.count >= ATTEMPTS:
                    break
                trial = self._tune_to_fit(candidate, attempts)

    def _offload_everything(self) -> None:
        """Record the plan that offloads each storage between any two consecutive uses, if it fits."""
        for strict in (False, True):

            def everything_leaves(room: int, strict: bool = strict) -> Plan:
                return replace(offload_all(self.graph, room, strict=strict, costs=self.costs), policy="auto")

            planned = fit_policy(self.graph, self.costs, self.budget, everything_leaves)
            if planned is not None:
                self._record("everything offloaded between two uses", planned)
                return

    def _polish(self) -> None:
        """Change the best plans at random (``polish_plan``), and record a better plan if one is found."""
        ranked = sorted(
            (planned for _, planned in self.planned), key=lambda planned: comparison_seconds(self.costs, planned)
        )
        best = ranked[0] if ranked else None
        starts = [planned.plan for planned in ranked[:1]]
        promised = min(self.candidates, key=lambda candidate: candidate.value, default=None)
        if (
            promised is not None
            and best is not None
            and promised.value * _KEPT_PROMISE < comparison_seconds(self.costs, best)
        ):
            starts.append(promised.plan)
        starts.append(offload_all(self.graph, self.budget, costs=self.costs))
        better = polish_plan(self.problem, self.budget, best, starts, self.params)
        if better is not None:
            self._record("polished", better)

    def ranked_plans(self) -> list[Planned]:
        """Return all plans found, the fastest first; plans of a small step are polished before."""
        if self.params.polish_ops and len(self.graph.ops) <= MAX_OPS:
            self._polish()
        ranked = sorted(
            (planned for _, planned in self.planned), key=lambda planned: comparison_seconds(self.costs, planned)
        )
        if ranked:
            chosen = ranked[0]
            outcomes = tuple(
                replace(outcome, verdict="chosen") if outcome.plan is chosen.plan else outcome
                for outcome in self.outcomes
            )
            ranked[0] = replace(chosen, candidates=outcomes)
        return ranked


def _chain_seconds(choices: Choices) -> Mapping[int, float]:
    """Return the seconds of recomputing each recomputable gap, with the other choices unchanged."""
    chains = {g: choices.chain(choices.end[g], (g,)) for g in choices.recomputable}
    return {g: chain.seconds for g, chain in chains.items() if chain is not None}
