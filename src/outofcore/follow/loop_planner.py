"""Plan recorded steps of a loop in the background, and pass the plans to its native code."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque

from outofcore._torch_internals import Feature, missing
from outofcore.analysis import LARGE_BYTES
from outofcore.background import BackgroundPlanner, PlanJob
from outofcore.busy import Counters, read_loop_counters, was_busy
from outofcore.follow.loop_plans import LoopPlan, LoopPlans
from outofcore.follow.observed import PlanSummary
from outofcore.follow.recipes import Recipes
from outofcore.follow.recompute_trial import RecomputeTrial
from outofcore.follow.records import StepRecord, read_record, schedule_of
from outofcore.follow.space import Space
from outofcore.planning.policy import Auto, PolicyLike, quick_policy
from outofcore.units import round_up

_log = logging.getLogger("outofcore")

# The first seconds of planning compete with the loop, because ops with many threads leave no core idle. After that the
# planner uses only idle cores, and still slows ops down through shared caches and execution units. So no plan is
# started while planning has taken more than this share of the loop's time.
# A plan of a long step pays off within fewer steps, so planning may also compete for the time of this many steps.
_FREE_SECONDS, _FREE_STEPS = 1.0, 16
_FREE_NICENESS, _NICENESS = 10, 20
_PLANNING_SHARE = 0.03
# The first plan of a step comes from the quick search. The thorough search takes seconds, and finds plans that are 1 %
# faster. It plans steps longer than this a second time, after this many steps in a row had a plan. An earlier search
# would use up the share above, and delay the plans of batches of other lengths.
_LONG_STEP_SECONDS = 1.0
_SETTLED_STEPS = 32
# Limit on the steps that wait for the thorough search; the oldest is dropped.
_MAX_ROUGH = 8
# Share of the budget that a plan leaves free: a loop sometimes allocates more than in the recorded step.
_SPARE = 0.02
# Load from other processes is measured until this many steps in a row were not proposed: it can take 1 ms.
_WATCHED_STEPS = 8
# Number of plans that reports list.
_LISTED_PLANS = 8


class LoopPlanner:
    """Plans recorded steps of a loop in the background, one at a time, when the native code proposes them."""

    def __init__(self, space: Space, policy: PolicyLike, store: LoopPlans, room: int) -> None:
        self._space, self._policy, self._store, self._room = space, policy, store, room
        self._planned_by = space.device.plan_key(policy)
        recomputes = isinstance(policy, Auto) and policy.params.recompute_changes > 0
        self._trial = RecomputeTrial(Recipes(space)) if recomputes and not missing(Feature.RECOMPUTE) else None
        self._reruns = self._rerun_microseconds = 0  # as of the end of the last step
        self._rerun_seconds: float | None = None  # in the step that is being planned; None: it recomputed no storage
        self._counters: Counters | None = read_loop_counters()  # at the end of the last step
        self._ended_steps = 0  # steps so far; the loop's own count may lag behind
        self._unproposed_steps = 0  # steps in a row that were not proposed
        self._is_busy = False  # whether other programs delayed the step that is being planned
        self._is_quick = False  # whether the quick search plans that step
        # Long steps that wait for the thorough search, each with ``_rerun_seconds`` and ``_is_busy``.
        self._roughly_planned: deque[tuple[StepRecord, float | None, bool]] = deque(maxlen=_MAX_ROUGH)
        self._started = time.monotonic()
        self._planning_seconds = 0.0
        self.background: BackgroundPlanner[StepRecord] = BackgroundPlanner()
        self.plan_count = 0  # plans that were used
        self.recent_plans: deque[PlanSummary] = deque(maxlen=_LISTED_PLANS)

    def on_step_end(self, step_count: int, *, is_proposed: bool) -> None:
        """Use the plan of a finished planning job, if any; start the next job when one is due."""
        stats = self._space.read_stats(steps=step_count, plans=self.plan_count)
        rerun_seconds = (stats.rerun_microseconds - self._rerun_microseconds) / 1e6
        reran = stats.reruns > self._reruns
        self._reruns, self._rerun_microseconds = stats.reruns, stats.rerun_microseconds
        self._ended_steps += 1
        self._unproposed_steps = 0 if is_proposed else self._unproposed_steps + 1
        is_busy = self._was_busy()
        if self._trial is not None:
            self._trial.on_step_end()
        if (finished := self.background.poll()) is not None:
            record, outcome = finished
            self._planning_seconds += outcome.processor_seconds
            planned = outcome.planned
            if planned is None:
                _log.info("no plan of a step of %d ops: %s", record.op_count, outcome.reason)
                if self._trial is not None and self._rerun_seconds is not None:
                    self._trial.on_plan_failure()
            else:
                schedule = schedule_of(record, planned.plan, planned.program)
                seconds = planned.timeline.step_seconds
                plan = LoopPlan(schedule, planned.plan.policy, seconds, self._is_busy, self._is_quick)
                if self._use_plan(record, plan, step_count, outcome.seconds):
                    self._store.store(record, self._room, self._planned_by, plan)
        if self.background.is_busy or not self._may_plan():
            return
        if is_proposed:
            self._rerun_seconds, self._is_busy = rerun_seconds if reran else None, is_busy
            self._plan_step(step_count)
        elif self._unproposed_steps > _SETTLED_STEPS and self._roughly_planned:
            record, rerun, was_recorded_busy = self._roughly_planned.popleft()
            if (rerun is not None) == reran:  # else the loop has switched recomputation on or off since
                self._rerun_seconds, self._is_busy = rerun, was_recorded_busy
                self._start_job(record, step_count, is_quick=False)

    def _was_busy(self) -> bool:
        """Return whether other programs delayed the step that has ended; False if unknown."""
        last_counters = self._counters
        self._counters = read_loop_counters() if self._unproposed_steps < _WATCHED_STEPS else None
        if last_counters is None or self._counters is None:
            return False
        return was_busy(self._counters - last_counters, computes=False)  # waiting for data is not a sign of load

    def _may_plan(self) -> bool:
        """Return whether planning has used less than its share of time, or recomputation waits for a plan."""
        if self._trial is not None and self._trial.awaits_plan:
            return True
        elapsed = time.monotonic() - self._started
        return self._planning_seconds <= self._free_seconds() + _PLANNING_SHARE * elapsed

    def _free_seconds(self) -> float:
        """Return the seconds for which planning may compete with the loop."""
        return max(_FREE_SECONDS, _FREE_STEPS * (time.monotonic() - self._started) / max(self._ended_steps, 1))

    def _plan_step(self, step_count: int) -> None:
        """Use the ended step's stored plan; start to plan the step if that plan is missing or unreliable."""
        numbers = self._space.read_numbers("follow_proposal")
        if not numbers:
            return
        record = read_record(numbers, self._space.read_names("follow_names"))
        stored = self._store.find(record, self._room, self._planned_by)
        if stored is not None:
            self._use_plan(record, stored, step_count, 0.0)
            if self._is_busy or not stored.is_busy:
                return
            _log.info("planning a step again: its stored plan was made with times of a busy machine")
        self._start_job(record, step_count, is_quick=True)

    def _start_job(self, record: StepRecord, step_count: int, *, is_quick: bool) -> None:
        """Start to plan a recorded step in the background; ``is_quick`` allows a faster, rougher search."""
        # Round up, so that a few small tensors do not change the plan.
        small = round_up(self._space.read_stats(steps=step_count, plans=self.plan_count).peak_small_bytes, LARGE_BYTES)
        budget = int((self._room - small) * (1 - _SPARE))
        policy = quick_policy(self._policy) if is_quick else self._policy
        self._is_quick = is_quick and policy is not self._policy
        is_free = is_quick and self._planning_seconds <= self._free_seconds()
        niceness = _FREE_NICENESS if is_free else _NICENESS
        self.background.start(record, PlanJob(record.graph, record.costs, budget, policy), niceness)

    def _use_plan(self, record: StepRecord, plan: LoopPlan, step_count: int, planning_seconds: float) -> bool:
        """Pass a plan to the native code; return False if the code refuses the plan as obsolete."""
        numbers = plan.schedule.flatten()
        if not self._space.call("follow_schedule", record.bucket, (ctypes.c_int64 * len(numbers))(*numbers)):
            return False
        if plan.is_quick and record.costs.compute_seconds >= _LONG_STEP_SECONDS:
            self._roughly_planned.append((record, self._rerun_seconds, plan.is_busy))
        self.plan_count += 1
        self.recent_plans.append(
            PlanSummary(step_count, record.op_count, plan.policy, plan.predicted_seconds, planning_seconds)
        )
        _log.info(
            "steps of %d ops run by a plan of %s: %.3f s predicted, planned in %.1f s",
            record.op_count,
            plan.policy,
            plan.predicted_seconds,
            planning_seconds,
        )
        if self._trial is not None:
            rate = record.costs.homes[0].bytes_per_s_out
            self._trial.on_plan(plan.predicted_seconds, record.costs.compute_seconds, rate, self._rerun_seconds)
        return True
