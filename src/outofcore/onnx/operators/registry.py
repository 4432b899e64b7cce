"""The supported operators: functions on PyTorch tensors, by domain, name and opset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

Function = Callable[..., Any]


class Refused(Exception):  # noqa: N818 - the model shows it as an InputError with the name of the node
    """A node asks for something that is not supported."""


@dataclass(frozen=True)
class Operator:
    """How an operator is computed.

    Attributes:
        run: takes the inputs in the order of the standard, None for those left out, and attributes by keyword; or is a
            class of modules that run graphs.
        since: the first opset it holds for.
        parameters: by keyword of ``run``: the attribute that it takes and its default, or empty. The builder gives
            ``device``, ``version``, ``op``, and ``outputs`` and ``count``: how many the node has and uses.
        read: places of inputs of which ``run`` takes the numbers, as a flat list.
        host: places of inputs that may be on the CPU, because ``run`` looks at their numbers.
        pure: the same inputs give the same outputs, and nothing else happens.
        many: ``run`` returns a tuple, of an item for each output.
        by_shape: the result follows from the shapes of the inputs alone.
        size: elements of the result, where that can be more than those of the inputs.
        is_plain: ``run`` is a function of PyTorch that has no kernels for unsigned numbers of several bytes.
    """

    run: Function
    since: int
    parameters: Mapping[str, tuple[str, Any]]
    read: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()
    pure: bool = True
    many: bool = False
    by_shape: bool = False
    size: Callable[..., int] | None = None
    is_plain: bool = False


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
    """Register a function as one or several operators, from an opset on; its keywords, and ``also``, are attributes.

    With ``attributes``, a dataclass, its fields are the attributes, and the function takes one keyword: ``asked``.
    """

    def register(function: Function) -> Function:
        if attributes is not None:
            own, run = [one.name for one in fields(attributes)], _asked(attributes, function)
        else:
            signature = inspect.signature(function).parameters.values()
            own, run = [one.name for one in signature if one.kind is one.KEYWORD_ONLY], function
        parameters = {name: (name, inspect.Parameter.empty) for name in (*own, *also)}
        add(names, Operator(run, since, parameters, frozenset(read), frozenset(host), **flags), domain)
        return run

    return register


def _asked(kind: type[Any], function: Function) -> Function:
    """Let a function that takes its attributes as one object take each by keyword, as a node of a graph has them."""

    @functools.wraps(function)
    def run(*inputs: Any, **attributes: Any) -> Any:
        return function(*inputs, asked=kind(**attributes))

    return run


def direct(
    name: str, function: Function, *, since: int = 1, plain: bool = False, **attributes: tuple[str, Any]
) -> None:
    """Register a function of PyTorch; ``attributes`` names the attribute and the default for each of its keywords."""
    add([name], Operator(function, since, attributes, is_plain=plain))


def add(names: Sequence[str], operator: Operator, domain: str = "") -> None:
    """Register an operator under its names."""
    for name in names:
        table = _OPERATORS.setdefault((domain, name), [])
        table.append(operator)
        table.sort(key=lambda one: -one.since)


def find(domain: str, name: str, version: int) -> Operator | None:
    """Return the operator of an opset."""
    return next((one for one in _OPERATORS.get((domain, name), ()) if one.since <= version), None)


def items(x: Tensor) -> list[Any]:
    """Return all numbers of a tensor, one after the other."""
    return x.reshape(-1).tolist()


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front.

    Raises:
        ValueError: the tensor does not have the axis.
    """
    if not -rank <= axis < max(rank, 1):
        raise ValueError(f"axis {axis} of a tensor with {rank} dimensions")
    return axis + rank if axis < 0 else axis
