"""Replace the plans of a session's steps, where their runs have shown that they were wrong.

A step may take longer or shorter than predicted, by ``replanning``; or an op asks for memory that no plan foresaw: a
surge. Processes that follow one plan replace it once, with what rank 0 has measured.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection
from dataclasses import replace

from outofcore.analysis import placed_bytes
from outofcore.background import Answer, BackgroundPlanner, plan_job
from outofcore.errors import ArenaError, BudgetError, SpillError, ValidationError
from outofcore.execution.backend import in_terms_of_the_budget
from outofcore.execution.runner import Runner
from outofcore.known_steps import KnownStep, KnownSteps
from outofcore.peers import Peers
from outofcore.planned_step import (
    PlannedStep,
    grown_requests,
    job_of,
    plan,
    remember_requests,
    with_answer,
)
from outofcore.planning.placement.requests import Requests
from outofcore.planning.policy import quick_policy
from outofcore.profiling.links import keep_link
from outofcore.profiling.ops import keep_profiles
from outofcore.program import Timeline
from outofcore.replanning import MEASURED_STEPS, Watch, calm_of
from outofcore.step_planner import StepPlanner
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# The planner runs only where a core is idle, so that steps keep their pace.
_NICENESS = 20


class TooSmallError(Exception):
    """No plan of a step has room for what its ops ask for, as the ``refusal`` says; nothing has been touched."""

    def __init__(self, refusal: BudgetError) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class PlanKeeper:
    """Judges the plans of known steps by their runs, and replaces them.

    Attributes:
        background: makes plans in another process.
    """

    def __init__(self, steps: KnownSteps, planner: StepPlanner, peers: Peers | None) -> None:
        self._steps, self._peers = steps, peers
        self._budget, self._policy, self._plans = planner.budget, planner.policy, planner.plans
        self._stores, self._cache, self._backend = planner.stores, planner.cache, planner.backend
        self.background: BackgroundPlanner[tuple[KnownStep, PlannedStep]] = BackgroundPlanner()
        weakref.finalize(self, self.background.close).atexit = False
        self._clock = time.perf_counter
        self._surges: dict[str, Requests] = {}  # by family: what ops have asked for beyond their plans
        self._surge_count = 0

    def judge(self, known: KnownStep, timeline: Timeline | None) -> None:
        """Plan again where the runs of a plan have shown that it was wrong."""
        if known.runner is None or timeline is None:
            return
        if self._peers is not None and self._peers.follow_one_plan:
            self._judge_together(known, known.runner, timeline, self._peers)
            return
        if self.note_surges(known):
            return  # the next call has a plan with it
        known.runs += 1
        # The first step of a program warms up: libraries fill their caches, and optimizer state may be made.
        warming = known.runs == 1
        if known.watch is None:
            planned = known.step.planned
            known.watch = Watch.of(planned.program, planned.timeline.step_seconds, is_quick=known.step.is_quick)
        if warming or not known.step.leaves_device:
            known.watch = known.watch.warmed()
        else:
            known.watch = known.watch.ran(known.step.planned.program, timeline)
        watch = known.watch
        if watch.has_settled and known.step.planning_seconds:
            self._keep_plan(known.step)
        if watch.asks and not self.background.is_busy:
            self._plan_for_times(known, watch)
        self._take_plan()

    def _plan_for_times(self, known: KnownStep, watch: Watch) -> None:
        """Have a plan made with the times that ops and copies took; in another process, or else if that is quick."""
        # Peers would wait for this process, and each would search beside the steps.
        if self._peers is not None and self._peers.joined:
            known.watch = watch.kept()
            return
        step, begin = known.step, self._clock()
        job = job_of(step, self._policy, calm_of(watch.measured))
        if self.background.start((known, step), job, _NICENESS):
            known.watch = watch.asked(self._clock() - begin)
        elif step.planning_seconds and watch.affords(step.planning_seconds + watch.exchange):
            self._steps.leave_arena()  # planning takes memory, too, and not beside that of the step
            answer = plan_job(replace(job, policy=quick_policy(self._policy)))
            known.watch = watch.asked(self._clock() - begin)
            self._take(known, known.watch, answer)
        else:
            known.watch = watch.kept()

    def _take_plan(self) -> None:
        """Go on with the plan that was made meanwhile, if one was."""
        made = self.background.poll()
        if made is None:
            return
        (known, step), answer = made
        # It may have been planned for other reasons since, or be forgotten.
        if known.watch is not None and known.step is step and any(one is known for one in self._steps.known.values()):
            self._take(known, known.watch, answer)

    def _take(self, known: KnownStep, watch: Watch, answer: Answer) -> None:
        before, begin = known.step, self._clock()
        again = with_answer(before, answer, watch.usual, self._stores)
        if again is None:
            known.watch = watch.kept()
            return
        self._keep(before, again, None)
        predicted = again.planned.timeline.step_seconds
        if not answer.is_new:
            known.step, known.watch = again, watch.kept(predicted)
            if known is self._steps.active:
                self._steps.shown = again
            return
        was_active = known is self._steps.active
        self._steps.exchange(known, again)
        if was_active:
            self._steps.activate(known)
        known.watch = watch.exchanged(predicted, self._clock() - begin)

    def _judge_together(self, known: KnownStep, runner: Runner, timeline: Timeline, peers: Peers) -> None:
        """Judge a plan once that all processes have to follow: what rank 0 has measured decides for all."""
        if known.is_judged:
            return
        known.runs += 1
        if known.runs > 1:
            known.measured.append(timeline)
        before, measured = known.step, known.measured
        if len(measured) < MEASURED_STEPS:
            return
        known.is_judged, known.measured = True, []
        surprises = runner.surprises()
        if before.leaves_device:
            self._steps.leave_arena()

        def keep(again: PlannedStep, times_were_wrong: bool) -> None:
            self._keep(before, again, None if times_were_wrong else surprises.keys())

        again = peers.replan(before, measured, surprises, keep)
        if again is not None:
            self._steps.exchange(known, again)

    def _keep(self, before: PlannedStep, again: PlannedStep, ops: Collection[int] | None) -> None:
        """Have later processes know what steps have shown; of some ops alone, or of all and the links, and the plan."""
        if self._cache is None:
            return
        facts = self._backend.facts()
        keep_profiles(self._cache, again.graph, again.profiles, only=ops, device=facts)
        for store, old, new in zip(self._stores, before.costs.homes, again.costs.homes, strict=True):
            keep_link(store, self._cache, old, new, facts)
        if not again.is_quick:
            self._keep_plan(again)

    def _keep_plan(self, step: PlannedStep) -> None:
        if step.choice is not None:
            self._plans.keep(step.choice, step.graph, step.costs, step.budget, step.planned, is_quick=False)

    # Requests beyond the plan

    def note_surges(self, known: KnownStep) -> bool:
        """Remember what ops have asked for in the last run beyond their plan; return whether any has."""
        runner = known.runner
        if runner is None or (self._peers is not None and self._peers.follow_one_plan):
            return False
        seen = runner.surprises()
        step = known.wanted or known.step
        grown = grown_requests(step, seen)
        if runner.refused is not None and known.wanted is None and (op := runner.refused[0].id) not in grown:
            # It has room for them in another order; so that planning again ends, it gets more.
            requests = seen.get(op, step.profiles[op].requests)
            more = step.costs.ops[op].workspace_bytes + placed_bytes(runner.refused[1])
            grown[op] = replace(requests, workspace_bytes=more)
        if not grown:
            return False
        step = known.wanted = remember_requests(step, grown, runner.first_ops)
        for op, requests in grown.items():
            family, before = step.graph.ops[op].family, 0
            if family in self._surges:
                before = self._surges[family].workspace_bytes
            if family and op not in runner.first_ops and requests.workspace_bytes > before:
                self._surges[family] = requests
        if self._cache is not None:
            facts = self._backend.facts()
            keep_profiles(self._cache, step.graph, step.profiles, only=grown.keys(), device=facts)
        self._surge_count += 1
        known.surges = -1
        known.has_overflowed |= runner.has_overflowed
        return True

    def plan_for_surges(self, known: KnownStep, *, must_grow: bool) -> None:
        """Plan a step again that has not taken up what ops have asked for, in it or with inputs of another kind.

        Raises ``TooSmallError`` if it ``must_grow``, and no plan has room for what was asked for.
        """
        if known.surges != self._surge_count:
            is_own, known.surges = known.surges < 0, self._surge_count
            step = known.wanted or known.step
            wanted = {op.id: self._surges[op.family] for op in step.graph.ops if op.family in self._surges}
            grown = grown_requests(step, wanted)
            if grown or is_own:
                known.wanted = remember_requests(step, grown)
                self._plan_again(known, known.wanted)
        if must_grow and known.too_small is not None:
            raise TooSmallError(known.too_small)

    def _plan_again(self, known: KnownStep, step: PlannedStep) -> None:
        before = known.step
        if before.leaves_device:  # planning takes memory, too, and not beside that of the step
            self._steps.leave_arena()
        try:
            again = plan(
                step.captured, step.costs, step.profiles, step.budget, self._policy, self._stores, quickly=True
            )
        except (BudgetError, SpillError, ValidationError) as error:
            known.too_small = self._too_small(step, error)
            _log.info("no plan has room for what ops have asked for; it is evicted for on demand: %s", error)
            return
        _log.info(
            "planned again for memory that ops asked for: %.3f s predicted by %s",
            again.planned.timeline.step_seconds,
            again.planned.plan.policy,
        )
        known.wanted, known.too_small, known.has_overflowed = None, None, False
        self._steps.exchange(known, replace(again, variant=before.variant, choice=before.choice))

    def _too_small(self, step: PlannedStep, error: Exception) -> BudgetError:
        if isinstance(error, BudgetError):
            return in_terms_of_the_budget(error, self._budget, step.budget)
        return BudgetError(f"no plan has room for what an op asks for beyond what it was measured with: {error}")

    def explain(self, known: KnownStep, error: ArenaError) -> Exception:
        """Return the refusal of a request in the user's terms."""
        runner = known.runner
        if runner is None or runner.refused is None:
            return error
        op, count = runner.refused
        if runner.refusal is not None:
            return runner.refusal
        if known.too_small is not None:
            return known.too_small
        return BudgetError(
            f"{op.text} asked for {format_bytes(count)} beyond its plan, which the budget of "
            f"{format_bytes(self._budget)} cannot hold beside what the op works on; raise the budget"
        )
