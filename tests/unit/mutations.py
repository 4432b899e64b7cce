"""Mutations that break a valid program, one fault at a time.

Each takes a graph and a valid program and yields descriptions with broken programs, lazily. It yields only real faults:
by definition, or found by the brute-force ``oracle``. With ``random``, candidates come in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import TypeVar

import oracle

from outofcore.graph import StepGraph
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Lodging, Program, Run, Wait

Broken = Iterator[tuple[str, Program]]
T = TypeVar("T")
Mutation = Callable[[StepGraph, Program, Random | None], Broken]


def _shuffle(items: list[T], random: Random | None) -> list[T]:
    return random.sample(items, len(items)) if random is not None else items


def with_instruction(program: Program, index: int, instruction: Instruction) -> Program:
    instructions = list(program.instructions)
    instructions[index] = instruction
    return replace(program, instructions=tuple(instructions))


def with_block(program: Program, block: Block) -> Program:
    blocks = list(program.blocks)
    blocks[block.id] = block
    return replace(program, blocks=tuple(blocks))


def without_instruction(program: Program, index: int) -> Program:
    """Remove an instruction; waits for it become waits for its predecessor and for its own waits."""
    removed = program.instructions[index]
    queue = oracle.lane(removed)
    position = sum(oracle.lane(i) == queue for i in program.instructions[: index + 1])
    instructions: list[Instruction] = []
    heir_found = False
    for at, instruction in enumerate(program.instructions):
        if at == index:
            continue
        waits: list[Wait] = []
        for wait in instruction.waits:
            same = (wait.queue, wait.home) == queue
            if same and wait.count == position:
                waits += removed.waits
            shifted = wait.count - (same and wait.count >= position)
            waits += [replace(wait, count=shifted)] if shifted else []
        if at > index and not heir_found and oracle.lane(instruction) == queue:
            heir_found = True
            waits += removed.waits
        instructions.append(replace(instruction, waits=tuple(dict.fromkeys(waits))))
    blocks = tuple(replace(b, born=b.born - (b.born > index), dies=b.dies - (b.dies > index)) for b in program.blocks)
    return replace(program, instructions=tuple(instructions), blocks=blocks)


def _without_wait(program: Program, index: int, wait: Wait) -> Program:
    instruction = program.instructions[index]
    return with_instruction(
        program, index, replace(instruction, waits=tuple(w for w in instruction.waits if w is not wait))
    )


def drop_wait(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Remove a wait that no other waits imply."""
    candidates = [(i, wait) for i, instruction in enumerate(program.instructions) for wait in instruction.waits]
    pairs = oracle.conflicts(graph, program)
    for index, wait in _shuffle(candidates, random):
        broken = _without_wait(program, index, wait)
        if oracle.is_racy(graph, broken, pairs):
            yield f"instruction {index} does not wait for {wait}", broken


def weaken_wait(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    candidates = [(i, w) for i, instr in enumerate(program.instructions) for w in instr.waits if w.count > 1]
    pairs = oracle.conflicts(graph, program)
    for index, wait in _shuffle(candidates, random):
        instruction = program.instructions[index]
        waits = tuple(replace(w, count=w.count - 1) if w is wait else w for w in instruction.waits)
        broken = with_instruction(program, index, replace(instruction, waits=waits))
        if oracle.is_racy(graph, broken, pairs):
            yield f"instruction {index} waits for one less than {wait}", broken


def release_early(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        for number in oracle.blocks_of(instruction):
            block = program.blocks[number]
            if not block.wraps or index < block.dies:
                last[number] = index
    for number, index in _shuffle(list(last.items()), random):
        block = program.blocks[number]
        if block.wraps or block.born < index:
            broken = with_block(program, replace(block, dies=index))
            if not oracle.is_held(broken, index):
                yield f"block {number} dies at {index}, where it is used", broken


def overlap(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    pairs = [
        (a, b)
        for a, b in combinations(program.blocks, 2)
        if a.bytes and b.bytes and a.offset >= 0 and b.offset >= 0 and _alive(program, a) & _alive(program, b)
    ]
    for a, b in _shuffle(pairs, random):
        offset = min(a.offset, program.arena_bytes - b.bytes)
        if a.offset < offset + b.bytes and offset < a.offset + a.bytes:
            yield f"block {b.id} overlaps block {a.id}", with_block(program, replace(b, offset=offset))


def _alive(program: Program, block: Block) -> set[int]:
    all_indices = set(range(len(program.instructions)))
    if not block.wraps:
        return set(range(block.born, block.dies))
    return all_indices if block.born == block.dies == 0 else all_indices - set(range(block.dies, block.born))


def reuse_too_soon(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Move a block onto the bytes of one that is dead in program order, but may still be in use."""
    pairs = [
        (a, b)
        for a, b in combinations(program.blocks, 2)
        if a.bytes and b.bytes and a.offset >= 0 and b.offset >= 0 and not _alive(program, a) & _alive(program, b)
    ]
    masks = oracle.ancestors(program)
    uses: dict[int, list[tuple[int, bool]]] = {block.id: [] for block in program.blocks}
    for index in range(len(program.instructions)):
        for (kind, number, _, _), writes in oracle.accesses(graph, program, index):
            if kind == "block":
                uses[number].append((index, writes))
    for a, b in _shuffle(pairs, random):
        offset = min(a.offset, program.arena_bytes - b.bytes)
        if a.offset < offset + b.bytes and offset < a.offset + a.bytes:
            crossing = [sorted([x, y]) for x in uses[a.id] for y in uses[b.id] if x[1] or y[1]]
            if any(not masks[later[0]] >> earlier[0] & 1 for earlier, later in crossing):
                broken = with_block(program, replace(b, offset=offset))
                yield f"block {b.id} reuses the bytes of block {a.id} too soon", broken


def wrong_version(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    for index in _shuffle(list(range(len(program.instructions))), random):
        instruction = program.instructions[index]
        if not isinstance(instruction, Run):
            for version in {instruction.version + 1, max(instruction.version - 1, 0)} - {instruction.version}:
                broken = with_instruction(program, index, replace(instruction, version=version))
                yield f"instruction {index} copies version {version}", broken


def wrong_home(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    for index in _shuffle(list(range(len(program.instructions))), random):
        instruction = program.instructions[index]
        if not isinstance(instruction, Run):
            moved = replace(instruction, home=1 - instruction.home)
            broken = without_instruction(program, index)
            instructions = [*broken.instructions[:index], moved, *broken.instructions[index:]]
            # Later instructions wait for the copy on its new queue.
            lane = oracle.lane(moved)
            count = sum(oracle.lane(i) == lane for i in instructions[: index + 1])
            for at in range(index + 1, len(instructions)):
                waits = [
                    replace(w, count=w.count + ((w.queue, w.home) == lane and w.count >= count))
                    for w in instructions[at].waits
                ]
                if oracle.lane(instructions[at]) != lane:
                    waits.append(Wait(lane[0], count, lane[1]))
                instructions[at] = replace(instructions[at], waits=tuple(waits))
            broken = replace(program, instructions=tuple(instructions))
            if oracle.is_broken(graph, broken):
                yield f"instruction {index} uses home {moved.home}", broken


def wrong_lodging(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Name a wrong home between steps, or one for a storage that does not persist."""
    lodgings = {lodging.storage: lodging for lodging in program.lodgings}
    for storage in _shuffle(list(program.results), random):
        lodging_ = lodgings.get(storage, Lodging(storage, 0))
        changed = {**lodgings, storage: replace(lodging_, home=1 - lodging_.home)}
        broken = replace(program, lodgings=tuple(changed.values()))
        if storage not in graph.persistent or oracle.is_broken(graph, broken):
            yield f"storage {storage} is stored at home {1 - lodging_.home}", broken


def _drop(kind: type[CopyIn] | type[CopyOut] | type[Run]) -> Mutation:
    def drop(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
        for index in _shuffle([i for i, x in enumerate(program.instructions) if isinstance(x, kind)], random):
            broken = without_instruction(program, index)
            # A block that lives for this instruction only would be refused for its empty lifetime.
            if all(b.wraps or b.born < b.dies for b in broken.blocks) and oracle.is_broken(graph, broken):
                yield f"instruction {index} ({kind.__name__}) is missing", broken

    return drop


drop_copy_out = _drop(CopyOut)
drop_copy_in = _drop(CopyIn)
drop_run = _drop(Run)


def swap(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    pairs: list[tuple[int, int]] = []
    for lane in oracle.lanes(program):
        line = [i for i, x in enumerate(program.instructions) if oracle.lane(x) == lane]
        pairs += list(pairwise(line))
    for first, second in _shuffle(pairs, random):
        a, b = program.instructions[first], program.instructions[second]
        broken = with_instruction(program, first, b)
        broken = with_instruction(broken, second, a)
        if _waits_point_back(broken) and oracle.is_broken(graph, broken):
            yield f"instructions {first} and {second} change places", broken


def _waits_point_back(program: Program) -> bool:
    counts = dict.fromkeys(oracle.lanes(program), 0)
    for instruction in program.instructions:
        if any(wait.count > counts[wait.queue, wait.home] for wait in instruction.waits):
            return False
        counts[oracle.lane(instruction)] += 1
    return True


def wait_ahead(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    counts = dict.fromkeys(oracle.lanes(program), 0)
    candidates: list[tuple[int, Wait]] = []
    for index, instruction in enumerate(program.instructions):
        candidates += [(index, Wait(queue, count + 1, home)) for (queue, home), count in counts.items()]
        counts[oracle.lane(instruction)] += 1
    for index, wait in _shuffle(candidates, random):
        instruction = program.instructions[index]
        broken = with_instruction(program, index, replace(instruction, waits=(*instruction.waits, wait)))
        yield f"instruction {index} waits for {wait}, which comes later", broken


def drop_result(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    wraps = {b.storage for b in program.blocks if b.wraps}
    mutated = {s for op in graph.ops for s in op.mutates if graph.storages[s].arrives}
    due = set(graph.outputs) | (graph.persistent - wraps) | mutated
    for storage in _shuffle([s for s in program.results if s in due], random):
        results = tuple(s for s in program.results if s != storage)
        yield f"storage {storage} is not among the results", replace(program, results=results)


def leave_early(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Let a visible gradient die early, or omit it from the staying ones."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        last.update(dict.fromkeys(oracle.blocks_of(instruction), index))
    for storage in _shuffle(program.staying, random):
        staying = tuple(s for s in program.staying if s != storage)
        yield f"storage {storage} does not stay", replace(program, staying=staying)
        for block in program.blocks:
            if block.storage == storage and last.get(block.id, -1) + 1 < block.dies == len(program.instructions):
                shortened = replace(block, dies=last[block.id] + 1)
                yield f"block {block.id} dies after its last use", with_block(program, shortened)


def forget_copy(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Omit a clean storage from those marked as clean, or mark one that an op writes."""
    for storage in _shuffle(list(program.clean), random):
        clean = tuple(s for s in program.clean if s != storage)
        yield f"storage {storage} is not clean", replace(program, clean=clean)
    wraps = {b.storage for b in program.blocks if b.wraps}
    for storage in _shuffle([s for s in sorted(graph.persistent) if s in wraps and s not in graph.frozen], random):
        yield f"storage {storage} is marked as clean", replace(program, clean=(*program.clean, storage))


def shrink_block(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    for block in _shuffle(list(program.blocks), random):
        if block.storage is not None and graph.storages[block.storage].bytes:
            size = graph.storages[block.storage].bytes - 1
            yield f"block {block.id} has {size} bytes", with_block(program, replace(block, bytes=size))


def wrong_again(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    for index in _shuffle(list(range(len(program.instructions))), random):
        run = program.instructions[index]
        if isinstance(run, Run):
            broken = with_instruction(program, index, replace(run, again=not run.again))
            yield f"instruction {index} has again={not run.again}", broken


def rerun_elsewhere(graph: StepGraph, program: Program, random: Random | None = None) -> Broken:
    """Let a run use another live block of the same storage."""
    candidates: list[tuple[int, int, int]] = []
    for index, run in enumerate(program.instructions):
        if isinstance(run, Run):
            candidates += [
                (index, place, other_block.id)
                for place, number in enumerate(run.blocks)
                for other_block in program.blocks
                if other_block.id != number and other_block.storage == program.blocks[number].storage
            ]
    for index, place, other_block in _shuffle(candidates, random):
        run = program.instructions[index]
        assert isinstance(run, Run)
        blocks = (*run.blocks[:place], other_block, *run.blocks[place + 1 :])
        broken = with_instruction(program, index, replace(run, blocks=blocks))
        if oracle.is_held(broken, index) and oracle.is_broken(graph, broken):
            yield f"instruction {index} works on block {other_block}", broken


MUTATIONS: dict[str, Mutation] = {
    "drop_wait": drop_wait,
    "weaken_wait": weaken_wait,
    "release_early": release_early,
    "overlap": overlap,
    "reuse_too_soon": reuse_too_soon,
    "wrong_version": wrong_version,
    "wrong_home": wrong_home,
    "wrong_lodging": wrong_lodging,
    "drop_copy_out": drop_copy_out,
    "drop_copy_in": drop_copy_in,
    "drop_run": drop_run,
    "swap": swap,
    "wait_ahead": wait_ahead,
    "drop_result": drop_result,
    "leave_early": leave_early,
    "forget_copy": forget_copy,
    "shrink_block": shrink_block,
    "wrong_again": wrong_again,
    "rerun_elsewhere": rerun_elsewhere,
}
