"""Check that homes exist and stay within their capacities."""

from __future__ import annotations

from collections.abc import Sequence

from outofcore.costs import Costs
from outofcore.errors import ValidationError
from outofcore.program import CopyIn, CopyOut, Run
from outofcore.validator.step import ExecutionOrder, ValidatedStep

_HomeCopy = tuple[int, int, CopyOut | CopyIn]  # index of the instruction, storage, the copy


def check_homes(step: ValidatedStep, costs: Costs | None) -> dict[int, int]:
    """Check the homes that a program names; return the home of each storage in ``program.lodgings``."""
    graph, program = step.graph, step.program
    count = None if costs is None else max(len(costs.homes), 1)

    def exists(home: int) -> bool:
        return home >= 0 and (count is None or home < count)

    for index, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run) and not exists(instruction.home):
            raise ValidationError(
                f"{step.instruction(index)} names home {instruction.home}, which does not exist; homes are numbered "
                f"from 0{'' if count is None else f' to {count - 1}'}"
            )
    homes: dict[int, int] = {}
    for lodging in program.lodgings:
        if lodging.storage not in graph.persistent:
            raise ValidationError(
                f"storage {lodging.storage} is kept at home {lodging.home} between steps, but is not "
                "persistent; only persistent storages may be kept"
            )
        name = step.storage(lodging.storage)
        if not exists(lodging.home):
            raise ValidationError(
                f"{name} is kept between steps at home {lodging.home}, which does not exist; homes are numbered "
                f"from 0{'' if count is None else f' to {count - 1}'}"
            )
        if lodging.storage in homes:
            raise ValidationError(
                f"{name} is kept at home {homes[lodging.storage]} and at home {lodging.home} between steps; a storage "
                "may be kept at one home only"
            )
        homes[lodging.storage] = lodging.home
    wrapping = {block.storage for block in program.blocks if block.wraps}
    written = {storage for op in graph.ops for storage in op.mutates + op.creates}
    for storage in program.clean:
        if not 0 <= storage < len(graph.storages) or storage not in graph.persistent:
            raise ValidationError(f"storage {storage} is marked clean, but only persistent storages may be")
        name = step.storage(storage)
        if storage not in wrapping:
            raise ValidationError(
                f"{name} is marked clean, but no block holds it between two steps; one of its blocks must wrap"
            )
        if storage in written:
            raise ValidationError(
                f"{name} is marked clean, but an op writes it, which makes its copy at home out of date"
            )
        if not graph.storages[storage].watched:
            raise ValidationError(f"{name} is marked clean, but is not watched: a user could write to it unnoticed")
    return homes


def check_capacity(step: ValidatedStep, order: ExecutionOrder, costs: Costs, lodgings: dict[int, int]) -> None:
    """Check that each copy out finds room at its home, in every order of instructions that the waits allow."""
    graph, program = step.graph, step.program
    size = [storage.bytes for storage in graph.storages]
    copies: list[_HomeCopy] = [
        (index, program.blocks[instruction.block].storage or 0, instruction)
        for index, instruction in enumerate(program.instructions)
        if not isinstance(instruction, Run)
    ]
    moved = {storage for _, storage, _ in copies}
    device = {block.storage for block in program.blocks if block.wraps}
    always = {s for s in moved if s in graph.outputs or graph.storages[s].arrives}
    always |= {s for s in graph.persistent if s not in device and graph.uses[s]} | lodgings.keys()
    always |= set(program.clean)
    for home, place in enumerate(costs.homes):
        if place.bytes is None:
            continue
        here = {s for s in always if lodgings.get(s, 0) == home}
        permanent_bytes = sum(size[s] for s in here)
        if permanent_bytes > place.bytes:
            raise ValidationError(
                f"home {home} ({place.name}) has room for {place.bytes} bytes, but storages that stay there from step "
                f"to step need {permanent_bytes}; enlarge the home or plan again"
            )
        ends = _last_reads([copy for copy in copies if copy[2].home == home])
        temporary_bytes: dict[int, int] = {}  # by copy out, the bytes of its slot until its last copy in has ended
        for index, storage, instruction in copies:
            if instruction.home != home or storage in here or not isinstance(instruction, CopyOut):
                continue
            temporary_bytes = {
                slot: count for slot, count in temporary_bytes.items() if not order.has_ended_before(ends[slot], index)
            }
            temporary_bytes[index] = size[storage]
            total = permanent_bytes + sum(temporary_bytes.values())
            if total > place.bytes:
                raise ValidationError(
                    f"{step.instruction(index)} may start while home {home} ({place.name}) of "
                    f"{place.bytes} bytes has to hold {total}; it must wait for earlier copies, or use another home"
                )


def _last_reads(copies: Sequence[_HomeCopy]) -> dict[int, int]:
    """Map each copy out to the last copy in that reads its bytes, or to itself if there is no such copy."""
    ends: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, storage, instruction in reversed(copies):
        if isinstance(instruction, CopyOut):
            ends[index] = last.pop(storage, index)
        else:
            last.setdefault(storage, index)
    return ends
