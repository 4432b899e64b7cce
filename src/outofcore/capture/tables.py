"""The storages, values and ops of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import storage_key
from outofcore.analysis.chunks import is_dense
from outofcore.capture.captured import CPU, Call, Value
from outofcore.capture.device_traits import have_same_type
from outofcore.errors import CaptureError
from outofcore.graph import Op, StorageKind


@dataclass
class TracedStorage:
    bytes: int
    kind: StorageKind
    name: str
    # The storage of the fake tensors, kept alive so that its address is not reused. None for a constant, which has only
    # a real tensor.
    fake: torch.UntypedStorage | None
    created: bool = False  # an op of the step creates it


@dataclass
class Tables:
    """The storages, values and ops that a capture has recorded so far."""

    # Autograd decides by a gradient's reference count whether to steal it, so tensors must not be held here.
    device: torch.device = CPU  # where the step runs
    storages: list[TracedStorage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[tuple[Op, Call]] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    module_classes: Mapping[str, str] = field(default_factory=dict)  # names of module classes, by module path
    optional_ops: set[int] = field(default_factory=set)  # indices of ops that are dropped if their results are unused
    _by_key: dict[int, int] = field(default_factory=dict)
    _by_value: dict[Value, int] = field(default_factory=dict)

    def find_storage(self, tensor: torch.Tensor) -> int | None:
        return self._by_key.get(storage_key(tensor))

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a fake tensor's storage; raise ``CaptureError`` if it is not registered."""
        storage = self.find_storage(tensor)
        if storage is None:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} was created without a registered operator: the capture "
                "cannot trace it; create it before the step and pass it as an argument, or register the operator with "
                "torch.library"
            )
        return storage

    def add(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> int:
        """Register the storage of a fake tensor, and return its number."""
        fake = tensor.untyped_storage()
        self.storages.append(TracedStorage(fake.nbytes(), kind, name, fake))
        self._by_key[storage_key(tensor)] = len(self.storages) - 1
        return len(self.storages) - 1

    def add_storage(self, count: int, kind: StorageKind, name: str) -> int:
        self.storages.append(TracedStorage(count, kind, name, None))
        return len(self.storages) - 1

    def add_constant(self, tensor: torch.Tensor, name: str) -> int:
        count = tensor.untyped_storage().nbytes()
        storage = self.add_storage(count, StorageKind.CONSTANT, name)
        self.constants[storage] = tensor
        return storage

    def index_of(self, value: Value) -> int:
        """Return the index of a value, and register the value if it is new."""
        index = self._by_value.get(value)
        if index is None:
            index = self._by_value[value] = len(self.values)
            self.values.append(value)
        return index

    def value_of(self, tensor: torch.Tensor) -> int:
        return self.index_of(describe(tensor, self.storage_of(tensor), self.device))

    def source_of(self, tensor: torch.Tensor) -> str:
        """Return the user's ``file:line`` of the op that created a fake tensor's storage, or an empty string."""
        storage = self.find_storage(tensor)
        return next((op.source for op, _ in self.ops if storage in op.creates), "")

    def append(
        self,
        name: str,
        call: Call,
        reads: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        creates: tuple[int, ...] = (),
        **fields: Any,
    ) -> int:
        """Record an op and return its index; ``fields`` are further fields of ``Op``."""
        kind = self.module_classes.get(fields.get("module", ""), "")
        self.ops.append((Op(len(self.ops), name, reads, mutates, creates, module_class=kind, **fields), call))
        for storage in creates:
            self.storages[storage].created = True
        return len(self.ops) - 1


def describe(tensor: torch.Tensor, storage: int, device: torch.device) -> Value:
    """Return the ``Value`` of a tensor on a storage, in a step that runs on ``device``."""
    offset, foreign = int(tensor.storage_offset()), not have_same_type(tensor.device, device)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Value(storage, tensor.dtype, shape, stride, offset, foreign, tensor.is_conj(), tensor.is_neg())


def covers(value: Value, count: int) -> bool:
    """Return whether a value's elements cover all ``count`` bytes of its storage, each once."""
    if prod(value.shape) * value.dtype.itemsize != count or value.offset != 0:
        return False
    return is_dense(value.shape, value.stride)


def map_leaves(tree: Any, change: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """Return a copy of nested lists, tuples and dicts with ``change`` applied to each object of type ``kind``."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, list):
        return [map_leaves(item, change, kind) for item in tree]
    if isinstance(tree, tuple):
        items = [map_leaves(item, change, kind) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, dict):
        return {key: map_leaves(item, change, kind) for key, item in tree.items()}
    return tree


def leaves_in(tree: Any, kind: type[Any] = torch.Tensor) -> list[Any]:
    """Return the objects of type ``kind`` in nested lists, tuples, sets and dicts, in order."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple | set | frozenset):
        return []
    return [leaf for item in tree for leaf in leaves_in(item, kind)]
