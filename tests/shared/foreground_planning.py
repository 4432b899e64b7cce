"""A planner that plans in the foreground, and fixed costs, for tests that must not depend on timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outofcore.background import BackgroundPlanner, PlanJob, PlanResult, plan_job
from outofcore.follow.records import StepRecord, read_record
from outofcore.planning.parameters import SearchParams
from outofcore.policies import Auto

# Offload only, without recomputation.
WITHOUT_RECOMPUTATION = Auto(SearchParams(recompute_changes=0))


class ForegroundPlanner(BackgroundPlanner[Any]):
    done: tuple[Any, PlanResult] | None = None

    def start(self, subject: Any, job: PlanJob, niceness: int) -> bool:
        # After slow planning, a loop makes its next plan later. Tests must not depend on that.
        self.done = subject, replace(plan_job(job), processor_seconds=0.0)
        return True

    def poll(self) -> tuple[Any, PlanResult] | None:
        result, self.done = self.done, None
        return result


def reader_with_fixed_costs(link_bytes_per_s: float = 5e8) -> Callable[..., StepRecord]:
    """Return a ``read_record`` with fixed costs: an op takes 10 µs plus its bytes at 10 GB/s."""

    def read(*args: Any) -> StepRecord:
        record = read_record(*args)
        graph, costs = record.graph, record.costs
        ops = tuple(
            replace(cost, seconds=1e-5 + sum(graph.storages[s].bytes for s in op.touched) / 1e10)
            for op, cost in zip(graph.ops, costs.ops, strict=True)
        )
        (home,) = costs.homes  # a slow link by default, so that copies end no later than planned
        home = replace(home, bytes_per_s_out=link_bytes_per_s, bytes_per_s_in=link_bytes_per_s)
        return replace(record, costs=replace(costs, ops=ops, homes=(home,)))

    return read
