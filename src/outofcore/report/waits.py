"""Where the time of a step went, and the cause of each wait.

``simulator.stalls`` finds what the compute queue waited for. Here it gets a text and a reason: the link was busy, there
was no room, or the copy began as soon as it could and just took that long.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from outofcore.graph import StepGraph
from outofcore.program import CopyIn, CopyOut, Program, Queue, Run, Timeline, Wait, lane_of
from outofcore.report.naming import instruction_text
from outofcore.simulator import stalls

# Times of a measured step that differ by less are taken to be the same: a thread wakes up, a clock is read.
_SAME_SECONDS = 50e-6
# Waits below this part of a step are not told one by one.
_LEAST_SHARE = 1e-5


class Reason(Enum):
    """The cause of a wait."""

    LINK = "link"  # the copy's link was busy with others until then
    ROOM = "room"  # there was no room before something else had left or was used up
    COPY = "copy"  # the copy began as soon as it could, and took longer than what ran beside it
    END = "end"  # ops were done, and the step ends when its copies are
    OTHERS = "others"  # a collective was not done: it takes its time, and other processes have to come to it


@dataclass(frozen=True, slots=True)
class Waited:
    """A time for which no op ran because a copy or collective had to end first.

    Attributes:
        start: seconds from the start of the step.
        instruction: index of the op's instruction that waited; -1: the end of the step did.
        cause: index of the instruction that it waited for.
        text: such as "waits for copy-in of layer3.2.conv1 convolution output".
        why: one sentence on the reason.
    """

    start: float
    seconds: float
    instruction: int
    cause: int
    reason: Reason
    text: str
    why: str


@dataclass(frozen=True)
class TimeSpent:
    """A step's seconds by use. They add up to the whole step.

    Attributes:
        ops: of ops that run for the first time.
        again: of recomputed ops.
        for_copies: ops waited for copies in, because the link was slow or busy.
        for_room: ops waited for room.
        for_others: ops waited for collectives.
        end: after the last op, to finish copies out.
        between: between ops, not explained by any wait: the cost of issuing them.
    """

    ops: float
    again: float
    for_copies: float
    for_room: float
    end: float
    between: float
    for_others: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        waits = self.for_copies + self.for_room + self.for_others
        return self.ops + self.again + waits + self.end + self.between


def time_spent(graph: StepGraph, program: Program, timeline: Timeline) -> tuple[TimeSpent, tuple[Waited, ...]]:
    """Return where the time of a step went, and its waits in order of time; the timeline is simulated or measured."""
    ops = again = last_op = 0.0
    for instruction, start, end in zip(program.instructions, timeline.starts, timeline.ends, strict=True):
        if isinstance(instruction, Run) and not instruction.communicates:
            last_op = max(last_op, end)
            if instruction.again:
                again += end - start
            else:
                ops += end - start
    blame = _Blame(graph, program, timeline)
    found: list[Waited] = []
    between = 0.0
    for stall in stalls(program, timeline):
        # What a wait outlasts its cause by is waking up, not waiting.
        if stall.waits_for is None:
            between += stall.seconds
            continue
        begun = timeline.starts[stall.instruction] - stall.seconds
        explained = max(min(timeline.ends[stall.waits_for] - begun, stall.seconds), 0.0)
        between += stall.seconds - explained
        found.append(blame.waited(begun, explained, stall.instruction, stall.waits_for))
    last = max(range(len(timeline.ends)), key=timeline.ends.__getitem__, default=None)
    end = 0.0
    if last is not None and timeline.ends[last] > last_op:  # only copies and collectives end after the last op
        end = timeline.ends[last] - last_op
        found.append(blame.at_the_end(last_op, end, last))
    between += max(timeline.step_seconds - last_op - end, 0.0)
    by = {reason: sum(w.seconds for w in found if w.reason is reason) for reason in Reason}
    copies = by[Reason.LINK] + by[Reason.COPY]
    spent = TimeSpent(ops, again, copies, by[Reason.ROOM], end, between, by[Reason.OTHERS])
    least = _LEAST_SHARE * timeline.step_seconds
    return spent, tuple(waited for waited in found if waited.seconds > least)


class _Blame:
    """Finds out why a copy was not done sooner."""

    def __init__(self, graph: StepGraph, program: Program, timeline: Timeline) -> None:
        self._graph, self._program, self._timeline = graph, program, timeline
        self._same = max(_SAME_SECONDS, 1e-6 * timeline.step_seconds)
        self._lanes: dict[tuple[Queue, int], list[int]] = {}
        for index, instruction in enumerate(program.instructions):
            self._lanes.setdefault(lane_of(instruction), []).append(index)

    def waited(self, begun: float, seconds: float, instruction: int, cause: int) -> Waited:
        awaited = self._program.instructions[cause]
        if isinstance(awaited, Run) and awaited.communicates:
            reason, text = Reason.OTHERS, f"waits for {self._named(cause)}"
            why = "Other processes had to come to it, and what is sent takes its time."
        elif isinstance(awaited, CopyIn):
            reason, why = self._late(cause)
            text = f"waits for {self._named(cause)}"
        else:
            _, why = self._late(cause)
            reason, text = Reason.ROOM, f"waits for the room that {self._named(cause)} leaves"
        return Waited(begun, seconds, instruction, cause, reason, text, why)

    def at_the_end(self, begun: float, seconds: float, cause: int) -> Waited:
        if isinstance(self._program.instructions[cause], Run):
            why = "Other processes had to come to it, and what is sent takes its time."
        else:
            _, why = self._late(cause)
        return Waited(begun, seconds, -1, cause, Reason.END, f"the step ends with {self._named(cause)}", why)

    def _late(self, copy: int) -> tuple[Reason, str]:
        instructions, timeline = self._program.instructions, self._timeline
        instruction, start = instructions[copy], timeline.starts[copy]
        lane = self._lanes[lane_of(instruction)]
        place = bisect_left(lane, copy)
        before = lane[place - 1] if place else None
        latest = self._latest(instruction.waits)
        # The later of the two is what held it up.
        at_once = before is not None and start - timeline.ends[before] <= self._same
        if before is not None and at_once and (latest is None or timeline.ends[latest] <= timeline.ends[before]):
            return Reason.LINK, f"The link was busy until then, at last with {self._named(before)}."
        if latest is None or timeline.ends[latest] <= self._same:
            return Reason.COPY, "The copy began as soon as it could, and takes longer than what runs beside it."
        if isinstance(instruction, CopyOut):
            return Reason.COPY, f"The copy could not begin before {self._named(latest)} was done."
        if isinstance(instructions[latest], CopyOut):
            return Reason.ROOM, f"The copy had no room before {self._named(latest)} was done."
        return Reason.ROOM, f"The copy had no room before {self._named(latest)} was done with it."

    def _latest(self, waits: tuple[Wait, ...]) -> int | None:
        targets = [
            self._lanes[wait.queue, wait.home][wait.count - 1]
            for wait in waits
            if 0 < wait.count <= len(self._lanes.get((wait.queue, wait.home), ()))
        ]
        return max(targets, key=lambda i: self._timeline.ends[i], default=None)

    def _named(self, index: int) -> str:
        return instruction_text(self._graph, self._program, self._program.instructions[index])
