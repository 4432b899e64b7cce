"""Plans made in the foreground, so that tests know in which step a plan is there."""

from __future__ import annotations

from typing import Any

from outofcore.background import Answer, BackgroundPlanner, PlanJob, plan_job
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
