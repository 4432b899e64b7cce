"""Fixed costs instead of measured ones, so that plans and predicted times are equal on every machine.

Seconds of ops are a roofline on ``DEVICE``, links are ``LINKS``, collectives are ``GROUP``. Measured timelines are
replaced by predicted ones, and planners of eager loops run at once. Memory of ops, exactness checks and steps run
unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from outofcore import plan_updates, planned_step
from outofcore.background import BackgroundPlanner, PlanJob, PlanResult, plan_job
from outofcore.capture import Captured
from outofcore.costs import Costs, Home, OpCost
from outofcore.distributed import agreement
from outofcore.estimation.costing import estimate_costs
from outofcore.follow import loop_planner, recompute_trial
from outofcore.follow.records import FREED, StepRecord, read_record
from outofcore.follow.remaking import ComputedStorage, choose_recomputed
from outofcore.graph import Op, StepGraph
from outofcore.planned_step import PlannedStep
from outofcore.presets import Device, Number
from outofcore.profiling import links, ops
from outofcore.profiling.groups import GroupCost
from outofcore.profiling.links import LinkReport, Rates
from outofcore.runtime.homes import DiskHome, HomeStore

DEVICE = Device("record", "the device of the record", 1 << 40, {Number.FP32: 1e11}, 1e10, 2e9, 2e9)
DISK_BYTES = 1 << 40
GROUP = GroupCost(latency_s=1e-4, bytes_per_s=1e9)
# Bytes per second out to a home and in from it.
LINKS = {"host": Rates(2e9, 2e9), "disk": Rates(6e8, 1.2e9)}
LATENCY_SECONDS = 2e-5
# Slowdown of a copy by one in the other direction, and of an op by a copy.
CONTENTION, SLOWDOWN = 0.2, 0.05
# Cost of an op of an eager loop, whose bytes alone are known.
LOOP_OP_SECONDS, LOOP_BYTES_PER_S = 5e-6, 8e9
LOOP_HOME = Home("home", None, 6e8, 1.2e9, LATENCY_SECONDS, 2 * CONTENTION, SLOWDOWN)


@dataclass
class LoopObservations:
    """The recorded steps of eager loops with their plans, in order."""

    loops: list[tuple[StepRecord, PlanResult]] = field(default_factory=list[tuple[StepRecord, PlanResult]])


def variant_of(step: PlannedStep) -> str:
    """Return the name of the variant that a compiled step runs."""
    variant = step.variant
    return variant.form.value if variant.op_bytes is None else f"split to {variant.op_bytes} bytes"


def digest(lines: Sequence[object]) -> str:
    """Return a short digest of objects whose texts are the same in every process."""
    text = "\n".join(map(str, lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def graph_digest(graph: StepGraph) -> str:
    """Return a digest of a step's ops and storages, without names and source lines."""
    storages = [(s.bytes, s.kind.value, s.watched) for s in graph.storages]
    steps = [
        (op.name, op.reads, op.mutates, op.creates, op.rerunnable, op.random, op.discards, op.communicates)
        for op in graph.ops
    ]
    return digest([*storages, *steps, graph.outputs])


def costs_digest(costs: Costs) -> str:
    """Return a digest of the costs of a plan, without the capacity of homes."""
    seconds = [(f"{op.seconds:.12g}", op.workspace_bytes) for op in costs.ops]
    homes = [replace(home, bytes=None) for home in costs.homes]
    return digest([*seconds, *homes])


@contextlib.contextmanager
def fixed_costs() -> Iterator[LoopObservations]:
    """Replace measured costs by fixed ones, and collect plans of eager loops."""
    observed = LoopObservations()
    replacements: list[tuple[Any, str, object]] = [
        (ops._OpBench, "_time", _fixed_op_seconds()),
        (links, "measure_link", _fixed_link),
        (DiskHome, "capacity", property(lambda _: DISK_BYTES)),
        (agreement, "group_cost", lambda *_: GROUP),
        (plan_updates.PlanUpdater, "record_run", _judge_prediction(plan_updates.PlanUpdater.record_run)),
        (loop_planner, "read_record", _fixed_record),
        (loop_planner, "BackgroundPlanner", _planner_at_once(observed)),
        (planned_step, "quick_policy", lambda policy: policy),
        (recompute_trial, "choose_recomputed", _fixed_recipes),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield observed


def _fixed_op_seconds() -> Callable[..., float]:
    cached: list[tuple[Captured, Costs]] = []  # costs of the step that is being profiled

    def seconds(bench: Any, op: Op, *_: object) -> float:
        if not cached or cached[0][0] is not bench._captured:
            cached[:] = [(bench._captured, estimate_costs(bench._captured, DEVICE))]
        return cached[0][1].ops[op.id].seconds

    return seconds


def _fixed_link(home: HomeStore, **_: object) -> LinkReport:
    rates = LINKS[home.name]
    together = Rates(rates.out * (1 - CONTENTION / 2), rates.into * (1 - CONTENTION / 2))
    return LinkReport(
        name=home.name,
        capacity=home.capacity,
        latency_s=LATENCY_SECONDS,
        alone=rates,
        computing=rates,
        together=together,
        compute_alone_s=1.0,
        compute_single_s=1.0 + SLOWDOWN,
        compute_both_s=1.0 + 2 * SLOWDOWN,
    )


def _judge_prediction(judge: Callable[..., None]) -> Callable[..., None]:

    def judge_predicted(self: Any, known_step: Any, _: Any) -> None:
        judge(self, known_step, known_step.step.planned.timeline)

    return judge_predicted


def _fixed_record(numbers: Sequence[int], names: Sequence[str]) -> StepRecord:
    record = read_record(numbers, names)
    storages = record.graph.storages
    costs = [
        OpCost(
            0.0
            if op.name == FREED
            else LOOP_OP_SECONDS + sum(storages[s].bytes for s in op.touched) / LOOP_BYTES_PER_S,
            cost.workspace_bytes,
        )
        for op, cost in zip(record.graph.ops, record.costs.ops, strict=True)
    ]
    return replace(record, costs=Costs(tuple(costs), (LOOP_HOME,)))


def _fixed_recipes(candidates: Sequence[ComputedStorage], *args: Any, **kwargs: Any) -> Any:
    fixed = [
        candidate
        if candidate.seconds is None
        else replace(candidate, seconds=LOOP_OP_SECONDS + 2 * candidate.bytes / LOOP_BYTES_PER_S)
        for candidate in candidates
    ]
    return choose_recomputed(fixed, *args, **kwargs)


def _planner_at_once(observed: LoopObservations) -> type[BackgroundPlanner[StepRecord]]:
    class PlannerAtOnce(BackgroundPlanner[StepRecord]):
        _done: tuple[StepRecord, PlanResult] | None = None

        def start(self, subject: StepRecord, job: PlanJob, niceness: int) -> bool:
            self._done = subject, plan_job(job)
            observed.loops.append(self._done)
            return True

        def poll(self) -> tuple[StepRecord, PlanResult] | None:
            finished, self._done = self._done, None
            return finished

    return PlannerAtOnce
