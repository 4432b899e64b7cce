"""Store plans of recorded steps, so that the next process can use them from its first recorded step on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from outofcore.follow.records import FREED, Schedule, StepRecord
from outofcore.jsonfile import refuse
from outofcore.plan_store import Document, PlanStore, key_of

_FORMAT = "outofcore-followed/1"

_Count = Annotated[int, Meta(ge=0, le=2**62)]


class _LoopPlanFile(Document):
    policy: str
    seconds: Annotated[float, Meta(ge=0)]
    leave: tuple[tuple[_Count, _Count], ...]
    fetch: tuple[tuple[_Count, _Count], ...]
    write: tuple[tuple[_Count, _Count], ...]
    offsets: tuple[tuple[_Count, _Count, _Count], ...]
    scratch: tuple[tuple[_Count, _Count], ...]
    is_busy: bool = False
    is_quick: bool = False


@dataclass(frozen=True)
class LoopPlan:
    schedule: Schedule
    policy: str
    predicted_seconds: float  # predicted for a step
    is_busy: bool = False  # whether other programs delayed the recorded step
    is_quick: bool = False  # whether the quick search made it


class LoopPlans:
    """Plans of recorded steps, stored in a folder; without a folder (None), ``find`` always returns None."""

    def __init__(self, folder: Path | None) -> None:
        self._store = PlanStore(folder, "loop", _FORMAT, _LoopPlanFile)

    def find(self, record: StepRecord, budget: int, policy: str) -> LoopPlan | None:
        """Return the stored plan for a step, budget and policy; None if it is missing or does not fit the step."""

        def check(document: _LoopPlanFile, path: Path) -> LoopPlan:
            schedule = Schedule(document.leave, document.fetch, document.write, document.offsets, document.scratch)
            ops, storages = record.op_count, len(record.graph.storages)
            pairs = (*schedule.release, *schedule.fetch, *schedule.write, *((op, s) for op, s, _ in schedule.offsets))
            if any(op >= ops or s >= storages for op, s in pairs) or any(op >= ops for op, _ in schedule.scratch):
                refuse(path, "$", "is of another step")
            return LoopPlan(schedule, document.policy, document.seconds, document.is_busy, document.is_quick)

        return self._store.find(_key(record, budget, policy), check)

    def store(self, record: StepRecord, budget: int, policy: str, plan: LoopPlan) -> None:
        schedule = plan.schedule
        lists = (schedule.release, schedule.fetch, schedule.write, schedule.offsets, schedule.scratch)
        file = _LoopPlanFile(_FORMAT, plan.policy, plan.predicted_seconds, *lists, plan.is_busy, plan.is_quick)
        self._store.save(_key(record, budget, policy), file)


def _key(record: StepRecord, budget: int, policy: str) -> str:
    # The key leaves out costs and frees, which vary between processes.
    ops = [(op.name, sorted(op.touched)) for op in record.graph.ops if op.name != FREED]
    storages = [(storage.bytes, storage.kind) for storage in record.graph.storages]
    return key_of(_FORMAT, budget, policy, ops, storages)
