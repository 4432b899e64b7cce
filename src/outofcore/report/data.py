"""The figures of a report, from a program and a simulated or measured timeline."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from outofcore.costs import Costs
from outofcore.graph import StepGraph, StorageKind
from outofcore.plan import Plan
from outofcore.program import CopyOut, Program, Run, Timeline
from outofcore.simulator import resident_bytes

# Every plan copies these kinds between caller and step, so they do not count as its copies.
_CALLER_KINDS = frozenset({StorageKind.INPUT, StorageKind.OUTPUT})

WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class KindCopies:
    kind: StorageKind
    storages: int  # number of different storages that are copied
    copies_out: int
    bytes_out: int  # device to home
    copies_in: int
    bytes_in: int  # home to device


@dataclass(frozen=True)
class StepReport:
    policy: str
    budget: int  # bytes that were allowed
    arena_bytes: int  # the end of the highest block, the part of the budget in use
    peak_bytes: int  # the maximum of bytes in blocks; the rest of the arena is fragmentation
    seconds: float  # of the whole step
    compute_seconds: float  # of the ops
    recomputed: int  # number of recomputed ops
    moved: tuple[KindCopies, ...]  # by kind; without inputs and outputs, which every plan copies

    def again_seconds(self, costs: Costs) -> float:
        """Return the seconds of recomputed ops, given the costs of all ops."""
        return max(self.compute_seconds - costs.compute_seconds, 0.0)

    @property
    def bytes_out(self) -> int:
        return sum(moved.bytes_out for moved in self.moved)

    @property
    def bytes_in(self) -> int:
        return sum(moved.bytes_in for moved in self.moved)


def step_report(graph: StepGraph, plan: Plan, program: Program, timeline: Timeline, budget: int) -> StepReport:
    """Summarise memory, time and copies of a step; ``program`` must have offsets."""
    compute = 0.0
    recomputed = 0
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        if isinstance(instruction, Run):
            compute += end - start
            recomputed += instruction.again
    return StepReport(
        policy=plan.policy,
        budget=budget,
        arena_bytes=program.arena_bytes,
        peak_bytes=max(in_use for _, in_use in resident_bytes(program, timeline)),
        seconds=timeline.step_seconds,
        compute_seconds=compute,
        recomputed=recomputed,
        moved=_count_copies(graph, program),
    )


def _count_copies(graph: StepGraph, program: Program) -> tuple[KindCopies, ...]:
    """Count copies by kind of storage, except copies of the caller's inputs and outputs."""
    copies: dict[tuple[StorageKind, bool], list[int]] = {}  # storages by (kind, is copy-out)
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            continue
        storage = program.blocks[instruction.block].storage
        if storage is not None and graph.storages[storage].kind not in _CALLER_KINDS:
            key = graph.storages[storage].kind, isinstance(instruction, CopyOut)
            copies.setdefault(key, []).append(storage)
    result: list[KindCopies] = []
    for kind in StorageKind:
        out, back = copies.get((kind, True), []), copies.get((kind, False), [])
        if out or back:
            out_bytes, in_bytes = (sum(graph.storages[s].bytes for s in moved) for moved in (out, back))
            result.append(KindCopies(kind, len({*out, *back}), len(out), out_bytes, len(back), in_bytes))
    return tuple(result)


@dataclass(frozen=True)
class MemoryOverTime:
    """Device bytes in use over one step, by kind of storage; they are constant from one time to the next."""

    times: tuple[float, ...]  # seconds, rising, from 0.0 to the end of the step
    bytes_by_kind: dict[str, tuple[int, ...]]  # by kind (its text, or "workspace"), the bytes from each time on

    @property
    def peak_bytes(self) -> int:
        return max((sum(at) for at in zip(*self.bytes_by_kind.values(), strict=True)), default=0)


def memory_over_time(graph: StepGraph, program: Program, timeline: Timeline) -> MemoryOverTime:
    """Return the device bytes in use over a step, by kind of storage."""
    kinds = [
        WORKSPACE if block.storage is None else graph.storages[block.storage].kind.value for block in program.blocks
    ]
    levels: dict[str, list[tuple[float, int]]] = {}
    for kind in [*(kind.value for kind in StorageKind), WORKSPACE]:
        if kind in kinds:
            # Blocks of other kinds count as empty.
            blocks = (b if k == kind else replace(b, bytes=0) for b, k in zip(program.blocks, kinds, strict=True))
            levels[kind] = resident_bytes(replace(program, blocks=tuple(blocks)), timeline)
    changes = {time for level in levels.values() for time, _ in level if time < timeline.step_seconds}
    times = sorted(changes | {0.0, timeline.step_seconds})
    bytes_by_kind: dict[str, tuple[int, ...]] = {}
    for kind, level in levels.items():
        starts = [time for time, _ in level]
        bytes_by_kind[kind] = tuple(level[bisect_right(starts, time) - 1][1] for time in times)
    return MemoryOverTime(tuple(times), {kind: levels for kind, levels in bytes_by_kind.items() if any(levels)})


@dataclass(frozen=True, slots=True)
class Point:
    """A prediction for one budget.

    Attributes:
        budget: bytes.
        seconds: of a step; None: there is no plan.
        policy: that made the plan; "" without a plan.
        bytes_out: copied from the device in a step.
        bytes_in: copied to the device in a step.
        again_seconds: of recomputed ops.
        peak_bytes: the maximum of bytes in use.
    """

    budget: int
    seconds: float | None
    policy: str = ""
    bytes_out: int = 0
    bytes_in: int = 0
    again_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Help:
    """A change that would make a step faster, and the predicted seconds that it saves."""

    what: str
    saves: float


@dataclass(frozen=True)
class Insight:
    """Predictions for a step at other budgets and on faster hardware."""

    smallest_budget: int  # bytes
    in_core_budget: int  # the smallest budget in bytes at which all tensors stay resident
    compute_seconds: float  # of all ops, each run once
    points: tuple[Point, ...]  # by rising budget
    helps: tuple[Help, ...] = ()  # the largest saving first
    verdict: str = ""  # one sentence about the bottleneck of the step
