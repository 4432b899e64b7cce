"""The time of a step by use, and the cause of each wait that ``simulator.stalls`` finds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from outofcore.graph import StepGraph
from outofcore.program import CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait, lane_of
from outofcore.report.naming import instruction_text
from outofcore.simulator import stalls

# Measured times that differ by less count as equal: waking a thread and reading a clock take this long.
_SAME_SECONDS = 50e-6
# Waits below this share of a step are not listed.
_MIN_SHARE = 1e-5


class Reason(Enum):
    LINK = "link"  # the link was busy with other copies
    ROOM = "room"  # memory was full until another storage was evicted or released
    COPY = "copy"  # the copy began as early as possible, and took longer than the ops that overlap it
    END = "end"  # ops were complete, and the step ends with its copies
    OTHERS = "others"  # a collective was not complete: it takes time, and waits for other processes


@dataclass(frozen=True, slots=True)
class StepWait:
    """A period in which no op ran because a copy or collective had to end first."""

    start: float  # seconds from the start of the step
    seconds: float
    instruction: int  # index of the waiting op's instruction; -1: the end of the step
    cause: int  # index of the instruction that it waited for
    reason: Reason
    text: str  # such as "waits for copy-in of layer3.2.conv1 convolution output"
    explanation: str  # one sentence about the reason


@dataclass(frozen=True)
class TimeSpent:
    """A step's seconds by use. They add up to the whole step."""

    ops: float  # run for the first time
    again: float  # recomputed ops
    for_copies: float  # waits for copies in, because the link was slow or busy
    for_room: float  # waits for memory
    end: float  # after the last op, to finish copies out
    between: float  # between ops, to issue them
    for_others: float = 0.0  # waits for collectives

    @property
    def seconds(self) -> float:
        waits = self.for_copies + self.for_room + self.for_others
        return self.ops + self.again + waits + self.end + self.between


def time_spent(graph: StepGraph, program: Program, timeline: Timeline) -> tuple[TimeSpent, tuple[StepWait, ...]]:
    """Return how a step spends its time, and its waits in order; very short waits are left out."""
    ops = recomputed = last_op = 0.0
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        if isinstance(instruction, Run) and not instruction.communicates:
            last_op = max(last_op, end)
            if instruction.again:
                recomputed += end - start
            else:
                ops += end - start
    finder = _CauseFinder(graph, program, timeline)
    waits: list[StepWait] = []
    between = 0.0
    for stall in stalls(program, timeline):
        # The time from the end of the cause to the end of the wait is waking up, not waiting.
        if stall.waits_for is None:
            between += stall.seconds
            continue
        wait_start = timeline.starts[stall.instruction] - stall.seconds
        explained = max(min(timeline.ends[stall.waits_for] - wait_start, stall.seconds), 0.0)
        between += stall.seconds - explained
        waits.append(finder.wait_of(wait_start, explained, stall.instruction, stall.waits_for))
    last = max(range(len(timeline.ends)), key=timeline.ends.__getitem__, default=None)
    end = 0.0
    if last is not None and timeline.ends[last] > last_op:  # only copies and collectives end after the last op
        end = timeline.ends[last] - last_op
        waits.append(finder.wait_at_end(last_op, end, last))
    between += max(timeline.step_seconds - last_op - end, 0.0)
    seconds_by_reason = {reason: sum(w.seconds for w in waits if w.reason is reason) for reason in Reason}
    copies = seconds_by_reason[Reason.LINK] + seconds_by_reason[Reason.COPY]
    spent = TimeSpent(
        ops, recomputed, copies, seconds_by_reason[Reason.ROOM], end, between, seconds_by_reason[Reason.OTHERS]
    )
    min_seconds = _MIN_SHARE * timeline.step_seconds
    return spent, tuple(wait for wait in waits if wait.seconds > min_seconds)


class _CauseFinder:
    """Finds why the copy or collective that an op waited for was not complete sooner."""

    def __init__(self, graph: StepGraph, program: Program, timeline: Timeline) -> None:
        self._graph, self._program, self._timeline = graph, program, timeline
        self._same = max(_SAME_SECONDS, 1e-6 * timeline.step_seconds)
        self._lanes: dict[tuple[Queue, int], list[int]] = {}
        for index, instruction in enumerate(program.instructions):
            self._lanes.setdefault(lane_of(instruction), []).append(index)

    def wait_of(self, start: float, seconds: float, instruction: int, cause: int) -> StepWait:
        """Describe the wait of ``instruction`` for ``cause``, both given by index, and find its reason."""
        awaited = self._program.instructions[cause]
        if isinstance(awaited, Run) and awaited.communicates:
            reason, text = Reason.OTHERS, f"waits for {self._instruction_name(cause)}"
            reason_text = "The collective waits for other processes, and its transfer takes time."
        elif isinstance(awaited, CopyIn):
            reason, reason_text = self._delay_cause(cause)
            text = f"waits for {self._instruction_name(cause)}"
        else:
            _, reason_text = self._delay_cause(cause)
            reason, text = Reason.ROOM, f"waits for memory that {self._instruction_name(cause)} releases"
        return StepWait(start, seconds, instruction, cause, reason, text, reason_text)

    def wait_at_end(self, start: float, seconds: float, cause: int) -> StepWait:
        if isinstance(self._program.instructions[cause], Run):
            reason_text = "The collective waits for other processes, and its transfer takes time."
        else:
            _, reason_text = self._delay_cause(cause)
        return StepWait(
            start, seconds, -1, cause, Reason.END, f"the step ends with {self._instruction_name(cause)}", reason_text
        )

    def _delay_cause(self, copy: int) -> tuple[Reason, str]:
        """Return the reason why a copy was not complete sooner, and a sentence about it."""
        instructions, timeline = self._program.instructions, self._timeline
        instruction, start = instructions[copy], timeline.starts[copy]
        lane = self._lanes[lane_of(instruction)]
        position = bisect_left(lane, copy)
        previous = lane[position - 1] if position else None
        latest = self._latest_awaited(instruction.waits)
        # The later of the two delayed the copy.
        follows_directly = previous is not None and start - timeline.ends[previous] <= self._same
        if (
            previous is not None
            and follows_directly
            and (latest is None or timeline.ends[latest] <= timeline.ends[previous])
        ):
            return Reason.LINK, f"The link was busy, last with {self._instruction_name(previous)}."
        if latest is None or timeline.ends[latest] <= self._same:
            return Reason.COPY, "The copy began as early as possible, but takes longer than the ops that overlap it."
        if isinstance(instruction, CopyOut):
            return Reason.COPY, f"The copy could not begin before the end of {self._instruction_name(latest)}."
        if isinstance(instructions[latest], CopyOut):
            return Reason.ROOM, f"The copy had no memory before the end of {self._instruction_name(latest)}."
        return Reason.ROOM, f"The copy had no memory before {self._instruction_name(latest)} released it."

    def _latest_awaited(self, waits: tuple[Wait, ...]) -> int | None:
        """Return the index of the awaited instruction that ended last; None without waits."""
        targets = [
            self._lanes[wait.queue, wait.home][wait.count - 1]
            for wait in waits
            if 0 < wait.count <= len(self._lanes.get((wait.queue, wait.home), ()))
        ]
        return max(targets, key=lambda i: self._timeline.ends[i], default=None)

    def _instruction_name(self, index: int) -> str:
        return instruction_text(self._graph, self._program, self._program.instructions[index])
