"""Read and write plans with their programs as JSON, see docs/graph-format.md.

Objects are written field by field; an instruction has its class name under ``do``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, convert

from outofcore.graphfile import Capacity, Key
from outofcore.jsonfile import decode_json, refuse, write_json
from outofcore.plan import Decision, Gap, Plan, Residency
from outofcore.program import Block, CopyIn, CopyOut, Instruction, Lodging, Program, Queue, Run

FORMAT = "outofcore-plan/1"

_Index = Annotated[int, Meta(ge=0, le=2**62)]  # of an op, a block, an instruction or a home
_Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]


@dataclass(frozen=True)
class PlanFile:
    """The contents of a plan file."""

    budget: int  # the user's budget in bytes; ``plan.budget`` is the room for large blocks
    plan: Plan
    program: Program  # placed and wired
    predicted_step_seconds: float  # simulated when the file was written


class _Gap(Struct):
    storage: Key
    start: _Whole
    end: _Whole


class _Decision(Struct, omit_defaults=True):
    gap: _Gap
    residency: Residency
    release_by: _Whole
    fetch_at: _Whole
    home: _Index = 0


class _Plan(Struct):
    policy: str
    budget: _Whole
    decisions: tuple[_Decision, ...]
    staying: tuple[Key, ...] = ()


class _WaitEntry(Struct, omit_defaults=True):
    queue: Queue
    count: _Index
    home: _Index = 0


class _Run(Struct, tag_field="do", tag="Run", omit_defaults=True):
    op: _Index
    blocks: tuple[_Index, ...]
    workspace: _Index | None = None
    waits: tuple[_WaitEntry, ...] = ()
    again: bool = False
    communicates: bool = False


class _CopyEntry(Struct, tag_field="do", omit_defaults=True):
    block: _Index
    version: _Index
    waits: tuple[_WaitEntry, ...] = ()
    home: _Index = 0


class _CopyOut(_CopyEntry, tag="CopyOut"):
    pass


class _CopyIn(_CopyEntry, tag="CopyIn"):
    pass


_ENTRY_TYPES: dict[type[Instruction], type[_Run | _CopyOut | _CopyIn]] = {Run: _Run, CopyOut: _CopyOut, CopyIn: _CopyIn}
_INSTRUCTION_TYPES: dict[type[Struct], type[Instruction]] = {written: read for read, written in _ENTRY_TYPES.items()}


class _Block(Struct, omit_defaults=True):
    id: _Index
    storage: Key | None
    bytes: Capacity
    born: _Index
    dies: _Index
    wraps: bool = False
    offset: Annotated[int, Meta(ge=-1, le=2**62)] = -1


class _Lodging(Struct):
    storage: Key
    home: _Index


class _Program(Struct):
    instructions: tuple[_Run | _CopyOut | _CopyIn, ...]
    blocks: tuple[_Block, ...]
    arena_bytes: Capacity = 0
    results: tuple[Key, ...] = ()
    lodgings: tuple[_Lodging, ...] = ()
    staying: tuple[Key, ...] = ()
    clean: tuple[Key, ...] = ()


class PlanDocument(Struct):
    """The JSON document of a plan file."""

    format: str
    budget: Capacity
    predicted_step_seconds: Annotated[float, Meta(ge=0)]
    plan: _Plan
    program: _Program


def write_plan(path: Path, file: PlanFile, keys: Sequence[int | str]) -> None:
    """Write a plan file, compressed if its name ends in ``.gz``; ``keys`` are the storage ids of the graph file.

    Raises:
        InputError: the file cannot be written.

    >>> import tempfile
    >>> file = PlanFile(4096, Plan("auto", 4096, ()), Program((), ()), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_plan(Path(folder) / "plan.json", file, keys=())
    ...     read_plan(Path(folder) / "plan.json", keys=()) == file
    True
    """
    write_json(path, document_of(file, keys))


def document_of(file: PlanFile, keys: Sequence[int | str]) -> PlanDocument:
    """Return the JSON document of a plan; ``keys`` are the storage ids of the graph file.

    >>> document_of(PlanFile(4096, Plan("auto", 4096, ()), Program((), ()), 0.5), keys=()).budget
    4096
    """
    plan, program = file.plan, file.program

    def names_of(storages: Sequence[int]) -> tuple[int | str, ...]:
        return tuple(keys[storage] for storage in storages)

    return PlanDocument(
        FORMAT,
        file.budget,
        file.predicted_step_seconds,
        _Plan(
            plan.policy,
            plan.budget,
            tuple(
                _Decision(
                    _Gap(keys[d.gap.storage], d.gap.start, d.gap.end), d.residency, d.release_by, d.fetch_at, d.home
                )
                for d in plan.decisions
            ),
            names_of(plan.staying),
        ),
        _Program(
            tuple(
                convert(instruction, _ENTRY_TYPES[type(instruction)], from_attributes=True)
                for instruction in program.instructions
            ),
            tuple(
                _Block(b.id, None if b.storage is None else keys[b.storage], b.bytes, b.born, b.dies, b.wraps, b.offset)
                for b in program.blocks
            ),
            program.arena_bytes,
            names_of(program.results),
            tuple(_Lodging(keys[lodging.storage], lodging.home) for lodging in program.lodgings),
            names_of(program.staying),
            names_of(program.clean),
        ),
    )


def read_plan(path: Path, keys: Sequence[int | str]) -> PlanFile:
    """Read a plan file, plain or gzip; ``keys`` are the storage ids of the graph file.

    ``validator.validate`` checks whether its program is correct.

    Raises:
        InputError: the file cannot be read.
        GraphError: the file is not a plan file, a number is out of range, or a storage is not in the graph file; the
            message names the place.

    >>> import tempfile
    >>> file = PlanFile(4096, Plan("auto", 4096, ()), Program((), ()), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_plan(Path(folder) / "plan.json", file, keys=())
    ...     read_plan(Path(folder) / "plan.json", keys=()) == file
    True
    """
    return plan_of(decode_json(path, FORMAT, PlanDocument), keys, path)


def plan_of(file: PlanDocument, keys: Sequence[int | str], path: Path) -> PlanFile:
    """Convert the JSON document of a plan file to a plan; ``keys`` and errors are as for ``read_plan``.

    >>> file = PlanFile(4096, Plan("auto", 4096, ()), Program((), ()), 0.5)
    >>> plan_of(document_of(file, keys=()), (), Path("plan.json")) == file
    True
    """
    numbers = {key: number for number, key in enumerate(keys)}
    plan, program = file.plan, file.program

    def number(key: int | str, place: str) -> int:
        if key not in numbers:
            refuse(
                path, place, f"is {key!r}, but the graph has no storage with that id: is it the plan of another graph?"
            )
        return numbers[key]

    def numbers_of(named: Sequence[int | str], place: str) -> tuple[int, ...]:
        return tuple(number(key, f"{place}[{index}]") for index, key in enumerate(named))

    return PlanFile(
        file.budget,
        Plan(
            plan.policy,
            plan.budget,
            tuple(
                Decision(
                    Gap(number(d.gap.storage, f"$.plan.decisions[{index}].gap.storage"), d.gap.start, d.gap.end),
                    d.residency,
                    d.release_by,
                    d.fetch_at,
                    d.home,
                )
                for index, d in enumerate(plan.decisions)
            ),
            numbers_of(plan.staying, "$.plan.staying"),
        ),
        Program(
            tuple(
                convert(instruction, _INSTRUCTION_TYPES[type(instruction)], from_attributes=True)
                for instruction in program.instructions
            ),
            tuple(
                Block(
                    b.id,
                    None if b.storage is None else number(b.storage, f"$.program.blocks[{index}].storage"),
                    b.bytes,
                    b.born,
                    b.dies,
                    b.wraps,
                    b.offset,
                )
                for index, b in enumerate(program.blocks)
            ),
            program.arena_bytes,
            numbers_of(program.results, "$.program.results"),
            tuple(
                Lodging(number(lodging.storage, f"$.program.lodgings[{index}].storage"), lodging.home)
                for index, lodging in enumerate(program.lodgings)
            ),
            numbers_of(program.staying, "$.program.staying"),
            numbers_of(program.clean, "$.program.clean"),
        ),
        file.predicted_step_seconds,
    )
