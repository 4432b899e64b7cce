"""Plans of recorded steps on disk, so that the next process follows them from the first step that it records.

There is one file for each step, budget and policy. A plan also depends on measured costs; if they change, it stays
correct but may be slower. An unusable folder costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from outofcore.compiling import private_folder
from outofcore.errors import OutOfCoreError
from outofcore.follow.records import FREED, Schedule, StepRecord
from outofcore.jsonfile import decode_json, write_json

_log = logging.getLogger("outofcore")

FORMAT = "outofcore-followed/1"
# What was used longest ago goes first.
_MOST_FILES = 200

_Count = Annotated[int, Meta(ge=0, le=2**62)]


class _File(Struct):
    format: str
    policy: str
    seconds: Annotated[float, Meta(ge=0)]
    leave: tuple[tuple[_Count, _Count], ...]
    fetch: tuple[tuple[_Count, _Count], ...]
    write: tuple[tuple[_Count, _Count], ...]
    offsets: tuple[tuple[_Count, _Count, _Count], ...]
    scratch: tuple[tuple[_Count, _Count], ...]


@dataclass(frozen=True)
class FollowedPlan:
    """A schedule by ops of the record, the policy that made it, and the predicted seconds of a step."""

    schedule: Schedule
    policy: str
    seconds: float


@dataclass(frozen=True)
class PlanStore:
    """Plans in a folder; with None it keeps none."""

    folder: Path | None

    def find(self, record: StepRecord, budget: int, policy: str) -> FollowedPlan | None:
        """Return the stored plan of a step, if any."""
        if self.folder is None:
            return None
        path = self.folder / _name(record, budget, policy)
        if not path.exists():
            return None
        try:
            found = decode_json(path, FORMAT, _File)
            os.utime(path)
        except (OutOfCoreError, OSError) as error:
            _log.warning("a plan that was kept is made anew: %s", error)
            return None
        schedule = Schedule(found.leave, found.fetch, found.write, found.offsets, found.scratch)
        ops, storages = record.ops, len(record.graph.storages)
        pairs = (*schedule.leave, *schedule.fetch, *schedule.write, *((op, s) for op, s, _ in schedule.offsets))
        if any(op >= ops or s >= storages for op, s in pairs) or any(op >= ops for op, _ in schedule.scratch):
            _log.warning("a plan that was kept is made anew: %s is of another step", path)
            return None
        return FollowedPlan(schedule, found.policy, found.seconds)

    def keep(self, record: StepRecord, budget: int, policy: str, plan: FollowedPlan) -> None:
        if self.folder is None:
            return
        by = plan.schedule
        file = _File(FORMAT, plan.policy, plan.seconds, by.leave, by.fetch, by.write, by.offsets, by.scratch)
        try:
            folder = private_folder(self.folder)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                whole = Path(beside, "plan.json")
                write_json(whole, file)
                whole.replace(folder / _name(record, budget, policy))
            kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-_MOST_FILES]:
                path.unlink(missing_ok=True)
        except (OutOfCoreError, OSError) as error:
            _log.info("a plan is not kept for later processes: %s", error)


def _name(record: StepRecord, budget: int, policy: str) -> str:
    # When storages are freed may differ a little from process to process, and costs do: neither makes it another step.
    ops = [(op.name, sorted(op.touched)) for op in record.graph.ops if op.name != FREED]
    storages = [storage.bytes for storage in record.graph.storages]
    text = repr((FORMAT, budget, policy, ops, storages))
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
