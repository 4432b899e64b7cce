"""Plans with their programs as JSON files: format ``outofcore-plan/1``, see docs/graph-format.md.

The program stands in the file as a whole, so that it can be checked without planning again. Objects
are written field by field as ``plan`` and ``program`` declare them, an instruction with the name of
its class under ``do``; only storages are called what the graph file calls them.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from outofcore.graphfile import Key
from outofcore.jsonfile import Node, read_json, write_json
from outofcore.plan import Plan
from outofcore.program import Instruction, Program

FORMAT = "outofcore-plan/1"

# Fields, of whatever class, that number storages.
_STORAGE_FIELDS = frozenset({"storage", "results", "staying"})


@dataclass(frozen=True)
class PlanFile:
    """What a plan file holds.

    Attributes:
        budget: bytes of device memory that the user named; ``plan.budget`` is what was left for large blocks.
        plan: the decisions.
        program: placed and wired.
        predicted_step_seconds: as simulated when the file was written.
    """

    budget: int
    plan: Plan
    program: Program
    predicted_step_seconds: float


def write_plan(path: Path, file: PlanFile, keys: Sequence[Key]) -> None:
    """Write a plan file; read again, it is equal.

    Args:
        path: the file; through gzip if its name ends in ``.gz``.
        file: what to write.
        keys: what the graph file calls each storage.

    Raises:
        InputError: the file cannot be written.
    """
    write_json(
        path,
        {
            "format": FORMAT,
            "budget": file.budget,
            "predicted_step_seconds": file.predicted_step_seconds,
            "plan": _content(file.plan, keys),
            "program": _content(file.program, keys),
        },
    )


def read_plan(path: Path, keys: Sequence[Key]) -> PlanFile:
    """Read a plan file.

    Args:
        path: the file.
        keys: what the graph file calls each storage.

    Raises:
        InputError: the file cannot be read.
        GraphError: it is not a plan file, or names a storage that the graph file has not; says where.
    """
    root = read_json(path, FORMAT)
    numbers = {key: number for number, key in enumerate(keys)}
    return PlanFile(
        root.at("budget").count(),
        _read(root.at("plan"), Plan, numbers),
        _read(root.at("program"), Program, numbers),
        root.at("predicted_step_seconds").number(),
    )


def _content(value: object, keys: Sequence[Key], *, storage: bool = False) -> object:
    if isinstance(value, tuple):
        return [_content(item, keys, storage=storage) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, Enum):
        return value.value
    if not is_dataclass(value):
        return keys[value] if storage and isinstance(value, int) else value
    named = {f.name: _content(getattr(value, f.name), keys, storage=f.name in _STORAGE_FIELDS) for f in fields(value)}
    return {"do": type(value).__name__, **named} if isinstance(value, Instruction) else named


def _read(node: Node, hint: Any, numbers: Mapping[Key, int], *, storage: bool = False) -> Any:
    """A value of the type that a hint names."""
    if get_origin(hint) is tuple:
        member = get_args(hint)[0]  # all tuples of the vocabulary are of one type throughout
        return tuple(_read(item, member, numbers, storage=storage) for item in node.items())
    if get_origin(hint) in (types.UnionType, Union):
        return _read(node, _chosen(node, get_args(hint)), numbers, storage=storage)
    if hint is types.NoneType:
        return None
    if storage and hint is int:
        number = numbers.get(node.key())
        if number is None:
            node.refuse(
                f"is {node.value!r}, and the graph has no storage with that id: is it the plan of another graph?"
            )
        return number
    if is_dataclass(hint):
        return _read_fields(node, hint, numbers)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(node.value)
        except ValueError:
            node.refuse(f"is {node.value!r}; it must be one of {', '.join(str(member.value) for member in hint)}")
    readers = {bool: node.flag, int: node.whole, float: node.number, str: node.text}
    return readers[hint]()


def _chosen(node: Node, options: Sequence[Any]) -> Any:
    """Which type of a union a value has."""
    if types.NoneType in options:
        others = [option for option in options if option is not types.NoneType]
        return types.NoneType if node.value is None else others[0]
    name = node.at("do")
    found = next((option for option in options if option.__name__ == name.value), None)
    if found is None:
        name.refuse(f"is {name.value!r}; it must be one of {', '.join(option.__name__ for option in options)}")
    return found


def _read_fields(node: Node, kind: Any, numbers: Mapping[Key, int]) -> Any:
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        optional = field.default is not MISSING or field.default_factory is not MISSING
        value = node.find(field.name) if optional else node.at(field.name)
        if value is not None:
            found[field.name] = _read(value, hints[field.name], numbers, storage=field.name in _STORAGE_FIELDS)
    return kind(**found)
