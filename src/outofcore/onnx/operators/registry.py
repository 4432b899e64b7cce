"""The operators that are known: functions on PyTorch tensors, by domain, name and opset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import without_modes
from outofcore.errors import InputError
from outofcore.onnx.contents import Graph, Node

Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """How an operator is computed.

    Attributes:
        run: is given a ``Call`` and the inputs, in the order of the standard; those left out are None.
        read: places of inputs whose values are looked at, such as shapes; what is known of them comes as ``Known``.
        pure: the same inputs give the same outputs, and nothing else happens.
        size: elements of the result, where that can be more than those of the inputs.
        since: the first opset it holds for.
        by_shape: the result follows from the shapes of the inputs alone.
    """

    run: Function
    read: frozenset[int]
    pure: bool
    size: Callable[..., int] | None
    since: int
    by_shape: bool = False


_known: dict[tuple[str, str], list[Operator]] = {}


def operator(
    *names: str,
    read: Sequence[int] = (),
    pure: bool = True,
    since: int = 1,
    size: Callable[..., int] | None = None,
    domain: str = "",
    by_shape: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as one or several operators, from an opset on."""

    def register(function: Function) -> Function:
        found = Operator(function, frozenset(read), pure, size, since, by_shape)
        for name in names:
            table = _known.setdefault((domain, name), [])
            table.append(found)
            table.sort(key=lambda one: -one.since)
        return function

    return register


def find(domain: str, name: str, version: int) -> Operator | None:
    """The operator of an opset."""
    for found in _known.get((domain, name), ()):
        if found.since <= version:
            return found
    return None


def names() -> list[tuple[str, str]]:
    """Domain and name of all operators that are known."""
    return sorted(_known)


@dataclass(frozen=True)
class Call:
    """One run of a node, as the function of its operator sees it.

    Attributes:
        node: what is run.
        device: where tensors are to be made.
        within: runs a graph of the node on values, and returns its outputs.
        tensor: what the tensor of an attribute holds.
    """

    node: Node
    device: torch.device
    within: Callable[[Graph, Sequence[Any]], list[Any]]
    tensor: Callable[[Any], Known]

    @property
    def version(self) -> int:
        """The opset."""
        return self.node.version

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or what holds without it."""
        return self.node.attributes.get(name, default)

    def wants(self, place: int) -> bool:
        """Whether the node has this output."""
        return place < len(self.node.outputs) and bool(self.node.outputs[place])

    def refuse(self, why: str) -> InputError:
        """The error for what this library does not compute."""
        return InputError(f"{self.node}: {why}")


class Known:
    """A small tensor that does not depend on data: a constant, or what follows from constants and shapes.

    It is computed where it is asked for, past everything that watches PyTorch's operators: a step that is captured has
    shapes and axes as Python has them.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self._items: list[Any] | None = None

    def __deepcopy__(self, memo: object) -> Known:
        return self  # it never changes

    @property
    def items(self) -> list[Any]:
        """All elements, one after the other."""
        if self._items is None:
            with without_modes(), torch.no_grad():
                self._items = [one.item() for one in self.value.reshape(-1).unbind()]
        return self._items

    @property
    def dtype(self) -> torch.dtype:
        """The data type."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """Where it is: on the CPU."""
        return self.value.device

    def dim(self) -> int:
        """How many dimensions it has."""
        return self.value.dim()

    def numel(self) -> int:
        """How many elements it has."""
        return self.value.numel()

    def is_floating_point(self) -> bool:
        """Whether it holds fractions."""
        return self.value.is_floating_point()

    def tensor(self, device: torch.device) -> torch.Tensor:
        """A new tensor of the same numbers, which every watcher sees being made."""
        return torch.tensor(self.items, dtype=self.dtype, device=device).reshape(self.value.shape)


def known(data: Any, dtype: torch.dtype) -> Known:
    """A known tensor of Python data."""
    with without_modes(), torch.no_grad():
        return Known(torch.tensor(data, dtype=dtype))


def values(given: torch.Tensor | Known) -> list[Any]:
    """All elements, one after the other. Of a tensor that a step computes, this looks at its values."""
    if isinstance(given, Known):
        return given.items
    return [one.item() for one in given.reshape(-1).unbind()]


def numbers(given: torch.Tensor | Known) -> list[int]:
    """All elements as whole numbers."""
    return [int(one) for one in values(given)]


def number(given: torch.Tensor | Known) -> Any:
    """The only element."""
    (found,) = values(given)
    return found


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        ValueError: there is none.
    """
    if not -rank <= axis < max(rank, 1):
        raise ValueError(f"axis {axis} of a tensor with {rank} dimensions")
    return axis + rank if axis < 0 else axis
