"""The result of a capture: the graph, and the calls and bindings that run its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

import torch

from outofcore.analysis import SMALL_ALIGNMENT, is_large
from outofcore.analysis.boxes import TensorWindow
from outofcore.capture.effects import Effect
from outofcore.capture.reads import Reads
from outofcore.capture.replicas import ReplicaEnd
from outofcore.graph import Op, StepGraph, StorageKind
from outofcore.units import round_up

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Value:
    """The metadata of a tensor: its storage, dtype, shape, strides and offset."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    offset: int = 0  # in elements, from the start of the storage
    foreign: bool = False  # on the CPU, while the step runs on another device
    conjugate: bool = False  # the bytes hold the complex conjugate: a lazy ``conj()``
    negated: bool = False  # the bytes hold the negative, as for the ``imag`` of a lazy conjugate

    def layout(self) -> tuple[object, ...]:
        return self.shape, self.stride, self.offset, self.conjugate, self.negated

    def window(self) -> TensorWindow:
        return TensorWindow(self.shape, self.stride, self.offset)

    def has_same_layout(self, other: Value) -> bool:
        """Return whether dtype, shape and strides are equal; storage and offset may differ."""
        return (self.dtype, self.shape, self.stride) == (other.dtype, other.shape, other.stride)

    def merge_dims(self, dims: tuple[int, int]) -> Value | None:
        """Return the value with dimensions ``range(*dims)`` merged into one; None if its strides do not allow it."""
        first, end = dims
        long_dims = [d for d in range(first, end) if self.shape[d] != 1] or [end - 1]
        if any(self.stride[a] != self.stride[b] * self.shape[b] for a, b in pairwise(long_dims)):
            return None
        shape = (*self.shape[:first], prod(self.shape[first:end]), *self.shape[end:])
        return replace(self, shape=shape, stride=(*self.stride[:first], self.stride[long_dims[-1]], *self.stride[end:]))

    def narrow(self, dim: int, low: int, high: int) -> Value:
        shape = (*self.shape[:dim], high - low, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + low * self.stride[dim])


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for the tensor of a value in the arguments of a call."""

    value: int


@dataclass(frozen=True)
class Call:
    """The call that runs one op of the graph.

    ``func(*args, **kwargs)`` gets a tensor in place of each ``Ref``, also inside lists and tuples. ``results`` has one
    entry per flattened result: the index of its value if the op creates the storage, else None.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    rehearse: Callable[..., Any] | None = None  # replaces ``func`` when the op is measured on scratch tensors
    rehearse_first: Callable[..., Any] | None = None  # its first run, if that allocates differently


@dataclass(frozen=True)
class InputBinding:
    leaf: int  # index of the tensor among the flattened arguments
    value: int


@dataclass(frozen=True)
class StateBinding:
    """A persistent tensor that the step uses, with its key, its value index and its owner."""

    key: str  # unique and stable across captures, such as "optimizer.0.state.model.0.weight.exp_avg"
    kind: StorageKind
    tensor: torch.Tensor | None  # the user's object; None for optimizer state before the first step
    value: int
    owner: Any = None  # the ``StateOwner`` of optimizer state


class LeafKind(Enum):
    VALUE = "value"  # a tensor computed in the step; ``index`` is its value
    STATE = "state"  # a tensor of the user's state; ``index`` is its index in ``Captured.states``
    INPUT = "input"  # an input, returned unchanged; ``index`` is its leaf in the inputs
    CONSTANT = "constant"  # no tensor; ``constant`` is returned


@dataclass(frozen=True)
class OutputLeaf:
    kind: LeafKind
    index: int = -1
    constant: Any = None


@dataclass(frozen=True)
class GradientLeft:
    """A gradient that the step creates and leaves in ``.grad``. Its storage is among ``graph.outputs``."""

    parameter: int  # index in ``Captured.states``
    value: int


@dataclass(frozen=True)
class StateRange:
    """The position of a storage of kind STATE_RANGE within a larger storage."""

    whole: int  # a storage that no op of the step touches
    offset: int  # in bytes


@dataclass(frozen=True)
class Captured:
    """A training step as a graph of ops, captured for one input signature."""

    graph: StepGraph  # its outputs are the storages of VALUE leaves and of ``gradients_left``
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: tuple[InputBinding, ...]
    states: tuple[StateBinding, ...]
    gradients_left: tuple[GradientLeft, ...]
    gradients_cleared: tuple[int, ...]  # parameters without ``.grad`` after the step, by index in ``states``
    constants: dict[int, torch.Tensor]  # real tensors, by storage
    outputs: tuple[OutputLeaf, ...]
    output_spec: Any
    device: torch.device = CPU
    alignment: int = SMALL_ALIGNMENT  # in bytes, of scratch memory and blocks below 64 KiB
    # Unrounded bytes of the storages that ``graph`` rounds up.
    exact: Mapping[int, int] = field(default_factory=dict[int, int])
    # Positions of STATE_RANGE storages. Ranges begin and end at page boundaries, or with the whole storage.
    ranges: Mapping[int, StateRange] = field(default_factory=dict[int, StateRange])
    replicas: tuple[ReplicaEnd, ...] = ()
    reads: Reads = field(default_factory=Reads)
    effects: tuple[Effect, ...] = ()  # changes of Python objects, to repeat after each run

    def can_share_plan(self, other: Captured) -> bool:
        """Return whether a plan for this capture can also run ``other``."""

        def facts(captured: Captured) -> tuple[object, ...]:
            ops = [replace(op, source="", family="") for op in captured.graph.ops]
            states = [(binding.key, binding.value) for binding in captured.states]
            bindings = (captured.inputs, captured.gradients_left, captured.gradients_cleared, captured.alignment)
            return captured.graph.storages, ops, captured.graph.outputs, captured.values, states, bindings

        return len(self.graph.ops) == len(other.graph.ops) and facts(self) == facts(other)

    def unrounded_bytes(self, storage: int) -> int:
        return self.exact.get(storage, self.graph.storages[storage].bytes)

    def align_to(self, alignment: int) -> Captured:
        """Return a copy with the sizes of small storages rounded up to multiples of ``alignment`` bytes."""
        # Kernels may depend on pointer alignment, and another kernel may give other bits.
        exact = {s.id: s.bytes for s in self.graph.storages if not is_large(round_up(s.bytes, alignment))}
        storages = tuple(
            replace(s, bytes=round_up(s.bytes, alignment)) if s.id in exact else s for s in self.graph.storages
        )
        graph = StepGraph(storages, self.graph.ops, self.graph.outputs)
        return replace(self, graph=graph, alignment=alignment, exact=exact)


def with_ops(captured: Captured, pairs: Iterable[tuple[Op, Call]]) -> Captured:
    """Return a copy of a capture with the ops and calls in ``pairs``, renumbered in that order."""
    op_calls = list(pairs)
    graph = captured.graph
    ops = tuple(op if op.id == index else replace(op, id=index) for index, (op, _) in enumerate(op_calls))
    return replace(
        captured, graph=StepGraph(graph.storages, ops, graph.outputs), calls=tuple(call for _, call in op_calls)
    )
