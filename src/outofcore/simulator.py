"""Simulate a program: the times of its instructions under measured costs, without running them.

A queue runs its instructions one after the other; an instruction starts when its queue is free and its waits are
satisfied. Links are independent, and copies do not slow ops down, unless a home says otherwise (``Home.contention``,
``Home.compute_slowdown``): see ``contention``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outofcore.contention import beside_each_other
from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.program import Block, CopyOut, Instruction, Program, Queue, Run, Timeline, lane_of


@dataclass(frozen=True, slots=True)
class Stall:
    """Time for which the compute queue stood still."""

    instruction: int  # index of the instruction that started late
    seconds: float  # from the end of the compute instruction before it (or the start of the step) to its start
    waits_for: int | None  # index of what it waited on; None: nothing it waits on explains it (measured timelines)


def simulate(graph: StepGraph, costs: Costs, program: Program) -> Timeline:
    """Simulate a program: return when each of its instructions would run.

    Args:
        graph: the step that the program was made from.
        costs: seconds of its ops and rates of its homes.
        program: placed or not; it need not be valid, but its op, block and storage ids must be.

    If the costs name no home, inputs and outputs are copied in no time: they are the caller's affair.

    Raises:
        ValidationError: the waits can never all be satisfied, or a copy has no home to go to.
    """
    try:
        # Waits of a valid program point backwards, so that program order is an order to compute in.
        timeline = _times(graph, costs, program, range(len(program.instructions)))
    except _ForwardWaitError:
        timeline = _times(graph, costs, program, _runnable_order(program))
    if any(home.contention or home.compute_slowdown for home in costs.homes):
        return beside_each_other(program, timeline, costs.homes)
    return timeline


class _ForwardWaitError(Exception):
    """An instruction waits on one that the order has not come to yet."""


def _times(graph: StepGraph, costs: Costs, program: Program, order: Iterable[int]) -> Timeline:
    # This loop is what planners spend their time in: locals, identity tests, no hashing of enums.
    instructions, blocks, storages, homes = program.instructions, program.blocks, graph.storages, costs.homes
    op_costs = costs.ops
    compute, copy_out, communicate = Queue.COMPUTE, Queue.COPY_OUT, Queue.COMMUNICATE
    starts = [0.0] * len(instructions)
    ends = [0.0] * len(instructions)
    # Without homes, only what the caller hands in and gets back is copied, and that takes no time.
    callers = frozenset[int]() if homes else _of_callers(graph)
    # Element k: when k instructions of the queue are done. Of copies, a queue for each home.
    run_done, sent_done = [0.0], [0.0]
    outs_done, ins_done = ([[0.0] for _ in range(max(len(homes), 1))] for _ in range(2))
    for index in order:
        instruction = instructions[index]
        if isinstance(instruction, Run):
            seconds = op_costs[instruction.op].seconds
            done = sent_done if instruction.communicates else run_done
        else:
            storage = blocks[instruction.block].storage
            at = instruction.home
            if storage is None or not (homes or storage in callers) or not 0 <= at < len(outs_done):
                raise _homeless(index, instruction, storage)
            home = homes[at] if homes else None
            if isinstance(instruction, CopyOut):
                seconds = home.out_seconds(storages[storage].bytes) if home else 0.0
                done = outs_done[at]
            else:
                seconds = home.in_seconds(storages[storage].bytes) if home else 0.0
                done = ins_done[at]
        start = done[-1]
        for wait in instruction.waits:
            queue = wait.queue
            if queue is compute:
                others = run_done
            elif queue is communicate:
                others = sent_done
            else:
                others = (outs_done if queue is copy_out else ins_done)[wait.home]
            if wait.count >= len(others):
                raise _ForwardWaitError
            ready = others[wait.count]
            if ready > start:  # noqa: PLR1730  (max() costs a call in the innermost loop)
                start = ready
        end = start + seconds
        starts[index] = start
        ends[index] = end
        done.append(end)
    return Timeline(tuple(starts), tuple(ends), max(done[-1] for done in (run_done, sent_done, *outs_done, *ins_done)))


def busiest_seconds(graph: StepGraph, costs: Costs, program: Program) -> float:
    """Return the seconds of the busiest queue, a lower bound of the step; the program need not be placed."""
    busy: dict[tuple[Queue, int], float] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            seconds = costs.ops[instruction.op].seconds
        else:
            storage = program.blocks[instruction.block].storage
            if storage is None or not 0 <= instruction.home < len(costs.homes):
                continue
            home, count = costs.homes[instruction.home], graph.storages[storage].bytes
            seconds = home.out_seconds(count) if isinstance(instruction, CopyOut) else home.in_seconds(count)
        lane = lane_of(instruction)
        busy[lane] = busy.get(lane, 0.0) + seconds
    return max(busy.values(), default=0.0)


def recompute_seconds(costs: Costs, program: Program) -> float:
    """Return the seconds of recomputed ops in a step."""
    return sum(costs.ops[i.op].seconds for i in program.instructions if isinstance(i, Run) and i.again)


def _of_callers(graph: StepGraph) -> frozenset[int]:
    return frozenset(graph.outputs) | {s.id for s in graph.storages if s.arrives}


def _homeless(index: int, instruction: Instruction, storage: int | None) -> ValidationError:
    what = "out of" if isinstance(instruction, CopyOut) else "into"
    if storage is None:
        return ValidationError(f"instruction {index} copies {what} a workspace block, which no storage owns")
    return ValidationError(
        f"instruction {index} copies {what} a block of storage {storage}, but the costs name no home for it; "
        "add one to Costs.homes or keep everything on the device"
    )


def _runnable_order(program: Program) -> list[int]:
    """Return an order in which every instruction follows those it waits on and those before it on its queue."""
    lines = _lanes(program)
    done = dict.fromkeys(lines, 0)
    order: list[int] = []
    moved = True
    while moved:
        moved = False
        for queue, line in lines.items():
            while done[queue] < len(line):
                index = line[done[queue]]
                if any(wait.count > done.get((wait.queue, wait.home), 0) for wait in program.instructions[index].waits):
                    break
                order.append(index)
                done[queue] += 1
                moved = True
    if len(order) < len(program.instructions):
        raise ValidationError(f"the program deadlocks: {_blockers(program, lines, done)}")
    return order


def _lanes(program: Program) -> dict[tuple[Queue, int], list[int]]:
    """Return the instructions of each queue, in order."""
    lines: dict[tuple[Queue, int], list[int]] = {(queue, 0): [] for queue in Queue}
    for index, instruction in enumerate(program.instructions):
        lines.setdefault(lane_of(instruction), []).append(index)
    return lines


def _blockers(program: Program, lines: dict[tuple[Queue, int], list[int]], done: dict[tuple[Queue, int], int]) -> str:
    """Describe for each queue that is stuck the instruction at its head and what that waits for."""
    parts: list[str] = []
    for queue, line in lines.items():
        if done[queue] == len(line):
            continue
        head = line[done[queue]]
        for wait in program.instructions[head].waits:
            others = lines.get((wait.queue, wait.home), [])
            if wait.count > len(others):
                parts.append(
                    f"instruction {head} ({queue[0].value}) waits for {wait.count} instructions of {wait.queue.value}, "
                    f"which has {len(others)}"
                )
            elif wait.count > done[wait.queue, wait.home]:
                target = others[wait.count - 1]
                parts.append(
                    f"instruction {head} ({queue[0].value}) waits for instruction {target} ({wait.queue.value})"
                )
    return "; ".join(parts)


def stalls(program: Program, timeline: Timeline) -> list[Stall]:
    """Return the times for which the compute queue stood still, and what it waited for, in program order.

    An instruction that waits for several is attributed to the one that ended last. The timeline may be simulated or
    measured.
    """
    lines = _lanes(program)
    found: list[Stall] = []
    free = 0.0
    for index in lines[Queue.COMPUTE, 0]:
        late = timeline.starts[index] - free
        if late > 0:
            cause, latest = None, free
            for wait in program.instructions[index].waits:
                others = lines.get((wait.queue, wait.home), [])
                if 0 < wait.count <= len(others):
                    target = others[wait.count - 1]
                    if timeline.ends[target] > latest:
                        cause, latest = target, timeline.ends[target]
            found.append(Stall(index, late, cause))
        free = timeline.ends[index]
    return found


def resident_bytes(program: Program, timeline: Timeline) -> list[tuple[float, int]]:
    """Return the device bytes held over time, as a step function.

    A block counts from the start of the first instruction that touches it to the end of the last one; one that wraps
    also from the start of the step and up to its end. So in a valid, placed program the sum never exceeds
    ``arena_bytes``. The timeline may be simulated or measured.

    Returns:
        Pairs of a time in seconds and the bytes held from then on: the first at 0.0, the times
        rising, the bytes of neighbours different.
    """
    changes: dict[float, int] = {0.0: 0}
    for block, stays in zip(program.blocks, _stays(program, timeline), strict=True):
        for begin, end in stays:
            changes[begin] = changes.get(begin, 0) + block.bytes
            changes[end] = changes.get(end, 0) - block.bytes
    # What wraps is still held when the step ends.
    changes.pop(float("inf"), None)
    held = 0
    levels: list[tuple[float, int]] = []
    for time in sorted(changes):
        held += changes[time]
        if not levels or held != levels[-1][1]:
            levels.append((time, held))
    return levels


def _stays(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return the spans of time over which each block's bytes are taken; infinity: beyond the end of the step."""
    infinity = float("inf")
    # Per block two stays, (begin, end) each: of one that wraps, first the stay that the step begins with.
    begins = [[infinity, infinity] for _ in program.blocks]
    ends = [[-1.0, -1.0] for _ in program.blocks]
    for block in program.blocks:
        if block.wraps:
            begins[block.id][0] = ends[block.id][0] = 0.0
            ends[block.id][_stay_of(block, block.born)] = infinity
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            used = instruction.blocks if instruction.workspace is None else (*instruction.blocks, instruction.workspace)
        else:
            used = (instruction.block,)
        for block_id in used:
            stay = _stay_of(program.blocks[block_id], index)
            begins[block_id][stay] = min(begins[block_id][stay], timeline.starts[index])
            ends[block_id][stay] = max(ends[block_id][stay], timeline.ends[index])
    return [[span for span in zip(*pair, strict=True) if span[0] < span[1]] for pair in zip(begins, ends, strict=True)]


def _stay_of(block: Block, index: int) -> int:
    """Return which of its stays a block is in at an instruction: 1 if it has been born again since the step began."""
    return int(block.wraps and index >= block.born and not block.born == block.dies == 0)
