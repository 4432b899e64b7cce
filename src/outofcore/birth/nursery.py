"""The mode under which parameters are made and initialised at home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from outofcore._torch_internals import TorchDispatchMode, shares_storage, storage_bytes, storage_key, tensor_leaves
from outofcore.analysis import is_large
from outofcore.execution.aliases import Faces
from outofcore.units import MIB

# How many bytes of faces may be in memory before their pages are let go.
_TOUCHED_BYTES = 16 * MIB


class Nursery(TorchDispatchMode):
    """Lets the pages of tensors that live at home go soon after ops have used them, and sees which were written.

    Ops run as they do without it, so that a generator gives the same numbers. A face is pages of a file
    mapped into memory: they count as the process's own until they are let go.

    Args:
        faces: of the home; None: of no home.
    """

    def __init__(self, faces: Faces | None) -> None:
        super().__init__()
        self._faces = faces
        self._touched: dict[int, torch.Tensor] = {}
        self._bytes = 0
        self._watched: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        used = tensor_leaves([*args, *named.values()])
        if self._watched:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else named.get(argument.name)
                    self._watched.difference_update(map(storage_key, tensor_leaves([value])))
        for tensor in used:
            self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        if self._faces is None or self._faces.find(tensor) is None:
            return
        key = storage_key(tensor)
        if key not in self._touched:
            self._touched[key] = tensor
            self._bytes += tensor.untyped_storage().nbytes()
        if self._bytes > _TOUCHED_BYTES:
            self.rest()

    def rest(self) -> None:
        """Let all pages go."""
        if self._faces is not None:
            for tensor in self._touched.values():
                self._faces.drop_cache(tensor)
        self._touched.clear()
        self._bytes = 0

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """See from now on which of these tensors are written to."""
        self._watched.update(map(storage_key, tensors))

    def unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has been written to a tensor's storage since it is watched."""
        return storage_key(tensor) in self._watched


def can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of those that live at home: large, dense, on the CPU."""
    return (
        not is_lazy(tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and is_large(tensor.untyped_storage().nbytes())
    )


def move_home(tensors: Sequence[torch.Tensor], faces: Faces) -> None:
    """Move tensors that share one storage to their home.

    Raises:
        SpillError: it has no room.
    """
    old = storage_bytes(tensors[0])
    face = faces.birth(old.numel())
    face.copy_(old)
    for tensor in tensors:
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(face.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has a tensor's memory, so that it can be moved without being torn from another."""
    return not shares_storage(tensor)
