"""Simulate when the instructions of a program run, given measured costs.

An instruction starts when its queue is free and its waits are satisfied. Links are independent and copies do not slow
ops, unless a home has ``contention`` or ``compute_slowdown``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outofcore.contention import apply_contention
from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.graph import StepGraph
from outofcore.program import Block, CopyOut, Instruction, Program, Queue, Run, Timeline, lane_of


@dataclass(frozen=True, slots=True)
class Stall:
    """A period in which the compute queue was idle."""

    instruction: int  # index of the instruction that started late
    seconds: float  # from the end of the previous compute instruction, or the start of the step, to its start
    waits_for: (
        int | None
    )  # index of the instruction that it waited for; None: no wait explains the stall (measured timelines)


def simulate(graph: StepGraph, costs: Costs, program: Program) -> Timeline:
    """Return the simulated start and end of each instruction.

    The program may be invalid, but its ids must be valid. Without homes, copies of inputs and outputs take no time.

    Raises:
        ValidationError: the program deadlocks, or a copy has no home.
    """
    try:
        # Waits of a valid program point backwards, so program order is a valid evaluation order.
        timeline = _simulate_in_order(graph, costs, program, range(len(program.instructions)))
    except _ForwardWaitError:
        timeline = _simulate_in_order(graph, costs, program, _runnable_order(program))
    if any(home.contention or home.compute_slowdown for home in costs.homes):
        return apply_contention(program, timeline, costs.homes)
    return timeline


class _ForwardWaitError(Exception):
    """An instruction waits for a later one in the evaluation order."""


def _simulate_in_order(graph: StepGraph, costs: Costs, program: Program, order: Iterable[int]) -> Timeline:
    """Simulate instructions in an order, without contention; raise ``_ForwardWaitError`` if the order is wrong."""
    # Planners spend most of their time in this loop: it uses locals and identity tests, and hashes no enums.
    instructions, blocks, storages, homes = program.instructions, program.blocks, graph.storages, costs.homes
    op_costs = costs.ops
    compute, copy_out, communicate = Queue.COMPUTE, Queue.COPY_OUT, Queue.COMMUNICATE
    starts = [0.0] * len(instructions)
    ends = [0.0] * len(instructions)
    # Without homes, only inputs and outputs are copied, in no time.
    callers = frozenset[int]() if homes else _caller_storages(graph)
    # Element k: when k instructions of the queue have ended. Each home has its own queues of copies.
    run_ends, sent_ends = [0.0], [0.0]
    out_ends, in_ends = ([[0.0] for _ in range(max(len(homes), 1))] for _ in range(2))
    for index in order:
        instruction = instructions[index]
        if isinstance(instruction, Run):
            seconds = op_costs[instruction.op].seconds
            lane_ends = sent_ends if instruction.communicates else run_ends
        else:
            storage = blocks[instruction.block].storage
            at = instruction.home
            if storage is None or not (homes or storage in callers) or not 0 <= at < len(out_ends):
                raise _missing_home_error(index, instruction, storage)
            home = homes[at] if homes else None
            if isinstance(instruction, CopyOut):
                seconds = home.out_seconds(storages[storage].bytes) if home else 0.0
                lane_ends = out_ends[at]
            else:
                seconds = home.in_seconds(storages[storage].bytes) if home else 0.0
                lane_ends = in_ends[at]
        start = lane_ends[-1]
        for wait in instruction.waits:
            queue = wait.queue
            if queue is compute:
                waited_ends = run_ends
            elif queue is communicate:
                waited_ends = sent_ends
            else:
                waited_ends = (out_ends if queue is copy_out else in_ends)[wait.home]
            if wait.count >= len(waited_ends):
                raise _ForwardWaitError
            ready = waited_ends[wait.count]
            if ready > start:  # noqa: PLR1730  (max() costs a call in the innermost loop)
                start = ready
        end = start + seconds
        starts[index] = start
        ends[index] = end
        lane_ends.append(end)
    return Timeline(
        tuple(starts), tuple(ends), max(lane_ends[-1] for lane_ends in (run_ends, sent_ends, *out_ends, *in_ends))
    )


def busiest_seconds(graph: StepGraph, costs: Costs, program: Program) -> float:
    """Return the busy seconds of the busiest queue, a lower bound of the step time."""
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
    return sum(costs.ops[i.op].seconds for i in program.instructions if isinstance(i, Run) and i.again)


def _caller_storages(graph: StepGraph) -> frozenset[int]:
    return frozenset(graph.outputs) | {s.id for s in graph.storages if s.arrives}


def _missing_home_error(index: int, instruction: Instruction, storage: int | None) -> ValidationError:
    """Return the error for a copy of a workspace, or of a storage without a home."""
    direction = "out of" if isinstance(instruction, CopyOut) else "into"
    if storage is None:
        return ValidationError(f"instruction {index} copies {direction} a workspace block, which belongs to no storage")
    return ValidationError(
        f"instruction {index} copies {direction} a block of storage {storage}, but the costs name no home for it; "
        "add the instruction's home to Costs.homes, or keep the storage on the device"
    )


def _runnable_order(program: Program) -> list[int]:
    """Return the instructions in an order in which each can run; raise ``ValidationError`` for a deadlock."""
    lanes = _lanes(program)
    done_counts = dict.fromkeys(lanes, 0)
    order: list[int] = []
    moved = True
    while moved:
        moved = False
        for lane, indices in lanes.items():
            while done_counts[lane] < len(indices):
                index = indices[done_counts[lane]]
                if any(
                    wait.count > done_counts.get((wait.queue, wait.home), 0)
                    for wait in program.instructions[index].waits
                ):
                    break
                order.append(index)
                done_counts[lane] += 1
                moved = True
    if len(order) < len(program.instructions):
        raise ValidationError(f"the program deadlocks: {_blockers(program, lanes, done_counts)}")
    return order


def _lanes(program: Program) -> dict[tuple[Queue, int], list[int]]:
    """Return the instruction indices of each lane: a queue, or a queue and a home for copies."""
    lanes: dict[tuple[Queue, int], list[int]] = {(queue, 0): [] for queue in Queue}
    for index, instruction in enumerate(program.instructions):
        lanes.setdefault(lane_of(instruction), []).append(index)
    return lanes


def _blockers(
    program: Program, lanes: dict[tuple[Queue, int], list[int]], done_counts: dict[tuple[Queue, int], int]
) -> str:
    """Describe the next instruction of each blocked queue, and the instruction for which it waits."""
    parts: list[str] = []
    for lane, indices in lanes.items():
        if done_counts[lane] == len(indices):
            continue
        head = indices[done_counts[lane]]
        for wait in program.instructions[head].waits:
            waited_indices = lanes.get((wait.queue, wait.home), [])
            if wait.count > len(waited_indices):
                parts.append(
                    f"instruction {head} ({lane[0].value}) waits for {wait.count} instructions of {wait.queue.value}, "
                    f"which has {len(waited_indices)}"
                )
            elif wait.count > done_counts[wait.queue, wait.home]:
                target = waited_indices[wait.count - 1]
                parts.append(
                    f"instruction {head} ({lane[0].value}) waits for instruction {target} ({wait.queue.value})"
                )
    return "; ".join(parts)


def stalls(program: Program, timeline: Timeline) -> list[Stall]:
    """Return the idle periods of the compute queue, each with the instruction that it waited for."""
    lanes = _lanes(program)
    result: list[Stall] = []
    free = 0.0
    for index in lanes[Queue.COMPUTE, 0]:
        late = timeline.starts[index] - free
        if late > 0:
            cause, latest = None, free
            for wait in program.instructions[index].waits:
                waited_indices = lanes.get((wait.queue, wait.home), [])
                if 0 < wait.count <= len(waited_indices):
                    target = waited_indices[wait.count - 1]
                    if timeline.ends[target] > latest:
                        cause, latest = target, timeline.ends[target]
            result.append(Stall(index, late, cause))
        free = timeline.ends[index]
    return result


def resident_bytes(program: Program, timeline: Timeline) -> list[tuple[float, int]]:
    """Return the device bytes in use over time, as pairs of a time in seconds and the bytes from then on.

    Times ascend from 0.0, and consecutive bytes differ. A block counts from the start of its first instruction to the
    end of its last one, so a valid, placed program never exceeds ``arena_bytes``.
    """
    changes: dict[float, int] = {0.0: 0}
    for block, stays in zip(program.blocks, _memory_spans(program, timeline), strict=True):
        for begin, end in stays:
            changes[begin] = changes.get(begin, 0) + block.bytes
            changes[end] = changes.get(end, 0) - block.bytes
    # Wrapping blocks are still held when the step ends.
    changes.pop(float("inf"), None)
    resident = 0
    levels: list[tuple[float, int]] = []
    for time in sorted(changes):
        resident += changes[time]
        if not levels or resident != levels[-1][1]:
            levels.append((time, resident))
    return levels


def _memory_spans(program: Program, timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return the time spans, at most two, in which each block holds memory; an infinite end is after the step."""
    infinity = float("inf")
    # Two stays (begin, end) for each block; the first stay of a wrapping block is the one that starts the step.
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
    """Return the stay of a block that an instruction uses: 1 if that stay lasts into the next step, else 0."""
    return int(block.wraps and index >= block.born and not block.born == block.dies == 0)
