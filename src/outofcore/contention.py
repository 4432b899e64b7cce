"""The durations of concurrent instructions, where copies slow each other and ops down.

The model: while copies run both ways between the device and a home, each loses the share of its speed in ``Home.lost``;
while copies run, an op goes at ``1 / (1 + compute_slowdown)``, where the slowdowns of all copies add up. Speeds change
whenever an instruction starts or ends, and hold in between (processor sharing).

Limits: all ops suffer alike, and copies to one home do not slow those to another; collectives neither slow anything nor
are slowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outofcore.costs import Home
from outofcore.program import Program, Queue, Timeline, Wait, lane_of

_Lane = tuple[Queue, int]
_OPS = frozenset({Queue.COMPUTE, Queue.COMMUNICATE})  # what belongs to no home


def beside_each_other(program: Program, alone: Timeline, homes: Sequence[Home]) -> Timeline:
    """Return when each instruction runs under contention.

    ``alone`` has the durations without contention; ``homes`` has one home for each that the program copies to.
    """
    # Planners call this often: lanes are numbers, and what runs together is a bit for each.
    lines: dict[_Lane, list[int]] = {(Queue.COMPUTE, 0): []}
    for index, instruction in enumerate(program.instructions):
        lines.setdefault(lane_of(instruction), []).append(index)
    numbers = {lane: number for number, lane in enumerate(lines)}
    waits = [[(numbers[_lane(w)], w.count) for w in i.waits if _lane(w) in numbers] for i in program.instructions]
    left = [end - start for start, end in zip(alone.starts, alone.ends, strict=True)]  # seconds at full speed
    starts, ends = [0.0] * len(left), [0.0] * len(left)
    pending = list(lines.values())
    done = [0] * len(pending)
    running: dict[int, int] = {}  # the instruction at work on each lane
    together: dict[int, list[tuple[int, float]]] = {}  # by what runs: each lane, and how many times as long it takes
    mask, now = 0, 0.0
    while True:
        for lane, line in enumerate(pending):
            if lane not in running and done[lane] < len(line):
                index = line[done[lane]]
                for other, count in waits[index]:
                    if done[other] < count:
                        break
                else:
                    running[lane] = index
                    starts[index] = now
                    mask |= 1 << lane
        if not running:
            return Timeline(tuple(starts), tuple(ends), now)
        stretched = together.get(mask)
        if stretched is None:
            stretched = together[mask] = _stretched(
                [lane for lane in lines if numbers[lane] in running], numbers, homes
            )
        step = min([left[running[lane]] * times for lane, times in stretched])
        now += step
        for lane, times in stretched:
            index = running[lane]
            if left[index] * times == step:
                ends[index] = now
                del running[lane]
                mask ^= 1 << lane
                done[lane] += 1
            else:
                left[index] -= step / times


def _lane(wait: Wait) -> _Lane:
    return wait.queue, 0 if wait.queue in _OPS else wait.home


def _stretched(
    running: Sequence[_Lane], numbers: Mapping[_Lane, int], homes: Sequence[Home]
) -> list[tuple[int, float]]:
    """Return the number of each busy lane, and the factor by which its instruction is slowed."""
    slowdown = sum(homes[home].compute_slowdown for queue, home in running if queue not in _OPS)
    found: list[tuple[int, float]] = []
    for lane in running:
        queue, home = lane
        if queue is Queue.COMPUTE:
            times = 1.0 + slowdown
        elif queue is Queue.COMMUNICATE:
            times = 1.0
        else:
            other = Queue.COPY_IN if queue is Queue.COPY_OUT else Queue.COPY_OUT
            lost = homes[home].lost(out=queue is Queue.COPY_OUT) if (other, home) in running else 0.0
            times = 1.0 / (1.0 - lost)
        found.append((numbers[lane], times))
    return found
