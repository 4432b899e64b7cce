"""Replace the plans of a session's steps after their runs have shown that they are inaccurate.

Either step times differ from the prediction (``replanning``), or an op requests unplanned memory, a *surge*. Processes
with a shared plan replace it once, with the measurements of rank 0.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection
from dataclasses import replace

from outofcore.analysis import placed_bytes
from outofcore.background import BackgroundPlanner, PlanResult, plan_job
from outofcore.errors import ArenaError, BudgetError, SpillError, ValidationError
from outofcore.execution.backend import add_smallest_budget
from outofcore.execution.runner import Runner
from outofcore.known_steps import KnownStep, KnownSteps
from outofcore.peers import Peers
from outofcore.planned_step import (
    PlannedStep,
    job_of,
    plan,
    select_grown_requests,
    with_new_requests,
    with_planning_result,
)
from outofcore.planning.placement.requests import Requests
from outofcore.planning.policy import quick_policy
from outofcore.profiling.links import update_cached_link
from outofcore.profiling.ops import update_cached_profiles
from outofcore.program import Timeline
from outofcore.replanning import MEASURED_STEPS, PlanWatch, select_quiet_steps
from outofcore.step_planner import StepPlanner
from outofcore.units import format_bytes

_log = logging.getLogger("outofcore")

# The planner runs on idle cores only, so that it does not slow down steps.
_NICENESS = 20


class TooSmallError(Exception):
    """No plan of a step has room for the requests of its ops; ``refusal`` has the numbers."""

    def __init__(self, refusal: BudgetError) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class PlanUpdater:
    """Watches the runs of a session's steps, and replaces a plan if its times or memory requests were wrong."""

    def __init__(self, steps: KnownSteps, planner: StepPlanner, peers: Peers | None) -> None:
        self._steps, self._peers = steps, peers
        self._budget, self._policy, self._plans = planner.budget, planner.policy, planner.plans
        self._stores, self._cache, self._backend = planner.stores, planner.cache, planner.backend
        self.background: BackgroundPlanner[tuple[KnownStep, PlannedStep]] = BackgroundPlanner()
        weakref.finalize(self, self.background.close).atexit = False
        self._clock = time.perf_counter
        self._surges: dict[str, Requests] = {}  # by family of ops
        self._surge_count = 0

    def record_run(self, entry: KnownStep, timeline: Timeline | None) -> None:
        """Record a measured run of a step, and start to plan the step again if its plan was inaccurate."""
        if entry.runner is None or timeline is None:
            return
        if self._peers is not None and self._peers.must_share_plan:
            self._replace_wrong_shared_plan(entry, entry.runner, timeline, self._peers)
            return
        if self.record_surges(entry):
            return  # the next call plans for them
        entry.runs += 1
        # The first step of a program warms up: libraries fill caches, and optimizers may create their state.
        warming = entry.runs == 1
        if entry.watch is None:
            planned = entry.step.planned
            entry.watch = PlanWatch.of(planned.program, planned.timeline.step_seconds, is_quick=entry.step.is_quick)
        if warming or not entry.step.has_evictions:
            entry.watch = entry.watch.record_warmup()
        else:
            entry.watch = entry.watch.record_step(entry.step.planned.program, timeline)
        watch = entry.watch
        if watch.is_plan_confirmed and entry.step.planning_seconds:
            self._store_plan(entry.step)
        if watch.needs_plan and not self.background.is_busy:
            self._plan_for_times(entry, watch)
        self._adopt_finished_plan()

    def _plan_for_times(self, entry: KnownStep, watch: PlanWatch) -> None:
        """Plan a step again with measured times, in the background if possible."""
        # Peers would wait for this process, and each process would search concurrently with its steps.
        if self._peers is not None and self._peers.joined:
            entry.watch = watch.keep_plan()
            return
        step, begin = entry.step, self._clock()
        job = job_of(step, self._policy, select_quiet_steps(watch.measured))
        if self.background.start((entry, step), job, _NICENESS):
            entry.watch = watch.record_planning(self._clock() - begin)
        elif step.planning_seconds and watch.can_afford(step.planning_seconds + watch.exchange_seconds):
            self._steps.leave_arena()  # frees memory for planning
            answer = plan_job(replace(job, policy=quick_policy(self._policy)))
            entry.watch = watch.record_planning(self._clock() - begin)
            self._adopt_plan(entry, entry.watch, answer)
        else:
            entry.watch = watch.keep_plan()

    def _adopt_finished_plan(self) -> None:
        """Adopt a plan that the background process has finished, unless its step has changed meanwhile."""
        finished = self.background.poll()
        if finished is None:
            return
        (entry, step), answer = finished
        # The step may have been planned again or forgotten meanwhile.
        if (
            entry.watch is not None
            and entry.step is step
            and any(other is entry for other in self._steps.by_signature.values())
        ):
            self._adopt_plan(entry, entry.watch, answer)

    def _adopt_plan(self, entry: KnownStep, watch: PlanWatch, result: PlanResult) -> None:
        """Adopt the plan that a planning job returned, or keep the old plan with a corrected prediction."""
        before, begin = entry.step, self._clock()
        new_step = with_planning_result(before, result, watch.step_seconds, self._stores)
        if new_step is None:
            entry.watch = watch.keep_plan()
            return
        self._store_measurements(before, new_step, None)
        predicted = new_step.planned.timeline.step_seconds
        if not result.is_new:
            entry.step, entry.watch = new_step, watch.keep_plan(predicted)
            if entry is self._steps.active:
                self._steps.last_step = new_step
            return
        was_active = entry is self._steps.active
        self._steps.replace_plan(entry, new_step)
        if was_active:
            self._steps.activate(entry)
        entry.watch = watch.record_exchange(predicted, self._clock() - begin)

    def _replace_wrong_shared_plan(self, entry: KnownStep, runner: Runner, timeline: Timeline, peers: Peers) -> None:
        """Replace the plan of all processes, once, if steps measured in rank 0 show that it was wrong."""
        if entry.is_judged:
            return
        entry.runs += 1
        if entry.runs > 1:
            entry.measured.append(timeline)
        before, measured = entry.step, entry.measured
        if len(measured) < MEASURED_STEPS:
            return
        entry.is_judged, entry.measured = True, []
        unplanned = runner.find_unplanned_requests()
        if before.has_evictions:
            self._steps.leave_arena()

        def keep(new_step: PlannedStep, times_were_wrong: bool) -> None:
            self._store_measurements(before, new_step, None if times_were_wrong else unplanned.keys())

        new_step = peers.replan(before, measured, unplanned, keep)
        if new_step is not None:
            self._steps.replace_plan(entry, new_step)

    def _store_measurements(self, before: PlannedStep, after: PlannedStep, ops: Collection[int] | None) -> None:
        """Store measured costs of ``ops`` (None: all) and of copies; store the new plan unless it is a quick one."""
        if self._cache is None:
            return
        facts = self._backend.facts()
        update_cached_profiles(self._cache, after.graph, after.profiles, only=ops, device=facts)
        for store, old, new in zip(self._stores, before.costs.homes, after.costs.homes, strict=True):
            update_cached_link(store, self._cache, old, new, facts)
        if not after.is_quick:
            self._store_plan(after)

    def _store_plan(self, step: PlannedStep) -> None:
        if step.choice is not None:
            self._plans.keep(step.choice, step.graph, step.costs, step.budget, step.planned, is_quick=False)

    # Requests beyond the plan

    def record_surges(self, entry: KnownStep) -> bool:
        """Record memory that ops requested beyond the plan in the last run; return whether anything was recorded."""
        runner = entry.runner
        if runner is None or (self._peers is not None and self._peers.must_share_plan):
            return False
        unplanned = runner.find_unplanned_requests()
        step = entry.unplanned_step or entry.step
        grown = select_grown_requests(step, unplanned)
        if (
            runner.refused_request is not None
            and entry.unplanned_step is None
            and (op := runner.refused_request[0].id) not in grown
        ):
            # The plan has enough bytes, but in another order. More bytes each time make sure that planning ends.
            requests = unplanned.get(op, step.profiles[op].requests)
            more = step.costs.ops[op].workspace_bytes + placed_bytes(runner.refused_request[1])
            grown[op] = replace(requests, workspace_bytes=more)
        if not grown:
            return False
        step = entry.unplanned_step = with_new_requests(step, grown, runner.first_ops)
        for op, requests in grown.items():
            family, before = step.graph.ops[op].family, 0
            if family in self._surges:
                before = self._surges[family].workspace_bytes
            if family and op not in runner.first_ops and requests.workspace_bytes > before:
                self._surges[family] = requests
        if self._cache is not None:
            facts = self._backend.facts()
            update_cached_profiles(self._cache, step.graph, step.profiles, only=grown.keys(), device=facts)
        self._surge_count += 1
        entry.covered_surges = -1
        entry.has_overflowed |= runner.has_overflowed
        return True

    def plan_for_surges(self, entry: KnownStep, *, must_grow: bool) -> None:
        """Plan a step again if its ops, or similar ops of other steps, requested more memory than planned.

        ``must_grow``: raise ``TooSmallError`` if no plan has room for these requests.
        """
        if entry.covered_surges != self._surge_count:
            has_own_surges, entry.covered_surges = entry.covered_surges < 0, self._surge_count
            step = entry.unplanned_step or entry.step
            requests = {op.id: self._surges[op.family] for op in step.graph.ops if op.family in self._surges}
            grown = select_grown_requests(step, requests)
            if grown or has_own_surges:
                entry.unplanned_step = with_new_requests(step, grown)
                self._plan_for_requests(entry, entry.unplanned_step)
        if must_grow and entry.refusal is not None:
            raise TooSmallError(entry.refusal)

    def _plan_for_requests(self, entry: KnownStep, step: PlannedStep) -> None:
        """Plan a step again with its new memory requests; if that fails, keep the plan and set ``entry.refusal``."""
        before = entry.step
        if before.has_evictions:
            self._steps.leave_arena()  # frees memory for planning
        try:
            new_step = plan(
                step.captured, step.costs, step.profiles, step.budget, self._policy, self._stores, quickly=True
            )
        except (BudgetError, SpillError, ValidationError) as error:
            entry.refusal = self._refusal_for_user(step, error)
            _log.info("no plan has room for the requests of ops; tensors are evicted on demand: %s", error)
            return
        _log.info(
            "planned again for memory that ops asked for: %.3f s predicted by %s",
            new_step.planned.timeline.step_seconds,
            new_step.planned.plan.policy,
        )
        entry.unplanned_step, entry.refusal, entry.has_overflowed = None, None, False
        self._steps.replace_plan(entry, replace(new_step, variant=before.variant, choice=before.choice))

    def _refusal_for_user(self, step: PlannedStep, error: Exception) -> BudgetError:
        """Return the reason why planning failed, as an error about the budget that the user named."""
        if isinstance(error, BudgetError):
            return add_smallest_budget(error, self._budget, step.budget)
        return BudgetError(f"no plan has room for an op that requests more memory than measured: {error}")

    def explain_refusal(self, entry: KnownStep, error: ArenaError) -> Exception:
        """Return the error that explains to the user why a memory request was refused."""
        runner = entry.runner
        if runner is None or runner.refused_request is None:
            return error
        op, count = runner.refused_request
        if runner.eviction_error is not None:
            return runner.eviction_error
        if entry.refusal is not None:
            return entry.refusal
        return BudgetError(
            f"{op.text} requested {format_bytes(count)} beyond its plan; the budget of {format_bytes(self._budget)} "
            "cannot hold that and the tensors of the op; raise the budget"
        )
