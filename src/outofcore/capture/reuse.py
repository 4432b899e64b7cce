"""Elementwise ops that write their result over an argument nobody needs any more.

``a + b`` asks for fresh memory even where ``a`` is never looked at again. Written over ``a`` instead, element by
element, it computes the same bits, holds two tensors where there were three, and spares the processor from fetching
memory only to overwrite it. Autograd does so itself where it sums up gradients, but not while it is being traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from outofcore._torch_internals import OpOverload, OpOverloadPacket
from outofcore.analysis import LARGE_BYTES
from outofcore.capture.captured import Call, Captured, Ref
from outofcore.graph import Op, StepGraph, StorageKind

# What may be written over: what the step itself has made, and what nobody sees when it ends.
_PASSING = frozenset({StorageKind.ACTIVATION, StorageKind.GRADIENT})


@dataclass(frozen=True)
class _Over:
    """Runs the overload of an op that is told where to put its result."""

    run: OpOverload
    out: str | None  # what it calls the tensor that it writes its result to; None: it is always the first argument
    place: int  # of the argument that is written over

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.out is None:
            return self.run(*args, **kwargs)
        return self.run(*args, **kwargs, **{self.out: args[self.place]})


@dataclass(frozen=True)
class _Reuse:
    """That an op writes its result over one of its arguments."""

    call: Call
    place: int  # of that argument
    kept: int  # the storage that is written over
    gone: int  # the storage that the op created


def reuse(captured: Captured, *, least: int = LARGE_BYTES) -> Captured:
    """The same step, to the bit, in which large results of elementwise ops lie where an argument lay.

    An argument is written over if this is its last use, the step has made it, and it is laid out as the result is.

    Args:
        captured: the step.
        least: results of fewer bytes than this have memory of their own.
    """
    graph = captured.graph
    into: dict[int, int] = {}  # a storage that is gone, and the one in its place
    ops: list[Op] = []
    calls: list[Call] = []
    for op, call in zip(graph.ops, captured.calls, strict=True):
        found = _reuse_in(captured, op, call, least)
        if found is None:
            ops.append(op)
            calls.append(call)
            continue
        into[found.gone] = into.get(found.kept, found.kept)
        family = f"{op.family}, over argument {found.place}" if op.family else ""
        ops.append(replace(op, mutates=(*op.mutates, found.kept), creates=(), family=family))
        calls.append(found.call)
    return _merged(captured, ops, calls, into) if into else captured


def _reuse_in(captured: Captured, op: Op, call: Call, least: int) -> _Reuse | None:
    graph, values = captured.graph, captured.values
    func = call.func
    if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags:
        return None
    if len(op.creates) != 1 or op.mutates or op.random or len(call.results) != 1 or call.results[0] is None:
        return None
    ways = _told_where(func)
    result = values[call.results[0]]
    gone = op.creates[0]
    if not ways or gone in graph.outputs or graph.storages[gone].bytes < least:
        return None
    refs = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Ref)]
    for place, item in enumerate(call.args):
        if not isinstance(item, Ref) or (ways[0].out is None and place != 0):
            continue
        value = values[item.value]
        kept = value.storage
        if (
            (value.dtype, value.layout()) == (result.dtype, result.layout())
            and graph.storages[kept].bytes == graph.storages[gone].bytes
            and graph.storages[kept].kind in _PASSING
            and kept in graph.creator
            and kept not in graph.outputs
            and graph.uses[kept][-1] == op.id
            and sum(values[ref.value].storage == kept for ref in refs) == 1
        ):
            return _Reuse(replace(call, func=replace(ways[0], place=place), results=(None,)), place, kept, gone)
    return None


def _told_where(func: OpOverload) -> list[_Over]:
    """How to run an op with its result in a given place: in any, or in that of its first argument only."""
    packet = func._overloadpacket
    found = [_Over(other, outs[0], -1) for other, outs in _alike(func, packet) if len(outs) == 1]
    in_place = getattr(torch.ops.aten, f"{packet.__name__}_", None)
    if not found and in_place is not None:
        found = [_Over(other, None, 0) for other, outs in _alike(func, in_place) if not outs]
    return found


def _alike(func: OpOverload, packet: OpOverloadPacket) -> Iterator[tuple[OpOverload, list[str]]]:
    """The overloads of a packet with the arguments of an op, and the names of those that they add for results."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = other._schema.arguments
        same = [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted
        # Those generated from the plain overload compute elsewhere and then copy.
        if same and torch.Tag.generated not in other.tags:
            yield other, [a.name for a in arguments if a.is_out]


def _merged(captured: Captured, ops: list[Op], calls: list[Call], into: dict[int, int]) -> Captured:
    """The capture without the storages that are gone."""
    graph = captured.graph
    left = [storage for storage in graph.storages if storage.id not in into]
    number = {storage.id: index for index, storage in enumerate(left)}
    number |= {gone: number[kept] for gone, kept in into.items()}

    def all_of(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number[s] for s in storages))

    renumbered = tuple(
        replace(
            op,
            reads=all_of(op.reads),
            mutates=all_of(op.mutates),
            creates=all_of(op.creates),
            discards=all_of(op.discards),
        )
        for op in ops
    )
    merged = StepGraph(
        tuple(replace(storage, id=number[storage.id]) for storage in left), renumbered, all_of(graph.outputs)
    )
    merged.check()
    return replace(
        captured,
        graph=merged,
        calls=tuple(calls),
        values=tuple(replace(value, storage=number[value.storage]) for value in captured.values),
        constants={number[storage]: tensor for storage, tensor in captured.constants.items()},
    )
