"""How long instructions take that run beside each other, where copies slow each other and ops down.

The model: while copies run both ways between the device and a home, each goes at a speed of ``1 - contention / 2``;
while copies run, an op goes at ``1 / (1 + compute_slowdown)``, where the slowdowns of all copies add up. Speeds
change whenever an instruction starts or ends, and hold in between (processor sharing).

Limits: all ops are taken to suffer alike, and copies to one home not to slow those to another.
"""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.costs import Home
from outofcore.program import Program, Queue, Timeline, Wait, lane_of

_Lane = tuple[Queue, int]


def beside_each_other(program: Program, alone: Timeline, homes: Sequence[Home]) -> Timeline:
    """When each instruction runs, taking from the others what it takes.

    Args:
        program: wired; what it waits for can be satisfied.
        alone: when each would run if instructions left each other alone; of it their lengths count.
        homes: say how much they do not; one for each that the program copies to.
    """
    work = [end - start for start, end in zip(alone.starts, alone.ends, strict=True)]
    lines: dict[_Lane, list[int]] = {(Queue.COMPUTE, 0): []}
    for index, instruction in enumerate(program.instructions):
        lines.setdefault(lane_of(instruction), []).append(index)
    waits = [[(_lane(wait), wait.count) for wait in i.waits] for i in program.instructions]
    starts, ends = [0.0] * len(work), [0.0] * len(work)
    done = dict.fromkeys(lines, 0)
    running: dict[_Lane, int] = {}  # the instruction at work on each queue
    left: dict[_Lane, float] = {}  # seconds of it that remain, at full speed
    now = 0.0
    while True:
        for lane, line in lines.items():
            if lane not in running and done[lane] < len(line):
                index = line[done[lane]]
                if all(done.get(other, 0) >= count for other, count in waits[index]):
                    running[lane], left[lane], starts[index] = index, work[index], now
        if not running:
            return Timeline(tuple(starts), tuple(ends), now)
        needed = {lane: left[lane] / speed for lane, speed in _speeds(running, homes).items()}
        step = min(needed.values())
        now += step
        for lane, seconds in needed.items():
            if seconds == step:
                ends[running.pop(lane)] = now
                done[lane] += 1
            else:
                left[lane] -= step * (left[lane] / seconds)


def _lane(wait: Wait) -> _Lane:
    return wait.queue, 0 if wait.queue is Queue.COMPUTE else wait.home


def _speeds(running: dict[_Lane, int], homes: Sequence[Home]) -> dict[_Lane, float]:
    """At what share of its full speed each queue works."""
    speeds: dict[_Lane, float] = {}
    slowdown = 0.0
    for queue, home in running:
        if queue is Queue.COMPUTE:
            continue
        slowdown += homes[home].compute_slowdown
        both = (Queue.COPY_OUT, home) in running and (Queue.COPY_IN, home) in running
        speeds[queue, home] = 1.0 - homes[home].contention / 2 if both else 1.0
    if (Queue.COMPUTE, 0) in running:
        speeds[Queue.COMPUTE, 0] = 1.0 / (1.0 + slowdown)
    return speeds
