"""Plans made in the foreground from fixed costs, so that tests know in which step a plan is there, and which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outofcore.background import Answer, BackgroundPlanner, PlanJob, plan_job
from outofcore.follow.records import StepRecord, read_record
from outofcore.planning.parameters import SearchParams
from outofcore.policies import Auto

# Nothing is made again.
MOVES = Auto(SearchParams(recompute_changes=0))


class PlannedAtOnce(BackgroundPlanner[Any]):
    done: tuple[Any, Answer] | None = None

    def start(self, subject: Any, job: PlanJob, niceness: int) -> bool:
        self.done = subject, plan_job(job)
        return True

    def poll(self) -> tuple[Any, Answer] | None:
        done, self.done = self.done, None
        return done


def reader_with_fixed_costs(link_bytes_per_s: float = 5e8) -> Callable[..., StepRecord]:
    """``read_record``, but ops take 10 µs and 10 GB/s, and copies what the link takes, whatever the machine does.

    The usual link is slower than that of any machine here: copies are done when their plan has them done.
    """

    def read(*told: Any) -> StepRecord:
        record = read_record(*told)
        graph, costs = record.graph, record.costs
        ops = tuple(
            replace(cost, seconds=1e-5 + sum(graph.storages[s].bytes for s in op.touched) / 1e10)
            for op, cost in zip(graph.ops, costs.ops, strict=True)
        )
        (home,) = costs.homes
        home = replace(home, bytes_per_s_out=link_bytes_per_s, bytes_per_s_in=link_bytes_per_s)
        return replace(record, costs=replace(costs, ops=ops, homes=(home,)))

    return read
