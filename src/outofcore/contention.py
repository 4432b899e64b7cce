"""How long instructions take that run beside each other, where copies slow each other and ops down.

The model: while copies run both ways, each goes at a speed of ``1 - contention / 2``; while k copies run, an op goes
at ``1 / (1 + k * compute_slowdown)``, both as measured of the nearest home. Speeds change whenever an instruction
starts or ends, and hold in between (processor sharing).

Limits: all copies are taken for copies to that home, and all ops to suffer alike.
"""

from __future__ import annotations

from outofcore.costs import Home
from outofcore.program import Program, Queue, Timeline, queue_of

_QUEUES = (Queue.COMPUTE, Queue.COPY_OUT, Queue.COPY_IN)


def beside_each_other(program: Program, alone: Timeline, home: Home) -> Timeline:
    """When each instruction runs, taking from the others what it takes.

    Args:
        program: wired; what it waits for can be satisfied.
        alone: when each would run if instructions left each other alone; of it their lengths count.
        home: says how much they do not.
    """
    work = [end - start for start, end in zip(alone.starts, alone.ends, strict=True)]
    lines: tuple[list[int], ...] = ([], [], [])
    for index, instruction in enumerate(program.instructions):
        lines[_QUEUES.index(queue_of(instruction))].append(index)
    number = {queue: place for place, queue in enumerate(_QUEUES)}
    waits = [[(number[wait.queue], wait.count) for wait in i.waits] for i in program.instructions]
    starts, ends = [0.0] * len(work), [0.0] * len(work)
    one_way, both_ways = 1.0, 1.0 - home.contention / 2
    compute = [1.0 / (1.0 + copies * home.compute_slowdown) for copies in range(3)]
    done = [0, 0, 0]
    running = [-1, -1, -1]  # the instruction at work on each queue
    left = [0.0, 0.0, 0.0]  # seconds of it that remain, at full speed
    now = 0.0
    while True:
        for queue, line in enumerate(lines):
            if running[queue] < 0 and done[queue] < len(line):
                index = line[done[queue]]
                for other, count in waits[index]:
                    if done[other] < count:
                        break
                else:
                    running[queue], left[queue], starts[index] = index, work[index], now
        active = [queue for queue in range(3) if running[queue] >= 0]
        if not active:
            return Timeline(tuple(starts), tuple(ends), now)
        copies = (running[1] >= 0) + (running[2] >= 0)
        copy = both_ways if copies == 2 else one_way
        speeds = (compute[copies], copy, copy)
        needed = [left[queue] / speeds[queue] for queue in active]
        step = min(needed)
        now += step
        for queue, seconds in zip(active, needed, strict=True):
            if seconds == step:
                ends[running[queue]] = now
                running[queue] = -1
                done[queue] += 1
            else:
                left[queue] -= step * speeds[queue]
