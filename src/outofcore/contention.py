"""Simulate how concurrent copies slow each other and ops.

Copies in both directions lose the share of their speeds in ``Home.lost_share``; ops are slowed by the sum of
``compute_slowdown``. Copies to different homes are independent, and collectives have no contention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outofcore.costs import Home
from outofcore.program import Program, Queue, Timeline, Wait, lane_of

_Lane = tuple[Queue, int]
_OPS = frozenset({Queue.COMPUTE, Queue.COMMUNICATE})  # queues without a home


def apply_contention(program: Program, alone: Timeline, homes: Sequence[Home]) -> Timeline:
    """Return a program's timeline slowed by concurrent copies; ``alone`` is the timeline without that slowdown."""
    # Planners call this often: lanes are numbers, and a set of lanes is a bit mask.
    indices_by_lane: dict[_Lane, list[int]] = {(Queue.COMPUTE, 0): []}
    for index, instruction in enumerate(program.instructions):
        indices_by_lane.setdefault(lane_of(instruction), []).append(index)
    numbers = {lane: number for number, lane in enumerate(indices_by_lane)}
    waits = [[(numbers[_lane(w)], w.count) for w in i.waits if _lane(w) in numbers] for i in program.instructions]
    remaining = [
        end - start for start, end in zip(alone.starts, alone.ends, strict=True)
    ]  # remaining seconds at full speed
    starts, ends = [0.0] * len(remaining), [0.0] * len(remaining)
    pending = list(indices_by_lane.values())
    done_counts = [0] * len(pending)
    running: dict[int, int] = {}  # the running instruction of each lane
    by_mask: dict[int, list[tuple[int, float]]] = {}  # slowdown factors of the lanes, by the mask of running lanes
    mask, now = 0, 0.0
    while True:
        for lane, lane_indices in enumerate(pending):
            if lane not in running and done_counts[lane] < len(lane_indices):
                index = lane_indices[done_counts[lane]]
                for waited_lane, count in waits[index]:
                    if done_counts[waited_lane] < count:
                        break
                else:
                    running[lane] = index
                    starts[index] = now
                    mask |= 1 << lane
        if not running:
            return Timeline(tuple(starts), tuple(ends), now)
        factors = by_mask.get(mask)
        if factors is None:
            factors = by_mask[mask] = _slowdown_factors(
                [lane for lane in indices_by_lane if numbers[lane] in running], numbers, homes
            )
        step = min([remaining[running[lane]] * factor for lane, factor in factors])
        now += step
        for lane, factor in factors:
            index = running[lane]
            if remaining[index] * factor == step:
                ends[index] = now
                del running[lane]
                mask ^= 1 << lane
                done_counts[lane] += 1
            else:
                remaining[index] -= step / factor


def _lane(wait: Wait) -> _Lane:
    return wait.queue, 0 if wait.queue in _OPS else wait.home


def _slowdown_factors(
    running: Sequence[_Lane], numbers: Mapping[_Lane, int], homes: Sequence[Home]
) -> list[tuple[int, float]]:
    """Return for each running queue its number and the factor by which concurrent copies slow it."""
    slowdown = sum(homes[home].compute_slowdown for queue, home in running if queue not in _OPS)
    factors: list[tuple[int, float]] = []
    for lane in running:
        queue, home = lane
        if queue is Queue.COMPUTE:
            factor = 1.0 + slowdown
        elif queue is Queue.COMMUNICATE:
            factor = 1.0
        else:
            opposite = Queue.COPY_IN if queue is Queue.COPY_OUT else Queue.COPY_OUT
            lost = homes[home].lost_share(out=queue is Queue.COPY_OUT) if (opposite, home) in running else 0.0
            factor = 1.0 / (1.0 - lost)
        factors.append((numbers[lane], factor))
    return factors
