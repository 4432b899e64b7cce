"""The record of a trace: the storages and values seen, and the ops in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from outofcore._torch_internals import storage_key
from outofcore.analysis.chunks import is_dense
from outofcore.capture.captured import CPU, Call, Value
from outofcore.capture.device_traits import are_alike
from outofcore.errors import CaptureError
from outofcore.graph import Op, StorageKind


@dataclass
class TracedStorage:
    """A storage as the trace knows it.

    Attributes:
        fake: the storage of the fake tensors, held so that no other can get its address. None for a
            constant, of which only the real tensor exists.
        created: whether an op of the step creates it.
    """

    bytes: int
    kind: StorageKind
    name: str
    fake: torch.UntypedStorage | None
    created: bool = False


@dataclass
class Tables:
    """The storages, values and ops of one trace.

    It describes tensors by their ``Value`` and holds none: autograd decides by the number of references to a gradient
    whether to steal it or to add to it.
    """

    device: torch.device = CPU  # where the step runs
    storages: list[TracedStorage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[tuple[Op, Call]] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)  # names of the classes of modules, by their paths
    optional: set[int] = field(default_factory=set)  # places of ops that are left out if nobody looks at what they make
    _by_key: dict[int, int] = field(default_factory=dict)
    _by_value: dict[Value, int] = field(default_factory=dict)

    def known(self, tensor: torch.Tensor) -> int | None:
        """Return the storage of a fake tensor, or None if no op and no mirror registered it."""
        return self._by_key.get(storage_key(tensor))

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the storage of a fake tensor; raises ``CaptureError`` if it is not registered."""
        found = self.known(tensor)
        if found is None:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} came into the step by a way that the capture does not see: "
                "an extension made it without a registered operator; make it before the step and pass it as an argument"
            )
        return found

    def add(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> int:
        """Register the storage of a fake tensor."""
        fake = tensor.untyped_storage()
        self.storages.append(TracedStorage(fake.nbytes(), kind, name, fake))
        self._by_key[storage_key(tensor)] = len(self.storages) - 1
        return len(self.storages) - 1

    def add_plain(self, count: int, kind: StorageKind, name: str) -> int:
        """Register a storage of ``count`` bytes that has no fake tensor."""
        self.storages.append(TracedStorage(count, kind, name, None))
        return len(self.storages) - 1

    def add_constant(self, tensor: torch.Tensor, name: str) -> int:
        """Register the storage of a real tensor whose contents are baked into the step."""
        count = tensor.untyped_storage().nbytes()
        storage = self.add_plain(count, StorageKind.CONSTANT, name)
        self.constants[storage] = tensor
        return storage

    def value(self, value: Value) -> int:
        """Return the index of a value, registering a new one."""
        index = self._by_value.get(value)
        if index is None:
            index = self._by_value[value] = len(self.values)
            self.values.append(value)
        return index

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the index of a fake tensor's value."""
        return self.value(describe(tensor, self.storage_of(tensor), self.device))

    def source_of(self, tensor: torch.Tensor) -> str:
        """Return the user's line of the op that made a fake tensor's storage; empty if none did."""
        storage = self.known(tensor)
        return next((op.source for op, _ in self.ops if storage in op.creates), "")

    def append(
        self,
        name: str,
        call: Call,
        reads: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        creates: tuple[int, ...] = (),
        **other: Any,
    ) -> int:
        """Record an op and return its place in ``ops``; ``other`` are fields of ``Op``."""
        kind = self.classes.get(other.get("module", ""), "")
        self.ops.append((Op(len(self.ops), name, reads, mutates, creates, module_class=kind, **other), call))
        for storage in creates:
            self.storages[storage].created = True
        return len(self.ops) - 1


def describe(tensor: torch.Tensor, storage: int, device: torch.device) -> Value:
    """Return the value of a tensor, in a step that runs on ``device``."""
    offset, foreign = int(tensor.storage_offset()), not are_alike(tensor.device, device)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Value(storage, tensor.dtype, shape, stride, offset, foreign, tensor.is_conj(), tensor.is_neg())


def covers(value: Value, count: int) -> bool:
    """Return whether a value's elements cover all ``count`` bytes of its storage, each once."""
    if prod(value.shape) * value.dtype.itemsize != count or value.offset != 0:
        return False
    return is_dense(value.shape, value.stride)


def map_leaves(tree: Any, change: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """Replace each leaf of a type in a tree of lists, tuples and dicts."""
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
    """Return the leaves of a type in a tree of lists, tuples, sets and dicts, in order."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple | set | frozenset):
        return []
    return [leaf for item in tree for leaf in leaves_in(item, kind)]
