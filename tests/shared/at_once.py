"""Plans of followed loops made in the foreground, so that tests know in which step a plan is there."""

from __future__ import annotations

from outofcore.follow.background import Answer, BackgroundPlanner, plan_record
from outofcore.follow.records import StepRecord
from outofcore.planning.parameters import SearchParams
from outofcore.policies import Auto

# Nothing is made again.
MOVES = Auto(SearchParams(recompute_changes=0))


class PlannedAtOnce(BackgroundPlanner):
    done: tuple[StepRecord, Answer] | None = None

    def start(self, record: StepRecord) -> None:
        self.done = record, plan_record(record, self._budget, self._policy)

    def poll(self) -> tuple[StepRecord, Answer] | None:
        done, self.done = self.done, None
        return done
