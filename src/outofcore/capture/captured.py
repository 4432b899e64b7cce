"""What a capture hands to the rest: the graph, and what is needed to run its ops again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

import torch

from outofcore.analysis import SMALL_ALIGNMENT, is_large
from outofcore.capture.effects import Effect
from outofcore.capture.reads import Reads
from outofcore.capture.replicas import ReplicaEnd
from outofcore.graph import StepGraph, StorageKind
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
        """How it lies in its storage, whichever that is."""
        return self.shape, self.stride, self.offset, self.conjugate, self.negated

    def merged(self, dims: tuple[int, int]) -> Value | None:
        """With the dimensions from the first to before the last as one; None where they do not follow each other."""
        first, end = dims
        kept = [d for d in range(first, end) if self.shape[d] != 1] or [end - 1]
        if any(self.stride[a] != self.stride[b] * self.shape[b] for a, b in pairwise(kept)):
            return None
        shape = (*self.shape[:first], prod(self.shape[first:end]), *self.shape[end:])
        return replace(self, shape=shape, stride=(*self.stride[:first], self.stride[kept[-1]], *self.stride[end:]))

    def narrowed(self, dim: int, low: int, high: int) -> Value:
        """The part from ``low`` to before ``high`` along a dimension."""
        shape = (*self.shape[:dim], high - low, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + low * self.stride[dim])


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in the arguments of a call for the tensor of a value."""

    value: int


@dataclass(frozen=True)
class Call:
    """How to run one op of the graph.

    Attributes:
        func: called as ``func(*args, **kwargs)`` with tensors in place of each ``Ref``. Every other
            argument is a constant; refs may stand inside lists and tuples.
        results: for each leaf of what ``func`` returns, nested lists and tuples flattened in order, the index of
            its value if it is a tensor whose storage this op creates, else None (it aliases an argument, is left
            undefined, or is no tensor).
        rehearse: called in place of ``func``, with the same arguments, when the op is only measured
            on scratch tensors. None: ``func`` itself has no effect beyond its arguments.
        rehearse_first: likewise, if its first run asks for other memory than later ones; else None.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    rehearse: Callable[..., Any] | None = None
    rehearse_first: Callable[..., Any] | None = None


@dataclass(frozen=True)
class InputBinding:
    """Leaf ``leaf`` of the flattened ``(args, kwargs)`` of the step arrives as ``value``."""

    leaf: int
    value: int


@dataclass(frozen=True)
class StateBinding:
    """A tensor that persists across steps, and where the user sees it.

    Attributes:
        key: unique and stable across captures of the same step, such as "model.0.weight",
            "optimizer.0.state.model.0.weight.exp_avg", "model.0.weight.grad".
        kind: PARAMETER, BUFFER, GRADIENT or OPTIMIZER_STATE.
        tensor: the user's own tensor (the Parameter object itself, the buffer, the state tensor), or
            None where it does not exist yet (optimizer state before its first step).
        value: the whole tensor as a window onto its storage.
        owner: for optimizer state the parameter it belongs to, with optimizer and name; see
            ``capture.optimizers``. None otherwise.
    """

    key: str
    kind: StorageKind
    tensor: torch.Tensor | None
    value: int
    owner: Any = None


class LeafKind(Enum):
    """Where a leaf of the step's return value comes from."""

    VALUE = "value"  # a tensor computed in the step: ``index`` is its value
    STATE = "state"  # a tensor of the user's own state: ``index`` is its place in ``Captured.states``
    INPUT = "input"  # an input handed through: ``index`` is the leaf of the inputs
    CONSTANT = "constant"  # not a tensor: ``constant`` is returned as it is


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the step's return value."""

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
    """Where the bytes of a storage of kind STATE_RANGE lie: in the storage of a state, from an offset on."""

    whole: int  # its storage, which no op of the step touches
    offset: int  # in bytes


@dataclass(frozen=True)
class Captured:
    """One training step, captured for one signature of inputs and state.

    Attributes:
        graph: the step. ``graph.outputs`` holds the storages of VALUE leaves and of ``gradients_left``.
        calls: one for each op, in order.
        values: at the index that a ``Ref`` names.
        inputs: which leaves of the arguments are tensors that the step uses.
        states: all persistent storages, by key order of first appearance.
        gradients_left: gradients that the user finds in ``.grad`` after the step.
        gradients_cleared: places in ``states`` of parameters whose ``.grad`` is None after the step.
        constants: real tensors baked into the step, by storage id.
        outputs, output_spec: the step's return value, flattened by ``torch.utils._pytree``.
        device: where the step runs.
        alignment: of blocks below 64 KiB, and of scratch memory, in bytes.
        exact: bytes of the storages that have been rounded up in ``graph``.
        ranges: what the storages of kind STATE_RANGE are part of. These begin and end at pages, or where that ends.
        replicas: what the step does with each ``DistributedDataParallel``.
        reads: the code that ran.
        effects: what it changed outside of tensors, to be done again when the step has run.
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
        """Whether another capture differs at most in numbers that ops are given, and so can be run by the same plan."""

        def told(captured: Captured) -> tuple[object, ...]:
            ops = [replace(op, source="", family="") for op in captured.graph.ops]
            states = [(binding.key, binding.value) for binding in captured.states]
            rest = (captured.inputs, captured.gradients_left, captured.gradients_cleared, captured.alignment)
            return captured.graph.storages, ops, captured.graph.outputs, captured.values, states, rest

        return len(self.graph.ops) == len(other.graph.ops) and told(self) == told(other)

    def own_bytes(self, storage: int) -> int:
        """The bytes of a storage outside of the arena."""
        return self.exact.get(storage, self.graph.storages[storage].bytes)

    def aligned(self, alignment: int) -> Captured:
        """The same step with storages below 64 KiB rounded up, so that blocks begin at multiples of ``alignment``.

        Kernels may be chosen by how pointers are aligned, and another kernel may give other bits.
        """
        exact = {s.id: s.bytes for s in self.graph.storages if not is_large(round_up(s.bytes, alignment))}
        storages = tuple(
            replace(s, bytes=round_up(s.bytes, alignment)) if s.id in exact else s for s in self.graph.storages
        )
        graph = StepGraph(storages, self.graph.ops, self.graph.outputs)
        return replace(self, graph=graph, alignment=alignment, exact=exact)
