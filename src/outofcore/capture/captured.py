"""The result of a capture: the graph, and what is needed to run its ops again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

import torch

from outofcore.analysis import SMALL_ALIGNMENT, is_large
from outofcore.analysis.boxes import Window
from outofcore.capture.effects import Effect
from outofcore.capture.reads import Reads
from outofcore.capture.replicas import ReplicaEnd
from outofcore.graph import Op, StepGraph, StorageKind
from outofcore.units import round_up

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a window onto a storage: everything but the bytes."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    offset: int = 0  # in elements, from the start of the storage
    foreign: bool = False  # on the CPU, in a step that runs on another device
    conjugate: bool = False  # the bytes are those of the complex conjugate: a lazy ``conj()``
    negated: bool = False  # the bytes are those of the negative: such as the ``imag`` of a lazy conjugate

    def layout(self) -> tuple[object, ...]:
        """Return the layout within its storage, whichever storage that is."""
        return self.shape, self.stride, self.offset, self.conjugate, self.negated

    def window(self) -> Window:
        return Window(self.shape, self.stride, self.offset)

    def is_laid_like(self, other: Value) -> bool:
        """Return whether two values differ only in their place."""
        return (self.dtype, self.shape, self.stride) == (other.dtype, other.shape, other.stride)

    def merged(self, dims: tuple[int, int]) -> Value | None:
        """Merge the dimensions ``dims[0]`` to before ``dims[1]`` into one; None if they do not follow each other."""
        first, end = dims
        kept = [d for d in range(first, end) if self.shape[d] != 1] or [end - 1]
        if any(self.stride[a] != self.stride[b] * self.shape[b] for a, b in pairwise(kept)):
            return None
        shape = (*self.shape[:first], prod(self.shape[first:end]), *self.shape[end:])
        return replace(self, shape=shape, stride=(*self.stride[:first], self.stride[kept[-1]], *self.stride[end:]))

    def narrowed(self, dim: int, low: int, high: int) -> Value:
        """Return the slice ``low:high`` along a dimension."""
        shape = (*self.shape[:dim], high - low, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + low * self.stride[dim])


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for the tensor of a value in the arguments of a call."""

    value: int


@dataclass(frozen=True)
class Call:
    """How to run one op of the graph.

    ``func`` is called as ``func(*args, **kwargs)`` with tensors in place of each ``Ref``, also inside lists and tuples.
    ``results`` has an entry for each flattened leaf that ``func`` returns: the index of its value if the op creates the
    leaf's storage, else None (an alias of an argument, undefined, or no tensor). ``rehearse`` replaces ``func`` when
    the op is only measured on scratch tensors; ``rehearse_first`` does so if its first run allocates differently from
    later ones.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    rehearse: Callable[..., Any] | None = None
    rehearse_first: Callable[..., Any] | None = None


@dataclass(frozen=True)
class InputBinding:
    leaf: int
    value: int


@dataclass(frozen=True)
class StateBinding:
    """A tensor that persists across steps, and where the user sees it.

    ``key`` is unique and stable across captures of the same step, such as "optimizer.0.state.model.0.weight.exp_avg".
    ``tensor`` is the user's own object, or None before it exists (optimizer state before its first step). ``owner``
    names the parameter of optimizer state; see ``capture.optimizers``.
    """

    key: str
    kind: StorageKind
    tensor: torch.Tensor | None
    value: int
    owner: Any = None


class LeafKind(Enum):
    VALUE = "value"  # a tensor computed in the step: ``index`` is its value
    STATE = "state"  # a tensor of the user's own state: ``index`` is its place in ``Captured.states``
    INPUT = "input"  # an input handed through: ``index`` is the leaf of the inputs
    CONSTANT = "constant"  # not a tensor: ``constant`` is returned as it is


@dataclass(frozen=True)
class OutputLeaf:
    kind: LeafKind
    index: int = -1
    constant: Any = None


@dataclass(frozen=True)
class GradientLeft:
    """A gradient that the step creates and leaves in ``.grad`` when it ends (kind GRADIENT, in graph.outputs)."""

    parameter: int  # place in ``Captured.states``
    value: int


@dataclass(frozen=True)
class StateRange:
    """The place of a STATE_RANGE storage: an offset in bytes into the storage ``whole``."""

    whole: int  # its storage, which no op of the step touches
    offset: int  # in bytes


@dataclass(frozen=True)
class Captured:
    """One training step, captured for one signature of inputs and state.

    ``graph.outputs`` holds the storages of VALUE leaves and of ``gradients_left``. ``gradients_cleared`` holds places
    in ``states`` of parameters whose ``.grad`` is None after the step.

    Attributes:
        constants: real tensors baked into the step, by storage id.
        alignment: of blocks below 64 KiB, and of scratch memory, in bytes.
        exact: bytes of the storages that have been rounded up in ``graph``.
        ranges: where storages of kind STATE_RANGE lie; ranges begin and end at pages, or with the whole storage.
        effects: changes of Python objects, to be made again after each run of the step.
    """

    graph: StepGraph
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: tuple[InputBinding, ...]
    states: tuple[StateBinding, ...]
    gradients_left: tuple[GradientLeft, ...]
    gradients_cleared: tuple[int, ...]
    constants: dict[int, torch.Tensor]
    outputs: tuple[OutputLeaf, ...]
    output_spec: Any
    device: torch.device = CPU
    alignment: int = SMALL_ALIGNMENT
    exact: Mapping[int, int] = field(default_factory=dict[int, int])
    ranges: Mapping[int, StateRange] = field(default_factory=dict[int, StateRange])
    replicas: tuple[ReplicaEnd, ...] = ()
    reads: Reads = field(default_factory=Reads)
    effects: tuple[Effect, ...] = ()

    def is_alike(self, other: Captured) -> bool:
        """Return whether the captures differ only in numbers that ops are given, so that one plan can run both."""

        def told(captured: Captured) -> tuple[object, ...]:
            ops = [replace(op, source="", family="") for op in captured.graph.ops]
            states = [(binding.key, binding.value) for binding in captured.states]
            rest = (captured.inputs, captured.gradients_left, captured.gradients_cleared, captured.alignment)
            return captured.graph.storages, ops, captured.graph.outputs, captured.values, states, rest

        return len(self.graph.ops) == len(other.graph.ops) and told(self) == told(other)

    def own_bytes(self, storage: int) -> int:
        """Return the exact bytes of a storage, without rounding for the arena."""
        return self.exact.get(storage, self.graph.storages[storage].bytes)

    def aligned(self, alignment: int) -> Captured:
        """Round storages below 64 KiB up, so that blocks begin at multiples of ``alignment``.

        Kernels may be chosen by how pointers are aligned, and another kernel may give other bits.
        """
        exact = {s.id: s.bytes for s in self.graph.storages if not is_large(round_up(s.bytes, alignment))}
        storages = tuple(
            replace(s, bytes=round_up(s.bytes, alignment)) if s.id in exact else s for s in self.graph.storages
        )
        graph = StepGraph(storages, self.graph.ops, self.graph.outputs)
        return replace(self, graph=graph, alignment=alignment, exact=exact)


def with_ops(captured: Captured, pairs: Iterable[tuple[Op, Call]]) -> Captured:
    """Return the capture with other ops, numbered in their order."""
    found = list(pairs)
    graph = captured.graph
    ops = tuple(op if op.id == index else replace(op, id=index) for index, (op, _) in enumerate(found))
    return replace(
        captured, graph=StepGraph(graph.storages, ops, graph.outputs), calls=tuple(call for _, call in found)
    )
