"""What a step function can see besides its arguments: closure cells, globals that it names, its own object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Variable:
    """A variable outside of the step function that the function names.

    Attributes:
        read: its value now.
        write: binds it to another value.
        before: its value when it was looked up.
    """

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    before: Any


def variables_of(step: Callable[..., Any]) -> list[Variable]:
    """The closure cells that are filled, and the globals named in the function or in a function inside of it.

    Decorators that keep to ``functools.wraps``, partial functions and callable objects are looked through.
    """
    found: list[Variable] = []
    for function in functions_of(step):
        code, module = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell):
                read, write = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
                found.append(Variable(name, read, write, cell.cell_contents))
        for name in dict.fromkeys(_names(code)):
            if name in module:
                found.append(Variable(name, partial(module.get, name), partial(module.__setitem__, name), module[name]))
    return found


def owner_of(step: Callable[..., Any]) -> Any | None:
    """The object whose method a step is, or which is itself the step, if it has attributes and is no module."""
    while isinstance(step, partial):
        step = step.func
    owner = getattr(step, "__self__", step if not isinstance(step, FunctionType) else None)
    if isinstance(owner, nn.Module | type | ModuleType) or not isinstance(getattr(owner, "__dict__", None), dict):
        return None
    return owner


def functions_of(step: Any) -> Iterator[FunctionType]:
    """The functions written in Python that a step consists of, whatever is wrapped around them."""
    while step is not None:
        if isinstance(step, partial | functools.partialmethod):
            step = step.func
            continue
        function = getattr(step, "__func__", step)
        if not isinstance(function, FunctionType):
            function = vars(type(step)).get("__call__")
        if not isinstance(function, FunctionType):
            return
        yield function
        step = getattr(function, "__wrapped__", None)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is how an empty cell shows
    except ValueError:
        return True
    return False
