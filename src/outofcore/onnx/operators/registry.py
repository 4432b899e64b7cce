"""A registry of the supported operators: functions on PyTorch tensors, by domain, name and opset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


class Unsupported(Exception):  # noqa: N818 - the model shows it as an InputError with the name of the node
    """Raised by a node that needs an unsupported feature or has invalid inputs."""


@dataclass(frozen=True)
class Operator:
    """The implementation of an operator.

    ``run``, a function or a class of modules, takes inputs (None: omitted), attributes by keyword, and from the builder
    the keywords ``device``, ``version``, ``op``, ``outputs`` (how many) and ``count`` (how many are in use).
    """

    run: Function
    since: int  # the first opset that it implements
    parameters: Mapping[str, tuple[str, Any]]  # by keyword of `run`: attribute and default, or empty
    read: frozenset[int] = frozenset()  # positions of inputs that `run` takes as a flat list of numbers
    host: frozenset[int] = frozenset()  # positions of inputs that may be on the CPU, because `run` reads their numbers
    pure: bool = True  # deterministic and without side effects
    many: bool = False  # `run` returns a tuple with an item for each output
    by_shape: bool = False  # the result depends only on the shapes of the inputs
    size: Callable[..., int] | None = None  # number of elements of a result that may be larger than the inputs
    is_plain: bool = False  # `run` is a PyTorch function without kernels for uint16, uint32 and uint64


_OPERATORS: dict[tuple[str, str], list[Operator]] = {}


def operator(
    *names: str,
    domain: str = "",
    since: int = 1,
    read: Sequence[int] = (),
    host: Sequence[int] = (),
    also: Sequence[str] = (),
    attributes: type[Any] | None = None,
    **flags: Any,
) -> Callable[[Function], Function]:
    """Register the decorated function for the ONNX operators ``names`` from opset ``since`` on.

    The function's keywords are attributes; with a dataclass ``attributes``, it takes an instance as ``asked`` instead.
    ``also`` names the attributes in its ``**kwargs``. ``Operator`` explains the other arguments.
    """

    def register(function: Function) -> Function:
        if attributes is not None:
            attribute_names, run = [item.name for item in fields(attributes)], _take_attributes(attributes, function)
        else:
            signature = inspect.signature(function).parameters.values()
            attribute_names, run = [item.name for item in signature if item.kind is item.KEYWORD_ONLY], function
        parameters = {name: (name, inspect.Parameter.empty) for name in (*attribute_names, *also)}
        register_operator(names, Operator(run, since, parameters, frozenset(read), frozenset(host), **flags), domain)
        return run

    return register


def _take_attributes(kind: type[Any], function: Function) -> Function:
    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return function(*inputs, asked=kind(**attributes))

    return run


def register_function(
    name: str, function: Function, *, since: int = 1, plain: bool = False, **attributes: tuple[str, Any]
) -> None:
    """Register a PyTorch function; ``attributes`` maps its keywords to ONNX attributes and defaults."""
    register_operator([name], Operator(function, since, attributes, is_plain=plain))


def register_operator(names: Sequence[str], operator: Operator, domain: str = "") -> None:
    for name in names:
        table = _OPERATORS.setdefault((domain, name), [])
        table.append(operator)
        table.sort(key=lambda entry: -entry.since)


def find(domain: str, name: str, version: int) -> Operator | None:
    return next((entry for entry in _OPERATORS.get((domain, name), ()) if entry.since <= version), None)


def to_list(x: Tensor) -> list[Any]:
    return x.reshape(-1).tolist()


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front; raises ``ValueError`` if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise ValueError(f"axis {axis} is out of range for a tensor with {rank} dimensions")
    return axis + rank if axis < 0 else axis
