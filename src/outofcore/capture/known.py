"""Tensors of a captured step whose values are known although nothing is computed: they depend on no data.

Positions of tokens, masks of ones, counts: whole numbers and truth values that follow from shapes and constants alone.
In plain PyTorch a step may look at such a value and go one way or another, always the same way. Here it is computed
where it is asked for, from how it came about, and the step goes that way. (This is constant propagation.) What depends
on an argument, a parameter or a random number has no value while a step is captured; to look at that is refused.

Floating-point numbers are not followed: they may be rounded otherwise on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outofcore._torch_internals import OpOverload, storage_key, without_modes
from outofcore.capture import operators
from outofcore.capture.tables import leaves_in, map_leaves

# Larger ones are no bookkeeping, and would take long to compute.
MAX_ELEMENTS = 1 << 20
# Operators of whose tensors the shapes alone matter.
_BY_SHAPE = frozenset(
    (
        *("aten::ones_like", "aten::zeros_like", "aten::full_like"),
        *("aten::new_ones", "aten::new_zeros", "aten::new_full"),
    )
)
# What they make holds nothing in particular.
_EMPTY = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor of which only that matters."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Origin:
    """How a tensor came about.

    Attributes:
        func: the operator; None: it is ``value``.
        args: with origins in place of tensors.
        place: of the tensor among the results.
        value: once it was asked for.
    """

    func: OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int
    value: torch.Tensor | None = None


class KnownValues:
    """The known tensors of one trace."""

    def __init__(self) -> None:
        # By the id of a tensor that is held here, with it and its storage.
        self._found: dict[int, tuple[torch.Tensor, int, _Origin]] = {}

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._found

    def learn(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> None:
        """Take note of what an operator that writes nothing has returned."""
        made = [item for item in results if isinstance(item, torch.Tensor) and self._counts(item)]
        name = func._schema.name
        if not made or name.startswith(_EMPTY) or operators.traits(func).random:
            return
        given = leaves_in((args, kwargs))
        if name not in _BY_SHAPE and not all(tensor in self for tensor in given):
            return
        origins = {id(tensor): self._origin(tensor) for tensor in given}
        old_args, old_kwargs = map_leaves((args, kwargs), lambda tensor: origins[id(tensor)])
        for place, item in enumerate(results):
            if any(item is one for one in made) and item not in self:
                self._found[id(item)] = item, storage_key(item), _Origin(func, old_args, old_kwargs, place)

    def learn_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Take note of a tensor made of Python data."""
        if self._counts(tensor):
            self._found[id(tensor)] = tensor, storage_key(tensor), _Origin(None, (), {}, 0, value)

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """Take note that tensors are written, and so all that shares memory with them."""
        if self._found and tensors:
            keys = set(map(storage_key, tensors))
            self._found = {number: found for number, found in self._found.items() if found[1] not in keys}

    def number(self, tensor: torch.Tensor) -> bool | int | None:
        """The value of a tensor of one element; None: it is not known."""
        found = self._found.get(id(tensor))
        if found is None:
            return None
        with without_modes(), torch.no_grad():
            return _value(found[2]).item()  # type: ignore[return-value]

    @staticmethod
    def _counts(tensor: torch.Tensor) -> bool:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return whole and tensor.layout is torch.strided and tensor.numel() <= MAX_ELEMENTS

    def _origin(self, tensor: torch.Tensor) -> _Origin | _Shape:
        found = self._found.get(id(tensor))
        return _Shape(tuple(tensor.shape), tensor.dtype) if found is None else found[2]


def _value(origin: _Origin) -> torch.Tensor:
    if origin.value is None and origin.func is not None:
        args, kwargs = map_leaves((origin.args, origin.kwargs), _value, _Origin)
        args, kwargs = map_leaves((args, kwargs), lambda s: torch.zeros(s.shape, dtype=s.dtype), _Shape)
        args, kwargs = map_leaves((args, kwargs), lambda _: torch.device("cpu"), torch.device)
        result = origin.func(*args, **{name: item for name, item in kwargs.items() if name != "pin_memory"})
        origin.value = result if isinstance(result, torch.Tensor) else result[origin.place]
    if origin.value is None:
        raise RuntimeError("a known tensor has no origin; please report it")
    return origin.value
